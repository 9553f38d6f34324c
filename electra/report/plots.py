"""Plots over runs: what was reached against what it cost."""

from pathlib import Path
from typing import Any

from electra.report.runs import Run

COSTS = (("flops", "FLOPs"), ("minutes", "minutes of training"))
CURVES = {"loss": "held-out loss", "mlm_loss": "held-out MLM loss of the generator", "frozen_auc": "frozen AUC"}
SCORE = "score"


def draw_plots(folder: Path, runs: dict[str, Run]) -> list[str]:
    """Write a PNG of each measure, and of scores where there are any; returns their names. Needs matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    names = [name for name in CURVES if any(name in run.final for run in runs.values())]
    for name in names:
        draw(folder / f"{name}.png", CURVES[name], {label: curve(run, name) for label, run in runs.items()})
    scores = {label: [(run.flops, run.minutes, run.glue.mean)] for label, run in runs.items() if run.glue}
    if scores:
        draw(folder / f"{SCORE}.png", "GLUE mean", scores)
    return [f"{name}.png" for name in [*names, *([SCORE] if scores else [])]]


Triples = list[tuple[float, float, float]]  # FLOPs, minutes, and what was reached


def curve(run: Run, name: str) -> Triples:
    """A measure along a run."""
    return [(point.flops, point.minutes, point.measures[name]) for point in run.points if name in point.measures]


def draw(path: Path, title: str, lines: dict[str, Triples]) -> None:
    """Write a figure: a line or a point for each run, against FLOPs and against minutes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for which, axes in enumerate(figure.subplots(1, 2)):
        draw_panel(axes, which, title, lines)
    figure.savefig(path, dpi=100)


def draw_panel(axes: Any, which: int, title: str, lines: dict[str, Triples]) -> None:
    """One half of a figure: against the cost of this number."""
    for label, triples in lines.items():
        if triples:
            costs, reached = [triple[which] for triple in triples], [triple[2] for triple in triples]
            axes.plot(costs, reached, label=label, marker="o" if len(triples) < 30 else None, markersize=4)
    axes.set_xlabel(COSTS[which][1])
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
