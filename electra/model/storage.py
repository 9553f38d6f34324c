"""Model folders: config.json with the configuration, model.safetensors with the weights, and tokenizer files.

Shared parameters are stored once, under their first name. Pickles are never read. The packaged model has its weights
in 8 bits, in model.safetensors.gz; they are dequantized when they are read.
"""

import errno
import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from electra.data.tokenizer import (
    SETTINGS,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCAB_TXT,
    TextTokenizer,
    complete_tokenizer_files,
    load_tokenizer,
    read_trained_length,
)
from electra.errors import DataError
from electra.formatting import join_first_names
from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Discriminator, Electra, meta_device
from electra.model.heads import RTDHead
from electra.runfolder import (
    CHECKSUM,
    CONFIG,
    convert_stored,
    create_folder_atomically,
    damaged_file_error,
    read_bounded,
    read_json,
    repair_advice,
    verify_checksum,
    write_checksums,
    write_file,
    write_json,
)

WEIGHTS = "model.safetensors"
ONNX_FILE = Path("onnx", "model.onnx")  # of electra export --to onnx; the names that transformers.js reads
ONNX_ADVICE = (
    "it has ONNX files, for electra serve, electra.load in Python and ONNX Runtime; other commands read the folder "
    "that they were exported from"
)
DISCRIMINATOR_HEAD = "discriminator.head."

# of compressed weights
COMPRESSED = ".gz"
SCALE = ".scale"  # suffix of the name of a matrix
MAX_LEVEL = 127
MAX_BYTES = 2**30  # of a decompressed file; it must not fill the memory
GZIP = 16 + zlib.MAX_WBITS  # zlib's name for the format


def save_model(electra: Electra, folder: Path, tokenizer_folder: Path | None = None) -> None:
    """Create a model folder with the tokenizer files of the folder `tokenizer_folder`."""
    with create_folder_atomically(folder) as draft:
        write_model_into(electra, draft, tokenizer_folder)
        write_checksums(draft)


def write_model_into(
    electra: Electra, folder: Path, tokenizer_folder: Path | None, trained_length: int | None = None
) -> None:
    """Write the files of a model into an existing folder."""
    weights = {name: parameter.detach() for name, parameter in electra.named_parameters()}
    write_model_files(electra.config, weights, folder, tokenizer_folder, trained_length)


def write_model_files(
    config: ElectraConfig,
    weights: dict[str, Tensor],
    folder: Path,
    tokenizer_folder: Path | None,
    trained_length: int | None = None,
) -> list[str]:
    """Write configuration, weights and tokenizer files; returns the names of the latter."""
    write_tensors(folder / WEIGHTS, weights)
    write_config(config, folder)
    return copy_tokenizer_files(tokenizer_folder, folder, trained_length)


def write_config(config: ElectraConfig, folder: Path) -> None:
    write_json(folder / CONFIG, {"model": asdict(config)})


def write_tensors(path: Path, tensors: dict[str, Tensor], checksum: bool = False) -> None:
    """Write a safetensors file with the metadata that `transformers` requires, or with a checksum of its tensors."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {"checksum": tensors_checksum(tensors)} if checksum else {"format": "pt"}  # two have a random order
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # also when the disk is full
        raise OSError(errno.EIO, f"cannot write ({error})", str(path)) from None


def serialize_tensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file with a checksum; equal content gives equal bytes.

    The library writes its metadata in a random order."""
    content = save(tensors, metadata | {"checksum": tensors_checksum(tensors)})
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # tensors stay aligned
    return len(header).to_bytes(8, "little") + header + content[end:]


def load_model(folder: Path) -> Electra:
    """Load a model folder in its stored precision; a missing discriminator head is newly initialised."""
    return build_model(read_model_config(folder), read_tensors(folder / WEIGHTS), folder / WEIGHTS)


