"""Tasks: GLUE's as rows of a table, the form of custom ones, and the rows and examples of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.errors import ConfigError, DataError
from electra.finetuning.metrics import METRICS
from electra.finetuning.readers import ChoiceLabel, Row, SpanHead, TagScheme, TaskKind, hub_rows, read_rows
from electra.formatting import join_first_names

HUB = "hub:"
BALANCED = "balanced"  # --class-weights
DEV_FRACTION = 0.1  # of the training rows that is held out if there is no dev file
MAX_CHUNK_CHARACTERS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Of the rows that are computed at a time, besides the last one, by device. On a CPU they take up to a minute, then the
output is saved."""
SQUAD_VERSIONS = {"squad": "1.1", "squad2": "2.0"}  # by task
TAGGING_COLUMNS = {"ner": "4", "chunking": "3", "pos": "2"}  # of CoNLL files, by task
TEST = "test"  # prefix of splits whose labels may be missing; their rows are never skipped


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its files, columns, labels and metrics; `dataclasses.asdict` of it can be stored as JSON."""

    name: str
    kind: TaskKind
    text: str | None
    """Column of the text, of the first text of a pair, or of the context; that of choices may be missing."""
    text_b: str | None = None
    """Column of the second text of a pair, or of the question."""
    choices: tuple[str, ...] = ()
    """Column with lists of choices, or a column for each choice."""
    choice_label: ChoiceLabel | None = None
    scheme: TagScheme | None = None
    """The scheme of tags in the training file, in which predictions are written; None: tags of no entities."""
    crf: bool = False
    windows: int = 1
    """Windows of a text that is longer than the maximum length, at most; their pooled states are averaged."""
    label: str
    """Column of the label or score."""
    labels: tuple[str, ...] = ()
    """Class names in the order of their ids; empty for regression."""
    metrics: tuple[str, ...]
    """Names in `METRICS`; the first is the main metric."""
    splits: dict[str, str]
    """Files, or `hub:NAME:CONFIG:SPLIT`, by split: "train", "dev", "test", …"""
    columns: tuple[str, ...] = ()
    """Column names of files without a header."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alternative column name → name of the column in this task."""
    has_label_ids: bool = False
    """The column `label` holds class ids instead of names, -1 where hidden, as in GLUE on the hub."""
    skip_malformed: bool = False
    """Skip lines with a wrong number of fields, except in test splits."""
    dev_fraction: float = 0.0
    """Fraction of the training rows that is held out as the dev split, if there is no dev file."""
    offset: float = 0.0
    """Regression targets are (score - offset) / scale."""
    scale: float = 1.0
    score_range: tuple[float, float] | None = None
    """Lowest and highest possible score."""
    double_unordered: bool = False
    """Train on each pair in both orders."""
    epochs: int = 3
    """Default number of epochs."""
    length: int = 128
    """Default maximum length in tokens."""
    head: SpanHead = "simple"
    """Of question answering."""
    has_unanswerable: bool = False
    """Some questions have no answer."""
    null_threshold: float = 0.0
    """Log-odds of having no answer above which none is given; tuned on the dev rows."""
    predicted_by: str | None = None
    """The task whose model predicts this one, which has no training rows."""
    submission_files: dict[str, str] = field(default_factory=dict)
    """Test split → file of its predictions in a GLUE submission."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ConfigError(f"unknown metric {', '.join(unknown)}; choose from {', '.join(METRICS)}")

    @property
    def num_labels(self) -> int:
        """Outputs of the model: one per class, or one score."""
        return len(self.labels) or 1

    @cached_property
    def class_ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.labels)}

    def normalize_scores(self, scores: NDArray) -> NDArray:
        """Regression targets from scores in the user's unit."""
        return (scores - self.offset) / self.scale

    def denormalize_scores(self, outputs: NDArray) -> NDArray:
        """Scores in the user's unit from the model's outputs."""
        return outputs * self.scale + self.offset

    def compute_metrics(self, predicted: NDArray, labels: NDArray) -> dict[str, float]:
        return {name: METRICS[name](predicted, labels) for name in self.metrics}

    def find_column(self, name: str, columns: Iterable[str]) -> str | None:
        """The column of a file that has this name or one of its aliases."""
        aliases = [alias for alias, column in self.aliases.items() if column == name]
        return next((column for column in (name, *aliases) if column in columns), None)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts or pairs of texts, with labels where they are known; an example may have several of them."""

    texts: list[str]
    texts_b: list[str] | None = None
    counts: NDArray | None = None  # [N] texts or pairs of each example, its choices or words; None: one
    labels: NDArray | None = None  # [N] class ids, scores or objects; multi-hot classes [N, classes]
    windows: int = 1  # that a long text is cut into, at most
    rows: Sequence[Row] = ()  # of the file, if they are to be written out again

    def __len__(self) -> int:
        return len(self.texts) if self.counts is None else len(self.counts)

    @property
    def text_counts(self) -> NDArray:
        """Texts or pairs of each example [N]."""
        return np.ones(len(self.texts), np.int64) if self.counts is None else self.counts

    def select(self, indices: NDArray) -> Examples:
        positions = indices
        if self.counts is not None:
            groups = np.split(np.arange(len(self.texts)), np.cumsum(self.counts)[:-1])
            positions = np.concatenate([groups[index] for index in indices])
        return Examples(
            texts=[self.texts[position] for position in positions],
            texts_b=None if self.texts_b is None else [self.texts_b[position] for position in positions],
            counts=None if self.counts is None else self.counts[indices],
            labels=None if self.labels is None else self.labels[indices],
            windows=self.windows,
        )

    def with_swapped_pairs(self) -> Examples:
        """These pairs with their labels, followed by the same with their two texts swapped."""
        assert self.texts_b is not None
        assert self.labels is not None
        labels = np.concatenate([self.labels, self.labels])
        return Examples(texts=self.texts + self.texts_b, texts_b=self.texts_b + self.texts, labels=labels)


def take_chunk(rows: Iterator[Row], max_rows: int, device_type: str) -> list[Row]:
    """The next rows to compute on a device, fewer if they are long."""
    chunk, size = [], 0
    for row in islice(rows, max_rows):
        chunk.append(row)
        size += sum(len(str(cell)) for cell in row.values.values())
        if size > MAX_CHUNK_CHARACTERS[device_type]:
            break
    return chunk


RowReader = Callable[..., Iterator[Row]]  # with the arguments of `readers.read_rows`


def read_split_rows(task: Task, split: str, read_rows: RowReader = read_rows) -> Iterator[Row]:
    """The rows of a split, from a file or the hub."""
    source = task.splits[split]
    if source.startswith(HUB):
        rows = hub_rows(source)
        return (with_class_name(task, row) for row in rows) if task.has_label_ids else rows
    if not Path(source).exists():
        raise DataError(f"{source}, the file of the {split} rows, does not exist")
    if not Path(source).is_file():
        raise DataError(f"{source} is a folder or a pipe; the {split} rows are read several times, so give a file")
    is_test = split.startswith(TEST)  # skipping a test row would shift the predictions after it
    return read_rows(Path(source), columns=task.columns, skip_malformed=task.skip_malformed and not is_test)


def with_class_name(task: Task, row: Row) -> Row:
    """A row of GLUE on the hub with the class name in place of its id, or without label if that is hidden."""
    values = dict(row.values)
    label = values.pop("label", -1)
    if label != -1:
        values[task.label] = task.labels[label] if task.labels else label
    return Row(row.line, values)


@contextmanager
def add_line_to_errors(source: str, line: int) -> Iterator[None]:
    """Add file and line to the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}, line {line}: {error}") from None


