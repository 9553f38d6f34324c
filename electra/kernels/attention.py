"""Attention over short rows on a GPU: one program holds a whole row of one head, forward and backward.

Library kernels are made for long rows: at 128 tokens they spend most of their time on bookkeeping, and know documents
only as a mask as large as the scores. Here queries, keys and values are read where the layer's product left them,
positions turn them on the way in, and the softmax is made again in the backward pass: nothing is kept for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.noise import factor_at
from electra.kernels.powers import LOG2E

LONGEST = 128  # tokens whose scores one program can hold
WIDTHS = (32, 64, 128)  # of a head
HIDDEN = tl.constexpr(-(2.0**100))  # a score: a power of two, so that a row of nothing else is scaled without rounding
NOWHERE = tl.constexpr(-(2**31))  # a document that no token is in
REGISTERS = 128  # of a thread in the forward pass: the compiler would take a few more, and so a quarter fewer threads


@triton.jit
def read(base, place, column, L, stride: tl.constexpr):
    """Some columns of the tokens at some places; zeros behind the row's end."""
    return tl.load(base + place[:, None] * stride + column[None, :], mask=(place < L)[:, None], other=0.0)


@triton.jit
def write(base, place, column, L, stride: tl.constexpr, values):
    """The inverse of `read`."""
    tl.store(base + place[:, None] * stride + column[None, :], values, mask=(place < L)[:, None])


