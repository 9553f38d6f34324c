"""A sum that goes on, and its LayerNorm without a bias, in one kernel, and all their gradients in another.

A pre-norm layer adds what it found to a sum in fp32, which is kept, and reads that normalised. Here each tensor is read
and written once each way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.layernorm import normalised, shape_of
from electra.kernels.reductions import tiles_of

ONE_WARP = 512  # columns at most that one warp goes back over


@triton.jit
def sum_and_norm_kernel(
    total, added, weight, summed, normal, N, epsilon, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """summed [N, D] of total and added, and normal [N, D]; one program for some rows."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    place, is_there = row[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]
    found = tl.load(total + place, mask=is_there, other=0.0)
    found += tl.load(added + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(summed + place, found, mask=is_there)
    plain, _ = normalised(found, column, epsilon, D)
    stretched = plain * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(normal + place, stretched.to(normal.dtype.element_ty), mask=is_there)


@triton.jit
def gradient_of_sum_and_norm_kernel(
    summed, weight, of_normal, of_summed, gradient, rounded, sums, N, tiles, epsilon,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient [N, D] of what was summed, in both precisions; of weight each program's share."""
    column = tl.arange(0, WIDTH)
    stretch = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, WIDTH], tl.float32)  # tiles are added up before their rows are: threads need not meet
    for tile in tl.range(tiles, num_stages=2):  # the next tile is on its way meanwhile
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place, is_there = row[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]
        plain, scale = normalised(tl.load(summed + place, mask=is_there, other=0.0), column, epsilon, D)
        back = tl.load(of_normal + place, mask=is_there, other=0.0).to(tl.float32)
        pull = back * stretch[None, :]
        along, level = tl.sum(pull * plain, 1) / D, tl.sum(pull, 1) / D
        change = (pull - level[:, None] - plain * along[:, None]) * scale[:, None]
        change += tl.load(of_summed + place, mask=is_there, other=0.0)
        tl.store(gradient + place, change, mask=is_there)
        tl.store(rounded + place, change.to(rounded.dtype.element_ty), mask=is_there)
        of_weight += back * plain
    target = sums + tl.program_id(0).to(tl.int64) * D + column
    tl.store(target, tl.sum(of_weight, 0), mask=column < D)


def sum_and_norm(total: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`total` [N, D] in fp32 plus `added` [N, D], and that normalised, in the precision of what was added."""
    N, D, width, rows = shape_of(total, warps=4)
    summed, normal = torch.empty_like(total), torch.empty_like(added)
    sum_and_norm_kernel[(triton.cdiv(N, rows),)](
        total, added, weight, summed, normal, N, epsilon, D=D, WIDTH=width, ROWS=rows, num_warps=4
    )
    return summed, normal


def gradients_of_sum_and_norm(
    summed: Tensor, weight: Tensor, of_normal: Tensor, of_summed: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of what was summed, in fp32 and as that of what was added; that of weight as parts [programs, D]."""
    warps = 1 if summed.shape[1] <= ONE_WARP else 4
    N, D, width, rows = shape_of(summed, warps)
    gradient, rounded = torch.empty_like(summed), torch.empty_like(of_normal)
    tiles, programs = tiles_of(N, rows)
    parts = torch.empty(programs, D, device=summed.device)
    gradient_of_sum_and_norm_kernel[(programs,)](
        summed, weight, of_normal, of_summed, gradient, rounded, parts, N, tiles, epsilon,
        D=D, WIDTH=width, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return gradient, rounded, parts
