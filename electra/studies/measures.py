"""What all runs of a study are compared by: the probe, and losses on held-out text."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.config import build_config
from electra.errors import ConfigError, DataError
from electra.finetuning.config import ProbeConfig, TuningConfig
from electra.finetuning.metrics import none_to_nan
from electra.finetuning.probe import FOLDS, SLICED_TASKS, parse_settings, run_probe
from electra.finetuning.probe_results import Estimate, ProbeResult, estimate_mean_of_tasks, read_results, score_arrays
from electra.finetuning.tasks import get_glue_task, read_split_rows
from electra.finetuning.workers import call_in_process
from electra.objectives.evaluation import TOKEN_LOSSES, is_on_plateau
from electra.pretraining.describe import GUESSING_AUC
from electra.runfolder import check_same_settings, dump_json, file_checksum
from electra.studies.config import StudyConfig
from electra.studies.records import corrupted_rows_file, find_corrupted_rows, record_run
from electra.studies.runs import MEASURES, StudyRecord, StudyRun
from electra.training.hardware import choose_device

PROBE, DEFAULT_SETTING = "probe.jsonl", "default"
FIXED_RTD_LOSS, FIXED_RTD_AUC = "fixed_rtd_loss", "fixed_rtd_auc"  # of `StudyRecord.fixed_rtd`
UNIGRAM_RTD_AUC = "unigram_rtd_auc"  # of all discriminators
PRETRAINING_SD = 0.006
"""Assumed, of the probe's mean between pre-training seeds: that of the GLUE scores of 14 ELECTRA-Small models, which
richarddwang/electra_pytorch reports."""
ASSUMED_DEGREES = 10  # of freedom, that PRETRAINING_SD counts as beside what a study measures with few seeds

Scores = Mapping[str, NDArray]  # [folds, fine-tuning seeds] by task


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run with its measures."""

    run: StudyRun
    record: StudyRecord
    scores: Scores | None  # of the probe

    @property
    def metrics(self) -> dict[str, float]:
        """Held out, at the end of the run."""
        return none_to_nan(self.record.metrics | self.record.fixed_rtd)

    def is_discriminator(self) -> bool:
        return UNIGRAM_RTD_AUC in self.metrics

    def token_loss(self) -> float | None:
        """The held-out loss of an encoder that predicts tokens, and None of a discriminator."""
        name = self.token_loss_name()
        return self.metrics[name] if name else None

    def token_loss_name(self) -> str | None:
        return None if self.is_discriminator() else next((name for name in TOKEN_LOSSES if name in self.metrics), None)

    def has_learnt(self) -> bool:
        """Whether the encoder has learnt more than guessing (a discriminator) or than token frequencies."""
        if self.is_discriminator():
            # perhaps only on replacements like those of its own generator
            return max(self.metrics.get(name, 0.0) for name in (FIXED_RTD_AUC, UNIGRAM_RTD_AUC)) >= GUESSING_AUC
        name = self.token_loss_name()
        return name is None or not is_on_plateau(self.metrics, name)


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
    return (DEFAULT_SETTING, *config.finetuning)


def check_probe(runs: list[StudyRun], config: StudyConfig) -> None:
    """Raise, before anything is trained, if the probe's settings, the data of its tasks or its results so far are
    unusable."""
    tuning = parse_settings(probe_settings(config))[DEFAULT_SETTING]
    results = read_default_results(runs, config)
    if config.glue is not None:
        check_same_tuning(results, asdict(tuning), config)
    without_run = {run.name for run in runs if not run.has_folder() and run.read_record() is None}
    for result in (result for result in results if result.model in without_run):
        raise DataError(
            f"{config.output / PROBE} has results of {result.model}, but the folder of this run and its record in "
            f"{MEASURES} were deleted; delete the lines of the run there, or choose another --output"
        )
    if config.glue is not None:
        for name in config.tasks:
            next(read_split_rows(get_glue_task(name, config.glue), "train"))


def measure_runs(runs: list[StudyRun], config: StudyConfig) -> dict[str, str]:
    """Compute the measures of finished runs that are missing; returns the errors of fine-tunings that failed."""
    uses_gpu = choose_device(config.device).type == "cuda" and any(run.has_folder() for run in runs)
    return call_in_process(measure_here, runs, config) if uses_gpu else measure_here(runs, config)


def measure_here(runs: list[StudyRun], config: StudyConfig) -> dict[str, str]:
    present = [run for run in runs if run.has_folder()]
    rows = find_corrupted_rows(present, config)
    for run in present:
        record_run(run, rows, config)
    if config.glue is None:
        return {}
    errors = run_probe(probe_config(config), {run.name: run.folder for run in present}) if present else {}
    finished = Counter(result.model for result in read_default_results(runs, config))
    wanted = finetunings_per_run(config)
    return errors | {
        run.name: f"its folder was deleted; {finished[run.name]} of {wanted} fine-tuning runs of the probe are "
        f"finished. To train it again, delete {run.record_file} and the lines of the run in {config.output / PROBE}"
        for run in runs
        if run not in present and finished[run.name] < wanted
    }


