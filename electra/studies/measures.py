"""What all runs of a study are compared by: the probe, and losses on held-out text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from electra.config import build_config
from electra.data.shards import Shards, open_shards
from electra.finetuning.config import ProbeConfig
from electra.finetuning.probe import parse_settings, run_probe
from electra.finetuning.probe_results import Estimate, estimate_mean_of_tasks, read_results, score_arrays
from electra.finetuning.tasks import get_glue_task, read_split_rows
from electra.finetuning.workers import call_in_process
from electra.objectives.evaluation import TOKEN_LOSSES, is_on_plateau
from electra.pretraining.describe import GUESSING_AUC
from electra.reporting.runs import Run, read_run
from electra.runfolder import is_missing_or_empty
from electra.studies.config import StudyConfig
from electra.studies.fixed_rtd import find_corrupted_rows, measure_fixed_rtd, read_fixed_rtd
from electra.studies.runs import StudyRun
from electra.training.hardware import choose_device

PROBE = "probe.jsonl"
FIXED_RTD_LOSS, FIXED_RTD_AUC = "fixed_rtd_loss", "fixed_rtd_auc"  # metrics of `read_fixed_rtd`
PRETRAINING_SD = 0.006  # of the probe's mean between pre-training seeds, where a study has one: docs/log.md

Scores = Mapping[str, NDArray]  # [folds, fine-tuning seeds] by task


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run with its measures."""

    run: StudyRun
    cost: Run
    fixed_rtd: dict[str, float]
    scores: Scores | None  # of the probe

    def token_loss(self) -> float | None:
        """The held-out loss of an encoder that predicts tokens, and None of a discriminator."""
        name = self.token_loss_name()
        return self.cost.final_metrics[name] if name else None

    def token_loss_name(self) -> str | None:
        if self.fixed_rtd:
            return None
        return next((name for name in TOKEN_LOSSES if name in self.cost.final_metrics), None)

    def has_learnt(self) -> bool:
        """Whether the encoder has learnt more than guessing (a discriminator) or than token frequencies."""
        if self.fixed_rtd:
            return self.fixed_rtd[FIXED_RTD_AUC] >= GUESSING_AUC
        name = self.token_loss_name()
        return name is None or not is_on_plateau(self.cost.final_metrics, name)


def probe_config(config: StudyConfig) -> ProbeConfig:
    """The probe of all runs in the folder of a study."""
    return build_config(
        ProbeConfig,
        data=config.glue,
        output=config.output / PROBE,
        tasks=config.tasks,
        settings=probe_settings(config),
        seeds=config.finetuning_seeds,
        rows=config.probe_rows,
        device=config.device,
    )


def probe_settings(config: StudyConfig) -> tuple[str, ...]:
    return ("default", *config.finetuning)


def check_probe(config: StudyConfig) -> None:
    """Raise, before anything is trained, if the probe's settings or the data of its tasks are unusable."""
    parse_settings(probe_settings(config))
    if config.glue is not None:
        for name in config.tasks:
            next(read_split_rows(get_glue_task(name, config.glue), "train"))


def measure_runs(runs: list[StudyRun], config: StudyConfig) -> dict[str, str]:
    """Compute the measures of finished runs that are missing; returns the errors of fine-tunings that failed."""
    on_gpu = choose_device(config.device).type == "cuda"
    return call_in_process(measure_here, runs, config) if on_gpu else measure_here(runs, config)


def measure_here(runs: list[StudyRun], config: StudyConfig) -> dict[str, str]:
    rows, shards = find_corrupted_rows(runs, config), open_shards(config.data)
    if rows is not None:
        for run in runs:
            measure_fixed_rtd(run, rows, shards, config)
    return run_probe(probe_config(config), {run.name: run.folder for run in runs}) if config.glue else {}


def read_measures(runs: list[StudyRun], shards: Shards, config: StudyConfig) -> list[MeasuredRun]:
    """The finished runs with those of their measures that were computed."""
    names = {run.name for run in runs}
    results = [
        result
        for result in read_results(config.output / PROBE)
        if result.model in names and result.task in config.tasks and result.seed <= config.finetuning_seeds
    ]
    arrays, tasks = score_arrays(results, "metric"), {result.task for result in results}
    measured = []
    for run in runs:
        if is_missing_or_empty(run.folder) or not run.is_finished(shards):
            continue
        scores = arrays.get((run.name, "default"), {})
        fixed_rtd = read_fixed_rtd(run, config)
        is_complete = bool(scores) and scores.keys() == tasks
        measured.append(MeasuredRun(run, read_run(run.folder, None), fixed_rtd, scores if is_complete else None))
    return measured


# Standard errors: that of the probe, which does not shrink with pre-training seeds because all share its rows, and
# that of pre-training seeds, whose variance is pooled over the settings of a study.


def pooled_variance(groups: list[list[float]]) -> float | None:
    """The variance within groups; None if no group has two values."""
    degrees = sum(len(group) - 1 for group in groups if group)
    squares = sum(float(np.var(group)) * len(group) for group in groups if group)
    return squares / degrees if degrees else None


def probe_mean(scores: Scores) -> float:
    return float(np.mean([array.mean() for array in scores.values()]))


def estimate_probe(runs: Sequence[Scores], variance: float) -> Estimate:
    """The mean over runs, which differ by their seed; `variance` is that between seeds."""
    estimates = [estimate_mean_of_tasks(scores.values()) for scores in runs]
    errors = [estimate.error or 0.0 for estimate in estimates]
    squared = float(np.mean(np.square(errors))) + variance / len(runs)
    return Estimate(float(np.mean([estimate.mean for estimate in estimates])), math.sqrt(squared))


def estimate_probe_difference(pairs: list[tuple[Scores, Scores]], variance: float) -> Estimate:
    """The mean difference of pairs of runs with the same seed, paired by task, fold and fine-tuning seed."""
    differences = [{task: first[task] - second[task] for task in first} for first, second in pairs]
    return estimate_probe(differences, 2 * variance)


def estimate_loss(values: list[float], variance: float | None) -> Estimate:
    return Estimate(float(np.mean(values)), None if variance is None else math.sqrt(variance / len(values)))
