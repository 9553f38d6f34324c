"""The result of a study: a table, a figure, and which of the paper's orderings hold here."""

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from electra.errors import DataError, format_count
from electra.finetuning.glue import markdown_table
from electra.finetuning.probe_results import Estimate
from electra.plotting import ErrorBars, plot_error_bars
from electra.runfolder import is_missing_or_empty, read_json, write_file, write_json
from electra.studies.measures import (
    ASSUMED_DEGREES,
    FIXED_RTD_AUC,
    FIXED_RTD_LOSS,
    PRETRAINING_SD,
    MeasuredRun,
    Scores,
    estimate_loss,
    estimate_probe,
    estimate_probe_difference,
    pooled_variance,
    probe_mean,
)
from electra.studies.studies import Study, StudySetting

Verdict = Literal["holds", "reversed", "within noise", "not learnt", "not measured"]
STUDY = "study.json"
STANDARD_ERRORS = 2.0  # a difference of fewer is within noise
STUDENT = {2: 4.3, 3: 3.2, 4: 2.8, 5: 2.6, 6: 2.4, 7: 2.4, 8: 2.3, 9: 2.3, 10: 2.2}
"""97.5 % quantiles of Student's distribution: as many standard errors, if they are estimated with few degrees of
freedom (by the number of these)."""
MeasureName = Literal["probe", "fixed RTD loss"]


@dataclass(frozen=True)
class SettingResult:
    """The runs with one setting: means over seeds."""

    label: str
    runs: list[str]
    steps: float
    tokens: float
    minutes: float
    flops: float
    probe: Estimate | None
    difference: Estimate | None  # of the measure, from the first setting's
    fixed_rtd_loss: Estimate | None  # of discriminators
    fixed_rtd_auc: Estimate | None
    mlm_loss: Estimate | None  # of encoders that predict tokens
    paper: float | None


@dataclass(frozen=True)
class Ordering:
    """An ordering that the paper reports, and what was measured."""

    better: str
    worse: str
    paper: list[float]  # its scores, where they are printed
    verdict: Verdict
    difference: Estimate | None  # positive if the ordering is the same here

    def describe(self, measure: MeasureName) -> str:
        details = [] if self.difference is None else [format_difference(self.difference, measure)]
        details += [f"paper: {self.paper[0]:.1f} and {self.paper[1]:.1f}"] if self.paper else []
        return f"{self.better} above {self.worse}" + (f" ({'; '.join(details)})" if details else "")


def format_difference(difference: Estimate, measure: MeasureName) -> str:
    digits = 2 if measure == "probe" else 4
    error = "" if difference.error is None else f" ± {difference.error:.{digits}f}"
    return f"{difference.mean:+.{digits}f}{error}"


@dataclass(frozen=True)
class StudyResult:
    """A study's settings with their measures, and its verdicts."""

    name: str
    question: str
    source: str
    measure: MeasureName
    settings: list[SettingResult]
    orderings: list[Ordering]
    verdict: str  # in words
    missing: list[str]  # runs that are not finished
    failed: dict[str, str]  # errors by run or fine-tuning
    output: str = ""
    files: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def __str__(self) -> str:
        missing = [f"not finished: {', '.join(self.missing)}"] if self.missing else []
        failed = [f"failed: {name}: {error}" for name, error in self.failed.items()]
        written = [f"written to {self.output}: {', '.join(self.files)}"] if self.files else []
        table = markdown_table(table_cells(self.settings, self.measure))
        question = self.question + f" ({self.source})" * bool(self.source)
        return "\n\n".join([question, table, self.verdict, *missing, *failed, *written])


