"""What a run will do (a summary of models and phases, warnings, the estimates of a dry run) and what it has learnt."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from electra.data.loader import BatchLoader
from electra.data.shards import Shards
from electra.formatting import format_count, format_duration
from electra.model.config import ElectraConfig, EncoderConfig
from electra.objectives.evaluation import PLATEAU, TOKEN_LOSSES, is_on_plateau
from electra.objectives.masking import max_masked
from electra.pretraining.config import PretrainConfig, main_encoder_config
from electra.pretraining.held_out import held_out_loader_config
from electra.pretraining.initialize import generator_init_folder, has_head_for
from electra.pretraining.phases import Phase, changed_sizes, count_parameters, inits_discriminator_from_generator
from electra.training.hardware import choose_dtype, device_memory_bytes, measure_flops_per_second

MODEL_NAMES = {
    "rtd": "discriminator",
    "mlm": "masked language model",
    "copy_mlm": "masked language model with copy mechanism",
}

SHARING_NAMES = {
    "none": "no shared weights",
    "embeddings": "shared embeddings",
    "disentangled": "shared embeddings, disentangled",
    "all": "all weights shared",
}

GROWTH = {"width": "widened from {} to {}", "layers": "stacked from {} to {} layers"}

FEW_ROWS = 20  # held-out rows: fewer give noisy metrics
EFFICIENCY = {"cuda": 0.25, "cpu": 0.5}  # speed of training relative to a plain matrix product, roughly
SLOW_STEP = 2e11  # FLOPs; a CPU takes seconds for more
CHECKPOINTING_TIME = 4 / 3  # activation checkpointing repeats the forward pass
BYTES_PER_PARAMETER = 16  # weight, gradient and two moments in fp32
GUESSING_AUC = 0.55  # of random tokens; below, a discriminator is hardly better than guessing, which has 0.5
OVERFITTING = 1.02  # times the lowest held-out loss
MANY_EPOCHS = 20
PLATEAU_SENTENCES = (
    "This is the plateau of token frequencies: every model first learns how frequent each token is, and uses the "
    "context only later, often quite suddenly."
)
WORSE_SENTENCE = "It has not learnt how frequent each token of the held-out text is."


def summarize_run(config: PretrainConfig, phases: list[Phase]) -> list[str]:
    """Models, initial weights and phases of a run, one line each."""
    starts_from_model = config.init.model is not None and not config.resumes_checkpoint()
    init = [describe_init(config, phases[0].model)] if starts_from_model else []
    return [describe_model(config, phases[-1].model), *init, *describe_phases(phases)]


def describe_model(config: PretrainConfig, model: ElectraConfig) -> str:
    """The parts of a model and what they share."""
    parts = []
    if model.discriminator is not None:
        parts.append(describe_encoder(MODEL_NAMES[model.head], model.discriminator))
    if model.auxiliary_heads:
        parts.append(f"auxiliary losses {', '.join(model.auxiliary_heads)}")
    if model.generator is not None:
        parts.append(describe_encoder("generator" if parts else "masked language model", model.generator))
    elif config.objective.generator != "model":
        parts.append(f"no generator, {config.objective.generator} replacements")
    if model.generator and model.discriminator:
        parts.append(SHARING_NAMES[model.sharing])
    return f"{config.model.style}: {'; '.join(parts)}"


def describe_encoder(name: str, encoder: EncoderConfig) -> str:
    """Size, attention windows and dropout of an encoder."""
    every, window = encoder.global_attention_every, encoder.local_attention
    local = f", attention within {window} tokens in all but every {every}th layer" if every > 1 else ""
    dropout = f", dropout {encoder.dropout:g}" if encoder.dropout else ""
    return f"{name} with {format_count(encoder.layers, 'layer')} of width {encoder.width}{local}{dropout}"


def describe_init(config: PretrainConfig, model: ElectraConfig) -> str:
    """Where the initial weights of the first phase come from."""
    init = config.init
    assert init.model is not None
    head = "" if has_head_for(init.model, model) else " with a new head"
    name = MODEL_NAMES[model.head] if model.discriminator else "masked language model"
    text = f"{name} initialised from {init.model}{head}"
    if model.generator is None or model.discriminator is None:
        return text
    source = generator_init_folder(init)
    return f"{text}; generator {'new' if source is None else f'initialised from {source}'}"


def describe_phases(phases: list[Phase]) -> Iterator[str]:
    dropouts = [describe_dropout(phase.model) for phase in phases]
    for previous, phase, dropout in zip([None, *phases], phases, dropouts, strict=False):
        number = f"phase {phase.index + 1} of {len(phases)}, " if len(phases) > 1 else ""
        dropout_text = f", {dropout}" if len(set(dropouts)) > 1 else ""
        text = f"{number}{describe_phase(phase)}{dropout_text}{describe_new_discriminator(previous, phase)}"
        yield f"{text}{describe_growth(previous, phase)}"


def describe_dropout(model: ElectraConfig) -> str:
    """The dropout of the main encoder, and the generator's where it is another."""
    dropout = main_encoder_config(model.encoder_configs()).dropout
    generator = model.generator.dropout if model.generator else dropout
    return f"dropout {dropout:g}" + (f" ({generator:g} in the generator)" if generator != dropout else "")


