"""CoNLL files and tag schemes.

Entities (or chunks) are read from IOB1, IOB2 and BIOES alike, as conlleval reads them: a tag that cannot continue the
entity before it starts a new one.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from electra.data.files import TextFile, format_and_compression, open_streams
from electra.errors import DataError
from electra.finetuning.readers import MAX_LABELS, Row, TagScheme, decode_lines
from electra.finetuning.tasks import Task

OUTSIDE = "O"
OTHER_PREFIXES = {"L": "E", "U": "S"}  # of BILOU, which is BIOES with other letters
ENTITY_TAG = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
ANY_PREFIX = re.compile(r"[A-Z]-.+", re.DOTALL)
SCHEMES_IN_WORDS = "O, B-TYPE and I-TYPE (IOB1, IOB2), or also E-TYPE and S-TYPE (BIOES)"

DOCUMENT_START = "-DOCSTART-"
CONLLU = ".conllu"
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
NO_WORD = re.compile(r"\d+[-.]\d+")  # ids of multiword tokens and empty nodes in CoNLL-U, which are no words


class Entity(NamedTuple):
    """An entity or chunk: words `start` to `end` - 1 of a sentence."""

    start: int
    end: int
    type: str


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities that the tags of a sentence mean, in any scheme."""
    entities: list[Entity] = []
    is_open = False  # whether the last entity may continue
    for index, tag in enumerate(tags):
        prefix, type = split_tag(tag)
        if prefix in "IE" and is_open and entities[-1].type == type:
            entities[-1] = entities[-1]._replace(end=index + 1)
        elif prefix != OUTSIDE:
            entities.append(Entity(index, index + 1, type))
        is_open = prefix in "BI"
    return entities


@lru_cache(MAX_LABELS)
def split_tag(tag: str) -> tuple[str, str]:
    """Prefix (O, B, I, E or S) and type of a tag."""
    match = ENTITY_TAG.fullmatch(tag)
    return (OTHER_PREFIXES.get(match[1], match[1]), match[2]) if match else (OUTSIDE, "")


def write_tags(entities: Sequence[Entity], num_words: int, scheme: TagScheme) -> list[str]:
    """The tags of a sentence with these entities, in their order."""
    tags = [OUTSIDE] * num_words
    for number, (start, end, type) in enumerate(entities):
        tags[start:end] = [f"I-{type}"] * (end - start)
        follows_same = number > 0 and entities[number - 1][1:] == (start, type)
        if scheme != "IOB1" or follows_same:
            tags[start] = f"B-{type}"
        if scheme == "BIOES":
            tags[end - 1] = f"{'S' if end - start == 1 else 'E'}-{type}"
    return tags


def has_prefix(tag: str) -> bool:
    return split_tag(tag)[0] != OUTSIDE


def recognize_scheme(sentences: Sequence[Sequence[str]]) -> TagScheme | None:
    """The scheme that most tags follow; None if they are no tags of entities, as parts of speech.

    They are tags of entities if one has a prefix of a scheme, or if all begin with a capital letter and a hyphen, so
    that tags of no scheme are refused later."""
    names = set(chain.from_iterable(sentences)) - {OUTSIDE}
    if not any(map(has_prefix, names)) and not (names and all(map(ANY_PREFIX.fullmatch, names))):
        return None
    schemes: tuple[TagScheme, ...] = ("IOB2", "IOB1", "BIOES")  # the first of equals
    counts = Counter(map(tuple, sentences))
    violations = {
        scheme: sum(count * count_violations([tags], scheme)[0] for tags, count in counts.items()) for scheme in schemes
    }
    return min(schemes, key=violations.__getitem__)


def count_violations(sentences: Sequence[Sequence[str]], scheme: TagScheme) -> tuple[int, str]:
    """The number of tags that `scheme` would write differently, and the first of them with the tag before it."""
    count, first = 0, ""
    for tags in sentences:
        expected = write_tags(find_entities(tags), len(tags), scheme)
        for index, (tag, other) in enumerate(zip(tags, expected, strict=True)):
            if split_tag(tag) != split_tag(other):
                count += 1
                first = first or f"{tag} after {tags[index - 1] if index else 'the start of a sentence'}"
    return count, first


# Files.


