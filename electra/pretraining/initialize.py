"""Where a run starts that does not start from nothing: at weights of Hugging Face folders, model folders or runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from electra.data.shards import Shards
from electra.errors import ConfigError, DataError
from electra.huggingface.convert import Tensors, merge_embedding_delta, select_part
from electra.huggingface.folders import is_discriminator, read_encoder_configs, read_part
from electra.model.config import (
    SMALL,
    ElectraConfig,
    EncoderConfig,
    ModelConfig,
    get_size,
    scale_init_std,
    size_for_encoder,
)
from electra.model.electra import Electra
from electra.model.encoder import TokenEmbeddings
from electra.model.storage import load_model_tokenizer, read_model_config
from electra.training.checkpoint import model_folder

FRESH: Literal["fresh"] = "fresh"
TABLES = ("token", "position", "segment")


@dataclass(frozen=True, kw_only=True)
class InitialConfig(ModelConfig):
    """A model to go on from in place of a new one; its size is then the run's."""

    init: Path | None = None
    """Go on from this model, on text of your own: a run, a model folder, or a Hugging Face folder of ELECTRA, BERT
    or ModernBERT. The size is the model's (and of a run, what its pair shares), the tokenizer of --data must be its
    own, and heads that it lacks are new."""
    init_generator: Literal["fresh"] | Path | None = None
    """A folder to take the generator from, or fresh for a new one; left out, it is the one in --init, and a new one
    where there is none. The one released with ELECTRA-Small is as wide as its discriminator. With --phases that begin
    with mlm, both are one masked language model."""

    def __post_init__(self) -> None:
        if self.init is None:
            if self.init_generator is not None:
                raise ConfigError(f"--init-generator {self.init_generator} needs --init: the discriminator's folder")
            return
        overrides = [name for name in self.overrides() if "dropout" not in name]
        self.refuse(overrides, f"the size is that of --init {self.init}")

    def refuse(self, names: list[str], reason: str) -> None:
        """Refuse flags that contradict what is gone on from."""
        given = [
            f"--{name.replace('_', '-')} {getattr(self, name)}" for name in names if getattr(self, name) is not None
        ]
        if given:
            raise ConfigError(f"{' and '.join(given)} cannot be: {reason}; leave out what contradicts it")

    def electra_config(self, vocab_size: int = SMALL.vocab_size, pad_id: int = SMALL.pad_id) -> ElectraConfig:
        """The pair these settings describe: a new one, or that of the folders to go on from."""
        if self.init is None:
            return super().electra_config(vocab_size, pad_id)
        discriminator = self.with_dropout(encoder_size(self.init))
        self.check_size(discriminator, vocab_size)
        if (source := self.generator_source()) is not None:
            self.refuse(["generator_width", "generator_layers"], f"the generator is that of {source}")
            generator = self.with_dropout(generator_size(source))
        else:
            generator = self.generator_config(discriminator, get_size(self.size).generator_width_ratio)
            if self.scale_init_by_width:
                generator, discriminator = scale_init_std(generator), scale_init_std(discriminator)
        return ElectraConfig(generator=generator, discriminator=discriminator, sharing=self.sharing)

    def generator_source(self) -> Path | None:
        """The folder that the generator comes from; None where it is new."""
        assert self.init is not None
        if self.init_generator is None:
            return self.init if len(read_encoder_configs(model_folder(self.init))) == 2 else None
        return None if self.init_generator == FRESH else Path(self.init_generator)

    def is_lone_generator(self) -> bool:
        """Whether what is gone on from is a generator alone, and stays one."""
        source = self.generator_source()
        return (
            source is not None
            and source == self.init
            and list(read_encoder_configs(model_folder(source))) == ["generator"]
        )

    def with_dropout(self, size: EncoderConfig) -> EncoderConfig:
        """A size that was read, with the dropout of this run."""
        return size if self.dropout is None else replace(size, dropout=self.dropout, attention_dropout=self.dropout)

    def check_size(self, encoder: EncoderConfig, vocab_size: int) -> None:
        """Refuse a style or --size other than the model's, and a table that is not as long as the vocabulary."""
        size = size_for_encoder(encoder)
        if self.style != encoder.style:
            raise ConfigError(
                f"--style {self.style} cannot be: {self.init} is {encoder.style}; leave --style out, or say --style "
                f"{encoder.style}"
            )
        if self.size != size:
            raise ConfigError(
                f"--size {self.size} cannot be: {self.init} is {encoder.width} wide, which goes with {size}; "
                f"leave --size out, or say --size {size}"
            )
        if encoder.vocab_size != vocab_size:
            raise DataError(
                f"{self.init} has a table of {encoder.vocab_size:,} entries but a tokenizer of {vocab_size:,}; "
                f"cut or fill the table where it was made (transformers: resize_token_embeddings({vocab_size}))"
            )


