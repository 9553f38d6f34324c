"""One GPU for several processes at the same time: NVIDIA's MPS, where it is there.

Without it their kernels take turns, and small ones leave most of the GPU idle: twenty small models fine-tuned side by
side then take as long as one after the other.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 20  # seconds
MEMORY = 16 * 2**30  # bytes: room for a base model with its optimizer and activations
PROBE = (
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); "
    "raise SystemExit(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(c.byref(x), 0))"
)


def can_share() -> bool:
    """Whether processes can be told to share a GPU; those of a machine where somebody saw to it already need not."""
    return shutil.which(CONTROL) is not None and PIPES not in os.environ


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Let processes that are started meanwhile use the GPU at the same time; where that fails they take turns."""
    with TemporaryDirectory(prefix="electra-mps-") as folder:
        places = {PIPES: folder, LOGS: folder}
        try:
            if told("-d", places=places) and reaches_gpu(places):
                os.environ.update(places)
            yield
        finally:
            for name in places:
                os.environ.pop(name, None)
            told(places=places, spoken="quit")


def told(*words: str, places: dict[str, str], spoken: str = "") -> bool:
    """Whether the daemon did what it was told, by its command line or by its input."""
    try:
        done = subprocess.run(
            [CONTROL, *words], env=os.environ | places, input=spoken, text=True, timeout=PATIENCE, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def reaches_gpu(places: dict[str, str]) -> bool:
    """Whether a process gets to the GPU by way of the daemon."""
    probe = subprocess.run([sys.executable, "-c", PROBE], env=os.environ | places, check=False, capture_output=True)
    return probe.returncode == 0


def workers_on(memory: int) -> int:
    """How many models are fine-tuned side by side on a GPU of so many bytes, unless the user says."""
    return min(8, max(2, memory // MEMORY)) if can_share() else 2
