"""Show that a refactoring changed no result: run both checkouts with fixed seeds and compare them bit for bit.

    python benchmarks/same_results.py --before ../old [--after .] [--quick]

Each case is a run of the command line on the CPU in fp32: 20 steps of pre-training, or a short fine-tuning. All metrics
of metrics.jsonl except timings, and the final weights, are compared. The exit code is 1 if anything differs.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
# imported once and inherited by every forked run; electra itself is imported by each run from its checkout
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "safetensors.torch",
    "tokenizers",
)

MODEL = "--size tiny --layers 2 --width 32 --heads 2 --feedforward 64 --embedding-width 16 --positions 64"
ROWS = "--length 32 --batch-size 8 --steps 20 --log-every 1 --evaluate-every 10 --evaluation-rows 16"
RUN = "--seed 3 --device cpu --precision fp32 --keep-checkpoints 1"
TUNE = "--epochs 2 --batch-size 16 --length 32 --dev-fraction 0.25 --device cpu --precision fp32"
SAME_SIZE = "--generator-width 32 --sharing none"
TWO_STAGE = f"--phases objective=mlm objective=frozen-rtd {SAME_SIZE}"
TIMINGS = ("seconds", "per_second", "minutes")
WORDS = ("the", "big", "small", "red", "cat", "sat", "on", "mat", "dog", "ran", "in", "house", "bird", "flew", ",")


@dataclass(frozen=True)
class Case:
    """One run of the command line; `{data}` and `{runs}` in its flags are folders of its checkout's results."""

    name: str
    command: str
    flags: str


def pretraining(name: str, flags: str, model: str = MODEL) -> Case:
    return Case(name, "pretrain", f"--data {{data}}/shards --output {{runs}}/{name} {model} {ROWS} {RUN} {flags}")


def finetuning(name: str, flags: str) -> Case:
    return Case(f"finetune-{name}", "finetune", f"--output {{runs}}/finetune-{name} {TUNE} {flags}")


def preparation() -> list[Case]:
    shard = "--corpus {data}/corpus.txt --tokenizer {data}/vocab --output {data}/shards --validation-fraction 0.1"
    return [
        Case("tokenizer", "tokenizer", "--corpus {data}/corpus.txt --output {data}/vocab --vocab-size 120"),
        Case("shard", "shard", f"{shard} --workers 1"),
    ]


def objective_cases(quick: bool) -> Iterator[Case]:
    """Every objective, style and sharing scheme that may go together."""
    styles = ("classic",) if quick else ("classic", "modern")
    sharings = ("embeddings",) if quick else ("none", "embeddings", "all", "disentangled")
    objectives = ("rtd", "electra-15", "replace-mlm", "all-tokens-mlm", "adversarial")
    for style, objective, sharing in itertools.product(styles, objectives, sharings):
        flags = f"--style {style} --objective {objective} --sharing {sharing}"
        yield pretraining(f"{style}-{objective}-{sharing}", flags)
    for style in styles:
        yield pretraining(f"{style}-mlm", f"--style {style} --objective mlm")
        yield pretraining(f"{style}-two-stage", f"--style {style} {TWO_STAGE}")


def option_cases() -> Iterator[Case]:
    """Recipes, packing, dropout, phases, micro-batches and the options of masking, sampling and losses."""
    yield pretraining("faithful", "--recipe faithful --warmup 0.1")
    yield pretraining("faithful-modern", "--recipe faithful --style modern --warmup 0.1")
    yield pretraining("segment-pairs", "--packing segment-pairs")
    yield pretraining("segment-pairs-modern", "--packing segment-pairs --style modern --dropout 0.1")
    yield pretraining("faithful-packed", "--recipe faithful --packing packed --dropout 0")
    yield pretraining("dropout", "--dropout 0.1")
    yield pretraining("dropout-modern", "--dropout 0.1 --style modern")
    yield pretraining("micro-batches", "--micro-batches 4")
    yield pretraining(
        "micro-batches-segment-pairs", "--micro-batches 2 --packing segment-pairs --objective adversarial"
    )
    yield pretraining("cross-document-attention", "--cross-document-attention")
    yield pretraining("local-attention", "--style modern --global-attention-every 2 --local-attention 8")
    yield pretraining("activation-checkpointing", "--activation-checkpointing --dropout 0.1")
    yield pretraining("two-stage-new-discriminator", f"{TWO_STAGE} --no-init-discriminator-from-generator")
    yield pretraining("phases", "--phases fraction=0.5 fraction=0.5,length=48,batch-size=4,temperature=0.5")
    yield pretraining("uniform", "--generator uniform")
    yield pretraining("unigram", "--generator unigram --objective replace-mlm")
    yield pretraining("temperature", "--temperature 0.7 --disallow-correct")
    yield pretraining("correct-sample-label", "--correct-sample-label replaced --discriminator-weight 20")
    yield pretraining("entropy-bonus", "--objective adversarial --entropy-bonus 0.1")
    yield pretraining("whole-words", "--whole-word-masking --mask-count paper")
    yield pretraining("bert-masking", "--objective mlm --mask-token-probability 0.8 --random-token-probability 0.1")
    yield pretraining("no-init-options", "--no-unigram-output-bias --no-sinusoidal-positions --no-scale-init-by-width")
    yield pretraining("adamw-cosine", "--optimizer adamw --schedule cosine --max-grad-norm 0 --warmup 3")
    yield pretraining("wsd", "--schedule wsd --decay-fraction 0.3")
    yield pretraining("init", "--init {runs}/classic-rtd-embeddings", model="")


