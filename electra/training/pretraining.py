"""`electra pretrain`: from shards to a trained pair."""

import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from electra.errors import ConfigError, DataError
from electra.model.electra import Electra, ElectraConfig, Generator
from electra.model.encoder import Embeddings, Encoder, check_length
from electra.model.flops import TRAINING, flops, items_of
from electra.model.storage import CONFIG, model_config, read_json, write_json, write_model
from electra.objective.losses import Counts, Losses
from electra.objective.masking import slots
from electra.objective.measures import measure
from electra.objective.objectives import OBJECTIVES, ObjectiveConfig, Settings
from electra.text.batches import Batch, Batches, BatchesConfig, validation_batches
from electra.text.files import is_used
from electra.text.shards import TOKENIZER, Shards, open_shards
from electra.training.checkpoint import checkpoint_folders, model_folder, remove_drafts
from electra.training.curves import draw_curves
from electra.training.estimate import Estimate, estimate
from electra.training.initial import (
    InitialConfig,
    Start,
    has_own_segments,
    initial_size,
    read_start,
    require_tokenizers,
)
from electra.training.machine import (
    Device,
    Precision,
    can_compile,
    choose_device,
    choose_precision,
    environment,
    peak_flops,
)
from electra.training.recipes import Recipe, settings_for
from electra.training.samples import write_samples
from electra.training.trainer import Budget, Outcome, Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainerConfig, ObjectiveConfig, BatchesConfig, InitialConfig):
    """Pre-train a generator and a discriminator on shards of tokens, from nothing to a checkpoint that can be exported.

    The machine may die at any moment: the same command with --resume goes on, and ends with the same weights.

    Many defaults depend on --size and --recipe: shown are those of the size and recipe below.
    Give others beside --help to see theirs."""

    data: Path
    """The folder of shards (electra shard)."""
    output: Path
    """The run folder: config, metrics, curves, checkpoints."""
    recipe: Recipe = "fast"
    """Settings that go together. faithful: the released code's, with its quirks; fast: our best so far."""
    objective: Literal["rtd", "mlm"] = "rtd"
    """rtd: generator and discriminator together; mlm: a masked language model of the discriminator's size (BERT)."""
    starts_at_unigram: bool = False
    """Give the generator's output the frequencies of tokens to start from, which it learns first anyway: the
    discriminator then has real work from the first step."""
    starts_with_waves: bool = False
    """Start the position table as waves of many lengths instead of noise: what stands beside a token is then a simple
    turn away, and context is learnt from sooner. It is trained like any table."""
    steps: int | None = None
    """Budget in steps; the schedule follows the budget."""
    tokens: int | None = None
    """Budget in tokens."""
    minutes: float | None = None
    """Budget in minutes of training; compiling, measuring and saving do not count."""
    resume: bool = False
    """Go on from the last checkpoint in --output; from the start if there is none yet."""
    branch_from: Path | None = None
    """Go on from a checkpoint of another run, or from a run's last one; the budget counts from there. With --schedule
    decay it ends a wsd trunk that itself may train on."""
    compile: bool = False
    """Compile the model (torch.compile): the first step takes a minute, the others are faster."""
    recompute: bool = False
    """Gradient checkpointing: keep less for the backward pass and compute it again; less memory, a third more time."""
    device: Device = "auto"
    """auto: the GPU where there is one."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    evaluation_rows: int = 512
    """Rows of held-out text that are measured on."""
    dry_run: bool = False
    """Only say what the run would be: parameters, operations, tokens, time and memory."""
    json: bool = False
    """Print the result as JSON."""

    FREE: ClassVar = {  # what may differ when a run is resumed: nothing that changes the weights
        *("data", "output", "resume", "json", "dry_run", "device", "compile", "recompute", "micro_batches"),
        *("resident", "log_every", "evaluate_every", "save_every", "keep", "most_skipped", "evaluation_rows"),
    }

    def __post_init__(self) -> None:
        for part in (TrainerConfig, ObjectiveConfig, BatchesConfig, InitialConfig):
            part.__post_init__(self)
        self.check_start()
        given = [name for name in ("steps", "tokens", "minutes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one budget, --steps, --tokens or --minutes; {' and '.join(given) or 'none'} came")
        if getattr(self, given[0]) <= 0:
            raise ConfigError(f"{given[0]} is {getattr(self, given[0])}; a run needs a budget above 0")
        if self.batch_size % self.micro_batches:
            raise ConfigError(f"{self.batch_size} rows do not divide into {self.micro_batches} micro-batches")
        if self.starts_with_waves and self.style == "modern":
            raise ConfigError("starts_with_waves fills the position table, and the modern style has none; leave it out")

    def check_start(self) -> None:
        """Refuse two places to start from, and a generator where there is only one model."""
        if self.init is not None and self.branch_from is not None:
            raise ConfigError("--init and --branch-from both say where to start: --init takes weights only; give one")
        if self.init_generator is not None and not OBJECTIVES[self.objective].has_discriminator:
            raise ConfigError(f"--objective {self.objective} trains one model: leave out --init-generator")

    @classmethod
    def preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The defaults of the recipe, size and style among the flags that were given; a budget among them replaces
        theirs."""
        given = initial_size(given) | given
        chosen = {name: given.get(name, getattr(cls, name)) for name in ("recipe", "size", "style")}
        settings = settings_for(**chosen) | chosen
        for budget in ("tokens", "minutes"):
            if budget in given:
                settings |= {"steps": None, budget: 1}  # the flag puts its own number in
        return settings

    def budget(self) -> Budget:
        """The budget as the trainer counts it."""
        if self.minutes is not None:
            return Budget(seconds=60 * self.minutes)
        if self.tokens is not None:
            return Budget(steps=math.ceil(self.tokens / (self.batch_size * self.length)))
        return Budget(steps=self.steps)

    def has_begun(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.resume and bool(checkpoint_folders(self.output))

    def start(self) -> Start | None:
        """The weights of other models to begin with; None where they are new, or a checkpoint has them."""
        if self.init is None or self.has_begun():
            return None
        return read_start(self, OBJECTIVES[self.objective].has_discriminator)

    def pair(self, shards: Shards) -> ElectraConfig:
        """The model: a pair, or for objectives without a discriminator a generator of its size."""
        if self.init is not None and self.has_begun():
            return model_config(self.output)  # what it was begun with need not be there any more
        if self.init is not None:
            require_tokenizers(self, shards)
        vocabulary = shards.tokenizer.vocabulary
        pair = self.electra(vocabulary.size, vocabulary.pad_id)
        if not OBJECTIVES[self.objective].has_discriminator:
            pair = ElectraConfig(generator=pair.discriminator, discriminator=None, sharing="none")
        for part in filter(None, (pair.generator, pair.discriminator)):
            check_length(self.length, part)
        return pair


def pretrain(config: PretrainConfig) -> Outcome | Estimate:
    """Train a pair on shards; everything it leaves is in the run folder."""
    shards = open_shards(config.data)
    device = choose_device(config.device)
    if config.compile and not can_compile(device):
        raise ConfigError("--compile needs a C++ compiler on the CPU, and there is no g++; leave it out")
    if config.dry_run:
        return estimate_run(config, shards, device)
    torch.manual_seed(config.seed)
    lesson = PretrainingLesson(config, shards, device)  # raises if the shards will not do, before anything is written
    start = config.start()
    checkpoint = open_run(config, shards)
    trainer = Trainer(lesson, config, config.budget(), config.output, config.seed)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    elif config.branch_from is not None:
        trainer.branch(model_folder(config.branch_from))
    elif start is not None:
        start.put_into(lesson.model)
    if config.init is not None:
        lesson.keeps_segments |= has_own_segments(lesson.model)
    outcome = trainer.train()
    draw_curves(config.output)
    return outcome


def open_run(config: PretrainConfig, shards: Shards) -> Path | None:
    """Make the run folder, or find the checkpoint to resume from; refuses to mix two runs."""
    run, record = config.output, run_record(config, shards)
    if (run / CONFIG).exists():
        if not config.resume:
            raise ConfigError(f"{run} holds a run already; go on with it by --resume, or choose another --output")
        refuse_other_settings(read_json(run / CONFIG), record, run)
        remove_drafts(run)
    elif is_used(run):
        raise DataError(f"{run} is not empty and holds no run; choose another --output")
    else:
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / CONFIG, record)
    found = checkpoint_folders(run)
    return found[-1] if found else None


