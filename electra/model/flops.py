"""Parameters and floating-point operations of a model, component by component.

`component_costs` counts matrix products only, a multiplication and an addition as two operations; embedding lookups are
free. A training step costs three forward passes: the backward pass computes the gradients of inputs and of weights.

`published_component_costs` counts as the authors of the paper did, to compare with their table. They also count
elementwise operations (biases, dropout, GELU, norms, softmax), count embedding lookups as products with one-hot
vectors, let every generator predict 5 of 32 tokens and compute the last layer's states of all tokens, and count the
backward pass like a forward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from electra.model.config import ElectraConfig, EncoderConfig

TRAINING_FACTOR = 3  # forward pass, gradients of inputs, gradients of weights
PUBLISHED_TRAINING_FACTOR = 2  # forward and backward pass

DROPOUT, NORM, GELU, SOFTMAX = 4, 5, 8, 5  # published operations per element
BIAS = RESIDUAL = SCALE = 1


@dataclass(frozen=True)
class ComponentCost:
    """Parameters of one component of a model, such as a projection, and operations of its forward pass over one row."""

    name: str
    parameters: int
    flops: int


def linear_cost(name: str, inputs: int, outputs: int, tokens: int, has_bias: bool) -> ComponentCost:
    return ComponentCost(name, inputs * outputs + has_bias * outputs, 2 * inputs * outputs * tokens)


def norm_cost(name: str, width: int, has_bias: bool) -> ComponentCost:
    return ComponentCost(name, width + has_bias * width, 0)


def encoder_costs(config: EncoderConfig, length: int, last_layer_tokens: int) -> list[ComponentCost]:
    """The costs of an encoder over a row of `length` tokens; the last layer computes `last_layer_tokens` states only.

    Local attention is counted like global attention, as some kernels compute it."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    is_modern = config.is_modern()
    has_bias = not is_modern
    tokens = config.layers * length
    outputs = tokens - length + last_layer_tokens  # tokens after attention, over all layers
    tables = config.vocab_size + (0 if is_modern else config.positions + config.segments)
    project = [linear_cost("embeddings to hidden", E, D, length, has_bias)] if E != D else []
    norm = norm_cost("embeddings norm", D if is_modern else E, has_bias)
    layers = [
        linear_cost("query, key, value", D, 3 * D, tokens, has_bias),
        ComponentCost("attention", 0, 2 * 2 * tokens * length * D),  # scores, weighted sum
        linear_cost("attention output", D, D, outputs, has_bias),
        linear_cost("feed-forward up", D, 2 * F if is_modern else F, outputs, has_bias),
        linear_cost("feed-forward down", F, D, outputs, has_bias),
        norm_cost("feed-forward norm", D, has_bias),
    ]
    return [
        ComponentCost("embeddings", tables * E, 0),
        *([*project, norm] if is_modern else [norm, *project]),
        *(replace(item, parameters=config.layers * item.parameters) for item in layers),
        norm_cost("attention norm", (config.layers - is_modern) * D, has_bias),  # the first modern layer has none
        *([norm_cost("final norm", D, has_bias)] if is_modern else []),
    ]


def mlm_costs(config: EncoderConfig, length: int, num_masked: int, last_layer_tokens: int) -> list[ComponentCost]:
    """The costs of a masked language model with predictions at `num_masked` positions."""
    return [*encoder_costs(config, length, last_layer_tokens), *mlm_head_costs(config, num_masked)]


def mlm_head_costs(config: EncoderConfig, num_predictions: int, prefix: str = "") -> list[ComponentCost]:
    """The costs of a head that predicts tokens, with a tied output table."""
    E, D, V = config.embedding_width, config.width, config.vocab_size
    has_bias = not config.is_modern()
    head_width = D if config.is_modern() else E
    projection = [ComponentCost("hidden to embeddings", 0, 2 * D * E * num_predictions)] if head_width != E else []
    costs = [
        linear_cost("head", D, head_width, num_predictions, has_bias),
        norm_cost("head norm", head_width, has_bias),
        *projection,
        ComponentCost("vocabulary logits", V, 2 * E * V * num_predictions),
    ]
    return [replace(cost, name=prefix + cost.name) for cost in costs]


