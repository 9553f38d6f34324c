"""Reports compare runs, and list those that cannot be compared with the reason."""

import json
import shutil
from dataclasses import asdict
from math import nan
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import small_run

from electra.cli import main
from electra.config import config_from_flat_values
from electra.data.shards import open_shards
from electra.errors import DataError
from electra.finetuning.glue import GlueRow, GlueTable
from electra.pretraining.command import plan_and_check_phases, pretrain
from electra.pretraining.config import PretrainConfig
from electra.pretraining.recipes import recipe_settings
from electra.reporting.config import ReportConfig
from electra.reporting.runs import (
    Evaluation,
    Progress,
    best_metric_values,
    describe_changes_from_recipe,
    flops_until,
    parse_evaluations,
    phase_end_steps,
)
from electra.reporting.tables import metric_against_cost, metric_panels, report, shortest_unique_names
from electra.runfolder import checkpoint_folders, read_json, write_stored
from electra.training.checkpoint import TrainState


@pytest.fixture(scope="session")
def finished_runs(shards, tmp_path_factory) -> list[Path]:
    """Two finished runs, the second without a discriminator; read only."""
    folder = tmp_path_factory.mktemp("finished")
    configs = [
        small_run(shards, folder / "a", evaluate_every=10),
        small_run(shards, folder / "b", objective="mlm", steps=10),
    ]
    for config in configs:
        pretrain(config)
    return [config.output for config in configs]


@pytest.fixture
def runs(finished_runs, tmp_path) -> list[Path]:
    """Copies of two finished runs."""
    return [Path(shutil.copytree(run, tmp_path / run.name)) for run in finished_runs]


def test_costs_and_metrics_equal_those_of_the_runs(runs, run_config):
    estimates = [
        pretrain(run_config("dry", dry_run=True, **settings)) for settings in ({}, {"objective": "mlm", "steps": 10})
    ]
    result = report(ReportConfig(runs=tuple(runs)))
    assert list(result.runs) == ["a", "b"]
    for run, estimate in zip(result.runs.values(), estimates, strict=True):
        assert (run.steps, run.tokens, run.parameters) == (estimate.steps, estimate.tokens, estimate.parameters)
        assert run.flops == estimate.flops
        last = json.loads(Path(run.folder, "metrics.jsonl").read_text().splitlines()[-1])
        assert run.final_metrics["mlm_loss"] == last["mlm_loss"]
    first, second = result.runs.values()
    assert [point.step for point in first.evaluations] == [10, 20]
    assert first.tokens_per_second == pytest.approx(first.tokens / first.minutes / 60)
    assert "unigram_rtd_auc" in first.final_metrics
    assert "unigram_rtd_auc" not in second.final_metrics
    assert result.skipped == {}


def test_the_time_of_an_evaluation_is_interpolated_between_training_metrics(run_config, shards):
    phases = plan_and_check_phases(run_config(steps=20, phases=("fraction=0.6", "length=24")), open_shards(shards))
    lines = [
        {"kind": "train", "step": 10, "seconds": 60.0},
        {"kind": "validation", "step": 15, "loss": 2.0},
        {"kind": "train", "step": 20, "seconds": 180.0},
    ]
    flops = 12 * phases[0].flops_per_step() + 3 * phases[1].flops_per_step()
    assert parse_evaluations(lines, phases, end_steps=[12.0, 20.0]) == [
        Evaluation(step=15, minutes=2.0, flops=flops, metrics={"loss": 2.0}, phase=1)
    ]


def test_the_best_is_the_lowest_loss_and_the_highest_accuracy():
    values = [(3.0, 0.1, 1.0), (1.0, 0.3, 2.0), (2.0, 0.2, 3.0)]
    evaluations = [
        Evaluation(step, 0.0, 0.0, {"mlm_loss": loss, "mlm_accuracy": accuracy, "generator_entropy": entropy}, phase=0)
        for step, (loss, accuracy, entropy) in enumerate(values)
    ]
    assert best_metric_values(evaluations) == {"mlm_loss": 1.0, "mlm_accuracy": 0.3}


def test_runs_have_the_shortest_names_that_differ():
    assert shortest_unique_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert shortest_unique_names([Path("one/x"), Path("two/x")]) == ["one/x", "two/x"]


