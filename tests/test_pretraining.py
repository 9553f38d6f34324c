"""`electra pretrain`: what runs learn and write, recipes, resuming with stored settings, and errors."""

import json
import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import error_message
from kills import kill_repeatedly

import electra
from electra.cli import main
from electra.config import build_config, replace_settings
from electra.data.loader import merge_batches, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.errors import ConfigError, DataError, TrainingError
from electra.exporting.command import ExportConfig, export
from electra.huggingface.convert import merge_embedding_delta
from electra.model.electra import Electra
from electra.model.storage import load_model, save_model
from electra.objectives import evaluation
from electra.plotting import total_training_loss
from electra.pretraining.command import pretrain
from electra.pretraining.config import BudgetConfig, PretrainConfig
from electra.pretraining.held_out import held_out_batches
from electra.pretraining.initialize import pair_config
from electra.pretraining.phases import plan_phases
from electra.pretraining.recipes import RECIPES, SIZE_SETTINGS, recipe_settings
from electra.pretraining.task import PretrainingTask
from electra.pretraining.token_counts import unigram_frequencies
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import find_model_folder, read_training_state
from electra.training.distributed import World
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer

SIZE = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --generator-width 16"


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def make_shards(shards: Path, output: Path, validation_fraction: float, vocab: Path | None = None) -> Path:
    """Other shards of the text of `shards`."""
    files = {"corpus": str(shards.parent / "text.txt"), "tokenizer": vocab or shards.parent / "vocab.txt"}
    shard(build_config(ShardConfig, **files, output=output, validation_fraction=validation_fraction, workers=1))
    return output


def test_a_run_writes_settings_metrics_curves_samples_and_checkpoints(finished_run):
    assert [folder.name for folder in checkpoint_folders(finished_run)] == ["step-000000010", "step-000000020"]
    assert [line["step"] for line in metrics(finished_run, "train")] == [5, 10, 15, 20]
    assert metrics(finished_run, "train")[-1]["tokens"] == 20 * 8 * 16
    assert [line["step"] for line in metrics(finished_run, "validation")] == [20]
    record = json.loads((finished_run / "config.json").read_text())
    assert record["pretraining"]["steps"] == 20
    assert {"command", "environment", "model", "data"} <= set(record)
    assert (finished_run / "curves.png").exists()
    assert not (finished_run / "tensorboard").exists()


