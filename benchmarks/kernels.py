"""Our kernels by themselves, on a GPU: what they take, forward and back, and what torch's own operations take.

    python benchmarks/kernels.py [--rows 1024] [--length 128] [--width 256] [--heads 4] [--feedforward 1024]
        [--dropout 0] [--json]

Both sides compute the same from the same inputs in bf16, recorded as CUDA graphs, so that launches do not count;
with dropout, each side draws noise of its own.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from electra.kernels.dispatch import HAS_TRITON
from electra.kernels.reference import apply_rope
from electra.model.attention import make_rope

if HAS_TRITON:
    import triton

    from electra.kernels.attention import MAX_LENGTH, short_attention
    from electra.kernels.fused_layers import fused_classic_layer
    from electra.kernels.gelu import bias_gelu, geglu
    from electra.kernels.mlm_head import mlm_loss_and_sample

Way = Callable[..., Tensor]
EPSILON, NO_WINDOW, VOCABULARY, EMBEDDING, MASKED = 1e-12, -1, 30522, 128, 0.15


@dataclass(frozen=True)
class Sizes:
    """What the kernels work on."""

    rows: int
    length: int
    width: int
    heads: int
    feedforward: int
    dropout: float


@dataclass(frozen=True)
class Case:
    """One thing to compute: our way, torch's, and what from."""

    name: str
    ours: Way
    torchs: Way
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Found:
    """Microseconds forward, and forward and back; of ours and of torch's."""

    name: str
    forward: float
    both: float
    torchs_forward: float
    torchs_both: float

    def __str__(self) -> str:
        back, theirs = self.both - self.forward, self.torchs_both - self.torchs_forward
        return (
            f"{self.name:24} forward {self.forward:8.1f} µs ({self.torchs_forward / self.forward:5.2f}× as fast as "
            f"torch)   back {back:8.1f} µs ({theirs / back:5.2f}×)"
        )


