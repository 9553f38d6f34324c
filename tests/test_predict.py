"""`electra predict` and `electra evaluate`: the same metrics as in fine-tuning, and files of every format."""

import csv
import io
import json
import math
import os
import re
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import error_message
from synthetic import write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from electra.cli import main
from electra.config import build_config
from electra.errors import ConfigError, DataError
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import EvaluateConfig, PredictConfig, PredictorConfig, TaskConfig
from electra.finetuning.kinds import define_task
from electra.finetuning.models import TaskModel
from electra.finetuning.predict import JsonWriter, Predictor, evaluate, predict
from electra.finetuning.readers import Row
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.finetuning.tasks import MAX_CHUNK_CHARACTERS, take_chunk
from electra.model.storage import WEIGHTS, read_tensors, write_tensors
from electra.runfolder import CHECKSUMS, lock_file

SENTENCE = "the big cat sat on the red mat ."


def evaluate_file(model, path, **settings):
    return evaluate(build_config(EvaluateConfig, model=model, input=path, **settings))


def predict_file(model, path, output, **settings):
    return predict(build_config(PredictConfig, model=model, input=path, output=output, **settings))


def test_evaluation_and_predictions_agree_with_fine_tuning(finetuned, tmp_path):
    result = evaluate_file(finetuned.output, finetuned.dev)
    best = max(seed["dev"]["accuracy"] for seed in finetuned.result.seeds)
    assert result.metrics["accuracy"] == best
    assert sum(map(sum, result.confusion_matrix)) == 60
    assert sum(result.confusion_matrix[k][k] for k in range(3)) == round(best * 60)
    assert "true class ↓, predicted →\n      bird   cat   dog\nbird  " in str(result)
    ensemble = evaluate_file(finetuned.output, finetuned.dev, ensemble=True)
    assert ensemble.metrics == finetuned.result.ensemble["dev"]

    assert predict_file(finetuned.output, finetuned.dev, tmp_path / "predictions.csv").rows == 60
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(row["label"] == row["prediction"] for row in rows) == round(best * 60)
    assert sum(float(rows[0][f"p({name})"]) for name in ("cat", "dog", "bird")) == pytest.approx(1, abs=1e-3)


