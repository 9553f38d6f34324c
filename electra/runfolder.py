"""One process at a time in a run folder: the system holds the lock, and lets go of it however the process ends."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from electra.data.files import PARTIAL, made
from electra.errors import ConfigError

LOCK = f"lock{PARTIAL}"
"""Names the process that trains; called as a file that is being written, since one that a killed run left counts for
nothing."""


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes out of a run folder, which is made for that; left empty, it is removed again."""
    with made(run), locked(run) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # the user removed it, or the system keeps open files
                (run / LOCK).unlink()


def locked(run: Path) -> TextIO:
    """The lock file of a run folder, locked; refuses a folder that another process has locked."""
    while True:
        file = (run / LOCK).open("a+", encoding="utf-8")
        if not lock(file):
            with file:
                file.seek(0)
                raise ConfigError(
                    f"{file.read() or 'another process'} trains in {run} already; wait for it, stop it (Ctrl-C or "
                    f"kill, it saves first), or choose another --output"
                )
        if is_at(run / LOCK, file):
            return file
        file.close()  # it was removed after it was opened: the process before has just ended


def lock(file: TextIO) -> bool:
    """Lock a file unless another process has; where the system or the disk has no locks, nothing is locked."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_at(path: Path, file: TextIO) -> bool:
    """Whether an open file is still the one of this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
