"""`electra predict` and `electra evaluate`: a fine-tuned model on a file, of any length."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from electra.errors import ConfigError, DataError
from electra.finetuning.features import compute_logits, make_features
from electra.finetuning.job import ONE_TOGETHER, Measures
from electra.finetuning.jobs import best_model, seed_models
from electra.finetuning.metrics import METRICS, confusion_matrix
from electra.finetuning.model import OUTPUT_TYPES, TaskModel, load_finetuned
from electra.finetuning.readers import LABEL_SEPARATOR
from electra.finetuning.tasks import Examples, Task, errors_with_line, stream_examples
from electra.model.config import check_length
from electra.model.storage import load_model_tokenizer
from electra.runfolder import CONFIG, open_atomic, read_json
from electra.training.config import Device, Precision
from electra.training.hardware import choose_device, choose_precision

Write = Callable[[dict[str, Any]], None]

ROWS = 4096
"""Rows that are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """A fine-tuned model and a file for it."""

    model: Path
    """A fine-tuned model, or the --output of electra finetune: that stands for its best seed."""
    input: Path
    """Rows with the columns that the model was trained on: .csv, .tsv, .jsonl or .parquet, packed or not."""
    ensemble: bool = False
    """All seeds in --model together: the mean of what they say."""
    length: int | None = None
    """Longer texts are cut; how many is reported. As in fine-tuning unless given."""
    batch: int = 64
    """Rows at a time."""
    device: Device = "auto"
    """auto: the GPU where there is one."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("length", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(AnswerConfig):
    """Write what a fine-tuned model says of each row of a file: the row, its prediction, and how sure the model is."""

    output: Path
    """The file to write: .csv, .tsv or .jsonl; one of that name is replaced."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AnswerConfig):
    """Measure a fine-tuned model on a file with labels."""


@dataclass(frozen=True)
class Predicted:
    """What was written."""

    output: str
    rows: int
    truncated: int

    def __str__(self) -> str:
        cut = f"; {self.truncated:,} texts were cut to --length" if self.truncated else ""
        return f"{self.output}: {self.rows:,} rows{cut}"


@dataclass(frozen=True)
class Evaluated:
    """What was measured."""

    model: str
    models: int  # how many answered together
    task: str
    input: str
    rows: int
    truncated: int
    measures: Measures
    labels: list[str]
    confusion: list[list[int]]  # [true class][predicted class]; empty for other kinds of tasks

    def __str__(self) -> str:
        cut = f", {self.truncated:,} cut to --length" if self.truncated else ""
        together = f"; {self.models} models together" if self.models > 1 else ""
        lines = [f"{self.input}: {self.rows:,} rows{cut}{together}"]
        lines += [f"  {name:<14}{100 * value:6.2f}" for name, value in self.measures.items()]
        if self.confusion and len(self.labels) <= 10:
            width = max(map(len, [*self.labels, *(str(count) for row in self.confusion for count in row)]))
            lines += [
                "true class ↓, predicted →",
                " " * width + "  " + "  ".join(f"{name:>{width}}" for name in self.labels),
            ]
            for name, counts in zip(self.labels, self.confusion, strict=True):
                lines.append(f"{name:<{width}}  " + "  ".join(f"{count:>{width}}" for count in counts))
        return "\n".join(lines)


class Answers:
    """Fine-tuned models of one task that answer together."""

    def __init__(self, config: AnswerConfig) -> None:
        self.folders = several_models(config.model) if config.ensemble else [best_model(config.model)]
        loaded = [load_finetuned(folder) for folder in self.folders]
        self.device = choose_device(config.device)
        self.precision = choose_precision(config.precision, self.device)
        self.models: list[TaskModel] = [model.to(self.device) for model, _ in loaded]
        self.task: Task = loaded[0][1]
        encoder = self.models[0].encoder
        self.length: int = config.length or read_json(self.folders[0] / CONFIG).get("length", encoder.config.positions)
        check_length(self.length, encoder.config)
        self.batch, self.pad_id = config.batch, encoder.config.pad_id
        self.tokenizer = load_model_tokenizer(self.folders[0], encoder.config.vocab_size)
        self.rows = self.truncated = 0

    def chunks(self, path: Path, labelled: bool) -> Iterator[tuple[Examples, NDArray]]:
        """The examples of a file, some thousand at a time, with what is said of them [N, outputs]."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.completed:,.0f} rows"), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            for examples in stream_examples(self.task, path, ROWS, with_labels=labelled):
                yield examples, self.logits(examples)
                bar.update(task, completed=self.rows)

    def logits(self, examples: Examples) -> NDArray:
        """What the models say of examples, on average."""
        features = make_features(self.task, examples, self.tokenizer, self.length)
        self.rows, self.truncated = self.rows + len(examples), self.truncated + int(features.truncated)
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            return compute_logits(self.forward, features.to(self.device), self.batch, self.length, self.pad_id)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The mean of the models' logits [B, num_labels]."""
        return torch.stack([model(*inputs).float() for model in self.models]).mean(0)


