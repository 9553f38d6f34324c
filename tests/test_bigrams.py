"""Counts of bigrams as a baseline of replaced token detection."""

import numpy as np

from electra.data.shards import open_shards
from electra.pretraining.bigrams import BigramCounts, bigram_auc, count_bigrams


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
