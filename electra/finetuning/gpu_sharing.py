"""One GPU for several processes at the same time: NVIDIA's MPS, where it is there.

Without it their kernels take turns, and small ones leave most of the GPU idle: six small models fine-tuned in three
processes took hardly less time than one after the other (docs/log.md).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
PATIENCE = 20  # seconds
PROBE = (
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); "
    "raise SystemExit(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(c.byref(x), 0))"
)


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Let processes that are started meanwhile use the GPU at the same time; False where they will take turns."""
    if PIPES in os.environ:  # somebody saw to it already
        yield True
        return
    if shutil.which(CONTROL) is None:
        yield False
        return
    with TemporaryDirectory(prefix="electra-mps-", ignore_cleanup_errors=True) as folder, daemon(folder) as is_there:
        if is_there:
            os.environ[PIPES] = folder
        try:
            yield is_there
        finally:
            os.environ.pop(PIPES, None)


@contextmanager
def daemon(folder: str) -> Iterator[bool]:
    """What shares the GPU, with its pipes in a folder; False where it does not start or the GPU is out of reach."""
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE} | {PIPES: folder, LOGS: folder}
    is_there = succeeds([CONTROL, "-d"], environment)  # it numbers all GPUs; processes then choose among them
    if is_there and not succeeds([sys.executable, "-c", PROBE], os.environ | {PIPES: folder}):
        succeeds([CONTROL], environment, "quit")
        is_there = False
    try:
        yield is_there
    finally:
        if is_there:
            succeeds([CONTROL], environment, "quit")


def succeeds(command: list[str], environment: dict[str, str], spoken: str = "") -> bool:
    """Whether a command does what it is for, and soon; `spoken` is its input."""
    try:
        done = subprocess.run(
            command, env=environment, input=spoken, text=True, timeout=PATIENCE, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
