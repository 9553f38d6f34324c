"""`electra report`: tables and plots that compare runs."""

from dataclasses import asdict, dataclass, fields, replace
from math import nan
from pathlib import Path

from electra.errors import DataError
from electra.formatting import markdown_table
from electra.plotting import Panel, Points, plot_panels
from electra.reporting.config import ReportConfig
from electra.reporting.runs import Run, find_glue_tables, read_run
from electra.runfolder import is_missing_or_empty, read_json, write_file, write_json

REPORT = "report.json"
METRIC_COLUMNS = ("loss", "mlm_loss", "mlm_accuracy", "replace_mlm_loss", "rtd_loss", "rtd_auc", "unigram_rtd_auc")
PLOTS = {"loss": "held-out loss", "mlm_loss": "held-out generator MLM loss", "unigram_rtd_auc": "unigram RTD AUC"}
COSTS = {"flops": "FLOPs", "minutes": "minutes of training"}  # attributes of runs and evaluations, with their labels


@dataclass(frozen=True)
class Report:
    """Comparison of runs."""

    runs: dict[str, Run]  # by the shortest names that differ
    skipped: dict[str, str]  # reasons by folder
    notes: list[str]
    plots: list[str]
    output: str | None

    def __str__(self) -> str:
        files = ["report.md", "report.json", *self.plots]
        written = [f"written to {self.output}: {', '.join(files)}"] if self.output else []
        return "\n\n".join([self.format_tables(), *written])

    def format_tables(self) -> str:
        """The tables with their notes, as Markdown."""
        final = {name: run.final_metrics for name, run in self.runs.items()}
        best = {name: run.best_metrics for name, run in self.runs.items()}
        parts = ["Cost (FLOPs of matrix products):", markdown_table(overview_table(self.runs))]
        parts += ["Held-out metrics at the end:", markdown_table(metrics_table(final))]
        parts += ["Best held-out metrics:", markdown_table(metrics_table(best))]
        parts += [f"skipped: {folder}: {reason}" for folder, reason in self.skipped.items()]
        return "\n\n".join([*parts, *self.notes])

    def format_page(self) -> str:
        """report.md: tables and plots."""
        plots = [f"![]({plot})" for plot in self.plots]
        return "\n\n".join([f"# {', '.join(self.runs)}", self.format_tables(), *plots]) + "\n"


def report(config: ReportConfig) -> Report:
    """Compare runs, and write tables and plots to `config.output`."""
    if config.output is not None and not is_missing_or_empty(config.output) and not is_report(config.output):
        raise DataError(f"{config.output} is not empty and not an earlier report; choose another --output")
    folders = list(dict.fromkeys(config.runs))
    tables = find_glue_tables(config.glue, folders)
    runs, skipped = {}, {}
    for folder in folders:
        try:
            runs[folder] = read_run(folder, tables.get(folder))
        except (ValueError, OSError) as error:  # DataError, or whatever a damaged file causes
            skipped[str(folder)] = str(error)
    if not runs:
        raise DataError("no run can be reported; " + "; ".join(map(": ".join, skipped.items())))
    named = dict(zip(shortest_unique_names(list(runs)), runs.values(), strict=True))
    result = Report(named, skipped, comparison_notes(named), [], None)
    return result if config.output is None else write_report(result, config.output)


def is_report(folder: Path) -> bool:
    return (folder / REPORT).exists() and {field.name for field in fields(Report)} == read_json(folder / REPORT).keys()


def write_report(result: Report, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REPORT, asdict(result))  # so that an interrupted report can be repeated
    plots = plot_runs(folder, result.runs)
    notes = result.notes + ([] if plots else ["no plots: they need matplotlib (pip install matplotlib)"])
    result = replace(result, notes=notes, plots=plots, output=str(folder))
    write_file(folder / "report.md", result.format_page())
    write_json(folder / REPORT, asdict(result))
    return result


