"""ASGI middleware and protocol limits of the HTTP server (sizes, slow clients, clients that disconnect), and metrics in
Prometheus' text format."""

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from electra.serving.config import LimitsConfig

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

JSON = [(b"content-type", b"application/json")]
CLOSE = [(b"connection", b"close")]  # what the client still sends is not read
SECOND_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TEXT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
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
        self.batches = Histogram(TEXT_BOUNDS)

    def add_request(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests[endpoint, status] += 1
        self.seconds.setdefault(endpoint, Histogram(SECOND_BOUNDS)).add(seconds)

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
        return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0


class RequestError(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def encode_error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


class LimitedApp:
    """An ASGI application whose requests are read as a whole, within limits, before it is called; it is cancelled when
    the client goes away."""

    def __init__(self, app: App, limits: LimitsConfig, metrics: Metrics, endpoints: set[str]) -> None:
        self.app, self.limits, self.metrics, self.endpoints = app, limits, metrics, endpoints

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499  # the client went away, as nginx logs it

        async def limited_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            async with asyncio.timeout(self.limits.client_timeout):
                await send(message)

        try:
            body = await self.read_body(receive)
            if body is not None:
                await self.run_until_disconnect(scope, body, receive, limited_send)
        except RequestError as error:
            await limited_send({"type": "http.response.start", "status": error.status, "headers": JSON + CLOSE})
            await limited_send({"type": "http.response.body", "body": encode_error(error.message)})
        except Exception:
            status = 500  # which is answered outside of this application
            raise
        finally:
            path = scope["path"] if scope["path"] in self.endpoints else "other"
            self.metrics.add_request(path, status, time.perf_counter() - start)

    async def read_body(self, receive: Receive) -> bytes | None:
        """The body of a request; None if the client went away."""
        body, size, is_complete = bytearray(), 0, False
        try:
            async with asyncio.timeout(self.limits.client_timeout):
                while not is_complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, is_complete = message.get("body", b""), not message.get("more_body", False)
                    size += len(part)
                    if size <= self.limits.max_body:
                        body += part
                    elif size > 8 * self.limits.max_body:
                        break  # a client that sends little more than allowed gets its answer after it has sent all
        except TimeoutError:
            if size <= self.limits.max_body:
                seconds = self.limits.client_timeout
                raise RequestError(408, f"the request did not arrive within {seconds:g} seconds") from None
        if size > self.limits.max_body:
            raise RequestError(
                413, f"the request is larger than {self.limits.max_body:,} bytes; send fewer or shorter texts"
            )
        return bytes(body)

    async def run_until_disconnect(
        self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send
    ) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(self.app(scope, replay, send))
        disconnect = asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not answer.done():
                answer.cancel()
        with suppress(asyncio.CancelledError, TimeoutError):  # gone, or reads too slowly
            await answer


class CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport, self.written = transport, 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def create_protocol(timeout: float) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which closes connections whose next request has no complete head after `timeout`
    seconds, or whose client reads nothing of a response for as long; uvicorn itself waits forever."""

    class TimedProtocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None
        unread_timer: asyncio.TimerHandle | None = None

        # as uvicorn declares it; asyncio's type is wider
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.counter = CountingTransport(transport)
            super().connection_made(self.counter)  # type: ignore[arg-type]  # it has all methods of a transport
            self.watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.watch_head()
            if self.unread_timer is None:
                self.watch_unread()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_timer()
            if self.unread_timer is not None:
                self.unread_timer.cancel()
            super().connection_lost(exc)

        def watch_unread(self, before: int | None = None) -> None:
            """End the connection if no more bytes of responses were sent than `before`, or look again after a while, as
            long as some are not sent."""
            unsent, self.unread_timer = self.transport.get_write_buffer_size(), None
            sent = self.counter.written - unsent
            if unsent and sent == before:
                self.transport.abort()
            elif unsent:
                self.unread_timer = self.loop.call_later(timeout, self.watch_unread, sent)

        def watch_head(self) -> None:
            """Start the timer where a head is expected, stop it where a request is handled."""
            if self.conn.their_state is not h11.IDLE:
                self.stop_timer()
            elif self.timer is None and not self.transport.is_closing():
                self.timer = self.loop.call_later(timeout, self.transport.close)

        def stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return TimedProtocol
