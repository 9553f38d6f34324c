"""Corpus: every format gives the same documents, in bounded memory, and bad files are named."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from electra.data import corpus
from electra.data.corpus import Corpus, CorpusConfig, Counts, is_validation
from electra.data.files import say_skipped
from electra.errors import ConfigError, DataError

DOCUMENTS = ["One fish.\nTwo fish.", "Käse – 干酪", "red"]
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def read(source, counts=None, **settings) -> list[str]:
    found = Corpus(CorpusConfig(corpus=str(source), **settings)).documents(counts or Counts())
    return [document.decode().strip() for document in found]


def as_parquet(documents) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(documents)), "text": documents}), sink)
    return sink.getvalue().to_pybytes()


CONTENT = {
    ".txt": "\n\n".join(DOCUMENTS).encode(),
    ".jsonl": "\n".join(json.dumps({"text": document}) for document in DOCUMENTS).encode(),
    ".parquet": as_parquet(DOCUMENTS),
}


@pytest.mark.parametrize("compression", ["", *PACKED])
@pytest.mark.parametrize("format", CONTENT)
def test_every_format_and_compression_gives_the_same_documents(tmp_path, format, compression):
    file = tmp_path / f"a{format}{compression}"
    file.write_bytes(PACKED.get(compression, bytes)(CONTENT[format]))
    assert read(file) == DOCUMENTS


def test_a_folder_is_read_in_the_order_of_names_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("third")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first\n\nsecond"))
    (tmp_path / "README.md").write_text("not text of the corpus")
    (tmp_path / ".hidden.txt").write_text("nor this")
    assert read(tmp_path) == ["first", "second", "third"]
    assert read(tmp_path / "*.gz") == ["first", "second"]


def test_files_of_a_folder_that_are_not_read_are_counted_by_the_ends_of_their_names(tmp_path, capsys):
    for name in ("a.txt", "b.txt.gz"):
        (tmp_path / name).touch()
    say_skipped(str(tmp_path))
    assert capsys.readouterr().err == ""
    for name in ("a.md", "b.md", "c.rst.gz", "LICENSE", ".hidden.md"):
        (tmp_path / name).touch()
    say_skipped(str(tmp_path))
    said = capsys.readouterr().err
    assert said.startswith(f"skipped in {tmp_path}: 2 .md, 1 ")
    assert all(part in said for part in ("1 .rst.gz", "1 without an ending", "end in .txt, .jsonl, .parquet"))
    say_skipped(f"{tmp_path}/*.txt")
    say_skipped("hub:name")
    assert capsys.readouterr().err == ""


def test_documents_end_at_blank_lines_or_at_lines(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n \t\nthree\n\n\n")
    assert read(file) == ["one\r\ntwo", "three"]
    assert read(file, document_end="line") == ["one", "two", "three"]


def test_hub_data_comes_as_a_stream(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(CONTENT[".jsonl"])
    assert read(f"hub:{tmp_path}") == DOCUMENTS
    with pytest.raises(DataError, match="no field 'body'; name one of text with --text-field"):
        read(f"hub:{tmp_path}", text_field="body")


def test_another_text_field_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "here"}\n{"body": null}\n')
    assert read(tmp_path, text_field="body") == ["here"]
    with pytest.raises(DataError, match=r"a.jsonl, line 1, has no field 'text'; name one of body"):
        read(tmp_path)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1), max_size=20))
def test_blocks_of_any_size_lose_nothing(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("corpus") / "a.txt"
    kept = [line for line in (line.removeprefix("\ufeff") for line in lines) if line.encode().strip()]
    file.write_text("\n\n".join(kept) + "\n", newline="\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", 7)
        found = list(Corpus(CorpusConfig(corpus=str(file))).blocks()) if kept else []
    assert b"".join(block.data for block in found).split() == file.read_bytes().split()
    assert all(block.data.endswith(b"\n") for block in found)


def test_an_overlong_document_is_cut_at_spaces_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 8)
    monkeypatch.setattr(corpus, "LONGEST", 16)
    (tmp_path / "a.txt").write_text("one two three four five six seven eight\n\nshort")
    counts = Counts()
    assert read(tmp_path, counts) == ["one two three", "four five six", "seven eight", "short"]
    assert counts.cut == 2


def test_an_overlong_document_of_a_table_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST", 16)
    (tmp_path / "a.parquet").write_bytes(as_parquet(["one two three four five", "short", None]))
    assert read(tmp_path) == ["one two three", "four five", "short"]


def test_an_overlong_run_of_letters_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 4)
    monkeypatch.setattr(corpus, "LONGEST", 8)
    (tmp_path / "a.txt").write_text("干酪干酪干")
    assert read(tmp_path, strict=True) == ["干酪", "干酪", "干"]


def test_invalid_utf8_is_replaced_and_counted_or_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\nbad \xff\xfe here\n")
    counts = Counts()
    assert read(tmp_path, counts) == ["fine", "bad \ufffd\ufffd here"]
    assert counts.replaced == 2
    with pytest.raises(DataError, match=r"a.txt, line 3: not valid UTF-8"):
        read(tmp_path, strict=True)


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_cut_file_is_named(tmp_path, compression, keep):
    packed = PACKED[compression](bytes(range(1, 256)) * 2000)
    (tmp_path / f"a.txt{compression}").write_bytes(packed[: int(len(packed) * keep)])
    with pytest.raises(DataError, match=f"a.txt{compression} is damaged or cut short"):
        read(tmp_path)


@pytest.mark.parametrize("compression", PACKED)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, compression):
    (tmp_path / f"a.txt{compression}").write_bytes(b"plain text")
    with pytest.raises(DataError, match=f"a.txt{compression} is damaged"):
        read(tmp_path)


def test_several_zstandard_frames_are_one_text(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one\n\n") + zstandard.compress(b"two"))
    assert read(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\nmore\x00binary", "a.txt, line 2: a NUL byte"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'["a"]', "a.jsonl, line 1: a list; each line must be an object"),
        ("a.jsonl", b'{"text": 5}', "a.jsonl, line 1: the text is a int; it must be a string"),
        ("a.parquet", b"PAR1 not really", "a.parquet is not a whole parquet file"),
        ("a.txt", b" \n\n \n", "there is no text in"),
        ("a.dat", b"text", "no text in .*; a corpus is a file, folder or glob of .txt, .jsonl, .parquet"),
    ],
)
def test_bad_input_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_what_is_not_there_is_told_from_what_holds_no_text(tmp_path):
    with pytest.raises(DataError, match=r"there is no .*gone; a corpus is a file, folder or glob"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match=r"no text in .*\*.txt; a corpus is"):
        read(tmp_path / "*.txt")
    with pytest.raises(ConfigError, match=r"hub: names no dataset; write hub:NAME"):
        read("hub:")


def test_a_folder_that_cannot_be_looked_into_is_refused(tmp_path, monkeypatch):
    for name in ("a.txt", "within/b.txt", ".hidden/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert read(tmp_path) == ["text of a.txt", "text of within/b.txt"]
    look = os.scandir

    def look_but_within(folder):
        if Path(folder).name == "within":
            raise PermissionError(13, "Permission denied", str(folder))
        return look(folder)

    monkeypatch.setattr(os, "scandir", look_but_within)
    with pytest.raises(DataError, match=r"cannot look into .*within: Permission denied"):
        read(tmp_path)


def test_a_named_file_must_say_what_it_is(tmp_path):
    (tmp_path / "a.dat").write_text("text")
    with pytest.raises(ConfigError, match=r"cannot tell what is in .*a.dat from its name"):
        read(tmp_path / "a.dat")


def test_a_missing_library_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    with pytest.raises(ConfigError, match=r"reading .zst needs another library: pip install zstandard$"):
        read(tmp_path)


def test_held_out_documents_are_chosen_by_their_text_alone():
    documents = [f"document {number}".encode() for number in range(10_000)]
    held_out = [document for document in documents if is_validation(document, 0.01)]
    assert 70 < len(held_out) < 130
    assert all(is_validation(b"  " + document + b"\n", 0.01) for document in held_out)
    assert all(is_validation(document, 0.02) for document in held_out)
    assert not any(is_validation(document, 0) for document in documents)
