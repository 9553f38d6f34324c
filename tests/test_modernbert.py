"""The modern style agrees with transformers' ModernBERT: outputs, gradients, and folders that go out and in."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MODERN, WORDS
from peers import modern_peer
from test_huggingface import inputs, loaded_without_a_warning
from transformers import (
    AutoTokenizer,
    ModernBertForMaskedLM,
    ModernBertForTokenClassification,
    ModernBertModel,
    pipeline,
)

from electra.errors import DataError
from electra.export.command import ExportConfig, ImportConfig, export, import_model
from electra.model.config import ElectraConfig
from electra.model.electra import SHARING, Electra
from electra.model.storage import load_model, save_model
from electra.serve.inference import load

PARTS = {
    ModernBertForTokenClassification: "discriminator",
    ModernBertForMaskedLM: "generator",
    ModernBertModel: "encoder",
}


def brought_in(model, folder: Path, kind):
    """The part that transformers saved and we imported."""
    model.save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "ours"))
    electra = load_model(folder / "ours").eval()
    return electra.discriminator.encoder if PARTS[kind] == "encoder" else getattr(electra, PARTS[kind])


def their_output(model, input_ids, attention_mask) -> torch.Tensor:
    """Hidden states, logits over the vocabulary, or by how much a token looks replaced rather than original."""
    output = model(input_ids, attention_mask=attention_mask)[0]
    return output[..., 1] - output[..., 0] if isinstance(model, ModernBertForTokenClassification) else output


def agree(theirs, ours, is_padded: bool) -> None:
    """Outputs within 1e-5, and gradients of the token table within 1e-4, at positions that are not padding."""
    input_ids, attention_mask, _ = inputs(is_padded, has_segments=False)
    is_token = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    expected = their_output(theirs, input_ids, attention_mask)[is_token]
    actual = ours(input_ids, attention_mask)[is_token]
    assert expected.std() > 0.03
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / expected.numel() ** 0.5
    tables = [theirs.get_input_embeddings().weight, getattr(ours, "encoder", ours).embeddings.token.weight]
    gradients = [
        torch.autograd.grad((out * weights).sum(), it) for out, it in ((expected, tables[0]), (actual, tables[1]))
    ]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("global_attention_every", [1, 3])
@pytest.mark.parametrize("kind", PARTS)
def test_outputs_equal_modernberts(tmp_path, kind, global_attention_every, is_padded, attention):
    theirs = modern_peer(kind, global_attention_every, attn_implementation=attention)
    agree(theirs, brought_in(theirs, tmp_path, kind), is_padded)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_discriminator_equals_modernberts(tmp_path):
    theirs = modern_peer(ModernBertForTokenClassification, global_attention_every=3)
    ours = brought_in(theirs, tmp_path, ModernBertForTokenClassification)
    ours.compile()
    agree(theirs, ours, is_padded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("global_attention_every", [1, 3])
@pytest.mark.parametrize("kind", PARTS)
def test_what_arrives_leaves_byte_for_byte(tmp_path, caplog, kind, global_attention_every, dtype):
    theirs = modern_peer(kind, global_attention_every).to(dtype)
    brought_in(theirs, tmp_path, kind)
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "back", part=PARTS[kind]))
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
    back = loaded_without_a_warning(kind, tmp_path / "back", caplog)
    has_labels = kind is ModernBertForTokenClassification
    known = {key: value for key, value in theirs.config.to_dict().items() if has_labels or "label" not in key}
    assert {key: value for key, value in back.config.to_dict().items() if key in known} == known | {
        "_name_or_path": str(tmp_path / "back")
    }


@pytest.mark.parametrize("sharing", SHARING)
def test_narrow_and_added_tables_leave_as_the_one_they_amount_to(tmp_path, caplog, make_pair, sharing):
    electra = make_pair(sharing, size=MODERN)
    with torch.no_grad():
        for parameter in electra.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_model(electra.eval(), tmp_path / "ours")
    input_ids, attention_mask, segment_ids = inputs(True, True)
    is_token = attention_mask == 1
    for kind, part in PARTS.items():
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
        theirs = loaded_without_a_warning(kind, tmp_path / part, caplog)
        ours = electra.discriminator.encoder if part == "encoder" else getattr(electra, part)
        expected = ours(input_ids, attention_mask, segment_ids)[is_token]
        actual = their_output(theirs, input_ids, attention_mask)[is_token]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_pair_that_is_alike_shares_its_token_table_again(tmp_path):
    same = replace(MODERN, embedding_width=MODERN.width)
    electra = Electra(ElectraConfig(generator=replace(same, feedforward=8), discriminator=same))
    save_model(electra, tmp_path / "ours")
    for part in ("discriminator", "generator"):
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
    pair = ImportConfig(source=tmp_path / "discriminator", generator=tmp_path / "generator", output=tmp_path / "again")
    import_model(pair)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@pytest.fixture
def trained_folder(shards, tmp_path):
    """A modern pair over simple text that was never trained, with its tokenizer."""
    torch.manual_seed(0)
    size = replace(MODERN, vocab_size=len(WORDS) + 5, init_std=0.2)
    pair = ElectraConfig(generator=replace(size, width=8, heads=1), discriminator=size)
    save_model(Electra(pair), tmp_path / "model", shards / "tokenizer")
    return tmp_path / "model"


def test_a_token_classification_pipeline_shows_the_verdicts(trained_folder, tmp_path):
    export(ExportConfig(model=trained_folder, output=tmp_path / "out"))
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert (settings["pad_token_id"], settings["cls_token_id"], settings["sep_token_id"]) == (0, 2, 3)
    ours = load(trained_folder).detect("the big cat sat on the mat")
    theirs = pipeline("token-classification", str(tmp_path / "out"), ignore_labels=[])("the big cat sat on the mat")
    assert [row["word"] for row in theirs] == ours.tokens[1:-1]
    for row, verdict in zip(theirs, ours.replaced[1:-1], strict=True):
        assert row["entity"] == ("replaced" if verdict > 0.5 else "original")
        assert row["score"] == pytest.approx(max(verdict, 1 - verdict), abs=1e-4)


def test_a_fill_mask_pipeline_guesses_as_the_generator_does(trained_folder, tmp_path):
    export(ExportConfig(model=trained_folder, output=tmp_path / "out", part="generator"))
    [blank] = load(trained_folder).fill("the big cat [MASK] on the mat", 3).blanks
    theirs = pipeline("fill-mask", str(tmp_path / "out"), top_k=3)("the big cat [MASK] on the mat")
    assert [row["token_str"] for row in theirs] == list(blank.guesses)
    assert [row["score"] for row in theirs] == pytest.approx(list(blank.guesses.values()), abs=1e-4)


def test_a_vector_is_the_mean_of_modernberts_hidden_states(trained_folder, tmp_path):
    export(ExportConfig(model=trained_folder, output=tmp_path / "out", part="encoder"))
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")("the big cat sat", return_tensors="pt")
    hidden = ModernBertModel.from_pretrained(tmp_path / "out").eval()(**batch).last_hidden_state
    torch.testing.assert_close(load(trained_folder).embed("the big cat sat"), hidden.mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu' can be taken in"),
        ({"norm_bias": True}, "norm_bias is True; only False can be taken in"),
        ({"mlp_dropout": 0.1}, "mlp_dropout differs from embedding_dropout; only one for both can be taken in"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*; of 4 layers, the first and every so many"),
        ({"layer_types": 3}, "layer_types is 3; of 4 layers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only the rope_type 'default' can be taken"),
        ({"rope_parameters": ["yarn"]}, r"rope_parameters is \['yarn'\]; of full_attention and sliding"),
        ({"id2label": {"0": "O"}}, "labels of its own, {'0': 'O'}; only a discriminator, with the labels original and"),
        ({"id2label": None}, "theirs is a classifier of tokens with labels without names; only a discriminator"),
        ({"rope_parameters": {"rope_theta": 777}}, "777}; of full_attention and sliding_attention only the rope_type"),
        ({"hidden_size": 30}, r"classifier.weight has shape \(2, 24\), but config.json requires \(2, 30\)"),
        ({"num_attention_heads": 8}, "8 heads of width 3 cannot turn by position, which takes an even width"),
    ],
)
def test_a_folder_we_cannot_take_in_is_refused(tmp_path, settings, sentence):
    modern_peer(ModernBertForTokenClassification).save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text()) | settings
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=sentence):
        import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_an_older_config_says_the_same_in_other_words(tmp_path):
    theirs = modern_peer(ModernBertModel, global_attention_every=3)
    brought_in(theirs, tmp_path, ModernBertModel)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "again"))
    assert load_model(tmp_path / "again").config == load_model(tmp_path / "ours").config


def test_other_bases_of_rotary_positions_are_kept(tmp_path):
    turns = {"full_attention": 500.0, "sliding_attention": 50.0}
    turns = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in turns.items()}
    theirs = modern_peer(ModernBertModel, global_attention_every=3, rope_parameters=turns)
    ours = brought_in(theirs, tmp_path, ModernBertModel)
    assert (ours.config.global_theta, ours.config.local_theta) == (500.0, 50.0)
    agree(theirs, ours, is_padded=True)
