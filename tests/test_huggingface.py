"""Classic models agree with transformers' ELECTRA and BERT, and export and import without a changed byte."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from all_minilm_l6_v2 import get_model_zip_path
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraModel,
)
from transformers_models import add_noise, load_without_warnings, our_output, random_model

from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError, DataError
from electra.exporting.command import export, import_model
from electra.exporting.config import ExportConfig, ImportConfig
from electra.huggingface.convert import to_huggingface_tensors
from electra.huggingface.names import ARCHITECTURES
from electra.model.storage import load_model, save_model


def inputs(is_padded: bool, has_segments: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Token ids, attention mask, segment ids."""
    positions = torch.arange(12)
    input_ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    attention_mask = (positions < torch.tensor([[12], [7], [2]])).long() if is_padded else None
    segment_ids = (positions >= 5).long().expand(3, -1) if has_segments else None
    return (input_ids * attention_mask if is_padded else input_ids), attention_mask, segment_ids


def imported(model, folder: Path, part: str):
    """A model that was saved by transformers and imported by us."""
    model.save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "ours"))
    return getattr(load_model(folder / "ours").eval(), part)


def check_equal(theirs, ours, architecture: str, is_padded: bool = False, has_segments: bool = False) -> None:
    """Outputs are equal within 1e-6 and gradients within 1e-4, padding excluded."""
    input_ids, attention_mask, segment_ids = inputs(is_padded, has_segments)
    outputs = [
        theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).logits,
        our_output(ours, input_ids, attention_mask, segment_ids),
    ]
    is_token = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    expected, actual = (output[is_token] for output in outputs)
    assert expected.std() > 0.03
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / expected.numel() ** 0.5
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    renamed = to_huggingface_tensors(gradients, ARCHITECTURES[architecture])
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(renamed.pop(name), parameter.grad, atol=1e-4, rtol=0, msg=name)
    assert not renamed


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_discriminator_equals_electra_for_pre_training(tmp_path, size, is_padded, has_segments):
    theirs = random_model(ElectraForPreTraining, size)
    check_equal(theirs, imported(theirs, tmp_path, "discriminator"), "ElectraForPreTraining", is_padded, has_segments)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("size", ["small generator", "base generator", "large"])
def test_generator_equals_electra_for_masked_lm(tmp_path, size, is_padded):
    theirs = random_model(ElectraForMaskedLM, size)
    check_equal(theirs, imported(theirs, tmp_path, "generator"), "ElectraForMaskedLM", is_padded, has_segments=True)


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_compiled_discriminator_equals_electra_for_pre_training(tmp_path, backend):
    theirs = random_model(ElectraForPreTraining, "one layer")
    ours = imported(theirs, tmp_path, "discriminator")
    ours.compile(backend=backend)
    check_equal(theirs, ours, "ElectraForPreTraining", is_padded=True, has_segments=True)


def test_bert_for_masked_lm_is_a_generator_without_projection(tmp_path):
    theirs = random_model(BertForMaskedLM, "base", BertConfig)
    check_equal(theirs, imported(theirs, tmp_path, "generator"), "BertForMaskedLM", is_padded=True, has_segments=True)


@pytest.mark.parametrize(("model_class", "config_class"), [(ElectraModel, ElectraConfig), (BertModel, BertConfig)])
def test_encoder_without_a_head_has_the_same_hidden_states(tmp_path, model_class, config_class):
    theirs = random_model(model_class, "base", config_class)
    encoder = imported(theirs, tmp_path, "discriminator").encoder
    input_ids, attention_mask, segment_ids = inputs(True, True)
    expected = theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).last_hidden_state
    actual = encoder(input_ids, attention_mask, segment_ids)
    torch.testing.assert_close(actual[attention_mask == 1], expected[attention_mask == 1], atol=1e-6, rtol=0)


