"""The documentation site: a page for every command and document, built without a warning, and no dead link."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from electra.commands import COMMANDS
from electra.config import settings_by_name

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs/build_site.py"


@pytest.fixture(scope="module")
def build_site():
    spec = importlib.util.spec_from_file_location("build_site", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(build_site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged") / "site"
    build_site.stage(folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_all_flags(staged, command):
    page = (staged / "pages/commands" / f"{command}.md").read_text()
    settings = settings_by_name(COMMANDS[command].load_config_class()).values()
    rows = dict(re.findall(r"^\| `([^`]+)` \| .* \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {setting.flag for setting in settings}
    assert {flag: re.sub(r"\\(.)", r"\1", text) for flag, text in rows.items()} == {
        setting.flag: setting.help.replace("\\|", "|") for setting in settings
    }


def test_every_document_and_command_is_in_the_navigation(staged):
    navigation = (staged / "mkdocs.yml").read_text()
    for page in (staged / "pages").rglob("*.md"):
        assert str(page.relative_to(staged / "pages")) in navigation


def test_pages_that_the_navigation_does_not_name_become_guides(build_site, monkeypatch):
    monkeypatch.setitem(build_site.PAGES, "docs/server.md", "server.md")
    sections = {title: pages for section in build_site.site_settings()["nav"] for title, pages in section.items()}
    assert sections["Guides"][-1] == "server.md"


def test_examples_come_from_the_documentation(staged):
    page = (staged / "pages/commands/inspect.md").read_text()
    assert "```bash\n# counts, document lengths, sample rows\nelectra inspect shards/\n```" in page


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[docs/data.md](docs/data.md)", "[Data: text, tokens, shards, batches](data.md)"),
        ("README.md", "[the log](docs/log.md#x)", "[the log](log.md#x)"),
        ("README.md", "[LICENSE](LICENSE)", "LICENSE"),
        ("README.md", "![a](docs/images/a.png)", "![a](images/a.png)"),
        ("docs/data.md", "[kernels](../electra/kernels/README.md)", "[kernels](kernels.md)"),
        ("docs/data.md", "[web](https://a.b/c#d)", "[web](https://a.b/c#d)"),
    ],
)
def test_links_are_converted(build_site, source, link, expected):
    assert (
        build_site.LINK.sub(lambda match: build_site.convert_link(source, *match.groups(default="")), link) == expected
    )


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("import", "electra import --from VALUE --output VALUE [OPTIONS]"),
        ("inspect", "electra inspect SHARDS [OPTIONS]"),
        ("doctor", "electra doctor [FEATURE] [OPTIONS]"),
    ],
)
def test_the_usage_of_a_command_shows_what_it_needs(staged, command, usage):
    assert f"\n    {usage}\n" in (staged / f"pages/commands/{command}.md").read_text()


def test_the_home_page_is_the_readme(staged):
    page = (staged / "pages/index.md").read_text()
    assert "**replaced token detection**" in page
    assert "\n```bash\nelectra detect " in page  # highlighted


class Links(HTMLParser):
    """Targets of links and images, and ids, of an HTML file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        values = dict(attributes)
        self.ids |= {values["id"]} if values.get("id") else set()
        self.targets |= {values[name] for name in ("href", "src") if values.get(name) and tag in ("a", "img")}


@pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="zensical is not installed: pip install '.[docs]'"
)
def test_the_site_is_built_without_warnings_and_dead_links(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    html = tmp_path / "site/html"
    pages = {path: Links(path.read_text()) for path in html.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > len(COMMANDS) + 15
    assert "electra.serving.inference.Model.detect" in pages[html / "reference/index.html"].ids
    dead = set()
    for page, links in pages.items():
        for target in links.targets:
            if re.match(r"[a-z]+:", target):
                continue
            path, anchor = urldefrag(unquote(target))
            file = (page.parent / path).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (anchor and file in pages and anchor not in pages[file].ids):
                dead.add((str(page.relative_to(html)), target))
    assert dead == set()


def test_messages_in_the_page_about_troubleshooting_exist():
    """The parts of a message between … are in the source."""
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in (ROOT / "electra").rglob("*.py")))
    source = re.sub(r"\{[^{}]*\}", "", source)
    messages = re.findall(r"^\| `([^`]*)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in message.split("…"):
            assert part.strip() in source, part
