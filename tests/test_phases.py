"""Phases: parsing and planning, contradictory settings, handing weights on, resuming, and the summary of a dry run."""

import json
import os
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import torch

from electra.cli import main
from electra.config import build_config, replace_settings
from electra.data.shards import open_shards
from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError, DataError
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.storage import load_pretrained
from electra.model.storage import load_model, read_model_config, read_tensors
from electra.pretraining.command import plan_and_check_phases, pretrain
from electra.pretraining.config import PretrainConfig, read_pretraining_state
from electra.pretraining.describe import describe_phases
from electra.pretraining.phases import parse_phases, plan_phases
from electra.pretraining.task import PretrainingTask
from electra.runfolder import CHECKSUMS, checkpoint_folders
from electra.serving.inference import load
from electra.training.checkpoint import find_model_folder
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer

TWO_STAGE = {"phases": ("objective=mlm", "objective=frozen-rtd"), "sharing": "none"}
LENGTHS = {"phases": ("fraction=0.5", "length=24,batch-size=4")}
WIDENED = {"phases": ("width=16,schedule=wsd,decay-fraction=0", "fraction=0.5"), "embedding_width": 8}
STACKED = {"phases": ("layers=1,schedule=wsd,decay-fraction=0", "fraction=0.5"), "layers": 2}
STACKED_AND_WIDENED = {"phases": ("layers=1,width=16", "fraction=0.5"), "layers": 2, "embedding_width": 8}
THREE = {"phases": ("fraction=0.25,length=8", "fraction=0.25", "objective=electra-15")}
SMALL = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --length 16 --batch-size 8 "
SMALL += "--log-every 10 --evaluation-rows 32 --device cpu --learning-rate 5e-3 --no-unigram-output-bias"


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def checkpoint_weights(config: PretrainConfig, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(config.output / "checkpoints" / f"step-{step:09d}" / "model.safetensors")


def test_phases_without_a_fraction_share_the_rest():
    phases = parse_phases(["fraction=0.5,length=128", "learning-rate=1e-3", "objective=mlm"])
    assert [(phase.begin, phase.end) for phase in phases] == [(0, 0.5), (0.5, 0.75), (0.75, 1)]
    assert [phase.settings for phase in phases] == [{"length": 128}, {"learning_rate": 1e-3}, {"objective": "mlm"}]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fraction=0.5 fraction=0.5"], "one word per phase: --phases fraction=0.5 fraction=0.5"),
        (["objective=best"], "objective is 'best'; it must be one of rtd, "),
        (["colour=blue"], "a phase may set fraction, objective, width, layers, length"),
        (["fraction=0.9", "fraction=0.1,lenght=64"], "did you mean length"),
        (["fraction=0.9,fraction=0.1"], "fraction occurs twice .* separate phases by a space"),
        (["length=long"], "'length=long' in --phases: length is 'long'; it must be an integer"),
        (["fraction=half"], "fraction is 'half'; it must be a number"),
        (["fraction=0.5", "fraction=0.6"], "fractions in --phases are 0.5 and 0.6; they must be above 0 and sum to 1"),
    ],
)
def test_wrong_phases_are_reported(texts, message):
    with pytest.raises(ConfigError, match=message):
        parse_phases(texts)


