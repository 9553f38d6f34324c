"""Models to export: one of a pre-trained pair or a fine-tuned one, as a class of `transformers`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from electra.data.tokenizer import Vocabulary, load_tokenizer, read_trained_length
from electra.errors import ConfigError, DataError
from electra.exporting.config import ExportConfig
from electra.finetuning.jobs import best_model_folder
from electra.finetuning.kinds import KINDS
from electra.finetuning.predict import is_finetuned
from electra.finetuning.storage import FinetunedConfig, load_finetuned_model
from electra.huggingface.convert import (
    TASK_HEADS,
    Tensors,
    fold_projection,
    label_settings,
    merge_embedding_delta,
    select_part,
    to_huggingface_config,
    to_huggingface_tensors,
)
from electra.huggingface.names import ARCHITECTURES, EXPORT_CLASSES, TASK_CLASSES, Settings
from electra.model.electra import Discriminator, Electra, MaskedLanguageModel
from electra.model.encoder import Encoder
from electra.model.storage import WEIGHTS, has_rtd_head, has_tokenizer, load_model, read_tensor_names
from electra.onnx.export import ExportableModel, OutputFunction
from electra.training.checkpoint import find_model_folder


@dataclass(frozen=True)
class ExportSource:
    """A model to export, with the tensors and the config.json of its class in `transformers`."""

    folder: Path
    model: nn.Module
    encoder: Encoder
    outputs: OutputFunction  # as the class has them
    tensors: Tensors
    settings: Settings
    purpose: str  # discriminator, generator, encoder, or the task of a fine-tuned model
    length: int  # tokens that the tokenizer truncates to
    finetuned: FinetunedConfig | None = None
    input_axes: tuple[str, ...] = ("batch", "length")

    def __post_init__(self) -> None:
        check_finite_weights(self.tensors, self.folder)

    @property
    def class_name(self) -> str:
        return self.settings["architectures"][0]

    @property
    def has_segments(self) -> bool:
        """Whether segment ids are an input of an ONNX file: the joint head reads where the context is."""
        return not self.encoder.config.is_modern() or self.decoding == "joint"

    @property
    def decoding(self) -> str:
        """The head, joint or crf, if `transformers` does not have it: our runtime finds predictions in its outputs."""
        if self.finetuned is None:
            return ""
        if self.finetuned.task.head == "joint":
            return "joint"
        return "crf" if self.finetuned.task.crf else ""

    def count_parameters(self) -> int:
        return count_parameters(self.tensors)

    def exportable_model(self) -> ExportableModel:
        """The model in fp32, with the inputs and outputs of its class."""
        vocabulary = read_vocabulary(self.folder)
        return ExportableModel(
            self.model.float(),
            self.encoder,
            self.outputs,
            self.input_axes,
            int8_head=self.purpose == "generator",  # whose head is most of it
            has_segments=self.has_segments,
            special_ids=None if vocabulary is None else (vocabulary.cls_id, vocabulary.sep_id),
        ).eval()


def check_finite_weights(tensors: Tensors, folder: Path) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DataError(f"the weights in {folder} are not finite ({name}); train the model again")


def count_parameters(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def load_export_source(config: ExportConfig) -> ExportSource:
    """Load a part of a pair, or a fine-tuned model."""
    if is_finetuned(config.model):
        return load_finetuned_source(config)
    folder = find_model_folder(config.model)
    electra = load_model(folder)
    if config.part == "discriminator":
        check_exportable_discriminator(electra, folder, config.to == "page")
    part = merge_disentangled_embeddings(select_part(electra, config.part).eval())
    encoder = part.encoder.config
    name = EXPORT_CLASSES[encoder.style][config.part]
    tensors = to_huggingface_tensors(fold_projection(part.state_dict(), encoder), ARCHITECTURES[name])
    dtype = next(iter(tensors.values())).dtype
    vocabulary = read_vocabulary(folder) if encoder.is_modern() else None  # for the ids of special tokens
    settings = to_huggingface_config(encoder, name, dtype, vocabulary)
    return ExportSource(
        folder=folder,
        model=part.encoder if config.part == "encoder" else part,
        encoder=part.encoder,
        outputs=part_outputs(part, has_head=config.part != "encoder"),
        tensors=tensors,
        settings=settings | label_settings(ARCHITECTURES[name].labels),
        purpose=config.part,
        length=min(encoder.positions, read_trained_length(folder) or encoder.positions),
    )


def check_exportable_discriminator(electra: Electra, folder: Path, is_page: bool) -> None:
    """Check that there is a discriminator and that its head was trained."""
    if not isinstance(electra.discriminator, Discriminator):
        part = "generator" if electra.discriminator is None else "encoder"
        advice = "a page needs one; choose another --model" if is_page else f"export its {part} with --part {part}"
        raise ConfigError(f"{folder} has no discriminator; {advice}")
    if not has_rtd_head(read_tensor_names(folder / WEIGHTS)):
        raise ConfigError(f"the discriminator in {folder} has no trained head; export its encoder with --part encoder")


def merge_disentangled_embeddings(part: Discriminator | MaskedLanguageModel) -> Discriminator | MaskedLanguageModel:
    """The model with the sums of its tables and the generator's instead of both."""
    if part.encoder.embeddings.base is not None:
        merged = merge_embedding_delta(part.state_dict())
        part.encoder.embeddings.base = None
        part.load_state_dict(merged)
    return part


