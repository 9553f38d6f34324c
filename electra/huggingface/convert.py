"""Models of `transformers` from ours and back: their tensors, config.json and folders.

Tensors are only renamed, so import followed by export is byte-identical. Only what their classes cannot represent is
computed on export: disentangled embeddings are summed, and a modern encoder's embedding table and projection are
multiplied to one table.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError, DataError
from electra.huggingface.names import (
    MODERNBERT,
    MODERNBERT_DEFAULTS,
    MODERNBERT_FIXED_SETTINGS,
    MODERNBERT_SETTING_NAMES,
    ROPE_NAMES,
    SETTING_NAMES,
    Architecture,
    Part,
    Settings,
    get_architecture,
)
from electra.model.config import TABLE_FIELDS, ElectraConfig, EncoderConfig, Sharing
from electra.model.electra import Discriminator, Electra, Generator, MaskedLanguageModel, meta_device
from electra.model.storage import (
    WEIGHTS,
    check_sizes_fit,
    check_tensors,
    has_rtd_head,
    is_huggingface_folder,
    load_model,
    read_model_config,
    read_tensor_names,
    read_tensors,
)
from electra.runfolder import CONFIG, convert_stored, read_json

Tensors = dict[str, Tensor]

ENCODER_PREFIXES = ("embeddings", "encoder.", "pooler.", "layers.", "final_norm.")


def to_huggingface_tensors(state: Tensors, architecture: Architecture) -> Tensors:
    """Rename the tensors of a generator or discriminator; those of auxiliary heads are dropped."""
    renamed: Tensors = {}
    for name, tensor in state.items():
        if name.startswith("auxiliary_heads.") or (not name.startswith("encoder.") and not architecture.head):
            continue
        if architecture.labels and name.startswith("head.classifier."):
            tensor = torch.cat([torch.zeros_like(tensor), tensor])  # softmax of logits (0, z) is sigmoid of z
        names = architecture.huggingface_names(name)
        renamed.update(zip(names, tensor.chunk(len(names)), strict=True))
    return renamed


def from_huggingface_tensors(
    tensors: Tensors, architecture: Architecture, config: EncoderConfig, path: Path
) -> tuple[Tensors, list[str]]:
    """Rename the tensors of a Hugging Face folder to ours; returns them and the names of those we do not need."""
    ours = expected_tensors(architecture, config)
    expected = to_huggingface_tensors(ours, architecture)
    tensors = drop_tied_tensors(normalize_tensor_names(tensors, architecture, path), architecture, path)
    family = architecture.family
    unexpected = sorted(tensors.keys() - expected.keys())
    ignored = [name for name in unexpected if re.fullmatch(family.ignored, name.removeprefix(family.prefix))]
    check_tensors({name: tensor for name, tensor in tensors.items() if name not in ignored}, expected, path)
    renamed = {name: torch.cat([tensors[theirs] for theirs in architecture.huggingface_names(name)]) for name in ours}
    if architecture.labels:
        for name in ("head.classifier.weight", "head.classifier.bias"):
            renamed[name] = renamed[name][1:] - renamed[name][:1]  # two labels → one logit: their difference
    return renamed, ignored


def expected_tensors(architecture: Architecture, config: EncoderConfig) -> Tensors:
    """The parameters, on the meta device, of our generator, discriminator or encoder for a class of `transformers`."""
    with meta_device():
        model = Generator(config) if architecture.part == "generator" else Discriminator(config)
    parameters = model.named_parameters()
    return {name: tensor for name, tensor in parameters if architecture.head or name.startswith("encoder.")}


def normalize_tensor_names(tensors: Tensors, architecture: Architecture, path: Path) -> Tensors:
    """Rename the tensors of older files: LayerNorm's gamma and beta, and a missing or superfluous encoder prefix."""
    renamed = {}
    for name, tensor in tensors.items():
        current = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        current = current.removeprefix(architecture.family.prefix)
        renamed[architecture.encoder_prefix + current if current.startswith(ENCODER_PREFIXES) else current] = tensor
    if len(renamed) < len(tensors):
        raise DataError(f"{path} has tensors twice, with and without the prefix {architecture.family.prefix}")
    return renamed


