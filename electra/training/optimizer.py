"""Optimizers and learning-rate schedules."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from electra.training.config import OptimizerConfig, OptimizerName, ScheduleName
from electra.training.muon import Muon

NamedParameter = tuple[str, Tensor]


INITIAL_LOSS_SCALE, MAX_LOSS_SCALE = 2.0**12, 2.0**24
GROWTH_STEPS = 1000  # without an overflow, after which the scale doubles


class LossScaler:
    """Dynamic loss scaling for fp16, whose small gradients would be zero: it halves after a non-finite step.

    Its numbers stay on the device, so that CUDA graphs contain it. A resumed run starts with the initial scale, which
    takes a few steps to adapt and, as a power of two, changes no gradient that does not overflow or vanish."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(INITIAL_LOSS_SCALE, device=device)
        self.finite_steps = torch.zeros((), device=device)  # since the scale changed

    def update(self, is_finite: Tensor) -> None:
        """Adapt the scale after a step."""
        self.finite_steps.add_(1).mul_(is_finite)
        is_stable = self.finite_steps >= GROWTH_STEPS
        self.scale.mul_(is_finite * 0.5 + 0.5).mul_(is_stable + 1.0).clamp_(1, MAX_LOSS_SCALE)
        self.finite_steps.mul_(~is_stable)


def build_optimizers(
    model: nn.Module, config: OptimizerConfig, lr_scale: Callable[[str], float] = lambda name: 1.0
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a model's parameters; `lr_scale` multiplies the learning rate of a parameter by name."""
    matrices, embeddings_and_heads, vectors = split_parameters(model)
    build_for_matrices, build_for_others = OPTIMIZERS[config.name]
    embedding_decay = config.weight_decay if config.embedding_weight_decay is None else config.embedding_weight_decay
    of_matrices = [(matrices, config.weight_decay)]
    of_others = [(embeddings_and_heads, embedding_decay), (vectors, 0.0)]
    if build_for_matrices is build_for_others:
        return [build_for_others(build_parameter_groups(of_matrices + of_others, lr_scale), config)]
    return [
        build_for_matrices(build_parameter_groups(of_matrices, lr_scale), config),
        build_for_others(build_parameter_groups(of_others, lr_scale), config),
    ]


def split_parameters(model: nn.Module) -> tuple[list[NamedParameter], list[NamedParameter], list[NamedParameter]]:
    """Split parameters into matrices of layers, other matrices (embeddings, heads), and vectors (biases, norms)."""
    matrices: list[NamedParameter] = []
    embeddings_and_heads: list[NamedParameter] = []
    vectors: list[NamedParameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
            vectors.append((name, parameter))
        elif ".layers." in name:
            matrices.append((name, parameter))
        else:
            embeddings_and_heads.append((name, parameter))
    return matrices, embeddings_and_heads, vectors


def build_parameter_groups(
    parameters_and_decays: list[tuple[list[NamedParameter], float]], lr_scale: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Group parameters, given with their weight decay, by learning-rate scale and weight decay."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameters, weight_decay in parameters_and_decays:
        for name, parameter in parameters:
            scale = lr_scale(name)
            group = groups.setdefault(
                (scale, weight_decay), {"params": [], "lr_scale": scale, "weight_decay": weight_decay}
            )
            group["params"].append(parameter)
    return list(groups.values())


def build_muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return Muon(groups, lr=config.learning_rate, momentum=config.momentum)


def build_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas, is_cuda = (config.beta1, config.beta2), groups[0]["params"][0].is_cuda
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True, capturable=is_cuda
    )


NO_BIAS_CORRECTION = 1e9  # step count at which 1 - beta**step is 1


def build_adam_without_bias_correction(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW without bias correction, as in the released ELECTRA code.

    The first updates are about three times as large as AdamW's: (1 - beta1) / sqrt(1 - beta2).
    """
    optimizer = build_adamw(groups, config)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(NO_BIAS_CORRECTION, device=parameter.device)} | moments
    return optimizer


OptimizerBuilder = Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]

OPTIMIZERS: dict[OptimizerName, tuple[OptimizerBuilder, OptimizerBuilder]] = {
    # for the weight matrices of layers, for the other parameters
    "adam": (build_adam_without_bias_correction, build_adam_without_bias_correction),
    "adamw": (build_adamw, build_adamw),
    "muon": (build_muon, build_adamw),
}


# A schedule returns the learning rate divided by its peak. `progress` and `warmup` are fractions of all steps.


def warmup_factor(progress: float, warmup: float) -> float:
    """Reaches 1 at the end of the warm-up and rises on after it; schedules take its minimum with their decay."""
    return progress / warmup if warmup else 1.0


def linear_schedule(progress: float, warmup: float, config: OptimizerConfig) -> float:
    return min(warmup_factor(progress, warmup), (1 - progress) / max(1 - warmup, 1e-12))


def released_schedule(progress: float, warmup: float, config: OptimizerConfig) -> float:
    return (1 - progress) * min(1.0, warmup_factor(progress, warmup))


def cosine_schedule(progress: float, warmup: float, config: OptimizerConfig) -> float:
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, 1e-12))) / 2


def wsd_schedule(progress: float, warmup: float, config: OptimizerConfig) -> float:
    """Warm-up, stable, decay."""
    decay_factor = (1 - progress) / config.decay_fraction if config.decay_fraction else 1.0
    return min(warmup_factor(progress, warmup), 1.0, decay_factor)


def decay_schedule(progress: float, warmup: float, config: OptimizerConfig) -> float:
    return 1 - progress


SCHEDULES: dict[ScheduleName, Callable[[float, float, OptimizerConfig], float]] = {
    "linear": linear_schedule,
    "released": released_schedule,
    "cosine": cosine_schedule,
    "wsd": wsd_schedule,
    "decay": decay_schedule,
}
