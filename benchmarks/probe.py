"""How good are pre-trained models, with no look at any dev set: fine-tune them on slices of GLUE's training files.

    python benchmarks/probe.py --data glue/ --model runs/a runs/b [--tasks qnli sst2 rte] [--seeds 3] \
        [--learning-rate 3e-4 6e-4] [--layer-decay 0.8 0.9] [--pooling cls mean] [--json]

A dev set that decided which model is kept is no fair measure of it any more; these rows may decide. All models learn
from the same --rows rows and are measured on the same --held-out others, of small tasks at most a fifth of the rows.
Settings are those of `electra finetune`, but for the epochs; with several rates, decays or poolings each model has
a row for each (classic models have no pooling). The table has the median over seeds of each task's first
metric and the standard deviation. Compare models by it, not with published scores: there are fewer rows and epochs,
and the rows of SST-2 are phrases, some of them parts of others.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np

from electra.finetuning.config import TuningConfig
from electra.finetuning.glue import markdown_table
from electra.finetuning.job import Job
from electra.finetuning.jobs import make_jobs, run_jobs, summarize_seeds
from electra.finetuning.model import load_pretrained
from electra.finetuning.tasks import Task, glue_task, read_split
from electra.model.config import Pooling
from electra.training.config import HardwareConfig

SEED = 0  # decides which rows are taken
MOST_HELD_OUT = 0.2  # of the rows of a task

Found = dict[str, float]  # "median" and "spread" over seeds


def sliced(task: Task, rows: int, held_out: int, folder: Path) -> Task:
    """The task with some of its training rows to learn from and others to measure on, the same ones every time."""
    found = [row.values for row in read_split(task, "train")]
    order = np.random.default_rng(SEED).permutation(len(found))
    dev = min(held_out, int(MOST_HELD_OUT * len(found)))
    files = {}
    for split, places in {"train": order[dev : dev + rows], "dev": order[:dev]}.items():
        files[split] = folder / f"{task.name}-{split}.jsonl"
        files[split].write_text("".join(json.dumps(found[place]) + "\n" for place in places))
    return replace(task, splits={split: str(file) for split, file in files.items()})


def is_modern(model: Path) -> bool:
    """Whether a model's encoder is, so that its head may read the mean of all tokens."""
    return load_pretrained(model).encoder.config.is_modern()


def probes(groups: dict[tuple[str, str], list[Job]], tasks: list[Task]) -> dict[str, dict[str, Found]]:
    """What models reach on tasks; all fine-tunings share the workers."""
    scores = iter(run_jobs([cell for cells in groups.values() for cell in cells], None))
    metrics = {task.name: task.metrics[0] for task in tasks}
    found: dict[str, dict[str, Found]] = {}
    for (model, task), cells in groups.items():
        medians, spreads = summarize_seeds([next(scores) for _ in cells])
        numbers = {"median": medians["dev"][metrics[task]], "spread": spreads["dev"][metrics[task]]}
        found.setdefault(model, {})[task] = numbers
    return found


def table(found: dict[str, dict[str, Found]], tasks: list[Task]) -> str:
    """Models below each other, tasks beside each other."""
    cells = [["model", *(f"{task.name} ({task.metrics[0]})" for task in tasks)]]
    for model, scores in found.items():
        cells.append([model, *(f"{100 * one['median']:.2f} ± {100 * one['spread']:.2f}" for one in scores.values())])
    return markdown_table(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of GLUE, or hub:glue")
    parser.add_argument(
        "--model", nargs="+", type=Path, required=True, help="runs, model folders, Hugging Face folders"
    )
    parser.add_argument("--tasks", nargs="+", default=["qnli", "sst2"])
    parser.add_argument("--rows", type=int, default=8000, help="to learn from")
    parser.add_argument("--held-out", type=int, default=2000, help="other training rows, to measure on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", nargs="+", type=float, default=[None], help="the highest; 3e-4 for small")
    parser.add_argument("--layer-decay", nargs="+", type=float, default=[None], help="of rates, from layer to layer")
    parser.add_argument("--pooling", nargs="+", choices=get_args(Pooling), default=[None], help="of modern models")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = [glue_task(task, arguments.data) for task in arguments.tasks]
        tasks = [sliced(task, arguments.rows, arguments.held_out, folder) for task in whole]
        groups = {}
        poolings = {model: arguments.pooling if is_modern(model) else [None] for model in arguments.model}
        ways = [
            (model, *way)
            for model in poolings
            for way in product(arguments.learning_rate, arguments.layer_decay, poolings[model])
        ]
        for number, (model, rate, decay, pooling) in enumerate(ways):
            tuning = TuningConfig(
                epochs=arguments.epochs,
                length=arguments.length,
                learning_rate=rate,
                layer_decay=decay,
                pooling=pooling,
            )
            name = " ".join(str(word) for word in (model, rate, decay, pooling) if word is not None)
            for task in tasks:
                groups[name, task.name] = make_jobs(
                    model=model,
                    task=task,
                    tuning=tuning,
                    hardware=HardwareConfig(),
                    seeds=arguments.seeds,
                    folder=folder / str(number) / task.name,
                )
        found = probes(groups, tasks)
    print(json.dumps(found) if arguments.json else table(found, tasks))


if __name__ == "__main__":
    main()
