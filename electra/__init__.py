"""Pre-train text encoders as discriminators: ELECTRA's replaced token detection on PyTorch."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`electra.load`, imported when it is first used: the command line starts faster without torch."""
    if name != "load":
        raise AttributeError(f"module 'electra' has no attribute {name!r}")
    from electra.serve.inference import load

    return load
