"""Reports over runs: the numbers are the runs' own, and what cannot be reported is named."""

import json
import shutil
from math import nan
from pathlib import Path

import pytest

from electra.cli import main
from electra.config import construct
from electra.data.shards import open_shards
from electra.errors import DataError
from electra.pretraining.command import plan, pretrain
from electra.pretraining.config import PretrainConfig, recipe_settings
from electra.report.overview import ReportConfig, report, short_names
from electra.report.plots import curve, panels
from electra.report.runs import Point, best_of, departures_of, ends_of, flops_of, points_of, step_flops
from electra.training.checkpoint import checkpoint_folders
from electra.training.trainer import TrainState


@pytest.fixture
def runs(run_config) -> list[Path]:
    """Two finished runs, the second without a discriminator."""
    configs = [run_config("a", evaluate_every=10), run_config("b", objective="mlm", steps=10)]
    for config in configs:
        pretrain(config)
    return [config.output for config in configs]


def test_costs_and_measures_are_the_runs_own(runs, run_config):
    estimates = [
        pretrain(run_config("dry", dry_run=True, **departures))
        for departures in ({}, {"objective": "mlm", "steps": 10})
    ]
    result = report(ReportConfig(runs=tuple(runs)))
    assert list(result.runs) == ["a", "b"]
    for run, estimate in zip(result.runs.values(), estimates, strict=True):
        assert (run.steps, run.tokens, run.parameters) == (estimate.steps, estimate.tokens, estimate.parameters)
        assert run.flops == estimate.flops
        last = json.loads(Path(run.folder, "metrics.jsonl").read_text().splitlines()[-1])
        assert run.final["mlm_loss"] == last["mlm_loss"]
    first, second = result.runs.values()
    assert [point.step for point in first.points] == [10, 20]
    assert first.tokens_per_second == pytest.approx(first.tokens / first.minutes / 60)
    assert "unigram_rtd_auc" in first.final
    assert "unigram_rtd_auc" not in second.final
    assert result.left_out == {}


def test_minutes_of_a_measure_lie_between_the_lines_around_it():
    lines = [
        {"kind": "train", "step": 10, "seconds": 60.0},
        {"kind": "validation", "step": 15, "loss": 2.0},
        {"kind": "train", "step": 20, "seconds": 180.0},
    ]
    assert points_of(lines, lambda step: 7.0 * step, ends=[12.0, 20.0]) == [
        Point(step=15, minutes=2.0, flops=105.0, measures={"loss": 2.0}, phase=1)
    ]


def test_the_best_is_the_lowest_loss_and_the_highest_accuracy():
    numbers = [(3.0, 0.1, 1.0), (1.0, 0.3, 2.0), (2.0, 0.2, 3.0)]
    points = [
        Point(step, 0.0, 0.0, {"mlm_loss": loss, "mlm_accuracy": accuracy, "generator_entropy": entropy})
        for step, (loss, accuracy, entropy) in enumerate(numbers)
    ]
    assert best_of(points) == {"mlm_loss": 1.0, "mlm_accuracy": 0.3}


def test_names_are_as_short_as_they_can_be():
    assert short_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert short_names([Path("one/x"), Path("two/x")]) == ["one/x", "two/x"]


def test_pages_tables_and_plots_are_written(runs, tmp_path, capsys):
    main(["report", *map(str, runs), "--output", str(tmp_path / "report")])
    shown = capsys.readouterr().out
    assert shown.startswith("What it cost, matrix products only:\n\n| run | size | objective | parameters |")
    assert "| b   | tiny | mlm " in shown
    page = (tmp_path / "report/report.md").read_text()
    tables, written = shown.strip().rsplit("\n\n", 1)
    assert tables in page
    assert (
        written == f"written to {tmp_path}/report: report.md, report.json, loss.png, mlm_loss.png, unigram_rtd_auc.png"
    )
    for plot in ("loss.png", "mlm_loss.png", "unigram_rtd_auc.png"):
        assert (tmp_path / "report" / plot).read_bytes().startswith(b"\x89PNG")
        assert f"![]({plot})" in page
    assert not (tmp_path / "report/score.png").exists()
    assert set(json.loads((tmp_path / "report/report.json").read_text())["runs"]) == {"a", "b"}


def write_table(
    folder: Path, model: Path, mean: float | None, tasks: tuple[str, ...] = ("rte", "cola", "wnli")
) -> Path:
    """A table like those of electra glue."""
    folder.mkdir(parents=True)
    table = {"model": str(model), "mean": mean, "lines": [{"task": task} for task in tasks]}
    (folder / "table.json").write_text(json.dumps(table))
    return folder


