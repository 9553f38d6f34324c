"""Benchmarks run from end to end on made rows, so that they are there when they are needed."""

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
def neighbours(monkeypatch):
    """Benchmarks import each other, as Python lets scripts of one folder do."""
    monkeypatch.syspath_prepend(BENCHMARKS)


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


def test_models_are_probed_without_a_look_at_dev_rows(result_of, encoder_folder, tmp_path):
    data = write_glue(tmp_path / "glue", rows=60)
    (data / "STS-B" / "dev.tsv").unlink()
    sizes = ["--rows", 32, "--held-out", 20, "--seeds", 2, "--epochs", 1, "--length", 32]
    models = [encoder_folder, encoder_folder / ".." / "model"]
    found = result_of("probe", "--data", data, "--model", *models, "--tasks", "stsb", *sizes)
    assert list(found) == [str(model) for model in models]
    first, second = found.values()
    assert first["stsb"].keys() == {"median", "spread"}
    assert first == second  # one model under two names: the same rows, the same seeds
    rates = result_of(
        "probe", "--data", data, "--model", models[0], "--tasks", "stsb", "--learning-rate", 1e-3, 1e-2, *sizes
    )
    assert list(rates) == [f"{models[0]} 0.001", f"{models[0]} 0.01"]
    assert len({scores["stsb"]["median"] for scores in rates.values()}) == 2
    ways = result_of(
        "probe", "--data", data, "--model", models[0], "--tasks", "stsb", "--pooling", "cls", "mean", *sizes
    )
    assert list(ways) == [str(models[0])]  # a classic model has no choice


@pytest.mark.parametrize(("held_out", "measured"), [(5, 5), (2000, 12)])
def test_held_out_rows_are_never_learnt_from_and_at_most_a_fifth(tmp_path, held_out, measured):
    sliced = runpy.run_path(str(BENCHMARKS / "probe.py"))["sliced"]
    whole = glue_task("rte", str(write_glue(tmp_path / "glue", rows=60)))
    first, again = (rows_of(sliced(whole, 40, held_out, tmp_path)) for _ in range(2))
    assert (len(first["train"]), len(first["dev"])) == (40, measured)
    assert first["train"].isdisjoint(first["dev"])
    assert first == again


def rows_of(task: Task) -> dict[str, set[str]]:
    """The numbers of the rows in each split."""
    return {split: {row.values["index"] for row in read_split(task, split)} for split in task.splits}
