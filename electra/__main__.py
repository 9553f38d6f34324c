"""The command `electra`, also `python -m electra`."""

import os
import signal
import sys
from contextlib import suppress

from electra.signals import STOP_SIGNALS, exit_on_stop_signals, write_stop_message


def main() -> None:
    """Run a command; Ctrl-C ends it with one line and the shell's exit code."""
    try:
        with exit_on_stop_signals():
            from electra import cli
        cli.main()
    except KeyboardInterrupt:
        write_stop_message(signal.SIGINT)
        exit_at_once(128 + signal.SIGINT)
    except SystemExit as error:
        is_rank = "MASTER_ADDR" in os.environ  # threads of a process group may wait for other ranks
        if isinstance(error.code, int) and (error.code - 128 in STOP_SIGNALS or is_rank):
            exit_at_once(error.code)
        raise


def exit_at_once(code: int) -> None:
    """Exit without Python's clean-up, during which a thread that a library still runs would abort the process."""
    with suppress(OSError):  # a closed pipe
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
