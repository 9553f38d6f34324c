"""The package is imported and trains on a CPU without the modules that only Linux has; versions agree."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

import electra

ROOT = Path(__file__).parent.parent

WITHOUT_LINUX = """
import importlib, os, pkgutil, sys
import filelock, torch  # these choose other modules there
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises ImportError
for name in ("sched_getaffinity", "sysconf", "fork"):
    delattr(os, name)
import electra
"""

IMPORT_ALL = """
for module in pkgutil.walk_packages(electra.__path__, "electra."):
    if module.name == "electra.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert error.name == "triton", (module.name, error)  # kernels need it
"""

TRAIN = """
corpus, tokenizer, output = sys.argv[1:]
data = f"{output}/shards"
electra.shard(corpus=corpus, tokenizer=tokenizer, output=data, validation_fraction=0.1)
settings = {"size": "tiny", "layers": 1, "width": 32, "heads": 2, "feedforward": 64, "embedding_width": 16}
result = electra.pretrain(data=data, output=f"{output}/run", length=16, batch_size=4, steps=2, device="cpu", **settings)
print(result.step)
print(electra.load(f"{output}/run", device="cpu").detect("the cat").tokens)
"""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_package_is_imported_and_trains_without_modules_of_linux(shards, tmp_path):
    output = run_python(
        WITHOUT_LINUX + IMPORT_ALL + TRAIN, f"{shards.parent}/text.txt", f"{shards.parent}/vocab.txt", str(tmp_path)
    )
    assert output.startswith("2\n['[CLS]', 'the', 'cat'")


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == electra.__version__
    assert f"\n## {electra.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_issue_templates_are_valid():
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"):
        content = yaml.safe_load(template.read_text())
        assert {"name", "description", "body"} <= content.keys()
        assert json.dumps(content)
        assert len({part["id"] for part in content["body"]}) == len(content["body"])
