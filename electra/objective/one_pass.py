"""The loss of guesses and samples of them in one pass over the vocabulary, on a GPU.

Logits over the vocabulary are the largest thing in a step. Here they are read once, for the softmax, the loss and the
draw alike, and their gradient is written once; the plain way reads and writes them half a dozen times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS_AT_ONCE = 16


@triton.jit
def read_entries(logits, entry, V):
    """Logits in fp32; behind the vocabulary's end they are impossible."""
    return tl.load(logits + entry, mask=entry < V, other=float("-inf")).to(tl.float32)


@triton.jit
def forward_kernel(
    logits, originals, block_noise, token_noise, losses, sampled, totals, V,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program for each guess: some blocks of the vocabulary at a time."""
    guess = tl.program_id(0).to(tl.int64)
    row = logits + guess * V
    within = tl.arange(0, BLOCK)
    best, chosen = float("-inf"), 0
    top, total = -1e30, 0.0
    for start in range(0, BLOCKS, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        found = read_entries(row, block[:, None] * BLOCK + within[None, :], V)  # [AT_ONCE, BLOCK]
        highest = tl.maximum(tl.max(found, 1), -1e30)
        sums = tl.sum(tl.exp(found - highest[:, None]), 1)
        likely = highest + tl.log(sums)  # log of each block's share; impossible where there is no block
        noise = tl.load(block_noise + guess * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
        noisy = likely + noise
        winner = tl.max(noisy, 0)
        chosen = tl.where(winner > best, start + tl.argmax(noisy, 0), chosen)
        best = tl.maximum(best, winner)
        higher = tl.maximum(top, tl.max(highest, 0))
        total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(highest - higher), 0)
        top = higher
    entry = chosen * BLOCK + within
    noisy = read_entries(row, entry, V) + tl.load(token_noise + guess * BLOCK + within)
    original = tl.load(originals + guess)
    whole = top + tl.log(total)
    tl.store(sampled + guess, (chosen * BLOCK + tl.argmax(noisy, 0)).to(tl.int64))
    tl.store(losses + guess, whole - tl.load(row + original).to(tl.float32))
    tl.store(totals + guess, whole)


@triton.jit
def backward_kernel(logits, originals, totals, grown, gradient, V, ENTRIES: tl.constexpr):
    """(softmax − what stood there) · the loss's gradient; one program for each guess and part of the vocabulary."""
    guess = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    share = tl.exp(read_entries(logits + guess * V, entry, V) - tl.load(totals + guess))
    share = tl.where(entry == tl.load(originals + guess), share - 1.0, share) * tl.load(grown + guess)
    tl.store(gradient + guess * V + entry, share.to(gradient.dtype.element_ty), mask=entry < V)


@torch.library.custom_op("electra::score_and_sample", mutates_args=())
def score_and_sample(
    logits: Tensor, originals: Tensor, block_noise: Tensor, token_noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `logits` [N, V]: the loss of each original [N], a sample [N] by Gumbel noise, and logarithms of the sums [N].

    Noise is for whole blocks of the vocabulary first, and then for the tokens of the block that won: [N, V / BLOCK]
    and [N, BLOCK].
    """
    count, V = logits.shape
    losses, totals = (torch.empty(count, device=logits.device) for _ in range(2))
    sampled = torch.empty_like(originals)
    forward_kernel[(count,)](
        logits.contiguous(), originals, block_noise, token_noise, losses, sampled, totals, V,
        BLOCKS=block_noise.shape[1], BLOCK=token_noise.shape[1], AT_ONCE=BLOCKS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return losses, sampled, totals


@score_and_sample.register_fake
def _(logits, originals, block_noise, token_noise):
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return losses, torch.empty_like(originals), torch.empty_like(losses)


@torch.library.custom_op("electra::gradient_of_scores", mutates_args=())
def gradient_of_scores(logits: Tensor, originals: Tensor, totals: Tensor, grown: Tensor) -> Tensor:
    """The gradient [N, V] of logits from that of their losses, `grown` [N]."""
    count, V = logits.shape
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    entries = 4096
    backward_kernel[(count, triton.cdiv(V, entries))](
        logits.contiguous(), originals, totals, grown.contiguous(), gradient, V, ENTRIES=entries, num_warps=4
    )
    return gradient


@gradient_of_scores.register_fake
def _(logits, originals, totals, grown):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def backward(ctx, grown: Tensor, *_: Tensor):
    return gradient_of_scores(*ctx.saved_tensors, grown), None, None, None


score_and_sample.register_autograd(backward, setup_context=remember)
