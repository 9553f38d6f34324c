"""Hugging Face folders: one table of names, read both ways.

Left stands our name, right the name in `transformers`. Only names change, so a model that arrives and leaves again has
the same bytes in every tensor. Our query, key and value are one tensor; in ELECTRA and BERT they are three, in that
order. What ModernBERT has no place for, tables narrower than hidden states, leaves multiplied out.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError, DataError
from electra.huggingface import modernbert
from electra.model.config import BASE, SMALL, EncoderConfig
from electra.model.electra import Discriminator, Electra, Generator, MaskedLanguageModel
from electra.model.storage import CONFIG, WEIGHTS, check_tensors, read_tensors
from electra.runfolder import read_json

Tensors = dict[str, Tensor]

SETTINGS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feedforward": "intermediate_size",
    "embedding_width": "embedding_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "pad_id": "pad_token_id",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_epsilon": "layer_norm_eps",
    "init_std": "initializer_range",
}

ENCODER = {
    "encoder.embeddings.token": "embeddings.word_embeddings",
    "encoder.embeddings.position": "embeddings.position_embeddings",
    "encoder.embeddings.segment": "embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "embeddings.LayerNorm",
    "encoder.project": "embeddings_project",
    "encoder.layers.N.attention.qkv": "encoder.layer.N.attention.self.query|key|value",
    "encoder.layers.N.attention.output": "encoder.layer.N.attention.output.dense",
    "encoder.layers.N.attention_norm": "encoder.layer.N.attention.output.LayerNorm",
    "encoder.layers.N.feedforward.up": "encoder.layer.N.intermediate.dense",
    "encoder.layers.N.feedforward.down": "encoder.layer.N.output.dense",
    "encoder.layers.N.feedforward_norm": "encoder.layer.N.output.LayerNorm",
}

Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What the classes of one model type of `transformers` have in common."""

    prefix: str  # before the encoder's names where there is a head
    encoder: dict[str, str]  # our encoder's names and theirs
    settings: dict[str, str]  # our settings and theirs
    fixed: Settings  # theirs that have one value only; what its config.json does not say has it, too
    defaults: EncoderConfig  # what its config.json need not say
    has_embedding_width: bool  # whether tables may be narrower than hidden states
    reach: Callable[[Settings, int], Settings]  # how so many layers see, from its config.json
    left_out: str  # a pattern of names, without the prefix, that a file may have and no part of ours needs


CLASSIC_FIXED = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}

