"""Shards: tokens of a corpus on disk, memory-mapped, with an index that says what they are.

A shard is one safetensors file with, for each split, `tokens` (documents end to end, each ending with [SEP]) and `ends`
(where each document ends). index.json is written last: where it is, everything else is whole.
"""

from __future__ import annotations

import json
import resource
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import file_digest, sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors.numpy import save

from electra.data.tokenizer import TextTokenizer, load_tokenizer
from electra.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
INDEX = "index.json"
UNFINISHED = "unfinished.json"
"""The settings of a run, there until its index is."""
TOKENIZER = "tokenizer"
RUN = ("metrics.jsonl", "config.json")
"""Files that runs and models have, and shards have not."""
TYPES = {"U16": np.uint16, "U32": np.uint32}


@dataclass(frozen=True)
class Shard:
    """What the index knows of one shard."""

    name: str
    bytes: int
    sha256: str
    documents: dict[str, int]  # of each split
    tokens: dict[str, int]  # of each split, [SEP] included
    text_bytes: int
    replaced: int  # characters that were not valid UTF-8
    cut: int  # places where an overlong document was cut
    unknown: int  # tokens that are [UNK]
    uncovered: dict[str, int]  # the most frequent words with [UNK] in them


@dataclass(frozen=True)
class Index:
    """What lies in a folder of shards and how it was made."""

    settings: dict[str, Any]
    command: str  # makes these shards again
    shards: list[Shard]

    def totals(self, count: Literal["documents", "tokens"]) -> dict[str, int]:
        """Documents or tokens of each split."""
        return {split: sum(getattr(shard, count)[split] for shard in self.shards) for split in SPLITS}

    def total(self, count: Literal["text_bytes", "replaced", "cut", "unknown"]) -> int:
        """What the shards counted, together."""
        return sum(getattr(shard, count) for shard in self.shards)

    def uncovered(self, most: int) -> dict[str, int]:
        """The most frequent words with [UNK] in them."""
        words: Counter[str] = Counter()
        for shard in self.shards:
            words.update(shard.uncovered)
        return most_frequent(words, most)

    def as_json(self) -> bytes:
        """The content of index.json."""
        totals = {"documents": self.totals("documents"), "tokens": self.totals("tokens")}
        return json.dumps({"totals": totals, **asdict(self)}, indent=1, ensure_ascii=False).encode() + b"\n"


def most_frequent(words: Counter[str], most: int) -> dict[str, int]:
    """The words that came most often, with how often; of equals, the first in the alphabet."""
    return dict(sorted(words.items(), key=lambda word: (-word[1], word[0]))[:most])


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"{number:05d}.safetensors"


def shard_bytes(documents: dict[Split, list[bytes]], facts: dict[str, Any], type: np.dtype) -> bytes:
    """The content of a shard with the encoded documents of each split."""
    arrays = {}
    for split, encoded in documents.items():
        arrays[f"{split}.tokens"] = np.frombuffer(b"".join(encoded), type)
        arrays[f"{split}.ends"] = np.cumsum([len(ids) // type.itemsize for ids in encoded], dtype=np.uint32)
    return save(arrays, {"facts": json.dumps(facts)})


def describe(name: str, content: bytes) -> Shard:
    """What the index keeps of a shard with this content."""
    header, _ = header_of(content)
    counts: dict[str, Any] = {
        count: {split: header[f"{split}.{array}"]["shape"][0] for split in SPLITS}
        for count, array in (("documents", "ends"), ("tokens", "tokens"))
    }
    facts = json.loads(header["__metadata__"]["facts"])
    return Shard(name=name, bytes=len(content), sha256=sha256(content).hexdigest(), **counts, **facts)


def header_of(content: bytes | mmap) -> tuple[dict[str, Any], int]:
    """The description at the head of a safetensors file, and where its data begins."""
    begin = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:begin]), begin


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Shards:
    """A finished folder of shards, open for reading."""

    folder: Path
    index: Index

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the shards were made with."""
        return load_tokenizer(self.folder / TOKENIZER)

    def tokens(self, split: Split) -> list[NDArray]:
        """The tokens of each shard, memory-mapped."""
        return [self.array(shard, f"{split}.tokens") for shard in self.index.shards]

    def ends(self, split: Split) -> list[NDArray]:
        """Where each document of each shard ends, memory-mapped."""
        return [self.array(shard, f"{split}.ends") for shard in self.index.shards]

    def array(self, shard: Shard, name: str) -> NDArray:
        """One array of a shard, memory-mapped."""
        with open(self.folder / shard.name, "rb") as file:
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        try:
            header, begin = header_of(mapped)
            [length], (start, _) = header[name]["shape"], header[name]["data_offsets"]
            return np.frombuffer(mapped, TYPES[header[name]["dtype"]], length, begin + start)
        except (ValueError, KeyError):
            raise damaged_error(self, [shard.name]) from None

    def damaged(self) -> list[str]:
        """The shards that are not what the index says, by their checksums."""
        return [shard.name for shard in self.index.shards if self.is_damaged(shard)]

    def is_damaged(self, shard: Shard) -> bool:
        """Whether a shard's bytes are others than the index says."""
        return self.has_wrong_size(shard) or checksum(self.folder / shard.name) != shard.sha256

    def has_wrong_size(self, shard: Shard) -> bool:
        """Whether a shard is missing or cut."""
        path = self.folder / shard.name
        return not path.exists() or path.stat().st_size != shard.bytes

    def require_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise unless a model's tokenizer is the one these shards were made with."""
        ours, other = self.tokenizer, tokenizer
        if ours.fingerprint != other.fingerprint:
            raise DataError(
                f"{self.folder} was made with another tokenizer ({ours.vocabulary.size:,} entries, "
                f"{ours.fingerprint[:8]}) than the model's ({other.vocabulary.size:,} entries, "
                f"{other.fingerprint[:8]}); make shards with the model's: electra shard --tokenizer MODEL …"
            )


