"""Recipes: settings that go together, as Python values. A flag given by hand wins over its recipe."""

from typing import Any, Literal

from electra.errors import ConfigError
from electra.model.config import get_size

Recipe = Literal["faithful", "fast"]

FAITHFUL: dict[str, Any] = {
    # the released code's settings, and those of its quirks that change what is learnt
    "optimizer": "adam",  # without bias correction
    "schedule": "released",  # the decay already runs during the warm-up
    "warmup": 10_000,  # steps
    "weight_decay": 0.01,
    "mask_token_probability": 0.85,  # of the chosen positions; the rest keeps its token
    "mask_count": "released",
    "packing": "segment-pairs",  # two segments, padding
    "dropout": 0.1,
}

FAST: dict[str, Any] = {
    # our best so far; docs/log.md has what was tried
    "optimizer": "muon",  # leaves the plateau of token frequencies several times sooner than adamw
    "schedule": "linear",
    "warmup": 0.1,  # post-norm layers that are hurried at first never recover
    "weight_decay": 0.01,
    "mask_token_probability": 1.0,  # every chosen position is a blank: more to learn from
    "mask_count": "released",
    "packing": "packed",  # no padding: every position is a token
    "scale_init_by_width": True,  # 0.02 was chosen for 768 wide; narrow generators learnt sooner from more in short trials
    "unigram_output_bias": True,  # saves the steps in which only frequencies are learnt
    "sinusoidal_positions": True,  # what stands beside a token is found sooner
    "dropout": 0.0,  # a short run never sees the text often enough to overfit
}

RECIPES = {"faithful": FAITHFUL, "fast": FAST}

BY_STYLE: dict[str, dict[str, Any]] = {
    "classic": {},
    "modern": {"sinusoidal_positions": False},  # positions turn: there is no table to fill
}

BY_SIZE: dict[str, dict[str, dict[str, Any]]] = {
    "faithful": {
        "tiny": {"learning_rate": 5e-4, "batch_size": 32, "length": 128, "steps": 10_000},
        "small": {"learning_rate": 5e-4, "batch_size": 128, "length": 128, "steps": 1_000_000},
        "base": {"learning_rate": 2e-4, "batch_size": 256, "length": 512, "steps": 766_000},
        "large": {"learning_rate": 2e-4, "batch_size": 2048, "length": 512, "steps": 400_000},
    },
    "fast": {
        "tiny": {"learning_rate": 3e-3, "batch_size": 64, "length": 64, "steps": 10_000, "mask_fraction": 0.3},
        "small": {"learning_rate": 1.5e-3, "batch_size": 256, "length": 128, "steps": 50_000},
        "base": {"learning_rate": 2e-4, "batch_size": 512, "length": 128, "steps": 100_000},
        "large": {"learning_rate": 1e-4, "batch_size": 512, "length": 128, "steps": 100_000},
    },
}


def settings_for(recipe: str, size: str, style: str = "classic") -> dict[str, Any]:
    """What a recipe sets for a size and a style."""
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}; choose from {', '.join(RECIPES)}")
    if style not in BY_STYLE:
        raise ConfigError(f"there is no style {style!r}; choose from {', '.join(BY_STYLE)}")
    return RECIPES[recipe] | {"mask_fraction": get_size(size).mask_fraction} | BY_SIZE[recipe][size] | BY_STYLE[style]
