"""Branches: settings come from the trunk, and contradictory ones are reported."""

import json
import shutil
from pathlib import Path

import pytest

from electra.cli import main
from electra.config import build_config, flat_values
from electra.errors import ConfigError, DataError
from electra.model.storage import read_model_config
from electra.pretraining.command import pretrain
from electra.pretraining.config import PretrainConfig, read_pretraining_state
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import find_model_folder
from electra.training.logging import read_metrics

SIZE = {"layers": 1, "width": 32, "heads": 2, "feedforward": 48, "embedding_width": 16}
ROWS = {"batch_size": 4, "length": 16, "evaluation_rows": 8, "device": "cpu"}


def train_trunk(shards: Path, output: Path, **settings) -> Path:
    """Train four steps."""
    base = {"data": shards, "output": output, "size": "tiny", "steps": 4, "schedule": "wsd", "decay_fraction": 0.0}
    pretrain(build_config(PretrainConfig, **base | SIZE | ROWS | settings))
    return output


@pytest.fixture(scope="session")
def trunk(shards, tmp_path_factory) -> Path:
    return train_trunk(shards, tmp_path_factory.mktemp("trunk") / "trunk")


def branch_config(shards: Path, trunk: Path, output: Path, **settings) -> PretrainConfig:
    base = {"data": shards, "output": output, "branch_from": trunk, "schedule": "decay", "steps": 2}
    return build_config(PretrainConfig, **base | ROWS | {"length": settings.pop("length", 16)} | settings)


def read_settings(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())["pretraining"]