def test_a_report_that_was_interrupted_can_be_repeated(runs, tmp_path, monkeypatch):
    config = ReportConfig(runs=tuple(runs), output=tmp_path / "report")
    with monkeypatch.context() as patch:
        patch.setattr("electra.reporting.tables.plot_runs", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            report(config)
    assert report(config).plots


def test_a_report_is_written_with_tables_and_plots(runs, tmp_path, capsys):
    main(["report", *map(str, runs), "--output", str(tmp_path / "report")])
    shown = capsys.readouterr().out
    assert shown.startswith("Cost (FLOPs of matrix products):\n\n| run | size | objective | parameters |")
    assert "| b   | tiny | mlm " in shown
    page = (tmp_path / "report/report.md").read_text()
    tables, written = shown.strip().rsplit("\n\n", 1)
    assert tables in page
    assert (
        written == f"written to {tmp_path}/report: report.md, report.json, loss.png, mlm_loss.png, unigram_rtd_auc.png"
    )
    for plot in ("loss.png", "mlm_loss.png", "unigram_rtd_auc.png"):
        assert (tmp_path / "report" / plot).exists()
        assert f"![]({plot})" in page
    assert not (tmp_path / "report/glue.png").exists()
    assert set(json.loads((tmp_path / "report/report.json").read_text())["runs"]) == {"a", "b"}


def write_table(
    folder: Path, model: Path, mean: float | None, tasks: tuple[str, ...] = ("rte", "cola", "wnli")
) -> Path:
    """Write a table like electra glue's."""
    folder.mkdir(parents=True)
    rows = [GlueRow(task, "accuracy", 50.0, nan, 1, 1.0, {}, {}, {}) for task in tasks]
    write_stored(folder / "table.json", asdict(GlueTable(str(model), str(folder), rows, mean, None, {})))
    return folder


def test_glue_scores_are_found_in_runs_or_given_for_them(runs, tmp_path):
    write_table(runs[0] / "glue", runs[0], 70.0)
    table = write_table(tmp_path / "tuned", tmp_path / "hf", 60.0, tasks=("rte",))
    config = ReportConfig(runs=tuple(runs), glue=(f"{runs[1]}={table}",), output=tmp_path / "report")
    result = report(config)
    assert [(run.glue.mean, run.glue.tasks) for run in result.runs.values()] == [
        (70.0, ["rte", "cola"]),
        (60.0, ["rte"]),
    ]
    assert result.plots == ["loss.png", "mlm_loss.png", "unigram_rtd_auc.png", "glue.png"]
    assert "GLUE means are over different tasks and not comparable: a: cola rte; b: rte" in str(result)


def test_a_glue_table_without_a_mean_has_no_score(runs, tmp_path):
    table = write_table(tmp_path / "tuned", runs[0], None, tasks=("wnli",))
    result = report(ReportConfig(runs=tuple(runs), glue=(str(table),)))
    assert [run.glue for run in result.runs.values()] == [None] * len(runs)
    assert "GLUE mean" not in str(result)


def test_a_glue_table_names_its_run(runs, tmp_path):
    newest = checkpoint_folders(runs[1])[-1]
    table = write_table(tmp_path / "tuned", newest, 61.5)
    result = report(ReportConfig(runs=tuple(runs), glue=(str(table),)))
    assert [run.glue and run.glue.mean for run in result.runs.values()] == [None, 61.5]
    other = write_table(tmp_path / "other", tmp_path / "hf", 60.0)
    with pytest.raises(DataError, match=r"not of one of the runs; name its run: --glue RUN=.*other"):
        report(ReportConfig(runs=tuple(runs), glue=(str(other),)))


def test_a_run_is_reported_without_an_unreadable_glue_table(runs, tmp_path, capsys):
    result = report(ReportConfig(runs=tuple(runs), glue=(f"{runs[0]}={tmp_path}",)))
    assert f"no GLUE score for {runs[0]}: there is no table.json in {tmp_path}" in capsys.readouterr().err
    assert result.skipped == {}
    assert [run.glue for run in result.runs.values()] == [None, None]


def test_a_folder_of_runs_is_not_a_run(runs):
    with pytest.raises(DataError, match=rf"not a run; name the runs in it: {runs[0].parent}/\*$"):
        report(ReportConfig(runs=(runs[0].parent,)))


def test_a_fine_tuning_is_not_a_run(runs, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "config.json").write_text(json.dumps({"settings": {}, "task": {}}))
    with pytest.raises(DataError, match="a fine-tuning, not a run of electra pretrain"):
        report(ReportConfig(runs=(tmp_path / "tuned",)))
    (tmp_path / "mine").mkdir()
    shutil.copytree(runs[0], tmp_path / "mine" / "seed-1")
    with pytest.raises(DataError, match="not a run; name the runs in it"):
        report(ReportConfig(runs=(tmp_path / "mine",)))


def test_changed_settings_are_those_that_differ_from_the_recipe(tmp_path):
    def changes(**settings) -> str:
        base = {name: settings[name] for name in ("recipe", "style") if name in settings}
        defaults = recipe_settings(**{"recipe": "fast", "size": "tiny"} | base)
        paths = {"size": "tiny", "data": tmp_path, "output": tmp_path}
        return describe_changes_from_recipe(config_from_flat_values(PretrainConfig, defaults | paths | settings))

    assert changes() == changes(steps=7, device="cpu") == ""
    assert changes(style="modern", generator="unigram") == "modern, unigram"
    assert changes(recipe="faithful", layers=6, sharing="none") == "faithful, sharing none, layers 6"
    assert changes(sinusoidal_positions=False, learning_rate=0.001) == "learning-rate 0.001, no-sinusoidal-positions"
    assert changes(phases=("fraction=0.9", "fraction=0.1,length=32")) == "phases fraction=0.9 fraction=0.1,length=32"


def test_best_metrics_are_those_of_the_last_stage(run_config):
    config = run_config(
        phases=("objective=mlm", "objective=frozen-rtd"), sharing="none", evaluate_every=5, learning_rate=1e-4
    )
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    first, second = run.evaluations[:2], run.evaluations[2:]
    assert [point.step for point in second] == [15, 20]
    assert run.best_metrics["loss"] == min(point.metrics["loss"] for point in second)
    assert run.best_metrics["loss"] > max(point.metrics["loss"] for point in first)  # masked tokens alone
    assert "phases objective=mlm objective=frozen-rtd" in run.changes


def test_best_metrics_are_those_of_the_last_phase(run_config):
    phases = ("mask-fraction=0.05", "mask-fraction=0.5")
    config = run_config(phases=phases, steps=40, evaluate_every=20, learning_rate=5e-3)
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    first, second = (point.metrics["loss"] for point in run.evaluations)
    assert run.best_metrics["loss"] == second > first
    values = [value for _, value in metric_against_cost(run, "loss", "flops")]
    assert values == [first, pytest.approx(nan, nan_ok=True), second]


def test_runs_evaluated_on_different_rows_are_noted(runs, run_config):
    config = run_config("few", evaluation_rows=32)
    pretrain(config)
    [note] = [note for note in report(ReportConfig(runs=(*runs, config.output))).notes if "different rows" in note]
    assert note.endswith("few: up to 32 rows of 16 tokens")
    assert "64 rows of 16 tokens" in note


def test_losses_of_different_vocabularies_are_noted(runs, run_config, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "other")
    record = read_json(copy / "config.json")
    tokenizer = record["data"]["tokenizer"]
    record["data"]["tokenizer"] = "f" * 64
    write_stored(copy / "config.json", record)
    [note] = [note for note in report(ReportConfig(runs=(*runs, copy))).notes if "vocabularies" in note]
    assert tokenizer[:8] in note
    assert "ffffffff" in note


def test_losses_with_different_terms_have_separate_panels(runs, run_config):
    config = run_config("c", objective="replace-mlm", generator="uniform", generator_width=None)
    pretrain(config)
    result = report(ReportConfig(runs=(runs[0], config.output)))
    assert "| replace mlm loss |" in str(result)
    assert "compare it only between runs with the same objective" in str(result)
    panels = metric_panels("loss", result.runs)
    assert [panel.xlabel for panel in panels] == 2 * ["FLOPs", "minutes of training"]
    assert {panel.ylabel: list(panel.lines) for panel in panels} == {
        "held-out loss, rtd": ["a"],
        "held-out loss, replace-mlm without a generator": ["c"],
    }
    assert {tuple(panel.lines) for panel in metric_panels("mlm_loss", result.runs)} == {("a", "c")}


def test_the_cost_of_a_run_is_the_sum_of_its_phases(run_config):
    stages = {"phases": ("fraction=0.25,objective=mlm", "objective=rtd,length=24"), "evaluate_every": 5}
    config = run_config("stages", **stages)
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    whole = pretrain(run_config("dry", dry_run=True, **stages))
    alone = pretrain(run_config("dry", dry_run=True, **stages | {"phases": ("objective=rtd,length=24",), "steps": 15}))
    assert (run.objective, run.parameters, run.tokens) == ("mlm, rtd", whole.parameters, whole.tokens)
    assert [point.step for point in run.evaluations] == [5, 10, 15, 20]
    assert run.evaluations[0].flops == pytest.approx(whole.flops - alone.flops)
    assert run.flops == pytest.approx(whole.flops)
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    result = report(ReportConfig(runs=(config.output,)))
    [run] = result.runs.values()
    assert (
        "stages is not finished: in phase 1 of 2; its cost is that of step 5, its metrics those of step 5"
        in result.notes
    )
    assert (run.steps, [point.step for point in run.evaluations]) == (5, [5])
    assert run.flops == pytest.approx(whole.flops - alone.flops)


def test_a_run_that_still_trains_is_reported_up_to_its_last_checkpoint(run_config, finished_runs):
    config = run_config(steps=30, evaluate_every=10, save_every=10, keep_checkpoints=9)
    pretrain(config)
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    result = report(ReportConfig(runs=(config.output, finished_runs[0])))
    [run, finished] = result.runs.values()
    assert run.unfinished == "67% of its budget is used"
    assert [each.step for each in run.evaluations] == [10, 20]
    assert (run.steps, run.flops) == (finished.steps, finished.flops)
    assert "run is not finished" in str(result)


def test_a_run_before_its_first_evaluation_is_an_error(run_config):
    config = run_config(steps=20, evaluate_every=20, save_every=10, keep_checkpoints=9)
    pretrain(config)
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    with pytest.raises(DataError, match="not evaluated yet at step 10"):
        report(ReportConfig(runs=(config.output,)))


def test_phases_of_minutes_end_at_the_step_of_their_time(run_config, shards):
    config = run_config(steps=None, minutes=2.0, phases=("fraction=0.75", "objective=replace-mlm"))
    phases = plan_and_check_phases(config, open_shards(shards))
    clock = [{"kind": "train", "step": 10 * minute, "seconds": 60.0 * minute} for minute in (1, 2)]
    ends = phase_end_steps(phases, Progress(TrainState(step=21, seconds=121.0, start_seconds=91.0), 1, None), clock)
    assert ends == pytest.approx([10 * 91 / 60, 21])
    assert flops_until(phases, [4, 6], 5) == 4 * phases[0].flops_per_step() + phases[1].flops_per_step()


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def with_cut_metrics(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])


