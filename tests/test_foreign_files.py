"""Commands neither remove nor overwrite files that they did not write, whatever their names."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import small_run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import write_glue, write_rows

import electra
from electra.commands import make_command_function
from electra.pretraining.command import pretrain

OUR_NAMES = (
    *("config.json", "index.json", "unfinished.json", "report.json", "report.md", "table.json", "table.md"),
    *("metrics.jsonl", "state.json", "samples.md", "result.json", "curves.png", "checksums.json", "logits.safetensors"),
    *("00000.safetensors", "model.safetensors", "tokenizer.json", "vocab.txt", "tokenizer", "tokens", "model"),
    *("checkpoints", "step-00000010", "seed-1", "CoLA", "RTE", "cola", "rte", "text", "x.lock", "lock.partial"),
)
NAMES = st.one_of(
    st.sampled_from(OUR_NAMES),
    st.builds("{}{}".format, st.sampled_from(OUR_NAMES), st.sampled_from([".partial", ".tmp", "~", ".1", ".bak"])),
    st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
).filter(lambda name: name not in (".", "..") and not name.endswith(".electra-partial"))
TREES = st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=1, max_size=4)
CONTENT = st.sampled_from([b"", b"{}", b"precious", b"[1, 2]"])


def write_foreign_files(folder: Path, trees: list[list[str]], content: bytes) -> set[Path]:
    """Write the files that are possible; returns those that did not exist."""
    written = set()
    for parts in trees:
        path = folder.joinpath(*parts)
        with suppress(OSError):  # a file where a folder is needed, a name that is too long
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                written.add(path)
    return written


@pytest.fixture(scope="module")
def commands(shards, finished_run, finetuned, encoder_folder, tmp_path_factory) -> dict[str, Callable[[Path], object]]:
    """Every command that writes a folder, as a function of it, with few steps."""
    folder = tmp_path_factory.mktemp("inputs")
    train = write_rows(folder / "train.jsonl", "classification", 8, seed=0)
    glue = write_glue(folder / "glue", rows=8)
    tuning = {"epochs": 1, "device": "cpu", "length": 16}
    text = str(shards.parent / "text.txt")
    electra.export_model(model=finished_run, output=folder / "exported")
    return {
        "tokenizer": lambda output: electra.train_tokenizer(corpus=text, output=output, vocab_size=60),
        "shard": lambda output: electra.shard(
            corpus=text, tokenizer=shards / "tokenizer", output=output, validation_fraction=0.1, workers=1
        ),
        "pretrain": lambda output: pretrain(small_run(shards, output, steps=2, evaluation_rows=8, resume=True)),
        "finetune": lambda output: electra.finetune(
            model=encoder_folder, train=train, dev=train, output=output, **tuning
        ),
        "glue": lambda output: electra.glue(
            model=encoder_folder, data=str(glue), tasks=["rte"], seeds=1, output=output, **tuning
        ),
        "report": lambda output: make_command_function("report")(runs=[finished_run], output=output),
        "export": lambda output: electra.export_model(model=finished_run, output=output),
        "import": lambda output: electra.import_model(**{"from": folder / "exported"}, output=output),
    }


NAMES_OF_COMMANDS = ["tokenizer", "shard", "pretrain", "finetune", "glue", "report", "export", "import"]


@pytest.mark.parametrize("name", NAMES_OF_COMMANDS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=TREES, content=CONTENT)
@example(trees=[["unfinished.json"]], content=b"{}")
def test_a_folder_of_other_files_keeps_them(commands, name, tmp_path_factory, trees, content):
    folder = tmp_path_factory.mktemp("foreign")
    files = write_foreign_files(folder, trees, content)
    with suppress(ValueError, OSError):  # ConfigError and DataError: the folder is refused
        commands[name](folder)
    assert [str(path) for path in files if not path.is_file() or path.read_bytes() != content] == []
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def outputs(commands, tmp_path_factory) -> dict[str, Path]:
    """The output of each command."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, command in commands.items():
        command(folder / name)
    return {name: folder / name for name in commands}


@pytest.mark.parametrize("name", NAMES_OF_COMMANDS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=TREES, content=CONTENT)
def test_an_own_folder_keeps_other_files_in_it(commands, outputs, name, tmp_path_factory, trees, content):
    folder = tmp_path_factory.mktemp("own") / "output"
    shutil.copytree(outputs[name], folder)
    files = write_foreign_files(folder, trees, content)
    with suppress(ValueError, OSError):
        commands[name](folder)
    assert [str(path) for path in files if not path.is_file() or path.read_bytes() != content] == []
    shutil.rmtree(folder)
