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
from electra.data.loader import BatchLoader, DataConfig
from electra.data.packing import Form
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
    dense: float
    dense_whole_words: float
    paper: float

    def __str__(self) -> str:
        return (
            f"length {self.length}, batch {self.batch_size}, one core, million tokens/s: dense {self.dense:.1f}, "
            f"dense with whole words {self.dense_whole_words:.1f}, paper {self.paper:.1f}"
        )


def main(settings: Settings) -> Result:
    """Measure each form on one core."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return Result(
        length=settings.length,
        batch_size=settings.batch_size,
        dense=speed(settings, "dense"),
        dense_whole_words=speed(settings, "dense", whole_word_masking=True),
        paper=speed(settings, "paper"),
    )


def speed(settings: Settings, form: Form, whole_word_masking: bool = False) -> float:
    """Million tokens per second, after an epoch's first batches have warmed the cache."""
    config = DataConfig(
        length=settings.length, batch_size=settings.batch_size, form=form, whole_word_masking=whole_word_masking
    )
    batches = iter(BatchLoader(open_shards(settings.shards), config))
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
