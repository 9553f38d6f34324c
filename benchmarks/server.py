"""Throughput of `electra serve` with many clients, against the same server that handles one request at a time.

    python benchmarks/server.py [--clients 64] [--seconds 20] [--size small] [--threads 2] [--words 5 40] [--json]

Both servers run in turns, each in a process of its own, with the same untrained model and one text in each request.
Clients keep their connection, send the next request when they have the answer to the last one, and compare its tokens
with those of their text.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from onnx_speed import cpu_name

from electra.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, build_wordpiece_tokenizer
from electra.model.config import ModelConfig
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.serving import server
from electra.serving.config import LimitsConfig, ServeConfig

WORDS = [f"w{number:04d}" for number in range(8000)]
MODES = {"one at a time": True, "batched": False}


def write_model(folder: Path, size: str) -> TextTokenizer:
    """Write an untrained pair with a tokenizer of made-up words."""
    tokens = [*SPECIAL_TOKENS.values(), *WORDS]
    tokenizer = build_wordpiece_tokenizer(tokens, lowercase=True)
    tokenizer.save(folder / "tokenizer")
    torch.manual_seed(0)
    electra = Electra(ModelConfig(size=size).electra_config(len(tokens)))
    save_model(electra, folder / "model", folder / "tokenizer")
    return tokenizer


def serve(model: str, threads: int, is_alone: bool) -> None:
    """Serve until this process is stopped; `is_alone` keeps requests from being computed together."""
    torch.set_num_threads(threads)
    if is_alone:
        server.CHARACTERS_PER_BATCH_TOKEN = 0
    limits = LimitsConfig()
    server.serve(ServeConfig(model=Path(model), port=0, page=False, device="cpu", limits=limits))


def start_server(model: Path, threads: int, is_alone: bool) -> tuple[subprocess.Popen, int]:
    """A process that serves, and its port."""
    command = [sys.executable, __file__, "--serve", str(model), "--threads", str(threads)]
    process = subprocess.Popen([*command, *["--alone"] * is_alone], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    return process, int(line.split("http://127.0.0.1:")[1].split()[0])


async def ask(port: int, texts: list[str], expected: list[list[str]], end: float, seconds: list[float]) -> int:
    """Send texts in turn until `end`; returns the number of wrong answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wrong = number = 0
    while time.perf_counter() < end:
        index = number % len(texts)
        body = json.dumps({"texts": [texts[index]]}).encode()
        head = (
            f"POST /detect HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        start = time.perf_counter()
        writer.write(head.encode() + body)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        length = int(answer_head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        seconds.append(time.perf_counter() - start)
        wrong += answer.get("results", [{}])[0].get("tokens") != expected[index]
        number += 1
    writer.close()
    return wrong


async def measure(
    port: int, clients: int, seconds: float, tokenizer: TextTokenizer, words: list[int]
) -> dict[str, Any]:
    """The requests per second of all clients."""
    generator = random.Random(0)
    latencies: list[float] = []
    texts = [
        [" ".join(generator.choices(WORDS, k=generator.randint(*words))) for _ in range(20)] for _ in range(clients)
    ]
    expected = [[tokenizer.library.encode(text).tokens for text in client_texts] for client_texts in texts]
    start = time.perf_counter()
    requests = [ask(port, *pair, start + seconds, latencies) for pair in zip(texts, expected, strict=True)]
    wrong = sum(await asyncio.gather(*requests))
    elapsed = time.perf_counter() - start
    middle, *_, high = statistics.quantiles(latencies, n=20)[9:]
    result = {"requests_per_second": round(len(latencies) / elapsed, 1), "wrong": wrong}
    return result | {"median_ms": round(1000 * middle, 1), "p95_ms": round(1000 * high, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="connections that ask at the same time")
    parser.add_argument("--seconds", type=float, default=20, help="time of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each server, in turns")
    parser.add_argument("--size", default="small", help="size of the model")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    parser.add_argument("--words", type=int, nargs=2, default=[5, 40], help="fewest and most words of a text")
    parser.add_argument("--serve", help="serve this model folder instead: what the script starts")
    parser.add_argument("--alone", action="store_true", help="with --serve: one request at a time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.threads, arguments.alone)
        return
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_model(Path(folder), arguments.size)
        servers = {
            name: start_server(Path(folder, "model"), arguments.threads, is_alone) for name, is_alone in MODES.items()
        }
        try:
            for number in range(arguments.rounds + 1):
                for name, (_, port) in servers.items():
                    seconds = arguments.seconds if number else min(2.0, arguments.seconds)
                    result = asyncio.run(measure(port, arguments.clients, seconds, tokenizer, arguments.words))
                    measured[name] += [result] if number else []  # the first is a warm-up
        finally:
            for process, _ in servers.values():
                process.terminate()
                process.wait()
    result = {"cpu": cpu_name(), "threads": arguments.threads, "size": arguments.size, "clients": arguments.clients}
    result |= {"words": arguments.words, "load": os.getloadavg()[0], "measured": measured}
    alone, batched = (
        statistics.mean(each["requests_per_second"] for each in measured[name]) for name in ("one at a time", "batched")
    )
    result["ratio"] = round(batched / alone, 2)
    print(json.dumps(result) if arguments.json else describe(result))


def describe(result: dict[str, Any]) -> str:
    lines = [f"{result['size']}, {result['clients']} clients, {result['threads']} threads, {result['cpu']}"]
    lines[0] += f", load {result['load']:.1f}"
    for name, rounds in result["measured"].items():
        lines += [f"  {name}: " + ", ".join(f"{key} {value}" for key, value in each.items()) for each in rounds]
    return "\n".join([*lines, f"  batched / one at a time: {result['ratio']}x"])


if __name__ == "__main__":
    main()
