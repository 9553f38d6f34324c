"""Losses as sums with the number of predictions they are over.

The sums of micro-batches and ranks, divided by the counts of the whole batch, have the loss and gradient of the whole
batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """A loss summed over predictions, and the weight of its mean in the total."""

    sum: Tensor  # []
    count: Tensor  # []
    weight: float = 1.0

    def mean(self) -> Tensor:
        """Mean over the predictions; 0 if there are none."""
        return self.sum / self.count.clamp(min=1)


Losses = dict[str, Loss]
Counts = dict[str, Tensor]


def sum_token_losses(losses: Tensor, weights: Tensor, loss_weight: float = 1.0) -> Loss:
    """Loss over those of `losses` whose weight in `weights`, of the same shape, is 1."""
    return Loss((losses * weights).sum(), weights.sum(), loss_weight)


def total_loss(losses: Losses, counts: Counts | None = None) -> Tensor:
    """Σ weight · sum / count; `counts` are those of the whole batch if `losses` are of one micro-batch or rank."""
    counts = {name: loss.count for name, loss in losses.items()} if counts is None else counts
    return torch.stack([loss.weight * loss.sum / counts[name].clamp(min=1) for name, loss in losses.items()]).sum()


def add_losses_of_batches(batches: list[Losses]) -> Losses:
    """The losses of several batches as those of one."""
    added = {}
    for name, first in batches[0].items():
        sums, counts = zip(*((losses[name].sum, losses[name].count) for losses in batches), strict=True)
        added[name] = Loss(torch.stack(sums).sum(), torch.stack(counts).sum(), first.weight)
    return added
