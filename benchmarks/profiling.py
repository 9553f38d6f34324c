"""What a step is made of: the time of its kernels on a GPU, of its operators on a CPU, kind by kind."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import wait
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

STEPS = 2  # that are looked at
KINDS = {  # by what is in a name, the first that fits
    "embeddings": r"embedding|index|gather",
    "vocabulary": r"mlm_loss|log_softmax|nll_loss|cross_entropy",
    "attention": r"attention_kernel|attention_backward|sdpa|flash|cudnn|pack_qkv|scaled_dot_product",
    "gelu": r"gelu",
    "norms": r"layernorm|layer_norm",
    "column sums": r"column_sum_kernel|query_value_sum",
    "optimizer": r"multi_tensor_apply|LpNorm|adam|foreach",
    "products": r"nvjet|gemm|splitK|cutlass|::mm$|addmm|bmm|matmul|linear",
    "other": r"",
}


@dataclass
class Kind:
    """What belongs together: milliseconds of a step, and how many kernels."""

    milliseconds: float = 0.0
    count: float = 0.0


def kinds_of(step: Callable[[], None], device: torch.device) -> dict[str, Kind]:
    """The kinds that a step is made of, most time first; those on streams beside each other add up to more than it."""
    is_cuda = device.type == "cuda"
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            step()
        wait(device)
    found = {kind: Kind() for kind in KINDS}
    for event in profiled.events() or []:
        if is_cuda == (event.device_type == torch.autograd.DeviceType.CUDA):
            kind = found[kind_of(event.name)]
            kind.milliseconds += own_microseconds(event, is_cuda) / 1000 / STEPS
            kind.count += 1 / STEPS
    return dict(sorted(found.items(), key=lambda each: -each[1].milliseconds))


def own_microseconds(event: FunctionEvent, is_cuda: bool) -> float:
    """Without what was called from it."""
    return event.device_time if is_cuda else event.self_cpu_time_total


def kind_of(name: str) -> str:
    """The kind of a kernel or operator."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def told(kinds: dict[str, Kind]) -> str:
    """The kinds in one line."""
    parts = [f"{name} {kind.milliseconds:.2f} ms ({kind.count:.0f})" for name, kind in kinds.items() if kind.count]
    return f"{', '.join(parts)}; altogether {sum(kind.milliseconds for kind in kinds.values()):.2f} ms"
