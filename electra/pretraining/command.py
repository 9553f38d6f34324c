"""`electra pretrain`: from shards to a trained pair."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from electra.data.loader import Batch, BatchLoader, LoaderConfig, Position, validation_batches
from electra.data.shards import TOKENIZER, Shards, open_shards
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError, DataError, TrainingError
from electra.kernels.master_weights import WorkingCopy
from electra.model.electra import Electra, MaskedLanguageModel
from electra.model.encoder import Embeddings, Encoder
from electra.model.storage import CONFIG, DISCRIMINATOR_HEAD, WEIGHTS, read_model_config, read_tensors, write_model
from electra.objectives.evaluation import held_out_loss, measure
from electra.objectives.losses import Counts, Losses
from electra.objectives.masking import slots
from electra.objectives.objectives import OBJECTIVES, ObjectiveConfig, Settings
from electra.pretraining.config import Phase, PretrainConfig, plan, whole_model
from electra.pretraining.curves import draw_curves
from electra.pretraining.describe import outline
from electra.pretraining.estimate import Estimate, estimate, together
from electra.pretraining.initialize import Start, has_own_segments
from electra.pretraining.samples import write_samples
from electra.runfolder import check_same_settings, is_empty, lock_folder, read_json, remove_partial, write_json
from electra.training.checkpoint import checkpoint_folders, model_folder, read_state
from electra.training.hardware import (
    COMPILERS,
    can_compile,
    choose_device,
    choose_precision,
    environment,
    peak_flops,
)
from electra.training.logging import METRICS, read_lines
from electra.training.trainer import Trainer, TrainResult

FEW_ROWS = 20
"""Fewer held-out rows than this are warned of."""


def pretrain(config: PretrainConfig) -> TrainResult | Estimate:
    """Train a pair on shards; everything it leaves is in the run folder."""
    shards = open_shards(config.data)
    device = choose_device(config.device)
    require_compiler(config, device)
    phases = plan(config, shards)
    warn_of_little(config, shards)
    warn_of_long_warmup(phases)
    if device.type == "cpu" and config.size != "tiny" and not config.dry_run:
        print(f"no GPU: a step of the {config.size} size takes seconds here; --size tiny is for CPUs", file=sys.stderr)
    if config.dry_run:
        config.start(phases[0].model)  # raises where the run would
        return replace(estimate_run(phases, shards, device), outline=outline(config, phases))
    with lock_folder(config.output):
        return train(config, phases, shards, device)


def train(config: PretrainConfig, phases: list[Phase], shards: Shards, device: torch.device) -> TrainResult:
    """Train from the last checkpoint on, or from the start, phase by phase."""
    record = run_record(config, phases, shards)
    checkpoint = last_checkpoint(config, record)
    start = config.start(phases[0].model)
    print(*outline(config, phases), sep="\n", file=sys.stderr, flush=True)
    for phase in phases[0 if checkpoint is None else phase_of(checkpoint) :]:
        if len(phases) > 1:
            print(f"phase {phase.number + 1} of {len(phases)}: {phase.config.objective}", file=sys.stderr, flush=True)
        torch.manual_seed(config.seed)
        lesson = PretrainingTask(phase, shards, device)  # raises if the shards will not do, before there is a run
        write_record(config.output, record)
        outcome = train_phase(lesson, checkpoint, start)
        checkpoint = Path(outcome.checkpoint)
        if outcome.signal:
            break
    draw_curves(config.output)
    if not outcome.signal:
        refuse_no_number(config.output, outcome)
    return outcome


def refuse_no_number(run: Path, outcome: TrainResult) -> None:
    """Do not let a run pass for finished whose last measures say that its model is broken."""
    measured = [line for line in read_lines(run / METRICS) if line["kind"] == "validation"]
    if measured and measured[-1]["loss"] is None:  # JSON has no other word for it
        raise TrainingError(
            f"step {outcome.step}: the run is over, but its loss on held-out text is not a finite number: the model is "
            f"broken; its checkpoint is kept, {outcome.checkpoint}; try again with a lower --learning-rate or a longer "
            f"--warmup"
        )


def is_fast(config: PretrainConfig, device: torch.device) -> bool:
    """Whether steps are compiled and recorded: on a GPU, unless they are to be plain."""
    return device.type == "cuda" and not config.plain


def require_compiler(config: PretrainConfig, device: torch.device) -> None:
    """Refuse to compile where there is nothing to do it with."""
    if (is_fast(config, device) or config.compile) and not can_compile(device):
        advice = "add --plain" if is_fast(config, device) else "leave out --compile"
        raise ConfigError(f"compiling needs {COMPILERS[device.type]}, which is not here; {advice}")


def train_phase(lesson: "PretrainingTask", checkpoint: Path | None, start: Start | None) -> TrainResult:
    """Train for one phase, from a checkpoint of it or of the phase before, or from other models' weights."""
    phase, config = lesson.phase, lesson.phase.config
    trainer = Trainer(lesson, config, phase.stage, config.output, config.seed, records=lesson.is_fast, end=phase.end)
    if checkpoint is not None and phase.begins_stage and phase_of(checkpoint) < phase.number:
        take_over(lesson.model, checkpoint, config.init_discriminator_from_generator)
        trainer.follow(checkpoint)
    elif checkpoint is not None:
        trainer.resume(checkpoint)
        if phase_of(checkpoint) < phase.number:
            trainer.place.best_loss = None  # with other masks a loss is another
    elif config.branch_from is not None:
        trainer.branch(model_folder(config.branch_from))
    elif start is not None:
        start.put_into(lesson.model)
    if config.init is not None:
        lesson.keeps_segments |= has_own_segments(lesson.model)
    if lesson.is_compiled and not trainer.is_over():
        print("compiling the first step: about a minute, less where that was done before", file=sys.stderr, flush=True)
    return trainer.train()


