"""`electra finetune`: from files to metrics; mistakes are reported in one sentence."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
from conftest import error_message
from synthetic import write_rows

from electra.cli import main
from electra.config import build_config
from electra.errors import DataError
from electra.finetuning.command import finetune
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.job import FinetuningTask


def test_seeds_are_evaluated_alone_and_as_an_ensemble(finetuned):
    result = finetuned.result
    assert len(result.seeds) == 2
    assert result.seeds[0] != result.seeds[1] or result.seeds[0]["dev"]["accuracy"] == 1
    assert result.ensemble["dev"]["accuracy"] > 0.9
    assert "median of 2 seeds" in str(result)
    assert result.baseline["accuracy"] < 0.6
    assert result.assessment["baseline"].startswith("Better than always predicting the most frequent class")
    assert "electra predict" in result.assessment["next"]
    assert {path.name for path in (finetuned.output / "seed-1").iterdir()} >= {
        *("curves.png", "confusion.png", "metrics.jsonl", "result.json", "model")
    }
    assert not (finetuned.output / "seed-1" / "checkpoints").exists()


@pytest.fixture
def short_config(encoder_folder, tmp_path):
    """Build the config of one epoch on synthetic rows."""

    def make_config(kind: str = "classification", **settings) -> FinetuneConfig:
        train = write_rows(tmp_path / "train.jsonl", kind, 60, seed=0)
        dev = write_rows(tmp_path / "dev.jsonl", kind, 20, seed=1)
        files = {"model": encoder_folder, "train": train, "dev": dev, "output": tmp_path / "out"}
        return build_config(FinetuneConfig, **files | {"epochs": 1, "length": 32, "device": "cpu"} | settings)

    return make_config


@pytest.mark.parametrize("path", ["", "seed-1", "seed-1/model"])
def test_a_fine_tuned_model_can_be_fine_tuned_on_another_task(finetuned, short_config, tmp_path, path):
    """The output of a fine-tuning stands for its best seed, and the folder of a seed for its model."""
    finetune(short_config("regression", model=finetuned.output / path))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
    best = max((1, 2), key=lambda seed: finetuned.result.seeds[seed - 1]["dev"]["accuracy"])
    assert settings["model"] == str(finetuned.output / (path[:6] or f"seed-{best}") / "model")


def test_a_regression_has_errors_in_the_unit_of_its_scores(short_config):
    result = finetune(short_config("regression"))
    median = result.median["dev"]
    assert list(median) == ["pearson", "spearman", "mae", "rmse"]
    assert 0 < median["mae"] <= median["rmse"] < 2 * result.baseline["rmse"]
    assert f"dev rmse          {median['rmse']:6.4g}" in str(result)


def test_a_multi_label_task_has_scores_of_each_class(short_config):
    result = finetune(short_config("multi-label"))
    assert list(result.classes) == result.labels
    assert f"  dev {result.labels[0]}: F1 " in str(result)


def test_a_damaged_model_is_not_taken_for_a_finished_one(finetuned, tmp_path):
    shutil.copytree(finetuned.output, tmp_path / "copy")
    weights = tmp_path / "copy/seed-1/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = replace(finetuned.config, output=tmp_path / "copy")
    with pytest.raises(DataError, match=r"remove .*copy/seed-1, then run electra finetune"):
        finetune(config)
    shutil.rmtree(tmp_path / "copy/seed-1")
    assert finetune(config).seeds == finetuned.result.seeds


def test_truncated_texts_are_reported(short_config):
    result = finetune(short_config(length=8))
    assert result.truncated == {"train": 60, "dev": 20}
    assert "60 train rows truncated to --length" in str(result)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_fine_tuning_that_is_stopped_before_it_trains_leaves_no_lock(
    encoder_folder, tmp_path, monkeypatch, capsys, number
):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nthe cat,a\nthe dog,b\n")
    monkeypatch.setattr(FinetuningTask, "load_features", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit, match=str(128 + number)):
        main(
            f"finetune --model {encoder_folder} --train {tmp_path}/rows.csv --output {tmp_path}/out --length 32".split()
        )
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["config.json"]


def test_an_error_that_quotes_a_megabyte_is_shortened(encoder_folder, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text(f"text,{'x' * 1_000_000}\n1,2\n")
    error = error_message(
        f"finetune --model {encoder_folder} --train {tmp_path}/rows.csv --output {tmp_path}/out", capsys
    )
    assert len(error) < 2_100
    assert "no column 'label'" in error
    assert error.endswith("--text, --text-b and --label of electra finetune set them\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3,4\n", "no column 'label'; the columns are 'a', 'b'"),
        ("", "no rows"),
        ("text,label\na,x\nb,x\n", "every label is 'x'"),
        ("text,label\na,x\nb,y,z\n", "line 3"),
    ],
)
def test_errors_in_files_are_one_sentence(encoder_folder, tmp_path, capsys, content, message):
    (tmp_path / "rows.csv").write_text(content)
    error = error_message(
        f"finetune --model {encoder_folder} --train {tmp_path}/rows.csv --output {tmp_path}/out --length 32", capsys
    )
    assert message in error
    assert str(tmp_path / "rows.csv") in error
    assert not list(tmp_path.glob("out/seed-*"))


def test_the_same_output_can_be_used_after_an_error(encoder_folder, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("words,label\n" + "the cat sat .,x\nthe dog ran .,y\n" * 10)
    flags = f"--model {encoder_folder} --train {tmp_path}/rows.csv --output {tmp_path}/out --length 32 --epochs 1"
    error_message(f"finetune {flags}", capsys)
    main(["finetune", *flags.split(), "--text", "words"])
    assert "dev accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give either --task with --data (GLUE, SQuAD, tagging) or --train"),
        ("--task rte --data glue --train x.csv", "give either --task with --data (GLUE, SQuAD, tagging) or --train"),
        ("--task rte", "--task needs --data"),
        ("--task rte --data . --dev x.csv", "--dev cannot be combined with --task"),
        ("--task rte --data . --dev-fraction 0.2", "--dev-fraction is for your own files (--train), not for --task"),
        ("--train x.csv --seeds 0", "--seeds is 0; it must be at least 1"),
        ("--train x.csv --batch-size 8 --micro-batches 3", "--micro-batches is 3; it must divide --batch-size 8"),
        ("--train x.csv", "x.csv, the file of the train rows, does not exist"),
        ("--train x.csv --ensemble", "--ensemble needs --seeds 2 or more"),
    ],
)
def test_wrong_settings_are_one_sentence(encoder_folder, tmp_path, capsys, flags, message):
    assert message in error_message(f"finetune --model {encoder_folder} --output {tmp_path}/out {flags}", capsys)


def test_labels_that_only_dev_has_are_named(encoder_folder, tmp_path, capsys):
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "dev.csv").write_text("text,label\na,x\nb,z\n")
    files = f"--train {tmp_path}/train.csv --dev {tmp_path}/dev.csv --output {tmp_path}/out"
    assert "dev.csv, line 3: unknown label 'z'" in error_message(
        f"finetune --model {encoder_folder} --length 32 {files}", capsys
    )


def test_the_correlation_of_constant_predictions_is_null_in_json(short_config, capsys, tmp_path):
    """Equal texts get equal predictions, which have no correlation."""
    config = short_config("regression")
    rows = [json.loads(line) | {"text": ""} for line in config.task.dev.read_text().splitlines()]
    config.task.dev.write_text("\n".join(map(json.dumps, rows)))
    files = f"--model {config.model} --train {config.task.train} --dev {config.task.dev} --output {config.output}"
    main(["finetune", *files.split(), "--length", "32", "--epochs", "1", "--json"])

    def reject(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=reject)["median"]["dev"]["pearson"] is None
    for file in ("result.json", "metrics.jsonl"):
        assert "NaN" not in (tmp_path / "out" / "seed-1" / file).read_text()
