"""`electra serve`: an HTTP server for a model."""

import asyncio
import logging
import math
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from electra import __version__
from electra.errors import ConfigError, DataError
from electra.exporting.node_packages import has_node_packages
from electra.formatting import format_count
from electra.model.config import EmbeddingPooling
from electra.serving.config import LimitsConfig, ServeConfig
from electra.serving.embed import Embedding
from electra.serving.inference import Detection, MaskPredictions, Method
from electra.serving.limits import LimitedApp, Metrics, RequestError, create_protocol, encode_error
from electra.serving.service import Batcher, QueueFullError, Service, load_service
from electra.signals import STOP_SIGNALS, handle_signals

STATIC = Path(__file__).with_name("static")
CHARACTERS_PER_BATCH_TOKEN = 16
"""Requests that are computed together fill about four forward passes: texts of similar length then share one."""
MAX_CONNECTIONS = 512
HEADERS = {"content-security-policy": "default-src 'self'", "x-content-type-options": "nosniff"}
INDEX = """<!doctype html><html lang="en"><meta charset="utf-8"><title>electra</title>
<p>An <a href="https://arxiv.org/abs/2003.10555">electra</a> server:
<a href="/docs">API documentation</a>.</p></html>"""


class Error(BaseModel):
    """What is wrong, in one sentence."""

    error: str


ERRORS = {
    408: "The request did not arrive in time.",
    413: "The request has too many bytes.",
    422: "The request is not valid JSON, has other fields, or too many or too long texts.",
    429: "Too many texts are waiting; try again.",
}
COUNT = Annotated[int, Field(ge=1, le=100, description="tokens for each [MASK]")]
POOLING = Annotated[EmbeddingPooling, Field(description="mean or maximum of all tokens, or the [CLS] token")]


@dataclass(frozen=True)
class Endpoint:
    """A method of a model over HTTP."""

    summary: str
    results: Any  # their type
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # type and default of the method's option


ENDPOINTS: dict[Method, Endpoint] = {
    "detect": Endpoint("The probability of each token that it was replaced", list[Detection]),
    "fill": Endpoint("The most likely tokens for each [MASK]", list[MaskPredictions], {"count": (COUNT, 5)}),
    "embed": Endpoint("The embedding of each text", list[Embedding], {"pooling": (POOLING, "mean")}),
    "predict": Endpoint("The prediction of the fine-tuned model for each text or row", list[dict[str, Any]]),
}


@dataclass(frozen=True)
class ServeResult:
    """What a server did until it was stopped."""

    requests: int

    def __str__(self) -> str:
        return f"stopped after {format_count(self.requests, 'request')}"


