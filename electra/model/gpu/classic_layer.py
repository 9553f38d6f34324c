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


class Products(NamedTuple):
    """What is made on the way from attention to a layer's states, and read again in the backward pass."""

    output: Tensor  # [N, D]
    between: Tensor  # [N, D] the states between both norms
    widened: Tensor  # [N, feedforward]
    activated: Tensor  # [N, feedforward]
    narrowed: Tensor  # [N, D]


def seed_of(seeds: Tensor | None, number: int, dropout: float) -> Tensor | None:
    """One of some seeds, where something is dropped."""
    return None if seeds is None or not dropout else seeds[number]


def finish(
    mixed: Tensor, residual: Tensor, weights: Weights, seeds: Tensor | None, dropout: float, epsilon: float
) -> tuple[Tensor, Products]:
    """A layer's states [N, D] from the values its attention mixed, `mixed`, and from its input, the `residual`."""
    first, second = seed_of(seeds, 0, dropout), seed_of(seeds, 1, dropout)
    output = mixed @ weights.output.T
    norm = weights.first_weight, weights.first_offset, epsilon
    between = norm_of_sum(output, weights.output_bias, residual, *norm, first, dropout)
    widened = between @ weights.widen.T
    activated = gelu_of_sum(widened, weights.widen_bias)
    narrowed = activated @ weights.narrow.T
    norm = weights.second_weight, weights.second_offset, epsilon
    hidden = norm_of_sum(narrowed, weights.narrow_bias, between, *norm, second, dropout)
    return hidden, Products(output, between, widened, activated, narrowed)


def gradients_of_finish(
    mixed: Tensor, residual: Tensor, weights: Weights, products: Products, seeds: Tensor | None, dropout: float,
    epsilon: float, grown: Tensor, aside: Aside,
) -> tuple[Tensor, Tensor, Weights]:  # fmt: skip
    """The gradients of mixed, residual and, still under way aside, the weights, from that of the states, `grown`.

    Without dropout a residual's gradient is also that of what was added to it, so it is written only once that is read.
    """
    first, second = seed_of(seeds, 0, dropout), seed_of(seeds, 1, dropout)
    of_between, of_narrowed, parts = gradients_of_norm_of_sum(
        products.narrowed, weights.narrow_bias, products.between, weights.second_weight, grown, epsilon, second, dropout
    )
    of_narrow = aside(torch.mm, of_narrowed.T, products.activated)
    around_second = aside(gradients_around_norm, parts, weights.narrow_bias.dtype, weights.second_weight.dtype)
    of_widened, parts = gradients_of_gelu(products.widened, weights.widen_bias, of_narrowed @ weights.narrow)
    aside.join()
    of_widen = aside(torch.mm, of_widened.T, products.between)
    of_widen_bias = aside(column_sums, parts, weights.widen_bias.dtype)
    of_between.addmm_(of_widened, weights.widen)
    of_residual, of_output, parts = gradients_of_norm_of_sum(
        products.output, weights.output_bias, residual, weights.first_weight, of_between, epsilon, first, dropout
    )
    of_matrix = aside(torch.mm, of_output.T, mixed)
    around_first = aside(gradients_around_norm, parts, weights.output_bias.dtype, weights.first_weight.dtype)
    of_mixed = of_output @ weights.output
    of_weights = [of_matrix, *around_first, of_widen, of_widen_bias, of_narrow, *around_second]
    return of_mixed, of_residual, Weights._make(of_weights)


