"""Shards: the tokens of a corpus on disk, memory-mapped, with an index.

A shard is a safetensors file with two arrays per split: `tokens` (the documents, concatenated, each ending with [SEP])
and `ends` (the end of each document). index.json is written last: if it exists, all shards are complete.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors.numpy import save

from electra.data.tokenizer import TextTokenizer, load_tokenizer
from electra.errors import DataError
from electra.runfolder import CHECKSUM, file_checksum

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
INDEX = "index.json"
UNFINISHED = "unfinished.json"
"""The settings of an `electra shard` run; removed when its index is written."""
TOKENIZER = "tokenizer"
DTYPES = {"U16": np.uint16, "U32": np.uint32}


@dataclass(frozen=True)
class ShardInfo:
    """The index entry of a shard."""

    name: str
    bytes: int
    sha256: str
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split, [SEP] included
    text_bytes: int
    replaced: int  # invalid UTF-8 characters
    cut: int  # splits of overlong documents
    unknown: int  # number of [UNK] tokens
    uncovered: dict[str, int]  # most frequent words that contain [UNK], with their counts


@dataclass(frozen=True)
class ShardIndex:
    """The content of a folder of shards and how it was made."""

    settings: dict[str, Any]
    command: str  # the command line that makes these shards
    shards: list[ShardInfo]

    def totals_by_split(self, field: Literal["documents", "tokens"]) -> dict[str, int]:
        """Number of documents or tokens by split."""
        return {split: sum(getattr(shard, field)[split] for shard in self.shards) for split in SPLITS}

    def total_over_shards(self, field: Literal["text_bytes", "replaced", "cut", "unknown"]) -> int:
        """The sum of a field over all shards."""
        return sum(getattr(shard, field) for shard in self.shards)

    def most_frequent_words_with_unk(self, limit: int) -> dict[str, int]:
        """The most frequent words that contain [UNK], with their counts."""
        words: Counter[str] = Counter()
        for shard in self.shards:
            words.update(shard.uncovered)
        return most_frequent_words(words, limit)

    def to_json(self) -> bytes:
        totals = {"documents": self.totals_by_split("documents"), "tokens": self.totals_by_split("tokens")}
        return json.dumps({"totals": totals, **asdict(self)}, indent=1, ensure_ascii=False).encode() + b"\n"


def most_frequent_words(words: Counter[str], limit: int) -> dict[str, int]:
    """The `limit` most frequent words with their counts; ties are in alphabetical order."""
    return dict(sorted(words.items(), key=lambda word: (-word[1], word[0]))[:limit])


def shard_file_name(number: int) -> str:
    return f"{number:05d}.safetensors"


def serialize_shard(documents: dict[Split, list[bytes]], info: dict[str, Any], dtype: np.dtype) -> bytes:
    """The content of a shard file from the encoded documents of each split; `info` are fields of `ShardInfo`."""
    arrays = {}
    for split, encoded in documents.items():
        arrays[f"{split}.tokens"] = np.frombuffer(b"".join(encoded), dtype)
        arrays[f"{split}.ends"] = np.cumsum([len(ids) // dtype.itemsize for ids in encoded], dtype=np.uint32)
    return save(arrays, {"facts": json.dumps(info)})


def read_shard_info(name: str, content: bytes) -> ShardInfo:
    """The index entry of a shard file with this content."""
    header, _ = read_safetensors_header(content)
    counts: dict[str, Any] = {
        count: {split: header[f"{split}.{array}"]["shape"][0] for split in SPLITS}
        for count, array in (("documents", "ends"), ("tokens", "tokens"))
    }
    facts = json.loads(header["__metadata__"]["facts"])
    return ShardInfo(name=name, bytes=len(content), sha256=sha256(content).hexdigest(), **counts, **facts)


def read_safetensors_header(content: bytes | mmap) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset of its data."""
    offset = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:offset]), offset


