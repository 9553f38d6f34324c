"""Tokenizers: trained deterministically, loaded from three kinds of files, equal to those of `transformers`."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from electra.config import build_config
from electra.data.tokenizer import build_wordpiece_tokenizer, complete_tokenizer_files, load_tokenizer
from electra.data.train_tokenizer import TokenizerConfig, default_vocab_size, train_tokenizer
from electra.errors import ConfigError, DataError

TEXT = (
    "Où est l'été déjà vu? L'ÉTÉ, c'est l'été. Ænigma naïve; 东西南北, 东西. The walker walked walking walks.\n\n" * 5
)
HARD_TEXT = "Été DÉJÀ [MASK] walked\x0bfar 东西s naïve#x Æ\u0301 \u200b [unused0] ß İstanbul a\u0338=\u0338 don't 12,5"
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SPECIAL_IDS = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
WORD_LEVEL = {"type": "WordLevel", "unk_token": "[UNK]"}


def train(tmp_path, text=TEXT, name="vocab", **settings):
    (tmp_path / "a.txt").write_text(text)
    config = build_config(
        TokenizerConfig, corpus=str(tmp_path / "a.txt"), output=tmp_path / name, **({"vocab_size": 150} | settings)
    )
    return train_tokenizer(config)


def tokenize(tmp_path, text: str, **settings) -> list[str]:
    name = f"vocab-{len(list(tmp_path.iterdir()))}"
    train(tmp_path, name=name, character_coverage=1, **settings)
    return load_tokenizer(tmp_path / name).library.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lowercase": False},
        {"strip_accents": False},
        {"split_chinese": False, "lowercase": False},
        {"unused_tokens": 7},
    ],
    ids=str,
)
def test_transformers_gives_the_same_ids(tmp_path, settings):
    train(tmp_path, **settings)
    expected = AutoTokenizer.from_pretrained(tmp_path / "vocab")
    tokenizer = load_tokenizer(tmp_path / "vocab").library
    assert expected(HARD_TEXT)["input_ids"] == tokenizer.encode(HARD_TEXT).ids
    assert expected("a", HARD_TEXT)["token_type_ids"] == tokenizer.encode("a", HARD_TEXT).type_ids
    assert expected.mask_token_id == tokenizer.token_to_id("[MASK]")
    assert expected.pad_token_id == 0


def test_the_same_text_gives_the_same_bytes(tmp_path):
    words = " ".join(
        f"{a}{b}{c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrstu"
    )  # all pairs equally frequent
    for name in ("one", "two", "three"):
        train(tmp_path, text=words, name=name, min_frequency=1)
    one, two, three = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two", "three")
    )
    assert one == two == three
    assert set(one) == {"tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"}


def test_case_accents_and_chinese_follow_the_settings(tmp_path):
    assert "".join(tokenize(tmp_path, "Été", strip_accents=True)).replace("##", "") == "ete"
    assert "".join(tokenize(tmp_path, "Été", strip_accents=False)).replace("##", "") == "été"
    assert "".join(tokenize(tmp_path, "Été", lowercase=False)).replace("##", "") == "Été"
    assert tokenize(tmp_path, "东西") == ["东", "西"]
    assert tokenize(tmp_path, "东西", split_chinese=False)[1:] != ["西"]


@pytest.mark.parametrize(
    ("text", "word", "expected", "reason"),
    [
        ("a café in Paris and " + "all day long " * 300, "Café", "cafe", "accents removed: 0.03%"),
        ("das Haus am See war schon schön und der Garten auch", "Schön", "Schön", "case kept: 30%"),
        ("l'été est déjà passé et le garçon va", "Été", "été", "accents kept: 21.43%"),
        ("हिन्दी भाषा में", "हिन्दी", "हिन्दी", "accents kept: 50.00%"),  # vowel signs
    ],
    ids=["English", "German", "French", "Hindi"],
)
def test_case_and_accents_are_kept_where_the_language_needs_them(tmp_path, text, word, expected, reason):
    result = train(tmp_path, text=text)
    assert load_tokenizer(tmp_path / "vocab").library.normalizer.normalize_str(word) == expected
    assert reason in str(result)
    given = train(tmp_path, text=text, name="given", lowercase=True, strip_accents=True)
    assert (given.lowercase, given.strip_accents, given.reasons) == (True, True, [])


def test_the_vocabulary_grows_with_the_text(tmp_path):
    sizes = [default_vocab_size(megabytes * 1_000_000, num_fixed=500) for megabytes in (0, 8, 785)]
    assert sizes == [2048, 8000, 30522]
    assert default_vocab_size(1_000_000, num_fixed=4000) == 8000  # Chinese
    assert "at most 2,048 tokens for 0.0 MB (--vocab-size)" in str(train(tmp_path, vocab_size=None))


def test_special_tokens_come_first_and_unused_tokens_second(tmp_path):
    result = train(tmp_path, unused_tokens=2)
    tokens = (tmp_path / "vocab" / "vocab.txt").read_text().splitlines()
    assert tokens[:7] == [*SPECIAL_TOKENS, "[unused0]", "[unused1]"]
    assert result.vocab_size == len(tokens)


def test_characters_beyond_the_coverage_are_unknown(tmp_path):
    text = "abba " * 1000 + "ж"
    train(tmp_path, text=text, character_coverage=0.999)
    assert load_tokenizer(tmp_path / "vocab").library.encode("abж ba").tokens[1:-1] == ["[UNK]", "b", "##a"]


def test_a_tokenizer_has_the_same_fingerprint_in_all_its_files(tmp_path):
    train(tmp_path)
    folder = tmp_path / "vocab"
    fingerprints = {
        load_tokenizer(path).fingerprint for path in (folder, folder / "vocab.txt", folder / "tokenizer.json")
    }
    assert len(fingerprints) == 1
    assert (
        build_wordpiece_tokenizer(SPECIAL_TOKENS, lowercase=True).fingerprint
        != build_wordpiece_tokenizer(SPECIAL_TOKENS, lowercase=False).fingerprint
    )
    extended = load_tokenizer(folder)
    extended.library.add_tokens(["covid"])
    assert extended.fingerprint not in fingerprints


def test_a_bare_vocabulary_with_capitals_is_cased(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "Paris", "paris"]) + "\n")
    assert load_tokenizer(tmp_path).library.encode("Paris").tokens[1] == "Paris"
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "paris"]) + "\n")
    assert load_tokenizer(tmp_path / "vocab.txt").library.encode("Paris").tokens[1] == "paris"


def test_vocabulary_has_special_ids_and_continuations():
    vocabulary = build_wordpiece_tokenizer([*SPECIAL_TOKENS, "walk", "##ing"], lowercase=True).vocabulary
    assert (vocabulary.size, vocabulary.pad_id, vocabulary.cls_id, vocabulary.mask_id) == (7, 0, 2, 4)
    assert vocabulary.is_continuation == (False,) * 6 + (True,)


def test_special_tokens_of_other_tokenizers_are_identified_by_role(tmp_path):
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    vocabulary = {name: number for number, name in enumerate([*names.values(), "hello"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    roles = {f"{role}_token": {"content": name} for role, name in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    assert load_tokenizer(tmp_path).vocabulary.mask_id == 4


def byte_level_tokenizer(tmp_path) -> Tokenizer:
    library = Tokenizer(models.BPE({token: number for number, token in enumerate([*SPECIAL_TOKENS, "a", "Ġ"])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(list(SPECIAL_TOKENS))
    return library


@pytest.mark.parametrize("post_processor", [None, processors.ByteLevel(trim_offsets=True)])
def test_texts_have_cls_and_sep_where_a_tokenizer_file_adds_none(tmp_path, post_processor):
    library = byte_level_tokenizer(tmp_path)
    if post_processor is not None:
        library.post_processor = post_processor
    library.save(str(tmp_path / "tokenizer.json"))
    encoding = load_tokenizer(tmp_path).library.encode("a a")
    assert encoding.tokens == ["[CLS]", "a", "Ġ", "a", "[SEP]"]
    assert encoding.offsets[2] == ((1, 2) if post_processor is None else (2, 2))  # as the file says


def test_transformers_reads_the_tokens_of_completed_files(tmp_path):
    byte_level_tokenizer(tmp_path).save(str(tmp_path / "tokenizer.json"))
    complete_tokenizer_files(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").tokens == ["[CLS]", "a", "[SEP]"]
    cased = tmp_path / "cased"
    cased.mkdir()
    vocabulary = "\n".join([*SPECIAL_TOKENS, "twice", "twice", "Paris", "paris"]) + "\n"
    (cased / "vocab.txt").write_text(vocabulary)
    (cased / "tokenizer_config.json").write_text('{"model_max_length": 64, "do_lower_case": null}')
    complete_tokenizer_files(cased)
    assert (cased / "vocab.txt").read_text() == vocabulary
    tokenizer = AutoTokenizer.from_pretrained(cased)
    assert tokenizer.tokenize("Paris") == ["Paris"]
    assert tokenizer.model_max_length == 64


def test_a_tokenizer_need_not_know_any_letter(tmp_path):
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS] + [("東", -1.0), ("京", -1.0)]
    Tokenizer(models.Unigram(pieces, unk_id=None)).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).library.encode("東京").tokens == ["[CLS]", "東", "京", "[SEP]"]


def test_files_that_transformers_reads_alike_are_not_changed(tmp_path):
    train(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "vocab" / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(16)
    tokenizer.save(str(tmp_path / "vocab" / "tokenizer.json"))
    files = {path: path.read_bytes() for path in (tmp_path / "vocab").iterdir()}
    complete_tokenizer_files(tmp_path / "vocab")
    assert {path: path.read_bytes() for path in (tmp_path / "vocab").iterdir()} == files


def test_a_vocabulary_without_mask_is_an_error(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(DataError, match=r"vocab.txt: the vocabulary lacks \[MASK\]"):
        load_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json is not a file of the tokenizers library"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is not a tokenizer: it is not text in UTF-8"),
        ("other.txt", b"", "neither tokenizer.json nor vocab.txt"),
    ],
)
def test_an_invalid_tokenizer_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def replacement(old: str, new: str) -> dict:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def normalizers(steps: list[dict]) -> dict:
    return {"type": "Sequence", "normalizers": steps}


EVERY_LETTER = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}


def test_many_replacements_of_letters_are_allowed(tmp_path):
    letters = [replacement(old, new) for old, new in {"ß": "ss", "æ": "ae", "œ": "oe", "å": "aa", "þ": "th"}.items()]
    longer = [replacement(f"x{number}", f"y{number}" * 40) for number in range(500)]
    description = json.loads(build_wordpiece_tokenizer([*SPECIAL_TOKENS, "ss"], lowercase=True).library.to_str())
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(description | {"normalizer": normalizers(letters * 9 + longer)})
    )
    assert load_tokenizer(tmp_path).library.encode("ß").tokens[1] == "ss"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": replacement("a", "a" * 101)}, "over 100 times as long"),
        ({"normalizer": normalizers([replacement("a", "a" * 10)] * 9)}, "tokenizer.json: its replacements could"),
        ({"normalizer": normalizers([replacement("a", "bc" * 9), replacement("c", "d" * 12)])}, "over 100 times"),
        ({"normalizer": normalizers([normalizers([EVERY_LETTER])] * 3)}, "over 100 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 101}}, "over 100 times as long"),
        ({"normalizer": normalizers([replacement("a", "b")] * 3_001)}, "more than 3,000 replacements"),
        ({"decoder": replacement("a", "a" * 101)}, "over 100 times as long"),
        ({"model": WORD_LEVEL | {"vocab": {**SPECIAL_IDS, "a": 2**31 - 1}}}, r"an id is 2,147,483,647; ids must be"),
        ({"model": WORD_LEVEL | {"vocab": {**SPECIAL_IDS, "a": 2**32 - 1}}}, r"an id is 4,294,967,295; ids must be"),
    ],
)
def test_a_tokenizer_that_would_fill_the_memory_is_refused(tmp_path, changes, message):
    description = json.loads(build_wordpiece_tokenizer([*SPECIAL_TOKENS, "a"], lowercase=True).library.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(description | changes))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    ['{"a":' * 100_000, '{"a":' + "[" * 100_000, '{"unk_token": 5}', '{"unk_token": {"id": 1}}', "[]", "\xff", "{"],
    ids=lambda content: content[:20],
)
def test_damaged_settings_of_a_tokenizer_are_named(tmp_path, name, content):
    build_wordpiece_tokenizer([*SPECIAL_TOKENS, "a"], lowercase=True).save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} is damaged or not in the expected format"):
        load_tokenizer(tmp_path)


def test_a_setting_of_another_type_is_named(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "yes"}')
    with pytest.raises(DataError, match=r"tokenizer_config.json .* got `str` - at `do_lower_case`"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "special_tokens_map.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_pipes_and_endless_files_are_not_read(tmp_path, name, make):
    if name == "special_tokens_map.json":
        build_wordpiece_tokenizer([*SPECIAL_TOKENS, "a"], lowercase=True).save(tmp_path)
        (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(DataError, match=f"has no {name}|neither tokenizer.json nor vocab.txt in"):
        load_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_an_error(tmp_path, capfd):
    description = json.loads(build_wordpiece_tokenizer(SPECIAL_TOKENS, lowercase=True).library.to_str())
    damaged = description | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))
    with pytest.raises(DataError, match=r"tokenizer.json is not a file of the tokenizers library \(.*Precompiled"):
        load_tokenizer(tmp_path)


def test_impossible_settings_are_errors(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ConfigError, match="vocab_size is 10; it must be greater than 15"):
        train(tmp_path, vocab_size=10, unused_tokens=10)
    with pytest.raises(ConfigError, match=r"vocab_size is 30, but the .* characters of the text"):
        train(tmp_path, vocab_size=30)
    with pytest.raises(DataError, match="no text in"):
        train(tmp_path, text=" ")
    assert not (tmp_path / "vocab").exists()


def test_an_interrupt_is_answered_while_the_library_trains(tmp_path, monkeypatch, capfd):
    def slow_batches(corpus, progress):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3)
        yield ["text"]

    monkeypatch.setattr("electra.data.train_tokenizer.line_batches", slow_batches)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert time.monotonic() - start < 2
    assert "the same command starts again" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_that_is_not_empty_is_not_changed(tmp_path):
    (tmp_path / "a.txt").write_text("some words here")
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        train_tokenizer(build_config(TokenizerConfig, corpus=str(tmp_path / "a.txt"), output=tmp_path / "vocab"))
    assert (tmp_path / "vocab/vocab.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_id": 60}, "mask_id is 60"),
        ({"pad_id": -1}, "pad_id is -1"),
        ({"is_continuation": (True, False)}, "is_continuation has 2 entries"),
    ],
)
def test_a_vocabulary_checks_its_ids(vocabulary, fields, message):
    with pytest.raises(ConfigError, match=message):
        replace(vocabulary, **fields)
