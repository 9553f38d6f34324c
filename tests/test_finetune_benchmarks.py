"""The fine-tuning benchmarks run on synthetic tasks."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_glue
from transformers import ElectraConfig, ElectraForSequenceClassification

from electra.finetuning.tasks import Task, glue_task, read_split

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def import_path(monkeypatch):
    """Benchmarks import modules of their own folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def run_benchmark(monkeypatch, capsys):
    """Run a benchmark with --json and return what it prints."""

    def run(name: str, *arguments: Any) -> Any:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--json"])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.slow
def test_both_contenders_are_scored_for_every_seed(run_benchmark, shards, tmp_path):
    data, vocabulary = write_glue(tmp_path / "glue", rows=16), shards / "tokenizer" / "vocab.txt"
    flags = ["--data", data, "--vocab", vocabulary, "--size", "tiny", "--tasks", "stsb", "--scores", "--seeds", 2]
    scores = run_benchmark("finetune", *flags)["stsb"]
    assert scores["metric"] == "spearman"
    for contender in ("electra", "peer"):
        assert len(scores[contender]["seeds"]) == 2
        assert scores[contender]["median"] == pytest.approx(sum(scores[contender]["seeds"]) / 2)


def test_the_peer_has_layer_wise_learning_rates():
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 3}
    model = ElectraForSequenceClassification(ElectraConfig(vocab_size=60, embedding_size=16, **sizes))
    layer_groups = runpy.run_path(str(BENCHMARKS / "finetune.py"))["layer_groups"]
    rates = {parameter: group["lr"] for group in layer_groups(model, 1.0, 0.8) for parameter in group["params"]}
    by_name = {name: rates[parameter] for name, parameter in model.named_parameters()}
    assert len(rates) == sum(1 for _ in model.parameters())
    assert by_name["classifier.dense.weight"] == by_name["classifier.out_proj.bias"] == 1
    assert by_name["electra.encoder.layer.2.output.dense.weight"] == pytest.approx(0.8)
    assert by_name["electra.encoder.layer.0.output.dense.weight"] == pytest.approx(0.8**3)
    assert by_name["electra.embeddings.word_embeddings.weight"] == pytest.approx(0.8**4)
    assert by_name["electra.embeddings_project.weight"] == pytest.approx(0.8**4)


@pytest.mark.slow
def test_models_are_compared_without_the_dev_file(run_benchmark, encoder_folder, tmp_path):
    data = write_glue(tmp_path / "glue", rows=60)
    (data / "STS-B" / "dev.tsv").unlink()
    sizes = ["--rows", 32, "--held-out", 20, "--seeds", 2, "--epochs", 1, "--length", 32]
    models = [encoder_folder, encoder_folder / ".." / "model"]
    scores = run_benchmark("probe", "--data", data, "--model", *models, "--tasks", "stsb", *sizes)
    assert list(scores) == [str(model) for model in models]
    first, second = scores.values()
    assert first["stsb"].keys() == {"median", "spread"}
    assert first == second  # one model under two names
    rates = run_benchmark(
        "probe", "--data", data, "--model", models[0], "--tasks", "stsb", "--learning-rate", 1e-3, 1e-2, *sizes
    )
    assert list(rates) == [f"{models[0]} 0.001", f"{models[0]} 0.01"]
    assert len({scores["stsb"]["median"] for scores in rates.values()}) == 2
    poolings = run_benchmark(
        "probe", "--data", data, "--model", models[0], "--tasks", "stsb", "--pooling", "cls", "mean", *sizes
    )
    assert list(poolings) == [str(models[0])]  # classic models have no pooling


@pytest.mark.parametrize(("held_out", "evaluated"), [(5, 5), (2000, 12)])
def test_held_out_rows_are_not_trained_on_and_at_most_a_fifth(tmp_path, held_out, evaluated):
    subset = runpy.run_path(str(BENCHMARKS / "probe.py"))["subset"]
    task = glue_task("rte", str(write_glue(tmp_path / "glue", rows=60)))
    first, again = (row_indices(subset(task, 40, held_out, tmp_path)) for _ in range(2))
    assert (len(first["train"]), len(first["dev"])) == (40, evaluated)
    assert first["train"].isdisjoint(first["dev"])
    assert first == again


def row_indices(task: Task) -> dict[str, set[str]]:
    return {split: {row.values["index"] for row in read_split(task, split)} for split in task.splits}
