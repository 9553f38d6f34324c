"""How fast batches come from shards in the page cache, packing and shuffling included, on one core.

python benchmarks/batches.py --shards FOLDER [--length 128] [--json]
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from electra.cli import parse
from electra.data.loader import BatchLoader
from electra.data.packing import LoaderConfig, Packing
from electra.data.shards import open_shards


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the speed of batches."""

    shards: Path
    """A folder that `electra shard` wrote."""
    length: int = 128
    """Tokens in a row."""
    batch_size: int = 128
    """Rows in a batch."""
    tokens: int = 200_000_000
    """Tokens to read for each figure."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Result:
    """Million tokens per second."""

    length: int
    batch_size: int
    packed: float
    packed_whole_words: float
    segment_pairs: float

    def __str__(self) -> str:
        return (
            f"length {self.length}, batch {self.batch_size}, one core, million tokens/s: packed {self.packed:.1f}, "
            f"packed with whole words {self.packed_whole_words:.1f}, segment pairs {self.segment_pairs:.1f}"
        )


def main(settings: Settings) -> Result:
    """Measure each packing on one core."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return Result(
        length=settings.length,
        batch_size=settings.batch_size,
        packed=speed(settings, "packed"),
        packed_whole_words=speed(settings, "packed", whole_word_masking=True),
        segment_pairs=speed(settings, "segment-pairs"),
    )


def speed(settings: Settings, packing: Packing, whole_word_masking: bool = False) -> float:
    """Million tokens per second, after an epoch's first batches have warmed the cache."""
    config = LoaderConfig(length=settings.length, batch_size=settings.batch_size, packing=packing)
    batches = iter(BatchLoader(open_shards(settings.shards), config, whole_word_masking=whole_word_masking))
    size = settings.batch_size * settings.length
    for _ in range(settings.tokens // size // 2):
        next(batches)
    began = time.perf_counter()
    for _ in range(settings.tokens // size):
        next(batches)
    return settings.tokens / (time.perf_counter() - began) / 1e6


if __name__ == "__main__":
    given = parse("benchmarks/batches.py", Settings, sys.argv[1:])
    found = main(given)
    print(json.dumps(asdict(found)) if given.json else found)
