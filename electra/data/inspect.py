"""`electra inspect`: statistics and sample rows of a folder of shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra.config import Positional
from electra.data.packing import PackedRows
from electra.data.shards import SPLITS, Shards, TokenRing, open_shards
from electra.errors import check_range
from electra.formatting import format_count
from electra.plotting import plot_document_lengths

BAR_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show the content of a folder of shards."""

    shards: Positional[Path]
    """Folder of shards (electra shard)."""
    rows: int = 10
    """Number of rows to decode, in training order."""
    length: int = 128
    """Tokens per decoded row."""
    words: int = 20
    """Number of words with [UNK] to list."""
    plot: Path | None = None
    """PNG file for the histogram of document lengths, by default document-lengths.png in the folder of shards."""
    verify: bool = False
    """Verify the checksums of all shards."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        check_range(self, "length", at_least=2)
        check_range(self, "rows", "words", at_least=0)


@dataclass(frozen=True)
class InspectResult:
    """The result of `electra inspect`."""

    folder: str
    shards: int
    vocab_size: int
    text_megabytes: float
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    replaced: int  # invalid UTF-8 characters
    cut: int  # splits of overlong documents
    without_text: int  # rows whose text field is null or missing
    unknown_fraction: float  # of all tokens
    uncovered: dict[str, int]  # most frequent words that contain [UNK], with their counts
    length_histogram: dict[str, int]  # number of documents by range of tokens
    median_length: float
    rows: list[str]
    plot: str | None
    plot_error: str | None  # why there is no plot
    is_verified: bool

    def __str__(self) -> str:
        checked = "checksums verified" if self.is_verified else "file sizes correct, checksums not verified"
        lines = [
            f"{self.folder}: {format_count(self.shards, 'shard')} of {self.text_megabytes:,.1f} MB of text, {checked}",
            *(
                f"{split:<12}{self.documents[split]:>14,} documents {self.tokens[split]:>16,} tokens"
                for split in SPLITS
            ),
            f"{format_count(self.replaced, 'invalid character')} replaced, "
            f"overlong documents cut in {format_count(self.cut, 'place')}, "
            f"{format_count(self.without_text, 'row')} without text",
            f"[UNK] is {self.unknown_fraction:.4%} of the tokens; vocabulary of {self.vocab_size:,}"
            f"{'; most frequent words with [UNK]:' * bool(self.uncovered)}",
            *(f"  {count:>10,}  {word}" for word, count in self.uncovered.items()),
            "",
            f"tokens per document (median {self.median_length:,.0f})",
            *format_histogram(self.length_histogram),
            f"plot: {self.plot}" if self.plot else f"no plot: {self.plot_error}",
            "",
            *self.rows,
        ]
        return "\n".join(lines)


def inspect(config: InspectConfig) -> InspectResult:
    """Read the index and the document lengths, decode some rows, plot the lengths."""
    shards = open_shards(config.shards)
    for file in shards.files if config.verify else ():
        file.verify_all()
    index = shards.index
    lengths = document_lengths(shards)
    plot, plot_error = try_plot_lengths(lengths, config)
    return InspectResult(
        folder=str(config.shards),
        shards=len(index.shards),
        vocab_size=shards.tokenizer.vocabulary.size,
        text_megabytes=index.total_over_shards("text_bytes") / 1e6,
        documents=index.totals_by_split("documents"),
        tokens=index.totals_by_split("tokens"),
        replaced=index.total_over_shards("replaced"),
        cut=index.total_over_shards("cut"),
        without_text=index.total_over_shards("without_text"),
        unknown_fraction=index.total_over_shards("unknown") / sum(index.totals_by_split("tokens").values()),
        uncovered=index.most_frequent_words_with_unk(config.words),
        length_histogram=length_histogram(lengths),
        median_length=float(np.median(lengths)),
        rows=decode_first_rows(shards, config.rows, config.length),
        plot=plot,
        plot_error=plot_error,
        is_verified=config.verify,
    )


def document_lengths(shards: Shards) -> NDArray:
    """Tokens of every document, without [SEP]."""
    ends = [shard_ends.astype(np.int64) for split in SPLITS for shard_ends in shards.document_ends_by_shard(split)]
    return np.concatenate([np.diff(shard_ends, prepend=0) - 1 for shard_ends in ends])


def length_histogram(lengths: NDArray) -> dict[str, int]:
    """Number of documents in ranges between powers of two."""
    powers, counts = np.unique(np.log2(lengths).astype(int), return_counts=True)
    return {f"{1 << power}–{(2 << power) - 1}": int(count) for power, count in zip(powers, counts, strict=True)}


def format_histogram(counts: dict[str, int]) -> list[str]:
    """The histogram as lines with bars."""
    scale = BAR_CHARACTERS / max(counts.values())
    return [f"{name:>20} {count:>12,} {'█' * round(scale * count)}" for name, count in counts.items()]


def decode_first_rows(shards: Shards, num_rows: int, length: int) -> list[str]:
    """The first packed rows of the first epoch with seed 0."""
    ring = TokenRing(shards, "train" if shards.index.totals_by_split("tokens")["train"] else "validation")
    packed = PackedRows(len(ring), length, seed=0, epoch=0, shuffle=True)
    starts = packed.spans(np.arange(min(num_rows, packed.num_rows))).starts
    library, cls_id = shards.tokenizer.library, shards.tokenizer.vocabulary.cls_id
    rows = [ring.read_across_shards(int(start), packed.width).tolist() for start in starts]
    return [library.decode([cls_id, *row], skip_special_tokens=False) for row in rows]


def try_plot_lengths(lengths: NDArray, config: InspectConfig) -> tuple[str | None, str | None]:
    """The path of the plot, or why there is none; raises only if --plot is set and cannot be written."""
    path = config.plot or config.shards / "document-lengths.png"
    try:
        is_written = plot_document_lengths(path, lengths)
    except OSError as error:
        if config.plot is not None:
            raise
        return None, f"{error.strerror or error} in {config.shards}; choose another file with --plot"
    return (str(path), None) if is_written else (None, "matplotlib is missing (pip install matplotlib)")
