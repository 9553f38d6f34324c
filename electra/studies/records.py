"""Records of finished runs, with the metrics of replaced token detection on rows that one generator corrupted once."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from electra.config import build_config
from electra.data.shards import open_shards
from electra.model.storage import load_model, read_model_config
from electra.pretraining.config import CorruptConfig
from electra.pretraining.corrupt import read_corrupted_rows, write_corrupted_rows
from electra.runfolder import file_checksum, write_stored
from electra.studies.config import StudyConfig
from electra.studies.runs import StudyRun
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World
from electra.training.hardware import choose_device

CORRUPTED_ROWS, NUM_CORRUPTED_ROWS = "corrupted.safetensors", 4096


def find_corrupted_rows(runs: list[StudyRun], config: StudyConfig) -> Path | None:
    """The file of corrupted rows; if it is missing, it is made with the first of the runs that has a generator, and
    None if there is no such run."""
    path = corrupted_rows_file(config)
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


def corrupted_rows_file(config: StudyConfig) -> Path:
    return config.corrupted_rows or config.output / CORRUPTED_ROWS


@torch.no_grad()
def record_run(run: StudyRun, rows: Path | None, config: StudyConfig) -> None:
    """Store the record of a finished run, with the metrics of its discriminator on the corrupted rows."""
    checksum = None if rows is None else file_checksum(rows)
    stored = run.read_record()
    if stored is not None and stored.corrupted_rows == checksum:
        return
    metrics: dict[str, float | None] = {}
    if rows is not None:
        assert config.data is not None
        shards, device = open_shards(config.data), choose_device(config.device)
        electra = load_model(find_model_folder(run.folder)).float().to(device).eval()
        positions = min(encoder.positions for encoder in electra.config.encoder_configs().values())
        metrics |= read_corrupted_rows(rows, shards, positions).evaluate(electra, shards.tokenizer, World(device))
    run.record_file.parent.mkdir(exist_ok=True)
    record = replace(stored or run.build_record(), corrupted_rows=checksum, fixed_rtd=metrics)
    write_stored(run.record_file, asdict(record))
