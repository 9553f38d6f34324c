"""`electra flops`: what a pair costs to store, to train and to use, before anything is trained."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from electra.errors import ConfigError
from electra.model.config import SMALL, ElectraConfig, ModelConfig, check_length
from electra.model.electra import Electra
from electra.model.flops import (
    PUBLISHED_TRAINING_FACTOR,
    Item,
    itemize,
    published_items,
    total_flops,
    total_parameters,
    training_flops,
)
from electra.objectives.masking import MaskedShare, slots
from electra.objectives.objectives import OBJECTIVES, ObjectiveName
from electra.pretraining.config import recipe_settings
from electra.pretraining.phases import model_for_objective, pair_for_objectives

PAPER = recipe_settings("faithful", ModelConfig.size)
TRAINING_ONLY = ("mask_fraction", "batch_size", "steps")
TAKEN = ("length", *TRAINING_ONLY)  # from the paper's settings of a size


@dataclass(frozen=True, kw_only=True)
class FlopsConfig(MaskedShare, ModelConfig):
    """Count parameters and floating-point operations (matrix products only) of a pair, item by item.

    Length, batch and steps go with --size, as in the paper, which has all but tiny: shown are those of the size below.
    """

    objective: ObjectiveName = "rtd"
    """What is trained, as in electra pretrain: mlm has one encoder only, of the discriminator's size (BERT), and the
    generator of frozen-rtd only goes forward, and shares nothing."""
    length: int = PAPER["length"]
    """Tokens in a row."""
    batch_size: int = PAPER["batch_size"]
    """Rows of a training step."""
    steps: int = PAPER["steps"]
    """Training steps."""
    vocabulary: int = SMALL.vocab_size
    """Entries of the token table."""
    inference: bool = False
    """Count one reading of a text by the discriminator, of 128 tokens unless --length says otherwise; there are then no
    batches and steps."""
    as_published: bool = False
    """Count like the paper's table, to compare with it: single numbers (dropout, GELU, norms) too, embeddings looked up
    by products with one-hot vectors, 5 of 32 tokens predicted, and a backward pass as dear as a forward pass (it is
    twice that)."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("length", "a row has at least 1 token"), ("batch_size", "a step has at least 1 row")):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; {least}")
        if self.as_published and self.style == "modern":
            raise ConfigError("as_published counts as the paper does, which has no modern style; leave one of them out")
        if self.objective != "rtd" and (self.as_published or self.inference):
            flag = "--as-published" if self.as_published else "--inference"
            raise ConfigError(f"{flag} goes with --objective rtd, not {self.objective}; leave one or the other out")
        if self.objective == "mlm" and (self.generator_width or self.generator_layers):
            raise ConfigError("--objective mlm has no generator beside it; leave out --generator-width and -layers")
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps}; it must be at least 0")

    @classmethod
    def preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The paper's settings of the size among the flags that were given; texts are read at the default length."""
        settings = recipe_settings("faithful", given.get("size", cls.size))
        if not given.get("inference"):
            return {name: settings[name] for name in TAKEN}
        refuse_training(given)
        return {name: settings[name] for name in TRAINING_ONLY}

    def pair(self) -> ElectraConfig:
        """The pair, or what is left of it after training."""
        shared = "none" if OBJECTIVES[self.objective].is_frozen else self.sharing
        pair = replace(self, sharing=shared).electra_config(self.vocabulary)
        if self.inference:
            return ElectraConfig(generator=None, discriminator=pair.discriminator, sharing="none")
        return model_for_objective(pair_for_objectives(pair, [self.objective]), self.objective)


def refuse_training(given: dict[str, Any]) -> None:
    """Refuse flags that say nothing of the reading of one text."""
    if told := [f"--{name.replace('_', '-')}" for name in TRAINING_ONLY if name in given]:
        raise ConfigError(
            f"--inference counts the reading of one text, which has no {' and no '.join(told)}; "
            f"leave out one or the other"
        )


@dataclass(frozen=True)
class Costs:
    """Parameters, and operations: of each part forward over a row, and all together."""

    parts: dict[str, list[Item]]
    parameters: int  # what is shared counts once
    purpose: str  # what the operations all together are for
    training_flops_per_row: int | None  # None where nothing is trained
    total_flops: int
    note: str | None  # what one should know of the count

    def __str__(self) -> str:
        lines = [f"{'':<24}{'parameters':>15}{'forward FLOPs a row':>22}"]
        for name, items in self.parts.items():
            lines += [name, *(line(f"  {item.name}", item.parameters, item.flops) for item in items)]
            lines += [line("  in all", total_parameters(items), total_flops(items))]
        if self.training_flops_per_row is not None:
            what = "the pair, what is shared counted once" if len(self.parts) > 1 else "the model"
            lines += [f"{what}: {self.parameters:,} parameters"]
            lines += [f"a training step: {self.training_flops_per_row:.4g} FLOPs a row"]
        lines += [f"{self.purpose}: {self.total_flops:.4e} FLOPs"]
        return "\n".join([*lines, *filter(None, [self.note])])


def line(name: str, parameters: int, flops: int) -> str:
    """One line of the table."""
    return f"{name:<24}{parameters:>15,}{flops:>22,}"


def count_costs(config: FlopsConfig) -> Costs:
    """The costs of the pair that `config` describes."""
    pair = config.pair()
    for part in filter(None, (pair.generator, pair.discriminator)):
        check_length(config.length, part)
    parts, step = count_items(pair, config)
    if config.inference:
        read = sum(map(total_flops, parts.values()))
        return Costs(parts, stored(pair), f"reading {config.length} tokens", None, read, note_on(pair))
    purpose = f"{config.steps:,} steps of {config.batch_size:,} rows of {config.length} tokens"
    return Costs(parts, stored(pair), purpose, step, step * config.batch_size * config.steps, note_on(pair))


def note_on(pair: ElectraConfig) -> str | None:
    """What is to be said of layers that see a window only, where there are any."""
    for part in filter(None, (pair.discriminator, pair.generator)):
        if local := sum(not part.is_global(layer) for layer in range(part.layers)):
            return (
                f"{local} of {part.layers} layers see a window of {part.local_attention} tokens and are counted as if "
                f"they saw the whole row: some kernels compute all of it and hide the rest, others need less"
            )
    return None


def count_items(pair: ElectraConfig, config: FlopsConfig) -> tuple[dict[str, list[Item]], int]:
    """The items of a pair, honestly or as published, and the operations of a training step over a row."""
    if config.as_published:
        items = published_items(pair, config.length)
        return items, PUBLISHED_TRAINING_FACTOR * sum(map(total_flops, items.values()))
    sizes = pair, config.length, slots(config.length, config)
    return itemize(*sizes), training_flops(*sizes, is_frozen=OBJECTIVES[config.objective].is_frozen)


def stored(pair: ElectraConfig) -> int:
    """Parameters of a pair; what is shared counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Electra(pair).parameters())
