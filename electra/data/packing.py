"""Packing: which tokens stand in which row, as a function of (seed, epoch, length) alone.

*dense*: the documents of a split, end to end and each ending with [SEP], are one ring of tokens. An epoch goes round it
once from a random place and cuts it into rows of `length` with [CLS] before each; the last row is filled from where the
epoch began. There is no padding and no segment B; models are written with B as a copy of A.

*paper*: a row holds text of one document only, cut from its beginning: [CLS] A [SEP] B [SEP] with B the continuation of
A, so that segment B is trained; one row in ten is [CLS] A [SEP]; one in twenty is short; padding fills up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from electra.data.shards import Shards, Split

Form = Literal["dense", "paper"]
SINGLE_SHARE = 0.1
SHORT_SHARE = 0.05


@dataclass(frozen=True)
class Cuts:
    """Where rows lie in the stream of tokens."""

    starts: NDArray  # [R] first token in the stream
    lengths: NDArray | None = None  # [R] tokens of text; None: all rows are full
    firsts: NDArray | None = None  # [R] tokens of segment A; the others are segment B


class Packing(Protocol):
    """The rows of one epoch, without order."""

    rows: int
    width: int  # tokens of text in a full row

    def cuts(self, rows: NDArray) -> Cuts:
        """Where the rows with these numbers lie."""


class DensePacking:
    """Rows of `length` cut from the ring of all tokens."""

    def __init__(self, tokens: int, length: int, seed: int, epoch: int, is_shuffled: bool):
        self.width = length - 1  # [CLS] takes one
        self.rows = -(-tokens // self.width)
        self.tokens = tokens
        self.begin = int(random_numbers(seed, epoch, DENSE).integers(tokens)) if is_shuffled else 0

    def cuts(self, rows: NDArray) -> Cuts:
        """Where the rows with these numbers lie."""
        return Cuts((self.begin + rows * self.width) % self.tokens)


class PaperPacking:
    """Rows of at most `length` cut from single documents."""

    def __init__(self, documents: NDArray, length: int, seed: int, epoch: int):
        """`documents` [N + 1] are the places in the stream where documents begin, and the stream's end."""
        self.width = length - 3  # [CLS], [SEP], [SEP]
        random = random_numbers(seed, epoch, PAPER)
        self.starts, lengths = cut_documents(documents[:-1], np.diff(documents) - 1, self.width)
        self.starts, lengths = shorten(self.starts, lengths, random)
        firsts = (lengths * random.uniform(0.25, 0.75, len(lengths))).astype(np.int32).clip(1)
        is_single = (random.random(len(lengths)) < SINGLE_SHARE) | (lengths < 2)
        self.lengths = lengths.astype(np.int32)
        self.firsts = np.where(is_single, self.lengths, firsts)
        self.rows = len(self.starts)

    def cuts(self, rows: NDArray) -> Cuts:
        """Where the rows with these numbers lie."""
        return Cuts(self.starts[rows], self.lengths[rows], self.firsts[rows])


def cut_documents(begins: NDArray, sizes: NDArray, width: int) -> tuple[NDArray, NDArray]:
    """Cut each document into rows of `width` from its beginning; the last row of each has what is left."""
    counts = -(-sizes // width)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each row in its document
    starts = np.repeat(begins, counts) + places * width
    lengths = np.minimum(width, np.repeat(sizes, counts) - places * width)
    return starts, lengths


def shorten(starts: NDArray, lengths: NDArray, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Cut rows in two at random places, so that `SHORT_SHARE` of all rows are such halves."""
    share = SHORT_SHARE / (2 - SHORT_SHARE)  # each cut row makes two short ones
    chosen = (random.random(len(starts)) < share) & (lengths > 1)
    places = (1 + random.random(chosen.sum()) * (lengths[chosen] - 1)).astype(np.int64)
    halves = lengths.copy()
    halves[chosen] = places
    return (
        np.concatenate([starts, starts[chosen] + places]),
        np.concatenate([halves, lengths[chosen] - places]),
    )


DENSE, PAPER, ORDER = range(3)  # each draws numbers of its own


def random_numbers(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Random numbers that depend on nothing else."""
    return np.random.default_rng([seed, epoch, purpose])


def document_begins(shards: Shards, split: Split) -> NDArray:
    """[N + 1] where each document of a split begins in its stream, and where the stream ends."""
    ends, before = [np.zeros(1, np.int64)], 0
    for part in shards.ends(split):
        ends.append(part.astype(np.int64) + before)
        before += int(part[-1]) if len(part) else 0
    return np.concatenate(ends)


def documents_in(starts: NDArray, width: int, begins: NDArray) -> NDArray:
    """How many documents each row of `width` tokens of a ring has, from where they start [R]; `begins` as above."""

    def begun_before(places: NDArray) -> NDArray:
        rounds, rest = np.divmod(places, begins[-1])
        return rounds * (len(begins) - 1) + np.searchsorted(begins[:-1], rest)

    return 1 + begun_before(starts + width) - begun_before(starts + 1)


@dataclass(frozen=True)
class Permutation:
    """A random order of `size` numbers that is computed, not stored: a Feistel network over the next power of four."""

    size: int
    keys: tuple[int, ...]

    @classmethod
    def drawn(cls, size: int, seed: int, epoch: int) -> Permutation:
        """The order of an epoch."""
        keys = random_numbers(seed, epoch, ORDER).integers(1 << 63, size=ROUNDS)
        return cls(size, tuple(map(int, keys)))

    def __call__(self, places: NDArray) -> NDArray:
        """The numbers at these places of the order."""
        numbers = self.mixed(places.astype(np.uint64))
        while (is_beyond := numbers >= self.size).any():  # walk on until back in range: still one-to-one
            numbers[is_beyond] = self.mixed(numbers[is_beyond])
        return numbers.astype(np.int64)

    def mixed(self, numbers: NDArray) -> NDArray:
        """The network: each round scrambles one half of the bits by the other."""
        bits = np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))
        mask = np.uint64((1 << int(bits)) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self.keys:
            left, right = right, left ^ (scrambled(right + np.uint64(key)) & mask)
        return (left << bits) | right


ROUNDS = 6


def scrambled(numbers: NDArray) -> NDArray:
    """Numbers [uint64] with every bit depending on all others (the finisher of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
