"""What a run is: its settings, and the phases that they make."""

import math
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from electra.data.loader import LoaderConfig
from electra.data.shards import Shards
from electra.errors import ConfigError
from electra.model.config import ElectraConfig, Head, check_length, get_size
from electra.model.flops import training_flops
from electra.model.storage import CONFIG, read_model_config
from electra.objectives.masking import slots
from electra.objectives.objectives import OBJECTIVES, ObjectiveConfig, ObjectiveName
from electra.pretraining.branch import refuse_other_trunk, trunk_settings
from electra.pretraining.initialize import FRESH, InitialConfig, Start, initial_settings, read_start, require_tokenizers
from electra.pretraining.phases import read_phases
from electra.pretraining.recipes import Recipe, settings_for
from electra.runfolder import read_json
from electra.training.checkpoint import checkpoint_folders
from electra.training.hardware import Device, Precision
from electra.training.trainer import Budget, TrainerConfig

GeneratorKind = Literal["model", "uniform", "unigram"]
BUDGETS = ("steps", "tokens", "minutes")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainerConfig, ObjectiveConfig, LoaderConfig, InitialConfig):
    """Pre-train a generator and a discriminator on shards of tokens, from nothing to a checkpoint that can be exported.

    The machine may die at any moment: --output and --resume go on with the run, and end with the same weights.

    Many defaults depend on --size and --recipe: shown are those of the size and recipe below.
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
    every token, or copies it; mlm: a masked language model of its size (BERT, whose masks are --mask-token-probability .8
    --random-token-probability .1); adversarial: the generator is paid what its fills cost the discriminator; frozen-rtd: the
    generator no longer learns (stage two of two-stage training)."""
    generator_kind: Annotated[GeneratorKind, Parameter(name="--generator")] = "model"
    """What fills blanks: the generator, or without one tokens drawn alike (uniform) or by frequency (unigram), which is
    too easy to find to learn much from."""
    phases: tuple[str, ...] = ()
    """Train in phases, each with settings of its own: `share=0.9 share=0.1,length=512`, or for two-stage training
    `objective=mlm objective=frozen-rtd`. A phase may have share (of the budget), objective, length, batch-size,
    micro-batches, learning-rate, mask-fraction and temperature. The learning rate has one schedule over neighbouring
    phases of one objective; where the objective changes, schedule and optimizer start afresh."""
    init_discriminator_from_generator: bool = True
    """With phases: a discriminator that was not there before starts with the generator's weights; both need one size.
    Without, it starts afresh, and may then fail to learn."""
    unigram_output_bias: bool = False
    """Give the generator's output the frequencies of tokens to start from, which it learns first anyway: the
    discriminator then has real work from the first step."""
    sinusoidal_positions: bool = False
    """Start the position table as waves of many lengths instead of noise: what stands beside a token is then a simple
    turn away, and context is learnt from sooner. It is trained like any table."""
    steps: int | None = None
    """Budget in steps; the schedule follows the budget."""
    tokens: int | None = None
    """Budget in tokens."""
    minutes: float | None = None
    """Budget in minutes of training; compiling, measuring and saving do not count."""
    resume: bool = False
    """Go on from the last checkpoint in --output, with the settings that the run was begun with; from the start if
    there is none yet."""
    branch_from: Path | None = None
    """Go on from a checkpoint of another run, or from a run's last one; the budget counts from there. Recipe, model,
    objective, optimizer and order of rows are that run's. With --schedule decay it ends a wsd trunk that itself may
    train on."""
    plain: bool = False
    """On a GPU: start at once, and go on more slowly. Otherwise the first steps take a minute: they are compiled
    (torch.compile) and recorded (CUDA graphs)."""
    compile: bool = False
    """Compile where it is not done anyway, on a CPU or with --plain: that takes a minute, and gains little on a CPU."""
    activation_checkpointing: bool = False
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
        *(
            "data",
            "output",
            "resume",
            "json",
            "dry_run",
            "device",
            "plain",
            "compile",
            "activation_checkpointing",
            "micro_batches",
        ),
        *("data_on_gpu", "log_every", "evaluate_every", "save_every", "keep", "max_nonfinite_steps", "evaluation_rows"),
    }

    def __post_init__(self) -> None:
        if self.init is not None and self.branch_from is not None:
            raise ConfigError("--init and --branch-from both say where to start: --init takes weights only; give one")
        for part in (TrainerConfig, ObjectiveConfig, LoaderConfig, InitialConfig):
            part.__post_init__(self)
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one budget, --steps, --tokens or --minutes; {' and '.join(given) or 'none'} came")
        if getattr(self, given[0]) <= 0:
            raise ConfigError(f"{given[0]} is {getattr(self, given[0])}; a run needs a budget above 0")
        if self.evaluation_rows < 1:
            raise ConfigError(f"evaluation_rows is {self.evaluation_rows}; it must be at least 1")
        if self.batch_size % self.micro_batches:
            raise ConfigError(f"{self.batch_size} rows do not divide into {self.micro_batches} micro-batches")
        if self.sinusoidal_positions and self.style == "modern":
            raise ConfigError(
                "sinusoidal_positions fills the position table, and the modern style has none; leave it out"
            )
        read_phases(self.phases)

    @classmethod
    def preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The defaults: the settings of the run that is resumed or branched from, and those of the recipe, size and
        style among the flags that were given; a budget among them replaces theirs."""
        stored = stored_settings(given) or trunk_settings(given)
        known = stored | given
        start = initial_settings(known)
        known = start | known
        chosen = {name: known.get(name, getattr(cls, name)) for name in ("recipe", "size", "style")}
        settings = settings_for(**chosen) | start | chosen | stored
        budgets = {name: settings.get(name) or 1 for name in BUDGETS if name in given}  # flags put their numbers in
        return settings | dict.fromkeys(BUDGETS if budgets else ()) | budgets

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

    def start(self, model: ElectraConfig) -> Start | None:
        """The weights that the first phase's model begins with; None where they are new, or a checkpoint has them."""
        return None if self.init is None or self.has_begun() else read_start(self, model)

    def pair(self, shards: Shards) -> ElectraConfig:
        """Generator and discriminator as they are, or were, begun with."""
        if self.init is not None and self.has_begun():
            return read_model_config(self.output)  # what it was begun with need not be there any more
        if self.init is not None:
            require_tokenizers(self, shards)
        vocabulary = shards.tokenizer.vocabulary
        return self.electra_config(vocabulary.size, vocabulary.pad_id)


