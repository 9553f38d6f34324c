"""Cells: side by side, stopped in every way, in folders that are their own."""

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from made import write_glue, write_lines

from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning.command import FinetuneConfig, finetune
from electra.finetuning.glue import GlueConfig, glue
from electra.finetuning.job import Score
from electra.finetuning.jobs import best_model, encoder_folder
from electra.runfolder import PARTIAL, write_json

SMALL = {"batch": 8, "learning_rate": 3e-3, "length": 32, "device": "cpu"}


@pytest.fixture
def settings(encoder_folder, tmp_path):
    """Build the configuration of a small table."""
    data = write_glue(tmp_path / "glue")

    def build(output: str = "out", **departures) -> GlueConfig:
        given = {"model": encoder_folder, "data": str(data), "output": tmp_path / output, "tasks": ("cola",)}
        return GlueConfig(**(SMALL | given | departures))

    return build


def stop(output, number: int, is_for_worker: bool) -> threading.Thread:
    """Send a signal to a worker, or to this process, once cells have written more metrics than there are now."""

    def size() -> int:
        return sum(metrics.stat().st_size for metrics in output.glob("*/seed-*/metrics.jsonl"))

    def wait_and_send(before: int) -> None:
        while size() <= before:
            time.sleep(0.01)
        os.kill(multiprocessing.active_children()[0].pid if is_for_worker else os.getpid(), number)

    thread = threading.Thread(target=wait_and_send, args=(size(),))
    thread.start()
    return thread


def test_stopped_in_any_way_it_goes_on_to_the_same_table(settings, tmp_path, capsys):
    """A worker is killed, then the table is asked to end: no hang, no orphan, nothing lost."""
    whole = glue(settings("whole", seeds=3, epochs=20))
    broken = settings("out", seeds=3, epochs=20, workers=2)
    ends = ((signal.SIGKILL, True, TrainingError), (signal.SIGTERM, False, SystemExit))
    for number, is_for_worker, error in ends:
        stopper = stop(tmp_path / "out", number, is_for_worker)
        with pytest.raises(error):
            glue(broken)
        stopper.join()
        assert multiprocessing.active_children() == []
        assert not (tmp_path / "out" / "cola" / "seed-3").exists()  # who is stopped begins nothing new
    assert "stopped, and saved; the same command goes on" in capsys.readouterr().err
    assert list((tmp_path / "out").glob("cola/seed-*/checkpoints/step-*"))
    assert glue(replace(broken, workers=1)).lines[0].measures == whole.lines[0].measures


def test_a_mistake_in_one_cell_is_one_sentence_and_the_others_save(settings, tmp_path):
    config = settings(tasks=("cola", "rte"), seeds=1, epochs=200, workers=2)
    write_lines(tmp_path / "glue" / "RTE" / "dev.tsv", ["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tmaybe"])
    with pytest.raises(DataError, match=r"RTE/dev.tsv, line 2: unknown label 'maybe'"):
        glue(config)
    assert multiprocessing.active_children() == []


def test_one_cell_says_what_it_does_whatever_the_number_of_workers(settings, capsys):
    glue(settings(seeds=1, epochs=1, workers=2))
    assert "tokens/s" in capsys.readouterr().err


def test_more_seeds_are_added_and_fewer_are_a_part(settings, tmp_path, monkeypatch):
    glue(settings(seeds=1, epochs=1))
    first = (tmp_path / "out" / "cola" / "seed-1" / "result.json").read_bytes()
    more = glue(settings(seeds=3, epochs=1))
    assert more.lines[0].seeds == 3
    assert (tmp_path / "out" / "cola" / "seed-1" / "result.json").read_bytes() == first
    monkeypatch.setattr("electra.finetuning.job.Trainer", None)  # would fail
    assert glue(settings(seeds=2, epochs=1, submission=tmp_path / "glue.zip")).lines[0].seeds == 2


@pytest.fixture
def own(encoder_folder, tmp_path):
    """Build a fine-tuning on a file of one's own."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "the cat sat .,x\nthe dog ran .,y\n" * 10)

    def build(output: str = "out", **departures) -> FinetuneConfig:
        given = {"model": encoder_folder, "train": tmp_path / "rows.csv", "output": tmp_path / output, "epochs": 1}
        return FinetuneConfig(**(SMALL | given | departures))

    return build


def test_a_folder_that_holds_something_else_is_left_as_it_is(own, run_config, tmp_path):
    from electra.pretraining.command import pretrain

    run = run_config("run")
    pretrain(run)
    before = (run.output / "config.json").read_bytes()
    with pytest.raises(DataError, match="is not empty and holds no fine-tuning; choose another --output"):
        finetune(own("run"))
    assert (run.output / "config.json").read_bytes() == before


def test_what_a_kill_left_of_the_claim_does_not_stand_in_the_way(own, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"config.json{PARTIAL}").write_text("{")
    assert finetune(own()).rows == {"train": 18, "dev": 2}


def test_other_rows_and_other_tasks_are_refused(own, tmp_path):
    finetune(own())
    with pytest.raises(ConfigError, match="started with other settings: --length was 32 and is now 16"):
        finetune(own(length=16))
    (tmp_path / "rows.csv").write_text((tmp_path / "rows.csv").read_text().replace("cat", "dog"))  # as long as before
    with pytest.raises(ConfigError, match=r"rows.csv has other content"):
        finetune(own())
    (tmp_path / "others.csv").write_text("text,label\n" + "the cat sat .,a\nthe dog ran .,b\n" * 10)
    with pytest.raises(ConfigError, match=r"splits train was .*rows.csv and is now .*others.csv"):
        finetune(own(train=tmp_path / "others.csv"))


def test_a_finished_seed_leaves_only_what_is_for_the_user(own, tmp_path):
    """A kill between the result and the last tidying, or while the model was written."""
    finetune(own())
    seed = tmp_path / "out" / "seed-1"
    (seed / "checkpoints" / "step-000000001").mkdir(parents=True)
    finetune(own())
    assert not (seed / "checkpoints").exists()
    (seed / "result.json").unlink()
    (seed / f".model-abc{PARTIAL}").mkdir()
    finetune(own())
    assert not (seed / f".model-abc{PARTIAL}").exists()


def write_seed(output, seed: int, accuracy: float) -> None:
    """A finished seed, as far as its score and the place of its model go."""
    folder = output / f"seed-{seed}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").touch()
    score = Score("made", seed, {"dev": {"accuracy": accuracy}}, steps=1, seconds=1.0, rows={}, truncated={})
    write_json(folder / "result.json", vars(score))


def test_the_best_seed_is_never_one_without_a_score(tmp_path):
    write_json(tmp_path / "config.json", {"settings": {}, "task": {}})
    for seed, accuracy in ((1, float("nan")), (2, 0.25), (3, 0.75), (4, 0.5)):
        write_seed(tmp_path, seed, accuracy)
    assert json.loads((tmp_path / "seed-1" / "result.json").read_text())["measures"] == {"dev": {"accuracy": None}}
    assert best_model(tmp_path) == encoder_folder(tmp_path) == tmp_path / "seed-3" / "model"


def test_a_folder_of_several_tasks_is_told_from_one(tmp_path):
    write_seed(tmp_path / "rte", 1, 0.5)
    with pytest.raises(DataError, match="choose one of the tasks in it: rte"):
        best_model(tmp_path)
