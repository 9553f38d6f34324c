"""Progress bars on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def can_show_bars(console: Console) -> bool:
    """Whether a line can be overwritten: on a terminal, and in notebooks that have the library rich needs there."""
    return find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal


def create_progress_bar() -> Progress:
    """A progress bar of at most 80 columns; nothing where bars cannot be shown."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not can_show_bars(console))


@contextmanager
def show_row_count(start: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a number of rows, with rows per second, in a progress bar."""
    console = Console(stderr=True)
    texts = "{task.completed:,.0f} rows", "{task.fields[speed]:,.0f} rows/s"
    columns = (SpinnerColumn(), *map(TextColumn, texts), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not can_show_bars(console)) as progress:
        task = progress.add_task("", total=None, completed=start, speed=0.0)

        def show(rows: int) -> None:
            speed = (rows - start) / max(1e-3, progress.tasks[0].elapsed or 0.0)
            progress.update(task, completed=rows, speed=speed)

        yield show
