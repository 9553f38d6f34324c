"""The pair: a generator fills blanks, a discriminator finds its fills; and how they share weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn

from electra.errors import ConfigError
from electra.model.encoder import Encoder, EncoderConfig, check_fields, disentangled
from electra.model.heads import DiscriminatorHead, GeneratorHead

Sharing = Literal["none", "embeddings", "all", "disentangled"]


class Generator(nn.Module):
    """Reads masked text and guesses the tokens at chosen positions."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = GeneratorHead(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, M, V] at the positions `at` [B, M], or [B, L, V] at all: vocabulary logits are dear."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids, documents)
        if at is not None:
            hidden = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2]))  # [B, M, D]
        return self.head(hidden, self.encoder.embeddings.token.weight, self.encoder.tied_projection())


class Discriminator(nn.Module):
    """Reads corrupted text and says of every token whether it was replaced."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = DiscriminatorHead(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, L], positive where a token looks replaced."""
        return self.head(self.encoder(input_ids, attention_mask, segment_ids, documents))


def share_nothing(generator: Generator, discriminator: Discriminator) -> None:
    """Two models that only meet in the loss."""


def share_embeddings(generator: Generator, discriminator: Discriminator) -> None:
    """One set of token, position and segment tables with their LayerNorm, trained by both losses (the paper's way).

    Modern embeddings are the token table alone."""
    discriminator.encoder.embeddings = generator.encoder.embeddings


def share_all(generator: Generator, discriminator: Discriminator) -> None:
    """One encoder under two heads; both have its size."""
    discriminator.encoder = generator.encoder


def share_disentangled(generator: Generator, discriminator: Discriminator) -> None:
    """The discriminator adds to the generator's tables without moving them; its LayerNorm is its own."""
    encoder = discriminator.encoder
    encoder.embeddings = disentangled(generator.encoder.embeddings, encoder.config)


TABLE_FIELDS = ("style", "vocabulary", "embedding_width", "positions", "segments", "pad_id", "norm_epsilon", "dropout")
ALL_FIELDS = tuple(field.name for field in fields(EncoderConfig))

SHARING: dict[str, tuple[Callable[[Generator, Discriminator], None], tuple[str, ...]]] = {
    # scheme: how it is done, and which settings generator and discriminator must have alike for it
    "none": (share_nothing, ("vocabulary",)),
    "embeddings": (share_embeddings, TABLE_FIELDS),
    "all": (share_all, ALL_FIELDS),
    "disentangled": (share_disentangled, TABLE_FIELDS),
}


@dataclass(frozen=True, kw_only=True)
class ElectraConfig:
    """A generator, a discriminator, and what they share; either may be missing (masked language models, imports)."""

    generator: EncoderConfig | None
    discriminator: EncoderConfig | None
    sharing: Sharing = "embeddings"

    def __post_init__(self) -> None:
        if self.sharing not in list(SHARING):
            raise ConfigError(f"there is no sharing {self.sharing!r}; choose from {', '.join(SHARING)}")
        if self.generator is None or self.discriminator is None:
            if self.sharing != "none":
                raise ConfigError(f"sharing={self.sharing} needs a generator and a discriminator; only one is there")
            return
        for name in SHARING[self.sharing][1]:
            ours, theirs = getattr(self.generator, name), getattr(self.discriminator, name)
            if ours != theirs:
                came = [f"{value:,}" if isinstance(value, int) else value for value in (ours, theirs)]
                raise ConfigError(
                    f"sharing={self.sharing} needs generator and discriminator of the same {name}, "
                    f"but the generator has {came[0]} and the discriminator {came[1]}"
                )

    @classmethod
    def from_dict(cls, settings: Any) -> ElectraConfig:
        """The inverse of `dataclasses.asdict`; unknown and missing settings are refused."""
        check_fields(settings, cls)
        parts: dict[str, EncoderConfig | None] = {"generator": None, "discriminator": None}
        for name in parts:
            if settings[name] is not None:
                with naming(name):
                    parts[name] = EncoderConfig.from_dict(settings[name])
        return cls(**parts, sharing=settings["sharing"])


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Say of which part a mistake is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{part}: {error}") from None


class Electra(nn.Module):
    """The generator-discriminator pair. What they share is one module in both, so it stays one wherever it goes."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        self.generator = Generator(config.generator) if config.generator else None
        self.discriminator = Discriminator(config.discriminator) if config.discriminator else None
        if self.generator is not None and self.discriminator is not None:
            tie, _ = SHARING[config.sharing]
            tie(self.generator, self.discriminator)

    def pair(self) -> tuple[Generator, Discriminator]:
        """Generator and discriminator, for what needs both."""
        return self.the_generator(), self.the_discriminator()

    def the_generator(self) -> Generator:
        """The generator, for what needs one."""
        if self.generator is None:
            raise ConfigError(
                "this model has no generator; import it with one: electra import --from … --generator FOLDER --output …"
            )
        return self.generator

    def the_discriminator(self) -> Discriminator:
        """The discriminator, for what needs one."""
        if self.discriminator is None:
            raise ConfigError("this model has no discriminator, only a generator (a masked language model)")
        return self.discriminator
