"""Corpus: documents from files or the hub, read as a stream in blocks that one worker can take.

A document ends at a blank line (or at each line) in .txt, at each line in .jsonl, at each row in .parquet and hub data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from electra.data.files import TextFile, find_files, needs, opened, opened_parquet
from electra.errors import ConfigError, DataError

BLOCK = 1 << 20
"""Bytes of text that are read, and handed to a worker, at a time."""
LONGEST = 16 << 20
"""Bytes a document may have; a longer one is cut at spaces into documents of at most this size."""

BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
SPACES = (b" ", b"\n", b"\t")
MARK = b"\xef\xbb\xbf"  # some editors begin UTF-8 files with it
REPLACED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Where text comes from and where a document ends."""

    corpus: str
    """A file, a folder, a glob in quotes, or hub:NAME or hub:NAME:CONFIG for a dataset of the Hugging Face hub."""
    text_field: str = "text"
    """The field of .jsonl, .parquet and hub data that holds the text."""
    document_end: Literal["blank-line", "line"] = "blank-line"
    """What ends a document in .txt files."""
    strict: bool = False
    """Refuse text that is not valid UTF-8 instead of replacing and counting the bad characters."""


@dataclass(frozen=True)
class Block:
    """Whole documents of one file, as they stand in it."""

    name: str  # the file, for messages
    format: str  # .txt and .jsonl: `data` is bytes of the file; .parquet: it is a list of documents
    data: bytes | list[bytes]
    line: int = 1  # the number of the block's first line
    position: int = 0  # bytes of the file on disk that were read when the block was complete
    is_cut: bool = False  # the block ends inside a document that is longer than LONGEST

    def __len__(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else sum(map(len, self.data))


@dataclass
class Counts:
    """What reading met."""

    replaced: int = 0  # characters that were not valid UTF-8
    cut: int = 0  # places where a document longer than LONGEST was cut


@dataclass
class Corpus:
    """The text that a configuration names."""

    config: CorpusConfig
    files: list[TextFile] = field(init=False)

    def __post_init__(self):
        self.files = [] if self.is_hub else find_files(self.config.corpus)

    @property
    def is_hub(self) -> bool:
        """Whether the text comes from the hub, so that its size is not known."""
        return self.config.corpus.startswith("hub:")

    def paths(self) -> list[Path]:
        """The files' paths, in the order they are read."""
        return [file.path for file in self.files]

    def sizes(self) -> list[int]:
        """The files' bytes on disk."""
        return [path.stat().st_size for path in self.paths()]

    def identity(self) -> dict[str, str] | str:
        """What tells corpora apart: the hub name, or the files' sizes by their names below their common folder."""
        if self.is_hub:
            return self.config.corpus
        paths = [path.absolute() for path in self.paths()]
        common = os.path.commonpath([path.parent for path in paths])
        names = [str(path.relative_to(common)) for path in paths]
        return {name: f"{size:,} bytes" for name, size in zip(names, self.sizes(), strict=True)}

    def blocks(self) -> Iterator[Block]:
        """All documents in their order, as blocks; memory does not grow with the corpus."""
        is_empty = True
        for block in hub_blocks(self.config) if self.is_hub else self.file_blocks():
            is_empty = False
            yield block
        if is_empty:
            raise DataError(f"there is no text in {self.config.corpus}: {len(self.files)} files, all empty")

    def file_blocks(self) -> Iterator[Block]:
        """The blocks of every file."""
        for file in self.files:
            with opened(file) as (stream, disk):
                if file.format == ".parquet":
                    yield from parquet_blocks(file, stream, disk, self.config.text_field)
                else:
                    yield from stream_blocks(file, stream, disk, self.config.document_end)

    def documents(self, counts: Counts) -> Iterator[bytes]:
        """All documents, one by one, as valid UTF-8."""
        for block in self.blocks():
            yield from documents_of(block, self.config, counts)


def stream_blocks(file: TextFile, stream: BinaryIO, disk: BinaryIO, document_end: str) -> Iterator[Block]:
    """Blocks of a .txt or .jsonl file, each ending where a document ends."""
    name, line, held = str(file.path), 1, b""
    by_line = file.format == ".jsonl" or document_end == "line"
    while chunk := stream.read(BLOCK):
        refuse_binary(name, line, held, chunk)
        held += chunk
        end = held.rfind(b"\n") + 1 if by_line else last_blank_line(held)
        is_cut = not end and len(held) > LONGEST
        if is_cut and file.format == ".jsonl":
            raise DataError(f"{name}, line {line}: longer than {LONGEST >> 20} MB; divide its text over several lines")
        end = space_before(held, LONGEST) if is_cut else end
        if end:
            yield from nonblank(Block(name, file.format, held[:end], line, disk.tell(), is_cut))
            line += held.count(b"\n", 0, end)
            held = held[end:]
    yield from nonblank(Block(name, file.format, held, line, disk.tell()))


def nonblank(block: Block) -> Iterator[Block]:
    """The block, if there is anything in it."""
    if isinstance(block.data, bytes) and block.data.strip():
        yield block


def refuse_binary(name: str, line: int, held: bytes, chunk: bytes) -> None:
    """Raise if the chunk has NUL bytes, which text has not."""
    nul = chunk.find(b"\0")
    if nul >= 0:
        line += held.count(b"\n") + chunk.count(b"\n", 0, nul)
        raise DataError(
            f"{name}, line {line}: a NUL byte, so this is not UTF-8 text; convert it (iconv) or take it out"
        )


def last_blank_line(text: bytes) -> int:
    """Where the last blank line ends, or 0."""
    end = text.rfind(b"\n\n") + 2
    if end > 1:
        return end
    return max((found.end() for found in BLANK_LINES.finditer(text)), default=0)


def space_before(text: bytes, limit: int) -> int:
    """The last place up to `limit` where text may be cut: behind a space, else between two characters."""
    space = max(text.rfind(space, 0, limit) for space in SPACES) + 1
    if space:
        return space
    while limit > 1 and text[limit : limit + 1] and text[limit] & 0xC0 == 0x80:  # inside a UTF-8 character
        limit -= 1
    return limit


def parquet_blocks(file: TextFile, stream: BinaryIO, disk: BinaryIO, text_field: str) -> Iterator[Block]:
    """Blocks of the rows of a .parquet file."""
    name = str(file.path)
    with opened_parquet(file, stream, disk) as table:
        require_field(name, text_field, table.schema_arrow.names)
        batches = table.iter_batches(batch_size=64, columns=[text_field])
        rows = (text for batch in batches for text in batch.column(0).to_pylist())
        yield from row_blocks(name, rows, lambda: 0 if file.compression else disk.tell())


def hub_blocks(config: CorpusConfig) -> Iterator[Block]:
    """Blocks of a dataset's training rows, streamed from the hub."""
    datasets = needs("datasets", "reading from the hub")
    name, _, part = config.corpus.removeprefix("hub:").partition(":")
    if not name:
        raise ConfigError(f"{config.corpus} names no dataset; write hub:NAME or hub:NAME:CONFIG")
    try:
        rows = iter(datasets.load_dataset(name, part or None, split="train", streaming=True))
        first: dict[str, Any] = next(rows, {})
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"cannot read {config.corpus}: {' '.join(str(error).split())}") from None
    if first:
        require_field(config.corpus, config.text_field, list(first))
    texts = (row.get(config.text_field) for row in chain([first], rows))
    yield from row_blocks(config.corpus, texts, lambda: 0)


