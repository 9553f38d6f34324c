"""Tokenizers: learned deterministically, loaded from any of three forms, equal to what `transformers` loads."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from electra.data.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer, word_piece
from electra.errors import ConfigError, DataError

TEXT = (
    "Où est l'été déjà vu? L'ÉTÉ, c'est l'été. Ænigma naïve; 东西南北, 东西. The walker walked walking walks.\n\n" * 5
)
HARD = "Été DÉJÀ [MASK] walked\x0bfar 东西s naïve#x Æ\u0301 \u200b [unused0] ß İstanbul a\u0338=\u0338 don't 12,5"
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def learn(tmp_path, text=TEXT, name="vocab", **settings):
    (tmp_path / "a.txt").write_text(text)
    config = TokenizerConfig(corpus=str(tmp_path / "a.txt"), output=tmp_path / name, **({"vocab_size": 150} | settings))
    return train_tokenizer(config)


def pieces(tmp_path, text: str, **settings) -> list[str]:
    name = f"vocab-{len(list(tmp_path.iterdir()))}"  # each time another folder
    learn(tmp_path, name=name, character_coverage=1, **settings)
    return load_tokenizer(tmp_path / name).library.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    "settings",
    [{}, {"lowercase": False}, {"strip_accents": False}, {"split_chinese": False, "lowercase": False}, {"reserved": 7}],
    ids=str,
)
def test_transformers_gives_the_same_ids(tmp_path, settings):
    learn(tmp_path, **settings)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "vocab")
    ours = load_tokenizer(tmp_path / "vocab").library
    assert theirs(HARD)["input_ids"] == ours.encode(HARD).ids
    assert theirs("a", HARD)["token_type_ids"] == ours.encode("a", HARD).type_ids
    assert theirs.mask_token_id == ours.token_to_id("[MASK]")
    assert theirs.pad_token_id == 0


def test_the_same_text_gives_the_same_bytes(tmp_path):
    words = " ".join(
        f"{a}{b}{c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrstu"
    )  # all pairs equally frequent
    for name in ("one", "two", "three"):
        learn(tmp_path, text=words, name=name, min_frequency=1)
    one, two, three = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two", "three")
    )
    assert one == two == three
    assert set(one) == {"tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"}


def test_case_accents_and_chinese_are_as_asked(tmp_path):
    assert "".join(pieces(tmp_path, "Été")).replace("##", "") == "ete"
    assert "".join(pieces(tmp_path, "Été", strip_accents=False)).replace("##", "") == "été"
    assert "".join(pieces(tmp_path, "Été", lowercase=False)).replace("##", "") == "Été"
    assert pieces(tmp_path, "东西") == ["东", "西"]
    assert pieces(tmp_path, "东西", split_chinese=False)[1:] != ["西"]


def test_special_tokens_come_first_and_reserved_slots_behind_them(tmp_path):
    learned = learn(tmp_path, reserved=2)
    tokens = (tmp_path / "vocab" / "vocab.txt").read_text().splitlines()
    assert tokens[:7] == [*SPECIALS, "[unused0]", "[unused1]"]
    assert learned.vocabulary == len(tokens)


def test_characters_beyond_the_coverage_are_unknown(tmp_path):
    text = "abba " * 1000 + "ж"
    learn(tmp_path, text=text, character_coverage=0.999)
    assert load_tokenizer(tmp_path / "vocab").library.encode("abж ba").tokens[1:-1] == ["[UNK]", "b", "##a"]


def test_one_tokenizer_has_one_fingerprint_in_all_its_forms(tmp_path):
    learn(tmp_path)
    folder = tmp_path / "vocab"
    found = {load_tokenizer(path).fingerprint for path in (folder, folder / "vocab.txt", folder / "tokenizer.json")}
    assert len(found) == 1
    assert word_piece(SPECIALS, lowercase=True).fingerprint != word_piece(SPECIALS, lowercase=False).fingerprint


def test_a_bare_vocabulary_with_capitals_is_cased(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "Paris", "paris"]) + "\n")
    assert load_tokenizer(tmp_path).library.encode("Paris").tokens[1] == "Paris"
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "paris"]) + "\n")
    assert load_tokenizer(tmp_path / "vocab.txt").library.encode("Paris").tokens[1] == "paris"


def test_the_vocabulary_knows_what_later_stages_ask(tmp_path):
    vocabulary = word_piece([*SPECIALS, "walk", "##ing"], lowercase=True).vocabulary
    assert (vocabulary.size, vocabulary.pad_id, vocabulary.cls_id, vocabulary.mask_id) == (7, 0, 2, 4)
    assert vocabulary.is_continuation == (False,) * 6 + (True,)


def test_special_tokens_of_other_families_are_found_by_their_role(tmp_path):
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    vocabulary = {name: number for number, name in enumerate([*names.values(), "hello"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    roles = {f"{role}_token": {"content": name} for role, name in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    assert load_tokenizer(tmp_path).vocabulary.mask_id == 4


def test_a_vocabulary_without_mask_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(DataError, match=r"vocab.txt: the vocabulary has no \[MASK\], which pre-training needs"):
        load_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is not a vocabulary"),
        ("other.txt", b"", "neither tokenizer.json nor vocab.txt"),
    ],
)
def test_a_bad_tokenizer_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_settings_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no tokenizer at"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ConfigError, match="vocabulary size 10 leaves no room beside 15 special tokens"):
        learn(tmp_path, vocab_size=10, reserved=10)
    with pytest.raises(ConfigError, match=r"vocabulary size 30 is too small for .* characters"):
        learn(tmp_path, vocab_size=30)
    with pytest.raises(DataError, match="there is no text in"):
        learn(tmp_path, text=" ")
    assert not (tmp_path / "vocab").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("some words here")
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; choose another --output"):
        train_tokenizer(TokenizerConfig(corpus=str(tmp_path / "a.txt"), output=tmp_path / "vocab"))
    assert (tmp_path / "vocab/vocab.txt").read_text() == "mine"
