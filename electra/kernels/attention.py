"""Self-attention on a GPU: a Triton kernel for rows of up to 128 tokens, library kernels for longer ones.

Library kernels are built for long rows: at 128 tokens they spend most of their time on bookkeeping, and they take
documents only as a mask as large as the scores. In the Triton kernel one program holds the whole row of a head. It
reads queries, keys and values from the output of the qkv projection, applies rotary positions on the way, and computes
the softmax again in the backward pass, so that nothing is stored for it.

Longer rows use flash attention, document by document (cu_seqlens), or cuDNN, which is faster, where tokens attend to
their whole row. Both return separate gradients of queries, keys and values; one kernel packs them and sums the columns
for the bias.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.common import LOG2E, dropout_scale, split_rows_over_programs

MAX_LENGTH = 128  # tokens whose scores one program can hold
HEAD_WIDTHS = (32, 64, 128)  # of the Triton kernel
MASKED_SCORE = tl.constexpr(-(2.0**100))  # a power of two, so that scaling a fully masked row rounds nothing
NO_DOCUMENT = tl.constexpr(-(2**31))  # the document id of positions after the row's end
MAX_REGISTERS = 128  # per thread of the forward pass: the compiler would take a few more, for a quarter fewer threads

PACK_ROWS, PACK_COLUMNS = 16, 128
CUDNN_HEAD_WIDTHS = (64, 128)
CUDNN_LENGTH_MULTIPLE = 64  # no cuDNN version has to pad such rows
aten = torch.ops.aten


@triton.jit
def load_tile(base, token, column, L, stride: tl.constexpr):
    """Columns of some tokens; zeros after the row's end."""
    return tl.load(base + token[:, None] * stride + column[None, :], mask=(token < L)[:, None], other=0.0)


@triton.jit
def store_tile(base, token, column, L, stride: tl.constexpr, values):
    """Store columns of some tokens; nothing after the row's end."""
    tl.store(base + token[:, None] * stride + column[None, :], values, mask=(token < L)[:, None])


