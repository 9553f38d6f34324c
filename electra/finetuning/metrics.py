"""Metrics of predictions, equal to those of scikit-learn and scipy, in numpy alone."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Metrics = dict[str, float]  # values by name of the metric
MAX_LISTED = 20  # classes
MAX_MISTAKES, MAX_CELL = 50, 500  # on the page of mistakes: rows, characters of a cell


def accuracy(predicted: NDArray, labels: NDArray) -> float:
    """The fraction of correctly predicted classes."""
    return float(np.mean(predicted == labels))


def f1(predicted: NDArray, labels: NDArray) -> float:
    """F1 of class 1, or micro-averaged F1 of two 0/1 matrices; 0 if 1 occurs in neither."""
    return binary_f1(predicted == 1, labels == 1)


def macro_f1(predicted: NDArray, labels: NDArray) -> float:
    """The mean F1 of all classes that occur in the predictions or the labels."""
    return float(np.mean([binary_f1(predicted == label, labels == label) for label in np.union1d(predicted, labels)]))


def binary_f1(is_predicted: NDArray, is_label: NDArray) -> float:
    """F1 of boolean arrays of any shape; 0 if both are all False."""
    positives = int(is_predicted.sum()) + int(is_label.sum())
    return 2 * int((is_predicted & is_label).sum()) / positives if positives else 0.0


def exact_match(predicted: NDArray, labels: NDArray) -> float:
    """The fraction of rows of two 0/1 matrices that are equal in every column."""
    return float(np.mean((predicted == labels).all(axis=1)))


def matthews(predicted: NDArray, labels: NDArray) -> float:
    """Matthews correlation for any number of classes; 0 if predictions or labels contain one class only."""
    classes = np.union1d(predicted, labels)
    x = (predicted[:, None] == classes).astype(np.float64)  # [N, classes]
    y = (labels[:, None] == classes).astype(np.float64)
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    variance = np.sum(x * x) * np.sum(y * y)
    return float(np.sum(x * y) / np.sqrt(variance)) if variance else 0.0


def pearson(predicted: NDArray, labels: NDArray) -> float:
    """Pearson correlation; NaN if one side is constant (a single element always is) or contains NaN."""
    if (predicted == predicted[0]).all() or (labels == labels[0]).all():
        return math.nan
    return float(
        np.clip(np.sum(center_and_normalize(predicted) * center_and_normalize(labels)), -1, 1)
    )  # NaN stays NaN


def spearman(predicted: NDArray, labels: NDArray) -> float:
    """Spearman correlation, with mean ranks for ties; NaN where Pearson's is."""
    if np.isnan(predicted).any() or np.isnan(labels).any():
        return math.nan
    return pearson(mean_ranks(predicted), mean_ranks(labels))


def center_and_normalize(scores: NDArray) -> NDArray:
    """Centre and scale scores to unit norm."""
    centred = scores - scores.mean(dtype=np.float64)
    centred = centred / np.abs(centred).max()  # squares must neither overflow nor underflow
    return centred / np.linalg.norm(centred)


