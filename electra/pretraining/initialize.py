"""Initial weights: from other models, from the previous phase, from counts of the text and sinusoids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from electra.data.shards import Shards
from electra.errors import ConfigError, DataError
from electra.huggingface.convert import (
    Tensors,
    has_discriminator,
    merge_embedding_delta,
    read_encoder_configs,
    read_part_config_and_tensors,
    select_part,
)
from electra.model.config import (
    SIZES,
    ElectraConfig,
    EncoderConfig,
    ModelConfig,
    size_name_for_encoder,
    with_scaled_init_std,
)
from electra.model.electra import Electra
from electra.model.encoder import ClassicEmbeddings, TokenEmbeddings
from electra.model.grow import load_widened_weights, stack_layers
from electra.model.heads import MLMHead
from electra.model.storage import DISCRIMINATOR_HEAD, WEIGHTS, load_model_tokenizer, read_model_config, read_tensors
from electra.objectives.evaluation import smoothed_log_frequencies
from electra.pretraining.config import InitConfig, PretrainConfig, main_encoder_config
from electra.pretraining.token_counts import cooccurrence_vectors
from electra.training.checkpoint import find_model_folder


def pair_config(config: PretrainConfig, shards: Shards) -> ElectraConfig:
    """The generator and discriminator of a run: new ones, those of --init, or those it was started with."""
    vocabulary = shards.tokenizer.vocabulary
    if config.init.model is None:
        return config.model.electra_config(vocabulary.size, vocabulary.pad_id)
    if config.resumes_checkpoint():
        return read_model_config(config.output)  # the --init folder may be gone
    check_init_tokenizers(config.init, shards)
    return pair_config_from_init(config.init, config.model, vocabulary.size)


def pair_config_from_init(init: InitConfig, model: ModelConfig, vocab_size: int) -> ElectraConfig:
    """The pair with the encoders of the --init folders; the generator is new if there is none."""
    assert init.model is not None
    discriminator = main_encoder_config(read_encoder_configs(find_model_folder(init.model))).with_dropout(model.dropout)
    check_init_encoder(discriminator, init.model, model, vocab_size)
    source = generator_init_folder(init)
    if source is None:
        generator = model.generator_config(discriminator, SIZES[model.size].generator_width_ratio)
        if model.scale_init_by_width:
            generator, discriminator = with_scaled_init_std(generator), with_scaled_init_std(discriminator)
    else:
        if model.generator_width is not None or model.generator_layers is not None:
            raise ConfigError(
                f"--generator-width and --generator-layers cannot change the generator of {source}; leave them out"
            )
        generator = read_generator_config(source).with_dropout(model.dropout).with_dropout(model.generator_dropout)
    return ElectraConfig(generator=generator, discriminator=discriminator, sharing=model.sharing)


def generator_init_folder(init: InitConfig) -> Path | None:
    """The folder that the generator's weights come from; None if they are new."""
    assert init.model is not None
    if init.generator is None:
        return init.model if len(read_encoder_configs(find_model_folder(init.model))) == 2 else None
    return None if init.generator == "fresh" else Path(init.generator)


def is_lone_generator(init: InitConfig) -> bool:
    """Whether --init is a masked language model that is also given as --init-generator."""
    source = generator_init_folder(init)
    if source is None or source != init.model:
        return False
    return list(read_encoder_configs(find_model_folder(source))) == ["generator"]


def read_generator_config(folder: Path) -> EncoderConfig:
    encoders = read_encoder_configs(find_model_folder(folder))
    if "generator" not in encoders:
        raise DataError(f"{folder} holds no generator (…ForMaskedLM); give another folder or --init-generator fresh")
    return encoders["generator"]


