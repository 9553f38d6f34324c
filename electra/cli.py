"""The command line: each command is a configuration and the function that takes it.

A command's flags are the fields of its configuration; their docstrings are the help. The function returns a result that
reads well as `str` and, with `--json`, is printed as the JSON of its fields.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_type_hints

import tyro

from electra import __version__
from electra.boxes import explanations, read_flags
from electra.errors import ConfigError, DataError
from electra.runfolder import dump_json
from electra.words import in_our_words

COMMANDS = {
    # command: (module, configuration, function, what it does); a module is imported only when its command runs
    "demo": ("electra.demo", "DemoConfig", "demonstrate", "from prose found here to an exported encoder, in minutes"),
    "tokenizer": ("electra.data.tokenizer", "TokenizerConfig", "train_tokenizer", "learn a vocabulary from text"),
    "shard": ("electra.data.prepare", "ShardConfig", "shard", "turn text into shards of tokens"),
    "inspect": ("electra.data.inspect", "InspectConfig", "inspect", "show what is in a folder of shards"),
    "pretrain": ("electra.pretraining.command", "PretrainConfig", "pretrain", "train a generator and a discriminator"),
    "finetune": ("electra.finetuning.command", "FinetuneConfig", "finetune", "fine-tune an encoder on a task"),
    "glue": ("electra.finetuning.glue", "GlueConfig", "glue", "fine-tune on all of GLUE, and make the table"),
    "evaluate": ("electra.finetuning.predict", "EvaluateConfig", "evaluate", "measure a fine-tuned model on a file"),
    "predict": ("electra.finetuning.predict", "PredictConfig", "predict", "let a fine-tuned model answer a file"),
    "detect": ("electra.serve.command", "DetectConfig", "detect", "say which tokens of a text look replaced"),
    "fill": ("electra.serve.command", "FillConfig", "fill", "fill in the [MASK]s of a text"),
    "embed": ("electra.serve.command", "EmbedConfig", "embed", "turn a text into a vector"),
    "doctor": ("electra.serve.doctor", "DoctorConfig", "examine", "say what this machine has and what will be used"),
    "flops": ("electra.report.costs", "FlopsConfig", "count_costs", "count a model's parameters and operations"),
    "report": ("electra.report.overview", "ReportConfig", "report", "compare runs: tables and plots"),
    "export": ("electra.export.command", "ExportConfig", "export", "hand a model to Hugging Face"),
    "import": (
        "electra.export.command",
        "ImportConfig",
        "import_model",
        "take a model from a Hugging Face folder",
    ),
}

FILE_OF_FLAGS = "Flags may also come from a file, --config FILE, in JSON or YAML; those given beside it win."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake of the user's ends in one sentence and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows what it can
    try:
        run(arguments)
    except ValueError as error:
        if not type(error).__module__.startswith("electra."):
            raise
        fail(str(error), arguments)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(told(error, arguments), arguments)


def told(error: OSError, arguments: list[str]) -> str:
    """No such file, no permission, disk full: the system's own sentence, but where a file is given for a folder."""
    if not error.filename:
        return str(error)
    path = Path(error.filename)
    files = [str(part) for part in (path, *path.parents) if part.is_file()]
    if files and isinstance(error, FileExistsError | NotADirectoryError):
        flags = {value: f"{flag} " for flag, value in pairwise(arguments) if flag.startswith("--")}
        return f"{flags.get(files[0], '')}{files[0]} is a file; name a folder"
    return f"{error.strerror or error}: {path}"


def fail(sentence: str, arguments: list[str]) -> NoReturn:
    """Say what is wrong, with `--json` also to the program that reads the output, and exit with 2."""
    print(f"electra: {sentence}", file=sys.stderr)
    if "--json" in before_texts(arguments):
        print(json.dumps({"error": sentence}))
    sys.exit(2)


