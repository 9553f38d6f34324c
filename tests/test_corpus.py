"""Corpus: every format gives the same documents, in bounded memory; errors name the file and line."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra import cli
from electra.data import corpus, files
from electra.data.corpus import Corpus, CorpusConfig, ReadStats, hash_document
from electra.data.files import warn_skipped_files, warn_unchecked_zstd
from electra.errors import ConfigError, DataError

DOCUMENTS = ["One fish.\nTwo fish.", "Käse – 干酪", "red"]


def compress_zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": compress_zstd}


def read(source, stats=None, **settings) -> list[str]:
    documents = Corpus(CorpusConfig(corpus=str(source), **settings)).read_documents(stats or ReadStats())
    return [document.decode().strip() for document in documents]


def as_parquet(documents) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(documents)), "text": documents}), sink)
    return sink.getvalue().to_pybytes()


CONTENT = {
    ".txt": "\n\n".join(DOCUMENTS).encode(),
    ".jsonl": "\n".join(json.dumps({"text": document}) for document in DOCUMENTS).encode(),
    ".parquet": as_parquet(DOCUMENTS),
}


@pytest.mark.parametrize("compression", ["", *COMPRESS])
@pytest.mark.parametrize("format", CONTENT)
def test_every_format_and_compression_gives_the_same_documents(tmp_path, format, compression):
    file = tmp_path / f"a{format}{compression}"
    file.write_bytes(COMPRESS.get(compression, bytes)(CONTENT[format]))
    assert read(file) == DOCUMENTS


def test_a_folder_is_read_in_the_order_of_names_without_other_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("third")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first\n\nsecond"))
    (tmp_path / "README.md").write_text("not text of the corpus")
    (tmp_path / ".hidden.txt").write_text("nor this")
    assert read(tmp_path) == ["first", "second", "third"]
    assert read(tmp_path / "*.gz") == ["first", "second"]


def test_linked_folders_are_read_once(tmp_path):
    for name in ("elsewhere", "corpus/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(f"text of {name}")
    for name, target in {"link": "elsewhere", "again": "elsewhere", "b/loop": "corpus", "c": "corpus/b"}.items():
        (tmp_path / "corpus" / name).symlink_to(tmp_path / target)
    assert read(tmp_path / "corpus") == ["text of elsewhere", "text of corpus/b"]


def test_skipped_files_are_counted_by_suffix(tmp_path, capsys):
    for name in ("a.txt", "b.txt.gz"):
        (tmp_path / name).touch()
    warn_skipped_files(str(tmp_path))
    assert capsys.readouterr().err == ""
    for name in ("a.md", "b.md", "c.rst.gz", "LICENSE", ".hidden.md"):
        (tmp_path / name).touch()
    warn_skipped_files(str(tmp_path))
    warning = capsys.readouterr().err
    assert warning.startswith(f"skipped in {tmp_path}: 2 .md, 1 ")
    assert all(part in warning for part in ("1 .rst.gz", "1 without suffix", "end in .txt, .jsonl, .parquet"))
    warn_skipped_files(f"{tmp_path}/*.txt")
    warn_skipped_files("hub:name")
    assert capsys.readouterr().err == ""


def test_documents_end_at_blank_lines_or_at_lines(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n \t\nthree\n\n\n")
    assert read(file) == ["one\r\ntwo", "three"]
    assert read(file, document_end="line") == ["one", "two", "three"]


def test_hub_data_is_streamed(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(CONTENT[".jsonl"])
    assert read(f"hub:{tmp_path}") == DOCUMENTS
    with pytest.raises(DataError, match="no field 'body'; set --text-field to one of text"):
        read(f"hub:{tmp_path}", text_field="body")


def test_rows_without_text_are_counted(tmp_path):
    rows = [{"text": "one"}, {"text": None}, {"id": 5}, {"text": ""}, {"text": "two"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hub, jsonl, parquet = ReadStats(), ReadStats(), ReadStats()
    assert read(f"hub:{tmp_path}", hub) == ["one", "two"]
    assert hub.without_text == 2
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": None, **row}) for row in rows))
    assert read(tmp_path / "data.jsonl", jsonl) == ["one", "two"]
    (tmp_path / "a.parquet").write_bytes(as_parquet(["one", "", "two", None, None]))
    assert read(tmp_path / "a.parquet", parquet) == ["one", "two"]
    assert jsonl.without_text == parquet.without_text == 2


def test_rows_without_text_are_reported(tmp_path, capsys):
    (tmp_path / "a.parquet").write_bytes(as_parquet(["a b", None, None]))
    (tmp_path / "b.jsonl").write_text('{"text": null}')
    cli.main(["tokenizer", "--corpus", str(tmp_path), "--output", str(tmp_path / "vocab"), "--vocab-size", "20"])
    assert "; 3 rows without text skipped\n" in capsys.readouterr().out
    source = ["--corpus", str(tmp_path), "--tokenizer", str(tmp_path / "vocab"), "--output", str(tmp_path / "shards")]
    cli.main(["shard", *source, "--workers", "1"])
    assert "; 3 rows without text skipped\n" in capsys.readouterr().out
    cli.main(["inspect", str(tmp_path / "shards")])
    assert ", 3 rows without text\n" in capsys.readouterr().out


def test_the_text_field_can_be_set(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "here"}\n{"body": null}\n')
    assert read(tmp_path, text_field="body") == ["here"]
    with pytest.raises(DataError, match=r"a.jsonl, line 1, has no field 'text'; set --text-field to one of body"):
        read(tmp_path)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1), max_size=20))
def test_blocks_of_any_size_lose_nothing(lines):
    kept = [line for line in (line.removeprefix("\ufeff") for line in lines) if line.encode().strip()]
    text = "\n\n".join(kept).encode()
    with pytest.MonkeyPatch.context() as patch, NamedTemporaryFile(suffix=".txt") as file:
        patch.setattr(corpus, "BLOCK_BYTES", 7)
        Path(file.name).write_bytes(text + b"\n")
        blocks = list(Corpus(CorpusConfig(corpus=file.name)).read_blocks()) if kept else []
    assert b"".join(block.data for block in blocks).split() == text.split()
    assert all(block.data.endswith(b"\n") for block in blocks)


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_positions_in_parquet_files_are_by_rows(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1000)
    file = tmp_path / f"a.parquet{compression}"
    file.write_bytes(COMPRESS.get(compression, bytes)(as_parquet([f"document {number:05}" for number in range(2000)])))
    text = Corpus(CorpusConfig(corpus=str(file)))
    assert text.estimate_documents() == pytest.approx(2000, rel=0.01)
    *others, last = text.read_blocks()
    assert [block.position for block in others] == sorted({block.position for block in others})
    assert others[-1].position < last.position == file.stat().st_size


def test_an_overlong_document_is_cut_at_spaces_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 8)
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 16)
    (tmp_path / "a.txt").write_text("one two three four five six seven eight\n\nshort")
    stats = ReadStats()
    assert read(tmp_path, stats) == ["one two three", "four five six", "seven eight", "short"]
    assert stats.cut == 2


def test_an_overlong_document_of_a_parquet_file_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 16)
    (tmp_path / "a.parquet").write_bytes(as_parquet(["one two three four five six seven", "short", None]))
    stats = ReadStats()
    assert read(tmp_path, stats) == ["one two three", "four five six", "seven", "short"]
    assert stats.cut == 2


def test_an_overlong_document_of_a_jsonl_file_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 8)
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 16)
    rows = [{"text": "one two three four five six seven"}, {"text": "short", "source": "a long address"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stats = ReadStats()
    assert read(tmp_path, stats) == ["one two three", "four five six", "seven", "short"]
    assert stats.cut == 2
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 32)
    with pytest.raises(DataError, match=r"a.jsonl, line 1: longer than 0 MB; split"):
        read(tmp_path)


def test_an_overlong_run_of_letters_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4)
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 8)
    (tmp_path / "a.txt").write_text("干酪干酪干")
    assert read(tmp_path, strict=True) == ["干酪", "干酪", "干"]


def test_invalid_utf8_is_replaced_and_counted_or_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\nbad \xff\xfe in words here\n")
    stats = ReadStats()
    assert read(tmp_path, stats) == ["fine", "bad \ufffd\ufffd in words here"]
    assert stats.replaced == 2
    with pytest.raises(DataError, match=r"a.txt, line 3: not valid UTF-8"):
        read(tmp_path, strict=True)


@pytest.mark.parametrize(
    ("encoding", "text", "word"),
    [
        ("windows-1252", "Die Bäume sind schön und grün.", "Bäume"),
        ("windows-1252", "“It’s the café,” she said – twice.", "café"),
        ("windows-1252", "L'été, le garçon était à l'école où il rêvait.", "été"),
        ("windows-1250", "Książka leży na stole, a król śpi w łóżku.", "Książka"),
        ("windows-1251", "Мама мыла раму, а Саша читал книгу.", "Мама"),
        ("koi8-r", "Мама мыла раму, а Саша читал книгу.", "Мама"),
        ("utf-16", "Die Bäume sind schön und grün.", ""),
        ("utf-16-le", "The trees are green.", ""),
        ("utf-16-be", "The trees are green.", ""),
    ],
)
def test_text_in_another_encoding_is_refused_with_its_name_and_read_with_it(tmp_path, encoding, text, word):
    (tmp_path / "a.txt").write_bytes(f"{text}\n\nfine\n".encode(encoding))
    with pytest.raises(DataError, match=rf"a.txt, line 1: .*{word}.*--encoding {encoding}\b"):
        read(tmp_path)
    assert read(tmp_path, encoding=encoding) == [text, "fine"]


def test_text_in_an_unknown_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("チーズは食品です".encode("shift_jis"))
    with pytest.raises(DataError, match="not valid UTF-8; give --encoding NAME"):
        read(tmp_path)
    assert read(tmp_path, encoding="shift_jis") == ["チーズは食品です"]


def test_invalid_utf8_may_be_replaced_whatever_it_looks_like(tmp_path):
    (tmp_path / "a.txt").write_bytes("schön".encode("latin-1"))
    assert read(tmp_path, encoding="utf-8") == ["sch\ufffdn"]
    (tmp_path / "a.txt").write_bytes("schöne Straße, ".encode() + "schön".encode("latin-1"))
    assert read(tmp_path) == ["schöne Straße, sch\ufffdn"]


def test_characters_at_the_end_of_a_chunk_are_decoded_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 5)
    (tmp_path / "a.txt").write_bytes("干酪 😀 干酪\n\n酪".encode("utf-16"))
    assert read(tmp_path, encoding="utf-16") == ["干酪 😀 干酪", "酪"]


def test_a_wrong_or_unknown_encoding_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"a.txt is not text in ascii"):
        read(tmp_path, encoding="ascii")
    with pytest.raises(ConfigError, match="encoding is 'latin-99', which Python does not know"):
        read(tmp_path, encoding="latin-99")


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_truncated_file_is_named(tmp_path, compression, keep):
    compressed = COMPRESS[compression](bytes(range(1, 256)) * 2000)
    (tmp_path / f"a.txt{compression}").write_bytes(compressed[: int(len(compressed) * keep)])
    with pytest.raises(DataError, match=f"a.txt{compression} is damaged or truncated"):
        read(tmp_path)


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_that_is_not_compressed_as_its_suffix_says_is_named(tmp_path, compression):
    (tmp_path / f"a.txt{compression}").write_bytes(b"plain text")
    with pytest.raises(DataError, match=f"a.txt{compression} is damaged"):
        read(tmp_path)


def test_a_zstandard_file_without_checksum_is_mentioned_once(tmp_path, capsys):
    warn_unchecked_zstd.cache_clear()
    (tmp_path / "checked.txt.zst").write_bytes(bytes.fromhex("28b52ffd24042100007465787452afcc88"))
    (tmp_path / "a.txt.zst").write_bytes(compress_zstd(b"one"))
    (tmp_path / "b.txt.zst").write_bytes(compress_zstd(b"two"))
    assert read(tmp_path / "checked.txt.zst") == ["text"]
    assert capsys.readouterr().err == ""
    assert read(tmp_path) == ["one", "two", "text"]
    assert capsys.readouterr().err.startswith("a .zst file has no checksum")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt.gz", gzip.compress(b"words " * 30_000, mtime=0)),
        ("a.jsonl.xz", lzma.compress(b'{"text": "words"}\n' * 20_000)),
        ("a.parquet", as_parquet(["words " * 500] * 1_000)),
        ("b.parquet", as_parquet(["x" * 2_000_000])),
    ],
)
def test_files_that_expand_out_of_proportion_are_errors(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(files, "MIN_EXPANDED_BYTES", 100_000)
    monkeypatch.setattr(files, "MAX_EXPANSION", 10)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} expands to over 10 times its size"):
        read(tmp_path)


def test_several_zstandard_frames_are_one_text(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(compress_zstd(b"one\n\n") + compress_zstd(b"two"))
    assert read(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\nmore\x00binary", "a.txt, line 2: NUL byte"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'["a"]', "a.jsonl, line 1: list; expected a JSON object"),
        ("a.jsonl", b'{"text": 5}', "a.jsonl, line 1: the text field is int; expected a string"),
        ("a.parquet", b"PAR1 not really", "a.parquet is not a valid parquet file"),
        ("a.txt", b" \n\n \n", "no text in"),
        ("a.dat", b"text", "no text files in .*; a corpus is a file, a folder or a glob of .txt, .jsonl, .parquet"),
    ],
)
def test_invalid_input_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_missing_corpus_and_one_without_text_have_different_errors(tmp_path):
    with pytest.raises(DataError, match="gone does not exist; a corpus is"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match=r"no text files in .*\*.txt; a corpus is"):
        read(tmp_path / "*.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe.txt is a pipe or device; a corpus is"):
        read(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match="hub: names no dataset; use hub:NAME"):
        read("hub:")


def test_an_unreadable_subfolder_is_an_error(tmp_path, monkeypatch):
    for name in ("a.txt", "within/b.txt", ".hidden/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert read(tmp_path) == ["text of a.txt", "text of within/b.txt"]
    scandir = os.scandir

    def scandir_with_denial(folder):
        if Path(folder).name == "within":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scandir_with_denial)
    with pytest.raises(DataError, match=r"cannot read the folder .*within: Permission denied"):
        read(tmp_path)


def test_a_file_needs_a_known_suffix(tmp_path):
    (tmp_path / "a.dat").write_text("text")
    with pytest.raises(ConfigError, match=r"unknown file type: .*a.dat"):
        read(tmp_path / "a.dat")


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"reading .zst needs another library: pip install pyarrow$"):
        read(tmp_path)


def test_the_validation_split_depends_on_the_text_only():
    documents = [f"document {number}".encode() for number in range(10_000)]
    held_out = [document for document in documents if hash_document(document) < 0.01]
    assert 70 < len(held_out) < 130
    assert all(hash_document(b"  " + document + b"\n") < 0.01 for document in held_out)
