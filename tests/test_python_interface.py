"""The commands as functions of the package, and where progress bars are shown."""

import inspect
import io
import pkgutil

import pytest
from rich.console import Console

import electra
from electra import progress
from electra.commands import COMMANDS, argument_name, function_name
from electra.config import settings_by_name
from electra.progress import can_show_bars


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_function_with_its_settings(command):
    function = getattr(electra, function_name(command))
    settings = settings_by_name(COMMANDS[command].load_config_class())
    names = set(inspect.signature(function).parameters)
    assert names - {"callback"} == {argument_name(name) for name in settings}
    assert all(f"`{argument_name(name)}`: {setting.help}" in function.__doc__ for name, setting in settings.items())


def test_no_function_has_the_name_of_a_module():
    """Importing a module electra.report would replace the function of that name."""
    modules = {module.name for module in pkgutil.iter_modules(electra.__path__)}
    assert modules & electra.FUNCTIONS.keys() == set()
    assert electra.FUNCTIONS.keys() ^ COMMANDS.keys() == {"import", "import_model"}
    assert set(dir(electra)) >= electra.FUNCTIONS.keys()


def test_the_signature_shows_the_defaults_that_are_used():
    parameters = inspect.signature(electra.pretrain).parameters
    assert parameters["learning_rate"].default == 0.0015  # of the small size in the fast recipe
    assert parameters["data"].default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("terminal", "jupyter", "has_widgets", "shown"),
    [(True, False, False, True), (False, False, True, False), (False, True, True, True), (False, True, False, False)],
)
def test_bars_are_shown_on_terminals_and_in_notebooks_with_widgets(monkeypatch, terminal, jupyter, has_widgets, shown):
    monkeypatch.setattr(progress, "find_spec", lambda name: object() if has_widgets else None)
    console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=jupyter, width=80, height=20)
    assert can_show_bars(console) == shown
