"""GELU behind a linear layer, and with a gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks

from electra.kernels.dispatch import HAS_TRITON, is_for_kernels

if HAS_TRITON:
    from electra.kernels.geglu import gated_gelu
    from electra.kernels.gelu import biased_gelu


def plain_gelu_of(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """x · Φ(x) of what a linear layer gives, with the exact (erf) Φ; in its place where neither a gradient nor a hook
    asks for that, which spares a CPU the new memory."""
    number = linear(hidden)  # of another kind of layer it may be somebody's, too
    is_asked_for = linear._forward_hooks or _global_forward_hooks or type(linear) is not nn.Linear
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_asked_for:
        return functional.gelu(number)
    return torch.ops.aten.gelu_(number)


def gelu_of(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """The same, in half precision within its rounding."""
    if linear.bias is None or not is_for_kernels(hidden):
        return plain_gelu_of(linear, hidden)
    return biased_gelu(functional.linear(hidden, linear.weight), linear.bias)


def gated_gelu_of(product: Tensor) -> Tensor:
    """GELU of the first half of `product` [..., 2 · F] times the second: [..., F]."""
    if is_for_kernels(product):
        return gated_gelu(product)
    wide, gate = product.chunk(2, dim=-1)
    return functional.gelu(wide) * gate
