"""electra study: shared and resumed runs, measures, verdicts, figures."""

import csv
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import error_message
from kills import killed
from synthetic import write_glue

from electra.config import build_config
from electra.data.shards import open_shards
from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning.probe_results import Estimate
from electra.pretraining.config import CorruptConfig
from electra.pretraining.corrupt import write_corrupted_rows
from electra.runfolder import read_json, write_stored
from electra.studies import command as command_module
from electra.studies import measures as measures_module
from electra.studies import runs as runs_module
from electra.studies.command import study
from electra.studies.config import StudyConfig, StudyName
from electra.studies.measures import (
    ASSUMED_DEGREES,
    PRETRAINING_SD,
    MeasuredRun,
    estimate_probe_difference,
    pooled_variance,
)
from electra.studies.results import (
    check_study_folder,
    describe_orderings,
    judge,
    plot_study,
    student_quantile,
    summarize_study,
    write_study,
)
from electra.studies.runs import RunProcess, StudyRecord, StudyRun, estimate_study, plan_runs, train_on_gpus, train_runs
from electra.studies.studies import STUDIES, Study, StudySetting, find_study
from electra.training.logging import TrainResult

SMALL = ("size=tiny", "layers=1", "width=32", "heads=2", "feedforward=64", "embedding_width=16", "length=16")
SMALL += ("batch_size=8", "evaluation_rows=16", "save_every=2")
SIZES = ("compute", "sizes")  # studies that set the size themselves


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """One folder for all studies, which share their runs."""
    return tmp_path_factory.mktemp("studies") / "out"


@pytest.fixture
def study_config(shards, tmp_path):
    def build(name: str = "styles", **values) -> StudyConfig:
        small = [word for word in SMALL if name not in SIZES or word != "size=tiny"]
        settings = {"data": shards, "output": tmp_path / "out", "steps": 4, "pretraining": small, "device": "cpu"}
        return build_config(StudyConfig, name=name, **settings | values)

    return build


@pytest.fixture
def finished_styles(study_config, output):
    """The shared folder, in which the study `styles` is finished."""
    study(study_config("styles", output=output))
    return output


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(runs_module, "pretrain", lambda config: pytest.fail(f"trained {config.output.name}"))


def run_names(config: StudyConfig) -> list[str]:
    return [run.name for run in plan_runs(STUDIES[config.name], config)]


def test_the_tables_are_consistent():
    assert (*STUDIES, "compare") == get_args(StudyName)
    for name, table in STUDIES.items():
        labels = [setting.label for setting in table.settings]
        assert len(set(labels)) == len(labels), name
        assert {label for ordering in table.orderings for label in ordering} <= set(labels), name
        scores = {setting.label: setting.paper for setting in table.settings}
        for better, worse in table.orderings:  # as printed in the paper
            assert scores[better] is None or scores[worse] is None or scores[better] > scores[worse], (better, worse)


def test_studies_share_runs(study_config):
    joint, *_, bert = run_names(study_config("algorithms"))
    assert joint == "rtd_steps-4_seed-0"
    assert {joint, bert} < set(run_names(study_config("objectives")))
    assert joint in run_names(study_config("styles"))
    quarter, *others = run_names(study_config("generator-size", pretraining=("size=small",)))
    assert quarter == joint  # the default of small
    assert others[-1] == "rtd_generator-width-256_steps-4_seed-0"


def compared_runs(config: StudyConfig) -> list[StudyRun]:
    return plan_runs(find_study(config), config)


def test_runs_of_own_settings_are_named_by_what_differs(study_config):
    words = ("default", "decay", "weight-decay=0.3", "same", "weight_decay=0.1")
    runs = compared_runs(study_config("compare", settings=words))
    assert [run.setting.label for run in runs] == ["default", "decay", "same"]
    assert [run.name for run in runs] == [
        "rtd_steps-4_seed-0",  # that of the other studies
        "rtd_weight-decay-0.3_steps-4_seed-0",
        "rtd_steps-4_seed-0",  # the default of the recipe
    ]
    assert runs[1].config.optimizer.weight_decay == 0.3


def test_phases_of_one_objective_are_named_once(study_config):
    short = ("short", "phases=fraction=0.5,length=8", "phases=fraction=0.5")
    two_stage = ("two-stage", "phases=objective=mlm", "phases=objective=frozen-rtd")
    first, second = (run.name for run in compared_runs(study_config("compare", settings=(*short, *two_stage))))
    assert re.fullmatch("rtd_phases-[0-9a-f]{8}_steps-4_seed-0", first)
    assert second == "mlm+frozen-rtd_steps-4_seed-0"


def test_own_settings_may_depend_on_each_other(study_config):
    """Muon and 1.5e-3 are defaults of fast and small, but not of faithful and base."""
    words = ("a", "recipe=faithful", "b", "recipe=faithful", "optimizer=muon", "c", "size=base", "learning_rate=1.5e-3")
    first, second, third = compared_runs(study_config("compare", settings=words, pretraining=("size=small",)))
    assert (first.config.optimizer.name, second.config.optimizer.name) == ("adam", "muon")
    assert third.config.optimizer.learning_rate == 1.5e-3
    assert len({first.name, second.name, third.name}) == 3


