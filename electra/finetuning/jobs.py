"""All jobs of a command: seeds and tasks; finished jobs are kept."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.errors import DataError
from electra.finetuning.config import FinetuneConfig, GlueConfig, JobsConfig
from electra.finetuning.features import Outputs, read_logits
from electra.finetuning.job import MODEL, Job, JobResult, best_epoch_folders, read_job_result
from electra.finetuning.kinds import KINDS, check_class_weights, load_features, read_examples
from electra.finetuning.metrics import Metrics, median, standard_deviation
from electra.finetuning.storage import is_finetuned_config, read_finetuned_config, task_of_ensemble, weight_checksums
from electra.finetuning.tasks import HUB, Task
from electra.finetuning.workers import CONTINUE, run_here_or_in_workers, run_on_ray
from electra.formatting import format_count
from electra.huggingface.names import get_architecture
from electra.model.storage import (
    ONNX_ADVICE,
    WEIGHTS,
    is_huggingface_folder,
    is_onnx_folder,
    load_model_tokenizer,
    warn_untrained_length,
)
from electra.runfolder import (
    CONFIG,
    RESULT,
    SEED,
    check_same_settings,
    checkpoint_folders,
    file_checksum,
    is_missing_or_empty,
    lock_folder,
    read_json,
    read_stored,
    remove_partial_files,
    remove_written_folder,
    verify_checksum,
    write_stored,
)
from electra.training.checkpoint import check_own_folder, find_model_folder

DERIVED = ("name", "labels", "metrics", "offset", "scale", "choice_label", "scheme", "has_unanswerable")
"""Fields of a custom task that follow from its files, columns and kind, which are compared themselves."""


@contextmanager
def lock_output(output: Path, task_folders: Iterable[Path]) -> Iterator[None]:
    """Lock the output of a command, and remove what a killed process was writing in the folders of its tasks."""
    for folder in task_folders:
        if not is_missing_or_empty(folder) and not is_finetuning_output(folder):
            raise DataError(f"{folder} is not empty and not the output of a fine-tuning; choose another --output")
    with lock_folder(output):
        for folder in task_folders:
            remove_partial_files(folder)
        yield


def prepare_jobs(config: FinetuneConfig | GlueConfig, task: Task, seeds: int, folder: Path) -> list[Job]:
    """One job per seed of a task; writes their settings into `folder`, and raises if it was started with others."""
    check_class_weights(config.tuning.class_weights, task)
    model = find_model_to_finetune(config.model)  # of all seeds, even if a pre-training run saves another checkpoint
    files = {file: file_checksum(Path(file)) for file in task.splits.values() if local_file_size(file)}
    settings = {"model": str(model), "precision": config.hardware.precision} | asdict(config.tuning)
    settings["length"] = config.tuning.length_for(task)
    del settings["micro_batches"]  # does not change results
    jobs = [
        Job(
            model=model,
            task=task,
            tuning=config.tuning,
            hardware=config.hardware,
            seed=seed,
            folder=folder / f"{SEED}{seed}",
            track=config.jobs.track,
        )
        for seed in range(1, seeds + 1)
    ]
    check_and_write_settings(
        folder, FinetuningRecord(settings=settings, task=asdict(task), files=files, weights=weight_checksums(model))
    )
    for job in jobs:
        if job.is_finished():
            if (job.folder / MODEL / WEIGHTS).exists():
                verify_checksum(job.folder / MODEL / WEIGHTS)
            job.remove_checkpoints()  # of a process that was killed after it wrote the result
        else:
            if not checkpoint_folders(job.folder):  # killed before the first: it starts over
                for best in best_epoch_folders(job.folder):
                    remove_written_folder(best)
            check_own_folder(job.folder, MODEL)
    return jobs


def local_file_size(source: str) -> int:
    """Size of a file in bytes; 0 for data from the hub and missing files."""
    return 0 if source.startswith(HUB) or not Path(source).exists() else Path(source).stat().st_size


@dataclass(frozen=True, kw_only=True)
class FinetuningRecord:
    """The config.json of an output folder."""

    settings: dict[str, Any]
    task: dict[str, Any]
    files: dict[str, str]  # checksums by path
    weights: dict[str, str]  # likewise, of the model


def check_and_write_settings(folder: Path, record: FinetuningRecord) -> None:
    """Store the settings of an output folder; raises if it was started with others."""
    now = json.loads(json.dumps(asdict(record)))  # as read from the file
    if any(folder.glob(f"{SEED}*")):
        before = asdict(read_stored(folder / CONFIG, FinetuningRecord))
        for part, values in now.items():
            check_same_settings(folder, before[part], values, ignore=DERIVED)
    folder.mkdir(parents=True, exist_ok=True)
    write_stored(folder / CONFIG, now)


def check_same_model(folder: Path, model: Path) -> None:
    """Raise if the fine-tunings in a folder started from another model."""
    stored, weights = read_stored(folder / CONFIG, FinetuningRecord), weight_checksums(model)
    before = {"model": stored.settings.get("model")} | stored.weights
    check_same_settings(folder, before, {"model": str(model)} | weights)


def is_finetuning_output(folder: Path) -> bool:
    """Whether a folder is the --output of electra finetune, finished or not, and not a model or a pre-training run."""
    return (folder / CONFIG).exists() and {"settings", "task"} <= read_json(folder / CONFIG).keys()


def find_model_to_finetune(path: Path) -> Path:
    """The model folder to fine-tune: a run's newest checkpoint, or the best model of an earlier fine-tuning or seed."""
    is_seed = (path / RESULT).exists()
    return best_model_folder(path) if is_seed or is_finetuning_output(path) else find_model_folder(path)


