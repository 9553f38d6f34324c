"""`electra probe`: compare pre-trained models, or settings of fine-tuning, on GLUE's training rows alone.

Selecting models on a dev set biases their scores there; the probe never reads the dev files. CoLA, MRPC, RTE and STS-B
are evaluated by five-fold cross-validation over their training rows; QNLI and SST-2, which have more, train on one
slice of 20,000 rows and are evaluated on 8,000 others. Folds and slices are the same in every run. That makes 22
fine-tunings per model, setting and seed. The scores are not comparable with published ones: there are fewer rows, and
training rows of SST-2 are phrases of which some contain others.
"""

import gc
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra.config import build_config, parse_named_settings
from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning.config import ProbeConfig, TuningConfig
from electra.finetuning.features import Outputs
from electra.finetuning.job import FinetuningTask, Job, build_trainer
from electra.finetuning.jobs import estimated_cost, find_model_to_finetune
from electra.finetuning.metrics import Metrics
from electra.finetuning.probe_results import Key, ProbeResult, ProbeScores, append_result, compare_rows, read_results
from electra.finetuning.storage import checksum_of_weights
from electra.finetuning.tasks import Task, get_glue_task, read_split_rows
from electra.finetuning.workers import run_here_or_in_workers
from electra.formatting import format_count
from electra.objectives.evaluation import roc_auc
from electra.runfolder import describe_changed_settings, dump_json, lock_file
from electra.training.config import Device

FOLDS = 5
SLICED_TASKS = ("qnli", "sst2")
MAX_HELD_OUT_FRACTION = 0.2  # of a slice
PERMUTATION_SEED = 0  # of the rows
OTHER_OUTPUT = "choose another --output"
ATTEMPTS = 2  # an error on the GPU may be that of another process that shares it


@dataclass(frozen=True, kw_only=True)
class ProbeJob(Job):
    """A fine-tuning that returns its held-out metrics and writes nothing but cached features.

    If it fails, it returns None, and the error is in its folder.
    """

    model_name: str
    weights: str  # checksum
    setting: str
    fold: int

    @property
    def key(self) -> Key:
        return self.model_name, self.setting, self.task.name, self.fold, self.seed

    @property
    def error_file(self) -> Path:
        return self.folder / "error.txt"

    def identity(self) -> dict[str, Any]:
        """The fields that a stored result must share to count as this job's."""
        names = ("model", "setting", "task", "fold", "seed")
        fields = dict(zip(names, self.key, strict=True)) | {"checkpoint": self.model.name, "weights": self.weights}
        tuning, rows = asdict(self.tuning), count_rows(self.task)
        return json.loads(dump_json(fields | {"tuning": tuning, "rows": rows}))  # as read from the file

    def run(self, quiet: bool = False) -> ProbeResult | None:  # type: ignore[override]  # not a Job's result
        try:
            start = time.perf_counter()
            result = finetune(self)
            return replace(result, seconds=time.perf_counter() - start)
        except Exception as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_expected = isinstance(error, ConfigError | DataError | TrainingError)
            self.error_file.write_text(str(error) if is_expected else traceback.format_exc(), encoding="utf-8")
        finally:
            gc.collect()  # CUDA graphs are in reference cycles; destroying one while another is captured is an error
        if multiprocessing.parent_process() is not None and not is_device_usable(self.hardware.device):
            os._exit(1)  # after some errors of CUDA, every later job of this process would fail
        return None


def finetune(job: ProbeJob) -> ProbeResult:
    """Train as `electra finetune` does, without checkpoints, and evaluate at the end."""
    finetuning = FinetuningTask(job)
    trainer = build_trainer(finetuning, quiet=True)
    trainer.run_step = trainer.build_step()
    while not trainer.is_finished():
        trainer.step()
    trainer.check_nonfinite_steps()
    logits, targets = finetuning.compute_outputs("dev").logits, finetuning.splits["dev"].labels.cpu().numpy()
    count = min(FOLDS, len(targets)) if job.task.name in SLICED_TASKS else 0  # an empty part has no metrics
    parts = [slice(part, None, count) for part in range(count)]
    return ProbeResult(
        **job.identity(),
        steps=trainer.state.step,
        seconds=0.0,
        metrics=held_out_metrics(finetuning, logits, targets),
        parts=[held_out_metrics(finetuning, logits[part], targets[part]) for part in parts],
    )


