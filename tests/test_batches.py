"""BatchLoader: every token once per epoch, the same rows for any number of ranks and after any resume."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from electra.data import loader as batches_module
from electra.data.loader import BatchLoader, DataConfig, Position, compute_cu_seqlens, prefetched, validation_batches
from electra.data.packing import Permutation, cut_documents, documents_in
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.data.tokenizer import TokenizerConfig, train_tokenizer
from electra.errors import ConfigError, DataError

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = [f"w{number}" for number in range(997)]


def make_shards(folder, documents, validation_fraction=0.0, shard_megabytes=0.001):
    """Shards of documents; a word is its own token."""
    (folder / "text").mkdir()
    for number in range(0, len(documents), 7):
        (folder / "text" / f"{number:04d}.txt").write_text("\n\n".join(documents[number : number + 7]))
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "w", "##x"]) + "\n"
    )
    settings = {"validation_fraction": validation_fraction, "shard_megabytes": shard_megabytes, "workers": 1}
    shard(ShardConfig(corpus=str(folder / "text"), tokenizer=folder / "vocab.txt", output=folder / "s", **settings))
    return open_shards(folder / "s")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Sixty documents of 1 to 60 words over many shards: word number n of the corpus is w(n mod 997)."""
    sizes = [1 + number * 37 % 60 for number in range(60)]
    ends = np.cumsum(sizes)
    documents = [
        " ".join(WORDS[n % 997] for n in range(end - size, end)) for end, size in zip(ends, sizes, strict=True)
    ]
    found = make_shards(tmp_path_factory.mktemp("shards"), documents)
    assert len(found.index.shards) > 4
    return found


def stream_of(shards) -> list[int]:
    return np.concatenate(shards.tokens("train")).tolist()


def take(source: BatchLoader, steps: int) -> list:
    return list(islice(source, steps))


def rows_of(batches) -> list[list[int]]:
    return [row for batch in batches for row in batch.input_ids.tolist()]


def epoch_rows(shards, config, epoch=0) -> list[list[int]]:
    """All rows of one epoch, in the order of training."""
    source = BatchLoader(shards, config, start=Position(epoch=epoch))
    steps = -(-source.packing_of(epoch)[0].rows // config.batch_size)
    return rows_of(take(source, steps))[: source.packing_of(epoch)[0].rows]


def test_dense_rows_hold_every_token_once_per_epoch(shards):
    stream = stream_of(shards)
    width = 15
    for epoch in range(3):
        rows = epoch_rows(shards, DataConfig(length=16, batch_size=4), epoch)
        assert all(row[0] == CLS and len(row) == 16 and PAD not in row for row in rows)
        seen = sorted(token for row in rows for token in row[1:])
        begin = BatchLoader(shards, DataConfig(length=16)).packing_of(epoch)[0].begin
        filled = [stream[(begin + n) % len(stream)] for n in range(len(rows) * width - len(stream))]
        assert len(filled) < width
        assert seen == sorted(stream + filled)


def test_dense_rows_are_the_stream_cut_in_a_row(shards):
    stream = stream_of(shards)
    source = BatchLoader(shards, DataConfig(length=16, batch_size=1), split="train")
    packing = source.packing_of(0)[0]
    ring = stream[packing.begin :] + stream[: packing.begin]
    expected = {tuple(ring[n : n + 15]) for n in range(0, len(ring) - 15, 15)}
    assert expected < {tuple(row[1:]) for row in epoch_rows(shards, DataConfig(length=16, batch_size=1))}


def test_documents_are_numbered_within_a_dense_row(shards):
    batch = next(iter(BatchLoader(shards, DataConfig(length=64, batch_size=8))))
    for ids, documents in zip(batch.input_ids.tolist(), batch.documents.tolist(), strict=True):
        assert documents[0] == 0
        for place in range(1, 64):
            assert documents[place] - documents[place - 1] == (ids[place - 1] == SEP)
    assert batch.documents.max() > 0
    assert batch.attention_mask is None


def test_paper_rows_hold_every_token_once_per_epoch(shards):
    text = sorted(token for token in stream_of(shards) if token != SEP)
    for epoch in range(2):
        rows = epoch_rows(shards, DataConfig(length=16, batch_size=4, form="paper"), epoch)
        assert sorted(token for row in rows for token in row if token > MASK) == text


def test_a_paper_row_is_two_segments_of_one_document(shards):
    batch = next(iter(BatchLoader(shards, DataConfig(length=16, batch_size=200, form="paper"))))
    singles = 0
    for ids, mask, segments in zip(
        batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.segment_ids.tolist(), strict=True
    ):
        size = sum(mask)
        assert mask == [True] * size + [False] * (16 - size)
        assert ids[size:] == [PAD] * (16 - size)
        assert ids[0] == CLS
        assert ids[size - 1] == SEP
        first = ids.index(SEP)
        assert segments == [0] * (first + 1) + [1] * (size - first - 1) + [0] * (16 - size)
        words = [token for token in ids if token > MASK]
        assert np.all(np.diff(words) % 997 == 1)  # B goes on where A ends
        singles += first == size - 1
    assert 5 < singles < 60


def test_one_paper_row_in_ten_is_single_and_one_in_twenty_short(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[:800])] * 300, shard_megabytes=1)
    rows = BatchLoader(shards, DataConfig(length=13, form="paper", seed=3)).packing_of(0)[0]
    is_full = rows.lengths == 10  # 800 words are 80 full rows
    assert 0.04 < 1 - is_full.mean() < 0.06
    assert 0.09 < (rows.firsts == rows.lengths)[is_full].mean() < 0.11


