"""Plots: which metrics share a panel, and PNG files with and without matplotlib."""

import sys
from math import nan

import numpy as np
import pytest

from electra.objectives.objectives import OBJECTIVES, ObjectiveContext
from electra.plotting import (
    DISCRIMINATOR_LOSSES,
    GENERATOR_LOSSES,
    MAX_CLASSES,
    PRETRAINING_PANELS,
    Panel,
    merge_rare_classes,
    metric_points,
    non_overlapping_boxes,
    plot_confusion_matrix,
    plot_panels,
    plot_pretraining_curves,
    total_training_loss,
)

PNG = b"\x89PNG"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_loss_of_an_objective_is_part_of_the_total(make_pair, make_batch, vocabulary, name):
    losses = OBJECTIVES[name].losses(make_pair(objective=name), make_batch(), ObjectiveContext(vocabulary=vocabulary))
    assert losses.keys() - {"baseline"} <= {*GENERATOR_LOSSES, *DISCRIMINATOR_LOSSES}


def test_total_loss_is_weighted_and_undefined_in_adversarial_training():
    assert total_training_loss({"generator": 2.0, "discriminator": 0.5}, {"discriminator": 3.0}) == 3.5
    assert total_training_loss({"generator": 2.0, "replace_mlm": 1.0}, {"discriminator": 3.0}) == 3.0
    adversarial = {"generator": 0.1, "baseline": 0.2, "discriminator": 0.3}
    assert total_training_loss(adversarial, {"discriminator": 50.0}) is None


def test_the_total_loss_has_a_gap_where_its_terms_change():
    lines = [
        {"kind": "train", "step": 1, "loss": 6.0, "generator": 6.0},
        {"kind": "validation", "step": 1, "loss": 9.0},
        {"kind": "train", "step": 2, "loss": 8.0, "generator": 5.0, "discriminator": 3.0},
        {"kind": "train", "step": 3, "loss": 7.0, "generator": 5.0, "discriminator": 2.0},
    ]
    expected = [(1, 6.0), (2, pytest.approx(nan, nan_ok=True)), (2, 8.0), (3, 7.0)]
    assert metric_points(lines, "train", "loss") == expected
    assert metric_points(lines, "train", "generator") == [(1, 6.0), (2, 5.0), (3, 5.0)]


def test_training_and_held_out_curves_share_a_panel_only_for_the_total_loss():
    shared = [title for title, metrics in PRETRAINING_PANELS.items() if len({kind for kind, _ in metrics}) == 2]
    assert shared == ["total loss"]


@pytest.mark.usefixtures("real_plots")
def test_plots_are_png_files(tmp_path):
    lines = [{"kind": "train", "step": 1, "generator": 6.0}, {"kind": "validation", "step": 1, "loss": 9.0}]
    assert plot_pretraining_curves(tmp_path, lines, {"discriminator": 50.0})
    assert plot_confusion_matrix(tmp_path / "confusion.png", np.eye(2, dtype=int), ("$no$", "yes"))
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "confusion.png"}
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())


@pytest.mark.usefixtures("real_plots")
def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_panels(tmp_path / "x.png", [Panel({"a": [(0.0, 1.0)]}, "step")], columns=1, panel_height=3)
    assert list(tmp_path.iterdir()) == []


def test_a_confusion_matrix_of_many_classes_has_the_most_frequent_ones():
    size = MAX_CLASSES + 5
    counts = np.diag(np.arange(size)) + np.ones((size, size), int)
    merged, labels = merge_rare_classes(counts, tuple(map(str, range(size))))
    assert labels == (*map(str, range(6, size)), "6 others")
    assert merged.sum() == counts.sum()
    assert (merged[:-1, :-1] == counts[6:, 6:]).all()
    assert merged[-1, -1] == counts[:6, :6].sum()


def test_names_on_a_map_do_not_overlap():
    centers = np.array([[0.0, 0.0], [3.0, 0.0], [5.0, 0.0], [3.0, 3.0]])
    sizes = np.array([[4.0, 2.0]] * 4)
    assert non_overlapping_boxes(centers, sizes) == [0, 2, 3]  # the second covers a part of the first
