"""A post-norm layer as one operation, with its backward pass written out.

Between its products a layer adds biases, drops, sums, normalises and bends. Each of these is one kernel here, or part
of one; gradients that meet in a residual are added by the product that comes last, and those of weights, for which
nothing waits, are made beside.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from electra.model.gpu.aside import Aside
from electra.model.gpu.biased_gelu import gelu_of_sum, gradients_of_gelu
from electra.model.gpu.column_sums import column_sums
from electra.model.gpu.norm_of_sum import gradients_of_norm_of_sum, norm_of_sum
from electra.model.gpu.short_rows import gradients_of_mix, mix

NO_WINDOW = -1


class Weights(NamedTuple):
    """Of what follows attention, in the order in which a layer has them."""

    output: Tensor  # [D, D]
    output_bias: Tensor
    first_weight: Tensor  # of the norm
    first_offset: Tensor
    widen: Tensor  # [feedforward, D]
    widen_bias: Tensor
    narrow: Tensor  # [D, feedforward]
    narrow_bias: Tensor
    second_weight: Tensor  # of the norm
    second_offset: Tensor


class States(NamedTuple):
    """What follows attention, in its order: [N, D] each, the wide ones [N, feedforward]; the last is the layer's."""

    found: Tensor  # the output's product
    between: Tensor  # normalised
    widened: Tensor
    bent: Tensor  # by GELU
    narrowed: Tensor
    hidden: Tensor


def seed_of(seeds: Tensor | None, number: int, dropout: float) -> Tensor | None:
    """One of some seeds, where something is dropped."""
    return None if seeds is None or not dropout else seeds[number]


def follow(
    mixed: Tensor, residual: Tensor, weights: Weights, seeds: Tensor | None, dropout: float, epsilon: float
) -> States:
    """What a layer makes of the values its attention mixed, `mixed` [N, D], and of its input, the `residual` [N, D]."""
    first, second = seed_of(seeds, 0, dropout), seed_of(seeds, 1, dropout)
    found = mixed @ weights.output.T
    norm = weights.first_weight, weights.first_offset, epsilon
    between = norm_of_sum(found, weights.output_bias, residual, *norm, first, dropout)
    widened = between @ weights.widen.T
    bent = gelu_of_sum(widened, weights.widen_bias)
    narrowed = bent @ weights.narrow.T
    norm = weights.second_weight, weights.second_offset, epsilon
    hidden = norm_of_sum(narrowed, weights.narrow_bias, between, *norm, second, dropout)
    return States(found, between, widened, bent, narrowed, hidden)


def gradients_of_follow(
    mixed: Tensor, residual: Tensor, weights: Weights, states: States, seeds: Tensor | None, dropout: float,
    epsilon: float, grown: Tensor, aside: Aside,
) -> tuple[Tensor, Tensor, Weights]:  # fmt: skip
    """The gradients of mixed, residual and, still under way aside, the weights, from that of the states, `grown`."""
    first, second = seed_of(seeds, 0, dropout), seed_of(seeds, 1, dropout)
    of_between, of_narrowed, parts = gradients_of_norm_of_sum(
        states.narrowed, weights.narrow_bias, states.between, weights.second_weight, grown, epsilon, second, dropout
    )
    of_narrow = aside(torch.mm, of_narrowed.T, states.bent)
    around_second = aside(around_norm, parts, mixed.dtype)
    of_widened, parts = gradients_of_gelu(states.widened, weights.widen_bias, of_narrowed @ weights.narrow)
    aside.join()  # without dropout what is written next has been read aside
    of_between.addmm_(of_widened, weights.widen)
    of_widen = aside(torch.mm, of_widened.T, states.between)
    of_widen_bias = aside(column_sums, parts, mixed.dtype)
    of_residual, of_found, parts = gradients_of_norm_of_sum(
        states.found, weights.output_bias, residual, weights.first_weight, of_between, epsilon, first, dropout
    )
    of_output = aside(torch.mm, of_found.T, mixed)
    around_first = aside(around_norm, parts, mixed.dtype)
    of_mixed = of_found @ weights.output
    of_weights = [of_output, *around_first, of_widen, of_widen_bias, of_narrow, *around_second]
    return of_mixed, of_residual, Weights._make(of_weights)


