"""The demo runs the whole pipeline."""

import json

import pytest
from transformers import AutoModel, AutoTokenizer

from electra.cli import main
from electra.demo import is_prose, unused_folder


@pytest.mark.slow
def test_the_quick_demo_exports_a_model_that_transformers_loads(tmp_path, capsys, real_plots):
    main(["demo", "--quick", "--minutes", "0.05", "--output", str(tmp_path / "demo"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["documents"] > 500
    assert result["tokens"] > 0
    assert "dictionary" in result["sentence"]
    for name in ("run/curves.png", "run/samples.md", "run/metrics.jsonl"):
        assert (tmp_path / "demo" / name).exists()
    model = AutoModel.from_pretrained(tmp_path / "demo/huggingface")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "demo/huggingface")("the value is returned", return_tensors="pt")
    assert model(**tokens).last_hidden_state.shape[2] == 64


def test_a_second_demo_gets_its_own_folder(tmp_path):
    (tmp_path / "demo").mkdir()
    assert unused_folder(tmp_path / "demo") == tmp_path / "demo-2"


def test_code_and_tables_are_not_prose():
    assert is_prose("The value of the expression is returned when the function is called again.")
    assert not is_prose(">>> print(the value of the expression is returned when called)")
    assert not is_prose("| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |")
