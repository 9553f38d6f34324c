"""What benchmarks take time with: waiting for the device, chunks of repeats, and the ceiling of matrix products."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from electra.training.hardware import measure_flops

CHUNK = 5  # repeats that are timed together


def attempted(act: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What `act` finds; or why it failed, so that what else is to be measured goes on."""
    try:
        return act()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    finally:
        clear(device)


def clear(device: torch.device) -> None:
    """Forget what was measured last: models, compiled code, memory and its highest mark."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def median_seconds(act: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds that it takes once: the median over a few chunks of times."""
    chunk = min(CHUNK, times)
    return statistics.median(seconds_of(act, chunk, device) for _ in range(times // chunk))


def seconds_of(act: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds that it takes once: the mean over times in a row, waiting for the device before and after."""
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        act()
    wait(device)
    return (time.perf_counter() - began) / times


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def ceiling(device: torch.device) -> float:
    """Operations a second of large matrix products, in the precision of training."""
    if device.type == "cpu":
        return measure_flops(device, torch.float32)
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds_of(lambda: left @ right, 20, device)
    return 2 * 8192**3 / min(seconds_of(lambda: left @ right, 20, device) for _ in range(5))
