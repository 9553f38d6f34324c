"""`electra finetune`: fine-tune an encoder on one task."""

from dataclasses import dataclass
from pathlib import Path

from electra.errors import ConfigError
from electra.finetuning.job import TuningConfig
from electra.finetuning.jobs import JobsConfig, best_model, ensemble_metrics, make_jobs, run_jobs, summarize_seeds
from electra.finetuning.metrics import Metrics
from electra.finetuning.readers import TaskKind
from electra.finetuning.tasks import Task, custom_task, glue_task
from electra.training.config import HardwareConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A GLUE task (--task and --data), or your own files (--train)."""

    task: str | None = None
    """A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli."""
    data: str | None = None
    """The folder of GLUE's official download, or hub:glue."""
    train: Path | None = None
    """A file of your own to train on: .csv, .tsv, .jsonl or .parquet, or hub:NAME:CONFIG:SPLIT."""
    dev: Path | None = None
    """A file to evaluate on."""
    dev_fraction: float | None = None
    """Without --dev: fraction of the training rows that is held out for evaluation; default 0.1."""
    text: str = "text"
    """Column of the text."""
    text_b: str | None = None
    """Column of the second text, for pairs."""
    label: str = "label"
    """Column of the label or score."""
    kind: TaskKind | None = None
    """Kind of task; default inferred from the labels. multi-label: lists, or class names separated by |."""

    def __post_init__(self) -> None:
        if (self.task is None) == (self.train is None):
            raise ConfigError("give either --task with --data (GLUE) or --train (your own file)")
        if self.task is not None and self.data is None:
            raise ConfigError("--task needs --data: the folder of GLUE's official download, or hub:glue")
        if self.task is not None and self.dev is not None:
            raise ConfigError("--dev cannot be combined with --task; evaluate the model on it with electra evaluate")

    def make_task(self) -> Task:
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


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune an encoder on a GLUE task or on your own files.

    electra finetune --model runs/x --train reviews.csv --text review --label stars --output finetuned/reviews

    An interrupted run continues when the same command is repeated."""

    model: Path
    """What to fine-tune: a pre-training run, a model folder, a Hugging Face folder (ELECTRA, BERT, ModernBERT), a
    fine-tuned model, or the --output of another fine-tuning (its best seed)."""
    output: Path
    """Folder for models, metrics and plots."""
    task: TaskConfig
    tuning: TuningConfig
    jobs: JobsConfig
    hardware: HardwareConfig
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class FinetuneResult:
    """Metrics of all seeds, with their median, standard deviation and ensemble."""

    output: str
    model: str  # of the best seed
    task: str
    kind: str
    labels: list[str]
    rows: dict[str, int]  # by split
    truncated: dict[str, int]
    median: dict[str, Metrics]
    standard_deviation: dict[str, Metrics]
    seeds: list[dict[str, Metrics]]
    ensemble: dict[str, Metrics]

    def __str__(self) -> str:
        rows = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        names = ", ".join(map(repr, self.labels[:10])) + (", …" if len(self.labels) > 10 else "")
        classes = f", {len(self.labels)} classes: {names}" if self.labels else ""
        lines = [f"{self.task} ({self.kind}{classes}): {rows} rows"]
        lines += [f"{count:,} {split} rows truncated to --length" for split, count in self.truncated.items() if count]
        for split, metrics in self.median.items():
            for name, value in metrics.items():
                lines.append(f"  {split} {name:<14}{100 * value:6.2f}{self.describe_seeds(split, name)}")
        return "\n".join([*lines, f"model: {self.model}"])

    def describe_seeds(self, split: str, name: str) -> str:
        """Number of seeds, standard deviation and ensemble of a metric; empty for a single seed."""
        if len(self.seeds) == 1:
            return ""
        deviation = 100 * self.standard_deviation[split][name]
        ensemble = f", ensemble {100 * self.ensemble[split][name]:.2f}" if self.ensemble else ""
        return f"  median of {len(self.seeds)} seeds, standard deviation {deviation:.2f}{ensemble}"


def finetune(config: FinetuneConfig) -> FinetuneResult:
    """Fine-tune with every seed and summarise the results."""
    task = config.task.make_task()
    jobs = make_jobs(
        model=config.model,
        task=task,
        tuning=config.tuning,
        hardware=config.hardware,
        seeds=config.jobs.seeds,
        folder=config.output,
    )
    results = run_jobs(jobs, config.jobs.workers)
    median, deviation = summarize_seeds(results)
    return FinetuneResult(
        output=str(config.output),
        model=str(best_model(config.output)),
        task=task.name,
        kind=task.kind,
        labels=list(task.labels),
        rows=results[0].rows,
        truncated=results[0].truncated,
        median=median,
        standard_deviation=deviation,
        seeds=[result.metrics for result in results],
        ensemble=ensemble_metrics(jobs) if config.jobs.ensemble else {},
    )
