"""Random numbers keyed by the row."""

import pytest
import torch
from scipy import stats

from electra.random import (
    BLOCK,
    Purpose,
    gumbel_noise,
    hash_uint32,
    random_bits,
    random_uniform,
    row_keys,
    sample_from_frequencies,
    sample_from_logits,
)


def keys(rows: int, *, seed: int = 0, step: int = 0, purpose: Purpose = Purpose.MASK_POSITIONS) -> torch.Tensor:
    return row_keys(seed, torch.tensor(step), torch.arange(rows), purpose)


def sampling_keys(rows: int, **fields: int) -> list[torch.Tensor]:
    return [keys(rows, purpose=purpose, **fields) for purpose in (Purpose.SAMPLE_BLOCK, Purpose.SAMPLE_TOKEN)]


def test_the_hash_is_bijective():
    values = hash_uint32(torch.arange(100_000))
    assert values.unique().numel() == 100_000
    assert 0 <= values.min() <= values.max() < 2**32


def test_the_hash_does_not_overflow():
    largest = 2**32 - 1
    assert hash_uint32(torch.tensor(largest)).item() == hash_uint32(largest)  # Python integers have no limit


def test_a_row_draws_the_same_alone_and_in_a_batch():
    batch = random_bits(keys(8), 5)
    alone = random_bits(row_keys(0, torch.tensor(0), torch.tensor([6]), Purpose.MASK_POSITIONS), 5)
    assert torch.equal(batch[6:7], alone)


def test_bits_depend_on_seed_step_row_and_purpose():
    large = 2**32
    settings = [{}, {"seed": 1}, {"seed": 2}, {"seed": large}, {"step": 1}, {"step": large}]
    bits = [random_bits(keys(2, purpose=purpose, **setting), 4) for setting in settings for purpose in Purpose]
    together = torch.cat(bits).flatten()
    assert together.unique().numel() == together.numel()


def test_uniform_numbers_are_uniform_along_columns_rows_and_steps():
    columns = random_uniform(keys(1), 20_000)[0]
    rows = random_uniform(keys(20_000), 1)[:, 0]
    steps = torch.cat([random_uniform(keys(100, step=step), 1)[:, 0] for step in range(200)])
    for draws in (columns, rows, steps):
        assert stats.kstest(draws.numpy(), "uniform").pvalue > 0.01


def test_neighbouring_rows_and_columns_are_independent():
    draws = random_uniform(keys(500), 500)
    for one, other in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01


def test_uniform_numbers_exclude_0_and_1():
    draws = random_uniform(keys(1000), 1000)
    assert 0 < draws.min() < draws.max() < 1


def test_gumbel_noise_is_finite_and_has_the_gumbel_distribution():
    noise = gumbel_noise(keys(100), 200).flatten()
    assert noise.isfinite().all()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 0.01


@pytest.mark.parametrize("vocab_size", [6, 300])  # one block and several
def test_samples_follow_the_softmax(vocab_size):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    counts = (
        sample_from_logits(logits.expand(40_000, 1, -1), *sampling_keys(40_000))
        .flatten()
        .bincount(minlength=vocab_size)
    )
    assert len(counts) == vocab_size
    assert stats.chisquare(counts, logits.double().softmax(0) * counts.sum()).pvalue > 0.001
    sharper = (logits.double() * 1.05).softmax(0)
    assert stats.chisquare(counts, sharper * counts.sum()).pvalue < 1e-6  # the test detects 5 %


def test_samples_at_different_positions_are_independent():
    logits = torch.tensor([2.3, 1.1, 0.0, 0.7]).expand(20_000, 2, 4)
    sampled = sample_from_logits(logits, *sampling_keys(20_000))
    table = torch.zeros(4, 4).index_put((sampled[:, 0], sampled[:, 1]), torch.ones(20_000), accumulate=True)
    assert stats.chi2_contingency(table + 1).pvalue > 0.001


def test_blocks_and_tokens_within_them_depend_on_seed_and_step():
    def draw(**fields: int) -> torch.Tensor:
        return sample_from_logits(torch.zeros(100, 1, 3 * BLOCK), *sampling_keys(100, **fields))

    first = draw()
    assert torch.equal(draw(), first)
    for other in (draw(seed=1), draw(step=1)):
        assert not torch.equal(other // BLOCK, first // BLOCK)
        assert not torch.equal(other % BLOCK, first % BLOCK)


def test_samples_do_not_change_when_the_batch_is_split():
    logits = torch.randn(10, 3, 6, generator=torch.Generator().manual_seed(0))
    block_keys, token_keys = sampling_keys(10)
    whole = sample_from_logits(logits, block_keys, token_keys)
    assert torch.equal(sample_from_logits(logits[7:], block_keys[7:], token_keys[7:]), whole[7:])


def test_samples_follow_given_frequencies():
    frequencies = torch.tensor([0.0, 0.25, 0.75, 0.0])
    counts = sample_from_frequencies(frequencies, keys(2000), 10).flatten().bincount(minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert stats.chisquare(counts[1:3], frequencies[1:3] * counts.sum()).pvalue > 0.001
