"""The kinds of tasks. All that is specific to a kind, from the rows of a file to the exported model, is in `KINDS`;
tasks are defined and their files are read by it."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.tokenizer import TextTokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning import choice, readers, tags
from electra.finetuning import question_answering as qa
from electra.finetuning.config import TaskConfig
from electra.finetuning.features import Features, Outputs, load_or_make_features
from electra.finetuning.kind_fields import Kind, class_mistakes, text_model
from electra.finetuning.metrics import class_scores
from electra.finetuning.models import (
    ChoiceModel,
    CrfTagModel,
    JointSpanModel,
    SpanModel,
    TagModel,
    binary_cross_entropy,
    cross_entropy,
    span_loss,
)
from electra.finetuning.readers import Row, TaskKind
from electra.finetuning.tasks import (
    BALANCED,
    DEV_FRACTION,
    SQUAD_VERSIONS,
    TAGGING_COLUMNS,
    TEST,
    Examples,
    Task,
    add_line_to_errors,
    balanced_class_weights,
    balanced_positive_weights,
    check_distinct_columns,
    get_glue_task,
    parse_class_weights,
    read_split_rows,
    stack_labels,
    take_chunk,
)
from electra.formatting import join_first_names
from electra.huggingface.convert import choice_settings


def class_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The prediction and the probability of each class, or the predicted score."""
    kind = KINDS[task.kind]
    predictions = kind.decode(kind.predict(outputs, task), task)
    for prediction, values in zip(predictions, kind.activation(outputs.logits).tolist(), strict=True):
        probabilities = {f"p({name})": round(value, 4) for name, value in zip(task.labels, values, strict=False)}
        rounded = float(f"{prediction:.6g}") if isinstance(prediction, float) else prediction
        yield {"prediction": rounded} | probabilities