def describe_phase(phase: Phase) -> str:
    """Objective, budget, batch, masking, optimizer and schedule."""
    config = phase.config
    if phase.budget.steps is None:
        budget = format_duration((phase.budget.seconds or 0) / 60)
    else:
        budget = format_count(phase.budget.steps, "step")
    batch = f"{config.loader.batch_size} × {config.loader.length} tokens per step"
    masked = f"{100 * config.masking.mask_fraction:g} % masked"
    optimizer = config.optimizer
    schedule = f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} schedule"
    return f"{config.objective.name}, {budget}: {batch}, {masked}; {schedule}"


def describe_new_discriminator(previous: Phase | None, phase: Phase) -> str:
    """How a discriminator is initialised that the previous phase lacks."""
    if previous is None or previous.model.discriminator is not None or phase.model.discriminator is None:
        return ""
    source = "initialised from the generator" if inits_discriminator_from_generator(previous, phase) else "new"
    return f"; the discriminator is {source}"


def describe_growth(previous: Phase | None, phase: Phase) -> str:
    """From which size a phase widens and stacks the discriminator, or a masked language model without one."""
    name = "discriminator" if phase.model.discriminator else "masked language model"
    sizes = changed_sizes(previous.model, phase.model) if previous else []
    changes = [GROWTH[size].format(before, after) for size, before, after in sizes]
    return f"; the {name} is {' and '.join(changes)}" if changes else ""


def run_warnings(config: PretrainConfig, phases: list[Phase], shards: Shards, device: torch.device) -> Iterator[str]:
    """Settings that are valid but probably not intended; raises a DataError if there are no held-out rows."""
    yield from held_out_warnings(config, shards)
    for phase in phases:
        steps, warmup = phase.schedule_budget.steps, phase.config.optimizer.warmup
        if phase.starts_optimizer and steps is not None and warmup >= max(1, steps):
            yield (
                f"a warm-up of {warmup:g} steps exceeds the {steps:,} steps of training: the learning rate stays below "
                f"{steps / warmup:.0%} of its peak; give the warm-up as a fraction (--warmup 0.1)"
            )
    if device.type == "cpu" and max(phase.flops_per_step() for phase in phases) > SLOW_STEP and not config.dry_run:
        yield (
            f"no GPU: a step of --size {config.model.size} and {config.loader.batch_size} rows takes seconds on a CPU; "
            "use --size tiny or a smaller --batch-size"
        )


def held_out_warnings(config: PretrainConfig, shards: Shards) -> Iterator[str]:
    loader = held_out_loader_config(config)
    rows = BatchLoader(shards, loader, split="validation").epoch(0).num_rows
    used = rows // loader.batch_size * loader.batch_size or rows
    if rows < FEW_ROWS:
        problem = f"{shards.folder} has only {rows} held-out rows: metrics will be noisy"
    elif used < config.evaluation_rows:
        problem = f"evaluation uses {used} rows instead of {config.evaluation_rows}: {shards.folder} holds out {rows}"
    else:
        return
    fraction = shards.index.settings["validation_fraction"]
    yield f"{problem}; make shards with a --validation-fraction above {fraction:.2g}"


