"""Question answering: answers are spans of a context, which is read in overlapping windows; some questions may have no
answer."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from electra.data.files import TextFile, format_and_compression, limit_expansion, open_streams
from electra.data.tokenizer import TextTokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning import readers
from electra.finetuning.features import Features, Outputs, encode_texts
from electra.finetuning.metrics import Metrics, Mistake, answer_scores
from electra.finetuning.readers import Row, SpanHead
from electra.finetuning.tasks import SQUAD_VERSIONS, Examples, Task, check_text, get_cell, get_text

MAX_QUESTION = 64  # tokens; the rest of a question is cut off
OVERLAP = 128  # tokens that consecutive windows share
MAX_ANSWER = 30  # tokens
N_BEST = 20
MAX_JSON_BYTES = 1 << 28  # of a file that is read as a whole; SQuAD's have 42 MB
NO_ANSWER, EXCERPT = "(no answer)", 150  # of errors.md: characters of the context before and after an answer
ENCODED_TOGETHER = 256  # contexts, whose offsets are lists of the tokenizers library

Answers = tuple[tuple[str, int], ...]  # text, and where it starts in the context; -1 if it is not there


# From files to examples.


def define_squad_task(name: str, data: str, head: SpanHead) -> Task:
    """SQuAD, with its official files in the folder `data`."""
    splits = {split: Path(data, f"{split}-v{SQUAD_VERSIONS[name]}.json") for split in ("train", "dev")}
    if missing := [file for file in splits.values() if not file.exists()]:
        raise ConfigError(f"there is no {missing[0]}; --data must be the folder of SQuAD's official files")
    return Task(
        name=name,
        kind="question-answering",
        text="context",
        text_b="question",
        label="answers",
        head=head,
        metrics=(),
        splits={split: str(file) for split, file in splits.items()},
    )


class SquadQuestion(msgspec.Struct):
    """A question in SQuAD's JSON; titles of articles and plausible answers are not read."""

    question: str
    id: str | int | None = None
    answers: list[dict[str, Any]] | None = None  # missing in test sets
    is_impossible: bool = False


class SquadParagraph(msgspec.Struct):
    context: str
    qas: list[SquadQuestion]


class SquadArticle(msgspec.Struct):
    paragraphs: list[SquadParagraph]


class SquadFile(msgspec.Struct):
    data: list[SquadArticle]


def squad_rows(file_name: str, content: bytes) -> Iterator[Row]:
    """The questions of a file in SQuAD's JSON, each with its context."""
    try:
        articles = msgspec.json.decode(content, type=SquadFile).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{file_name} is not in SQuAD's format ({error}); other tables must be .jsonl, .csv, .tsv or .parquet"
        ) from None
    paragraphs = (paragraph for article in articles for paragraph in article.paragraphs)
    questions = ((paragraph.context, question) for paragraph in paragraphs for question in paragraph.qas)
    for number, (context, question) in enumerate(questions, start=1):
        values = {"id": question.id, "context": context, "question": question.question, "answers": question.answers}
        if question.is_impossible:
            values["answers"] = []
        yield Row(number, {name: value for name, value in values.items() if value is not None})


def read_rows(path: Path, *, columns: Sequence[str] = (), skip_malformed: bool = False) -> Iterator[Row]:
    """The rows of a table, or the questions of a file in SQuAD's JSON, which is read as a whole."""
    format, compression = format_and_compression(path)
    if format != ".json":
        yield from readers.read_rows(path, columns=columns, skip_malformed=skip_malformed)
        return
    with open_streams(TextFile(path, format, compression)) as (stream, _):
        chunks: Iterator[bytes] = iter(lambda: stream.read(1 << 20), b"")
        content = bytearray()
        for chunk in limit_expansion(path, chunks, lambda chunk: len(chunk)):
            content += chunk
            if len(content) > MAX_JSON_BYTES:
                size = f"{MAX_JSON_BYTES >> 20} MB"
                raise DataError(f"{path} is larger than {size}; write .jsonl, which is read row by row")
    rows = squad_rows(str(path), bytes(content))
    first = next(rows, None)
    if first is None:
        raise DataError(f"no rows in {path}; it needs at least one question")
    yield from chain([first], rows)


