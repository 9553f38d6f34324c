"""Attention over short rows on a GPU: one program holds a whole row of one head, forward and backward.

Library kernels are made for long rows: at 128 tokens they spend most of their time on bookkeeping, and know documents
only as a mask as large as the scores. Here queries, keys and values are read where the layer's product left them,
positions turn them on the way in, and the softmax is made again in the backward pass: nothing is kept for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 128  # tokens whose scores one program can hold
WIDTHS = (32, 64, 128)  # of a head


@triton.jit
def read_half(base, place, column, is_token, stride: tl.constexpr):
    """Half of each token's vector [BLOCK, K/2]; zeros behind the row's end."""
    return tl.load(base + place[:, None] * stride + column[None, :], mask=is_token[:, None], other=0.0)


@triton.jit
def turn(first, second, cosine, sine):
    """Both halves of vectors, turned by their positions' angles in fp32."""
    turned_first = first.to(tl.float32) * cosine - second.to(tl.float32) * sine
    turned_second = second.to(tl.float32) * cosine + first.to(tl.float32) * sine
    return turned_first.to(first.dtype), turned_second.to(first.dtype)


@triton.jit
def softmax_of(scores, documents, place, is_token, L, window, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Who listens to whom, and how much: [BLOCK, BLOCK]; rows behind the end are of no use."""
    is_seen = is_token[None, :]
    if HAS_DOCUMENTS:
        document = tl.load(documents + place, mask=is_token, other=-2)
        is_seen = is_seen & (document[:, None] == document[None, :])
    if HAS_WINDOW:
        is_seen = is_seen & (tl.abs(place[:, None] - place[None, :]) <= window)
    scores = tl.where(is_seen, scores, -1e30)
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def kept(seed, program, place, dropout, BLOCK: tl.constexpr):
    """What dropout multiplies weights by [BLOCK, BLOCK]: 0, or what makes up for the zeros."""
    number = (program * BLOCK + place[:, None]) * BLOCK + place[None, :]
    return tl.where(tl.rand(tl.load(seed), number) < dropout, 0.0, 1.0 / (1.0 - dropout))


@triton.jit
def forward_kernel(
    qkv, documents, turns, seed, mixed, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TURNS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """mixed [B, L, H, K] of qkv [B, L, 3, H, K]; one program for each row and head."""
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    place, half, column = tl.arange(0, BLOCK), tl.arange(0, K // 2), tl.arange(0, K)
    is_token = place < L
    base = qkv + row * L * 3 * H * K + head * K
    q1 = read_half(base, place, half, is_token, 3 * H * K)
    q2 = read_half(base + K // 2, place, half, is_token, 3 * H * K)
    k1 = read_half(base + H * K, place, half, is_token, 3 * H * K)
    k2 = read_half(base + H * K + K // 2, place, half, is_token, 3 * H * K)
    v = read_half(base + 2 * H * K, place, column, is_token, 3 * H * K)
    if HAS_TURNS:
        cosine = read_half(turns, place, half, is_token, K // 2)
        sine = read_half(turns + L * (K // 2), place, half, is_token, K // 2)
        q1, q2 = turn(q1, q2, cosine, sine)
        k1, k2 = turn(k1, k2, cosine, sine)
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    weights = softmax_of(scores, documents + row * L, place, is_token, L, window, HAS_DOCUMENTS, HAS_WINDOW)
    if HAS_DROPOUT:
        weights = weights * kept(seed, program, place, dropout, BLOCK)
    out = tl.dot(weights.to(v.dtype), v)
    target = mixed + row * L * H * K + head * K + place[:, None] * (H * K) + column[None, :]
    tl.store(target, out.to(v.dtype), mask=is_token[:, None])


@triton.jit
def backward_kernel(
    qkv, documents, turns, seed, grown, gradient, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TURNS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """gradient [B, L, 3, H, K] of qkv, from that of mixed (`grown` [B, L, H, K])."""
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    place, half, column = tl.arange(0, BLOCK), tl.arange(0, K // 2), tl.arange(0, K)
    is_token = place < L
    base = qkv + row * L * 3 * H * K + head * K
    q1 = read_half(base, place, half, is_token, 3 * H * K)
    q2 = read_half(base + K // 2, place, half, is_token, 3 * H * K)
    k1 = read_half(base + H * K, place, half, is_token, 3 * H * K)
    k2 = read_half(base + H * K + K // 2, place, half, is_token, 3 * H * K)
    v = read_half(base + 2 * H * K, place, column, is_token, 3 * H * K)
    do = read_half(grown + row * L * H * K + head * K, place, column, is_token, H * K)
    if HAS_TURNS:
        cosine = read_half(turns, place, half, is_token, K // 2)
        sine = read_half(turns + L * (K // 2), place, half, is_token, K // 2)
        q1, q2 = turn(q1, q2, cosine, sine)
        k1, k2 = turn(k1, k2, cosine, sine)
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    weights = softmax_of(scores, documents + row * L, place, is_token, L, window, HAS_DOCUMENTS, HAS_WINDOW)
    back = tl.dot(do, tl.trans(v))  # of the weights that were left by dropout
    used = weights
    if HAS_DROPOUT:
        factor = kept(seed, program, place, dropout, BLOCK)
        used, back = weights * factor, back * factor
    used = tl.where(is_token[:, None], used, 0.0).to(v.dtype)
    dv = tl.dot(tl.trans(used), do)
    ds = weights * (back - tl.sum(weights * back, 1)[:, None]) * scale
    ds = tl.where(is_token[:, None], ds, 0.0).to(v.dtype)
    dq1, dq2 = tl.dot(ds, k1), tl.dot(ds, k2)
    dk1, dk2 = tl.dot(tl.trans(ds), q1), tl.dot(tl.trans(ds), q2)
    if HAS_TURNS:  # back by the same angles
        dq1, dq2 = turn(dq1, dq2, cosine, -sine)
        dk1, dk2 = turn(dk1, dk2, cosine, -sine)
    target = gradient + row * L * 3 * H * K + head * K + place[:, None] * (3 * H * K)
    tl.store(target + half[None, :], dq1.to(v.dtype), mask=is_token[:, None])
    tl.store(target + K // 2 + half[None, :], dq2.to(v.dtype), mask=is_token[:, None])
    tl.store(target + H * K + half[None, :], dk1.to(v.dtype), mask=is_token[:, None])
    tl.store(target + H * K + K // 2 + half[None, :], dk2.to(v.dtype), mask=is_token[:, None])
    tl.store(target + 2 * H * K + column[None, :], dv.to(v.dtype), mask=is_token[:, None])


def launch(kernel, qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, window: int,
           dropout: float, *ends: Tensor) -> None:  # fmt: skip
    """Run a kernel over all rows and heads."""
    B, L, _, H, K = qkv.shape
    kernel[(B * H,)](
        qkv, qkv if documents is None else documents, qkv if turns is None else turns, qkv if seed is None else seed,
        *ends, L, window, K**-0.5, dropout,
        H=H, K=K, BLOCK=max(16, triton.next_power_of_2(L)), HAS_DOCUMENTS=documents is not None,
        HAS_WINDOW=window >= 0, HAS_TURNS=turns is not None, HAS_DROPOUT=seed is not None,
        num_warps=4 if kernel is forward_kernel else 8, num_stages=1,
    )  # fmt: skip


@torch.library.custom_op("electra::attend_in_short_rows", mutates_args=())
def attend_in_short_rows(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """Mix the values of `qkv` [B, L, 3, H, K] by the agreement of its queries and keys: [B, L, H, K].

    Tokens see those of their number in `documents` [B, L] int32, at most `window` away unless that is negative; `turns`
    [2, L, K/2] are cosines and sines of positions. A `seed` [] makes the `dropout` of weights.
    """
    qkv = qkv.contiguous()
    mixed = qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[3], qkv.shape[4])
    launch(forward_kernel, qkv, documents, turns, seed, window, dropout, mixed)
    return mixed


@attend_in_short_rows.register_fake
def _(qkv, documents, turns, seed, window, dropout):
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[3], qkv.shape[4])


@torch.library.custom_op("electra::gradient_in_short_rows", mutates_args=())
def gradient_in_short_rows(
    qkv: Tensor, documents: Tensor | None, turns: Tensor | None, seed: Tensor | None, grown: Tensor, window: int,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The gradient [B, L, 3, H, K] of `qkv` from that of the mixed values, `grown` [B, L, H, K]."""
    qkv, grown = qkv.contiguous(), grown.contiguous()
    gradient = torch.empty_like(qkv)
    launch(backward_kernel, qkv, documents, turns, seed, window, dropout, grown, gradient)
    return gradient


@gradient_in_short_rows.register_fake
def _(qkv, documents, turns, seed, grown, window, dropout):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def remember(ctx, inputs, output) -> None:
    qkv, documents, turns, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(qkv, documents, turns, seed)


def backward(ctx, grown: Tensor):
    qkv, documents, turns, seed = ctx.saved_tensors
    gradient = gradient_in_short_rows(qkv, documents, turns, seed, grown, ctx.window, ctx.dropout)
    return gradient, None, None, None, None, None


attend_in_short_rows.register_autograd(backward, setup_context=remember)
