"""Modern models agree with transformers' ModernBERT, and export and import without a changed byte."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MODERN, WORDS
from test_huggingface import export_and_import_pair, inputs
from test_import import check_import_fails
from transformers import (
    AutoTokenizer,
    ModernBertForMaskedLM,
    ModernBertForTokenClassification,
    ModernBertModel,
    pipeline,
)
from transformers_models import add_noise, load_without_warnings, our_output, random_modernbert

from electra.exporting.command import export, import_model
from electra.exporting.config import ExportConfig, ImportConfig
from electra.model.config import ElectraConfig
from electra.model.electra import SHARING, Electra
from electra.model.storage import load_model, save_model
from electra.serving.inference import load

PARTS = {
    ModernBertForTokenClassification: "discriminator",
    ModernBertForMaskedLM: "generator",
    ModernBertModel: "encoder",
}


def imported(model, folder: Path, model_class):
    """A model that was saved by transformers and imported by us."""
    model.save_pretrained(folder / "theirs")
    import_model(ImportConfig(source=folder / "theirs", output=folder / "ours"))
    return select(load_model(folder / "ours").eval(), PARTS[model_class])


def select(electra: Electra, part: str):
    return electra.discriminator.encoder if part == "encoder" else getattr(electra, part)


def their_output(model, input_ids, attention_mask) -> torch.Tensor:
    """Hidden states, vocabulary logits, or the difference of the logits of "replaced" and "original"."""
    output = model(input_ids, attention_mask=attention_mask)[0]
    return output[..., 1] - output[..., 0] if isinstance(model, ModernBertForTokenClassification) else output


def check_equal(theirs, ours, is_padded: bool) -> None:
    """Outputs are equal within 1e-5, and gradients of the token table within 1e-4, padding excluded."""
    input_ids, attention_mask, _ = inputs(is_padded, has_segments=False)
    is_token = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    expected = their_output(theirs, input_ids, attention_mask)[is_token]
    actual = our_output(ours, input_ids, attention_mask)[is_token]
    assert expected.std() > 0.03
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / expected.numel() ** 0.5
    their_table = theirs.get_input_embeddings().weight
    our_table = getattr(ours, "encoder", ours).embeddings.token.weight
    [expected_grad] = torch.autograd.grad((expected * weights).sum(), their_table)
    [actual_grad] = torch.autograd.grad((actual * weights).sum(), our_table)
    torch.testing.assert_close(actual_grad, expected_grad, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("global_attention_every", [1, 3])
@pytest.mark.parametrize("model_class", PARTS)
def test_outputs_equal_modernbert(tmp_path, model_class, global_attention_every, is_padded, attention):
    theirs = random_modernbert(model_class, global_attention_every, attn_implementation=attention)
    check_equal(theirs, imported(theirs, tmp_path, model_class), is_padded)


def test_compiled_discriminator_equals_modernbert(tmp_path):
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    theirs = random_modernbert(ModernBertForTokenClassification, **layers)
    ours = imported(theirs, tmp_path, ModernBertForTokenClassification)
    ours.compile(backend="aot_eager")
    check_equal(theirs, ours, is_padded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("global_attention_every", [1, 3])
@pytest.mark.parametrize("model_class", PARTS)
def test_import_followed_by_export_is_byte_identical(tmp_path, caplog, model_class, global_attention_every, dtype):
    theirs = random_modernbert(model_class, global_attention_every).to(dtype)
    imported(theirs, tmp_path, model_class)
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported", part=PARTS[model_class]))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "exported")]
    assert weights[0] == weights[1]
    exported = load_without_warnings(model_class, tmp_path / "exported", caplog)
    has_labels = model_class is ModernBertForTokenClassification
    settings = {key: value for key, value in theirs.config.to_dict().items() if has_labels or "label" not in key}
    settings |= {"_name_or_path": str(tmp_path / "exported")}
    assert {key: value for key, value in exported.config.to_dict().items() if key in settings} == settings


@pytest.mark.parametrize("sharing", SHARING)
def test_projected_and_disentangled_embeddings_are_exported_as_one_table(tmp_path, caplog, make_pair, sharing):
    electra = add_noise(make_pair(sharing, size=MODERN))
    save_model(electra, tmp_path / "ours")
    input_ids, attention_mask, segment_ids = inputs(True, True)
    is_token = attention_mask == 1
    for model_class, part in PARTS.items():
        export(ExportConfig(model=tmp_path / "ours", output=tmp_path / part, part=part))
        theirs = load_without_warnings(model_class, tmp_path / part, caplog)
        expected = our_output(select(electra, part), input_ids, attention_mask, segment_ids)[is_token]
        actual = their_output(theirs, input_ids, attention_mask)[is_token]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_import_restores_a_shared_token_table(tmp_path):
    encoder = replace(MODERN, embedding_width=MODERN.width)
    save_model(
        Electra(ElectraConfig(generator=replace(encoder, feedforward=8), discriminator=encoder)), tmp_path / "ours"
    )
    folder = export_and_import_pair(tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@pytest.fixture(scope="session")
def pair_folder(shards, tmp_path_factory):
    """A modern pair with random weights and the tokenizer of the simple text."""
    torch.manual_seed(0)
    encoder = replace(MODERN, vocab_size=len(WORDS) + 5, init_std=0.2)
    pair = ElectraConfig(generator=replace(encoder, width=8, heads=1), discriminator=encoder)
    folder = tmp_path_factory.mktemp("modern") / "model"
    save_model(Electra(pair), folder, shards / "tokenizer")
    return folder


def test_token_classification_pipeline_equals_detect(pair_folder, tmp_path):
    export(ExportConfig(model=pair_folder, output=tmp_path / "exported"))
    settings = json.loads((tmp_path / "exported/config.json").read_text())
    assert (settings["pad_token_id"], settings["cls_token_id"], settings["sep_token_id"]) == (0, 2, 3)
    ours = load(pair_folder).detect("the big cat sat on the mat")
    theirs = pipeline("token-classification", str(tmp_path / "exported"), ignore_labels=[])
    rows = theirs("the big cat sat on the mat")
    assert [row["word"] for row in rows] == ours.tokens[1:-1]
    for row, probability in zip(rows, ours.replaced[1:-1], strict=True):
        assert row["entity"] == ("replaced" if probability > 0.5 else "original")
        assert row["score"] == pytest.approx(max(probability, 1 - probability), abs=1e-4)


def test_fill_mask_pipeline_equals_fill(pair_folder, tmp_path):
    export(ExportConfig(model=pair_folder, output=tmp_path / "exported", part="generator"))
    [mask] = load(pair_folder).fill("the big cat [MASK] on the mat", 3).masks
    rows = pipeline("fill-mask", str(tmp_path / "exported"), top_k=3)("the big cat [MASK] on the mat")
    assert [row["token_str"] for row in rows] == list(mask.tokens)
    assert [row["score"] for row in rows] == pytest.approx(list(mask.tokens.values()), abs=1e-4)


def test_embed_is_the_mean_of_modernbert_hidden_states(pair_folder, tmp_path):
    export(ExportConfig(model=pair_folder, output=tmp_path / "exported", part="encoder"))
    batch = AutoTokenizer.from_pretrained(tmp_path / "exported")("the big cat sat", return_tensors="pt")
    hidden = ModernBertModel.from_pretrained(tmp_path / "exported").eval()(**batch).last_hidden_state
    torch.testing.assert_close(load(pair_folder).embed("the big cat sat"), hidden.mean(1), atol=1e-5, rtol=0)


@pytest.fixture(scope="session")
def discriminator_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface") / "theirs"
    random_modernbert(ModernBertForTokenClassification).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu' is supported"),
        ({"norm_bias": True}, "norm_bias is True; only False is supported"),
        ({"mlp_dropout": 0.1}, "mlp_dropout differs from embedding_dropout"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*; full_attention must be in the first"),
        ({"layer_types": 3}, "layer_types is 3; "),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "supported is the rope_type 'default'"),
        ({"rope_parameters": ["yarn"]}, r"rope_parameters is \['yarn'\]; supported is"),
        ({"rope_parameters": {"rope_theta": 777}}, "777}; supported is .* for full_attention and sliding_attention"),
        ({"id2label": {"0": "O"}}, "id2label {'0': 'O'}; only a discriminator, with the labels original and replaced"),
        ({"id2label": None}, "id2label None; only a discriminator"),
        ({"hidden_size": 30}, r"classifier.weight has shape \(2, 24\), but config.json requires \(2, 30\)"),
        ({"num_attention_heads": 8}, "8 heads of width 3, but rotary positions need an even head width"),
    ],
)
def test_settings_that_are_not_supported_are_an_error(discriminator_folder, tmp_path, settings, message):
    check_import_fails(discriminator_folder, tmp_path, settings, {}, message)


def test_settings_of_older_versions_of_transformers(tmp_path):
    imported(random_modernbert(ModernBertModel, global_attention_every=3), tmp_path, ModernBertModel)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "older"))
    assert load_model(tmp_path / "older").config == load_model(tmp_path / "ours").config
    (tmp_path / "theirs/config.json").write_text(json.dumps(config | {"local_rope_theta": None}))
    import_model(ImportConfig(source=tmp_path / "theirs", output=tmp_path / "null"))
    encoder = load_model(tmp_path / "null").config.discriminator
    assert (encoder.global_theta, encoder.local_theta) == (160000.0, 160000.0)


def test_exports_have_the_settings_of_older_versions_of_transformers_too(make_pair, tmp_path):
    size = replace(MODERN, layers=4, global_attention_every=2, global_theta=500.0, local_theta=50.0)
    save_model(make_pair("none", size=size), tmp_path / "ours")
    export(ExportConfig(model=tmp_path / "ours", output=tmp_path / "exported"))
    settings = json.loads((tmp_path / "exported/config.json").read_text())
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 50.0}
    assert {name: settings[name] for name in older} == older


def test_rope_bases_are_imported(tmp_path):
    thetas = {"full_attention": 500.0, "sliding_attention": 50.0}
    parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    theirs = random_modernbert(ModernBertModel, global_attention_every=3, rope_parameters=parameters)
    ours = imported(theirs, tmp_path, ModernBertModel)
    assert (ours.config.global_theta, ours.config.local_theta) == (500.0, 50.0)
    check_equal(theirs, ours, is_padded=True)
