"""The phases of a run: parsed from `--phases fraction=0.9 fraction=0.1,length=512` and planned with their models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from electra.config import replace_fields
from electra.errors import ConfigError
from electra.model.config import ElectraConfig
from electra.model.flops import training_flops
from electra.objectives.config import GeneratorName, ObjectiveName
from electra.objectives.masking import mask_slots
from electra.objectives.objectives import OBJECTIVES
from electra.pretraining.config import PretrainConfig, run_settings
from electra.training.checkpoint import read_state
from electra.training.config import Budget

PHASE_SETTINGS = {
    # the settings that a phase may change
    "objective": str,
    "length": int,
    "batch_size": int,
    "micro_batches": int,
    "learning_rate": float,
    "mask_fraction": float,
    "temperature": float,
}


@dataclass(frozen=True)
class PhaseSpec:
    """One phase as given in --phases."""

    settings: dict[str, Any]  # those that differ from the run's, by flat name
    begin: float  # fraction of the budget
    end: float

    def fraction(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Phase:
    """One phase of a run."""

    index: int
    config: PretrainConfig  # the run's, with the settings of this phase
    model: ElectraConfig
    budget: Budget
    stage_budget: Budget  # of all consecutive phases with this objective: they share a schedule and an optimizer
    stage_end: Budget  # the part of stage_budget that is spent when this phase ends
    starts_stage: bool

    def flops_per_row(self) -> int:
        """FLOPs of a training step per row."""
        length, objective = self.config.loader.length, OBJECTIVES[self.config.objective.name]
        return training_flops(self.model, length, mask_slots(length, self.config.masking), objective.is_frozen)


def parse_phases(texts: Sequence[str]) -> list[PhaseSpec]:
    """The phases that `texts` describe; a single one if there are no texts."""
    tables = [parse_phase(text) for text in texts or ("fraction=1",)]
    fractions = phase_fractions([table.pop("fraction", None) for table in tables])
    ends = [0.0, *accumulate(fractions)]
    ends[-1] = 1.0  # without rounding errors
    return [PhaseSpec(*spec) for spec in zip(tables, ends[:-1], ends[1:], strict=True)]


def parse_phase(text: str) -> dict[str, Any]:
    """The settings in `name=value,name=value`, the fraction of the budget among them."""
    if len(text.split()) > 1:
        raise ConfigError(f"{text!r} in --phases has spaces inside quotes; write one word per phase: --phases {text}")
    types = {"fraction": float} | PHASE_SETTINGS
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in types:
            raise unknown_setting(part, name, [each.replace("_", "-") for each in types])
        if name in settings:
            raise ConfigError(f"{name} occurs twice in the phase {text!r}; separate phases by a space, not a comma")
        try:
            settings[name] = types[name](value)
        except ValueError:
            kind = "an integer" if types[name] is int else "a number"
            raise ConfigError(f"{part!r} in --phases: {value!r} is not {kind}") from None
    if (objective := settings.get("objective", "rtd")) not in OBJECTIVES:
        raise ConfigError(f"unknown objective {objective!r} in --phases; choose from {', '.join(OBJECTIVES)}")
    return settings


def unknown_setting(part: str, name: str, known: list[str]) -> ConfigError:
    close = get_close_matches(name.replace("_", "-"), known, n=1)
    hint = f"did you mean {close[0]}?" if close else "write a phase like fraction=0.1,length=512"
    return ConfigError(f"{part!r} in --phases: a phase may set {', '.join(known)}; {hint}")


def phase_fractions(given: list[float | None]) -> list[float]:
    """Each phase's fraction of the budget; phases without one share the rest equally."""
    named = [fraction for fraction in given if fraction is not None]
    unnamed = len(given) - len(named)
    rest = 1 - sum(named)
    if any(fraction <= 0 for fraction in named) or (rest < 1e-9 if unnamed else abs(rest) > 1e-9):
        listed = " and ".join(f"{fraction:g}" for fraction in named)
        raise ConfigError(f"the fractions in --phases are {listed}; they must be above 0 and sum to 1")
    return [rest / max(1, unnamed) if fraction is None else fraction for fraction in given]


def plan_phases(config: PretrainConfig, pair: ElectraConfig) -> list[Phase]:
    """The phases of a run that trains `pair`."""
    specs = parse_phases(config.phases)
    configs = [replace_fields(config, phases=(), **spec.settings) for spec in specs]
    models = phase_models(configs, pair)
    budgets = [
        phase.budget.part(spec.begin, spec.end, phase.loader) for phase, spec in zip(configs, specs, strict=True)
    ]
    phases: list[Phase] = []
    for _, stage in groupby(range(len(configs)), key=lambda index: configs[index].objective.name):
        indices = list(stage)
        ends = list(accumulate(budgets[index] for index in indices))
        for index, end in zip(indices, ends, strict=True):
            phase = (configs[index], models[index], budgets[index])
            phases.append(Phase(index, *phase, stage_budget=ends[-1], stage_end=end, starts_stage=index == indices[0]))
    return phases


def phase_models(configs: list[PretrainConfig], pair: ElectraConfig) -> list[ElectraConfig]:
    """The model of each phase: the parts of the pair that its objective trains."""
    objectives = [config.objective for config in configs]
    pair = pair_for_objectives(pair, [objective.name for objective in objectives])
    for encoder in filter(None, (pair.generator, pair.discriminator)):
        encoder.check_length(max(config.loader.length for config in configs))
    return [model_for_objective(pair, objective.name, objective.generator) for objective in objectives]


def pair_for_objectives(pair: ElectraConfig, objectives: list[ObjectiveName]) -> ElectraConfig:
    """The pair for a run's objectives: a masked language model without discriminator (BERT) has the latter's size."""
    has_discriminator = any(OBJECTIVES[name].head for name in objectives)
    return pair if has_discriminator or not pair.discriminator else replace(pair, generator=pair.discriminator)


def model_for_objective(pair: ElectraConfig, name: ObjectiveName, generator: GeneratorName = "model") -> ElectraConfig:
    """The parts of a pair that an objective trains, with the heads it needs."""
    objective = OBJECTIVES[name]
    generator_config = pair.generator if generator == "model" else None
    discriminator_config = pair.discriminator if objective.head else None
    return ElectraConfig(
        generator=generator_config,
        discriminator=discriminator_config,
        sharing=pair.sharing if generator_config and discriminator_config else "none",
        head=objective.head or "rtd",
        has_baseline=objective.has_baseline,
    )


def initializes_discriminator(previous: Phase, phase: Phase) -> bool:
    """Whether a phase initialises a discriminator, which the previous phase lacks, from the generator."""
    is_new = previous.model.discriminator is None and phase.model.discriminator is not None
    return is_new and phase.config.init.discriminator_from_generator


def checkpoint_phase(checkpoint: Path) -> int:
    """The index of the phase in which a checkpoint was saved."""
    return read_state(checkpoint)["task"]["phase"]


def longest_row(checkpoint: Path) -> int | None:
    """Tokens of the longest rows that a run trains on; None if unknown or if its weights come from another model."""
    settings = run_settings(checkpoint)
    if "length" not in settings or settings["init"] or settings["branch_from"]:
        return None
    return max(spec.settings.get("length", settings["length"]) for spec in parse_phases(settings["phases"]))
