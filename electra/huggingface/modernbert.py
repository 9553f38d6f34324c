"""ModernBERT in `transformers`: our names and settings on the left, its own on the right, and its config.json."""

from dataclasses import replace
from typing import Any

from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.model.config import BASE, EncoderConfig, to_modern

ENCODER = {
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

SETTINGS = {
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

FIXED = {
    "hidden_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "decoder_bias": True,
}

DEFAULTS = replace(
    to_modern(BASE),
    layers=22,
    feedforward=1152,
    vocab_size=50368,
    pad_id=50283,
    positions=8192,
    global_attention_every=3,
)

KINDS = {  # our setting, what a layer that turns so is called, and what its setting was called
    "global_theta": ("full_attention", "global_rope_theta"),
    "local_theta": ("sliding_attention", "local_rope_theta"),
}


def reach_of_layers(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """How its layers see and turn, from a config.json new or old."""
    if settings.get("mlp_dropout", 0) != settings.get("embedding_dropout", 0):
        raise ConfigError("mlp_dropout differs from embedding_dropout; only one for both can be taken in")
    thetas = {ours: theta(settings, kind, older) for ours, (kind, older) in KINDS.items()}
    return {ours: found for ours, found in thetas.items() if found} | {
        "global_attention_every": global_attention_every(settings, layers)
    }


def theta(settings: dict[str, Any], kind: str, older: str) -> Any:
    """The base of the rotary positions of one kind of layer; None where nothing is said."""
    kinds = settings.get("rope_parameters") or {}
    turns = (kinds.get(kind) or {}) if isinstance(kinds, dict) else None
    is_flat = isinstance(kinds, dict) and bool(kinds) and not any(each in kinds for each, _ in KINDS.values())
    if is_flat or not isinstance(turns, dict) or turns.get("rope_type", "default") != "default":
        told = " and ".join(each for each, _ in KINDS.values())
        raise ConfigError(f"rope_parameters is {kinds!r}; of {told} only the rope_type 'default' can be taken in")
    return turns.get("rope_theta", settings.get(older))


def global_attention_every(settings: dict[str, Any], layers: int) -> int:
    """One layer in how many sees the whole row."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return settings.get("global_attn_every_n_layers", DEFAULTS.global_attention_every)
    for every in range(1, layers + 1):
        if kinds == layer_types(every, layers):
            return every
    raise ConfigError(
        f"layer_types is {kinds!r}; of {layers} layers, the first and every so many from there can be full_attention"
    )


def layer_types(global_attention_every: int, layers: int) -> list[str]:
    """What `transformers` calls layers that see the whole row, and those that see a window."""
    return ["sliding_attention" if number % global_attention_every else "full_attention" for number in range(layers)]


def modernbert_config(config: EncoderConfig, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """What ModernBertConfig says of an encoder: everything, for its defaults are those of a vocabulary of its own."""
    turns = {kind: getattr(config, ours) for ours, (kind, _) in KINDS.items()}
    first, last = (vocabulary.cls_id, vocabulary.sep_id) if vocabulary else (None, None)
    return {
        "model_type": "modernbert",
        **FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()},
        "mlp_dropout": config.dropout,
        "layer_types": layer_types(config.global_attention_every, config.layers),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": turn} for kind, turn in turns.items()},
        **dict.fromkeys(("cls_token_id", "bos_token_id"), first),
        **dict.fromkeys(("sep_token_id", "eos_token_id"), last),
    }
