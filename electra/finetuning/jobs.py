"""Cells: the seeds of tasks that a table is made of, one after the other or side by side; finished ones stay."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from electra.data.prepare import init_worker
from electra.errors import DataError, TrainingError
from electra.finetuning.gpu_sharing import shared_gpu
from electra.finetuning.job import MODEL, RESULT, Score, TuningConfig, fine_tune, read_score
from electra.finetuning.tasks import HUB, Task
from electra.huggingface.names import get_architecture
from electra.model.storage import WEIGHTS, is_huggingface_folder
from electra.runfolder import CONFIG, check_same_settings, file_checksum, is_empty, read_json, write_json
from electra.training.checkpoint import model_folder
from electra.training.hardware import choose_device

GO_ON = "the same command goes on from there"
MEMORY = 16 * 2**30  # bytes: room for a base model with its optimizer and activations


@dataclass(frozen=True)
class Job:
    """One seed of one task."""

    config: TuningConfig
    task: Task
    seed: int
    folder: Path

    def run(self, is_quiet: bool = False) -> Score:
        """Fine-tune, unless that is done."""
        return fine_tune(self.config, self.task, self.seed, self.folder, is_quiet)

    def cost(self) -> float:
        """About how long it takes, in bytes to read."""
        return file_size(self.task.splits["train"]) * self.config.epochs_for(self.task)


def file_size(source: str) -> int:
    """Bytes of a file; 0 for what is none."""
    return 0 if source.startswith(HUB) or not Path(source).exists() else Path(source).stat().st_size


def jobs_of(config: TuningConfig, task: Task, folder: Path) -> list[Job]:
    """A cell for every seed of a task; refuses a folder that was begun with other settings or files."""
    config = replace(config, model=encoder_folder(config.model))  # one for all seeds, though a run may train on
    files = {file: file_checksum(Path(file)) for file in task.splits.values() if file_size(file)}
    claim(folder, {"settings": config.common(), "task": asdict(task), "files": files})
    return [Job(config, task, seed, folder / f"seed-{seed}") for seed in range(1, config.seeds + 1)]


def claim(folder: Path, record: dict[str, Any]) -> None:
    """Write down what a folder is for; refuse it if something else was begun there."""
    record = json.loads(json.dumps(record))  # as it comes back from the file
    before = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if not is_empty(folder) and not is_claim(before):
        raise DataError(f"{folder} is not empty and holds no fine-tuning; choose another --output")
    if any(folder.glob("seed-*")):
        for part, settings in record.items():
            check_same_settings(folder, before.get(part, {}), settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, record)


def is_claim(record: dict[str, Any]) -> bool:
    """Whether a config.json is that of a folder of seeds, not of a model or a run."""
    return "settings" in record and "task" in record


def is_fine_tuning(folder: Path) -> bool:
    """Whether a folder is the --output of a fine-tuning, finished or not."""
    return (folder / CONFIG).exists() and is_claim(read_json(folder / CONFIG))


def encoder_folder(path: Path) -> Path:
    """The folder of what is fine-tuned: of a run the newest checkpoint, of an earlier fine-tuning the best model."""
    if is_fine_tuning(path):
        return best_model(path)
    return model_folder(path)


def best_model(output: Path) -> Path:
    """The model of the seed with the best headline; `output` may also be a fine-tuned model itself."""
    models = seed_models(output)
    if len(models) == 1:
        return models[0]
    return max(models, key=lambda model: read_score(model.parent / RESULT).headline)


def seed_models(output: Path) -> list[Path]:
    """The models of all finished seeds; `output` may also be a fine-tuned model itself, or one seed's folder."""
    if not output.is_dir():
        raise DataError(f"there is no folder {output}; give the --output of electra finetune")
    if (output / CONFIG).exists() and "encoder" in read_json(output / CONFIG):
        return [output]
    seeds = [output] if (output / RESULT).exists() else sorted(output.glob("seed-*"))
    finished = [folder for folder in seeds if (folder / RESULT).exists()]
    models = [folder / MODEL for folder in finished if (folder / MODEL / WEIGHTS).exists()]
    if not models:
        raise DataError(f"there is no fine-tuned model in {output}; {advice_on(output, finished)}")
    return models


def advice_on(output: Path, finished: list[Path]) -> str:
    """What to do about a folder without fine-tuned models."""
    if finished:
        return f"it was removed after {finished[0] / RESULT} was written: remove that, too, to make it again"
    if tasks := sorted({folder.parent.name for folder in output.glob("*/seed-*")}):
        return f"choose one of the tasks in it: {', '.join(tasks)}"
    if is_fine_tuning(output):
        return "it is not finished: the same electra finetune command goes on"
    if (output / CONFIG).exists() and is_huggingface_folder(output):
        get_architecture(read_json(output / CONFIG), output)  # says so where it is a classifier that was exported
    return f"make one with: electra finetune --model {output} --train … --output … (or --task)"


def run_jobs(cells: list[Job], workers: int | None) -> list[Score]:
    """The scores of all cells, long ones begun first."""
    waiting = sorted((cell for cell in cells if not (cell.folder / RESULT).exists()), key=lambda cell: -cell.cost())
    for number, (cell, score) in enumerate(finished(waiting, workers), start=1):
        name, value = next(iter(score.measures["dev"].items()))
        told = f"{name} {100 * value:.1f}, {score.steps:,} steps in {score.seconds:.0f} s"
        print(f"{number} of {len(waiting)}: {cell.task.name}, seed {cell.seed}: {told}", file=sys.stderr, flush=True)
    return [cell.run() for cell in cells]


def finished(cells: list[Job], workers: int | None) -> Iterator[tuple[Job, Score]]:
    """Cells as they end, with their scores."""
    is_on_gpu = bool(cells) and choose_device(cells[0].config.device).type == "cuda"
    if len(cells) <= 1 or (workers or (2 if is_on_gpu else 1)) == 1:
        yield from ((cell, cell.run()) for cell in cells)
        return
    with exit_on_sigterm(), shared_gpu() if is_on_gpu else nullcontext(False) as is_shared:
        count = min(workers or workers_on_gpu(is_shared), len(cells))
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, spawning, settle, (count,)) as pool, stopping(pool):
            running = [pool.submit(run_cell, cell) for cell in cells]
            yield from (cell.result() for cell in as_completed(running))


def workers_on_gpu(is_shared: bool) -> int:
    """How many cells are run side by side, unless the user says: one loads and measures while others train."""
    return min(8, max(2, torch.cuda.mem_get_info()[0] // MEMORY)) if is_shared else 2


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, with time to stop the workers."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stopping(pool: ProcessPoolExecutor) -> Iterator[None]:
    """If anything goes wrong in one cell or here, let the others save what they have, and wait for that."""
    try:
        yield
    except BrokenProcessPool:
        raise TrainingError(
            f"a worker was killed, perhaps for want of memory; {GO_ON}, with fewer --workers if need be"
        ) from None
    except BaseException as error:
        for worker in multiprocessing.active_children():
            worker.terminate()  # SIGTERM: a trainer saves and ends
        pool.shutdown(cancel_futures=True)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            print(f"stopped, and saved; {GO_ON}", file=sys.stderr)
        raise


def run_cell(cell: Job) -> tuple[Job, Score]:
    """A cell and its score, in a worker; one that was told to stop begins no other cell."""
    try:
        return cell, cell.run(is_quiet=True)
    except SystemExit:
        os._exit(1)  # the pool would take any exception for the cell's, and go on


def settle(workers: int) -> None:
    """What a worker does first: take its share of the cores, and see to it that it does not outlive its parent."""
    init_worker()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
