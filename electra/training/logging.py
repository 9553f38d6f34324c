"""What a run says of itself: metrics.jsonl, TensorBoard, and a progress bar with loss, speed and time left."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import Tensor

from electra.runfolder import dump_json, write_file

METRICS = "metrics.jsonl"


class Window:
    """Losses and speed since the last line; losses stay on the device until they are asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = self.timed_steps = self.tokens = 0
        self.seconds = 0.0

    def add(self, numbers: dict[str, Tensor], tokens: int, seconds: float | None) -> None:
        """Count a step: its losses, the gradient's norm, whether it was skipped; and, where that counts, its time."""
        for name, number in numbers.items():
            self.sums[name] = self.sums[name] + number if name in self.sums else number.clone()
        self.steps += 1
        if seconds is not None:
            self.timed_steps += 1
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    def skipped(self) -> int:
        """Steps that were not taken."""
        return int(self.sums["skipped"].item()) if self.sums else 0

    def means(self) -> dict[str, float]:
        """Means over the steps taken."""
        taken = self.steps - self.skipped()
        return {name: (value / max(1, taken)).item() for name, value in self.sums.items() if name != "skipped"}

    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def pace(self) -> float:
        """Seconds a step."""
        return self.seconds / max(1, self.timed_steps)


class MetricsLogger:
    """The metrics of a run, a line a time; what a killed run wrote after its last checkpoint is forgotten."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / METRICS
        kept = [line for line in read_lines(self.path) if line["step"] <= step]
        write_file(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.board = open_tensorboard(run, step)

    def write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        """Add a line: `kind` is train or validation."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(dump_json({"kind": kind, "step": step, **numbers}) + "\n")
        if self.board is not None:
            for name, number in numbers.items():
                self.board.add_scalar(f"{kind}/{name}", number, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; the last may have been cut by a kill."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def open_tensorboard(run: Path, step: int) -> Any:
    """A TensorBoard writer in the run folder, where TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)


def duration(minutes: float) -> str:
    """Minutes in the unit that people would use."""
    for unit, size in (("days", 24 * 60), ("hours", 60)):
        if minutes > 2 * size:
            return f"{minutes / size:.1f} {unit}"
    return f"{minutes:.1f} minutes"


class ProgressBar:
    """A progress bar on standard error: share of the budget, step, time left, loss, tokens a second."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"))
        self.progress = Progress(
            *columns, console=Console(file=sys.stderr), disable=is_quiet or not sys.stderr.isatty()
        )
        self.task = self.progress.add_task("", total=1.0)

    def __enter__(self) -> "ProgressBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def move(self, share: float) -> None:
        """Move the bar to `share` of the budget."""
        self.progress.update(self.task, completed=share)

    def describe(self, text: str) -> None:
        """Put a text beside the bar; where there is no terminal, print it."""
        if self.progress.disable:
            self.say(text)
        self.progress.update(self.task, description=text)

    def say(self, sentence: str) -> None:
        """A line above the bar; where there is no terminal, a plain line."""
        if self.is_quiet:
            return
        if self.progress.disable:
            print(sentence, file=sys.stderr, flush=True)
        else:
            self.progress.console.print(sentence, highlight=False)
