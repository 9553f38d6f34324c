"""Transformer layers as single operations with a hand-written backward pass: classic (post-norm), modern (pre-norm).

Between its matrix products a layer only launches the kernels of this folder (README.md draws where). In the backward
pass gradients that meet in a residual are added by the matrix product that comes last (addmm), and weight gradients run
on a side stream.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from electra.kernels import attention
from electra.kernels.common import (
    column_sums,
    column_sums_by_matrix,
    flatten_positions,
    gather_rows,
    qkv_bias_grad,
    scatter_rows,
)
from electra.kernels.gelu import bias_gelu_backward, bias_gelu_forward, geglu_backward, geglu_forward
from electra.kernels.layernorm import (
    add_layernorm_backward,
    add_layernorm_forward,
    dropout_add_layernorm_backward,
    dropout_add_layernorm_forward,
)
from electra.kernels.side_stream import WeightGradientStream

NO_WINDOW = -1


class ClassicWeights(NamedTuple):
    """The parameters after the qkv projection, in the order of `ClassicLayer.parameters()`."""

    output: Tensor  # [D, D]
    output_bias: Tensor
    norm1_weight: Tensor
    norm1_bias: Tensor
    up: Tensor  # [F, D]
    up_bias: Tensor
    down: Tensor  # [D, F]
    down_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor


class ClassicActivations(NamedTuple):
    """Stored between attention and the end of the layer for the backward pass."""

    output: Tensor  # [N, D] the attention's output projection
    between: Tensor  # [N, D] hidden states between the two norms
    up: Tensor  # [N, F]
    activated: Tensor  # [N, F]
    down: Tensor  # [N, D]


class AttentionActivations(NamedTuple):
    """Stored by attention for the backward pass."""

    qkv: Tensor  # [N, 3 · D]
    context: Tensor  # [N, D] the weighted values
    logsumexp: Tensor  # [N · H]; empty for short attention
    rng_state: Tensor  # [2] of library attention's dropout; empty for short attention


def select_seed(seeds: Tensor | None, index: int, dropout: float) -> Tensor | None:
    """One of the seeds, or None without dropout."""
    return None if seeds is None or not dropout else seeds[index]


def classic_layer_after_attention(
    context: Tensor, residual: Tensor, weights: ClassicWeights, seeds: Tensor | None, dropout: float, epsilon: float
) -> tuple[Tensor, ClassicActivations]:
    """The layer's output [N, D] from the weighted values of its attention, `context`, and its input, `residual`."""
    first, second = select_seed(seeds, 0, dropout), select_seed(seeds, 1, dropout)
    output = context @ weights.output.T
    between = dropout_add_layernorm_forward(
        output, weights.output_bias, residual, weights.norm1_weight, weights.norm1_bias, epsilon, first, dropout
    )
    up = between @ weights.up.T
    activated = bias_gelu_forward(up, weights.up_bias)
    down = activated @ weights.down.T
    hidden = dropout_add_layernorm_forward(
        down, weights.down_bias, between, weights.norm2_weight, weights.norm2_bias, epsilon, second, dropout
    )
    return hidden, ClassicActivations(output, between, up, activated, down)


