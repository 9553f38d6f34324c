"""Speed of the kernels on a GPU: each against PyTorch's operations, or a training step without each (--ablate).

    python benchmarks/kernels.py [--rows 1024] [--length 128] [--width 256] [--heads 4] [--feedforward 1024]
        [--dropout 0] [--json]
    python benchmarks/kernels.py --ablate [--shapes small:128x128 base:128x512] [--styles classic modern]
        [--data shards/] [--steps 30] [--json]

Kernel and PyTorch compute the same from the same bf16 inputs, captured as CUDA graphs, so launch times do not count.
--ablate times a step of joint pre-training with all kernels, without each one that applies, and with none of them; they
are compiled in parallel, which takes a minute or two per shape, and timed one after the other.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from electra.kernels import dispatch
from electra.kernels.dispatch import HAS_TRITON
from electra.kernels.reference import apply_rope
from electra.model.encoder import make_rope

if HAS_TRITON:
    import triton

    from electra.kernels.attention import MAX_LENGTH, short_attention
    from electra.kernels.fused_layers import fused_classic_layer
    from electra.kernels.gelu import bias_gelu, geglu
    from electra.kernels.mlm_head import mlm_loss_and_sample

Function = Callable[..., Tensor]
ALL = "all"
EPSILON, NO_WINDOW, VOCAB_SIZE, EMBEDDING_WIDTH, MASK_FRACTION = 1e-12, -1, 30522, 128, 0.15
COMPILE_TIMEOUT = 300  # seconds
DOCUMENT_START = 0.004  # probability: a document has 250 tokens on average
APPLICABLE = {  # kernels used by a style at rows of up to 128 tokens, and at longer rows
    ("classic", "short"): ("short_attention", "classic_layer", "linear_gelu", "mlm_head", "weight_gradient_stream"),
    ("classic", "long"): ("varlen_attention", "classic_layer", "linear_gelu", "mlm_head", "weight_gradient_stream"),
    ("modern", "short"): ("short_attention", "modern_layer", "geglu", "mlm_head", "weight_gradient_stream"),
    ("modern", "long"): ("varlen_attention", "geglu", "mlm_head"),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels' inputs."""

    rows: int
    length: int
    width: int
    heads: int
    feedforward: int
    dropout: float


@dataclass(frozen=True)
class Case:
    """A kernel, the same function in PyTorch, and inputs."""

    name: str
    kernel: Function
    pytorch: Function
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Times:
    """Microseconds of the forward pass, and of forward and backward pass together."""

    name: str
    kernel_forward: float
    kernel_both: float
    pytorch_forward: float
    pytorch_both: float

    def __str__(self) -> str:
        backward, pytorch_backward = self.kernel_both - self.kernel_forward, self.pytorch_both - self.pytorch_forward
        return (
            f"{self.name:24} forward {self.kernel_forward:8.1f} µs ({self.pytorch_forward / self.kernel_forward:5.2f}× "
            f"as fast as PyTorch)   backward {backward:8.1f} µs ({pytorch_backward / backward:5.2f}×)"
        )


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def attention_case(sizes: Sizes, has_rope: bool) -> Case:
    """Attention within documents: with rotary positions (modern style), or with dropout (classic)."""
    K, dropout = sizes.width // sizes.heads, 0.0 if has_rope else sizes.dropout
    document_ids = (torch.rand(sizes.rows, sizes.length, device="cuda") < DOCUMENT_START).cumsum(1).int()
    mask = (document_ids[:, :, None] == document_ids[:, None, :])[:, None]  # [B, 1, L, L]
    rope = make_rope(sizes.length, K, 1e4, torch.device("cuda"))
    flat_rope = rope.squeeze(2).contiguous() if has_rope else None
    seed = torch.ones((), device="cuda", dtype=torch.int32) if dropout else None

    def kernel(qkv: Tensor) -> Tensor:
        return short_attention(qkv, document_ids, flat_rope, seed, NO_WINDOW, dropout)

    def pytorch(qkv: Tensor) -> Tensor:
        query, key, value = qkv.unbind(2)
        if has_rope:
            query, key = apply_rope(query, rope), apply_rope(key, rope)
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout).transpose(1, 2)

    qkv = random_input(sizes.rows, sizes.length, 3, sizes.heads, K)
    return Case("attention with RoPE" if has_rope else "attention", kernel, pytorch, (qkv,))


