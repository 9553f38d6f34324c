"""Device, precision and compilation of a run, how its CPU threads wait for each other beside other programs, and the
environment it is recorded with."""

import math
import os
import platform
import shutil
import subprocess
import threading
import time
from importlib import metadata
from pathlib import Path
from time import monotonic, process_time
from typing import get_args

import torch

from electra import __version__
from electra.config import OPENMP, wait_settings
from electra.errors import ConfigError
from electra.kernels.dispatch import HAS_TRITON
from electra.training.config import Device, HardwareConfig, Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILERS = {"cpu": "a C++ compiler (g++)", "cuda": "Triton and a C compiler (gcc)"}  # that torch.compile needs
PEAK_FLOPS = {  # dense bf16 FLOP/s from the vendors' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "3090": 71e12,
}


def choose_device(device: Device) -> torch.device:
    """The device of a `--device` setting; raises a ConfigError if it is missing."""
    if device not in get_args(Device):
        raise ConfigError(f"is {device!r}; choose from {', '.join(get_args(Device))}", field="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available; use --device cpu")
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def choose_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of a `--precision` setting; auto avoids bf16 where it is emulated, which is many times slower, and fp16
    where there are no tensor cores."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        has_fp16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
        precision = "bf16" if has_bf16 else "fp16" if has_fp16 else "fp32"
    if precision == "bf16" and device.type == "cuda" and not has_bf16:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"bf16 needs a GPU of compute capability 8.0 or above, unlike {name}; use --precision fp16")
    return DTYPES[precision]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether torch ran out of memory: CUDA has an exception class for it, the CPU only a message."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def can_compile(device: torch.device) -> bool:
    """Whether the compiler that torch.compile needs for a device is installed."""
    return HAS_TRITON if device.type == "cuda" else shutil.which("g++") is not None


def should_compile(config: HardwareConfig, device: torch.device) -> bool:
    """Whether the training step is compiled; raises a ConfigError if there is no compiler."""
    is_compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
    if is_compiled and not can_compile(device):
        raise ConfigError(f"torch.compile needs {COMPILERS[device.type]}; install it or use --compile off")
    return is_compiled


def peak_flops_per_second(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


def measure_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product on this machine, the best of five."""
    width = 4096 if device.type == "cuda" else 768
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best


def device_memory_bytes(device: torch.device) -> int | None:
    """Memory of the device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_environment() -> dict[str, str]:
    """Versions and hardware, recorded with each run."""
    device = choose_device("auto")
    return {
        "electra": __version__,
        "commit": git_commit() or "not from a checkout",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def git_commit() -> str | None:
    """The commit of this checkout of electra; None if it is installed, even if that is inside another repository."""
    root = Path(__file__).parents[2]
    pyproject = root / "pyproject.toml"
    is_checkout = (root / ".git").exists() and pyproject.exists() and shutil.which("git")
    if not is_checkout or 'name = "electra"' not in pyproject.read_text(encoding="utf-8").splitlines():
        return None
    command = ["git", "--git-dir", str(root / ".git"), "rev-parse", "HEAD"]  # overrides GIT_DIR
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def installed_version(library: str) -> str | None:
    """The version of a library; None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


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
    """Start a team of OpenMP threads and keep it until `end` is set."""
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
