"""Readers: every format gives the same rows with their line numbers; errors name file and line."""

import csv
import gzip
import io
import json
import lzma
from itertools import permutations

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corpus import COMPRESS, compress_zstd

from electra.data import files
from electra.errors import ConfigError, DataError
from electra.finetuning import readers
from electra.finetuning.readers import Row, read_rows, sort_labels

ROWS = [{"text": 'Käse, "干酪"', "label": "1"}, {"text": "", "label": "0"}]


def as_csv(rows) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def as_parquet(rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


CONTENT = {
    ".csv": as_csv(ROWS),
    ".tsv": 'text\tlabel\nKäse, "干酪"\t1\n\t0\n'.encode(),
    ".jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    ".parquet": as_parquet(ROWS),
}


@pytest.fixture
def rows_in(tmp_path):
    """Write a file and read its rows."""

    def read(name: str, content: bytes, **options) -> list[Row]:
        (tmp_path / name).write_bytes(content)
        return list(read_rows(tmp_path / name, **options))

    return read


@pytest.mark.parametrize("compression", ["", *COMPRESS])
@pytest.mark.parametrize("format", CONTENT)
def test_every_format_and_compression_gives_the_same_rows(rows_in, format, compression):
    rows = rows_in(f"a{format}{compression}", COMPRESS.get(compression, bytes)(CONTENT[format]))
    first = 2 if format in (".csv", ".tsv") else 1
    assert rows == [Row(first, ROWS[0]), Row(first + 1, ROWS[1])]


@pytest.mark.parametrize("format", [".csv", ".tsv", ".jsonl"])
def test_byte_order_marks_carriage_returns_and_blank_lines_are_ignored(rows_in, format):
    content = b"\xef\xbb\xbf" + CONTENT[format].replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") + b"\r\n\r\n"
    assert [row.values for row in rows_in(f"a{format}", content)] == ROWS


@pytest.mark.parametrize("format", [".csv", ".tsv"])
def test_blank_lines_between_the_rows_of_a_single_column_are_empty_texts(rows_in, format):
    rows = rows_in(f"a{format}", b"\ntext\none\n\ntwo\n\n")
    assert rows == [Row(3, {"text": "one"}), Row(4, {"text": ""}), Row(5, {"text": "two"})]


def test_the_order_of_classes_does_not_depend_on_the_process():
    names = ["10", "nan", "9", "1"]
    assert {sort_labels(dict.fromkeys(order)) for order in permutations(names)} == {("1", "10", "9", "nan")}
    assert sort_labels({"10", "9"}) == ("9", "10")


def test_quoted_csv_fields_may_span_lines(rows_in):
    rows = rows_in("a.csv", b'text,label\n"one\ntwo",1\n\nthree,0\n')
    assert rows == [Row(2, {"text": "one\ntwo", "label": "1"}), Row(5, {"text": "three", "label": "0"})]


@pytest.mark.parametrize(
    "content",
    [
        b"id;text;label\n1;so, so;2,5\n",
        b'id\ttext\tlabel\n1\tso, so\t"2,5"\n',
        b'"id";"text";"label"\n\n1;"so, so";2,5\n',
        b'\n\r\nid,text,label\n1,"so, so","2,5"\n',
    ],
)
def test_the_csv_delimiter_is_detected_from_the_header(rows_in, content):
    assert [row.values for row in rows_in("a.csv", content)] == [{"id": "1", "text": "so, so", "label": "2,5"}]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (b"id,text;label\n1,2\n", ["id", "text;label"]),
        (b'"text;label"\n1\n', ["text;label"]),
        (b'"a,b";c\n1;2\n', ["a,b", "c"]),
    ],
)
def test_the_csv_delimiter_is_a_comma_if_the_header_is_ambiguous(rows_in, content, columns):
    assert list(rows_in("a.csv", content)[0].values) == columns


def test_tsv_has_no_quoting_and_only_line_feeds_end_lines(rows_in):
    rows = rows_in("a.tsv", 'text\tlabel\n"open\t1\nnext\x85line\u2028\t0\n'.encode())
    assert [row.values["text"] for row in rows] == ['"open', "next\x85line\u2028"]


def test_fields_may_exceed_the_default_limit_of_the_csv_module(rows_in):
    assert len(rows_in("a.csv", b"text\n" + b"x" * 1_000_000)[0].values["text"]) == 1_000_000


def test_columns_apply_only_to_files_without_a_header(rows_in):
    columns = ("source", "label", "mark", "sentence")
    rows = rows_in("a.tsv", b"gj04\t1\t\tThey drank.\n", columns=columns)
    assert rows == [Row(1, {"source": "gj04", "label": "1", "mark": "", "sentence": "They drank."})]
    assert rows_in("b.tsv", b"index\tsentence\n0\tBill ran.\n", columns=columns)[0].values["sentence"] == "Bill ran."
    assert rows_in("c.tsv", b"sentence\tmark\tlabel\tx\nA.\t*\t0\t\n", columns=columns)[0].values["sentence"] == "A."


