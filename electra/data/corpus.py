"""Corpus: documents from text files or the Hugging Face hub, streamed in blocks.

A document ends at a blank line (or at each line) in .txt files, at each line in .jsonl, at each row in .parquet and on
the hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rich.progress import Progress

from electra.data.files import (
    TextFile,
    describe_encoding,
    escape_invalid_name,
    find_text_files,
    guess_encoding,
    limit_expansion,
    open_parquet,
    open_streams,
    read_as_utf8,
)
from electra.errors import ConfigError, DataError, import_optional

SAMPLED_FILES = 16
BLOCK_BYTES = 1 << 20
"""Bytes of text that are read at a time."""
MAX_DOCUMENT_BYTES = 16 << 20
"""A longer document is cut at spaces into documents of at most this size."""
MAX_LINE_BYTES = 1 << 30
"""A longer line of a .jsonl file is an error."""

BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
SPACES = (b" ", b"\n", b"\t")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_INVALID = 0.1  # of the characters; more are an unknown encoding
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Where text comes from and where a document ends."""

    corpus: str
    """A file, a folder, a quoted glob, or hub:NAME or hub:NAME:CONFIG for a dataset on the Hugging Face hub."""
    text_field: str = "text"
    """Field of .jsonl, .parquet and hub data that holds the text."""
    document_end: Literal["blank-line", "line"] = "blank-line"
    """What ends a document in .txt files."""
    encoding: str | None = None
    """Encoding of .txt and .jsonl files, such as windows-1252; by default UTF-8, and text in another one is refused."""
    strict: bool = False
    """Stop at any text that is not valid UTF-8 instead of replacing and counting single invalid characters."""

    def __post_init__(self):
        try:
            "".encode(self.encoding or "utf-8")
        except (LookupError, ValueError):
            raise ConfigError(f"is {self.encoding!r}, which Python does not know", field="encoding") from None


