"""Models to fine-tune and fine-tuned models: what is loaded equals what was saved."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import WIDE, saved_discriminator
from synthetic import write_rows

from electra.errors import DataError
from electra.finetuning.config import TaskConfig
from electra.finetuning.kinds import define_task
from electra.finetuning.models import TaskModel
from electra.finetuning.storage import build_task_model, load_finetuned_model, load_pretrained, save_finetuned_model


@pytest.mark.parametrize(("dropout", "expected"), [(None, 0.3), (0.0, 0.0), (0.2, 0.2)])
def test_dropout_defaults_to_that_of_pre_training(tmp_path, shards, dropout, expected):
    config = replace(WIDE, dropout=0.3, attention_dropout=0.3)
    folder = saved_discriminator(config, tmp_path / "model", shards / "tokenizer")
    model = build_task_model(load_pretrained(folder, dropout), num_labels=2, seed=1)
    layer = model.encoder.layers[0]
    assert (layer.dropout.p, layer.attention.dropout, model.head.dropout.p) == (expected, expected, expected)


@pytest.fixture
def saved(encoder_folder, tmp_path):
    """A model folder of an untrained regression model, the model and its task."""
    rows = write_rows(tmp_path / "rows.jsonl", "regression", 20, seed=0)
    task = define_task(TaskConfig(train=rows))
    pretrained = load_pretrained(encoder_folder)
    model = TaskModel(pretrained.encoder, task.num_labels).eval()
    (tmp_path / "model").mkdir()
    save_finetuned_model(model, task, 32, tmp_path / "model", pretrained.folder)
    return tmp_path / "model", model, task


def test_a_saved_model_is_loaded_unchanged(saved):
    folder, model, task = saved
    loaded, config = load_finetuned_model(folder)
    assert (config.task, config.length) == (task, 32)
    input_ids = torch.tensor([[2, 5, 6, 3]])
    inputs = (input_ids, torch.ones_like(input_ids, dtype=torch.bool), torch.zeros_like(input_ids))
    assert torch.equal(model(*inputs), loaded(*inputs))
    encoder = load_pretrained(folder).encoder  # to fine-tune further
    assert torch.equal(encoder.eval()(input_ids), model.encoder(input_ids))


def test_the_head_of_a_further_fine_tuning_does_not_depend_on_where_files_are(saved, encoder_folder):
    folder, model, task = saved
    heads = []
    for file in ("here/rows.jsonl", "there/rows.jsonl"):
        save_finetuned_model(model, replace(task, splits={"train": file}), 32, folder, encoder_folder)
        heads.append(build_task_model(load_pretrained(folder), num_labels=2, seed=1).head.weight)
    assert torch.equal(*heads)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ((), {"pooling": "max"}, "'max'"),
        ((), {"length": -1}, "length is -1; it must be at least 1"),
        (("encoder",), {"layers": 1_000}, "has layers 1,000, but the weights have no more than"),
        (("task",), {"labels": ["a"]}, "labels has 1 classes, but the task is regression"),
    ],
)
def test_stored_settings_are_checked(saved, part, values, message):
    folder, _, _ = saved
    settings = json.loads((folder / "config.json").read_text())
    (settings[part[0]] if part else settings).update(values)
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=rf"config.json .*{message}"):
        load_finetuned_model(folder)


def test_a_pre_trained_model_is_not_a_fine_tuned_one(encoder_folder):
    with pytest.raises(DataError, match="is not a fine-tuned model; create one with: electra finetune"):
        load_finetuned_model(encoder_folder)
