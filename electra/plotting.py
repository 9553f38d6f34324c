"""Plots as PNG or SVG files. Without matplotlib, which is optional, none are written and functions return False."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.runfolder import open_atomic

CURVES = "curves.png"
TITLE_CHARACTERS = 60  # in the width of a panel
MAX_CLASSES = 30  # a larger confusion matrix is unreadable

Points = list[tuple[float, float]]
MetricPanels = dict[str, list[tuple[str, str]]]  # (kind, name) of metrics in metrics.jsonl, by panel title

GENERATOR_LOSSES = ("generator",)  # names of training losses; "baseline" is part of adversarial training only
DISCRIMINATOR_LOSSES = ("discriminator", "replace_mlm", "all_tokens_mlm", "corrective_lm", "bag_of_words")
HELD_OUT_LOSSES = ("mlm_loss", "rtd_loss", "replace_mlm_loss")  # terms of the held-out loss
LOSS_TERMS = {*GENERATOR_LOSSES, *DISCRIMINATOR_LOSSES, *HELD_OUT_LOSSES}

PRETRAINING_PANELS: MetricPanels = {  # training and held-out curves share a panel if their masks and losses are equal
    "total loss": [("train", "loss"), ("validation", "loss")],
    "training: generator loss": [("train", name) for name in GENERATOR_LOSSES],
    "training: discriminator loss": [("train", name) for name in DISCRIMINATOR_LOSSES],
    "held out: generator MLM loss": [("validation", "mlm_loss")],
    "held out: discriminator loss": [
        ("validation", name) for name in ("rtd_loss", "unigram_rtd_loss", "replace_mlm_loss")
    ],
    "held out: AUC": [("validation", "rtd_auc"), ("validation", "unigram_rtd_auc")],
    "held out: accuracy": [("validation", "mlm_accuracy"), ("validation", "sample_accuracy")],
    "learning rate": [("train", "learning_rate")],
    "tokens per second": [("train", "tokens_per_second")],
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines by label."""

    lines: dict[str, Points]
    xlabel: str
    ylabel: str = ""
    title: str = ""


def save_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], None], dpi: int = 100) -> bool:
    """Let `draw` fill a matplotlib figure of `size` inches, and write it to `path`."""
    try:
        from matplotlib import figure
    except ImportError:
        return False
    canvas = figure.Figure(figsize=size, layout="constrained")
    draw(canvas)
    with open_atomic(path, "wb") as file:
        canvas.savefig(file, format=path.suffix.removeprefix("."), dpi=dpi)
    return True


def plot_panels(path: Path, panels: list[Panel], columns: int, panel_height: float) -> bool:
    """Plot panels in a grid."""
    rows = -(-len(panels) // columns)

    def draw(figure: Any) -> None:
        for panel, axes in zip(panels, figure.subplots(rows, columns, squeeze=False).flat, strict=True):
            for label, points in panel.lines.items():
                if points:
                    marker = "." if len(points) < 30 else None
                    axes.plot(*zip(*points, strict=True), label=label, marker=marker)
            axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
            axes.locator_params(axis="x", nbins=5)  # keeps large numbers apart
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=8)

    return save_figure(path, (12, panel_height * rows), draw)


def plot_metric_curves(run: Path, metrics_lines: list[dict[str, Any]], panels: MetricPanels) -> bool:
    """Plot the lines of metrics.jsonl against steps, into the run folder."""
    filled = [
        Panel(
            {f"{kind}: {name}": metric_points(metrics_lines, kind, name) for kind, name in metrics}, "step", title=title
        )
        for title, metrics in panels.items()
    ]
    return plot_panels(run / CURVES, filled, columns=3, panel_height=3.5)


def plot_pretraining_curves(run: Path, metrics_lines: list[dict[str, Any]], loss_weights: dict[str, float]) -> bool:
    """Plot the metrics of a pre-training run."""
    metrics_lines = [
        line | {"loss": total_training_loss(line, loss_weights)} if line["kind"] == "train" else line
        for line in metrics_lines
    ]
    return plot_metric_curves(run, metrics_lines, PRETRAINING_PANELS)


