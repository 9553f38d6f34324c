"""Models of question answering: the heads `simple` and `joint`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.finetuning.features import NO_LOGIT
from electra.finetuning.heads import TaskModel
from electra.finetuning.losses import ClassWeights, cross_entropy
from electra.finetuning.question_answering import MAX_ANSWER, N_BEST
from electra.model.config import EncoderConfig, Pooling
from electra.model.encoder import Encoder


class SpanModel(TaskModel):
    """Scores of every token as the first and as the last one of an answer; [CLS] stands for no answer."""

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, 2, pooling)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, 2]; `NO_LOGIT` for tokens that are neither in the context nor [CLS]."""
        logits = self.head(self.encoder(input_ids, attention_mask, segment_ids)).float()
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

    def __init__(self, config: EncoderConfig, width: int = 512) -> None:
        super().__init__()
        self.start = nn.Linear(config.width, 1)
        self.end_dense, self.end = nn.Linear(2 * config.width, width), nn.Linear(width, 1)
        self.null_dense, self.null = nn.Linear(2 * config.width, width), nn.Linear(width, 1)
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
        self.head = JointSpanHead(encoder.config)

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
