"""`electra finetune`: one task, of GLUE's or of a user's own files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra.errors import ConfigError
from electra.finetuning.job import LOGITS, Measures, Score, TuningConfig
from electra.finetuning.jobs import Job, best_model, jobs_of, run_jobs
from electra.finetuning.metrics import METRICS, median, standard_deviation
from electra.finetuning.model import OUTPUT_TYPES
from electra.finetuning.readers import TaskKind
from electra.finetuning.tasks import Task, custom_task, glue_task, read_examples
from electra.model.storage import read_tensors


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TuningConfig):
    """Fine-tune an encoder on a task: one of GLUE's (--task and --data), or files of your own (--train, --text,
    --label): .csv, .tsv, .jsonl, .parquet.

    electra finetune --model runs/x --train reviews.csv --text review --label stars --output tuned/reviews

    The same command again goes on where it was stopped."""

    task: str | None = None
    """A task of GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli."""
    data: str | None = None
    """The folder of GLUE's official download, or hub:glue."""
    train: Path | None = None
    """A file of your own to learn from."""
    dev: Path | None = None
    """A file to measure on."""
    dev_fraction: float | None = None
    """Without --dev: the share of the training rows that is held out to measure on; 0.1 unless given."""
    text: str = "text"
    """The column of the text."""
    text_b: str | None = None
    """The column of the second text, for pairs."""
    label: str = "label"
    """The column of what is to be said of them."""
    kind: TaskKind | None = None
    """Told from the label column unless given. multi-label: lists, or names with | between them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.task is None) == (self.train is None):
            came = "both came" if self.task else "neither came"
            raise ConfigError(f"give --task with --data (GLUE), or --train (a file of your own); {came}")
        if self.task is not None and self.data is None:
            raise ConfigError("--task needs --data: the folder of GLUE's official download, or hub:glue")
        came, ignored = ("--task", ("dev", "dev_fraction", "text_b", "kind")) if self.task else ("--train", ("data",))
        for name in ignored:
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} does not go with {came}; leave one of them out")

    def the_task(self) -> Task:
        """The task these settings are of."""
        if self.task is not None:
            assert self.data is not None
            return glue_task(self.task, self.data)
        assert self.train is not None
        return custom_task(
            train=self.train,
            dev=self.dev,
            dev_fraction=self.dev_fraction,
            text=self.text,
            text_b=self.text_b,
            label=self.label,
            kind=self.kind,
        )


@dataclass(frozen=True)
class Finetuned:
    """What came of it: each seed's measures, their median and spread."""

    output: str
    model: str
    task: str
    kind: str
    labels: list[str]
    rows: dict[str, int]
    truncated: dict[str, int]
    median: dict[str, Measures]
    spread: dict[str, Measures]  # standard deviation over seeds
    seeds: list[dict[str, Measures]]
    ensemble: dict[str, Measures]

    def __str__(self) -> str:
        rows = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        shown = ", ".join(map(repr, self.labels[:10])) + (", …" if len(self.labels) > 10 else "")
        classes = f", {len(self.labels)} classes: {shown}" if self.labels else ""
        lines = [f"{self.task} ({self.kind}{classes}): {rows} rows"]
        lines += [f"{cut:,} {split} rows were cut to --length" for split, cut in self.truncated.items() if cut]
        for split, measures in self.median.items():
            for name, value in measures.items():
                lines.append(f"  {split} {name:<14}{100 * value:6.2f}{self.beside(split, name)}")
        return "\n".join([*lines, f"model: {self.model}"])

    def beside(self, split: str, name: str) -> str:
        """What stands beside a median: the spread, and all seeds together."""
        if len(self.seeds) == 1:
            return ""
        spread = f"  median of {len(self.seeds)} seeds, standard deviation {100 * self.spread[split][name]:.2f}"
        together = f", together {100 * self.ensemble[split][name]:.2f}" if self.ensemble else ""
        return spread + together


def finetune(config: FinetuneConfig) -> Finetuned:
    """Fine-tune every seed, and say what came of it."""
    task = config.the_task()
    cells = jobs_of(config, task, config.output)
    scores = run_jobs(cells, config.workers)
    median, spread = over_seeds(scores)
    return Finetuned(
        output=str(config.output),
        model=str(best_model(config.output)),
        task=task.name,
        kind=task.kind,
        labels=list(task.labels),
        rows=scores[0].rows,
        truncated=scores[0].truncated,
        median=median,
        spread=spread,
        seeds=[score.measures for score in scores],
        ensemble=ensemble(cells) if config.ensemble else {},
    )


def over_seeds(scores: list[Score]) -> tuple[dict[str, Measures], dict[str, Measures]]:
    """Medians and standard deviations over seeds, by split and metric."""
    medians: dict[str, Measures] = {}
    spreads: dict[str, Measures] = {}
    for split, measures in scores[0].measures.items():
        values = {name: [score.measures[split][name] for score in scores] for name in measures}
        medians[split] = {name: median(found) for name, found in values.items()}
        spreads[split] = {name: standard_deviation(found) for name, found in values.items()}
    return medians, spreads


def ensemble(cells: list[Job]) -> dict[str, Measures]:
    """The measures of all seeds together."""
    task, found = cells[0].task, {}
    for split, logits in mean_logits(cells).items():
        labels = read_examples(task, split).labels
        if labels is not None:
            predicted = OUTPUT_TYPES[task.kind].predict(logits, task)
            found[split] = {name: METRICS[name](predicted, labels) for name in task.metrics}
    return found


def mean_logits(cells: list[Job]) -> dict[str, NDArray]:
    """What all seeds say of the rows of each split, on average."""
    said = [read_tensors(cell.folder / LOGITS) for cell in cells]
    return {split: np.mean([one[split].numpy() for one in said], axis=0) for split in said[0]}