def create_app(service: Service, limits: LimitsConfig, name: str = "model") -> FastAPI:
    """The application of a loaded model; its state has the batcher and the metrics, and the folder of the page."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        max_size = CHARACTERS_PER_BATCH_TOKEN * service.batch_tokens
        batcher = Batcher(service.compute, max_queue=limits.max_queue, max_size=max_size)
        batcher.on_batch = metrics.batches.add
        app.state.batcher = batcher
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        await asyncio.wait([task])

    app = FastAPI(
        title=f"electra: {name}",
        version=__version__,
        summary="A text encoder: texts in, JSON out. Requests that arrive together are computed together.",
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.metrics, app.state.page = metrics, None
    add_methods(app, service, limits)
    add_pages(app, service, name)
    add_error_handlers(app)
    endpoints = {route.path for route in app.routes if hasattr(route, "path")} - {""}
    app.add_middleware(LimitedApp, limits=limits, metrics=metrics, endpoints=endpoints)
    return app


def add_methods(app: FastAPI, service: Service, limits: LimitsConfig) -> None:
    """Add an endpoint for each method of the model, and one that explains it for each other method."""

    async def compute(key: tuple[Method, Any], items: list[Any], texts: list[Any]) -> Response:
        sizes = [count_characters(text) for text in texts]
        if max(sizes, default=0) > limits.max_characters:
            raise RequestError(
                422, f"a text has {max(sizes):,} characters; at most {limits.max_characters:,} are allowed"
            )
        try:
            results = await app.state.batcher.submit(key, items, sum(sizes))
        except QueueFullError:
            raise RequestError(429, f"{limits.max_queue:,} texts are waiting already; try again in a second") from None
        return Response(msgspec.json.encode({"results": results}), media_type="application/json")

    def create_handler(method: Method) -> Any:
        async def of_texts(body: Any) -> Response:
            option = next((getattr(body, name) for name in ENDPOINTS[method].options), None)
            return await compute((method, option), body.texts, body.texts)

        async def of_texts_or_rows(body: Any) -> Response:
            if (body.texts is None) == (body.rows is None):
                raise RequestError(422, "a request needs either texts or rows")
            rows = body.rows or service.rows_of_texts(body.texts)
            return await compute((method, None), rows, [cell for row in rows for cell in row.values()])

        handler = of_texts_or_rows if method == "predict" else of_texts
        handler.__name__ = method
        handler.__annotations__["body"] = create_request_class(method, service, limits)
        return handler

    for method, endpoint in ENDPOINTS.items():
        if method in service.functions:
            responses = describe_responses(method)
            app.post(f"/{method}", summary=endpoint.summary, responses=responses, tags=["model"])(
                create_handler(method)
            )
        else:
            app.post(f"/{method}", include_in_schema=False)(explain_missing(method, service))


def create_request_class(method: Method, service: Service, limits: LimitsConfig) -> type[BaseModel]:
    """The class of the requests of a method, with the limits of the server and an example for its model."""
    texts = Annotated[
        list[Annotated[str, Field(max_length=limits.max_characters)]], Field(min_length=1, max_length=limits.max_texts)
    ]
    fields: dict[str, Any] = {"texts": (texts, ...), **ENDPOINTS[method].options}
    if method == "predict":
        rows = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=limits.max_texts)]
        by_column = Annotated[rows | None, Field(description="instead of texts: objects by the column of the task")]
        fields = {"texts": (texts | None, None), "rows": (by_column, None)}
    config = ConfigDict(extra="forbid", json_schema_extra={"examples": [service.example(method)]})
    return create_model(f"{method.capitalize()}Request", __config__=config, **fields)


def describe_responses(method: Method) -> dict[int | str, dict[str, Any]]:
    """The responses of a method by status."""
    results = create_model(f"{method.capitalize()}Response", results=(ENDPOINTS[method].results, ...))
    described: dict[int | str, dict[str, Any]] = {200: {"model": results, "description": "In the order of the texts."}}
    return described | {status: {"model": Error, "description": text} for status, text in ERRORS.items()}


def count_characters(cell: Any) -> int:
    """The characters of a text, or of the texts in a list, each with a space; lists may be nested."""
    count, remaining = 0, [cell]  # not recursive: a client may nest as deeply as the JSON parser allows
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, (list, dict)):
            count += len(value)
            remaining += value.values() if isinstance(value, dict) else value
    return count


def explain_missing(method: Method, service: Service) -> Any:
    present = ", ".join(f"/{name}" for name in service.functions)

    async def missing() -> Response:
        raise RequestError(404, f"this model has no /{method}, it has {present}")

    return missing


def add_pages(app: FastAPI, service: Service, name: str) -> None:
    """Add what is read with GET: health, metrics, documentation, and the page of the model at /."""
    health = {"status": "ok", "model": name, "methods": list(service.functions), "version": __version__}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the server works, and what its model can do", tags=["server"])
    async def read_health() -> dict[str, Any]:
        return health

    @app.get("/metrics", summary="Counters in Prometheus' text format", tags=["server"])
    async def read_metrics() -> PlainTextResponse:
        return PlainTextResponse(app.state.metrics.render(app.state.batcher.queued))

    @app.get("/docs", include_in_schema=False)
    @app.get("/docs.js", include_in_schema=False)
    @app.get("/docs.css", include_in_schema=False)
    async def read_docs(request: Request) -> FileResponse:
        name = request.url.path.strip("/")
        return FileResponse(STATIC / ("docs.html" if name == "docs" else name), headers=HEADERS)

    @app.get("/{path:path}", include_in_schema=False)
    async def read_page(request: Request, path: str) -> Response:
        """A file of the page or, until it is made, a link to the documentation."""
        if path in service.functions:
            raise HTTPException(405, "use POST", {"allow": "POST"})
        if app.state.page is not None:
            return await app.state.page.get_response(path or "index.html", request.scope)
        if path:
            raise HTTPException(404)
        return HTMLResponse(INDEX, headers=HEADERS)


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors as JSON with one sentence."""

    def answer(status: int, message: str, **headers: str) -> Response:
        return Response(encode_error(message), status, headers, "application/json")

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return answer(error.status, error.message, **({"retry-after": "1"} if error.status == 429 else {}))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return answer(422, f"the request is not valid JSON: {first['ctx']['error']} (character {first['loc'][-1]})")
        place = ".".join(map(str, first["loc"][1:]))
        if not place:
            return answer(422, "the request must be a JSON object, sent with content-type: application/json")
        if first["type"] == "extra_forbidden":
            return answer(422, f"unknown field {place}; /docs lists the fields of a request")
        return answer(422, f"{place}: {first['msg']}")

    async def wrong_input(request: Request, error: Exception) -> Response:
        is_unicode = isinstance(error, UnicodeError)
        return answer(422, "a text is not valid Unicode" if is_unicode else str(error).removeprefix("texts, "))

    for kind in (ConfigError, DataError, UnicodeError):
        app.exception_handler(kind)(wrong_input)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 400:  # FastAPI's, of a body that it cannot parse
            return answer(422, "the request is not valid JSON in UTF-8, or is nested too deeply")
        messages = {
            404: f"there is no {path}; /docs lists what there is",
            405: f"{path} does not take {request.method}" + "; use POST" * (error.detail == "use POST"),
        }
        return answer(error.status_code, messages.get(error.status_code, str(error.detail)), **(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return answer(500, f"the server failed ({type(error).__name__}); its log has the details")


class Server(uvicorn.Server):
    """uvicorn's server, which ends normally after a signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handle_signals(lambda number, frame: self.handle_exit(number, None), *STOP_SIGNALS):
            yield


def open_socket(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason.lower()}; choose another --host or --port"
        ) from None


def create_server(app: FastAPI, limits: LimitsConfig) -> Server:
    settings = uvicorn.Config(
        app,
        http=create_protocol(limits.client_timeout),
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(limits.stop_timeout),
    )
    return Server(settings)


def serve(config: ServeConfig) -> ServeResult:
    """Answer requests until a signal stops the server."""
    with open_socket(config) as listening:
        service = load_service(config)
        app = create_app(service, config.limits, config.model.name)
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        methods = ", ".join(service.functions)
        print(f"electra: {config.model} answers {methods} at {url} ({url}/docs); Ctrl-C stops it", file=sys.stderr)
        asyncio.run(run(create_server(app, config.limits), listening, app, config))
    return ServeResult(sum(app.state.metrics.requests.values()))


async def run(server: Server, listening: socket.socket, app: FastAPI, config: ServeConfig) -> None:
    """Run the server, and beside it the command that makes the page."""
    with tempfile.TemporaryDirectory(prefix="electra-page-") as folder:
        page = asyncio.create_task(make_page(app, config.model, Path(folder, "page"))) if config.page else None
        try:
            await server.serve(sockets=[listening])
        finally:
            if page is not None:
                page.cancel()
                await asyncio.wait([page])


async def make_page(app: FastAPI, model: Path, folder: Path) -> None:
    """Write the page of a model in another process, and show it at /; without its libraries, which a server does not
    fetch, there is no page."""
    if not has_node_packages():
        fetch = "python -m electra.exporting.node_packages"
        print(
            f"electra: there is no page at /: its JavaScript libraries are missing; fetch them: {fetch}",
            file=sys.stderr,
        )
        return
    command = [sys.executable, "-m", "electra", "export", "--model", model, "--to", "page", "--output", folder]
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=DEVNULL, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode == 0:
        app.state.page = StaticFiles(directory=folder, html=True)
    else:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("electra: ")
        print(f"electra: there is no page at /: {reason}", file=sys.stderr)