def test_missing_tensorboard_is_reported_before_anything_is_written(shards, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        electra.pretrain(data=shards, output=tmp_path / "new", size="tiny", steps=2, tensorboard=True)
    assert not (tmp_path / "new").exists()


def test_tensorboard_events_are_written_if_asked_for(finished_copy):
    config = replace(finished_copy, trainer=replace(finished_copy.trainer, tensorboard=True))
    pretrain(config)
    assert list((config.output / "tensorboard").glob("events*"))


def test_a_run_leaves_no_thread(finished_copy):
    """A thread that still uses torch while Python exits may abort the process."""
    shutil.rmtree(checkpoint_folders(finished_copy.output)[-1])
    before = threading.enumerate()
    pretrain(finished_copy)
    assert threading.enumerate() == before


@pytest.mark.parametrize("objective", ["rtd", "mlm", "replace-mlm"])
def test_samples_have_a_column_for_the_discriminator(run_config, finished_run, objective):
    run = finished_run
    if objective != "rtd":
        run = run_config(steps=1, objective=objective).output
        pretrain(run_config(steps=1, objective=objective))
    page = (run / "samples.md").read_text().splitlines()
    header, *rows = (line for line in page if line.startswith("| "))
    assert page.count(header) == 4
    assert {row.count("|") for row in [header, *rows]} == {4 if objective == "mlm" else 5}


def test_it_learns_a_grammar(run_config):
    settings = {"steps": 200, "learning_rate": 5e-3, "batch_size": 128, "save_every": 200, "evaluate_every": 200}
    config = run_config(**settings)
    result = pretrain(config)
    frequencies = unigram_frequencies(open_shards(config.data), torch.device("cpu"))
    entropy = -(frequencies * frequencies.clamp(min=1e-9).log()).sum().item()
    assert result.metrics["mlm_loss"] < entropy - 0.2
    assert result.metrics["unigram_mlm_loss"] == pytest.approx(entropy, abs=0.1)
    assert result.metrics["unigram_rtd_auc"] > 0.6
    assert "better than token frequencies" in result.assessment["generator"]
    assert "plateau" not in result.assessment


@pytest.mark.parametrize(
    "settings",
    [
        {"sharing": "none", "optimizer": "adam", "schedule": "cosine", "whole_word_masking": True},
        {"sharing": "all", "generator_width": None, "optimizer": "adamw", "schedule": "released"},
        {"sharing": "disentangled", "schedule": "wsd", "cross_document_attention": True, "data_on_gpu": True},
        {"packing": "segment-pairs", "length": 24, "mask_token_probability": 0.85, "mask_count": "paper"},
        {"packing": "examples", "length": 24},
        {"activation_checkpointing": True, "dropout": 0.1, "disallow_correct": True, "temperature": 0.8},
        {"objective": "mlm", "mask_token_probability": 0.8, "random_token_probability": 0.1},
        {"tokens": 60 * 8 * 16, "steps": None, "correct_sample_label": "replaced"},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_every_setting_lowers_the_loss(run_config, settings):
    defaults = {"steps": 60, "learning_rate": 5e-3, "save_every": 100, "evaluate_every": 100}
    config = run_config(**defaults | settings)
    pretrain(config)
    losses = [line["generator"] for line in metrics(config.output, "train")]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "all-tokens-mlm"},
        {"generator": "uniform"},
        {"mask_fraction": 0.5, "discriminator_weight": 5.0, "whole_word_masking": True},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_the_held_out_loss_has_the_terms_of_the_training_loss(run_config, settings):
    budget = {"steps": 80, "log_every": 20, "save_every": 100, "evaluate_every": 100}
    config = run_config(**budget, learning_rate=5e-3, batch_size=32, **settings)
    held_out = pretrain(config).metrics["loss"]
    training = total_training_loss(metrics(config.output, "train")[-1], config.objective.loss_weights())
    assert held_out == pytest.approx(training, rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_set_the_defaults_of_the_command_line(shards, tmp_path, capsys, recipe):
    flags = f"{SIZE} --batch-size 4 --length 16 --steps 2 --evaluation-rows 8 --device cpu --warmup 0"
    main(f"pretrain --data {shards} --output {tmp_path}/run --recipe {recipe} {flags}".split())
    assert "finished: 2 steps" in capsys.readouterr().out
    settings = json.loads((tmp_path / "run/config.json").read_text())["pretraining"]
    expected = recipe_settings(recipe, "tiny")
    for name in ("learning_rate", "optimizer", "packing", "mask_fraction", "dropout"):
        assert settings[name] == expected[name]


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "base", "large"])
def test_given_settings_win_over_those_of_size_and_recipe(size):
    config = build_config(PretrainConfig, data="shards", output="run", size=size, recipe="faithful", learning_rate=1.0)
    assert config.optimizer.learning_rate == 1.0
    assert config.loader.batch_size == SIZE_SETTINGS["faithful"][size]["batch_size"]
    by_minutes = build_config(PretrainConfig, data="shards", output="run", size=size, minutes=5)
    assert (by_minutes.budget.steps, by_minutes.budget.minutes) == (None, 5)


def test_the_faithful_recipe_has_the_settings_of_the_paper():
    small, base, large = (recipe_settings("faithful", size) for size in ("small", "base", "large"))
    for name, expected in {
        "learning_rate": [5e-4, 2e-4, 2e-4],
        "batch_size": [128, 256, 2048],
        "length": [128, 512, 512],
        "mask_fraction": [0.15, 0.15, 0.25],
        "steps": [1_000_000, 766_000, 400_000],
    }.items():
        assert [settings[name] for settings in (small, base, large)] == expected
    names = ("optimizer", "schedule", "mask_token_probability", "packing")
    assert [small[name] for name in names] == ["adam", "released", 0.85, "segment-pairs"]


@pytest.mark.parametrize("sharing", ["embeddings", "disentangled"])
def test_segment_b_is_a_copy_of_a_unless_it_was_trained(run_config, sharing):
    def segments(packing: str) -> torch.Tensor:
        config = run_config(packing, packing=packing, sharing=sharing, steps=2)
        pretrain(config)
        weights = merge_embedding_delta(load_model(find_model_folder(config.output)).discriminator.state_dict())
        return weights["encoder.embeddings.segment.weight"]

    packed, pairs = segments("packed"), segments("segment-pairs")
    assert torch.equal(packed[0], packed[1])
    assert not torch.equal(pairs[0], pairs[1])


def test_micro_batches_do_not_change_the_losses(run_config):
    for packing in ("packed", "segment-pairs", "examples"):
        losses = []
        for count in (1, 4):
            settings = {"steps": 8, "log_every": 2, "length": 24, "packing": packing, "micro_batches": count}
            config = run_config(f"{packing}-{count}", **settings)
            pretrain(config)
            losses.append([(line["generator"], line["discriminator"]) for line in metrics(config.output, "train")])
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def test_a_budget_of_minutes_ends_with_its_schedule(run_config):
    config = run_config(steps=None, minutes=0.01, log_every=1, warmup=0.0)
    assert 0.6 <= pretrain(config).seconds < 3
    rates = [line["learning_rate"] for line in metrics(config.output, "train")]
    assert rates[0] > rates[len(rates) // 2] > rates[-1]


def test_held_out_rows_are_packed_like_the_training_rows(run_config, shards):
    batches = {
        packing: held_out_batches(run_config(packing=packing), open_shards(shards), torch.device("cpu"))[0]
        for packing in ("packed", "segment-pairs", "examples")
    }
    has_segments = {packing: batch.segment_ids is not None for packing, batch in batches.items()}
    assert has_segments == {"packed": False, "segment-pairs": True, "examples": True}
    assert batches["examples"].attention_mask is None


def test_held_out_rows_are_spread_over_the_validation_split(run_config, shards):
    config = run_config(evaluation_rows=32, length=8)
    batches = list(validation_batches(open_shards(shards), LoaderConfig(length=8, batch_size=32)))
    assert len(batches) > 3
    one = held_out_batches(config, open_shards(shards), torch.device("cpu"))
    two = held_out_batches(replace(config, evaluation_rows=64), open_shards(shards), torch.device("cpu"))
    assert [len(one), len(two)] == [1, 2]
    assert torch.equal(two[1].input_ids, batches[len(batches) // 2].input_ids)


def test_a_dry_run_estimates_a_run_and_writes_nothing(run_config, shards):
    config = run_config(dry_run=True)
    estimate = pretrain(config)
    assert (estimate.steps, estimate.tokens) == (20, 20 * 8 * 16)
    model = Electra(pair_config(config, open_shards(shards)))
    assert estimate.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "must be above 0"),
        ({"minutes": 1.0}, "give one of --steps, --tokens and --minutes, not steps and minutes"),
        ({"micro_batches": 3}, "micro_batches is 3; it must divide the batch of 8 rows: 1, 2, 4, 8"),
        ({"save_every": 0}, "at least 1"),
        ({"evaluation_rows": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"seed": 2**62 + 1}, "at most 4611686018427387904"),
        ({"style": "modern"}, "sinusoidal_positions needs position embeddings"),
    ],
)
def test_invalid_settings_are_reported(run_config, settings, message):
    with pytest.raises(ConfigError, match=message):
        run_config(**settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_a_run_killed_twenty_times_ends_with_the_same_bytes(run_config):
    settings = {"steps": 300, "evaluate_every": 50, "dropout": 0.1, "log_every": 50}
    unbroken, broken = (
        run_config("unbroken", save_every=300, **settings),
        run_config("broken", save_every=5, resume=True, **settings),
    )
    pretrain(unbroken)
    kill_repeatedly(pretrain, broken, times=20, within=0.6)
    assert pretrain(broken).step == 300
    weights = [(find_model_folder(run.output) / "model.safetensors").read_bytes() for run in (broken, unbroken)]
    assert weights[0] == weights[1]
    assert not [path for path in (broken.output / "checkpoints").iterdir() if path.name.startswith(".")]
    steps = [line["step"] for line in metrics(broken.output, "train")]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_run_that_ends_with_a_non_finite_loss_fails(shards, tmp_path, monkeypatch, capsys, loss):
    monkeypatch.setattr(PretrainingTask, "evaluate", lambda self: {"loss": loss, "mlm_loss": 1.0})
    start = f"pretrain --data {shards} --output {tmp_path}/run {SIZE} --batch-size 4 --length 16 --steps 4 --device cpu"
    for command in (start, f"pretrain --output {tmp_path}/run --resume"):
        with pytest.raises(SystemExit, match="2"):
            main(command.split())
        captured = capsys.readouterr()
        assert "finished" not in captured.out
        assert re.search(r"diverged: held-out loss is not finite; .*/step-000000004; try", captured.err)
    load_model(find_model_folder(tmp_path / "run"))
    assert (tmp_path / "run/curves.png").exists()


def test_a_run_with_a_finite_loss_far_above_chance_fails(run_config):
    with pytest.raises(TrainingError, match=r"diverged: held-out mlm_loss is .*, and 3.09 for uniform predictions"):
        pretrain(run_config(learning_rate=50.0))


@pytest.mark.parametrize(("before", "after"), [('"steps": 20', '"steps": 30'), ("0.003", "0.002")])
def test_an_edited_config_does_not_silently_change_a_resumed_run(finished_copy, before, after, capsys):
    path = finished_copy.output / "config.json"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(DataError, match=r"config.json is damaged .*checksum"):
        pretrain(finished_copy)
    assert "config.json is damaged" in error_message(f"pretrain --output {finished_copy.output} --resume", capsys)


def test_a_damaged_last_checkpoint_is_named_and_the_one_before_is_used_without_it(finished_copy, tmp_path):
    first, last = checkpoint_folders(finished_copy.output)
    expected = (last / "model.safetensors").read_bytes()
    content = bytearray(expected)
    content[-3] ^= 64  # a weight near 1e19
    (last / "model.safetensors").write_bytes(content)
    readers = [
        lambda: electra.load(finished_copy.output),
        lambda: export(ExportConfig(model=finished_copy.output, output=tmp_path / "hf")),
        lambda: pretrain(finished_copy),
    ]
    for read in readers:
        with pytest.raises(DataError, match=f"model.safetensors is damaged .*; remove {last} to use {first.name}"):
            read()
    assert not (tmp_path / "hf").exists()
    shutil.rmtree(last)
    pretrain(finished_copy)
    assert (last / "model.safetensors").read_bytes() == expected


def test_a_run_is_not_mixed_with_another(finished_copy):
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        pretrain(replace(finished_copy, resume=False))
    with pytest.raises(ConfigError, match=r"learning.rate was 0.003 and is now 0.1"):
        pretrain(replace_settings(finished_copy, learning_rate=0.1))
    shutil.rmtree(checkpoint_folders(finished_copy.output)[-1])  # a run that is not finished cannot be extended
    with pytest.raises(ConfigError, match=r"steps was 20 and is now unset.*tokens was unset and is now 9999"):
        pretrain(replace_settings(finished_copy, steps=None, tokens=9999))
    assert pretrain(replace_settings(finished_copy, save_every=7)).step == 20


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_checkpoint_may_be_replaced(run_config, monkeypatch, capsys, resume):
    def fail(self, batch):
        raise TrainingError("loss not finite")

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTask, "losses", fail)
        with pytest.raises(TrainingError):
            pretrain(run_config(learning_rate=9.0))
    config = run_config(learning_rate=1e-3, steps=10, sharing="none", resume=resume)
    assert pretrain(config).step == 10
    assert f"the run in {config.output} ended before its first checkpoint" in capsys.readouterr().err
    record = json.loads((config.output / "config.json").read_text())
    assert (record["pretraining"]["learning_rate"], record["model"]["sharing"]) == (1e-3, "none")
    with pytest.raises(ConfigError, match="already holds a run"):
        pretrain(replace(config, resume=False))


@pytest.fixture(scope="session")
def stopped_session_run(shards, tmp_path_factory) -> Path:
    """A run of six steps in two phases, stopped after the second step; its start file exists no longer."""
    output, step = tmp_path_factory.mktemp("stopped") / "run", Trainer.step
    start_file = output.with_name("start")
    start_file.touch()
    rows = "--batch-size 4 --length 16 --evaluation-rows 8 --phases fraction=0.5 fraction=0.5,length=8"

    def stop_after_two(self):
        step(self)
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    command = f"pretrain --data {shards} --output {output} --steps 6 --device cpu --json {SIZE} {rows}"
    command += f" --start-file {start_file}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stop_after_two)
        with pytest.raises(SystemExit):
            main(command.split())
    start_file.unlink()
    return output


@pytest.fixture
def stopped_run(stopped_session_run, tmp_path) -> Path:
    return shutil.copytree(stopped_session_run, tmp_path / "run")


def test_a_resumed_run_takes_its_settings_from_its_folder(stopped_run, capsys):
    main(f"pretrain --output {stopped_run} --resume --save-every 1".split())
    # not as JSON, and without waiting for a start file: these are not settings of the run
    assert capsys.readouterr().out.startswith("finished: 6 steps")
    assert len(checkpoint_folders(stopped_run)) == 3


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--size base", "size was tiny and is now base"),
        ("--minutes 5", "steps was 6 and is now unset; .*minutes was unset and is now 5.0"),
        ("--layers 2 --length 16", "layers was 1 and is now 2"),
    ],
)
def test_flags_of_a_resumed_run_must_equal_its_settings(stopped_run, capsys, flags, changes):
    with pytest.raises(SystemExit, match="2"):
        main(f"pretrain --output {stopped_run} --resume {flags}".split())
    assert re.search(f"started with other settings: .*{changes}", capsys.readouterr().err)


