"""A trained model at work: which tokens look replaced, what belongs in a blank, what a text means as a vector."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from electra.data.tokenizer import TextTokenizer
from electra.errors import ConfigError
from electra.huggingface.folders import read_model
from electra.model.config import Pooling
from electra.model.electra import Electra
from electra.model.encoder import Encoder
from electra.model.storage import WEIGHTS, build_model, has_rtd_head, load_model_tokenizer
from electra.training.checkpoint import model_folder
from electra.training.hardware import Device, choose_device


@dataclass(frozen=True)
class Detected:
    """A text's tokens, and how surely each was replaced: 0 is original, 1 replaced."""

    tokens: list[str]
    replaced: list[float]
    is_truncated: bool = False


@dataclass(frozen=True)
class Blank:
    """A [MASK] and the likeliest tokens for it, with their probabilities."""

    position: int
    guesses: dict[str, float]


@dataclass(frozen=True)
class Filled:
    """A text's tokens, and what belongs in its blanks."""

    tokens: list[str]
    blanks: list[Blank]
    is_truncated: bool = False


class Model:
    """A pair (or the part of it that is there) with its tokenizer."""

    def __init__(
        self, electra: Electra, tokenizer: TextTokenizer, device: torch.device, has_rtd_head: bool = True
    ) -> None:
        self.electra, self.tokenizer, self.device = electra.float().to(device).eval(), tokenizer, device
        self.has_rtd_head = has_rtd_head  # a discriminator taken from a bare encoder has none that was trained

    def detect(self, text: str) -> Detected:
        """How surely each token of `text` was replaced."""
        if self.electra.discriminator is not None and not self.has_rtd_head:
            raise ConfigError("this model came as a bare encoder, without a discriminator's head; it can only embed")
        ids, tokens, is_truncated = self.encode(text, self.electra.require_discriminator().encoder)
        with torch.no_grad():
            verdicts = self.electra.require_discriminator()(ids)[0].sigmoid()
        return Detected(tokens, [round(verdict, 4) for verdict in verdicts.tolist()], is_truncated)

    def fill(self, text: str, count: int = 5) -> Filled:
        """The likeliest tokens for each [MASK] in `text`."""
        if count < 1:
            raise ConfigError(f"count is {count}; it must be at least 1")
        encoder, mask_id = self.electra.require_generator().encoder, self.tokenizer.vocabulary.mask_id
        ids, tokens, is_truncated = self.encode(text, encoder)
        blanks = (ids[0] == mask_id).nonzero().flatten()
        if not len(blanks) and mask_id in self.tokenizer.library.encode(text).ids:
            positions = encoder.config.positions
            raise ConfigError(
                f"the [MASK] lies beyond the {positions} tokens that the model can read; shorten the text"
            )
        if not len(blanks):
            raise ConfigError("there is no [MASK] in the text; write one where a word is to be filled in")
        with torch.no_grad():
            guesses = self.electra.require_generator()(ids, at=blanks[None])[0].softmax(1)  # [blanks, V]
        best = guesses.topk(min(count, guesses.shape[1]), dim=1)
        return Filled(tokens, [self.blank(*row) for row in zip(blanks, *best, strict=True)], is_truncated)

    def blank(self, position: Tensor, probabilities: Tensor, ids: Tensor) -> Blank:
        """A blank with its guesses."""
        names = [self.name(number) for number in ids.tolist()]
        return Blank(int(position), dict(zip(names, [round(p, 4) for p in probabilities.tolist()], strict=True)))

    def embed(self, texts: str | Sequence[str], pooling: Pooling = "mean") -> Tensor:
        """A vector for each text [N, D]: the mean of its tokens' hidden states, or that of [CLS]."""
        texts = [texts] if isinstance(texts, str) else texts
        vectors = [self.vector(text, pooling) for text in texts]
        return torch.stack(vectors) if vectors else torch.empty(0, self.reader().config.width)

    def vector(self, text: str, pooling: Pooling) -> Tensor:
        """The vector of one text [D]."""
        encoder = self.reader()
        with torch.no_grad():
            hidden = encoder(self.encode(text, encoder)[0])[0]  # [L, D]
        return (hidden[0] if pooling == "cls" else hidden.mean(0)).cpu()

    def is_cut(self, text: str) -> bool:
        """Whether a text has more tokens than `embed` can read."""
        return self.encode(text, self.reader())[2]

    def reader(self) -> Encoder:
        """The encoder whose hidden states a text is turned into."""
        return (self.electra.discriminator or self.electra.require_generator()).encoder

    def encode(self, text: str, encoder: Encoder) -> tuple[Tensor, list[str], bool]:
        """Token ids [1, L], the tokens as words, and whether the text was cut to the model's positions."""
        ids = self.tokenizer.library.encode(text).ids
        kept = ids[: encoder.config.positions]
        return torch.tensor([kept], device=self.device), [self.name(number) for number in kept], len(kept) < len(ids)

    def name(self, number: int) -> str:
        """A token as a word."""
        return self.tokenizer.library.id_to_token(number) or f"<{number}>"


def load(path: str | Path, device: Device = "auto") -> Model:
    """Load a model folder, the newest checkpoint of a run, or a Hugging Face folder, with its tokenizer."""
    folder = model_folder(Path(path))
    config, weights = read_model(folder)
    parts = [part for part in (config.generator, config.discriminator) if part is not None]
    tokenizer = load_model_tokenizer(folder, min(part.vocab_size for part in parts))
    return Model(
        build_model(config, weights, folder / WEIGHTS), tokenizer, choose_device(device), has_rtd_head(weights)
    )
