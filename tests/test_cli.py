"""The command line as a user meets it: help that teaches, one sentence and exit code 2 for a mistake."""

import dataclasses
import importlib
import json
import re

import pytest

from electra.cli import COMMANDS, main
from electra.model.storage import save_model


def outcome(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error (unwrapped) of a command."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = exit.code or 0
    out, err = capsys.readouterr()
    return code, out, " ".join(err.replace("│", " ").split())


def test_help_names_every_command(capsys):
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_explains_every_flag(capsys, command):
    code, out, _ = outcome(capsys, command, "--help")
    assert code == 0
    explained = " ".join(out.replace("│", " ").replace("|", " ").split())
    for field in dataclasses.fields(getattr(importlib.import_module(COMMANDS[command][0]), COMMANDS[command][1])):
        flag = {"source": "from"}.get(field.name, field.name).replace("_", "-")
        if f"--{flag}" not in explained:  # given by its place, without a flag
            continue
        words = re.search(rf" --{flag} (?:--no-\S+ )?(.*?) \((?:default|required)", explained.replace(",", ""))
        assert words, flag
        assert len(words[1].split()) > 2, f"--{flag} is not explained: {words[1]}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("exprt", "there is no command 'exprt'; did you mean 'export'?"),
        ("flops --width 100 --heads 3", "width 100 does not divide into 3 heads; try width 99 or another number"),
        ("flops --size huge", "invalid choice 'huge' for argument '--size'"),
        ("flops --sharing all --generator-width 64", "the generator has 64 and the discriminator 256"),
        ("flops --mask-fraction 1.5", "mask_fraction is 1.5; it must lie between 0 and 1, usually 0.15"),
        ("flops --length 600", "a row of 600 tokens is longer than the model's 512 positions"),
        ("flops --lenght 128", "--lenght"),
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
    assert sentence in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_flops_as_json_for_programs(capsys):
    code, out, _ = outcome(capsys, "flops", "--size", "small", "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 14_196_219


def test_a_config_file_gives_fields_and_flags_win_over_it(capsys, tmp_path):
    file = tmp_path / "fields.json"
    file.write_text('{"size": "base", "length": 512, "json": true}')
    base = json.loads(outcome(capsys, "flops", "--config", str(file))[1])
    small = json.loads(outcome(capsys, "flops", f"--config={file}", "--size", "small")[1])
    assert base["parameters"] > small["parameters"] == 14_196_219


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"sise": "base"}', "unknown setting 'sise'; the settings are"),
        ("{", "is not valid JSON"),
        ("[1]", "holds a list; a configuration is a table of fields"),
    ],
)
def test_a_config_file_that_cannot_be_is_refused(capsys, tmp_path, text, sentence):
    file = tmp_path / "fields.json"
    file.write_text(text)
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


def test_a_read_only_place_is_named(capsys, tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, _, err = outcome(capsys, "export", "--model", f"{tmp_path}/run", "--output", f"{tmp_path}/file/hf")
    assert code == 2
    assert "Not a directory" in err or "File exists" in err
