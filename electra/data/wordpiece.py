"""Encoders: documents as token ids, in the bytes that shards hold.

Every document ends with [SEP]. Text never becomes a special token: "[MASK]" written in it is encoded as
"[", "mask", "]".
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable

from electra.data.tokenizer import TextTokenizer

PUNCTUATION = rb"!-/:-@\[-`{-~"
IDEOGRAPH = rb"(?:\xe4[\xb8-\xbf]|[\xe5-\xe9][\x80-\xbf])[\x80-\xbf]"  # U+4E00 to U+9FFF in UTF-8
WORDS = re.compile(rb"[^\s%b]+|[%b]" % (PUNCTUATION, PUNCTUATION))
WORDS_AND_IDEOGRAPHS = re.compile(
    rb"(?:[^\s%b\xe4-\xe9]++|\xe4[\x80-\xb7][\x80-\xbf])++|[%b]|%b" % (PUNCTUATION, PUNCTUATION, IDEOGRAPH)
)
NO_LEADS = bytes(set(range(256)) - set(range(0xE4, 0xEA)))  # all bytes but the first ones of ideographs
DELETED = b"\x0b\x0c"  # BERT's normaliser drops these; Python would split words at them

CACHED_WORDS = 1 << 18
"""Words a cache holds before it starts anew: about 50 MB, whatever the size of the corpus."""
CACHED_BYTES = 64
"""Longer words are not kept."""
LONGEST_WORD = 10_000
"""Characters the library gets at once, of a word that has more; it needs some 100 bytes for each."""
LONG_TEXT = 1 << 20
"""Bytes from which on the words of a text are not listed but found one after the other."""


def encoder_for(tokenizer: TextTokenizer) -> TextEncoder:
    """The fastest encoder that gives the tokenizer's own ids."""
    tokenizer.library.encode_special_tokens = True
    normalizer = tokenizer.parts["normalizer"] or {}
    has_own_tokens = any(not added.special for added in tokenizer.library.get_added_tokens_decoder().values())
    is_local = tokenizer.is_bert() and normalizer["clean_text"] and not has_own_tokens
    return WordEncoder(tokenizer) if is_local else TextEncoder(tokenizer)


class TextEncoder:
    """Encodes documents with the library, whole: right for every tokenizer."""

    def __init__(self, tokenizer: TextTokenizer):
        vocabulary = tokenizer.vocabulary
        self.library = tokenizer.library
        self.unk_id = vocabulary.unk_id
        self.type = type_code(vocabulary.size)
        self.separator = self.packed([vocabulary.sep_id])
        self.uncovered: Counter[str] = Counter()  # words with [UNK] in them, and how often they came

    def encode(self, documents: list[bytes]) -> list[bytes]:
        """The ids of each document; empty if nothing in it has any."""
        texts = [document.decode() for document in documents]
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [self.packed(encoding.ids) + self.separator if encoding.ids else b"" for encoding in encodings]

    def packed(self, ids: list[int]) -> bytes:
        """The ids as they stand in a shard."""
        return array(self.type, ids).tobytes()


class WordEncoder(TextEncoder):
    """Encodes with BERT's tokenizers, asking the library only once for each word: the same ids, several times as fast.

    BERT's normaliser and WordPiece never look across a space, an ASCII punctuation mark or a Chinese character, so the
    ids of a text are those of its words in a row.
    """

    def __init__(self, tokenizer: TextTokenizer):
        super().__init__(tokenizer)
        normalizer = tokenizer.parts["normalizer"]
        self.is_lowercase = normalizer["lowercase"]
        self.splits_ideographs = normalizer["handle_chinese_chars"]
        self.model = tokenizer.library.model
        self.cache = WordCache(self)

    def encode(self, documents: list[bytes]) -> list[bytes]:
        """The ids of each document; empty if nothing in it has any."""
        return [ids + self.separator if (ids := self.text_ids(document)) else b"" for document in documents]

    def text_ids(self, text: bytes) -> bytes:
        """The ids of a text."""
        text = text.translate(None, DELETED)
        text = text.lower() if self.is_lowercase else text
        return b"".join(map(self.cache.__getitem__, self.words_of(text)))

    def words_of(self, text: bytes) -> Iterable[bytes]:
        """The parts of a text that can be encoded alone."""
        has_ideographs = self.splits_ideographs and text.translate(None, NO_LEADS)
        words = WORDS_AND_IDEOGRAPHS if has_ideographs else WORDS  # the plain pattern is half as fast again
        return (found[0] for found in words.finditer(text)) if len(text) > LONG_TEXT else words.findall(text)

    def word_ids(self, word: bytes) -> bytes:
        """The ids of a word."""
        text = word.decode()
        if word.isalnum() and len(word) <= LONGEST_WORD:  # ASCII, so there is nothing to normalise
            return self.packed([token.id for token in self.model.tokenize(text)])
        starts = range(0, len(text), LONGEST_WORD)
        parts = [self.library.encode(text[at : at + LONGEST_WORD], add_special_tokens=False) for at in starts]
        return self.packed([number for part in parts for number in part.ids])

    def is_uncovered(self, ids: bytes) -> bool:
        """Whether [UNK] is among the ids."""
        return self.unk_id in array(self.type, ids)


class WordCache(dict[bytes, bytes]):
    """The ids of words; words with [UNK] in them are kept apart, so that looking them up counts them."""

    def __init__(self, encoder: WordEncoder):
        super().__init__()
        self.encoder = encoder
        self.uncovered: dict[bytes, bytes] = {}

    def __missing__(self, word: bytes) -> bytes:
        ids = self.uncovered.get(word) or self.encoder.word_ids(word)
        if self.encoder.is_uncovered(ids):
            self.encoder.uncovered[word.decode()] += 1
            self.keep(self.uncovered, word, ids)
        else:
            self.keep(self, word, ids)
        return ids

    def keep(self, cache: dict[bytes, bytes], word: bytes, ids: bytes) -> None:
        """Remember a word's ids, in bounded memory."""
        if len(word) <= CACHED_BYTES:
            if len(cache) >= CACHED_WORDS:
                cache.clear()
            cache[word] = ids


def type_code(vocabulary: int) -> str:
    """The array type of ids: two bytes while they suffice."""
    return "H" if vocabulary <= 1 << 16 else "I"
