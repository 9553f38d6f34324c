"""electra probe: folds, standard errors, results that are kept, and failing jobs."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import change_weights, error_message
from synthetic import write_glue, write_lines

from electra.cli import main
from electra.config import build_config
from electra.errors import ConfigError, DataError
from electra.finetuning.config import ProbeConfig
from electra.finetuning.job import FinetuningTask, Job
from electra.finetuning.probe import ProbeJob, parse_settings, probe, write_splits
from electra.finetuning.probe_results import (
    Estimate,
    ProbeResult,
    as_array,
    collect_scores,
    compare_rows,
    estimate_mean,
    estimate_mean_of_tasks,
    read_results,
)
from electra.finetuning.tasks import get_glue_task, read_split_rows
from electra.runfolder import dump_json
from electra.training.config import HardwareConfig

SMALL = ("epochs=1", "batch_size=16", "length=32", "learning_rate=3e-3")


@pytest.fixture
def data(tmp_path):
    """Training files of all six tasks; their dev files are missing."""
    folder = write_glue(tmp_path / "glue", rows=40)
    rows = [line.split("\t") for line in (folder / "RTE" / "train.tsv").read_text().splitlines()[1:]]
    write_lines(folder / "QNLI" / "train.tsv", ["index\tquestion\tsentence\tlabel", *("\t".join(row) for row in rows)])
    pairs = [f"{int(label == 'entailment')}\t1\t2\t{first}\t{second}" for _, first, second, label in rows]
    write_lines(folder / "MRPC" / "train.tsv", ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *pairs])
    sentences = [f"{first}\t{int('cat' in first)}" for _, first, _, _ in rows]
    write_lines(folder / "SST-2" / "train.tsv", ["sentence\tlabel", *sentences])
    for dev in folder.glob("*/dev.tsv"):
        dev.unlink()
    return folder


@pytest.fixture
def run(data, encoder_folder, tmp_path, capsys):
    """Run the command; returns its tables, the results, and what it prints on stderr."""

    def run_command(*settings: str, **values: object):
        values = {"data": str(data), "model": (encoder_folder,), "device": "cpu", "seeds": 1} | values
        output = tmp_path / "results.jsonl"
        tables = probe(build_config(ProbeConfig, output=output, settings=settings or ("small", *SMALL), **values))
        return tables, read_results(output), capsys.readouterr().err

    return run_command


def row_indices(task) -> dict[str, list[str]]:
    return {split: [row.values["index"] for row in read_split_rows(task, split)] for split in task.splits}


def test_each_training_row_is_held_out_in_one_fold(data, tmp_path):
    task = get_glue_task("rte", str(data))
    folds, again = ([row_indices(fold) for fold in write_splits(task, tmp_path, None, 20, 8)] for _ in range(2))
    assert folds == again
    assert len(folds) == 5
    assert sorted(int(index) for fold in folds for index in fold["dev"]) == list(range(40))
    for fold in folds:
        assert sorted(map(int, fold["train"] + fold["dev"])) == list(range(40))


@pytest.mark.parametrize(("held_out", "evaluated"), [(5, 5), (2000, 8)])
def test_a_slice_holds_out_at_most_a_fifth(data, tmp_path, held_out, evaluated):
    [task] = write_splits(get_glue_task("qnli", str(data)), tmp_path, None, 20, held_out)
    rows = row_indices(task)
    assert (len(rows["train"]), len(rows["dev"])) == (20, evaluated)
    assert set(rows["train"]).isdisjoint(rows["dev"])


def test_the_standard_error_adds_folds_and_seeds():
    scores = np.array([[1.0, 3.0], [3.0, 5.0], [5.0, 7.0]])  # [folds, seeds]: means 2, 4, 6 and 3, 5
    estimate = estimate_mean(scores)
    assert estimate.mean == 4
    assert estimate.error**2 == pytest.approx(4 / 3 + 2 / 2)
    estimate = estimate_mean_of_tasks([scores, scores + 2])
    assert estimate.mean == 5
    assert estimate.error**2 == pytest.approx((4 / 3 + 1) / 2)
    assert estimate_mean(np.array([[0.5]])) == Estimate(0.5, None)


def result(model: str, task: str, fold: int, seed: int, value: float | None, parts: list[float] = ()) -> ProbeResult:
    key = {"model": model, "setting": "x", "task": task, "fold": fold, "seed": seed}
    name = "spearman" if task == "stsb" else "accuracy"
    unused = {"checkpoint": "", "tuning": {}, "rows": {}, "steps": 1, "seconds": 1.0}
    return ProbeResult(**key, **unused, metrics={name: value}, parts=[{name: part} for part in parts])


def test_differences_are_paired_and_incomplete_rows_have_no_mean():
    """Folds differ by 10 points, but the second model is better by 1 point in each of them."""
    results = [result("a", "rte", fold, 1, 0.5 + 0.1 * fold) for fold in range(2)]
    results += [result("b", "rte", fold, 1, 0.51 + 0.1 * fold) for fold in range(2)]
    results += [result("a", "qnli", 0, 1, 0.8, [0.7, 0.9]), result("b", "qnli", 0, 1, 0.81, [0.71, 0.91])]
    results += [result("c", "rte", 1, 1, 0.5), result("c", "qnli", 0, 1, 0.8, [0.8, 0.8])]
    table = str(compare_rows(results, "metric")).split("\n")[2:]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert lines[0][2:4] == ["qnli (accuracy)", "rte (accuracy)"]
    assert lines[2] == ["a", "x", "80.00 ± 10.00", "55.00 ± 5.00", "67.50 ± 5.59", "baseline"]
    assert lines[3] == ["b", "x", "81.00 ± 10.00", "56.00 ± 5.00", "68.50 ± 5.59", "+1.00 ± 0.00"]
    assert lines[4] == ["c", "x", "80.00 ± 0.00", "1 missing", "", ""]


def test_the_baseline_can_be_chosen():
    results = [result(model, "rte", 0, seed, value) for model, value in (("b", 0.5), ("a", 0.6)) for seed in (1, 2)]
    assert compare_rows(results, "metric").rows[1].difference.mean == pytest.approx(-0.1)  # b, after a
    for words in (("b",), ("b", "x")):
        assert compare_rows(results, "metric", words).rows[0].difference.mean == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="there are: a x; b x"):
        compare_rows(results, "metric", ("c",))


def test_undefined_correlations_count_as_zero():
    results = [result("a", "stsb", fold, 1, value) for fold, value in ((0, None), (1, 0.5))]
    assert as_array(collect_scores(results, "spearman")).tolist() == [[0.0], [0.5]]


def test_a_result_with_an_undefined_loss_is_missing():
    results = [result("a", "rte", fold, 1, 0.5) for fold in range(2)]
    results = [replace(each, metrics={"loss": loss}) for each, loss in zip(results, (None, 0.7), strict=True)]
    [row] = compare_rows(results, "loss").rows
    assert (row.tasks, row.missing, row.mean) == ({}, {"rte": 1}, None)


def test_losses_are_no_percentages():
    results = [replace(result("a", "rte", fold, 1, 0.5), metrics={"loss": 0.7}) for fold in range(2)]
    assert "0.7000 ± 0.0000" in str(compare_rows(results, "loss"))


def test_results_of_other_weights_in_the_same_place_are_refused(run, encoder_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    _, results, _ = run(model=(model,), tasks=("qnli",))
    change_weights(model)
    with pytest.raises(ConfigError, match="its file of weights has other content"):
        run(model=(model,), tasks=("qnli",))
    earlier = [replace(result, weights="") for result in results]  # of a version without checksums
    (tmp_path / "results.jsonl").write_text("".join(f"{dump_json(asdict(result))}\n" for result in earlier))
    assert run(model=(model,), tasks=("qnli",))[1] == earlier


@pytest.mark.parametrize("setting", ["best_epoch=true", "early_stopping=1"])
def test_the_epoch_is_not_chosen_by_the_held_out_rows(setting):
    with pytest.raises(ConfigError, match="small has best_epoch or early_stopping"):
        parse_settings(("small", setting))


def test_a_job_gives_the_metrics_of_electra_finetune(data, encoder_folder, tmp_path):
    fields = dict.fromkeys(("model_name", "setting", "weights"), "x")
    [tuning] = parse_settings(("x", *SMALL)).values()
    task = write_splits(get_glue_task("rte", str(data)), tmp_path, None, 20, 8)[0]
    common = {"model": encoder_folder, "task": task, "tuning": tuning, "hardware": HardwareConfig(device="cpu")}
    finetuned = Job(**common, seed=2, folder=tmp_path / "a" / "seed-2").run(quiet=True)
    probed = ProbeJob(**common, seed=2, folder=tmp_path / "b" / "job", fold=0, **fields).run()
    assert probed.metrics["accuracy"] == finetuned.metrics["dev"]["accuracy"]
    assert probed.steps == finetuned.steps
    assert 0 <= probed.metrics["auc"] <= 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["tokens"]


def test_a_batch_that_does_not_fit_into_memory_is_divided(run, monkeypatch):
    losses = FinetuningTask.losses

    def limited_losses(task, batch):
        if batch.num_rows > 8:
            raise torch.OutOfMemoryError
        return losses(task, batch)

    monkeypatch.setattr(FinetuningTask, "losses", limited_losses)
    tables, results, _ = run(tasks=("sst2",))
    assert tables.failed == {}
    assert len(results) == 1


def test_fewer_held_out_rows_than_parts_are_a_part_each(run):
    _, [result], _ = run(tasks=("sst2",), slice_held_out=3)
    scores = [part["accuracy"] for part in result.parts]
    assert len(scores) == result.rows["dev"] == 3
    assert np.mean(scores) == pytest.approx(result.metrics["accuracy"])


def test_results_are_kept_and_failing_jobs_are_reported(run, tmp_path):
    """The encoder has 32 positions: rows of 64 tokens are an error."""
    tables, results, _ = run("small", *SMALL, "long", *SMALL[:2], "length=64", tasks=("rte", "sst2"))
    assert tables.exit_code == 1
    assert {each.setting for each in results} == {"small"}
    assert [each.task for each in results].count("rte") == 5
    [sst2] = [each for each in results if each.task == "sst2"]
    assert len(sst2.parts) == 5
    assert sst2.rows == {"train": 32, "dev": 8}
    assert len(tables.failed) == 6
    assert "64" in tables.failed[f"{results[0].model} long rte 0 1"]
    file = tmp_path / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:30])  # a process was killed
    again, kept, errors = run(tasks=("rte", "sst2"))
    assert again.exit_code == 0
    assert errors.count("steps in") == 1  # the others are kept
    assert kept[:-1] == results[:-1]
    assert kept[-1].metrics == results[-1].metrics
    assert again.scores == tables.scores
    with pytest.raises(ConfigError, match="small rte 0 1: its tuning epochs was 1 and is now 2"):
        run("small", "epochs=2", tasks=("rte", "sst2"))


def test_without_models_the_tables_of_earlier_results_are_printed(run, tmp_path, capsys):
    tables, _, _ = run(tasks=("rte",))
    main(["probe", "--output", str(tmp_path / "results.jsonl"), "--score", "metric"])
    assert capsys.readouterr().out.strip() == str(tables.scores[0])
    assert "no results in" in error_message(f"probe --output {tmp_path}/other.jsonl", capsys)


@pytest.mark.parametrize("content", [b"precious\n", b"[1, 2]\n", b'{"a": 1}\n', b'{"model": 1}\n', b"\xff"])
def test_a_file_of_others_is_kept(run, tmp_path, content):
    (tmp_path / "results.jsonl").write_bytes(content)
    with pytest.raises(DataError, match="not a file of electra probe"):
        run(tasks=("rte",))
    assert (tmp_path / "results.jsonl").read_bytes() == content


BROKEN_GPU = """
import time

