"""Counts of bigrams as a baseline of replaced token detection."""

import numpy as np
import pytest
import torch

from electra.data.shards import open_shards
from electra.objectives.evaluation import DetectionMetrics, MaskedAndCorrupted, evaluate
from electra.objectives.masking import Masked
from electra.objectives.objectives import Corrupted
from electra.pretraining.held_out import held_out_batches
from electra.pretraining.token_counts import unigram_frequencies
from electra.serving.comparison import (
    BigramCounts,
    bigram_auc,
    bigram_mlm_loss,
    count_bigrams,
    evaluation_batches,
    evaluation_samples,
)
from electra.serving.inference import load_text_model


def samples_of(shards, electra=None):
    return evaluation_samples(shards, evaluation_batches(shards, length=16, rows=64), electra)


def test_a_token_that_never_occurs_beside_its_neighbours_has_the_highest_score():
    """The text is 0 1 2 0 1 2 …: bigrams 0 1, 1 2 and 2 0."""
    counts = BigramCounts(np.array([1, 5, 6]), np.array([10, 10, 9]), np.array([10, 10, 10]))
    scores = counts.replaced_scores(np.array([[0, 1, 2, 2, 1, 2, 0]]), smoothing=0.5)
    assert scores.argmax() == 3
    assert scores[0, 1] < 0 < scores[0, 3]


def test_bigrams_are_counted_in_the_training_text_and_find_random_tokens(shards):
    counts = count_bigrams(open_shards(shards))
    assert counts.bigram_counts.sum() == counts.token_counts.sum() - 1
    auc, _ = bigram_auc(counts, samples_of(open_shards(shards)))
    assert 0.9 < auc < 1


@pytest.mark.parametrize("with_generator", [True, False])
def test_the_baseline_is_measured_on_the_samples_of_a_run_s_evaluation(
    run_config, shards, monkeypatch, with_generator, finished_run
):
    opened, found = open_shards(shards), []
    electra = load_text_model(finished_run, "cpu").electra
    add = DetectionMetrics.add

    def keep(metrics, logits, corrupted, batch):
        found.append(corrupted.input_ids)
        add(metrics, logits, corrupted, batch)

    monkeypatch.setattr(DetectionMetrics, "add", keep)
    config = run_config(evaluation_rows=64, length=16)
    batches = held_out_batches(config, opened, torch.device("cpu"))
    evaluate(electra, batches, unigram_frequencies(opened, torch.device("cpu")), opened.tokenizer.vocabulary)
    expected = torch.cat(found[0 if with_generator else 1 :: 2])  # of each batch: the generator's, then unigram samples
    samples = samples_of(opened, electra if with_generator else None)
    assert torch.equal(torch.cat([each.corrupted.input_ids for each in samples]), expected)


def test_a_masked_token_between_known_neighbours_is_predicted_by_bigrams():
    """The text is 0 1 2 0 1 2 …; token 3 is [MASK], which is also in place of the neighbour in the second row."""
    counts = BigramCounts(np.array([1, 6, 8]), np.array([10, 10, 10]), np.array([10, 10, 10, 0]))
    known, unknown = torch.tensor([[0, 3, 2, 0]]), torch.tensor([[3, 3, 3, 3]])
    losses = {}
    for name, ids in (("known", known), ("unknown", unknown)):
        masked = Masked(
            ids, positions=torch.tensor([[1, 0]]), labels=torch.tensor([[1, 0]]), weights=torch.tensor([[1, 0]])
        )
        corrupted = Corrupted(ids, is_replaced=ids == 3)
        losses[name] = bigram_mlm_loss(counts, [MaskedAndCorrupted(masked, corrupted)], mask_id=3)
    assert losses["known"] < 0.01
    assert losses["unknown"] == pytest.approx(-np.log(11 / 34))  # of its frequency alone
