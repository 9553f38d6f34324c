"""What a server computes: the methods of a loaded model on texts or rows, those of waiting requests together."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from electra.errors import ConfigError, report_panics
from electra.finetuning.predict import Predictor
from electra.finetuning.tasks import Task
from electra.model.config import EmbeddingPooling
from electra.model.storage import is_onnx_folder
from electra.serving.config import ServeConfig
from electra.serving.embed import embed_texts
from electra.serving.embedder import Embedder
from electra.serving.inference import Method, Model, load, load_onnx

Compute = Callable[[Any, list[Any]], list[Any]]
Function = Callable[[list[Any], Any], list[Any]]  # of texts or rows, and of an option

BATCH_TOKENS = {"cpu": 512, "cuda": 16_384}  # by device
EXAMPLES: dict[Method, str] = {
    "detect": "The chef ate the purple",
    "fill": "The chef ate the [MASK]",
    "embed": "The chef ate the meal",
    "predict": "A meal to remember",
}


class Service:
    """A loaded model and its methods, each a function of texts or rows and of one option."""

    def __init__(self, model: Model | Predictor, batch_tokens: int | None = None) -> None:
        self.model = model
        self.batch_tokens = batch_tokens or BATCH_TOKENS[model.device.type]
        model.max_tokens = self.batch_tokens
        functions: dict[Method, Function] = {
            "detect": self.detect,
            "fill": self.fill,
            "embed": self.embed,
            "predict": self.predict,
        }
        names: list[Method] = ["predict"] if isinstance(model, Predictor) else model.methods()
        self.functions = {name: functions[name] for name in names}
        self.embedder = lru_cache(self.create_embedder)

    def compute(self, key: tuple[Method, Any], items: list[Any]) -> list[Any]:
        """The results of a method, with its option, for texts or rows; raises a ValueError if one of them is at
        fault."""
        method, option = key
        with report_panics():
            return self.functions[method](items, option)

    def detect(self, texts: list[str], option: None) -> list[Any]:
        assert isinstance(self.model, Model)
        return [asdict(each) for each in self.model.detect_batch(texts)]

    def fill(self, texts: list[str], count: int) -> list[Any]:
        assert isinstance(self.model, Model)
        return [asdict(each) for each in self.model.fill_batch(texts, count)]

    def embed(self, texts: list[str], pooling: EmbeddingPooling) -> list[Any]:
        return [asdict(each) for each in embed_texts(self.embedder(pooling), texts)]

    def create_embedder(self, pooling: EmbeddingPooling) -> Embedder:
        assert isinstance(self.model, Model)
        return self.model.create_embedder(pooling=pooling, max_tokens=self.batch_tokens)

    def predict(self, rows: list[dict[str, Any]], option: None) -> list[Any]:
        assert isinstance(self.model, Predictor)
        return [prediction | {"is_truncated": each} for prediction, each in self.model.predict_rows(rows)]

    def rows_of_texts(self, texts: list[str]) -> list[dict[str, Any]]:
        """Rows of a task that has one text, or words, in each."""
        assert isinstance(self.model, Predictor)
        task = self.model.task
        if not has_one_text(task):
            columns = ", ".join(example_row(task))
            raise ConfigError(f"task {task.name} ({task.kind}) needs rows, objects with {columns}, instead of texts")
        return [{str(task.text): text} for text in texts]

    def example(self, method: Method) -> dict[str, Any]:
        """A request of a method for this model."""
        if isinstance(self.model, Predictor) and not has_one_text(self.model.task):
            return {"rows": [example_row(self.model.task)]}
        return {"texts": [EXAMPLES[method]]}


def has_one_text(task: Task) -> bool:
    return task.text is not None and task.text_b is None and not task.choices


def example_row(task: Task) -> dict[str, Any]:
    """A row with the columns that a task reads."""
    texts = [column for column in (task.text, task.text_b) if column is not None]
    row: dict[str, Any] = {column: f"The text of the column {column}." for column in texts}
    if len(task.choices) == 1:
        return row | {task.choices[0]: ["one choice", "another choice"]}
    return row | {column: f"the choice {column}" for column in task.choices}


def load_service(config: ServeConfig) -> Service:
    """Load the model of a server."""
    is_onnx = is_onnx_folder(config.model)
    if config.backend == "onnx" and not is_onnx:
        raise ConfigError(
            f"{config.model} has no ONNX files; write a folder that has: electra export --model {config.model} --to "
            "onnx --output …"
        )
    if config.backend == "torch" and is_onnx:
        raise ConfigError(f"{config.model} has ONNX files only; --backend onnx serves them")
    if config.int8 and not is_onnx:
        raise ConfigError("needs a folder that electra export --to onnx --int8 wrote", field="int8")
    if config.device == "cuda" and is_onnx:
        raise ConfigError("is cuda, but ONNX files are computed on the CPU; leave out this flag", field="device")
    model = load_onnx(config.model, config.int8) if is_onnx else load(config.model, config.device)
    return Service(model, config.limits.batch_tokens)


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
