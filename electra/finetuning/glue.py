"""`electra glue`: fine-tune on all GLUE tasks, tabulate the results beside published ones, write a submission."""

import io
import statistics
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

from numpy.typing import NDArray

from electra.errors import DataError
from electra.finetuning.config import Glue6Task, GlueConfig
from electra.finetuning.features import Outputs
from electra.finetuning.job import MODEL, Job, JobResult
from electra.finetuning.jobs import (
    best_model_folder,
    check_same_model,
    ensemble_metrics,
    find_model_to_finetune,
    find_single_prediction,
    is_finetuning_output,
    lock_output,
    medians_and_deviations,
    prepare_jobs,
    read_mean_logits,
    run_jobs,
)
from electra.finetuning.kinds import KINDS
from electra.finetuning.metrics import Metrics, none_to_nan
from electra.finetuning.tasks import GLUE_TASKS, HUB, TEST, TRAINABLE_TASKS, Task, get_glue_task, with_data_source
from electra.formatting import markdown_table
from electra.runfolder import convert_stored, read_json, remove_written_folder, write_file, write_stored

TABLE, TABLE_MARKDOWN = "table.json", "table.md"
GLUE_6 = get_args(Glue6Task)
LARGE_TASKS = ("sst2", "qqp", "mnli", "qnli")
EXCLUDED_FROM_MEAN = "wnli"  # as in the paper: its dev rows contradict its training rows

PUBLISHED = {
    # dev results of models by the paper's authors: Matthews of CoLA, Spearman of STS-B, else accuracy
    name: dict(zip(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), values, strict=True))
    for name, values in {
        "Small (OWT)": (56.8, 88.3, 87.4, 86.8, 88.3, 78.9, 87.9, 68.5),
        "Small++": (57.0, 91.2, 88.0, 87.5, 89.0, 81.3, 88.4, 66.7),
        "Base++": (67.7, 95.1, 89.5, 91.2, 91.5, 88.8, 93.2, 82.7),
        "Large": (69.1, 96.9, 90.8, 92.6, 92.4, 90.9, 95.0, 88.0),
    }.items()
}


def select_tasks(config: GlueConfig) -> list[Task]:
    """The tasks of the table, with their data."""
    names = [name for word in config.tasks for name in (GLUE_6 if word == "glue-6" else (word,))]
    if "all" in names:
        names = [name for name in TRAINABLE_TASKS if has_split_data(GLUE_TASKS[name], "train", config.data)]
        if not names:
            reason = "has none of GLUE's folders" if Path(config.data).is_dir() else "is not a folder"
            raise DataError(f"{config.data} {reason}; --data must be GLUE's official download, or hub:glue")
    return [with_diagnostic_splits(get_glue_task(name, config.data), config.data) for name in dict.fromkeys(names)]


def has_split_data(task: Task, split: str, data: str) -> bool:
    """Whether there is data for a split."""
    return data.startswith(HUB) or Path(data, task.splits[split]).exists()


def with_diagnostic_splits(task: Task, data: str) -> Task:
    """The task, with the rows of tasks that its model predicts as further test splits."""
    for other in GLUE_TASKS.values():
        if other.predicted_by == task.name and has_split_data(other, TEST, data):
            source = with_data_source(other, data).splits[TEST]
            task = replace(task, splits=task.splits | {f"{TEST}_{other.name}": source})
    return task


def prepare_task_jobs(task: Task, config: GlueConfig) -> list[Job]:
    large_seeds = config.large_seeds if task.name in LARGE_TASKS else None
    return prepare_jobs(config, task, large_seeds or config.jobs.seeds, config.output / task.name)


@dataclass(frozen=True)
class GlueRow:
    """A task's row of the table."""

    task: str
    metric: str
    median: float  # of the main metric on the dev split over seeds, in percent
    standard_deviation: float  # NaN, in JSON null, for a single seed
    seeds: int
    seconds: float  # of training, all seeds together
    metrics: dict[str, Metrics]  # medians, by split
    ensemble: dict[str, Metrics]
    truncated: dict[str, int]  # number of truncated rows, by split


