"""What a finished run was: its costs, and its held-out measures along the way."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from electra.config import construct, convert, flat_defaults, flat_fields
from electra.errors import DataError
from electra.finetuning.glue import LEFT_OUT, TABLE
from electra.finetuning.jobs import is_fine_tuning
from electra.model.storage import CONFIG, read_model_config
from electra.pretraining.config import BUDGETS, CHANGEABLE, PretrainConfig, recipe_settings
from electra.pretraining.phases import Phase, checkpoint_phase, plan_phases
from electra.pretraining.task import held_out_loader, max_held_out_rows
from electra.report.costs import stored
from electra.runfolder import read_json
from electra.training.checkpoint import STATE, checkpoint_folders
from electra.training.logging import METRICS, read_metrics
from electra.training.trainer import TrainState

LOWER = ("loss",)  # how measures end that are better when they are lower
HIGHER = ("accuracy", "precision", "recall", "auc")
SPOKEN = ("recipe", "style", "generator", "optimizer")  # settings whose values say what they are values of
UNTOLD = CHANGEABLE | {"size", "objective", *BUDGETS}  # settings with a column of their own, or of no weight


@dataclass(frozen=True)
class Point:
    """Held-out measures at one moment of a run."""

    step: int
    minutes: float
    flops: float
    measures: dict[str, float]
    phase: int = 0


@dataclass(frozen=True)
class Glue:
    """A run's score: the mean over tasks, as `electra glue` has it."""

    mean: float
    tasks: list[str]


@dataclass(frozen=True)
class Run:
    """A finished run; a branch's costs include its trunk's."""

    folder: str
    size: str
    objective: str  # of several phases, one after the other
    held_out: str  # how much text it was measured on
    departures: str  # from the defaults of its recipe and size
    parameters: int
    steps: int
    tokens: int
    minutes: float
    tokens_per_second: float
    flops: float  # matrix products only
    final: dict[str, float]
    best: dict[str, float]  # of the measures of which one knows whether more or less is better, in the last phase
    points: list[Point]
    glue: Glue | None

    def loss_kind(self) -> str:
        """What its loss adds up: losses of different kinds do not compare."""
        return self.objective if "mlm_loss" in self.final else f"{self.objective} without a generator"


def read_run(folder: Path, table: Path | None) -> Run:
    """Read a run folder, and the table of its scores; raises where the run is unfinished or damaged."""
    try:
        return summed_up(folder, table)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{CONFIG}, {METRICS} or {STATE} is damaged: {error!r}") from None


def summed_up(folder: Path, table: Path | None) -> Run:
    """The run in a folder."""
    settings, pair, lines = recorded_settings(folder), read_model_config(folder), read_metrics(folder / METRICS)
    phases = plan_phases(settings, pair)
    place, last = last_place(folder, phases), phases[-1].config
    ends = ends_of(phases, place, lines)
    flops_until = partial(flops_of, phases, ends)
    points = points_of(lines, flops_until, ends)
    if not points or points[-1].step != place.step:
        raise DataError(f"damaged: {METRICS} has no measures of its last step, {place.step:,}")
    return Run(
        folder=str(folder),
        size=settings.model.size,
        objective=", ".join(dict.fromkeys(phase.config.objective.name for phase in phases)),
        held_out=f"up to {max_held_out_rows(last)} rows of {held_out_loader(last).length} tokens",
        departures=departures_of(settings),
        parameters=stored(pair),
        steps=place.step,
        tokens=place.tokens,
        minutes=place.seconds / 60,
        tokens_per_second=place.tokens / place.seconds if place.seconds else 0.0,
        flops=flops_until(place.step),
        final=points[-1].measures,
        best=best_of([point for point in points if point.step > place.start_step and point.phase == points[-1].phase]),
        points=points,
        glue=None if table is None else score_of(folder, table),
    )


def recorded_settings(folder: Path) -> PretrainConfig:
    """The settings of a run."""
    require_run(folder)
    record = read_json(folder / CONFIG).get("pretraining")
    if record is None:
        raise DataError("no run of electra pretrain")
    return construct(PretrainConfig, convert(PretrainConfig, record))


def require_run(folder: Path) -> None:
    """Refuse what is no run, and say what it is instead."""
    if not folder.is_dir():
        raise DataError("it is a file, not a run's folder" if folder.exists() else "there is no such folder")
    if is_fine_tuning(folder):
        raise DataError("a fine-tuning, and no run of electra pretrain; scores of runs come in by --glue")
    if not (folder / METRICS).is_file():
        holds_runs = any(folder.glob(f"*/{METRICS}"))
        advice = f"name the runs inside: {folder}/*" if holds_runs else f"it has no {METRICS}"
        raise DataError(f"no run: {advice}")


def departures_of(settings: PretrainConfig) -> str:
    """How a run departs from the defaults of its recipe and size, in the words of flags."""
    defaults = flat_defaults(PretrainConfig)
    defaults |= recipe_settings(settings.recipe, settings.model.size, settings.model.style)
    changed = [
        (name, value) for name, value in flat_fields(settings).items() if name not in UNTOLD and value != defaults[name]
    ]
    return ", ".join(in_words(*setting) for setting in sorted(changed, key=lambda setting: setting[0] not in SPOKEN))