def test_own_settings_may_be_paths_and_phases(study_config, tmp_path):
    long, longer = (f"phases=fraction=0.5,length={length}" for length in (32, 64))
    words = ("a", "phases=fraction=0.5", long, "b", "phases=fraction=0.5", longer)
    words += ("c", f"corrupted_rows={tmp_path / 'x' / 'rows'}", "d", f"corrupted_rows={tmp_path / 'y' / 'rows'}")
    runs = compared_runs(study_config("compare", settings=words))
    assert runs[0].config.phases == ("fraction=0.5", "fraction=0.5,length=32")
    assert len({run.folder for run in runs}) == 4
    assert {run.folder.parent.name for run in runs} == {"runs"}


def test_all_runs_may_have_phases_and_the_masking_of_bert(study_config):
    phases = ("phases=fraction=0.5,length=8", "phases=fraction=0.5")
    config = study_config("objectives", pretraining=(*SMALL, *phases, "mask_token_probability=0.8"))
    runs = plan_runs(STUDIES["objectives"], config)
    assert {run.config.phases for run in runs} == {("fraction=0.5,length=8", "fraction=0.5")}
    assert {run.settings()["mask_token_probability"] for run in runs} == {0.8}


def test_equal_settings_are_one_run(study_config, shards, monkeypatch):
    trained = []
    monkeypatch.setattr(runs_module, "pretrain", lambda config: trained.append(config.output.name))
    config = study_config("compare", settings=("a", "b"))
    runs = compared_runs(config)
    assert [error for _, error in train_runs(runs, open_shards(shards), config)] == [None]
    assert trained == ["rtd_steps-4_seed-0"]
    assert estimate_study(runs, open_shards(shards), 0).runs == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("compare", (), "needs --settings, and no other study"),
        ("styles", ("x",), "needs --settings, and no other study"),
        ("compare", ("weight_decay=0.1",), "write a name, then KEY=VALUE"),
        ("compare", ("x", "weight_decoy=0.1"), "did you mean weight_decay"),
        ("compare", ("x", "weight_decay=much"), "it must be a number"),
        ("compare", ("x", "weight_decay=0.1", "weight_decay=0.2"), "has weight_decay twice"),
        ("compare", ("x", "y", "seed=3"), "sets for all runs"),
        ("compare", ("x", "y", "steps=10"), "sets for all runs"),
    ],
)
def test_unusable_settings_are_errors(study_config, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        study(study_config(name, settings=settings))


def test_a_study_of_own_settings(study_config):
    result = study(study_config("compare", settings=("default", "more", "mask_fraction=0.3"), seeds=2))
    assert [each.label for each in result.settings] == ["default", "more"]
    assert "compared by the probe, which needs --glue" in result.verdict
    assert str(result).startswith("Which settings are best?\n")
    assert all((study_config().output / "compare" / file).exists() for file in result.files)


def test_budgets_and_seeds_of_runs(study_config):
    runs = plan_runs(STUDIES["compute"], study_config("compute", steps=None, minutes=3, seeds=2))
    assert len(runs) == 2 * 12
    assert [run.seed for run in runs[:13]] == [0] * 12 + [1]  # the first seed of every setting first
    assert {run.config.budget.minutes for run in runs} == {3, 1.5, 0.75}


def test_sizes_of_the_study_compute_have_equal_rows_unless_given(study_config):
    runs = plan_runs(STUDIES["compute"], study_config("compute", pretraining=()))
    assert {(each.config.loader.length, each.config.loader.batch_size) for each in runs} == {(128, 256)}
    assert runs[0].name == "rtd_steps-4_seed-0"  # small by its own recipe, as in the other studies
    runs = plan_runs(STUDIES["compute"], study_config("compute", pretraining=("recipe=faithful",)))
    assert {(each.config.loader.length, each.config.loader.batch_size) for each in runs} == {(128, 128)}
    assert runs[0].name == "rtd_steps-4_seed-0"
    runs = plan_runs(STUDIES["compute"], study_config("compute", pretraining=("length=16",)))
    assert {(each.config.loader.length, each.config.loader.batch_size) for each in runs} == {(16, 256)}


@pytest.mark.parametrize(
    ("metrics", "has_learnt"),
    [
        ({"unigram_rtd_auc": 0.9}, True),
        ({"unigram_rtd_auc": 0.9, "fixed_rtd_auc": 0.52}, True),  # of a generator that differs much from its own
        ({"unigram_rtd_auc": 0.52, "fixed_rtd_auc": 0.53}, False),
        ({"mlm_loss": 5.0, "unigram_mlm_loss": 7.2}, True),
        ({"mlm_loss": 7.1, "unigram_mlm_loss": 7.2}, False),
    ],
)
def test_an_encoder_has_learnt_if_it_is_better_than_guessing(metrics, has_learnt):
    record = SimpleNamespace(metrics=metrics, fixed_rtd={})
    assert MeasuredRun(None, record, None).has_learnt() == has_learnt


@pytest.mark.parametrize("name", STUDIES)
def test_a_tiny_study_of_each_kind(name, output, study_config):
    output = output.with_name("sizes") if name in SIZES else output
    result = study(study_config(name, output=output))
    assert [each.label for each in result.settings] == [setting.label for setting in STUDIES[name].settings]
    assert (result.missing, result.failed) == ([], {})
    assert {each.verdict for each in result.orderings} <= {"not measured"}  # losses of one seed have no standard error
    for each in result.settings:
        assert (each.fixed_rtd_loss is None) != (each.mlm_loss is None)
    rows = list(csv.DictReader((output / name / "table.csv").read_text().splitlines()))
    assert [row["setting"] for row in rows] == [each.label for each in result.settings]
    assert all((output / name / file).exists() for file in result.files)
    assert {"figure.png", "figure.svg"} < set(result.files)
    assert len(read_json(output / name / "study.json")["settings"]) == len(result.settings)


def test_a_finished_study_is_only_summarized(finished_styles, study_config, no_training):
    config = study_config("styles", output=finished_styles)
    study(replace(config, pretraining=(*SMALL, "keep_checkpoints=2")))  # does not change the weights
    assert study(replace(config, summarize=True)).missing == []
    with pytest.raises(ConfigError, match=r"--learning-rate was 0\.006 and is now 0\.001"):
        study(replace(config, pretraining=(*SMALL, "learning_rate=1e-3")))


def test_the_probe_compares_the_runs(finished_styles, tmp_path, study_config, no_training):
    """Runs of an earlier study are only measured."""
    glue = str(write_glue(tmp_path / "glue", rows=40))
    probe = {"glue": glue, "tasks": ("rte",), "finetuning": ("epochs=1", "length=16")}
    config = study_config("styles", output=finished_styles, **probe)
    result = study(config)
    assert all(0 <= each.probe.mean <= 1 for each in result.settings)
    assert result.settings[1].difference.error > 0.84  # √2 · 0.6: two runs of one seed each
    assert "assumed standard deviation of 0.6 points" in result.verdict
    assert len((finished_styles / "probe.jsonl").read_text().splitlines()) == 2 * 5
    assert study(config).settings == result.settings
    estimate = study(replace(config, dry_run=True, seeds=2))
    assert (estimate.runs, estimate.finished_runs, estimate.finetunings) == (4, 2, 4 * 5)
    assert estimate.tokens == 2 * 4 * 8 * 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"finetuning": ("nonsense=1",)}, "unknown setting 'nonsense'"), ({"tasks": ("rte", "cola")}, "CoLA/train.tsv")],
)
def test_a_probe_that_cannot_run_is_refused_before_the_training(tmp_path, study_config, no_training, settings, message):
    glue = write_glue(tmp_path / "glue", rows=40)
    shutil.rmtree(glue / "CoLA")
    with pytest.raises(ConfigError, match=message):
        study(study_config("styles", glue=str(glue), **settings))


