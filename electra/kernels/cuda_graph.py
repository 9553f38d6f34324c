"""Steps recorded as CUDA graphs: the device replays a step's many small kernels without waiting for Python."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

WARMUPS = 2
"""Steps of each shape that are taken as usual first: libraries set themselves up in them, which cannot be recorded."""

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Recording:
    """A step over batches of one shape: where it reads its batch, and where it leaves its numbers."""

    graph: torch.cuda.CUDAGraph
    batch: Any
    numbers: Numbers


class GraphedStep:
    """Takes steps; each shape of batch is recorded once, and from then on replayed."""

    def __init__(self, step: Callable[[Any], Numbers]) -> None:
        self.step = step
        self.seen: Counter[tuple] = Counter()
        self.recordings: dict[tuple, Recording] = {}
        self.side = torch.cuda.Stream()
        self.before: torch.cuda.Event | None = None

    def __call__(self, batch: Any) -> Numbers:
        shape = shape_of(batch)
        self.seen[shape] += 1
        if self.seen[shape] <= WARMUPS:
            return self.warm_up(batch)
        if shape not in self.recordings:
            self.recordings[shape] = self.record(batch)
        numbers = self.replay(self.recordings[shape], batch)
        self.keep_pace()
        return numbers

    def warm_up(self, batch: Any) -> Numbers:
        """A step as usual, on the stream that recordings are made on."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            numbers = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.side)
        return numbers

    def record(self, batch: Any) -> Recording:
        """Write down what a step does, without doing it."""
        own = replace(batch, **{name: tensor.clone() for name, tensor in tensors_of(batch).items()})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):  # others prepare batches
            numbers = self.step(own)
        return Recording(graph, own, numbers)

    def replay(self, recording: Recording, batch: Any) -> Numbers:
        """The recorded step over another batch."""
        for name, tensor in tensors_of(batch).items():
            getattr(recording.batch, name).copy_(tensor)
        recording.graph.replay()
        return recording.numbers

    def keep_pace(self) -> None:
        """Be one step ahead of the device, not more: clocks that are read between steps then tell the truth."""
        if self.before is not None:
            self.before.synchronize()
        self.before = torch.cuda.Event()
        self.before.record()


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """The tensors of a dataclass."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def shape_of(batch: Any) -> tuple:
    """What two batches must have alike for one recording: the shapes of tensors, and whatever is no tensor."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return tuple(value.shape if isinstance(value, Tensor) else value for value in found.values())
