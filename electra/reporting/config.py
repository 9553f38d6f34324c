"""The settings of `electra flops` and `electra report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra.config import Positional
from electra.errors import ConfigError, check_range
from electra.model.config import SMALL, ModelConfig
from electra.objectives.config import MaskCount, ObjectiveName
from electra.pretraining.recipes import recipe_settings

PAPER_SETTINGS = recipe_settings("faithful", ModelConfig.size)
INFERENCE_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class FlopsConfig:
    """Count the parameters and FLOPs of a model, item by item; only matrix products are counted.

    Length, masking, batch size and steps default to those of the paper for --size.
    """

    model: ModelConfig
    objective: ObjectiveName = "rtd"
    """Pre-training objective. mlm: one encoder of the discriminator's size (BERT); frozen-rtd: the generator has no
    backward pass and shares no weights."""
    length: int = PAPER_SETTINGS["length"]
    """Tokens per row."""
    mask_fraction: float = PAPER_SETTINGS["mask_fraction"]
    """Fraction of the tokens to mask."""
    mask_count: MaskCount = "released"
    """Maximum number of masked tokens in a row of n tokens; paper: ceil(p·n); released: max(1, int((p + .005)·n))."""
    batch_size: int = PAPER_SETTINGS["batch_size"]
    """Rows per training step."""
    steps: int = PAPER_SETTINGS["steps"]
    """Training steps."""
    vocab_size: int = SMALL.vocab_size
    """Size of the vocabulary."""
    inference: bool = False
    """Count one forward pass of the discriminator, by default over 128 tokens, instead of training."""
    as_published: bool = False
    """Count like the paper's table: also elementwise operations, embedding lookups as products with one-hot vectors, 5
    of 32 tokens predicted, and a backward pass as costly as a forward pass (it is twice that)."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "length", "batch_size", at_least=1)
        check_range(self, "steps", at_least=0)
        if self.as_published and self.model.style == "modern":
            raise ConfigError("--as-published counts like the paper, which has no modern style")
        if self.objective != "rtd" and (self.as_published or self.inference):
            flag = "--as-published" if self.as_published else "--inference"
            raise ConfigError(f"{flag} needs --objective rtd, not {self.objective}")

    @classmethod
    def dependent_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The paper's settings for the size in `values`."""
        settings = recipe_settings("faithful", values.get("size", ModelConfig.size))
        defaults = {name: settings[name] for name in ("length", "mask_fraction", "batch_size", "steps")}
        return defaults | {"length": INFERENCE_LENGTH} if values.get("inference") else defaults


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Compare pre-training runs: cost and held-out metrics, in tables and plots.

    Unfinished runs are compared by their last checkpoint; damaged ones are listed."""

    runs: Positional[tuple[Path, ...]]
    """Run folders."""
    output: Path | None = None
    """Folder for report.md, report.json and plots of loss, AUC and GLUE score against FLOPs and minutes."""
    glue: tuple[str, ...] = ()
    """Output folders of electra glue: FOLDER if its --model is one of the runs, else RUN=FOLDER. Tables inside a run
    folder are found without it."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("no runs given; name their folders: electra report runs/a runs/b --output report/")
