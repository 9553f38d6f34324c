"""Counters of the server in the text format of Prometheus."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAGE_SIZE = 4096


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        for bound, count in zip((*self.bounds, "+Inf"), accumulate(self.counts), strict=True):
            yield f'{name}_bucket{{{labels}{"," * bool(labels)}le="{bound}"}} {count}'
        of = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{of} {self.total:.6f}"
        yield f"{name}_count{of} {sum(self.counts)}"


class Metrics:
    """What the server has done since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by endpoint and status
        self.seconds: dict[str, Histogram] = {}  # by endpoint
        self.batches = Histogram(TEXTS)

    def add_request(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests[endpoint, status] += 1
        self.seconds.setdefault(endpoint, Histogram(SECONDS)).add(seconds)

    def render(self, queued: int) -> str:
        """All metrics; `queued` texts wait now."""
        lines = [*heading("requests_total", "counter", "Requests by endpoint and status.")]
        for (endpoint, status), count in sorted(self.requests.items()):
            lines.append(f'electra_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}')
        lines += heading("request_seconds", "histogram", "Time from the first byte of a request to its response.")
        for endpoint, histogram in sorted(self.seconds.items()):
            lines += histogram.lines("electra_request_seconds", f'endpoint="{endpoint}"')
        lines += heading("batch_texts", "histogram", "Texts that were computed together.")
        lines += self.batches.lines("electra_batch_texts")
        lines += [
            *heading("queued_texts", "gauge", "Texts that wait to be computed."),
            f"electra_queued_texts {queued}",
        ]
        if memory := resident_memory():
            lines += ["# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {memory}"]
        return "\n".join(lines) + "\n"


def heading(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP electra_{name} {text}"
    yield f"# TYPE electra_{name} {kind}"


def resident_memory() -> int:
    """Bytes of this process in memory; 0 where the system does not report them."""
    try:
        return PAGE_SIZE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0
