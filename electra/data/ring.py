"""The ring: the tokens of a split over all shards, end to end and round again, read in windows of any width."""

from __future__ import annotations

import resource

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from electra.data.shards import Shards, Split
from electra.errors import DataError


class Ring:
    """Memory-mapped tokens of a split."""

    def __init__(self, shards: Shards, split: Split):
        allow_open_files(len(shards.index.shards))
        self.parts = [part for part in shards.tokens(split) if len(part)]
        if not self.parts:
            raise DataError(f"{shards.folder} has no {split} tokens; make shards with another --validation-fraction")
        sizes = [len(part) for part in self.parts]
        self.ends = np.cumsum(sizes)
        self.begins = self.ends - sizes
        self.views: dict[int, list[NDArray]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def type(self) -> np.dtype:
        """The type of the tokens."""
        return self.parts[0].dtype

    def read(self, starts: NDArray, windows: NDArray) -> None:
        """Fill `windows` [R, width] with the tokens from each start [R] on, gathered shard by shard."""
        width = windows.shape[1]
        places = np.searchsorted(self.begins, starts, side="right") - 1
        is_inside = starts + width <= self.ends[places]
        for row in np.flatnonzero(~is_inside):
            windows[row] = self.window(int(starts[row]), width)
        inside = np.flatnonzero(is_inside)
        by_shard = inside[np.argsort(places[inside], kind="stable")]
        numbers, firsts = np.unique(places[by_shard], return_index=True)
        for number, rows in zip(numbers, np.split(by_shard, firsts[1:]), strict=False):  # with no rows: no numbers
            windows[rows] = self.views_of(width)[number][starts[rows] - self.begins[number]]

    def views_of(self, width: int) -> list[NDArray]:
        """Of each shard, all its windows of a width, without a copy."""
        if width not in self.views:
            shown = [part if len(part) >= width else np.zeros(width, part.dtype) for part in self.parts]
            self.views[width] = [sliding_window_view(part, width) for part in shown]
        return self.views[width]

    def window(self, start: int, width: int) -> NDArray:
        """One window, which may reach over the end of a shard or of the whole ring."""
        pieces: list[NDArray] = []
        while width:
            start %= len(self)
            number = int(np.searchsorted(self.begins, start, side="right")) - 1
            local = start - int(self.begins[number])
            pieces.append(self.parts[number][local : local + width])
            start, width = start + len(pieces[-1]), width - len(pieces[-1])
        return np.concatenate(pieces)


def allow_open_files(shards: int) -> None:
    """Raise this process's limit of open files: each mapped shard holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * shards + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
