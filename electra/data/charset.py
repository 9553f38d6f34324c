"""Texts in other encodings than UTF-8: recognise the likely one, and read them as UTF-8."""

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

from electra.errors import DataError

QUOTES = "‘’“”„«»–—…"
BETWEEN_ASCII = r"(?i:(?<![^\0-\x7f])[{letters}]{{1,2}}(?![^\0-\x7f])|[{quotes}])"
RUSSIAN = "[А-Яа-яё][а-яё]{2,}"
LIKELY_CHARACTERS = {
    "windows-1252": BETWEEN_ASCII.format(letters="àáâãäåæçèéêëìíîïñòóôõöøùúûüýßœ", quotes=QUOTES),
    "windows-1250": BETWEEN_ASCII.format(letters="áâăäąćçčďđéęëěíîłĺľńňóôöőŕřśšşťţúůűüýźžżß", quotes=QUOTES),
    "windows-1251": f"{RUSSIAN}|[{QUOTES}]",
    "koi8-r": RUSSIAN,
}
"""Encodings, the preferred first, and what their characters beyond ASCII mostly are; others need a larger table."""
SAMPLE_BYTES = 1 << 16


def guess_encoding(text: bytes) -> str | None:
    """The likely encoding of a text that is not UTF-8; None if it is none of those known here."""
    nul_share = [text[start:SAMPLE_BYTES:2].count(0) / max(1, len(text[:SAMPLE_BYTES])) for start in (0, 1)]
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and max(nul_share) > 0:
        return "utf-16"
    if max(nul_share) > 0.2:
        return "utf-16-le" if nul_share[1] > nul_share[0] else "utf-16-be"
    if b"\0" in text:
        return None
    shares = {name: likely_share(text, name) for name in LIKELY_CHARACTERS}
    best = max(shares, key=shares.__getitem__)
    return best if shares[best] > 0.5 else None


def likely_share(text: bytes, encoding: str) -> float:
    """The fraction of characters beyond ASCII that are likely in texts of this encoding."""
    decoded = text.decode(encoding, "replace")
    likely = sum(map(len, re.findall(LIKELY_CHARACTERS[encoding], decoded)))
    return likely / max(1, sum(not character.isascii() for character in decoded))


def describe_encoding(text: bytes, encoding: str) -> str:
    """The encoding with a word of the text, by which a person can tell whether it is right."""
    word = re.search(r"\w*[^\0-\x7f\W]\w*", text.decode(encoding, "ignore"))
    return f'{encoding} ("{word[0][:40]}")' if word else encoding


def read_as_utf8(stream: BinaryIO, size: int, source: str, encoding: str | None) -> Iterator[bytes]:
    """The content of a file in chunks of about `size` bytes, in UTF-8; text that should be UTF-8 is not checked."""
    codec = codecs.lookup(encoding or "utf-8")
    decoder = codec.incrementaldecoder() if codec.name != "utf-8" else None
    try:
        while chunk := stream.read(size):
            yield decoder.decode(chunk).encode() if decoder else chunk
        if decoder:
            decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise DataError(f"{source} is not text in {encoding} ({error}); choose another --encoding") from None
