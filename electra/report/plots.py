"""Plots over runs: what was reached against what it cost."""

from math import nan
from pathlib import Path
from typing import Any

from electra.plotting import empty_figure
from electra.report.runs import Run

COSTS = (("flops", "FLOPs"), ("minutes", "minutes of training"))
CURVES = {"loss": "held-out loss", "mlm_loss": "held-out MLM loss of the generator", "unigram_rtd_auc": "frozen AUC"}
SCORE = "score"


Triples = list[tuple[float, float, float]]  # FLOPs, minutes, and what was reached
Lines = dict[str, Triples]  # by the names of runs


def draw_plots(folder: Path, runs: dict[str, Run]) -> list[str]:
    """Write a PNG of each measure, and of scores where there are any; returns their names. Needs matplotlib."""
    names = [name for name in CURVES if any(name in run.final for run in runs.values())]
    plots = {name: panels(name, runs) for name in names}
    if scores := {label: [(run.flops, run.minutes, run.glue.mean)] for label, run in runs.items() if run.glue}:
        plots[SCORE] = {"GLUE mean": scores}
    return [f"{name}.png" for name, rows in plots.items() if draw(folder / f"{name}.png", rows)]


def panels(name: str, runs: dict[str, Run]) -> dict[str, Lines]:
    """The lines of a measure, by the titles of the panels that they share: only losses of one kind compare."""
    found: dict[str, Lines] = {}
    for label, run in runs.items():
        title = f"{CURVES[name]}, {run.loss_kind()}" if name == "loss" else CURVES[name]
        found.setdefault(title, {})[label] = curve(run, name)
    return found


def curve(run: Run, name: str) -> Triples:
    """A measure along a run; between phases, whose losses differ, the line of a loss is broken."""
    points = [point for point in run.points if name in point.measures]
    found: Triples = []
    for before, point in zip([None, *points], points, strict=False):
        if name == "loss" and before is not None and before.phase != point.phase:
            found.append((nan, nan, nan))
        found.append((point.flops, point.minutes, point.measures[name]))
    return found


def draw(path: Path, rows: dict[str, Lines]) -> bool:
    """Write a figure: a line or a point for each run, against FLOPs and against minutes; says whether it could."""
    figure = empty_figure(12, 4.5 * len(rows))
    if figure is None:
        return False
    for halves, (title, lines) in zip(figure.subplots(len(rows), 2, squeeze=False), rows.items(), strict=True):
        for which, axes in enumerate(halves):
            draw_panel(axes, which, title, lines)
    figure.savefig(path, dpi=100)
    return True


def draw_panel(axes: Any, which: int, title: str, lines: Lines) -> None:
    """One half of a figure: against the cost of this number."""
    for label, triples in lines.items():
        if triples:
            costs, reached = [triple[which] for triple in triples], [triple[2] for triple in triples]
            axes.plot(costs, reached, label=label, marker="o" if len(triples) < 30 else None, markersize=4)
    axes.set_xlabel(COSTS[which][1])
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
