"""Shards: the format on disk, and errors for folders that are missing, unfinished or damaged."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from electra import cli
from electra.config import build_config
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import TokenRing, open_shards
from electra.data.tokenizer import build_wordpiece_tokenizer, load_tokenizer
from electra.errors import DataError

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcepls", "##b", "##e", "##p"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three shards of one document each."""
    for number, text in enumerate(["ab c", "[SEP]", "a"]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    paths = {"corpus": f"{tmp_path}/[0-9].txt", "tokenizer": tmp_path / "vocab.txt", "output": tmp_path / "shards"}
    shard(build_config(ShardConfig, **paths, shard_megabytes=1e-6, validation_fraction=0, workers=1))
    return tmp_path / "shards"


def test_a_shard_holds_concatenated_documents_that_end_with_sep(folder):
    shards = open_shards(folder)
    tokens = [[TOKENS[token] for token in part] for part in shards.tokens_by_shard("train")]
    assert tokens == [["a", "##b", "c", "[SEP]"], ["[UNK]", "s", "##e", "##p", "[UNK]", "[SEP]"], ["a", "[SEP]"]]
    assert [ends.tolist() for ends in shards.document_ends_by_shard("train")] == [[4], [6], [2]]
    assert shards.tokens_by_shard("train")[0].dtype == np.uint16
    assert [info.unknown for info in shards.index.shards] == [0, 2, 0]
    assert shards.index.most_frequent_words_with_unk(5) == {"[": 1, "]": 1}
    assert shards.index.totals_by_split("tokens") == {"train": 12, "validation": 0}


def test_the_token_ring_continues_over_shards_and_wraps_around(folder):
    shards = open_shards(folder)
    ring, tokens = TokenRing(shards, "train"), np.concatenate(shards.tokens_by_shard("train")).tolist()
    starts = np.arange(12)
    for width in (1, 3, 7, 30):
        rows = np.zeros((12, width), ring.dtype)
        ring.read_rows_into(starts, out=rows)
        assert rows.tolist() == [[tokens[(start + n) % 12] for n in range(width)] for start in starts]


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink() if kind == "missing" else file.write_bytes(data[:-5] if kind == "truncated" else data)


@pytest.mark.parametrize("kind", ["truncated", "missing", "flipped bit"])
def test_damage_is_detected_and_only_the_damaged_shard_is_made_again(folder, kind, capsys):
    content = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    moved = folder.rename(folder.parent / "moved shards")
    damage(moved / "00001.safetensors", kind)
    if kind == "flipped bit":  # found only by its checksum
        assert open_shards(moved).find_damaged_shards() == ["00001.safetensors"]
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(moved), "--verify"])
    error = capsys.readouterr().err
    assert "00001.safetensors; make only these again with: electra shard" in error
    cli.main(shlex.split(error.partition("again with: electra ")[2]))  # names the present folder
    assert "made 1 of 3 shards" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in moved.glob("*.safetensors")} == content


@pytest.mark.parametrize("content", ["{", '{"settings": {}}', '{"settings": {}, "command": 1, "shards": []}'])
def test_a_damaged_index_is_named(folder, content):
    (folder / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index.json is damaged .* make the shards again"):
        open_shards(folder)


def test_a_model_with_another_tokenizer_is_an_error(folder):
    shards = open_shards(folder)
    shards.check_same_tokenizer(load_tokenizer(folder.parent / "vocab.txt"))
    with pytest.raises(DataError, match=r"another tokenizer \(15 entries, .* than the model's \(16 entries"):
        shards.check_same_tokenizer(build_wordpiece_tokenizer([*TOKENS, "new"], lowercase=True))


def test_missing_and_unfinished_shards_have_different_errors(tmp_path):
    with pytest.raises(DataError, match=r"no shards in .*; make shards with: electra shard .* --output shards/$"):
        open_shards(tmp_path)
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(DataError, match="are unfinished; run the same electra shard command again"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.txt", r"text.txt is a file, not a folder of shards; .* --corpus .*text.txt --output shards/$"),
        ("run", "no shards in .*run; .* --corpus … --output shards/$"),
        ("missing", "missing does not exist; .* --corpus … --output shards/$"),
    ],
)
def test_an_error_tells_what_is_there_instead_of_shards(tmp_path, name, message):
    (tmp_path / "text.txt").touch()
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match=message):
        open_shards(tmp_path / name)
