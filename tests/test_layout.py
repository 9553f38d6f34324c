"""Packages are in the order of the data flow, and imports only point back along it."""

import ast
from pathlib import Path

import electra

ROOT = Path(electra.__file__).parent
PACKAGES = [
    "data",
    "kernels",
    "model",
    "huggingface",
    "objectives",
    "training",
    "pretraining",
    "finetuning",
    "report",
    "export",
    "serve",
]
ORDER = ["errors", "config", "random", "runfolder", "plotting", *PACKAGES]
ORDER += ["commands", "__init__", "doctor", "demo", "cli", "__main__"]


def imported_parts(source: str) -> set[str]:
    """The packages and top-level modules of electra that a source imports, also inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules |= {name.name for name in names}
            case ast.ImportFrom(module="electra", names=names):
                modules |= {f"electra.{name.name}" for name in names}
            case ast.ImportFrom(module=str(module)):
                modules.add(module)
    return {module.split(".")[1] for module in modules if module.startswith("electra.")}


def forward_imports(part: str, source: str) -> set[str]:
    """The parts imported by `source` that come after `part`."""
    return {other for other in imported_parts(source) if other in ORDER and ORDER.index(other) > ORDER.index(part)}


def test_imports_point_back():
    sources = {path.relative_to(ROOT): path.read_text() for path in ROOT.glob("**/*.py")}
    assert len(sources) > 50
    forward = {str(path): forward_imports(path.with_suffix("").parts[0], source) for path, source in sources.items()}
    assert {path: parts for path, parts in forward.items() if parts} == {}


def test_a_forward_import_inside_a_function_is_noticed():
    source = "def train():\n    from electra.training.trainer import Trainer\n"
    assert forward_imports("model", source) == {"training"}
    assert forward_imports("cli", source) == set()
    assert forward_imports("data", "from electra import model") == {"model"}


def test_every_package_has_a_place_in_the_order_and_a_docstring():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(PACKAGES)
    for package in packages:
        assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


def test_modules_have_at_most_450_lines():
    long = {path.name: lines for path in ROOT.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450}
    assert long == {}
