"""Randomness that belongs to the row."""

import torch
from scipy import stats

from electra.random import Purpose, gumbel, random_bits, random_uniform, row_keys, scramble


def keys(rows: int, *, seed: int = 0, step: int = 0, purpose: Purpose = Purpose.MASK) -> torch.Tensor:
    return row_keys(seed, torch.tensor(step), torch.arange(rows), purpose)


def test_scramble_repeats_no_value():
    values = scramble(torch.arange(100_000))
    assert values.unique().numel() == 100_000
    assert 0 <= values.min() <= values.max() < 2**32


def test_nothing_overflows():
    largest = 2**32 - 1
    assert scramble(torch.tensor(largest)).item() == scramble(largest)  # Python's integers have no largest value


def test_a_row_draws_the_same_alone_and_among_others():
    together = random_bits(keys(8), 5)
    alone = random_bits(row_keys(0, torch.tensor(0), torch.tensor([6]), Purpose.MASK), 5)
    assert torch.equal(together[6:7], alone)


def test_seed_step_row_and_purpose_all_matter():
    large = 2**32
    settings = [{}, {"seed": 1}, {"seed": 2}, {"seed": large}, {"step": 1}, {"step": large}]
    bits = [random_bits(keys(2, purpose=purpose, **setting), 4) for setting in settings for purpose in Purpose]
    together = torch.cat(bits).flatten()
    assert together.unique().numel() == together.numel()


def test_draws_are_uniform_along_columns_rows_and_steps():
    columns = random_uniform(keys(1), 20_000)[0]
    rows = random_uniform(keys(20_000), 1)[:, 0]
    steps = torch.cat([random_uniform(keys(100, step=step), 1)[:, 0] for step in range(200)])
    for draws in (columns, rows, steps):
        assert stats.kstest(draws.numpy(), "uniform").pvalue > 0.01


def test_neighbouring_rows_and_columns_are_independent():
    draws = random_uniform(keys(500), 500)
    for one, other in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01


def test_uniform_numbers_never_reach_0_or_1():
    draws = random_uniform(keys(1000), 1000)
    assert 0 < draws.min() < draws.max() < 1


def test_gumbel_noise_is_finite_and_gumbel():
    noise = gumbel(keys(100), 200).flatten()
    assert noise.isfinite().all()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 0.01
