"""The settings of `electra export` and `electra import`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from electra.errors import ConfigError
from electra.huggingface.names import Part


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model as a folder that `transformers` loads without custom code, or as ONNX. A fine-tuned model becomes
    ElectraForSequenceClassification or ModernBertForSequenceClassification, one of multiple choice as
    ElectraForMultipleChoice or ModernBertForMultipleChoice, one of tags as ElectraForTokenClassification or
    ModernBertForTokenClassification, one of question answering as ElectraForQuestionAnswering or
    ModernBertForQuestionAnswering. With --to page: write a page that runs the model in the browser, for any web
    server. With --to package: write a pair in 8 bits and at most 5 MB, as the model in the package is stored."""

    model: Path
    """Model folder (written by electra), run (its newest checkpoint), or output of electra finetune (its best seed)."""
    output: Path
    """Folder to write; it must not exist yet."""
    to: Literal["huggingface", "onnx", "page", "package"] = "huggingface"
    """Format: a Hugging Face folder, of an encoder also for sentence-transformers; ONNX of the same inputs and outputs,
    for ONNX Runtime and transformers.js; a static page to try the model in; or the one of the model in the package,
    which only electra reads."""
    part: Part = "discriminator"
    """discriminator: ElectraForPreTraining; generator: ElectraForMaskedLM; encoder, without a head: ElectraModel. In
    the modern style: ModernBertForTokenClassification (original, replaced); ModernBertForMaskedLM; ModernBertModel."""
    training_data: str | None = None
    """The text that the model was trained on and its licences, for the model card; --to package needs it."""
    int8: bool = False
    """With --to onnx: also write a file with int8 weights, a quarter to a half of the size. With --to page: int8
    weights instead of fp32."""
    examples: Path | None = None
    """With --to page: a text file with one example per line; the two texts of a pair are separated by a tab. Default:
    some English sentences."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.int8 and self.to not in ("onnx", "page"):
            raise ConfigError("needs --to onnx or --to page; other formats have no int8 file", field="int8")
        if self.examples is not None and self.to != "page":
            raise ConfigError("needs --to page; other formats have no examples", field="examples")
        if self.part != ExportConfig.part and self.to in ("page", "package"):
            raise ConfigError(f"is {self.part}, but --to {self.to} writes the whole model; leave it out", field="part")


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
