"""electra doctor: this machine, what a run uses, and what features need."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import error_message

from electra import diagnosis
from electra.cli import main
from electra.config import OPENMP, WAIT_VARIABLES
from electra.diagnosis import FEATURES, Feature, Missing, check_feature
from electra.training import hardware


def test_doctor_shows_what_a_run_uses(capsys):
    main(["doctor"])
    assert "  compile        " in capsys.readouterr().out
    main(["doctor", "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["environment"]["torch"] == torch.__version__
    assert diagnosis["uses"]["device"] in ("cpu", "cuda")
    assert diagnosis["features"].keys() == FEATURES.keys()


def test_features_have_the_libraries_of_their_extras():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for name, requirements in project["optional-dependencies"].items():
        if name not in ("dev", "docs"):
            libraries = {re.match(r"[\w-]+", each)[0] for each in requirements if not each.startswith("electra[")}
            assert libraries == set(FEATURES[name].libraries), name


def test_missing_libraries_are_installed_by_one_command():
    state = check_feature(Feature("tests", ("pytest", "no-such-library", "nor-this")))
    assert state.versions == {"pytest": pytest.__version__}
    expected = "no    tests: needs no-such-library, nor-this; run: pip install no-such-library nor-this"
    assert str(state) == expected
    assert str(check_feature(Feature("tests", ("pytest",)))) == f"yes   tests: pytest {pytest.__version__}"


def test_a_feature_that_is_missing_gives_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(FEATURES, "onnx", Feature("export to ONNX", ("no-such-library",)))
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "onnx"])
    assert exit.value.code == 1
    assert capsys.readouterr().out.endswith("needs no-such-library; run: pip install no-such-library\n")


def test_an_unknown_feature_is_an_error(capsys):
    assert "choose from gpu, kernels, " in error_message("doctor gqu", capsys)


@pytest.mark.parametrize(
    ("has_driver", "cuda", "missing"),
    [
        (False, None, Missing("an NVIDIA GPU with its driver", "")),
        (True, "13.0", Missing("an NVIDIA GPU with its driver", "")),
        (True, None, Missing("a PyTorch that is built for CUDA", "pip install --force-reinstall torch==2.12.1")),
    ],
)
def test_a_gpu_that_pytorch_cannot_use(monkeypatch, has_driver, cuda, missing):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    monkeypatch.setattr(shutil, "which", lambda program: program if has_driver else None)
    assert diagnosis.find_missing_gpu() == missing


def test_triton_is_not_proposed_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("electra.training.hardware.installed_version", lambda library: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert "run:" not in str(check_feature(FEATURES["kernels"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(check_feature(FEATURES["kernels"])).endswith("needs triton; run: pip install triton")


def test_a_missing_compiler_is_installed_by_the_package_manager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda program: program if program == "dnf" else None)
    missing = diagnosis.find_missing_compiler()
    assert missing == Missing("a C++ compiler (g++)", "sudo dnf install gcc-c++")


def describe_waiting(monkeypatch, environment: dict[str, str], device: str = "cpu", num_threads: int = 2) -> str:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hardware, "CPU_TIMES", Path(__file__))  # exists on any system
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    return diagnosis.describe_waiting(torch.device(device))


def test_doctor_says_how_threads_wait_and_who_chose_it(monkeypatch):
    assert "OMP_WAIT_POLICY=PASSIVE (from the environment" in describe_waiting(
        monkeypatch, {"OMP_WAIT_POLICY": "PASSIVE"}
    )
    assert "set by electra" in describe_waiting(monkeypatch, OPENMP)


def test_doctor_says_that_threads_sleep_beside_busy_programs_where_they_do(monkeypatch):
    sentence = "during training they sleep immediately"
    assert sentence in describe_waiting(monkeypatch, OPENMP)
    assert sentence not in describe_waiting(monkeypatch, OPENMP, num_threads=1)
    assert sentence not in describe_waiting(monkeypatch, OPENMP, device="cuda")
