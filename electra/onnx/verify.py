"""Compares the ONNX files of a model with PyTorch, at several lengths and with padding, and measures their speed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.errors import DataError
from electra.onnx.export import FP32, HIDDEN, INT8, ExportableModel, open_session, output_names, write_onnx
from electra.onnx.quantize import write_int8

LENGTHS = (1, 16, 128, 200)  # and the longest
ROWS = 3
MAX_SCORES = 2**28  # attention logits of a layer in memory; fewer rows of longer texts
MAX_DIFFERENCE = 1e-4  # fp32: of an output, as a fraction of the largest output if that is above 1
MIN_COSINE, MIN_FRACTION = 0.9, 0.99  # int8: of the hidden states of random texts, and of how many tokens
TIMED_LENGTH = 128
TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file, compared with PyTorch."""

    name: str
    megabytes: float
    largest_difference: float  # of an output
    lowest_cosine: float  # of a token's hidden state
    milliseconds: float  # for one text of `TIMED_LENGTH` tokens


@dataclass(frozen=True)
class BatchDifference:
    """Outputs at the tokens, without padding, of one batch."""

    length: int
    largest_difference: float
    allowed_difference: float
    cosines: NDArray  # [tokens] of hidden states


def write_verified_files(
    model: ExportableModel, folder: Path, int8: bool, advance: Callable[[], None]
) -> list[OnnxFile]:
    """Write the fp32 file of a model and, if asked for, its int8 file, each after a comparison with PyTorch; calls
    `advance` once when the model is traced, and after each length of each file."""
    write_onnx(model, folder / FP32)
    advance()
    files = [verify_fp32(model, folder / FP32, advance)]
    if int8:
        write_int8(model, folder / FP32, folder / INT8)
        files.append(verify_int8(model, folder / INT8, advance))
    return files


def count_advances(model: ExportableModel, int8: bool) -> int:
    """How often `write_verified_files` calls `advance`."""
    return 1 + (1 + int8) * len(verified_lengths(model))


def verify_fp32(model: ExportableModel, path: Path, advance: Callable[[], None]) -> OnnxFile:
    """Compare an fp32 file with PyTorch; raises a DataError if their outputs differ."""
    comparisons = list(compare(model, path, advance))
    for each in comparisons:
        if not each.largest_difference <= each.allowed_difference:  # also NaN
            raise DataError(
                f"the ONNX file is wrong: at {each.length} tokens its outputs differ by {each.largest_difference:.1e} "
                f"from PyTorch, more than {each.allowed_difference:.1e}, and nothing was written; use --to huggingface "
                "and report this"
            )
    return describe(path, comparisons, model)


def verify_int8(model: ExportableModel, path: Path, advance: Callable[[], None]) -> OnnxFile:
    """Compare an int8 file with PyTorch; raises a DataError if its hidden states differ much."""
    comparisons = list(compare(model, path, advance))
    cosines = np.concatenate([each.cosines for each in comparisons])
    fraction = float(np.mean(cosines >= MIN_COSINE))
    if not fraction >= MIN_FRACTION:
        raise DataError(
            f"int8 is too coarse for this model: the hidden states of only {fraction:.1%} of the tokens have a cosine "
            f"of {MIN_COSINE} or more with those of PyTorch, and nothing was written; leave out --int8"
        )
    return describe(path, comparisons, model)


def describe(path: Path, comparisons: list[BatchDifference], model: ExportableModel) -> OnnxFile:
    session = open_session(path)
    inputs = model.sample_inputs(1, timed_length(model))
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    return OnnxFile(
        name=f"{path.parent.name}/{path.name}",
        megabytes=path.stat().st_size / 1e6,
        largest_difference=max(each.largest_difference for each in comparisons),
        lowest_cosine=float(min(each.cosines.min() for each in comparisons)),
        milliseconds=measure_milliseconds(lambda: session.run(None, arrays)),
    )


def compare(model: ExportableModel, path: Path, advance: Callable[[], None]) -> Iterator[BatchDifference]:
    """Compare an ONNX file with PyTorch at all lengths; calls `advance` after each."""
    session = open_session(path, [HIDDEN])
    for length in verified_lengths(model):
        inputs = model.sample_inputs(rows_that_fit(model, length), length)
        with torch.inference_mode():
            expected = model(**inputs)
        results = session.run(list(expected), {name: tensor.numpy() for name, tensor in inputs.items()})
        actual = {name: torch.from_numpy(result) for name, result in zip(expected, results, strict=True)}
        yield compare_batch(expected, actual, inputs["attention_mask"].bool())
        advance()


def compare_batch(expected: dict[str, Tensor], actual: dict[str, Tensor], is_token: Tensor) -> BatchDifference:
    """Compare the outputs, those of tokens without padding, and the hidden states."""
    differences, largest = [], [1.0]
    for name in output_names(expected):
        assert expected[name].shape == actual[name].shape, name
        at_tokens = expected[name].shape[: is_token.dim()] == is_token.shape
        pair = [each[is_token] if at_tokens else each for each in (expected[name], actual[name])]
        largest.append(float(pair[0].abs().max()))
        differences.append(float((pair[0] - pair[1]).abs().max()))
    mask = is_token.flatten(0, -2)  # [rows, L]: choices are rows of the encoder
    cosines = torch.cosine_similarity(expected[HIDDEN][mask].double(), actual[HIDDEN][mask].double(), dim=-1)
    return BatchDifference(
        is_token.shape[-1], float(np.max(differences)), MAX_DIFFERENCE * max(largest), cosines.numpy()
    )


def verified_lengths(model: ExportableModel) -> list[int]:
    """The lengths to compare at, with the longest."""
    longest = model.encoder.config.positions
    return sorted({length for length in LENGTHS if length < longest} | {longest})


def rows_that_fit(model: ExportableModel, length: int) -> int:
    """Rows of a batch, one if the attention logits of more would need much memory."""
    return ROWS if ROWS * model.encoder.config.heads * length**2 <= MAX_SCORES else 1


def timed_length(model: ExportableModel) -> int:
    return min(TIMED_LENGTH, model.encoder.config.positions)


def measure_milliseconds(function: Callable[[], Any]) -> float:
    """The shortest of the times of repeated calls."""
    function()  # the first call allocates memory
    times: list[float] = []
    start = time.perf_counter()
    while not times or time.perf_counter() - start < TIMED_SECONDS:
        before = time.perf_counter()
        function()
        times.append(time.perf_counter() - before)
    return 1000 * min(times)


def measure_torch_milliseconds(model: ExportableModel) -> float:
    """The time of PyTorch for one text."""
    inputs = model.sample_inputs(1, timed_length(model))
    with torch.inference_mode():
        return measure_milliseconds(lambda: model(**inputs))
