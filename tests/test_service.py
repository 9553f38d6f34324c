"""Requests are computed together, each gets its own results, and one at fault fails alone."""

import asyncio
import threading

import pytest

from electra.serving.service import Batcher, QueueFullError


class Recorder:
    """Computes 10 · item, when it is allowed to, and records the batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.may_run = threading.Event()

    def __call__(self, key: str, items: list[int]) -> list[int]:
        assert self.may_run.wait(10)
        self.batches.append((key, items))
        if any(item < 0 for item in items):
            raise ValueError(str(items))
        return [10 * item for item in items]


def run_requests(requests: list[tuple[str, list[int]]], max_queue: int = 100, max_size: int = 100, cancel: int = -1):
    """Submit an item, and while it is computed all requests; returns their results and the batches after the first."""
    compute = Recorder()

    async def main() -> list:
        batcher = Batcher(compute, max_queue=max_queue, max_size=max_size)
        worker = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.submit("first", [0], 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        while batcher.queued:  # until the first is computed
            await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(batcher.submit(key, items, len(items))) for key, items in requests]
        await asyncio.sleep(0.01)
        if cancel >= 0:
            tasks[cancel].cancel()
            await asyncio.sleep(0)
        compute.may_run.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await first
        assert batcher.queued == 0
        worker.cancel()
        await asyncio.wait([worker])
        return results

    return asyncio.run(main()), compute.batches[1:]


def test_requests_that_wait_are_computed_together_and_get_their_own_results():
    results, batches = run_requests([("a", [1, 2]), ("a", [3]), ("a", [4, 5])])
    assert results == [[10, 20], [30], [40, 50]]
    assert batches == [("a", [1, 2, 3, 4, 5])]


def test_requests_with_another_key_are_computed_apart():
    results, batches = run_requests([("a", [1]), ("b", [2]), ("a", [3])])
    assert results == [[10], [20], [30]]
    assert batches == [("a", [1, 3]), ("b", [2])]


def test_a_batch_has_a_largest_size_unless_one_request_is_larger():
    results, batches = run_requests([("a", [1, 2, 3]), ("a", [4]), ("a", [5])], max_size=2)
    assert results == [[10, 20, 30], [40], [50]]
    assert batches == [("a", [1, 2, 3]), ("a", [4, 5])]


def test_only_the_request_at_fault_fails():
    results, batches = run_requests([("a", [1]), ("a", [-2]), ("a", [3])])
    assert results[::2] == [[10], [30]]
    assert isinstance(results[1], ValueError)
    assert str(results[1]) == "[-2]"
    assert batches == [("a", [1, -2, 3]), ("a", [1]), ("a", [-2]), ("a", [3])]


def test_a_full_queue_refuses_requests():
    results, _ = run_requests([("a", [1, 2]), ("a", [3, 4]), ("a", [5])], max_queue=3)
    assert isinstance(results[1], QueueFullError)
    assert (results[0], results[2]) == ([10, 20], [50])


def test_a_request_whose_client_has_gone_is_not_computed():
    results, batches = run_requests([("a", [1]), ("a", [2])], cancel=0)
    assert isinstance(results[0], asyncio.CancelledError)
    assert batches == [("a", [2])]


def test_the_worker_can_be_stopped_while_it_waits():
    async def main() -> None:
        worker = asyncio.create_task(Batcher(Recorder(), max_queue=1, max_size=1).run())
        await asyncio.sleep(0)
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker

    asyncio.run(main())
