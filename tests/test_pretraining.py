"""Pre-training: it learns, it can be killed at any moment, and it says what is wrong in one sentence."""

import json
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kills import killed

from electra.cli import main
from electra.config import build
from electra.data.loader import validation_batches
from electra.data.packing import LoaderConfig
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.errors import ConfigError, DataError, TrainingError
from electra.huggingface.convert import merge_embedding_delta
from electra.model.storage import load_model, save_model
from electra.objectives.losses import Loss
from electra.plotting import total_loss
from electra.pretraining.command import plan, pretrain
from electra.pretraining.config import RECIPES, SIZE_SETTINGS, recipe_settings
from electra.pretraining.initialize import sinusoids
from electra.pretraining.task import PretrainingTask, held_out_batches, unigram_frequencies
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import model_folder
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer


def weights(run: Path) -> bytes:
    return (model_folder(run) / "model.safetensors").read_bytes()


def lines(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def test_a_run_leaves_config_metrics_curves_samples_and_checkpoints(run_config):
    config = run_config()
    outcome = pretrain(config)
    run = config.output
    assert (outcome.step, outcome.tokens, outcome.signal) == (20, 20 * 8 * 16, 0)
    assert [folder.name for folder in checkpoint_folders(run)] == ["step-000000010", "step-000000020"]
    assert [line["step"] for line in lines(run, "train")] == [5, 10, 15, 20]
    assert [line["step"] for line in lines(run, "validation")] == [20]
    record = json.loads((run / "config.json").read_text())
    assert record["pretraining"]["steps"] == 20
    assert {"command", "environment", "model", "data"} <= set(record)
    assert (run / "curves.png").exists()
    assert "replaced, says the discriminator" in (run / "samples.md").read_text()
    assert list((run / "tensorboard").glob("events*"))


@pytest.mark.parametrize(
    "departures",
    [
        {"objective": "electra-15"},
        {"objective": "all-tokens-mlm"},
        {"generator": "uniform", "generator_width": None},
        {"mask_fraction": 0.5, "discriminator_weight": 5.0},
        {"whole_word_masking": True},
    ],
    ids=lambda departures: ",".join(map(str, departures.values())),
)
def test_the_held_out_loss_lies_beside_the_loss_that_is_trained(run_config, departures):
    budget = {"steps": 100, "log_every": 20, "save_every": 100, "evaluate_every": 100}
    config = run_config(**budget, learning_rate=5e-3, batch_size=32, **departures)
    held_out = pretrain(config).metrics["loss"]
    trained = total_loss(lines(config.output, "train")[-1], config.objective.discriminator_weight)
    assert held_out == pytest.approx(trained, rel=0.1)


@pytest.mark.parametrize(
    ("departures", "said"),
    [
        ({}, " replaced, says the discriminator |"),
        ({"objective": "mlm"}, ""),
        ({"objective": "replace-mlm"}, " predicted original |"),
        ({"objective": "all-tokens-mlm"}, " predicted original |"),
        ({"generator": "uniform", "generator_width": None}, " replaced, says the discriminator |"),
    ],
    ids=lambda given: ",".join(map(str, given.values())) if isinstance(given, dict) else None,
)
def test_samples_show_fills_and_only_what_is_said_of_them(run_config, departures, said):
    config = run_config(steps=2, **departures)
    pretrain(config)
    page = (config.output / "samples.md").read_text().splitlines()
    titles, *rows = (line for line in page if line.startswith("| "))
    assert titles == f"| token | original | fill |{said}"
    assert page.count(titles) == 4
    assert {row.count("|") for row in rows} == {titles.count("|")}


def test_it_learns_the_grammar(run_config):
    departures = {"steps": 300, "learning_rate": 3e-3, "batch_size": 128, "save_every": 300, "evaluate_every": 300}
    outcome = pretrain(run_config(**departures))
    frequencies = unigram_frequencies(open_shards(run_config().data), torch.device("cpu"))
    entropy = -(frequencies * frequencies.clamp(min=1e-9).log()).sum().item()
    assert outcome.metrics["mlm_loss"] < entropy - 0.2
    assert outcome.metrics["unigram_rtd_auc"] > 0.6


@pytest.mark.parametrize(
    "departures",
    [
        {"sharing": "none"},
        {"sharing": "all", "generator_width": None},
        {"sharing": "disentangled"},
        {"objective": "mlm"},
        {"optimizer": "adam"},
        {"optimizer": "muon"},
        {"schedule": "released"},
        {"schedule": "cosine"},
        {"schedule": "wsd"},
        {"packing": "segment-pairs", "length": 24, "mask_token_probability": 0.85},
        {"whole_word_masking": True},
        {"cross_document_attention": True},
        {"activation_checkpointing": True, "dropout": 0.1},
        {"data_on_gpu": True},
        {"mask_token_probability": 0.8, "random_token_probability": 0.1, "mask_count": "paper"},
        {"tokens": 80 * 8 * 16, "steps": None},
        {"disallow_correct": True, "temperature": 0.8},
        {"correct_sample_label": "replaced"},
    ],
    ids=lambda departures: ",".join(departures),
)
def test_every_setting_lowers_the_loss(run_config, departures):
    config = run_config(**{"steps": 80, "learning_rate": 5e-3, "save_every": 80, "evaluate_every": 80} | departures)
    pretrain(config)
    generator = [line["generator"] for line in lines(config.output, "train")]
    assert generator[-1] < generator[0] - 0.1


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_and_recipe_runs_from_the_command_line(shards, tmp_path, capsys, size, recipe):
    small = "--layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --generator-width 16 --batch-size 4 "
    small += "--length 16 --steps 4 --log-every 1 --evaluation-rows 8 --device cpu --warmup 0"
    main(f"pretrain --data {shards} --output {tmp_path}/run --size {size} --recipe {recipe} {small}".split())
    assert "finished: 4 steps" in capsys.readouterr().out
    record = json.loads((tmp_path / "run/config.json").read_text())["pretraining"]
    expected = recipe_settings(recipe, size)
    assert {name: record[name] for name in ("learning_rate", "optimizer", "packing", "mask_fraction")} == {
        name: expected[name] for name in ("learning_rate", "optimizer", "packing", "mask_fraction")
    }


def test_the_faithful_recipe_has_the_papers_settings():
    small, base, large = (recipe_settings("faithful", size) for size in ("small", "base", "large"))
    assert [s["learning_rate"] for s in (small, base, large)] == [5e-4, 2e-4, 2e-4]
    assert [s["batch_size"] for s in (small, base, large)] == [128, 256, 2048]
    assert [s["length"] for s in (small, base, large)] == [128, 512, 512]
    assert [s["mask_fraction"] for s in (small, base, large)] == [0.15, 0.15, 0.25]
    assert [s["steps"] for s in (small, base, large)] == [1_000_000, 766_000, 400_000]
    assert (small["optimizer"], small["schedule"], small["mask_token_probability"], small["packing"]) == (
        "adam",
        "released",
        0.85,
        "paper",
    )
    assert set(SIZE_SETTINGS["faithful"]) == set(SIZE_SETTINGS["fast"])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_twenty_kills_change_no_byte_of_the_weights(run_config):
    settings = {"steps": 300, "save_every": 5, "evaluate_every": 50, "dropout": 0.1, "log_every": 50}
    pretrain(run_config("unbroken", **settings))
    broken = run_config("broken", **settings, resume=True)
    moments, kills = random.Random(0), 0
    while kills < 20:
        assert killed(pretrain, broken, after=moments.uniform(0.05, 0.6)), (
            f"the run was over after {kills} kills: make it longer"
        )
        kills += 1
    outcome = pretrain(broken)
    assert outcome.step == 300
    assert weights(broken.output) == weights(run_config("unbroken").output)
    assert not [path.name for path in (broken.output / "checkpoints").iterdir() if path.name.startswith(".")]
    own = [[line[name] for name in ("step", "generator", "discriminator")] for line in lines(broken.output, "train")]
    steps = [step for step, *_ in own]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(("objective", "who"), [("rtd", "generator"), ("replace-mlm", "replace_mlm")])
def test_whoever_guesses_tokens_may_start_at_their_frequencies(run_config, objective, who):
    losses = []
    for start in (False, True):
        config = run_config(str(start), objective=objective, unigram_output_bias=start, log_every=1, steps=1)
        pretrain(config)
        losses.append(lines(config.output, "train")[0][who])
    assert losses[0] == pytest.approx(np.log(22), abs=0.4)
    assert losses[1] < losses[0] - 0.3


def test_waves_make_the_distance_of_two_positions_their_likeness():
    table = sinusoids(64, 32)
    likeness = table @ table.T
    for distance in (0, 1, 5):
        alike = likeness.diagonal(distance)
        torch.testing.assert_close(alike, alike[:1].expand_as(alike), rtol=1e-4, atol=1e-4)
    assert likeness[10, 10] > likeness[10, 11] > likeness[10, 14]


@pytest.mark.parametrize("sharing", ["embeddings", "none", "disentangled"])
def test_positions_may_start_as_waves_as_large_as_noise(run_config, shards, sharing):
    config = run_config(sinusoidal_positions=True, sharing=sharing, width=32)
    phase, *_ = plan(config, open_shards(shards))
    model = PretrainingTask(phase, open_shards(shards), torch.device("cpu")).model
    for encoder in (model.generator.encoder, model.discriminator.encoder):
        embeddings = encoder.embeddings.base or encoder.embeddings
        table, std = embeddings.position.weight.detach(), encoder.config.init_std
        torch.testing.assert_close(table / std / 2**0.5, sinusoids(*table.shape))
        assert table.square().mean().sqrt() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize("sharing", ["embeddings", "disentangled"])
def test_a_segment_that_dense_rows_never_met_is_written_as_the_other(run_config, sharing):
    def segments(packing: str) -> torch.Tensor:
        config = run_config(packing, packing=packing, sharing=sharing, steps=3)
        pretrain(config)
        return merge_embedding_delta(load_model(model_folder(config.output)).discriminator.state_dict())[
            "encoder.embeddings.segment.weight"
        ]

    dense, paper = segments("dense"), segments("paper")
    assert torch.equal(dense[0], dense[1])
    assert not torch.equal(paper[0], paper[1])


def test_micro_batches_do_not_change_what_is_learnt(run_config):
    for packing in ("packed", "segment-pairs"):
        losses = []
        for pieces in (1, 4):
            config = run_config(f"{packing}-{pieces}", micro_batches=pieces, packing=packing, length=24)
            pretrain(config)
            losses.append([(line["generator"], line["discriminator"]) for line in lines(config.output, "train")])
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_run_that_ends_without_a_loss_is_not_called_finished(shards, tmp_path, monkeypatch, capsys, loss):
    monkeypatch.setattr(PretrainingTask, "evaluate", lambda self: {"loss": loss, "mlm_loss": 1.0})
    small = "--size tiny --layers 1 --width 32 --heads 2 --batch-size 4 --length 16 --steps 4 --device cpu"
    commands = [
        f"pretrain --data {shards} --output {tmp_path}/run {small}",
        f"pretrain --output {tmp_path}/run --resume",
    ]
    for command in commands:  # nor when it is asked to go on
        with pytest.raises(SystemExit, match="2"):
            main(command.split())
        said = capsys.readouterr()
        assert "finished" not in said.out
        assert re.search(r"step 4: .*held-out text is not a finite number: .* kept, \S*/step-000000004; try", said.err)
    load_model(model_folder(tmp_path / "run"))
    assert (tmp_path / "run/curves.png").exists()


def test_a_trunk_grows_branches_that_decay(run_config):
    trunk = run_config("trunk", schedule="wsd", decay_fraction=0.0, steps=20)
    pretrain(trunk)
    branch = run_config("branch", schedule="decay", steps=10, branch_from=trunk.output)
    outcome = pretrain(branch)
    assert outcome.step == 30
    rates = [line["learning_rate"] for line in lines(branch.output, "train")]
    assert rates == pytest.approx([trunk.learning_rate * share for share in (0.55, 0.05)])
    assert lines(trunk.output, "train")[-1]["learning_rate"] == trunk.learning_rate
    assert pretrain(replace(branch, resume=True)).step == 30


def test_a_budget_of_minutes_ends_and_its_schedule_with_it(run_config):
    config = run_config(steps=None, minutes=0.01, log_every=1, warmup=0.0)
    outcome = pretrain(config)
    assert 0.6 <= outcome.seconds < 3
    rates = [line["learning_rate"] for line in lines(config.output, "train")]
    assert rates[0] > rates[len(rates) // 2] > rates[-1]


def test_a_dry_run_says_what_a_run_would_be_and_writes_nothing(run_config):
    config = run_config(dry_run=True)
    estimate = pretrain(config)
    assert (estimate.steps, estimate.tokens) == (20, 20 * 8 * 16)
    with torch.device("meta"):
        assert estimate.parameters == sum(
            p.numel()
            for p in PretrainingTask.__init__.__globals__["Electra"](config.pair(open_shards(config.data))).parameters()
        )
    assert not config.output.exists()


def infinite_loss(model: torch.nn.Module) -> Loss:
    return Loss(next(model.parameters()).sum() * float("inf"), torch.tensor(1.0))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_left_no_checkpoint_makes_place_for_any_other(run_config, monkeypatch, capsys, resume):
    monkeypatch.setattr(PretrainingTask, "losses", lambda self, batch: {"generator": infinite_loss(self.model)})
    with pytest.raises(TrainingError, match="no checkpoint was saved before"):
        pretrain(run_config(max_nonfinite_steps=2, learning_rate=9.0))
    monkeypatch.undo()
    capsys.readouterr()
    config = run_config(learning_rate=1e-3, sharing="none", resume=resume)
    assert pretrain(config).step == 20
    assert f"the run in {config.output} ended before its first checkpoint; this one takes" in capsys.readouterr().err
    record = json.loads((config.output / "config.json").read_text())
    assert (record["pretraining"]["learning_rate"], record["model"]["sharing"]) == (1e-3, "none")
    assert [line["step"] for line in lines(config.output, "train")] == [5, 10, 15, 20]
    with pytest.raises(ConfigError, match="holds a run already"):
        pretrain(replace(config, resume=False))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"steps": 0}, "steps is 0; a run needs a budget above 0"),
        ({"minutes": 1.0}, "give one budget, .*; steps and minutes came"),
        ({"micro_batches": 3}, "8 rows do not divide into 3 micro-batches"),
        ({"save_every": 0}, "save_every is 0; it must be at least 1"),
    ],
)
def test_a_run_that_cannot_be_is_refused(run_config, wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_config(**wrong)


def test_a_run_folder_is_never_mixed_with_another_run(run_config):
    config = run_config()
    pretrain(config)
    with pytest.raises(ConfigError, match="holds a run already; go on with it by --resume"):
        pretrain(config)
    with pytest.raises(ConfigError, match=r"--learning-rate was 0.003 and is now 0.1; .*use the same"):
        pretrain(replace(config, resume=True, learning_rate=0.1))
    assert pretrain(replace(config, resume=True, save_every=7)).step == 20


@pytest.fixture
def stopped_run(shards, tmp_path, monkeypatch) -> Path:
    """A run of six steps that was stopped at the second; most of its settings are not its size's."""
    size = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --generator-width 16"
    rows = "--batch-size 4 --length 16 --evaluation-rows 8 --phases fraction=0.5 fraction=0.5,length=8"
    take_step = Trainer.step

    def step_then_signal(self):
        take_step(self)
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", step_then_signal)
    with pytest.raises(SystemExit):
        main(f"pretrain --data {shards} --output {tmp_path}/run --steps 6 --device cpu --json {size} {rows}".split())
    monkeypatch.undo()
    return tmp_path / "run"


def test_a_resumed_run_takes_the_settings_that_are_not_given_from_its_folder(stopped_run, capsys):
    capsys.readouterr()
    main(f"pretrain --output {stopped_run} --resume --save-every 1".split())
    assert capsys.readouterr().out.startswith("finished: 6 steps")  # whether it is JSON is up to each command
    assert len(checkpoint_folders(stopped_run)) == 3


@pytest.mark.parametrize(
    ("flags", "differing"),
    [
        ("--size base", "--size was tiny and is now base"),
        ("--minutes 5", "--steps was 6 and is now unset; --minutes was unset and is now 5.0"),
        ("--layers 2 --length 16", "--layers was 1 and is now 2"),
    ],
)
def test_settings_that_are_given_to_a_resumed_run_must_be_its_own(stopped_run, capsys, flags, differing):
    with pytest.raises(SystemExit):
        main(f"pretrain --output {stopped_run} --resume {flags}".split())
    assert f"started with other settings: {differing}; use the same" in capsys.readouterr().err


def test_a_run_goes_on_only_with_the_budget_it_was_begun_with(run_config):
    config = run_config(steps=None, tokens=20 * 8 * 16)
    pretrain(config)
    with pytest.raises(ConfigError, match="tokens was 2560 and is now 9999"):
        pretrain(replace(config, resume=True, tokens=9999))


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_folder_is_not_taken_for_a_run(run_config, make_pair, resume):
    config = run_config(resume=resume)
    save_model(make_pair(), config.output)
    with pytest.raises(ConfigError, match="holds a model, not a run; choose another --output"):
        pretrain(config)


def test_resuming_a_finished_run_says_how_to_train_on_and_so_it_goes(run_config, shards, tmp_path, capsys):
    config = run_config()
    assert str(pretrain(config)).startswith("finished: 20 steps")
    capsys.readouterr()
    said = str(pretrain(replace(config, resume=True)))
    assert "training" not in capsys.readouterr().err
    assert said.startswith("was finished, its budget is spent: 20 steps")
    assert said.endswith(f"to train its model on: a new --output with --init {config.output}")
    command = f"pretrain --data {shards} --output {tmp_path}/more --init {config.output} --steps 2 --length 16"
    main([*command.split(), "--batch-size", "8", "--evaluation-rows", "8"])
    assert "finished: 2 steps" in capsys.readouterr().out


def test_a_folder_with_something_else_in_it_is_left_alone(run_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is not empty and holds no run"):
        pretrain(run_config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_data_that_is_gone_or_other_is_named(run_config, tmp_path):
    config = run_config()
    pretrain(config)
    with pytest.raises(DataError, match=r"there is no folder .*gone; make shards with"):
        pretrain(replace(config, resume=True, data=tmp_path / "gone"))
    (tmp_path / "vocab.txt").write_text((config.data.parent / "vocab.txt").read_text() + "frog\n")
    text = str(config.data.parent / "text.txt")
    other = {"corpus": text, "tokenizer": tmp_path / "vocab.txt", "output": tmp_path / "other"}
    shard(build(ShardConfig, **other, validation_fraction=0.1, workers=1))
    changed = (
        r"settings: the tokenizer of --data was one of 22 entries \(\w{8}\) and is now one of 23 entries \(\w{8}\);"
    )
    with pytest.raises(ConfigError, match=changed):
        pretrain(replace(config, resume=True, data=tmp_path / "other"))


def test_shards_without_held_out_text_are_named_before_anything_is_trained(run_config, shards, tmp_path):
    source = shards.parent
    nothing_held_out = {"validation_fraction": 0.0, "output": tmp_path / "all", "workers": 1}
    shard(build(ShardConfig, corpus=str(source / "text.txt"), tokenizer=source / "vocab.txt", **nothing_held_out))
    for dry_run in (False, True):
        with pytest.raises(DataError, match="has no validation tokens; make shards with another --validation-fraction"):
            pretrain(run_config(data=tmp_path / "all", dry_run=dry_run))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("length", "wanted", "warning"),
    [
        (26, 16, ""),
        (26, 64, "measures are of 20 rows, not 64: 20 are held out in {}; "),
        (27, 16, "only 19 rows of text are held out in {}: "),
    ],
)
def test_few_held_out_rows_are_warned_of(run_config, tmp_path, shards, capsys, length, wanted, warning):
    source = shards.parent
    little = {"validation_fraction": 0.01, "output": tmp_path / "little", "workers": 1}
    shard(build(ShardConfig, corpus=str(source / "text.txt"), tokenizer=source / "vocab.txt", **little))
    assert open_shards(tmp_path / "little").index.totals("tokens")["validation"] == 486  # 25 in each row, and [CLS]: 20
    pretrain(run_config(data=tmp_path / "little", length=length, evaluation_rows=wanted, dry_run=True))
    said = capsys.readouterr().err
    assert said.startswith(warning.format(tmp_path / "little"))
    assert ("; make shards with a larger --validation-fraction (it was 0.01)" in said) == bool(warning)
    assert said.count("\n") == bool(warning)


def test_held_out_rows_come_from_all_over_the_held_out_text(run_config, shards):
    config = run_config(evaluation_rows=32, length=8)
    loader = LoaderConfig(length=config.loader.length, batch_size=32)
    everything = list(validation_batches(open_shards(shards), loader))
    assert len(everything) > 3
    few = held_out_batches(config, open_shards(shards), torch.device("cpu"))
    two = held_out_batches(replace(config, evaluation_rows=64), open_shards(shards), torch.device("cpu"))
    assert [len(few), len(two)] == [1, 2]
    assert torch.equal(two[1].input_ids, everything[len(everything) // 2].input_ids)
