"""Speed of pre-training on a CPU by how OpenMP threads wait, alone and beside other busy processes.

    python benchmarks/cpu_threads.py --data shards/ [--steps 40] [--busy 0 1] [--rounds 3] [--json]

By default (OMP_WAIT_POLICY unset) threads of torch spin for a while when they wait for others; `electra` sets PASSIVE,
so that they sleep.
--busy N runs N endless loops beside the training. The settings alternate in each round; the medians are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLICIES = {"spinning threads": "", "sleeping threads": "PASSIVE"}  # an empty value is ignored with a warning
SETTINGS = ("--size", "tiny", "--length", "64", "--batch-size", "32", "--device", "cpu", "--compile", "off")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(data: Path, steps: int, policy: str) -> float:
    """The speed of one run, without its start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "electra",
            "pretrain",
            "--data",
            str(data),
            "--output",
            f"{folder}/run",
            "--json",
        ]
        environment = os.environ | {"OMP_WAIT_POLICY": policy}
        flags = (*SETTINGS, "--steps", str(steps))
        ended = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, check=True)
    result = json.loads(ended.stdout)
    return result["tokens"] / result["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for busy in arguments.busy:
        speeds: dict[str, list[float]] = {name: [] for name in POLICIES}
        with busy_processes(busy):
            for _ in range(arguments.rounds):
                for name, policy in POLICIES.items():
                    speeds[name].append(tokens_per_second(arguments.data, arguments.steps, policy))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        spinning, sleeping = medians.values()
        rows.append({"busy_processes": busy} | medians | {"ratio": sleeping / spinning})
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        speeds_text = ", ".join(f"{name} {row[name]:,.0f} tokens/s" for name in POLICIES)
        print(f"{row['busy_processes']} other busy processes: {speeds_text}, ratio {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
