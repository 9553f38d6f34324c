"""A run folder takes one process at a time, and one that died does not block it."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest
from kills import killed

from electra import runfolder as lock
from electra.errors import ConfigError
from electra.finetuning.command import FinetuneConfig
from electra.finetuning.jobs import jobs_of
from electra.pretraining.command import pretrain
from electra.runfolder import LOCK, held


def test_a_second_process_is_refused_by_name_and_touches_nothing(settings_of_run):
    config = settings_of_run(resume=True)
    draft = config.output / "checkpoints/.step-000000010-draft"
    draft.mkdir(parents=True)
    with held(config.output):
        sentence = rf"process {os.getpid()} on .* trains in {config.output} already; wait for it, .*another --output"
        with pytest.raises(ConfigError, match=sentence):
            pretrain(config)
    assert draft.exists()


def test_every_seed_of_a_fine_tuning_is_held_too(encoder_folder, tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\nthe cat,a\nthe dog,b\n" * 10)
    config = FinetuneConfig(model=encoder_folder, train=tmp_path / "rows.csv", output=tmp_path / "tuned", length=16)
    [cell] = jobs_of(config, config.the_task(), config.output)
    with held(cell.folder), pytest.raises(ConfigError, match=r"trains in .*seed-1 already"):
        cell.run()


def stay(run: Path) -> None:
    with held(run):
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_what_a_killed_process_left_does_not_block(tmp_path):
    assert killed(stay, tmp_path / "run", after=0.3)
    assert (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "run" / LOCK).exists()


def test_folders_made_for_nothing_are_removed_and_others_stay(tmp_path):
    (tmp_path / "runs").mkdir()
    with held(tmp_path / "runs/deep/run"):
        assert (tmp_path / "runs/deep/run" / LOCK).exists()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_disk_without_locks_locks_nothing(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "run"), held(tmp_path / "run"):
        pass


def test_a_lock_removed_before_it_was_got_is_made_again(tmp_path, monkeypatch):
    get, tries = lock.lock, []

    def get_too_late(file):
        if not tries:
            (tmp_path / LOCK).unlink()  # by a process that ends just now
        tries.append(file)
        return get(file)

    monkeypatch.setattr(lock, "lock", get_too_late)
    with held(tmp_path), pytest.raises(ConfigError, match="already"), held(tmp_path):
        pass
    assert len(tries) == 3
