"""Metrics of a run: metrics.jsonl, TensorBoard, trackers, and a progress bar with losses, speed and remaining time."""

import importlib
import json
import math
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from torch import Tensor

from electra.errors import ConfigError, TrainingError
from electra.formatting import format_count
from electra.progress import can_show_bars
from electra.runfolder import damaged_file_error, dump_json, read_stored, report_damage, write_file, write_stored
from electra.training.config import TrackerName

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_LINE_BYTES = 1 << 20
PROJECT = "electra"
TRACKED_RUNS = "tracking.json"

MetricsCallback = Callable[[dict[str, Any]], object]
"""Called with each line of metrics.jsonl, and the run folder under `run`."""
CALLBACKS: list[MetricsCallback] = []
DIVERGENCE_RATIO = 10
"""A training diverged if its loss is above this multiple of the loss of a uniform prediction."""


class MetricsLine(TypedDict):
    """What a line of metrics.jsonl has besides metrics, which are null where they are not finite."""

    kind: Literal["train", "validation"]
    step: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    seconds: NotRequired[float]  # of training


class RunningAverages:
    """Average losses and speed of the steps since the last report; losses stay on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = self.timed_steps = self.tokens = 0
        self.seconds = 0.0

    def add_step(self, metrics: dict[str, Tensor], tokens: int, seconds: float | None) -> None:
        """Add a step with its losses, gradient norm and `nonfinite_steps` (0 or 1); `seconds` is None if untimed."""
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.steps += 1
        if seconds is not None:
            self.timed_steps += 1
            self.tokens += tokens
            self.seconds += seconds

    def count_nonfinite_steps(self) -> int:
        return int(self.sums["nonfinite_steps"].item()) if self.sums else 0

    def means(self) -> dict[str, float]:
        """Means over the steps with finite losses."""
        steps = max(1, self.steps - self.count_nonfinite_steps())
        return {name: (value / steps).item() for name, value in self.sums.items() if name != "nonfinite_steps"}

    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def seconds_per_step(self) -> float:
        return self.seconds / max(1, self.timed_steps)


@contextmanager
def call_with_metrics(callback: MetricsCallback) -> Iterator[None]:
    """Call a function with the metrics that this process writes in this block; its exceptions end the training."""
    CALLBACKS.append(callback)
    try:
        yield
    finally:
        CALLBACKS.remove(callback)


@dataclass(frozen=True)
class TrackedRuns:
    """The content of tracking.json: the id of a run by tracker."""

    ids: dict[str, str]


class Tracker:
    """A run of a module with the interface of wandb; an error of it is reported once and does not end the training."""

    def __init__(self, name: TrackerName, run: Path, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.module = import_tracker(name)
        run_id, config = load_run_id(name, run), json.loads(dump_json(settings))  # paths as texts
        options: dict[str, Any] = {"project": PROJECT, "name": run_id, "config": config, "resume": "allow"}
        if name == "wandb":
            options |= {"id": run_id, "dir": str(run)}  # Trackio resumes by name
        self.run: Any = None
        self.run = self.attempt(lambda: self.module.init(**options))

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"{kind}/{name}": value for name, value in metrics.items()}
        self.attempt(lambda: self.run and self.run.log(values, step=step))

    def finish(self) -> None:
        self.attempt(lambda: self.run and self.module.finish())  # run.finish() would let Trackio finish again at exit

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Call the tracker, whose messages belong on stderr; after an error it is not called again."""
        try:
            with redirect_stdout(sys.stderr):
                return action()
        except Exception as error:
            self.run = None
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"{self.name} failed, the training continues without it: {reason}", file=sys.stderr, flush=True)


