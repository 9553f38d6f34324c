"""Tagging: the words and tags of a row, their tokens in windows, predictions and scores.

Models learn tags of entities in IOB2, from which `transformers` finds the same entities.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from electra.data.files import format_and_compression
from electra.data.tokenizer import TextTokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning import readers
from electra.finetuning.conll import (
    OUTSIDE,
    SCHEMES_IN_WORDS,
    Entity,
    count_violations,
    find_entities,
    has_prefix,
    read_conll,
    recognize_scheme,
    split_tag,
    write_tags,
)
from electra.finetuning.features import IGNORED, Features, Outputs, padded_length
from electra.finetuning.metrics import (
    METRICS,
    Metrics,
    Mistake,
    confusion_matrix,
    count_entities,
    find_entity_spans,
    precision_recall_f1,
)
from electra.finetuning.models import ClassWeights, cross_entropy
from electra.finetuning.readers import Row, class_name_from_cell, sort_labels
from electra.finetuning.tasks import (
    DEV_FRACTION,
    TAGGING_COLUMNS,
    Examples,
    Task,
    check_distinct_columns,
    check_text,
    get_cell,
    stack_labels,
)
from electra.formatting import join_first_names

ENTITY_METRICS, TAG_METRICS = ("entity_f1", "precision", "recall", "accuracy"), ("accuracy", "macro_f1")
ENTITY_SCORES = ENTITY_METRICS[:3]
TABLE_FORMATS = (".jsonl", ".parquet")  # with lists of words and tags; other files have CoNLL columns
CONTEXT = 10  # words before and after a mistake in errors.md
UNKNOWN = -1  # target of words whose tags are not known, or are those of no training row
WORDS, TAGS = ("words", "tokens", "FORM", "1"), ("tags", "UPOS")  # names of columns, unless set
TASK_CORPORA = {"ner": ("conll2003",), "chunking": ("conll2000", "conll2003"), "pos": ("conll2003", "conll2000")}
SPLIT_FILES = {
    "train": ("eng.train", "train.txt"),
    "dev": ("eng.testa", "valid.txt", "dev.txt"),
    "test": ("eng.testb", "test.txt"),
}


# Words and tags of a row.


def read_rows(path: Path, *, columns: Sequence[str] = (), skip_malformed: bool = False) -> Iterator[Row]:
    """Stream the sentences of a file: a table with lists, or CoNLL columns; raises if there are none."""
    format, _ = format_and_compression(path)
    if format in TABLE_FORMATS:
        return readers.read_rows(path, columns=columns, skip_malformed=skip_malformed)
    if format in (".csv", ".json"):
        raise ConfigError(
            f"{path} has no tags; sentences are in {', '.join(TABLE_FORMATS)}, or in CoNLL columns (.conll)"
        )
    return read_conll(path)


def find_columns(task: Task, row: Row) -> Task:
    """The task with the columns of the training file: those that are set, else words and tags, else the first and the
    last; files with other columns may have the same under other names."""
    numbers = [column for column in row.values if column.isdecimal()]
    text, label = str(task.text), task.label
    if text == WORDS[0]:
        text = next((name for name in WORDS if name in row.values), text)
    if label == TAGS[0]:
        label = next((name for name in (*TAGS, *numbers[:0:-1]) if name in row.values), label)
    aliases = dict.fromkeys(WORDS, text) | dict.fromkeys(TAGS if numbers else (*TAGS, "2"), label)
    aliases = {name: column for name, column in aliases.items() if name not in (text, label)}
    return check_distinct_columns(replace(task, text=text, label=label, aliases=aliases))


def define_tagging_task(name: str, data: str, crf: bool = False) -> Task:
    """The task of a column of CoNLL-2003 or CoNLL-2000, with its files in the folder `data` or a folder in it."""
    for folder in (Path(data), *(Path(data, corpus) for corpus in TASK_CORPORA[name])):
        files = {split: [folder / file for file in files] for split, files in SPLIT_FILES.items()}
        splits = {split: next((str(file) for file in paths if file.exists()), "") for split, paths in files.items()}
        if splits["train"]:
            break
    else:
        expected = ", ".join(chain.from_iterable(SPLIT_FILES.values()))
        raise ConfigError(f"no {' or '.join(SPLIT_FILES['train'])} in {data}; --data must be a folder with {expected}")
    return Task(
        name=name,
        kind="tags",
        text="1",
        label=TAGGING_COLUMNS[name],
        aliases={"words": "1", "tokens": "1", "tags": TAGGING_COLUMNS[name]},
        crf=crf,
        metrics=(),
        splits={split: file for split, file in (splits | {"dev": splits["dev"] or splits["train"]}).items() if file},
        dev_fraction=0.0 if splits["dev"] else DEV_FRACTION,
        epochs=5,
        length=256 if name == "chunking" else Task.length,
    )


def check_tags_of_task(task: Task) -> None:
    """Raise a DataError if the tags of a task of the table are not those that its name promises."""
    if (task.scheme is None) != (task.name == "pos"):
        column = f"column {task.label} of {task.splits['train']}"
        if task.scheme is None:
            found = join_first_names([repr(label) for label in task.labels if label != OUTSIDE])
            raise DataError(f"{column} has tags such as {found}; tags of entities or chunks must be {SCHEMES_IN_WORDS}")
        raise DataError(f"{column} has tags of entities, such as {task.labels[1]!r}; it must have parts of speech")


def read_sentence(task: Task, row: Row) -> list[str]:
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
    return texts


def read_words(task: Task, row: Row) -> list[tuple[str, ...]]:
    return [(word,) for word in read_sentence(task, row)]


def read_tags(task: Task, row: Row) -> tuple[Any, int]:
    """The cell of the tags, and the number of words."""
    return get_cell(task, task.label, row), len(read_sentence(task, row))


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


def tag_warnings(sentences: list[list[str]], task: Task) -> Iterator[str]:
    """What is probably not intended in the tags of all training rows."""
    if task.scheme is None:
        if task.name not in TAGGING_COLUMNS:
            yield (
                "no tag has a prefix, so tags are classes of words (as parts of speech) and not joined to entities; "
                f"tags of entities are {SCHEMES_IN_WORDS}"
            )
        return
    count, first = count_violations(sentences, task.scheme)
    if count:
        yield f"{count:,} tags do not follow {task.scheme}, e.g. {first}; they are read as conlleval reads them"


def unknown_tags(tags: list[str], task: Task) -> list[str]:
    """The tags of a sentence that no training row has; of entities, if it has none of their type."""
    if task.scheme is None:
        return [tag for tag in tags if tag not in task.class_ids]
    return [tag for tag in tags if has_prefix(tag) and f"I-{split_tag(tag)[1]}" not in task.class_ids]


def encode_tags(tags: list[str], task: Task) -> list[int]:
    """The class id of each word's tag; tags of entities are converted to IOB2.

    Tags that no training row has get ids after those of the classes, as if of one more tag, or type of entities."""
    class_ids, unknown = task.class_ids, len(task.labels)
    if task.scheme is None:
        return [class_ids.get(tag, unknown) for tag in tags]
    for number, tag in enumerate(tags, start=1):
        if tag != OUTSIDE and not has_prefix(tag):
            raise DataError(
                f"the tag of word {number} is {tag!r}; tags of entities must be {SCHEMES_IN_WORDS}, and tags of "
                "another kind must not begin with a capital letter and a hyphen"
            )
    converted = write_tags(find_entities(tags), len(tags), "IOB2")
    return [class_ids.get(tag, unknown + tag.startswith("I-")) for tag in converted]


def decode_tags(sentences: Iterable[Sequence[int]], task: Task) -> list[list[str]]:
    """The tags of sentences; those of entities in the scheme of the training file."""
    tags = [[task.labels[class_id] for class_id in sentence] for sentence in sentences]
    if task.scheme is None:
        return tags
    return [write_tags(find_entities(sentence), len(sentence), task.scheme) for sentence in tags]


# Features: the tokens of words, in windows if a sentence is longer than the model.


def tag_targets(sentences: NDArray, task: Task) -> NDArray:
    """Targets of the first token of each word and of those that `transformers` takes for words of their own, such as
    the periods of U.S.; these continue an entity. And the tags themselves, some of which may be unknown."""
    targets = []
    for tags in sentences:
        known = [tag if tag < len(task.labels) else UNKNOWN for tag in tags]
        continued = [tag + tag % 2 if tag > 0 else tag for tag in known] if task.scheme else known
        targets.append([known, [IGNORED] * len(tags) if task.crf else continued, tags])
    return stack_labels(targets)


def make_tag_features(examples: Examples, tokenizer: TextTokenizer, max_length: int) -> Features:
    """Tokenise sentences as [CLS] words [SEP]; one that is longer than `max_length` becomes overlapping windows, each
    with targets for other words."""
    vocabulary = tokenizer.vocabulary
    cls, sep = np.array([vocabulary.cls_id]), np.array([vocabulary.sep_id])
    is_continuation = np.array(vocabulary.is_continuation)
    is_continuation |= not is_continuation.any()  # of other tokenizers only the first tokens have targets
    tokenizer.library.encode_special_tokens = True  # special tokens in texts are text
    sentences = split_sentences(examples.texts, examples.text_counts)
    encodings = tokenizer.library.encode_batch([" ".join(words) for words in sentences], add_special_tokens=False)
    pieces: list[NDArray] = []
    targets, windows, first_tokens = [], [], []
    num_tokens = 0
    for number, (words, encoding) in enumerate(zip(sentences, encodings, strict=True)):
        ids, word_of_token = tokens_of_words(words, encoding, vocabulary.unk_id, max_length - 2)
        lengths = np.bincount(word_of_token)
        starts = lengths.cumsum() - lengths
        tags = [[UNKNOWN] * len(words), [IGNORED] * len(words)] if examples.labels is None else examples.labels[number]
        target = np.where(is_continuation[ids], IGNORED, np.array(tags[1])[word_of_token])
        target[starts] = tags[0]
        for window in split_words_into_windows(lengths, max_length - 2):
            tokens = slice(starts[window.start], starts[window.end - 1] + lengths[window.end - 1])
            own = slice(window.first_own, window.end_own)
            is_own = (word_of_token[tokens] >= own.start) & (word_of_token[tokens] < own.stop)
            pieces += [cls, ids[tokens], sep]
            targets.append(torch.from_numpy(np.where(is_own, target[tokens], IGNORED).astype(np.int16)))
            first_tokens.append(num_tokens + 1 + starts[own] - tokens.start)
            windows.append(number)
            num_tokens += 2 + tokens.stop - tokens.start
    row_lengths = torch.tensor([2 + len(target) for target in targets])
    padded = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    end = padded_length(int(row_lengths.max()), max_length) - 1 - padded.shape[1]
    return Features(
        input_ids=torch.from_numpy(np.concatenate(pieces).astype(np.int32)),
        starts=row_lengths.cumsum(0) - row_lengths,
        lengths=row_lengths,
        lengths_a=row_lengths.clone(),  # stored tensors must not share memory
        sequences=torch.empty(0),
        labels=functional.pad(padded, (1, end), value=IGNORED),  # as wide as the longest batch
        is_truncated=torch.zeros(len(examples), dtype=torch.bool),
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


def split_words_into_windows(lengths: NDArray, max_tokens: int) -> list[Window]:
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


def tag_loss(logits: Tensor, targets: Tensor, weights: ClassWeights = None) -> Tensor:
    """The sum over the words of each row of their cross-entropies [B], from logits [B, L, num_labels]."""
    known = targets[:, : logits.shape[1]].long()
    return cross_entropy(logits.transpose(1, 2), known.masked_fill(known < 0, IGNORED), weights).sum(1)


def predict_tags(outputs: Outputs, task: Task) -> NDArray:
    """The class ids of the words of each sentence, as lists; an I- that continues no entity becomes B-."""
    counts = outputs.examples.text_counts
    assert len(counts), "Outputs needs its examples"
    predicted = stack_labels(split_sentences(word_logits(outputs).argmax(1).tolist(), counts))
    if task.scheme is None:
        return predicted
    tags = join_sentences(predicted)
    spans = find_entity_spans(tags)
    tags[spans[:, 0]] = 2 * spans[:, 2] + 1
    return stack_labels(split_sentences(tags[tags >= 0].tolist(), counts))


def word_logits(outputs: Outputs) -> NDArray:
    """The logits [words, num_labels] of the first token of each word."""
    assert outputs.features is not None
    return outputs.logits[outputs.features.words.cpu().numpy()]


def word_confidences(task: Task, outputs: Outputs) -> list[Sequence[float]]:
    """Of each sentence, the probabilities of the words' tags; of a CRF, whose logits are scores of best paths, by how
    much they exceed the second-best."""
    logits = torch.from_numpy(word_logits(outputs))
    if task.crf:
        ordered = logits.sort(1).values
        confidences = ordered[:, -1] - ordered[:, -2:][:, 0]
    else:
        confidences = logits.softmax(1).amax(1)
    return split_sentences(confidences.tolist(), outputs.examples.text_counts)


def tag_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The tags of each sentence, their probabilities (not of a CRF), and the entities."""
    tags = decode_tags(predict_tags(outputs, task), task)
    sentences = split_sentences(outputs.examples.texts, outputs.examples.text_counts)
    for prediction, words, values in zip(tags, sentences, word_confidences(task, outputs), strict=True):
        columns: dict[str, Any] = {"prediction": prediction}
        if not task.crf:
            columns["probabilities"] = [round(value, 4) for value in values]
        if task.scheme:
            entities = find_entities(prediction)
            columns["entities"] = [describe_entity(entity, words, None if task.crf else values) for entity in entities]
        yield columns


