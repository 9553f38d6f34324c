"""Shards: the tokens of a corpus on disk, memory-mapped, with an index.

A shard is a safetensors file with two arrays per split: `tokens` (the documents, concatenated, each ending with [SEP])
and `ends` (the end of each document). The last array, `checksums`, holds CRC-32s as bytes: of the header, then of each
block of the other arrays, which are compared when a block is first read. index.json is written last: if it exists, all
shards are complete.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors.numpy import save

from electra.data.tokenizer import TextTokenizer, load_tokenizer
from electra.errors import DataError
from electra.runfolder import CHECKSUM, report_damage

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
INDEX = "index.json"
UNFINISHED = "unfinished.json"
"""The settings of an `electra shard` run; removed when its index is written."""
PART_RECORD = "part-{}-of-{}.json"
"""The record of a finished part; removed when the index is written."""
TOKENIZER = "tokenizer"
DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32}
CHECKSUMS_ARRAY = "checksums"
CHECKSUM_FIELD = b',\n "checksum": '
CHECKSUM_BLOCK_BYTES = 1 << 12
"""Bytes that one checksum covers: a row of a batch lies in one or two blocks."""
SHARD_NAME = re.compile(r"\d{5,}\.safetensors")


@dataclass(frozen=True)
class ShardInfo:
    """The index entry of a shard."""

    name: str
    bytes: int
    checksum: int  # CRC-32 of the checksums in the file
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split, [SEP] included
    text_bytes: int
    text_checksum: int  # CRC-32
    replaced: int  # invalid UTF-8 characters
    cut: int  # splits of overlong documents
    without_text: int  # rows whose text field is null or missing
    unknown: int  # number of [UNK] tokens
    uncovered: dict[str, int]  # most frequent words that contain [UNK], with their counts

    def __post_init__(self) -> None:
        if not SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a shard")
        if not set(SPLITS) == set(self.documents) == set(self.tokens):
            raise ValueError(f"documents and tokens are not counts by split: {', '.join(SPLITS)}")


@dataclass(frozen=True)
class ShardIndex:
    """The content of a folder of shards and how it was made."""

    settings: dict[str, Any]
    command: str  # the command line that makes these shards
    shards: list[ShardInfo]

    def __post_init__(self) -> None:
        if not self.shards or "--output" not in shlex.split(self.command):
            raise ValueError("it lists no shards, or not the command that made them")

    def totals_by_split(self, field: Literal["documents", "tokens"]) -> dict[str, int]:
        """Number of documents or tokens by split."""
        return totals_by_split(self.shards, field)

    def total_over_shards(self, field: Literal["text_bytes", "replaced", "cut", "without_text", "unknown"]) -> int:
        """The sum of a field over all shards."""
        return sum(getattr(shard, field) for shard in self.shards)

    def most_frequent_words_with_unk(self, limit: int) -> dict[str, int]:
        """The most frequent words that contain [UNK], with their counts."""
        words: Counter[str] = Counter()
        for shard in self.shards:
            words.update(shard.uncovered)
        return most_frequent_words(words, limit)

    def to_json(self) -> bytes:
        """The content of index.json, which ends with its own checksum."""
        totals = {"documents": self.totals_by_split("documents"), "tokens": self.totals_by_split("tokens")}
        content = json.dumps({"totals": totals, **asdict(self)}, indent=1, ensure_ascii=False).encode()
        return append_checksum(content.removesuffix(b"\n}"))


def totals_by_split(shards: list[ShardInfo], field: Literal["documents", "tokens"]) -> dict[str, int]:
    """Number of documents or tokens in some shards by split."""
    return {split: sum(getattr(shard, field)[split] for shard in shards) for split in SPLITS}


def append_checksum(fields: bytes) -> bytes:
    """The end of a JSON object whose other fields are given, with the checksum of these."""
    return fields + CHECKSUM_FIELD + b"%d\n}\n" % crc32(fields)


def most_frequent_words(words: Counter[str], limit: int) -> dict[str, int]:
    """The `limit` most frequent words with their counts; ties are in alphabetical order."""
    return dict(sorted(words.items(), key=lambda word: (-word[1], word[0]))[:limit])


def shard_file_name(number: int) -> str:
    return f"{number:05d}.safetensors"


def shard_number(name: str) -> int:
    """The number in the name of a shard."""
    return int(name.partition(".")[0])


def serialize_shard(documents: dict[Split, list[bytes]], info: dict[str, Any], dtype: np.dtype) -> bytes:
    """The content of a shard file from the encoded documents of each split; `info` are fields of `ShardInfo`."""
    arrays: dict[str, NDArray] = {}
    for split, encoded in documents.items():
        arrays[f"{split}.tokens"] = np.frombuffer(b"".join(encoded), dtype)
        arrays[f"{split}.ends"] = np.cumsum([len(ids) // dtype.itemsize for ids in encoded], dtype=np.uint32)
    size = sum(array.nbytes for array in arrays.values())
    num_blocks = -(-size // CHECKSUM_BLOCK_BYTES)
    arrays[CHECKSUMS_ARRAY] = np.zeros(4 + 4 * num_blocks, np.uint8)  # safetensors writes uint8 last
    content = bytearray(save(arrays, {"facts": json.dumps(info)}))
    start = len(content) - len(arrays[CHECKSUMS_ARRAY]) - size
    header, data = memoryview(content)[:start], memoryview(content)[start : start + size]
    blocks = [header, *(data[at : at + CHECKSUM_BLOCK_BYTES] for at in range(0, size, CHECKSUM_BLOCK_BYTES))]
    memoryview(content)[start + size :] = np.array([crc32(block) for block in blocks], np.uint32).tobytes()
    return bytes(content)


class ArrayEntry(msgspec.Struct):
    """An array in the header of a safetensors file."""

    dtype: Literal["U8", "U16", "U32"]
    shape: tuple[int]
    data_offsets: tuple[int, int]


class ShardFile:
    """A shard, memory-mapped; a block is compared with its checksum when it is first read.

    `advice`, with which errors end, tells how to make a damaged shard again.
    """

    def __init__(self, content: bytes | mmap, path: Path, advice: str = ""):
        self.content, self.path, self.advice = content, path, advice
        start = 8 + int.from_bytes(content[:8], "little")
        try:
            header = msgspec.json.decode(content[8:start], type=dict[str, msgspec.Raw])
            self.info = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])["facts"]  # JSON
            entries = {key: msgspec.json.decode(entry, type=ArrayEntry) for key, entry in header.items()}
            self.offsets = {key: entry.data_offsets[0] for key, entry in entries.items()}
            self.arrays = {
                key: np.frombuffer(content, DTYPES[entry.dtype], entry.shape[0], start + self.offsets[key])
                for key, entry in entries.items()
            }
            self.data = np.frombuffer(content, np.uint8, self.offsets[CHECKSUMS_ARRAY], start)
            checksums = self.arrays[CHECKSUMS_ARRAY].view(np.uint32)
            self.checksums, is_header_intact = checksums[1:], crc32(content[:start]) == checksums[0]
        except (ValueError, LookupError, msgspec.MsgspecError, RecursionError, OverflowError):
            raise self.damage() from None
        if not is_header_intact or len(self.checksums) != -(-len(self.data) // CHECKSUM_BLOCK_BYTES):
            raise self.damage()
        self.is_verified = np.zeros(len(self.checksums), bool)

    def damage(self) -> DataError:
        return DataError(f"{self.path} is damaged{self.advice}")

    def checksum(self) -> int:
        """The checksum of its checksums."""
        return crc32(self.arrays[CHECKSUMS_ARRAY].data)

    def read_info(self) -> ShardInfo:
        """The index entry of this shard."""
        counts = {
            count: {split: len(self.arrays[f"{split}.{array}"]) for split in SPLITS}
            for count, array in (("documents", "ends"), ("tokens", "tokens"))
        }
        fixed = {"name": self.path.name, "bytes": len(self.content), "checksum": self.checksum()}
        return msgspec.convert(fixed | counts | json.loads(self.info), ShardInfo)

    def check_entry(self, entry: ShardInfo) -> None:
        """Raise if this is not the shard of an index entry."""
        if (len(self.content), self.checksum()) != (entry.bytes, entry.checksum):
            raise self.damage()

    def verify(self, starts: NDArray, num_bytes: int) -> None:
        """Raise if the `num_bytes` bytes of `data` from one of `starts` [R] on do not match their checksums."""
        first, last = starts // CHECKSUM_BLOCK_BYTES, (starts + num_bytes - 1) // CHECKSUM_BLOCK_BYTES
        blocks = np.minimum(first[:, None] + np.arange(1 + -(-num_bytes // CHECKSUM_BLOCK_BYTES)), last[:, None])
        for block in np.unique(blocks[~self.is_verified[blocks]]).tolist():
            start = block * CHECKSUM_BLOCK_BYTES
            if crc32(self.data[start : start + CHECKSUM_BLOCK_BYTES].data) != self.checksums[block]:
                raise self.damage()
            self.is_verified[block] = True

    def verify_all(self) -> None:
        """Raise if any part does not match its checksum."""
        if len(self.data):
            self.verify(np.zeros(1, np.int64), len(self.data))


def open_shard_file(path: Path, advice: str = "") -> ShardFile:
    """Map a shard into memory."""
    if not path.is_file() or not path.stat().st_size:  # mmap refuses an empty file
        raise DataError(f"{path} is missing or empty{advice}")
    with open(path, "rb") as file:
        return ShardFile(mmap(file.fileno(), 0, access=ACCESS_READ), path, advice)


class ShardArray:
    """An array of a shard."""

    def __init__(self, file: ShardFile, key: str):
        self.file, self.offset = file, file.offsets[key]
        self.values = file.arrays[key]  # not verified

    def __len__(self) -> int:
        return len(self.values)

    def verify(self, starts: NDArray, count: int) -> None:
        """Raise if one of the `count` values from one of `starts` [R] on is damaged."""
        self.file.verify(self.offset + starts * self.values.itemsize, count * self.values.itemsize)

    def read(self, start: int = 0, end: int | None = None) -> NDArray:
        """A slice of its values, verified."""
        values = self.values[start:end]
        if len(values):
            self.verify(np.array([start]), len(values))
        return values


@dataclass(frozen=True)
class Shards:
    """A complete folder of shards, open for reading."""

    folder: Path
    index: ShardIndex

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the shards were made with."""
        try:
            tokenizer = load_tokenizer(self.folder / TOKENIZER)
            if CHECKSUM + tokenizer.fingerprint != self.index.settings.get("tokenizer"):
                raise DataError(f"{self.folder / TOKENIZER} is not the tokenizer that the shards were made with")
        except DataError as error:
            raise DataError(f"{error}{self.advice}") from None
        return tokenizer

    @cached_property
    def advice(self) -> str:
        """The end of an error: the command that makes what is damaged again, in the present folder."""
        words = shlex.split(self.index.command)
        words[words.index("--output") + 1] = str(self.folder)
        return f"; make only what is damaged again with: {shlex.join(words)}"

    @cached_property
    def files(self) -> list[ShardFile]:
        """All shards, memory-mapped; raises if one is missing or damaged."""
        raise_open_file_limit(len(self.index.shards))
        return [open_shard_file(self.folder / shard.name, self.advice) for shard in self.index.shards]

    def arrays(self, split: Split, name: Literal["tokens", "ends"]) -> list[ShardArray]:
        """An array of each shard."""
        return [ShardArray(file, f"{split}.{name}") for file in self.files]

    def tokens_by_shard(self, split: Split, fraction: float = 1.0) -> list[NDArray]:
        """The first `fraction` of the tokens of each shard, memory-mapped."""
        return [array.read(0, round(fraction * len(array))) for array in self.arrays(split, "tokens")]

    def document_ends_by_shard(self, split: Split) -> list[NDArray]:
        """The end of each document in `tokens` of each shard, memory-mapped."""
        return [array.read() for array in self.arrays(split, "ends")]

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
    """The shards in a folder; raises if they are unfinished, or one is missing, truncated or not that of the index."""
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        parts = len(list(folder.glob(PART_RECORD.format("*", "*"))))
        finished = f" (finished parts: {parts})" if parts else ""
        raise DataError(
            f"the shards in {folder} are unfinished{finished}; run the same electra shard command again to resume"
        )
    if not (folder / INDEX).is_file():
        corpus = folder if folder.is_file() else "…"
        raise DataError(
            f"{explain_missing_shards(folder)}; make shards with: electra shard --corpus {corpus} --tokenizer VOCAB "
            "--output shards/"
        )
    shards = Shards(folder, read_index(folder))
    for file, shard in zip(shards.files, shards.index.shards, strict=True):
        file.check_entry(shard)
    return shards


