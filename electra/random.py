"""Randomness that belongs to the row: a function of (seed, step, row).

Masks and samples drawn from it do not change when a batch is split over ranks or micro-batches, or a run is resumed.
The generator is a counter-based hash. All arithmetic stays below 2^63 in int64, so its bits, and the masks chosen by
them, are the same on every device and in compiled code; Gumbel noise may differ in the last place of its logarithms.
"""

from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

BITS = 32
BLOCK = 128  # entries of a vocabulary that are drawn among together: blocks first, then tokens, take less noise
LOW = 2**BITS - 1
Number = TypeVar("Number", int, Tensor)


class Purpose(IntEnum):
    """What is drawn; draws for different purposes are independent."""

    MASK = 0
    DISGUISE = 1
    SAMPLE_BLOCK = 2
    SAMPLE_TOKEN = 3


def scramble(value: Number) -> Number:
    """A bijection of 32-bit integers that looks random: xor-shift and multiply, twice (factors below 2^31)."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD & LOW
    value = value ^ (value >> 15)
    value = value * 0x735A2D97 & LOW
    return value ^ (value >> 15)


def row_keys(seed: int, step: Tensor, rows: Tensor, purpose: Purpose) -> Tensor:
    """Two keys [B, 2] for each row, to draw from."""
    lanes = []
    for lane in range(2):
        start = scramble(scramble(2 * int(purpose) + lane + 1) + (seed & LOW) & LOW)
        start = scramble(start + (seed >> BITS & LOW) & LOW)
        key = scramble(scramble(start + (step & LOW) & LOW) + (step >> BITS & LOW) & LOW)
        lanes.append(scramble(key + (rows & LOW) & LOW))
    return torch.stack(lanes, dim=-1)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """`count` integers of 32 random bits for each of `keys` [..., 2]; shape [..., count]."""
    counter = torch.arange(count, device=keys.device)
    first, second = keys[..., :1], keys[..., 1:]
    return scramble(scramble(counter ^ first) + second & LOW)


def random_uniform(keys: Tensor, count: int) -> Tensor:
    """`count` numbers in (0, 1) for each of `keys`, as fp32: finest near 0, and never 1."""
    uniform = (random_bits(keys, count).float() + 0.5) / 2**BITS
    return uniform.clamp(max=1 - 2**-24)  # the largest float below 1


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise in fp32, fine in its upper tail, where the winners of a Gumbel-max come from."""
    return -torch.log(-torch.log1p(-random_uniform(keys, count)))
