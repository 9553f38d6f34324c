"""Dropout inside kernels: what is dropped is a function of a seed and a number, so nothing of it is kept."""

import triton
import triton.language as tl


@triton.jit
def factor_at(seed, number, dropout):
    """What dropout multiplies by at each `number`: 0, or what makes up for the zeros."""
    draw = tl.rand(tl.load(seed), number.to(tl.uint32))  # 64 bits would take several times as long
    return tl.where(draw < dropout, 0.0, 1.0 / (1.0 - dropout))
