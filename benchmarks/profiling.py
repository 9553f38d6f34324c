"""The time of a training step by kind of operation: of kernels on a GPU, of operators on a CPU."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import synchronize
from torch.profiler import ProfilerActivity, profile

STEPS = 2
KINDS = {  # pattern of the kernel's name; the first match counts
    "embeddings": r"embedding|index|gather",
    "vocabulary": r"mlm_loss|log_softmax|nll_loss|cross_entropy",
    "attention": r"attention_kernel|attention_backward|sdpa|flash|cudnn|pack_qkv|scaled_dot_product",
    "gelu": r"gelu",
    "norms": r"layernorm|layer_norm",
    "column sums": r"column_sum_kernel|query_value_sum",
    "optimizer": r"multi_tensor_apply|LpNorm|adam|foreach",
    "matmuls": r"nvjet|gemm|splitK|cutlass|::mm$|addmm|bmm|matmul|linear",
    "other": r"",
}


@dataclass
class KindTime:
    """Time and number of kernels of one kind in a step."""

    milliseconds: float = 0.0
    count: float = 0.0


def profile_step(step: Callable[[], None], device: torch.device) -> dict[str, KindTime]:
    """Times by kind, longest first; kernels on parallel streams add up to more than the step takes."""
    is_cuda = device.type == "cuda"
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            step()
        synchronize(device)
    times = {kind: KindTime() for kind in KINDS}
    for event in profiler.events() or []:
        if is_cuda == (event.device_type == torch.autograd.DeviceType.CUDA):
            time = times[kernel_kind(event.name)]
            time.milliseconds += (event.device_time if is_cuda else event.self_cpu_time_total) / 1000 / STEPS
            time.count += 1 / STEPS
    return dict(sorted(times.items(), key=lambda each: -each[1].milliseconds))


def kernel_kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def format_profile(times: dict[str, KindTime]) -> str:
    parts = [f"{kind} {time.milliseconds:.2f} ms ({time.count:.0f})" for kind, time in times.items() if time.count]
    return f"{', '.join(parts)}; total {sum(time.milliseconds for time in times.values()):.2f} ms"
