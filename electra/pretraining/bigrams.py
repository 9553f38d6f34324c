"""Baselines for replaced token detection and token prediction from counts of bigrams.

The score of a replaced token is its negative pointwise mutual information with its neighbours,
−log p(x | previous) / p(x) − log p(next | x) / p(next), smoothed towards the unigram distribution; a masked token is
predicted by p(x) times both ratios.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from electra.data.loader import Batch, validation_batches
from electra.data.packing import LoaderConfig, Packing
from electra.data.shards import Shards
from electra.model.electra import Electra
from electra.objectives.evaluation import (
    SEED,
    MaskedAndCorrupted,
    corrupt_with_unigram_samples,
    mask_and_corrupt,
    roc_auc,
)
from electra.objectives.masking import Masked
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.token_counts import count_pairs, unigram_frequencies

PSEUDO_COUNTS = (0.5, 2.0, 10.0, 50.0, 200.0)  # of smoothing; the best is taken
ROWS = 32  # of a batch


@dataclass(frozen=True)
class BigramCounts:
    """Counts of the tokens and bigrams of a text."""

    bigrams: NDArray  # sorted: first · V + second
    bigram_counts: NDArray
    token_counts: NDArray  # [V]

    def frequencies(self) -> NDArray:
        """p(x), smoothed so that none is zero."""
        return (self.token_counts + 1) / (self.token_counts.sum() + len(self.token_counts))

    def joint_counts(self, first: NDArray, second: NDArray) -> NDArray:
        keys = first * len(self.token_counts) + second
        index = np.searchsorted(self.bigrams, keys).clip(max=len(self.bigrams) - 1)
        return np.where(self.bigrams[index] == keys, self.bigram_counts[index], 0)

    def mutual_information(self, first: NDArray, second: NDArray, joint: NDArray, smoothing: float) -> NDArray:
        """log p(second | first) / p(second)."""
        unigram = self.frequencies()[second]
        return np.log((joint + smoothing * unigram) / (self.token_counts[first] + smoothing) / unigram)

    def replaced_scores(self, input_ids: NDArray, smoothing: float) -> NDArray:
        """The score of each token of rows [B, L]; higher for tokens that are unusual beside their neighbours."""
        first, second = input_ids[:, :-1], input_ids[:, 1:]
        information = self.mutual_information(first, second, self.joint_counts(first, second), smoothing)
        scores = np.zeros(input_ids.shape)
        scores[:, 1:] -= information
        scores[:, :-1] -= information
        return scores


def count_bigrams(shards: Shards) -> BigramCounts:
    """The counts of the training text."""
    tokens, size = shards.tokens_by_shard("train"), shards.tokenizer.vocabulary.size
    return BigramCounts(*count_pairs(tokens, size), np.bincount(np.concatenate(tokens), minlength=size))


def evaluation_batches(shards: Shards, length: int, rows: int, packing: Packing = "packed") -> Iterator[Batch]:
    """The held-out rows of a run's evaluation on a CPU."""
    loader = LoaderConfig(length=length, batch_size=min(ROWS, rows), packing=packing)
    return validation_batches(shards, loader, max_batches=-(-rows // loader.batch_size))


@torch.no_grad()
def evaluation_samples(
    shards: Shards, batches: Iterable[Batch], electra: Electra | None = None
) -> list[MaskedAndCorrupted]:
    """Batches corrupted by the samples of a run's evaluation: of its generator (`rtd_auc`) or, without a pair, of the
    unigram distribution (`unigram_rtd_auc`)."""
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    if electra is not None:
        return [mask_and_corrupt(electra, batch, context) for batch in batches]
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    return [corrupt_with_unigram_samples(batch, context, frequencies) for batch in batches]


def bigram_auc(counts: BigramCounts, samples: Sequence[MaskedAndCorrupted]) -> tuple[float, float]:
    """The AUC of bigram counts, and the smoothing it is highest with.

    The smoothing is chosen on these rows, which makes the baseline slightly too strong."""
    ids = torch.cat([each.corrupted.input_ids for each in samples]).numpy()
    labels = torch.cat([each.corrupted.is_replaced for each in samples]).numpy()
    return max((roc_auc(counts.replaced_scores(ids, each).ravel(), labels.ravel()), each) for each in PSEUDO_COUNTS)


def bigram_mlm_loss(counts: BigramCounts, samples: Sequence[MaskedAndCorrupted], mask_id: int) -> float:
    """The MLM loss of bigram counts at the masked positions, with the smoothing it is lowest with."""
    neighbours, labels = zip(*(neighbours_and_labels(each.masked, mask_id) for each in samples), strict=True)
    before, after = torch.cat(neighbours).T[:, :, None].numpy()  # each [N, 1]
    label_ids = torch.cat(labels).numpy()
    tokens = np.arange(len(counts.token_counts))[None]  # [1, V]
    joint_before, joint_after = counts.joint_counts(before, tokens), counts.joint_counts(tokens, after)  # [N, V]
    losses = []
    for smoothing in PSEUDO_COUNTS:
        from_before = counts.mutual_information(before, tokens, joint_before, smoothing)
        from_after = counts.mutual_information(tokens, after, joint_after, smoothing)
        logits = np.log(counts.frequencies()) + (before != mask_id) * from_before + (after != mask_id) * from_after
        log_probabilities = torch.from_numpy(logits).log_softmax(1)
        losses.append(-log_probabilities[np.arange(len(label_ids)), label_ids].mean().item())
    return min(losses)


def neighbours_and_labels(masked: Masked, mask_id: int) -> tuple[Tensor, Tensor]:
    """The tokens before and after the masked positions [N, 2], [MASK] after the end of a row, and the labels [N]."""
    is_used = masked.weights > 0
    padded = functional.pad(masked.input_ids, (1, 1), value=mask_id)  # [B, 1 + L + 1]
    neighbours = torch.stack([padded.gather(1, masked.positions), padded.gather(1, masked.positions + 2)], 2)
    return neighbours[is_used], masked.labels[is_used]
