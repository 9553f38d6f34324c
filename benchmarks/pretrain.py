"""Speed of joint pre-training (replaced token detection): electra and transformers' models in a plain training loop.

    python benchmarks/pretrain.py [--data shards/] [--shapes small:128x128 base:128x512] [--dropout 0 0.1] [--json]
    python benchmarks/pretrain.py --compare-losses 200 [--data shards/] [--shapes small:128x128]

A step is forward, backward, gradient clipping and optimizer, on batches from shards (without --data: synthetic text).
electra is the trainer of `electra pretrain`, eager (--compile off) or compiled (--compile on, on a GPU as a CUDA
graph). The peers are ElectraForMaskedLM and ElectraForPreTraining with shared embeddings, autocast and fused AdamW:
`eager` in the usual implementation (vocabulary logits at all positions, an attention mask of ones), `compiled` with
torch.compile, logits at masked positions only and no attention mask. electra also restricts attention to documents,
the peers do not; --attention rows switches that off. Sizes, dropout, batch and number of masked positions are equal,
and the same FLOPs are counted for all. The time to the first step includes building and compiling; torch caches
kernels compiled in earlier runs.

--profile prints the time of the kernels by kind.
--compare-losses trains electra eagerly in fp32 and in its fastest mode on the same batches and compares the losses.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer import TransformersPair, eager_losses, static_losses, transformers_config
from synthetic_shards import write_synthetic_shards
from timing import (
    KindTime,
    format_profile,
    matmul_flops,
    mean_seconds,
    median_seconds,
    profile_step,
    reset,
    result_or_error,
)
from torch import nn
from transformers import ElectraForPreTraining

from electra.config import config_from_flat_values
from electra.data.loader import BatchLoader
from electra.data.shards import Shards, open_shards
from electra.errors import ConfigError, DataError
from electra.huggingface.convert import to_huggingface_tensors
from electra.huggingface.names import ARCHITECTURES
from electra.model.config import SIZES, ModelConfig
from electra.model.electra import Electra
from electra.model.flops import training_flops_per_row
from electra.objectives.masking import max_masked
from electra.pretraining.command import build_trainer, plan_and_check_phases
from electra.pretraining.config import PretrainConfig
from electra.pretraining.initialize import pair_config
from electra.pretraining.recipes import recipe_settings
from electra.pretraining.task import PretrainingTask
from electra.training.distributed import World
from electra.training.logging import RunningAverages

MODES = {"eager": "off", "compiled": "on"}  # --compile of `electra pretrain`
PEERS = {"eager": eager_losses, "compiled": static_losses}
LOSSES = ("generator", "discriminator")
WARMUP_STEPS = 5  # after the first step; CUDA graphs are captured in them
SMOOTHING_WINDOW = 20  # steps, of --compare-losses
FORWARD_LENGTH = 128
FORWARD_ROUNDS = 7  # in which the two forward passes alternate
Report = dict[str, Any]
Log = Callable[[Any], None]


@dataclass(frozen=True)
class Shape:
    """A model size and the shape of its batches."""

    size: str
    rows: int
    length: int
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.size}:{self.rows}x{self.length}"


@dataclass(frozen=True)
class Environment:
    """Data and device, the same for all contenders."""

    shards: Shards
    device: torch.device
    peak_flops_per_second: float  # FLOP/s of a large matrix product


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed of one contender."""

    shape: str
    dropout: float
    contender: str
    parameters: int = 0
    losses: dict[str, float] | None = None  # of the first step
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    speedup: float | None = None  # over the eager peer
    tflops: float = 0.0
    fraction_of_peak: float = 0.0
    memory_gb: float | None = None  # largest allocation on the GPU
    first_step_seconds: float = 0.0  # from building the model to the end of the first step
    ready_seconds: float = 0.0  # including the warm-up steps
    profile: dict[str, KindTime] | None = None
    error: str | None = None

    def __str__(self) -> str:
        name = f"{self.shape:<15} dropout {self.dropout:<4} {self.contender:<25}"
        if self.error is not None:
            return f"{name} failed: {self.error}"
        speedup = f"{self.speedup:5.2f}×" if self.speedup else "     –"
        memory = f"{self.memory_gb:6.1f} GB" if self.memory_gb is not None else "     – GB"
        speed = f"{self.tokens_per_second:>11,.0f} tokens/s  {speedup}  {1000 * self.step_seconds:8.2f} ms"
        work = f"{self.tflops:7.3g} TFLOP/s  {self.fraction_of_peak:6.1%} of the peak"
        profile = f"\n    {format_profile(self.profile)}" if self.profile else ""
        return f"{name} {speed}  {work}  {memory}  first step after {self.first_step_seconds:.1f} s{profile}"