def test_phases_divide_a_budget_of_steps_tokens_or_minutes(run_config, shards):
    def budgets(**budget) -> list:
        phases = ("fraction=0.75", "length=32,batch-size=2")
        return [
            phase.budget for phase in plan_and_check_phases(run_config(phases=phases, **budget), open_shards(shards))
        ]

    assert [budget.steps for budget in budgets(steps=21)] == [16, 5]
    assert [budget.steps for budget in budgets(steps=None, tokens=4 * 1280)] == [3840 // (8 * 16), 1280 // (2 * 32)]
    assert [budget.seconds for budget in budgets(steps=None, minutes=4.0)] == [180, 60]
    thirds = run_config(steps=4, phases=("fraction=0.375", "fraction=0.25", "fraction=0.375"))
    assert all(
        phase.budget.steps for phase in plan_and_check_phases(thirds, open_shards(shards))
    )  # rounding leaves none without a step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "mlm", "generator": "uniform"}, "--objective mlm needs a generator, but --generator is uniform"),
        ({"objective": "adversarial", "generator": "unigram"}, "--objective adversarial needs a generator"),
        ({"objective": "frozen-rtd", "sharing": "none"}, "needs a trained generator; .* --generator-width 32"),
        (TWO_STAGE | {"sharing": "embeddings"}, "frozen generator; add --sharing none --generator-width 32"),
        (
            TWO_STAGE | {"sharing": "embeddings", "init_discriminator_from_generator": False},
            "frozen generator; add --sharing none$",
        ),
        (TWO_STAGE | {"generator_width": 16}, "cannot be initialised from a generator of 1 layers, width 16"),
        (
            {"phases": ("objective=mlm", "objective=rtd"), "sharing": "disentangled"},
            "disentangled already takes its embeddings from the generator",
        ),
        ({"phases": ("fraction=0.99", "fraction=0.01")}, "fraction 0.01 of 20 steps has less than one step"),
        ({"phases": ("objective=rtd", "objective=mlm")}, "mlm after rtd would drop the trained discriminator"),
        ({"schedule": "decay"}, "--schedule decay anneals a trained model; give one with --branch-from or --init"),
        ({"phases": ("length=16", "length=1024")}, "1024"),
        (
            WIDENED | {"phases": ("width=24", "length=8")},
            "width=24 in --phases: .* widened from 16, not from 24; choose",
        ),
        (WIDENED | {"phases": ("width=0", "length=8")}, "from 16, not from 0; .* --phases fraction=1 to train at full"),
        (WIDENED | {"embedding_width": 32}, "embeddings of 32 can be widened from no other width"),
        (WIDENED | {"embedding_width": 16}, "embeddings of 16 can be widened from no other width"),
        (WIDENED | {"sharing": "all"}, "with --sharing all the discriminator is the generator's encoder"),
        (WIDENED | {"phases": ("length=8", "width=16")}, "the last of --phases has width 16, the model 32"),
        (WIDENED | {"phases": ("width=16", "width=32", "width=16", "length=8")}, "width 32 cannot become 16"),
        (WIDENED | {"phases": ("objective=mlm,width=16", "objective=rtd")}, "this phase trains only the generator"),
        (
            STACKED | {"layers": 3, "phases": ("layers=2", "length=8")},
            "layers=2 .* 3 layers can be stacked from 1, not",
        ),
        (STACKED | {"layers": 1, "phases": ("layers=2", "length=8")}, "stacked from no other number, not from 2"),
        (
            STACKED | {"layers": 12, "phases": ("layers=4", "layers=6", "length=8")},
            "layers 4 cannot become 6, which is no multiple of it",
        ),
        (STACKED | {"phases": ("length=8", "layers=1")}, "the last of --phases has layers 1, the model 2; leave out"),
        (
            STACKED | {"phases": ("objective=mlm,layers=1", "objective=rtd")},
            "only the generator, which keeps its layers",
        ),
        (STACKED | {"sharing": "all"}, "layers=1 in --phases: with --sharing all the discriminator is the generator's"),
        (
            STACKED | {"style": "modern", "sinusoidal_positions": False, "global_attention_every": 2},
            "2 layers and --global-attention-every 2 can be stacked from no other number, not from 1",
        ),
        (
            STACKED_AND_WIDENED | {"phases": ("layers=1,width=24", "length=8")},
            "width=24,layers=1 in --phases: .* from 16, not from 24",
        ),
        (
            {"generator": "uniform", "phases": ("length=8", "temperature=2")},
            "but --generator is uniform; leave them out",
        ),
        ({"phases": ("schedule=cosine", "length=8")}, "schedule cosine and linear in consecutive phases of one objec"),
        ({"phases": ("warmup=0.2", "warmup=0.3")}, "warmup 0.2 and 0.3 in consecutive phases"),
        (WIDENED | {"init": Path("model")}, "width and layers are for new weights; leave them out with --init"),
        (STACKED | {"branch_from": Path("model")}, "width and layers are for new weights"),
        (
            {"phases": ("width=16,schedule=decay", "length=8"), "embedding_width": 8},
            "--schedule decay anneals a trained",
        ),
    ],
)
def test_contradictory_settings_are_reported(run_config, shards, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_and_check_phases(run_config(**settings), open_shards(shards))


def test_a_masked_language_model_alone_has_the_dropout_of_the_discriminator(run_config, shards):
    config = run_config(objective="mlm", dropout=0.2, generator_dropout=0.0)
    [phase] = plan_and_check_phases(config, open_shards(shards))
    assert (phase.model.discriminator, phase.model.generator.dropout) == (None, 0.2)


def test_the_dropout_of_phases_is_described_if_it_differs(run_config, shards):
    descriptions = []
    for phases in (
        ("fraction=0.5", "dropout=0.1"),
        ("fraction=0.5", "length=8"),
        ("fraction=0.5", "generator-dropout=0.1"),
    ):
        config = run_config(phases=phases, dropout=0.0)
        descriptions.append(list(describe_phases(plan_and_check_phases(config, open_shards(shards)))))
    assert [text.rpartition(", ")[2] for text in descriptions[0]] == ["dropout 0", "dropout 0.1"]
    assert "dropout" not in "".join(descriptions[1])
    assert [text.rpartition(", ")[2] for text in descriptions[2]] == ["dropout 0", "dropout 0 (0.1 in the generator)"]


def test_phases_keep_another_dropout_of_the_generator(run_config, shards):
    phases = plan_and_check_phases(run_config(**TWO_STAGE, dropout=0.2, generator_dropout=0.1), open_shards(shards))
    assert [phase.model.generator.dropout for phase in phases] == [0.1, 0.1]
    assert phases[1].model.discriminator.dropout == 0.2


def test_contradictory_flags_end_with_one_sentence_and_no_run(shards, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(f"pretrain --data {shards} --output {tmp_path}/run --steps 80 {SMALL} --phases colour=blue".split())
    error = capsys.readouterr().err
    assert "'colour=blue' in --phases" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "lowered"),
    [
        ("--objective rtd --generator unigram", "discriminator"),
        ("--objective electra-15 --generator uniform", "discriminator"),
        ("--objective replace-mlm --sharing none", "replace_mlm"),
        ("--objective all-tokens-mlm --sharing disentangled", "all_tokens_mlm"),
        ("--objective adversarial --entropy-bonus 0.01 --sharing none", "baseline"),
        ("--phases fraction=0.75 length=24,batch-size=4 --generator-width 32", "generator"),
        ("--phases objective=mlm objective=frozen-rtd --sharing none --generator-width 32", "discriminator"),
        ("--phases objective=mlm objective=rtd --no-init-discriminator-from-generator", "generator"),
        ("--phases objective=rtd objective=replace-mlm", "replace_mlm"),
    ],
)
def test_objectives_generators_and_phases_lower_their_loss(shards, tmp_path, capsys, flags, lowered):
    main(f"pretrain --data {shards} --output {tmp_path}/run --steps 60 {SMALL} {flags}".split())
    assert "finished: 60 steps" in capsys.readouterr().out
    losses = [line[lowered] for line in metrics(tmp_path / "run", "train") if lowered in line]
    assert losses[-1] < losses[0]
    assert load_pretrained(tmp_path / "run").encoder.config.width == 32
    export(ExportConfig(model=tmp_path / "run", output=tmp_path / "hf", part="encoder"))