KINDS: dict[TaskKind, Kind] = {
    "classification": Kind(
        parse=readers.parse_class,
        infer=readers.task_fields_from_classes,
        warnings=lambda names, task: readers.class_warnings(names),
        encode=lambda name, task: readers.encode_class(name, task.class_ids),
        dtype=np.int64,
        loss=cross_entropy,
        balance=balanced_class_weights,
        uniform_loss=lambda task: math.log(task.num_labels),
        predict=lambda outputs, task: outputs.logits.argmax(1),
        class_ids=lambda class_ids: class_ids,
        columns=class_columns,
        mistakes=class_mistakes,
        huggingface_settings=lambda encoder: {"problem_type": "single_label_classification"},
    ),
    "multi-label": Kind(
        parse=readers.parse_classes,
        infer=readers.task_fields_from_multi_labels,
        warnings=lambda rows, task: readers.multi_label_warnings(rows),
        encode=lambda names, task: readers.encode_classes(names, task.class_ids),
        dtype=np.float32,
        loss=binary_cross_entropy,
        balance=balanced_positive_weights,
        uniform_loss=lambda task: math.log(2),
        predict=lambda outputs, task: (outputs.logits > 0).astype(np.float32),
        activation=lambda logits: torch.from_numpy(logits).sigmoid().numpy(),
        class_scores=lambda predicted, labels, task: class_scores(predicted, labels, task.labels),
        decode=lambda rows, task: [[task.labels[class_id] for class_id in np.flatnonzero(row)] for row in rows],
        columns=class_columns,
        huggingface_settings=lambda encoder: {"problem_type": "multi_label_classification"},
    ),
    "regression": Kind(
        parse=readers.parse_score,
        infer=readers.task_fields_from_scores,
        warnings=lambda scores, task: readers.score_warnings(scores),
        encode=lambda score, task: score,
        dtype=np.float32,
        has_classes=False,
        targets=lambda scores, task: task.normalize_scores(scores).astype(np.float32),
        labels_of_targets=lambda targets, task: task.denormalize_scores(targets),
        loss=lambda logits, targets: (logits[:, 0] - targets).square(),
        uniform_loss=lambda task: 1.0,
        max_loss_ratio=100.0,  # of squares: AdamW's first steps may be off by several standard deviations
        predict=lambda outputs, task: task.denormalize_scores(outputs.logits[:, 0]),
        activation=lambda logits: logits,
        baseline_name="always predicting the mean score",
        decode=lambda scores, task: scores.tolist(),
        columns=class_columns,
        huggingface_settings=lambda encoder: {"problem_type": "regression"},
        output_names=lambda task: ("score",),
    ),
    "choice": Kind(
        text_column=None,
        choice_columns=("choices",),
        find_columns=choice.find_columns,
        read_texts=choice.read_choice_texts,
        label_cell=choice.read_choice_label,
        parse=choice.parse_choice_label,
        infer=choice.task_fields_from_choices,
        encode=choice.encode_choice,
        dtype=np.int64,
        has_classes=False,
        model=lambda task: ChoiceModel,
        loss=cross_entropy,
        uniform_loss=lambda task: math.log(choice.MAX_CHOICES),
        predict=lambda outputs, task: outputs.logits.argmax(1),
        baseline=lambda task, train_labels, dev_labels, dev: {"accuracy": float(np.mean(1 / dev.row_sizes()[1]))},
        baseline_name="choosing at random",
        columns=choice.choice_columns,
        huggingface_task="MultipleChoice",
        huggingface_settings=choice_settings,
    ),
    "question-answering": Kind(
        text_column="context",
        text_b_column="question",
        label_column="answers",
        read_rows=qa.read_rows,
        read_texts=qa.read_question_and_context,
        label_cell=qa.read_answers_cell,
        parse=qa.parse_answers,
        infer=qa.task_fields_from_answers,
        warnings=lambda answers, task: qa.answer_warnings(answers),
        check_strictly=qa.check_answers,
        encode=lambda answers, task: answers,
        dtype=object,
        has_target=qa.has_target,
        held_out_groups=lambda examples: examples.texts_b or (),
        has_classes=False,
        has_row_logits=False,
        make_features=qa.make_windows,
        model=lambda task: {"simple": SpanModel, "joint": JointSpanModel}[task.head],
        loss=span_loss,
        uniform_loss=lambda task: math.log(task.length),
        predict=qa.predict_answers,
        compute_metrics=qa.answer_metrics,
        calibrate=qa.tune_null_threshold,
        baseline=lambda task, train_labels, dev_labels, dev: qa.answer_metrics(
            np.array([("", 0.0)] * len(dev_labels), object), dev_labels, task
        ),
        baseline_name="giving no answer",
        columns=qa.answer_columns,
        mistakes=qa.answer_mistakes,
        prediction_files=qa.squad_predictions,
        huggingface_task="QuestionAnswering",
    ),
    "tags": Kind(
        read_rows=tags.read_rows,
        text_column="words",
        label_column="tags",
        find_columns=tags.find_columns,
        read_texts=tags.read_words,
        label_cell=tags.read_tags,
        parse=tags.parse_tags,
        infer=tags.task_fields_from_tags,
        warnings=tags.tag_warnings,
        unknown_labels=tags.unknown_tags,
        encode=tags.encode_tags,
        dtype=object,
        has_row_logits=False,
        make_features=tags.make_tag_features,
        targets=tags.tag_targets,
        labels_of_targets=lambda targets, task: stack_labels([tags for *_, tags in targets]),
        model=lambda task: CrfTagModel if task.crf else TagModel,
        loss=tags.tag_loss,
        balance=lambda labels, num_classes: balanced_class_weights(tags.classes_of_words(labels), num_classes),
        num_terms=lambda targets: (targets >= 0).sum(1),
        uniform_loss=lambda task: math.log(task.num_labels),
        predict=tags.predict_tags,
        compute_metrics=tags.compute_tag_metrics,
        baseline=tags.constant_tag_baseline,
        baseline_name="always predicting the most frequent tag",
        class_ids=tags.classes_of_words,
        class_scores=tags.score_tag_classes,
        columns=tags.tag_columns,
        mistakes=tags.tag_mistakes,
        output_formats=(".conll", ".jsonl"),
        huggingface_task="TokenClassification",
    ),
}


def with_targets(task: Task, examples: Examples) -> Examples:
    """Examples with the targets of the loss in place of their labels."""
    if examples.labels is None:
        return examples
    return replace(examples, labels=KINDS[task.kind].targets(examples.labels, task))


def load_features(
    task: Task, examples: Examples, tokenizer: TextTokenizer, length: int, cache_folder: Path
) -> Features:
    """Token ids and targets of examples, from a cache after the first time."""
    make_features = KINDS[task.kind].make_features
    return load_or_make_features(make_features, with_targets(task, examples), tokenizer, length, cache_folder)


