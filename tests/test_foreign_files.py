"""Commands neither remove nor overwrite files that they did not write, whatever their names."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from conftest import simple_text, small_run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import write_glue, write_questions, write_rows

import electra
from electra import demonstration
from electra.commands import COMMANDS, make_command_function
from electra.errors import DataError
from electra.pretraining.command import pretrain
from electra.runfolder import write_stored

OUR_NAMES = (
    *("config.json", "index.json", "unfinished.json", "report.json", "report.md", "table.json", "table.md"),
    *("metrics.jsonl", "state.json", "samples.md", "result.json", "curves.png", "checksums.json", "logits.safetensors"),
    *("00000.safetensors", "00001.safetensors", "model.safetensors", "training.safetensors", "tokenizer.json"),
    *("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "tokenizer", "tokens", "model", "checkpoints"),
    *("step-00000010", "step-000000001", "step-000000003", "step-000000004", "seed-1", "seed-2", "CoLA", "RTE"),
    *("cola", "rte", "text", "x.lock", "lock", "lock.partial", "confusion.png", "tensorboard", "README.md"),
    *(
        "errors.md",
        "rows.csv",
        "rows.jsonl",
        "rows.npy",
        "rows.parquet",
        "rows.safetensors",
        "glue.zip",
        "answers",
        "answers-2",
    ),
    *("predictions.json", "nbest_predictions.json", "null_odds.json", "onnx", "model.onnx", "model_quantized.onnx"),
    *(
        "modules.json",
        "1_Pooling",
        "sentence_bert_config.json",
        "weights.safetensors.gz",
        "demo",
        "demo-2",
        "corpus.txt",
    ),
)
NAMES = st.one_of(
    st.sampled_from(OUR_NAMES),
    st.builds("{}{}".format, st.sampled_from(OUR_NAMES), st.sampled_from([".partial", ".tmp", "~", ".1", ".copy"])),
    st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
).filter(lambda name: name not in (".", "..") and not name.endswith(".electra-partial"))
TREES = st.lists(st.tuples(st.integers(0, 9), st.lists(NAMES, min_size=1, max_size=3)), min_size=1, max_size=4)
CONTENT = st.sampled_from([b"", b"{}", b"precious", b"[1, 2]\n", b'{"a": 1}\n'])
STUDY_SETTINGS = ("size=tiny", "layers=1", "width=32", "heads=2", "feedforward=64", "embedding_width=16", "length=16")
STUDY_SETTINGS += ("batch_size=8", "evaluation_rows=16")
QUICK = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def write_foreign_files(folder: Path, trees: list[tuple[int, list[str]]], content: bytes) -> set[Path]:
    """Write the files that are possible, each below one of the folders; returns those that did not exist."""
    folders = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    written = set()
    for number, parts in trees:
        path = folders[number % len(folders)].joinpath(*parts)
        with suppress(OSError):  # a file where a folder is needed, a name that is too long
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                written.add(path)
    return written


def run_beside_foreign_files(
    command: Callable[[Path], object], folder: Path, trees: list[tuple[int, list[str]]], content: bytes
) -> None:
    """Run a command on a folder with foreign files, which it may refuse; checks that they are kept, then removes it."""
    folder.mkdir(exist_ok=True)
    files = write_foreign_files(folder, trees, content)
    with suppress(ValueError, OSError):  # ConfigError and DataError: the folder is refused
        command(folder)
    assert [str(path) for path in files if not path.is_file() or path.read_bytes() != content] == []
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def commands(shards, finished_run, encoder_folder, tmp_path_factory) -> dict[str, Callable[..., object]]:
    """Every command that writes, in each of its forms, as a function of the folder to write in, with few steps."""
    folder = tmp_path_factory.mktemp("inputs")
    train = write_rows(folder / "train.jsonl", "classification", 8, seed=0)
    write_questions(folder / "questions.jsonl", 8, seed=0, has_unanswerable=True)
    glue = write_glue(folder / "glue", rows=8)
    tuning = {"epochs": 1, "device": "cpu", "length": 16}
    text = str(shards.parent / "text.txt")
    answering = {"train": folder / "questions.jsonl", "dev": folder / "questions.jsonl", "kind": "question-answering"}
    electra.export(model=finished_run, output=folder / "exported")
    electra.finetune(model=encoder_folder, train=train, dev=train, output=folder / "tuned", **tuning)
    electra.finetune(model=encoder_folder, output=folder / "answering", **answering, **tuning)
    predict = partial(electra.predict, device="cpu")
    embed = partial(make_command_function("embed"), model=encoder_folder, input=train, device="cpu")
    corrupt = partial(make_command_function("corrupt"), model=finished_run, data=shards, rows=8, device="cpu")
    export = partial(electra.export, model=finished_run)
    return {
        "tokenizer": lambda output: electra.tokenizer(corpus=text, output=output, vocab_size=60),
        "shard": lambda output: electra.shard(
            corpus=text, tokenizer=shards / "tokenizer", output=output, validation_fraction=0.1, workers=1
        ),
        "pretrain": lambda output: pretrain(small_run(shards, output, steps=2, evaluation_rows=8, resume=True)),
        "finetune": lambda output, seeds=1: electra.finetune(
            model=encoder_folder, train=train, dev=train, output=output, seeds=seeds, **tuning
        ),
        "finetune of answers": lambda output: electra.finetune(
            model=encoder_folder, output=output, **answering, **tuning
        ),
        "glue": lambda output, seeds=1: electra.glue(
            model=encoder_folder, data=str(glue), tasks=["rte"], seeds=seeds, output=output, **tuning
        ),
        "glue with a submission": lambda output: electra.glue(
            model=encoder_folder,
            data=str(glue),
            tasks=["rte"],
            output=output / "glue",
            submission=output / "glue.zip",
            **tuning,
        ),
        "probe": lambda output: make_command_function("probe")(
            model=[encoder_folder],
            data=str(glue),
            output=output / "rows.jsonl",
            tasks=["rte"],
            seeds=1,
            settings=["quick", "epochs=1", "length=16"],
            device="cpu",
        ),
        "predict": lambda output: predict(model=folder / "tuned", input=train, output=output / "rows.csv"),
        "predict of answers": lambda output: predict(
            model=folder / "answering", input=folder / "questions.jsonl", output=output / "answers"
        ),
        "embed": lambda output: embed(output=output / "rows.npy"),
        "embed to a table": lambda output: embed(output=output / "rows.parquet"),
        "corrupt": lambda output: corrupt(output=output / "rows.safetensors"),
        "report": lambda output: make_command_function("report")(runs=[finished_run], output=output),
        "export": lambda output: export(output=output),
        "export of an encoder": lambda output: export(output=output, part="encoder"),
        "export of a generator": lambda output: export(output=output, part="generator"),
        "export of a fine-tuned model": lambda output: export(model=folder / "tuned", output=output),
        "export to onnx": lambda output: export(output=output, to="onnx", int8=True),
        "export to package": lambda output: export(output=output, to="package", training_data="none"),
        "import": lambda output: electra.import_model(from_=folder / "exported", output=output),
        "study": lambda output: make_command_function("study")(
            name="styles", data=shards, output=output, steps=2, pretraining=STUDY_SETTINGS, device="cpu"
        ),
        "demo": lambda output: run_short_demo(output / "demo"),
    }


def run_short_demo(output: Path) -> None:
    """The demo on little text, without the comparison at its end, which writes only a picture."""
    with pytest.MonkeyPatch.context() as patch:
        texts = [f"{number} {text}" for number, text in enumerate(simple_text(300).split("\n\n"))]
        patch.setattr(demonstration, "documentation_texts", lambda: texts)
        patch.setattr(demonstration, "is_prose", lambda paragraph: True)
        patch.setattr(demonstration, "has_packaged_model", lambda: False)
        patch.setattr(demonstration, "VOCAB_SIZE", 100)
        patch.setattr(
            demonstration, "NEW", demonstration.NEW | {"width": 16, "heads": 1, "batch_size": 4, "generator_width": 16}
        )
        patch.setattr(demonstration, "compare_replaced_words", stop_demo)
        with suppress(DemoStoppedError):
            make_command_function("demo")(output=output, steps=1)


class DemoStoppedError(Exception):
    pass


def stop_demo(*arguments: object) -> None:
    raise DemoStoppedError


NAMES_OF_COMMANDS = [
    *("tokenizer", "shard", "pretrain", "finetune", "finetune of answers", "glue", "glue with a submission", "probe"),
    *(
        "predict",
        "predict of answers",
        "embed",
        "embed to a table",
        "corrupt",
        "report",
        "export",
        "export of an encoder",
    ),
    *(
        "export of a generator",
        "export of a fine-tuned model",
        "export to onnx",
        "export to package",
        "import",
        "study",
    ),
    "demo",
]
FIRST = {
    "glue with a submission": "glue.zip",
    "probe": "rows.jsonl",
    "predict": "rows.csv",
    "predict of answers": "answers/predictions.json",
}
FIRST |= {"embed": "rows.npy", "embed to a table": "rows.parquet", "corrupt": "rows.safetensors", "demo": "demo/run"}


def test_every_command_with_an_output_is_tried(commands):
    configs = {name: command.load_config_class() for name, command in COMMANDS.items()}
    writing = {name for name, config in configs.items() if "output" in {field.name for field in fields(config)}}
    tried = {name.split()[0] for name in NAMES_OF_COMMANDS}
    assert tried <= writing
    assert writing - tried <= {"analyze"}  # whose folder is guarded as that of study
    assert list(commands) == NAMES_OF_COMMANDS


@pytest.mark.parametrize("name", FIRST)
def test_a_file_in_the_place_of_the_output_is_kept(commands, name, tmp_path):
    trees = [(0, FIRST[name].split("/"))]
    run_beside_foreign_files(commands[name], tmp_path / "folder", trees, b"precious")


SLOW = ("demo", "glue with a submission", "probe", "study")
PROPERTY_CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES_OF_COMMANDS]


@pytest.mark.parametrize("name", PROPERTY_CASES)
@settings(max_examples=15, **QUICK)
@given(trees=TREES, content=CONTENT)
@example(trees=[(0, ["unfinished.json"])], content=b"{}")
def test_a_folder_of_other_files_keeps_them(commands, name, tmp_path_factory, trees, content):
    run_beside_foreign_files(commands[name], tmp_path_factory.mktemp("foreign"), trees, content)


@pytest.fixture(scope="module")
def outputs(commands, tmp_path_factory) -> dict[str, Path]:
    """The output of each command."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, command in commands.items():
        (folder / name).mkdir()
        command(folder / name)
    return {name: folder / name for name in commands}


