"""Parameters and floating-point operations of a model, item by item.

`itemize` counts matrix products only, a multiplication and an addition as two operations; embedding lookups are free.
A training step costs three forward passes: the backward pass computes the gradients of inputs and of weights.

`published_items` counts as the authors of the paper did, to compare with their table. They also count elementwise
operations (biases, dropout, GELU, norms, softmax), count embedding lookups as products with one-hot vectors, let every
generator predict 5 of 32 tokens and compute the last layer's states of all tokens, and count the backward pass like a
forward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from electra.model.config import ElectraConfig, EncoderConfig

TRAINING_FACTOR = 3  # forward pass, gradients of inputs, gradients of weights
PUBLISHED_TRAINING_FACTOR = 2  # forward and backward pass

DROPOUT, NORM, GELU, SOFTMAX = 4, 5, 8, 5  # published operations per element
BIAS = RESIDUAL = SCALE = 1


@dataclass(frozen=True)
class Item:
    """Parameters of one part of a model, and operations of its forward pass over one row."""

    name: str
    parameters: int
    flops: int


def linear_item(name: str, inputs: int, outputs: int, tokens: int, has_bias: bool) -> Item:
    return Item(name, inputs * outputs + has_bias * outputs, 2 * inputs * outputs * tokens)


def norm_item(name: str, width: int, has_bias: bool) -> Item:
    return Item(name, width + has_bias * width, 0)


def encoder_items(config: EncoderConfig, length: int, last_layer_tokens: int) -> list[Item]:
    """The encoder's items over a row of `length` tokens; the last layer computes states of `last_layer_tokens` only.

    Local attention is counted like global attention, as some kernels compute it."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    is_modern = config.is_modern()
    has_bias = not is_modern
    tokens = config.layers * length
    outputs = tokens - length + last_layer_tokens  # tokens after attention, over all layers
    tables = config.vocab_size + (0 if is_modern else config.positions + config.segments)
    project = [linear_item("embeddings to hidden", E, D, length, has_bias)] if E != D else []
    norm = norm_item("embeddings norm", D if is_modern else E, has_bias)
    layers = [
        linear_item("query, key, value", D, 3 * D, tokens, has_bias),
        Item("attention", 0, 2 * 2 * tokens * length * D),  # scores, weighted sum
        linear_item("attention output", D, D, outputs, has_bias),
        linear_item("feed-forward up", D, 2 * F if is_modern else F, outputs, has_bias),
        linear_item("feed-forward down", F, D, outputs, has_bias),
        norm_item("feed-forward norm", D, has_bias),
    ]
    return [
        Item("embeddings", tables * E, 0),
        *([*project, norm] if is_modern else [norm, *project]),
        *(replace(item, parameters=config.layers * item.parameters) for item in layers),
        norm_item("attention norm", (config.layers - is_modern) * D, has_bias),  # the first modern layer has none
        *([norm_item("final norm", D, has_bias)] if is_modern else []),
    ]


def mlm_items(config: EncoderConfig, length: int, masked: int, last_layer_tokens: int) -> list[Item]:
    """The items of a masked language model with predictions at `masked` positions and a tied output table."""
    E, D, V = config.embedding_width, config.width, config.vocab_size
    has_bias = not config.is_modern()
    head_width = D if config.is_modern() else E
    tied_projection = [Item("hidden to embeddings", 0, 2 * D * E * masked)] if head_width != E else []
    return [
        *encoder_items(config, length, last_layer_tokens),
        linear_item("head", D, head_width, masked, has_bias),
        norm_item("head norm", head_width, has_bias),
        *tied_projection,
        Item("vocabulary logits", V, 2 * E * V * masked),
    ]


def rtd_items(config: EncoderConfig, length: int) -> list[Item]:
    """The items of a discriminator with a replaced token detection head."""
    D, has_bias = config.width, not config.is_modern()
    return [
        *encoder_items(config, length, last_layer_tokens=length),
        linear_item("head", D, D, length, has_bias),
        *([norm_item("head norm", D, has_bias)] if config.is_modern() else []),
        linear_item("classifier", D, 1, length, has_bias=True),
    ]


