"""Output files of any length that are written in parts: a command that was stopped continues where it was."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from electra.errors import ConfigError, DataError
from electra.formatting import format_count
from electra.runfolder import (
    PARTIAL,
    describe_changed_settings,
    dump_json,
    file_checksum,
    lock_file,
    name_written_file,
    read_stored,
    write_stored,
)

SAVE_SECONDS = 5.0  # between saved parts of a file, at least


@dataclass(frozen=True)
class OutputProgress:
    """What is written of an output file; stored beside it until it is complete."""

    settings: dict[str, Any]
    size: int  # bytes
    sha256: str  # of these bytes
    state: dict[str, Any]  # of the command, such as the number of rows


class ResumableFile:
    """A binary file that is written in parts; after a stop the same command continues after the last saved part."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(dump_json(settings))
        self.partial, self.progress_file, self.table = partial_files(path)
        self.complete = self.partial  # the file that gets the name in the end
        self.state: dict[str, Any] = {}  # of the last saved part
        self.saved_at = time.monotonic()
        self.digest, self.digested = hashlib.sha256(), 0  # of the first bytes of the partial file, and their number
        size = self.restore_progress()
        if not size:
            self.partial.unlink(missing_ok=True)  # a link or pipe of that name is not written to
        self.file: BinaryIO = self.partial.open("r+b" if size else "x+b")
        self.file.truncate(size)
        self.file.seek(size)

    def restore_progress(self) -> int:
        """The size of what a stopped process wrote with the same settings, after restoring its state; else 0."""
        try:
            progress = read_stored(self.progress_file, OutputProgress)
            written = self.partial.stat().st_size
        except (DataError, OSError):  # missing or damaged: start over
            return 0
        if changes := describe_changed_settings(progress.settings, self.settings):
            print(f"{self.path} is started over: {'; '.join(changes)}", file=sys.stderr)
            return 0
        if written < progress.size or self.digest_up_to(progress.size) != progress.sha256:
            self.digest, self.digested = hashlib.sha256(), 0
            return 0
        self.state = progress.state
        print(f"{self.path} is continued after {format_count(self.state.get('rows', 0), 'row')}", file=sys.stderr)
        return progress.size

    def save_part(self, state: dict[str, Any]) -> None:
        """Let a stopped process continue from here; at most every few seconds, because disks are slow."""
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.sync()
            size = self.file.tell()
            progress = OutputProgress(self.settings, size, self.digest_up_to(size), state)
            write_stored(self.progress_file, asdict(progress))
            self.saved_at = time.monotonic()

    def digest_up_to(self, size: int) -> str:
        """The SHA-256 of the first `size` bytes of the partial file; each is read once."""
        with self.partial.open("rb") as file:
            file.seek(self.digested)
            while self.digested < size and (part := file.read(min(1 << 20, size - self.digested))):
                self.digest.update(part)
                self.digested += len(part)
        return self.digest.hexdigest()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Let the file appear under its name."""
        self.sync()
        self.file.close()  # Windows renames no open file
        os.replace(self.complete, self.path)
        self.discard()

    def close(self) -> None:
        """Close the file after an error: what is not saved counts for nothing."""
        with suppress(OSError):  # the disk is full
            self.file.close()

    def discard(self) -> None:
        """Remove all partial files."""
        self.close()
        remove_partial_output(self.path)


def partial_files(path: Path) -> tuple[Path, Path, Path]:
    """What exists of a file before it is complete: its content, the progress, and its conversion to a table."""
    progress, table = (path.with_name(f".{path.name}.{kind}{PARTIAL}") for kind in ("progress", "table"))
    return path.with_name(f"{path.name}{PARTIAL}"), progress, table


def remove_partial_output(path: Path) -> None:
    for partial in partial_files(path):
        partial.unlink(missing_ok=True)


def check_output_file(output: Path, source: Path, suffixes: Collection[str], overwrite: bool) -> None:
    """Raise a ConfigError if a file cannot be written, or would replace the input or, unasked, another file."""
    if output.suffix not in suffixes:
        raise ConfigError(f"is {output}; its name must end in {', '.join(suffixes)}", field="output")
    if not output.parent.is_dir():
        raise ConfigError(f"is {output}, but there is no folder {output.parent}", field="output")
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"is {output}, the same as --input; choose another name", field="output")
    if output.exists() and not overwrite:
        with lock_file(output):  # removes the lock, too, of a process that was killed after it completed the file
            remove_partial_output(output)
        raise ConfigError(f"is {output}, which exists; choose another name, or add --overwrite", field="output")


def content_checksum(path: Path) -> str:
    """The checksum of an input file; that of a pipe, which cannot be read again, is always another."""
    return file_checksum(path) if path.is_file() else f"pipe at {time.time()}"


@contextmanager
def open_resumable(path: Path, settings: dict[str, Any]) -> Iterator[ResumableFile]:
    """Open a file that appears when the block ends without an error.

    What was written is kept if a signal stops the block or the disk is full, and removed after any other error."""
    with lock_file(path):
        output = ResumableFile(path, settings)
        try:
            with name_written_file(path, output.partial):
                yield output
                output.finish()
        except (KeyboardInterrupt, SystemExit, OSError):
            if output.progress_file.exists():
                output.close()
                print(f"partial output of {path} is kept; run the same command to continue", file=sys.stderr)
            else:
                output.discard()
            raise
        except BaseException:
            output.discard()
            raise
