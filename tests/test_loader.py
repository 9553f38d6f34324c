"""BatchLoader: every token once per epoch; the same rows for any number of ranks and after any resume."""

import json
import threading
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from electra.config import build_config
from electra.data import loader
from electra.data.loader import BatchLoader, LoaderPosition, compute_cu_seqlens, prefetch_in_thread, validation_batches
from electra.data.packing import LoaderConfig, Permutation, count_documents_in_spans, split_documents_into_rows
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.data.tokenizer import Vocabulary
from electra.data.train_tokenizer import TokenizerConfig, train_tokenizer
from electra.errors import ConfigError, DataError
from electra.random import Purpose, row_keys

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = [f"w{number}" for number in range(997)]


def make_shards(folder, documents, validation_fraction=0.0, shard_megabytes=0.001):
    """Shards of documents in which every word is one token."""
    (folder / "text").mkdir()
    for number in range(0, len(documents), 7):
        (folder / "text" / f"{number:04d}.txt").write_text("\n\n".join(documents[number : number + 7]))
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "w", "##x"]) + "\n"
    )
    settings = {"validation_fraction": validation_fraction, "shard_megabytes": shard_megabytes, "workers": 1}
    shard(
        build_config(
            ShardConfig, corpus=str(folder / "text"), tokenizer=folder / "vocab.txt", output=folder / "s", **settings
        )
    )
    return open_shards(folder / "s")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Sixty documents of 1 to 60 words in several shards: word n of the corpus is w(n mod 997)."""
    sizes = [1 + number * 37 % 60 for number in range(60)]
    ends = np.cumsum(sizes)
    documents = [
        " ".join(WORDS[n % 997] for n in range(end - size, end)) for end, size in zip(ends, sizes, strict=True)
    ]
    shards = make_shards(tmp_path_factory.mktemp("shards"), documents)
    assert len(shards.index.shards) > 4
    return shards


def train_tokens(shards) -> list[int]:
    return np.concatenate(shards.tokens_by_shard("train")).tolist()


def all_rows(batches) -> list[list[int]]:
    return [row for batch in batches for row in batch.input_ids.tolist()]


def epoch_rows(shards, config, epoch=0) -> list[list[int]]:
    """All rows of one epoch, in training order."""
    source = BatchLoader(shards, config)
    source.position = LoaderPosition(epoch=epoch)
    num_rows = source.epoch(epoch).num_rows
    return all_rows(islice(source, -(-num_rows // config.batch_size)))[:num_rows]


def test_packed_rows_hold_every_token_once_per_epoch(shards):
    tokens = train_tokens(shards)
    width = 15
    for epoch in range(3):
        rows = epoch_rows(shards, LoaderConfig(length=16, batch_size=4), epoch)
        assert all(row[0] == CLS and len(row) == 16 and PAD not in row for row in rows)
        offset = BatchLoader(shards, LoaderConfig(length=16)).epoch(epoch).offset
        repeated = [tokens[(offset + n) % len(tokens)] for n in range(len(rows) * width - len(tokens))]
        assert len(repeated) < width
        assert sorted(token for row in rows for token in row[1:]) == sorted(tokens + repeated)


def test_packed_rows_split_the_ring_of_tokens_from_the_offset_on(shards):
    tokens = train_tokens(shards)
    config = LoaderConfig(length=16, batch_size=1)
    offset = BatchLoader(shards, config).epoch(0).offset
    ring = tokens[offset:] + tokens[:offset]
    expected = {tuple(ring[n : n + 15]) for n in range(0, len(ring) - 15, 15)}
    assert expected < {tuple(row[1:]) for row in epoch_rows(shards, config)}


def test_document_ids_increase_after_each_sep_of_a_packed_row(shards):
    batch = next(iter(BatchLoader(shards, LoaderConfig(length=64, batch_size=8))))
    for ids, documents in zip(batch.input_ids.tolist(), batch.document_ids.tolist(), strict=True):
        assert documents[0] == 0
        for position in range(1, 64):
            assert documents[position] - documents[position - 1] == (ids[position - 1] == SEP)
    assert batch.document_ids.max() > 0
    assert batch.attention_mask is None


def test_segment_pairs_hold_every_token_once_per_epoch(shards):
    words = sorted(token for token in train_tokens(shards) if token != SEP)
    for epoch in range(2):
        rows = epoch_rows(shards, LoaderConfig(length=16, batch_size=4, packing="segment-pairs"), epoch)
        assert sorted(token for row in rows for token in row if token > MASK) == words


def test_a_segment_pair_is_two_consecutive_segments_of_one_document(shards):
    batch = next(iter(BatchLoader(shards, LoaderConfig(length=16, batch_size=200, packing="segment-pairs"))))
    single_segments = 0
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
        assert np.all(np.diff(words) % 997 == 1)
        single_segments += first == size - 1
    assert 5 < single_segments < 60


def test_one_row_in_ten_has_a_single_segment_and_one_in_twenty_is_short(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[:800])] * 300, shard_megabytes=1)
    rows = BatchLoader(shards, LoaderConfig(length=13, packing="segment-pairs"), seed=3).epoch(0)
    is_full = rows.lengths == 10  # 800 words are 80 full rows
    assert 0.04 < 1 - is_full.mean() < 0.06
    assert 0.09 < (rows.first_lengths == rows.lengths)[is_full].mean() < 0.11


def count_one_by_one(document_starts: list[int], start: int, width: int) -> int:
    """The documents that the `width` ring positions from `start` on belong to."""
    positions = [divmod(position, document_starts[-1]) for position in range(start, start + width)]
    return len({(round, sum(begin <= position for begin in document_starts)) for round, position in positions})


@pytest.mark.parametrize("document_starts", [[0, 9], [0, 1, 2, 9], [0, 4, 5, 6, 12], [0, 3, 4, 5]])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 13])
def test_documents_in_a_row_are_counted_around_the_ring(document_starts, width):
    counts = count_documents_in_spans(np.arange(document_starts[-1]), width, np.array(document_starts))
    assert counts.tolist() == [count_one_by_one(document_starts, start, width) for start in range(document_starts[-1])]


@pytest.mark.parametrize("count", [1, 2])
def test_cu_seqlens_are_the_document_boundaries_in_few_shapes(tmp_path, count):
    shards = make_shards(tmp_path, [" ".join(WORDS[: 1 + number % 9]) for number in range(300)], shard_megabytes=1)
    config = LoaderConfig(length=16, batch_size=8)
    batches = islice(BatchLoader(shards, config, seed=1, with_cu_seqlens=True), 40)
    micro_batches = [part for batch in batches for part in batch.micro_batches(count)]
    for batch in micro_batches:
        assert batch.cu_seqlens.unique().tolist() == compute_cu_seqlens(batch.document_ids).tolist()
    assert {len(batch.cu_seqlens) for batch in micro_batches} <= {1 + 8 * size for size in (1, 2, 4, 8)}
    assert next(iter(BatchLoader(shards, config))).cu_seqlens is None


def test_cross_document_attention_leaves_out_document_ids(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[:5])] * 50, shard_megabytes=1)
    separate, joint = (
        next(iter(BatchLoader(shards, LoaderConfig(length=16, cross_document_attention=value))))
        for value in (False, True)
    )
    assert torch.equal(separate.input_ids, joint.input_ids)
    assert separate.document_ids.amax() > 0
    assert joint.document_ids is None


def test_documents_are_split_from_their_beginning():
    starts, lengths = split_documents_into_rows(np.array([0, 8, 10]), np.array([7, 1, 3]), width=3)
    assert starts.tolist() == [0, 3, 6, 8, 10]
    assert lengths.tolist() == [3, 3, 1, 1, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 9), st.integers(0, 9))
def test_a_permutation_has_every_index_once(size, seed, epoch):
    permutation = Permutation.for_epoch(size, seed, epoch)
    assert sorted(permutation(np.arange(size)).tolist()) == list(range(size))


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(Permutation.for_epoch(50, seed, epoch)(np.arange(50))) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def example_rows(token_ids, sentence_end_ids):
    """Of each row the examples, and of each example its ids and segments."""
    special = {"pad_id": PAD, "unk_id": UNK, "cls_id": CLS, "sep_id": SEP, "mask_id": MASK}
    vocabulary = Vocabulary(size=60, sentence_end_ids=sentence_end_ids, **special)
    keys = row_keys(0, torch.zeros(len(token_ids), dtype=torch.long), torch.arange(len(token_ids)), Purpose.SPLITS)
    rows = loader.build_example_rows(token_ids, keys, vocabulary)
    counts = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in rows["document_ids"]]
    ids, segments = (
        [row.split(sizes) for row, sizes in zip(rows[name], counts, strict=True)]
        for name in ("input_ids", "segment_ids")
    )
    return [
        [(one.tolist(), other.tolist()) for one, other in zip(*row, strict=True)]
        for row in zip(ids, segments, strict=True)
    ]


def test_rows_of_examples_split_text_at_sentence_ends(shards):
    random, stop = np.random.default_rng(0), 7
    tokens = torch.from_numpy(random.choice([SEP, stop, *range(10, 60)], size=(300, 31), p=[0.02, 0.18, *[0.016] * 50]))
    kinds = Counter()
    for row, examples in zip(tokens.tolist(), example_rows(tokens, (stop,)), strict=True):
        words = [token for ids, _ in examples for token in ids if token > MASK]
        assert words == [token for token in row if token > MASK][: len(words)]
        assert sum(len(ids) for ids, _ in examples) == 32
        for number, (ids, segments) in enumerate(examples):
            if number == len(examples) - 1 and len(ids) < 3:  # no text: only if a document ends right before
                last_word = [index for index, token in enumerate(row) if token > MASK][len(words) - 1]
                assert row[last_word + 1] == SEP
                continue
            assert (ids[0], ids[-1], ids[1:].count(CLS)) == (CLS, SEP, 0)
            first = ids.index(SEP)
            assert segments == [0] * (first + 1) + [1] * (len(ids) - first - 1)
            assert ids[first:].count(SEP) == (1 if first == len(ids) - 1 else 2)
            if first < len(ids) - 1:
                assert ids[first - 1] == stop
                assert ids[first + 1] != SEP
            kinds[len(examples) == 1, first < len(ids) - 1] += 1
            kinds["whole sentence"] += number > 0 and ids[-2] == stop
    assert min(kinds.values()) > 20
    assert len(kinds) == 5


def test_rows_without_sentence_ends_are_one_example_per_document(shards):
    tokens = torch.tensor([[10, 11, SEP, 12, 13, 14], [20, 21, 22, 23, 24, 25]])
    ids = [[ids for ids, _ in row] for row in example_rows(tokens, ())]
    assert ids == [[[CLS, 10, 11, SEP], [CLS, 12, SEP]], [[CLS, 20, 21, 22, 23, 24, SEP]]]


def test_row_order_of_seed_0_is_fixed():
    assert Permutation.for_epoch(10, seed=0, epoch=0)(np.arange(10)).tolist() == [9, 3, 4, 7, 2, 5, 8, 0, 6, 1]


@pytest.mark.parametrize("packing", ["packed", "segment-pairs", "examples"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_batches_make_up_the_global_batch(shards, packing, world_size):
    config = LoaderConfig(length=24, batch_size=6, packing=packing)
    single = islice(BatchLoader(shards, config), 40)  # more than one epoch
    ranks = [islice(BatchLoader(shards, config, rank=rank, world_size=world_size), 40) for rank in range(world_size)]
    for whole, *parts in zip(single, *ranks, strict=True):
        assert torch.cat([part.input_ids for part in parts]).equal(whole.input_ids)
        assert torch.cat([part.row_ids for part in parts]).tolist() == list(range(6))
        assert {int(part.step) for part in parts} == {int(whole.step)}


@pytest.mark.parametrize("packing", ["packed", "segment-pairs", "examples"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_loader_continues_as_an_unbroken_one(shards, packing, world_size, monkeypatch):
    config = LoaderConfig(length=24, batch_size=6, packing=packing)
    monkeypatch.setattr(loader, "TOKENS_PER_READ", 6 * 24 * 4)  # several chunks
    for rank in range(world_size):
        unbroken = BatchLoader(shards, config, rank=rank, world_size=world_size)
        states, expected = [], []
        for batch in islice(unbroken, 30):
            expected.append(batch.input_ids.tolist())
            states.append(json.loads(json.dumps(unbroken.state_dict())))
        for step, state in enumerate(states[:-1]):
            resumed = BatchLoader(shards, config, rank=rank, world_size=world_size)
            resumed.load_state_dict(state)
            batch = next(iter(resumed))
            assert batch.input_ids.tolist() == expected[step + 1]
            assert int(batch.step) == step + 1
    assert states[-1]["epoch"] > 0


def test_a_resume_may_have_another_number_of_ranks(shards):
    config = LoaderConfig(length=24, batch_size=6)
    single = BatchLoader(shards, config)
    list(islice(single, 5))
    halves = [BatchLoader(shards, config, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(single.state_dict())
    expected = next(iter(single)).input_ids
    assert torch.cat([next(iter(half)).input_ids for half in halves]).equal(expected)


def test_a_position_in_another_row_order_is_an_error(shards):
    state = BatchLoader(shards, LoaderConfig(length=24)).state_dict()
    with pytest.raises(ConfigError, match="resume with length 24"):
        BatchLoader(shards, LoaderConfig(length=48)).load_state_dict(state)
    with pytest.raises(ConfigError, match="resume with seed 0"):
        BatchLoader(shards, LoaderConfig(length=24), seed=1).load_state_dict(state)


@pytest.mark.parametrize("length", [8, 128, 3000])  # the last is longer than the corpus
def test_the_same_shards_serve_any_length(shards, length):
    batch = next(iter(BatchLoader(shards, LoaderConfig(length=length, batch_size=2))))
    assert batch.input_ids.shape == (2, length)


@pytest.mark.parametrize("packing", ["packed", "segment-pairs", "examples"])
@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_tokens_on_the_device_give_equal_rows(shards, device, packing):
    config = {"length": 24, "batch_size": 6, "packing": packing}
    expected = list(islice(BatchLoader(shards, LoaderConfig(**config), whole_word_masking=True), 30))
    for data_on_gpu in (False, True):
        settings = LoaderConfig(**config, data_on_gpu=data_on_gpu)
        batches = islice(BatchLoader(shards, settings, whole_word_masking=True, device=device), 30)
        for one, other in zip(expected, batches, strict=True):
            assert one.input_ids.equal(other.input_ids.cpu())
            assert one.is_continuation.equal(other.is_continuation.cpu())


def test_large_ids_stay_positive():
    tokens = torch.tensor([[-1, 40_000 - 65_536]], dtype=torch.int16)
    assert loader.to_int64_ids(tokens).tolist() == [[65_535, 40_000]]


def test_whole_word_masking_marks_continuations(tmp_path):
    shards = make_shards(tmp_path, ["wx w5 wxx"])
    config = LoaderConfig(length=8, batch_size=1, packing="segment-pairs")
    batch = next(iter(BatchLoader(shards, config, whole_word_masking=True)))
    tokens = [shards.tokenizer.library.id_to_token(token) for token in batch.input_ids[0].tolist()]
    assert [token == "##x" for token in tokens] == batch.is_continuation[0].tolist()
    assert batch.is_continuation.sum() > 0
    assert next(iter(BatchLoader(shards, config))).is_continuation is None


def test_validation_rows_come_once_in_the_order_of_the_text(tmp_path):
    shards = make_shards(tmp_path, [" ".join(WORDS[n : n + 9]) for n in range(200)], validation_fraction=0.3)
    tokens = np.concatenate(shards.tokens_by_shard("validation")).tolist()
    rows = all_rows(validation_batches(shards, LoaderConfig(length=9, batch_size=4)))
    assert len(rows) == -(-len(tokens) // 8) // 4 * 4
    assert [token for row in rows for token in row[1:]] == tokens[: len(rows) * 8]


def test_only_the_chosen_validation_batches_are_read_and_kept(tmp_path, monkeypatch):
    shards = make_shards(tmp_path, [" ".join(WORDS[n : n + 9]) for n in range(200)], validation_fraction=0.3)
    config, read_rows, num_read = LoaderConfig(length=9, batch_size=4), loader.MemoryMappedTokens.read_rows, 0

    def count_rows(tokens, starts, width):
        nonlocal num_read
        num_read += len(starts)
        return read_rows(tokens, starts, width)

    every = list(validation_batches(shards, config))
    monkeypatch.setattr(loader.MemoryMappedTokens, "read_rows", count_rows)
    chosen = list(validation_batches(shards, config, max_batches=3))
    assert num_read == 3 * 4 < len(every) * 4
    assert [batch.step.item() for batch in chosen] == [index * len(every) // 3 for index in range(3)]
    for batch in chosen:
        assert torch.equal(batch.input_ids, every[batch.step.item()].input_ids)
        assert batch.input_ids.untyped_storage().nbytes() == batch.input_ids.nbytes  # not a view of a larger tensor


def test_shards_without_validation_text_are_an_error(shards):
    with pytest.raises(DataError, match="has no validation tokens"):
        next(validation_batches(shards, LoaderConfig()))


def test_micro_batches_keep_the_row_ids(shards):
    batch = next(iter(BatchLoader(shards, LoaderConfig(length=16, batch_size=6), rank=1, world_size=2)))
    assert [part.row_ids.tolist() for part in batch.micro_batches(3)] == [[3], [4], [5]]
    assert torch.cat([part.input_ids for part in batch.micro_batches(3)]).equal(batch.input_ids)
    with pytest.raises(ConfigError, match="3 rows do not divide into 2 micro-batches"):
        batch.micro_batches(2)


def test_impossible_settings_are_errors(shards):
    with pytest.raises(ConfigError, match="length is 4; it must be at least 5"):
        LoaderConfig(length=4)
    with pytest.raises(ConfigError, match="not divisible by the 2 ranks"):
        BatchLoader(shards, LoaderConfig(batch_size=5), world_size=2)


def test_closing_waits_for_the_thread_that_reads_ahead():
    def slow_items():
        while True:
            time.sleep(0.05)
            yield threading.current_thread()

    items = prefetch_in_thread(slow_items())
    thread = next(items)
    items.close()
    assert not thread.is_alive()


def test_an_exception_while_prefetching_is_raised_by_the_consumer():
    def items():
        yield 1
        raise OSError("disk failure")

    fetched = prefetch_in_thread(items())
    assert next(fetched) == 1
    with pytest.raises(OSError, match="disk failure"):
        next(fetched)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("Où est l'été? Déjà vu, naïve Zoë.", {"lowercase": True, "strip_accents": False}),
        ("东西南北在哪里。我不知道, 你呢?", {}),
    ],
    ids=["accents", "chinese"],
)
def test_from_text_to_decoded_batches(tmp_path, text, settings):
    (tmp_path / "a.txt").write_text("\n\n".join([text] * 50))
    tokenizer = {"corpus": str(tmp_path), "output": tmp_path / "vocab", "vocab_size": 120}
    train_tokenizer(build_config(TokenizerConfig, **tokenizer, **settings))
    paths = {"corpus": str(tmp_path / "a.txt"), "tokenizer": tmp_path / "vocab", "output": tmp_path / "s"}
    assert shard(build_config(ShardConfig, **paths, workers=1)).documents["train"] == 50
    shards = open_shards(tmp_path / "s")
    assert shards.index.total_over_shards("unknown") == 0
    batch = next(iter(BatchLoader(shards, LoaderConfig(length=100, batch_size=4))))
    decoded = shards.tokenizer.library.decode(batch.input_ids[0].tolist(), skip_special_tokens=False)
    assert "".join(text.lower().split()) in "".join(decoded.split())
