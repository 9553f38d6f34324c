"""`electra doctor`: what this machine has, and what a run would use of it."""

from dataclasses import dataclass

import torch

from electra.training.hardware import (
    COMPILERS,
    can_compile,
    choose_device,
    choose_precision,
    device_memory,
    environment,
    installed_version,
    measure_flops,
)

EXTRAS = {
    # extra: its libraries, and what they are for
    "hub": (("datasets",), "corpora from the hub"),
    "parquet": (("pyarrow",), "parquet files"),
    "zstd": (("zstandard",), ".zst files"),
    "plot": (("matplotlib",), "curves and histograms"),
    "tensorboard": (("tensorboard",), "TensorBoard"),
    "yaml": (("pyyaml",), "--config files in YAML"),
}


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Say what this machine has and what will be used."""

    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    environment: dict[str, str]
    uses: dict[str, str]
    extras: dict[str, str]

    def __str__(self) -> str:
        lines = []
        for title, table in (("this machine", self.environment), ("a run uses", self.uses), ("extras", self.extras)):
            lines += [title, *(f"  {name:<13}{value}" for name, value in table.items())]
        return "\n".join(lines)


def examine(config: DoctorConfig) -> Diagnosis:
    """Look at the machine."""
    device = choose_device("auto")
    precision = choose_precision("auto", device)
    uses = {
        "device": device.type,
        "precision": str(precision).removeprefix("torch."),
        "memory": f"{device_memory(device) / 1e9:.0f} GB",
        "speed": f"{measure_flops(device, precision) / 1e12:.2f} TFLOP/s in a plain matrix product",
        "threads": str(torch.get_num_threads()),
        "compiling": "works" if can_compile(device) else f"needs {COMPILERS[device.type]}",
    }
    return Diagnosis(environment(), uses, {name: extra(*row) for name, row in EXTRAS.items()})


def extra(libraries: tuple[str, ...], purpose: str) -> str:
    """One line on an extra: its libraries' versions, or how to get it."""
    missing = [library for library in libraries if installed_version(library) is None]
    found = ", ".join(f"{library} {installed_version(library)}" for library in libraries)
    return f"{purpose}: " + (f"pip install {' '.join(missing)}" if missing else found)
