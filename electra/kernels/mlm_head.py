"""The loss of guesses and samples of them in one pass over the vocabulary, on a GPU.

Logits over the vocabulary are the largest thing in a step. Here they are read once, for the softmax, the loss and the
draw alike, and their gradient is written once, and added up for the bias on the way; the plain way reads and writes
them half a dozen times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from electra.kernels.noise import scramble
from electra.kernels.powers import LN2, LOG2E
from electra.kernels.reductions import column_sums, tiles_of
from electra.kernels.side_stream import WeightGradientStream
from electra.random import BLOCK

ALIGNED = 64  # entries: products over a vocabulary filled up to a multiple of so many are several times faster
BLOCKS_AT_ONCE = 16
ROWS, COLUMNS = 2, 1024  # of a tile of the gradient


@triton.jit
def gumbel(keys, counter):
    """The noise of `randomness.gumbel` for a row's `keys`, at `counter`."""
    first, second = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
    bits = scramble(scramble(counter.to(tl.uint32) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))  # where 1 − u would lose digits
    return -tl.log(tl.where(uniform < 0.01, small, -tl.log(1.0 - uniform)))


@triton.jit
def read_entries(logits, entry, V, stride):
    """Logits in fp32; behind the vocabulary's end they are impossible. What fills it up is read, too: many at once."""
    return tl.where(entry < V, tl.load(logits + entry, mask=entry < stride, other=0.0).to(tl.float32), float("-inf"))