def with_strange_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_text("[]\n")


def with_cut_config(run: Path) -> None:
    (run / "config.json").write_text("{")


def with_other_state(run: Path) -> None:
    (checkpoint_folders(run)[-1] / "state.json").write_text("{}")


def with_wrong_settings(run: Path) -> None:
    record = read_json(run / "config.json")
    record["pretraining"]["steps"] = "many"
    write_stored(run / "config.json", record)


def with_bytes(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_checkpoints, "has no checkpoint yet"),
        (with_cut_metrics, "metrics.jsonl has no evaluation at the last step, 20"),
        (
            with_strange_metrics,
            "metrics.jsonl is damaged or not in the expected format (Expected `object`, got `array`)",
        ),
        (with_bytes, "metrics.jsonl is damaged"),
        (with_cut_config, "config.json is damaged"),
        (with_other_state, "state.json is damaged"),
        (with_wrong_settings, "steps is 'many'"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_damaged_runs_are_skipped_with_a_reason(runs, damage, reason, capsys):
    damage(runs[0])
    main(["report", *map(str, runs)])
    shown = capsys.readouterr().out
    assert f"skipped: {runs[0]}: " in shown
    assert reason in shown
    assert "| b " in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["gone"], "no run can be reported; gone: no such folder"),
        (["."], "no run can be reported; .: not a run: it has no metrics.jsonl"),
        (["gone", "--glue", "nowhere"], "there is no table.json in nowhere"),
    ],
)
def test_nothing_to_report_is_an_error(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["report", *flags])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith(f"electra: {message}")


def test_the_cost_of_a_branch_includes_its_trunk(run_config):
    trunk = run_config("trunk", schedule="wsd", decay_fraction=0.0, steps=20)
    pretrain(trunk)
    branch = run_config("branch", schedule="decay", steps=10, branch_from=trunk.output)
    pretrain(branch)
    runs = report(ReportConfig(runs=(trunk.output, branch.output))).runs
    assert [run.steps for run in runs.values()] == [20, 30]
    assert runs["branch"].flops == 1.5 * runs["trunk"].flops


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(DataError, match="not empty and not an earlier report"):
        report(ReportConfig(runs=(tmp_path / "run",), output=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
