"""The kinds of tasks. All that is specific to a kind, from the rows of a file to the exported model, is in `KINDS`;
tasks are defined and their files are read by it."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
from electra.finetuning.config import TaskConfig
from electra.finetuning.features import IGNORED, Features, Outputs, load_or_make_features, make_features
from electra.finetuning.heads import ChoiceModel, CrfTagModel, TagModel, TaskModel, WindowModel
from electra.finetuning.losses import (
    BALANCED,
    balanced_class_weights,
    balanced_positive_weights,
    binary_cross_entropy,
    cross_entropy,
    parse_class_weights,
)
from electra.finetuning.metrics import Metrics, class_scores, most_frequent_label
from electra.finetuning.readers import Row, TaskKind
from electra.finetuning.tasks import (
    TEST,
    Examples,
    RowReader,
    Task,
    add_line_to_errors,
    get_cell,
    get_glue_task,
    get_text,
    read_split_rows,
    stack_labels,
    take_chunk,
)
from electra.huggingface.convert import choice_settings
from electra.huggingface.names import Settings
from electra.model.config import EncoderConfig


def read_text_or_pair(task: Task, row: Row) -> list[tuple[str, ...]]:
    return [tuple(get_text(task, column, row) for column in (task.text, task.text_b) if column is not None)]


def text_model(task: Task) -> type[TaskModel]:
    return WindowModel if task.windows > 1 else TaskModel


def class_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The prediction and the probability of each class, or the predicted score."""
    kind = KINDS[task.kind]
    predictions = kind.decode(kind.predict(outputs, task), task)
    for prediction, values in zip(predictions, kind.activation(outputs.logits).tolist(), strict=True):
        probabilities = {f"p({name})": round(value, 4) for name, value in zip(task.labels, values, strict=False)}
        rounded = float(f"{prediction:.6g}") if isinstance(prediction, float) else prediction
        yield {"prediction": rounded} | probabilities


def constant_baseline(task: Task, train_labels: NDArray, dev_labels: NDArray, dev: Features) -> Metrics:
    """Dev metrics of the most frequent class, or the mean score, of the training rows."""
    return task.compute_metrics(np.broadcast_to(most_frequent_label(train_labels), dev_labels.shape), dev_labels)