@dataclass(frozen=True)
class GlueTable:
    """Medians and standard deviations by task, beside published results."""

    model: str
    output: str
    rows: list[GlueRow]
    mean: float | None
    glue_6: float | None
    published: dict[str, dict[str, float]]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [["task", "metric", "median", "sd", "seeds", *self.published]]
        for row in self.rows:
            published = [f"{values[row.task]:.1f}" if row.task in values else "" for values in self.published.values()]
            deviation = "–" if row.seeds == 1 else f"{row.standard_deviation:.2f}"
            cells.append([row.task, row.metric, f"{row.median:.2f}", deviation, str(row.seeds), *published])
        if self.mean is not None:
            cells.append(["mean", "", f"{self.mean:.2f}", "", "", *map(self.format_published_mean, self.published)])
        glue_6 = [] if self.glue_6 is None else [f"GLUE-6 (mean of {', '.join(GLUE_6)}): {self.glue_6:.2f}"]
        return "\n".join([markdown_table(cells), "", *glue_6, *self.notes])

    def format_published_mean(self, name: str) -> str:
        """The mean of published results over the table's tasks; empty if one is missing."""
        values = [self.published[name].get(row.task) for row in self.rows if row.task != EXCLUDED_FROM_MEAN]
        known = [value for value in values if value is not None]
        return f"{statistics.mean(known):.1f}" if known and len(known) == len(values) else ""


def glue(config: GlueConfig) -> GlueTable:
    """Fine-tune on every task with every seed, and tabulate the results."""
    tasks = select_tasks(config)
    check_own_table(config.output)
    check_own_submission(config.submission)
    with lock_output(config.output, [config.output / task.name for task in tasks]):
        return tabulate_tasks(tasks, config)


def check_own_table(output: Path) -> None:
    """Raise a DataError if the table of an output folder was not written by `glue`."""
    tables = [name for name in (TABLE, TABLE_MARKDOWN) if (output / name).exists()]
    if tables and not any(is_finetuning_output(folder) for folder in output.iterdir()):
        raise DataError(f"{output} holds a {tables[0]} and no fine-tuning; choose another --output")


def tabulate_tasks(tasks: list[Task], config: GlueConfig) -> GlueTable:
    earlier_rows = read_earlier_rows(config, [task.name for task in tasks])
    jobs_by_task = [prepare_task_jobs(task, config) for task in tasks]
    results = iter(run_jobs([job for jobs in jobs_by_task for job in jobs], config.jobs))
    rows = [make_glue_row(jobs, [next(results) for _ in jobs], config.jobs.ensemble) for jobs in jobs_by_task]
    rows += earlier_rows
    if not config.keep_models:
        for jobs in jobs_by_task:
            remove_all_but_best_model(jobs)
    single = [(job, find_single_prediction(job)) for jobs in jobs_by_task for job in jobs]
    notes = [
        f"{job.task.name}, seed {job.seed}: every prediction on the dev rows is {prediction!r}"
        for job, prediction in single
        if prediction is not None
    ]
    notes += [*describe_other_results(rows), *describe_missing_tasks(rows)]
    if config.submission is not None:
        notes.append(write_glue_submission(config.submission, jobs_by_task, config.jobs.ensemble))
    table = make_glue_table(config, rows, notes)
    write_file(config.output / TABLE_MARKDOWN, f"{table}\n")
    write_stored(config.output / TABLE, asdict(table))
    return table


def make_glue_table(config: GlueConfig, rows: list[GlueRow], notes: list[str]) -> GlueTable:
    """The table of rows, with the means of their medians."""
    medians = {row.task: row.median for row in rows if row.task != EXCLUDED_FROM_MEAN}
    return GlueTable(
        model=str(config.model),
        output=str(config.output),
        rows=rows,
        mean=statistics.mean(medians.values()) if medians else None,
        glue_6=statistics.mean(medians[name] for name in GLUE_6) if medians.keys() >= set(GLUE_6) else None,
        published=PUBLISHED,
        notes=notes,
    )


def make_glue_row(jobs: list[Job], results: list[JobResult], with_ensemble: bool) -> GlueRow:
    task = jobs[0].task
    medians, deviations = medians_and_deviations(results)
    metric = task.metrics[0]
    return GlueRow(
        task=task.name,
        metric=metric,
        median=100 * medians["dev"][metric],
        standard_deviation=100 * deviations["dev"][metric],
        seeds=len(results),
        seconds=sum(result.seconds for result in results),
        metrics=medians,
        ensemble=ensemble_metrics(jobs) if with_ensemble and len(jobs) > 1 else {},
        truncated=results[0].truncated,
    )


def read_earlier_rows(config: GlueConfig, tasks: list[str]) -> list[GlueRow]:
    """The rows of other tasks in an earlier table of the same folder; raises if they are of another model."""
    if not (config.output / TABLE).exists():
        return []
    rows = [row for row in read_glue_table(config.output / TABLE).rows if row.task not in tasks]
    for folder in [config.output / row.task for row in rows]:
        if is_finetuning_output(folder):
            check_same_model(folder, find_model_to_finetune(config.model))
    return rows


