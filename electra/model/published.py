"""Operations as the paper's table has them, to compare with; `electra.model.flops` counts what is really done.

The authors count single numbers too (biases, dropout, GELU, norms, softmax), take looking up an embedding for a
product with a one-hot vector, let every generator predict 5 of 32 tokens from states of all, and let a backward pass
cost as much as a forward pass.
"""

from dataclasses import replace

from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.flops import Item, itemize

TRAINING = 2  # forward and backward
DROPOUT, NORM, GELU, SOFTMAX = 4, 5, 8, 5  # operations on each number that goes through
BIAS = RESIDUAL = SCALE = 1


def published_items(config: ElectraConfig, length: int) -> dict[str, list[Item]]:
    """The parts of a pair over a row of `length` tokens, as if nothing were shared."""
    predicted = max(1, length * 5 // 32)  # 20 of 128, 80 of 512: BERT's numbers, also where a quarter is masked
    others: dict[str, dict[str, int]] = {}
    if config.generator:
        others["generator"] = encoder_others(config.generator, length) | generator_others(config.generator, predicted)
    if config.discriminator:
        size = config.discriminator
        others["discriminator"] = encoder_others(size, length) | discriminator_others(size, length)
    parts = itemize(config, length, predicted, wanted=length)
    return {
        part: [replace(item, flops=item.flops + others[part][item.name]) for item in items]
        for part, items in parts.items()
    }


def encoder_others(config: EncoderConfig, length: int) -> dict[str, int]:
    """What is counted beside the encoder's matrix products, by the names of its items."""
    E, D, F = config.embedding_width, config.width, config.feedforward
    entries = config.vocab_size + length + config.segments  # of one-hot vectors: tokens, positions, segments
    tables = {
        "embeddings": 2 * E * entries + 2 * E + DROPOUT * E,  # three looked up, two added
        "embeddings norm": NORM * E,
        "embeddings to hidden": BIAS * D,
    }
    layer = {
        "query, key, value": BIAS * 3 * D,
        "attention": (SOFTMAX + DROPOUT + SCALE) * length * config.heads,
        "attention output": (BIAS + DROPOUT + RESIDUAL) * D,
        "attention norm": NORM,  # of a whole vector; a slip, but the published numbers have it
        "feed-forward, widen": (BIAS + GELU) * F,
        "feed-forward, narrow": (BIAS + DROPOUT + RESIDUAL) * D,
        "feed-forward norm": NORM * D,
    }
    once = {name: length * count for name, count in tables.items()}
    return once | {name: length * config.layers * count for name, count in layer.items()}


def generator_others(config: EncoderConfig, predicted: int) -> dict[str, int]:
    """What is counted beside the matrix products of a generator's head, at `predicted` positions."""
    E, V = config.embedding_width, config.vocab_size
    loss = 2 * V  # finding the right entry, by a one-hot vector
    head = {"head": (BIAS + GELU) * E, "head norm": NORM * E, "vocabulary logits": SOFTMAX * V + loss}
    return {name: predicted * count for name, count in head.items()}


def discriminator_others(config: EncoderConfig, length: int) -> dict[str, int]:
    """What is counted beside the matrix products of a discriminator's head."""
    return {"head": length * (BIAS + GELU) * config.width, "rtd": 0}
