"""One fine-tuning run: the paper's hyperparameters, updates equal to a plain loop, resumption, each kind of task."""

import pytest
import torch
from synthetic import write_rows

from electra.errors import ConfigError, DataError, TrainingError
from electra.finetuning.config import TaskConfig, TuningConfig
from electra.finetuning.job import FinetuningTask, Job, build_trainer
from electra.finetuning.kinds import define_task
from electra.model.config import BASE, LARGE, SMALL
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


def test_ten_updates_equal_a_plain_loop(make_job):
    """AdamW with layer-wise learning rates, warm-up and gradient clipping."""
    job = make_job(rows=43, batch_size=4, epochs=2, dropout=0.0, seed=3)  # 39 training rows: one batch is incomplete
    task, plain = FinetuningTask(job), FinetuningTask(job)
    optimizer_config, trainer_config = job.tuning.optimizer_config(task.encoder), job.tuning.trainer_config(10)
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
