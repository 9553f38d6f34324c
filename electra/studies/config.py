"""The settings of `electra study` and `electra analyze`, and what their output folders record of them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from electra.config import Positional, parse_key_values
from electra.errors import ConfigError, DataError, check_range
from electra.finetuning.config import Glue6Task, TuningConfig
from electra.pretraining.config import BudgetConfig, PretrainConfig
from electra.runfolder import CONFIG, check_same_settings, is_missing_or_empty, read_json, read_stored, write_stored
from electra.training.config import Device

StudyName = Literal[
    "objectives", "generator-size", "algorithms", "sharing", "compute", "mask-fraction", "sizes", "styles", "compare"
]


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Repeat one of the paper's studies, or compare settings of your own: pre-train with each setting, measure all runs
    in the same way, and write a table, a figure and a paragraph on which differences, and which of the paper's
    orderings, are larger than the noise.

    electra study objectives --data shards/ --glue glue/ --minutes 3 --seeds 2 --output study/

    electra study compare --settings default decay weight_decay=0.3 --data shards/ --minutes 3 --output study/

    Runs are those of electra pretrain, in the folder runs of --output, named by their settings: several studies with
    one --output share them. An interrupted command continues when it is repeated; finished runs and fine-tuning
    runs are not repeated."""

    ESSENTIALS: ClassVar = (
        "name",
        "settings",
        "data",
        "glue",
        "output",
        "minutes",
        "steps",
        "seeds",
        "dry_run",
        "parallel",
    )

    name: Positional[StudyName]
    """objectives: ELECTRA, All-Tokens MLM, Replace MLM, ELECTRA 15 % and BERT; generator-size; algorithms: joint,
    two-stage and adversarial training; sharing: of weights; compute: ELECTRA and BERT over budgets and sizes;
    mask-fraction; sizes: tiny, small and base with equal budgets; styles: classic and modern encoders; compare: those
    of --settings."""
    data: Path | None = None
    """Folder of shards, written by electra shard; not needed with --summarize."""
    output: Path
    """Folder for the runs, their measures, and a folder of tables and figures for each study."""
    glue: str | None = None
    """The folder of GLUE's official download, or hub:glue: all encoders are compared by electra probe. Without it,
    losses on held-out text are listed, and nothing is judged."""
    settings: tuple[str, ...] = ()
    """With compare: names of settings, each followed by KEY=VALUE for those of electra pretrain that differ from its
    defaults: default decay weight_decay=0.3 both weight_decay=0.3 mask_fraction=0.25. The others are compared with the
    first. Repeat the key for each element of a list: phases=fraction=0.9 phases=fraction=0.1,length=256."""
    budget: BudgetConfig
    seeds: int = 1
    """Number of pre-training runs with each setting, with seeds 0, 1, …"""
    pretraining: tuple[str, ...] = ()
    """Settings of electra pretrain for all runs, as KEY=VALUE: size=tiny data_on_gpu=true; not those that the study
    sets itself. Repeat the key for each element of a list, as in --settings."""
    finetuning: tuple[str, ...] = ()
    """Settings of electra finetune for all fine-tuning runs of the probe, as KEY=VALUE: epochs=1."""
    tasks: tuple[Glue6Task, ...] = get_args(Glue6Task)
    """Tasks of the probe."""
    finetuning_seeds: int = 1
    """Number of fine-tuning seeds of the probe."""
    probe_rows: int | None = None
    """Use at most this many rows of each task, for a trial."""
    corrupted_rows: Path | None = None
    """File of electra corrupt, on which all discriminators are evaluated; default: made with the first
    finished run in --output that has a generator."""
    parallel: bool = False
    """Use all GPUs, one run on each; their messages are in the folder logs of --output."""
    overlap: bool = False
    """On a GPU, start each run while the one before it is trained, so that it is compiled when its turn comes (a later
    phase with batches of another shape is compiled when it begins, while the GPU waits). It needs memory for two runs,
    and compilation takes a little of the minutes of the run that is trained; messages are in the folder logs of
    --output, and new runs are measured when all have ended."""
    summarize: bool = False
    """Train nothing: tables and figures of what is finished."""
    dry_run: bool = False
    """Check all settings and --glue, and only print the number of runs, and estimates of their minutes and tokens."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "seeds", "finetuning_seeds", at_least=1)
        check_range(self, "probe_rows", at_least=20)
        if self.corrupted_rows is not None and not self.corrupted_rows.is_file():
            raise ConfigError(
                f"is {self.corrupted_rows}, which is no file; create it with electra corrupt, or leave the flag out",
                field="corrupted_rows",
            )
        if self.data is None and not self.summarize:
            raise ConfigError("electra study needs --data, the folder of shards; only --summarize does without")
        if self.summarize and self.dry_run:
            raise ConfigError("--dry-run estimates what is left to train, --summarize trains nothing; leave one out")
        if (self.name == "compare") != bool(self.settings):
            raise ConfigError("electra study compare needs --settings, and no other study takes it")
        self.pretraining_settings()
        parse_key_values(TuningConfig, self.finetuning, "finetuning")

    def pretraining_settings(self) -> dict[str, Any]:
        """The settings of electra pretrain for all runs; raises a ConfigError for unknown names or values."""
        return parse_key_values(PretrainConfig, self.pretraining, "pretraining")


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """Show what a discriminator has learnt: a map of its token embeddings, where it finds replaced tokens by position
    and token frequency, the calibration of its probabilities, the norms of its sublayers' outputs, and with --glue the
    score of fine-tuning on few examples.

    electra analyze --model runs/x --data shards/ --glue glue/ --output analysis/

    Fine-tunings that are finished are not repeated when the command is."""

    model: Path
    """A pre-training run or a model folder (written by electra) with a discriminator. Without a generator, text is
    corrupted by token frequencies."""
    data: Path
    """Folder of shards; the text comes from its validation split."""
    output: Path
    """Folder for numbers and figures."""
    rows: int = 1024
    """Number of held-out rows; fewer if the validation split is smaller."""
    map_tokens: int = 2000
    """Number of the most frequent tokens on the map."""
    glue: str | None = None
    """The folder of GLUE's official download, or hub:glue, for the few-shot curve; only training files are read."""
    tasks: tuple[Glue6Task, ...] = ("sst2", "qnli", "mrpc")
    """Tasks of the few-shot curve."""
    examples: tuple[int, ...] = (32, 100, 320, 1000, 3200)
    """Numbers of training examples; those that a task does not have are left out."""
    seeds: int = 3
    """Number of random subsets, and seeds, for each number of examples."""
    finetuning: tuple[str, ...] = ()
    """Settings of electra finetune, as KEY=VALUE; by default few examples are repeated for at least 200 steps."""
    workers: int | None = None
    """Fine-tunings in parallel, one process each; default as in electra finetune."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "rows", "seeds", "workers", at_least=1)
        check_range(self, "map_tokens", at_least=3)
        if any(count < 1 for count in self.examples):
            raise ConfigError(f"has {min(self.examples)}; it must be at least 1", field="examples")
        parse_key_values(TuningConfig, self.finetuning, "finetuning")


@dataclass(frozen=True)
class OutputRecord:
    """The config.json of an output folder."""

    command: Literal["study", "analyze"]
    settings: dict[str, Any]  # that everything in the folder has in common

    def check(self, folder: Path) -> None:
        """Raise if a folder is not empty and was not started by this command with these settings."""
        if is_missing_or_empty(folder):
            return
        if not (folder / CONFIG).exists() or read_json(folder / CONFIG).get("command") != self.command:
            raise DataError(
                f"{folder} is not empty and not the output of electra {self.command}; choose another --output"
            )
        stored = read_stored(folder / CONFIG, OutputRecord).settings
        check_same_settings(folder, stored, self.settings, advice="use the same settings or another --output")

    def write(self, folder: Path) -> None:
        write_stored(folder / CONFIG, asdict(self))
