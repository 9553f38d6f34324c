"""Compare pre-trained models, or settings of fine-tuning, on GLUE's training rows alone.

    python benchmarks/probe.py --data glue/ --model runs/a runs/b --output results.jsonl [--seeds 2] \
        [--setting paper] [--setting muon optimizer=muon learning_rate=1e-3 layer_decay=0.9] [--tasks rte cola]
    python benchmarks/probe.py --table results.jsonl [--score metric auc loss] [--baseline runs/a paper]

Selecting models on a dev set biases their scores there; this script never reads the dev files. CoLA, MRPC, RTE and
STS-B are evaluated by five-fold cross-validation over their training rows; QNLI and SST-2, which have more, train on
one slice of 20,000 rows (--slice-rows) and are evaluated on 8,000 others (--slice-held-out, at most a fifth of all
rows). Folds and slices are the same in every run. That makes 22 fine-tunings per model, setting and seed. A setting is
a name, followed by settings of `electra finetune` that differ from its defaults (the fields of TuningConfig).

Each result is appended to --output as a line of JSON when its fine-tuning ends. Results that are already there are not
computed again, so an interrupted command can be repeated, and models, settings and seeds can be added. A failing
fine-tuning does not stop the others: it is tried once more and then reported. Models, plots and checkpoints are not
written. --rows N uses N rows per task, to try the script.

The table shows 100 × the score by task, averaged over folds and seeds, ± its standard error. `metric` is the task's
main metric, `auc` the area under the ROC curve, computed from the logits (STS-B: Spearman again), `loss` the held-out
cross-entropy (STS-B: squared error). Correlations of constant predictions, which are undefined, count as 0.

Standard errors: let x[f, s] be the score of fold f and seed s; the 8,000 held-out rows of a slice are divided into five
parts that take the place of folds. The squared standard error of the mean of x is the variance over folds of the means
over seeds, divided by the number of folds, plus the variance over seeds of the means over folds, divided by the number
of seeds. The sum counts the interaction of fold and seed twice, so it rather overstates these two sources; with two
seeds the second term is itself uncertain. The error of the mean over tasks treats tasks as independent and fixed.
The last column is the difference of the mean from the baseline's (--baseline, else the first row; rows are sorted by
name). Its error is computed in the same way from the differences of x[f, s], which share folds and seeds: use it to
compare two rows. Rows with missing results have no mean.
**Not included**: the variation between pre-training seeds, which is larger (about 0.6 points of GLUE-6), so two rows
show a difference between two checkpoints, not yet between two recipes; the choice of the training rows of slices; and
the correlation of folds, whose training rows overlap. The scores are not comparable with published ones: there are
fewer rows, and training rows of SST-2 are phrases of which some contain others.
"""

import argparse
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from electra.config import build_config
from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning.config import TuningConfig
from electra.finetuning.features import Outputs
from electra.finetuning.glue import GLUE_6, markdown_table
from electra.finetuning.job import FinetuningTask, Job, build_trainer
from electra.finetuning.jobs import estimated_cost, find_model_to_finetune, run_here_or_in_workers
from electra.finetuning.metrics import Metrics
from electra.finetuning.tasks import GLUE_TASKS, Task, get_glue_task, read_split_rows
from electra.objectives.evaluation import roc_auc
from electra.runfolder import dump_json
from electra.training.config import Device, HardwareConfig

FOLDS = 5
SLICED_TASKS = ("qnli", "sst2")
MAX_HELD_OUT_FRACTION = 0.2  # of a slice
PERMUTATION_SEED = 0  # of the rows
ATTEMPTS = 2  # an error on the GPU may be that of another process that shares it
SCORES = ("metric", "auc", "loss")

Record = dict[str, Any]  # a line of the results
Key = tuple[str, str, str, int, int]  # model, setting, task, fold, seed
KEY_FIELDS = ("model", "setting", "task", "fold", "seed")


def record_key(record: Record) -> Key:
    return tuple(record[name] for name in KEY_FIELDS)