def read_question_and_context(task: Task, row: Row) -> list[tuple[str, ...]]:
    assert task.text is not None
    assert task.text_b is not None
    texts = {column: get_text(task, column, row) for column in (task.text_b, task.text)}
    if empty := [column for column, text in texts.items() if not text.strip()]:
        raise DataError(f"column {empty[0]!r} is empty; every row needs a question and a context")
    return [tuple(texts.values())]


def read_answers_cell(task: Task, row: Row) -> tuple[Any, str]:
    """The cell of the answers, not parsed, and the context they must be in."""
    assert task.text is not None
    return get_cell(task, task.label, row), get_text(task, task.text, row)


def parse_answers(cell: tuple[Any, str]) -> Answers:
    """The answers of a row: SQuAD's list of objects, the lists of the Hugging Face hub, or texts without positions."""
    answers, context = cell
    if isinstance(answers, str) and re.match(r'\[\s*\]$|\[?\{"', answers):  # JSON in .csv and .tsv
        with suppress(msgspec.DecodeError, RecursionError):
            answers = msgspec.json.decode(answers)
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        starts = [None] * len(texts) if isinstance(texts, list) and starts is None else starts
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise DataError("the answers are an object without lists of equal length named text and answer_start")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if answers is None:
        raise DataError("the answers are missing; a question that cannot be answered has an empty list")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list):
        raise DataError(
            f"the answers are a {type(answers).__name__}; expected a list of objects with text and answer_start"
        )
    parsed = [parse_answer(answer, context) for answer in answers]
    return tuple((text, start) for text, start in parsed if text)


def parse_answer(answer: Any, context: str) -> tuple[str, int]:
    """The text of an answer, and where it starts."""
    if not isinstance(answer, dict):
        text = check_text(answer, "an answer").strip()
        return text, context.find(text)
    text, start = check_text(answer.get("text"), "the text of an answer"), answer.get("answer_start")
    if start is None:
        return text, context.find(text)
    start = int(start) if isinstance(start, float) and start.is_integer() else start
    if not isinstance(start, int):
        raise DataError(f"answer_start is {start!r}; it must be a number of characters")
    return text, start if start >= 0 and context.startswith(text, start) else -1


def check_answers(answers: Answers) -> None:
    """Raise if an answer is not in its context."""
    for text, start in answers:
        if start < 0:
            raise DataError(f"the answer {text[:100]!r} is not in the context (at its answer_start, if it has one)")


def has_target(answers: Answers) -> bool:
    """Whether a question can be trained on: one of its answers is in the context, or it has none."""
    return not answers or any(start >= 0 for _, start in answers)


def answer_warnings(rows: list[Answers]) -> Iterator[str]:
    if count := sum(not answers for answers in rows):
        yield f"{count:,} of {len(rows):,} questions have no answer; the model learns to give none"
    if count := sum(not has_target(answers) for answers in rows):
        yield (
            f"{count:,} of {len(rows):,} questions have no answer that is in the context (at its answer_start, if it "
            "has one); they are not trained on (--strict refuses them)"
        )


def task_fields_from_answers(rows: list[Answers]) -> dict[str, Any]:
    if not any(start >= 0 for answers in rows for _, start in answers):
        raise DataError("no answer is in its context; answers must be copied from it, letter by letter")
    has_unanswerable = any(not answers for answers in rows)
    return {"metrics": ("f1", "exact_match"), "has_unanswerable": has_unanswerable, "epochs": 2, "length": 512}


# From examples to features.