def test_only_existing_parts_are_evaluated(run_config, finished_run):
    def evaluated(**settings) -> set[str]:
        return set(pretrain(run_config(settings["objective"], steps=1, **settings)).metrics) - {"unigram_mlm_loss"}

    generator = {"mlm_loss", "mlm_accuracy", "sample_accuracy", "generator_entropy"}
    rtd = {f"rtd_{name}" for name in ("loss", "accuracy", "precision", "recall", "auc")}
    unigram_rtd = {f"unigram_{name}" for name in rtd}
    assert (
        metrics(finished_run, "validation")[-1].keys() - {"kind", "step"}
        == {"loss", "unigram_mlm_loss"} | generator | rtd | unigram_rtd
    )
    assert evaluated(objective="electra-15", generator="uniform") == {"loss"} | unigram_rtd
    assert evaluated(objective="mlm") == {"loss"} | generator
    assert evaluated(objective="replace-mlm") == {"loss", "replace_mlm_loss", "replace_mlm_accuracy"} | generator


def test_a_masked_language_model_in_place_of_the_discriminator_detects_nothing(run_config, tmp_path):
    config = run_config(objective="all-tokens-mlm", steps=1)
    pretrain(config)
    with pytest.raises(ConfigError, match="--part encoder"):
        export(ExportConfig(model=config.output, output=tmp_path / "hf"))
    model = load(config.output, device="cpu")
    with pytest.raises(ConfigError, match="no discriminator"):
        model.detect("the cat sat")
    assert len(model.embed("the cat sat")[0]) == 32


