"""Parameters and floating-point operations, item by item.

Only matrix products count, two operations for a multiplication and an addition; looking up an embedding is none.
A training step costs three times its forward pass: the backward pass multiplies for the inputs and for the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from electra.model.config import EncoderConfig
from electra.model.electra import ElectraConfig

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


def encoder_items(config: EncoderConfig, length: int) -> list[Item]:
    """The encoder's parts, over a row of `length` tokens; layers are added up."""
    return modern_items(config, length) if config.is_modern() else classic_items(config, length)


def classic_items(config: EncoderConfig, length: int) -> list[Item]:
    """The parts of a classic encoder."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    tables = config.vocabulary + config.positions + config.segments
    layer = [
        dense("query, key, value", D, 3 * D, length),
        Item("attention", 0, 2 * 2 * length * length * D),  # scores, then mixing
        dense("attention output", D, D, length),
        norm("attention norm", D),
        dense("feed-forward, widen", D, F, length),
        dense("feed-forward, narrow", F, D, length),
        norm("feed-forward norm", D),
    ]
    return [
        Item("embeddings", tables * E, 0),
        norm("embeddings norm", E),
        *([dense("embeddings to hidden", E, D, length)] if E != D else []),
        *(Item(item.name, config.layers * item.parameters, config.layers * item.flops) for item in layer),
    ]


def modern_items(config: EncoderConfig, length: int) -> list[Item]:
    """The parts of a modern encoder; layers that see a window compute the whole row and hide the rest."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    layer = [
        dense("query, key, value", D, 3 * D, length, has_bias=False),
        Item("attention", 0, 2 * 2 * length * length * D),  # scores, then mixing
        dense("attention output", D, D, length, has_bias=False),
        dense("feed-forward, widen", D, 2 * F, length, has_bias=False),
        dense("feed-forward, narrow", F, D, length, has_bias=False),
        scale("feed-forward norm", D),
    ]
    return [
        Item("embeddings", config.vocabulary * E, 0),
        *([dense("embeddings to hidden", E, D, length, has_bias=False)] if E != D else []),
        scale("embeddings norm", D),
        *(Item(item.name, config.layers * item.parameters, config.layers * item.flops) for item in layer),
        scale("attention norm", (config.layers - 1) * D),  # the first layer has none
        scale("final norm", D),
    ]


def generator_items(config: EncoderConfig, length: int, masked: int) -> list[Item]:
    """The generator's parts; its head runs at `masked` positions only, and its output table is the embeddings'."""
    E, D, V = config.embedding_width, config.width, config.vocabulary
    if config.is_modern():
        return [
            *encoder_items(config, length),
            dense("head", D, D, masked, has_bias=False),
            scale("head norm", D),
            *([Item("hidden to embeddings", 0, 2 * D * E * masked)] if E != D else []),  # the same projection
            Item("vocabulary logits", V, 2 * E * V * masked),
        ]
    return [
        *encoder_items(config, length),
        dense("head", config.width, E, masked),
        norm("head norm", E),
        Item("vocabulary logits", V, 2 * E * V * masked),
    ]


def discriminator_items(config: EncoderConfig, length: int) -> list[Item]:
    """The discriminator's parts."""
    return [
        *encoder_items(config, length),
        dense("head", config.width, config.width, length, has_bias=not config.is_modern()),
        *([scale("head norm", config.width)] if config.is_modern() else []),
        dense("verdict", config.width, 1, length),
    ]


def corrector_items(config: EncoderConfig, length: int, masked: int, copies: bool) -> list[Item]:
    """The parts of what predicts tokens in the discriminator's place: masked ones, or with a copy gate every one."""
    gate = [dense("copy gate", config.width, 1, length)] if copies else []
    return [*generator_items(config, length, length if copies else masked), *gate]


def items_of(config: ElectraConfig, length: int, masked: int) -> dict[str, list[Item]]:
    """The parts of a pair, as if nothing were shared."""
    items = {}
    if config.generator:
        items["generator"] = generator_items(config.generator, length, masked)
    if config.discriminator and config.head == "verdict":
        items["discriminator"] = discriminator_items(config.discriminator, length)
    elif config.discriminator:
        items["corrector"] = corrector_items(config.discriminator, length, masked, copies=config.head == "copying")
    return items


def flops(items: Iterable[Item]) -> int:
    """Operations of a forward pass over one row."""
    return sum(item.flops for item in items)


def parameters(items: Iterable[Item]) -> int:
    """Parameters of one part."""
    return sum(item.parameters for item in items)
