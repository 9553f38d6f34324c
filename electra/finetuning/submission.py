"""GLUE's submission: a zip of one file of predictions for each test split."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra.errors import ConfigError
from electra.finetuning.tasks import GLUE_TASKS, TEST, Task
from electra.runfolder import write_file

Predictions = Mapping[str, Sequence[Any] | np.ndarray]  # by `entry`: numbers of classes, or scores


def entry(task: Task, split: str) -> str:
    """The name of a test split among predictions: the task's, for MNLI's second `mnli_mismatched`."""
    return task.name + split.removeprefix(TEST)


ENTRIES = {
    entry(task, split): (task, file) for task in GLUE_TASKS.values() for split, file in task.submission_files.items()
}


def write_submission(path: Path, predictions: Predictions) -> None:
    """Write the zip of these predictions; the site wants all files, so tell the user of `missing_files`."""
    unknown = [name for name in predictions if name not in ENTRIES]
    if unknown:
        raise ConfigError(f"GLUE has no file for {', '.join(unknown)}; it has them for {', '.join(ENTRIES)}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, predicted in predictions.items():
            task, file = ENTRIES[name]
            archive.writestr(zipfile.ZipInfo(file), content(task, np.asarray(predicted)), zipfile.ZIP_DEFLATED)
    write_file(path, packed.getvalue())


def missing_files(predictions: Predictions) -> list[str]:
    """The files that the site wants and these predictions lack."""
    return [file for name, (_, file) in ENTRIES.items() if name not in predictions]


def content(task: Task, predicted: np.ndarray) -> str:
    """The lines of one file: names of classes, or scores within their bounds."""
    if task.score_range is not None:
        predicted = predicted.clip(*task.score_range)
    words = (f"{word:.3f}" if isinstance(word, float) else word for word in task.decode(predicted))
    lines = (f"{index}\t{word}\n" for index, word in enumerate(words))
    return "".join(["index\tprediction\n", *lines])