def phase_of(checkpoint: Path) -> int:
    """The number of the phase that a checkpoint is of."""
    return read_state(checkpoint)["lesson"].get("phase", 0)


def take_over(model: Electra, checkpoint: Path, init_discriminator_from_generator: bool) -> None:
    """Give a model the weights of the phase before, and a discriminator that was not there those of the generator."""
    before, weights = read_model_config(checkpoint), read_tensors(checkpoint / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_other_head = name.startswith(DISCRIMINATOR_HEAD) and before.head != model.config.head
            if name in weights and not is_other_head:
                parameter.copy_(weights[name])
    if init_discriminator_from_generator and before.discriminator is None and model.discriminator is not None:
        model.discriminator.encoder.load_state_dict(model.require_generator().encoder.state_dict())


def last_checkpoint(config: PretrainConfig, record: dict[str, Any]) -> Path | None:
    """The checkpoint to resume from, where there is one; refuses to mix two runs."""
    run, found = config.output, checkpoint_folders(config.output)
    if (run / CONFIG).exists():
        before = read_json(run / CONFIG)
        if "pretraining" not in before:
            raise ConfigError(f"{run} holds a model, not a run; choose another --output")
        if found and not config.resume:
            raise ConfigError(f"{run} holds a run already; go on with it by --resume, or choose another --output")
        if found:
            check_same_settings(run, facts(before), facts(record), ignore=PretrainConfig.FREE)
        else:
            print(f"the run in {run} ended before its first checkpoint; this one takes its place", file=sys.stderr)
        remove_partial(run)
    elif not is_empty(run):
        raise DataError(f"{run} is not empty and holds no run; choose another --output")
    return found[-1] if found else None


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Write down what a run is; one that has left a checkpoint stays what it was."""
    if not checkpoint_folders(run):
        write_json(run / CONFIG, record)


def run_record(config: PretrainConfig, phases: list[Phase], shards: Shards) -> dict[str, Any]:
    """What config.json keeps of a run; its model is the one it ends as."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["data"] = config.data.absolute()  # a run may be resumed from another folder
    record = {
        "model": asdict(whole_model(phases)),
        "pretraining": settings,
        "data": {"tokens": shards.index.totals("tokens"), "tokenizer": shards.tokenizer.fingerprint},
        "command": shlex.join(sys.argv),
        "environment": environment(),
    }
    return json.loads(json.dumps(record, default=str))


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """What a run is known by: its settings, and in words its data."""
    data, model = record["data"], record["model"]
    entries = (model["generator"] or model["discriminator"])["vocab_size"]
    text = "{train:,} tokens with {validation:,} held out".format(**data["tokens"])
    tokenizer = f"one of {entries:,} entries ({data['tokenizer'][:8]})"
    return record["pretraining"] | {"the text in --data": text, "the tokenizer of --data": tokenizer}


class PretrainingTask:
    """What the trainer is given: the pair, its batches, its objective, its measures."""

    def __init__(self, phase: Phase, shards: Shards, device: torch.device) -> None:
        self.phase, self.shards, self.device = phase, shards, device
        self.config = config = phase.config
        self.model = Electra(phase.model).to(device)
        self.working = WorkingCopy(self.model, choose_precision(config.precision, device))
        self.is_fast = is_fast(config, device)
        encoders = [module for module in self.working.model.modules() if isinstance(module, Encoder)]
        for encoder in encoders:
            encoder.activation_checkpointing = config.activation_checkpointing
        with self.working.autocast():
            lists = any(encoder.kernel(config.length, is_listed=True) == "documents" for encoder in encoders)
        self.objective = OBJECTIVES[config.objective]
        self.batches = BatchLoader(
            shards,
            batches_config(config),
            seed=config.seed,
            whole_word_masking=config.whole_word_masking,
            device=device,
            with_cu_seqlens=lists,
        )
        self.stream: Iterator[Batch] | None = None
        self.held_out = held_out_batches(config, shards, device)
        self.unigram = unigram(shards, device)
        self.settings = settings_of(config, shards.tokenizer.vocabulary, self.unigram)
        if self.is_fast:
            from electra.kernels.side_stream import (
                GeneratorStream,  # imports torch's compiler, which takes a second or two
            )

            self.settings = replace(self.settings, detour=GeneratorStream())
        if config.unigram_output_bias:
            set_unigram_output_bias(self.model, self.unigram)
        if config.sinusoidal_positions:
            set_sinusoidal_positions(self.model)
        self.keeps_segments = config.packing != "packed"
        self.is_compiled, losses = self.is_fast or config.compile, self.objective.losses
        self.losses_of = torch.compile(losses, dynamic=False) if self.is_compiled else losses

    def next_batch(self) -> Batch:
        self.stream = self.stream or iter(self.batches)
        return next(self.stream)

    def losses(self, batch: Batch) -> Losses:
        self.working.refresh()
        with self.working.autocast():
            return self.losses_of(self.working.model, batch, self.settings)

    def backward(self, loss: Tensor) -> None:
        self.working.backward(loss)

    def counts(self, batch: Batch) -> Counts:
        return self.objective.counts(batch, self.settings)

    def rate_share(self, name: str) -> float:
        return 1.0

    def evaluate(self) -> dict[str, float]:
        """The loss and measures on held-out text, and a page of sentences to look at."""
        self.model.eval()
        with self.working.autocast(), torch.no_grad():
            loss = held_out_loss(self.config.objective, self.model, self.held_out, self.settings)
            measures = measure(self.model, self.held_out, self.unigram, self.settings.vocabulary)
            drawn = self.settings.frequencies
            write_samples(self.config.output, self.model, self.held_out[0], self.shards.tokenizer, drawn)
        self.model.train()
        return {"loss": loss} | measures

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        """Operations a second, and their share of what the device is sold with."""
        achieved = tokens_per_second * self.phase.row_flops() / self.config.length
        peak = peak_flops(self.device)
        return {"tflops_per_second": achieved / 1e12} | ({"mfu": achieved / peak} if peak else {})

    def write_model(self, folder: Path) -> None:
        if not self.keeps_segments:
            settle_segments(self.model)
        write_model(self.model, folder, self.shards.folder / TOKENIZER)

    def state(self) -> dict[str, Any]:
        return self.batches.state_dict() | {"phase": self.phase.number}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("phase", 0) != self.phase.number:  # rows may be of another length: a new epoch
            self.batches.position = Position(step=state["step"], epoch=state["epoch"] + 1)
        else:
            self.batches.load_state_dict(state)


def settings_of(config: PretrainConfig, vocabulary: Vocabulary, unigram: Tensor) -> Settings:
    """The objective's part of the configuration, with the text's vocabulary, and what fills blanks in it."""
    own = {field.name: getattr(config, field.name) for field in fields(ObjectiveConfig)}
    frequencies = {"model": None, "uniform": uniform(vocabulary, unigram.device), "unigram": unigram}
    return Settings(**own, vocabulary=vocabulary, frequencies=frequencies[config.generator_kind])


def uniform(vocabulary: Vocabulary, device: torch.device) -> Tensor:
    """All tokens that can be masked alike: [V], adding up to 1."""
    frequencies = torch.ones(vocabulary.size, device=device)
    frequencies[list(vocabulary.unmaskable())] = 0
    return frequencies / frequencies.sum()


def batches_config(config: PretrainConfig) -> LoaderConfig:
    """The batches' part of the configuration."""
    return LoaderConfig(**{field.name: getattr(config, field.name) for field in fields(LoaderConfig)})


def held_out_batches(config: PretrainConfig, shards: Shards, device: torch.device) -> list[Batch]:
    """Held-out rows, from all over the held-out text."""
    loader = held_out_loader(config)
    batches = list(validation_batches(shards, loader, whole_word_masking=config.whole_word_masking, device=device))
    wanted = min(len(batches), most_rows(config) // loader.batch_size)
    return [batches[number * len(batches) // wanted] for number in range(wanted)]


def held_out_loader(config: PretrainConfig) -> LoaderConfig:
    """The loader's configuration for held-out rows, one for all runs: packed, no longer than 128 tokens."""
    length, rows = min(128, config.length), min(32, config.evaluation_rows)
    return LoaderConfig(length=length, batch_size=rows)


def most_rows(config: PretrainConfig) -> int:
    """Held-out rows that measures are of, where there are so many: whole batches."""
    rows = held_out_loader(config).batch_size
    return -(-config.evaluation_rows // rows) * rows


def warn_of_little(config: PretrainConfig, shards: Shards) -> None:
    """Say so where hardly any text is held out to measure on; raises where there is none."""
    loader = held_out_loader(config)
    rows = BatchLoader(shards, loader, split="validation").epoch(0).rows.num_rows
    measured, wanted = rows // loader.batch_size * loader.batch_size or rows, config.evaluation_rows
    if rows < FEW_ROWS:
        told = f"only {rows} rows of text are held out in {shards.folder}: measures on them say little"
    elif measured < wanted:
        told = f"measures are of {measured} rows, not {wanted}: {rows} are held out in {shards.folder}"
    else:
        return
    fraction = shards.index.settings["validation_fraction"]
    print(f"{told}; make shards with a larger --validation-fraction (it was {fraction})", file=sys.stderr)


def warn_of_long_warmup(phases: list[Phase]) -> None:
    """Say so where the learning rate would still be rising when a run, or a stage of it, is over."""
    for phase in phases:
        steps, warmup = phase.stage.steps, phase.config.warmup
        if phase.begins_stage and steps is not None and warmup >= max(1, steps):
            print(
                f"warmup takes {warmup:g} steps and training only {steps:,}: the learning rate stays below "
                f"{steps / warmup:.0%} of its height; give a share of the run (--warmup 0.1)",
                file=sys.stderr,
            )


def unigram(shards: Shards, device: torch.device, most: int = 50_000_000) -> Tensor:
    """How often each token comes in the training text (its first fifty million tokens): [V], adding up to 1."""
    counts = np.zeros(shards.tokenizer.vocabulary.size, dtype=np.int64)
    for tokens in shards.tokens("train"):
        counts += np.bincount(tokens[: max(0, most - counts.sum())], minlength=len(counts))
    counts[list(shards.tokenizer.vocabulary.unmaskable())] = 0
    return torch.from_numpy(counts / max(1, counts.sum())).float().to(device)


def set_unigram_output_bias(model: Electra, unigram: Tensor) -> None:
    """Make the frequencies of tokens the first guesses of whatever guesses tokens; none of them is quite zero."""
    for part in (model.generator, model.discriminator):
        if isinstance(part, MaskedLanguageModel):
            with torch.no_grad():
                part.head.bias.copy_((unigram + unigram[unigram > 0].min() / 10).log())


def settle_segments(model: nn.Module) -> None:
    """Make segment B's embedding A's: dense rows never meet B, and pairs that a model is fine-tuned on have both."""
    for module in model.modules():
        if isinstance(module, Embeddings):
            with torch.no_grad():
                module.segment.weight.copy_(module.segment.weight[:1].expand_as(module.segment.weight))


def set_sinusoidal_positions(model: nn.Module) -> None:
    """Sines and cosines as first positions, as large as the noise in whose place they are."""
    for module in model.modules():
        if not isinstance(module, Encoder) or not isinstance(module.embeddings, Embeddings):
            continue
        if module.embeddings.base is None:  # differences from a base start at zero
            table = module.embeddings.position.weight
            with torch.no_grad():
                table.copy_(waves(*table.shape) * module.config.init_std * 2**0.5)


def waves(positions: int, width: int) -> Tensor:
    """Pairs of sine and cosine [positions, width], each pair slower than the one before, from a radian a position."""
    speeds = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]


def estimate_run(phases: list[Phase], shards: Shards, device: torch.device) -> Estimate:
    """What a run would be, without running it."""
    return together([estimate_phase(phase, shards, device) for phase in phases])


def estimate_phase(phase: Phase, shards: Shards, device: torch.device) -> Estimate:
    """What a phase would be."""
    config = phase.config
    return estimate(
        phase.model,
        budget=phase.budget,
        rows=config.batch_size,
        micro_rows=config.batch_size // config.micro_batches,
        length=config.length,
        masked=slots(config.length, config),
        row_flops=phase.row_flops(),
        recomputes=config.activation_checkpointing,
        tokens_in_data=shards.index.totals("tokens")["train"],
        device=device,
        precision=choose_precision(config.precision, device),
    )
