"""Text files: which files a corpus consists of, and how to open them, compressed or not."""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import lzma
import math
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from electra.errors import ConfigError, DataError, import_optional
from electra.formatting import format_count

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ZSTD_MAGIC, ZSTD_HAS_CHECKSUM = b"\x28\xb5\x2f\xfd", 1 << 2  # a bit of the byte that follows (RFC 8878)
MAX_EXPANSION, MIN_EXPANDED_BYTES = 500, 64 << 20  # content above 64 MB is at most 500 times as large as the file
ROW_BYTES = 100  # of the objects of a row, besides its content
MAX_LISTED_SUFFIXES = 5  # in the warning about skipped files

Part = TypeVar("Part")


@dataclass(frozen=True)
class TextFile:
    """A file with its format and compression, as its name tells."""

    path: Path
    format: str  # one of FORMATS
    compression: str  # one of COMPRESSIONS, or ""


def find_text_files(source: str) -> list[TextFile]:
    """The text files of a path, a folder (recursively) or a glob, sorted by path."""
    path = Path(source)
    details = ""
    expected = f"a corpus is a file, a folder or a glob of {describe_formats(FORMATS)}, or hub:NAME"
    if path.is_dir():
        candidates = list(walk_visible_files(path))
        files = [file for candidate in candidates if (file := as_text_file(candidate))]
        details = (
            f" ({format_count(len(candidates), 'file')} of other types)" if candidates else " (the folder is empty)"
        )
    elif path.is_file():
        files = [require_text_file(path)]
    elif glob.has_magic(source):
        files = [require_text_file(Path(name)) for name in glob.glob(source, recursive=True) if Path(name).is_file()]
    else:
        raise DataError(f"{source} {'is a pipe or device' if path.exists() else 'does not exist'}; {expected}")
    if not files:
        raise DataError(f"no text files in {source}{details}; {expected}")
    return sorted(files, key=lambda file: str(file.path))


def escape_invalid_name(name: str) -> str:
    """A file name, or text that contains some, for JSON files; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def describe_formats(formats: tuple[str, ...]) -> str:
    return f"{', '.join(formats)}, optionally with {', '.join(COMPRESSIONS)}"


def walk_visible_files(folder: Path) -> Iterator[Path]:
    """All files of a folder and its subfolders, except hidden ones."""
    visited = {os.path.realpath(folder)}  # each folder is read once: links may form loops
    for parent, folders, names in os.walk(folder, onerror=raise_unreadable_folder, followlinks=True):
        subfolders = [Path(parent, name) for name in folders if not name.startswith(".")]
        folders.clear()  # os.walk skips those that are not added again
        for path in sorted(subfolders, key=lambda path: (path.is_symlink(), path)):
            if (target := os.path.realpath(path)) not in visited:
                visited.add(target)
                folders.append(path.name)
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def raise_unreadable_folder(error: OSError) -> NoReturn:
    """os.walk would silently skip the folder."""
    raise DataError(
        f"cannot read the folder {error.filename}: {error.strerror}; change its permissions or name the files by a glob"
    ) from None


def as_text_file(path: Path, formats: tuple[str, ...] = FORMATS) -> TextFile | None:
    """The file with its format; None if its suffix is none of `formats`."""
    format, compression = format_and_compression(path)
    return TextFile(path, format, compression) if format in formats else None


def format_and_compression(path: Path) -> tuple[str, str]:
    """The suffixes of format and compression, either of which may be empty."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def require_text_file(path: Path, formats: tuple[str, ...] = FORMATS, description: str = "text files") -> TextFile:
    """The file with its format; raises if its suffix is none of `formats`."""
    file = as_text_file(path, formats)
    if file is None:
        raise ConfigError(f"unknown file type: {path}; {description} end in {describe_formats(formats)}")
    return file


def warn_skipped_files(source: str) -> None:
    """Print to standard error which files of a folder are not read, if any."""
    paths = walk_visible_files(Path(source)) if Path(source).is_dir() else ()
    counts = Counter(
        "".join(format_and_compression(path)) or "without suffix" for path in paths if not as_text_file(path)
    )
    if counts:
        listed = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(MAX_LISTED_SUFFIXES))
        more = ", …" if len(counts) > MAX_LISTED_SUFFIXES else ""
        print(
            f"skipped in {source}: {listed}{more}; text files end in {describe_formats(FORMATS)}; "
            "rename plain text to .txt to include it",
            file=sys.stderr,
        )


