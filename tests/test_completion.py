"""electra completion: scripts that complete commands, flags and values."""

import shutil
import subprocess

import pytest
from conftest import error_message

from electra.cli import build_app, main
from electra.commands import COMMANDS


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "electra"
    path.write_text(build_app().generate_completion(shell="bash"))
    return path


def complete(script, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f'"{word}"' for word in words)
    code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _electra; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_commands_flags_and_values_are_completed(bash_script):
    assert complete(bash_script, "electra", "") >= COMMANDS.keys()
    assert complete(bash_script, "electra", "pretrain", "--siz") == {"--size"}
    assert complete(bash_script, "electra", "pretrain", "--size", "") == {"tiny", "small", "medium", "base", "large"}
    assert "--help" in complete(bash_script, "electra", "export", "--he")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_flags_are_completed_in_fish(tmp_path):
    (tmp_path / "electra.fish").write_text(build_app().generate_completion(shell="fish"))
    code = f"source {tmp_path}/electra.fish; complete -C 'electra pretrain --siz'"
    assert subprocess.run(["fish", "-c", code], capture_output=True, text=True).stdout.startswith("--size\t")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_a_script_is_printed_for_each_shell(shell, capsys):
    main(["completion", shell])
    assert "learning-rate" in capsys.readouterr().out


def test_installing_writes_where_the_shell_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    main(["completion", "bash", "--install"])
    path = tmp_path / ".local/share/bash-completion/completions/electra"
    assert capsys.readouterr().out == f"{path} is written; start a new bash\n"
    assert "_electra()" in path.read_text()
    assert "complete -o default -F _electra electra" in path.read_text()  # file names after --corpus


def test_an_unknown_shell_has_to_be_named(monkeypatch, capsys):
    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", fail_to_detect)
    assert "name it: electra completion bash" in error_message("completion", capsys)


def fail_to_detect() -> None:
    from cyclopts.completion.detect import ShellDetectionError

    raise ShellDetectionError
