"""electra analyze: where replaced tokens are found, calibration, neighbours in the embeddings, few-shot curves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import MODERN, WIDE
from synthetic import write_glue

import electra
from electra.config import build_config
from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning.tasks import get_glue_task, read_split_rows
from electra.model.encoder import Encoder
from electra.pretraining.command import pretrain
from electra.runfolder import read_json
from electra.studies.analyze import analyze
from electra.studies.config import AnalyzeConfig
from electra.studies.detection import (
    Detections,
    bins_by_frequency,
    bins_by_position,
    calibration_bins,
    expected_calibration_error,
    residual_ratios,
)
from electra.studies.few_shot import few_shot_splits


@pytest.fixture
def analyze_config(shards, finished_run, tmp_path):
    def build(**values) -> AnalyzeConfig:
        settings = {"model": finished_run, "data": shards, "output": tmp_path / "out", "device": "cpu", "rows": 32}
        return build_config(AnalyzeConfig, **settings | values)

    return build


def detections(probability: list[float], is_replaced: list[bool], position=None, rank=None) -> Detections:
    count = len(probability)
    columns = (position or [0] * count, rank or [1] * count)
    return Detections(np.array(probability), np.array(is_replaced), *map(np.array, columns))


def test_the_calibration_error_weighs_intervals_by_their_tokens():
    found = detections([0.1, 0.1, 0.1, 0.9], [False, False, True, True])
    low, high = calibration_bins(found)
    assert (low.tokens, low.replaced, high.replaced) == (3, pytest.approx(1 / 3), 1.0)
    assert expected_calibration_error(found) == pytest.approx((3 * (1 / 3 - 0.1) + 1 * (1 - 0.9)) / 4)
    assert expected_calibration_error(detections([1.0, 0.0], [True, False])) == 0.0


def test_detection_by_position_counts_found_and_wrongly_marked_tokens():
    found = detections([0.9, 0.2, 0.7, 0.1], [True, True, False, False], position=[0, 0, 1, 1])
    first, second = bins_by_position(found)
    assert (first.recall, first.false_positives, first.auc) == (0.5, None, None)
    assert (second.recall, second.false_positives, second.tokens) == (None, 0.5, 2)


def test_detection_by_frequency_has_decades_of_ranks():
    found = detections([0.9, 0.2, 0.7, 0.1], [True, False] * 2, rank=[1, 10, 11, 5000])
    assert [(each.first, each.last, each.tokens) for each in bins_by_frequency(found)] == [
        (1, 10, 2),
        (11, 11, 1),
        (1001, 5000, 1),
    ]


def test_an_analysis_has_numbers_tables_and_figures(analyze_config, shards):
    config = analyze_config()
    analysis = analyze(config)
    assert analysis.tokens == sum(each.tokens for each in analysis.by_position)
    assert analysis.tokens == sum(each.tokens for each in analysis.by_frequency)
    assert analysis.tokens == sum(each.tokens for each in analysis.calibration)
    assert 0.15 < analysis.replaced_fraction < 0.3  # as many are masked as in the run
    assert analysis.auc_with_dropout != analysis.auc
    vocabulary = load_tokenizer(shards / "tokenizer").library.get_vocab()
    for token, others in analysis.neighbors.items():
        assert {token, *others} <= vocabulary.keys()
        assert token not in others
    assert {"embeddings.png", "detection.svg", "calibration.png", "analysis.md"} < set(analysis.files)
    assert all((config.output / file).exists() for file in analysis.files)
    assert read_json(config.output / "analysis.json")["auc"] == analysis.auc
    assert analyze(config) == analysis  # the same rows and masks


def test_figures_are_drawn(analyze_config, real_plots):
    pytest.importorskip("matplotlib")
    config = analyze_config()
    analyze(config)
    assert (config.output / "embeddings.png").read_bytes().startswith(b"\x89PNG")


def test_few_shot_subsets_are_disjoint_from_the_held_out_rows(analyze_config, tmp_path):
    task = get_glue_task("rte", str(write_glue(tmp_path / "glue", rows=40)))
    splits = list(few_shot_splits(task, analyze_config(examples=(4, 16, 100), seeds=2), tmp_path))
    assert [(examples, subset) for examples, subset, _ in splits] == [(4, 0), (4, 1), (16, 0), (16, 1)]
    rows = [
        {split: {row.values["index"] for row in read_split_rows(part, split)} for split in part.splits}
        for *_, part in splits
    ]
    assert len({frozenset(each["dev"]) for each in rows}) == 1
    assert all(each["dev"].isdisjoint(each["train"]) for each in rows)
    assert rows[0]["train"] != rows[1]["train"]
    assert rows[0]["train"] < rows[2]["train"]  # more examples of the same subset


def test_the_few_shot_curve_is_resumed(analyze_config, tmp_path, capsys):
    glue = str(write_glue(tmp_path / "glue", rows=40))
    settings = {"glue": glue, "tasks": ("rte",), "seeds": 2, "finetuning": ("epochs=1", "length=16")}
    analysis = analyze(analyze_config(examples=(8,), **settings))
    assert [(point.task, point.examples) for point in analysis.few_shot] == [("rte", 8)]
    capsys.readouterr()
    analysis = analyze(analyze_config(examples=(8, 16), **settings))
    assert [point.examples for point in analysis.few_shot] == [8, 16]
    assert capsys.readouterr().err.count("1 step in") == 2  # only those with 16 examples
    assert "few-shot.svg" in analysis.files
    with pytest.raises(ConfigError, match=r"its tuning epochs was 1 and is now 2; choose another --output$"):
        analyze(analyze_config(examples=(8,), **settings | {"finetuning": ("epochs=2", "length=16")}))


def test_settings_of_fine_tuning_are_written_as_key_and_value(analyze_config):
    with pytest.raises(ConfigError, match="finetuning has 'fast'; write KEY=VALUE"):
        analyze_config(finetuning=("fast", "epochs=1"))


def test_an_encoder_without_a_trained_head_is_refused(analyze_config, finished_run, tmp_path):
    """Its head would be random, and all numbers of it, too."""
    electra.export(model=finished_run, part="encoder", output=tmp_path / "encoder")
    electra.import_model(**{"from": tmp_path / "encoder"}, output=tmp_path / "model")
    with pytest.raises(ConfigError, match="without a trained replaced token detection head"):
        analyze(analyze_config(model=tmp_path / "model"))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_analyzed(analyze_config, tmp_path, run_config):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(DataError, match="not the output of electra analyze"):
        analyze(analyze_config())
    with pytest.raises(ConfigError, match="must be at least 1"):
        analyze_config(examples=(0, 8))


def test_what_cannot_be_analyzed_is_refused_before_anything_is_computed(analyze_config, finetuned, tmp_path):
    with pytest.raises(ConfigError, match="is a fine-tuned model; choose a pre-training run"):
        analyze(analyze_config(model=finetuned.output))
    with pytest.raises(ConfigError, match=r"nowhere must be the folder of GLUE's official download"):
        analyze(analyze_config(glue=str(tmp_path / "nowhere")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_residual_ratios_are_the_norms_of_branches_over_those_of_the_residual(make_batch, style):
    torch.manual_seed(0)
    encoder = Encoder(replace(WIDE if style == "classic" else MODERN, layers=2)).eval()
    batch = make_batch(rows=2, length=16, lengths=[16, 9])
    hidden = encoder.embed(batch.input_ids, None)
    bias = encoder.attention_biases(batch.input_ids, batch.attention_mask, None, None)[0]
    layer = encoder.layers[0]
    attended = layer.attention(hidden, bias)  # the first attention norm of the modern style is the identity
    between = layer.attention_norm(hidden + attended) if style == "classic" else hidden + attended
    added = layer.feedforward(between if style == "classic" else layer.feedforward_norm(between))
    expected = [
        added.norm(dim=-1) / residual.norm(dim=-1) for added, residual in ((attended, hidden), (added, between))
    ]
    first, second = residual_ratios(encoder, [batch, batch])
    assert (first.layer, second.layer) == (1, 2)
    for ratio, each in zip((first.attention, first.feedforward), expected, strict=True):
        assert ratio == pytest.approx(each[batch.attention_mask].mean().item(), rel=1e-5)
    assert not layer.attention._forward_hooks


def test_replaced_tokens_are_those_of_the_last_phase(analyze_config, run_config):
    """Half of the tokens are masked in the last phase: far more are replaced than in rows of the first one."""
    fractions = []
    for name, mask_fraction in (("few", 0.05), ("many", 0.5)):
        config = run_config(name, steps=4, phases=("mask-fraction=0.2", f"mask-fraction={mask_fraction}"))
        pretrain(config)
        output = config.output.parent / f"{name}-analysis"
        fractions.append(analyze(analyze_config(model=config.output, output=output, map_tokens=10)).replaced_fraction)
    assert fractions[1] > 3 * fractions[0]


def test_a_pair_that_shares_all_weights_can_be_analyzed(analyze_config, run_config):
    config = run_config(steps=2, sharing="all", generator_width=None)
    pretrain(config)
    result = analyze(analyze_config(model=config.output, map_tokens=10))
    assert 0 <= result.auc_with_dropout <= 1