def test_published_weights_have_the_same_hidden_states(tmp_path):
    shutil.unpack_archive(get_model_zip_path(), tmp_path / "minilm")
    theirs = BertModel.from_pretrained(tmp_path / "minilm").eval()
    result = import_model(ImportConfig(source=tmp_path / "minilm", output=tmp_path / "ours"))
    assert result.tokenizer == ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    encoder = load_model(tmp_path / "ours").eval().discriminator.encoder
    texts = ["The chef cooked the meal.", "Replaced tokens are found one by one, by reading everything else."]
    batch = AutoTokenizer.from_pretrained(tmp_path / "ours")(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state
        actual = encoder(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    is_token = batch["attention_mask"] == 1
    torch.testing.assert_close(actual[is_token], expected[is_token], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_class", "part", "size"),
    [
        (ElectraForPreTraining, "discriminator", "small"),
        (ElectraForMaskedLM, "generator", "small generator"),
        (ElectraModel, "encoder", "base"),
    ],
)
def test_import_followed_by_export_is_byte_identical(tmp_path, caplog, model_class, part, size, dtype):
    theirs = random_model(model_class, size).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported", part=part))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "exported")]
    assert weights[0] == weights[1]
    exported = load_without_warnings(model_class, tmp_path / "exported", caplog)
    settings = {key: value for key, value in theirs.config.to_dict().items() if key != "_name_or_path"}
    assert {key: value for key, value in exported.config.to_dict().items() if key in settings} == settings


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all", "disentangled"])
def test_exported_models_of_every_sharing_have_the_same_outputs(tmp_path, caplog, make_pair, sharing):
    electra = add_noise(make_pair(sharing))
    save_model(electra, tmp_path / "ours")
    input_ids, attention_mask, segment_ids = inputs(True, True)
    is_token = attention_mask == 1
    for part, model_class in (("discriminator", ElectraForPreTraining), ("generator", ElectraForMaskedLM)):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
        theirs = load_without_warnings(model_class, tmp_path / part, caplog)
        expected = our_output(getattr(electra, part), input_ids, attention_mask, segment_ids)
        actual = theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).logits
        torch.testing.assert_close(actual[is_token], expected[is_token], atol=1e-6, rtol=0)


def export_and_import_pair(folder: Path) -> Path:
    """Export both models of the pair in `folder`/ours and import them as a pair."""
    for part in ("discriminator", "generator"):
        export(ExportConfig(model=folder / "ours", output=folder / part, part=part))
    parts = {"source": folder / "discriminator", "generator": folder / "generator"}
    import_model(ImportConfig(**parts, output=folder / "imported"))
    return folder / "imported"


def test_import_restores_shared_embeddings(tmp_path, make_pair):
    save_model(make_pair("embeddings"), tmp_path / "ours")
    folder = export_and_import_pair(tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_import_shares_nothing_if_embeddings_differ(tmp_path, make_pair):
    save_model(make_pair("none"), tmp_path / "ours")
    assert load_model(export_and_import_pair(tmp_path)).config.sharing == "none"


def test_weights_in_several_files_are_imported(tmp_path):
    theirs = random_model(ElectraForPreTraining)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    check_equal(theirs, load_model(tmp_path / "ours").eval().discriminator, "ElectraForPreTraining")


def test_weights_that_are_not_finite_are_not_exported(tmp_path, make_pair):
    electra = make_pair()
    torch.nn.init.constant_(electra.discriminator.encoder.layers[0].feedforward.down.weight, float("nan"))
    save_model(electra, tmp_path / "ours")
    with pytest.raises(DataError, match="not finite"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_discriminator_without_a_trained_head_is_not_exported(tmp_path):
    imported(random_model(ElectraModel), tmp_path, "discriminator")
    with pytest.raises(ConfigError, match=r"no trained head; .* --part encoder"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def test_generator_without_discriminator_is_exported_with_part_generator(tmp_path):
    imported(random_model(ElectraForMaskedLM), tmp_path, "generator")
    with pytest.raises(ConfigError, match=r"no discriminator; .* --part generator"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported"))
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported", part="generator"))


def test_tokenizer_files_are_copied(tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "ours")
    vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n"
    (tmp_path / "ours/vocab.txt").write_text(vocabulary)
    (tmp_path / "ours/tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 1000}')
    assert export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "theirs")).tokenizer == [
        *("vocab.txt", "tokenizer_config.json")
    ]
    assert (tmp_path / "theirs/vocab.txt").read_text() == vocabulary
    settings = json.loads((tmp_path / "theirs/tokenizer_config.json").read_text())
    assert settings == {"do_lower_case": True, "model_max_length": 32}  # at most the positions


def test_a_model_with_settings_of_a_tokenizer_but_no_tokenizer_is_exported_without(modern_folder, tmp_path):
    shutil.copytree(modern_folder, tmp_path / "ours")
    for name in ("tokenizer.json", "vocab.txt", "checksums.json"):
        (tmp_path / "ours" / name).unlink(missing_ok=True)
    (tmp_path / "ours/tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert "tokenizer.json" not in export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "theirs")).tokenizer


def test_a_lone_vocabulary_is_exported_with_its_case(tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "ours")
    (tmp_path / "ours/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nParis\nparis\n")
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "theirs"))
    assert AutoTokenizer.from_pretrained(tmp_path / "theirs").tokenize("Paris") == ["Paris"]


def test_exported_tokenizers_truncate_to_the_trained_length(finished_run, finetuned, tmp_path):
    """That of pre-training, which an import keeps, or that of fine-tuning."""
    for model, length in ((finished_run, 16), (finetuned.output, 32)):
        export(ExportConfig(model=model, output=tmp_path / str(length)))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / str(length))
        assert len(tokenizer("cat " * 100, truncation=True)["input_ids"]) == length
    import_model(ImportConfig(source=tmp_path / "16", output=tmp_path / "ours"))
    assert read_trained_length(tmp_path / "ours") == 16
