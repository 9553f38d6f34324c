"""Masked positions and the generator's input."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.objectives.config import MaskingConfig
from electra.objectives.masking import count_masked, mask, max_masked, num_masked

V = Vocabulary(size=60, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)


def batch_of(rows: list[list[int]], **fields) -> Batch:
    return Batch(torch.tensor(rows), torch.tensor(0), torch.arange(len(rows)), **fields)


def used_positions(masked) -> list[list[int]]:
    """The masked positions of each row, sorted."""
    pairs = zip(masked.positions.tolist(), masked.weights.tolist(), strict=True)
    return [sorted(p for p, w in zip(*row, strict=True) if w) for row in pairs]


def counts(length: int, mask_count: str, fraction: float = 0.15) -> list[int]:
    """k for rows of 1 to `length` tokens."""
    config = MaskingConfig(mask_count=mask_count, mask_fraction=fraction)
    return num_masked(torch.arange(1, length + 1), length, config).tolist()


@pytest.mark.parametrize(("part", "whole"), [(5, 100), (7, 100), (15, 100), (25, 100), (40, 100), (1, 6), (1, 3)])
def test_the_papers_count_is_the_ceiling_for_rows_of_1_to_512_tokens(part, whole):
    assert counts(512, "paper", part / whole) == [(part * n + whole - 1) // whole for n in range(1, 513)]


def released_count(n: int, cap: int) -> int:
    """k in the released code, in fp32 as there: 0.15 · 190 is slightly above 28.5."""
    return min(cap, max(1, int(np.rint(np.float32(n) * np.float32(0.15)))))


@pytest.mark.parametrize(("length", "cap"), [(10, 1), (128, 19), (512, 79)])
def test_the_released_count_is_rounded_and_capped(length, cap):
    assert counts(length, "released") == [released_count(n, cap) for n in range(1, length + 1)]


def test_the_released_cap_applies_to_short_rows():
    assert (counts(10, "released")[9], counts(128, "released")[9]) == (1, 2)


def test_the_released_count_rounds_halves_to_even():
    k = [None, *counts(512, "released")]
    assert [k[n] for n in (1, 9, 10, 30, 50, 126, 512)] == [1, 1, 2, 4, 8, 19, 77]  # 1.5 → 2, 4.5 → 4, 7.5 → 8


def test_mask_slots_of_both_counts():
    assert [max_masked(length, MaskingConfig()) for length in (4, 128, 512)] == [1, 19, 79]
    assert [max_masked(length, MaskingConfig(mask_count="paper")) for length in (4, 128, 512)] == [1, 20, 77]


def test_positions_outside_the_attention_mask_are_never_masked_whatever_their_token():
    attention_mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]] * 50).bool()
    batch = batch_of([[2, 11, 12, 3, 13, 14, 15, 16]] * 50, attention_mask=attention_mask)
    masked = mask(batch, MaskingConfig(mask_fraction=0.9), V, seed=0)
    assert used_positions(masked) == [[1, 2]] * 50


def test_special_tokens_and_padding_are_never_masked():
    rows = [[2, 11, 3, 12, 4, 3, 0, 0]] * 50
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]] * 50).bool()
    masked = mask(batch_of(rows, attention_mask=attention_mask), MaskingConfig(mask_fraction=0.9), V, seed=0)
    assert used_positions(masked) == [[1, 3]] * 50


@given(tokens=st.integers(1, 64), fraction=st.sampled_from([0.15, 0.25, 0.5]), seed=st.integers(0, 2**40))
def test_the_number_of_masked_positions_is_k_without_duplicates(tokens, fraction, seed):
    row = [2] + [11] * (tokens - 2) + [3] * (tokens > 1)
    attention_mask = torch.arange(64)[None] < tokens
    config = MaskingConfig(mask_fraction=fraction)
    batch = batch_of([row + [0] * (64 - tokens)], attention_mask=attention_mask)
    masked = mask(batch, config, V, seed)
    assert masked.positions[0].unique().numel() == masked.positions.shape[1]
    assert masked.weights.sum() == min(counts(64, "released", fraction)[tokens - 1], max(0, tokens - 2))


def test_masked_positions_become_mask_and_others_keep_their_token(make_batch):
    batch = make_batch(lengths=[16, 10, 5, 2])
    masked = mask(batch, MaskingConfig(), V, seed=0)
    for row, positions in enumerate(used_positions(masked)):
        for position in range(16):
            expected = V.mask_id if position in positions else batch.input_ids[row, position]
            assert masked.input_ids[row, position] == expected
    assert torch.equal(masked.labels, batch.input_ids.gather(1, masked.positions))
    assert masked.weights.sum(1).tolist() == [2, 2, 1, 0]  # [CLS] [SEP] alone has nothing to mask


def test_all_positions_are_masked_equally_often():
    batch = batch_of([[2, *range(11, 31), 3]] * 4000)
    masked = mask(batch, MaskingConfig(), V, seed=3)
    assert masked.weights.all()
    times = masked.positions.flatten().bincount(minlength=22)[1:-1]
    assert stats.chisquare(times).pvalue > 0.01


def test_masks_depend_on_seed_and_step_only(make_batch):
    batch = make_batch(rows=8)
    masks = [
        used_positions(mask(b, MaskingConfig(), V, seed))
        for b, seed in ((batch, 0), (batch, 1), (make_batch(8, step=1), 0))
    ]
    assert masks[0] != masks[1]
    assert masks[0] != masks[2]
    assert used_positions(mask(batch, MaskingConfig(), V, 0)) == masks[0]


def test_masks_do_not_change_when_the_batch_is_split(make_batch):
    batch = make_batch(rows=6)
    config = MaskingConfig(mask_token_probability=0.8, random_token_probability=0.1)
    whole = mask(batch, config, V, seed=0)
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        piece = mask(replace(batch, input_ids=batch.input_ids[rows], row_ids=batch.row_ids[rows]), config, V, seed=0)
        assert torch.equal(piece.input_ids, whole.input_ids[rows])
        assert torch.equal(piece.positions, whole.positions[rows])


def test_fractions_of_mask_random_and_original_tokens():
    row = [2] + [59] * 62 + [3]
    masked = mask(
        batch_of([row] * 3000), MaskingConfig(mask_token_probability=0.8, random_token_probability=0.1), V, seed=0
    )
    replacements = masked.input_ids.gather(1, masked.positions)[masked.weights > 0]
    is_mask, is_kept = replacements == V.mask_id, replacements == 59
    assert is_mask.float().mean().item() == pytest.approx(0.8 + 0.1 / 60, abs=0.01)
    assert is_kept.float().mean().item() == pytest.approx(0.1 + 0.1 / 60, abs=0.01)
    times = replacements[~is_mask & ~is_kept].bincount(minlength=60)
    assert stats.chisquare([count for token, count in enumerate(times) if token not in (V.mask_id, 59)]).pvalue > 0.01


def test_the_released_masking_has_85_percent_mask_and_no_random_tokens():
    masked = mask(batch_of([[2] + [59] * 62 + [3]] * 1000), MaskingConfig(mask_token_probability=0.85), V, seed=0)
    replacements = masked.input_ids.gather(1, masked.positions)
    assert set(replacements.unique().tolist()) == {V.mask_id, 59}
    assert (replacements == V.mask_id).float().mean().item() == pytest.approx(0.85, abs=0.01)


def words_batch(rows: int) -> Batch:
    """[CLS] un ##break ##able day s ##un ##s et . [SEP]: words of 3, 1, 3, 1 and 1 pieces."""
    continues = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0]]).bool()
    return batch_of([[2, 11, 12, 13, 14, 15, 16, 17, 18, 19, 3]] * rows, is_continuation=continues.expand(rows, -1))