class SettingsComparison:
    """Measures of the finished runs of a study, by setting and seed."""

    def __init__(self, study: Study, measured: list[MeasuredRun], wants_probe: bool = True) -> None:
        self.study = study
        self.runs = {
            setting.label: {each.run.seed: each for each in measured if each.run.setting == setting}
            for setting in study.settings
        }
        has_scores = [each.scores is not None for each in measured]
        # without --glue, the probe of some of the runs may be there because another study has them, too
        is_probed = any(has_scores) if wants_probe else all(has_scores)
        self.measure: MeasureName = "probe" if is_probed else "fixed RTD loss"
        means = [[probe_mean(scores) for scores in self.probe_scores(label)] for label in self.runs]
        self.repeated_settings = sum(len(each) > 1 for each in means)
        self.probe_variance = pooled_variance(means, PRETRAINING_SD**2, ASSUMED_DEGREES) or 0.0
        self.loss_variance = {name: self.pool(name) for name in (FIXED_RTD_LOSS, FIXED_RTD_AUC)}
        self.mlm_variance = pooled_variance([self.token_losses(label) for label in self.runs])
        losses = [self.fixed_rtd(label, FIXED_RTD_LOSS) for label in self.runs]
        degrees = sum(len(each) - 1 for each in losses if each)
        self.standard_errors = STUDENT.get(degrees, STANDARD_ERRORS) if self.measure != "probe" else STANDARD_ERRORS

    def pool(self, name: str) -> float | None:
        return pooled_variance([self.fixed_rtd(label, name) for label in self.runs])

    def fixed_rtd(self, label: str, name: str) -> list[float]:
        return [each.metrics[name] for each in self.runs[label].values() if name in each.metrics]

    def token_losses(self, label: str) -> list[float]:
        return [loss for each in self.runs[label].values() if (loss := each.token_loss()) is not None]

    def difference(self, first: str, second: str) -> Estimate | None:
        """How much better the runs of the first setting are than those of the second, on average."""
        if self.measure == "probe":
            ours, others = self.probe_scores(first), self.probe_scores(second)
            if not ours or not others:
                return None
            difference = estimate_probe_difference(ours, others, self.probe_variance)
            return Estimate(100 * difference.mean, None if difference.error is None else 100 * difference.error)
        losses, other_losses = (self.fixed_rtd(label, FIXED_RTD_LOSS) for label in (first, second))
        if not losses or not other_losses:
            return None
        variance = self.loss_variance[FIXED_RTD_LOSS] if min(len(losses), len(other_losses)) > 1 else None
        error = None if variance is None else (variance / len(losses) + variance / len(other_losses)) ** 0.5
        return Estimate(float(np.mean(other_losses) - np.mean(losses)), error)  # a lower loss is better

    def probe_scores(self, label: str) -> list[Scores]:
        return [each.scores for each in self.runs[label].values() if each.scores is not None]

    def setting_result(self, setting: StudySetting) -> SettingResult | None:
        """The measures of a setting; None without a finished run."""
        label, first = setting.label, self.study.settings[0].label
        runs = list(self.runs[label].values())
        if not runs:
            return None
        scores = self.probe_scores(label)

        def mean(value: Callable[[MeasuredRun], float]) -> float:
            return float(np.mean([value(each) for each in runs]))

        def loss(name: str) -> Estimate | None:
            values = self.fixed_rtd(label, name)
            return estimate_loss(values, self.loss_variance[name]) if values else None

        token_losses = self.token_losses(label)
        return SettingResult(
            label=label,
            runs=[each.run.name for each in runs],
            steps=mean(lambda each: each.record.steps),
            tokens=mean(lambda each: each.record.tokens),
            minutes=mean(lambda each: each.record.minutes),
            flops=mean(lambda each: each.record.flops),
            probe=estimate_probe(scores, self.probe_variance) if scores else None,
            difference=None if label == first else self.difference(label, first),
            fixed_rtd_loss=loss(FIXED_RTD_LOSS),
            fixed_rtd_auc=loss(FIXED_RTD_AUC),
            mlm_loss=estimate_loss(token_losses, self.mlm_variance) if token_losses else None,
            paper=setting.paper,
        )

    def ordering(self, better: str, worse: str) -> Ordering:
        difference = self.difference(better, worse)
        by_label = {setting.label: setting.paper for setting in self.study.settings}
        paper = [value for value in (by_label[better], by_label[worse]) if value is not None]
        has_learnt = all(each.has_learnt() for label in (better, worse) for each in self.runs[label].values())
        verdict = judge(difference, has_learnt, self.standard_errors)
        return Ordering(better, worse, paper if len(paper) == 2 else [], verdict, difference)

    def describe_errors(self) -> str:
        """What the standard errors include."""
        seeds = max((len(runs) for runs in self.runs.values()), default=0)
        if self.measure == "fixed RTD loss":
            count = format_count(seeds, "pre-training seed")
            return f"Standard errors are those of {count}, pooled over the settings." if seeds > 1 else ""
        assumed = f"{100 * PRETRAINING_SD:.1f}"
        if not self.repeated_settings:
            between = (
                f"an assumed standard deviation of {assumed} points between pre-training seeds, of which there is one"
            )
        else:
            measured = format_count(self.repeated_settings, "setting")
            between = (
                f"a standard deviation of {100 * self.probe_variance**0.5:.2f} points between pre-training seeds: from "
                f"{measured} with several of them, and an assumed {assumed} that counts as {ASSUMED_DEGREES} degrees "
                "of freedom"
            )
        return f"Standard errors include folds and fine-tuning seeds of the probe, and {between}."

    def describe_differences_of_runs(self) -> str:
        """What makes runs less comparable: other hardware, or fewer held-out rows."""
        records = [each.record for runs in self.runs.values() for each in runs.values()]
        devices = sorted({record.device for record in records})
        sentences = []
        if len(devices) > 1:
            sentences.append(
                f"The runs were trained on different devices ({', '.join(devices)}), where equal minutes are not equal "
                "compute."
            )
        if len({record.evaluation_rows for record in records}) > 1:
            sentences.append("MLM losses are of different numbers of held-out rows (--evaluation-rows).")
        return " ".join(sentences)


