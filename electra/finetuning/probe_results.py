"""The results of `electra probe`: a file of JSON lines, scores by fold and seed, their standard errors, tables.

Standard errors: let x[f, s] be the score of fold f and seed s; the held-out rows of a slice are divided into five parts
(of fewer rows, into one for each) that take the place of folds. The squared standard error of the mean of x is the
variance over folds of the means over seeds, divided by the number of folds, plus the variance over seeds of the means
over folds, divided by the number of seeds. The sum counts the interaction of fold and seed twice, so it rather
overstates these two sources; with two seeds the second term is itself uncertain. The error of the mean over tasks
treats tasks as independent and fixed. The error of a difference is computed in the same way from the differences of
x[f, s], which share folds and seeds.
Not included: the variation between pre-training seeds, which is larger (about 0.6 points of GLUE-6), so two rows show a
difference between two checkpoints, not yet between two recipes; the choice of the training rows of slices; and the
correlation of folds, whose training rows overlap.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from electra.errors import ConfigError, DataError
from electra.finetuning.config import ProbeScore
from electra.finetuning.glue import GLUE_6
from electra.finetuning.tasks import GLUE_TASKS
from electra.formatting import markdown_table
from electra.runfolder import dump_json

Key = tuple[str, str, str, int, int]  # model, setting, task, fold, seed
Row = tuple[str, str]  # model and setting
Scores = dict[tuple[int, int], list[float]]  # of one task by fold and seed: one value, or one per part of a slice
LINE_START = b'{"model": '
StoredMetrics = Mapping[str, float | None]  # None: undefined, as the correlation of constant predictions


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The held-out metrics of one fine-tuning, and what identifies it: a line of the file."""

    model: str
    setting: str
    task: str
    fold: int
    seed: int
    checkpoint: str
    weights: str = ""  # checksum; results of earlier versions have none
    tuning: dict[str, Any]
    rows: dict[str, int]  # by split
    steps: int
    seconds: float
    metrics: StoredMetrics
    parts: list[StoredMetrics] = field(default_factory=list)  # of a slice

    @property
    def key(self) -> Key:
        return self.model, self.setting, self.task, self.fold, self.seed


def read_results(path: Path) -> list[ProbeResult]:
    """The results in a file, of equal keys the last; a line that a killed process left incomplete is ignored."""
    results = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            result = msgspec.json.decode(line, type=ProbeResult)
            results[result.key] = result
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            is_complete = isinstance(error, msgspec.ValidationError)
            if is_complete or not (line.startswith(LINE_START) or LINE_START.startswith(line)):
                raise DataError(f"{path} is not a file of electra probe; choose another --output") from None
            print(f"{path}: ignored an incomplete line", file=sys.stderr)
    return list(results.values())


def append_result(path: Path, result: ProbeResult) -> None:
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        line_end = b"" if file.read() in (b"", b"\n") else b"\n"  # after an incomplete line
        file.write(line_end + dump_json(asdict(result)).encode() + b"\n")


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, None for a single score."""

    mean: float
    error: float | None

    def format(self, sign: str = "", is_percentage: bool = True) -> str:
        scale, digits = (100, 2) if is_percentage else (1, 4)
        error = "" if self.error is None else f" ± {scale * self.error:.{digits}f}"
        return f"{scale * self.mean:{sign}.{digits}f}{error}"


def estimate_mean(scores: NDArray) -> Estimate:
    """The mean of scores [folds, seeds] and its standard error; see the module's docstring."""
    variances = [
        scores.mean(axis=1 - axis).var(ddof=1) / scores.shape[axis] for axis in (0, 1) if scores.shape[axis] > 1
    ]
    return Estimate(float(scores.mean()), math.sqrt(sum(variances)) if variances else None)


def estimate_mean_of_tasks(arrays: Iterable[NDArray]) -> Estimate:
    """The mean over tasks and its standard error."""
    estimates = [estimate_mean(scores) for scores in arrays]
    errors = [estimate.error for estimate in estimates if estimate.error is not None]
    mean = float(np.mean([estimate.mean for estimate in estimates]))
    return Estimate(mean, math.hypot(*errors) / len(estimates) if len(errors) == len(estimates) else None)


def score_name(task: str, score: ProbeScore) -> str:
    """The name in a result's metrics of a task's score."""
    main = GLUE_TASKS[task].metrics[0]
    return main if score == "metric" or (score == "auc" and not GLUE_TASKS[task].labels) else score


def collect_scores(results: Iterable[ProbeResult], name: str) -> Scores:
    """The scores of one task; undefined ones count as 0, but a result whose loss is undefined as missing."""
    values = {
        (result.fold, result.seed): [metrics[name] for metrics in result.parts or [result.metrics]]
        for result in results
    }
    return {key: [value or 0.0 for value in row] for key, row in values.items() if name != "loss" or None not in row}


