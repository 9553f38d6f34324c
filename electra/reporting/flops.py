"""`electra flops`: parameters and FLOPs of a model, before it is trained."""

from dataclasses import dataclass, replace

from electra.model.config import ElectraConfig
from electra.model.flops import (
    PUBLISHED_TRAINING_FACTOR,
    ComponentCost,
    component_costs,
    published_component_costs,
    total_flops,
    total_parameters,
    training_flops_per_row,
)
from electra.objectives.config import MaskingConfig, ObjectiveConfig
from electra.objectives.masking import max_masked
from electra.objectives.objectives import OBJECTIVES
from electra.pretraining.phases import count_parameters, model_config_for_objective, pair_config_for_objectives
from electra.reporting.config import FlopsConfig


@dataclass(frozen=True)
class FlopCount:
    """Parameters and FLOPs: of each part in a forward pass over one row, and in total."""

    parts: dict[str, list[ComponentCost]]
    parameters: int  # shared ones counted once
    workload: str  # what `total_flops` is for
    training_flops_per_row: int | None  # None for inference
    total_flops: int
    note: str | None

    def __str__(self) -> str:
        lines = [f"{'':<24}{'parameters':>15}{'forward FLOPs per row':>24}"]
        for name, items in self.parts.items():
            lines += [name, *(format_item_row(f"  {item.name}", item.parameters, item.flops) for item in items)]
            lines.append(format_item_row("  total", total_parameters(items), total_flops(items)))
        if self.training_flops_per_row is not None:
            shared = ", shared ones counted once" if len(self.parts) > 1 else ""
            lines.append(f"parameters{shared}: {self.parameters:,}")
            lines.append(f"training step: {self.training_flops_per_row:.4g} FLOPs per row")
        lines.append(f"{self.workload}: {self.total_flops:.4e} FLOPs")
        return "\n".join(lines if self.note is None else [*lines, self.note])


def counted_model_config(config: FlopsConfig) -> ElectraConfig:
    """The trained generator and discriminator; for inference, the discriminator alone."""
    sharing = "none" if OBJECTIVES[config.objective].is_generator_frozen else config.model.sharing
    pair = replace(config.model, sharing=sharing).electra_config(config.vocab_size)
    if config.inference:
        return ElectraConfig(generator=None, discriminator=pair.discriminator, sharing="none")
    pair = pair_config_for_objectives(pair, [config.objective])
    return model_config_for_objective(pair, ObjectiveConfig(name=config.objective))


def format_item_row(name: str, parameters: int, flops: int) -> str:
    return f"{name:<24}{parameters:>15,}{flops:>24,}"


def count_flops(config: FlopsConfig) -> FlopCount:
    """Count the parameters and FLOPs of the model that `config` describes."""
    model = counted_model_config(config)
    for encoder in model.encoder_configs().values():
        encoder.check_length(config.length)
    parts, training_flops_per_row = count_items_and_training_flops(model, config)
    if config.inference:
        workload = f"forward pass over {config.length} tokens"
        total = sum(map(total_flops, parts.values()))
    else:
        workload = f"{config.steps:,} steps of {config.batch_size:,} rows of {config.length} tokens"
        total = training_flops_per_row * config.batch_size * config.steps
    return FlopCount(
        parts=parts,
        parameters=count_parameters(model),
        workload=workload,
        training_flops_per_row=None if config.inference else training_flops_per_row,
        total_flops=total,
        note=local_attention_note(model),
    )


def count_items_and_training_flops(
    model: ElectraConfig, config: FlopsConfig
) -> tuple[dict[str, list[ComponentCost]], int]:
    """The items of each part, and the FLOPs of a training step per row."""
    if config.as_published:
        items = published_component_costs(model, config.length)
        return items, PUBLISHED_TRAINING_FACTOR * sum(map(total_flops, items.values()))
    masking = MaskingConfig(mask_fraction=config.mask_fraction, mask_count=config.mask_count)
    sizes = model, config.length, max_masked(config.length, masking)
    return component_costs(*sizes), training_flops_per_row(
        *sizes, is_generator_frozen=OBJECTIVES[config.objective].is_generator_frozen
    )


def local_attention_note(model: ElectraConfig) -> str | None:
    """A note on layers with local attention."""
    for part in filter(None, (model.discriminator, model.generator)):
        if local := sum(not part.has_global_attention(layer) for layer in range(part.layers)):
            return (
                f"{local} of {part.layers} layers have local attention over {part.local_attention} tokens; it is "
                "counted as global attention, which some kernels compute and mask, while others need fewer FLOPs"
            )
    return None