def read_conll(path: Path) -> Iterator[Row]:
    """Stream the sentences of a file, as lists by the name or number (from 1) of a column; raises if there are none."""
    format, compression = format_and_compression(path)
    is_empty = True
    with open_streams(TextFile(path, format, compression)) as (decompressed, _):
        for row in conll_rows(str(path), decode_lines(path, decompressed), CONLLU_COLUMNS * (format == CONLLU)):
            is_empty = False
            yield row
    if is_empty:
        raise DataError(f"no sentences in {path}; each word is a line, and a blank line ends a sentence")


def conll_rows(file_name: str, lines: Iterator[str], columns: Sequence[str] = ()) -> Iterator[Row]:
    """The sentences between blank lines, as lists by column; without comments and marks of documents.

    A line that starts with # is a comment if a sentence may start there and, unless the file is CoNLL-U, it has another
    number of columns, or no tabs where words have them."""
    numbered = (
        (number, split_columns(line), "\t" in line.strip()) for number, line in enumerate(chain(lines, [""]), start=1)
    )
    head = []  # up to the first line that is certainly a word
    for each in numbered:
        head.append(each)
        if each[1] and not each[1][0].startswith(("#", DOCUMENT_START)):
            break
    _, first_word, has_tabs = head[-1]
    names = list(columns) or [str(column) for column in range(1, len(first_word) + 1)]
    start = 0
    cells: list[str] = []  # of the sentence, word by word: a list for each word would be slow in long sentences
    for number, fields, is_tabbed in chain(head, numbered):
        may_be_comment = not cells and bool(fields) and fields[0].startswith("#")
        if not fields or fields[0] == DOCUMENT_START:
            if cells:
                yield Row(start, {name: cells[column :: len(names)] for column, name in enumerate(names)})
            cells = []
        elif may_be_comment and (columns or len(fields) != len(names) or (has_tabs and not is_tabbed)):
            continue
        elif len(fields) != len(names):
            others = f"{CONLLU} files have" if columns else "the lines before have"
            raise DataError(
                f"{file_name}, line {number}: {len(fields):,} columns, but {others} {len(names)}; each "
                "word needs all columns, separated by spaces or by tabs, and a blank line ends a sentence"
            )
        elif not (columns and NO_WORD.fullmatch(fields[0])):
            start = start if cells else number
            cells += fields


def split_columns(line: str) -> list[str]:
    """The columns of a line, separated by tabs if it has any, else by spaces."""
    stripped = line.strip(" \t\r\n")  # no-break spaces belong to words
    if "\t" in stripped:
        return [column.strip(" ") for column in stripped.split("\t")]
    return [column for column in stripped.split(" ") if column]


class ConllWriter:
    """Write the words of each row, their other columns and their predicted tags, a word a line."""

    def __init__(self, file: TextIO, header: list[str], task: Task) -> None:
        self.file, self.header, self.task = file, header, task

    def write_row(self, row: dict[str, Any]) -> None:
        self.header = self.header or self.choose_columns(row)
        columns = [column_of_words(name, row.get(name), len(row["prediction"])) for name in self.header]
        if {"", DOCUMENT_START} & set(columns[0]):
            raise DataError(f"a word is empty or {DOCUMENT_START}, which .conll cannot hold; write .jsonl")
        needs_tabs = any(re.search(r"^$|^#| ", cell) for column in columns for cell in column)
        for cells in zip(*columns, strict=True):
            print(*cells, sep="\t" if needs_tabs else " ", file=self.file)
        print(file=self.file)

    def choose_columns(self, row: dict[str, Any]) -> list[str]:
        """All columns of a CoNLL file; of a table, words and tags; and the predicted tags."""
        words, tags = (self.task.find_column(str(name), row) for name in (self.task.text, self.task.label))
        in_conll = [name for name in row if name.isdecimal() or name in CONLLU_COLUMNS]
        names = in_conll if words in in_conll else [name for name in (words, tags) if name is not None]
        return [*names, "prediction"]


def column_of_words(name: str, cell: Any, num_words: int) -> list[str]:
    """The texts of a column for the words of a sentence, which are empty if it lacks the column."""
    items = cell.split() if isinstance(cell, str) else [""] * num_words if cell is None else cell
    if not isinstance(items, list) or len(items) != num_words:
        raise DataError(f"column {name!r} needs one item for each word in a .conll file; write .jsonl")
    texts = ["" if item is None else str(item) for item in items]
    if any(re.search(r"[\t\r\n]|^ | $", text) for text in texts):
        raise DataError(f"column {name!r} has tabs, line ends or spaces around a word, unfit for .conll; write .jsonl")
    return texts