def check_class_weights(words: tuple[str, ...], task: Task) -> None:
    """Raise a ConfigError if --class-weights do not fit a task."""
    if words and KINDS[task.kind].balance is None:
        raise ConfigError(f"is {' '.join(words)}, but a task of kind {task.kind} has none", field="class_weights")
    if words != (BALANCED,):
        parse_class_weights(words, task)


def make_class_weights(words: tuple[str, ...], task: Task, train_labels: NDArray) -> Tensor | None:
    """The weights [classes] of --class-weights for a task with these training labels."""
    balance = KINDS[task.kind].balance
    if not words or balance is None:
        return None
    weights = balance(train_labels, len(task.labels)) if words == (BALANCED,) else parse_class_weights(words, task)
    return torch.tensor(np.asarray(weights), dtype=torch.float32)


def define_task(config: TaskConfig) -> Task:
    """The task of GLUE, SQuAD or CoNLL, or that of the user's own files."""
    task = define_custom_task(config) if config.task is None else define_benchmark_task(config.task, config)
    return with_windows(task, config.windows)


def define_benchmark_task(name: str, config: TaskConfig) -> Task:
    assert config.data is not None
    if name in TAGGING_COLUMNS:
        task = with_inferred_labels(tags.define_tagging_task(name, config.data, config.crf), "tags")
        tags.check_tags_of_task(task)
        return task
    if name in SQUAD_VERSIONS:
        task = qa.define_squad_task(name, config.data, config.head)
        return with_inferred_labels(task, task.kind, config.strict)
    return get_glue_task(name, config.data)


def define_custom_task(config: TaskConfig) -> Task:
    """A task with classes, scale and, unless set, kind inferred from the training labels.

    Classes are collected before rows are held out: all rows of a rare class may be held out."""
    assert config.train is not None
    given_kind = config.known_kind()
    kind = KINDS[given_kind or "classification"]
    task = Task(
        name=config.train.name.split(".")[0],
        kind=given_kind or "classification",
        text=config.text or kind.text_column,
        text_b=config.text_b or kind.text_b_column,
        choices=config.choices or kind.choice_columns,
        label=config.label or kind.label_column,
        crf=config.crf,
        head=config.head,
        metrics=(),
        splits={"train": str(config.train), "dev": str(config.dev or config.train)},
        dev_fraction=(config.dev_fraction or DEV_FRACTION) if config.dev is None else 0.0,
    )
    check_distinct_columns(task)
    rows = read_split_rows(task, "train", kind.read_rows)
    first = next(rows)
    if given_kind is None:
        readers.check_columns_of_texts(str(config.train), first.values)
    return with_inferred_labels(kind.find_columns(task, first), given_kind, config.strict, chain([first], rows))


def with_windows(task: Task, windows: int) -> Task:
    """The task with at most this number of windows of each text."""
    if windows > 1 and (KINDS[task.kind].model is not text_model or task.text_b is not None):
        what = "pairs of texts" if task.text_b is not None else f"a task of kind {task.kind}"
        raise ConfigError(
            f"is {windows}; it must be 1 for {what}: single texts with a label have windows", field="windows"
        )
    return replace(task, windows=windows)


def with_inferred_labels(
    task: Task, kind: TaskKind | None, strict: bool = False, rows: Iterable[Row] | None = None
) -> Task:
    """The task with classes or scale, metrics and, unless given, kind inferred from its training labels."""
    source = task.splits["train"]
    cells: dict[int, Any] = {}  # by line
    for row in rows or read_split_rows(task, "train", KINDS[task.kind].read_rows):
        with add_line_to_errors(source, row.line):
            cells[row.line] = KINDS[task.kind].label_cell(task, row)
    kind = kind or readers.infer_task_kind(list(cells.values()))
    parsed = []
    for line, cell in cells.items():
        with add_line_to_errors(source, line):
            parsed.append(KINDS[kind].parse(cell))
            if strict:
                KINDS[kind].check_strictly(parsed[-1])
    try:
        task = replace(task, kind=kind, **KINDS[kind].infer(parsed))
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    for line, label in zip(cells, parsed, strict=True):  # refused before anything is written
        with add_line_to_errors(source, line):
            KINDS[kind].encode(label, task)
    for warning in KINDS[kind].warnings(parsed, task):
        print(f"{source}: {warning}", file=sys.stderr)
    return task


