"""`electra predict` and `electra evaluate`: apply a fine-tuned model to a file of any length."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
import torch
from torch import Tensor

from electra.errors import ConfigError, DataError, check_finite
from electra.finetuning.config import EvaluateConfig, PredictConfig, PredictorConfig
from electra.finetuning.conll import ConllWriter
from electra.finetuning.features import Outputs, compute_logits, default_batch_size
from electra.finetuning.jobs import best_model_folder, seed_model_folders
from electra.finetuning.kinds import (
    KINDS,
    Kind,
    count_unknown_labels,
    parse_examples,
    report_unknown_labels,
    stream_examples,
)
from electra.finetuning.metrics import Metrics, confusion_matrix, format_class_scores, format_metric
from electra.finetuning.readers import LABEL_SEPARATOR, Row
from electra.finetuning.storage import load_finetuned_model, task_of_ensemble, weight_checksums
from electra.finetuning.tasks import Examples, Task, add_line_to_errors
from electra.formatting import format_count
from electra.model.storage import load_model_tokenizer, warn_untrained_length
from electra.progress import show_row_count
from electra.resumable import check_output_file, content_checksum, open_resumable, remove_partial_output
from electra.runfolder import (
    CONFIG,
    PARTIAL,
    RESULT,
    create_folder_atomically,
    is_missing_or_empty,
    lock_file,
    open_atomic,
    read_json,
    replace_nonfinite,
)
from electra.training.hardware import choose_device, choose_dtype

FILES = "prediction_files"  # the column of what the files of predictions hold, until they are written
CHUNK_SIZE = 4096  # rows in memory at a time


@dataclass(frozen=True)
class PredictResult:
    """The file of predictions."""

    output: str
    rows: int
    truncated: int

    def __str__(self) -> str:
        truncated = f"; {format_count(self.truncated, 'text')} truncated to --length" if self.truncated else ""
        return f"{self.output}: {format_count(self.rows, 'row')}{truncated}"


@dataclass(frozen=True)
class EvaluateResult:
    """Metrics of a model, or an ensemble, on a file."""

    models: list[str]  # several form an ensemble
    task: str
    input: str
    rows: int
    truncated: int
    metrics: Metrics
    labels: list[str]
    confusion_matrix: list[list[int]]  # [class in the file][predicted class]; of classes and tags only
    classes: dict[str, Metrics]  # scores of the classes of a multi-label task, or of tags

    def __str__(self) -> str:
        truncated = f", {self.truncated:,} truncated to --length" if self.truncated else ""
        ensemble = f"; ensemble of {len(self.models)} models" if len(self.models) > 1 else ""
        lines = [f"{self.input}: {format_count(self.rows, 'row')}{truncated}{ensemble}"]
        lines += [f"  {name:<14}{format_metric(name, value):>6}" for name, value in self.metrics.items()]
        lines += format_class_scores(self.classes)
        if self.confusion_matrix and len(self.labels) <= 10:
            counts = [[str(count) for count in row] for row in self.confusion_matrix]
            width = max(map(len, [*self.labels, *(count for row in counts for count in row)]))
            lines += ["true class ↓, predicted →", format_aligned_cells(["", *self.labels], width)]
            lines += [format_aligned_cells([name, *row], width) for name, row in zip(self.labels, counts, strict=True)]
        return "\n".join(lines)


def format_aligned_cells(cells: list[str], width: int) -> str:
    """A line of right-aligned cells after a left-aligned one."""
    return "  ".join([f"{cells[0]:<{width}}", *(f"{cell:>{width}}" for cell in cells[1:])])


class Predictor:
    """One fine-tuned model, or an ensemble of several of the same task."""

    def __init__(self, config: PredictorConfig) -> None:
        self.folders = ensemble_model_folders(config.model) if config.ensemble else [best_model_folder(config.model)]
        loaded = [load_finetuned_model(folder) for folder in self.folders]
        self.device = choose_device(config.device)
        self.precision = choose_dtype(config.precision, self.device)
        self.models: Sequence[Callable[..., Tensor]] = [model.to(self.device) for model, _ in loaded]
        _, first = loaded[0]
        self.task = task_of_ensemble([stored for _, stored in loaded])
        if config.ensemble and self.task.head == "joint":
            raise ConfigError("--ensemble averages logits, which the joint head does not have; use --head simple")
        self.length = config.length or first.length
        first.encoder.check_length(self.length)
        warn_untrained_length(self.folders[0], self.length)
        self.batch_size = config.batch_size or default_batch_size(self.device)
        self.pad_id = first.encoder.pad_id
        self.tokenizer = load_model_tokenizer(self.folders[0], first.encoder.vocab_size)
        self.max_tokens: int | None = None  # of a batch, instead of `batch_size`
        self.rows = self.truncated = 0  # so far

    @property
    def kind(self) -> Kind:
        return KINDS[self.task.kind]

    def stream_outputs(self, path: Path, with_labels: bool) -> Iterator[Outputs]:
        """The logits of the examples of a file after the first `self.rows`, in chunks."""
        with show_row_count(self.rows) as show:
            for examples in stream_examples(
                self.task, path, CHUNK_SIZE, self.device.type, with_labels=with_labels, skip_rows=self.rows
            ):
                outputs = self.compute_outputs(examples)
                show(self.rows)
                yield outputs

    def settings(self, path: Path) -> dict[str, Any]:
        """All that predictions for the rows of a file depend on."""
        checksums = {file: checksum for folder in self.folders for file, checksum in weight_checksums(folder).items()}
        settings = {"length": self.length, "precision": str(self.precision)}
        return {"model": checksums, "input": str(path), "content": content_checksum(path)} | settings

    def predict(self, texts: str | Sequence[Any], texts_b: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The prediction for each text, pair of texts or row (a dictionary by column), with probabilities."""
        task = self.task
        texts = [texts] if isinstance(texts, str) else list(texts)
        if texts and all(isinstance(text, dict) for text in texts) and texts_b is None:
            values = texts
        elif (task.choices or self.kind.prediction_files is not None) and texts:
            raise ConfigError(f"task {task.name} ({task.kind}) needs each row as a dictionary by column")
        elif (task.text_b is None) != (texts_b is None) or len(texts) != len(texts if texts_b is None else texts_b):
            raise ConfigError(f"task {task.name} needs {'one text' if task.text_b is None else 'two texts'} per row")
        else:
            columns = [texts] if texts_b is None else [texts, texts_b]
            values = [dict(zip((task.text, task.text_b), row, strict=False)) for row in zip(*columns, strict=True)]
        return [prediction for prediction, _ in self.predict_rows(values)]

    def predict_rows(self, values: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
        """The prediction for each row, and whether its text was truncated."""
        rows = [Row(number, row) for number, row in enumerate(values, start=1)]
        if not rows:
            return []
        examples = replace(parse_examples(self.task, "texts", rows, has_labels=False), rows=rows)
        outputs = self.compute_outputs(examples)
        assert outputs.features is not None
        is_truncated = outputs.features.is_truncated.tolist()
        return list(zip(self.kind.columns(self.task, outputs), is_truncated, strict=True))

    def compute_outputs(self, examples: Examples) -> Outputs:
        """The logits of examples, averaged over the models."""
        features = self.kind.make_features(replace(examples, labels=None), self.tokenizer, self.length)
        self.rows, self.truncated = self.rows + len(examples), self.truncated + int(features.is_truncated.sum())
        logits = compute_logits(
            self.mean_logits,
            features.to(self.device),
            self.batch_size,
            self.length,
            self.pad_id,
            self.precision,
            self.max_tokens,
        )
        check_finite(logits, self.folders[0])
        return Outputs(logits, features, examples)

    def mean_logits(self, *inputs: Tensor | None) -> Tensor:
        """The models' mean logits of a batch."""
        return torch.stack([model(*inputs).float() for model in self.models]).mean(0)


def is_finetuned(path: Path) -> bool:
    """Whether a folder is a fine-tuned model, the output of a fine-tuning, or one of its seeds."""
    return (path / RESULT).exists() or ((path / CONFIG).exists() and "task" in read_json(path / CONFIG))


def ensemble_model_folders(output: Path) -> list[Path]:
    """The models of all seeds; raises if there is only one."""
    models = seed_model_folders(output)
    if len(models) == 1:
        raise ConfigError(
            f"--ensemble needs several models, and {output} has one; fine-tune with --seeds 2 or more (electra glue "
            "keeps their models with --keep-models)"
        )
    return models


def predict(config: PredictConfig) -> PredictResult:
    """Write the rows of a file with their predictions; a stopped process continues, and the output appears when it is
    complete. Without a suffix, the output is a folder of prediction files, for kinds of tasks that have them."""
    path = config.predictor.input
    predictor = Predictor(config.predictor)
    if config.output.suffix or predictor.kind.prediction_files is None:
        check_output_file(config.output, path, predictor.kind.output_formats, config.overwrite)
        write_predictions(predictor, path, config.output, predictor.kind.columns, WRITERS[config.output.suffix])
    else:
        write_prediction_files(predictor, path, config.output, config.overwrite)
    return PredictResult(str(config.output), predictor.rows, predictor.truncated)


def write_predictions(
    predictor: Predictor,
    path: Path,
    file: Path,
    make_columns: Callable[[Task, Outputs], Iterator[dict[str, Any]]],
    writer_class: type[RowWriter],
) -> None:
    """Write the rows of the file `path` with the columns of their predictions."""
    with open_resumable(file, predictor.settings(path)) as output:
        predictor.rows, predictor.truncated = output.state.get("rows", 0), output.state.get("truncated", 0)
        content = io.StringIO(newline="")
        writer = writer_class(content, output.state.get("header", []), predictor.task)
        for outputs in predictor.stream_outputs(path, with_labels=False):
            predictions = make_columns(predictor.task, outputs)
            for row, prediction in zip(outputs.examples.rows, predictions, strict=True):
                with add_line_to_errors(str(path), row.line):
                    writer.write_row(add_columns(row.values, prediction))
            output.file.write(content.getvalue().encode("utf-8", "replace"))
            content.seek(0)
            content.truncate()
            output.save_part({"rows": predictor.rows, "truncated": predictor.truncated, "header": writer.header})


def write_prediction_files(predictor: Predictor, path: Path, folder: Path, overwrite: bool) -> None:
    """Write a folder of JSON files, each with a value for the id of every row; without ids, its number."""
    make_files = predictor.kind.prediction_files
    assert make_files is not None
    rows = folder.absolute().with_name(f".{folder.name}.rows{PARTIAL}")
    check_output_folder(folder, rows, overwrite)

    def columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
        return ({FILES: files} for files in make_files(task, outputs))

    try:
        write_predictions(predictor, path, rows, columns, JsonWriter)
        is_new = is_missing_or_empty(folder)
        with create_folder_atomically(folder) if is_new else nullcontext(folder) as target:
            write_files_by_id(rows, target, path)
    finally:
        rows.unlink(missing_ok=True)


def check_output_folder(folder: Path, rows: Path, overwrite: bool) -> None:
    """Raise a ConfigError if a folder cannot be written or, unasked, would get other files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"is {folder}, a file; name a folder or a file that ends in .jsonl or .csv", field="output")
    if not rows.parent.is_dir():
        raise ConfigError(f"is {folder}, but there is no folder {folder.parent}", field="output")
    if not is_missing_or_empty(folder) and not overwrite:
        with lock_file(rows):  # of a process that was killed after it completed the folder
            remove_partial_output(rows)
            rows.unlink(missing_ok=True)
        raise ConfigError(f"is {folder}, which exists; choose another name, or add --overwrite", field="output")


def write_files_by_id(rows: Path, folder: Path, path: Path) -> None:
    """Write the JSON files of predictions in the lines of `rows`, which are those of the file `path`."""
    with rows.open(encoding="utf-8") as lines:
        names = list(json.loads(lines.readline())[FILES])
    for name in names:
        ids: set[str] = set()
        with rows.open(encoding="utf-8") as lines, open_atomic(folder / f"{name}.json", encoding="utf-8") as file:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                row_id = str(number if row.get("id") is None else row["id"])
                if row_id in ids:
                    raise DataError(f"{path}: the id {row_id!r} occurs twice; every row needs another one")
                ids.add(row_id)
                value = json.dumps(row[FILES][name], ensure_ascii=False)
                file.write(f"{'{' if number == 1 else ','}\n{json.dumps(row_id, ensure_ascii=False)}: {value}")
            file.write("\n}\n")


def add_columns(row: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """A row with further columns; raises if it already has one of them."""
    existing = [name for name in columns if name in row]
    if existing:
        raise DataError(f"the file already has a column {existing[0]!r}, which predictions need; rename it")
    return row | columns


class JsonWriter:
    """Write rows as lines of JSON."""

    def __init__(self, file: TextIO, header: list[str], task: Task) -> None:
        self.file, self.header = file, header

    def write_row(self, row: dict[str, Any]) -> None:
        try:
            line = json.dumps(row, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            line = json.dumps(replace_nonfinite(row), ensure_ascii=False, default=str)
        print(line, file=self.file)


class CsvWriter:
    """Write rows of a table; the header, unless given, comes from the first row. Lists of texts and numbers are joined
    into one cell, objects and other lists are written as JSON."""

    dialect: ClassVar[dict[str, Any]] = {"quoting": csv.QUOTE_ALL}

    def __init__(self, file: TextIO, header: list[str], task: Task) -> None:
        self.writer = csv.writer(file, lineterminator="\n", **self.dialect)
        self.header = header

    def write_row(self, row: dict[str, Any]) -> None:
        if not self.header:
            self.header = list(row)
            self.write_cells(self.header)
        unknown = [name for name in row if name not in self.header]
        if unknown:
            raise DataError(f"column {unknown[0]!r} is missing from the first row and the header; write .jsonl instead")
        self.write_cells([row.get(name) for name in self.header])

    def write_cells(self, cells: list[Any]) -> None:
        try:
            self.writer.writerow(map(format_cell, cells))
        except csv.Error:  # only in .tsv, which has no quoting
            raise DataError(
                "a value contains a tab or line end, which .tsv cannot hold; write .csv or .jsonl"
            ) from None


def format_cell(cell: Any) -> Any:
    """A cell of a table."""
    if isinstance(cell, list) and all(isinstance(item, str | int | float) for item in cell):
        return LABEL_SEPARATOR.join(map(str, cell))
    return json.dumps(cell, ensure_ascii=False, default=str) if isinstance(cell, list | dict) else cell


class TsvWriter(CsvWriter):
    dialect: ClassVar[dict[str, Any]] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}


RowWriter = JsonWriter | CsvWriter | ConllWriter
WRITERS: dict[str, type[RowWriter]] = {
    ".jsonl": JsonWriter,
    ".csv": CsvWriter,
    ".tsv": TsvWriter,
    ".conll": ConllWriter,
}


def evaluate(config: EvaluateConfig) -> EvaluateResult:
    """Compute the task's metrics on a file with labels."""
    return evaluate_predictor(Predictor(config.predictor), config.predictor.input)


def evaluate_predictor(predictor: Predictor, path: Path) -> EvaluateResult:
    task = predictor.task
    labels, predictions = [], []
    unknown, total = Counter[str](), 0
    for outputs in predictor.stream_outputs(path, with_labels=True):
        if outputs.examples.labels is None:
            raise DataError(
                f"{path} has no label column {task.label!r}; evaluation needs labels, electra predict does not"
            )
        labels.append(outputs.examples.labels)
        predictions.append(predictor.kind.predict(outputs, task))
        in_chunk, count = count_unknown_labels(task, str(path), outputs.examples.rows)
        unknown, total = unknown + in_chunk, total + count
    report_unknown_labels(str(path), unknown, total)
    truth, predicted, class_ids = np.concatenate(labels), np.concatenate(predictions), predictor.kind.class_ids
    return EvaluateResult(
        models=[str(folder) for folder in predictor.folders],
        task=task.name,
        input=str(path),
        rows=predictor.rows,
        truncated=predictor.truncated,
        metrics=predictor.kind.compute_metrics(predicted, truth, task),
        labels=list(task.labels),
        confusion_matrix=[]
        if class_ids is None
        else confusion_matrix(class_ids(predicted), class_ids(truth), len(task.labels)).tolist(),
        classes=predictor.kind.class_scores(predicted, truth, task),
    )
