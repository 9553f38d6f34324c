"""Where progress bars can be shown."""

from importlib.util import find_spec

from rich.console import Console


def can_show_bars(console: Console) -> bool:
    """Whether a line can be overwritten: on a terminal, and in notebooks that have the library rich needs there."""
    return find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