def drop_tied_tensors(tensors: Tensors, architecture: Architecture, path: Path) -> Tensors:
    """Remove copies of tied tensors after checking that they are equal to their originals."""
    for copy, original in architecture.tied_tensors:
        if copy in tensors and not torch.equal(tensors[copy], tensors.get(original, torch.empty(0))):
            raise DataError(f"{path}: {copy} differs from {original}; only tied output embeddings are supported")
    copies = {copy for copy, _ in architecture.tied_tensors}
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def merge_embedding_delta(state: Tensors) -> Tensors:
    """Replace disentangled embeddings by their sum with the generator's; the LayerNorm is the discriminator's own."""
    merged = {name: tensor for name, tensor in state.items() if ".base." not in name}
    for name, base in state.items():
        if ".base." in name and ".norm." not in name:
            delta = name.replace(".base.", ".")
            merged[delta] = merged[delta] + base
    return merged


def fold_projection(state: Tensors, config: EncoderConfig) -> Tensors:
    """Multiply a modern encoder's embedding table [V, E] by its projection [D, E]: one table [V, D]."""
    if not config.is_modern() or "encoder.project.weight" not in state:
        return state
    table, projection = state["encoder.embeddings.token.weight"], state["encoder.project.weight"]
    folded = (table.float() @ projection.float().T).to(table.dtype)
    others = {name: tensor for name, tensor in state.items() if name != "encoder.project.weight"}
    return others | {"encoder.embeddings.token.weight": folded}


def to_electra_classification_head(head: Tensors) -> Tensors:
    """A linear head as the two layers of ElectraForSequenceClassification: GELU(z) − GELU(−z) = z."""
    weight, bias = head["weight"], head["bias"]
    outputs, width = weight.shape
    if 2 * outputs > width:
        raise ConfigError(
            f"{outputs} outputs need a hidden size of at least {2 * outputs} in ElectraForSequenceClassification, "
            f"and this model has {width}"
        )
    rest = width - 2 * outputs
    identity = torch.eye(outputs)
    return {
        "classifier.dense.weight": torch.cat([weight, -weight, torch.zeros(rest, width)]),
        "classifier.dense.bias": torch.cat([bias, -bias, torch.zeros(rest)]),
        "classifier.out_proj.weight": torch.cat([identity, -identity, torch.zeros(outputs, rest)], dim=1),
        "classifier.out_proj.bias": torch.zeros(outputs),
    }


def to_modernbert_classification_head(head: Tensors) -> Tensors:
    """The head of modern fine-tuned models, which is that of ModernBertForSequenceClassification."""
    return {
        "head.dense.weight": head["dense.weight"],
        "head.norm.weight": head["norm.weight"],
        "classifier.weight": head["weight"],
        "classifier.bias": head["bias"],
    }


def to_linear_classifier(head: Tensors) -> Tensors:
    return {f"classifier.{name}": tensor for name, tensor in head.items()}


TASK_HEADS: dict[str, Callable[[Tensors], Tensors]] = {  # tensors of our task head → those of a class of `transformers`
    "ElectraForSequenceClassification": to_electra_classification_head,
    "ModernBertForSequenceClassification": to_modernbert_classification_head,
    "ElectraForMultipleChoice": to_linear_classifier,
    "ModernBertForMultipleChoice": to_modernbert_classification_head,
    "ElectraForQuestionAnswering": lambda head: {f"qa_outputs.{name}": tensor for name, tensor in head.items()},
    "ModernBertForQuestionAnswering": to_modernbert_classification_head,
    "ElectraForTokenClassification": to_linear_classifier,
    "ModernBertForTokenClassification": to_modernbert_classification_head,
}


def choice_settings(config: EncoderConfig) -> Settings:
    """Settings that make the head of ElectraForMultipleChoice ours, a linear layer on the [CLS] state."""
    summary = {"summary_type": "first", "summary_use_proj": False, "summary_activation": "linear"}
    return {} if config.is_modern() else summary | {"summary_last_dropout": config.dropout}


def to_huggingface_config(
    config: EncoderConfig, class_name: str, dtype: torch.dtype, vocabulary: Vocabulary | None
) -> Settings:
    """The config.json that `transformers` reads; ModernBERT's has special tokens, if the vocabulary is known."""
    return {
        "architectures": [class_name],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": True,
        **(modernbert_settings(config, vocabulary) if config.is_modern() else electra_settings(config)),
    }


def electra_settings(config: EncoderConfig) -> Settings:
    """The settings of `transformers`' ElectraConfig for a classic encoder."""
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTING_NAMES.items()}
    return {"model_type": "electra", "hidden_act": "gelu", **settings}