def finetunings_per_run(config: StudyConfig) -> int:
    """The number of fine-tunings of the probe."""
    folds = sum(1 if task in SLICED_TASKS else FOLDS for task in config.tasks)
    return folds * config.finetuning_seeds if config.glue else 0


def read_measures(runs: list[StudyRun], config: StudyConfig) -> list[MeasuredRun]:
    """The finished runs with those of their measures that were computed."""
    finished = [run for run in runs if run.is_finished()]
    records = [run.read_record() or run.build_record() for run in finished]
    rows = corrupted_rows_file(config)
    checksums = {file_checksum(rows)} if rows.exists() else {record.corrupted_rows for record in records}
    measured = []
    for record, (run, scores) in zip(records, read_scores(finished, config), strict=True):
        is_comparable = checksums == {record.corrupted_rows}  # others were measured on other rows
        measured.append(MeasuredRun(run, record if is_comparable else replace(record, fixed_rtd={}), scores))
    return measured


def read_scores(runs: list[StudyRun], config: StudyConfig) -> list[tuple[StudyRun, Scores | None]]:
    """The runs with the results of their probe; None if some are missing that others have."""
    results = read_default_results(runs, config)
    if results:
        check_same_tuning(results, asdict(TuningConfig()) | results[0].tuning, config)
        check_same_rows(results, config)
    arrays, tasks = score_arrays(results, "metric"), {result.task for result in results}
    of_runs = [(run, arrays.get((run.name, DEFAULT_SETTING), {})) for run in runs]
    return [(run, scores if scores and scores.keys() == tasks else None) for run, scores in of_runs]


def check_same_tuning(results: list[ProbeResult], expected: dict[str, Any], config: StudyConfig) -> None:
    """Raise a ConfigError if fine-tunings had settings other than those that are expected."""
    defaults = asdict(TuningConfig())  # also of settings that are newer than a result
    for result in results:
        name, now = f"the probe of {result.model} in {config.output / PROBE}", json.loads(dump_json(expected))
        advice = "use the same --finetuning or another --output"
        check_same_settings(name, defaults | result.tuning, now, advice=advice)


def check_same_rows(results: list[ProbeResult], config: StudyConfig) -> None:
    """Raise a ConfigError if fine-tunings that are compared had different numbers of rows."""
    first: dict[tuple[str, int], ProbeResult] = {}
    for result in results:
        other = first.setdefault((result.task, result.fold), result)
        if other.rows != result.rows:
            raise ConfigError(
                f"{config.output / PROBE} has results of {result.task} with {result.rows} rows ({result.model}) and "
                f"with {other.rows} ({other.model}), which do not compare; use another --probe-rows or --output"
            )


def read_default_results(runs: list[StudyRun], config: StudyConfig) -> list[ProbeResult]:
    """The finished fine-tunings of the runs."""
    names = {run.name for run in runs}
    return [
        result
        for result in read_results(config.output / PROBE)
        if (result.model in names and result.setting == DEFAULT_SETTING)
        and (result.task in config.tasks and result.seed <= config.finetuning_seeds)
    ]


# Standard errors: that of the probe, of which the part that all runs share stays with more pre-training seeds, and that
# of pre-training seeds, whose variance is pooled over the settings of a study.


def pooled_variance(groups: list[list[float]], assumed: float = 0.0, assumed_degrees: int = 0) -> float | None:
    """The variance within groups, and an assumed one with its degrees of freedom; None without any."""
    degrees = assumed_degrees + sum(len(group) - 1 for group in groups if group)
    squares = assumed_degrees * assumed + sum(float(np.var(group)) * len(group) for group in groups if group)
    return squares / degrees if degrees else None


def probe_mean(scores: Scores) -> float:
    return float(np.mean([array.mean() for array in scores.values()]))


def estimate_probe(runs: Sequence[Scores], variance: float) -> Estimate:
    """The mean over runs, which differ by their seed; `variance` is that between seeds."""
    return estimate_scores(mean_scores(runs), variance / len(runs))


def estimate_probe_difference(ours: Sequence[Scores], others: Sequence[Scores], variance: float) -> Estimate:
    """The mean of the runs of one setting minus that of another, paired by task, fold and fine-tuning seed."""
    first, second = mean_scores(ours), mean_scores(others)
    differences = {task: first[task] - second[task] for task in first}
    return estimate_scores(differences, variance / len(ours) + variance / len(others))


def mean_scores(runs: Sequence[Scores]) -> Scores:
    return {task: np.mean([scores[task] for scores in runs], axis=0) for task in runs[0]}


def estimate_scores(scores: Scores, seed_variance: float) -> Estimate:
    """The mean over tasks, with the error of the probe and the variance between pre-training seeds."""
    estimate = estimate_mean_of_tasks(scores.values())
    return Estimate(estimate.mean, math.hypot(estimate.error or 0.0, math.sqrt(seed_variance)))
