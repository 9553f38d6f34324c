"""Features: token ids of examples, tokenised once, kept on the device and grouped into batches of few shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from electra.data.encode import create_document_tokenizer
from electra.data.tokenizer import TextTokenizer
from electra.errors import DataError
from electra.finetuning.tasks import Examples, check_text
from electra.kernels.dispatch import call_without_large_kernels
from electra.model.storage import read_tensors, write_tensors
from electra.runfolder import PARTIAL

FORMAT = 2  # of cached features
LOGITS = "logits.safetensors"
LOSS_ROWS = 256  # whose logits are padded together
IGNORED = -100  # target of tokens without a term in the loss
NO_LOGIT = -1e30  # of what cannot be chosen: its probability is 0, and means over models stay finite
PAD_TO_MULTIPLE_OF = 32
"""Batches are padded to a multiple of this length, so that there are few CUDA graphs to capture."""
POOL_BATCHES = 50
"""Rows of this many batches are sorted by length together: little padding, yet mixed batches."""


@dataclass(frozen=True)
class RowBatch:
    """Indices, weights and padded length of the rows of one batch; few shapes, each of them a CUDA graph."""

    rows: Tensor  # [B] indices of rows
    weights: Tensor  # [B] 1, or 0 for a repeated row that only completes the batch
    length: int  # length that the rows are padded to
    slots: int = 1  # sequences of each row, of which it may have fewer

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * self.slots * self.length

    def micro_batches(self, count: int) -> list[RowBatch]:
        chunks = zip(self.rows.chunk(count), self.weights.chunk(count), strict=True)
        return [replace(self, rows=rows, weights=weights) for rows, weights in chunks]

    def to(self, device: torch.device) -> RowBatch:
        rows, weights = (tensor.to(device, non_blocking=True) for tensor in (self.rows, self.weights))
        return replace(self, rows=rows, weights=weights)


@dataclass(frozen=True)
class Features:
    """Examples as token ids: their sequences, one or several (choices) for each row, concatenated.

    An example is one row, or several (windows of a long text), each with its own targets."""

    input_ids: Tensor  # [tokens]
    starts: Tensor  # [sequences] index of the first token
    lengths: Tensor  # [sequences]
    lengths_a: Tensor  # [sequences] tokens of segment A: [CLS], first text, [SEP]
    sequences: Tensor  # [N, slots] sequences of each row, -1 where it has fewer; empty if each row is one sequence
    labels: Tensor  # [N] or [N, …], the targets of the loss; empty if unknown
    is_truncated: Tensor  # [examples] bool
    examples: Tensor = field(default_factory=lambda: torch.empty(0))  # [N] of each row; empty if they are the rows
    offsets: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens, 2] in the text, where answers need them
    words: Tensor = field(default_factory=lambda: torch.empty(0))  # [words] first token of each word of a tagged text

    def __len__(self) -> int:
        return len(self.sequences) or len(self.starts)

    @property
    def num_examples(self) -> int:
        return int(self.examples[-1]) + 1 if len(self.examples) else len(self)

    def to(self, device: torch.device) -> Features:
        return Features(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def row_sizes(self) -> tuple[NDArray, NDArray]:
        """The length of the longest sequence and the number of sequences of each row [N]."""
        if not len(self.sequences):
            return self.lengths.cpu().numpy(), np.ones(len(self), np.int64)
        sequences, lengths = self.sequences.cpu().numpy(), self.lengths.cpu().numpy()
        is_present = sequences >= 0
        return np.where(is_present, lengths[sequences], 0).max(1), is_present.sum(1)

    def targets(self, batch: RowBatch) -> Tensor | None:
        """The targets of the rows of a batch, if they are known."""
        return self.labels[batch.rows] if len(self.labels) else None

    def collate(self, batch: RowBatch, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """Padded token ids, attention mask and segment ids [B, L], or [B, slots, L], of a batch.

        A missing sequence is [CLS] alone: with no token to attend to, its attention would be NaN."""
        rows, lengths = batch.rows, self.lengths[batch.rows]
        if len(self.sequences):
            rows = self.sequences[batch.rows, : batch.slots]  # [B, slots]
            lengths = torch.where(rows < 0, 1, self.lengths[rows])
        positions = torch.arange(batch.length, device=batch.rows.device)  # [L]
        attention_mask = positions < lengths[..., None]
        is_second = positions >= self.lengths_a[rows][..., None]
        indices = (self.starts[rows][..., None] + positions).clamp(max=len(self.input_ids) - 1)
        input_ids = torch.where(attention_mask, self.input_ids[indices].long(), pad_id)
        return input_ids, attention_mask, (attention_mask & is_second).long()


@dataclass(frozen=True)
class Outputs:
    """A model's logits, with the features they were computed from and the examples of these, where they are needed."""

    logits: NDArray  # [N, outputs] of rows; or [tokens, outputs], of the tokens of `Features.input_ids`
    features: Features | None = None
    examples: Examples = field(default_factory=lambda: Examples(texts=[]))  # empty: not given

    def row_logits(self) -> list[NDArray]:
        """The logits [length, outputs] of the tokens of each row."""
        assert self.features is not None
        return np.split(self.logits, self.features.starts[1:].cpu().numpy())

    def compute_losses(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The losses [N] of all rows."""
        assert self.features is not None
        labels = self.features.labels.cpu()
        if len(self.logits) == len(self.features):
            return loss(torch.from_numpy(self.logits), labels)
        rows = [torch.from_numpy(logits) for logits in self.row_logits()]
        losses = []
        for start in range(0, len(rows), LOSS_ROWS):
            part = slice(start, start + LOSS_ROWS)
            losses.append(loss(pad_sequence(rows[part], batch_first=True, padding_value=NO_LOGIT), labels[part]))
        return torch.cat(losses)


def softmax(logits: NDArray) -> NDArray:
    """Probabilities [N, outputs]."""
    return torch.from_numpy(logits).softmax(1).numpy()


def make_features(examples: Examples, tokenizer: TextTokenizer, max_length: int) -> Features:
    """Tokenise examples as [CLS] text [SEP] or [CLS] text [SEP] second text [SEP], truncated to `max_length` or, if
    they may have several windows, as windows of that length."""
    cls = np.array([tokenizer.vocabulary.cls_id], np.int32)
    sep = np.array([tokenizer.vocabulary.sep_id], np.int32)
    columns = [encode_texts(texts, tokenizer) for texts in (examples.texts, examples.texts_b) if texts is not None]
    counts = examples.text_counts
    if examples.windows > 1:
        windows = [split_into_windows(text, max_length - 2, examples.windows) for text in columns[0]]
        columns, counts = [list(chain.from_iterable(windows))], np.array([len(each) for each in windows])
    pieces: list[NDArray] = []
    kept = np.zeros((len(columns[0]), len(columns)), np.int64)  # tokens of each text after truncation
    is_truncated = np.zeros(len(columns[0]), bool)
    for index, texts in enumerate(zip(*columns, strict=True)):
        kept[index] = truncated_lengths([len(text) for text in texts], max_length - 1 - len(texts))
        is_truncated[index] = int(kept[index].sum()) < sum(map(len, texts))
        pieces.append(cls)
        for text, count in zip(texts, kept[index], strict=True):
            pieces += [text[:count], sep]
    lengths = torch.from_numpy(1 + (kept + 1).sum(1))
    is_single = examples.counts is None and examples.windows == 1
    first, slots = counts.cumsum() - counts, np.arange(counts.max())
    sequences = np.where(slots < counts[:, None], first[:, None] + slots, -1)  # [N, slots]
    return Features(
        input_ids=torch.from_numpy(np.concatenate(pieces).astype(np.int32)),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        lengths_a=torch.from_numpy(2 + kept[:, 0]),
        sequences=torch.empty(0) if is_single else torch.from_numpy(sequences),
        labels=torch.empty(0) if examples.labels is None else torch.from_numpy(examples.labels),
        is_truncated=torch.from_numpy(np.logical_or.reduceat(is_truncated, first)),
    )


def split_into_windows(text: NDArray, length: int, count: int) -> list[NDArray]:
    """Up to `count` windows of `length` tokens of a text, of which a quarter is also in the next window; the last one
    has all that is left, also if that is longer."""
    stride = length - length // 4
    starts = range(0, max(1, min(count * stride, len(text) - length // 4)), stride)
    return [text[start:] if start == starts[-1] else text[start : start + length] for start in starts]


def check_texts(texts: Sequence[str]) -> list[str]:
    """The texts; raises a DataError if one is not a string."""
    return [check_text(text, f"text {number}") for number, text in enumerate(texts, start=1)]


def encode_texts(texts: list[str], tokenizer: TextTokenizer) -> list[NDArray]:
    """The token ids of each text, without special tokens."""
    document_tokenizer = cached_document_tokenizer(tokenizer)
    dtype = np.dtype(document_tokenizer.typecode)
    ids = [np.frombuffer(ids, dtype)[:-1] for ids in document_tokenizer.encode([text.encode() for text in texts])]
    document_tokenizer.unk_words.clear()  # would grow with a file
    return ids


cached_document_tokenizer = lru_cache(maxsize=1)(create_document_tokenizer)
"""Caches words: chunks of a file share it."""


def truncated_lengths(lengths: list[int], max_tokens: int) -> list[int]:
    """The lengths of one or two texts after truncation to `max_tokens` in total, the longer one first."""
    if sum(lengths) <= max_tokens:
        return lengths
    if len(lengths) == 1:
        return [max_tokens]
    shorter = min(*lengths, max_tokens // 2)
    return [max_tokens - shorter, shorter] if lengths[0] > lengths[1] else [shorter, max_tokens - shorter]


def load_or_make_features(
    make: Callable[[Examples, TextTokenizer, int], Features],
    examples: Examples,
    tokenizer: TextTokenizer,
    max_length: int,
    cache_folder: Path,
) -> Features:
    """Features from the folder `cache_folder`, where they are stored after `make` made them the first time."""
    file = cache_folder / f"{features_cache_key(make, examples, tokenizer, max_length)}.safetensors"
    if file.exists():
        with suppress(DataError):  # damaged: made again
            return Features(**read_tensors(file))
    features = make(examples, tokenizer, max_length)
    cache_folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}-{uuid4().hex}{PARTIAL}")  # seeds on several nodes may write the same file
    try:
        write_tensors(partial, vars(features), checksum=True)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return features


def features_cache_key(make: Callable, examples: Examples, tokenizer: TextTokenizer, max_length: int) -> str:
    """A hash of everything that features depend on."""
    settings = (FORMAT, make.__name__, tokenizer.fingerprint, max_length, len(examples), examples.windows)
    digest = hashlib.sha256(repr(settings).encode())
    for text in (*examples.texts, "", *(examples.texts_b or ())):
        digest.update(text.encode() + b"\0")
    if examples.counts is not None:
        digest.update(examples.counts.tobytes())
    if examples.labels is not None:
        is_object = examples.labels.dtype == object
        digest.update(repr(examples.labels.tolist()).encode() if is_object else examples.labels.tobytes())
    return digest.hexdigest()[:32]


def epoch_batches(
    lengths: NDArray, batch_size: int, max_length: int, seed: int, epoch: int, counts: NDArray | None = None
) -> Iterator[RowBatch]:
    """The batches of an epoch in random order, rows of similar size together; the last one is completed.

    `lengths` and `counts` [N] are those of `Features.row_sizes`."""
    counts = np.ones_like(lengths) if counts is None else counts
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    pool_size = POOL_BATCHES * batch_size
    pools = [order[start : start + pool_size] for start in range(0, len(order), pool_size)]
    batches = [rows for pool in pools for rows in sort_into_batches(pool, lengths, counts, batch_size)]
    for index in random.permutation(len(batches)):
        yield make_full_batch(batches[index], lengths, counts, batch_size, max_length)


def sort_into_batches(rows: NDArray, lengths: NDArray, counts: NDArray, batch_size: int) -> Iterator[NDArray]:
    """Rows sorted by number of sequences and length, in groups of up to `batch_size`."""
    rows = rows[np.lexsort((lengths[rows], counts[rows]))]
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]


def make_full_batch(
    rows: NDArray,
    lengths: NDArray,
    counts: NDArray,
    batch_size: int,
    max_length: int,
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF,
) -> RowBatch:
    """A batch of `batch_size` rows; missing ones are repetitions of weight 0."""
    weights = (np.arange(batch_size) < len(rows)).astype(np.float32)
    return RowBatch(
        torch.from_numpy(np.resize(rows, batch_size)),
        torch.from_numpy(weights),
        padded_length(int(lengths[rows].max()), max_length, pad_to_multiple_of),
        int(counts[rows].max()),
    )


def padded_length(longest: int, max_length: int, multiple: int = PAD_TO_MULTIPLE_OF) -> int:
    """The length of a batch whose longest row has `longest` tokens."""
    return min(-(-longest // multiple) * multiple, max_length)


def default_batch_size(device: torch.device) -> int:
    """Rows per forward pass of predictions: a GPU is slow on small batches, because each starts as many kernels."""
    return 512 if device.type == "cuda" else 64


def group_by_tokens(lengths: NDArray, max_tokens: int) -> Iterator[NDArray]:
    """Indices of rows of similar length, in groups that have up to `max_tokens` with padding, or one row."""
    rows = np.argsort(lengths, kind="stable")
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * lengths[rows[end]] > max_tokens:
            yield rows[start:end]
            start = end


def inference_batches(
    lengths: NDArray, counts: NDArray, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[NDArray, int]]:
    """Rows with equally many sequences and of similar length, in groups of up to `batch_size` sequences or, if set,
    `max_tokens`; and how many rows a full group has."""
    for count in np.unique(counts):
        rows = np.flatnonzero(counts == count)
        if max_tokens is not None:
            groups = group_by_tokens(lengths[rows] * count, max_tokens)
            yield from ((rows[group], len(group)) for group in groups)
            continue
        size = min(max(1, batch_size // int(count)), len(rows))
        yield from ((group, size) for group in sort_into_batches(rows, lengths, counts, size))


@torch.no_grad()
def compute_logits(
    model: Callable[..., Tensor],
    features: Features,
    batch_size: int,
    max_length: int,
    pad_id: int,
    precision: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> NDArray:
    """The model's logits of all rows in their order: [N, outputs], or [tokens, outputs] from a model of tokens.

    Batches have up to `batch_size` sequences or, if set, `max_tokens`. Matrix products are in `precision`."""
    device = features.starts.device
    multiple = PAD_TO_MULTIPLE_OF if device.type == "cuda" else 1
    lengths, counts = features.row_sizes()
    order, logits = [], []
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):  # casts weights once for all
        for rows, size in inference_batches(lengths, counts, batch_size, max_tokens):
            batch = make_full_batch(rows, lengths, counts, size, max_length, multiple).to(device)
            order.append(rows)
            inputs = (*features.collate(batch, pad_id), features.targets(batch))
            output = call_without_large_kernels(partial(model, *inputs))
            logits.append(output[: len(rows)].float().cpu().numpy())
    ranks = np.argsort(np.concatenate(order))
    if logits[0].ndim == 3:
        parts = zip(chain.from_iterable(logits), lengths[np.concatenate(order)], strict=True)
        by_row = [row[:length] for row, length in parts]
        return np.concatenate([by_row[rank] for rank in ranks])
    return np.concatenate(logits)[ranks]


def write_logits(folder: Path, logits: dict[str, NDArray]) -> None:
    """Store logits by split."""
    tensors = {split: torch.from_numpy(values) for split, values in logits.items()}
    write_tensors(folder / LOGITS, tensors, checksum=True)


def read_logits(folder: Path) -> dict[str, NDArray]:
    return {split: tensor.numpy() for split, tensor in read_tensors(folder / LOGITS).items()}
