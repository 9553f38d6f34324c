"""What a post-norm layer does after attention as one operation, with its backward pass written out.

Between its four products a layer adds biases, drops, sums, normalises and bends. Each of these is one kernel here, or
part of one; gradients that meet in a residual are added by the product that comes last.
"""

import torch
from torch import Tensor, nn

from electra.model.aside import Aside
from electra.model.biased_gelu import gelu_of_sum, gradients_of_gelu
from electra.model.column_sums import column_sums
from electra.model.kernels import precision_at
from electra.model.norm_of_sum import gradients_of_norm_of_sum, norm_of_sum

OFFSETS = (5, 11)  # among the tensors that come in: what norms add, which no gradient depends on


@torch.library.custom_op("electra::after_attention", mutates_args=())
def after_attention(
    mixed: Tensor, residual: Tensor,
    output: Tensor, output_bias: Tensor, first_weight: Tensor, first_offset: Tensor,
    widen: Tensor, widen_bias: Tensor,
    narrow: Tensor, narrow_bias: Tensor, second_weight: Tensor, second_offset: Tensor,
    seeds: Tensor | None, dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer's hidden states [N, D] from the values its attention `mixed` [N, D] and its input, the `residual`.

    Also what the backward pass needs: the output's product, the states between both norms, the widened product, its
    GELU, and the narrowed product. `seeds` [2] make the `dropout`.
    """
    first, second = (None, None) if seeds is None else seeds.unbind()
    found = mixed @ output.T  # [N, D]
    between = norm_of_sum(found, output_bias, residual, first_weight, first_offset, epsilon, first, dropout)
    widened = between @ widen.T  # [N, feedforward]
    bent = gelu_of_sum(widened, widen_bias)
    narrowed = bent @ narrow.T  # [N, D]
    hidden = norm_of_sum(narrowed, narrow_bias, between, second_weight, second_offset, epsilon, second, dropout)
    return hidden, found, between, widened, bent, narrowed


@after_attention.register_fake
def _(mixed, residual, output, output_bias, first_weight, first_offset, widen, *others):
    states, wide = mixed.new_empty(residual.shape), mixed.new_empty(mixed.shape[0], widen.shape[0])
    return states, *(torch.empty_like(each) for each in (states, states, wide, wide, states))


@torch.library.custom_op("electra::gradients_after_attention", mutates_args=())
def gradients_after_attention(
    mixed: Tensor, residual: Tensor,
    output: Tensor, output_bias: Tensor, first_weight: Tensor,
    widen: Tensor, widen_bias: Tensor,
    narrow: Tensor, narrow_bias: Tensor, second_weight: Tensor,
    seeds: Tensor | None, found: Tensor, between: Tensor, widened: Tensor, bent: Tensor, narrowed: Tensor,
    grown: Tensor, dropout: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of mixed, residual, the three matrices, and of vectors: around either norm [3, D] (its weight, its
    offset, the bias before it), and of the widening's bias."""
    first, second = (None, None) if seeds is None else seeds.unbind()
    grown, aside = grown.contiguous(), Aside()
    of_between, of_narrowed, parts_of_second = gradients_of_norm_of_sum(
        narrowed, narrow_bias, between, second_weight, grown, epsilon, second, dropout
    )
    of_narrow = aside(torch.mm, of_narrowed.T, bent)
    around_second = aside(column_sums, parts_of_second)
    of_widened, parts_of_widen = gradients_of_gelu(widened, widen_bias, of_narrowed @ narrow)
    aside.join()  # without dropout what is written next has been read aside
    of_between.addmm_(of_widened, widen)
    of_widen = aside(torch.mm, of_widened.T, between)
    of_widen_bias = aside(column_sums, parts_of_widen)
    of_residual, of_found, parts_of_first = gradients_of_norm_of_sum(
        found, output_bias, residual, first_weight, of_between, epsilon, first, dropout
    )
    of_output = aside(torch.mm, of_found.T, mixed)
    around_first = aside(column_sums, parts_of_first)
    of_mixed = of_found @ output
    aside.join()
    around = around_first.view(3, -1), around_second.view(3, -1)
    return of_mixed, of_residual, of_output, of_widen, of_narrow, *around, of_widen_bias


@gradients_after_attention.register_fake
def _(
    mixed, residual, output, output_bias, first_weight, widen, widen_bias, narrow, narrow_bias, second_weight, *others
):
    around = mixed.new_empty(3, first_weight.shape[0], dtype=torch.float32)
    matrices = (torch.empty_like(each) for each in (mixed, residual, output, widen, narrow))
    return *matrices, around, torch.empty_like(around), around.new_empty(widen_bias.shape)


def remember(ctx, inputs, output) -> None:
    *tensors, seeds, ctx.dropout, ctx.epsilon = inputs
    _, *products = output
    ctx.mark_non_differentiable(*products)
    needed = [tensor for number, tensor in enumerate(tensors) if number not in OFFSETS]
    ctx.save_for_backward(*needed, seeds, *products)


def backward(ctx, grown: Tensor, *_: Tensor):
    of_mixed, of_residual, of_output, of_widen, of_narrow, first, second, of_widen_bias = gradients_after_attention(
        *ctx.saved_tensors, grown, ctx.dropout, ctx.epsilon
    )
    biases = [each.to(of_output.dtype) for each in (first[2], of_widen_bias, second[2])]
    return (
        of_mixed, of_residual, of_output, biases[0], first[0], first[1],
        of_widen, biases[1], of_narrow, biases[2], second[0], second[1], None, None, None,
    )  # fmt: skip


after_attention.register_autograd(backward, setup_context=remember)


def finished(
    mixed: Tensor, residual: Tensor, output: nn.Linear, first: nn.LayerNorm, widen: nn.Linear, narrow: nn.Linear,
    second: nn.LayerNorm, dropout: float,
) -> Tensor:  # fmt: skip
    """A layer's hidden states [B, L, D] from the values its attention `mixed` and its input, the `residual`."""
    precision = precision_at(residual)
    matrices = [(each.weight.to(precision), each.bias.to(precision)) for each in (output, widen, narrow)]
    seeds = torch.randint(2**31, (2,), device=residual.device, dtype=torch.int32) if dropout else None
    found, *_ = after_attention(
        mixed.to(precision).flatten(0, 1), residual.to(precision).flatten(0, 1),
        *matrices[0], first.weight, first.bias, *matrices[1], *matrices[2], second.weight, second.bias,
        seeds, dropout, first.eps,
    )  # fmt: skip
    return found.view_as(residual)