@triton.jit
def read_turned(base, turns, place, column, L, stride: tl.constexpr, K: tl.constexpr, HAS_TURNS: tl.constexpr):
    """Vectors [N, K], turned in fp32 by their positions' angles where there are any.

    A number turns with its partner, half a vector away, which is read beside it."""
    vectors = read(base, place, column, L, stride)
    if HAS_TURNS:
        partner, half = read(base, place, (column + K // 2) % K, L, stride).to(tl.float32), column % (K // 2)
        cosine, sine = read(turns, place, half, L, K // 2), read(turns + L * (K // 2), place, half, L, K // 2)
        sine = tl.where((column < K // 2)[None, :], -sine, sine)
        vectors = (vectors.to(tl.float32) * cosine + partner * sine).to(vectors.dtype)
    return vectors


@triton.jit
def write_turned(
    base, turns, place, column, L, stride: tl.constexpr, K: tl.constexpr, HAS_TURNS: tl.constexpr, vectors, dtype
):
    """The inverse of `read_turned`: turned back by the same angles."""
    if HAS_TURNS:
        half = tl.arange(0, K // 2)
        cosine, sine = read(turns, place, half, L, K // 2), read(turns + L * (K // 2), place, half, L, K // 2)
        first, second = tl.split(tl.permute(tl.reshape(vectors, (vectors.shape[0], 2, K // 2)), (0, 2, 1)))
        write(base, place, half, L, stride, (first * cosine + second * sine).to(dtype))
        write(base + K // 2, place, half, L, stride, (second * cosine - first * sine).to(dtype))
    else:
        write(base, place, column, L, stride, vectors.to(dtype))


@triton.jit
def weights_of(scores, documents, at, place, L, window, scale, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """How much the tokens `at` listen to those at `place`: [PART, BLOCK], and one over its sums [PART], which make it a
    softmax; rows behind the end are of no use."""
    is_seen = (place < L)[None, :]
    if HAS_DOCUMENTS:  # what is behind the end is in none of them
        listening = tl.load(documents + at, mask=at < L, other=NOWHERE)
        heard = tl.load(documents + place, mask=place < L, other=NOWHERE)
        is_seen = listening[:, None] == heard[None, :]
    if HAS_WINDOW:
        is_seen = is_seen & (tl.abs(at[:, None] - place[None, :]) <= window)
    scores = tl.where(is_seen, scores, HIDDEN)
    highest = tl.max(scores, 1) * (scale * LOG2E)
    weights = tl.exp2(scores * (scale * LOG2E) - highest[:, None])
    return weights, 1.0 / tl.sum(weights, 1)


@triton.jit
def kept(seed, program, at, place, dropout, BLOCK: tl.constexpr):
    """What dropout multiplies the weights by with which tokens `at` listen to those at `place`: [PART, BLOCK]."""
    return factor_at(seed, (program * BLOCK + at[:, None]) * BLOCK + place[None, :], dropout)


@triton.jit
def begin(qkv, L, H: tl.constexpr, K: tl.constexpr):
    """A program's number, its row and head, and where the head's queries, keys and values begin in that row."""
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    queries = qkv + row * L * 3 * H * K + head * K
    return program, row, head, queries, queries + H * K, queries + 2 * H * K


@triton.jit
def mix_kernel(
    qkv, documents, turns, seed, mixed, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TURNS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """mixed [B, L, H, K] of qkv [B, L, 3, H, K]; one program for each row and head, a part of its queries at a time."""
    program, row, head, queries, keys, values = begin(qkv, L, H, K)
    place, column = tl.arange(0, BLOCK), tl.arange(0, K)
    k = read_turned(keys, turns, place, column, L, 3 * H * K, K, HAS_TURNS)
    v = read(values, place, column, L, 3 * H * K)
    for start in tl.static_range(0, BLOCK, PART):
        at = start + tl.arange(0, PART)
        q = read_turned(queries, turns, at, column, L, 3 * H * K, K, HAS_TURNS)
        scores, own = tl.dot(q, tl.trans(k)), documents + row * L
        weights, inverse = weights_of(scores, own, at, place, L, window, scale, HAS_DOCUMENTS, HAS_WINDOW)
        if HAS_DROPOUT:
            weights = weights * kept(seed, program, at, place, dropout, BLOCK)
        found = tl.dot(weights.to(v.dtype), v) * inverse[:, None]
        write(mixed + row * L * H * K + head * K, at, column, L, H * K, found.to(v.dtype))


@triton.jit
def gradient_of_mix_kernel(
    qkv, documents, turns, seed, grown, gradient, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TURNS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """gradient [B, L, 3, H, K] of qkv, from that of mixed (`grown` [B, L, H, K])."""
    program, row, head, queries, keys, values = begin(qkv, L, H, K)
    place, column = tl.arange(0, BLOCK), tl.arange(0, K)
    target = gradient + row * L * 3 * H * K + head * K
    k = read_turned(keys, turns, place, column, L, 3 * H * K, K, HAS_TURNS)
    v = read(values, place, column, L, 3 * H * K)
    dk, dv = tl.zeros([BLOCK, K], tl.float32), tl.zeros([BLOCK, K], tl.float32)
    for start in tl.static_range(0, BLOCK, PART):
        at = start + tl.arange(0, PART)
        q = read_turned(queries, turns, at, column, L, 3 * H * K, K, HAS_TURNS)
        do = read(grown + row * L * H * K + head * K, at, column, L, H * K)  # zeros behind the end
        scores, own = tl.dot(q, tl.trans(k)), documents + row * L
        weights, inverse = weights_of(scores, own, at, place, L, window, scale, HAS_DOCUMENTS, HAS_WINDOW)
        weights = weights * inverse[:, None]
        if HAS_DROPOUT:
            factor = kept(seed, program, at, place, dropout, BLOCK)
            dv = tl.dot(tl.trans((weights * factor).to(v.dtype)), do, dv)
            back = tl.dot(do, tl.trans(v)) * factor
        else:
            dv = tl.dot(tl.trans(weights.to(v.dtype)), do, dv)  # before the next, which takes as many registers
            back = tl.dot(do, tl.trans(v))
        mean = tl.sum(weights * back, 1) * scale
        ds = (weights * (back * scale - mean[:, None])).to(v.dtype)
        dk = tl.dot(tl.trans(ds), q, dk)
        write_turned(target, turns, at, column, L, 3 * H * K, K, HAS_TURNS, tl.dot(ds, k), v.dtype)
    write_turned(target + H * K, turns, place, column, L, 3 * H * K, K, HAS_TURNS, dk, v.dtype)
    write(target + 2 * H * K, place, column, L, 3 * H * K, dv.to(v.dtype))


def launch(kernel, qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, window: int,
           dropout: float, *ends: Tensor) -> None:  # fmt: skip
    """Run a kernel over all rows and heads."""
    B, L, _, H, K = qkv.shape
    block, is_dropped = max(16, triton.next_power_of_2(L)), seed is not None
    is_heavy = is_dropped or turns is not None  # noise and turns take registers, which more warps have
    part, warps = (128, 8) if is_heavy and K <= 64 else (64, 4)
    is_limited = kernel is mix_kernel and K <= 64 and torch.version.hip is None
    kernel[(B * H,)](
        qkv, qkv if documents is None else documents, qkv if turns is None else turns, qkv if seed is None else seed,
        *ends, L, window, K**-0.5, dropout,
        H=H, K=K, BLOCK=block, PART=min(part, block), HAS_DOCUMENTS=documents is not None,
        HAS_WINDOW=window >= 0, HAS_TURNS=turns is not None, HAS_DROPOUT=is_dropped,
        num_warps=warps, num_stages=1, **({"maxnreg": REGISTERS} if is_limited else {}),
    )  # fmt: skip


def by_head(vectors: Tensor, rows: int, heads: int) -> Tensor:
    """Queries, keys and values [N, 3 · D] of some rows as attention takes them: [B, L, 3, H, K]."""
    return vectors.view(rows, vectors.shape[0] // rows, 3, heads, -1)


def mix(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """Mix the values of `qkv` [B, L, 3, H, K] by the agreement of its queries and keys: [B, L, H, K].

    Tokens see those of their number in `documents` [B, L] int32, at most `window` away unless that is negative; `turns`
    [2, L, K/2] are cosines and sines of positions. A `seed` [] makes the `dropout` of weights.
    """
    mixed = qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[3], qkv.shape[4])
    launch(mix_kernel, qkv, documents, turns, seed, window, dropout, mixed)
    return mixed


def gradient_of_mix(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, grown: Tensor, window: int,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The gradient of `qkv` from that of the mixed values, `grown` [B, L, H, K]."""
    gradient = torch.empty_like(qkv)
    launch(gradient_of_mix_kernel, qkv, documents, turns, seed, window, dropout, grown, gradient)
    return gradient


@torch.library.custom_op("electra::attend_in_short_rows", mutates_args=())
def attend_in_short_rows(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """`mix`, as an operation with a gradient."""
    return mix(qkv.contiguous(), documents, turns, seed, window, dropout)


@attend_in_short_rows.register_fake
def _(qkv, documents, turns, seed, window, dropout):
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[3], qkv.shape[4])


@torch.library.custom_op("electra::gradient_in_short_rows", mutates_args=())
def gradient_in_short_rows(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, grown: Tensor, window: int,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The gradient of `qkv`, as an operation."""
    return gradient_of_mix(qkv.contiguous(), documents, turns, seed, grown.contiguous(), window, dropout)


@gradient_in_short_rows.register_fake
def _(qkv, documents, turns, seed, grown, window, dropout):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def remember(ctx, inputs, output) -> None:
    qkv, documents, turns, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(qkv, documents, turns, seed)


def backward(ctx, grown: Tensor):
    gradient = gradient_in_short_rows(*ctx.saved_tensors, grown, ctx.window, ctx.dropout)
    return gradient, None, None, None, None, None


attend_in_short_rows.register_autograd(backward, setup_context=remember)
