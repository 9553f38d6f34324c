"""A fine-tuned model: the discriminator's encoder under a new head, and the folder it lives in.

config.json says what the encoder and the task are and how long rows may be, model.safetensors holds the weights,
tokenizer files lie beside.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError, DataError
from electra.finetune.labels import Kind
from electra.finetune.tasks import Task
from electra.model.config import EncoderConfig
from electra.model.encoder import Encoder, linear, norm
from electra.model.huggingface import folded, part_of, read_huggingface
from electra.model.storage import (
    CONFIG,
    WEIGHTS,
    check_tensors,
    copy_tokenizer,
    load_model,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from electra.training.checkpoint import model_folder


class ClassicHead(nn.Linear):
    """The paper's: dropout, one linear layer (no pooler)."""

    def __init__(self, config: EncoderConfig, outputs: int) -> None:
        super().__init__(config.width, outputs)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, state: Tensor) -> Tensor:
        """Logits [B, outputs] of a state [B, D]."""
        return super().forward(self.dropout(state))


class ModernHead(ClassicHead):
    """ModernBERT's: one more layer before it, so that the model can leave as ModernBertForSequenceClassification."""

    def __init__(self, config: EncoderConfig, outputs: int) -> None:
        super().__init__(config, outputs)
        self.dense = linear(config, config.width, config.width)
        self.norm = norm(config, config.width)
        nn.init.trunc_normal_(self.dense.weight, std=config.initial_std)

    def forward(self, state: Tensor) -> Tensor:
        return super().forward(self.norm(functional.gelu(self.dense(state))))


HEADS = {"classic": ClassicHead, "modern": ModernHead}


class FineTuned(nn.Module):
    """Says something of a text or a pair, from the first token's state."""

    def __init__(self, encoder: Encoder, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = HEADS[encoder.config.style](encoder.config, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, outputs]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return self.head(hidden[:, 0])


@dataclass(frozen=True)
class Reading:
    """How one kind of task is learnt and answered."""

    loss: Callable[[Tensor, Tensor], Tensor]  # logits [B, outputs] and labels of as many rows → losses [B]
    answer: Callable[[NDArray, Task], NDArray]  # logits [N, outputs] → predictions, as `Examples.labels` has them
    certainty: Callable[[NDArray], NDArray]  # logits [N, outputs] → probabilities, or scores as they are


def softmax(logits: NDArray) -> NDArray:
    """Probabilities of classes that exclude each other."""
    return torch.from_numpy(logits).softmax(1).numpy()


def sigmoid(logits: NDArray) -> NDArray:
    """Probabilities of classes that do not."""
    return torch.from_numpy(logits).sigmoid().numpy()


READINGS: dict[Kind, Reading] = {
    "classification": Reading(
        loss=lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none"),
        answer=lambda logits, task: logits.argmax(1),
        certainty=softmax,
    ),
    "multi-label": Reading(
        loss=lambda logits, labels: functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(
            1
        ),
        answer=lambda logits, task: (logits > 0).astype(np.float32),
        certainty=sigmoid,
    ),
    "regression": Reading(
        loss=lambda logits, labels: (logits[:, 0] - labels).square(),
        answer=lambda logits, task: task.unscaled(logits[:, 0]),
        certainty=lambda logits: logits,
    ),
}


def load_encoder(path: Path, dropout: float | None = None) -> tuple[Encoder, Path]:
    """The encoder of a run, a model folder, a fine-tuned model or a Hugging Face folder, and where it was found."""
    folder = model_folder(path)
    config, weights = read_encoder(folder)
    if dropout is not None:
        config = replace(config, dropout=dropout, attention_dropout=dropout)
    with torch.device("meta"):  # no weights yet: the stored ones are put in their place
        encoder = Encoder(config)
    check_tensors(weights, dict(encoder.named_parameters()), folder / WEIGHTS)
    encoder.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return encoder, folder


def read_encoder(folder: Path) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """The size and the weights of the encoder that is fine-tuned: the discriminator's, or a lone generator's."""
    settings = read_json(folder / CONFIG)
    if "task" in settings:
        config, tensors = encoder_config(settings, folder), read_tensors(folder / WEIGHTS)
    elif "model_type" in settings:
        arrival = read_huggingface(folder)
        config, tensors = arrival.config, arrival.tensors
    else:
        part = part_of(load_model(folder), "encoder")
        config, tensors = part.encoder.config, folded(part.state_dict())
    prefix = "encoder."
    return config, {name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)}


def encoder_config(settings: dict, folder: Path) -> EncoderConfig:
    """The encoder in the config.json of a fine-tuned model."""
    try:
        return EncoderConfig.from_dict(settings.get("encoder"))
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None


def write_finetuned(model: FineTuned, task: Task, length: int, folder: Path, tokenizer: Path) -> None:
    """Write a fine-tuned model's files into a folder, with the length of its rows and another's tokenizer files."""
    write_tensors(folder / WEIGHTS, {name: tensor.detach() for name, tensor in model.named_parameters()})
    write_json(folder / CONFIG, {"encoder": asdict(model.encoder.config), "task": asdict(task), "length": length})
    copy_tokenizer(tokenizer, folder)


def load_finetuned(folder: Path) -> tuple[FineTuned, Task]:
    """Read the folder of a fine-tuned model."""
    settings = read_json(folder / CONFIG)
    if "task" not in settings:
        raise DataError(f"{folder} is not a fine-tuned model; make one with: electra finetune --model {folder} …")
    try:
        task = Task.from_dict(settings["task"])
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None
    with torch.device("meta"):
        model = FineTuned(Encoder(encoder_config(settings, folder)), task.outputs)
    weights = read_tensors(folder / WEIGHTS)
    check_tensors(weights, dict(model.named_parameters()), folder / WEIGHTS)
    model.load_state_dict(weights, assign=True)
    return model.eval(), task
