"""Encoders: looking words up gives exactly the ids of the library, on any text."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from electra.data import wordpiece as encoding
from electra.data.tokenizer import word_piece
from electra.data.wordpiece import TextEncoder, WordEncoder, encoder_for

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCXYZéÉßæ[]#.,-'=中文字12·", "ing", "the", "\u0301", "mask", "[MASK", "ß"]
TOKENS = list(dict.fromkeys([*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]))
HARD = [
    "The cat's naïve CAFÉ, déjà-vu… “quoted” – and 3.14% of #hashtags",
    "中文字mixed中x文, 漢字かな交じり文　全角。 a䷀b中䶵c䷿㐀d\uf900e",
    "[MASK] [SEP] ##ing [CLS]x [UNK] [unused1]",
    "a\x0bb c\x0cd e\x1cf g\x85h i\u2028j k\xa0l m\u3000n o\x7fp q\u200br s\u00adt \ufeffu \ufffdv",
    "e\u0301 \u0301x =\u0338 中\u0301文 \u0130 \u212a \ufb01 \U0001f600 \U00020000 \U000e0001",
    "x" * 100 + " " + "x" * 101 + " " + "é" * 100 + " " + "é" * 101,
    "\t\n\r  \x0b ",
    "עברית العربية हिन्दी ไทย 한국어 Ελληνικά Σ ΟΔΟΣ",
]
CASES = [
    {"lowercase": lowercase, "strip_accents": accents, "split_chinese": chinese}
    for lowercase in (True, False)
    for accents in (None, True, False)
    for chinese in (True, False)
]
PAIRS = [(encoder_for(word_piece(TOKENS, **case)), TextEncoder(word_piece(TOKENS, **case))) for case in CASES]
for _, library in PAIRS:
    library.library.encode_special_tokens = True


@pytest.mark.parametrize("text", HARD)
def test_hard_text_gives_the_ids_of_the_library(text):
    for words, library in PAIRS:
        assert isinstance(words, WordEncoder)
        assert words.encode([text.encode()]) == library.encode([text.encode()])


ALPHABET = st.one_of(
    st.characters(codec="utf-8", exclude_characters="\0"), st.sampled_from([*"".join(HARD)]), st.sampled_from(LETTERS)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ALPHABET, max_size=40).map("".join))
def test_any_text_gives_the_ids_of_the_library(text):
    for words, library in PAIRS:
        assert words.encode([text.encode()]) == library.encode([text.encode()])


def test_special_tokens_written_in_text_stay_text():
    words = encoder_for(word_piece(TOKENS, lowercase=True))
    ids = array("H", words.encode([b"[MASK][SEP]"])[0])
    assert [TOKENS[number] for number in ids] == ["[", "mask", "]", "[", "s", "##e", "##p", "]", "[SEP]"]


def test_a_full_cache_changes_nothing(monkeypatch):
    text = " ".join(HARD).encode()
    whole = encoder_for(word_piece(TOKENS, lowercase=True)).encode([text])
    monkeypatch.setattr(encoding, "CACHED_WORDS", 3)
    small = encoder_for(word_piece(TOKENS, lowercase=True))
    assert small.encode([text]) == whole
    assert len(small.cache) <= 3


def test_an_endless_word_is_encoded_in_pieces(monkeypatch):
    monkeypatch.setattr(encoding, "LONGEST_WORD", 10)
    words = encoder_for(word_piece(TOKENS, lowercase=True))
    assert len(words.encode([b"a" * 25])[0]) == 2 * (25 + 1)


def test_words_of_long_text_are_found_one_after_the_other(monkeypatch):
    text = " ".join(HARD).encode()
    whole = encoder_for(word_piece(TOKENS, lowercase=True)).encode([text])
    monkeypatch.setattr(encoding, "LONG_TEXT", 10)
    assert encoder_for(word_piece(TOKENS, lowercase=True)).encode([text]) == whole


def test_words_with_unknown_pieces_are_counted():
    words = encoder_for(word_piece(TOKENS, lowercase=True))
    words.encode(["щука, щука cat 漢字 щ".encode(), "[щука]".encode()])
    assert words.uncovered == {"щука": 3, "漢": 1, "щ": 1}


def test_text_without_any_token_gives_nothing_and_other_text_ends_with_a_separator():
    words = encoder_for(word_piece(TOKENS, lowercase=True))
    assert words.encode(["\u200b \x07".encode()]) == [b""]
    assert array("H", words.encode([b"a"])[0]).tolist() == [TOKENS.index("a"), TOKENS.index("[SEP]")]


def test_large_vocabularies_take_four_bytes():
    tokens = [*TOKENS, *(f"w{number}" for number in range(70_000))]
    words = encoder_for(word_piece(tokens, lowercase=True))
    assert array("I", words.encode([b"w69999"])[0]).tolist() == [len(tokens) - 1, 3]


def test_tokens_a_user_added_are_left_to_the_library():
    tokenizer = word_piece(TOKENS, lowercase=True)
    tokenizer.library.add_tokens([AddedToken("new york")])
    words = encoder_for(tokenizer)
    assert type(words) is TextEncoder
    ids = array("H", words.encode([b"new york [MASK]"])[0])
    assert [tokenizer.library.id_to_token(number) for number in ids] == ["new york", "[", "mask", "]", "[SEP]"]
