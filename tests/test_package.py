"""The model in the package: weights in 8 bits, the export that writes it, and the commands that use it by default."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import error_message, small_run
from safetensors.torch import save
from synthetic import write_rows
from transformers import AutoTokenizer

import electra
from electra.baselines import find_replaced_words
from electra.cli import main
from electra.config import PACKAGED_MODEL, build_config, flat_values
from electra.data.tokenizer import SPECIAL_TOKENS, build_wordpiece_tokenizer
from electra.errors import ConfigError, DataError
from electra.exporting import package
from electra.model.storage import dequantize, load_model, quantize, relative_error
from electra.pretraining.command import pretrain
from electra.pretraining.config import PretrainConfig
from electra.training import checkpoint

WEIGHTS = "model.safetensors.gz"
needs_packaged_model = pytest.mark.skipif(
    not checkpoint.has_packaged_model(), reason="this checkout has no packaged model; make packaged-model writes it"
)


@pytest.fixture(scope="module")
def packaged(finished_run, tmp_path_factory):
    """The finished run in the format of the packaged model."""
    folder = tmp_path_factory.mktemp("package") / "model"
    electra.export(model=finished_run, to="package", training_data="Sentences (CC0)", output=folder)
    return folder


def test_quantized_weights_are_within_half_a_step():
    torch.manual_seed(0)
    rows = torch.randn(64, 500) * torch.logspace(-6, 2, 64)[:, None]
    rows[3] = 0
    rows[4, 7] = 40 * rows[4].std()  # a large weight makes the steps of its row larger
    stored = quantize({"matrix": rows, "vector": rows[0]}, resolution=1 / 16)
    restored = dequantize(stored)
    assert stored["matrix"].dtype == torch.int8
    assert ((restored["matrix"] - rows).abs() <= 0.51 * stored["matrix.scale"].float()).all()
    assert (restored["matrix"][3] == 0).all()
    torch.testing.assert_close(restored["vector"], rows[0], rtol=1e-3, atol=1e-7)
    usual = {"matrix": rows[5:]}
    assert relative_error(usual, dequantize(quantize(usual, 1 / 16))) == pytest.approx(12**-0.5 / 16, rel=0.1)


def test_a_packaged_model_answers_nearly_like_its_run(finished_run, packaged):
    run, model = electra.load(finished_run, device="cpu"), electra.load(packaged, device="cpu")
    text = "the big cat sat on the mat ."
    assert model.detect(text).tokens == run.detect(text).tokens
    assert model.detect(text).replaced == pytest.approx(run.detect(text).replaced, abs=0.01)
    ours, theirs = (list(each.fill("the [MASK] sat").masks[0].tokens.values()) for each in (model, run))
    assert ours == pytest.approx(theirs, abs=0.01)
    torch.testing.assert_close(model.embed("the cat"), run.embed("the cat"), rtol=0.05, atol=0.05)


def test_the_tokenizer_of_a_packaged_model_is_that_of_its_run(finished_run, packaged, tmp_path):
    assert {path.name for path in packaged.iterdir()} == {
        *("config.json", WEIGHTS, "vocab.txt", "tokenizer_config.json", "README.md")
    }
    models = [electra.load(folder, device="cpu") for folder in (finished_run, packaged)]
    assert len({model.tokenizer.fingerprint for model in models}) == 1
    assert models[0].trained_length == models[1].trained_length == 16
    electra.export(model=packaged, output=tmp_path / "hf")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")("The dog ran in the house.")["input_ids"]
    assert ids == models[0].tokenizer.library.encode("The dog ran in the house.").ids


def test_the_card_names_the_text_and_the_settings(packaged):
    card = (packaged / "README.md").read_text()
    assert card.startswith("---\ntags: [electra]\n---\n\n# model\n\nA text encoder, ")
    assert "## Text\n\nSentences (CC0)\n\n## Pre-training" in card
    assert "--size tiny --layers 1 --width 32" in card
    assert "generator with 1 layer of width 32" in card
    assert re.search(r"\| mlm_loss +\|", card)
    assert str(packaged.parent.parent) not in card  # no path of this machine


def test_the_card_of_a_package_has_no_language_or_license_that_nobody_named(packaged, tmp_path):
    electra.export(model=packaged, output=tmp_path / "hf")
    for card in (packaged / "README.md", tmp_path / "hf/README.md"):
        assert not re.search("english|language:|license", card.read_text(), re.IGNORECASE)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"lowercase": True}, ["--lowercase"]),
        ({"lowercase": False}, ["--no-lowercase"]),
        ({"lowercase": True, "strip_accents": False}, ["--lowercase", "--no-strip-accents"]),
    ],
)
def test_the_command_in_the_card_trains_a_tokenizer_of_the_same_case(settings, flags):
    assert package.case_flags(build_wordpiece_tokenizer([*SPECIAL_TOKENS.values()], **settings)) == flags


def test_a_packaged_model_can_be_fine_tuned_and_trained_further(packaged, shards, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", "classification", 60, seed=0)
    result = electra.finetune(model=packaged, train=train, output=tmp_path / "tuned", epochs=1, length=16, device="cpu")
    assert result.rows["train"] > 0
    run = electra.pretrain(
        data=shards, output=tmp_path / "run", init=packaged, steps=1, length=16, batch_size=8, device="cpu"
    )
    assert run.step == 1


def test_heads_that_only_pre_training_uses_are_left_out(shards, tmp_path):
    pretrain(small_run(shards, tmp_path / "run", steps=1, bag_of_words_weight=0.1, corrective_lm_weight=0.1))
    electra.export(model=tmp_path / "run", to="package", training_data="text", output=tmp_path / "out")
    assert not load_model(tmp_path / "out").config.auxiliary_heads


def test_coarser_weights_are_stored_where_the_model_would_be_too_large(finished_run, packaged, tmp_path, monkeypatch):
    size = sum(path.stat().st_size for path in packaged.iterdir())
    monkeypatch.setattr(package, "MAX_BYTES", size - 500)
    settings = {"model": finished_run, "to": "package", "training_data": "text"}
    electra.export(**settings, output=tmp_path / "coarse")
    assert (tmp_path / "coarse" / WEIGHTS).stat().st_size < (packaged / WEIGHTS).stat().st_size - 400
    monkeypatch.setattr(package, "MAX_BYTES", size // 4)
    with pytest.raises(ConfigError, match=r"takes .* MB in 8 bits, more than .*; train a smaller model"):
        electra.export(**settings, output=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def cut(content: bytes) -> bytes:
    return content[:-100]


def flip_a_bit(content: bytes) -> bytes:
    return content[:2000] + bytes([content[2000] ^ 4]) + content[2001:]


def replace_by_tensors_of_other_shapes(content: bytes) -> bytes:
    return gzip.compress(save({"a": torch.zeros(3, 4, dtype=torch.int8), "a.scale": torch.zeros(7)}))


@pytest.mark.parametrize("damage", [cut, flip_a_bit, gzip.decompress, replace_by_tensors_of_other_shapes])
def test_damaged_weights_are_an_error(packaged, tmp_path, damage):
    shutil.copytree(packaged, tmp_path / "model")
    weights = tmp_path / "model" / WEIGHTS
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(DataError, match=r"model\.safetensors\.gz is (damaged|cut)|the weights have no more than 4"):
        electra.load(tmp_path / "model")


def test_a_package_needs_the_text_of_its_card(finished_run, tmp_path, capsys):
    with pytest.raises(ConfigError, match="training_data needs a value"):
        electra.export(model=finished_run, to="package", output=tmp_path / "out")


@pytest.mark.parametrize("command", ["detect", "fill", "embed", "finetune"])
def test_without_a_packaged_model_one_has_to_be_named(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "has_packaged_model", lambda: False)
    train = write_rows(tmp_path / "train.jsonl", "classification", 60, seed=0)
    flags = ["--train", str(train), "--output", str(tmp_path / "out")] if command == "finetune" else ["the [MASK]"]
    assert "contains no model; name one" in error_message([command, *flags], capsys)
    with pytest.raises(DataError, match="contains no model"):
        electra.load()


@needs_packaged_model
def test_the_packaged_model_finds_replaced_words():
    assert find_replaced_words(electra.load(device="cpu")).found >= 85  # 93 when it was trained (docs/log.md)


@needs_packaged_model
def test_the_packaged_model_is_small_and_complete(capsys):
    assert sum(path.stat().st_size for path in PACKAGED_MODEL.iterdir()) <= package.MAX_BYTES
    assert "Wikipedia" in (PACKAGED_MODEL / "README.md").read_text()
    main(["fill", "The capital of France is [MASK]."])
    main(["embed", "A sentence."])
    assert "[MASK] at 6" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("electra", "training_data", "content"),
    [
        ('test "$1" != export', "reports (CC BY 4.0)", "old"),  # the export fails
        (
            'test "$1" != export || { mkdir -p "$9"; printf -- "---\\n---\\n# packaged\\n%s\\n" "$7" > $9/README.md; }',
            "reports (CC BY 4.0).",
            "---\nlanguage: en\nlicense: apache-2.0\n---\n# The model in the package\n"
            "reports (CC BY 4.0). The weights have the license of electra, Apache 2.0.",
        ),
        ("true", "", "old"),
    ],
)
def test_make_replaces_the_packaged_model_only_by_a_complete_and_described_one(
    tmp_path, electra, training_data, content
):
    for name, command in {"electra": electra, "python": "true"}.items():
        script = tmp_path / "venv/bin" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
    (tmp_path / "venv/demo-installed").touch()
    (tmp_path / "packaged").mkdir()
    (tmp_path / "packaged/README.md").write_text("old\n")
    values = {"VENV": tmp_path / "venv", "PACKAGED": tmp_path / "packaged", "PACKAGED_WORK": tmp_path / "work"}
    values |= {"CORPUS": tmp_path, "TRAINING_DATA": training_data}
    makefile = Path(__file__).parents[1] / "Makefile"
    command = ["make", "-f", makefile, "-C", makefile.parent, "packaged-model"]
    ended = subprocess.run([*command, *(f"{name}={value}" for name, value in values.items())], check=False)
    assert (ended.returncode == 0) == (content != "old")
    assert (tmp_path / "packaged/README.md").read_text() == f"{content}\n"


@pytest.mark.parametrize("settings", [{"size": "medium", "width": 256}, {"size": "small", "init": "packaged"}])
def test_settings_without_a_value_are_not_flags_of_the_card(settings):
    """Given settings may remove those of the recipe (the phases of medium), which no flag can say."""
    config = build_config(PretrainConfig, data="shards", output="run", minutes=3, **settings)
    flags = package.explicit_flags(flat_values(config))
    assert not {"--phases", "None"} & set(flags)
    assert {"--size", "--minutes", f"--{list(settings)[1]}"} <= set(flags)
