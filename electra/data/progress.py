"""Progress bars of commands that read a corpus."""

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


def create_progress_bar() -> Progress:
    """A progress bar on a terminal, of at most 80 columns; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
