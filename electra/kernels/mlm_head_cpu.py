"""The MLM head on a CPU: loss and sample in one pass over the vocabulary logits, a chunk that fits the cache at a time.

Separate operations read and write the logits about twelve times, and on a CPU memory is slower than arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from electra.random import BLOCK, gumbel_noise

CHUNK_NUMBERS = 2**20  # 4 MB of logits


class LossAndProbabilities(torch.autograd.Function):
    """Losses [N] of `labels` [N], the unnormalised probabilities [N, padded V], and their sums over blocks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        N, V = len(states), len(table)
        chunk = max(1, CHUNK_NUMBERS // V)
        exponentials = states.new_empty(N, V)  # of logit − highest logit of its row
        block_sums = states.new_empty(N, V // BLOCK)
        losses = states.new_empty(N)
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            logits = torch.addmm(bias, states[rows], table.T, out=exponentials[rows])
            highest = logits.amax(1, keepdim=True)
            losses[rows] = (highest - logits.gather(1, labels[rows, None])).squeeze(1)
            logits.sub_(highest).exp_()
            torch.sum(logits.unflatten(1, (-1, BLOCK)), 2, out=block_sums[rows])
        sums = block_sums.sum(1)
        ctx.save_for_backward(states, table, labels, exponentials, sums)
        ctx.mark_non_differentiable(exponentials, block_sums)
        return losses + sums.log(), exponentials, block_sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        states, table, labels, exponentials, sums = ctx.saved_tensors
        chunk = max(1, CHUNK_NUMBERS // len(table))
        grad_states, grad_table = torch.empty_like(states), torch.zeros_like(table)
        grad_bias = table.new_zeros(len(table))
        for start in range(0, len(states), chunk):
            rows = slice(start, start + chunk)
            grad_logits = exponentials[rows] * (grad_loss[rows] / sums[rows])[:, None]
            grad_logits.scatter_add_(1, labels[rows, None], -grad_loss[rows, None])
            torch.mm(grad_logits, table, out=grad_states[rows])
            grad_table.addmm_(grad_logits.T, states[rows])
            grad_bias += grad_logits.sum(0)
        return grad_states, grad_table, grad_bias, None


def mlm_loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of `labels` [B, M] and samples [B, M], from `states` [B, M, E] and the token `table` [V, E]."""
    vocab_size, slots = len(table), labels.shape[1]
    padding = -vocab_size % BLOCK
    table, bias = functional.pad(table, (0, 0, 0, padding)), functional.pad(bias, (0, padding), value=float("-inf"))
    flat = states.flatten(0, 1).contiguous()
    losses, exponentials, block_sums = LossAndProbabilities.apply(flat, table, bias, labels.flatten())
    num_blocks = block_sums.shape[1]
    noise = gumbel_noise(block_keys, slots * num_blocks).view_as(block_sums)
    block = (block_sums.log() + noise).argmax(1)  # [B · M]
    tokens = exponentials.unflatten(1, (-1, BLOCK))[torch.arange(len(block)), block]  # [B · M, BLOCK]
    noise = gumbel_noise(token_keys, slots * BLOCK).view_as(tokens)
    sampled = block * BLOCK + (tokens.log() + noise).argmax(1)
    return losses.view_as(labels), sampled.clamp(max=vocab_size - 1).view_as(labels)  # a valid id even for NaN logits