def as_array(scores: Scores) -> NDArray:
    """Scores as an array [folds or parts, seeds]; raises a KeyError if one is missing."""
    folds, seeds = (sorted(set(indices)) for indices in zip(*scores, strict=True))
    return np.array([[scores[fold, seed] for seed in seeds] for fold in folds]).swapaxes(1, 2).reshape(-1, len(seeds))


@dataclass(frozen=True)
class ProbeRow:
    """The scores of a model and setting."""

    model: str
    setting: str
    tasks: dict[str, Estimate]  # those without missing results
    missing: dict[str, int]  # results by task
    mean: Estimate | None  # None if results are missing
    difference: Estimate | None  # from the baseline; None for the baseline and where results are missing


@dataclass(frozen=True)
class ProbeScores:
    """One score of all models and settings by task."""

    score: str
    tasks: dict[str, str]  # the name of the score by task
    baseline: Row | None
    rows: list[ProbeRow]

    def __str__(self) -> str:
        is_percentage = self.score != "loss"
        cells = [["model", "setting", *(f"{task} ({name})" for task, name in self.tasks.items()), "mean", "difference"]]
        for row in self.rows:
            tasks = [
                row.tasks[task].format(is_percentage=is_percentage)
                if task in row.tasks
                else f"{row.missing[task]} missing"
                for task in self.tasks
            ]
            difference = row.difference.format("+", is_percentage) if row.difference else ""
            is_baseline = (row.model, row.setting) == self.baseline
            mean = row.mean.format(is_percentage=is_percentage) if row.mean else ""
            cells.append([row.model, row.setting, *tasks, mean, "baseline" if is_baseline else difference])
        return f"{self.score}\n\n{markdown_table(cells)}"


def scored_tasks(results: Iterable[ProbeResult]) -> list[str]:
    present = {result.task for result in results}
    return [task for task in GLUE_6 if task in present]


def scores_by_row(results: list[ProbeResult], score: ProbeScore) -> dict[Row, dict[str, Scores]]:
    """The scores of all models and settings by task."""
    by_row: dict[Row, dict[str, list[ProbeResult]]] = {}
    for each in sorted(results, key=lambda result: (result.model, result.setting)):
        by_row.setdefault((each.model, each.setting), {}).setdefault(each.task, []).append(each)
    return {
        row: {task: collect_scores(by_task.get(task, ()), score_name(task, score)) for task in scored_tasks(results)}
        for row, by_task in by_row.items()
    }


def score_arrays(results: list[ProbeResult], score: ProbeScore) -> dict[Row, dict[str, NDArray]]:
    """The scores [folds, seeds] by model and setting, and by task, of those that lack no result that others have."""
    expected = expected_keys(results)
    return {
        row: {task: as_array(scores) for task, scores in by_task.items() if scores.keys() == expected[task]}
        for row, by_task in scores_by_row(results, score).items()
    }


def expected_keys(results: Iterable[ProbeResult]) -> dict[str, set[tuple[int, int]]]:
    """By task, the folds and seeds that any model and setting has."""
    keys: dict[str, set[tuple[int, int]]] = {}
    for result in results:
        keys.setdefault(result.task, set()).add((result.fold, result.seed))
    return keys


def compare_rows(results: list[ProbeResult], score: ProbeScore, baseline: tuple[str, ...] = ()) -> ProbeScores:
    """Means, standard errors and paired differences from the baseline, by default the first complete row."""
    arrays, tasks, expected = score_arrays(results, score), scored_tasks(results), expected_keys(results)
    complete = {row: by_task for row, by_task in arrays.items() if len(by_task) == len(tasks)}
    reference = find_baseline(baseline, list(arrays)) if baseline else next(iter(complete), None)
    rows = []
    for row, scores in scores_by_row(results, score).items():
        by_task = arrays[row]
        has_difference = row in complete and reference in complete and row != reference
        differences = [
            complete[row][task] - complete[reference][task] for task in tasks if has_difference and reference
        ]
        rows.append(
            ProbeRow(
                *row,
                tasks={task: estimate_mean(array) for task, array in by_task.items()},
                missing={task: len(expected[task]) - len(scores[task]) for task in tasks if task not in by_task},
                mean=estimate_mean_of_tasks(by_task.values()) if row in complete else None,
                difference=estimate_mean_of_tasks(differences) if differences else None,
            )
        )
    return ProbeScores(score, {task: score_name(task, score) for task in tasks}, reference, rows)


def find_baseline(words: tuple[str, ...], rows: list[Row]) -> Row:
    """The row that --baseline MODEL [SETTING] names."""
    matches = [row for row in rows if row[: len(words)] == words]
    if not matches:
        known = "; ".join(" ".join(row) for row in rows)
        raise ConfigError(f"is {' '.join(words)}, which has no results; there are: {known}", field="baseline")
    return matches[0]
