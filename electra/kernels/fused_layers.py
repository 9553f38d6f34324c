"""A post-norm layer as one operation, with its backward pass written out.

Between its products a layer adds biases, drops, sums, normalises and bends. Each of these is one kernel here, or part
of one; gradients that meet in a residual are added by the product that comes last, and those of weights, for which
nothing waits, are made beside.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from electra.kernels import attention as short_rows
from electra.kernels import library_attention as long_rows
from electra.kernels.gather import chosen, flat_places, put_back
from electra.kernels.gelu import gelu_of_sum, gradients_of_gelu
from electra.kernels.layernorm import gradients_of_norm_of_sum, norm_of_sum
from electra.kernels.reductions import column_sums, sums_but_of_keys, sums_by_matrix
from electra.kernels.side_stream import WeightGradientStream

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
    epsilon: float, grown: Tensor, side_stream: WeightGradientStream,
) -> tuple[Tensor, Tensor, Weights]:  # fmt: skip
    """The gradients of mixed, residual and, still under way side_stream, the weights, from that of the states, `grown`.

    Without dropout a residual's gradient is also that of what was added to it, so it is written only once that is read.
    """
    first, second = seed_of(seeds, 0, dropout), seed_of(seeds, 1, dropout)
    of_between, of_narrowed, parts = gradients_of_norm_of_sum(
        products.narrowed, weights.narrow_bias, products.between, weights.second_weight, grown, epsilon, second, dropout
    )
    of_narrow = side_stream(torch.mm, of_narrowed.T, products.activated)
    own = weights.second_weight.dtype, weights.second_offset.dtype, weights.narrow_bias.dtype
    of_second_weight, of_second_offset, of_narrow_bias = side_stream(sums_by_matrix, parts, *own)
    of_widened, parts = gradients_of_gelu(products.widened, weights.widen_bias, of_narrowed @ weights.narrow)
    side_stream.join()
    of_widen = side_stream(torch.mm, of_widened.T, products.between)
    of_widen_bias = side_stream(column_sums, parts, weights.widen_bias.dtype)
    of_between.addmm_(of_widened, weights.widen)
    of_residual, of_output, parts = gradients_of_norm_of_sum(
        products.output, weights.output_bias, residual, weights.first_weight, of_between, epsilon, first, dropout
    )
    of_matrix = side_stream(torch.mm, of_output.T, mixed)
    own = weights.first_weight.dtype, weights.first_offset.dtype, weights.output_bias.dtype
    of_first_weight, of_first_offset, of_output_bias = side_stream(sums_by_matrix, parts, *own)
    of_mixed = of_output @ weights.output
    of_weights = Weights(
        of_matrix, of_output_bias, of_first_weight, of_first_offset, of_widen, of_widen_bias,
        of_narrow, of_narrow_bias, of_second_weight, of_second_offset,
    )  # fmt: skip
    return of_mixed, of_residual, of_weights


def empty_products(residual: Tensor, widen: Tensor, at: Tensor | None) -> list[Tensor]:
    """What `Products` has, of the right shapes."""
    N, D = len(residual) if at is None else len(at), residual.shape[1]
    return [residual.new_empty(N, width) for width in (D, D, widen.shape[0], widen.shape[0], D)]


class Attended(NamedTuple):
    """What attention leaves for the backward pass."""

    qkv: Tensor  # [N, 3 · D] queries, keys and values
    mixed: Tensor  # [N, D]
    levels: Tensor  # [N · heads] in long rows, the logarithms of the sums of its weights
    state: Tensor  # [2] in long rows, what dropout's noise came from


def whole(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], places: Tensor | None,
    seeds: Tensor | None, at: Tensor | None, rows: int, heads: int, is_short: bool, attention_dropout: float,
    dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer: its states from its input, the `residual` [N, D], and what is read again: `Attended` and `Products`.

    `places` is the document of each token in short rows [B, L], and where documents start in others [documents + 1].
    States are made of all tokens, or of those `at` [M] only.
    """
    matrix, bias = qkv_weights
    qkv = torch.addmm(bias, residual, matrix.T)
    vectors = short_rows.by_head(qkv, rows, heads)
    if is_short:
        seed = seed_of(seeds, 2, attention_dropout)
        mixed = short_rows.mix(vectors, places, None, seed, NO_WINDOW, attention_dropout)
        levels, state = levels_and_state(residual, heads, is_short)
    else:
        mixed, levels, state = long_rows.mix(vectors, places, attention_dropout)
    mixed = mixed.view_as(residual)
    given = chosen(mixed, at), chosen(residual, at)
    hidden, products = finish(*given, Weights(*weights), seeds, dropout, epsilon)
    return hidden, *Attended(qkv, mixed, levels, state), *products


def levels_and_state(residual: Tensor, heads: int, is_short: bool) -> tuple[Tensor, Tensor]:
    """What attention leaves of these: nothing in short rows."""
    levels, numbers = (0, 0) if is_short else (len(residual) * heads, 2)
    return residual.new_empty(levels, dtype=torch.float32), residual.new_empty(numbers, dtype=torch.int64)


