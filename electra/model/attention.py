"""Who attends to whom, and the attention itself, through PyTorch's fused kernels or, for short rows, our own."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from electra.data.loader import compute_cu_seqlens
from electra.kernels.dispatch import HALVES, HAS_TRITON, is_for_kernels, precision_at

if torch.cuda.is_available():  # it takes half as long to import as torch itself, and is of no use elsewhere
    from torch.nn.attention.varlen import varlen_attn
if HAS_TRITON:
    from electra.kernels import attention as short_rows

WIDEST = 192  # of the heads whose backward pass flash attention has on every card
Kernel = Literal["mask", "documents", "short rows"]
"""How attention keeps to its reach: by a mask of all pairs, by a list of documents, or with whole rows at hand."""


@dataclass(frozen=True)
class AttentionBias:
    """How far each token sees, worked out once and used by every layer of a kind.

    Nothing set: every token sees its whole row. Padding, and documents that share a row, are hidden in the way of the
    kernel that attends: by a mask, by where each document starts, or by each token's document. Local layers see a
    window only.
    """

    kernel: Kernel = "mask"
    mask: Tensor | None = None  # [B, 1, 1 or L, L] bool, True where a query (row) sees a key (column)
    starts: Tensor | None = None  # [N + 1] int32, where the N documents start in the flattened batch, and its end
    documents: Tensor | None = None  # [B, L] int32, each token's; for short rows
    window: int = -1  # tokens that are seen to either side; -1 for all. A mask has it built in
    turns: Tensor | None = None  # [2, L, 1, K/2] cosines and sines by which positions turn queries and keys


def attention_bias_of(
    attention_mask: Tensor | None, documents: Tensor | None, starts: Tensor | None = None, *, kernel: Kernel
) -> AttentionBias:
    """The reach of tokens in rows with padding at one end (`attention_mask` False), several documents, both or neither.

    `starts` is the list of documents, where there is one already (`text.batches.compute_cu_seqlens`)."""
    if documents is None and attention_mask is None:
        return AttentionBias(kernel)
    if documents is None and kernel == "mask":
        assert attention_mask is not None
        return AttentionBias(mask=attention_mask.bool()[:, None, None, :])
    if attention_mask is not None:  # padding becomes a document of its own
        rows = torch.zeros_like(attention_mask, dtype=torch.int32) if documents is None else documents
        before = len(rows) if documents is None else None if starts is None else len(starts) - 1
        most = None if before is None else before + len(rows)
        documents = rows.masked_fill(~attention_mask.bool(), -1)
        starts = compute_cu_seqlens(documents, most) if kernel == "documents" else None
    assert documents is not None
    if kernel == "short rows":
        return AttentionBias(kernel, documents=documents.int().contiguous())  # our kernel reads them row by row
    if kernel == "documents":
        return AttentionBias(kernel, starts=compute_cu_seqlens(documents) if starts is None else starts)
    return AttentionBias(mask=documents[:, None, :, None] == documents[:, None, None, :])


def within(reach: AttentionBias, window: int, length: int, device: torch.device) -> AttentionBias:
    """The part of a reach that is at most `window` tokens away, in rows of `length`."""
    if length <= window + 1:
        return reach
    if reach.kernel == "short rows" or reach.starts is not None:
        return replace(reach, window=window)
    place = torch.arange(length, device=device)
    distance = (place[:, None] - place).abs()[None, None]  # [1, 1, L, L]
    if reach.mask is None:
        return replace(reach, kernel="mask", mask=distance <= window)
    is_seen = reach.mask | (distance == 0)  # padding far from all tokens sees itself: nothing at all is no number
    return replace(reach, mask=is_seen & (distance <= window))


def turns_of(length: int, width: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, L, 1, K/2] of rotary positions (RoPE) in fp32; speeds fall from 1 towards 1/theta."""
    speeds = 1.0 / theta ** (torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def turned(vectors: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (i, i + K/2) of `vectors` [B, L, H, K] by their positions' angles, in fp32 whatever came."""
    cosine, sine = turns  # each [L, 1, K/2]
    first, second = vectors.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(vectors.dtype)


def attend(qkv: Tensor, reach: AttentionBias, dropout: float) -> Tensor:
    """Mix the values of `qkv` [B, L, 3, H, K] by the agreement of its queries and keys, as far as `reach` allows."""
    if reach.kernel == "short rows":
        return attend_in_short_rows(qkv, reach, dropout)
    query, key, value = qkv.unbind(2)  # each [B, L, H, K]
    if reach.turns is not None:
        query, key = turned(query, reach.turns), turned(key, reach.turns)
    if reach.starts is not None:
        return attend_by_document(query, key, value, reach.starts, reach.window, dropout)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, H, L, K]
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=reach.mask, dropout_p=dropout)
    return mixed.transpose(1, 2)  # [B, L, H, K]


def attend_in_short_rows(qkv: Tensor, reach: AttentionBias, dropout: float) -> Tensor:
    """Attention with whole rows at hand; [B, L, H, K] of `qkv` [B, L, 3, H, K]."""
    turns = None if reach.turns is None else reach.turns.squeeze(2)
    seed = torch.randint(2**31, (), device=qkv.device, dtype=torch.int32) if dropout else None
    return short_rows.attend_in_short_rows(qkv, reach.documents, turns, seed, reach.window, dropout)


def attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int, dropout: float
) -> Tensor:
    """Attention within each document of the flattened batch, without a mask; [B, L, H, K] as `query`."""
    B, L = query.shape[:2]
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)  # [B * L, H, K]
    text = (query, key, value, starts, starts, L, L)
    if dropout:  # which `varlen_attn` has not, but what it calls (torch 2.11 to 2.13)
        sides = {"window_size_left": window, "window_size_right": window} if window >= 0 else {}
        mixed, *_ = torch.ops.aten._flash_attention_forward(*text, dropout, False, False, **sides)
    else:
        mixed = varlen_attn(*text) if window < 0 else varlen_attn(*text, window_size=(window, window))
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (B, L))


def kernel_for(weight: Tensor, length: int, head_width: int, is_listed: bool) -> Kernel:
    """The kernel for rows of `length` tokens: without a mask only where kernels take tensors, and for usual heads.

    A compiled graph also needs a list of documents (`is_listed`, or none to list): one made in it would have another
    length in every batch.
    """
    if is_for_kernels(weight) and length <= short_rows.LONGEST and head_width in short_rows.WIDTHS:
        return "short rows"
    if not weight.is_cuda or precision_at(weight) not in HALVES or head_width % 8 or head_width > WIDEST:
        return "mask"
    return "mask" if torch.compiler.is_compiling() and not is_listed else "documents"
