"""Bias + GELU, and GELU times a gate (GeGLU): one kernel each for the forward and one for the backward pass.

The library's erf takes longer than reading and writing the tensor. In half precision its last digits are lost anyway,
so one exponential gives both Φ and its derivative (Abramowitz and Stegun, 7.1.26: erf within 1.5e-7).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.common import column_sums, split_rows_over_programs

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128
BACKWARD_BLOCK_ROWS = 8  # in the backward pass of bias + GELU, whose programs are one warp each


@triton.jit
def gelu_and_derivative(x):
    """x Φ(x) and Φ(x) + x φ(x).

    With g = exp(−x²/2), Φ is poly · g left of zero and 1 − poly · g right of it."""
    abs_x, g = tl.abs(x), tl.exp2(-0.7213475204 * x * x)
    denominator = 1.0 + 0.231641888 * abs_x
    t = tl.rsqrt(denominator * denominator)  # 1 / denominator in one instruction
    poly = 0.5307027145 * t - 0.7265760135
    poly = poly * t + 0.7107068705
    poly = poly * t - 0.142248368
    poly = (poly * t + 0.127414796) * t
    slope = g * (poly - 0.3989422804 * abs_x)  # for x < 0
    return tl.maximum(x, 0.0) - abs_x * (poly * g), tl.where(x > 0, 1.0 - slope, slope)


@triton.jit
def bias_gelu_kernel(x, bias, out, N, C, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """out = gelu(x [N, C] + bias [C]); one program per tile."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    offset = row[:, None] * C + column[None, :]
    mask = (row < N)[:, None] & (column < C)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    gelu, _ = gelu_and_derivative(value)
    tl.store(out + offset, gelu.to(out.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward_kernel(
    x, bias, grad_out, grad_x, partials, N, C, blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """grad_x [N, C], and its column sums over the rows of each program: partials [programs, C]."""
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    added = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)  # summed over blocks first: no exchange between threads
    for block in tl.range(blocks, num_stages=3):  # prefetches the next two blocks
        row = ((tl.program_id(0) * blocks + block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        offset = row[:, None] * C + column[None, :]
        mask = (row < N)[:, None] & (column < C)[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + added[None, :]
        _, derivative = gelu_and_derivative(value)
        grad = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32) * derivative
        total += grad
        tl.store(grad_x + offset, grad.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(partials + tl.program_id(0).to(tl.int64) * C + column, tl.sum(total, 0), mask=column < C)


def bias_gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(`x` [..., C] + `bias` [C])."""
    out = torch.empty_like(x)
    C = x.shape[-1]
    N = x.numel() // C
    grid = (triton.cdiv(N, BLOCK_ROWS), triton.cdiv(C, BLOCK_COLUMNS))
    bias_gelu_kernel[grid](x, bias, out, N, C, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=4)
    return out


def bias_gelu_backward(x: Tensor, bias: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """grad_x [..., C], and partial sums [programs, C] of the bias's gradient."""
    grad_x = torch.empty_like(x)
    C = x.shape[-1]
    N = x.numel() // C
    column_blocks = triton.cdiv(C, BLOCK_COLUMNS)
    # Fewer programs would all land on the multiprocessors that a concurrent matrix product frees first.
    blocks, programs = split_rows_over_programs(N, BACKWARD_BLOCK_ROWS, column_blocks, factor=4)
    partials = torch.empty(programs, C, device=x.device)
    bias_gelu_backward_kernel[(programs, column_blocks)](
        x, bias, grad_out, grad_x, partials, N, C, blocks,
        BLOCK_ROWS=BACKWARD_BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=1,
    )  # fmt: skip
    return grad_x, partials


@torch.library.custom_op("electra::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """`bias_gelu_forward` with autograd."""
    return bias_gelu_forward(x.contiguous(), bias)


@bias_gelu.register_fake
def _(x, bias):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("electra::bias_gelu_backward", mutates_args=())
def bias_gelu_backward_op(x: Tensor, bias: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, partials = bias_gelu_backward(x.contiguous(), bias, grad_out.contiguous())
    return grad_x, column_sums(partials, bias.dtype)


@bias_gelu_backward_op.register_fake
def _(x, bias, grad_out):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


bias_gelu.register_autograd(
    lambda ctx, grad_out: bias_gelu_backward_op(*ctx.saved_tensors, grad_out), setup_context=setup_context
)


@triton.jit
def load_halves(x, N, F, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """A tile of both halves of x [N, 2 · F] in fp32; its offsets in x and in a tensor [N, F]; and its mask."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    offset = row[:, None] * 2 * F + column[None, :]
    mask = (row < N)[:, None] & (column < F)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + F + offset, mask=mask, other=0.0).to(tl.float32)
    return value, gate, offset, row[:, None] * F + column[None, :], mask


@triton.jit
def geglu_kernel(x, out, N, F, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """out [N, F] = gelu(first half) · second half of x [N, 2 · F]; one program per tile."""
    value, gate, _, out_offset, mask = load_halves(x, N, F, BLOCK_ROWS, BLOCK_COLUMNS)
    gelu, _ = gelu_and_derivative(value)
    tl.store(out + out_offset, (gelu * gate).to(out.dtype.element_ty), mask=mask)


@triton.jit
def geglu_backward_kernel(x, grad_out, grad_x, N, F, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """grad_x [N, 2 · F] from grad_out [N, F]."""
    value, gate, offset, out_offset, mask = load_halves(x, N, F, BLOCK_ROWS, BLOCK_COLUMNS)
    gelu, derivative = gelu_and_derivative(value)
    grad = tl.load(grad_out + out_offset, mask=mask, other=0.0).to(tl.float32)
    grad_value = grad * gate * derivative
    tl.store(grad_x + offset, grad_value.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_x + F + offset, (grad * gelu).to(grad_x.dtype.element_ty), mask=mask)


def geglu_grid(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """The grid of a kernel over `x` [..., 2 · F], its number of rows, and F."""
    F = x.shape[-1] // 2
    N = x.numel() // (2 * F)
    return (triton.cdiv(N, BLOCK_ROWS), triton.cdiv(F, BLOCK_COLUMNS)), N, F


def geglu_forward(x: Tensor) -> Tensor:
    """gelu(first half) · second half of `x` [..., 2 · F]: [..., F]."""
    grid, N, F = geglu_grid(x)
    out = x.new_empty(*x.shape[:-1], F)
    geglu_kernel[grid](x, out, N, F, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=4)
    return out


def geglu_backward(x: Tensor, grad_out: Tensor) -> Tensor:
    """grad_x [..., 2 · F] from `grad_out` [..., F]."""
    grid, N, F = geglu_grid(x)
    grad_x = torch.empty_like(x)
    geglu_backward_kernel[grid](
        x, grad_out, grad_x, N, F, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=4
    )
    return grad_x


@torch.library.custom_op("electra::geglu", mutates_args=())
def geglu(x: Tensor) -> Tensor:
    """`geglu_forward` with autograd."""
    return geglu_forward(x.contiguous())


@geglu.register_fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("electra::geglu_backward", mutates_args=())
def geglu_backward_op(x: Tensor, grad_out: Tensor) -> Tensor:
    return geglu_backward(x.contiguous(), grad_out.contiguous())


@geglu_backward_op.register_fake
def _(x, grad_out):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


geglu.register_autograd(
    lambda ctx, grad_out: geglu_backward_op(*ctx.saved_tensors, grad_out), setup_context=setup_context
)