def part_outputs(part: Discriminator | MaskedLanguageModel, has_head: bool) -> OutputFunction:
    """The function that computes what `EXPORT_CLASSES` return."""
    if not has_head:
        return lambda *inputs: {"last_hidden_state": part.encoder(*inputs)}
    if isinstance(part, MaskedLanguageModel):
        return lambda *inputs: {"logits": part(*inputs).logits}
    if not part.encoder.config.is_modern():
        return lambda *inputs: {"logits": part(*inputs)}

    def two_logits(*inputs: Tensor) -> dict[str, Tensor]:
        """Logits [B, L, 2] of the labels original and replaced."""
        logits = part(*inputs)
        return {"logits": torch.stack([torch.zeros_like(logits), logits], -1)}

    return two_logits


def load_finetuned_source(config: ExportConfig) -> ExportSource:
    """Load a fine-tuned model, or the best one of an output of electra finetune.

    Its scores are in the unit of the training data."""
    if config.part != ExportConfig.part:
        raise ConfigError(f"{config.model} is fine-tuned and exported as a whole; leave out --part {config.part}")
    folder = best_model_folder(config.model)
    model, finetuned = load_finetuned_model(folder)
    if finetuned.frozen is not None:
        raise ConfigError(
            f"{folder} was fine-tuned with --frozen, which cannot be exported: its head reads several layers; use "
            "electra predict, or fine-tune without --frozen"
        )
    encoder, task, kind = finetuned.encoder, finetuned.task, KINDS[finetuned.task.kind]
    state = {f"encoder.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
    architecture = ARCHITECTURES[EXPORT_CLASSES[encoder.style]["discriminator"]]  # its encoder has the same names
    tensors = to_huggingface_tensors(fold_projection(state, encoder), architecture)
    if model.in_transformers:
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(task.scale)
            model.get_parameter("head.bias").mul_(task.scale).add_(task.offset)
        class_name = TASK_CLASSES[kind.huggingface_task][encoder.style]
        tensors |= TASK_HEADS[class_name](dict(model.head.state_dict()))
    else:
        check_exported_as_onnx(task.crf, folder, config)
        class_name = EXPORT_CLASSES[encoder.style]["encoder"]  # with further outputs
        tensors |= dict(model.head.state_dict(prefix="head."))
    vocabulary = read_vocabulary(folder) if encoder.is_modern() else None  # for the ids of special tokens
    settings = to_huggingface_config(encoder, class_name, torch.float32, vocabulary)
    settings |= label_settings(kind.output_names(task)) | kind.huggingface_settings(encoder)
    if encoder.is_modern():
        settings |= {"classifier_dropout": encoder.dropout, "classifier_pooling": model.pooling}
    return ExportSource(
        folder=folder,
        model=model,
        encoder=model.encoder,
        outputs=model.exported_outputs,
        tensors=tensors,
        settings=settings,
        purpose=kind.huggingface_task,
        length=finetuned.length,
        finetuned=finetuned,
        input_axes=model.exported_axes,
    )


def check_exported_as_onnx(has_crf: bool, folder: Path, config: ExportConfig) -> None:
    """Raise unless a head that `transformers` does not have is exported as ONNX, which our runtime decodes."""
    head, without = ("a CRF", "without --crf") if has_crf else ("the joint head", "with --head simple")
    if config.to != "onnx":
        where = "the page cannot decode it" if config.to == "page" else "transformers has no class for it"
        raise ConfigError(f"{folder} has {head}, and {where}; use --to onnx, or fine-tune {without}")


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a model's tokenizer, if it has one."""
    return load_tokenizer(folder).vocabulary if has_tokenizer(folder) else None