def around_norm(parts: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the bias before a norm, in the precision of products, and of the norm's weight and offset."""
    weight, offset, bias = column_sums(parts, torch.float32).view(3, -1).unbind()
    return bias.to(precision), weight.clone(), offset.clone()  # an operation's results may not share memory


def as_states(mixed: Tensor, widen: Tensor) -> list[Tensor]:
    """Empty states as `States` has them."""
    N, D = mixed.shape
    widths = (D, D, widen.shape[0], widen.shape[0], D, D)
    return [mixed.new_empty(N, width) for width in widths]


@torch.library.custom_op("electra::after_attention", mutates_args=())
def after_attention(
    mixed: Tensor, residual: Tensor, weights: Sequence[Tensor], seeds: Tensor | None, dropout: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`follow`, as an operation with a gradient."""
    return (*follow(mixed, residual, Weights(*weights), seeds, dropout, epsilon),)


@after_attention.register_fake
def _(mixed, residual, weights, seeds, dropout, epsilon):
    return tuple(as_states(mixed, Weights(*weights).widen))


@torch.library.custom_op("electra::gradients_after_attention", mutates_args=())
def gradients_after_attention(
    mixed: Tensor, residual: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], seeds: Tensor | None,
    dropout: float, epsilon: float, grown: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of mixed, residual and each of the weights."""
    aside, given = Aside(), (mixed, residual, Weights(*weights), States(*states), seeds, dropout, epsilon)
    of_mixed, of_residual, of_weights = gradients_of_follow(*given, grown.contiguous(), aside)
    aside.join()
    return [of_mixed, of_residual, *of_weights]


@gradients_after_attention.register_fake
def _(mixed, residual, weights, states, seeds, dropout, epsilon, grown):
    return [torch.empty_like(each) for each in (mixed, residual, *weights)]


def remember_after(ctx, inputs, output) -> None:
    mixed, residual, weights, seeds, ctx.dropout, ctx.epsilon = inputs
    ctx.mark_non_differentiable(*output[:-1])
    ctx.save_for_backward(mixed, residual, seeds, *weights, *output)


def backward_after(ctx, *grown: Tensor):
    mixed, residual, seeds, *rest = ctx.saved_tensors
    weights, states = rest[: len(Weights._fields)], rest[len(Weights._fields) :]
    gradients = gradients_after_attention(mixed, residual, weights, states, seeds, ctx.dropout, ctx.epsilon, grown[-1])
    return gradients[0], gradients[1], gradients[2:], None, None, None


after_attention.register_autograd(backward_after, setup_context=remember_after)


@torch.library.custom_op("electra::whole_layer", mutates_args=())
def whole_layer(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], documents: Tensor | None,
    seeds: Tensor | None, rows: int, heads: int, attention_dropout: float, dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer over short rows: of its input [N, D] queries, keys and values, what attention mixed, and what follows."""
    matrix, bias = qkv_weights
    qkv = torch.addmm(bias, residual, matrix.T)  # [N, 3 · D]
    seed = seed_of(seeds, 2, attention_dropout)
    mixed = mix(by_head(qkv, rows, heads), documents, None, seed, NO_WINDOW, attention_dropout).view_as(residual)
    return qkv, mixed, *follow(mixed, residual, Weights(*weights), seeds, dropout, epsilon)


def by_head(vectors: Tensor, rows: int, heads: int) -> Tensor:
    """Queries, keys and values [B, L, 3, H, K] as attention takes them."""
    return vectors.view(rows, vectors.shape[0] // rows, 3, heads, -1)


@whole_layer.register_fake
def _(residual, qkv_weights, weights, documents, seeds, rows, heads, attention_dropout, dropout, epsilon):
    N, D = residual.shape
    return residual.new_empty(N, 3 * D), residual.new_empty(N, D), *as_states(residual, Weights(*weights).widen)


@torch.library.custom_op("electra::gradients_of_whole_layer", mutates_args=())
def gradients_of_whole_layer(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], documents: Tensor | None,
    seeds: Tensor | None, qkv: Tensor, mixed: Tensor, states: Sequence[Tensor], heads: int, rows: int,
    attention_dropout: float, dropout: float, epsilon: float, grown: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the layer's input, of the matrix and bias of queries, keys and values, and of its weights."""
    aside, given = Aside(), (mixed, residual, Weights(*weights), States(*states), seeds, dropout, epsilon)
    of_mixed, of_residual, of_weights = gradients_of_follow(*given, grown.contiguous(), aside)
    of_qkv, parts = gradients_of_mix(
        by_head(qkv, rows, heads), documents, None, seed_of(seeds, 2, attention_dropout),
        of_mixed.view(rows, -1, heads, mixed.shape[1] // heads), NO_WINDOW, attention_dropout, has_bias=True,
    )  # fmt: skip
    of_qkv = of_qkv.view_as(qkv)
    aside.join()  # without dropout what is written next has been read aside
    of_residual.addmm_(of_qkv, qkv_weights[0])
    of_matrix, of_bias = aside(torch.mm, of_qkv.T, residual), aside(column_sums, parts, qkv.dtype)
    aside.join()
    return [of_residual, of_matrix, of_bias, *of_weights]


@gradients_of_whole_layer.register_fake
def _(residual, qkv_weights, weights, *others):
    return [torch.empty_like(each) for each in (residual, *qkv_weights, *weights)]


def remember(ctx, inputs, output) -> None:
    residual, qkv_weights, weights, documents, seeds, *ctx.numbers = inputs
    ctx.mark_non_differentiable(*output[:-1])
    ctx.save_for_backward(residual, *qkv_weights, *weights, documents, seeds, *output)


def backward(ctx, *grown: Tensor):
    count = len(Weights._fields)
    residual, matrix, bias, *rest = ctx.saved_tensors
    weights, (documents, seeds, qkv, mixed, *states) = rest[:count], rest[count:]
    rows, heads, *rates = ctx.numbers
    gradients = gradients_of_whole_layer(
        residual, [matrix, bias], weights, documents, seeds, qkv, mixed, states, heads, rows, *rates, grown[-1]
    )
    return gradients[0], gradients[1:3], gradients[3:], *[None] * 7


whole_layer.register_autograd(backward, setup_context=remember)


def layer_in_short_rows(
    hidden: Tensor, parameters: list[Tensor], documents: Tensor | None, heads: int, attention_dropout: float,
    dropout: float, epsilon: float,
) -> Tensor:  # fmt: skip
    """A layer's hidden states [B, L, D] from those before, `hidden`; `parameters` in the order of the layer."""
    rates = attention_dropout, dropout, epsilon
    seeds = seeds_for(hidden, max(dropout, attention_dropout))
    states = hidden.flatten(0, 1)
    *_, found = whole_layer(states, parameters[:2], parameters[2:], documents, seeds, len(hidden), heads, *rates)
    return found.view_as(hidden)


def rest_of_layer(mixed: Tensor, hidden: Tensor, parameters: list[Tensor], dropout: float, epsilon: float) -> Tensor:
    """The same from what attention mixed, `mixed` [B, L, D], and the states before, `hidden` [B, L, D]."""
    states = mixed.flatten(0, 1), hidden.flatten(0, 1)
    *_, found = after_attention(*states, parameters[2:], seeds_for(hidden, dropout), dropout, epsilon)
    return found.view_as(hidden)


def seeds_for(hidden: Tensor, dropout: float) -> Tensor | None:
    """Seeds of a layer's dropouts, where there are any: after attention, after the feed-forward, in attention."""
    return torch.randint(2**31, (3,), device=hidden.device, dtype=torch.int32) if dropout else None
