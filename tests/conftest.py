"""Shared fixtures: small models, batches, shards, and finished runs that are trained once per session."""

import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis
import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic import write_rows

from electra import plotting
from electra.cli import main
from electra.config import build_config, check_setting_names, config_from_flat_values
from electra.data.loader import Batch
from electra.data.prepare import ShardConfig, shard
from electra.data.tokenizer import Vocabulary
from electra.finetuning.command import FinetuneResult, finetune
from electra.finetuning.config import FinetuneConfig
from electra.model.config import ElectraConfig, EncoderConfig, to_modern
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.objectives.objectives import OBJECTIVES
from electra.onnx import verify
from electra.pretraining.command import pretrain
from electra.pretraining.config import PretrainConfig
from electra.pretraining.recipes import recipe_settings
from electra.runfolder import write_checksums

torch.set_num_threads(1)
# nohup and background jobs of a shell start with these signals ignored, and electra keeps ignoring them
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("no deadline")

save_figure = plotting.save_figure


def save_empty_figure(path: Path, size: tuple[float, float], draw: object, dpi: int = 100) -> bool:
    path.touch()
    return True


@pytest.fixture(autouse=True, scope="session")
def stub_plotting():
    """Write empty files instead of plots, which would be most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plotting, "save_figure", save_empty_figure)
        yield


@pytest.fixture(autouse=True, scope="session")
def short_measurements():
    """Run each exported model once, instead of for a second, to measure its speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "TIMED_SECONDS", 0)
        yield


@pytest.fixture
def real_plots(monkeypatch):
    """Draw plots, for tests about them."""
    monkeypatch.setattr(plotting, "save_figure", save_figure)


VOCABULARY = Vocabulary(size=60, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)
WIDE = EncoderConfig(layers=2, width=24, heads=3, feedforward=40, embedding_width=16, vocab_size=60, positions=32)
NARROW = replace(WIDE, width=8, heads=1, feedforward=16)
MODERN = replace(to_modern(WIDE), layers=4, global_attention_every=3, local_attention=4)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return VOCABULARY


@pytest.fixture
def make_pair():
    """Build a small pair by sharing scheme, for an objective; with `all`, both parts have one size."""

    def build(
        sharing: str = "embeddings",
        dropout: float = 0.0,
        size: EncoderConfig = WIDE,
        objective: str = "rtd",
        auxiliary_heads: tuple[str, ...] = (),
    ) -> Electra:
        torch.manual_seed(0)
        wide = replace(size, dropout=dropout, attention_dropout=dropout)
        narrow = wide if sharing == "all" else replace(wide, width=8, heads=1, feedforward=16)
        needs = OBJECTIVES[objective]
        heads = {"head": needs.head or "rtd", "has_baseline": needs.has_baseline, "auxiliary_heads": auxiliary_heads}
        return Electra(ElectraConfig(generator=narrow, discriminator=wide, sharing=sharing, **heads))

    return build


@pytest.fixture
def make_batch():
    """Build a batch of random text: [CLS] words [SEP], then padding after `lengths` tokens."""

    def build(rows: int = 4, length: int = 16, lengths: list[int] | None = None, step: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1)
        input_ids = torch.randint(5, VOCABULARY.size, (rows, length), generator=generator)
        ends = torch.tensor(lengths or [length] * rows)[:, None]
        position = torch.arange(length)
        input_ids = torch.where(position == 0, VOCABULARY.cls_id, input_ids)
        input_ids = torch.where(position == ends - 1, VOCABULARY.sep_id, input_ids)
        input_ids = torch.where(position >= ends, VOCABULARY.pad_id, input_ids)
        attention_mask = None if lengths is None else position < ends
        return Batch(input_ids, torch.tensor(step), torch.arange(rows), attention_mask)

    return build


WORDS = [
    *("the", "big", "small", "red", "."),
    *("cat", "sat", "on", "mat"),
    *("dog", "ran", "in", "house"),
    *("bird", "flew", "over", "tree"),
]


def simple_text(documents: int) -> str:
    """Sentences of a small grammar: who did what where."""
    lines = []
    for number in range(documents):
        draw = torch.randint(0, 1000, (8,), generator=torch.Generator().manual_seed(number)).tolist()
        who = draw[0] % 3  # cats sit on mats, dogs run in houses, birds fly over trees
        animal, did, where, what = WORDS[5 + 4 * who : 9 + 4 * who]
        adjective = ("big", "small", "red")[draw[1] % 3]
        lines += [" ".join(f"the {adjective} {animal} {did} {where} the {what} ." for _ in range(1 + draw[2] % 3)), ""]
    return "\n".join(lines)


