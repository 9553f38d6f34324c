"""Model folders: whole or not there, and clear words for what cannot be read."""

import json

import pytest
import torch

from electra.errors import DataError
from electra.model.storage import load_model, save_model, written_whole


@pytest.fixture
def folder(tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "model")
    return tmp_path / "model"


def test_what_is_saved_is_loaded(folder, make_pair):
    saved, loaded = make_pair(), load_model(folder)
    assert loaded.config == saved.config
    for (name, ours), (_, theirs) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert theirs.requires_grad


def test_weights_keep_the_precision_they_are_stored_in(tmp_path, make_pair):
    save_model(make_pair().bfloat16(), tmp_path / "half")
    assert {parameter.dtype for parameter in load_model(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_an_output_folder_that_exists_is_left_alone(folder, make_pair):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(DataError, match="exists already; remove it or choose another"):
        save_model(make_pair("none"), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def fail_to_write(folder):
    with written_whole(folder) as draft:
        (draft / "config.json").write_text("{}")
        raise OSError("disk full")


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        fail_to_write(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def beheaded(folder):
    (folder / "model.safetensors").write_bytes(b"")


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def other_config(folder):
    config = json.loads((folder / "config.json").read_text())
    config["model"]["discriminator"]["layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))


def other_width(folder):
    config = json.loads((folder / "config.json").read_text())
    config["model"]["discriminator"]["feedforward"] = 41
    (folder / "config.json").write_text(json.dumps(config))


def unknown_setting(folder):
    config = json.loads((folder / "config.json").read_text())
    config["model"]["discriminator"]["colour"] = "blue"
    (folder / "config.json").write_text(json.dumps(config))


def not_json(folder):
    (folder / "config.json").write_text("{")


def no_model(folder):
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "model.safetensors is cut short or damaged"),
        (beheaded, "model.safetensors is cut short or damaged"),
        (pickled, "in pytorch_model.bin, a pickle, which can run code and is never opened here; rewrite it"),
        (other_config, "lacks discriminator.encoder.layers.2"),
        (other_width, r"narrow.weight is \(24, 40\), but the config.json beside it asks for \(24, 41\)"),
        (unknown_setting, "config.json: these are not the settings of a model: .*'colour'"),
        (not_json, "config.json is not valid JSON"),
        (no_model, "config.json describes no model"),
    ],
)
def test_a_damaged_folder_is_named_with_what_to_do(folder, damage, sentence):
    damage(folder)
    with pytest.raises(DataError, match=sentence):
        load_model(folder)


def test_a_folder_that_is_not_a_model_is_named(tmp_path):
    with pytest.raises(DataError, match=r"is not a model folder: it has no config.json"):
        load_model(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*missing"):
        load_model(tmp_path / "missing")
