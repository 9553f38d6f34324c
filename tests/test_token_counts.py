"""Frequencies of tokens, and vectors from the co-occurrence of pairs."""

import torch

from electra.config import build_config
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.pretraining import token_counts
from electra.pretraining.token_counts import cooccurrence_vectors, unigram_frequencies


def test_unigram_frequencies_are_sampled_from_all_shards(tmp_path, monkeypatch):
    for number, word in enumerate("ab"):
        (tmp_path / f"{number}.txt").write_text(f"{word} " * 9)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
    paths = {"corpus": f"{tmp_path}/?.txt", "tokenizer": tmp_path / "vocab.txt", "output": tmp_path / "shards"}
    shard(build_config(ShardConfig, **paths, shard_megabytes=1e-5, validation_fraction=0, workers=1))
    monkeypatch.setattr(token_counts, "UNIGRAM_TOKENS", 10)  # half of the text
    frequencies = unigram_frequencies(open_shards(tmp_path / "shards"), torch.device("cpu"))
    assert frequencies.tolist() == [0, 0, 0, 0, 0, 0.5, 0.5]


def test_cooccurrence_vectors_are_alike_for_tokens_with_the_same_neighbours(tmp_path):
    words = ["red", "blue", "car", "bus", "two", "four", "cats", "dogs"]
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "unused"]) + "\n"
    )
    lines = ["red car", "red bus", "blue car", "blue bus", "two cats", "two dogs", "four cats", "four dogs"]
    (tmp_path / "text.txt").write_text("\n\n".join(lines * 5))
    paths = {"corpus": f"{tmp_path}/text.txt", "tokenizer": tmp_path / "vocab.txt", "output": tmp_path / "shards"}
    shard(build_config(ShardConfig, **paths, validation_fraction=0, workers=1))
    vectors = cooccurrence_vectors(open_shards(tmp_path / "shards"), width=4)
    assert not vectors[[0, 1, 2, 3, 4, 13]].any()  # special tokens, and one that is not in the text
    unit = torch.nn.functional.normalize(vectors[5:13], dim=1)
    similarity = dict(zip(words, unit @ unit[words.index("car")], strict=True))
    assert similarity["bus"] > 0.9
    assert max(similarity["cats"], similarity["dogs"], similarity["two"]) < 0.5
