"""Randomness that belongs to the row: a function of (seed, step, row), the same on every device.

Masks and samples drawn from it do not change when a batch is split over ranks or micro-batches, or a run is resumed.
The generator is a counter-based hash. All arithmetic stays below 2^63 in int64, so CPU, GPU and compiled code agree.
"""

import zlib

import torch
from torch import Tensor

BITS = 32
LOW = 2**BITS - 1


def scramble(value: Tensor) -> Tensor:
    """A bijection of 32-bit integers that looks random: xor-shift and multiply, twice (factors below 2^31)."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD & LOW
    value = value ^ (value >> 15)
    value = value * 0x735A2D97 & LOW
    return value ^ (value >> 15)


def row_keys(seed: int, step: Tensor, rows: Tensor, purpose: str) -> Tensor:
    """Two keys [B, 2] for each row, to draw from; draws for different purposes are independent."""
    lanes = torch.tensor([zlib.crc32(f"{purpose} {lane}".encode()) for lane in range(2)], device=rows.device)  # [2]
    keys = scramble(lanes ^ (seed & LOW))
    keys = scramble(keys + (seed >> BITS & LOW) & LOW)
    keys = scramble(keys + (step & LOW) & LOW)
    keys = scramble(keys + (step >> BITS & LOW) & LOW)
    return scramble(keys + (rows[:, None] & LOW) & LOW)  # [B, 2]


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
