"""Objectives and phases from the command line: they learn, hand over what they say, and go on after a kill."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from electra.cli import main
from electra.data.shards import open_shards
from electra.errors import ConfigError
from electra.export.command import export
from electra.export.config import ExportConfig
from electra.finetuning.model import load_pretrained
from electra.model.storage import load_model, read_model_config, read_tensors
from electra.pretraining.command import plan, pretrain
from electra.pretraining.config import PretrainConfig
from electra.pretraining.phases import parse_phases
from electra.runfolder import checkpoint_folders
from electra.serve.inference import load
from electra.training.checkpoint import model_folder
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer

TWO_STAGE = {"phases": ("objective=mlm", "objective=frozen-rtd"), "sharing": "none"}
SMALL = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --length 16 --batch-size 8 "
SMALL += "--log-every 10 --evaluation-rows 32 --device cpu --learning-rate 5e-3 --no-unigram-output-bias"


def lines(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize(
    ("flags", "lowered"),
    [
        ("--objective rtd --generator uniform", "discriminator"),
        ("--objective rtd --generator unigram", "discriminator"),
        ("--objective electra-15", "generator"),
        ("--objective electra-15 --generator unigram", "discriminator"),
        ("--objective replace-mlm", "replace_mlm"),
        ("--objective replace-mlm --sharing none --generator uniform", "replace_mlm"),
        ("--objective all-tokens-mlm --sharing disentangled", "all_tokens_mlm"),
        ("--objective all-tokens-mlm --sharing all", "all_tokens_mlm"),
        ("--objective adversarial --entropy-bonus 0.01 --sharing none", "baseline"),
        ("--phases fraction=0.75 length=24,batch-size=4 --generator-width 32", "generator"),
        ("--phases objective=mlm objective=rtd --generator-width 32", "generator"),
        ("--phases objective=mlm objective=frozen-rtd --sharing none --generator-width 32", "discriminator"),
        (
            "--phases objective=mlm objective=frozen-rtd --sharing none --no-init-discriminator-from-generator",
            "discriminator",
        ),
        ("--phases objective=rtd objective=replace-mlm", "replace_mlm"),
    ],
)
def test_objectives_generators_and_phases_run_from_the_command_line_and_lower_their_loss(
    shards, tmp_path, capsys, flags, lowered
):
    main(f"pretrain --data {shards} --output {tmp_path}/run --steps 80 {SMALL} {flags}".split())
    assert "finished: 80 steps" in capsys.readouterr().out
    losses = [line[lowered] for line in lines(tmp_path / "run", "train") if lowered in line]
    assert losses[-1] < losses[0]
    encoder = load_pretrained(tmp_path / "run").encoder
    assert encoder.config.width == 32
    export(ExportConfig(model=tmp_path / "run", output=tmp_path / "hf", part="encoder"))


def test_what_does_not_exist_is_not_measured(run_config):
    def measured(name: str, **departures) -> set[str]:
        return set(pretrain(run_config(name, **{"steps": 2} | departures)).metrics)

    generator = {"mlm_loss", "mlm_accuracy", "sample_accuracy", "generator_entropy"}
    frozen, joint = (
        {f"{kind}_{it}" for it in ("loss", "accuracy", "precision", "recall", "auc")} for kind in ("frozen", "rtd")
    )
    replace_mlm = {"replace_mlm_loss", "replace_mlm_accuracy"}
    assert measured("rtd") == measured("adversarial", objective="adversarial") == {"loss"} | generator | joint | frozen
    assert measured("uniform", generator="uniform", generator_width=None) == {"loss"} | frozen
    assert measured("replace", objective="replace-mlm") == {"loss"} | generator | replace_mlm
    assert measured("mlm", objective="mlm") == {"loss"} | generator


def test_a_masked_language_model_has_no_discriminator_to_export(run_config, tmp_path):
    config = run_config(objective="all-tokens-mlm", steps=1)
    pretrain(config)
    with pytest.raises(ConfigError, match="corrects tokens and has no verdicts of them; hand out its --part encoder"):
        export(ExportConfig(model=config.output, output=tmp_path / "hf"))
    model = load(config.output, device="cpu")
    with pytest.raises(ConfigError, match="no discriminator, only a masked language model"):
        model.detect("the cat sat")
    assert len(model.embed("the cat sat")[0]) == 32
    assert model.fill("the [MASK] sat").blanks


def phase_weights(config: PretrainConfig, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(config.output / "checkpoints" / f"step-{step:09d}" / "model.safetensors")


def test_two_stage_hands_over_the_encoder_and_freezes_the_generator(run_config, monkeypatch):
    config = run_config(**TWO_STAGE, steps=20)
    first = []
    take_step = Trainer.step

    def look_then_step(self):
        if self.state.step == 10:
            first.append({name: weight.detach().clone() for name, weight in self.lesson.model.named_parameters()})
        take_step(self)

    monkeypatch.setattr(Trainer, "step", look_then_step)
    pretrain(config)
    [start], before, after = first, phase_weights(config, 10), phase_weights(config, 20)
    assert {name.split(".")[0] for name in before} == {"generator"}
    for name, weight in before.items():
        assert torch.equal(start[name], weight)
        assert torch.equal(after[name], weight)
        if ".encoder." in name:
            assert torch.equal(start[name.replace("generator.", "discriminator.")], weight)
    moved = [name for name in after if name.startswith("discriminator.") and not torch.equal(after[name], start[name])]
    assert len(moved) == len([name for name in after if name.startswith("discriminator.")])


def test_without_a_hand_over_the_discriminator_starts_afresh(run_config):
    config = run_config(**TWO_STAGE, init_discriminator_from_generator=False, generator_width=16, steps=20)
    pretrain(config)
    discriminator = load_model(model_folder(config.output)).discriminator
    assert discriminator.encoder.config.width == 32
    assert phase_weights(config, 10)["generator.encoder.layers.0.attention.qkv.weight"].shape == (48, 16)


def test_a_phase_takes_over_all_weights_but_another_objectives_head(run_config, shards):
    config = run_config(phases=("objective=rtd", "objective=replace-mlm"), steps=2, learning_rate=1e-12)
    pretrain(config)
    before, after = phase_weights(config, 1), phase_weights(config, 2)
    for name, weight in before.items():
        if not name.startswith("discriminator.head."):
            torch.testing.assert_close(after[name], weight)
    assert after["discriminator.head.dense.weight"].shape == (16, 32)


PLANS = {
    "two-stage": TWO_STAGE,
    "lengths": {"phases": ("fraction=0.5", "length=24,batch-size=4")},
    "three": {"phases": ("fraction=0.25,length=8", "fraction=0.25", "objective=electra-15")},
}


@pytest.mark.parametrize("departures", PLANS.values(), ids=PLANS)
def test_stopped_in_any_phase_a_run_ends_with_the_same_bytes(run_config, monkeypatch, departures):
    settings = {
        "steps": 20,
        "save_every": 100,
        "evaluate_every": 100,
        "dropout": 0.1,
        "optimizer": "adamw",
    } | departures
    whole, part = run_config("whole", **settings), run_config("part", resume=True, **settings)
    pretrain(whole)
    take_step = Trainer.step

    def step_then_signal(self):
        take_step(self)
        if self.state.step in (3, 10, 13):  # in the first phase, where it ends, and in the last
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", step_then_signal)
    assert [pretrain(part).step for _ in range(4)] == [3, 10, 13, 20]
    ours, theirs = (model_folder(config.output) / "model.safetensors" for config in (whole, part))
    assert ours.read_bytes() == theirs.read_bytes()


def test_one_schedule_runs_over_phases_of_one_objective_and_starts_again_with_another(run_config):
    settings = {"steps": 20, "log_every": 1, "warmup": 0.0, "schedule": "linear", "optimizer": "adamw"}
    rates = {}
    for name in ("two-stage", "lengths"):
        config = run_config(name, **settings | PLANS[name])
        pretrain(config)
        rates[name] = [line["learning_rate"] / config.optimizer.learning_rate for line in lines(config.output, "train")]
    assert rates["lengths"] == pytest.approx([1 - (step + 0.5) / 20 for step in range(20)])
    assert rates["two-stage"] == pytest.approx(2 * [1 - (step + 0.5) / 10 for step in range(10)])


def test_phases_divide_every_kind_of_budget(run_config, shards):
    def budgets(**budget) -> list:
        phases = ("fraction=0.75", "length=32,batch-size=2")
        return [phase.budget for phase in plan(run_config(phases=phases, **budget), open_shards(shards))]

    assert [one.steps for one in budgets(steps=21)] == [16, 5]
    assert [one.steps for one in budgets(steps=None, tokens=4 * 1280)] == [3840 // (8 * 16), 1280 // (2 * 32)]
    assert [one.seconds for one in budgets(steps=None, minutes=4.0)] == [180, 60]


def test_a_dry_run_adds_up_its_phases(run_config):
    estimate = pretrain(run_config(**PLANS["lengths"], steps=20, dry_run=True))
    assert (estimate.steps, estimate.tokens) == (20, 10 * 8 * 16 + 10 * 4 * 24)


def test_shares_that_are_not_named_divide_what_is_left():
    phases = parse_phases(["fraction=0.5,length=128", "learning-rate=1e-3", "objective=mlm"])
    assert [(phase.begin, phase.end) for phase in phases] == [(0, 0.5), (0.5, 0.75), (0.75, 1)]
    assert [phase.settings for phase in phases] == [{"length": 128}, {"learning_rate": 1e-3}, {"objective": "mlm"}]
    with pytest.raises(ConfigError, match="one word with spaces; write each phase as a word: --phases share"):
        parse_phases(["fraction=0.5 fraction=0.5"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--objective mlm --generator uniform", "--objective mlm needs a generator, and --generator uniform is none; "),
        ("--objective adversarial --generator unigram", "--objective adversarial needs a generator"),
        (
            "--generator uniform --generator-width 8",
            "--generator-width is 8, which is for a generator, and --generator u",
        ),
        ("--generator uniform --temperature 0.5", "--temperature is 0.5, which is for a generator"),
        ("--generator uniform --sharing all", "sharing=all needs a generator, and --generator uniform is none"),
        ("--entropy-bonus 0.1", "--entropy-bonus is 0.1, which only --objective adversarial pays"),
        ("--objective frozen-rtd --sharing none", "objective=frozen-rtd --sharing none --generator-width 32), or give"),
        (
            "--objective frozen-rtd",
            "--objective frozen-rtd needs a generator that was trained before; train",
        ),
        (
            "--phases objective=mlm objective=frozen-rtd",
            "frozen generator; add --sharing none --generator-width 32",
        ),
        (
            "--phases objective=mlm objective=frozen-rtd --no-init-discriminator-from-generator",
            "a frozen generator; add --sharing none\n",
        ),
        (
            "--phases objective=mlm objective=frozen-rtd --sharing none",
            "cannot start with the weights of a generator 16 wide and 1 deep: it is 32 and 1; give both one size",
        ),
        ("--phases objective=best", "there is no objective 'best'; choose from rtd, electra-15"),
        ("--phases colour=blue", "'colour=blue' in --phases is not one of a phase's settings (objective, length"),
        ("--phases fraction=0.9 fraction=0.1,lenght=64", "share); did you mean length?"),
        (
            "--phases fraction=0.9,fraction=0.1",
            "share comes twice in the phase 'fraction=0.9,fraction=0.1'; put a space between",
        ),
        ("--phases fraction=0.999 fraction=0.001", "a share of 0.001 of 80 steps is less than one step"),
        ("--phases objective=rtd objective=mlm", "mlm after rtd would leave the discriminator behind"),
        ("--phases objective=rtd --objective adversarial", "--objective adversarial is that of no phase"),
        (
            "--no-init-discriminator-from-generator",
            "--no-init-discriminator-from-generator is for --phases that bring in a discriminator, and none does",
        ),
        (
            "--phases fraction=0.5 fraction=0.5 --no-init-discriminator-from-generator",
            "--no-init-discriminator-from-generator is for --phases that bring in a discriminat",
        ),
        ("--objective mlm --generator-width 8", "--generator-width is 8, which mlm does not look at; leave it out"),
        ("--objective mlm --sharing all", "sharing is all, which mlm does not look at"),
        ("--objective mlm --discriminator-weight 20", "--discriminator-weight is 20.0, which mlm does not look at"),
        (
            "--objective replace-mlm --correct-sample-label replaced",
            "--correct-sample-label is replaced, which replace-mlm does not loo",
        ),
        ("--optimizer adamw --momentum 0.9", "--momentum is 0.9, which is muon's; adamw has beta1; leave it out"),
        ("--decay 0.5", "--decay is 0.5, which is for --schedule wsd, not linear; leave it out"),
        ("--schedule decay", "--schedule decay ends what was trained before; give it with --branch-from or --init"),
        (
            "--disallow-correct --correct-sample-label replaced",
            "--disallow-correct leaves no right guesses to count as replac",
        ),
        ("--generator uniform --phases temperature=0.5", "temperature=0.5 in --phases is for a generator, and --gener"),
        ("--phases length=long", "'length=long' in --phases: 'long' is not a whole number"),
        (
            "--phases fraction=0.5 fraction=0.6",
            "the shares in --phases are 0.5 and 0.6; they must be above 0 and, all toge",
        ),
        ("--phases length=16 length=1024", "a row of 1024 tokens is longer than the model's 512 positions"),
    ],
)
def test_contradictory_settings_are_refused_in_one_sentence(shards, tmp_path, capsys, flags, sentence):
    with pytest.raises(SystemExit) as exit:
        main(f"pretrain --data {shards} --output {tmp_path}/run --steps 80 {SMALL} {flags}".split())
    said = capsys.readouterr().err
    assert exit.value.code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            "",
            [
                "classic: discriminator of 1 layer, 32 wide; generator of 1 layer, 16 wide; embeddings shared",
                "rtd, 80 steps: 8 × 16 tokens a step, 30 % masked; muon at 0.005, linear",
            ],
        ),
        (
            "--phases objective=mlm objective=frozen-rtd,length=8 --sharing none --no-init-discriminator-from-generator",
            [
                "classic: discriminator of 1 layer, 32 wide; generator of 1 layer, 16 wide; nothing shared",
                "phase 1 of 2, mlm, 40 steps: 8 × 16 tokens a step, 30 % masked; muon at 0.005, linear",
                "phase 2 of 2, frozen-rtd, 40 steps: 8 × 8 tokens a step, 30 % masked; muon at 0.005, linear; the "
                "discriminator starts with new weights",
            ],
        ),
        (
            "--objective mlm --dropout 0.1",
            ["classic: masked language model of 1 layer, 32 wide, dropout 0.1", "mlm, 80"],
        ),
        ("--generator uniform", ["classic: discriminator of 1 layer, 32 wide; no generator: uniform replacements"]),
        ("--objective replace-mlm", ["classic: masked language model of 1 layer, 32 wide; generator of 1"]),
    ],
)
def test_a_dry_run_says_what_the_run_would_be(shards, tmp_path, capsys, flags, lines):
    main(f"pretrain --data {shards} --output {tmp_path}/run --steps 80 --dry-run {SMALL} {flags}".split())
    said = capsys.readouterr().out.splitlines()
    assert [line[: len(start)] for line, start in zip(said, lines, strict=False)] == lines


def test_a_warm_up_longer_than_the_run_is_told(shards, tmp_path, capsys):
    given = f"pretrain --data {shards} --output {tmp_path}/run --steps 8 {SMALL} --dry-run --warmup"
    main([*given.split(), "100"])
    assert "warmup takes 100 steps and training only 8: the learning rate stays below 8% of" in capsys.readouterr().err
    main([*given.split(), "0.5"])
    assert "warmup" not in capsys.readouterr().err


def test_what_is_refused_today_does_not_stop_a_run_that_was_begun(run_config):
    config = run_config(steps=2)
    pretrain(config)
    record = json.loads((config.output / "config.json").read_text())
    record["pretraining"]["init_discriminator_from_generator"] = False
    (config.output / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="--no-init-discriminator-from-generator is for --phases"):
        pretrain(replace(config, init_discriminator_from_generator=False))
    assert pretrain(replace(config, init_discriminator_from_generator=False, resume=True)).step == 2


@pytest.mark.parametrize(("last", "head"), [("all-tokens-mlm", "copy_mlm"), ("adversarial", "rtd")])
def test_the_record_of_a_run_has_the_model_it_ends_as(run_config, last, head):
    config = run_config(phases=("objective=rtd", f"objective={last}"))
    pretrain(config)
    recorded, ended = (read_model_config(folder) for folder in (config.output, model_folder(config.output)))
    assert recorded == ended
    assert (ended.head, ended.has_baseline) == (head, last == "adversarial")


def test_a_phase_of_one_step_is_a_phase(run_config, shards):
    config = run_config(steps=4, phases=("fraction=0.375", "fraction=0.25", "fraction=0.375"))
    assert all(phase.budget.steps for phase in plan(config, open_shards(shards)))


def test_each_phase_has_a_best_of_its_own(run_config):
    phases = ("fraction=0.5,mask-fraction=0.1", "fraction=0.5,mask-fraction=0.6")  # the second's loss is far higher
    config = run_config(steps=4, phases=phases, save_every=1, evaluate_every=1, keep_checkpoints=1)
    pretrain(config)
    assert "step-000000002" not in [folder.name for folder in checkpoint_folders(config.output)]


def test_the_record_of_a_run_has_its_phases(run_config):
    config = run_config(**TWO_STAGE, steps=4)
    pretrain(config)
    record = json.loads((config.output / "config.json").read_text())
    assert record["pretraining"]["phases"] == list(TWO_STAGE["phases"])
    assert [folder.name for folder in checkpoint_folders(config.output)] == ["step-000000002", "step-000000004"]
    with pytest.raises(ConfigError, match=r"phases was .* and is now \[\]"):
        pretrain(replace(config, resume=True, phases=(), objective="mlm"))


@pytest.mark.parametrize("objective", ["electra-15", "replace-mlm", "all-tokens-mlm", "adversarial"])
def test_objectives_train_modern_pairs_and_go_on_from_others(run_config, objective):
    modern = {"style": "modern", "sinusoidal_positions": False, "steps": 2}
    first = run_config("rtd", **modern)
    pretrain(first)
    sizes = dict.fromkeys(("layers", "width", "heads", "feedforward", "embedding_width", "generator_width"))
    config = run_config("other", **modern | sizes, objective=objective, init=first.output)
    assert pretrain(config).step == 2
    encoder = load_pretrained(config.output).encoder
    assert encoder.config.style == "modern"
