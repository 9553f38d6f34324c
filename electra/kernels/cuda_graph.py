"""Training steps as CUDA graphs: the GPU replays a step's many small kernels without waiting for Python."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

WARMUP_STEPS = 2
"""Eager steps for each batch shape before capture: libraries allocate workspaces then, which a graph cannot capture."""

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class CapturedStep:
    """A step over batches of one shape, with the batch it reads and the metrics it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Any
    metrics: Metrics


class CaptureError(RuntimeError):
    """A step could not be captured; nothing of it was computed."""


class GraphedStep:
    """A training step that is captured once for each shape of batch and replayed from then on."""

    def __init__(self, step: Callable[[Any], Metrics]) -> None:
        self.step = step
        self.calls: Counter[tuple] = Counter()
        self.captured: dict[tuple, CapturedStep] = {}
        self.stream = torch.cuda.Stream()
        self.last_replay: torch.cuda.Event | None = None

    def __call__(self, batch: Any) -> Metrics:
        signature = batch_signature(batch)
        self.calls[signature] += 1
        if self.calls[signature] <= WARMUP_STEPS:
            return self.run_eager_step(batch)
        if signature not in self.captured:
            self.captured[signature] = self.capture(batch)
        metrics = self.replay(self.captured[signature], batch)
        self.wait_for_previous_replay()
        return metrics

    def run_eager_step(self, batch: Any) -> Metrics:
        """Run an eager step on the stream that captures.

        Each stream waits for the other before it reuses memory that the other read: batch and metrics."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            metrics = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return metrics

    def capture(self, batch: Any) -> CapturedStep:
        """Capture a step without running it."""
        tensors = {name: tensor.clone() for name, tensor in batch_tensors(batch).items()}
        static = replace(batch, **tensors) if tensors else batch
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the loader's thread may use CUDA meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                metrics = self.step(static)
        except RuntimeError as error:
            if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__)):
                raise CaptureError("not enough memory to capture a step as a CUDA graph") from error
            raise
        return CapturedStep(graph, static, metrics)

    def replay(self, captured: CapturedStep, batch: Any) -> Metrics:
        """Run a captured step on another batch."""
        for name, tensor in batch_tensors(batch).items():
            getattr(captured.batch, name).copy_(tensor)
        captured.graph.replay()
        return captured.metrics

    def wait_for_previous_replay(self) -> None:
        """Stay at most one step ahead of the GPU, so that wall-clock times between steps are meaningful."""
        if self.last_replay is not None:
            self.last_replay.synchronize()
        self.last_replay = torch.cuda.Event()
        self.last_replay.record()


def batch_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch, which is a dataclass; None has none."""
    if batch is None:
        return {}
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def batch_signature(batch: Any) -> tuple:
    """What two batches must share to use one graph: the shapes of tensors and all other values."""
    values = [] if batch is None else [getattr(batch, field.name) for field in fields(batch)]
    return tuple(value.shape if isinstance(value, Tensor) else value for value in values)