@pytest.mark.parametrize(
    "settings",
    [
        {"style": "modern", "global_attention_every": 2, "local_attention": 4, "layers": 3, "heads": 1},
        {"recipe": "faithful", "warmup": 1.0, "seed": 5, "sharing": "none", "positions": 64, "generator_layers": 2},
        {"objective": "all-tokens-mlm", "optimizer": "adam", "sharing": "all"},
        {"objective": "electra-15", "generator": "unigram", "cross_document_attention": True},
        {"weight_decay": 0.4, "embedding_weight_decay": 0.3, "temperature": 2.0, "mask_fraction": 0.25, "dropout": 0.1},
        {"sharing": "none", "generator_width": 32, "phases": ("objective=mlm", "objective=frozen-rtd")},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_recipe_model_objective_optimizer_and_row_order_are_the_trunks(shards, tmp_path, capsys, settings):
    trunk = train_trunk(shards, tmp_path / "trunk", **settings)
    flags = f"--branch-from {trunk} --schedule decay --steps 2 --evaluation-rows 8 --device cpu"
    main(f"pretrain --data {shards} --output {tmp_path}/branch {flags}".split())
    assert "finished: 6 steps" in capsys.readouterr().out
    before, after = read_settings(trunk), read_settings(tmp_path / "branch")
    inherited = ("recipe", "size", "style", "optimizer", "generator", "seed", "length", "packing", "learning_rate")
    inherited += ("weight_decay", "embedding_weight_decay", "temperature", "mask_fraction", "dropout", "batch_size")
    inherited += ("cross_document_attention",)
    for name in inherited:
        assert after[name] == before[name], name
    assert after["objective"] == ("frozen-rtd" if "phases" in settings else before["objective"])
    shutil.rmtree(trunk)  # a branch with a checkpoint no longer needs its trunk
    main(f"pretrain --output {tmp_path}/branch --resume".split())


def test_a_branch_has_the_settings_of_its_trunks_phase(shards, tmp_path):
    phases = ("fraction=0.5,width=16,layers=1,learning-rate=7e-3,temperature=2", "mask-fraction=0.2")
    trunk = train_trunk(shards, tmp_path / "trunk", phases=phases, layers=2, embedding_width=8, generator_width=8)
    run = read_settings(trunk)
    expected = [(7e-3, 2.0, run["mask_fraction"]), (run["learning_rate"], 1.0, 0.2)]
    sizes = [(16, 1), (32, 2)]
    for checkpoint, size, values in zip(checkpoint_folders(trunk), sizes, expected, strict=True):
        config = branch_config(shards, checkpoint, tmp_path / checkpoint.name)
        branch = flat_values(config)
        assert tuple(branch[name] for name in ("learning_rate", "temperature", "mask_fraction")) == values
        assert pretrain(config).step > 2
        model = read_model_config(config.output)
        assert (model.discriminator.width, model.discriminator.layers) == size
        assert model.generator.layers == 2


def test_a_branch_continues_the_trunk_and_decays_to_zero(shards, trunk, tmp_path):
    config = branch_config(shards, trunk, tmp_path / "branch", log_every=1)
    assert pretrain(config).step == 6
    rates = [
        line["learning_rate"] / config.optimizer.learning_rate
        for run in (trunk, config.output)
        for line in read_metrics(run / "metrics.jsonl")
        if line["kind"] == "train"
    ]
    assert rates == pytest.approx([1.0, 0.75, 0.25])  # the trunk logs its last step only


@pytest.mark.parametrize("settings", [{"length": 8}, {"packing": "segment-pairs"}, {"seed": 7}], ids=str)
def test_a_branch_with_other_rows_starts_an_epoch_and_can_be_resumed(shards, trunk, tmp_path, settings):
    config = branch_config(shards, trunk, tmp_path / "branch", **settings)
    pretrain(config)
    state = read_pretraining_state(find_model_folder(config.output))
    assert (state.step, state.epoch, state.row) == (6, 1, 8)  # two steps of four rows
    extended = build_config(PretrainConfig, output=config.output, resume=True, steps=3, device="cpu")
    assert pretrain(extended).step == 7


def test_a_branch_of_a_later_phase_continues_its_epoch(shards, tmp_path):
    trunk = train_trunk(shards, tmp_path / "trunk", phases=("fraction=0.5", "fraction=0.5,temperature=0.9"))
    config = branch_config(shards, trunk, tmp_path / "branch")
    pretrain(config)
    state = read_pretraining_state(find_model_folder(config.output))
    assert (state.step, state.epoch, state.row) == (6, 0, 24)  # six steps of four rows


def test_a_trunk_that_was_initialised_from_another_model_has_that_models_size(shards, trunk, tmp_path):
    settings = {"init": trunk, "schedule": "linear", "size": "tiny"} | dict.fromkeys(SIZE)
    second = train_trunk(shards, tmp_path / "second", **settings)
    pretrain(branch_config(shards, second, tmp_path / "branch"))
    assert read_model_config(tmp_path / "branch").discriminator == read_model_config(trunk).discriminator


def test_a_checkpoint_outside_its_run_still_has_a_size(shards, trunk, tmp_path):
    checkpoint = shutil.copytree(find_model_folder(trunk), tmp_path / "checkpoint")
    assert branch_config(shards, checkpoint, tmp_path / "branch").model.width == 32


def test_a_checkpoint_outside_its_run_needs_the_optimizer_of_its_states(shards, trunk, tmp_path):
    checkpoint = shutil.copytree(find_model_folder(trunk), tmp_path / "checkpoint")
    config = branch_config(shards, checkpoint, tmp_path / "branch", optimizer="adamw")
    with pytest.raises(DataError, match="has optimizer states of muon, not of adamw; give --optimizer muon"):
        pretrain(config)
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "base"}, "layers was 1 and is now 12, width was 32 and is now 768"),
        ({"layers": 2}, "layers was 1 and is now 2; leave out these flags"),
        ({"generator_width": 8}, "generator_width was 16 and is now 8"),
        ({"sharing": "none"}, "sharing was embeddings and is now none"),
        ({"optimizer": "adam"}, "optimizer was muon and is now adam"),
        ({"objective": "mlm"}, "parts was generator and discriminator with rtd head and is now generator;"),
    ],
)
def test_settings_that_contradict_the_trunk_are_reported(shards, trunk, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        pretrain(branch_config(shards, trunk, tmp_path / "branch", **settings))


def test_settings_equal_to_the_trunks_may_be_given(shards, trunk, tmp_path):
    config = branch_config(shards, trunk, tmp_path / "branch", size="tiny", **SIZE, dropout=0.1, dry_run=True)
    assert pretrain(config).steps == 2


def test_folders_without_a_trunk_are_reported(run_config, shards, trunk, encoder_folder, tmp_path):
    with pytest.raises(ConfigError, match="feedforward was 48 and is now 64"):
        pretrain(run_config(branch_from=trunk))
    with pytest.raises(DataError, match="there is no folder nowhere"):
        branch_config(shards, Path("nowhere"), tmp_path / "branch")
    with pytest.raises(DataError, match="holds a model without training state; start from its weights with --init"):
        branch_config(shards, encoder_folder, tmp_path / "branch")
    assert not run_config().output.exists()


def test_the_trunks_size_is_not_a_default_beside_another_size(trunk):
    assert PretrainConfig.dependent_defaults({"branch_from": trunk, "size": "base"}).get("width") is None
    assert (
        PretrainConfig.dependent_defaults({"branch_from": checkpoint_folders(trunk)[0], "size": "tiny"})["width"] == 32
    )