def mean_ranks(scores: NDArray) -> NDArray:
    """Ranks from 1; equal scores share the mean of their ranks."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def mae(predicted: NDArray, labels: NDArray) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(predicted - labels), dtype=np.float64))


def rmse(predicted: NDArray, labels: NDArray) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(np.mean(np.square(predicted - labels), dtype=np.float64)))


# Entities: of class ids in which 0 is O, 2k + 1 is B- and 2k + 2 is I- of type k, and -1 separates sentences.


def find_entity_spans(tags: NDArray) -> NDArray:
    """The entities in tags [words] of IOB2, as rows (first word, last word, type); an I- that continues nothing
    starts one, as conlleval reads it."""
    types = (tags - 1) // 2  # -1 outside
    before = np.append(-1, types)[:-1]
    starts = (types >= 0) & ((tags % 2 == 1) | (types != before))
    continues = (types >= 0) & ~starts
    ends = (types >= 0) & ~np.append(continues, False)[1:]
    return np.stack([np.flatnonzero(starts), np.flatnonzero(ends), types[starts]], axis=1)


def count_entities(predicted: NDArray, labels: NDArray, num_types: int | None = None) -> NDArray:
    """The numbers of correct, predicted and true entities of each type [3, num_types]."""
    num_types = num_types or int(max(predicted.max(), labels.max()) + 1) // 2
    predicted_spans, spans = find_entity_spans(predicted), find_entity_spans(labels)
    _, ours, theirs = np.intersect1d(spans[:, 0], predicted_spans[:, 0], assume_unique=True, return_indices=True)
    correct = spans[ours][(spans[ours] == predicted_spans[theirs]).all(1)]
    return np.stack([np.bincount(each[:, 2], minlength=num_types) for each in (correct, predicted_spans, spans)])


def precision_recall_f1(correct: int, predicted: int, true: int) -> Metrics:
    """Precision, recall and F1 of counts; 0 where there is nothing to divide by."""
    return {
        "precision": correct / max(1, predicted),
        "recall": correct / max(1, true),
        "f1": 2 * correct / max(1, predicted + true),
    }


def entity_scores(predicted: NDArray, labels: NDArray) -> Metrics:
    """Precision, recall and F1 of all entities."""
    return precision_recall_f1(*count_entities(predicted, labels).sum(1).tolist())


# Answers to questions, as SQuAD compares them.


def normalize_answer(text: str) -> str:
    """An answer as SQuAD compares it: in small letters, without ASCII punctuation, English articles, extra spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def answer_scores(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """F1 and exact match of an answer, "" for none, by SQuAD's definition: the best over all true answers."""
    true = [normalized for normalized in map(normalize_answer, answers) if normalized] or [""]
    normalized = normalize_answer(predicted)
    return max(token_f1(normalized.split(), answer.split()) for answer in true), float(normalized in true)


def token_f1(predicted: list[str], answer: list[str]) -> float:
    """F1 of two bags of words; 1 if both are empty."""
    if not predicted or not answer:
        return float(predicted == answer)
    return 2 * (Counter(predicted) & Counter(answer)).total() / (len(predicted) + len(answer))


METRICS: dict[str, Callable[[NDArray, NDArray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "micro_f1": f1,
    "exact_match": exact_match,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "mae": mae,
    "rmse": rmse,
    "entity_f1": lambda predicted, labels: entity_scores(predicted, labels)["f1"],
    "precision": lambda predicted, labels: entity_scores(predicted, labels)["precision"],
    "recall": lambda predicted, labels: entity_scores(predicted, labels)["recall"],
}
"""Metrics of predictions and labels in the form of `Examples.labels`; higher is better, except of `ERRORS`."""

ERRORS = ("mae", "rmse")  # in the unit of the scores


def format_metric(name: str, value: float) -> str:
    """An error in its unit, any other metric in percent."""
    return f"{value:.4g}" if name in ERRORS else f"{100 * value:.2f}"


def most_frequent_label(labels: NDArray) -> NDArray:
    """The best prediction without a text, from labels in the form of `Examples.labels`: a class, or the mean score."""
    if labels.ndim == 2:
        return np.eye(labels.shape[1], dtype=np.float32)[labels.sum(axis=0).argmax()]
    return np.asarray(np.bincount(labels).argmax() if labels.dtype.kind == "i" else labels.mean())


def class_scores(predicted: NDArray, labels: NDArray, names: Sequence[str]) -> dict[str, Metrics]:
    """Precision, recall and F1 of each class of two 0/1 matrices, and its number of rows in the labels."""
    correct, predicted_counts, counts = (
        each.sum(0, dtype=np.int64) for each in (predicted * labels, predicted, labels)
    )
    return {
        name: precision_recall_f1(*numbers) | {"rows": float(numbers[2])}
        for name, *numbers in zip(names, correct, predicted_counts, counts, strict=True)
    }


def format_class_scores(scores: dict[str, Metrics], split: str = "") -> list[str]:
    """A line for each of the first classes, which starts with the split."""
    texts = "F1 {f1:.1%}, precision {precision:.1%}, recall {recall:.1%}"
    lines = []
    for name, values in list(scores.items())[:MAX_LISTED]:
        *_, (unit, count) = values.items()
        lines.append(f"  {split}{name}: {texts.format(**values)}, {count:,.0f} {unit}")
    return lines + ["  … (--json has all classes)"] * (len(scores) > MAX_LISTED)


def confusion_matrix(predicted: NDArray, labels: NDArray, num_labels: int) -> NDArray:
    """Counts [class in the labels, predicted class], without labels that are none of the classes."""
    counts = np.zeros((num_labels, num_labels), np.int64)
    is_known = labels < num_labels
    np.add.at(counts, (labels[is_known], predicted[is_known]), 1)
    return counts


class Mistake(NamedTuple):
    """A wrong prediction."""

    confidence: float  # its probability; of a CRF, by how much its score exceeds the second-best
    predicted: str
    expected: str
    text: str


def format_mistakes(mistakes: Iterable[Mistake], task: str, confidence: str = "probability") -> str:
    """A page with the most confident mistakes."""
    every = sorted(mistakes, key=lambda mistake: -mistake.confidence)
    listed = every[:MAX_MISTAKES]
    title = f"# The {len(listed)} most confident of {len(every):,} mistakes on the dev rows of {task}"
    header = [f"| {confidence} | predicted | expected | text |", "|---|---|---|---|"]
    rows = []
    for value, *texts in listed:
        cells = [" ".join(text.split())[:MAX_CELL].replace("|", "\\|") for text in texts]
        rows.append(f"| {value:.3f} | {' | '.join(cells)} |")
    return "\n".join([title, "", *header, *rows, ""])


def median(values: list[float]) -> float:
    """The median, where NaN (the correlation of constant predictions) ranks below all numbers."""
    ordered = sorted(values, key=nan_as_lowest)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def standard_deviation(values: list[float]) -> float:
    """The sample standard deviation; NaN for a single value or if any value is NaN."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def none_to_nan(value: Any) -> Any:
    """Replace None by NaN at any depth: JSON files hold null for the NaN in metrics."""
    if isinstance(value, dict):
        return {name: none_to_nan(item) for name, item in value.items()}
    return math.nan if value is None else value


def nan_as_lowest(value: float) -> float:
    """A sort key that ranks NaN below all numbers."""
    return -math.inf if math.isnan(value) else value
