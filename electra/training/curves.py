"""Curves of a run, drawn from its metrics."""

from pathlib import Path
from typing import Any

from electra.text.figures import empty_figure
from electra.training.journal import METRICS, read_lines

Panels = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]  # a title, and the metrics in it, by kind

PRETRAINING: Panels = (
    ("generator: MLM loss", (("train", "generator"), ("validation", "mlm_loss"))),
    (
        "discriminator: its loss",
        (
            ("train", "discriminator"),
            ("train", "corrector"),
            ("validation", "rtd_loss"),
            ("validation", "corrector_loss"),
        ),
    ),
    ("area under the curve", (("validation", "rtd_auc"), ("validation", "frozen_auc"))),
    ("accuracy and right samples", (("validation", "mlm_accuracy"), ("validation", "samples_right"))),
    ("learning rate", (("train", "learning_rate"),)),
    ("tokens a second", (("train", "tokens_per_second"),)),
)


def draw_curves(run: Path, panels: Panels = PRETRAINING) -> Path | None:
    """Write curves.png into the run folder, where matplotlib is installed."""
    rows = -(-len(panels) // 3)
    figure = empty_figure(12, 3.5 * rows)
    if figure is None:
        return None
    lines = read_lines(run / METRICS)
    for (title, metrics), axes in zip(panels, figure.subplots(rows, 3).flat, strict=True):
        for kind, name in metrics:
            points = series(lines, kind, name)
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{kind}: {name}", marker="." if len(points) < 30 else None)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(run / "curves.png", dpi=100)
    return run / "curves.png"


def series(lines: list[dict[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of one metric, where it has one."""
    return [(line["step"], line[name]) for line in lines if line["kind"] == kind and line.get(name) is not None]
