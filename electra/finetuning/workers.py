"""Jobs in parallel: in worker processes that share the GPUs of this machine, or on a Ray cluster.

Processes on one GPU use NVIDIA's Multi-Process Service (MPS) where it is installed. Without it their kernels take turns
and small models leave most of the GPU idle: six small models in three processes took hardly less time than one after
the other (docs/log.md).
"""

import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from electra.data.workers import (
    count_usable_cores,
    init_worker,
    map_on_ray,
    results_as_completed,
    starting_workers,
    wait_for_result,
)
from electra.errors import DataError, TrainingError
from electra.finetuning.job import Job, JobResult
from electra.runfolder import lock_file
from electra.signals import STOP_SIGNALS, clean_up_on_stop_signals
from electra.training.hardware import choose_device

Result = TypeVar("Result")

CONTINUE = "run the same command to continue"
MEMORY_PER_WORKER = 16 * 2**30  # bytes of GPU memory: a base model with its optimizer and activations
MAX_WORKERS = 8
LOST_JOB_SECONDS = 300.0
TERMINATE_SECONDS = 1.0  # between signals
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPES, MPS_LOGS, VISIBLE_DEVICES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
MPS_TIMEOUT = 20  # seconds
MPS_PROBE = (  # exits with 0 if a process can use the GPU
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); "
    "raise SystemExit(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(c.byref(x), 0))"
)


def run_here_or_in_workers(jobs: Sequence[Job], workers: int | None) -> Iterator[tuple[Job, JobResult]]:
    """Run jobs, here or in worker processes, and yield each with its result when it finishes."""
    uses_gpu = bool(jobs) and choose_device(jobs[0].hardware.device).type == "cuda"
    if len(jobs) <= 1 or workers == 1 or (workers is None and not uses_gpu):
        yield from ((job, job.run()) for job in jobs)
        return
    with clean_up_on_stop_signals(), start_mps() if uses_gpu else nullcontext(False) as has_mps:
        gpus = visible_gpus() if uses_gpu else []
        count = min(workers or len(gpus) * default_gpu_workers(has_mps), len(jobs))
        context = multiprocessing.get_context("spawn")
        with starting_workers():
            numbers = context.SimpleQueue()  # each worker takes one
            for number in range(count):
                numbers.put(number)
            pool = ProcessPoolExecutor(count, context, init_job_worker, (count, numbers, gpus))
        with pool, stop_workers_on_error(pool):
            with starting_workers():
                futures = [pool.submit(run_in_worker, job) for job in jobs]
            yield from results_as_completed(futures)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them."""
    listed = os.environ.get(VISIBLE_DEVICES)
    names = [str(number) for number in range(torch.cuda.device_count())] if listed is None else listed.split(",")
    return names[: torch.cuda.device_count()]  # CUDA ignores what follows an invalid entry


def default_gpu_workers(has_mps: bool) -> int:
    """The workers of a GPU. Two without MPS: one can load and evaluate while the other trains."""
    return min(MAX_WORKERS, max(2, torch.cuda.mem_get_info()[0] // MEMORY_PER_WORKER)) if has_mps else 2


@contextmanager
def stop_workers_on_error(
    pool: ProcessPoolExecutor, advice: str = ", with fewer --workers if necessary", repeat: bool = True
) -> Iterator[None]:
    """After an error in one job or in this process, let the other jobs save checkpoints, and wait for them."""
    try:
        yield
    except BrokenProcessPool:
        raise TrainingError(f"a worker process was killed, perhaps out of memory; {CONTINUE}{advice}") from None
    except BaseException as error:
        terminate_workers(list((pool._processes or {}).values()), repeat)
        pool.shutdown(cancel_futures=True)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            print(f"stopped; {CONTINUE}", file=sys.stderr)
        raise


def terminate_workers(workers: list[BaseProcess], repeat: bool) -> None:
    """Send SIGTERM to workers, once or until they have ended.

    A trainer records the signal, saves a checkpoint after its step and exits. If that step fails or is the last one,
    the signal has no effect, and the worker waits for the next job: forever, if another worker was terminated while it
    held the lock of the queue of jobs."""
    while workers:
        for worker in workers:
            worker.terminate()
        if not repeat:
            return
        wait([worker.sentinel for worker in workers], timeout=TERMINATE_SECONDS)
        workers = [worker for worker in workers if worker.is_alive()]


def is_stopped(exit_code: int) -> bool:
    """Whether a process ended because of a signal that stops commands, which it may have handled."""
    return exit_code - 128 in STOP_SIGNALS or -exit_code in STOP_SIGNALS


def call_in_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function in a process of its own, which ends with its use of the GPU: a process that has been a
    client of MPS cannot use the GPU after MPS has ended."""
    with starting_workers():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), init_worker)
    with pool, stop_workers_on_error(pool, advice="", repeat=False):  # a second signal would interrupt its clean-up
        with starting_workers():
            future = pool.submit(call_with_clean_up, function, *arguments)
        return wait_for_result(future)


def call_with_clean_up(function: Callable[..., Result], *arguments: Any) -> Result:
    with clean_up_on_stop_signals():
        return function(*arguments)


def run_in_worker(job: Job) -> tuple[Job, JobResult]:
    """Run a job in a worker process; a worker that was asked to stop exits."""
    try:
        return job, job.run(quiet=True)
    except SystemExit:
        os._exit(1)  # the pool would treat the exception as the job's and start the next job


def run_on_ray(jobs: Sequence[Job], address: str) -> Iterator[tuple[Job, JobResult]]:
    """Run jobs on a Ray cluster, and yield each with its result when it finishes."""
    return map_on_ray(partial(run_on_node, Path.cwd()), jobs, address, uses_gpu=jobs[0].hardware.device != "cpu")


def run_on_node(folder: Path, job: Job) -> tuple[Job, JobResult]:
    """Run a job on a node of a cluster, in the folder that its paths are relative to.

    If a node is lost, the job may be started again on another while it ends: the lock makes the second one wait."""
    output = folder / job.folder.parent
    if not (folder.is_dir() and output.is_dir()):
        raise DataError(
            f"{platform.node()} has no folder {output}; all nodes of the Ray cluster need model, data and output under "
            "the same paths"
        )
    os.chdir(folder)
    with lock_file(job.folder, LOST_JOB_SECONDS):
        return run_in_worker(job)


def init_job_worker(workers: int, numbers: Any, gpus: list[str]) -> None:
    """Divide cores and GPUs among the workers, and end with the parent process."""
    init_worker()
    if gpus:
        os.environ[VISIBLE_DEVICES] = gpus[numbers.get() % len(gpus)]  # before CUDA is initialized
    torch.set_num_threads(max(1, count_usable_cores() // workers))


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
