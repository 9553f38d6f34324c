"""The sizes of the paper, and how a user departs from them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from electra.errors import ConfigError
from electra.model.electra import ElectraConfig, Sharing
from electra.model.encoder import EncoderConfig

Size = Literal["tiny", "small", "base", "large"]

HEAD_WIDTH = 64  # in every size of the paper, generators included

SMALL = EncoderConfig()
TINY = replace(SMALL, layers=4, width=128, heads=2, feedforward=512, embedding_width=64)  # ours, for a CPU in minutes
BASE = replace(SMALL, width=768, heads=12, feedforward=3072, embedding_width=768)
LARGE = replace(SMALL, layers=24, width=1024, heads=16, feedforward=4096, embedding_width=1024)

SIZES: dict[str, tuple[EncoderConfig, int]] = {
    # size: the discriminator, and the width of its generator (1/2, 1/4, 1/3, 1/4)
    "tiny": (TINY, 64),
    "small": (SMALL, 64),
    "base": (BASE, 256),
    "large": (LARGE, 256),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A size of the paper, and departures from it: what is left out stays as the size has it."""

    size: Size = "small"
    """The discriminator's size; the generator is as deep and 1/4 to 1/2 as wide."""
    sharing: Sharing = "embeddings"
    """What generator and discriminator share: nothing; token, position and segment tables with their LayerNorm; the
    whole encoder (both then have one size); or tables the discriminator only adds to (its gradient stays out)."""
    layers: int | None = None
    """Layers of both encoders."""
    width: int | None = None
    """The discriminator's hidden size."""
    heads: int | None = None
    """The discriminator's attention heads."""
    feedforward: int | None = None
    """The discriminator's feed-forward width."""
    embedding_width: int | None = None
    """Width of the embedding tables."""
    positions: int | None = None
    """The longest row the model can read."""
    dropout: float | None = None
    """Dropout of hidden states and of attention weights."""
    generator_width: int | None = None
    """The generator's hidden size."""
    generator_layers: int | None = None
    """The generator's layers, where they differ."""

    def electra(self, vocabulary: int = SMALL.vocabulary, pad_id: int = SMALL.pad_id) -> ElectraConfig:
        """The pair these settings describe, over a vocabulary of so many entries."""
        if self.size not in SIZES:
            raise ConfigError(f"there is no size {self.size!r}; choose from {', '.join(SIZES)}")
        discriminator = replace(SIZES[self.size][0], vocabulary=vocabulary, pad_id=pad_id, **self.departures())
        return ElectraConfig(generator=self.generator(discriminator), discriminator=discriminator, sharing=self.sharing)

    def departures(self) -> dict[str, Any]:
        """The discriminator's settings that were named."""
        names = ("layers", "width", "heads", "feedforward", "embedding_width", "positions", "dropout")
        named = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return named if self.dropout is None else named | {"attention_dropout": self.dropout}

    def generator(self, discriminator: EncoderConfig) -> EncoderConfig:
        """The generator beside `discriminator`: as deep, as wide as its size has it, unless told otherwise."""
        layers = self.generator_layers or discriminator.layers
        default = discriminator.width if self.sharing == "all" else SIZES[self.size][1]
        width = self.generator_width or default
        if width == discriminator.width:
            return replace(discriminator, layers=layers)
        feedforward = 4 * width  # as in every size of the paper
        heads = max(1, width // HEAD_WIDTH)
        return replace(discriminator, layers=layers, width=width, heads=heads, feedforward=feedforward)
