"""Nested configuration dataclasses addressed by flat names: `config.optimizer.learning_rate` is `learning_rate`.

Flat names are those of the command line's flags and are unique within a configuration: a field's own name, or the one
its `Annotated[..., Parameter(name=...)]` gives it. The names of nested configurations do not occur in them.
"""

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_type_hints

from electra.errors import ConfigError

Config = TypeVar("Config")


@cache
def field_paths(config_class: type) -> dict[str, tuple[str, ...]]:
    """The attribute path of each setting by its flat name: learning_rate → ("optimizer", "learning_rate")."""
    paths: dict[str, tuple[str, ...]] = {}
    for field_name, annotation in annotations(config_class).items():
        nested_class = nested_config(annotation)
        if nested_class is not None:
            nested = {name: (field_name, *path) for name, path in field_paths(nested_class).items()}
        else:
            nested = {flat_name(field_name, annotation): (field_name,)}
        duplicates = paths.keys() & nested.keys()
        assert not duplicates, f"{config_class.__name__} declares {', '.join(sorted(duplicates))} twice"
        paths |= nested
    return paths


def flat_fields(config: Any) -> dict[str, Any]:
    """The settings of a configuration by their flat names."""
    return {name: value_at(config, path) for name, path in field_paths(type(config)).items()}


def flat_defaults(config_class: type) -> dict[str, Any]:
    """The defaults of a configuration's settings by their flat names; required settings are left out."""
    defaults: dict[str, Any] = {}
    hints = annotations(config_class)
    for field in fields(config_class):
        nested_class = nested_config(hints[field.name])
        if nested_class is not None:
            defaults |= flat_defaults(nested_class)
        elif field.default is not MISSING:
            defaults[flat_name(field.name, hints[field.name])] = field.default
        elif field.default_factory is not MISSING:
            defaults[flat_name(field.name, hints[field.name])] = field.default_factory()
    return defaults


def build(config_class: type[Config], **settings: Any) -> Config:
    """A configuration from flat settings; `config_class.defaults_for(settings)`, where defined, supplies the others."""
    check_names(config_class, settings)
    if hasattr(config_class, "defaults_for"):
        settings = config_class.defaults_for(settings) | settings
    missing = field_paths(config_class).keys() - settings.keys() - flat_defaults(config_class).keys()
    if missing:
        raise ConfigError(f"{config_class.__name__} needs a value for {', '.join(sorted(missing))}")
    return construct(config_class, settings)


def replace_fields(config: Config, **settings: Any) -> Config:
    """A copy of a configuration with some of its settings, nested ones included, replaced."""
    check_names(type(config), settings)
    return construct(type(config), flat_fields(config) | settings)


def construct(config_class: type[Config], settings: dict[str, Any]) -> Config:
    """An instance of a configuration class, and of those nested in it, from those settings that are theirs."""
    arguments: dict[str, Any] = {}
    for field_name, annotation in annotations(config_class).items():
        nested_class = nested_config(annotation)
        if nested_class is not None:
            arguments[field_name] = construct(nested_class, settings)
        elif (name := flat_name(field_name, annotation)) in settings:
            arguments[field_name] = settings[name]
    return config_class(**arguments)


def check_names(config_class: type, names: Iterable[str]) -> None:
    """Raise a ConfigError for a name that is not a setting of the configuration."""
    known = field_paths(config_class)
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its settings are {', '.join(known)}"
            raise ConfigError(f"{config_class.__name__} has no setting {name!r}; {hint}")


def annotations(config_class: type) -> dict[str, Any]:
    """The type of each field, with what `Annotated` adds to it."""
    hints = get_type_hints(config_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config_class)}


def nested_config(annotation: Any) -> type | None:
    """The configuration class that a field holds; None if it holds a plain value."""
    field_type = getattr(annotation, "__origin__", annotation)  # of Annotated
    return field_type if is_dataclass(field_type) and isinstance(field_type, type) else None


def flat_name(field_name: str, annotation: Any) -> str:
    """A field's name on the command line, with underscores: its own, or the one its annotation has."""
    for metadata in getattr(annotation, "__metadata__", ()):
        names = getattr(metadata, "name", None)
        if names:
            name = names if isinstance(names, str) else names[0]
            return name.removeprefix("--").replace("-", "_")
    return field_name


def value_at(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config