def test_whole_words_are_masked_completely_or_not_at_all():
    masked = mask(words_batch(400), MaskingConfig(mask_fraction=0.4, whole_word_masking=True), V, seed=0)
    words = [{1, 2, 3}, {4}, {5, 6, 7}, {8}, {9}]
    sizes = set()
    for positions in map(set, used_positions(masked)):
        assert all(word <= positions or not word & positions for word in words)
        sizes.add(len(positions))
    assert sizes == {3, 4}  # k = 4: a long and a short word, or three short ones
    assert any(set(positions) >= {1, 2, 3} for positions in used_positions(masked))


def test_a_word_truncated_by_the_row_start_is_a_word():
    continues = torch.tensor([[False, True, True, False, False]] * 200)
    batch = batch_of([[2, 12, 13, 14, 3]] * 200, is_continuation=continues)
    masked = mask(batch, MaskingConfig(mask_fraction=0.4, whole_word_masking=True), V, seed=0)
    assert {tuple(positions) for positions in used_positions(masked)} == {(1, 2), (3,)}


def test_a_word_with_more_pieces_than_mask_slots_is_never_masked():
    continues = torch.tensor([[0, 0, 1, 1, 1, 0] + [0] * 14] * 50).bool()
    batch = batch_of([[2, 11, 12, 13, 14] + [15] * 14 + [3]] * 50, is_continuation=continues)
    masked = mask(batch, MaskingConfig(whole_word_masking=True), V, seed=0)
    assert masked.weights.sum(1).tolist() == [3] * 50
    assert not {1, 2, 3, 4} & {position for row in used_positions(masked) for position in row}


def test_whole_word_masking_needs_continuations(make_batch):
    with pytest.raises(ConfigError, match="is_continuation"):
        mask(make_batch(), MaskingConfig(whole_word_masking=True), V, seed=0)


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.1, float("nan")])
def test_a_mask_fraction_outside_0_and_1_is_an_error(fraction):
    with pytest.raises(ConfigError, match="must be above 0 and below 1"):
        MaskingConfig(mask_fraction=fraction)


def test_probabilities_above_1_together_are_an_error():
    with pytest.raises(ConfigError, match="sum at most 1"):
        MaskingConfig(mask_token_probability=0.9, random_token_probability=0.2)


@given(
    rows=st.lists(st.lists(st.integers(0, 12), min_size=8, max_size=8), min_size=1, max_size=4),
    fraction=st.sampled_from([0.05, 0.15, 0.5, 0.9]),
    mask_count=st.sampled_from(["paper", "released"]),
    whole_words=st.booleans(),
)
def test_masked_positions_are_counted_without_choosing_them(rows, fraction, mask_count, whole_words):
    """Also in rows with fewer maskable tokens than are to be masked."""
    config = MaskingConfig(mask_fraction=fraction, mask_count=mask_count, whole_word_masking=whole_words)
    ids = torch.tensor(rows)
    batch = batch_of(rows, attention_mask=ids != V.pad_id, is_continuation=ids > 9)
    assert count_masked(batch, config, V, seed=5) == mask(batch, config, V, seed=5).weights.sum()
