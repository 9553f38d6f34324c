"""Tables: files of rows with named columns, read one row at a time, so that a file may have any length.

.csv has a header and may quote fields, which may then span lines; the header tells whether commas, semicolons or tabs
stand between them. .tsv has no quoting, as in GLUE's files: a quotation
mark is a character. In .jsonl each line is an object. Row numbers stand for line numbers in .parquet and hub data.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from electra.data.corpus import MAX_DOCUMENT_BYTES
from electra.data.files import TextFile, import_optional, open_file, open_parquet, require_format
from electra.errors import ConfigError, DataError

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
SEPARATORS = (",", ";", "\t")  # of a .csv; spreadsheets write the second where a comma is the decimal sign
MARK = "\ufeff"  # some programs begin UTF-8 files with it


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    line: int  # where it begins in its file, from 1
    values: dict[str, Any]  # by column; text in .csv and .tsv, anything of JSON's elsewhere


def read_rows(path: Path, *, columns: Sequence[str] = (), skips_broken: bool = False) -> Iterator[Row]:
    """The rows of a file; raises if there are none.

    `columns` name the fields of a .csv or .tsv without a header: one whose first line has as many fields as there are
    columns, and none of their names.
    `skips_broken` leaves out lines with the wrong number of fields.
    """
    file = require_format(path, FORMATS, "tables")
    has_rows = False
    with open_file(file) as (stream, disk):
        for row in rows_of(file, stream, disk, columns, skips_broken):
            has_rows = True
            yield row
    if not has_rows:
        raise DataError(f"there are no rows in {path}; it needs at least one, below the header if it is .csv or .tsv")


def rows_of(
    file: TextFile, stream: BinaryIO, disk: BinaryIO, columns: Sequence[str], skips_broken: bool
) -> Iterator[Row]:
    """The rows of an opened file."""
    name = str(file.path)
    match file.format:
        case ".parquet":
            return parquet_rows(file, stream, disk)
        case ".jsonl":
            return json_rows(name, text_lines(name, stream))
        case ".csv":
            return table_rows(name, csv_records(name, text_lines(name, stream)), columns, skips_broken)
        case _:
            return table_rows(name, tsv_records(text_lines(name, stream)), columns, skips_broken)


def text_lines(name: str, stream: BinaryIO) -> Iterator[str]:
    """The lines of a text, with their ends; only line feeds end lines, whatever else Unicode has for it."""
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            came = f"byte 0x{line[error.start]:02x}"
            raise DataError(f"{name}, line {number}: {came} is not UTF-8; convert the file, as with iconv") from None
        yield text.removeprefix(MARK) if number == 1 else text


def csv_records(name: str, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The fields of each record of a .csv, and the line it begins on."""
    csv.field_size_limit(
        MAX_DOCUMENT_BYTES
    )  # the library's own is 128 kB, which one unclosed quotation mark soon reaches
    line = 1
    try:
        blank, header = first_line(lines)
        reader = csv.reader(chain(blank, [header], lines), delimiter=separator_of(header), strict=True)
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        advice = (
            "a field with the separator, a line end or quotation mark stands in quotation marks, and those in it twice"
        )
        raise DataError(f"{name}, line {line}: {error}; {advice}") from None


def first_line(lines: Iterator[str]) -> tuple[list[str], str]:
    """The first line that is not blank, and the blank ones before it."""
    blank: list[str] = []
    for line in lines:
        if line.strip():
            return blank, line
        blank.append(line)
    return blank, ""


def separator_of(header: str) -> str:
    """What stands between the fields of a .csv: the only one of the separators that divides its header, or a comma."""
    dividing = [separator for separator in SEPARATORS if len(next(csv.reader([header], delimiter=separator))) > 1]
    return dividing[0] if len(dividing) == 1 else SEPARATORS[0]


def tsv_records(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The fields of each line of a .tsv, and the line's number."""
    for number, line in enumerate(lines, start=1):
        if text := line.removesuffix("\n").removesuffix("\r"):
            yield number, text.split("\t")


def table_rows(
    name: str, records: Iterator[tuple[int, list[str]]], columns: Sequence[str], skips_broken: bool
) -> Iterator[Row]:
    """Rows of fields below a header, or below `columns` where there is none."""
    header: list[str] = []
    for line, fields in records:
        if not header:
            is_header = len(fields) != len(columns) or not set(columns).isdisjoint(fields)
            header = fields if is_header else list(columns)
            refuse_twins(name, header)
            if is_header:
                continue
        if len(fields) == len(header):
            yield Row(line, dict(zip(header, fields, strict=True)))
        elif not skips_broken:
            came = f"{len(fields)} fields, but there are {len(header)} columns ({', '.join(header)})"
            advice = (
                "a text with the separator or a line end in it needs quotation marks in .csv, and .tsv cannot hold it"
            )
            raise DataError(f"{name}, line {line}: {came}; {advice}")


def json_rows(name: str, lines: Iterator[str]) -> Iterator[Row]:
    """The objects of a .jsonl."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            told = getattr(error, "msg", error)  # without its own count of lines, which starts anew at each
            raise DataError(f"{name}, line {number}: not valid JSON ({told}); each line must be an object") from None
        if not isinstance(values, dict):
            raise DataError(f"{name}, line {number}: a {type(values).__name__}; each line must be an object")
        yield Row(number, values)


def parquet_rows(file: TextFile, stream: BinaryIO, disk: BinaryIO) -> Iterator[Row]:
    """The rows of a .parquet."""
    number = 0
    with open_parquet(file, stream, disk) as table:
        refuse_twins(str(file.path), table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield Row(number, values)


def hub_rows(source: str) -> Iterator[Row]:
    """The rows of `hub:NAME:CONFIG:SPLIT`, which stay in the library's cache for the next time."""
    datasets = import_optional("datasets", "reading from the hub")
    if source.count(":") < 3:
        raise ConfigError(f"{source} does not say which rows; name them as hub:NAME:CONFIG:SPLIT")
    name, config, split = source.removeprefix("hub:").rsplit(":", 2)
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"cannot read {source}: {' '.join(str(error).split())}") from None
    if not len(rows):
        raise DataError(f"there are no rows in {source}; choose another dataset")
    return (Row(number, values) for number, values in enumerate(rows, start=1))


def refuse_twins(name: str, columns: list[str]) -> None:
    """Raise if two columns have one name; nameless ones cannot be asked for and do no harm."""
    twins = sorted({column for column in columns if column and columns.count(column) > 1})
    if twins:
        raise DataError(f"{name} has several columns named {', '.join(twins)}; give each its own name")
