"""Curves of a run, drawn from its metrics."""

from math import nan
from pathlib import Path
from typing import Any

from electra.model.storage import CONFIG
from electra.plotting import empty_figure
from electra.runfolder import read_json
from electra.training.logging import METRICS, read_metrics

Panels = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]  # a title, and the metrics in it, by kind

PRETRAINING: Panels = (  # train and held-out curves share a panel only where they are of the same masks and losses
    ("all losses, weighed", (("train", "loss"), ("validation", "loss"))),
    ("training: generator", (("train", "generator"),)),
    ("training: discriminator", (("train", "discriminator"), ("train", "replace_mlm"), ("train", "all_tokens_mlm"))),
    ("held out: MLM loss of the generator", (("validation", "mlm_loss"),)),
    (
        "held out: discriminator",
        (("validation", "rtd_loss"), ("validation", "unigram_rtd_loss"), ("validation", "replace_mlm_loss")),
    ),
    ("area under the curve", (("validation", "rtd_auc"), ("validation", "unigram_rtd_auc"))),
    ("accuracy and right samples", (("validation", "mlm_accuracy"), ("validation", "sample_accuracy"))),
    ("learning rate", (("train", "learning_rate"),)),
    ("tokens a second", (("train", "tokens_per_second"),)),
)


PARTS = {"generator", "discriminator", "replace_mlm", "all_tokens_mlm", "mlm_loss", "rtd_loss", "replace_mlm_loss"}


def draw_curves(run: Path, panels: Panels = PRETRAINING) -> Path | None:
    """Write curves.png into the run folder, where matplotlib is installed."""
    rows = -(-len(panels) // 3)
    figure = empty_figure(12, 3.5 * rows)
    if figure is None:
        return None
    lines = with_losses(run, read_metrics(run / METRICS)) if panels is PRETRAINING else read_metrics(run / METRICS)
    for (title, metrics), axes in zip(panels, figure.subplots(rows, 3).flat, strict=True):
        for kind, name in metrics:
            points = series(lines, kind, name)
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{kind}: {name}", marker="." if len(points) < 30 else None)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", nbins=5)  # so that numbers of many steps do not touch
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(run / "curves.png", dpi=100)
    return run / "curves.png"


def with_losses(run: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A pre-training's lines, those of training with the sum of their losses, weighed as the run's settings say."""
    weight = read_json(run / CONFIG)["pretraining"]["discriminator_weight"]
    return [line | {"loss": whole_loss(line, weight)} if line["kind"] == "train" else line for line in lines]


def whole_loss(line: dict[str, Any], discriminator_weight: float) -> float | None:
    """What a line's losses are together; None in adversarial training, whose held-out loss is of other parts."""
    if "baseline" in line:
        return None
    weights = {"generator": 1.0, "replace_mlm": 1.0, "all_tokens_mlm": 1.0, "discriminator": discriminator_weight}
    return sum(weight * line[name] for name, weight in weights.items() if line.get(name) is not None)


def series(lines: list[dict[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of one metric, where it has one; a sum of losses is broken where it gets other parts."""
    found: list[tuple[int, float]] = []
    parts: set[str] | None = None
    for line in lines:
        if line["kind"] == kind and line.get(name) is not None:
            own = PARTS & line.keys()
            if name == "loss" and parts not in (None, own):
                found.append((line["step"], nan))
            parts = own
            found.append((line["step"], line[name]))
    return found