def test_two_stage_training_copies_the_encoder_and_freezes_the_generator(run_config, monkeypatch):
    config, starts = run_config(**TWO_STAGE), []
    step = Trainer.step

    def record_start(self):
        if self.state.step == 10:
            starts.append({name: weight.detach().clone() for name, weight in self.task.model.named_parameters()})
        step(self)

    monkeypatch.setattr(Trainer, "step", record_start)
    pretrain(config)
    [start], first_stage, end = starts, checkpoint_weights(config, 10), checkpoint_weights(config, 20)
    assert {name.split(".")[0] for name in first_stage} == {"generator"}
    for name, weight in first_stage.items():
        assert torch.equal(start[name], weight)
        assert torch.equal(end[name], weight)
        if ".encoder." in name:
            assert torch.equal(start[name.replace("generator.", "discriminator.")], weight)
    discriminator = [name for name in end if name.startswith("discriminator.")]
    assert not any(torch.equal(end[name], start[name]) for name in discriminator)
    record = json.loads((config.output / "config.json").read_text())
    assert record["pretraining"]["phases"] == list(TWO_STAGE["phases"])
    with pytest.raises(ConfigError, match=r"phases was .* and is now \(\)"):
        pretrain(replace_settings(config, resume=True, phases=(), objective="mlm"))


def test_without_initialisation_from_the_generator_sizes_may_differ(run_config):
    config = run_config(**TWO_STAGE, init_discriminator_from_generator=False, generator_width=16, steps=2)
    pretrain(config)
    model = load_model(find_model_folder(config.output))
    assert (model.generator.encoder.config.width, model.discriminator.encoder.config.width) == (16, 32)


@pytest.mark.parametrize(("last", "head"), [("all-tokens-mlm", "copy_mlm"), ("adversarial", "rtd")])
def test_a_phase_takes_over_all_weights_but_the_head_of_another_objective(run_config, last, head):
    config = run_config(phases=("objective=rtd", f"objective={last}"), steps=2, learning_rate=1e-12)
    pretrain(config)
    before, after = checkpoint_weights(config, 1), checkpoint_weights(config, 2)
    for name, weight in before.items():
        if head == "rtd" or not name.startswith("discriminator.head."):
            torch.testing.assert_close(after[name], weight)
    recorded, final = (read_model_config(folder) for folder in (config.output, find_model_folder(config.output)))
    assert recorded == final
    assert (final.head, final.has_baseline) == (head, last == "adversarial")