@contextmanager
def open_streams(file: TextFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file as its decompressed stream and the raw file, whose `tell` gives the bytes read from disk."""
    with open(file.path, "rb") as raw:
        try:
            yield open_decompressed(file.compression, raw), raw
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # not about the content of the file
                raise
            raise DataError(f"{file.path} is damaged or truncated ({error}); download or compress it again") from None


def open_decompressed(compression: str, raw: BinaryIO) -> Any:
    """A stream whose `read(n)` returns n bytes unless the text ends."""
    match compression:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            pyarrow = import_optional("pyarrow", "reading .zst")
            descriptor = raw.read(5)
            raw.seek(0)
            if descriptor.startswith(ZSTD_MAGIC) and not descriptor[-1] & ZSTD_HAS_CHECKSUM:
                warn_unchecked_zstd()
            return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
        case _:
            return raw


@cache
def warn_unchecked_zstd() -> None:
    """Print once that damage of .zst files may not be noticed: of all formats, only theirs has an optional checksum."""
    print("a .zst file has no checksum, so damage may go unnoticed; compress with zstd --check", file=sys.stderr)


def limit_expansion(path: Path, parts: Iterable[Part], size: Callable[[Part], int]) -> Iterator[Part]:
    """The parts of a file's content; raises if their sizes in bytes are out of proportion to that of the file."""
    is_pipe, total = not path.is_file(), 0
    limit = math.inf if is_pipe else max(MIN_EXPANDED_BYTES, MAX_EXPANSION * path.stat().st_size)
    for part in parts:
        total += size(part) + ROW_BYTES
        if total > limit:
            raise DataError(f"{path} expands to over {MAX_EXPANSION:,} times its size; decompress it and check it")
        yield part


@contextmanager
def open_parquet(file: TextFile, decompressed: BinaryIO, raw: BinaryIO) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile` of a file that `open_streams` opened."""
    parquet = import_optional("pyarrow.parquet", "reading .parquet")
    with tempfile.TemporaryFile() as copy:
        if file.compression:  # parquet needs random access
            shutil.copyfileobj(decompressed, copy)
        try:
            table = parquet.ParquetFile(copy if file.compression else raw)
            groups = (table.metadata.row_group(index) for index in range(table.num_row_groups))
            for _ in limit_expansion(file.path, groups, lambda group: group.total_byte_size):
                pass  # before one is read: its pages may expand to any size
            yield table
        except DataError:
            raise
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of either
            raise DataError(f"{file.path} is not a valid parquet file ({error})") from None


# Texts in other encodings than UTF-8.

QUOTES = "‘’“”„«»–—…"
BETWEEN_ASCII = r"(?i:(?<![^\0-\x7f])[{letters}]{{1,2}}(?![^\0-\x7f])|[{quotes}])"
RUSSIAN = "[А-Яа-яё][а-яё]{2,}"
LIKELY_CHARACTERS = {
    "windows-1252": BETWEEN_ASCII.format(letters="àáâãäåæçèéêëìíîïñòóôõöøùúûüýßœ", quotes=QUOTES),
    "windows-1250": BETWEEN_ASCII.format(letters="áâăäąćçčďđéęëěíîłĺľńňóôöőŕřśšşťţúůűüýźžżß", quotes=QUOTES),
    "windows-1251": f"{RUSSIAN}|[{QUOTES}]",
    "koi8-r": RUSSIAN,
}
"""Encodings, the preferred first, and what their characters beyond ASCII mostly are; others need a larger table."""
SAMPLE_BYTES = 1 << 16


def guess_encoding(text: bytes) -> str | None:
    """The likely encoding of a text that is not UTF-8; None if it is none of those known here."""
    nul_share = [text[start:SAMPLE_BYTES:2].count(0) / max(1, len(text[:SAMPLE_BYTES])) for start in (0, 1)]
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and max(nul_share) > 0:
        return "utf-16"
    if max(nul_share) > 0.2:
        return "utf-16-le" if nul_share[1] > nul_share[0] else "utf-16-be"
    if b"\0" in text:
        return None
    shares = {name: likely_share(text, name) for name in LIKELY_CHARACTERS}
    best = max(shares, key=shares.__getitem__)
    return best if shares[best] > 0.5 else None


def likely_share(text: bytes, encoding: str) -> float:
    """The fraction of characters beyond ASCII that are likely in texts of this encoding."""
    decoded = text.decode(encoding, "replace")
    likely = sum(map(len, re.findall(LIKELY_CHARACTERS[encoding], decoded)))
    return likely / max(1, sum(not character.isascii() for character in decoded))


def describe_encoding(text: bytes, encoding: str) -> str:
    """The encoding with a word of the text, by which a person can tell whether it is right."""
    word = re.search(r"\w*[^\0-\x7f\W]\w*", text.decode(encoding, "ignore"))
    return f'{encoding} ("{word[0][:40]}")' if word else encoding


def read_as_utf8(stream: BinaryIO, size: int, source: str, encoding: str | None) -> Iterator[bytes]:
    """The content of a file in chunks of about `size` bytes, in UTF-8; text that should be UTF-8 is not checked."""
    codec = codecs.lookup(encoding or "utf-8")
    decoder = codec.incrementaldecoder() if codec.name != "utf-8" else None
    try:
        while chunk := stream.read(size):
            yield decoder.decode(chunk).encode() if decoder else chunk
        if decoder:
            decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise DataError(f"{source} is not text in {encoding} ({error}); choose another --encoding") from None