def copy_output(outputs: dict[str, Path], name: str, tmp_path_factory) -> Path:
    return Path(shutil.copytree(outputs[name], tmp_path_factory.mktemp("own") / "output"))


@pytest.mark.parametrize("name", PROPERTY_CASES)
@settings(max_examples=8, **QUICK)
@given(trees=TREES, content=CONTENT)
def test_an_own_folder_keeps_other_files_in_it(commands, outputs, name, tmp_path_factory, trees, content):
    run_beside_foreign_files(commands[name], copy_output(outputs, name, tmp_path_factory), trees, content)


@settings(max_examples=15, **QUICK)
@given(trees=TREES, content=CONTENT)
@example(trees=[(0, ["checkpoints", "step-000000004"])], content=b"precious")
@example(trees=[(0, ["checkpoints", "step-000000001", "notes"])], content=b"precious")
def test_pruned_checkpoints_keep_other_files(outputs, shards, tmp_path_factory, trees, content):
    def resume(output: Path) -> None:
        pretrain(small_run(shards, output, steps=4, evaluation_rows=8, resume=True, save_every=1, keep_checkpoints=1))

    run_beside_foreign_files(resume, copy_output(outputs, "pretrain", tmp_path_factory), trees, content)


def test_without_other_files_checkpoints_are_pruned(outputs, shards, tmp_path_factory):
    output = copy_output(outputs, "pretrain", tmp_path_factory)
    (output / "checkpoints/step-000000002/notes").write_text("precious")
    (output / "checkpoints/step-000000001.copy").mkdir()
    pretrain(small_run(shards, output, steps=5, evaluation_rows=8, resume=True, save_every=1, keep_checkpoints=1))
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        *("step-000000001.copy", "step-000000002", "step-000000005")
    ]