def layer_case(sizes: Sizes) -> Case:
    """A whole post-norm layer, one document per row."""
    D, F, dropout = sizes.width, sizes.feedforward, sizes.dropout
    shapes = (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (F, D), (F,), (D, F), (D,), (D,), (D,)
    parameters = [random_input(*shape).detach() * 0.02 for shape in shapes]
    for index in (4, 10):  # weights of the norms
        parameters[index] = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    for parameter in parameters:
        parameter.requires_grad_()

    def kernel(hidden: Tensor, *weights: Tensor) -> Tensor:
        return fused_classic_layer(
            hidden, list(weights), None, None, None,
            heads=sizes.heads, use_short_attention=True, attention_dropout=dropout, dropout=dropout, epsilon=EPSILON,
        )  # fmt: skip

    def pytorch(hidden: Tensor, *weights: Tensor) -> Tensor:
        qkv = functional.linear(hidden, *weights[:2]).unflatten(-1, (3, sizes.heads, -1))
        heads = [each.transpose(1, 2) for each in qkv.unbind(2)]
        context = functional.scaled_dot_product_attention(*heads, dropout_p=dropout).transpose(1, 2).flatten(2)
        attended = functional.dropout(functional.linear(context, *weights[2:4]), dropout)
        between = functional.layer_norm(hidden + attended, (D,), weights[4], weights[5], EPSILON)
        wide = functional.gelu(functional.linear(between, *weights[6:8]))
        narrow = functional.dropout(functional.linear(wide, *weights[8:10]), dropout)
        return functional.layer_norm(between + narrow, (D,), weights[10], weights[11], EPSILON)

    return Case("classic layer", kernel, pytorch, (random_input(sizes.rows, sizes.length, D), *parameters))


def gelu_cases(sizes: Sizes) -> list[Case]:
    N, F = sizes.rows * sizes.length, sizes.feedforward

    def pytorch_geglu(x: Tensor) -> Tensor:
        return functional.gelu(x[:, :F]) * x[:, F:]

    return [
        Case(
            "bias + GELU", bias_gelu, lambda x, bias: functional.gelu(x + bias), (random_input(N, F), random_input(F))
        ),
        Case("GEGLU", geglu, pytorch_geglu, (random_input(N, 2 * F),)),
    ]


def mlm_head_case(sizes: Sizes) -> Case:
    """MLM loss and samples at the masked positions."""
    masked = int(MASK_FRACTION * sizes.length)
    labels = torch.randint(VOCAB_SIZE, (sizes.rows, masked), device="cuda")
    keys = [torch.randint(2**31, (sizes.rows, 2), device="cuda") for _ in range(2)]

    def kernel(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        return mlm_loss_and_sample(states, table, bias, labels, *keys)[0]

    def pytorch(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        logits = functional.linear(states, table, bias)
        with torch.no_grad():
            (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)  # the sample
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    inputs = random_input(sizes.rows, masked, EMBEDDING_WIDTH), random_input(VOCAB_SIZE, EMBEDDING_WIDTH)
    return Case("MLM loss and sample", kernel, pytorch, (*inputs, random_input(VOCAB_SIZE)))


def cases(sizes: Sizes) -> Iterator[Case]:
    """One at a time, so that the memory of one is free for the next."""
    yield layer_case(sizes)
    yield attention_case(sizes, has_rope=False)
    yield attention_case(sizes, has_rope=True)
    yield from gelu_cases(sizes)
    yield mlm_head_case(sizes)


def measure(case: Case) -> Times:
    grad_out = torch.randn_like(case.kernel(*case.inputs))

    def microseconds(function: Callable[[], object]) -> float:
        return 1000 * triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median")

    def forward_and_both(function: Function) -> tuple[float, float]:
        with torch.no_grad():
            forward = microseconds(lambda: function(*case.inputs))
        return forward, microseconds(lambda: torch.autograd.grad(function(*case.inputs), case.inputs, grad_out))

    return Times(case.name, *forward_and_both(case.kernel), *forward_and_both(case.pytorch))


@dataclass(frozen=True)
class Variant:
    """A training step with or without some kernels."""

    shape: str
    style: str
    kernels: str  # for the table
    without: tuple[str, ...] = ()
    kernel_mode: str = "auto"


def variants(shape: str, style: str) -> list[Variant]:
    """A step with all kernels, without each that applies, and with none."""
    from pretrain import parse_shape

    rows = "short" if parse_shape(shape).length <= MAX_LENGTH else "long"
    without_one = [Variant(shape, style, f"without {name}", (name,)) for name in APPLICABLE[style, rows]]
    return [Variant(shape, style, ALL), *without_one, Variant(shape, style, "none", kernel_mode="off")]


def time_variant(
    variant: Variant, shards: Path, mode: str, steps: int, compiled: Barrier, timing: Lock, milliseconds: Queue
) -> None:
    """Compile a step, wait until all are compiled, and time it while no other step runs."""
    from pretrain import WARMUP_STEPS, Environment, build_electra, parse_shape
    from timing import mean_seconds, median_seconds

    from electra.data.shards import open_shards

    try:
        environment = Environment(open_shards(shards), torch.device("cuda"), peak_flops_per_second=1.0)
        with dispatch.without_kernels(*variant.without):
            settings = {"style": variant.style, "kernels": variant.kernel_mode}
            contender = build_electra(parse_shape(variant.shape), environment, mode, **settings)
            mean_seconds(contender.step, 1 + WARMUP_STEPS, environment.device)
            compiled.wait(COMPILE_TIMEOUT)
            with timing:
                mean_seconds(contender.step, WARMUP_STEPS, environment.device)
                seconds = median_seconds(contender.step, steps, environment.device)
        milliseconds.put((variant, 1000 * seconds))
    except BaseException:
        compiled.abort()
        milliseconds.put((variant, None))
        raise


def ablate(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of a training step by shape and style: with all kernels, without each, and with none.

    The steps of a shape are compiled in parallel, a process each, and then timed one after the other."""
    from synthetic_shards import write_synthetic_shards

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shards = arguments.data or write_synthetic_shards(Path(folder))
        for shape in arguments.shapes:
            steps = [variant for style in arguments.styles for variant in variants(shape, style)]
            shared = spawn.Barrier(len(steps)), spawn.Lock(), spawn.Queue()
            workers = [
                spawn.Process(target=time_variant, args=(step, shards, arguments.mode, arguments.steps, *shared))
                for step in steps
            ]
            for worker in workers:
                worker.start()
            times = dict(shared[2].get() for _ in workers)  # by variant
            for worker in workers:
                worker.join()
            for step in steps:
                fields = {"shape": step.shape, "style": step.style, "kernels": step.kernels}
                yield fields | {"milliseconds": times[step]}


def print_markdown(rows: Iterable[dict[str, Any]]) -> None:
    """A table of step times and their ratio to the step with all kernels."""
    print("| shape | style | kernels | step, ms | ratio |\n|---|---|---|---|---|")
    baseline: float | None = None
    for row in rows:
        baseline = row["milliseconds"] if row["kernels"] == ALL else baseline
        time, ratio = "failed", "–"
        if row["milliseconds"] is not None and baseline:
            time, ratio = f"{row['milliseconds']:.2f}", f"{row['milliseconds'] / baseline:.3f}"
        print(f"| {row['shape']} | {row['style']} | {row['kernels']} | {time} | {ratio} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128, help="at most 128")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--feedforward", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ablate", action="store_true", help="time a training step without each kernel")
    parser.add_argument("--shapes", nargs="+", default=["small:128x128", "base:128x512"], help="of --ablate")
    parser.add_argument("--styles", nargs="+", choices=["classic", "modern"], default=["classic"], help="of --ablate")
    parser.add_argument("--mode", choices=["eager", "compiled"], default="compiled", help="of --ablate")
    parser.add_argument("--data", type=Path, help="shards for --ablate (default: synthetic text)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of --ablate")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (HAS_TRITON and torch.cuda.is_available()):
        parser.error("the kernels need an NVIDIA GPU, Triton and a C compiler")
    if arguments.length > MAX_LENGTH:
        parser.error(f"--length is {arguments.length}; these kernels support at most {MAX_LENGTH} tokens per row")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.ablate:
        rows = ablate(arguments)
        if arguments.json:
            print(json.dumps(list(rows)))
        else:
            print(torch.cuda.get_device_name(), end="\n\n")
            print_markdown(rows)
        return
    names = ("rows", "length", "width", "heads", "feedforward", "dropout")
    sizes = Sizes(**{name: getattr(arguments, name) for name in names})
    times = [measure(case) for case in cases(sizes)]
    if arguments.json:
        print(json.dumps({"sizes": asdict(sizes), "microseconds": [asdict(each) for each in times]}, indent=2))
    else:
        print(torch.cuda.get_device_name(), *times, sep="\n")


if __name__ == "__main__":
    main()
