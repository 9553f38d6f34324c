"""The settings of `electra detect`, `electra fill` and `electra embed`."""

from dataclasses import dataclass
from pathlib import Path

from electra.config import Positional
from electra.errors import ConfigError
from electra.model.config import PACKAGED_MODEL, Pooling
from electra.training.config import Device


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A model, and a text or several."""

    text: Positional[str | None] = None
    """The text, in quotes; put -- before a text that starts with a dash."""
    input: Path | None = None
    """Instead of a text: a file with one text per line; without either, standard input is read."""
    model: Path = PACKAGED_MODEL
    """A run folder, a model folder (written by electra) or a Hugging Face folder (ELECTRA, BERT, ModernBERT); default:
    the small English model in the package."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.text is None:
            return
        if self.input is not None:
            raise ConfigError(f"both a text and --input {self.input} are given; leave out one")
        if not self.text.strip():
            raise ConfigError("the text is empty; pass some words in quotes")
        if any("\ud800" <= character <= "\udfff" for character in self.text):  # Python's stand-in for undecodable bytes
            raise ConfigError("the text is not valid UTF-8; set the terminal to UTF-8 or convert the text")


@dataclass(frozen=True, kw_only=True)
class DetectConfig:
    """Print the probability of each token of a text that it was replaced, as the discriminator predicts it."""

    input: TextConfig


@dataclass(frozen=True, kw_only=True)
class FillConfig:
    """Print the generator's most likely tokens for each [MASK] in a text."""

    input: TextConfig
    count: int = 5
    """Number of tokens for each [MASK]."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Print the embedding of a text: the pooled hidden states of the encoder."""

    input: TextConfig
    pooling: Pooling = "mean"
    """mean: mean over all tokens; cls: the [CLS] token."""
