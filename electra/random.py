"""Randomness keyed by the row: masks and samples are functions of (seed, step, row).

They do not change when a batch is split over ranks or micro-batches, or when a run is resumed. The generator is a
counter-based hash in int64 arithmetic below 2^63, so its bits are the same on every device and in compiled code; Gumbel
noise may differ in the last bit of its logarithms.
"""

from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

BITS = 32
BLOCK = 128  # vocabulary entries per block: `sample_from_logits` draws a block, then a token in it
LOW_BITS = 2**BITS - 1
Number = TypeVar("Number", int, Tensor)


class Purpose(IntEnum):
    """What random numbers are drawn for; different purposes are independent."""

    MASK_POSITIONS = 0
    MASK_REPLACEMENTS = 1
    SAMPLE_BLOCK = 2
    SAMPLE_TOKEN = 3
    SPLITS = 4


def hash_uint32(value: Number) -> Number:
    """A bijective hash of 32-bit integers: xor-shift and multiply, twice (with factors below 2^31)."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD & LOW_BITS
    value = value ^ (value >> 15)
    value = value * 0x735A2D97 & LOW_BITS
    return value ^ (value >> 15)


def row_keys(seed: int, step: Tensor, row_ids: Tensor, purpose: Purpose) -> Tensor:
    """Two 32-bit keys [B, 2] for each of `row_ids` [B]; `step` is [] or [B]."""
    keys = []
    for number in range(2):
        key = hash_uint32(hash_uint32(2 * int(purpose) + number + 1) + (seed & LOW_BITS) & LOW_BITS)
        key = hash_uint32(key + (seed >> BITS & LOW_BITS) & LOW_BITS)
        step_key = hash_uint32(hash_uint32(key + (step & LOW_BITS) & LOW_BITS) + (step >> BITS & LOW_BITS) & LOW_BITS)
        keys.append(hash_uint32(step_key + (row_ids & LOW_BITS) & LOW_BITS))
    return torch.stack(keys, dim=-1)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """`count` random 32-bit integers [..., count] for each of `keys` [..., 2]."""
    counter = torch.arange(count, device=keys.device)
    first, second = keys[..., :1], keys[..., 1:]
    return hash_uint32(hash_uint32(counter ^ first) + second & LOW_BITS)


def random_uniform(keys: Tensor, count: int) -> Tensor:
    """`count` fp32 numbers [..., count] in (0, 1), 0 and 1 excluded, for each of `keys` [..., 2]."""
    uniform = (random_bits(keys, count).float() + 0.5) / 2**BITS
    return uniform.clamp(max=1 - 2**-24)  # the largest float below 1


def gumbel_noise(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise [..., count] in fp32, precise in the upper tail, where Gumbel-max takes its samples."""
    return -torch.log(-torch.log1p(-random_uniform(keys, count)))


@torch.no_grad()
def sample_from_logits(logits: Tensor, block_keys: Tensor, token_keys: Tensor) -> Tensor:
    """Samples [B, M] of softmax(`logits` [B, M, V]) by Gumbel-max, with the rows' keys [B, 2].

    First a block of the vocabulary is drawn, then a token in it: the same distribution as one draw over the whole
    vocabulary, with a hundredth of the noise.
    """
    blocks = functional.pad(logits, (0, -logits.shape[2] % BLOCK), value=float("-inf")).unflatten(2, (-1, BLOCK))
    slots, num_blocks = blocks.shape[1:3]
    block_noise = gumbel_noise(block_keys, slots * num_blocks).unflatten(1, (slots, num_blocks))
    token_noise = gumbel_noise(token_keys, slots * BLOCK).unflatten(1, (slots, BLOCK))
    block = (blocks.logsumexp(3) + block_noise).argmax(2)  # [B, M]
    tokens = blocks.gather(2, block[:, :, None, None].expand(-1, -1, 1, BLOCK)).squeeze(2)  # [B, M, BLOCK]
    return block * BLOCK + (tokens + token_noise).argmax(2)


def sample_from_frequencies(frequencies: Tensor, keys: Tensor, count: int) -> Tensor:
    """`count` tokens [B, count] drawn from `frequencies` [V], with the rows' keys [B, 2]."""
    uniform = random_uniform(keys, count).double()
    return torch.searchsorted(frequencies.double().cumsum(0), uniform).clamp(max=len(frequencies) - 1)
