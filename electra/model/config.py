"""What decides the shape of an encoder, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from electra.errors import ConfigError

Style = Literal["classic", "modern"]
Pooling = Literal["cls", "mean"]
"""What stands for a whole row: the state of its first token, or the mean of all."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The size and style of one encoder. The defaults are ELECTRA-Small's discriminator."""

    style: Style = "classic"
    """classic: BERT's and ELECTRA's encoder; modern: ModernBERT's."""
    layers: int = 12
    width: int = 256
    """Hidden size."""
    heads: int = 4
    """Attention heads; they divide the width among them."""
    feedforward: int = 1024
    """Width of the feed-forward layers; modern ones have a gate of this width beside it."""
    embedding_width: int = 128
    """Width of the embedding tables; projected to the hidden size where it differs."""
    vocab_size: int = 30522
    """Entries of the token table."""
    positions: int = 512
    """The longest row, in tokens."""
    segments: int = 2
    """Entries of the segment table: A and B. The modern style has none, and reads segments alike."""
    pad_id: int = 0
    """The token id of padding; its embedding is not trained by the input."""
    dropout: float = 0.1
    """Dropout of embeddings and of each layer's two outputs; modern layers drop inside the feed-forward instead."""
    attention_dropout: float = 0.1
    """Dropout of attention weights; in the modern style also of what attention gives out."""
    norm_epsilon: float = 1e-12
    init_std: float = 0.02
    """Spread of the first weights: a truncated normal of this standard deviation."""
    global_attention_every: int = 1
    """Modern: one layer in so many, from the first, sees the whole row; the others see a window."""
    local_attention: int = 128
    """Modern: the window of the other layers; half of it lies to either side."""
    global_theta: float = 160_000.0
    """Modern: how slow the slowest rotary position turns, where the whole row is seen."""
    local_theta: float = 10_000.0
    """Modern: the same, where a window is seen."""

    def __post_init__(self) -> None:
        self.check_numbers()
        self.check_style()
        self.check_turns()
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} does not divide into {self.heads} heads; "
                f"try width {max(1, self.width // self.heads) * self.heads} or another number of heads"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and less than 1")
        if not 0 < self.init_std < 1:
            raise ConfigError(f"init_std is {self.init_std}; it must lie between 0 and 1, usually 0.02")
        if not 0 < self.norm_epsilon < 1:
            raise ConfigError(f"norm_epsilon is {self.norm_epsilon}; it must lie between 0 and 1, usually 1e-12")
        if not 0 <= self.pad_id < self.vocab_size:
            raise ConfigError(f"pad_id {self.pad_id} is not in the vocabulary of {self.vocab_size:,} entries")

    def check_numbers(self) -> None:
        """Refuse what is no number (settings also come from files), and counts below 1."""
        for field in fields(self):
            value, is_count = getattr(self, field.name), field.type == "int"
            if field.name == "style":
                continue
            if type(value) is not int and (is_count or type(value) is not float):
                raise ConfigError(f"{field.name} is {value!r}; it must be a {'whole ' if is_count else ''}number")
            if is_count and value < 1 and field.name != "pad_id":
                raise ConfigError(f"{field.name} is {value}; it must be at least 1")

    def check_style(self) -> None:
        """Refuse styles that are not there, and what the chosen one cannot have."""
        if self.style not in get_args(Style):
            raise ConfigError(f"there is no style {self.style!r}; choose from {', '.join(get_args(Style))}")
        for name, usual in MODERN_SETTINGS.items():
            if self.style == "classic" and getattr(self, name) != usual:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, and the classic style has none; choose --style modern"
                )

    def check_turns(self) -> None:
        """Refuse what rotary positions cannot be."""
        if self.style == "modern" and self.width % (2 * self.heads) and not self.width % self.heads:
            raise ConfigError(
                f"{self.heads} heads of width {self.width // self.heads} cannot turn by position, which takes an even "
                f"width; choose another width or number of heads"
            )
        for name in ("global_theta", "local_theta"):
            if getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 1, usually 10000 or more")

    def is_modern(self) -> bool:
        """Whether the style is modern: pre-norm, rotary positions, gates, and no biases."""
        return self.style == "modern"

    def is_global(self, layer: int) -> bool:
        """Whether a layer sees the whole row."""
        return layer % self.global_attention_every == 0

    @classmethod
    def from_dict(cls, settings: Any) -> EncoderConfig:
        """The inverse of `dataclasses.asdict`."""
        check_fields(settings, cls)
        return cls(**settings)


MODERN_SETTINGS = {
    field.name: field.default
    for field in fields(EncoderConfig)
    if field.name in ("global_attention_every", "local_attention", "global_theta", "local_theta")
}


def check_fields(settings: Any, kind: type) -> None:
    """Refuse stored settings that are not just the fields of `kind`: a default in their place would be a guess."""
    if not isinstance(settings, dict):
        raise ConfigError(f"these are not the settings of a model: {settings!r}")
    wanted = {field.name for field in fields(kind)}
    if settings.keys() != wanted:
        differing = ", ".join(sorted(map(repr, settings.keys() ^ wanted)))
        raise ConfigError(f"{differing} is missing or unknown; the settings are {', '.join(sorted(wanted))}")


def check_length(length: int, config: EncoderConfig) -> None:
    """Refuse rows that the position table does not reach."""
    if length > config.positions:
        raise ConfigError(
            f"a row of {length} tokens is longer than the model's {config.positions} positions; "
            f"shorten rows to {config.positions} (--length), or pre-train a model with --positions {length}"
        )
