"""Import of files by older versions of transformers, and of folders that cannot be imported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraModel,
)
from transformers_models import random_model

from electra.errors import ConfigError, DataError
from electra.exporting.command import ConversionResult, export, import_model
from electra.exporting.config import ExportConfig, ImportConfig

CLASSES = [
    (ElectraModel, ElectraConfig),
    (ElectraForPreTraining, ElectraConfig),
    (ElectraForMaskedLM, ElectraConfig),
    (BertModel, BertConfig),
    (BertForMaskedLM, BertConfig),
]


def check_same_import(model_class, config_class, folder: Path, change) -> ConversionResult:
    """Import a folder as it is and with its tensors changed by `change`: the imported files are equal."""
    random_model(model_class, "base", config_class).save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "plain"))
    save_file(change(load_file(folder / "theirs/model.safetensors")), folder / "theirs/model.safetensors")
    result = import_model(ImportConfig(source=folder / "theirs", output=folder / "changed"))
    for name in ("model.safetensors", "config.json"):
        assert (folder / "plain" / name).read_bytes() == (folder / "changed" / name).read_bytes()
    return result


@pytest.mark.parametrize(("model_class", "config_class"), CLASSES)
def test_tensors_that_the_model_does_not_need_are_ignored(tmp_path, model_class, config_class):
    def add_tensors(weights):
        table = next(name for name in weights if name.endswith("word_embeddings.weight"))
        prefix = table.removesuffix("embeddings.word_embeddings.weight")
        weights[f"{prefix}embeddings.position_ids"] = torch.arange(32)[None]
        if config_class is ElectraConfig:  # stored although the widths are equal; transformers ignores it too
            weights[f"{prefix}embeddings_project.weight"] = torch.ones(24, 24)
            weights[f"{prefix}embeddings_project.bias"] = torch.ones(24)
        return weights

    ignored = check_same_import(model_class, config_class, tmp_path, add_tensors).ignored
    assert any(name.endswith("embeddings.position_ids") for name in ignored)


@pytest.mark.parametrize(("model_class", "config_class"), CLASSES)
def test_layer_norm_may_have_gamma_and_beta(tmp_path, model_class, config_class):
    def rename(weights):
        old = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in weights}
        return {old[name]: tensor for name, tensor in weights.items()}

    check_same_import(model_class, config_class, tmp_path, rename)


@pytest.mark.parametrize(
    ("model_class", "config_class", "prefix"),
    [(ElectraModel, ElectraConfig, "electra."), (BertModel, BertConfig, "bert.")],
)
def test_encoder_without_a_head_may_have_the_prefix(tmp_path, model_class, config_class, prefix):
    def add_prefix(weights):
        return {prefix + name: tensor for name, tensor in weights.items()}

    check_same_import(model_class, config_class, tmp_path, add_prefix)


def test_model_with_a_head_may_lack_the_prefix(tmp_path):
    def remove_prefix(weights):
        return {name.removeprefix("electra."): tensor for name, tensor in weights.items()}

    check_same_import(ElectraForPreTraining, ElectraConfig, tmp_path, remove_prefix)


def test_tensors_with_and_without_the_prefix_are_an_error(tmp_path):
    def add_copies(weights):
        return weights | {f"electra.{name}": tensor + 1 for name, tensor in weights.items()}

    with pytest.raises(DataError, match=r"has tensors twice, .* prefix electra\."):
        check_same_import(ElectraModel, ElectraConfig, tmp_path, add_copies)


def test_result_lists_ignored_tensors(tmp_path):
    random_model(BertModel, "base", BertConfig).save_pretrained(tmp_path / "theirs")
    result = import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    assert str(result).endswith("; ignored tensors: pooler.dense.bias, pooler.dense.weight")


def test_copies_of_tied_tensors_must_be_equal(tmp_path):
    def add_copy(weights):
        return weights | {"cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"].clone()}

    check_same_import(BertForMaskedLM, BertConfig, tmp_path, add_copy)
    weights = load_file(tmp_path / "theirs/model.safetensors")
    weights["cls.predictions.decoder.weight"] += 1
    save_file(weights, tmp_path / "theirs/model.safetensors")
    with pytest.raises(DataError, match=r"decoder.weight differs from .*; only tied output embeddings"):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "untied"))


def test_single_weights_file_takes_precedence_over_an_index(tmp_path):
    random_model(ElectraForPreTraining).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))


@pytest.mark.parametrize("weight_map", ["[]", '{"a": 1}', "null"])
def test_index_without_files_is_an_error(tmp_path, weight_map):
    random_model(ElectraForPreTraining).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors").unlink()
    (tmp_path / "theirs/model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(DataError, match=r"index.json .*weight_map"):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))


@pytest.fixture(scope="session")
def discriminator_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface") / "theirs"
    random_model(ElectraForPreTraining).save_pretrained(folder)
    return folder


def check_import_fails(source: Path, folder: Path, settings: dict, weights: dict, message: str) -> None:
    """Import a copy of `source` with changed settings and weights: the error has `message`, and nothing is written."""
    (folder / "theirs").mkdir()
    config = json.loads((source / "config.json").read_text()) | settings
    (folder / "theirs/config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors") | weights, folder / "theirs/model.safetensors")
    with pytest.raises(DataError, match=message):
        import_model(ImportConfig(source=folder / "theirs", output=folder / "ours"))
    assert not (folder / "ours").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["ElectraForCausalLM"]}, r"is \['ElectraForCausalLM'\]; supported are"),
        ({"architectures": ["ElectraForTokenClassification"]}, "fine-tuned model exported for transformers"),
        ({"architectures": [["x"]]}, r"architectures is \[\['x'\]\]; supported are ElectraModel, "),
        ({"architectures": "ElectraModel"}, "architectures is 'ElectraModel'; supported are"),
        ({"architectures": None}, "architectures is None; supported are"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu' is supported"),
        ({"num_hidden_layers": 4}, "lacks electra.encoder.layer.3"),
        ({"num_hidden_layers": 2}, "has electra.encoder.layer.2.* and 13 more, which"),
        ({"num_attention_heads": 5}, "width is 32, not a multiple of 5 heads"),
        ({"hidden_size": "wide"}, "config.json .*Expected `int`, got `str` - at `width`"),
        ({"hidden_size": 32.0}, "config.json .*Expected `int`, got `float` - at `width`"),
        ({"layer_norm_eps": -1}, "config.json .*norm_epsilon is -1.0; it must be above 0"),
        ({"vocab_size": 61}, r"word_embeddings.weight has shape \(60, 16\), but config.json requires \(61, 16\)"),
        ({"max_position_embeddings": 16}, r"position_embeddings.weight has shape \(32, 16\), .* \(16, 16\)"),
        ({"embedding_size": 8}, r"LayerNorm.bias has shape \(16,\), but config.json requires \(8,\)"),
        ({"intermediate_size": 63}, r"intermediate.dense.bias has shape \(64,\), but config.json requires \(63,\)"),
        ({"num_hidden_layers": 900}, "config.json has layers 900, but the weights have no more than 59"),
        ({"hidden_size": 2**20}, "config.json has width 1,048,576, but the weights have no more than 64"),
        ({"max_position_embeddings": 10**30}, r"config.json .*positions is 1\d*; it must be"),
    ],
)
def test_settings_that_are_not_supported_are_an_error(discriminator_folder, tmp_path, settings, message):
    check_import_fails(discriminator_folder, tmp_path, settings, {}, message)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor(1.0), r"dense.bias has shape \(\), but config.json requires \(32,\)"),
        (torch.ones(32).char(), "dense.bias is torch.int8; only floating-point weights"),
    ],
)
def test_tensors_of_another_shape_or_type_are_an_error(discriminator_folder, tmp_path, tensor, message):
    weights = {"discriminator_predictions.dense.bias": tensor}
    check_import_fails(discriminator_folder, tmp_path, {}, weights, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", '{"model": ' * 100_000, "not a file of the tokenizers library"),
        ("vocab.txt", "[PAD]\na\n", r"lacks \[UNK\]"),
        ("vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(200))]), "205 entries"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_not_copied(discriminator_folder, tmp_path, file, content, message):
    shutil.copytree(discriminator_folder, tmp_path / "theirs")
    (tmp_path / "theirs" / file).write_text(content)
    with pytest.raises(DataError, match=message):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    import_model(ImportConfig(source=discriminator_folder, output=tmp_path / "model"))
    (tmp_path / "model" / file).write_text(content)
    with pytest.raises(DataError, match=message):
        export(ExportConfig(model=tmp_path / "model", output=tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_two_discriminators_are_no_pair(discriminator_folder, tmp_path):
    with pytest.raises(ConfigError, match="--generator a generator, not discriminator and discriminator"):
        import_model(
            ImportConfig(source=discriminator_folder, generator=discriminator_folder, output=tmp_path / "ours")
        )


def test_result_tells_how_to_add_a_missing_tokenizer(discriminator_folder, tmp_path):
    result = str(import_model(ImportConfig(source=discriminator_folder, output=tmp_path / "ours")))
    assert "no tokenizer" in result
    assert result.endswith(f"copy the tokenizer.json or vocab.txt it was trained with into {tmp_path / 'ours'}")
