"""Inputs for `faults.py`: small good files, ways to damage a file, and hostile files."""

import bz2
import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synthetic import sentence, write_choices, write_glue, write_questions, write_rows, write_squad, write_tags

from electra import runfolder

Damage = Callable[[Path], None]
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 0, 0.5, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "\x00", "x" * 10**6, "../..",
    [], [[]], {}, {"": {}},
]  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Text, rows of a task and GLUE's files, which everything else is made from."""
    draw = random.Random(0)
    texts, rows = folder / "texts", folder / "rows"
    texts.mkdir(parents=True)
    rows.mkdir()
    documents = [sentence(draw) for _ in range(800)]
    (texts / "a.txt").write_text("\n\n".join(documents[:300]))
    (texts / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[300:500]))
    (texts / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(documents[500:600]).encode()))
    (texts / "d.txt.xz").write_bytes(lzma.compress("\n\n".join(documents[600:700]).encode()))
    (texts / "e.jsonl.bz2").write_bytes(
        bz2.compress("".join(json.dumps({"text": text}) + "\n" for text in documents[700:]).encode())
    )
    write_parquet(texts / "f.parquet", {"text": documents[:100]})
    write_rows(rows / "train.jsonl", "classification", 48, seed=0)
    write_rows(rows / "dev.jsonl", "classification", 16, seed=1)
    write_glue(folder / "glue", rows=24)
    for name in ("tags", "choices", "questions"):
        (folder / name).mkdir()
    write_choices(folder / "choices/train.jsonl", 24, seed=0)
    write_choices(folder / "choices/dev.jsonl", 8, seed=1)
    write_questions(folder / "questions/train.jsonl", 24, seed=0, has_unanswerable=True, sentences=3)
    write_squad(folder / "questions/dev.json", 8, seed=1)
    write_tags(folder / "tags/train.conll", 24, seed=0)
    write_tags(folder / "tags/dev.conll", 8, seed=1)


