"""The score of fine-tuning by the number of training examples, on subsets of GLUE's training rows."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from electra.finetuning.jobs import find_model_to_finetune
from electra.finetuning.probe import ProbeJob, parse_settings, run_probe_jobs, without_finished, write_rows
from electra.finetuning.probe_results import Estimate, estimate_mean, read_results
from electra.finetuning.storage import checksum_of_weights
from electra.finetuning.tasks import Task, get_glue_task, read_split_rows
from electra.studies.config import AnalyzeConfig
from electra.training.config import HardwareConfig

FEW_SHOT = "few-shot.jsonl"
MIN_STEPS = 200  # of fine-tuning on few examples
MAX_HELD_OUT = 2_000


@dataclass(frozen=True)
class FewShotPoint:
    """The score after fine-tuning on some examples."""

    task: str
    metric: str
    examples: int
    score: Estimate


def few_shot_curve(config: AnalyzeConfig) -> tuple[list[FewShotPoint], dict[str, str]]:
    """Fine-tune on more and more examples of each task; returns scores and errors."""
    output = config.output / FEW_SHOT
    with tempfile.TemporaryDirectory(prefix="electra-few-shot-") as temporary:
        jobs = list(few_shot_jobs(config, Path(temporary)))
        errors = run_probe_jobs(without_finished(jobs, output), config.workers, output)
    by_key = {result.key: result for result in read_results(output)}
    points = []
    for task in config.tasks:
        for setting in dict.fromkeys(job.setting for job in jobs if job.task.name == task):
            keys = [job.key for job in jobs if (job.task.name, job.setting) == (task, setting)]
            results = [by_key[key] for key in keys if key in by_key]
            if results:
                metric = get_glue_task(task, config.glue or "").metrics[0]
                scores = np.array([[result.metrics[metric] or 0.0] for result in results])  # [subsets, 1]
                points.append(FewShotPoint(task, metric, int(setting.split()[0]), estimate_mean(scores)))
    return points, errors


def few_shot_jobs(config: AnalyzeConfig, folder: Path) -> Iterator[ProbeJob]:
    """Jobs on random subsets of each task's training rows, evaluated on the same held-out training rows."""
    model = find_model_to_finetune(config.model)
    weights = checksum_of_weights(model)
    [tuning] = parse_settings(("few-shot", *config.finetuning)).values()
    for name in config.tasks:
        task = get_glue_task(name, config.glue or "")
        for examples, subset, part in few_shot_splits(task, config, folder):
            epochs = max(tuning.epochs_for(task), math.ceil(MIN_STEPS * tuning.batch_size / examples))
            yield ProbeJob(
                model=model,
                task=part,
                tuning=replace(tuning, epochs=epochs if tuning.epochs is None else tuning.epochs),
                hardware=HardwareConfig(device=config.device),
                seed=subset + 1,
                folder=folder / f"{name}-{examples}-{subset}" / "job",
                model_name=str(config.model),
                weights=weights,
                setting=f"{examples} examples",
                fold=subset,
            )


def few_shot_splits(task: Task, config: AnalyzeConfig, folder: Path) -> Iterator[tuple[int, int, Task]]:
    """The number of examples, the number of the subset, and the task with these rows."""
    values = [row.values for row in read_split_rows(task, "train")]
    order = np.random.default_rng(0).permutation(len(values))
    held_out = min(MAX_HELD_OUT, len(order) // 5)
    for examples in config.examples:
        if examples > len(order) - held_out:
            continue
        for subset in range(config.seeds):
            chosen = np.random.default_rng(subset + 1).permutation(order[held_out:])[:examples]
            rows = {"train": chosen, "dev": order[:held_out]}
            yield examples, subset, write_rows(task, values, rows, folder / f"{task.name}-{examples}-{subset}")
