"""Muon: matrices are moved by the orthogonal matrix nearest to their momentum, all of one shape at once.

`torch.optim.Muon` takes matrices one by one, in bf16 on every device: a thousand small kernels for the small size, and
slow on a CPU. The updates here are the same but for rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, as in Keller Jordan's Muon
MATCH = 0.2  # the size of AdamW's usual update, so that one learning rate serves both (arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov's step ahead, orthogonalised; decoupled weight decay."""

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.found_inf: Tensor | None = None  # [] 1 where a step is to move nothing
        self.grad_scale: Tensor | None = None  # [] what gradients are divided by; both as torch's fused optimizers ask
        self.together: dict[tuple[Tensor, ...], Tensor] = {}  # the momenta of matrices of one shape
        self.streams: list[torch.cuda.Stream] = []  # one for each shape, on a GPU

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closures here
        updates = [partial(self.update, alike, group) for group in self.param_groups for alike in of_one_shape(group)]
        if not self.param_groups[0]["params"][0].is_cuda:
            for update in updates:
                update()
            return
        main = torch.cuda.current_stream()
        self.streams += [torch.cuda.Stream() for _ in updates[len(self.streams) :]]
        for update, stream in zip(updates, self.streams, strict=False):  # small kernels, which fill a GPU together only
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                update()
        for stream in self.streams[: len(updates)]:
            main.wait_stream(stream)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """m ← μm + (1 − μ)g, θ ← θ − lr (s · orthogonal(μm + (1 − μ)g) + wd θ), for matrices of one shape."""
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        momentum, lr, pace = group["momentum"], group["lr"], 1 - group["momentum"]
        if self.found_inf is not None and self.grad_scale is not None:  # the device says whether this step is wanted
            is_wanted = 1 - self.found_inf
            gradients = (gradients / self.grad_scale).where(is_wanted > 0, 0.0)
            lr, pace = lr * is_wanted, pace * is_wanted
        means = self.momenta(parameters).lerp_(gradients, pace)  # [N, rows, columns]
        ahead = gradients.lerp_(means, momentum)
        scale = MATCH * max(ahead.shape[1:]) ** 0.5
        moves = orthogonal(ahead).to(ahead.dtype).mul_(lr * scale)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(parameters, list(moves.unbind()))

    def momenta(self, parameters: list[Tensor]) -> Tensor:
        """The momenta of matrices of one shape [N, rows, columns]; each matrix remembers its part."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        parts = [self.state[parameter]["momentum"] for parameter in parameters]
        stacked = self.together.get(tuple(parameters))
        if stacked is None or any(part.data_ptr() != own.data_ptr() for part, own in zip(parts, stacked, strict=True)):
            stacked = self.together[tuple(parameters)] = torch.stack(parts)
            for parameter, own in zip(parameters, stacked.unbind(), strict=True):
                self.state[parameter]["momentum"] = own
        return stacked


def of_one_shape(group: dict[str, Any]) -> Iterable[list[Tensor]]:
    """The matrices of a group that have gradients, by shape."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        if parameter.grad is not None:
            by_shape[parameter.shape].append(parameter)
    return by_shape.values()


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest matrices [N, rows, columns] whose singular values are all 1: between 0.7 and 1.2."""
    first, third, fifth = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    flat = matrices.mT if is_tall else matrices
    flat = flat.bfloat16() if flat.is_cuda else flat
    flat = flat / flat.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = flat @ flat.mT  # [N, shorter, shorter]
        flat = torch.baddbmm(flat, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), flat, beta=first)
    return flat.mT if is_tall else flat
