"""The MLM head on a GPU: loss and sample in one pass over the vocabulary logits.

The logits are the largest tensor of a step. They are read once for softmax, loss and sample together, and their
gradient is written once, with the column sums for the bias; separate operations read and write them six times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from electra.kernels.common import LN2, LOG2E, column_sums, hash_uint32, split_rows_over_programs
from electra.kernels.side_stream import WeightGradientStream
from electra.random import BLOCK

VOCAB_MULTIPLE = 64  # matrix products with a vocabulary padded to a multiple of this are several times faster
VOCAB_BLOCKS = 16  # blocks of the vocabulary that are read at a time
BLOCK_ROWS, BLOCK_COLUMNS = 2, 1024  # of the backward pass


@triton.jit
def gumbel_noise(keys, counter):
    """The noise of `electra.random.gumbel_noise` for one row's `keys` [2], at `counter`."""
    first, second = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
    bits = hash_uint32(hash_uint32(counter.to(tl.uint32) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))  # where 1 − u loses digits
    return -tl.log(tl.where(uniform < 0.01, small, -tl.log(1.0 - uniform)))


@triton.jit
def load_logits(logits, entry, V, stride):
    """Logits in fp32, −inf from V on. The padding is loaded as well, which keeps loads wide."""
    return tl.where(entry < V, tl.load(logits + entry, mask=entry < stride, other=0.0).to(tl.float32), float("-inf"))