def import_tracker(name: TrackerName) -> Any:
    """The module of a tracker; raises a ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"is {name}, which is not installed: pip install {name}", field="track") from None


def check_tracker(name: TrackerName, tensorboard: bool = False) -> None:
    """Raise a ConfigError, before anything is written, if a tracker is not installed."""
    if name != "none":
        import_tracker(name)
    if tensorboard:
        import_summary_writer()


def load_run_id(name: TrackerName, run: Path) -> str:
    """The id under which a tracker knows a run; a new one is stored in the run folder."""
    path = run / TRACKED_RUNS
    ids = read_stored(path, TrackedRuns).ids if path.exists() else {}
    if name not in ids:
        run = run.resolve()
        ids |= {name: f"{run.parent.name}-{run.name}-{uuid.uuid4().hex[:8]}"}
        write_stored(path, asdict(TrackedRuns(ids)))
    return ids[name]


class MetricsLogger:
    """Appends metrics to metrics.jsonl and, if asked, TensorBoard and a tracker; removes what was written after
    `last_step`."""

    def __init__(self, run: Path, last_step: int, tensorboard: bool = False, tracker: Tracker | None = None) -> None:
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(self.path) if line["step"] <= last_step]
        write_file(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.evaluated_step = max((line["step"] for line in kept if line["kind"] == "validation"), default=-1)
        self.tensorboard = None
        if tensorboard:
            self.tensorboard = import_summary_writer()(str(run / "tensorboard"), purge_step=last_step + 1)
        self.tracker = tracker

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Append a line; `kind` is train or validation."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(dump_json({"kind": kind, "step": step, **metrics}) + "\n")
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self.tracker is not None:
            self.tracker.log(kind, step, metrics)
        for callback in CALLBACKS:
            callback({"run": str(self.path.parent), "kind": kind, "step": step, **metrics})

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.finish()
        if self.tensorboard is not None:
            self.tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, without a last one that is incomplete: its process was killed or is writing."""
    metrics: list[dict[str, Any]] = []
    if not path.exists():
        return metrics
    if not path.is_file():  # a pipe or device may be endless
        raise damaged_file_error(path, "not a file")
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_METRICS_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and len(line) < MAX_METRICS_LINE_BYTES:
                break
            with report_damage(path, advice=f"remove its line {number}"):
                metrics.append(msgspec.json.decode(line, type=dict[str, int | float | str | None]))
                msgspec.convert(metrics[-1], MetricsLine)
    return metrics


def import_summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs TensorBoard: pip install tensorboard") from None
    return SummaryWriter


class ProgressBar(Progress):
    """A progress bar on standard error, below it losses and speed; plain lines where bars cannot be shown."""

    def __init__(self, quiet: bool = False) -> None:
        columns = (BarColumn(20), TextColumn("{task.description}"))
        console = Console(file=sys.stderr, quiet=quiet, highlight=False, markup=False)
        super().__init__(*columns, console=console, disable=quiet or not can_show_bars(console))
        self.details = ""
        self.task = self.add_task("", total=1.0)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield Text(getattr(self, "details", ""), no_wrap=True, overflow="ellipsis")  # not set yet in __init__

    def set_fraction(self, fraction: float) -> None:
        self.update(self.task, completed=fraction)

    def show_status(self, progress: str, details: str) -> None:
        """Set the texts beside and below the bar, which together are wider than most terminals."""
        if self.disable:
            self.print_line(f"{progress}  {details}")
        self.details = details
        self.update(self.task, description=progress)

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True)


def check_not_diverged(
    name: str, loss: float | None, uniform_loss: float, advice: str, max_ratio: float = DIVERGENCE_RATIO
) -> None:
    """Raise a TrainingError if the last loss of a training is not finite (also None) or above `max_ratio`."""
    loss = math.nan if loss is None else loss
    if not math.isfinite(loss) or loss > max_ratio * uniform_loss:
        is_finite = math.isfinite(loss)
        value = f"{loss:,.1f}, and {uniform_loss:.2f} for uniform predictions" if is_finite else "not finite"
        raise TrainingError(
            f"training diverged: {name} is {value}; {advice}; try a lower --learning-rate or a longer --warmup"
        )


@dataclass(frozen=True)
class TrainResult:
    """Result of a training."""

    run: str
    checkpoint: str
    step: int
    tokens: int
    seconds: float
    nonfinite_steps: int
    metrics: dict[str, float]  # of the last evaluation
    signal: int = 0  # that stopped it; 0: the budget is used up
    was_finished: bool = False  # already before it was resumed
    assessment: dict[str, str] = field(default_factory=dict)  # what was learnt, in words by topic

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0

    def __str__(self) -> str:
        used = f"{format_count(self.step, 'step')}, {self.tokens:,} tokens, {self.seconds / 60:.1f} minutes of training"
        lines = [f"{self.describe_status()}: {used}"]
        if self.nonfinite_steps:
            lines.append(
                f"{format_count(self.nonfinite_steps, 'step')} skipped because of a non-finite loss or gradient"
            )
        lines += [f"  {name:<24}{value:.4f}" for name, value in self.metrics.items()]
        lines += [f"checkpoint: {self.checkpoint}", *self.assessment.values()]
        if self.was_finished:
            lines.append(
                "to train longer: --resume with a larger budget (only without --phases), or a new --output with "
                f"--init {self.run}"
            )
        return "\n".join(lines)

    def describe_status(self) -> str:
        if self.signal:
            return f"stopped by {signal.Signals(self.signal).name}, continue with --resume"
        return "already finished, its budget is used up" if self.was_finished else "finished"
