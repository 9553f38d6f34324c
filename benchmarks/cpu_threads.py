"""Speed of pre-training on a CPU by how OpenMP threads wait, alone and beside other busy processes.

    python benchmarks/cpu_threads.py [--data shards/] [--size tiny] [--busy 0 1] [--rounds 10] [--wait 20] [--json]

Threads of torch that wait for others spin before they sleep; GOMP_SPINCOUNT is for how many iterations (torch's default
is 300,000, several milliseconds), and OMP_WAIT_POLICY=PASSIVE is none. `electra` is what `electra pretrain` does: a
short spin (electra/config.py), which is switched off beside busy programs (electra/training/hardware.py). --busy N runs
N endless loops beside the training. Every setting has a process of its own; they train in turns of at least 2.4
seconds, of which the second half is measured. A turn during which processes that this benchmark did not start used the
cores does not count. --priority (Linux, as root) runs trainings and loops at the highest priority, which keeps such
processes away on a shared machine; it takes the cores from them for 2.4 seconds × settings × rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from electra.config import OPENMP, WAIT_VARIABLES

if TYPE_CHECKING:  # torch reads its variables when it is imported, which only the trainings do
    from electra.training.trainer import Trainer

VARIABLES = (*WAIT_VARIABLES, "OMP_NUM_THREADS")
SETTINGS: dict[str, dict[str, str]] = {
    "default of torch": {},
    "electra": OPENMP,
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"spin {count:,}": {"GOMP_SPINCOUNT": str(count)} for count in (100, 1_000, 3_000, 10_000, 30_000, 100_000)},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SHAPES = {"tiny": (32, 64), "small": (8, 128)}  # rows and tokens of a step
TURN_SECONDS = 1.2  # before the measurement, more than the trainer needs to see other programs, and during it
FOREIGN_CORES = 0.25  # used by other processes; a turn with more does not count
ENOUGH_TURNS = 5
TICK = os.sysconf("SC_CLK_TCK")


def train_in_turns(setting: str, data: Path, size: str) -> None:
    """Build a trainer, then train for a turn and print the steps per second after each line of standard input."""
    import torch

    from electra.config import build_config
    from electra.data.shards import open_shards
    from electra.pretraining.command import build_trainer, plan_and_check_phases
    from electra.pretraining.config import PretrainConfig
    from electra.pretraining.task import PretrainingTask
    from electra.training.distributed import World

    shards, (rows, length) = open_shards(data), SHAPES[size]
    settings = {"size": size, "batch_size": rows, "length": length, "steps": 100_000, "compile": "off"}
    config = build_config(PretrainConfig, data=data, output=data / "unused", device="cpu", **settings)
    [phase] = plan_and_check_phases(config, shards)
    trainer = build_trainer(PretrainingTask(phase, shards, World(torch.device("cpu"))))
    trainer.run_step = trainer.build_step()
    for _ in sys.stdin:
        with trainer.wait_policy if setting == "electra" else nullcontext():
            train_for_a_while(trainer)
            print(train_for_a_while(trainer), flush=True)


def train_for_a_while(trainer: "Trainer") -> float:
    """Steps per second."""
    start, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < TURN_SECONDS:
        trainer.step()
        steps += 1
    return steps / seconds


def python(priority: bool) -> list[str]:
    """The command that runs Python, at the highest priority also between sessions (man 7 sched, autogroup)."""
    high = "test -w /proc/self/autogroup && echo -20 > /proc/self/autogroup; exec nice -n -20"
    return ["setsid", "sh", "-c", f'{high} "$@"', "sh", sys.executable] if priority else [sys.executable]


class Contender:
    """A training process with its own OpenMP settings."""

    def __init__(self, setting: str, data: Path, size: str, priority: bool) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        command = [*python(priority), __file__, "--data", str(data), "--size", size, "--train-in-turns", setting]
        self.process = subprocess.Popen(
            command, env=environment | SETTINGS[setting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.train()

    def train(self) -> float:
        """Train for a turn; returns the steps per second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def busy_processes(count: int, priority: bool) -> Iterator[list[int]]:
    """Keep `count` processes busy; their ids."""
    processes = [subprocess.Popen([*python(priority), "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def foreign_cpu_seconds(own: list[int]) -> float:
    """CPU time of all processes but `own` since the start of the machine (Linux; elsewhere 0)."""
    try:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    own_ticks = 0
    for process in own:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        own_ticks += int(fields[11]) + int(fields[12])
    return (user + nice + system + sum(interrupts) - own_ticks) / TICK


def wait_for_quiet_cores(own: list[int], seconds: float) -> None:
    """Wait until processes other than `own` hardly use the cores, but not longer than `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = foreign_cpu_seconds(own)
        time.sleep(0.5)
        if (foreign_cpu_seconds(own) - before) / 0.5 < FOREIGN_CORES:
            return


def measure(contenders: dict[str, Contender], busy: list[int], rounds: int, wait: float) -> dict[str, dict[str, float]]:
    """Steps per second of each setting, from its turns that count or, if these are few, the quietest ones."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in random.sample(sorted(contenders.items()), len(contenders)):
            own = [*busy, contender.process.pid]
            wait_for_quiet_cores(own, wait)
            start, before = time.perf_counter(), foreign_cpu_seconds(own)
            speed = contender.train()
            foreign = (foreign_cpu_seconds(own) - before) / (time.perf_counter() - start)
            turns[name].append((foreign, speed))
    result = {}
    for name, all_turns in turns.items():
        quiet = [turn for turn in all_turns if turn[0] <= FOREIGN_CORES]
        used = quiet if len(quiet) >= ENOUGH_TURNS else sorted(all_turns)[:ENOUGH_TURNS]
        result[name] = {
            "steps_per_second": statistics.median(speed for _, speed in used),
            "turns": len(quiet),
            "foreign_cores": statistics.mean(foreign for foreign, _ in used),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of shards (default: synthetic text)")
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--wait", type=float, default=0, help="maximum seconds to wait for quiet cores before each turn"
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--priority", action="store_true", help="run at the highest priority")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train-in-turns", choices=SETTINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train_in_turns:
        train_in_turns(arguments.train_in_turns, arguments.data, arguments.size)
        return
    with ExitStack() as stack:
        data = arguments.data
        if data is None:
            from synthetic_shards import write_synthetic_shards

            data = write_synthetic_shards(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        contenders = {}
        for name in dict.fromkeys(["default of torch", *arguments.settings]):
            contenders[name] = Contender(name, data, arguments.size, arguments.priority)
            stack.callback(contenders[name].close)
        rows = []
        for busy in arguments.busy:
            with busy_processes(busy, arguments.priority) as processes:
                rows += [
                    {"busy_processes": busy, "setting": name} | values
                    for name, values in measure(contenders, processes, arguments.rounds, arguments.wait).items()
                ]
    for row in rows:
        default = next(each for each in rows if each["busy_processes"] == row["busy_processes"])
        row["ratio"] = row["steps_per_second"] / default["steps_per_second"]
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        few = "" if row["turns"] >= ENOUGH_TURNS else f", NOT QUIET: others used {row['foreign_cores']:.2f} cores"
        print(
            f"{row['busy_processes']} busy processes  {row['setting']:<17} {row['steps_per_second']:7.2f} steps/s  "
            f"{row['ratio']:5.2f}×  ({row['turns']} turns count{few})"
        )


if __name__ == "__main__":
    main()
