"""Errors that a user can correct, the checks that raise them, and the import of optional libraries.

The command line prints errors as one sentence and exits with code 2.

A message states what was passed, what is allowed and what to do. It may name settings in two ways:

- An error about one field names it by `field`: `ConfigError("is 0; it must be at least 1", field="batch_size")`. From
  Python it reads "batch_size is 0; it must be at least 1", on the command line "--batch-size is 0; …". If the flag has
  another name (`Parameter(name=...)`), `field` is that, with underscores.
- A message about several settings writes them as flags in its text: "give --steps or --minutes, not both".
"""

import importlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class ConfigError(ValueError):
    """A setting with a value that is not allowed."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field} {message}")
        self.message, self.field = message, field


class DataError(ValueError):
    """A file or folder that cannot be used: which one, why, what to do."""


class TrainingError(ValueError):
    """A run that cannot continue: at which step, why, and what was saved."""


def check_finite(outputs: Any, model: object) -> None:
    """Raise a DataError if outputs of a model, a tensor or an array, are not finite."""
    if not math.isfinite(abs(outputs).max()):
        raise DataError(f"the outputs of {model} are not finite: its training diverged, or its weights are damaged")


@contextmanager
def report_panics() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is a BaseException of no public class, into a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the tokenizers library panicked ({error}); try another tokenizer") from None


def check_range(
    config: object,
    *fields: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise a ConfigError if one of these fields of a config is outside of the range; None is allowed."""
    comparisons: dict[str, tuple[float | None, Callable[[Any, Any], bool]]] = {
        "at least": (at_least, operator.ge),
        "above": (above, operator.gt),
        "at most": (at_most, operator.le),
        "below": (below, operator.lt),
    }
    bounds = {name: bound for name, bound in comparisons.items() if bound[0] is not None}
    for field in fields:
        value = getattr(config, field)
        if value is not None and not all(is_inside(value, limit) for limit, is_inside in bounds.values()):
            allowed = " and ".join(f"{name} {limit}" for name, (limit, _) in bounds.items())
            raise ConfigError(f"is {value}; it must be {allowed}", field=field)


def check_choice(config: object, field: str, choices: Collection[str]) -> None:
    """Raise a ConfigError if a field of a config is none of `choices`."""
    value = getattr(config, field)
    if value not in choices:
        raise ConfigError(f"is {value!r}; choose from {', '.join(choices)}", field=field)


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown name: the known name that is closest to it, or `otherwise`."""
    by_word = {each.strip("-"): each for each in known}  # the dashes of flags would make all of them similar
    words = {each: each.replace("_", "-").split("-") for each in by_word}
    initials = [each for each, parts in words.items() if "".join(part[:1] for part in parts) == name.strip("-")]  # lr
    close = get_close_matches(name.strip("-"), by_word, n=1) or initials
    return f"did you mean {by_word[close[0]]}?" if close else otherwise


def import_optional(module: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{purpose} needs another library: pip install {module.partition('.')[0]}") from None


def require_libraries(purpose: str, names: Iterable[str]) -> None:
    """Raise, with one command that installs all of them, if optional dependencies are missing."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(f"{purpose} needs {', '.join(missing)}: pip install {' '.join(missing)}")