def test_a_stopped_run_stops_the_study(study_config, monkeypatch, capsys):
    stopped = TrainResult("run", "checkpoint", 1, 1, 1.0, 0, {}, signal=15)
    monkeypatch.setattr(runs_module, "pretrain", lambda config: stopped)
    with pytest.raises(SystemExit) as stop:
        study(study_config())
    assert stop.value.code == 128 + 15
    assert "the same command continues" in capsys.readouterr().err


def test_a_diverged_run_does_not_stop_the_others(study_config, monkeypatch, shards):
    pretrain = runs_module.pretrain

    def diverge(config):
        if config.model.style == "modern":
            raise runs_module.TrainingError("training diverged")
        return pretrain(config)

    monkeypatch.setattr(runs_module, "pretrain", diverge)
    config = study_config()
    result = study(config)
    assert [each.label for each in result.settings] == ["classic"]
    assert result.failed == {"rtd_style-modern_steps-4_seed-0": "training diverged"}
    assert result.missing == list(result.failed)
    assert result.exit_code == 1


@pytest.mark.parametrize(("finished", "is_measured"), [(["unigram", "1/8"], True), (["unigram"], False)])
def test_rows_are_corrupted_by_the_first_finished_run_with_a_generator(
    study_config, monkeypatch, finished, is_measured
):
    config, pretrain = study_config("generator-size"), runs_module.pretrain
    names = {run.name for run in plan_runs(STUDIES["generator-size"], config) if run.setting.label in finished}

    def diverge(config):
        if config.output.name not in names:
            raise runs_module.TrainingError("training diverged")
        return pretrain(config)

    monkeypatch.setattr(runs_module, "pretrain", diverge)
    result = study(config)
    assert [each.label for each in result.settings] == finished
    assert [each.fixed_rtd_loss is not None for each in result.settings] == [is_measured] * len(finished)


