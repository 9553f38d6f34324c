"""One fine-tuning run: the paper's hyperparameters, updates equal to a plain loop, resumption, each kind of task."""

import gc
import json
import random
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import WIDE, saved_discriminator
from synthetic import write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import electra
from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning import job as job_module
from electra.finetuning.config import TaskConfig, TuningConfig
from electra.finetuning.job import FinetuningTask, Job, build_trainer, check_job_converged
from electra.finetuning.kinds import define_task
from electra.finetuning.tasks import Examples, balanced_class_weights, balanced_positive_weights
from electra.model.config import BASE, LARGE, SMALL
from electra.model.storage import WEIGHTS, read_tensors
from electra.training.config import Budget, HardwareConfig
from electra.training.trainer import Trainer

QUICK = {"epochs": 8, "batch_size": 16, "learning_rate": 5e-3, "layer_decay": 1.0, "dropout": 0.0, "length": 32}


@pytest.fixture
def make_job(encoder_folder, tmp_path):
    """Build a job on synthetic rows, on the CPU."""

    def build(kind="classification", rows=240, has_pairs=False, model=encoder_folder, seed=1, output="out", **tuning):
        train = write_rows(tmp_path / "train.jsonl", kind, rows, seed=0, has_pairs=has_pairs)
        task = define_task(TaskConfig(train=train, text_b="text_b" if has_pairs else None))
        return Job(
            model=model,
            task=task,
            tuning=TuningConfig(**{"length": 32} | tuning),
            hardware=HardwareConfig(device="cpu"),
            seed=seed,
            folder=tmp_path / output / f"seed-{seed}",
        )

    return build


@pytest.mark.parametrize(
    ("kind", "has_pairs"),
    [("classification", False), ("classification", True), ("multi-label", False), ("regression", False)],
)
def test_each_kind_of_task_is_learned(make_job, kind, has_pairs):
    assert make_job(kind, has_pairs=has_pairs, **QUICK).run().main_metric > 0.95


@pytest.mark.parametrize("learning_rate", [50.0, 1e30])
def test_a_diverged_job_is_not_finished(make_job, learning_rate):
    job = make_job(rows=40, epochs=1, batch_size=16, learning_rate=learning_rate)
    for _ in range(2):  # also when the command is repeated
        with pytest.raises(TrainingError, match=r"training diverged: the (training|dev) loss is"):
            job.run()
    assert not job.is_finished()


@pytest.mark.parametrize(("loss", "has_diverged"), [(16.5, False), (101, True)])
def test_squared_errors_of_a_few_standard_deviations_are_no_divergence(make_job, loss, has_diverged):
    """The first steps of AdamW, at the full learning rate, may be that wrong."""
    task = FinetuningTask(make_job("regression", rows=20))
    metrics = [{"kind": "train", "loss": loss}, {"kind": "validation", "loss": loss}]
    with pytest.raises(TrainingError, match="diverged") if has_diverged else nullcontext():
        check_job_converged(task, metrics)


