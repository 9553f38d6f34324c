"""Packing: which tokens make up which row, as a function of (seed, epoch, length) alone.

*packed*: the documents of a split, each ending with [SEP], are concatenated and read as a ring. An epoch starts at a
random offset and splits the ring into rows of `length` tokens, each beginning with [CLS]; the last row wraps around to
the tokens the epoch started with. There is no padding and no segment B.

*segment-pairs* (the ELECTRA paper): a row holds text of a single document, [CLS] A [SEP] B [SEP], where B continues A.
One row in ten has segment A only, one in twenty is shortened, and rows are padded to `length`.

*examples*: the rows of *packed*, split at ends of sentences into examples as fine-tuning has them, [CLS] A [SEP] or
[CLS] A [SEP] B [SEP], of all lengths and without padding. The tokens that the added special tokens displace from the
end of a row are left out; another epoch has other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from electra.data.shards import Shards, Split
from electra.errors import ConfigError, check_choice, check_range

Packing = Literal["packed", "segment-pairs", "examples"]
ROW_ORDER = ("seed", "length", "packing")
"""The settings that determine the row order; a saved position is only valid with the same ones."""
SINGLE_SEGMENT_FRACTION = 0.1
SHORT_ROW_FRACTION = 0.05
LONG_ROW_FRACTION = 0.5  # of rows of examples: one example from one end to the other, if one document fills the row
MAX_SPLITS = 15  # of a row into examples and segments; documents may add more
FEISTEL_ROUNDS = 6

PACKED_STREAM, SEGMENT_PAIRS_STREAM, PERMUTATION_STREAM = range(3)  # independent random streams


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How tokens are packed into rows and rows into batches."""

    length: int = 128
    """Tokens per row, including [CLS] and [SEP]."""
    batch_size: int = 128
    """Rows per step, over all ranks and micro-batches."""
    packing: Packing = "packed"
    """packed: documents are concatenated, without padding; segment-pairs: two segments of one document per row, padded,
    as in the ELECTRA paper; examples: like packed, but split at sentence ends into single and paired segments of all
    lengths, each with [CLS] and [SEP], as in fine-tuning."""
    cross_document_attention: bool = False
    """Let tokens attend to all documents of a packed row instead of only to their own."""
    data_on_gpu: bool = False
    """Keep all training tokens in GPU memory and pack rows there."""

    def __post_init__(self) -> None:
        if self.length < 5:
            raise ConfigError(f"is {self.length}; it must be at least 5: [CLS] A [SEP] B [SEP]", field="length")
        check_range(self, "batch_size", at_least=1)
        check_choice(self, "packing", get_args(Packing))
        if self.packing == "examples" and self.cross_document_attention:
            raise ConfigError(
                "--packing examples does not allow attention between the examples of a row; use "
                "--no-cross-document-attention or --packing packed"
            )


@dataclass(frozen=True)
class RowSpans:
    """Where rows are in the concatenated tokens of a split."""

    starts: NDArray  # [R] first token
    lengths: NDArray | None = None  # [R] text tokens; None: all rows are full
    first_lengths: NDArray | None = None  # [R] text tokens of segment A; the rest are segment B


