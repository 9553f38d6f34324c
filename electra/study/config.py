"""The settings of `electra study`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from electra.config import Positional
from electra.errors import ConfigError, check_range
from electra.finetuning.config import Glue6Task
from electra.pretraining.config import BudgetConfig
from electra.training.config import Device

StudyName = Literal[
    "objectives", "generator-size", "algorithms", "sharing", "compute", "mask-fraction", "sizes", "styles"
]


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Repeat one of the paper's studies: pre-train with each of its settings, measure all runs in the same way, and
    write a table, a figure and a paragraph on which of the paper's orderings hold.

    electra study objectives --data shards/ --glue glue/ --minutes 3 --seeds 2 --output study/

    Runs are those of electra pretrain, in the folder runs of --output, named by their settings: several studies with
    one --output share them. An interrupted command continues when it is repeated; finished runs and fine-tunings are
    not repeated."""

    ESSENTIALS: ClassVar = ("name", "data", "glue", "output", "minutes", "steps", "seeds", "dry_run", "parallel")

    name: Positional[StudyName]
    """objectives: ELECTRA, All-Tokens MLM, Replace MLM, ELECTRA 15 % and BERT; generator-size; algorithms: joint,
    two-stage and adversarial training; sharing: of weights; compute: ELECTRA and BERT over budgets and sizes;
    mask-fraction; sizes: tiny, small and base with equal budgets; styles: classic and modern encoders."""
    data: Path
    """Folder of shards, written by electra shard."""
    output: Path
    """Folder for the runs, their measures, and a folder of tables and figures for each study."""
    glue: str | None = None
    """The folder of GLUE's official download, or hub:glue: all encoders are compared by electra probe. Without it, only
    by losses on held-out text."""
    budget: BudgetConfig
    seeds: int = 1
    """Number of pre-training runs with each setting, with seeds 0, 1, …"""
    pretraining: tuple[str, ...] = ()
    """Settings of electra pretrain for all runs, as KEY=VALUE: size=tiny data_on_gpu=true."""
    finetuning: tuple[str, ...] = ()
    """Settings of electra finetune for all fine-tunings of the probe, as KEY=VALUE: epochs=1."""
    tasks: tuple[Glue6Task, ...] = get_args(Glue6Task)
    """Tasks of the probe."""
    finetuning_seeds: int = 1
    """Number of fine-tuning seeds of the probe."""
    probe_rows: int | None = None
    """Use at most this many rows of each task, for a trial."""
    corrupted_rows: Path | None = None
    """File of electra corrupt, on which all discriminators are evaluated; default: made with the generator of the
    first run in --output."""
    parallel: bool = False
    """Use all GPUs, one run on each; their messages are in the folder logs of --output."""
    summarize: bool = False
    """Train nothing: tables and figures of what is finished."""
    dry_run: bool = False
    """Only print the number of runs, and estimates of their minutes and tokens."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "seeds", "finetuning_seeds", at_least=1)
        check_range(self, "probe_rows", at_least=20)
        for name in ("pretraining", "finetuning"):
            for word in getattr(self, name):
                if "=" not in word:
                    raise ConfigError(f"has {word!r}; write KEY=VALUE", field=name)