def test_a_run_needs_data_or_a_run_to_resume(finished_run, tmp_path, capsys):
    for flags, message in (
        (f"--output {tmp_path}/none --resume", "holds no run; start one with --data"),
        (f"--output {finished_run}", "holds a run; continue it with --resume"),
    ):
        assert message in error_message(f"pretrain {flags}", capsys)


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_folder_is_not_a_run(run_config, make_pair, resume):
    config = run_config(resume=resume)
    save_model(make_pair(), config.output)
    with pytest.raises(DataError, match="holds no run"):
        pretrain(config)


def test_resuming_a_finished_run_changes_nothing_and_shows_how_to_continue(finished_copy, shards, tmp_path, capsys):
    before = (finished_copy.output / "metrics.jsonl").read_bytes()
    result = str(pretrain(finished_copy))
    assert "training" not in capsys.readouterr().err
    assert result.startswith("already finished, its budget is used up: 20 steps")
    assert result.endswith(f"a new --output with --init {finished_copy.output}")
    assert (finished_copy.output / "metrics.jsonl").read_bytes() == before
    command = f"pretrain --data {shards} --output {tmp_path}/more --init {finished_copy.output} --steps 2 --length 16"
    main([*command.split(), "--batch-size", "8", "--evaluation-rows", "8"])
    assert "finished: 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("schedule", "rate"), [("linear", 0.25), ("wsd", 1.0)])