def check_init_encoder(encoder: EncoderConfig, folder: Path, model: ModelConfig, vocab_size: int) -> None:
    """Check that an encoder has the style, size and vocabulary of the run."""
    size = size_name_for_encoder(encoder)
    if model.style != encoder.style:
        raise ConfigError(f"{folder} is {encoder.style}, not --style {model.style}; leave out --style")
    if model.size != size:
        raise ConfigError(
            f"{folder} has width {encoder.width}, for which --size is {size}, not {model.size}; leave out --size"
        )
    if encoder.vocab_size != vocab_size:
        raise DataError(
            f"{folder} has {encoder.vocab_size:,} token embeddings but its tokenizer {vocab_size:,} entries; resize "
            f"the embeddings first (transformers: resize_token_embeddings({vocab_size}))"
        )


def check_init_tokenizers(init: InitConfig, shards: Shards) -> None:
    """Check that the shards were made with the tokenizer of the --init folders."""
    source = generator_init_folder(init)
    if source is not None and not source.exists():
        raise ConfigError(f"--init-generator: there is no folder {source}; give the folder of a model, or fresh")
    for folder in filter(None, (init.model, source)):
        shards.check_same_tokenizer(load_model_tokenizer(find_model_folder(folder)))


@dataclass(frozen=True)
class InitialWeights:
    """Weights by the parameter names of each part, embedding deltas merged; other parameters stay as initialised."""

    discriminator: Tensors
    generator: Tensors | None  # None: new

    def load_into(self, electra: Electra) -> None:
        """Overwrite the weights of a pair, or of the only part of it."""
        discriminator = electra.discriminator or electra.require_generator()
        embeddings = discriminator.encoder.embeddings
        if self.generator is not None:
            copy_weights(self.generator, electra.require_generator())
        elif embeddings.base is not None:  # disentangled: a new generator still needs the discriminator's embeddings
            copy_weights(self.discriminator, electra.require_generator(), prefix="encoder.embeddings.")
        copy_weights(self.discriminator, discriminator)
        if embeddings.base is not None:
            subtract_base_embeddings(embeddings, embeddings.base)


def read_initial_weights(config: PretrainConfig, model: ElectraConfig) -> InitialWeights | None:
    """The weights of --init for the first phase's model; None without --init, or if the run is resumed."""
    init = config.init
    if init.model is None or config.resumes_checkpoint():
        return None
    folder = find_model_folder(init.model)
    _, tensors = read_part_config_and_tensors(folder)
    if not has_head_for(init.model, model):
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("encoder.")}
    source = generator_init_folder(init) if model.generator and model.discriminator else None
    generator = None
    if source is not None:
        is_same = source == init.model  # a run that still trains may have a newer checkpoint by now
        _, generator = read_part_config_and_tensors(folder if is_same else find_model_folder(source), "generator")
    weights = InitialWeights(tensors, generator)
    check_shared_weights(weights, config.model)
    return weights


def has_head_for(folder: Path, model: ElectraConfig) -> bool:
    """Whether the head of the model in a folder fits the discriminator of `model`, or its lone generator."""
    return has_discriminator(find_model_folder(folder)) == (model.discriminator is not None and model.head == "rtd")


def check_shared_weights(weights: InitialWeights, model: ModelConfig) -> None:
    """Check that weights which the pair shares are equal."""
    prefix = {"embeddings": "encoder.embeddings.", "all": "encoder."}.get(model.sharing)
    if weights.generator is None or prefix is None:
        return
    names = [name for name in weights.generator if name.startswith(prefix)]
    if not all(torch.equal(weights.generator[name], weights.discriminator[name]) for name in names):
        raise ConfigError(
            f"generator and discriminator have different weights, which --sharing {model.sharing} would share; use "
            f"--sharing none or disentangled, or --init-generator fresh"
        )


@torch.no_grad()
def copy_weights(tensors: Tensors, module: nn.Module, prefix: str = "") -> None:
    """Copy tensors to the parameters of the same name, those that start with `prefix`."""
    for name, parameter in module.named_parameters():
        if name in tensors and name.startswith(prefix):
            parameter.copy_(tensors[name])


@torch.no_grad()
def subtract_base_embeddings(embeddings: TokenEmbeddings, base: TokenEmbeddings) -> None:
    """Turn whole embedding tables into differences from their base."""
    for table, base_table in zip(embeddings.embedding_tables(), base.embedding_tables(), strict=True):
        table.weight.sub_(base_table.weight)


