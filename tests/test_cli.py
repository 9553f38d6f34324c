"""The command line: help for every flag, and errors in one sentence with exit code 2."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import electra
import electra.__main__
from electra.cli import main, name_flags_in_errors, parse_config
from electra.commands import COMMANDS
from electra.config import WAIT_VARIABLES, flat_values, settings_by_name
from electra.data.train_tokenizer import TokenizerConfig
from electra.errors import ConfigError
from electra.exporting.command import export
from electra.exporting.config import ExportConfig, ImportConfig
from electra.model.storage import save_model
from electra.pretraining.config import PretrainConfig
from electra.reporting.config import FlopsConfig, ReportConfig
from electra.runfolder import lock_folder, open_atomic
from electra.serving.config import DetectConfig


def run_command(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = exit.code or 0
    return code, *capsys.readouterr()


def help_text(capsys, *arguments: str) -> str:
    """A command's help on one line, without panels."""
    code, out, _ = run_command(capsys, *arguments, "--help")
    assert code == 0
    return " ".join(out.replace("│", " ").split())


def test_help_lists_every_command(capsys):
    code, out, _ = run_command(capsys, "--help")
    assert code == 0
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "400")
    text = help_text(capsys, command)
    assert "None" not in text
    for setting in settings_by_name(COMMANDS[command].load_config_class()).values():
        assert setting.help, f"{setting.flag} is not explained"
        assert setting.help in text
        assert setting.flag in text
    assert "--config PATH" in text


def test_help_has_one_panel_for_each_config_class(capsys):
    text = help_text(capsys, "pretrain")
    assert all(f" {panel} options ─" in text for panel in ("Model", "Objective", "Masking", "Optimizer"))
    assert text.index("--data PATH") < text.index("--learning-rate FLOAT")  # the command's own flags come first


@pytest.mark.parametrize(("flags", "size", "rate"), [((), "small", "0.0015"), (("--size", "base"), "base", "0.0002")])
def test_help_shows_the_defaults_of_the_size(capsys, monkeypatch, flags, size, rate):
    monkeypatch.setenv("COLUMNS", "400")
    lines = run_command(capsys, "pretrain", *flags, "--help")[1].splitlines()
    [size_line] = [line for line in lines if "  --size " in line]
    [rate_line] = [line for line in lines if "--learning-rate " in line]
    assert f"[default: {size}]" in size_line
    assert f"[default: {rate}]" in rate_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("exprt", "unknown command 'exprt'; did you mean export?"),
        ("flops --size huge", "--size is 'huge'; it must be one of tiny, small, medium, base, large"),
        ("flops --layers many", "--layers is 'many'; it must be an integer"),
        ("flops --layers 2.5", "--layers is '2.5'; it must be an integer"),
        ("flops --layers=", "--layers is ''; it must be an integer"),
        ("flops --layers -----", "--layers needs a value: "),
        ("flops -----", "unknown flag -----; --help lists the flags"),
        ("flops --steps 1e4", "--steps is '1e4'; it must be an integer, such as 10000"),
        ("flops --steps 10,000", "--steps is '10,000'; it must be an integer"),
        ("flops --mask-fraction 0,2", "--mask-fraction is '0,2'; it must be a number"),
        ("pretrain --minutes 1,5", "--minutes is '1,5'; it must be a number, such as 0.5 or 1e-4"),
        ("pretrain --minutes inf", "--minutes is inf; it must be a finite number"),
        ("pretrain --weight-decay nan", "--weight-decay is nan; it must be a finite number"),
        ("flops --size", "--size needs a value: "),
        ("flops --size --inference", "--size needs a value: "),
        ("pretrain --phases", "--phases needs a value: "),
        ("flops --inference yes", "unexpected argument 'yes'"),
        ("flops --lenght 128", "unknown flag --lenght; did you mean --length?"),
        ("flops --lenght=128", "unknown flag --lenght; did you mean --length?"),
        ("finetune --nope", "unknown flag --nope; --help lists the flags"),
        ("flops --no-jsn", "unknown flag --no-jsn; did you mean --no-json?"),
        ("pretrain --lr 1e-3", "unknown flag --lr; did you mean --learning-rate?"),
        ("flops --confg x", "unknown flag --confg; did you mean --config?"),
        ("detect --modle x text", "unknown flag --modle; did you mean --model?"),
        ("detect -model x text", "unknown flag -model; did you mean --model?"),
        ("inspect --jsn shards", "unknown flag --jsn; did you mean --json?"),
        ("detect --model nowhere -- -text", "nowhere"),
        ("export --model x", "missing --output: "),
        ("glue --model x --output y", "missing --data: "),
        ("inspect", "missing SHARDS: "),
        ("flops --config", "--config needs a value: "),
        ("flops --config missing.json", "missing.json does not exist; --config takes a JSON, YAML or TOML file"),
        ("flops --length 0", "length is 0; "),
        ("flops --width 100 --heads 3", "not a multiple of 3 heads; try 99"),
        ("export --model nowhere --output x", "nowhere"),
        ("import --from . --output x", "no config.json"),
    ],
)
def test_an_error_is_one_sentence_with_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("electra: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "unknown command ''"),
        (["flops", ""], "unexpected argument ''"),
        (["flops", "--layers", ""], "--layers is ''; it must be an integer"),
        (["flops", "--size", ""], "--size is ''; it must be one of tiny"),
    ],
)
def test_an_error_about_an_empty_argument_is_a_sentence(capsys, arguments, message):
    code, _, err = run_command(capsys, *arguments)
    assert code == 2
    assert message in err


