"""Signals that stop a command."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from electra.errors import TrainingError

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)
POLL_SECONDS = 0.05
PARENT = os.getppid()  # another one later: the process that started this one has ended


@contextmanager
def handle_signals(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Handle signals in this block, except ignored ones (nohup); Python allows it in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if is_main}
    before = {number: previous for number, previous in before.items() if previous not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def collect_stop_signals(quiet: bool = False, is_launched: bool = False) -> Iterator[list[int]]:
    """Collect SIGTERM, SIGHUP and SIGINT in a list; a second SIGINT raises KeyboardInterrupt.

    Not if torchrun launched this process, which then gets one Ctrl-C from the terminal and again from torchrun."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received and number == signal.SIGINT and not is_launched:
            raise KeyboardInterrupt
        received.append(number)
        if not quiet:  # print is not reentrant
            os.write(2, b"stopping after this step and saving a checkpoint\n")

    with handle_signals(handle, *STOP_SIGNALS):
        yield received


@contextmanager
def exit_on_error_after(received: Sequence[int]) -> Iterator[None]:
    """End the process if this block fails after a signal was received, which may be why it failed."""
    try:
        yield
    except Exception:
        if not received:
            raise
        write_stop_message(received[0])
        sys.exit(128 + received[0])


def wait_for_file(path: Path | None, received: Sequence[int]) -> None:
    """Wait until a file exists or a signal is in `received`; does not wait without a path.

    Raises a TrainingError if the process that started this one has ended: nobody else would create the file."""
    if path is None or path.exists():
        return
    print(f"ready; waiting for {path}", file=sys.stderr, flush=True)
    while not path.exists() and not received:
        if os.getppid() != PARENT:
            raise TrainingError(f"the process that started this one ended before it created {path}")
        time.sleep(POLL_SECONDS)


@contextmanager
def clean_up_on_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that partial files and locks are removed as after Ctrl-C."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        if deferral.depth:
            deferral.signals.append(number)
            return
        received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        write_stop_message(number)
        sys.exit(128 + number)

    with handle_signals(stop, *STOP_SIGNALS):
        try:
            yield
        except Exception:
            if not received:
                raise
            if received[-1] == signal.SIGINT:  # a library has replaced the exception by one of its own
                raise KeyboardInterrupt from None
            sys.exit(128 + received[-1])


@dataclass
class Deferral:
    """Blocks of `defer_stop_signals` that the main thread is in, and the signals that came meanwhile."""

    depth: int = 0
    signals: list[int] = field(default_factory=list)


deferral = Deferral()


@contextmanager
def defer_stop_signals() -> Iterator[None]:
    """Let signals that `clean_up_on_stop_signals` handles wait for the end of this block.

    For short calls that lock something: an exception just after a lock was taken leaves it locked, and other threads
    wait for it forever."""
    if threading.current_thread() is not threading.main_thread():  # the only one that handles signals
        yield
        return
    deferral.depth += 1
    try:
        yield
    finally:
        deferral.depth -= 1
        if deferral.signals and not deferral.depth:
            signal.raise_signal(deferral.signals.pop())


def exit_on_stop_signals() -> AbstractContextManager[None]:
    """Let signals end the process while libraries are imported: an exception inside them may become any other."""

    def stop(number: int, frame: object) -> NoReturn:
        write_stop_message(number)
        os._exit(128 + number)  # the shell's convention

    return handle_signals(stop, *STOP_SIGNALS)


@contextmanager
def explain_stop(message: Callable[[], str]) -> Iterator[None]:
    """Print a message, which tells how to continue, if Ctrl-C or another signal stops this block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(message(), file=sys.stderr)
        raise


def write_stop_message(number: int) -> None:
    """Without `print`, which may be what was interrupted."""
    reason = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    os.write(2, f"electra: {reason}\n".encode())
