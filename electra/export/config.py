"""The settings of `electra export` and `electra import`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from electra.huggingface.names import Part


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model as a folder that `transformers` loads without custom code. A fine-tuned model is written as
    ElectraForSequenceClassification or ModernBertForSequenceClassification, one of multiple choice as
    ElectraForMultipleChoice or ModernBertForMultipleChoice."""

    model: Path
    """Model folder (written by electra), run (its newest checkpoint), or output of electra finetune (its best seed)."""
    output: Path
    """Folder to write; it must not exist yet."""
    to: Literal["huggingface"] = "huggingface"
    """Format."""
    part: Part = "discriminator"
    """discriminator: ElectraForPreTraining; generator: ElectraForMaskedLM; encoder, without a head: ElectraModel. In
    the modern style: ModernBertForTokenClassification (original, replaced); ModernBertForMaskedLM; ModernBertModel."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Write a model folder from a Hugging Face folder with safetensors: ElectraForPreTraining, ElectraForMaskedLM,
    ElectraModel, BertModel, BertForMaskedLM, ModernBertModel, ModernBertForMaskedLM, or
    ModernBertForTokenClassification with the labels original and replaced."""

    source: Annotated[Path, Parameter(name="--from")]
    """Hugging Face folder."""
    output: Path
    """Model folder to write; it must not exist yet."""
    generator: Path | None = None
    """Second Hugging Face folder, with the generator (ForMaskedLM) of the discriminator in --from."""
    json: bool = False
    """Print the result as JSON."""
