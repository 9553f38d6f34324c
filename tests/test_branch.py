"""Branches: they have from their trunk what they cannot have otherwise, and say so where flags contradict it."""

import json
import shutil
from pathlib import Path

import pytest

from electra.cli import main
from electra.errors import ConfigError, DataError
from electra.model.storage import read_model_config
from electra.pretraining.command import pretrain
from electra.pretraining.config import PretrainConfig
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import model_folder

SMALL = "--layers 1 --width 32 --heads 2 --feedforward 48 --embedding-width 16"
ROWS = "--batch-size 4 --length 16 --evaluation-rows 8"


@pytest.fixture
def trunk(shards, tmp_path):
    """Make a trunk of four steps by command, with more flags."""

    def build(flags: str = "") -> Path:
        command = (
            f"pretrain --data {shards} --output {tmp_path}/trunk --size tiny --steps 4 --device cpu --schedule wsd"
        )
        main(f"{command} {SMALL} {ROWS} {flags}".split())
        return tmp_path / "trunk"

    return build


def branch(shards: Path, trunk: Path, flags: str = "") -> dict:
    """Two more steps, by command; returns what config.json says of them."""
    output = trunk.parent / "branch"
    command = f"pretrain --data {shards} --output {output} --branch-from {trunk} --schedule decay --steps 2"
    main(f"{command} --batch-size 4 --evaluation-rows 8 --device cpu {flags}".split())
    return json.loads((output / "config.json").read_text())["pretraining"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--sharing none --positions 64 --generator-layers 2",
        "--style modern --global-attention-every 2 --local-attention 4 --layers 3 --heads 1",
        "--recipe faithful --warmup 1 --seed 5",
        "--objective mlm",
        "--objective all-tokens-mlm --optimizer adam",
        "--generator unigram",
        "--sharing all --generator-width 32",
        "--sharing none --generator-width 32 --phases objective=mlm objective=frozen-rtd",
    ],
)
def test_the_model_and_how_it_is_trained_are_the_trunks(shards, trunk, capsys, flags):
    run = trunk(flags)
    record = branch(shards, run)
    assert "finished: 6 steps" in capsys.readouterr().out
    before = json.loads((run / "config.json").read_text())["pretraining"]
    for name in ("recipe", "size", "style", "optimizer", "generator", "seed", "length", "packing"):
        assert record[name] == before[name], name
    assert record["objective"] == ("frozen-rtd" if "phases" in flags else before["objective"])
    shutil.rmtree(run)  # a branch that has begun needs its trunk no more
    main(f"pretrain --output {run.parent}/branch --resume".split())


def test_a_trunk_that_began_with_another_model_has_a_size_of_its_own(shards, trunk, tmp_path):
    first = trunk().rename(tmp_path / "first")
    run = tmp_path / "trunk"
    main(f"pretrain --data {shards} --output {run} --init {first} --steps 4 {ROWS} --device cpu".split())
    branch(shards, run)
    assert read_model_config(tmp_path / "branch").discriminator == read_model_config(first).discriminator


def test_a_checkpoint_taken_out_of_its_run_still_tells_its_size(shards, trunk, tmp_path):
    alone = model_folder(trunk()).rename(tmp_path / "alone")
    assert branch(shards, alone)["width"] == 32


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--size base", "goes on as it was: --layers was 1 and is now 12, --width was 32 and is now 768, --heads was"),
        ("--layers 2", "--layers was 1 and is now 2; leave out the flags that say so"),
        ("--generator-width 8", "--generator-width was 16 and is now 8"),
        ("--sharing none", "--sharing was embeddings and is now none"),
        ("--optimizer adam", "--optimizer was muon and is now adam"),
        ("--objective mlm", "the model was a generator and a discriminator for verdicts and is now a generator; leave"),
        ("--length 8", "these batches have length 8, the saved position is one with length 16"),
    ],
)
def test_flags_that_contradict_the_trunk_are_refused_by_name(shards, trunk, capsys, flags, sentence):
    run = trunk()
    with pytest.raises(SystemExit, match="2"):
        branch(shards, run, flags)
    error = capsys.readouterr().err.splitlines()[-1]
    assert sentence in error
    assert "Traceback" not in error


def test_flags_that_repeat_the_trunks_are_taken(shards, trunk, capsys):
    branch(shards, trunk(), f"--size tiny {SMALL} --length 16 --dropout 0.1")
    assert "finished: 6 steps" in capsys.readouterr().out


def test_in_python_another_model_is_refused_before_there_is_a_run(run_config, trunk, encoder_folder):
    with pytest.raises(ConfigError, match="feedforward was 48 and is now 64"):
        pretrain(run_config(branch_from=trunk()))
    with pytest.raises(DataError, match="there is no folder nowhere"):
        pretrain(run_config(branch_from=Path("nowhere")))
    with pytest.raises(DataError, match="holds a model, not a run to branch from; go on from its weights with --init"):
        pretrain(run_config(branch_from=encoder_folder))
    assert not run_config().output.exists()


def test_another_size_is_not_mended_by_the_trunks_departures(trunk):
    run = trunk()
    assert PretrainConfig.defaults_for({"branch_from": str(run), "size": "base"}).get("width") is None
    assert PretrainConfig.defaults_for({"branch_from": str(checkpoint_folders(run)[0]), "size": "tiny"})["width"] == 32
