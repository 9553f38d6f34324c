"""Run folders: atomic writes, one process at a time, changed settings."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from kills import killed

from electra.errors import ConfigError, DataError, check_range
from electra.pretraining.command import pretrain
from electra.resumable import open_resumable
from electra.runfolder import (
    LOCK,
    PARTIAL,
    check_same_settings,
    checkpoint_folders,
    create_folder_atomically,
    damaged_file_error,
    describe_changed_settings,
    dump_json,
    file_checksum,
    is_missing_or_empty,
    lock_folder,
    open_atomic,
    read_json,
    read_stored,
    remove_partial_files,
    remove_written_folder,
    write_checksums,
    write_file,
    write_json,
)
from electra.training.logging import read_metrics


def test_a_second_process_is_refused_and_changes_nothing(run_config):
    config = run_config(resume=True)
    draft = config.output / f"checkpoints/.step-000000010-x{PARTIAL}"
    draft.mkdir(parents=True)
    with (
        lock_folder(config.output),
        pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is using {config.output}; .*another --output"),
    ):
        pretrain(config)
    assert draft.exists()


def test_a_lock_holds_across_processes_and_names_its_holder(tmp_path):
    program = f"""
from pathlib import Path
from electra.runfolder import lock_folder
with lock_folder(Path({str(tmp_path / "run")!r})):
    print("locked", flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .* is using"), lock_folder(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK).exists()
        holder.communicate(b"\n")
    assert not (tmp_path / "run").exists()
    with lock_folder(tmp_path / "run"):
        pass


def sleep_in(folder: Path) -> None:
    with lock_folder(folder):
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_a_killed_process_releases_its_lock(tmp_path):
    assert killed(sleep_in, tmp_path / "run", after=0.3)
    assert (tmp_path / "run" / LOCK).exists()
    assert is_missing_or_empty(tmp_path / "run")
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "run" / LOCK).exists()


def test_created_folders_that_stay_empty_are_removed(tmp_path):
    (tmp_path / "runs").mkdir()
    with lock_folder(tmp_path / "runs/deep/run"):
        assert (tmp_path / "runs/deep/run" / LOCK).exists()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_system_without_locks_is_used_unlocked(tmp_path, monkeypatch):
    def fail(self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "_acquire", fail)
    with lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run"):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_file(tmp_path / "a", "old")
    with pytest.raises(TypeError), open_atomic(tmp_path / "a") as file:
        file.write(b"not text")
    assert (tmp_path / "a").read_text() == "old"
    with pytest.raises(FileNotFoundError), create_folder_atomically(tmp_path / "b") as draft:
        (draft / "missing").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_process_left_of_a_folder_is_removed_when_it_is_written_again(tmp_path):
    folder = tmp_path / "checkpoints/step-000000010"
    if (child := os.fork()) == 0:
        with create_folder_atomically(folder) as draft:
            (draft / "half").touch()
            os._exit(0)
    os.waitpid(child, 0)
    assert checkpoint_folders(tmp_path) == []
    with create_folder_atomically(folder) as draft:
        (draft / "whole").touch()
    assert [path.name for path in folder.parent.rglob("*")] == [folder.name, "whole"]


def test_a_signal_while_a_folder_is_removed_leaves_nothing_of_it(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("ours")
    write_checksums(tmp_path / "old")
    remove = iter([stop, shutil.rmtree])
    monkeypatch.setattr("electra.runfolder.shutil.rmtree", lambda *args, **options: next(remove)(*args, **options))
    with pytest.raises(SystemExit):
        remove_written_folder(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []


def stop(folder: Path) -> None:
    raise SystemExit


def test_only_partial_files_of_our_own_are_removed(tmp_path):
    (tmp_path / f"below/.model-x{PARTIAL}").mkdir(parents=True)
    (tmp_path / f"below/index.json{PARTIAL}").touch()
    for name in ("download.partial", ".hidden", "below/notes.txt"):
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"download.partial", ".hidden", "below", "below/notes.txt"}


def test_partial_files_of_a_command_in_a_subfolder_are_kept(tmp_path):
    with lock_folder(tmp_path), lock_folder(tmp_path / "tuned"):
        (tmp_path / f"tuned/.model{PARTIAL}").mkdir()
        remove_partial_files(tmp_path)
        assert (tmp_path / f"tuned/.model{PARTIAL}").exists()
        remove_partial_files(tmp_path / "tuned")
        assert not (tmp_path / f"tuned/.model{PARTIAL}").exists()


def test_json_has_no_nan(tmp_path):
    text = dump_json({"loss": float("nan"), "list": [1.0, float("inf")], "path": Path("x")})
    assert json.loads(text) == {"loss": None, "list": [1.0, None], "path": "x"}


@dataclass(frozen=True)
class Inner:
    """A dataclass as stored in a file."""

    count: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, "count", at_least=0, at_most=2**40)


@dataclass(frozen=True)
class Outer:
    """A dataclass with another in it."""

    inner: Inner
    rest: dict[str, Any]
    score: float | None


