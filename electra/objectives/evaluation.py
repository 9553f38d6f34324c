"""Evaluation on held-out text: the run's own loss, and metrics that are comparable between runs.

Masks and samples do not depend on the run's seed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.model.electra import Electra, Generator, MaskedLanguageModel
from electra.objectives.config import ObjectiveName
from electra.objectives.losses import add_losses_of_batches, total_loss
from electra.objectives.masking import Masked
from electra.objectives.objectives import (
    OBJECTIVES,
    Corrupted,
    Objective,
    ObjectiveContext,
    corrupt,
    entropy,
    predict_masked,
    sample,
    token_weights,
)

SEED = 20200310
PLATEAU = 0.95  # fraction of the unigram loss: above it, little but token frequencies is learnt
TOKEN_LOSSES = {"replace_mlm_loss": "model", "mlm_loss": "generator"}  # of models that predict tokens

Gather = Callable[[list], list]
"""Adds the results of the other ranks' batches to those of this rank's."""

EVALUATION_OBJECTIVES: dict[ObjectiveName, Objective] = OBJECTIVES | {"adversarial": OBJECTIVES["rtd"]}
"""The objective whose losses are the held-out loss; a policy gradient's loss means little, so MLM replaces it."""


@dataclass
class WeightedMeans:
    """Running means by name."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, weights: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + (values.float() * weights).sum().item()
        self.counts[name] = self.counts.get(name, 0.0) + weights.sum().item()

    def merge(self, other: "WeightedMeans") -> None:
        for name in other.sums:
            self.sums[name] = self.sums.get(name, 0.0) + other.sums[name]
            self.counts[name] = self.counts.get(name, 0.0) + other.counts[name]

    def compute(self) -> dict[str, float]:
        return {name: self.sums[name] / max(1.0, self.counts[name]) for name in self.sums}


@dataclass
class DetectionMetrics:
    """Metrics of replaced token detection over all tokens that are not padding."""

    logits: list[NDArray] = field(default_factory=list)
    is_replaced: list[NDArray] = field(default_factory=list)

    def add(self, logits: Tensor, corrupted: Corrupted, batch: Batch) -> None:
        """Add the `logits` [B, L] of a batch."""
        is_included = token_weights(batch).bool()
        self.logits.append(logits.float()[is_included].cpu().numpy())
        self.is_replaced.append(corrupted.is_replaced[is_included].cpu().numpy())

    def merge(self, other: "DetectionMetrics") -> None:
        self.logits += other.logits
        self.is_replaced += other.is_replaced

    def compute(self, prefix: str) -> dict[str, float]:
        if not self.logits:
            return {}
        logits, labels = np.concatenate(self.logits).astype(np.float64), np.concatenate(self.is_replaced)
        predicted = logits > 0
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            losses = np.logaddexp(0, np.where(labels, -logits, logits))
        return {
            f"{prefix}_loss": float(losses.mean()),
            f"{prefix}_accuracy": float(np.mean(predicted == labels)),
            f"{prefix}_precision": float(labels[predicted].mean()) if predicted.any() else 0.0,
            f"{prefix}_recall": float(predicted[labels].mean()) if labels.any() else 0.0,
            f"{prefix}_auc": roc_auc(logits, labels),
        }


@dataclass
class EvaluationMetrics:
    """Metrics of a batch or of several."""

    means: WeightedMeans = field(default_factory=WeightedMeans)
    rtd: DetectionMetrics = field(default_factory=DetectionMetrics)  # of the generator's samples
    unigram_rtd: DetectionMetrics = field(default_factory=DetectionMetrics)


def roc_auc(scores: NDArray, is_positive: NDArray) -> float:
    """Area under the ROC curve; 0.5 if there are no positives or no negatives."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = (np.cumsum(counts) - (counts - 1) / 2)[ranks]  # equal scores share a rank
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    if not positives or not negatives:
        return 0.5
    return float((mean_ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@torch.no_grad()
def held_out_loss(
    electra: Electra, batches: Iterable[Batch], context: ObjectiveContext, gather: Gather = list
) -> float:
    """The run's total loss over held-out batches, with its own masking and weights."""
    context, losses = replace(context, seed=SEED), EVALUATION_OBJECTIVES[context.objective.name].losses
    return total_loss(add_losses_of_batches(gather([losses(electra, batch, context) for batch in batches]))).item()


@torch.no_grad()
def evaluate(
    electra: Electra, batches: Iterable[Batch], unigram: Tensor, vocabulary: Vocabulary, gather: Gather = list
) -> dict[str, float]:
    """Metrics of generator and discriminator, if present; `unigram` [V] are the frequencies of tokens."""
    metrics = EvaluationMetrics()
    context, log_unigram = ObjectiveContext(vocabulary=vocabulary, seed=SEED), smoothed_log_frequencies(unigram)
    for of_batch in gather([evaluate_batch(electra, batch, unigram, log_unigram, context) for batch in batches]):
        metrics.means.merge(of_batch.means)
        metrics.rtd.merge(of_batch.rtd)
        metrics.unigram_rtd.merge(of_batch.unigram_rtd)
    return metrics.means.compute() | metrics.rtd.compute("rtd") | metrics.unigram_rtd.compute("unigram_rtd")


def evaluate_batch(
    electra: Electra, batch: Batch, unigram: Tensor, log_unigram: Tensor, context: ObjectiveContext
) -> EvaluationMetrics:
    """The metrics of one batch; `log_unigram` [V] are smoothed."""
    metrics = EvaluationMetrics()
    means, rtd, unigram_rtd = metrics.means, metrics.rtd, metrics.unigram_rtd
    sampled = (
        None if electra.generator is None else evaluate_generator_and_corrupt(electra.generator, batch, context, means)
    )
    unigram_sampled = corrupt_with_unigram_samples(batch, context, unigram)
    masked = (sampled or unigram_sampled).masked
    means.add("unigram_mlm_loss", -log_unigram[masked.labels], masked.weights)
    if isinstance(electra.discriminator, MaskedLanguageModel):
        evaluate_replace_mlm(electra.discriminator, batch, sampled or unigram_sampled, means)
    elif electra.discriminator is not None:
        for detection, samples in ((rtd, sampled), (unigram_rtd, unigram_sampled)):
            if samples is not None:
                logits = electra.discriminator(samples.corrupted.input_ids, **batch.encoder_inputs())
                detection.add(logits, samples.corrupted, batch)
    return metrics


def smoothed_log_frequencies(frequencies: Tensor) -> Tensor:
    """The log of token frequencies [V], smoothed so that none is zero."""
    return (frequencies + frequencies[frequencies > 0].min() / 10).log()


@dataclass(frozen=True)
class MaskedAndCorrupted:
    """Corrupted text and the masked positions."""

    masked: Masked
    corrupted: Corrupted


def mask_and_corrupt(electra: Electra, batch: Batch, context: ObjectiveContext) -> MaskedAndCorrupted:
    """Text corrupted by samples of the generator, or from `context.frequencies`."""
    masked = context.mask(batch)
    sampled = sample(predict_masked(electra, masked, batch, context), masked, batch, context)
    return MaskedAndCorrupted(masked, corrupt(batch.input_ids, masked, sampled))


def evaluate_generator_and_corrupt(
    generator: Generator, batch: Batch, context: ObjectiveContext, means: WeightedMeans
) -> MaskedAndCorrupted:
    """Add the generator's MLM loss and accuracy, its entropy and the accuracy of its samples; returns the samples."""
    masked = context.mask(batch)
    predictions = generator(masked.input_ids, **batch.encoder_inputs(), positions=masked.positions)
    logits = predictions.logits.float()  # [B, M, V]
    log_probs = logits.log_softmax(2)
    sampled = sample(predictions, masked, batch, context)
    means.add("mlm_loss", -log_probs.gather(2, masked.labels[:, :, None]).squeeze(2), masked.weights)
    means.add("mlm_accuracy", logits.argmax(2) == masked.labels, masked.weights)
    means.add("sample_accuracy", sampled == masked.labels, masked.weights)
    means.add("generator_entropy", entropy(log_probs), masked.weights)
    return MaskedAndCorrupted(masked, corrupt(batch.input_ids, masked, sampled))


def evaluate_replace_mlm(
    model: MaskedLanguageModel, batch: Batch, samples: MaskedAndCorrupted, means: WeightedMeans
) -> None:
    """Add the loss and accuracy at the masked positions of a model that predicts the original tokens."""
    masked, input_ids = samples.masked, samples.corrupted.input_ids
    predictions = model(input_ids, **batch.encoder_inputs(), positions=masked.positions)
    log_probs = model.log_probabilities(predictions, input_ids.gather(1, masked.positions))  # [B, M, V]
    means.add("replace_mlm_loss", -log_probs.gather(2, masked.labels[:, :, None]).squeeze(2), masked.weights)
    means.add("replace_mlm_accuracy", log_probs.argmax(2) == masked.labels, masked.weights)


def corrupt_with_unigram_samples(batch: Batch, context: ObjectiveContext, unigram: Tensor) -> MaskedAndCorrupted:
    """Text corrupted by unigram samples: the same for all runs, whatever their generator."""
    context = replace(context, seed=context.seed + 1, frequencies=unigram)
    masked = context.mask(batch)
    return MaskedAndCorrupted(masked, corrupt(batch.input_ids, masked, sample(None, masked, batch, context)))


def describe_metrics(metrics: dict[str, float]) -> str:
    """The main metrics of an evaluation, each beside its baseline."""
    parts = []
    names = [name for name in TOKEN_LOSSES if name in metrics]
    for name in names:
        label = f"{TOKEN_LOSSES[name]}'s MLM loss" if len(names) > 1 else "MLM loss"
        plateau = ": plateau" if is_on_plateau(metrics, name) else ""
        parts.append(f"{label} {metrics[name]:.2f} (token frequencies {metrics['unigram_mlm_loss']:.2f}{plateau})")
    if "unigram_rtd_auc" in metrics:
        parts.append(f"AUC of random tokens {metrics['unigram_rtd_auc']:.2f} (guessing 0.50)")
    return ", ".join(parts)


def is_on_plateau(metrics: dict[str, float], name: str) -> bool:
    return metrics[name] > PLATEAU * metrics["unigram_mlm_loss"]
