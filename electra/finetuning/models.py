"""Task models: the encoder with a head; and losses of rows with weights of classes."""

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError
from electra.finetuning.choice import MAX_CHOICES
from electra.finetuning.features import IGNORED, NO_LOGIT
from electra.finetuning.frozen import FrozenEncoder
from electra.finetuning.question_answering import MAX_ANSWER, N_BEST
from electra.kernels.reference import gather_positions
from electra.model.config import EmbeddingPooling, EncoderConfig, Pooling
from electra.model.encoder import Encoder, create_linear, create_norm

Reduce = Callable[[Tensor, int], Tensor]  # logsumexp or amax over a dimension
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

    head_input = ""  # in words; empty: the pooled states
    in_transformers = True  # whether `transformers` has a class with this head
    exported_axes: tuple[str, ...] = ("batch", "length")  # of the inputs of `exported_outputs`

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
        outputs = self.exported_outputs(input_ids, attention_mask, segment_ids)
        return self.logits_of_outputs(outputs, attention_mask, segment_ids, targets)

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Outputs by name of the exported model, as of its class in `transformers`; texts have one window."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        return {"logits": self.head(POOL[self.pooling](hidden, attention_mask))}

    @staticmethod
    def logits_of_outputs(
        outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """What `forward` returns, from these outputs, which may come from an exported model."""
        return outputs["logits"]

    def describe_head_input(self) -> str:
        return self.head_input or ("the first token" if self.pooling == "cls" else "the mean of all tokens")


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
    """Logits of every token, from the same head for all of them; as in the released code, it has no dropout."""

    head_input = "every token"

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, num_labels, pooling)
        self.head.dropout = nn.Identity()

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Logits [B, L, num_labels]."""
        return {"logits": self.head(self.encoder(input_ids, attention_mask, segment_ids))}


class CRF(nn.Module):
    """A linear-chain conditional random field: the tag of a word depends on the tag before it.

    The score of a path is the sum of its emissions, of a transition between each word and the next, and of the scores
    of its first and last tag. `conditional_logits` and `best_path_logits` have the shape of the emissions, so that loss
    and predictions are those of a model without a CRF. Tokens that are no words are skipped."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(num_labels))
        self.transitions = nn.Parameter(torch.zeros(num_labels, num_labels))  # [tag, next tag]
        self.end = nn.Parameter(torch.zeros(num_labels))

    def conditional_logits(self, emissions: Tensor, tags: Tensor, is_word: Tensor) -> Tensor:
        """Logits [B, L, K] of the tag of each word given `tags` [B, L] before it.

        Their cross-entropies with `tags`, added over the words of a row, are -log p(tags): by the chain rule
        p(tags) = Π p(tag | tags before it)."""
        positions = torch.arange(is_word.shape[1], device=is_word.device)
        latest = torch.where(is_word, positions, -1).cummax(1).values  # position of the latest word
        previous = functional.pad(latest[:, :-1], (1, 0), value=-1)  # of the word before
        previous_tags = tags.gather(1, previous.clamp(min=0))
        one_hot = (previous_tags[..., None] == torch.arange(len(self.start), device=tags.device)).to(emissions.dtype)
        incoming = torch.where(previous[..., None] < 0, self.start, one_hot @ self.transitions.to(emissions.dtype))
        after = backward_messages(emissions, is_word, self.transitions, self.end, torch.logsumexp)
        return emissions + incoming + after


def best_path_logits(emissions: Tensor, is_word: Tensor, start: Tensor, transitions: Tensor, end: Tensor) -> Tensor:
    """The score [B, L, K] of the best path of those with a tag at a word, up to a constant for each row.

    Their argmax is the best path (as found by the Viterbi algorithm)."""
    before = messages(emissions, is_word, start, transitions, torch.amax)
    return before + emissions + backward_messages(emissions, is_word, transitions, end, torch.amax)


def backward_messages(emissions: Tensor, is_word: Tensor, transitions: Tensor, end: Tensor, reduce: Reduce) -> Tensor:
    """For each tag of a word, all (logsumexp) or the best (amax) of the paths after it."""
    return messages(emissions.flip(1), is_word.flip(1), end, transitions.T, reduce).flip(1)


def messages(emissions: Tensor, is_word: Tensor, first: Tensor, transitions: Tensor, reduce: Reduce) -> Tensor:
    """For each tag of a word, all or the best of the paths before it [B, L, K]; `first` [K] where there are none."""
    message = first.expand_as(emissions[:, 0])
    result = []
    for emission, is_present in zip(emissions.unbind(1), is_word.unbind(1), strict=True):
        result.append(message)
        extended = reduce((message + emission)[..., None] + transitions, 1)
        message = torch.where(is_present[:, None], extended, message)
    return torch.stack(result, 1)


