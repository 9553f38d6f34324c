"""Worker processes: apply a function to a stream of items, in order and in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import TypeVar

from electra.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """The function's results in the order of the items; no more than two items wait for a free worker."""
    if workers == 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker was killed, perhaps for want of memory; run again with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Make a worker quiet, single-threaded, and end with its parent even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def end_with(parent: BaseProcess) -> None:
    """Wait for the parent's end, then end this process."""
    parent.join()
    os._exit(1)