def total_training_loss(line: dict[str, Any], loss_weights: dict[str, float]) -> float | None:
    """The sum of training losses, those in `loss_weights` weighted; None in adversarial training, whose held-out loss
    has other terms."""
    if "baseline" in line:
        return None
    weights = dict.fromkeys(GENERATOR_LOSSES + DISCRIMINATOR_LOSSES, 1.0) | loss_weights
    return sum(weight * line[name] for name, weight in weights.items() if line.get(name) is not None)


def metric_points(metrics_lines: list[dict[str, Any]], kind: str, name: str) -> Points:
    """Steps and values of a metric; the total loss has a gap (NaN) where its terms change between phases."""
    points: Points = []
    terms: set[str] | None = None
    for line in metrics_lines:
        if line["kind"] == kind and line.get(name) is not None:
            line_terms = LOSS_TERMS & line.keys()
            if name == "loss" and terms not in (None, line_terms):
                points.append((line["step"], nan))
            terms = line_terms
            points.append((line["step"], line[name]))
    return points


def plot_confusion_matrix(path: Path, counts: NDArray, labels: tuple[str, ...]) -> bool:
    """Plot a confusion matrix [true class, predicted class], of many classes the most frequent ones."""
    counts, labels = merge_rare_classes(counts, labels)
    labels = tuple(label.replace("$", r"\$") for label in labels)  # which would start a formula

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(counts / counts.sum(1, keepdims=True).clip(min=1), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel="predicted", ylabel="true")
        for row, column in np.ndindex(counts.shape):
            is_dark = counts[row, column] > 0.6 * counts[row].sum()
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color="w" if is_dark else "k")

    side = 3 + 0.5 * len(labels)
    return save_figure(path, (side, side), draw)


def merge_rare_classes(counts: NDArray, labels: tuple[str, ...]) -> tuple[NDArray, tuple[str, ...]]:
    """A confusion matrix and its labels with at most `MAX_CLASSES` classes, of which the last has all rare ones."""
    if len(labels) <= MAX_CLASSES:
        return counts, labels
    frequent = np.sort(np.argsort(-counts.sum(1), kind="stable")[: MAX_CLASSES - 1])
    groups = np.full(len(labels), MAX_CLASSES - 1)
    groups[frequent] = np.arange(len(frequent))
    merged = np.zeros((MAX_CLASSES, MAX_CLASSES), counts.dtype)
    np.add.at(merged, (groups[:, None], groups), counts)
    return merged, (*(labels[index] for index in frequent), f"{len(labels) - len(frequent)} others")


