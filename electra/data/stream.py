"""Streams: windows of a ring of tokens as tensors, from memory-mapped shards or wholly in a device's memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.ring import Ring
from electra.errors import ConfigError

# torch can index signed tokens only; `as_ids` makes them unsigned again
SIGNED = {np.dtype(np.uint16): torch.int16, np.dtype(np.uint32): torch.int32}
BITS = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


class Stream(Protocol):
    """Where windows come from."""

    def windows(self, starts: NDArray, width: int) -> Tensor:
        """[R, width] the tokens from each start on, for `as_ids`."""


def as_ids(windows: Tensor) -> Tensor:
    """Windows of a stream as token ids, int64."""
    return windows.long() & BITS[windows.dtype]


class MappedStream:
    """Windows read from shards, into pinned memory if a GPU will take them."""

    def __init__(self, ring: Ring, device: torch.device):
        self.ring = ring
        self.is_pinned = device.type == "cuda"

    def windows(self, starts: NDArray, width: int) -> Tensor:
        """[R, width] the tokens from each start on."""
        found = torch.empty((len(starts), width), dtype=SIGNED[self.ring.type], pin_memory=self.is_pinned)
        self.ring.read(starts, found.numpy().view(self.ring.type))
        return found


class ResidentStream:
    """Windows of tokens that are all in the memory of a device."""

    def __init__(self, ring: Ring, device: torch.device):
        room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        needed = len(ring) * ring.type.itemsize
        if room is not None and needed > room:
            raise ConfigError(
                f"{needed / 1e9:.1f} GB of tokens, {room / 1e9:.1f} GB free on {device}; leave out --data-on-gpu"
            )
        self.tokens = torch.empty(len(ring), dtype=SIGNED[ring.type], device=device)
        for part, begin, end in zip(ring.parts, ring.begins, ring.ends, strict=True):
            self.tokens[begin:end] = torch.from_numpy(np.array(part)).view(self.tokens.dtype)

    def windows(self, starts: NDArray, width: int) -> Tensor:
        """[R, width] the tokens from each start on."""
        device = self.tokens.device
        places = torch.from_numpy(starts).to(device)[:, None] + torch.arange(width, device=device)
        return self.tokens[places % len(self.tokens)]
