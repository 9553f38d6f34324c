"""Settings that contradict each other, the models and data they refer to, or the run in the output folder."""

import shlex
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from electra.config import flat_values
from electra.data.shards import Shards
from electra.data.tokenizer import CONTINUATION_PREFIX
from electra.errors import ConfigError, DataError
from electra.formatting import join_first_names
from electra.model.config import SIZES, ElectraConfig, EncoderConfig
from electra.model.storage import load_model_tokenizer, read_model_config, read_tensor_names
from electra.objectives.config import ObjectiveName
from electra.objectives.objectives import OBJECTIVES
from electra.pretraining.config import (
    BUDGETS,
    CHANGEABLE_ON_RESUME,
    BudgetConfig,
    DataRecord,
    PretrainConfig,
    RunRecord,
    read_pretraining_state,
    read_run_record,
    read_run_settings,
)
from electra.pretraining.initialize import generator_init_folder, is_lone_generator
from electra.pretraining.phases import ENCODER_SIZES, Phase, inits_discriminator_from_generator, parse_phases
from electra.runfolder import (
    CONFIG,
    check_same_settings,
    checkpoint_folders,
    is_missing_or_empty,
    remove_partial_files,
    write_stored,
)
from electra.training.checkpoint import TRAINING, find_model_folder, read_training_state
from electra.training.config import OptimizerName
from electra.training.hardware import describe_environment

CHANGEABLE_WITH_WEIGHTS = ("dropout", "attention_dropout", "init_std")  # of encoders


def check_new_run_settings(config: PretrainConfig, shards: Shards) -> None:
    """Check the settings of a new run against each other and against its tokenizer."""
    if config.masking.whole_word_masking and not any(shards.tokenizer.vocabulary.is_continuation or ()):
        raise ConfigError(
            f"--whole-word-masking needs word pieces that start with {CONTINUATION_PREFIX}, and the vocabulary of "
            f"{shards.folder} has none; leave it out, or make shards with a WordPiece tokenizer"
        )
    specs = parse_phases(config.phases)
    objectives = [spec.settings.get("objective", config.objective.name) for spec in specs]
    for spec in specs:
        steps = config.budget.steps
        if steps is not None and steps * spec.fraction() < 1 - 1e-9:
            raise ConfigError(f"a phase with fraction {spec.fraction():g} of {steps} steps has less than one step")
    for before, after in pairwise(objectives):
        if OBJECTIVES[before].head and not OBJECTIVES[after].head:
            raise ConfigError(f"--phases: {after} after {before} would drop the trained discriminator; put it first")
    check_generator_settings(config, objectives)
    starts_trained = config.init.model is not None or config.init.branch_from is not None
    if starts_trained and any(spec.settings.keys() & set(ENCODER_SIZES) for spec in specs):
        raise ConfigError(
            "--phases: width and layers are for new weights; leave them out with --init and --branch-from"
        )
    if specs[0].settings.get("schedule", config.optimizer.schedule) == "decay" and not starts_trained:
        raise ConfigError("--schedule decay anneals a trained model; give one with --branch-from or --init")
    check_init_settings(config, objectives)


