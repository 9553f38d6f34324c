"""GELU of one half times the other in one kernel, and their gradients in another (GeGLU)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.gelu import COLUMNS, ROWS, gelu_and_slope


@triton.jit
def read_both(product, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Both halves of a tile of product [N, 2 · F] in fp32, where they stand, whether that is in it; and its rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * 2 * F + column[None, :]
    is_there = (row < N)[:, None] & (column < F)[None, :]
    number = tl.load(product + place, mask=is_there, other=0.0).to(tl.float32)
    gate = tl.load(product + F + place, mask=is_there, other=0.0).to(tl.float32)
    return number, gate, place, row[:, None] * F + column[None, :], is_there


@triton.jit
def gated_kernel(product, activated, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """GELU of the first half of product [N, 2 · F] times the second: [N, F]; one program for each tile."""
    number, gate, _, target, is_there = read_both(product, N, F, ROWS, COLUMNS)
    gelu, _ = gelu_and_slope(number)
    tl.store(activated + target, (gelu * gate).to(activated.dtype.element_ty), mask=is_there)


@triton.jit
def gradient_of_gated_kernel(product, grown, gradient, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient [N, 2 · F] of product from that of its activation, `grown` [N, F]."""
    number, gate, place, source, is_there = read_both(product, N, F, ROWS, COLUMNS)
    gelu, slope = gelu_and_slope(number)
    back = tl.load(grown + source, mask=is_there, other=0.0).to(tl.float32)
    of_number = back * gate * slope
    tl.store(gradient + place, of_number.to(gradient.dtype.element_ty), mask=is_there)
    tl.store(gradient + F + place, (back * gelu).to(gradient.dtype.element_ty), mask=is_there)


def grid_of(product: Tensor) -> tuple[tuple[int, int], int, int]:
    """The programs of a kernel over `product` [..., 2 · F], how many rows it has, and F."""
    F = product.shape[-1] // 2
    N = product.numel() // (2 * F)
    return (triton.cdiv(N, ROWS), triton.cdiv(F, COLUMNS)), N, F


def gated(product: Tensor) -> Tensor:
    """GELU of the first half of `product` [..., 2 · F] times the second: [..., F]."""
    grid, N, F = grid_of(product)
    activated = product.new_empty(*product.shape[:-1], F)
    gated_kernel[grid](product, activated, N, F, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return activated


def gradient_of_gated(product: Tensor, grown: Tensor) -> Tensor:
    """The gradient of product from that of the activation, `grown` [..., F]."""
    grid, N, F = grid_of(product)
    gradient = torch.empty_like(product)
    gradient_of_gated_kernel[grid](product, grown, gradient, N, F, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return gradient


@torch.library.custom_op("electra::gated_gelu", mutates_args=())
def gated_gelu(product: Tensor) -> Tensor:
    """The same, as an operation with a gradient."""
    return gated(product.contiguous())


@gated_gelu.register_fake
def _(product):
    return product.new_empty(*product.shape[:-1], product.shape[-1] // 2)


@torch.library.custom_op("electra::gradient_of_gated_gelu", mutates_args=())
def gradient_of_gated_gelu(product: Tensor, grown: Tensor) -> Tensor:
    """The same, as an operation."""
    return gradient_of_gated(product.contiguous(), grown.contiguous())


@gradient_of_gated_gelu.register_fake
def _(product, grown):
    return torch.empty_like(product, memory_format=torch.contiguous_format)


def remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, grown: Tensor):
    return gradient_of_gated_gelu(*ctx.saved_tensors, grown)


gated_gelu.register_autograd(backward, setup_context=remember)
