"""Multiple choice: any number of choices, labels in every form, and the same scores in transformers."""

import csv
import json

import numpy as np
import pytest
import torch
from conftest import error_message, run
from synthetic import write_choices
from transformers import AutoModelForMultipleChoice, AutoTokenizer
from transformers_models import load_without_warnings

import electra
from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning.config import PredictorConfig, TaskConfig
from electra.finetuning.features import NO_LOGIT, compute_logits, epoch_batches, make_features
from electra.finetuning.kinds import define_task, read_examples
from electra.finetuning.models import ChoiceModel
from electra.finetuning.predict import Predictor
from electra.finetuning.storage import load_pretrained


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_choices_are_learnt_predicted_and_exported(encoder_folder, modern_folder, tmp_path, capsys, caplog, style):
    model = {"classic": encoder_folder, "modern": modern_folder}[style]
    rows, path = write_choices(tmp_path / "rows.jsonl", 80, seed=0), tmp_path / "rows.jsonl"
    flags = "--kind choice --epochs 8 --learning-rate 1e-2 --batch-size 16 --length 32 --device cpu --dropout 0"
    pooling = "--pooling mean" if style == "modern" else ""
    tuned = f"finetune --model {model} --train {path} --dev {path} --output {tmp_path}/out {flags} {pooling}"
    result = json.loads(run(f"{tuned} --device cpu --json", capsys))
    accuracy = result["median"]["dev"]["accuracy"]
    assert accuracy > 0.9
    chance = np.mean([1 / len(row["choices"]) for row in rows])
    assert result["baseline"] == {"accuracy": pytest.approx(chance)}
    assert result["assessment"]["baseline"].startswith("Better than choosing at random")
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == {"accuracy": accuracy}
    run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/out.jsonl --device cpu", capsys)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [list(row) for row in written[:1]] == [[*rows[0], "prediction", "probabilities"]]
    assert np.mean([row["prediction"] == row["label"] for row in written]) == accuracy
    for row in written:
        assert len(row["probabilities"]) == len(row["choices"])
        assert sum(row["probabilities"]) == pytest.approx(1, abs=1e-3)

    loaded = electra.load(tmp_path / "out", device="cpu")
    for row, expected in zip(rows[:5], written, strict=False):
        assert row | loaded.predict([row])[0] == expected
    with pytest.raises(ConfigError, match="needs each row as a dictionary"):
        loaded.predict(["the cat"])

    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    theirs = load_without_warnings(AutoModelForMultipleChoice, tmp_path / "hf", caplog)
    assert type(theirs).__name__ == f"{'Electra' if style == 'classic' else 'ModernBert'}ForMultipleChoice"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    predictor = Predictor(PredictorConfig(model=tmp_path / "out", input=path, device="cpu"))
    [ours] = [outputs.logits for outputs in predictor.stream_outputs(path, with_labels=False)]
    for row, logits in zip(rows[:20], ours, strict=False):
        seconds = [f"{row['question']} {choice}" for choice in row["choices"]]
        inputs = tokenizer([row["context"]] * len(seconds), seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = theirs.eval()(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0].numpy()
        assert np.abs(expected - logits[: len(expected)]).max() < 1e-5
        assert (logits[len(expected) :] == np.float32(NO_LOGIT)).all()


def test_other_rows_of_a_batch_do_not_change_the_scores_of_a_choice(encoder_folder, tmp_path):
    write_choices(tmp_path / "rows.jsonl", 12, seed=1)
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", dev=tmp_path / "rows.jsonl", kind="choice"))
    pretrained = load_pretrained(encoder_folder)
    model = ChoiceModel(pretrained.encoder, 1).eval()
    features = make_features(read_examples(task, "train"), pretrained.load_tokenizer(), 32)
    together, alone = (compute_logits(model, features, size, 32, pad_id=0) for size in (48, 1))
    assert np.abs(together - alone).max() < 1e-5


def test_padding_choices_have_no_gradient(encoder_folder, tmp_path):
    write_choices(tmp_path / "rows.jsonl", 12, seed=1)
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", dev=tmp_path / "rows.jsonl", kind="choice"))
    pretrained = load_pretrained(encoder_folder)
    model = ChoiceModel(pretrained.encoder, 1)
    features = make_features(read_examples(task, "train"), pretrained.load_tokenizer(), 32)
    lengths, counts = features.row_sizes()
    [batch] = epoch_batches(lengths, 12, 32, seed=1, epoch=0, counts=counts)
    assert batch.slots == 4
    logits = model(*features.collate(batch, pad_id=0))
    torch.nn.functional.cross_entropy(logits, features.labels[batch.rows]).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.head.parameters())
    probabilities = logits.softmax(1)
    assert (probabilities[:, 4:] == 0).all()
    assert ((probabilities > 0).sum(1) == torch.from_numpy(counts)[batch.rows]).all()


