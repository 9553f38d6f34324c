"""The settings of a pre-training run, and those that it takes from its recipe and from other runs."""

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from electra.config import convert_values, flat_defaults, settings_by_name
from electra.data.packing import ROW_ORDER, LoaderConfig, Packing
from electra.errors import ConfigError, DataError, check_range
from electra.model.config import OVERRIDES, ElectraConfig, EncoderConfig, ModelConfig, Size, size_name_for_encoder
from electra.objectives.config import MaskingConfig, ObjectiveConfig, ObjectiveName
from electra.pretraining.recipes import recipe_phases, recipe_settings, split_phase
from electra.runfolder import CHECKPOINTS, CONFIG, checkpoint_folders, convert_stored, read_json
from electra.training.config import Budget, Device, HardwareConfig, OptimizerConfig, TrainerConfig

Recipe = Literal["faithful", "fast"]

BUDGETS = ("steps", "tokens", "minutes")

COMMAND_SETTINGS = ("output", "resume", "dry_run", "json", "start_file")  # not of the run: a resumed one has its own
CHANGEABLE_ON_RESUME = {  # settings that may differ when a run is resumed: they do not affect the weights
    *("data", *COMMAND_SETTINGS),
    *("device", "compile", "kernels", "activation_checkpointing", "data_on_gpu", "micro_batches", "shard_weights"),
    *("log_every", "evaluate_every", "save_every", "keep_checkpoints", "max_nonfinite_steps", "evaluation_rows"),
    *("corrupted_rows", "tensorboard", "track"),
}


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial weights."""

    model: Annotated[Path | None, Parameter(name="--init")] = None
    """Start from the weights of this model: a run, a model folder (written by electra), a Hugging Face folder of
    ELECTRA, BERT or ModernBERT, or `packaged`, the small English model in the package. It sets the size (and of a
    run, the sharing); --data needs its tokenizer (electra shard --tokenizer); missing heads are new."""
    generator: Annotated[Literal["fresh"] | Path | None, Parameter(name="--init-generator")] = None
    """With --init: folder of the generator, or fresh for new weights; by default the generator in --init if it has one.
    With --phases that start with mlm, give the same masked language model to both."""
    branch_from: Path | None = None
    """Continue from a checkpoint of another run, including its optimizer state, with a new budget and schedule. Other
    settings of model, objective, masking, optimizer and rows are by default that run's; another --length, --packing or
    --seed starts a new epoch. --schedule decay anneals a wsd run this way."""
    discriminator_from_generator: Annotated[bool, Parameter(name="--init-discriminator-from-generator")] = True
    """With --phases: a discriminator that the previous phase lacks is initialised from the generator, which must have
    the same size."""
    unigram_output_bias: bool = False
    """Initialise the output bias of token predictions with the log unigram frequencies of the text."""
    cooccurrence_embeddings: bool = False
    """Initialise token embeddings from counts of neighbouring tokens in the text (eigenvectors of their PPMI matrix)
    instead of noise."""
    sinusoidal_positions: bool = False
    """Initialise position embeddings with sinusoids instead of noise; they are trained like the others."""

    def __post_init__(self) -> None:
        if self.model is not None and self.branch_from is not None:
            raise ConfigError("--init and --branch-from both set the initial weights; give one (--init: weights only)")
        if self.generator is not None and self.model is None:
            raise ConfigError(f"--init-generator {self.generator} needs --init: the folder of the discriminator")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """How long to train; the schedule spans the budget."""

    steps: int | None = None
    """Budget in steps."""
    tokens: int | None = None
    """Budget in tokens, including padding."""
    minutes: float | None = None
    """Budget in minutes of training; compilation, evaluation and checkpoints do not count."""

    def __post_init__(self) -> None:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ConfigError(f"give one of --steps, --tokens and --minutes, not {' and '.join(budgets) or 'none'}")
        check_range(self, *BUDGETS, above=0)

    def phase_budget(self, begin_fraction: float, end_fraction: float, loader: LoaderConfig) -> Budget:
        """The trainer's budget from one fraction of this budget to another, for batches of `loader`."""
        if self.minutes is not None:
            return Budget(seconds=60 * self.minutes * (end_fraction - begin_fraction))
        if self.tokens is not None:
            return Budget(
                steps=math.ceil(self.tokens * (end_fraction - begin_fraction) / (loader.batch_size * loader.length))
            )
        assert self.steps is not None
        return Budget(steps=max(1, round(self.steps * end_fraction) - round(self.steps * begin_fraction)))


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Pre-train a generator and a discriminator on shards of tokens.

    An interrupted run is continued with --output and --resume and ends with the same weights.

    Many defaults depend on --size and --recipe: --help shows those of the size and recipe that are given beside it."""

    ESSENTIALS: ClassVar = ("data", "output", "size", "minutes", "steps", "resume", "dry_run", "device")

    data: Path
    """Folder of shards, written by electra shard."""
    output: Path
    """Run folder: settings, metrics, curves, samples and checkpoints."""
    recipe: Recipe = "fast"
    """Defaults of many settings. faithful: the released ELECTRA code; fast: the best known for short runs."""
    phases: tuple[str, ...] = ()
    """Train in phases, each with some settings of its own, for instance `fraction=0.9 fraction=0.1,length=512`, or for
    two-stage training `objective=mlm objective=frozen-rtd`. Settings of a phase: fraction (of the budget), objective,
    width, layers, length, batch-size, micro-batches, learning-rate, schedule, warmup, decay-fraction, mask-fraction,
    temperature, packing, dropout, generator-dropout. With a width, the discriminator is narrower at first (fewer heads,
    narrower feed-forward layers) and is widened by the next phase without changing its outputs. With layers, it has
    fewer at first, which the next phase repeats. Consecutive phases of one objective, width and number of layers share
    a schedule and optimizer; others start new ones."""
    seed: int = 0
    """Seed of weights, row order, masks, samples and dropout."""
    evaluation_rows: int = 512
    """Number of held-out rows to evaluate on."""
    corrupted_rows: Path | None = None
    """Also evaluate the discriminator on these held-out rows, written by electra corrupt: fixed_rtd_loss and
    fixed_rtd_auc compare runs whose generators, masks or objectives differ."""
    shard_weights: bool = False
    """Divide weights, gradients and optimizer states over the ranks of torchrun (FSDP2), for models that do not fit on
    one GPU; needs --optimizer adamw, and steps are not compiled."""
    resume: bool = False
    """Continue from the last checkpoint in --output with the settings of that run; start the run if there is none."""
    dry_run: bool = False
    """Only print a summary and estimates of parameters, FLOPs, tokens, time and memory."""
    json: bool = False
    """Print the result as JSON."""
    model: ModelConfig
    objective: ObjectiveConfig
    masking: MaskingConfig
    loader: LoaderConfig
    budget: BudgetConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    init: InitConfig
    hardware: HardwareConfig

    def __post_init__(self) -> None:
        check_range(self, "seed", at_least=0, at_most=2**62)
        check_range(self, "evaluation_rows", at_least=1)
        rows, count = self.loader.batch_size, self.trainer.micro_batches
        if rows % count:
            divisors = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
            raise ConfigError(f"is {count}; it must divide the batch of {rows} rows: {divisors}", field="micro_batches")
        if self.shard_weights and self.optimizer.name != "adamw":
            raise ConfigError(f"--shard-weights needs --optimizer adamw, not {self.optimizer.name}")
        if self.shard_weights and self.hardware.compile == "on":
            raise ConfigError("give --shard-weights or --compile on, not both")
        if self.init.sinusoidal_positions and self.model.style == "modern":
            raise ConfigError("sinusoidal_positions needs position embeddings, which --style modern does not have")

    @classmethod
    def dependent_defaults(cls, explicit_values: dict[str, Any]) -> dict[str, Any]:
        """The defaults of other settings: those of a resumed run or trunk, an --init model, and the recipe."""
        stored = read_resumed_settings(explicit_values) or read_trunk_settings(explicit_values)
        initial = read_init_model_settings(stored | explicit_values)
        known = flat_defaults(cls) | initial | stored | explicit_values
        base = {name: known[name] for name in ("recipe", "size", "style")}
        recipe = recipe_settings(**base)
        recipe["phases"] = recipe_phases(recipe.get("phases", ()), explicit_values)
        defaults = recipe | initial | base | stored
        return defaults | dict.fromkeys(BUDGETS) if explicit_values.keys() & set(BUDGETS) else defaults

    def starts_from_weights(self) -> bool:
        """Whether the initial weights are those of a checkpoint or of another model."""
        return self.resumes_checkpoint() or self.init.model is not None or self.init.branch_from is not None

    def resumes_checkpoint(self) -> bool:
        """Whether this run is resumed from a checkpoint."""
        return self.resume and bool(checkpoint_folders(self.output))


@dataclass(frozen=True, kw_only=True)
class CorruptConfig:
    """Mask 15 % of the tokens of held-out rows, replace them by samples of a model's generator, and write the samples.

    electra pretrain --corrupted-rows FILE evaluates its discriminator on these rows: the same ones for every run,
    whatever its generator, masks and objective. The file holds no text, only the replaced tokens: it belongs to the
    shards it was made with."""

    model: Path
    """A run or model folder with a well-trained generator."""
    data: Path
    """Folder of shards; the rows come from its validation split."""
    output: Path
    """File to write (safetensors)."""
    rows: int = 8192
    """Number of rows; fewer if the validation split is smaller."""
    length: int | None = None
    """Tokens per row (default: as many as the model was trained on, at most 128)."""
    packing: Literal["packed", "examples"] = "packed"
    """Form of the rows, as in electra pretrain: compare runs on rows of the form that they were trained on."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "rows", at_least=1)
        if self.output.exists():
            raise ConfigError(f"{self.output} exists already; rows that runs are compared on are not overwritten")


