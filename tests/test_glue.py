"""The GLUE table: medians beside published results, unchanged by kills; the submission file by file."""

import json
import shutil
import zipfile

import numpy as np
import pytest
from conftest import change_weights, error_message
from kills import kill_repeatedly
from synthetic import write_glue, write_lines

from electra.cli import main
from electra.config import build_config
from electra.errors import ConfigError, DataError
from electra.finetuning.config import EvaluateConfig, GlueConfig
from electra.finetuning.glue import (
    GLUE_6,
    PUBLISHED,
    SUBMISSION_FILES,
    describe_other_results,
    glue,
    make_glue_row,
    make_glue_table,
    missing_submission_files,
    prepare_task_jobs,
    read_earlier_rows,
    select_tasks,
    submission_key,
    write_submission_zip,
)
from electra.finetuning.job import JobResult, read_job_result
from electra.finetuning.predict import evaluate
from electra.finetuning.tasks import GLUE_TASKS

SHORT = {"epochs": 1, "batch_size": 8, "learning_rate": 3e-3, "length": 32, "device": "cpu"}


@pytest.fixture
def glue_config(encoder_folder, tmp_path):
    """Build the config of a small table."""
    data = write_glue(tmp_path / "glue")

    def make_config(output: str = "out", **settings) -> GlueConfig:
        files = {"model": encoder_folder, "data": str(data), "output": tmp_path / output, "seeds": 2}
        return build_config(GlueConfig, **(SHORT | files | settings))

    return make_config


def test_the_table_of_all_available_tasks_and_its_submission(glue_config, tmp_path):
    table = glue(glue_config(ensemble=True, submission=tmp_path / "glue.zip"))
    assert [row.task for row in table.rows] == ["cola", "stsb", "rte"]
    assert [row.seeds for row in table.rows] == [2, 2, 2]
    assert table.mean == pytest.approx(sum(row.median for row in table.rows) / 3)
    assert table.glue_6 is None
    text = str(table)
    assert "| Small (OWT)" in text
    assert "| 56.8" in text  # of CoLA
    assert "stsb, dev pearson" in text
    assert "GLUE's site also requires SST-2.tsv" in text
    files = read_zip(tmp_path / "glue.zip")
    assert sorted(files) == ["CoLA.tsv", "RTE.tsv", "STS-B.tsv"]
    lines = files["RTE.tsv"].splitlines()
    assert len(lines) == 21
    assert lines[1].split("\t")[1] in ("entailment", "not_entailment")
    for task, rows in (("stsb", 120), ("rte", 60)):  # pairs of STS-B are trained in both orders
        result = read_job_result(tmp_path / "out" / task / "seed-1" / "result.json")
        assert result.rows == {"train": rows, "dev": 20, "test": 20}
    for task in ("cola", "stsb", "rte"):  # only the best model is kept
        assert len(list((tmp_path / "out" / task).glob("seed-*/model"))) == 1


def test_all_models_are_kept_on_request(glue_config, tmp_path):
    glue(glue_config(tasks=("cola",), keep_models=True))
    assert len(list((tmp_path / "out" / "cola").glob("seed-*/model"))) == 2


def test_a_table_of_wnli_alone_has_no_mean(glue_config, tmp_path):
    for split in ("train", "dev"):
        rows = (tmp_path / "glue/RTE" / f"{split}.tsv").read_text()
        rows = rows.replace("not_entailment", "0").replace("entailment", "1")
        write_lines(tmp_path / "glue/WNLI" / f"{split}.tsv", rows.splitlines())
    table = glue(glue_config(tasks=("wnli",), seeds=1))
    assert table.mean is None
    assert "nan" not in str(table)
    assert "| mean" not in str(table)
    assert table.notes[-1].startswith("no mean:")
    assert json.loads((tmp_path / "out/table.json").read_text())["mean"] is None


