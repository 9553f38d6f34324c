"""Fine-tuned models: equal to a linear head over transformers' encoder, and at home in their folders."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import WIDE, saved_discriminator
from made import write_rows
from transformers import BertConfig, BertModel, ElectraModel
from transformers_models import random_model

from electra.cli import main
from electra.errors import DataError
from electra.finetuning.job import FinetuningTask, TuningConfig
from electra.finetuning.model import OUTPUT_TYPES, TaskModel, load_finetuned, load_pretrained, save_finetuned
from electra.finetuning.tasks import custom_task
from electra.training.config import Budget
from electra.training.trainer import Trainer


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and segments of three padded pairs."""
    lengths = torch.tensor([[16], [9], [12]])
    place = torch.arange(16)
    input_ids = torch.randint(5, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    return torch.where(place < lengths, input_ids, 0), place < lengths, ((place >= 5) & (place < lengths)).long()


@pytest.mark.parametrize("kind", [ElectraModel, BertModel])
def test_logits_equal_a_linear_head_over_transformers_encoder(tmp_path, kind):
    theirs = random_model(kind, **({"config_class": BertConfig, "size": "base"} if kind is BertModel else {}))
    theirs.save_pretrained(tmp_path)
    encoder = load_pretrained(tmp_path, dropout=0.0).encoder
    ours = TaskModel(encoder, num_labels=3)
    input_ids, attention_mask, segment_ids = rows()
    hidden = theirs(input_ids, attention_mask.long(), segment_ids).last_hidden_state[:, 0]
    expected = hidden @ ours.head.weight.T + ours.head.bias
    logits = ours(input_ids, attention_mask, segment_ids)
    assert (logits - expected).abs().max() < 1e-6
    labels = torch.tensor([0, 2, 1])
    loss = OUTPUT_TYPES["classification"].loss(logits, labels).mean()
    assert abs(loss - torch.nn.functional.cross_entropy(expected, labels)) < 1e-6


@pytest.mark.parametrize(("wanted", "found"), [(None, 0.3), (0.0, 0.0), (0.2, 0.2)])
def test_dropout_is_the_pre_trained_models_own_unless_given(tmp_path, shards, wanted, found):
    config = replace(WIDE, dropout=0.3, attention_dropout=0.3)
    folder = saved_discriminator(config, tmp_path / "model", shards / "tokenizer")
    rows = write_rows(tmp_path / "rows.jsonl", "classification", 40, seed=0)
    tuning = TuningConfig(model=folder, output=tmp_path, dropout=wanted, length=32)
    lesson = FinetuningTask(
        tuning, custom_task(train=rows, text="text", label="label"), seed=1, cache=tmp_path / "tokens"
    )
    layer = lesson.model.encoder.layers[0]
    assert (layer.dropout.p, layer.attention.dropout, lesson.model.head.dropout.p) == (found, found, found)


def test_ten_updates_equal_a_plain_loop(encoder_folder, tmp_path):
    """AdamW with a rate for every layer, warm-up, clipping: the trainer's steps are those of a loop by hand."""
    rows = write_rows(tmp_path / "rows.jsonl", "classification", 43, seed=0)  # 39 to learn from: one batch is filled up
    task = custom_task(train=rows, text="text", label="label")
    config = TuningConfig(model=encoder_folder, output=tmp_path, batch=4, epochs=2, dropout=0.0, length=32)
    lesson = FinetuningTask(config, task, seed=3, cache=tmp_path / "tokens")
    twin = FinetuningTask(config, task, seed=3, cache=tmp_path / "tokens")
    optimizer_config = config.optimizer(lesson.model.encoder.config)
    trainer_config = config.trainer(lesson.steps_an_epoch())
    trainer = Trainer(lesson, optimizer_config, trainer_config, Budget(steps=10), tmp_path, seed=3, quiet=True)
    trainer.train()

    share = {"head": 1.0, "encoder.layers.1": 0.8, "encoder.layers.0": 0.64, "encoder.": 0.8**3}
    groups = [
        {"params": [parameter], "share": next(value for prefix, value in share.items() if name.startswith(prefix))}
        for name, parameter in twin.model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0, eps=1e-6)
    for step in range(10):
        batch = twin.next_batch()
        logits = twin.model(*twin.train.collate(batch, 0))
        real = batch.weights.bool()
        loss = torch.nn.functional.cross_entropy(logits[real], twin.train.labels[batch.rows][real])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
        place = (step + 0.5) / 10
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * group["share"] * min(place / 0.1, (1 - place) / 0.9)
        optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(lesson.model.parameters(), fresh(config, task), strict=True))
    for (name, ours), theirs in zip(lesson.model.named_parameters(), twin.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5, name


def fresh(config, task):
    """The parameters before any update."""
    return list(FinetuningTask(config, task, seed=3, cache=config.output / "tokens").model.parameters())


@pytest.mark.parametrize(("is_faithful", "top", "table"), [(False, 0.8, 0.8**3), (True, 0.8**2, 0.8**4)])
def test_layers_learn_more_slowly_the_deeper_they_lie(encoder_folder, tmp_path, is_faithful, top, table):
    """The released code counts one layer too many; faithful does, too."""
    task = custom_task(
        train=write_rows(tmp_path / "rows.jsonl", "classification", 20, seed=0), text="text", label="label"
    )
    config = TuningConfig(model=encoder_folder, output=tmp_path, length=32, faithful=is_faithful)
    lesson = FinetuningTask(config, task, seed=1, cache=tmp_path / "tokens")
    assert lesson.lr_scale("head.weight") == 1
    assert lesson.lr_scale("encoder.layers.1.attention.qkv.weight") == pytest.approx(top)
    assert lesson.lr_scale("encoder.embeddings.token.weight") == pytest.approx(table)
    assert lesson.lr_scale("encoder.project.weight") == pytest.approx(table)


def test_settings_of_the_paper_by_size(tmp_path):
    from electra.model.config import BASE, LARGE, SMALL

    config = TuningConfig(model=tmp_path, output=tmp_path)
    rates = [config.optimizer(size).learning_rate for size in (SMALL, BASE, LARGE)]
    assert rates == [3e-4, 1e-4, 5e-5]
    assert [config.decay_for(size) for size in (SMALL, BASE, LARGE)] == [0.8, 0.8, 0.9]
    assert config.optimizer(SMALL).weight_decay == 0
    faithful = TuningConfig(model=tmp_path, output=tmp_path, faithful=True).optimizer(SMALL)
    assert (faithful.optimizer, faithful.schedule, faithful.weight_decay) == ("adam", "released", 0.01)


def test_a_folder_gives_back_the_same_model_and_task(encoder_folder, tmp_path):
    task = custom_task(train=write_rows(tmp_path / "rows.jsonl", "regression", 20, seed=0), text="text", label="label")
    start = load_pretrained(encoder_folder)
    encoder, folder = start.encoder, start.folder
    model = TaskModel(encoder, task.num_labels).eval()
    (tmp_path / "tuned").mkdir()
    save_finetuned(model, task, 32, tmp_path / "tuned", folder)
    again, its_task = load_finetuned(tmp_path / "tuned")
    assert its_task == task
    ids = torch.tensor([[2, 5, 6, 3]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    assert torch.equal(model(ids, mask, ids * 0), again(ids, mask, ids * 0))
    onwards = load_pretrained(tmp_path / "tuned").encoder  # to go on from, for another task
    assert torch.equal(onwards.eval()(ids), encoder.eval()(ids))


def test_a_classic_head_reads_the_first_token_only(encoder_folder, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", "classification", 20, seed=0)
    flags = f"--model {encoder_folder} --train {rows} --output {tmp_path}/out --length 32 --pooling mean"
    with pytest.raises(SystemExit) as exit:
        main(["finetune", *flags.split()])
    assert exit.value.code == 2
    assert "pooling is mean, but classic encoders support only cls" in capsys.readouterr().err


def test_what_a_folder_says_of_pooling_is_checked(encoder_folder, tmp_path):
    task = custom_task(train=write_rows(tmp_path / "rows.jsonl", "regression", 20, seed=0), text="text", label="label")
    start = load_pretrained(encoder_folder)
    encoder, folder = start.encoder, start.folder
    save_finetuned(TaskModel(encoder, task.num_labels), task, 32, tmp_path, folder)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["pooling"] == "cls"
    (tmp_path / "config.json").write_text(json.dumps(settings | {"pooling": "max"}))
    with pytest.raises(DataError, match=r"config.json: unknown pooling 'max'; choose from cls, mean"):
        load_finetuned(tmp_path)


def test_what_is_no_fine_tuned_model_is_named(encoder_folder):
    with pytest.raises(DataError, match="is not a fine-tuned model; create one with: electra finetune"):
        load_finetuned(encoder_folder)
