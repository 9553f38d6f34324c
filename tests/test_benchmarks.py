"""Benchmarks run, and what they time is the same work on both sides."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from peers import shaken


@pytest.fixture
def pretrain(monkeypatch):
    """benchmarks/pretrain.py as a module, on the CPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("pretrain")


def test_both_sides_of_a_pretraining_step_have_the_same_parameters_and_first_losses(pretrain, shards, capsys):
    settings = "--settings tiny:4x16 --dropout 0.1 --steps 2 --peers eager --ours plain --forward 1"
    pretrain.main(f"--data {shards} {settings} --json".split())
    found = json.loads(capsys.readouterr().out)
    eager, plain = found["rows"]
    assert eager["parameters"] == plain["parameters"]
    assert [check.split(":")[0] for check in found["checks"]] == ["the same work"]
    assert eager["ratio"] == 1
    assert plain["ratio"] == pytest.approx(eager["step_seconds"] / plain["step_seconds"])
    assert found["forward"][0]["logits_apart"] < 1e-5


def test_a_profile_has_all_of_a_step_and_knows_its_products(pretrain, shards, capsys):
    sides = "--dropout 0 --steps 2 --peers --ours plain --forward --profile --json"
    pretrain.main(f"--data {shards} --settings tiny:4x64 {sides}".split())
    [row] = json.loads(capsys.readouterr().out)["rows"]
    altogether = sum(kind["milliseconds"] for kind in row["kinds"].values())
    assert 0.3 < altogether / (1000 * row["step_seconds"]) < 3
    assert row["kinds"]["products"]["milliseconds"] > 0.1 * altogether
    assert {"attention", "gelu", "norms", "optimizer"} <= {name for name, kind in row["kinds"].items() if kind["count"]}


def test_a_side_that_fails_says_why_and_the_others_go_on(pretrain, shards, capsys):
    sides = "--dropout 0 --steps 1 --peers --ours plain --forward"
    pretrain.main(f"--data {shards} --settings tiny:2x1024 tiny:2x16 {sides}".split())
    printed = capsys.readouterr().out
    assert "failed: ConfigError: " in printed
    assert "tokens/s" in printed


def test_the_peers_two_losses_are_one(pretrain, make_pair, make_batch, vocabulary):
    pair = shaken(pretrain.Pair(make_pair().config))
    input_ids = make_batch(rows=4, length=16, lengths=[16] * 4).input_ids  # [CLS], 14 tokens, [SEP]
    eager, lean = (losses(pair, input_ids, 14, vocabulary) for losses in pretrain.PEERS.values())
    assert eager["generator"].item() == pytest.approx(lean["generator"].item(), rel=1e-5)
    assert eager["discriminator"].item() == pytest.approx(lean["discriminator"].item(), rel=0.5)  # other samples


def test_a_path_follows_itself(pretrain, shards, capsys):
    pretrain.main(f"--data {shards} --settings tiny:4x16 --dropout 0 --follow 3 --json".split())
    [found] = json.loads(capsys.readouterr().out)["follow"]
    assert found["generator_apart"] == found["discriminator_apart"] == 0
