"""The loss of guesses and samples of them in one pass over the vocabulary, on a GPU.

Logits over the vocabulary are the largest thing in a step. Here they are read once, for the softmax, the loss and the
draw alike, and their gradient is written once; the plain way reads and writes them half a dozen times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.objective.randomness import BLOCK

ALIGNED = 64  # entries: products over a vocabulary filled up to a multiple of so many are several times faster
BLOCKS_AT_ONCE = 16


@triton.jit
def scramble(value):
    """The hash of `randomness.scramble`, on unsigned integers of 32 bits, which overflow as it wants."""
    value = value ^ (value >> 16)
    value = value * 0x21F0AAAD
    value = value ^ (value >> 15)
    value = value * 0x735A2D97
    return value ^ (value >> 15)


@triton.jit
def gumbel(keys, counter):
    """The noise of `randomness.gumbel` for a row's `keys`, at `counter`."""
    first, second = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
    bits = scramble(scramble(counter.to(tl.uint32) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))  # where 1 − u would lose digits
    return -tl.log(tl.where(uniform < 0.01, small, -tl.log(1.0 - uniform)))


@triton.jit
def read_entries(logits, entry, V):
    """Logits in fp32; behind the vocabulary's end they are impossible."""
    return tl.load(logits + entry, mask=entry < V, other=float("-inf")).to(tl.float32)


@triton.jit
def score_kernel(
    logits, originals, block_keys, token_keys, losses, sampled, totals, V, stride, places,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program for each guess: some blocks of the vocabulary at a time."""
    guess = tl.program_id(0).to(tl.int64)
    row, place = guess // places, guess % places
    logits += guess * stride
    within = tl.arange(0, BLOCK)
    best, chosen = float("-inf"), 0
    top, total = -1e30, 0.0
    for start in range(0, BLOCKS, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        found = read_entries(logits, block[:, None] * BLOCK + within[None, :], V)  # [AT_ONCE, BLOCK]
        highest = tl.maximum(tl.max(found, 1), -1e30)
        sums = tl.sum(tl.exp(found - highest[:, None]), 1)
        noisy = highest + tl.log(sums) + gumbel(block_keys + 2 * row, place * BLOCKS + block)  # impossible: −inf
        found_best = tl.max(noisy, 0)
        chosen = tl.where(found_best > best, start + tl.argmax(noisy, 0), chosen)
        best = tl.maximum(best, found_best)
        higher = tl.maximum(top, tl.max(highest, 0))
        total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(highest - higher), 0)
        top = higher
    noisy = read_entries(logits, chosen * BLOCK + within, V) + gumbel(token_keys + 2 * row, place * BLOCK + within)
    whole = top + tl.log(total)
    winner = tl.minimum(chosen * BLOCK + tl.argmax(noisy, 0), V - 1)  # of logits that are no numbers, too, an entry
    tl.store(sampled + guess, winner.to(tl.int64))
    tl.store(losses + guess, whole - tl.load(logits + tl.load(originals + guess)).to(tl.float32))
    tl.store(totals + guess, whole)


@triton.jit
def gradient_of_score_kernel(logits, originals, totals, grown, gradient, V, stride, ENTRIES: tl.constexpr):
    """(softmax − what stood there) · the loss's gradient; one program for each guess and part of the vocabulary."""
    guess = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    share = tl.exp(read_entries(logits + guess * stride, entry, V) - tl.load(totals + guess))  # 0 behind the end
    share = tl.where(entry == tl.load(originals + guess), share - 1.0, share) * tl.load(grown + guess)
    tl.store(gradient + guess * stride + entry, share.to(gradient.dtype.element_ty), mask=entry < stride)


@torch.library.custom_op("electra::score_and_sample", mutates_args=())
def score_and_sample(
    logits: Tensor, originals: Tensor, block_keys: Tensor, token_keys: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `logits` [B, M, V and more]: the losses of `originals` [B, M], samples [B, M], logarithms of the sums [B, M].

    A sample is drawn by Gumbel noise of each row's keys [B, 2]: first a block of the vocabulary, then a token in it.
    """
    logits = logits.contiguous()
    losses, totals = (torch.empty(originals.shape, device=logits.device) for _ in range(2))
    sampled = torch.empty_like(originals)
    score_kernel[(originals.numel(),)](
        logits, originals, block_keys, token_keys, losses, sampled, totals, vocabulary, logits.shape[2],
        originals.shape[1], BLOCKS=triton.cdiv(vocabulary, BLOCK), BLOCK=BLOCK, AT_ONCE=BLOCKS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return losses, sampled, totals


@score_and_sample.register_fake
def _(logits, originals, block_keys, token_keys, vocabulary):
    losses = logits.new_empty(originals.shape, dtype=torch.float32)
    return losses, torch.empty_like(originals), torch.empty_like(losses)


@torch.library.custom_op("electra::gradient_of_scores", mutates_args=())
def gradient_of_scores(logits: Tensor, originals: Tensor, totals: Tensor, grown: Tensor, vocabulary: int) -> Tensor:
    """The gradient of logits from that of their losses, `grown` [B, M]."""
    logits, stride, entries = logits.contiguous(), logits.shape[2], 4096
    gradient = torch.empty_like(logits)
    gradient_of_score_kernel[(originals.numel(), triton.cdiv(stride, entries))](
        logits, originals, totals, grown.contiguous(), gradient, vocabulary, stride, ENTRIES=entries, num_warps=4
    )
    return gradient


@gradient_of_scores.register_fake
def _(logits, originals, totals, grown, vocabulary):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def remember(ctx, inputs, output) -> None:
    logits, originals, _, _, ctx.vocabulary = inputs
    ctx.save_for_backward(logits, originals, output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def backward(ctx, grown: Tensor, *_: Tensor):
    return gradient_of_scores(*ctx.saved_tensors, grown, ctx.vocabulary), None, None, None, None


score_and_sample.register_autograd(backward, setup_context=remember)
