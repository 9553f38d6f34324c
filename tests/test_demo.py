"""The demo runs the whole pipeline."""

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer

import electra
from electra import demonstration
from electra.cli import main
from electra.demonstration import is_prose, unused_folder, write_documentation_corpus
from electra.errors import ConfigError
from electra.serving.config import DemoConfig
from electra.serving.inference import load_text_model
from electra.training.logging import TrainResult


@pytest.mark.slow
def test_the_demo_exports_a_model_that_transformers_loads(tmp_path, capsys, real_plots, monkeypatch):
    flags = ["--quick", "--steps", "6", "--json", "--output"]
    monkeypatch.setattr(demonstration, "has_packaged_model", lambda: False)
    main(["demo", *flags, str(tmp_path / "demo")])
    check_demo(tmp_path / "demo", json.loads(capsys.readouterr().out))
    package = tmp_path / "package"
    electra.export(model=tmp_path / "demo/run", to="package", training_data="documentation", output=package)
    monkeypatch.setattr(demonstration, "has_packaged_model", lambda: True)
    monkeypatch.setattr(demonstration, "PACKAGED_MODEL", package)
    monkeypatch.setitem(demonstration.PACKAGED, "init", package)
    main(["demo", *flags, str(tmp_path / "further")])
    result = json.loads(capsys.readouterr().out)
    check_demo(tmp_path / "further", result)
    assert result["uses_packaged_model"]
    assert len(result["marked_examples"]) == 4


def test_a_demo_ends_when_a_signal_stops_its_pretraining(tmp_path, monkeypatch):
    stopped = TrainResult(
        run="run", checkpoint="", step=1, tokens=1, seconds=1.0, nonfinite_steps=0, metrics={}, signal=signal.SIGTERM
    )
    for name in ("tokenizer", "shard"):
        monkeypatch.setattr(electra, name, lambda **settings: None)
    monkeypatch.setattr(electra, "pretrain", lambda **settings: stopped)
    monkeypatch.setattr(demonstration, "has_packaged_model", lambda: False)
    monkeypatch.setattr(demonstration, "open_shards", lambda folder: None)
    monkeypatch.setattr(demonstration, "evaluation_batches", lambda *settings: [])
    monkeypatch.setattr(demonstration, "count_bigrams", lambda shards: SimpleNamespace(token_counts=np.ones(3)))
    monkeypatch.setattr(electra, "export", lambda **settings: pytest.fail("the demo went on"))
    with pytest.raises(SystemExit, match="143"):
        demonstration.run_demo(DemoConfig(output=tmp_path / "demo", quick=True))


def check_demo(folder: Path, result: dict) -> None:
    """Check the result and the files of a demo."""
    assert result["documents"] > 20
    assert result["steps"] == 6
    assert "dictionary" in result["sentence"]
    assert [len(each["baselines"]) for each in result["comparisons"]] == [2, 2, 2, 3]
    for name in ("demo.png", "run/curves.png", "run/samples.md", "run/metrics.jsonl"):
        assert (folder / name).exists()
    model = AutoModel.from_pretrained(folder / "huggingface")
    tokens = AutoTokenizer.from_pretrained(folder / "huggingface")("the value is returned", return_tensors="pt")
    assert model(**tokens).last_hidden_state.shape[2] == 64


def test_the_word_with_the_highest_probability_is_marked(finished_run):
    model = load_text_model(finished_run, "cpu")
    marked = demonstration.mark_replaced_word(model, "the cat sat on the house")
    assert len(re.findall(r"\[\w+ \d\.\d\d\]", marked)) == 1


def test_paragraphs_that_begin_alike_are_written_once(tmp_path, monkeypatch):
    texts = ["The value of the expression is returned when the function is called " + end for end in ("a", "b")]
    texts += ["Another paragraph of some words that are long enough to be prose."]
    monkeypatch.setattr(demonstration, "documentation_texts", lambda: iter(texts))
    assert write_documentation_corpus(tmp_path / "corpus.txt", max_characters=10_000) == 2
    assert (tmp_path / "corpus.txt").read_text().count("The value") == 1


def test_a_second_demo_gets_its_own_folder(tmp_path):
    (tmp_path / "demo").mkdir()
    assert unused_folder(tmp_path / "demo") == tmp_path / "demo-2"


def test_a_demo_in_the_current_folder_gets_a_folder_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unused_folder(Path()) == tmp_path.with_name(f"{tmp_path.name}-2")
    with pytest.raises(ConfigError, match="give a folder of its own"):
        unused_folder(Path("/"))


def test_code_and_tables_are_not_prose():
    assert is_prose("The value of the expression is returned when the function is called again.")
    assert not is_prose(">>> print(the value of the expression is returned when called)")
    assert not is_prose("| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |")
