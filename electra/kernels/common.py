"""What several kernels share: column sums over all tokens, dropout noise, gather and scatter of token positions."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 1056  # of a kernel that also sums over all tokens: eight per multiprocessor of an H200, which has 132
BLOCK_ROWS, BLOCK_COLUMNS = 16, 128

# exp(x) = exp2(x · LOG2E): GPUs have an instruction for exp2, and `tl.exp` takes four more.
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@triton.jit
def hash_uint32(value):
    """A hash of 32-bit integers, relying on their overflow; the same as in `electra.random`."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD
    value = value ^ (value >> 15)
    value = value * 0x735A2D97
    return value ^ (value >> 15)


@triton.jit
def dropout_scale(seed, index, dropout):
    """What dropout multiplies element `index` by: 0 or 1 / (1 − dropout).

    A function of seed and index, so that the backward pass computes it again instead of reading a stored mask.
    `tl.rand` takes several times as many instructions, more than everything else in these kernels."""
    key = tl.load(seed).to(tl.uint32)
    bits = hash_uint32(hash_uint32(index.to(tl.uint32) ^ hash_uint32(key)) + key)
    return tl.where(bits < tl.cast(dropout * 4294967296.0, tl.uint32), 0.0, 1.0 / (1.0 - dropout))


def split_rows_over_programs(
    num_rows: int, block_rows: int, column_blocks: int = 1, factor: int = 1
) -> tuple[int, int]:
    """Blocks of rows that each program of a summing kernel loops over, and the number of programs per column block.

    Each program writes one partial sum. In all there are at most `factor` times NUM_PROGRAMS."""
    blocks = triton.cdiv(triton.cdiv(num_rows, block_rows), max(1, factor * NUM_PROGRAMS // column_blocks))
    return blocks, triton.cdiv(num_rows, block_rows * blocks)


@triton.jit
def column_sum_kernel(partials, first, second, third, D, P, BLOCK_P: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Sums over P of `partials` [P, matrices, D]; one program for a block of columns of one matrix."""
    column, matrix = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS), tl.program_id(1)
    partials += matrix * D
    total = tl.zeros([BLOCK_P, BLOCK_COLUMNS], tl.float32)
    for start in range(0, P, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part < P)[:, None] & (column < D)[None, :]
        total += tl.load(partials + part[:, None] * tl.num_programs(1) * D + column[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, 0)
    if matrix == 0:
        tl.store(first + column, sums.to(first.dtype.element_ty), mask=column < D)
    elif matrix == 1:
        tl.store(second + column, sums.to(second.dtype.element_ty), mask=column < D)
    else:
        tl.store(third + column, sums.to(third.dtype.element_ty), mask=column < D)


def column_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums [D] of the `partials` [P, D] that kernels write; `torch.sum` takes several times as long for so few rows."""
    return column_sums_by_matrix(partials[:, None], dtype)[0]


def column_sums_by_matrix(partials: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """The sums [D] of up to three matrices in `partials` [P, matrices, D], each in its own dtype."""
    P, _, D = partials.shape
    sums = [torch.empty(D, device=partials.device, dtype=dtype) for dtype in dtypes]
    outputs = [*sums, *[sums[0]] * (3 - len(sums))]
    column_sum_kernel[(triton.cdiv(D, 16), len(sums))](
        partials, *outputs, D, P, BLOCK_P=256, BLOCK_COLUMNS=16, num_warps=8
    )
    return sums


@triton.jit
def query_value_sum_kernel(
    grad_qkv, partials, grad_key_bias, N, D, blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """partials [programs, 2, D]: the sums of queries and values in `grad_qkv` [N, 3, D]; and zeros for the keys [D]."""
    column, which = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS), tl.program_id(2)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in tl.range(blocks, num_stages=3):
        row = ((tl.program_id(0) * blocks + block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < N)[:, None] & (column < D)[None, :]
        offset = (row[:, None] * 3 + 2 * which) * D + column[None, :]
        total += tl.load(grad_qkv + offset, mask=mask, other=0.0).to(tl.float32)
    target = partials + (tl.program_id(0).to(tl.int64) * 2 + which) * D + column
    tl.store(target, tl.sum(total, 0), mask=column < D)
    if tl.program_id(0) == 0 and which == 0:
        tl.store(grad_key_bias + column, tl.zeros([BLOCK_COLUMNS], grad_key_bias.dtype.element_ty), mask=column < D)


def qkv_bias_grad(grad_qkv: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [3 · D] of the bias of queries, keys and values from `grad_qkv` [N, 3 · D].

    The keys' part is zero without rotary positions: their bias adds the same to all scores of a query, and the softmax
    ignores that."""
    N, D = grad_qkv.shape[0], grad_qkv.shape[1] // 3
    column_blocks = triton.cdiv(D, BLOCK_COLUMNS)
    blocks, programs = split_rows_over_programs(N, BLOCK_ROWS, 2 * column_blocks)
    partials = torch.empty(programs, 2, D, device=grad_qkv.device)
    grad_bias = torch.empty(3, D, device=grad_qkv.device, dtype=dtype)
    query, key, value = grad_bias
    query_value_sum_kernel[(programs, column_blocks, 2)](
        grad_qkv, partials, key, N, D, blocks, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=1
    )
    column_sum_kernel[(triton.cdiv(D, 16), 2)](
        partials, query, value, value, D, programs, BLOCK_P=256, BLOCK_COLUMNS=16, num_warps=8
    )
    return grad_bias.flatten()


def gather_rows(matrix: Tensor, rows: Tensor | None) -> Tensor:
    """The `rows` [M] of `matrix` [N, D], or the whole matrix."""
    return matrix if rows is None else matrix.index_select(0, rows)


def scatter_rows(grad: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """The gradient [N, D] of a matrix from the one of its `rows` [M]: the backward of `gather_rows`."""
    return grad if rows is None else grad.new_zeros(num_rows, grad.shape[1]).index_add_(0, rows, grad)


def flatten_positions(positions: Tensor | None, hidden: Tensor) -> Tensor | None:
    """`positions` [B, M] in the rows of `hidden` [B, L, D] as rows [B · M] of hidden flattened to [B · L, D]."""
    if positions is None:
        return None
    B, L = hidden.shape[:2]
    return (positions + torch.arange(0, B * L, L, device=positions.device)[:, None]).flatten()
