"""Checkpoints: written whole or not at all, and damage is reported with the checkpoint before."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from electra.errors import DataError
from electra.model.storage import WEIGHTS, read_tensors, write_tensors
from electra.runfolder import CHECKSUMS, PARTIAL, checkpoint_folders
from electra.training import checkpoint
from electra.training.checkpoint import (
    LOCKED_CHECKPOINTS,
    STATE,
    TRAINING,
    CheckpointState,
    TrainState,
    find_model_folder,
    load_checkpoint,
    optimizer_state_tensors,
    prune_checkpoints,
    read_training_state,
    save_checkpoint,
)
from electra.training.config import OptimizerConfig
from electra.training.optimizer import build_optimizers


def save(run: Path, step: int, optimizer: str = "adamw") -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Save a checkpoint of a small model after one update."""
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizers = build_optimizers(model, OptimizerConfig(name=optimizer))
    model(torch.ones(1, 3)).sum().backward()
    for each in optimizers:
        each.step()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    state = CheckpointState(TrainState(step), {"row": 7})
    save_checkpoint(
        run, optimizer_state_tensors(model, optimizers), state, lambda folder: write_tensors(folder / WEIGHTS, weights)
    )
    return model, optimizers


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_weights_and_optimizer_states_are_restored_exactly(tmp_path, optimizer):
    model, optimizers = save(tmp_path, 1, optimizer)
    other = nn.Linear(3, 2)
    restored = build_optimizers(other, OptimizerConfig(name=optimizer))
    assert load_checkpoint(checkpoint_folders(tmp_path)[0], other, restored) == CheckpointState(
        TrainState(1), {"row": 7}
    )
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        before, after = optimizers[0].state[ours], restored[0].state[theirs]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-25] ^= 4
    path.write_bytes(content)


def zero_block(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))


@pytest.mark.parametrize("damage", [truncate, flip_bit, zero_block, Path.unlink])
@pytest.mark.parametrize("name", [WEIGHTS, TRAINING, STATE, CHECKSUMS])
def test_damage_is_named_with_the_checkpoint_before(tmp_path, name, damage):
    for step in (1, 2):
        model, optimizers = save(tmp_path, step)
    first, last = checkpoint_folders(tmp_path)
    damage(last / name)
    with pytest.raises(DataError, match=f"{name}.*; remove {last} to use {first.name}"):
        load_checkpoint(last, model, optimizers)


def test_an_edited_state_is_detected(tmp_path):
    save(tmp_path, 1)
    [folder] = checkpoint_folders(tmp_path)
    (folder / STATE).write_text((folder / STATE).read_text().replace('"row": 7', '"row": 8'))
    with pytest.raises(DataError, match=r"state.json is damaged .*checksum differs.*there is no earlier checkpoint"):
        read_training_state(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path, 1)
    other = nn.Linear(4, 2)
    with pytest.raises(DataError, match="weight is missing or has another shape"):
        load_checkpoint(checkpoint_folders(tmp_path)[0], other, build_optimizers(other, OptimizerConfig()))


def test_a_full_disk_leaves_no_partial_checkpoint(tmp_path):
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    save(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, {}, CheckpointState(TrainState(2), {}), fail)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
    assert not list(tmp_path.rglob(f"*{PARTIAL}"))


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_best_checkpoint_is_not_removed(tmp_path, monkeypatch, has_locks):
    if not has_locks:  # as on Windows
        monkeypatch.setattr(checkpoint, "fcntl", None)
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, keep_last=2, best_name="step-000000001")
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == [f"step-00000000{step}" for step in (1, 3, 4)]
    assert find_model_folder(tmp_path).name == "step-000000004"


def test_a_run_refers_to_its_newest_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="has no checkpoint yet"):
        find_model_folder(tmp_path)
    for step in (9, 10):
        save(tmp_path, step)
    newest = find_model_folder(tmp_path)
    assert newest.name == "step-000000010"
    assert find_model_folder(newest) == newest


def test_a_run_that_trains_does_not_remove_the_checkpoint_that_is_read(tmp_path):
    save(tmp_path, 1)
    folder = find_model_folder(tmp_path)
    for step in (2, 3):
        save(tmp_path, step)
        prune_checkpoints(tmp_path, keep_last=1, best_name=None)
    assert [other.name for other in checkpoint_folders(tmp_path)] == ["step-000000001", "step-000000003"]
    assert len(read_tensors(folder / WEIGHTS)) == 2
    os.close(LOCKED_CHECKPOINTS.pop(folder))  # the reader ends
    prune_checkpoints(tmp_path, keep_last=1, best_name=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000003"]


def test_a_reader_takes_the_next_checkpoint_if_one_vanishes(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    first, second = checkpoint_folders(tmp_path)
    listings = iter([[first], [second]])  # the first is removed after it was listed
    prune_checkpoints(tmp_path, keep_last=1, best_name=None)
    monkeypatch.setattr(checkpoint, "checkpoint_folders", lambda run: next(listings))
    assert find_model_folder(tmp_path) == second


def test_what_others_put_beside_or_into_checkpoints_is_neither_read_nor_removed(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    notes = [folder / "step-0-notes/n.txt", folder / "step-best/n.txt", folder / "step-000000001/n.txt"]
    for note in (*notes, folder / "step-00.txt"):
        note.parent.mkdir(exist_ok=True)
        note.write_text("precious")
    assert find_model_folder(tmp_path).name == "step-000000003"
    prune_checkpoints(tmp_path, keep_last=1, best_name=None)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-000000001", "step-000000003"]
    assert all(note.read_text() == "precious" for note in (*notes, folder / "step-00.txt"))
