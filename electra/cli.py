"""The command line: flags, help and `--config` files from the config dataclasses of the commands."""

import contextlib
import gc
import inspect
import io
import json
import os
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_origin

from cyclopts import App, Group, Parameter, Token
from cyclopts.exceptions import (
    CoercionError,
    ConsumeMultipleError,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from electra import __version__
from electra.commands import COMMANDS, Command
from electra.config import (
    PACKAGED_MODEL,
    Config,
    Positional,
    Setting,
    all_defaults,
    config_from_flat_values,
    convert_values,
    describe_allowed_values,
    flat_values,
    missing_settings,
    settings_by_name,
    union_members,
)
from electra.errors import ConfigError, DataError, TrainingError, report_panics, suggest
from electra.runfolder import dump_json
from electra.signals import clean_up_on_stop_signals, exit_on_stop_signals
from electra.training.config import read_launch

MAX_MESSAGE = 2000  # characters of an error
RANK_SECONDS = 2.0  # until an error is printed by other ranks than 0: if all have it, torchrun ends them before


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports: they make many objects and no garbage, and looking for it takes a tenth of the time of torch's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an error that the user can correct is printed as one sentence, with exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    try:
        with clean_up_on_stop_signals(), report_panics():
            run_command(arguments)
    except (ConfigError, DataError, TrainingError) as error:
        exit_with_error(str(error), arguments)
    except BrokenPipeError:  # the reader of the output (head, less) was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        exit_with_error(describe_os_error(error), arguments)


def exit_with_error(message: str, arguments: list[str]) -> NoReturn:
    """Print an error to stderr, with `--json` also as JSON to stdout, and exit with code 2."""
    message = re.sub(r"\s*\n\s*", " ", message)  # of libraries
    if (rank := os.environ.get("RANK", "0")) != "0":
        time.sleep(RANK_SECONDS)
        message = f"rank {rank}: {message}"
    if len(message) > MAX_MESSAGE:  # quotes a cell or a setting of any length
        message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
    print(f"electra: {message}", file=sys.stderr)
    if "--json" in arguments_before_delimiter(arguments):
        print(json.dumps({"error": message}))
    sys.exit(2)


def describe_os_error(error: OSError) -> str:
    """The system's message with the path, or that a folder is expected where the path is a file."""
    if not error.filename:
        return str(error)
    path = Path(error.filename)
    file = next((part for part in (path, *path.parents) if part.is_file()), None)
    if file and isinstance(error, FileExistsError | NotADirectoryError):
        return f"{file} is a file; a folder is needed"
    return f"{error.strerror or error}: {path}"


def arguments_before_delimiter(arguments: list[str]) -> list[str]:
    """The arguments before `--`; those after it are texts."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def run_command(arguments: list[str]) -> None:
    """Parse the flags of a command, run it and print its result."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(format_command_list())
        return
    if arguments[0] == "--version":
        print(f"electra {__version__}")
        return
    command = find_command(arguments[0])
    launch = read_launch()
    if launch is not None and launch.world_size > 1 and not command.runs_on_ranks:
        raise ConfigError(f"torchrun started {launch.world_size} processes; start electra {arguments[0]} without it")
    with exit_on_stop_signals():
        config_class = command.load_config_class()
    with name_flags_in_errors(config_class):
        config: Any = parse_config(f"electra {arguments[0]}", config_class, arguments[1:])
        with exit_on_stop_signals(), without_garbage_collection():
            function = command.load_function()
        result = function(config)
    if result is not None and (launch is None or launch.rank == 0):
        is_json = flat_values(config).get("json")
        print(dump_json(asdict(result)) if is_json else result)
    if code := getattr(result, "exit_code", 0):
        sys.exit(code)


def format_command_list() -> str:
    """All commands, one line each."""
    lines = ["Usage: electra COMMAND [OPTIONS]    (electra COMMAND --help lists the options)", ""]
    return "\n".join([*lines, *(f"  {name:<12}{command.help}" for name, command in COMMANDS.items())])


def find_command(name: str) -> Command:
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS, otherwise="electra --help lists the commands")
        raise ConfigError(f"unknown command {name!r}; {hint}")
    return COMMANDS[name]


@contextlib.contextmanager
def name_flags_in_errors(config_class: type) -> Iterator[None]:
    """Let ConfigErrors about a field name its flag."""
    try:
        yield
    except ConfigError as error:
        if error.field not in settings_by_name(config_class):
            raise
        flag = settings_by_name(config_class)[error.field].flag
        raise ConfigError(f"{flag} {error.message}") from None


