"""What a fine-tuning has learnt, in words: dev metrics beside those of one prediction for all rows."""

import math

import numpy as np

from electra.finetuning.features import Outputs
from electra.finetuning.job import Job, JobResult
from electra.finetuning.kinds import KINDS
from electra.finetuning.metrics import Metrics, format_metric
from electra.training.logging import METRICS, read_metrics

CORRELATIONS = ("matthews", "pearson", "spearman")
OVERFITTING = 1.1  # times the lowest dev loss


def assess_finetuning(jobs: list[Job], results: list[JobResult], median: Metrics) -> dict[str, str]:
    """Sentences about the finished jobs of a task by topic; some topics are there only if they apply."""
    assessment = {}
    is_better, assessment["baseline"] = compare_with_baseline(jobs[0], results[0], median)
    of_seeds = f" (with {{}} of {len(jobs)} seeds)" if len(jobs) > 1 else ""
    if single := [prediction for job in jobs if (prediction := find_single_prediction(job)) is not None]:
        assessment["one_class"] = f"Every prediction on the dev rows is {single[0]!r}{of_seeds.format(len(single))}."
    if overfitting := [sentence for job in jobs if (sentence := describe_overfitting(job))]:
        assessment["overfitting"] = overfitting[0] + of_seeds.format(len(overfitting)) + "."
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


def find_single_prediction(job: Job) -> str | list[str] | None:
    """The class (of a multi-label task: the classes) that is predicted for all dev rows, if there is only one."""
    kind = KINDS[job.task.kind]
    if not kind.has_classes or not kind.has_row_logits:
        return None
    predicted = kind.predict(Outputs(job.read_logits()["dev"]), job.task)
    is_single = len(predicted) > 1 and len(np.unique(predicted, axis=0)) == 1
    return kind.decode(predicted[:1], job.task)[0] if is_single else None


def describe_overfitting(job: Job) -> str:
    """Where the dev loss was lowest, if it rose clearly after that and the last model was kept; otherwise empty."""
    if job.tuning.keeps_best_epoch:
        return ""
    evaluations = [line["loss"] for line in read_metrics(job.folder / METRICS) if line["kind"] == "validation"]
    losses = [loss for loss in evaluations if loss is not None]
    lowest = min(losses, default=math.inf)  # metrics.jsonl may be cut
    if not losses or losses[-1] <= OVERFITTING * lowest:
        return ""
    before = f"{lowest:.3f} after epoch {losses.index(lowest) + 1} of {len(losses)}"
    return f"It over-fits: the dev loss was {before} and is {losses[-1]:.3f} now"
