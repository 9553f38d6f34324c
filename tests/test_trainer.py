"""The training loop, in pre-training runs: signals, non-finite steps, checkpoints, budgets and progress."""

import itertools
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kills import killed

from electra.errors import ConfigError, DataError, TrainingError
from electra.model.storage import load_model
from electra.pretraining.command import pretrain
from electra.pretraining.task import PretrainingTask
from electra.runfolder import checkpoint_folders
from electra.training import trainer
from electra.training.checkpoint import model_folder
from electra.training.config import Budget
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer


def weights(run: Path) -> bytes:
    return (model_folder(run) / "model.safetensors").read_bytes()


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def saved_steps(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in checkpoint_folders(run)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_run_killed_ten_times_ends_with_the_same_bytes(run_config):
    settings = {"steps": 150, "save_every": 3, "evaluate_every": 50, "dropout": 0.1, "log_every": 50}
    unbroken, broken = run_config("unbroken", **settings), run_config("broken", **settings, resume=True)
    pretrain(unbroken)
    moments = random.Random(0)
    for kills in range(10):
        assert killed(pretrain, broken, after=moments.uniform(0.05, 0.4)), f"finished after {kills} kills"
    assert pretrain(broken).step == 150
    assert weights(broken.output) == weights(unbroken.output)
    assert not [path for path in (broken.output / "checkpoints").iterdir() if path.name.startswith(".")]
    steps = [line["step"] for line in metrics(broken.output, "train")]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_bytes(run_config, tmp_path, optimizer):
    config = run_config(optimizer=optimizer, dropout=0.1, save_every=4, steps=8)
    pretrain(config)
    unbroken = weights(config.output)
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    pretrain(replace(config, resume=True))
    assert weights(config.output) == unbroken


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_stops(run_config, monkeypatch, capfd, number):
    step = Trainer.step

    def signal_at_seven(self):
        step(self)
        if self.state.step == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "step", signal_at_seven)
    result = pretrain(run_config())
    assert (result.step, result.signal, result.exit_code) == (7, number, 128 + number)
    assert result.checkpoint.endswith("step-000000007")
    assert "stopping after this step" in capfd.readouterr().err
    assert f"stopped by {signal.Signals(number).name}, continue with --resume" in str(result)
    monkeypatch.undo()
    assert pretrain(run_config(resume=True)).step == 20


@pytest.fixture
def infinite_loss(monkeypatch):
    """Make the generator's loss infinite at some steps."""
    losses = PretrainingTask.losses

    def at(steps) -> None:
        def some_infinite(self, batch):
            computed = losses(self, batch)
            if int(batch.step) in steps:
                computed["generator"] = replace(computed["generator"], sum=computed["generator"].sum * float("inf"))
            return computed

        monkeypatch.setattr(PretrainingTask, "losses", some_infinite)

    return at


def test_non_finite_steps_are_skipped_and_counted(run_config, infinite_loss):
    infinite_loss({3, 8})
    result = pretrain(run_config())
    assert (result.step, result.nonfinite_steps) == (20, 2)
    assert "2 steps skipped" in str(result)
    assert all(parameter.isfinite().all() for parameter in load_model(model_folder(Path(result.run))).parameters())


def test_too_many_consecutive_non_finite_steps_stop_the_run(run_config, infinite_loss):
    infinite_loss(range(12, 100))
    config = run_config(max_nonfinite_steps=4)
    with pytest.raises(TrainingError, match=r"step 16: .*not finite in 4 consecutive steps; .*step-000000010"):
        pretrain(config)
    load_model(model_folder(config.output))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_checkpoint_may_be_replaced(run_config, infinite_loss, monkeypatch, capsys, resume):
    infinite_loss(range(6, 100))
    with pytest.raises(TrainingError, match="no checkpoint was saved before"):
        pretrain(run_config(max_nonfinite_steps=2, learning_rate=9.0))
    monkeypatch.undo()
    capsys.readouterr()
    config = run_config(learning_rate=1e-3, steps=10, resume=resume)
    assert pretrain(config).step == 10
    assert f"the run in {config.output} ended before its first checkpoint" in capsys.readouterr().err
    assert [line["step"] for line in metrics(config.output, "train")] == [5, 10]
    with pytest.raises(ConfigError, match="already holds a run"):
        pretrain(replace(config, resume=False))


def test_the_last_checkpoints_and_the_best_are_kept(run_config, monkeypatch):
    losses = iter([float("nan"), 1.0, 4.0, 3.0, 2.0, 2.5])  # NaN is never the best
    monkeypatch.setattr(PretrainingTask, "evaluate", lambda self: {"loss": next(losses)})
    config = run_config(steps=6, save_every=1, evaluate_every=1, keep_checkpoints=2)
    pretrain(config)
    assert saved_steps(config.output) == [2, 5, 6]


