"""`electra detect`, `electra fill`, `electra embed`: a model on one text, from the command line."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from electra.config import Positional
from electra.errors import ConfigError
from electra.serve.inference import Detected, Filled, Pooling, load
from electra.training.hardware import Device


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A model and a text for it."""

    text: Positional[str]
    """The text, in quotes; if it starts with a dash, behind --."""
    model: Path
    """A model folder, a run folder, or a Hugging Face folder (ELECTRA, BERT, ModernBERT)."""
    device: Device = "auto"
    """auto: the GPU where there is one."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigError("the text is empty; give some words in quotes")
        if any(
            "\ud800" <= character <= "\udfff" for character in self.text
        ):  # how Python passes bytes it cannot decode
            raise ConfigError("the text is not valid UTF-8; set the terminal to UTF-8, or convert the text")


@dataclass(frozen=True, kw_only=True)
class DetectConfig(TextConfig):
    """Say of every token of a text whether it looks replaced: the discriminator's verdict, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class FillConfig(TextConfig):
    """Fill in each [MASK] of a text: the generator's likeliest tokens."""

    count: int = 5
    """Guesses for each blank."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(TextConfig):
    """Turn a text into a vector: the encoder's hidden states, pooled."""

    pooling: Pooling = "mean"
    """mean: over all tokens; cls: the first token's."""


@dataclass(frozen=True)
class Shown(Detected):
    """Verdicts as a line of text, suspicious tokens marked."""

    def __str__(self) -> str:
        highest = max(zip(self.replaced, self.tokens, strict=True), default=(0.0, ""))
        quiet = f"\n(no token looks replaced; the likeliest is {highest[1]}, {highest[0]:.2f})"
        return colored(self) + (quiet if highest[0] < SUSPICIOUS else "")


@dataclass(frozen=True)
class Guesses(Filled):
    """Guesses, a line for each blank."""

    def __str__(self) -> str:
        lines = []
        for blank in self.blanks:
            guesses = "  ".join(f"{token} {probability:.3f}" for token, probability in blank.guesses.items())
            lines.append(f"[MASK] at {blank.position}: {guesses}")
        return "\n".join(lines) + cut_note(self.is_truncated)


@dataclass(frozen=True)
class Embedded:
    """A text's vector."""

    vector: list[float]
    is_truncated: bool = False

    def __str__(self) -> str:
        shown = " ".join(f"{number:.4f}" for number in self.vector[:8])
        return f"{len(self.vector)} numbers: {shown} …  (--json for all){cut_note(self.is_truncated)}"


def detect(config: DetectConfig) -> Shown:
    """The discriminator's verdicts on a text."""
    return Shown(**vars(load(config.model, config.device).detect(config.text)))


def fill(config: FillConfig) -> Guesses:
    """The generator's guesses for the blanks of a text."""
    return Guesses(**vars(load(config.model, config.device).fill(config.text, config.count)))


def embed(config: EmbedConfig) -> Embedded:
    """The vector of a text."""
    model = load(config.model, config.device)
    return Embedded(model.embed(config.text, config.pooling)[0].tolist(), model.is_cut(config.text))


SUSPICIOUS = 0.5  # the verdict from which on a token counts as replaced


def colored(detected: Detected, threshold: float = SUSPICIOUS) -> str:
    """Tokens side by side, suspicious ones red and with their verdict (red on a terminal only)."""
    line = Text()
    for token, verdict in zip(detected.tokens, detected.replaced, strict=True):
        is_suspicious = verdict >= threshold
        line.append(f"{token}({verdict:.2f})" if is_suspicious else token, style="bold red" if is_suspicious else "")
        line.append(" ")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(line)
    return captured.get().rstrip() + cut_note(detected.is_truncated)


def cut_note(is_truncated: bool) -> str:
    """What people are told of a text that was too long."""
    return "\n(the text was cut to the model's positions)" if is_truncated else ""
