"""A baseline for replaced token detection: how unusual a token is beside its neighbours, by counts of bigrams.

The score of a token is its negative pointwise mutual information with its neighbours,
−log p(x | previous) / p(x) − log p(next | x) / p(next), smoothed towards the unigram distribution.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from electra.data.loader import validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards
from electra.objectives.evaluation import SEED, corrupt_with_unigram_samples, roc_auc
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.initialize import unigram_frequencies

SMOOTHING = (0.5, 2.0, 10.0, 50.0, 200.0)  # pseudo-counts
ROWS = 32  # of a batch


@dataclass(frozen=True)
class BigramCounts:
    """Counts of the tokens and bigrams of a text."""

    bigrams: NDArray  # sorted: first · V + second
    bigram_counts: NDArray
    token_counts: NDArray  # [V]

    def mutual_information(self, first: NDArray, second: NDArray, smoothing: float) -> NDArray:
        """log p(second | first) / p(second)."""
        keys = first * len(self.token_counts) + second
        index = np.searchsorted(self.bigrams, keys).clip(max=len(self.bigrams) - 1)
        joint = np.where(self.bigrams[index] == keys, self.bigram_counts[index], 0)
        unigram = (self.token_counts[second] + 1) / (self.token_counts.sum() + len(self.token_counts))
        return np.log((joint + smoothing * unigram) / (self.token_counts[first] + smoothing) / unigram)

    def replaced_scores(self, input_ids: NDArray, smoothing: float) -> NDArray:
        """The score of each token of rows [B, L]; higher for tokens that are unusual beside their neighbours."""
        information = self.mutual_information(input_ids[:, :-1], input_ids[:, 1:], smoothing)
        scores = np.zeros(input_ids.shape)
        scores[:, 1:] -= information
        scores[:, :-1] -= information
        return scores


def count_bigrams(shards: Shards) -> BigramCounts:
    """The counts of the training text."""
    size = shards.tokenizer.vocabulary.size
    tokens = np.concatenate([part.astype(np.int64) for part in shards.tokens_by_shard("train")])
    bigrams, counts = np.unique(tokens[:-1] * size + tokens[1:], return_counts=True)
    return BigramCounts(bigrams, counts, np.bincount(tokens, minlength=size))


def bigram_auc(shards: Shards, counts: BigramCounts, length: int, rows: int) -> tuple[float, float]:
    """`unigram_rtd_auc` of bigram counts on held-out rows, spread over the split like those of a run's evaluation, and
    the smoothing it is highest with.

    The smoothing is chosen on these rows, which makes the baseline slightly too strong."""
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    loader = LoaderConfig(length=length, batch_size=ROWS)
    batches = validation_batches(shards, loader, max_batches=max(1, rows // ROWS))
    corrupted = [corrupt_with_unigram_samples(batch, context, frequencies).corrupted for batch in batches]
    ids = torch.cat([part.input_ids for part in corrupted]).numpy()
    labels = torch.cat([part.is_replaced for part in corrupted]).numpy()
    return max((roc_auc(counts.replaced_scores(ids, each).ravel(), labels.ravel()), each) for each in SMOOTHING)
