"""The settings of `electra detect`, `electra fill`, `electra embed` and `electra demo`."""

from dataclasses import dataclass
from pathlib import Path

from electra.config import Positional
from electra.errors import ConfigError, check_range
from electra.model.config import PACKAGED_MODEL, EmbeddingPooling
from electra.training.config import Device, Precision


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
    """Compute embeddings, the pooled hidden states of the encoder: of a text, of lines, or of a file of any length.

    electra embed --model runs/x --input reviews.csv --column review --output vectors.npy

    With --output an interrupted command continues when it is repeated."""

    input: TextConfig
    output: Path | None = None
    """Write the embeddings of --input, a .txt file with one text per line or a .csv, .tsv, .jsonl or .parquet file
    (optionally compressed), to a .npy file (one row per text) or a .parquet file (text and embedding)."""
    overwrite: bool = False
    """Replace --output if it exists."""
    column: str = "text"
    """Column of the text in tables."""
    layers: tuple[int, ...] = (-1,)
    """Layers whose hidden states are concatenated: 1 is the first, 0 the embeddings; -1 is the last, -2 the one before
    it."""
    pooling: EmbeddingPooling = "mean"
    """mean: mean over all tokens; cls: the [CLS] token; max: maximum over all tokens."""
    length: int | None = None
    """Maximum length in tokens; longer texts are truncated; default the length that the model was trained on."""
    batch_size: int = 64
    """Texts per forward pass; texts of similar length are batched together."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU that supports it, else fp32."""

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)
        check_range(self, "length", at_least=8)
        if self.output is not None and self.input.input is None:
            raise ConfigError(f"--output {self.output} needs --input, a file of texts")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Show the packaged model on sentences with a planted word, train it further on text found on this computer (or,
    where there is none, a tiny model from scratch), compare it with simple baselines and export it: at most three
    minutes on a CPU, without a network."""

    output: Path = Path("electra-demo")
    """The folder to write; a number is appended if it exists."""
    quick: bool = False
    """Less text and fewer steps."""
    steps: int | None = None
    """Steps of pre-training; by default 40 of the packaged model or 1,000 of a new one, with --quick a fifth of it."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "steps", at_least=1)
