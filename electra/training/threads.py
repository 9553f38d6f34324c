"""How the threads of torch wait for each other during a training on CPUs that other programs may use, too."""

import math
import os
import threading
from pathlib import Path
from time import monotonic, process_time

import torch

from electra.config import OPENMP, wait_settings

CPU_TIMES = Path("/proc/stat")  # Linux
LOOK_SECONDS = 1.0  # between two readings of CPU times
SPARE_CORES = 0.5  # that other programs may use beyond the free ones before threads stop to spin
QUIET_LOOKS = 3  # in succession before threads spin again


class WaitPolicy:
    """While entered, lets OpenMP threads that wait for each other spin on quiet cores, and sleep beside busy programs.

    libgomp reads its variables only once, but hardly spins while it manages more threads than there are CPUs. So
    further teams of threads that do nothing change how all threads wait, and no result.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_available = device.type == "cpu" and wait_settings() == OPENMP and os.access(CPU_TIMES, os.R_OK)
        self.cpus = os.sched_getaffinity(0) if self.is_available else set()
        self.looked_at = math.inf  # never, before it is entered
        self.idle_teams: threading.Event | None = None  # ends them

    def __enter__(self) -> None:
        self.num_threads = torch.get_num_threads()
        if self.is_available and self.num_threads > 1:
            self.looked_at, self.seconds = monotonic(), other_cpu_seconds(self.cpus)
            self.quiet_looks = 0

    def __exit__(self, *_: object) -> None:
        self.looked_at = math.inf
        self.end_idle_teams()

    def update(self) -> None:
        """Look at what other programs use, at most once per second; called after each step."""
        now = monotonic()
        if now - self.looked_at >= LOOK_SECONDS:
            seconds = other_cpu_seconds(self.cpus)
            cores = (seconds - self.seconds) / (now - self.looked_at)
            self.looked_at, self.seconds = now, seconds
            self.decide(cores)

    def decide(self, other_cores: float) -> None:
        """Sleep at once if other programs use too many cores; spin again after several quiet looks."""
        is_busy = other_cores + self.num_threads > len(self.cpus) + SPARE_CORES
        self.quiet_looks = 0 if is_busy else self.quiet_looks + 1
        if is_busy and self.idle_teams is None:
            self.start_idle_teams()
        elif self.quiet_looks >= QUIET_LOOKS:
            self.end_idle_teams()

    def start_idle_teams(self) -> None:
        self.idle_teams = threading.Event()
        for _ in range(num_idle_teams(len(self.cpus), self.num_threads)):
            is_ready = threading.Event()
            threading.Thread(target=keep_idle_team, args=(is_ready, self.idle_teams), daemon=True).start()
            is_ready.wait()  # a process that exits while another thread is inside of torch may crash

    def end_idle_teams(self) -> None:
        if self.idle_teams is not None:
            self.idle_teams.set()
            self.idle_teams = None


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
