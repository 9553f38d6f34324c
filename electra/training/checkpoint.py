"""Checkpoints: a model folder with the state of the optimizers and of the training, written atomically.

runs/x/checkpoints/step-000001000/   config.json · model.safetensors · tokenizer files   (a model folder)
                                     training.safetensors · state.json                   (to resume from)
                                     checksums.json                                      (of all of them)
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from electra.config import PACKAGED_MODEL, model_path
from electra.errors import DataError, check_range
from electra.model.storage import WEIGHTS, read_tensors, write_tensors
from electra.runfolder import (
    CHECKPOINTS,
    CHECKSUMS,
    CONFIG,
    checkpoint_folders,
    create_folder_atomically,
    read_bounded,
    read_stored,
    remove_written_folder,
    repair_advice,
    write_checksums,
    write_json,
)
from electra.training.distributed import gather_shards, shard_like
from electra.training.logging import METRICS_FILE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # open_locked returns None without it

TRAINING = "training.safetensors"
STATE = "state.json"
LOCKED_CHECKPOINTS: dict[Path, int | None] = {}
"""Descriptors of checkpoints that this process reads, perhaps again: a fine-tuning does for each seed."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def find_model_folder(run_or_model: Path) -> Path:
    """The model folder that `run_or_model` refers to: itself, or the newest checkpoint of a run.

    A run that is still training does not remove the checkpoint before this process ends."""
    run_or_model = model_path(run_or_model)
    if run_or_model == PACKAGED_MODEL and not has_packaged_model():
        raise DataError(
            "this installation of electra contains no model; name one: a run, a model folder or a Hugging Face folder "
            "(--model)"
        )
    if (run_or_model / WEIGHTS).exists() and lock_checkpoint(run_or_model):
        return run_or_model
    while checkpoints := checkpoint_folders(run_or_model):
        if lock_checkpoint(checkpoints[-1]):
            return checkpoints[-1]
    if (run_or_model / METRICS_FILE).exists():
        raise DataError(
            f"the run in {run_or_model} has no checkpoint yet; wait for the first, or continue it with --resume"
        )
    return run_or_model


def has_packaged_model() -> bool:
    """Whether the package contains a model."""
    return (PACKAGED_MODEL / CONFIG).exists()


def lock_checkpoint(folder: Path) -> bool:
    """Keep a checkpoint from being removed by its run until this process ends; False if it is already gone."""
    if folder.parent.name == CHECKPOINTS and folder not in LOCKED_CHECKPOINTS:
        with suppress(FileNotFoundError):
            LOCKED_CHECKPOINTS[folder] = open_locked(folder)
    return folder.exists()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, unless a process locks it or it has files that are not its own."""
    try:
        descriptor = open_locked(folder, exclusive=True)
    except BlockingIOError:
        return  # until the next checkpoint is saved
    remove_written_folder(folder)
    if descriptor is not None:
        os.close(descriptor)


def open_locked(folder: Path, exclusive: bool = False) -> int | None:
    """A descriptor of a folder with a lock that ends when it is closed, where the system has such locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # a file system without locks
    return descriptor


@dataclass
class TrainState:
    """Progress of a training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    nonfinite_steps: int = 0
    best_checkpoint: str | None = None  # lowest held-out loss
    best_loss: float | None = None
    start_step: int = 0  # where the budget starts: after 0 in a branch, and where a phase starts a new optimizer
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "step", "tokens", "nonfinite_steps", "start_step", at_least=0, at_most=2**62)
        check_range(self, "start_step", at_most=self.step)
        check_range(self, "start_seconds", at_least=0, at_most=self.seconds)


@dataclass
class CheckpointState:
    """The content of state.json."""

    trainer: TrainState
    task: dict[str, Any]  # the task's `state_dict`, such as the position in the data


def save_checkpoint(
    run: Path, optimizer_states: dict[str, Tensor], state: CheckpointState, write_model: Callable[[Path], None]
) -> Path:
    """Write a checkpoint and return its folder."""
    folder = run / CHECKPOINTS / checkpoint_name(state.trainer.step)
    if not (folder / STATE).is_file():  # a resumed run may save a step again, with equal content
        with create_folder_atomically(folder) as draft:
            write_model(draft)
            write_tensors(draft / TRAINING, optimizer_states)
            write_json(draft / STATE, asdict(state))
            write_checksums(draft)
    return folder


def load_checkpoint(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> CheckpointState:
    """Load weights and optimizer states, and return the training state."""
    state = read_training_state(folder)
    if not (folder / CHECKSUMS).exists():
        raise DataError(f"{folder} has no {CHECKSUMS}; {repair_advice(folder / CHECKSUMS)}")
    load_weights(model, folder)
    load_optimizer_states(model, optimizers, read_tensors(folder / TRAINING), folder)
    return state


def read_training_state(folder: Path) -> CheckpointState:
    return read_stored(folder / STATE, CheckpointState)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a model folder into the model's parameters; raises a DataError if one is missing."""
    weights = read_tensors(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise DataError(f"{folder / WEIGHTS} does not fit the model: {name} is missing or has another shape")
            parameter.copy_(shard_like(weights[name], parameter))


def optimizer_state_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' states by parameter name and key: layers.0.weight/exp_avg.

    Sharded states are gathered: all ranks must call this."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": gather_shards(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer_states(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor], folder: Path
) -> None:
    """The inverse of `optimizer_state_tensors`; raises a DataError, naming `folder`, for an unknown parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key = path.rsplit("/", 1)
        states.setdefault(name, {})[key] = tensor
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loaded = {
            index: {key: shard_like(value, parameter) for key, value in states.pop(names[id(parameter)]).items()}
            for index, parameter in enumerate(parameters)
            if names[id(parameter)] in states
        }
        optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})
    if states:
        raise DataError(f"{folder / TRAINING} has the state of {next(iter(states))}, unknown to this optimizer")


def check_own_folder(folder: Path, model: str) -> None:
    """Raise a DataError if a training folder has files but no checkpoint and no `model`: they are not ours."""
    if not folder.exists() or checkpoint_folders(folder) or (folder / model / CHECKSUMS).exists():
        return
    metrics = folder / METRICS_FILE
    is_log = metrics.is_file() and read_bounded(metrics)[:5] in (b"", b'{"kin')  # killed before its first checkpoint
    others = {path.name for path in folder.iterdir()} - {CHECKPOINTS, METRICS_FILE if is_log else CHECKPOINTS}
    if others:
        raise DataError(
            f"{folder} has files that electra did not write ({min(others)}); move them or choose another --output"
        )


def prune_checkpoints(run: Path, keep_last: int, best_name: str | None) -> None:
    """Remove all checkpoints but the last `keep_last`, the best, and those that a process reads."""
    for folder in checkpoint_folders(run)[:-keep_last]:
        if folder.name != best_name:
            remove_checkpoint(folder)
