"""`electra inspect`: what is in a folder of shards, for the eyes of whoever is going to train on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra.config import Positional
from electra.data.packing import PackedRows, Permutation
from electra.data.shards import SPLITS, Shards, TokenRing, damaged_error, open_shards
from electra.errors import ConfigError
from electra.plotting import plot_document_lengths

BAR = 40


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show what is in a folder of shards."""

    shards: Positional[Path]
    """The folder that `electra shard` wrote."""
    rows: int = 10
    """How many rows to decode, as training meets them first."""
    length: int = 128
    """Tokens in each of these rows."""
    words: int = 20
    """How many of the words with [UNK] to list."""
    plot: Path | None = None
    """The PNG file of the document lengths; document-lengths.png beside the shards if not given."""
    verify: bool = False
    """Read all shards and compare their checksums."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"length is {self.length}; a row needs at least 2 tokens")
        for name in ("rows", "words"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")


@dataclass(frozen=True)
class Inspected:
    """What lies in a folder of shards."""

    folder: str
    shards: int
    vocabulary: int
    text_megabytes: float
    documents: dict[str, int]
    tokens: dict[str, int]
    replaced: int
    cut: int
    unknown_share: float
    uncovered: dict[str, int]
    lengths: dict[str, int]  # how many documents have so many tokens
    median_length: float
    rows: list[str]
    plot: str | None
    not_drawn: str | None  # why there is no plot
    is_verified: bool

    def __str__(self) -> str:
        """All of it, for a terminal."""
        checked = "checksums verified" if self.is_verified else "sizes right, checksums not verified"
        lines = [
            f"{self.folder}: {self.shards} shards of {self.text_megabytes:,.1f} MB of text, {checked}",
            *(
                f"{split:<12}{self.documents[split]:>14,} documents {self.tokens[split]:>16,} tokens"
                for split in SPLITS
            ),
            f"{self.replaced:,} invalid characters replaced, overlong documents cut at {self.cut:,} places",
            f"[UNK] is {self.unknown_share:.4%} of the tokens; vocabulary {self.vocabulary:,}",
            *(f"  {count:>10,}  {word}" for word, count in self.uncovered.items()),
            "",
            f"tokens in a document (median {self.median_length:,.0f})",
            *histogram_lines(self.lengths),
            f"drawn in {self.plot}" if self.plot else f"not drawn: {self.not_drawn}",
            "",
            *self.rows,
        ]
        return "\n".join(lines)


def inspect(config: InspectConfig) -> Inspected:
    """Read the index and the document ends, decode some rows, draw the lengths."""
    shards = open_shards(config.shards)
    if config.verify and (names := shards.damaged()):
        raise damaged_error(shards, names)
    index, lengths = shards.index, document_lengths(shards)
    plot, not_drawn = drawn(lengths, config)
    return Inspected(
        folder=str(config.shards),
        shards=len(index.shards),
        vocabulary=shards.tokenizer.vocabulary.size,
        text_megabytes=index.total("text_bytes") / 1e6,
        documents=index.totals("documents"),
        tokens=index.totals("tokens"),
        replaced=index.total("replaced"),
        cut=index.total("cut"),
        unknown_share=index.total("unknown") / sum(index.totals("tokens").values()),
        uncovered=index.uncovered(config.words),
        lengths=histogram(lengths),
        median_length=float(np.median(lengths)),
        rows=decoded_rows(shards, config.rows, config.length),
        plot=plot,
        not_drawn=not_drawn,
        is_verified=config.verify,
    )


def document_lengths(shards: Shards) -> NDArray:
    """The tokens of every document, its [SEP] not counted."""
    ends = [part.astype(np.int64) for split in SPLITS for part in shards.ends(split)]
    return np.concatenate([np.diff(part, prepend=0) - 1 for part in ends])


def histogram(lengths: NDArray) -> dict[str, int]:
    """How many documents lie between powers of two."""
    powers, counts = np.unique(np.log2(lengths).astype(int), return_counts=True)
    return {f"{1 << power}–{(2 << power) - 1}": int(count) for power, count in zip(powers, counts, strict=True)}


def histogram_lines(lengths: dict[str, int]) -> list[str]:
    """The histogram as bars of characters."""
    most = max(lengths.values())
    return [f"{name:>20} {count:>12,} {'█' * round(BAR * count / most)}" for name, count in lengths.items()]


def decoded_rows(shards: Shards, rows: int, length: int) -> list[str]:
    """The first rows of the first epoch, dense, with seed 0."""
    ring = TokenRing(shards, "train" if shards.index.totals("tokens")["train"] else "validation")
    packed = PackedRows(len(ring), length, seed=0, epoch=0, shuffle=True)
    order = Permutation.for_epoch(packed.num_rows, seed=0, epoch=0)
    starts = packed.spans(order(np.arange(min(rows, packed.num_rows)))).starts
    library, cls = shards.tokenizer.library, shards.tokenizer.vocabulary.cls_id
    windows = [ring.read_across_parts(int(start), packed.width).tolist() for start in starts]
    return [library.decode([cls, *window], skip_special_tokens=False) for window in windows]


def drawn(lengths: NDArray, config: InspectConfig) -> tuple[str | None, str | None]:
    """The path of the histogram as a PNG; or why there is none, which is an error only where it was asked for."""
    path = config.plot or config.shards / "document-lengths.png"
    try:
        is_written = plot_document_lengths(path, lengths)
    except OSError as error:
        if config.plot is not None:
            raise
        return None, f"{error.strerror or error} in {config.shards}; --plot takes another file"
    return (str(path), None) if is_written else (None, "that takes matplotlib (pip install matplotlib)")