def test_scores_are_found_in_runs_or_given_for_them(runs, tmp_path):
    write_table(runs[0] / "glue", runs[0], 70.0)
    given = write_table(tmp_path / "tuned", tmp_path / "hf", 60.0, tasks=("rte",))
    config = ReportConfig(runs=tuple(runs), glue=(f"{runs[1]}={given}",), output=tmp_path / "report")
    result = report(config)
    assert [(run.glue.mean, run.glue.tasks) for run in result.runs.values()] == [
        (70.0, ["rte", "cola"]),
        (60.0, ["rte"]),
    ]
    assert result.plots == ["loss.png", "mlm_loss.png", "unigram_rtd_auc.png", "score.png"]
    assert "GLUE means are over different tasks and do not compare: a: cola rte; b: rte" in str(result)


def test_a_table_without_a_mean_is_no_score(runs, tmp_path):
    given = write_table(tmp_path / "tuned", runs[0], None, tasks=("wnli",))
    result = report(ReportConfig(runs=tuple(runs), glue=(str(given),)))
    assert [run.glue for run in result.runs.values()] == [None] * len(runs)
    assert "GLUE mean" not in str(result)


def test_a_table_names_the_run_it_is_of(runs, tmp_path):
    newest = checkpoint_folders(runs[1])[-1]
    given = write_table(tmp_path / "tuned", newest, 61.5)
    result = report(ReportConfig(runs=tuple(runs), glue=(str(given),)))
    assert [run.glue and run.glue.mean for run in result.runs.values()] == [None, 61.5]
    other = write_table(tmp_path / "other", tmp_path / "hf", 60.0)
    with pytest.raises(DataError, match=r"none of the runs; say whose it is: --glue RUN=.*other"):
        report(ReportConfig(runs=tuple(runs), glue=(str(other),)))


def test_a_run_stays_where_its_table_cannot_be_read(runs, tmp_path, capsys):
    result = report(ReportConfig(runs=tuple(runs), glue=(f"{runs[0]}={tmp_path}",)))
    assert capsys.readouterr().err == (
        f"no score for {runs[0]}: there is no table.json in {tmp_path}; name a folder that electra glue wrote\n"
    )
    assert result.left_out == {}
    assert [run.glue for run in result.runs.values()] == [None, None]


def test_a_folder_of_runs_is_no_run_and_they_are_pointed_to(runs, capsys):
    with pytest.raises(DataError, match=rf"no run: name the runs inside: {runs[0].parent}/\*$"):
        report(ReportConfig(runs=(runs[0].parent,)))


def test_a_fine_tuning_is_no_run_and_runs_called_as_seeds_are_none(runs, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "config.json").write_text(json.dumps({"settings": {}, "task": {}}))
    with pytest.raises(DataError, match="a fine-tuning, and no run of electra pretrain"):
        report(ReportConfig(runs=(tmp_path / "tuned",)))
    (tmp_path / "mine").mkdir()
    shutil.copytree(runs[0], tmp_path / "mine" / "seed-1")
    with pytest.raises(DataError, match="no run: name the runs inside"):
        report(ReportConfig(runs=(tmp_path / "mine",)))


def test_departures_are_from_the_recipe_at_the_size(tmp_path):
    def told(**settings) -> str:
        chosen = {name: settings[name] for name in ("recipe", "style") if name in settings}
        usual = recipe_settings(**{"recipe": "fast", "size": "tiny"} | chosen)
        places = {"size": "tiny", "data": tmp_path, "output": tmp_path}
        return departures_of(construct(PretrainConfig, usual | places | settings))

    assert told() == told(steps=7, device="cpu") == ""
    assert told(style="modern", generator="unigram") == "modern, unigram"
    assert told(recipe="faithful", layers=6, sharing="none") == "faithful, sharing none, layers 6"
    assert told(sinusoidal_positions=False, learning_rate=0.001) == "learning-rate 0.001, no-starts-with-waves"
    assert told(phases=("fraction=0.9", "fraction=0.1,length=32")) == "phases fraction=0.9 fraction=0.1,length=32"


def test_the_best_of_two_stages_is_of_the_second(run_config):
    config = run_config(
        phases=("objective=mlm", "objective=frozen-rtd"), sharing="none", evaluate_every=5, learning_rate=1e-4
    )
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    first, second = run.points[:2], run.points[2:]
    assert [point.step for point in second] == [15, 20]
    assert run.best["loss"] == min(point.measures["loss"] for point in second)
    assert run.best["loss"] > max(point.measures["loss"] for point in first)  # masked tokens alone
    assert "phases objective=mlm objective=frozen-rtd" in run.departures


def test_the_best_of_two_phases_is_of_the_second_whose_masks_are_others(run_config):
    phases = ("mask-fraction=0.05", "mask-fraction=0.5")
    config = run_config(phases=phases, steps=40, evaluate_every=20, learning_rate=5e-3)
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    first, second = (point.measures["loss"] for point in run.points)
    assert run.best["loss"] == second > first
    drawn = [reached for _, _, reached in curve(run, "loss")]
    assert drawn == [first, pytest.approx(nan, nan_ok=True), second]


def test_runs_that_were_measured_on_other_text_are_told_apart(runs, run_config):
    config = run_config("few", evaluation_rows=32)
    pretrain(config)
    [note] = [note for note in report(ReportConfig(runs=(*runs, config.output))).notes if "different text" in note]
    assert note.endswith("few: up to 32 rows of 16 tokens")
    assert "64 rows of 16 tokens" in note


