"""The sizes of the paper, in both styles, and how a user departs from them."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from electra.errors import ConfigError
from electra.model.config import EncoderConfig, Style
from electra.model.electra import ElectraConfig, Sharing, naming

Size = Literal["tiny", "small", "base", "large"]

HEAD_WIDTH = 64  # in every size of the paper, generators included

SMALL = EncoderConfig()
TINY = replace(SMALL, layers=4, width=128, heads=2, feedforward=512, embedding_width=64)  # ours, for a CPU in minutes
BASE = replace(SMALL, width=768, heads=12, feedforward=3072, embedding_width=768)
LARGE = replace(SMALL, layers=24, width=1024, heads=16, feedforward=4096, embedding_width=1024)


@dataclass(frozen=True)
class SizePreset:
    """A column of the paper's table of sizes."""

    discriminator: EncoderConfig
    generator_width_ratio: Fraction  # the generator's width as a share of the discriminator's
    mask_fraction: float  # share of a row's tokens that is masked


SIZES = {
    "tiny": SizePreset(TINY, Fraction(1, 2), 0.15),
    "small": SizePreset(SMALL, Fraction(1, 4), 0.15),
    "base": SizePreset(BASE, Fraction(1, 3), 0.15),
    "large": SizePreset(LARGE, Fraction(1, 4), 0.25),
}


def modern(config: EncoderConfig) -> EncoderConfig:
    """The modern encoder of about a classic one's parameters: within 3 % in every size, heads included."""
    return replace(
        config,
        style="modern",
        feedforward=gated(config.feedforward),
        norm_epsilon=1e-5,  # this and no dropout as ModernBERT
        dropout=0.0,
        attention_dropout=0.0,
    )


def gated(feedforward: int) -> int:
    """The feed-forward width with a gate for one without: three matrices instead of two, so two thirds of it.

    Up to a multiple of 32, which GPUs like: tiny 352, small 704, base 2048, large 2752.
    """
    return -(-2 * feedforward // (3 * 32)) * 32


def get_size(name: str) -> SizePreset:
    """A size by its name."""
    if name not in SIZES:
        raise ConfigError(f"there is no size {name!r}; choose from {', '.join(SIZES)}")
    return SIZES[name]


def size_for_encoder(encoder: EncoderConfig) -> str:
    """The name of the smallest size that is as wide as an encoder, whose settings will suit it."""
    return next((name for name, size in SIZES.items() if encoder.width <= size.discriminator.width), "large")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A size of the paper, and departures from it: what is left out stays as the size has it."""

    size: Size = "small"
    """The discriminator's size, and with it the generator's: as deep, and 1/4 to 1/2 as wide."""
    style: Style = "classic"
    """classic: BERT's and ELECTRA's encoder; modern: ModernBERT's, of about as many parameters (pre-norm, rotary
    positions, gated feed-forward, no biases, no segments)."""
    sharing: Sharing = "embeddings"
    """What generator and discriminator share: nothing; token, position and segment tables with their LayerNorm (of
    the modern style: the token table); the whole encoder (both then have one size); or tables the discriminator only
    adds to (its gradient stays out)."""
    layers: int | None = None
    """Layers of both encoders."""
    width: int | None = None
    """The discriminator's hidden size."""
    heads: int | None = None
    """The discriminator's attention heads."""
    feedforward: int | None = None
    """The discriminator's feed-forward width; the modern style's default is two thirds of the classic one's,
    for the gate beside it."""
    embedding_width: int | None = None
    """Width of the embedding tables."""
    positions: int | None = None
    """The longest row the model can read."""
    dropout: float | None = None
    """Dropout of hidden states and of attention weights."""
    global_attention_every: int | None = None
    """Modern: one layer in so many sees the whole row, the others a window of it; otherwise all do."""
    local_attention: int | None = None
    """Modern: the window of the other layers, half of it to either side."""
    scale_init_by_width: bool = False
    """Start narrow encoders with larger weights, 0.02·√(768/width): at 0.02, right for base, they hardly pass anything
    on, and learn nothing from context for a long time. Otherwise 0.02 at every width, as released."""
    generator_width: int | None = None
    """The generator's hidden size, where it is not the share of the discriminator's that its size has."""
    generator_layers: int | None = None
    """The generator's layers, where they differ."""

    def electra_config(self, vocab_size: int = SMALL.vocab_size, pad_id: int = SMALL.pad_id) -> ElectraConfig:
        """The pair these settings describe, over a vocabulary of so many entries."""
        size = get_size(self.size)
        if self.style == "modern" and self.local_attention and self.global_attention_every in (None, 1):
            raise ConfigError(
                f"local_attention is {self.local_attention}, but every layer sees the whole row; add --global-attention-every 3"
            )
        paper = modern(size.discriminator) if self.style == "modern" else replace(size.discriminator, style=self.style)
        with naming("discriminator"):
            discriminator = replace(paper, vocab_size=vocab_size, pad_id=pad_id, **self.overrides())
        with naming("generator"):
            generator = self.generator_config(discriminator, size.generator_width_ratio)
        if self.scale_init_by_width:
            generator, discriminator = scale_init_std(generator), scale_init_std(discriminator)
        return ElectraConfig(generator=generator, discriminator=discriminator, sharing=self.sharing)

    def overrides(self) -> dict[str, Any]:
        """The discriminator's settings that were named."""
        names = ["layers", "width", "heads", "feedforward", "embedding_width", "positions", "dropout"]
        names += ["global_attention_every", "local_attention"]
        named = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return named if self.dropout is None else named | {"attention_dropout": self.dropout}

    def generator_config(self, discriminator: EncoderConfig, share: Fraction) -> EncoderConfig:
        """The generator beside `discriminator`: as deep, and `share` as wide, unless told otherwise."""
        layers = discriminator.layers if self.generator_layers is None else self.generator_layers
        usual = discriminator.width if self.sharing == "all" else max(1, int(discriminator.width * share))
        width = usual if self.generator_width is None else self.generator_width
        if width == discriminator.width:
            return replace(discriminator, layers=layers)
        feedforward = gated(4 * width) if discriminator.is_modern() else 4 * width  # as in every size of the paper
        return replace(discriminator, layers=layers, width=width, heads=heads_for(width), feedforward=feedforward)


def scale_init_std(config: EncoderConfig) -> EncoderConfig:
    """The encoder with the spread of base's first weights, scaled to its own width."""
    return replace(config, init_std=round(BASE.init_std * (BASE.width / config.width) ** 0.5, 4))


def heads_for(width: int) -> int:
    """As many heads as divide a width, none narrower than the paper's."""
    return next(heads for heads in range(max(1, width // HEAD_WIDTH), 0, -1) if width % heads == 0)