class PackedRows:
    """The rows of an epoch: the ring of all tokens, split every `length` - 1 tokens."""

    def __init__(self, num_tokens: int, length: int, seed: int, epoch: int, shuffle: bool):
        self.width = length - 1  # text tokens per row; [CLS] is the other
        self.num_rows = -(-num_tokens // self.width)
        self.num_tokens = num_tokens
        self.offset = int(random_generator(seed, epoch, PACKED_STREAM).integers(num_tokens)) if shuffle else 0
        self.order = Permutation.for_epoch(self.num_rows, seed, epoch) if shuffle else identity

    def spans(self, indices: NDArray) -> RowSpans:
        """The spans of the rows at these indices of the epoch's order."""
        return RowSpans((self.offset + self.order(indices) * self.width) % self.num_tokens)


class SegmentPairRows:
    """The rows of an epoch: at most `length` tokens of a single document each."""

    def __init__(self, document_starts: NDArray, length: int, seed: int, epoch: int, shuffle: bool):
        self.width = length - 3  # text tokens in a full row; the others are [CLS], [SEP], [SEP]
        random = random_generator(seed, epoch, SEGMENT_PAIRS_STREAM)
        self.starts, lengths = split_documents_into_rows(document_starts[:-1], np.diff(document_starts) - 1, self.width)
        self.starts, lengths = split_random_rows(self.starts, lengths, random)
        first_lengths = (lengths * random.uniform(0.25, 0.75, len(lengths))).astype(np.int32).clip(1)
        is_single = (random.random(len(lengths)) < SINGLE_SEGMENT_FRACTION) | (lengths < 2)
        self.lengths = lengths.astype(np.int32)
        self.first_lengths = np.where(is_single, self.lengths, first_lengths)
        self.num_rows = len(self.starts)
        self.order = Permutation.for_epoch(self.num_rows, seed, epoch) if shuffle else identity

    def spans(self, indices: NDArray) -> RowSpans:
        """The spans of the rows at these indices of the epoch's order."""
        rows = self.order(indices)
        return RowSpans(self.starts[rows], self.lengths[rows], self.first_lengths[rows])


def identity(indices: NDArray) -> NDArray:
    """The order of the text."""
    return indices


def split_documents_into_rows(starts: NDArray, lengths: NDArray, width: int) -> tuple[NDArray, NDArray]:
    """Starts and lengths of the rows when each document is split every `width` tokens; its last row has the rest."""
    counts = -(-lengths // width)
    row_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    row_starts = np.repeat(starts, counts) + row_in_document * width
    row_lengths = np.minimum(width, np.repeat(lengths, counts) - row_in_document * width)
    return row_starts, row_lengths


def split_random_rows(starts: NDArray, lengths: NDArray, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Split random rows in two so that `SHORT_ROW_FRACTION` of the resulting rows are such halves."""
    fraction = SHORT_ROW_FRACTION / (2 - SHORT_ROW_FRACTION)  # each split row yields two short ones
    is_split = (random.random(len(starts)) < fraction) & (lengths > 1)
    split_at = (1 + random.random(is_split.sum()) * (lengths[is_split] - 1)).astype(np.int64)
    first_halves = lengths.copy()
    first_halves[is_split] = split_at
    return (
        np.concatenate([starts, starts[is_split] + split_at]),
        np.concatenate([first_halves, lengths[is_split] - split_at]),
    )


def random_generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Random numbers determined by these three values alone."""
    return np.random.default_rng([seed, epoch, stream])


def compute_document_starts(shards: Shards, split: Split) -> NDArray:
    """[N + 1] start of each document in the concatenated tokens of a split, and their total."""
    ends = [np.zeros(1, np.int64)]
    offset = 0
    for shard_ends in shards.document_ends_by_shard(split):
        ends.append(shard_ends.astype(np.int64) + offset)
        offset += int(shard_ends[-1]) if len(shard_ends) else 0
    return np.concatenate(ends)


def count_documents_in_spans(starts: NDArray, width: int, document_starts: NDArray) -> NDArray:
    """[R] number of documents in each span of `width` tokens of the ring that begins at `starts` [R]."""

    def documents_before(positions: NDArray) -> NDArray:
        rounds, rest = np.divmod(positions, document_starts[-1])
        return rounds * (len(document_starts) - 1) + np.searchsorted(document_starts[:-1], rest)

    return 1 + documents_before(starts + width) - documents_before(starts + 1)


@dataclass(frozen=True)
class Permutation:
    """A pseudorandom permutation of range(size) that needs no memory: a Feistel network over the next power of four."""

    size: int
    keys: tuple[int, ...]

    @classmethod
    def for_epoch(cls, size: int, seed: int, epoch: int) -> Permutation:
        """The row order of an epoch."""
        keys = random_generator(seed, epoch, PERMUTATION_STREAM).integers(1 << 63, size=FEISTEL_ROUNDS)
        return cls(size, tuple(map(int, keys)))

    def __call__(self, indices: NDArray) -> NDArray:
        permuted = self.feistel(indices.astype(np.uint64))
        while (is_outside := permuted >= self.size).any():  # cycle walking keeps it a bijection
            permuted[is_outside] = self.feistel(permuted[is_outside])
        return permuted.astype(np.int64)

    def feistel(self, values: NDArray) -> NDArray:
        """A bijection on the values below the next power of four."""
        bits = np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))
        mask = np.uint64((1 << int(bits)) - 1)
        left, right = values >> bits, values & mask
        for key in self.keys:
            left, right = right, left ^ (splitmix64(right + np.uint64(key)) & mask)
        return (left << bits) | right


def splitmix64(values: NDArray) -> NDArray:
    """The finaliser of SplitMix64 on uint64 values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
