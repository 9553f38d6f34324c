"""A table of question answering, tagging and multiple choice in electra and in a plain loop over transformers' model.

    python benchmarks/task_table.py --model hf-folder --squad squad/ --tagging conll/ --corpus text.txt --output table/

One table of five tasks: SQuAD 1.1; SQuAD 2.0, of whose dev set a quarter of the articles is held out, because its
training set may not be at hand; CoNLL-2003 and CoNLL-2000 (folders conll2003 and conll2000 of --tagging); and a choice
task that is made from text: which of four sentences comes next. Both contenders have the same weights, rows, epochs and
settings (benchmarks/finetune.py) and train one seed at a time. Scores are medians and standard deviations over seeds of
the task's first metric on its dev rows; seconds are medians of the training alone, without its first step (which
compiles), loading and evaluation.

Every finished seed is kept in --output: an interrupted command continues when it is repeated.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from finetune import finetune, summarize, train_peer

from electra.config import build_config
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.glue import markdown_table
from electra.finetuning.job import RESULT
from electra.finetuning.kinds import define_task, read_examples
from electra.finetuning.metrics import median
from electra.model.storage import is_huggingface_folder
from electra.runfolder import read_json, write_file, write_json

CHOICES = 4
HELD_OUT = 4  # every fourth article of SQuAD 2.0
MAX_CHOICE_DEV = 2000  # rows
LENGTH = 128  # tokens of a sentence, and of a context with a choice
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")


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


def write_data(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the rows of all tasks; returns their settings for `electra finetune`, by the names in the table."""
    train_rows, dev_rows = options.train_rows, options.dev_rows
    for name in ("squad", "squad2", "conll2003", "conll2000"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train_rows), ("dev", dev_rows)):
        write_squad(options.squad / f"{split}-v1.1.json", folder / f"squad/{split}-v1.1.json", rows)
        squad2 = folder / f"squad2/{split}-v2.0.json"
        write_squad(options.squad / "dev-v2.0.json", squad2, rows, held_out=split == "dev")
    for name, rows in {"conll2003/eng.train": train_rows, "conll2003/eng.testa": dev_rows}.items():
        write_sentences(options.tagging / name, folder / name, rows)
    write_sentences(options.tagging / "conll2000/train.txt", folder / "conll2000/train.txt", train_rows)
    choice = {"train": folder / "choice-train.jsonl", "dev": folder / "choice-dev.jsonl"}
    write_next_sentences(
        options.corpus, {choice["dev"]: min(MAX_CHOICE_DEV, dev_rows or MAX_CHOICE_DEV), choice["train"]: train_rows}
    )
    questions = {"length": options.squad_length}
    return {
        "SQuAD 1.1": {"task": "squad", "data": str(folder / "squad")} | questions,
        "SQuAD 2.0, held-out articles": {"task": "squad2", "data": str(folder / "squad2")} | questions,
        "CoNLL-2003, entities": {"task": "ner", "data": str(folder / "conll2003"), "length": LENGTH},
        "CoNLL-2000, chunks": {"task": "chunking", "data": str(folder / "conll2000"), "length": LENGTH},
        "next sentence of four": choice | {"kind": "choice", "text": "context", "length": LENGTH},
    }


def compare(config: FinetuneConfig, name: str) -> dict[str, Any]:
    """Scores and seconds of both contenders, for every seed."""
    task, seeds = define_task(config.task), range(1, config.jobs.seeds + 1)
    metric, result = task.metrics[0], finetune(config)
    stored = [read_json(config.output / f"seed-{seed}" / RESULT) for seed in seeds]
    peers = []
    for seed in seeds:
        path = config.output.with_name(f"{config.output.name}-peer-{seed}.json")
        if not path.exists():
            peer, elapsed = train_peer(config, task, seed)
            write_json(path, {"score": peer.score(read_examples(task, "dev")), "seconds": elapsed})
        peers.append(read_json(path))
        print(f"{name}, seed {seed}: transformers {metric} {100 * peers[-1]['score']:.1f}", file=sys.stderr, flush=True)
    seconds = {"electra": median([each["seconds"] for each in stored]), "peer": median([p["seconds"] for p in peers])}
    return {
        "task": name,
        "rows": result.rows,
        "metric": metric,
        "electra": summarize([seed["dev"][metric] for seed in result.seeds]),
        "peer": summarize([peer["score"] for peer in peers]),
        "seconds": seconds,
        "speedup": seconds["peer"] / seconds["electra"],
    }


def format_table(results: list[dict[str, Any]]) -> str:
    cells = [
        ["task", "train and dev rows", "metric", "electra", "transformers", "electra, s", "transformers, s", "ratio"]
    ]
    for each in results:
        scores = [f"{100 * each[who]['median']:.2f} ± {100 * each[who]['spread']:.2f}" for who in ("electra", "peer")]
        seconds = [f"{each['seconds'][who]:.1f}" for who in ("electra", "peer")]
        rows = f"{each['rows']['train']:,}, {each['rows']['dev']:,}"
        cells.append([each["task"], rows, each["metric"], *scores, *seconds, f"{each['speedup']:.1f}×"])
    return markdown_table(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of ELECTRA, or a run to export")
    parser.add_argument("--squad", type=Path, required=True, help="folder of train-v1.1, dev-v1.1 and dev-v2.0.json")
    parser.add_argument("--tagging", type=Path, required=True, help="folder of conll2003/ and conll2000/")
    parser.add_argument("--corpus", type=Path, required=True, help="text for the choice task, a paragraph a line")
    parser.add_argument("--output", type=Path, required=True, help="folder for rows, models and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: those of electra finetune")
    parser.add_argument("--train-rows", type=int, default=20_000, help="at most, of each task")
    parser.add_argument("--dev-rows", type=int, help="at most, of each task with a dev file (default: all)")
    parser.add_argument("--squad-length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, device = options.model, "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    if not is_huggingface_folder(model):
        model = options.output / "huggingface"
        if not model.exists():
            export(ExportConfig(model=options.model, output=model))
    results = []
    for number, (name, settings) in enumerate(write_data(options, options.output / "data").items()):
        jobs = {"seeds": options.seeds, "workers": 1, "device": device, "epochs": options.epochs}
        output = options.output / f"task-{number + 1}"
        results.append(compare(build_config(FinetuneConfig, model=model, output=output, **settings, **jobs), name))
        write_file(options.output / "table.md", format_table(results) + "\n")
        write_json(options.output / "table.json", {"results": results})
    print(json.dumps(results) if options.json else format_table(results))


if __name__ == "__main__":
    main()
