"""What a server computes: the methods of a loaded model on batches of texts or rows."""

from collections.abc import Callable
from dataclasses import asdict
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
        self.embedder = lru_cache(lambda pooling: self.create_embedder(pooling))

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
