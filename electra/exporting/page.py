"""`electra export --to page`: a static page that runs a model in the browser, with all files that it needs.

The page is plain HTML, CSS and JavaScript modules (`static/`), onnxruntime-web and @huggingface/tokenizers
(`node_packages.py`), and what is written here about one model: its ONNX files, its tokenizer, a map of its vocabulary,
and model.json.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from electra.data.tokenizer import SETTINGS, TOKENIZER_JSON, load_tokenizer
from electra.errors import DataError
from electra.exporting.config import ExportConfig
from electra.exporting.node_packages import FILES, VENDOR, require_node_packages
from electra.exporting.source import ExportSource, load_export_source
from electra.finetuning.choice import MAX_CHOICES
from electra.finetuning.predict import is_finetuned
from electra.model.storage import check_tokenizer, read_model_config
from electra.model.vocabulary_map import EPOCHS, compute_map
from electra.onnx.export import INPUTS, INT8, check_export_libraries, write_tokenizer
from electra.onnx.verify import OnnxFile, count_advances, write_verified_files
from electra.progress import create_progress_bar
from electra.runfolder import PARTIAL, create_folder_atomically, dump_json
from electra.training.checkpoint import find_model_folder

STATIC = Path(__file__).with_name("static")
MODEL = "model"  # folder of what belongs to the model
DESCRIPTION = "model.json"
EXAMPLES = "examples.txt"
STATIC_IGNORED = shutil.ignore_patterns(EXAMPLES, VENDOR.name, f"*{PARTIAL}")  # partial: of npm packages
MAX_EXAMPLES, MAX_EXAMPLE_CHARACTERS = 30, 2000
MAX_EXAMPLE_TEXTS = 2 + MAX_CHOICES
MAX_MAP_TOKENS = 65_536  # the neighbours of more would take minutes


@dataclass(frozen=True)
class PageResult:
    """The folder of a page."""

    output: str
    megabytes: float  # all files
    files: list[OnnxFile]  # the models, compared with PyTorch
    precision: dict[str, str]  # int8 or fp32, by file

    def __str__(self) -> str:
        lines = [f"{self.output}: a page of {self.megabytes:.1f} MB that runs the model in the browser"]
        lines += [
            f"  {file.name:<24}{self.precision[file.name]:>5}{file.megabytes:7.1f} MB  "
            f"largest difference {file.largest_difference:.1e}  lowest cosine {file.lowest_cosine:.4f}"
            for file in self.files
        ]
        return "\n".join([*lines, f"Open it with: {open_command(self.output)}"])


def open_command(folder: str | Path) -> str:
    """How to look at a page: browsers load no modules from file:// addresses."""
    return f"python -m http.server --bind 127.0.0.1 --directory {folder}   and visit http://127.0.0.1:8000"


