"""Speed of ONNX Runtime, in fp32 and int8, against our PyTorch forward on a CPU.

    python benchmarks/onnx_speed.py --size small --threads 2 [--style modern] [--batches 1 32] [--length 128] [--json]

The discriminator of an untrained pair of that size is traced; weights do not change the speed. The three alternate in
each round, and the medians are compared. All wait with sleeping threads, as commands of electra do.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from electra.model.config import ModelConfig
from electra.model.electra import Electra
from electra.onnx.export import FP32, INT8, ExportableModel, open_session, write_onnx
from electra.onnx.quantize import write_int8


def cpu_name() -> str:
    """The name of the processor, and whether it has VNNI instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    values = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    return (
        f"{values.get('model name', platform.machine())}, {'VNNI' if 'vnni' in values.get('flags', '') else 'no VNNI'}"
    )


def build_model(size: str, style: str) -> ExportableModel:
    electra = Electra(ModelConfig(size=size, style=style).electra_config()).eval()
    discriminator = electra.require_discriminator()
    return ExportableModel(discriminator, discriminator.encoder, lambda *inputs: {"logits": discriminator(*inputs)})


def measure(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each function."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:  # the first round allocates memory
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="size of the model")
    parser.add_argument("--style", default="classic", help="classic or modern")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch and of ONNX Runtime")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="batch sizes")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.size, arguments.style)
    result: dict[str, Any] = {"cpu": cpu_name(), "threads": arguments.threads, "size": arguments.size}
    result |= {"style": arguments.style, "load": os.getloadavg()[0], "milliseconds": {}}
    with tempfile.TemporaryDirectory() as folder:
        fp32, int8 = Path(folder, FP32), Path(folder, INT8)
        write_onnx(model, fp32)
        write_int8(model, fp32, int8)
        sessions = {"fp32": open_session(fp32), "int8": open_session(int8)}
    for rows in arguments.batches:
        inputs = model.sample_inputs(rows, arguments.length, is_padded=False)
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        functions: dict[str, Callable[[], Any]] = {
            "PyTorch": torch.inference_mode()(lambda inputs=inputs: model(**inputs))
        }
        for name, session in sessions.items():
            functions[name] = lambda session=session, arrays=arrays: session.run(None, arrays)
        result["milliseconds"][f"{rows} x {arguments.length}"] = measure(functions, arguments.rounds)
    print(json.dumps(result) if arguments.json else describe(result))


def describe(result: dict[str, Any]) -> str:
    lines = [
        f"{result['size']}, {result['style']}, {result['threads']} threads, {result['cpu']}, load {result['load']:.1f}"
    ]
    for shape, times in result["milliseconds"].items():
        ratios = ", ".join(f"{name} {value:.1f} ms ({times['PyTorch'] / value:.2f}x)" for name, value in times.items())
        lines.append(f"  {shape}: {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
