"""What import takes in, from files new and old, and what it refuses before anything is written."""

import json
from pathlib import Path

import pytest
import torch
from peers import peer
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

from electra.errors import ConfigError, DataError
from electra.export.command import ConversionResult, ImportConfig, import_model

CLASSES = [
    (ElectraModel, ElectraConfig),
    (ElectraForPreTraining, ElectraConfig),
    (ElectraForMaskedLM, ElectraConfig),
    (BertModel, BertConfig),
    (BertForMaskedLM, BertConfig),
]


def arrives_alike(kind, config, folder: Path, change) -> ConversionResult:
    """Import a folder as transformers writes it, then with `change` made to its tensors: nothing is different."""
    peer(kind, "base", config).save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "plain"))
    save_file(change(load_file(folder / "theirs/model.safetensors")), folder / "theirs/model.safetensors")
    result = import_model(ImportConfig(source=folder / "theirs", output=folder / "changed"))
    for name in ("model.safetensors", "config.json"):
        assert (folder / "plain" / name).read_bytes() == (folder / "changed" / name).read_bytes()
    return result


@pytest.mark.parametrize(("kind", "config"), CLASSES)
def test_older_files_with_more_than_the_model_needs_arrive(tmp_path, kind, config):
    def with_spares(weights):
        table = next(name for name in weights if name.endswith("word_embeddings.weight"))
        prefix = table.removesuffix("embeddings.word_embeddings.weight")
        weights[f"{prefix}embeddings.position_ids"] = torch.arange(32)[None]
        if config is ElectraConfig:  # stored though the widths are equal; transformers ignores it too
            weights[f"{prefix}embeddings_project.weight"] = torch.ones(24, 24)
            weights[f"{prefix}embeddings_project.bias"] = torch.ones(24)
        return weights

    left_out = arrives_alike(kind, config, tmp_path, with_spares).left_out
    assert any(name.endswith("embeddings.position_ids") for name in left_out)


@pytest.mark.parametrize(("kind", "config"), CLASSES)
def test_older_files_that_say_gamma_and_beta_arrive(tmp_path, kind, config):
    def aged(weights):
        old = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in weights}
        return {old[name]: tensor for name, tensor in weights.items()}

    arrives_alike(kind, config, tmp_path, aged)


@pytest.mark.parametrize(
    ("kind", "config", "prefix"), [(ElectraModel, ElectraConfig, "electra."), (BertModel, BertConfig, "bert.")]
)
def test_a_bare_encoder_may_keep_the_prefix_of_the_model_it_was_in(tmp_path, kind, config, prefix):
    arrives_alike(kind, config, tmp_path, lambda weights: {prefix + name: tensor for name, tensor in weights.items()})


def test_a_model_with_a_head_may_lack_the_prefix(tmp_path):
    def stripped(weights):
        return {name.removeprefix("electra."): tensor for name, tensor in weights.items()}

    arrives_alike(ElectraForPreTraining, ElectraConfig, tmp_path, stripped)


def test_a_tensor_that_is_there_with_and_without_the_prefix_is_refused(tmp_path):
    def doubled(weights):
        return weights | {f"electra.{name}": tensor + 1 for name, tensor in weights.items()}

    with pytest.raises(DataError, match=r"has tensors twice, with and without electra\. before their names"):
        arrives_alike(ElectraModel, ElectraConfig, tmp_path, doubled)


def test_a_pooler_that_is_left_out_is_mentioned(tmp_path):
    peer(BertModel, "base", BertConfig).save_pretrained(tmp_path / "theirs")
    result = import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    assert str(result).endswith("; left out: pooler.dense.bias, pooler.dense.weight")


def test_older_files_may_repeat_tied_tables_if_they_are_tied(tmp_path):
    def twice(weights):
        table = weights["bert.embeddings.word_embeddings.weight"].clone()
        return weights | {"cls.predictions.decoder.weight": table}

    arrives_alike(BertForMaskedLM, BertConfig, tmp_path, twice)
    weights = load_file(tmp_path / "theirs/model.safetensors")
    weights["cls.predictions.decoder.weight"] += 1
    save_file(weights, tmp_path / "theirs/model.safetensors")
    with pytest.raises(DataError, match="only tied output tables can be taken in"):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "more"))


