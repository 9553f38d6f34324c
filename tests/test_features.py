"""Features: the tokenizer's own ids, cut like the library cuts; batches of few shapes that see every row once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from electra.data.tokenizer import load_tokenizer
from electra.finetuning.features import Chosen, cached_features, choose, epoch, make_features, room
from electra.finetuning.tasks import Examples, Task

TASK = Task(
    name="made", kind="classification", text="a", label="y", labels=("0", "1"), metrics=("accuracy",), splits={}
)
TEXTS = ["the cat sat .", "the big red dog ran in the small house .", "bird"]
PAIRS = ["the dog ran .", "a", "the big bird flew over the red tree and the cat ."]


@pytest.fixture
def tokenizer(shards):
    return load_tokenizer(shards / "tokenizer")


def everything(features, length: int):
    """Token ids, mask and segments of all rows."""
    rows = torch.arange(len(features))
    return features.inputs(Chosen(rows, torch.ones(len(rows)), length), pad_id=0)


@pytest.mark.parametrize("pairs", [None, PAIRS])
@pytest.mark.parametrize("length", [8, 9, 12, 32])
def test_rows_are_what_the_library_makes_of_texts_and_pairs(tokenizer, pairs, length):
    features = make_features(TASK, Examples(texts=TEXTS, pairs=pairs), tokenizer, length)
    input_ids, attention_mask, segment_ids = everything(features, length)
    tokenizer.library.enable_truncation(length, strategy="longest_first")
    inputs = list(zip(TEXTS, pairs, strict=True)) if pairs else TEXTS
    for row, theirs in enumerate(tokenizer.library.encode_batch(inputs)):
        kept = attention_mask[row]
        assert input_ids[row][kept].tolist() == theirs.ids
        assert segment_ids[row][kept].tolist() == theirs.type_ids
        assert not input_ids[row][~kept].any()
    tokenizer.library.no_truncation()


def test_rows_that_were_cut_are_counted(tokenizer):
    assert int(make_features(TASK, Examples(texts=TEXTS), tokenizer, 8).truncated) == 1
    assert int(make_features(TASK, Examples(texts=TEXTS), tokenizer, 32).truncated) == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_the_longer_text_is_cut_first(first, second, most):
    a, b = room([first, second], most)
    assert a <= first
    assert b <= second
    assert a + b == min(most, first + second)
    if a < first:
        assert a >= b - 1  # never shorter than the other that was left longer
    if b < second:
        assert b >= a - 1


def test_scores_are_learnt_scaled(tokenizer):
    task = Task(name="sts", kind="regression", text="a", label="y", metrics=("pearson",), splits={}, scale=5.0)
    examples = Examples(texts=TEXTS, labels=np.array([0, 2.5, 5], np.float32))
    assert make_features(task, examples, tokenizer, 16).labels.tolist() == [0, 0.5, 1]


def test_texts_are_tokenised_once(tokenizer, tmp_path, monkeypatch):
    examples = Examples(texts=TEXTS, labels=np.array([0, 1, 1]))
    first = cached_features(TASK, examples, tokenizer, 16, tmp_path)
    monkeypatch.setattr("electra.finetuning.features.make_features", None)  # would fail
    again = cached_features(TASK, examples, tokenizer, 16, tmp_path)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in vars(first))
    relabelled, paired = replace(examples, labels=np.array([0, 1, 0])), replace(examples, pairs=PAIRS)
    for other, length in ((relabelled, 16), (paired, 16), (examples, 8)):
        with pytest.raises(TypeError):
            cached_features(TASK, other, tokenizer, length, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # and no drafts


@pytest.mark.parametrize("rows", [1, 7, 8, 100])
def test_an_epoch_sees_every_row_once(rows):
    lengths = np.random.default_rng(0).integers(3, 100, rows)
    batches = list(epoch(lengths, 8, seed=1, number=0))
    assert len(batches) == -(-rows // 8)
    seen = np.concatenate([numbers[weights == 1] for numbers, weights, _ in batches])
    assert sorted(seen.tolist()) == list(range(rows))
    for numbers, weights, length in batches:
        assert numbers.shape == weights.shape == (8,)
        assert length % 32 == 0
        assert lengths[numbers].max() <= length < lengths[numbers].max() + 32


def test_epochs_differ_and_are_a_function_of_seed_and_number():
    lengths = np.full(64, 10)

    def order(seed, number):
        return np.concatenate([rows for rows, _, _ in epoch(lengths, 8, seed, number)]).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_no_row_is_padded_beyond_the_longest_allowed():
    batch = next(epoch(np.array([40]), 2, seed=0, number=0))
    assert choose(batch, torch.device("cpu"), most=50).length == 50
    assert choose(batch, torch.device("cpu"), most=512).length == 64
