"""A table of question answering, tagging and multiple choice in electra and in a plain loop over transformers' model.

    python benchmarks/task_table.py --model hf-folder --squad squad/ --tagging conll/ --corpus text.txt --output table/
    python benchmarks/task_table.py … --tasks squad --minutes 8

The tasks (--tasks): squad, SQuAD 1.1, of which at most --train-rows questions are trained on; squad2, SQuAD 2.0, of
whose dev set a quarter of the articles is held out, because its training set may not be at hand; ner, CoNLL-2003;
chunking, CoNLL-2000, evaluated on its test file; choice, made from text: which of four sentences comes next; and
squad-all, all questions of SQuAD 1.1, which electra alone is trained on: its ratio compares times per row with those
that transformers has in squad.

Both contenders have the same weights, rows, epochs and settings (benchmarks/finetune.py) and train one seed at a time
in this process. Scores are medians and standard deviations over seeds of the task's first metric on its dev rows;
seconds are medians of the training alone, without its first step (which compiles), loading and evaluation.

Each result is appended to results.jsonl in --output when its seed ends. A repeated command only computes what is
missing there, also if the other files of --output were lost, so that tasks and seeds can be run in pieces: --tasks
and --seeds select some, and --minutes starts nothing that would probably not end in time. The table has all results of
the same model, device and settings. Several processes, each with an --output of its own, may share a GPU; their
results.jsonl can be joined. --peer-steps N then measures the seconds with nothing else on the GPU: one seed of electra
and N steps of the transformers loop, which the table takes instead of those of the results.
"""

import argparse
import hashlib
import json
import platform
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from finetune import compare_speed, format_speed, summarize, train_peer

from electra.config import build_config
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.jobs import prepare_jobs
from electra.finetuning.kinds import define_task, read_examples
from electra.finetuning.metrics import median
from electra.finetuning.tasks import Task
from electra.formatting import markdown_table
from electra.model.storage import WEIGHTS, is_huggingface_folder
from electra.runfolder import file_checksum, read_json, write_file, write_json

CHOICES = 4
HELD_OUT = 4  # every fourth article of SQuAD 2.0
MAX_CHOICE_DEV = 2000  # rows
LENGTH = 128  # tokens of a sentence, and of a context with a choice
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
TASKS = {
    "squad": "SQuAD 1.1",
    "squad2": "SQuAD 2.0, held-out articles",
    "ner": "CoNLL-2003, entities",
    "chunking": "CoNLL-2000, chunks",
    "choice": "next sentence of four",
    "squad-all": "SQuAD 1.1, all questions",
}
ELECTRA, TRANSFORMERS = "electra", "transformers"
"""The contenders."""
TAGGING_FILES = {  # copied with the names of a training and a dev file
    "ner": {"eng.train": "train.txt", "eng.testa": "dev.txt"},
    "chunking": {"train.txt": "train.txt", "test.txt": "dev.txt"},
}


def write_squad(source: Path, target: Path, max_questions: int | None, held_out: bool | None = None) -> None:
    """Write the first questions of a file of SQuAD; of all articles, of the held-out ones, or of the others."""
    content, count, kept = json.loads(source.read_text(encoding="utf-8")), 0, []
    for number, article in enumerate(content["data"]):
        paragraphs = []
        for paragraph in article["paragraphs"] if held_out in (None, number % HELD_OUT == 0) else ():
            room = len(paragraph["qas"]) if max_questions is None else max(0, max_questions - count)
            count += len(paragraph["qas"][:room])
            paragraphs.append(paragraph | {"qas": paragraph["qas"][:room]})
        kept.append(article | {"paragraphs": [each for each in paragraphs if each["qas"]]})
    write_json(target, content | {"data": [each for each in kept if each["paragraphs"]]})


def write_sentences(source: Path, target: Path, max_sentences: int | None) -> None:
    """Write the first sentences of a file of CoNLL columns."""
    sentences = source.read_text(encoding="utf-8").split("\n\n")[:max_sentences]
    write_file(target, "\n\n".join(sentences) + "\n")


