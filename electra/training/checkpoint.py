"""Checkpoints: a model folder, the optimizers' tensors and the run's position, written beside and renamed.

runs/x/checkpoints/step-000001000/   config.json · model.safetensors · tokenizer files   (a model folder)
                                     training.safetensors · state.json                   (to go on from)
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
from electra.runfolder import read_json, write_folder, write_json

CHECKPOINTS = "checkpoints"
TRAINING = "training.safetensors"
STATE = "state.json"


def checkpoint_folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / CHECKPOINTS).glob("step-*"))


def checkpoint_name(step: int) -> str:
    """The folder name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:09d}"


def model_folder(path: Path) -> Path:
    """The model folder that `path` stands for: itself, or the newest checkpoint of a run."""
    if (path / WEIGHTS).exists():
        return path
    found = checkpoint_folders(path)
    if not found and (path / "metrics.jsonl").exists():
        raise DataError(f"the run in {path} has no checkpoint yet; wait for its first, or go on with it by --resume")
    return found[-1] if found else path


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    write_model: Callable[[Path], None],
) -> Path:
    """Write the checkpoint of `state["step"]`; there is all of it or nothing."""
    folder = run / CHECKPOINTS / checkpoint_name(state["step"])
    if not folder.exists():  # a resumed run may reach a step again: the checkpoint is the same
        with write_folder(folder) as draft:
            write_model(draft)
            write_tensors(draft / TRAINING, optimizer_tensors(model, optimizers))
            write_json(draft / STATE, state)
    return folder


def load_checkpoint(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put weights and optimizers where they were; returns the state."""
    with naming_earlier(folder):
        weights = read_tensors(folder / WEIGHTS)
        restore_weights(model, weights, folder)
        restore_optimizers(model, optimizers, read_tensors(folder / TRAINING), folder)
    return read_state(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """Where a run stood at a checkpoint."""
    with naming_earlier(folder):
        return read_json(folder / STATE)


@contextmanager
def naming_earlier(folder: Path) -> Iterator[None]:
    """Say of a damaged checkpoint which one before it to go on from."""
    try:
        yield
    except DataError as error:
        earlier = [other.name for other in checkpoint_folders(folder.parent.parent) if other < folder]
        advice = f"remove {folder} to go on from {earlier[-1]}" if earlier else "there is no earlier one to go on from"
        raise DataError(f"{error}; {advice}") from None


def restore_weights(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Copy stored weights into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise DataError(f"{folder / WEIGHTS} does not fit the model: {name} is missing or of another shape")
            parameter.copy_(weights[name])


def optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All that the optimizers remember, by parameter name: layers.0.weight/exp_avg."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, memory in optimizer.state.items()
        for key, value in memory.items()
    }


def restore_optimizers(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor], folder: Path
) -> None:
    """Give optimizers back what they remembered; torch puts each tensor on the device it wants it on."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    memories: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key = path.rsplit("/", 1)
        memories.setdefault(name, {})[key] = tensor
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        remembered = {
            index: optimizer.state.get(parameter, {}) | memories.pop(names[id(parameter)])  # older ones remember less
            for index, parameter in enumerate(parameters)
            if names[id(parameter)] in memories
        }
        optimizer.load_state_dict({"state": remembered, "param_groups": optimizer.state_dict()["param_groups"]})
    if memories:
        raise DataError(f"{folder / TRAINING} remembers {next(iter(memories))}, which this optimizer does not move")


def prune_checkpoints(run: Path, keep: int, best: str | None) -> None:
    """Remove all but the last few checkpoints and the best."""
    for folder in checkpoint_folders(run)[:-keep]:
        if folder.name != best:
            shutil.rmtree(folder)
