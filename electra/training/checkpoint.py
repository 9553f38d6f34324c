"""Checkpoints: a model folder with the state of the optimizers and of the training, written atomically.

runs/x/checkpoints/step-000001000/   config.json · model.safetensors · tokenizer files   (a model folder)
                                     training.safetensors · state.json                   (to resume from)
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from electra.errors import DataError
from electra.model.storage import WEIGHTS, read_tensors, write_tensors
from electra.runfolder import CHECKPOINTS, checkpoint_folders, create_folder_atomically, read_json, write_json

TRAINING = "training.safetensors"
STATE = "state.json"


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def find_model_folder(run_or_model: Path) -> Path:
    """The model folder that `run_or_model` refers to: itself, or the newest checkpoint of a run."""
    if (run_or_model / WEIGHTS).exists():
        return run_or_model
    checkpoints = checkpoint_folders(run_or_model)
    if not checkpoints and (run_or_model / "metrics.jsonl").exists():
        raise DataError(
            f"the run in {run_or_model} has no checkpoint yet; wait for the first, or continue it with --resume"
        )
    return checkpoints[-1] if checkpoints else run_or_model


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    write_model: Callable[[Path], None],
) -> Path:
    """Write the checkpoint of step `state["step"]` and return its folder."""
    folder = run / CHECKPOINTS / checkpoint_name(state["step"])
    if not folder.exists():  # a resumed run may save a step again, with equal content
        with create_folder_atomically(folder) as draft:
            write_model(draft)
            write_tensors(draft / TRAINING, optimizer_state_tensors(model, optimizers))
            write_json(draft / STATE, state)
    return folder


def load_checkpoint(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Load weights and optimizer states, and return the training state."""
    with suggest_earlier_checkpoint_on_error(folder):
        load_weights(model, read_tensors(folder / WEIGHTS), folder)
        load_optimizer_states(model, optimizers, read_tensors(folder / TRAINING), folder)
    return read_training_state(folder)


def read_training_state(folder: Path) -> dict[str, Any]:
    """The training state of a checkpoint: `step`, `trainer` (TrainState) and `task`."""
    with suggest_earlier_checkpoint_on_error(folder):
        return read_json(folder / STATE)


@contextmanager
def suggest_earlier_checkpoint_on_error(folder: Path) -> Iterator[None]:
    """Add to the error of a damaged checkpoint which one to resume from instead."""
    try:
        yield
    except DataError as error:
        earlier = [other.name for other in checkpoint_folders(folder.parent.parent) if other < folder]
        advice = f"remove {folder} to resume from {earlier[-1]}" if earlier else "there is no earlier checkpoint"
        raise DataError(f"{error}; {advice}") from None


def load_weights(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Copy weights into the model's parameters; raises a DataError, naming `folder`, if one is missing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise DataError(f"{folder / WEIGHTS} does not fit the model: {name} is missing or has another shape")
            parameter.copy_(weights[name])


def optimizer_state_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' states by parameter name and key: layers.0.weight/exp_avg."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
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
            index: states.pop(names[id(parameter)])
            for index, parameter in enumerate(parameters)
            if names[id(parameter)] in states
        }
        optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})
    if states:
        raise DataError(f"{folder / TRAINING} has the state of {next(iter(states))}, unknown to this optimizer")


def prune_checkpoints(run: Path, keep_last: int, best_name: str | None) -> None:
    """Remove all checkpoints but the last `keep_last` and the best."""
    for folder in checkpoint_folders(run)[:-keep_last]:
        if folder.name != best_name:
            shutil.rmtree(folder)
