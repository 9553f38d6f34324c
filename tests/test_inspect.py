"""Inspect: what the shards hold, in words a person can check against the text."""

import json
import subprocess
import sys

import pytest

from electra import cli
from electra.data.inspect import InspectConfig, histogram, inspect
from electra.data.prepare import ShardConfig, shard
from electra.errors import ConfigError

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", ",", "."]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat.\n\nThe dog, the dog sat.\n\n" + "cat " * 100)
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    made = {"corpus": str(tmp_path / "text.txt"), "tokenizer": tmp_path / "vocab.txt", "output": tmp_path / "shards"}
    shard(ShardConfig(**made, workers=1, validation_fraction=0))
    return tmp_path / "shards"


def test_counts_lengths_and_unknown_words_are_those_of_the_text(folder):
    found = inspect(InspectConfig(shards=folder, verify=True))
    assert found.documents == {"train": 3, "validation": 0}
    assert found.tokens == {"train": 5 + 8 + 101, "validation": 0}
    assert found.lengths == {"4–7": 2, "64–127": 1}
    assert found.median_length == 7
    assert found.uncovered == {"dog": 2}
    assert found.unknown_share == 2 / 114


def test_rows_are_decoded_as_training_meets_them(folder):
    rows = inspect(InspectConfig(shards=folder, rows=10, length=20)).rows
    assert len(rows) == 6  # 114 tokens in rows of 19
    assert all(row.startswith("[CLS]") for row in rows)
    assert any("the [UNK], the [UNK] sat. [SEP]" in row for row in rows)


@pytest.mark.usefixtures("real_plots")
def test_lengths_are_drawn_as_a_png(folder, tmp_path):
    assert inspect(InspectConfig(shards=folder)).plot == str(folder / "document-lengths.png")
    inspect(InspectConfig(shards=folder, plot=tmp_path / "other.png"))
    for file in (folder / "document-lengths.png", tmp_path / "other.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("real_plots")
def test_without_matplotlib_there_is_everything_but_the_png(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = inspect(InspectConfig(shards=folder))
    assert found.plot is None
    assert "not drawn: that takes matplotlib (pip install matplotlib)" in str(found)


@pytest.mark.usefixtures("real_plots")
def test_where_nothing_can_be_written_there_is_everything_but_the_png(folder, tmp_path, monkeypatch):
    def refuse(*given: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    found = inspect(InspectConfig(shards=folder))
    assert found.median_length == 7
    assert f"not drawn: Permission denied in {folder}; --plot takes another file" in str(found)
    with pytest.raises(PermissionError):
        inspect(InspectConfig(shards=folder, plot=tmp_path / "other.png"))


@pytest.mark.parametrize("name", ["rows", "words"])
def test_fewer_than_none_are_refused(folder, name):
    with pytest.raises(ConfigError, match=f"{name} is -1; it must be at least 0"):
        InspectConfig(shards=folder, **{name: -1})


def test_powers_of_two_bound_the_histogram():
    import numpy as np

    assert histogram(np.array([1, 2, 3, 4, 1023, 1024])) == {
        "1–1": 1,
        "2–3": 2,
        "4–7": 1,
        "512–1023": 1,
        "1024–2047": 1,
    }


def test_a_flipped_bit_is_found_by_verify(folder, capsys):
    data = bytearray((folder / "00000.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "00000.safetensors").write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect", str(folder), "--verify"])
    error = capsys.readouterr().err
    assert "damaged in" in error
    assert "00000.safetensors; this makes only what is damaged again: electra shard --corpus" in error


def test_the_command_prints_for_people_and_as_json(folder, capsys):
    cli.main(["inspect", str(folder)])
    assert "[UNK] is 1.7544% of the tokens" in capsys.readouterr().out
    cli.main(["inspect", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["uncovered"] == {"dog": 2}


def test_text_commands_start_without_torch():
    modules = "electra.data.tokenizer, electra.data.prepare, electra.data.inspect"
    check = f"import sys, electra.cli, {modules}; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