class CrfTagModel(TagModel):
    """A CRF over the words, which are the tokens with a target, known or not."""

    head_input = "every token, with a CRF"
    in_transformers = False

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, num_labels, pooling)
        self.head.crf = CRF(num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, num_labels]: given the targets in training, of the best path in evaluation."""
        outputs = self.exported_outputs(input_ids, attention_mask, segment_ids)
        with torch.autocast(input_ids.device.type, enabled=False):
            if not self.training:
                return self.logits_of_outputs(outputs, attention_mask, segment_ids, targets)
            crf, emissions = self.head.crf, outputs["logits"].float()
            assert isinstance(crf, CRF)
            assert targets is not None
            tags = targets[:, : emissions.shape[1]].long()
            return crf.conditional_logits(emissions, tags, tags != IGNORED)

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Emissions [B, L, num_labels], and the scores of the CRF, with which a best path is found."""
        crf = self.head.crf
        assert isinstance(crf, CRF)
        scores = {"start_transitions": crf.start, "transitions": crf.transitions, "end_transitions": crf.end}
        detached = {name: score.detach() for name, score in scores.items()}
        return super().exported_outputs(input_ids, attention_mask, segment_ids) | detached

    @staticmethod
    def logits_of_outputs(
        outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Scores of best paths, whose words are the tokens with a target."""
        assert targets is not None
        emissions = outputs["logits"].float()
        scores = (outputs[name].float() for name in ("start_transitions", "transitions", "end_transitions"))
        return best_path_logits(emissions, targets[:, : emissions.shape[1]] != IGNORED, *scores)


class ChoiceModel(TaskModel):
    """A score for each choice of a row, from the same head for all of them."""

    exported_axes = ("batch", "choices", "length")

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Logits [B, choices]; rows have equally many."""
        inputs = (tensor.flatten(0, 1) for tensor in (input_ids, attention_mask, segment_ids))
        return {"logits": super().exported_outputs(*inputs)["logits"].view(input_ids.shape[:2])}

    @staticmethod
    def logits_of_outputs(
        outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, MAX_CHOICES] of choices [B, slots, L]; `NO_LOGIT` where a row has fewer."""
        is_missing = ~attention_mask[..., 1]  # [CLS] alone
        logits = outputs["logits"].float().masked_fill(is_missing, NO_LOGIT)  # [B, slots]
        return functional.pad(logits, (0, MAX_CHOICES - logits.shape[1]), value=NO_LOGIT)


class SpanModel(TaskModel):
    """Scores of every token as the first and as the last one of an answer; [CLS] stands for no answer."""

    head_input = "every token"

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, 2, pooling)

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Scores [B, L] of all tokens, also of those that are not in the context."""
        logits = self.head(self.encoder(input_ids, attention_mask, segment_ids))
        return dict(zip(("start_logits", "end_logits"), logits.unbind(-1), strict=True))

    @staticmethod
    def logits_of_outputs(
        outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, 2]; `NO_LOGIT` for tokens that are neither in the context nor [CLS]."""
        logits = torch.stack([outputs["start_logits"], outputs["end_logits"]], -1).float()
        return logits.masked_fill(~is_context_or_cls(attention_mask, segment_ids)[..., None], NO_LOGIT)


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

    def start_logits(self, hidden: Tensor) -> Tensor:
        """Scores [B, L] of each token as the first one of an answer."""
        return self.start(hidden)[..., 0].float()

    def project(self, hidden: Tensor) -> Tensor:
        """States [B, L, D] times their half of the dense layer [B, L, 512]: the same for all first tokens."""
        return functional.linear(hidden, self.end_dense.weight[:, : hidden.shape[-1]])

    def end_logits(self, hidden: Tensor, projected: Tensor, start: Tensor) -> Tensor:
        """Scores [B, L] of each token as the last one of an answer that starts at `start` [B]."""
        first = gather_positions(hidden, start[:, None])[:, 0]  # [B, D]
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

    head: JointSpanHead
    head_input = "every token"
    in_transformers = False

    def __init__(self, encoder: Encoder, num_labels: int, pooling: Pooling = "cls") -> None:
        super().__init__(encoder, 1, pooling)
        self.head = JointSpanHead(encoder.output_width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """In training the losses [B, 1]. Otherwise the best spans and the logit of having no answer (see
        `logits_of_outputs`), and with targets the loss: [B, 4 · N_BEST + 2]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        is_allowed = is_context_or_cls(attention_mask, segment_ids)  # [B, L]
        losses = hidden.new_zeros(len(hidden), dtype=torch.float32)
        if targets is not None:
            losses = self.compute_losses(hidden, is_allowed, targets)
        if self.training:
            return losses[:, None]
        logits = self.logits_of_outputs(self.head_outputs(hidden, is_allowed), attention_mask, segment_ids)
        return torch.cat([logits, losses[:, None]], 1)

    def compute_losses(self, hidden: Tensor, is_allowed: Tensor, targets: Tensor) -> Tensor:
        """The losses [B] of first token, last token given the first, and answerability."""
        start, end = targets.T
        starts = self.head.start_logits(hidden).masked_fill(~is_allowed, NO_LOGIT)
        ends = self.head.end_logits(hidden, self.head.project(hidden), start).masked_fill(~is_allowed, NO_LOGIT)
        losses = (cross_entropy(starts, start) + cross_entropy(ends, end)) / 2
        null, is_null = self.head.null_logit(hidden, starts), (start == 0).float()
        return losses + functional.binary_cross_entropy_with_logits(null, is_null, reduction="none") / 2

    def exported_outputs(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        """Scores of all tokens as the first one of an answer [B, L]; as the last one, for each first token of the beam
        [B, L, N_BEST]; and the logit of having no answer [B]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)
        return self.head_outputs(hidden, is_context_or_cls(attention_mask, segment_ids))

    def head_outputs(self, hidden: Tensor, is_allowed: Tensor) -> dict[str, Tensor]:
        starts, projected = self.head.start_logits(hidden), self.head.project(hidden)
        beam = choose_beam(starts, is_allowed).unbind(1)
        return {
            "start_logits": starts,
            "end_logits": torch.stack([self.head.end_logits(hidden, projected, start) for start in beam], -1),
            "null_logit": self.head.null_logit(hidden, starts.masked_fill(~is_allowed, NO_LOGIT)),
        }

    @staticmethod
    def logits_of_outputs(
        outputs: dict[str, Tensor], attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """The best spans, first and last tokens with their log-probabilities, and the logit of having no answer:
        [B, 4 · N_BEST + 1]."""
        is_allowed = is_context_or_cls(attention_mask, segment_ids)
        starts = outputs["start_logits"].masked_fill(~is_allowed, NO_LOGIT)
        ends = outputs["end_logits"].masked_fill(~is_allowed[..., None], NO_LOGIT)
        spans = search_spans(starts, choose_beam(outputs["start_logits"], is_allowed), ends)
        return torch.cat([*spans, outputs["null_logit"][:, None]], 1)


def choose_beam(start_logits: Tensor, is_allowed: Tensor) -> Tensor:
    """The `N_BEST` most likely first tokens [B, N_BEST] without [CLS], in the order of the text.

    Of a row with fewer tokens that are allowed, others complete the beam: the first of them, in any runtime."""
    positions = torch.arange(1, start_logits.shape[1] + N_BEST, device=start_logits.device)
    logits = functional.pad(start_logits[:, 1:], (0, N_BEST))
    ranked = logits.where(functional.pad(is_allowed[:, 1:], (0, N_BEST)), NO_LOGIT * positions)
    return (ranked.topk(N_BEST, dim=1).indices + 1).clamp(max=start_logits.shape[1] - 1).sort(1).values


def search_spans(start_logits: Tensor, beam: Tensor, end_logits: Tensor) -> tuple[Tensor, ...]:
    """Beam search: first and last tokens of spans and their log-probabilities, each [B, N_BEST], the best span first.

    `end_logits` [B, L, N_BEST] are the scores of all last tokens for each first token of the `beam` [B, N_BEST]."""
    start_scores = start_logits.log_softmax(1).gather(1, beam)
    length = start_logits.shape[1]
    more = torch.arange(length, device=beam.device)[:, None] - beam[:, None]  # [B, L, N_BEST]
    is_span = (more >= 0) & (more < MAX_ANSWER) & (beam[:, None] > 0)
    end_scores = end_logits.log_softmax(1).masked_fill(~is_span, NO_LOGIT)
    best, indices = (start_scores[:, None] + end_scores).flatten(1).topk(N_BEST, dim=1)
    chosen = indices % beam.shape[1]
    start_log_probabilities = start_scores.gather(1, chosen)
    return (
        beam.gather(1, chosen).float(),
        (indices // beam.shape[1]).float(),
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


# Losses.


def cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The losses of class ids [B] or [B, L], 0 where these are -100; `weights` multiply those of their class."""
    return functional.cross_entropy(logits, targets, weights, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The mean losses [B] of all classes of multi-hot targets [B, classes]; `weights` multiply those of ones."""
    losses = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
    return losses.mean(1)
