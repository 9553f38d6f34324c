"""`electra corrupt`: held-out rows that one generator corrupted once, on which all runs can be evaluated."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from electra.data.loader import Batch, build_packed_rows, merge_batches, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards, open_shards
from electra.data.tokenizer import TextTokenizer, read_trained_length
from electra.errors import DataError
from electra.model.electra import Discriminator, Electra
from electra.model.storage import (
    load_model,
    load_model_tokenizer,
    open_safetensors,
    read_tensors,
    serialize_tensors,
    tensors_checksum,
    warn_untrained_length,
)
from electra.objectives.evaluation import SEED, DetectionMetrics, mask_and_corrupt
from electra.objectives.objectives import Corrupted, ObjectiveContext
from electra.pretraining.config import CorruptConfig
from electra.pretraining.held_out import HELD_OUT_LENGTH
from electra.runfolder import write_file
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World
from electra.training.hardware import choose_device

CORRUPTED_ROWS_PER_BATCH = 128


@dataclass(frozen=True)
class CorruptedRows:
    """Rows without padding and their corrupted tokens."""

    input_ids: Tensor  # [N, L]
    corrupted_ids: Tensor  # [N, L]
    document_ids: Tensor | None = None  # [N, L] None: the rows are packed
    segment_ids: Tensor | None = None  # [N, L] None: all A

    def evaluate(self, electra: Electra, tokenizer: TextTokenizer, world: World) -> dict[str, float]:
        """Metrics of replaced token detection on all rows; empty without a discriminator for it."""
        if not isinstance(electra.discriminator, Discriminator):
            return {}
        device, metrics, results = world.device, DetectionMetrics(), []
        for start in world.share(range(0, len(self.input_ids), CORRUPTED_ROWS_PER_BATCH)):
            rows_of_batch = slice(start, start + CORRUPTED_ROWS_PER_BATCH)
            original = self.input_ids[rows_of_batch].to(device).long()  # [B, L]
            corrupted = self.corrupted_ids[rows_of_batch].to(device).long()  # [B, L]
            rows = build_packed_rows(original[:, 1:], tokenizer.vocabulary)
            if self.document_ids is not None and self.segment_ids is not None:
                rows["document_ids"] = self.document_ids[rows_of_batch].to(device)
                rows["segment_ids"] = self.segment_ids[rows_of_batch].to(device).long()
            batch = Batch(
                step=torch.zeros((), device=device), row_ids=torch.arange(len(original), device=device), **rows
            )
            logits = electra.discriminator(corrupted, **batch.encoder_inputs())  # [B, L]
            results.append(DetectionMetrics())
            results[-1].add(logits, Corrupted(corrupted, is_replaced=corrupted != original), batch)
        for result in world.gather(results):
            metrics.merge(result)
        return metrics.compute("fixed_rtd")


@dataclass(frozen=True)
class CorruptResult:
    """The file that was written, and how well the run's own discriminator does on it."""

    output: Path
    rows: int
    length: int
    replaced_fraction: float
    metrics: dict[str, float]  # empty without a discriminator

    def __str__(self) -> str:
        text = (
            f"{self.output}: {self.rows:,} rows of {self.length} tokens, of which {self.replaced_fraction:.1%} replaced"
        )
        scores = ", ".join(
            f"{name} {self.metrics[name]:.4f}" for name in ("fixed_rtd_loss", "fixed_rtd_auc") if self.metrics
        )
        return text + (f"\nthe model's own discriminator: {scores}" if scores else "")


@torch.no_grad()
def write_corrupted_rows(config: CorruptConfig) -> CorruptResult:
    """Replace 15 % of the tokens of held-out rows by samples of a model's generator, and write the samples."""
    shards, folder, device = open_shards(config.data), find_model_folder(config.model), choose_device(config.device)
    electra = load_model(folder).float().to(device).eval()
    if electra.generator is None:
        raise DataError(f"{config.model} has no generator; give a run of --objective rtd")
    shards.check_same_tokenizer(load_model_tokenizer(folder))
    positions = electra.generator.encoder.config.positions
    default_length = min(HELD_OUT_LENGTH, read_trained_length(folder) or positions)
    source = HeldOutRows(
        rows=config.rows, length=default_length if config.length is None else config.length, packing=config.packing
    )
    warn_untrained_length(folder, source.length)
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    batches = source.read(shards, device)
    rows = build_corrupted_rows(
        batches, torch.cat([mask_and_corrupt(electra, batch, context).corrupted.input_ids for batch in batches])
    )
    write_file(config.output, serialize_samples(rows, source, shards.tokenizer, folder))
    is_replaced = rows.corrupted_ids != rows.input_ids
    return CorruptResult(
        output=config.output,
        rows=is_replaced.shape[0],
        length=is_replaced.shape[1],
        replaced_fraction=is_replaced.float().mean().item(),
        metrics=rows.evaluate(electra, shards.tokenizer, World(device)),
    )


