"""Sums of columns: what biases and norms get of gradients over all tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_kernel(parts, first, second, third, D, P, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums [D] of each of the matrices in parts [P, matrices, D]; one program for some columns of one."""
    column, matrix = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    parts += matrix * D
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, P, PARTS):
        part = start + tl.arange(0, PARTS)
        is_there = (part < P)[:, None] & (column < D)[None, :]
        total += tl.load(parts + part[:, None] * tl.num_programs(1) * D + column[None, :], mask=is_there, other=0.0)
    sums = tl.sum(total, 0)
    if matrix == 0:
        tl.store(first + column, sums.to(first.dtype.element_ty), mask=column < D)
    elif matrix == 1:
        tl.store(second + column, sums.to(second.dtype.element_ty), mask=column < D)
    else:
        tl.store(third + column, sums.to(third.dtype.element_ty), mask=column < D)


def column_sums(parts: Tensor, precision: torch.dtype) -> Tensor:
    """The sums [D] of `parts` [P, D], which kernels leave: torch's own takes several times as long for so few."""
    return sums_by_matrix(parts[:, None], precision)[0]


def sums_by_matrix(parts: Tensor, *precisions: torch.dtype) -> list[Tensor]:
    """The same for up to three matrices, `parts` [P, matrices, D]: the sums [D] of each in its own precision."""
    P, _, D = parts.shape
    sums = [torch.empty(D, device=parts.device, dtype=precision) for precision in precisions]
    targets = [*sums, *[sums[0]] * (3 - len(sums))]
    sum_kernel[(triton.cdiv(D, 16), len(sums))](parts, *targets, D, P, PARTS=256, COLUMNS=16, num_warps=8)
    return sums
