"""Weights in 8 bits: each row of a matrix is integers and a scale, and the file is compressed.

Weights of a row are close to normally distributed. With a scale of a fraction of their root mean square the integers
near 0 are frequent, and Huffman coding stores a weight in about 6 bits at 1/16 and in 5 bits at 1/8; the error is
0.3 times the scale.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from electra.errors import DataError
from electra.runfolder import damaged_file_error, read_bounded, verify_checksum, write_file

COMPRESSED = ".gz"
SCALE = ".scale"  # suffix of the name of a matrix
MAX_LEVEL = 127
MAX_BYTES = 2**30  # of a decompressed file; it must not fill the memory
GZIP = 16 + zlib.MAX_WBITS  # zlib's name for the format


def quantize(tensors: Mapping[str, Tensor], resolution: float) -> dict[str, Tensor]:
    """Rows of integers with a scale of `resolution` times the root mean square of the row; vectors in fp16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            stored[name] = tensor.half()
        else:
            rows = tensor.float()
            root_mean_square = rows.square().mean(-1, keepdim=True).sqrt()
            lowest = rows.abs().amax(-1, keepdim=True) / MAX_LEVEL  # with which the largest weight has a level
            scale = torch.maximum(resolution * root_mean_square, lowest).clamp(min=1e-30).bfloat16()
            levels = (rows / scale.float()).round().clamp(-MAX_LEVEL, MAX_LEVEL)
            stored |= {name: levels.to(torch.int8), name + SCALE: scale}
    return stored


def dequantize(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 weights of what `quantize` returned."""
    return {
        name: tensor.float() * stored[name + SCALE].float() if name + SCALE in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def relative_error(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The norm of the differences between the matrices among `tensors` and those of `others`, relative to theirs."""
    matrices = {name: tensor.float() for name, tensor in tensors.items() if tensor.ndim > 1}
    difference = sum(float((matrix - others[name]).square().sum()) for name, matrix in matrices.items())
    return (difference / max(1e-30, sum(float(matrix.square().sum()) for matrix in matrices.values()))) ** 0.5


def write_compressed(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as a compressed safetensors file; equal tensors give equal bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, GZIP, 9, zlib.Z_HUFFMAN_ONLY)  # integers do not repeat in sequences
    write_file(path, compressor.compress(save(tensors)) + compressor.flush())


def read_compressed(path: Path) -> dict[str, Tensor]:
    """The fp32 weights of a compressed safetensors file."""
    verify_checksum(path)
    decompressor = zlib.decompressobj(GZIP)
    try:
        content = decompressor.decompress(read_bounded(path), MAX_BYTES)
        if not decompressor.eof:
            raise DataError(f"{path} is cut, or larger than {MAX_BYTES:,} bytes when it is decompressed")
        return dequantize(load(content))
    except (zlib.error, SafetensorError, RuntimeError) as error:  # RuntimeError: a scale that does not fit its matrix
        raise damaged_file_error(path, str(error)) from None
