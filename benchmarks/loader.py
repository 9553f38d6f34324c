"""Speed of the data loader: batches from shards in the page cache, including packing and shuffling, on one core.

python benchmarks/loader.py --shards FOLDER [--length 128] [--json]
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from electra.cli import parse_config
from electra.data.loader import BatchLoader
from electra.data.packing import LoaderConfig, Packing
from electra.data.shards import open_shards


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the speed of the data loader."""

    shards: Path
    """Folder written by electra shard."""
    length: int = 128
    """Tokens per row."""
    batch_size: int = 128
    """Rows per batch."""
    tokens: int = 200_000_000
    """Tokens to read for each measurement."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Result:
    """Million tokens per second by packing."""

    length: int
    batch_size: int
    packed: float
    packed_whole_words: float
    segment_pairs: float

    def __str__(self) -> str:
        return (
            f"length {self.length}, batch size {self.batch_size}, one core, million tokens/s: "
            f"packed {self.packed:.1f}, packed with whole words {self.packed_whole_words:.1f}, "
            f"segment pairs {self.segment_pairs:.1f}"
        )


def main(settings: Settings) -> Result:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return Result(
        length=settings.length,
        batch_size=settings.batch_size,
        packed=million_tokens_per_second(settings, "packed"),
        packed_whole_words=million_tokens_per_second(settings, "packed", whole_word_masking=True),
        segment_pairs=million_tokens_per_second(settings, "segment-pairs"),
    )


def million_tokens_per_second(settings: Settings, packing: Packing, whole_word_masking: bool = False) -> float:
    config = LoaderConfig(length=settings.length, batch_size=settings.batch_size, packing=packing)
    batches = iter(BatchLoader(open_shards(settings.shards), config, whole_word_masking=whole_word_masking))
    count = settings.tokens // (settings.batch_size * settings.length)
    for _ in range(count // 2):  # warm up the page cache
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return settings.tokens / (time.perf_counter() - start) / 1e6


if __name__ == "__main__":
    settings = parse_config("benchmarks/loader.py", Settings, sys.argv[1:])
    result = main(settings)
    print(json.dumps(asdict(result)) if settings.json else result)