def explain_missing_shards(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file, not a folder of shards"
    return f"no shards in {path}" if path.exists() else f"the folder {path} does not exist"


def read_index(folder: Path) -> ShardIndex:
    content = (folder / INDEX).read_bytes()
    with report_damage(folder / INDEX, "if it is an index of shards, make them again in another folder"):
        if content != append_checksum(content.rpartition(CHECKSUM_FIELD)[0]):
            raise msgspec.ValidationError("its checksum is missing or differs")
        return msgspec.json.decode(content, type=ShardIndex)


class TokenRing:
    """The tokens of a split over all shards, memory-mapped and read as a ring: the first follows the last."""

    def __init__(self, shards: Shards, split: Split):
        self.parts = [part for part in shards.arrays(split, "tokens") if len(part)]
        if not self.parts:
            raise DataError(f"{shards.folder} has no {split} tokens; make shards with another --validation-fraction")
        sizes = [len(part) for part in self.parts]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.dtype = self.parts[0].values.dtype
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
            local = starts[rows] - self.starts[number]
            self.parts[number].verify(local, width)
            out[rows] = self.sliding_windows(width)[number][local]

    def sliding_windows(self, width: int) -> list[NDArray]:
        """For each shard, a view of all its windows of this width."""
        if width not in self.window_views:
            values = [part.values for part in self.parts]
            padded = [part if len(part) >= width else np.zeros(width, part.dtype) for part in values]
            self.window_views[width] = [sliding_window_view(part, width) for part in padded]
        return self.window_views[width]

    def read_across_shards(self, start: int, width: int) -> NDArray:
        """[width] tokens that may continue in the next shard."""
        pieces: list[NDArray] = []
        while width:
            start %= len(self)
            number = int(np.searchsorted(self.starts, start, side="right")) - 1
            local = start - int(self.starts[number])
            pieces.append(self.parts[number].read(local, local + width))
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
