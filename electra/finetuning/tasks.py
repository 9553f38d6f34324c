"""Tasks: GLUE's as rows of a table, users' own made from their files, and the examples of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.errors import ConfigError, DataError
from electra.finetuning.labels import KINDS, Kind, kind_of
from electra.finetuning.metrics import METRICS
from electra.finetuning.readers import Row, hub_rows, read_rows
from electra.model.config import check_fields

HUB = "hub:"
TEST = "test"  # begins the names of splits that may have no labels, and whose rows all count


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learnt from which columns of which files; `dataclasses.asdict` of it can be stored as JSON."""

    name: str
    kind: Kind
    text: str
    """The column of the text, or of the first of two."""
    text_b: str | None = None
    """The column of the second text, if there are pairs."""
    label: str
    """The column of the label or score."""
    labels: tuple[str, ...] = ()
    """The classes in the order of their numbers; none for scores."""
    metrics: tuple[str, ...]
    """Names of `METRICS`; the first is the headline."""
    splits: dict[str, str]
    """Files, or `hub:NAME:CONFIG:SPLIT`, by "train", "dev", "test" and the like."""
    columns: tuple[str, ...] = ()
    """The columns of files without a header."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names that columns have elsewhere → their names here."""
    is_numbered: bool = False
    """A column `label` holds numbers of classes instead of names, -1 where it is secret, as in GLUE on the hub."""
    skips_broken: bool = False
    """Leave out lines of files to learn or measure from that have the wrong number of fields."""
    held_out: float = 0.0
    """The share of the training rows that is the dev split, where there is no file of its own for it."""
    seed: int = 0
    """Decides which rows are held out."""
    offset: float = 0.0
    """The network learns (score - offset) / scale."""
    scale: float = 1.0
    bounds: tuple[float, float] | None = None
    """The least and the greatest score there is."""
    doubles: bool = False
    """Train on each pair in both orders (`Examples.doubled`)."""
    epochs: int = 3
    uses: str | None = None
    """The task whose model does this one, which has no training rows."""
    submission: dict[str, str] = field(default_factory=dict)
    """Splits → the files of GLUE's submission that their predictions go to."""

    def __post_init__(self) -> None:
        if self.kind not in list(KINDS):
            raise ConfigError(f"there is no kind of task {self.kind!r}; choose from {', '.join(KINDS)}")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown:
            raise ConfigError(f"there is no metric {', '.join(unknown)}; choose from {', '.join(METRICS)}")

    @classmethod
    def from_dict(cls, settings: Any) -> Task:
        """The inverse of `dataclasses.asdict`, also after a way through JSON; unknown settings are refused."""
        check_fields(settings, cls)
        fields: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in settings.items()}
        return cls(**fields)

    @property
    def outputs(self) -> int:
        """How many numbers the network gives for a row."""
        return len(self.labels) or 1

    def scaled(self, scores: NDArray) -> NDArray:
        """Scores as the network learns them."""
        return (scores - self.offset) / self.scale

    def unscaled(self, outputs: NDArray) -> NDArray:
        """Scores in the user's unit from what the network gives."""
        return outputs * self.scale + self.offset

    def words(self, labels: NDArray) -> list[Any]:
        """Labels or predictions as people read them: names of classes, lists of them, scores."""
        return KINDS[self.kind].decode(labels, self.labels)

    def column(self, name: str, present: Iterable[str]) -> str | None:
        """The column that a file has under this name or another of its names."""
        others = [other for other, ours in self.aliases.items() if ours == name]
        return next((column for column in (name, *others) if column in present), None)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Rows of a task: texts, which may be empty, and labels where they are known."""

    texts: list[str]
    pairs: list[str] | None = None
    labels: NDArray | None = None  # int64 [N] classes; float32 [N] scores in the user's unit; float32 [N, classes] 0/1
    rows: list[Row] | None = None  # where they are to be written out again

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, places: Iterable[int]) -> Examples:
        """The examples at these places."""
        places = np.array(list(places), np.int64)
        return Examples(
            texts=[self.texts[place] for place in places],
            pairs=None if self.pairs is None else [self.pairs[place] for place in places],
            labels=None if self.labels is None else self.labels[places],
            rows=None if self.rows is None else [self.rows[place] for place in places],
        )

    def doubled(self) -> Examples:
        """These examples, then the same with their two texts swapped."""
        assert self.pairs is not None
        labels = None if self.labels is None else np.concatenate([self.labels, self.labels])
        return Examples(texts=self.texts + self.pairs, pairs=self.pairs + self.texts, labels=labels)


def read_examples(task: Task, split: str) -> Examples:
    """All examples of a split; test splits need no labels."""
    if split not in task.splits:
        raise ConfigError(f"task {task.name} has no split {split!r}; it has {', '.join(task.splits)}")
    rows = split_rows(task, split)
    first = next(rows)
    has_labels = not split.startswith(TEST) or task.column(task.label, first.values) is not None
    examples = gather(task, task.splits[split], chain([first], rows), has_labels)
    if task.held_out and split in ("train", "dev"):
        return examples.take(chosen_rows(task, split, len(examples)))
    return examples


def stream_examples(task: Task, path: Path, size: int, *, labelled: bool = True) -> Iterator[Examples]:
    """The examples of a file, `size` at a time, with their rows.

    Labels are there if the file has their column; with `labelled=False` nobody looks at it.
    """
    rows = read_rows(path, columns=task.columns, skips_broken=task.skips_broken and labelled)
    first = next(rows)
    has_labels = labelled and task.column(task.label, first.values) is not None
    rows = chain([first], rows)
    while batch := list(islice(rows, size)):
        yield replace(gather(task, str(path), batch, has_labels), rows=batch)


def split_rows(task: Task, split: str) -> Iterator[Row]:
    """The rows of a split, from a file or the hub."""
    source = task.splits[split]
    if source.startswith(HUB):
        rows = hub_rows(source)
        return (with_name_of_class(task, row) for row in rows) if task.is_numbered else rows
    if not Path(source).exists():
        raise DataError(f"there is no {source}, which should hold the {split} rows; put it there, or choose other data")
    is_test = split.startswith(TEST)  # a test row left out would shift the predictions below it
    return read_rows(Path(source), columns=task.columns, skips_broken=task.skips_broken and not is_test)


def with_name_of_class(task: Task, row: Row) -> Row:
    """A row with the name of its class, under the column's name in files, or without a label if that is secret."""
    values = dict(row.values)
    number = values.pop("label", -1)
    if number != -1:
        values[task.label] = task.labels[number] if task.labels else number
    return Row(row.line, values)


