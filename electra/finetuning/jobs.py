"""All jobs of a command: seeds and tasks, one after the other or in parallel processes; finished jobs are kept.

Processes on one GPU use NVIDIA's Multi-Process Service (MPS) where it is installed. Without it their kernels take turns
and small models leave most of the GPU idle: six small models in three processes took hardly less time than one after
the other (docs/log.md).
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra.data.workers import block_signals, init_worker
from electra.errors import DataError, TrainingError
from electra.finetuning.config import TuningConfig
from electra.finetuning.job import MODEL, RESULT, Job, JobResult, read_job_result
from electra.finetuning.kinds import check_class_weights, compute_metrics, load_features, read_examples
from electra.finetuning.metrics import Metrics, median, standard_deviation
from electra.finetuning.model import is_finetuned_config
from electra.finetuning.tasks import HUB, Task
from electra.huggingface.names import get_architecture
from electra.model.storage import WEIGHTS, is_huggingface_folder, load_model_tokenizer, warn_untrained_length
from electra.runfolder import (
    CONFIG,
    check_same_settings,
    file_checksum,
    is_missing_or_empty,
    lock_folder,
    read_json,
    read_stored,
    remove_partial_files,
    write_stored,
)
from electra.signals import clean_up_on_stop_signals
from electra.training.checkpoint import check_own_folder, find_model_folder
from electra.training.config import HardwareConfig, TrackerName
from electra.training.hardware import choose_device

CONTINUE = "run the same command to continue"
DERIVED = ("name", "labels", "metrics", "offset", "scale", "choice_label", "scheme", "has_unanswerable")
"""Fields of a custom task that follow from its files, columns and kind, which are compared themselves."""
MEMORY_PER_WORKER = 16 * 2**30  # bytes of GPU memory: a base model with its optimizer and activations
MAX_WORKERS = 8
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPES, MPS_LOGS, VISIBLE_DEVICES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
MPS_TIMEOUT = 20  # seconds
MPS_PROBE = (  # exits with 0 if a process can use the GPU
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); "
    "raise SystemExit(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(c.byref(x), 0))"
)


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


def prepare_jobs(
    *,
    model: Path,
    task: Task,
    tuning: TuningConfig,
    hardware: HardwareConfig,
    seeds: int,
    folder: Path,
    track: TrackerName = "none",
) -> list[Job]:
    """One job per seed of a task; writes their settings into `folder`, and raises if it was started with others."""
    check_class_weights(tuning.class_weights, task)
    model = find_model_to_finetune(model)  # the same for all seeds, even if a pre-training run saves another checkpoint
    files = {file: file_checksum(Path(file)) for file in task.splits.values() if local_file_size(file)}
    settings = {"model": str(model), "precision": hardware.precision} | asdict(tuning)
    settings["length"] = tuning.length_for(task)
    del settings["micro_batches"]  # does not change results
    jobs = [
        Job(
            model=model,
            task=task,
            tuning=tuning,
            hardware=hardware,
            seed=seed,
            folder=folder / f"seed-{seed}",
            track=track,
        )
        for seed in range(1, seeds + 1)
    ]
    check_and_write_settings(folder, FinetuningRecord(settings=settings, task=asdict(task), files=files))
    for job in jobs:
        if not job.is_finished():
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


def check_and_write_settings(folder: Path, record: FinetuningRecord) -> None:
    """Store the settings of an output folder; raises if it was started with others."""
    now = json.loads(json.dumps(asdict(record)))  # as read from the file
    if any(folder.glob("seed-*")):
        before = asdict(read_stored(folder / CONFIG, FinetuningRecord))
        for part, values in now.items():
            check_same_settings(folder, before[part], values, ignore=DERIVED)
    folder.mkdir(parents=True, exist_ok=True)
    write_stored(folder / CONFIG, now)


def is_finetuning_output(folder: Path) -> bool:
    """Whether a folder is the --output of electra finetune, finished or not, and not a model or a pre-training run."""
    return (folder / CONFIG).exists() and {"settings", "task"} <= read_json(folder / CONFIG).keys()


def find_model_to_finetune(path: Path) -> Path:
    """The model folder to fine-tune: a run's newest checkpoint, or an earlier fine-tuning's best model."""
    return best_model_folder(path) if is_finetuning_output(path) else find_model_folder(path)


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
    folders = [output] if (output / RESULT).exists() else sorted(output.glob("seed-*"))
    finished = [folder for folder in folders if (folder / RESULT).exists()]
    models = [folder / MODEL for folder in finished if (folder / MODEL / WEIGHTS).exists()]
    if not models:
        raise DataError(f"no fine-tuned model in {output}; {explain_missing_model(output, finished)}")
    return models


def explain_missing_model(output: Path, finished: list[Path]) -> str:
    """What to do about a folder without fine-tuned models."""
    if finished:
        return f"it was removed; to train it again, also remove {finished[0] / RESULT}"
    if tasks := sorted({folder.parent.name for folder in output.glob("*/seed-*")}):
        return f"choose one of its tasks: {', '.join(tasks)}"
    if is_finetuning_output(output):
        return f"it is not finished; {CONTINUE}"
    if (output / CONFIG).exists() and is_huggingface_folder(output):
        get_architecture(read_json(output / CONFIG), output)  # raises for an exported classifier
    return f"create one with: electra finetune --model {output} --train … --output … (or --task)"


def run_jobs(jobs: list[Job], workers: int | None) -> list[JobResult]:
    """Run all unfinished jobs, the longest first; returns the results of all jobs."""
    unfinished = sorted((job for job in jobs if not job.is_finished()), key=estimated_cost, reverse=True)
    for model, length in {(job.model, job.length) for job in unfinished}:
        warn_untrained_length(model, length)
    for number, (job, result) in enumerate(run_here_or_in_workers(unfinished, workers), start=1):
        name, value = next(iter(result.metrics["dev"].items()))
        metrics = f"{name} {100 * value:.1f}, {result.steps:,} steps in {result.seconds:.0f} s"
        print(
            f"{number} of {len(unfinished)}: {job.task.name}, seed {job.seed}: {metrics}", file=sys.stderr, flush=True
        )
    return [job.run() for job in jobs]


def estimated_cost(job: Job) -> int:
    """Proportional to a job's time: bytes to train on."""
    return local_file_size(job.task.splits["train"]) * job.tuning.epochs_for(job.task)


