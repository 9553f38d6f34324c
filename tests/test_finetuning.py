"""Fine-tuning from files: each kind of task is learnt, answered and measured; mistakes are one sentence."""

import csv
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from made import write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from electra.cli import main
from electra.export.command import ExportConfig, export
from electra.finetuning.command import FinetuneConfig, finetune, mean_logits, over_seeds
from electra.finetuning.job import Score
from electra.finetuning.jobs import Job
from electra.finetuning.model import TaskModel, load_pretrained, save_finetuned
from electra.finetuning.predict import Answers, EvaluateConfig, PredictConfig, evaluate, predict
from electra.model.storage import write_tensors
from electra.pretraining.command import pretrain

QUICK = {"epochs": 15, "batch": 16, "learning_rate": 5e-3, "layer_decay": 1.0, "dropout": 0.0, "length": 32}


@pytest.fixture
def settings(encoder_folder, tmp_path):
    """Build the configuration of a quick fine-tuning on made-up rows."""

    def build(kind: str = "classification", has_pairs: bool = False, **departures) -> FinetuneConfig:
        train = write_rows(tmp_path / "train.jsonl", kind, 240, seed=0, has_pairs=has_pairs)
        dev = write_rows(tmp_path / "dev.jsonl", kind, 60, seed=1, has_pairs=has_pairs)
        given = {"train": train, "dev": dev, "text_b": "text_b" if has_pairs else None, "output": tmp_path / "out"}
        return FinetuneConfig(**({"model": encoder_folder, "device": "cpu"} | QUICK | given | departures))

    return build


@pytest.mark.parametrize(
    ("phases", "length", "untrained"),
    [((), 16, None), ((), 24, 16), (("fraction=0.5", "length=24"), 24, None), (("length=8", "fraction=0.5"), 24, 16)],
)
def test_positions_that_were_never_trained_are_told(settings, run_config, capsys, phases, length, untrained):
    run = run_config(steps=2, phases=phases)
    pretrain(run)
    finetune(settings(model=run.output, length=length, epochs=1))
    told = re.findall(
        r"pre-trained on rows of (\d+) tokens: .* untrained, unless --length \1\n", capsys.readouterr().err
    )
    assert told == ([] if untrained is None else [str(untrained)])


@pytest.mark.parametrize(
    ("kind", "has_pairs"),
    [("classification", False), ("classification", True), ("multi-label", False), ("regression", False)],
)
def test_each_kind_of_task_is_learnt(settings, kind, has_pairs):
    result = finetune(settings(kind, has_pairs))
    assert result.kind == kind
    assert next(iter(result.median["dev"].values())) > 0.95


@pytest.fixture
def tuned(settings):
    """A finished fine-tuning of three classes, two seeds."""
    return finetune(settings(seeds=2, ensemble=True, epochs=8))


def test_seeds_are_measured_alone_and_together(tuned, tmp_path):
    assert len(tuned.seeds) == 2
    assert tuned.seeds[0] != tuned.seeds[1] or tuned.seeds[0]["dev"]["accuracy"] == 1
    assert tuned.ensemble["dev"]["accuracy"] > 0.9
    assert "median of 2 seeds" in str(tuned)
    assert {"curves.png", "confusion.png", "metrics.jsonl", "result.json", "model"} <= {
        path.name for path in (tmp_path / "out" / "seed-1").iterdir()
    }
    assert not (tmp_path / "out" / "seed-1" / "checkpoints").exists()


def test_what_is_finished_is_not_run_again(tuned, settings, monkeypatch):
    monkeypatch.setattr("electra.finetuning.job.Trainer", None)  # would fail
    assert finetune(settings(seeds=2, ensemble=True, epochs=8)) == tuned


