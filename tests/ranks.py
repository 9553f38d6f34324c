"""Run a function on several ranks: processes forked from this one, which has imported torch already."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import electra
from electra.config import flat_values
from electra.model.storage import WEIGHTS
from electra.runfolder import checkpoint_folders, dump_json
from electra.training.logging import METRICS_FILE, read_metrics

CONTEXT = multiprocessing.get_context("fork")
SECONDS = 120  # in which ranks end, also on a busy machine


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start_ranks(size: int, function: Callable[[int], Any]) -> list[tuple[ForkProcess, Connection]]:
    """Start `function(rank)` on `size` ranks, with the environment variables of torchrun."""
    port = free_port()
    ranks = []
    for rank in range(size):
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=run_rank, args=(function, rank, size, port, writer))
        process.start()
        writer.close()
        ranks.append((process, reader))
    return ranks


def run_rank(function: Callable[[int], Any], rank: int, size: int, port: int, writer: Connection) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    try:
        writer.send(function(rank))
    except Exception as error:
        writer.send(error)
    writer.close()
    os._exit(0)  # as the command does: threads of a process group may wait for other ranks


def finish_ranks(ranks: list[tuple[ForkProcess, Connection]]) -> list[Any]:
    """The result of each rank, an exception that it raised, or None if it was killed."""
    results = []
    for _, reader in ranks:
        try:
            results.append(reader.recv() if reader.poll(SECONDS) else TimeoutError())
        except EOFError:
            results.append(None)
    for process, _ in ranks:
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            results.append(TimeoutError())
    assert not any(isinstance(result, TimeoutError) for result in results), "a rank did not end"
    return results


def run_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """The results of `function(rank)` on `size` ranks; raises what one of them raised."""
    results = finish_ranks(start_ranks(size, function))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint of a run."""
    return load_file(checkpoint_folders(run)[-1] / WEIGHTS)


def largest_difference(run: Path, other: Path) -> float:
    """The largest absolute difference of the weights of two runs."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def losses(run: Path, kinds: Collection[str]) -> list[float]:
    """All losses in the metrics of a run."""
    names = ("loss", "generator", "discriminator", "mlm_loss", "rtd_loss", "unigram_rtd_loss", "gradient_norm")
    return [
        line[name]
        for line in read_metrics(run / METRICS_FILE)
        if line["kind"] in kinds
        for name in names
        if name in line
    ]


def largest_loss_difference(run: Path, other: Path, kinds: Collection[str] = ("train", "validation")) -> float:
    """The largest difference of a loss, relative to losses above 1: the weighted total of RTD is about 40, where
    neighbouring fp32 numbers differ by 4e-6."""
    pairs = zip(losses(run, kinds), losses(other, kinds), strict=True)
    return max(abs(ours - theirs) / max(1.0, abs(ours)) for ours, theirs in pairs)


def torchrun(size: int, config: Any, restarts: int) -> subprocess.Popen[str]:
    """Start `electra pretrain` with a config on several ranks by torchrun, which repeats it after failures."""
    settings = {name: value for name, value in flat_values(config).items() if value is not None}
    file = config.output.with_suffix(".json")
    file.write_text(dump_json(settings))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    command = ["--max-restarts", str(restarts), "-m", "electra", "pretrain", "--config", str(file)]
    paths = os.pathsep.join((str(Path(electra.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launcher, *command], env=environment, **pipes)


def child_processes(parent: int) -> list[int]:
    """The processes that a process has started and that still run (Linux)."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may just have ended
            state, started_by = path.read_text().rpartition(")")[2].split()[:2]
            if int(started_by) == parent and state != "Z":
                children.append(int(path.parent.name))
    return sorted(children)
