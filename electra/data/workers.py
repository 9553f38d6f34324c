"""Work in parallel: in processes that end with the one that started them, or in tasks on a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

from electra import __version__
from electra.errors import ConfigError, DataError, import_optional
from electra.signals import defer_stop_signals

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL = "local"
POLL_SECONDS = 0.01  # between checks for a result
CONNECT_SECONDS = 10.0
MAX_RETRIES = 10  # of a task of Ray whose process or node was lost


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
    is_finished = False
    try:
        for item in items:
            with starting_workers(), defer_stop_signals():
                futures.append(pool.submit(function, item))
            if len(futures) > workers + 1:
                yield wait_for_result(futures.popleft())
        while futures:
            yield wait_for_result(futures.popleft())
        is_finished = True
    except BrokenProcessPool:
        raise DataError("a worker was killed, possibly out of memory; try fewer --workers") from None
    finally:
        for process in () if is_finished else list((pool._processes or {}).values()):
            process.kill()  # what they compute is no longer needed
        pool.shutdown(cancel_futures=True)


def wait_for_result(future: Future[Result]) -> Result:
    """The result of a future; signals are handled only while its lock, which the pool's thread needs, is free.

    Polls, because a signal that arrives just before a blocking call is handled only after it returns."""
    while True:
        with defer_stop_signals():
            if future.done():
                return future.result()
        time.sleep(POLL_SECONDS)


def results_as_completed(futures: Iterable[Future[Result]]) -> Iterator[Result]:
    """The results of futures in the order in which they end."""
    waiting = list(futures)
    while waiting:
        with defer_stop_signals():
            ended = [future for future in waiting if future.done()]
        for future in ended:
            waiting.remove(future)
            yield wait_for_result(future)
        time.sleep(POLL_SECONDS)


def call_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function that computes for minutes without returning to Python, so that signals are handled meanwhile."""
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return wait_for_result(future)


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


# Ray (extra `ray`) repeats a task elsewhere if its node is lost. Nodes need electra in the same version; functions and
# items are sent to them, results come back.


def map_on_ray(
    function: Callable[[Item], Result], items: Iterable[Item], address: str, uses_gpu: bool = False
) -> Iterator[Result]:
    """The results of a function, as they come; each item has a core, or a GPU if it `uses_gpu` and the cluster has any.

    At most two items per core or GPU are sent before results come back, so memory is bounded."""
    with connect_to_ray(address) as ray:
        resources = ray.cluster_resources()
        on_gpu = uses_gpu and resources.get("GPU", 0) >= 1
        options = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
        task = ray.remote(**options, max_retries=MAX_RETRIES)(call_on_node)
        sent = ray.put(function)  # once for all items
        tasks = (task.remote(__version__, sent, item) for item in items)
        waiting = list(islice(tasks, 2 * int(resources.get("GPU" if on_gpu else "CPU", 1))))
        while waiting:
            finished, waiting = ray.wait(waiting, num_returns=1)
            result = get_result(ray, finished[0])
            waiting += islice(tasks, 1)
            yield result


def call_on_node(version: str, function: Callable[[Item], Result], item: Item) -> Result:
    """Call a function on a node of the cluster."""
    if version != __version__:
        raise ConfigError(f"electra is {version} here and {__version__} on a node of the Ray cluster; install the same")
    return function(item)


@contextmanager
def connect_to_ray(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster, or start Ray on this machine ("local"); yields the library and disconnects."""
    ray = import_optional("ray", "--ray")
    options = {"include_dashboard": False} if address == LOCAL else {}
    try:
        check_reachable(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"is {address}, where no Ray cluster can be reached ({reason}); use the address that `ray start --head` "
            f"printed, auto on one of its machines, or {LOCAL}",
            field="ray",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Raise if nothing answers at HOST:PORT, for which Ray would wait for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def get_result(ray: Any, reference: Any) -> Any:
    """The result of a task; raises the error that its function raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"a Ray task was lost {MAX_RETRIES + 1} times ({reason}); the same command continues") from None
