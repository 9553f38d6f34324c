"""`electra glue`: the whole table, tasks × seeds, beside the published scores."""

import shutil
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from electra.errors import ConfigError, DataError
from electra.finetuning.command import ensemble, mean_logits, over_seeds
from electra.finetuning.job import MODEL, Measures, Score, TuningConfig
from electra.finetuning.jobs import Job, best_model, jobs_of, run_jobs
from electra.finetuning.model import OUTPUT_TYPES
from electra.finetuning.submission import entry, missing_files, write_submission
from electra.finetuning.tasks import GLUE_TASKS, HUB, TEST, Task, glue_task, with_data
from electra.runfolder import read_json, write_file, write_json

ALL = "all"
TABLE = "table.json"
GLUE_6 = ("cola", "sst2", "mrpc", "stsb", "qnli", "rte")
LARGE = ("sst2", "qqp", "mnli", "qnli")
LEFT_OUT = "wnli"  # of means, as everywhere: its dev rows contradict its training rows

REFERENCES = {
    # dev scores of models by the paper's authors: CoLA by Matthews, STS-B by Spearman, the others by accuracy
    name: dict(zip(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), scores, strict=True))
    for name, scores in {
        "Small (OWT)": (56.8, 88.3, 87.4, 86.8, 88.3, 78.9, 87.9, 68.5),
        "Small++": (57.0, 91.2, 88.0, 87.5, 89.0, 81.3, 88.4, 66.7),
        "Base++": (67.7, 95.1, 89.5, 91.2, 91.5, 88.8, 93.2, 82.7),
        "Large": (69.1, 96.9, 90.8, 92.6, 92.4, 90.9, 95.0, 88.0),
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TuningConfig):
    """Fine-tune an encoder on the tasks of GLUE, several seeds each, and make one table of medians and spread, with the
    published scores of ELECTRA beside it.

    Kill it at any moment; the same command goes on, and finished seeds are not run again."""

    data: str
    """The folder of GLUE's official download, or hub:glue. MNLI's models also answer the diagnostic rows there."""
    tasks: tuple[str, ...] = (ALL,)
    """all, glue-6 (cola sst2 mrpc stsb qnli rte), or names of tasks."""
    seeds: int = 5
    """How many times each task is fine-tuned, from seed 1 on."""
    large_seeds: int | None = None
    """Seeds of the tasks with more than 20,000 training rows (sst2, qqp, mnli, qnli), whose scores differ less."""
    keeps_models: bool = False
    """Keep the model of every seed; otherwise only of each task's best."""
    submission: Path | None = None
    """Write a zip for GLUE's site: each task's best seed on the test rows, or with --ensemble all seeds together."""

    def chosen_tasks(self) -> list[Task]:
        """The tasks of the table, each with its files."""
        names = [name for word in self.tasks for name in (GLUE_6 if word == "glue-6" else (word,))]
        if not names:
            raise ConfigError("--tasks came without a name; write all, glue-6 or names of tasks behind it")
        if ALL in names:
            names = [
                name
                for name, task in GLUE_TASKS.items()
                if task.predicted_by is None and has_rows(task, "train", self.data)
            ]
        if not names:
            found = "has none of GLUE's folders" if Path(self.data).is_dir() else "is no folder"
            raise DataError(f"{self.data} {found}; give that of the official download, or hub:NAME")
        return [with_relatives(glue_task(name, self.data), self.data) for name in dict.fromkeys(names)]

    def for_task(self, task: Task) -> "GlueConfig":
        """The settings of one task."""
        if self.large_seeds is None or task.name not in LARGE:
            return self
        return replace(self, seeds=self.large_seeds, ensemble=self.ensemble and self.large_seeds > 1)


def has_rows(task: Task, split: str, data: str) -> bool:
    """Whether there are rows of a split."""
    return data.startswith(HUB) or Path(data, task.splits[split]).exists()


def with_relatives(task: Task, data: str) -> Task:
    """The task with the rows of others that its model answers, as further test splits."""
    for other in GLUE_TASKS.values():
        if other.predicted_by == task.name and has_rows(other, TEST, data):
            place = with_data(other, data).splits[TEST]
            task = replace(task, splits=task.splits | {f"{TEST}_{other.name}": place})
    return task


@dataclass(frozen=True)
class Line:
    """A task's line of the table."""

    task: str
    metric: str
    median: float  # of the headline over seeds, in percent
    spread: float  # standard deviation; NaN, in JSON null, of one seed
    seeds: int
    seconds: float  # of training, all seeds together
    measures: dict[str, Measures]  # medians, by split
    ensemble: dict[str, Measures]
    truncated: dict[str, int]


@dataclass(frozen=True)
class GlueTable:
    """Tasks, medians and spread, beside published scores."""

    model: str
    output: str
    lines: list[Line]
    mean: float | None  # of nothing there is none
    glue_6: float | None
    references: dict[str, dict[str, float]]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [["task", "metric", "median", "sd", "seeds", *self.references]]
        for line in self.lines:
            published = [
                f"{scores[line.task]:.1f}" if line.task in scores else "" for scores in self.references.values()
            ]
            spread = "–" if line.seeds == 1 else f"{line.spread:.2f}"
            cells.append([line.task, line.metric, f"{line.median:.2f}", spread, str(line.seeds), *published])
        if self.mean is not None:
            means = [f"{self.mean:.2f}", "", "", *(self.published_mean(name) for name in self.references)]
            cells.append(["mean", "", *means])
        six = [] if self.glue_6 is None else [f"GLUE-6 (the mean of {', '.join(GLUE_6)}): {self.glue_6:.2f}"]
        return "\n".join([markdown(cells), "", *six, *self.notes])

    def published_mean(self, name: str) -> str:
        """The mean of published scores over the same tasks."""
        scores = [self.references[name].get(line.task) for line in self.lines if line.task != LEFT_OUT]
        found = [score for score in scores if score is not None]
        return f"{statistics.mean(found):.1f}" if found and len(found) == len(scores) else ""