def remove_checksums(folder: Path) -> None:
    """Remove the checksums of a folder that we wrote."""
    for path in folder.rglob("checksums.json"):
        path.unlink()
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if content.pop("checksum", None):
            path.write_text(json.dumps(content))


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def damages(file: str, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """Ways to damage a file, by their names."""
    for seed in (draw.random() for _ in range(3)):
        yield "bit-flipped", lambda path, seed=seed: flip_bit(path, random.Random(seed))
    yield "truncated", lambda path: os.truncate(path, path.stat().st_size // 2)
    yield "cut by a byte", lambda path: os.truncate(path, max(0, path.stat().st_size - 1))
    yield "emptied", lambda path: os.truncate(path, 0)
    yield "zeroed", lambda path: overwrite(path, bytes(64), random.Random(0))
    yield "removed", lambda path: path.unlink()
    yield "replaced by noise", lambda path: replace_file(path, random.Random(0).randbytes(5000))
    yield "replaced by a folder", replace_by_folder
    yield "replaced by a pipe", lambda path: (path.unlink(), os.mkfifo(path))[0]
    yield "replaced by an endless file", lambda path: (path.unlink(), path.symlink_to("/dev/zero"))[0]
    if file.endswith(".json"):
        yield "nested deeply", lambda path: replace_file(path, b'{"a":' * 100_000)
        yield "replaced by a list", lambda path: replace_file(path, b"[1, 2]")
        for value in (*HOSTILE_VALUES, None, None):
            seed = draw.random()
            yield (
                f"value {str(value)[:9]!r}",
                lambda path, value=value, seed=seed: edit_json(path, value, random.Random(seed)),
            )
            yield (
                f"signed value {str(value)[:9]!r}",
                lambda path, value=value, seed=seed: edit_and_sign(path, value, random.Random(seed)),
            )
    if file.endswith(".safetensors"):
        yield "replaced by a huge header", lambda path: replace_file(path, struct.pack("<Q", 2**62) + b"{}")
        for seed in (draw.random() for _ in range(6)):
            yield "header edited", lambda path, seed=seed: edit_safetensors(path, random.Random(seed))


def replace_file(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def overwrite(path: Path, content: bytes, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(data) - len(content)))
    data[start : start + len(content)] = content
    path.write_bytes(data[: path.stat().st_size])


def flip_bit(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def edit_json(path: Path, value: Any, draw: random.Random) -> None:
    """Replace a random value in a JSON file."""
    content = json.loads(path.read_text())
    parent, key = draw.choice(list(places(content)))
    parent[key] = value
    path.write_text(json.dumps(content))


def edit_and_sign(path: Path, value: Any, draw: random.Random) -> None:
    """Replace a random value in a JSON file and compute its checksums again, as a stranger may do."""
    edit_json(path, value, draw)
    content = json.loads(path.read_text())
    if content.pop("checksum", None):
        runfolder.write_stored(path, content)
    if (path.parent / runfolder.CHECKSUMS).exists():
        runfolder.write_checksums(path.parent)


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (parent, key) in a JSON value."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in list(keys)[:50]:
        yield content, key
        yield from places(content[key])


def edit_safetensors(path: Path, draw: random.Random) -> None:
    """Replace a random value in the header of a safetensors file."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    parent, key = draw.choice(list(places(header)))
    parent[key] = draw.choice([*HOSTILE_VALUES[:13], "F64", [2**40, 2**40], [0, 2**60]])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


@dataclass(frozen=True)
class Hostile:
    """A command on a hostile file."""

    group: str
    name: str
    command: str
    inputs: tuple[str, ...]
    prepare: Damage  # in the folder of the case


def in_folder(name: str, write: Damage) -> Damage:
    """`write` for a file of a folder."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        write(path)

    return prepare


def config_with(**values: Any) -> Damage:
    """A JSON file with other values, at any depth, for settings of these names."""

    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        found = [(parent, key) for parent, key in places(content) if key in values]
        assert found, values
        for parent, key in found:
            parent[key] = values[key]
        path.write_text(json.dumps(content))

    return edit


def tokenizer_with(change: Callable[[dict[str, Any]], None]) -> Damage:
    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def nested_replacements(content: dict[str, Any]) -> None:
    """Each of 40 normalizers doubles the text."""
    rules = [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 8} for _ in range(40)]
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}


def huge_ids(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["huge"] = 2**31 - 1


def huge_added_id(content: dict[str, Any]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 2**32 - 2, "content": "huge", **flags})


def deep_normalizer(content: dict[str, Any]) -> None:
    for _ in range(300):
        content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"]]}


def slow_pattern(content: dict[str, Any]) -> None:
    pattern = {"Regex": "(([a-z ])*)*$!"}
    content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def long_words(content: dict[str, Any]) -> None:
    content["model"]["max_input_chars_per_word"] = 2**62


TOKENIZER_CHANGES = (nested_replacements, huge_ids, huge_added_id, deep_normalizer, slow_pattern, long_words)
DETECT = "detect --device cpu --json --model {} " + 40 * "e"
TUNED = "plain-tuned/seed-1/model"
MODEL_FOLDERS = {  # kind: commands that a stranger's folder is given to
    "plain-model": [DETECT.format("plain-model"), "export --model plain-model --output new"],
    "huggingface": [DETECT.format("huggingface"), "import --from huggingface --output new"],
    TUNED: [f"predict --model {TUNED} --input rows/dev.jsonl --output new.csv --device cpu"],
}
SIZES = {  # names in config.json
    "model": ("layers", "width", "heads", "feedforward", "embedding_width", "vocab_size", "positions"),
    "huggingface": (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "embedding_size"),
        *("vocab_size", "max_position_embeddings", "type_vocab_size"),
    ),
}


def hostile_models() -> Iterator[Hostile]:
    for kind, commands in MODEL_FOLDERS.items():
        inputs = (kind.split("/")[0], "rows", "model") if "/" in kind else (kind,)
        for command in commands:
            for group, name, prepare in hostile_model_files(kind):
                yield Hostile(group, f"{kind} {name}: {command.split()[0]}", command, inputs, prepare)


