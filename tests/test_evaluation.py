"""Evaluation on held-out text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, precision_score, recall_score, roc_auc_score

from electra.data.loader import Batch, merge_batches, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import open_shards
from electra.objectives.config import MaskingConfig, ObjectiveConfig
from electra.objectives.evaluation import (
    SEED,
    DetectionMetrics,
    corrupt_with_unigram_samples,
    evaluate,
    held_out_loss,
    roc_auc,
)
from electra.objectives.losses import total_loss
from electra.objectives.objectives import OBJECTIVES, Corrupted, ObjectiveContext

UNIFORM = torch.full((60,), 1 / 60)
GENERATOR_METRICS = {"mlm_loss", "mlm_accuracy", "sample_accuracy", "generator_entropy", "unigram_mlm_loss"}


def detection_metrics(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, float]:
    batch = Batch(torch.zeros_like(labels, dtype=torch.long), torch.tensor(0), torch.arange(len(labels)), mask)
    metrics = DetectionMetrics()
    metrics.add(logits, Corrupted(torch.empty(0), labels), batch)
    return metrics.compute("x")


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=60))
def test_detection_metrics_equal_those_of_scikit_learn(rows):
    logits = torch.tensor([float(logit) / 2 for logit, _ in rows])[None]
    labels = torch.tensor([is_replaced for _, is_replaced in rows])[None]
    metrics, y, predicted = detection_metrics(logits, labels), labels[0].numpy(), (logits[0] > 0).numpy()
    assert metrics["x_loss"] == pytest.approx(log_loss(y, logits[0].double().sigmoid().numpy(), labels=[False, True]))
    assert metrics["x_accuracy"] == pytest.approx((y == predicted).mean())
    assert metrics["x_precision"] == pytest.approx(precision_score(y, predicted, zero_division=0))
    assert metrics["x_recall"] == pytest.approx(recall_score(y, predicted, zero_division=0))
    if 0 < y.sum() < len(y):
        assert metrics["x_auc"] == pytest.approx(roc_auc_score(y, logits[0].numpy()))


def test_auc_of_a_single_class_is_one_half():
    assert roc_auc(np.array([1.0, 2.0]), np.array([True, True])) == 0.5


def test_padding_is_not_evaluated():
    labels, mask = torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])
    assert detection_metrics(torch.tensor([[3.0, -3.0, -9.0]]), labels, mask)["x_accuracy"] == 1.0


def test_unigram_samples_follow_the_frequencies_and_are_always_the_same(make_batch, vocabulary):
    unigram = torch.zeros(60)
    unigram[[10, 20]] = torch.tensor([0.25, 0.75])
    batch, context = make_batch(rows=400), ObjectiveContext(vocabulary=vocabulary, seed=1)
    corrupted = corrupt_with_unigram_samples(batch, context, unigram).corrupted
    replaced = corrupted.input_ids[corrupted.is_replaced]
    assert set(replaced.unique().tolist()) == {10, 20}
    assert (replaced == 20).float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert torch.equal(corrupted.input_ids, corrupt_with_unigram_samples(batch, context, unigram).corrupted.input_ids)


def test_generator_and_discriminator_are_evaluated_if_present(make_pair, make_batch, vocabulary):
    electra, batches = make_pair("none").eval(), [make_batch()]
    both = evaluate(electra, batches, UNIFORM, vocabulary)
    assert {*GENERATOR_METRICS, "rtd_auc", "unigram_rtd_auc"} <= set(both)
    assert both["generator_entropy"] == pytest.approx(torch.tensor(60.0).log().item(), abs=0.2)
    electra.discriminator = None
    assert set(evaluate(electra, batches, UNIFORM, vocabulary)) == GENERATOR_METRICS


@pytest.mark.parametrize("objective", ["replace-mlm", "all-tokens-mlm"])
def test_a_masked_language_model_in_place_of_the_discriminator_is_evaluated(
    make_pair, make_batch, vocabulary, objective
):
    metrics = evaluate(make_pair(objective=objective).eval(), [make_batch()], UNIFORM, vocabulary)
    assert set(metrics) == GENERATOR_METRICS | {"replace_mlm_loss", "replace_mlm_accuracy"}


def test_metrics_are_deterministic(make_pair, make_batch, vocabulary):
    electra = make_pair().eval()
    first, second = (evaluate(electra, [make_batch()], UNIFORM, vocabulary) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_held_out_loss_is_the_objectives_with_the_runs_settings(
    make_pair, make_batch, vocabulary, name, has_generator
):
    if OBJECTIVES[name].needs_generator and not has_generator:
        return
    electra, batch = make_pair("none", objective=name).eval(), make_batch(lengths=[16, 16, 9, 12])
    context = ObjectiveContext(
        vocabulary=vocabulary,
        masking=MaskingConfig(mask_fraction=0.3),
        objective=ObjectiveConfig(name=name, discriminator_weight=7.0),
        frequencies=None if has_generator else torch.eye(60)[10],
    )
    objective = OBJECTIVES["rtd" if name == "adversarial" else name]  # the MLM loss instead of the policy's
    expected = total_loss(objective.losses(electra, batch, replace(context, seed=SEED))).item()
    for seed in (1, 2):
        assert held_out_loss(electra, [batch], replace(context, seed=seed)) == pytest.approx(expected, rel=1e-6)


def test_the_held_out_loss_weights_all_tokens_equally_however_they_are_batched(make_pair, make_batch, vocabulary):
    electra, batch = make_pair().eval(), make_batch(lengths=[16, 16, 7, 7])
    context = ObjectiveContext(vocabulary=vocabulary)
    split, whole = (held_out_loss(electra, batches, context) for batches in (batch.micro_batches(2), [batch]))
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("packing", ["packed", "segment-pairs", "examples"])
def test_merged_batches_have_the_metrics_of_their_parts(make_pair, shards, packing):
    opened = open_shards(shards)
    electra, vocabulary = make_pair("none").eval(), opened.tokenizer.vocabulary
    parts = list(validation_batches(opened, LoaderConfig(length=8, batch_size=4, packing=packing), max_batches=3))
    merged = merge_batches(parts)
    assert merged.num_rows == 12
    expected = evaluate(electra, parts, UNIFORM, vocabulary)
    assert evaluate(electra, [merged], UNIFORM, vocabulary) == pytest.approx(expected, abs=1e-5)
