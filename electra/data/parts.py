"""Parts of the shards of a corpus that several machines make: part I of N makes every N-th shard.

All parts read the whole text, which determines the shards, and encode only their own. Each part that is finished stores
a record in the folder of the shards; whichever finds the records of all parts there writes the index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra.data.shards import PART_RECORD, ShardInfo, open_shard_file, shard_file_name, shard_number
from electra.errors import ConfigError, DataError
from electra.runfolder import check_same_settings, lock_file, lock_folder, make_folder_removed_if_empty, read_stored

WAIT_SECONDS = 300.0  # for other parts that start or end at the same time


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, by default all shards."""

    number: int = 1  # from 1 on
    count: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def contains(self, shard_name: str) -> bool:
        """Whether this part makes a shard."""
        return shard_number(shard_name) % self.count == self.number - 1

    def select(self, shards: list[ShardInfo]) -> list[ShardInfo]:
        """Those of some shards that this part makes."""
        return [shard for shard in shards if self.contains(shard.name)]

    def record_path(self, output: Path) -> Path:
        return output / PART_RECORD.format(self.number, self.count)

    @contextmanager
    def lock(self, output: Path) -> Iterator[None]:
        """Keep others from making the same shards: the folder is locked for all of them, a record for a part."""
        lock = lock_folder(output) if self.is_whole else lock_file(self.record_path(output))
        with make_folder_removed_if_empty(output), lock:
            yield

    def lock_shared_files(self, output: Path) -> AbstractContextManager[None]:
        """Keep other parts from writing what belongs to all of them: settings, tokenizer and index."""
        return nullcontext() if self.is_whole else lock_folder(output, WAIT_SECONDS)


def parse_part(text: str | None) -> Part:
    """The part that `--part I/N` names."""
    if text is None:
        return Part()
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    part = Part(*map(int, match.groups())) if match else Part(0, 0)
    if not 1 <= part.number <= part.count:
        raise ConfigError(
            f"is {text}; it must be I/N with I from 1 to N, such as 1/4 for the first of four", field="part"
        )
    return part


@dataclass(frozen=True)
class PartRecord:
    """The shards of a finished part."""

    settings: dict[str, Any]
    shards: list[ShardInfo]


def read_part_record(output: Path, part: Part, settings: dict[str, Any]) -> PartRecord | None:
    """The record of a part, if it is finished; raises if it was made with other settings."""
    path = part.record_path(output)
    if not path.exists():
        return None
    record = read_stored(path, PartRecord)
    advice = "make all parts with the same settings, in a new folder"
    check_same_settings(f"part {part.number}/{part.count} in {output}", record.settings, settings, advice=advice)
    return record


def find_unfinished_parts(output: Path, count: int) -> list[int]:
    """The numbers of the parts without a record."""
    return [number for number in range(1, count + 1) if not Part(number, count).record_path(output).exists()]


def merge_parts(output: Path, count: int, settings: dict[str, Any]) -> list[ShardInfo]:
    """The shards of all parts, which are finished, in order.

    Raises if a part was made with other settings or from another text, or if one of its shards is damaged."""
    shards: list[ShardInfo] = []
    for number in range(1, count + 1):
        record = read_part_record(output, Part(number, count), settings)
        assert record is not None
        for shard in record.shards:
            advice = f" although its part is finished; repeat --part {number}/{count}"
            open_shard_file(output / shard.name, advice).check_entry(shard)
        shards += record.shards
    shards.sort(key=lambda shard: shard_number(shard.name))
    for number, shard in enumerate(shards):
        if shard.name != shard_file_name(number):
            raise DataError(
                f"none of the {count} parts in {output} has made {shard_file_name(number)}: they were made from "
                "different texts; make them again in a new folder"
            )
    return shards


def remove_part_records(output: Path) -> None:
    """Remove the records of all parts, which the index replaces."""
    for path in output.glob(PART_RECORD.format("*", "*")):
        if re.fullmatch(PART_RECORD.format(r"\d+", r"\d+"), path.name):
            path.unlink(missing_ok=True)
