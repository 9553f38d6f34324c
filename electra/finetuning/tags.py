"""Tagging: the columns of CoNLL files, tag schemes, and the words and tags of a row.

Entities (or chunks) are read from IOB1, IOB2 and BIOES alike, as conlleval reads them: a tag that cannot continue the
entity before it starts a new one. Models learn IOB2, whose tags `transformers` groups into the same entities.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from electra.data.files import TextFile, format_and_compression, open_streams
from electra.data.tokenizer import TextTokenizer
from electra.data.wordpiece import create_encoder
from electra.errors import ConfigError, DataError
from electra.finetuning.features import Features, Outputs
from electra.finetuning.metrics import METRICS, Metrics, confusion_matrix, count_entities, precision_recall_f1
from electra.finetuning.readers import Row, TagScheme, class_name_from_cell, decode_lines, encode_class, sort_labels
from electra.finetuning.readers import read_rows as read_table_rows
from electra.finetuning.tasks import Examples, Task, check_text, get_cell

OUTSIDE = "O"
DOCUMENT_START = "-DOCSTART-"
TABLES = (".jsonl", ".parquet")  # with lists of words and tags; other files have CoNLL columns
CONLLU = ".conllu"
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
NO_WORD = re.compile(r"\d+[-.]\d+")  # ids of multiword tokens and empty nodes in CoNLL-U, which are no words
OTHER_PREFIXES = {"L": "E", "U": "S"}  # of BILOU, which is BIOES with other letters
ENTITY_TAG = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
ENTITY_METRICS, TAG_METRICS = ("entity_f1", "precision", "recall", "accuracy"), ("accuracy", "macro_f1")
OF_ENTITIES = ENTITY_METRICS[:3]
IGNORED, UNKNOWN = -100, -1  # targets of tokens that are no words, and of words whose tags are not known
SCHEMES_IN_WORDS = "O, B-TYPE and I-TYPE (IOB1, IOB2), or also E-TYPE and S-TYPE (BIOES)"


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
    return ENTITY_TAG.fullmatch(tag) is not None


def recognize_scheme(sentences: Sequence[Sequence[str]]) -> TagScheme | None:
    """The scheme that most tags follow; None if most have no prefix, as parts of speech."""
    tags = [tag for tag in chain.from_iterable(sentences) if tag != OUTSIDE]
    if sum(map(has_prefix, tags)) <= len(tags) / 2:
        return None
    schemes: tuple[TagScheme, ...] = ("IOB2", "IOB1", "BIOES")  # the first of equals
    return min(schemes, key=lambda scheme: count_violations(sentences, scheme)[0])


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


# Words and tags of a row.


def read_words(task: Task, row: Row) -> list[tuple[str, ...]]:
    """The words of a sentence, from a list or from a text that is split at spaces."""
    assert task.text is not None
    cell = get_cell(task, task.text, row)
    if not isinstance(cell, list | str):
        raise DataError(f"column {task.text!r} holds a {type(cell).__name__}; it must be a list of words")
    words = cell.split() if isinstance(cell, str) else cell
    if not words:
        raise DataError("the sentence has no words; remove it")
    texts = [check_text(word, f"word {number}") for number, word in enumerate(words, start=1)]
    if empty := [number for number, text in enumerate(texts, start=1) if not text.strip()]:
        raise DataError(f"word {empty[0]} is empty; each word must be a text")
    return [(text,) for text in texts]


def read_tags(task: Task, row: Row) -> tuple[Any, int]:
    """The cell of the tags, and the number of words."""
    return get_cell(task, task.label, row), len(read_words(task, row))


def parse_tags(cell: tuple[Any, int]) -> list[str]:
    tags, num_words = cell
    if not isinstance(tags, list):
        raise DataError(f"the tags are a {type(tags).__name__}; they must be a list with a tag for each word")
    if len(tags) != num_words:
        raise DataError(f"there are {num_words:,} words and {len(tags):,} tags; each word needs one tag")
    names = [class_name_from_cell(tag) for tag in tags]
    if "" in names:
        raise DataError(f"the tag of word {names.index('') + 1} is empty; each word needs one tag")
    return names


def task_fields_from_tags(sentences: list[list[str]]) -> dict[str, Any]:
    """Scheme, classes and metrics; classes are O and, of each type in turn, B- and I-, or the tags themselves."""
    scheme = recognize_scheme(sentences)
    tags = set(chain.from_iterable(sentences))
    if scheme is None:
        labels = sort_labels(tags)
        if len(labels) < 2:
            raise DataError(f"every tag is {labels[0]!r}; there must be at least two")
        return {"scheme": None, "labels": labels, "metrics": TAG_METRICS}
    types = sort_labels({split_tag(tag)[1] for tag in tags if has_prefix(tag)})
    labels = (OUTSIDE, *(f"{prefix}-{type}" for type in types for prefix in "BI"))
    return {"scheme": scheme, "labels": labels, "metrics": ENTITY_METRICS}


def tag_warnings(sentences: list[list[str]]) -> Iterator[str]:
    """What is probably not intended in the tags of all training rows."""
    scheme = recognize_scheme(sentences)
    if scheme is None:
        if OUTSIDE in chain.from_iterable(sentences):
            yield f"tags have no prefix, so they are not joined to entities; tags of entities are {SCHEMES_IN_WORDS}"
        return
    count, first = count_violations(sentences, scheme)
    if count:
        yield f"{count:,} tags do not follow {scheme}, e.g. {first}; they are read as conlleval reads them"


def encode_tags(tags: list[str], task: Task) -> list[int]:
    """The class id of each word's tag; tags of entities are converted to IOB2."""
    if task.scheme is None:
        return [encode_class(tag, task.class_ids) for tag in tags]
    for number, tag in enumerate(tags, start=1):
        if tag != OUTSIDE and not has_prefix(tag):
            raise DataError(f"the tag of word {number} is {tag!r}; tags of entities must be {SCHEMES_IN_WORDS}")
    return [encode_class(tag, task.class_ids) for tag in write_tags(find_entities(tags), len(tags), "IOB2")]


