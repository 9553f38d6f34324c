"""Labels: what each kind of task makes of the label column, one row of `KINDS` each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from electra.errors import DataError

Kind = Literal["classification", "multi-label", "regression"]

SEPARATOR = "|"  # between the labels of a cell that has several as one string
MOST_CLASSES = 20  # whole numbers with more values than this are scores, unless the user says otherwise
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rules:
    """What one kind of task does with labels."""

    read: Callable[[Any], Any]  # a cell → its value: a class's name, several, a score
    encode: Callable[[Any, Mapping[str, int]], Any]  # a value and the numbers of classes → what `Examples.labels` holds
    decode: Callable[[NDArray, tuple[str, ...]], list[Any]]  # the way back, for all rows; also for predictions
    learn: Callable[[list[Any]], dict[str, Any]]  # the values of all training rows → fields of the task
    dtype: type


def class_name(cell: Any) -> str:
    """The class in a cell."""
    if isinstance(cell, list):
        raise DataError("the label is a list; a row has one class, unless the kind of task is multi-label")
    name = written(cell)
    if not name:
        raise DataError("the label is empty; every row to learn or measure from needs one")
    return name


def class_names(cell: Any) -> tuple[str, ...]:
    """The classes in a cell: a list, or a string with separators; there may be none."""
    cells = cell if isinstance(cell, list) else written(cell).split(SEPARATOR)
    return tuple(name for name in map(written, cells) if name)


def written(cell: Any) -> str:
    """A cell as the name of a class: whole numbers have no point, whichever type a file keeps them in; NaN is empty."""
    if cell is None or cell != cell:
        return ""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()


def score(cell: Any) -> float:
    """The score in a cell."""
    number = as_number(cell)
    if number is None or not abs(number) <= LARGEST:  # NaN compares as False
        raise DataError(f"the score is {cell!r}; it must be a number, not NaN or infinite")
    return number


def as_number(cell: Any) -> float | None:
    """The number in a cell, or None if there is another thing."""
    try:
        return None if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def number_of(name: str, numbers: Mapping[str, int]) -> int:
    """The number of a class."""
    if name not in numbers:
        known = ", ".join(list(numbers)[:MOST_CLASSES]) + (", …" if len(numbers) > MOST_CLASSES else "")
        raise DataError(f"the label {name!r} is none of the task's, which come from its training rows: {known}")
    return numbers[name]


def marks_of(names: tuple[str, ...], numbers: Mapping[str, int]) -> NDArray:
    """A 1 for each class of a row."""
    marks = np.zeros(len(numbers), np.float32)
    marks[[number_of(name, numbers) for name in names]] = 1
    return marks


def learn_classes(names: list[str]) -> dict[str, Any]:
    """Classes in the order of their names, numbers numerically."""
    labels = in_order(set(names))
    if len(labels) < 2:
        raise DataError(f"every label is {labels[0]!r}; there must be two classes at least to tell apart")
    if len(labels) > MOST_CLASSES and len(labels) > len(names) / 2:
        raise DataError(
            f"there are {len(labels):,} different labels in {len(names):,} rows, {labels[0]!r} and {labels[1]!r} among "
            f"them; classes are shared by many rows, and scores are numbers with a decimal point"
        )
    return {
        "labels": labels,
        "metrics": ("accuracy", "f1", "matthews") if len(labels) == 2 else ("accuracy", "macro_f1"),
    }


def learn_several_classes(rows: list[tuple[str, ...]]) -> dict[str, Any]:
    """Classes in the order of their names, numbers numerically."""
    labels = in_order({name for names in rows for name in names})
    if not labels:
        raise DataError("no row has a label; there must be one at least")
    return {"labels": labels, "metrics": ("micro_f1", "exact_match")}


def learn_scores(scores: list[float]) -> dict[str, Any]:
    """The network learns (score - mean) / standard deviation, numbers of about unit size whatever the user's unit."""
    if min(scores) == max(scores):
        raise DataError(f"every score is {scores[0]:g}; there must be two different ones at least to tell apart")
    return {"metrics": ("pearson", "spearman"), "offset": float(np.mean(scores)), "scale": float(np.std(scores))}


def in_order(names: set[str]) -> tuple[str, ...]:
    """Names sorted: by number if all are numbers, else by letter."""
    numbers = {name: as_number(name) for name in names}
    if None in numbers.values():
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: (numbers[name], name)))


KINDS: dict[Kind, Rules] = {
    "classification": Rules(
        read=class_name,
        encode=number_of,
        decode=lambda numbers, labels: [labels[number] for number in numbers],
        learn=learn_classes,
        dtype=np.int64,
    ),
    "multi-label": Rules(
        read=class_names,
        encode=marks_of,
        decode=lambda marks, labels: [[labels[number] for number in np.flatnonzero(row)] for row in marks],
        learn=learn_several_classes,
        dtype=np.float32,
    ),
    "regression": Rules(
        read=score,
        encode=lambda value, numbers: value,
        decode=lambda scores, labels: scores.tolist(),
        learn=learn_scores,
        dtype=np.float32,
    ),
}


def kind_of(cells: list[Any]) -> Kind:
    """The kind of task that the cells of a label column are for.

    Lists are several labels. Numbers are scores if some are not whole or more than `MOST_CLASSES` differ; one cell in
    ten may be something else, which is then refused by its line instead of making every number a class.
    """
    if any(isinstance(cell, list) for cell in cells):
        return "multi-label"
    numbers = {number for cell in cells if (number := as_number(cell)) is not None and math.isfinite(number)}
    others = sum(as_number(cell) is None for cell in cells)
    is_scores = len(numbers) > MOST_CLASSES or not all(number.is_integer() for number in numbers)
    return "regression" if is_scores and others <= len(cells) / 10 else "classification"
