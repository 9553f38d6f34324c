"""Multiple choice: the choices of a row, the forms in which a label names one of them, and predictions."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from electra.errors import DataError
from electra.finetuning.features import Outputs, softmax
from electra.finetuning.readers import ChoiceLabel, Row, class_name_from_cell
from electra.finetuning.tasks import Task, check_text, get_cell, get_text

MAX_CHOICES = 26

CHOICE_NAMES: dict[ChoiceLabel, Callable[[list[str]], list[Any]]] = {
    # what labels and predictions call the choices of a row; of forms that fit equally well the first is taken
    "text": lambda choices: choices,
    "index": lambda choices: list(range(len(choices))),
    "letter": lambda choices: list(ascii_uppercase[: len(choices)]),
    "small letter": lambda choices: list(ascii_lowercase[: len(choices)]),
    "number": lambda choices: list(range(1, len(choices) + 1)),
}


def read_choices(task: Task, row: Row) -> list[str]:
    """The choices of a row, from one column with a list or a column each; of these, the last ones may be empty."""
    if len(task.choices) == 1:
        cells = get_cell(task, task.choices[0], row)
        if not isinstance(cells, list):
            raise DataError(
                f"column {task.choices[0]!r} holds a {type(cells).__name__}; it must be a list of texts (.jsonl or "
                ".parquet), or --choices must name one column per choice"
            )
        choices = [check_text(cell, f"choice {number}") for number, cell in enumerate(cells, start=1)]
    else:
        choices = [get_text(task, column, row) for column in task.choices]
        while choices and not choices[-1].strip():
            choices.pop()
    if not 2 <= len(choices) <= MAX_CHOICES:
        raise DataError(f"the number of choices is {len(choices)}; it must be 2 to {MAX_CHOICES}")
    if empty := [number for number, choice in enumerate(choices, start=1) if not choice.strip()]:
        raise DataError(f"choice {empty[0]} is empty; each choice must be a text")
    return [choice.strip() for choice in choices]


def find_columns(task: Task, row: Row) -> Task:
    """The task with the columns context and question, where no others are set and the first training row has texts
    there; says so."""
    used = (task.text, task.text_b, task.label, *task.choices)
    context, question = (
        name if isinstance(row.values.get(name), str) and name not in used else None for name in ("context", "question")
    )
    if found := [name for name in (None if task.text else context, None if task.text_b else question) if name]:
        print(f"{task.name}: reads the columns {' and '.join(found)}, too (--text, --text-b)", file=sys.stderr)
    return replace(task, text=task.text or context, text_b=task.text_b or question)


def read_choice_texts(task: Task, row: Row) -> list[tuple[str, ...]]:
    """A pair for each choice: context; question and choice. Without a context the question is the first text."""
    texts = [get_text(task, column, row) for column in (task.text, task.text_b) if column is not None]
    first, middle = texts[:1], texts[1:]
    return [(*first, " ".join([*middle, choice])) for choice in read_choices(task, row)]


def read_choice_label(task: Task, row: Row) -> tuple[Any, list[str]]:
    return get_cell(task, task.label, row), read_choices(task, row)


def parse_choice_label(cell: tuple[Any, list[str]]) -> tuple[str, list[str]]:
    """The label as a string, and the choices."""
    label, choices = cell
    name = label.strip() if isinstance(label, str) else class_name_from_cell(label)
    if not name:
        raise DataError("the label is empty; every row for training or evaluation needs one")
    return name, choices


def task_fields_from_choices(rows: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """The metric, and the form of the labels: the one that fits most rows; the others are reported when encoded."""

    def count_fitting(form: ChoiceLabel) -> int:
        return sum(name in map(str, CHOICE_NAMES[form](choices)) for name, choices in rows)

    return {"metrics": ("accuracy",), "choice_label": max(CHOICE_NAMES, key=count_fitting)}


def encode_choice(parsed: tuple[str, list[str]], task: Task) -> int:
    """The index of the choice that a label names."""
    name, choices = parsed
    assert task.choice_label is not None
    names = [str(each) for each in CHOICE_NAMES[task.choice_label](choices)]
    if name not in names:
        known = "the text of a choice" if task.choice_label == "text" else f"{names[0]} to {names[-1]}"
        raise DataError(
            f"the label is {name[:100]!r}; with {len(choices)} choices and the labels of the training rows it must be "
            f"{known}"
        )
    return names.index(name)


def choice_columns(task: Task, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """The right choice in the form of the labels, and the probabilities of all choices."""
    assert task.choice_label is not None
    logits, rows = outputs.logits, outputs.examples.rows
    for row, index, values in zip(rows, logits.argmax(1), softmax(logits).tolist(), strict=True):
        choices = read_choices(task, row)
        probabilities = [round(value, 4) for value in values[: len(choices)]]
        yield {"prediction": CHOICE_NAMES[task.choice_label](choices)[index], "probabilities": probabilities}