@pytest.mark.parametrize(
    "phases",
    [TWO_STAGE, LENGTHS, THREE, WIDENED, STACKED, STACKED_AND_WIDENED],
    ids=["two-stage", "lengths", "three", "widened", "stacked", "both"],
)
def test_stopped_in_any_phase_a_run_ends_with_the_same_bytes(run_config, monkeypatch, phases):
    settings = {"save_every": 100, "evaluate_every": 100, "dropout": 0.1, "optimizer": "adamw"} | phases
    unbroken, stopped = run_config("unbroken", **settings), run_config("stopped", resume=True, **settings)
    pretrain(unbroken)
    step = Trainer.step

    def stop_after_some_steps(self):
        step(self)
        if self.state.step in (3, 10, 13):  # in the first phase, at its end, and in the last
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", stop_after_some_steps)
    assert [pretrain(stopped).step for _ in range(4)] == [3, 10, 13, 20]
    weights = [(find_model_folder(run.output) / "model.safetensors").read_bytes() for run in (unbroken, stopped)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("second", ["temperature=0.9", "batch-size=4", "objective=electra-15"])
def test_a_phase_with_the_same_rows_continues_the_epoch(run_config, second):
    config = run_config(steps=4, phases=("fraction=0.5", f"fraction=0.5,{second}"))
    pretrain(config)
    state = read_pretraining_state(find_model_folder(config.output))
    assert (state.step, state.epoch, state.row) == (4, 0, 24 if "batch" in second else 32)
    rows = run_config("other-rows", steps=4, phases=("fraction=0.5", "fraction=0.5,length=8"))
    pretrain(rows)
    assert read_pretraining_state(find_model_folder(rows.output)).epoch == 1


def test_a_phase_is_not_in_memory_during_the_next_one(run_config, monkeypatch):
    tasks, alive = [], []

    class CountedTask(PretrainingTask):
        def __init__(self, *args):
            alive.append(sum(task() is not None for task in tasks))
            super().__init__(*args)
            tasks.append(weakref.ref(self))

    monkeypatch.setattr("electra.pretraining.command.PretrainingTask", CountedTask)
    pretrain(run_config(steps=4, **WIDENED))
    assert alive == [0, 0]


def test_phases_of_one_objective_share_a_schedule(run_config):
    settings = {"log_every": 1, "warmup": 0.0, "schedule": "linear", "optimizer": "adamw", "evaluate_every": 100}
    rates = {}
    for name, phases in (("two-stage", TWO_STAGE), ("lengths", LENGTHS)):
        config = run_config(name, **settings | phases)
        pretrain(config)
        peak = config.optimizer.learning_rate
        rates[name] = [line["learning_rate"] / peak for line in metrics(config.output, "train")]
    assert rates["lengths"] == pytest.approx([1 - (step + 0.5) / 20 for step in range(20)])
    assert rates["two-stage"] == pytest.approx(2 * [1 - (step + 0.5) / 10 for step in range(10)])


def test_a_phase_widens_the_discriminator_without_changing_its_outputs(run_config, capsys):
    settings = {"phases": ("fraction=0.5,width=16", "learning-rate=1e-12"), "embedding_width": 8, "evaluate_every": 10}
    config = run_config(**settings, generator_width=16, evaluation_rows=32)
    pretrain(config)
    narrow, wide = metrics(config.output, "validation")
    assert (narrow["step"], wide["step"]) == (10, 20)
    for name, value in narrow.items():
        assert name == "step" or wide[name] == (value if name == "kind" else pytest.approx(value, rel=1e-3, abs=1e-4))
    assert capsys.readouterr().err.count("the discriminator is widened from 16 to 32") == 1
    models = [read_model_config(folder).discriminator for folder in checkpoint_folders(config.output)]
    assert [(model.width, model.heads, model.feedforward) for model in models] == [(16, 1, 32), (32, 2, 64)]


def test_a_phase_stacks_the_layers_of_the_discriminator(run_config, capsys):
    config = run_config(phases=("fraction=0.5,layers=2", "learning-rate=1e-12"), layers=4, generator_layers=3)
    pretrain(config)
    assert capsys.readouterr().err.count("the discriminator is stacked from 2 to 4 layers") == 1
    shallow, deep = (checkpoint_weights(config, step) for step in (10, 20))
    layers = [name.split(".", 4) for name in deep if name.startswith("discriminator.encoder.layers.")]
    assert {int(index) for *_, index, _ in layers} == {0, 1, 2, 3}
    for *prefix, index, parameter in layers:
        source = ".".join((*prefix, str(int(index) % 2), parameter))
        torch.testing.assert_close(deep[".".join((*prefix, index, parameter))], shallow[source])
    models = [read_model_config(folder) for folder in checkpoint_folders(config.output)]
    assert [(model.discriminator.layers, model.generator.layers) for model in models] == [(2, 3), (4, 3)]


def test_phases_of_one_size_share_an_optimizer(run_config, shards):
    phases = ("layers=1,width=16", "layers=1,width=16,length=8", "layers=2,width=16", "width=16", "layers=4")
    planned = plan_and_check_phases(run_config(phases=phases, layers=4, embedding_width=8), open_shards(shards))
    sizes = [(phase.model.discriminator.layers, phase.model.discriminator.width) for phase in planned]
    assert sizes == [(1, 16), (1, 16), (2, 16), (4, 16), (4, 32)]
    assert [phase.starts_optimizer for phase in planned] == [True, False, True, True, True]


def test_a_generator_that_is_trained_first_may_have_any_width(run_config, shards):
    phases = ("objective=mlm", "objective=frozen-rtd,width=16", "objective=frozen-rtd")
    settings = {"sharing": "none", "generator_width": 24, "init_discriminator_from_generator": False}
    config = run_config(phases=phases, embedding_width=8, **settings)
    planned = plan_and_check_phases(config, open_shards(shards))
    assert [phase.model.discriminator and phase.model.discriminator.width for phase in planned] == [None, 16, 32]
    assert [phase.starts_optimizer for phase in planned] == [True, True, True]


def medium(**settings) -> list:
    """Learning rate, schedule and warm-up of each phase of --size medium, with other settings."""
    config = build_config(PretrainConfig, data="shards", output="run", size="medium", **settings)
    optimizers = [phase.config.optimizer for phase in plan_phases(config, config.model.electra_config())]
    return [(optimizer.learning_rate, optimizer.schedule, optimizer.warmup) for optimizer in optimizers]


def test_given_settings_win_over_those_of_the_phases_of_a_size():
    assert medium() == [(1.5e-3, "wsd", 0.05), (1e-3, "linear", 0.05)]
    assert medium(learning_rate=5e-4) == [(5e-4, "wsd", 0.05), (5e-4, "linear", 0.05)]
    assert medium(schedule="cosine", warmup=0.2) == [(1.5e-3, "cosine", 0.2), (1e-3, "cosine", 0.2)]
    for other in ({"width": 256}, {"heads": 4}, {"embedding_width": 512}, {"phases": ("fraction=1",)}):
        assert medium(**other) == [(1e-3, "linear", 0.05)]


def test_settings_that_are_given_as_none_are_not_set():
    assert medium(init=None, width=None, steps=None) == medium()


def test_a_run_with_phases_is_not_extended(run_config):
    config = run_config(**LENGTHS)
    pretrain(config)
    with pytest.raises(
        ConfigError, match=r"has --phases, which cannot be extended; .* --init .*run and a new --output"
    ):
        pretrain(replace_settings(config, resume=True, steps=40))


@pytest.mark.parametrize("phases", [WIDENED, STACKED], ids=["widened", "stacked"])
def test_a_phase_of_another_size_has_its_own_schedule(run_config, phases):
    config = run_config(**phases, log_every=1, warmup=0.0, evaluate_every=100)
    pretrain(config)
    rates = [line["learning_rate"] / config.optimizer.learning_rate for line in metrics(config.output, "train")]
    assert rates == pytest.approx(10 * [1.0] + [1 - (step + 0.5) / 10 for step in range(10)])


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "mlm"},
        {"objective": "all-tokens-mlm"},
        {"style": "modern", "sinusoidal_positions": False},
        {"corrective_lm_weight": 1.0, "bag_of_words_weight": 1.0},
    ],
    ids=["mlm", "all-tokens-mlm", "modern", "auxiliary"],
)
@pytest.mark.parametrize("phases", [WIDENED, STACKED_AND_WIDENED], ids=["widened", "both"])
def test_every_kind_of_model_can_be_enlarged(run_config, settings, phases):
    config = run_config(**phases | {"feedforward": 128} | settings, evaluate_every=10)
    pretrain(config)
    losses = [line["loss"] for line in metrics(config.output, "validation")]
    encoder = load_pretrained(config.output).encoder.config
    assert (encoder.layers, encoder.width) == (config.model.layers, 32)
    assert losses[1] < 1.15 * losses[0]  # training continues from there: a new model would be far worse