def test_one_whole_file_wins_over_an_index_beside_it(tmp_path):
    peer(ElectraForPreTraining).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))


@pytest.mark.parametrize("weight_map", ["[]", '{"a": 1}', "null"])
def test_an_index_that_names_no_files_is_refused(tmp_path, weight_map):
    peer(ElectraForPreTraining).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/model.safetensors").unlink()
    (tmp_path / "theirs/model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(DataError, match="its weight_map must give the file of each tensor"):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))


def changed_config(folder: Path, **settings) -> Path:
    """A Hugging Face folder whose config.json says something else."""
    peer(ElectraForPreTraining).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"architectures": ["ElectraForTokenClassification"]}, r"is \['ElectraForTokenClassification'\]; what can be"),
        ({"architectures": [["x"]]}, r"architectures is \[\['x'\]\]; what can be taken in is ElectraModel, "),
        ({"architectures": "ElectraModel"}, "architectures is 'ElectraModel'; what can be taken in"),
        ({"architectures": None}, "architectures is None; what can be taken in"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu' can be taken in"),
        ({"num_hidden_layers": 4}, "lacks electra.encoder.layer.3"),
        ({"num_hidden_layers": 2}, "has electra.encoder.layer.2.* and 13 more, which"),
        ({"num_attention_heads": 5}, "width 32 is not divisible by 5 heads"),
        ({"hidden_size": "wide"}, "config.json: width is 'wide'; it must be a whole number"),
        ({"hidden_size": 32.0}, r"config.json: width is 32.0; it must be a whole number"),
        ({"layer_norm_eps": -1}, "config.json: norm_epsilon is -1; it must lie between 0 and 1"),
        (
            {"vocab_size": 61},
            r"word_embeddings.weight has shape \(60, 16\), but config.json requires \(61, 16\)",
        ),
        (
            {"max_position_embeddings": 16},
            r"position_embeddings.weight has shape \(32, 16\), but config.json requires \(16, 16\)",
        ),
        ({"embedding_size": 8}, r"LayerNorm.bias has shape \(16,\), but config.json requires \(8,\)"),
        ({"intermediate_size": 65}, r"intermediate.dense.bias has shape \(64,\), but config.json requires \(65,\)"),
    ],
)
def test_a_folder_we_cannot_take_in_is_refused(tmp_path, settings, sentence):
    with pytest.raises(DataError, match=sentence):
        import_model(ImportConfig(source=changed_config(tmp_path / "theirs", **settings), output=tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.tensor(1.0), r"dense.bias has shape \(\), but config.json requires \(32,\)"),
        (torch.ones(32).char(), "dense.bias is torch.int8; only floating-point weights"),
    ],
)
def test_a_tensor_that_is_no_weight_of_the_model_is_refused(tmp_path, tensor, sentence):
    folder = changed_config(tmp_path / "theirs")
    weights = load_file(folder / "model.safetensors") | {"discriminator_predictions.dense.bias": tensor}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DataError, match=sentence):
        import_model(ImportConfig(source=folder, output=tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_two_discriminators_make_no_pair(tmp_path):
    folder = changed_config(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="--from holds a discriminator and --generator a discriminator"):
        import_model(ImportConfig(source=folder, generator=folder, output=tmp_path / "ours"))


def test_a_missing_tokenizer_is_told_with_what_it_costs_and_where_to_put_one(tmp_path):
    peer(ElectraForPreTraining, "base").save_pretrained(tmp_path / "theirs")
    told = str(import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours")))
    assert "no tokenizer was there, and without one it reads no text (detect, fill, embed" in told
    assert told.endswith(f"copy the tokenizer.json or vocab.txt it was trained with into {tmp_path / 'ours'}")
