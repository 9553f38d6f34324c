"""LayerNorm fused with the residual addition before it, for post-norm (classic) and pre-norm (modern) layers.

Post-norm: out = LayerNorm(residual + dropout(x + bias)). Pre-norm: sum = residual + x; out = LayerNorm(sum), where the
residual stream stays in fp32 and the norm has no bias. Each tensor is read and written once; the backward pass computes
the sum and its statistics again, and writes partial column sums for the gradients of the norm's parameters and biases.
"""
# mypy: disable-error-code="assignment, var-annotated"
# Kernels collect values in tuples, whose types change as they grow.

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.common import dropout_scale, split_rows_over_programs

TILE_ELEMENTS = 512  # per warp
CHUNK = 256  # columns that one warp of the post-norm backward pass holds as one block
# The widest rows that one warp processes alone in the backward pass: post-norm, post-norm with dropout, pre-norm.
ONE_WARP, ONE_WARP_DROPOUT, ONE_WARP_PRENORM = 1024, 768, 512


@triton.jit
def zero_padding_columns(values, column, D: tl.constexpr, WIDTH: tl.constexpr):
    """values [ROWS, ...] with zeros in columns from D on; unchanged if the row's WIDTH columns are exactly D."""
    return values if WIDTH == D else tl.where((column < D)[None, :], values, 0.0)


@triton.jit
def normalize(total, column, epsilon, D: tl.constexpr):
    """total [ROWS, WIDTH] normalised, and the reciprocal standard deviations [ROWS]."""
    centered = zero_padding_columns(total - (tl.sum(total, 1) / D)[:, None], column, D, total.shape[1])
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / D + epsilon)
    return centered * rstd[:, None], rstd


