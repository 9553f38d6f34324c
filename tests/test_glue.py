"""The table of GLUE: medians beside published scores, the same after any number of kills."""

import json
import random
import zipfile

import pytest
from kills import killed
from made import write_glue, write_lines

from electra.cli import main
from electra.errors import ConfigError, DataError
from electra.finetuning.glue import GLUE_6, REFERENCES, GlueConfig, glue, name_of
from electra.finetuning.job import read_score
from electra.finetuning.predict import EvaluateConfig, evaluate
from electra.finetuning.tasks import GLUE_TASKS

QUICK = {"epochs": 2, "batch": 8, "learning_rate": 3e-3, "length": 32}


@pytest.fixture
def settings(encoder_folder, tmp_path):
    """Build the configuration of a quick table."""
    data = write_glue(tmp_path / "glue")

    def build(output: str = "out", **departures) -> GlueConfig:
        given = {"model": encoder_folder, "data": str(data), "output": tmp_path / output, "device": "cpu", "seeds": 2}
        return GlueConfig(**(QUICK | given | departures))

    return build


def test_all_takes_the_tasks_that_are_there(settings):
    table = glue(settings())
    assert [line.task for line in table.lines] == ["cola", "stsb", "rte"]
    assert [line.seeds for line in table.lines] == [2, 2, 2]
    assert table.mean == pytest.approx(sum(line.median for line in table.lines) / 3)
    assert table.glue_6 is None
    shown = str(table)
    assert "| Small (OWT)" in shown
    assert "| 56.8" in shown  # CoLA's
    assert "stsb, dev pearson" in shown


def test_a_table_of_wnli_alone_has_no_mean(settings, tmp_path):
    for split in ("train", "dev"):
        rows = (tmp_path / "glue/RTE" / f"{split}.tsv").read_text()
        rows = rows.replace("not_entailment", "0").replace("entailment", "1")
        write_lines(tmp_path / "glue/WNLI" / f"{split}.tsv", rows.splitlines())
    table = glue(settings(tasks=("wnli",), seeds=1, epochs=1))
    assert table.mean is None
    assert "nan" not in str(table)
    assert "| mean" not in str(table)
    assert table.notes == ["wnli is left out of means, so there is none: its dev rows contradict its training rows"]
    assert json.loads((tmp_path / "out/table.json").read_text())["mean"] is None


def test_an_ensemble_is_of_the_tasks_that_have_several_seeds(settings):
    config = settings(ensemble=True, large_seeds=1)
    assert (config.for_task(GLUE_TASKS["sst2"]).seeds, config.for_task(GLUE_TASKS["sst2"]).ensemble) == (1, False)
    assert (config.for_task(GLUE_TASKS["rte"]).seeds, config.for_task(GLUE_TASKS["rte"]).ensemble) == (2, True)


def test_the_references_are_those_of_the_paper():
    small = REFERENCES["Small (OWT)"]
    assert sum(small.values()) / 8 == pytest.approx(80.36, abs=0.01)
    assert sum(small[task] for task in GLUE_6) / 6 == pytest.approx(79.3, abs=0.05)


def test_only_the_best_model_of_a_task_is_kept_unless_told(settings, tmp_path):
    glue(settings(tasks=("cola",)))
    assert len(list((tmp_path / "out" / "cola").glob("seed-*/model"))) == 1
    glue(settings(output="all", tasks=("cola",), keeps_models=True))
    assert len(list((tmp_path / "all" / "cola").glob("seed-*/model"))) == 2


def test_pairs_of_sts_are_learnt_in_both_orders(settings, tmp_path):
    glue(settings(tasks=("stsb", "rte"), seeds=1, epochs=1))
    rows = {task: read_score(tmp_path / "out" / task / "seed-1" / "result.json").rows for task in ("stsb", "rte")}
    assert rows == {"stsb": {"train": 120, "dev": 20, "test": 20}, "rte": {"train": 60, "dev": 20, "test": 20}}