def write_page(config: ExportConfig) -> PageResult:
    """Write a complete static site for a run, a model folder or an output of electra finetune."""
    check_export_libraries()
    examples = read_examples(config.examples or STATIC / EXAMPLES)
    sources = load_sources(config)
    main = next(iter(sources.values()))
    check_tokenizer(main.folder, main.encoder.config.vocab_size)
    require_node_packages()
    has_map = main.encoder.config.vocab_size <= MAX_MAP_TOKENS
    with create_folder_atomically(config.output) as draft, create_progress_bar() as progress:
        counts = [count_advances(source.exportable_model(), config.int8) for source in sources.values()]
        bar = progress.add_task("ONNX, compared with PyTorch", total=sum(counts) + EPOCHS * has_map)
        copy_scripts(draft)
        folder = draft / MODEL
        folder.mkdir()
        write_page_tokenizer(main, folder)
        files = [
            write_model(source, folder / f"{name}.onnx", config.int8, lambda: progress.advance(bar))
            for name, source in sources.items()
        ]
        precision = {name: "int8" if file.name == INT8 else "fp32" for name, file in zip(sources, files, strict=True)}
        if has_map:
            progress.update(bar, description="map of the vocabulary")
            vocabulary_map = compute_map(main.encoder.embeddings.token_table(), lambda: progress.advance(bar))
            (folder / "map.bin").write_bytes(vocabulary_map.to_bytes())
        description = describe(config.model, sources) | {"examples": examples, "precision": precision}
        if has_map:
            description["neighbors"] = vocabulary_map.neighbors.shape[1]
        (folder / DESCRIPTION).write_text(dump_json(description, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file()) / 1e6
    named = [replace(file, name=f"{name}.onnx") for name, file in zip(sources, files, strict=True)]
    return PageResult(str(config.output), size, named, {f"{name}.onnx": value for name, value in precision.items()})


def copy_scripts(folder: Path) -> None:
    """Copy the page, its scripts and their libraries, which are the same for all models."""
    shutil.copytree(STATIC, folder, dirs_exist_ok=True, ignore=STATIC_IGNORED)
    (folder / VENDOR.name).mkdir()
    for name in FILES:
        shutil.copyfile(VENDOR / name, folder / VENDOR.name / name)


def write_page_tokenizer(source: ExportSource, folder: Path) -> None:
    """Write those files of a model's tokenizer that the page reads."""
    if not write_tokenizer(source.folder, folder, source.length):
        raise DataError(f"{source.folder} has no tokenizer; copy the tokenizer.json or vocab.txt of its training")
    for file in set(folder.iterdir()) - {folder / TOKENIZER_JSON, folder / SETTINGS}:
        file.unlink()


def load_sources(config: ExportConfig) -> dict[str, ExportSource]:
    """The models of a page by name: a discriminator and, if there is one, its generator; or a fine-tuned model."""
    if is_finetuned(config.model):
        return {"classifier": load_export_source(config)}
    sources = {"discriminator": load_export_source(config)}
    if read_model_config(find_model_folder(config.model)).generator is not None:
        of_generator = ExportConfig(model=config.model, output=config.output, part="generator")
        sources["generator"] = load_export_source(of_generator)
    return sources


def write_model(source: ExportSource, path: Path, int8: bool, advance: Callable[[], None]) -> OnnxFile:
    """Write the ONNX file of a model in int8 or fp32."""
    with TemporaryDirectory() as folder:
        file = write_verified_files(source.exportable_model(), Path(folder), int8, advance)[-1]
        name = Path(file.name).name
        shutil.copyfile(Path(folder, name), path)
    return replace(file, name=name)


def describe(model: Path, sources: dict[str, ExportSource]) -> dict[str, Any]:
    """What the page's scripts need to know about a model."""
    main = next(iter(sources.values()))
    encoder, tokenizer = main.encoder.config, load_tokenizer(main.folder)
    task = None if main.finetuned is None else main.finetuned.task
    description: dict[str, Any] = {
        "name": model.resolve().name,
        "kind": "detection" if task is None else task.kind,
        "models": list(sources),
        "inputs": list(INPUTS[: 2 if encoder.is_modern() else 3]),
        "length": main.length,
        "parameters": {name: source.count_parameters() for name, source in sources.items()},
        "layers": encoder.layers,
        "width": encoder.width,
        "vocabulary": encoder.vocab_size,
        "tokens": dict(tokenizer.special_tokens),
    }
    if task is not None:
        description |= {
            "labels": list(task.labels),
            "columns": [column for column in (task.text, task.text_b) if column is not None],
            "has_entities": task.scheme is not None,
            "has_unanswerable": task.has_unanswerable,
            "null_threshold": task.null_threshold,
        }
    return description


def read_examples(file: Path) -> list[list[str]]:
    """The examples of a file, each a list of its text, or of the texts of a pair and choices."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not valid UTF-8; convert it, e.g. with iconv") from None
    texts = [[text.strip() for text in line.split("\t")][:MAX_EXAMPLE_TEXTS] for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{file} has no text; each line is an example")
    return [[text[:MAX_EXAMPLE_CHARACTERS] for text in pair] for pair in texts[:MAX_EXAMPLES]]