def best_model_folder(output: Path) -> Path:
    """The model of the seed with the best main metric; `output` may also be a fine-tuned model."""
    models = seed_model_folders(output)
    if len(models) == 1:
        return models[0]
    return max(models, key=lambda model: read_job_result(model.parent / RESULT).main_metric)


def seed_model_folders(output: Path) -> list[Path]:
    """The models of all finished seeds; `output` may also be one seed's folder or a fine-tuned model."""
    if not output.is_dir():
        raise DataError(f"there is no folder {output}; --model must be the --output of electra finetune")
    if (output / CONFIG).exists() and is_finetuned_config(read_json(output / CONFIG)):
        return [output]
    folders = [output] if (output / RESULT).exists() else sorted(output.glob(f"{SEED}*"))
    finished = [folder for folder in folders if (folder / RESULT).exists()]
    models = [folder / MODEL for folder in finished if (folder / MODEL / WEIGHTS).exists()]
    if not models:
        raise DataError(f"no fine-tuned model in {output}; {explain_missing_model(output, finished)}")
    return models


def explain_missing_model(output: Path, finished: list[Path]) -> str:
    """What to do about a folder without fine-tuned models."""
    if finished:
        return f"it was removed; to train it again, also remove {finished[0] / RESULT}"
    if tasks := sorted({folder.parent.name for folder in output.glob(f"*/{SEED}*")}):
        return f"choose one of its tasks: {', '.join(tasks)}"
    if is_finetuning_output(output):
        return f"it is not finished; {CONTINUE}"
    if is_onnx_folder(output):
        return ONNX_ADVICE
    if (output / CONFIG).exists() and is_huggingface_folder(output):
        get_architecture(read_json(output / CONFIG), output)  # raises for an exported classifier
    return f"create one with: electra finetune --model {output} --train … --output … (or --task)"


def run_jobs(jobs: list[Job], config: JobsConfig) -> list[JobResult]:
    """Run all unfinished jobs, the longest first; returns the results of all jobs."""
    unfinished = sorted((job for job in jobs if not job.is_finished()), key=estimated_cost, reverse=True)
    for model, length in {(job.model, job.length) for job in unfinished}:
        warn_untrained_length(model, length)
    if config.ray is None or not unfinished:
        results = run_here_or_in_workers(unfinished, config.workers)
    else:
        results = run_on_ray(unfinished, config.ray)
    for number, (job, result) in enumerate(results, start=1):
        name, value = next(iter(result.metrics["dev"].items()))
        metrics = f"{name} {100 * value:.1f}, {format_count(result.steps, 'step')} in {result.seconds:.0f} s"
        print(
            f"{number} of {len(unfinished)}: {job.task.name}, seed {job.seed}: {metrics}", file=sys.stderr, flush=True
        )
    return [job.read_result() for job in jobs]


def estimated_cost(job: Job) -> int:
    """Proportional to a job's time: bytes to train on."""
    return local_file_size(job.task.splits["train"]) * job.tuning.epochs_for(job.task)


def medians_and_deviations(results: list[JobResult]) -> tuple[dict[str, Metrics], dict[str, Metrics]]:
    """Medians and standard deviations over seeds, by split and metric."""
    medians: dict[str, Metrics] = {}
    deviations: dict[str, Metrics] = {}
    for split, metrics in results[0].metrics.items():
        values = {name: [result.metrics[split][name] for result in results] for name in metrics}
        medians[split] = {name: median(seeds) for name, seeds in values.items()}
        deviations[split] = {name: standard_deviation(seeds) for name, seeds in values.items()}
    return medians, deviations


def ensemble_metrics(jobs: list[Job]) -> dict[str, Metrics]:
    """Metrics of the ensemble of all jobs of a task, by split."""
    job, task, kind, metrics = jobs[0], jobs[0].task, KINDS[jobs[0].task.kind], {}
    if task.has_unanswerable:
        task = task_of_ensemble([read_finetuned_config(job.folder / MODEL) for job in jobs])
    tokenizer = load_model_tokenizer(job.model)
    for split, logits in read_mean_logits(jobs).items():
        examples = read_examples(task, split)
        if examples.labels is not None:
            features = load_features(task, examples, tokenizer, job.length, job.features_cache)
            predicted = kind.predict(Outputs(logits, features, examples), task)
            metrics[split] = kind.compute_metrics(predicted, examples.labels, task)
    return metrics


def read_mean_logits(jobs: list[Job]) -> dict[str, NDArray]:
    """The mean of the jobs' logits [N, num_labels], by split."""
    logits = [read_logits(job.folder) for job in jobs]
    return {split: np.mean([values[split] for values in logits], axis=0) for split in logits[0]}


def find_single_prediction(job: Job) -> str | list[str] | None:
    """The class (of a multi-label task: the classes) that is predicted for all dev rows, if there is only one."""
    kind = KINDS[job.task.kind]
    if not kind.has_classes or not kind.has_row_logits:
        return None
    predicted = kind.predict(Outputs(read_logits(job.folder)["dev"]), job.task)
    is_single = len(predicted) > 1 and len(np.unique(predicted, axis=0)) == 1
    return kind.decode(predicted[:1], job.task)[0] if is_single else None
