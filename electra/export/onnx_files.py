"""What a folder with ONNX files has: the files of a model, compared with PyTorch, and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

from electra.data.tokenizer import TOKENIZER_FILES, TOKENIZER_JSON, load_tokenizer
from electra.export.source import ExportSource
from electra.model.storage import copy_tokenizer_files
from electra.onnx.export import ExportableModel
from electra.onnx.verify import OnnxFile, write_verified_files
from electra.runfolder import write_file


def exportable_model(source: ExportSource) -> ExportableModel:
    """The model in fp32, with the inputs and outputs of its class."""
    return ExportableModel(source.model.float(), source.encoder, source.outputs, source.input_axes).eval()


def write_onnx_files(source: ExportSource, folder: Path, int8: bool, advance: Callable[[], None]) -> list[OnnxFile]:
    """Write the fp32 file of a model and, if asked for, its int8 file; see `write_verified_files`."""
    keep_head = source.purpose != "generator"  # whose head is most of it
    return write_verified_files(exportable_model(source), folder, int8=int8, keep_head=keep_head, advance=advance)


def copy_tokenizer_files_with_json(source: ExportSource, folder: Path) -> list[str]:
    """Copy the tokenizer files; JavaScript libraries read no vocab.txt, so tokenizer.json is written if it is
    missing."""
    copied = copy_tokenizer_files(source.folder, folder, source.length)
    if copied and TOKENIZER_JSON not in copied:
        tokenizer = load_tokenizer(folder)
        write_file(folder / TOKENIZER_JSON, tokenizer.library.to_str(pretty=True) + "\n")
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]
