"""`electra pretrain`: from shards to a trained pair."""

import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from electra.errors import ConfigError, DataError
from electra.model.electra import Electra, ElectraConfig, Generator
from electra.model.encoder import Embeddings, Encoder, check_length
from electra.model.flops import TRAINING, flops, items_of
from electra.model.storage import (
    CONFIG,
    HEAD,
    WEIGHTS,
    model_config,
    read_json,
    read_tensors,
    write_json,
    write_model,
)
from electra.objective.losses import Counts, Losses
from electra.objective.masking import slots
from electra.objective.measures import measure
from electra.objective.objectives import OBJECTIVES, ObjectiveConfig, ObjectiveName, Settings
from electra.text.batches import Batch, Batches, BatchesConfig, Position, validation_batches
from electra.text.files import is_used
from electra.text.shards import TOKENIZER, Shards, open_shards
from electra.text.vocabulary import Vocabulary
from electra.training.checkpoint import STATE, checkpoint_folders, model_folder, remove_drafts
from electra.training.curves import draw_curves
from electra.training.estimate import Estimate, estimate, together
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
from electra.training.phases import read_phases
from electra.training.recipes import Recipe, settings_for
from electra.training.samples import write_samples
from electra.training.trainer import Budget, Outcome, Trainer, TrainerConfig