def stored_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that flags say to resume, but for what is a single command's; none where there is no run.

    An older run may lack some of ours, and a newer one have others.
    """
    run = Path(given.get("output") or ".")
    path = run / CONFIG
    if "data" not in given and "output" in given and given.get("resume", False) != path.exists():
        advice = "go on with it by --resume" if path.exists() else "begin one with --data, or look at --output"
        raise ConfigError(f"{run} holds {'a' if path.exists() else 'no'} run; {advice}")
    if not given.get("resume") or not path.exists():
        return {}
    record = read_json(path).get("pretraining", {})
    ours = {field.name for field in fields(PretrainConfig)} - {"output", "resume", "json", "dry_run"}
    stored = {name: value for name, value in record.items() if name in ours}
    for name in ("data", "init", "init_generator", "branch_from"):
        if stored.get(name) not in (None, FRESH):
            stored[name] = Path(stored[name])
    return stored | {"phases": tuple(stored.get("phases", ()))}


@dataclass(frozen=True)
class Phase:
    """A stretch of a run."""

    number: int
    config: PretrainConfig  # the run's, with what is different in this phase
    model: ElectraConfig
    budget: Budget
    stage: Budget  # of all neighbouring phases of one objective: one schedule and one optimizer
    end: Budget  # where in the stage this phase ends
    begins_stage: bool

    def row_flops(self) -> int:
        """Operations of a training step for each of its rows."""
        config = self.config
        is_frozen = OBJECTIVES[config.objective].is_frozen
        return training_flops(self.model, config.length, slots(config.length, config), is_frozen)


def whole_model(phases: list[Phase]) -> ElectraConfig:
    """What a run ends as: later phases leave no part behind that was trained."""
    return phases[-1].model


def plan(config: PretrainConfig, shards: Shards) -> list[Phase]:
    """The phases of a run; settings that contradict each other are refused."""
    refuse_contradictions(
        config, [each.settings.get("objective", config.objective) for each in read_phases(config.phases)]
    )
    phases = phases_of(config, config.pair(shards))
    refuse_hand_over(phases)
    if config.branch_from is not None and not config.has_begun():
        refuse_other_trunk(config.branch_from, phases[0].model, config.optimizer, shards)
    return phases


def phases_of(config: PretrainConfig, pair: ElectraConfig) -> list[Phase]:
    """The phases in which parts of a pair are trained."""
    departures = read_phases(config.phases)
    configs = [replace(config, phases=(), **departure.settings) for departure in departures]
    models = models_of(configs, pair)
    budgets = [one.budget(each.begin, each.end) for one, each in zip(configs, departures, strict=True)]
    phases: list[Phase] = []
    for _, stage in groupby(range(len(configs)), key=lambda number: configs[number].objective):
        numbers = list(stage)
        ends = list(accumulate((budgets[number] for number in numbers), Budget.plus))
        for number, end in zip(numbers, ends, strict=True):
            own = (configs[number], models[number], budgets[number])
            phases.append(Phase(number, *own, stage=ends[-1], end=end, begins_stage=number == numbers[0]))
    return phases


def models_of(configs: list[PretrainConfig], pair: ElectraConfig) -> list[ElectraConfig]:
    """The model of each phase: those parts of the pair that its objective has."""
    pair = compared(pair, [config.objective for config in configs])
    for part in filter(None, (pair.generator, pair.discriminator)):
        check_length(max(config.length for config in configs), part)
    return [model_of(pair, config.objective, config.generator_kind) for config in configs]


def compared(pair: ElectraConfig, objectives: list[ObjectiveName]) -> ElectraConfig:
    """The pair that objectives take their parts from: a masked language model by itself, BERT, is of the size that
    discriminators are compared in."""
    is_alone = pair.discriminator and not any(OBJECTIVES[objective].head for objective in objectives)
    return replace(pair, generator=pair.discriminator) if is_alone else pair


def model_of(pair: ElectraConfig, name: ObjectiveName, generator_kind: GeneratorKind = "model") -> ElectraConfig:
    """Those parts of a pair that an objective has, with the heads it needs."""
    objective = OBJECTIVES[name]
    generator = pair.generator if generator_kind == "model" else None
    discriminator = pair.discriminator if objective.head else None
    return ElectraConfig(
        generator=generator,
        discriminator=discriminator,
        sharing=pair.sharing if generator and discriminator else "none",
        head=objective.head or "rtd",
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
    if kinds[0].is_frozen and not has_trained_generator(config):
        raise ConfigError(
            f"--objective {objectives[0]} needs a generator that was trained before; train it in a phase of its own "
            f"(--phases objective=mlm objective={objectives[0]} {two_stage_flags(config)}), or give one with --init"
        )
    if any(kind.is_frozen for kind in kinds) and config.sharing != "none":
        flags = (
            "--sharing none"
            if kinds[0].head or not config.init_discriminator_from_generator
            else two_stage_flags(config)
        )
        raise ConfigError(f"--sharing {config.sharing} would move a frozen generator; add {flags}")
    if not config.has_begun():
        refuse_idle_settings(config, objectives)
        refuse_lost_parts(config, objectives)
    if config.init is not None and not config.has_begun():
        refuse_start(config, objectives)


def two_stage_flags(config: PretrainConfig) -> str:
    """What a generator needs that the discriminator is to start with, and then to be frozen."""
    return f"--sharing none --generator-width {config.width or get_size(config.size).discriminator.width}"


def refuse_idle_settings(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse settings that no phase of the run looks at."""
    is_given = config.objective != PretrainConfig.objective and config.branch_from is None  # else it is the trunk's
    if is_given and config.objective not in objectives:
        raise ConfigError(f"--objective {config.objective} is that of no phase in --phases; leave it out")
    heads = [OBJECTIVES[name].head for name in objectives]
    if not config.init_discriminator_from_generator and (heads[0] or not any(heads)):
        raise ConfigError(
            "--no-init-discriminator-from-generator is for --phases that bring in a discriminator, and none does; leave it out"
        )
    if config.branch_from is None:
        refuse_unread_settings(config, objectives, heads)
        refuse_idle_rates(config)


