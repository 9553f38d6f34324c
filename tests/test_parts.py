"""`electra shard --part`: several machines make the same bytes as one, in a folder that they share or one each."""

import json
import multiprocessing
import os
import shutil

import pytest
from kills import kill_repeatedly
from test_prepare import FILES, command, config, content, run_failing, text, write_random_words

from electra.data.parts import Part
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.errors import ConfigError, DataError
from electra.runfolder import lock_folder

assert text  # a fixture


def test_parts_in_one_folder_make_the_bytes_of_a_single_run(text):
    for number, unfinished in ((3, [1, 2]), (1, [2]), (2, [])):
        assert shard(config(text, part=f"{number}/3")).unfinished_parts == unfinished
    parts = {path.relative_to(text.parent / "shards"): path.read_bytes() for path in files(text)}
    shutil.rmtree(text.parent / "shards")
    shard(config(text))
    assert parts == {path.relative_to(text.parent / "shards"): path.read_bytes() for path in files(text)}


def files(text):
    return [path for path in sorted((text.parent / "shards").rglob("*")) if path.is_file()]


def test_folders_of_parts_copied_together_become_a_single_run(text):
    for number in (1, 2):
        shard(config(text, f"machine-{number}", part=f"{number}/2"))
        shutil.copytree(text.parent / f"machine-{number}", text.parent / "shards", dirs_exist_ok=True)
    result = shard(config(text, part="1/2"))
    assert (result.shards, result.new_shards, result.unfinished_parts) == (FILES, 0, [])
    shard(config(text, "whole"))
    assert content(text.parent / "shards") == content(text.parent / "whole")


def test_a_part_makes_only_its_shards_and_names_the_others(text):
    result = shard(config(text, part="2/4"))
    names = sorted(path.name for path in (text.parent / "shards").glob("*.safetensors"))
    assert names == ["00001.safetensors", "00005.safetensors"]
    assert "made 2 of 2 shards" in str(result)
    assert "parts to be finished before the shards can be used: 1, 3, 4" in str(result)
    with pytest.raises(DataError, match=r"unfinished \(finished parts: 1\)"):
        open_shards(text.parent / "shards")


def test_more_parts_than_shards(text):
    for number in range(1, FILES + 3):
        shard(config(text, part=f"{number}/{FILES + 2}"))
    shard(config(text, "whole"))
    assert content(text.parent / "shards") == content(text.parent / "whole")


@pytest.mark.parametrize("part", ["5/4", "0/4", "1", "a/b", "1/0", "-1/4", "1/4/2"])
def test_a_part_that_does_not_exist_is_a_one_line_error(text, capsys, part):
    error = run_failing(capsys, *command(config(text)), f"--part={part}")
    assert f"--part is {part}; it must be I/N with I from 1 to N" in error
    assert not (text.parent / "shards").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": "2/3"}, r"--part was I/2 and is now I/3"),
        ({"part": None}, r"--part was I/2 and is now unset"),
        ({"part": "2/2", "document_end": "line"}, "--document-end was blank-line and is now line"),
    ],
)
def test_parts_of_other_runs_are_refused(text, change, message):
    shard(config(text, part="1/2"))
    before = {path: path.read_bytes() for path in files(text)}
    with pytest.raises(ConfigError, match=message):
        shard(config(text, **change))
    assert before == {path: path.read_bytes() for path in files(text)}


def test_parts_made_with_other_settings_are_not_merged(text):
    shard(config(text, "machine-1", part="1/2"))
    shard(config(text, "machine-2", part="2/2", validation_fraction=0.5))
    for machine in (2, 1):
        shutil.copytree(text.parent / f"machine-{machine}", text.parent / "shards", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"part 2/2 in .* --validation-fraction was 0.5 and is now 0.2"):
        shard(config(text, part="1/2"))
    assert not (text.parent / "shards/index.json").exists()


def test_a_shard_that_was_lost_while_copying_is_made_again_by_its_part(text):
    for number in (1, 2):
        shard(config(text, f"machine-{number}", part=f"{number}/2"))
        shutil.copytree(text.parent / f"machine-{number}", text.parent / "shards", dirs_exist_ok=True)
    (text.parent / "shards/00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"00003.safetensors is missing .* repeat --part 2/2"):
        shard(config(text, part="1/2"))
    assert shard(config(text, part="2/2")).new_shards == 1
    shard(config(text, "whole"))
    assert content(text.parent / "shards") == content(text.parent / "whole")


def test_parts_of_different_texts_are_not_merged(text):
    shard(config(text, part="1/2"))
    record = text.parent / "shards/part-1-of-2.json"
    stored = json.loads(record.read_text())
    del stored["checksum"], stored["shards"][1]  # as if the text had ended there
    record.write_text(json.dumps(stored))
    with pytest.raises(DataError, match=r"none of the 2 parts .* has made 00002.safetensors"):
        shard(config(text, part="2/2"))


def test_a_part_of_a_finished_folder_makes_only_what_is_damaged_of_it(text):
    shard(config(text))
    before = content(text.parent / "shards")
    (text.parent / "shards/00003.safetensors").unlink()
    assert shard(config(text, part="1/2")).new_shards == 0
    assert shard(config(text, part="2/2")).new_shards == 1
    assert content(text.parent / "shards") == before


def test_a_part_cannot_run_twice_at_once_nor_beside_a_run_of_all(text, monkeypatch):
    monkeypatch.setattr("electra.data.parts.WAIT_SECONDS", 0.1)
    with lock_folder(text.parent / "shards"), pytest.raises(ConfigError, match=r"is using .*shards"):
        shard(config(text, part="1/2"))
    with Part(1, 2).lock(text.parent / "shards"):
        with pytest.raises(ConfigError, match=r"is using .*part-1-of-2.json"):
            shard(config(text, part="1/2"))
        shard(config(text, part="2/2"))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_parts_that_run_at_the_same_time_make_the_bytes_of_a_single_run(text):
    run_together(text, 6)
    shard(config(text, "whole"))
    assert content(text.parent / "shards") == content(text.parent / "whole")


def run_together(text, count: int) -> None:
    """Run all parts in processes of their own."""
    context = multiprocessing.get_context("fork")
    configs = [config(text, part=f"{number}/{count}") for number in range(1, count + 1)]
    processes = [context.Process(target=run_and_exit, args=(each,)) for each in configs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


def run_and_exit(part: ShardConfig) -> None:
    shard(part)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_parts_killed_at_random_times_continue_to_the_same_bytes(tmp_path):
    text = write_random_words(tmp_path, files=20, words=5000)
    parts = [config(text, part=f"{number}/3") for number in (1, 2, 3)]
    for part in parts:
        kill_repeatedly(shard, part, times=10, within=0.1)
    for part in parts:
        shard(part)
    shard(config(text, "uninterrupted"))
    assert content(parts[0].output) == content(tmp_path / "uninterrupted")
