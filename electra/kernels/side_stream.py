"""Second CUDA streams: weight gradients beside the backward pass, and the generator beside the discriminator.

PyTorch gives freed memory to the next tensor of the stream that allocated it, without waiting for other streams that
still read it. So a tensor that crosses streams is kept alive until its own stream waits for the other one; after that,
whatever reuses its memory runs later. `record_stream` would do the same with an event for each tensor in each step.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def get_side_stream(main_stream_id: int, device: int) -> torch.cuda.Stream:
    """The side stream that belongs to a main stream."""
    return torch.cuda.Stream(device)


class WeightGradientStream:
    """Runs functions on a side stream, each after everything queued on the main stream so far.

    The backward pass waits for gradients of hidden states, but not for those of weights: on a side stream they use
    multiprocessors that the main stream leaves idle. Arguments are kept alive until `join`, and must not be written to
    before. Without a GPU (in Triton's interpreter) functions run immediately.
    """

    enabled = True

    def __init__(self) -> None:
        main = torch.cuda.current_stream() if self.enabled and torch.cuda.is_available() else None
        self.streams = (main, get_side_stream(main.stream_id, main.device_index)) if main else None
        self.arguments: list[Any] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.streams is None:
            return function(*arguments)
        main, side = self.streams
        self.arguments.append(arguments)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            return function(*arguments)

    def join(self) -> None:
        """Make the main stream wait for everything that runs on the side stream."""
        if self.streams is not None:
            main, side = self.streams
            main.wait_stream(side)
            self.arguments.clear()


class GeneratorStream:
    """A stream for the generator's forward pass; its backward pass then runs beside the discriminator's.

    Autograd runs the backward of an operation on the stream of its forward. The models depend on each other only where
    gradients of shared weights are added, so the generator's small kernels use multiprocessors that the discriminator's
    leave idle.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.main = torch.cuda.current_stream()
        self.tensors: tuple[Tensor | None, ...] = ()  # kept alive
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # expected for shared embeddings

    @torch.compiler.disable
    def enter(self) -> None:
        """Queue what follows on this stream, after what is on the current one."""
        self.main = torch.cuda.current_stream()
        self.stream.wait_stream(self.main)  # which waited for this stream at the end of the last backward pass
        self.tensors = ()
        torch.cuda.set_stream(self.stream)

    @torch.compiler.disable
    def join(self, *tensors: Tensor | None) -> None:
        """Return to the main stream, which waits for this one; `tensors` that crossed are kept until the next `enter`.

        The backward passes read them on both streams again, and autograd drops its own reference before that ends."""
        self.tensors = tensors
        self.main.wait_stream(self.stream)
        torch.cuda.set_stream(self.main)