def decode_tags(sentences: Iterable[Sequence[int]], task: Task) -> list[list[str]]:
    """The tags of sentences; those of entities in the scheme of the training file."""
    tags = [[task.labels[class_id] for class_id in sentence] for sentence in sentences]
    if task.scheme is None:
        return tags
    return [write_tags(find_entities(sentence), len(sentence), task.scheme) for sentence in tags]


# Features: the tokens of words, in windows if a sentence is longer than the model.


def tag_targets(sentences: NDArray, task: Task) -> NDArray:
    """Targets of the first token of each word and of those that `transformers` takes for words of their own, such as
    the periods of U.S.; these continue an entity."""
    targets = np.empty(len(sentences), object)
    for index, tags in enumerate(sentences):
        continued = [tag + tag % 2 for tag in tags] if task.scheme else tags
        targets[index] = [tags, [IGNORED] * len(tags) if task.crf else continued]
    return targets


def make_tag_features(examples: Examples, tokenizer: TextTokenizer, max_length: int) -> Features:
    """Tokenise sentences as [CLS] words [SEP]; one that is longer than `max_length` becomes overlapping windows, each
    with targets for other words."""
    vocabulary = tokenizer.vocabulary
    is_continuation = np.array(vocabulary.is_continuation)
    create_encoder(tokenizer)  # special tokens in texts are text
    counts = np.ones(len(examples.texts), np.int64) if examples.counts is None else examples.counts
    sentences = split_sentences(examples.texts, counts)
    encodings = tokenizer.library.encode_batch([" ".join(words) for words in sentences], add_special_tokens=False)
    pieces, targets, windows, first_tokens = [], [], [], []
    num_tokens = 0
    for number, (words, encoding) in enumerate(zip(sentences, encodings, strict=True)):
        ids, word_of_token = tokens_of_words(words, encoding, vocabulary.unk_id, max_length - 2)
        lengths = np.bincount(word_of_token)
        starts = lengths.cumsum() - lengths
        tags = [[UNKNOWN] * len(words), [IGNORED] * len(words)] if examples.labels is None else examples.labels[number]
        target = np.where(is_continuation[ids] | (not is_continuation.any()), IGNORED, np.array(tags[1])[word_of_token])
        target[starts] = tags[0]
        for window in split_into_windows(lengths, max_length - 2):
            tokens = slice(starts[window.start], starts[window.end - 1] + lengths[window.end - 1])
            own = np.arange(window.first_own, window.end_own)
            is_own = np.isin(word_of_token[tokens], own)
            pieces += [[vocabulary.cls_id], ids[tokens], [vocabulary.sep_id]]
            targets.append(torch.from_numpy(np.where(is_own, target[tokens], IGNORED).astype(np.int16)))
            first_tokens.append(num_tokens + 1 + starts[own] - tokens.start)
            windows.append(number)
            num_tokens += 2 + tokens.stop - tokens.start
    lengths = torch.tensor([2 + len(target) for target in targets])
    padded = functional.pad(pad_sequence(targets, batch_first=True, padding_value=IGNORED), (1, 1), value=IGNORED)
    return Features(
        input_ids=torch.from_numpy(np.concatenate(pieces).astype(np.int32)),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        lengths_a=lengths,
        sequences=torch.empty(0),
        labels=padded,
        truncated=torch.tensor(0),
        examples=torch.tensor(windows),
        words=torch.from_numpy(np.concatenate(first_tokens)),
    )


