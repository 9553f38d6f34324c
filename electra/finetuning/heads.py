"""Task heads, and the encoder with one of them."""

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError
from electra.finetuning.choice import MAX_CHOICES
from electra.finetuning.crf import CRF
from electra.finetuning.features import IGNORED, NO_LOGIT
from electra.finetuning.frozen import FrozenEncoder
from electra.model.config import EmbeddingPooling, EncoderConfig, Pooling
from electra.model.encoder import Encoder, create_linear, create_norm


class ClassicHead(nn.Linear):
    """The paper's task head: dropout and one linear layer, without a pooler."""

    def __init__(self, config: EncoderConfig, num_labels: int, width: int | None = None) -> None:
        super().__init__(width or config.width, num_labels)
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
        is_frozen = isinstance(encoder, FrozenEncoder)
        if pooling != "cls" and not encoder.config.is_modern() and not is_frozen:
            raise ConfigError(
                f"pooling is {pooling}, but classic encoders support only cls; use a modern encoder or --frozen"
            )
        self.encoder, self.pooling = encoder, pooling
        if is_frozen:
            self.head = ClassicHead(encoder.config, num_labels, encoder.output_width)
        else:
            self.head = HEADS[encoder.config.style](encoder.config, num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, num_labels]; the targets are for models whose output depends on them."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return self.head(POOL[self.pooling](hidden, attention_mask))

    def describe_head_input(self) -> str:
        return "the first token" if self.pooling == "cls" else "the mean of all tokens"


class WindowModel(TaskModel):
    """A task head on the mean of the pooled states of the windows of a text."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, num_labels] of windows [B, slots, L]."""
        hidden = self.encoder(*(tensor.flatten(0, 1) for tensor in (input_ids, attention_mask, segment_ids)))
        pooled = POOL[self.pooling](hidden, attention_mask.flatten(0, 1)).unflatten(0, input_ids.shape[:2])
        return self.head(mean_pool(pooled, attention_mask[..., 1]))  # a missing window is [CLS] alone


class TagModel(TaskModel):
    """Logits of every token, from the same head for all of them."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, num_labels]."""
        return self.head(self.encoder(input_ids, attention_mask, segment_ids))

    def describe_head_input(self) -> str:
        return "every token"


class CrfTagModel(TagModel):
    """A CRF over the words, which are the tokens with a target, known or not."""

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, num_labels, pooling)
        self.head.crf = CRF(num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, num_labels]: given the targets in training, of the best path in evaluation."""
        emissions = super().forward(input_ids, attention_mask, segment_ids).float()
        crf = self.head.crf
        assert isinstance(crf, CRF)
        assert targets is not None
        tags = targets[:, : emissions.shape[1]].long()
        with torch.autocast(emissions.device.type, enabled=False):
            if self.training:
                return crf.conditional_logits(emissions, tags, tags != IGNORED)
            return crf.best_path_logits(emissions, tags != IGNORED)

    def describe_head_input(self) -> str:
        return "every token, with a CRF"


class ChoiceModel(TaskModel):
    """A score for each choice of a row, from the same head for all of them."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, MAX_CHOICES] of choices [B, slots, L]; `NO_LOGIT` where a row has fewer."""
        scores = super().forward(*(tensor.flatten(0, 1) for tensor in (input_ids, attention_mask, segment_ids)))
        is_missing = ~attention_mask[..., 1]  # [CLS] alone
        logits = scores.float().view_as(is_missing).masked_fill(is_missing, NO_LOGIT)  # [B, slots]
        return functional.pad(logits, (0, MAX_CHOICES - logits.shape[1]), value=NO_LOGIT)


def max_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The maximum [B, D] of the states [B, L, D] of all tokens but padding."""
    return hidden.masked_fill(~attention_mask[..., None], -math.inf).amax(1)


def mean_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean [B, D] of the states [B, L, D] of all tokens but padding."""
    total = (hidden * attention_mask[..., None]).sum(1, dtype=torch.float32)
    return (total / attention_mask.sum(1, keepdim=True)).to(hidden.dtype)


POOL: dict[EmbeddingPooling, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden, attention_mask: hidden[:, 0],
    "mean": mean_pool,
    "max": max_pool,
}
"""Functions of states [B, L, D] and attention mask [B, L] to pooled states [B, D]."""