@dataclass(frozen=True)
class HeldOutRows:
    """Which rows of the validation split are corrupted."""

    rows: int
    length: int
    packing: Literal["packed", "examples"]

    def read(self, shards: Shards, device: torch.device) -> list[Batch]:
        batch_size = min(CORRUPTED_ROWS_PER_BATCH, self.rows)
        count = math.ceil(self.rows / batch_size)
        loader = LoaderConfig(length=self.length, batch_size=batch_size, packing=self.packing)
        batches = list(validation_batches(shards, loader, max_batches=count, device=device))
        surplus = len(batches) * batch_size - self.rows
        if surplus > 0:
            batches[-1] = merge_batches(batches[-1].micro_batches(batch_size)[:-surplus])
        return batches


def build_corrupted_rows(batches: list[Batch], corrupted_ids: Tensor) -> CorruptedRows:
    """The rows of `batches` with their corrupted tokens [N, L]."""
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for batch in batches:
        columns["input_ids"].append(batch.input_ids)
        if batch.segment_ids is not None and batch.document_ids is not None:
            columns["document_ids"].append(batch.document_ids)
            columns["segment_ids"].append(batch.segment_ids)
    return CorruptedRows(
        corrupted_ids=corrupted_ids, **{name: torch.cat(tensors).int() for name, tensors in columns.items()}
    )


# The file holds the replaced tokens only, not the text: it is small, and can be published where the text cannot.


def serialize_samples(rows: CorruptedRows, source: HeldOutRows, tokenizer: TextTokenizer, generator: Path) -> bytes:
    indices = (rows.corrupted_ids != rows.input_ids).flatten().nonzero().flatten()  # into [N * L]
    tensors = {"indices": indices, "token_ids": rows.corrupted_ids.flatten()[indices]}
    metadata = {name: str(value) for name, value in asdict(source).items()}
    metadata |= {"tokenizer": tokenizer.fingerprint, "generator": str(generator), "text": text_checksum(rows.input_ids)}
    return serialize_tensors({name: tensor.int().cpu() for name, tensor in tensors.items()}, metadata)


def text_checksum(input_ids: Tensor) -> str:
    return tensors_checksum({"input_ids": input_ids.int().cpu()})


def read_corrupted_rows(path: Path, shards: Shards, positions: int) -> CorruptedRows:
    """The held-out rows of the shards with the samples of a file; raises a DataError if these were made with another
    tokenizer or text, or if the rows are longer than `positions`."""
    if not path.is_file():
        raise DataError(f"no file {path}; create it with: electra corrupt")
    tensors = read_tensors(path)
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
    if set(tensors) != {"indices", "token_ids"} or "text" not in metadata:
        raise DataError(f"{path} holds no corrupted rows; create them with: electra corrupt")
    if metadata["tokenizer"] != shards.tokenizer.fingerprint:
        raise DataError(f"{path} was made with another tokenizer; make one for these shards with: electra corrupt")
    source = HeldOutRows(
        rows=int(metadata["rows"]), length=int(metadata["length"]), packing=cast(Any, metadata["packing"])
    )
    if source.length > positions:
        raise DataError(
            f"{path} has rows of {source.length} tokens, longer than the model's {positions} positions; make shorter "
            f"ones with: electra corrupt --length {positions}"
        )
    batches = source.read(shards, torch.device("cpu"))
    original = torch.cat([batch.input_ids for batch in batches])  # [N, L]
    if metadata["text"] != text_checksum(original):
        raise DataError(f"{path} was made from other text; make one for these shards with: electra corrupt")
    samples = tensors["token_ids"].to(original.dtype)
    corrupted = original.flatten().scatter(0, tensors["indices"].long(), samples).view_as(original)
    return build_corrupted_rows(batches, corrupted)
