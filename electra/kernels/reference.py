"""Each kernel in a few lines of eager PyTorch: its documentation, the tests' oracle and the fallback without a GPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks

from electra.random import hash_uint32, sample_from_logits


def dropout_scale(seed: Tensor | None, index: Tensor, dropout: float) -> Tensor | float:
    """What dropout multiplies element `index` by: 0 or 1 / (1 − dropout), a function of seed and index."""
    if seed is None or not dropout:
        return 1.0
    key = int(seed)
    bits = hash_uint32((hash_uint32(index ^ hash_uint32(key)) + key) % 2**32)
    return torch.where(bits < dropout * 2**32, 0.0, 1 / (1 - dropout))


def apply_rope(vectors: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs (i, i + K/2) of `vectors` [B, L, H, K] by their positions' angles, in fp32.

    `rope` [2, L, 1, K/2] holds the angles' cosines and sines."""
    cos, sin = rope
    first, second = vectors.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(vectors.dtype)


def short_attention(
    qkv: Tensor, document_ids: Tensor | None, rope: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> Tensor:
    """softmax(Q Kᵀ / √K) V of `qkv` [B, L, 3, H, K], within documents and the window: [B, L, H, K]."""
    B, L, _, H, K = qkv.shape
    query, key, value = qkv.unbind(2)
    if rope is not None:  # [2, L, K/2]
        query, key = apply_rope(query, rope[:, :, None]), apply_rope(key, rope[:, :, None])
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, H, L, K]
    scores = query @ key.transpose(-1, -2) * K**-0.5  # [B, H, L, L]
    if document_ids is not None:
        is_same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        scores = scores.masked_fill(~is_same, float("-inf"))
    if window >= 0:
        position = torch.arange(L, device=qkv.device)
        scores = scores.masked_fill((position[:, None] - position).abs() > window, float("-inf"))
    block = max(16, 2 ** (L - 1).bit_length())  # the kernel numbers its weights as if rows had this length
    index = torch.arange(B * H * block * block, device=qkv.device).view(B, H, block, block)[:, :, :L, :L]
    weights = scores.softmax(-1) * dropout_scale(seed, index, dropout)
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def qkv_bias_grad(grad_qkv: Tensor) -> Tensor:
    """Column sums of `grad_qkv` [N, 3 · D]; exactly zero for the keys, whose bias the softmax ignores."""
    grad_query, _, grad_value = grad_qkv.unflatten(1, (3, -1)).sum(0)
    return torch.cat([grad_query, torch.zeros_like(grad_query), grad_value])


def dropout_add_layernorm(
    x: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor, epsilon: float,
    seed: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Post-norm: LayerNorm(residual + dropout(x + bias)), in fp32 inside."""
    index = torch.arange(x.numel(), device=x.device).view_as(x)
    total = residual.float() + (x.float() + bias) * dropout_scale(seed, index, dropout)
    return functional.layer_norm(total, norm_weight.shape, norm_weight, norm_bias, epsilon).to(x.dtype)


def add_layernorm(residual: Tensor, x: Tensor, norm_weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Pre-norm: the fp32 sum residual + x, and its LayerNorm without bias."""
    total = residual + x.float()
    return total, functional.layer_norm(total, norm_weight.shape, norm_weight, None, epsilon).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) with the exact (erf) Φ, in fp32 inside."""
    return functional.gelu(x.float() + bias.float()).to(x.dtype)


def linear_gelu(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """gelu(linear(hidden)) with the exact (erf) Φ.

    In place where neither autograd nor a hook reads the linear layer's output: no new memory on a CPU."""
    out = linear(hidden)
    has_reader = linear._forward_hooks or _global_forward_hooks or type(linear) is not nn.Linear
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or has_reader:
        return functional.gelu(out)
    return torch.ops.aten.gelu_(out)


def geglu(x: Tensor) -> Tensor:
    """gelu(first half) · second half of `x` [..., 2 · F]: [..., F]."""
    value, gate = x.chunk(2, dim=-1)
    return functional.gelu(value) * gate


def gather_positions(hidden: Tensor, positions: Tensor | None) -> Tensor:
    """The states [B, M, D] of `hidden` [B, L, D] at `positions` [B, M], or all of them."""
    return hidden if positions is None else hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))


def classic_layer(
    hidden: Tensor, parameters: list[Tensor], document_ids: Tensor | None, positions: Tensor | None,
    seeds: Tensor | None, *, heads: int, attention_dropout: float, dropout: float, epsilon: float,
) -> Tensor:  # fmt: skip
    """A post-norm layer over `hidden` [B, L, D]; `seeds` [3] as `fused_layers.dropout_seeds` draws them."""
    qkv_weight, qkv_bias, output, output_bias, norm1_weight, norm1_bias = parameters[:6]
    up, up_bias, down, down_bias, norm2_weight, norm2_bias = parameters[6:]
    first, second, third = (None, None, None) if seeds is None else seeds
    qkv = functional.linear(hidden, qkv_weight, qkv_bias).unflatten(-1, (3, heads, -1))  # [B, L, 3, H, K]
    context = short_attention(qkv, document_ids, None, third, -1, attention_dropout).flatten(2)  # [B, L, D]
    context, hidden = gather_positions(context, positions), gather_positions(hidden, positions)
    projected = functional.linear(context, output)
    between = dropout_add_layernorm(projected, output_bias, hidden, norm1_weight, norm1_bias, epsilon, first, dropout)
    activated = bias_gelu(functional.linear(between, up), up_bias)
    down_out = functional.linear(activated, down)
    return dropout_add_layernorm(down_out, down_bias, between, norm2_weight, norm2_bias, epsilon, second, dropout)


def modern_layer(
    residual: Tensor, pending: Tensor | None, parameters: list[Tensor], document_ids: Tensor | None, rope: Tensor,
    positions: Tensor | None, *, heads: int, window: int, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A pre-norm layer: the fp32 residual stream [B, L, D] and the feed-forward output that the next layer adds."""
    *attention_norm, qkv_weight, output, norm, up, down = parameters
    normalized = residual.to(qkv_weight.dtype)  # in the first layer the embeddings are already normalised
    if pending is not None:
        residual, normalized = add_layernorm(residual, pending, attention_norm[0], epsilon)
    qkv = functional.linear(normalized, qkv_weight).unflatten(-1, (3, heads, -1))  # [B, L, 3, H, K]
    context = short_attention(qkv, document_ids, rope, None, window, 0.0).flatten(2)  # [B, L, D]
    projected = functional.linear(gather_positions(context, positions), output)
    total, between = add_layernorm(gather_positions(residual, positions), projected, norm, epsilon)
    return total, functional.linear(geglu(functional.linear(between, up)), down)


def mlm_loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `labels` [B, M] and a Gumbel-max sample [B, M] of the logits of `states` [B, M, E]."""
    logits = functional.linear(states, table.to(states.dtype), bias.to(states.dtype)).float()  # [B, M, V]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return losses, sample_from_logits(logits, block_keys, token_keys)
