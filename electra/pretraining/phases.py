"""The phases of a run: parsed from `--phases fraction=0.9 fraction=0.1,length=512` and planned with their models."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from electra.config import convert_value, flat_values, replace_settings, settings_by_name
from electra.errors import ConfigError, suggest
from electra.model.config import ElectraConfig, ModelConfig
from electra.model.electra import Electra, meta_device
from electra.model.flops import training_flops_per_row
from electra.objectives.config import ObjectiveConfig, ObjectiveName
from electra.objectives.masking import max_masked
from electra.objectives.objectives import OBJECTIVES
from electra.pretraining.config import PretrainConfig, main_encoder_config, read_pretraining_state
from electra.runfolder import damaged_file_error
from electra.training.checkpoint import STATE
from electra.training.config import Budget

PHASE_SETTINGS = (
    "objective",
    "width",
    "layers",
    "length",
    "batch_size",
    "micro_batches",
    "learning_rate",
    "schedule",
    "warmup",
    "decay_fraction",
    "mask_fraction",
    "temperature",
    "packing",
    "dropout",
    "generator_dropout",
)
ENCODER_SIZES = ("width", "layers")  # of the discriminator, which a later phase may widen and stack
SCHEDULE_SETTINGS = ("schedule", "warmup", "decay_fraction")


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
    schedule_budget: Budget  # of consecutive phases with this objective and size: they share schedule and optimizer
    stop_at: Budget  # the part of schedule_budget that is spent when this phase ends
    starts_optimizer: bool  # and a schedule: the first of these phases

    def flops_per_step(self) -> int:
        """FLOPs of a training step."""
        loader = self.config.loader
        masked = max_masked(loader.length, self.config.masking)
        is_generator_frozen = OBJECTIVES[self.config.objective.name].is_generator_frozen
        return loader.batch_size * training_flops_per_row(self.model, loader.length, masked, is_generator_frozen)

    def tokens_per_step(self) -> int:
        return self.config.loader.batch_size * self.config.loader.length


def parse_phases(texts: Sequence[str]) -> list[PhaseSpec]:
    """The phases that `texts` describe; a single one if there are no texts."""
    tables = [parse_phase_settings(text) for text in texts or ("fraction=1",)]
    fractions = fill_missing_fractions([table.pop("fraction", None) for table in tables])
    ends = [0.0, *accumulate(fractions)]
    ends[-1] = 1.0  # without rounding errors
    return [PhaseSpec(*spec) for spec in zip(tables, ends[:-1], ends[1:], strict=True)]


def parse_phase_settings(text: str) -> dict[str, Any]:
    """The settings in `name=value,name=value`, the fraction of the budget among them."""
    if len(text.split()) > 1:
        raise ConfigError(f"{text!r} in --phases has spaces inside quotes; write one word per phase: --phases {text}")
    types = {"fraction": float} | {name: settings_by_name(PretrainConfig)[name].value_type for name in PHASE_SETTINGS}
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in types:
            known = [each.replace("_", "-") for each in types]
            hint = suggest(key.strip(), known, otherwise="write a phase like fraction=0.1,length=512")
            raise ConfigError(f"{part!r} in --phases: a phase may set {', '.join(known)}; {hint}")
        if name in values:
            raise ConfigError(f"{name} occurs twice in the phase {text!r}; separate phases by a space, not a comma")
        try:
            values[name] = convert_value(name, value, types[name])
        except ConfigError as error:
            raise ConfigError(f"{part!r} in --phases: {error}") from None
    return values


def fill_missing_fractions(fractions: list[float | None]) -> list[float]:
    """Each phase's fraction of the budget; phases without one share the rest equally."""
    named = [fraction for fraction in fractions if fraction is not None]
    unnamed = len(fractions) - len(named)
    rest = 1 - sum(named)
    if any(fraction <= 0 for fraction in named) or (rest < 1e-9 if unnamed else abs(rest) > 1e-9):
        listed = " and ".join(f"{fraction:g}" for fraction in named)
        raise ConfigError(f"the fractions in --phases are {listed}; they must be above 0 and sum to 1")
    return [rest / max(1, unnamed) if fraction is None else fraction for fraction in fractions]


def plan_phases(config: PretrainConfig, pair: ElectraConfig) -> list[Phase]:
    """The phases of a run that trains `pair`."""
    specs = parse_phases(config.phases)
    configs = [replace_settings(config, phases=(), **spec.settings) for spec in specs]
    models = phase_model_configs(configs, pair)
    check_phase_sizes(specs, models, pair)
    budgets = [
        phase.budget.phase_budget(spec.begin, spec.end, phase.loader)
        for phase, spec in zip(configs, specs, strict=True)
    ]
    phases: list[Phase] = []
    keys = [(phase.objective.name, main_encoder_sizes(model)) for phase, model in zip(configs, models, strict=True)]
    for _, consecutive in groupby(range(len(keys)), key=keys.__getitem__):
        indices = list(consecutive)
        check_same_schedule([specs[index] for index in indices], config)
        ends = list(accumulate(budgets[index] for index in indices))
        for index, end in zip(indices, ends, strict=True):
            phase = Phase(
                index=index,
                config=configs[index],
                model=models[index],
                budget=budgets[index],
                schedule_budget=ends[-1],
                stop_at=end,
                starts_optimizer=index == indices[0],
            )
            phases.append(phase)
    return phases


