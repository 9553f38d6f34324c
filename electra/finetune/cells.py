"""Cells: the seeds of tasks that a table is made of, one after the other or side by side; finished ones stay."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from electra.errors import ConfigError, DataError
from electra.finetune.tasks import HUB, Task
from electra.finetune.tuning import RESULT, Score, TuningConfig, fine_tune
from electra.model.storage import CONFIG, read_json, write_json
from electra.training.machine import choose_device


@dataclass(frozen=True)
class Cell:
    """One seed of one task."""

    config: TuningConfig
    task: Task
    seed: int
    folder: Path
    is_quiet: bool = False

    def run(self) -> Score:
        """Fine-tune, unless that is done."""
        return fine_tune(self.config, self.task, self.seed, self.folder, self.is_quiet)

    def cost(self) -> float:
        """About how long it takes, in bytes to read."""
        train = self.task.splits["train"]
        size = 0 if train.startswith(HUB) or not Path(train).exists() else Path(train).stat().st_size
        return size * self.config.epochs_for(self.task)


def cells_of(config: TuningConfig, task: Task, folder: Path) -> list[Cell]:
    """A cell for every seed of a task; refuses a folder that was begun with other settings."""
    record = {"settings": config.common(), "task": asdict(task)}
    claim(folder, record)
    is_quiet = workers_for(config) > 1
    return [Cell(config, task, seed, folder / f"seed-{seed}", is_quiet) for seed in range(1, config.seeds + 1)]


def claim(folder: Path, record: dict[str, Any]) -> None:
    """Write down what a folder is for; refuse it if something else was begun there."""
    record = json.loads(json.dumps(record))  # as it comes back from the file
    if not (folder / CONFIG).exists() and folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty and holds no fine-tuning; choose another --output")
    if any(folder.glob("seed-*")):
        before = read_json(folder / CONFIG)
        for part in ("settings", "task"):
            refuse_other(before.get(part, {}), record[part], folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, record)


def refuse_other(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse settings that differ from those a folder was begun with."""
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        told = "; ".join(f"{name} was {before.get(name)} and is now {now[name]}" for name in differing)
        raise ConfigError(f"{folder} was begun with other settings: {told}; use the same, or choose another --output")


def workers_for(config: TuningConfig) -> int:
    """How many cells are run side by side: on a GPU one loads and measures while another trains."""
    if config.workers is not None:
        return config.workers
    return 2 if choose_device(config.device).type == "cuda" else 1


def run_cells(cells: list[Cell], workers: int) -> list[Score]:
    """The scores of all cells, long ones begun first."""
    waiting = sorted((cell for cell in cells if not (cell.folder / RESULT).exists()), key=lambda cell: -cell.cost())
    for number, (cell, score) in enumerate(finished(waiting, min(workers, len(waiting))), start=1):
        name, value = next(iter(score.measures["dev"].items()))
        told = f"{name} {100 * value:.1f}, {score.steps:,} steps in {score.seconds:.0f} s"
        print(f"{number} of {len(waiting)}: {cell.task.name}, seed {cell.seed}: {told}", file=sys.stderr, flush=True)
    return [cell.run() for cell in cells]


def finished(cells: list[Cell], workers: int) -> Iterator[tuple[Cell, Score]]:
    """Cells as they end, with their scores."""
    if workers <= 1:
        yield from ((cell, cell.run()) for cell in cells)
        return
    with multiprocessing.get_context("spawn").Pool(workers, settle, (os.getpid(), workers)) as pool:
        yield from pool.imap_unordered(run_cell, cells, chunksize=1)


def run_cell(cell: Cell) -> tuple[Cell, Score]:
    """A cell and its score."""
    return cell, cell.run()


def settle(parent: int, workers: int) -> None:
    """What a worker does first: take its share of the cores, and see to it that it does not outlive its parent."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def end_with(parent: int) -> None:
    """End this process when its parent is no more: a killed table must not go on in secret."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
