"""`electra doctor`: the hardware and libraries of this machine, what a run would use, and what features need."""

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from electra.config import OPENMP, PACKAGED_MODEL, Positional, wait_settings
from electra.errors import check_choice
from electra.exporting.node_packages import has_node_packages

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Missing:
    """Something that a feature needs and this machine does not have."""

    what: str
    command: str  # that installs it; empty if no command can


@dataclass(frozen=True)
class Feature:
    """A feature that needs more than the package itself."""

    purpose: str
    libraries: tuple[str, ...] = ()  # those of the extra with the name of the feature, if there is one
    check: Callable[[], Missing | None] = lambda: None


def find_missing_gpu() -> Missing | None:
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        version = torch.__version__.split("+")[0]
        return Missing("a PyTorch that is built for CUDA", f"pip install --force-reinstall torch=={version}")
    return Missing("an NVIDIA GPU with its driver", "")


def find_missing_triton() -> Missing | None:
    """A GPU, and only where there is one the library, which is of no use without it."""
    from electra.training.hardware import installed_version

    missing = find_missing_gpu()
    return missing or (None if installed_version("triton") else Missing("triton", "pip install triton"))


def find_missing_compiler() -> Missing | None:
    from electra.training import hardware

    device = hardware.choose_device("auto")
    if hardware.can_compile(device):
        return None
    if device.type == "cuda" and shutil.which("gcc"):
        return Missing("triton", "pip install triton")
    installers = {"apt-get": "sudo apt-get install g++", "dnf": "sudo dnf install gcc-c++"}
    installers |= {"xcode-select": "xcode-select --install"} if platform.system() == "Darwin" else {}
    command = next((command for program, command in installers.items() if shutil.which(program)), "")
    return Missing(hardware.COMPILERS[device.type], command)


def find_missing_npm() -> Missing | None:
    if has_node_packages() or shutil.which("npm"):
        return None
    command = "sudo apt-get install npm" if shutil.which("apt-get") else ""
    return Missing("npm, which fetches its JavaScript libraries", command)


FEATURES = {
    "gpu": Feature("training and inference on a GPU", check=find_missing_gpu),
    "kernels": Feature("our Triton kernels on a GPU", check=find_missing_triton),
    "compile": Feature("torch.compile (--compile on)", check=find_missing_compiler),
    "hub": Feature("corpora from the Hugging Face hub", ("datasets",)),
    "parquet": Feature("Parquet files", ("pyarrow",)),
    "zstd": Feature(".zst files", ("pyarrow",)),
    "plot": Feature("plots", ("matplotlib",)),
    "tensorboard": Feature("TensorBoard (--tensorboard)", ("tensorboard",)),
    "wandb": Feature("metrics in Weights & Biases (--track wandb)", ("wandb",)),
    "trackio": Feature("metrics in Trackio (--track trackio)", ("trackio",)),
    "yaml": Feature("--config files in YAML", ("pyyaml",)),
    "sklearn": Feature("estimators for scikit-learn", ("scikit-learn",)),
    "onnx": Feature("export to ONNX", ("onnx", "onnxscript", "onnxruntime")),
    "page": Feature("a page that runs a model (--to page)", ("onnx", "onnxscript", "onnxruntime"), find_missing_npm),
    "ray": Feature("shards and fine-tuning on a Ray cluster (--ray)", ("ray",)),
    "server": Feature("electra serve", ("fastapi", "uvicorn")),
}


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show the hardware and libraries of this machine, what a run would use, and which features work; with the name of
    a feature, only what it needs and the command that installs what is missing (exit code 1 if anything is)."""

    feature: Positional[str | None] = None
    """A feature of the list, such as kernels or onnx."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.feature is not None:
            check_choice(self, "feature", FEATURES)


@dataclass(frozen=True)
class FeatureState:
    purpose: str
    versions: dict[str, str]  # of installed libraries
    missing: list[Missing]

    def __str__(self) -> str:
        if not self.missing:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            return f"yes   {self.purpose}{versions and f': {versions}'}"
        commands = " && ".join(each.command for each in self.missing if each.command)
        needs = " and ".join(each.what for each in self.missing)
        return f"no    {self.purpose}: needs {needs}{commands and f'; run: {commands}'}"


@dataclass(frozen=True)
class Diagnosis:
    environment: dict[str, str]
    uses: dict[str, str]
    features: dict[str, FeatureState]
    exit_code: int = 0

    def __str__(self) -> str:
        lines = []
        tables: dict[str, Mapping[str, object]]
        tables = {"this machine": self.environment, "a run uses": self.uses, "features": self.features}
        for title, table in tables.items():
            lines += [title, *(f"  {name:<15}{value}" for name, value in table.items())] if table else []
        return "\n".join(lines)


def diagnose(config: DoctorConfig) -> Diagnosis:
    """Describe this machine, or look for what one feature needs."""
    if config.feature is not None:
        state = check_feature(FEATURES[config.feature])
        return Diagnosis({}, {}, {config.feature: state}, exit_code=int(bool(state.missing)))
    from electra.training import hardware

    features = {name: check_feature(feature) for name, feature in FEATURES.items()}
    return Diagnosis(hardware.describe_environment(), describe_uses(), features)


def check_feature(feature: Feature) -> FeatureState:
    """The versions of a feature's libraries, and what is missing."""
    from electra.training.hardware import installed_version

    found = {library: installed_version(library) for library in feature.libraries}
    missing = [each] if (each := feature.check()) else []
    if absent := [library for library, version in found.items() if version is None]:
        missing.append(Missing(", ".join(absent), f"pip install {' '.join(absent)}"))
    return FeatureState(feature.purpose, {name: version for name, version in found.items() if version}, missing)


def describe_uses() -> dict[str, str]:
    """What a run with default settings uses of this machine."""
    import torch

    from electra.training import hardware
    from electra.training.checkpoint import has_packaged_model

    device = hardware.choose_device("auto")
    precision = hardware.choose_dtype("auto", device)
    memory = hardware.device_memory_bytes(device)
    return {
        "device": device.type,
        "precision": str(precision).removeprefix("torch."),
        "memory": f"{memory / 1e9:.0f} GB" if memory else "unknown",
        "speed": f"{hardware.measure_flops_per_second(device, precision) / 1e12:.2f} TFLOP/s in a matrix product",
        "threads": f"{torch.get_num_threads()}; OpenMP wait policy {describe_waiting(device)}",
        "packaged model": str(PACKAGED_MODEL) if has_packaged_model() else "none, so that commands need --model",
    }


def describe_waiting(device: "torch.device") -> str:
    """How threads that wait for each other do so, and who chose it."""
    import torch

    from electra.training.hardware import can_switch_spinning

    settings = wait_settings()
    chosen = "from the environment; electra changes nothing"
    if settings == OPENMP:
        chosen = "set by electra: threads spin briefly, then sleep"
        if can_switch_spinning(device, torch.get_num_threads()):
            chosen += "; during training they sleep immediately while other programs are busy on the same cores"
    return f"{', '.join(f'{name}={value}' for name, value in settings.items())} ({chosen})"