def initial_settings(given: dict[str, Any]) -> dict[str, str]:
    """Size and style of the model that flags say to go on from, and of a pair of ours what it shares; nothing where
    none can be read: the run says so."""
    if not given.get("init"):
        return {}
    with suppress(DataError, KeyError):
        encoder, folder = encoder_size(Path(given["init"])), model_folder(Path(given["init"]))
        found = {"size": size_for_encoder(encoder), "style": encoder.style}
        is_pair = len(read_encoder_configs(folder)) == 2 and not given.keys() & {"init_generator", "generator_kind"}
        return found | ({"sharing": read_model_config(folder).sharing} if is_pair else {})
    return {}


def encoder_size(path: Path) -> EncoderConfig:
    """The size of the encoder that is gone on from: the discriminator's, or a lone generator's."""
    sizes = read_encoder_configs(model_folder(path))
    return sizes["discriminator"] if "discriminator" in sizes else sizes["generator"]


def generator_size(path: Path) -> EncoderConfig:
    """The size of the generator in a folder."""
    sizes = read_encoder_configs(model_folder(path))
    if "generator" not in sizes:
        raise DataError(
            f"{path} holds no generator; give the folder of one (…ForMaskedLM), or --init-generator {FRESH}"
        )
    return sizes["generator"]


def require_tokenizers(config: InitialConfig, shards: Shards) -> None:
    """Refuse shards that were made with another tokenizer than the model's: its rows would mean other words."""
    source = config.generator_source()
    if source is not None and not source.exists():
        raise ConfigError(
            f"--init-generator is {source}, and there is no such folder; give one that holds a model, or {FRESH}"
        )
    for path in filter(None, (config.init, source)):
        folder = model_folder(path)
        shards.check_tokenizer(load_model_tokenizer(folder))


@dataclass(frozen=True)
class Start:
    """Weights to start from, under the names of a part of ours, tables whole; what is missing stays as it was drawn."""

    discriminator: Tensors
    generator: Tensors | None  # None: it is new

    def put_into(self, electra: Electra) -> None:
        """Overwrite the weights of a pair, or of the one part that is there, with these."""
        discriminator = electra.discriminator or electra.require_generator()
        embeddings = discriminator.encoder.embeddings
        if self.generator is not None:
            put(self.generator, electra.require_generator())
        elif embeddings.base is not None:  # a new generator shares the tables that are there
            put(self.discriminator, electra.require_generator(), only="encoder.embeddings.")
        put(self.discriminator, discriminator)
        if embeddings.base is not None:
            subtract_base(embeddings, embeddings.base)


def put(tensors: Tensors, part: nn.Module, only: str = "") -> None:
    """Copy tensors over the parameters of the same names, or those of them that begin alike."""
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if name in tensors and name.startswith(only):
                parameter.copy_(tensors[name])


def subtract_base(embeddings: TokenEmbeddings, base: TokenEmbeddings) -> None:
    """Make whole tables what they add to their base."""
    with torch.no_grad():
        for table in TABLES:
            if hasattr(embeddings, table):  # the modern style has only tokens
                getattr(embeddings, table).weight.sub_(getattr(base, table).weight)


def read_start(config: InitialConfig, model: ElectraConfig) -> Start:
    """Read the weights that a run goes on from, for the parts that its first model has."""
    assert config.init is not None
    _, tensors = read_part(model_folder(config.init))
    if not has_head_for(config.init, model):
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("encoder.")}
    source = config.generator_source() if model.generator and model.discriminator else None
    generator = None if source is None else read_part(model_folder(source), "generator")[1]
    start = Start(tensors, generator)
    check_shared(start, config)
    return start


def has_head_for(path: Path, model: ElectraConfig) -> bool:
    """Whether what a folder holds says what the discriminator of a model, or its lone generator, is to say."""
    return is_discriminator(model_folder(path)) == (model.discriminator is not None and model.head == "rtd")


def check_shared(start: Start, config: InitialConfig) -> None:
    """Refuse to make one of two sets of weights that differ."""
    shared = {"embeddings": "encoder.embeddings.", "all": "encoder."}.get(config.sharing)
    if start.generator is None or shared is None:
        return
    names = [name for name in start.generator if name.startswith(shared)]
    if not all(torch.equal(start.generator[name], start.discriminator[name]) for name in names):
        raise ConfigError(
            f"generator and discriminator have different weights where --sharing {config.sharing} wants the same; "
            f"choose --sharing none or disentangled, or --init-generator {FRESH}"
        )


def has_own_segments(electra: Electra) -> bool:
    """Whether segments A and B differ in the encoder that is kept: it was trained on pairs."""
    tables = merge_embedding_delta(select_part(electra, "encoder").state_dict())
    first, *others = tables.get("encoder.embeddings.segment.weight", torch.zeros(1))  # the modern style has none
    return any(not torch.equal(first, other) for other in others)
