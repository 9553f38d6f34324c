"""A discriminator on held-out text: where it finds replaced tokens, how well its probabilities are calibrated, and
whether its layers add to the residual stream or replace it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.loader import Batch, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards
from electra.data.tokenizer import read_trained_length
from electra.model.electra import Electra
from electra.model.encoder import ClassicLayer, Encoder
from electra.objectives.config import MaskingConfig
from electra.objectives.evaluation import SEED, mask_and_corrupt, roc_auc
from electra.objectives.masking import maskable_tokens
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.config import read_phase_settings
from electra.pretraining.held_out import HELD_OUT_LENGTH
from electra.pretraining.token_counts import unigram_frequencies
from electra.studies.config import AnalyzeConfig

ROWS_PER_BATCH = 32
POSITION_BINS, CALIBRATION_BINS = 16, 10
RANK_EDGES = (1, 11, 101, 1_001, 10_001, 2**62)  # of tokens by frequency


@dataclass(frozen=True)
class Detections:
    """The discriminator's probabilities for tokens of corrupted held-out text, special tokens excluded."""

    probability: NDArray  # [N] of being replaced
    is_replaced: NDArray  # [N] bool
    position: NDArray  # [N]
    rank: NDArray  # [N] of the token in the corrupted text, by frequency; the most frequent has 1

    def auc(self) -> float:
        return roc_auc(self.probability, self.is_replaced)


@dataclass(frozen=True)
class DetectionBin:
    """How well replaced tokens are found among some of the tokens."""

    first: int
    last: int
    tokens: int
    replaced: int
    recall: float | None  # of replaced tokens; None without any
    false_positives: float | None  # among original tokens
    auc: float | None


@dataclass(frozen=True)
class CalibrationBin:
    """Tokens with a probability in one interval."""

    probability: float  # mean
    replaced: float  # fraction that was replaced
    tokens: int


