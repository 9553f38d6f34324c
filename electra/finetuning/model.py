"""A fine-tuned model: the discriminator's encoder under a new head, and the folder it lives in.

config.json says what the encoder and the task are, how long rows may be and what the head reads of them (pooling),
model.safetensors holds the weights, tokenizer files lie beside.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError, DataError
from electra.finetuning.labels import Kind
from electra.finetuning.tasks import Task
from electra.huggingface.convert import Tensors
from electra.huggingface.folders import read_part
from electra.model.config import EncoderConfig, Pooling
from electra.model.encoder import Encoder, linear, norm
from electra.model.storage import CONFIG, WEIGHTS, check_tensors, copy_tokenizer, read_tensors, write_tensors
from electra.runfolder import read_json, write_json
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
        nn.init.trunc_normal_(self.dense.weight, std=config.init_std)

    def forward(self, state: Tensor) -> Tensor:
        return super().forward(self.norm(functional.gelu(self.dense(state))))


HEADS = {"classic": ClassicHead, "modern": ModernHead}


class FineTuned(nn.Module):
    """Says something of a text or a pair, from the first token's state or, modern ones, from the mean of all."""

    def __init__(self, encoder: Encoder, outputs: int, pooling: Pooling = "cls") -> None:
        super().__init__()
        if pooling not in get_args(Pooling):
            raise ConfigError(f"there is no pooling {pooling!r}; choose from {', '.join(get_args(Pooling))}")
        if pooling != "cls" and not encoder.config.is_modern():
            raise ConfigError(
                f"pooling is {pooling}, and the head of a classic encoder reads the first token only; leave out "
                f"--pooling, or fine-tune a modern encoder"
            )
        self.encoder, self.pooling = encoder, pooling
        self.head = HEADS[encoder.config.style](encoder.config, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, outputs]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return self.head(hidden[:, 0] if self.pooling == "cls" else mean_state(hidden, attention_mask))


def mean_state(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean [B, D] of the states [B, L, D] of tokens that are no padding."""
    total = (hidden * attention_mask[..., None]).sum(1, dtype=torch.float32)
    return (total / attention_mask.sum(1, keepdim=True)).to(hidden.dtype)


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


class Pretrained(NamedTuple):
    """What a fine-tuning starts from."""

    encoder: Encoder
    head: Tensors  # of the model that was read, where it had one
    pooling: Pooling  # what that head read
    folder: Path
    salt: int  # of what is drawn anew: other than before where one task follows another


def load_pretrained(path: Path, dropout: float | None = None) -> Pretrained:
    """What a run, a model folder, a fine-tuned model or a Hugging Face folder has to start a fine-tuning from."""
    folder = model_folder(path)
    settings = read_json(folder / CONFIG)
    is_tuned = "task" in settings
    config, tensors = (
        (encoder_config(settings, folder), read_tensors(folder / WEIGHTS)) if is_tuned else read_part(folder)
    )
    if dropout is not None:
        config = replace(config, dropout=dropout, attention_dropout=dropout)
    with torch.device("meta"):  # no weights yet: the stored ones are put in their place
        encoder = Encoder(config)
    weights, head = (without_prefix(tensors, prefix) for prefix in ("encoder.", "head."))
    check_tensors(weights, dict(encoder.named_parameters()), folder / WEIGHTS)
    encoder.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    pooling: Any = settings.get("pooling" if is_tuned else "classifier_pooling") or "cls"
    return Pretrained(encoder, head, pooling, folder, crc32((folder / CONFIG).read_bytes()) if is_tuned else 0)


def without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """Those whose names start so, without it."""
    return {name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)}


def new_model(start: Pretrained, outputs: int, pooling: Pooling | None = None, *, seed: int) -> FineTuned:
    """A model to be fine-tuned. Its head is drawn by the seed, but for what a modern one has before its last layer.

    That goes on from the head that was read, and reads what that one did unless told otherwise: `transformers` takes
    both over in the same way. A head of another task is not drawn again: its classes mean something else.
    """
    torch.manual_seed(seed + start.salt)
    model = FineTuned(start.encoder, outputs, pooling or start.pooling)
    known = dict(model.head.named_parameters())
    with torch.no_grad():
        for name in ("dense.weight", "norm.weight"):
            if name in known and name in start.head:
                known[name].copy_(start.head[name])
    return model


def encoder_config(settings: dict, folder: Path) -> EncoderConfig:
    """The encoder in the config.json of a fine-tuned model."""
    try:
        return EncoderConfig.from_dict(settings.get("encoder"))
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None


def write_finetuned(model: FineTuned, task: Task, length: int, folder: Path, tokenizer: Path) -> None:
    """Write a fine-tuned model's files into a folder, with the length of its rows and another's tokenizer files."""
    write_tensors(folder / WEIGHTS, {name: tensor.detach() for name, tensor in model.named_parameters()})
    settings = {"encoder": asdict(model.encoder.config), "task": asdict(task), "length": length}
    write_json(folder / CONFIG, settings | {"pooling": model.pooling})
    copy_tokenizer(tokenizer, folder)


def load_finetuned(folder: Path) -> tuple[FineTuned, Task]:
    """Read the folder of a fine-tuned model."""
    settings = read_json(folder / CONFIG)
    if "task" not in settings:
        raise DataError(f"{folder} is not a fine-tuned model; make one with: electra finetune --model {folder} …")
    encoder = encoder_config(settings, folder)
    try:
        task = Task.from_dict(settings["task"])
        with torch.device("meta"):
            model = FineTuned(Encoder(encoder), task.outputs, settings.get("pooling", "cls"))
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None
    weights = read_tensors(folder / WEIGHTS)
    check_tensors(weights, dict(model.named_parameters()), folder / WEIGHTS)
    model.load_state_dict(weights, assign=True)
    return model.eval(), task