def write_next_sentences(corpus: Path, files: dict[Path, int]) -> None:
    """Write rows of a choice task, a number of them to each file: two sentences and four that may follow.

    A paragraph is a line of the text; the wrong sentences are of other paragraphs, and no two files share any."""
    draw, paragraphs = random.Random(0), read_paragraphs(corpus)
    for path, count in files.items():
        texts = list(islice(paragraphs, count))
        if len(texts) < max(count, CHOICES):
            sys.exit(f"{corpus} has too few paragraphs of three sentences and more; give a larger text")
        rows = []
        for number, sentences in enumerate(texts):
            start = draw.randrange(len(sentences) - 2)
            others = draw.sample(range(1, len(texts)), CHOICES - 1)  # distances to other paragraphs
            choices = [draw.choice(texts[(number + other) % len(texts)]) for other in others]
            label = draw.randrange(CHOICES)
            choices.insert(label, sentences[start + 2])
            rows.append({"context": " ".join(sentences[start : start + 2]), "choices": choices, "label": label})
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_paragraphs(corpus: Path) -> Iterator[list[str]]:
    """The sentences of usual length of the lines that have at least three of them."""
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            sentences = [part for part in SENTENCE_END.split(line.strip()) if 5 <= len(part.split()) <= 40]
            if len(sentences) >= 3:
                yield sentences


