"""The command line as a user meets it: help that teaches, one sentence and exit code 2 for a mistake."""

import dataclasses
import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import electra.__main__
from electra.cli import COMMANDS, flags_of, main, parse, with_flags
from electra.data.tokenizer import TokenizerConfig
from electra.errors import ConfigError
from electra.export.command import ExportConfig, ImportConfig, export
from electra.model.storage import save_model
from electra.pretraining.command import PretrainConfig
from electra.report.costs import FlopsConfig
from electra.report.overview import ReportConfig
from electra.serve.command import DetectConfig
from electra.words import in_our_words


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


def words_of(help: str) -> str:
    """A command's help without the lines around it."""
    return " ".join(help.replace("│", " ").replace("|", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_explains_every_flag(capsys, command):
    code, out, _ = outcome(capsys, command, "--help")
    assert code == 0
    assert "{None" not in out  # a flag may be left out; what it takes is something else
    explained = words_of(out)
    assert "Flags may also come from a file, --config FILE, in JSON or YAML" in explained
    for flag in flags_of(configuration_of(command)):
        if flag.is_positional:
            continue
        words = re.search(
            rf" --{flag.name} (?:--no-\S+ )?(.*?) \((?:default|required|optional)", explained.replace(",", "")
        )
        assert words, flag.name
        assert len(words[1].split()) > 2, f"--{flag.name} is not explained: {words[1]}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("exprt", "there is no command 'exprt'; did you mean 'export'?"),
        ("flops --width 100 --heads 3", "discriminator: width 100 is not divisible by 3 heads; try width 99"),
        ("flops --size huge", "unknown size 'huge'; choose from tiny, small, base, large"),
        ("flops --sharing some", "--sharing is 'some'; choose from none, embeddings, all, disentangled"),
        ("flops --generator-width 0", "generator: width is 0; it must be at least 1"),
        ("flops --generator-layers 0", "generator: layers is 0; it must be at least 1"),
        ("flops --layers many", "--layers is 'many'; it must be a whole number, in digits\n"),
        ("flops --layers 2.5", "--layers is '2.5'; it must be a whole number, in digits\n"),
        ("flops --layers=", "--layers is ''; it must be a whole number, in digits\n"),
        ("flops --steps 1e4", "--steps is '1e4'; it must be a whole number, in digits: 10000\n"),
        ("flops --steps 10,000", "--steps is '10,000'; it must be a whole number, in digits: 10000\n"),
        ("flops --mask-fraction 0,2", "--mask-fraction is '0,2'; it must be a number, such as 3, 0.5 or 1e-4\n"),
        ("flops --size", "--size came without a value; write behind it what it is: the discriminator's size, and"),
        (
            "flops --inference yes",
            "'yes' belongs to no flag of electra flops; leave it out, or put in quotes what goes tog",
        ),
        (
            "flops --sharing all --generator-width 64",
            "sharing=all needs generator and discriminator of the same width, but",
        ),
        ("flops --mask-fraction 1.5", "--mask-fraction is 1.5; it must lie between 0 and 1, usually 0.15"),
        ("flops --length 600", "a row of 600 tokens is longer than the model's 512 positions"),
        ("flops --length 0", "--length is 0; a row has at least 1 token"),
        ("flops --objective mlm --inference", "--inference goes with --objective rtd, not mlm; leave one or the othe"),
        ("flops --objective mlm --generator-width 64", "--objective mlm has no generator beside it; leave out --gene"),
        ("flops --objective mlm --as-published", "--as-published goes with --objective rtd, not mlm; leave one"),
        ("flops --embedding-width 0", "discriminator: --embedding-width is 0; it must be at least 1"),
        ("flops --lenght 128", "there is no flag --lenght in electra flops; did you mean --length?"),
        ("flops --lenght=128", "there is no flag --lenght in electra flops; did you mean --length?"),
        ("flops --no-jsn", "there is no flag --no-jsn in electra flops; did you mean --no-json?"),
        ("flops --confg x", "there is no flag --confg in electra flops; did you mean --config?"),
        ("detect --modle x text", "there is no flag --modle in electra detect; did you mean --model?"),
        ("detect -model x text", "there is no flag -model in electra detect; did you mean --model?"),
        ("inspect --jsn shards", "there is no flag --jsn in electra inspect; did you mean --json?"),
        ("detect --model x -- -text", "there is no folder x"),
        ("export --model x", "electra export needs --output: the folder to write; it must not exist yet\n"),
        ("export", "electra export needs --model: a model folder; a run stands for its newest checkpoint, the output"),
        (
            "glue --model x",
            "electra glue needs --data: the folder of GLUE's official download, or hub:glue; and --output",
        ),
        ("detect --model x", "electra detect needs the text, in quotes; if it starts with a dash, behind --\n"),
        ("inspect", "electra inspect needs the folder that `electra shard` wrote\n"),
        ("flops --config", "--config needs a file"),
        ("flops --config missing.json", "there is no file missing.json; --config takes a JSON or YAML"),
        ("export --model nowhere --output x", "there is no folder nowhere"),
        ("import --from . --output x", ". has no config.json"),
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


def test_what_tyro_says_for_the_first_time_is_left_as_it_is():
    lines = ["╭─ Parsing error ─────╮", "│ Something is odd.   │", "│ ─────────────────── │", "│ For full help, run  │"]
    box = "\n".join(lines)
    assert in_our_words(box, "flops", {}) == "Something is odd."


def test_with_json_a_mistake_is_also_json_on_standard_output(capsys):
    code, out, err = outcome(capsys, "flops", "--size", "huge", "--json")
    sentence = "unknown size 'huge'; choose from tiny, small, base, large"
    assert (code, json.loads(out)) == (2, {"error": sentence})
    assert err == f"electra: {sentence}\n"
    assert outcome(capsys, "detect", "--model", "nowhere", "--", "--json")[1] == ""  # a text


def test_a_flag_that_may_be_left_out_is_shown_as_what_it_takes(capsys):
    explained = words_of(outcome(capsys, "finetune", "--help")[1])
    for shown in (
        "--epochs INT How often",
        "--train PATH A file",
        "--kind {classification,multi-label,regression} Told",
    ):
        assert shown in explained
    assert "seen; 3, for rte and stsb 10. (optional)" in explained


def test_help_is_in_boxes_and_says_what_is_decided_by_size(capsys):
    out = outcome(capsys, "pretrain", "--help")[1]
    assert all(f" {box} options " in out for box in ("model", "objective", "masking", "optimizer", "batches"))
    explained = words_of(out)
    assert "--layers INT Layers of both encoders. (default: by size)" in explained
    assert explained.index("--data PATH") < explained.index("--seed INT")  # a command's own flags come first
    assert "None" not in explained


def test_help_does_not_keep_the_line_breaks_of_the_source(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert "LayerNorm (of the modern style" in outcome(capsys, "pretrain", "--help")[1]


@pytest.mark.parametrize("library", ["tyro", "torch"])  # read before the command is known, and for it
def test_an_interrupt_while_libraries_are_read_is_one_line(tmp_path, library):
    """Interrupted libraries often raise something else in place of KeyboardInterrupt, or abort."""
    (tmp_path / f"{library}.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise RuntimeError from None\n"
    )
    program = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "sys.argv = ['electra', 'flops']; runpy.run_module('electra', run_name='__main__')"
    paths = os.pathsep.join(map(str, (tmp_path, Path(electra.__file__).parent.parent)))
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (130, "electra: interrupted\n")


def test_an_interrupted_command_is_one_line(capsys, monkeypatch):
    def interrupted(config: FlopsConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("electra.report.costs.count_costs", interrupted)
    monkeypatch.setattr(sys, "argv", ["electra", "flops"])
    with pytest.raises(SystemExit) as exit:
        electra.__main__.main()
    assert exit.value.code == 130
    assert capsys.readouterr().err == "electra: interrupted\n"


@pytest.mark.parametrize(("given", "size", "rate"), [((), "small", "0.0015"), (("--size", "base"), "base", "0.0002")])
def test_help_says_which_size_its_defaults_are_for(capsys, given, size, rate):
    _, out, _ = outcome(capsys, "pretrain", *given, "--help")
    explained = words_of(out)
    assert "defaults depend on --size and --recipe: shown are those of the size and recipe below" in explained
    assert f"1/4 to 1/2 as wide. (default: {size})" in explained
    assert re.search(rf"--learning-rate FLOAT [^(]*\(default: {rate}\)", explained)


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("learning_rate is 0; it must be above 0", "--learning-rate is 0; it must be above 0"),
        ("keep is -1; it must be at least 1", "--keep is -1; it must be at least 1"),
        (
            "mask_token_probability 2 and random_token_probability 1 are shares",
            "--mask-token-probability 2 and --random-token-probability 1 are shares",
        ),
        ("seed was 1 and is now 2; form was a and is now b", "--seed was 1 and is now 2; --form was a and is now b"),
        ("data is not a folder of shards", "data is not a folder of shards"),
        ("no shards in /data/batch_size", "no shards in /data/batch_size"),
        ("init_std is 3; it must lie between 0 and 1", "init_std is 3; it must lie between 0 and 1"),
    ],
)
def test_errors_speak_of_flags_where_python_has_fields(sentence, said):
    assert with_flags(sentence, PretrainConfig) == said


def test_a_terminal_without_unicode_shows_what_it_can(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit, match="0"):
        main(["pretrain", "--help"])
    terminal.flush()
    assert b"0.02??(768/width)" in terminal.buffer.getvalue()


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
    needed = {"pretrain": {"steps": 7}, "finetune": {"train": "word"}}  # one of several fields has to be given
    expected = values(configuration) | needed.get(command, {})
    names = {flag.field: flag.name for flag in flags_of(configuration)}
    (tmp_path / "fields.json").write_text(
        json.dumps({names[field]: value for field, value in expected.items()}, default=str)
    )
    settings = parse(command, configuration, ["--config", str(tmp_path / "fields.json")])
    for field, value in expected.items():
        assert getattr(settings, field) in (value, Path("word"), (Path("word"),)), field


def test_import_takes_its_source_from_a_config_file_under_the_name_of_the_flag(tmp_path):
    (tmp_path / "fields.json").write_text('{"from": "there", "output": "here"}')
    settings = parse("import", ImportConfig, ["--config", str(tmp_path / "fields.json")])
    assert (settings.source, settings.output) == (Path("there"), Path("here"))


def test_a_switch_that_may_be_left_open_is_read_from_a_config_file(tmp_path):
    (tmp_path / "fields.json").write_text('{"corpus": "x", "output": "y", "strip_accents": true}')
    settings = parse("tokenizer", TokenizerConfig, ["--config", str(tmp_path / "fields.json")])
    assert settings.strip_accents is True


def test_a_config_file_may_be_yaml(tmp_path):
    (tmp_path / "fields.yaml").write_text("size: base\nmask_fraction: 0.2\njson: true\nsteps: 5\n")
    settings = parse("flops", FlopsConfig, ["--config", str(tmp_path / "fields.yaml"), "--length", "64"])
    assert settings == FlopsConfig(size="base", mask_fraction=0.2, json=True, steps=5, length=64, batch_size=256)


def test_a_config_file_gives_fields_and_flags_win_over_it(capsys, tmp_path):
    file = tmp_path / "fields.json"
    file.write_text('{"size": "base", "length": 512, "json": true}')
    base = json.loads(outcome(capsys, "flops", "--config", str(file))[1])
    small = json.loads(outcome(capsys, "flops", f"--config={file}", "--size", "small")[1])
    assert base["parameters"] > small["parameters"] == 14_196_219


def test_what_is_given_by_its_place_wins_over_a_config_file(tmp_path):
    (tmp_path / "fields.json").write_text('{"model": "runs/x", "text": "The chef"}')
    for given, text in (([], "The chef"), (["The cook"], "The cook")):
        for flags in ([*given, "--json"], ["--json", *given]):
            settings = parse("detect", DetectConfig, [*flags, "--config", str(tmp_path / "fields.json")])
            assert (settings.model, settings.text, settings.json) == (Path("runs/x"), text, True)
    with pytest.raises(ConfigError, match="'more' belongs to no flag"):
        parse("detect", DetectConfig, ["The cook", "more", "--config", str(tmp_path / "fields.json")])
    with pytest.raises(ConfigError, match="--device is 'tpu'; choose from"):
        parse("detect", DetectConfig, ["The cook", "--device", "tpu", "--config", str(tmp_path / "fields.json")])
    (tmp_path / "report.json").write_text('{"glue": ["x"], "runs": ["a", "b"]}')
    for given, runs in (([], "ab"), (["c"], "c")):
        settings = parse("report", ReportConfig, [*given, "--config", str(tmp_path / "report.json")])
        assert (settings.runs, settings.glue) == (tuple(map(Path, runs)), ("x",))


def test_a_text_of_a_config_file_may_begin_with_a_dash(tmp_path):
    (tmp_path / "fields.json").write_text('{"text": "-A cat", "model": "runs/x"}')
    for given, text in (([], "-A cat"), (["--json", "--", "-B cat"], "-B cat")):
        assert parse("detect", DetectConfig, ["--config", str(tmp_path / "fields.json"), *given]).text == text


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("fields.json", b'{"sise": "base"}', "unknown setting 'sise'; the settings are as_published, batch_size, "),
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


def test_a_file_in_place_of_a_folder_is_named(capsys, tmp_path, make_pair, shards):
    save_model(make_pair(), tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, _, err = outcome(capsys, "export", "--model", f"{tmp_path}/run", "--output", f"{tmp_path}/file/hf")
    assert (code, err) == (2, f"electra: {tmp_path}/file is a file; name a folder\n")
    flags = ("--corpus", f"{shards.parent}/text.txt", "--tokenizer", f"{shards}/tokenizer")
    code, _, err = outcome(capsys, "shard", *flags, "--output", f"{tmp_path}/file")
    assert (code, err) == (2, f"electra: --output {tmp_path}/file is a file; name a folder\n")


def test_a_model_without_a_generator_may_never_have_had_one(capsys, tmp_path, encoder_folder):
    for command in (["fill", "a [MASK]"], ["export", "--part", "generator", "--output", f"{tmp_path}/hf"]):
        code, _, err = outcome(capsys, *command, "--model", str(encoder_folder))
        assert code == 2
        assert (
            "this model has no generator: give the folder of one (…ForMaskedLM), or import both: electra import" in err
        )


@pytest.mark.parametrize("flags", [("--weight-decay", "nan"), ("--minutes", "inf"), ("--learning-rate", "inf")])
def test_what_is_no_number_is_refused_for_every_number(flags, capsys):
    budget = () if "--minutes" in flags else ("--steps", "2")
    code, _, error = outcome(capsys, "pretrain", "--data", "shards", "--output", "run", *budget, *flags)
    assert (code, error) == (2, f"electra: {' is '.join(flags)}; it must be a number\n")


@pytest.mark.parametrize(
    "flags",
    [("--beta1", "2"), ("--beta2", "1"), ("--momentum", "3"), ("--epsilon", "0"), ("--seed", "-1"),
     ("--evaluation-rows", "0")],
)  # fmt: skip
def test_numbers_that_no_run_can_have_are_refused_by_their_name(flags, capsys):
    code, _, error = outcome(capsys, "pretrain", "--data", "shards", "--output", "run", "--steps", "2", *flags)
    assert code == 2
    assert f"{flags[0].removeprefix('--')} is {flags[1]}" in error


def test_a_run_that_is_not_there_is_missed_and_not_its_data(tmp_path, capsys):
    code, _, error = outcome(capsys, "pretrain", "--output", str(tmp_path / "nope"), "--resume")
    assert code == 2
    assert "nope holds no run; begin one with --data" in error
    (tmp_path / "config.json").write_text("{}")
    code, _, error = outcome(capsys, "pretrain", "--output", str(tmp_path))
    assert code == 2
    assert "holds a run; go on with it by --resume" in error