def test_a_corrector_shows_its_loss_and_losses_of_two_kinds_have_panels_of_their_own(runs, run_config):
    config = run_config("c", objective="replace-mlm", generator="uniform", generator_width=None)
    pretrain(config)
    result = report(ReportConfig(runs=(runs[0], config.output)))
    assert "| replace mlm loss |" in str(result)
    assert "compare it only between runs of one objective, all with a generator or all without" in str(result)
    assert {title: list(lines) for title, lines in panels("loss", result.runs).items()} == {
        "held-out loss, rtd": ["a"],
        "held-out loss, replace-mlm without a generator": ["c"],
    }
    assert [list(lines) for lines in panels("mlm_loss", result.runs).values()] == [["a", "c"]]


def test_phases_cost_what_each_of_them_does(run_config):
    stages = {"phases": ("fraction=0.25,objective=mlm", "objective=rtd,length=24"), "evaluate_every": 5}
    config = run_config("stages", **stages)
    pretrain(config)
    [run] = report(ReportConfig(runs=(config.output,))).runs.values()
    whole = pretrain(run_config("dry", dry_run=True, **stages))
    alone = pretrain(run_config("dry", dry_run=True, **stages | {"phases": ("objective=rtd,length=24",), "steps": 15}))
    assert (run.objective, run.parameters, run.tokens) == ("mlm, rtd", whole.parameters, whole.tokens)
    assert [point.step for point in run.points] == [5, 10, 15, 20]
    assert run.points[0].flops == pytest.approx(whole.flops - alone.flops)
    assert run.flops == pytest.approx(whole.flops)
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    shutil.rmtree(checkpoint_folders(config.output)[-1])
    with pytest.raises(DataError, match=r"unfinished: in phase 1 of 2; go on with it by electra pretrain --resume"):
        report(ReportConfig(runs=(config.output,)))


def test_phases_of_minutes_end_where_the_clock_says(run_config, shards):
    config = run_config(steps=None, minutes=2.0, phases=("fraction=0.75", "objective=replace-mlm"))
    phases = plan(config, open_shards(shards))
    clock = [{"kind": "train", "step": 10 * minute, "seconds": 60.0 * minute} for minute in (1, 2)]
    ends = ends_of(phases, TrainState(step=21, seconds=121.0), clock)
    assert ends == pytest.approx([10 * 91 / 60, 21])
    assert flops_of(phases, [4, 6], 5) == 4 * step_flops(phases[0]) + step_flops(phases[1])


def unfinished(run: Path) -> None:
    shutil.rmtree(checkpoint_folders(run)[-1])


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
    record = json.loads((run / "config.json").read_text())
    record["pretraining"]["steps"] = "many"
    (run / "config.json").write_text(json.dumps(record))


def with_bytes(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (unfinished, "unfinished: 50% of its budget is spent; go on with it by electra pretrain --resume"),
        (without_checkpoints, "unfinished: it has no checkpoint yet"),
        (with_cut_metrics, "damaged: metrics.jsonl has no measures of its last step, 20"),
        (with_strange_metrics, "config.json, metrics.jsonl or state.json is damaged"),
        (with_bytes, "can't decode byte"),
        (with_cut_config, "config.json is not valid JSON"),
        (with_other_state, "config.json, metrics.jsonl or state.json is damaged: KeyError('place')"),
        (with_wrong_settings, "config.json, metrics.jsonl or state.json is damaged"),
        (shutil.rmtree, "there is no such folder"),
    ],
)
def test_runs_that_are_unfinished_or_damaged_are_named_and_left_out(runs, damage, reason, capsys):
    damage(runs[0])
    main(["report", *map(str, runs)])
    shown = capsys.readouterr().out
    assert f"left out: {runs[0]}: " in shown
    assert reason in shown
    assert "| b " in shown


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "no runs came; name their folders: electra report runs/a"),
        (["gone"], "none of the runs can be reported; gone: there is no such folder"),
        (["."], "none of the runs can be reported; .: no run: it has no metrics.jsonl"),
        (["gone", "--glue", "nowhere"], "there is no table.json in nowhere; name a folder that electra glue wrote"),
    ],
)
def test_nothing_to_report_is_a_mistake(tmp_path, monkeypatch, capsys, flags, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["report", *flags])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith(f"electra: {sentence}")


def test_a_branch_costs_what_its_trunk_did_too(run_config):
    trunk = run_config("trunk", schedule="wsd", decay_fraction=0.0, steps=20)
    pretrain(trunk)
    branch = run_config("branch", schedule="decay", steps=10, branch_from=trunk.output)
    pretrain(branch)
    runs = report(ReportConfig(runs=(trunk.output, branch.output))).runs
    assert [run.steps for run in runs.values()] == [20, 30]
    assert runs["branch"].flops == 1.5 * runs["trunk"].flops
