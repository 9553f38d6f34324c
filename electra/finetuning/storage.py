"""Models to fine-tune and fine-tuned models, and the folder these are stored in.

config.json describes encoder, task, maximum length and pooling; model.safetensors holds the weights; the tokenizer's
files are copied beside them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from electra.data.tokenizer import TextTokenizer, read_trained_length
from electra.errors import ConfigError, DataError, check_range
from electra.finetuning.config import FrozenConfig
from electra.finetuning.frozen import FrozenEncoder, freeze
from electra.finetuning.kinds import KINDS
from electra.finetuning.models import TaskModel
from electra.finetuning.tasks import Task
from electra.huggingface.convert import Tensors, read_part_config_and_tensors
from electra.model.config import EncoderConfig, Pooling
from electra.model.electra import meta_device
from electra.model.encoder import Encoder
from electra.model.storage import (
    WEIGHTS,
    check_sizes_fit,
    check_tensors,
    copy_tokenizer_files,
    load_model_tokenizer,
    read_tensors,
    write_tensors,
)
from electra.runfolder import CONFIG, convert_stored, file_checksum, read_json, write_json
from electra.training.checkpoint import find_model_folder, load_weights


@dataclass(frozen=True)
class PretrainedModel:
    """A model to fine-tune."""

    encoder: Encoder
    head: Tensors  # weights of the loaded model's head, if any
    pooling: Pooling  # pooling of that head
    folder: Path
    seed_offset: int = 0  # a model that was fine-tuned before gets other random numbers for its new head

    def load_tokenizer(self) -> TextTokenizer:
        return load_model_tokenizer(self.folder, self.encoder.config.vocab_size)


def load_pretrained(path: Path, dropout: float | None = None) -> PretrainedModel:
    """Load the encoder of a run, model folder, fine-tuned model or Hugging Face folder."""
    folder = find_model_folder(path)
    settings = read_json(folder / CONFIG)
    if is_finetuned_config(settings):
        finetuned = read_finetuned_config(folder)
        config, tensors = finetuned.encoder, read_tensors(folder / WEIGHTS)
        pooling = finetuned.pooling if finetuned.frozen is None else "cls"  # that of a frozen encoder suits only it
        seed_offset = crc32(repr((finetuned.task.name, finetuned.task.labels)).encode())
    else:
        config, tensors = read_part_config_and_tensors(folder)
        pooling = settings.get("classifier_pooling") or "cls"
        seed_offset = 0
    with meta_device():  # the stored weights are assigned below
        encoder = Encoder(config.with_dropout(dropout))
    weights = select_and_strip_prefix(tensors, "encoder.")
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("bilstm.")}  # is part of a head
    check_tensors(weights, dict(encoder.named_parameters()), folder / WEIGHTS)
    encoder.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return PretrainedModel(encoder, select_and_strip_prefix(tensors, "head."), pooling, folder, seed_offset)


def select_and_strip_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names start with a prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def build_task_model(
    pretrained: PretrainedModel,
    num_labels: int,
    pooling: Pooling | None = None,
    *,
    seed: int,
    model_class: type[TaskModel] = TaskModel,
    frozen: FrozenConfig | None = None,
) -> TaskModel:
    """A model to fine-tune, with a randomly initialised output layer.

    As in `transformers`, a modern head keeps the loaded head's dense layer and norm, and its pooling unless given. The
    states of a frozen encoder are pooled by their mean: without fine-tuning that of [CLS] says little.
    """
    torch.manual_seed(seed + pretrained.seed_offset)
    if frozen is not None:
        return model_class(freeze(pretrained.encoder, frozen), num_labels, pooling or "mean")
    model = model_class(pretrained.encoder, num_labels, pooling or pretrained.pooling)
    parameters = dict(model.head.named_parameters())
    with torch.no_grad():
        for name in ("dense.weight", "norm.weight"):
            if name in parameters and name in pretrained.head:
                parameters[name].copy_(pretrained.head[name])
    return model


@dataclass(frozen=True, kw_only=True)
class FinetunedConfig:
    """The config.json of a fine-tuned model."""

    encoder: EncoderConfig
    task: Task
    length: int  # maximum length in tokens
    pooling: Pooling
    frozen: FrozenConfig | None  # of feature-based fine-tuning

    def __post_init__(self) -> None:
        check_range(self, "length", at_least=1)
        if bool(self.task.labels) != KINDS[self.task.kind].has_classes:
            raise ConfigError(f"has {len(self.task.labels)} classes, but the task is {self.task.kind}", field="labels")


def is_finetuned_config(settings: dict[str, Any]) -> bool:
    """Whether a config.json is that of a fine-tuned model."""
    return {"encoder", "task"} <= settings.keys()


def read_finetuned_config(folder: Path) -> FinetunedConfig:
    settings = read_json(folder / CONFIG)
    if not is_finetuned_config(settings):
        raise DataError(f"{folder} is not a fine-tuned model; create one with: electra finetune --model {folder} …")
    config = convert_stored(settings, FinetunedConfig, folder / CONFIG)
    check_sizes_fit(folder, [folder / WEIGHTS], config.encoder)
    return config


def task_of_ensemble(configs: Sequence[FinetunedConfig]) -> Task:
    """The task of one or several models, with the mean of their thresholds: each was tuned for its own model."""
    thresholds = [config.task.null_threshold for config in configs]
    return replace(configs[0].task, null_threshold=sum(thresholds) / len(thresholds))


def save_finetuned_model(model: TaskModel, task: Task, length: int, folder: Path, tokenizer: Path) -> None:
    """Write a fine-tuned model into a folder, with the tokenizer's files from another folder."""
    write_tensors(folder / WEIGHTS, {name: tensor.detach() for name, tensor in model.named_parameters()})
    config = FinetunedConfig(
        encoder=model.encoder.config,
        task=task,
        length=length,
        pooling=model.pooling,
        frozen=model.encoder.frozen if isinstance(model.encoder, FrozenEncoder) else None,
    )
    write_json(folder / CONFIG, asdict(config))
    trained_length = read_trained_length(tokenizer)
    copy_tokenizer_files(tokenizer, folder, trained_length and max(trained_length, length))


def load_finetuned_model(folder: Path) -> tuple[TaskModel, FinetunedConfig]:
    """Load a fine-tuned model and its configuration."""
    config = read_finetuned_config(folder)
    with meta_device():
        model_class = KINDS[config.task.kind].model(config.task)
        frozen = config.frozen
        encoder = Encoder(config.encoder) if frozen is None else FrozenEncoder(config.encoder, frozen)
        model = model_class(encoder, config.task.num_labels, config.pooling)
    weights = read_tensors(folder / WEIGHTS)
    check_tensors(weights, dict(model.named_parameters()), folder / WEIGHTS)
    model.load_state_dict(weights, assign=True)
    return model.eval(), config


def restore_weights(model: TaskModel, folder: Path) -> None:
    """Load the weights of a stored model of the same form."""
    load_weights(model, folder)


def weight_checksums(folder: Path) -> dict[str, str]:
    """The checksums of the weights in a model folder or a Hugging Face folder."""
    name = Path(WEIGHTS)
    files = sorted(file for file in folder.glob(f"{name.stem}*{name.suffix}*") if file.is_file())
    return {str(file): file_checksum(file) for file in files}


def checksum_of_weights(folder: Path) -> str:
    """The checksums of all weights in a folder as one text, wherever the folder is."""
    return " ".join(weight_checksums(folder).values())