def before_texts(arguments: list[str]) -> list[str]:
    """The arguments before a `--`, behind which all are texts."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def run(arguments: list[str]) -> None:
    """Find the command, read its settings, call its function, print its result."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return
    if arguments[0] == "--version":
        print(f"electra {__version__}")
        return
    name, *flags = arguments
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        advice = f"did you mean {close!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}; {advice}")
    _, configuration, function, _ = COMMANDS[name]
    stage = import_stage(name)
    settings = parse(name, getattr(stage, configuration), flags)
    with naming_flags(type(settings)):
        result = getattr(stage, function)(settings)
    if result is not None:
        is_json = getattr(settings, "json", False)
        print(dump_json(dataclasses.asdict(result)) if is_json else result)
    if code := getattr(result, "exit_code", 0):
        sys.exit(code)


def import_stage(name: str) -> ModuleType:
    """The module of a command, with all the libraries it needs."""
    return importlib.import_module(COMMANDS[name][0])


def overview() -> str:
    """All commands, a line each."""
    lines = ["usage: electra COMMAND [flags]    (electra COMMAND --help explains each flag)", ""]
    lines += [f"  {name:<12}{purpose}" for name, (_, _, _, purpose) in COMMANDS.items()]
    return "\n".join([*lines, "", FILE_OF_FLAGS])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def parse(name: str, configuration: type, flags: list[str]) -> Any:
    """Flags, and before them the fields of a `--config` file, as the command's configuration."""
    file, flags = config_file(flags)
    refuse_unknown(name, configuration, flags)
    before, placed = as_arguments(configuration, read_fields(file)) if file else ([], [])
    given = list(takewhile(lambda word: not word.startswith("-"), flags))  # what has no flag but a place
    is_given = bool(given) or "--" in flags
    flags = [*given, *before, *flags[len(given) :]]  # the last of two equal flags wins
    with naming_flags(configuration):
        if is_given or not placed:
            fields = parsed(name, configuration, flags)
        else:
            fields = parsed_beside(name, configuration, flags, placed)
        refuse_endless(fields)
        return configuration(**fields)


def parsed_beside(name: str, configuration: type, flags: list[str], placed: list[str]) -> dict[str, Any]:
    """The fields that flags give, and what a file gives by its place; unless that stands between flags after all."""
    try:
        return parsed(name, configuration, [*flags, "--", *placed])
    except ConfigError as error:
        with contextlib.suppress(ConfigError):
            return parsed(name, configuration, flags)
        raise error from None


def parsed(name: str, configuration: type, flags: list[str]) -> dict[str, Any]:
    """The fields that flags give a configuration, the others with their defaults."""
    defaults = preset(configuration, flags) if hasattr(configuration, "preset") else {}
    described, said = f"{inspect.getdoc(configuration)}\n\n{FILE_OF_FLAGS}", io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read_flags(configuration, defaults, prog=f"electra {name}", description=described, args=flags)
    except SystemExit as exit:
        if not exit.code:  # --help
            raise
        raise ConfigError(in_our_words(said.getvalue(), name, helps_of(configuration))) from None


def refuse_endless(fields: dict[str, Any]) -> None:
    """Refuse nan and inf, which are floats to Python and pass most comparisons."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number")


def refuse_unknown(name: str, configuration: type, arguments: list[str]) -> None:
    """Refuse a flag that is not there; tyro would take it for a text, or its value for one."""
    known = known_flags(configuration)
    for argument in before_texts(arguments):
        given = re.match(r"--?[a-zA-Z][\w-]*", argument)
        if given and given[0].replace("_", "-") not in ("-h", *(f"--{flag}" for flag in known)):
            close = nearest(given[0].strip("-"), known)
            advice = f"did you mean --{close}?" if close else f"electra {name} --help lists its flags"
            raise ConfigError(f"there is no flag {given[0]} in electra {name}; {advice}")


def known_flags(configuration: type) -> list[str]:
    """The names a flag may have, without dashes."""
    flags = [flag for flag in flags_of(configuration) if not flag.is_positional]
    return ["help", "config", *(flag.name for flag in flags), *(f"no-{flag.name}" for flag in flags if flag.is_switch)]


@contextlib.contextmanager
def naming_flags(configuration: type) -> Iterator[None]:
    """Turn the fields that errors speak of into flags: `learning_rate is 0` into `--learning-rate is 0`."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(with_flags(str(error), configuration)) from None


