"""Readers of tabular files (.csv, .tsv, .jsonl, .parquet, Hugging Face hub) and of their label column.

Rows are streamed, so that a file may have any length. .tsv has no quoting, as in GLUE's files: a quotation mark is an
ordinary character. In .parquet and hub data, row numbers take the place of line numbers.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from electra.data.corpus import MAX_DOCUMENT_BYTES
from electra.data.files import (
    TextFile,
    format_and_compression,
    limit_expansion,
    open_parquet,
    open_streams,
    require_text_file,
)
from electra.errors import ConfigError, DataError, import_optional
from electra.formatting import join_first_names

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
DELIMITERS = (",", ";", "\t")  # of .csv; spreadsheets write semicolons where the comma is the decimal separator
BYTE_ORDER_MARK = "\ufeff"

# Beyond these limits a file is damaged or made to exhaust memory.
PARQUET_ROWS = 64  # in memory at a time
MAX_COLUMNS = 10_000
MAX_LABELS = 10_000
MAX_LABEL_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # where it starts in its file, from 1
    values: dict[str, Any]  # by column; strings in .csv and .tsv, any JSON value elsewhere


def read_rows(path: Path, *, columns: Sequence[str] = (), skip_malformed: bool = False) -> Iterator[Row]:
    """Stream the rows of a file; raises if it has none.

    `columns` names the fields of a .csv or .tsv file without a header: one whose first line has as many fields as
    there are columns, and none of their names. `skip_malformed` skips lines with a wrong number of fields.
    """
    file = require_text_file(path, FORMATS, "tables")
    name, is_empty = str(path), True
    with open_streams(file) as (decompressed, raw):
        if file.format == ".parquet":
            rows = parquet_rows(file, decompressed, raw)
        elif file.format == ".jsonl":
            rows = json_rows(name, decode_lines(path, decompressed))
        else:
            lines = decode_lines(path, decompressed)
            records = with_empty_texts(csv_records(name, lines) if file.format == ".csv" else tsv_records(lines))
            rows = table_rows(name, records, columns, skip_malformed)
        for row in rows:
            is_empty = False
            yield row
    if is_empty:
        raise DataError(f"no rows in {path}; it needs at least one, after the header in .csv and .tsv")


def decode_lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Lines of UTF-8 text with their line ends; only line feeds end a line."""
    lines = iter(partial(stream.readline, MAX_DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(limit_expansion(path, lines, len), start=1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise DataError(f"{path}, line {number} is longer than {MAX_DOCUMENT_BYTES >> 20} MB; remove or split it")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x}"
            raise DataError(f"{path}, line {number}: {byte} is not UTF-8; convert the file, e.g. with iconv") from None
        yield text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text


def csv_records(file_name: str, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The fields of each record of a .csv file, and the line it starts on."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # the default of 128 kB is soon exceeded by one unclosed quotation mark
    start, header = next(((number, text) for number, text in enumerate(lines, start=1) if text.strip()), (1, ""))
    line = start
    try:
        reader = csv.reader(chain([header], lines), delimiter=detect_delimiter(header), strict=True)
        for fields in reader:
            yield line, fields
            line = start + reader.line_num
    except csv.Error as error:
        advice = "quote fields that contain the delimiter, a line end or a quotation mark, and double quotation marks"
        raise DataError(f"{file_name}, line {line}: {error}; {advice}") from None


def detect_delimiter(header: str) -> str:
    """The only delimiter that splits the header of a .csv file, otherwise a comma."""
    splitting = [delimiter for delimiter in DELIMITERS if len(next(csv.reader([header], delimiter=delimiter))) > 1]
    return splitting[0] if len(splitting) == 1 else DELIMITERS[0]


def tsv_records(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The fields of each line of a .tsv file, and the line number."""
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix("\n").removesuffix("\r")
        yield number, text.split("\t") if text else []


def with_empty_texts(records: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    """The records of a table without blank lines, but for those between rows of a single column: empty texts."""
    width, blank = 0, []
    for line, fields in records:
        if not fields:
            blank.append(line)
            continue
        yield from ((number, [""]) for number in blank if width == 1)
        width, blank = width or len(fields), []
        yield line, fields


def table_rows(
    file_name: str, records: Iterator[tuple[int, list[str]]], columns: Sequence[str], skip_malformed: bool
) -> Iterator[Row]:
    """Rows of records below a header, or under `columns` if there is no header."""
    header: list[str] = []
    for line, fields in records:
        if not header:
            has_header = len(fields) != len(columns) or not set(columns).isdisjoint(fields)
            header = fields if has_header else list(columns)
            if header.count("") > 1:  # spreadsheets write empty columns
                header = [name or f"column {number}" for number, name in enumerate(header, start=1)]
            check_columns(file_name, header)
            if has_header:
                continue
        if len(fields) == len(header):
            yield Row(line, dict(zip(header, fields, strict=True)))
        elif not skip_malformed:
            raise DataError(
                f"{file_name}, line {line}: {len(fields):,} fields, but there are {len(header)} columns "
                f"({join_first_names(header, 20)}); in .csv, quote texts that contain the delimiter or a line end; "
                ".tsv cannot hold them"
            )


def json_rows(file_name: str, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without the library's line number, which is always 1
            raise DataError(
                f"{file_name}, line {number}: invalid JSON ({reason}); each line must be an object"
            ) from None
        if not isinstance(values, dict):
            raise DataError(f"{file_name}, line {number}: a {type(values).__name__}; each line must be an object")
        yield Row(number, values)


def parquet_rows(file: TextFile, decompressed: BinaryIO, raw: BinaryIO) -> Iterator[Row]:
    with open_parquet(file, decompressed, raw) as table:
        check_columns(str(file.path), table.schema_arrow.names)
        batches = limit_expansion(file.path, table.iter_batches(PARQUET_ROWS), lambda batch: batch.nbytes)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from (Row(number, values) for number, values in enumerate(rows, start=1))


def hub_rows(source: str) -> Iterator[Row]:
    """The rows of `hub:NAME:CONFIG:SPLIT`, cached by the datasets library."""
    datasets = import_optional("datasets", "reading from the hub")
    if source.count(":") < 3:
        raise ConfigError(f"{source} does not name a split; write hub:NAME:CONFIG:SPLIT")
    name, config, split = source.removeprefix("hub:").rsplit(":", 2)
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"cannot read {source}: {' '.join(str(error).split())}") from None
    if not len(rows):
        raise DataError(f"no rows in {source}; choose another dataset")
    return (Row(number, values) for number, values in enumerate(rows, start=1))


def check_columns(file_name: str, columns: list[str]) -> None:
    """Raise if there are too many columns or two of them share a name."""
    if len(columns) > MAX_COLUMNS:
        raise DataError(f"{file_name} has {len(columns):,} columns; at most {MAX_COLUMNS:,} are read")
    duplicates = sorted(repr(column) for column, count in Counter(columns).items() if count > 1)
    if duplicates:
        raise DataError(f"{file_name} has several columns named {join_first_names(duplicates)}; give each another name")


# Labels: how each kind of task reads its label column.

TaskKind = Literal["classification", "multi-label", "regression", "choice", "tags", "question-answering"]
KINDS_BY_SUFFIX: dict[str, TaskKind] = {".conll": "tags", ".conllu": "tags", ".json": "question-answering"}
SpanHead = Literal["simple", "joint"]
TagScheme = Literal["IOB1", "IOB2", "BIOES"]
ChoiceLabel = Literal["text", "index", "letter", "small letter", "number"]
"""How the label of a multiple-choice row names the right choice; an index counts from 0, a number from 1."""

LABEL_SEPARATOR = "|"  # between the labels of a multi-label cell that is a string
MAX_CLASSES = 20  # integers with more distinct values are scores, unless the user sets the kind
MISSING_NAMES = ("nan", "n/a", "na", "null")  # what spreadsheets and data frames write for a missing label
MAX_SCORE = float(np.finfo(np.float32).max)


def kind_of_file(path: Path) -> TaskKind | None:
    """The kind of task of a file that can be of one kind only, as its name tells."""
    return KINDS_BY_SUFFIX.get(format_and_compression(path)[0])


def check_columns_of_texts(source: str, values: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the first row of a table is one of choices, answers or tags, of which texts and labels
    would be learnt in a wrong way; called unless the kind is set."""
    columns: dict[TaskKind, tuple[str, ...]] = {
        "choice": ("choices",),
        "question-answering": ("answers",),
        "tags": ("tags", "words" if "words" in values else "tokens"),
    }
    for kind, names in columns.items():
        if all(isinstance(values.get(name), list | dict) for name in names):
            message = f"{source} has lists in {' and '.join(map(repr, names))}, as tasks of kind {kind} have"
            raise ConfigError(f"{message}: add --kind {kind}, or the kind that is meant")


def parse_class(cell: Any) -> str:
    if isinstance(cell, list):
        raise DataError("the label is a list; a row has one class, unless the kind of task is multi-label")
    name = class_name_from_cell(cell)
    if not name:
        raise DataError("the label is empty; every row for training or evaluation needs one")
    return name


def parse_classes(cell: Any) -> tuple[str, ...]:
    """The class names in a cell, a list or a string with separators; may be empty."""
    if cell is None or cell != cell:
        raise DataError("the label is missing; a row without any class has an empty list")
    cells = cell.split(LABEL_SEPARATOR) if isinstance(cell, str) else cell if isinstance(cell, list) else [cell]
    names = tuple(name for name in map(class_name_from_cell, cells) if name)
    advice = "a row lists the names of its classes, not a number for each class"
    if numbers := [cell for cell in cells if isinstance(cell, bool) or (isinstance(cell, float) and cell % 1 > 0)]:
        raise DataError(f"the label lists {numbers[0]!r}; {advice}")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"the label lists {repeated[0]!r} twice; {advice if repeated[0] in ('0', '1') else 'leave one out'}"
        )
    return names


def class_name_from_cell(cell: Any) -> str:
    """A cell as a class name; integers stored as floats lose their decimal point, NaN becomes empty."""
    if cell is None or cell != cell:
        return ""
    name = str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()
    if len(name) > MAX_LABEL_CHARACTERS:
        raise DataError(f"the label has {len(name):,} characters; at most {MAX_LABEL_CHARACTERS:,} are allowed")
    return name


def parse_score(cell: Any) -> float:
    score = parse_number(cell)
    if score is None or not abs(score) <= MAX_SCORE:  # comparisons with NaN are False
        raise DataError(f"the score is {cell!r}; it must be a finite number")
    return score


def parse_number(cell: Any) -> float | None:
    """The number in a cell, or None if it holds something else; 2020_01 is a number in Python only."""
    try:
        return None if isinstance(cell, bool) or "_" in str(cell) else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def encode_class(name: str, class_ids: Mapping[str, int]) -> int:
    if name not in class_ids:
        known = ", ".join(list(class_ids)[:MAX_CLASSES]) + (", …" if len(class_ids) > MAX_CLASSES else "")
        raise DataError(f"unknown label {name!r}; the labels of the training rows are {known}")
    return class_ids[name]


def encode_classes(names: tuple[str, ...], class_ids: Mapping[str, int]) -> NDArray:
    """A multi-hot vector of the classes of a row."""
    multi_hot = np.zeros(len(class_ids), np.float32)
    multi_hot[[encode_class(name, class_ids) for name in names]] = 1
    return multi_hot


def task_fields_from_classes(names: list[str]) -> dict[str, Any]:
    labels = sort_labels(set(names))
    if len(labels) < 2:
        raise DataError(f"every label is {labels[0]!r}; there must be at least two classes")
    if len(labels) > MAX_CLASSES and len(labels) > len(names) / 2:
        raise DataError(
            f"{len(labels):,} different labels in {len(names):,} rows, e.g. {labels[0]!r} and {labels[1]!r}; a class "
            f"must have several rows, and scores must be numbers with a decimal point"
        )
    return {
        "labels": labels,
        "metrics": ("accuracy", "f1", "matthews") if len(labels) == 2 else ("accuracy", "macro_f1"),
    }


def task_fields_from_multi_labels(rows: list[tuple[str, ...]]) -> dict[str, Any]:
    labels = sort_labels({name for names in rows for name in names})
    if not labels:
        raise DataError("no row has a label; there must be at least one")
    if len(labels) > 1 and all(len(names) == len(labels) for names in rows):
        listed = join_first_names([repr(name) for name in labels])
        raise DataError(f"every row has all classes: {listed}; a row lists the names of its classes only")
    return {"labels": labels, "metrics": ("micro_f1", "exact_match")}


def task_fields_from_scores(scores: list[float]) -> dict[str, Any]:
    """Metrics of a regression task, and the mean and standard deviation that its targets are normalised by."""
    if min(scores) == max(scores):
        raise DataError(f"every score is {scores[0]:g}; there must be at least two different ones")
    return {
        "metrics": ("pearson", "spearman", "mae", "rmse"),
        "offset": float(np.mean(scores)),
        "scale": float(np.std(scores)),
    }


def sort_labels(names: set[str]) -> tuple[str, ...]:
    """Class names in numerical order if all are numbers, otherwise in alphabetical order."""
    if len(names) > MAX_LABELS:
        raise DataError(f"{len(names):,} different labels; at most {MAX_LABELS:,} are allowed")
    numbers = {name: parse_number(name) for name in names}
    if any(number is None or math.isnan(number) for number in numbers.values()):
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: (numbers[name], name)))


def multi_label_warnings(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """What is probably not intended in the lists of classes of all training rows."""
    counts = Counter(chain.from_iterable(rows))
    if constant := [repr(name) for name, count in counts.items() if count == len(rows)]:
        yield f"every row has {join_first_names(constant)}; a label lists the names of a row's classes only"
    if joined := [repr(name) for name in counts if LABEL_SEPARATOR in name]:
        yield (
            f"classes contain {LABEL_SEPARATOR}, which separates classes in tables: {join_first_names(joined)}; write "
            "predictions to .jsonl"
        )
    yield from unusual_class_warnings(counts)


def class_warnings(names: list[str]) -> Iterator[str]:
    """What is probably not intended in the classes of all training rows."""
    counts = Counter(names)
    if joined := [repr(name) for name in counts if LABEL_SEPARATOR in name]:
        yield f"classes contain {LABEL_SEPARATOR}: {join_first_names(joined)}; --kind multi-label separates them there"
    yield from unusual_class_warnings(counts)


def unusual_class_warnings(counts: Counter[str]) -> Iterator[str]:
    """Names of missing values, and classes of a single row."""
    if missing := [repr(name) for name in counts if name.lower() in MISSING_NAMES]:
        yield f"{join_first_names(missing)} is a class; if it stands for missing labels, remove these rows"
    if single := [repr(name) for name, count in counts.items() if count == 1]:
        yield f"classes of a single row, which cannot be both learnt and evaluated: {join_first_names(single)}"


def score_warnings(scores: list[float]) -> Iterator[str]:
    """What is probably not intended in the scores of all training rows."""
    if len(scores) > MAX_CLASSES and len(set(scores)) == len(scores) and all(map(float.is_integer, scores)):
        yield "every score is another integer, as in a column of ids; --label sets the column"


def infer_task_kind(cells: list[Any]) -> TaskKind:
    """The kind of task of a label column.

    Lists mean multi-label. Numbers are scores if some are not integers or more than `MAX_CLASSES` are distinct; up to
    one cell in ten may hold something else, which is then reported with its line instead of turning numbers into
    classes.
    """
    if any(isinstance(cell, list) for cell in cells):
        return "multi-label"
    numbers = {number for cell in cells if (number := parse_number(cell)) is not None and math.isfinite(number)}
    others = sum(parse_number(cell) is None for cell in cells)
    is_scores = len(numbers) > MAX_CLASSES or not all(number.is_integer() for number in numbers)
    return "regression" if is_scores and others <= len(cells) / 10 else "classification"