def test_what_is_no_fine_tuned_model_is_told_apart(tuned, tmp_path, capsys):
    unfinished = tmp_path / "begun"
    (unfinished / "seed-1").mkdir(parents=True)
    (unfinished / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    main(f"export --model {tmp_path}/out --output {tmp_path}/hf".split())
    capsys.readouterr()
    for folder, sentence in (
        (unfinished, "it is not finished: the same electra finetune command goes on"),
        (tmp_path / "hf", "is a classifier of texts, ElectraForSequenceClassification, which is for transformers"),
    ):
        with pytest.raises(SystemExit):
            main(f"evaluate --model {folder} --input nothing.csv".split())
        assert sentence in capsys.readouterr().err


def test_evaluate_and_predict_say_what_training_measured(tuned, tmp_path):
    found = evaluate(EvaluateConfig(model=tmp_path / "out", input=tmp_path / "dev.jsonl"))
    best = max(seed["dev"]["accuracy"] for seed in tuned.seeds)
    assert found.measures["accuracy"] == best
    assert sum(map(sum, found.confusion)) == 60
    assert sum(found.confusion[k][k] for k in range(3)) == round(best * 60)

    out = tmp_path / "answers.csv"
    assert predict(PredictConfig(model=tmp_path / "out", input=tmp_path / "dev.jsonl", output=out)).rows == 60
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert sum(row["label"] == row["prediction"] for row in rows) == round(best * 60)
    assert sum(float(rows[0][f"p({name})"]) for name in ("cat", "dog", "bird")) == pytest.approx(1, abs=1e-3)


def test_predictions_do_not_depend_on_how_many_rows_are_in_memory(tuned, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    config = {"model": tmp_path / "out", "input": tmp_path / "dev.jsonl"}
    predict(PredictConfig(**config, output=whole))
    monkeypatch.setattr("electra.finetuning.predict.ROWS", 7)
    predict(PredictConfig(**config, output=parts))
    said = [[json.loads(line)["prediction"] for line in file.read_text().splitlines()] for file in (whole, parts)]
    assert said[0] == said[1]


def test_prediction_needs_no_labels_and_evaluation_does(tuned, tmp_path, capsys):
    (tmp_path / "bare.csv").write_text('text\n"the big cat sat on the red mat ."\n')
    predict(PredictConfig(model=tmp_path / "out", input=tmp_path / "bare.csv", output=tmp_path / "answers.tsv"))
    header, row = (tmp_path / "answers.tsv").read_text().splitlines()
    assert header.split("\t")[:2] == ["text", "prediction"]
    assert row.split("\t")[1] == "cat"
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", str(tmp_path / "out"), "--input", str(tmp_path / "bare.csv")])
    assert "has no column 'label' with labels to measure by" in capsys.readouterr().err


def test_a_fine_tuned_model_can_be_taken_further(tuned, settings, tmp_path):
    result = finetune(settings("regression", model=tmp_path / "out" / "seed-1" / "model", output=tmp_path / "further"))
    assert result.median["dev"]["pearson"] > 0.9


def test_other_settings_are_refused_by_name(tuned, settings):
    with pytest.raises(ValueError, match="started with other settings: --batch was 16 and is now 8"):
        finetune(settings(seeds=2, epochs=8, batch=8))


def test_an_interrupted_run_goes_on_to_the_same_weights(settings, tmp_path, monkeypatch):
    """A checkpoint in the middle, then a death: the rest of the epochs is as if nothing had happened."""
    monkeypatch.setattr("electra.finetuning.job.OFTEN_SAVED", 1)
    departures = {"dropout": 0.1, "epochs": 4}
    finetune(settings(**departures, output=tmp_path / "whole"))
    from electra.finetuning.job import FinetuningTask

    with monkeypatch.context() as dying:
        dying.setattr(FinetuningTask, "evaluate", dies_the_second_time(FinetuningTask.evaluate))
        with pytest.raises(KeyboardInterrupt):
            finetune(settings(**departures, output=tmp_path / "broken"))
    finetune(settings(**departures, output=tmp_path / "broken"))
    whole, broken = (tmp_path / name / "seed-1" / "model" / "model.safetensors" for name in ("whole", "broken"))
    assert whole.read_bytes() == broken.read_bytes()


def dies_the_second_time(function):
    """The function, which is interrupted when it is called again."""
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


def test_texts_that_were_cut_are_reported(settings):
    result = finetune(settings(length=8, epochs=1))
    assert result.truncated["train"] == 240
    assert "240 train rows were cut to --length" in str(result)


WRONG = {
    "missing label column": (
        "a,b\n1,2\n3,4\n",
        "no column 'label'; the columns are 'a', 'b'",
    ),
    "missing text column": (
        "a,label\n1,2\n3,4\n",
        "no column 'text'; the columns are 'a', 'label'",
    ),
    "empty file": ("", "no rows"),
    "one class": ("text,label\na,x\nb,x\n", "every label is 'x'"),
    "too many fields": ("text,label\na,x\nb,y,z\n", "line 3"),
    "no label": ("text,label\na,x\nb,\nc,y\n", "line 3: the label is empty"),
    "nan score": ("text,label\na,1.5\nb,nan\nc,2.5\n", "line 3: the score is 'nan'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_files_are_one_sentence_and_exit_code_2(encoder_folder, tmp_path, capsys, name):
    content, sentence = WRONG[name]
    (tmp_path / "rows.csv").write_text(content)
    flags = ["--model", str(encoder_folder), "--train", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as exit:
        main(["finetune", *flags, "--length", "32"])
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert sentence in error
    assert str(tmp_path / "rows.csv") in error
    assert not list(tmp_path.glob("out/seed-*"))


def test_after_a_mistake_the_same_folder_will_do(encoder_folder, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("words,label\n" + "the cat sat .,x\nthe dog ran .,y\n" * 10)
    flags = ["--model", str(encoder_folder), "--train", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "out")]
    flags += ["--length", "32", "--epochs", "1"]
    with pytest.raises(SystemExit):
        main(["finetune", *flags])
    main(["finetune", *flags, "--text", "words"])
    assert "dev accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "give --task with --data (GLUE), or --train (a file of your own); neither came"),
        (["--task", "rte"], "--task needs --data"),
        (["--task", "rte", "--data", "nowhere"], "found none of nowhere/RTE/train.tsv"),
        (["--task", "rtf", "--data", "."], "unknown task 'rtf'; choose from cola"),
        (["--train", "x.csv", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--train", "x.csv"], "x.csv, the file of the train rows, does not exist"),
        (["--train", "x.csv", "--ensemble"], "an ensemble of one is the model itself; give --seeds 2 or more"),
    ],
)
def test_wrong_settings_are_one_sentence(encoder_folder, tmp_path, capsys, flags, sentence):
    with pytest.raises(SystemExit) as exit:
        main(["finetune", "--model", str(encoder_folder), "--output", str(tmp_path / "out"), *flags])
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_label_that_only_dev_has_is_named(encoder_folder, tmp_path, capsys):
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "dev.csv").write_text("text,label\na,x\nb,z\n")
    files = ["--train", str(tmp_path / "train.csv"), "--dev", str(tmp_path / "dev.csv")]
    with pytest.raises(SystemExit):
        main(["finetune", "--model", str(encoder_folder), "--output", str(tmp_path / "out"), "--length", "32", *files])
    assert "dev.csv, line 3: unknown label 'z'" in capsys.readouterr().err


def test_a_fine_tuned_model_without_its_tokenizer_is_named(tuned, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "out" / "seed-1" / "model", copy)
    for file in copy.glob("*token*"):
        file.unlink()
    (copy / "vocab.txt").unlink(missing_ok=True)
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", str(copy), "--input", str(tmp_path / "dev.jsonl")])
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_an_exported_model_gives_the_same_answers_in_transformers(settings, tmp_path, kind):
    config = settings(kind, epochs=2)
    finetune(config)
    export(ExportConfig(model=config.output, output=tmp_path / "hf"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    inputs = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**inputs).logits.numpy()
    answers = Answers(EvaluateConfig(model=config.output, input=tmp_path / "dev.jsonl"))
    [(_, ours)] = answers.chunks(tmp_path / "dev.jsonl", labelled=False)
    expected = ours if answers.task.labels else answers.task.denormalize_scores(ours)
    assert np.abs(theirs - expected).max() < 1e-5
    assert [model.config.id2label[number] for number in range(len(expected[0]))] == list(
        answers.task.labels or ["score"]
    )


@pytest.fixture
def untrained(settings, tmp_path):
    """A fine-tuned model that has learnt nothing yet."""
    start = load_pretrained(settings().model)
    encoder, folder = start.encoder, start.folder
    task = settings().the_task()
    (tmp_path / "out").mkdir()
    save_finetuned(TaskModel(encoder, task.num_labels), task, 32, tmp_path / "out", folder)


def answers_on(tmp_path, content: str, name: str = "new.jsonl", output: str = "answers.csv") -> str:
    """What is written of a file."""
    (tmp_path / name).write_text(content)
    predict(PredictConfig(model=tmp_path / "out", input=tmp_path / name, output=tmp_path / output))
    return (tmp_path / output).read_text()


def test_cells_stand_below_their_column_whatever_the_order_in_a_row(untrained, tmp_path):
    rows = ['{"id": 1, "text": "cat", "tags": [1, 2]}', '{"text": "dog", "id": 2}']
    first, second = csv.DictReader(answers_on(tmp_path, "\n".join(rows)).splitlines())
    assert (first["id"], first["text"], first["tags"]) == ("1", "cat", "1|2")
    assert (second["id"], second["text"], second["tags"]) == ("2", "dog", "")


def test_tsv_is_written_as_it_is_read(untrained, tmp_path):
    written = answers_on(tmp_path, 'text\n"big" cat\n', "new.tsv", "answers.tsv")
    assert written.splitlines()[1].startswith('"big" cat\t')


def test_half_a_character_is_written_as_it_was_read(untrained, tmp_path):
    assert json.loads(answers_on(tmp_path, '{"text": "\\ud83d!"}', output="answers.jsonl"))["text"] == "?!"


@pytest.mark.parametrize(
    ("content", "output", "sentence"),
    [
        ('{"text": "a"}\n{"text": "a", "prediction": 1}', "b.csv", "line 2: there is a column 'prediction' already"),
        ('{"text": "a"}\n{"text": "a", "id": 1}', "b.csv", "line 2: the first row has no column 'id'"),
        ('{"text": "a\\tb"}', "b.tsv", "line 1: a cell has a tab or line end in it; .tsv cannot hold it"),
        ('{"text": "a\\nb"}', "b.tsv", "line 1: a cell has a tab or line end in it; .tsv cannot hold it"),
        ('{"text": "a"}', "new.jsonl", "as --input is; choose another name"),
        ('{"text": "a"}', "b.csv.gz", "its name must end in .jsonl, .csv, .tsv"),
    ],
)
def test_what_cannot_be_written_is_named(untrained, tmp_path, content, output, sentence):
    with pytest.raises(ValueError, match=sentence):
        answers_on(tmp_path, content, output=output)
    assert (tmp_path / "new.jsonl").read_text() == content
    assert not list(tmp_path.glob("b.*"))


def test_answers_cut_texts_where_fine_tuning_did(settings, tmp_path):
    result = finetune(settings(length=8, epochs=1))
    found = evaluate(EvaluateConfig(model=tmp_path / "out", input=tmp_path / "dev.jsonl"))
    assert found.truncated == result.truncated["dev"] == 60
    assert found.measures == result.median["dev"]
    with pytest.raises(ValueError, match="longer than the model's 32 positions"):
        evaluate(EvaluateConfig(model=tmp_path / "out", input=tmp_path / "dev.jsonl", length=64))


def test_scores_are_written_with_six_digits(settings, tmp_path):
    finetune(settings("regression", epochs=1))
    (tmp_path / "new.csv").write_text("text\nthe big cat sat on the red mat .\n")
    for name in ("answers.csv", "answers.jsonl"):
        predict(PredictConfig(model=tmp_path / "out", input=tmp_path / "new.csv", output=tmp_path / name))
        score = re.search(r"\d+\.\d+", (tmp_path / name).read_text())[0]
        assert len(score.replace(".", "").lstrip("0")) <= 6


def test_one_model_is_no_ensemble(untrained, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"text": "cat", "label": "cat"}')
    with pytest.raises(
        ValueError, match=r"there is one model in .*, and an ensemble of one is the model itself; leave"
    ):
        evaluate(EvaluateConfig(model=tmp_path / "out", input=tmp_path / "new.jsonl", ensemble=True))


def test_a_finished_fine_tuning_stands_for_its_best_seed(tuned, settings, tmp_path):
    finetune(settings(model=tmp_path / "out", output=tmp_path / "further", epochs=1))
    record = json.loads((tmp_path / "further" / "config.json").read_text())
    best = max((1, 2), key=lambda seed: tuned.seeds[seed - 1]["dev"]["accuracy"])
    assert record["settings"]["model"] == str(tmp_path / "out" / f"seed-{best}" / "model")


def test_all_seeds_together_say_what_they_say_on_average(settings, tmp_path):
    config = settings()
    said = {1: [[4.0, 0.0, 0.0]], 2: [[0.0, 1.0, 0.0]]}
    cells = [Job(config, config.the_task(), seed, tmp_path / str(seed)) for seed in said]
    for cell in cells:
        cell.folder.mkdir()
        write_tensors(cell.folder / "logits.safetensors", {"dev": torch.tensor(said[cell.seed])})
    assert mean_logits(cells)["dev"].tolist() == [[2.0, 0.5, 0.0]]


def score_of(seed: int, pearson: float) -> Score:
    """A seed of which only this is known."""
    return Score("made", seed, {"dev": {"pearson": pearson}}, steps=1, seconds=1.0, rows={}, truncated={})


@pytest.mark.parametrize(
    ("values", "median"),
    [([0.5, math.nan, 0.75], 0.5), ([math.nan, 0.5, 0.75], 0.5), ([0.25, 0.75], 0.5), ([math.nan, 1.0], math.nan)],
)
def test_a_seed_without_a_correlation_is_below_all_others(values, median):
    medians, spreads = over_seeds([score_of(seed, value) for seed, value in enumerate(values, start=1)])
    assert medians["dev"]["pearson"] == pytest.approx(median, nan_ok=True)
    assert math.isnan(spreads["dev"]["pearson"]) == any(map(math.isnan, values))


def test_constant_predictions_are_null_in_json(settings, capsys, tmp_path):
    """Empty texts are all one to the encoder, so the correlation is of nothing."""
    config = settings("regression", epochs=1)
    rows = [json.loads(line) | {"text": ""} for line in config.dev.read_text().splitlines()]
    config.dev.write_text("\n".join(map(json.dumps, rows)))
    flags = {"--model": config.model, "--train": config.train, "--dev": config.dev, "--output": config.output}
    main(
        ["finetune", *(str(word) for flag in flags.items() for word in flag), "--length", "32", "--epochs=1", "--json"]
    )

    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["median"]["dev"]["pearson"] is None
    for file in ("result.json", "metrics.jsonl"):
        assert "NaN" not in (tmp_path / "out" / "seed-1" / file).read_text()


def test_flags_that_would_be_ignored_are_refused(encoder_folder, tmp_path, capsys):
    common = ["finetune", "--model", str(encoder_folder), "--output", str(tmp_path / "out")]
    for flags, sentence in (
        (["--task", "rte", "--data", "glue", "--dev-fraction", "0.2"], "--dev-fraction does not go with --task"),
        (["--train", "x.csv", "--data", "glue"], "--data does not go with --train"),
    ):
        with pytest.raises(SystemExit):
            main([*common, *flags])
        assert sentence in capsys.readouterr().err