def rtd_costs(config: EncoderConfig, length: int) -> list[ComponentCost]:
    """The costs of a discriminator with a replaced token detection head."""
    D, has_bias = config.width, not config.is_modern()
    return [
        *encoder_costs(config, length, last_layer_tokens=length),
        linear_cost("head", D, D, length, has_bias),
        *([norm_cost("head norm", D, has_bias)] if config.is_modern() else []),
        linear_cost("classifier", D, 1, length, has_bias=True),
    ]


def component_costs(
    config: ElectraConfig, length: int, num_masked: int, last_layer_tokens: int | None = None
) -> dict[str, list[ComponentCost]]:
    """The costs by part, generator and discriminator, over a row; shared parameters are in both.

    The last layer of a masked language model computes states of `last_layer_tokens`, by default of the masked ones."""
    costs = {}
    outputs = last_layer_tokens or num_masked
    if config.generator:
        costs["generator"] = mlm_costs(config.generator, length, num_masked, outputs)
    if (size := config.discriminator) is not None:
        if config.head == "rtd":
            predictions = {"corrective_lm": num_masked, "bag_of_words": 1}
            costs["discriminator"] = [
                *rtd_costs(size, length),
                *(
                    cost
                    for head in config.auxiliary_heads
                    for cost in mlm_head_costs(size, predictions[head], f"{head.replace('_', ' ')} ")
                ),
            ]
        elif config.head == "mlm":
            costs["discriminator"] = mlm_costs(size, length, num_masked, outputs)
        else:
            gate = linear_cost("copy gate", size.width, 1, length, has_bias=True)
            costs["discriminator"] = [*mlm_costs(size, length, length, length), gate]
    return costs


def total_flops(costs: Iterable[ComponentCost]) -> int:
    return sum(cost.flops for cost in costs)


def total_parameters(costs: Iterable[ComponentCost]) -> int:
    return sum(cost.parameters for cost in costs)


def training_flops_per_row(
    config: ElectraConfig, length: int, num_masked: int, is_generator_frozen: bool = False
) -> int:
    """Operations of a training step over one row; a frozen generator has a forward pass only."""
    forward = {part: total_flops(costs) for part, costs in component_costs(config, length, num_masked).items()}
    return sum(
        (1 if is_generator_frozen and part == "generator" else TRAINING_FACTOR) * flops
        for part, flops in forward.items()
    )


def published_component_costs(config: ElectraConfig, length: int) -> dict[str, list[ComponentCost]]:
    """The costs of a pair by part over a row of `length` tokens, counted as the authors did."""
    num_masked = max(1, length * 5 // 32)  # 20 of 128 and 80 of 512 as in BERT, also where a quarter is masked
    added: dict[str, dict[str, int]] = {}
    if config.generator:
        head = published_mlm_extra_flops(config.generator, num_masked)
        added["generator"] = published_encoder_extra_flops(config.generator, length) | head
    if config.discriminator:
        head = {"head": length * (BIAS + GELU) * config.discriminator.width, "classifier": 0}
        added["discriminator"] = published_encoder_extra_flops(config.discriminator, length) | head
    return {
        part: [replace(cost, flops=cost.flops + added[part][cost.name]) for cost in costs]
        for part, costs in component_costs(config, length, num_masked, last_layer_tokens=length).items()
    }


def published_encoder_extra_flops(config: EncoderConfig, length: int) -> dict[str, int]:
    """What the authors count in addition to an encoder's matrix products, by component."""
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


def published_mlm_extra_flops(config: EncoderConfig, num_masked: int) -> dict[str, int]:
    """What the authors count in addition to the matrix products of an MLM head, by component."""
    E, V = config.embedding_width, config.vocab_size
    loss = 2 * V  # product with the one-hot label
    head = {"head": (BIAS + GELU) * E, "head norm": NORM * E, "vocabulary logits": SOFTMAX * V + loss}
    return {name: num_masked * count for name, count in head.items()}