@triton.jit
def mlm_loss_and_sample_kernel(
    logits, labels, block_keys, token_keys, block_logsumexp, losses, samples, logsumexp, V, stride, num_positions,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VOCAB_BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per prediction: the logsumexp of each block of the vocabulary, then the sample of a block, then of a
    token in it.

    The logsumexp of all blocks is stored and loaded again as one vector, so that each thread draws the noise of other
    blocks."""
    prediction = tl.program_id(0).to(tl.int64)
    row, position = prediction // num_positions, prediction % num_positions
    logits += prediction * stride
    block_logsumexp += prediction * WIDTH
    within = tl.arange(0, BLOCK)
    for start in tl.range(0, NUM_BLOCKS, VOCAB_BLOCKS, num_stages=2):  # prefetches the next blocks
        block = start + tl.arange(0, VOCAB_BLOCKS)
        tile = load_logits(logits, block[:, None] * BLOCK + within[None, :], V, stride)  # [VOCAB_BLOCKS, BLOCK]
        highest = tl.maximum(tl.max(tile, 1), -1e30) * LOG2E
        sums = tl.sum(tl.exp2(tile * LOG2E - highest[:, None]), 1)
        tl.store(block_logsumexp + block, (highest + tl.log2(sums)) * LN2)
    tl.debug_barrier()  # other threads' stores are loaded next
    block = tl.arange(0, WIDTH)
    mass = tl.load(block_logsumexp + block, mask=block < NUM_BLOCKS, other=float("-inf"))
    noisy = mass + gumbel_noise(block_keys + 2 * row, position * NUM_BLOCKS + block)
    sampled_block = tl.minimum(tl.argmax(noisy, 0), NUM_BLOCKS - 1)
    top = tl.maximum(tl.max(mass, 0), -1e30)
    total = top + tl.log(tl.sum(tl.exp(mass - top), 0))
    noisy = load_logits(logits, sampled_block * BLOCK + within, V, stride)
    noisy += gumbel_noise(token_keys + 2 * row, position * BLOCK + within)
    sample = tl.minimum(sampled_block * BLOCK + tl.argmax(noisy, 0), V - 1)  # a valid id even for NaN logits
    tl.store(samples + prediction, sample.to(tl.int64))
    tl.store(losses + prediction, total - tl.load(logits + tl.load(labels + prediction)).to(tl.float32))
    tl.store(logsumexp + prediction, total)


@triton.jit
def mlm_loss_backward_kernel(
    logits, labels, logsumexp, grad_loss, grad_logits, partials, N, V, stride, blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_logits [N, stride] = (softmax − one-hot label) · grad_loss, and its column sums over each program's rows."""
    entry = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in tl.range(blocks, num_stages=2):  # prefetches the next block
        prediction = ((tl.program_id(0) * blocks + block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        offset, row_mask = prediction[:, None] * stride + entry[None, :], prediction < N
        mask = row_mask[:, None] & (entry < stride)[None, :]
        tile = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
        log_total = tl.load(logsumexp + prediction, mask=row_mask, other=0.0) * LOG2E
        grad = tl.exp2(tile * LOG2E - log_total[:, None])
        label = tl.load(labels + prediction, mask=row_mask, other=-1).to(tl.int32)
        grad = tl.where(entry[None, :] == label[:, None], grad - 1.0, grad)
        grad = grad * tl.load(grad_loss + prediction, mask=row_mask, other=0.0)[:, None]
        grad = tl.where((entry < V)[None, :], grad, 0.0)
        tl.store(grad_logits + offset, grad.to(grad_logits.dtype.element_ty), mask=mask)
        total += grad
    tl.store(partials + tl.program_id(0).to(tl.int64) * stride + entry, tl.sum(total, 0), mask=entry < stride)


@torch.library.custom_op("electra::mlm_loss_and_sample", mutates_args=())
def mlm_loss_and_sample_op(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses and samples [B, M], logits [B · M, padded V] and their logsumexp [B, M].

    `states` are [B · M, E] and `table` [padded V, E]."""
    logits = torch.addmm(bias.to(states.dtype), states, table.T)
    losses, logsumexp = (torch.empty(labels.shape, device=logits.device) for _ in range(2))
    samples = torch.empty_like(labels)
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    width = triton.next_power_of_2(triton.cdiv(num_blocks, VOCAB_BLOCKS) * VOCAB_BLOCKS)
    block_logsumexp = torch.empty(labels.numel(), width, device=logits.device)
    mlm_loss_and_sample_kernel[(labels.numel(),)](
        logits, labels, block_keys, token_keys, block_logsumexp, losses, samples, logsumexp, vocab_size,
        logits.shape[1], labels.shape[1],
        NUM_BLOCKS=num_blocks, BLOCK=BLOCK, VOCAB_BLOCKS=VOCAB_BLOCKS, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return losses, samples, logits, logsumexp


@mlm_loss_and_sample_op.register_fake
def _(states, table, bias, labels, block_keys, token_keys, vocab_size):
    losses = states.new_empty(labels.shape, dtype=torch.float32)
    logits = states.new_empty(states.shape[0], table.shape[0])
    return losses, torch.empty_like(labels), logits, torch.empty_like(losses)


@torch.library.custom_op("electra::mlm_loss_backward", mutates_args=())
def mlm_loss_backward_op(
    states: Tensor, table: Tensor, labels: Tensor, logits: Tensor, logsumexp: Tensor, grad_loss: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of states, table and bias from `grad_loss` [B, M]."""
    N, stride = logits.shape
    grad_logits = torch.empty_like(logits)
    side_stream = WeightGradientStream()
    column_blocks = triton.cdiv(stride, BLOCK_COLUMNS)
    blocks, programs = split_rows_over_programs(N, BLOCK_ROWS, column_blocks)
    partials = torch.empty(programs, stride, device=logits.device)
    mlm_loss_backward_kernel[(programs, column_blocks)](
        logits, labels, logsumexp, grad_loss.contiguous(), grad_logits, partials, N, vocab_size, stride, blocks,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
    grad_table = side_stream(torch.mm, grad_logits.T, states)
    grad_bias = side_stream(column_sums, partials, torch.float32)
    grad_states = grad_logits @ table
    side_stream.join()
    return grad_states, grad_table, grad_bias


@mlm_loss_backward_op.register_fake
def _(states, table, labels, logits, logsumexp, grad_loss, vocab_size):
    grad_bias = states.new_empty(table.shape[0], dtype=torch.float32)
    return torch.empty_like(states), torch.empty_like(table), grad_bias


def setup_context(ctx, inputs, output) -> None:
    states, table, _, labels, _, _, ctx.vocab_size = inputs
    _, samples, logits, logsumexp = output
    ctx.mark_non_differentiable(samples, logits, logsumexp)
    ctx.save_for_backward(states, table, labels, logits, logsumexp)


def backward(ctx, grad_loss: Tensor, *_: Tensor):
    return *mlm_loss_backward_op(*ctx.saved_tensors, grad_loss, ctx.vocab_size), None, None, None, None


mlm_loss_and_sample_op.register_autograd(backward, setup_context=setup_context)


def mlm_loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of `labels` [B, M] and samples [B, M], from `states` [B, M, E] and the token `table` [V, E]."""
    vocab_size, table = len(table), table.to(states.dtype)
    if padding := -vocab_size % VOCAB_MULTIPLE:  # `functional.pad` copies the table even if there is nothing to pad
        table, bias = functional.pad(table, (0, 0, 0, padding)), functional.pad(bias, (0, padding))
    flat = states.flatten(0, 1).contiguous()
    losses, samples, *_ = mlm_loss_and_sample_op(flat, table, bias, labels, block_keys, token_keys, vocab_size)
    return losses, samples