GeneratorKind = Literal["model", "uniform", "unigram"]


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainerConfig, ObjectiveConfig, BatchesConfig, InitialConfig):
    """Pre-train a generator and a discriminator on shards of tokens, from nothing to a checkpoint that can be exported.

    The machine may die at any moment: the same command with --resume goes on, and ends with the same weights.

    Many defaults depend on --size, --style and --recipe: shown are those of the size, style and recipe below.
    Give others beside --help to see theirs."""

    data: Path
    """The folder of shards (electra shard)."""
    output: Path
    """The run folder: config, metrics, curves, checkpoints."""
    recipe: Recipe = "fast"
    """Settings that go together. faithful: the released code's, with its quirks; fast: our best so far."""
    objective: ObjectiveName = "rtd"
    """rtd: the generator fills blanks, the discriminator finds its fills; electra-15: it is asked about masked tokens
    only; replace-mlm: what stands in its place predicts the masked tokens behind the fills; all-tokens-mlm: the same of
    every token, or copies it; mlm: a masked language model of its size (BERT); adversarial: the generator is paid what
    its fills cost the discriminator; frozen-rtd: the generator no longer learns (stage two of two-stage training)."""
    generator_kind: Annotated[GeneratorKind, tyro.conf.arg(name="generator")] = "model"
    """What fills blanks: the generator, or without one tokens drawn alike (uniform) or by frequency (unigram), which is
    too easy to find to learn much from."""
    phases: tuple[str, ...] = ()
    """Train in phases, each with settings of its own: `share=0.9 share=0.1,length=512`, or for two-stage training
    `objective=mlm objective=frozen-rtd`. A phase may have share (of the budget), objective, length, batch-size,
    micro-batches, learning-rate, mask-fraction and temperature. The learning rate has one schedule over neighbouring
    phases of one objective; where the objective changes, schedule and optimizer start afresh."""
    hands_over: bool = True
    """With phases: a discriminator that was not there before starts with the generator's weights; both need one size.
    Without, it starts afresh, and may then fail to learn."""
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
        given = [name for name in ("steps", "tokens", "minutes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one budget, --steps, --tokens or --minutes; {' and '.join(given) or 'none'} came")
        if getattr(self, given[0]) <= 0:
            raise ConfigError(f"{given[0]} is {getattr(self, given[0])}; a run needs a budget above 0")
        if self.batch_size % self.micro_batches:
            raise ConfigError(f"{self.batch_size} rows do not divide into {self.micro_batches} micro-batches")
        if self.starts_with_waves and self.style == "modern":
            raise ConfigError("starts_with_waves fills the position table, which the modern style does not have")
        if self.init is not None and self.branch_from is not None:
            raise ConfigError("--init and --branch-from both say where to start: --init takes weights only; give one")
        read_phases(self.phases)

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

    def budget(self, begin: float = 0.0, end: float = 1.0) -> Budget:
        """The budget as the trainer counts it, or a stretch of it."""
        if self.minutes is not None:
            return Budget(seconds=60 * self.minutes * (end - begin))
        if self.tokens is not None:
            return Budget(steps=math.ceil(self.tokens * (end - begin) / (self.batch_size * self.length)))
        assert self.steps is not None
        return Budget(steps=max(1, round(self.steps * end) - round(self.steps * begin)))

    def has_begun(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.resume and bool(checkpoint_folders(self.output))

    def by_phase(self) -> list["PretrainConfig"]:
        """These settings as each phase has them."""
        return [replace(self, phases=(), **departure.settings) for departure in read_phases(self.phases)]

    def start(self, model: ElectraConfig) -> Start | None:
        """The weights that the first phase's model begins with; None where they are new, or a checkpoint has them."""
        return None if self.init is None or self.has_begun() else read_start(self, model)

    def pair(self, shards: Shards) -> ElectraConfig:
        """The pair that phases have parts of; where none has a discriminator, the generator is of its size."""
        if self.init is not None and self.has_begun():
            return recorded_pair(self.output)  # what it was begun with need not be there any more
        if self.init is not None:
            require_tokenizers(self, shards)
        vocabulary, phases = shards.tokenizer.vocabulary, self.by_phase()
        pair = self.electra(vocabulary.size, vocabulary.pad_id)
        if not any(OBJECTIVES[phase.objective].head for phase in phases):
            pair = replace(pair, generator=pair.discriminator)  # BERT: of the size that discriminators are compared in
        for part in filter(None, (pair.generator, pair.discriminator)):
            check_length(max(phase.length for phase in phases), part)
        return pair


@dataclass(frozen=True)
class Phase:
    """A stretch of a run."""

    number: int
    config: PretrainConfig  # the run's, with what is different in this phase
    pair: ElectraConfig  # the run's
    model: ElectraConfig  # those parts of the pair that this phase has
    budget: Budget
    stage: Budget  # of all neighbouring phases of one objective: one schedule and one optimizer
    end: Budget  # where in the stage this phase ends
    begins_stage: bool


def plan(config: PretrainConfig, shards: Shards) -> list[Phase]:
    """The phases of a run; settings that contradict each other are refused."""
    configs, departures = config.by_phase(), read_phases(config.phases)
    refuse_contradictions(config, [one.objective for one in configs])
    pair = config.pair(shards)
    budgets = [one.budget(each.begin, each.end) for one, each in zip(configs, departures, strict=True)]
    phases: list[Phase] = []
    for _, stage in groupby(range(len(configs)), key=lambda number: configs[number].objective):
        numbers = list(stage)
        ends = list(accumulate((budgets[number] for number in numbers), Budget.plus))
        for number, end in zip(numbers, ends, strict=True):
            own = (configs[number], pair, model_of(pair, configs[number]), budgets[number])
            phases.append(Phase(number, *own, stage=ends[-1], end=end, begins_stage=number == numbers[0]))
    refuse_hand_over(phases)
    return phases


def model_of(pair: ElectraConfig, config: PretrainConfig) -> ElectraConfig:
    """Those parts of a pair that an objective has, with the heads it needs."""
    objective = OBJECTIVES[config.objective]
    generator = pair.generator if config.generator_kind == "model" else None
    discriminator = pair.discriminator if objective.head else None
    return ElectraConfig(
        generator=generator,
        discriminator=discriminator,
        sharing=pair.sharing if generator and discriminator else "none",
        head=objective.head or "verdict",
        has_baseline=objective.has_baseline,
    )


def refuse_contradictions(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse settings of which one leaves nothing for the other to do."""
    for name in objectives:
        if name not in OBJECTIVES:
            raise ConfigError(f"there is no objective {name!r}; choose from {', '.join(OBJECTIVES)}")
    kinds = [OBJECTIVES[name] for name in objectives]
    if config.generator_kind != "model":
        refuse_generators_settings(config, objectives)
    if config.entropy_bonus and "adversarial" not in objectives:
        raise ConfigError(f"entropy_bonus is {config.entropy_bonus}, which only --objective adversarial pays")
    if any(kind.is_frozen for kind in kinds) and config.sharing != "none":
        raise ConfigError(f"sharing={config.sharing} would move a frozen generator; add --sharing none")
    if kinds[0].is_frozen and not brings_generator(config):
        raise ConfigError(
            f"--objective {objectives[0]} needs a generator that was trained before; "
            f"train it in a phase of its own: --phases objective=mlm objective={objectives[0]}"
        )
    if config.init is not None and not config.has_begun():
        refuse_start(config, objectives)


def brings_generator(config: PretrainConfig) -> bool:
    """Whether a run starts with a generator that was trained before."""
    if config.init is None:
        return config.branch_from is not None
    return config.has_begun() or config.generator_source() is not None


def refuse_start(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse models to go on from that the first phase has no place for."""
    has_discriminator = [OBJECTIVES[name].head is not None for name in objectives]
    if not any(has_discriminator) and config.init_generator is not None:
        raise ConfigError(f"--objective {objectives[0]} trains one model: leave out --init-generator")
    if any(has_discriminator) and not has_discriminator[0] and not config.is_lone_generator():
        raise ConfigError(
            f"--phases begins with {objectives[0]}, which trains a generator alone: --init {config.init} must hold "
            f"just that, a masked language model, and be given as --init-generator too"
        )


def refuse_generators_settings(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse what makes no sense where tokens are drawn without a generator."""
    for name in objectives:
        if OBJECTIVES[name].needs_generator:
            able = ", ".join(other for other, kind in OBJECTIVES.items() if not kind.needs_generator)
            raise ConfigError(
                f"--objective {name} needs a generator, and --generator {config.generator_kind} is none; "
                f"choose another objective ({able}) or --generator model"
            )
    for setting in ("generator_width", "generator_layers", "init_generator", "temperature", "disallow_correct"):
        if (came := getattr(config, setting)) != getattr(PretrainConfig, setting):
            raise ConfigError(
                f"{setting} is {came}, which is for a generator, and --generator {config.generator_kind} is none; "
                f"leave it out"
            )
    if config.sharing in ("all", "disentangled"):
        raise ConfigError(
            f"sharing={config.sharing} needs a generator, and --generator {config.generator_kind} is none"
        )


def refuse_hand_over(phases: list[Phase]) -> None:
    """Refuse to start a discriminator with the weights of a generator that is built otherwise."""
    for before, after in pairwise(phases):
        if not starts_discriminator(before, after):
            continue
        ours, theirs = after.model.generator, after.model.discriminator
        if ours != theirs and ours and theirs:
            raise ConfigError(
                f"the discriminator cannot start with the weights of a generator {ours.width} wide and {ours.layers} "
                f"deep: it is {theirs.width} and {theirs.layers}; give both one size (--generator-width "
                f"{theirs.width}), or let it start afresh with --no-hands-over"
            )
        if after.model.sharing == "disentangled":
            raise ConfigError("sharing=disentangled hands over tables by itself; choose another, or --no-hands-over")


def starts_discriminator(before: Phase, after: Phase) -> bool:
    """Whether the discriminator is new in a phase and starts with the generator's weights."""
    is_new = before.model.discriminator is None and after.model.discriminator is not None
    return is_new and after.config.hands_over


def pretrain(config: PretrainConfig) -> Outcome | Estimate:
    """Train a pair on shards; everything it leaves is in the run folder."""
    shards = open_shards(config.data)
    device = choose_device(config.device)
    if config.compile and not can_compile(device):
        raise ConfigError("--compile needs a C++ compiler on the CPU, and there is no g++; leave it out")
    phases = plan(config, shards)
    if config.dry_run:
        return estimate_run(phases, shards, device)
    record = run_record(config, phases[-1], shards)
    checkpoint = last_checkpoint(config, record)
    start = config.start(phases[0].model)
    for phase in phases[0 if checkpoint is None else phase_of(checkpoint) :]:
        torch.manual_seed(config.seed)
        lesson = PretrainingLesson(phase, shards, device)  # raises if the shards will not do, before there is a folder
        write_record(config.output, record)
        outcome = train_phase(lesson, checkpoint, start)
        checkpoint = Path(outcome.checkpoint)
        if outcome.signal:
            break
    draw_curves(config.output)
    return outcome


def train_phase(lesson: "PretrainingLesson", checkpoint: Path | None, start: Start | None) -> Outcome:
    """Train for one phase, from a checkpoint of it or of the phase before; from `start` where there is none yet."""
    phase, config = lesson.phase, lesson.phase.config
    trainer = Trainer(lesson, config, phase.stage, config.output, config.seed, end=phase.end)
    if checkpoint is None:
        begin(trainer, lesson.model, config.branch_from, start)
    elif phase.begins_stage and phase_of(checkpoint) < phase.number:
        take_over(lesson.model, checkpoint, config.hands_over)
        trainer.follow(checkpoint)
    else:
        trainer.resume(checkpoint)
    if config.init is not None:
        lesson.keeps_segments |= has_own_segments(lesson.model)
    return trainer.train()


def begin(trainer: Trainer, model: Electra, trunk: Path | None, start: Start | None) -> None:
    """Give the first phase the weights it is to begin with, where they are not new."""
    if trunk is not None:
        trainer.branch(model_folder(trunk))
    elif start is not None:
        start.put_into(model)


def phase_of(checkpoint: Path) -> int:
    """The number of the phase that a checkpoint is of."""
    return read_json(checkpoint / STATE)["lesson"].get("phase", 0)


def take_over(model: Electra, checkpoint: Path, hands_over: bool) -> None:
    """Give a model the weights of the phase before, and a discriminator that was not there those of the generator."""
    before, weights = model_config(checkpoint), read_tensors(checkpoint / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_other_head = name.startswith(HEAD) and before.head != model.config.head
            if name in weights and not is_other_head:
                parameter.copy_(weights[name])
    if hands_over and before.discriminator is None and model.discriminator is not None:
        model.discriminator.encoder.load_state_dict(model.the_generator().encoder.state_dict())


def last_checkpoint(config: PretrainConfig, record: dict[str, Any]) -> Path | None:
    """The checkpoint to resume from, where there is one; refuses to mix two runs."""
    run = config.output
    if (run / CONFIG).exists():
        if not config.resume:
            raise ConfigError(f"{run} holds a run already; go on with it by --resume, or choose another --output")
        refuse_other_settings(read_json(run / CONFIG), record, run)
        remove_drafts(run)
    elif is_used(run):
        raise DataError(f"{run} is not empty and holds no run; choose another --output")
    found = checkpoint_folders(run)
    return found[-1] if found else None


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Make the run folder, unless it is there."""
    run.mkdir(parents=True, exist_ok=True)
    if not (run / CONFIG).exists():
        write_json(run / CONFIG, record)


def run_record(config: PretrainConfig, last: Phase, shards: Shards) -> dict[str, Any]:
    """What config.json keeps of a run; its model is that of the last phase."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    record = {
        "model": asdict(last.model),
        "pair": asdict(last.pair),
        "pretraining": settings,
        "data": {"tokens": shards.index.totals("tokens"), "tokenizer": shards.tokenizer.fingerprint},
        "command": shlex.join(sys.argv),
        "environment": environment(),
    }
    return json.loads(json.dumps(record, default=str))


def recorded_pair(run: Path) -> ElectraConfig:
    """The pair that the phases of a run have parts of; runs from before there were phases have all of it."""
    record = read_json(run / CONFIG)
    return ElectraConfig.from_dict(record.get("pair", record.get("model")))


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], run: Path) -> None:
    """Refuse to resume a run with settings, or data, that would change its weights."""
    if "pretraining" not in old:
        raise ConfigError(f"{run} holds a model, not a run; choose another --output")
    unsaid = {field.name: field.default for field in fields(PretrainConfig)}  # by runs from before it could be said
    before, after = json.loads(json.dumps(unsaid, default=str)) | facts(old), facts(new)
    differing = [name for name in after if name not in PretrainConfig.FREE and before.get(name) != after[name]]
    if differing:
        told = "; ".join(f"{name} was {before.get(name)} and is now {after[name]}" for name in differing)
        raise ConfigError(
            f"{run} was begun with other settings: {told}; resume with the same, or choose another --output"
        )


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """What a run is known by: its settings, and in words its data."""
    data, model = record["data"], record["model"]
    entries = (model["generator"] or model["discriminator"])["vocabulary"]
    text = "{train:,} tokens with {validation:,} held out".format(**data["tokens"])
    tokenizer = f"one of {entries:,} entries ({data['tokenizer'][:8]})"
    return record["pretraining"] | {"the text in --data": text, "the tokenizer of --data": tokenizer}


class PretrainingLesson:
    """What the trainer is given: the pair, its batches, its objective, its measures."""

    def __init__(self, phase: Phase, shards: Shards, device: torch.device) -> None:
        self.phase, self.shards, self.device = phase, shards, device
        self.config = config = phase.config
        self.model = Electra(phase.model).to(device)
        for module in self.model.modules():
            if isinstance(module, Encoder):
                module.recomputes_layers = config.recompute
        self.precision = choose_precision(config.precision, device)
        self.objective = OBJECTIVES[config.objective]
        self.batches = Batches(shards, batches_config(config), device=device)
        self.stream: Iterator[Batch] | None = None
        self.held_out = list(held_out_batches(config, shards, device))
        self.unigram = unigram(shards, device)
        self.settings = settings_of(config, shards.tokenizer.vocabulary, self.unigram)
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
        return self.batches.state() | {"phase": self.phase.number}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("phase", 0) != self.phase.number:  # rows may be of another length: a new epoch
            state = asdict(Position(step=state["step"], epoch=state["epoch"] + 1)) | self.batches.order()
        self.batches.restore(state)


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
        recomputes=config.recompute,
        tokens_in_data=shards.index.totals("tokens")["train"],
        device=device,
        precision=choose_precision(config.precision, device),
    )