def classic_layer_after_attention_backward(
    context: Tensor, residual: Tensor, weights: ClassicWeights, saved: ClassicActivations, seeds: Tensor | None,
    dropout: float, epsilon: float, grad_out: Tensor, side_stream: WeightGradientStream,
) -> tuple[Tensor, Tensor, ClassicWeights]:  # fmt: skip
    """The gradients of `context`, `residual` and, still running on the side stream, the weights.

    Without dropout grad_between and grad_down_out are the same tensor. The side stream reads it, so the main stream
    joins before `addmm_` updates it in place."""
    first, second = select_seed(seeds, 0, dropout), select_seed(seeds, 1, dropout)
    grad_between, grad_down_out, partials = dropout_add_layernorm_backward(
        saved.down, weights.down_bias, saved.between, weights.norm2_weight, grad_out, epsilon, second, dropout
    )
    grad_down = side_stream(torch.mm, grad_down_out.T, saved.activated)
    dtypes = weights.norm2_weight.dtype, weights.norm2_bias.dtype, weights.down_bias.dtype
    grad_norm2_weight, grad_norm2_bias, grad_down_bias = side_stream(column_sums_by_matrix, partials, *dtypes)
    grad_up_out, partials = bias_gelu_backward(saved.up, weights.up_bias, grad_down_out @ weights.down)
    side_stream.join()
    grad_up = side_stream(torch.mm, grad_up_out.T, saved.between)
    grad_up_bias = side_stream(column_sums, partials, weights.up_bias.dtype)
    grad_between.addmm_(grad_up_out, weights.up)
    grad_residual, grad_projected, partials = dropout_add_layernorm_backward(
        saved.output, weights.output_bias, residual, weights.norm1_weight, grad_between, epsilon, first, dropout
    )
    grad_output = side_stream(torch.mm, grad_projected.T, context)
    dtypes = weights.norm1_weight.dtype, weights.norm1_bias.dtype, weights.output_bias.dtype
    grad_norm1_weight, grad_norm1_bias, grad_output_bias = side_stream(column_sums_by_matrix, partials, *dtypes)
    grad_context = grad_projected @ weights.output
    grad_weights = ClassicWeights(
        grad_output, grad_output_bias, grad_norm1_weight, grad_norm1_bias, grad_up, grad_up_bias,
        grad_down, grad_down_bias, grad_norm2_weight, grad_norm2_bias,
    )  # fmt: skip
    return grad_context, grad_residual, grad_weights


