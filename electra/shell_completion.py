"""`electra completion`: complete commands, flags and their values in a shell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import App
from cyclopts.completion.detect import ShellDetectionError, detect_shell

from electra.cli import build_parser
from electra.commands import COMMANDS
from electra.config import Positional
from electra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Complete commands, flags and their values with the tab key: print the script of a shell, or install it."""

    shell: Positional[Literal["bash", "zsh", "fish", "powershell"] | None] = None
    """The shell; default: the one that runs this command. The script of powershell was never executed."""
    install: bool = False
    """Write the script where the shell finds it, and add what it needs to the shell's start file."""


@dataclass(frozen=True)
class Completion:
    shell: str
    script: str
    installed: str | None  # path

    def __str__(self) -> str:
        if self.installed is None:
            return self.script
        note = "; its .zshrc has to call compinit" if self.shell == "zsh" else ""
        return f"{self.installed} is written; start a new {self.shell}{note}"


def write_completion(config: CompletionConfig) -> Completion:
    """The completion script of a shell, installed if asked for."""
    app = build_app()
    try:
        shell = config.shell or detect_shell()
    except ShellDetectionError:
        raise ConfigError("the shell is unknown; name it: electra completion bash (or zsh, fish, powershell)") from None
    script = app.generate_completion(shell=shell)
    if shell == "bash":  # completes file names after flags that also take other values, such as --corpus
        script = script.replace("complete -F", "complete -o default -F")
    installed: Path | None = app.install_completion(shell=shell) if config.install else None
    if installed is not None:
        installed.write_text(script, encoding="utf-8")
    return Completion(shell, script, str(installed) if installed else None)


def build_app() -> App:
    """All commands with their flags as one app of cyclopts."""
    app = App(name="electra", help_flags=("--help",), version_flags=("--version",))
    for name, command in COMMANDS.items():
        parser = build_parser(command.load_config_class(), name)
        parser.help, parser.help_flags = command.help, ["--help"]
        app.command(parser, name=name)
    return app