def finetuning_cases() -> Iterator[Case]:
    """Every kind of task."""
    classic = "--model {runs}/classic-rtd-embeddings"
    yield finetuning("classification", f"{classic} --train {{data}}/classification.jsonl --dropout 0.1")
    yield finetuning("pair", f"{classic} --train {{data}}/pair.jsonl --text-b text_b")
    yield finetuning("regression", f"{classic} --train {{data}}/regression.jsonl --faithful")
    yield finetuning("multi-label", f"{classic} --train {{data}}/multi-label.jsonl --kind multi-label")
    modern = "--model {runs}/faithful-modern --pooling mean"
    yield finetuning("modern", f"{modern} --train {{data}}/classification.jsonl --micro-batches 2")


def cases(quick: bool) -> list[Case]:
    options = [case for case in option_cases() if not quick or case.name in ("faithful", "faithful-modern", "dropout")]
    return [*preparation(), *objective_cases(quick), *options, *finetuning_cases()]


def write_inputs(folder: Path) -> None:
    """A corpus and one file for each kind of fine-tuning task."""
    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(4, 14))) + " ."

    documents = ["\n".join(sentence() for _ in range(draw.randint(1, 8))) for _ in range(400)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    for kind in ("classification", "pair", "regression", "multi-label"):
        rows = []
        for _ in range(64):
            text, text_b = sentence(), sentence()
            labels = [word for word in ("cat", "dog", "bird") if word in text.split()]
            label: Any = {"regression": float(len(text.split())), "multi-label": labels}.get(kind, str(bool(labels)))
            rows.append({"text": text, "text_b": text_b, "label": label})
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(case: Case, checkout: Path, folder: Path) -> None:
    """Run a case in a forked process, as `python -m electra …` in `checkout`; stops with its output if it fails."""
    arguments = [case.command, *shlex.split(case.flags.format(data=folder / "data", runs=folder / "runs"))]
    log = folder / "logs" / f"{case.name}.txt"
    process = multiprocessing.get_context("fork").Process(target=run_electra, args=(checkout, arguments, log))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(
            f"{checkout}: electra {shlex.join(arguments)}\nexit code {process.exitcode}\n{log.read_text()[-3000:]}"
        )


def run_electra(checkout: Path, arguments: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = sys.path[0] = str(checkout)
    sys.argv = ["electra", *arguments]
    with suppress(ImportError):  # drawing takes longer than 20 steps
        import_module("matplotlib.figure").Figure.savefig = save_nothing
    runpy.run_module("electra", run_name="__main__", alter_sys=True)


def save_nothing(figure: Any, file: Any, **options: Any) -> None:
    if isinstance(file, str | Path):
        Path(file).touch()


def results(case: Case, folder: Path) -> dict[str, str]:
    """Everything a case produced that must not change: metrics by line and name, and checksums of files and weights."""
    if case.command in ("tokenizer", "shard"):
        produced = folder / "data" / {"tokenizer": "vocab", "shard": "shards"}[case.command]
        paths = [*produced.glob("vocab.txt"), *produced.glob("*.safetensors")]
        return {path.name: checksums(path) for path in sorted(paths)}
    values = {}
    for path in sorted((folder / "runs" / case.name).rglob("metrics.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            record = json.loads(line)
            for name, value in record.items():
                if isinstance(value, float) and not name.endswith(TIMINGS):
                    values[f"{record.get('kind', '')} line {number}, {name}"] = repr(value)
    models = sorted((folder / "runs" / case.name).rglob("model.safetensors"))
    assert values, f"{case.name}: no metrics in {folder}"
    assert models, f"{case.name}: no weights in {folder}"
    return values | {"weights": checksums(models[-1])}


def checksums(path: Path) -> str:
    """Checksum of a file; of a .safetensors file, of the set of its tensors: their names may differ.

    Shards of later checkouts also hold checksums of their blocks, which do not count."""
    if path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    tensors = import_module("safetensors.numpy").load_file(path)
    tensors.pop("checksums", None)
    digests = {hashlib.sha256(f"{x.dtype} {x.shape}".encode() + x.tobytes()).hexdigest() for x in tensors.values()}
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()[:16]


def first_difference(before: dict[str, str], after: dict[str, str]) -> str | None:
    for name in before:  # metrics may be added
        if before.get(name) != after.get(name):
            return f"{name}: {before.get(name, 'missing')} before, {after.get(name, 'missing')} after"
    return None


def compare(case: Case, checkouts: list[Path], folders: list[Path]) -> bool:
    """Run a case in both checkouts, print its line of the table, and return whether the results are identical."""
    start, both = time.perf_counter(), []
    for checkout, folder in zip(checkouts, folders, strict=True):
        run(case, checkout, folder)
        both.append(results(case, folder))
    difference = first_difference(*both)
    outcome = difference or f"identical ({len(both[0])} values)"
    print(f"| {case.name} | {outcome} | {time.perf_counter() - start:.1f} s |", flush=True)
    return difference is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout with the results that must not change")
    parser.add_argument("--after", type=Path, default=Path(), help="checkout to compare with it (default: here)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the cases")
    parser.add_argument("--only", default="", help="only pre-training cases whose name contains this text")
    arguments = parser.parse_args()
    for name in LIBRARIES:
        with suppress(ImportError):
            import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, name) for name in ("before", "after")]
        for folder in folders:
            for name in ("data", "runs", "logs"):
                (folder / name).mkdir(parents=True)
            write_inputs(folder / "data")
        print("| case | result | time of both |\n|---|---|---|", flush=True)
        selected = [case for case in cases(arguments.quick) if case in preparation() or arguments.only in case.name]
        checkouts = [arguments.before.resolve(), arguments.after.resolve()]
        same = [compare(case, checkouts, folders) for case in selected]
    print(f"{sum(same)} of {len(same)} cases identical")
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