def test_the_best_checkpoint_is_of_the_last_phase(run_config):
    phases = ("fraction=0.5,mask-fraction=0.1", "fraction=0.5,mask-fraction=0.6")  # the second has far higher losses
    config = run_config(steps=4, phases=phases, save_every=1, evaluate_every=1, keep_checkpoints=1)
    pretrain(config)
    assert "step-000000002" not in [folder.name for folder in checkpoint_folders(config.output)]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"generator_width": None},
            [
                "classic: discriminator with 1 layer of width 32; generator with 1 layer of width 16; shared emb",
                "rtd, 20 steps: 8 × 16 tokens per step, 30 % masked; muon, learning rate 0.003, linear schedule",
            ],
        ),
        (
            {"phases": ("objective=mlm", "objective=frozen-rtd,length=8"), "sharing": "none"},
            [
                "classic: discriminator with 1 layer of width 32; generator with 1 layer of width 32; no shared",
                "phase 1 of 2, mlm, 10 steps: 8 × 16 tokens per step",
                "phase 2 of 2, frozen-rtd, 10 steps: 8 × 8 tokens per step, 30 % masked; muon, learning rate 0.003, "
                "linear schedule; the discriminator is initialised from the generator",
            ],
        ),
        (
            STACKED_AND_WIDENED,
            [
                "classic: discriminator with 2 layers of width 32; generator with 2 layers of width 32; shared embeddi",
                "phase 1 of 2, rtd, 10 steps: 8 × 16 tokens per step",
                "phase 2 of 2, rtd, 10 steps: 8 × 16 tokens per step, 30 % masked; muon, learning rate 0.003, linear "
                "schedule; the discriminator is widened from 16 to 32 and stacked from 1 to 2 layers",
            ],
        ),
        ({"objective": "mlm", "dropout": 0.1}, ["classic: masked language model with 1 layer of width 32, dropout"]),
        ({"generator": "uniform"}, ["classic: discriminator with 1 layer of width 32; no generator, uniform repl"]),
        ({"objective": "replace-mlm"}, ["classic: masked language model with 1 layer of width 32; generator with 1"]),
    ],
)
def test_a_dry_run_summarises_models_and_phases(run_config, settings, lines):
    summary = str(pretrain(run_config(dry_run=True, **settings))).splitlines()
    assert [line[: len(start)] for line, start in zip(summary, lines, strict=False)] == lines


