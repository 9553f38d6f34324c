"""`electra doctor`: the hardware and libraries of this machine, and what a run would use."""

import os
from dataclasses import dataclass

from electra.commands import WAIT_POLICY

EXTRAS = {
    # optional dependencies of pyproject.toml: library, purpose
    "hub": ("datasets", "corpora from the Hugging Face hub"),
    "parquet": ("pyarrow", "Parquet files"),
    "zstd": ("pyarrow", ".zst files"),
    "plot": ("matplotlib", "plots"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "yaml": ("pyyaml", "--config files in YAML"),
    "sklearn": ("scikit-learn", "estimators for scikit-learn"),
    "onnx": ("onnxruntime", "export to ONNX, with onnx and onnxscript"),
    "server": ("fastapi", "electra serve, with uvicorn"),
}


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show the hardware and libraries of this machine, and what a run would use."""

    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Diagnosis:
    environment: dict[str, str]
    uses: dict[str, str]
    extras: dict[str, str]

    def __str__(self) -> str:
        lines = []
        for title, table in (("this machine", self.environment), ("a run uses", self.uses), ("extras", self.extras)):
            lines += [title, *(f"  {name:<15}{value}" for name, value in table.items())]
        return "\n".join(lines)


def diagnose(config: DoctorConfig) -> Diagnosis:
    import torch

    from electra.model.config import PACKAGED_MODEL
    from electra.training import hardware
    from electra.training.checkpoint import has_packaged_model

    device = hardware.choose_device("auto")
    precision = hardware.choose_dtype("auto", device)
    memory = hardware.device_memory_bytes(device)
    can_compile = hardware.can_compile(device)
    uses = {
        "device": device.type,
        "precision": str(precision).removeprefix("torch."),
        "memory": f"{memory / 1e9:.0f} GB" if memory else "unknown",
        "speed": f"{hardware.measure_flops_per_second(device, precision) / 1e12:.2f} TFLOP/s in a matrix product",
        "threads": f"{torch.get_num_threads()}, {WAIT_POLICY} {os.environ.get(WAIT_POLICY, 'not set')}",
        "packaged model": str(PACKAGED_MODEL) if has_packaged_model() else "none, so that commands need --model",
        "torch.compile": "works" if can_compile else f"needs {hardware.COMPILERS[device.type]}",
    }
    extras = {name: describe_extra(*row) for name, row in EXTRAS.items()}
    return Diagnosis(hardware.describe_environment(), uses, extras)


def describe_extra(library: str, purpose: str) -> str:
    """The version of an extra's library, or how to install it."""
    from electra.training.hardware import installed_version

    version = installed_version(library)
    return f"{purpose}: {library} {version}" if version else f"{purpose}: pip install {library}"