@dataclass(frozen=True)
class Contender:
    """A model and its training step."""

    model: nn.Module
    step: Callable[[], None]
    losses: Callable[[], dict[str, float]]  # of the last step


def build_peer(shape: Shape, environment: Environment, mode: str) -> Contender:
    """Transformers' models in a plain training loop."""
    config, shards, device = run_config(shape, environment.shards, "eager"), environment.shards, environment.device
    torch.manual_seed(config.seed)
    pair = TransformersPair(pair_config(config, shards)).to(device).train()
    decay, count = config.optimizer.weight_decay, max_masked(config.loader.length, config.masking)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=config.optimizer.learning_rate, weight_decay=decay, fused=True)
    compute_losses = torch.compile(PEERS[mode]) if mode == "compiled" else PEERS[mode]
    batches, last = iter(BatchLoader(shards, config.loader, seed=config.seed, device=device)), {}

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = compute_losses(pair, next(batches).input_ids, count, shards.tokenizer.vocabulary)
            loss = losses["generator"] + config.objective.discriminator_weight * losses["discriminator"]
        loss.backward()
        nn.utils.clip_grad_norm_(pair.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        last.update({name: loss.detach() for name, loss in losses.items()})

    return Contender(pair, step, lambda: {name: loss.item() for name, loss in last.items()})


def build_electra(shape: Shape, environment: Environment, mode: str, **settings: Any) -> Contender:
    """The trainer of `electra pretrain`."""
    config = run_config(shape, environment.shards, mode, **settings)
    torch.manual_seed(config.seed)
    [phase] = plan_and_check_phases(config, environment.shards)
    task = PretrainingTask(phase, environment.shards, World(environment.device))
    trainer = build_trainer(task)
    trainer.run_step = trainer.build_step()

    def step() -> None:
        trainer.averages = RunningAverages()
        trainer.step()

    return Contender(task.model, step, lambda: trainer.averages.means())


def run_config(shape: Shape, shards: Shards, mode: str, **settings: Any) -> PretrainConfig:
    """The settings of the run, also of the peers; weights are initialised as in transformers."""
    recipe = recipe_settings("faithful", shape.size)
    values = {name: recipe[name] for name in ("learning_rate", "mask_fraction")} | {"compile": MODES[mode]}
    values |= {"size": shape.size, "length": shape.length, "batch_size": shape.rows, "dropout": shape.dropout}
    values |= {"data": shards.folder, "output": shards.folder / "unused", "steps": 10_000, "evaluation_rows": 32}
    return config_from_flat_values(PretrainConfig, values | settings)


def measure(
    build: Callable[[], Contender], shape: Shape, environment: Environment, arguments: argparse.Namespace
) -> Report:
    """The fields of a contender's measurement."""
    start = time.perf_counter()
    contender = build()
    contender.step()
    losses = contender.losses()  # synchronises the device
    first = time.perf_counter() - start
    ready = first + WARMUP_STEPS * mean_seconds(contender.step, WARMUP_STEPS, environment.device)
    seconds = median_seconds(contender.step, arguments.steps, environment.device)
    flops = step_flops(shape, environment.shards) / seconds
    is_cuda = environment.device.type == "cuda"
    return {
        "parameters": sum(parameter.numel() for parameter in contender.model.parameters()),
        "losses": {name: losses[name] for name in LOSSES},
        "step_seconds": seconds,
        "tokens_per_second": shape.rows * shape.length / seconds,
        "tflops": flops / 1e12,
        "fraction_of_peak": flops / environment.peak_flops_per_second,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else None,
        "first_step_seconds": first,
        "ready_seconds": ready,
        "profile": profile_step(contender.step, environment.device) if arguments.profile else None,
    }


def step_flops(shape: Shape, shards: Shards) -> float:
    """FLOPs of a step with vocabulary logits at masked positions only."""
    config = run_config(shape, shards, "eager")
    length = config.loader.length
    return shape.rows * training_flops_per_row(pair_config(config, shards), length, max_masked(length, config.masking))


def contenders(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Contender]]]:
    """Names and builders, peers first."""
    for mode in arguments.peers:
        yield f"transformers {mode}", partial(build_peer, mode=mode)
    optimizers = dict.fromkeys(("adamw", arguments.optimizer))
    for optimizer, attention, mode in product(optimizers, arguments.attention, arguments.modes):
        notes = [*(["whole rows"] if attention == "rows" else []), *([optimizer] if optimizer != "adamw" else [])]
        settings = {"optimizer": optimizer, "cross_document_attention": attention == "rows"}
        yield ", ".join([f"electra {mode}", *notes]), partial(build_electra, mode=mode, **settings)


