"""Read models from our folders and from Hugging Face folders alike."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from electra.huggingface.convert import (
    Tensors,
    from_huggingface_config,
    from_huggingface_tensors,
    merge_embedding_delta,
)
from electra.huggingface.names import Architecture, Part, get_architecture
from electra.model.config import TABLE_FIELDS, ElectraConfig, EncoderConfig, Sharing
from electra.model.electra import Discriminator, Electra, MaskedLanguageModel
from electra.model.storage import (
    WEIGHTS,
    check_sizes_fit,
    has_rtd_head,
    is_huggingface_folder,
    load_model,
    read_model_config,
    read_tensor_names,
    read_tensors,
)
from electra.runfolder import CONFIG, convert_stored, read_json


class WeightIndex(msgspec.Struct):
    """What is read from the index of weights in several files."""

    weight_map: dict[str, str]  # tensor → file


@dataclass(frozen=True)
class ImportedModel:
    """The model of a Hugging Face folder, with our tensor names."""

    part: Part  # generator or discriminator
    config: EncoderConfig
    tensors: Tensors
    ignored: list[str]  # tensors of the folder that we do not need


def read_huggingface_model(folder: Path) -> ImportedModel:
    architecture, config = read_huggingface_config(folder)
    stored = {name: tensor for file in list_weight_files(folder) for name, tensor in read_tensors(file).items()}
    tensors, ignored = from_huggingface_tensors(stored, architecture, config, folder)
    return ImportedModel(architecture.part, config, tensors, ignored)


def read_huggingface_config(folder: Path) -> tuple[Architecture, EncoderConfig]:
    """The architecture and the encoder that the config.json of a Hugging Face folder describes."""
    settings = read_json(folder / CONFIG)
    architecture = get_architecture(settings, folder)
    config = from_huggingface_config(settings, architecture, folder)
    check_sizes_fit(folder, list_weight_files(folder), config)
    return architecture, config


def list_weight_files(folder: Path) -> list[Path]:
    """The weights of a Hugging Face folder: one file, or those listed in its index."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [folder / WEIGHTS]
    files = convert_stored(read_json(index), WeightIndex, index).weight_map.values()
    return [folder / file for file in sorted({Path(file).name for file in files})]


def read_encoder_configs(folder: Path) -> dict[str, EncoderConfig]:
    """The encoder configurations of the generator and the discriminator in a folder, or of the one it has."""
    if is_huggingface_folder(folder):
        architecture, config = read_huggingface_config(folder)
        return {architecture.part: config}
    return read_model_config(folder).encoder_configs()


def has_discriminator(folder: Path) -> bool:
    """Whether a folder has a discriminator for replaced token detection, or an encoder without a head."""
    if is_huggingface_folder(folder):
        return get_architecture(read_json(folder / CONFIG), folder).part == "discriminator"
    electra = read_model_config(folder)
    return electra.discriminator is not None and electra.head == "rtd"


def select_part(electra: Electra, part: Part) -> MaskedLanguageModel | Discriminator:
    """One model of a pair; `encoder` selects the discriminator, or the generator if it is alone."""
    if part == "encoder" and electra.discriminator is not None:
        return electra.discriminator
    return electra.require_discriminator() if part == "discriminator" else electra.require_generator()


def read_part_config_and_tensors(folder: Path, part: Part = "encoder") -> tuple[EncoderConfig, Tensors]:
    """Configuration and tensors of one model of a folder (see `select_part`); a Hugging Face folder has only one.

    Disentangled embeddings are summed. The tensors include the head's if the folder has them."""
    if is_huggingface_folder(folder):
        imported = read_huggingface_model(folder)
        return imported.config, imported.tensors
    model = select_part(load_model(folder), part)
    tensors = merge_embedding_delta(model.state_dict())
    if isinstance(model, Discriminator) and not has_rtd_head(read_tensor_names(folder / WEIGHTS)):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    return model.encoder.config, tensors


def read_config_and_tensors(folder: Path) -> tuple[ElectraConfig, Tensors]:
    """Configuration and tensors of all models in a folder."""
    if is_huggingface_folder(folder):
        return combine_into_pair([read_huggingface_model(folder)])
    return read_model_config(folder), read_tensors(folder / WEIGHTS)


def combine_into_pair(models: list[ImportedModel]) -> tuple[ElectraConfig, Tensors]:
    """A pair from a discriminator and a generator, or from one of them; equal embeddings are shared."""
    configs = {model.part: model.config for model in models}
    tensors = {f"{model.part}.{name}": tensor for model in models for name, tensor in model.tensors.items()}
    sharing: Sharing = "embeddings" if have_equal_embeddings(models) else "none"
    if sharing == "embeddings":  # stored once, under the generator's name
        tensors = {name: tensor for name, tensor in tensors.items() if "discriminator.encoder.embeddings" not in name}
    electra = ElectraConfig(
        generator=configs.get("generator"), discriminator=configs.get("discriminator"), sharing=sharing
    )
    return electra, tensors


def have_equal_embeddings(models: list[ImportedModel]) -> bool:
    """Whether two models have the same embeddings, as pairs that were trained with shared embeddings do."""
    if len(models) < 2:
        return False
    first, second = models
    if any(getattr(first.config, name) != getattr(second.config, name) for name in TABLE_FIELDS):
        return False
    names = [name for name in first.tensors if name.startswith("encoder.embeddings.")]
    return all(torch.equal(first.tensors[name], second.tensors[name]) for name in names)
