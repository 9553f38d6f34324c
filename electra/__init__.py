"""Pre-train text encoders as discriminators: ELECTRA's replaced token detection in PyTorch.

`electra.load(folder)` loads a trained model. The commands are functions with the names and defaults of their flags:
`electra.pretrain(data="shards", output="runs/x", minutes=5)`.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"
COMMANDS = {  # functions of the package and their commands; electra.report and the like are subpackages
    "train_tokenizer": "tokenizer",
    "shard": "shard",
    "pretrain": "pretrain",
    "finetune": "finetune",
    "glue": "glue",
    "evaluate": "evaluate",
    "predict": "predict",
    "export_model": "export",
    "import_model": "import",
}
__all__ = ["__version__", "load", *COMMANDS]


def __getattr__(name: str) -> Callable[..., Any]:
    """Import `load` and the commands when they are first used: torch takes seconds to import."""
    from electra.commands import import_object, make_command_function

    if name == "load":
        return import_object("serve.inference:load")
    if name in COMMANDS:
        return make_command_function(COMMANDS[name])
    raise AttributeError(f"module 'electra' has no attribute {name!r}")
