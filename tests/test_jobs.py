"""Jobs: in parallel, stopped and continued, in folders of their own; NVIDIA MPS for processes on one GPU."""

import json
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from synthetic import write_glue, write_lines

from electra.config import build_config, replace_settings
from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning import workers as workers_module
from electra.finetuning.command import finetune
from electra.finetuning.config import EvaluateConfig, FinetuneConfig, GlueConfig, TuningConfig
from electra.finetuning.glue import glue
from electra.finetuning.job import Job, JobResult
from electra.finetuning.jobs import best_model_folder, find_model_to_finetune, medians_and_deviations, read_mean_logits
from electra.finetuning.predict import evaluate
from electra.finetuning.tasks import GLUE_TASKS
from electra.finetuning.workers import MPS_CONTROL, MPS_PIPES, VISIBLE_DEVICES, start_mps
from electra.model.storage import write_tensors
from electra.runfolder import lock_folder, read_json, write_checksums, write_json
from electra.signals import collect_stop_signals
from electra.training.config import HardwareConfig
from electra.training.trainer import Trainer

SMALL = {"batch_size": 8, "learning_rate": 3e-3, "length": 32, "device": "cpu"}


@pytest.fixture
def glue_config(encoder_folder, tmp_path):
    """Build the config of a small GLUE table."""
    data = write_glue(tmp_path / "glue")

    def make_config(output: str = "out", **settings) -> GlueConfig:
        files = {"model": encoder_folder, "data": str(data), "output": tmp_path / output, "tasks": ("cola",)}
        return build_config(GlueConfig, **(SMALL | files | settings))

    return make_config


def send_signal(output, number: int, to_worker: bool) -> threading.Thread:
    """Send a signal to a worker or to this process as soon as the jobs have written further metrics."""

    def size() -> int:
        return sum(metrics.stat().st_size for metrics in output.glob("*/seed-*/metrics.jsonl"))

    def wait_and_send(before: int) -> None:
        while size() <= before:
            time.sleep(0.01)
        os.kill(multiprocessing.active_children()[0].pid if to_worker else os.getpid(), number)

    thread = threading.Thread(target=wait_and_send, args=(size(),))
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_jobs_that_were_killed_and_stopped_in_parallel_give_the_same_table(glue_config, tmp_path, capsys, monkeypatch):
    """A worker is killed, then the command is stopped: no hang, no orphan processes, nothing lost."""
    fork = multiprocessing.get_context("fork")  # starts faster than "spawn", which CUDA needs
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda method: fork)
    whole = glue(glue_config("whole", seeds=3, epochs=10))
    broken = glue_config("out", seeds=3, epochs=10, workers=2)
    for number, to_worker, error in ((signal.SIGKILL, True, TrainingError), (signal.SIGTERM, False, SystemExit)):
        thread = send_signal(tmp_path / "out", number, to_worker)
        with pytest.raises(error):
            glue(broken)
        thread.join()
        assert multiprocessing.active_children() == []
        assert not (tmp_path / "out" / "cola" / "seed-3").exists()  # a stopped worker starts no further job
    assert "stopped; run the same command to continue" in capsys.readouterr().err
    assert list((tmp_path / "out").glob("cola/seed-*/checkpoints/step-*"))
    assert glue(replace_settings(broken, workers=1)).rows[0].metrics == whole.rows[0].metrics


def test_an_error_in_one_job_stops_the_others(glue_config, tmp_path):
    config = glue_config(tasks=("cola", "rte"), seeds=1, epochs=200, workers=2)
    write_lines(tmp_path / "glue" / "RTE" / "dev.tsv", ["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tmaybe"])
    with pytest.raises(DataError, match=r"RTE/dev.tsv, line 2: unknown label 'maybe'"):
        glue(config)
    assert multiprocessing.active_children() == []


def test_processes_of_the_caller_are_not_stopped(glue_config):
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    config = glue_config(tasks=("cola",), seeds=2, learning_rate=1e9, workers=2)
    with pytest.raises(TrainingError, match=r"not finite|diverged"):
        glue(config)
    assert multiprocessing.active_children() == [process]
    process.kill()
    process.join()