@dataclass(frozen=True)
class Block:
    """Consecutive whole documents of one file, not yet parsed."""

    source: str  # the file, for error messages
    format: str  # .txt or .jsonl: `data` is bytes of the file; .parquet: `data` is a list of documents
    data: bytes | list[bytes]
    first_line: int = 1
    position: int = 0  # bytes of the file on disk up to the end of the block
    cut: int = 0  # splits of documents longer than MAX_DOCUMENT_BYTES
    without_text: int = 0  # rows of parquet files and of the hub whose text field is null or missing

    def __len__(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else sum(map(len, self.data))

    def is_blank(self) -> bool:
        return not (self.data.strip() if isinstance(self.data, bytes) else self.data)


@dataclass
class ReadStats:
    """Irregularities met while reading."""

    replaced: int = 0  # invalid UTF-8 characters
    cut: int = 0  # splits of documents longer than MAX_DOCUMENT_BYTES
    without_text: int = 0  # rows whose text field is null, or missing on the hub


class Corpus:
    """The documents of a `CorpusConfig`."""

    def __init__(self, config: CorpusConfig):
        self.config = config
        self.is_hub = config.corpus.startswith("hub:")
        self.files: list[TextFile] = [] if self.is_hub else find_text_files(config.corpus)

    def file_sizes(self) -> list[int]:
        """Bytes on disk of each file; empty for hub data."""
        return [file.path.stat().st_size for file in self.files]

    def is_newer_than(self, path: Path) -> bool:
        """Whether a file of the corpus was changed after `path`; False for hub data."""
        return any(file.path.stat().st_mtime > path.stat().st_mtime for file in self.files)

    def hub_name_or_file_sizes(self) -> dict[str, str] | str:
        """The hub name, or the size of each file by its path below their common folder; to notice a changed corpus."""
        if self.is_hub:
            return self.config.corpus
        paths = [file.path.absolute() for file in self.files]
        common = os.path.commonpath([path.parent for path in paths])
        names = [escape_invalid_name(str(path.relative_to(common))) for path in paths]
        return {name: f"{size:,} bytes" for name, size in zip(names, self.file_sizes(), strict=True)}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Bytes of the corpus on disk before each file."""
        sizes = accumulate(self.file_sizes(), initial=0)
        return dict(zip((str(file.path) for file in self.files), sizes, strict=False))

    def position(self, block: Block) -> int:
        """Bytes of the corpus on disk up to the end of a block."""
        return self.offsets.get(block.source, 0) + block.position

    def read_blocks(self) -> Iterator[Block]:
        """All documents in order, as blocks of bounded size."""
        is_empty = True
        of_files = chain.from_iterable(map(self.read_blocks_of_file, self.files))
        for block in read_hub_blocks(self.config) if self.is_hub else of_files:
            is_empty = is_empty and block.is_blank()
            if not block.is_blank() or block.without_text:
                yield block
        if is_empty:
            raise DataError(f"no text in {self.config.corpus}: every document is empty")

    def read_blocks_of_file(self, file: TextFile) -> Generator[Block, None, None]:
        """The blocks of a file in order, blank ones included."""
        with open_streams(file) as (decompressed, raw):
            if file.format == ".parquet":
                blocks = read_parquet_blocks(file, decompressed, raw, self.config.text_field)
            else:
                blocks = read_text_blocks(file, decompressed, raw, self.config)
            yield from limit_expansion(file.path, blocks, len)

    def estimate_documents(self) -> float:
        """The number of documents in all files, estimated from the first block of up to `SAMPLED_FILES` of them."""
        documents = size = 0.0
        for file in self.files[:: -(-len(self.files) // SAMPLED_FILES)]:
            file_size = file.path.stat().st_size
            with closing(self.read_blocks_of_file(file)) as blocks:
                block = next(blocks, None)
            if block is not None:
                count = sum(1 for _ in parse_documents(block, self.config, ReadStats()))
                documents += count * max(1.0, file_size / max(1, block.position))
            size += file_size
        return documents * sum(self.file_sizes()) / max(1.0, size)

    def read_documents(self, stats: ReadStats, progress: Progress | None = None) -> Iterator[bytes]:
        """All documents in order, as valid UTF-8; `progress` shows the position in its last task."""
        for block in self.read_blocks():
            if progress is not None:
                progress.update(progress.task_ids[-1], completed=self.position(block))
            yield from parse_documents(block, self.config, stats)


def read_text_blocks(file: TextFile, decompressed: BinaryIO, raw: BinaryIO, config: CorpusConfig) -> Iterator[Block]:
    """Blocks of a .txt or .jsonl file, each ending where a document ends."""
    source = str(file.path)
    line = 1  # in which `text` begins
    text = bytearray()
    is_by_line = file.format == ".jsonl" or config.document_end == "line"
    for chunk in read_as_utf8(decompressed, BLOCK_BYTES, source, config.encoding):
        check_no_nul_bytes(source, line, text, chunk)
        length = len(text)  # without a line end, if it is by line
        text += chunk
        end = text.rfind(b"\n", length) + 1 if is_by_line else find_last_blank_line_end(text)
        if file.format == ".jsonl" and not end and len(text) > MAX_LINE_BYTES:
            limit = f"{MAX_LINE_BYTES >> 20:,} MB"
            raise DataError(f"{source}, line {line}: longer than {limit}; split its text over several lines")
        is_cut = file.format != ".jsonl" and not end and len(text) > MAX_DOCUMENT_BYTES
        end = find_split_point(text) if is_cut else end
        if end:
            yield Block(source, file.format, bytes(text[:end]), line, raw.tell(), int(is_cut))
            line += text.count(b"\n", 0, end)
            del text[:end]
    yield Block(source, file.format, bytes(text), line, raw.tell())


def check_no_nul_bytes(source: str, first_line: int, text: bytes | bytearray, next_chunk: bytes) -> None:
    """Raise if `next_chunk`, which follows `text` that begins in `first_line`, has NUL bytes and thus is not text."""
    nul = next_chunk.find(b"\0")
    if nul >= 0:
        line = first_line + text.count(b"\n") + next_chunk.count(b"\n", 0, nul)
        encoding = guess_encoding(bytes(text + next_chunk))
        advice = f"try --encoding {encoding}" if encoding else "convert the file to UTF-8 text (iconv) or remove it"
        raise DataError(f"{source}, line {line}: NUL byte; {advice}")


def find_last_blank_line_end(text: bytes | bytearray) -> int:
    """The end of the last blank line, or 0."""
    end = text.rfind(b"\n\n") + 2
    if end > 1:
        return end
    return max((match.end() for match in BLANK_LINES.finditer(text)), default=0)


def find_split_point(text: bytes | bytearray) -> int:
    """The last position up to MAX_DOCUMENT_BYTES that follows a space, or else lies between two characters."""
    limit = MAX_DOCUMENT_BYTES
    end = max(text.rfind(space, 0, limit) for space in SPACES) + 1
    if end:
        return end
    while limit > 1 and text[limit : limit + 1] and text[limit] & 0xC0 == 0x80:  # inside a UTF-8 character
        limit -= 1
    return limit


def read_parquet_blocks(file: TextFile, decompressed: BinaryIO, raw: BinaryIO, text_field: str) -> Iterator[Block]:
    """Blocks of a .parquet file; positions are by rows, because pyarrow reads ahead."""
    source, size = str(file.path), file.path.stat().st_size
    with open_parquet(file, decompressed, raw) as table:
        check_has_field(source, text_field, table.schema_arrow.names)
        batches = table.iter_batches(batch_size=64, columns=[text_field])
        rows = (text for batch in batches for text in batch.column(0).to_pylist())
        num_rows = table.metadata.num_rows
        yield from group_into_blocks(source, rows, lambda row: size * row // num_rows if row < num_rows else size)


def read_hub_blocks(config: CorpusConfig) -> Iterator[Block]:
    """Blocks of a hub dataset's training split, streamed."""
    datasets = import_optional("datasets", "reading from the hub")
    name, _, subset = config.corpus.removeprefix("hub:").partition(":")
    if not name:
        raise ConfigError(f"{config.corpus} names no dataset; use hub:NAME or hub:NAME:CONFIG")
    try:
        rows = iter(datasets.load_dataset(name, subset or None, split="train", streaming=True))
        first: dict[str, Any] = next(rows, {})
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"cannot read {config.corpus}: {' '.join(str(error).split())}") from None
    if first:
        check_has_field(config.corpus, config.text_field, list(first))
    texts = (row.get(config.text_field) for row in chain([first], rows))
    yield from group_into_blocks(config.corpus, texts, lambda row: 0)


