"""`electra export --to package`: a pair in at most 5 MB, with the card of the model that is part of the package."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from electra.config import all_defaults
from electra.data.tokenizer import SETTINGS, VOCAB_TXT, TextTokenizer, load_tokenizer, read_trained_length
from electra.errors import ConfigError, DataError
from electra.export.config import ExportConfig
from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Electra, meta_device
from electra.model.quantize import dequantize, quantize, relative_error, write_compressed
from electra.model.storage import (
    WEIGHTS,
    compressed_file,
    copy_tokenizer_files,
    load_model,
    load_model_tokenizer,
    write_config,
)
from electra.pretraining.config import BUDGETS, PretrainConfig, RunRecord, read_run_record
from electra.runfolder import CHECKPOINTS, create_folder_atomically
from electra.training.logging import METRICS, read_metrics

MAX_BYTES = 5_000_000  # of all files
RESOLUTIONS = (1 / 64, 1 / 32, 1 / 24, 1 / 16, 1 / 12, 1 / 8)  # of the weights, see `quantize`
CARD = "README.md"
NOT_IN_COMMAND = {"data", "output", "resume", "dry_run", "json", "device", "tensorboard", "track", "corrupted_rows"}
SHOWN_METRICS = ("unigram_rtd_auc", "rtd_auc", "mlm_loss", "unigram_mlm_loss", "mlm_accuracy")


def write_package(config: ExportConfig, folder: Path) -> tuple[str, int, list[str]]:
    """Write the pair in a model folder as finely quantized as MAX_BYTES allow; returns a description, the number of
    parameters and the tokenizer's files."""
    if not config.training_data:
        raise ConfigError(
            "needs a value: the text that the model was trained on and its licences", field="training_data"
        )
    electra = without_training_heads(load_model(folder))
    weights = {name: parameter.detach().float() for name, parameter in electra.named_parameters()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise DataError(f"the weights in {folder} are not finite ({name}); train the model again")
    with create_folder_atomically(config.output) as draft:
        write_config(electra.config, draft)
        files = write_small_tokenizer(folder, draft)
        for resolution in RESOLUTIONS:
            stored = quantize(weights, resolution)
            write_compressed(compressed_file(draft / WEIGHTS), stored)
            error = relative_error(weights, dequantize(stored))
            (draft / CARD).write_text(format_card(electra, folder, config.training_data, error), encoding="utf-8")
            size = sum(file.stat().st_size for file in draft.iterdir())
            if size <= MAX_BYTES:
                break
        else:
            raise ConfigError(
                f"{folder} takes {size / 1e6:.1f} MB in 8 bits, more than {MAX_BYTES / 1e6:g}; train a smaller model "
                "or a smaller vocabulary"
            )
    description = f"generator and discriminator in 8 bits, {size / 1e6:.2f} MB, relative error {error:.1%}"
    return description, sum(tensor.numel() for tensor in weights.values()), files


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
    tokenizer: TextTokenizer = load_model_tokenizer(folder)
    files = copy_tokenizer_files(folder, draft, read_trained_length(folder))
    if {VOCAB_TXT, SETTINGS} <= set(files) and load_tokenizer(draft / VOCAB_TXT).fingerprint == tokenizer.fingerprint:
        for name in set(files) - {VOCAB_TXT, SETTINGS}:
            (draft / name).unlink()
        return [VOCAB_TXT, SETTINGS]
    return files


def format_card(electra: Electra, folder: Path, training_data: str, error: float) -> str:
    """The model card, with the settings and results of the run if the folder is one of its checkpoints."""
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else None
    parts = "; ".join(f"{part} with {describe(each)}" for part, each in electra.config.encoder_configs().items())
    lines = [
        "---\nlanguage: en\nlicense: apache-2.0\ntags: [electra]\n---\n",
        "# The model in the package\n",
        f"A small English text encoder, pre-trained by electra: {parts}; vocabulary of "
        f"{vocab_size(electra.config):,} tokens. Its weights are stored in 8 bits with a scale for each row (relative "
        f"error {error:.1%}), in {WEIGHTS}.gz, and dequantized when they are read.\n",
        "It is for first steps: finding words that do not fit, predicting masked words, fine-tuning on small tasks. It "
        "repeats the biases of its text and is not fit for decisions about people.\n",
        "## Text\n",
        f"{training_data.rstrip('.')}. The weights have the license of electra, Apache 2.0.\n",
        *(describe_run(run, read_run_record(run)) if run is not None else []),
    ]
    return "\n".join(lines)


def describe(encoder: EncoderConfig) -> str:
    return f"{encoder.layers} layer{'s' if encoder.layers > 1 else ''} of width {encoder.width}"


def vocab_size(config: ElectraConfig) -> int:
    return next(iter(config.encoder_configs().values())).vocab_size


def describe_run(run: Path, record: RunRecord) -> list[str]:
    """How the model was trained, and its results on held-out text before it was quantized."""
    lines = read_metrics(run / METRICS)
    training: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "train"), {})
    evaluation: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "validation"), {})
    results = [f"| {name} | {evaluation[name]:.4f} |" for name in SHOWN_METRICS if name in evaluation]
    flags = shlex.join(explicit_flags(record))
    return [
        "## Training\n",
        f"{record.data.tokens.get('train', 0):,} tokens of text; {training.get('tokens', 0):,} were seen, with "
        f"repetition, in {training.get('seconds', 0) / 60:.1f} minutes on {record.environment.get('device', '?')}, "
        f"electra {record.environment.get('electra', '?')} at commit {record.environment.get('commit', '?')}. With the "
        "text in a folder corpus/ these commands make it again:\n",
        f"    electra tokenizer --corpus corpus/ --vocab-size {vocab_size(record.model)} --lowercase --output vocab/",
        "    electra shard --corpus corpus/ --tokenizer vocab/ --output shards/",
        f"    electra pretrain --data shards/ --output run/ {flags}",
        "    electra export --model run/ --to package --training-data '…' --output electra/packaged\n",
        "Results on held-out text, before quantization:\n",
        "| metric | |\n|---|---|",
        *results,
        "",
    ]


def explicit_flags(record: RunRecord) -> list[str]:
    """The flags of electra pretrain whose values differ from their defaults."""
    settings = record.pretraining
    base = {name: settings[name] for name in ("recipe", "size", "style")}
    defaults = all_defaults(PretrainConfig, base | dict.fromkeys(BUDGETS))
    flags = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if name in NOT_IN_COMMAND or (value == defaults.get(name) and name != "size"):
            continue
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return flags