def counted(begins: list[int], start: int, width: int) -> int:
    """How many documents `width` tokens from `start` on belong to, counted one by one."""
    places = [divmod(place, begins[-1]) for place in range(start, start + width)]
    return len({(round, sum(begin <= place for begin in begins)) for round, place in places})


@pytest.mark.parametrize("begins", [[0, 9], [0, 1, 2, 9], [0, 4, 5, 6, 12], [0, 3, 4, 5]])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 13])
def test_documents_of_rows_are_counted_around_the_ring(begins, width):
    found = documents_in(np.arange(begins[-1]), width, np.array(begins))
    assert found.tolist() == [counted(begins, start, width) for start in range(begins[-1])]


@pytest.mark.parametrize("pieces", [1, 2])
def test_listed_documents_are_those_of_the_rows_in_lists_of_few_lengths(tmp_path, pieces):
    shards = make_shards(tmp_path, [" ".join(WORDS[: 1 + number % 9]) for number in range(300)], shard_megabytes=1)
    config = DataConfig(length=16, batch_size=8, seed=1)
    batches = islice(BatchLoader(shards, config, lists_documents=True), 40)
    listed = [piece for batch in batches for piece in batch.pieces(pieces)]
    for batch in listed:
        assert batch.starts.unique().tolist() == compute_cu_seqlens(batch.documents).tolist()
    assert {len(batch.starts) for batch in listed} <= {1 + 8 * size for size in (1, 2, 4, 8)}
    assert next(iter(BatchLoader(shards, config))).starts is None


def test_tokens_that_see_whole_rows_have_no_documents(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[:5])] * 50, shard_megabytes=1)
    apart, together = (
        next(iter(BatchLoader(shards, DataConfig(length=16, cross_document_attention=each)))) for each in (False, True)
    )
    assert torch.equal(apart.input_ids, together.input_ids)
    assert apart.documents.amax() > 0
    assert together.documents is None
    with pytest.raises(ConfigError, match="cross_document_attention is for dense rows"):
        DataConfig(form="paper", cross_document_attention=True)


def test_documents_are_cut_from_their_beginning():
    starts, lengths = cut_documents(np.array([0, 8, 10]), np.array([7, 1, 3]), width=3)
    assert starts.tolist() == [0, 3, 6, 8, 10]
    assert lengths.tolist() == [3, 3, 1, 1, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 9), st.integers(0, 9))