def run_record(config: PretrainConfig, shards: Shards) -> dict[str, Any]:
    """What config.json keeps of a run."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    record = {
        "model": asdict(config.pair(shards)),
        "pretraining": settings,
        "data": {"tokens": shards.index.totals("tokens"), "tokenizer": shards.tokenizer.fingerprint},
        "command": shlex.join(sys.argv),
        "environment": environment(),
    }
    return json.loads(json.dumps(record, default=str))


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], run: Path) -> None:
    """Refuse to resume a run with settings, or data, that would change its weights."""
    if "pretraining" not in old:
        raise ConfigError(f"{run} holds a model, not a run; choose another --output")
    before, after = {"style": "classic"} | facts(old), facts(new)  # older runs say nothing of styles
    differing = [name for name in after if name not in PretrainConfig.FREE and before.get(name) != after[name]]
    if differing:
        told = "; ".join(f"{name} was {before.get(name)} and is now {after[name]}" for name in differing)
        raise ConfigError(
            f"{run} was begun with other settings: {told}; resume with the same, or choose another --output"
        )


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """What a run is known by: its settings, and in words its data."""
    data, entries = record["data"], record["model"]["generator"]["vocabulary"]
    text = "{train:,} tokens with {validation:,} held out".format(**data["tokens"])
    tokenizer = f"one of {entries:,} entries ({data['tokenizer'][:8]})"
    return record["pretraining"] | {"the text in --data": text, "the tokenizer of --data": tokenizer}


class PretrainingLesson:
    """What the trainer is given: the pair, its batches, its objective, its measures."""

    def __init__(self, config: PretrainConfig, shards: Shards, device: torch.device) -> None:
        self.config, self.shards, self.device = config, shards, device
        self.model = Electra(config.pair(shards)).to(device)
        for module in self.model.modules():
            if isinstance(module, Encoder):
                module.recomputes_layers = config.recompute
        self.precision = choose_precision(config.precision, device)
        self.objective = OBJECTIVES[config.objective]
        self.settings = settings_of(config, shards)
        self.batches = Batches(shards, batches_config(config), device=device)
        self.stream: Iterator[Batch] | None = None
        self.held_out = list(held_out_batches(config, shards, device))
        self.unigram = unigram(shards, device)
        if config.starts_at_unigram and self.model.generator is not None:
            start_at_unigram(self.model.generator, self.unigram)
        if config.starts_with_waves:
            start_with_waves(self.model)
        self.keeps_segments = config.form != "dense"
        self.objective_losses = torch.compile(self.objective.losses) if config.compile else self.objective.losses

    def next_batch(self) -> Batch:
        self.stream = self.stream or iter(self.batches)
        return next(self.stream)

    def losses(self, batch: Batch) -> Losses:
        with self.autocast():
            return self.objective_losses(self.model, batch, self.settings)

    def counts(self, batch: Batch) -> Counts:
        return self.objective.counts(batch, self.settings)

    def rate_share(self, name: str) -> float:
        return 1.0

    def autocast(self) -> torch.autocast:
        """Half precision where it is wanted."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    def evaluate(self) -> dict[str, float]:
        """Measures on held-out text, and a page of sentences to look at."""
        self.model.eval()
        with self.autocast(), torch.no_grad():
            measures = measure(self.model, self.held_out, self.unigram, self.settings.vocabulary)
            write_samples(self.config.output, self.model, self.held_out[0], self.shards.tokenizer)
        self.model.train()
        return measures

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        """Operations a second, and their share of what the device is sold with."""
        config = self.config
        parts = items_of(self.model.config, config.length, slots(config.length, config))
        achieved = tokens_per_second * TRAINING * sum(map(flops, parts.values())) / config.length
        peak = peak_flops(self.device)
        return {"tflops_per_second": achieved / 1e12} | ({"mfu": achieved / peak} if peak else {})

    def write_model(self, folder: Path) -> None:
        if not self.keeps_segments:
            settle_segments(self.model)
        write_model(self.model, folder, self.shards.folder / TOKENIZER)

    def state(self) -> dict[str, Any]:
        return self.batches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.batches.restore(state)