def parse_config(program: str, config_class: type[Config], arguments: list[str]) -> Config:
    """A config from flags and a `--config` file, over which flags win; `--help` prints its settings and exits."""
    flags = arguments_before_delimiter(arguments)
    help_flags = [flag for flag in flags if flag in ("-h", "--help")]
    texts = arguments[len(flags) :]
    values = parse_flags(config_class, [flag for flag in flags if flag not in help_flags] + texts)
    if (file := values.pop("config", None)) is not None:
        values = read_config_file(file, config_class) | values
    values = convert_values(config_class, values)
    values = all_defaults(config_class, values) | values
    if help_flags:
        build_parser(config_class, program, values).help_print([])
        sys.exit(0)
    if missing := missing_settings(config_class, values):
        raise ConfigError("missing " + "; and ".join(f"{each.flag}: {each.help.rstrip('.')}" for each in missing))
    return config_from_flat_values(config_class, values)


def parse_flags(config_class: type, arguments: list[str]) -> dict[str, Any]:
    """The values of flags by their flat names."""
    try:
        parser = build_parser(config_class)
        _, bound, _ = parser.parse_args(arguments, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise ConfigError(describe_flag_error(error)) from None
    names = {python_parameter_name(setting): name for name, setting in settings_by_name(config_class).items()}
    return {names.get(parameter, parameter): value for parameter, value in bound.arguments.items()}


def build_parser(config_class: type, program: str = "electra", values: dict[str, Any] | None = None) -> App:
    """The parser of a config's flags, with a help panel for its ESSENTIALS and for each config class; the help shows
    `values` as defaults.

    It parses for a function with one flat parameter per setting. Only in the help are some required, because a default
    may depend on another flag."""
    essentials, essential_names = Group("Essential options", sort_key=0), getattr(config_class, "ESSENTIALS", ())
    panels: dict[type, Group] = {config_class: Group("Options", sort_key=1)}
    parameters = []
    for setting in settings_by_name(config_class).values():
        group = panels.setdefault(setting.config_class, build_help_panel(setting.config_class))
        parameters.append(build_parameter(setting, essentials if setting.name in essential_names else group, values))
    parameters.sort(key=lambda each: each.kind)  # positional ones first, as Python requires
    file = Parameter(help="A JSON, YAML or TOML file with settings; flags win over it.", group=panels[config_class])
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter("config", kind, default=None, annotation=Annotated[Path | None, file]))

    def command() -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by cyclopts
    app = App(name=program, help=format_help(config_class), help_format="plaintext", help_flags=(), version_flags=())
    app.default(command)
    return app


def build_help_panel(config_class: type) -> Group:
    """The help panel of a nested config class: "Masking options" for MaskingConfig."""
    words = re.findall("[A-Z][a-z]+", config_class.__name__.removesuffix("Config"))
    return Group.create_ordered(f"{' '.join(words).capitalize()} options")


def build_parameter(setting: Setting, group: Group, values: dict[str, Any] | None) -> inspect.Parameter:
    """A setting as a parameter of the function that cyclopts parses for."""
    default = None if values is None else values.get(setting.name)
    is_shown = default not in (None, (), PACKAGED_MODEL)
    details = Parameter(
        name=setting.flag,
        help=setting.help,
        group=group,
        converter=parse_integer if int in union_members(setting.value_type) else None,
        allow_repeating=True,  # the last of two equal flags wins
        consume_multiple=1 if get_origin(setting.value_type) is tuple else None,
        negative_iterable=(),
        show_default=is_shown and ((lambda words: " ".join(map(str, words))) if isinstance(default, tuple) else True),
        required=values is not None and setting.name not in values,
    )
    kind = inspect.Parameter.POSITIONAL_ONLY if setting.is_positional else inspect.Parameter.KEYWORD_ONLY
    name = python_parameter_name(setting)
    value_type = setting.value_type if default is not None else setting.value_type | None  # cyclopts may check it
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[value_type, details])


def python_parameter_name(setting: Setting) -> str:
    """The name of a setting's parameter: its path, because a flag may be a keyword of Python (--from)."""
    return setting.path.replace(".", "_")