@torch.no_grad()
def load_previous_phase_weights(model: Electra, checkpoint: Path, config: PretrainConfig) -> None:
    """Load the weights of the previous phase, stacked and widened to this phase's size; a new discriminator may be
    initialised from the generator."""
    init, previous, weights = config.init, read_model_config(checkpoint), read_tensors(checkpoint / WEIGHTS)
    if previous.head != model.config.head:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(DISCRIMINATOR_HEAD)}
    load_widened_weights(model, stack_layers(weights, previous, model.config), config.seed)
    is_new = previous.discriminator is None and model.discriminator is not None
    if is_new and init.discriminator_from_generator:
        assert model.discriminator is not None
        model.discriminator.encoder.load_state_dict(model.require_generator().encoder.state_dict())


def set_initial_weights(model: Electra, init: InitConfig, shards: Shards, frequencies: Tensor, is_new: bool) -> None:
    """Set the weights that do not start as noise; of a model that is not new, other weights are loaded later."""
    if init.unigram_output_bias:
        set_unigram_output_bias(model, frequencies)
    if init.cooccurrence_embeddings and is_new:  # takes seconds
        set_cooccurrence_embeddings(model, shards)
    if init.sinusoidal_positions:
        set_sinusoidal_positions(model)


@torch.no_grad()
def set_unigram_output_bias(model: Electra, frequencies: Tensor) -> None:
    """Set the output bias of token predictions to the log of `frequencies` [V]."""
    for module in model.modules():
        if isinstance(module, MLMHead):
            module.bias.copy_(smoothed_log_frequencies(frequencies))


@torch.no_grad()
def set_sinusoidal_positions(model: Electra) -> None:
    """Set position embeddings to sinusoids with the root mean square of the default initialisation."""
    for encoder in model.encoders():
        embeddings = encoder.embeddings
        if isinstance(embeddings, ClassicEmbeddings) and embeddings.base is None:  # differences from a base start at 0
            table = embeddings.position.weight
            table.copy_(sinusoidal_table(*table.shape) * encoder.config.init_std * 2**0.5)


def sinusoidal_table(positions: int, width: int) -> Tensor:
    """Pairs of sine and cosine [positions, width] whose frequencies fall geometrically from 1 radian per position."""
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]


def has_trained_segments(electra: Electra) -> bool:
    """Whether the embeddings of segments A and B differ: the encoder was trained on pairs."""
    tables = merge_embedding_delta(select_part(electra, "encoder").state_dict())
    first, *others = tables.get("encoder.embeddings.segment.weight", torch.zeros(1))  # the modern style has none
    return any(not torch.equal(first, other) for other in others)


@torch.no_grad()
def copy_first_segment_embedding(model: nn.Module) -> None:
    """Copy segment A's embedding to B's: packed rows have no B, but fine-tuning on pairs uses both."""
    for module in model.modules():
        if isinstance(module, ClassicEmbeddings):
            module.segment.weight.copy_(module.segment.weight[:1].expand_as(module.segment.weight))


@torch.no_grad()
def set_cooccurrence_embeddings(model: Electra, shards: Shards) -> None:
    """Set token embeddings to vectors of co-occurrence with the scale of the default initialisation; special tokens and
    tokens that are not in the text keep theirs."""
    tables = [
        (encoder.embeddings.token.weight, encoder.config.init_std)
        for encoder in model.encoders()
        if encoder.embeddings.base is None  # differences from a base start at zero
    ]
    vectors = cooccurrence_vectors(shards, max(table.shape[1] for table, _ in tables))
    for table, std in tables:
        own = vectors[:, : table.shape[1]].to(table.device)
        lengths = own.norm(dim=1, keepdim=True)
        scaled = own / lengths.clamp(min=1e-12) * std * table.shape[1] ** 0.5
        table.copy_(torch.where(lengths > 0, scaled, table))
