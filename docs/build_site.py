"""Build the documentation site: `python docs/build_site.py`, then open build/site/html/index.html.

Pages come from docs/, README.md (the home page) and other files of the repository; those of commands are generated from
their config dataclasses, so that a new command or flag appears without further work.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from electra.cli import build_help_panel, format_help
from electra.commands import COMMANDS, argument_name, function_name
from electra.config import PACKAGED_MODEL, Setting, all_defaults, settings_by_name, union_members

ROOT = Path(__file__).parent.parent
PAGES = {  # files outside of docs/ and their pages
    "README.md": "index.md",
    "electra/kernels/README.md": "kernels.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PAGES |= {f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").glob("*.md"))}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
COMMAND_BLOCK = re.compile(r"(?<=\n\n)    (?:electra|pip|make|torchrun|python|#) .*\n(?:    .*\n)*")
MAX_EXAMPLES = 8
TYPE_NAMES = {int: "integer", float: "number", str: "text", Path: "path", bool: ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/site", help="folder of staged pages and HTML")
    folder = parser.parse_args().output.resolve()
    stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / "mkdocs.yml")]
    sys.exit(subprocess.run(command, cwd=folder, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode)


def stage(folder: Path) -> None:
    """Write all pages and the settings of zensical into a folder."""
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__"))
    for source, page in PAGES.items():
        (pages / page).write_text(convert_page(source), encoding="utf-8")
    (pages / "commands").mkdir()
    for name in COMMANDS:
        (pages / "commands" / f"{name}.md").write_text(format_command_page(name), encoding="utf-8")
    (pages / "commands" / "index.md").write_text(format_command_index(), encoding="utf-8")
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(site_settings(), sort_keys=False), encoding="utf-8")


def site_settings() -> dict[str, Any]:
    """mkdocs.yml with the pages of commands, and with pages that it does not name among the guides."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sections = {title: pages for section in settings["nav"] for title, pages in section.items()}
    listed = {page for pages in sections.values() for page in ([pages] if isinstance(pages, str) else pages)}
    sections["Guides"] += [page for page in PAGES.values() if page not in listed]
    sections["Commands"] = [
        {"All commands": "commands/index.md"},
        *({name: f"commands/{name}.md"} for name in COMMANDS),
    ]
    settings["nav"] = [{title: pages} for title, pages in sections.items()]
    return settings | {"docs_dir": "pages", "site_dir": "html"}


def convert_page(source: str) -> str:
    """A page of the repository with links that hold on the site, and with highlighted commands."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = LINK.sub(lambda match: convert_link(source, *match.groups(default="")), text)
    text = COMMAND_BLOCK.sub(lambda match: f"```bash\n{dedent(match[0])}```\n", text)
    return f"---\nhide: [navigation]\n---\n\n{text}" if source == "README.md" else text


def convert_link(source: str, is_image: str, label: str, target: str, anchor: str) -> str:
    """A link to a page of the site; one to another file of the repository becomes plain text."""
    if "://" in target:
        return f"{is_image}[{label}]({target}{anchor})"
    path = os.path.relpath((ROOT / source).parent / target, ROOT)
    if path in PAGES:
        return f"[{page_title(path) if label.endswith('.md') else label}]({PAGES[path]}{anchor})"
    if path.startswith("docs/"):
        return f"{is_image}[{label}]({path.removeprefix('docs/')}{anchor})"
    return label


def page_title(source: str) -> str:
    return re.search(r"^# (.*)$", (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)[1]


def format_command_index() -> str:
    rows = [f"| [`electra {name}`]({name}.md) | {command.help} |" for name, command in COMMANDS.items()]
    introduction = (
        "`electra COMMAND --help` prints the same as these pages, with the defaults for the flags beside it. Every "
        "command takes `--config FILE`, a JSON, YAML or TOML file with settings, over which flags win. A mistake gives "
        "one sentence and exit code 2."
    )
    return "\n".join(["# Commands", "", introduction, "", "| command | |", "|---|---|", *rows, ""])


def format_command_page(name: str) -> str:
    """The page of a command: what it does, examples from the documentation, and its flags in the panels of its help."""
    command = COMMANDS[name]
    config_class = command.load_config_class()
    settings = settings_by_name(config_class)
    essential_names = getattr(config_class, "ESSENTIALS", ())
    panels: dict[str, list[Setting]] = {"Essential options": [], "Options": []}
    for setting in settings.values():
        is_own = setting.config_class is config_class
        panel = "Options" if is_own else build_help_panel(setting.config_class).name
        panels.setdefault("Essential options" if setting.name in essential_names else panel, []).append(setting)
    defaults = all_defaults(config_class, {})
    usage = [setting.flag if setting.is_positional else f"{setting.flag} VALUE" for setting in settings.values()]
    needed = [each for each, setting in zip(usage, settings, strict=True) if setting not in defaults]
    optional = [
        f"[{setting.flag}]" for setting in settings.values() if setting.is_positional and setting.name in defaults
    ]
    lines = [f"# electra {name}", "", format_help(config_class), ""]
    lines += [f"    electra {' '.join([name, *needed, *optional, '[OPTIONS]'])}", ""]
    keywords = [
        f" (`{each.flag}` is `{argument}`)"
        for name, each in settings.items()
        if (argument := argument_name(name)) != name
    ]
    lines += [
        f"In Python: `electra.{function_name(name)}(...)`, with the flags as keyword arguments{''.join(keywords)}.",
        "",
    ]
    if examples := find_examples(name):
        lines += ["## Examples", "", "```bash", *examples, "```", ""]
    for panel, listed in panels.items():
        if listed:
            lines += [f"## {panel}", "", "| flag | value | default | |", "|---|---|---|---|"]
            lines += [format_setting(setting, defaults) for setting in listed]
            lines.append("")
    return "\n".join(lines)


def find_examples(command: str) -> list[str]:
    """The lines of the documentation that call a command, each below its comment."""
    text = "\n".join((ROOT / source).read_text(encoding="utf-8") for source in PAGES if source != "docs/log.md")
    calls = re.findall(rf"^    ((?:torchrun .* -m )?electra {command}(?: .*?)?)(?: +# (.*))?$", text, re.MULTILINE)
    comments: dict[str, str] = {}
    for call, comment in calls:
        comments[call] = comments.get(call) or comment
    return [
        line
        for call in list(comments)[:MAX_EXAMPLES]
        for line in (comments[call] and f"# {comments[call]}", call)
        if line
    ]


def format_setting(setting: Setting, defaults: dict[str, Any]) -> str:
    """A row of the table of a panel."""
    default = defaults.get(setting.name, "required")
    if default in (None, (), False, PACKAGED_MODEL):
        shown = ""
    else:
        shown = f"`{str(default).lower() if default is True else default}`" if setting.name in defaults else default
    cells = f"`{setting.flag}`", describe_type(setting.value_type), shown, escape(setting.help)
    return f"| {' | '.join(cells)} |"


def describe_type(value_type: Any) -> str:
    """The values that a flag takes."""
    names = []
    for kind in union_members(value_type):
        if get_origin(kind) is Literal:
            names += [f"`{value}`" for value in get_args(kind)]
        elif get_origin(kind) is tuple:
            names.append(f"{describe_type(get_args(kind)[0])}, several")
        elif kind is not NoneType:
            names.append(TYPE_NAMES.get(kind, kind.__name__))
    return ", ".join(names)


def escape(text: str) -> str:
    """A help text in a cell: no columns, and no HTML, links or emphasis by accident."""
    return re.sub(r"([|<\[\]*_])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


if __name__ == "__main__":
    main()
