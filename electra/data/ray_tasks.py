"""Items computed by tasks on a Ray cluster (extra `ray`), which Ray repeats elsewhere if a node is lost.

Nodes need electra in the same version. Functions and items are sent to them, results come back.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from electra import __version__
from electra.data.files import import_optional
from electra.errors import ConfigError, DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL = "local"
CONNECT_SECONDS = 10.0
MAX_RETRIES = 10  # of a task whose process or node was lost


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