def refuse_idle_rates(config: PretrainConfig) -> None:
    """Refuse settings that the optimizer or the schedule does not read."""
    if config.momentum != PretrainConfig.momentum and config.optimizer != "muon":
        raise ConfigError(f"momentum is {config.momentum}, which is muon's; {config.optimizer} has beta1; leave it out")
    if config.decay != PretrainConfig.decay and config.schedule != "wsd":
        raise ConfigError(f"decay is {config.decay}, which is for --schedule wsd, not {config.schedule}; leave it out")
    if config.schedule == "decay" and config.init is None:
        raise ConfigError("--schedule decay ends what was trained before; give it with --branch-from or --init")


def refuse_unread_settings(config: PretrainConfig, objectives: list[ObjectiveName], heads: list[Head | None]) -> None:
    """Refuse settings that no objective of the run reads."""
    unread = []
    if not any(heads):
        unread += ["generator_width", "generator_layers", "temperature", "disallow_correct"]
        unread += ["sharing"] if config.init is None else []  # else it may be the folder's
    if "rtd" not in heads:
        unread += ["discriminator_weight", "correct_sample_label"]
    for setting in unread:
        if (came := getattr(config, setting)) not in (getattr(PretrainConfig, setting), "none"):
            told = " and ".join(dict.fromkeys(objectives))
            raise ConfigError(f"{setting} is {came}, which {told} does not look at; leave it out")
    if config.disallow_correct and config.correct_sample_label == "replaced":
        raise ConfigError(
            "--disallow-correct leaves no right guesses to count as replaced; leave out --correct-sample-label"
        )


