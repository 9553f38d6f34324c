"""Commands under faults: kills, damaged files of every kind of folder, hostile files. Counts what should never happen.

    python tests/faults.py [--cases N] [--minutes N] [--only TEXT] [--seed N] [--workers N]

Each case is a command in a forked process, in a folder of its own with copies of small, finished folders. It may do its
work, or refuse with one sentence and exit code 2. Counted are:

    lost        a file that the command did not write is changed or removed, or a killed command cannot be repeated
    wrong       a command ends with exit code 0 and another result than without the fault, though a checksum covers it
    traceback   any exception but a sentence
    crash       the process dies
    memory      more than 2 GB resident
    slow        more than 10 seconds of processor time until a refusal, 60 in all, or it waits for ever
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from hostile_files import HOSTILE_CASES, damages, remove_checksums, write_inputs  # noqa: E402  # after the settings of the environment

FAULTS = ("lost", "wrong", "traceback", "crash", "memory", "slow")
MAX_RESIDENT_BYTES = 2e9
MAX_REFUSAL_SECONDS = 10  # of processor time: the machine may be busy
MAX_SECONDS = 60  # likewise
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # per second
MAX_IDLE_SECONDS = 8  # without using the processor, as when a pipe is read
COUNTER = 200  # file descriptor
FOREIGN = ("notes.partial", ".hidden", "lock", "run.tmp")  # names of files that we did not write

SIZE = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --generator-width 32"
STEPS = "--steps 8 --save-every 2 --evaluate-every 4 --log-every 2 --evaluation-rows 16 --length 16 --batch-size 8"
TUNING = "--epochs 1 --length 16 --batch-size 8 --device cpu"
EMBED = "embed --model model --input rows/dev.jsonl --device cpu"
PREDICT = "predict --model tuned --input rows/dev.jsonl --device cpu"
WRITERS = {  # commands that write: output, inputs, command
    "vocab": (["texts"], "tokenizer --corpus texts --output vocab --vocab-size 120"),
    "shards": (
        ["texts", "vocab"],
        "shard --corpus texts --tokenizer vocab --output shards --validation-fraction 0.1 --workers 1 "
        "--shard-megabytes 0.01",
    ),
    "run": (["shards"], f"pretrain --data shards --output run --device cpu {SIZE} {STEPS}"),
    "huggingface": (["run"], "export --model run --output huggingface"),
    "model": (["huggingface"], "import --from huggingface --output model"),
    "tuned": (
        ["model", "rows"],
        f"finetune --model model --train rows/train.jsonl --dev rows/dev.jsonl --output tuned {TUNING}",
    ),
    "glued": (["model", "glue"], f"glue --model model --data glue --tasks cola rte --seeds 1 --output glued {TUNING}"),
    "predictions": (["tuned", "rows"], f"{PREDICT} --output predictions/rows.csv"),
    "report": (["run"], "report run --output report"),
    "package": (["run"], "export --model run --output package --to package --training-data none"),
    "corrupted": (
        ["run", "shards"],
        "corrupt --model run --data shards --output corrupted/rows.safetensors --rows 32 --device cpu",
    ),
    "vectors": (["model", "rows"], f"{EMBED} --output vectors/rows.npy"),
    "table": (["model", "rows"], f"{EMBED} --output table/rows.parquet"),
    "tagged": (
        ["model", "tags"],
        f"finetune --model model --train tags/train.conll --dev tags/dev.conll --kind tags --output tagged {TUNING}",
    ),
    "tag-predictions": (
        ["tagged", "tags"],
        "predict --model tagged --input tags/dev.conll --output tag-predictions/rows.conll --device cpu",
    ),
    "choosing": (
        ["model", "choices"],
        "finetune --model model --train choices/train.jsonl --dev choices/dev.jsonl --kind choice --text context "
        f"--text-b question --output choosing {TUNING}",
    ),
    "chosen": (
        ["choosing", "choices"],
        "predict --model choosing --input choices/dev.jsonl --output chosen/rows.jsonl --device cpu",
    ),
    "answering": (
        ["model", "questions"],
        "finetune --model model --train questions/train.jsonl --dev questions/dev.json --kind question-answering "
        f"--output answering {TUNING.replace('--length 16', '--length 24')}",
    ),
    "answers": (
        ["answering", "questions"],
        "predict --model answering --input questions/dev.json --output answers/files --device cpu",
    ),
    "onnx": (["run"], "export --model run --output onnx --to onnx --int8"),
}
SLOW = ("onnx",)  # outputs whose commands are stopped less often
HALF = {  # commands that were stopped before the end of a file
    "half-predictions": (["tuned", "rows"], f"{PREDICT} --output half-predictions/rows.csv"),
    "half-table": (["model", "rows"], f"{EMBED} --output half-table/rows.parquet"),
    "half-answers": (["answering", "questions"], WRITERS["answers"][1].replace("answers/", "half-answers/")),
}
DETECT = "detect --device cpu --json --model"
EVALUATE = "evaluate --device cpu --json"
READERS = {  # commands that read each kind of folder: other inputs, commands
    "texts": (["vocab"], [WRITERS["vocab"][1].replace("output vocab", "output new"), WRITERS["shards"][1]]),
    "vocab": (["texts"], [WRITERS["shards"][1]]),
    "shards": ([], [WRITERS["run"][1], "inspect shards"]),
    "stopped": (
        ["shards", "rows"],
        [
            "pretrain --data shards --output stopped --resume --device cpu " + f"{SIZE} {STEPS}",
            "export --model stopped --output new",
            f"finetune --model stopped --train rows/train.jsonl --dev rows/dev.jsonl --output new {TUNING}",
            "report stopped",
        ],
    ),
    "run": ([], ["report run", f"{DETECT} run words"]),
    "model": (["rows"], [f"{DETECT} model words", WRITERS["tuned"][1], "export --model model --output new"]),
    "huggingface": ([], [f"{DETECT} huggingface words", WRITERS["model"][1]]),
    "tuned": (
        ["model", "rows"],
        [WRITERS["tuned"][1], f"{EVALUATE} --input rows/dev.jsonl --model tuned", "export --model tuned --output new"],
    ),
    "glued": (["model", "glue"], [WRITERS["glued"][1]]),
    "package": ([], [f"{DETECT} package words"]),
    "corrupted": (["shards"], [f"{WRITERS['run'][1]} --corrupted-rows corrupted/rows.safetensors"]),
    "tags": (["model"], [WRITERS["tagged"][1]]),
    "tagged": (["model", "tags"], [f"{EVALUATE} --input tags/dev.conll --model tagged"]),
    "choices": (["model"], [WRITERS["choosing"][1]]),
    "choosing": (["model", "choices"], [f"{EVALUATE} --input choices/dev.jsonl --model choosing"]),
    "questions": (["model"], [WRITERS["answering"][1]]),
    "answering": (["model", "questions"], [f"{EVALUATE} --input questions/dev.json --model answering"]),
    **{kind: (inputs, [command]) for kind, (inputs, command) in HALF.items()},
}
PLAIN = ("model", "tuned")  # kinds that are also tried without checksums, as a stranger may send
READERS |= {
    f"plain-{kind}": (inputs, [re.sub(rf"(?<!-)\b{kind}\b", f"plain-{kind}", command) for command in commands])
    for kind in PLAIN
    for inputs, commands in [READERS[kind]]
}
CHECKED = (  # kinds whose files are covered by checksums
    *("shards", "stopped", "run", "model", "tuned", "glued", "corrupted", "tagged", "choosing", "answering"),
    *HALF,
)
UNCHECKED_FILES = ("metrics.jsonl", "samples.md", "curves.png")  # of these, for people to read


@dataclass(frozen=True)
class Case:
    """A command under a fault."""

    group: str
    name: str
    command: str
    inputs: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None  # damages the inputs
    damaged: str = ""  # the file
    stop: tuple[int, float] | None = None  # signal, and the fraction of the command before it,
    is_timed: bool = False  # in seconds or else in file operations
    is_checked: bool = False  # another result is wrong


@dataclass
class Outcome:
    """How a process ended."""

    code: int = 0  # negative: killed by that signal
    output: str = ""
    errors: str = ""
    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    operations: int = 0
    is_timeout: bool = False


@dataclass
class CaseResult:
    case: Case
    name: str  # one of FAULTS, or: refused, same, accepted (another result that no checksum covers)
    outcome: Outcome
    faults: list[str] = field(default_factory=list)


def run_electra(
    command: str, folder: Path, stop_at: tuple[int, int] | None = None, stop_after: tuple[int, float] | None = None
) -> Outcome:
    """Run a command in a forked process; send it a signal at its n-th file operation, or after some seconds."""
    out, err, counter = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err", "count"))
    for path in (out, err, counter):
        path.write_bytes(b"")
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        run_in_child(command, folder, (out, err, counter), stop_at, is_ready)
    os.close(is_ready)
    os.read(ready, 1)  # a signal before the command begins would not be the command's
    os.close(ready)
    start = progress = time.monotonic()
    ticks, is_timeout = 0, False
    while (ended := os.wait4(child, os.WNOHANG))[0] == 0:
        now = time.monotonic()
        if stop_after is not None and now - start >= stop_after[1]:
            os.kill(child, stop_after[0])
            stop_after = None
        if (used := processor_ticks(child)) != ticks:
            ticks, progress = used, now
        if ticks > MAX_SECONDS * CLOCK_TICKS or now - progress > MAX_IDLE_SECONDS:
            is_timeout = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    _, status, usage = ended
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        output=out.read_text(errors="replace"),
        errors=err.read_text(errors="replace"),
        resident_bytes=usage.ru_maxrss * 1024,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        seconds=time.monotonic() - start,
        operations=counter.stat().st_size,
        is_timeout=is_timeout,
    )


def processor_ticks(process: int) -> int:
    """Processor time that a process used, in clock ticks."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def run_in_child(
    command: str, folder: Path, files: tuple[Path, ...], stop_at: tuple[int, int] | None, is_ready: int
) -> None:
    code = 1
    try:
        for number, path in zip((1, 2, COUNTER), files, strict=True):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        os.chdir(folder)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30),) * 2)  # protects the machine
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        count_file_operations(stop_at)
        sys.argv = ["electra", *command.split()]
        os.write(is_ready, b".")
        electra.__main__.main()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_file_operations(stop_at: tuple[int, int] | None) -> None:
    """Write a byte to the counter at each operation that changes files; stop this process at the n-th."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            count += 1
            os.write(COUNTER, b".")
            if stop_at is not None and count == stop_at[1]:
                os.kill(os.getpid(), stop_at[0])

    sys.addaudithook(hook)


def read_files(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder, by its path."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 28)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def output_of(command: str) -> str | None:
    words = command.split()
    return words[words.index("--output") + 1] if "--output" in words else None


def make_parent(command: str, folder: Path) -> None:
    """Make the folder of the file that a command writes."""
    (folder / (output_of(command) or "")).parent.mkdir(exist_ok=True)


def result_of(command: str, folder: Path, outcome: Outcome) -> dict[str, str | None]:
    """What a command computed: the files it wrote that do not depend on time and place, or what it printed."""
    output = output_of(command)
    if output is None:
        return {"printed": outcome.output}
    files = read_files(folder)
    if command.startswith("pretrain"):
        last = max((name.split("/")[2] for name in files if name.startswith(f"{output}/checkpoints/")), default="none")
        names = [f"{output}/checkpoints/{last}/{name}.safetensors" for name in ("model", "training")]
    else:
        suffixes = (".safetensors", ".txt", ".csv", ".md", ".npy", ".parquet", ".conll", ".gz", ".onnx")
        suffixes += (".json", ".jsonl") if command.startswith("predict") else ()
        names = sorted(name for name in files if name.startswith(output) and name.endswith(suffixes))
    return {name: files.get(name) for name in names}


class Trial:
    """Runs cases on copies of finished folders in `work`."""

    def __init__(self, work: Path) -> None:
        self.work, self.good = work, work / "good"
        self.results: dict[str, dict[str, str | None]] = {}  # of commands without a fault, and
        self.operations: dict[str, int] = {}  # their file operations,
        self.seconds: dict[str, float] = {}  # their time,
        self.files: dict[str, set[str]] = {}  # and the files there are after them
        write_inputs(self.good)
        for _, command in WRITERS.values():
            make_parent(command, self.good)
            self.require_success(run_electra(command, self.good), command)
        shutil.copytree(self.good / "run", self.good / "stopped")
        shutil.rmtree(self.good / "stopped/checkpoints/step-000000008")
        for _, command in HALF.values():
            make_parent(command, self.good)
            operations = run_electra(command, self.good).operations
            shutil.rmtree((self.good / output_of(command)).parent)
            make_parent(command, self.good)
            run_electra(command, self.good, (signal.SIGTERM, operations // 3))
        for kind in PLAIN:
            shutil.copytree(self.good / kind, self.good / f"plain-{kind}")
            remove_checksums(self.good / f"plain-{kind}")

    def require_success(self, outcome: Outcome, command: str) -> None:
        if outcome.code != 0:
            sys.exit(f"without a fault, electra {command} ended with {outcome.code}:\n{outcome.errors}")

    def copy_inputs(self, case: Case, number: int) -> Path:
        folder = self.work / f"{number}" / "case"
        folder.mkdir(parents=True)
        for name in case.inputs:
            shutil.copytree(self.good / name, folder / name)
            for foreign in FOREIGN:
                (folder / name / foreign).write_text("not ours")
        make_parent(case.command, folder)
        for foreign in FOREIGN:
            (folder / foreign).write_text("not ours")
        return folder

    def measure(self, case: Case, number: int) -> None:
        """Run a case's command without the fault."""
        case = replace(case, prepare=lambda folder: None, stop=None)
        folder = self.copy_inputs(case, number)
        outcome = run_electra(case.command, folder)
        if case.stop is not None or outcome.code != 2:
            self.require_success(outcome, case.command)
        self.results[case.command] = result_of(case.command, folder, outcome)
        self.operations[case.command] = outcome.operations
        self.seconds[case.command] = outcome.seconds
        self.files[case.command] = set(read_files(folder))
        shutil.rmtree(folder.parent)

    def run(self, case: Case, number: int) -> CaseResult:
        folder = self.copy_inputs(case, number)
        try:
            if case.stop is not None:
                return self.run_stopped(case, folder)
            case.prepare(folder)
            before = read_files(folder)
            outcome = run_electra(case.command, folder)
            result = self.judge(case, folder, outcome)
            faults = self.common_faults(outcome)
            if lost := self.lost_files(case, before, read_files(folder), outcome.code):
                faults.append("lost")
                outcome.errors += f"\nchanged or removed: {', '.join(lost)}"
            return CaseResult(case, result, outcome, faults + ([result] if result in FAULTS else []))
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)

    def judge(self, case: Case, folder: Path, outcome: Outcome) -> str:
        if outcome.code == 2:
            return "refused"
        if outcome.code != 0:
            return "failed"  # `common_faults` says how
        results = result_of(case.command, folder, outcome), dict(self.results.get(case.command, {}))
        for result in results:
            result.pop(case.damaged, None)  # may be left as it is, if it is not used
        if results[0] == results[1]:
            return "same"
        skipped = [line for line in outcome.output.splitlines() if line.startswith("skipped: ")]  # by a report
        is_named = case.damaged and Path(case.damaged).name in "\n".join([outcome.errors, *skipped])
        return "refused" if is_named else "wrong" if case.is_checked else "accepted"

    def common_faults(self, outcome: Outcome) -> list[str]:
        is_sentence = outcome.code != 2 or outcome.errors.rstrip().splitlines()[-1:][0].startswith("electra: ")
        faults = {
            "traceback": "Traceback" in outcome.errors or outcome.code == 1 or not is_sentence,
            "crash": outcome.code < 0 and not outcome.is_timeout,
            "memory": outcome.resident_bytes > MAX_RESIDENT_BYTES,
            "slow": outcome.is_timeout or (outcome.code == 2 and outcome.cpu_seconds > MAX_REFUSAL_SECONDS),
        }
        return [name for name, is_fault in faults.items() if is_fault]

    def lost_files(self, case: Case, before: dict[str, str], after: dict[str, str], code: int) -> list[str]:
        """Files that were changed or removed, except those that a successful command replaces in its output."""
        output = output_of(case.command)
        lost = [name for name, content in before.items() if after.get(name) != content]
        lost = [name for name in lost if not name.endswith(".electra-partial")]
        replaced = ("metrics.jsonl", "config.json") if case.group.startswith("plain") else ("metrics.jsonl",)
        is_own = (lambda name: Path(name).name not in FOREIGN) if code == 0 else (lambda name: name.endswith(replaced))
        return [name for name in lost if not name.startswith(f"{output}/") or not is_own(name)]

    def run_stopped(self, case: Case, folder: Path) -> CaseResult:
        """Stop a command by a signal and repeat it: its result must be that of an uninterrupted one."""
        assert case.stop is not None
        number, fraction = case.stop
        before = read_files(folder)
        if case.is_timed:
            after = number, fraction * self.seconds[case.command]
            stopped = run_electra(case.command, folder, stop_after=after)
        else:
            stopped = run_electra(case.command, folder, (number, 1 + int(fraction * self.operations[case.command])))
        faults = self.common_faults(stopped) if stopped.code != -number else []  # SIGKILL, or before it began
        strays = [path for path in folder.rglob("*electra-partial") if "lock" not in path.name]  # locks are taken over
        if strays and number != signal.SIGKILL and "is kept" not in stopped.errors:
            faults.append("lost")
            stopped.errors += f"\nleft behind: {strays}"
        has_checkpoint = (folder / "run/checkpoints").exists()
        resume = " --resume" if case.command.startswith("pretrain") and has_checkpoint else ""
        again = run_electra(case.command + resume, folder)
        faults += self.common_faults(again)
        again.errors = f"{stopped.errors}\n--- again:\n{again.errors}"
        after = read_files(folder)
        is_whole = result_of(case.command, folder, again) == self.results[case.command]
        strays = [name for name in after if name not in self.files[case.command] and "/checkpoints/step-" not in name]
        lost = [name for name, content in before.items() if after.get(name) != content]
        if again.code not in (0, 2) or not is_whole or strays or lost:
            faults.append("lost")
            again.errors += f"\nwhole: {is_whole}, code: {again.code}, left behind: {strays}, lost: {lost}"
        return CaseResult(case, faults[0] if faults else "same", again, faults)


