"""Configuration of encoders and of the generator-discriminator pair, and the model sizes of the paper."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from electra.errors import ConfigError, check_choice, check_range

Style = Literal["classic", "modern"]
Sharing = Literal["none", "embeddings", "all", "disentangled"]
Head = Literal["rtd", "mlm", "copy_mlm"]
AuxiliaryHead = Literal["corrective_lm", "bag_of_words"]
Size = Literal["tiny", "small", "medium", "base", "large"]
Pooling = Literal["cls", "mean"]
"""Sentence representation: the hidden state of [CLS], or the mean over all tokens."""
EmbeddingPooling = Literal["mean", "cls", "max"]
"""Pooling of `electra embed`: also the maximum over tokens."""

MAX_SIZE = 2**31 - 1  # of a dimension; torch overflows beyond
MAX_LAYERS = 1000  # no model is deeper, and millions would be built for hours

MODERN_FIELDS = ("global_attention_every", "local_attention", "global_theta", "local_theta")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Size and style of one encoder. The defaults are ELECTRA-Small's discriminator."""

    style: Style = "classic"
    """classic: BERT's and ELECTRA's encoder; modern: ModernBERT's."""
    layers: int = 12
    width: int = 256
    """Hidden size."""
    heads: int = 4
    feedforward: int = 1024
    """Intermediate size of the feed-forward layers; in the modern style also the size of the gate."""
    embedding_width: int = 128
    """Width of the embedding tables; projected to the hidden size if it differs."""
    vocab_size: int = 30522
    positions: int = 512
    """Maximum sequence length in tokens."""
    segments: int = 2
    """Entries of the token type table; the modern style has none."""
    pad_id: int = 0
    """Token id of padding; its input embedding receives no gradient."""
    dropout: float = 0.1
    """Dropout of embeddings and sub-layer outputs; in the modern style of embeddings and feed-forward activations."""
    attention_dropout: float = 0.1
    """Dropout of attention weights; in the modern style also of the attention output."""
    norm_epsilon: float = 1e-12
    init_std: float = 0.02
    """Standard deviation of the truncated normal that initialises weights."""
    global_attention_every: int = 1
    """Modern style: every N-th layer, counted from the first, has global attention; the others have local attention."""
    local_attention: int = 128
    """Modern style: window of local attention in tokens, half of it on either side."""
    global_theta: float = 160_000.0
    """Modern style: RoPE base of layers with global attention."""
    local_theta: float = 10_000.0
    """Modern style: RoPE base of layers with local attention."""

    def __post_init__(self) -> None:
        check_choice(self, "style", get_args(Style))
        integers = [field.name for field in fields(self) if field.type == "int" and field.name != "pad_id"]
        check_range(self, *integers, at_least=1, at_most=MAX_SIZE)
        check_range(self, "layers", at_most=MAX_LAYERS)
        check_range(self, "dropout", "attention_dropout", at_least=0, below=1)
        check_range(self, "init_std", "norm_epsilon", above=0, below=1)
        check_range(self, "global_theta", "local_theta", above=1)
        check_range(self, "pad_id", at_least=0, below=self.vocab_size)
        for name in MODERN_FIELDS:
            if self.style == "classic" and getattr(self, name) != getattr(EncoderConfig, name):
                raise ConfigError(f"is {getattr(self, name)}, but only --style modern has it", field=name)
        if self.width % self.heads:
            closest = max(1, self.width // self.heads) * self.heads
            raise ConfigError(f"is {self.width}, not a multiple of {self.heads} heads; try {closest}", field="width")
        if self.is_modern() and self.width // self.heads % 2:
            raise ConfigError(
                f"is {self.width}: {self.heads} heads of width {self.width // self.heads}, but rotary positions need "
                "an even head width",
                field="width",
            )

    def is_modern(self) -> bool:
        return self.style == "modern"

    def layer_indices(self, layers: tuple[int, ...]) -> list[int]:
        """The indices of layers in `Encoder.hidden_states`; negative ones count from the end."""
        outside = [layer for layer in layers if not -self.layers - 1 <= layer <= self.layers]
        if outside or not layers:
            value = " ".join(map(str, layers)) or "empty"
            allowed = (
                f"numbers from 0 (the embeddings) to {self.layers} or, counted from the end, -1 to {-self.layers - 1}"
            )
            raise ConfigError(f"is {value}; it must be {allowed}", field="layers")
        return [layer % (self.layers + 1) for layer in layers]

    def check_length(self, length: int) -> None:
        """Check that rows fit the positions."""
        if length > self.positions:
            raise ConfigError(
                f"a row of {length} tokens is longer than the model's {self.positions} positions; "
                f"use --length {self.positions}, or pre-train a model with --positions {length}"
            )

    def check_segments(self, segments: int) -> None:
        """Check that the token type table has an embedding for each segment of a row."""
        if segments > self.segments and not self.is_modern():
            raise ConfigError(
                f"pairs of texts need {segments} segment embeddings, and the model has {self.segments} "
                "(type_vocab_size); use another model, or join the two texts in one column"
            )

    def with_dropout(self, dropout: float | None) -> EncoderConfig:
        """The encoder with another dropout; None keeps its own."""
        return self if dropout is None else replace(self, dropout=dropout, attention_dropout=dropout)

    def narrowed_to(self, width: int) -> EncoderConfig:
        """A narrower encoder, with fewer heads of the same size, that can be widened to this one (`model.grow`)."""
        divisors = [
            times
            for times in range(2, self.heads + 1)
            if self.heads % times == 0 and self.feedforward % times == 0 and self.embedding_width != self.width // times
        ]
        if self.embedding_width == self.width:  # there is no projection that could be widened
            divisors = []
        if width not in [self.width // times for times in divisors]:
            widths = ", ".join(str(self.width // times) for times in divisors) or "no other width"
            raise ConfigError(
                f"an encoder of width {self.width} with {self.heads} heads, feed-forward layers of {self.feedforward} "
                f"and embeddings of {self.embedding_width} can be widened from {widths}, not from {width}"
            )
        times = self.width // width
        return replace(self, width=width, heads=self.heads // times, feedforward=self.feedforward // times)

    def with_fewer_layers(self, layers: int) -> EncoderConfig:
        """A shallower encoder that can be stacked to this one (`model.grow`): copies of a layer have its attention,
        local or global."""
        every = self.global_attention_every
        divisors = [number for number in range(every, self.layers, every) if self.layers % number == 0]
        if layers not in divisors:
            attention = f" and --global-attention-every {every}" if every > 1 else ""
            numbers = ", ".join(map(str, divisors)) or "no other number"
            raise ConfigError(
                f"an encoder with {self.layers} layers{attention} can be stacked from {numbers}, not from {layers}"
            )
        return replace(self, layers=layers)

    def has_global_attention(self, layer: int) -> bool:
        """Whether a layer has global attention."""
        return layer % self.global_attention_every == 0


TABLE_FIELDS = ("style", "vocab_size", "embedding_width", "positions", "segments", "pad_id", "norm_epsilon")

EQUAL_FIELDS: dict[Sharing, tuple[str, ...]] = {
    # sharing: the settings that generator and discriminator must have in common
    "none": ("vocab_size",),
    "embeddings": TABLE_FIELDS,
    "all": tuple(field.name for field in fields(EncoderConfig)),
    "disentangled": TABLE_FIELDS,
}


@dataclass(frozen=True, kw_only=True)
class ElectraConfig:
    """A generator, a discriminator and what they share; one of the two may be missing."""

    generator: EncoderConfig | None
    discriminator: EncoderConfig | None
    sharing: Sharing = "embeddings"
    head: Head = "rtd"
    """The discriminator's head: replaced token detection; or the original token, without or with a copy gate."""
    auxiliary_heads: tuple[AuxiliaryHead, ...] = ()
    """Heads of the discriminator, beside that for replaced token detection, which only pre-training uses."""
    has_baseline: bool = False
    """Whether the generator has a head that predicts its reward, the baseline of adversarial training."""

    def __post_init__(self) -> None:
        check_choice(self, "head", get_args(Head))
        check_choice(self, "sharing", get_args(Sharing))
        if self.auxiliary_heads and (self.discriminator is None or self.head != "rtd"):
            raise ConfigError("auxiliary heads need a discriminator with a head for replaced token detection")
        if self.generator is None and self.discriminator is None:
            raise ConfigError("a model with neither a generator nor a discriminator")
        if self.generator is None or self.discriminator is None:
            if self.sharing != "none":
                raise ConfigError(f"is {self.sharing}, which needs a generator and a discriminator", field="sharing")
            return
        for name in EQUAL_FIELDS[self.sharing]:
            ours, theirs = getattr(self.generator, name), getattr(self.discriminator, name)
            if ours != theirs:
                raise ConfigError(
                    f"is {self.sharing}, which needs the same {name} in both models, but the generator has {ours} and "
                    f"the discriminator {theirs}; make them equal or share less",
                    field="sharing",
                )

    def reduced_to(self, *, width: int | None = None, layers: int | None = None, scale_init: bool) -> ElectraConfig:
        """The pair with a narrower or shallower discriminator, or lone generator, that can be widened and stacked; with
        `scale_init` its weights are initialised with the standard deviation for its width."""
        if self.sharing == "all":
            raise ConfigError("with --sharing all the discriminator is the generator's encoder, which keeps its size")
        encoder = self.discriminator or self.generator
        assert encoder is not None
        reduced = encoder if width is None else encoder.narrowed_to(width)
        reduced = reduced if layers is None else reduced.with_fewer_layers(layers)
        reduced = with_scaled_init_std(reduced) if scale_init else reduced
        return replace(self, discriminator=reduced) if self.discriminator else replace(self, generator=reduced)

    def encoder_configs(self) -> dict[str, EncoderConfig]:
        """The encoders by part: generator, discriminator, or the one it has."""
        parts = {"generator": self.generator, "discriminator": self.discriminator}
        return {part: encoder for part, encoder in parts.items() if encoder is not None}

    def with_dropout(self, dropout: float | None, generator_dropout: float | None = None) -> ElectraConfig:
        """The pair with another dropout, perhaps a different one in the generator; None keeps its own."""
        of_generator = dropout if generator_dropout is None else generator_dropout
        return replace(
            self,
            generator=self.generator and self.generator.with_dropout(of_generator),
            discriminator=self.discriminator and self.discriminator.with_dropout(dropout),
        )


HEAD_WIDTH = 64  # in every size of the paper, generators included

SMALL = EncoderConfig()
TINY = replace(SMALL, layers=2, width=128, heads=4, feedforward=512, embedding_width=64)  # not in the paper: for CPUs
MEDIUM = replace(SMALL, width=512, heads=8, feedforward=2048)  # not in the paper: for a quarter of an hour on a GPU
BASE = replace(SMALL, width=768, heads=12, feedforward=3072, embedding_width=768)
LARGE = replace(SMALL, layers=24, width=1024, heads=16, feedforward=4096, embedding_width=1024)


@dataclass(frozen=True)
class SizePreset:
    """The models of a size: a column of the paper's table of hyperparameters, or one like it."""

    discriminator: EncoderConfig
    generator_width_ratio: Fraction  # width of the generator / width of the discriminator
    mask_fraction: float  # of a row's tokens


SIZES = {
    "tiny": SizePreset(TINY, Fraction(1, 2), 0.15),
    "small": SizePreset(SMALL, Fraction(1, 4), 0.15),
    "medium": SizePreset(MEDIUM, Fraction(1, 4), 0.15),
    "base": SizePreset(BASE, Fraction(1, 3), 0.15),
    "large": SizePreset(LARGE, Fraction(1, 4), 0.25),
}


def size_name_for_encoder(encoder: EncoderConfig) -> str:
    """The smallest size that is as wide as an encoder; its training settings suit it."""
    return next((name for name, size in SIZES.items() if encoder.width <= size.discriminator.width), "large")


def to_modern(config: EncoderConfig) -> EncoderConfig:
    """The modern encoder with about the parameters of a classic one: within 3 % in every size, heads included."""
    return replace(
        config,
        style="modern",
        feedforward=gated_feedforward_width(config.feedforward),
        norm_epsilon=1e-5,  # ModernBERT's, as is the dropout
        dropout=0.0,
        attention_dropout=0.0,
    )


def gated_feedforward_width(feedforward: int) -> int:
    """The width of a gated feed-forward layer with as many parameters: it has three matrices instead of two.

    Rounded up to a multiple of 32 for GPUs: tiny 352, small 704, medium 1376, base 2048, large 2752.
    """
    return -(-2 * feedforward // (3 * 32)) * 32


def num_heads_for_width(width: int) -> int:
    """The largest number of heads that divides a width, none narrower than the paper's 64."""
    return next(heads for heads in range(max(1, width // HEAD_WIDTH), 0, -1) if width % heads == 0)


def with_scaled_init_std(config: EncoderConfig) -> EncoderConfig:
    """Scale the standard deviation of the initial weights from the base size to this encoder's width."""
    return replace(config, init_std=round(BASE.init_std * (BASE.width / config.width) ** 0.5, 4))


OVERRIDES = ["layers", "width", "heads", "feedforward", "embedding_width", "positions"]
OVERRIDES += ["global_attention_every", "local_attention"]
"""Fields of ModelConfig that replace those of the size's encoder."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the models; settings left out are those of --size."""

    size: Size = "small"
    """Size of the discriminator; the generator follows from it."""
    style: Style = "classic"
    """classic: BERT's and ELECTRA's encoder; modern: ModernBERT's with about as many parameters (pre-norm, rotary
    positions, gated feed-forward, no biases, no token types)."""
    sharing: Sharing = "embeddings"
    """What generator and discriminator share: none; embeddings (token, position and token type tables with their
    LayerNorm; in the modern style the token table); all (the whole encoder, both of one size); disentangled (the
    discriminator adds its own tables to the generator's, which get no gradient from it)."""
    layers: int | None = None
    """Layers of the discriminator, and of the generator by default."""
    width: int | None = None
    """Hidden size of the discriminator."""
    heads: int | None = None
    """Attention heads of the discriminator."""
    feedforward: int | None = None
    """Intermediate size of the discriminator; the default of the modern style is two thirds of the classic one's,
    because of the gate."""
    embedding_width: int | None = None
    """Width of the embedding tables."""
    positions: int | None = None
    """Maximum sequence length of the model in tokens."""
    dropout: float | None = None
    """Dropout of hidden states and of attention weights."""
    global_attention_every: int | None = None
    """Modern style: every N-th layer has global attention, the others local attention; by default all are global."""
    local_attention: int | None = None
    """Modern style: window of local attention in tokens, half of it on either side."""
    scale_init_by_width: bool = False
    """Initialise weights with standard deviation 0.02·√(768/width) instead of 0.02 at every width, as released: narrow
    encoders then learn from context sooner."""
    generator_dropout: float | None = None
    """Dropout of the generator, if it is not the discriminator's: narrow generators hardly learn with dropout. Not for
    --sharing all, where both are one encoder; with --objective mlm use --dropout."""
    generator_width: int | None = None
    """Hidden size of the generator; by default 1/4 to 1/2 of the discriminator's, depending on --size."""
    generator_layers: int | None = None
    """Layers of the generator; by default as many as the discriminator's, or those of the recipe (medium)."""

    def electra_config(self, vocab_size: int = SMALL.vocab_size, pad_id: int = SMALL.pad_id) -> ElectraConfig:
        """The generator-discriminator pair for a vocabulary."""
        check_choice(self, "size", get_args(Size))
        size = SIZES[self.size]
        preset = to_modern(size.discriminator) if self.style == "modern" else size.discriminator
        discriminator = replace(
            preset, style=self.style, vocab_size=vocab_size, pad_id=pad_id, **self.discriminator_overrides()
        )
        generator = self.generator_config(discriminator, size.generator_width_ratio)
        if self.scale_init_by_width:
            generator, discriminator = with_scaled_init_std(generator), with_scaled_init_std(discriminator)
        return ElectraConfig(generator=generator, discriminator=discriminator, sharing=self.sharing)

    def discriminator_overrides(self) -> dict[str, Any]:
        """The discriminator's settings that differ from its size's."""
        values = {name: getattr(self, name) for name in OVERRIDES}
        values |= {"dropout": self.dropout, "attention_dropout": self.dropout}
        return {name: value for name, value in values.items() if value is not None}

    def generator_config(self, discriminator: EncoderConfig, width_ratio: Fraction) -> EncoderConfig:
        """The generator of `discriminator`: as many layers and `width_ratio` of its width, unless overridden."""
        layers = discriminator.layers if self.generator_layers is None else self.generator_layers
        width = discriminator.width if self.sharing == "all" else max(1, int(discriminator.width * width_ratio))
        width = width if self.generator_width is None else self.generator_width
        sizes: dict[str, Any] = {"layers": layers}
        if self.generator_dropout is not None:
            sizes |= {"dropout": self.generator_dropout, "attention_dropout": self.generator_dropout}
        if width != discriminator.width:
            feedforward = (
                gated_feedforward_width(4 * width) if discriminator.is_modern() else 4 * width
            )  # as in the paper
            sizes |= {"width": width, "heads": num_heads_for_width(width), "feedforward": feedforward}
        try:
            return replace(discriminator, **sizes)
        except ConfigError as error:
            raise ConfigError(error.message, field=f"generator_{error.field}") from None