def parse_integer(field_type: Any, tokens: Sequence[Token]) -> int:
    """An integer in digits; cyclopts would round 2.5."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise CoercionError(token=tokens[0], target_type=int) from None


def format_help(config_class: type) -> str:
    """The docstring of a config class without the line breaks of the source."""
    paragraphs = (inspect.getdoc(config_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def describe_flag_error(error: CycloptsError) -> str:
    """One sentence for an error of the parser."""
    match error:
        case UnknownOptionError():
            flag = (error.token.keyword or error.token.value).split("=")[0]
            known = [name for argument in error.argument_collection for name in argument.names]
            return f"unknown flag {flag}; {suggest(flag, known, otherwise='--help lists the flags')}"
        case MissingArgumentError() | ConsumeMultipleError():
            assert error.argument is not None
            return f"{error.argument.name} needs a value: {error.argument.parameter.help}"
        case CoercionError(token=token) if token is not None:
            allowed = describe_allowed_values(error.target_type)
            return f"{token.keyword or 'the argument'} is {token.value!r}; it must be {allowed}"
        case UnusedCliTokensError():
            unexpected = (error.unused_tokens or [""])[0]
            return f"unexpected argument {unexpected!r}; quote text with spaces and patterns with *"
    return " ".join(str(error).split())


def read_config_file(path: Path, config_class: type) -> dict[str, Any]:
    """The settings in a JSON, YAML or TOML file, by their flat names."""
    if not path.exists() or path.is_dir():  # a pipe is a file, too
        raise ConfigError(f"{path} does not exist; --config takes a JSON, YAML or TOML file with settings")
    try:
        values = CONFIG_PARSERS.get(path.suffix, parse_json)(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of UTF-8, or nested too deeply
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} contains a {type(values).__name__}; it must contain an object of settings by name")
    known = settings_by_name(config_class)
    pairs = [(str(name).replace("-", "_"), value) for name, value in values.items() if value is not None]
    try:
        check_distinct(name for name, _ in pairs)
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    values = dict(pairs)
    for name in values:
        if name not in known:
            hint = suggest(name, known, otherwise="--help lists the settings")
            raise ConfigError(f"unknown setting {name!r} in {path}; {hint}")
    return values


def check_distinct(keys: Iterable[str]) -> None:
    """Raise a ValueError if a key of a config file occurs twice."""
    if repeated := [key for key, count in Counter(keys).items() if count > 1]:
        raise ValueError(f"the key {repeated[0]} occurs twice; leave one out")


def parse_json(text: str) -> Any:
    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_distinct(key for key, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=to_dict)


def parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("YAML files need pyyaml: pip install pyyaml") from None
    try:
        values = yaml.safe_load(text)
        if isinstance(values, dict):
            keys = [key for key, _ in yaml.compose(text, yaml.SafeLoader).value]
            check_distinct(key.value for key in keys if not key.tag.endswith(":merge"))
        return values
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


CONFIG_PARSERS: dict[str, Callable[[str], Any]] = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": tomllib.loads}


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Complete commands, flags and their values with the tab key: print the script of a shell, or install it."""

    shell: Positional[Literal["bash", "zsh", "fish", "powershell"] | None] = None
    """The shell; default: the one that runs this command. The PowerShell script is untested."""
    install: bool = False
    """Write the script where the shell finds it, and add what it needs to the shell's start file."""


@dataclass(frozen=True)
class Completion:
    shell: str
    script: str
    installed: str | None  # path

    def __str__(self) -> str:
        if self.installed is None:
            return self.script
        note = "; its .zshrc has to call compinit" if self.shell == "zsh" else ""
        return f"{self.installed} is written; start a new {self.shell}{note}"


def write_completion(config: CompletionConfig) -> Completion:
    """The completion script of a shell, installed if asked for."""
    from cyclopts.completion.detect import ShellDetectionError, detect_shell  # other commands do not need it

    app = build_app()
    try:
        shell = config.shell or detect_shell()
    except ShellDetectionError:
        raise ConfigError("the shell is unknown; name it: electra completion bash (or zsh, fish, powershell)") from None
    script = app.generate_completion(shell=shell)
    if shell == "bash":  # completes file names after flags that also take other values, such as --corpus
        script = script.replace("complete -F", "complete -o default -F")
    installed: Path | None = app.install_completion(shell=shell) if config.install else None
    if installed is not None:
        installed.write_text(script, encoding="utf-8")
    return Completion(shell, script, str(installed) if installed else None)


def build_app() -> App:
    """All commands with their flags as one app of cyclopts."""
    app = App(name="electra", help_flags=("--help",), version_flags=("--version",))
    for name, command in COMMANDS.items():
        parser = build_parser(command.load_config_class(), name)
        parser.help, parser.help_flags = command.help, ["--help"]
        app.command(parser, name=name)
    return app