def test_rows_with_equally_many_choices_are_batched_together():
    counts, lengths = np.array([2, 5, 2, 5, 2, 5, 2, 5]), np.full(8, 20)
    batches = list(epoch_batches(lengths, 4, 64, seed=1, epoch=0, counts=counts))
    assert sorted((batch.slots, batch.num_tokens) for batch in batches) == [(2, 4 * 2 * 32), (5, 4 * 5 * 32)]


@pytest.fixture
def choice_task(tmp_path):
    """Define a task of rows in a .jsonl or .csv file."""

    def define(content, name="rows.jsonl", **settings):
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text)
        return define_task(TaskConfig(train=tmp_path / name, dev=tmp_path / name, kind="choice", **settings))

    return define


@pytest.mark.parametrize(
    ("labels", "form", "indices"),
    [
        ([0, 1, 2], "index", [0, 1, 2]),
        (["0", "1", "2"], "index", [0, 1, 2]),
        ([1.0, 3.0, 2.0], "number", [0, 2, 1]),
        (["A", "C", "B"], "letter", [0, 2, 1]),
        (["a", "c", "b"], "small letter", [0, 2, 1]),
        (["red", "big ", "small"], "text", [2, 0, 1]),
    ],
)
def test_labels_name_a_choice_in_one_of_five_forms(choice_task, labels, form, indices):
    task = choice_task([{"choices": ["big", "small", "red"], "label": label} for label in labels])
    assert task.choice_label == form
    assert read_examples(task, "train").labels.tolist() == indices


def test_numbers_as_choices_are_not_taken_for_indices(choice_task):
    rows = [{"choices": ["3", "1", "2"], "label": "1"}, {"choices": ["5", "6"], "label": "6"}]
    assert read_examples(choice_task(rows), "train").labels.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "c", "text_b": "q"}, [("context", "question big"), ("context", "question red")]),
        ({"text": "c"}, [("context", "big"), ("context", "red")]),
        ({"text_b": "q"}, [("question", "big"), ("question", "red")]),
        ({}, [("big",), ("red",)]),
    ],
)
def test_context_and_question_are_optional(choice_task, columns, expected):
    row = {"c": "context", "q": "question", "choices": ["big", "red"], "label": 0}
    examples = read_examples(choice_task([row, row], **columns), "train")
    texts = [examples.texts] if examples.texts_b is None else [examples.texts, examples.texts_b]
    assert list(zip(*texts, strict=True)) == expected * 2
    assert (len(examples), examples.counts.tolist()) == (2, [2, 2])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("context", "question")),
        ({"text": "question"}, ("question", None)),
        ({"text_b": "other"}, ("context", "other")),
        ({"label": "question"}, ("context", None)),
    ],
)
def test_columns_named_context_and_question_are_read_unless_others_are_set(choice_task, settings, expected):
    row = {"context": "a", "question": 0, "other": "c", "choices": ["big", "red"], "label": 0}
    if "label" not in settings:
        row["question"] = "b"
    task = choice_task([row, row], **settings)
    assert (task.text, task.text_b) == expected


