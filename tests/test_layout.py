"""The house: stages stand in the order the data flows, and imports only point back."""

import ast
from pathlib import Path

import electra

HOUSE = Path(electra.__file__).parent
STAGES = [
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
FLOW = ["errors", "config", "random", "runfolder", "plotting", *STAGES]
FLOW += ["commands", "__init__", "doctor", "demo", "cli", "__main__"]


def stage_of(module: str) -> str:
    """The stage of a dotted name: electra.data.shards → text."""
    return module.split(".")[1]


def imported_stages(source: str) -> set[str]:
    """The stages a source imports anywhere in it, so that a lazy import hides no arrow."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module="electra", names=names):
                found |= {f"electra.{name.name}" for name in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
    return {stage_of(name) for name in found if name.startswith("electra.")}


def later_imports(stage: str, source: str) -> set[str]:
    """The stages imported by `source` that stand behind `stage` in the flow."""
    return {other for other in imported_stages(source) if other in FLOW and FLOW.index(other) > FLOW.index(stage)}


def test_imports_point_back():
    modules = [(path.relative_to(HOUSE), path.read_text()) for path in HOUSE.glob("**/*.py")]
    assert len(modules) > 8
    arrows = {str(path): later_imports(path.with_suffix("").parts[0], source) for path, source in modules}
    assert {path: stages for path, stages in arrows.items() if stages} == {}


def test_a_forward_import_is_seen_even_when_lazy():
    lazy = "def late():\n    from electra.training.trainer import train\n"
    assert later_imports("model", lazy) == {"training"}
    assert later_imports("cli", lazy) == set()
    assert later_imports("data", "from electra import model") == {"model"}


def test_every_stage_stands_in_the_flow_and_says_what_it_does():
    stages = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert stages == set(STAGES)
    for stage in stages:
        assert ast.get_docstring(ast.parse((HOUSE / stage / "__init__.py").read_text()))


def test_modules_stay_small():
    long = {path.name: lines for path in HOUSE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450}
    assert long == {}