def test_slow_steps_are_saved_by_time(run_config, monkeypatch):
    seconds = itertools.count()  # a step takes one second, but the first does not count
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 2.0)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: evaluations.append(saved_steps(self.folder)))
    evaluations: list[list[int]] = []
    config = run_config(steps=9, save_every=100, evaluate_every=100, keep_checkpoints=9)
    pretrain(config)
    assert saved_steps(config.output) == [3, 5, 7, 9]
    assert evaluations == [[3, 5, 7]]  # before the last checkpoint


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json"])
def test_a_truncated_checkpoint_is_reported_with_the_one_before(finished_copy, name):
    damaged = checkpoint_folders(finished_copy.output)[-1] / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"{name} .*remove .*step-000000020 .*step-000000010"):
        pretrain(finished_copy)


def test_a_full_disk_loses_no_checkpoint(run_config, monkeypatch):
    config, write_model = run_config(), PretrainingTask.write_model

    def full(self, folder):
        if "000000020" in folder.name:
            raise OSError(28, "No space left on device", str(folder))
        write_model(self, folder)

    monkeypatch.setattr(PretrainingTask, "write_model", full)
    with pytest.raises(OSError, match="No space left"):
        pretrain(config)
    assert [path.name for path in (config.output / "checkpoints").iterdir()] == ["step-000000010"]
    monkeypatch.undo()
    assert pretrain(replace(config, resume=True)).step == 20


def test_a_budget_of_minutes_ends_with_its_schedule(run_config):
    config = run_config(steps=None, minutes=0.01, log_every=1, warmup=0.0)
    assert 0.6 <= pretrain(config).seconds < 3
    rates = [line["learning_rate"] for line in metrics(config.output, "train")]
    assert rates[0] > rates[len(rates) // 2] > rates[-1]


def test_a_warm_up_in_steps_with_a_budget_of_minutes(run_config, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count(step=1.0).__next__)  # a step takes one second
    monkeypatch.setattr("electra.training.trainer.time", clock)
    config = run_config(steps=None, minutes=0.5, log_every=1, warmup=20, schedule="wsd", decay_fraction=0.0)
    pretrain(config)
    rates = [line["learning_rate"] / config.optimizer.learning_rate for line in metrics(config.output, "train")]
    assert rates[:20] == pytest.approx([(step + 0.5) / 20 for step in range(20)])
    assert rates[20:] == pytest.approx([1.0] * 11)


def test_micro_batches_do_not_change_the_losses(run_config):
    for packing in ("packed", "segment-pairs"):
        losses = []
        for count in (1, 4):
            settings = {"steps": 8, "log_every": 2, "length": 24, "packing": packing, "micro_batches": count}
            config = run_config(f"{packing}-{count}", **settings)
            pretrain(config)
            losses.append([(line["generator"], line["discriminator"]) for line in metrics(config.output, "train")])
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def test_a_batch_that_exceeds_the_memory_is_reported_with_micro_batches_that_fit(run_config, monkeypatch):
    losses = PretrainingTask.losses

    def fit_two_rows(self, batch):
        if batch.num_rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, batch)

    monkeypatch.setattr(PretrainingTask, "losses", fit_two_rows)
    with pytest.raises(ConfigError, match="--micro-batches 4"):
        pretrain(run_config())
    assert pretrain(run_config(micro_batches=4, steps=1)).step == 1


@pytest.mark.parametrize(
    ("seconds", "steps", "left"),
    [
        (0.1, [2], ["0.0 minutes"]),
        (4.0, [2, 5, 8, 11, 14, 17, 20], ["1.2", "1.0", "0.8", "0.6", "0.4", "0.2", "0.0"]),
        (900.0, list(range(2, 21)), ["4.5 hours", "4.2 hours"]),
    ],
)
def test_progress_is_printed_every_ten_seconds(run_config, monkeypatch, capsys, seconds, steps, left):
    clock = SimpleNamespace(perf_counter=itertools.count(step=seconds).__next__)
    monkeypatch.setattr("electra.training.trainer.time", clock)
    config = run_config(evaluate_every=10)
    pretrain(config)
    lines = capsys.readouterr().err.splitlines()
    progress = [line for line in lines if "tokens/s" in line]
    assert [int(line.split()[1]) for line in progress] == steps
    assert all(f"%, {time}" in line for line, time in zip(progress, left, strict=False))
    assert [line["step"] for line in metrics(config.output, "train")] == [5, 10, 15, 20]
    assert [line.split(",")[0] for line in lines if "mlm_loss" in line] == ["step 10"]  # the result has the last


def test_the_last_steps_are_logged_and_the_time_left_is_estimated(run_config):
    config = run_config(steps=7, log_every=5)
    pretrain(config)
    assert [line["step"] for line in metrics(config.output, "train")] == [5, 7]
    assert Budget(seconds=600).minutes_left(steps=50, seconds=120, seconds_per_step=1.0) == 8
    assert Budget(steps=110).minutes_left(steps=50, seconds=120, seconds_per_step=2.0) == 2