def test_a_finished_run_is_extended_by_a_larger_budget(run_config, capsys, schedule, rate):
    """The learning rate is that of the longer run: a linear one decays again, a constant one stays."""
    config = run_config(steps=4, schedule=schedule, decay_fraction=0.0, warmup=1, log_every=1)
    pretrain(config)
    extended = replace(config, resume=True, budget=BudgetConfig(steps=8))
    assert pretrain(extended).step == 8
    assert "extending a finished run" in capsys.readouterr().err
    rates = {line["step"]: line["learning_rate"] for line in metrics(config.output, "train")}
    assert rates[7] / config.optimizer.learning_rate == pytest.approx(rate, abs=0.05)
    assert pretrain(extended).was_finished  # also without the flag
    main(f"pretrain --output {config.output} --resume".split())
    assert "already finished, its budget is used up: 8 steps" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"already trained for 8 steps and .* give a larger one"):
        pretrain(replace(config, resume=True, budget=BudgetConfig(steps=6)))


def test_a_folder_with_other_files_is_not_touched(run_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is not empty and holds no run"):
        pretrain(run_config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_missing_and_changed_data_are_reported(finished_copy, shards, tmp_path):
    with pytest.raises(DataError, match="gone"):
        pretrain(replace(finished_copy, data=tmp_path / "gone"))
    (tmp_path / "vocab.txt").write_text((shards.parent / "vocab.txt").read_text() + "frog\n")
    other = make_shards(shards, tmp_path / "other", 0.1, vocab=tmp_path / "vocab.txt")
    changed = r"tokenizer of --data was 22 entries \(\w{8}\) and is now 23 entries \(\w{8}\)"
    with pytest.raises(ConfigError, match=changed):
        pretrain(replace(finished_copy, data=other))


def test_whole_word_masking_needs_a_tokenizer_with_word_pieces(run_config, shards):
    with pytest.raises(ConfigError, match="--whole-word-masking needs word pieces that start with ##, and the vocab"):
        pretrain(run_config(whole_word_masking=True, data=shards))


def test_shards_without_held_out_text_are_reported_before_training(run_config, shards, tmp_path):
    data = make_shards(shards, tmp_path / "all", validation_fraction=0.0)
    for dry_run in (False, True):
        with pytest.raises(DataError, match="validation"):
            pretrain(run_config(data=data, dry_run=dry_run))
    assert not (tmp_path / "run").exists()


def test_few_held_out_rows_are_warned_of(run_config, tmp_path, shards, capsys):
    data = make_shards(shards, tmp_path / "few", validation_fraction=0.01)
    assert open_shards(data).index.totals_by_split("tokens")["validation"] == 486  # 20 rows of 25 tokens and [CLS]
    for length, rows, warning in (
        (26, 16, ""),
        (26, 64, f"evaluation uses 20 rows instead of 64: {data} holds out 20; "),
        (27, 16, f"{data} has only 19 held-out rows: "),
    ):
        pretrain(run_config(data=data, length=length, evaluation_rows=rows, dry_run=True))
        error = capsys.readouterr().err
        assert error.startswith(warning)
        assert error.count("\n") == bool(warning)


def test_fp16_training_with_loss_scaling_follows_fp32_training(run_config):
    losses = [
        pretrain(run_config(precision, precision=precision, steps=10)).metrics["loss"] for precision in ("fp32", "fp16")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    state = read_training_state(checkpoint_folders(run_config("fp16").output)[-1]).trainer
    assert state.nonfinite_steps < 5


def test_held_out_rows_that_do_not_fit_into_memory_are_evaluated_in_smaller_batches_with_equal_metrics(
    run_config, monkeypatch
):
    config = run_config(steps=2, evaluation_rows=64)
    shards = open_shards(config.data)
    task = PretrainingTask(plan_phases(config, pair_config(config, shards))[0], shards, World(torch.device("cpu")))
    config.output.mkdir()
    expected, evaluate_batch = task.evaluate(), evaluation.evaluate_batch
    assert len(task.held_out) == 2
    task.held_out = [merge_batches(task.held_out)]  # as on a GPU

    def limited(electra, batch, *arguments):
        if batch.num_rows > 8:
            raise torch.OutOfMemoryError
        return evaluate_batch(electra, batch, *arguments)

    monkeypatch.setattr(evaluation, "evaluate_batch", limited)
    assert task.evaluate() == pytest.approx(expected)
    assert {batch.num_rows for batch in task.held_out} == {8}
    monkeypatch.setattr(evaluation, "evaluate_batch", lambda *arguments: limited(None, SimpleNamespace(num_rows=9)))
    with pytest.raises(torch.OutOfMemoryError):
        task.evaluate()


def test_the_last_checkpoint_is_saved_after_the_last_evaluation(run_config):
    config = run_config(steps=4, save_every=2, evaluate_every=8)
    result = pretrain(config)
    state = read_training_state(checkpoint_folders(config.output)[-1]).trainer
    assert (state.best_checkpoint, state.best_loss) == ("step-000000004", pytest.approx(result.metrics["loss"]))


@pytest.mark.parametrize("attention", [False, True])
def test_held_out_rows_have_the_attention_of_training_rows(run_config, attention):
    config = run_config(steps=2, cross_document_attention=attention)
    [batch, *_] = held_out_batches(config, open_shards(config.data), torch.device("cpu"))
    assert (batch.document_ids is None) == attention