def batches_as_in_training(electra: Electra, shards: Shards, folder: Path, rows: int) -> Iterator[Batch]:
    """About `rows` held-out rows, of the length and packing that the model in `folder` was trained on."""
    discriminator = electra.require_discriminator()
    length = min(HELD_OUT_LENGTH, read_trained_length(folder) or discriminator.encoder.config.positions)
    packing = read_phase_settings(folder).get("packing", "packed")
    loader = LoaderConfig(length=length, batch_size=min(ROWS_PER_BATCH, rows), packing=packing)
    device = next(discriminator.parameters()).device
    return validation_batches(shards, loader, max_batches=max(1, rows // loader.batch_size), device=device)


@torch.no_grad()
def detect_in_held_out_text(electra: Electra, shards: Shards, folder: Path, config: AnalyzeConfig) -> Detections:
    """Corrupt held-out rows by the model's generator, or by token frequencies, and apply the discriminator.

    As many tokens are masked as in the training of the run, because probabilities are calibrated to that."""
    discriminator = electra.require_discriminator()
    device = next(discriminator.parameters()).device
    frequencies = unigram_frequencies(shards, device)
    context = ObjectiveContext(
        vocabulary=shards.tokenizer.vocabulary,
        masking=MaskingConfig(
            mask_fraction=read_phase_settings(folder).get("mask_fraction", MaskingConfig.mask_fraction)
        ),
        seed=SEED,
        frequencies=frequencies if electra.generator is None else None,
    )
    ranks = torch.empty_like(frequencies, dtype=torch.long)
    ranks[frequencies.argsort(descending=True)] = torch.arange(1, len(ranks) + 1, device=device)
    columns: list[list[Tensor]] = []
    for batch in batches_as_in_training(electra, shards, folder, config.rows):
        corrupted = mask_and_corrupt(electra, batch, context).corrupted
        probabilities = discriminator(corrupted.input_ids, **batch.encoder_inputs()).float().sigmoid()  # [B, L]
        positions = torch.arange(batch.input_ids.shape[1], device=device).expand_as(batch.input_ids)
        is_text = maskable_tokens(batch, shards.tokenizer.vocabulary)
        values = (probabilities, corrupted.is_replaced, positions, ranks[corrupted.input_ids])
        columns.append([value[is_text].cpu() for value in values])
    return Detections(*(torch.cat(column).numpy() for column in zip(*columns, strict=True)))


def detection_bin(detections: Detections, is_inside: NDArray, first: int, last: int) -> DetectionBin:
    probability, is_replaced = detections.probability[is_inside], detections.is_replaced[is_inside]
    found = probability > 0.5
    has_both = bool(is_replaced.any() and not is_replaced.all())
    return DetectionBin(
        first=first,
        last=last,
        tokens=len(found),
        replaced=int(is_replaced.sum()),
        recall=float(found[is_replaced].mean()) if is_replaced.any() else None,
        false_positives=float(found[~is_replaced].mean()) if not is_replaced.all() else None,
        auc=roc_auc(probability, is_replaced) if has_both else None,
    )


def bins_by_position(detections: Detections) -> list[DetectionBin]:
    """Detection in equal parts of the row."""
    length = int(detections.position.max()) + 1
    edges = np.unique(np.linspace(0, length, min(POSITION_BINS, length) + 1).astype(int)).tolist()
    bins = []
    for start, end in pairwise(edges):
        is_inside = (detections.position >= start) & (detections.position < end)
        if is_inside.any():
            bins.append(detection_bin(detections, is_inside, start, end - 1))
    return bins


def bins_by_frequency(detections: Detections) -> list[DetectionBin]:
    """Detection of tokens by the rank of their frequency, in decades."""
    bins = []
    for start, end in pairwise(RANK_EDGES):
        is_inside = (detections.rank >= start) & (detections.rank < end)
        if is_inside.any():
            bins.append(detection_bin(detections, is_inside, start, int(detections.rank[is_inside].max())))
    return bins


def calibration_bins(detections: Detections) -> list[CalibrationBin]:
    """Tokens by intervals of their probability."""
    index = np.minimum((detections.probability * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    bins = []
    for is_inside in (index == each for each in np.unique(index)):
        probability, is_replaced = detections.probability[is_inside], detections.is_replaced[is_inside]
        bins.append(CalibrationBin(float(probability.mean()), float(is_replaced.mean()), len(probability)))
    return bins


def expected_calibration_error(detections: Detections) -> float:
    """The mean over tokens of |probability − fraction replaced| in the interval of their probability."""
    bins = calibration_bins(detections)
    return sum(each.tokens * abs(each.probability - each.replaced) for each in bins) / sum(each.tokens for each in bins)


@dataclass(frozen=True)
class LayerRatios:
    """The norm of each sublayer's output divided by that of the residual that it is added to, means over tokens."""

    layer: int  # from 1
    attention: float
    feedforward: float


@torch.no_grad()
def residual_ratios(encoder: Encoder, batches: Iterable[Batch]) -> list[LayerRatios]:
    """The ratios of each layer on the tokens of `batches`; the encoder must be in fp32, whose layers are not fused."""
    norms: dict[str, Tensor] = {}  # [B, L] of the residual, by branch
    ratios: dict[str, list[Tensor]] = defaultdict(list)  # [tokens] of each batch, by branch
    is_token = torch.empty(0)  # [B, L] of the batch

    def residual_hook(branch: str) -> Callable[..., None]:
        return lambda module, inputs: norms.update({branch: inputs[0].norm(dim=-1)})

    def branch_hook(branch: str) -> Callable[..., None]:
        return lambda module, inputs, output: ratios[branch].append((output.norm(dim=-1) / norms[branch])[is_token])

    hooks = []
    for number, layer in enumerate(encoder.layers, 1):
        for name in ("attention", "feedforward"):
            branch = layer.get_submodule(name)
            # post-norm: the branch reads the residual itself; pre-norm: its norm does
            reader = branch if isinstance(layer, ClassicLayer) else layer.get_submodule(f"{name}_norm")
            hooks.append(reader.register_forward_pre_hook(residual_hook(f"{number}.{name}")))
            hooks.append(branch.register_forward_hook(branch_hook(f"{number}.{name}")))
    try:
        for batch in batches:
            mask = batch.attention_mask
            is_token = torch.ones_like(batch.input_ids, dtype=torch.bool) if mask is None else mask.bool()
            encoder(batch.input_ids, **batch.encoder_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return [
        LayerRatios(
            number, *(torch.cat(ratios[f"{number}.{name}"]).mean().item() for name in ("attention", "feedforward"))
        )
        for number in range(1, len(encoder.layers) + 1)
    ]