@settings(max_examples=15, **QUICK)
@given(trees=TREES, content=CONTENT)
@example(trees=[(0, ["00000.safetensors"])], content=b"precious")
def test_an_unfinished_folder_of_shards_keeps_other_files(commands, outputs, tmp_path_factory, trees, content):
    output = copy_output(outputs, "shard", tmp_path_factory)
    write_stored(output / "unfinished.json", json.loads((output / "index.json").read_text())["settings"])
    for name in ("index.json", "00000.safetensors"):
        (output / name).unlink()
    run_beside_foreign_files(commands["shard"], output, trees, content)


@pytest.mark.parametrize("name", ["finetune", "glue"])
@settings(max_examples=8, **QUICK)
@given(trees=TREES, content=CONTENT)
@example(trees=[(0, ["seed-2", "logits.safetensors"]), (0, ["rte", "seed-2", "curves.png"])], content=b"precious")
@example(trees=[(0, ["seed-2", "metrics.jsonl"]), (0, ["rte", "seed-2", "metrics.jsonl"])], content=b"{}")
def test_further_seeds_keep_other_files(commands, outputs, name, tmp_path_factory, trees, content):
    command = partial(commands[name], seeds=2)
    run_beside_foreign_files(command, copy_output(outputs, name, tmp_path_factory), trees, content)


def test_a_file_in_the_place_of_a_checkpoint_is_an_error(outputs, shards, tmp_path_factory):
    output = copy_output(outputs, "pretrain", tmp_path_factory)
    (output / "checkpoints/step-000000004").write_text("precious")
    with pytest.raises(DataError, match="step-000000004 exists already"):
        pretrain(small_run(shards, output, steps=4, evaluation_rows=8, resume=True))
