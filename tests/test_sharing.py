"""One GPU for several processes: a daemon that is started, asked, and told to quit."""

import os
import stat

import pytest

from electra.finetune import sharing
from electra.finetune.sharing import CONTROL, PIPES, can_share, shared_gpu, workers_on


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A control program that writes down what it is told, and where; it fails if it is asked to."""
    told = tmp_path / "told"

    def build(fails: bool = False):
        program = tmp_path / CONTROL
        program.write_text(f'#!/bin/sh\necho "$1$(cat) ${PIPES}" >> {told}\nexit {int(fails)}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv(PIPES, raising=False)
        return lambda: [line.split() for line in told.read_text().splitlines()]

    return build


def test_it_is_started_where_it_works_and_told_to_quit(daemon, monkeypatch):
    told = daemon()
    monkeypatch.setattr(sharing, "reaches_gpu", lambda places: True)
    assert can_share()
    with shared_gpu():
        folder = os.environ[PIPES]
        assert os.path.isdir(folder)
        assert not can_share()  # who is inside already shares
    assert [line[0] for line in told()] == ["-d", "quit"]
    assert {line[1] for line in told()} == {folder}
    assert PIPES not in os.environ
    assert not os.path.exists(folder)


@pytest.mark.parametrize("fails", [True, False])
def test_processes_take_turns_where_it_does_not_work(daemon, fails):
    daemon(fails)  # a daemon that says yes, without a GPU behind it, is found out too
    with shared_gpu():
        assert PIPES not in os.environ


def test_it_quits_when_the_work_fails(daemon, monkeypatch):
    told = daemon()
    monkeypatch.setattr(sharing, "reaches_gpu", lambda places: True)
    with pytest.raises(ZeroDivisionError), shared_gpu():
        raise ZeroDivisionError
    assert told()[-1][0] == "quit"
    assert PIPES not in os.environ


def test_workers_go_by_memory_where_the_gpu_can_be_shared(daemon, monkeypatch, tmp_path):
    daemon()
    assert [workers_on(size * 2**30) for size in (8, 24, 80, 141)] == [2, 2, 5, 8]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert workers_on(141 * 2**30) == 2