def count_unknown_labels(task: Task, source: str, rows: Iterable[Row]) -> tuple[Counter[str], int]:
    """How often rows have labels that no training row has, where these count as errors, and the number of all."""
    kind, unknown, total = KINDS[task.kind], Counter[str](), 0
    if kind.unknown_labels is None:
        return unknown, total
    for row in rows:
        if task.find_column(task.label, row.values) is not None:
            with add_line_to_errors(source, row.line):
                labels = kind.parse(kind.label_cell(task, row))
            unknown.update(kind.unknown_labels(labels, task))
            total += len(labels)
    return unknown, total


def report_unknown_labels(source: str, unknown: Counter[str], total: int) -> None:
    """Print that labels of a file count as errors; raises if they are more than half, as in a wrong column."""
    names = join_first_names([repr(name) for name, _ in unknown.most_common()])
    message = f"{source}: {unknown.total():,} of {total:,} labels are in no training row ({names})"
    if unknown.total() > total / 2:
        raise DataError(f"{message}; is --label the right column?")
    if unknown:
        print(f"{message}; predictions for them count as errors", file=sys.stderr)


def read_examples(task: Task, split: str) -> Examples:
    """All examples of a split; test splits may lack labels."""
    if split not in task.splits:
        raise ConfigError(f"task {task.name} has no split {split!r}; it has {', '.join(task.splits)}")
    rows = read_split_rows(task, split, KINDS[task.kind].read_rows)
    first = next(rows)
    has_labels = not split.startswith(TEST) or task.find_column(task.label, first.values) is not None
    examples = parse_examples(task, task.splits[split], chain([first], rows), has_labels)
    if task.dev_fraction and split in ("train", "dev"):
        examples = examples.select(train_or_dev_indices(task, split, KINDS[task.kind].held_out_groups(examples)))
    if split == "train":
        assert examples.labels is not None
        has_target = np.array([KINDS[task.kind].has_target(label) for label in examples.labels])
        if not has_target.any():
            source = task.splits[split]
            raise DataError(f"{source}: without the dev rows, no row is left whose answer is in its context; add rows")
        return examples if has_target.all() else examples.select(np.flatnonzero(has_target))
    return examples


def stream_examples(
    task: Task, path: Path, chunk_size: int, device_type: str = "cpu", *, with_labels: bool = True, skip_rows: int = 0
) -> Iterator[Examples]:
    """The examples of a file in chunks, with their rows, after the first `skip_rows`; labels are read if the file has
    them and `with_labels`."""
    rows = KINDS[task.kind].read_rows(path, columns=task.columns, skip_malformed=task.skip_malformed and with_labels)
    first = next(rows)
    has_labels = with_labels and task.find_column(task.label, first.values) is not None
    rows = islice(chain([first], rows), skip_rows, None)
    while chunk := take_chunk(rows, chunk_size, device_type):
        yield replace(parse_examples(task, str(path), chunk, has_labels), rows=chunk)


def parse_examples(task: Task, source: str, rows: Iterable[Row], has_labels: bool) -> Examples:
    kind = KINDS[task.kind]
    texts: list[tuple[str, ...]] = []
    counts, labels = [], []
    for row in rows:
        with add_line_to_errors(source, row.line):
            sequences = kind.read_texts(task, row)
            texts += sequences
            counts.append(len(sequences))
            if has_labels:
                labels.append(kind.encode(kind.parse(kind.label_cell(task, row)), task))
    first, *second = zip(*texts, strict=True)
    return Examples(
        texts=list(first),
        texts_b=list(second[0]) if second else None,
        counts=np.array(counts) if len(texts) > len(counts) else None,
        labels=stack_labels(labels, kind.dtype) if has_labels else None,
        windows=task.windows,
    )


def train_or_dev_indices(task: Task, split: str, groups: Sequence[Any]) -> NDArray:
    """Indices, in file order, of the held-out rows (dev) or of the other rows (train); equal groups stay together."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    if len(numbers) == 1:  # one context
        numbers, groups = {row: row for row in range(len(groups))}, range(len(groups))
    num_rows = len(numbers)
    if num_rows < 2:
        raise DataError(f"{task.splits[split]} has one row; holding out a dev row needs at least two, or a --dev file")
    held_out = min(max(1, round(num_rows * task.dev_fraction)), num_rows - 1)
    order = np.random.default_rng(0).permutation(num_rows)
    is_chosen = np.zeros(num_rows, bool)
    is_chosen[order[:held_out] if split == "dev" else order[held_out:]] = True
    return np.flatnonzero(is_chosen[[numbers[group] for group in groups]])