def in_words(name: str, value: Any) -> str:
    """A setting as one would say it: modern, no-hands-over, layers 6."""
    if name in SPOKEN:
        return str(value)
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    return f"{flag} {' '.join(value) if isinstance(value, tuple) else value}"


def last_place(folder: Path, phases: list[Phase]) -> TrainState:
    """Where a run ended; raises if its budget is not spent."""
    found = checkpoint_folders(folder)
    if not found:
        raise DataError("unfinished: it has no checkpoint yet")
    place = TrainState(**read_json(found[-1] / STATE)["trainer"])
    if (number := checkpoint_phase(found[-1]) + 1) < len(phases):
        raise DataError(f"unfinished: in phase {number} of {len(phases)}; go on with it by electra pretrain --resume")
    share = phases[-1].stage_budget.fraction(place.step - place.start_step, place.seconds - place.start_seconds)
    if share < 1:
        raise DataError(f"unfinished: {share:.0%} of its budget is spent; go on with it by electra pretrain --resume")
    return place


def ends_of(phases: list[Phase], place: TrainState, lines: list[dict[str, Any]]) -> list[float]:
    """The steps at which the phases of a finished run ended, told from its end; a trunk counts as the first's."""
    after = [phases[number + 1 :] for number in range(len(phases))]
    if phases[-1].budget.steps is not None:
        return [place.step - sum(phase.budget.steps or 0 for phase in rest) for rest in after]
    seconds = [place.seconds - sum(phase.budget.seconds or 0.0 for phase in rest) for rest in after]
    steps, clock = clock_of(lines)
    return [*np.interp(seconds[:-1], clock, steps), place.step]


def flops_of(phases: list[Phase], ends: list[float], step: int) -> float:
    """Operations of a run until a step."""
    spans = zip(phases, [0.0, *ends], ends, strict=False)
    return float(sum(step_flops(phase) * max(0.0, min(step, end) - begin) for phase, begin, end in spans))


def step_flops(phase: Phase) -> int:
    """Operations of a step of training."""
    return phase.config.loader.batch_size * phase.flops_per_row()


def clock_of(lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Steps, and the seconds of training at each, from the lines of training."""
    train = [line for line in lines if line["kind"] == "train"]
    return [0, *(line["step"] for line in train)], [0.0, *(line["seconds"] for line in train)]


def points_of(lines: list[dict[str, Any]], flops_until: Callable[[int], float], ends: list[float]) -> list[Point]:
    """The lines of held-out measures; their minutes stand in the lines of training around them, and their phases are
    told by where those end."""
    steps, seconds = clock_of(lines)
    points = []
    for line in lines:
        if line["kind"] == "validation":
            measures = {name: number for name, number in line.items() if name not in ("kind", "step")}
            minutes = float(np.interp(line["step"], steps, seconds)) / 60
            phase = sum(line["step"] > end for end in ends[:-1])
            points.append(Point(line["step"], minutes, flops_until(line["step"]), measures, phase))
    return points


def best_of(points: list[Point]) -> dict[str, float]:
    """The best that each measure ever was."""
    best = {}
    for name in points[-1].measures:
        values = [point.measures[name] for point in points if name in point.measures]
        if name.endswith(LOWER):
            best[name] = min(values)
        elif name.endswith(HIGHER):
            best[name] = max(values)
    return best


def score_of(run: Path, table: Path) -> Glue | None:
    """The score of a run in a table of `electra glue`; where it cannot be read, standard error says why."""
    try:
        return read_glue(table)
    except (DataError, OSError) as error:
        print(f"no score for {run}: {error}", file=sys.stderr)
        return None


def read_glue(table: Path) -> Glue | None:
    """The score in a table of `electra glue`; one without a mean has none."""
    content = read_table(table)
    try:
        tasks = [line["task"] for line in content["lines"] if line["task"] != LEFT_OUT]
        return None if content["mean"] is None else Glue(content["mean"], tasks)
    except (KeyError, TypeError):
        raise DataError(f"{table} is no table of electra glue; make it again with the command that made it") from None


def read_table(table: Path) -> dict[str, Any]:
    """What a table of `electra glue` says."""
    if not table.is_file():
        raise DataError(f"there is no {table.name} in {table.parent}; name a folder that electra glue wrote")
    return read_json(table)


def find_tables(given: tuple[str, ...], runs: list[Path]) -> dict[Path, Path]:
    """The GLUE table of each run that has one: given for it, or lying in a folder in it."""
    found: dict[Path, Path] = {}
    for run in runs:
        inside = sorted([*run.glob(TABLE), *run.glob(f"*/{TABLE}")], key=lambda path: path.stat().st_mtime)
        found |= {run: inside[-1]} if inside else {}
    for entry in given:
        found |= given_table(entry, runs)
    return found


def given_table(entry: str, runs: list[Path]) -> dict[Path, Path]:
    """The run that FOLDER, or RUN=FOLDER, is the table of, and the table."""
    run, _, folder = entry.rpartition("=")
    table = Path(folder) if folder.endswith(".json") else Path(folder, TABLE)
    model = Path(run or str(read_table(table).get("model"))).resolve()
    for other in runs:
        if model.is_relative_to(other.resolve()):
            return {other: table}
    raise DataError(f"--glue {entry} is of {model}, none of the runs; say whose it is: --glue RUN={folder}")
