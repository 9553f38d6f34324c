"""LayerNorm of a sum, a bias and dropout included, in one kernel, and all its gradients in another.

A post-norm layer adds what it found to what was there and normalises; gradients of the norm's weights and of the bias
are sums over all tokens. Here each tensor is read and written once, and nothing but the layer's own product is kept.
"""
# mypy: disable-error-code="assignment, var-annotated"
# In kernels tuples are what there is of lists, and they grow.

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.noise import factor_at
from electra.kernels.reductions import tiles_of

ELEMENTS = 512  # of a tile for each warp
CHUNK = 256  # columns that each warp of the backward pass holds together
ONE_WARP, ONE_NOISY = 1024, 768  # columns at most that one warp goes back over, alone, and with noise for dropout


@triton.jit
def inside(values, column, D: tl.constexpr, WIDTH: tl.constexpr):
    """Zeros for values [ROWS, ...] behind the last of D columns, of which WIDTH are held."""
    return values if WIDTH == D else tl.where((column < D)[None, :], values, 0.0)


@triton.jit
def normalised(total, column, epsilon, D: tl.constexpr):
    """Sums [ROWS, WIDTH], normalised, and one over their standard deviations."""
    centred = inside(total - (tl.sum(total, 1) / D)[:, None], column, D, total.shape[1])
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + epsilon)
    return centred * scale[:, None], scale


@triton.jit
def read(source, row, column, N, D: tl.constexpr):
    """Some columns [ROWS, WIDTH] of some rows in fp32; zeros where there are none."""
    is_there = (row < N)[:, None] & (column < D)[None, :]
    return tl.load(source + row[:, None] * D + column[None, :], mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def sum_at(product, offset, residual, seed, row, column, N, dropout, D: tl.constexpr, HAS_DROPOUT: tl.constexpr):
    """The sum [ROWS, WIDTH] that is normalised, not yet so; `offset` [WIDTH] is the bias."""
    added = read(product, row, column, N, D) + offset[None, :]
    if HAS_DROPOUT:
        added = added * factor_at(seed, row[:, None] * D + column[None, :], dropout)
    return added + read(residual, row, column, N, D)


@triton.jit
def norm_kernel(
    product, bias, residual, weight, offset, seed, hidden, N, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """hidden [N, D]; one program for some rows."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    added = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    total = sum_at(product, added, residual, seed, row, column, N, dropout, D, HAS_DROPOUT)
    plain, _ = normalised(total, column, epsilon, D)
    stretched = plain * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    stretched += tl.load(offset + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    is_there = (row < N)[:, None] & (column < D)[None, :]
    tl.store(hidden + row[:, None] * D + column[None, :], stretched.to(hidden.dtype.element_ty), mask=is_there)


@triton.jit
def row_sums(chunks):
    """The sums [ROWS] over all chunks [ROWS, WIDTH] of some rows."""
    total = chunks[0]
    for i in tl.static_range(1, len(chunks)):
        total += chunks[i]
    return tl.sum(total, 1)


@triton.jit
def plus(left, right):
    """Chunks, one by one."""
    found = ()
    for i in tl.static_range(len(left)):
        found += (left[i] + right[i],)
    return found


@triton.jit
def times(left, right):
    """Chunks, one by one."""
    found = ()
    for i in tl.static_range(len(left)):
        found += (left[i] * right[i],)
    return found


@triton.jit
def gradient_of_norm_kernel(
    product, bias, residual, weight, seed, grown, of_residual, of_product, sums, N, tiles, epsilon, dropout,
    D: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Gradients [N, D] of residual and, with dropout, of product; of weight, offset and bias each program's share.

    Rows are held in chunks: three of 256 numbers are no wider than a row of 768, and one of 1,024 would be."""
    columns = (tl.arange(0, WIDTH),)
    for i in tl.static_range(1, CHUNKS):
        columns += (i * WIDTH + tl.arange(0, WIDTH),)
    biases = [tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32) for column in columns]
    stretch = [tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :] for column in columns]
    of_weight = [tl.zeros([ROWS, WIDTH], tl.float32) for _ in columns]  # tiles are added up before their rows are
    of_offset, of_bias = of_weight, of_weight
    for tile in tl.range(tiles, num_stages=3):  # the next two are on their way meanwhile
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        back = [read(grown, row, column, N, D) for column in columns]
        total = ()
        for i in tl.static_range(CHUNKS):
            total += (sum_at(product, biases[i], residual, seed, row, columns[i], N, dropout, D, HAS_DROPOUT),)
        centred, mean = (), row_sums(total) / D
        for i in tl.static_range(CHUNKS):
            centred += (inside(total[i] - mean[:, None], columns[i], D, CHUNKS * WIDTH),)
        scale = 1.0 / tl.sqrt(row_sums(times(centred, centred)) / D + epsilon)
        plain, pull = [each * scale[:, None] for each in centred], times(back, stretch)
        along, level = row_sums(times(pull, plain)) / D, row_sums(pull) / D
        changes = ()
        for i in tl.static_range(CHUNKS):
            place = row[:, None] * D + columns[i][None, :]
            is_there = (row < N)[:, None] & (columns[i] < D)[None, :]
            change = (pull[i] - level[:, None] - plain[i] * along[:, None]) * scale[:, None]
            tl.store(of_residual + place, change.to(of_residual.dtype.element_ty), mask=is_there)
            if HAS_DROPOUT:
                change = change * factor_at(seed, place, dropout)
                tl.store(of_product + place, change.to(of_product.dtype.element_ty), mask=is_there)
            changes += (change,)
        of_weight = plus(of_weight, times(back, plain))
        of_offset, of_bias = plus(of_offset, back), plus(of_bias, changes)
    for i in tl.static_range(CHUNKS):
        target = sums + tl.program_id(0).to(tl.int64) * 3 * D + columns[i]
        tl.store(target, tl.sum(of_weight[i], 0), mask=columns[i] < D)
        tl.store(target + D, tl.sum(of_offset[i], 0), mask=columns[i] < D)
        tl.store(target + 2 * D, tl.sum(of_bias[i], 0), mask=columns[i] < D)


def shape_of(product: Tensor, warps: int) -> tuple[int, int, int, int]:
    """N, D, the next power of two, and the rows of a tile."""
    N, D = product.shape
    width = triton.next_power_of_2(D)
    return N, D, width, max(1, ELEMENTS * warps // width)


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
    N, D = product.shape
    warps = 1 if (ONE_WARP if seed is None else ONE_NOISY) >= D else 4  # one need not wait for others
    width = min(CHUNK * warps, triton.next_power_of_2(D))
    chunks, rows = triton.cdiv(D, width), max(1, ELEMENTS * warps // triton.next_power_of_2(D))
    of_residual = torch.empty_like(product)
    of_product = of_residual if seed is None else torch.empty_like(product)
    tiles, programs = tiles_of(N, rows)
    parts = torch.empty(programs, 3, D, device=product.device)
    gradient_of_norm_kernel[(programs,)](
        product, bias, residual, weight, product if seed is None else seed, grown, of_residual, of_product, parts,
        N, tiles, epsilon, dropout, D=D, WIDTH=width, CHUNKS=chunks, ROWS=rows, HAS_DROPOUT=seed is not None,
        num_warps=warps,
    )  # fmt: skip
    return of_residual, of_product, parts
