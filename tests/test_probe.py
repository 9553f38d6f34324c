"""benchmarks/probe.py: folds, standard errors, results that are kept, and failing jobs."""

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_glue, write_lines

from electra.errors import ConfigError
from electra.finetuning import jobs as jobs_module
from electra.finetuning.job import Job
from electra.finetuning.tasks import get_glue_task, read_split_rows

SMALL = ("epochs=1", "batch_size=16", "length=32", "learning_rate=3e-3")


@pytest.fixture
def probe(monkeypatch):
    """The script as a module, which worker processes can import, too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import probe

    return probe


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
def run(probe, data, encoder_folder, tmp_path, monkeypatch, capsys):
    """Run the script; returns its exit code, the results, and what it prints on the two streams."""

    def run_script(*words: object, setting: tuple[str, ...] = ("small", *SMALL)):
        output = tmp_path / "results.jsonl"
        flags = ["--data", data, "--output", output, "--device", "cpu", "--setting", *setting, *words]
        flags += [] if "--model" in words else ["--model", encoder_folder]
        monkeypatch.setattr(sys, "argv", ["probe", *map(str, flags)])
        code = probe.main()
        printed = capsys.readouterr()
        return code, probe.read_records(output), printed.out, printed.err

    return run_script


def row_indices(task) -> dict[str, list[str]]:
    return {split: [row.values["index"] for row in read_split_rows(task, split)] for split in task.splits}


def test_each_training_row_is_held_out_in_one_fold(probe, data, tmp_path):
    task = get_glue_task("rte", str(data))
    folds, again = ([row_indices(fold) for fold in probe.write_splits(task, tmp_path, None, 20, 8)] for _ in range(2))
    assert folds == again
    assert len(folds) == 5
    assert sorted(int(index) for fold in folds for index in fold["dev"]) == list(range(40))
    for fold in folds:
        assert sorted(map(int, fold["train"] + fold["dev"])) == list(range(40))


@pytest.mark.parametrize(("held_out", "evaluated"), [(5, 5), (2000, 8)])
def test_a_slice_holds_out_at_most_a_fifth(probe, data, tmp_path, held_out, evaluated):
    [task] = probe.write_splits(get_glue_task("qnli", str(data)), tmp_path, None, 20, held_out)
    rows = row_indices(task)
    assert (len(rows["train"]), len(rows["dev"])) == (20, evaluated)
    assert set(rows["train"]).isdisjoint(rows["dev"])


def test_the_standard_error_adds_folds_and_seeds(probe):
    scores = np.array([[1.0, 3.0], [3.0, 5.0], [5.0, 7.0]])  # [folds, seeds]: means 2, 4, 6 and 3, 5
    mean, error = probe.mean_and_error(scores)
    assert mean == 4
    assert error**2 == pytest.approx(4 / 3 + 2 / 2)
    mean, error = probe.mean_of_tasks([scores, scores + 2])
    assert mean == 5
    assert error**2 == pytest.approx((4 / 3 + 1) / 2)
    assert np.isnan(probe.mean_and_error(np.array([[0.5]]))[1])


def record(model: str, task: str, fold: int, seed: int, value: float, parts: list[float] = ()) -> dict:
    metrics = [{"accuracy": part} for part in parts]
    key = {"model": model, "setting": "x", "task": task, "fold": fold, "seed": seed}
    return key | {"metrics": {"accuracy": value}} | ({"parts": metrics} if parts else {})


def test_differences_are_paired_and_incomplete_rows_have_no_mean(probe):
    """Folds differ by 10 points, but the second model is better by 1 point in each of them."""
    records = [record("a", "rte", fold, 1, 0.5 + 0.1 * fold) for fold in range(2)]
    records += [record("b", "rte", fold, 1, 0.51 + 0.1 * fold) for fold in range(2)]
    records += [record("a", "qnli", 0, 1, 0.8, [0.7, 0.9]), record("b", "qnli", 0, 1, 0.81, [0.71, 0.91])]
    records += [record("c", "rte", 1, 1, 0.5), record("c", "qnli", 0, 1, 0.8, [0.8, 0.8])]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in probe.format_table(records, "metric").split("\n")
    ]
    assert lines[0][2:4] == ["qnli (accuracy)", "rte (accuracy)"]
    assert lines[2] == ["a", "x", "80.00 ± 10.00", "55.00 ± 5.00", "67.50 ± 5.59", "baseline"]
    assert lines[3] == ["b", "x", "81.00 ± 10.00", "56.00 ± 5.00", "68.50 ± 5.59", "+1.00 ± 0.00"]
    assert lines[4] == ["c", "x", "80.00 ± 0.00", "1 of 2 missing", "", ""]


def test_the_baseline_can_be_chosen(probe):
    records = [record(model, "rte", 0, seed, value) for model, value in (("b", 0.5), ("a", 0.6)) for seed in (1, 2)]
    assert "-10.00 ± 0.00" in probe.format_table(records, "metric").split("\n")[3]  # b, after a
    assert "+10.00 ± 0.00" in probe.format_table(records, "metric", ("b", "x")).split("\n")[2]


def test_constant_predictions_count_as_zero(probe):
    rows = [
        record("a", "stsb", fold, 1, 0.0) | {"metrics": {"spearman": value}} for fold, value in ((0, None), (1, 0.5))
    ]
    assert probe.as_array(probe.score_matrix(rows, "spearman")).tolist() == [[0.0], [0.5]]


def test_a_job_gives_the_metrics_of_electra_finetune(probe, data, encoder_folder, tmp_path):
    fields = dict.fromkeys(("model_name", "setting"), "x")
    [tuning] = probe.parse_settings([["x", *SMALL]]).values()
    task = probe.write_splits(get_glue_task("rte", str(data)), tmp_path, None, 20, 8)[0]
    common = {"model": encoder_folder, "task": task, "tuning": tuning, "hardware": probe.HardwareConfig(device="cpu")}
    result = Job(**common, seed=2, folder=tmp_path / "a" / "seed-2").run(quiet=True)
    probed = probe.ProbeJob(**common, seed=2, folder=tmp_path / "b" / "job", fold=0, **fields).run()
    assert probed["metrics"]["accuracy"] == result.metrics["dev"]["accuracy"]
    assert probed["steps"] == result.steps
    assert 0 <= probed["metrics"]["auc"] <= 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["tokens"]


def test_results_are_kept_and_failing_jobs_are_reported(run, probe, tmp_path):
    """RTE's encoder has 32 positions: rows of 64 tokens are an error."""
    flags = ("--tasks", "rte", "sst2", "--seeds", 1)
    code, records, table, errors = run(*flags, "--setting", "long", *SMALL[:2], "length=64")
    assert code == 1
    assert {record["setting"] for record in records} == {"small"}
    assert [record["task"] for record in records].count("rte") == 5
    [sst2] = [record for record in records if record["task"] == "sst2"]
    assert len(sst2["parts"]) == 5
    assert sst2["rows"] == {"train": 32, "dev": 8}
    assert errors.count("failed: ") == 6
    assert "64" in errors
    assert "small" in table
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]) + lines[-1][:30])  # a process was killed
    code, again, table_again, errors = run(*flags)
    assert (code, "failed" in errors) == (0, False)
    assert errors.count("steps in") == 1  # the others are kept
    assert again[:-1] == records[:-1]
    assert again[-1]["metrics"] == records[-1]["metrics"]
    assert table_again == table
    with pytest.raises(ConfigError, match="small rte 0 1 with tuning"):
        run(*flags, setting=("small", "epochs=2"))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_a_process_that_can_no_longer_use_the_gpu_is_replaced(run, probe, monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(jobs_module.multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(probe, "is_device_usable", lambda device: False)
    finetune = probe.finetune
    monkeypatch.setattr(
        probe, "finetune", lambda job: finetune(replace(job, model=Path("none")) if job.fold == 2 else job)
    )
    code, records, _, errors = run("--tasks", "rte", "--seeds", 1, "--workers", 2)
    assert code == 1
    assert sorted(record["fold"] for record in records) == [0, 1, 3, 4]
    assert errors.count("failed: ") == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "words", [["a=1"], ["a", "epochs"], ["a", "epoch=1"], ["a", "epochs=x"], ["a", "optimizer=sgd"]]
)
def test_settings_are_checked(probe, words):
    with pytest.raises(ConfigError):
        probe.parse_settings([words])


@pytest.mark.slow
def test_six_tasks_two_models_two_settings_in_parallel_processes(run, data, encoder_folder, modern_folder):
    models = ("--model", encoder_folder, modern_folder)
    code, records, table, _ = run(*models, "--setting", "muon", "optimizer=muon", *SMALL, "--seeds", 1, "--workers", 2)
    assert code == 0
    assert len(records) == 2 * 2 * 22
    assert all(json.dumps(record) for record in records)
    assert table.count("| muon ") == 2 * 2  # for metric and auc
