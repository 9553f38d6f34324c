"""Model folders: atomic writes, exact loading, and errors for folders that cannot be loaded."""

import json
import resource
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import MODERN, WIDE
from safetensors.torch import load_file, save_file

from electra.errors import DataError
from electra.model.config import EncoderConfig
from electra.model.storage import copy_tokenizer_files, load_model, read_tensors, save_model, write_tensors
from electra.runfolder import CHECKSUMS, create_folder_atomically, write_checksums


@pytest.fixture
def folder(tmp_path, make_pair):
    """A model folder without checksums, as from elsewhere."""
    save_model(make_pair(), tmp_path / "model")
    (tmp_path / "model" / CHECKSUMS).unlink()
    return tmp_path / "model"


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
def test_loaded_model_equals_the_saved_one(tmp_path, make_pair, size):
    saved = make_pair(size=size)
    save_model(saved, tmp_path / "folder")
    loaded = load_model(tmp_path / "folder")
    assert loaded.config == saved.config
    for (name, ours), (_, theirs) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert theirs.requires_grad


def test_weights_keep_their_precision(tmp_path, make_pair):
    save_model(make_pair().bfloat16(), tmp_path / "half")
    assert {parameter.dtype for parameter in load_model(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_existing_output_folder_is_not_changed(folder, make_pair):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(DataError, match="exists already; remove it or choose another"):
        save_model(make_pair("none"), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def fail_to_write(folder):
    with create_folder_atomically(folder) as draft:
        (draft / "config.json").write_text("{}")
        raise OSError("disk full")


def test_failed_write_leaves_no_files(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        fail_to_write(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def replace_by_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def convert_to_integers(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.long() for name, tensor in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors is damaged"),
        (empty, "model.safetensors is damaged"),
        (replace_by_pickle, "in pytorch_model.bin, a pickle, which can run code and is not read; convert it"),
        (convert_to_integers, "is torch.int64; only floating-point weights"),
    ],
)
def test_damaged_weights_are_an_error(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message):
        load_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", CHECKSUMS])
def test_a_flipped_bit_is_detected(folder, name):
    write_checksums(folder)
    load_model(folder)
    content = bytearray((folder / name).read_bytes())
    content[-20] ^= 1  # within a weight, or a digit
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is damaged .*checksum"):
        load_model(folder)


def test_a_missing_tokenizer_file_is_not_left_out_of_a_copy(encoder_folder, tmp_path):
    shutil.copytree(encoder_folder, tmp_path / "model")
    (tmp_path / "model/vocab.txt").unlink()
    with pytest.raises(DataError, match=r"vocab.txt is damaged .*missing"):
        copy_tokenizer_files(tmp_path / "model", tmp_path)


def test_a_single_file_may_hold_its_checksum(tmp_path):
    tensors = {"a": torch.randn(3, 2).bfloat16(), "b": torch.tensor(7), "c": torch.zeros(0)}
    write_tensors(tmp_path / "x.safetensors", tensors, checksum=True)
    assert all(torch.equal(tensors[name], value) for name, value in read_tensors(tmp_path / "x.safetensors").items())
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"x.safetensors is damaged .*checksum differs"):
        read_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 3}, "lacks discriminator.encoder.layers.2"),
        ({"feedforward": 41}, r"down.weight has shape \(24, 40\), but config.json requires \(24, 41\)"),
        ({"layers": 900}, r"config.json has layers 900, but the weights have no more than \d+"),
        ({"width": 2**30, "heads": 1}, "config.json has width 1,073,741,824, but the weights have no more than 72"),
        ({"colour": "blue"}, "unknown field - at `discriminator.colour`"),
        ({"layers": 2.0}, "Expected `int`, got `float` - at `discriminator.layers`"),
        ({"norm_epsilon": "tiny"}, "Expected `float`, got `str` - at `discriminator.norm_epsilon`"),
    ],
)
def test_settings_that_are_invalid_or_do_not_fit_the_weights_are_an_error(folder, settings, message):
    config = json.loads((folder / "config.json").read_text())
    config["model"]["discriminator"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=message):
        load_model(folder)


@pytest.mark.parametrize("name", [field.name for field in fields(EncoderConfig)])
def test_missing_setting_is_an_error(folder, name):
    config = json.loads((folder / "config.json").read_text())
    del config["model"]["generator"][name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=name):
        load_model(folder)


def pair_json(**settings) -> str:
    pair = {"generator": None, "discriminator": None, "sharing": "none", "head": "rtd", "has_baseline": False}
    return json.dumps({"model": pair | settings})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is damaged or not in the expected format .* copy or create it again"),
        ("{}", "config.json has no model"),
        ('{"model": null}', "Expected `object`, got `null`"),
        ('{"model": {"generator": null}}', "missing required field `discriminator`"),
        (pair_json(), "neither a generator nor a discriminator"),
        (pair_json(generator=0), "Expected `object | null`, got `int` - at `generator`"),
        (pair_json(generator={}), "Missing or unknown field - at `generator.style`"),
        (pair_json(generator={"layers": 10**30}), "it must be at least 1 and at most .* - at `generator`"),
        (pair_json(sharing=[]), "at `sharing`"),
    ],
)
def test_config_without_a_model_is_an_error(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_model(folder)


def test_missing_head_is_initialised_in_the_precision_of_the_weights(tmp_path, make_pair):
    save_model(make_pair().bfloat16(), tmp_path / "half")
    weights = load_file(tmp_path / "half/model.safetensors")
    (tmp_path / "half" / CHECKSUMS).unlink()
    bare = {name: tensor for name, tensor in weights.items() if not name.startswith("discriminator.head.")}
    save_file(bare, tmp_path / "half/model.safetensors")
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        heads.append(load_model(tmp_path / "half").discriminator.head.dense.weight)
    assert {head.dtype for head in heads} == {torch.bfloat16}
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_output_may_be_a_symbolic_link(tmp_path, make_pair):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    save_model(make_pair(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_model(tmp_path / "target").config == make_pair().config


def test_current_folder_cannot_be_the_output(tmp_path, make_pair, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the output cannot be the current folder"):
        save_model(make_pair(), Path("."))
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"has no config.json"):
        load_model(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*missing"):
        load_model(tmp_path / "missing")


def test_full_disk_raises_an_os_error_with_the_file(tmp_path):
    """A limit on file sizes simulates the full disk, for which safetensors has its own error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="cannot write") as caught:
            write_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "model.safetensors")