def test_with_json_an_error_is_also_json_on_stdout(capsys):
    code, out, err = run_command(capsys, "flops", "--size", "huge", "--json")
    message = "--size is 'huge'; it must be one of tiny, small, medium, base, large"
    assert (code, json.loads(out)) == (2, {"error": message})
    assert err == f"electra: {message}\n"
    assert run_command(capsys, "detect", "--model", "nowhere", "--", "--json")[1] == ""  # a text


def test_an_error_about_a_field_names_its_flag_on_the_command_line():
    error = ConfigError("is 0; it must be above 0", field="learning_rate")
    assert str(error) == "learning_rate is 0; it must be above 0"
    with (
        pytest.raises(ConfigError, match=r"^--learning-rate is 0; it must be above 0$"),
        name_flags_in_errors(PretrainConfig),
    ):
        raise error


def test_flags_are_parsed_without_importing_torch():
    """torch takes seconds to import; help and errors in flags should not."""
    program = "import sys, electra.cli as cli; [each.load_config_class() for each in cli.COMMANDS.values()]; "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_nothing_that_only_linux_has_is_needed_to_start():
    """macOS has no os.sched_getaffinity; Windows also lacks fcntl, resource, os.sysconf, os.fork and SIGHUP."""
    program = """
import importlib, os, pathlib, signal, sys
import torch, torch.utils.tensorboard, transformers
for module in ("fcntl", "resource"):
    sys.modules[module] = None
for name in ("sched_getaffinity", "sysconf", "fork"):
    delattr(os, name)
del signal.SIGHUP
import electra.cli
for command in electra.cli.COMMANDS.values():
    command.load_config_class(), command.load_function()
from electra.data.workers import count_usable_cores
from electra.data.shards import raise_open_file_limit
from electra.diagnosis import DoctorConfig, diagnose
raise_open_file_limit(10**6)
print(count_usable_cores(), diagnose(DoctorConfig()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "memory         unknown" in ended.stdout


def test_commands_work_outside_of_the_main_thread(capsys):
    """Python allows signal handlers in the main thread only."""
    thread = threading.Thread(target=main, args=(["flops", "--json"],))
    thread.start()
    thread.join()
    assert json.loads(capsys.readouterr().out)["parameters"] > 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_signal_cleans_up(capfd, monkeypatch, tmp_path, name):
    def stopped(config: FlopsConfig) -> None:
        with open_atomic(tmp_path / "file"), lock_folder(tmp_path / "folder"):
            os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr("electra.reporting.flops.count_flops", stopped)
    before = signal.getsignal(signal.Signals[name])
    with pytest.raises(SystemExit) as exit:
        main(["flops"])
    assert exit.value.code == 128 + signal.Signals[name]
    assert capfd.readouterr().err == f"electra: stopped by {name}\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.Signals[name]) == before


@pytest.mark.parametrize(("name", "exception"), [("SIGTERM", SystemExit), ("SIGINT", KeyboardInterrupt)])
def test_a_stop_signal_that_a_library_turns_into_another_error_stops(monkeypatch, name, exception):
    """As torch does if it is stopped while it inspects an object."""

    def stopped(config: FlopsConfig) -> None:
        try:
            os.kill(os.getpid(), signal.Signals[name])
        except BaseException:
            raise ValueError("could not determine the shape of object type") from None

    monkeypatch.setattr("electra.reporting.flops.count_flops", stopped)
    before = signal.signal(signal.Signals[name], signal.default_int_handler)  # a background process ignores SIGINT
    with pytest.raises(exception):
        main(["flops"])
    signal.signal(signal.Signals[name], before)


@pytest.mark.parametrize("library", ["cyclopts", "torch"])
def test_an_interrupt_during_imports_is_one_line(tmp_path, library):
    """Libraries that are interrupted while they are imported often raise something other than KeyboardInterrupt."""
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


def test_the_help_of_pretrain_begins_with_the_essentials(capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    _, first, second, *_ = capsys.readouterr().out.split("╭─ ")
    assert first.startswith("Essential options")
    flags = re.findall(r"^│[ *]+(--[a-z-]+)", first, re.MULTILINE)
    assert flags == ["--data", "--output", "--resume", "--dry-run", "--size", "--steps", "--minutes", "--device"]
    assert second.startswith("Options")


def test_an_interrupted_command_is_one_line(capfd, monkeypatch):
    def interrupted(config: FlopsConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("electra.reporting.flops.count_flops", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["electra", "flops"])
    with pytest.raises(SystemExit) as exit:
        electra.__main__.main()
    assert exit.value.code == 130
    assert capfd.readouterr().err == "electra: interrupted\n"


def test_a_terminal_without_unicode_shows_what_it_can(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit, match="0"):
        main(["pretrain", "--help"])
    terminal.flush()
    assert b"0.02??(768/width)" in terminal.buffer.getvalue()


def test_json_output(capsys):
    code, out, _ = run_command(capsys, "flops", "--size", "small", "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 14_196_219


def example_values(config_class: type) -> dict[str, Any]:
    """A value for every setting: its default, or a word if it is required."""
    defaults = {name: each.default for name, each in settings_by_name(config_class).items()}
    values = {name: "word" if value is dataclasses.MISSING else value for name, value in defaults.items()}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_can_come_from_a_config_file(tmp_path, command):
    config_class = COMMANDS[command].load_config_class()
    needed = {"pretrain": {"steps": 7}, "finetune": {"train": "word"}, "report": {"runs": ["word"]}}
    needed["study"] = {"name": "styles", "steps": 7, "data": "word"}
    expected = example_values(config_class) | needed.get(command, {})
    (tmp_path / "settings.json").write_text(json.dumps(expected, default=str))
    parsed = flat_values(parse_config(command, config_class, ["--config", str(tmp_path / "settings.json")]))
    for name, value in expected.items():
        assert parsed[name] in (value, Path("word"), (Path("word"),)), name


def test_a_config_file_uses_the_names_of_the_flags(tmp_path):
    (tmp_path / "settings.json").write_text('{"from": "there", "output": "here"}')
    config = parse_config("import", ImportConfig, ["--config", str(tmp_path / "settings.json")])
    assert (config.source, config.output) == (Path("there"), Path("here"))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "size: base\nmask-fraction: 2e-1\njson: true\nsteps: 5\n"),
        ("toml", 'size = "base"\nmask_fraction = 0.2\njson = true\nsteps = 5\n'),
        ("json", '{"size": "base", "mask_fraction": 0.2, "json": true, "steps": 5, "layers": null}'),
    ],
)
def test_flags_win_over_a_config_file(tmp_path, suffix, text):
    file = tmp_path / f"settings.{suffix}"
    file.write_text(text)
    flags = ["--steps", "1", "--steps", "6", "--no-json"]  # the last of two equal flags wins
    values = flat_values(parse_config("flops", FlopsConfig, [f"--config={file}", *flags]))
    assert (values["size"], values["mask_fraction"], values["json"], values["steps"]) == ("base", 0.2, False, 6)
    assert values["batch_size"] == 256  # a default of the size in the file


def test_optional_switches_and_positional_values_from_a_config_file(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text('{"corpus": "x", "output": "y", "strip_accents": true}')
    assert parse_config("tokenizer", TokenizerConfig, ["--config", str(file)]).strip_accents is True
    file.write_text('{"model": "runs/x", "text": "-The chef"}')
    for texts, expected in (([], "-The chef"), (["The cook"], "The cook"), (["--", "-The cook"], "-The cook")):
        assert parse_config("detect", DetectConfig, ["--config", str(file), *texts]).input.text == expected
    file.write_text('{"runs": ["a", "b"]}')
    assert parse_config("report", ReportConfig, ["--config", str(file)]).runs == (Path("a"), Path("b"))
    assert parse_config("report", ReportConfig, ["c", "--config", str(file)]).runs == (Path("c"),)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("settings.json", b'{"sise": "base"}', "unknown setting 'sise' in "),
        ("settings.json", b'{"steps": "many"}', "--steps is 'many'; it must be an integer"),
        ("settings.json", b'{"size": "huge"}', "--size is 'huge'; it must be one of tiny"),
        ("settings.json", b'{"json": "maybe"}', "--json is 'maybe'; it must be true or false"),
        ("settings.json", b'{"mask_fraction": NaN}', "--mask-fraction is nan; it must be a finite number"),
        ("settings.json", b"{", "cannot read"),
        ("settings.json", b"[]", "contains a list; it must contain an object of settings"),
        ("settings.json", b'{"size": "\xff"}', "cannot read"),
        ("settings.yaml", b"1: base", "unknown setting '1' in"),
        ("settings.yaml", b"size: [", "cannot read"),
        ("settings.yaml", b"size: base\nsize: small", "the key size occurs twice"),
        ("settings.json", b'{"size": "base", "size": "small"}', "the key size occurs twice"),
        ("settings.toml", b"mask-fraction = 0.1\nmask_fraction = 0.2", "the key mask_fraction occurs twice"),
        ("settings.toml", b"size = ", "cannot read"),
        ("deep.json", b"[" * 9999, "cannot read"),
        ("deep.toml", b"a = " + b"[" * 9999, "cannot read"),
        ("deep.yaml", b"[" * 9999, "cannot read"),
    ],
)
def test_errors_in_a_config_file(capsys, tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    code, _, err = run_command(capsys, "flops", "--config", str(file))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_commands_are_functions_with_flat_keyword_arguments(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n\nthe dog ran\n")
    electra.tokenizer(corpus=str(tmp_path / "text.txt"), output=str(tmp_path / "vocab"), vocab_size=60)
    assert (tmp_path / "vocab/vocab.txt").exists()
    with pytest.raises(ConfigError, match="did you mean vocab_size"):
        electra.tokenizer(corpus="text.txt", output="vocab", vocab_sise=60)
    with pytest.raises(ConfigError, match="no value is given for data, output"):
        electra.pretrain(steps=1)
    with pytest.raises(ConfigError, match="learning_rate is 'high'; it must be a number"):
        electra.pretrain(data="x", output="y", learning_rate="high")


def test_export_then_import_by_command(capsys, tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "run")
    code, out, _ = run_command(
        capsys, "export", "--model", f"{tmp_path}/run", "--to", "huggingface", "--output", f"{tmp_path}/hf"
    )
    assert code == 0
    assert "hf: ElectraForPreTraining, " in out
    code, out, _ = run_command(capsys, "import", "--from", f"{tmp_path}/hf", "--output", f"{tmp_path}/back", "--json")
    assert code == 0
    assert json.loads(out)["model"] == "discriminator, sharing none"


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def replace_by_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


@pytest.mark.parametrize("command", ["export --model run", "import --from hf"])
@pytest.mark.parametrize(("damage", "message"), [(truncate, "damaged"), (replace_by_pickle, "pickle")])
def test_damaged_weights_are_reported_and_nothing_is_written(
    capsys, tmp_path, monkeypatch, make_pair, command, damage, message
):
    monkeypatch.chdir(tmp_path)
    save_model(make_pair(), Path("run"))
    export(ExportConfig(model=Path("run"), output=Path("hf")))
    damage(Path(command.split()[-1]))
    code, out, err = run_command(capsys, *command.split(), "--output", "new")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("new").exists()


def test_a_file_where_a_folder_is_needed(capsys, tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, _, err = run_command(capsys, "export", "--model", f"{tmp_path}/run", "--output", f"{tmp_path}/file/hf")
    assert (code, err) == (2, f"electra: {tmp_path}/file is a file; a folder is needed\n")


def test_a_model_without_a_generator_is_reported(capsys, tmp_path, encoder_folder):
    for command in (["fill", "a [MASK]"], ["export", "--part", "generator", "--output", f"{tmp_path}/hf"]):
        code, _, err = run_command(capsys, *command, "--model", str(encoder_folder))
        assert code == 2
        assert "this model has no generator" in err


@pytest.mark.parametrize(
    "flags",
    [("--beta1", "2"), ("--beta2", "1"), ("--momentum", "3"), ("--epsilon", "0"), ("--seed", "-1"),
     ("--evaluation-rows", "0")],
)  # fmt: skip
def test_numbers_out_of_bounds_are_reported_by_name(flags, capsys):
    code, _, error = run_command(capsys, "pretrain", "--data", "shards", "--output", "run", "--steps", "2", *flags)
    assert code == 2
    assert f"{flags[0].removeprefix('--').replace('-', '_')} is {flags[1]}" in error.replace(
        "evaluation-rows", "evaluation_rows"
    )


def test_resume_without_a_run_and_a_run_without_resume(tmp_path, capsys):
    code, _, error = run_command(capsys, "pretrain", "--output", str(tmp_path / "nope"), "--resume")
    assert code == 2
    assert "nope" in error
    assert "--data" in error
    (tmp_path / "config.json").write_text("{}")
    code, _, error = run_command(capsys, "pretrain", "--output", str(tmp_path))
    assert code == 2
    assert "--resume" in error


PRINT_AT_TORCH_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
            sys.exit(0)
sys.meta_path.insert(0, Finder())
import electra, electra.commands
"""


@pytest.mark.parametrize("code", ["electra.load", "electra.commands.COMMANDS['pretrain'].load_function()"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE"), ({"GOMP_SPINCOUNT": "7"}, "7 None")],
)
def test_openmp_threads_spin_briefly_unless_the_user_chose_otherwise(given, expected, code):
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES} | given
    command = [sys.executable, "-c", f"{PRINT_AT_TORCH_IMPORT}{code}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
