"""How the threads of torch wait for each other during a training on CPUs that other programs may use, too."""

import math
import os
import threading
from pathlib import Path
from time import monotonic, process_time

import torch

from electra.config import OPENMP, wait_settings

CPU_TIMES = Path("/proc/stat")  # Linux
CHECK_SECONDS = 1.0  # between two readings of CPU times
BUSY_MARGIN = 0.5  # cores by which demand may exceed the CPUs before threads stop spinning
QUIET_CHECKS = 3  # in succession before threads spin again
MAX_IDLE_TEAMS = 8  # more are needed for few threads on many CPUs, which hardly ever lack a core


def can_switch_spinning(device: torch.device, num_threads: int) -> bool:
    """Whether `WaitPolicy` does anything: on a CPU of Linux, with several threads that wait as electra chose."""
    is_linux = os.access(CPU_TIMES, os.R_OK) and hasattr(os, "sched_getaffinity")
    return device.type == "cpu" and num_threads > 1 and is_linux and wait_settings() == OPENMP


class WaitPolicy:
    """While entered, lets OpenMP threads that wait for each other spin on quiet cores, and sleep beside busy programs.

    libgomp reads its variables only once, but hardly spins while it manages more threads than there are CPUs. So
    further teams of threads that do nothing change how all threads wait, and no result.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checked_at = math.inf  # never, before it is entered
        self.stop_idle_teams: threading.Event | None = None  # None: there are none

    def __enter__(self) -> None:
        self.num_threads = torch.get_num_threads()
        if can_switch_spinning(self.device, self.num_threads):
            self.cpus = os.sched_getaffinity(0)
            self.num_teams = num_idle_teams(len(self.cpus), self.num_threads)
            if self.num_teams <= MAX_IDLE_TEAMS:
                self.checked_at, self.seconds = monotonic(), other_cpu_seconds(self.cpus)
                self.quiet_checks = 0

    def __exit__(self, *_: object) -> None:
        self.checked_at = math.inf
        self.end_idle_teams()

    def update(self) -> None:
        """Check what other programs use, at most once per second; called after each step."""
        now = monotonic()
        if now - self.checked_at >= CHECK_SECONDS:
            seconds = other_cpu_seconds(self.cpus)
            cores = (seconds - self.seconds) / (now - self.checked_at)
            self.checked_at, self.seconds = now, seconds
            self.decide(cores)

    def decide(self, other_cores: float) -> None:
        """Sleep immediately if other programs use too many cores; spin again after several quiet checks."""
        is_busy = other_cores + self.num_threads > len(self.cpus) + BUSY_MARGIN
        self.quiet_checks = 0 if is_busy else self.quiet_checks + 1
        if is_busy and self.stop_idle_teams is None:
            self.start_idle_teams()
        elif self.quiet_checks >= QUIET_CHECKS:
            self.end_idle_teams()

    def start_idle_teams(self) -> None:
        self.stop_idle_teams = threading.Event()
        try:
            for _ in range(self.num_teams):
                is_ready = threading.Event()
                threading.Thread(target=keep_idle_team, args=(is_ready, self.stop_idle_teams), daemon=True).start()
                is_ready.wait()  # a process that exits while another thread is inside of torch may crash
        except RuntimeError:  # no further threads are allowed: go on as before
            self.checked_at = math.inf
            self.end_idle_teams()

    def end_idle_teams(self) -> None:
        if self.stop_idle_teams is not None:
            self.stop_idle_teams.set()
            self.stop_idle_teams = None


def num_idle_teams(num_cpus: int, num_threads: int) -> int:
    """How many further teams make more threads than CPUs; a team adds all its threads but the first."""
    return max(0, math.ceil((num_cpus + 1 - num_threads) / (num_threads - 1)))


def keep_idle_team(is_ready: threading.Event, end: threading.Event) -> None:
    """Have a team of OpenMP threads, which ends with the thread that calls this."""
    try:
        torch.ones(torch.get_num_threads() << 17, dtype=torch.int8, device="cpu").neg_()  # large enough for all threads
    finally:
        is_ready.set()
    end.wait()


def other_cpu_seconds(cpus: set[int]) -> float:
    """The time that other processes have used on some CPUs; differences of two readings count."""
    names = {f"cpu{number}" for number in cpus}
    rows = [line.split() for line in CPU_TIMES.read_text().splitlines()]
    times = [[int(ticks) for ticks in row[1:9]] for row in rows if row[0] in names]
    busy = sum(sum(ticks) - ticks[3] - ticks[4] for ticks in times)  # all but idle and waiting for disks
    return busy / os.sysconf("SC_CLK_TCK") - process_time()
