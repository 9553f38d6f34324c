"""Fast tokenizers: the cached one gives exactly the ids of the tokenizers library, on any text."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from electra.data import encode
from electra.data.encode import CachedWordPieceTokenizer, DocumentTokenizer, create_document_tokenizer
from electra.data.tokenizer import build_wordpiece_tokenizer

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCXYZéÉßæ[]#.,-'=中文字12·", "ing", "the", "\u0301", "mask", "[MASK", "ß"]
TOKENS = list(dict.fromkeys([*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]))
HARD_TEXTS = [
    "The cat's naïve CAFÉ, déjà-vu… “quoted” – and 3.14% of #hashtags",
    "中文字mixed中x文, 漢字かな交じり文　全角。 a䷀b中䶵c䷿㐀d\uf900e",
    "[MASK] [SEP] ##ing [CLS]x [UNK] [unused1]",
    "a\x0bb c\x0cd e\x1cf g\x85h i\u2028j k\xa0l m\u3000n o\x7fp q\u200br s\u00adt \ufeffu \ufffdv",
    "e\u0301 \u0301x =\u0338 中\u0301文 \u0130 \u212a \ufb01 \U0001f600 \U00020000 \U000e0001",
    "x" * 100 + " " + "x" * 101 + " " + "é" * 100 + " " + "é" * 101,
    "\t\n\r  \x0b ",
    "עברית العربية हिन्दी ไทย 한국어 Ελληνικά Σ ΟΔΟΣ",
]
SETTINGS = [
    {"lowercase": lowercase, "strip_accents": accents, "split_chinese": chinese}
    for lowercase in (True, False)
    for accents in (None, True, False)
    for chinese in (True, False)
]
PAIRS = [
    (
        create_document_tokenizer(build_wordpiece_tokenizer(TOKENS, **each)),
        DocumentTokenizer(build_wordpiece_tokenizer(TOKENS, **each)),
    )
    for each in SETTINGS
]
for _, reference in PAIRS:
    reference.library.encode_special_tokens = True


def lowercase_tokenizer() -> CachedWordPieceTokenizer:
    return create_document_tokenizer(build_wordpiece_tokenizer(TOKENS, lowercase=True))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_gives_the_ids_of_the_library(text):
    for cached, reference in PAIRS:
        assert isinstance(cached, CachedWordPieceTokenizer)
        assert cached.encode([text.encode()]) == reference.encode([text.encode()])


CHARACTERS = st.one_of(
    st.characters(codec="utf-8", exclude_characters="\0"),
    st.sampled_from([*"".join(HARD_TEXTS)]),
    st.sampled_from(LETTERS),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CHARACTERS, max_size=40).map("".join))
def test_any_text_gives_the_ids_of_the_library(text):
    for cached, reference in PAIRS:
        assert cached.encode([text.encode()]) == reference.encode([text.encode()])


def test_special_tokens_in_text_are_encoded_as_text():
    ids = array("H", lowercase_tokenizer().encode([b"[MASK][SEP]"])[0])
    assert [TOKENS[number] for number in ids] == ["[", "mask", "]", "[", "s", "##e", "##p", "]", "[SEP]"]


@pytest.mark.parametrize(("limit", "value"), [("MAX_CACHED_WORDS", 3), ("LONG_TEXT_BYTES", 10)])
def test_limits_of_memory_change_no_ids(monkeypatch, limit, value):
    text = " ".join(HARD_TEXTS).encode()
    expected = lowercase_tokenizer().encode([text])
    monkeypatch.setattr(encode, limit, value)
    fast = lowercase_tokenizer()
    assert fast.encode([text]) == expected
    assert len(fast.cache) <= encode.MAX_CACHED_WORDS


def test_an_overlong_word_is_encoded_in_parts(monkeypatch):
    monkeypatch.setattr(encode, "MAX_WORD_CHARACTERS", 10)
    assert len(lowercase_tokenizer().encode([b"a" * 25])[0]) == 2 * (25 + 1)


def test_words_with_unknown_pieces_are_counted():
    fast = lowercase_tokenizer()
    fast.encode(["щука, щука cat 漢字 щ".encode(), "[щука]".encode()])
    assert fast.unk_words == {"щука": 3, "漢": 1, "щ": 1}


def test_a_document_ends_with_sep_and_is_empty_without_tokens():
    fast = lowercase_tokenizer()
    assert fast.encode(["\u200b \x07".encode()]) == [b""]
    assert array("H", fast.encode([b"a"])[0]).tolist() == [TOKENS.index("a"), TOKENS.index("[SEP]")]


def test_ids_of_large_vocabularies_take_four_bytes():
    tokens = [*TOKENS, *(f"w{number}" for number in range(70_000))]
    fast = create_document_tokenizer(build_wordpiece_tokenizer(tokens, lowercase=True))
    assert array("I", fast.encode([b"w69999"])[0]).tolist() == [len(tokens) - 1, 3]


def test_a_tokenizer_with_added_tokens_is_not_cached():
    tokenizer = build_wordpiece_tokenizer(TOKENS, lowercase=True)
    tokenizer.library.add_tokens([AddedToken("new york")])
    fast = create_document_tokenizer(tokenizer)
    assert type(fast) is DocumentTokenizer
    ids = array("H", fast.encode([b"new york [MASK]"])[0])
    assert [tokenizer.library.id_to_token(number) for number in ids] == ["new york", "[", "mask", "]", "[SEP]"]