def read_glue_table(path: Path) -> GlueTable:
    if not path.is_file():
        raise DataError(f"there is no {path.name} in {path.parent}; name an --output folder of electra glue")
    content = read_json(path)
    rows = content.get("rows")
    content["rows"] = [none_to_nan(row) for row in rows] if isinstance(rows, list) else rows
    return convert_stored(content, GlueTable, path)


def remove_all_but_best_model(jobs: list[Job]) -> None:
    """Remove the models of all seeds but the best of a task."""
    best = best_model_folder(jobs[0].folder.parent)
    for job in jobs:
        if job.folder / MODEL != best:
            remove_written_folder(job.folder / MODEL)


def describe_other_results(rows: list[GlueRow]) -> list[str]:
    """Notes on further metrics and splits, ensembles and truncated rows."""
    notes = []
    for row in rows:
        for split, metrics in row.metrics.items():
            others = [(name, value) for name, value in metrics.items() if (split, name) != ("dev", row.metric)]
            notes += [f"{row.task}, {split} {name}: {100 * value:.2f}" for name, value in others]
        if row.ensemble:
            notes.append(f"{row.task}, ensemble of all seeds: {100 * row.ensemble['dev'][row.metric]:.2f}")
        truncated = ", ".join(f"{count:,} {split}" for split, count in row.truncated.items() if count)
        notes += [f"{row.task}: rows truncated to --length: {truncated}"] if truncated else []
    return notes


def describe_missing_tasks(rows: list[GlueRow]) -> list[str]:
    """A note on tasks that are missing from the mean."""
    names = [row.task for row in rows]
    if names == [EXCLUDED_FROM_MEAN]:
        return [f"no mean: {EXCLUDED_FROM_MEAN} is excluded, because its dev rows contradict its training rows"]
    missing = [name for name in TRAINABLE_TASKS if name not in (*names, EXCLUDED_FROM_MEAN)]
    return [f"the mean excludes {', '.join(missing)}"] if missing else []


# Submission: a zip of one file of predictions per test split.

Predictions = dict[str, NDArray]  # class ids or scores, by `submission_key`


def submission_key(task: Task, split: str) -> str:
    """The name of a test split's predictions: the task's, "mnli_mismatched", or "diagnostic" in the task "mnli"."""
    suffix = split.removeprefix(f"{TEST}_")
    return suffix if suffix in GLUE_TASKS else task.name + split.removeprefix(TEST)


SUBMISSION_FILES = {
    submission_key(task, split): (task, file)
    for task in GLUE_TASKS.values()
    for split, file in task.submission_files.items()
}


def write_glue_submission(path: Path, jobs_by_task: list[list[Job]], use_ensemble: bool) -> str:
    """Write a submission of each task's best seed, or ensemble; returns a note about it."""
    predictions: Predictions = {}
    for jobs in jobs_by_task:
        task = jobs[0].task
        members = jobs if use_ensemble else [max(jobs, key=lambda job: job.read_result().main_metric)]
        for split, logits in read_mean_logits(members).items():
            if split.startswith(TEST):
                predictions[submission_key(task, split)] = KINDS[task.kind].predict(Outputs(logits), task)
    write_submission_zip(path, predictions)
    missing = missing_submission_files(predictions)
    return f"submission: {path}" + (f"; GLUE's site also requires {', '.join(missing)}" if missing else "")


def check_own_submission(path: Path | None) -> None:
    """Raise a DataError if a submission would replace another file than an earlier submission."""
    if path is None or not path.exists():
        return
    with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
        if {*archive.namelist()} <= {file for _, file in SUBMISSION_FILES.values()}:
            return
    raise DataError(f"{path} exists and is no GLUE submission; choose another --submission")


def write_submission_zip(path: Path, predictions: Predictions) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, predicted in predictions.items():
            task, file = SUBMISSION_FILES[name]
            entry = zipfile.ZipInfo(file)  # with a fixed date: equal predictions give equal bytes
            archive.writestr(entry, format_submission_file(task, predicted), zipfile.ZIP_DEFLATED)
    write_file(path, content.getvalue())


def missing_submission_files(predictions: Predictions) -> list[str]:
    """The files that GLUE's site requires but these predictions lack."""
    return [file for name, (_, file) in SUBMISSION_FILES.items() if name not in predictions]


def format_submission_file(task: Task, predicted: NDArray) -> str:
    """The content of one file: class names, or scores within their range."""
    if task.score_range is not None:
        predicted = predicted.clip(*task.score_range)
    decoded = KINDS[task.kind].decode(predicted, task)
    values = (f"{value:.3f}" if isinstance(value, float) else value for value in decoded)
    return "".join(["index\tprediction\n", *(f"{index}\t{value}\n" for index, value in enumerate(values))])
