"""Counts of bigrams as a baseline of replaced token detection."""

import numpy as np
import torch

from electra.data.shards import open_shards
from electra.objectives.evaluation import corrupt_with_unigram_samples
from electra.pretraining import bigrams
from electra.pretraining.bigrams import BigramCounts, bigram_auc, count_bigrams
from electra.pretraining.held_out import held_out_batches


def test_a_token_that_never_occurs_beside_its_neighbours_has_the_highest_score():
    """The text is 0 1 2 0 1 2 …: bigrams 0 1, 1 2 and 2 0."""
    counts = BigramCounts(np.array([1, 5, 6]), np.array([10, 10, 9]), np.array([10, 10, 10]))
    scores = counts.replaced_scores(np.array([[0, 1, 2, 2, 1, 2, 0]]), smoothing=0.5)
    assert scores.argmax() == 3
    assert scores[0, 1] < 0 < scores[0, 3]


def test_bigrams_are_counted_in_the_training_text_and_find_random_tokens(shards):
    counts = count_bigrams(open_shards(shards))
    assert counts.bigram_counts.sum() == counts.token_counts.sum() - 1
    auc, _ = bigram_auc(open_shards(shards), counts, length=16, rows=64)
    assert 0.9 < auc < 1


def test_the_baseline_is_measured_on_the_held_out_rows_of_a_run(run_config, shards, monkeypatch):
    opened, found = open_shards(shards), []

    def corrupt(batch, context, frequencies):
        found.append(batch.input_ids)
        return corrupt_with_unigram_samples(batch, context, frequencies)

    monkeypatch.setattr(bigrams, "corrupt_with_unigram_samples", corrupt)
    config = run_config(evaluation_rows=64, length=16)
    expected = [batch.input_ids for batch in held_out_batches(config, opened, torch.device("cpu"))]
    bigram_auc(opened, count_bigrams(opened), length=16, rows=64)
    assert torch.equal(torch.cat(found), torch.cat(expected))
