"""The fine-tuned model: the discriminator's encoder with a task head, and the folder it is stored in.

config.json describes encoder, task, maximum length and pooling; model.safetensors holds the weights; the tokenizer's
files are copied beside them.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError, DataError, check_range
from electra.finetuning.readers import TaskKind
from electra.finetuning.tasks import Task
from electra.huggingface.convert import Tensors
from electra.huggingface.folders import read_part_config_and_tensors
from electra.model.config import EncoderConfig, Pooling
from electra.model.encoder import Encoder, create_linear, create_norm
from electra.model.storage import (
    WEIGHTS,
    check_sizes_fit,
    check_tensors,
    copy_tokenizer_files,
    read_tensors,
    write_tensors,
)
from electra.runfolder import CONFIG, convert_stored, read_json, write_json
from electra.training.checkpoint import find_model_folder


class ClassicHead(nn.Linear):
    """The paper's task head: dropout and one linear layer, without a pooler."""

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__(config.width, num_labels)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """Logits [B, num_labels] of pooled states [B, D]."""
        return super().forward(self.dropout(pooled))


class ModernHead(ClassicHead):
    """The head of ModernBertForSequenceClassification: dense layer, GELU and norm before dropout and linear layer."""

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__(config, num_labels)
        self.dense = create_linear(config, config.width, config.width)
        self.norm = create_norm(config, config.width)
        nn.init.trunc_normal_(self.dense.weight, std=config.init_std)

    def forward(self, pooled: Tensor) -> Tensor:
        return super().forward(self.norm(functional.gelu(self.dense(pooled))))


HEADS = {"classic": ClassicHead, "modern": ModernHead}


class TaskModel(nn.Module):
    """An encoder with a task head on the first token's state or, in the modern style, on the mean of all states."""

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__()
        if pooling not in get_args(Pooling):
            raise ConfigError(f"unknown pooling {pooling!r}; choose from {', '.join(get_args(Pooling))}")
        if pooling != "cls" and not encoder.config.is_modern():
            raise ConfigError(f"pooling is {pooling}, but classic encoders support only cls; use a modern encoder")
        self.encoder, self.pooling = encoder, pooling
        self.head = HEADS[encoder.config.style](encoder.config, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, num_labels]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return self.head(hidden[:, 0] if self.pooling == "cls" else mean_pool(hidden, attention_mask))


def mean_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean [B, D] of the states [B, L, D] of all tokens but padding."""
    total = (hidden * attention_mask[..., None]).sum(1, dtype=torch.float32)
    return (total / attention_mask.sum(1, keepdim=True)).to(hidden.dtype)


@dataclass(frozen=True)
class OutputType:
    """Loss, predictions and output activation of one kind of task."""

    loss: Callable[[Tensor, Tensor], Tensor]  # logits [B, num_labels], targets → losses [B]
    uniform_loss: Callable[[Task], float]  # loss of uniform predictions, or of the mean score
    predict: Callable[[NDArray, Task], NDArray]  # logits [N, num_labels] → predictions in the form of `Examples.labels`
    activation: Callable[[NDArray], NDArray]  # logits [N, num_labels] → probabilities, or outputs of a regression


OUTPUT_TYPES: dict[TaskKind, OutputType] = {
    "classification": OutputType(
        loss=lambda logits, targets: functional.cross_entropy(logits, targets, reduction="none"),
        uniform_loss=lambda task: math.log(task.num_labels),
        predict=lambda logits, task: logits.argmax(1),
        activation=lambda logits: torch.from_numpy(logits).softmax(1).numpy(),
    ),
    "multi-label": OutputType(
        loss=lambda logits, targets: functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        ).mean(1),
        uniform_loss=lambda task: math.log(2),
        predict=lambda logits, task: (logits > 0).astype(np.float32),
        activation=lambda logits: torch.from_numpy(logits).sigmoid().numpy(),
    ),
    "regression": OutputType(
        loss=lambda logits, targets: (logits[:, 0] - targets).square(),
        uniform_loss=lambda task: 1.0,
        predict=lambda logits, task: task.denormalize_scores(logits[:, 0]),
        activation=lambda logits: logits,
    ),
}


@dataclass(frozen=True)
class PretrainedModel:
    """A model to fine-tune."""

    encoder: Encoder
    head: Tensors  # weights of the loaded model's head, if any
    pooling: Pooling  # pooling of that head
    folder: Path
    seed_offset: int = 0  # a model that was fine-tuned before gets other random numbers for its new head


def load_pretrained(path: Path, dropout: float | None = None) -> PretrainedModel:
    """Load the encoder of a run, model folder, fine-tuned model or Hugging Face folder."""
    folder = find_model_folder(path)
    settings = read_json(folder / CONFIG)
    if is_finetuned_config(settings):
        finetuned = read_finetuned_config(folder)
        config, tensors = finetuned.encoder, read_tensors(folder / WEIGHTS)
        pooling = finetuned.pooling
        seed_offset = crc32(repr((finetuned.task.name, finetuned.task.labels)).encode())
    else:
        config, tensors = read_part_config_and_tensors(folder)
        pooling = settings.get("classifier_pooling") or "cls"
        seed_offset = 0
    if dropout is not None:
        config = replace(config, dropout=dropout, attention_dropout=dropout)
    with torch.device("meta"):  # the stored weights are assigned below
        encoder = Encoder(config)
    weights = select_and_strip_prefix(tensors, "encoder.")
    check_tensors(weights, dict(encoder.named_parameters()), folder / WEIGHTS)
    encoder.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return PretrainedModel(
        encoder,
        select_and_strip_prefix(tensors, "head."),
        pooling,
        folder,
        seed_offset,
    )


def select_and_strip_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names start with a prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def build_task_model(
    pretrained: PretrainedModel, num_labels: int, pooling: Pooling | None = None, *, seed: int
) -> TaskModel:
    """A model to fine-tune, with a randomly initialised output layer.

    As in `transformers`, a modern head keeps the loaded head's dense layer and norm, and its pooling unless given.
    """
    torch.manual_seed(seed + pretrained.seed_offset)
    model = TaskModel(pretrained.encoder, num_labels, pooling or pretrained.pooling)
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

    def __post_init__(self) -> None:
        check_range(self, "length", at_least=1)
        if bool(self.task.labels) != (self.task.kind != "regression"):
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


def save_finetuned_model(model: TaskModel, task: Task, length: int, folder: Path, tokenizer: Path) -> None:
    """Write a fine-tuned model into a folder, with the tokenizer's files from another folder."""
    write_tensors(folder / WEIGHTS, {name: tensor.detach() for name, tensor in model.named_parameters()})
    config = FinetunedConfig(encoder=model.encoder.config, task=task, length=length, pooling=model.pooling)
    write_json(folder / CONFIG, asdict(config))
    trained_length = read_trained_length(tokenizer)
    copy_tokenizer_files(tokenizer, folder, trained_length and max(trained_length, length))


def load_finetuned_model(folder: Path) -> tuple[TaskModel, FinetunedConfig]:
    """Load a fine-tuned model and its configuration."""
    config = read_finetuned_config(folder)
    with torch.device("meta"):
        model = TaskModel(Encoder(config.encoder), config.task.num_labels, config.pooling)
    weights = read_tensors(folder / WEIGHTS)
    check_tensors(weights, dict(model.named_parameters()), folder / WEIGHTS)
    model.load_state_dict(weights, assign=True)
    return model.eval(), config