def test_a_dry_run_adds_up_its_phases(run_config):
    estimate = pretrain(run_config(**LENGTHS, dry_run=True))
    assert (estimate.steps, estimate.tokens) == (20, 10 * 8 * 16 + 10 * 4 * 24)


def test_a_dry_run_counts_each_phase_with_its_width_and_layers(run_config):
    common = {"embedding_width": 8, "generator_layers": 2, "generator_width": 8, "dry_run": True}
    small = pretrain(run_config(**common, layers=1, width=16, heads=1, feedforward=32))
    large = pretrain(run_config(**common, layers=2))
    result = pretrain(run_config(**common | STACKED_AND_WIDENED))
    assert result.flops == (small.flops + large.flops) / 2
    assert (result.parameters, result.tokens) == (large.parameters, large.tokens)


def test_a_warm_up_longer_than_the_run_is_warned_of(run_config, capsys):
    pretrain(run_config(steps=8, warmup=100, dry_run=True))
    assert "a warm-up of 100 steps exceeds the 8 steps of training" in capsys.readouterr().err
    pretrain(run_config(steps=8, warmup=0.5, dry_run=True))
    assert "warm-up" not in capsys.readouterr().err


def test_modern_pairs_continue_with_every_objective(run_config):
    modern = {"style": "modern", "sinusoidal_positions": False, "steps": 2}
    first = run_config("rtd", **modern)
    pretrain(first)
    sizes = dict.fromkeys(("layers", "width", "heads", "feedforward", "embedding_width", "generator_width"))
    for objective in ("electra-15", "replace-mlm", "all-tokens-mlm", "adversarial"):
        config = run_config(objective, **modern | sizes, objective=objective, init=first.output)
        assert pretrain(config).step == 2
        assert load_pretrained(config.output).encoder.config.style == "modern"


def test_a_phase_may_set_dropout_and_packing(run_config, shards):
    phases = ("fraction=0.5", "dropout=0.1,generator-dropout=0.05,packing=segment-pairs")
    config = run_config(phases=phases, steps=4, dropout=0.0)
    first, second = plan_and_check_phases(config, open_shards(shards))
    assert [phase.model.discriminator.dropout for phase in (first, second)] == [0.0, 0.1]
    assert [phase.model.generator.attention_dropout for phase in (first, second)] == [0.0, 0.05]
    pretrain(config)
    weights = checkpoint_weights(config, 4)
    table = next(value for name, value in weights.items() if name.endswith("segment.weight"))
    assert not torch.equal(table[0], table[1])  # the second phase trained segment B
    assert read_model_config(find_model_folder(config.output)).discriminator.dropout == 0.1


