"""The command `electra`, also `python -m electra`, which is how torchrun starts it."""

import sys

from electra.commands import EXIT_INTERRUPTED, INTERRUPTED, exit_on_interrupt


def main() -> None:
    """Run a command; Ctrl-C ends it with one line and the shell's exit code."""
    try:
        with exit_on_interrupt():
            from electra import cli
        cli.main()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
