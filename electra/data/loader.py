"""The data loader: batches of rows from the shards of a split, shuffled, resumable and prefetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.packing import (
    LONG_ROW_FRACTION,
    MAX_SPLITS,
    ROW_ORDER,
    SINGLE_SEGMENT_FRACTION,
    LoaderConfig,
    PackedRows,
    RowSpans,
    SegmentPairRows,
    compute_document_starts,
    count_documents_in_spans,
)
from electra.data.shards import Shards, Split, TokenRing
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.random import Purpose, random_uniform, row_keys

TOKENS_PER_READ = 1 << 20
"""Tokens that are read and packed together; many small gathers would be slower."""

# torch indexes only signed integers; `to_int64_ids` restores the unsigned values
SIGNED_DTYPES = {np.dtype(np.uint16): torch.int16, np.dtype(np.uint32): torch.int32}
UNSIGNED_MASKS = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """Rows of one training step, or of one micro-batch of it."""

    input_ids: Tensor  # [B, L]
    step: Tensor  # [] training step, from 0; [B] in a batch that was merged from several
    row_ids: Tensor  # [B] index of each row in the global batch, over all ranks and micro-batches
    attention_mask: Tensor | None = None  # [B, L] bool, False at padding; None: no padding
    segment_ids: Tensor | None = None  # [B, L] 0 in segment A, 1 in segment B; None: all A
    document_ids: Tensor | None = None  # [B, L] document of each token, contiguous; None: one document per row
    cu_seqlens: Tensor | None = None  # [N + 1] document boundaries in the flattened batch (`compute_cu_seqlens`)
    is_continuation: Tensor | None = None  # [B, L] bool, True at word pieces that continue a word; None: unknown

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.input_ids.numel()

    def lengths(self) -> Tensor:
        """[B] number of tokens in each row, without padding."""
        if self.attention_mask is None:
            return torch.full_like(self.row_ids, self.input_ids.shape[1])
        return self.attention_mask.long().sum(1)

    def random_keys(self, seed: int, purpose: Purpose) -> Tensor:
        """[B, 2] the keys of each row's random numbers."""
        return row_keys(seed, self.step, self.row_ids, purpose)

    def encoder_inputs(self) -> dict[str, Tensor | None]:
        """The encoder's keyword arguments besides `input_ids`."""
        names = ("attention_mask", "segment_ids", "document_ids", "cu_seqlens")
        return {name: getattr(self, name) for name in names}

    def micro_batches(self, count: int) -> list[Batch]:
        """The batch split into `count` equal parts."""
        if self.num_rows % count:
            raise ConfigError(f"{self.num_rows} rows do not divide into {count} micro-batches")
        values = {field.name: getattr(self, field.name) for field in fields(Batch) if field.name != "cu_seqlens"}
        by_row = {name: tensor for name, tensor in values.items() if tensor is not None and tensor.dim()}
        chunks = {name: tensor.chunk(count) for name, tensor in by_row.items()}
        parts = [replace(self, **{name: chunk[part] for name, chunk in chunks.items()}) for part in range(count)]
        return parts if self.cu_seqlens is None else [part.with_cu_seqlens(len(self.cu_seqlens) - 1) for part in parts]

    def with_cu_seqlens(self, max_documents: int) -> Batch:
        """The batch with the boundaries of its at most `max_documents` documents."""
        assert self.document_ids is not None
        return replace(self, cu_seqlens=compute_cu_seqlens(self.document_ids, max_documents))


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of several, which keep their masks and samples."""
    rows = [replace(batch, step=batch.step.expand(batch.num_rows), cu_seqlens=None) for batch in batches]
    columns = {field.name: [getattr(batch, field.name) for batch in rows] for field in fields(Batch)}
    merged = {name: None if tensors[0] is None else torch.cat(tensors) for name, tensors in columns.items()}
    return Batch(**merged)  # type: ignore[arg-type]  # only optional fields are None


def compute_cu_seqlens(document_ids: Tensor, max_documents: int | None = None) -> Tensor:
    """Start of each document of `document_ids` [B, L] in the flattened batch, and the batch's end: [N + 1] int32.

    Every row starts a new document. With `max_documents` N equals it (a static shape): the last ones may be empty.
    """
    is_start = torch.ones_like(document_ids, dtype=torch.bool)  # [B, L]
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    is_start = is_start.flatten()
    end = document_ids.numel()
    if max_documents is None:
        return torch.nn.functional.pad(is_start.nonzero().squeeze(1), (0, 1), value=end).int()
    position = torch.arange(end, device=document_ids.device, dtype=torch.int32)
    index = torch.where(is_start, is_start.cumsum(0) - 1, max_documents + 1)  # the last entry collects non-starts
    return position.new_full((max_documents + 2,), end).scatter(0, index.clamp(max=max_documents + 1), position)[:-1]


def to_int64_ids(stored_tokens: Tensor) -> Tensor:
    """Tokens that `MemoryMappedTokens` or `DeviceTokens` read, as int64 ids."""
    return stored_tokens.long() & UNSIGNED_MASKS[stored_tokens.dtype]


class MemoryMappedTokens:
    """Tokens read from memory-mapped shards, into pinned memory if a GPU will use them."""

    def __init__(self, ring: TokenRing, device: torch.device):
        self.ring, self.pin_memory = ring, device.type == "cuda"

    def read_rows(self, starts: NDArray, width: int) -> Tensor:
        """[R, width] the tokens from each start on, for `to_int64_ids`."""
        dtype = SIGNED_DTYPES[self.ring.dtype]
        tokens = torch.empty((len(starts), width), dtype=dtype, pin_memory=self.pin_memory)
        self.ring.read_rows_into(starts, out=tokens.numpy().view(self.ring.dtype))
        return tokens


class DeviceTokens:
    """Tokens that are all in the memory of a device."""

    def __init__(self, ring: TokenRing, device: torch.device):
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        needed = len(ring) * ring.dtype.itemsize
        if free is not None and needed > free:
            raise ConfigError(
                f"the tokens take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; "
                "leave out --data-on-gpu"
            )
        self.tokens = torch.empty(len(ring), dtype=SIGNED_DTYPES[ring.dtype], device=device)
        for part, start, end in zip(ring.parts, ring.starts, ring.ends, strict=True):
            self.tokens[start:end] = torch.from_numpy(np.array(part.read())).view(self.tokens.dtype)

    def read_rows(self, starts: NDArray, width: int) -> Tensor:
        """[R, width] the tokens from each start on, for `to_int64_ids`."""
        device = self.tokens.device
        positions = torch.from_numpy(starts).to(device)[:, None] + torch.arange(width, device=device)
        return self.tokens[positions % len(self.tokens)]


@dataclass(frozen=True)
class LoaderPosition:
    """The next batch: its step, and its first row as (epoch, row over all ranks)."""

    step: int = 0
    epoch: int = 0
    row: int = 0


def create_epoch_rows(
    config: LoaderConfig, seed: int, shuffle: bool, num_tokens: int, document_starts: NDArray, epoch: int
) -> PackedRows | SegmentPairRows:
    """The rows of an epoch; without `shuffle` in the order of the text."""
    if config.packing == "segment-pairs":
        return SegmentPairRows(document_starts, config.length, seed, epoch, shuffle)
    return PackedRows(num_tokens, config.length, seed, epoch, shuffle)


class BatchLoader:
    """An endless, resumable iterator over one rank's batches, which are determined by its arguments.

    `seed` determines the row order; `whole_word_masking` adds `is_continuation`, `with_cu_seqlens` adds `cu_seqlens`.
    """

    def __init__(
        self,
        shards: Shards,
        config: LoaderConfig,
        *,
        seed: int = 0,
        split: Split = "train",
        whole_word_masking: bool = False,
        with_cu_seqlens: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ):
        if config.batch_size % world_size:
            raise ConfigError(f"is {config.batch_size}, not divisible by the {world_size} ranks", field="batch_size")
        self.config, self.seed, self.device = config, seed, torch.device(device)
        self.rank, self.rows_per_rank = rank, config.batch_size // world_size
        self.position = LoaderPosition()
        self.vocabulary = shards.tokenizer.vocabulary
        ring = TokenRing(shards, split)
        tokens_class = DeviceTokens if config.data_on_gpu else MemoryMappedTokens
        self.tokens: MemoryMappedTokens | DeviceTokens = tokens_class(ring, self.device)
        is_padded = config.packing == "segment-pairs"
        self.with_cu_seqlens = with_cu_seqlens and not is_padded and not config.cross_document_attention
        needs_documents = self.with_cu_seqlens or is_padded
        self.document_starts = compute_document_starts(shards, split) if needs_documents else np.zeros(0, np.int64)
        continuations = self.vocabulary.is_continuation if whole_word_masking else None
        self.is_continuation = None if continuations is None else torch.tensor(continuations, device=self.device)
        # not a method: a reference cycle would keep tokens in GPU memory until the next garbage collection
        create = partial(create_epoch_rows, config, seed, split == "train", len(ring), self.document_starts)
        self.epoch = lru_cache(maxsize=2)(create)

    def row_order_settings(self) -> dict[str, Any]:
        """The settings that determine the row order."""
        settings = {"seed": self.seed, **asdict(self.config)}
        return {name: settings[name] for name in ROW_ORDER}

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch and the row order it refers to."""
        return asdict(self.position) | self.row_order_settings()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, saved with any number of ranks; raises if it refers to another row order."""
        for name, value in self.row_order_settings().items():
            if state[name] != value:
                raise ConfigError(
                    f"{name} is {value} but the saved position in the training data is for {name} {state[name]}; "
                    f"resume with {name} {state[name]} or start a new run"
                )
        self.position = LoaderPosition(**{field.name: state[field.name] for field in fields(LoaderPosition)})

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from `self.position` on, which advances with each batch taken."""
        for position, tokens, spans in prefetch_in_thread(self.read_token_chunks(self.position)):
            for batch in self.build_batches(position, tokens, spans):
                self.position = self.position_after(self.position, steps=1)
                yield batch

    def read_batch(self, step: int) -> Batch:
        """The batch of a step, alone in its memory: batches of `__iter__` are views of tensors of several steps."""
        position = self.position_after(LoaderPosition(), step)
        spans, width = self.next_row_spans(position, steps=1)
        return next(self.build_batches(position, self.tokens.read_rows(spans.starts, width), spans))

    def read_token_chunks(self, position: LoaderPosition) -> Iterator[tuple[LoaderPosition, Tensor, RowSpans]]:
        """The tokens of several steps at a time, endlessly."""
        steps = TOKENS_PER_READ // (self.rows_per_rank * self.config.length)
        steps = max(1, min(steps, self.epoch(position.epoch).num_rows // self.config.batch_size))
        while True:
            spans, width = self.next_row_spans(position, steps)
            yield position, self.tokens.read_rows(spans.starts, width), spans
            position = self.position_after(position, steps)

    def next_row_spans(self, position: LoaderPosition, steps: int) -> tuple[RowSpans, int]:
        """The spans of this rank's rows of the next steps, over as many epochs as needed, and their width."""
        row_ids = self.rank * self.rows_per_rank + np.arange(self.rows_per_rank)
        rows = position.row + (np.arange(steps)[:, None] * self.config.batch_size + row_ids).ravel()
        spans = []
        number = position.epoch
        while len(rows):
            epoch = self.epoch(number)
            is_inside = rows < epoch.num_rows
            spans.append(epoch.spans(rows[is_inside]))
            rows = rows[~is_inside] - epoch.num_rows
            number += 1
        return concatenate_spans(spans), epoch.width

    def position_after(self, position: LoaderPosition, steps: int) -> LoaderPosition:
        """The position `steps` later."""
        epoch = position.epoch
        row = position.row + steps * self.config.batch_size
        while row >= (num_rows := self.epoch(epoch).num_rows):
            epoch, row = epoch + 1, row - num_rows
        return LoaderPosition(position.step + steps, epoch, row)

    def build_batches(self, position: LoaderPosition, tokens: Tensor, spans: RowSpans) -> Iterator[Batch]:
        """The batch of each step of a chunk, on the device."""
        text = to_int64_ids(tokens.to(self.device, non_blocking=True))  # [steps * B, width]
        row_ids = torch.arange(self.rows_per_rank, device=self.device) + self.rank * self.rows_per_rank
        steps = torch.arange(len(text) // self.rows_per_rank, device=self.device) + position.step
        if self.config.packing == "packed":
            chunk = build_packed_rows(text, self.vocabulary)
        elif self.config.packing == "examples":
            step_of_row = steps.repeat_interleave(self.rows_per_rank)
            keys = row_keys(self.seed, step_of_row, row_ids.repeat(len(steps)), Purpose.SPLITS)
            chunk = build_example_rows(text, keys, self.vocabulary)
        else:
            chunk = build_segment_pair_rows(text, spans, self.vocabulary)
        if self.config.cross_document_attention:
            chunk.pop("document_ids", None)
        if self.is_continuation is not None:
            chunk["is_continuation"] = self.is_continuation[chunk["input_ids"]]
        for index, step in enumerate(steps):
            rows = slice(index * self.rows_per_rank, (index + 1) * self.rows_per_rank)
            batch = Batch(step=step, row_ids=row_ids, **{name: tensor[rows] for name, tensor in chunk.items()})
            yield batch.with_cu_seqlens(self.bound_num_documents(spans.starts[rows])) if self.with_cu_seqlens else batch

    def bound_num_documents(self, starts: NDArray) -> int:
        """An upper bound of the documents in these rows, rounded up so that `cu_seqlens` has few different shapes."""
        count = int(count_documents_in_spans(starts, self.config.length - 1, self.document_starts).sum())
        documents_per_row = -(-count // len(starts)) + (MAX_SPLITS if self.config.packing == "examples" else 0)
        return len(starts) * 2 ** max(0, (documents_per_row - 1).bit_length())


def concatenate_spans(spans: list[RowSpans]) -> RowSpans:
    """Row spans of several epochs in one."""
    columns = {field.name: [getattr(part, field.name) for part in spans] for field in fields(RowSpans)}
    return RowSpans(**{name: np.concatenate(column) for name, column in columns.items() if column[0] is not None})


def build_packed_rows(token_ids: Tensor, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """`input_ids` and `document_ids` of packed rows, [CLS] followed by `token_ids` [B, L - 1]."""
    input_ids = torch.nn.functional.pad(token_ids, (1, 0), value=vocabulary.cls_id)  # [B, L]
    is_end = input_ids == vocabulary.sep_id
    document_ids = is_end.cumsum(1, dtype=torch.int32) - is_end.int()  # [SEP] belongs to the document it ends
    return {"input_ids": input_ids, "document_ids": document_ids}


def build_example_rows(token_ids: Tensor, keys: Tensor, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """`input_ids`, `document_ids` (of examples) and `segment_ids` of rows of examples, from `token_ids` [B, L - 1].

    `keys` [B, 2] are the rows' random keys. An example is [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; a row's last one ends
    where the row ends."""
    rows, length = len(token_ids), token_ids.shape[1] + 1
    ends_document = token_ids == vocabulary.sep_id  # [B, W], as all masks of tokens
    splits, starts_second = choose_splits(token_ids, keys, vocabulary)
    position = positions_in_row(splits, starts_second, ends_document)
    has_room = position < length - 4 + starts_second.long()  # for a token of text after the split
    splits, starts_second = splits & has_room, starts_second & has_room
    position = positions_in_row(splits, starts_second, ends_document)
    ends_example = splits & ~starts_second
    outside = torch.full_like(position, length)  # a column that is discarded

    def place(target: Tensor, where: Tensor, offset: int, value: Tensor | int) -> Tensor:
        index = torch.where(where, position + offset, outside).clamp(max=length)
        return target.scatter(1, index, value)

    is_token = torch.ones_like(splits)
    input_ids = place(token_ids.new_full((rows, length + 1), vocabulary.sep_id), is_token, 0, token_ids)
    input_ids = place(input_ids, splits, 1, vocabulary.sep_id)
    is_start = torch.zeros_like(input_ids)
    is_start = place(place(is_start, ends_example, 2, 1), ends_document, 1, 1)[:, :length]
    is_start[:, 0] = 1
    input_ids = torch.where(is_start.bool(), vocabulary.cls_id, input_ids[:, :length])
    input_ids[:, -1] = vocabulary.sep_id
    separators = (input_ids == vocabulary.sep_id).long()
    before = separators.cumsum(1) - separators  # [SEP] before each token
    segment_ids = (before - torch.where(is_start.bool(), before, 0).cummax(1).values).clamp(max=1)
    document_ids = is_start.cumsum(1, dtype=torch.int32) - 1
    return {"input_ids": input_ids, "document_ids": document_ids, "segment_ids": segment_ids}


def positions_in_row(splits: Tensor, starts_second: Tensor, ends_document: Tensor) -> Tensor:
    """The column of each token [B, W] in its row, which begins with [CLS]; some are outside of it."""
    inserted = 2 * splits.long() - starts_second.long() + ends_document.long()  # special tokens after each token
    return 1 + torch.arange(splits.shape[1], device=splits.device) + inserted.cumsum(1) - inserted


def choose_splits(token_ids: Tensor, keys: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The ends of sentences at which `token_ids` [B, W] are split, and those of them that a segment B follows: [B, W].

    Of long rows one sentence end divides two segments. In the others each is a split with the row's own probability,
    and either all separate examples, or they divide two segments and separate examples by turns."""
    width = token_ids.shape[1]
    uniform = random_uniform(keys, width + 3)
    kind, probability, pairing = uniform[:, width:].split(1, dim=1)  # [B, 1]
    uniform = uniform[:, :width]
    sentence_ends = torch.tensor(vocabulary.sentence_end_ids, dtype=token_ids.dtype, device=token_ids.device)
    ends_document = token_ids == vocabulary.sep_id
    is_candidate = torch.isin(token_ids, sentence_ends) & ~ends_document.roll(-1, dims=1)
    is_candidate[:, -1] = False
    score = uniform * is_candidate
    is_long = kind < LONG_ROW_FRACTION
    has_second = pairing >= SINGLE_SEGMENT_FRACTION
    one = is_candidate & has_second & (score == score.amax(1, keepdim=True))
    splits = torch.where(is_long, one, is_candidate & (uniform < probability))
    number = splits.cumsum(1)  # of the split, from 1
    splits = splits & (number <= MAX_SPLITS)
    number = number - torch.where(ends_document, number, 0).cummax(1).values  # within its document
    starts_second = splits & (number % 2 == 1) & (is_long | (pairing >= 0.5))
    return splits, starts_second


def build_segment_pair_rows(token_ids: Tensor, spans: RowSpans, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `segment_ids` of [CLS] A [SEP] B [SEP] rows from `token_ids` [B, L - 3]."""
    device, width = token_ids.device, token_ids.shape[1]
    lengths = torch.from_numpy(spans.lengths).to(device)[:, None]  # [B, 1]
    first_lengths = torch.from_numpy(spans.first_lengths).to(device)[:, None]  # [B, 1]
    has_second = lengths > first_lengths
    position = torch.arange(width + 3, device=device)  # [L]
    is_second = position > first_lengths + 1
    input_ids = token_ids.gather(1, (position - 1 - is_second.long()).clamp(0, width - 1))  # [B, L]
    is_separator = (position == first_lengths + 1) | (has_second & (position == lengths + 2))
    attention_mask = position < lengths + 2 + has_second.long()
    input_ids = torch.where(is_separator, vocabulary.sep_id, input_ids)
    input_ids = torch.where(attention_mask, input_ids, vocabulary.pad_id)
    input_ids[:, 0] = vocabulary.cls_id
    segment_ids = (is_second & attention_mask).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "segment_ids": segment_ids}


def prefetch_in_thread(items: Iterable[Item], depth: int = 3) -> Iterator[Item]:
    """The items of an endless iterable, produced by a thread up to `depth` ahead; its exceptions are raised here."""
    iterator = iter(items)
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        futures = deque(pool.submit(next, iterator) for _ in range(depth))
        while True:
            item = futures.popleft().result()
            futures.append(pool.submit(next, iterator))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def validation_batches(
    shards: Shards,
    config: LoaderConfig,
    *,
    max_batches: int | None = None,
    whole_word_masking: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Batches of the validation split in the order of the text: full ones only, but at least one.

    With `max_batches` they are evenly spread over the split, and no others are read.
    """
    loader = BatchLoader(shards, config, split="validation", whole_word_masking=whole_word_masking, device=device)
    steps = max(1, loader.epoch(0).num_rows // config.batch_size)
    count = min(steps, max_batches or steps)
    return (loader.read_batch(index * steps // count) for index in range(count))
