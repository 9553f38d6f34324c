"""`electra export` and `electra import`."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from electra.data.tokenizer import Vocabulary, load_tokenizer, read_trained_length
from electra.errors import ConfigError, DataError
from electra.export.config import ExportConfig, ImportConfig
from electra.export.package import write_package
from electra.finetuning.jobs import best_model_folder
from electra.finetuning.kinds import KINDS
from electra.finetuning.model import load_finetuned_model
from electra.huggingface.convert import (
    TASK_HEADS,
    Tensors,
    fold_projection,
    label_settings,
    merge_embedding_delta,
    to_huggingface_config,
    to_huggingface_tensors,
)
from electra.huggingface.folders import combine_into_pair, read_huggingface_model, select_part
from electra.huggingface.names import ARCHITECTURES, EXPORT_CLASSES, TASK_CLASSES, Settings
from electra.model.config import EncoderConfig
from electra.model.electra import Discriminator, Electra
from electra.model.storage import (
    TOKENIZER_FILES,
    WEIGHTS,
    check_tokenizer,
    copy_tokenizer_files,
    has_rtd_head,
    load_model,
    read_tensor_names,
    write_model_files,
    write_tensors,
)
from electra.runfolder import CONFIG, create_folder_atomically, read_json, write_checksums, write_json
from electra.training.checkpoint import find_model_folder


@dataclass(frozen=True)
class ConversionResult:
    """The folder that an export or import wrote."""

    output: str
    model: str
    parameters: int
    tokenizer: list[str]  # its files
    ignored: list[str] = field(default_factory=list)  # tensors of the source that were not needed

    def __str__(self) -> str:
        tokenizer = (
            f"tokenizer files: {', '.join(self.tokenizer)}"
            if self.tokenizer
            else "no tokenizer: to use the model with text (electra detect, fill, embed; AutoTokenizer), copy the "
            f"tokenizer.json or vocab.txt it was trained with into {self.output}"
        )
        ignored = f"; ignored tensors: {', '.join(self.ignored)}" if self.ignored else ""
        return f"{self.output}: {self.model}, {self.parameters:,} parameters; {tokenizer}{ignored}"


def export(config: ExportConfig) -> ConversionResult:
    """Write one model of a pair, or a fine-tuned model, as a Hugging Face folder; or a pair as the packaged model."""
    if config.to == "package":
        description, parameters, files = write_package(config, find_model_folder(config.model))
        return ConversionResult(str(config.output), description, parameters, files)
    if (config.model / CONFIG).exists() and "task" in read_json(config.model / CONFIG):
        return export_finetuned(config)
    folder = find_model_folder(config.model)
    electra = load_model(folder)
    if config.part == "discriminator":
        check_exportable_discriminator(electra, folder)
    part = select_part(electra, config.part)
    encoder = part.encoder.config
    name = EXPORT_CLASSES[encoder.style][config.part]
    tensors = to_huggingface_tensors(
        fold_projection(merge_embedding_delta(part.state_dict()), encoder), ARCHITECTURES[name]
    )
    dtype = next(iter(tensors.values())).dtype
    settings = to_huggingface_config(encoder, name, dtype, read_vocabulary_if_modern(folder, encoder))
    return write_huggingface_folder(
        config.output,
        tensors,
        settings | label_settings(ARCHITECTURES[name].labels),
        folder,
        read_trained_length(folder) or encoder.positions,
    )


def check_exportable_discriminator(electra: Electra, folder: Path) -> None:
    """Check that there is a discriminator and that its head was trained."""
    if not isinstance(electra.discriminator, Discriminator):
        part = "generator" if electra.discriminator is None else "encoder"
        raise ConfigError(f"{folder} has no discriminator; export its {part} with --part {part}")
    if not has_rtd_head(read_tensor_names(folder / WEIGHTS)):
        raise ConfigError(f"the discriminator in {folder} has no trained head; export its encoder with --part encoder")


def export_finetuned(config: ExportConfig) -> ConversionResult:
    """Write a fine-tuned model, or the best one of an output of electra finetune, as the class of its kind of task.

    Its scores are in the unit of the training data."""
    if config.part != ExportConfig.part:
        raise ConfigError(f"{config.model} is fine-tuned and exported as a whole; leave out --part {config.part}")
    folder = best_model_folder(config.model)
    model, finetuned = load_finetuned_model(folder)
    if finetuned.frozen is not None:
        raise ConfigError(
            f"{folder} was fine-tuned with --frozen, and transformers has no class for its head; use electra predict, "
            "or fine-tune without --frozen"
        )
    encoder, task, kind = finetuned.encoder, finetuned.task, KINDS[finetuned.task.kind]
    class_name = TASK_CLASSES[kind.huggingface_task][encoder.style]
    state = {f"encoder.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
    head = {name: tensor.detach() for name, tensor in model.head.state_dict().items()}
    head |= {"weight": head["weight"] * task.scale, "bias": head["bias"] * task.scale + task.offset}
    architecture = ARCHITECTURES[EXPORT_CLASSES[encoder.style]["discriminator"]]  # its encoder has the same names
    tensors = to_huggingface_tensors(fold_projection(state, encoder), architecture)
    tensors |= TASK_HEADS[class_name](head)
    settings = to_huggingface_config(encoder, class_name, torch.float32, read_vocabulary_if_modern(folder, encoder))
    settings |= label_settings(kind.output_names(task)) | kind.huggingface_settings(encoder)
    if encoder.is_modern():
        settings |= {"classifier_dropout": encoder.dropout, "classifier_pooling": model.pooling}
    return write_huggingface_folder(config.output, tensors, settings, folder, finetuned.length)


def read_vocabulary_if_modern(folder: Path, encoder: EncoderConfig) -> Vocabulary | None:
    """The vocabulary of a model's tokenizer, if it has one and the exported config.json lists special tokens."""
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    return load_tokenizer(folder).vocabulary if encoder.is_modern() and has_tokenizer else None


def write_huggingface_folder(
    output: Path, tensors: Tensors, settings: Settings, tokenizer_folder: Path, max_length: int
) -> ConversionResult:
    """Write a Hugging Face folder with the tokenizer of `tokenizer_folder`, which truncates to `max_length` tokens."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DataError(f"the weights in {tokenizer_folder} are not finite ({name}); train the model again")
    check_tokenizer(tokenizer_folder, settings["vocab_size"])
    with create_folder_atomically(output) as draft:
        write_tensors(draft / WEIGHTS, tensors)
        write_json(draft / CONFIG, settings)
        copied = copy_tokenizer_files(tokenizer_folder, draft, max_length)
    return ConversionResult(str(output), settings["architectures"][0], count_parameters(tensors), copied)


def import_model(config: ImportConfig) -> ConversionResult:
    """Write a model folder from one Hugging Face folder, or from those of a discriminator and its generator."""
    models = [read_huggingface_model(config.source)]
    if config.generator is not None:
        models.append(read_huggingface_model(config.generator))
        parts = [model.part for model in models]
        if parts != ["discriminator", "generator"]:
            raise ConfigError(f"--from must be a discriminator and --generator a generator, not {' and '.join(parts)}")
    check_tokenizer(config.source, models[0].config.vocab_size)
    electra, tensors = combine_into_pair(models)
    with create_folder_atomically(config.output) as draft:
        tokenizer = write_model_files(electra, tensors, draft, config.source)
        write_checksums(draft)
    description = f"{' and '.join(model.part for model in models)}, sharing {electra.sharing}"
    ignored = [name for model in models for name in model.ignored]
    return ConversionResult(str(config.output), description, count_parameters(tensors), tokenizer, ignored)


def count_parameters(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
