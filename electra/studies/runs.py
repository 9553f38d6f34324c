"""The runs of a study: those of `electra pretrain`, named by their settings, one after the other or one per GPU."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

from electra.config import build_config, flat_defaults, flat_values, replace_settings
from electra.data.shards import Shards
from electra.errors import ConfigError, TrainingError
from electra.finetuning.workers import CONTINUE, VISIBLE_DEVICES, is_stopped, visible_gpus
from electra.formatting import format_count
from electra.model.storage import read_model_config
from electra.pretraining.command import plan_and_check_phases, pretrain
from electra.pretraining.config import BUDGETS, CHANGEABLE_ON_RESUME, PretrainConfig, read_run_record
from electra.pretraining.describe import estimate_run
from electra.pretraining.phases import parse_phases, plan_phases
from electra.reporting.runs import read_progress, read_run
from electra.runfolder import check_same_settings, checkpoint_folders, dump_json, read_stored, write_file
from electra.studies.config import StudyConfig
from electra.studies.studies import SET_BY_STUDY, Study, StudySetting
from electra.training.checkpoint import find_model_folder
from electra.training.hardware import choose_device

RUNS, LOGS, MEASURES = "runs", "logs", "measures"
POLL_SECONDS = 0.2
ERROR_CODE = 2  # exit code of an error that is reported in one sentence: a second attempt would end with it, too
ROW_SETTINGS = ("length", "batch_size", "mask_fraction", "cooccurrence_embeddings")  # that recipes set by size
UNUSED_DATA = Path("shards")  # of runs that are only summarized
DEFAULTS: dict[str, Any] = {"keep_checkpoints": 1, "evaluate_every": 4000, "save_every": 4000}  # disk space and time


@dataclass(frozen=True)
class StudyRecord:
    """What a study stores of a finished run. With it and the results of the probe, the run's folder is not needed."""

    settings: dict[str, Any]  # of electra pretrain, those that affect the weights
    checkpoint: str
    device: str
    commit: str
    evaluation_rows: int
    steps: int
    tokens: int
    minutes: float
    flops: float
    metrics: dict[str, float | None]  # held out, at the end; None: not a number
    corrupted_rows: str | None = None  # checksum of the file
    fixed_rtd: dict[str, float | None] = field(default_factory=dict)  # metrics on these rows, of a discriminator


@dataclass(frozen=True)
class StudyRun:
    """One pre-training run of a study."""

    setting: StudySetting
    seed: int
    config: PretrainConfig

    @property
    def name(self) -> str:
        return self.config.output.name

    @property
    def folder(self) -> Path:
        return self.config.output

    @property
    def record_file(self) -> Path:
        return self.folder.parent.parent / MEASURES / f"{self.name}.json"

    def settings(self) -> dict[str, Any]:
        """The settings that affect the weights, as read from JSON."""
        values = {name: value for name, value in flat_values(self.config).items() if name not in CHANGEABLE_ON_RESUME}
        return json.loads(dump_json(values))

    def is_finished(self) -> bool:
        """Whether its budget is used up; raises if it was started with other settings."""
        if self.read_record() is not None:
            return True
        if not self.has_folder():
            return False
        stored = read_run_record(self.folder).pretraining
        check_same_settings(self.folder, stored, flat_values(self.config), CHANGEABLE_ON_RESUME)
        phases = plan_phases(self.config, read_model_config(self.folder))
        return read_progress(self.folder, phases).unfinished is None

    def has_folder(self) -> bool:
        """Whether the run was started, and its folder was not deleted."""
        return bool(checkpoint_folders(self.folder))

    def read_record(self) -> StudyRecord | None:
        """The stored record, if there is one, and not of another checkpoint than the folder's."""
        if not self.record_file.exists():
            return None
        record = read_stored(self.record_file, StudyRecord)
        if self.has_folder() and find_model_folder(self.folder).name != record.checkpoint:
            return None
        settings, defaults = self.settings(), json.loads(dump_json(flat_defaults(PretrainConfig)))
        before = {name: record.settings.get(name, defaults[name]) for name in settings}  # some may be newer
        advice = "use the same settings or another --output"
        check_same_settings(f"the run of {self.record_file}", before, settings, advice=advice)
        return record

    def build_record(self) -> StudyRecord:
        """The record of a finished run, without metrics on corrupted rows."""
        run, stored = read_run(self.folder, glue_table=None), read_run_record(self.folder)
        return StudyRecord(
            settings=self.settings(),
            checkpoint=find_model_folder(self.folder).name,
            device=stored.environment.get("device", ""),
            commit=stored.environment.get("commit", ""),
            evaluation_rows=stored.pretraining["evaluation_rows"],
            steps=run.steps,
            tokens=run.tokens,
            minutes=run.minutes,
            flops=run.flops,
            metrics=dict(run.final_metrics),
        )


