"""The text of a corpus divided into that of single shards, and the content of each shard; runs in any worker process.

Workers get all that they need as arguments, also the tokenizer, and read no files: they may be on other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer

from electra.data.corpus import Block, Corpus, CorpusConfig, ReadStats, hash_document, parse_documents
from electra.data.shards import (
    SPLITS,
    ShardFile,
    ShardInfo,
    Split,
    most_frequent_words,
    serialize_shard,
    shard_file_name,
)
from electra.data.tokenizer import TextTokenizer
from electra.data.wordpiece import DocumentTokenizer, create_document_tokenizer
from electra.errors import report_panics

MAX_UNK_WORDS = 1000
"""Words with [UNK] that each shard lists."""


@dataclass(frozen=True)
class ShardText:
    """The text of one shard."""

    number: int
    blocks: list[Block]
    position: int  # bytes of the corpus on disk up to its end

    def checksum(self) -> int:
        """CRC-32 of the text."""
        checksum = 0
        for block in self.blocks:
            for part in [block.data] if isinstance(block.data, bytes) else block.data:
                checksum = crc32(part, crc32(b"\0", checksum))
        return checksum


@dataclass(frozen=True)
class EncodedShard:
    """A shard as its worker returns it."""

    info: ShardInfo
    content: bytes
    position: int  # of its ShardText


def split_into_shard_texts(corpus: Corpus, min_bytes: int) -> Iterator[ShardText]:
    """The corpus in parts of at least `min_bytes` bytes, except for the last."""
    number = num_bytes = position = 0
    blocks: list[Block] = []
    for block in corpus.read_blocks():
        blocks.append(block)
        num_bytes += len(block)
        position = corpus.position(block)
        if num_bytes >= min_bytes:
            yield ShardText(number, blocks, position)
            number += 1
            num_bytes = 0
            blocks = []
    if blocks:
        yield ShardText(number, blocks, position)


@dataclass(frozen=True)
class EncodeSettings:
    """What a worker needs to encode a text."""

    source: CorpusConfig
    validation_fraction: float
    tokenizer: str  # in the JSON of the tokenizers library
    special_tokens: tuple[tuple[str, str], ...]  # of `TextTokenizer`


@lru_cache(maxsize=1)
def cached_document_tokenizer(tokenizer: str, special_tokens: tuple[tuple[str, str], ...]) -> DocumentTokenizer:
    """The worker's tokenizer, whose word cache is kept from shard to shard."""
    return create_document_tokenizer(TextTokenizer(Tokenizer.from_str(tokenizer), special_tokens))


@report_panics()
def encode_shard(settings: EncodeSettings, text: ShardText) -> EncodedShard:
    """Encode the text of one shard; runs in a worker."""
    tokenizer = cached_document_tokenizer(settings.tokenizer, settings.special_tokens)
    tokenizer.unk_words.clear()
    stats = ReadStats()
    dtype = np.dtype(tokenizer.typecode)
    documents = encode_documents_by_split(settings, tokenizer, text, stats)
    encoded = [ids for split in SPLITS for ids in documents[split]]
    info = {
        "text_bytes": sum(map(len, text.blocks)),
        "text_checksum": text.checksum(),
        "unknown": sum(int(np.count_nonzero(np.frombuffer(ids, dtype) == tokenizer.unk_id)) for ids in encoded),
        "uncovered": most_frequent_words(tokenizer.unk_words, MAX_UNK_WORDS),
        **asdict(stats),
    }
    content = serialize_shard(documents, info, dtype)
    file = ShardFile(content, Path(shard_file_name(text.number)))
    return EncodedShard(file.read_info(), content, text.position)


def encode_documents_by_split(
    settings: EncodeSettings, tokenizer: DocumentTokenizer, text: ShardText, stats: ReadStats
) -> dict[Split, list[bytes]]:
    """The ids of each document by split."""
    encoded: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for block in text.blocks:
        documents = list(parse_documents(block, settings.source, stats))
        for document, ids in zip(documents, tokenizer.encode(documents), strict=True):
            if ids:
                is_validation = hash_document(document) < settings.validation_fraction
                encoded["validation" if is_validation else "train"].append(ids)
    return encoded
