"""Plots of a fine-tuning, drawn where matplotlib is installed."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra.plotting import empty_figure

MOST_CLASSES = 30
"""A confusion matrix of more cannot be read."""


def draw_confusion(path: Path, truth: NDArray, predicted: NDArray, labels: tuple[str, ...]) -> Path | None:
    """Write a confusion matrix as PNG: how many rows of each class were given each class."""
    side = 3 + 0.5 * len(labels)
    figure = empty_figure(side, side)
    if figure is None or len(labels) > MOST_CLASSES:
        return None
    counts = confusion(truth, predicted, len(labels))
    axes = figure.subplots()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(min=1), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    for row, column in np.ndindex(counts.shape):
        is_dark = counts[row, column] > 0.6 * counts[row].sum()
        axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color="w" if is_dark else "k")
    figure.savefig(path, dpi=100)
    return path


def confusion(truth: NDArray, predicted: NDArray, classes: int) -> NDArray:
    """Counts [true class, predicted class]."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (truth, predicted), 1)
    return counts
