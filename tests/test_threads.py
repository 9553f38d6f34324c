"""How OpenMP threads wait: spinning on quiet cores, sleeping beside busy programs, with equal results."""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from electra.config import OPENMP, WAIT_VARIABLES
from electra.model.storage import WEIGHTS
from electra.pretraining.command import pretrain
from electra.training import hardware
from electra.training.hardware import WaitPolicy, num_idle_teams, other_cpu_seconds

CPU = torch.device("cpu")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


@pytest.fixture(autouse=True)
def electra_environment(monkeypatch):
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in OPENMP.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def machine(monkeypatch):
    """Two CPUs and two threads; a test sets the time and what other programs have used until then."""
    machine = SimpleNamespace(cpus={0, 1}, threads=2, seconds=0.0, other_seconds=0.0, checks=0)

    def check(cpus: set[int]) -> float:
        machine.checks += 1
        return machine.other_seconds

    monkeypatch.setattr(hardware, "CPU_TIMES", Path(__file__))  # exists on any system
    monkeypatch.setattr(hardware, "monotonic", lambda: machine.seconds)
    monkeypatch.setattr(hardware, "other_cpu_seconds", check)
    monkeypatch.setattr(hardware, "keep_idle_team", lambda is_ready, end: is_ready.set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: machine.cpus, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.threads)
    return machine


def sleeps_after_seconds(machine: SimpleNamespace, other_cores: list[float], policy: WaitPolicy) -> list[bool]:
    """Whether threads sleep immediately after each second, during which other programs used `other_cores`."""
    sleeps = []
    with policy:
        for cores in other_cores:
            machine.seconds += 1
            machine.other_seconds += cores
            policy.update()
            sleeps.append(policy.stop_idle_teams is not None)
    return sleeps


def test_threads_sleep_beside_a_busy_program_and_spin_after_three_quiet_seconds(machine):
    cores = [0.4, 0.6, 0.4, 0.4, 1.0, 0.0, 0.0, 0.0, 0.0, 0.6]
    expected = [False, True, True, True, True, True, True, False, False, True]
    assert sleeps_after_seconds(machine, cores, WaitPolicy(CPU)) == expected


def test_programs_on_cores_that_the_training_leaves_free_do_not_matter(machine):
    machine.cpus = set(range(8))
    assert sleeps_after_seconds(machine, [6.4, 6.6], WaitPolicy(CPU)) == [False, True]


def test_cpu_times_are_read_at_most_once_per_second(machine):
    policy = WaitPolicy(CPU)
    policy.update()
    assert machine.checks == 0  # no training yet
    with policy:
        for _ in range(100):
            machine.seconds += 1 / 64
            policy.update()
    assert machine.checks == 2


@pytest.mark.parametrize(("num_cpus", "num_threads", "teams"), [(2, 2, 1), (4, 4, 1), (16, 8, 2), (8, 2, 7), (2, 3, 0)])
def test_idle_teams_make_more_threads_than_cpus(num_cpus, num_threads, teams):
    assert num_idle_teams(num_cpus, num_threads) == teams
    assert num_threads + teams * (num_threads - 1) > num_cpus