def test_a_folder_of_others_is_refused(study_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(DataError, match="not the output of electra study"):
        study(study_config())
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(DataError, match="not the output of electra study"):
        study(study_config())


def test_a_folder_of_tables_of_others_is_refused(tmp_path):
    check_study_folder(tmp_path)
    (tmp_path / "study.md").write_text("precious")
    with pytest.raises(DataError, match="was not written by electra study"):
        check_study_folder(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["objective"], "must be one of objectives, generator-size"),
        (["objectives", "--steps", "2", "--minutes", "1"], "give one of"),
        (["objectives", "--steps", "2", "--dry-run", "--summarize"], "leave one out"),
        (
            ["objectives", "--steps", "2", "--pretraining", "objective=mlm"],
            "which electra study objectives sets itself",
        ),
        (["styles", "--steps", "2", "--pretraining", "seed=3"], "has seed, which electra study styles sets itself"),
        (["objectives", "--steps", "2", "--pretraining", "tiny"], "--pretraining has 'tiny'; write KEY=VALUE"),
        (["objectives", "--steps", "2", "--pretraining", "siz=tiny"], "did you mean size"),
        (["styles", "--steps", "2", "--pretraining", "size=small", "size=tiny"], "--pretraining has size twice"),
        (["sizes", "--steps", "2", "--pretraining", "size=tiny"], "has size, which electra study sizes sets itself"),
        (
            ["mask-fraction", "--steps", "2", "--pretraining", "phases=mask-fraction=0.3"],
            "has mask_fraction, which electra study mask-fraction sets itself",
        ),
        (["styles", "--steps", "2", "--finetuning", "epochs=1", "epochs=2"], "--finetuning has epochs twice"),
        (["objectives", "--steps", "2", "--corrupted-rows", "typo"], "--corrupted-rows is typo, which is no file"),
    ],
)
def test_wrong_flags(flags, message, shards, tmp_path, capsys):
    assert message in error_message(["study", *flags, "--data", str(shards), "--output", str(tmp_path / "out")], capsys)


def start_python(code: str, run: StudyRun, output: Path) -> RunProcess:
    """A process instead of electra pretrain; `code` may use the path of its start file."""
    path = output / f"{run.name}.start"
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os, time\npath = {str(path)!r}\n{code}"])
    return RunProcess(run, process, path)


def test_each_gpu_has_one_run_at_a_time(study_config, monkeypatch, tmp_path):
    started: list[tuple[str, str]] = []
    codes = {"rtd_steps-4_seed-0": "time.sleep(1)", "electra-15_steps-4_seed-0": "raise SystemExit(2)"}

    def start(run, gpu, output, log):
        started.append((run.name, gpu))
        return start_python(codes.get(run.name, ""), run, output)

    monkeypatch.setattr(runs_module, "start_run", start)
    runs = plan_runs(STUDIES["objectives"], study_config("objectives"))
    errors = {run.name: error for run, error in train_on_gpus(runs, ["0", "1"], tmp_path) if error}
    assert [name for name, _ in started] == [run.name for run in runs]
    assert [gpu for _, gpu in started] == ["0", "1", "1", "1", "1"]
    [(failed, error)] = errors.items()
    assert failed == "electra-15_steps-4_seed-0"
    assert error.startswith("electra pretrain ended with exit code 2; its messages are in ")


def test_the_next_run_is_started_early_and_waits_for_its_turn(study_config, monkeypatch, tmp_path):
    events = tmp_path / "events"
    events.touch()
    runs = plan_runs(STUDIES["objectives"], study_config("objectives"))[:4]
    names = [run.name for run in runs]
    after = dict(zip(names, [*names[1:], names[-1]], strict=True))  # a run ends when the one after it is ready

    def start(run, gpu, output, log):
        code = f"""
def write(event): open({str(events)!r}, "a").write(f"{{event}} {run.name}\\n")
def wait(condition):
    while not condition(): time.sleep(0.01)
write("ready")
wait(lambda: os.path.exists(path))
write("begin")
wait(lambda: "ready {after[run.name]}" in open({str(events)!r}).read())
write("end")
raise SystemExit({2 * int(run.name == names[1])})
"""
        return start_python(code, run, output)

    monkeypatch.setattr(runs_module, "start_run", start)
    log = tmp_path / "logs" / f"{names[1]}.txt"
    errors = [None, f"electra pretrain ended with exit code 2; its messages are in {log}", None, None]
    assert list(train_on_gpus(runs, ["0"], tmp_path, overlap=True)) == list(zip(runs, errors, strict=True))
    turns = [event for event in events.read_text().splitlines() if not event.startswith("ready")]
    assert turns == [f"{event} {name}" for name in names for event in ("begin", "end")]


def test_a_crashed_process_is_started_once_more(study_config, monkeypatch, tmp_path, capsys):
    """One that crashes again has failed; the others are trained as well."""
    started: list[str] = []
    runs = plan_runs(STUDIES["objectives"], study_config("objectives"))[:3]
    names = [run.name for run in runs]

    def start(run, gpu, output, log):
        started.append(run.name)
        crashes = run.name == names[0] or started == names[:1] * 2 + names[1:2]
        return start_python("raise SystemExit(1)" if crashes else "", run, output)

    monkeypatch.setattr(runs_module, "start_run", start)
    results = {run.name: error for run, error in train_on_gpus(runs, ["0"], tmp_path)}
    assert started == [names[0], names[0], names[1], names[1], names[2]]
    assert results == {names[0]: "electra pretrain ended with exit code 1", names[1]: None, names[2]: None}
    messages = [line for line in capsys.readouterr().err.splitlines() if "started once more" in line]
    assert [line.split(":")[0] for line in messages] == names[:2]


