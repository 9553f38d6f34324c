"""An exported ONNX folder gives the results of the model that it was exported from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MODERN, WIDE, WORDS
from synthetic import write_choices, write_questions, write_rows, write_tags
from transformers_models import add_noise

import electra
from electra import errors
from electra.errors import ConfigError, DataError
from electra.finetuning.config import TaskConfig
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.model.config import ElectraConfig
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.serving.config import LimitsConfig, ServeConfig
from electra.serving.inference import load_onnx, load_text_model
from electra.serving.service import load_service

TEXTS = ["the [MASK] cat sat on the mat .", "[MASK]", "the dog ran . the [MASK] [MASK] flew over the tree ."]
SIZES = {
    style: replace(size, layers=1, vocab_size=len(WORDS) + 5)
    for style, size in {"classic": WIDE, "modern": MODERN}.items()
}
WRITERS = {"choice": write_choices, "tags": write_tags, "question-answering": write_questions}


@pytest.fixture(scope="module", params=["classic", pytest.param("modern", marks=pytest.mark.slow)])
def pair(request, shards, tmp_path_factory) -> Path:
    """A model folder of an untrained pair."""
    size, folder = SIZES[request.param], tmp_path_factory.mktemp("pair") / "model"
    torch.manual_seed(0)
    config = ElectraConfig(generator=size, discriminator=size, sharing="embeddings")
    save_model(add_noise(Electra(config)), folder, shards / "tokenizer")
    return folder


def close(values) -> object:
    return pytest.approx(list(values), abs=1e-3)


def test_detect_and_embed_equal_pytorch(pair, tmp_path):
    electra.export(model=pair, to="onnx", int8=True, output=tmp_path / "onnx")
    model, onnx = electra.load(pair, device="cpu"), electra.load(tmp_path / "onnx")
    assert onnx.methods() == ["detect", "embed"]
    for ours, theirs in zip(model.detect_batch(TEXTS), onnx.detect_batch(TEXTS), strict=True):
        assert theirs.tokens == ours.tokens
        assert theirs.replaced == close(ours.replaced)
    torch.testing.assert_close(onnx.embed(TEXTS), model.embed(TEXTS), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="no generator"):
        onnx.fill("[MASK]")
    with pytest.raises(ConfigError, match="the last layer only"):
        onnx.embed(TEXTS, layers=(0, 1))
    int8 = load_onnx(tmp_path / "onnx", int8=True)
    differences = (int8.embed(TEXTS) - model.embed(TEXTS)).abs()
    assert 1e-5 < differences.max() < 0.5
    config = ServeConfig(model=tmp_path / "onnx", int8=True, limits=LimitsConfig(batch_tokens=64))
    results = load_service(config).compute(("detect", None), TEXTS)
    assert [each["tokens"] for each in results] == [each.tokens for each in model.detect_batch(TEXTS)]
    with pytest.raises(DataError, match=r"no fine-tuned model in .*; it has ONNX files, for electra serve"):
        electra.predict(model=tmp_path / "onnx", input=tmp_path / "rows.csv", output=tmp_path / "out.csv")
    with pytest.raises(DataError, match=r"has no model.safetensors; it has ONNX files, for electra serve"):
        load_text_model(tmp_path / "onnx", "cpu")
    with pytest.raises(ConfigError, match="--backend onnx"):
        load_service(replace(config, backend="torch"))
    with pytest.raises(ConfigError, match="computed on the CPU"):
        load_service(replace(config, device="cuda"))


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_damaged_onnx_file_is_named(pair, tmp_path, size):
    electra.export(model=pair, to="onnx", output=tmp_path / "onnx")
    file = tmp_path / "onnx/onnx/model.onnx"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=r"onnx/model.onnx is damaged .*; export it again"):
        electra.load(tmp_path / "onnx")


def test_onnx_files_are_run_without_the_library_that_traces_them(pair, tmp_path, monkeypatch):
    electra.export(model=pair, to="onnx", output=tmp_path / "onnx")
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert len(electra.load(tmp_path / "onnx").embed(["a text"])) == 1
    with pytest.raises(ConfigError, match="needs onnxscript: pip install onnxscript"):
        electra.export(model=pair, to="onnx", output=tmp_path / "other")


def test_fill_equals_pytorch(pair, tmp_path):
    electra.export(model=pair, part="generator", to="onnx", output=tmp_path / "onnx")
    model, onnx = electra.load(pair, device="cpu"), electra.load(tmp_path / "onnx")
    assert onnx.methods() == ["fill", "embed"]
    for ours, theirs in zip(model.fill_batch(TEXTS), onnx.fill_batch(TEXTS), strict=True):
        assert [mask.position for mask in theirs.masks] == [mask.position for mask in ours.masks]
        for mask, of_torch in zip(theirs.masks, ours.masks, strict=True):
            assert list(mask.tokens.values()) == close(of_torch.tokens.values())
    with pytest.raises(DataError, match="export it with --to onnx --int8"):
        load_onnx(tmp_path / "onnx", int8=True)


FAST = ("regression", "classic", {})
MODELS = [
    FAST,
    *((kind, "classic", {}) for kind in KINDS if kind != "regression"),
    *(("tags", style, {"crf": True}) for style in ("classic", "modern")),
    *(("question-answering", style, {"head": "joint"}) for style in ("classic", "modern")),
]


@pytest.mark.parametrize(
    ("kind", "style", "settings"),
    [pytest.param(*each, marks=[] if each is FAST else pytest.mark.slow) for each in MODELS],
)
def test_fine_tuned_models_predict_as_pytorch(encoder_folder, modern_folder, tmp_path, kind, style, settings):
    rows = tmp_path / f"rows.{'conll' if kind == 'tags' else 'jsonl'}"
    more = {"has_unanswerable": True} if settings.get("head") == "joint" else {}
    WRITERS[kind](rows, 20, seed=0, **more) if kind in WRITERS else write_rows(rows, kind, 20, seed=0)
    task = define_task(TaskConfig(train=rows, kind=kind, **settings))
    pretrained = load_pretrained(encoder_folder if style == "classic" else modern_folder)
    model = add_noise(KINDS[kind].model(task)(pretrained.encoder, task.num_labels))
    (tmp_path / "model").mkdir()
    save_finetuned_model(model, task, 32, tmp_path / "model", pretrained.folder)
    electra.export(model=tmp_path / "model", to="onnx", output=tmp_path / "onnx")
    assert str(tmp_path) not in (tmp_path / "onnx/task.json").read_text()
    values = [row.values for row in KINDS[kind].read_rows(rows)]
    expected = electra.load(tmp_path / "model", device="cpu").predict(values)
    for ours, theirs in zip(expected, electra.load(tmp_path / "onnx").predict(values), strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            is_number = isinstance(value, float)
            assert theirs[name] == (pytest.approx(value, abs=1e-3) if is_number or name == "probabilities" else value)