def run_here_or_in_workers(jobs: Sequence[Job], workers: int | None) -> Iterator[tuple[Job, JobResult]]:
    """Run jobs, here or in worker processes, and yield each with its result when it finishes."""
    uses_gpu = bool(jobs) and choose_device(jobs[0].hardware.device).type == "cuda"
    if len(jobs) <= 1 or workers == 1 or (workers is None and not uses_gpu):
        yield from ((job, job.run()) for job in jobs)
        return
    with clean_up_on_stop_signals(), start_mps() if uses_gpu else nullcontext(False) as has_mps:
        count = min(workers or default_gpu_workers(has_mps), len(jobs))
        context = multiprocessing.get_context("spawn")
        with block_signals():
            pool = ProcessPoolExecutor(count, context, init_job_worker, (count,))
        with pool, stop_workers_on_error(pool):
            with block_signals():
                futures = [pool.submit(run_in_worker, job) for job in jobs]
            yield from (future.result() for future in as_completed(futures))


def default_gpu_workers(has_mps: bool) -> int:
    """Two without MPS: one can load and evaluate while the other trains."""
    return min(MAX_WORKERS, max(2, torch.cuda.mem_get_info()[0] // MEMORY_PER_WORKER)) if has_mps else 2


@contextmanager
def stop_workers_on_error(pool: ProcessPoolExecutor) -> Iterator[None]:
    """After an error in one job or in this process, let the other jobs save checkpoints, and wait for them."""
    try:
        yield
    except BrokenProcessPool:
        raise TrainingError(
            f"a worker process was killed, perhaps out of memory; {CONTINUE}, with fewer --workers if necessary"
        ) from None
    except BaseException as error:
        for worker in multiprocessing.active_children():
            worker.terminate()  # SIGTERM: the trainer saves a checkpoint and exits
        pool.shutdown(cancel_futures=True)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            print(f"stopped; {CONTINUE}", file=sys.stderr)
        raise


def run_in_worker(job: Job) -> tuple[Job, JobResult]:
    """Run a job in a worker process; a worker that was asked to stop exits."""
    try:
        return job, job.run(quiet=True)
    except SystemExit:
        os._exit(1)  # the pool would treat the exception as the job's and start the next job


def init_job_worker(workers: int) -> None:
    """Divide the cores among the workers, and end with the parent process."""
    init_worker()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


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
    job, task, metrics = jobs[0], jobs[0].task, {}
    tokenizer = load_model_tokenizer(job.model)
    by_split = read_mean_logits(jobs)
    for split in ("dev", *(split for split in by_split if split != "dev")):
        examples = read_examples(task, split)
        if examples.labels is not None:
            features = load_features(task, examples, tokenizer, job.length, job.features_cache)
            task, metrics[split] = compute_metrics(task, by_split[split], features, examples, calibrate=split == "dev")
    return metrics


def read_mean_logits(jobs: list[Job]) -> dict[str, NDArray]:
    """The mean of the jobs' logits [N, num_labels], by split."""
    logits = [job.read_logits() for job in jobs]
    return {split: np.mean([values[split] for values in logits], axis=0) for split in logits[0]}


@contextmanager
def start_mps() -> Iterator[bool]:
    """Start NVIDIA MPS for the processes started in this context; yields whether it is available."""
    if MPS_PIPES in os.environ:  # already running
        yield True
        return
    if shutil.which(MPS_CONTROL) is None:
        yield False
        return
    with TemporaryDirectory(prefix="electra-mps-", ignore_cleanup_errors=True) as folder:
        daemon = os.environ | {MPS_PIPES: folder, MPS_LOGS: folder}
        daemon.pop(VISIBLE_DEVICES, None)  # the daemon numbers all GPUs; its clients select among them
        client = os.environ | {MPS_PIPES: folder}
        if not command_succeeds([MPS_CONTROL, "-d"], daemon) or not command_succeeds(
            [sys.executable, "-c", MPS_PROBE], client
        ):
            command_succeeds([MPS_CONTROL], daemon, stdin="quit")
            yield False
            return
        os.environ[MPS_PIPES] = folder
        try:
            yield True
        finally:
            del os.environ[MPS_PIPES]
            command_succeeds([MPS_CONTROL], daemon, stdin="quit")


def command_succeeds(command: list[str], environment: dict[str, str], stdin: str = "") -> bool:
    """Whether a command exits with 0 within `MPS_TIMEOUT`."""
    try:
        process = subprocess.run(
            command, env=environment, input=stdin, text=True, timeout=MPS_TIMEOUT, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0
