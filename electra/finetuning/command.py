"""`electra finetune`: fine-tune an encoder on one task."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from electra.data.tokenizer import read_trained_length
from electra.errors import DataError, format_count
from electra.finetuning.assess import assess_finetuning
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.jobs import (
    best_model_folder,
    ensemble_metrics,
    find_model_to_finetune,
    lock_output,
    medians_and_deviations,
    prepare_jobs,
    run_jobs,
)
from electra.finetuning.kinds import KINDS, count_unknown_labels, define_task, read_examples, report_unknown_labels
from electra.finetuning.metrics import Metrics, format_class_scores, format_metric
from electra.finetuning.tasks import HUB, Task, read_split_rows


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
    baseline: Metrics  # of one prediction for all dev rows: the most frequent class, or the mean score
    classes: dict[str, Metrics]  # scores on the dev rows of the classes of a multi-label task, best seed
    best_epochs: list[int]  # of each seed, whose models were kept; empty unless asked for
    assessment: dict[str, str]  # what was learnt, in words by topic

    def __str__(self) -> str:
        rows = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        names = ", ".join(map(repr, self.labels[:10])) + (", …" if len(self.labels) > 10 else "")
        classes = f", {format_count(len(self.labels), 'class', 'classes')}: {names}" if self.labels else ""
        lines = [f"{self.task} ({self.kind}{classes}): {rows} rows"]
        lines += [
            f"{format_count(count, f'{split} row')} truncated to --length"
            for split, count in self.truncated.items()
            if count
        ]
        for split, metrics in self.median.items():
            for name, value in metrics.items():
                lines.append(f"  {split} {name:<14}{format_metric(name, value):>6}{self.describe_seeds(split, name)}")
        lines += format_class_scores(self.classes)
        if self.best_epochs:
            lines.append(f"models of the best epoch on the dev rows: {', '.join(map(str, self.best_epochs))}")
        return "\n".join([*lines, f"model: {self.model}", *self.assessment.values()])

    def describe_seeds(self, split: str, name: str) -> str:
        """Number of seeds, standard deviation and ensemble of a metric; empty for a single seed."""
        if len(self.seeds) == 1:
            return ""
        deviation = format_metric(name, self.standard_deviation[split][name])
        ensemble = f", ensemble {format_metric(name, self.ensemble[split][name])}" if self.ensemble else ""
        return f"  median of {len(self.seeds)} seeds, standard deviation {deviation}{ensemble}"


def finetune(config: FinetuneConfig) -> FinetuneResult:
    """Fine-tune with every seed and summarise the results."""
    task = define_task(config.task)
    check_other_splits(task, config.task.strict)
    with lock_output(config.output, [config.output]):
        return finetune_task(task, config)


def check_other_splits(task: Task, strict: bool) -> None:
    """Refuse faulty dev and test rows before anything is written, and report labels that cannot be predicted."""
    kind = KINDS[task.kind]
    for split, source in task.splits.items():
        is_optional = split != "dev" and not Path(source).exists()
        if source == task.splits["train"] or source.startswith(HUB) or is_optional:
            continue
        labels = read_examples(task, split).labels
        if labels is None:
            continue
        if count := sum(not kind.has_target(label) for label in labels):
            rows = f"{count:,} of {len(labels):,} rows have answers that are not in the context at their answer_start"
            if strict:
                raise DataError(f"{source}: {rows}; correct or remove them, or leave --strict out")
            print(f"{source}: {rows}; they are evaluated by the text of the answers", file=sys.stderr)
        rows_again = read_split_rows(task, split, kind.read_rows)
        report_unknown_labels(source, *count_unknown_labels(task, source, rows_again))


def with_trained_length(task: Task, model: Path) -> Task:
    """The task with a default length that is not beyond the rows that the model was pre-trained on."""
    trained_length = read_trained_length(model) or task.length
    return replace(task, length=min(task.length, max(Task.length, trained_length)))


def finetune_task(task: Task, config: FinetuneConfig) -> FinetuneResult:
    task = with_trained_length(task, find_model_to_finetune(config.model))
    jobs = prepare_jobs(
        model=config.model,
        task=task,
        tuning=config.tuning,
        hardware=config.hardware,
        seeds=config.jobs.seeds,
        folder=config.output,
        track=config.jobs.track,
    )
    results = run_jobs(jobs, config.jobs)
    median, deviation = medians_and_deviations(results)
    return FinetuneResult(
        output=str(config.output),
        model=str(best_model_folder(config.output)),
        task=task.name,
        kind=task.kind,
        labels=list(task.labels),
        rows=results[0].rows,
        truncated=results[0].truncated,
        median=median,
        standard_deviation=deviation,
        seeds=[result.metrics for result in results],
        ensemble=ensemble_metrics(jobs) if config.jobs.ensemble else {},
        baseline=results[0].baseline,
        classes=max(results, key=lambda result: result.main_metric).classes,
        best_epochs=[result.best_epoch for result in results if result.best_epoch],
        assessment=assess_finetuning(jobs, results, median["dev"]),
    )
