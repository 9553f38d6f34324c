"""Made-up tasks that a small encoder learns in seconds."""

import json
import random
from pathlib import Path

ANIMALS = ("cat", "dog", "bird")
SIZES = ("big", "small", "red")


def sentence(draw: random.Random) -> str:
    """Some words of the small grammar."""
    return f"the {draw.choice(SIZES)} {draw.choice(ANIMALS)} sat on the {draw.choice(SIZES)} mat ."


def answer(kind: str, texts: list[str]):
    """What there is to say of one or two texts."""
    last = texts[-1].split()
    if kind == "classification":
        return last[2]  # the animal
    if kind == "multi-label":
        return sorted({last[1], last[6]})
    return float(SIZES.index(last[1]) + 0.5 * ANIMALS.index(last[2]))


def write_rows(path: Path, kind: str, count: int, seed: int, has_pairs: bool = False) -> Path:
    """A .jsonl file of a task; with pairs, only the second text tells."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            texts = [sentence(draw) for _ in range(1 + has_pairs)]
            row = dict(zip(("text", "text_b"), texts, strict=False)) | {"label": answer(kind, texts)}
            file.write(json.dumps(row) + "\n")
    return path


def write_glue(folder: Path, rows: int = 60) -> Path:
    """A folder like GLUE's with a few tasks: does a sentence tell of a cat, and do two tell of the same animal?"""
    draw = random.Random(0)
    for split in ("train", "dev", "test"):
        count, is_test = rows if split == "train" else 20, split == "test"
        cola, rte, stsb = [], [], []
        for number in range(count):
            first, second = sentence(draw), sentence(draw)
            is_cat, animals = int("cat" in first), (first.split()[2], second.split()[2])
            cola.append(f"{number}\t{first}" if is_test else f"made\t{is_cat}\t\t{first}")
            entails = "entailment" if animals[0] == animals[1] else "not_entailment"
            rte.append(f"{number}\t{first}\t{second}" + ("" if is_test else f"\t{entails}"))
            score = 5.0 if animals[0] == animals[1] else float(number % 4)
            stsb.append(f"{number}\t{first}\t{second}" + ("" if is_test else f"\t{score}"))
        heads = ["index\tsentence"] if is_test else []
        write_lines(folder / "CoLA" / f"{split}.tsv", heads + cola)
        pair = "index\tsentence1\tsentence2"
        write_lines(folder / "RTE" / f"{split}.tsv", [pair + ("" if is_test else "\tlabel"), *rte])
        write_lines(folder / "STS-B" / f"{split}.tsv", [pair + ("" if is_test else "\tscore"), *stsb])
    return folder


def write_lines(path: Path, lines: list[str]) -> None:
    """A file of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
