"""Benchmarks run from end to end on made rows, so that they are there when they are needed."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from made import write_glue
from transformers import ElectraConfig, ElectraForSequenceClassification

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def result_of(monkeypatch, capsys):
    """Run a benchmark with --json, as from a shell."""

    def run(name: str, *arguments: Any) -> Any:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--json"])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return json.loads(capsys.readouterr().out)

    return run


def test_both_sides_of_a_fine_tuning_are_scored_seed_by_seed(result_of, shards, tmp_path):
    data, vocabulary = write_glue(tmp_path / "glue", rows=16), shards / "tokenizer" / "vocab.txt"
    flags = ["--data", data, "--vocab", vocabulary, "--size", "tiny", "--tasks", "stsb", "--scores", "--seeds", 2]
    found = result_of("finetune", *flags)["stsb"]
    assert found["metric"] == "spearman"
    for side in ("ours", "peer"):
        assert len(found[side]["seeds"]) == 2
        assert found[side]["median"] == pytest.approx(sum(found[side]["seeds"]) / 2)


def test_the_plain_loop_has_our_rates_by_layer():
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 3}
    model = ElectraForSequenceClassification(ElectraConfig(vocab_size=60, embedding_size=16, **sizes))
    layer_groups = runpy.run_path(str(BENCHMARKS / "finetune.py"))["layer_groups"]
    rates = {parameter: group["lr"] for group in layer_groups(model, 1.0, 0.8) for parameter in group["params"]}
    found = {name: rates[parameter] for name, parameter in model.named_parameters()}
    assert len(rates) == sum(1 for _ in model.parameters())
    assert found["classifier.dense.weight"] == found["classifier.out_proj.bias"] == 1
    assert found["electra.encoder.layer.2.output.dense.weight"] == pytest.approx(0.8)
    assert found["electra.encoder.layer.0.output.dense.weight"] == pytest.approx(0.8**3)
    assert found["electra.embeddings.word_embeddings.weight"] == pytest.approx(0.8**4)
    assert found["electra.embeddings_project.weight"] == pytest.approx(0.8**4)
