"""Measures on held-out text: the run's own loss, and measures that are the same for all runs, so that they compare.

Masks and replacements are always the same: they never depend on a run's seed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.model.electra import Electra, Generator, MaskedLanguageModel
from electra.objectives.losses import Loss, Losses, total
from electra.objectives.masking import Masked, mask
from electra.objectives.objectives import (
    OBJECTIVES,
    Corrupted,
    Objective,
    ObjectiveName,
    Settings,
    corrupt,
    draw,
    entropy,
    sample,
)

SEED = 20200310  # of the masks and replacements that are measured on; never a run's own

MEASURED: dict[ObjectiveName, Objective] = OBJECTIVES | {"adversarial": OBJECTIVES["rtd"]}
"""Whose losses are a run's held-out loss: its own objective's, but a policy loss says little, so that of an adversarial
generator its MLM loss is taken, beside the discriminator's weighed loss."""


@dataclass
class Tally:
    """Sums of per-prediction numbers, and how many there were."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, weights: Tensor) -> None:
        """Add numbers, each as often as its weight says."""
        self.sums[name] = self.sums.get(name, 0.0) + (values.float() * weights).sum().item()
        self.counts[name] = self.counts.get(name, 0.0) + weights.sum().item()

    def means(self) -> dict[str, float]:
        return {name: self.sums[name] / max(1.0, self.counts[name]) for name in self.sums}


@dataclass
class Verdicts:
    """A discriminator's logits and the truth, over all tokens that are not padding."""

    logits: list[NDArray] = field(default_factory=list)
    is_replaced: list[NDArray] = field(default_factory=list)

    def add(self, logits: Tensor, corrupted: Corrupted, attention_mask: Tensor | None) -> None:
        """Add a batch's [B, L]."""
        is_token = torch.ones_like(corrupted.is_replaced) if attention_mask is None else attention_mask.bool()
        self.logits.append(logits.float()[is_token].cpu().numpy())
        self.is_replaced.append(corrupted.is_replaced[is_token].cpu().numpy())

    def measures(self, prefix: str) -> dict[str, float]:
        """Loss, accuracy, precision, recall and AUC."""
        logits, truth = np.concatenate(self.logits).astype(np.float64), np.concatenate(self.is_replaced)
        said = logits > 0
        return {
            f"{prefix}_loss": float(np.mean(np.logaddexp(0, np.where(truth, -logits, logits)))),
            f"{prefix}_accuracy": float(np.mean(said == truth)),
            f"{prefix}_precision": float(truth[said].mean()) if said.any() else 0.0,
            f"{prefix}_recall": float(said[truth].mean()) if truth.any() else 0.0,
            f"{prefix}_auc": auc(logits, truth),
        }


def auc(scores: NDArray, is_positive: NDArray) -> float:
    """How often a positive scores above a negative, ties counting half; 0.5 where one of them is missing."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = (np.cumsum(counts) - (counts - 1) / 2)[ranks]
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    if not positives or not negatives:
        return 0.5
    return float((mean_ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@torch.no_grad()
def held_out_loss(name: ObjectiveName, electra: Electra, batches: Iterable[Batch], settings: Settings) -> float:
    """What a run brings down, on held-out batches: all its losses by the run's own settings, weighed as in training."""
    fixed = replace(settings, seed=SEED, detour=None)
    return total(added_up([MEASURED[name].losses(electra, batch, fixed) for batch in batches])).item()


def added_up(batches: list[Losses]) -> Losses:
    """The losses of batches as those of one."""
    together = {}
    for name, first in batches[0].items():
        sums, counts = zip(*((losses[name].sum, losses[name].count) for losses in batches), strict=True)
        together[name] = Loss(torch.stack(sums).sum(), torch.stack(counts).sum(), first.weight)
    return together


@torch.no_grad()
def measure(electra: Electra, batches: Iterable[Batch], unigram: Tensor, vocabulary: Vocabulary) -> dict[str, float]:
    """The measures that compare, of a pair or of the part that is there, over batches; `unigram` [V] adds up to 1."""
    settings = Settings(vocabulary=vocabulary, seed=SEED)
    tally, joint, frozen = Tally(), Verdicts(), Verdicts()
    for batch in batches:
        fills = None if electra.generator is None else measure_generator(electra.generator, batch, settings, tally)
        replacements = frozen_fills(batch, settings, unigram)
        if isinstance(electra.discriminator, MaskedLanguageModel):
            measure_replace_mlm(electra.discriminator, batch, fills or replacements, tally)
        elif electra.discriminator is not None:
            for verdicts, fill in ((joint, fills), (frozen, replacements)):
                if fill is not None:
                    said = electra.discriminator(fill.corrupted.input_ids, **batch.encoder_inputs())
                    verdicts.add(said, fill.corrupted, batch.attention_mask)
    found = tally.means()
    for prefix, verdicts in (("rtd", joint), ("frozen", frozen)):
        found |= verdicts.measures(prefix) if verdicts.logits else {}
    return found


@dataclass(frozen=True)
class Fills:
    """Held-out text with fills, and where they stand."""

    masked: Masked
    corrupted: Corrupted


def measure_generator(generator: Generator, batch: Batch, settings: Settings, tally: Tally) -> Fills:
    """Tally the generator's loss, accuracy, entropy and right samples; returns the text with its samples."""
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    guesses = generator(masked.input_ids, **batch.encoder_inputs(), at=masked.positions).float()  # [B, M, V]
    logs = guesses.log_softmax(2)
    sampled = sample(guesses, masked, batch, settings)
    tally.add("mlm_loss", -logs.gather(2, masked.originals[:, :, None]).squeeze(2), masked.weights)
    tally.add("mlm_accuracy", guesses.argmax(2) == masked.originals, masked.weights)
    tally.add("sample_accuracy", sampled == masked.originals, masked.weights)
    tally.add("generator_entropy", entropy(logs), masked.weights)
    return Fills(masked, corrupt(batch.input_ids, masked, sampled))


def measure_replace_mlm(model: MaskedLanguageModel, batch: Batch, fills: Fills, tally: Tally) -> None:
    """Tally the loss and accuracy of Replace MLM at the masked positions."""
    masked, read = fills.masked, fills.corrupted.input_ids
    hidden = model.read(read, **batch.encoder_inputs(), at=masked.positions)  # [B, M, D]
    logs = model.log_probabilities(hidden, read.gather(1, masked.positions))  # [B, M, V]
    tally.add("replace_mlm_loss", -logs.gather(2, masked.originals[:, :, None]).squeeze(2), masked.weights)
    tally.add("replace_mlm_accuracy", logs.argmax(2) == masked.originals, masked.weights)


def frozen_fills(batch: Batch, settings: Settings, unigram: Tensor) -> Fills:
    """Text with replacements drawn from the unigram distribution: the same whatever generator a run has."""
    settings = replace(settings, seed=settings.seed + 1)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    return Fills(masked, corrupt(batch.input_ids, masked, draw(unigram, masked, batch, settings)))