def test_side_by_side_gives_the_same_table(settings):
    alone, together = glue(settings(tasks=("cola",))), glue(settings(output="two", tasks=("cola",), workers=2))
    assert alone.lines[0].measures == together.lines[0].measures


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_kills_do_not_change_the_table(settings, tmp_path):
    whole = glue(settings("whole", tasks=("rte", "cola"), seeds=3))
    broken = settings("broken", tasks=("rte", "cola"), seeds=3)
    moments = random.Random(1)
    kills = sum(killed(glue, broken, after=moments.uniform(0.1, 0.8)) for _ in range(8))
    assert kills >= 3, "the table was over too soon: make it longer"
    again = glue(broken)
    assert [line.measures for line in again.lines] == [line.measures for line in whole.lines]
    for seed in ("seed-1", "seed-2", "seed-3"):
        paths = [tmp_path / output / "rte" / seed / "logits.safetensors" for output in ("whole", "broken")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_submission_has_a_line_for_every_test_row(settings, tmp_path):
    table = glue(settings(tasks=("cola", "stsb", "rte"), ensemble=True, submission=tmp_path / "glue.zip"))
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        assert sorted(archive.namelist()) == ["CoLA.tsv", "RTE.tsv", "STS-B.tsv"]
        lines = archive.read("RTE.tsv").decode().splitlines()
    assert len(lines) == 21
    assert lines[1].split("\t")[1] in ("entailment", "not_entailment")
    assert "GLUE's site also wants SST-2.tsv" in str(table)


def test_a_submission_without_a_folder_is_refused_before_any_work(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere to write glue.zip into"):
        glue(settings(submission=tmp_path / "nowhere" / "glue.zip"))
    assert not (tmp_path / "out").exists()


def test_the_diagnostic_rows_are_answered_along_with_mnli(tmp_path):
    for name in ("MNLI/train.tsv", "diagnostic/diagnostic.tsv"):
        write_lines(tmp_path / name, [])
    config = GlueConfig(model=tmp_path, output=tmp_path / "out", data=str(tmp_path))
    [task] = config.chosen_tasks()
    assert task.splits["test_diagnostic"] == str(tmp_path / "diagnostic" / "diagnostic.tsv")
    assert [name_of(task, split) for split in ("test", "test_mismatched", "test_diagnostic")] == [
        *("mnli", "mnli_mismatched", "diagnostic")
    ]


def test_json_and_wrong_tasks(settings, encoder_folder, tmp_path, capsys):
    flags = ["glue", "--model", str(encoder_folder), "--data", str(tmp_path / "glue"), "--length", "32"]
    flags += ["--output", str(tmp_path / "out"), "--seeds", "1", "--epochs", "1", "--json"]
    main([*flags, "--tasks", "rte"])
    [line] = json.loads(capsys.readouterr().out)["lines"]
    assert (line["task"], line["spread"]) == ("rte", None)  # of one seed there is none
    for tasks, sentence in (
        (["rtf"], "unknown task 'rtf'; choose from cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"),
        (["diagnostic"], "it is predicted together with mnli"),
        ([], "--tasks came without a name"),
    ):
        with pytest.raises(SystemExit) as exit:
            main([*flags, "--tasks", *tasks])
        assert exit.value.code == 2
        assert sentence in capsys.readouterr().err


def test_nothing_can_be_learnt_from_diagnostic_rows(encoder_folder, tmp_path, capsys):
    flags = f"--model {encoder_folder} --data {tmp_path} --output {tmp_path}/out"
    with pytest.raises(SystemExit, match="2"):
        main(["finetune", "--task", "diagnostic", *flags.split()])
    assert "diagnostic has no training rows; it is predicted together with mnli" in capsys.readouterr().err


def test_tasks_may_come_from_a_file_of_flags(settings, encoder_folder, tmp_path, capsys):
    fields = {"model": str(encoder_folder), "data": str(tmp_path / "glue"), "output": str(tmp_path / "out")}
    fields |= {"tasks": ["rte", "cola"], "seeds": 1, "epochs": 1, "length": 32, "json": True}
    (tmp_path / "flags.json").write_text(json.dumps(fields))
    main(["glue", "--config", str(tmp_path / "flags.json")])
    assert [line["task"] for line in json.loads(capsys.readouterr().out)["lines"]] == ["rte", "cola"]
    main(["glue", "--config", str(tmp_path / "flags.json"), "--tasks", "cola"])  # flags win; a table loses no line
    found = json.loads(capsys.readouterr().out)
    assert [line["task"] for line in found["lines"]] == ["cola", "rte"]
    assert found["notes"][-1] == "the mean is without sst2, mrpc, stsb, qqp, mnli, qnli"


def test_a_model_is_evaluated_on_the_official_files(settings, tmp_path):
    """CoLA's dev file has no header; its test file has one, and no labels."""
    table = glue(settings(tasks=("cola",), seeds=1))
    model, data = tmp_path / "out" / "cola", tmp_path / "glue" / "CoLA"
    found = evaluate(EvaluateConfig(model=model, input=data / "dev.tsv"))
    assert found.measures == table.lines[0].measures["dev"]
    with pytest.raises(DataError, match=r"test.tsv has no column 'label' with labels to measure by"):
        evaluate(EvaluateConfig(model=model, input=data / "test.tsv"))


@pytest.mark.parametrize(("is_there", "said"), [(True, "has none of GLUE's folders"), (False, "is no folder")])
def test_a_folder_without_glue_and_no_folder_are_told_apart(encoder_folder, tmp_path, is_there, said):
    data = tmp_path / "glue"
    if is_there:
        data.mkdir()
    with pytest.raises(DataError, match=said):
        GlueConfig(model=encoder_folder, data=str(data), output=tmp_path / "tuned").chosen_tasks()