from electra.finetuning import probe

finetune, is_broken = probe.finetune, False


def finetune_or_break(job):
    global is_broken
    is_broken |= job.fold == 0
    if is_broken:
        raise RuntimeError("CUDA error")
    time.sleep(1)  # a broken process would take the other jobs meanwhile
    return finetune(job)


probe.finetune, probe.is_device_usable = finetune_or_break, lambda device: not is_broken
"""


def test_a_process_that_can_no_longer_use_the_gpu_is_replaced(data, encoder_folder, tmp_path):
    output = tmp_path / "results.jsonl"
    (tmp_path / "sitecustomize.py").write_text(BROKEN_GPU)  # Python imports it at its start, also in worker processes
    flags = ["--data", data, "--model", encoder_folder, "--output", output, "--device", "cpu", "--seeds", "1"]
    flags += ["--tasks", "rte", "--workers", "2", "--settings", "small", *SMALL]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "electra", "probe", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("failed: ") == 1
    assert sorted(each.fold for each in read_results(output)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "words", [["a=1"], ["a", "epoch=1"], ["a", "epochs=x"], ["a", "optimizer=sgd"], ["a", "epochs=1", "a"]]
)
def test_settings_are_checked(words):
    with pytest.raises(ConfigError):
        parse_settings(tuple(words))


@pytest.mark.slow
def test_six_tasks_two_models_two_settings_in_parallel_processes(run, encoder_folder, modern_folder):
    models = (encoder_folder, modern_folder)
    tables, results, _ = run("small", *SMALL, "muon", "optimizer=muon", *SMALL, model=models, workers=2)
    assert tables.exit_code == 0
    assert len(results) == 2 * 2 * 22
    assert str(tables).count("| muon ") == 2 * 2  # for metric and auc
