"""Counts of tokens and of pairs of tokens in the training text, and embeddings from co-occurrence."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.shards import Shards

UNIGRAM_TOKENS = 50_000_000

# of embeddings from co-occurrence
NEIGHBOUR_TOKENS = 10_000_000  # of the text
WINDOW = 2  # tokens to either side; counts are divided by the distance
FREQUENCY_EXPONENT = 0.75  # of the neighbours' frequencies, which otherwise favour pairs of rare tokens
OVERSAMPLING = 16  # further vectors of the subspace iteration
ITERATIONS = 6


def first_training_tokens(shards: Shards, count: int) -> list[NDArray]:
    """The first training tokens of each shard, about `count` in total."""
    return shards.tokens_by_shard("train", min(1, count / max(1, shards.index.totals_by_split("tokens")["train"])))


def unigram_frequencies(shards: Shards, device: torch.device) -> Tensor:
    """Relative frequencies of tokens in the training text, special tokens excluded: [V].

    Of a long text they are those of the first tokens of every shard, about UNIGRAM_TOKENS in total.
    """
    counts = np.zeros(shards.tokenizer.vocabulary.size, dtype=np.int64)
    for tokens in first_training_tokens(shards, UNIGRAM_TOKENS):
        counts += np.bincount(tokens, minlength=len(counts))
    counts[list(shards.tokenizer.vocabulary.unmaskable_ids())] = 0
    return torch.from_numpy(counts / max(1, counts.sum())).float().to(device)


def count_pairs(tokens_by_shard: list[NDArray], size: int, distance: int = 1) -> tuple[NDArray, NDArray]:
    """Pairs of tokens at a distance, as first · V + second in ascending order, and their counts."""
    tokens = np.concatenate([part.astype(np.int64) for part in tokens_by_shard])
    return np.unique(tokens[:-distance] * size + tokens[distance:], return_counts=True)


# Embeddings from co-occurrence: the leading eigenvectors of the matrix of positive pointwise mutual information (PPMI)
# of neighbours, as of count-based word vectors, so that tokens with similar neighbours have similar embeddings before
# the first step.


def cooccurrence_vectors(shards: Shards, width: int) -> Tensor:
    """[V, width], zero for special tokens and tokens without neighbours."""
    vocabulary = shards.tokenizer.vocabulary
    matrix = positive_mutual_information(*count_neighbours(shards), vocabulary.size)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(vocabulary.size, min(width + OVERSAMPLING, vocabulary.size), generator=generator)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(torch.sparse.mm(matrix, basis)).Q
    eigenvalues, eigenvectors = torch.linalg.eigh(basis.T @ torch.sparse.mm(matrix, basis))
    largest = eigenvalues.abs().argsort(descending=True)[:width]
    vectors = basis @ eigenvectors[:, largest] * eigenvalues[largest].abs().sqrt()
    is_known = torch.sparse.mm(matrix, torch.ones(vocabulary.size, 1)) > 0
    is_known[list(vocabulary.unmaskable_ids())] = False
    vectors = torch.where(is_known, vectors - vectors[is_known.squeeze(1)].mean(0), 0.0) if is_known.any() else vectors
    return torch.nn.functional.pad(vectors, (0, width - vectors.shape[1]))


def count_neighbours(shards: Shards) -> tuple[NDArray, NDArray]:
    """Pairs of tokens within the window, as first · V + second, and their weighted counts."""
    tokens, size = first_training_tokens(shards, NEIGHBOUR_TOKENS), shards.tokenizer.vocabulary.size
    pairs, counts = [], []
    for distance in range(1, WINDOW + 1):
        unique, count = count_pairs(tokens, size, distance)
        pairs.append(unique)
        counts.append(count / distance)
    return np.concatenate(pairs), np.concatenate(counts)


def positive_mutual_information(pairs: NDArray, counts: NDArray, size: int) -> Tensor:
    """The symmetric sparse matrix [V, V] of max(0, log p(x, y) / p(x) p(y)), with smoothed frequencies."""
    first, second = torch.from_numpy(pairs // size), torch.from_numpy(pairs % size)
    indices = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    joint = torch.sparse_coo_tensor(
        indices, torch.from_numpy(counts).repeat(2), (size, size), check_invariants=True
    ).coalesce()
    first, second = joint.indices()
    totals = torch.zeros(size, dtype=torch.float64).index_add_(0, first, joint.values())
    smoothed = totals**FREQUENCY_EXPONENT / (totals**FREQUENCY_EXPONENT).sum()
    ratios = joint.values() ** 2 / (totals[first] * smoothed[second] * totals[second] * smoothed[first])
    values = (ratios.log() / 2).clamp(min=0).float()
    return torch.sparse_coo_tensor(joint.indices(), values, (size, size), check_invariants=True).coalesce()
