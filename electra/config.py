"""Nested config dataclasses by flat names: `config.optimizer.learning_rate` is `learning_rate`, `--learning-rate`.

Flat names are shared by flags, `--config` files and the keyword arguments of `electra.pretrain(...)`. They are unique
within a config: a field's own name, or the one its `Annotated[..., Parameter(name=...)]` gives it.
"""

import ast
import inspect
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from electra.errors import ConfigError, suggest

Config = TypeVar("Config")
Value = TypeVar("Value")

PACKAGED_MODEL = Path(__file__).with_name("packaged")
"""The folder of the small English model that is part of the package; commands use it when no --model is given."""
OPENMP = {"GOMP_SPINCOUNT": "10000"}
"""How long OpenMP threads that wait for others spin before they sleep: a fraction of a millisecond, enough for the time
between two operations. On quiet cores that is as fast as torch's default of 300,000 iterations, and threads that never
spin are slower; beside other busy programs they are faster, so the trainer then switches spinning off
(training/hardware.py; benchmarks/cpu_threads.py, docs/log.md)."""
WAIT_VARIABLES = ("OMP_WAIT_POLICY", *OPENMP)
MODEL_SETTINGS = ("model", "init", "tokenizer")  # whose value `packaged` is that folder
POSITIONAL = "positional"
Positional = Annotated[Value, POSITIONAL]
"""`shards: Positional[Path]` has no flag on the command line."""


def wait_settings() -> dict[str, str]:
    """The environment variables that say how OpenMP threads wait for each other."""
    return {name: os.environ[name] for name in WAIT_VARIABLES if name in os.environ}


@dataclass(frozen=True)
class Setting:
    """One field of a config, or of a config nested in it."""

    name: str  # flat
    path: str  # of attributes: "optimizer.learning_rate"
    value_type: Any
    default: Any  # MISSING if the setting is required
    help: str
    config_class: type  # the one that declares the field
    is_positional: bool

    @property
    def flag(self) -> str:
        """The setting as the command line shows it."""
        return self.name.upper() if self.is_positional else f"--{self.name.replace('_', '-')}"


@cache
def settings_by_name(config_class: type) -> dict[str, Setting]:
    """All settings of a config class by their flat names."""
    by_name: dict[str, Setting] = {}
    for field in fields(config_class):
        for setting in field_settings(config_class, field):
            assert setting.name not in by_name, f"{config_class.__name__} declares {setting.name} twice"
            by_name[setting.name] = setting
    return by_name


def field_settings(config_class: type, field: Field[Any]) -> list[Setting]:
    """The setting of a field with a plain value, or those of the config in it, whose default, if any, gives theirs."""
    annotation = field_annotations(config_class)[field.name]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if nested_class := nested_config_class(annotation):
        nested = list(settings_by_name(nested_class).values())
        if default is not MISSING:
            nested = [replace(each, default=attrgetter(each.path)(default)) for each in nested]
        return [replace(each, path=f"{field.name}.{each.path}") for each in nested]
    setting = Setting(
        name=flat_name(field.name, annotation),
        path=field.name,
        value_type=annotation.__origin__ if get_origin(annotation) is Annotated else annotation,
        default=default,
        help=field_docstrings(config_class).get(field.name, ""),
        config_class=config_class,
        is_positional=POSITIONAL in getattr(annotation, "__metadata__", ()),
    )
    return [setting]


def flat_values(config: Any) -> dict[str, Any]:
    """The values of a config's settings by their flat names."""
    config_class: type = type(config)
    return {name: attrgetter(setting.path)(config) for name, setting in settings_by_name(config_class).items()}


def flat_defaults(config_class: type) -> dict[str, Any]:
    """The defaults of a config's settings by their flat names; required settings are left out."""
    return {name: each.default for name, each in settings_by_name(config_class).items() if each.default is not MISSING}


def command_line_words(name: str, value: Any) -> list[str]:
    """The flag of a setting and its value, as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]


def all_defaults(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a config class, and over them those that its `dependent_defaults(values)` returns."""
    dependent = config_class.dependent_defaults(values) if hasattr(config_class, "dependent_defaults") else {}
    return flat_defaults(config_class) | dependent


def missing_settings(config_class: type, names: Iterable[str]) -> list[Setting]:
    """The required settings that are not among `names`."""
    return [
        each for name, each in settings_by_name(config_class).items() if each.default is MISSING and name not in names
    ]


def build_config(config_class: type[Config], **values: Any) -> Config:
    """A config from flat values, of which None means the default; `config_class.dependent_defaults(values)`, where
    defined, supplies the others."""
    check_setting_names(config_class, values)
    values = convert_values(config_class, {name: value for name, value in values.items() if value is not None})
    values = all_defaults(config_class, values) | values
    if missing := missing_settings(config_class, values):
        raise ConfigError(f"no value is given for {', '.join(each.name for each in missing)}")
    return config_from_flat_values(config_class, values)


def replace_settings(config: Config, **values: Any) -> Config:
    """A copy of a config with some of its settings, nested ones included, replaced."""
    check_setting_names(type(config), values)
    return config_from_flat_values(type(config), flat_values(config) | values)


def config_from_flat_values(config_class: type[Config], values: dict[str, Any]) -> Config:
    """An instance of a config class, and of those nested in it, from those values that are theirs."""
    arguments: dict[str, Any] = {}
    for field_name, annotation in field_annotations(config_class).items():
        nested_class = nested_config_class(annotation)
        if nested_class is not None:
            arguments[field_name] = config_from_flat_values(nested_class, values)
        elif (name := flat_name(field_name, annotation)) in values:
            arguments[field_name] = values[name]
    return config_class(**arguments)


