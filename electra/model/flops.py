"""Parameters and floating-point operations, item by item.

Only matrix products count, two operations for a multiplication and an addition; looking up an embedding is none.
A training step costs three times its forward pass: the backward pass multiplies for the inputs and for the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from electra.model.config import ElectraConfig, EncoderConfig

TRAINING = 3  # forward, gradient of the inputs, gradient of the weights


@dataclass(frozen=True)
class Item:
    """What one part of a model costs to store, and to run forward over one row."""

    name: str
    parameters: int
    flops: int


def dense(name: str, inputs: int, outputs: int, times: int, has_bias: bool = True) -> Item:
    """A linear layer, applied to `times` vectors."""
    return Item(name, inputs * outputs + has_bias * outputs, 2 * inputs * outputs * times)


def norm(name: str, width: int) -> Item:
    """A LayerNorm with scale and shift."""
    return Item(name, 2 * width, 0)


def scale(name: str, width: int) -> Item:
    """A LayerNorm without shift."""
    return Item(name, width, 0)


def encoder_items(config: EncoderConfig, length: int, wanted: int) -> list[Item]:
    """The encoder's parts, over a row of `length` tokens, of which the last layer finishes those that are `wanted`;
    layers are added up."""
    every, finished = config.layers * length, (config.layers - 1) * length + wanted
    return (modern_items if config.is_modern() else classic_items)(config, length, every, finished)


def classic_items(config: EncoderConfig, length: int, every: int, finished: int) -> list[Item]:
    """The parts of a classic encoder; `every` token counts in each layer, `finished` are those that leave attention."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    tables = config.vocab_size + config.positions + config.segments
    layers = [
        dense("query, key, value", D, 3 * D, every),
        Item("attention", 0, 2 * 2 * every * length * D),  # scores, then mixing
        dense("attention output", D, D, finished),
        norm("attention norm", D),
        dense("feed-forward, widen", D, F, finished),
        dense("feed-forward, narrow", F, D, finished),
        norm("feed-forward norm", D),
    ]
    return [
        Item("embeddings", tables * E, 0),
        norm("embeddings norm", E),
        *([dense("embeddings to hidden", E, D, length)] if E != D else []),
        *(Item(item.name, config.layers * item.parameters, item.flops) for item in layers),
    ]


def modern_items(config: EncoderConfig, length: int, every: int, finished: int) -> list[Item]:
    """The same of a modern encoder; layers that see a window are counted as if they saw the whole row, as some
    kernels compute it."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    layers = [
        dense("query, key, value", D, 3 * D, every, has_bias=False),
        Item("attention", 0, 2 * 2 * every * length * D),  # scores, then mixing
        dense("attention output", D, D, finished, has_bias=False),
        dense("feed-forward, widen", D, 2 * F, finished, has_bias=False),
        dense("feed-forward, narrow", F, D, finished, has_bias=False),
        scale("feed-forward norm", D),
    ]
    return [
        Item("embeddings", config.vocab_size * E, 0),
        *([dense("embeddings to hidden", E, D, length, has_bias=False)] if E != D else []),
        scale("embeddings norm", D),
        *(Item(item.name, config.layers * item.parameters, item.flops) for item in layers),
        scale("attention norm", (config.layers - 1) * D),  # the first layer has none
        scale("final norm", D),
    ]


def generator_items(config: EncoderConfig, length: int, masked: int, wanted: int) -> list[Item]:
    """The generator's parts; its head runs at `masked` positions only, and its output table is the embeddings'."""
    E, D, V = config.embedding_width, config.width, config.vocab_size
    if config.is_modern():
        return [
            *encoder_items(config, length, wanted),
            dense("head", D, D, masked, has_bias=False),
            scale("head norm", D),
            *([Item("hidden to embeddings", 0, 2 * D * E * masked)] if E != D else []),  # the same projection
            Item("vocabulary logits", V, 2 * E * V * masked),
        ]
    return [
        *encoder_items(config, length, wanted),
        dense("head", config.width, E, masked),
        norm("head norm", E),
        Item("vocabulary logits", V, 2 * E * V * masked),
    ]


def discriminator_items(config: EncoderConfig, length: int) -> list[Item]:
    """The discriminator's parts."""
    return [
        *encoder_items(config, length, wanted=length),
        dense("head", config.width, config.width, length, has_bias=not config.is_modern()),
        *([scale("head norm", config.width)] if config.is_modern() else []),
        dense("rtd", config.width, 1, length),
    ]


def mlm_items(config: EncoderConfig, length: int, masked: int, wanted: int, copies: bool) -> list[Item]:
    """The parts of what predicts tokens in the discriminator's place: masked ones, or with a copy gate every one."""
    if copies:
        return [*generator_items(config, length, length, length), dense("copy gate", config.width, 1, length)]
    return generator_items(config, length, masked, wanted)


def itemize(config: ElectraConfig, length: int, masked: int, wanted: int | None = None) -> dict[str, list[Item]]:
    """The parts of a pair, as if nothing were shared. Guesses need the last layer's states of `masked` tokens only, and
    so many it makes, unless others are `wanted`."""
    items, wanted = {}, wanted or masked
    if config.generator:
        items["generator"] = generator_items(config.generator, length, masked, wanted)
    if config.discriminator and config.head == "rtd":
        items["discriminator"] = discriminator_items(config.discriminator, length)
    elif config.discriminator:
        copies = config.head == "copy_mlm"
        items["discriminator"] = mlm_items(config.discriminator, length, masked, wanted, copies)
    return items


def flops(items: Iterable[Item]) -> int:
    """Operations of a forward pass over one row."""
    return sum(item.flops for item in items)


def training_flops(config: ElectraConfig, length: int, masked: int, is_frozen: bool = False) -> int:
    """Operations of a training step over one row; a generator that is frozen goes forward only."""
    parts = itemize(config, length, masked)
    return sum((1 if is_frozen and name == "generator" else TRAINING) * flops(items) for name, items in parts.items())


def parameters(items: Iterable[Item]) -> int:
    """Parameters of one part."""
    return sum(item.parameters for item in items)