def itemize(
    config: ElectraConfig, length: int, masked: int, last_layer_tokens: int | None = None
) -> dict[str, list[Item]]:
    """The items of generator and discriminator over a row, shared parameters in both.

    The last layer of a masked language model computes states of `last_layer_tokens`, by default of the masked ones."""
    items = {}
    outputs = last_layer_tokens or masked
    if config.generator:
        items["generator"] = mlm_items(config.generator, length, masked, outputs)
    if (size := config.discriminator) is not None:
        if config.head == "rtd":
            items["discriminator"] = rtd_items(size, length)
        elif config.head == "mlm":
            items["discriminator"] = mlm_items(size, length, masked, outputs)
        else:
            gate = linear_item("copy gate", size.width, 1, length, has_bias=True)
            items["discriminator"] = [*mlm_items(size, length, length, length), gate]
    return items


def total_flops(items: Iterable[Item]) -> int:
    return sum(item.flops for item in items)


def total_parameters(items: Iterable[Item]) -> int:
    return sum(item.parameters for item in items)


def training_flops(config: ElectraConfig, length: int, masked: int, is_frozen: bool = False) -> int:
    """Operations of a training step over one row; a frozen generator has a forward pass only."""
    forward = {part: total_flops(items) for part, items in itemize(config, length, masked).items()}
    return sum((1 if is_frozen and part == "generator" else TRAINING_FACTOR) * flops for part, flops in forward.items())


def published_items(config: ElectraConfig, length: int) -> dict[str, list[Item]]:
    """The items of a pair over a row of `length` tokens, counted as the authors did."""
    masked = max(1, length * 5 // 32)  # 20 of 128 and 80 of 512 as in BERT, also where a quarter is masked
    added: dict[str, dict[str, int]] = {}
    if config.generator:
        added["generator"] = published_encoder(config.generator, length) | published_mlm(config.generator, masked)
    if config.discriminator:
        head = {"head": length * (BIAS + GELU) * config.discriminator.width, "classifier": 0}
        added["discriminator"] = published_encoder(config.discriminator, length) | head
    return {
        part: [replace(item, flops=item.flops + added[part][item.name]) for item in items]
        for part, items in itemize(config, length, masked, last_layer_tokens=length).items()
    }


def published_encoder(config: EncoderConfig, length: int) -> dict[str, int]:
    """What the authors count in addition to an encoder's matrix products, by item."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    entries = config.vocab_size + length + config.segments  # lengths of the one-hot vectors
    embeddings = {
        "embeddings": 2 * E * entries + 2 * E + DROPOUT * E,  # three lookups, two additions
        "embeddings norm": NORM * E,
        "embeddings to hidden": BIAS * D,
    }
    layer = {
        "query, key, value": BIAS * 3 * D,
        "attention": (SOFTMAX + DROPOUT + SCALE) * length * config.heads,
        "attention output": (BIAS + DROPOUT + RESIDUAL) * D,
        "attention norm": NORM,  # per vector instead of per element: an error, but the published numbers contain it
        "feed-forward up": (BIAS + GELU) * F,
        "feed-forward down": (BIAS + DROPOUT + RESIDUAL) * D,
        "feed-forward norm": NORM * D,
    }
    per_row = {name: length * count for name, count in embeddings.items()}
    return per_row | {name: length * config.layers * count for name, count in layer.items()}


def published_mlm(config: EncoderConfig, masked: int) -> dict[str, int]:
    """What the authors count in addition to the matrix products of an MLM head, by item."""
    E, V = config.embedding_width, config.vocab_size
    loss = 2 * V  # product with the one-hot label
    head = {"head": (BIAS + GELU) * E, "head norm": NORM * E, "vocabulary logits": SOFTMAX * V + loss}
    return {name: masked * count for name, count in head.items()}
