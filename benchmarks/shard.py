"""Speed and memory of `electra shard`, compared with the bare tokenizer and a `datasets.map` script.

    python benchmarks/shard.py --corpus FOLDER --vocab vocab.txt [--megabytes 160] [--json]

Each contender runs as a process on the same text and cores; the best of its rounds counts. The time is that of the
whole process, except for the bare tokenizer, which encodes text in memory and discards the ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from electra.cli import parse_config
from electra.data.corpus import Corpus, CorpusConfig, ReadStats

BARE = """
import json, sys, time
from pathlib import Path
from electra.data.tokenizer import load_tokenizer

library = load_tokenizer(Path(sys.argv[2])).library
documents = Path(sys.argv[1]).read_text(encoding="utf-8").split("\\n\\n")

def seconds(documents, batch):
    begin = time.perf_counter()
    for start in range(0, len(documents), batch):
        library.encode_batch_fast(documents[start : start + batch], add_special_tokens=False)
    return time.perf_counter() - begin

sample = documents[: len(documents) // 8]
best = min((64, 256, 1000, 4000), key=lambda batch: seconds(sample, batch))
print(json.dumps({"batch": best, "seconds": seconds(documents, best)}))
"""

MAP = """
import sys
from itertools import chain
from datasets import load_dataset
from transformers import AutoTokenizer

text, vocabulary, cores, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(vocabulary, model_max_length=10**9)

def tokenize(rows):
    return tokenizer(rows["text"], return_special_tokens_mask=True)

def group_texts(rows, length=128):
    joined = {name: list(chain.from_iterable(column)) for name, column in rows.items()}
    total = len(joined["input_ids"]) // length * length
    return {name: [ids[at : at + length] for at in range(0, total, length)] for name, ids in joined.items()}

if __name__ == "__main__":
    rows = load_dataset("text", data_files=text, sample_by="paragraph", split="train", cache_dir=cache)
    tokens = rows.map(tokenize, batched=True, num_proc=int(cores), remove_columns=["text"])
    grouped = tokens.map(group_texts, batched=True, num_proc=int(cores))
    assert len(grouped)
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare `electra shard` with the bare tokenizer and with `datasets.map`."""

    corpus: str
    """Text corpus, as in electra shard."""
    vocab: Path
    """vocab.txt or folder of a tokenizer."""
    megabytes: int = 160
    """Size of the text; memory is also measured with four times as much."""
    cores: int = 2
    """Cores for each contender."""
    rounds: int = 2
    """Runs of each contender."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Result:
    """Speeds in MB of text per second, memory in MB."""

    megabytes: float
    cores: int
    electra: float
    bare: float
    bare_batch: int
    map_script: float
    electra_memory: float
    map_memory: float
    electra_memory_four_times: float
    electra_four_times: float

    def __str__(self) -> str:
        larger = self.electra_memory_four_times / self.electra_memory - 1
        return "\n".join(
            [
                f"{self.megabytes:.0f} MB of text, {self.cores} cores          MB/s   of bare   peak memory",
                f"electra shard                     {self.electra:9.2f} {self.electra / self.bare:8.2f}x"
                f" {self.electra_memory:9.0f} MB",
                f"encode_batch_fast, batch {self.bare_batch:<6}   {self.bare:9.2f}     1.00x",
                f"datasets.map + group_texts        {self.map_script:9.2f} {self.map_script / self.bare:8.2f}x"
                f" {self.map_memory:9.0f} MB",
                f"electra shard, 4 times the text   {self.electra_four_times:9.2f} "
                f"{self.electra_four_times / self.bare:8.2f}x {self.electra_memory_four_times:9.0f} MB ({larger:+.1%})",
                f"electra shard is {self.electra / self.map_script:.1f} times as fast as datasets.map",
            ]
        )


def main(settings: Settings) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        text, large, script = (Path(scratch) / name for name in ("text.txt", "large.txt", "map_script.py"))
        size = write_sample(settings.corpus, text, settings.megabytes)
        write_sample(settings.corpus, large, 4 * settings.megabytes)
        script.write_text(MAP)
        four_times = run_process(shard_command(settings, large, f"{scratch}/large"))
        ours, bare, maps = [], [], []
        for number in range(settings.rounds):
            ours.append(run_process(shard_command(settings, text, f"{scratch}/{number}")))
            output = run_process([sys.executable, "-c", BARE, str(text), str(settings.vocab)], settings.cores).output
            bare.append(json.loads(output))
            arguments = [str(text), f"{scratch}/large/tokenizer", str(settings.cores), f"{scratch}/cache{number}"]
            maps.append(run_process([sys.executable, str(script), *arguments]))
        fastest = min(bare, key=lambda run: run["seconds"])
        return Result(
            megabytes=size,
            cores=settings.cores,
            electra=size / min(run.seconds for run in ours),
            bare=size / fastest["seconds"],
            bare_batch=fastest["batch"],
            map_script=size / min(run.seconds for run in maps),
            electra_memory=max(run.memory for run in ours),
            map_memory=max(run.memory for run in maps),
            electra_memory_four_times=four_times.memory,
            electra_four_times=large.stat().st_size / 1e6 / four_times.seconds,
        )


def write_sample(corpus: str, path: Path, megabytes: int) -> float:
    """Write documents of the corpus, repeated if necessary, up to a size; returns the size in MB."""
    size = 0
    with open(path, "wb") as file:
        while size < megabytes * 1e6:
            for document in Corpus(CorpusConfig(corpus=corpus)).read_documents(ReadStats()):
                size += file.write(document.strip() + b"\n\n")
                if size >= megabytes * 1e6:
                    break
    return size / 1e6


def shard_command(settings: Settings, text: Path, output: str) -> list[str]:
    flags = ["--corpus", str(text), "--tokenizer", str(settings.vocab), "--output", output]
    return [sys.executable, "-m", "electra", "shard", *flags, "--workers", str(settings.cores)]


@dataclass(frozen=True)
class ProcessResult:
    seconds: float
    memory: float  # peak MB, including child processes
    output: str


def run_process(command: list[str], threads: int = 1) -> ProcessResult:
    """Run a command and sample the memory of its processes."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    start, peak = time.perf_counter(), 0.0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(resident_megabytes, process_tree(process.pid))))
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        output, errors = process.communicate()
    if process.returncode:
        sys.exit(errors)
    return ProcessResult(seconds, peak, output)


def process_tree(process: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the process has ended
            continue
        for child in children:
            yield from process_tree(int(child))


def resident_megabytes(process: int) -> float:
    """Proportional set size of a process in MB."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    settings = parse_config("benchmarks/shard.py", Settings, sys.argv[1:])
    result = main(settings)
    print(json.dumps(asdict(result)) if settings.json else result)