def read_resumed_settings(explicit_values: dict[str, Any]) -> dict[str, Any]:
    """The settings stored in the run to resume; empty if none is."""
    if "output" not in explicit_values:
        return {}
    run = Path(explicit_values["output"])
    has_run = (run / CONFIG).exists()
    is_resumed = bool(explicit_values.get("resume"))
    if "data" not in explicit_values and is_resumed != has_run:
        hint = "continue it with --resume" if has_run else "start one with --data, or check --output"
        raise ConfigError(f"{run} holds {'a' if has_run else 'no'} run; {hint}")
    if not is_resumed or not has_run:
        return {}
    stored = read_run_record(run).pretraining
    return {name: value for name, value in stored.items() if name not in COMMAND_SETTINGS}


def read_init_model_settings(explicit_values: dict[str, Any]) -> dict[str, Any]:
    """Size and style of the --init model, and the sharing of a pair; empty if it cannot be read: the run reports it."""
    if not explicit_values.get("init"):
        return {}
    from electra.huggingface.convert import read_encoder_configs  # here, because they import torch
    from electra.model.storage import read_model_config
    from electra.training.checkpoint import find_model_folder

    with suppress(DataError):
        folder = find_model_folder(Path(explicit_values["init"]))
        encoders = read_encoder_configs(folder)
        encoder = main_encoder_config(encoders)
        settings: dict[str, Any] = {"size": size_name_for_encoder(encoder), "style": encoder.style}
        if len(encoders) == 2 and "init_generator" not in explicit_values:
            settings["sharing"] = read_model_config(folder).sharing
        generator = explicit_values.get("init_generator")
        if generator != "fresh" and (generator is not None or len(encoders) == 2):
            settings |= {"generator_width": None, "generator_layers": None}  # not the recipe's: it has its own
        return settings
    return {}


