"""Shards of made-up words, for benchmarks that are given no text."""

from itertools import islice, product
from pathlib import Path

import numpy as np

from electra.config import build
from electra.data.prepare import ShardConfig, shard
from electra.data.tokenizer import SPECIAL_TOKENS, Vocabulary

WORDS = 1_000_000  # of the text


def made_shards(folder: Path) -> Path:
    """Shards of made-up words: common ones and rare ones, in documents of some hundred."""
    letters = [first + second for first, second in product("bcdfghjklmnprstvwz", "aeiou")]
    words = [
        "".join(syllables) for syllables in islice(product(letters, repeat=3), Vocabulary.size - len(SPECIAL_TOKENS))
    ]
    draw = np.random.default_rng(0)
    chances = 1 / (10 + np.arange(len(words)))
    text = np.array(words)[draw.choice(len(words), WORDS, p=chances / chances.sum())]
    ends = np.cumsum(draw.lognormal(np.log(300), 0.8, WORDS // 200).astype(int) + 5)
    documents = np.split(text, ends[ends < WORDS])
    (folder / "text.txt").write_text("\n\n".join(map(" ".join, documents)))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS.values(), *words]) + "\n")
    source = {"corpus": str(folder / "text.txt"), "tokenizer": folder / "vocab.txt", "workers": 1}
    shard(build(ShardConfig, **source, output=folder / "shards", validation_fraction=0.05))
    return folder / "shards"