def choice_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The right choice in the form of the labels, and the probabilities of all choices."""
    assert task.choice_label is not None
    assert outputs.examples is not None
    assert outputs.examples.rows is not None
    logits, rows = outputs.logits, outputs.examples.rows
    for row, index, values in zip(rows, logits.argmax(1), softmax(logits).tolist(), strict=True):
        choices = choice.read_choices(task, row)
        probabilities = [round(value, 4) for value in values[: len(choices)]]
        yield {"prediction": choice.CHOICE_NAMES[task.choice_label](choices)[index], "probabilities": probabilities}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of task, in the order of the data flow; the defaults are those of a text or pair with one output."""

    # from the rows of a file to examples
    read_rows: RowReader = readers.read_rows
    text_column: str | None = "text"  # unless set
    label_column: str = "label"  # unless set
    find_columns: Callable[[Task, Row], Task] = lambda task, row: task  # columns, from the first training row
    choice_columns: tuple[str, ...] = ()  # unless set
    read_texts: Callable[[Task, Row], list[tuple[str, ...]]] = read_text_or_pair  # of each sequence
    label_cell: Callable[[Task, Row], Any] = lambda task, row: get_cell(task, task.label, row)
    parse: Callable[[Any], Any]  # label cell → class name, class names, or score
    infer: Callable[[list[Any]], dict[str, Any]]  # parsed labels of all training rows → fields of the task
    warnings: Callable[[list[Any]], Iterator[str]] = lambda labels: iter(())  # about them: probably not intended
    encode: Callable[[Any, Task], Any]  # parsed label → a row of `Examples.labels`
    dtype: type  # of `Examples.labels`
    has_classes: bool = True  # that the task lists as its labels
    has_row_logits: bool = True  # predictions need no more than logits [N, num_labels]

    # from examples to features
    make_features: Callable[[Examples, TextTokenizer, int], Features] = make_features
    targets: Callable[[NDArray, Task], NDArray] = lambda labels, task: labels  # of the loss
    labels_of_targets: Callable[[NDArray, Task], NDArray] = lambda targets, task: targets

    # from features to predictions
    model: Callable[[Task], type[TaskModel]] = text_model
    loss: Callable[..., Tensor]  # logits, targets and, if `balance` is set, class weights → losses [B]
    balance: Callable[[NDArray, int], NDArray] | None = None  # training labels, number of classes → balanced weights
    num_terms: Callable[[Tensor], Tensor] = lambda targets: torch.ones(len(targets), device=targets.device)
    """Targets → terms of the loss of each row [B], by which it is averaged."""
    uniform_loss: Callable[[Task], float]  # loss of uniform predictions, or of the mean score
    predict: Callable[[Outputs, Task], NDArray]  # a prediction in the form of `Examples.labels` for each example
    activation: Callable[[NDArray], NDArray]  # logits [N, num_labels] → probabilities, or outputs of a regression
    compute_metrics: Callable[[NDArray, NDArray, Task], Metrics] = lambda predicted, labels, task: task.compute_metrics(
        predicted, labels
    )
    baseline: Callable[[Task, NDArray, NDArray, Features], Metrics] = constant_baseline
    baseline_name: str = "always predicting the most frequent class"
    class_ids: Callable[[NDArray], NDArray] | None = None  # labels or predictions → classes of the confusion matrix
    class_scores: Callable[[NDArray, NDArray, Task], dict[str, Metrics]] = lambda predicted, labels, task: {}
    """Predictions, labels → precision, recall and F1 of each class."""

    # from predictions to files
    decode: Callable[[NDArray, Task], list[Any]]  # labels or predictions of all rows → class names or scores
    columns: Callable[[Task, Outputs], Iterator[dict[str, Any]]] = class_columns  # of `electra predict`
    output_formats: tuple[str, ...] = (".csv", ".tsv", ".jsonl")
    huggingface_task: str = "SequenceClassification"  # in `TASK_CLASSES`
    huggingface_settings: Callable[[EncoderConfig], Settings]
    output_names: Callable[[Task], tuple[str, ...]] = lambda task: task.labels


def softmax(logits: NDArray) -> NDArray:
    return torch.from_numpy(logits).softmax(1).numpy()


