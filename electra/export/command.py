"""`electra export` and `electra import`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from electra.data.tokenizer import Vocabulary, load_tokenizer
from electra.errors import ConfigError
from electra.finetuning.jobs import best_model
from electra.finetuning.model import load_finetuned
from electra.huggingface.convert import (
    ARCHITECTURES,
    CLASSIFIERS,
    EXPORT_CLASSES,
    ImportedModel,
    Settings,
    Tensors,
    fold_projection,
    huggingface_config,
    labelled,
    merge_embedding_delta,
    read_huggingface,
    select_part,
    to_huggingface,
)
from electra.huggingface.folders import join
from electra.model.config import EncoderConfig
from electra.model.electra import Discriminator, Electra
from electra.model.storage import (
    CONFIG,
    TOKENIZER_FILES,
    WEIGHTS,
    copy_tokenizer,
    has_rtd_head,
    load_model,
    read_names,
    write_parts,
    write_tensors,
)
from electra.runfolder import read_json, write_folder, write_json
from electra.training.checkpoint import model_folder

Part = Literal["discriminator", "generator", "encoder"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model as a folder that `transformers` loads without custom code. A fine-tuned one leaves as
    ElectraForSequenceClassification or ModernBertForSequenceClassification, with the same answers."""

    model: Path
    """A model folder; a run stands for its newest checkpoint, the output of electra finetune for its best seed."""
    output: Path
    """The folder to write; it must not exist yet."""
    to: Literal["huggingface"] = "huggingface"
    """The format."""
    part: Part = "discriminator"
    """discriminator: ElectraForPreTraining; generator: ElectraForMaskedLM; encoder, without a head: ElectraModel. In
    the modern style: ModernBertForTokenClassification (original, replaced); ModernBertForMaskedLM; ModernBertModel."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Make a model folder of a Hugging Face folder: ElectraForPreTraining, ElectraForMaskedLM, ElectraModel, BertModel,
    BertForMaskedLM, ModernBertModel, ModernBertForMaskedLM, or ModernBertForTokenClassification where its labels are
    original and replaced; in safetensors."""

    source: Annotated[Path, Parameter(name="--from")]
    """The Hugging Face folder."""
    output: Path
    """The model folder to write; it must not exist yet."""
    generator: Path | None = None
    """A second Hugging Face folder, with the generator (ForMaskedLM) of the discriminator in --from."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Written:
    """What was written, and what of the source was not."""

    output: str
    model: str
    parameters: int
    tokenizer: list[str]
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        missing = (
            "no tokenizer was there, and without one it reads no text (detect, fill, embed; AutoTokenizer): copy the "
            f"tokenizer.json or vocab.txt it was trained with into {self.output}"
        )
        tokenizer = f"tokenizer files: {', '.join(self.tokenizer)}" if self.tokenizer else missing
        left_out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.output}: {self.model}, {self.parameters:,} parameters; {tokenizer}{left_out}"


def export(config: ExportConfig) -> Written:
    """Write one part of a model, or a fine-tuned one, as a Hugging Face folder."""
    if is_finetuned(config.model):
        return export_finetuned(config)
    folder = model_folder(config.model)
    electra = load_model(folder)
    if config.part == "discriminator":
        check_discriminator(electra, folder)
    part = select_part(electra, config.part)
    size = part.encoder.config
    name = EXPORT_CLASSES[size.style][config.part]
    tensors = to_huggingface(fold_projection(merge_embedding_delta(part.state_dict()), size), ARCHITECTURES[name])
    settings = huggingface_config(size, name, next(iter(tensors.values())).dtype, vocabulary_of(folder, size))
    return write_huggingface(config.output, tensors, settings | labelled(ARCHITECTURES[name].labels), folder)


def write_huggingface(output: Path, tensors: Tensors, settings: Settings, tokenizer: Path) -> Written:
    """Write a Hugging Face folder, with the tokenizer files of another."""
    with write_folder(output) as draft:
        write_tensors(draft / WEIGHTS, tensors)
        write_json(draft / CONFIG, settings)
        copied = copy_tokenizer(tokenizer, draft)
    return Written(str(output), settings["architectures"][0], count(tensors), copied)


def vocabulary_of(folder: Path, size: EncoderConfig) -> Vocabulary | None:
    """The vocabulary of the tokenizer beside a model, where there is one and ModernBERT's config.json tells of it."""
    has_tokenizer = size.is_modern() and any((folder / name).exists() for name in TOKENIZER_FILES)
    return load_tokenizer(folder).vocabulary if has_tokenizer else None


def is_finetuned(folder: Path) -> bool:
    """Whether there is a fine-tuned model in a folder, or several seeds of one."""
    return (folder / CONFIG).exists() and "task" in read_json(folder / CONFIG)


def export_finetuned(config: ExportConfig) -> Written:
    """Write a fine-tuned model as a classifier of texts; scores leave in the unit they came in."""
    if config.part != ExportConfig.part:
        raise ConfigError(f"{config.model} is fine-tuned: it leaves whole; leave out --part {config.part}")
    folder = best_model(config.model)
    model, task = load_finetuned(folder)
    size = model.encoder.config
    name, alike, head_of = CLASSIFIERS[size.style]
    state = {f"encoder.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
    head = {name: tensor.detach() for name, tensor in model.head.state_dict().items()}
    head |= {"weight": head["weight"] * task.scale, "bias": head["bias"] * task.scale + task.offset}
    tensors = to_huggingface(fold_projection(state, size), ARCHITECTURES[alike]) | head_of(head)
    settings = huggingface_config(size, name, torch.float32, vocabulary_of(folder, size))
    settings |= labelled(task.labels or ("score",)) | {"problem_type": PROBLEMS[task.kind]}
    settings |= {"classifier_dropout": size.dropout, "classifier_pooling": model.pooling} if size.is_modern() else {}
    return write_huggingface(config.output, tensors, settings, folder)


PROBLEMS = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}


def check_discriminator(electra: Electra, folder: Path) -> None:
    """Refuse to hand out a discriminator that is not there, or whose head was never trained."""
    if electra.discriminator is None:
        raise ConfigError(f"{folder} has no discriminator; hand out its generator with --part generator")
    if not isinstance(electra.discriminator, Discriminator):
        raise ConfigError(f"{folder} corrects tokens and has no verdicts of them; hand out its --part encoder")
    if not has_rtd_head(read_names(folder / WEIGHTS)):
        raise ConfigError(f"the discriminator in {folder} has no trained head; leave it out with --part encoder")


def import_model(config: ImportConfig) -> Written:
    """Write a model folder from one Hugging Face folder, or from a discriminator's and its generator's."""
    arrivals = [read_huggingface(config.source)]
    if config.generator is not None:
        arrivals.append(read_huggingface(config.generator))
        check_roles(arrivals)
    model, tensors = join(arrivals)
    with write_folder(config.output) as draft:
        tokenizer = write_parts(model, tensors, draft, config.source)
    described = f"{' and '.join(arrival.part for arrival in arrivals)}, sharing {model.sharing}"
    left_out = [name for arrival in arrivals for name in arrival.left_out]
    return Written(str(config.output), described, count(tensors), tokenizer, left_out)


def check_roles(arrivals: list[ImportedModel]) -> None:
    """Refuse two folders that are not a discriminator and a generator, in this order."""
    came = [arrival.part for arrival in arrivals]
    if came != ["discriminator", "generator"]:
        raise ConfigError(f"--from holds a {came[0]} and --generator a {came[1]}; give the discriminator to --from")


def count(tensors: Tensors) -> int:
    """Numbers in tensors."""
    return sum(tensor.numel() for tensor in tensors.values())