@dataclass(frozen=True)
class EncodedContext:
    """A context as tokens."""

    input_ids: NDArray  # [tokens]
    offsets: NDArray  # [tokens, 2] start and end of each token in the text
    word_offsets: NDArray  # [tokens, 2] of the word that a token belongs to

    def find_tokens(self, answers: Answers) -> tuple[int, int] | None:
        """The first and last token of the first answer that is in the context."""
        text, start = next(((text, start) for text, start in answers if start >= 0), ("", -1))
        first = int(np.searchsorted(self.offsets[:, 1], start, side="right"))
        last = int(np.searchsorted(self.offsets[:, 0], start + len(text))) - 1
        return (first, last) if text and first <= last else None


def encode_contexts(contexts: Iterable[str], tokenizer: TextTokenizer) -> dict[str, EncodedContext]:
    """Encode each distinct context once."""
    has_words = tokenizer.component_settings["pre_tokenizer"] is not None
    distinct, encoded = list(dict.fromkeys(contexts)), {}
    for start in range(0, len(distinct), ENCODED_TOGETHER):
        texts = distinct[start : start + ENCODED_TOGETHER]
        for text, encoding in zip(texts, tokenizer.library.encode_batch(texts, add_special_tokens=False), strict=True):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            words = np.array(encoding.word_ids if has_words else range(len(offsets)))
            first = np.searchsorted(words, words)
            last = np.searchsorted(words, words, side="right") - 1
            word_offsets = np.stack([offsets[first, 0], offsets[last, 1]], 1) if len(offsets) else offsets
            encoded[text] = EncodedContext(np.array(encoding.ids, np.int32), offsets, word_offsets)
    return encoded