def hostile_model_files(kind: str) -> Iterator[tuple[str, str, Damage]]:
    """Group, name and damage of every hostile file of a model folder."""
    for name in SIZES["huggingface" if kind == "huggingface" else "model"]:
        for value in (100_000, 2**31 - 1, 2**40):
            yield "config", f"{name} {value}", edit_in(f"{kind}/config.json", config_with(**{name: value}))
    for change in TOKENIZER_CHANGES:
        name = change.__name__.replace("_", " ")
        yield "tokenizer", name, edit_in(f"{kind}/tokenizer.json", tokenizer_with(change))
    for file in ("special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"):
        nested = in_folder(f"{kind}/{file}", lambda path: path.write_text('{"pad_token":' * 200_000))
        yield "tokenizer", f"nested {file}", nested
    long_word = in_folder(f"{kind}/vocab.txt", lambda path: path.write_text("x" * (50 << 20)))
    yield "tokenizer", "long word in vocab.txt", long_word
    for name, content in SAFETENSORS.items():
        write = in_folder(f"{kind}/model.safetensors", lambda path, content=content: path.write_bytes(content))
        yield "safetensors", name, write


def edit_in(name: str, edit: Damage) -> Damage:
    return lambda folder: edit(folder / name)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


SAFETENSORS = {
    "header of a gigabyte": struct.pack("<Q", 1 << 30) + b"{",
    "header of spaces": safetensors_bytes(b" " * 10_000_000),
    "deep header": safetensors_bytes(b'{"a":' * 100_000),
    "huge shape": safetensors_bytes(
        {"weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 4]}}, b"1234"
    ),
    "empty shape": safetensors_bytes({"weight": {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]}}),
    "a million tensors": safetensors_bytes(
        {f"t{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(300_000)}
    ),
    "overlapping": safetensors_bytes(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, b"1234"
    ),
    "no tensors": safetensors_bytes({}),
    "negative": safetensors_bytes({"weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
}


def write_compressed(path: Path, block: bytes, count: int) -> None:
    """Compress `count` blocks by the suffix of a path."""
    if path.suffix == ".zst":
        import pyarrow

        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            for _ in range(count):
                file.write(block)
        return
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
    options = {"preset": 0} if path.suffix == ".xz" else {"compresslevel": 1} if path.suffix in (".gz", ".bz2") else {}
    with opened(path, "wb", **options) as file:
        for _ in range(count):
            file.write(block)


def write_content(path: Path, content: Any) -> None:
    """Write text, bytes, the columns of a Parquet file, or (block, count) compressed."""
    match content:
        case str():
            path.write_text(content)
        case bytes():
            path.write_bytes(content)
        case dict():
            write_parquet(path, content)
        case (block, count):
            write_compressed(path, block, count)


MEGABYTE = 1 << 20
MILLION = 10**6
HEADER = "text,label"
NOISE = random.Random(0).randbytes(5000)
TABLES: list[tuple[str, str, Callable[[], Any]]] = [  # name, suffix, content
    ("a million columns", ".csv", lambda: HEADER + ",c" * MILLION + "\na,b" + ",d" * MILLION),
    ("a million names", ".csv", lambda: ",".join([HEADER, *map(str, range(MILLION))]) + "\na,b" + ",d" * MILLION),
    ("labels of a megabyte", ".csv", lambda: HEADER + "".join(f"\na,{n}{'x' * MEGABYTE}" for n in range(30))),
    ("20,000 labels", ".csv", lambda: HEADER + "".join(f"\na,{n}" for n in range(20_000))),
    ("an open quotation mark", ".csv", lambda: HEADER + '\n"a' + "b\n" * (20 * MEGABYTE)),
    ("a line of 100 MB", ".csv", lambda: HEADER + "\n" + "a" * (100 * MEGABYTE) + ",b\n"),
    ("NUL bytes", ".csv", lambda: HEADER + "\n\0\0,\0\n"),
    ("not UTF-8", ".csv", lambda: b"text,label\n\xff,\xfe\n"),
    ("only a header", ".csv", lambda: HEADER),
    ("noise", ".csv", lambda: NOISE),
    ("a line of 100 MB", ".tsv", lambda: "text\tlabel\n" + "a" * (100 * MEGABYTE)),
    ("nested deeply", ".jsonl", lambda: '{"text":' + "[" * MILLION),
    ("nested deeply, closed", ".jsonl", lambda: '{"label": 1, "text":' + "[" * 50_000 + "]" * 50_000 + "}\n"),
    ("a million digits", ".jsonl", lambda: '{"text": "a", "label": ' + "9" * MILLION + "}\n"),
    ("infinite label", ".jsonl", lambda: '{"text": "a", "label": 1e999}\n' * 20),
    ("half a surrogate pair", ".jsonl", lambda: '{"text": "\\ud800", "label": "\\udfff"}\n' * 20),
    ("lists as rows", ".jsonl", lambda: "[1, 2]\n"),
    ("dictionaries as labels", ".jsonl", lambda: '{"text": "a", "label": {"b": 1}}\n'),
    ("a line of 100 MB", ".jsonl", lambda: '{"label": "b", "text": "' + "a" * (100 * MEGABYTE) + '"}\n'),
    ("nested", ".parquet", lambda: {"text": [[["a"]]], "label": [{"a": 1}]}),
    ("nulls", ".parquet", lambda: {"text": [None] * 9, "label": [None] * 9}),
    ("repeated megabytes", ".parquet", lambda: {"text": ["a " * MEGABYTE] * 60, "label": ["b"] * 60}),
    ("many columns", ".parquet", lambda: {"text": ["a"], "label": ["b"]} | {f"c{n}": [1] for n in range(5000)}),
    ("not Parquet", ".parquet", lambda: b"PAR1" + bytes(1000) + b"\xff\xff\xff\x7fPAR1"),
    ("a gigabyte of zeros", ".csv.zst", lambda: (bytes(MEGABYTE), 1024)),
    ("a gigabyte of zeros", ".jsonl.gz", lambda: (bytes(MEGABYTE), 1024)),
    ("a gigabyte in one line", ".tsv.zst", lambda: (b"a" * MEGABYTE, 1024)),
    ("half a gigabyte in one line", ".csv.xz", lambda: (b"a," * (MEGABYTE // 2), 512)),
]
TEXTS: list[tuple[str, str, Callable[[], Any]]] = [
    *(row for row in TABLES if row[1].startswith((".jsonl", ".parquet"))),
    ("zeros", ".txt", lambda: bytes(1000)),
    ("a line of 20 MB", ".txt", lambda: "a" * (20 * MEGABYTE)),
    ("a line of 18 MB of ideographs", ".txt", lambda: "語" * (6 * MEGABYTE)),
    ("marks on one letter", ".txt", lambda: "a" + "\u0301" * (4 * MEGABYTE)),
    ("a gigabyte of zeros", ".txt.zst", lambda: (bytes(MEGABYTE), 1024)),
    ("100 MB of one letter", ".txt.gz", lambda: (b"a" * MEGABYTE, 100)),
    *(("noise", f".txt{suffix}", lambda: NOISE) for suffix in (".gz", ".xz", ".bz2", ".zst")),
]
LONG_CONTEXT = "the cat sat on the mat . " * 15_000
KIND_FILES: list[tuple[str, str, str, Callable[[], Any]]] = [  # kind, name, suffix, content
    ("question-answering", "nested deeply", ".json", lambda: '{"data":' + "[" * MILLION),
    ("question-answering", "lists for objects", ".json", lambda: '{"data": [{"paragraphs": [[]]}]}'),
    ("question-answering", "a number for a context", ".json", lambda: squad({"context": 1, "qas": []})),
    ("question-answering", "half a gigabyte of spaces", ".json", lambda: " " * (512 * MEGABYTE)),
    ("question-answering", "start beyond 2^63", ".jsonl", lambda: question(answers=[answer("cat", 10**30)])),
    ("question-answering", "start before 0", ".jsonl", lambda: question(answers=[answer("cat", -9)])),
    ("question-answering", "a dictionary as text", ".jsonl", lambda: question(answers=[answer({"a": 1}, 4)])),
    ("question-answering", "null as answers", ".jsonl", lambda: question(answers=None)),
    ("question-answering", "answers not in the context", ".jsonl", lambda: question(answers=[answer("dog", 4)])),
    ("question-answering", "a context of 100,000 words", ".jsonl", lambda: question(1, context=LONG_CONTEXT)),
    ("question-answering", "a question of 100,000 words", ".jsonl", lambda: question(question=LONG_CONTEXT)),
    ("question-answering", "100,000 answers", ".jsonl", lambda: question(1, answers=[answer("cat", 4)] * 100_000)),
    ("tags", "no columns", ".conll", lambda: "word\n" * 20),
    ("tags", "a million columns", ".conll", lambda: "a" + " b" * MILLION + "\n"),
    ("tags", "ragged columns", ".conll", lambda: "a B-X\nb c d I-X\n\n" * 20),
    ("tags", "tags of no scheme", ".conll", lambda: "a Q-X\nb W-Y\nc Z-X\n\n" * 20),
    ("tags", "a sentence of a million words", ".conll", lambda: "cat O\n" * MILLION),
    ("tags", "a word of 10 MB", ".conll", lambda: "a" * (10 * MEGABYTE) + " O\n\n" + "cat B-X\n\n" * 20),
    ("tags", "noise", ".conll", lambda: NOISE),
    ("tags", "20,000 tags", ".conll", lambda: "".join(f"cat B-{number}\n\n" for number in range(20_000))),
    ("tags", "a sentence of no words", ".jsonl", lambda: json_lines({"words": [], "tags": []})),
    ("tags", "fewer tags than words", ".jsonl", lambda: json_lines({"words": ["a", "b"], "tags": ["O"]})),
    ("tags", "numbers as words", ".jsonl", lambda: json_lines({"words": [1, None], "tags": ["O", {}]})),
    ("choice", "one choice", ".jsonl", lambda: json_lines({"choices": ["a"], "label": 0})),
    ("choice", "a label beyond the choices", ".jsonl", lambda: json_lines({"choices": ["a", "b"], "label": 7})),
    ("choice", "a million choices", ".jsonl", lambda: json_lines({"choices": ["a"] * MILLION, "label": 0}, 1)),
    ("choice", "nested choices", ".jsonl", lambda: json_lines({"choices": [["a"], {"b": 1}], "label": 0})),
    ("choice", "a text for a list", ".jsonl", lambda: json_lines({"choices": "ab", "label": 0})),
    ("choice", "a label of 10^30", ".jsonl", lambda: json_lines({"choices": ["a", "b"], "label": 10**30})),
]
TUNING = "--epochs 1 --length 16 --batch-size 8 --device cpu"


def json_lines(row: dict[str, Any], count: int = 10) -> str:
    return (json.dumps(row) + "\n") * count


def question(count: int = 10, **values: Any) -> str:
    good = {"context": "the cat sat .", "question": "who", "answers": [answer("cat", 4)]}
    return json_lines(good | values, count)


def answer(text: Any, start: int) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


def squad(paragraph: dict[str, Any]) -> str:
    return json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}]})


def hostile_data() -> Iterator[Hostile]:
    readers = (
        (TABLES, f"finetune --model model --train {{}} --output new --text text --label label {TUNING}", ("model",)),
        (TABLES, "predict --model tuned --input {} --output new.csv --device cpu", ("tuned", "model")),
        (TABLES, "embed --model model --input {} --output new.npy --device cpu", ("model",)),
        (TEXTS, "tokenizer --corpus {} --output new", ("rows",)),
        (TEXTS, "shard --corpus {} --tokenizer vocab --output new --workers 1", ("vocab",)),
    )
    readers += tuple(
        ([row[1:]], f"finetune --model model --train {{}} --output new --kind {row[0]} {TUNING}", ("model",))
        for row in KIND_FILES
    )
    for files, command, inputs in readers:
        for name, suffix, content in files:
            group = suffix.split(".")[1] if suffix.count(".") == 1 else "compressed"
            file = f"hostile{suffix}"
            prepare = in_folder(file, lambda path, content=content: write_content(path, content()))
            yield Hostile(group, f"{name}: {command.split()[0]}", command.format(file), inputs, prepare)


HOSTILE_CASES = [*hostile_models(), *hostile_data()]
