"""The trial of `faults.py`: a small sample of it here, a large one in `make test-slow`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "faults.py"


def run_trial(*options: str) -> None:
    ended = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stderr[-5000:]}\n{ended.stdout}"


def test_a_sample_of_faults_loses_nothing_and_is_answered_with_sentences():
    run_trial("--cases", "40")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--only", "hostile"), ("--cases", "2000")], ids=["hostile files", "all kinds"])
def test_many_faults_lose_nothing_and_are_answered_with_sentences(options):
    run_trial(*options)
