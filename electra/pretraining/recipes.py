"""Recipes of pre-training: the default settings for short runs, and those of the released ELECTRA code."""

from typing import Any

from electra.model.config import SIZES

FAITHFUL: dict[str, Any] = {
    # the released code, including those of its deviations from the paper that affect training
    "optimizer": "adam",  # without bias correction
    "schedule": "released",  # the decay already runs during the warm-up
    "warmup": 10_000,  # steps
    "weight_decay": 0.01,
    "mask_token_probability": 0.85,  # the other masked positions keep their token
    "mask_count": "released",
    "packing": "segment-pairs",
    "dropout": 0.1,
}

FAST: dict[str, Any] = {
    # the best settings so far; docs/log.md lists the experiments
    "optimizer": "muon",  # leaves the plateau of token frequencies several times sooner than adamw
    "schedule": "linear",
    "warmup": 0.1,  # post-norm layers do not recover from large updates at the start
    "weight_decay": 0.1,  # with 0.01, the outputs of post-norm layers outgrow the residuals in long runs
    "embedding_weight_decay": 0.01,
    "mask_token_probability": 1.0,
    "mask_count": "released",
    "packing": "packed",  # no padding
    "scale_init_by_width": True,  # 0.02 suits width 768; narrow generators learned sooner with more in short runs
    "unigram_output_bias": True,  # saves the steps in which only token frequencies are learned
    "sinusoidal_positions": True,  # neighbouring tokens are attended to sooner
    "dropout": 0.0,  # a short run does not repeat the text often enough to overfit
}

RECIPES = {"faithful": FAITHFUL, "fast": FAST}

STYLE_SETTINGS: dict[str, dict[str, Any]] = {
    "classic": {},
    "modern": {"sinusoidal_positions": False},  # rotary positions: there is no table to initialise
}

SIZE_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "faithful": {
        "tiny": {"learning_rate": 5e-4, "batch_size": 32, "length": 128, "steps": 10_000},
        "small": {"learning_rate": 5e-4, "batch_size": 128, "length": 128, "steps": 1_000_000},
        "medium": {"learning_rate": 5e-4, "batch_size": 128, "length": 128, "steps": 1_000_000},
        "base": {"learning_rate": 2e-4, "batch_size": 256, "length": 512, "steps": 766_000},
        "large": {"learning_rate": 2e-4, "batch_size": 2048, "length": 512, "steps": 400_000},
    },
    "fast": {
        "tiny": {
            "learning_rate": 6e-3,
            "batch_size": 128,
            "length": 32,
            "steps": 10_000,
            "mask_fraction": 0.3,
            "cooccurrence_embeddings": True,  # a CPU reads too few tokens to learn them from noise
        },
        "small": {"learning_rate": 1.5e-3, "batch_size": 256, "length": 128, "steps": 50_000},
        "medium": {
            "learning_rate": 1e-3,
            "warmup": 0.05,
            "batch_size": 256,
            "length": 128,
            "steps": 50_000,
            "generator_layers": 4,
            "generator_width": 128,
            "corrective_lm_weight": 1.0,
            "phases": (  # at first as narrow as small, which learns more per minute in the first minutes
                "fraction=0.27,width=256,learning-rate=1.5e-3,schedule=wsd,decay-fraction=0",
                "fraction=0.73",
            ),
        },
        "base": {"learning_rate": 2e-4, "batch_size": 512, "length": 128, "steps": 100_000},
        "large": {"learning_rate": 1e-4, "batch_size": 512, "length": 128, "steps": 100_000},
    },
}


def recipe_settings(recipe: str, size: str, style: str = "classic") -> dict[str, Any]:
    """The settings of a recipe for a size and style, by their flat names."""
    settings = RECIPES[recipe] | {"mask_fraction": SIZES[size].mask_fraction}
    return settings | SIZE_SETTINGS[recipe][size] | STYLE_SETTINGS[style]


def recipe_phases(phases: tuple[str, ...], explicit_values: dict[str, Any]) -> tuple[str, ...]:
    """The phases of a recipe without settings that are given explicitly: those then hold for all phases. Where the
    weights or the encoder's size are given there are none, since they widen a new encoder to the recipe's size."""
    if explicit_values.keys() & {"init", "branch_from", "width", "heads", "feedforward", "embedding_width"}:
        return ()
    kept = [
        {name: value for name, value in split_phase(phase).items() if name not in explicit_values} for phase in phases
    ]
    return tuple(",".join(f"{name.replace('_', '-')}={value}" for name, value in each.items()) for each in kept)


def split_phase(phase: str) -> dict[str, str]:
    """The settings in the text of a valid phase, as text: {"learning_rate": "1e-3"} of learning-rate=1e-3."""
    parts = [part.partition("=") for part in phase.split(",")]
    return {name.strip().replace("-", "_"): value for name, _, value in parts}
