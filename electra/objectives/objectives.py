"""The pre-training objectives: one function each, in the steps of the paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.kernels.reference import gather_positions
from electra.model.config import AuxiliaryHead, Head
from electra.model.electra import Electra
from electra.model.heads import TokenPredictions
from electra.objectives.config import CorrectSampleLabel, MaskingConfig, ObjectiveConfig, ObjectiveName
from electra.objectives.losses import Counts, Loss, Losses, sum_token_losses
from electra.objectives.masking import Masked, count_masked, mask
from electra.random import Purpose, sample_from_frequencies


@dataclass(frozen=True, kw_only=True)
class ObjectiveContext:
    """What an objective needs besides models and batch."""

    vocabulary: Vocabulary
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    seed: int = 0  # of masks and samples
    frequencies: Tensor | None = field(default=None, compare=False)  # [V] replacements without a generator follow these

    def mask(self, batch: Batch) -> Masked:
        return mask(batch, self.masking, self.vocabulary, self.seed)


@dataclass(frozen=True)
class Corrupted:
    """The discriminator's input: samples in place of the masked tokens."""

    input_ids: Tensor  # [B, L]
    is_replaced: Tensor  # [B, L] bool; where the sample equals the original, by `correct_sample_label`


def replaced_token_detection(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """Joint training (section 2)."""
    masked = context.mask(batch)
    predictions = predict_masked(electra, masked, batch, context)  # p_G at the masked positions
    sampled = sample(predictions, masked, batch, context)  # [B, M]
    corrupted = corrupt(batch.input_ids, masked, sampled, context.objective.correct_sample_label)
    hidden, losses = detect_replaced(electra, corrupted, batch)
    loss = sum_token_losses(losses, token_weights(batch), context.objective.discriminator_weight)
    auxiliary = auxiliary_losses(electra, hidden, masked, batch, context)
    return generator_losses(predictions, masked) | {"discriminator": loss} | auxiliary


def electra_15(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """ELECTRA 15 % (section 3.5): the discriminator's loss is over the masked positions only."""
    masked = context.mask(batch)
    predictions = predict_masked(electra, masked, batch, context)
    sampled = sample(predictions, masked, batch, context)  # [B, M]
    corrupted = corrupt(batch.input_ids, masked, sampled, context.objective.correct_sample_label)
    hidden, losses = detect_replaced(electra, corrupted, batch)
    at_masked = losses.gather(1, masked.positions)  # [B, M]
    loss = sum_token_losses(at_masked, masked.weights, context.objective.discriminator_weight)
    auxiliary = auxiliary_losses(electra, hidden, masked, batch, context)
    return generator_losses(predictions, masked) | {"discriminator": loss} | auxiliary


def replace_mlm(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """Replace MLM (section 3.5): masked language modelling with generator samples instead of [MASK]."""
    masked = context.mask(batch)
    predictions = predict_masked(electra, masked, batch, context)
    corrupted = corrupt(batch.input_ids, masked, sample(predictions, masked, batch, context))
    model = electra.require_mlm()
    restored = model(corrupted.input_ids, **batch.encoder_inputs(), positions=masked.positions)  # p(original)
    return generator_losses(predictions, masked) | {"replace_mlm": mlm_loss(restored, masked)}


def all_tokens_mlm(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """All-Tokens MLM (section 3.5): Replace MLM that predicts every token, with a copy mechanism."""
    masked = context.mask(batch)
    predictions = predict_masked(electra, masked, batch, context)
    corrupted = corrupt(batch.input_ids, masked, sample(predictions, masked, batch, context))
    model = electra.require_copy_mlm()
    hidden = model.encoder(corrupted.input_ids, **batch.encoder_inputs())  # [B, L, D]
    log_likelihood = model.log_likelihood(hidden, corrupted.input_ids, labels=batch.input_ids)  # [B, L]
    return generator_losses(predictions, masked) | {
        "all_tokens_mlm": sum_token_losses(-log_likelihood, token_weights(batch))
    }


def masked_language_modeling(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """BERT without next-sentence prediction: the generator alone."""
    masked = context.mask(batch)
    return generator_losses(predict_masked(electra, masked, batch, context), masked)


def adversarial(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """Adversarial training (appendix F): REINFORCE, the reward of a sample is the discriminator's loss at its position.

    A baseline b = −log sigmoid(w·h), from the generator's hidden state h without gradient to it, is subtracted from the
    reward.
    """
    config, masked = context.objective, context.mask(batch)
    predictions = electra.require_generator()(masked.input_ids, **batch.encoder_inputs(), positions=masked.positions)
    policy = predictions.sampling_logits(masked.labels, config.temperature, config.disallow_correct)  # [B, M, V]
    sampled = sample(predictions, masked, batch, context)  # [B, M]
    corrupted = corrupt(batch.input_ids, masked, sampled, config.correct_sample_label)
    hidden, losses = detect_replaced(electra, corrupted, batch)
    rewards = losses.detach().gather(1, masked.positions)  # [B, M]
    baseline = electra.require_baseline()(predictions.hidden.detach()).float()  # [B, M] logits
    advantages = rewards - functional.softplus(-baseline).detach()  # R − b
    return {
        "generator": policy_loss(policy, sampled, advantages, masked, config.entropy_bonus),
        "baseline": baseline_loss(baseline, rewards, masked),
        "discriminator": sum_token_losses(losses, token_weights(batch), config.discriminator_weight),
    } | auxiliary_losses(electra, hidden, masked, batch, context)


def frozen_generator_rtd(electra: Electra, batch: Batch, context: ObjectiveContext) -> Losses:
    """Second stage of two-stage training (section 3.2): the generator is not trained; its dropout stays on."""
    masked = context.mask(batch)
    with torch.no_grad():
        predictions = predict_masked(electra, masked, batch, context)
        sampled = sample(predictions, masked, batch, context)
    corrupted = corrupt(batch.input_ids, masked, sampled, context.objective.correct_sample_label)
    hidden, losses = detect_replaced(electra, corrupted, batch)
    loss = sum_token_losses(losses, token_weights(batch), context.objective.discriminator_weight)
    return {"discriminator": loss} | auxiliary_losses(electra, hidden, masked, batch, context)


LossPositions = Literal["masked", "masked_in_first_document", "all"]  # all: all tokens that are not padding

AUXILIARY_POSITIONS: dict[AuxiliaryHead, LossPositions] = {
    "corrective_lm": "masked",
    "bag_of_words": "masked_in_first_document",
}


@dataclass(frozen=True)
class Objective:
    """An objective and the models it needs."""

    losses: Callable[[Electra, Batch, ObjectiveContext], Losses]
    loss_positions: dict[str, LossPositions]  # of the predictions that each loss is over, by its name in `losses`
    head: Head | None  # of the discriminator; None: no discriminator
    needs_generator: bool = False  # uniform or unigram replacements are not possible
    has_baseline: bool = False
    is_generator_frozen: bool = False  # it must be trained already

    def count_predictions(self, batch: Batch, context: ObjectiveContext) -> Counts:
        """The number of predictions of each loss, before the losses are computed."""
        all_positions = dict(self.loss_positions)
        if self.head == "rtd":
            all_positions |= {head: AUXILIARY_POSITIONS[head] for head in context.objective.auxiliary_heads()}
        counts: dict[LossPositions, Callable[[], Tensor]] = {
            "masked": lambda: count_masked(batch, context.masking, context.vocabulary, context.seed),
            "masked_in_first_document": lambda: first_document_weights(context.mask(batch), batch).sum(),
            "all": lambda: batch.lengths().sum(),
        }
        return {name: counts[positions]() for name, positions in all_positions.items()}

    @property
    def has_independent_backward(self) -> bool:
        """Whether the backward passes of generator and discriminator are independent, so that they can overlap."""
        return self.head is not None and not self.has_baseline and not self.is_generator_frozen


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "rtd": Objective(replaced_token_detection, {"generator": "masked", "discriminator": "all"}, head="rtd"),
    "electra-15": Objective(electra_15, {"generator": "masked", "discriminator": "masked"}, head="rtd"),
    "replace-mlm": Objective(replace_mlm, {"generator": "masked", "replace_mlm": "masked"}, head="mlm"),
    "all-tokens-mlm": Objective(all_tokens_mlm, {"generator": "masked", "all_tokens_mlm": "all"}, head="copy_mlm"),
    "mlm": Objective(masked_language_modeling, {"generator": "masked"}, head=None, needs_generator=True),
    "adversarial": Objective(
        adversarial,
        {"generator": "masked", "baseline": "masked", "discriminator": "all"},
        head="rtd",
        needs_generator=True,
        has_baseline=True,
    ),
    "frozen-rtd": Objective(
        frozen_generator_rtd, {"discriminator": "all"}, head="rtd", needs_generator=True, is_generator_frozen=True
    ),
}


def predict_masked(
    electra: Electra, masked: Masked, batch: Batch, context: ObjectiveContext
) -> TokenPredictions | None:
    """The generator's predictions at the masked positions; None if replacements are uniform or unigram samples."""
    if context.frequencies is not None:
        return None
    return electra.require_generator()(masked.input_ids, **batch.encoder_inputs(), positions=masked.positions)


def sample(predictions: TokenPredictions | None, masked: Masked, batch: Batch, context: ObjectiveContext) -> Tensor:
    """x̂ ~ p_G, a replacement for each masked token [B, M]."""
    config, keys_for = context.objective, partial(batch.random_keys, context.seed)
    if predictions is None:
        assert context.frequencies is not None
        return sample_from_frequencies(context.frequencies, keys_for(Purpose.SAMPLE_TOKEN), masked.positions.shape[1])
    return predictions.sample(masked.labels, masked.weights, keys_for, config.temperature, config.disallow_correct)


def corrupt(
    input_ids: Tensor, masked: Masked, sampled: Tensor, correct_sample_label: CorrectSampleLabel = "original"
) -> Corrupted:
    """Write `sampled` [B, M] into `input_ids` [B, L] at the masked positions."""
    is_used = masked.weights > 0
    corrupted = input_ids.scatter(1, masked.positions, torch.where(is_used, sampled, masked.labels))
    if correct_sample_label == "replaced":
        return Corrupted(corrupted, torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, masked.positions, is_used))
    return Corrupted(corrupted, is_replaced=corrupted != input_ids)


def detect_replaced(electra: Electra, corrupted: Corrupted, batch: Batch) -> tuple[Tensor, Tensor]:
    """The discriminator's hidden states [B, L, D] and the loss of each token [B, L]."""
    discriminator = electra.require_discriminator()
    hidden = discriminator.encoder(corrupted.input_ids, **batch.encoder_inputs())
    return hidden, rtd_losses(discriminator.head(hidden), corrupted)


def auxiliary_losses(
    electra: Electra, hidden: Tensor, masked: Masked, batch: Batch, context: ObjectiveContext
) -> Losses:
    """The auxiliary losses that have a weight, from the discriminator's `hidden` states [B, L, D]."""
    config, discriminator = context.objective, electra.require_discriminator()
    losses: Losses = {}
    if config.corrective_lm_weight:
        at_masked = gather_positions(hidden, masked.positions)  # [B, M, D]
        restored = discriminator.predict_tokens("corrective_lm", at_masked)
        losses["corrective_lm"] = mlm_loss(restored, masked, config.corrective_lm_weight)
    if config.bag_of_words_weight:
        words = discriminator.predict_tokens("bag_of_words", hidden[:, 0])
        log_likelihood = words.logits.float().log_softmax(1).gather(1, masked.labels)  # [B, M]
        weights = first_document_weights(masked, batch)
        losses["bag_of_words"] = sum_token_losses(-log_likelihood, weights, config.bag_of_words_weight)
    return losses


def first_document_weights(masked: Masked, batch: Batch) -> Tensor:
    """[B, M] the weights of masked positions in the first document of each row, the only one that [CLS] attends to."""
    if batch.document_ids is None:
        return masked.weights
    is_first = batch.document_ids.gather(1, masked.positions) == batch.document_ids[:, :1]
    return masked.weights * is_first


def generator_losses(predictions: TokenPredictions | None, masked: Masked) -> Losses:
    """L_MLM of the generator, if there is one."""
    return {} if predictions is None else {"generator": mlm_loss(predictions, masked)}


def mlm_loss(predictions: TokenPredictions, masked: Masked, weight: float = 1.0) -> Loss:
    """L_MLM: negative log-likelihood of the original tokens."""
    return Loss(predictions.mlm_loss_sum(masked.labels, masked.weights), masked.weights.sum(), weight)


def rtd_losses(logits: Tensor, corrupted: Corrupted) -> Tensor:
    """L_Disc of each token [B, L]: binary cross-entropy."""
    return functional.binary_cross_entropy_with_logits(logits.float(), corrupted.is_replaced.float(), reduction="none")


def token_weights(batch: Batch) -> Tensor:
    """[B, L] 1 at tokens, 0 at padding."""
    return (torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask).float()


def policy_loss(policy: Tensor, sampled: Tensor, advantages: Tensor, masked: Masked, entropy_bonus: float) -> Loss:
    """REINFORCE: −advantage · log p(sample), with logits `policy` [B, M, V]."""
    log_probs = policy.log_softmax(2)
    losses = -advantages * log_probs.gather(2, sampled[:, :, None]).squeeze(2)  # [B, M]
    if entropy_bonus:
        losses = losses - entropy_bonus * entropy(log_probs)
    return sum_token_losses(losses, masked.weights)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy [...] in nats of `log_probs` [..., V], which may contain −∞."""
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == float("-inf"), 0.0)).sum(-1)


def baseline_loss(baseline: Tensor, rewards: Tensor, masked: Masked) -> Loss:
    """Cross-entropy of the baseline's logits [B, M] with the discriminator's probability of the label, exp(−reward)."""
    losses = functional.binary_cross_entropy_with_logits(baseline, (-rewards).exp(), reduction="none")
    return sum_token_losses(losses, masked.weights)
