"""Commands, flags, Python code, links and references to the source in the documentation are valid."""

import ast
import re
import shlex
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

import electra
from electra.cli import find_command, parse_config
from electra.commands import COMMANDS, Command
from electra.config import settings_by_name
from electra.errors import ConfigError
from electra.model.config import ModelConfig
from electra.pretraining.config import DataRecord, RunRecord
from electra.runfolder import write_stored

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {  # the log has commands of past versions
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "electra/kernels/README.md")
    if path.name != "log.md"
}
TEXT = "\n".join(PAGES.values())
SCRIPT_PAGE = "docs/python.md"
KUBERNETES_JOB = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGES["docs/scaling.md"], re.DOTALL)[1])
[KUBERNETES_COMMAND] = KUBERNETES_JOB["spec"]["template"]["spec"]["containers"][0]["args"]
LINES = re.sub(
    r"\$\w+", "1", f"{TEXT}\n    {KUBERNETES_COMMAND}\n".replace("\\\n", "")
)  # variables of Slurm and Kubernetes
COMMAND_LINES = sorted(
    {
        *re.findall(r"^    (?:srun )?electra (.*?)(?: +#.*)?$", LINES, re.MULTILINE),
        *re.findall(r"^ExecStart=\S+/electra (.*)$", LINES, re.MULTILINE),
    }
)
INLINE_COMMANDS = sorted(set(re.findall(r"`electra ([a-z][^`…]*)`", TEXT)))
TORCHRUN_LINES = sorted(
    set(re.findall(r"^    (?:srun )?torchrun (.*) -m electra (.*?)(?: +#.*)?$", LINES, re.MULTILINE))
)
TOOLS = {"export", "hf", "rsync"}  # lines that begin with another program than those that have tests
SCRIPTS = {path.name: path.read_text() for path in (*ROOT.glob("benchmarks/*.py"), ROOT / "tests/faults.py")}
SCRIPT_LINES = sorted(set(re.findall(r"^    python (?:benchmarks|tests)/(\S+) (.*?)(?: +#.*)?$", TEXT, re.MULTILINE)))


def test_the_readme_fits_on_a_page():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_are_parsed(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    record = RunRecord(
        model=ModelConfig().electra_config(),
        pretraining={"data": "shards"},
        data=DataRecord(tokens={}, tokenizer=""),
        command="",
        environment={},
    )
    write_stored(Path("runs/x/config.json"), asdict(record))  # a run that can be resumed
    name, *flags = shlex.split(line)
    parse_config(name, find_command(name).load_config_class(), flags)


@pytest.mark.parametrize("line", INLINE_COMMANDS)
def test_commands_within_sentences_are_parsed(line):
    """They may leave out what a command needs: `electra export --to page`."""
    name, *flags = shlex.split(line.replace("FEATURE", "gpu"))
    try:
        parse_config(name, find_command(name).load_config_class(), [flag for flag in flags if flag != "--help"])
    except ConfigError as error:
        if not re.search(r"^missing |needs a value|holds no run", str(error)):
            raise


def test_every_line_of_commands_begins_with_a_known_program():
    blocks = re.findall(r"(?<=\n\n)    (?:[a-z]+ .*)\n(?:    .*\n)*", re.sub(r"```.*?```", "", LINES, flags=re.DOTALL))
    programs = {line.split()[0] for block in blocks for line in block.splitlines() if not line.strip().startswith("#")}
    assert programs - {"electra", "torchrun", "srun", "python", "python3", "pip", "make", "."} <= TOOLS


@pytest.mark.parametrize(("launcher", "command"), TORCHRUN_LINES)
def test_torchrun_commands_are_parsed(launcher, command):
    name, *flags = shlex.split(command)
    parse_config(name, find_command(name).load_config_class(), flags)
    assert find_command(name).runs_on_ranks
    arguments = get_args_parser().parse_args([*shlex.split(launcher), "-m", "electra"])
    assert (arguments.training_script, bool(arguments.max_restarts)) == ("electra", "--resume" in flags)


def test_every_command_is_documented():
    assert {line.split()[0] for line in COMMAND_LINES} >= COMMANDS.keys() - {"demo"}  # that one is `make demo`


@pytest.mark.parametrize(("script", "arguments"), SCRIPT_LINES)
def test_benchmark_scripts_have_the_flags(script, arguments):
    """The scripts' parsers are inside their main functions, so this reads their source."""
    for flag in re.findall(r"--[\w-]+", arguments):
        field = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in SCRIPTS[script] or re.search(rf"^    {field}: ", SCRIPTS[script], re.MULTILINE), flag


def test_flags_in_the_text_exist():
    flags = {"--config", "--help", *get_args_parser()._option_string_actions}  # also those of torchrun
    for command in COMMANDS.values():
        for setting in settings_by_name(command.load_config_class()).values():
            flags |= {setting.flag, setting.flag.replace("--", "--no-", 1)}
    flags |= {flag for source in SCRIPTS.values() for flag in re.findall(r'"(--[\w-]+)"', source)}
    text = re.sub(r"^    .*$", "", TEXT, flags=re.MULTILINE)  # command lines have tests of their own
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert mentioned - flags == set()
    assert len(mentioned) > 30


def test_python_blocks_run(finished_run, finetuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "runs/x")
    shutil.copytree(finetuned.output, "tuned/reviews")
    electra.export(model="runs/x", output="hf/mine")
    blocks = python_blocks("\n".join(text for page, text in PAGES.items() if page != SCRIPT_PAGE))
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, {})