def gather(task: Task, source: str, rows: Iterable[Row], has_labels: bool) -> Examples:
    """The examples of rows."""
    rules, numbers = KINDS[task.kind], {name: number for number, name in enumerate(task.labels)}
    texts, pairs, labels = [], [], []
    for row in rows:
        with telling_line(source, row.line):
            texts.append(text_in(task, task.text, row))
            if task.text_b is not None:
                pairs.append(text_in(task, task.text_b, row))
            if has_labels:
                labels.append(rules.encode(rules.read(cell(task, task.label, row)), numbers))
    return Examples(
        texts=texts,
        pairs=pairs if task.text_b is not None else None,
        labels=np.array(labels, rules.dtype) if has_labels else None,
    )


@contextmanager
def telling_line(source: str, line: int) -> Iterator[None]:
    """Say in which line a mistake is."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}, line {line}: {error}") from None


def cell(task: Task, name: str, row: Row) -> Any:
    """The cell of a row in a column."""
    column = task.column(name, row.values)
    if column is None:
        present = ", ".join(map(repr, row.values))
        raise DataError(
            f"there is no column {name!r}; the columns are {present}; a fine-tuning names its own by "
            "--text, --text-b and --label"
        )
    return row.values[column]


def text_in(task: Task, name: str, row: Row) -> str:
    """The text of a row in a column; an absent one is empty."""
    text = cell(task, name, row)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"column {name!r} holds a {type(text).__name__}; a text must be a string")
    return text.encode("utf-8", "replace").decode()  # JSON may hold half a character, which no tokenizer takes


def chosen_rows(task: Task, split: str, rows: int) -> NDArray:
    """The places of the rows that are held out as the dev split, or of the others, in the order of the file."""
    if rows < 2:
        raise DataError(
            f"{task.splits[split]} has one row; held-out rows need two at least, or give a file of dev rows"
        )
    dev = min(max(1, round(rows * task.held_out)), rows - 1)
    order = np.random.default_rng(task.seed).permutation(rows)
    return np.sort(order[:dev] if split == "dev" else order[dev:])


def glue(name: str, folder: str, **fields: Any) -> Task:
    """A task of GLUE with what most of them have in common."""
    usual: dict[str, Any] = {
        "kind": "classification",
        "label": "label",
        "labels": ("0", "1"),
        "metrics": ("accuracy",),
        "splits": {split: f"{folder}/{split}.tsv" for split in ("train", "dev", "test")},
        "submission": {"test": f"{folder}.tsv"},
    }
    return Task(name=name, **usual | fields)


SENTENCES: dict[str, Any] = {"text": "sentence1", "text_b": "sentence2"}
ENTAILMENT = ("entailment", "not_entailment")
NLI: dict[str, Any] = SENTENCES | {"label": "gold_label", "labels": ("entailment", "neutral", "contradiction")}
NLI_NAMES = {
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
MNLI_FILES = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}

GLUE = (
    # files and columns are named as in the official download; classes are in the order of the hub's numbers
    glue("cola", "CoLA", text="sentence", metrics=("matthews",), columns=("source", "label", "mark", "sentence")),
    glue("sst2", "SST-2", text="sentence"),
    glue(
        "mrpc",
        "MRPC",
        text="#1 String",
        text_b="#2 String",
        label="Quality",
        metrics=("accuracy", "f1"),
        aliases={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        doubles=True,
    ),
    glue(
        "stsb",
        "STS-B",
        **SENTENCES,
        kind="regression",
        label="score",
        labels=(),
        metrics=("spearman", "pearson"),
        aliases={"label": "score"},
        scale=5.0,
        bounds=(0.0, 5.0),
        doubles=True,
        epochs=10,
    ),
    glue(
        "qqp",
        "QQP",
        text="question1",
        text_b="question2",
        label="is_duplicate",
        metrics=("accuracy", "f1"),
        aliases={"label": "is_duplicate"},
        skips_broken=True,  # the official file has a few questions with a line end in them
    ),
    glue("mnli", "MNLI", **NLI, aliases=NLI_NAMES, splits=MNLI_SPLITS, submission=MNLI_FILES),
    glue("qnli", "QNLI", text="question", text_b="sentence", labels=ENTAILMENT),
    glue("rte", "RTE", **SENTENCES, labels=ENTAILMENT, epochs=10),
    glue("wnli", "WNLI", **SENTENCES),
    glue(
        "diagnostic",
        "diagnostic",
        **NLI,
        metrics=("matthews",),
        aliases=NLI_NAMES,
        splits={"test": "diagnostic/diagnostic.tsv"},
        submission={"test": "AX.tsv"},
        uses="mnli",
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in GLUE}

HUB_CONFIGS = {"diagnostic": "ax"}  # where the hub's name differs from the task's
HUB_SPLITS = {
    # where the hub's name differs from the file's
    "dev": "validation",
    "dev_matched": "validation_matched",
    "dev_mismatched": "validation_mismatched",
    "diagnostic": "test",
}


def learnable(name: str) -> str:
    """The name of a task; refused where that has nothing to learn from."""
    if name in TASKS and TASKS[name].uses:
        raise ConfigError(f"{name} has no training rows; it is answered along with {TASKS[name].uses}")
    return name


def glue_task(name: str, data: str) -> Task:
    """A task of GLUE with its files in the folder `data` of the official download, or in a dataset `hub:glue`."""
    if name not in TASKS:
        names = ", ".join(name for name, task in TASKS.items() if task.uses is None)
        raise ConfigError(f"there is no task {name!r}; choose from {names}, or give files of your own")
    task = TASKS[name]
    if data.startswith(HUB):
        place = f"{data}:{HUB_CONFIGS.get(name, name)}"
        stems = {split: Path(file).stem for split, file in task.splits.items()}
        splits = {split: f"{place}:{HUB_SPLITS.get(stem, stem)}" for split, stem in stems.items()}
        return replace(task, splits=splits, is_numbered=True)
    files = {split: Path(data, file) for split, file in task.splits.items()}
    if not any(file.exists() for file in files.values()):
        raise ConfigError(
            f"there is none of {', '.join(map(str, files.values()))}; the data of GLUE is the folder of its official "
            f"download, which has a folder for each task, or {HUB}glue"
        )
    return replace(task, splits={split: str(file) for split, file in files.items()})


def own_task(
    *,
    train: Path,
    dev: Path | None = None,
    dev_fraction: float | None = None,
    text: str,
    text_b: str | None = None,
    label: str,
    kind: Kind | None = None,
    seed: int = 0,
) -> Task:
    """A task of a user's own files; its kind, unless given, classes and scale come from the labels in `train`.

    Without a file `dev`, the seed draws the share `dev_fraction` of the rows of `train` (0.1 unless given) for it.
    Classes come from all rows of `train`, so that a rare one may be drawn.
    """
    if dev is not None and dev_fraction is not None:
        raise ConfigError(f"there are dev rows in {dev} and a dev fraction of {dev_fraction}; give one of them")
    if len({text, text_b, label}) < 3:
        raise ConfigError(f"text, text_b and label are columns {text}, {text_b} and {label}; they must be different")
    held_out = 0.0 if dev is not None else 0.1 if dev_fraction is None else dev_fraction
    if dev is None and not 0 < held_out < 1:
        raise ConfigError(f"the dev fraction is {held_out}; it must be above 0 and below 1")
    draft = Task(
        name=train.name.split(".")[0],
        kind=kind or "classification",
        text=text,
        text_b=text_b,
        label=label,
        metrics=(),
        splits={"train": str(train), "dev": str(dev or train)},
        held_out=held_out,
        seed=seed,
    )
    return taught(draft, kind)


def taught(draft: Task, kind: Kind | None) -> Task:
    """The task with what its training labels say: kind, unless given, classes, metrics, scale."""
    source = draft.splits["train"]
    cells: dict[int, Any] = {}  # by line
    for row in split_rows(draft, "train"):
        with telling_line(source, row.line):
            cells[row.line] = cell(draft, draft.label, row)
    kind = kind or kind_of(list(cells.values()))
    values = []
    for line, label in cells.items():
        with telling_line(source, line):
            values.append(KINDS[kind].read(label))
    try:
        return replace(draft, kind=kind, **KINDS[kind].learn(values))
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
