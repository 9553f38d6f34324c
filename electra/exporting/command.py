"""`electra export` and `electra import`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from electra.errors import ConfigError
from electra.exporting.card import write_card
from electra.exporting.config import ExportConfig, ImportConfig
from electra.exporting.package import write_package
from electra.exporting.page import PageResult, write_page
from electra.exporting.source import ExportSource, count_parameters, load_export_source
from electra.huggingface.convert import combine_into_pair, read_huggingface_model
from electra.model.storage import WEIGHTS, check_tokenizer, copy_tokenizer_files, write_model_files, write_tensors
from electra.onnx.export import FOLDER, check_export_libraries, write_task, write_tokenizer
from electra.onnx.verify import (
    TIMED_LENGTH,
    OnnxFile,
    count_advances,
    measure_torch_milliseconds,
    verified_lengths,
    write_verified_files,
)
from electra.progress import create_progress_bar
from electra.runfolder import CONFIG, create_folder_atomically, write_checksums, write_file, write_json
from electra.training.checkpoint import find_model_folder


@dataclass(frozen=True)
class ConversionResult:
    """The folder that an export or import wrote."""

    output: str
    model: str
    parameters: int
    tokenizer: list[str]  # its files
    ignored: list[str] = field(default_factory=list)  # tensors of the source that were not needed

    def __str__(self) -> str:
        tokenizer = (
            f"tokenizer files: {', '.join(self.tokenizer)}"
            if self.tokenizer
            else "no tokenizer: to use the model with text (electra detect, fill, embed; AutoTokenizer), copy the "
            f"tokenizer.json or vocab.txt it was trained with into {self.output}"
        )
        ignored = f"; ignored tensors: {', '.join(self.ignored)}" if self.ignored else ""
        return f"{self.output}: {self.model}, {self.parameters:,} parameters; {tokenizer}{ignored}"


@dataclass(frozen=True)
class OnnxResult(ConversionResult):
    """The same for ONNX, with the comparison of its files with PyTorch."""

    files: list[OnnxFile] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # in tokens, that were compared
    torch_milliseconds: float = 0.0  # for one text, as in `OnnxFile`

    def __str__(self) -> str:
        timed = f"one text of {min(TIMED_LENGTH, max(self.lengths))} tokens"
        lines = [
            super().__str__(),
            f"compared with PyTorch at {', '.join(map(str, self.lengths))} tokens, with padding",
        ]
        lines += [
            f"  {file.name:<28}{file.megabytes:7.1f} MB  largest difference {file.largest_difference:.1e}  "
            f"lowest cosine {file.lowest_cosine:.4f}  {file.milliseconds:.1f} ms"
            for file in self.files
        ]
        return "\n".join([*lines, f"  PyTorch takes {self.torch_milliseconds:.1f} ms for {timed}"])


def export(config: ExportConfig) -> ConversionResult | PageResult:
    """Write one model of a pair, or a fine-tuned model, for Hugging Face or as ONNX; or a page of it; or a pair for the
    package."""
    if config.to == "page":
        return write_page(config)
    if config.to == "package":
        description, parameters, files = write_package(config, find_model_folder(config.model))
        return ConversionResult(str(config.output), description, parameters, files)
    if config.to == "onnx":
        check_export_libraries()
    source = load_export_source(config)
    check_tokenizer(source.folder, source.encoder.config.vocab_size)
    write = write_onnx_folder if config.to == "onnx" else write_huggingface_folder
    return write(source, config)


def write_huggingface_folder(source: ExportSource, config: ExportConfig) -> ConversionResult:
    """Write a Hugging Face folder; that of an encoder is one of sentence-transformers, too."""
    with create_folder_atomically(config.output) as draft:
        write_tensors(draft / WEIGHTS, source.tensors)
        write_json(draft / CONFIG, source.settings)
        copied = copy_tokenizer_files(source.folder, draft, source.length, for_transformers=True)
        if source.purpose == "encoder":
            write_sentence_transformers_files(draft, source)
        write_card(source, draft, config)
    return ConversionResult(str(config.output), source.class_name, source.count_parameters(), copied)


def write_sentence_transformers_files(folder: Path, source: ExportSource) -> None:
    """Write the files with which sentence-transformers computes the mean of the hidden states, as electra embed."""
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(modules.items())
    ]
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": source.encoder.config.width, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / CONFIG, pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": source.length, "do_lower_case": False})
    write_file(folder / "modules.json", json.dumps(listed, indent=2) + "\n")


def write_onnx_folder(source: ExportSource, config: ExportConfig) -> OnnxResult:
    """Write a folder that transformers.js loads, after its ONNX files were compared with PyTorch."""
    model = source.exportable_model()
    with create_folder_atomically(config.output) as draft, create_progress_bar() as progress:
        bar = progress.add_task("ONNX, compared with PyTorch", total=count_advances(model, config.int8))
        write_json(draft / CONFIG, source.settings)
        copied = write_tokenizer(source.folder, draft, source.length)
        if source.finetuned is not None:
            write_task(draft, source.finetuned.task, source.length)
        (draft / FOLDER).mkdir()
        files = write_verified_files(model, draft / FOLDER, config.int8, lambda: progress.advance(bar))
        write_card(source, draft, config)
    return OnnxResult(
        output=str(config.output),
        model=source.class_name,
        parameters=source.count_parameters(),
        tokenizer=copied,
        files=files,
        lengths=verified_lengths(model),
        torch_milliseconds=measure_torch_milliseconds(model),
    )


def import_model(config: ImportConfig) -> ConversionResult:
    """Write a model folder from one Hugging Face folder, or from those of a discriminator and its generator."""
    models = [read_huggingface_model(config.source)]
    if config.generator is not None:
        models.append(read_huggingface_model(config.generator))
        parts = [model.part for model in models]
        if parts != ["discriminator", "generator"]:
            raise ConfigError(f"--from must be a discriminator and --generator a generator, not {' and '.join(parts)}")
    check_tokenizer(config.source, models[0].config.vocab_size)
    electra, tensors = combine_into_pair(models)
    with create_folder_atomically(config.output) as draft:
        tokenizer = write_model_files(electra, tensors, draft, config.source)
        write_checksums(draft)
    description = f"{' and '.join(model.part for model in models)}, sharing {electra.sharing}"
    ignored = [name for model in models for name in model.ignored]
    return ConversionResult(str(config.output), description, count_parameters(tensors), tokenizer, ignored)