def held_out_metrics(finetuning: FinetuningTask, logits: NDArray, targets: NDArray) -> Metrics:
    """The task's metrics, the loss and, for classes, the AUC of logits [N, num_labels]."""
    task, kind = finetuning.task, finetuning.kind
    predicted, labels = kind.predict(Outputs(logits), task), kind.labels_of_targets(targets, task)
    metrics = kind.compute_metrics(predicted, labels, task)
    metrics["loss"] = kind.loss(torch.from_numpy(logits), torch.from_numpy(targets)).mean().item()
    if task.labels:
        metrics["auc"] = roc_auc(logits[:, 1] - logits[:, 0], targets == 1)
    return metrics


def is_device_usable(device: Device) -> bool:
    """Whether this process can still compute on the GPU, if it uses one."""
    if device == "cpu" or not torch.cuda.is_initialized():
        return True
    try:
        ones = torch.ones(8, 8, device="cuda")
        return (ones @ ones).sum().item() == 512
    except RuntimeError:
        return False


# Splits: files of rows, the same in every run.


def write_splits(task: Task, folder: Path, limit: int | None, slice_rows: int, slice_held_out: int) -> list[Task]:
    """The task with training rows as its train and dev splits, once per fold."""
    values = [row.values for row in read_split_rows(task, "train")]
    order = np.random.default_rng(PERMUTATION_SEED).permutation(len(values))[:limit]
    if task.name in SLICED_TASKS:
        held_out = min(slice_held_out, int(MAX_HELD_OUT_FRACTION * len(order)))
        folds = [(order[held_out : held_out + slice_rows], order[:held_out])]
    else:
        folds = [(np.delete(order, slice(fold, None, FOLDS)), order[fold::FOLDS]) for fold in range(FOLDS)]
    return [
        write_rows(task, values, {"train": train, "dev": dev}, folder / f"{task.name}-{fold}")
        for fold, (train, dev) in enumerate(folds)
    ]


def write_rows(task: Task, values: list[dict[str, Any]], rows: dict[str, NDArray], folder: Path) -> Task:
    """The task with some of its rows, by split, in files in `folder`."""
    folder.mkdir(exist_ok=True)
    for split, indices in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(values[index]) + "\n" for index in indices))
    return replace(task, splits={split: str(folder / f"{split}.jsonl") for split in rows})


def count_rows(task: Task) -> dict[str, int]:
    return {split: Path(path).read_bytes().count(b"\n") for split, path in task.splits.items()}


# Running.


def without_finished(jobs: list[ProbeJob], output: Path, advice: str = OTHER_OUTPUT) -> list[ProbeJob]:
    """The jobs that have no result yet; raises with `advice` if one has a result of other settings, rows or weights."""
    results = {result.key: result for result in read_results(output)}
    for job in jobs:
        stored = asdict(results[job.key]) if job.key in results else {}
        for name, value in job.identity().items() if stored else ():
            if stored[name] != value and (name, stored[name]) != ("weights", ""):
                label = "its file of weights" if name == "weights" else f"its {name}"
                [change] = describe_changed_settings({label: stored[name]}, {label: value})
                raise ConfigError(f"{output} has results of {' '.join(map(str, job.key))}: {change}; {advice}")
    return [job for job in jobs if job.key not in results]


def run_probe_jobs(jobs: list[ProbeJob], workers: int | None, output: Path) -> dict[str, str]:
    """Run jobs, the longest first, and append their results; returns the errors of those that failed twice, by key."""
    pending, total = sorted(jobs, key=estimated_cost, reverse=True), len(jobs)
    finished: set[Key] = set()
    attempts: Counter[Key] = Counter()
    errors: dict[Key, str] = {}
    while pending:
        broken = None
        try:
            for job, result in run_here_or_in_workers(pending, workers):
                assert isinstance(job, ProbeJob)
                if isinstance(result, ProbeResult):
                    append_result(output, result)
                    finished.add(job.key)
                    report_progress(f"{len(finished)} of {total}", job, result)
        except TrainingError as error:  # a worker process ended
            broken = str(error)
        failed = [job for job in pending if job.error_file.exists()]
        for job in failed:
            attempts[job.key] += 1
            errors[job.key] = job.error_file.read_text(encoding="utf-8")
            job.error_file.unlink()
        unfinished = [job for job in pending if job.key not in finished and attempts[job.key] < ATTEMPTS]
        if broken and not failed and len(unfinished) == len(pending):  # not one job ended in this round
            errors |= {job.key: broken for job in unfinished}
            break
        pending = unfinished
    return {" ".join(map(str, key)): error for key, error in errors.items() if key not in finished}


