"""Modern pairs from the command line: they learn, go on, are fine-tuned, and leave with the same answers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import MODERN
from synthetic import write_rows
from transformers import ModernBertForSequenceClassification

from electra.cli import main
from electra.finetuning.config import TuningConfig
from electra.finetuning.job import FinetuningTask, Job
from electra.finetuning.model import (
    TaskModel,
    build_task_model,
    load_finetuned,
    load_pretrained,
    mean_pool,
    save_finetuned,
)
from electra.finetuning.tasks import custom_task
from electra.model.electra import SHARING
from electra.model.encoder import Encoder
from electra.model.storage import load_model, save_model
from electra.pretraining.command import pretrain
from electra.serve.inference import load
from electra.training.checkpoint import model_folder
from electra.training.config import HardwareConfig
from electra.training.logging import read_metrics

SMALL = "--size tiny --style modern --layers 2 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --length 16"
QUICK = "--batch-size 8 --log-every 5 --evaluation-rows 8 --device cpu --learning-rate 5e-3 --no-unigram-output-bias"


def run(command: str, capsys) -> str:
    """What a command prints."""
    main(command.split())
    return capsys.readouterr().out


def refused(command: str, capsys) -> str:
    """The one sentence with which a command ends."""
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("sharing", SHARING)
def test_every_sharing_scheme_lowers_the_loss(shards, tmp_path, capsys, sharing):
    width = "" if sharing == "all" else "--generator-width 16"
    out = run(
        f"pretrain --data {shards} --output {tmp_path}/run --steps 80 {SMALL} {QUICK} --sharing {sharing} {width}",
        capsys,
    )
    assert "finished: 80 steps" in out
    losses = [line["generator"] for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "departures",
    [
        {"global_attention_every": 2, "local_attention": 4},
        {"objective": "mlm"},
        {"packing": "segment-pairs", "length": 24, "mask_token_probability": 0.85},
        {"activation_checkpointing": True, "dropout": 0.1},
        {"optimizer": "adamw"},
    ],
    ids=lambda departures: ",".join(departures),
)
def test_every_setting_lowers_the_loss(run_config, departures):
    modern = {"style": "modern", "sinusoidal_positions": False, "layers": 2}
    often = {"steps": 80, "learning_rate": 5e-3, "save_every": 80, "evaluate_every": 80}
    config = run_config(**modern | often | departures)
    pretrain(config)
    losses = [line["generator"] for line in read_metrics(config.output / "metrics.jsonl") if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1


def test_a_resumed_run_ends_as_an_unbroken_one(run_config):
    modern = {"style": "modern", "sinusoidal_positions": False}
    whole, broken = run_config("whole", **modern), run_config("broken", **modern)
    pretrain(whole)
    pretrain(broken)
    last = model_folder(broken.output)
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    pretrain(replace(broken, resume=True))
    files = [(model_folder(config.output) / "model.safetensors").read_bytes() for config in (whole, broken)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--style modern --sinusoidal-positions",
            "needs position embeddings, which --style modern does not have",
        ),
        (
            "--style classic --global-attention-every 3",
            "--global-attention-every is 3, but only --style modern has it",
        ),
        ("--style baroque", "--style is 'baroque'"),
        ("--style modern --width 36 --heads 4", "4 heads of width 9, but rotary positions need an even"),
        ("--style modern --sharing all --generator-width 16", "--sharing is all, which needs the same width"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(shards, tmp_path, capsys, flags, sentence):
    said = refused(f"pretrain --data {shards} --output {tmp_path}/run --size tiny --steps 2 {flags}", capsys)
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_its_layers_see(shards, tmp_path, capsys):
    flags = f"--data {shards} --output {tmp_path}/run --size tiny --style modern --steps 2 --dry-run"
    assert "attention within" not in run(f"pretrain {flags}", capsys)
    assert "attention within 16 tokens" in run(
        f"pretrain {flags} --global-attention-every 2 --local-attention 16", capsys
    )


def test_flops_tell_the_styles_apart(capsys):
    classic, modern = (json.loads(run(f"flops --style {style} --json", capsys)) for style in ("classic", "modern"))
    assert modern["parameters"] == pytest.approx(classic["parameters"], rel=0.03)
    assert "final norm" in {item["name"] for item in modern["parts"]["discriminator"]}


def test_a_trained_pair_detects_fills_and_embeds(run_config):
    config = run_config(style="modern", sinusoidal_positions=False)
    pretrain(config)
    model = load(config.output, "cpu")
    assert len(model.detect("the big cat sat").replaced) == 6
    assert len(model.fill("the big [MASK] sat", 3).masks[0].tokens) == 3
    assert model.embed(["the big cat", "the dog"]).shape == (2, 32)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("classification", "cls"), ("classification", "mean"), ("multi-label", "mean"), ("regression", "cls")],
)
def test_a_fine_tuned_model_learns_and_leaves_with_the_same_answers(modern_folder, tmp_path, capsys, kind, pooling):
    rows = write_rows(tmp_path / "rows.jsonl", kind, 240, seed=0)
    flags = f"--model {modern_folder} --train {rows} --dev {rows} --text text --label label --output {tmp_path}/out"
    flags += f" --pooling {pooling}"
    tuned = run(
        f"finetune {flags} --epochs 12 --learning-rate 3e-3 --length 32 --device cpu --dropout 0 --json", capsys
    )
    assert next(iter(json.loads(tuned)["median"]["dev"].values())) > 0.9
    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    theirs = ModernBertForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    ours, task = load_finetuned(tmp_path / "out/seed-1/model")
    input_ids, mask = (
        torch.tensor([[2, 5, 10, 11, 3, 0], [2, 6, 7, 3, 0, 0]]),
        torch.tensor([[1] * 5 + [0], [1] * 4 + [0] * 2]),
    )
    with torch.no_grad():
        expected = ours(input_ids, mask, torch.zeros_like(input_ids)).numpy()
        expected = expected if task.labels else task.denormalize_scores(expected)
        assert np.abs(theirs(input_ids, attention_mask=mask).logits.numpy() - expected).max() < 1e-5
    assert list(theirs.config.id2label.values()) == list(task.labels or ("score",))
    assert theirs.config.classifier_pooling == pooling


@pytest.fixture
def trained_head(modern_folder, tmp_path):
    """The folder of a model whose head has a norm that is no longer as it was drawn."""
    electra = load_model(modern_folder)
    torch.nn.init.normal_(electra.require_discriminator().head.norm.weight)
    save_model(electra, tmp_path / "trained", modern_folder)
    return tmp_path / "trained"


def test_a_head_starts_with_what_transformers_takes_over(trained_head, tmp_path, capsys):
    run(f"export --model {trained_head} --output {tmp_path}/hf", capsys)
    theirs = ModernBertForSequenceClassification.from_pretrained(
        tmp_path / "hf", num_labels=3, ignore_mismatched_sizes=True
    )
    for folder in (trained_head, tmp_path / "hf"):
        ours = build_task_model(load_pretrained(folder), num_labels=3, seed=0).head
        assert torch.equal(ours.dense.weight, theirs.head.dense.weight)
        assert torch.equal(ours.norm.weight, theirs.head.norm.weight)


def test_a_bare_encoder_gets_a_head_by_the_seed(trained_head, tmp_path, capsys):
    run(f"export --model {trained_head} --part encoder --output {tmp_path}/hf", capsys)
    run(f"import --from {tmp_path}/hf --output {tmp_path}/bare", capsys)
    starts = [(load_pretrained(tmp_path / "bare"), seed) for seed in (1, 1, 2)]
    heads = [build_task_model(start, num_labels=3, seed=seed).head.dense.weight for start, seed in starts]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_another_task_goes_on_with_what_the_head_read(trained_head, tmp_path):
    start = load_pretrained(trained_head)
    assert start.pooling == "cls"
    task = custom_task(train=write_rows(tmp_path / "rows.jsonl", "regression", 20, seed=0), text="text", label="label")
    (tmp_path / "tuned").mkdir()
    save_finetuned(build_task_model(start, task.num_labels, "mean", seed=1), task, 32, tmp_path / "tuned", start.folder)
    onwards = load_pretrained(tmp_path / "tuned")
    again, otherwise = build_task_model(onwards, 1, seed=1), build_task_model(onwards, 1, "cls", seed=1)
    assert (again.pooling, otherwise.pooling) == ("mean", "cls")
    first = load_finetuned(tmp_path / "tuned")[0].head.weight
    assert not torch.allclose(again.head.weight, first, atol=0.01)  # what it means for another task is drawn anew


def test_a_mean_counts_the_tokens_exactly():
    hidden, attention_mask = torch.ones(1, 400, 2, dtype=torch.bfloat16), torch.arange(400)[None] < 365
    assert mean_pool(hidden, attention_mask).tolist() == [[1.0, 1.0]]  # 365 is not a number in bf16


def test_the_final_norm_learns_as_fast_as_the_top_layer(modern_folder, tmp_path):
    task = custom_task(
        train=write_rows(tmp_path / "rows.jsonl", "classification", 20, seed=0), text="text", label="label"
    )
    tuning, folder = TuningConfig(length=32), tmp_path / "seed-1"
    lesson = FinetuningTask(
        Job(model=modern_folder, task=task, tuning=tuning, hardware=HardwareConfig(), seed=1, folder=folder)
    )
    shares = [lesson.lr_scale(f"encoder.{name}") for name in ("final_norm.weight", "layers.3.feedforward_norm.weight")]
    assert shares == [0.8, 0.8]


def test_dropout_stands_before_the_last_layer_of_the_head():
    torch.manual_seed(0)
    head = TaskModel(Encoder(replace(MODERN, dropout=0.5)), num_labels=3).head
    state = torch.randn(1, MODERN.width)
    assert not torch.equal(head(state), head(state))
    head.eval()
    hidden = head.norm(torch.nn.functional.gelu(head.dense(state)))
    torch.testing.assert_close(head(state), hidden @ head.weight.T + head.bias)
