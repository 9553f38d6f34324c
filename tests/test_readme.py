"""The README keeps its word: its Python runs, its commands exist, and what it points to is there."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from electra.cli import COMMANDS, parse
from electra.pretraining.command import pretrain

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_in_the_readme_runs(capsys, run_config, tmp_path, monkeypatch):
    pretrain(run_config("runs/x"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    own = [block for block in blocks if "from_pretrained" not in block]  # that one needs a folder of the reader's
    assert own
    for block in own:
        exec(block, {})
    assert "discriminator" in capsys.readouterr().out


@pytest.mark.parametrize("line", re.findall(r"^    electra (.*?)(?: +#.*)?$", README, re.MULTILINE))
def test_commands_in_the_readme_are_understood(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.json").write_text('{"pretraining": {"data": "shards"}}')  # a run that can be resumed
    name, *flags = shlex.split(line)
    module, configuration, *_ = COMMANDS[name]
    parse(name, getattr(importlib.import_module(module), configuration), flags)


def test_the_readme_names_every_extra_and_only_targets_that_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [(first, others)] = re.findall(r"pip install '\.\[(\w+)\]' .* other extras: (.*)", README)
    assert {first, *others.split(", "), "dev"} == set(extras)
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize(("path", "names"), re.findall(r"`(\w+/\w+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", README))
def test_what_the_readme_points_to_is_there(path, names):
    source = (ROOT / "electra" / path).read_text()
    for name in re.findall(r"\w+", names):
        assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), f"{path} has no {name}"
