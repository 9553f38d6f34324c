"""Powers of e as powers of two, which the processor has: `tl.exp` takes four more instructions for each number."""

import math

import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
