"""Kill a command without warning."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any


def kill_repeatedly(run: Callable[[Any], Any], config: Any, times: int, within: float) -> None:
    """Start a command `times` times and kill it `within` some seconds; if it finished before, its output is removed."""
    draw, kills = random.Random(0), 0
    while kills < times:
        if killed(run, config, after=draw.uniform(0, within)):
            kills += 1
        else:
            shutil.rmtree(config.output)


def killed(run: Callable[[Any], Any], config: Any, after: float) -> bool:
    """Run in a child process and kill it; whether it was killed before it finished."""
    child = os.fork()
    if child == 0:
        os.close(2)
        try:
            run(config)
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
