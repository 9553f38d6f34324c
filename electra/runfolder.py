"""Files and folders that commands write: atomic writes, JSON, checksums, locks, and the check for changed settings.

A killed process leaves a whole file or folder or none; its partial files are named `*.electra-partial`, and only files
of that name are ever removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from electra.errors import ConfigError, DataError
from electra.formatting import join_first_names

PARTIAL = ".electra-partial"
"""Suffix of files and folders that are being written."""
LOCK = "electra.lock"
"""Names the process that uses a folder."""
LOCK_SECONDS = 0.2  # to wait for a lock
CHECKSUM = "sha256:"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # without a file's name when it is written
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # file systems without flock
CONFIG = "config.json"  # of a run and of a model
RESULT = "result.json"  # of a finished seed of a fine-tuning
SEED = "seed-"  # start of the names of a fine-tuning's folders, one for each seed
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"step-\d{9,}")
CHECKSUMS = "checksums.json"  # of the other files in its folder
MAX_JSON_BYTES = 2**27
ANOTHER_VERSION = "use the version of electra that wrote it"

Stored = TypeVar("Stored")


@dataclass(frozen=True)
class Checksums:
    """The content of checksums.json."""

    files: dict[str, str]  # by name


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically."""
    with open_atomic(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomic(path: Path, mode: str = "w", **options: Any) -> Iterator[Any]:
    """Open a file for writing; it appears under its name when the block ends without an error."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        with name_written_file(path, partial):
            with open(partial, mode, **options) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def name_written_file(path: Path, partial: Path) -> Iterator[None]:
    """Let errors of writing `partial`, as of a full disk, name the file `path`."""
    try:
        yield
    except OSError as error:
        if error.filename == str(partial) or (error.filename is None and error.errno in DISK_ERRORS):
            raise OSError(error.errno, f"cannot write ({error.strerror})", str(path)) from None
        raise


@contextmanager
def create_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when the block ends without an error."""
    folder = folder.resolve()
    if folder == Path.cwd():
        raise DataError("the output cannot be the current folder; name a new one")
    draft = folder.with_name(f".{folder.name}{PARTIAL}")
    with make_folder_removed_if_empty(folder.parent), lock_file(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists already; remove it or choose another output folder")
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process
        try:  # an interrupt may come at any moment after this
            draft.mkdir()
            yield draft
            for file in [path for path in draft.rglob("*") if path.is_file()]:
                with file.open("rb+" if os.name == "nt" else "rb") as content:  # Windows flushes writable files only
                    os.fsync(content.fileno())  # the rename may reach the disk before the content
            os.replace(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def remove_partial_files(folder: Path) -> None:
    """Remove what a killed process was writing in `folder` and its subfolders; lock the folder first.

    Subfolders with a lock are left alone: they are another command's, which may be running."""
    others = {lock.parent for lock in folder.rglob(LOCK)} - {folder}
    for path in list(folder.rglob(f"*{PARTIAL}")):
        if not others.isdisjoint(path.parents):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_missing_or_empty(folder: Path) -> bool:
    """Whether a folder is missing or holds nothing but the lock and partial files of a killed process."""
    return not folder.exists() or all(path.name == LOCK or path.name.endswith(PARTIAL) for path in folder.iterdir())


@contextmanager
def make_folder_removed_if_empty(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; on exit remove those of them that are still empty."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in created:
                path.rmdir()


@contextmanager
def lock_folder(folder: Path, wait_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Create a folder and keep other processes out of it."""
    with make_folder_removed_if_empty(folder), hold_lock(folder / LOCK, folder, wait_seconds):
        yield


def lock_file(path: Path, wait_seconds: float = LOCK_SECONDS) -> AbstractContextManager[None]:
    """Keep other processes from writing a file or folder."""
    return hold_lock(path.with_name(f".{path.name}.lock{PARTIAL}"), path, wait_seconds)


@contextmanager
def hold_lock(path: Path, locked: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock `path` of the file or folder `locked`; it ends with this process, however it ends."""
    lock = FileLock(path, timeout=wait_seconds, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{read_lock_holder(path)} is using {locked}; wait for it, stop it (Ctrl-C or kill; training saves a "
            "checkpoint first), or choose another --output"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        yield
        return
    try:
        with suppress(PermissionError):  # Windows lets nobody write or remove a locked file
            path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        with suppress(PermissionError):
            path.unlink(missing_ok=True)  # while it is locked: a waiting process then creates a new one
        lock.release()


def read_lock_holder(lock: Path) -> str:
    with suppress(OSError):  # the holder may just have ended
        return lock.read_text(encoding="utf-8") or "another process"
    return "another process"


def dump_json(value: Any, indent: int | None = None) -> str:
    """Serialize to JSON; NaN and infinities become null, objects without a JSON form their `str`."""
    return json.dumps(replace_nonfinite(value), indent=indent, default=str)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    write_file(path, dump_json(value, indent=2) + "\n")


def write_stored(path: Path, value: Any) -> None:
    """Write JSON with a checksum of its content in it, which `read_json` verifies."""
    content = json.loads(dump_json(value))
    write_json(path, content | {"checksum": json_checksum(content)})


def json_checksum(content: dict[str, Any]) -> str:
    return CHECKSUM + hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises a DataError that names the file if it is missing, damaged or was changed."""
    if not path.parent.is_dir():
        is_file = path.parent.exists()
        raise DataError(f"{path.parent} is a file, not a folder" if is_file else f"there is no folder {path.parent}")
    if not path.is_file():
        inside = sorted(other.parent.name for other in path.parent.glob(f"*/{path.name}"))
        hint = f"; did you mean one of its folders: {join_first_names(inside)}?" if inside else ""
        raise DataError(f"{path.parent} has no {path.name}{hint}; {repair_advice(path)}".rstrip("; "))
    if path.name != CHECKSUMS:
        verify_checksum(path)
    with report_damage(path):
        value = msgspec.json.decode(read_bounded(path), type=dict[str, Any])
    if str(value.get("checksum")).startswith(CHECKSUM) and value.pop("checksum") != json_checksum(value):
        raise damaged_file_error(path, 'its checksum differs; if you changed it on purpose, remove its line "checksum"')
    return value


def read_bounded(path: Path) -> bytes:
    """The content of a file that is not too large to be JSON or a vocabulary, nor endless as a pipe or device is."""
    if not path.is_file():
        raise damaged_file_error(path, "not a file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file_error(path, f"{path.stat().st_size:,} bytes are more than any such file has")
    return path.read_bytes()


def read_stored(path: Path, kind: type[Stored]) -> Stored:
    """Read a JSON file that holds the fields of a dataclass, and their types; the dataclass checks their bounds.

    Raises a DataError that names the file, what is wrong and what to do."""
    return convert_stored(read_json(path), kind, path)


def convert_stored(value: Any, kind: type[Stored], path: Path) -> Stored:
    """A dataclass from the JSON `value`, which was read from `path`; no field may be missing, even one with a default,
    which may not be what was stored."""
    is_verified = path.with_name(CHECKSUMS).exists()  # then it is as it was written, and nothing should be removed
    with report_damage(path, ANOTHER_VERSION if is_verified else repair_advice(path) or ANOTHER_VERSION):
        stored: Any = msgspec.convert(value, kind)
    if is_dataclass(kind) and (field := find_other_field(value, asdict(stored))):
        raise damaged_file_error(path, f"Missing or unknown field - at `{field[1:]}`", ANOTHER_VERSION)
    return stored


def find_other_field(value: Any, expected: Any) -> str | None:
    """The path of a field that only one of two JSON values has."""
    if isinstance(value, list) and isinstance(expected, list | tuple):
        value, expected = dict(enumerate(value)), dict(enumerate(expected))
    if not isinstance(value, dict) or not isinstance(expected, dict):
        return None
    for name in [*value, *expected]:
        if name not in value or name not in expected:
            return f".{name}"
        if inner := find_other_field(value[name], expected[name]):
            return f".{name}{inner}"
    return None


@contextmanager
def report_damage(path: Path, advice: str | None = None) -> Iterator[None]:
    """Turn all that JSON of another form can cause into a DataError."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error).replace("`$.", "`")
        raise damaged_file_error(path, reason, advice) from None


def damaged_file_error(path: Path, reason: str, advice: str | None = None) -> DataError:
    """The error of a file that is not as it was written, with what to do."""
    advice = advice or repair_advice(path) or "copy or create it again"
    return DataError(f"{path} is damaged or not in the expected format ({reason}); {advice}")


def repair_advice(path: Path) -> str:
    """What to do about a missing or damaged file; empty if it is in no checkpoint and no fine-tuning."""
    folder = path.parent
    for parent in (folder, folder.parent):
        if re.fullmatch(rf"{SEED}\d+", parent.name) and (parent / RESULT).exists():
            return f"remove {parent}, then run electra finetune (or glue) again"
    if folder.parent.name != CHECKPOINTS:
        return ""
    earlier = [other.name for other in checkpoint_folders(folder.parent.parent) if other < folder]
    return f"remove {folder} to {f'use {earlier[-1]}' if earlier else 'start over: there is no earlier checkpoint'}"


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return CHECKSUM + hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """List the checksums of all files in a folder, for `verify_checksum`."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != CHECKSUMS]
    write_stored(folder / CHECKSUMS, asdict(Checksums({path.name: file_checksum(path) for path in files})))


def remove_written_folder(folder: Path) -> None:
    """Remove a folder atomically, so that a reader finds all of it or nothing.

    One with files that its checksums do not list is kept: electra did not write them."""
    with suppress(DataError):
        listed = read_stored(folder / CHECKSUMS, Checksums).files
        if all(path.name in listed or path.name == CHECKSUMS for path in folder.iterdir()):
            removed = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}{PARTIAL}")
            os.replace(folder, removed)
            try:
                shutil.rmtree(removed)
            finally:  # after a signal
                shutil.rmtree(removed, ignore_errors=True)


def verify_checksum(path: Path) -> None:
    """Raise a DataError if a file is missing or has another checksum than is listed beside it; others pass."""
    list_path = path.with_name(CHECKSUMS)
    if list_path.exists():
        listed = read_stored(list_path, Checksums).files.get(path.name)
        if listed is not None and not (path.is_file() and file_checksum(path) == listed):
            is_checkpoint = path.parent.parent.name == CHECKPOINTS
            hint = "" if is_checkpoint else f"; if you changed it on purpose, remove {CHECKSUMS}"
            raise damaged_file_error(path, f"it is missing or its checksum differs{hint}")


def check_same_settings(
    folder: Path | str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    ignore: Collection[str] = (),
    advice: str = "",
) -> None:
    """Raise if a folder (or what `folder` describes) was started with settings other than `now`, both as read from
    JSON; without `advice`, the error also suggests to remove the folder."""
    if changes := describe_changed_settings(before, now, ignore):
        start_over = f"start over: rm -r {shlex.quote(str(folder))}"
        advice = advice or f"use the same settings, choose another --output, or {start_over}"
        raise ConfigError(f"{folder} was started with other settings: {'; '.join(changes)}; {advice}")


def describe_changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ()
) -> list[str]:
    """Describe each setting that differs, as a flag; of a table (such as files with their sizes), the first entry."""
    changes = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if name in ignore or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
            changes.append(describe_change(f"{name} {key}", old.get(key, "absent"), new.get(key, "absent")))
        else:
            flag = f"--{name.replace('_', '-')}" if name.isidentifier() else name
            changes.append(describe_change(flag, old, new))
    return changes


def describe_change(name: str, old: Any, new: Any) -> str:
    if str(old).startswith(CHECKSUM) and str(new).startswith(CHECKSUM):
        return f"{name} has other content"
    old, new = ("unset" if value is None else value for value in (old, new))
    return f"{name} was {old} and is now {new}"


def checkpoint_folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; folders that others put beside them are none."""
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted((path for path in folders if path.is_dir()), key=lambda path: int(path.name.removeprefix("step-")))
