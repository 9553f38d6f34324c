"""What a finished run was: its costs, and its held-out measures along the way."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from electra.errors import DataError
from electra.finetune.glue import LEFT_OUT
from electra.model.electra import ElectraConfig
from electra.model.flops import TRAINING, flops, items_of
from electra.model.storage import CONFIG, model_config, read_json
from electra.objective.masking import slots
from electra.report.costs import stored
from electra.training.checkpoint import STATE, checkpoint_folders
from electra.training.journal import METRICS, read_lines
from electra.training.pretraining import PretrainConfig
from electra.training.trainer import Place

LOWER = ("loss",)  # how measures end that are better when they are lower
HIGHER = ("accuracy", "precision", "recall", "auc")
TABLE = "table.json"


@dataclass(frozen=True)
class Point:
    """Held-out measures at one moment of a run."""

    step: int
    minutes: float
    flops: float
    measures: dict[str, float]


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
    objective: str
    parameters: int
    steps: int
    tokens: int
    minutes: float
    tokens_per_second: float
    flops: float  # matrix products only
    final: dict[str, float]
    best: dict[str, float]  # of the measures of which one knows whether more or less is better
    points: list[Point]
    glue: Glue | None


def read_run(folder: Path, table: Path | None) -> Run:
    """Read a run folder, and the table of its scores; raises where the run is unfinished or damaged."""
    try:
        return summed_up(folder, table)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{CONFIG}, {METRICS} or {STATE} is damaged: {error!r}") from None


def summed_up(folder: Path, table: Path | None) -> Run:
    """The run in a folder."""
    settings = recorded_settings(folder)
    place = last_place(folder, settings)
    pair = model_config(folder)
    step_flops = settings.batch_size * row_flops(pair, settings)
    points = points_of(read_lines(folder / METRICS), step_flops)
    if not points or points[-1].step != place.step:
        raise DataError(f"damaged: {METRICS} has no measures of its last step, {place.step:,}")
    return Run(
        folder=str(folder),
        size=settings.size,
        objective=settings.objective,
        parameters=stored(pair),
        steps=place.step,
        tokens=place.tokens,
        minutes=place.seconds / 60,
        tokens_per_second=place.tokens / place.seconds if place.seconds else 0.0,
        flops=float(place.step * step_flops),
        final=points[-1].measures,
        best=best_of(points),
        points=points,
        glue=None if table is None else read_glue(table),
    )


def recorded_settings(folder: Path) -> PretrainConfig:
    """The settings a run was begun with; those of other versions that this one does not know are passed over."""
    if not (folder / METRICS).is_file():
        raise DataError(f"no run: it has no {METRICS}")
    record = read_json(folder / CONFIG).get("pretraining")
    if record is None:
        raise DataError("no run of electra pretrain")
    known = {field.name for field in fields(PretrainConfig)}
    return PretrainConfig(**{name: value for name, value in record.items() if name in known})


def last_place(folder: Path, settings: PretrainConfig) -> Place:
    """Where a run ended; raises if its budget is not spent."""
    found = checkpoint_folders(folder)
    if not found:
        raise DataError("unfinished: it has no checkpoint yet")
    place = Place(**read_json(found[-1] / STATE)["place"])
    share = settings.budget().share(place.step - place.start_step, place.seconds - place.start_seconds)
    if share < 1:
        raise DataError(f"unfinished: {share:.0%} of its budget is spent; go on with it by electra pretrain --resume")
    return place


def row_flops(pair: ElectraConfig, settings: PretrainConfig) -> int:
    """Operations of training on one row."""
    parts = items_of(pair, settings.length, slots(settings.length, settings))
    return TRAINING * sum(map(flops, parts.values()))


def points_of(lines: list[dict[str, Any]], step_flops: int) -> list[Point]:
    """The lines of held-out measures; their minutes stand in the lines of training around them."""
    clock = [(0, 0.0), *((line["step"], line["seconds"]) for line in lines if line["kind"] == "train")]
    steps, seconds = zip(*clock, strict=True)
    points = []
    for line in lines:
        if line["kind"] == "validation":
            measures = {name: number for name, number in line.items() if name not in ("kind", "step")}
            minutes = float(np.interp(line["step"], steps, seconds)) / 60
            points.append(Point(line["step"], minutes, float(line["step"] * step_flops), measures))
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


def read_glue(table: Path) -> Glue:
    """The score in a table of `electra glue`."""
    content = read_json(table)
    try:
        return Glue(content["mean"], [line["task"] for line in content["lines"] if line["task"] != LEFT_OUT])
    except (KeyError, TypeError):
        raise DataError(f"{table} is no table of electra glue; make it again with the command that made it") from None


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
    model = Path(run or str(read_json(table).get("model"))).resolve()
    for other in runs:
        if model.is_relative_to(other.resolve()):
            return {other: table}
    raise DataError(f"--glue {entry} is of {model}, none of the runs; say whose it is: --glue RUN={folder}")