def test_the_page_about_python_is_one_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in python_blocks(PAGES[SCRIPT_PAGE]):
        exec(block, names)
    assert [step for step, _ in names["losses"]] == [10, 20, 30, 40]
    assert names["vectors"].shape[0] == 2
    assert Path("hf/first/model.safetensors").exists()
    assert "\r" not in capsys.readouterr().err  # no progress bar without a terminal


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_calls_in_the_text_have_valid_arguments(monkeypatch):
    monkeypatch.setattr(Command, "load_function", lambda command: lambda config: config)
    calls = re.findall(r"`(electra\.\w+\([^`]*=[^`]*\))`", TEXT)
    assert calls
    for call in calls:
        assert type(eval(call, {"electra": electra})).__name__.endswith("Config")


def test_extras_and_make_targets_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [(first, others)] = re.findall(r"pip install '\.\[(\w+)\]' .* other extras: (.*)", README)
    assert {first, *others.split(", "), "dev"} == set(extras)
    named = {extra for listed in re.findall(r"pip install '\.\[(.*?)\]'", TEXT) for extra in listed.split(",")}
    assert named <= set(extras)
    targets = re.findall(r"(?:^ +|`)make ([\w-]+)", TEXT, re.MULTILINE)
    assert {"test", "demo"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]):
        if not link.startswith("https://"):
            assert ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_references_to_the_source_exist(page):
    """`RTDHead` (`model/heads.py`), or `model/heads.py`: `RTDHead`, `CopyGate`."""
    for before, path, after in re.findall(
        r"(?:`([\w.]+)` \()?`([\w/]+\.py)`(?:: ((?:`[\w.]+`(?:, )?)+))?", PAGES[page]
    ):
        [source] = [file for file in (ROOT / path, ROOT / "electra" / path) if file.exists()] or pytest.fail(path)
        missing = set(re.findall(r"[\w.]+", f"{before} {after}")) - names_in(source)
        assert not missing, f"{path} has no {', '.join(missing)}"


def test_names_in_the_architecture_exist():
    text = re.sub(r"```.*?```", "", PAGES["docs/architecture.md"], flags=re.DOTALL)
    names = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", text) if not name.endswith(".py")}
    words = {word for path in (ROOT / "electra").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    assert names - words == set()
    assert len(names) > 30


def test_the_source_tree_lists_the_modules_of_each_folder():
    tree = dict(re.findall(r"^  (\w+)/ +(.*)$", PAGES["docs/architecture.md"], re.MULTILINE))
    folders = {path.parent.name: path.parent for path in (ROOT / "electra").glob("*/__init__.py")}
    assert tree.keys() == folders.keys()
    for folder in tree.keys() - {"kernels"}:  # its README has them
        listed = set(re.split(r"\W+", re.sub(r"\(.*?\)", "", tree[folder]).strip()))
        modules = {path.stem for path in folders[folder].glob("*.py")} - {"__init__"}
        assert listed | {"config"} == modules | {"config"}, folder  # `config` is explained below the tree


def names_in(source: Path) -> set[str]:
    """The names that a module defines, and Class.name for what is in its classes."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        defined = defined_names(node)
        names |= defined
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for part in node.body for name in defined_names(part)}
    return names


def defined_names(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()
