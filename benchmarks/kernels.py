"""Kernels on a GPU: each one beside PyTorch's operations, and a training step with each one switched off alone.

    python benchmarks/kernels.py [--rows 1024] [--length 128] [--width 256] [--heads 4] [--feedforward 1024]
        [--dropout 0] [--json]
    python benchmarks/kernels.py --ablate [--data shards/] [--size small] [--tokens 65536]
        [--settings classic:128 modern:128 classic:512 modern:512] [--json]

Single kernels: both sides compute the same from the same inputs in bf16, as CUDA graphs, so that launches do not count;
with dropout each side draws its own noise. --ablate: the step of `electra pretrain`, compiled and captured, on shards
of generated words unless --data names others; every row is compiled anew, which takes most of a minute.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from made_shards import made_shards
from timing import clear, median_seconds
from torch import Tensor
from torch.nn import functional

from electra.config import construct
from electra.data.shards import open_shards
from electra.kernels import dispatch
from electra.kernels.reference import apply_rope
from electra.model.attention import make_rope
from electra.pretraining.command import plan
from electra.pretraining.config import PretrainConfig, recipe_settings
from electra.pretraining.task import PretrainingTask
from electra.training.logging import RunningAverages
from electra.training.trainer import Trainer

if dispatch.HAS_TRITON:
    import triton

    from electra.kernels.attention import MAX_LENGTH, short_attention
    from electra.kernels.fused_layers import fused_classic_layer
    from electra.kernels.gelu import bias_gelu, geglu
    from electra.kernels.mlm_head import mlm_loss_and_sample

Function = Callable[..., Tensor]
EPSILON, NO_WINDOW, VOCABULARY, EMBEDDING_WIDTH, MASK_FRACTION = 1e-12, -1, 30522, 128, 0.15
WARMUP_STEPS, TIMED_STEPS = 10, 50
ABLATIONS = {  # style and length of rows: what is switched off
    "classic:128": ["short_attention", "classic_layer", "linear_gelu", "mlm_head", "weight_gradient_stream", "all"],
    "modern:128": ["short_attention", "modern_layer", "mlm_head", "weight_gradient_stream", "all"],
    "classic:512": ["varlen_attention", "classic_layer"],
    "modern:512": ["varlen_attention", "geglu"],
}


@dataclass(frozen=True)
class Sizes:
    rows: int
    length: int
    width: int
    heads: int
    feedforward: int
    dropout: float


@dataclass(frozen=True)
class Case:
    """A kernel, the same in PyTorch's operations, and their inputs."""

    name: str
    ours: Function
    torchs: Function
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Timing:
    """Microseconds of the forward pass, and of forward and backward together."""

    name: str
    forward: float
    both: float
    torch_forward: float
    torch_both: float

    def __str__(self) -> str:
        backward, torch_backward = self.both - self.forward, self.torch_both - self.torch_forward
        return (
            f"{self.name:20} forward {self.forward:8.1f} µs ({self.torch_forward / self.forward:5.2f}× as fast as "
            f"PyTorch)   backward {backward:8.1f} µs ({torch_backward / backward:5.2f}×)"
        )


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def attention_case(sizes: Sizes, has_rope: bool) -> Case:
    """Attention within documents of about 250 tokens; with rotary positions, or else with dropout."""
    K, dropout = sizes.width // sizes.heads, 0.0 if has_rope else sizes.dropout
    document_ids = (torch.rand(sizes.rows, sizes.length, device="cuda") < 0.004).cumsum(1).int()
    rope = make_rope(sizes.length, K, 1e4, torch.device("cuda"))
    mask = (document_ids[:, :, None] == document_ids[:, None, :])[:, None]
    kernel_rope = rope.squeeze(2).contiguous() if has_rope else None
    seed = torch.ones((), device="cuda", dtype=torch.int32) if dropout else None

    def ours(qkv: Tensor) -> Tensor:
        return short_attention(qkv, document_ids, kernel_rope, seed, NO_WINDOW, dropout)

    def torchs(qkv: Tensor) -> Tensor:
        query, key, value = qkv.unbind(2)
        if has_rope:
            query, key = apply_rope(query, rope), apply_rope(key, rope)
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout).transpose(1, 2)

    qkv = random_input(sizes.rows, sizes.length, 3, sizes.heads, K)
    return Case("attention with RoPE" if has_rope else "attention", ours, torchs, (qkv,))


def layer_case(sizes: Sizes) -> Case:
    """A whole post-norm layer, one document a row."""
    D, F, rate = sizes.width, sizes.feedforward, sizes.dropout
    shapes = (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (F, D), (F,), (D, F), (D,), (D,), (D,)
    parameters = [random_input(*shape).detach() * 0.02 for shape in shapes]
    for index in (4, 10):  # weights of the norms
        parameters[index] = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    for parameter in parameters:
        parameter.requires_grad_()
    options = {"heads": sizes.heads, "is_short": True, "attention_dropout": rate, "dropout": rate, "epsilon": EPSILON}

    def ours(hidden: Tensor, *weights: Tensor) -> Tensor:
        return fused_classic_layer(hidden, list(weights), None, None, None, **options)

    def torchs(hidden: Tensor, *weights: Tensor) -> Tensor:
        qkv = functional.linear(hidden, *weights[:2]).unflatten(-1, (3, sizes.heads, -1))
        heads = [each.transpose(1, 2) for each in qkv.unbind(2)]
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=rate).transpose(1, 2).flatten(2)
        attended = functional.dropout(functional.linear(mixed, *weights[2:4]), rate)
        between = functional.layer_norm(hidden + attended, (D,), *weights[4:6], EPSILON)
        activated = functional.gelu(functional.linear(between, *weights[6:8]))
        down = functional.dropout(functional.linear(activated, *weights[8:10]), rate)
        return functional.layer_norm(between + down, (D,), *weights[10:], EPSILON)

    return Case("classic layer", ours, torchs, (random_input(sizes.rows, sizes.length, D), *parameters))