def markdown(cells: list[list[str]]) -> str:
    """A table that reads well as it is, and as Markdown."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    rows = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])


def glue(config: GlueConfig) -> GlueTable:
    """Fine-tune every seed of every task, and make the table."""
    if config.submission is not None and not config.submission.parent.is_dir():
        raise ConfigError(f"there is no folder {config.submission.parent} to write {config.submission.name} into")
    tasks = config.chosen_tasks()
    groups = [jobs_of(config.for_task(task), task, config.output / task.name) for task in tasks]
    scores = iter(run_jobs([cell for group in groups for cell in group], config.workers))
    lines = [line_of(group, [next(scores) for _ in group]) for group in groups]
    lines += earlier_lines(config.output, tasks)
    if not config.keeps_models:
        for group in groups:
            remove_models(group)
    counted = [line.median for line in lines if line.task != LEFT_OUT]
    six = [line.median for line in lines if line.task in GLUE_6]
    table = GlueTable(
        model=str(config.model),
        output=str(config.output),
        lines=lines,
        mean=statistics.mean(counted) if counted else None,
        glue_6=statistics.mean(six) if len(six) == len(GLUE_6) else None,
        references=REFERENCES,
        notes=notes_of(lines) + absent(lines) + (submit(config, groups) if config.submission else []),
    )
    write_file(config.output / "table.md", f"{table}\n".encode())
    write_json(config.output / TABLE, asdict(table))
    return table


def earlier_lines(output: Path, tasks: list[Task]) -> list[Line]:
    """The lines of other tasks that an earlier table in the folder has: a table never loses any."""
    if not (output / TABLE).exists():
        return []
    now = [task.name for task in tasks]
    return [Line(**line) for line in read_json(output / TABLE)["lines"] if line["task"] not in now]


def absent(lines: list[Line]) -> list[str]:
    """Which tasks a mean is not over, or why there is none."""
    there = [line.task for line in lines]
    if there == [LEFT_OUT]:
        return [f"{LEFT_OUT} is left out of means, so there is none: its dev rows contradict its training rows"]
    missing = [
        name for name, task in GLUE_TASKS.items() if task.predicted_by is None and name not in (*there, LEFT_OUT)
    ]
    return [f"the mean is without {', '.join(missing)}"] if missing else []


def line_of(cells: list[Job], scores: list[Score]) -> Line:
    """The line of a task."""
    task = cells[0].task
    medians, spreads = over_seeds(scores)
    metric = task.metrics[0]
    return Line(
        task=task.name,
        metric=metric,
        median=100 * medians["dev"][metric],
        spread=100 * spreads["dev"][metric],
        seeds=len(scores),
        seconds=sum(score.seconds for score in scores),
        measures=medians,
        ensemble=ensemble(cells) if cells[0].config.ensemble else {},
        truncated=scores[0].truncated,
    )


def remove_models(cells: list[Job]) -> None:
    """Keep only the model of a task's best seed."""
    best = best_model(cells[0].folder.parent)
    for cell in cells:
        if cell.folder / MODEL != best:
            shutil.rmtree(cell.folder / MODEL, ignore_errors=True)


def notes_of(lines: list[Line]) -> list[str]:
    """What else there is to say: further splits, all seeds together, texts that were cut."""
    notes = []
    for line in lines:
        for split, measures in line.measures.items():
            others = [(name, value) for name, value in measures.items() if (split, name) != ("dev", line.metric)]
            notes += [f"{line.task}, {split} {name}: {100 * value:.2f}" for name, value in others]
        if line.ensemble:
            notes.append(f"{line.task}, all seeds together: {100 * line.ensemble['dev'][line.metric]:.2f}")
        cut = ", ".join(f"{count:,} {split}" for split, count in line.truncated.items() if count)
        notes += [f"{line.task}: rows cut to --length: {cut}"] if cut else []
    return notes


def submit(config: GlueConfig, groups: list[list[Job]]) -> list[str]:
    """Write the zip for GLUE's site; returns what to say of it."""
    assert config.submission is not None
    predictions: dict[str, Any] = {}
    for cells in groups:
        task = cells[0].task
        chosen = cells if config.ensemble else [max(cells, key=lambda cell: cell.run().headline)]
        for split, logits in mean_logits(chosen).items():
            if split.startswith(TEST):
                predictions[name_of(task, split)] = OUTPUT_TYPES[task.kind].predict(logits, task)
    write_submission(config.submission, predictions)
    missing = missing_files(predictions)
    lacking = f"; GLUE's site also wants {', '.join(missing)}" if missing else ""
    return [f"submission: {config.submission}{lacking}"]


def name_of(task: Task, split: str) -> str:
    """The name of a test split among predictions: its own task's where a relative's model answers it."""
    relative = split.removeprefix(f"{TEST}_")
    return relative if relative in GLUE_TASKS else entry(task, split)
