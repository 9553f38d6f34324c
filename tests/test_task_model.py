"""The fine-tuned model: equal to a linear head on transformers' encoder, and unchanged by its folder."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import WIDE, saved_discriminator
from synthetic import write_rows
from transformers import BertConfig, BertModel, ElectraModel
from transformers_models import random_model

from electra.errors import ConfigError, DataError
from electra.finetuning.config import TaskConfig
from electra.finetuning.heads import TaskModel, WindowModel
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.model import (
    build_task_model,
    load_finetuned_model,
    load_pretrained,
    save_finetuned_model,
)


def padded_pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and segment ids of three pairs."""
    lengths = torch.tensor([[16], [9], [12]])
    positions = torch.arange(16)
    input_ids = torch.randint(5, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    attention_mask = positions < lengths
    return torch.where(attention_mask, input_ids, 0), attention_mask, ((positions >= 5) & attention_mask).long()


@pytest.mark.parametrize("kind", [ElectraModel, BertModel])
def test_logits_equal_a_linear_head_on_the_encoder_of_transformers(tmp_path, kind):
    theirs = random_model(kind, **({"config_class": BertConfig, "size": "base"} if kind is BertModel else {}))
    theirs.save_pretrained(tmp_path)
    ours = TaskModel(load_pretrained(tmp_path, dropout=0.0).encoder, num_labels=3)
    input_ids, attention_mask, segment_ids = padded_pairs()
    hidden = theirs(input_ids, attention_mask.long(), segment_ids).last_hidden_state[:, 0]
    expected = hidden @ ours.head.weight.T + ours.head.bias
    logits = ours(input_ids, attention_mask, segment_ids)
    assert (logits - expected).abs().max() < 1e-6
    labels = torch.tensor([0, 2, 1])
    loss = KINDS["classification"].loss(logits, labels).mean()
    assert abs(loss - torch.nn.functional.cross_entropy(expected, labels)) < 1e-6


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


def test_classic_encoders_support_only_the_first_token(encoder_folder):
    with pytest.raises(ConfigError, match="classic encoders support only cls"):
        build_task_model(load_pretrained(encoder_folder), num_labels=2, pooling="mean", seed=1)


def test_a_pre_trained_model_is_not_a_fine_tuned_one(encoder_folder):
    with pytest.raises(DataError, match="is not a fine-tuned model; create one with: electra finetune"):
        load_finetuned_model(encoder_folder)


def test_the_head_of_windows_gets_the_mean_of_their_pooled_states(encoder_folder):
    torch.manual_seed(0)
    encoder = load_pretrained(encoder_folder).encoder
    model = WindowModel(encoder, num_labels=3).eval()
    input_ids = torch.randint(5, 20, (2, 3, 8))
    lengths = torch.tensor([[8, 8, 4], [5, 1, 1]])[..., None]  # the second row has one window; the others are missing
    attention_mask = torch.arange(8) < lengths
    logits = model(input_ids, attention_mask, torch.zeros_like(input_ids))
    states = [
        [encoder(window[None, :length])[0, 0] for window, length in zip(row, of_row, strict=True)]
        for row, of_row in zip(input_ids, lengths.squeeze(-1).tolist(), strict=True)
    ]
    expected = model.head(torch.stack([torch.stack(states[0]).mean(0), states[1][0]]))
    torch.testing.assert_close(logits, expected)
