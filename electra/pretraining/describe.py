"""What a run is, in words: its models, where they come from, and what each phase does."""

from collections.abc import Iterator

from electra.model.config import ElectraConfig, EncoderConfig
from electra.pretraining.config import Phase, PretrainConfig, starts_discriminator, whole_model
from electra.pretraining.initialize import has_head_for
from electra.training.logging import format_duration

SECOND = {
    "rtd": "discriminator",
    "mlm": "masked language model",
    "copy_mlm": "masked language model with a copy gate",
}

SHARED = {
    "none": "nothing shared",
    "embeddings": "embeddings shared",
    "disentangled": "embeddings shared, disentangled",
    "all": "all shared",
}


def outline(config: PretrainConfig, phases: list[Phase]) -> list[str]:
    """A run in a few lines."""
    starts = [] if config.init is None or config.has_begun() else [start_in_words(config, phases[0].model)]
    return [models_in_words(config, whole_model(phases)), *starts, *phases_in_words(phases)]


def models_in_words(config: PretrainConfig, model: ElectraConfig) -> str:
    """The parts of a model, and what they share."""
    parts = []
    if model.discriminator is not None:
        parts.append(encoder_in_words(SECOND[model.head], model.discriminator))
    if model.generator is not None:
        name = "generator" if parts else "masked language model"
        parts.append(encoder_in_words(name, model.generator))
    elif config.generator_kind != "model":
        parts.append(f"no generator: {config.generator_kind} replacements")
    if model.generator and model.discriminator:
        parts.append(SHARED[model.sharing])
    return f"{config.style}: {'; '.join(parts)}"


def encoder_in_words(name: str, encoder: EncoderConfig) -> str:
    """Its size, what its layers see where that is not all, and its dropout where it has any."""
    every, window = encoder.global_attention_every, encoder.local_attention
    seen = f", all but one in {every} layers with a window of {window} tokens" if every > 1 else ""
    dropped = f", dropout {encoder.dropout:g}" if encoder.dropout else ""
    return f"{name} of {encoder.layers} layer{'s' * (encoder.layers > 1)}, {encoder.width} wide{seen}{dropped}"


def start_in_words(config: PretrainConfig, model: ElectraConfig) -> str:
    """Where the weights of a run's first models come from."""
    assert config.init is not None
    head = "" if has_head_for(config.init, model) else ", with a new head"
    name = SECOND[model.head] if model.discriminator else "masked language model"
    said = f"{name}: starts as {config.init}{head}"
    if model.generator is None or model.discriminator is None:
        return said
    source = config.generator_source()
    return f"{said}; generator: {'new' if source is None else f'starts as {source}'}"


def phases_in_words(phases: list[Phase]) -> Iterator[str]:
    """What each phase does."""
    for before, phase in zip([None, *phases], phases, strict=False):
        number = f"phase {phase.number + 1} of {len(phases)}, " if len(phases) > 1 else ""
        yield f"{number}{phase_in_words(phase)}{first_weights(before, phase)}"


def phase_in_words(phase: Phase) -> str:
    """Objective, budget, batch, masks, learning rate."""
    config, (steps, seconds) = phase.config, (phase.budget.steps, phase.budget.seconds)
    budget = format_duration((seconds or 0) / 60) if steps is None else f"{steps:,} step{'s' * (steps != 1)}"
    batch = f"{config.batch_size} × {config.length} tokens a step, {100 * config.mask_fraction:g} % masked"
    return f"{config.objective}, {budget}: {batch}; {config.optimizer} at {config.learning_rate:g}, {config.schedule}"


def first_weights(before: Phase | None, phase: Phase) -> str:
    """How a discriminator starts that the phase before did not have."""
    if before is None or before.model.discriminator is not None or phase.model.discriminator is None:
        return ""
    weights = "the generator's weights" if starts_discriminator(before, phase) else "new weights"
    return f"; the discriminator starts with {weights}"
