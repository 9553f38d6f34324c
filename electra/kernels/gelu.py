"""A bias and GELU in one kernel, and their gradients in another.

The library's erf takes longer than the memory it works on. In half precision, where its last digits are lost anyway,
one exponential gives Φ and its slope (Abramowitz and Stegun, 7.1.26: erf within 1.5e-7).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.reductions import column_sums, tiles_of

ROWS, COLUMNS = 16, 128  # of a tile
ROWS_BACK = 8  # of a tile of the backward pass, whose programs are a warp each


@triton.jit
def gelu_and_slope(number):
    """GELU of each number, and its slope there: x Φ and Φ + x φ.

    Φ, the share of a normal distribution that lies below a number, is `ratio` times `bell` on the left, and one less
    that on the right.
    """
    size, bell = tl.abs(number), tl.exp2(-0.7213475204 * number * number)
    distance = 1.0 + 0.231641888 * size
    nearness = tl.rsqrt(distance * distance)  # one over it, in one instruction
    ratio = 0.5307027145 * nearness - 0.7265760135
    ratio = ratio * nearness + 0.7107068705
    ratio = ratio * nearness - 0.142248368
    ratio = (ratio * nearness + 0.127414796) * nearness
    fall = bell * (ratio - 0.3989422804 * size)
    return tl.maximum(number, 0.0) - size * (ratio * bell), tl.where(number > 0, 1.0 - fall, fall)


@triton.jit
def gelu_kernel(product, bias, activated, N, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """GELU of product [N, C] plus bias [C]; one program for each tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * C + column[None, :]
    is_there = (row < N)[:, None] & (column < C)[None, :]
    number = tl.load(product + place, mask=is_there, other=0.0).to(tl.float32)
    number += tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    gelu, _ = gelu_and_slope(number)
    tl.store(activated + place, gelu.to(activated.dtype.element_ty), mask=is_there)


@triton.jit
def gradient_of_gelu_kernel(
    product, bias, grown, gradient, sums, N, C, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradient [N, C] of product, and its sums over the rows of each program [programs, C]."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    added = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # tiles are added up before their rows are: threads need not meet
    for tile in tl.range(tiles, num_stages=3):  # the next two are on their way meanwhile
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place = row[:, None] * C + column[None, :]
        is_there = (row < N)[:, None] & (column < C)[None, :]
        number = tl.load(product + place, mask=is_there, other=0.0).to(tl.float32) + added[None, :]
        _, slope = gelu_and_slope(number)
        back = tl.load(grown + place, mask=is_there, other=0.0).to(tl.float32) * slope
        total += back
        tl.store(gradient + place, back.to(gradient.dtype.element_ty), mask=is_there)
    tl.store(sums + tl.program_id(0).to(tl.int64) * C + column, tl.sum(total, 0), mask=column < C)


def gelu_of_sum(product: Tensor, bias: Tensor) -> Tensor:
    """GELU of `product` [..., C] plus `bias` [C]."""
    activated, C = torch.empty_like(product), product.shape[-1]
    N = product.numel() // C
    grid = (triton.cdiv(N, ROWS), triton.cdiv(C, COLUMNS))
    gelu_kernel[grid](product, bias, activated, N, C, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return activated


def gradients_of_gelu(product: Tensor, bias: Tensor, grown: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of product [..., C] from that of its GELU, `grown`; that of bias as parts [programs, C] to sum."""
    gradient, C = torch.empty_like(product), product.shape[-1]
    N, columns = product.numel() // C, triton.cdiv(C, COLUMNS)
    # With fewer, those multiprocessors that a product beside leaves first take all of them, and the others idle.
    tiles, programs = tiles_of(N, ROWS_BACK, columns, factor=4)
    parts = torch.empty(programs, C, device=product.device)
    gradient_of_gelu_kernel[(programs, columns)](
        product, bias, grown, gradient, parts, N, C, tiles, ROWS=ROWS_BACK, COLUMNS=COLUMNS, num_warps=1
    )
    return gradient, parts


@torch.library.custom_op("electra::biased_gelu", mutates_args=())
def biased_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """The same, as an operation with a gradient."""
    return gelu_of_sum(product.contiguous(), bias)


@biased_gelu.register_fake
def _(product, bias):
    return torch.empty_like(product, memory_format=torch.contiguous_format)


@torch.library.custom_op("electra::gradient_of_biased_gelu", mutates_args=())
def gradient_of_biased_gelu(product: Tensor, bias: Tensor, grown: Tensor) -> tuple[Tensor, Tensor]:
    """The same, as an operation."""
    gradient, parts = gradients_of_gelu(product.contiguous(), bias, grown.contiguous())
    return gradient, column_sums(parts, bias.dtype)


@gradient_of_biased_gelu.register_fake
def _(product, bias, grown):
    return torch.empty_like(product, memory_format=torch.contiguous_format), torch.empty_like(bias)


def remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, grown: Tensor):
    return gradient_of_biased_gelu(*ctx.saved_tensors, grown)


biased_gelu.register_autograd(backward, setup_context=remember)