def test_a_dataclass_is_read_as_it_was_stored(tmp_path):
    value = Outer(Inner(3, ("a", "b")), {"x": [1, {"y": None}]}, 0.5)
    write_json(tmp_path / "value.json", asdict(value))
    assert read_stored(tmp_path / "value.json", Outer) == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"inner": ', "truncated"),
        (b'{"inner": "\xff"}', "can't decode"),
        (b'{"inner": NaN}', "malformed"),
        (b'{"rest": ' + b"[" * 100_000, "too deeply nested"),
        (b'{"inner": {"count": 1, "names": []}, "score": null}', "missing required field `rest`"),
        (b'{"inner": {"count": 1}, "rest": {}, "score": null}', "unknown field - at `inner.names`"),
        (b'{"inner": {"count": 1, "names": []}, "rest": {}, "score": null, "x": 1}', "unknown field - at `x`"),
        (b'{"inner": {"count": true, "names": []}, "rest": {}, "score": 1}', "Expected `int`, got `bool`"),
        (b'{"inner": {"count": 1' + b"0" * 30 + b', "names": []}, "rest": {}, "score": 1}', "at most 1099511627776"),
        (b'{"inner": {"count": 1, "names": []}, "rest": {}, "score": 1e999}', "out of range"),
    ],
)
def test_a_file_of_another_form_is_one_error_that_names_it(tmp_path, content, reason):
    (tmp_path / "value.json").write_bytes(content)
    with pytest.raises(
        DataError,
        match=rf"value.json is damaged or not in the expected format \(.*{reason}.*\); (copy or create|use the v)",
    ):
        read_stored(tmp_path / "value.json", Outer)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("seed-0/result.json", "remove .*seed-0, then run electra finetune"),
        ("seed-0/model/model.safetensors", "remove .*seed-0, then run electra finetune"),
        ("seed-models/ours/model.safetensors", "copy or create it again"),
    ],
)
def test_of_fine_tuning_runs_alone_the_folder_of_the_seed_is_to_be_removed(tmp_path, name, advice):
    (tmp_path / name).parent.mkdir(parents=True)
    assert "copy or create it again" in str(damaged_file_error(tmp_path / name, "it is damaged"))  # a run named seed-0
    (tmp_path / name.split("/")[0] / "result.json").touch()
    assert re.search(advice, str(damaged_file_error(tmp_path / name, "it is damaged")))


def test_a_file_of_another_version_is_not_to_be_removed(tmp_path):
    folder = tmp_path / "checkpoints" / "step-000000001"
    folder.mkdir(parents=True)
    (folder / "value.json").write_text('{"inner": {"count": 1}, "rest": {}, "score": null}')
    write_checksums(folder)
    with pytest.raises(DataError, match=r"at `inner.names`\); use the version of electra that wrote it$"):
        read_stored(folder / "value.json", Outer)
    (folder / "value.json").write_text('{"inner": 1, "rest": {}, "score": null}')
    write_checksums(folder)
    with pytest.raises(DataError, match=r"Expected `object`.*use the version of electra that wrote it$"):
        read_stored(folder / "value.json", Outer)
    (tmp_path / "value.json").write_text('{"inner": 1, "rest": {}, "score": null}')
    with pytest.raises(DataError, match=r"Expected `object`.*use the version of electra that wrote it$"):
        read_stored(tmp_path / "value.json", Outer)


def test_pipes_and_endless_or_huge_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics.jsonl is damaged .*not a file"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.json")
    for name in ("zero.json", "fifo.json"):
        with pytest.raises(DataError, match=f"has no {name}"):
            read_json(tmp_path / name)
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="more than any such file has"):
        read_json(tmp_path / "huge.json")


def test_metrics_of_any_number_of_lines_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("electra.runfolder.MAX_JSON_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": step, "loss": 1.5} for step in range(100)]
    path.write_text("".join(dump_json(line) + "\n" for line in lines) + '{"kind": "tr')
    assert read_metrics(path) == lines
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match=r"metrics.jsonl is damaged .*; remove its line 101"):
        read_metrics(path)


def test_a_resumable_file_is_closed_before_it_gets_its_name(tmp_path, monkeypatch):
    """Windows renames no open file."""
    replace, closed = os.replace, []

    def replace_file(source, target):
        closed.append(output.file.closed)
        replace(source, target)

    monkeypatch.setattr("electra.resumable.os.replace", replace_file)
    with open_resumable(tmp_path / "out.txt", {}) as output:
        output.file.write(b"text")
    assert closed == [True]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out.txt", b"text")]


def test_changed_settings_are_listed(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    before = {
        "length": 128,
        "seed": 1,
        "max_steps": 5,
        "corpus": {"1.txt": "4 bytes"},
        "rows.csv": file_checksum(tmp_path / "a"),
    }
    now = {
        "length": 64,
        "seed": 1,
        "max_steps": None,
        "corpus": {"2.txt": "4 bytes"},
        "rows.csv": file_checksum(tmp_path / "b"),
    }
    assert describe_changed_settings(before, now) == [
        "--length was 128 and is now 64",
        "--max-steps was 5 and is now unset",
        "corpus 2.txt was absent and is now 4 bytes",
        "rows.csv has other content",
    ]
    with pytest.raises(ConfigError, match="x was started with other settings: --length was 128 and is now 64; use the"):
        check_same_settings(Path("x"), before, now, ignore=("max_steps", "corpus", "rows.csv"))
    with pytest.raises(ConfigError, match=r"^part 1 was started with other settings: .* has other content; try again$"):
        check_same_settings("part 1", before, now, advice="try again")
    check_same_settings(tmp_path, before, now, ignore=("length", "max_steps", "corpus", "rows.csv"))