def inherited_settings() -> list[str]:
    """The settings that a branch takes from its trunk's config.json; its schedule is a new one."""
    configs = (OptimizerConfig, MaskingConfig, ObjectiveConfig)
    names = ["recipe", "dropout", "generator_dropout", "batch_size", "cross_document_attention"]
    names += [name for each in configs for name in settings_by_name(each)]
    return [name for name in names if name not in ("schedule", "warmup", "decay_fraction", "objective")]


def read_trunk_settings(explicit_values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a branch takes from its trunk."""
    if not explicit_values.get("branch_from"):
        return {}
    from electra.model.storage import read_model_config
    from electra.training.checkpoint import STATE, find_model_folder

    trunk = Path(explicit_values["branch_from"])
    checkpoint = find_model_folder(trunk)
    if (checkpoint / CONFIG).exists() and not (checkpoint / STATE).exists():
        raise DataError(f"{trunk} holds a model without training state; start from its weights with --init {trunk}")
    pair = read_model_config(checkpoint)
    stored = read_phase_settings(checkpoint)
    task_state = asdict(read_pretraining_state(checkpoint))
    settings = {name: stored[name] for name in inherited_settings() if name in stored}
    settings |= {name: task_state[name] for name in ("objective", *ROW_ORDER)}
    size = stored.get("size", size_name_for_encoder(main_encoder_config(pair.encoder_configs())))
    has_other_size = explicit_values.get("size", size) != size  # an error later, which overrides must not hide
    return settings if has_other_size else settings | model_config_settings(pair, size)


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The data of a run."""

    tokens: dict[str, int]  # by split
    tokenizer: str  # its fingerprint


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run's config.json."""

    model: ElectraConfig  # of the last phase
    pretraining: dict[str, Any]  # flat settings
    data: DataRecord
    command: str
    environment: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pretraining", convert_values(PretrainConfig, self.pretraining))


def read_run_record(run: Path) -> RunRecord:
    """What a run was started with; raises a DataError if `run` is no run, or if its config.json was changed."""
    stored = read_json(run / CONFIG)
    if "pretraining" not in stored:
        raise DataError(f"{run} holds no run of electra pretrain")
    return convert_stored(stored, RunRecord, run / CONFIG)


def read_run_settings(checkpoint: Path) -> dict[str, Any]:
    """The flat settings of the run that a checkpoint is in; empty if it was moved out of its run."""
    run = checkpoint.parent.parent
    is_inside = checkpoint.parent.name == CHECKPOINTS and (run / CONFIG).exists()
    return read_run_record(run).pretraining if is_inside else {}


def read_phase_settings(checkpoint: Path) -> dict[str, Any]:
    """The flat settings of the phase in which a checkpoint was saved; empty if it was moved out of its run."""
    settings = read_run_settings(checkpoint)
    if not settings.get("phases"):
        return settings
    values = split_phase(settings["phases"][read_pretraining_state(checkpoint).phase])
    values.pop("fraction", None)
    return settings | convert_values(PretrainConfig, values)


@dataclass(frozen=True, kw_only=True)
class PretrainingState:
    """The state of a pre-training in a checkpoint: the phase, the next batch, and the row order it refers to."""

    phase: int
    objective: ObjectiveName
    step: int
    epoch: int
    row: int
    seed: int
    length: int
    packing: Packing

    def __post_init__(self) -> None:
        check_range(self, "phase", "step", "epoch", "row", "seed", at_least=0, at_most=2**62)


def read_pretraining_state(checkpoint: Path) -> PretrainingState:
    from electra.training.checkpoint import STATE, read_training_state  # here, because it imports torch

    return convert_stored(read_training_state(checkpoint).task, PretrainingState, checkpoint / STATE)


def model_config_settings(pair: ElectraConfig, size: Size) -> dict[str, Any]:
    """The settings of ModelConfig that describe a pair: a size, and overrides of it."""
    encoder = main_encoder_config(pair.encoder_configs())
    settings: dict[str, Any] = {"size": size, "style": encoder.style}
    default = main_encoder_config(ModelConfig(**settings).electra_config().encoder_configs())
    for name in OVERRIDES:
        if getattr(encoder, name) != getattr(default, name):
            settings[name] = getattr(encoder, name)
    if pair.generator:
        settings |= {"generator_width": pair.generator.width, "generator_layers": pair.generator.layers}
    if pair.generator and pair.discriminator:
        settings["sharing"] = pair.sharing
    return settings


def main_encoder_config(configs: dict[str, EncoderConfig]) -> EncoderConfig:
    """The encoder that a model is used for: the discriminator's, or that of a lone generator."""
    return configs["discriminator"] if "discriminator" in configs else configs["generator"]