def end_after_two_signals(job: Job, quiet: bool) -> None:
    """The first job fails; the second fails after two stop signals, which it has only recorded, as a trainer does."""
    if job.seed == 1:
        raise TrainingError("diverged first")
    with collect_stop_signals(quiet) as received:
        while len(received) < 2:
            time.sleep(0.01)
    raise TrainingError("diverged second")


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: patches reach the workers
def test_workers_whose_jobs_end_as_they_are_stopped_end_too(glue_config, monkeypatch):
    """They would wait for the next job forever: a worker that is killed while it waits holds the lock of the queue."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(Job, "run", end_after_two_signals)
    with pytest.raises(TrainingError, match="diverged first"):
        glue(glue_config(seeds=2, workers=2))
    assert multiprocessing.active_children() == []


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: patches reach the workers
@pytest.mark.parametrize(("workers", "on_each"), [(2, [1, 1]), (3, [2, 1]), (None, [2, 2])])
def test_workers_are_divided_over_the_gpus(glue_config, monkeypatch, workers, on_each):
    """Each sees one GPU; by default there are two for each."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(workers_module, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(workers_module, "start_mps", lambda: nullcontext(False))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(VISIBLE_DEVICES, "3,GPU-5,-1,7")  # CUDA ends the list at -1
    monkeypatch.setattr(Job, "run", lambda job, quiet: time.sleep(0.2) or (os.getpid(), os.environ[VISIBLE_DEVICES]))
    tuning = glue_config()
    job = Job(
        model=tuning.model, task=GLUE_TASKS["cola"], tuning=tuning.tuning, hardware=tuning.hardware, seed=1,
        folder=tuning.output,
    )  # fmt: skip
    gpus_of_workers = dict(result for _, result in workers_module.run_here_or_in_workers([job] * 8, workers))
    counts = Counter(gpus_of_workers.values())
    assert [counts["3"], counts["GPU-5"]] == on_each


def test_a_single_job_runs_in_this_process(glue_config, capsys):
    glue(glue_config(seeds=1, epochs=1, workers=2))
    printed = capsys.readouterr().err
    assert "classic encoder with 2 layers of width 24; head on the first token\n1 epoch of " in printed


def test_seeds_can_be_added_and_left_out(glue_config, tmp_path, monkeypatch):
    glue(glue_config(seeds=1, epochs=1))
    first = (tmp_path / "out" / "cola" / "seed-1" / "result.json").read_bytes()
    assert glue(glue_config(seeds=3, epochs=1)).rows[0].seeds == 3
    assert (tmp_path / "out" / "cola" / "seed-1" / "result.json").read_bytes() == first
    monkeypatch.setattr("electra.finetuning.job.Trainer", None)  # a TypeError if it is called
    assert glue(glue_config(seeds=2, epochs=1, submission=tmp_path / "glue.zip")).rows[0].seeds == 2


@pytest.fixture
def custom_config(encoder_folder, tmp_path):
    """Build the config of a short fine-tuning on a file."""
    (tmp_path / "rows.csv").write_text("text,label\n" + "the cat sat .,x\nthe dog ran .,y\n" * 10)

    def make_config(output: str = "out", **settings) -> FinetuneConfig:
        files = {"model": encoder_folder, "train": tmp_path / "rows.csv", "output": tmp_path / output, "epochs": 1}
        return build_config(FinetuneConfig, **(SMALL | files | settings))

    return make_config


def test_a_folder_with_other_content_is_not_changed(custom_config, tmp_path):
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", {"pretraining": {}})
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(DataError, match="not empty and not the output of a fine-tuning"):
        finetune(custom_config("run"))
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_files_of_a_killed_process_are_removed(custom_config, tmp_path):
    """Before it wrote its settings; and, when all is finished, in the folders of seeds and tokens."""
    (tmp_path / "out").mkdir()
    strays = ["electra.lock", "config.json.electra-partial"]
    for _ in range(2):
        for name in strays:
            (tmp_path / "out" / name).write_text("{")
        assert finetune(custom_config()).rows == {"train": 18, "dev": 2}
        assert not any((tmp_path / "out" / name).exists() for name in strays)
        strays += ["seed-1/result.json.electra-partial", "tokens/x.safetensors-1.electra-partial"]


