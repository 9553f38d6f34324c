"""Pre-train text encoders as discriminators: ELECTRA's replaced token detection in PyTorch.

`electra.load(folder)` loads a trained model. The commands are functions with the names and defaults of their flags:
`electra.pretrain(data="shards", output="runs/x", minutes=5)`. Only `electra import` has another name in Python, where
that is a keyword: `electra.import_model`.
"""

from collections.abc import Callable
from typing import Any

from electra.commands import COMMANDS, function_name, import_object, make_command_function

__version__ = "0.1.0"
FUNCTIONS = {function_name(command): command for command in COMMANDS}
__all__ = ["__version__", "load", *FUNCTIONS]


def __getattr__(name: str) -> Callable[..., Any]:
    """Import `load` and the commands when they are first used: torch takes seconds to import."""
    if name == "load":
        return import_object("serving.inference:load")
    if name in FUNCTIONS:
        return make_command_function(FUNCTIONS[name])
    raise AttributeError(f"module 'electra' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