def test_large_tasks_may_have_fewer_seeds_and_no_ensemble(glue_config, tmp_path):
    config = glue_config(ensemble=True, large_seeds=1)
    sst2, rte = (prepare_task_jobs(GLUE_TASKS[name], config) for name in ("sst2", "rte"))
    assert (len(sst2), len(rte)) == (1, 2)
    result = JobResult("sst2", 1, {"dev": {"accuracy": 0.5}}, steps=1, seconds=1.0, rows={"dev": 1}, truncated={})
    assert make_glue_row(sst2, [result], with_ensemble=True).ensemble == {}


def test_published_means_are_those_of_the_paper():
    small = PUBLISHED["Small (OWT)"]
    assert sum(small.values()) / 8 == pytest.approx(80.36, abs=0.01)
    assert sum(small[task] for task in GLUE_6) / 6 == pytest.approx(79.3, abs=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_kills_do_not_change_the_table(glue_config, tmp_path):
    settings = {"tasks": ("rte", "cola"), "epochs": 4}
    whole, broken = glue(glue_config("whole", **settings)), glue_config("broken", **settings)
    kill_repeatedly(glue, broken, times=8, within=0.8)
    again = glue(broken)
    assert [row.metrics for row in again.rows] == [row.metrics for row in whole.rows]
    for seed in ("seed-1", "seed-2"):
        paths = [tmp_path / output / "rte" / seed / "logits.safetensors" for output in ("whole", "broken")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_submission_replaces_only_an_earlier_one(glue_config, tmp_path):
    (tmp_path / "glue.zip").write_text("precious")
    with pytest.raises(DataError, match=r"glue\.zip exists and is no GLUE submission"):
        glue(glue_config(submission=tmp_path / "glue.zip"))
    assert (tmp_path / "glue.zip").read_text() == "precious"


def test_a_submission_without_folder_is_an_error_before_any_work(glue_config, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        glue_config(submission=tmp_path / "nowhere" / "glue.zip")


def test_diagnostic_rows_are_predicted_by_the_model_of_mnli(tmp_path):
    for name in ("MNLI/train.tsv", "diagnostic/diagnostic.tsv"):
        write_lines(tmp_path / name, [])
    config = build_config(GlueConfig, model=tmp_path, output=tmp_path / "out", data=str(tmp_path))
    [task] = select_tasks(config)
    assert task.splits["test_diagnostic"] == str(tmp_path / "diagnostic" / "diagnostic.tsv")
    names = [submission_key(task, split) for split in ("test", "test_mismatched", "test_diagnostic")]
    assert names == ["mnli", "mnli_mismatched", "diagnostic"]


def test_rows_of_earlier_tables_are_kept(glue_config, encoder_folder, tmp_path, capsys):
    glue_config()  # writes the data
    settings = {"model": str(encoder_folder), "data": str(tmp_path / "glue"), "output": str(tmp_path / "out")}
    settings |= {"tasks": ["rte", "cola"], "seeds": 1, "epochs": 1, "length": 32, "json": True}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    main(["glue", "--config", str(tmp_path / "settings.json")])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["task"] for row in rows] == ["rte", "cola"]
    assert rows[0]["standard_deviation"] is None  # of a single seed
    main(["glue", "--config", str(tmp_path / "settings.json"), "--tasks", "cola"])
    table = json.loads(capsys.readouterr().out)
    assert [row["task"] for row in table["rows"]] == ["cola", "rte"]
    assert table["notes"][-1] == "the mean excludes sst2, mrpc, stsb, qqp, mnli, qnli"


def test_a_table_has_the_results_of_one_model(glue_config, encoder_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    glue(glue_config(model=model, tasks=("rte",), seeds=1))
    with pytest.raises(ConfigError, match="--model was"):
        glue(glue_config(tasks=("cola",), seeds=1))
    assert len(glue(glue_config(model=model, tasks=("cola",), seeds=1)).rows) == 2
    change_weights(model)
    for tasks in (("cola",), ("rte",)):  # neither beside the earlier result nor instead of it
        with pytest.raises(ConfigError, match=r"model\.safetensors has other content"):
            glue(glue_config(model=model, tasks=tasks, seeds=1))


def test_an_earlier_row_may_contain_nan(tmp_path):
    """The correlation of constant predictions, which is null in table.json."""
    metrics = {"dev": {"spearman": None}}
    row = {"task": "stsb", "metric": "spearman", "median": None, "standard_deviation": None, "seeds": 2, "seconds": 1}
    row |= {"metrics": metrics, "ensemble": metrics, "truncated": {}}
    table = {"model": "", "output": "", "mean": None, "glue_6": None, "published": {}, "notes": [], "rows": [row]}
    (tmp_path / "table.json").write_text(json.dumps(table))
    config = build_config(GlueConfig, model=tmp_path, data="glue", output=tmp_path)
    rows = read_earlier_rows(config, ["rte"])
    assert "nan" in str(make_glue_table(config, rows, describe_other_results(rows)))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("rtf", "unknown task 'rtf'; choose from cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"),
        ("diagnostic", "it is predicted together with mnli"),
        ("", "--tasks needs a value"),
    ],
)
def test_wrong_tasks_are_one_sentence(glue_config, encoder_folder, tmp_path, capsys, tasks, message):
    flags = f"--model {encoder_folder} --data {tmp_path}/glue --output {tmp_path}/out --tasks {tasks}"
    assert message in error_message(f"glue {flags}", capsys)


def test_a_model_is_evaluated_on_the_official_files(glue_config, tmp_path):
    """CoLA's dev file has no header; its test file has a header but no labels."""
    table = glue(glue_config(tasks=("cola",), seeds=1))
    model, data = tmp_path / "out" / "cola", tmp_path / "glue" / "CoLA"
    result = evaluate(build_config(EvaluateConfig, model=model, input=data / "dev.tsv"))
    assert result.metrics == table.rows[0].metrics["dev"]
    with pytest.raises(DataError, match=r"test.tsv has no label column 'label'"):
        evaluate(build_config(EvaluateConfig, model=model, input=data / "test.tsv"))


@pytest.mark.parametrize(("exists", "message"), [(True, "has none of GLUE's folders"), (False, "is not a folder")])
def test_missing_data_is_an_error(encoder_folder, tmp_path, exists, message):
    if exists:
        (tmp_path / "glue").mkdir()
    config = build_config(GlueConfig, model=encoder_folder, data=str(tmp_path / "glue"), output=tmp_path / "out")
    with pytest.raises(DataError, match=message):
        select_tasks(config)


def read_zip(path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_classes_are_submitted_by_name_and_scores_within_their_range(tmp_path):
    scores = np.array([-0.2, 2.34567, 5.5], np.float32)
    classes = {"rte": np.array([1, 0]), "mnli_mismatched": np.array([2, 0, 1]), "cola": np.array([1])}
    write_submission_zip(tmp_path / "a.zip", classes | {"stsb": scores})
    assert read_zip(tmp_path / "a.zip") == {
        "RTE.tsv": "index\tprediction\n0\tnot_entailment\n1\tentailment\n",
        "MNLI-mm.tsv": "index\tprediction\n0\tcontradiction\n1\tentailment\n2\tneutral\n",
        "CoLA.tsv": "index\tprediction\n0\t1\n",
        "STS-B.tsv": "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n",
    }


def test_a_submission_has_the_files_of_the_site_and_no_date(tmp_path):
    predictions = {name: np.array([0]) for name in SUBMISSION_FILES}
    write_submission_zip(tmp_path / "a.zip", predictions)
    names = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    assert list(read_zip(tmp_path / "a.zip")) == [f"{name}.tsv" for name in names.split()]
    assert missing_submission_files(predictions) == []
    assert missing_submission_files({name: np.array([0]) for name in GLUE_TASKS}) == ["MNLI-mm.tsv"]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert {file.date_time for file in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