def split_sentences(items: Sequence[Any], counts: NDArray) -> list[Sequence[Any]]:
    """Consecutive parts of `counts` items."""
    ends = counts.cumsum()
    return [items[end - count : end] for end, count in zip(ends, counts, strict=True)]


def tokens_of_words(words: Sequence[str], encoding: Any, unk_id: int, max_tokens: int) -> tuple[NDArray, NDArray]:
    """The tokens of words, at least one and at most `max_tokens` of each, and the index of the word of each token."""
    ids, offsets = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    lengths = np.array([len(word) + 1 for word in words])
    word_starts = lengths.cumsum() - lengths
    word_of_token = np.searchsorted(word_starts, np.maximum(offsets[:, 1] - 1, 0), side="right") - 1
    missing = np.setdiff1d(np.arange(len(words)), word_of_token)  # words of characters that the tokenizer drops
    places = np.searchsorted(word_of_token, missing)
    ids, word_of_token = np.insert(ids, places, unk_id), np.insert(word_of_token, places, missing)
    first = np.searchsorted(word_of_token, np.arange(len(words)))
    is_kept = np.arange(len(ids)) - first[word_of_token] < max_tokens
    return ids[is_kept], word_of_token[is_kept]


class Window(NamedTuple):
    """Words `start` to `end` - 1 of a sentence, of which predictions are taken for `first_own` to `end_own` - 1."""

    start: int
    end: int
    first_own: int
    end_own: int


