"""Timing on CPUs and GPUs, and the time of a training step by kind of operation."""

import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from electra.training.hardware import measure_flops_per_second

CHUNK = 5  # repetitions that are timed together
PROFILED_STEPS = 2
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


def result_or_error(function: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The result of `function`, or {"error": message}, so that a benchmark continues with its next case."""
    try:
        return function()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    finally:
        reset(device)


def reset(device: torch.device) -> None:
    """Free models, compiled code and GPU memory, and reset the memory statistics."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def median_seconds(function: Callable[[], Any], repetitions: int, device: torch.device) -> float:
    """Seconds per call: the median over chunks of repetitions."""
    chunk = min(CHUNK, repetitions)
    return statistics.median(mean_seconds(function, chunk, device) for _ in range(repetitions // chunk))


def mean_seconds(function: Callable[[], Any], repetitions: int, device: torch.device) -> float:
    """Seconds per call, between two synchronisations of the device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repetitions):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repetitions


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the precision of training: the practical peak of the device."""
    if device.type == "cpu":
        return measure_flops_per_second(device, torch.float32)
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    mean_seconds(lambda: left @ right, 20, device)
    return 2 * 8192**3 / min(mean_seconds(lambda: left @ right, 20, device) for _ in range(5))


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
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(device)
    times = {kind: KindTime() for kind in KINDS}
    for event in profiler.events() or []:
        if is_cuda == (event.device_type == torch.autograd.DeviceType.CUDA):
            time = times[kernel_kind(event.name)]
            time.milliseconds += (event.device_time if is_cuda else event.self_cpu_time_total) / 1000 / PROFILED_STEPS
            time.count += 1 / PROFILED_STEPS
    return dict(sorted(times.items(), key=lambda each: -each[1].milliseconds))


def kernel_kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def format_profile(times: dict[str, KindTime]) -> str:
    parts = [f"{kind} {time.milliseconds:.2f} ms ({time.count:.0f})" for kind, time in times.items() if time.count]
    return f"{', '.join(parts)}; total {sum(time.milliseconds for time in times.values()):.2f} ms"
