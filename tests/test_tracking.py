"""Metrics for trackers and Python functions: a module with the interface of wandb, and a callback."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import small_run
from synthetic import write_rows

import electra
from electra.errors import ConfigError
from electra.pretraining.command import pretrain
from electra.runfolder import read_stored
from electra.training.logging import CALLBACKS, METRICS_FILE, TRACKED_RUNS, TrackedRuns, Tracker, read_metrics


class FakeWandb(SimpleNamespace):
    """Records what is sent to it; `fails` names the call that raises."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(fails=fails, runs=[], logged=[], finished=0)

    def init(self, **options) -> "FakeWandb":
        print("a message of the tracker")  # as Trackio does
        self.check("init")
        self.runs.append(options)
        return self

    def log(self, metrics: dict, step: int) -> None:
        self.check("log")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.check("finish")
        self.finished += 1

    def check(self, call: str) -> None:
        if call == self.fails:
            raise RuntimeError(f"cannot {call}:\nno network")


@pytest.fixture
def fake(monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", wandb)
    return wandb


def with_tracker(config, name="wandb"):
    return replace(config, trainer=replace(config.trainer, track=name))


def test_settings_and_metrics_are_sent_and_a_resumed_run_has_the_same_id(run_config, fake):
    config = with_tracker(run_config(steps=10))
    pretrain(config)
    [options] = fake.runs
    assert options["config"]["optimizer"]["learning_rate"] == config.optimizer.learning_rate
    assert options["project"] == "electra"
    assert options["resume"] == "allow"
    assert {step for step, _ in fake.logged} == {5, 10}
    assert {"train/generator", "validation/loss"} <= {name for _, metrics in fake.logged for name in metrics}
    assert fake.finished == 1
    pretrain(with_tracker(run_config(steps=15, resume=True)))
    assert fake.runs[1]["id"] == options["id"]
    assert read_stored(config.output / TRACKED_RUNS, TrackedRuns).ids == {"wandb": options["id"]}


def test_trackio_resumes_by_name(fake, tmp_path):
    for _ in range(2):
        Tracker("trackio", tmp_path, {}).finish()
    assert fake.runs[0]["name"] == fake.runs[1]["name"]
    assert not {"id", "dir"} & fake.runs[0].keys()  # arguments that it does not have


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once(call, fake, tmp_path, capsys):
    fake.fails = call
    tracker = Tracker("wandb", tmp_path, {})
    for step in range(3):
        tracker.log("train", step, {"loss": 1.0})
    tracker.finish()
    expected = f"wandb failed, the training continues without it: cannot {call}: no network\n"
    printed = capsys.readouterr()
    assert printed.err.removeprefix("a message of the tracker\n") == expected
    assert printed.out == ""  # which is for the result


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_written(run_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = with_tracker(run_config())
    with pytest.raises(ConfigError, match="track is wandb, which is not installed: pip install wandb"):
        pretrain(config)
    assert not config.output.exists()


def test_each_seed_of_a_fine_tuning_is_a_run_and_a_callback_gets_its_metrics(fake, encoder_folder, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", "classification", 40, seed=0)
    lines: list[dict] = []
    files = {"model": encoder_folder, "train": train, "output": tmp_path / "out"}
    settings = {"epochs": 1, "length": 16, "seeds": 2, "workers": 2, "device": "cpu", "track": "wandb"}
    electra.finetune(**files, **settings, callback=lines.append)
    assert len({options["id"] for options in fake.runs}) == 2
    assert [options["config"]["seed"] for options in fake.runs] == [1, 2]
    assert {Path(line["run"]).name for line in lines} == {"seed-1", "seed-2"}
    assert CALLBACKS == []


def test_a_callback_gets_the_lines_of_metrics_jsonl(shards, tmp_path):
    lines: list[dict] = []
    settings = {"size": "tiny", "layers": 1, "width": 32, "heads": 2, "length": 16, "batch_size": 8, "device": "cpu"}
    electra.pretrain(data=shards, output=tmp_path / "run", steps=4, log_every=2, callback=lines.append, **settings)
    assert [(line.pop("run"), line["kind"], line["step"]) for line in lines] == [
        (str(tmp_path / "run"), kind, step) for kind, step in (("train", 2), ("train", 4), ("validation", 4))
    ]
    assert lines == read_metrics(tmp_path / "run" / METRICS_FILE)


def test_an_exception_of_a_callback_ends_the_training(shards, tmp_path):
    class Enough(Exception):
        pass

    def stop(line: dict) -> None:
        raise Enough

    settings = {"size": "tiny", "layers": 1, "width": 32, "heads": 2, "length": 16, "batch_size": 8, "device": "cpu"}
    with pytest.raises(Enough):
        electra.pretrain(data=shards, output=tmp_path / "run", steps=4, callback=stop, **settings)
    assert CALLBACKS == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(shards, tmp_path):
    config = small_run(shards, tmp_path / "run", steps=5)
    code = "import sys, electra; electra.pretrain(data=sys.argv[1], output=sys.argv[2], steps=int(sys.argv[3]), "
    code += "resume=True, size='tiny', layers=1, length=16, batch_size=4, device='cpu', track='wandb')"
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for steps in (2, 4):
        command = [sys.executable, "-c", code, str(shards), str(config.output), str(steps)]
        subprocess.run(command, env=environment, check=True)
    run_id = read_stored(config.output / TRACKED_RUNS, TrackedRuns).ids["wandb"]
    folders = list((config.output / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(run_id) for folder in folders)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_offline(shards, tmp_path):
    """Its files are on this machine; a resumed run continues under the same name, and the result stays readable."""
    settings = "--size tiny --layers 1 --length 16 --batch-size 4 --log-every 1 --device cpu --resume --json"
    command = [sys.executable, "-m", "electra", "pretrain", "--data", shards, "--output", tmp_path / "run"]
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    for steps in ("2", "4"):
        arguments = [*map(str, command), *settings.split(), "--track", "trackio", "--steps", steps]
        ended = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
        assert json.loads(ended.stdout)["step"] == int(steps)
    run_id = read_stored(tmp_path / "run" / TRACKED_RUNS, TrackedRuns).ids["trackio"]
    code = "import sys; from trackio.sqlite_storage import SQLiteStorage as storage; "
    code += "print(storage.get_runs('electra'), [log['step'] for log in storage.get_logs('electra', sys.argv[1])])"
    ended = subprocess.run(
        [sys.executable, "-c", code, run_id], env=environment, check=True, capture_output=True, text=True
    )
    assert ended.stdout == f"['{run_id}'] [1, 2, 2, 3, 4, 4]\n"
