"""Losses as sums with the number of predictions they are over.

A batch cut into pieces (micro-batches, ranks) then has the same loss and gradients as whole: each piece's sums are
divided by the counts of all pieces together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """One part of the whole: a sum over predictions, how many they are, and the weight of their mean."""

    sum: Tensor  # []
    count: Tensor  # []
    weight: float = 1.0

    def mean(self) -> Tensor:
        """Loss per prediction; 0 where there was none."""
        return self.sum / self.count.clamp(min=1)


Losses = dict[str, Loss]
Counts = dict[str, Tensor]


def total(losses: Losses, counts: Counts | None = None) -> Tensor:
    """Σ weight · sum / count: over these losses' own predictions, or over `counts` of the batch they are a piece of."""
    counts = {name: loss.count for name, loss in losses.items()} if counts is None else counts
    return torch.stack([loss.weight * loss.sum / counts[name].clamp(min=1) for name, loss in losses.items()]).sum()