def test_predictions_do_not_depend_on_the_size_of_chunks(finetuned, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    predict_file(finetuned.output, finetuned.dev, whole)
    monkeypatch.setattr("electra.finetuning.predict.CHUNK_SIZE", 7)
    predict_file(finetuned.output, finetuned.dev, parts)
    by_characters = tmp_path / "by_characters.jsonl"
    monkeypatch.setitem(MAX_CHUNK_CHARACTERS, "cpu", 200)
    predict_file(finetuned.output, finetuned.dev, by_characters)
    files = [list(map(json.loads, file.read_text().splitlines())) for file in (whole, parts, by_characters)]
    first, *others = [[row["prediction"] for row in rows] for rows in files]
    assert others == [first, first]


def test_fewer_long_rows_are_computed_at_a_time(monkeypatch):
    monkeypatch.setitem(MAX_CHUNK_CHARACTERS, "cpu", 10)
    rows = iter([Row(number, {"text": "x" * size}) for number, size in enumerate((6, 6, 1, 20, 1))])
    assert [len(take_chunk(rows, 4, "cpu")) for _ in range(4)] == [2, 2, 1, 0]


def test_prediction_needs_no_labels_but_evaluation_does(finetuned, tmp_path):
    (tmp_path / "new.csv").write_text(f'text\n"{SENTENCE}"\n')
    predict_file(finetuned.output, tmp_path / "new.csv", tmp_path / "predictions.tsv")
    header, row = (tmp_path / "predictions.tsv").read_text().splitlines()
    assert header.split("\t")[:2] == ["text", "prediction"]
    assert row.split("\t")[1] == "cat"
    with pytest.raises(DataError, match="has no label column 'label'"):
        evaluate_file(finetuned.output, tmp_path / "new.csv")


def test_numbers_that_json_lacks_are_null_in_predictions():
    file = io.StringIO()
    JsonWriter(file, [], None).write_row({"price": math.nan, "range": [0, math.inf]})
    assert file.getvalue() == '{"price": null, "range": [0, null]}\n'


def test_a_model_of_nan_predicts_nothing(finetuned, tmp_path):
    shutil.copytree(finetuned.output / "seed-1" / "model", tmp_path / "model")
    weights = read_tensors(tmp_path / "model" / WEIGHTS)
    (tmp_path / "model" / CHECKSUMS).unlink()
    write_tensors(tmp_path / "model" / WEIGHTS, weights | {"head.bias": torch.full((3,), math.nan)})
    with pytest.raises(DataError, match=r"the outputs of .*model are not finite"):
        predict_file(tmp_path / "model", finetuned.dev, tmp_path / "predictions.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(DataError, match="are not finite"):
        evaluate_file(tmp_path / "model", finetuned.dev)


def test_two_predictions_do_not_write_one_file(finetuned, tmp_path):
    output = tmp_path / "predictions.csv"
    with lock_file(output), pytest.raises(ConfigError, match=r"is using .*predictions.csv"):
        predict_file(finetuned.output, finetuned.dev, output)
    for stray in ("predictions.csv.electra-partial", ".predictions.csv.lock.electra-partial"):  # of a killed process
        (tmp_path / stray).write_text("…")
    predict_file(finetuned.output, finetuned.dev, output)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_prediction_leaves_nothing(finetuned, tmp_path, monkeypatch, number):
    monkeypatch.setattr(Predictor, "compute_outputs", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit, match=str(128 + number)):
        main(f"predict --model {finetuned.output} --input {finetuned.dev} --output {tmp_path}/predictions.csv".split())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stopped_prediction(finetuned, tmp_path, monkeypatch):
    """Stop a prediction in its fourth chunk; returns its output, the unbroken one, and the rows of later chunks."""

    def stop(name: str):
        predict_file(finetuned.output, finetuned.dev, tmp_path / f"whole{name}")
        monkeypatch.setattr("electra.finetuning.predict.CHUNK_SIZE", 10)
        monkeypatch.setattr("electra.resumable.SAVE_SECONDS", 0)
        compute_outputs, computed = Predictor.compute_outputs, []

        def compute(predictor, examples):
            computed.append(len(examples))
            if len(computed) == 4:
                raise KeyboardInterrupt
            return compute_outputs(predictor, examples)

        monkeypatch.setattr(Predictor, "compute_outputs", compute)
        with pytest.raises(KeyboardInterrupt):
            predict_file(finetuned.output, finetuned.dev, tmp_path / f"out{name}")
        assert not (tmp_path / f"out{name}").exists()
        del computed[:]
        computed += [0] * 5  # never the fourth again
        return tmp_path / f"out{name}", (tmp_path / f"whole{name}").read_text(), computed

    return stop


@pytest.mark.parametrize("name", [".csv", ".tsv", ".jsonl"])
def test_a_stopped_prediction_continues_after_its_last_chunk(finetuned, tmp_path, stopped_prediction, name):
    output, whole, computed = stopped_prediction(name)
    with output.with_name(f"{output.name}.electra-partial").open("a") as file:
        file.write("what a killed process wrote of the next chunk")
    result = predict_file(finetuned.output, finetuned.dev, output)
    assert computed[5:] == [10, 10, 10]
    assert result.rows == 60
    assert output.read_text() == whole
    assert {path.name for path in tmp_path.iterdir()} == {f"whole{name}", f"out{name}"}


def test_a_stopped_prediction_with_damaged_rows_starts_over(finetuned, stopped_prediction):
    output, whole, computed = stopped_prediction(".csv")
    partial = output.with_name(f"{output.name}.electra-partial")
    content = bytearray(partial.read_bytes())
    content[100] ^= 1
    partial.write_bytes(content)
    predict_file(finetuned.output, finetuned.dev, output)
    assert sum(computed[5:]) == 60
    assert output.read_text() == whole


def test_a_link_in_the_place_of_a_partial_file_is_not_written_to(finetuned, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out.csv.electra-partial").symlink_to(tmp_path / "precious")
    predict_file(finetuned.output, finetuned.dev, tmp_path / "out.csv")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "out.csv").is_symlink()


def test_a_stopped_prediction_with_other_settings_starts_over(finetuned, stopped_prediction, capsys):
    output, whole, computed = stopped_prediction(".csv")
    predict_file(finetuned.output, finetuned.dev, output, length=31)
    assert sum(computed[5:]) == 60
    assert "is started over: --length was 32 and is now 31" in capsys.readouterr().err
    assert output.read_text() == whole


def test_errors_remove_what_was_predicted(finetuned, tmp_path, stopped_prediction):
    output, _, _ = stopped_prediction(".jsonl")
    shutil.copy(finetuned.dev, tmp_path / "dev.jsonl")
    with (tmp_path / "dev.jsonl").open("a") as file:
        file.write("no JSON")
    with pytest.raises(DataError, match="line 61"):
        predict_file(finetuned.output, tmp_path / "dev.jsonl", output)
    assert {path.name for path in tmp_path.iterdir()} == {"whole.jsonl", "dev.jsonl"}


def test_a_model_without_its_tokenizer_is_rejected(finetuned, tmp_path):
    shutil.copytree(finetuned.output / "seed-1" / "model", tmp_path / "copy")
    for file in (*(tmp_path / "copy").glob("*token*"), tmp_path / "copy" / "vocab.txt"):
        file.unlink(missing_ok=True)
    with pytest.raises(DataError, match="has no tokenizer"):
        evaluate_file(tmp_path / "copy", finetuned.dev)


def test_an_exported_classifier_is_not_a_fine_tuned_model(finetuned, tmp_path):
    export(build_config(ExportConfig, model=finetuned.output, output=tmp_path / "hf"))
    with pytest.raises(DataError, match="ElectraForSequenceClassification"):
        evaluate_file(tmp_path / "hf", finetuned.dev)


@pytest.fixture
def untrained(encoder_folder, tmp_path):
    """Build a fine-tuned model with untrained head."""

    def build_model(kind: str = "classification", length: int = 32):
        rows = write_rows(tmp_path / "rows.jsonl", kind, 60, seed=1)
        task = define_task(TaskConfig(train=rows))
        pretrained = load_pretrained(encoder_folder)
        torch.manual_seed(0)
        model = TaskModel(pretrained.encoder, task.num_labels)
        (tmp_path / "model").mkdir()
        save_finetuned_model(model, task, length, tmp_path / "model", pretrained.folder)
        return tmp_path / "model"

    return build_model


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_an_exported_model_gives_the_same_outputs_in_transformers(untrained, tmp_path, kind):
    folder, path = untrained(kind), tmp_path / "rows.jsonl"
    export(build_config(ExportConfig, model=folder, output=tmp_path / "hf"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    predictor = Predictor(PredictorConfig(model=folder, input=path))
    [ours] = [outputs.logits for outputs in predictor.stream_outputs(path, with_labels=False)]
    task = predictor.task
    expected = ours if task.labels else task.denormalize_scores(ours)
    assert np.abs(theirs - expected).max() < 1e-5
    assert [model.config.id2label[index] for index in range(len(expected[0]))] == list(task.labels or ["score"])


def predictions(
    model, tmp_path, content: str, name: str = "new.jsonl", output: str = "predictions.csv", **settings
) -> str:
    """The content of a file of predictions."""
    (tmp_path / name).write_text(content)
    predict_file(model, tmp_path / name, tmp_path / output, **settings)
    return (tmp_path / output).read_text()


def test_values_are_written_to_their_columns_whatever_their_order_in_a_row(untrained, tmp_path):
    rows = ['{"id": 1, "text": "cat", "tags": [1, 2]}', '{"text": "dog", "id": 2}']
    first, second = csv.DictReader(predictions(untrained(), tmp_path, "\n".join(rows)).splitlines())
    assert (first["id"], first["text"], first["tags"]) == ("1", "cat", "1|2")
    assert (second["id"], second["text"], second["tags"]) == ("2", "dog", "")


def test_tsv_is_written_without_quoting(untrained, tmp_path):
    written = predictions(untrained(), tmp_path, 'text\n"big" cat\n', "new.tsv", "predictions.tsv")
    assert written.splitlines()[1].startswith('"big" cat\t')


def test_lone_surrogates_are_replaced(untrained, tmp_path):
    written = predictions(untrained(), tmp_path, '{"text": "\\ud83d!"}', output="predictions.jsonl")
    assert json.loads(written)["text"] == "?!"


def test_scores_are_written_with_six_digits(untrained, tmp_path):
    model = untrained("regression")
    for output in ("predictions.csv", "predictions.jsonl"):
        written = predictions(model, tmp_path, f"text\n{SENTENCE}\n", "new.csv", output)
        score = re.search(r"\d+\.\d+", written)[0]
        assert len(score.replace(".", "").lstrip("0")) <= 6


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        ('{"text": "a"}\n{"text": "a", "prediction": 1}', "b.csv", "line 2: the file already has a column"),
        ('{"text": "a"}\n{"text": "a", "id": 1}', "b.csv", "line 2: column 'id' is missing from the first row"),
        ('{"text": "a\\tb"}', "b.tsv", "line 1: a value contains a tab or line end"),
        ('{"text": "a\\nb"}', "b.tsv", "line 1: a value contains a tab or line end"),
        ('{"text": "a"}', "b.csv.gz", r"must end in \.csv, \.tsv, \.jsonl"),
        ('{"text": "a"}', "nowhere/b.csv", "there is no folder"),
    ],
)
def test_predictions_that_cannot_be_written_are_errors(untrained, tmp_path, content, output, message):
    with pytest.raises(ValueError, match=message):
        predictions(untrained(), tmp_path, content, output=output)
    assert (tmp_path / "new.jsonl").read_text() == content
    assert not list(tmp_path.glob("b.*"))


def test_existing_files_are_replaced_only_if_asked_for(untrained, tmp_path):
    model = untrained()
    (tmp_path / "b.csv").write_text("precious")
    (tmp_path / ".b.csv.lock.electra-partial").touch()  # of a process that was killed when it was done
    (tmp_path / ".b.csv.progress.electra-partial").touch()
    with pytest.raises(ConfigError, match=r"b\.csv, which exists"):
        predictions(model, tmp_path, '{"text": "a"}', output="b.csv")
    assert (tmp_path / "b.csv").read_text() == "precious"
    assert not list(tmp_path.glob(".b*"))
    predictions(model, tmp_path, '{"text": "a"}', output="b.csv", overwrite=True)
    assert (tmp_path / "b.csv").read_text().startswith('"text"')
    with pytest.raises(ConfigError, match="the same as --input"):
        predictions(model, tmp_path, '{"text": "a"}', output="new.jsonl", overwrite=True)
    assert (tmp_path / "new.jsonl").read_text() == '{"text": "a"}'


def test_a_full_disk_is_an_error_with_the_name_of_the_output(untrained, tmp_path):
    """A limit on file sizes stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = untrained()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="cannot write") as caught:
            predictions(model, tmp_path, '{"text": "a"}\n' * 200, output="b.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "b.csv")
    assert not list(tmp_path.glob("b.*"))


def test_texts_are_truncated_as_in_fine_tuning(untrained, tmp_path):
    folder = untrained(length=8)
    assert evaluate_file(folder, tmp_path / "rows.jsonl").truncated == 60
    assert evaluate_file(folder, tmp_path / "rows.jsonl", length=32).truncated == 0
    with pytest.raises(ValueError, match="32 positions"):
        evaluate_file(folder, tmp_path / "rows.jsonl", length=64)


def test_an_ensemble_needs_several_models(untrained, tmp_path, capsys):
    assert "--ensemble needs several models" in error_message(
        f"evaluate --model {untrained()} --input {tmp_path}/rows.jsonl --ensemble", capsys
    )
