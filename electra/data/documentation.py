"""A corpus that every Python installation contains: its help topics, and the docstrings of its modules and of numpy."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy

BLANK = re.compile(r"\n\s*\n")  # between paragraphs


def write_documentation_corpus(path: Path, max_characters: int) -> int:
    """Write documents of prose paragraphs until there are `max_characters`; return the number of documents.

    Paragraphs that begin alike are written once, so that few sentences are both in training and held-out text."""
    documents = 0
    beginnings: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for text in documentation_texts():
            paragraphs = {
                part[:40]: part for part in map(" ".join, map(str.split, filter(is_prose, BLANK.split(text))))
            }
            new = [part for beginning, part in paragraphs.items() if beginning not in beginnings]
            beginnings |= paragraphs.keys()
            if new:
                file.write("\n".join(new) + "\n\n")
                documents += 1
            if file.tell() > max_characters:
                break
    return documents


def documentation_texts() -> Iterator[str]:
    """Python's help topics, then the docstrings of the standard library and of numpy."""
    yield from topics.values()
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(numpy.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            if not {"test", "tests", "site-packages", "idlelib"} & set(file.relative_to(root).parts):
                yield from read_docstrings(file)


def read_docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and old syntax
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code or a table."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph.split()) >= 8 and ">>>" not in paragraph and letters > 0.85 * len(paragraph)