def refuse_lost_parts(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse phases without a step, and those that leave behind what was trained."""
    for phase in read_phases(config.phases):
        share = phase.end - phase.begin
        if config.steps is not None and config.steps * share < 1 - 1e-9:
            raise ConfigError(f"a share of {share:g} of {config.steps} steps is less than one step; give it more")
    for before, after in pairwise(objectives):
        if OBJECTIVES[before].head and not OBJECTIVES[after].head:
            raise ConfigError(
                f"--phases: {after} after {before} would leave the discriminator behind, which it does not train; "
                f"put it first"
            )


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


def has_trained_generator(config: PretrainConfig) -> bool:
    """Whether a run starts with a generator that has learnt before."""
    if config.init is None:
        return config.branch_from is not None
    return config.has_begun() or config.generator_source() is not None


def refuse_generators_settings(config: PretrainConfig, objectives: list[ObjectiveName]) -> None:
    """Refuse what makes no sense where tokens are drawn without a generator."""
    for name in objectives:
        if OBJECTIVES[name].needs_generator:
            able = ", ".join(other for other, kind in OBJECTIVES.items() if not kind.needs_generator)
            raise ConfigError(
                f"--objective {name} needs a generator, and --generator {config.generator_kind} is none; "
                f"choose another objective ({able}) or --generator model"
            )
    for phase in read_phases(config.phases):
        if (came := phase.settings.get("temperature", config.temperature)) != config.temperature:
            raise ConfigError(
                f"temperature={came} in --phases is for a generator, and --generator {config.generator_kind} is none"
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
                f"{theirs.width}), or let it start afresh with --no-init-discriminator-from-generator"
            )
        if after.model.sharing == "disentangled":
            raise ConfigError(
                "sharing=disentangled hands over tables by itself; choose another, or --no-init-discriminator-from-generator"
            )


def starts_discriminator(before: Phase, after: Phase) -> bool:
    """Whether the discriminator is new in a phase and starts with the generator's weights."""
    is_new = before.model.discriminator is None and after.model.discriminator is not None
    return is_new and after.config.init_discriminator_from_generator
