"""Errors that a user can correct. The command line prints them as one sentence and exits with code 2.

A message states what was passed, what is allowed and what to do. It may name settings in two ways:

- An error about one field names it by `field`: `ConfigError("is 0; it must be at least 1", field="batch_size")`. From
  Python it reads "batch_size is 0; it must be at least 1", on the command line "--batch-size is 0; …". If the flag has
  another name (`Parameter(name=...)`), `field` is that, with underscores.
- A message about several settings writes them as flags in its text: "give --steps or --minutes, not both".
"""

import operator
from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A setting with a value that is not allowed."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field} {message}")
        self.message, self.field = message, field


class DataError(ValueError):
    """A file or folder that cannot be used: which one, why, what to do."""


class TrainingError(ValueError):
    """A run that cannot continue: at which step, why, and what was saved."""


def check_bounds(
    config: object,
    *names: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise a ConfigError for the first of these fields that is out of bounds; None is within them."""
    bounds = (
        ("at least", operator.ge, at_least),
        ("above", operator.gt, above),
        ("at most", operator.le, at_most),
        ("below", operator.lt, below),
    )
    limits = [(words, compare, bound) for words, compare, bound in bounds if bound is not None]
    for name in names:
        value = getattr(config, name)
        if value is not None and not all(compare(value, bound) for _, compare, bound in limits):
            allowed = " and ".join(f"{words} {bound}" for words, _, bound in limits)
            raise ConfigError(f"is {value}; it must be {allowed}", field=name)


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown name: the known name that is closest to it, or `otherwise`."""
    by_word = {each.strip("-"): each for each in known}  # the dashes of flags would make all of them similar
    close = get_close_matches(name.strip("-"), by_word, n=1)
    return f"did you mean {by_word[close[0]]}?" if close else otherwise
