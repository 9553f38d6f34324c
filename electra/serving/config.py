"""The settings of `electra detect`, `electra fill`, `electra embed`, `electra serve` and `electra demo`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from electra.config import PACKAGED_MODEL, Positional
from electra.errors import ConfigError, check_range, require_libraries
from electra.model.config import EmbeddingPooling
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
    the small English model in the package, if the installation contains one."""
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

    def __post_init__(self) -> None:
        check_range(self, "count", at_least=1)


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
    batch_size: int | None = None
    """Texts per forward pass; default 64, on a GPU 512. Texts of similar length are batched together."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU that supports it, else fp32."""

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)
        check_range(self, "length", at_least=8)
        if self.output is not None and self.input.input is None:
            raise ConfigError(f"--output {self.output} needs --input, a file of texts")
        if self.output is not None and self.output.suffix == ".parquet" and self.column == "embedding":
            raise ConfigError(
                "is embedding, the name of the other column in the .parquet file; write a .npy file", field="column"
            )


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Show the packaged model on sentences with a replaced word, train it further on text found on this computer (or,
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


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits of the server: what exceeds them is answered with 408, 413, 422 or 429 and a sentence."""

    max_body: int = 1_000_000
    """Bytes of a request."""
    max_texts: int = 64
    """Texts or rows of a request."""
    max_characters: int = 20_000
    """Characters of a text, or of a list of words or choices; what is longer than the model reads is truncated."""
    max_queue: int = 1024
    """Texts that may wait; further requests are answered with 429."""
    batch_tokens: int | None = None
    """Tokens of a forward pass, with padding; texts of similar length share one; default 512 on a CPU, where
    longer batches are no faster, 16,384 on a GPU."""
    client_timeout: float = 10.0
    """Seconds that a client may take to send a request or to read a part of the response."""
    stop_timeout: float = 30.0
    """Seconds that running requests may take after the signal to stop."""

    def __post_init__(self) -> None:
        check_range(self, "max_body", "max_texts", "max_characters", "max_queue", "batch_tokens", at_least=1)
        check_range(self, "client_timeout", "stop_timeout", above=0)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Answer HTTP requests with a model: POST /detect, /fill and /embed, or /predict of a fine-tuned one; GET /health
    and /metrics; / and /docs are pages for the browser.

    electra serve --model runs/x

    Requests that arrive together are computed together. Ctrl-C or SIGTERM stop it after the running requests."""

    model: Path = PACKAGED_MODEL
    """A run, a model folder, a fine-tuned model, a Hugging Face folder (ELECTRA, BERT, ModernBERT) or a folder of
    electra export --to onnx; default: the small English model in the package, if the installation contains one."""
    backend: Literal["auto", "torch", "onnx"] = "auto"
    """auto: ONNX Runtime for a folder of electra export --to onnx, else PyTorch."""
    int8: bool = False
    """Use the int8 file of such a folder."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU; ONNX Runtime uses the CPU."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines, which the server does not authenticate."""
    port: int = 8000
    """Port to listen on; 0 chooses a free one."""
    page: bool = True
    """Show the page of electra export --to page at /, as soon as it is made."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        check_range(self, "port", at_least=0, at_most=65535)
        require_libraries("electra serve", ("fastapi", "uvicorn"))