def compare(shape: Shape, environment: Environment, arguments: argparse.Namespace, log: Log) -> list[Measurement]:
    """Measure all contenders on one shape."""
    measurements: list[Measurement] = []
    for name, build in contenders(arguments):
        run = partial(measure, partial(build, shape, environment), shape, environment, arguments)
        fields = result_or_error(run, environment.device)
        measurement = Measurement(shape=str(shape), dropout=shape.dropout, contender=name, **fields)
        eager = next((each for each in [*measurements, measurement] if each.contender == "transformers eager"), None)
        if eager is not None and not measurement.error and not eager.error:
            measurement = replace(measurement, speedup=measurement.tokens_per_second / eager.tokens_per_second)
        measurements.append(measurement)
        log(measurement)
    log(check_equal_work(measurements))
    return measurements


def check_equal_work(measurements: list[Measurement]) -> str:
    """Whether all contenders have the same number of parameters and about the same first losses."""
    finished = [each for each in measurements if each.losses]
    if not finished:
        return "no measurements"
    counts = sorted({each.parameters for each in finished})
    ranges = {name: sorted(each.losses[name] for each in finished if each.losses) for name in LOSSES}
    is_equal = len(counts) == 1 and all(values[-1] - values[0] < 0.1 * values[-1] for values in ranges.values())
    losses = ", ".join(f"{name} {values[0]:.3f} to {values[-1]:.3f}" for name, values in ranges.items())
    parameters = " and ".join(f"{count:,}" for count in counts)
    return f"{'equal' if is_equal else 'NOT equal'} work: {parameters} parameters; first losses: {losses}"


def compare_losses(shape: Shape, environment: Environment, arguments: argparse.Namespace) -> Report:
    """The largest relative difference of smoothed losses between eager fp32 and the last of --modes, and their ends."""
    steps = arguments.compare_losses
    build = partial(build_electra, shape, environment, optimizer=arguments.optimizer, steps=steps)
    reference = smoothed_losses(build(mode="eager", precision="fp32"), steps)
    reset(environment.device)
    fast = smoothed_losses(build(mode=arguments.modes[-1]), steps)
    report: Report = {"contender": f"electra {arguments.modes[-1]}", "steps": steps}
    for name in LOSSES:
        report[f"{name}_difference"] = float((np.abs(fast[name] - reference[name]) / reference[name]).max())
        report[f"{name}_last"] = [float(losses[name][-1]) for losses in (reference, fast)]
    return report


def smoothed_losses(contender: Contender, steps: int) -> dict[str, np.ndarray]:
    losses = []
    for _ in range(steps):
        contender.step()
        losses.append(contender.losses())
    window = np.ones(min(SMOOTHING_WINDOW, steps)) / min(SMOOTHING_WINDOW, steps)
    return {name: np.convolve([each[name] for each in losses], window, "valid") for name in LOSSES}


@torch.no_grad()
def compare_forward(shape: Shape, device: torch.device) -> Report:
    """Milliseconds of the discriminator's forward pass in electra and transformers, with the same weights."""
    config = ModelConfig(size=shape.size).electra_config()
    ours = Electra(config).require_discriminator().to(device).eval()
    theirs = ElectraForPreTraining(transformers_config(config.discriminator)).to(device).eval()
    theirs.load_state_dict(to_huggingface_tensors(ours.state_dict(), ARCHITECTURES["ElectraForPreTraining"]))
    input_ids = torch.randint(config.discriminator.vocab_size, (shape.rows, shape.length), device=device)
    difference = (ours(input_ids) - theirs(input_ids).logits).abs().max().item()
    repetitions, models = max(2, 64 // shape.rows), (ours, theirs)
    rounds = [
        [mean_seconds(partial(model, input_ids), repetitions, device) for model in models]
        for _ in range(FORWARD_ROUNDS)
    ]
    electra_ms, transformers_ms = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
    speedup = transformers_ms / electra_ms
    return {"electra_ms": electra_ms, "transformers_ms": transformers_ms, "speedup": speedup, "difference": difference}


def log_report(shape: Shape, run: Callable[[], Report], device: torch.device, log: Log) -> Report:
    report = {"shape": str(shape), "dropout": shape.dropout} | result_or_error(run, device)
    log(
        "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in report.items()
        )
    )
    return report


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)", text)
    if match is None or match[1] not in SIZES:
        sizes = ", ".join(SIZES)
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE:ROWSxLENGTH, such as small:128x128; sizes are {sizes}")
    return Shape(match[1], int(match[2]), int(match[3]))


