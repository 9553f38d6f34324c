"""BatchLoader: rows of token ids, and what the model and the objectives need to know of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from queue import Full, Queue
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.packing import (
    Cuts,
    DensePacking,
    Form,
    Packing,
    PaperPacking,
    Permutation,
    document_begins,
    documents_in,
)
from electra.data.ring import Ring
from electra.data.shards import Shards, Split
from electra.data.stream import MappedStream, ResidentStream, Stream, as_ids
from electra.data.vocabulary import Vocabulary
from electra.errors import ConfigError

TOKENS_AT_ONCE = 1 << 20
"""BatchLoader are packed together up to so many tokens: many small gathers would be slower."""

ORDER = ("seed", "length", "form")
"""What decides the order of rows, in which a checkpoint is a place."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """Rows of one training step, or of one micro-batch of it."""

    input_ids: Tensor  # [B, L]
    step: Tensor  # [] the training step, counted from 0
    rows: Tensor  # [B] each row's number within the whole step's batch, over all ranks and micro-batches
    attention_mask: Tensor | None = None  # [B, L] bool, False at padding; None: there is no padding
    segment_ids: Tensor | None = None  # [B, L] 0 in segment A, 1 in segment B; None: all A
    documents: Tensor | None = None  # [B, L] the number of a token's document, each contiguous; None: one a row
    starts: Tensor | None = (
        None  # [N + 1] where these start in the flattened batch (`compute_cu_seqlens`); None: not listed
    )
    is_continuation: Tensor | None = None  # [B, L] bool, True at a word's second and later pieces; None: not known

    def size(self) -> int:
        """Its rows."""
        return len(self.rows)

    def token_count(self) -> int:
        """Its tokens, padding included: what the device works on."""
        return self.input_ids.numel()

    def tokens(self) -> Tensor:
        """How many tokens of each row are not padding: [B]."""
        if self.attention_mask is None:
            return torch.full_like(self.rows, self.input_ids.shape[1])
        return self.attention_mask.long().sum(1)

    def surroundings(self) -> tuple[Tensor | None, ...]:
        """What an encoder takes beside the token ids, in its order: padding, segments, documents and their list."""
        return self.attention_mask, self.segment_ids, self.documents, self.starts

    def pieces(self, count: int) -> list[Batch]:
        """The batch in equal micro-batches; rows keep their numbers."""
        if self.size() % count:
            raise ConfigError(f"{self.size()} rows do not divide into {count} micro-batches")
        by_row = [field.name for field in fields(Batch) if field.name not in ("step", "starts")]
        tensors = {name: getattr(self, name) for name in by_row}
        chunks = {name: tensor.chunk(count) for name, tensor in tensors.items() if tensor is not None}
        pieces = [replace(self, **{name: chunk[part] for name, chunk in chunks.items()}) for part in range(count)]
        return [piece.listed(None if self.starts is None else len(self.starts) - 1) for piece in pieces]

    def listed(self, most: int | None) -> Batch:
        """The batch with a list of its documents, of which there are at most so many; without one if that is None."""
        if most is None or self.documents is None:
            return replace(self, starts=None)
        return replace(self, starts=compute_cu_seqlens(self.documents, most))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How tokens become rows and rows become batches."""

    length: int = 128
    """Tokens in a row, [CLS] and [SEP] included."""
    batch_size: int = 128
    """Rows of one step, over all ranks and micro-batches."""
    form: Form = "dense"
    """dense: documents end to end, no padding; paper: two segments of one document, as ELECTRA was trained."""
    cross_document_attention: bool = False
    """Dense rows: tokens see all documents of their row, as in most trainers; otherwise only their own."""
    seed: int = 0
    """Decides how rows are cut and shuffled."""
    data_on_gpu: bool = False
    """Keep all tokens in the device's memory and pack there."""
    whole_word_masking: bool = False
    """Also tell which tokens continue a word, for masking whole words."""

    def __post_init__(self):
        if self.length < 5:
            raise ConfigError(f"length is {self.length}; a row needs at least 5: [CLS] A [SEP] B [SEP]")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.cross_document_attention and self.form != "dense":
            raise ConfigError(
                f"cross_document_attention is for dense rows; with form {self.form} a row has one document anyway"
            )


@dataclass(frozen=True)
class Position:
    """A place in the endless order of batches: the next step and its first row, counted in its epoch over all ranks."""

    step: int = 0
    epoch: int = 0
    row: int = 0


