"""Features: the token ids of examples, made once, kept on the device, cut into batches of few shapes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.tokenizer import TextTokenizer
from electra.data.wordpiece import create_encoder
from electra.errors import ConfigError
from electra.finetuning.tasks import Examples, Task
from electra.model.storage import read_tensors, write_tensors

STRIDE = 32
"""Rows are padded to a multiple of so many tokens, so that there are few shapes to record."""
POOL = 50
"""Rows of so many batches are sorted by length together: little padding, and yet batches of mixed rows."""

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Chosen:
    """The rows of one step; its shape is the same for all steps of one length."""

    rows: Tensor  # [B] numbers of rows
    weights: Tensor  # [B] 1, or 0 for a row that only fills the batch up
    length: int  # what rows are padded to

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * self.length

    def micro_batches(self, count: int) -> list[Chosen]:
        """The batch in micro-batches."""
        if self.num_rows % count:
            raise ConfigError(f"{self.num_rows} rows do not divide into {count} micro-batches")
        return [
            Chosen(*part, self.length) for part in zip(self.rows.chunk(count), self.weights.chunk(count), strict=True)
        ]


@dataclass(frozen=True)
class Features:
    """Examples as token ids, one row after the other."""

    input_ids: Tensor  # [tokens]
    starts: Tensor  # [N] where each row begins in them
    lengths: Tensor  # [N]
    firsts: Tensor  # [N] tokens of segment A: [CLS], the first text, [SEP]
    labels: Tensor  # [N, …] as the network learns them; empty where there are none
    truncated: Tensor  # [] rows whose text was cut

    def __len__(self) -> int:
        return len(self.starts)

    def to(self, device: torch.device) -> Features:
        """The same on another device."""
        return Features(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def inputs(self, chosen: Chosen, pad_id: int) -> Inputs:
        """Token ids, attention mask and segment ids [B, L] of the chosen rows."""
        places = torch.arange(chosen.length, device=chosen.rows.device)
        lengths, firsts = self.lengths[chosen.rows, None], self.firsts[chosen.rows, None]  # [B, 1]
        attention_mask = places < lengths
        where = (self.starts[chosen.rows, None] + places).clamp(max=len(self.input_ids) - 1)
        input_ids = torch.where(attention_mask, self.input_ids[where].long(), pad_id)
        return input_ids, attention_mask, (attention_mask & (places >= firsts)).long()


def make_features(task: Task, examples: Examples, tokenizer: TextTokenizer, length: int) -> Features:
    """Tokenise examples: [CLS] text [SEP], or [CLS] text [SEP] second text [SEP], cut to `length`."""
    vocabulary = tokenizer.vocabulary
    begin, end = np.array([vocabulary.cls_id], np.int32), np.array([vocabulary.sep_id], np.int32)
    columns = [encode(texts, tokenizer) for texts in (examples.texts, examples.pairs) if texts is not None]
    pieces: list[NDArray] = []
    kept, truncated = np.zeros((len(examples), len(columns)), np.int64), 0
    for number, texts in enumerate(zip(*columns, strict=True)):
        kept[number] = room([len(text) for text in texts], length - 1 - len(texts))
        truncated += int(kept[number].sum()) < sum(map(len, texts))
        pieces.append(begin)
        for text, count in zip(texts, kept[number], strict=True):
            pieces += [text[:count], end]
    lengths = torch.from_numpy(1 + (kept + 1).sum(1))
    return Features(
        input_ids=torch.from_numpy(np.concatenate(pieces).astype(np.int32)),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        firsts=torch.from_numpy(2 + kept[:, 0]),
        labels=labels_of(task, examples),
        truncated=torch.tensor(truncated),
    )


def encode(texts: list[str], tokenizer: TextTokenizer) -> list[NDArray]:
    """The token ids of each text, without special tokens."""
    encoder = create_encoder(tokenizer)
    kind = np.dtype(encoder.type)
    return [np.frombuffer(ids, kind)[:-1] for ids in encoder.encode([text.encode() for text in texts])]


def room(sizes: list[int], most: int) -> list[int]:
    """How many tokens of a text, or of each of two, are kept among `most`: the longer one is cut first."""
    if sum(sizes) <= most:
        return sizes
    if len(sizes) == 1:
        return [most]
    shorter = min(*sizes, most // 2)
    return [most - shorter, shorter] if sizes[0] > sizes[1] else [shorter, most - shorter]


def labels_of(task: Task, examples: Examples) -> Tensor:
    """Labels as the network learns them."""
    if examples.labels is None:
        return torch.empty(0)
    is_scores = not task.labels
    return torch.from_numpy(task.scaled(examples.labels).astype(np.float32) if is_scores else examples.labels)


def cached_features(task: Task, examples: Examples, tokenizer: TextTokenizer, length: int, cache: Path) -> Features:
    """The same from a folder, where they lie if the same texts were tokenised before."""
    file = cache / f"{fingerprint(task, examples, tokenizer, length)}.safetensors"
    if file.exists():
        return Features(**read_tensors(file))
    features = make_features(task, examples, tokenizer, length)
    cache.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")  # seeds side by side may all be making it
    write_tensors(draft, vars(features))
    draft.replace(file)
    return features


def fingerprint(task: Task, examples: Examples, tokenizer: TextTokenizer, length: int) -> str:
    """A name for what these texts become."""
    settings = (tokenizer.fingerprint, length, task.kind, task.scale, task.offset, len(examples))
    found = hashlib.sha256(repr(settings).encode())
    for text in (*examples.texts, "", *(examples.pairs or ())):
        found.update(text.encode() + b"\0")
    if examples.labels is not None:
        found.update(examples.labels.tobytes())
    return found.hexdigest()[:32]


def epoch(lengths: NDArray, batch_size: int, seed: int, number: int) -> Iterator[tuple[NDArray, NDArray, int]]:
    """The batches of an epoch in random order, as rows, weights and padded length; the last rows are filled up."""
    random = np.random.default_rng((seed, number))
    order = random.permutation(len(lengths))
    pools = [order[begin : begin + POOL * batch_size] for begin in range(0, len(order), POOL * batch_size)]
    batches = [batch for pool in pools for batch in by_length(pool, lengths, batch_size)]
    for place in random.permutation(len(batches)):
        yield filled(batches[place], lengths, batch_size)


def by_length(rows: NDArray, lengths: NDArray, batch_size: int) -> Iterator[NDArray]:
    """Rows in batches of rows that are about as long."""
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    for begin in range(0, len(rows), batch_size):
        yield rows[begin : begin + batch_size]


def filled(rows: NDArray, lengths: NDArray, batch_size: int) -> tuple[NDArray, NDArray, int]:
    """Rows filled up to a whole batch, weights 0 where they are only that, and the length they are padded to."""
    weights = (np.arange(batch_size) < len(rows)).astype(np.float32)
    longest = int(lengths[rows].max())
    return np.resize(rows, batch_size), weights, -(-longest // STRIDE) * STRIDE


def choose(batch: tuple[NDArray, NDArray, int], device: torch.device, most: int) -> Chosen:
    """A batch on the device; never longer than `most`, which need not be a multiple of the stride."""
    rows, weights, length = batch
    return Chosen(
        torch.from_numpy(rows).to(device, non_blocking=True),
        torch.from_numpy(weights).to(device, non_blocking=True),
        min(length, most),
    )