def main_encoder_sizes(model: ElectraConfig) -> dict[str, int]:
    """Width and layers of the encoder that later phases may widen or stack."""
    encoder = main_encoder_config(model.encoder_configs())
    return {name: getattr(encoder, name) for name in ENCODER_SIZES}


def check_phase_sizes(specs: list[PhaseSpec], models: list[ElectraConfig], pair: ElectraConfig) -> None:
    """Check that phases only widen and stack the model, in the end to its own size."""
    for spec, model in zip(specs, models, strict=True):
        for name, size in main_encoder_sizes(model).items():
            if spec.settings.get(name, size) != size:
                raise ConfigError(
                    f"{name}={spec.settings[name]} in --phases: this phase trains only the generator, which keeps its "
                    f"{name}"
                )
    for name, size in main_encoder_sizes(pair).items():
        last = specs[-1].settings.get(name, size)
        if last != size:
            raise ConfigError(
                f"the last of --phases has {name} {last}, the model {size}; leave out its {name}, or add a phase"
            )
    for before, after in pairwise(models):
        for name, small, large in changed_sizes(before, after):
            if large % small:
                raise ConfigError(f"--phases: {name} {small} cannot become {large}, which is no multiple of it")


def check_same_schedule(specs: list[PhaseSpec], config: PretrainConfig) -> None:
    """Check that phases which share a schedule do not set different ones."""
    defaults = {name: flat_values(config)[name] for name in SCHEDULE_SETTINGS}
    for name in SCHEDULE_SETTINGS:
        values = [(defaults | spec.settings)[name] for spec in specs]
        if len(set(values)) > 1:
            listed = " and ".join(str(value) for value in values)
            raise ConfigError(
                f"--phases has {name.replace('_', '-')} {listed} in consecutive phases of one objective, "
                "width and number of layers, which share a schedule; set it for all of them"
            )


def phase_model_configs(configs: list[PretrainConfig], pair: ElectraConfig) -> list[ElectraConfig]:
    """The model of each phase: the parts of the pair that its objective trains, with its dropout."""
    pair = pair_config_for_objectives(pair, [config.objective.name for config in configs])
    for encoder in pair.encoder_configs().values():
        encoder.check_length(max(config.loader.length for config in configs))
    models = []
    for config in configs:
        generator_dropout = config.model.generator_dropout if pair.discriminator else None  # not BERT's, which is alone
        sized = with_phase_size(pair, config.model).with_dropout(config.model.dropout, generator_dropout)
        models.append(model_config_for_objective(sized, config.objective))
    return models


def with_phase_size(pair: ElectraConfig, model: ModelConfig) -> ElectraConfig:
    """The pair with the width and layers of a phase."""
    sizes = main_encoder_sizes(pair)
    changed = {name: size for name in sizes if (size := getattr(model, name)) not in (None, sizes[name])}
    if not changed:
        return pair
    try:
        return pair.reduced_to(**changed, scale_init=model.scale_init_by_width)
    except ConfigError as error:
        given = ",".join(f"{name}={size}" for name, size in changed.items())
        raise ConfigError(
            f"{given} in --phases: {error}; choose another size, or --phases fraction=1 to train at full size from the "
            "start"
        ) from None


def pair_config_for_objectives(pair: ElectraConfig, objectives: list[ObjectiveName]) -> ElectraConfig:
    """The pair for a run's objectives: a masked language model without discriminator (BERT) has the latter's size."""
    if pair.discriminator is None or any(OBJECTIVES[name].head for name in objectives):
        return pair
    return ElectraConfig(generator=pair.discriminator, discriminator=None, sharing="none")


def model_config_for_objective(pair: ElectraConfig, config: ObjectiveConfig) -> ElectraConfig:
    """The parts of a pair that an objective trains, with the heads it needs."""
    objective = OBJECTIVES[config.name]
    generator = pair.generator if config.generator == "model" else None
    discriminator = pair.discriminator if objective.head else None
    return ElectraConfig(
        generator=generator,
        discriminator=discriminator,
        sharing=pair.sharing if generator and discriminator else "none",
        head=objective.head or "rtd",
        auxiliary_heads=config.auxiliary_heads() if objective.head == "rtd" else (),
        has_baseline=objective.has_baseline,
    )


def count_parameters(model: ElectraConfig) -> int:
    """The number of parameters, shared ones counted once."""
    with meta_device():
        return sum(parameter.numel() for parameter in Electra(model).parameters())


def read_phase_index(checkpoint: Path, phases: list[Phase]) -> int:
    """The index of the phase in which a checkpoint was saved."""
    index = read_pretraining_state(checkpoint).phase
    if index >= len(phases):
        raise damaged_file_error(checkpoint / STATE, f"phase {index + 1} of {len(phases)}")
    return index


def changed_sizes(before: ElectraConfig, after: ElectraConfig) -> list[tuple[str, int, int]]:
    """Width and layers, by name, of parts that two models have with different ones."""
    earlier, later = before.encoder_configs(), after.encoder_configs()
    sizes = [
        (name, getattr(earlier[part], name), getattr(later[part], name))
        for part in earlier
        if part in later
        for name in ENCODER_SIZES
    ]
    return [size for size in sizes if size[1] != size[2]]


def inits_discriminator_from_generator(previous: Phase, phase: Phase) -> bool:
    """Whether a phase initialises a discriminator, which the previous phase lacks, from the generator."""
    is_new = previous.model.discriminator is None and phase.model.discriminator is not None
    return is_new and phase.config.init.discriminator_from_generator