def numbers(*shape: int) -> Tensor:
    """Random ones, whose gradient is asked for."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def documents_of(sizes: Sizes) -> Tensor:
    """One document in 250 tokens starts anew."""
    return (torch.rand(sizes.rows, sizes.length, device="cuda") < 0.004).cumsum(1).int()


def attention(sizes: Sizes, is_turned: bool) -> Case:
    """Tokens look at those of their document; with rotary positions (the modern style), or with dropout."""
    K, dropout = sizes.width // sizes.heads, 0.0 if is_turned else sizes.dropout
    documents, turns = documents_of(sizes), make_rope(sizes.length, K, 1e4, torch.device("cuda"))
    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    flat, seed = turns.squeeze(2).contiguous(), torch.ones((), device="cuda", dtype=torch.int32)
    ways = (flat if is_turned else None), (seed if dropout else None), NO_WINDOW, dropout

    def torchs(qkv: Tensor) -> Tensor:
        query, key, value = qkv.unbind(2)
        if is_turned:
            query, key = apply_rope(query, turns), apply_rope(key, turns)
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        return functional.scaled_dot_product_attention(*heads, attn_mask=same, dropout_p=dropout).transpose(1, 2)

    qkv = numbers(sizes.rows, sizes.length, 3, sizes.heads, K)
    name = "attention, turned" if is_turned else "attention"
    return Case(name, lambda qkv: short_attention(qkv, documents, *ways), torchs, (qkv,))


def layer(sizes: Sizes) -> Case:
    """A whole post-norm layer over one document a row."""
    N, D, F, rate = (sizes.rows, sizes.length), sizes.width, sizes.feedforward, sizes.dropout
    shapes = (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (F, D), (F,), (D, F), (D,), (D,), (D,)
    parameters = [numbers(*shape).detach() * 0.02 for shape in shapes]
    for place in (4, 10):  # the norms' weights
        parameters[place] = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    for parameter in parameters:
        parameter.requires_grad_()

    def ours(hidden: Tensor, *weights: Tensor) -> Tensor:
        return fused_classic_layer(
            hidden, list(weights), None, None, None,
            heads=sizes.heads, is_short=True, attention_dropout=rate, dropout=rate, epsilon=EPSILON,
        )  # fmt: skip

    def torchs(hidden: Tensor, *weights: Tensor) -> Tensor:
        qkv = functional.linear(hidden, *weights[:2]).unflatten(-1, (3, sizes.heads, -1))
        heads = [each.transpose(1, 2) for each in qkv.unbind(2)]
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=rate).transpose(1, 2).flatten(2)
        found = functional.dropout(functional.linear(mixed, *weights[2:4]), rate)
        between = functional.layer_norm(hidden + found, (D,), *weights[4:6], EPSILON)
        wide = functional.gelu(functional.linear(between, *weights[6:8]))
        found = functional.dropout(functional.linear(wide, *weights[8:10]), rate)
        return functional.layer_norm(between + found, (D,), *weights[10:], EPSILON)

    return Case("a layer", ours, torchs, (numbers(*N, D), *parameters))


def activations(sizes: Sizes) -> list[Case]:
    """GELU with a bias, and with a gate."""
    N, F = sizes.rows * sizes.length, sizes.feedforward
    biased = Case("bias and GELU", bias_gelu, lambda x, b: functional.gelu(x + b), (numbers(N, F), numbers(F)))

    def gated(both: Tensor) -> Tensor:
        return functional.gelu(both[:, :F]) * both[:, F:]

    return [biased, Case("GELU with a gate", geglu, gated, (numbers(N, 2 * F),))]


def vocabulary(sizes: Sizes) -> Case:
    """The losses of guesses at masked tokens; samples are drawn with them."""
    guesses = int(MASKED * sizes.length)
    originals = torch.randint(VOCABULARY, (sizes.rows, guesses), device="cuda")
    keys = [torch.randint(2**31, (sizes.rows, 2), device="cuda") for _ in range(2)]

    def torchs(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        logits = functional.linear(states, table, bias)
        with torch.no_grad():
            (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)  # drawn, though nobody looks
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), originals.flatten(), reduction="none")
        return losses.view_as(originals)

    inputs = numbers(sizes.rows, guesses, EMBEDDING), numbers(VOCABULARY, EMBEDDING), numbers(VOCABULARY)
    return Case("loss and draw", lambda *given: mlm_loss_and_sample(*given, originals, *keys)[0], torchs, inputs)


def microseconds(act: Callable[[], object]) -> float:
    """Of a recorded run."""
    return 1000 * triton.testing.do_bench_cudagraph(act, rep=50, return_mode="median")


def measured(case: Case) -> Found:
    """Time a case."""
    grown = torch.randn_like(case.ours(*case.inputs))

    def times(way: Way) -> tuple[float, float]:
        with torch.no_grad():
            forward = microseconds(lambda: way(*case.inputs))
        return forward, microseconds(lambda: torch.autograd.grad(way(*case.inputs), case.inputs, grown))

    return Found(case.name, *times(case.ours), *times(case.torchs))


def cases(sizes: Sizes) -> Iterator[Case]:
    """One after the other: each is forgotten before the next is made."""
    yield layer(sizes)
    yield attention(sizes, is_turned=False)
    yield attention(sizes, is_turned=True)
    yield from activations(sizes)
    yield vocabulary(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128, help="of rows; at most 128")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--feedforward", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    as_json, sizes = given.pop("json"), Sizes(**given)
    if not (HAS_TRITON and torch.cuda.is_available()):
        parser.error("our kernels need an NVIDIA GPU, Triton and a C compiler, and not all of these are here")
    if sizes.length > MAX_LENGTH:
        parser.error(f"--length is {sizes.length}; these kernels take rows of at most {MAX_LENGTH} tokens")
    found = [measured(case) for case in cases(sizes)]
    if as_json:
        print(json.dumps({"sizes": asdict(sizes), "microseconds": [asdict(one) for one in found]}, indent=2))
    else:
        print(torch.cuda.get_device_name(), *found, sep="\n")


if __name__ == "__main__":
    main()