@dataclass(frozen=True, kw_only=True)
class ProbeJob(Job):
    """A fine-tuning that returns a line of the results and writes nothing but cached features.

    If it fails, it returns None, and the error is in its folder.
    """

    model_name: str
    setting: str
    fold: int

    @property
    def key(self) -> Key:
        return self.model_name, self.setting, self.task.name, self.fold, self.seed

    @property
    def error_file(self) -> Path:
        return self.folder / "error.txt"

    def identity(self) -> Record:
        """The fields that a result in the file must share to count as this job's."""
        fields = {"checkpoint": str(self.model), "tuning": asdict(self.tuning), "rows": count_rows(self.task)}
        return json.loads(dump_json(dict(zip(KEY_FIELDS, self.key, strict=True)) | fields))

    def run(self, quiet: bool = False) -> Record | None:
        try:
            start = time.perf_counter()
            record = finetune(self)
            return self.identity() | record | {"seconds": time.perf_counter() - start}
        except Exception as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_expected = isinstance(error, ConfigError | DataError | TrainingError)
            self.error_file.write_text(str(error) if is_expected else traceback.format_exc())
        finally:
            gc.collect()  # CUDA graphs are in reference cycles; destroying one while another is captured is an error
        if multiprocessing.parent_process() is not None and not is_device_usable(self.hardware.device):
            os._exit(1)  # after some errors of CUDA, every later job of this process would fail
        return None


def finetune(job: ProbeJob) -> Record:
    """Train as `electra finetune` does, without checkpoints, and evaluate at the end."""
    finetuning = FinetuningTask(job)
    trainer = build_trainer(finetuning, quiet=True)
    trainer.run_step = trainer.build_step()
    while not trainer.is_finished():
        trainer.step()
    trainer.check_nonfinite_steps()
    dev = finetuning.splits["dev"]
    logits, targets = finetuning.compute_outputs("dev").logits, dev.labels.cpu().numpy()
    record = {"steps": trainer.state.step, "metrics": held_out_metrics(finetuning, logits, targets)}
    if job.task.name in SLICED_TASKS:
        parts = [slice(part, None, FOLDS) for part in range(FOLDS)]
        record["parts"] = [held_out_metrics(finetuning, logits[part], targets[part]) for part in parts]
    return record


def held_out_metrics(finetuning: FinetuningTask, logits: NDArray, targets: NDArray) -> Metrics:
    """The task's metrics, the loss and, for classes, the AUC of logits [N, num_labels]."""
    task, output_type = finetuning.task, finetuning.kind
    labels = targets if task.labels else task.denormalize_scores(targets)
    metrics = task.compute_metrics(output_type.predict(Outputs(logits), task), labels)
    metrics["loss"] = output_type.loss(torch.from_numpy(logits), torch.from_numpy(targets)).mean().item()
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
    tasks = []
    for fold, (train, dev) in enumerate(folds):
        splits = {}
        for split, indices in {"train": train, "dev": dev}.items():
            path = folder / f"{task.name}-{fold}-{split}.jsonl"
            path.write_text("".join(json.dumps(values[index]) + "\n" for index in indices))
            splits[split] = str(path)
        tasks.append(replace(task, splits=splits))
    return tasks


def count_rows(task: Task) -> dict[str, int]:
    return {split: Path(path).read_bytes().count(b"\n") for split, path in task.splits.items()}


# Results: a file of JSON lines.