def settings_of(config: PretrainConfig, shards: Shards) -> Settings:
    """The objective's part of the configuration, with the shards' vocabulary."""
    own = {field.name: getattr(config, field.name) for field in fields(ObjectiveConfig)}
    return Settings(**own, vocabulary=shards.tokenizer.vocabulary)


def batches_config(config: PretrainConfig) -> BatchesConfig:
    """The batches' part of the configuration."""
    return BatchesConfig(**{field.name: getattr(config, field.name) for field in fields(BatchesConfig)})


def held_out_batches(config: PretrainConfig, shards: Shards, device: torch.device) -> Iterator[Batch]:
    """Held-out rows in one form for all runs: dense, no longer than 128 tokens."""
    size = min(32, config.evaluation_rows)
    form = BatchesConfig(length=min(128, config.length), batch_size=size, form="dense")
    for number, batch in enumerate(validation_batches(shards, form, device=device)):
        if number * size >= config.evaluation_rows:
            return
        yield batch


def unigram(shards: Shards, device: torch.device, most: int = 50_000_000) -> Tensor:
    """How often each token comes in the training text (its first fifty million tokens): [V], adding up to 1."""
    counts = np.zeros(shards.tokenizer.vocabulary.size, dtype=np.int64)
    for tokens in shards.tokens("train"):
        counts += np.bincount(tokens[: max(0, most - counts.sum())], minlength=len(counts))
    counts[list(shards.tokenizer.vocabulary.unmaskable())] = 0
    return torch.from_numpy(counts / max(1, counts.sum())).float().to(device)


