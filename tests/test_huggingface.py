"""Agreement with transformers: outputs, gradients, and folders that go out and in without a byte changed."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from all_minilm_l6_v2 import get_model_zip_path
from peers import peer
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

from electra.errors import ConfigError
from electra.export.command import ExportConfig, ImportConfig, export, import_model
from electra.huggingface.convert import to_huggingface
from electra.huggingface.names import ARCHITECTURES
from electra.model.storage import load_model, save_model


def inputs(is_padded: bool, has_segments: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Token ids, attention mask, segment ids."""
    place = torch.arange(12)
    input_ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    attention_mask = (place < torch.tensor([[12], [7], [2]])).long() if is_padded else None
    segment_ids = (place >= 5).long().expand(3, -1) if has_segments else None
    return (input_ids * attention_mask if is_padded else input_ids), attention_mask, segment_ids


def brought_in(model, folder: Path, part: str):
    """The model, saved by transformers and imported by us."""
    model.save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "ours"))
    return getattr(load_model(folder / "ours").eval(), part)


def agree(theirs, ours, architecture: str, is_padded: bool = False, has_segments: bool = False) -> None:
    """Outputs within 1e-6 and gradients within 1e-4, at positions that are not padding."""
    input_ids, attention_mask, segment_ids = inputs(is_padded, has_segments)
    outputs = [
        theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).logits,
        ours(input_ids, attention_mask, segment_ids),
    ]
    is_token = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    expected, actual = (output[is_token] for output in outputs)
    assert expected.std() > 0.03
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / expected.numel() ** 0.5
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    renamed = to_huggingface(gradients, ARCHITECTURES[architecture])
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(renamed.pop(name), parameter.grad, atol=1e-4, rtol=0, msg=name)
    assert not renamed


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("layout", ["small", "base", "large"])
def test_discriminators_equal_electra_for_pre_training(tmp_path, layout, is_padded, has_segments):
    theirs = peer(ElectraForPreTraining, layout)
    ours = brought_in(theirs, tmp_path, "discriminator")
    agree(theirs, ours, "ElectraForPreTraining", is_padded, has_segments)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("layout", ["small generator", "base generator", "large"])
def test_generators_equal_electra_for_masked_lm(tmp_path, layout, is_padded):
    theirs = peer(ElectraForMaskedLM, layout)
    agree(theirs, brought_in(theirs, tmp_path, "generator"), "ElectraForMaskedLM", is_padded, has_segments=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_discriminator_equals_electra_for_pre_training(tmp_path):
    theirs = peer(ElectraForPreTraining)
    ours = brought_in(theirs, tmp_path, "discriminator")
    ours.compile()
    agree(theirs, ours, "ElectraForPreTraining", is_padded=True, has_segments=True)


def test_bert_for_masked_lm_is_a_generator_as_wide_as_its_embeddings(tmp_path):
    theirs = peer(BertForMaskedLM, "base", BertConfig)
    agree(theirs, brought_in(theirs, tmp_path, "generator"), "BertForMaskedLM", is_padded=True, has_segments=True)


@pytest.mark.parametrize(("kind", "config"), [(ElectraModel, ElectraConfig), (BertModel, BertConfig)])
def test_bare_encoders_give_the_same_hidden_states(tmp_path, kind, config):
    theirs = peer(kind, "base", config)
    encoder = brought_in(theirs, tmp_path, "discriminator").encoder
    input_ids, attention_mask, segment_ids = inputs(True, True)
    expected = theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).last_hidden_state
    actual = encoder(input_ids, attention_mask, segment_ids)
    torch.testing.assert_close(actual[attention_mask == 1], expected[attention_mask == 1], atol=1e-6, rtol=0)


def test_real_weights_made_elsewhere_give_the_same_hidden_states(tmp_path):
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


ROUND_TRIPS = [
    (ElectraForPreTraining, "discriminator", "small"),
    (ElectraForMaskedLM, "generator", "small generator"),
    (ElectraModel, "encoder", "base"),
]


def loaded_without_a_warning(kind, folder: Path, caplog):
    """Load a folder with transformers; every weight finds its place and nothing is said."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not any(info.values())
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "part", "layout"), ROUND_TRIPS)
def test_what_arrives_leaves_byte_for_byte(tmp_path, caplog, kind, part, layout, dtype):
    theirs = peer(kind, layout).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "back", part=part))
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
    back = loaded_without_a_warning(kind, tmp_path / "back", caplog)
    known = {key: value for key, value in theirs.config.to_dict().items() if key != "_name_or_path"}
    assert {key: value for key, value in back.config.to_dict().items() if key in known} == known


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all", "disentangled"])
def test_every_sharing_scheme_leaves_and_gives_the_same_outputs(tmp_path, caplog, make_pair, sharing):
    electra = make_pair(sharing)
    with torch.no_grad():
        for parameter in electra.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_model(electra.eval(), tmp_path / "ours")
    input_ids, attention_mask, segment_ids = inputs(True, True)
    for part, kind in (("discriminator", ElectraForPreTraining), ("generator", ElectraForMaskedLM)):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
        theirs = loaded_without_a_warning(kind, tmp_path / part, caplog)
        expected = getattr(electra, part)(input_ids, attention_mask, segment_ids)
        actual = theirs(input_ids, attention_mask=attention_mask, token_type_ids=segment_ids).logits
        is_token = attention_mask == 1
        torch.testing.assert_close(actual[is_token], expected[is_token], atol=1e-6, rtol=0)


def test_a_pair_that_shared_embeddings_shares_them_again(tmp_path, make_pair):
    save_model(make_pair("embeddings"), tmp_path / "ours")
    for part in ("discriminator", "generator"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
    both = ImportConfig(source=tmp_path / "discriminator", generator=tmp_path / "generator", output=tmp_path / "again")
    import_model(both)
    assert load_model(tmp_path / "again").config == load_model(tmp_path / "ours").config
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_a_pair_with_tables_of_its_own_each_shares_nothing(tmp_path, make_pair):
    save_model(make_pair("none"), tmp_path / "ours")
    for part in ("discriminator", "generator"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
    import_model(
        ImportConfig(source=tmp_path / "discriminator", generator=tmp_path / "generator", output=tmp_path / "again")
    )
    assert load_model(tmp_path / "again").config.sharing == "none"


def test_a_folder_in_several_files_arrives_whole(tmp_path):
    theirs = peer(ElectraForPreTraining)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    agree(theirs, load_model(tmp_path / "ours").eval().discriminator, "ElectraForPreTraining")


def test_a_bare_encoder_leaves_without_a_head_only(tmp_path):
    brought_in(peer(ElectraModel), tmp_path, "discriminator")
    with pytest.raises(ConfigError, match="no trained head; leave it out with --part encoder"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_lone_generator_leaves_when_asked_for(tmp_path):
    brought_in(peer(ElectraForMaskedLM), tmp_path, "generator")
    with pytest.raises(ConfigError, match="no discriminator; hand out its generator with --part generator"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "back"))
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "back", part="generator"))


def test_the_tokenizer_travels_along(tmp_path, make_pair):
    save_model(make_pair(), tmp_path / "ours")
    (tmp_path / "ours/vocab.txt").write_text("[PAD]\n")
    assert export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "theirs")).tokenizer == ["vocab.txt"]
    assert (tmp_path / "theirs/vocab.txt").read_text() == "[PAD]\n"
