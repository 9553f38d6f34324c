"""Worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TypeVar

from electra.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def count_usable_cores() -> int:
    """The cores this process may use, where the system reports it; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map` with worker processes; at most two items wait for a worker, so memory is bounded."""
    if workers == 1:
        yield from map(function, items)
        return
    with starting_workers():
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), init_worker)
    futures: deque[Future[Result]] = deque()
    try:
        for item in items:
            with starting_workers():
                futures.append(pool.submit(function, item))
            if len(futures) > workers + 1:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker was killed, possibly out of memory; try fewer --workers") from None
    finally:
        for process in list((pool._processes or {}).values()) if futures else ():
            process.kill()  # what they encode is no longer needed
        pool.shutdown(cancel_futures=True)


def call_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function that computes for minutes without returning to Python, so that signals are handled meanwhile."""
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    while not future.done():
        wait([future], timeout=0.2)  # a signal that arrives just before does not end the waiting
    return future.result()


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes that ignore Ctrl-C and SIGHUP, which a terminal sends to all (workers, and Python's process that
    removes their semaphores), and that do not import the user's script, which would run it once more."""
    signals = (signal.SIGINT, signal.SIGHUP) if hasattr(signal, "pthread_sigmask") else ()  # not on Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if signals else ()  # inherited by new processes
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def init_worker() -> None:
    """Make a worker single-threaded and let it exit when its parent exits or is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()


def exit_with_parent(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
