"""`electra embed`: the embeddings of texts, and of files of any length."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from electra.data.files import as_text_file, open_streams, require_text_file
from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError, DataError, import_optional
from electra.finetuning.jobs import find_model_to_finetune
from electra.finetuning.predict import CHUNK_SIZE
from electra.finetuning.readers import FORMATS, Row, decode_lines, read_rows
from electra.finetuning.storage import load_pretrained, weight_checksums
from electra.finetuning.tasks import add_line_to_errors, check_text, take_chunk
from electra.formatting import format_count, join_first_names
from electra.progress import show_row_count
from electra.resumable import ResumableFile, check_output_file, content_checksum, open_resumable
from electra.serving.config import EmbedConfig
from electra.serving.embedder import Embedder
from electra.serving.inference import TextResults, read_lines, truncation_note
from electra.training.hardware import choose_device, choose_dtype

LINES = ".txt"  # one text per line
NPY, PARQUET = ".npy", ".parquet"  # outputs


@dataclass(frozen=True)
class Embedding:
    """The embedding of a text."""

    vector: list[float]
    is_truncated: bool

    def __str__(self) -> str:
        start = " ".join(f"{number:.4f}" for number in self.vector[:8])
        note = truncation_note(self.is_truncated)
        return f"{len(self.vector)} dimensions: {start} …  (--json prints all){note}"


@dataclass(frozen=True)
class EmbedResult:
    """The file of embeddings."""

    output: str
    rows: int
    dimensions: int
    truncated: int

    def __str__(self) -> str:
        truncated = f"; {format_count(self.truncated, 'text')} truncated to --length" if self.truncated else ""
        return f"{self.output}: {format_count(self.rows, 'embedding')} of {self.dimensions:,} dimensions{truncated}"


def embed(config: EmbedConfig) -> Embedding | TextResults | EmbedResult:
    if config.output is not None:
        return embed_file(config)
    path = config.input.input
    if path is not None and as_text_file(path, FORMATS) is not None:
        raise ConfigError(f"--input {path} is a table; --output vectors.npy writes its embeddings")
    texts = [config.input.text] if config.input.text is not None else read_lines(path)
    embedder, _ = load_embedder(config)
    results = embed_texts(embedder, texts)
    return results[0] if config.input.text is not None else TextResults(results)


def embed_texts(embedder: Embedder, texts: list[str]) -> list[Embedding]:
    vectors, is_truncated = embedder.embed_with_truncation(texts)
    return [Embedding(*each) for each in zip(vectors.tolist(), is_truncated.tolist(), strict=True)]


def load_embedder(config: EmbedConfig) -> tuple[Embedder, Path]:
    """The encoder of a run, a model folder, a fine-tuned model or a Hugging Face folder, and that folder."""
    folder = find_model_to_finetune(config.input.model)
    pretrained = load_pretrained(folder)
    positions, device = pretrained.encoder.config.positions, choose_device(config.input.device)
    embedder = Embedder(
        pretrained.encoder,
        pretrained.load_tokenizer(),
        device,
        config.length or min(positions, read_trained_length(folder) or positions),
        layers=config.layers,
        pooling=config.pooling,
        batch_size=config.batch_size,
        precision=choose_dtype(config.precision, device),
    )
    return embedder, folder


def embed_file(config: EmbedConfig) -> EmbedResult:
    """Write the embeddings of the texts of a file; a stopped process continues, and the output appears when it is
    complete."""
    path, output_path = config.input.input, config.output
    assert path is not None
    assert output_path is not None
    check_output_file(output_path, path, (NPY, PARQUET), config.overwrite)
    if output_path.suffix == PARQUET:
        import_optional("pyarrow.parquet", "writing .parquet")
        if not path.is_file():
            raise ConfigError(f"is {path}, a pipe, which is read twice to write .parquet; write .npy", field="input")
    embedder, folder = load_embedder(config)
    settings = {
        "model": weight_checksums(folder),
        "input": str(path),
        "content": content_checksum(path),
        "column": config.column,
        "layers": embedder.layers,
        "pooling": embedder.pooling,
        "length": embedder.length,
        "precision": str(embedder.precision),
    }
    with open_resumable(output_path, settings) as output:
        rows, embedder.truncated = output.state.get("rows", 0), output.state.get("truncated", 0)
        if not rows:
            output.file.write(npy_header(0, embedder.dimensions))
        with show_row_count(rows) as show:
            for texts in read_texts(path, config.column, embedder.device.type, skip_rows=rows):
                output.file.write(embedder.embed(texts).astype("<f4").tobytes())
                rows += len(texts)
                output.save_part({"rows": rows, "truncated": embedder.truncated})
                show(rows)
        if not rows:
            raise DataError(f"{path} contains no text; one text per line is expected")
        if output_path.suffix == NPY:
            output.file.seek(0)
            output.file.write(npy_header(rows, embedder.dimensions))  # their number is not known before the end
        else:
            write_parquet(output, path, config.column, embedder.dimensions)
    return EmbedResult(str(output_path), rows, embedder.dimensions, embedder.truncated)


def read_texts(path: Path, column: str, device_type: str, skip_rows: int = 0) -> Iterator[list[str]]:
    """The texts of a file in chunks for a device, after the first `skip_rows`: lines of a .txt file, or a column."""
    is_lines = require_text_file(path, (LINES, *FORMATS), "files to embed").format == LINES
    rows = islice(read_lines_as_rows(path, column) if is_lines else read_rows(path), skip_rows, None)
    while chunk := take_chunk(rows, CHUNK_SIZE, device_type):
        texts = []
        for row in chunk:
            with add_line_to_errors(str(path), row.line):
                if column not in row.values:
                    present = join_first_names([repr(name) for name in row.values], 20)
                    raise DataError(f"no column {column!r}; the columns are {present}; --column sets it")
                texts.append(check_text(row.values[column], f"column {column!r}"))
        yield texts


def read_lines_as_rows(path: Path, column: str) -> Iterator[Row]:
    """Every line of a file, also an empty one: row i of the output is line i."""
    with open_streams(require_text_file(path, (LINES,))) as (decompressed, _):
        for number, line in enumerate(decode_lines(path, decompressed), start=1):
            yield Row(number, {column: line.rstrip("\r\n")})


def npy_header(rows: int, dimensions: int) -> bytes:
    """The start of an .npy file of float32; numpy pads it so that its size does not depend on the number of rows."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, dimensions)})
    return file.getvalue()


def write_parquet(output: ResumableFile, path: Path, column: str, dimensions: int) -> None:
    """Write texts and embeddings as a table; the partial file, an .npy file without its number of rows, stays until it
    is complete."""
    import pyarrow
    import pyarrow.parquet

    vector_type = pyarrow.list_(pyarrow.float32(), dimensions)
    schema = pyarrow.schema([(column, pyarrow.string()), ("embedding", vector_type)])
    output.file.seek(len(npy_header(0, dimensions)))
    output.complete = output.table
    with pyarrow.parquet.ParquetWriter(output.complete, schema) as writer:
        for texts in read_texts(path, column, "cpu"):
            values = np.frombuffer(output.file.read(4 * dimensions * len(texts)), "<f4")
            vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values), type=vector_type)
            writer.write_table(pyarrow.table([pyarrow.array(texts), vectors], schema))