@triton.jit
def score_kernel(
    logits, originals, block_keys, token_keys, blocks, losses, sampled, totals, V, stride, places,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program for each guess: the logarithm of each block's sum, some at a time, then the choice of a block.

    Blocks are written down in between: as a row of numbers, each thread draws for some of them, and none twice."""
    guess = tl.program_id(0).to(tl.int64)
    row, place = guess // places, guess % places
    logits += guess * stride
    blocks += guess * WIDTH
    within = tl.arange(0, BLOCK)
    for start in tl.range(0, BLOCKS, AT_ONCE, num_stages=2):  # the next ones are on their way meanwhile
        block = start + tl.arange(0, AT_ONCE)
        found = read_entries(logits, block[:, None] * BLOCK + within[None, :], V, stride)  # [AT_ONCE, BLOCK]
        highest = tl.maximum(tl.max(found, 1), -1e30) * LOG2E
        sums = tl.sum(tl.exp2(found * LOG2E - highest[:, None]), 1)
        tl.store(blocks + block, (highest + tl.log2(sums)) * LN2)
    tl.debug_barrier()  # what the others wrote is read
    block = tl.arange(0, WIDTH)
    mass = tl.load(blocks + block, mask=block < BLOCKS, other=float("-inf"))
    noisy = mass + gumbel(block_keys + 2 * row, place * BLOCKS + block)  # impossible: −inf
    chosen = tl.minimum(tl.argmax(noisy, 0), BLOCKS - 1)
    top = tl.maximum(tl.max(mass, 0), -1e30)
    whole = top + tl.log(tl.sum(tl.exp(mass - top), 0))
    noisy = read_entries(logits, chosen * BLOCK + within, V, stride)
    noisy += gumbel(token_keys + 2 * row, place * BLOCK + within)
    winner = tl.minimum(chosen * BLOCK + tl.argmax(noisy, 0), V - 1)  # of logits that are no numbers, too, an entry
    tl.store(sampled + guess, winner.to(tl.int64))
    tl.store(losses + guess, whole - tl.load(logits + tl.load(originals + guess)).to(tl.float32))
    tl.store(totals + guess, whole)


@triton.jit
def gradient_of_score_kernel(
    logits, originals, totals, grown, gradient, sums, N, V, stride, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """(softmax − what stood there) · the loss's gradient [N, stride], and its sums over each program's guesses."""
    entry = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tiles, num_stages=2):  # the next tile is on its way meanwhile
        guess = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place, is_guess = guess[:, None] * stride + entry[None, :], guess < N
        is_there = is_guess[:, None] & (entry < stride)[None, :]
        found = tl.load(logits + place, mask=is_there, other=0.0).to(tl.float32)
        whole = tl.load(totals + guess, mask=is_guess, other=0.0) * LOG2E
        share = tl.exp2(found * LOG2E - whole[:, None])
        original = tl.load(originals + guess, mask=is_guess, other=-1).to(tl.int32)
        share = tl.where(entry[None, :] == original[:, None], share - 1.0, share)
        share = share * tl.load(grown + guess, mask=is_guess, other=0.0)[:, None]
        share = tl.where((entry < V)[None, :], share, 0.0)
        tl.store(gradient + place, share.to(gradient.dtype.element_ty), mask=is_there)
        total += share
    tl.store(sums + tl.program_id(0).to(tl.int64) * stride + entry, tl.sum(total, 0), mask=entry < stride)


@torch.library.custom_op("electra::score_and_sample", mutates_args=())
def score_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, originals: Tensor, block_keys: Tensor, token_keys: Tensor,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The losses of `originals` [B, M] and samples [B, M], from `states` [B · M, E] and a `table` [V and more, E].

    Also the logits [B · M, V and more] and the logarithms of their sums [B, M]. A sample is drawn by Gumbel noise of
    each row's keys [B, 2]: first a block of the vocabulary, then a token in it.
    """
    logits = torch.addmm(bias.to(states.dtype), states, table.T)
    losses, totals = (torch.empty(originals.shape, device=logits.device) for _ in range(2))
    sampled, count = torch.empty_like(originals), triton.cdiv(vocabulary, BLOCK)
    width = triton.next_power_of_2(triton.cdiv(count, BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE)
    blocks = torch.empty(originals.numel(), width, device=logits.device)
    score_kernel[(originals.numel(),)](
        logits, originals, block_keys, token_keys, blocks, losses, sampled, totals, vocabulary, logits.shape[1],
        originals.shape[1], BLOCKS=count, BLOCK=BLOCK, AT_ONCE=BLOCKS_AT_ONCE, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return losses, sampled, logits, totals


@score_and_sample.register_fake
def _(states, table, bias, originals, block_keys, token_keys, vocabulary):
    losses = states.new_empty(originals.shape, dtype=torch.float32)
    logits = states.new_empty(states.shape[0], table.shape[0])
    return losses, torch.empty_like(originals), logits, torch.empty_like(losses)


@torch.library.custom_op("electra::gradients_of_scores", mutates_args=())
def gradients_of_scores(
    states: Tensor, table: Tensor, originals: Tensor, logits: Tensor, totals: Tensor, grown: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of states, table and bias from that of the losses, `grown` [B, M]."""
    (N, stride), gradient, side_stream = logits.shape, torch.empty_like(logits), WeightGradientStream()
    columns = triton.cdiv(stride, COLUMNS)
    tiles, programs = tiles_of(N, ROWS, columns)
    parts = torch.empty(programs, stride, device=logits.device)
    gradient_of_score_kernel[(programs, columns)](
        logits, originals, totals, grown.contiguous(), gradient, parts, N, vocabulary, stride, tiles,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    of_table, of_bias = side_stream(torch.mm, gradient.T, states), side_stream(column_sums, parts, torch.float32)
    of_states = gradient @ table
    side_stream.join()
    return of_states, of_table, of_bias


@gradients_of_scores.register_fake
def _(states, table, originals, logits, totals, grown, vocabulary):
    of_bias = states.new_empty(table.shape[0], dtype=torch.float32)
    return torch.empty_like(states), torch.empty_like(table), of_bias


def remember(ctx, inputs, output) -> None:
    states, table, _, originals, _, _, ctx.vocabulary = inputs
    _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.save_for_backward(states, table, originals, *others[1:])


def backward(ctx, grown: Tensor, *_: Tensor):
    return *gradients_of_scores(*ctx.saved_tensors, grown, ctx.vocabulary), None, None, None, None


score_and_sample.register_autograd(backward, setup_context=remember)


def loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, originals: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of `originals` [B, M], and samples [B, M], by guesses from `states` [B, M, E]."""
    size, table = len(table), table.to(states.dtype)
    if padding := -size % ALIGNED:  # padding by nothing would copy the table
        table, bias = functional.pad(table, (0, 0, 0, padding)), functional.pad(bias, (0, padding))
    flat = states.flatten(0, 1).contiguous()
    losses, sampled, *_ = score_and_sample(flat, table, bias, originals, block_keys, token_keys, size)
    return losses, sampled
