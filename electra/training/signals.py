"""Signals that ask a run to stop: it takes its step to the end, and saves."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(is_quiet: bool = False) -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT are put into as they come; a second SIGINT interrupts at once."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        if not is_quiet:
            # print might be interrupted itself
            os.write(sys.stderr.fileno(), b"stopping after this step, and saving\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
