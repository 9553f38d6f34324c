"""`electra finetune`: fine-tune an encoder on one task."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from electra.data.tokenizer import read_trained_length
from electra.errors import DataError
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.job import Job, JobResult
from electra.finetuning.jobs import (
    best_model_folder,
    ensemble_metrics,
    find_model_to_finetune,
    find_single_prediction,
    lock_output,
    medians_and_deviations,
    prepare_jobs,
    run_jobs,
)
from electra.finetuning.kinds import KINDS, count_unknown_labels, define_task, read_examples, report_unknown_labels
from electra.finetuning.metrics import Metrics, format_class_scores, format_metric
from electra.finetuning.tasks import HUB, Task, read_split_rows
from electra.formatting import format_count
from electra.training.logging import METRICS_FILE, read_metrics

CORRELATIONS = ("matthews", "pearson", "spearman")
OVERFITTING = 1.1  # times the lowest dev loss


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
        lines += format_class_scores(self.classes, "dev ")
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
    jobs = prepare_jobs(config, task, config.jobs.seeds, config.output)
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


# What was learnt, in words.


def assess_finetuning(jobs: list[Job], results: list[JobResult], median: Metrics) -> dict[str, str]:
    """Sentences about the finished jobs of a task by topic; some topics are there only if they apply."""
    assessment = {}
    is_better, assessment["baseline"] = compare_with_baseline(jobs[0], results[0], median)
    seeds_note = f" (with {{}} of {len(jobs)} seeds)" if len(jobs) > 1 else ""
    if single := [prediction for job in jobs if (prediction := find_single_prediction(job)) is not None]:
        assessment["one_class"] = f"Every prediction on the dev rows is {single[0]!r}{seeds_note.format(len(single))}."
    if overfitting := [sentence for job in jobs if (sentence := describe_overfitting(job))]:
        assessment["overfitting"] = overfitting[0] + seeds_note.format(len(overfitting)) + "."
    suffix = KINDS[jobs[0].task.kind].output_formats[0]
    advice = f"electra predict --model {jobs[0].folder.parent} --input FILE --output predictions{suffix}"
    if single or not is_better:
        advice = "more --epochs, another --learning-rate, more rows, or an encoder that was pre-trained for longer"
    elif overfitting:
        advice = "fewer --epochs (or --best-epoch) or more rows, and --seeds 5 to compare settings"
    return assessment | {"next": f"Next: {advice}."}


def compare_with_baseline(job: Job, result: JobResult, median: Metrics) -> tuple[bool, str]:
    """Whether the main metric is clearly above that of one prediction for all rows, and a sentence that says so."""
    name, value = next(iter(median.items()))
    baseline = result.baseline.get(name, math.nan)
    baseline = 0.0 if math.isnan(baseline) else baseline  # the correlation of a constant
    margin = (2 if name in CORRELATIONS else 1) / math.sqrt(result.rows["dev"])  # about two standard errors
    baseline_name = KINDS[job.task.kind].baseline_name
    values = f"{name} {format_metric(name, value)} and {format_metric(name, baseline)}"
    if value > baseline + margin:
        return True, f"Better than {baseline_name} ({values})."
    return False, (
        f"Not clearly better than {baseline_name} ({values}): with {result.rows['dev']:,} dev rows, "
        f"differences up to {format_metric(name, margin)} may be chance."
    )


def describe_overfitting(job: Job) -> str:
    """Where the dev loss was lowest, if it rose clearly after that and the last model was kept; otherwise empty."""
    if job.tuning.keeps_best_epoch:
        return ""
    evaluations = [line["loss"] for line in read_metrics(job.folder / METRICS_FILE) if line["kind"] == "validation"]
    losses = [math.inf if loss is None else loss for loss in evaluations]  # None: not finite
    lowest = min(losses, default=math.inf)  # metrics.jsonl may be cut
    if lowest == math.inf or losses[-1] <= OVERFITTING * lowest:
        return ""
    before = f"{lowest:.3f} after epoch {losses.index(lowest) + 1} of {len(losses)}"
    return f"It over-fits: the dev loss was {before} and is {losses[-1]:.3f} now"