def empty_attention_state(hidden: Tensor, heads: int, use_short_attention: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised logsumexp and rng_state."""
    sizes = (0, 0) if use_short_attention else (len(hidden) * heads, 2)
    return hidden.new_empty(sizes[0], dtype=torch.float32), hidden.new_empty(sizes[1], dtype=torch.int64)


def classic_layer(
    hidden: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], document_ids: Tensor | None,
    cu_seqlens: Tensor | None, seeds: Tensor | None, rows: Tensor | None, batch_size: int, heads: int,
    use_short_attention: bool, attention_dropout: float, dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The layer's output from its input `hidden` [N, D], then `AttentionActivations` and `ClassicActivations`.

    Short attention takes `document_ids` [B, L], library attention `cu_seqlens` [documents + 1]. With `rows` [M] only
    those rows of the output are computed: [M, D]."""
    weight, bias = qkv_weights
    qkv = torch.addmm(bias, hidden, weight.T)
    split = attention.split_heads(qkv, batch_size, heads)
    if use_short_attention:
        seed = select_seed(seeds, 2, attention_dropout)
        context = attention.short_attention_forward(split, document_ids, None, seed, NO_WINDOW, attention_dropout)
        logsumexp, rng_state = empty_attention_state(hidden, heads, use_short_attention)
    else:
        context, logsumexp, rng_state = attention.long_attention_forward(split, cu_seqlens, attention_dropout)
    context = context.view_as(hidden)
    out, saved = classic_layer_after_attention(
        gather_rows(context, rows), gather_rows(hidden, rows), ClassicWeights(*weights), seeds, dropout, epsilon
    )
    return out, *AttentionActivations(qkv, context, logsumexp, rng_state), *saved


def classic_layer_fake(
    hidden, qkv_weights, weights, document_ids, cu_seqlens, seeds, rows, batch_size, heads, use_short_attention,
    attention_dropout, dropout, epsilon,
):  # fmt: skip
    """Empty tensors in the shapes that `classic_layer` returns."""
    N, D = hidden.shape
    M = N if rows is None else len(rows)
    F = len(ClassicWeights(*weights).up)
    stored = [hidden.new_empty(M, width) for width in (D, D, F, F, D)]
    state = empty_attention_state(hidden, heads, use_short_attention)
    return hidden.new_empty(M, D), hidden.new_empty(N, 3 * D), torch.empty_like(hidden), *state, *stored


@torch.library.custom_op("electra::classic_layer_backward", mutates_args=())
def classic_layer_backward(
    hidden: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], document_ids: Tensor | None,
    cu_seqlens: Tensor | None, seeds: Tensor | None, rows: Tensor | None, attended: Sequence[Tensor],
    saved: Sequence[Tensor], batch_size: int, heads: int, use_short_attention: bool, attention_dropout: float,
    dropout: float, epsilon: float, grad_out: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of hidden, of the qkv projection's weight and bias, and of the other weights."""
    qkv, context, logsumexp, rng_state = AttentionActivations(*attended)
    side_stream = WeightGradientStream()
    grad_context, grad_hidden, grad_weights = classic_layer_after_attention_backward(
        gather_rows(context, rows), gather_rows(hidden, rows), ClassicWeights(*weights), ClassicActivations(*saved),
        seeds, dropout, epsilon, grad_out.contiguous(), side_stream,
    )  # fmt: skip
    grad_context, grad_hidden = (scatter_rows(grad, rows, len(hidden)) for grad in (grad_context, grad_hidden))
    split = attention.split_heads(qkv, batch_size, heads)
    context, grad_context = context.view(split[:, :, 0].shape), grad_context.view(split[:, :, 0].shape)
    if use_short_attention:
        seed = select_seed(seeds, 2, attention_dropout)
        grad_qkv = attention.short_attention_backward(
            split, document_ids, None, seed, grad_context, NO_WINDOW, attention_dropout
        )
    else:
        grad_qkv, partials = attention.long_attention_backward(
            split, cu_seqlens, context, logsumexp, rng_state, grad_context, attention_dropout
        )
    grad_qkv = grad_qkv.view_as(qkv)
    side_stream.join()
    grad_weight = side_stream(torch.mm, grad_qkv.T, hidden)
    dtype = qkv_weights[1].dtype
    grad_bias = (
        side_stream(qkv_bias_grad, grad_qkv, dtype)
        if use_short_attention
        else side_stream(column_sums, partials, dtype)
    )
    grad_hidden.addmm_(grad_qkv, qkv_weights[0])
    side_stream.join()
    return [grad_hidden, grad_weight, grad_bias, *grad_weights]


@classic_layer_backward.register_fake
def _(hidden, qkv_weights, weights, *others):
    return [torch.empty_like(each) for each in (hidden, *qkv_weights, *weights)]


def setup_classic_context(ctx, inputs, output) -> None:
    hidden, qkv_weights, weights, document_ids, cu_seqlens, seeds, rows, *ctx.options = inputs
    _, *stored = output
    ctx.mark_non_differentiable(*stored)
    ctx.set_materialize_grads(False)  # stored activations have no gradients: no zeros for them
    ctx.save_for_backward(hidden, *qkv_weights, *weights, document_ids, cu_seqlens, seeds, rows, *stored)


def run_classic_layer_backward(ctx, grad_out: Tensor, *_: Tensor):
    count, attended = len(ClassicWeights._fields), len(AttentionActivations._fields)
    hidden, weight, bias, *rest = ctx.saved_tensors
    weights, (document_ids, cu_seqlens, seeds, rows, *stored) = rest[:count], rest[count:]
    grads = classic_layer_backward(
        hidden, [weight, bias], weights, document_ids, cu_seqlens, seeds, rows, stored[:attended], stored[attended:],
        *ctx.options, grad_out,
    )  # fmt: skip
    return grads[0], grads[1:3], grads[3:], *[None] * 10


def register_classic_layer(name: str, tags: tuple[torch.Tag, ...]) -> torch.library.CustomOpDef:
    """`classic_layer` with autograd."""
    operation = torch.library.custom_op(f"electra::{name}", classic_layer, mutates_args=(), tags=tags)
    operation.register_fake(classic_layer_fake)
    operation.register_autograd(run_classic_layer_backward, setup_context=setup_classic_context)
    return operation


classic_layer_op = register_classic_layer("classic_layer", ())
# Library attention draws its dropout noise inside the operation.
seeded_classic_layer_op = register_classic_layer("seeded_classic_layer", (torch.Tag.nondeterministic_seeded,))


def dropout_seeds(hidden: Tensor, dropout: float) -> Tensor | None:
    """Seeds of dropout after attention, after the feed-forward and, for short attention, of attention weights."""
    return torch.randint(2**31, (3,), device=hidden.device, dtype=torch.int32) if dropout else None


def fused_classic_layer(
    hidden: Tensor, parameters: list[Tensor], document_ids: Tensor | None, cu_seqlens: Tensor | None,
    positions: Tensor | None, *, heads: int, use_short_attention: bool, attention_dropout: float, dropout: float,
    epsilon: float,
) -> Tensor:  # fmt: skip
    """The layer's output [B, L, D] from its input `hidden`, or [B, M, D] at `positions` [B, M] only.

    `parameters` are in the order of `ClassicLayer.parameters()`, `use_short_attention` selects short attention."""
    seeds = dropout_seeds(hidden, max(dropout, attention_dropout))
    flat = hidden.flatten(0, 1).contiguous()
    operation = seeded_classic_layer_op if attention_dropout and not use_short_attention else classic_layer_op
    out, *_ = operation(
        flat, parameters[:2], parameters[2:], document_ids, cu_seqlens, seeds, flatten_positions(positions, hidden),
        len(hidden), heads, use_short_attention, attention_dropout, dropout, epsilon,
    )  # fmt: skip
    return out.unflatten(0, (len(hidden), -1))


class ModernWeights(NamedTuple):
    """The parameters of a modern layer; all layers but the first have the attention norm's weight before these."""

    qkv: Tensor  # [3 · D, D]
    output: Tensor  # [D, D]
    norm: Tensor  # [D] before the feed-forward
    up: Tensor  # [2 · F, D]
    down: Tensor  # [D, F]


class ModernActivations(NamedTuple):
    """Stored for the backward pass."""

    residual: Tensor  # [N, D] fp32, the residual stream before attention; empty in the first layer
    normalized: Tensor  # [N, D]
    qkv: Tensor  # [N, 3 · D]
    context: Tensor  # [N, D] the weighted values
    between: Tensor  # [M, D] the normalised input of the feed-forward
    up: Tensor  # [M, 2 · F]
    activated: Tensor  # [M, F]


NUM_MODERN = len(ModernWeights._fields)


@torch.library.custom_op("electra::modern_layer", mutates_args=())
def modern_layer(
    residual: Tensor, pending: Tensor | None, parameters: Sequence[Tensor], document_ids: Tensor | None, rope: Tensor,
    rows: Tensor | None, batch_size: int, heads: int, window: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The residual stream [N, D] fp32 up to the feed-forward, the feed-forward's output [N, D], `ModernActivations`.

    The feed-forward's output is not added here but by the next layer, whose norm reads the sum anyway: so a layer takes
    the `residual` stream and the `pending` output of the layer before. The first layer has none, and its input is
    already normalised. With `rows` [M] only those rows are computed: [M, D]."""
    weights = ModernWeights(*parameters[-NUM_MODERN:])
    if pending is None:
        before, normalized = residual.new_empty(0), residual.to(weights.qkv.dtype, copy=True)
    else:
        before, normalized = add_layernorm_forward(residual, pending, parameters[0], epsilon)
    qkv = normalized @ weights.qkv.T
    split = attention.split_heads(qkv, batch_size, heads)
    context = attention.short_attention_forward(split, document_ids, rope, None, window, 0.0).view_as(normalized)
    output = gather_rows(context, rows) @ weights.output.T
    total, between = add_layernorm_forward(
        gather_rows(residual if pending is None else before, rows), output, weights.norm, epsilon
    )
    up = between @ weights.up.T
    activated = geglu_forward(up)
    down = activated @ weights.down.T
    return total, down, *ModernActivations(before, normalized, qkv, context, between, up, activated)


@modern_layer.register_fake
def _(residual, pending, parameters, document_ids, rope, rows, batch_size, heads, window, epsilon):
    weights = ModernWeights(*parameters[-NUM_MODERN:])
    N, D = residual.shape
    M = N if rows is None else len(rows)
    F = weights.down.shape[1]
    before = residual.new_empty(0) if pending is None else torch.empty_like(residual)
    attended = [weights.qkv.new_empty(N, width) for width in (D, 3 * D, D)]
    down, *rest = [weights.qkv.new_empty(M, width) for width in (D, D, 2 * F, F)]
    return residual.new_empty(M, D), down, before, *attended, *rest


@torch.library.custom_op("electra::modern_layer_backward", mutates_args=())
def modern_layer_backward(
    parameters: Sequence[Tensor], document_ids: Tensor | None, rope: Tensor, rows: Tensor | None, total: Tensor,
    activations: Sequence[Tensor], batch_size: int, heads: int, window: int, epsilon: float, grad_total: Tensor,
    grad_down_out: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of residual, of pending (except in the first layer), and of the parameters."""
    weights = ModernWeights(*parameters[-NUM_MODERN:])
    saved = ModernActivations(*activations)
    N, D = saved.context.shape
    side_stream = WeightGradientStream()
    grad_down_out = grad_down_out.contiguous()
    grad_down = side_stream(torch.mm, grad_down_out.T, saved.activated)
    grad_up_out = geglu_backward(saved.up, grad_down_out @ weights.down)
    grad_up = side_stream(torch.mm, grad_up_out.T, saved.between)
    grad_residual, grad_projected, partials = add_layernorm_backward(
        total, weights.norm, grad_up_out @ weights.up, grad_total.contiguous(), epsilon
    )
    grad_norm = side_stream(column_sums, partials, weights.norm.dtype)
    grad_output = side_stream(torch.mm, grad_projected.T, gather_rows(saved.context, rows))
    grad_residual = scatter_rows(grad_residual, rows, N)
    grad_context = scatter_rows(grad_projected @ weights.output, rows, N).view(batch_size, -1, heads, D // heads)
    grad_qkv_out = attention.short_attention_backward(
        attention.split_heads(saved.qkv, batch_size, heads), document_ids, rope, None, grad_context, window, 0.0
    ).view_as(saved.qkv)
    grad_qkv = side_stream(torch.mm, grad_qkv_out.T, saved.normalized)
    grad_normalized = grad_qkv_out @ weights.qkv
    grad_weights = grad_qkv, grad_output, grad_norm, grad_up, grad_down
    if len(parameters) == NUM_MODERN:
        side_stream.join()
        return [grad_residual + grad_normalized, *grad_weights]
    grad_residual, grad_pending, partials = add_layernorm_backward(
        saved.residual, parameters[0], grad_normalized, grad_residual, epsilon
    )
    grad_attention_norm = side_stream(column_sums, partials, parameters[0].dtype)
    side_stream.join()
    return [grad_residual, grad_pending, grad_attention_norm, *grad_weights]


@modern_layer_backward.register_fake
def _(parameters, document_ids, rope, rows, total, activations, *others):
    context, is_first = ModernActivations(*activations).context, len(parameters) == NUM_MODERN
    inputs = [total.new_empty(context.shape), *([] if is_first else [torch.empty_like(context)])]
    return [*inputs, *(torch.empty_like(each, memory_format=torch.contiguous_format) for each in parameters)]


def setup_modern_context(ctx, inputs, output) -> None:
    _, pending, parameters, document_ids, rope, rows, *ctx.options = inputs
    total, _, *activations = output
    ctx.mark_non_differentiable(*activations)
    ctx.set_materialize_grads(False)  # stored activations have no gradients: no zeros for them
    ctx.is_first, ctx.num_parameters = pending is None, len(parameters)
    ctx.save_for_backward(*parameters, document_ids, rope, rows, total, *activations)


def run_modern_layer_backward(ctx, grad_total: Tensor, grad_down_out: Tensor, *_: Tensor):
    saved = list(ctx.saved_tensors)  # activation checkpointing allows reading them only once
    parameters = saved[: ctx.num_parameters]
    document_ids, rope, rows, total, *activations = saved[ctx.num_parameters :]
    grad_residual, *grads = modern_layer_backward(
        parameters, document_ids, rope, rows, total, activations, *ctx.options, grad_total, grad_down_out
    )
    grad_pending = None if ctx.is_first else grads.pop(0)
    return grad_residual, grad_pending, grads, *[None] * 7


modern_layer.register_autograd(run_modern_layer_backward, setup_context=setup_modern_context)


def fused_modern_layer(
    residual: Tensor, pending: Tensor | None, parameters: list[Tensor], document_ids: Tensor | None, rope: Tensor,
    positions: Tensor | None, *, heads: int, window: int, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The residual stream [B, L, D] in fp32 and the feed-forward output, from the same two of the layer before.

    With `positions` [B, M] only those: [B, M, D]. `rope` is [2, L, K/2]."""
    total, down, *_ = modern_layer(
        residual.flatten(0, 1).contiguous(), None if pending is None else pending.flatten(0, 1), parameters,
        document_ids, rope, flatten_positions(positions, residual), len(residual), heads, window, epsilon,
    )  # fmt: skip
    return total.unflatten(0, (len(residual), -1)), down.unflatten(0, (len(residual), -1))
