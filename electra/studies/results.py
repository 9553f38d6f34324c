"""The result of a study: a table, a figure, and which of the paper's orderings hold here."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from electra.errors import DataError
from electra.finetuning.probe_results import Estimate
from electra.formatting import markdown_table
from electra.plotting import ErrorBars, plot_error_bars
from electra.runfolder import is_missing_or_empty, read_json, write_file, write_json
from electra.studies.measures import (
    ASSUMED_DEGREES,
    FIXED_RTD_AUC,
    FIXED_RTD_LOSS,
    PRETRAINING_SD,
    MeasuredRun,
    Scores,
    estimate_probe,
    estimate_probe_difference,
    pooled_variance,
    probe_mean,
)
from electra.studies.studies import Study, StudySetting

Verdict = Literal["holds", "reversed", "within noise", "not learnt", "not measured"]
STUDY = "study.json"
STUDENT = ((10, 2.23), (15, 2.13), (20, 2.09), (30, 2.04), (60, 2.0))
"""97.5 % quantiles of Student's distribution, each for this and more degrees of freedom (at least ASSUMED_DEGREES): a
difference of fewer standard errors is within noise."""


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
    difference: Estimate | None  # of the probe, from the first setting's, in points
    fixed_rtd_loss: float | None  # of discriminators
    fixed_rtd_auc: float | None
    mlm_loss: float | None  # of encoders that predict tokens
    paper: float | None


@dataclass(frozen=True)
class Ordering:
    """An ordering that the paper reports, and what was measured."""

    better: str
    worse: str
    paper: list[float]  # its scores, where they are printed
    verdict: Verdict
    difference: Estimate | None  # positive if the ordering is the same here

    def describe(self) -> str:
        details = [] if self.difference is None else [format_difference(self.difference)]
        details += [f"paper: {self.paper[0]:.1f} and {self.paper[1]:.1f}"] if self.paper else []
        return f"{self.better} above {self.worse}" + (f" ({'; '.join(details)})" if details else "")


def format_difference(difference: Estimate) -> str:
    error = "" if difference.error is None else f" ± {difference.error:.2f}"
    return f"{difference.mean:+.2f}{error}"


@dataclass(frozen=True)
class StudyResult:
    """A study's settings with their measures, and its verdicts."""

    name: str
    question: str
    source: str
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
        table = markdown_table(table_cells(self.settings))
        question = self.question + f" ({self.source})" * bool(self.source)
        return "\n\n".join([question, table, self.verdict, *missing, *failed, *written])