def all_cases(draw: random.Random) -> Iterator[Case]:
    yield from stop_cases(draw)
    yield from damage_cases(draw)
    for hostile in HOSTILE_CASES:
        yield Case(f"hostile {hostile.group}", hostile.name, hostile.command, hostile.inputs, hostile.prepare)


def stop_cases(draw: random.Random) -> Iterator[Case]:
    """Every command that writes, stopped at different moments."""
    counts = {signal.SIGKILL: 12, signal.SIGTERM: 3, signal.SIGHUP: 3, signal.SIGINT: 3}  # of each way
    for output, (inputs, command) in WRITERS.items():
        for number, is_timed in product(counts, (True, False)):
            count = counts[number] // 3 if output in SLOW else counts[number]
            for fraction in (draw.random() for _ in range(count)):
                name = f"{command.split()[0]} at {fraction:.0%} of its {'time' if is_timed else 'file operations'}"
                stop = (number, fraction)
                yield Case(signal.Signals(number).name, name, command, tuple(inputs), stop=stop, is_timed=is_timed)


def damage_cases(draw: random.Random) -> Iterator[Case]:
    """Every file of every kind of folder, damaged in every way, for every command that reads it."""
    for kind, (others, commands) in READERS.items():
        for file in sorted(READABLE_FILES[kind]):
            for damage_name, damage in damages(file, draw):
                for command in commands:
                    path = f"{kind}/{file}"
                    is_checked = kind in CHECKED and Path(file).name not in UNCHECKED_FILES
                    is_checked = is_checked and "signed" not in damage_name
                    name = f"{path}, {damage_name}: {command.split()[0]}"
                    prepare = lambda folder, path=path, damage=damage: damage(folder / path)  # noqa: E731 (binds this round's path and damage)
                    yield Case(kind, name, command, (kind, *others), prepare, path, is_checked=is_checked)