def make_windows(examples: Examples, tokenizer: TextTokenizer, max_length: int) -> Features:
    """[CLS] question [SEP] window of the context [SEP], one row for each window; targets are the positions of the first
    and last token of the answer, or of [CLS] where the window has no answer."""
    assert examples.texts_b is not None
    vocabulary, labels = tokenizer.vocabulary, examples.labels
    cls, sep = (np.array([number], np.int32) for number in (vocabulary.cls_id, vocabulary.sep_id))
    max_question = min(MAX_QUESTION, (max_length - 3) // 2)
    questions = encode_texts(examples.texts, tokenizer)
    contexts = encode_contexts(examples.texts_b, tokenizer)
    pieces, offsets, lengths, lengths_a, rows, targets = [], [], [], [], [], []
    for index, (question, text) in enumerate(zip(questions, examples.texts_b, strict=True)):
        context, question = contexts[text], question[:max_question].astype(np.int32)
        before, room = len(question) + 2, max_length - len(question) - 3
        span = None if labels is None else context.find_tokens(labels[index])
        for first, last in window_bounds(len(context.input_ids), room):
            pieces += [cls, question, sep, context.input_ids[first:last], sep]
            window_offsets = np.zeros((before + last - first + 1, 2), np.int32)
            window_offsets[before:-1] = context.word_offsets[first:last]
            offsets.append(window_offsets)
            lengths.append(len(window_offsets))
            lengths_a.append(before)
            rows.append(index)
            is_inside = span is not None and first <= span[0] and span[1] < last
            targets.append([before + token - first for token in span] if is_inside and span else [0, 0])
    sizes = torch.tensor(lengths)
    return Features(
        input_ids=torch.from_numpy(np.concatenate(pieces)),
        starts=sizes.cumsum(0) - sizes,
        lengths=sizes,
        lengths_a=torch.tensor(lengths_a),
        sequences=torch.empty(0),
        labels=torch.empty(0) if labels is None else torch.tensor(targets),
        is_truncated=torch.tensor([len(question) > max_question for question in questions]),
        examples=torch.tensor(rows),
        offsets=torch.from_numpy(np.concatenate(offsets)),
    )


def window_bounds(num_tokens: int, room: int) -> Iterator[tuple[int, int]]:
    """First token and end of overlapping windows of up to `room` tokens; the last one ends with the context."""
    step = room - min(OVERLAP, room // 2)
    for first in range(0, max(1, num_tokens - room + step), step):
        yield first, min(first + room, num_tokens)


# From logits to answers.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible answer, with the log-probabilities of its first and last token in its window."""

    start: int  # in the context
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, slots=True)
class Answer:
    """The best answers to a question, each text once, and the log-odds that it has none."""

    texts: list[str]
    candidates: list[Candidate]  # of the texts, the best first
    null_odds: float

    def text(self, task: Task) -> str:
        """The best answer, "" if there is none."""
        is_null = task.has_unanswerable and self.null_odds > task.null_threshold
        return "" if is_null or not self.texts else self.texts[0]


def find_answers(outputs: Outputs, task: Task, count: int = N_BEST) -> list[Answer]:
    """The best answers to the question of each example, from all windows of its context."""
    features, examples = outputs.features, outputs.examples
    assert features is not None
    assert examples.texts_b is not None
    offsets, firsts = features.offsets.cpu().numpy(), features.lengths_a.tolist()
    starts, rows = features.starts.tolist(), features.examples.tolist()
    windows = outputs.logits if task.head == "joint" else outputs.row_logits()
    find_candidates: Callable = unpack_beam if task.head == "joint" else best_spans
    candidates: list[list[Candidate]] = [[] for _ in examples.texts_b]
    nulls = [np.inf] * len(candidates)
    for row, start, first, logits in zip(rows, starts, firsts, windows, strict=True):
        null, spans = find_candidates(logits, first, count)
        nulls[row] = min(nulls[row], null)
        candidates[row] += [
            Candidate(int(offsets[start + first_token, 0]), int(offsets[start + last_token, 1]), *scores)
            for first_token, last_token, *scores in spans
        ]
    is_relative = task.head == "simple"  # to the best answer
    return [
        merge_candidates(text, found, null, is_relative)
        for text, found, null in zip(examples.texts_b, candidates, nulls, strict=True)
    ]


def merge_candidates(context: str, candidates: list[Candidate], null: float, is_relative: bool) -> Answer:
    """The best candidates of all windows of a context; of equal texts only the best is kept."""
    by_text: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
        text = context[candidate.start : candidate.end].strip()  # byte-level tokens start with a space
        by_text.setdefault(text, replace(candidate, start=context.index(text, candidate.start)))
    by_text.pop("", None)
    best = list(by_text.values())[:N_BEST]
    null_odds = null - best[0].score if is_relative and best else null
    return Answer(list(by_text)[:N_BEST], best, float(null_odds))


Span = tuple[int, int, float, float]  # positions of the first and last token, and their log-probabilities


def best_spans(logits: NDArray, first: int, count: int = N_BEST) -> tuple[float, list[Span]]:
    """The log-probability of [CLS] as first and last token, and the best spans of a window, from logits [length, 2]."""
    log_probabilities = torch.from_numpy(logits).log_softmax(0).numpy()
    starts, ends = log_probabilities[first:-1].T
    if not len(starts):
        return float(log_probabilities[0].sum()), []
    width = min(MAX_ANSWER, len(starts))
    padded = np.concatenate([ends, np.full(width - 1, -np.inf, ends.dtype)])
    scores = (starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, width)).ravel()  # [start, length - 1]
    count = min(count, int(np.isfinite(scores).sum()))
    best = np.argpartition(-scores, count - 1)[:count]
    spans = [(first + start, first + start + more) for start, more in zip(*divmod(best, width), strict=True)]
    return float(log_probabilities[0].sum()), [
        (start, end, float(log_probabilities[start, 0]), float(log_probabilities[end, 1])) for start, end in spans
    ]


def unpack_beam(output: NDArray, first: int, count: int = N_BEST) -> tuple[float, list[Span]]:
    """The logit of having no answer, and the best spans of a window, from the output of the joint head."""
    beam = output[: 4 * N_BEST].reshape(4, N_BEST).T  # first and last token, and their log-probabilities
    spans = [(int(start), int(end), *scores) for start, end, *scores in beam[:count].tolist()]
    return float(output[4 * N_BEST]), [span for span in spans if span[2] + span[3] > -1e20]


