"""A server in a thread of the tests, and clients that ask it."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from electra.serving.config import LimitsConfig
from electra.serving.server import Server, create_app, create_server
from electra.serving.service import Service


class RunningServer:
    """A server in a thread; `stop` is what a signal does."""

    def __init__(self, service: Service, limits: LimitsConfig) -> None:
        self.app: FastAPI = create_app(service, limits)
        self.server: Server = create_server(self.app, limits)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self.socket.getsockname()[1]
        run = self.server.serve(sockets=[self.socket])
        self.thread = threading.Thread(target=lambda: asyncio.run(run))
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True

    def ask(self, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        """Status and JSON of the answer to a request."""
        return ask(self.port, path, body, timeout)


def ask(port: int, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        is_json = "json" in (response.getheader("content-type") or "")
        return response.status, json.loads(content) if is_json else content.decode()
    finally:
        connection.close()


@contextmanager
def running_server(service: Service, **limits: Any) -> Iterator[RunningServer]:
    server = RunningServer(service, LimitsConfig(**limits))
    try:
        while not server.server.started:
            assert server.thread.is_alive()
            threading.Event().wait(0.01)
        yield server
    finally:
        server.stop()
        server.thread.join(timeout=60)
        server.socket.close()
        assert not server.thread.is_alive()