def test_malformed_lines_are_skipped_on_request(rows_in):
    rows = rows_in("a.tsv", b"a\tb\n1\n2\t3\n4\t5\t6\n", skip_malformed=True)
    assert rows == [Row(3, {"a": "2", "b": "3"})]


def test_no_cell_of_unnamed_columns_is_lost(rows_in):
    assert rows_in("a.csv", b",text\n0,one\n")[0].values == {"": "0", "text": "one"}  # the index of a data frame
    values = {"text": "one", "column 2": "a", "column 3": "b"}
    assert rows_in("a.csv", b"text,,\none,a,b\n")[0].values == values
    with pytest.raises(DataError, match=r"a.csv has several columns named 'column 2'"):
        rows_in("a.csv", b"column 2,,\n1,2,3\n")


def test_json_and_parquet_values_keep_their_types(rows_in):
    rows = [{"text": "a", "label": ["x", "y"], "score": 0.5, "none": None}]
    assert rows_in("a.jsonl", json.dumps(rows[0]).encode())[0].values == rows[0]
    assert rows_in("a.parquet", as_parquet(rows))[0].values == rows[0]


def test_rows_are_streamed(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\nfirst\n\xff\n")
    assert next(read_rows(tmp_path / "a.csv")).values == {"text": "first"}


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\r"))] * 2), min_size=1))
def test_any_csv_round_trips(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tables") / "a.csv"
    path.write_bytes(as_csv([dict(zip("ab", row, strict=True)) for row in rows]))
    assert [tuple(row.values.values()) for row in read_rows(path)] == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "no rows in .*a.csv"),
        ("a.jsonl", b"\n", "no rows in .*a.jsonl"),
        ("a.tsv", b"text\tlabel\n", "no rows in .*a.tsv"),
        ("a.parquet", as_parquet(ROWS)[:-9], "a.parquet is not a valid parquet file"),
        ("a.parquet", as_parquet(ROWS).replace("酪".encode(), b"??\xff"), "a.parquet is not a valid parquet file"),
        ("a.csv", b"text\nfine\ncaf\xe9\n", "a.csv, line 3: byte 0xe9 is not UTF-8"),
        ("a.tsv", "text\na".encode("utf-16"), "a.tsv, line 1: byte 0xff is not UTF-8"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a.csv, line 3: 3 fields, but there are 2 columns \(a, b\)"),
        ("a.tsv", b"a\tb\n1\n", r"a.tsv, line 2: 1 fields, but there are 2 columns \(a, b\)"),
        ("a.csv", b'a,b\n1,"2\n', "a.csv, line 2: unexpected end of data; quote fields"),
        ("a.csv", b'a,b\n1,"2"3\n', "a.csv, line 2: ',' expected after '\"'"),
        ("a.csv", b"a;b\n1;2\n1;2;3\n", r"a.csv, line 3: 3 fields, but there are 2 columns \(a, b\)"),
        ("a.csv", b"a\rb;c\n1;2\n", "a.csv, line 1: new-line character seen in unquoted field"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv has several columns named 'a';"),
        ("a.jsonl", b'{"a": 1}\n{"a"\n', "a.jsonl, line 2: invalid JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: invalid JSON"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1: a list; each line must be an object"),
        ("a.csv.gz", gzip.compress(b"a\n1\n", mtime=0)[:-4], "a.csv.gz is damaged or truncated"),
        ("a.csv", ",".join(map(str, range(10_001))).encode() + b"\n1", "a.csv has 10,001 columns; at most 10,000"),
        ("a.parquet", as_parquet([dict.fromkeys(map(str, range(10_001)), 1)]), "a.parquet has 10,001 columns"),
    ],
)
def test_errors_name_file_and_line(rows_in, name, content, message):
    with pytest.raises(DataError, match=message):
        rows_in(name, content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv.zst", compress_zstd(bytes(10_000)), "a.csv.zst, line 1 is longer than 0 MB"),
        ("a.jsonl.gz", gzip.compress(b'{"a": "b' + bytes(10_000), mtime=0), "a.jsonl.gz, line 1 is longer than 0 MB"),
        ("a.csv.xz", lzma.compress(b"a,b\n" * 30_000), "a.csv.xz expands to over 10 times its size"),
        ("a.parquet", as_parquet([{"a": "x" * 2_000}] * 1_000), "a.parquet expands to over 10 times its size"),
        ("b.parquet", as_parquet([{"a": "x" * 2_000_000}]), "b.parquet expands to over 10 times its size"),
    ],
)
def test_files_that_would_fill_memory_are_rejected(rows_in, monkeypatch, name, content, message):
    """Limits are lowered, so that small files exceed them."""
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1_000)
    monkeypatch.setattr(files, "MIN_EXPANDED_BYTES", 100_000)
    monkeypatch.setattr(files, "MAX_EXPANSION", 10)
    with pytest.raises(DataError, match=message):
        rows_in(name, content)


def test_unknown_extensions_are_rejected(rows_in):
    with pytest.raises(ConfigError, match=r"a\.xlsx.*\.csv, \.tsv, \.jsonl, \.parquet"):
        rows_in("a.xlsx", b"")
