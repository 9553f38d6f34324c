"""Phases as a user writes them: name=value,name=value for each, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from electra.errors import ConfigError

SETTINGS = {
    # what may differ between the phases of a run
    "objective": str,
    "length": int,
    "batch_size": int,
    "micro_batches": int,
    "learning_rate": float,
    "mask_fraction": float,
    "temperature": float,
}


@dataclass(frozen=True)
class Departure:
    """How one phase departs from the settings of its run, and from where to where in the budget it goes."""

    settings: dict[str, Any]
    begin: float
    end: float


def read_phases(texts: Sequence[str]) -> list[Departure]:
    """The phases that `texts` describe; without any, the run is one."""
    tables = [read_settings(text) for text in texts or ("share=1",)]
    ends = [0.0]
    for share in shares(tables):
        ends.append(ends[-1] + share)
    ends[-1] = 1.0  # sums of fractions may miss it by a hair
    bare = [{name: value for name, value in table.items() if name != "share"} for table in tables]
    return [Departure(*phase) for phase in zip(bare, ends[:-1], ends[1:], strict=True)]


def read_settings(text: str) -> dict[str, Any]:
    """The settings in one phase's text."""
    table: dict[str, Any] = {}
    if len(text.split()) > 1:
        raise ConfigError(f"{text!r} in --phases is one word with spaces; write each phase as a word: --phases {text}")
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name, kinds = name.strip().replace("-", "_"), SETTINGS | {"share": float}
        if not equals or name not in kinds:
            raise ConfigError(unknown(part, name, [kind.replace("_", "-") for kind in kinds]))
        if name in table:
            raise ConfigError(f"{name} comes twice in the phase {text!r}; put a space between phases, not a comma")
        try:
            table[name] = kinds[name](value)
        except ValueError:
            kind = "whole number" if kinds[name] is int else "number"
            raise ConfigError(f"{part!r} in --phases: {value!r} is not a {kind}") from None
    return table


def unknown(part: str, name: str, names: list[str]) -> str:
    """What to say of a setting that a phase has not."""
    near = get_close_matches(name.replace("_", "-"), names, n=1)
    advice = f"did you mean {near[0]}?" if near else "write a phase as for instance share=0.1,length=512"
    return f"{part!r} in --phases is not one of a phase's settings ({', '.join(names)}); {advice}"


def shares(tables: list[dict[str, Any]]) -> list[float]:
    """Each phase's share of the budget; those that name none divide what is left."""
    named = [table["share"] for table in tables if "share" in table]
    unnamed = len(tables) - len(named)
    left = 1 - sum(named)
    if any(share <= 0 for share in named) or (left < 1e-9 if unnamed else abs(left) > 1e-9):
        told = " and ".join(f"{share:g}" for share in named)
        raise ConfigError(f"the shares in --phases are {told}; they must be above 0 and, all together, make 1")
    return [table.get("share", left / max(1, unnamed)) for table in tables]
