"""The modern style from end to end: pre-training, resuming, fine-tuning, export."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import MODERN, run
from synthetic import write_rows
from transformers import ModernBertForSequenceClassification

from electra.cli import main
from electra.finetuning.config import TaskConfig, TuningConfig
from electra.finetuning.job import FinetuningTask, Job
from electra.finetuning.kinds import define_task
from electra.finetuning.models import TaskModel, mean_pool
from electra.finetuning.storage import build_task_model, load_finetuned_model, load_pretrained, save_finetuned_model
from electra.model.encoder import Encoder
from electra.model.storage import load_model, save_model
from electra.pretraining.command import pretrain
from electra.serving.inference import load
from electra.training.checkpoint import find_model_folder
from electra.training.config import HardwareConfig
from electra.training.logging import read_metrics

MODERN_RUN = {"style": "modern", "sinusoidal_positions": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"sharing": "none", "generator_width": 16, "global_attention_every": 2, "local_attention": 4},
        {"sharing": "embeddings", "packing": "segment-pairs", "length": 24, "mask_token_probability": 0.85},
        {"sharing": "all", "activation_checkpointing": True, "dropout": 0.1},
        {"sharing": "disentangled", "generator_width": 16, "optimizer": "adamw"},
        {"objective": "mlm"},
    ],
    ids=lambda settings: settings.get("sharing", "mlm"),
)
def test_modern_models_lower_their_loss(run_config, settings):
    intervals = {"steps": 80, "learning_rate": 5e-3, "save_every": 80, "evaluate_every": 80}
    config = run_config(**MODERN_RUN, layers=2, **intervals, **settings)
    pretrain(config)
    losses = [line["generator"] for line in read_metrics(config.output / "metrics.jsonl") if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1


def test_resumed_run_equals_an_uninterrupted_one(run_config):
    config = run_config(**MODERN_RUN)
    pretrain(config)
    last = find_model_folder(config.output)
    expected = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    pretrain(replace(config, resume=True))
    assert (find_model_folder(config.output) / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--style modern --sinusoidal-positions", "needs position embeddings, which --style modern does not have"),
        ("--style classic --global-attention-every 3", "--global-attention-every is 3, but only --style modern has it"),
        ("--style baroque", "--style is 'baroque'"),
        ("--style modern --width 36 --heads 4", "4 heads of width 9, but rotary positions need an even"),
        ("--style modern --sharing all --generator-width 16", "--sharing is all, which needs the same width"),
    ],
)
def test_contradicting_flags_are_an_error(shards, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as exit:
        main(f"pretrain --data {shards} --output {tmp_path}/run --size tiny --steps 2 {flags}".split())
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_dry_run_describes_local_attention(shards, tmp_path, capsys):
    flags = f"--data {shards} --output {tmp_path}/run --size tiny --style modern --steps 2 --dry-run"
    assert "attention within" not in run(f"pretrain {flags}", capsys)
    assert "attention within 16 tokens" in run(
        f"pretrain {flags} --global-attention-every 2 --local-attention 16", capsys
    )


def test_flops_of_both_styles(capsys):
    classic, modern = (json.loads(run(f"flops --style {style} --json", capsys)) for style in ("classic", "modern"))
    assert modern["parameters"] == pytest.approx(classic["parameters"], rel=0.03)
    assert "final norm" in {item["name"] for item in modern["parts"]["discriminator"]}


def test_trained_pair_detects_fills_and_embeds(run_config):
    config = run_config(**MODERN_RUN)
    pretrain(config)
    model = load(config.output, "cpu")
    assert len(model.detect("the big cat sat").replaced) == 6
    assert len(model.fill("the big [MASK] sat", 3).masks[0].tokens) == 3
    assert model.embed(["the big cat", "the dog"]).shape == (2, 32)


@pytest.mark.parametrize(
    ("kind", "pooling"), [("classification", "cls"), ("multi-label", "mean"), ("regression", "cls")]
)
def test_finetuned_model_learns_and_exports_with_equal_logits(modern_folder, tmp_path, capsys, kind, pooling):
    rows = write_rows(tmp_path / "rows.jsonl", kind, 240, seed=0)
    flags = f"--model {modern_folder} --train {rows} --dev {rows} --text text --label label --output {tmp_path}/out"
    flags += f" --pooling {pooling}"
    tuned = run(
        f"finetune {flags} --epochs 12 --learning-rate 3e-3 --length 32 --device cpu --dropout 0 --json", capsys
    )
    assert next(iter(json.loads(tuned)["median"]["dev"].values())) > 0.9
    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    theirs = ModernBertForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    ours, finetuned = load_finetuned_model(tmp_path / "out/seed-1/model")
    input_ids, mask = (
        torch.tensor([[2, 5, 10, 11, 3, 0], [2, 6, 7, 3, 0, 0]]),
        torch.tensor([[1] * 5 + [0], [1] * 4 + [0] * 2]),
    )
    with torch.no_grad():
        expected = ours(input_ids, mask, torch.zeros_like(input_ids)).numpy()
        expected = expected if finetuned.task.labels else finetuned.task.denormalize_scores(expected)
        assert np.abs(theirs(input_ids, attention_mask=mask).logits.numpy() - expected).max() < 1e-5
    assert list(theirs.config.id2label.values()) == list(finetuned.task.labels or ("score",))
    assert theirs.config.classifier_pooling == pooling


@pytest.fixture
def trained_head(modern_folder, tmp_path):
    """The folder of a model whose head has random norm weights."""
    electra = load_model(modern_folder)
    torch.nn.init.normal_(electra.require_discriminator().head.norm.weight)
    save_model(electra, tmp_path / "trained", modern_folder)
    return tmp_path / "trained"


def test_task_head_starts_from_the_weights_that_transformers_reuses(trained_head, tmp_path, capsys):
    run(f"export --model {trained_head} --output {tmp_path}/hf", capsys)
    theirs = ModernBertForSequenceClassification.from_pretrained(
        tmp_path / "hf", num_labels=3, ignore_mismatched_sizes=True
    )
    for folder in (trained_head, tmp_path / "hf"):
        ours = build_task_model(load_pretrained(folder), num_labels=3, seed=0).head
        assert torch.equal(ours.dense.weight, theirs.head.dense.weight)
        assert torch.equal(ours.norm.weight, theirs.head.norm.weight)


def test_encoder_without_a_head_gets_one_by_the_seed(trained_head, tmp_path, capsys):
    run(f"export --model {trained_head} --part encoder --output {tmp_path}/hf", capsys)
    run(f"import --from {tmp_path}/hf --output {tmp_path}/bare", capsys)
    starts = [(load_pretrained(tmp_path / "bare"), seed) for seed in (1, 1, 2)]
    heads = [build_task_model(start, num_labels=3, seed=seed).head.dense.weight for start, seed in starts]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_next_task_keeps_the_pooling_but_not_the_classifier(trained_head, tmp_path):
    start = load_pretrained(trained_head)
    assert start.pooling == "cls"
    task = define_task(TaskConfig(train=write_rows(tmp_path / "rows.jsonl", "regression", 20, seed=0)))
    (tmp_path / "tuned").mkdir()
    save_finetuned_model(
        build_task_model(start, task.num_labels, "mean", seed=1), task, 32, tmp_path / "tuned", start.folder
    )
    tuned = load_pretrained(tmp_path / "tuned")
    again, other = build_task_model(tuned, 1, seed=1), build_task_model(tuned, 1, "cls", seed=1)
    assert (again.pooling, other.pooling) == ("mean", "cls")
    first = load_finetuned_model(tmp_path / "tuned")[0].head.weight
    assert not torch.allclose(again.head.weight, first, atol=0.01)


def test_mean_pooling_counts_tokens_exactly():
    hidden, attention_mask = torch.ones(1, 400, 2, dtype=torch.bfloat16), torch.arange(400)[None] < 365
    assert mean_pool(hidden, attention_mask).tolist() == [[1.0, 1.0]]  # bf16 cannot represent 365


def test_final_norm_has_the_learning_rate_of_the_top_layer(modern_folder, tmp_path):
    task = define_task(
        TaskConfig(train=write_rows(tmp_path / "rows.jsonl", "classification", 20, seed=0), text="text", label="label")
    )
    tuning, folder = TuningConfig(length=32), tmp_path / "seed-1"
    finetuning = FinetuningTask(
        Job(model=modern_folder, task=task, tuning=tuning, hardware=HardwareConfig(), seed=1, folder=folder)
    )
    scales = [
        finetuning.lr_scale(f"encoder.{name}") for name in ("final_norm.weight", "layers.3.feedforward_norm.weight")
    ]
    assert scales == [0.8, 0.8]


def test_dropout_precedes_the_last_layer_of_the_head():
    torch.manual_seed(0)
    head = TaskModel(Encoder(replace(MODERN, dropout=0.5)), num_labels=3).head
    state = torch.randn(1, MODERN.width)
    assert not torch.equal(head(state), head(state))
    head.eval()
    hidden = head.norm(torch.nn.functional.gelu(head.dense(state)))
    torch.testing.assert_close(head(state), hidden @ head.weight.T + head.bias)
