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
        self.main = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self.stream = stream_beside(self.main.stream_id, self.main.device_index) if self.main else None
        self.held: list[Any] = []

    def __call__(self, act: Callable[..., Any], *given: Any) -> Any:
        if self.main is None or self.stream is None:
            return act(*given)
        self.held.append(given)
        self.stream.wait_stream(self.main)
        with torch.cuda.stream(self.stream):
            return act(*given)

    def join(self) -> None:
        """What comes next on the current stream waits for what was put aside."""
        if self.main is not None and self.stream is not None:
            self.main.wait_stream(self.stream)
            self.held.clear()
