"""Two Ray nodes on this machine, of which one is killed while a command runs on them; `python ray_nodes.py` runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WAIT_SECONDS = 300


def run_and_kill_node(command: list[str], folder: Path, pattern: str, count: int) -> dict:
    """Run `electra COMMAND --ray ADDRESS` in another process; see `main`."""
    arguments = [json.dumps(command), str(folder), pattern, str(count)]
    # ray's own settings: no password file in the home folder, and quick detection of a lost node
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return json.loads(output.splitlines()[-1])


def main(command: list[str], folder: Path, pattern: str, count: int) -> None:
    """Kill a node as soon as `count` files match `pattern` in `folder`; prints what came of the command."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    process = subprocess.Popen(
        [sys.executable, "-m", "electra", *command, "--ray", cluster.address], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while len(list(folder.glob(pattern))) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    was_running = process.poll() is None
    cluster.remove_node(node, allow_graceful=False)
    errors = process.communicate(timeout=WAIT_SECONDS)[1]
    print(json.dumps({"was_running": was_running, "code": process.returncode, "errors": errors}))
    cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
