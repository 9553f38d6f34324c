"""LayerNorm of a sum, a bias and dropout included, in one kernel, and all its gradients in another.

A post-norm layer adds what it found to what was there and normalises; gradients of the norm's weights and of the bias
are sums over all tokens. Here each tensor is read and written once, and nothing but the layer's own product is kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.model.gpu.noise import factor_at

ELEMENTS = 512  # of a tile for each warp
NARROW = 512  # up to this width the backward pass is fastest with two warps, otherwise with four
MANY_PROGRAMS, FEW_PROGRAMS = 1056, 512  # of the backward pass; each leaves its share of what is summed over tokens
MANY_TILES = 8  # of a program: up to so many the few are better


@triton.jit
def normalised(total, column, epsilon, D: tl.constexpr):
    """Sums [ROWS, WIDTH], normalised, and one over their standard deviations."""
    centred = tl.where((column < D)[None, :], total - (tl.sum(total, 1) / D)[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + epsilon)
    return centred * scale[:, None], scale


@triton.jit
def normalised_sum(
    product, offset, residual, seed, row, column, N, epsilon, dropout, D: tl.constexpr, HAS_DROPOUT: tl.constexpr
):
    """The sum, normalised [ROWS, WIDTH], and one over its standard deviation; `offset` [WIDTH] is the bias."""
    place = row[:, None] * D + column[None, :]
    is_there = (row < N)[:, None] & (column < D)[None, :]
    added = tl.load(product + place, mask=is_there, other=0.0).to(tl.float32)
    added += offset[None, :]
    if HAS_DROPOUT:
        added = added * factor_at(seed, place, dropout)
    total = added + tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
    return normalised(total, column, epsilon, D)


@triton.jit
def norm_kernel(
    product, bias, residual, weight, offset, seed, hidden, N, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """hidden [N, D]; one program for some rows."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    added = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    plain, _ = normalised_sum(product, added, residual, seed, row, column, N, epsilon, dropout, D, HAS_DROPOUT)
    stretched = plain * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    stretched += tl.load(offset + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    is_there = (row < N)[:, None] & (column < D)[None, :]
    tl.store(hidden + row[:, None] * D + column[None, :], stretched.to(hidden.dtype.element_ty), mask=is_there)


@triton.jit
def gradient_of_norm_kernel(
    product, bias, residual, weight, seed, grown, of_residual, of_product, sums, N, tiles, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Gradients [N, D] of residual and, with dropout, of product; of weight, offset and bias each program's share."""
    column = tl.arange(0, WIDTH)
    added = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    stretch = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    of_weight, of_offset = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    of_bias = tl.zeros([ROWS, WIDTH], tl.float32)  # tiles are added up before their rows are: threads need not meet
    for tile in tl.range(tiles, num_stages=2):  # the next tile is on its way meanwhile
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        plain, scale = normalised_sum(product, added, residual, seed, row, column, N, epsilon, dropout, D, HAS_DROPOUT)
        place = row[:, None] * D + column[None, :]
        is_there = (row < N)[:, None] & (column < D)[None, :]
        back = tl.load(grown + place, mask=is_there, other=0.0).to(tl.float32)
        pull = back * stretch[None, :]
        along, level = tl.sum(pull * plain, 1) / D, tl.sum(pull, 1) / D
        change = (pull - level[:, None] - plain * along[:, None]) * scale[:, None]
        change = tl.where(is_there, change, 0.0)
        tl.store(of_residual + place, change.to(of_residual.dtype.element_ty), mask=is_there)
        if HAS_DROPOUT:
            change = change * factor_at(seed, place, dropout)
            tl.store(of_product + place, change.to(of_product.dtype.element_ty), mask=is_there)
        of_weight += back * plain
        of_offset += back
        of_bias += change
    target = sums + tl.program_id(0).to(tl.int64) * 3 * D + column
    tl.store(target, tl.sum(of_weight, 0), mask=column < D)
    tl.store(target + D, tl.sum(of_offset, 0), mask=column < D)
    tl.store(target + 2 * D, tl.sum(of_bias, 0), mask=column < D)


def shape_of(product: Tensor, warps: int) -> tuple[int, int, int, int]:
    """N, D, the next power of two, and the rows of a tile."""
    N, D = product.shape
    width = triton.next_power_of_2(D)
    return N, D, width, max(1, ELEMENTS * warps // width)


def tiles_of(N: int, rows: int) -> tuple[int, int]:
    """How many tiles of so many rows each program of a backward pass has, and how many programs that makes."""
    count = triton.cdiv(N, rows)
    tiles = max(triton.cdiv(count, MANY_PROGRAMS), min(MANY_TILES, triton.cdiv(count, FEW_PROGRAMS)))
    return tiles, triton.cdiv(count, tiles)


def norm_of_sum(
    product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, offset: Tensor, epsilon: float,
    seed: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """LayerNorm of `residual` [N, D] plus what dropout leaves of `product` [N, D] and `bias` [D]."""
    N, D, width, rows = shape_of(product, warps=4)
    hidden = torch.empty_like(product)
    norm_kernel[(triton.cdiv(N, rows),)](
        product, bias, residual, weight, offset, product if seed is None else seed, hidden, N, epsilon, dropout,
        D=D, WIDTH=width, ROWS=rows, HAS_DROPOUT=seed is not None, num_warps=4,
    )  # fmt: skip
    return hidden


def gradients_of_norm_of_sum(
    product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, grown: Tensor, epsilon: float,
    seed: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients [N, D] of residual and product, one tensor without dropout, and those of weight, offset and bias as
    parts [programs, 3, D] to sum."""
    warps = 2 if product.shape[1] <= NARROW else 4
    N, D, width, rows = shape_of(product, warps)
    of_residual = torch.empty_like(product)
    of_product = of_residual if seed is None else torch.empty_like(product)
    tiles, programs = tiles_of(N, rows)
    parts = torch.empty(programs, 3, D, device=product.device)
    gradient_of_norm_kernel[(programs,)](
        product, bias, residual, weight, product if seed is None else seed, grown, of_residual, of_product, parts,
        N, tiles, epsilon, dropout, D=D, WIDTH=width, ROWS=rows, HAS_DROPOUT=seed is not None, num_warps=warps,
    )  # fmt: skip
    return of_residual, of_product, parts