def test_rows_beyond_the_trained_length_are_reported_once(custom_config, finished_run, tmp_path, capsys):
    for length, count in ((16, 0), (24, 1)):
        finetune(custom_config(f"out-{length}", model=finished_run, seeds=2, length=length))
        assert capsys.readouterr().err.count("was trained on rows of up to 16 tokens") == count
    for length, count in ((24, 0), (32, 1)):
        file = tmp_path / "rows.csv"
        evaluate(build_config(EvaluateConfig, model=tmp_path / "out-24", input=file, length=length, device="cpu"))
        assert capsys.readouterr().err.count("was trained on rows of up to 24 tokens") == count


def test_an_output_is_used_by_one_command_at_a_time(custom_config, glue_config, tmp_path):
    for command, config in ((finetune, custom_config()), (glue, glue_config())):
        with lock_folder(tmp_path / "out"), pytest.raises(ConfigError, match=r"is using .*out"):
            command(config)
    assert not (tmp_path / "out").exists()


def test_a_table_of_another_tool_is_not_overwritten(glue_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.md").write_text("mine")
    with pytest.raises(DataError, match=r"holds a table.md and no fine-tuning"):
        glue(glue_config())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table.md"]


def test_other_settings_and_data_are_rejected(custom_config, tmp_path):
    finetune(custom_config())
    with pytest.raises(ConfigError, match="started with other settings: --length was 32 and is now 16"):
        finetune(custom_config(length=16))
    rows = (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(rows.replace("cat", "dog"))  # of the same size
    with pytest.raises(ConfigError, match=r"rows.csv has other content"):
        finetune(custom_config())
    (tmp_path / "others.csv").write_text("text,label\n" + "the cat sat .,a\nthe dog ran .,b\n" * 10)
    with pytest.raises(ConfigError, match=r"splits train was .*rows.csv and is now .*others.csv"):
        finetune(custom_config(train=tmp_path / "others.csv"))


def test_a_finished_seed_removes_checkpoints_and_partial_models(custom_config, tmp_path):
    """A process may be killed after the result was written, or while the model was written."""
    finetune(custom_config())
    seed = tmp_path / "out" / "seed-1"
    (seed / "checkpoints" / "step-000000001").mkdir(parents=True)
    write_checksums(seed / "checkpoints" / "step-000000001")
    finetune(custom_config())
    assert not (seed / "checkpoints").exists()
    (seed / "result.json").unlink()
    (seed / ".model-abc.electra-partial").mkdir()
    finetune(custom_config())
    assert not (seed / ".model-abc.electra-partial").exists()


def test_a_fine_tuning_that_ended_after_its_best_epoch_and_before_a_checkpoint_starts_over(
    custom_config, tmp_path, monkeypatch
):
    config = custom_config(epochs=2, best_epoch=True)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_checkpoint", lambda _: sys.exit(9))  # as if killed
        with pytest.raises(SystemExit):
            finetune(config)
    assert list((tmp_path / "out" / "seed-1").glob("best-epoch-*"))
    assert not list((tmp_path / "out" / "seed-1").glob("checkpoints/*"))
    assert finetune(config).seeds == finetune(custom_config("whole", epochs=2, best_epoch=True)).seeds


def test_finished_seeds_are_not_run_again(finetuned, monkeypatch):
    monkeypatch.setattr("electra.finetuning.job.Trainer", None)  # a TypeError if it is called
    assert finetune(finetuned.config) == finetuned.result
    with pytest.raises(ConfigError, match="--batch-size was 16 and is now 8"):
        finetune(replace_settings(finetuned.config, batch_size=8))


def write_seed(output, seed: int, accuracy: float) -> None:
    """A finished seed with a result and an empty model."""
    folder = output / f"seed-{seed}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").touch()
    result = JobResult(
        "made", seed, {"dev": {"accuracy": accuracy}}, steps=1, seconds=1.0, rows={"dev": 1}, truncated={}
    )
    write_json(folder / "result.json", vars(result))


def test_the_best_seed_is_never_one_with_nan(tmp_path):
    write_json(tmp_path / "config.json", {"settings": {}, "task": {}})
    for seed, accuracy in ((1, float("nan")), (2, 0.25), (3, 0.75), (4, 0.5)):
        write_seed(tmp_path, seed, accuracy)
    assert json.loads((tmp_path / "seed-1" / "result.json").read_text())["metrics"] == {"dev": {"accuracy": None}}
    assert best_model_folder(tmp_path) == find_model_to_finetune(tmp_path) == tmp_path / "seed-3" / "model"


@pytest.mark.parametrize("metrics", [{}, {"dev": {}}, {"dev": {"accuracy": "high"}}, {"dev": 1}, None])
def test_a_result_without_metrics_is_named(tmp_path, metrics):
    for seed in (1, 2):
        write_seed(tmp_path, seed, 0.5)
    path = tmp_path / "seed-2" / "result.json"
    write_json(path, read_json(path) | {"metrics": metrics})
    with pytest.raises(DataError, match=r"seed-2/result.json is damaged or not in the expected format"):
        best_model_folder(tmp_path)


def test_a_folder_of_several_tasks_has_no_best_model(tmp_path):
    write_seed(tmp_path / "rte", 1, 0.5)
    with pytest.raises(DataError, match="choose one of its tasks: rte"):
        best_model_folder(tmp_path)


def test_an_unfinished_fine_tuning_has_no_model(finetuned, tmp_path):
    (tmp_path / "seed-1").mkdir()
    shutil.copy(finetuned.output / "config.json", tmp_path)
    with pytest.raises(DataError, match="it is not finished; run the same command to continue"):
        best_model_folder(tmp_path)


def test_medians_and_standard_deviations_over_seeds():
    results = [JobResult("made", 1, {"dev": {"f1": value}}, 1, 1.0, {"dev": 1}, {}) for value in (0.2, 0.6, 0.4)]
    medians, deviations = medians_and_deviations(results)
    assert medians == {"dev": {"f1": 0.4}}
    assert deviations["dev"]["f1"] == pytest.approx(0.2)


def test_an_ensemble_averages_logits(tmp_path):
    logits = {1: [[4.0, 0.0, 0.0]], 2: [[0.0, 1.0, 0.0]]}
    settings = {"model": tmp_path, "task": GLUE_TASKS["mnli"], "tuning": TuningConfig(), "hardware": HardwareConfig()}
    jobs = [Job(**settings, seed=seed, folder=tmp_path / str(seed)) for seed in logits]
    for job in jobs:
        job.folder.mkdir()
        write_tensors(job.folder / "logits.safetensors", {"dev": torch.tensor(logits[job.seed])})
    assert read_mean_logits(jobs)["dev"].tolist() == [[2.0, 0.5, 0.0]]


@pytest.fixture
def mps_calls(tmp_path, monkeypatch):
    """Install an MPS control program that records its input, its pipe folder and the visible GPUs."""
    log = tmp_path / "calls"
    program = tmp_path / MPS_CONTROL
    program.write_text(f'#!/bin/sh\necho "$1$(cat) ${MPS_PIPES} [${VISIBLE_DEVICES}]" >> {log}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(MPS_PIPES, raising=False)
    monkeypatch.setattr(workers_module, "MPS_PROBE", "raise SystemExit(0)")
    return lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_mps_is_started_and_stopped(mps_calls, monkeypatch):
    monkeypatch.setenv(VISIBLE_DEVICES, "3")
    folders = []

    def fail_in_context() -> None:
        with start_mps() as has_mps:
            assert has_mps
            folders.append(os.environ[MPS_PIPES])
            assert os.path.isdir(folders[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_context()
    [folder] = folders
    assert mps_calls() == [["-d", folder, "[]"], ["quit", folder, "[]"]]  # the daemon sees all GPUs
    assert MPS_PIPES not in os.environ
    assert not os.path.exists(folder)


@pytest.mark.parametrize("probe", ["raise SystemExit(1)", "import time; time.sleep(60)"])
def test_mps_is_stopped_if_the_gpu_does_not_respond(mps_calls, monkeypatch, probe):
    monkeypatch.setattr(workers_module, "MPS_PROBE", probe)
    monkeypatch.setattr(workers_module, "MPS_TIMEOUT", 1.0)
    with start_mps() as has_mps:
        assert not has_mps
        assert MPS_PIPES not in os.environ
        assert [line[0] for line in mps_calls()] == ["-d", "quit"]


def test_a_running_mps_daemon_is_used(mps_calls, monkeypatch):
    monkeypatch.setenv(MPS_PIPES, "theirs")
    with start_mps() as has_mps:
        assert has_mps
    assert os.environ[MPS_PIPES] == "theirs"
    assert not mps_calls()


def test_without_mps_processes_take_turns(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(MPS_PIPES, raising=False)
    with start_mps() as has_mps:
        assert not has_mps
