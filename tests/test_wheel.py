"""The package as others get it: a wheel built from the source distribution, installed in an environment of its own."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_server import ask
from synthetic import write_glue

import electra
from electra.commands import COMMANDS

ROOT = Path(__file__).parent.parent
TINY = "--size tiny --layers 1 --width 32 --heads 2 --feedforward 64 --length 16 --batch-size 8 --steps 4 --device cpu"
SMALL = "size=tiny layers=1 width=32 heads=2 feedforward=64 length=16 batch_size=8 evaluation_rows=16"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("build") is None, reason="build is not installed: pip install build"),
]

SMOKE = f"""
demo --quick --steps 4 --output demo --json
tokenizer --corpus texts.txt --vocab-size 100 --output vocab --json
shard --corpus texts.txt --tokenizer vocab --output shards --validation-fraction 0.2 --json
inspect shards --json
flops --size tiny --json
pretrain --data shards --output run {TINY} --json
corrupt --model run --data shards --output rows.safetensors --json
report run --output report --json
detect --model run --json "the cat sat on the mat"
fill --model run --json "the [MASK] sat"
embed --model run --json "the cat sat"
finetune --model run --train train.csv --text text --label label --epochs 1 --device cpu --output tuned --json
evaluate --model tuned --input train.csv --device cpu --json
predict --model tuned --input train.csv --output predictions.csv --device cpu --json
glue --model run --data glue --tasks rte --seeds 1 --epochs 1 --device cpu --output table --json
probe --model run --data glue --tasks rte --seeds 1 --settings small epochs=1 --device cpu --output probe.jsonl --json
study styles --data shards --output study --steps 2 --pretraining {SMALL} --device cpu --json
analyze --model run --data shards --rows 16 --map-tokens 20 --device cpu --output analysis --json
export --model run --output hf --json
import --from hf --output imported --json
doctor --json
completion bash
"""


def run(*command: object, folder: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)), cwd=folder, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A source distribution, and a wheel built from it by the installed setuptools: tests have no network."""
    folder = tmp_path_factory.mktemp("dist")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).splitlines()
    for name in files:  # a copy, because setuptools writes beside the source
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source", folder=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def environment(distributions, tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    [wheel] = distributions.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, folder=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_the_distributions_hold_what_they_should(distributions):
    [wheel], [source] = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"electra", f"electra-{electra.__version__}.dist-info"}
    assert {"electra/py.typed", "electra/replaced_words.jsonl"} <= set(names)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "electra").rglob("*.py")}
    assert modules <= set(names)
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml", "docs/data.md", "tests/conftest.py"} <= inside


def test_every_command_has_help(environment, tmp_path):
    assert run(environment / "electra", "--version", folder=tmp_path) == f"electra {electra.__version__}\n"
    where = run(environment / "python", "-c", "import electra; print(electra.__file__)", folder=tmp_path)
    assert where.startswith(str(environment.parent))
    for command in COMMANDS:
        assert "Usage: electra" in run(environment / "electra", command, "--help", folder=tmp_path)


def test_commands_run(environment, tmp_path):
    """Each command on the output of those before it."""

    random.seed(0)
    words = {"pet": ["the cat sat on the mat", "a dog ran in the house"], "bird": ["a bird flew over the tree"]}
    lines = [" . ".join(random.choices([each for texts in words.values() for each in texts], k=6)) for _ in range(200)]
    (tmp_path / "texts.txt").write_text("\n\n".join(lines))
    write_glue(tmp_path / "glue", rows=40)
    rows = [f"{text} {number},{label}" for number in range(12) for label, texts in words.items() for text in texts]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]))
    for line in SMOKE.strip().splitlines():
        name, *flags = shlex.split(line)
        output = run(environment / "electra", name, *flags, folder=tmp_path, OMP_NUM_THREADS="1")
        if "--json" in flags:
            assert isinstance(json.loads(output.strip().splitlines()[-1]), dict), line
    assert (tmp_path / "predictions.csv").read_text().count("\n") == len(rows) + 1
    serving = [environment / "electra", "serve", "--model", "run", "--port", "0", "--no-page", "--device", "cpu"]
    with subprocess.Popen(list(map(str, serving)), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        [port] = re.findall(r"http://127.0.0.1:(\d+) ", next(server.stderr))
        assert ask(int(port), "/health")[1]["methods"] == ["detect", "fill", "embed"]
        server.terminate()
    assert server.returncode == 0
    assert {line.split()[0] for line in SMOKE.strip().splitlines()} == COMMANDS.keys() - {"serve"}