def judge(difference: Estimate | None, has_learnt: bool = True, standard_errors: float = STANDARD_ERRORS) -> Verdict:
    """Whether a difference, positive in the paper, is positive here by more than its error allows.

    Encoders that have learnt nothing differ, too: their fine-tuned models predict one class or another."""
    if difference is None or difference.error is None:
        return "not measured"
    if not has_learnt:
        return "not learnt"
    if abs(difference.mean) <= standard_errors * difference.error:
        return "within noise"
    return "holds" if difference.mean > 0 else "reversed"


def summarize_study(
    name: str,
    study: Study,
    measured: list[MeasuredRun],
    missing: list[str],
    failed: dict[str, str],
    wants_probe: bool = True,
) -> StudyResult:
    comparison = SettingsComparison(study, measured, wants_probe)
    orderings = [comparison.ordering(*labels) for labels in study.orderings]
    results = [comparison.setting_result(setting) for setting in study.settings]
    settings = [result for result in results if result is not None]
    if study.orderings:
        findings = describe_orderings(orderings, comparison.measure, comparison.standard_errors)
    else:
        findings = describe_differences(comparison, [setting.label for setting in settings])
    return StudyResult(
        name=name,
        question=study.question,
        source=study.source,
        measure=comparison.measure,
        settings=settings,
        orderings=orderings,
        verdict=" ".join(
            filter(None, (findings, comparison.describe_errors(), comparison.describe_differences_of_runs()))
        ),
        missing=missing,
        failed=failed,
    )


def describe_orderings(
    orderings: list[Ordering], measure: MeasureName, standard_errors: float = STANDARD_ERRORS
) -> str:
    """Which of the paper's orderings hold, which are reversed, and which differences are within noise."""
    counts = {verdict: sum(each.verdict == verdict for each in orderings) for verdict in get_args(Verdict)}
    others = len(orderings) - counts["holds"] - counts["reversed"] - counts["within noise"]
    count = (
        f"The paper's {len(orderings)} orderings, by the {measure}: confirmed {counts['holds']}, reversed "
        f"{counts['reversed']}, within noise {counts['within noise']}, not judged {others}."
    )
    descriptions = [(each.verdict, each.describe(measure)) for each in orderings]
    return " ".join([count, *sentences_by_verdict(descriptions, "Hold here", "Reversed here", standard_errors)])


def describe_differences(comparison: SettingsComparison, labels: list[str]) -> str:
    """Which settings are better or worse than the first, and which differences are within noise."""
    first, measure = comparison.study.settings[0].label, comparison.measure
    descriptions = []
    for label in labels:
        ordering = comparison.ordering(label, first)
        difference = f" ({format_difference(ordering.difference, measure)})" if ordering.difference else ""
        descriptions += [(ordering.verdict, label + difference)] if label != first else []
    titles = f"Better than {first}", f"Worse than {first}"
    sentences = sentences_by_verdict(descriptions, *titles, comparison.standard_errors)
    return " ".join([f"Measure: {measure}.", *sentences])


def sentences_by_verdict(
    descriptions: list[tuple[Verdict, str]], holds: str, reversed_: str, standard_errors: float
) -> list[str]:
    """A sentence for each verdict that occurs, with what it applies to."""
    titles: dict[Verdict, str] = {
        "holds": holds,
        "reversed": reversed_,
        "within noise": f"Within noise (less than {standard_errors:g} standard errors)",
        "not learnt": "Not judged, because an encoder has learnt little more than token frequencies or guessing",
        "not measured": "Not measured, or without a standard error (it needs --glue, or discriminators and --seeds 2)",
    }
    sentences = []
    for verdict, title in titles.items():
        if matching := [text for each, text in descriptions if each == verdict]:
            sentences.append(f"{title}: {'; '.join(matching)}.")
    return sentences


