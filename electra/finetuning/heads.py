"""Task heads, the encoder with one of them, and losses of rows with weights of classes."""

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError
from electra.finetuning.choice import MAX_CHOICES
from electra.finetuning.crf import CRF
from electra.finetuning.features import IGNORED, NO_LOGIT
from electra.finetuning.frozen import FrozenEncoder
from electra.finetuning.question_answering import MAX_ANSWER, N_BEST
from electra.finetuning.tasks import Task
from electra.model.config import EmbeddingPooling, EncoderConfig, Pooling
from electra.model.encoder import Encoder, create_linear, create_norm
from electra.runfolder import join_first_names

BALANCED = "balanced"
ClassWeights = Tensor | None  # [classes]; None: all are 1


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

    exported_axes: tuple[str, ...] = ("batch", "length")  # of the inputs of `huggingface_outputs`

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
        self.head: nn.Module
        if is_frozen:
            self.head = ClassicHead(encoder.config, num_labels, encoder.output_width)
        else:
            self.head = HEADS[encoder.config.style](encoder.config, num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, num_labels]; the targets are for models whose output depends on them."""
        outputs = self.huggingface_outputs(input_ids, attention_mask, segment_ids)
        return self.logits_of_outputs(outputs, attention_mask, segment_ids)

    def huggingface_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Outputs by name of the class in `transformers` that this model is exported as; texts have one window."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return {"logits": self.head(POOL[self.pooling](hidden, attention_mask))}

    @staticmethod
    def logits_of_outputs(outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """What `forward` returns, from these outputs, which may come from an exported model."""
        return outputs["logits"]

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

    def huggingface_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Logits [B, L, num_labels]."""
        return {"logits": self.head(self.encoder(input_ids, attention_mask, segment_ids))}

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

    exported_axes = ("batch", "choices", "length")

    def huggingface_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Logits [B, choices]; rows have equally many."""
        inputs = (tensor.flatten(0, 1) for tensor in (input_ids, attention_mask, segment_ids))
        return {"logits": super().huggingface_outputs(*inputs)["logits"].view(input_ids.shape[:2])}

    @staticmethod
    def logits_of_outputs(outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, MAX_CHOICES] of choices [B, slots, L]; `NO_LOGIT` where a row has fewer."""
        is_missing = ~attention_mask[..., 1]  # [CLS] alone
        logits = outputs["logits"].float().masked_fill(is_missing, NO_LOGIT)  # [B, slots]
        return functional.pad(logits, (0, MAX_CHOICES - logits.shape[1]), value=NO_LOGIT)


class SpanModel(TaskModel):
    """Scores of every token as the first and as the last one of an answer; [CLS] stands for no answer."""

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, 2, pooling)

    def huggingface_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Scores [B, L] of all tokens, also of those that are not in the context."""
        logits = self.head(self.encoder(input_ids, attention_mask, segment_ids))
        return dict(zip(("start_logits", "end_logits"), logits.unbind(-1), strict=True))

    @staticmethod
    def logits_of_outputs(outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, L, 2]; `NO_LOGIT` for tokens that are neither in the context nor [CLS]."""
        logits = torch.stack([outputs["start_logits"], outputs["end_logits"]], -1).float()
        return logits.masked_fill(~is_context_or_cls(attention_mask, segment_ids)[..., None], NO_LOGIT)

    def describe_head_input(self) -> str:
        return "every token"