def shapes_of_whole(
    residual, qkv_weights, weights, places, seeds, at, rows, heads, is_short, attention_dropout, dropout, epsilon
):
    N, D = residual.shape
    products = Products(*empty_products(residual, Weights(*weights).widen, at))
    attended = Attended(
        residual.new_empty(N, 3 * D), torch.empty_like(residual), *levels_and_state(residual, heads, is_short)
    )
    return torch.empty_like(products.between), *attended, *products


@torch.library.custom_op("electra::gradients_of_whole_layer", mutates_args=())
def gradients_of_whole_layer(
    residual: Tensor, qkv_weights: Sequence[Tensor], weights: Sequence[Tensor], places: Tensor | None,
    seeds: Tensor | None, at: Tensor | None, attended: Sequence[Tensor], products: Sequence[Tensor], rows: int,
    heads: int, is_short: bool, attention_dropout: float, dropout: float, epsilon: float, grown: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the layer's input, of the matrix and bias of queries, keys and values, and of its weights."""
    qkv, mixed, levels, state = Attended(*attended)
    side_stream, read = WeightGradientStream(), (chosen(mixed, at), chosen(residual, at))
    given = *read, Weights(*weights), Products(*products), seeds, dropout, epsilon
    of_mixed, of_residual, of_weights = gradients_of_finish(*given, grown.contiguous(), side_stream)
    of_mixed, of_residual = (put_back(each, at, len(residual)) for each in (of_mixed, of_residual))
    vectors = short_rows.by_head(qkv, rows, heads)
    before, after = mixed.view(vectors[:, :, 0].shape), of_mixed.view(vectors[:, :, 0].shape)
    if is_short:
        ways = seed_of(seeds, 2, attention_dropout), after, NO_WINDOW, attention_dropout
        of_qkv = short_rows.gradient_of_mix(vectors, places, None, *ways)
    else:
        kept = before, levels, state, after, attention_dropout
        of_qkv, parts = long_rows.gradients_of_mix(vectors, places, *kept)
    of_qkv = of_qkv.view_as(qkv)
    side_stream.join()
    of_matrix, own = side_stream(torch.mm, of_qkv.T, residual), qkv_weights[1].dtype
    of_bias = side_stream(sums_but_of_keys, of_qkv, own) if is_short else side_stream(column_sums, parts, own)
    of_residual.addmm_(of_qkv, qkv_weights[0])
    side_stream.join()
    return [of_residual, of_matrix, of_bias, *of_weights]


@gradients_of_whole_layer.register_fake
def _(residual, qkv_weights, weights, *others):
    return [torch.empty_like(each) for each in (residual, *qkv_weights, *weights)]


def remember(ctx, inputs, output) -> None:
    residual, qkv_weights, weights, places, seeds, at, *ctx.numbers = inputs
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # there are none of what is kept: no zeros for them
    ctx.save_for_backward(residual, *qkv_weights, *weights, places, seeds, at, *kept)


def backward(ctx, grown: Tensor, *_: Tensor):
    count, own = len(Weights._fields), len(Attended._fields)
    residual, matrix, bias, *rest = ctx.saved_tensors
    weights, (places, seeds, at, *kept) = rest[:count], rest[count:]
    given = residual, [matrix, bias], weights, places, seeds, at, kept[:own], kept[own:]
    gradients = gradients_of_whole_layer(*given, *ctx.numbers, grown)
    return gradients[0], gradients[1:3], gradients[3:], *[None] * 9


def registered(name: str, tags: tuple[torch.Tag, ...]) -> torch.library.CustomOpDef:
    """`whole` as an operation with a gradient."""
    operation = torch.library.custom_op(f"electra::{name}", whole, mutates_args=(), tags=tags)
    operation.register_fake(shapes_of_whole)
    operation.register_autograd(backward, setup_context=remember)
    return operation


whole_layer = registered("whole_layer", ())
noisy_layer = registered("noisy_layer", (torch.Tag.nondeterministic_seeded,))  # flash attention draws noise in it


def layer_at_once(
    hidden: Tensor, parameters: list[Tensor], places: Tensor | None, at: Tensor | None, heads: int, is_short: bool,
    attention_dropout: float, dropout: float, epsilon: float,
) -> Tensor:  # fmt: skip
    """A layer's hidden states [B, L, D] from those before, `hidden`; `parameters` in the order of the layer.

    Of tokens at the positions `at` [B, M] only, where these are given: [B, M, D]."""
    rates = attention_dropout, dropout, epsilon
    seeds, states = seeds_for(hidden, max(dropout, attention_dropout)), hidden.flatten(0, 1).contiguous()
    given = states, parameters[:2], parameters[2:], places, seeds, flat_places(at, hidden), len(hidden), heads, is_short
    found, *_ = (noisy_layer if attention_dropout and not is_short else whole_layer)(*given, *rates)
    return found.unflatten(0, (len(hidden), -1))


def seeds_for(hidden: Tensor, dropout: float) -> Tensor | None:
    """Seeds of a layer's dropouts, where there are any: after attention, after the feed-forward, in short rows."""
    return torch.randint(2**31, (3,), device=hidden.device, dtype=torch.int32) if dropout else None