def build_model(config: ElectraConfig, weights: dict[str, Tensor], path: Path) -> Electra:
    """A model with `weights`, which were read from `path`; a missing discriminator head is newly initialised."""
    with meta_device():
        electra = Electra(config)
    expected = dict(electra.named_parameters())
    needs_head = isinstance(electra.discriminator, Discriminator) and not has_rtd_head(weights)
    if needs_head:
        expected = {name: parameter for name, parameter in expected.items() if not name.startswith(DISCRIMINATOR_HEAD)}
    check_tensors(weights, expected, path)
    electra.load_state_dict(weights, strict=False, assign=True)
    if needs_head:
        discriminator = electra.require_discriminator()
        dtype = next(discriminator.encoder.parameters()).dtype
        discriminator.head = RTDHead(discriminator.encoder.config).to(dtype)
    return electra


def has_rtd_head(names: Iterable[str]) -> bool:
    """Whether a discriminator's head is among stored tensors; a model imported from an encoder has none."""
    return any(name.startswith(DISCRIMINATOR_HEAD) for name in names)


def is_huggingface_folder(folder: Path) -> bool:
    return "model_type" in read_json(folder / CONFIG)


def is_onnx_folder(folder: Path) -> bool:
    """Whether electra export --to onnx wrote a folder."""
    return (folder / ONNX_FILE).exists()


def read_model_config(folder: Path) -> ElectraConfig:
    """The configuration of a model folder."""
    settings = read_json(folder / CONFIG)
    if "model_type" in settings:
        if is_onnx_folder(folder):
            raise DataError(f"{folder} is not a model folder; {ONNX_ADVICE}")
        raise DataError(f"{folder} is a Hugging Face folder; import it with: electra import --from {folder} --output …")
    if "task" in settings:
        raise DataError(f"{folder} is a fine-tuned model; use it with electra predict, evaluate, finetune or export")
    if "model" not in settings:
        raise DataError(f"{folder / CONFIG} has no model; model folders are made by electra pretrain and import")
    config = convert_stored(settings["model"], ElectraConfig, folder / CONFIG)
    check_sizes_fit(folder, [folder / WEIGHTS], *config.encoder_configs().values())
    return config


def check_sizes_fit(folder: Path, weights: Iterable[Path], *encoders: EncoderConfig) -> None:
    """Check that the weight files of a folder may hold encoders of the sizes in its config.json.

    Done before anything is built: a damaged config.json must not take hours or all memory."""
    shapes = [shape for path in weights if path.exists() or is_compressed(path) for shape in read_shapes(path)]
    largest = max(chain.from_iterable(shapes), default=0)
    for encoder in encoders if shapes else ():
        sizes = {name: getattr(encoder, name) for name in ("width", "feedforward", "embedding_width", "vocab_size")}
        sizes |= {} if encoder.is_modern() else {"positions": encoder.positions, "segments": encoder.segments}
        limits = {"layers": (encoder.layers, len(shapes))} | {name: (size, largest) for name, size in sizes.items()}
        for name, (size, limit) in limits.items():
            if size > limit:
                raise DataError(f"{folder / CONFIG} has {name} {size:,}, but the weights have no more than {limit:,}")


def is_compressed(path: Path) -> bool:
    """Whether there is a compressed file instead of a file of weights."""
    return not path.exists() and compressed_file(path).exists()


def compressed_file(path: Path) -> Path:
    return path.with_name(path.name + COMPRESSED)