class SettingsComparison:
    """Measures of the finished runs of a study, by setting and seed."""

    def __init__(self, study: Study, measured: list[MeasuredRun]) -> None:
        self.study = study
        self.runs = {
            setting.label: {each.run.seed: each for each in measured if each.run.setting == setting}
            for setting in study.settings
        }
        means = [[probe_mean(scores) for scores in self.probe_scores(label)] for label in self.runs]
        self.is_probed = any(means)
        self.degrees = sum(len(each) - 1 for each in means if each)
        self.measured_variance = pooled_variance(means)  # between pre-training seeds
        self.variance = pooled_variance(means, PRETRAINING_SD**2, ASSUMED_DEGREES) or 0.0
        self.standard_errors = student_quantile(self.degrees + ASSUMED_DEGREES)

    def difference(self, first: str, second: str) -> Estimate | None:
        """How many points the runs of the first setting are above those of the second, on average."""
        ours, others = self.probe_scores(first), self.probe_scores(second)
        if not ours or not others:
            return None
        difference = estimate_probe_difference(ours, others, self.variance)
        return Estimate(100 * difference.mean, None if difference.error is None else 100 * difference.error)

    def probe_scores(self, label: str) -> list[Scores]:
        return [each.scores for each in self.runs[label].values() if each.scores is not None]

    def setting_result(self, setting: StudySetting) -> SettingResult | None:
        """The measures of a setting; None without a finished run."""
        label, first = setting.label, self.study.settings[0].label
        runs = list(self.runs[label].values())
        if not runs:
            return None
        scores = self.probe_scores(label)
        return SettingResult(
            label=label,
            runs=[each.run.name for each in runs],
            steps=mean([each.record.steps for each in runs]),
            tokens=mean([each.record.tokens for each in runs]),
            minutes=mean([each.record.minutes for each in runs]),
            flops=mean([each.record.flops for each in runs]),
            probe=estimate_probe(scores, self.variance) if scores else None,
            difference=None if label == first else self.difference(label, first),
            fixed_rtd_loss=mean_if_any([each.metrics.get(FIXED_RTD_LOSS) for each in runs]),
            fixed_rtd_auc=mean_if_any([each.metrics.get(FIXED_RTD_AUC) for each in runs]),
            mlm_loss=mean_if_any([each.token_loss() for each in runs]),
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
        if not self.is_probed:
            return (
                "Settings are compared by the probe, which needs --glue: losses on held-out text also depend on the "
                "generator, the masking and the objective that a model was trained with."
            )
        assumed = f"an assumed standard deviation of {100 * PRETRAINING_SD:.1f} points between pre-training seeds"
        if self.measured_variance is None:
            between = f"{assumed}, of which there is one"
        else:
            between = (
                f"{assumed}, which counts as {ASSUMED_DEGREES} degrees of freedom beside the "
                f"{100 * self.measured_variance**0.5:.2f} points measured here with {self.degrees}: together "
                f"{100 * self.variance**0.5:.2f}"
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


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def mean_if_any(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def student_quantile(degrees: int) -> float:
    return next(quantile for least, quantile in reversed(STUDENT) if degrees >= least)


def judge(difference: Estimate | None, has_learnt: bool, standard_errors: float) -> Verdict:
    """Whether a difference, positive in the paper, is positive here by more than its error allows.

    Encoders that have learnt nothing differ, too: their fine-tuned models predict one class or another."""
    if difference is None or difference.error is None or not math.isfinite(difference.mean + difference.error):
        return "not measured"
    if not has_learnt:
        return "not learnt"
    if abs(difference.mean) <= standard_errors * difference.error:
        return "within noise"
    return "holds" if difference.mean > 0 else "reversed"


def summarize_study(
    name: str, study: Study, measured: list[MeasuredRun], missing: list[str], failed: dict[str, str]
) -> StudyResult:
    comparison = SettingsComparison(study, measured)
    orderings = [comparison.ordering(*labels) for labels in study.orderings]
    results = [comparison.setting_result(setting) for setting in study.settings]
    settings = [result for result in results if result is not None]
    if study.orderings:
        findings = describe_orderings(orderings, comparison.standard_errors)
    else:
        findings = describe_differences(comparison, [setting.label for setting in settings])
    return StudyResult(
        name=name,
        question=study.question,
        source=study.source,
        settings=settings,
        orderings=orderings,
        verdict=" ".join(
            filter(None, (findings, comparison.describe_errors(), comparison.describe_differences_of_runs()))
        ),
        missing=missing,
        failed=failed,
    )


def describe_orderings(orderings: list[Ordering], standard_errors: float) -> str:
    """Which of the paper's orderings hold, which are reversed, and which differences are within noise."""
    counts = {verdict: sum(each.verdict == verdict for each in orderings) for verdict in get_args(Verdict)}
    others = len(orderings) - counts["holds"] - counts["reversed"] - counts["within noise"]
    count = (
        f"The paper's {len(orderings)} orderings, by the probe: confirmed {counts['holds']}, reversed "
        f"{counts['reversed']}, within noise {counts['within noise']}, not judged {others}."
    )
    descriptions = [(each.verdict, each.describe()) for each in orderings]
    return " ".join([count, *sentences_by_verdict(descriptions, "Hold here", "Reversed here", standard_errors)])


def describe_differences(comparison: SettingsComparison, labels: list[str]) -> str:
    """Which settings are better or worse than the first by the probe, and which differences are within noise."""
    first = comparison.study.settings[0].label
    descriptions = []
    for label in labels:
        ordering = comparison.ordering(label, first)
        difference = f" ({format_difference(ordering.difference)})" if ordering.difference else ""
        descriptions += [(ordering.verdict, label + difference)] if label != first else []
    titles = f"Better than {first}", f"Worse than {first}"
    return " ".join(sentences_by_verdict(descriptions, *titles, comparison.standard_errors))


def sentences_by_verdict(
    descriptions: list[tuple[Verdict, str]], holds: str, reversed_: str, standard_errors: float
) -> list[str]:
    """A sentence for each verdict that occurs, with what it applies to."""
    titles: dict[Verdict, str] = {
        "holds": holds,
        "reversed": reversed_,
        "within noise": f"Within noise (less than {standard_errors:g} standard errors)",
        "not learnt": "Not judged, because an encoder has learnt little more than token frequencies or guessing",
        "not measured": "Not measured by the probe",
    }
    sentences = []
    for verdict, title in titles.items():
        if matching := [text for each, text in descriptions if each == verdict]:
            sentences.append(f"{title}: {'; '.join(matching)}.")
    return sentences


def table_cells(settings: list[SettingResult]) -> list[list[str]]:
    """The rows of the Markdown table; the probe in percent."""
    header = ["setting", "runs", "steps", "tokens", "minutes", "FLOPs", "probe", "difference", "fixed RTD loss"]
    header += ["fixed RTD AUC", "MLM loss", "paper"]
    rows = [header]
    for each in settings:
        costs = [f"{each.steps:,.0f}", f"{each.tokens:,.0f}", f"{each.minutes:.2f}", f"{each.flops:.3g}"]
        values = (each.fixed_rtd_loss, each.fixed_rtd_auc, each.mlm_loss)
        losses = ["" if value is None else f"{value:.4f}" for value in values]
        probe = each.probe.format() if each.probe else ""
        difference = format_difference(each.difference) if each.difference else ""
        paper = "" if each.paper is None else f"{each.paper:.1f}"
        rows.append([each.label, str(len(each.runs)), *costs, probe, difference, *losses, paper])
    used = [column for column in range(len(header)) if any(row[column] for row in rows[1:])] or [0]
    return [[row[column] for column in used] for row in rows]


def table_csv(settings: list[SettingResult]) -> str:
    """The table as CSV, with means and standard errors in columns of their own."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numbers = ("steps", "tokens", "minutes", "flops", "fixed_rtd_loss", "fixed_rtd_auc", "mlm_loss", "paper")
    estimates = [name + end for name in ("probe", "difference") for end in ("", "_standard_error")]
    writer.writerow(["setting", "runs", *estimates, *numbers])
    for each in settings:
        pairs = [(value.mean, value.error) if value else (None, None) for value in (each.probe, each.difference)]
        values = [getattr(each, name) for name in numbers]
        writer.writerow([each.label, " ".join(each.runs), *pairs[0], *pairs[1], *values])
    return file.getvalue()


def check_study_folder(folder: Path) -> None:
    """Raise a DataError if the folder of a study's tables and figures was not written by electra study."""
    if is_missing_or_empty(folder):
        return
    path = folder / STUDY
    if not path.exists() or not {"name", "settings", "orderings", "verdict"} <= read_json(path).keys():
        raise DataError(f"{folder} is not empty and was not written by electra study; choose another --output")


def write_study(result: StudyResult, study: Study, folder: Path) -> StudyResult:
    """Write study.md, table.csv, study.json and the figure as PNG and SVG."""
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
    """Plot the probe of all settings with error bars (without a probe, losses), and beside it the paper's scores; False
    if there is neither."""
    is_probed = any(each.probe for each in result.settings)
    by_label = {setting.label: setting for setting in study.settings}
    ours = ErrorBars(
        title="here",
        ylabel="mean of the probe, %" if is_probed else "RTD loss on fixed corrupted rows",
        xlabel=study.xlabel,
        is_log=study.is_log,
    )
    paper = replace(ours, title="paper", ylabel="GLUE score", lines={})
    for each in result.settings:
        setting = by_label[each.label]
        x = each.flops if setting.x is None else setting.x
        if each.probe is not None:
            ours.add(setting.series, each.label, x, 100 * each.probe.mean, 100 * (each.probe.error or 0.0))
        elif each.fixed_rtd_loss is not None and not is_probed:
            ours.add(setting.series, each.label, x, each.fixed_rtd_loss)
        if each.paper is not None:
            paper.add("", each.label, x, each.paper)
    for label, points in study.paper_lines.items():
        for x, score in points:
            paper.add(label, label, x, score)
    panels = [panel for panel in (ours, paper) if panel.lines]
    return bool(panels) and plot_error_bars(path, panels, study.question)