def gradients_around_norm(parts: Tensor, before: torch.dtype, own: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the bias before a norm, and of the norm's own weight and offset, in the precision of each."""
    weight, offset, bias = column_sums(parts, torch.float32).view(3, -1).unbind()
    return bias.to(before, copy=True), weight.to(own, copy=True), offset.to(own, copy=True)  # results share no memory


def empty_products(residual: Tensor, widen: Tensor) -> list[Tensor]:
    """What `Products` has, of the right shapes."""
    N, D = residual.shape
    return [residual.new_empty(N, width) for width in (D, D, widen.shape[0], widen.shape[0], D)]


@torch.library.custom_op("electra::after_attention", mutates_args=())
def after_attention(
    mixed: Tensor, residual: Tensor, weights: Sequence[Tensor], seeds: Tensor | None, dropout: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`finish`, as an operation with a gradient."""
    hidden, products = finish(mixed, residual, Weights(*weights), seeds, dropout, epsilon)
    return hidden, *products


@after_attention.register_fake
def _(mixed, residual, weights, seeds, dropout, epsilon):
    return torch.empty_like(residual), *empty_products(residual, Weights(*weights).widen)


@torch.library.custom_op("electra::gradients_after_attention", mutates_args=())
def gradients_after_attention(
    mixed: Tensor, residual: Tensor, weights: Sequence[Tensor], products: Sequence[Tensor], seeds: Tensor | None,
    dropout: float, epsilon: float, grown: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of mixed, residual and each of the weights."""
    aside, given = Aside(), (mixed, residual, Weights(*weights), Products(*products), seeds, dropout, epsilon)
    of_mixed, of_residual, of_weights = gradients_of_finish(*given, grown.contiguous(), aside)
    aside.join()
    return [of_mixed, of_residual, *of_weights]


@gradients_after_attention.register_fake
def _(mixed, residual, weights, products, seeds, dropout, epsilon, grown):
    return [torch.empty_like(each) for each in (mixed, residual, *weights)]


def remember_after(ctx, inputs, output) -> None:
    mixed, residual, weights, seeds, ctx.dropout, ctx.epsilon = inputs
    _, *products = output
    ctx.mark_non_differentiable(*products)
    ctx.save_for_backward(mixed, residual, seeds, *weights, *products)


def backward_after(ctx, grown: Tensor, *_: Tensor):
    mixed, residual, seeds, *rest = ctx.saved_tensors
    weights, products = rest[: len(Weights._fields)], rest[len(Weights._fields) :]
    gradients = gradients_after_attention(mixed, residual, weights, products, seeds, ctx.dropout, ctx.epsilon, grown)
    return gradients[0], gradients[1], gradients[2:], None, None, None


after_attention.register_autograd(backward_after, setup_context=remember_after)


@torch.library.custom_op("electra::whole_layer", mutates_args=())
def whole_layer(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], documents: Tensor | None,
    seeds: Tensor | None, rows: int, heads: int, attention_dropout: float, dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer over short rows: its states from its input [N, D]; queries, keys and values, what attention mixed, and
    the products of what follows."""
    matrix, bias = qkv_weights
    qkv = torch.addmm(bias, residual, matrix.T)  # [N, 3 · D]
    seed = seed_of(seeds, 2, attention_dropout)
    mixed = mix(by_head(qkv, rows, heads), documents, None, seed, NO_WINDOW, attention_dropout).view_as(residual)
    hidden, products = finish(mixed, residual, Weights(*weights), seeds, dropout, epsilon)
    return hidden, qkv, mixed, *products


def by_head(vectors: Tensor, rows: int, heads: int) -> Tensor:
    """Queries, keys and values [B, L, 3, H, K] as attention takes them."""
    return vectors.view(rows, vectors.shape[0] // rows, 3, heads, -1)


@whole_layer.register_fake
def _(residual, qkv_weights, weights, documents, seeds, rows, heads, attention_dropout, dropout, epsilon):
    N, D = residual.shape
    hidden, mixed = torch.empty_like(residual), torch.empty_like(residual)
    return hidden, residual.new_empty(N, 3 * D), mixed, *empty_products(residual, Weights(*weights).widen)


@torch.library.custom_op("electra::gradients_of_whole_layer", mutates_args=())
def gradients_of_whole_layer(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], documents: Tensor | None,
    seeds: Tensor | None, qkv: Tensor, mixed: Tensor, products: Sequence[Tensor], rows: int, heads: int,
    attention_dropout: float, dropout: float, epsilon: float, grown: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the layer's input, of the matrix and bias of queries, keys and values, and of its weights."""
    aside, given = Aside(), (mixed, residual, Weights(*weights), Products(*products), seeds, dropout, epsilon)
    of_mixed, of_residual, of_weights = gradients_of_finish(*given, grown.contiguous(), aside)
    of_qkv, parts = gradients_of_mix(
        by_head(qkv, rows, heads), documents, None, seed_of(seeds, 2, attention_dropout),
        of_mixed.view(rows, -1, heads, mixed.shape[1] // heads), NO_WINDOW, attention_dropout, has_bias=True,
    )  # fmt: skip
    of_qkv = of_qkv.view_as(qkv)
    aside.join()
    of_matrix, of_bias = aside(torch.mm, of_qkv.T, residual), aside(column_sums, parts, qkv_weights[1].dtype)
    of_residual.addmm_(of_qkv, qkv_weights[0])
    aside.join()
    return [of_residual, of_matrix, of_bias, *of_weights]


@gradients_of_whole_layer.register_fake
def _(residual, qkv_weights, weights, *others):
    return [torch.empty_like(each) for each in (residual, *qkv_weights, *weights)]


def remember(ctx, inputs, output) -> None:
    residual, qkv_weights, weights, documents, seeds, *ctx.numbers = inputs
    _, *products = output
    ctx.mark_non_differentiable(*products)
    ctx.save_for_backward(residual, *qkv_weights, *weights, documents, seeds, *products)


def backward(ctx, grown: Tensor, *_: Tensor):
    count = len(Weights._fields)
    residual, matrix, bias, *rest = ctx.saved_tensors
    weights, (documents, seeds, qkv, mixed, *products) = rest[:count], rest[count:]
    gradients = gradients_of_whole_layer(
        residual, [matrix, bias], weights, documents, seeds, qkv, mixed, products, *ctx.numbers, grown
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
    states = hidden.flatten(0, 1).contiguous()
    found, *_ = whole_layer(states, parameters[:2], parameters[2:], documents, seeds, len(hidden), heads, *rates)
    return found.view_as(hidden)


def rest_of_layer(mixed: Tensor, hidden: Tensor, parameters: list[Tensor], dropout: float, epsilon: float) -> Tensor:
    """The same from what attention mixed, `mixed` [B, L, D], and the states before, `hidden` [B, L, D]."""
    states = mixed.flatten(0, 1).contiguous(), hidden.flatten(0, 1).contiguous()
    found, *_ = after_attention(*states, parameters[2:], seeds_for(hidden, dropout), dropout, epsilon)
    return found.view_as(hidden)


def seeds_for(hidden: Tensor, dropout: float) -> Tensor | None:
    """Seeds of a layer's dropouts, where there are any: after attention, after the feed-forward, in attention."""
    return torch.randint(2**31, (3,), device=hidden.device, dtype=torch.int32) if dropout else None
