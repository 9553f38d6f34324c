"""Pre-training runs: their cost, and their held-out metrics over time."""

import sys
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from electra.config import command_line_words, config_from_flat_values, flat_defaults, flat_values
from electra.errors import DataError
from electra.finetuning.glue import EXCLUDED_FROM_MEAN, TABLE, read_glue_table
from electra.finetuning.jobs import is_finetuning_output
from electra.finetuning.metrics import none_to_nan
from electra.model.storage import read_model_config
from electra.pretraining.checks import describe_tokenizer
from electra.pretraining.config import BUDGETS, CHANGEABLE_ON_RESUME, PretrainConfig, read_run_record
from electra.pretraining.held_out import held_out_loader_config, max_held_out_rows
from electra.pretraining.phases import Phase, count_parameters, plan_phases, read_phase_index
from electra.pretraining.recipes import recipe_settings
from electra.training.checkpoint import TrainState, find_model_folder, read_training_state
from electra.training.logging import METRICS_FILE, read_metrics

LOWER_IS_BETTER = ("loss",)  # suffixes of metrics
HIGHER_IS_BETTER = ("accuracy", "precision", "recall", "auc")
VALUE_ONLY = ("recipe", "style", "generator", "optimizer")  # settings that are shown without their names
NOT_SHOWN = CHANGEABLE_ON_RESUME | {
    "size",
    "objective",
    *BUDGETS,
}  # settings with their own column, or without effect on weights


@dataclass(frozen=True)
class Evaluation:
    """Held-out metrics at one step, and the cost up to it."""

    step: int
    minutes: float
    flops: float
    metrics: dict[str, float]
    phase: int  # index


@dataclass(frozen=True)
class GlueScore:
    """Mean score over GLUE tasks."""

    mean: float
    tasks: list[str]


@dataclass(frozen=True)
class Run:
    """A run up to its last checkpoint; the cost of a branch includes its trunk."""

    folder: str
    size: str
    objective: str  # of all phases
    held_out: str  # rows it is evaluated on
    vocabulary: str  # size and fingerprint
    changes: str  # settings that differ from the defaults of its recipe and size
    parameters: int
    steps: int
    tokens: int
    minutes: float
    tokens_per_second: float
    flops: float  # matrix products only
    final_metrics: dict[str, float]
    best_metrics: dict[str, float]  # in the last phase
    evaluations: list[Evaluation]
    glue: GlueScore | None
    unfinished: str | None = None  # how far it is; None if it is finished

    def loss_label(self) -> str:
        """The terms of its loss; only losses of equal terms are comparable."""
        return self.objective if "mlm_loss" in self.final_metrics else f"{self.objective} without a generator"


def read_run(folder: Path, glue_table: Path | None) -> Run:
    """Read a run folder up to its last checkpoint, and its GLUE table; raises a DataError if it has no evaluation."""
    config = read_run_config(folder)
    model = read_model_config(folder)
    phases = plan_phases(config, model)
    last = phases[-1].config
    progress = read_progress(folder, phases)
    state = progress.state
    metrics_lines = [line for line in read_metrics(folder / METRICS_FILE) if line["step"] <= state.step]
    ends = phase_end_steps(phases, progress, metrics_lines)
    evaluations = parse_evaluations(metrics_lines, phases, ends)
    if not evaluations and progress.unfinished is not None:
        raise DataError(f"it was not evaluated yet at step {state.step:,}; --evaluate-every sets how often it is")
    if not evaluations or (evaluations[-1].step != state.step and progress.unfinished is None):
        raise DataError(f"{METRICS_FILE} has no evaluation at the last step, {state.step:,}")
    last_phase = [each for each in evaluations if each.step > state.start_step and each.phase == evaluations[-1].phase]
    return Run(
        folder=str(folder),
        size=config.model.size,
        objective=", ".join(dict.fromkeys(phase.config.objective.name for phase in phases)),
        held_out=f"up to {max_held_out_rows(last)} rows of {held_out_loader_config(last).length} tokens",
        vocabulary=describe_tokenizer(read_run_record(folder)),
        changes=describe_changes_from_recipe(config),
        parameters=count_parameters(model),
        steps=state.step,
        tokens=state.tokens,
        minutes=state.seconds / 60,
        tokens_per_second=state.tokens / state.seconds if state.seconds else 0.0,
        flops=flops_until(phases, ends, state.step),
        final_metrics=evaluations[-1].metrics,
        best_metrics=best_metric_values(last_phase or evaluations[-1:]),
        evaluations=evaluations,
        glue=None if glue_table is None else read_glue_score(folder, glue_table),
        unfinished=progress.unfinished,
    )


def read_run_config(folder: Path) -> PretrainConfig:
    """The settings of a run; raises a DataError if `folder` is something else."""
    if not folder.is_dir():
        raise DataError("a file, not a run folder" if folder.exists() else "no such folder")
    if is_finetuning_output(folder):
        raise DataError("a fine-tuning, not a run of electra pretrain; pass GLUE scores with --glue")
    if not (folder / METRICS_FILE).is_file():
        has_runs = any(folder.glob(f"*/{METRICS_FILE}"))
        raise DataError(
            f"not a run; name the runs in it: {folder}/*" if has_runs else f"not a run: it has no {METRICS_FILE}"
        )
    return config_from_flat_values(PretrainConfig, read_run_record(folder).pretraining)


def describe_changes_from_recipe(config: PretrainConfig) -> str:
    """The settings that differ from the defaults of the recipe and size: modern, layers 6, no-unigram-output-bias."""
    defaults = flat_defaults(PretrainConfig)
    defaults |= recipe_settings(config.recipe, config.model.size, config.model.style)
    changes = {
        name: value
        for name, value in flat_values(config).items()
        if name not in NOT_SHOWN
        and value not in (defaults[name], None, ())  # with --init, the recipe's sizes are unset
    }
    names = sorted(changes, key=lambda name: name not in VALUE_ONLY)
    return ", ".join(describe_setting(name, changes[name]) for name in names)


