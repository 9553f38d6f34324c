"""`electra flops`: what a pair costs to store and to train, before anything is trained."""

from dataclasses import dataclass
from typing import Any

import torch

from electra.errors import ConfigError
from electra.model.electra import Electra
from electra.model.encoder import check_length
from electra.model.flops import TRAINING, Item, flops, items_of, parameters
from electra.model.sizes import SMALL, ModelConfig, size_of
from electra.objective.masking import MaskedShare, slots


@dataclass(frozen=True, kw_only=True)
class FlopsConfig(MaskedShare, ModelConfig):
    """Count parameters and floating-point operations (matrix products only) of a pair, item by item."""

    length: int = 128
    """Tokens in a row."""
    vocabulary: int = SMALL.vocabulary
    """Entries of the token table."""
    json: bool = False
    """Print the result as JSON."""

    @classmethod
    def preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The mask fraction of the size among the flags that were given."""
        return {"mask_fraction": size_of(given.get("size", cls.size)).mask_fraction}


@dataclass(frozen=True)
class Costs:
    """Parameters, and operations per row: each part forward, the pair in training."""

    parts: dict[str, list[Item]]
    parameters: int  # what is shared counts once
    training_flops_per_row: int

    def __str__(self) -> str:
        lines = [f"{'':<24}{'parameters':>15}{'forward FLOPs a row':>22}"]
        for name, items in self.parts.items():
            lines += [name, *(line(f"  {item.name}", item.parameters, item.flops) for item in items)]
            lines += [line("  in all", parameters(items), flops(items))]
        lines += [f"the pair, what is shared counted once: {self.parameters:,} parameters"]
        lines += [f"a training step: {self.training_flops_per_row:.4g} FLOPs a row"]
        return "\n".join(lines)


def line(name: str, parameters: int, flops: int) -> str:
    """One line of the table."""
    return f"{name:<24}{parameters:>15,}{flops:>22,}"


def count_costs(config: FlopsConfig) -> Costs:
    """The costs of the pair that `config` describes."""
    pair = config.electra(config.vocabulary)
    if config.length < 1:
        raise ConfigError(f"length is {config.length}; a row has at least 1 token")
    for part in filter(None, (pair.generator, pair.discriminator)):
        check_length(config.length, part)
    with torch.device("meta"):
        stored = sum(parameter.numel() for parameter in Electra(pair).parameters())
    parts = items_of(pair, config.length, masked=slots(config.length, config))
    return Costs(parts, stored, TRAINING * sum(map(flops, parts.values())))