def open_shards(folder: Path) -> Shards:
    """The shards in a folder; raises if they are missing, unfinished or cut."""
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        raise DataError(f"the shards in {folder} are unfinished; run the command that makes them again, it goes on")
    if not (folder / INDEX).exists():
        corpus = folder if folder.is_file() else "…"
        raise DataError(f"{found_at(folder)}; make shards with: electra shard --corpus {corpus} --output shards/")
    shards = Shards(folder, read_index(folder))
    wrong = [shard.name for shard in shards.index.shards if shards.has_wrong_size(shard)]
    if wrong:
        raise damaged_error(shards, wrong)
    return shards


def found_at(path: Path) -> str:
    """What there is in place of shards."""
    if path.is_file():
        return f"{path} is a file, and shards are a folder"
    if not path.exists():
        return f"there is no folder {path}"
    is_run = any((path / name).exists() for name in RUN)
    return f"{path} is a run or a model, not a folder of shards" if is_run else f"there are no shards in {path}"


def read_index(folder: Path) -> Index:
    """The index of a folder of shards."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in content["shards"]]
        return Index(settings=content["settings"], command=content["command"], shards=shards)
    except (ValueError, KeyError, TypeError):
        names = ", ".join(field.name for field in fields(Index))
        raise DataError(
            f"{folder / INDEX} is damaged: it must be JSON with {names}; delete it and the shards are checked "
            "and indexed again by the command that made them"
        ) from None


def damaged_error(shards: Shards, names: list[str]) -> DataError:
    """Which shards are damaged and what makes only them again, wherever they lie now."""
    words = shlex.split(shards.index.command)
    words[words.index("--output") + 1] = str(shards.folder)
    return DataError(
        f"damaged in {shards.folder}: {', '.join(names)}; this makes only what is damaged again: {shlex.join(words)}"
    )


class TokenRing:
    """The tokens of a split over all shards, memory-mapped and read as a ring: the first follows the last."""

    def __init__(self, shards: Shards, split: Split):
        raise_open_file_limit(len(shards.index.shards))
        self.parts = [part for part in shards.tokens(split) if len(part)]
        if not self.parts:
            raise DataError(f"{shards.folder} has no {split} tokens; make shards with another --validation-fraction")
        sizes = [len(part) for part in self.parts]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.dtype = self.parts[0].dtype
        self.window_views: dict[int, list[NDArray]] = {}  # by width

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, starts: NDArray, out: NDArray) -> None:
        """Fill `out` [R, width] with the tokens from each start [R] on, one shard at a time."""
        width = out.shape[1]
        part_of_row = np.searchsorted(self.starts, starts, side="right") - 1
        is_inside = starts + width <= self.ends[part_of_row]
        for row in np.flatnonzero(~is_inside):
            out[row] = self.read_across_parts(int(starts[row]), width)
        inside = np.flatnonzero(is_inside)
        by_part = inside[np.argsort(part_of_row[inside], kind="stable")]
        numbers, firsts = np.unique(part_of_row[by_part], return_index=True)
        for number, rows in zip(numbers, np.split(by_part, firsts[1:]), strict=False):  # no number if no row is inside
            out[rows] = self.windows(width)[number][starts[rows] - self.starts[number]]

    def windows(self, width: int) -> list[NDArray]:
        """For each shard, a view of all its windows of this width."""
        if width not in self.window_views:
            padded = [part if len(part) >= width else np.zeros(width, part.dtype) for part in self.parts]
            self.window_views[width] = [sliding_window_view(part, width) for part in padded]
        return self.window_views[width]

    def read_across_parts(self, start: int, width: int) -> NDArray:
        """[width] tokens that may continue in the next shard."""
        pieces: list[NDArray] = []
        while width:
            start %= len(self)
            number = int(np.searchsorted(self.starts, start, side="right")) - 1
            local = start - int(self.starts[number])
            pieces.append(self.parts[number][local : local + width])
            start, width = start + len(pieces[-1]), width - len(pieces[-1])
        return np.concatenate(pieces)


def raise_open_file_limit(num_shards: int) -> None:
    """Raise this process's limit of open files if needed: each memory-mapped shard holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_shards + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