def get_cell(task: Task, name: str, row: Row) -> Any:
    column = task.find_column(name, row.values)
    if column is None:
        present = join_first_names([repr(column) for column in row.values], 20)
        flags = f"--text, --text-b{', --choices' if task.choices else ''} and --label"
        raise DataError(f"no column {name!r}; the columns are {present}; {flags} of electra finetune set them")
    return row.values[column]


def check_distinct_columns(task: Task) -> Task:
    """The task; raises a ConfigError if two of its columns, set or by default, are one: labels must not be texts."""
    flags = [("--text", task.text), ("--text-b", task.text_b), ("--label", task.label)]
    flags += [("--choices", column) for column in task.choices]
    columns = Counter(column for _, column in flags if column is not None)
    column, count = columns.most_common(1)[0]
    if count > 1:
        same = " and ".join(dict.fromkeys(flag for flag, name in flags if name == column))
        raise ConfigError(f"{same} are {column}; they must be different columns (those that are not set have defaults)")
    return task


def get_text(task: Task, name: str, row: Row) -> str:
    """The text of a row in a column; null becomes empty."""
    return check_text(get_cell(task, name, row), f"column {name!r}")


def check_text(text: Any, place: str) -> str:
    """A cell, or an element of one, as text; null becomes empty."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{place} holds a {type(text).__name__}; a text must be a string")
    return text.encode("utf-8", "replace").decode()  # JSON may contain lone surrogates, which tokenizers reject


def define_glue_task(name: str, folder: str, **fields: Any) -> Task:
    """A row of `GLUE_TASKS` with what most tasks have in common."""
    common: dict[str, Any] = {
        "kind": "classification",
        "label": "label",
        "labels": ("0", "1"),
        "metrics": ("accuracy",),
        "splits": {split: f"{folder}/{split}.tsv" for split in ("train", "dev", "test")},
        "submission_files": {"test": f"{folder}.tsv"},
    }
    return Task(name=name, **common | fields)


SENTENCES: dict[str, Any] = {"text": "sentence1", "text_b": "sentence2"}
ENTAILMENT = ("entailment", "not_entailment")
NLI: dict[str, Any] = SENTENCES | {"label": "gold_label", "labels": ("entailment", "neutral", "contradiction")}
NLI_ALIASES = {
    "premise": "sentence1",
    "Premise": "sentence1",  # in diagnostic-full.tsv
    "hypothesis": "sentence2",
    "Hypothesis": "sentence2",
    "label": "gold_label",
    "Label": "gold_label",
}
MNLI_SPLITS = {
    "train": "MNLI/train.tsv",
    "dev": "MNLI/dev_matched.tsv",
    "dev_mismatched": "MNLI/dev_mismatched.tsv",
    "test": "MNLI/test_matched.tsv",
    "test_mismatched": "MNLI/test_mismatched.tsv",
}
MNLI_SUBMISSION = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}

GLUE_TASKS = {
    task.name: task
    for task in (
        # files and columns as in the official download, classes in the order of the hub's ids
        define_glue_task(
            "cola", "CoLA", text="sentence", metrics=("matthews",), columns=("source", "label", "mark", "sentence")
        ),
        define_glue_task("sst2", "SST-2", text="sentence"),
        define_glue_task(
            "mrpc",
            "MRPC",
            text="#1 String",
            text_b="#2 String",
            label="Quality",
            metrics=("accuracy", "f1"),
            aliases={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
            double_unordered=True,
        ),
        define_glue_task(
            "stsb",
            "STS-B",
            **SENTENCES,
            kind="regression",
            label="score",
            labels=(),
            metrics=("spearman", "pearson"),
            aliases={"label": "score"},
            scale=5.0,
            score_range=(0.0, 5.0),
            double_unordered=True,
            epochs=10,
        ),
        define_glue_task(
            "qqp",
            "QQP",
            text="question1",
            text_b="question2",
            label="is_duplicate",
            metrics=("accuracy", "f1"),
            aliases={"label": "is_duplicate"},
            skip_malformed=True,  # the official file has a few questions that contain a line end
        ),
        define_glue_task(
            "mnli", "MNLI", **NLI, aliases=NLI_ALIASES, splits=MNLI_SPLITS, submission_files=MNLI_SUBMISSION
        ),
        define_glue_task("qnli", "QNLI", text="question", text_b="sentence", labels=ENTAILMENT),
        define_glue_task("rte", "RTE", **SENTENCES, labels=ENTAILMENT, epochs=10),
        define_glue_task("wnli", "WNLI", **SENTENCES),
        define_glue_task(
            "diagnostic",
            "diagnostic",
            **NLI,
            metrics=("matthews",),
            aliases=NLI_ALIASES,
            splits={"test": "diagnostic/diagnostic.tsv"},
            submission_files={"test": "AX.tsv"},
            predicted_by="mnli",
        ),
    )
}
TRAINABLE_TASKS = [name for name, task in GLUE_TASKS.items() if task.predicted_by is None]

HUB_CONFIGS = {"diagnostic": "ax"}  # task → config of the hub's dataset, if different
HUB_SPLITS = {  # stem of the file's name → split of the hub's dataset, if different
    "dev": "validation",
    "dev_matched": "validation_matched",
    "dev_mismatched": "validation_mismatched",
    "diagnostic": "test",
}


def get_glue_task(name: str, data: str) -> Task:
    """A GLUE task to train on, with its data in the folder of the official download, or in `hub:glue`."""
    if name not in GLUE_TASKS:
        known = ", ".join([*TRAINABLE_TASKS, *SQUAD_VERSIONS, *TAGGING_COLUMNS])
        raise ConfigError(f"unknown task {name!r}; choose from {known}, or use your own files")
    if name not in TRAINABLE_TASKS:
        raise ConfigError(f"{name} has no training rows; it is predicted together with {GLUE_TASKS[name].predicted_by}")
    return with_data_source(GLUE_TASKS[name], data)


def with_data_source(task: Task, data: str) -> Task:
    """A task of the table with its splits in a folder or a hub dataset."""
    if data.startswith(HUB):
        dataset = f"{data}:{HUB_CONFIGS.get(task.name, task.name)}"
        stems = {split: Path(file).stem for split, file in task.splits.items()}
        splits = {split: f"{dataset}:{HUB_SPLITS.get(stem, stem)}" for split, stem in stems.items()}
        return replace(task, splits=splits, has_label_ids=True)
    files = {split: Path(data, file) for split, file in task.splits.items()}
    if not any(file.exists() for file in files.values()):
        raise ConfigError(
            f"found none of {', '.join(map(str, files.values()))}; {data} must be the folder of GLUE's official "
            f"download, with one folder per task, or {HUB}glue"
        )
    return replace(task, splits={split: str(file) for split, file in files.items()})


def stack_labels(labels: Sequence[Any], dtype: type = object) -> NDArray:
    """Labels as an array; objects, which may be lists, stay as they are."""
    if dtype is not object:
        return np.array(labels, dtype)
    stacked = np.empty(len(labels), object)
    for index, label in enumerate(labels):
        stacked[index] = label
    return stacked


# Weights of classes in the loss.


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
        if name not in weights or not weight >= 0 or not math.isfinite(weight):
            names = join_first_names(list(weights), 20)
            allowed = f"{BALANCED}, or CLASS=WEIGHT with a weight of at least 0 for some of the classes {names}"
            raise ConfigError(f"is {word}; it must be {allowed}", field="class_weights")
        weights[name] = weight
    return list(weights.values())
