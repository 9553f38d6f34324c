"""Packages are in the order of the data flow, imports only point back along it, and modules stay small."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import electra

ROOT = Path(electra.__file__).parent
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGES = [
    "data",
    "kernels",
    "model",
    "huggingface",
    "objectives",
    "training",
    "pretraining",
    "finetuning",
    "reporting",
    "onnx",
    "exporting",
    "studies",
    "serving",
]
ORDER = ["errors", "formatting", "config", "random", "signals", "runfolder", "progress", "resumable", "plotting"]
ORDER += [*PACKAGES, "sklearn", "commands", "__init__", "baselines", "diagnosis", "demonstration", "cli", "__main__"]


def module_name(path: Path) -> str:
    """electra/model/config.py → electra.model.config; electra/model/__init__.py → electra.model."""
    return ".".join(("electra", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """Those of `modules` that a source imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases):
                # the package, of which only its version may be imported everywhere, is always imported first
                members = {f"{module}.{alias.name}" for alias in aliases} - {"electra.__version__"}
                names |= members & modules
                names |= {module} if members - modules else set()
    return names & modules


IMPORTS = {module: imported_modules(source, set(SOURCES)) for module, source in SOURCES.items()}


def rank(module: str) -> int:
    """The position of a module's package, or of a top-level module, in the order."""
    return ORDER.index(module.split(".")[1] if "." in module else "__init__")


def forward_imports(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    return {(module, other) for module, others in imports.items() for other in others if rank(other) > rank(module)}


def test_imports_are_recognised_in_all_their_forms():
    source = """
import torch, electra.runfolder
from electra import plotting, load
from electra.model.config import EncoderConfig
def train():
    from electra.training import trainer
"""
    modules = {"electra", "electra.runfolder", "electra.plotting", "electra.model.config"}
    modules |= {"electra.training", "electra.training.trainer"}
    assert imported_modules(source, modules) == modules - {"electra.training"}
    assert imported_modules("from electra import __version__", modules) == set()


def test_every_module_has_a_place_in_the_order():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(PACKAGES)
    assert {path.parent for path in ROOT.rglob("*.py")} == {ROOT, *(ROOT / package for package in PACKAGES)}
    assert {path.stem for path in ROOT.glob("*.py")} == set(ORDER) - set(PACKAGES)


def test_imports_point_back():
    assert forward_imports(IMPORTS) == set()
    imports = {"electra.model.encoder": {"electra.data.loader", "electra.training.trainer"}}
    assert forward_imports(imports) == {("electra.model.encoder", "electra.training.trainer")}


def test_modules_do_not_import_each_other_in_a_cycle():
    TopologicalSorter(IMPORTS).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"heads": {"encoder"}, "encoder": {"config"}, "config": {"heads"}}).prepare()


def test_a_module_imports_at_most_15_others_besides_errors_and_formatting():
    counts = {module: len(others - {"electra.errors", "electra.formatting"}) for module, others in IMPORTS.items()}
    assert {module: count for module, count in counts.items() if count > 15} == {}


def test_modules_have_at_most_450_lines():
    assert {module: lines for module, text in SOURCES.items() if (lines := len(text.splitlines())) > 450} == {}


def test_modules_and_packages_have_a_docstring():
    assert [module for module, source in SOURCES.items() if not ast.get_docstring(ast.parse(source))] == []


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_names_that_benchmarks_import_exist(script):
    """Most scripts need a GPU and minutes, so few of them run in tests."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("electra"):
            assert {alias.name for alias in node.names} <= names_defined(node.module), node.module


def names_defined(module: str) -> set[str]:
    """Names that can be imported from a module, without importing it: some need Triton."""
    names = {name.removeprefix(f"{module}.") for name in SOURCES if name.startswith(f"{module}.")}
    for node in ast.parse(SOURCES[module]).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign() | ast.AnnAssign():
                names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names