def describe_entity(entity: Entity, words: Sequence[str], probabilities: Sequence[float] | None) -> dict[str, Any]:
    """The type, place and text of an entity, and the mean probability of its tags."""
    span = slice(entity.start, entity.end)
    text = " ".join(words[span])
    described = {"type": entity.type, "start": entity.start, "end": entity.end, "text": text}
    if probabilities is None:
        return described
    return described | {"probability": round(sum(probabilities[span]) / (entity.end - entity.start), 4)}


def tag_mistakes(task: Task, outputs: Outputs, predicted: NDArray, labels: NDArray) -> Iterator[Mistake]:
    """Words with another tag than the predicted one, between the words around them."""
    sentences = split_sentences(outputs.examples.texts, outputs.examples.text_counts)
    rows = zip(sentences, word_confidences(task, outputs), predicted, labels, strict=True)
    unknown = "(in no training row)"
    names = (*task.labels, unknown, unknown)
    for words, values, tags, expected in rows:
        for index in np.flatnonzero(np.array(tags) != np.array(expected)).tolist():
            before, after = words[max(0, index - CONTEXT) : index], words[index + 1 : index + 1 + CONTEXT]
            text = " ".join([*before, f"**{words[index]}**", *after])
            yield Mistake(values[index], names[tags[index]], names[expected[index]], text)