def parse_arguments(command_line: list[str] | None, is_cuda: bool) -> argparse.Namespace:
    shapes = "small:128x128 small:1024x128 base:128x512 large:64x512" if is_cuda else "tiny:16x64 small:8x128"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder written by electra shard (default: synthetic text)")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=list(map(parse_shape, shapes.split())))
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS) if is_cuda else ["eager"])
    parser.add_argument("--modes", nargs="*", choices=MODES, help="of electra (default: on a GPU both, else eager)")
    parser.add_argument("--attention", nargs="+", choices=["documents", "rows"], default=["documents"])
    parser.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: measure electra with both"
    )
    parser.add_argument("--steps", type=int, default=30 if is_cuda else 10, help="timed steps")
    parser.add_argument(
        "--forward", nargs="*", type=int, default=[] if is_cuda else [1, 32], help="rows of forward passes"
    )
    parser.add_argument("--profile", action="store_true", help="print the time of kernels by kind")
    parser.add_argument("--compare-losses", type=int, metavar="STEPS", help="compare losses instead of speed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(command_line)
    if arguments.modes is None:
        arguments.modes = list(MODES) if is_cuda else ["eager" if arguments.compare_losses is None else "compiled"]
    counts = [("--steps", arguments.steps), ("--compare-losses", arguments.compare_losses)]
    for name, number in [*counts, *(("--forward", rows) for rows in arguments.forward)]:
        if number is not None and number < 1:
            parser.error(f"{name} is {number}; it must be at least 1")
    if arguments.compare_losses is not None and not arguments.modes:
        parser.error("--compare-losses needs one of --modes")
    return arguments


def all_shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Every shape with every dropout."""
    return [replace(shape, dropout=dropout) for shape in arguments.shapes for dropout in arguments.dropout]


def run_benchmark(environment: Environment, arguments: argparse.Namespace, log: Log) -> Report:
    device, shapes, compares_losses = environment.device, all_shapes(arguments), arguments.compare_losses is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    log(f"{name}; matrix products run at {environment.peak_flops_per_second / 1e12:.3g} TFLOP/s")
    report: Report = {
        "device": name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "peak_tflops": environment.peak_flops_per_second / 1e12,
    }
    if compares_losses:
        run = partial(compare_losses, environment=environment, arguments=arguments)
        return report | {"losses": [log_report(shape, partial(run, shape), device, log) for shape in shapes]}
    groups = [compare(shape, environment, arguments, log) for shape in shapes]
    sizes = dict.fromkeys(shape.size for shape in shapes)
    forward = [Shape(size, rows, FORWARD_LENGTH) for size, rows in product(sizes, arguments.forward)]
    return report | {
        "measurements": [asdict(each) for measurements in groups for each in measurements],
        "checks": [check_equal_work(measurements) for measurements in groups],
        "forward": [log_report(each, partial(compare_forward, each, device), device, log) for each in forward],
    }


def main(command_line: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = parse_arguments(command_line, is_cuda=device.type == "cuda")
    log: Log = (lambda line: None) if arguments.json else partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            shards = open_shards(arguments.data or write_synthetic_shards(Path(folder)))
            for shape in all_shapes(arguments):
                plan_and_check_phases(run_config(shape, shards, "eager"), shards)
        except (ConfigError, DataError) as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        report = run_benchmark(Environment(shards, device, matmul_flops(device)), arguments, log)
    if arguments.json:
        print(json.dumps(report))
    measurements = report.get("measurements", [])
    if measurements and all(each["error"] for each in measurements):
        sys.exit(1)


if __name__ == "__main__":
    main()