def modernbert_settings(config: EncoderConfig, vocabulary: Vocabulary | None) -> Settings:
    """The settings of ModernBertConfig; all of them, since its defaults are for another vocabulary."""
    rope = {kind: getattr(config, ours) for ours, (kind, _) in ROPE_NAMES.items()}
    older = {name: getattr(config, ours) for ours, (_, name) in ROPE_NAMES.items()}  # before transformers 5
    older["global_attn_every_n_layers"] = config.global_attention_every
    cls_id, sep_id = (vocabulary.cls_id, vocabulary.sep_id) if vocabulary else (None, None)
    return {
        "model_type": "modernbert",
        **MODERNBERT_FIXED_SETTINGS,
        **{theirs: getattr(config, ours) for ours, theirs in MODERNBERT_SETTING_NAMES.items()},
        "mlp_dropout": config.dropout,
        "layer_types": layer_types(config.global_attention_every, config.layers),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in rope.items()},
        **older,
        **dict.fromkeys(("cls_token_id", "bos_token_id"), cls_id),
        **dict.fromkeys(("sep_token_id", "eos_token_id"), sep_id),
    }


def label_settings(labels: tuple[str, ...]) -> Settings:
    """The names of a classifier's outputs; none for other models."""
    if not labels:
        return {}
    return {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}


def from_huggingface_config(settings: Settings, architecture: Architecture, folder: Path) -> EncoderConfig:
    """The encoder that a config.json describes."""
    family = architecture.family
    for name, supported in family.fixed_settings.items():
        if settings.get(name, supported) != supported:
            raise DataError(f"{folder}: {name} is {settings[name]!r}; only {supported!r} is supported")
    check_discriminator_labels(settings, architecture, folder)
    ours = {ours: settings[theirs] for ours, theirs in family.setting_names.items() if settings.get(theirs) is not None}
    ours = asdict(family.defaults) | ours
    if "embedding_width" not in family.setting_names:
        ours["embedding_width"] = ours["width"]
    config = convert_stored(ours, EncoderConfig, folder / CONFIG)
    if family is not MODERNBERT:
        return config
    try:
        ours |= read_attention_settings(settings, config.layers)
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from None
    return convert_stored(ours, EncoderConfig, folder / CONFIG)


def check_discriminator_labels(settings: Settings, architecture: Architecture, folder: Path) -> None:
    """Check that a token classifier is a discriminator."""
    labels = settings.get("id2label")
    if architecture.labels and labels != {str(number): label for number, label in enumerate(architecture.labels)}:
        raise DataError(
            f"{folder} is a token classifier with id2label {labels!r}; only a discriminator, with the labels "
            f"{' and '.join(architecture.labels)}, can be imported"
        )


def read_attention_settings(settings: Settings, layers: int) -> Settings:
    """Global attention and rotary positions in the config.json of ModernBERT, of newer and older versions."""
    if settings.get("mlp_dropout", 0) != settings.get("embedding_dropout", 0):
        raise ConfigError("mlp_dropout differs from embedding_dropout; they must be equal")
    thetas = {ours: read_rope_theta(settings, kind, older) for ours, (kind, older) in ROPE_NAMES.items()}
    if "local_rope_theta" in settings and thetas["local_theta"] is None:  # null: the same in all layers
        thetas["local_theta"] = thetas["global_theta"] or MODERNBERT_DEFAULTS.global_theta
    return {
        "global_attention_every": read_global_attention_every(settings, layers),
        **{ours: theta for ours, theta in thetas.items() if theta},
    }


def read_rope_theta(settings: Settings, layer_type: str, older_name: str) -> Any:
    """The RoPE base of one type of layer; None if it is not set."""
    parameters = settings.get("rope_parameters") or {}
    types = [kind for kind, _ in ROPE_NAMES.values()]
    is_by_type = isinstance(parameters, dict) and (not parameters or any(kind in parameters for kind in types))
    rope = (parameters.get(layer_type) or {}) if is_by_type else None
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"rope_parameters is {parameters!r}; supported is the rope_type 'default' for {' and '.join(types)}"
        )
    return rope.get("rope_theta", settings.get(older_name))


def read_global_attention_every(settings: Settings, layers: int) -> int:
    types = settings.get("layer_types")
    if types is None:
        return settings.get("global_attn_every_n_layers", MODERNBERT_DEFAULTS.global_attention_every)
    if isinstance(types, list) and len(types) == layers:
        every = next((number for number in range(1, layers) if types[number] == "full_attention"), layers)
        if types == layer_types(every, layers):
            return every
    raise ConfigError(
        f"layer_types is {types!r}; full_attention must be in the first and every N-th of {layers} layers after it"
    )


def layer_types(global_attention_every: int, layers: int) -> list[str]:
    """What `transformers` calls layers with global and with local attention."""
    return ["sliding_attention" if number % global_attention_every else "full_attention" for number in range(layers)]


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