def plan_runs(study: Study, config: StudyConfig) -> list[StudyRun]:
    """All runs of a study, the first seed of every setting first."""
    given = config.pretraining_settings()
    of_phases = [name for phase in parse_phases(given.get("phases", ())) for name in phase.settings]
    for name in [*given, *of_phases]:
        if name in {*SET_BY_STUDY, *study.own_settings()}:
            raise ConfigError(
                f"has {name}, which electra study {config.name} sets itself; leave it out", field="pretraining"
            )
    common: dict[str, Any] = DEFAULTS | given
    common |= {"data": config.data or UNUSED_DATA, "output": config.output, "device": config.device}
    return [plan_run(setting, seed, common, config) for seed in range(config.seeds) for setting in study.settings]


def plan_run(setting: StudySetting, seed: int, common: dict[str, Any], config: StudyConfig) -> StudyRun:
    """A run with the settings of `common`, over them those of `setting`."""
    budget_and_seed = scale_budget(config, setting.budget) | {"seed": seed}
    others = common | budget_and_seed
    default = build_config(PretrainConfig, **others)
    unresolved = {name: value for name, value in setting.settings.items() if not isinstance(value, Fraction)}
    if setting.rows_of is not None:
        sized = flat_values(build_config(PretrainConfig, **others | {"size": setting.rows_of}))
        unresolved |= {name: sized[name] for name in ROW_SETTINGS}
    pair = build_config(PretrainConfig, **others | unresolved).model.electra_config()
    assert pair.discriminator is not None
    assert pair.generator is not None
    values = dict(unresolved)
    if isinstance(fraction := setting.settings.get("generator_width"), Fraction):
        width = max(1, int(pair.discriminator.width * fraction))
        values |= {"generator_width": width} if width != pair.generator.width else {}
    values = drop_defaults(values, others)
    name = run_name(values, budget_and_seed, default.objective.name)
    run = build_config(PretrainConfig, **others | values | {"output": config.output / RUNS / name})
    return StudyRun(setting, seed, replace_settings(run, resume=True))