ELECTRA = Family(
    prefix="electra.",
    encoder=ENCODER,
    settings=SETTINGS,
    fixed=CLASSIC_FIXED,
    defaults=SMALL,
    has_embedding_width=True,
    reach=lambda settings, layers: {},
    left_out=r"embeddings\.position_ids|embeddings_project\..*",
)
BERT = Family(
    prefix="bert.",
    encoder=ENCODER,
    settings=SETTINGS,
    fixed=CLASSIC_FIXED,
    defaults=BASE,
    has_embedding_width=False,
    reach=lambda settings, layers: {},
    left_out=r"embeddings\.position_ids|pooler\..*|cls\.seq_relationship\..*",
)
MODERNBERT = Family(
    prefix="model.",
    encoder=modernbert.ENCODER,
    settings=modernbert.SETTINGS,
    fixed=modernbert.FIXED,
    defaults=modernbert.DEFAULTS,
    has_embedding_width=False,
    reach=modernbert.reach_of_layers,
    left_out="",
)


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`: which of our parts it is, and its names beside the encoder's."""

    part: str  # generator or discriminator
    family: Family
    head: dict[str, str]  # our head's names and theirs; empty for a bare encoder
    twins: tuple[tuple[str, str], ...] = ()  # tensors that older files repeat, and what each repeats
    labels: tuple[str, ...] = ()  # of a head that gives each label a row; ours has the last one's, less the first's

    def prefix(self) -> str:
        """What stands before the encoder's names."""
        return self.family.prefix if self.head else ""


ARCHITECTURES = {
    "ElectraModel": Architecture(part="discriminator", family=ELECTRA, head={}),
    "ElectraForPreTraining": Architecture(
        part="discriminator",
        family=ELECTRA,
        head={
            "head.dense": "discriminator_predictions.dense",
            "head.classifier": "discriminator_predictions.dense_prediction",
        },
    ),
    "ElectraForMaskedLM": Architecture(
        part="generator",
        family=ELECTRA,
        head={
            "head.dense": "generator_predictions.dense",
            "head.norm": "generator_predictions.LayerNorm",
            "head": "generator_lm_head",
        },
        twins=(("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),),
    ),
    "BertModel": Architecture(part="discriminator", family=BERT, head={}),
    "BertForMaskedLM": Architecture(
        part="generator",
        family=BERT,
        head={
            "head.dense": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
            "head": "cls.predictions",
        },
        twins=(
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    "ModernBertModel": Architecture(part="discriminator", family=MODERNBERT, head={}),
    "ModernBertForTokenClassification": Architecture(
        part="discriminator",
        family=MODERNBERT,
        head={"head.dense": "head.dense", "head.norm": "head.norm", "head.classifier": "classifier"},
        labels=("original", "replaced"),
    ),
    "ModernBertForMaskedLM": Architecture(
        part="generator",
        family=MODERNBERT,
        head={"head.dense": "head.dense", "head.norm": "head.norm", "head": "decoder"},
        twins=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
    ),
}
EXPORT_CLASSES = {
    "classic": {
        "discriminator": "ElectraForPreTraining",
        "generator": "ElectraForMaskedLM",
        "encoder": "ElectraModel",
    },
    "modern": {
        "discriminator": "ModernBertForTokenClassification",
        "generator": "ModernBertForMaskedLM",
        "encoder": "ModernBertModel",
    },
}


def their_names(ours: str, architecture: Architecture) -> list[str]:
    """The name, or the three names (query, key, value), that one of our tensors has in `transformers`."""
    stem, kind = ours.rsplit(".", 1)
    layer = re.search(r"layers\.(\d+)", stem)
    if stem.startswith("head"):
        theirs = architecture.head[stem]
    else:
        theirs = architecture.prefix() + architecture.family.encoder[re.sub(r"layers\.\d+", "layers.N", stem)]
    path, dot, last = theirs.replace(".N.", f".{layer[1]}." if layer else "").rpartition(".")
    return [f"{path}{dot}{choice}.{kind}" for choice in last.split("|")]


def to_huggingface(state: Tensors, architecture: Architecture) -> Tensors:
    """A part's tensors under the names of `transformers`."""
    renamed: Tensors = {}
    for ours, tensor in state.items():
        if ours.startswith("encoder.") or architecture.head:
            theirs = their_names(ours, architecture)
            tensor = in_rows(tensor) if has_rows(ours, architecture) else tensor
            renamed.update(zip(theirs, tensor.chunk(len(theirs)), strict=True))
    return renamed


def has_rows(ours: str, architecture: Architecture) -> bool:
    """Whether one of our tensors is a verdict that they give a row for each of two labels."""
    return ours.startswith("head.classifier.") and bool(architecture.labels)


def in_rows(verdict: Tensor) -> Tensor:
    """A verdict in two rows, nothing and itself: their softmax is then its sigmoid."""
    return torch.cat([torch.zeros_like(verdict), verdict])


def in_one(rows: Tensor) -> Tensor:
    """Two rows as one verdict: what the second label has more than the first."""
    return rows[1:] - rows[:1]


def from_huggingface(
    tensors: Tensors, architecture: Architecture, config: EncoderConfig, path: Path
) -> tuple[Tensors, list[str]]:
    """The tensors of a Hugging Face folder under the names of our part, and the names of those that are left out."""
    ours = empty_part(architecture, config)
    wanted = to_huggingface(ours, architecture)
    tensors = without_twins(under_todays_names(tensors, architecture, path), architecture, path)
    left_out = sorted(name for name in tensors if name not in wanted and is_spare(name, architecture.family))
    check_tensors({name: tensor for name, tensor in tensors.items() if name not in left_out}, wanted, path)
    found = {name: torch.cat([tensors[theirs] for theirs in their_names(name, architecture)]) for name in ours}
    return {name: in_one(it) if has_rows(name, architecture) else it for name, it in found.items()}, left_out


def empty_part(architecture: Architecture, config: EncoderConfig) -> Tensors:
    """The tensors that our part of this size has, without numbers; only the encoder's where there is no head."""
    with torch.device("meta"):
        part = Generator(config) if architecture.part == "generator" else Discriminator(config)
    return {
        name: tensor for name, tensor in part.named_parameters() if architecture.head or name.startswith("encoder.")
    }


def under_todays_names(tensors: Tensors, architecture: Architecture, path: Path) -> Tensors:
    """The tensors of a file, new or old, as `transformers` names them today."""
    renamed = {todays_name(name, architecture): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise DataError(f"{path} has tensors twice, with and without {architecture.family.prefix} before their names")
    return renamed


def todays_name(name: str, architecture: Architecture) -> str:
    """A name of an old file, with LayerNorm's gamma and beta, and with the encoder's prefix just where a head is."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    name = name.removeprefix(architecture.family.prefix)
    encoder = ("embeddings", "encoder.", "pooler.", "layers.", "final_norm.")
    return architecture.prefix() + name if name.startswith(encoder) else name


def is_spare(name: str, family: Family) -> bool:
    """Whether no part of ours needs a tensor of this name; a projection may be stored where widths are equal."""
    return re.fullmatch(family.left_out, name.removeprefix(family.prefix)) is not None


def without_twins(tensors: Tensors, architecture: Architecture, path: Path) -> Tensors:
    """Drop repetitions, once they are seen to repeat."""
    for twin, original in architecture.twins:
        if twin in tensors and not torch.equal(tensors[twin], tensors.get(original, torch.empty(0))):
            raise DataError(f"{path}: {twin} differs from {original}; only tied output tables can be taken in")
    twins = {twin for twin, _ in architecture.twins}
    return {name: tensor for name, tensor in tensors.items() if name not in twins}


@dataclass(frozen=True)
class ImportedModel:
    """What a Hugging Face folder holds: which part it is, its size, and its tensors under our names."""

    part: str  # generator or discriminator
    config: EncoderConfig
    tensors: Tensors
    left_out: list[str]  # tensors of the folder that no part of ours needs


def read_huggingface(folder: Path) -> ImportedModel:
    """Read a Hugging Face folder."""
    settings = read_json(folder / CONFIG)
    architecture = get_architecture(settings, folder)
    config = encoder_config(settings, architecture, folder)
    return ImportedModel(
        architecture.part, config, *from_huggingface(read_weights(folder), architecture, config, folder)
    )


def get_architecture(settings: Settings, folder: Path) -> Architecture:
    """The architecture that a config.json names."""
    if "model_type" not in settings:
        raise DataError(f"{folder} is not a Hugging Face folder: its config.json names no model_type")
    named: Any = settings.get("architectures")
    for name, architecture in ARCHITECTURES.items():
        if named == [name]:
            return architecture
    if named in [[name] for name, _, _ in CLASSIFIERS.values()]:
        raise DataError(
            f"{folder} is a classifier of texts, {named[0]}, which is for transformers; electra predict, evaluate and "
            f"finetune take the folder that it was exported from, other commands a pre-trained model"
        )
    raise DataError(f"{folder}: architectures is {named!r}; what can be taken in is {', '.join(ARCHITECTURES)}")


def encoder_config(settings: Settings, architecture: Architecture, folder: Path) -> EncoderConfig:
    """The size that a config.json describes."""
    family = architecture.family
    for name, allowed in family.fixed.items():
        if settings.get(name, allowed) != allowed:
            raise DataError(f"{folder}: {name} is {settings[name]!r}; only {allowed!r} can be taken in")
    check_labels(settings, architecture, folder)
    found = {ours: settings[theirs] for ours, theirs in family.settings.items() if settings.get(theirs) is not None}
    found = vars(family.defaults) | found
    if not family.has_embedding_width:
        found["embedding_width"] = found["width"]
    try:
        config = EncoderConfig(**found)
        return replace(config, **family.reach(settings, config.layers))
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None


def check_labels(settings: Settings, architecture: Architecture, folder: Path) -> None:
    """Refuse a classifier of tokens that is no discriminator."""
    labels = settings.get("id2label")
    if architecture.labels and labels != {str(number): name for number, name in enumerate(architecture.labels)}:
        wanted = " and ".join(architecture.labels)
        has = "labels without names" if labels is None else f"labels of its own, {labels!r}"
        raise DataError(
            f"{folder} is a classifier of tokens with {has}; only a discriminator, with the labels {wanted}, "
            f"can be taken in"
        )


def read_weights(folder: Path) -> Tensors:
    """The tensors of a folder, from one file, or where there is none from the several that an index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return read_tensors(folder / WEIGHTS)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DataError(f"{index} names no files: its weight_map must give the file of each tensor; copy it again")
    files = sorted({Path(file).name for file in places.values()})
    return {name: tensor for file in files for name, tensor in read_tensors(folder / file).items()}


def select_part(electra: Electra, part: str) -> MaskedLanguageModel | Discriminator:
    """The part of a pair that leaves; the encoder is the discriminator's, or of a lone generator the generator's."""
    if part == "encoder" and electra.discriminator is not None:
        return electra.discriminator
    return electra.require_discriminator() if part == "discriminator" else electra.require_generator()


def merge_embedding_delta(state: Tensors) -> Tensors:
    """Tables that add to a base (disentangled sharing) as the one table they amount to."""
    bases = {name: tensor for name, tensor in state.items() if ".base." in name}
    whole = {name: tensor for name, tensor in state.items() if name not in bases}
    for name, base in bases.items():
        if ".norm." not in name:  # the LayerNorm is not added to: the discriminator has its own
            whole[name.replace(".base.", ".")] = whole[name.replace(".base.", ".")] + base
    return whole


def fold_projection(state: Tensors, config: EncoderConfig) -> Tensors:
    """A modern part whose narrow table and projection are the one table [V, D] that they amount to."""
    if not config.is_modern() or "encoder.project.weight" not in state:
        return state
    whole = {name: tensor for name, tensor in state.items() if name != "encoder.project.weight"}
    table, projection = state["encoder.embeddings.token.weight"], state["encoder.project.weight"]
    product = table.float() @ projection.float().T
    return whole | {"encoder.embeddings.token.weight": product.to(table.dtype)}


def huggingface_config(
    config: EncoderConfig, architecture: str, dtype: torch.dtype, vocabulary: Vocabulary | None
) -> Settings:
    """The config.json that `transformers` reads; special tokens are the vocabulary's, where it is known."""
    described = modernbert.modernbert_config(config, vocabulary) if config.is_modern() else electra_settings(config)
    return {
        "architectures": [architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": True,
        **described,
    }


def electra_settings(config: EncoderConfig) -> Settings:
    """What ElectraConfig says of an encoder."""
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()}
    return {"model_type": "electra", "hidden_act": "gelu", **settings}


def labelled(names: tuple[str, ...]) -> Settings:
    """The names of a classifier's outputs, if it is one."""
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def classifier_head(head: Tensors) -> Tensors:
    """A linear head as the two layers that ElectraForSequenceClassification has: GELU(z) − GELU(−z) = z."""
    weight, bias = head["weight"], head["bias"]
    outputs, width = weight.shape
    if 2 * outputs > width:
        raise ConfigError(f"{outputs} outputs need a width of {2 * outputs} in transformers' head, and this is {width}")
    rest = width - 2 * outputs
    one = torch.eye(outputs)
    return {
        "classifier.dense.weight": torch.cat([weight, -weight, torch.zeros(rest, width)]),
        "classifier.dense.bias": torch.cat([bias, -bias, torch.zeros(rest)]),
        "classifier.out_proj.weight": torch.cat([one, -one, torch.zeros(outputs, rest)], dim=1),
        "classifier.out_proj.bias": torch.zeros(outputs),
    }


def modern_classifier_head(head: Tensors) -> Tensors:
    """The head of modern fine-tuned models, which is ModernBertForSequenceClassification's own."""
    return {
        "head.dense.weight": head["dense.weight"],
        "head.norm.weight": head["norm.weight"],
        "classifier.weight": head["weight"],
        "classifier.bias": head["bias"],
    }


CLASSIFIERS: dict[str, tuple[str, str, Callable[[Tensors], Tensors]]] = {
    # style: the classifier of texts it leaves as, a class whose encoder has the same names, and its head
    "classic": ("ElectraForSequenceClassification", "ElectraForPreTraining", classifier_head),
    "modern": ("ModernBertForSequenceClassification", "ModernBertForTokenClassification", modern_classifier_head),
}
