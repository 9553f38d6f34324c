"""One GPU for several processes: a daemon that is started, asked, and told to quit."""

import os
import stat
import time

import pytest

from electra.finetuning import gpu_sharing as sharing
from electra.finetuning.gpu_sharing import CONTROL, PIPES, VISIBLE, shared_gpu

WORKS, FAILS = "raise SystemExit(0)", "raise SystemExit(1)"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Make a control program that writes down what it is told, where, and which GPUs it sees."""
    notes = tmp_path / "told"
    program = tmp_path / CONTROL
    program.write_text(f'#!/bin/sh\necho "$1$(cat) ${PIPES} [${VISIBLE}]" >> {notes}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(sharing, "PROBE", WORKS)
    return lambda: [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []


def test_it_is_started_where_it_works_and_told_to_quit(told, monkeypatch):
    monkeypatch.setenv(VISIBLE, "3")
    with shared_gpu() as is_shared:
        folder = os.environ[PIPES]
        assert is_shared
        assert os.path.isdir(folder)
    assert told() == [["-d", folder, "[]"], ["quit", folder, "[]"]]  # the daemon sees all GPUs, processes choose
    assert PIPES not in os.environ
    assert not os.path.exists(folder)


def test_processes_take_turns_where_the_gpu_is_out_of_reach(told, monkeypatch):
    monkeypatch.setattr(sharing, "PROBE", FAILS)
    with shared_gpu() as is_shared:
        assert not is_shared
        assert PIPES not in os.environ
        assert [line[0] for line in told()] == ["-d", "quit"]  # it does not stay for nothing


def test_a_gpu_that_does_not_answer_is_not_waited_for(told, monkeypatch):
    monkeypatch.setattr(sharing, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(sharing, "PATIENCE", 0.5)
    began = time.monotonic()
    with shared_gpu() as is_shared:
        assert not is_shared
    assert time.monotonic() - began < 30


def test_where_somebody_shares_it_already_no_daemon_is_started(told, monkeypatch):
    monkeypatch.setenv(PIPES, "theirs")
    with shared_gpu() as is_shared:
        assert is_shared
    assert os.environ[PIPES] == "theirs"
    assert not told()


def test_it_quits_when_the_work_fails(told):
    with pytest.raises(ZeroDivisionError), shared_gpu():
        raise ZeroDivisionError
    assert told()[-1][0] == "quit"
    assert PIPES not in os.environ


def test_without_it_processes_take_turns(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PIPES, raising=False)
    with shared_gpu() as is_shared:
        assert not is_shared
