"""Inspect: the statistics of shards are those of the text."""

import json
import subprocess
import sys

import numpy as np
import pytest

from electra import cli
from electra.config import build_config
from electra.data.inspect import InspectConfig, inspect, length_histogram
from electra.data.prepare import ShardConfig, shard
from electra.errors import ConfigError

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", ",", "."]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat.\n\nThe dog, the dog sat.\n\n" + "cat " * 100)
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    settings = {
        "corpus": str(tmp_path / "text.txt"),
        "tokenizer": tmp_path / "vocab.txt",
        "output": tmp_path / "shards",
    }
    shard(build_config(ShardConfig, **settings, workers=1, validation_fraction=0))
    return tmp_path / "shards"


def test_counts_lengths_and_unknown_words_are_those_of_the_text(folder):
    result = inspect(InspectConfig(shards=folder, verify=True))
    assert result.documents == {"train": 3, "validation": 0}
    assert result.tokens == {"train": 5 + 8 + 101, "validation": 0}
    assert result.length_histogram == {"4–7": 2, "64–127": 1}
    assert result.median_length == 7
    assert result.uncovered == {"dog": 2}
    assert result.unknown_fraction == 2 / 114


def test_rows_are_decoded_in_training_order(folder):
    rows = inspect(InspectConfig(shards=folder, rows=10, length=20)).rows
    assert len(rows) == 6  # 114 tokens in rows of 19
    assert all(row.startswith("[CLS]") for row in rows)
    assert any("the [UNK], the [UNK] sat. [SEP]" in row for row in rows)


@pytest.mark.usefixtures("real_plots")
def test_lengths_are_plotted_as_a_png(folder, tmp_path):
    assert inspect(InspectConfig(shards=folder)).plot == str(folder / "document-lengths.png")
    inspect(InspectConfig(shards=folder, plot=tmp_path / "other.png"))
    for file in (folder / "document-lengths.png", tmp_path / "other.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("real_plots")
def test_without_matplotlib_only_the_plot_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = inspect(InspectConfig(shards=folder))
    assert result.plot is None
    assert "no plot: matplotlib is missing" in str(result)


@pytest.mark.usefixtures("real_plots")
def test_in_a_read_only_folder_only_the_plot_is_missing(folder, tmp_path, monkeypatch):
    def deny(*arguments: object, **settings: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", deny)
    result = inspect(InspectConfig(shards=folder))
    assert result.median_length == 7
    assert f"no plot: Permission denied in {folder}" in str(result)
    with pytest.raises(PermissionError):
        inspect(InspectConfig(shards=folder, plot=tmp_path / "other.png"))


@pytest.mark.parametrize(("name", "minimum"), [("rows", 0), ("words", 0), ("length", 2)])
def test_too_small_numbers_are_errors(folder, name, minimum):
    with pytest.raises(ConfigError, match=f"{name} is {minimum - 1}; it must be at least {minimum}"):
        InspectConfig(shards=folder, **{name: minimum - 1})


def test_the_histogram_has_ranges_between_powers_of_two():
    assert length_histogram(np.array([1, 2, 3, 4, 1023, 1024])) == {
        "1–1": 1,
        "2–3": 2,
        "4–7": 1,
        "512–1023": 1,
        "1024–2047": 1,
    }


def test_the_command_prints_text_or_json(folder, capsys):
    cli.main(["inspect", str(folder)])
    assert "[UNK] is 1.7544% of the tokens" in capsys.readouterr().out
    cli.main(["inspect", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["uncovered"] == {"dog": 2}


def test_data_commands_do_not_import_torch():
    modules = "electra.data.train_tokenizer, electra.data.prepare, electra.data.inspect"
    check = f"import sys, electra.cli, {modules}; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
