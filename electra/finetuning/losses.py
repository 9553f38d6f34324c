"""Losses of rows, and weights of classes."""

from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from electra.errors import ConfigError
from electra.finetuning.tasks import Task
from electra.runfolder import join_first_names

BALANCED = "balanced"
ClassWeights = Tensor | None  # [classes]; None: all are 1


def cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The losses of class ids [B] or [B, L], 0 where these are -100; `weights` multiply those of their class."""
    return functional.cross_entropy(logits, targets, weights, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The mean losses [B] of all classes of multi-hot targets [B, classes]; `weights` multiply those of ones."""
    losses = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
    return losses.mean(1)


def balanced_class_weights(labels: NDArray, num_classes: int) -> NDArray:
    """Weights of classes in inverse proportion to their rows, 1 on average over the rows of `labels` [N]."""
    counts = np.bincount(labels, minlength=num_classes)
    return len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))


def balanced_positive_weights(labels: NDArray, num_classes: int) -> NDArray:
    """For each class of multi-hot `labels` [N, classes]: rows without it, at least one, for each row with it."""
    counts = labels.sum(0)
    return np.maximum(len(labels) - counts, 1) / np.maximum(counts, 1)


def parse_class_weights(words: tuple[str, ...], task: Task) -> list[float]:
    """The weight of each class of a task from words NAME=WEIGHT; classes that are not named have 1."""
    weights = dict.fromkeys(task.labels, 1.0)
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if name not in weights or not weight >= 0 or not isfinite(weight):
            names = join_first_names(list(weights), 20)
            allowed = f"{BALANCED}, or CLASS=WEIGHT with a weight of at least 0 for some of the classes {names}"
            raise ConfigError(f"is {word}; it must be {allowed}", field="class_weights")
        weights[name] = weight
    return list(weights.values())
