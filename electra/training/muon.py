"""Muon: updates matrices by their orthogonalized momentum, all matrices of one shape in one batch.

`torch.optim.Muon` handles matrices one by one, in bf16 on every device: about a thousand small kernels for the small
size, and slow on a CPU. The updates here are equal except for rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's
ADAMW_RMS = 0.2  # scales updates to the RMS of AdamW's, so that both share one learning rate (arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized by Newton-Schulz iterations; decoupled weight decay.

    `found_inf` and `grad_scale` have the meaning they have in torch's fused optimizers.
    """

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.found_inf: Tensor | None = None  # [] 1: skip this step
        self.grad_scale: Tensor | None = None  # [] gradients are divided by it
        self.momentum_buffers: dict[tuple[Tensor, ...], Tensor] = {}  # of all matrices of one shape
        self.streams: list[torch.cuda.Stream] = []  # one for each shape

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closures
        updates = [
            partial(self.update_same_shape, *zip(*matrices, strict=True))
            for matrices in group_for_stacking(self.param_groups)
        ]
        if not self.param_groups[0]["params"][0].is_cuda:
            for update in updates:
                update()
            return
        main = torch.cuda.current_stream()
        self.streams += [torch.cuda.Stream() for _ in updates[len(self.streams) :]]
        for update, stream in zip(updates, self.streams, strict=False):  # each alone is too small to fill the GPU
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                update()
        for stream in self.streams[: len(updates)]:
            main.wait_stream(stream)  # before gradients are freed, whose memory the main stream reuses

    def update_same_shape(self, parameters: tuple[Tensor, ...], groups: tuple[dict[str, Any], ...]) -> None:
        """Update matrices of one shape: m ← μm + (1 − μ)g, θ ← θ − lr (s · orthogonalize(μm + (1 − μ)g) + wd θ)."""
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        momentum, weight = groups[0]["momentum"], 1 - groups[0]["momentum"]
        lr = stacked_learning_rates(groups, gradients.device)
        if self.found_inf is not None and self.grad_scale is not None:
            is_finite = 1 - self.found_inf
            gradients = (gradients / self.grad_scale).where(is_finite > 0, 0.0)
            lr, weight = lr * is_finite, weight * is_finite
        averages = self.stacked_momentum(parameters).lerp_(gradients, weight)  # [N, rows, columns]
        nesterov = gradients.lerp_(averages, momentum)
        scale = ADAMW_RMS * max(nesterov.shape[1:]) ** 0.5
        updates = orthogonalize(nesterov).to(nesterov.dtype).mul_(lr * scale)
        if groups[0]["weight_decay"]:
            decay = 1 - lr * groups[0]["weight_decay"]
            torch._foreach_mul_(parameters, list(decay.unbind()) if getattr(decay, "ndim", 0) else decay)
        torch._foreach_sub_(parameters, list(updates.unbind()))

    def stacked_momentum(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """Return the momentum of `parameters` as one tensor [N, rows, columns], of which each state is a view."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        states = [self.state[parameter]["momentum"] for parameter in parameters]
        buffer = self.momentum_buffers.get(parameters)
        is_current = buffer is not None and all(
            state.data_ptr() == view.data_ptr() for state, view in zip(states, buffer, strict=True)
        )
        if buffer is None or not is_current:  # the first step, or other parameters had gradients before
            buffer = self.momentum_buffers[parameters] = torch.stack(states)
            for parameter, view in zip(parameters, buffer.unbind(), strict=True):
                self.state[parameter]["momentum"] = view
        return buffer


def group_for_stacking(groups: list[dict[str, Any]]) -> Iterable[list[tuple[Tensor, dict[str, Any]]]]:
    """Parameters that have gradients, each with its group; those that differ at most in learning rate together."""
    by_shape: dict[tuple[torch.Size, float, float], list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape, group["momentum"], group["weight_decay"]].append((parameter, group))
    return by_shape.values()


def stacked_learning_rates(groups: tuple[dict[str, Any], ...], device: torch.device) -> Any:
    """The learning rate of matrices in one group, or of those in several groups [N, 1, 1]."""
    if all(group is groups[0] for group in groups):
        return groups[0]["lr"]
    rates = [group["lr"] for group in groups]
    return (torch.stack(rates) if isinstance(rates[0], Tensor) else torch.tensor(rates, device=device))[:, None, None]


@cache
def has_bf16() -> bool:
    """Whether the GPU has matrix products in bf16; emulated they are slower than in fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of matrices [N, rows, columns] close to 1 (0.7 to 1.2) by Newton-Schulz iterations."""
    first, third, fifth = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    wide = wide.bfloat16() if wide.is_cuda and has_bf16() else wide
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT  # [N, shorter, shorter]
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.mT if is_tall else wide
