"""Noise inside kernels: a function of a seed and a number, so nothing of it is kept for the backward pass."""

import triton
import triton.language as tl


@triton.jit
def scramble(value):
    """A hash of unsigned integers of 32 bits, which overflow as it wants (`objective.randomness.scramble`)."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD
    value = value ^ (value >> 15)
    value = value * 0x735A2D97
    return value ^ (value >> 15)


@triton.jit
def factor_at(seed, number, dropout):
    """What dropout multiplies by at each `number`: 0, or what makes up for the zeros.

    Triton's own generator takes several times as many instructions, more than all else in these kernels."""
    key = tl.load(seed).to(tl.uint32)
    bits = scramble(scramble(number.to(tl.uint32) ^ scramble(key)) + key)
    return tl.where(bits < tl.cast(dropout * 4294967296.0, tl.uint32), 0.0, 1.0 / (1.0 - dropout))
