"""A map of the vocabulary: a position in the plane for every token, near those with similar embeddings.

The layout is UMAP's (arXiv 1802.03426) with all edges of the neighbour graph at once: tokens are attracted by their
nearest neighbours and repelled by random tokens, from the first two principal components on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEIGHBORS = 10
NEGATIVES = 5  # random tokens that repel each token in an epoch, for each of its neighbours
EPOCHS = 150
SPREAD = 10.0  # half of the width of the initial layout
CHUNK = 1024  # rows of the similarity matrix in memory
MAX_MOVE = 4.0  # of a token in an epoch, at first
CURVE = (1.577, 0.8951)  # UMAP's a and b for min_dist 0.1
GRID = 65535  # positions are integers of 16 bits


@dataclass(frozen=True)
class VocabularyMap:
    """Positions of tokens, and their nearest neighbours by the cosine of the embeddings, nearest first."""

    positions: NDArray  # [V, 2] uint16
    neighbors: NDArray  # [V, K] int32
    similarities: NDArray  # [V, K] float32

    def to_bytes(self) -> bytes:
        """The arrays one after the other, little-endian, similarities as 8-bit integers in steps of 1/127."""
        cosines = np.round(self.similarities.clip(-1, 1) * 127).astype("i1")
        return self.neighbors.astype("<i4").tobytes() + self.positions.astype("<u2").tobytes() + cosines.tobytes()


def compute_map(embeddings: Tensor, advance: Callable[[], None] = lambda: None) -> VocabularyMap:
    """The map of token embeddings [V, E]; calls `advance` `EPOCHS` times."""
    centered = embeddings.detach().float()
    centered = centered - centered.mean(0)
    directions = torch.nn.functional.normalize(centered, dim=1)
    neighbors, similarities = nearest_neighbors(directions, min(NEIGHBORS, len(directions) - 1))
    layout = lay_out(principal_components(directions), neighbors, similarities, advance)
    return VocabularyMap(to_grid(layout).numpy(), neighbors.int().numpy(), similarities.numpy())


def nearest_neighbors(directions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest other rows [V, K] of each row and their cosines."""
    indices, cosines = [], []
    for start in range(0, len(directions), CHUNK):
        similarity = directions[start : start + CHUNK] @ directions.T
        rows = torch.arange(len(similarity))
        similarity[rows, start + rows] = -torch.inf
        best = similarity.topk(count, dim=1)
        indices.append(best.indices)
        cosines.append(best.values)
    return torch.cat(indices), torch.cat(cosines)


def principal_components(directions: Tensor) -> Tensor:
    """The first two principal components [V, 2], scaled to ± `SPREAD`."""
    _, vectors = torch.linalg.eigh(directions.T @ directions)
    components = directions @ vectors[:, -2:]
    return SPREAD * components / components.abs().amax(0).clamp(min=1e-12)


def lay_out(layout: Tensor, neighbors: Tensor, similarities: Tensor, advance: Callable[[], None]) -> Tensor:
    """Move tokens by the gradient of UMAP's cross-entropy, with a step that decreases to 0."""
    generator = torch.Generator().manual_seed(0)
    distances = 1 - similarities
    above_nearest = distances - distances[:, :1]
    weights = torch.exp(-above_nearest / above_nearest.mean(1, keepdim=True).clamp(min=1e-6)).flatten()
    count, degree = neighbors.shape
    heads, tails = torch.arange(count).repeat_interleave(degree), neighbors.flatten()
    a, b = CURVE
    for epoch in range(EPOCHS):
        offsets = layout[heads] - layout[tails]  # [edges, 2]
        squared = offsets.square().sum(1, keepdim=True).clamp(min=1e-6)
        pull = -2 * a * b * squared ** (b - 1) / (1 + a * squared**b) * weights[:, None] * offsets
        move = torch.zeros_like(layout).index_add_(0, heads, pull).index_add_(0, tails, -pull)
        for _ in range(NEGATIVES):
            others = torch.randint(count, (count,), generator=generator)
            offsets = layout - layout[others]
            squared = offsets.square().sum(1, keepdim=True)
            push = degree * 2 * b / ((0.001 + squared) * (1 + a * squared**b)) * offsets
            move += push.clamp(-MAX_MOVE, MAX_MOVE)
        layout = layout + (1 - epoch / EPOCHS) * move.clamp(-MAX_MOVE, MAX_MOVE)
        advance()
    return layout


def to_grid(layout: Tensor) -> Tensor:
    """Positions as integers from 0 to `GRID`, the same scale for both axes; few outliers are moved to the border."""
    low, high = layout.quantile(0.001, dim=0), layout.quantile(0.999, dim=0)
    center, half = (low + high) / 2, (high - low).max().clamp(min=1e-6) / 2
    scaled = ((layout - center) / (2 * half) + 0.5).clamp(0, 1)
    return (scaled * GRID).round().int()
