"""Synthetic tasks that a small encoder learns in seconds."""

import json
import random
from pathlib import Path

ANIMALS = ("cat", "dog", "bird")
SIZES = ("big", "small", "red")


def sentence(generator: random.Random) -> str:
    draw = generator.choice
    return f"the {draw(SIZES)} {draw(ANIMALS)} sat on the {draw(SIZES)} mat ."


def label_for(kind: str, texts: list[str]):
    """The label of one or two texts, which depends on the last one."""
    words = texts[-1].split()
    if kind == "classification":
        return words[2]  # the animal
    if kind == "multi-label":
        return sorted({words[1], words[6]})
    return float(SIZES.index(words[1]) + 0.5 * ANIMALS.index(words[2]))


def write_rows(path: Path, kind: str, count: int, seed: int, has_pairs: bool = False) -> Path:
    """Write a .jsonl file of a task; the label of a pair depends on its second text."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            texts = [sentence(generator) for _ in range(1 + has_pairs)]
            row = dict(zip(("text", "text_b"), texts, strict=False)) | {"label": label_for(kind, texts)}
            file.write(json.dumps(row) + "\n")
    return path


def write_choices(path: Path, count: int, seed: int) -> list[dict]:
    """Write a .jsonl file of rows with two to four choices, of which the one with a cat is right; returns them."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        animals = ["cat", *(generator.choice(ANIMALS[1:]) for _ in range(generator.randint(1, 3)))]
        generator.shuffle(animals)
        choices = [f"the {generator.choice(SIZES)} {animal} sat ." for animal in animals]
        texts = {"context": sentence(generator), "question": "in the house"}
        rows.append(texts | {"choices": choices, "label": animals.index("cat")})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_tags(path: Path, count: int, seed: int, max_sentences: int = 1, num_columns: int = 3) -> list[dict]:
    """Write CoNLL columns (words, others, entities) in which an animal with its adjective is an entity, and so
    is what it sat on; returns the rows."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        words, tags = [], []
        for _ in range(generator.randint(1, max_sentences)):
            adjective = [generator.choice(SIZES)] * generator.randint(0, 1)
            words += ["the", *adjective, generator.choice(ANIMALS), "sat", "on", "the", "mat", "."]
            tags += ["O", *["B-WHO", "I-WHO"][: 1 + len(adjective)], "O", "O", "O", "B-WHERE", "O"]
        rows.append({"words": words, "tags": tags})
    others = " X" * (num_columns - 2)
    lines = ["".join(f"{word}{others} {tag}\n" for word, tag in zip(*row.values(), strict=True)) for row in rows]
    path.write_text("\n".join(lines))
    return rows


def write_glue(folder: Path, rows: int = 60) -> Path:
    """Write CoLA (is there a cat?), RTE and STS-B (is it the same animal?) in the format of GLUE's download."""
    generator = random.Random(0)
    for split in ("train", "dev", "test"):
        count, is_test = rows if split == "train" else 20, split == "test"
        cola, rte, stsb = [], [], []
        for number in range(count):
            first, second = sentence(generator), sentence(generator)
            is_cat, animals = int("cat" in first), (first.split()[2], second.split()[2])
            cola.append(f"{number}\t{first}" if is_test else f"made\t{is_cat}\t\t{first}")
            entails = "entailment" if animals[0] == animals[1] else "not_entailment"
            rte.append(f"{number}\t{first}\t{second}" + ("" if is_test else f"\t{entails}"))
            score = 5.0 if animals[0] == animals[1] else float(number % 4)
            stsb.append(f"{number}\t{first}\t{second}" + ("" if is_test else f"\t{score}"))
        header = ["index\tsentence"] if is_test else []
        write_lines(folder / "CoLA" / f"{split}.tsv", header + cola)
        columns = "index\tsentence1\tsentence2"
        write_lines(folder / "RTE" / f"{split}.tsv", [columns + ("" if is_test else "\tlabel"), *rte])
        write_lines(folder / "STS-B" / f"{split}.tsv", [columns + ("" if is_test else "\tscore"), *stsb])
    return folder


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_questions(
    path: Path, count: int, seed: int, has_unanswerable: bool = False, sentences: int = 1
) -> list[dict]:
    """Write a .jsonl file of questions, whose answer is the animal in the context, if there is one; returns them."""
    generator, rows = random.Random(seed), []
    for number in range(count):
        animal = "" if has_unanswerable and number % 3 == 0 else generator.choice(ANIMALS)
        parts = [
            f"the {generator.choice(SIZES)} mat sat on the {generator.choice(SIZES)} tree ." for _ in range(sentences)
        ]
        place = generator.randrange(sentences)
        parts[place] = f"the {generator.choice(SIZES)} {animal} sat in the house ." if animal else parts[place]
        context = " ".join(parts)
        answers = [{"text": animal, "answer_start": context.index(animal)}] if animal else []
        rows.append({"id": f"q{number}", "context": context, "question": "on the mat", "answers": answers})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_squad(path: Path, count: int, seed: int) -> None:
    """Write a file in SQuAD's JSON, with questions that have no answer."""
    rows = write_questions(path, count, seed, has_unanswerable=True, sentences=3)
    questions = [{name: row[name] for name in ("id", "question", "answers")} for row in rows]
    paragraphs = [{"context": row["context"], "qas": [each]} for row, each in zip(rows, questions, strict=True)]
    path.write_text(json.dumps({"data": [{"title": "Animals", "paragraphs": paragraphs}]}))