def shortest_unique_names(folders: list[Path]) -> list[str]:
    """The last components of paths, as many as make them differ."""
    paths = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def comparison_notes(runs: dict[str, Run]) -> list[str]:
    """Unfinished runs, and reasons why some numbers of the runs are not comparable."""
    notes = [
        f"{name} is not finished: {run.unfinished}; its cost is that of step {run.steps:,}, its metrics those of step "
        f"{run.evaluations[-1].step:,}"
        for name, run in runs.items()
        if run.unfinished
    ]
    if len({(run.loss_label(), run.changes) for run in runs.values()}) > 1:
        notes.append(
            "loss is the sum of an objective's losses: compare it only between runs with the same objective, "
            "generator, masking and loss weights"
        )
    held_out = {name: run.held_out for name, run in runs.items()}
    vocabularies = {name: run.vocabulary for name, run in runs.items()}
    tasks = {name: " ".join(sorted(run.glue.tasks)) for name, run in runs.items() if run.glue}
    for values, note in (
        (held_out, "held-out metrics are of different rows and only roughly comparable"),
        (vocabularies, "losses and accuracies are per token of different vocabularies and not comparable"),
        (tasks, "GLUE means are over different tasks and not comparable"),
    ):
        if len(set(values.values())) > 1:
            notes.append(f"{note}: {'; '.join(f'{name}: {value}' for name, value in values.items())}")
    return notes


def overview_table(runs: dict[str, Run]) -> list[list[str]]:
    """The rows of the table of costs, GLUE scores and changed settings."""
    has_glue = any(run.glue for run in runs.values())
    has_changes = any(run.changes for run in runs.values())
    header = ["run", "size", "objective", "parameters", "steps", "tokens", "minutes", "tokens/s", "FLOPs"]
    rows = [header + ["GLUE mean", "tasks"] * has_glue + ["changed settings"] * has_changes]
    for name, run in runs.items():
        counts = [f"{run.parameters:,}", f"{run.steps:,}", f"{run.tokens:,}"]
        speed = [f"{run.minutes:.1f}", f"{run.tokens_per_second:,.0f}", f"{run.flops:.3g}"]
        glue = [f"{run.glue.mean:.2f}", str(len(run.glue.tasks))] if run.glue else ["", ""]
        optional = glue * has_glue + [run.changes] * has_changes
        rows.append([name, run.size, run.objective, *counts, *speed, *optional])
    return rows


def metrics_table(metrics: dict[str, dict[str, float]]) -> list[list[str]]:
    """The rows of a table of metrics by run, with a column for each metric that some run has."""
    columns = [name for name in METRIC_COLUMNS if any(name in values for values in metrics.values())]
    rows = [
        [run, *(f"{values[name]:.4f}" if name in values else "" for name in columns)] for run, values in metrics.items()
    ]
    return [["run", *(name.replace("_", " ") for name in columns)], *rows]


def plot_runs(folder: Path, runs: dict[str, Run]) -> list[str]:
    """Plot metrics and GLUE scores against FLOPs and minutes; returns the names of the files."""
    plots = {
        name: metric_panels(name, runs) for name in PLOTS if any(name in run.final_metrics for run in runs.values())
    }
    if any(run.glue for run in runs.values()):
        plots["glue"] = glue_panels(runs)
    return [
        f"{name}.png"
        for name, panels in plots.items()
        if plot_panels(folder / f"{name}.png", panels, columns=len(COSTS), panel_height=4.5)
    ]


def glue_panels(runs: dict[str, Run]) -> list[Panel]:
    """The GLUE means against each cost."""
    return [
        Panel(
            {label: [(getattr(run, cost), run.glue.mean)] for label, run in runs.items() if run.glue},
            xlabel,
            "GLUE mean",
        )
        for cost, xlabel in COSTS.items()
    ]


def metric_panels(name: str, runs: dict[str, Run]) -> list[Panel]:
    """The panels of a metric, for each cost; losses with different terms have separate panels."""
    groups: dict[str, dict[str, Run]] = {}
    for label, run in runs.items():
        title = f"{PLOTS[name]}, {run.loss_label()}" if name == "loss" else PLOTS[name]
        groups.setdefault(title, {})[label] = run
    return [
        Panel({label: metric_against_cost(run, name, cost) for label, run in group.items()}, xlabel, title)
        for title, group in groups.items()
        for cost, xlabel in COSTS.items()
    ]


def metric_against_cost(run: Run, name: str, cost: str) -> Points:
    """A metric against a cost; the loss has a gap between phases, whose losses differ."""
    points: Points = []
    evaluations = [evaluation for evaluation in run.evaluations if name in evaluation.metrics]
    for previous, evaluation in zip([None, *evaluations], evaluations, strict=False):
        if name == "loss" and previous is not None and previous.phase != evaluation.phase:
            points.append((nan, nan))
        points.append((getattr(evaluation, cost), evaluation.metrics[name]))
    return points
