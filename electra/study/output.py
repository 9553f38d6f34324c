"""The output folders of `electra study` and `electra analyze`: whose they are, and what they were started with."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from electra.errors import DataError
from electra.runfolder import CONFIG, check_same_settings, is_missing_or_empty, read_json, read_stored, write_stored


@dataclass(frozen=True)
class OutputRecord:
    """The config.json of an output folder."""

    command: Literal["study", "analyze"]
    settings: dict[str, Any]  # that everything in the folder has in common

    def check(self, folder: Path) -> None:
        """Raise if a folder is not empty and was not started by this command with these settings."""
        if is_missing_or_empty(folder):
            return
        if not (folder / CONFIG).exists() or read_json(folder / CONFIG).get("command") != self.command:
            raise DataError(
                f"{folder} is not empty and not the output of electra {self.command}; choose another --output"
            )
        check_same_settings(folder, read_stored(folder / CONFIG, OutputRecord).settings, self.settings)

    def write(self, folder: Path) -> None:
        write_stored(folder / CONFIG, asdict(self))
