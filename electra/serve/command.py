"""`electra serve`, whose libraries are an extra."""

from electra.data.files import import_optional
from electra.serve.config import ServeConfig


def serve(config: ServeConfig) -> object:
    """Answer HTTP requests until a signal stops the server; returns what it did."""
    for library in ("fastapi", "uvicorn"):
        import_optional(library, "electra serve")
    from electra.serve.server import run_server

    return run_server(config)
