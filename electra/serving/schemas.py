"""Requests and responses of the server, as OpenAPI describes them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from electra.model.config import EmbeddingPooling
from electra.serving.config import LimitsConfig
from electra.serving.embed import Embedding
from electra.serving.inference import Detection, MaskPredictions, Method
from electra.serving.service import Service

MAX_COUNT = 100


class Error(BaseModel):
    """What is wrong, in one sentence."""

    error: str


RESULTS: dict[Method, Any] = {
    "detect": list[Detection],
    "fill": list[MaskPredictions],
    "embed": list[Embedding],
    "predict": list[dict[str, Any]],
}
ERRORS = {
    408: "The request did not arrive in time.",
    413: "The request has too many bytes.",
    422: "The request is not valid JSON, has other fields, or too many or too long texts.",
    429: "Too many texts are waiting; try again.",
}


def create_request_classes(service: Service, limits: LimitsConfig) -> dict[Method, type[BaseModel]]:
    """The class of the requests of each method, with the limits of the server and an example for its model."""
    texts = Annotated[
        list[Annotated[str, Field(max_length=limits.max_characters)]], Field(min_length=1, max_length=limits.max_texts)
    ]
    rows = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=limits.max_texts)]
    count = Annotated[int, Field(ge=1, le=MAX_COUNT, description="tokens for each [MASK]")]
    pooling = Annotated[EmbeddingPooling, Field(description="mean or maximum of all tokens, or the [CLS] token")]
    by_column = Annotated[rows | None, Field(description="instead of texts: objects by the column of the task")]
    fields: dict[Method, dict[str, Any]] = {
        "detect": {"texts": (texts, ...)},
        "fill": {"texts": (texts, ...), "count": (count, 5)},
        "embed": {"texts": (texts, ...), "pooling": (pooling, "mean")},
        "predict": {"texts": (texts | None, None), "rows": (by_column, None)},
    }
    return {
        method: create_model(
            f"{method.capitalize()}Request",
            __config__=ConfigDict(extra="forbid", json_schema_extra={"examples": [service.example(method)]}),
            **method_fields,
        )
        for method, method_fields in fields.items()
        if method in service.functions
    }


def describe_responses(method: Method) -> dict[int | str, dict[str, Any]]:
    """The responses of a method by status."""
    results = create_model(f"{method.capitalize()}Response", results=(RESULTS[method], ...))
    described: dict[int | str, dict[str, Any]] = {200: {"model": results, "description": "In the order of the texts."}}
    return described | {status: {"model": Error, "description": text} for status, text in ERRORS.items()}