@dataclass(frozen=True)
class Shards:
    """A complete folder of shards, open for reading."""

    folder: Path
    index: ShardIndex

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the shards were made with."""
        return load_tokenizer(self.folder / TOKENIZER)

    def tokens_by_shard(self, split: Split) -> list[NDArray]:
        """The tokens of each shard, memory-mapped."""
        return [self.memory_map_array(shard, f"{split}.tokens") for shard in self.index.shards]

    def document_ends_by_shard(self, split: Split) -> list[NDArray]:
        """The end of each document in `tokens` of each shard, memory-mapped."""
        return [self.memory_map_array(shard, f"{split}.ends") for shard in self.index.shards]

    def memory_map_array(self, shard: ShardInfo, name: str) -> NDArray:
        with open(self.folder / shard.name, "rb") as file:
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        try:
            header, offset = read_safetensors_header(mapped)
            [length], (start, _) = header[name]["shape"], header[name]["data_offsets"]
            return np.frombuffer(mapped, DTYPES[header[name]["dtype"]], length, offset + start)
        except (ValueError, KeyError):
            raise damaged_shards_error(self, [shard.name]) from None

    def find_damaged_shards(self) -> list[str]:
        """The names of shards that are missing or whose checksum is not the index's."""
        return [
            shard.name
            for shard in self.index.shards
            if self.is_missing_or_truncated(shard) or file_checksum(self.folder / shard.name) != CHECKSUM + shard.sha256
        ]

    def is_missing_or_truncated(self, shard: ShardInfo) -> bool:
        """Whether a shard is missing or truncated."""
        path = self.folder / shard.name
        return not path.exists() or path.stat().st_size != shard.bytes

    def check_same_tokenizer(self, model_tokenizer: TextTokenizer) -> None:
        """Raise if a model's tokenizer is not the one that the shards were made with."""
        if self.tokenizer.fingerprint != model_tokenizer.fingerprint:
            ours, other = (
                f"{tokenizer.vocabulary.size:,} entries, {tokenizer.fingerprint[:8]}"
                for tokenizer in (self.tokenizer, model_tokenizer)
            )
            raise DataError(
                f"{self.folder} was made with another tokenizer ({ours}) than the model's ({other}); make shards with "
                "the model's: electra shard --tokenizer MODEL …"
            )


def open_shards(folder: Path) -> Shards:
    """The shards in a folder; raises if they are missing, unfinished or truncated."""
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        raise DataError(f"the shards in {folder} are unfinished; run the same electra shard command again to resume")
    if not (folder / INDEX).exists():
        corpus = folder if folder.is_file() else "…"
        raise DataError(
            f"{explain_missing_shards(folder)}; make shards with: electra shard --corpus {corpus} --output shards/"
        )
    shards = Shards(folder, read_index(folder))
    damaged = [shard.name for shard in shards.index.shards if shards.is_missing_or_truncated(shard)]
    if damaged:
        raise damaged_shards_error(shards, damaged)
    return shards


def explain_missing_shards(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file, not a folder of shards"
    return f"no shards in {path}" if path.exists() else f"the folder {path} does not exist"


def read_index(folder: Path) -> ShardIndex:
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=ShardIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / INDEX} is damaged ({error}); remove {folder} and make the shards again") from None


def damaged_shards_error(shards: Shards, names: list[str]) -> DataError:
    """An error with the command that makes the damaged shards again, in their present folder."""
    words = shlex.split(shards.index.command)
    words[words.index("--output") + 1] = str(shards.folder)
    return DataError(
        f"damaged shards in {shards.folder}: {', '.join(names)}; make only these again with: {shlex.join(words)}"
    )


class TokenRing:
    """The tokens of a split over all shards, memory-mapped and read as a ring: the first follows the last."""

    def __init__(self, shards: Shards, split: Split):
        raise_open_file_limit(len(shards.index.shards))
        self.parts = [part for part in shards.tokens_by_shard(split) if len(part)]
        if not self.parts:
            raise DataError(f"{shards.folder} has no {split} tokens; make shards with another --validation-fraction")
        sizes = [len(part) for part in self.parts]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.dtype = self.parts[0].dtype
        self.window_views: dict[int, list[NDArray]] = {}  # by width

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read_rows_into(self, starts: NDArray, out: NDArray) -> None:
        """Fill `out` [R, width] with the tokens from each start [R] on, one shard at a time."""
        width = out.shape[1]
        shard_of_row = np.searchsorted(self.starts, starts, side="right") - 1
        is_inside = starts + width <= self.ends[shard_of_row]
        for row in np.flatnonzero(~is_inside):
            out[row] = self.read_across_shards(int(starts[row]), width)
        inside = np.flatnonzero(is_inside)
        by_shard = inside[np.argsort(shard_of_row[inside], kind="stable")]
        numbers, firsts = np.unique(shard_of_row[by_shard], return_index=True)
        for number, rows in zip(numbers, np.split(by_shard, firsts[1:]), strict=False):  # no number if no row is inside
            out[rows] = self.sliding_windows(width)[number][starts[rows] - self.starts[number]]

    def sliding_windows(self, width: int) -> list[NDArray]:
        """For each shard, a view of all its windows of this width."""
        if width not in self.window_views:
            padded = [part if len(part) >= width else np.zeros(width, part.dtype) for part in self.parts]
            self.window_views[width] = [sliding_window_view(part, width) for part in padded]
        return self.window_views[width]

    def read_across_shards(self, start: int, width: int) -> NDArray:
        """[width] tokens that may continue in the next shard."""
        pieces: list[NDArray] = []
        while width:
            start %= len(self)
            number = int(np.searchsorted(self.starts, start, side="right")) - 1
            local = start - int(self.starts[number])
            pieces.append(self.parts[number][local : local + width])
            start += len(pieces[-1])
            width -= len(pieces[-1])
        return np.concatenate(pieces)


def raise_open_file_limit(num_shards: int) -> None:
    """Raise this process's limit of open files if needed: each memory-mapped shard holds one."""
    try:
        import resource
    except ImportError:  # Windows, where the limit does not count mapped files
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_shards + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