def report_progress(progress: str, job: ProbeJob, result: ProbeResult) -> None:
    """Print a line about a finished job."""
    metric = job.task.metrics[0]
    value = result.metrics[metric]
    name = f"{job.model_name}, {job.setting}, {job.task.name}, fold {job.fold}, seed {job.seed}"
    score = f"{metric} {math.nan if value is None else 100 * value:.1f}"
    print(
        f"{progress}: {name}: {score}, {format_count(result.steps, 'step')} in {result.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def parse_settings(words: tuple[str, ...]) -> dict[str, TuningConfig]:
    """Fine-tuning settings by name; a word without = starts the next one."""
    by_name = parse_named_settings(TuningConfig, words)
    settings = {name: build_config(TuningConfig, **values) for name, values in by_name.items()}
    for name, tuning in settings.items():
        if tuning.keeps_best_epoch:
            raise ConfigError(
                f"{name} has best_epoch or early_stopping, which choose by the rows that scores are computed on; leave "
                "them out"
            )
    return settings


def prepare_probe_jobs(config: ProbeConfig, models: dict[str, Path], folder: Path) -> list[ProbeJob]:
    """A job for each model, setting, task, fold and seed; writes the rows of the folds into `folder`."""
    assert config.data is not None
    for path in models.values():
        if not path.is_dir():
            raise DataError(f"no folder {path}; --model must be a run, a model folder or a Hugging Face folder")
    sizes = (config.rows, config.slice_rows, config.slice_held_out)
    tasks = [write_splits(get_glue_task(name, config.data), folder, *sizes) for name in config.tasks]
    settings = parse_settings(config.settings)
    jobs: list[ProbeJob] = []
    for name, path in models.items():
        model = find_model_to_finetune(path)
        weights = checksum_of_weights(model)
        for setting, tuning in settings.items():
            for fold, task in ((fold, task) for folds in tasks for fold, task in enumerate(folds)):
                jobs += [
                    ProbeJob(
                        model=model,
                        task=task,
                        tuning=tuning,
                        hardware=config.hardware,
                        seed=seed,
                        folder=folder / f"job-{len(jobs)}-{seed}",  # features are cached beside it
                        model_name=name,
                        weights=weights,
                        setting=setting,
                        fold=fold,
                    )
                    for seed in range(1, config.seeds + 1)
                ]
    return jobs


def run_probe(config: ProbeConfig, models: dict[str, Path], advice: str = OTHER_OUTPUT) -> dict[str, str]:
    """Fine-tune what has no result in `config.output` yet, of models by name; returns the errors of what failed."""
    with tempfile.TemporaryDirectory(prefix="electra-probe-") as temporary, lock_file(config.output):
        jobs = without_finished(prepare_probe_jobs(config, models, Path(temporary)), config.output, advice)
        return run_probe_jobs(jobs, config.workers, config.output)


@dataclass(frozen=True)
class ProbeTables:
    """The tables of a results file, and the fine-tunings that failed."""

    output: str
    scores: list[ProbeScores]
    failed: dict[str, str] = field(default_factory=dict)  # errors by job

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def __str__(self) -> str:
        failed = [f"failed: {job}: {error}" for job, error in self.failed.items()]
        return "\n\n".join([*map(str, self.scores), *failed])


def probe(config: ProbeConfig) -> ProbeTables:
    """Fine-tune what has no result in `config.output` yet, and tabulate all results in it."""
    advice = f"{OTHER_OUTPUT} or another name for the setting"
    errors = run_probe(config, {str(path): path for path in config.model}, advice) if config.model else {}
    results = read_results(config.output)
    if not results and not errors:
        raise DataError(f"no results in {config.output}; give --model and --data to compute some")
    scores = [compare_rows(results, score, config.baseline) for score in config.score if results]
    return ProbeTables(str(config.output), scores, errors)
