"""`electra report`: tables and plots over runs."""

from dataclasses import asdict, dataclass
from pathlib import Path

from electra.config import Positional
from electra.errors import ConfigError, DataError
from electra.finetuning.glue import markdown
from electra.report.plots import draw_plots
from electra.report.runs import Run, find_tables, read_run
from electra.runfolder import write_file, write_json

SHOWN = ("loss", "mlm_loss", "mlm_accuracy", "replace_mlm_loss", "rtd_loss", "rtd_auc", "unigram_rtd_auc")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Compare runs of electra pretrain: what each cost and what it reached, in tables and plots.

    Runs that are unfinished or damaged are named and left out."""

    runs: Positional[tuple[Path, ...]]
    """Run folders."""
    output: Path | None = None
    """The folder for report.md, report.json and the plots (loss, frozen AUC, score against FLOPs and minutes)."""
    glue: tuple[str, ...] = ()
    """Folders of electra glue, as FOLDER where its --model was one of the runs, otherwise as RUN=FOLDER. Tables in
    folders inside a run are found without it."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("no runs came; name their folders: electra report runs/a runs/b --output report/")


@dataclass(frozen=True)
class Report:
    """Runs side by side."""

    runs: dict[str, Run]  # by the shortest names that tell them apart
    left_out: dict[str, str]  # folders, and why
    notes: list[str]
    plots: list[str]
    output: str | None

    def __str__(self) -> str:
        files = ["report.md", "report.json", *self.plots]
        written = [f"written to {self.output}: {', '.join(files)}"] if self.output else []
        return "\n\n".join([self.tables(), *written])

    def tables(self) -> str:
        """The tables, and what one should know of them."""
        parts = ["What it cost, matrix products only:", markdown(cost_cells(self.runs))]
        for title, which in (("Held-out measures at the end:", "final"), ("Each at its best:", "best")):
            parts += [title, markdown(measure_cells(self.runs, which))]
        parts += [f"left out: {folder}: {reason}" for folder, reason in self.left_out.items()]
        return "\n\n".join([*parts, *self.notes])

    def page(self) -> str:
        """The report as a page of Markdown, with its plots."""
        return (
            "\n\n".join([f"# {', '.join(self.runs)}", self.tables(), *(f"![]({plot})" for plot in self.plots)]) + "\n"
        )


def report(config: ReportConfig) -> Report:
    """Read the runs, and write tables and plots where an output is given."""
    folders = list(dict.fromkeys(config.runs))
    tables = find_tables(config.glue, folders)
    runs, left_out = {}, {}
    for folder in folders:
        try:
            runs[folder] = read_run(folder, tables.get(folder))
        except (ValueError, OSError) as error:  # whatever a damaged file makes of itself
            left_out[str(folder)] = str(error)
    if not runs:
        raise DataError("none of the runs can be reported; " + "; ".join(map(": ".join, left_out.items())))
    named = dict(zip(short_names(list(runs)), runs.values(), strict=True))
    return written(Report(named, left_out, notes_on(named), [], None), config.output)


def written(result: Report, folder: Path | None) -> Report:
    """The report with its files, where there is a folder for them."""
    if folder is None:
        return result
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(folder, result.runs)
    missing = [] if plots else ["no plots: they need matplotlib (pip install matplotlib)"]
    result = Report(result.runs, result.left_out, result.notes + missing, plots, str(folder))
    write_file(folder / "report.md", result.page())
    write_json(folder / "report.json", asdict(result))
    return result


def short_names(folders: list[Path]) -> list[str]:
    """The last words of paths, as many as tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def notes_on(runs: dict[str, Run]) -> list[str]:
    """What one should know before comparing."""
    notes = []
    if len({(run.loss_kind(), run.departures) for run in runs.values()}) > 1:
        alike = "of one objective, all with a generator or all without, with the same masks and weights of losses"
        notes.append(f"loss adds up what an objective has: compare it only between runs {alike}")
    texts = {name: run.held_out for name, run in runs.items()}
    if len(set(texts.values())) > 1:
        told = "; ".join(f"{name}: {text}" for name, text in texts.items())
        notes.append(f"held-out measures are over different text and compare only roughly: {told}")
    tasks = {name: " ".join(sorted(run.glue.tasks)) for name, run in runs.items() if run.glue}
    if len(set(tasks.values())) > 1:
        told = "; ".join(f"{name}: {over}" for name, over in tasks.items())
        notes.append(f"GLUE means are over different tasks and do not compare: {told}")
    return notes


def cost_cells(runs: dict[str, Run]) -> list[list[str]]:
    """The table of costs and scores."""
    has_scores = any(run.glue for run in runs.values())
    has_departures = any(run.departures for run in runs.values())
    head = ["run", "size", "objective", "parameters", "steps", "tokens", "minutes", "tokens/s", "FLOPs"]
    cells = [head + ["GLUE mean", "tasks"] * has_scores + ["departures"] * has_departures]
    for name, run in runs.items():
        counts = [f"{run.parameters:,}", f"{run.steps:,}", f"{run.tokens:,}"]
        speed = [f"{run.minutes:.1f}", f"{run.tokens_per_second:,.0f}", f"{run.flops:.3g}"]
        score = [f"{run.glue.mean:.2f}", str(len(run.glue.tasks))] if run.glue else ["", ""]
        told = score * has_scores + [run.departures] * has_departures
        cells.append([name, run.size, run.objective, *counts, *speed, *told])
    return cells


def measure_cells(runs: dict[str, Run], which: str) -> list[list[str]]:
    """The table of measures, `final` or `best`; of those that no run has, there is no column."""
    found = {name: getattr(run, which) for name, run in runs.items()}
    shown = [measure for measure in SHOWN if any(measure in measures for measures in found.values())]
    rows = [
        [name, *(f"{measures[measure]:.4f}" if measure in measures else "" for measure in shown)]
        for name, measures in found.items()
    ]
    return [["run", *(measure.replace("_", " ") for measure in shown)], *rows]