def table_cells(settings: list[SettingResult], measure: MeasureName) -> list[list[str]]:
    """The rows of the Markdown table; the probe in percent."""
    header = ["setting", "runs", "steps", "tokens", "minutes", "FLOPs", "probe", "difference", "fixed RTD loss"]
    header += ["fixed RTD AUC", "MLM loss", "paper"]
    rows = [header]
    for each in settings:
        costs = [f"{each.steps:,.0f}", f"{each.tokens:,.0f}", f"{each.minutes:.2f}", f"{each.flops:.3g}"]
        losses = [format_loss(loss) for loss in (each.fixed_rtd_loss, each.fixed_rtd_auc, each.mlm_loss)]
        probe = each.probe.format() if each.probe else ""
        difference = format_difference(each.difference, measure) if each.difference else ""
        paper = "" if each.paper is None else f"{each.paper:.1f}"
        rows.append([each.label, str(len(each.runs)), *costs, probe, difference, *losses, paper])
    used = [column for column in range(len(header)) if any(row[column] for row in rows[1:])] or [0]
    return [[row[column] for column in used] for row in rows]


def format_loss(loss: Estimate | None) -> str:
    if loss is None:
        return ""
    return f"{loss.mean:.4f}" + ("" if loss.error is None else f" ± {loss.error:.4f}")


def table_csv(settings: list[SettingResult]) -> str:
    """The table as CSV, with means and standard errors in columns of their own."""
    file = io.StringIO()
    estimates = ("probe", "difference", "fixed_rtd_loss", "fixed_rtd_auc", "mlm_loss")
    writer = csv.writer(file, lineterminator="\n")
    costs = ("steps", "tokens", "minutes", "flops")
    writer.writerow(
        ["setting", "runs", *costs, *(name + end for name in estimates for end in ("", "_standard_error")), "paper"]
    )
    for each in settings:
        values = [getattr(each, name) for name in estimates]
        pairs = [number for value in values for number in ((value.mean, value.error) if value else (None, None))]
        writer.writerow([each.label, " ".join(each.runs), *(getattr(each, name) for name in costs), *pairs, each.paper])
    return file.getvalue()


def check_study_folder(folder: Path) -> None:
    """Raise a DataError if the folder of a study's tables and figures has files of others."""
    if is_missing_or_empty(folder):
        return
    path = folder / STUDY
    if not path.exists() or {field.name for field in fields(StudyResult)} != read_json(path).keys():
        raise DataError(f"{folder} is not empty and was not written by electra study; choose another --output")


def write_study(result: StudyResult, study: Study, folder: Path) -> StudyResult:
    """Write table.md, table.csv, study.json and the figure as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STUDY, asdict(result))  # so that an interrupted command can be repeated
    plots = [name for name in ("figure.png", "figure.svg") if plot_study(folder / name, study, result)]
    result = replace(result, output=str(folder), files=["study.md", "table.csv", STUDY, *plots])
    image = ["![](figure.png)"] if plots else []
    page = "\n\n".join([f"# {result.name}", str(replace(result, files=[])), *image])
    write_file(folder / "study.md", page + "\n")
    write_file(folder / "table.csv", table_csv(result.settings))
    write_json(folder / STUDY, asdict(result))
    return result


def plot_study(path: Path, study: Study, result: StudyResult) -> bool:
    """Plot the measure of all settings with error bars, and beside it the paper's scores; False if there is neither."""
    is_probe = result.measure == "probe"
    by_label = {setting.label: setting for setting in study.settings}
    ours = ErrorBars(
        title="here",
        ylabel="mean of the probe, %" if is_probe else "RTD loss on fixed corrupted rows",
        xlabel=study.xlabel,
        is_log=study.is_log,
    )
    paper = replace(ours, title="paper", ylabel="GLUE score", lines={})
    for each in result.settings:
        setting = by_label[each.label]
        value = each.probe if is_probe else each.fixed_rtd_loss
        x = each.flops if setting.x is None else setting.x
        scale = 100 if is_probe else 1
        if value is not None:
            ours.add(setting.series, each.label, x, scale * value.mean, scale * (value.error or 0.0))
        if each.paper is not None:
            paper.add("", each.label, x, each.paper)
    for line in study.paper_lines:
        for x, score in line.points:
            paper.add(line.label, line.label, x, score)
    panels = [panel for panel in (ours, paper) if panel.lines]
    return bool(panels) and plot_error_bars(path, panels, study.question)
