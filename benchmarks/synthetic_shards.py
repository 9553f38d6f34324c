"""Shards of synthetic text, for benchmarks without --data."""

from itertools import islice, product
from pathlib import Path

import numpy as np

from electra.config import build_config
from electra.data.prepare import ShardConfig, shard
from electra.data.tokenizer import SPECIAL_TOKENS, Vocabulary

NUM_WORDS = 1_000_000


def write_synthetic_shards(folder: Path) -> Path:
    """Shards of random words with Zipf-like frequencies, in documents of a few hundred words."""
    syllables = [consonant + vowel for consonant, vowel in product("bcdfghjklmnprstvwz", "aeiou")]
    vocabulary = ["".join(word) for word in product(syllables, repeat=3)]
    words = list(islice(vocabulary, Vocabulary.size - len(SPECIAL_TOKENS)))
    random = np.random.default_rng(0)
    frequencies = 1 / (10 + np.arange(len(words)))
    text = np.array(words)[random.choice(len(words), NUM_WORDS, p=frequencies / frequencies.sum())]
    ends = np.cumsum(random.lognormal(np.log(300), 0.8, NUM_WORDS // 200).astype(int) + 5)
    documents = np.split(text, ends[ends < NUM_WORDS])
    (folder / "text.txt").write_text("\n\n".join(map(" ".join, documents)))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS.values(), *words]) + "\n")
    source = {"corpus": str(folder / "text.txt"), "tokenizer": folder / "vocab.txt", "workers": 1}
    shard(build_config(ShardConfig, **source, output=folder / "shards", validation_fraction=0.05))
    return folder / "shards"