def test_ten_updates_equal_a_plain_loop(make_job):
    """AdamW with layer-wise learning rates, warm-up and gradient clipping."""
    job = make_job(rows=43, batch_size=4, epochs=2, dropout=0.0, seed=3)  # 39 training rows: one batch is incomplete
    task, plain = FinetuningTask(job), FinetuningTask(job)
    optimizer_config, trainer_config = job.tuning.optimizer_config(task.encoder_config), job.tuning.trainer_config(10)
    job.folder.mkdir()
    Trainer(task, optimizer_config, trainer_config, Budget(steps=10), job.folder, seed=3, quiet=True).train()

    scales = {"head": 1.0, "encoder.layers.1": 0.8, "encoder.layers.0": 0.64, "encoder.": 0.8**3}
    groups = [
        {"params": [parameter], "scale": next(value for prefix, value in scales.items() if name.startswith(prefix))}
        for name, parameter in plain.model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0, eps=1e-6)
    for step in range(10):
        batch = plain.next_batch()
        logits = plain.model(*plain.train.collate(batch, 0))
        is_real = batch.weights.bool()
        loss = torch.nn.functional.cross_entropy(logits[is_real], plain.train.labels[batch.rows][is_real])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        progress = (step + 0.5) / 10
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * group["scale"] * min(progress / 0.1, (1 - progress) / 0.9)
        optimizer.step()
    initial = FinetuningTask(job).model
    assert any(not torch.equal(a, b) for a, b in zip(task.model.parameters(), initial.parameters(), strict=True))
    for (name, ours), theirs in zip(task.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5, name


@pytest.mark.parametrize(("is_faithful", "top", "bottom"), [(False, 0.8, 0.8**3), (True, 0.8**2, 0.8**4)])
def test_learning_rates_decay_from_layer_to_layer(make_job, is_faithful, top, bottom):
    """The released code counts one layer too many; so does --faithful."""
    task = FinetuningTask(make_job(rows=20, faithful=is_faithful))
    assert task.lr_scale("head.weight") == 1
    assert task.lr_scale("encoder.layers.1.attention.qkv.weight") == pytest.approx(top)
    assert task.lr_scale("encoder.embeddings.token.weight") == pytest.approx(bottom)
    assert task.lr_scale("encoder.project.weight") == pytest.approx(bottom)


def test_hyperparameters_of_the_paper_by_size():
    tuning = TuningConfig()
    assert [tuning.optimizer_config(size).learning_rate for size in (SMALL, BASE, LARGE)] == [3e-4, 1e-4, 5e-5]
    assert tuning.optimizer_config(replace(SMALL, width=512)).learning_rate == 3e-4  # not in the paper
    assert [tuning.layer_decay_for(size) for size in (SMALL, BASE, LARGE)] == [0.8, 0.8, 0.9]
    assert tuning.optimizer_config(SMALL).weight_decay == 0
    faithful = TuningConfig(faithful=True).optimizer_config(SMALL)
    assert (faithful.name, faithful.schedule, faithful.weight_decay) == ("adam", "released", 0.01)


def test_muon_updates_the_matrices_of_the_layers(make_job):
    task = FinetuningTask(make_job(rows=20, optimizer="muon"))
    muon, adamw = build_trainer(task, quiet=True).optimizers
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    rates = {names[parameter]: group["lr_scale"] for group in muon.param_groups for parameter in group["params"]}
    assert set(rates) == {name for parameter, name in names.items() if ".layers." in name and parameter.dim() == 2}
    assert sorted(set(rates.values())) == pytest.approx([0.8**2, 0.8])
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(names) - len(rates)
    with pytest.raises(ConfigError, match="--faithful"):
        TuningConfig(optimizer="muon", faithful=True)


def test_an_interrupted_job_continues_to_the_same_weights(make_job, monkeypatch):
    """With checkpoints after every step, and an interrupt in the second evaluation."""
    monkeypatch.setattr("electra.finetuning.config.SAVE_EVERY", 1)
    tuning = {"batch_size": 16, "dropout": 0.1, "epochs": 3, "rows": 60}
    whole, broken = make_job(output="whole", **tuning), make_job(output="broken", **tuning)
    whole.run()
    with monkeypatch.context() as patch:
        patch.setattr(FinetuningTask, "evaluate", interrupted_second_call(FinetuningTask.evaluate))
        with pytest.raises(KeyboardInterrupt):
            broken.run()
    assert list(broken.folder.glob("checkpoints/step-*"))
    broken.run()
    weights = [job.folder / "model" / "model.safetensors" for job in (whole, broken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list(broken.folder.glob("checkpoints"))


def test_a_job_whose_metrics_were_lost_after_its_last_checkpoint_is_finished(make_job, monkeypatch):
    job = make_job(rows=40, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write_job_outputs", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            job.run(quiet=True)
    (job.folder / "metrics.jsonl").write_text("")
    assert job.run(quiet=True).steps == 2  # of 36 rows


def test_files_that_others_put_into_a_job_are_kept(make_job):
    job = make_job(rows=20)
    job.run()
    (job.folder / "result.json").unlink()  # as if it was killed before the last file
    (job.folder / "checkpoints").mkdir()
    notes = [job.folder / "model" / "notes.txt", job.folder / "checkpoints" / "notes.txt"]
    for note in notes:
        note.write_text("precious")
    with pytest.raises(DataError, match="model exists already"):
        job.run()
    notes[0].unlink()
    job.run()
    assert notes[1].read_text() == "precious"


def interrupted_second_call(function):
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


def test_a_job_is_not_in_memory_during_the_next_one(make_job, monkeypatch):
    trainers = []

    class CountedTrainer(Trainer):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            trainers.append(weakref.ref(self))

    monkeypatch.setattr(job_module, "Trainer", CountedTrainer)
    gc.disable()
    try:
        make_job(rows=40, epochs=1).run(quiet=True)
        alive = [trainer() for trainer in trainers]
    finally:
        gc.enable()
    assert alive == [None]


def test_balanced_weights_give_every_class_the_same_part_of_the_loss():
    labels = np.array([0, 0, 0, 1])
    assert balanced_class_weights(labels, 3).tolist() == [2 / 3, 2, 2]  # a class without rows is not used
    assert sum(balanced_class_weights(labels, 2)[labels]) == len(labels)
    assert balanced_positive_weights(np.array([[1, 1], [0, 1], [0, 1], [0, 0]]), 2).tolist() == [3, 1 / 3]
    assert balanced_positive_weights(np.ones((4, 1)), 1).tolist() == [1 / 4]  # with 0 the class would not be learned


@pytest.mark.parametrize("words", [("balanced",), ("cat=3", "dog=0")])
def test_class_weights_multiply_the_training_losses_of_their_classes(make_job, words):
    weighted, plain = (FinetuningTask(make_job(rows=60, class_weights=each, dropout=0.0)) for each in (words, ()))
    batch = plain.next_batch()
    labels = plain.train.labels[batch.rows]
    losses = torch.nn.functional.cross_entropy(plain.model(*plain.train.collate(batch, 0)), labels, reduction="none")
    balanced = torch.tensor(54 / 3 / np.bincount(plain.train.labels), dtype=torch.float32)
    weights = balanced if words == ("balanced",) else torch.tensor([1.0, 3.0, 0.0])  # of bird, cat, dog
    torch.testing.assert_close(weighted.losses(batch)["loss"].sum, (weights[labels] * losses * batch.weights).sum())
    assert weighted.evaluate()["loss"] == plain.evaluate()["loss"]


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("classification", ("cow=3",), "class_weights is cow=3; it must be balanced, or CLASS=WEIGHT"),
        ("classification", ("cat",), "class_weights is cat; it must be"),
        ("classification", ("cat=-1",), "class_weights is cat=-1; it must be"),
        ("multi-label", ("big=nan",), "of the classes big, red, small"),
        ("regression", ("balanced",), "class_weights is balanced, but a task of kind regression has none"),
    ],
)
def test_class_weights_that_do_not_fit_the_task_are_an_error(encoder_folder, tmp_path, kind, words, message):
    train = write_rows(tmp_path / "train.jsonl", kind, 40, seed=0)
    with pytest.raises(ConfigError, match=message):
        electra.finetune(model=encoder_folder, train=train, output=tmp_path / "out", class_weights=words)
    assert not (tmp_path / "out").exists()


def test_pairs_need_two_segment_embeddings(make_job, shards, tmp_path):
    """BERT-type models of a single segment can be imported."""
    one = saved_discriminator(replace(WIDE, segments=1), tmp_path / "one", shards / "tokenizer")
    with pytest.raises(ConfigError, match="pairs of texts need 2 segment embeddings, and the model has 1"):
        make_job(model=one, has_pairs=True, rows=20).run()
    assert make_job(model=one, rows=20, epochs=1, output="single").run(quiet=True).steps == 1


@pytest.fixture
def script_accuracy(monkeypatch):
    """Replace the dev accuracy of each epoch; returns the epochs that were evaluated."""

    def script(values: list[float]) -> list[int]:
        compute_metrics, epochs = FinetuningTask.compute_metrics, []

        def compute(task, predicted, split):
            epochs.append(task.step // task.steps_per_epoch)
            return compute_metrics(task, predicted, split) | {"accuracy": values[epochs[-1] - 1]}

        monkeypatch.setattr(FinetuningTask, "compute_metrics", compute)
        return epochs

    return script


def train_epochs(job, epochs: int) -> dict:
    """The weights after a number of epochs of a job."""
    task = FinetuningTask(job)
    job.folder.mkdir(parents=True)
    trainer = build_trainer(task, quiet=True)
    trainer.stop_at = Budget(steps=epochs * task.steps_per_epoch)
    trainer.train()
    return {name: parameter.detach().clone() for name, parameter in task.model.named_parameters()}


@pytest.mark.parametrize(
    ("tuning", "trained"), [({"best_epoch": True}, 5), ({"early_stopping": 2}, 4), ({"early_stopping": 1}, 3)]
)
def test_the_model_of_the_best_epoch_is_kept(make_job, script_accuracy, tuning, trained):
    settings = {"rows": 60, "batch_size": 16, "epochs": 5}
    expected = train_epochs(make_job(output="plain", **settings), 2)
    epochs = script_accuracy([0.5, 0.7, 0.7, 0.6, 0.65])
    job = make_job(output="best", **settings, **tuning)
    assert job.run(quiet=True).best_epoch == 2
    assert sorted(set(epochs)) == list(range(1, trained + 1))
    weights = read_tensors(job.folder / "model" / WEIGHTS)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not list(job.folder.glob("best-epoch-*"))


def test_a_resumed_job_remembers_its_best_epoch(make_job, script_accuracy):
    settings = {"rows": 60, "batch_size": 16, "epochs": 5, "early_stopping": 2}
    script_accuracy([0.7, 0.5, 0.6, 0.9, 0.9])
    job = make_job(**settings)
    train_epochs(job, 2)  # ends with a checkpoint
    assert job.run(quiet=True).best_epoch == 1
    assert job.run(quiet=True).steps == 3 * 4


@pytest.fixture
def long_rows(tmp_path):
    """A file of texts of up to 40 tokens whose last word is their class."""
    generator = random.Random(0)
    with (tmp_path / "long.jsonl").open("w") as file:
        for _ in range(200):
            animal = generator.choice(("cat", "dog", "bird"))
            text = "the red mat " * generator.randint(0, 13) + animal
            file.write(json.dumps({"text": text, "label": animal}) + "\n")
    return tmp_path / "long.jsonl"


@pytest.mark.parametrize("model", ["encoder_folder", "modern_folder"])
def test_windows_find_what_is_beyond_the_maximum_length(long_rows, tmp_path, model, request):
    files = {"model": request.getfixturevalue(model), "train": long_rows, "device": "cpu"}
    settings = files | QUICK | {"length": 16}
    truncated = electra.finetune(**settings | {"epochs": 1}, output=tmp_path / "truncated")
    whole = electra.finetune(**settings, output=tmp_path / "whole", windows=4)
    assert truncated.truncated["train"] > 90
    assert whole.truncated == {"train": 0, "dev": 0}
    assert whole.median["dev"]["accuracy"] == 1
    predictions = electra.load(tmp_path / "whole", device="cpu").predict(["the red mat " * 12 + "dog", "cat"])
    assert [each["prediction"] for each in predictions] == ["dog", "cat"]
    assert electra.evaluate(model=tmp_path / "whole", input=long_rows, device="cpu").metrics["accuracy"] == 1
    electra.export(model=tmp_path / "whole", output=tmp_path / "hf")
    assert "It reads one window of a text; dev metrics are of up to 4" in (tmp_path / "hf/README.md").read_text()
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "hf")("the red cat", return_tensors="pt")
    ours = electra.load(tmp_path / "whole", device="cpu").compute_outputs(Examples(texts=["the red cat"], windows=4))
    np.testing.assert_allclose(ours.logits, theirs(**inputs).logits.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": 0}, "windows is 0; it must be at least 1"),
        ({"text_b": "text_b"}, "it must be 1 for pairs of texts"),
    ],
)
def test_windows_of_what_has_none_are_an_error(tmp_path, settings, message):
    train = write_rows(tmp_path / "train.jsonl", "classification", 20, seed=0, has_pairs=True)
    with pytest.raises(ConfigError, match=message):
        define_task(TaskConfig(**{"train": train, "windows": 2} | settings))