def read_tensors(path: Path) -> dict[str, Tensor]:
    if is_compressed(path):
        return read_compressed(compressed_file(path))
    with open_safetensors(path) as file:
        verify_checksum(path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        checksum = (file.metadata() or {}).get("checksum")
    if checksum is not None and checksum != tensors_checksum(tensors):
        raise damaged_file_error(path, "its checksum differs")
    return tensors


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """The checksum of tensors with their names, shapes and types."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return CHECKSUM + digest.hexdigest()


def read_tensor_names(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    if is_compressed(path):
        return list(read_compressed(compressed_file(path)))
    with open_safetensors(path) as file:
        return list(file.keys())


def read_shapes(path: Path) -> list[list[int]]:
    """The shapes of the tensors in a safetensors file, from its header."""
    if is_compressed(path):
        return read_compressed_shapes(compressed_file(path))
    with open_safetensors(path) as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (not a dict)


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    if not path.is_file():
        pickles = sorted(file.name for file in path.parent.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise DataError(
                f"{path.parent} has its weights in {pickles[0]}, a pickle, which can run code and is not read; convert "
                f"it to {WEIGHTS} if you trust it (transformers: save_pretrained)"
            )
        expected = ONNX_ADVICE if is_onnx_folder(path.parent) else f"a model folder has {CONFIG} and {WEIGHTS}"
        advice = repair_advice(path) or expected
        raise DataError(f"{path.parent} has no {path.name}; {advice}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise damaged_file_error(path, str(error)) from None


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Check that tensors read from `path` have the names and shapes of the model's parameters and are floats."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise DataError(f"{path} lacks {join_first_names(missing)}, which {CONFIG} requires")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise DataError(f"{path} has {join_first_names(unknown)}, which {CONFIG} does not describe")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DataError(f"{path}: {name} is {tensor.dtype}; only floating-point weights are supported")
        if tensor.shape != expected[name].shape:
            shape, required = tuple(tensor.shape), tuple(expected[name].shape)
            raise DataError(f"{path}: {name} has shape {shape}, but {CONFIG} requires {required}")


def load_model_tokenizer(folder: Path, vocab_size: int | None = None) -> TextTokenizer:
    """The tokenizer of a model folder; its ids must be in a token table of `vocab_size` entries."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise DataError(f"{folder} has no tokenizer; copy the tokenizer.json or vocab.txt it was trained with into it")
    for name in TOKENIZER_FILES:
        verify_checksum(folder / name)
    tokenizer = load_tokenizer(folder)
    if vocab_size is not None and tokenizer.vocabulary.size > vocab_size:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary.size:,} entries but the model {vocab_size:,}; "
            "use the tokenizer it was trained with"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has tokenizer.json or vocab.txt; settings for `transformers` alone are no tokenizer."""
    return any((folder / name).is_file() for name in (TOKENIZER_JSON, VOCAB_TXT))


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise if a folder's tokenizer cannot be loaded or has more entries than the model."""
    if has_tokenizer(folder):
        load_model_tokenizer(folder, vocab_size)


def warn_untrained_length(model: Path, length: int) -> None:
    """Print to standard error if rows may be longer than those that a model was trained on."""
    trained_length = read_trained_length(model)
    if trained_length is not None and trained_length < length:
        print(
            f"warning: {model} was trained on rows of up to {trained_length} tokens; its positions after them are "
            f"untrained; consider --length {trained_length}",
            file=sys.stderr,
        )


def copy_tokenizer_files(
    source: Path | None, folder: Path, trained_length: int | None = None, for_transformers: bool = False
) -> list[str]:
    """Copy the tokenizer files of the folder `source`, with `trained_length` if given; returns their names."""
    if source is None:
        return []
    for name in TOKENIZER_FILES:
        verify_checksum(source / name)
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if names and trained_length is not None and read_trained_length(source) != trained_length:
        settings = read_json(folder / SETTINGS) if SETTINGS in names else {}
        write_json(folder / SETTINGS, settings | {"model_max_length": trained_length})
    if for_transformers and {TOKENIZER_JSON, VOCAB_TXT} & set(names):
        complete_tokenizer_files(folder)
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


# Weights in 8 bits: each row of a matrix is integers and a scale, and the file is compressed. Weights of a row are
# close to normally distributed. With a scale of a fraction of their root mean square the integers near 0 are frequent,
# and Huffman coding stores a weight in about 6 bits at 1/16, 5 at 1/8 and 4 at 1/4; the error is 0.3 times the scale.


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


def read_compressed_shapes(path: Path) -> list[list[int]]:
    """The shapes of the weights in a compressed safetensors file, from its header: its length in 8 bytes, then JSON."""
    decompressor = zlib.decompressobj(GZIP)
    try:
        length = int.from_bytes(decompressor.decompress(read_bounded(path), 8), "little")
        header = json.loads(decompressor.decompress(decompressor.unconsumed_tail, min(length, MAX_BYTES) or 1))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        return [list(map(int, tensor["shape"])) for name, tensor in tensors.items() if not name.endswith(SCALE)]
    except (zlib.error, ValueError, AttributeError, KeyError, TypeError) as error:
        raise damaged_file_error(path, str(error)) from None
