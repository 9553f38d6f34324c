"""Progress of reading a corpus: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@dataclass
class Meter:
    """Shows how far reading has come."""

    bar: Progress
    task: TaskID
    began: float
    text_bytes: int = 0
    tokens: int = 0

    def update(self, position: int, text_bytes: int, tokens: int) -> None:
        """Count what was encoded; `position` is how far on disk it reaches."""
        self.text_bytes += text_bytes
        self.tokens += tokens
        speed = self.text_bytes / 1e6 / (monotonic() - self.began)
        words = f"{self.text_bytes / 1e6:,.0f} MB  {speed:.1f} MB/s  {self.tokens / 1e6:,.1f}M tokens"
        self.bar.update(self.task, completed=position, description=words)


@contextmanager
def meter(total: int) -> Iterator[Meter]:
    """A meter for `total` bytes on disk, 0 if their number is not known."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Meter(bar, bar.add_task("reading", total=total or None), monotonic())