def join_sentences(sentences: NDArray) -> NDArray:
    """The class ids of all words, with -1 after each sentence."""
    return np.array([*chain.from_iterable((*tags, -1) for tags in sentences)], np.int64)


def classes_of_words(sentences: NDArray) -> NDArray:
    """The class ids of all words."""
    return np.array([*chain.from_iterable(sentences)], np.int64)


def compute_tag_metrics(predicted: NDArray, labels: NDArray, task: Task) -> Metrics:
    by_sentence = [join_sentences(tags) for tags in (predicted, labels)]
    by_word = [classes_of_words(tags) for tags in (predicted, labels)]
    return {name: METRICS[name](*(by_sentence if name in ENTITY_SCORES else by_word)) for name in task.metrics}


def constant_tag_baseline(task: Task, train_labels: NDArray, dev_labels: NDArray, dev: Features) -> Metrics:
    """Dev metrics of the most frequent tag of the training rows."""
    most_frequent = int(np.bincount(classes_of_words(train_labels)).argmax())
    return compute_tag_metrics(stack_labels([[most_frequent] * len(tags) for tags in dev_labels]), dev_labels, task)


def score_tag_classes(predicted: NDArray, labels: NDArray, task: Task) -> dict[str, Metrics]:
    """Precision, recall and F1 of each type of entity, with the number of entities, or of each tag."""
    if task.scheme is None:
        names, unit = task.labels, "words"
        counts = confusion_matrix(classes_of_words(predicted), classes_of_words(labels), len(names) + 1)
        table = np.stack([counts.diagonal(), counts.sum(0), counts.sum(1)])
    else:
        names, unit = tuple(label[2:] for label in task.labels[1::2]), "entities"
        table = count_entities(join_sentences(predicted), join_sentences(labels), len(names) + 1)
    return {  # without unknown tags, which are last
        name: precision_recall_f1(*numbers) | {unit: float(numbers[2])}
        for name, numbers in zip(names, table.T.tolist(), strict=False)
    }
