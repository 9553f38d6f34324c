"""Text to token ids: tokenizers of documents, and the text of a corpus divided into that of single shards.

Every document ends with [SEP]. Special tokens written in the text are not recognised: "[MASK]" is encoded as "[",
"mask", "]". Workers that encode shards get all that they need as arguments, also the tokenizer, and read no files: they
may be on other machines.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
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
from electra.errors import report_panics

PUNCTUATION = rb"!-/:-@\[-`{-~"
IDEOGRAPH = rb"(?:\xe4[\xb8-\xbf]|[\xe5-\xe9][\x80-\xbf])[\x80-\xbf]"  # U+4E00 to U+9FFF in UTF-8
WORDS = re.compile(rb"[^\s%b]+|[%b]" % (PUNCTUATION, PUNCTUATION))
WORDS_AND_IDEOGRAPHS = re.compile(
    rb"(?:[^\s%b\xe4-\xe9]++|\xe4[\x80-\xb7][\x80-\xbf])++|[%b]|%b" % (PUNCTUATION, PUNCTUATION, IDEOGRAPH)
)
NOT_IDEOGRAPH_LEADS = bytes(set(range(256)) - set(range(0xE4, 0xEA)))  # all but the first bytes of ideographs
DROPPED = b"\x0b\x0c"  # BERT's normalizer drops these; `\s` would split words at them

MAX_CACHED_WORDS = 1 << 18
"""The cache is cleared at this size, about 50 MB."""
MAX_CACHED_WORD_BYTES = 64
"""Longer words are not cached."""
MAX_WORD_CHARACTERS = 10_000
"""Longer words are encoded in parts: the tokenizers library needs about 100 bytes per character."""
LONG_TEXT_BYTES = 1 << 20
"""The words of a longer text are iterated over instead of listed, to save memory."""
MAX_UNK_WORDS = 1000
"""Words with [UNK] that each shard lists."""


def create_document_tokenizer(tokenizer: TextTokenizer) -> DocumentTokenizer:
    """The fastest tokenizer that produces the same ids."""
    tokenizer.library.encode_special_tokens = True
    normalizer = tokenizer.component_settings["normalizer"] or {}
    has_added_words = any(not token.special for token in tokenizer.library.get_added_tokens_decoder().values())
    is_word_by_word = tokenizer.is_bert_wordpiece() and normalizer["clean_text"] and not has_added_words
    return CachedWordPieceTokenizer(tokenizer) if is_word_by_word else DocumentTokenizer(tokenizer)


class DocumentTokenizer:
    """Encodes whole documents with the tokenizers library; correct for every tokenizer."""

    def __init__(self, tokenizer: TextTokenizer):
        vocabulary = tokenizer.vocabulary
        self.library = tokenizer.library
        self.unk_id = vocabulary.unk_id
        self.typecode = "H" if vocabulary.size <= 1 << 16 else "I"  # of `array`: uint16 if the ids fit, else uint32
        self.separator = self.to_bytes([vocabulary.sep_id])
        self.unk_words: Counter[str] = Counter()  # words that contain [UNK]

    def encode(self, documents: list[bytes]) -> list[bytes]:
        """The ids of each document followed by [SEP]; empty for a document without tokens."""
        texts = [document.decode() for document in documents]
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [self.to_bytes(encoding.ids) + self.separator if encoding.ids else b"" for encoding in encodings]

    def to_bytes(self, ids: list[int]) -> bytes:
        return array(self.typecode, ids).tobytes()


class CachedWordPieceTokenizer(DocumentTokenizer):
    """Encodes with BERT's WordPiece tokenizers several times as fast, by encoding each distinct word once.

    BERT's normalizer and WordPiece never look across a space, an ASCII punctuation mark or a Chinese character, so the
    ids of a text are those of its words, concatenated.
    """

    def __init__(self, tokenizer: TextTokenizer):
        super().__init__(tokenizer)
        normalizer = tokenizer.component_settings["normalizer"]
        self.lowercase = normalizer["lowercase"]
        self.split_chinese = normalizer["handle_chinese_chars"]
        self.model = tokenizer.library.model
        self.cache = WordCache(self)

    def encode(self, documents: list[bytes]) -> list[bytes]:
        """The ids of each document followed by [SEP]; empty for a document without tokens."""
        return [ids + self.separator if (ids := self.encode_text(document)) else b"" for document in documents]

    def encode_text(self, text: bytes) -> bytes:
        text = text.translate(None, DROPPED)
        text = text.lower() if self.lowercase else text
        return b"".join(map(self.cache.__getitem__, self.split_words(text)))

    def split_words(self, text: bytes) -> Iterable[bytes]:
        """The parts of a text that are encoded independently."""
        has_ideographs = self.split_chinese and text.translate(None, NOT_IDEOGRAPH_LEADS)
        pattern = WORDS_AND_IDEOGRAPHS if has_ideographs else WORDS  # WORDS is 1.5 times as fast
        if len(text) > LONG_TEXT_BYTES:
            return (match[0] for match in pattern.finditer(text))
        return pattern.findall(text)

    def encode_word(self, word: bytes) -> bytes:
        text = word.decode()
        parts = [text[start : start + MAX_WORD_CHARACTERS] for start in range(0, len(text), MAX_WORD_CHARACTERS)]
        if word.isalnum():  # ASCII: nothing to normalize
            return self.to_bytes([token.id for part in parts for token in self.model.tokenize(part)])
        encodings = [self.library.encode(part, add_special_tokens=False) for part in parts]
        return self.to_bytes([token for encoding in encodings for token in encoding.ids])


class WordCache(dict[bytes, bytes]):
    """The ids of words. Words with [UNK] are cached separately: every lookup of one is a miss here and is counted."""

    def __init__(self, tokenizer: CachedWordPieceTokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.unk_cache: dict[bytes, bytes] = {}

    def __missing__(self, word: bytes) -> bytes:
        ids = self.unk_cache.get(word)
        if ids is None:
            ids = self.tokenizer.encode_word(word)
            if self.tokenizer.unk_id not in array(self.tokenizer.typecode, ids):
                self.store(self, word, ids)
                return ids
            self.store(self.unk_cache, word, ids)
        self.tokenizer.unk_words[word.decode()] += 1
        return ids

    def store(self, cache: dict[bytes, bytes], word: bytes, ids: bytes) -> None:
        """Store a word unless it is long; a full cache is cleared first."""
        if len(word) <= MAX_CACHED_WORD_BYTES:
            if len(cache) >= MAX_CACHED_WORDS:
                cache.clear()
            cache[word] = ids


# Shards.


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
