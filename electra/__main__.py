"""The command `electra`, also `python -m electra`, which is how torchrun starts it."""

import signal
import sys

from electra.signals import exit_on_stop_signals, write_stop_message


def main() -> None:
    """Run a command; Ctrl-C ends it with one line and the shell's exit code."""
    try:
        with exit_on_stop_signals():
            from electra import cli
        cli.main()
    except KeyboardInterrupt:
        write_stop_message(signal.SIGINT)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