def check_has_field(source: str, text_field: str, fields: list[str]) -> None:
    if text_field not in fields:
        raise DataError(f"{source} has no field {text_field!r}; set --text-field to one of {', '.join(fields)}")


def group_into_blocks(source: str, texts: Iterable[Any], position_after: Callable[[int], int]) -> Iterator[Block]:
    """Blocks of documents that come one by one; `position_after` returns `Block.position` after a number of rows."""
    documents: list[bytes] = []
    number, first_row, size, cut, without_text = 0, 1, 0, 0, 0
    for number, text in enumerate(texts, start=1):
        without_text += text is None
        data = parse_text_field(source, number, text).encode("utf-8", "replace")
        parts = list(split_long_document(data))
        documents += [part for part in parts if part.strip()]
        size += len(data)
        cut += len(parts) - 1
        if size >= BLOCK_BYTES or cut:
            yield Block(source, ".parquet", documents, first_row, position_after(number), cut, without_text)
            documents, first_row, size, cut, without_text = [], number + 1, 0, 0, 0
    yield Block(source, ".parquet", documents, first_row, position_after(number), without_text=without_text)


def parse_text_field(source: str, line: int, value: Any) -> str:
    """The text of a field, empty if it is None; raises if it is not a string."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{source}, line {line}: the text field is {type(value).__name__}; expected a string")
    return value


def split_long_document(document: bytes) -> Iterator[bytes]:
    """The document in parts of at most MAX_DOCUMENT_BYTES."""
    while len(document) > MAX_DOCUMENT_BYTES:
        end = find_split_point(document)
        yield document[:end]
        document = document[end:]
    yield document


def parse_documents(block: Block, config: CorpusConfig, stats: ReadStats) -> Iterator[bytes]:
    """The nonblank documents of a block as valid UTF-8."""
    stats.cut += block.cut
    stats.without_text += block.without_text
    if isinstance(block.data, list):
        return iter(block.data)
    text = replace_invalid_utf8(block, config, stats).removeprefix(BYTE_ORDER_MARK)
    if block.format == ".jsonl":
        documents: Iterable[bytes] = parse_jsonl(block, text, config.text_field, stats)
    else:
        documents = text.split(b"\n") if config.document_end == "line" else BLANK_LINES.split(text)
    return (document for document in documents if document.strip())


def replace_invalid_utf8(block: Block, config: CorpusConfig, stats: ReadStats) -> bytes:
    """The block's text with invalid characters replaced and counted; raises if that would be wrong or if `strict`."""
    assert isinstance(block.data, bytes)
    try:
        block.data.decode()
        return block.data
    except UnicodeDecodeError as error:
        line = block.first_line + block.data.count(b"\n", 0, error.start)
        place = f"{block.source}, line {line}"
    text = block.data.decode(errors="replace")
    num_invalid = text.count(REPLACEMENT) - block.data.count(REPLACEMENT.encode())
    num_valid = sum(map(len, re.findall(r"[^\0-\x7f]+", text))) - num_invalid
    if config.encoding is None and num_invalid > num_valid:
        encoding = guess_encoding(block.data)
        if encoding or num_invalid > MAX_INVALID * len(text):
            likely = f", probably {describe_encoding(block.data, encoding)}" if encoding else ""
            advice = f"--encoding {encoding or 'NAME (gb18030, shift_jis, euc-kr, …)'}"
            raise DataError(
                f"{place}: not valid UTF-8{likely}; give {advice}, or --encoding utf-8 to replace invalid characters"
            )
    if config.strict:
        raise DataError(f"{place}: not valid UTF-8; correct it or omit --strict")
    stats.replaced += num_invalid
    return text.encode()


def parse_jsonl(block: Block, text: bytes, text_field: str, stats: ReadStats) -> Iterator[bytes]:
    """The text field of each line, in parts if it is overlong; empty if it is null, which is counted."""
    for number, line in enumerate(text.split(b"\n"), start=block.first_line):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{block.source}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{block.source}, line {number}: {type(row).__name__}; expected a JSON object")
        check_has_field(f"{block.source}, line {number},", text_field, list(row))
        stats.without_text += row[text_field] is None
        document = parse_text_field(block.source, number, row[text_field]).encode("utf-8", "replace")
        parts = list(split_long_document(document))
        stats.cut += len(parts) - 1
        yield from parts


def hash_document(document: bytes) -> float:
    """A number from 0 to 1 that depends on the text only: a document below the validation fraction is held out."""
    return int.from_bytes(blake2b(document.strip(), digest_size=8).digest(), "big") / 2**64
