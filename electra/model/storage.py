"""A model folder: config.json says what the model is, model.safetensors holds its weights, tokenizer files lie beside.

Nothing is ever unpickled. Shared weights are stored once, under their first name. A folder is written beside its place
and renamed, so it is never there by half.
"""

import errno
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from electra.data.tokenizer import TextTokenizer, load_tokenizer
from electra.errors import ConfigError, DataError
from electra.model.config import ElectraConfig
from electra.model.electra import Discriminator, Electra
from electra.model.heads import RTDHead
from electra.runfolder import join_names, read_json, write_folder, write_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
HEAD = "discriminator.head."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def save_model(electra: Electra, folder: Path, tokenizer: Path | None = None) -> None:
    """Make a model folder, with the tokenizer files that lie in the folder `tokenizer`."""
    with write_folder(folder) as draft:
        write_model(electra, draft, tokenizer)


def write_model(electra: Electra, folder: Path, tokenizer: Path | None) -> None:
    """Write a model's files into a folder."""
    weights = {name: parameter.detach() for name, parameter in electra.named_parameters()}  # what is shared, once
    write_model_files(electra.config, weights, folder, tokenizer)


def write_model_files(config: ElectraConfig, weights: dict[str, Tensor], folder: Path, tokenizer: Path | None) -> list[str]:
    """Write a model's files from its parts; returns the names of the tokenizer's among them."""
    write_tensors(folder / WEIGHTS, weights)
    write_json(folder / CONFIG, {"model": asdict(config)})
    return copy_tokenizer(tokenizer, folder)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file; `transformers` asks for the word in its metadata."""
    here = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(here, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, too, is told this way
        raise OSError(errno.EIO, f"cannot write ({error})", str(path)) from None


def load_model(folder: Path) -> Electra:
    """Read a model folder; weights keep their stored precision, and a head that is not there starts afresh."""
    return build_model(read_model_config(folder), read_tensors(folder / WEIGHTS), folder / WEIGHTS)


def build_model(config: ElectraConfig, weights: dict[str, Tensor], path: Path) -> Electra:
    """A model from its weights, which were read at `path`."""
    with torch.device("meta"):  # no weights yet: the stored ones are put in their place
        electra = Electra(config)
    wanted = dict(electra.named_parameters())
    is_headless = isinstance(electra.discriminator, Discriminator) and not has_rtd_head(weights)
    if is_headless:
        wanted = {name: weight for name, weight in wanted.items() if not name.startswith(HEAD)}
    check_tensors(weights, wanted, path)
    electra.load_state_dict(weights, strict=False, assign=True)
    if is_headless:
        give_head(electra.require_discriminator())
    return electra


def give_head(discriminator: Discriminator) -> None:
    """Give a discriminator a new head in its encoder's precision, drawn from torch's random state: seed that first."""
    encoder = discriminator.encoder
    discriminator.head = RTDHead(encoder.config).to(next(encoder.parameters()).dtype)


def has_rtd_head(weights: Iterable[str]) -> bool:
    """Whether there is a discriminator's head among weights; models taken from a bare encoder have none."""
    return any(name.startswith(HEAD) for name in weights)


def is_huggingface_folder(folder: Path) -> bool:
    """Whether a folder's config.json is one of `transformers`."""
    return "model_type" in read_json(folder / CONFIG)


def read_model_config(folder: Path) -> ElectraConfig:
    """The configuration in a model folder."""
    settings = read_json(folder / CONFIG)
    if is_huggingface_folder(folder):
        raise DataError(f"{folder} is a Hugging Face folder; import it with: electra import --from {folder} --output …")
    if "task" in settings:
        raise DataError(f"{folder} is a fine-tuned model; use it with electra predict, evaluate, finetune or export")
    if "model" not in settings:
        raise DataError(f"{folder / CONFIG} describes no model; a model folder comes from electra import or pretrain")
    try:
        return ElectraConfig.from_dict(settings["model"])
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def read_names(path: Path) -> list[str]:
    """The names of the tensors in one safetensors file."""
    with opened(path) as file:
        return list(file.keys())


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """A safetensors file, or words for why there is none to read."""
    if not path.is_file():
        raise DataError(missing_weights(path))
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"{path} is cut short or damaged ({error}); copy or make it again") from None


def missing_weights(path: Path) -> str:
    """Why there are no weights at `path`, and what to do."""
    pickles = sorted(file.name for file in path.parent.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return (
            f"{path.parent} has its weights in {pickles[0]}, a pickle, which can run code and is never opened here; "
            f"rewrite it as {WEIGHTS} where you trust it (transformers: save_pretrained)"
        )
    return f"there is no {path.name} in {path.parent}; a model folder has {CONFIG} and {WEIGHTS}"


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights that are not just those the model has, by name and shape, or that are no fractions."""
    check_names(set(found), set(wanted), path)
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            raise DataError(f"{path}: {name} holds {tensor.dtype}; only floating-point weights can be read")
        if tensor.shape != wanted[name].shape:
            came, allowed = tuple(tensor.shape), tuple(wanted[name].shape)
            raise DataError(f"{path}: {name} is {came}, but the {CONFIG} beside it asks for {allowed}")


def check_names(found: set[str], wanted: set[str], path: Path) -> None:
    """Refuse weights that are not just those the configuration accounts for."""
    if missing := sorted(wanted - found):
        raise DataError(f"{path} lacks {join_names(missing)}, which the {CONFIG} beside it asks for")
    if unknown := sorted(found - wanted):
        raise DataError(f"{path} has {join_names(unknown)}, which the {CONFIG} beside it does not account for")


def load_model_tokenizer(folder: Path, entries: int | None = None) -> TextTokenizer:
    """The tokenizer in a model folder, which must fit a table of so many entries."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise DataError(f"{folder} has no tokenizer; put the tokenizer.json or vocab.txt it was trained with into it")
    tokenizer = load_tokenizer(folder)
    if entries is not None and tokenizer.vocabulary.size > entries:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary.size:,} entries but the model {entries:,}; "
            "put the tokenizer it was trained with beside it"
        )
    return tokenizer


def copy_tokenizer(source: Path | None, folder: Path) -> list[str]:
    """Copy the tokenizer files that lie in `source`; returns their names."""
    found = [name for name in TOKENIZER_FILES if source is not None and (source / name).is_file()]
    for name in found:
        assert source is not None
        shutil.copyfile(source / name, folder / name)
    return found
