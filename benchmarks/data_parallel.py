"""Ranks on one GPU: do two processes that share it agree with one, and what does a world of one cost?

    python benchmarks/data_parallel.py [--data shards/] [--size small] [--batch-size 256] [--optimizer muon] [--json]

Without --data the text is synthetic. Four processes start together, so that they compile at the same time:

- `whole` and `world of one`, in one process: the trainer of `electra pretrain` without a process group, and as the only
  rank of one (NCCL on a GPU), which has the step in three CUDA graphs with a sum over the ranks between them. When the
  others have ended, both are timed in turns.
- `micro-batches`: one process that splits each batch in two.
- `two ranks`: two processes, each with half of the rows, that share the GPU (gloo).

All train on the same batches, compiled and captured as usual on a GPU. The largest differences of losses and weights
from `whole` are shown: bf16 is rounded differently in parts of a batch, so those of `two ranks` should not exceed those
of `micro-batches`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from synthetic_shards import write_synthetic_shards
from timing import mean_seconds

from electra.config import config_from_flat_values
from electra.data.shards import open_shards
from electra.pretraining.command import build_trainer, plan_and_check_phases
from electra.pretraining.config import PretrainConfig
from electra.pretraining.recipes import recipe_settings
from electra.pretraining.task import PretrainingTask
from electra.training.distributed import World, join_ranks
from electra.training.hardware import choose_device
from electra.training.logging import RunningAverages
from electra.training.trainer import Trainer

PROCESSES = {"timed": (1, 1), "micro-batches": (1, 2), "two ranks": (2, 1)}  # ranks and micro-batches
ROUNDS = 9  # in which the two contenders are timed in turns


def main() -> None:
    arguments = parse_arguments()
    if arguments.case:
        run_case(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data is None:
            arguments.data = write_synthetic_shards(Path(folder))
        report = run_all_cases(arguments, Path(folder))
    print(json.dumps(report) if arguments.json else format_report(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of shards")
    parser.add_argument("--size", default="small")
    parser.add_argument("--style", default="classic")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50, help="steps that are compared, and timed in each turn")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all_cases(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all processes and compare their results."""
    names = ("data", "size", "style", "optimizer", "batch_size", "length", "steps", "device")
    flags = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    start = time.perf_counter()
    processes: dict[tuple[str, int], subprocess.Popen] = {}
    for case, (size, _) in PROCESSES.items():
        port = free_port()
        for rank in range(size):
            environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"} | rank_environment(rank, size, port)
            command = [sys.executable, __file__, *flags, f"--case={case}", f"--results={folder}"]
            processes[case, rank] = subprocess.Popen(command, env=environment)
    failed = []
    for process in sorted(processes, key=lambda process: process[0] == "timed"):  # that one is the last
        if process[0] == "timed":
            (folder / "alone").touch()
        failed += [process] if processes[process].wait() else []
    if failed:
        sys.exit(f"failed: {failed}")
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    weights = {name: load_file(folder / f"{name}.safetensors") for name in results}
    report = {"seconds": time.perf_counter() - start, **results["whole"].pop("times"), "differences": {}}
    for name in ("world of one", "micro-batches", "two ranks"):
        report["differences"][name] = {
            "losses": largest_loss_difference(results["whole"]["losses"], results[name]["losses"]),
            **weight_differences(weights["whole"], weights[name]),
        }
    return report


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def largest_loss_difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    return max(abs(ours[step][name] - theirs[step][name]) for step in range(len(ours)) for name in ours[step])


def weight_differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference, and the norm of all differences relative to that of the weights."""
    differences = {name: ours[name] - theirs[name] for name in ours}
    squares = [sum(tensor.double().square().sum().item() for tensor in part.values()) for part in (differences, ours)]
    largest = max(difference.abs().max().item() for difference in differences.values())
    return {"weights": largest, "relative": (squares[0] / squares[1]) ** 0.5}


def run_case(arguments: argparse.Namespace) -> None:
    """Train in this process, as one of the cases."""
    alone = World(choose_device(arguments.device))
    if arguments.case == "micro-batches":
        train(arguments.case, build(arguments, alone), arguments)
        return
    if arguments.case == "two ranks":
        with join_ranks(arguments.device, resumes=False) as world:
            train(arguments.case, build(arguments, world), arguments)
        return
    whole = build(arguments, alone)
    result = train("whole", whole, arguments)
    with join_ranks(arguments.device, resumes=False) as world:
        one = build(arguments, world)
        train("world of one", one, arguments)
        while not (arguments.results / "alone").exists():  # the other processes have ended
            time.sleep(0.1)
        result["times"] = time_in_turns(whole, one, arguments.steps)
    (arguments.results / "whole.json").write_text(json.dumps(result))


def build(arguments: argparse.Namespace, world: World) -> Trainer:
    """The trainer of `electra pretrain`, without its run folder."""
    names = ("data", "size", "style", "optimizer", "batch_size", "length", "device")
    settings = recipe_settings("fast", arguments.size, arguments.style) | {
        name: getattr(arguments, name) for name in names
    }
    settings |= {"output": arguments.data / "unused", "steps": 10_000, "evaluation_rows": 32, "warmup": 10}
    settings |= {"micro_batches": PROCESSES[arguments.case][1]}
    config = config_from_flat_values(PretrainConfig, settings)
    shards = open_shards(config.data)
    torch.manual_seed(config.seed)
    [phase] = plan_and_check_phases(config, shards)
    trainer = build_trainer(PretrainingTask(phase, shards, world))
    trainer.run_step = trainer.build_step()
    return trainer


def train(name: str, trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps; write losses and weights."""
    losses = []
    for _ in range(arguments.steps):
        trainer.averages = RunningAverages()
        trainer.step()
        losses.append({key: value for key, value in trainer.averages.means().items() if key != "gradient_norm"})
    result = {"losses": losses}
    if trainer.world.is_main:
        weights = {key: value.detach().cpu().clone() for key, value in trainer.task.model.named_parameters()}
        save_file(weights, arguments.results / f"{name}.safetensors")
        (arguments.results / f"{name}.json").write_text(json.dumps(result))
    return result


def time_in_turns(whole: Trainer, one: Trainer, steps: int) -> dict[str, float]:
    """Milliseconds of a step without and with a process group: medians of several turns."""
    device = one.world.device
    times: dict[str, list[float]] = {"whole": [], "world of one": []}
    for _ in range(ROUNDS):
        for name, trainer in (("whole", whole), ("world of one", one)):
            times[name].append(1000 * mean_seconds(trainer.step, steps, device))
    medians = {f"ms, {name}": statistics.median(values) for name, values in times.items()}
    return medians | {"cost of a world of one": medians["ms, world of one"] / medians["ms, whole"] - 1}


def format_report(report: dict[str, Any]) -> str:
    lines = [f"whole         {report['ms, whole']:.2f} ms a step"]
    lines.append(f"world of one  {report['ms, world of one']:.2f} ms a step: {report['cost of a world of one']:+.1%}")
    lines.append("largest differences from whole:")
    for name, values in report["differences"].items():
        numbers = "  ".join(f"{kind} {value:.2e}" for kind, value in values.items())
        lines.append(f"  {name:<15}{numbers}")
    return "\n".join([*lines, f"{report['seconds']:.0f} s in all"])


if __name__ == "__main__":
    main()
