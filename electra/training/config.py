"""Settings of the optimizer, the trainer and the hardware; parsing flags needs them, so this imports no torch."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from electra.errors import ConfigError, check_range

OptimizerName = Literal["adam", "adamw", "muon"]
ScheduleName = Literal["linear", "released", "cosine", "wsd", "decay"]
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Compile = Literal["auto", "on", "off"]
Kernels = Literal["auto", "off"]
TrackerName = Literal["none", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Annotated[OptimizerName, Parameter(name="--optimizer")] = "adamw"
    """adam: AdamW without bias correction, as in the released ELECTRA code; adamw; muon: Muon for the weight matrices
    of the layers, AdamW for the other parameters."""
    learning_rate: float = 5e-4
    """Peak learning rate."""
    schedule: ScheduleName = "linear"
    """linear: warm-up, then linear decay to 0; released: linear decay from the first step, multiplied by the warm-up,
    as in the released ELECTRA code; cosine: warm-up, then cosine decay to 0; wsd: warm-up, constant, then linear decay
    to 0; decay: linear decay to 0 without warm-up, to end a wsd run."""
    warmup: float = 0.1
    """Warm-up: fraction of all steps (below 1) or a number of steps."""
    decay_fraction: float = 0.2
    """wsd: fraction of all steps over which the learning rate decays; 0: never."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and normalization weights."""
    embedding_weight_decay: float | None = None
    """Weight decay of embeddings, their projection and heads; unless the recipe sets it, as --weight-decay."""
    beta1: float = 0.9
    """Adam: decay rate of the mean of gradients."""
    beta2: float = 0.999
    """Adam: decay rate of the mean of squared gradients."""
    epsilon: float = 1e-6
    """Adam: added to the root of the mean of squared gradients."""
    momentum: float = 0.95
    """Momentum of Muon."""
    max_grad_norm: float = 1.0
    """Clip the norm of all gradients to this value; 0: no clipping."""

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", "epsilon", above=0)
        check_range(self, "warmup", "weight_decay", "embedding_weight_decay", "max_grad_norm", at_least=0)
        check_range(self, "beta1", "beta2", "momentum", at_least=0, below=1)
        check_range(self, "decay_fraction", at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Micro-batches, and intervals of logging, evaluation and checkpoints."""

    micro_batches: int = 1
    """Split the rows of each rank into this many micro-batches and accumulate their gradients: less memory, equal
    results."""
    log_every: int = 50
    """Steps between lines of training metrics in metrics.jsonl."""
    evaluate_every: int = 1000
    """Steps between evaluations on held-out data."""
    save_every: int = 1000
    """Steps between checkpoints; one is also saved after five minutes of training."""
    keep_checkpoints: int = 3
    """Number of last checkpoints to keep, besides the one with the lowest held-out loss."""
    max_nonfinite_steps: int = 20
    """Stop after this many consecutive steps with a non-finite loss or gradient; such steps do not update weights."""
    tensorboard: bool = False
    """Also write the metrics as TensorBoard events, into the folder tensorboard of the run."""
    track: TrackerName = "none"
    """Also send the metrics and settings to Weights & Biases or to Trackio; a resumed run continues there, too."""
    start_file: Path | None = None
    """Used by electra study --overlap: wait after the first step, which includes compilation, until this file
    exists."""

    def __post_init__(self) -> None:
        check_range(self, *(field.name for field in fields(self) if field.type is int), at_least=1)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Length of a training in steps or in seconds; without either it is empty."""

    steps: int | None = None
    seconds: float | None = None

    def fraction_used(self, steps: float, seconds: float) -> float:
        """Fraction of the budget that `steps` or `seconds` use, at most 1."""
        return min(1.0, steps / self.steps if self.steps else seconds / self.seconds if self.seconds else 1.0)

    def minutes_left(self, steps: float, seconds: float, seconds_per_step: float) -> float:
        """Estimate the remaining minutes after `steps` and `seconds`."""
        left = (self.steps - steps) * seconds_per_step if self.steps else (self.seconds or 0.0) - seconds
        return max(0.0, left) / 60

    def __add__(self, other: "Budget") -> "Budget":
        if self.steps is not None and other.steps is not None:
            return Budget(steps=self.steps + other.steps)
        return Budget(seconds=(self.seconds or 0.0) + (other.seconds or 0.0))


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Device, precision and execution of the model."""

    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU that supports it, fp16 with loss scaling on one that does not, fp32 on a CPU."""
    compile: Compile = "auto"
    """Compile the training step with torch.compile and, on a GPU, capture it as a CUDA graph: the first steps take
    about a minute, later ones less time. auto: on a GPU; on: also on a CPU; off: run eagerly."""
    kernels: Kernels = "auto"
    """auto: use our Triton kernels on a GPU in bf16 or fp16; off: use PyTorch's operations only."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank, world size and restarts from torchrun's environment variables."""

    rank: int
    world_size: int
    local_rank: int  # on this node
    local_world_size: int
    restart_count: int  # of torchrun --max-restarts
    max_restarts: int
    has_agent_store: bool  # a store that torchrun keeps when it restarts the ranks


def read_launch() -> Launch | None:
    """The environment variables of torchrun; None if this process was started alone."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {missing[0]} is not set; start with torchrun")

    def number(name: str, default: int = 0) -> int:
        return int(os.environ.get(name, default))

    rank, world_size = number("RANK"), number("WORLD_SIZE")
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", rank),
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        restart_count=number("TORCHELASTIC_RESTART_COUNT"),
        max_restarts=number("TORCHELASTIC_MAX_RESTARTS"),
        has_agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
