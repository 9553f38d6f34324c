"""Metrics of predictions: what scikit-learn and scipy say, in numpy alone."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def accuracy(predicted: NDArray, truth: NDArray) -> float:
    """The share of right classes."""
    return float(np.mean(predicted == truth))


def f1(predicted: NDArray, truth: NDArray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where class 1 is neither predicted nor true."""
    return f1_of(predicted == 1, truth == 1)


def macro_f1(predicted: NDArray, truth: NDArray) -> float:
    """The mean F1 of the classes that are predicted or true somewhere."""
    return float(np.mean([f1_of(predicted == number, truth == number) for number in np.union1d(predicted, truth)]))


def micro_f1(predicted: NDArray, truth: NDArray) -> float:
    """F1 over all cells of two 0/1 matrices; 0 where both are all 0."""
    return f1_of(predicted == 1, truth == 1)


def f1_of(is_predicted: NDArray, is_true: NDArray) -> float:
    """F1 of marks over a truth of the same shape; 0 where nothing is marked in either."""
    marks = int(is_predicted.sum()) + int(is_true.sum())
    return 2 * int((is_predicted & is_true).sum()) / marks if marks else 0.0


def exact_match(predicted: NDArray, truth: NDArray) -> float:
    """The share of rows of two 0/1 matrices that agree in every column."""
    return float(np.mean((predicted == truth).all(axis=1)))


def matthews(predicted: NDArray, truth: NDArray) -> float:
    """Matthews' correlation of any number of classes; 0 where predictions or truth have one class only."""
    classes = np.union1d(predicted, truth)
    said = (predicted[:, None] == classes).astype(np.float64)  # [N, classes]
    true = (truth[:, None] == classes).astype(np.float64)
    said, true = said - said.mean(axis=0), true - true.mean(axis=0)
    spread = np.sum(said * said) * np.sum(true * true)
    return float(np.sum(said * true) / np.sqrt(spread)) if spread else 0.0


def pearson(predicted: NDArray, truth: NDArray) -> float:
    """Pearson's correlation; NaN where a side is constant (one element always is) or has a NaN."""
    if is_flat(predicted) or is_flat(truth):
        return float("nan")
    said, true = standardised(predicted), standardised(truth)
    return float(np.clip(np.sum(said * true), -1, 1))  # NaN stays NaN


def spearman(predicted: NDArray, truth: NDArray) -> float:
    """Spearman's correlation, ties sharing their mean rank; NaN where Pearson's is."""
    if np.isnan(predicted).any() or np.isnan(truth).any():
        return float("nan")
    return pearson(mean_ranks(predicted), mean_ranks(truth))


def is_flat(scores: NDArray) -> bool:
    """Whether all scores are the same number."""
    return bool((scores == scores[0]).all())


def standardised(scores: NDArray) -> NDArray:
    """Scores around 0 whose squares add up to 1."""
    centred = scores - scores.mean(dtype=np.float64)
    centred = centred / np.abs(centred).max()  # so that squares neither overflow nor vanish
    return centred / np.linalg.norm(centred)


def mean_ranks(scores: NDArray) -> NDArray:
    """The rank of each score from 1; equal ones get the mean of theirs."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


METRICS: dict[str, Callable[[NDArray, NDArray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "exact_match": exact_match,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""Each takes predictions and truth, as `Examples.labels` has them, and gives a number; larger is better."""