def start_at_unigram(generator: Generator, unigram: Tensor) -> None:
    """Make the frequencies of tokens the generator's first guesses; none of them is quite zero."""
    with torch.no_grad():
        generator.head.bias.copy_((unigram + unigram[unigram > 0].min() / 10).log())


def settle_segments(model: nn.Module) -> None:
    """Make segment B's embedding A's: dense rows never meet B, and pairs that a model is fine-tuned on have both."""
    for module in model.modules():
        if isinstance(module, Embeddings):
            with torch.no_grad():
                module.segment.weight.copy_(module.segment.weight[:1].expand_as(module.segment.weight))


def start_with_waves(model: nn.Module) -> None:
    """Sines and cosines as first positions, as large as the noise in whose place they are."""
    for module in model.modules():
        if not isinstance(module, Encoder) or not isinstance(module.embeddings, Embeddings):
            continue
        if module.embeddings.base is None:  # differences from a base start at zero
            table = module.embeddings.position.weight
            with torch.no_grad():
                table.copy_(waves(*table.shape) * module.config.initial_std * 2**0.5)


def waves(positions: int, width: int) -> Tensor:
    """Pairs of sine and cosine [positions, width], each pair slower than the one before, from a radian a position."""
    speeds = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]


def estimate_run(config: PretrainConfig, shards: Shards, device: torch.device) -> Estimate:
    """What a run would be, without running it."""
    return estimate(
        config.pair(shards),
        budget=config.budget(),
        rows=config.batch_size,
        micro_rows=config.batch_size // config.micro_batches,
        length=config.length,
        masked=slots(config.length, config),
        recomputes=config.recompute,
        tokens_in_data=shards.index.totals("tokens")["train"],
        device=device,
        precision=choose_precision(config.precision, device),
    )
