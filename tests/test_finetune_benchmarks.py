"""The fine-tuning benchmarks run on synthetic tasks."""

import json
import random
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import sentence, write_glue, write_squad, write_tags
from transformers import ElectraConfig, ElectraForSequenceClassification

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


@pytest.mark.slow
def test_taggers_are_scored(run_benchmark, shards, tmp_path):
    for name in ("eng.train", "eng.testa"):
        write_tags(tmp_path / name, 40, seed=0, num_columns=4)
    flags = ["--data", tmp_path, "--vocab", shards / "tokenizer" / "vocab.txt", "--size", "tiny", "--tasks", "ner"]
    scores = run_benchmark("finetune", *flags, "--scores", "--seeds", 2)["ner"]
    assert scores["metric"] == "entity_f1"
    assert len(scores["peer"]["seeds"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--scores", "--seeds", 1], ["--peer-steps", 2]])
def test_question_answering_is_compared(run_benchmark, shards, tmp_path, flags):
    for split, seed in (("train", 0), ("dev", 1)):
        write_squad(tmp_path / f"{split}-v2.0.json", 24, seed)
    model = ["--vocab", shards / "tokenizer" / "vocab.txt", "--size", "tiny"]
    result = run_benchmark("finetune", "--data", tmp_path, *model, "--tasks", "squad2", "--length", 32, *flags)
    if "--scores" in flags:
        assert 0 <= result["squad2"]["peer"]["median"] <= 1
    else:
        assert result["squad2"]["speedup"] > 0


@pytest.mark.slow
def test_one_command_makes_the_table_of_all_kinds_of_tasks(run_benchmark, finished_run, tmp_path):
    for name, seed in (("train-v1.1", 0), ("dev-v1.1", 1)):
        write_squad(tmp_path / f"{name}.json", 24, seed)
    articles = [read_article(tmp_path / "train-v1.1.json") for _ in range(8)]
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": articles}))
    for name in ("conll2003/eng.train", "conll2003/eng.testa", "conll2000/train.txt", "conll2000/test.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tags(tmp_path / name, 40, seed=0, num_columns=4 if "2003" in name else 3)
    generator = random.Random(0)
    lines = (" ".join(sentence(generator).capitalize() for _ in range(4)) for _ in range(80))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    flags = ["--model", finished_run, "--squad", tmp_path, "--tagging", tmp_path, "--corpus", tmp_path / "text.txt"]
    flags += ["--seeds", 1, 2, "--epochs", 1, "--train-rows", 64, "--dev-rows", 16, "--squad-length", 16]
    flags += ["--output", tmp_path / "table"]
    (ner,) = run_benchmark("task_table", *flags, "--tasks", "ner")
    results = run_benchmark("task_table", *flags)
    assert [result["metric"] for result in results] == ["f1", "f1", "entity_f1", "entity_f1", "accuracy", "f1"]
    assert results[2] == ner
    for result in results:
        assert result["rows"]["train"] > 0
        assert result["ratio"] > 0
        assert len(result["electra"]["seeds"]) == 2
        assert ("transformers" in result) == (result["task"] != "squad-all")
    assert len((tmp_path / "table/table.md").read_text().splitlines()) == 10
    for folder in (tmp_path / "table").glob("*-*"):
        shutil.rmtree(folder)
    assert run_benchmark("task_table", *flags, "--minutes", 0) == results  # nothing runs again
    ner_with_times = run_benchmark("task_table", *flags, "--tasks", "ner", "--peer-steps", 2)[2]
    assert ner_with_times["electra"]["seeds"] == ner["electra"]["seeds"]
    assert ner_with_times["transformers"]["seconds"] != ner["transformers"]["seconds"]
    (tmp_path / "table/results.jsonl").unlink()
    assert run_benchmark("task_table", *flags, "--tasks", "ner", "--minutes", 0) == []  # nothing is started


def read_article(path: Path) -> dict:
    return json.loads(path.read_text())["data"][0]


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
def test_predictions_and_embeddings_equal_those_of_a_plain_loop(run_benchmark, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    generator = random.Random(0)
    rows = ["sentence", *(sentence(generator) for _ in range(100))]
    (tmp_path / "rows.tsv").write_text("".join(f"{row}\n" for row in rows))
    vocabulary = shards / "tokenizer" / "vocab.txt"
    flags = ["--vocab", vocabulary, "--size", "tiny", "--sst2", tmp_path / "rows.tsv", "--rounds", 1]
    for command in run_benchmark("inference", *flags)["SST-2"].values():
        assert command["difference"] < 2e-4  # probabilities are rounded to four digits
        assert command["speedup"] > 0
