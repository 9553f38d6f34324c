"""A model of the time of a step on several GPUs; nothing is measured here.

    python benchmarks/scaling_model.py [--size base] [--batch-size 2048] [--length 512] [--gpus 8 64] [--json]

step = compute + all-reduce + Muon, without overlap, as `electra pretrain` does it:

- compute: FLOPs of a GPU's rows at the rate that one H200 reached in docs/results.md (--tflops), which is assumed not
  to fall with fewer rows.
- all-reduce: 4 bytes for each parameter, summed within a node (--nvlink, GB/s of a GPU in one direction) and between
  nodes (--network, GB/s of a node in one direction): 2 (g − 1)/g S / nvlink + 2 (n − 1)/n S / network for n nodes of g
  GPUs.
- Muon: Newton-Schulz iterations, which every rank computes for all matrices, at the same rate of FLOPs. Dividing them
  over the ranks would need an all-gather of the updates; its time is shown beside what it would save.
"""

import argparse
import json
from typing import Any

import torch

from electra.model.config import ModelConfig
from electra.model.electra import Electra
from electra.model.flops import training_flops_per_row
from electra.objectives.config import MaskingConfig
from electra.objectives.masking import max_masked
from electra.training.muon import NEWTON_SCHULZ_STEPS
from electra.training.optimizer import split_parameters

BYTES = 4  # of a gradient
TFLOPS = {"small": 185.0, "base": 431.0, "large": 464.0}  # of one H200, docs/results.md, without dropout


def newton_schulz_flops(shape: tuple[int, ...]) -> int:
    """FLOPs of the orthogonalisation of a matrix: three products in each iteration."""
    shorter, longer = sorted(shape)
    return NEWTON_SCHULZ_STEPS * (4 * shorter**2 * longer + 2 * shorter**3)


def all_reduce_seconds(num_bytes: float, gpus: int, per_node: int, nvlink: float, network: float) -> float:
    """A sum over GPUs: within each node, between the nodes, and back; bandwidths in bytes a second."""
    in_node, nodes = min(gpus, per_node), -(-gpus // per_node)
    return 2 * (in_node - 1) / in_node * num_bytes / nvlink + 2 * (nodes - 1) / nodes * num_bytes / network


def model_step(arguments: argparse.Namespace, gpus: int) -> dict[str, float]:
    """The parts of a step in milliseconds, tokens a second, and the speed relative to as many single GPUs."""
    pair = ModelConfig(size=arguments.size).electra_config()
    masked = max_masked(arguments.length, MaskingConfig())
    flops = training_flops_per_row(pair, arguments.length, masked, is_generator_frozen=False)
    with torch.device("meta"):
        model = Electra(pair)
    matrices, _, _ = split_parameters(model)
    rate = 1e12 * (arguments.tflops or TFLOPS[arguments.size])
    links = arguments.per_node, 1e9 * arguments.nvlink, 1e9 * arguments.network
    num_bytes = BYTES * sum(parameter.numel() for parameter in model.parameters())
    muon = sum(newton_schulz_flops(tuple(matrix.shape)) for _, matrix in matrices) / rate
    gathered = BYTES * sum(matrix.numel() for _, matrix in matrices)
    whole = arguments.batch_size * flops / rate  # on one GPU
    parts = {"compute": whole / gpus, "all-reduce": all_reduce_seconds(num_bytes, gpus, *links), "Muon": muon}
    divided = muon / gpus + all_reduce_seconds(gathered, gpus, *links) / 2  # a gather is half of an all-reduce
    step = sum(parts.values())
    return {name: 1000 * seconds for name, seconds in parts.items()} | {
        "Muon divided": 1000 * divided,
        "step": 1000 * step,
        "million tokens/s": arguments.batch_size * arguments.length / step / 1e6,
        "efficiency": (whole + muon) / gpus / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", choices=TFLOPS)
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a step, over all GPUs")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--tflops", type=float, help="that a GPU reaches in training")
    parser.add_argument("--nvlink", type=float, default=360.0, help="GB/s between GPUs of a node: 80 %% of 450")
    parser.add_argument("--network", type=float, default=40.0, help="GB/s between nodes: 80 %% of one port of 400 Gb/s")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report: dict[int, dict[str, Any]] = {gpus: model_step(arguments, gpus) for gpus in arguments.gpus}
    if arguments.json:
        print(json.dumps(report))
        return
    names = list(next(iter(report.values())))
    print(f"{arguments.size}, {arguments.batch_size} × {arguments.length}: a model, nothing is measured; parts in ms")
    print("| GPUs | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for gpus, values in report.items():
        print(f"| {gpus} | " + " | ".join(f"{value:.3g}" for value in values.values()) + " |")


if __name__ == "__main__":
    main()
