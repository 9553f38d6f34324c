"""GELU, and a quicker way to the same numbers for compiled half precision."""

import math

import torch
from torch import Tensor
from torch.nn import functional

STEEPNESS = 0.3275911 / math.sqrt(2)  # Abramowitz and Stegun, 7.1.26: erf within 1.5e-7, by one exponential
COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def gelu(hidden: Tensor) -> Tensor:
    """x · Φ(x), with the exact (erf) Φ.

    On a GPU the library's erf takes longer than the memory it works on. In half precision, where its last digits are
    lost anyway, compiled code takes a shorter formula; the compiler makes one kernel of it.
    """
    is_half = hidden.dtype in (torch.bfloat16, torch.float16)
    if hidden.is_cuda and is_half and torch.compiler.is_compiling():
        return QuickGelu.apply(hidden)
    return functional.gelu(hidden)


class QuickGelu(torch.autograd.Function):
    """GELU with the same exponential for Φ and for its slope."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return (hidden.float() * share_below(hidden.float())[0]).to(hidden.dtype)

    @staticmethod
    def backward(ctx, grown: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        share, bell = share_below(hidden.float())
        return (grown.float() * (share + hidden.float() * bell / math.sqrt(2 * math.pi))).to(grown.dtype)


def share_below(number: Tensor) -> tuple[Tensor, Tensor]:
    """Φ, the share of a normal distribution that lies below each number, and exp(−x²/2)."""
    bell = torch.exp(-0.5 * number * number)
    nearness = 1 / (1 + STEEPNESS * number.abs())
    polynomial = torch.zeros_like(number)
    for coefficient in COEFFICIENTS:
        polynomial = (polynomial + coefficient) * nearness
    tail = 0.5 * polynomial * bell
    return torch.where(number > 0, 1 - tail, tail), bell