def describe_setting(name: str, value: Any) -> str:
    if name in VALUE_ONLY:
        return str(value)
    return " ".join(command_line_words(name, value)).removeprefix("--")


@dataclass(frozen=True)
class Progress:
    """The state of a run at its last checkpoint."""

    state: TrainState
    phase: int
    unfinished: str | None  # how far it is; None if it is finished


def read_progress(folder: Path, phases: list[Phase]) -> Progress:
    """The progress of a run; raises a DataError if it has no checkpoint."""
    checkpoint = find_model_folder(folder)
    state, index = read_training_state(checkpoint).trainer, read_phase_index(checkpoint, phases)
    budget = phases[index].schedule_budget
    fraction = budget.fraction_used(state.step - state.start_step, state.seconds - state.start_seconds)
    unfinished = f"{fraction:.0%} of its budget is used" if fraction < 1 else None
    if index + 1 < len(phases):
        unfinished = f"in phase {index + 1} of {len(phases)}"
    return Progress(state, index, unfinished)


def phase_end_steps(phases: list[Phase], progress: Progress, metrics_lines: list[dict[str, Any]]) -> list[float]:
    """The last step of each phase, counted back from the end of the run; a trunk is part of the first phase."""
    state, current = progress.state, phases[progress.phase].schedule_budget
    later = [phases[index + 1 :] for index in range(len(phases))]
    following = [phase.schedule_budget for phase in phases[progress.phase + 1 :] if phase.starts_optimizer]
    if current.steps is not None:
        end = max(state.step, state.start_step + sum(budget.steps or 0 for budget in (current, *following)))
        return [end - sum(phase.budget.steps or 0 for phase in rest) for rest in later]
    budgets = sum(budget.seconds or 0.0 for budget in (current, *following))
    end_seconds = max(state.seconds, state.start_seconds + budgets)
    seconds = [end_seconds - sum(phase.budget.seconds or 0.0 for phase in rest) for rest in later]
    logged_steps, logged_seconds = logged_steps_and_seconds(metrics_lines)
    return [*np.interp(seconds[:-1], logged_seconds, logged_steps), state.step]


def logged_steps_and_seconds(metrics_lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Steps, and seconds of training up to each, from the training metrics."""
    train = [line for line in metrics_lines if "seconds" in line]
    return [0, *(line["step"] for line in train)], [0.0, *(line["seconds"] for line in train)]


def flops_until(phases: list[Phase], end_steps: list[float], step: int) -> float:
    """FLOPs of a run up to a step."""
    spans = zip(phases, [0.0, *end_steps], end_steps, strict=False)
    return float(sum(phase.flops_per_step() * max(0.0, min(step, end) - start) for phase, start, end in spans))


def parse_evaluations(
    metrics_lines: list[dict[str, Any]], phases: list[Phase], end_steps: list[float]
) -> list[Evaluation]:
    """The evaluations of a run; their times are interpolated between lines of training metrics."""
    logged = logged_steps_and_seconds(metrics_lines)
    return [
        Evaluation(
            step=line["step"],
            minutes=float(np.interp(line["step"], *logged)) / 60,
            flops=flops_until(phases, end_steps, line["step"]),
            metrics=none_to_nan({name: value for name, value in line.items() if name not in ("kind", "step")}),
            phase=sum(line["step"] > end for end in end_steps[:-1]),
        )
        for line in metrics_lines
        if line["kind"] == "validation"
    ]


def best_metric_values(evaluations: list[Evaluation]) -> dict[str, float]:
    """The best value of each metric that has one."""
    best = {}
    for name in evaluations[-1].metrics:
        values = [evaluation.metrics[name] for evaluation in evaluations if isfinite(evaluation.metrics.get(name, nan))]
        if not values:
            continue
        if name.endswith(LOWER_IS_BETTER):
            best[name] = min(values)
        elif name.endswith(HIGHER_IS_BETTER):
            best[name] = max(values)
    return best


def read_glue_score(run: Path, path: Path) -> GlueScore | None:
    """The score in a table of electra glue; None, with a warning if the table is unusable, if it has no mean."""
    try:
        table = read_glue_table(path)
    except (DataError, OSError) as error:
        print(f"no GLUE score for {run}: {error}", file=sys.stderr)
        return None
    tasks = [row.task for row in table.rows if row.task != EXCLUDED_FROM_MEAN]
    return None if table.mean is None else GlueScore(table.mean, tasks)


def find_glue_tables(entries: tuple[str, ...], runs: list[Path]) -> dict[Path, Path]:
    """The GLUE table of each run that has one: named in `entries`, or else the newest in its folder."""
    tables: dict[Path, Path] = {}
    for run in runs:
        inside = sorted([*run.glob(TABLE), *run.glob(f"*/{TABLE}")], key=lambda path: path.stat().st_mtime)
        tables |= {run: inside[-1]} if inside else {}
    for entry in entries:
        tables |= parse_glue_entry(entry, runs)
    return tables


def parse_glue_entry(entry: str, runs: list[Path]) -> dict[Path, Path]:
    """The run and the table of an entry RUN=FOLDER, or FOLDER if its model is one of the runs."""
    run, _, folder = entry.rpartition("=")
    table = Path(folder) if folder.endswith(".json") else Path(folder, TABLE)
    model = Path(run or read_glue_table(table).model).resolve()
    for other in runs:
        if model.is_relative_to(other.resolve()):
            return {other: table}
    raise DataError(f"--glue {entry} is of {model}, not of one of the runs; name its run: --glue RUN={folder}")