def test_a_csv_has_a_column_for_each_choice_and_the_last_may_be_empty(choice_task, encoder_folder, tmp_path, capsys):
    content = "q,one,two,three,label\nthe cat,sat,ran,flew,C\nthe dog,sat,ran,,B\n"
    task = choice_task(content, "rows.csv", text="q", choices=("one", "two", "three"))
    examples = read_examples(task, "train")
    assert (examples.counts.tolist(), examples.labels.tolist()) == ([3, 2], [2, 1])
    columns = "--text q --choices one two three"
    files = f"--train {tmp_path}/rows.csv --dev {tmp_path}/rows.csv --output {tmp_path}/out"
    run(f"finetune --model {encoder_folder} {files} --kind choice {columns} --epochs 1 --length 32", capsys)
    run(f"predict --model {tmp_path}/out --input {tmp_path}/rows.csv --output {tmp_path}/out.csv", capsys)
    with (tmp_path / "out.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["prediction"] in "ABC", second["prediction"] in "AB") == (True, True)
    assert [row["probabilities"].count("|") for row in (first, second)] == [2, 1]


def test_held_out_rows_keep_their_choices(tmp_path):
    rows = write_choices(tmp_path / "rows.jsonl", 20, seed=2)
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind="choice", dev_fraction=0.25))
    train, dev = (read_examples(task, split) for split in ("train", "dev"))
    assert (len(train), len(dev)) == (15, 5)
    for examples in (train, dev):
        choices = [text.removeprefix("in the house ") for text in examples.texts_b]
        groups = np.split(np.array(choices, object), examples.counts.cumsum()[:-1])
        found = [next(row for row in rows if row["choices"] == list(group)) for group in groups]
        assert [row["label"] for row in found] == examples.labels.tolist()


def test_a_row_of_which_one_choice_is_truncated_counts_once(choice_task, shards):
    long = "the big cat sat on the red mat ."
    task = choice_task([{"choices": [long, long], "label": 0}, {"choices": ["a", "b"], "label": 0}])
    features = make_features(read_examples(task, "train"), load_tokenizer(shards / "tokenizer"), 8)
    assert features.is_truncated.sum() == 1
    assert len(features) == 2


GOOD = {"choices": ["big", "small", "red"], "label": 0}


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"choices": ["big"], "label": 0}, {}, "line 2: the number of choices is 1; it must be 2 to 26"),
        ({"choices": ["a"] * 27, "label": 0}, {}, "line 2: the number of choices is 27; it must be 2 to 26"),
        ({"choices": ["big", " "], "label": 0}, {}, "line 2: choice 2 is empty"),
        ({"choices": ["big", None], "label": 0}, {}, "line 2: choice 2 is empty"),
        ({"choices": ["big", 7], "label": 0}, {}, "line 2: choice 2 holds a int; a text must be a string"),
        ({"choices": "big", "label": 0}, {}, "line 2: column 'choices' holds a str; it must be a list of texts"),
        ({"label": 0}, {}, "line 2: no column 'choices'; the columns are 'label'; --text, --text-b, --choices and"),
        ({"choices": ["big", "red"]}, {}, "line 2: no column 'label'"),
        ({"choices": ["big", "red"], "label": None}, {}, "line 2: the label is empty"),
        ({"choices": ["big", "red"], "label": 2}, {}, "line 2: the label is '2'; with 2 choices .* must be 0 to 1"),
        ({"choices": ["big", "red"], "label": -1}, {}, "line 2: the label is '-1'; with 2 choices .* must be 0 to 1"),
        (GOOD, {"text": "context"}, "line 1: no column 'context'"),
    ],
)
def test_rows_that_are_not_multiple_choice_are_errors(choice_task, row, settings, message):
    with pytest.raises(DataError, match=message):
        read_examples(choice_task([GOOD, row, GOOD, GOOD], **settings), "train")


def test_choices_need_their_kind(tmp_path):
    with pytest.raises(ValueError, match="--choices needs --kind choice"):
        TaskConfig(train=tmp_path / "rows.jsonl", choices=("a", "b"))


@pytest.mark.parametrize("files", ["--train {0}/bad.jsonl", "--train {0}/good.jsonl --dev {0}/bad.jsonl"])
def test_a_wrong_label_is_one_sentence_before_anything_is_written(encoder_folder, tmp_path, capsys, files):
    for name, rows in {"good": [GOOD] * 3, "bad": [GOOD, GOOD | {"label": 3}, GOOD]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--model {encoder_folder} {files.format(tmp_path)} --output {tmp_path}/out --kind choice"
    assert "line 2: the label is '3'" in error_message(f"finetune {flags}", capsys)
    assert not (tmp_path / "out").exists()