def is_context_or_cls(attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Tokens [B, L] that an answer may start or end at: segment B without its [SEP], and the first token."""
    is_followed = functional.pad(attention_mask[:, 1:], (0, 1))
    is_context = segment_ids.bool() & is_followed
    return functional.pad(is_context[:, 1:], (1, 0), value=True)


def span_loss(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The mean of the losses of first and last token [B], from logits [B, L, 2]; the joint head returns its losses."""
    if logits.ndim == 2:
        return logits[:, -1]
    start, end = targets.T
    return (cross_entropy(logits[..., 0], start) + cross_entropy(logits[..., 1], end)) / 2


class JointSpanHead(nn.Module):
    """The paper's head (XLNet's): the last token's scores depend on the first token, and a classifier predicts whether
    there is no answer."""

    def __init__(self, width: int, dense_width: int = 512) -> None:
        super().__init__()
        self.start = nn.Linear(width, 1)
        self.end_dense, self.end = nn.Linear(2 * width, dense_width), nn.Linear(dense_width, 1)
        self.null_dense, self.null = nn.Linear(2 * width, dense_width), nn.Linear(dense_width, 1)
        for layer in (self.start, self.end_dense, self.end, self.null_dense, self.null):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def project(self, hidden: Tensor) -> Tensor:
        """States [B, L, D] times their half of the dense layer [B, L, 512]: the same for all first tokens."""
        return functional.linear(hidden, self.end_dense.weight[:, : hidden.shape[-1]])

    def end_logits(self, hidden: Tensor, projected: Tensor, start: Tensor) -> Tensor:
        """Scores [B, L] of each token as the last one of an answer that starts at `start` [B]."""
        first = hidden[torch.arange(len(hidden), device=hidden.device), start]  # [B, D]
        other_half = self.end_dense.weight[:, hidden.shape[-1] :]
        dense = projected + functional.linear(first, other_half, self.end_dense.bias)[:, None]
        return self.end(functional.gelu(dense))[..., 0].float()

    def null_logit(self, hidden: Tensor, start_logits: Tensor) -> Tensor:
        """The logit [B] of having no answer, from [CLS] and the mean of all states, weighted by start probabilities."""
        weights = start_logits.softmax(1).to(hidden.dtype)
        pooled = (weights[..., None] * hidden).sum(1)
        return self.null(functional.gelu(self.null_dense(torch.cat([hidden[:, 0], pooled], 1))))[:, 0].float()


class JointSpanModel(TaskModel):
    """An encoder with the paper's head for question answering."""

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, 1, pooling)
        width = encoder.output_width if isinstance(encoder, FrozenEncoder) else encoder.config.width
        self.head = JointSpanHead(width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """In training the losses [B, 1]. Otherwise the best spans: first and last tokens with their log-probabilities,
        [B, 4 · N_BEST]; then the logit of having no answer and, with targets, the loss: [B, 4 · N_BEST + 2]."""
        head = self.head
        assert isinstance(head, JointSpanHead)
        is_allowed = is_context_or_cls(attention_mask, segment_ids)  # [B, L]
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        starts = head.start(hidden)[..., 0].float().masked_fill(~is_allowed, NO_LOGIT)
        null, projected = head.null_logit(hidden, starts), head.project(hidden)

        def score_ends(start: Tensor) -> Tensor:
            return head.end_logits(hidden, projected, start).masked_fill(~is_allowed, NO_LOGIT)

        losses = torch.zeros_like(null)
        if targets is not None:
            start, end = targets.T
            losses = (cross_entropy(starts, start) + cross_entropy(score_ends(start), end)) / 2
            is_null = (start == 0).float()
            losses = losses + functional.binary_cross_entropy_with_logits(null, is_null, reduction="none") / 2
        if self.training:
            return losses[:, None]
        return torch.cat([*search_spans(starts, score_ends), null[:, None], losses[:, None]], 1)

    def describe_head_input(self) -> str:
        return "every token"


def search_spans(start_logits: Tensor, score_ends: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Beam search: first and last tokens of spans and their log-probabilities, each [B, N_BEST], the best span first.

    The beam holds the `N_BEST` most likely first tokens, for each of which all last tokens are scored."""
    start_scores = start_logits.log_softmax(1)
    top_scores, top_starts = start_scores[:, 1:].topk(min(N_BEST, start_scores.shape[1] - 1), dim=1)  # without [CLS]
    top_starts = top_starts + 1
    positions = torch.arange(start_scores.shape[1], device=start_scores.device)
    end_scores = []
    for start in top_starts.unbind(1):
        more = positions - start[:, None]
        is_span = (more >= 0) & (more < MAX_ANSWER)
        end_scores.append(score_ends(start).log_softmax(1).masked_fill(~is_span, NO_LOGIT))
    scores = (top_scores[..., None] + torch.stack(end_scores, 1)).flatten(1)  # [B, beam · L]
    scores = functional.pad(scores, (0, max(0, N_BEST - scores.shape[1])), value=NO_LOGIT)
    best, indices = scores.topk(N_BEST, dim=1)
    beam = (indices // len(positions)).clamp(max=top_starts.shape[1] - 1)  # of padding: any
    start_log_probabilities = top_scores.gather(1, beam)
    return (
        top_starts.gather(1, beam).float(),
        (indices % len(positions)).float(),
        start_log_probabilities,
        best - start_log_probabilities,
    )


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


# Losses, and weights of classes.


def cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The losses of class ids [B] or [B, L], 0 where these are -100; `weights` multiply those of their class."""
    return functional.cross_entropy(logits, targets, weights, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The mean losses [B] of all classes of multi-hot targets [B, classes]; `weights` multiply those of ones."""
    losses = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
    return losses.mean(1)


def balanced_class_weights(labels: NDArray, num_classes: int) -> NDArray:
    """Weights of classes in inverse proportion to their rows, 1 on average over the rows of `labels` [N]."""
    counts = np.bincount(labels, minlength=num_classes)
    return len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))


def balanced_positive_weights(labels: NDArray, num_classes: int) -> NDArray:
    """For each class of multi-hot `labels` [N, classes]: rows without it, at least one, for each row with it."""
    counts = labels.sum(0)
    return np.maximum(len(labels) - counts, 1) / np.maximum(counts, 1)


def parse_class_weights(words: tuple[str, ...], task: Task) -> list[float]:
    """The weight of each class of a task from words NAME=WEIGHT; classes that are not named have 1."""
    weights = dict.fromkeys(task.labels, 1.0)
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if name not in weights or not weight >= 0 or not math.isfinite(weight):
            names = join_first_names(list(weights), 20)
            allowed = f"{BALANCED}, or CLASS=WEIGHT with a weight of at least 0 for some of the classes {names}"
            raise ConfigError(f"is {word}; it must be {allowed}", field="class_weights")
        weights[name] = weight
    return list(weights.values())
