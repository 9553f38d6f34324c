"""`electra export --to package`: a pair in at most 5 MB, in the format of the model in the package."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from electra.config import all_defaults, command_line_words
from electra.data.tokenizer import SETTINGS, VOCAB_TXT, TextTokenizer, load_tokenizer, read_trained_length
from electra.errors import ConfigError
from electra.exporting.card import CARD, describe_origin
from electra.exporting.config import ExportConfig
from electra.exporting.source import check_finite_weights, count_parameters
from electra.model.electra import Electra, meta_device
from electra.model.storage import (
    WEIGHTS,
    compressed_file,
    copy_tokenizer_files,
    dequantize,
    load_model,
    load_model_tokenizer,
    quantize,
    relative_error,
    write_compressed,
    write_config,
)
from electra.pretraining.config import BUDGETS, PretrainConfig, read_run_settings
from electra.pretraining.describe import describe_encoder
from electra.runfolder import create_folder_atomically

MAX_BYTES = 5_000_000  # of all files
RESOLUTIONS = tuple(1 / each for each in (64, 32, 16, 12, 8, 6, 5, 4, 3.5, 3.25, 3))  # of the weights, see `quantize`
NOT_IN_COMMAND = {"data", "output", "resume", "dry_run", "json", "device", "tensorboard", "track", "corrupted_rows"}


def write_package(config: ExportConfig, folder: Path) -> tuple[str, int, list[str]]:
    """Write the pair in a model folder as finely quantized as MAX_BYTES allow; returns a description, the number of
    parameters and the tokenizer's files."""
    if not config.training_data:
        raise ConfigError(
            "needs a value: the text that the model was trained on and its licences", field="training_data"
        )
    electra = without_training_heads(load_model(folder))
    weights = {name: parameter.detach().float() for name, parameter in electra.named_parameters()}
    check_finite_weights(weights, folder)
    with create_folder_atomically(config.output) as draft:
        write_config(electra.config, draft)
        files = write_small_tokenizer(folder, draft)
        for resolution in RESOLUTIONS:
            stored = quantize(weights, resolution)
            write_compressed(compressed_file(draft / WEIGHTS), stored)
            error = relative_error(weights, dequantize(stored))
            (draft / CARD).write_text(format_card(electra, folder, config, error), encoding="utf-8")
            size = sum(file.stat().st_size for file in draft.iterdir())
            if size <= MAX_BYTES:
                break
        else:
            raise ConfigError(
                f"{folder} takes {size / 1e6:.1f} MB in 8 bits, more than {MAX_BYTES / 1e6:g}; train a smaller model "
                "or a smaller vocabulary"
            )
    description = f"generator and discriminator in 8 bits, {size / 1e6:.2f} MB, relative error {error:.1%}"
    return description, count_parameters(weights), files


def without_training_heads(electra: Electra) -> Electra:
    """The pair without the heads that only pre-training uses."""
    electra.require_generator()
    electra.require_discriminator()
    with meta_device():
        smaller = Electra(replace(electra.config, auxiliary_heads=(), has_baseline=False))
    parameters = dict(electra.named_parameters())
    smaller.load_state_dict(
        {name: parameters[name] for name, _ in smaller.named_parameters()}, strict=False, assign=True
    )
    return smaller


def write_small_tokenizer(folder: Path, draft: Path) -> list[str]:
    """Copy the tokenizer's files; of a WordPiece tokenizer, only those from which an equal one can be built."""
    tokenizer = load_model_tokenizer(folder)
    files = copy_tokenizer_files(folder, draft, read_trained_length(folder))
    if {VOCAB_TXT, SETTINGS} <= set(files) and load_tokenizer(draft / VOCAB_TXT).fingerprint == tokenizer.fingerprint:
        for name in set(files) - {VOCAB_TXT, SETTINGS}:
            (draft / name).unlink()
        return [VOCAB_TXT, SETTINGS]
    return files


def format_card(electra: Electra, folder: Path, config: ExportConfig, error: float) -> str:
    """The model card, with the settings and results of the run if the folder is one of its checkpoints.

    `make packaged-model` adds language and license to that of the model in the package."""
    encoders = electra.config.encoder_configs()
    vocab_size = encoders["discriminator"].vocab_size
    parts = "; ".join(describe_encoder(part, encoder) for part, encoder in encoders.items())
    paragraphs = [
        "---\ntags: [electra]\n---",
        f"# {config.output.name}",
        f"A text encoder, pre-trained by electra: {parts}; vocabulary of {vocab_size:,} tokens. Its "
        f"weights are stored in 8 bits with a scale for each row (relative error {error:.1%}), in {WEIGHTS}.gz, and "
        "dequantized when they are read; results below were measured before they were quantized.",
        "It is for first steps: finding words that do not fit, predicting masked words, fine-tuning on small tasks. It "
        "repeats the biases of its text and is not fit for decisions about people.",
        *describe_origin(folder, config.training_data),
    ]
    if settings := read_run_settings(folder):
        tokenizer = load_model_tokenizer(folder)
        given, commands = "the text in a folder corpus/ and the tokenizer in vocab/", []
        if tokenizer.is_bert_wordpiece():
            given, flags = "the text in a folder corpus/", shlex.join(case_flags(tokenizer))
            commands = [f"electra tokenizer --corpus corpus/ --vocab-size {vocab_size} {flags} --output vocab/"]
        commands += [
            "electra shard --corpus corpus/ --tokenizer vocab/ --output shards/",
            f"electra pretrain --data shards/ --output run/ {shlex.join(explicit_flags(settings))}",
            f"electra export --model run/ --to package --training-data '…' --output {shlex.quote(config.output.name)}",
        ]
        paragraphs += [f"With {given} these commands make it again:"]
        paragraphs += ["\n".join(f"    {command}" for command in commands)]
    return "\n\n".join(paragraphs) + "\n"


def case_flags(tokenizer: TextTokenizer) -> list[str]:
    """The flags of electra tokenizer that determine case and accents of a WordPiece tokenizer."""
    normalizer = tokenizer.component_settings["normalizer"]
    values = {name: normalizer[name] for name in ("lowercase", "strip_accents")}
    return [word for name, value in values.items() if value is not None for word in command_line_words(name, value)]


def explicit_flags(settings: dict[str, Any]) -> list[str]:
    """The flags of electra pretrain whose values differ from their defaults."""
    base = {name: settings[name] for name in ("recipe", "size", "style")}
    defaults = all_defaults(PretrainConfig, base) | dict.fromkeys(BUDGETS)
    flags = []
    for name, value in settings.items():
        if name not in NOT_IN_COMMAND and value not in (None, ()) and (value != defaults.get(name) or name == "size"):
            flags += command_line_words(name, value)
    return flags