@triton.jit
def load_tile(source, row, column, N, D: tl.constexpr):
    """A tile [ROWS, WIDTH] in fp32, with zeros outside [N, D]."""
    mask = (row < N)[:, None] & (column < D)[None, :]
    return tl.load(source + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def residual_sum(x, bias, residual, seed, row, column, N, dropout, D: tl.constexpr, HAS_DROPOUT: tl.constexpr):
    """residual + dropout(x + bias) [ROWS, WIDTH]; `bias` [WIDTH] is already loaded."""
    added = load_tile(x, row, column, N, D) + bias[None, :]
    if HAS_DROPOUT:
        added = added * dropout_scale(seed, row[:, None] * D + column[None, :], dropout)
    return added + load_tile(residual, row, column, N, D)


@triton.jit
def dropout_add_layernorm_kernel(
    x, bias, residual, norm_weight, norm_bias, seed, out, N, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """out [N, D]; one program for ROWS rows."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    added = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    total = residual_sum(x, added, residual, seed, row, column, N, dropout, D, HAS_DROPOUT)
    normalized, _ = normalize(total, column, epsilon, D)
    scaled = normalized * tl.load(norm_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    scaled += tl.load(norm_bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    mask = (row < N)[:, None] & (column < D)[None, :]
    tl.store(out + row[:, None] * D + column[None, :], scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def row_sums(chunks):
    """The sums [ROWS] over all chunks [ROWS, WIDTH] of a row."""
    total = chunks[0]
    for i in tl.static_range(1, len(chunks)):
        total += chunks[i]
    return tl.sum(total, 1)


@triton.jit
def add_chunks(left, right):
    """The elementwise sum of two rows that are held as tuples of chunks [ROWS, WIDTH]."""
    result = ()
    for i in tl.static_range(len(left)):
        result += (left[i] + right[i],)
    return result


@triton.jit
def multiply_chunks(left, right):
    """The elementwise product of two rows that are held as tuples of chunks [ROWS, WIDTH]."""
    result = ()
    for i in tl.static_range(len(left)):
        result += (left[i] * right[i],)
    return result


@triton.jit
def dropout_add_layernorm_backward_kernel(
    x, bias, residual, norm_weight, seed, grad_out, grad_residual, grad_x, partials, N, blocks, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """grad_residual [N, D] and, with dropout, grad_x [N, D]; partial sums for norm_weight, norm_bias and bias.

    A row is held in chunks: three of 256 columns fit 768 exactly, where one power of two would hold 1,024."""
    columns = (tl.arange(0, WIDTH),)
    for i in tl.static_range(1, CHUNKS):
        columns += (i * WIDTH + tl.arange(0, WIDTH),)
    biases = [tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32) for column in columns]
    weights = [tl.load(norm_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :] for column in columns]
    grad_weight = [tl.zeros([ROWS, WIDTH], tl.float32) for _ in columns]  # summed over blocks first, over rows last
    grad_norm_bias, grad_bias = grad_weight, grad_weight
    for block in tl.range(blocks, num_stages=3):  # prefetches the next two blocks
        row = ((tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        grad = [load_tile(grad_out, row, column, N, D) for column in columns]
        total = ()
        for i in tl.static_range(CHUNKS):
            total += (residual_sum(x, biases[i], residual, seed, row, columns[i], N, dropout, D, HAS_DROPOUT),)
        centered, mean = (), row_sums(total) / D
        for i in tl.static_range(CHUNKS):
            centered += (zero_padding_columns(total[i] - mean[:, None], columns[i], D, CHUNKS * WIDTH),)
        rstd = 1.0 / tl.sqrt(row_sums(multiply_chunks(centered, centered)) / D + epsilon)
        normalized, scaled = [chunk * rstd[:, None] for chunk in centered], multiply_chunks(grad, weights)
        projection, scaled_mean = row_sums(multiply_chunks(scaled, normalized)) / D, row_sums(scaled) / D
        grad_sums = ()
        for i in tl.static_range(CHUNKS):
            offset = row[:, None] * D + columns[i][None, :]
            mask = (row < N)[:, None] & (columns[i] < D)[None, :]
            grad_sum = (scaled[i] - scaled_mean[:, None] - normalized[i] * projection[:, None]) * rstd[:, None]
            tl.store(grad_residual + offset, grad_sum.to(grad_residual.dtype.element_ty), mask=mask)
            if HAS_DROPOUT:
                grad_sum = grad_sum * dropout_scale(seed, offset, dropout)
                tl.store(grad_x + offset, grad_sum.to(grad_x.dtype.element_ty), mask=mask)
            grad_sums += (grad_sum,)
        grad_weight = add_chunks(grad_weight, multiply_chunks(grad, normalized))
        grad_norm_bias, grad_bias = add_chunks(grad_norm_bias, grad), add_chunks(grad_bias, grad_sums)
    for i in tl.static_range(CHUNKS):
        target = partials + tl.program_id(0).to(tl.int64) * 3 * D + columns[i]
        tl.store(target, tl.sum(grad_weight[i], 0), mask=columns[i] < D)
        tl.store(target + D, tl.sum(grad_norm_bias[i], 0), mask=columns[i] < D)
        tl.store(target + 2 * D, tl.sum(grad_bias[i], 0), mask=columns[i] < D)


def matrix_and_tile_shape(x: Tensor, warps: int) -> tuple[int, int, int, int]:
    """N, D, the next power of two of D, and the rows of a tile."""
    N, D = x.shape
    width = triton.next_power_of_2(D)
    return N, D, width, max(1, TILE_ELEMENTS * warps // width)


def dropout_add_layernorm_forward(
    x: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor, epsilon: float,
    seed: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """LayerNorm(`residual` + dropout(`x` + `bias`)), all [N, D]; dropout only with a `seed` []."""
    N, D, width, rows = matrix_and_tile_shape(x, warps=4)
    out = torch.empty_like(x)
    dropout_add_layernorm_kernel[(triton.cdiv(N, rows),)](
        x, bias, residual, norm_weight, norm_bias, x if seed is None else seed, out, N, epsilon, dropout,
        D=D, WIDTH=width, ROWS=rows, HAS_DROPOUT=seed is not None, num_warps=4,
    )  # fmt: skip
    return out


def dropout_add_layernorm_backward(
    x: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, grad_out: Tensor, epsilon: float,
    seed: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_residual and grad_x [N, D], and partial sums [programs, 3, D] for norm_weight, norm_bias and bias.

    Without dropout both gradients are the same tensor."""
    N, D = x.shape
    warps = 1 if (ONE_WARP if seed is None else ONE_WARP_DROPOUT) >= D else 4  # a single warp never waits for others
    width = min(CHUNK * warps, triton.next_power_of_2(D))
    chunks = triton.cdiv(D, width)
    rows = max(1, TILE_ELEMENTS * warps // triton.next_power_of_2(D))
    grad_residual = torch.empty_like(x)
    grad_x = grad_residual if seed is None else torch.empty_like(x)
    blocks, programs = split_rows_over_programs(N, rows)
    partials = torch.empty(programs, 3, D, device=x.device)
    dropout_add_layernorm_backward_kernel[(programs,)](
        x, bias, residual, norm_weight, x if seed is None else seed, grad_out, grad_residual, grad_x, partials,
        N, blocks, epsilon, dropout, D=D, WIDTH=width, CHUNKS=chunks, ROWS=rows, HAS_DROPOUT=seed is not None,
        num_warps=warps,
    )  # fmt: skip
    return grad_residual, grad_x, partials


@triton.jit
def add_layernorm_kernel(
    residual, x, norm_weight, total_out, out, N, epsilon, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """total_out [N, D] = residual + x, and out [N, D], its LayerNorm; one program for ROWS rows."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    offset, mask = row[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]
    total = tl.load(residual + offset, mask=mask, other=0.0)
    total += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_out + offset, total, mask=mask)
    normalized, _ = normalize(total, column, epsilon, D)
    scaled = normalized * tl.load(norm_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + offset, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_layernorm_backward_kernel(
    total, norm_weight, grad_out, grad_total, grad_residual, grad_x, partials, N, blocks, epsilon,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grad_residual [N, D] in fp32 and grad_x, the same rounded; partial sums for norm_weight."""
    column = tl.arange(0, WIDTH)
    weight = tl.load(norm_weight + column, mask=column < D, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, WIDTH], tl.float32)  # summed over blocks first: no exchange between threads
    for block in tl.range(blocks, num_stages=2):  # prefetches the next block
        row = ((tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offset, mask = row[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]
        normalized, rstd = normalize(tl.load(total + offset, mask=mask, other=0.0), column, epsilon, D)
        grad = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32)
        scaled = grad * weight[None, :]
        projection, scaled_mean = tl.sum(scaled * normalized, 1) / D, tl.sum(scaled, 1) / D
        grad_sum = (scaled - scaled_mean[:, None] - normalized * projection[:, None]) * rstd[:, None]
        grad_sum += tl.load(grad_total + offset, mask=mask, other=0.0)
        tl.store(grad_residual + offset, grad_sum, mask=mask)
        tl.store(grad_x + offset, grad_sum.to(grad_x.dtype.element_ty), mask=mask)
        grad_weight += grad * normalized
    target = partials + tl.program_id(0).to(tl.int64) * D + column
    tl.store(target, tl.sum(grad_weight, 0), mask=column < D)


def add_layernorm_forward(residual: Tensor, x: Tensor, norm_weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`residual` [N, D] in fp32 plus `x` [N, D], and the LayerNorm of that sum in the dtype of x."""
    N, D, width, rows = matrix_and_tile_shape(residual, warps=4)
    total, out = torch.empty_like(residual), torch.empty_like(x)
    add_layernorm_kernel[(triton.cdiv(N, rows),)](
        residual, x, norm_weight, total, out, N, epsilon, D=D, WIDTH=width, ROWS=rows, num_warps=4
    )
    return total, out


def add_layernorm_backward(
    total: Tensor, norm_weight: Tensor, grad_out: Tensor, grad_total: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_residual [N, D] in fp32, grad_x [N, D], and partial sums [programs, D] for norm_weight."""
    warps = 1 if total.shape[1] <= ONE_WARP_PRENORM else 4
    N, D, width, rows = matrix_and_tile_shape(total, warps)
    grad_residual, grad_x = torch.empty_like(total), torch.empty_like(grad_out)
    blocks, programs = split_rows_over_programs(N, rows)
    partials = torch.empty(programs, D, device=total.device)
    add_layernorm_backward_kernel[(programs,)](
        total, norm_weight, grad_out, grad_total, grad_residual, grad_x, partials, N, blocks, epsilon,
        D=D, WIDTH=width, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return grad_residual, grad_x, partials