def make_simple_shards(folder: Path, tokens: list[str]) -> Path:
    """Shards of simple text, with a tokenizer of these tokens."""
    (folder / "text.txt").write_text(simple_text(1500))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens]) + "\n")
    shard(
        build_config(
            ShardConfig,
            corpus=str(folder / "text.txt"),
            tokenizer=folder / "vocab.txt",
            output=folder / "shards",
            validation_fraction=0.1,
            workers=1,
        )
    )
    return folder / "shards"


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A folder of shards of simple text, with its tokenizer."""
    return make_simple_shards(tmp_path_factory.mktemp("text"), WORDS)


@pytest.fixture(scope="session")
def word_piece_shards(tmp_path_factory):
    """The same text with a tokenizer that splits two of its words."""
    whole = [word for word in WORDS if word not in ("small", "house")]
    return make_simple_shards(tmp_path_factory.mktemp("pieces"), [*whole, "sm", "##all", "hou", "##se"])


def small_run(data: Path, output: Path, **settings) -> PretrainConfig:
    """The config of a run that takes about a second; `settings` replace the defaults below."""
    size = {"layers": 1, "width": 32, "heads": 2, "feedforward": 64, "embedding_width": 16}
    size |= {} if settings.get("objective") == "mlm" else {"generator_width": 32}
    rows = {"length": 16, "batch_size": 8, "evaluation_rows": 64, "steps": 20}
    intervals = {"log_every": 5, "evaluate_every": 20, "save_every": 10}
    base = {"data": data, "output": output, "size": "tiny", "device": "cpu"}
    base |= {"learning_rate": 3e-3, "unigram_output_bias": False, "cooccurrence_embeddings": False}
    check_setting_names(PretrainConfig, settings)
    return config_from_flat_values(
        PretrainConfig, recipe_settings("fast", "tiny") | base | size | rows | intervals | settings
    )


@pytest.fixture
def run_config(shards, tmp_path, request):
    """Build the config of a small run in tmp_path; whole-word masking is of text with word pieces."""

    def build(output: str = "run", **settings) -> PretrainConfig:
        data = request.getfixturevalue("word_piece_shards") if settings.get("whole_word_masking") else shards
        return small_run(**{"data": data, "output": tmp_path / output} | settings)

    return build


def run(command: str, capsys) -> str:
    """What a command prints."""
    main(command.split())
    return capsys.readouterr().out


def error_message(command: str | list[str], capsys) -> str:
    """The error of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as exit:
        main(command.split() if isinstance(command, str) else command)
    assert exit.value.code == 2
    return capsys.readouterr().err


@dataclass(frozen=True)
class Finetuned:
    """A finished fine-tuning: do not change its files."""

    config: FinetuneConfig
    result: FinetuneResult
    output: Path
    dev: Path


@pytest.fixture(scope="session")
def finetuned(encoder_folder, tmp_path_factory):
    """A fine-tuning of three classes with two seeds."""
    folder = tmp_path_factory.mktemp("finetuned")
    train = write_rows(folder / "train.jsonl", "classification", 240, seed=0)
    dev = write_rows(folder / "dev.jsonl", "classification", 60, seed=1)
    files = {"model": encoder_folder, "train": train, "dev": dev, "output": folder / "out", "device": "cpu"}
    tuning = {"epochs": 8, "batch_size": 16, "learning_rate": 5e-3, "layer_decay": 1.0, "dropout": 0.0, "length": 32}
    config = build_config(FinetuneConfig, **files, **tuning, seeds=2, ensemble=True)
    return Finetuned(config, finetune(config), folder / "out", dev)


@pytest.fixture(scope="session")
def finished_run(shards, tmp_path_factory) -> Path:
    """The folder of a finished small run of 20 steps, with checkpoints of steps 10 and 20; do not change it."""
    config = small_run(shards, tmp_path_factory.mktemp("finished") / "run")
    pretrain(config)
    return config.output


@pytest.fixture
def finished_copy(finished_run, run_config) -> PretrainConfig:
    """The config that resumes a copy of the finished run."""
    config = run_config(resume=True)
    shutil.copytree(finished_run, config.output)
    return config


@pytest.fixture(scope="session")
def encoder_folder(shards, tmp_path_factory):
    """A model folder of a small untrained discriminator, with the tokenizer of simple text."""
    return saved_discriminator(WIDE, tmp_path_factory.mktemp("encoder") / "model", shards / "tokenizer")


@pytest.fixture(scope="session")
def modern_folder(shards, tmp_path_factory):
    """The same in the modern style."""
    return saved_discriminator(MODERN, tmp_path_factory.mktemp("modern") / "model", shards / "tokenizer")


def change_weights(folder: Path) -> None:
    """Give a model folder slightly other weights."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: 1.01 * weight for name, weight in weights.items()}, folder / "model.safetensors")
    write_checksums(folder)


def saved_discriminator(size: EncoderConfig, folder: Path, tokenizer: Path) -> Path:
    """A model folder of an untrained discriminator with the vocabulary of simple text."""
    torch.manual_seed(0)
    size = replace(size, vocab_size=len(WORDS) + 5, init_std=0.2)
    save_model(Electra(ElectraConfig(generator=None, discriminator=size, sharing="none")), folder, tokenizer)
    return folder