@dataclass(frozen=True)
class RunEstimate:
    """The summary of a run and its size; time and memory are rough estimates."""

    summary: list[str]
    parameters: int
    steps: int
    tokens: int
    epochs: float
    flops: float
    minutes: float
    memory_bytes: int
    available_bytes: int | None
    device: str

    def __str__(self) -> str:
        available = f"{self.available_bytes / 1e9:.0f}" if self.available_bytes else "unknown"
        lines = [
            *self.summary,
            f"parameters  {self.parameters:,}",
            f"steps       {self.steps:,}",
            f"tokens      {self.tokens:,} ({self.epochs:.2f} epochs)",
            f"FLOPs       {self.flops:.3g}",
            f"time        about {format_duration(self.minutes)} on this {self.device}",
            f"memory      about {self.memory_bytes / 1e9:.1f} of {available} GB",
        ]
        if self.device == "cpu" and self.minutes > 24 * 60:
            lines.append("this is slow on a CPU; try --size tiny, fewer --steps, or --minutes")
        if self.available_bytes and self.memory_bytes > self.available_bytes:
            lines.append("this may exceed the memory; try --micro-batches or --activation-checkpointing")
        return "\n".join(lines)


def estimate_run(config: PretrainConfig, phases: list[Phase], shards: Shards, device: torch.device) -> RunEstimate:
    """Estimate a run without running it: phases add up, the largest determines the memory."""
    estimates = [estimate_phase(phase, shards, device) for phase in phases]
    sums = {
        name: sum(getattr(estimate, name) for estimate in estimates)
        for name in ("steps", "tokens", "epochs", "flops", "minutes")
    }
    largest = max(estimates, key=lambda estimate: estimate.memory_bytes)
    parameters = max(estimate.parameters for estimate in estimates)
    return replace(largest, **sums, parameters=parameters, summary=summarize_run(config, phases))


def estimate_phase(phase: Phase, shards: Shards, device: torch.device) -> RunEstimate:
    hardware = phase.config.hardware
    parameters = count_parameters(phase.model)
    flops_per_step = phase.flops_per_step()
    speed = measure_flops_per_second(device, choose_dtype(hardware.precision, device)) * EFFICIENCY[device.type]
    speed /= CHECKPOINTING_TIME if hardware.activation_checkpointing else 1
    steps = phase.budget.steps or max(1, int((phase.budget.seconds or 0) * speed / flops_per_step))
    tokens = steps * phase.tokens_per_step()
    rows = phase.config.loader.batch_size // phase.config.trainer.micro_batches
    return RunEstimate(
        summary=[],
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        epochs=tokens / max(1, shards.index.totals_by_split("tokens")["train"]),
        flops=float(steps * flops_per_step),
        minutes=steps * flops_per_step / speed / 60,
        memory_bytes=BYTES_PER_PARAMETER * parameters + rows * activation_bytes_per_row(phase, device),
        available_bytes=device_memory_bytes(device),
        device=device.type,
    )


def activation_bytes_per_row(phase: Phase, device: torch.device) -> int:
    """Memory for the backward pass per row: activations of the layers, and logits of token predictions."""
    config, model = phase.config, phase.model
    length, hardware = config.loader.length, config.hardware
    bytes_per_number = torch.finfo(choose_dtype(hardware.precision, device)).bits // 8
    total = 0
    for encoder in model.encoder_configs().values():
        width = encoder.width
        per_token = width if hardware.activation_checkpointing else 10 * width + 2 * encoder.feedforward
        total += bytes_per_number * length * encoder.layers * per_token
    predicts_masked = model.head == "mlm" or "corrective_lm" in model.auxiliary_heads  # copy_mlm works in chunks
    predicting = [model.generator, model.discriminator if predicts_masked else None]
    for encoder in filter(None, predicting):
        total += 3 * 4 * max_masked(length, config.masking) * encoder.vocab_size  # logits, noise and gradient in fp32
    return total


