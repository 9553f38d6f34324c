"""`electra serve`, whose libraries are an extra."""

from electra.data.files import require_libraries
from electra.serving.config import ServeConfig


def serve(config: ServeConfig) -> object:
    """Answer HTTP requests until a signal stops the server; returns what it did."""
    require_libraries("electra serve", ("fastapi", "uvicorn"))
    from electra.serving.server import run_server

    return run_server(config)
