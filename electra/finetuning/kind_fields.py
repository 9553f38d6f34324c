"""What a kind of task consists of, from the rows of a file to the exported model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.tokenizer import TextTokenizer
from electra.finetuning import readers
from electra.finetuning.features import Features, Outputs, make_features, softmax
from electra.finetuning.metrics import Metrics, Mistake, most_frequent_label
from electra.finetuning.models import TaskModel, WindowModel
from electra.finetuning.readers import Row
from electra.finetuning.tasks import Examples, RowReader, Task, get_cell, get_text
from electra.huggingface.names import Settings
from electra.model.config import EncoderConfig
from electra.training.logging import DIVERGENCE_RATIO


def read_text_or_pair(task: Task, row: Row) -> list[tuple[str, ...]]:
    return [tuple(get_text(task, column, row) for column in (task.text, task.text_b) if column is not None)]


def text_model(task: Task) -> type[TaskModel]:
    return WindowModel if task.windows > 1 else TaskModel


def constant_baseline(task: Task, train_labels: NDArray, dev_labels: NDArray, dev: Features) -> Metrics:
    """Dev metrics of the most frequent class, or the mean score, of the training rows."""
    return task.compute_metrics(np.broadcast_to(most_frequent_label(train_labels), dev_labels.shape), dev_labels)


def class_names(class_ids: NDArray, task: Task) -> list[str]:
    return [task.labels[class_id] for class_id in class_ids]


def class_mistakes(task: Task, outputs: Outputs, predicted: NDArray, labels: NDArray) -> Iterator[Mistake]:
    """Rows of which another class was predicted, with its probability."""
    probabilities = softmax(outputs.logits)
    for row in np.flatnonzero(predicted != labels):
        texts = [texts[row] for texts in (outputs.examples.texts, outputs.examples.texts_b) if texts is not None]
        confidence = float(probabilities[row, predicted[row]])
        yield Mistake(confidence, task.labels[predicted[row]], task.labels[labels[row]], " / ".join(texts))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of task, in the order of the data flow; the defaults are those of a text or pair with one output."""

    # from the rows of a file to examples
    read_rows: RowReader = readers.read_rows
    text_column: str | None = "text"  # unless set
    text_b_column: str | None = None  # unless set
    label_column: str = "label"  # unless set
    find_columns: Callable[[Task, Row], Task] = lambda task, row: task  # columns, from the first training row
    choice_columns: tuple[str, ...] = ()  # unless set
    read_texts: Callable[[Task, Row], list[tuple[str, ...]]] = read_text_or_pair  # of each sequence
    label_cell: Callable[[Task, Row], Any] = lambda task, row: get_cell(task, task.label, row)
    parse: Callable[[Any], Any]  # label cell → class name, class names, or score
    infer: Callable[[list[Any]], dict[str, Any]]  # parsed labels of all training rows → fields of the task
    warnings: Callable[[list[Any], Task], Iterator[str]] = lambda labels, task: iter(())
    """Parsed labels of all training rows → what is probably not intended."""
    unknown_labels: Callable[[Any, Task], list[str]] | None = None
    """Parsed label of another row → what of it no training row has, if that counts as an error and is not refused."""
    check_strictly: Callable[[Any], None] = lambda label: None  # raises what is otherwise a warning
    encode: Callable[[Any, Task], Any]  # parsed label → a row of `Examples.labels`
    dtype: type  # of `Examples.labels`
    has_target: Callable[[Any], bool] = lambda label: True  # whether an example can be trained on
    held_out_groups: Callable[[Examples], Sequence[Any]] = lambda examples: range(len(examples))
    """Examples → a value for each; those with equal values are held out together."""
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
    max_loss_ratio: float = DIVERGENCE_RATIO  # of a training loss to `uniform_loss`; above it the training diverged
    predict: Callable[[Outputs, Task], NDArray]  # a prediction in the form of `Examples.labels` for each example
    activation: Callable[[NDArray], NDArray] = softmax  # logits [N, num_labels] → probabilities, or scores
    compute_metrics: Callable[[NDArray, NDArray, Task], Metrics] = lambda predicted, labels, task: task.compute_metrics(
        predicted, labels
    )
    calibrate: Callable[[NDArray, NDArray, Task], Task] = lambda predicted, labels, task: task  # on the dev rows
    baseline: Callable[[Task, NDArray, NDArray, Features], Metrics] = constant_baseline
    baseline_name: str = "always predicting the most frequent class"
    class_ids: Callable[[NDArray], NDArray] | None = None  # labels or predictions → classes of the confusion matrix
    class_scores: Callable[[NDArray, NDArray, Task], dict[str, Metrics]] = lambda predicted, labels, task: {}
    """Predictions, labels → precision, recall and F1 of each class."""

    # from predictions to files
    decode: Callable[[NDArray, Task], list[Any]] = class_names  # labels or predictions → class names or scores
    columns: Callable[[Task, Outputs], Iterator[dict[str, Any]]]  # of `electra predict`; `class_columns` calls `decode`
    mistakes: Callable[[Task, Outputs, NDArray, NDArray], Iterator[Mistake]] = lambda *_: iter(())
    """Outputs, predictions, labels → wrong predictions, for errors.md."""
    output_formats: tuple[str, ...] = (".csv", ".tsv", ".jsonl")
    prediction_files: Callable[[Task, Outputs], Iterator[dict[str, Any]]] | None = None  # of each example, by file name
    huggingface_task: str = "SequenceClassification"  # in `TASK_CLASSES`
    huggingface_settings: Callable[[EncoderConfig], Settings] = lambda encoder: {}
    output_names: Callable[[Task], tuple[str, ...]] = lambda task: task.labels
