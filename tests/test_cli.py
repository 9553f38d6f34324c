"""The command line as a user meets it: help that teaches, one sentence and exit code 2 for a mistake."""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from electra.cli import COMMANDS, flags_of, main, parse
from electra.export.command import ExportConfig, ImportConfig, export
from electra.model.storage import save_model
from electra.report.costs import FlopsConfig
from electra.text.tokenizer import TokenizerConfig


def outcome(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = exit.code or 0
    return code, *capsys.readouterr()


def configuration_of(command: str) -> type:
    """The configuration whose fields are a command's flags."""
    module, name, *_ = COMMANDS[command]
    return getattr(importlib.import_module(module), name)


def test_help_names_every_command(capsys):
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_explains_every_flag(capsys, command):
    code, out, _ = outcome(capsys, command, "--help")
    assert code == 0
    explained = " ".join(out.replace("│", " ").replace("|", " ").split())
    for flag in flags_of(configuration_of(command)):
        if flag.is_positional:
            continue
        words = re.search(rf" --{flag.name} (?:--no-\S+ )?(.*?) \((?:default|required)", explained.replace(",", ""))
        assert words, flag.name
        assert len(words[1].split()) > 2, f"--{flag.name} is not explained: {words[1]}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("exprt", "there is no command 'exprt'; did you mean 'export'?"),
        ("flops --width 100 --heads 3", "discriminator: width 100 does not divide into 3 heads; try width 99"),
        ("flops --size huge", "there is no size 'huge'; choose from tiny, small, base, large"),
        ("flops --sharing some", "invalid choice 'some' for argument '--sharing'. Expected one of ('none', 'emb"),
        ("flops --generator-width 0", "generator: width is 0; it must be at least 1"),
        ("flops --generator-layers 0", "generator: layers is 0; it must be at least 1"),
        (
            "flops --layers many",
            "Error parsing --layers: no type matching {None}|INT could be instantiated from ['many']",
        ),
        (
            "flops --sharing all --generator-width 64",
            "sharing=all needs generator and discriminator of the same width, but",
        ),
        ("flops --mask-fraction 1.5", "mask_fraction is 1.5; it must lie between 0 and 1, usually 0.15"),
        ("flops --length 600", "a row of 600 tokens is longer than the model's 512 positions"),
        ("flops --lenght 128", "Unrecognized options: --lenght, 128; Perhaps you meant: --length INT"),
        ("export", "Missing from electra export: --model PATH --output PATH"),
        ("flops --config", "--config needs a file"),
        ("flops --config missing.json", "No such file or directory: missing.json"),
        ("export --model nowhere --output x", "there is no folder nowhere"),
        ("import --from . --output x", ". is not a model folder: it has no config.json"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = outcome(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"electra: {sentence}")
    assert err.count("\n") == 1
    assert "help" not in err
    assert list(tmp_path.iterdir()) == []


def test_flops_as_json_for_programs(capsys):
    code, out, _ = outcome(capsys, "flops", "--size", "small", "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 14_196_219


def values(configuration: type) -> dict[str, Any]:
    """A value for each field that has one: its default, or a word."""
    defaults = {field.name: field.default for field in dataclasses.fields(configuration)}
    words = {name: "word" for name, default in defaults.items() if default is dataclasses.MISSING}
    return {name: value for name, value in (defaults | words).items() if value is not None}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_all_its_fields_from_a_config_file(tmp_path, command):
    configuration = configuration_of(command)
    expected = values(configuration) | ({"steps": 7} if command == "pretrain" else {})
    names = {flag.field: flag.name for flag in flags_of(configuration)}
    (tmp_path / "fields.json").write_text(
        json.dumps({names[field]: value for field, value in expected.items()}, default=str)
    )
    settings = parse(command, configuration, ["--config", str(tmp_path / "fields.json")])
    for field, value in expected.items():
        assert getattr(settings, field) in (value, Path("word")), field


def test_import_takes_its_source_from_a_config_file_under_the_name_of_the_flag(tmp_path):
    (tmp_path / "fields.json").write_text('{"from": "there", "output": "here"}')
    settings = parse("import", ImportConfig, ["--config", str(tmp_path / "fields.json")])
    assert (settings.source, settings.output) == (Path("there"), Path("here"))


def test_a_switch_that_may_be_left_open_is_read_from_a_config_file(tmp_path):
    (tmp_path / "fields.json").write_text('{"corpus": "x", "output": "y", "strip_accents": true}')
    settings = parse("tokenizer", TokenizerConfig, ["--config", str(tmp_path / "fields.json")])
    assert settings.strip_accents is True


def test_a_config_file_may_be_yaml(tmp_path):
    (tmp_path / "fields.yaml").write_text("size: base\nmask_fraction: 0.2\njson: true\n")
    settings = parse("flops", FlopsConfig, ["--config", str(tmp_path / "fields.yaml"), "--length", "64"])
    assert settings == FlopsConfig(size="base", mask_fraction=0.2, json=True, length=64)


def test_a_config_file_gives_fields_and_flags_win_over_it(capsys, tmp_path):
    file = tmp_path / "fields.json"
    file.write_text('{"size": "base", "length": 512, "json": true}')
    base = json.loads(outcome(capsys, "flops", "--config", str(file))[1])
    small = json.loads(outcome(capsys, "flops", f"--config={file}", "--size", "small")[1])
    assert base["parameters"] > small["parameters"] == 14_196_219


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("fields.json", b'{"sise": "base"}', "unknown setting 'sise'; the settings are dropout, embedding_width, "),
        ("fields.json", b"{", "is not valid JSON"),
        ("fields.json", b"[1]", "holds a list; a configuration is a table of fields"),
        ("fields.json", b'{"size": "\xff"}', "is not text in UTF-8"),
        ("fields.yaml", b"1: base", "unknown setting 1; the settings are"),
        ("fields.yaml", b"size: [", "is not valid YAML"),
        ("fields.yaml", b"size: \xff", "is not text in UTF-8"),
    ],
)
def test_a_config_file_that_cannot_be_is_refused(capsys, tmp_path, name, text, sentence):
    file = tmp_path / name
    file.write_bytes(text)
    code, _, err = outcome(capsys, "flops", "--config", str(file))
    assert code == 2
    assert sentence in err


def test_export_then_import_by_command(capsys, tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "run")
    code, out, _ = outcome(
        capsys, "export", "--model", f"{tmp_path}/run", "--to", "huggingface", "--output", f"{tmp_path}/hf"
    )
    assert code == 0
    assert "hf: ElectraForPreTraining, " in out
    code, out, _ = outcome(capsys, "import", "--from", f"{tmp_path}/hf", "--output", f"{tmp_path}/back", "--json")
    assert code == 0
    assert json.loads(out)["model"] == "discriminator, sharing none"


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


@pytest.mark.parametrize("command", ["export --model run", "import --from hf"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "model.safetensors is cut short or damaged"),
        (pickled, "in pytorch_model.bin, a pickle, which can run code"),
    ],
)
def test_damaged_weights_are_one_sentence_and_exit_code_2(
    capsys, tmp_path, monkeypatch, make_pair, command, damage, sentence
):
    monkeypatch.chdir(tmp_path)
    save_model(make_pair(), Path("run"))
    export(ExportConfig(model=Path("run"), output=Path("hf")))
    damage(Path(command.split()[-1]))
    code, out, err = outcome(capsys, *command.split(), "--output", "new")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not Path("new").exists()


def test_a_read_only_place_is_named(capsys, tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, _, err = outcome(capsys, "export", "--model", f"{tmp_path}/run", "--output", f"{tmp_path}/file/hf")
    assert code == 2
    assert "Not a directory" in err or "File exists" in err
