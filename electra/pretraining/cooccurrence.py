"""Initial token embeddings from counts: which tokens are neighbours in the text.

The vectors are the leading eigenvectors of the matrix of positive pointwise mutual information (PPMI) of neighbours,
as of count-based word vectors, so that tokens with similar neighbours have similar embeddings before the first step.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.shards import Shards
from electra.model.electra import Electra
from electra.model.encoder import Encoder

MAX_TOKENS = 10_000_000  # of the text
WINDOW = 2  # tokens to either side; counts are divided by the distance
SMOOTHING = 0.75  # exponent of the neighbours' frequencies, which otherwise favour pairs of rare tokens
OVERSAMPLING = 16  # further vectors of the subspace iteration
ITERATIONS = 6


@torch.no_grad()
def set_cooccurrence_embeddings(model: Electra, shards: Shards) -> None:
    """Set token embeddings to vectors of co-occurrence with the scale of the default initialisation; special tokens and
    tokens that are not in the text keep theirs."""
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    tables = [
        (encoder.embeddings.token.weight, encoder.config.init_std)
        for encoder in encoders
        if encoder.embeddings.base is None  # differences from a base start at zero
    ]
    vectors = cooccurrence_vectors(shards, max(table.shape[1] for table, _ in tables))
    for table, std in tables:
        own = vectors[:, : table.shape[1]]
        lengths = own.norm(dim=1, keepdim=True)
        scaled = own / lengths.clamp(min=1e-12) * std * table.shape[1] ** 0.5
        table.copy_(torch.where(lengths > 0, scaled.to(table.device), table))


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
    size = shards.tokenizer.vocabulary.size
    fraction = min(1, MAX_TOKENS / max(1, shards.index.totals_by_split("tokens")["train"]))
    tokens = np.concatenate([part.astype(np.int64) for part in shards.tokens_by_shard("train", fraction)])
    pairs, counts = [], []
    for distance in range(1, WINDOW + 1):
        unique, count = np.unique(tokens[:-distance] * size + tokens[distance:], return_counts=True)
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
    smoothed = totals**SMOOTHING / (totals**SMOOTHING).sum()
    ratios = joint.values() ** 2 / (totals[first] * smoothed[second] * totals[second] * smoothed[first])
    values = (ratios.log() / 2).clamp(min=0).float()
    return torch.sparse_coo_tensor(joint.indices(), values, (size, size), check_invariants=True).coalesce()