def drop_defaults(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Those of the settings `values` that change the run, so that runs with equal settings have one name."""
    run = build_config(PretrainConfig, **others | values)
    for name in list(values):
        fewer = {each: value for each, value in values.items() if each != name}
        with suppress(ConfigError):  # some settings need others
            values = fewer if build_config(PretrainConfig, **others | fewer) == run else values
    return values


def scale_budget(config: StudyConfig, fraction: Fraction) -> dict[str, Any]:
    """A fraction of the study's budget, as a setting of electra pretrain."""
    [(name, value)] = [(name, getattr(config.budget, name)) for name in BUDGETS if getattr(config.budget, name)]
    return {name: float(value * fraction) if name == "minutes" else max(1, round(value * fraction))}


def run_name(values: dict[str, Any], budget_and_seed: dict[str, Any], objective: str) -> str:
    """The folder of a run: its objectives, the settings that differ from those of all runs, budget and seed."""
    phases = parse_phases(values.get("phases", ()))
    of_phases = [str(phase.settings.get("objective", values.get("objective", objective))) for phase in phases]
    objectives = [name for name, _ in itertools.groupby(of_phases)]
    are_named = objectives == of_phases and all(phase.settings.keys() <= {"objective"} for phase in phases)
    named = {"objective", "phases"} if are_named else {"objective"}
    others = {name: value for name, value in values.items() if name not in named} | budget_and_seed
    return "_".join(
        ["+".join(objectives), *(f"{name.replace('_', '-')}-{format_value(others[name])}" for name in others)]
    )


def format_value(value: Any) -> str:
    """A value as part of a folder's name; what a name cannot hold is replaced by a checksum."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if re.fullmatch(r"[\w.,+-]+", text) else hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class StudyEstimate:
    """What a study will take; minutes and tokens of pre-training alone."""

    runs: int
    finished_runs: int
    minutes: float
    tokens: int
    finetunings: int  # of the probe, all runs together
    names: list[str]  # of the runs that are left

    def __str__(self) -> str:
        left = self.runs - self.finished_runs
        lines = [
            f"{format_count(self.runs, 'run')}, of which {self.finished_runs} finished",
            *(f"  {name}" for name in self.names),
        ]
        if left:
            lines.append(
                f"{format_count(left, 'run')} to train: about {self.minutes:.1f} minutes of training on one device, "
                f"{self.tokens:,} tokens"
            )
        return "\n".join([*lines, f"{self.finetunings} fine-tuning runs of the probe in all"])


def without_repetition(runs: list[StudyRun]) -> list[StudyRun]:
    """The runs, each once; settings of a study may be equal."""
    return list({run.name: run for run in runs}.values())


def estimate_study(runs: list[StudyRun], shards: Shards, finetunings_per_run: int) -> StudyEstimate:
    """Count runs, and estimate their minutes and tokens as `electra pretrain --dry-run` does."""
    runs = without_repetition(runs)
    left = [run for run in runs if not run.is_finished()]
    estimates = [
        estimate_run(
            run.config, plan_and_check_phases(run.config, shards), shards, choose_device(run.config.hardware.device)
        )
        for run in left
    ]
    return StudyEstimate(
        runs=len(runs),
        finished_runs=len(runs) - len(left),
        minutes=sum(run.config.budget.minutes or each.minutes for run, each in zip(left, estimates, strict=True)),
        tokens=sum(estimate.tokens for estimate in estimates),
        finetunings=len(runs) * finetunings_per_run,
        names=[run.name for run in left],
    )


def train_runs(runs: list[StudyRun], shards: Shards, config: StudyConfig) -> Iterator[tuple[StudyRun, str | None]]:
    """Train the runs that are not finished; yields each when it ends, with its error if it failed."""
    pending = [run for run in without_repetition(runs) if not run.is_finished()]
    for run in pending:
        plan_and_check_phases(run.config, shards)  # raises before anything is trained
    if choose_device(config.device).type == "cuda":
        gpus = visible_gpus() if config.parallel else visible_gpus()[:1]
        yield from train_on_gpus(pending, gpus, config.output, config.overlap)
        return
    for number, run in enumerate(pending, start=1):
        print(f"run {number} of {len(pending)}: {run.name}", file=sys.stderr, flush=True)
        error, code = None, 0
        try:
            code = getattr(pretrain(run.config), "exit_code", 0)
        except TrainingError as failure:
            error = str(failure)
        if code:
            print(f"stopped; {CONTINUE}", file=sys.stderr)
            sys.exit(code)
        yield run, error


@dataclass(frozen=True)
class RunProcess:
    """A run that is trained in a process of its own."""

    run: StudyRun
    process: "subprocess.Popen[bytes]"
    start_file: Path


def train_on_gpus(
    runs: list[StudyRun], gpus: list[str], output: Path, overlap: bool = False
) -> Iterator[tuple[StudyRun, str | None]]:
    """Train each run in a process of its own, at most one on each GPU; yields each with its error when it ends. With
    `overlap`, a second process of each GPU is ready to train when the first one ends. A process that crashed,
    perhaps by an error of the GPU, is started once more and continues from the run's last checkpoint; one that was
    stopped by a signal is not.

    One process cannot train all of them: torch compiles a function for a few models only and then runs it eagerly."""
    (output / LOGS).mkdir(exist_ok=True)
    pending, restarted = list(runs), set[str]()
    active: dict[str, list[RunProcess]] = {gpu: [] for gpu in gpus}
    with stop_processes_on_error(active), ExitStack() as logs:
        while pending or any(active.values()):
            for count in range(2 if overlap else 1):
                for gpu in [gpu for gpu in gpus if len(active[gpu]) == count][: len(pending)]:
                    run = pending.pop(0)
                    log = logs.enter_context(log_file(output, run).open("ab")) if len(gpus) > 1 or overlap else None
                    active[gpu].append(start_run(run, gpu, output, log))
            for first in [processes[0] for processes in active.values() if processes]:
                if not first.start_file.exists():
                    print(
                        f"run {runs.index(first.run) + 1} of {len(runs)}: {first.run.name}", file=sys.stderr, flush=True
                    )
                    first.start_file.touch()
            time.sleep(POLL_SECONDS)
            for processes in active.values():
                for each in list(processes):
                    if (code := each.process.poll()) is None:
                        continue
                    processes.remove(each)
                    if code in (0, ERROR_CODE) or is_stopped(code) or each.run.name in restarted:
                        yield each.run, describe_failure(each, output, code) if code else None
                    else:
                        failure = f"{each.run.name}: {describe_failure(each, output, code)}"
                        print(f"{failure}; started once more", file=sys.stderr, flush=True)
                        restarted.add(each.run.name)
                        pending.insert(0, each.run)


def describe_failure(each: RunProcess, output: Path, code: int) -> str:
    log = log_file(output, each.run)
    return f"electra pretrain ended with exit code {code}" + (f"; its messages are in {log}" if log.exists() else "")


def log_file(output: Path, run: StudyRun) -> Path:
    return output / LOGS / f"{run.name}.txt"


def start_run(run: StudyRun, gpu: str, output: Path, log: IO[bytes] | None) -> RunProcess:
    """Start `electra pretrain` on a GPU, with the settings of a run in a file; after its first step it waits for its
    start file."""
    settings, start_file = (output / LOGS / f"{run.name}.{kind}" for kind in ("json", "start"))
    start_file.unlink(missing_ok=True)  # of an interrupted study
    values = flat_values(replace_settings(run.config, start_file=start_file))
    write_file(settings, dump_json({name: value for name, value in values.items() if value is not None}))
    command = [sys.executable, "-m", "electra", "pretrain", "--config", str(settings)]
    messages = sys.stderr if log is None else log  # standard output is the study's
    environment = os.environ | {VISIBLE_DEVICES: gpu}
    return RunProcess(run, subprocess.Popen(command, env=environment, stdout=messages, stderr=messages), start_file)


@contextmanager
def stop_processes_on_error(active: dict[str, list[RunProcess]]) -> Iterator[None]:
    """After an error or a signal, let all runs save a checkpoint, and wait for them."""
    try:
        yield
    except BaseException as error:
        processes = [each.process for processes in active.values() for each in processes]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        if not isinstance(error, GeneratorExit):  # an error elsewhere, which has its own message
            print(f"stopped; {CONTINUE}", file=sys.stderr)
        raise