KINDS: dict[TaskKind, Kind] = {
    "classification": Kind(
        parse=readers.parse_class,
        infer=readers.task_fields_from_classes,
        warnings=readers.class_warnings,
        encode=lambda name, task: readers.encode_class(name, task.class_ids),
        dtype=np.int64,
        loss=cross_entropy,
        balance=balanced_class_weights,
        uniform_loss=lambda task: math.log(task.num_labels),
        predict=lambda outputs, task: outputs.logits.argmax(1),
        activation=softmax,
        class_ids=lambda class_ids: class_ids,
        decode=lambda class_ids, task: [task.labels[class_id] for class_id in class_ids],
        huggingface_settings=lambda encoder: {"problem_type": "single_label_classification"},
    ),
    "multi-label": Kind(
        parse=readers.parse_classes,
        infer=readers.task_fields_from_multi_labels,
        warnings=lambda rows: readers.class_warnings(chain.from_iterable(rows), has_several=True),
        encode=lambda names, task: readers.encode_classes(names, task.class_ids),
        dtype=np.float32,
        loss=binary_cross_entropy,
        balance=balanced_positive_weights,
        uniform_loss=lambda task: math.log(2),
        predict=lambda outputs, task: (outputs.logits > 0).astype(np.float32),
        activation=lambda logits: torch.from_numpy(logits).sigmoid().numpy(),
        class_scores=lambda predicted, labels, task: class_scores(predicted, labels, task.labels),
        decode=lambda rows, task: [[task.labels[class_id] for class_id in np.flatnonzero(row)] for row in rows],
        huggingface_settings=lambda encoder: {"problem_type": "multi_label_classification"},
    ),
    "regression": Kind(
        parse=readers.parse_score,
        infer=readers.task_fields_from_scores,
        warnings=readers.score_warnings,
        encode=lambda score, task: score,
        dtype=np.float32,
        has_classes=False,
        targets=lambda scores, task: task.normalize_scores(scores).astype(np.float32),
        labels_of_targets=lambda targets, task: task.denormalize_scores(targets),
        loss=lambda logits, targets: (logits[:, 0] - targets).square(),
        uniform_loss=lambda task: 1.0,
        predict=lambda outputs, task: task.denormalize_scores(outputs.logits[:, 0]),
        activation=lambda logits: logits,
        baseline_name="always predicting the mean score",
        decode=lambda scores, task: scores.tolist(),
        huggingface_settings=lambda encoder: {"problem_type": "regression"},
        output_names=lambda task: ("score",),
    ),
    "choice": Kind(
        text_column=None,
        choice_columns=("choices",),
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
        activation=softmax,
        baseline=lambda task, train_labels, dev_labels, dev: {"accuracy": float(np.mean(1 / dev.row_sizes()[1]))},
        baseline_name="choosing at random",
        decode=lambda indices, task: indices.tolist(),
        columns=choice_columns,
        huggingface_task="MultipleChoice",
        huggingface_settings=choice_settings,
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
        encode=tags.encode_tags,
        dtype=object,
        has_row_logits=False,
        make_features=tags.make_tag_features,
        targets=tags.tag_targets,
        labels_of_targets=lambda targets, task: stack_labels([tags for tags, _ in targets]),
        model=lambda task: CrfTagModel if task.crf else TagModel,
        loss=tags.tag_loss,
        balance=lambda labels, num_classes: balanced_class_weights(tags.classes_of_words(labels), num_classes),
        num_terms=lambda targets: (targets != IGNORED).sum(1),
        uniform_loss=lambda task: math.log(task.num_labels),
        predict=tags.predict_tags,
        activation=softmax,
        compute_metrics=tags.compute_tag_metrics,
        baseline=tags.constant_tag_baseline,
        baseline_name="always predicting the most frequent tag",
        class_ids=tags.classes_of_words,
        class_scores=tags.score_tag_classes,
        decode=tags.decode_tags,
        columns=tags.tag_columns,
        output_formats=(".conll", ".jsonl"),
        huggingface_task="TokenClassification",
        huggingface_settings=lambda encoder: {},
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


def compute_metrics(task: Task, logits: NDArray, features: Features, examples: Examples) -> Metrics:
    """The task's metrics of logits of examples with labels."""
    assert examples.labels is not None
    kind = KINDS[task.kind]
    return kind.compute_metrics(kind.predict(Outputs(logits, features, examples), task), examples.labels, task)


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
    """The GLUE task, or a custom task with classes, scale and, unless set, kind inferred from the training labels.

    Classes are collected before rows are held out: all rows of a rare class may be held out."""
    if config.task is not None:
        assert config.data is not None
        if config.task in tags.TASK_COLUMNS:
            task = tags.define_tagging_task(config.task, config.data, config.crf)
            return with_windows(with_inferred_labels(task, "tags"), config.windows)
        if config.crf:
            raise ConfigError(f"--crf needs a tagging task ({', '.join(tags.TASK_COLUMNS)}), not {config.task}")
        return with_windows(get_glue_task(config.task, config.data), config.windows)
    assert config.train is not None
    dev_fraction = 0.1 if config.dev_fraction is None else config.dev_fraction
    given_kind: TaskKind | None = config.kind or ("tags" if tags.is_conll_file(config.train) else None)
    kind = KINDS[given_kind or "classification"]
    task = Task(
        name=config.train.name.split(".")[0],
        kind=given_kind or "classification",
        text=config.text or kind.text_column,
        text_b=config.text_b,
        choices=config.choices or kind.choice_columns,
        label=config.label or kind.label_column,
        crf=config.crf,
        metrics=(),
        splits={"train": str(config.train), "dev": str(config.dev or config.train)},
        dev_fraction=dev_fraction if config.dev is None else 0.0,
    )
    task = kind.find_columns(task, next(read_split_rows(task, "train", kind.read_rows)))
    return with_windows(with_inferred_labels(task, given_kind), config.windows)


def with_windows(task: Task, windows: int) -> Task:
    """The task with up to so many windows of each text."""
    if windows > 1 and (KINDS[task.kind].model is not text_model or task.text_b is not None):
        what = "pairs of texts" if task.text_b is not None else f"a task of kind {task.kind}"
        raise ConfigError(
            f"is {windows}; it must be 1 for {what}: single texts with a label have windows", field="windows"
        )
    return replace(task, windows=windows)


def with_inferred_labels(task: Task, kind: TaskKind | None) -> Task:
    """The task with classes or scale, metrics and, unless given, kind inferred from its training labels."""
    source = task.splits["train"]
    cells: dict[int, Any] = {}  # by line
    for row in read_split_rows(task, "train", KINDS[task.kind].read_rows):
        with add_line_to_errors(source, row.line):
            cells[row.line] = KINDS[task.kind].label_cell(task, row)
    kind = kind or readers.infer_task_kind(list(cells.values()))
    parsed = []
    for line, cell in cells.items():
        with add_line_to_errors(source, line):
            parsed.append(KINDS[kind].parse(cell))
    for warning in KINDS[kind].warnings(parsed):
        print(f"{source}: {warning}", file=sys.stderr)
    try:
        task = replace(task, kind=kind, **KINDS[kind].infer(parsed))
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    for line, label in zip(cells, parsed, strict=True):  # refused before anything is written
        with add_line_to_errors(source, line):
            KINDS[kind].encode(label, task)
    return task


def read_examples(task: Task, split: str) -> Examples:
    """All examples of a split; test splits may lack labels."""
    if split not in task.splits:
        raise ConfigError(f"task {task.name} has no split {split!r}; it has {', '.join(task.splits)}")
    rows = read_split_rows(task, split, KINDS[task.kind].read_rows)
    first = next(rows)
    has_labels = not split.startswith(TEST) or task.find_column(task.label, first.values) is not None
    examples = parse_examples(task, task.splits[split], chain([first], rows), has_labels)
    if task.dev_fraction and split in ("train", "dev"):
        return examples.select(train_or_dev_indices(task, split, len(examples)))
    return examples


def stream_examples(
    task: Task, path: Path, chunk_size: int, *, with_labels: bool = True, skip_rows: int = 0
) -> Iterator[Examples]:
    """The examples of a file in chunks, with their rows, after the first `skip_rows`; labels are read if the file has
    them and `with_labels`."""
    rows = KINDS[task.kind].read_rows(path, columns=task.columns, skip_malformed=task.skip_malformed and with_labels)
    first = next(rows)
    has_labels = with_labels and task.find_column(task.label, first.values) is not None
    rows = islice(chain([first], rows), skip_rows, None)
    while chunk := take_chunk(rows, chunk_size):
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


def train_or_dev_indices(task: Task, split: str, num_rows: int) -> NDArray:
    """Indices, in file order, of the held-out rows (dev) or of the other rows (train)."""
    if num_rows < 2:
        raise DataError(f"{task.splits[split]} has one row; holding out a dev row needs at least two, or a --dev file")
    held_out = min(max(1, round(num_rows * task.dev_fraction)), num_rows - 1)
    order = np.random.default_rng(0).permutation(num_rows)
    return np.sort(order[:held_out] if split == "dev" else order[held_out:])
