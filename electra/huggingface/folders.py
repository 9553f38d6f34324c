"""What a folder holds, whether it is one of ours or Hugging Face's: the sizes of its parts, and their weights."""

from pathlib import Path

import torch

from electra.huggingface.convert import (
    ImportedModel,
    Tensors,
    encoder_config,
    get_architecture,
    merge_embedding_delta,
    read_huggingface,
    select_part,
)
from electra.model.config import TABLE_FIELDS, ElectraConfig, EncoderConfig, Sharing
from electra.model.electra import Discriminator
from electra.model.storage import (
    CONFIG,
    WEIGHTS,
    has_rtd_head,
    is_huggingface_folder,
    load_model,
    read_model_config,
    read_names,
    read_tensors,
)
from electra.runfolder import read_json


def read_encoder_configs(folder: Path) -> dict[str, EncoderConfig]:
    """The sizes of the parts that a folder holds: a generator, a discriminator or both."""
    if is_huggingface_folder(folder):
        settings = read_json(folder / CONFIG)
        architecture = get_architecture(settings, folder)
        return {architecture.part: encoder_config(settings, architecture, folder)}
    pair = read_model_config(folder)
    sizes = {"generator": pair.generator, "discriminator": pair.discriminator}
    return {part: size for part, size in sizes.items() if size is not None}


def is_discriminator(folder: Path) -> bool:
    """Whether what a folder holds ends in verdicts: a discriminator, and no corrector or generator."""
    if is_huggingface_folder(folder):
        return get_architecture(read_json(folder / CONFIG), folder).part == "discriminator"
    pair = read_model_config(folder)
    return pair.discriminator is not None and pair.head == "rtd"


def read_part(folder: Path, part: str = "encoder") -> tuple[EncoderConfig, Tensors]:
    """The size and the weights of a part, tables whole; of a Hugging Face folder its only one.

    The encoder stands for the discriminator, or for a lone generator. A head is among the weights where it is stored.
    """
    if is_huggingface_folder(folder):
        arrival = read_huggingface(folder)
        return arrival.config, arrival.tensors
    found = select_part(load_model(folder), part)
    tensors = merge_embedding_delta(found.state_dict())
    if isinstance(found, Discriminator) and not has_rtd_head(read_names(folder / WEIGHTS)):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    return found.encoder.config, tensors


def read_model(folder: Path) -> tuple[ElectraConfig, Tensors]:
    """What the model in a folder is, and its weights."""
    if is_huggingface_folder(folder):
        return join([read_huggingface(folder)])
    return read_model_config(folder), read_tensors(folder / WEIGHTS)


def join(arrivals: list[ImportedModel]) -> tuple[ElectraConfig, Tensors]:
    """The model and the weights that a part, or a discriminator and a generator, make; equal tables are shared."""
    sizes = {arrival.part: arrival.config for arrival in arrivals}
    tensors = {f"{arrival.part}.{name}": tensor for arrival in arrivals for name, tensor in arrival.tensors.items()}
    sharing: Sharing = "embeddings" if shares_embeddings(arrivals) else "none"
    if sharing == "embeddings":  # stored once, under the generator's name
        tensors = {name: tensor for name, tensor in tensors.items() if "discriminator.encoder.embeddings" not in name}
    model = ElectraConfig(generator=sizes.get("generator"), discriminator=sizes.get("discriminator"), sharing=sharing)
    return model, tensors


def shares_embeddings(arrivals: list[ImportedModel]) -> bool:
    """Whether two parts have equal tables and LayerNorm: pairs trained with shared embeddings do."""
    if len(arrivals) < 2:
        return False
    first, second = arrivals
    names = [name for name in first.tensors if name.startswith("encoder.embeddings.")]
    has_like_settings = all(getattr(first.config, name) == getattr(second.config, name) for name in TABLE_FIELDS)
    return has_like_settings and all(torch.equal(first.tensors[name], second.tensors[name]) for name in names)
