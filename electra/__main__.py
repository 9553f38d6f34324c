"""The command `electra`, which is also `python -m electra`; torchrun starts it the second way."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

INTERRUPTED = "electra: interrupted"
EXIT_CODE = 128 + signal.SIGINT  # as the shell has it


def main() -> None:
    """Run a command; Ctrl-C ends it in one line, also while libraries are still being read."""
    try:
        with ending_at_once():
            from electra import cli

            if len(sys.argv) > 1 and sys.argv[1] in cli.COMMANDS:
                cli.import_stage(sys.argv[1])
        cli.main()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(EXIT_CODE)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process where it stands: an exception may leave a library's own code as anything, or abort."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # Ctrl-C is not ignored, as it is in the background
        signal.signal(signal.SIGINT, end)
    yield
    signal.signal(signal.SIGINT, before)


def end(number: int, frame: object) -> None:
    """End the process, and say so."""
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


if __name__ == "__main__":
    main()