@pytest.mark.parametrize("code", [143, 130, -15])
def test_a_run_that_was_stopped_by_a_signal_is_not_started_again(study_config, monkeypatch, tmp_path, code):
    started: list[str] = []

    def start(run, gpu, output, log):
        started.append(run.name)
        end = f"raise SystemExit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
        return start_python(end, run, output)

    monkeypatch.setattr(runs_module, "start_run", start)
    [run] = plan_runs(STUDIES["objectives"], study_config("objectives"))[:1]
    assert list(train_on_gpus([run], ["0"], tmp_path)) == [(run, f"electra pretrain ended with exit code {code}")]
    assert started == [run.name]


def test_with_overlap_each_gpu_has_one_run_before_any_has_two(study_config, monkeypatch, tmp_path):
    started: list[str] = []

    def start(run, gpu, output, log):
        started.append(gpu)
        return start_python("", run, output)

    monkeypatch.setattr(runs_module, "start_run", start)
    runs = plan_runs(STUDIES["objectives"], study_config("objectives"))[:4]
    list(train_on_gpus(runs, ["0", "1"], tmp_path, overlap=True))
    assert started == ["0", "1", "0", "1"]


def test_runs_on_gpus_are_stopped_and_awaited(study_config, monkeypatch, tmp_path):
    processes: list[subprocess.Popen[bytes]] = []

    def start(run, gpu, output, log):
        each = start_python("time.sleep(60)", run, output)
        processes.append(each.process)
        return each

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs_module, "start_run", start)
    monkeypatch.setattr(runs_module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(train_on_gpus(plan_runs(STUDIES["styles"], study_config()), ["0"], tmp_path, overlap=True))
    assert [process.returncode for process in processes] == [-15, -15]


@pytest.mark.slow
def test_a_process_per_run_trains_as_the_study_itself(study_config, shards, tmp_path):
    """The path of GPUs, with electra pretrain on the CPU."""
    config = study_config()
    runs = plan_runs(STUDIES["styles"], config)
    config.output.mkdir()
    assert list(train_on_gpus(runs, [""], config.output, overlap=True)) == [(run, None) for run in runs]
    assert all(run.is_finished() for run in runs)


def test_each_run_is_measured_when_it_ends(study_config, monkeypatch):
    events, train, measure = [], runs_module.pretrain, command_module.measure_runs

    def pretrain(config):
        events.append(config.output.name)
        return train(config)

    def measure_runs(runs, config):
        events.append([run.name for run in runs])
        return measure(runs, config)

    monkeypatch.setattr(runs_module, "pretrain", pretrain)
    monkeypatch.setattr(command_module, "measure_runs", measure_runs)
    config = study_config()
    study(config)
    first, second = (run.name for run in plan_runs(STUDIES["styles"], config))
    assert events == [first, [first], second, [second], [first, second]]


def test_a_run_that_was_not_measured_before_a_break_is_measured_first(study_config, monkeypatch, tmp_path):
    def interrupt(runs, config):
        raise KeyboardInterrupt

    whole, config = study(study_config(output=tmp_path / "whole")), study_config()
    with monkeypatch.context() as patched:
        patched.setattr(command_module, "measure_runs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            study(config)
    assert [each.fixed_rtd_loss for each in study(config).settings] == [each.fixed_rtd_loss for each in whole.settings]


def test_a_killed_measuring_process_does_not_end_the_study(study_config, monkeypatch):
    def killed(runs, config):
        raise TrainingError("killed")

    monkeypatch.setattr(command_module, "measure_runs", killed)
    config = study_config()
    result = study(config)
    assert list(result.failed.values()) == ["killed", "killed"]
    assert result.missing == []
    assert all(run.is_finished() for run in plan_runs(STUDIES["styles"], config))


def test_measures_for_a_gpu_are_computed_in_a_process_of_their_own(study_config, monkeypatch, tmp_path):
    probe = {
        "glue": str(write_glue(tmp_path / "glue", rows=20)),
        "tasks": ("rte",),
        "finetuning": ("epochs=1", "length=16"),
    }
    expected = study(study_config(**probe))
    monkeypatch.setattr(measures_module, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(measures_module, "run_probe", lambda *arguments: pytest.fail("in this process"))
    shutil.rmtree(tmp_path / "out" / "measures")
    (tmp_path / "out" / "probe.jsonl").unlink()
    assert study(study_config(**probe)).settings == expected.settings


def test_the_folders_of_measured_runs_may_be_deleted(study_config, tmp_path):
    glue = str(write_glue(tmp_path / "glue", rows=40))
    probe = {"glue": glue, "tasks": ("rte",), "finetuning": ("epochs=1", "length=16")}
    config = study_config(**probe)
    before = study(config)
    shutil.rmtree(config.output / "runs")
    after = study(config)
    assert (after.settings, after.failed, after.missing) == (before.settings, {}, [])
    assert not (config.output / "runs").exists()  # nothing was trained
    (config.output / "corrupted.safetensors").rename(tmp_path / "rows")
    assert study(study_config(**probe, data=None, summarize=True)).settings == before.settings
    (tmp_path / "rows").rename(config.output / "corrupted.safetensors")
    with pytest.raises(ConfigError, match=r"--learning-rate was 0\.006 and is now 0\.001"):
        study(study_config(**probe, pretraining=(*SMALL, "learning_rate=1e-3")))
    more = study(study_config(**probe, finetuning_seeds=2))
    assert len(more.failed) == 2
    assert all("deleted; 5 of 10 fine-tuning runs of the probe are finished" in error for error in more.failed.values())
    with pytest.raises(ConfigError, match="--epochs was 1 and is now 2; use the same --finetuning"):
        study(study_config(**probe | {"finetuning": ("epochs=2", "length=16")}, seeds=2))
    with pytest.raises(ConfigError, match="which do not compare; use another --probe-rows"):
        study(study_config(**probe, seeds=2, probe_rows=20))
    shutil.rmtree(config.output / "measures")
    with pytest.raises(DataError, match=r"has results of .*, but the folder of this run and its record in measures"):
        study(config)
    assert not any((config.output / "runs").glob("rtd_*seed-0"))  # refused before the training


def test_metrics_on_other_rows_are_not_compared(study_config, tmp_path):
    config = study_config()
    assert all(each.fixed_rtd_loss is not None for each in study(config).settings)
    shutil.rmtree(config.output / "runs" / "rtd_style-modern_steps-4_seed-0")
    other = tmp_path / "other.safetensors"
    rows = {"model": config.output / "runs" / "rtd_steps-4_seed-0", "data": config.data, "device": "cpu"}
    write_corrupted_rows(build_config(CorruptConfig, **rows, output=other, rows=8))
    classic, modern = study(replace(config, corrupted_rows=other)).settings
    assert classic.fixed_rtd_loss is not None
    assert modern.fixed_rtd_loss is None


def test_records_of_versions_with_fewer_or_more_settings_are_used(study_config, no_training):
    config = study_config()
    [first, *_] = plan_runs(STUDIES["styles"], config)
    settings = first.settings() | {"removed": 3}
    del settings["temperature"]  # its default, 1, is what the run has
    del settings["phases"]  # an empty tuple
    source = {"checkpoint": "step-4", "device": "cpu", "commit": "", "evaluation_rows": 16}
    record = StudyRecord(settings, **source, steps=4, tokens=1, minutes=1.0, flops=1.0, metrics={"loss": None})
    first.record_file.parent.mkdir(parents=True)
    write_stored(first.record_file, asdict(record))
    assert first.read_record() == record
    other = study_config(pretraining=(*SMALL, "temperature=2"))
    with pytest.raises(ConfigError, match=r"--temperature was 1\.0 and is now 2\.0"):
        plan_runs(STUDIES["styles"], other)[0].read_record()


def test_a_run_that_was_trained_again_is_measured_again(study_config, monkeypatch):
    config = study_config()
    study(config)
    [first, *_] = plan_runs(STUDIES["styles"], config)
    record = first.read_record()
    [checkpoint] = (first.folder / "checkpoints").iterdir()
    checkpoint.rename(checkpoint.with_name("step-000000005"))
    assert record is not None
    assert first.read_record() is None
    (config.output / "corrupted.safetensors").unlink()
    monkeypatch.setattr(measures_module, "find_corrupted_rows", lambda runs, config: None)
    study(config)
    assert first.read_record() == replace(record, checkpoint="step-000000005", corrupted_rows=None, fixed_rtd={})


@pytest.mark.slow
def test_a_killed_study_continues(study_config, tmp_path):
    """Killed at several moments, it ends with the measures of an unbroken one."""
    names = {"name": "styles", "seeds": 2, "steps": 60}
    whole = study(study_config(output=tmp_path / "whole", **names))
    config = study_config(**names)
    kills = sum(killed(study, config, after=seconds) for seconds in (1.0, 2.0, 3.0))
    assert kills
    result = study(config)
    for ours, theirs in zip(result.settings, whole.settings, strict=True):
        assert ours.runs == theirs.runs
        assert ours.fixed_rtd_loss == theirs.fixed_rtd_loss
    assert result.orderings == whole.orderings


def test_the_documentation_shows_the_measured_studies(tmp_path, no_training):
    """What was measured is published without the folders of its runs, and summarized without shards."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "benchmarks" / "study", tmp_path / "out")
    settings = {"name": "objectives", "minutes": 3, "seeds": 2, "summarize": True}
    result = study(build_config(StudyConfig, output=tmp_path / "out", **settings))
    assert len(result.settings) == len(STUDIES["objectives"].settings)
    table, verdict = str(replace(result, files=[])).split("\n\n")[1:3]
    page = (root / "docs" / "studies.md").read_text()
    assert table in page
    assert verdict in page


# Verdicts.


def measured(setting: StudySetting, seed: int, score: float | None = None, loss: float | None = None) -> MeasuredRun:
    run = SimpleNamespace(setting=setting, seed=seed, name=f"{setting.label}-{seed}")
    fixed_rtd = {} if loss is None else {"fixed_rtd_loss": loss, "fixed_rtd_auc": 0.9}
    costs = {"steps": 1, "tokens": 1, "minutes": 1.0, "flops": 1e9}
    source = {"checkpoint": "step-1", "device": "cpu", "commit": "", "evaluation_rows": 16}
    metrics = {} if loss is None else {"unigram_rtd_auc": 0.9}
    record = StudyRecord(settings={}, **source, **costs, metrics=metrics, fixed_rtd=fixed_rtd)
    scores = None if score is None else {"rte": np.array([[score - 0.1], [score + 0.1]])}
    return MeasuredRun(run, record, scores)


A, B = StudySetting("a", {}, 85.0), StudySetting("b", {"objective": "mlm"}, 82.0)
STUDY = Study("Which?", "Table 0", [A, B], [("a", "b")])


def test_seeds_and_folds_add_to_the_error_of_a_difference():
    ours, other = {"rte": np.array([[0.7], [0.9]])}, {"rte": np.array([[0.6], [0.7]])}
    difference = estimate_probe_difference([ours], [other], variance=0.01**2)
    assert difference.mean == pytest.approx(0.15)
    assert difference.error**2 == pytest.approx(0.05**2 + 2 * 0.01**2)  # differences of folds: 0.1 and 0.2


def test_all_runs_of_two_settings_count_in_their_difference():
    ours, others = [{"rte": np.array([[score], [score]])} for score in (0.7, 0.9)], [{"rte": np.array([[0.6], [0.6]])}]
    difference = estimate_probe_difference(ours, others, variance=0.02**2)
    assert difference.mean == pytest.approx(0.2)
    assert difference.error**2 == pytest.approx(0.02**2 / 2 + 0.02**2)


def test_the_error_of_folds_is_that_of_the_mean_over_runs():
    """What folds have in common stays, noise of single fine-tunings averages out."""
    ours, others = (
        [{"rte": np.array([[0.7 + noise], [0.8 - noise]])} for noise in (0.1, -0.1)],
        [{"rte": np.ones((2, 1))}],
    )
    assert estimate_probe_difference(ours, others, variance=0.0).error == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("deviation", "num_seeds", "expected"),
    [(PRETRAINING_SD, 1, 0.03), (PRETRAINING_SD, 2, 0.03), (0.0085, 1, 0.12), (0.0085, 2, 0.09)],
)
def test_how_often_equal_settings_are_judged_to_differ(deviation, num_seeds, expected):
    """Two settings whose runs differ between seeds, as assumed and by more, and between folds."""
    random, wrong, studies = np.random.default_rng(0), 0, 500
    for _ in range(studies):
        seeds = random.normal(0.7, deviation, (2, num_seeds))
        folds = random.normal(0, 0.01, (2, num_seeds, 6, 5, 1))  # [settings, seeds, tasks, folds, fine-tuning seeds]
        runs = [[dict(enumerate(seeds[i, j] + folds[i, j])) for j in range(num_seeds)] for i in range(2)]
        means = [[float(np.mean(list(run.values()))) for run in setting] for setting in runs]
        variance = pooled_variance(means, PRETRAINING_SD**2, ASSUMED_DEGREES)
        difference = estimate_probe_difference(*runs, variance)
        degrees = ASSUMED_DEGREES + 2 * (num_seeds - 1)
        wrong += judge(difference, True, student_quantile(degrees)) != "within noise"
    assert wrong / studies == pytest.approx(expected, abs=0.03)


def test_the_variance_between_seeds_is_pooled_over_settings():
    assert pooled_variance([[1.0, 3.0], [5.0, 5.0], []]) == pytest.approx((2 + 0) / 2)
    assert pooled_variance([[1.0], [2.0]]) is None


def test_an_assumed_variance_counts_with_its_degrees_of_freedom():
    assert pooled_variance([[1.0, 3.0], [5.0]], assumed=0.5, assumed_degrees=3) == pytest.approx((2 + 3 * 0.5) / 4)
    assert pooled_variance([[1.0], [2.0]], assumed=0.5, assumed_degrees=3) == pytest.approx(0.5)


def test_a_difference_counts_if_it_exceeds_its_error_by_far():
    assert judge(Estimate(0.21, 0.1), has_learnt=True, standard_errors=2) == "holds"
    assert judge(Estimate(-0.21, 0.1), has_learnt=True, standard_errors=2) == "reversed"
    assert judge(Estimate(-0.21, 0.1), has_learnt=True, standard_errors=2.2) == "within noise"
    for unknown in (Estimate(9.0, None), Estimate(math.nan, math.nan), Estimate(9.0, math.nan), None):
        assert judge(unknown, has_learnt=True, standard_errors=2) == "not measured"


def test_few_degrees_of_freedom_need_more_standard_errors():
    stats = pytest.importorskip("scipy.stats")
    for degrees in range(10, 100):
        exact = stats.t.ppf(0.975, degrees)
        assert exact - 0.005 < student_quantile(degrees) < exact + 0.1


def test_encoders_that_learnt_nothing_are_not_judged():
    """A discriminator that guesses, and a masked language model with the loss of token frequencies."""
    guessing = measured(A, 0, 0.6, loss=0.4)
    guessing.record.metrics["unigram_rtd_auc"] = guessing.record.fixed_rtd["fixed_rtd_auc"] = 0.52
    learnt, plateau = ({"mlm_loss": loss, "unigram_mlm_loss": 7.0} for loss in (5.0, 6.9))
    for ours, metrics, verdict in (
        (measured(A, 0, 0.6, loss=0.3), learnt, "holds"),
        (measured(A, 0, 0.6, loss=0.3), plateau, "not learnt"),
        (guessing, learnt, "not learnt"),
    ):
        bert = measured(B, 0, 0.5)
        bert.record.metrics.update(metrics)
        result = summarize_study("x", STUDY, [ours, bert], [], {})
        assert result.orderings[0].verdict == verdict
    assert "Not judged, because an encoder has learnt little" in result.verdict


@pytest.mark.parametrize(("score", "verdict"), [(0.5, "holds"), (0.585, "within noise"), (0.7, "reversed")])
def test_orderings_are_judged_by_the_probe(score, verdict):
    """One seed each: the error of the difference is √2 · 0.6 points, because both have the same folds."""
    result = summarize_study("x", STUDY, [measured(A, 0, 0.6), measured(B, 0, score)], [], {})
    [ordering] = result.orderings
    assert ordering.verdict == verdict
    assert ordering.difference.mean == pytest.approx(60 - 100 * score)
    assert ordering.difference.error == pytest.approx(0.6 * 2**0.5)
    assert ordering.describe().endswith("paper: 85.0 and 82.0)")
    assert result.settings[1].difference.mean == pytest.approx(100 * score - 60)


def test_without_the_probe_losses_are_listed_and_not_judged():
    """A loss on corrupted rows depends on the share of replaced tokens that a discriminator was trained with."""
    runs = [measured(setting, seed, loss=loss) for setting, loss in ((A, 0.2), (B, 0.3)) for seed in (0, 1)]
    result = summarize_study("x", STUDY, runs, [], {})
    assert result.orderings[0].verdict == "not measured"
    assert [setting.fixed_rtd_loss for setting in result.settings] == pytest.approx([0.2, 0.3])
    assert "compared by the probe, which needs --glue" in result.verdict


def test_the_paragraph_counts_the_verdicts():
    results = [
        summarize_study("x", STUDY, [measured(A, 0, 0.6), measured(B, 0, score)], [], {}) for score in (0.5, 0.7)
    ]
    text = describe_orderings([result.orderings[0] for result in results], 2.0)
    assert "2 orderings, by the probe: confirmed 1, reversed 1, within noise 0" in text
    assert "Hold here: a above b (+10.00 ± 0.85; paper: 85.0 and 82.0)." in text
    assert "Reversed here: a above b (-10.00 ± 0.85; paper: 85.0 and 82.0)." in text


def test_without_an_ordering_in_the_paper_settings_are_compared_with_the_first():
    result = summarize_study("x", replace(STUDY, orderings=[]), [measured(A, 0, 0.6), measured(B, 0, 0.7)], [], {})
    assert "Better than a: b (+10.00 ± 0.85)." in result.verdict


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("name", ["objectives", "compute"])
def test_the_figure_has_our_points_and_the_papers(name, suffix, tmp_path, real_plots):
    pytest.importorskip("matplotlib")
    runs = [measured(setting, 0, 0.5) for setting in STUDIES[name].settings]
    result = summarize_study(name, STUDIES[name], runs, [], {})
    path = tmp_path / f"figure.{suffix}"
    assert plot_study(path, STUDIES[name], result)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_study_without_values_to_plot_has_a_table_and_no_figure(tmp_path, real_plots):
    """Encoders without a discriminator, no probe, and nothing in the paper."""
    own = Study("Which?", "", [StudySetting("a", {}), StudySetting("b", {"mask_fraction": 0.2})])
    result = summarize_study("compare", own, [measured(setting, 0) for setting in own.settings], [], {})
    result = write_study(result, own, tmp_path / "compare")
    assert result.files == ["study.md", "table.csv", "study.json"]
    assert sorted(path.name for path in (tmp_path / "compare").iterdir()) == sorted(result.files)


def test_metrics_that_are_not_numbers_are_stored(study_config, monkeypatch):
    config = study_config()
    study(config)
    [first, *_] = plan_runs(STUDIES["styles"], config)
    record = replace(first.read_record(), fixed_rtd={"fixed_rtd_loss": math.nan, "fixed_rtd_auc": 0.6})
    write_stored(first.record_file, asdict(record))
    assert math.isnan(study(config).settings[0].fixed_rtd_loss)


def test_runs_on_different_devices_are_mentioned():
    runs = [measured(A, 0, 0.6), measured(B, 0, 0.5)]
    assert "devices" not in summarize_study("x", STUDY, runs, [], {}).verdict
    other = replace(runs[1], record=replace(runs[1].record, device="NVIDIA H200", evaluation_rows=32))
    verdict = summarize_study("x", STUDY, [runs[0], other], [], {}).verdict
    assert "on different devices (NVIDIA H200, cpu), where equal minutes are not equal compute" in verdict
    assert "MLM losses are of different numbers of held-out rows" in verdict


def test_runs_with_a_probe_are_judged_without_glue():
    """Another study with the same runs may have computed it."""
    runs = [measured(A, 0, 0.6, loss=0.2), measured(B, 0, loss=0.3)]
    assert summarize_study("x", STUDY, runs, [], {}).orderings[0].verdict == "not measured"
    runs[1] = measured(B, 0, 0.5, loss=0.3)
    assert summarize_study("x", STUDY, runs, [], {}).orderings[0].verdict == "holds"
