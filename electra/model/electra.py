"""The generator-discriminator pair and its weight sharing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from electra.errors import ConfigError
from electra.model.config import ElectraConfig, EncoderConfig, Head, Sharing
from electra.model.encoder import Encoder, disentangled_embeddings
from electra.model.heads import BaselineHead, CopyGate, MLMHead, RTDHead

CHUNK_SIZE = 4096  # positions whose vocabulary logits are in memory together


class MaskedLanguageModel(nn.Module):
    """An encoder with an output distribution over the vocabulary.

    The generator is one; so is the model in the discriminator's place for Replace MLM."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = MLMHead(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, M, V] at the positions `at` [B, M], or [B, L, V] at all: vocabulary logits are dear."""
        return self.guess(self.read(input_ids, attention_mask, segment_ids, document_ids, cu_seqlens, at=at))

    def read(self, *text: Tensor | None, at: Tensor | None = None, **inputs: Tensor | None) -> Tensor:
        """Hidden states [B, M, D] at the positions `at` [B, M], or [B, L, D] at all; takes the encoder's inputs."""
        return self.encoder(*text, positions=at, **inputs)

    def guess(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        return self.head(hidden, self.encoder.embeddings.token_table(), self.encoder.tied_projection())

    def transform(self, hidden: Tensor) -> Tensor:
        """What of hidden states [..., D] is compared with the token table: [..., E]."""
        return self.head.transformed(hidden, self.encoder.tied_projection())

    def log_probabilities(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Log-probabilities [..., V] of the original tokens, from `hidden` [..., D] where `input_ids` [...] is read."""
        return self.guess(hidden).float().log_softmax(-1)


class Generator(MaskedLanguageModel):
    """Predicts the masked tokens; its samples replace them."""


class Discriminator(nn.Module):
    """Classifies every token of corrupted text as original or replaced."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = RTDHead(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, L], positive where a token looks replaced."""
        return self.head(self.encoder(input_ids, attention_mask, segment_ids, document_ids, cu_seqlens))


class CopyMaskedLanguageModel(MaskedLanguageModel):
    """A masked language model with a copy gate: it may also predict the token it reads (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.gate = CopyGate(config)

    def log_probabilities(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        log_probs = super().log_probabilities(hidden, input_ids)
        is_input = input_ids[..., None] == torch.arange(log_probs.shape[-1], device=log_probs.device)
        return self.gate(hidden, log_probs, is_input)

    def log_likelihood(self, hidden: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Log-probabilities [B, M] of `labels` where `input_ids` [B, M] is read, from `hidden` [B, M, D].

        In chunks that the backward pass recomputes, so that vocabulary logits exist for one chunk at a time.
        """
        columns = (hidden.flatten(0, 1), input_ids.flatten(), labels.flatten())
        chunks = zip(*(column.split(CHUNK_SIZE) for column in columns), strict=True)
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
        return torch.cat([recomputed(self.chunk_log_likelihood, *chunk) for chunk in chunks]).view_as(labels)

    def chunk_log_likelihood(self, hidden: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.guess(hidden).float().log_softmax(1).gather(1, labels[:, None])  # [N, 1]
        return self.gate(hidden, log_probs, (input_ids == labels)[:, None]).squeeze(1)


DISCRIMINATORS: dict[Head, type[Discriminator] | type[MaskedLanguageModel]] = {
    # head: the model that is trained on corrupted text
    "rtd": Discriminator,
    "mlm": MaskedLanguageModel,
    "copy_mlm": CopyMaskedLanguageModel,
}


def share_nothing(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """Two separate models."""


def share_embeddings(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """One set of token, position and segment embeddings with their LayerNorm, trained by both losses (the paper's way).

    In the modern style, the token embeddings."""
    discriminator.encoder.embeddings = generator.encoder.embeddings


def share_all(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """One encoder with two heads."""
    discriminator.encoder = generator.encoder


def share_disentangled(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """The discriminator adds its own tables to the generator's, which get no gradient from it (DeBERTa-v3)."""
    encoder = discriminator.encoder
    encoder.embeddings = disentangled_embeddings(generator.encoder.embeddings, encoder.config)


SHARING: dict[Sharing, Callable[[Generator, Discriminator | MaskedLanguageModel], None]] = {
    "none": share_nothing,
    "embeddings": share_embeddings,
    "all": share_all,
    "disentangled": share_disentangled,
}


class Electra(nn.Module):
    """The generator-discriminator pair; shared parameters are in one module that both have."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        self.generator = Generator(config.generator) if config.generator else None
        self.discriminator: Discriminator | MaskedLanguageModel | None = (
            DISCRIMINATORS[config.head](config.discriminator) if config.discriminator else None
        )
        self.baseline = BaselineHead(config.generator) if config.generator and config.has_baseline else None
        if self.generator is not None and self.discriminator is not None:
            SHARING[config.sharing](self.generator, self.discriminator)

    def pair(self) -> tuple[Generator, Discriminator]:
        return self.require_generator(), self.require_discriminator()

    def require_generator(self) -> Generator:
        if self.generator is None:
            raise ConfigError(
                "this model has no generator (runs with --generator uniform or unigram train none); use the folder of "
                "a generator (…ForMaskedLM), or import both: electra import --from … --generator FOLDER --output …"
            )
        return self.generator

    def require_discriminator(self) -> Discriminator:
        if not isinstance(self.discriminator, Discriminator):
            raise ConfigError(
                "this model has no discriminator, only a masked language model (electra fill and embed can use it); "
                "choose a model with a replaced token detection head"
            )
        return self.discriminator

    def require_mlm(self) -> MaskedLanguageModel:
        """The masked language model in the discriminator's place (Replace MLM)."""
        if not isinstance(self.discriminator, MaskedLanguageModel):
            raise ConfigError(
                "this model has no MLM head on its discriminator; build it with ElectraConfig(head='mlm')"
            )
        return self.discriminator

    def require_copy_mlm(self) -> CopyMaskedLanguageModel:
        """The masked language model with a copy gate in the discriminator's place (All-Tokens MLM)."""
        if not isinstance(self.discriminator, CopyMaskedLanguageModel):
            raise ConfigError("this model has no copy gate; build it with ElectraConfig(head='copy_mlm')")
        return self.discriminator

    def require_baseline(self) -> BaselineHead:
        if self.baseline is None:
            raise ConfigError("this model has no baseline head; build it with ElectraConfig(has_baseline=True)")
        return self.baseline
