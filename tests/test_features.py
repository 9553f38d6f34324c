"""Features: token ids and truncation equal to the tokenizers library's; batches of few shapes that cover every row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from electra.data.tokenizer import load_tokenizer
from electra.finetuning.features import (
    Outputs,
    RowBatch,
    compute_logits,
    epoch_batches,
    features_cache_key,
    load_or_make_features,
    make_features,
    make_full_batch,
    split_into_windows,
    truncated_lengths,
)
from electra.finetuning.kinds import stack_labels, with_targets
from electra.finetuning.tasks import Examples, Task
from electra.kernels import dispatch

TEXTS = ["the cat sat .", "the big red dog ran in the small house .", "bird"]
TEXTS_B = ["the dog ran .", "a", "the big bird flew over the red tree and the cat ."]


@pytest.fixture
def tokenizer(shards):
    return load_tokenizer(shards / "tokenizer")


@pytest.mark.parametrize("texts_b", [None, TEXTS_B])
@pytest.mark.parametrize("length", [8, 9, 12, 32])
def test_rows_equal_those_of_the_tokenizers_library(tokenizer, texts_b, length):
    features = make_features(Examples(texts=TEXTS, texts_b=texts_b), tokenizer, length)
    batch = RowBatch(torch.arange(3), torch.ones(3), length)
    input_ids, attention_mask, segment_ids = features.collate(batch, pad_id=0)
    tokenizer.library.enable_truncation(length, strategy="longest_first")
    inputs = list(zip(TEXTS, texts_b, strict=True)) if texts_b else TEXTS
    for row, expected in enumerate(tokenizer.library.encode_batch(inputs)):
        mask = attention_mask[row]
        assert input_ids[row][mask].tolist() == expected.ids
        assert segment_ids[row][mask].tolist() == expected.type_ids
        assert not input_ids[row][~mask].any()
    tokenizer.library.no_truncation()


def test_truncated_rows_are_counted(tokenizer):
    assert make_features(Examples(texts=TEXTS), tokenizer, 8).is_truncated.sum() == 1
    assert make_features(Examples(texts=TEXTS), tokenizer, 32).is_truncated.sum() == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_the_longer_text_is_truncated_first(first, second, max_tokens):
    a, b = truncated_lengths([first, second], max_tokens)
    assert a <= first
    assert b <= second
    assert a + b == min(max_tokens, first + second)
    if a < first:
        assert a >= b - 1  # a truncated text is at most one token shorter than the other
    if b < second:
        assert b >= a - 1


def test_regression_targets_are_normalised(tokenizer):
    task = Task(name="sts", kind="regression", text="a", label="y", metrics=("pearson",), splits={}, scale=5.0)
    examples = Examples(texts=TEXTS, labels=np.array([0, 2.5, 5], np.float32))
    assert make_features(with_targets(task, examples), tokenizer, 16).labels.tolist() == [0, 0.5, 1]


def test_features_are_cached_by_texts_labels_and_length(tokenizer, tmp_path):
    def not_called(*_):
        raise TypeError

    not_called.__name__ = make_features.__name__  # by which features are found
    examples = Examples(texts=TEXTS, labels=np.array([0, 1, 1]))
    first = load_or_make_features(make_features, examples, tokenizer, 16, tmp_path)
    again = load_or_make_features(not_called, examples, tokenizer, 16, tmp_path)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in vars(first))
    relabelled, paired = replace(examples, labels=np.array([0, 1, 0])), replace(examples, texts_b=TEXTS_B)
    for other, length in ((relabelled, 16), (paired, 16), (examples, 8)):
        with pytest.raises(TypeError):
            load_or_make_features(not_called, other, tokenizer, length, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # no temporary files remain


def test_damaged_features_are_made_again(tokenizer, tmp_path):
    examples = Examples(texts=TEXTS, labels=np.array([0, 1, 1]))
    first = load_or_make_features(make_features, examples, tokenizer, 16, tmp_path)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-9], b""):
        file.write_bytes(damaged)
        again = load_or_make_features(make_features, examples, tokenizer, 16, tmp_path)
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in vars(first))
        assert file.read_bytes() == content


@pytest.mark.parametrize("rows", [1, 7, 8, 100])
def test_an_epoch_contains_every_row_once(rows):
    lengths = np.random.default_rng(0).integers(3, 100, rows)
    batches = list(epoch_batches(lengths, 8, max_length=128, seed=1, epoch=0))
    assert len(batches) == -(-rows // 8)
    seen = torch.cat([batch.rows[batch.weights == 1] for batch in batches])
    assert sorted(seen.tolist()) == list(range(rows))
    for batch in batches:
        assert batch.rows.shape == batch.weights.shape == (8,)
        assert batch.length % 32 == 0
        longest = lengths[batch.rows.numpy()].max()
        assert longest <= batch.length < longest + 32


def test_row_order_depends_on_seed_and_epoch_only():
    lengths = np.full(64, 10)

    def order(seed, epoch):
        return torch.cat([batch.rows for batch in epoch_batches(lengths, 8, 32, seed, epoch)]).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@pytest.mark.parametrize(("max_length", "padded"), [(50, 50), (512, 64)])
def test_rows_are_padded_to_a_multiple_of_32_but_never_beyond_the_maximum_length(max_length, padded):
    assert make_full_batch(np.array([0]), np.array([40]), np.array([1]), 2, max_length).length == padded


def test_logits_keep_the_order_of_rows(tokenizer):
    features = make_features(Examples(texts=TEXTS), tokenizer, 16)
    logits = compute_logits(lambda ids, mask, segments, targets: mask.sum(1, keepdim=True), features, 2, 16, pad_id=0)
    assert logits[:, 0].tolist() == features.lengths.tolist()


def test_logits_are_computed_without_kernels_that_need_too_much_shared_memory(tokenizer, monkeypatch):
    class OutOfResources(Exception):
        """As of Triton."""

    def model(ids, mask, segments, targets):
        if dispatch.is_kernel_enabled("mlm_head"):
            raise OutOfResources("shared memory")
        return mask.sum(1, keepdim=True)

    monkeypatch.setattr(dispatch, "disabled", set())
    features = make_features(Examples(texts=TEXTS), tokenizer, 16)
    assert compute_logits(model, features, 2, 16, pad_id=0)[:, 0].tolist() == features.lengths.tolist()
    assert dispatch.disabled == {"short_attention", "mlm_head"}


def test_logits_of_tokens_are_those_of_input_ids_in_their_order(tokenizer):
    features = make_features(Examples(texts=TEXTS), tokenizer, 16)
    logits = compute_logits(lambda ids, mask, segments, targets: ids[..., None], features, 2, 16, pad_id=0)
    assert logits[:, 0].tolist() == features.input_ids.tolist()
    rows = Outputs(logits, features).row_logits()
    assert [len(row) for row in rows] == features.lengths.tolist()
    assert {row[0, 0] for row in rows} == {tokenizer.vocabulary.cls_id}


def test_models_get_the_targets_of_their_batch(tokenizer):
    features = make_features(Examples(texts=TEXTS, labels=np.array([2, 0, 1])), tokenizer, 16)
    logits = compute_logits(lambda ids, mask, segments, targets: targets[:, None], features, 2, 16, pad_id=0)
    assert logits[:, 0].tolist() == [2, 0, 1]
    assert (
        make_features(Examples(texts=TEXTS), tokenizer, 16).targets(RowBatch(torch.arange(3), torch.ones(3), 8)) is None
    )


def test_the_loss_of_tokens_ignores_other_rows_of_a_batch(tokenizer, monkeypatch):
    """Padding has probability 0: the loss of the first token of each row is minus its log-softmax."""
    monkeypatch.setattr("electra.finetuning.features.LOSS_ROWS", 2)
    features = make_features(Examples(texts=TEXTS, labels=np.zeros(3, np.int64)), tokenizer, 16)
    outputs = Outputs(np.zeros((len(features.input_ids), 1), np.float32), features)
    losses = outputs.compute_losses(lambda logits, targets: -logits[..., 0].log_softmax(1)[:, 0])
    assert losses.exp().tolist() == pytest.approx(features.lengths.tolist())


def test_rows_of_an_example_count_once(tokenizer):
    features = make_features(Examples(texts=TEXTS), tokenizer, 16)
    assert features.num_examples == 3
    assert replace(features, examples=torch.tensor([0, 0, 1])).num_examples == 2


def test_labels_that_are_lists_stay_lists_and_change_the_cache(tokenizer):
    first, second = (stack_labels([[("cat", 4)], labels], object) for labels in ([], [("dog", 4)]))
    assert first.shape == (2,)
    examples = [Examples(texts=TEXTS[:2], labels=labels) for labels in (first, first.copy(), second)]
    keys = {features_cache_key(make_features, each, tokenizer, 16) for each in examples}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        (0, 9, [(0, 0)]),
        (8, 9, [(0, 8)]),
        (9, 9, [(0, 8), (6, 9)]),
        (14, 9, [(0, 8), (6, 14)]),
        (15, 9, [(0, 8), (6, 14), (12, 15)]),
        (100, 2, [(0, 8), (6, 100)]),  # the rest is truncated later
    ],
)
def test_windows_overlap_by_a_quarter_and_cover_the_text(tokens, count, expected):
    windows = split_into_windows(np.arange(tokens), 8, count)
    assert [list(window) for window in windows] == [list(range(*bounds)) for bounds in expected]


def test_windows_of_a_text_are_the_sequences_of_its_row(tokenizer):
    texts = ["cat", "cat " * 9, "dog " * 100]
    features = make_features(Examples(texts=texts, windows=3), tokenizer, 10)
    assert features.row_sizes()[1].tolist() == [1, 2, 3]
    assert features.lengths.tolist() == [3, 10, 5, 10, 10, 10]
    assert features.is_truncated.sum() == 1
    single = make_features(Examples(texts=texts[:1]), tokenizer, 10)
    batch = make_full_batch(np.array([0, 1]), *features.row_sizes(), 2, 10)
    input_ids, attention_mask, _ = features.collate(batch, pad_id=0)
    assert input_ids.shape == (2, 2, 10)
    assert attention_mask.sum(-1).tolist() == [[3, 1], [10, 5]]  # a missing window is [CLS] alone
    assert input_ids[0, 0, :3].tolist() == single.input_ids.tolist()