def read_records(path: Path) -> list[Record]:
    """The results in a file; a last line that a killed process left incomplete is ignored."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: ignored an incomplete line", file=sys.stderr)
    return records


def append_record(path: Path, record: Record) -> None:
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        line_end = b"" if file.read() in (b"", b"\n") else b"\n"  # after an incomplete line
        file.write(line_end + dump_json(record).encode() + b"\n")


def without_finished(jobs: list[ProbeJob], output: Path) -> list[ProbeJob]:
    """The jobs that have no result yet; raises if one has a result of other settings, rows or another checkpoint."""
    records = {record_key(record): record for record in read_records(output)}
    for job in jobs:
        record = records.get(job.key, {})
        for name, value in job.identity().items() if record else ():
            if record[name] != value:
                raise ConfigError(
                    f"{output} has results of {' '.join(map(str, job.key))} with {name} {record[name]}, "
                    f"but now it is {value}; choose another --output or another name for the setting"
                )
    return [job for job in jobs if job.key not in records]


def run_probe(jobs: list[ProbeJob], workers: int | None, output: Path) -> dict[Key, str]:
    """Run jobs, the longest first, and append their results; returns the errors of those that failed."""
    pending, total = sorted(jobs, key=estimated_cost, reverse=True), len(jobs)
    finished: set[Key] = set()
    attempts: Counter[Key] = Counter()
    errors: dict[Key, str] = {}
    while pending:
        broken = None
        try:
            for job, record in run_here_or_in_workers(pending, workers):
                assert isinstance(job, ProbeJob)
                if record is not None:
                    append_record(output, record)
                    finished.add(job.key)
                    report(f"{len(finished)} of {total}", job, record)
        except TrainingError as error:  # a worker process ended
            broken = str(error)
        failed = [job for job in pending if job.error_file.exists()]
        for job in failed:
            attempts[job.key] += 1
            errors[job.key] = job.error_file.read_text()
            job.error_file.unlink()
        unfinished = [job for job in pending if job.key not in finished and attempts[job.key] < ATTEMPTS]
        if broken and not failed and len(unfinished) == len(pending):  # not one job ended in this round
            errors |= {job.key: broken for job in unfinished}
            break
        pending = unfinished
    return {key: error for key, error in errors.items() if key not in finished}


def report(progress: str, job: ProbeJob, record: Record) -> None:
    """Print a line about a finished job."""
    metric = job.task.metrics[0]
    value = math.nan if record["metrics"][metric] is None else 100 * record["metrics"][metric]
    name = f"{job.model_name}, {job.setting}, {job.task.name}, fold {job.fold}, seed {job.seed}"
    text = f"{progress}: {name}: {metric} {value:.1f}, {record['steps']:,} steps in {record['seconds']:.0f} s"
    print(text, file=sys.stderr, flush=True)


# The table.


def score_name(task: str, score: str) -> str:
    """The name in a record's metrics of a task's score."""
    main = GLUE_TASKS[task].metrics[0]
    return main if score == "metric" or (score == "auc" and not GLUE_TASKS[task].labels) else score


def score_matrix(records: Iterable[Record], score: str) -> dict[tuple[int, int], list[float]]:
    """The scores of one task by fold and seed: one value per fold, or one per part of a slice."""
    scores = {}
    for record in records:
        values = [metrics[score] for metrics in record.get("parts", [record["metrics"]])]
        scores[record["fold"], record["seed"]] = [0.0 if value is None else value for value in values]
    return scores


def as_array(scores: dict[tuple[int, int], list[float]]) -> NDArray:
    """Scores as an array [folds or parts, seeds]; raises a KeyError if one is missing."""
    folds, seeds = (sorted(set(indices)) for indices in zip(*scores, strict=True))
    return np.array([[scores[fold, seed] for seed in seeds] for fold in folds]).swapaxes(1, 2).reshape(-1, len(seeds))


def mean_and_error(scores: NDArray) -> tuple[float, float]:
    """The mean of scores [folds, seeds] and its standard error, NaN for a single score; see the module's docstring."""
    variances = [
        scores.mean(axis=1 - axis).var(ddof=1) / scores.shape[axis] for axis in (0, 1) if scores.shape[axis] > 1
    ]
    return float(scores.mean()), math.sqrt(sum(variances)) if variances else math.nan


def mean_of_tasks(arrays: Iterable[NDArray]) -> tuple[float, float]:
    """The mean over tasks and its standard error."""
    means, errors = np.array([mean_and_error(scores) for scores in arrays]).T
    return float(means.mean()), float(np.sqrt(np.sum(errors**2)) / len(errors))


def task_scores(records: list[Record], tasks: list[str], score: str) -> dict[str, dict[tuple[int, int], list[float]]]:
    """The scores of one model and setting by task, fold and seed."""
    by_task = {task: [record for record in records if record["task"] == task] for task in tasks}
    return {task: score_matrix(by_task[task], score_name(task, score)) for task in tasks}


def format_table(records: list[Record], score: str, baseline: tuple[str, str] | None = None) -> str:
    """A Markdown table with a row for each model and setting and a column for each task."""
    tasks = [task for task in GLUE_6 if any(record["task"] == task for record in records)]
    expected = {task: {(r["fold"], r["seed"]) for r in records if r["task"] == task} for task in tasks}
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: (record["model"], record["setting"])):
        rows.setdefault((record["model"], record["setting"]), []).append(record)
    scores = {row: task_scores(rows[row], tasks, score) for row in rows}
    complete = {
        row: {task: as_array(values) for task, values in by_task.items()}
        for row, by_task in scores.items()
        if all(by_task[task].keys() == expected[task] for task in tasks)
    }
    baseline = baseline or next(iter(complete), None)
    header = [f"{task} ({score_name(task, score)})" for task in tasks]
    cells = [["model", "setting", *header, "mean", "difference"]]
    for row, by_task in scores.items():
        line = [format_task(by_task[task], len(expected[task])) for task in tasks]
        line.append(format_score(*mean_of_tasks(complete[row].values())) if row in complete else "")
        if row == baseline:
            line.append("baseline")
        elif row in complete and baseline in complete:
            differences = [complete[row][task] - complete[baseline][task] for task in tasks]
            line.append(format_score(*mean_of_tasks(differences), sign="+"))
        else:
            line.append("")
        cells.append([*row, *line])
    return markdown_table(cells)