def assess_run(metrics_lines: list[dict[str, Any]], epochs: float, run: str) -> dict[str, str]:
    """Sentences about a finished run by topic, from its metrics; some topics are there only if they apply."""
    evaluations = [line for line in metrics_lines if line["kind"] == "validation"]
    if not evaluations:
        return {}
    last = {name: value for name, value in evaluations[-1].items() if value is not None}
    seen = f"the text {epochs:.1f} times" if epochs >= 1 else f"{epochs:.0%} of the text"
    assessment = {"epochs": f"It has seen {seen}."}
    is_adversarial = any("baseline" in line for line in metrics_lines)  # its generator does not minimise the MLM loss
    token_losses = [
        name
        for name in TOKEN_LOSSES
        if {name, name.replace("loss", "accuracy"), "unigram_mlm_loss"} <= last.keys() and not is_adversarial
    ]
    for name in token_losses:
        model = token_predictor(last, name)
        assessment[model] = assess_token_predictions(last, name, model)
        if is_on_plateau(last, name):
            is_worse = last[name] > last["unigram_mlm_loss"] / PLATEAU
            assessment["plateau"] = WORSE_SENTENCE if is_worse else PLATEAU_SENTENCES
    if "unigram_rtd_auc" in last:
        assessment["discriminator"] = assess_discriminator(last)
    # losses with the same masks and samples at every evaluation
    loss = next((name for name in (*token_losses, "unigram_rtd_loss", "loss") if name in last), "loss")
    comparable = [line for line in evaluations if line.get(loss) is not None and has_same_rows(line, last)]
    lowest = min(comparable, key=lambda line: line[loss], default=last)
    if loss in last and last[loss] > OVERFITTING * lowest[loss]:
        rise = f"was {lowest[loss]:.3f} at step {lowest['step']:,} and is {last[loss]:.3f} now"
        assessment["overfitting"] = f"It over-fits: the held-out {loss} {rise}."
    return assessment | {"next": f"Next: {suggest_next(assessment, epochs, run)}."}


def has_same_rows(evaluation: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two evaluations of a run have the same held-out rows: the unigram loss depends on nothing else."""
    first, second = (each.get("unigram_mlm_loss") or 0.0 for each in (evaluation, other))
    return math.isclose(first, second, rel_tol=1e-5)


def token_predictor(metrics: dict[str, float], name: str) -> str:
    """What a loss is of: the generator, if there is another model beside it."""
    return TOKEN_LOSSES[name] if metrics.keys() & {"unigram_rtd_auc", "replace_mlm_loss"} else "model"


def assess_token_predictions(metrics: dict[str, float], name: str, model: str) -> str:
    """Whether masked tokens are predicted better than by their frequencies."""
    loss, unigram_loss, accuracy = metrics[name], metrics["unigram_mlm_loss"], metrics[name.replace("loss", "accuracy")]
    comparison = "no better" if loss >= unigram_loss else "hardly better" if is_on_plateau(metrics, name) else "better"
    return (
        f"The {model} predicts masked tokens {comparison} than token frequencies alone: held-out loss "
        f"{loss:.2f} and {unigram_loss:.2f}; its first choice is right for {accuracy:.0%}."
    )


def assess_discriminator(metrics: dict[str, float]) -> str:
    """How well replaced tokens are distinguished from original ones, compared with guessing."""
    random_auc = metrics["unigram_rtd_auc"]  # samples of a poor generator are easier: their frequencies differ
    own = f" ({metrics['rtd_auc']:.0%} for samples of its generator)" if "rtd_auc" in metrics else ""
    share = f"{random_auc:.0%} of the time{own}; guessing has 50%"
    nothing = ": it has learnt next to nothing" if random_auc < GUESSING_AUC else ""
    return f"The discriminator ranks a random token above an original one {share}{nothing}."


def suggest_next(assessment: dict[str, str], epochs: float, run: str) -> str:
    """What to do after a run."""
    if "overfitting" in assessment:
        return "more text, fewer steps, a smaller --size or --dropout 0.1"
    if "plateau" in assessment or "nothing" in assessment.get("discriminator", ""):
        advice = "more text" if epochs > MANY_EPOCHS else "train longer (with a larger budget)"
        return f"{advice}, or a smaller model or vocabulary"
    return f"electra finetune --model {run} --train FILE --output FOLDER"