def compute_cu_seqlens(documents: Tensor, most: int | None = None) -> Tensor:
    """Where documents [B, L] start in the flattened batch, and its end; a row always starts a new one.

    If there are at most so many, the list has one length whatever they are: empty ones stand at its end.
    """
    is_start = torch.ones_like(documents, dtype=torch.bool)  # [B, L]
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    is_start, end = is_start.flatten(), documents.numel()
    if most is None:
        return torch.nn.functional.pad(is_start.nonzero().squeeze(1), (0, 1), value=end).int()
    place = torch.arange(end, device=documents.device, dtype=torch.int32)
    number = torch.where(is_start, is_start.cumsum(0) - 1, most + 1)  # what starts nothing goes behind the list
    return place.new_full((most + 2,), end).scatter(0, number.clamp(max=most + 1), place)[:-1]


class BatchLoader:
    """The batches of one rank: endless, the same for the same configuration, and able to go on from any step."""

    def __init__(
        self,
        shards: Shards,
        config: DataConfig,
        *,
        split: Split = "train",
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        start: Position | None = None,
        lists_documents: bool = False,
    ):
        if config.batch_size % ranks:
            raise ConfigError(f"batch_size {config.batch_size} does not divide among {ranks} ranks")
        self.config, self.rank, self.ranks = config, rank, ranks
        self.position = start or Position()
        self.device = torch.device(device)
        self.vocabulary = shards.tokenizer.vocabulary
        ring = Ring(shards, split)
        self.stream: Stream = (ResidentStream if config.data_on_gpu else MappedStream)(ring, self.device)
        self.packing_of = packings(shards, config, split, len(ring))
        self.is_continuation = torch.tensor(self.vocabulary.is_continuation, device=self.device)
        is_listed = lists_documents and config.form == "dense" and not config.cross_document_attention
        self.begins = document_begins(shards, split) if is_listed else None

    def state(self) -> dict[str, Any]:
        """The position of the next batch, and what it is a position in: a few numbers to keep in a checkpoint."""
        return asdict(self.position) | self.order()

    def order(self) -> dict[str, Any]:
        """What decides the order of rows."""
        return {name: getattr(self.config, name) for name in ORDER}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks; raises if it is a place in another order."""
        for name, value in self.order().items():
            if state[name] != value:
                raise ConfigError(
                    f"these batches have {name} {value}, the saved position is one with {name} {state[name]}; "
                    "resume with the same, or start a new epoch"
                )
        self.position = Position(**{field.name: state[field.name] for field in fields(Position)})

    def __iter__(self) -> Iterator[Batch]:
        """BatchLoader from the present position on; it moves as they are taken."""
        for position, windows, cuts in prefetched(self.chunks(self.position)):
            for batch in self.batches_of(position, windows, cuts):
                self.position = self.after(self.position, steps=1)
                yield batch

    def chunks(self, position: Position) -> Iterator[tuple[Position, Tensor, Cuts]]:
        """The windows of some steps at a time, endlessly."""
        size = self.config.batch_size
        most = TOKENS_AT_ONCE // (size // self.ranks * self.config.length)
        steps = max(1, min(most, self.packing_of(position.epoch)[0].rows // size))  # small corpora: an epoch at most
        while True:
            cuts, width = self.cuts_of(position, steps)
            yield position, self.stream.windows(cuts.starts, width), cuts
            position = self.after(position, steps)

    def cuts_of(self, position: Position, steps: int) -> tuple[Cuts, int]:
        """Where this rank's rows of the next steps lie, over as many epochs as they take."""
        size, local = self.config.batch_size, self.config.batch_size // self.ranks
        rows = self.rank * local + np.arange(local)
        places = position.row + (np.arange(steps)[:, None] * size + rows).ravel()
        epoch, found = position.epoch, []
        while len(places):
            packing, order = self.packing_of(epoch)
            is_here = places < packing.rows
            found.append(packing.cuts(order(places[is_here])))
            places, epoch = places[~is_here] - packing.rows, epoch + 1
        return joined(found), packing.width

    def after(self, position: Position, steps: int) -> Position:
        """The position some steps later."""
        epoch, row = position.epoch, position.row + steps * self.config.batch_size
        while row >= (rows := self.packing_of(epoch)[0].rows):
            epoch, row = epoch + 1, row - rows
        return Position(position.step + steps, epoch, row)

    def batches_of(self, position: Position, windows: Tensor, cuts: Cuts) -> Iterator[Batch]:
        """The batch of each step of a chunk, laid out on the device."""
        local = self.config.batch_size // self.ranks
        ids = as_ids(windows.to(self.device, non_blocking=True))
        whole = dense(ids, self.vocabulary) if cuts.lengths is None else paper(ids, cuts, self.vocabulary)
        if self.config.cross_document_attention:
            whole.pop("documents", None)
        if self.config.whole_word_masking:
            whole["is_continuation"] = self.is_continuation[whole["input_ids"]]
        rows = torch.arange(self.rank * local, (self.rank + 1) * local, device=self.device)
        steps = torch.arange(position.step, position.step + len(ids) // local, device=self.device)
        for number, step in enumerate(steps):
            part = slice(number * local, (number + 1) * local)
            batch = Batch(step=step, rows=rows, **{name: tensor[part] for name, tensor in whole.items()})
            yield batch.listed(self.most_documents(cuts.starts[part]))

    def most_documents(self, starts: NDArray) -> int | None:
        """A round number that the documents of these rows do not exceed: batches have few shapes then."""
        if self.begins is None:
            return None
        count = int(documents_in(starts, self.config.length - 1, self.begins).sum())
        return len(starts) * 2 ** max(0, (-(-count // len(starts)) - 1).bit_length())


def packings(
    shards: Shards, config: DataConfig, split: Split, tokens: int
) -> Callable[[int], tuple[Packing, Callable[[NDArray], NDArray]]]:
    """A function from an epoch to its rows and their order; validation rows keep the order of the text."""
    documents = document_begins(shards, split) if config.form == "paper" else None
    is_shuffled = split == "train"

    @lru_cache(maxsize=2)
    def packing_of(epoch: int) -> tuple[Packing, Callable[[NDArray], NDArray]]:
        packing: Packing
        if documents is None:
            packing = DensePacking(tokens, config.length, config.seed, epoch, is_shuffled)
        else:
            packing = PaperPacking(documents, config.length, config.seed, epoch)
        order = Permutation.drawn(packing.rows, config.seed, epoch) if is_shuffled else unchanged
        return packing, order

    return packing_of


def unchanged(places: NDArray) -> NDArray:
    """The order in which rows are numbered."""
    return places


def joined(cuts: list[Cuts]) -> Cuts:
    """The rows of several epochs in a row."""
    columns = {field.name: [getattr(part, field.name) for part in cuts] for field in fields(Cuts)}
    return Cuts(**{name: np.concatenate(column) for name, column in columns.items() if column[0] is not None})


def dense(windows: Tensor, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Rows of the form [CLS] tokens: each document of a row ends with its [SEP], and [CLS] belongs to the first."""
    input_ids = torch.nn.functional.pad(windows, (1, 0), value=vocabulary.cls_id)  # [B, L]
    is_end = input_ids == vocabulary.sep_id
    documents = is_end.cumsum(1, dtype=torch.int32) - is_end.int()
    return {"input_ids": input_ids, "documents": documents}


def paper(windows: Tensor, cuts: Cuts, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Rows of the form [CLS] A [SEP] B [SEP], or [CLS] A [SEP] where A is all the text, then padding."""
    device = windows.device
    text, first = (torch.from_numpy(part).to(device)[:, None] for part in (cuts.lengths, cuts.firsts))  # [B, 1]
    has_second = text > first
    column = torch.arange(windows.shape[1] + 3, device=device)  # [L]
    is_second = column > first + 1
    input_ids = windows.gather(1, (column - 1 - is_second.long()).clamp(0, windows.shape[1] - 1))  # [B, L]
    is_separator = (column == first + 1) | (has_second & (column == text + 2))
    attention_mask = column < text + 2 + has_second.long()
    input_ids = torch.where(is_separator, vocabulary.sep_id, input_ids)
    input_ids = torch.where(attention_mask, input_ids, vocabulary.pad_id)
    input_ids[:, 0] = vocabulary.cls_id
    segment_ids = (is_second & attention_mask).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "segment_ids": segment_ids}


def prefetched(items: Iterable[Item], ahead: int = 2) -> Iterator[Item]:
    """The items, made on a thread that is some ahead; an error on it is raised here."""
    queue: Queue[tuple[Item | None, BaseException | None]] = Queue(ahead)
    is_over = threading.Event()

    def fill() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
        except BaseException as error:
            put((None, error))

    def put(entry: tuple[Item | None, BaseException | None]) -> bool:
        while not is_over.is_set():
            try:
                queue.put(entry, timeout=0.1)
                return True
            except Full:
                continue
        return False

    threading.Thread(target=fill, daemon=True).start()
    try:
        while True:
            item, error = queue.get()
            if error is not None:
                raise error
            assert item is not None
            yield item
    finally:
        is_over.set()


def validation_batches(
    shards: Shards, config: DataConfig, *, rank: int = 0, ranks: int = 1, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """The held-out text in its order, once: whole batches, at least one, the same each time."""
    batches = BatchLoader(shards, config, split="validation", rank=rank, ranks=ranks, device=device)
    steps = max(1, batches.packing_of(0)[0].rows // config.batch_size)
    for _, batch in zip(range(steps), batches, strict=False):
        yield batch