@pytest.mark.parametrize(
    ("environment", "device", "num_threads"),
    [
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "cpu", 2),
        ({"GOMP_SPINCOUNT": "300000"}, "cpu", 2),
        ({}, "cuda", 2),
        ({}, "cpu", 1),
    ],
)
def test_what_the_user_chose_stays_and_gpus_and_single_threads_need_nothing(
    machine, monkeypatch, environment, device, num_threads
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    machine.threads = num_threads
    assert sleeps_after_seconds(machine, [2.0], WaitPolicy(torch.device(device))) == [False]
    assert machine.checks == 0


def test_few_threads_on_many_cpus_start_no_teams(machine):
    machine.cpus = set(range(64))
    assert sleeps_after_seconds(machine, [64.0], WaitPolicy(CPU)) == [False]


def test_a_training_goes_on_where_no_further_threads_are_allowed(machine, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sleeps_after_seconds(machine, [2.0, 2.0], WaitPolicy(CPU)) == [False, False]
    assert machine.checks == 2  # at the start, and before the attempt


def test_systems_without_cpu_times_of_linux_change_nothing(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CPU_TIMES", tmp_path / "stat")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert sleeps_after_seconds(machine, [2.0], WaitPolicy(CPU)) == [False]


def test_cpu_times_count_the_cpus_of_this_process_without_its_own_time(monkeypatch, tmp_path):
    rows = ["cpu 9 9 9 9 9 9 9 9 9 9", "cpu0 100 20 30 5000 600 7 8 35 50 0", "cpu1 900 0 0 0 0 0 0 0 0 0"]
    rows += ["cpu10 300 0 0 70 0 0 0 0 0 0", "intr 12345 0 0"]
    (tmp_path / "stat").write_text("\n".join(rows))
    monkeypatch.setattr(hardware, "CPU_TIMES", tmp_path / "stat")
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.get)
    monkeypatch.setattr(hardware, "process_time", lambda: 1.5)
    assert other_cpu_seconds({0, 10}) == 2.0 + 3.0 - 1.5


def make_cores_busy(monkeypatch) -> list[WaitPolicy]:
    """Let other programs use both CPUs at every check; the policies that switch spinning off are added to the list."""
    policies = []
    start = WaitPolicy.start_idle_teams

    def start_and_record(self: WaitPolicy) -> None:
        start(self)
        policies.append(self)

    used = itertools.count(step=1_000_000)
    monkeypatch.setattr(hardware, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(hardware, "other_cpu_seconds", lambda _: next(used))
    monkeypatch.setattr(WaitPolicy, "start_idle_teams", start_and_record)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return policies


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@on_linux
def test_a_training_beside_busy_programs_has_the_same_results_bit_for_bit(two_threads, run_config, monkeypatch):
    settings = {"length": 64, "batch_size": 32, "width": 128, "steps": 3, "evaluate_every": 3}
    alone = pretrain(run_config("alone", **settings))
    policies = make_cores_busy(monkeypatch)
    beside = pretrain(run_config("beside", **settings))
    assert len(policies) == 1
    assert policies[0].stop_idle_teams is None  # ended with the training
    first, second = ((Path(run.checkpoint) / WEIGHTS).read_bytes() for run in (alone, beside))
    assert first == second


IDLE_TEAM = """
import os, time, torch
from torch.utils.data import DataLoader
from electra.training.hardware import WaitPolicy

def num_threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
torch.ones(1_000_000).neg_()
before = num_threads()
os.sched_getaffinity = lambda _: {0, 1, 2}
policy = WaitPolicy(torch.device("cpu"))
for _ in range(2):
    try:
        with policy:
            policy.decide(3.0)
            assert num_threads() == before + 3  # a Python thread with a team of three, of which it is one
            assert [int(row) for row in DataLoader(range(2), num_workers=1, multiprocessing_context="fork")] == [0, 1]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        end = time.monotonic() + 60
        while num_threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert num_threads() == before
with policy:
    policy.decide(3.0)
    if (child := os.fork()) == 0:
        policy.end_idle_teams()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
policy.__enter__()
policy.decide(3.0)
print("the process ends with an idle team")
"""


@on_linux
def test_an_idle_team_ends_with_the_training_and_survives_forks():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IDLE_TEAM]
    environment = os.environ | OPENMP | {"OPENBLAS_NUM_THREADS": "1"}  # whose threads end before a fork
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    assert "the process ends" in result.stdout


SPIN = """
import time, torch
from electra.training.hardware import WaitPolicy

def cpu_seconds():
    start = time.process_time()
    for _ in range(60):
        numbers.neg_()  # by all threads; then one of them works and the others wait
        sum(range(100_000))
    return time.process_time() - start

torch.set_num_threads(2)
numbers = torch.ones(2 << 17, dtype=torch.int8)
policy = WaitPolicy(torch.device("cpu"))
cpu_seconds()
spinning = cpu_seconds()
policy.num_teams = torch.multiprocessing.cpu_count()  # a team adds one thread
policy.start_idle_teams()
sleeping = cpu_seconds()
policy.end_idle_teams()
time.sleep(0.5)
print(spinning, sleeping, cpu_seconds())
"""


@on_linux
def test_waiting_threads_use_no_cpu_time_while_there_are_idle_teams():
    environment = os.environ | {"GOMP_SPINCOUNT": "100000000"}  # longer than they ever wait
    result = subprocess.run([sys.executable, "-c", SPIN], env=environment, capture_output=True, text=True, check=True)
    spinning, sleeping, spinning_again = map(float, result.stdout.split())
    assert sleeping < 0.75 * spinning
    assert sleeping < 0.75 * spinning_again
