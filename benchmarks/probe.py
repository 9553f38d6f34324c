"""Compare pre-trained models without the dev sets: fine-tune and evaluate on subsets of GLUE's training files.

    python benchmarks/probe.py --data glue/ --model runs/a runs/b [--tasks qnli sst2 rte] [--seeds 3] \
        [--learning-rate 3e-4 6e-4] [--layer-decay 0.8 0.9] [--pooling cls mean] [--json]

Selecting a model on a dev set biases its score there, so models are selected on these subsets instead. All models are
trained on the same --rows rows and evaluated on the same --held-out other rows (at most a fifth of a task's rows).
Settings are those of `electra finetune` except for the epochs; each combination of learning rate, layer decay and
pooling is a row of the table (classic models have no pooling). The table shows the median and standard deviation over
seeds of each task's first metric. These are not comparable with published scores: there are fewer rows and epochs, and
the training rows of SST-2 are phrases that overlap.
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

SEED = 0  # of the choice of rows
MAX_HELD_OUT_FRACTION = 0.2

Score = dict[str, float]  # "median" and "spread" over seeds


def subset(task: Task, rows: int, held_out: int, folder: Path) -> Task:
    """The task with random training rows as its train and dev splits, always the same ones."""
    values = [row.values for row in read_split(task, "train")]
    order = np.random.default_rng(SEED).permutation(len(values))
    dev = min(held_out, int(MAX_HELD_OUT_FRACTION * len(values)))
    files = {}
    for split, indices in {"train": order[dev : dev + rows], "dev": order[:dev]}.items():
        files[split] = folder / f"{task.name}-{split}.jsonl"
        files[split].write_text("".join(json.dumps(values[index]) + "\n" for index in indices))
    return replace(task, splits={split: str(file) for split, file in files.items()})


def is_modern(model: Path) -> bool:
    return load_pretrained(model).encoder.config.is_modern()


def run_groups(groups: dict[tuple[str, str], list[Job]], tasks: list[Task]) -> dict[str, dict[str, Score]]:
    """Scores by model and task; the jobs of all groups share the workers."""
    results = iter(run_jobs([job for jobs in groups.values() for job in jobs], None))
    metrics = {task.name: task.metrics[0] for task in tasks}
    scores: dict[str, dict[str, Score]] = {}
    for (model, task), jobs in groups.items():
        medians, spreads = summarize_seeds([next(results) for _ in jobs])
        score = {"median": medians["dev"][metrics[task]], "spread": spreads["dev"][metrics[task]]}
        scores.setdefault(model, {})[task] = score
    return scores


def format_scores(scores: dict[str, dict[str, Score]], tasks: list[Task]) -> str:
    """A table with a row for each model and a column for each task."""
    cells = [["model", *(f"{task.name} ({task.metrics[0]})" for task in tasks)]]
    for model, row in scores.items():
        cells.append([model, *(f"{100 * each['median']:.2f} ± {100 * each['spread']:.2f}" for each in row.values())])
    return markdown_table(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of GLUE, or hub:glue")
    parser.add_argument(
        "--model", nargs="+", type=Path, required=True, help="runs, model folders, Hugging Face folders"
    )
    parser.add_argument("--tasks", nargs="+", default=["qnli", "sst2"])
    parser.add_argument("--rows", type=int, default=8000, help="training rows")
    parser.add_argument("--held-out", type=int, default=2000, help="rows to evaluate on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", nargs="+", type=float, default=[None], help="peak learning rate")
    parser.add_argument("--layer-decay", nargs="+", type=float, default=[None], help="learning rate decay per layer")
    parser.add_argument("--pooling", nargs="+", choices=get_args(Pooling), default=[None], help="of modern models")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        glue_tasks = [glue_task(task, arguments.data) for task in arguments.tasks]
        tasks = [subset(task, arguments.rows, arguments.held_out, folder) for task in glue_tasks]
        groups = {}
        poolings = {model: arguments.pooling if is_modern(model) else [None] for model in arguments.model}
        combinations = [
            (model, *settings)
            for model in poolings
            for settings in product(arguments.learning_rate, arguments.layer_decay, poolings[model])
        ]
        for number, (model, rate, decay, pooling) in enumerate(combinations):
            tuning = TuningConfig(
                epochs=arguments.epochs,
                length=arguments.length,
                learning_rate=rate,
                layer_decay=decay,
                pooling=pooling,
            )
            name = " ".join(str(value) for value in (model, rate, decay, pooling) if value is not None)
            for task in tasks:
                groups[name, task.name] = make_jobs(
                    model=model,
                    task=task,
                    tuning=tuning,
                    hardware=HardwareConfig(),
                    seeds=arguments.seeds,
                    folder=folder / str(number) / task.name,
                )
        scores = run_groups(groups, tasks)
    print(json.dumps(scores) if arguments.json else format_scores(scores, tasks))


if __name__ == "__main__":
    main()
