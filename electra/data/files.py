"""Files of text: which ones a corpus has, and how each is opened, compressed or not."""

from __future__ import annotations

import bz2
import glob
import gzip
import importlib
import io
import lzma
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from electra.errors import ConfigError, DataError

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
MOST_TOLD = 5  # kinds of files that are named, where many are skipped


@dataclass(frozen=True)
class TextFile:
    """One file of a corpus."""

    path: Path
    format: str  # one of FORMATS
    compression: str  # one of COMPRESSIONS, or ""


def find_files(source: str) -> list[TextFile]:
    """The text files of a file name, a folder (with all folders in it) or a glob, in the order of their names."""
    path, others, kinds = Path(source), "", allowed(FORMATS)
    if path.is_dir():
        below = list(files_below(path))
        files = [file for found in below if (file := recognise(found))]
        others = f": it has {len(below):,} files of other kinds" if below else ": it has no files but hidden ones"
    elif path.exists():
        files = [named(path)]
    elif glob.has_magic(source):
        files = [named(Path(found)) for found in glob.glob(source, recursive=True) if Path(found).is_file()]
    else:
        raise DataError(f"there is no {source}; a corpus is a file, folder or glob of {kinds}, or hub:NAME")
    if not files:
        raise DataError(f"no text in {source}{others}; a corpus is a file, folder or glob of {kinds}, or hub:NAME")
    return sorted(files, key=lambda file: str(file.path))


def files_below(folder: Path) -> Iterator[Path]:
    """All files of a folder and of the folders in it, but for hidden ones."""
    for within, folders, names in os.walk(folder, onerror=refuse_folder):
        folders[:] = (name for name in folders if not name.startswith("."))  # they are not gone into
        found = (Path(within, name) for name in names if not name.startswith("."))
        yield from (path for path in found if path.is_file())


def refuse_folder(error: OSError) -> NoReturn:
    """A folder that cannot be looked into is an error: what is in it would be missing without a word."""
    raise DataError(f"cannot look into {error.filename}: {error.strerror}; allow it, or give a glob of files") from None


def recognise(path: Path, formats: tuple[str, ...] = FORMATS) -> TextFile | None:
    """The file, if its name says that it has one of the formats."""
    format, compression = ending(path)
    return TextFile(path, format, compression) if format in formats else None


def ending(path: Path) -> tuple[str, str]:
    """What a name says of its file: its format and its compression, each of which may be empty."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def say_skipped(source: str) -> None:
    """Say on standard error which files of a folder are not read as text, if there are any."""
    below = files_below(Path(source)) if Path(source).is_dir() else ()
    skipped = [found for found in below if not recognise(found)]
    if skipped:
        counts = Counter("".join(ending(path)) or "without an ending" for path in skipped).most_common()
        told = ", ".join(f"{count:,} {name}" for name, count in counts[:MOST_TOLD])
        more = ", …" if len(counts) > MOST_TOLD else ""
        print(
            f"skipped in {source}: {told}{more}; the names of text files end in {allowed(FORMATS)}; "
            f"rename those that are plain text to .txt",
            file=sys.stderr,
        )


def named(path: Path, formats: tuple[str, ...] = FORMATS, what: str = "text files") -> TextFile:
    """The file the user named, which therefore must have one of the formats."""
    file = recognise(path, formats)
    if file is None:
        names = f"the names of {what} end in {allowed(formats)}"
        raise ConfigError(f"cannot tell what is in {path} from its name; {names}")
    return file


def allowed(formats: tuple[str, ...]) -> str:
    """How the names of files with these formats end, in words."""
    return f"{', '.join(formats)}, each also with {', '.join(COMPRESSIONS)}"


def needs(module: str, what: str) -> ModuleType:
    """An optional library, imported where it is used, or a sentence on how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{what} needs another library: pip install {module.partition('.')[0]}") from None


@contextmanager
def opened(file: TextFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's text as a stream, and the file on disk below it, whose `tell` says how far reading has come."""
    with open(file.path, "rb") as disk:
        try:
            yield decompressed(file.compression, disk), disk
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path} is damaged or cut short ({error}); fetch or compress it again") from None
        except OSError as error:
            if error.errno is not None:
                raise
            # bz2 reports damage as an OSError without a number
            raise DataError(f"{file.path} is damaged ({error}); fetch or compress it again") from None


def decompressed(compression: str, disk: BinaryIO) -> Any:
    """A stream whose `read(n)` gives n bytes unless the text ends."""
    match compression:
        case ".gz":
            return gzip.GzipFile(fileobj=disk)
        case ".bz2":
            return bz2.BZ2File(disk)
        case ".xz":
            return lzma.LZMAFile(disk)
        case ".zst":
            return io.BufferedReader(Zstandard(disk))
        case _:
            return disk


class Zstandard(io.RawIOBase):
    """The text of a .zst file, which may have several frames; unlike the library's reader it notices a cut file."""

    def __init__(self, disk: BinaryIO):
        self.library = needs("zstandard", "reading .zst")
        self.disk = disk
        self.frame: Any = None  # the frame being read
        self.packed = b""  # compressed bytes that were read and belong to the next frame
        self.text = b""  # text that nobody has asked for yet

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the next piece of text goes."""
        while not self.text and (packed := self.packed or self.disk.read(1 << 17)):
            self.text = self.unpacked(packed)
        if not self.text and self.frame is not None:
            raise EOFError("its last frame has no end")
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count

    def unpacked(self, packed: bytes) -> bytes:
        """The text of compressed bytes up to the end of their frame."""
        self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
        try:
            text = self.frame.decompress(packed)
        except self.library.ZstdError as error:
            raise EOFError(str(error)) from None
        self.packed = self.frame.unused_data if self.frame.eof else b""
        self.frame = None if self.frame.eof else self.frame
        return text


@contextmanager
def opened_parquet(file: TextFile, stream: BinaryIO, disk: BinaryIO) -> Iterator[Any]:
    """The table of an opened .parquet file, to be read in batches."""
    parquet = needs("pyarrow.parquet", "reading .parquet")
    with tempfile.TemporaryFile() as copy:
        if file.compression:  # parquet is read from its end, a compressed stream from its beginning
            shutil.copyfileobj(stream, copy)
        try:
            yield parquet.ParquetFile(copy if file.compression else disk)
        except DataError:
            raise
        except (OSError, ValueError) as error:  # pyarrow's errors are both, on opening and on reading
            raise DataError(f"{file.path} is not a whole parquet file ({error})") from None