def gelu_cases(sizes: Sizes) -> list[Case]:
    N, F = sizes.rows * sizes.length, sizes.feedforward
    inputs = random_input(N, F), random_input(F)
    biased = Case("bias + GELU", bias_gelu, lambda x, bias: functional.gelu(x + bias), inputs)
    gated = Case("GeGLU", geglu, lambda x: functional.gelu(x[:, :F]) * x[:, F:], (random_input(N, 2 * F),))
    return [biased, gated]


def mlm_head_case(sizes: Sizes) -> Case:
    """Losses at the masked positions; both sides also draw samples."""
    M = int(MASK_FRACTION * sizes.length)
    labels = torch.randint(VOCABULARY, (sizes.rows, M), device="cuda")
    keys = [torch.randint(2**31, (sizes.rows, 2), device="cuda") for _ in range(2)]

    def torchs(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        logits = functional.linear(states, table, bias)
        with torch.no_grad():
            (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    inputs = random_input(sizes.rows, M, EMBEDDING_WIDTH), random_input(VOCABULARY, EMBEDDING_WIDTH)
    return Case(
        "MLM loss and sample",
        lambda *tensors: mlm_loss_and_sample(*tensors, labels, *keys)[0],
        torchs,
        (*inputs, random_input(VOCABULARY)),
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """One at a time: the inputs of a case are freed before the next is built."""
    yield layer_case(sizes)
    yield attention_case(sizes, has_rope=False)
    yield attention_case(sizes, has_rope=True)
    yield from gelu_cases(sizes)
    yield mlm_head_case(sizes)


def time_case(case: Case) -> Timing:
    grad_out = torch.randn_like(case.ours(*case.inputs))

    def microseconds(function: Callable[[], object]) -> float:
        return 1000 * triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median")

    def times(function: Function) -> tuple[float, float]:
        with torch.no_grad():
            forward = microseconds(lambda: function(*case.inputs))
        return forward, microseconds(lambda: torch.autograd.grad(function(*case.inputs), case.inputs, grad_out))

    return Timing(case.name, *times(case.ours), *times(case.torchs))


def step_milliseconds(shards: Path, size: str, tokens: int, style: str, length: int, kernels: str = "auto") -> float:
    """The median time of a step of `electra pretrain` with rows of `length` tokens."""
    device = torch.device("cuda")
    settings = {"size": size, "style": style, "length": length, "batch_size": tokens // length, "kernels": kernels}
    settings |= {"data": shards, "output": shards / "unused", "steps": 10_000, "evaluation_rows": 32}
    settings |= {} if style == "classic" else {"sinusoidal_positions": False}
    config, opened = construct(PretrainConfig, recipe_settings("fast", size) | settings), open_shards(shards)
    [phase] = plan(config, opened)
    task = PretrainingTask(phase, opened, device)
    budget, graphs = phase.stage_budget, task.captures_graph
    trainer = Trainer(task, config.optimizer, config.trainer, budget, config.output, seed=config.seed,
                      cuda_graphs=graphs, stop_at=phase.stage_end)  # fmt: skip
    trainer.run_step = trainer.graphed_step() if graphs else trainer.compute_step

    def step() -> None:
        trainer.averages = RunningAverages()
        trainer.step()

    for _ in range(WARMUP_STEPS):
        step()
    return 1000 * median_seconds(step, TIMED_STEPS, device)


def ablate(shards: Path, size: str, tokens: int, settings: list[str]) -> Iterator[dict[str, object]]:
    """Step times with all kernels, without each one, and without all."""
    for setting in settings:
        style, length = setting.split(":")
        baseline = None
        for name in [None, *ABLATIONS[setting]]:
            clear(torch.device("cuda"))
            with ExitStack() as stack:
                if name not in (None, "all"):
                    stack.enter_context(dispatch.without_kernels(name))
                mode = "off" if name == "all" else "auto"
                milliseconds = step_milliseconds(shards, size, tokens, style, int(length), mode)
            baseline = baseline or milliseconds
            yield {
                "setting": setting,
                "without": name,
                "milliseconds": milliseconds,
                "ratio": milliseconds / baseline,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row, at most 128")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--feedforward", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ablate", action="store_true", help="time training steps without each kernel instead")
    parser.add_argument("--data", type=Path, help="shards for --ablate")
    parser.add_argument("--size", default="small", help="size of the models for --ablate")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch for --ablate")
    parser.add_argument("--settings", nargs="+", choices=ABLATIONS, default=list(ABLATIONS), help="for --ablate")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (dispatch.HAS_TRITON and torch.cuda.is_available()):
        parser.error("the kernels need an NVIDIA GPU, Triton and a C compiler")
    if arguments.length > MAX_LENGTH:
        parser.error(f"--length is {arguments.length}; the kernels take rows of at most {MAX_LENGTH} tokens")
    print(torch.cuda.get_device_name())
    if arguments.ablate:
        with tempfile.TemporaryDirectory() as folder:
            shards = arguments.data or made_shards(Path(folder))
            for row in ablate(shards, arguments.size, arguments.tokens, arguments.settings):
                line = "{setting:12} without {without!s:24} {milliseconds:7.2f} ms  {ratio:.2f}×"
                print(json.dumps(row) if arguments.json else line.format(**row), flush=True)
        return
    sizes = Sizes(**{name: getattr(arguments, name) for name in Sizes.__dataclass_fields__})
    for timing in map(time_case, cases(sizes)):
        print(json.dumps(asdict(timing)) if arguments.json else timing, flush=True)


if __name__ == "__main__":
    main()
