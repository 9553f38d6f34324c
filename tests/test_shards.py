"""Shards: the format on disk, and errors for folders that are missing, unfinished or damaged."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from electra import cli
from electra.config import build_config
from electra.data import shards as shards_module
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import ShardArray, ShardFile, TokenRing, append_checksum, open_shards, serialize_shard
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
    data[-8 - 2 if kind == "flipped token" else -1] ^= 1  # the last 8 bytes are checksums
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind != "missing":
        file.write_bytes({"truncated": data[:-5], "empty": b""}.get(kind, data))


@pytest.mark.parametrize("kind", ["truncated", "empty", "missing", "pipe", "flipped bit", "flipped token"])
def test_damage_is_detected_and_only_the_damaged_shard_is_made_again(folder, kind, capsys):
    content = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    moved = folder.rename(folder.parent / "moved shards")
    damage(moved / "00001.safetensors", kind)
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(moved), "--verify"])
    error = capsys.readouterr().err
    assert re.search(
        "00001.safetensors is (damaged|missing or empty); make only what is damaged again with: electra shard", error
    )
    cli.main(shlex.split(error.partition("again with: electra ")[2]))  # names the present folder
    assert "made 1 of 3 shards" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in moved.glob("*.safetensors")} == content


def test_every_flipped_bit_is_noticed_when_its_block_is_read(folder):
    def read_all() -> list:
        shards = open_shards(folder)
        return [*map(np.ndarray.tolist, shards.tokens_by_shard("train") + shards.document_ends_by_shard("train"))]

    before = read_all()
    for file in folder.glob("*.*"):
        content = bytearray(file.read_bytes())
        for position in range(0, len(content), 13):
            content[position] ^= 1 << position % 8
            file.write_bytes(content)
            with pytest.raises(DataError, match="damaged"):
                read_all()
            content[position] ^= 1 << position % 8
        file.write_bytes(content)
    assert read_all() == before


def test_only_the_blocks_that_are_read_are_verified(folder):
    damage(folder / "00001.safetensors", "flipped token")
    ring = TokenRing(open_shards(folder), "train")
    rows = np.zeros((1, 4), ring.dtype)
    ring.read_rows_into(np.array([0]), out=rows)  # all of 00000
    with pytest.raises(DataError, match=r"00001.safetensors is damaged; make only what is damaged again with: electra"):
        ring.read_rows_into(np.array([5]), out=rows)
    with pytest.raises(DataError, match=r"00001.safetensors is damaged"):
        ring.read_across_shards(3, 2)


def test_blocks_are_found_for_rows_of_any_width(monkeypatch):
    monkeypatch.setattr(shards_module, "CHECKSUM_BLOCK_BYTES", 8)
    tokens = np.arange(50, dtype=np.uint16)
    info = {"text_bytes": 0, "text_checksum": 0, "replaced": 0, "cut": 0, "unknown": 0, "uncovered": {}}
    content = serialize_shard({"train": [tokens.tobytes()], "validation": []}, info, tokens.dtype)
    for position in range(50):
        damaged = bytearray(content)
        damaged[content.index(tokens.tobytes()) + 2 * position] ^= 1
        for width in (1, 3, 20):
            array = ShardArray(ShardFile(bytes(damaged), Path("00000.safetensors")), "train.tokens")
            for start in range(51 - width):
                first = (array.offset + 2 * start) // 8
                last = (array.offset + 2 * (start + width) - 1) // 8
                if first <= (array.offset + 2 * position) // 8 <= last:
                    with pytest.raises(DataError, match="damaged"):
                        array.read(start, start + width)
                else:
                    assert array.read(start, start + width).tolist() == list(range(start, start + width))


def test_exchanged_shards_are_noticed(folder):
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    first, *_, last = [name for name in sizes if list(sizes.values()).count(sizes[name]) > 1] or [*sizes]
    shutil.copy(folder / first, folder / last)
    with pytest.raises(DataError, match=f"{last} is damaged"):
        open_shards(folder).tokens_by_shard("train")


def test_another_tokenizer_in_the_folder_is_noticed(folder):
    build_wordpiece_tokenizer([*TOKENS[:-1], "##q"], lowercase=True).save(folder / "tokenizer")
    with pytest.raises(DataError, match="not the tokenizer that the shards were made with; make only what is damaged"):
        assert open_shards(folder).tokenizer


@pytest.mark.parametrize("content", [b"{", b'{"settings": {}}', b"\xff", b'{"a":' * 100_000])
def test_a_damaged_index_is_named(folder, content):
    for stored in (content, append_checksum(content)):
        (folder / "index.json").write_bytes(stored)
        with pytest.raises(DataError, match=r"index.json is damaged .* make them again in another folder"):
            open_shards(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "electra shard"},
        {"command": 1},
        {"shards": [{"name": "../../secrets.safetensors"}]},
        {"shards": [{"documents": {}}]},
        {"shards": []},
        {"shards": [{"tokens": {"train": "1", "validation": 0}}]},
    ],
    ids=str,
)
def test_the_fields_of_an_index_are_checked(folder, changes):
    index = json.loads((folder / "index.json").read_text())
    del index["checksum"]
    changes = changes | {"shards": [index["shards"][0] | shard for shard in changes.get("shards", [])]}
    (folder / "index.json").write_bytes(append_checksum(json.dumps(index | changes).encode().removesuffix(b"}")))
    with pytest.raises(DataError, match=r"index.json is damaged .* make them again in another folder"):
        open_shards(folder)


def test_a_model_with_another_tokenizer_is_an_error(folder):
    shards = open_shards(folder)
    shards.check_same_tokenizer(load_tokenizer(folder.parent / "vocab.txt"))
    with pytest.raises(DataError, match=r"another tokenizer \(15 entries, .* than the model's \(16 entries"):
        shards.check_same_tokenizer(build_wordpiece_tokenizer([*TOKENS, "new"], lowercase=True))


def test_unfinished_shards_are_an_error(tmp_path):
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(DataError, match="are unfinished; run the same electra shard command again"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.txt", r"text.txt is a file, not a folder of shards; .* --corpus .*text.txt --tokenizer VOCAB --output"),
        ("run", "no shards in .*run; .* --corpus … --tokenizer VOCAB --output"),
        ("missing", "missing does not exist; .* --corpus … --tokenizer VOCAB --output"),
    ],
)
def test_an_error_tells_what_is_there_instead_of_shards(tmp_path, name, message):
    (tmp_path / "text.txt").touch()
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match=message):
        open_shards(tmp_path / name)