def split_into_windows(lengths: NDArray, max_tokens: int) -> list[Window]:
    """Windows of whole words with up to `max_tokens` tokens, of which about a quarter is also in the next window."""
    ends = lengths.cumsum()
    starts = ends - lengths
    spans = [(0, int(np.searchsorted(ends, max_tokens, side="right")))]
    while spans[-1][1] < len(lengths):
        previous, end = spans[-1]
        start = max(previous + 1, int(np.searchsorted(starts, ends[end - 1] - max_tokens // 4)))
        spans.append((start, int(np.searchsorted(ends, starts[start] + max_tokens, side="right"))))
    borders = [0, *((next_start + end) // 2 for (_, end), (next_start, _) in pairwise(spans)), len(lengths)]
    return [Window(*span, *own) for span, own in zip(spans, pairwise(borders), strict=True)]


# Predictions.


def predict_tags(outputs: Outputs, task: Task) -> NDArray:
    """The class ids of the words of each sentence, as lists."""
    assert outputs.examples is not None
    return stack_objects(split_sentences(word_logits(outputs).argmax(1).tolist(), outputs.examples.text_counts))


def word_logits(outputs: Outputs) -> NDArray:
    """The logits [words, num_labels] of the first token of each word."""
    assert outputs.features is not None
    return outputs.logits[outputs.features.words.cpu().numpy()]


def tag_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The tags of each sentence, their probabilities, and the entities."""
    assert outputs.examples is not None
    counts = outputs.examples.text_counts
    probabilities = torch.from_numpy(word_logits(outputs)).softmax(1).amax(1).tolist()
    tags = decode_tags(predict_tags(outputs, task), task)
    parts = split_sentences(outputs.examples.texts, counts), split_sentences(probabilities, counts)
    for prediction, words, values in zip(tags, *parts, strict=True):
        columns = {"prediction": prediction, "probabilities": [round(value, 4) for value in values]}
        entities = [
            {
                "type": entity.type,
                "start": entity.start,
                "end": entity.end,
                "text": " ".join(words[entity.start : entity.end]),
                "probability": round(sum(values[entity.start : entity.end]) / (entity.end - entity.start), 4),
            }
            for entity in find_entities(prediction)
        ]
        yield columns | ({"entities": entities} if task.scheme else {})


def join_sentences(sentences: NDArray) -> NDArray:
    """The class ids of all words, with -1 after each sentence."""
    return np.array([*chain.from_iterable((*tags, -1) for tags in sentences)], np.int64)


def classes_of_words(sentences: NDArray) -> NDArray:
    """The class ids of all words."""
    return np.array([*chain.from_iterable(sentences)], np.int64)


def compute_tag_metrics(predicted: NDArray, labels: NDArray, task: Task) -> Metrics:
    of_sentences = [join_sentences(tags) for tags in (predicted, labels)]
    of_words = [classes_of_words(tags) for tags in (predicted, labels)]
    return {name: METRICS[name](*(of_sentences if name in OF_ENTITIES else of_words)) for name in task.metrics}


def score_tag_classes(predicted: NDArray, labels: NDArray, task: Task) -> dict[str, Metrics]:
    """Precision, recall and F1 of each type of entity, with the number of entities, or of each tag."""
    if task.scheme is None:
        counts = confusion_matrix(classes_of_words(predicted), classes_of_words(labels), len(task.labels))
        table, names, unit = np.stack([counts.diagonal(), counts.sum(0), counts.sum(1)]), task.labels, "words"
    else:
        names, unit = tuple(label[2:] for label in task.labels[1::2]), "entities"
        table = count_entities(join_sentences(predicted), join_sentences(labels), len(names))
    return {
        name: precision_recall_f1(*numbers) | {unit: float(numbers[2])}
        for name, numbers in zip(names, table.T.tolist(), strict=True)
    }


# Files.


def read_rows(path: Path, *, columns: Sequence[str] = (), skip_malformed: bool = False) -> Iterator[Row]:
    """Stream the sentences of a file: a table with lists, or CoNLL columns named 1, 2, …; raises if there are none."""
    format, compression = format_and_compression(path)
    if format in TABLES:
        yield from read_table_rows(path, columns=columns, skip_malformed=skip_malformed)
        return
    if format in (".csv", ".json"):
        raise ConfigError(f"{path} has no tags; sentences are in {', '.join(TABLES)}, or in CoNLL columns (.conll)")
    is_empty = True
    with open_streams(TextFile(path, format, compression)) as (decompressed, _):
        for row in conll_rows(str(path), decode_lines(path, decompressed), CONLLU_COLUMNS * (format == CONLLU)):
            is_empty = False
            yield row
    if is_empty:
        raise DataError(f"no sentences in {path}; each word is a line, and a blank line ends a sentence")


def conll_rows(file_name: str, lines: Iterator[str], columns: Sequence[str] = ()) -> Iterator[Row]:
    """The sentences between blank lines, as lists by column; without comments and marks of documents.

    A line that starts with # is a comment if a sentence may start there and it has another number of columns."""
    numbered = ((number, split_columns(line)) for number, line in enumerate(chain(lines, [""]), start=1))
    head = []  # up to the first line that is certainly a word
    for number, fields in numbered:
        head.append((number, fields))
        if fields and not fields[0].startswith(("#", DOCUMENT_START)):
            break
    names = list(columns) or [str(column) for column in range(1, len(head[-1][1]) + 1)]
    start, words = 0, []  # of the sentence
    for number, fields in chain(head, numbered):
        if not fields or fields[0] == DOCUMENT_START:
            if words:
                yield Row(start, dict(zip(names, map(list, zip(*words, strict=True)), strict=True)))
            words = []
        elif len(fields) != len(names):
            if words or not fields[0].startswith("#"):
                raise DataError(
                    f"{file_name}, line {number}: {len(fields):,} columns, but {len(names)} in the lines before; each "
                    "word needs all columns, separated by spaces or by tabs, and a blank line ends a sentence"
                )
        elif not (columns and NO_WORD.fullmatch(fields[0])):
            start = start if words else number
            words.append(fields)


def split_columns(line: str) -> list[str]:
    """The columns of a line, separated by tabs if it has any, else by spaces."""
    stripped = line.strip(" \t\r\n")  # no-break spaces belong to words
    return re.split(r" *\t *" if "\t" in stripped else " +", stripped) if stripped else []
