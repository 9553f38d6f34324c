"""A pre-norm layer over short rows as one operation, with its backward pass written out.

The sum that runs through all layers is in fp32. What a layer adds last is left to the next one, whose norm reads the
sum anyway: so between layers there are always two tensors, the sum so far and what is to be added to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from electra.kernels import attention as short_rows
from electra.kernels.gather import chosen, put_back
from electra.kernels.geglu import gated, gradient_of_gated
from electra.kernels.prenorm import gradients_of_sum_and_norm, sum_and_norm
from electra.kernels.reductions import column_sums
from electra.kernels.side_stream import WeightGradientStream

MATRICES = 5  # parameters of the first layer, which has no norm before its attention; others have one before these


class Weights(NamedTuple):
    """In the order in which a layer has them, behind the norm before its attention."""

    qkv: Tensor  # [3 · D, D]
    output: Tensor  # [D, D]
    norm: Tensor  # [D] before the feed-forward
    widen: Tensor  # [2 · feedforward, D]
    narrow: Tensor  # [D, feedforward]


class Products(NamedTuple):
    """What is made on the way and read again in the backward pass."""

    before: Tensor  # [N, D] in fp32, the sum before attention; nothing in the first layer
    normal: Tensor  # [N, D] that normalised
    qkv: Tensor  # [N, 3 · D]
    mixed: Tensor  # [N, D]
    between: Tensor  # [N, D] the sum before the feed-forward, normalised
    widened: Tensor  # [N, 2 · feedforward]
    activated: Tensor  # [N, feedforward]


@torch.library.custom_op("electra::modern_layer", mutates_args=())
def modern_layer(
    total: Tensor, added: Tensor | None, parameters: Sequence[Tensor], documents: Tensor | None, turns: Tensor,
    at: Tensor | None, rows: int, heads: int, window: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum [N, D] up to the feed-forward, and what that adds [N, D], from the same of the layer before, `total` and
    `added`; also `Products`. The first layer has nothing added yet, and reads its input as it is.

    Both are of all tokens, or of those `at` [M] only."""
    weights = Weights(*parameters[-MATRICES:])
    if added is None:
        before, normal = total.new_empty(0), total.to(weights.qkv.dtype, copy=True)
    else:
        before, normal = sum_and_norm(total, added, parameters[0], epsilon)
    qkv = normal @ weights.qkv.T
    mixed = short_rows.mix(short_rows.by_head(qkv, rows, heads), documents, turns, None, window, 0.0).view_as(normal)
    found = chosen(mixed, at) @ weights.output.T
    summed, between = sum_and_norm(chosen(total if added is None else before, at), found, weights.norm, epsilon)
    widened = between @ weights.widen.T
    activated = gated(widened)
    narrowed = activated @ weights.narrow.T
    return summed, narrowed, *Products(before, normal, qkv, mixed, between, widened, activated)


@modern_layer.register_fake
def _(total, added, parameters, documents, turns, at, rows, heads, window, epsilon):
    weights, (N, D), M = Weights(*parameters[-MATRICES:]), total.shape, len(total) if at is None else len(at)
    before, wide = total.new_empty(0) if added is None else torch.empty_like(total), weights.narrow.shape[1]
    read = [weights.qkv.new_empty(N, width) for width in (D, 3 * D, D)]
    narrowed, *made = [weights.qkv.new_empty(M, width) for width in (D, D, 2 * wide, wide)]
    return total.new_empty(M, D), narrowed, before, *read, *made


@torch.library.custom_op("electra::gradients_of_modern_layer", mutates_args=())
def gradients_of_modern_layer(
    parameters: Sequence[Tensor], documents: Tensor | None, turns: Tensor, at: Tensor | None, summed: Tensor,
    products: Sequence[Tensor], rows: int, heads: int, window: int, epsilon: float, of_summed: Tensor,
    of_narrowed: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of total, of added but in the first layer, and of the parameters."""
    weights, made, side_stream = Weights(*parameters[-MATRICES:]), Products(*products), WeightGradientStream()
    N, D = made.mixed.shape
    of_narrowed = of_narrowed.contiguous()
    of_narrow = side_stream(torch.mm, of_narrowed.T, made.activated)
    of_widened = gradient_of_gated(made.widened, of_narrowed @ weights.narrow)
    of_widen = side_stream(torch.mm, of_widened.T, made.between)
    of_total, of_found, parts = gradients_of_sum_and_norm(
        summed, weights.norm, of_widened @ weights.widen, of_summed.contiguous(), epsilon
    )
    of_norm = side_stream(column_sums, parts, weights.norm.dtype)
    of_output = side_stream(torch.mm, of_found.T, chosen(made.mixed, at))
    of_total = put_back(of_total, at, N)
    of_mixed = put_back(of_found @ weights.output, at, N).view(rows, -1, heads, D // heads)
    of_vectors = short_rows.gradient_of_mix(
        short_rows.by_head(made.qkv, rows, heads), documents, turns, None, of_mixed, window, 0.0
    )
    of_vectors = of_vectors.view_as(made.qkv)
    of_qkv, of_normal = side_stream(torch.mm, of_vectors.T, made.normal), of_vectors @ weights.qkv
    of_weights = of_qkv, of_output, of_norm, of_widen, of_narrow
    if len(parameters) == MATRICES:
        side_stream.join()
        return [of_total + of_normal, *of_weights]
    of_total, of_added, parts = gradients_of_sum_and_norm(made.before, parameters[0], of_normal, of_total, epsilon)
    of_first = side_stream(column_sums, parts, parameters[0].dtype)
    side_stream.join()
    return [of_total, of_added, of_first, *of_weights]


@gradients_of_modern_layer.register_fake
def _(parameters, documents, turns, at, summed, products, rows, heads, window, epsilon, of_summed, of_narrowed):
    mixed = Products(*products).mixed
    inputs = [summed.new_empty(mixed.shape), *([] if len(parameters) == MATRICES else [torch.empty_like(mixed)])]
    return [*inputs, *(torch.empty_like(each, memory_format=torch.contiguous_format) for each in parameters)]


def remember(ctx, inputs, output) -> None:
    _, added, parameters, documents, turns, at, *ctx.numbers = inputs
    summed, _, *products = output
    ctx.mark_non_differentiable(*products)
    ctx.set_materialize_grads(False)  # there are none of the products: no zeros for them
    ctx.is_first, ctx.count = added is None, len(parameters)
    ctx.save_for_backward(*parameters, documents, turns, at, summed, *products)


def backward(ctx, of_summed: Tensor, of_narrowed: Tensor, *_: Tensor):
    saved = list(ctx.saved_tensors)
    parameters, (documents, turns, at, summed, *products) = saved[: ctx.count], saved[ctx.count :]
    given = parameters, documents, turns, at, summed, products, *ctx.numbers
    of_total, *others = gradients_of_modern_layer(*given, of_summed, of_narrowed)
    of_added = None if ctx.is_first else others.pop(0)
    return of_total, of_added, others, *[None] * 7


modern_layer.register_autograd(backward, setup_context=remember)