def with_flags(sentence: str, configuration: type) -> str:
    """The sentence with flags for fields where a word can be nothing else: it has a `_`, or is said to be a number."""
    flags = {flag.field: f"--{flag.name}" for flag in flags_of(configuration)}
    fields = r"(?<![\w/.'-])\w+_\w+(?![\w/.'-])|^\w+(?= is -?\d)|\w+(?= was \S+ and is now )"
    return re.sub(fields, lambda word: flags.get(word[0], word[0]), sentence)


def helps_of(configuration: type) -> dict[str, str]:
    """What the fields of a configuration say of themselves, by flag; what has none, by name."""
    said: dict[str, str] = {}
    for part in reversed(configuration.__mro__[:-1]):
        said |= explanations(part)
    return {flag.name if flag.is_positional else f"--{flag.name}": said[flag.field] for flag in flags_of(configuration)}


def preset(configuration: Any, flags: list[str]) -> dict[str, Any]:
    """Defaults that depend on some of the flags (a size, a recipe), so that --help shows them as they will be."""
    parser, switches = argparse.ArgumentParser(add_help=False, allow_abbrev=False), set()
    for flag in flags_of(configuration):
        parser.add_argument(f"--{flag.name}", dest=flag.field, nargs="?", default=argparse.SUPPRESS)
        switches |= {flag.field} if flag.is_switch else set()
    given = vars(parser.parse_known_args(flags)[0])
    return configuration.preset({name: value for name, value in given.items() if value is not None or name in switches})


@dataclasses.dataclass(frozen=True)
class Flag:
    """How a field of a configuration is given on the command line."""

    field: str
    name: str  # the field's, or the one its annotation gives it: some words cannot be fields in Python
    is_positional: bool  # given by its place, without a flag
    is_switch: bool  # --name or --no-name

    def arguments(self, value: Any) -> list[str]:
        """The arguments that give the field a value of a `--config` file."""
        if self.is_switch and isinstance(value, bool):
            return [f"--{self.name}" if value else f"--no-{self.name}"]
        values = [str(item) for item in (value if isinstance(value, list) else [value])]
        return values if self.is_positional else [f"--{self.name}", *values]


def flags_of(configuration: type) -> list[Flag]:
    """The flags of a configuration's fields."""
    hints = get_type_hints(configuration, include_extras=True)
    flags = []
    for field in dataclasses.fields(configuration):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())  # of Annotated
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name.replace("_", "-"))
        flags.append(Flag(field.name, name, is_positional=tyro.conf.Positional in marks, is_switch=hint is bool))
    return flags


def config_file(flags: list[str]) -> tuple[Path | None, list[str]]:
    """The file named by `--config FILE` or `--config=FILE`, and the flags without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    try:
        found, rest = parser.parse_known_args(flags)
    except argparse.ArgumentError:
        raise ConfigError("--config needs a file: a JSON or YAML file with the command's fields") from None
    return found.config, rest


def read_fields(path: Path) -> dict[Any, Any]:
    """The fields in a JSON or YAML file."""
    read = read_yaml if path.suffix in (".yaml", ".yml") else read_json
    if not path.exists() or path.is_dir():  # pipes are read, too
        raise ConfigError(f"there is no file {path}; --config takes a JSON or YAML file with the command's fields")
    try:
        fields = read(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}; write it as JSON or YAML") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a {type(fields).__name__}; a configuration is a table of fields")
    return fields


def read_json(text: str, path: Path) -> Any:
    """What a JSON file says."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def read_yaml(text: str, path: Path) -> Any:
    """What a YAML file says."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{path} is YAML, which needs: pip install pyyaml; or write it as JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def as_arguments(configuration: type, fields: dict[Any, Any]) -> tuple[list[str], list[str]]:
    """The arguments that the fields of a file stand for: those with flags, and those that are given by their place."""
    known = {flag.name: flag for flag in flags_of(configuration)}
    flags: list[str] = []
    placed: list[str] = []
    for key, value in fields.items():
        name = str(key).replace("_", "-")
        if name not in known:
            settings = ", ".join(sorted(known)).replace("-", "_")
            raise ConfigError(f"unknown setting {key!r}; the settings are {settings}")
        if value is not None:
            (placed if known[name].is_positional else flags).extend(known[name].arguments(value))
    return flags, placed