def several_models(output: Path) -> list[Path]:
    """The models of all seeds, which have to be more than one."""
    models = seed_models(output)
    if len(models) == 1:
        more = "fine-tune more --seeds (electra glue keeps their models with --keeps-models)"
        raise ConfigError(f"there is one model in {output}, and {ONE_TOGETHER}; leave --ensemble out, or {more}")
    return models


def predict(config: PredictConfig) -> Predicted:
    """Write a row for every row of a file; the output is there whole or not at all."""
    if config.output.exists() and config.output.samefile(config.input):
        raise ConfigError(f"--output is {config.output}, as --input is; choose another name")
    answers = Answers(config)
    with written_rows(config.output) as write:
        for examples, logits in answers.chunks(config.input, labelled=False):
            assert examples.rows is not None
            for row, answer in zip(examples.rows, answers_of(answers.task, logits), strict=True):
                with errors_with_line(str(config.input), row.line):
                    write(joined(row.values, answer))
    return Predicted(str(config.output), answers.rows, answers.truncated)


def answers_of(task: Task, logits: NDArray) -> Iterator[dict[str, Any]]:
    """What each row gets: the prediction, and for classes how probable they are."""
    reading = OUTPUT_TYPES[task.kind]
    words = task.decode(reading.predict(logits, task))
    for word, certainties in zip(words, reading.activation(logits).tolist(), strict=True):
        named = {f"p({name})": round(value, 4) for name, value in zip(task.labels, certainties, strict=False)}
        yield {"prediction": float(f"{word:.6g}") if isinstance(word, float) else word} | named


def joined(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A row with what is said of it."""
    twins = [name for name in answer if name in row]
    if twins:
        raise DataError(f"there is a column {twins[0]!r} already, which the answers need; give it another name")
    return row | answer


@contextmanager
def written_rows(path: Path) -> Iterator[Write]:
    """A function that writes rows into a file beside `path`, which takes its place when all went well."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"cannot write {path}; its name must end in {', '.join(WRITERS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} into")
    with open_atomic(path, encoding="utf-8", errors="replace", newline="") as file:
        yield WRITERS[path.suffix](file)


def write_json_lines(file: TextIO) -> Write:
    """Rows as lines of JSON."""
    return lambda row: print(json.dumps(row, ensure_ascii=False, default=str), file=file)


class Table:
    """Rows as lines of a table, a header first, which the first row decides; several labels stand in one cell."""

    def __init__(self, file: TextIO, **dialect: Any) -> None:
        self.writer = csv.writer(file, lineterminator="\n", **dialect)
        self.header: list[str] = []

    def __call__(self, row: dict[str, Any]) -> None:
        if not self.header:
            self.header = list(row)
            self.write(self.header)
        unknown = [name for name in row if name not in self.header]
        if unknown:
            raise DataError(f"the first row has no column {unknown[0]!r}, so the table has none; write .jsonl instead")
        self.write([row.get(name) for name in self.header])

    def write(self, cells: list[Any]) -> None:
        """Write one line."""
        try:
            self.writer.writerow(
                LABEL_SEPARATOR.join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells
            )
        except csv.Error:  # only .tsv has such
            raise DataError("a cell has a tab or line end in it; .tsv cannot hold it, write .csv or .jsonl") from None


WRITERS: dict[str, Callable[[TextIO], Write]] = {
    ".jsonl": write_json_lines,
    ".csv": lambda file: Table(file, quoting=csv.QUOTE_ALL),
    ".tsv": lambda file: Table(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None),
}


def evaluate(config: EvaluateConfig) -> Evaluated:
    """Measure on a file with labels."""
    answers = Answers(config)
    task, truth, said = answers.task, [], []
    for examples, logits in answers.chunks(config.input, labelled=True):
        if examples.labels is None:
            raise DataError(
                f"{config.input} has no column {task.label!r} with labels to measure by; predict needs none"
            )
        truth.append(examples.labels)
        said.append(logits)
    labels, predicted = np.concatenate(truth), OUTPUT_TYPES[task.kind].predict(np.concatenate(said), task)
    is_classes = task.kind == "classification"
    return Evaluated(
        model=", ".join(map(str, answers.folders)),
        models=len(answers.folders),
        task=task.name,
        input=str(config.input),
        rows=answers.rows,
        truncated=answers.truncated,
        measures={name: METRICS[name](predicted, labels) for name in task.metrics},
        labels=list(task.labels),
        confusion=confusion_matrix(predicted, labels, len(task.labels)).tolist() if is_classes else [],
    )
