"""Throughput and memory of `electra predict` and `electra embed` against a plain transformers loop on the same weights.

The loop takes rows in their order and pads each batch to its longest row. Both read a file and write a file; both run
in one thread on one core, alternately. Seconds are CPU time of the process, which other work hardly changes.

    python benchmarks/inference.py --vocab vocab.txt --sst2 glue/SST-2/train.tsv --squad squad/dev-v1.1.json
    python benchmarks/inference.py --vocab vocab.txt --sst2 glue/SST-2/train.tsv --memory-rows 100000 --size tiny
    python benchmarks/inference.py --vocab vocab.txt --sst2 glue/SST-2/train.tsv --memory-rows 1000000 --device cuda
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finetune import random_model
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from electra.config import build_config
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import PredictConfig, TaskConfig
from electra.finetuning.kinds import define_task
from electra.finetuning.predict import predict
from electra.finetuning.readers import read_rows
from electra.finetuning.storage import build_task_model, load_pretrained, save_finetuned_model
from electra.serving.config import EmbedConfig
from electra.serving.embed import embed

BATCH_SIZE = 64


def read_sst2(path: Path, count: int) -> list[str]:
    return [row.values["sentence"] for row in islice(read_rows(path), count)]


def read_squad_contexts(path: Path, count: int) -> list[str]:
    articles = json.loads(path.read_text())["data"]
    return [part["context"] for article in articles for part in article["paragraphs"]][:count]


def write_texts(path: Path, texts: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["text"], *([text] for text in texts)])
    return path


def make_models(vocab: Path, folder: Path, size: str, length: int) -> tuple[Path, Path]:
    """An untrained classifier of two classes, and the same exported for transformers."""
    encoder = random_model(vocab, folder, size)
    rows = folder / "rows.csv"
    rows.write_text("text,label\na,0\nb,1\nc,0\nd,1\n")
    task, pretrained = define_task(TaskConfig(train=rows)), load_pretrained(encoder)
    (folder / "tuned").mkdir()
    model = build_task_model(pretrained, task.num_labels, seed=1)
    save_finetuned_model(model, task, length, folder / "tuned", pretrained.folder)
    export(ExportConfig(model=folder / "tuned", output=folder / "tuned-huggingface"))
    return folder / "tuned", folder / "tuned-huggingface"


def electra_predict(model: Path, path: Path, output: Path, length: int) -> None:
    predict(build_config(PredictConfig, model=model, input=path, output=output, length=length, device="cpu"))


def electra_embed(model: Path, path: Path, output: Path, length: int) -> None:
    embed(build_config(EmbedConfig, model=model, input=path, output=output, length=length, device="cpu"))


@torch.inference_mode()
def transformers_predict(model: Path, path: Path, output: Path, length: int) -> None:
    tokenizer, classifier = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForSequenceClassification.from_pretrained(model),
    )
    classifier.eval()
    with path.open(newline="") as source, output.open("w", newline="") as target:
        rows, writer = csv.DictReader(source), csv.writer(target)
        while batch := list(islice(rows, BATCH_SIZE)):
            texts = [row["text"] for row in batch]
            inputs = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
            probabilities = classifier(**inputs).logits.softmax(1)
            for text, values in zip(texts, probabilities.tolist(), strict=True):
                writer.writerow([text, int(np.argmax(values)), *(round(value, 4) for value in values)])


@torch.inference_mode()
def transformers_embed(model: Path, path: Path, output: Path, length: int) -> None:
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    encoder.eval()
    vectors = []
    with path.open(newline="") as source:
        rows = csv.DictReader(source)
        while batch := [row["text"] for row in islice(rows, BATCH_SIZE)]:
            inputs = tokenizer(batch, padding=True, truncation=True, max_length=length, return_tensors="pt")
            mask = inputs["attention_mask"][..., None]
            hidden = encoder(**inputs).last_hidden_state
            vectors.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
    np.save(output, np.concatenate(vectors))


CONTENDERS: dict[str, tuple[Callable[..., None], Callable[..., None], str]] = {
    "predict": (electra_predict, transformers_predict, ".csv"),
    "embed": (electra_embed, transformers_embed, ".npy"),
}


def compare(path: Path, models: tuple[Path, Path], length: int, rounds: int, folder: Path) -> dict[str, Any]:
    """CPU seconds of both contenders for each command, medians of alternating rounds, after checking equal outputs."""
    results: dict[str, Any] = {}
    for name, (ours, theirs, suffix) in CONTENDERS.items():
        seconds: dict[str, list[float]] = {"electra": [], "transformers": []}
        outputs = [folder / f"{side}{suffix}" for side in seconds]
        for _ in range(rounds):
            for side, function, model, output in zip(seconds, (ours, theirs), models, outputs, strict=True):
                output.unlink(missing_ok=True)
                start = time.process_time()
                function(model, path, output, length)
                seconds[side].append(time.process_time() - start)
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        results[name] = medians | {
            "speedup": medians["transformers"] / medians["electra"],
            "difference": largest_difference(*outputs),
        }
    return results


def largest_difference(ours: Path, theirs: Path) -> float:
    """Between embeddings, or between the probabilities of predictions."""
    if ours.suffix == ".npy":
        return float(np.abs(np.load(ours) - np.load(theirs)).max())
    first, second = ([[float(cell) for cell in row[-2:]] for row in read_cells(path)] for path in (ours, theirs))
    return float(np.abs(np.array(first[-len(second) :]) - np.array(second)).max())


def read_cells(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row[-1][0].isdigit()]


def measure_memory(name: str, model: Path, path: Path, folder: Path, length: int, device: str) -> dict[str, float]:
    """Peak memory in MB, on the host and on the GPU, and seconds of a command in a process of its own."""
    output = folder / f"memory{CONTENDERS[name][2]}"
    output.unlink(missing_ok=True)
    flags = ["--model", model, "--input", path, "--output", output, "--length", length, "--device", device]
    code = (
        "import resource, runpy, sys, torch\n"
        "try: runpy.run_module('electra', run_name='__main__')\n"
        "finally:\n"
        "    gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0\n"
        "    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, gpu >> 10, file=sys.stderr)"
    )
    start = time.perf_counter()
    command = [sys.executable, "-c", code, name, *map(str, flags)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(process.stderr)
    host, gpu = (int(kilobytes) / 1024 for kilobytes in process.stderr.split("peak ")[1].split())
    return {"memory": host, "gpu_memory": gpu, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, required=True, help="vocab.txt of the untrained model")
    parser.add_argument("--size", default="small")
    parser.add_argument("--sst2", type=Path, help="a .tsv file with a column sentence")
    parser.add_argument("--squad", type=Path, help="a file in SQuAD's format, for its contexts")
    parser.add_argument("--rows", type=int, nargs=2, default=(2000, 400), help="of SST-2 and of SQuAD")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--memory-rows", type=int, help="instead: peak memory for a tenth of this number of rows and for all of them"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of --memory-rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # AutoModel ignores the head
    logging.disable_progress_bar()
    if hasattr(os, "sched_setaffinity") and arguments.device == "cpu":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sources = {
        "SST-2": (arguments.sst2, read_sst2, arguments.rows[0], 128),
        "SQuAD contexts": (arguments.squad, read_squad_contexts, arguments.rows[1], 512),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, (file, read, count, length) in sources.items():
            if file is None:
                continue
            folder = Path(temporary) / name.split()[0]
            folder.mkdir()
            models = make_models(arguments.vocab, folder, arguments.size, length)
            texts = read(file, arguments.memory_rows or count)
            if arguments.memory_rows:
                texts = (texts * -(-arguments.memory_rows // len(texts)))[: arguments.memory_rows]
                files = [write_texts(folder / f"{part}.csv", texts[: len(texts) // part]) for part in (10, 1)]
                results[name] = {
                    command: [
                        measure_memory(command, models[0], path, folder, length, arguments.device) for path in files
                    ]
                    for command in CONTENDERS
                }
            else:
                path = write_texts(folder / "texts.csv", texts)
                results[name] = compare(path, models, length, arguments.rounds, folder)
            for command, values in results[name].items():
                if not arguments.json:
                    print(f"{name:<16}{command:<9}{len(texts):>8,} rows  {format_values(values)}", flush=True)
    if arguments.json:
        print(json.dumps(results))


def format_values(values: Any) -> str:
    if isinstance(values, list):
        tenth, whole = values
        ratio = whole["memory"] / tenth["memory"]
        return (
            f"peak memory {tenth['memory']:,.0f} MB for a tenth, {whole['memory']:,.0f} MB for all ({ratio:.2f}×); on "
            f"the GPU {tenth['gpu_memory']:,.0f} and {whole['gpu_memory']:,.0f} MB; {whole['seconds']:.1f} s"
        )
    return (
        f"electra {values['electra']:7.1f} s   transformers {values['transformers']:7.1f} s   "
        f"{values['speedup']:.2f}×   outputs differ by up to {values['difference']:.1e}"
    )


if __name__ == "__main__":
    main()