def require_field(name: str, text_field: str, fields: list[str]) -> None:
    """Raise unless the rows have the field the text is said to be in."""
    if text_field not in fields:
        raise DataError(f"{name} has no field {text_field!r}; name one of {', '.join(fields)} with --text-field")


def row_blocks(name: str, rows: Iterable[Any], position) -> Iterator[Block]:
    """Documents given one by one, gathered into blocks."""
    held: list[bytes] = []
    first, size = 1, 0
    for number, text in enumerate(rows, start=1):
        data = as_text(name, number, text).encode("utf-8", "replace")
        pieces = list(pieces_of(data))
        held += [piece for piece in pieces if piece.strip()]
        size += len(data)
        if size >= BLOCK or len(pieces) > 1:
            yield from rows_block(name, held, first, position(), len(pieces) > 1)
            held, first, size = [], number + 1, 0
    yield from rows_block(name, held, first, position(), False)


def rows_block(name: str, held: list[bytes], first: int, position: int, is_cut: bool) -> Iterator[Block]:
    """The rows as a block, if there are any."""
    if held:
        yield Block(name, ".parquet", held, first, position, is_cut)


def as_text(name: str, line: int, text: Any) -> str:
    """The text of a field; an absent one is empty."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{name}, line {line}: the text is a {type(text).__name__}; it must be a string")
    return text


def pieces_of(document: bytes) -> Iterator[bytes]:
    """The document, cut where it is longer than LONGEST."""
    while len(document) > LONGEST:
        end = space_before(document, LONGEST)
        yield document[:end]
        document = document[end:]
    yield document


def documents_of(block: Block, config: CorpusConfig, counts: Counts) -> Iterator[bytes]:
    """The documents of a block as valid UTF-8, without the blank ones."""
    counts.cut += block.is_cut
    if isinstance(block.data, list):
        return iter(block.data)
    data = valid(block, config.strict, counts).removeprefix(MARK)
    if block.format == ".jsonl":
        found: Iterable[bytes] = json_documents(block, data, config.text_field)
    else:
        found = data.split(b"\n") if config.document_end == "line" else BLANK_LINES.split(data)
    return (document for document in found if document.strip())


def valid(block: Block, strict: bool, counts: Counts) -> bytes:
    """The block's bytes with what is not UTF-8 replaced and counted, or refused."""
    assert isinstance(block.data, bytes)
    try:
        block.data.decode()
        return block.data
    except UnicodeDecodeError as error:
        if strict:
            line = block.line + block.data.count(b"\n", 0, error.start)
            raise DataError(f"{block.name}, line {line}: not valid UTF-8; mend it, or leave out --strict") from None
    text = block.data.decode(errors="replace")
    counts.replaced += text.count(REPLACED) - block.data.count(REPLACED.encode())
    return text.encode()


def json_documents(block: Block, data: bytes, text_field: str) -> Iterator[bytes]:
    """The text of each line of JSON."""
    for number, line in enumerate(data.split(b"\n"), start=block.line):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{block.name}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{block.name}, line {number}: a {type(row).__name__}; each line must be an object")
        require_field(f"{block.name}, line {number},", text_field, list(row))
        yield as_text(block.name, number, row[text_field]).encode("utf-8", "replace")


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone, so that other files change nothing."""
    drawn = int.from_bytes(blake2b(document.strip(), digest_size=8).digest(), "big")
    return drawn < fraction * 2**64