@triton.jit
def load_with_rope(base, rope, token, column, L, stride: tl.constexpr, K: tl.constexpr, HAS_ROPE: tl.constexpr):
    """Vectors [N, K], with rotary positions applied in fp32.

    Element i is rotated with element i + K/2, which is loaded as a second tile."""
    vectors = load_tile(base, token, column, L, stride)
    if HAS_ROPE:
        partner, half = load_tile(base, token, (column + K // 2) % K, L, stride).to(tl.float32), column % (K // 2)
        cos, sin = load_tile(rope, token, half, L, K // 2), load_tile(rope + L * (K // 2), token, half, L, K // 2)
        sin = tl.where((column < K // 2)[None, :], -sin, sin)
        vectors = (vectors.to(tl.float32) * cos + partner * sin).to(vectors.dtype)
    return vectors


@triton.jit
def store_with_inverse_rope(
    base, rope, token, column, L, stride: tl.constexpr, K: tl.constexpr, HAS_ROPE: tl.constexpr, vectors, dtype
):
    """Store gradients [N, K], rotated by the negative angles: the backward of `load_with_rope`."""
    if HAS_ROPE:
        half = tl.arange(0, K // 2)
        cos, sin = load_tile(rope, token, half, L, K // 2), load_tile(rope + L * (K // 2), token, half, L, K // 2)
        first, second = tl.split(tl.permute(tl.reshape(vectors, (vectors.shape[0], 2, K // 2)), (0, 2, 1)))
        store_tile(base, token, half, L, stride, (first * cos + second * sin).to(dtype))
        store_tile(base + K // 2, token, half, L, stride, (second * cos - first * sin).to(dtype))
    else:
        store_tile(base, token, column, L, stride, vectors.to(dtype))


@triton.jit
def unnormalized_softmax(
    scores, document_ids, query, key, L, window, scale, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Unnormalised weights [QUERIES, BLOCK] of queries at tokens `query` over keys at tokens `key`, and the reciprocals
    of their row sums [QUERIES]; rows after the row's end are not used."""
    mask = (key < L)[None, :]
    if HAS_DOCUMENTS:  # positions after the row's end belong to none
        query_document = tl.load(document_ids + query, mask=query < L, other=NO_DOCUMENT)
        key_document = tl.load(document_ids + key, mask=key < L, other=NO_DOCUMENT)
        mask = query_document[:, None] == key_document[None, :]
    if HAS_WINDOW:
        mask = mask & (tl.abs(query[:, None] - key[None, :]) <= window)
    scores = tl.where(mask, scores, MASKED_SCORE)
    row_max = tl.max(scores, 1) * (scale * LOG2E)
    weights = tl.exp2(scores * (scale * LOG2E) - row_max[:, None])
    return weights, 1.0 / tl.sum(weights, 1)


@triton.jit
def attention_dropout_scale(seed, program, query, key, dropout, BLOCK: tl.constexpr):
    """What dropout multiplies the attention weights [QUERIES, BLOCK] by."""
    return dropout_scale(seed, (program * BLOCK + query[:, None]) * BLOCK + key[None, :], dropout)


@triton.jit
def locate_head(qkv, L, H: tl.constexpr, K: tl.constexpr):
    """This program's number, its row and head, and pointers to the head's queries, keys and values in that row."""
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    queries = qkv + row * L * 3 * H * K + head * K
    return program, row, head, queries, queries + H * K, queries + 2 * H * K


@triton.jit
def short_attention_kernel(
    qkv, document_ids, rope, seed, out, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """out [B, L, H, K] from qkv [B, L, 3, H, K]; one program per row and head, QUERIES queries at a time."""
    program, row, head, queries, keys, values = locate_head(qkv, L, H, K)
    key, column = tl.arange(0, BLOCK), tl.arange(0, K)
    k = load_with_rope(keys, rope, key, column, L, 3 * H * K, K, HAS_ROPE)
    v = load_tile(values, key, column, L, 3 * H * K)
    for start in tl.static_range(0, BLOCK, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q = load_with_rope(queries, rope, query, column, L, 3 * H * K, K, HAS_ROPE)
        scores, documents = tl.dot(q, tl.trans(k)), document_ids + row * L
        weights, inverse = unnormalized_softmax(
            scores, documents, query, key, L, window, scale, HAS_DOCUMENTS, HAS_WINDOW
        )
        if HAS_DROPOUT:
            weights = weights * attention_dropout_scale(seed, program, query, key, dropout, BLOCK)
        context = tl.dot(weights.to(v.dtype), v) * inverse[:, None]
        store_tile(out + row * L * H * K + head * K, query, column, L, H * K, context.to(v.dtype))


@triton.jit
def short_attention_backward_kernel(
    qkv, document_ids, rope, seed, grad_out, grad_qkv, L, window, scale, dropout,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """grad_qkv [B, L, 3, H, K] from grad_out [B, L, H, K]."""
    program, row, head, queries, keys, values = locate_head(qkv, L, H, K)
    key, column = tl.arange(0, BLOCK), tl.arange(0, K)
    target = grad_qkv + row * L * 3 * H * K + head * K
    k = load_with_rope(keys, rope, key, column, L, 3 * H * K, K, HAS_ROPE)
    v = load_tile(values, key, column, L, 3 * H * K)
    grad_k, grad_v = tl.zeros([BLOCK, K], tl.float32), tl.zeros([BLOCK, K], tl.float32)
    for start in tl.static_range(0, BLOCK, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q = load_with_rope(queries, rope, query, column, L, 3 * H * K, K, HAS_ROPE)
        grad = load_tile(grad_out + row * L * H * K + head * K, query, column, L, H * K)  # zeros after the row's end
        scores, documents = tl.dot(q, tl.trans(k)), document_ids + row * L
        weights, inverse = unnormalized_softmax(
            scores, documents, query, key, L, window, scale, HAS_DOCUMENTS, HAS_WINDOW
        )
        weights = weights * inverse[:, None]
        if HAS_DROPOUT:
            factor = attention_dropout_scale(seed, program, query, key, dropout, BLOCK)
            grad_v = tl.dot(tl.trans((weights * factor).to(v.dtype)), grad, grad_v)
            grad_weights = tl.dot(grad, tl.trans(v)) * factor
        else:
            grad_v = tl.dot(tl.trans(weights.to(v.dtype)), grad, grad_v)  # before grad_weights: fewer registers in use
            grad_weights = tl.dot(grad, tl.trans(v))
        mean = tl.sum(weights * grad_weights, 1) * scale
        grad_scores = (weights * (grad_weights * scale - mean[:, None])).to(v.dtype)
        grad_k = tl.dot(tl.trans(grad_scores), q, grad_k)
        store_with_inverse_rope(target, rope, query, column, L, 3 * H * K, K, HAS_ROPE, tl.dot(grad_scores, k), v.dtype)
    store_with_inverse_rope(target + H * K, rope, key, column, L, 3 * H * K, K, HAS_ROPE, grad_k, v.dtype)
    store_tile(target + 2 * H * K, key, column, L, 3 * H * K, grad_v.to(v.dtype))


def launch_per_head(
    kernel, qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, window: int,
    dropout: float, *outputs: Tensor,
) -> None:  # fmt: skip
    """Run a kernel over all rows and heads."""
    B, L, _, H, K = qkv.shape
    block = max(16, triton.next_power_of_2(L))
    needs_registers = seed is not None or rope is not None  # more warps have more of them
    queries, warps = (128, 8) if needs_registers and K <= 64 else (64, 4)
    limit_registers = kernel is short_attention_kernel and K <= 64 and torch.version.hip is None
    kernel[(B * H,)](
        qkv, qkv if document_ids is None else document_ids, qkv if rope is None else rope,
        qkv if seed is None else seed, *outputs, L, window, K**-0.5, dropout,
        H=H, K=K, BLOCK=block, QUERIES=min(queries, block), HAS_DOCUMENTS=document_ids is not None,
        HAS_WINDOW=window >= 0, HAS_ROPE=rope is not None, HAS_DROPOUT=seed is not None,
        num_warps=warps, num_stages=1, **({"maxnreg": MAX_REGISTERS} if limit_registers else {}),
    )  # fmt: skip


def fits_short_attention(length: int, head_width: int) -> bool:
    """Whether the Triton kernel takes rows of this length and heads of this width."""
    return length <= MAX_LENGTH and head_width in HEAD_WIDTHS


def split_heads(qkv: Tensor, num_rows: int, heads: int) -> Tensor:
    """Queries, keys and values [B · L, 3 · D] as [B, L, 3, H, K]."""
    return qkv.view(num_rows, qkv.shape[0] // num_rows, 3, heads, -1)


def short_attention_forward(
    qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """softmax(Q Kᵀ / √K) V of `qkv` [B, L, 3, H, K], L at most MAX_LENGTH: [B, L, H, K].

    Tokens attend within their document, by `document_ids` [B, L] int32, at most `window` tokens away unless that is
    negative. `rope` [2, L, K/2] holds cosines and sines. Attention weights are dropped with a `seed` []."""
    B, L, _, H, K = qkv.shape
    out = qkv.new_empty(B, L, H, K)
    launch_per_head(short_attention_kernel, qkv, document_ids, rope, seed, window, dropout, out)
    return out


def short_attention_backward(
    qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, grad_out: Tensor, window: int,
    dropout: float,
) -> Tensor:  # fmt: skip
    """grad_qkv [B, L, 3, H, K] from `grad_out` [B, L, H, K]."""
    grad_qkv = torch.empty_like(qkv)
    launch_per_head(short_attention_backward_kernel, qkv, document_ids, rope, seed, window, dropout, grad_out, grad_qkv)
    return grad_qkv


@torch.library.custom_op("electra::short_attention", mutates_args=())
def short_attention(
    qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """`short_attention_forward` with autograd."""
    return short_attention_forward(qkv.contiguous(), document_ids, rope, seed, window, dropout)


@short_attention.register_fake
def _(qkv, document_ids, rope, seed, window, dropout):
    B, L, _, H, K = qkv.shape
    return qkv.new_empty(B, L, H, K)


@torch.library.custom_op("electra::short_attention_backward", mutates_args=())
def short_attention_backward_op(
    qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, grad_out: Tensor, window: int,
    dropout: float,
) -> Tensor:  # fmt: skip
    return short_attention_backward(qkv.contiguous(), document_ids, rope, seed, grad_out.contiguous(), window, dropout)


@short_attention_backward_op.register_fake
def _(qkv, document_ids, rope, seed, grad_out, window, dropout):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def setup_context(ctx, inputs, output) -> None:
    qkv, document_ids, rope, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(qkv, document_ids, rope, seed)


def backward(ctx, grad_out: Tensor):
    grad_qkv = short_attention_backward_op(*ctx.saved_tensors, grad_out, ctx.window, ctx.dropout)
    return grad_qkv, None, None, None, None, None


short_attention.register_autograd(backward, setup_context=setup_context)


@cache
def has_fast_cudnn(device: int) -> bool:
    """Whether cuDNN's attention is faster than flash attention: measured on Hopper only."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def should_use_cudnn(qkv: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether cuDNN computes attention over these whole rows `qkv` [B, L, 3, H, K]."""
    fits = qkv.shape[-1] in CUDNN_HEAD_WIDTHS and qkv.shape[1] % CUDNN_LENGTH_MULTIPLE == 0
    enabled = torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled()
    return fits and cu_seqlens is None and enabled and has_fast_cudnn(qkv.device.index)


def long_attention_forward(qkv: Tensor, cu_seqlens: Tensor | None, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(Q Kᵀ / √K) V of `qkv` [B, L, 3, H, K]: [B, L, H, K], logsumexp [B · L · H] and dropout's rng_state [2].

    Tokens attend within their document, whose boundaries in the flattened batch are `cu_seqlens` [documents + 1]."""
    query, key, value = qkv.unbind(2)
    if should_use_cudnn(qkv, cu_seqlens):
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        out, logsumexp, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, dropout
        )
        rng_state = torch.cat([seed.view(1), offset.view(1)]).to(qkv.device) if dropout else empty_rng_state(qkv)
        return out.transpose(1, 2).contiguous(), logsumexp.flatten(), rng_state
    flat = [each.flatten(0, 1) for each in (query, key, value)]
    out, logsumexp, rng_state, *_ = aten._flash_attention_forward(
        *flat, *cu_seqlens_and_max_lengths(qkv, cu_seqlens), dropout, False, False
    )
    return out.view_as(value), logsumexp.flatten(), rng_state.view(torch.int64) if dropout else empty_rng_state(qkv)


def long_attention_backward(
    qkv: Tensor, cu_seqlens: Tensor | None, out: Tensor, logsumexp: Tensor, rng_state: Tensor, grad_out: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grad_qkv [B, L, 3, H, K], and partial sums [programs, 3 · H · K] for its bias."""
    B, L, _, H, _ = qkv.shape
    query, key, value = qkv.unbind(2)
    if should_use_cudnn(qkv, cu_seqlens):
        heads = [each.transpose(1, 2) for each in (grad_out, query, key, value, out)]
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *heads, logsumexp.view(B, H, L, 1), rng_state[0], rng_state[1], None, None, None, L, L, dropout, False
        )
        return pack_qkv_grads(qkv, *(grad.transpose(1, 2).contiguous() for grad in grads))
    flat = [each.flatten(0, 1) for each in (grad_out, query, key, value, out)]
    lengths = cu_seqlens_and_max_lengths(qkv, cu_seqlens)
    options = *lengths, dropout, False, rng_state.view(torch.uint64), qkv.new_empty(0)
    return pack_qkv_grads(qkv, *aten._flash_attention_backward(*flat, logsumexp.view(H, B * L), *options))


def cu_seqlens_and_max_lengths(qkv: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and of keys, and their maximal lengths; without documents each row is one."""
    B, L = qkv.shape[:2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, B * L + 1, L, device=qkv.device, dtype=torch.int32)
    return cu_seqlens, cu_seqlens, L, L


def empty_rng_state(qkv: Tensor) -> Tensor:
    """A placeholder where there is no dropout."""
    return torch.zeros(2, device=qkv.device, dtype=torch.int64)


@triton.jit
def pack_qkv_kernel(
    queries, keys, values, packed, partials, N, D, blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """packed [N, 3, D] from queries, keys and values [N, D], and its column sums over the rows of each program."""
    column, which = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS), tl.program_id(2)
    source = queries
    if which == 1:
        source = keys
    if which == 2:
        source = values
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in range(blocks):
        row = ((tl.program_id(0) * blocks + block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (row < N)[:, None] & (column < D)[None, :]
        tile = tl.load(source + row[:, None] * D + column[None, :], mask=mask, other=0.0)
        tl.store(packed + (row[:, None] * 3 + which) * D + column[None, :], tile, mask=mask)
        total += tile.to(tl.float32)
    target = partials + (tl.program_id(0).to(tl.int64) * 3 + which) * D + column
    tl.store(target, tl.sum(total, 0), mask=column < D)


def pack_qkv_grads(qkv: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries, keys and values as one of `qkv` [B, L, 3, H, K], and partial sums [programs, 3 · D]."""
    B, L, _, H, K = qkv.shape
    N, D = B * L, H * K
    packed = torch.empty_like(qkv)
    column_blocks = triton.cdiv(D, PACK_COLUMNS)
    blocks, programs = split_rows_over_programs(N, PACK_ROWS, 3 * column_blocks)
    partials = torch.empty(programs, 3 * D, device=qkv.device)
    pack_qkv_kernel[(programs, column_blocks, 3)](
        queries, keys, values, packed, partials, N, D, blocks,
        BLOCK_ROWS=PACK_ROWS, BLOCK_COLUMNS=PACK_COLUMNS, num_warps=4,
    )  # fmt: skip
    return packed, partials