def format_task(scores: dict[tuple[int, int], list[float]], expected: int) -> str:
    """Mean and standard error, or how many results are missing."""
    if len(scores) < expected:
        return f"{expected - len(scores)} of {expected} missing"
    return format_score(*mean_and_error(as_array(scores)))


def format_score(mean: float, error: float, sign: str = "") -> str:
    return f"{100 * mean:{sign}.2f} ± {100 * error:.2f}" if math.isfinite(error) else f"{100 * mean:{sign}.2f}"


def print_tables(path: Path, scores: list[str], baseline: list[str] | None) -> None:
    records = list({record_key(record): record for record in read_records(path)}.values())
    for score in scores if records else []:
        print(f"{score}\n\n{format_table(records, score, tuple(baseline) if baseline else None)}\n")


# The command line.


def parse_settings(arguments: list[list[str]]) -> dict[str, TuningConfig]:
    """Configs by name from lists of a name and KEY=VALUE words."""
    settings: dict[str, TuningConfig] = {}
    for name, *words in arguments:
        pairs = [word.partition("=") for word in words]
        if "=" in name or name in settings or not all(sign for _, sign, _ in pairs):
            raise ConfigError(f"--setting {name} {' '.join(words)}: write a new name, then KEY=VALUE …")
        settings[name] = build_config(TuningConfig, **{key.replace("-", "_"): value for key, _, value in pairs})
    return settings


def prepare_jobs(arguments: argparse.Namespace, folder: Path) -> list[ProbeJob]:
    """A job for each model, setting, task, fold and seed."""
    for path in arguments.model:
        if not path.is_dir():
            raise DataError(f"no folder {path}; --model must be a run, a model folder or a Hugging Face folder")
    sizes = (arguments.rows, arguments.slice_rows, arguments.slice_held_out)
    tasks = [write_splits(get_glue_task(name, arguments.data), folder, *sizes) for name in arguments.tasks]
    settings = parse_settings(arguments.setting or [["default"]])
    models = {str(path): find_model_to_finetune(path) for path in arguments.model}
    jobs: list[ProbeJob] = []
    for model in models:
        for setting, tuning in settings.items():
            for fold, task in ((fold, task) for folds in tasks for fold, task in enumerate(folds)):
                jobs += [
                    ProbeJob(
                        model=models[model],
                        task=task,
                        tuning=tuning,
                        hardware=HardwareConfig(device=arguments.device),
                        seed=seed,
                        folder=folder / "-".join(map(str, ("job", len(jobs), seed))),  # features are cached beside it
                        model_name=model,
                        setting=setting,
                        fold=fold,
                    )
                    for seed in range(1, arguments.seeds + 1)
                ]
    return jobs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="print the table of earlier results only")
    parser.add_argument("--data", help="folder of GLUE, or hub:glue")
    parser.add_argument("--model", nargs="+", type=Path, help="runs, model folders, Hugging Face folders")
    parser.add_argument("--output", type=Path, help="file of results, .jsonl; those already there are kept")
    parser.add_argument("--tasks", nargs="+", choices=GLUE_6, default=list(GLUE_6))
    parser.add_argument(
        "--setting", nargs="+", action="append", metavar="WORD", help="NAME KEY=VALUE …; may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--slice-rows", type=int, default=20_000, help="training rows of qnli and sst2")
    parser.add_argument("--slice-held-out", type=int, default=8_000, help="rows to evaluate qnli and sst2 on")
    parser.add_argument("--rows", type=int, help="use at most this many rows per task")
    parser.add_argument("--workers", type=int, help="processes; default as in electra finetune: at most 8")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--score", nargs="+", choices=SCORES, default=["metric", "auc"], help="scores to tabulate")
    parser.add_argument("--baseline", nargs=2, metavar=("MODEL", "SETTING"), help="default: the table's first row")
    arguments = parser.parse_args()
    if arguments.table is None and None in (arguments.data, arguments.model, arguments.output):
        parser.error("give --data, --model and --output, or --table")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.table is not None:
        print_tables(arguments.table, arguments.score, arguments.baseline)
        return 0
    with tempfile.TemporaryDirectory(prefix="electra-probe-") as temporary:
        jobs = without_finished(prepare_jobs(arguments, Path(temporary)), arguments.output)
        errors = run_probe(jobs, arguments.workers, arguments.output)
    print_tables(arguments.output, arguments.score, arguments.baseline)
    for key, error in errors.items():
        print(f"failed: {' '.join(map(str, key))}: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, DataError) as error:
        sys.exit(f"error: {error}")