READABLE_FILES: dict[str, list[str]] = {}


def is_of_interest(name: str) -> bool:
    """Not plots, nor what is the same in several folders: older checkpoints, the second task of GLUE."""
    old = ("checkpoints/step-000000002", "checkpoints/step-000000004", "rte/")
    return not name.endswith(".png") and not name.startswith(old)


def run_trial(
    limit: int | None = None, only: str = "", seed: int = 0, workers: int = 2, minutes: float | None = None
) -> list[CaseResult]:
    """Run all cases in random order, or as many as `limit` and `minutes` allow, in forked processes."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="electra-faults-") as work:
        trial = Trial(Path(work))
        for kind in READERS:
            READABLE_FILES[kind] = [name for name in read_files(trial.good / kind) if is_of_interest(name)]
        draw = random.Random(seed)
        cases = [case for case in all_cases(draw) if only in f"{case.group} {case.name}"]
        cases = draw.sample(cases, min(limit or len(cases), len(cases)))
        for number, case in enumerate({case.command: case for case in cases if case.group[:7] != "hostile"}.values()):
            trial.measure(case, number)
        print(f"{len(cases):,} cases", file=sys.stderr)
        return [result for part in run_in_workers(trial, cases, workers, end) for result in part]


def run_in_workers(trial: Trial, cases: list[Case], workers: int, end: float) -> Iterator[list[CaseResult]]:
    """Divide the cases among forked processes, which write their results to files."""
    children = {}
    for worker in range(workers):
        path = trial.work / f"results-{worker}"
        if child := os.fork():
            children[child] = path
            continue
        try:
            run_cases(trial, cases, range(worker, len(cases), workers), path, end)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    for child, path in children.items():
        if os.waitpid(child, 0)[1]:
            sys.exit("the trial itself failed")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        yield [CaseResult(cases[number], name, Outcome(**outcome), faults) for number, name, faults, outcome in lines]


def run_cases(trial: Trial, cases: list[Case], numbers: range, path: Path, end: float) -> None:
    """Run some of the cases and write their results to a file; none is started after the time `end`."""
    with path.open("w") as file:
        for number in takewhile(lambda _: time.monotonic() < end, numbers):
            result = trial.run(cases[number], number)
            outcome = replace(result.outcome, output="", errors=result.outcome.errors[-3000:])
            file.write(json.dumps([number, result.name, result.faults, outcome.__dict__]) + "\n")
            file.flush()
            if result.faults:
                faults, error = ", ".join(result.faults), outcome.errors.strip()[-600:]
                print(f"{faults}: {result.case.group}: {result.case.name}\n{error}\n", file=sys.stderr, flush=True)


def import_libraries() -> None:
    """Import what all commands use, once: forked processes share it."""
    global electra
    import electra.__main__
    import electra.cli

    for command in electra.cli.COMMANDS.values():
        command.load_function()
    import torch
    import torch._dynamo  # imported by models when they are built

    from electra import plotting, resumable
    from electra.finetuning import predict
    from electra.onnx import verify
    from electra.serving import embed

    torch.set_num_threads(1)
    predict.CHUNK_SIZE = embed.CHUNK_SIZE = 3  # several parts of a small file,
    resumable.SAVE_SECONDS = 0.0  # each of which is saved
    verify.TIMED_SECONDS = 0.0
    plotting.save_figure = lambda path, *arguments, **options: path.write_bytes(b"") == 0  # plots take most of the time


def group_order(group: str) -> tuple[int, str]:
    """Signals first, then folders in the order of `READERS`, then hostile files."""
    order = ["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", *READERS]
    return order.index(group) if group in order else len(order), group


def format_table(results: list[CaseResult]) -> str:
    """Counts by group, as a Markdown table."""
    columns = ("refused", "same", "accepted", *FAULTS)
    rows = [("fault", "cases", *columns), tuple("-" * 3 for _ in range(2 + len(columns)))]
    groups = sorted(dict.fromkeys(result.case.group for result in results), key=group_order)
    for group in [*groups, "all"]:
        mine = [result for result in results if group in (result.case.group, "all")]
        counts = Counter(result.name for result in mine if not result.faults)
        counts.update(fault for result in mine for fault in set(result.faults))
        rows.append((group, f"{len(mine):,}", *(f"{counts[column]:,}" for column in columns)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="a random selection of this size instead of all")
    parser.add_argument("--minutes", type=float, help="start no case after this time")
    parser.add_argument("--only", default="", help="cases with this text in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the outcome of every case")
    options = parser.parse_args()
    start = time.monotonic()
    results = run_trial(options.cases, options.only, options.seed, options.workers, options.minutes)
    for result in results:
        if options.list:
            last = (result.outcome.errors.strip().splitlines() or [""])[-1]
            print(f"{result.name}: {result.case.group}: {result.case.name}: {last[:300]}")
    print(format_table(results))
    peak = max(result.outcome.resident_bytes for result in results)
    print(f"\n{len(results):,} cases in {time.monotonic() - start:.0f} s; at most {peak / 1e6:.0f} MB resident")
    sys.exit(any(result.faults for result in results))


if __name__ == "__main__":
    main()