def test_an_order_has_every_number_once(size, seed, epoch):
    order = Permutation.drawn(size, seed, epoch)
    assert sorted(order(np.arange(size)).tolist()) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(Permutation.drawn(50, seed, epoch)(np.arange(50))) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("form", ["dense", "paper"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_give_the_batch_of_one(shards, form, ranks):
    config = DataConfig(length=24, batch_size=6, form=form)
    alone = take(BatchLoader(shards, config), 40)  # over more than one epoch
    parts = [take(BatchLoader(shards, config, rank=rank, ranks=ranks), 40) for rank in range(ranks)]
    for whole, *shares in zip(alone, *parts, strict=True):
        assert torch.cat([share.input_ids for share in shares]).equal(whole.input_ids)
        assert torch.cat([share.rows for share in shares]).tolist() == list(range(6))
        assert {int(share.step) for share in shares} == {int(whole.step)}


@pytest.mark.parametrize("form", ["dense", "paper"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resumed_after_any_step_batches_go_on_as_unbroken(shards, form, ranks, monkeypatch):
    config = DataConfig(length=24, batch_size=6, form=form)
    monkeypatch.setattr(batches_module, "TOKENS_AT_ONCE", 6 * 24 * 4)  # several chunks
    for rank in range(ranks):
        unbroken = BatchLoader(shards, config, rank=rank, ranks=ranks)
        states, expected = [], []
        for batch in islice(unbroken, 30):
            expected.append(batch.input_ids.tolist())
            states.append(json.loads(json.dumps(unbroken.state())))
        for step, state in enumerate(states[:-1]):
            resumed = BatchLoader(shards, config, rank=rank, ranks=ranks)
            resumed.restore(state)
            batch = next(iter(resumed))
            assert batch.input_ids.tolist() == expected[step + 1]
            assert int(batch.step) == step + 1
    assert states[-1]["epoch"] > 0


def test_a_resume_may_have_another_number_of_ranks(shards):
    config = DataConfig(length=24, batch_size=6)
    unbroken = BatchLoader(shards, config)
    take(unbroken, 5)
    expected = next(iter(BatchLoader(shards, config, start=unbroken.position))).input_ids
    halves = [BatchLoader(shards, config, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.restore(unbroken.state())
    assert torch.cat([next(iter(half)).input_ids for half in halves]).equal(expected)


def test_a_position_in_another_order_is_refused(shards):
    state = BatchLoader(shards, DataConfig(length=24)).state()
    with pytest.raises(ConfigError, match="these batches have length 48, the saved position is one with length 24"):
        BatchLoader(shards, DataConfig(length=48)).restore(state)


def test_a_longer_length_needs_no_other_shards(shards):
    for length in (8, 128, 3000):  # the last is longer than the corpus
        batch = next(iter(BatchLoader(shards, DataConfig(length=length, batch_size=2))))
        assert batch.input_ids.shape == (2, length)


@pytest.mark.parametrize("form", ["dense", "paper"])
@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_resident_tokens_give_equal_rows(shards, device, form):
    config = {"length": 24, "batch_size": 6, "form": form, "whole_word_masking": True}
    expected = take(BatchLoader(shards, DataConfig(**config)), 30)
    for is_resident in (False, True):
        found = take(BatchLoader(shards, DataConfig(**config, data_on_gpu=is_resident), device=device), 30)
        for one, other in zip(expected, found, strict=True):
            assert one.input_ids.equal(other.input_ids.cpu())
            assert one.is_continuation.equal(other.is_continuation.cpu())


def test_large_ids_stay_positive(shards):
    windows = torch.tensor([[-1, 40_000 - 65_536]], dtype=torch.int16)
    assert batches_module.as_ids(windows).tolist() == [[65_535, 40_000]]


def test_continuations_are_marked_when_asked(tmp_path):
    shards = make_shards(tmp_path, ["wx w5 wxx"])
    batch = next(iter(BatchLoader(shards, DataConfig(length=8, batch_size=1, form="paper", whole_word_masking=True))))
    tokens = [shards.tokenizer.library.id_to_token(token) for token in batch.input_ids[0].tolist()]
    assert [token == "##x" for token in tokens] == batch.is_continuation[0].tolist()
    assert batch.is_continuation.sum() > 0


def test_validation_rows_come_in_the_order_of_the_text(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[n : n + 9]) for n in range(200)], validation_fraction=0.3)
    stream = np.concatenate(shards.tokens("validation")).tolist()
    for ranks in (1, 2):
        config = DataConfig(length=9, batch_size=4)
        parts = [list(validation_batches(shards, config, rank=rank, ranks=ranks)) for rank in range(ranks)]
        rows = [row for shares in zip(*parts, strict=True) for row in rows_of(shares)]
        assert len(rows) == -(-len(stream) // 8) // 4 * 4
        assert [token for row in rows for token in row[1:]] == stream[: len(rows) * 8]


def test_shards_without_validation_text_say_so(shards):
    with pytest.raises(DataError, match="has no validation tokens; make shards with another --validation-fraction"):
        next(validation_batches(shards, DataConfig()))


def test_micro_batches_keep_their_row_numbers(shards):
    batch = next(iter(BatchLoader(shards, DataConfig(length=16, batch_size=6), rank=1, ranks=1 + 1)))
    assert [part.rows.tolist() for part in batch.pieces(3)] == [[3], [4], [5]]
    assert torch.cat([part.input_ids for part in batch.pieces(3)]).equal(batch.input_ids)
    with pytest.raises(ConfigError, match="3 rows do not divide into 2 micro-batches"):
        batch.pieces(2)


def test_settings_that_cannot_be_are_refused(shards):
    with pytest.raises(ConfigError, match="length is 4; a row needs at least 5"):
        DataConfig(length=4)
    with pytest.raises(ConfigError, match="batch_size 5 does not divide among 2 ranks"):
        BatchLoader(shards, DataConfig(batch_size=5), ranks=2)


def test_an_error_while_reading_ahead_is_raised():
    def items():
        yield 1
        raise OSError("gone")

    found = prefetched(items())
    assert next(found) == 1
    with pytest.raises(OSError, match="gone"):
        next(found)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("Où est l'été? Déjà vu, naïve Zoë.", {"strip_accents": False}),
        ("东西南北在哪里。我不知道, 你呢?", {}),
    ],
    ids=["accents", "chinese"],
)
def test_from_text_to_decoded_batches(tmp_path, text, settings):
    (tmp_path / "a.txt").write_text("\n\n".join([text] * 50))
    learning = {"corpus": str(tmp_path), "output": tmp_path / "vocab", "vocab_size": 120}
    train_tokenizer(TokenizerConfig(**learning, **settings))
    made = {"corpus": str(tmp_path / "a.txt"), "tokenizer": tmp_path / "vocab", "output": tmp_path / "s"}
    assert shard(ShardConfig(**made, workers=1)).documents["train"] == 50
    shards = open_shards(tmp_path / "s")
    assert shards.index.total("unknown") == 0
    batch = next(iter(BatchLoader(shards, DataConfig(length=100, batch_size=4))))
    decoded = shards.tokenizer.library.decode(batch.input_ids[0].tolist(), skip_special_tokens=False)
    assert "".join(text.lower().split()) in "".join(decoded.split())