def check_setting_names(config_class: type, names: Iterable[str], field: str | None = None) -> None:
    """Raise a ConfigError for a name that is not a setting of the config; `field` is where the names are from."""
    known = settings_by_name(config_class)
    for name in names:
        if name not in known:
            hint = suggest(str(name), known, otherwise=f"its settings are {', '.join(known)}")
            prefix = "has the unknown setting" if field else "unknown setting"
            raise ConfigError(f"{prefix} {name!r}; {hint}", field=field)


def convert_values(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Values from Python or a file with the types of their settings: a path may be a string, a tuple a list."""
    check_setting_names(config_class, values)
    types = {name: setting.value_type for name, setting in settings_by_name(config_class).items()}
    return {name: convert_value(name, value, types[name]) for name, value in values.items()}


def parse_named_settings(config_class: type, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings of a config by name, from words of a command line: each name is followed by KEY=VALUE for its settings;
    lists have a word for each element."""
    by_name: dict[str, list[str]] = {}
    for word in words:
        if "=" in word and not by_name:
            raise ConfigError(f"is {' '.join(words)}; write a name, then KEY=VALUE …", field="settings")
        if "=" in word:
            by_name[list(by_name)[-1]].append(word)
        elif word in by_name:
            raise ConfigError(f"has {word} twice; give each a name of its own", field="settings")
        else:
            by_name[word] = []
    return {name: parse_key_values(config_class, each, "settings") for name, each in by_name.items()}


def parse_key_values(config_class: type, words: Sequence[str], field: str) -> dict[str, Any]:
    """Settings of a config from the words KEY=VALUE of a field; lists have a word for each element."""
    values: dict[str, list[str]] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            raise ConfigError(f"has {word!r}; write KEY=VALUE", field=field)
        values.setdefault(key.replace("-", "_"), []).append(value)
    check_setting_names(config_class, values, field)
    is_list = {name: get_origin(each.value_type) is tuple for name, each in settings_by_name(config_class).items()}
    for name, each in values.items():
        if len(each) > 1 and not is_list[name]:
            raise ConfigError(f"has {name} twice: {' and '.join(each)}; give one", field=field)
    return convert_values(config_class, {name: each if is_list[name] else each[0] for name, each in values.items()})


def model_path(value: str | Path) -> Path:
    """The path of a model; `packaged` is the model in the package. Raises if another file has that name."""
    if str(value) != PACKAGED_MODEL.name:
        return Path(value)
    if Path(value).exists() and Path(value).resolve() != PACKAGED_MODEL.resolve():
        raise ConfigError(
            f"'{value}' is ambiguous: the model in the package or {Path(value).absolute()}; rename the folder or pass "
            "its absolute path"
        )
    return PACKAGED_MODEL


def convert_value(name: str, value: Any, value_type: Any) -> Any:
    """The value of a setting, with its type."""
    if name in MODEL_SETTINGS and isinstance(value, str | Path):
        value = model_path(value)
    elif name in MODEL_SETTINGS and isinstance(value, list | tuple):
        value = [model_path(each) if isinstance(each, str | Path) else each for each in value]
    for kind in union_members(value_type):
        try:
            result = msgspec.convert(value, kind, strict=False, dec_hook=lambda custom, plain: custom(plain))
        except msgspec.ValidationError:
            continue
        if isinstance(result, float) and not math.isfinite(result):
            raise ConfigError(f"is {value}; it must be a finite number", field=name)
        return result
    raise ConfigError(f"is {value!r}; it must be {describe_allowed_values(value_type)}", field=name)


def describe_allowed_values(value_type: Any) -> str:
    """Describe the values of a type, for an error message."""
    names = {int: "an integer, such as 10000", float: "a number, such as 0.5 or 1e-4", bool: "true or false"}
    names |= {Path: "a path", str: "a text"}
    described = []
    for kind in union_members(value_type):
        if get_origin(kind) is Literal:
            described.append(f"one of {', '.join(map(str, get_args(kind)))}")
        elif get_origin(kind) is tuple:
            described.append("a list")
        elif kind is not NoneType:
            described.append(names.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(described)


def union_members(value_type: Any) -> tuple[Any, ...]:
    """The types in a union, in order; a single type alone."""
    return get_args(value_type) if get_origin(value_type) in (Union, UnionType) else (value_type,)


def field_annotations(config_class: type) -> dict[str, Any]:
    """The type of each field, including the metadata of `Annotated`."""
    hints = get_type_hints(config_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config_class)}


def nested_config_class(annotation: Any) -> type | None:
    """The config class that a field holds; None if it holds a plain value."""
    field_type = getattr(annotation, "__origin__", annotation)  # of Annotated
    return field_type if is_dataclass(field_type) and isinstance(field_type, type) else None


def flat_name(field_name: str, annotation: Any) -> str:
    """A field's name, or that of the flag in its annotation, with underscores."""
    for metadata in getattr(annotation, "__metadata__", ()):
        if flag := getattr(metadata, "name", None):  # cyclopts.Parameter, which is slow to import
            return flag[0].removeprefix("--").replace("-", "_")
    return field_name


@cache
def field_docstrings(config_class: type) -> dict[str, str]:
    """The docstring below each field of a class, on one line; Python does not keep them."""
    [source] = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(source, ast.ClassDef)
    docstrings = {}
    for field, below in pairwise(source.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docstrings[name] = " ".join(text.split())
    return docstrings
