"""Names of tensors and settings in `transformers`, for the classes of ELECTRA, BERT and ModernBERT.

Every table maps our name to theirs and is used in both directions. `N` stands for the number of a layer, and
`query|key|value` for three tensors of theirs that are one of ours.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from electra.errors import DataError
from electra.model.config import BASE, SMALL, EncoderConfig, to_modern

Part = Literal["discriminator", "generator", "encoder"]
Settings = dict[str, Any]

ENCODER_NAMES = {
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
SETTING_NAMES = {
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
FIXED_SETTINGS = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}

MODERNBERT_ENCODER_NAMES = {
    "encoder.embeddings.token": "embeddings.tok_embeddings",
    "encoder.embedding_norm.norm": "embeddings.norm",
    "encoder.layers.N.attention_norm": "layers.N.attn_norm",
    "encoder.layers.N.attention.qkv": "layers.N.attn.Wqkv",
    "encoder.layers.N.attention.output": "layers.N.attn.Wo",
    "encoder.layers.N.feedforward_norm": "layers.N.mlp_norm",
    "encoder.layers.N.feedforward.up": "layers.N.mlp.Wi",
    "encoder.layers.N.feedforward.down": "layers.N.mlp.Wo",
    "encoder.final_norm": "final_norm",
}
MODERNBERT_SETTING_NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feedforward": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "pad_id": "pad_token_id",
    "dropout": "embedding_dropout",
    "attention_dropout": "attention_dropout",
    "norm_epsilon": "norm_eps",
    "init_std": "initializer_range",
    "local_attention": "local_attention",
}
MODERNBERT_FIXED_SETTINGS = {
    "hidden_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "decoder_bias": True,
}
MODERNBERT_DEFAULTS = replace(
    to_modern(BASE),
    layers=22,
    feedforward=1152,
    vocab_size=50368,
    pad_id=50283,
    positions=8192,
    global_attention_every=3,
)
ROPE_NAMES = {
    # our setting: the type of layer in `rope_parameters`, and the setting of older versions of transformers
    "global_theta": ("full_attention", "global_rope_theta"),
    "local_theta": ("sliding_attention", "local_rope_theta"),
}


@dataclass(frozen=True)
class ModelFamily:
    """What the classes of one model type of `transformers` have in common."""

    prefix: str  # of the encoder's tensors in a model with a head
    encoder_names: dict[str, str]
    setting_names: dict[str, str]
    fixed_settings: Settings  # settings of which we support one value, which is also their default
    defaults: EncoderConfig  # of settings that a config.json may omit
    ignored: str  # pattern of tensors, without the prefix, that a file may contain and we do not need


ELECTRA = ModelFamily(
    prefix="electra.",
    encoder_names=ENCODER_NAMES,
    setting_names=SETTING_NAMES,
    fixed_settings=FIXED_SETTINGS,
    defaults=SMALL,
    ignored=r"embeddings\.position_ids|embeddings_project\..*",  # a projection although both widths are equal
)
BERT = replace(
    ELECTRA,
    prefix="bert.",
    setting_names={ours: theirs for ours, theirs in SETTING_NAMES.items() if ours != "embedding_width"},
    defaults=BASE,
    ignored=r"embeddings\.position_ids|pooler\..*|cls\.seq_relationship\..*",
)
MODERNBERT = ModelFamily(
    prefix="model.",
    encoder_names=MODERNBERT_ENCODER_NAMES,
    setting_names=MODERNBERT_SETTING_NAMES,
    fixed_settings=MODERNBERT_FIXED_SETTINGS,
    defaults=MODERNBERT_DEFAULTS,
    ignored="",
)


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers`, and the part of our pair that it corresponds to."""

    part: Part  # generator or discriminator
    family: ModelFamily
    head: dict[str, str]  # names of the head's tensors; empty for an encoder without a head
    tied_tensors: tuple[tuple[str, str], ...] = ()  # tensors that older files store twice: the copy, the original
    labels: tuple[str, ...] = ()  # of a discriminator with one logit per label: ours is their difference

    @property
    def encoder_prefix(self) -> str:
        return self.family.prefix if self.head else ""

    def huggingface_names(self, name: str) -> list[str]:
        """The names in `transformers` of one of our tensors: one, or those of query, key and value."""
        module, _, kind = name.rpartition(".")
        if module.startswith("head"):
            theirs = self.head[module]
        else:
            theirs = self.encoder_prefix + self.family.encoder_names[re.sub(r"layers\.\d+", "layers.N", module)]
        if layer := re.search(r"layers\.(\d+)", module):
            theirs = theirs.replace(".N.", f".{layer[1]}.")
        parent, dot, last = theirs.rpartition(".")
        return [f"{parent}{dot}{child}.{kind}" for child in last.split("|")]


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
        tied_tensors=(("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),),
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
        tied_tensors=(
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
        tied_tensors=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
    ),
}

EXPORT_CLASSES: dict[str, dict[Part, str]] = {
    "classic": {"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM", "encoder": "ElectraModel"},
    "modern": {
        "discriminator": "ModernBertForTokenClassification",
        "generator": "ModernBertForMaskedLM",
        "encoder": "ModernBertModel",
    },
}
TASK_CLASSES = {  # of fine-tuned models, by task and style of the encoder
    "SequenceClassification": {
        "classic": "ElectraForSequenceClassification",
        "modern": "ModernBertForSequenceClassification",
    },
    "QuestionAnswering": {"classic": "ElectraForQuestionAnswering", "modern": "ModernBertForQuestionAnswering"},
    "TokenClassification": {"classic": "ElectraForTokenClassification", "modern": "ModernBertForTokenClassification"},
    "MultipleChoice": {"classic": "ElectraForMultipleChoice", "modern": "ModernBertForMultipleChoice"},
}


def get_architecture(settings: Settings, folder: Path) -> Architecture:
    """The architecture that the config.json of a Hugging Face folder names."""
    if "model_type" not in settings:
        raise DataError(f"{folder} is not a Hugging Face folder: its config.json has no model_type")
    classes = settings.get("architectures")
    name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    if name in list(ARCHITECTURES):
        return ARCHITECTURES[name]
    if any(name in classes.values() for classes in TASK_CLASSES.values()):
        raise DataError(
            f"{folder} is a fine-tuned model exported for transformers ({name}); electra predict, evaluate and "
            "finetune read the folder it was exported from, other commands need a pre-trained model"
        )
    raise DataError(f"{folder}: architectures is {classes!r}; supported are {', '.join(ARCHITECTURES)}")
