"""Sums of columns: what biases and norms get of gradients over all tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of a kernel that also sums over all tokens: eight for each of an H200's 132 multiprocessors
ROWS, COLUMNS = 16, 128  # of a tile


def tiles_of(N: int, rows: int, columns: int = 1, factor: int = 1) -> tuple[int, int]:
    """How many tiles of so many of N rows each program takes in turn, and how many programs that makes for each of some
    strips of columns: every one of them leaves its part of the sums. There are up to `factor` times PROGRAMS."""
    tiles = triton.cdiv(triton.cdiv(N, rows), max(1, factor * PROGRAMS // columns))
    return tiles, triton.cdiv(N, rows * tiles)


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


@triton.jit
def queries_and_values_kernel(matrix, parts, of_keys, N, D, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of queries and values in a matrix [N, 3, D] over the rows of each program: parts [programs, 2, D]; and
    zeros for those of keys [D]."""
    column, which = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tiles, num_stages=3):
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_there = (row < N)[:, None] & (column < D)[None, :]
        place = (row[:, None] * 3 + 2 * which) * D + column[None, :]
        total += tl.load(matrix + place, mask=is_there, other=0.0).to(tl.float32)
    target = parts + (tl.program_id(0).to(tl.int64) * 2 + which) * D + column
    tl.store(target, tl.sum(total, 0), mask=column < D)
    if tl.program_id(0) == 0 and which == 0:
        tl.store(of_keys + column, tl.zeros([COLUMNS], of_keys.dtype.element_ty), mask=column < D)


def sums_but_of_keys(of_qkv: Tensor, precision: torch.dtype) -> Tensor:
    """The gradient of a bias [3 · D] of queries, keys and values from theirs [N, 3 · D].

    That of keys is zero where positions do not turn them: a bias moves all scores of a query alike, and weights stay as
    they are."""
    (N, D), columns = (of_qkv.shape[0], of_qkv.shape[1] // 3), triton.cdiv(of_qkv.shape[1] // 3, COLUMNS)
    tiles, programs = tiles_of(N, ROWS, 2 * columns)
    parts = torch.empty(programs, 2, D, device=of_qkv.device)
    sums = torch.empty(3, D, device=of_qkv.device, dtype=precision)
    of_queries, of_keys, of_values = sums
    queries_and_values_kernel[(programs, columns, 2)](
        of_qkv, parts, of_keys, N, D, tiles, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=1
    )
    sum_kernel[(triton.cdiv(D, 16), 2)](
        parts, of_queries, of_values, of_values, D, programs, PARTS=256, COLUMNS=16, num_warps=8
    )
    return sums.flatten()