def write_data(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Write the rows of a task, the same each time; returns its settings for `electra finetune`."""
    train_rows, dev_rows = options.train_rows, options.dev_rows
    folder.mkdir(parents=True, exist_ok=True)
    if name == "choice":
        files = {"train": folder / "train.jsonl", "dev": folder / "dev.jsonl"}
        dev_rows = min(MAX_CHOICE_DEV, dev_rows or MAX_CHOICE_DEV)
        write_next_sentences(options.corpus, {files["dev"]: dev_rows, files["train"]: train_rows})
        return files | {"kind": "choice", "text": "context", "length": LENGTH}
    if name in ("ner", "chunking"):
        corpus = options.tagging / {"ner": "conll2003", "chunking": "conll2000"}[name]
        for file, copied in TAGGING_FILES[name].items():
            write_sentences(corpus / file, folder / copied, dev_rows if copied == "dev.txt" else train_rows)
        return {"task": name, "data": str(folder), "length": LENGTH}
    version, rows = ("v2.0" if name == "squad2" else "v1.1"), {"train": train_rows, "dev": dev_rows}
    for split in ("train", "dev"):
        if name == "squad2":
            write_squad(
                options.squad / "dev-v2.0.json", folder / f"{split}-{version}.json", rows[split], split == "dev"
            )
        else:
            max_questions = None if (name, split) == ("squad-all", "train") else rows[split]
            write_squad(options.squad / f"{split}-{version}.json", folder / f"{split}-{version}.json", max_questions)
    return {"task": "squad2" if name == "squad2" else "squad", "data": str(folder), "length": options.squad_length}


@dataclass(frozen=True)
class PeerComparison:
    """A task with the settings of both contenders."""

    name: str
    config: FinetuneConfig
    task: Task
    settings: dict[str, Any]  # all that results depend on
    file: Path  # of results

    def run(self, contender: str, seed: int) -> None:
        """Train one seed of a contender and append its result to the file."""
        start = time.perf_counter()
        values = (self.run_electra if contender == ELECTRA else self.run_transformers)(seed)
        wall = time.perf_counter() - start
        result = {"task": self.name, "contender": contender, "seed": seed, "metric": self.task.metrics[0]}
        result |= values | {"wall_seconds": wall, "settings": self.settings}
        write_file(self.file, "".join(json.dumps(each) + "\n" for each in [*read_results(self.file), result]))
        score = f"{result['metric']} {100 * values['score']:.1f}"
        times = f"{values['seconds']:.1f} s of training, {wall:.0f} s in all"
        print(f"{self.name}, {contender}, seed {seed}: {score}, {times}", file=sys.stderr, flush=True)

    def run_electra(self, seed: int) -> dict[str, Any]:
        jobs = prepare_jobs(self.config, self.task, seed, self.config.output)
        result = jobs[-1].run(quiet=True)
        rows = {"train": result.rows["train"], "dev": result.rows["dev"]}
        return {"score": result.main_metric, "seconds": result.seconds, "steps": result.steps, "rows": rows}

    def run_transformers(self, seed: int) -> dict[str, Any]:
        peer, seconds = train_peer(self.config, self.task, seed)
        return {"score": peer.score(read_examples(self.task, "dev")), "seconds": seconds}

    def results(self, contender: str) -> dict[int, dict[str, Any]]:
        """The stored results of a contender with these settings, by seed."""
        mine = [each for each in read_results(self.file) if each["settings"] == self.settings]
        return {each["seed"]: each for each in mine if (each["task"], each["contender"]) == (self.name, contender)}


def read_results(file: Path) -> list[dict[str, Any]]:
    """The results of all seeds so far."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def measure_times(comparison: PeerComparison, peer_steps: int, file: Path) -> None:
    """Measure the seconds of both contenders for one seed and add them to a file."""
    config = replace(comparison.config, output=comparison.config.output.with_name(f"{comparison.name}-times"))
    speed = compare_speed(config, comparison.task, peer_steps)
    seconds = {ELECTRA: speed["electra"], TRANSFORMERS: speed["peer"]}
    write_json(file, read_times(file) | {comparison.name: {"seconds": seconds, "settings": comparison.settings}})
    print(f"{comparison.name}, times: {format_speed(speed)}", file=sys.stderr, flush=True)


def read_times(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def make_rows(results: list[dict[str, Any]], times: dict[str, Any], weights: str, device: str) -> list[dict[str, Any]]:
    """The rows of the table: of each task, the results of a model and device with the settings that were used last."""
    same = [each for each in results if (each["settings"]["weights"], each["settings"]["device"]) == (weights, device)]
    rows = []
    for name in TASKS:
        of_task = [each for each in same if each["task"] == name]
        settings = of_task[-1]["settings"] if of_task else None
        seeds = {
            who: [each for each in of_task if each["contender"] == who and each["settings"] == settings]
            for who in (ELECTRA, TRANSFORMERS)
        }
        if settings is not None and seeds[ELECTRA]:
            row = {"task": name, "metric": of_task[-1]["metric"], "rows": seeds[ELECTRA][0]["rows"]}
            row |= {"length": settings["length"], "epochs": settings["epochs"]}
            for who, finished in seeds.items():
                if finished:
                    alone = times.get(name, {"settings": None})
                    is_measured = alone["settings"] == settings
                    seconds = alone["seconds"][who] if is_measured else median([seed["seconds"] for seed in finished])
                    row[who] = summarize([seed["score"] for seed in finished]) | {"seconds": seconds}
            rows.append(row)
    add_ratios(rows)
    return rows


def make_comparison(options: argparse.Namespace, name: str, model: Path, device: str) -> PeerComparison:
    data = write_data(options, name, options.output / "data" / name)
    config = build_config(FinetuneConfig, **data, epochs=options.epochs, device=device, model=model, output=Path())
    task = define_task(config.task)
    settings = {
        "weights": file_checksum(model / WEIGHTS),
        "device": device_name(device),
        "length": config.tuning.length_for(task),
        "epochs": config.tuning.epochs_for(task),
        "batch_size": config.tuning.batch_size,
        "files": {split: file_checksum(Path(file)) for split, file in task.splits.items()},
    }
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]  # other settings need another folder
    config = replace(config, output=options.output / f"{name}-{digest}")
    return PeerComparison(name, config, task, settings, options.output / "results.jsonl")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def run_missing(comparison: PeerComparison, seeds: list[int], deadline: float) -> bool:
    """Run the seeds without a result; returns False if there was not enough time for all of them."""
    contenders = (ELECTRA,) if comparison.name == "squad-all" else (ELECTRA, TRANSFORMERS)
    for seed in seeds:
        for contender in contenders:
            done = comparison.results(contender)
            expected = max((each["wall_seconds"] for each in done.values()), default=0.0)
            if seed in done:
                continue
            if time.perf_counter() + 1.2 * expected > deadline:
                return False
            comparison.run(contender, seed)
    return True


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the ratio of times of each row, per trained row."""
    peers = {row["task"]: row for row in rows if TRANSFORMERS in row}
    for row in rows:
        peer = peers.get("squad" if row["task"] == "squad-all" else row["task"])
        if peer is not None and (peer["length"], peer["epochs"]) == (row["length"], row["epochs"]):
            seconds = peer[TRANSFORMERS]["seconds"] / peer["rows"]["train"]
            row["ratio"] = seconds / (row[ELECTRA]["seconds"] / row["rows"]["train"])


def format_table(rows: list[dict[str, Any]], device: str) -> str:
    header = ["task", "train and dev rows", "tokens", "epochs", "metric", *(ELECTRA, TRANSFORMERS)]
    cells = [[*header, f"{ELECTRA}, s", f"{TRANSFORMERS}, s", "ratio of times per row"]]
    for row in rows:
        sizes = f"{row['rows']['train']:,}, {row['rows']['dev']:,}"
        both = [row.get(who) for who in (ELECTRA, TRANSFORMERS)]
        scores = [format_score(each) if each else "–" for each in both]
        seconds = [f"{each['seconds']:.1f}" if each else "–" for each in both]
        ratio = f"{row['ratio']:.1f}×" if "ratio" in row else "–"
        shape = [str(row["length"]), str(row["epochs"]), row["metric"]]
        cells.append([TASKS[row["task"]], sizes, *shape, *scores, *seconds, ratio])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device_name(device)}, {versions}; ± standard deviation (number of seeds)\n\n{markdown_table(cells)}"


def format_score(scores: dict[str, Any]) -> str:
    spread = f" ± {100 * scores['spread']:.2f}" if len(scores["seeds"]) > 1 else ""
    return f"{100 * scores['median']:.2f}{spread} ({len(scores['seeds'])})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of ELECTRA, or a run to export")
    parser.add_argument("--squad", type=Path, required=True, help="folder of train-v1.1, dev-v1.1 and dev-v2.0.json")
    parser.add_argument("--tagging", type=Path, required=True, help="folder of conll2003/ and conll2000/")
    parser.add_argument("--corpus", type=Path, required=True, help="text for the choice task, a paragraph a line")
    parser.add_argument("--output", type=Path, required=True, help="folder for rows, models and results")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start nothing that takes longer (default: no limit)"
    )
    parser.add_argument(
        "--peer-steps", type=int, help="measure only seconds: one seed of electra, and this many steps of transformers"
    )
    parser.add_argument("--epochs", type=int, help="default: those of electra finetune")
    parser.add_argument("--train-rows", type=int, default=20_000, help="at most, of each task")
    parser.add_argument("--dev-rows", type=int, help="at most, of each task (default: all)")
    parser.add_argument("--squad-length", type=int, default=384, help="tokens of a window (at most those of the model)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    deadline = time.perf_counter() + 60 * options.minutes
    model, device = options.model, "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    if not is_huggingface_folder(model):
        model = options.output / "huggingface"
        if not model.exists():
            export(ExportConfig(model=options.model, output=model))
    settings = read_json(model / "config.json")
    if settings["model_type"] != "electra":
        parser.error(f"{options.model} is no classic ELECTRA, which the loop over transformers' model needs")
    options.squad_length = min(options.squad_length, settings["max_position_embeddings"])
    rows: list[dict[str, Any]] = []
    times = options.output / "times.json"
    for name in options.tasks:
        comparison = make_comparison(options, name, model, device)
        if options.peer_steps:
            measure_times(comparison, options.peer_steps, times)
        elif not run_missing(comparison, options.seeds, deadline):
            print(f"{name}: not finished within --minutes; repeat the command to continue", file=sys.stderr)
        results = read_results(comparison.file)
        rows = make_rows(results, read_times(times), comparison.settings["weights"], comparison.settings["device"])
        write_file(options.output / "table.md", format_table(rows, device) + "\n")
        write_json(options.output / "table.json", {"results": rows})
    print(json.dumps(rows) if options.json else format_table(rows, device))


if __name__ == "__main__":
    main()
