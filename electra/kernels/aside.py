"""Work that nothing waits for yet, on a stream beside the one that goes on."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def stream_beside(main: int, device: int) -> torch.cuda.Stream:
    """The stream that goes with another, by that one's number."""
    return torch.cuda.Stream(device)


class Aside:
    """Runs things beside the current stream, after all that was put on it so far.

    Gradients of weights are needed at the end of a step only, and those of hidden states at once: small kernels of the
    one fill what the other leaves free. Nothing that is read aside may be written before `join`; it is held until then.
    Where there is no GPU (in Triton's interpreter) things are run at once.
    """

    def __init__(self) -> None:
        main = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self.streams = (main, stream_beside(main.stream_id, main.device_index)) if main else None
        self.held: list[Any] = []

    def __call__(self, act: Callable[..., Any], *given: Any) -> Any:
        if self.streams is None:
            return act(*given)
        main, beside = self.streams
        self.held.append(given)
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            return act(*given)

    def join(self) -> None:
        """What comes next on the current stream waits for what was put aside."""
        if self.streams is not None:
            main, beside = self.streams
            main.wait_stream(beside)
            self.held.clear()
