"""Optimizers and learning-rate schedules, by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from electra.errors import ConfigError
from electra.training.muon import Muon

OptimizerName = Literal["adam", "adamw", "muon"]
ScheduleName = Literal["linear", "released", "cosine", "wsd", "decay"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights are moved, and how fast over the budget."""

    optimizer: OptimizerName = "adamw"
    """adam: as released, without bias correction; adamw; muon: for the layers' matrices, adamw for the rest."""
    learning_rate: float = 5e-4
    """The highest of the schedule."""
    schedule: ScheduleName = "linear"
    """linear: warm-up, then down to 0; released: the same, but the decay already runs during the warm-up; cosine; wsd:
    warm-up, stable, then down to 0 over the last --decay of the budget; decay: only down (a branch of a wsd trunk)."""
    warmup: float = 0.1
    """Warm-up, as a share of the budget (below 1) or in steps (1 and more)."""
    decay: float = 0.2
    """wsd: the share of the budget over which the rate falls; 0 for a trunk that never decays."""
    weight_decay: float = 0.01
    """Decoupled; not on biases and norms."""
    beta1: float = 0.9
    """How long Adam remembers gradients."""
    beta2: float = 0.999
    """How long Adam remembers their squares."""
    epsilon: float = 1e-6
    """What Adam adds to the root of the squares."""
    momentum: float = 0.95
    """Of muon."""
    clip: float = 1.0
    """The largest norm of the whole gradient; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be above 0, for instance 5e-4")
        for name in ("warmup", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 0 and less than 1, usually 0.9"
                )
        if self.epsilon <= 0:
            raise ConfigError(f"epsilon is {self.epsilon}; it must be above 0, usually 1e-6")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay is {self.decay}; it is a share of the budget, from 0 to 1")


Named = tuple[str, Tensor]


def build_optimizers(
    model: nn.Module, config: OptimizerConfig, share: Callable[[str], float] = lambda name: 1.0
) -> list[torch.optim.Optimizer]:
    """The optimizers that together move every parameter of `model` once, each by its `share` of the learning rate."""
    matrices, tables, vectors = sort_parameters(model)
    if config.optimizer != "muon":
        return [OPTIMIZERS[config.optimizer](groups_of(matrices + tables, vectors, config, share), config)]
    muon = Muon(groups_of(matrices, [], config, share), lr=config.learning_rate, momentum=config.momentum)
    return [muon, adamw(groups_of(tables, vectors, config, share), config)]


def sort_parameters(model: nn.Module) -> tuple[list[Named], list[Named], list[Named]]:
    """Matrices of layers, tables and heads, and vectors (biases, norms): each parameter once."""
    matrices: list[Named] = []
    tables: list[Named] = []
    vectors: list[Named] = []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append((name, parameter))
        elif ".layers." in name:
            matrices.append((name, parameter))
        else:
            tables.append((name, parameter))
    return matrices, tables, vectors


def groups_of(
    decayed: list[Named], spared: list[Named], config: OptimizerConfig, share: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Parameters by their share of the learning rate, with weight decay and without."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameters, decay in ((decayed, config.weight_decay), (spared, 0.0)):
        for name, parameter in parameters:
            key = (share(name), decay)
            groups.setdefault(key, {"params": [], "share": key[0], "weight_decay": decay})["params"].append(parameter)
    return list(groups.values())


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas, is_cuda = (config.beta1, config.beta2), groups[0]["params"][0].is_cuda
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True, capturable=is_cuda
    )


LONG_AGO = 1e9  # steps: as if so many had been taken, the moments are not corrected for their start


def released_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay as ELECTRA was released with it: the moments are not corrected for their start.

    So the first updates are about three times as large (m grows faster than √v), which the warm-up hides.
    """
    optimizer = adamw(groups, config)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(LONG_AGO, device=parameter.device)} | moments
    return optimizer


OPTIMIZERS = {"adam": released_adam, "adamw": adamw}


def linear(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Up to 1 over the warm-up, then straight down to 0."""
    return min(progress / warmup if warmup else 1.0, (1 - progress) / max(1 - warmup, 1e-12))


def released(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Straight down from the start, times the warm-up."""
    return (1 - progress) * min(1.0, progress / warmup if warmup else 1.0)


def cosine(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Up over the warm-up, then down along half a cosine."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, 1e-12))) / 2


def wsd(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Warm-up, stable, decay."""
    falling = (1 - progress) / config.decay if config.decay else 1.0
    return min(progress / warmup if warmup else 1.0, 1.0, falling)


def decay(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Only down: what a trunk at its highest rate ends with."""
    return 1 - progress


SCHEDULES: dict[str, Callable[[float, float, OptimizerConfig], float]] = {
    "linear": linear,
    "released": released,
    "cosine": cosine,
    "wsd": wsd,
    "decay": decay,
}
