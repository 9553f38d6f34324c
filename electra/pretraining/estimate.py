"""What a run would be, before it is run: parameters, operations, tokens, time and memory."""

from dataclasses import dataclass, replace

import torch

from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Electra
from electra.training.hardware import device_memory, measure_flops
from electra.training.logging import format_duration
from electra.training.trainer import Budget

EFFICIENCY = {"cuda": 0.25, "cpu": 0.5}  # of a plain matrix product's speed that training reaches, roughly
RECOMPUTING = 4 / 3  # of the time: a forward pass more
PER_PARAMETER = 16  # bytes: weight, gradient and two moments in fp32


@dataclass(frozen=True)
class Estimate:
    """What a run is, in words, and its size; time and memory are estimates."""

    outline: list[str]
    parameters: int
    steps: int
    tokens: int
    epochs: float
    flops: float
    minutes: float
    memory_bytes: int
    available_bytes: int
    device: str

    def __str__(self) -> str:
        lines = [
            *self.outline,
            f"parameters  {self.parameters:,}",
            f"steps       {self.steps:,}",
            f"tokens      {self.tokens:,} ({self.epochs:.2f} times the training text)",
            f"operations  {self.flops:.3g} FLOPs",
            f"time        about {format_duration(self.minutes)} on this machine's {self.device}",
            f"memory      about {self.memory_bytes / 1e9:.1f} of {self.available_bytes / 1e9:.0f} GB",
        ]
        if self.device == "cpu" and self.minutes > 24 * 60:
            lines.append("a CPU is slow for this: try --size tiny, fewer --steps, or --minutes")
        if self.memory_bytes > self.available_bytes:
            lines.append(
                "it may not fit: take the batch in pieces with --micro-batches, or use --activation-checkpointing"
            )
        return "\n".join(lines)


def estimate(
    pair: ElectraConfig,
    *,
    budget: Budget,
    rows: int,
    micro_rows: int,
    length: int,
    masked: int,
    row_flops: int,
    recomputes: bool,
    tokens_in_data: int,
    device: torch.device,
    precision: torch.dtype,
) -> Estimate:
    """The size of a run over `rows` of `length` tokens a step, `micro_rows` of them at a time."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Electra(pair).parameters())
    step_flops = rows * row_flops
    speed = measure_flops(device, precision) * EFFICIENCY[device.type] / (RECOMPUTING if recomputes else 1)
    steps = budget.steps or max(1, int((budget.seconds or 0) * speed / step_flops))
    activations = sum(
        activation_bytes(part, length, precision, recomputes) for part in (pair.generator, pair.discriminator) if part
    )
    predicting = [pair.generator, pair.discriminator if pair.head == "mlm" else None]  # copying: in chunks
    logits = 3 * 4 * masked * sum(part.vocab_size for part in predicting if part)  # logits, noise, gradient in fp32
    return Estimate(
        outline=[],
        parameters=parameters,
        steps=steps,
        tokens=steps * rows * length,
        epochs=steps * rows * length / max(1, tokens_in_data),
        flops=float(steps * step_flops),
        minutes=steps * step_flops / speed / 60,
        memory_bytes=PER_PARAMETER * parameters + micro_rows * (activations + logits),
        available_bytes=device_memory(device),
        device=device.type,
    )


def together(estimates: list[Estimate]) -> Estimate:
    """Several phases as one run: its parts add up, and the hungriest needs the memory."""
    added = ("steps", "tokens", "epochs", "flops", "minutes")
    sums = {name: sum(getattr(one, name) for one in estimates) for name in added}
    most = max(estimates, key=lambda one: one.memory_bytes)
    return replace(most, **sums, parameters=max(one.parameters for one in estimates))


def activation_bytes(config: EncoderConfig, length: int, precision: torch.dtype, recomputes: bool) -> int:
    """What the backward pass needs of one row: some vectors per token and layer, or with recomputing one."""
    size = torch.finfo(precision).bits // 8
    vectors = config.width if recomputes else 10 * config.width + 2 * config.feedforward
    return size * length * config.layers * vectors