def predict_answers(outputs: Outputs, task: Task) -> NDArray:
    """The best answer, were there one, and the log-odds that there is none [N, 2]."""
    predicted = np.empty((len(outputs.examples), 2), object)
    for index, answer in enumerate(find_answers(outputs, task, count=1)):
        predicted[index] = (answer.texts or [""])[0], answer.null_odds
    return predicted


def answer_metrics(predicted: NDArray, labels: NDArray, task: Task) -> Metrics:
    """SQuAD's F1 and exact match."""
    texts = ["" if task.has_unanswerable and null_odds > task.null_threshold else text for text, null_odds in predicted]
    scores = np.array([score_answer(text, answers) for text, answers in zip(texts, labels, strict=True)])
    return dict(zip(task.metrics, scores.mean(0).tolist(), strict=True))


def score_answer(text: str, answers: Answers) -> tuple[float, float]:
    return answer_scores(text, [answer for answer, _ in answers])


def tune_null_threshold(predicted: NDArray, labels: NDArray, task: Task) -> Task:
    """The task with the threshold of `null_odds` that gives the best F1, halfway between those of two questions."""
    if not task.has_unanswerable:
        return task
    answered = np.array([score_answer(text, answers)[0] for (text, _), answers in zip(predicted, labels, strict=True)])
    unanswered = np.array([score_answer("", answers)[0] for answers in labels])
    odds = predicted[:, 1].astype(np.float64)
    order = np.argsort(odds)
    below, above = np.insert(odds[order], 0, odds.min() - 2), np.append(odds[order], odds.max() + 2)
    totals = unanswered.sum() + np.insert(np.cumsum((answered - unanswered)[order]), 0, 0)
    best = np.where(below < above, totals, -np.inf).argmax()  # equal odds are answered together
    return replace(task, null_threshold=float(below[best] + above[best]) / 2)


# From answers to files.


def answer_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The answer, where it starts in the context, its probability and the log-odds that there is none."""
    for answer in find_answers(outputs, task):
        text = answer.text(task)
        start = answer.candidates[0].start if text else None
        probability = round(float(np.exp(answer.candidates[0].score)), 4) if text else None
        null_odds = {"null_odds": round(answer.null_odds, 4)} if task.has_unanswerable else {}
        yield {"prediction": text, "start": start, "probability": probability} | null_odds


def answer_mistakes(task: Task, outputs: Outputs, predicted: NDArray, labels: NDArray) -> Iterator[Mistake]:
    """Answers that share no word with a true one, with the part of the context they are from."""
    contexts = outputs.examples.texts_b or []
    rows = zip(find_answers(outputs, task), labels, outputs.examples.texts, contexts, strict=True)
    for answer, answers, question, context in rows:
        text = answer.text(task)
        if score_answer(text, answers)[0] > 0:
            continue
        place = answer.candidates[0].start if text else max(0, answers[0][1])
        log_probability = answer.candidates[0].score if text else -np.logaddexp(0, -answer.null_odds)
        expected = answers[0][0] if answers else NO_ANSWER
        excerpt = context[max(0, place - EXCERPT) : place + EXCERPT]
        yield Mistake(float(np.exp(log_probability)), text or NO_ANSWER, expected, f"{question} … {excerpt}")


def squad_predictions(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """What SQuAD's files of predictions hold about each question, by the name of the file."""
    for answer in find_answers(outputs, task):
        scores = np.array([candidate.score for candidate in answer.candidates])
        probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() if len(scores) else scores
        n_best = [
            {
                "text": text,
                "probability": round(float(probability), 6),
                "start_logit": round(candidate.start_logit, 6),
                "end_logit": round(candidate.end_logit, 6),
            }
            for text, candidate, probability in zip(answer.texts, answer.candidates, probabilities, strict=True)
        ]
        files = {"predictions": answer.text(task), "nbest_predictions": n_best}
        yield files | ({"null_odds": round(answer.null_odds, 6)} if task.has_unanswerable else {})
