"""Attention biases, from padding, documents and windows, and rotary positions."""

from dataclasses import replace

import torch
from torch import Tensor

from electra.data.loader import compute_cu_seqlens
from electra.kernels.dispatch import AttentionBackend, AttentionBias


def make_attention_bias(
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: AttentionBackend,
) -> AttentionBias:
    """The bias of rows with padding at one end (`attention_mask` False), several documents, both or neither.

    `cu_seqlens` are the documents' boundaries, if they are already computed (`electra.data.loader`)."""
    if document_ids is None and attention_mask is None:
        return AttentionBias(backend)
    if document_ids is None and backend == "sdpa":
        assert attention_mask is not None
        return AttentionBias(mask=attention_mask.bool()[:, None, None, :])
    if attention_mask is not None:  # padding becomes another document
        ids = torch.zeros_like(attention_mask, dtype=torch.int32) if document_ids is None else document_ids
        count = len(ids) if document_ids is None else None if cu_seqlens is None else len(cu_seqlens) - 1
        max_documents = None if count is None else count + len(ids)
        document_ids = ids.masked_fill(~attention_mask.bool(), -1)
        cu_seqlens = compute_cu_seqlens(document_ids, max_documents) if backend == "varlen" else None
    assert document_ids is not None
    if backend == "short":
        return AttentionBias(backend, document_ids=document_ids.int().contiguous())  # the kernel assumes this layout
    if backend == "varlen":
        return AttentionBias(backend, cu_seqlens=compute_cu_seqlens(document_ids) if cu_seqlens is None else cu_seqlens)
    return AttentionBias(mask=document_ids[:, None, :, None] == document_ids[:, None, None, :])


def limit_to_window(bias: AttentionBias, window: int, length: int, device: torch.device) -> AttentionBias:
    """Restrict attention to tokens at most `window` positions away, in rows of `length` tokens."""
    if length <= window + 1:
        return bias
    if bias.backend == "short" or bias.cu_seqlens is not None:
        return replace(bias, window=window)
    position = torch.arange(length, device=device)
    distance = (position[:, None] - position).abs()[None, None]  # [1, 1, L, L]
    if bias.mask is None:
        return replace(bias, backend="sdpa", mask=distance <= window)
    mask = bias.mask | (distance == 0)  # padding far from all tokens attends to itself: a softmax of nothing is NaN
    return replace(bias, mask=mask & (distance <= window))


def make_rope(length: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, L, 1, K/2] of rotary positions in fp32; frequencies fall from 1 towards 1/theta."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]
