"""Replaced token detection on rows that one generator corrupted once: the same for all runs of a study."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from electra.config import build_config
from electra.data.shards import Shards
from electra.model.storage import load_model, read_model_config
from electra.pretraining.config import CorruptConfig
from electra.pretraining.held_out import read_corrupted_rows, write_corrupted_rows
from electra.runfolder import file_checksum, read_stored, write_stored
from electra.studies.config import StudyConfig
from electra.studies.runs import StudyRun
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World
from electra.training.hardware import choose_device

FIXED_RTD, CORRUPTED_ROWS = "fixed-rtd", "corrupted.safetensors"
NUM_CORRUPTED_ROWS = 4096


@dataclass(frozen=True)
class FixedRTD:
    """Metrics of a discriminator on the corrupted rows, and what they are of."""

    checkpoint: str
    rows: str  # checksum of the file
    metrics: dict[str, float]  # empty for a model without discriminator


def find_corrupted_rows(runs: list[StudyRun], config: StudyConfig) -> Path | None:
    """The file of corrupted rows; if it is missing, it is made with the first finished run that has a generator, and
    None if there is no such run."""
    path = config.corrupted_rows or config.output / CORRUPTED_ROWS
    if not path.exists():
        with_generator = (run for run in runs if read_model_config(find_model_folder(run.folder)).generator is not None)
        first = next(with_generator, None)
        if first is None:
            return None
        packing = "examples" if first.config.loader.packing == "examples" else "packed"
        write_corrupted_rows(
            build_config(
                CorruptConfig,
                model=first.folder,
                data=config.data,
                output=path,
                rows=NUM_CORRUPTED_ROWS,
                packing=packing,
                device=config.device,
            )
        )
    return path


@torch.no_grad()
def measure_fixed_rtd(run: StudyRun, rows: Path, shards: Shards, config: StudyConfig) -> None:
    """Evaluate the discriminator of a run on the corrupted rows, and store the metrics."""
    folder, path = find_model_folder(run.folder), fixed_rtd_file(run, config)
    checksum = file_checksum(rows)
    if path.exists():
        stored = read_stored(path, FixedRTD)
        if (stored.checkpoint, stored.rows) == (folder.name, checksum):
            return
    device = choose_device(config.device)
    electra = load_model(folder).float().to(device).eval()
    positions = min(encoder.positions for encoder in electra.config.encoder_configs().values())
    metrics = read_corrupted_rows(rows, shards, positions).evaluate(electra, shards.tokenizer, World(device))
    path.parent.mkdir(exist_ok=True)
    write_stored(path, asdict(FixedRTD(folder.name, checksum, metrics)))


def fixed_rtd_file(run: StudyRun, config: StudyConfig) -> Path:
    return config.output / FIXED_RTD / f"{run.name}.json"


def read_fixed_rtd(run: StudyRun, config: StudyConfig) -> dict[str, float]:
    """The stored metrics of a run; empty if there are none."""
    path = fixed_rtd_file(run, config)
    return read_stored(path, FixedRTD).metrics if path.exists() else {}
