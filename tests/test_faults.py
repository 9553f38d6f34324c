"""The trial of `faults.py`: a sample of it here, a larger one in `make test-slow`."""

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
def test_a_larger_sample_of_faults_loses_nothing_and_is_answered_with_sentences():
    run_trial("--cases", "1000")