def check_generator_settings(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Check that objectives have the generator they need."""
    kind, sharing = config.objective.generator, config.model.sharing
    for name in objectives:
        if kind != "model" and OBJECTIVES[name].needs_generator:
            others = ", ".join(other for other, objective in OBJECTIVES.items() if not objective.needs_generator)
            raise ConfigError(
                f"--objective {name} needs a generator, but --generator is {kind}; use --generator model or another "
                f"objective ({others})"
            )
    frozen = [name for name in objectives if OBJECTIVES[name].is_generator_frozen]
    if frozen and objectives[0] == frozen[0] and not starts_with_trained_generator(config):
        raise ConfigError(
            f"--objective {frozen[0]} needs a trained generator; train it in a first phase "
            f"(--phases objective=mlm objective={frozen[0]} {suggest_two_stage_flags(config)}), or give one with --init"
        )
    if frozen and sharing != "none":
        is_copied = OBJECTIVES[objectives[0]].head is None and config.init.discriminator_from_generator
        flags = suggest_two_stage_flags(config) if is_copied else "--sharing none"
        raise ConfigError(f"--sharing {sharing} would train the frozen generator; add {flags}")


def starts_with_trained_generator(config: PretrainConfig) -> bool:
    """Whether a run starts with the weights of a trained generator."""
    if config.init.model is None:
        return config.init.branch_from is not None
    return generator_init_folder(config.init) is not None


def suggest_two_stage_flags(config: PretrainConfig) -> str:
    """The flags for a discriminator that is initialised from the generator, which is then frozen."""
    encoder = SIZES[config.model.size].discriminator
    width, layers = config.model.width or encoder.width, config.model.layers or encoder.layers
    flags = f"--sharing none --generator-width {width}"
    return flags if config.model.generator_layers in (None, layers) else f"{flags} --generator-layers {layers}"


def check_init_settings(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Check settings that depend on where the initial weights come from."""
    init = config.init
    if init.model is None:
        return
    overrides = [name for name in config.model.discriminator_overrides() if "dropout" not in name]
    if overrides:
        flags = " and ".join(f"--{name.replace('_', '-')} {getattr(config.model, name)}" for name in overrides)
        raise ConfigError(f"{flags} cannot be combined with --init {init.model}, which has a size; leave them out")
    heads = [OBJECTIVES[name].head for name in objectives]
    if init.generator is not None and not any(heads):
        raise ConfigError(f"--objective {objectives[0]} trains one model, which is --init; leave out --init-generator")
    if any(heads) and not heads[0] and not is_lone_generator(init):
        raise ConfigError(
            f"--phases starts with {objectives[0]}, which trains only a generator: --init {init.model} must be a "
            f"masked language model, and be given as --init-generator too"
        )


def check_discriminator_init(phases: list[Phase]) -> None:
    """Check that a discriminator that is initialised from the generator has the same encoder."""
    for previous, phase in pairwise(phases):
        if not inits_discriminator_from_generator(previous, phase):
            continue
        generator, discriminator = phase.model.generator, phase.model.discriminator
        if generator and discriminator and weight_settings(generator) != weight_settings(discriminator):
            raise ConfigError(
                f"the discriminator ({discriminator.layers} layers, width {discriminator.width}) cannot be initialised "
                f"from a generator of {generator.layers} layers, width {generator.width}; use --generator-width "
                f"{discriminator.width} --generator-layers {discriminator.layers} or "
                "--no-init-discriminator-from-generator"
            )
        if phase.model.sharing == "disentangled":
            raise ConfigError(
                "--sharing disentangled already takes its embeddings from the generator; use another --sharing, or "
                "--no-init-discriminator-from-generator"
            )


def check_branch_matches_trunk(config: PretrainConfig, model: ElectraConfig, shards: Shards) -> None:
    """Check that a branch has the tokenizer, model and optimizer of its trunk."""
    trunk = config.init.branch_from
    assert trunk is not None
    checkpoint = find_model_folder(trunk)
    trunk_model = model_settings_to_compare(read_model_config(checkpoint))
    shards.check_same_tokenizer(load_model_tokenizer(checkpoint))
    optimizer = config.optimizer.name
    before = trunk_model | {"optimizer": read_run_settings(checkpoint).get("optimizer", optimizer)}
    now = model_settings_to_compare(model) | {"optimizer": optimizer}
    names = ["parts"] if before["parts"] != now["parts"] else [name for name in before if before[name] != now[name]]
    if names:
        changes = [f"{name} was {before[name]} and is now {now[name]}" for name in names]
        raise ConfigError(
            f"--branch-from {trunk} has other settings: {join_first_names(changes)}; leave out these flags"
        )
    check_optimizer_states(checkpoint, optimizer)


def check_optimizer_states(checkpoint: Path, optimizer: OptimizerName) -> None:
    """Check that a checkpoint, perhaps moved out of its run and its settings, has the states of this optimizer."""
    keys = {name.rpartition("/")[2] for name in read_tensor_names(checkpoint / TRAINING)}
    if keys and ("momentum" in keys) != (optimizer == "muon"):
        stored = "muon" if "momentum" in keys else "adam (or adamw)"
        raise DataError(f"{checkpoint} has optimizer states of {stored}, not of {optimizer}; give --optimizer {stored}")


def model_settings_to_compare(pair: ElectraConfig) -> dict[str, Any]:
    """What the models of a trunk and its branch must have in common, by setting."""
    parts = ["generator with baseline" if pair.has_baseline else "generator"] if pair.generator else []
    parts += (
        [f"discriminator with {' and '.join((pair.head, *pair.auxiliary_heads))} head"] if pair.discriminator else []
    )
    settings: dict[str, Any] = {"parts": " and ".join(parts), "sharing": pair.sharing}
    for prefix, encoder in (("", pair.discriminator), ("generator_", pair.generator)):
        settings |= {f"{prefix}{name}": value for name, value in (weight_settings(encoder) if encoder else {}).items()}
    return settings


def weight_settings(encoder: EncoderConfig) -> dict[str, Any]:
    """The settings of an encoder that others must share to take over its weights."""
    return {name: value for name, value in asdict(encoder).items() if name not in CHANGEABLE_WITH_WEIGHTS}


def find_resume_checkpoint(config: PretrainConfig, record: RunRecord) -> Path | None:
    """The checkpoint to resume from, if any; raises if the output folder is in use or has other settings.

    Removes partial files of a killed process."""
    run, checkpoints = config.output, checkpoint_folders(config.output)
    if not (run / CONFIG).exists():
        if not is_missing_or_empty(run):
            raise DataError(f"{run} is not empty and holds no run; choose another --output")
        return None
    stored = read_run_record(run)
    if checkpoints and not config.resume:
        raise ConfigError(f"{run} already holds a run; continue it with --resume, or choose another --output")
    if checkpoints:
        ignore = CHANGEABLE_ON_RESUME | set(BUDGETS if is_extension(config, stored, checkpoints[-1]) else ())
        check_same_settings(run, run_settings_to_compare(stored), run_settings_to_compare(record), ignore)
    else:
        print(f"the run in {run} ended before its first checkpoint; starting again", file=sys.stderr)
    remove_partial_files(run)
    return checkpoints[-1] if checkpoints else None


def build_run_record(config: PretrainConfig, phases: list[Phase], shards: Shards) -> RunRecord:
    corrupted_rows = config.corrupted_rows and config.corrupted_rows.absolute()
    paths = {"data": config.data.absolute(), "corrupted_rows": corrupted_rows}  # it may be resumed from another folder
    return RunRecord(
        model=phases[-1].model,
        pretraining=flat_values(config) | paths,
        data=DataRecord(tokens=shards.index.totals_by_split("tokens"), tokenizer=shards.tokenizer.fingerprint),
        command=shlex.join(sys.argv),
        environment=describe_environment(),
    )


def run_settings_to_compare(record: RunRecord) -> dict[str, Any]:
    """The settings and the data of a run, to compare with those of the run that resumes it."""
    text = "{train:,} tokens and {validation:,} held out".format(**record.data.tokens)
    return record.pretraining | {"text in --data": text, "tokenizer of --data": describe_tokenizer(record)}


def describe_tokenizer(record: RunRecord) -> str:
    [vocab_size] = {encoder.vocab_size for encoder in record.model.encoder_configs().values()}
    return f"{vocab_size:,} entries ({record.data.tokenizer[:8]})"


def is_extension(config: PretrainConfig, stored: RunRecord, checkpoint: Path) -> bool:
    """Whether --resume gives a finished run a larger budget; one that is used up already is an error."""
    budget = BudgetConfig(**{name: stored.pretraining.get(name) for name in BUDGETS})
    if budget == config.budget:
        return False
    if config.phases:
        if read_pretraining_state(checkpoint).phase == len(config.phases) - 1:
            raise ConfigError(
                f"{config.output} has --phases, which cannot be extended; continue from its weights with --init "
                f"{config.output} and a new --output"
            )
        return False
    state = read_training_state(checkpoint).trainer
    steps, seconds = state.step - state.start_step, state.seconds - state.start_seconds
    budgets = [each.phase_budget(0, 1, config.loader) for each in (budget, config.budget)]
    was_finished, is_finished = (each.fraction_used(steps, seconds) == 1 for each in budgets)
    if was_finished and is_finished:
        trained = f"has already trained for {steps:,} steps and {seconds / 60:.1f} minutes"
        raise ConfigError(f"{config.output} {trained}; the budget includes them: give a larger one")
    return was_finished


def write_extended_budget(config: PretrainConfig) -> None:
    """Store the larger budget of a finished run that is resumed."""
    stored = read_run_record(config.output)
    settings = stored.pretraining | asdict(config.budget)
    if settings != stored.pretraining:
        print("extending a finished run: the learning rate follows the larger budget from here on", file=sys.stderr)
        write_stored(config.output / CONFIG, asdict(replace(stored, pretraining=settings)))