def test_segment_embeddings_of_an_earlier_phase_are_kept(run_config):
    config = run_config(phases=("packing=segment-pairs", "packing=packed"), steps=4)
    pretrain(config)
    weights = checkpoint_weights(config, 4)
    table = next(value for name, value in weights.items() if name.endswith("segment.weight"))
    assert not torch.equal(table[0], table[1])


def test_segment_b_of_a_new_discriminator_is_a_copy_of_a(run_config):
    config = run_config(**TWO_STAGE, init_discriminator_from_generator=False, generator_width=32, steps=4)
    pretrain(config)
    tables = [value for name, value in checkpoint_weights(config, 4).items() if name.endswith("segment.weight")]
    assert len(tables) == 2
    assert all(torch.equal(table[0], table[1]) for table in tables)


def test_a_run_with_auxiliary_losses_resumes_and_exports_without_their_heads(run_config, tmp_path):
    settings = {"corrective_lm_weight": 1.0, "bag_of_words_weight": 1.0, "unigram_output_bias": True}
    config = run_config(steps=4, save_every=2, **settings)
    pretrain(config)
    line = metrics(config.output, "train")[-1]
    assert line["corrective_lm"] > 0
    assert line["bag_of_words"] > 0
    straight = checkpoint_weights(config, 4)
    shutil.rmtree(config.output / "checkpoints" / "step-000000004")
    pretrain(replace_settings(config, resume=True))
    assert all(torch.equal(straight[name], tensor) for name, tensor in checkpoint_weights(config, 4).items())
    assert any(name.startswith("discriminator.auxiliary_heads.bag_of_words.") for name in straight)
    export(ExportConfig(model=config.output, output=tmp_path / "hf"))
    assert not any("auxiliary" in name for name in read_tensors(tmp_path / "hf" / "model.safetensors"))


def test_a_branch_inherits_the_auxiliary_losses_of_its_trunk(run_config):
    trunk = run_config("trunk", steps=2, bag_of_words_weight=0.5, schedule="wsd")
    pretrain(trunk)
    branch = build_config(
        PretrainConfig, data=trunk.data, output=trunk.output.with_name("branch"), branch_from=trunk.output, steps=1
    )
    assert branch.objective.bag_of_words_weight == 0.5
    assert branch.objective.auxiliary_heads() == ("bag_of_words",)


def test_a_model_stores_the_length_of_its_longest_rows(run_config, tmp_path):
    """Of all phases so far and of the model it started from; an unknown length counts as all positions."""
    trunk = run_config("trunk", steps=2, phases=("length=24", "length=16"), save_every=1, keep_checkpoints=2)
    pretrain(trunk)
    assert [read_trained_length(folder) for folder in checkpoint_folders(trunk.output)] == [24, 24]
    size = dict.fromkeys(("layers", "width", "heads", "feedforward", "embedding_width", "generator_width"))
    for source, expected in ((trunk.output, 24), (shutil.copytree(trunk.output, tmp_path / "unknown"), 512)):
        for file in (tmp_path / "unknown").rglob("*.json"):
            if file.name in ("tokenizer_config.json", CHECKSUMS):
                file.unlink()
        continued = run_config(f"continued-{expected}", steps=1, init=source, sinusoidal_positions=False, **size)
        pretrain(continued)
        assert read_trained_length(checkpoint_folders(continued.output)[-1]) == expected


def test_a_damaged_trunk_is_named(run_config):
    trunk = run_config("trunk", steps=2, bag_of_words_weight=0.5, schedule="wsd")
    pretrain(trunk)
    state = checkpoint_folders(trunk.output)[-1] / "state.json"
    state.write_text(state.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(DataError, match=r"state\.json is damaged"):
        build_config(PretrainConfig, data=trunk.data, output="branch", branch_from=trunk.output, steps=1)
