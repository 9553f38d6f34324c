"""The quicker GELU has the numbers of the exact one."""

import torch
from torch.nn import functional

from electra.model.activation import QuickGelu, gelu


def test_the_quick_gelu_is_the_exact_one_but_for_the_last_digits():
    numbers = torch.linspace(-9, 9, 20_001, requires_grad=True)
    exact = functional.gelu(numbers)
    torch.testing.assert_close(QuickGelu.apply(numbers), exact, rtol=1e-6, atol=2e-6)
    (slope,) = torch.autograd.grad(exact.sum(), numbers)
    torch.testing.assert_close(
        torch.autograd.grad(QuickGelu.apply(numbers).sum(), numbers)[0], slope, rtol=1e-6, atol=1e-6
    )


def test_full_precision_is_always_exact():
    numbers = torch.linspace(-3, 3, 100)
    assert torch.equal(gelu(numbers), functional.gelu(numbers))
