"""Requests that arrive while a batch is computed are computed together in the next one."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

Compute = Callable[[Any, list[Any]], list[Any]]


class QueueFullError(Exception):
    """Too many texts wait to be computed."""


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """The items of a request, and where their results go."""

    key: Hashable
    items: list[Any]
    size: int
    results: asyncio.Future


class Batcher:
    """Calls `compute(key, items)`, one call at a time in its own thread, with the items of all waiting requests that
    have the key of the oldest one.

    There is no delay to collect requests: an idle model starts at once, and a busy one finds what has arrived since."""

    def __init__(self, compute: Compute, *, max_queue: int, max_size: int) -> None:
        self.compute = compute
        self.max_queue = max_queue  # items that may wait
        self.max_size = max_size  # of a batch, unless one request alone is larger
        self.waiting: deque[QueuedRequest] = deque()
        self.queued = 0  # items of `waiting`
        self.has_requests = asyncio.Event()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="batcher")
        self.on_batch: Callable[[int], None] = lambda items: None  # called with the number of items of each batch

    async def submit(self, key: Hashable, items: list[Any], size: int) -> list[Any]:
        """The results of the items of a request; raises what `compute` raises for these items alone."""
        if self.queued and self.queued + len(items) > self.max_queue:
            raise QueueFullError
        request = QueuedRequest(key, items, size, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self.queued += len(items)
        self.has_requests.set()
        try:
            return await request.results
        except asyncio.CancelledError:  # the client has gone
            if request in self.waiting:
                self.remove(request)
            raise

    def remove(self, request: QueuedRequest) -> None:
        self.waiting.remove(request)
        self.queued -= len(request.items)

    def take_batch(self) -> list[QueuedRequest]:
        """The oldest request and, as far as they fit, others with its key in the order of their arrival."""
        batch: list[QueuedRequest] = []
        size = 0
        for request in list(self.waiting):
            if batch and (request.key != batch[0].key or size + request.size > self.max_size):
                continue
            batch.append(request)
            size += request.size
            self.remove(request)
        return batch

    async def run(self) -> None:
        """Compute batches until this task is cancelled."""
        try:
            while True:
                await self.has_requests.wait()
                self.has_requests.clear()
                while batch := self.take_batch():
                    await self.compute_batch(batch)
        finally:
            self.executor.shutdown(cancel_futures=True)

    async def compute_batch(self, batch: list[QueuedRequest]) -> None:
        """Compute the items of a batch; if that fails, each request alone, so that only the one at fault fails."""
        items = [item for request in batch for item in request.items]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self.executor, self.compute, batch[0].key, items)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    await self.compute_batch([request])
            elif not batch[0].results.done():
                batch[0].results.set_exception(error)
            return
        self.on_batch(len(items))
        start = 0
        for request in batch:
            if not request.results.done():
                request.results.set_result(results[start : start + len(request.items)])
            start += len(request.items)