def plot_document_lengths(path: Path, lengths: NDArray) -> bool:
    """Plot a histogram of document lengths in tokens."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.hist(lengths, bins=np.geomspace(1, max(2, lengths.max() + 1), 60).tolist())
        axes.set(xscale="log", xlabel="tokens per document", ylabel="documents", title=f"{len(lengths):,} documents")

    return save_figure(path, (7, 4), draw, dpi=150)


def plot_demo(
    path: Path, curves: dict[str, tuple[dict[str, float], Points]], texts: list[tuple[list[str], list[float]]]
) -> bool:
    """Plot metrics of a run by step beside their baselines, and texts with their tokens coloured by probability."""

    def draw(figure: Any) -> None:
        above, below = figure.subfigures(2, 1, height_ratios=(4, 0.35 * len(texts)))
        for (name, (baselines, points)), axes in zip(
            curves.items(), above.subplots(1, len(curves), squeeze=False).flat, strict=True
        ):
            axes.plot(*zip(*points, strict=True), marker="o", color="tab:red", label="model")
            for (baseline, value), style in zip(baselines.items(), (":", "--", "-."), strict=False):
                axes.axhline(value, color="tab:gray", linestyle=style, label=baseline)
            axes.set(xlabel="step", title=name)
            axes.legend(fontsize=8)
            axes.grid(alpha=0.3)
        draw_texts(below.subplots(), texts)

    return save_figure(path, (11, 4 + 0.35 * len(texts)), draw, dpi=110)


def draw_texts(axes: Any, texts: list[tuple[list[str], list[float]]]) -> None:
    """Write texts, one per line, each token on a background that is red where its probability is high."""
    axes.axis("off")
    axes.set(xlim=(0, 150), ylim=(-len(texts), 0.5))  # 150 characters of this font are as wide as the figure
    axes.set_title("probability that a token was replaced: white 0, red 1", fontsize=10)
    for row, (tokens, probabilities) in enumerate(texts):
        column = 0
        for token, probability in zip(tokens, probabilities, strict=True):
            box = {"facecolor": (1, 1 - probability, 1 - probability), "edgecolor": "none", "pad": 2}
            axes.text(column, -row - 0.3, token, fontsize=8.5, family="monospace", bbox=box)
            column += len(token) + 1


@dataclass(frozen=True)
class ErrorBars:
    """One pair of axes with points and their standard errors, by line."""

    title: str
    ylabel: str
    xlabel: str = ""  # empty: a row for each point, with its label
    is_log: bool = False
    lines: dict[str, list[tuple[str, float, float, float]]] = field(default_factory=dict)  # label, x, y, error

    def add(self, line: str, label: str, x: float, y: float, error: float = 0.0) -> None:
        self.lines.setdefault(line, []).append((label, x, y, error))


def plot_error_bars(path: Path, panels: list[ErrorBars], title: str) -> bool:
    """Plot points with error bars of one standard error, panels side by side."""

    def draw(figure: Any) -> None:
        figure.suptitle(textwrap.fill(title, TITLE_CHARACTERS * len(panels)))
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False).flat, strict=True):
            if panel.xlabel:
                draw_lines_with_errors(axes, panel)
            else:
                draw_rows_with_errors(axes, panel)
            axes.set_title(panel.title)
            axes.grid(alpha=0.3)

    return save_figure(path, (6 * len(panels), 4.5), draw, dpi=120)


def draw_lines_with_errors(axes: Any, panel: ErrorBars) -> None:
    for name, points in panel.lines.items():
        _, x, y, errors = zip(*sorted(points, key=lambda point: point[1]), strict=True)
        axes.errorbar(x, y, yerr=errors, marker="o", capsize=3, label=name or None)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.is_log:
        axes.set_xscale("log")
    if any(panel.lines):
        axes.legend(fontsize=8)


def draw_rows_with_errors(axes: Any, panel: ErrorBars) -> None:
    labels = list(dict.fromkeys(label for points in panel.lines.values() for label, *_ in points))
    for points in panel.lines.values():
        rows = [labels.index(label) for label, *_ in points]
        axes.errorbar([y for *_, y, _ in points], rows, xerr=[error for *_, error in points], fmt="o", capsize=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlabel=panel.ylabel)


def plot_token_map(path: Path, positions: NDArray, tokens: list[str]) -> bool:
    """Plot tokens at `positions` [N, 2], in their order with their names where these do not overlap others."""
    fontsize = 6

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.scatter(positions[:, 0], positions[:, 1], s=3, color="tab:gray", alpha=0.4)
        axes.set_title(f"embeddings of the {len(tokens):,} most frequent tokens")
        axes.axis("off")
        figure.draw_without_rendering()  # the layout is known only then
        height = fontsize * figure.dpi / 72  # in pixels
        sizes = np.array([(0.65 * height * len(token), 1.1 * height) for token in tokens])
        for index in non_overlapping_boxes(axes.transData.transform(positions), sizes):
            name = tokens[index].replace("$", r"\$")
            axes.text(*positions[index].tolist(), name, fontsize=fontsize, ha="center", va="center")

    return save_figure(path, (12, 12), draw, dpi=110)


def non_overlapping_boxes(centers: NDArray, sizes: NDArray) -> list[int]:
    """Indices of boxes, given by centers and sizes [N, 2], each of which overlaps none before it in the list."""
    chosen: list[int] = []
    for index in range(len(centers)):
        distances = np.abs(centers[chosen] - centers[index])
        if not (2 * distances < sizes[chosen] + sizes[index]).all(axis=1).any():
            chosen.append(index)
    return chosen
