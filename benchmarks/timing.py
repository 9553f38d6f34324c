"""Timing on CPUs and GPUs."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from electra.training.hardware import measure_flops_per_second

CHUNK = 5  # repetitions that are timed together


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
