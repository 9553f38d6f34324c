"""Branches: what a run has from the trunk whose checkpoint it goes on from, and what it cannot have otherwise."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from electra.data.loader import ROW_ORDER
from electra.data.shards import Shards
from electra.errors import ConfigError, DataError
from electra.model.config import ElectraConfig, EncoderConfig, ModelConfig, Size, size_for_encoder
from electra.model.storage import CONFIG, load_model_tokenizer, read_model_config
from electra.pretraining.phases import read_phases
from electra.runfolder import join_names, read_json
from electra.training.checkpoint import CHECKPOINTS, STATE, model_folder, read_state

MEMORY = "optimizer"  # what it remembers is of no use to another
PARTS = "the model"
SHAPE = (
    "layers",
    "width",
    "heads",
    "feedforward",
    "embedding_width",
    "positions",
    "global_attention_every",
    "local_attention",
)
FREE = ("dropout", "attention_dropout", "init_std")  # fields of encoders that a branch may have otherwise


def trunk_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that a branch has from the trunk that flags name; none where it cannot be read: the run says so."""
    if not given.get("branch_from"):
        return {}
    with suppress(DataError):
        checkpoint = model_folder(Path(given["branch_from"]))
        record, pair = trunk_record(checkpoint), read_model_config(checkpoint)
        taken = training_settings(record, read_state(checkpoint)["lesson"])
        size = record.get("size", size_for_encoder(encoder_of(pair)))
        is_another = given.get("size", size) != size  # which is refused: nothing is to hide that
        return taken if is_another else taken | model_settings(pair, size)
    return {}


def training_settings(record: dict[str, Any], lesson: dict[str, Any]) -> dict[str, Any]:
    """How a trunk was trained when a checkpoint was saved, as far as a branch has to go on so."""
    taken = {name: record[name] for name in ("recipe", MEMORY, "generator_kind") if name in record}
    if "objective" in record:
        phase = read_phases(record.get("phases", ()))[lesson.get("phase", 0)]
        taken["objective"] = phase.settings.get("objective", record["objective"])
    return taken | {name: lesson[name] for name in ROW_ORDER}


def trunk_record(checkpoint: Path) -> dict[str, Any]:
    """The settings of the run that a checkpoint lies in; none where it was taken out of it."""
    path = checkpoint.parent.parent / CONFIG
    is_within = checkpoint.parent.name == CHECKPOINTS and path.exists()
    return read_json(path).get("pretraining", {}) if is_within else {}


def longest_row(checkpoint: Path) -> int | None:
    """Tokens of the longest rows that a run trains its model on; None where no run tells, or it began elsewhere."""
    record = trunk_record(checkpoint)
    if "length" not in record or record.get("init") or record.get("branch_from"):
        return None
    return max(phase.settings.get("length", record["length"]) for phase in read_phases(record.get("phases", ())))


def encoder_of(pair: ElectraConfig) -> EncoderConfig:
    """The discriminator's size, or that of a lone generator."""
    encoder = pair.discriminator or pair.generator
    assert encoder is not None
    return encoder


def model_settings(pair: ElectraConfig, size: Size) -> dict[str, Any]:
    """The settings that describe a pair: a size, and how the pair departs from it."""
    encoder = encoder_of(pair)
    found: dict[str, Any] = {"size": size, "style": encoder.style}
    usual = encoder_of(ModelConfig(**found).electra_config())
    found |= {name: getattr(encoder, name) for name in SHAPE if getattr(encoder, name) != getattr(usual, name)}
    if pair.generator:
        found |= {"generator_width": pair.generator.width, "generator_layers": pair.generator.layers}
    return found | ({"sharing": pair.sharing} if pair.generator and pair.discriminator else {})


def refuse_other_trunk(trunk: Path, model: ElectraConfig, optimizer: str, shards: Shards) -> None:
    """Refuse to go on from a checkpoint of another tokenizer, model or optimizer than a run's."""
    checkpoint = model_folder(trunk)
    before, after = shape_of(read_model_config(checkpoint)), shape_of(model) | {MEMORY: optimizer}
    before[MEMORY] = trunk_record(checkpoint).get(MEMORY, optimizer)
    if not (checkpoint / STATE).exists():
        raise DataError(f"{trunk} holds a model, not a run to branch from; go on from its weights with --init {trunk}")
    shards.check_tokenizer(load_model_tokenizer(checkpoint))
    differing = [name for name in before if before[name] != after.get(name)]
    if PARTS in differing:
        differing = [PARTS]
    if differing:
        told = [f"{name} was {before[name]} and is now {after[name]}" for name in differing]
        raise ConfigError(
            f"--branch-from {trunk} goes on as it was: {join_names(told)}; leave out the flags that say so"
        )


def shape_of(pair: ElectraConfig) -> dict[str, Any]:
    """What the models of a trunk and its branch have alike, under the names of settings."""
    found: dict[str, Any] = {PARTS: " and ".join(parts_of(pair)), "sharing": pair.sharing}
    for prefix, part in (("", pair.discriminator), ("generator_", pair.generator)):
        fields = asdict(part) if part else {}
        found |= {f"{prefix}{name}": value for name, value in fields.items() if name not in FREE}
    return found


def parts_of(pair: ElectraConfig) -> list[str]:
    """Which parts a pair has, as its objective decides, in words."""
    parts = [f"a generator{' with a baseline' if pair.has_baseline else ''}"] if pair.generator else []
    return [*parts, f"a discriminator for {pair.head}s"] if pair.discriminator else parts
