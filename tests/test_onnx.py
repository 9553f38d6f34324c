"""ONNX files give the outputs of `transformers`' class at every length; what differs from PyTorch is not written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from conftest import MODERN, NARROW, WIDE, WORDS, error_message
from synthetic import write_choices, write_questions, write_rows, write_tags
from transformers_models import add_noise

from electra.config import build_config
from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.exporting.source import load_export_source
from electra.finetuning.config import TaskConfig
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.models import ChoiceModel, JointSpanModel, SpanModel, TagModel, TaskModel
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.model.config import ElectraConfig
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.onnx import export as onnx_export
from electra.onnx import quantize, verify

LENGTHS = (1, 16, 128, 200, 208)
VOCAB_SIZE = len(WORDS) + 5
SIZES = {
    "classic": replace(WIDE, layers=1, positions=208, vocab_size=VOCAB_SIZE),
    "modern": replace(MODERN, layers=2, global_attention_every=2, positions=208, vocab_size=VOCAB_SIZE),
}


@pytest.fixture(scope="session")
def pairs(shards, tmp_path_factory) -> dict[str, Path]:
    """Model folders of untrained pairs, by style; the discriminator's embeddings are disentangled."""
    folders = {}
    for style, size in SIZES.items():
        folders[style] = tmp_path_factory.mktemp("pairs") / style
        torch.manual_seed(0)
        generator = replace(size, width=NARROW.width, heads=1, feedforward=16, layers=1)
        config = ElectraConfig(generator=generator, discriminator=size, sharing="disentangled")
        save_model(add_noise(Electra(config)), folders[style], shards / "tokenizer")
    return folders


def check_equal_to_transformers(exported: Path, huggingface: Path, has_choices: bool = False) -> None:
    """The ONNX file has the outputs of the class that the config.json names, at all lengths, with padding."""
    settings = json.loads((exported / "config.json").read_text())
    assert settings == json.loads((huggingface / "config.json").read_text())
    model = getattr(transformers, settings["architectures"][0]).from_pretrained(huggingface).eval()
    session = onnxruntime.InferenceSession(exported / "onnx/model.onnx")
    names = [each.name for each in session.get_inputs()]
    for length in LENGTHS:
        shape = (3, 2, length) if has_choices else (3, length)
        generator = torch.Generator().manual_seed(length)
        kept = torch.tensor([length, (length + 1) // 2, 1])
        mask = torch.arange(length) < kept.view(3, *[1] * (len(shape) - 1))
        mask = mask.expand(shape).clone()
        ids = torch.randint(5, VOCAB_SIZE, shape, generator=generator).where(mask, 0)
        segments = torch.randint(2, shape, generator=generator)
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": segments}
        inputs = {name: inputs[name] for name in names}
        with torch.no_grad():
            expected = model(**inputs)
        actual = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        for output, values in zip(session.get_outputs(), actual, strict=True):
            theirs = expected[output.name].numpy()
            assert theirs.shape == values.shape
            of_tokens = theirs.shape[: mask.dim()] == mask.shape
            difference = np.abs(theirs - values)[mask.numpy() if of_tokens else ...].max()
            assert difference < 1e-4, (output.name, length)


FAST = [("encoder", "classic"), ("discriminator", "modern")]
PARTS = [(part, style) for part in ("discriminator", "generator", "encoder") for style in SIZES]


@pytest.mark.parametrize(
    ("part", "style"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in PARTS if each not in FAST)]
)
def test_pre_trained_models_equal_transformers(pairs, tmp_path, part, style):
    for name in ("huggingface", "onnx"):
        export(ExportConfig(model=pairs[style], part=part, to=name, output=tmp_path / name))
    check_equal_to_transformers(tmp_path / "onnx", tmp_path / "huggingface")


WRITERS = {"choice": write_choices, "tags": write_tags, "question-answering": write_questions}


@pytest.mark.slow
@pytest.mark.parametrize("style", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuned_models_equal_transformers(pairs, tmp_path, kind, style):
    rows = tmp_path / f"rows.{'conll' if kind == 'tags' else 'jsonl'}"
    WRITERS[kind](rows, 20, seed=0) if kind in WRITERS else write_rows(rows, kind, 20, seed=0)
    task = define_task(TaskConfig(train=rows, kind=kind))
    pretrained = load_pretrained(pairs[style])
    model_class = KINDS[kind].model(task)
    model = add_noise(model_class(pretrained.encoder, task.num_labels, "cls" if style == "classic" else "mean"))
    (tmp_path / "model").mkdir()
    save_finetuned_model(model, task, 208, tmp_path / "model", pretrained.folder)
    for name in ("huggingface", "onnx"):
        export(ExportConfig(model=tmp_path / "model", to=name, output=tmp_path / name))
    check_equal_to_transformers(tmp_path / "onnx", tmp_path / "huggingface", has_choices=kind == "choice")


def test_outputs_of_heads_are_those_of_their_class_in_transformers_if_there_is_one(pairs):
    """Shapes only: values are compared by slow tests."""
    encoder = load_pretrained(pairs["classic"]).encoder
    ids = torch.randint(5, VOCAB_SIZE, (3, 2, 7))
    for model, inputs, shapes in (
        (TaskModel(encoder, 4), ids[:, 0], {"logits": (3, 4)}),
        (TagModel(encoder, 4), ids[:, 0], {"logits": (3, 7, 4)}),
        (ChoiceModel(encoder, 1), ids, {"logits": (3, 2)}),
        (SpanModel(encoder, 1), ids[:, 0], {"start_logits": (3, 7), "end_logits": (3, 7)}),
        (JointSpanModel(encoder, 1), ids[:, 0], {"start_logits": (3, 7), "end_logits": (3, 7, 20), "null_logit": (3,)}),
    ):
        assert len(model.exported_axes) == inputs.dim()
        outputs = model.exported_outputs(inputs, torch.ones_like(inputs).bool(), torch.zeros_like(inputs))
        assert {name: tensor.shape for name, tensor in outputs.items()} == shapes


def test_a_lost_window_is_noticed_and_nothing_is_written(pairs, tmp_path, monkeypatch):
    """Traced at four tokens, local attention is global at all lengths."""
    trace = onnx_export.trace
    monkeypatch.setattr(onnx_export, "trace", lambda model, length: trace(model, 3))
    with pytest.raises(DataError, match=r"at 16 tokens its outputs differ by .* nothing was written"):
        export(ExportConfig(model=pairs["modern"], to="onnx", output=tmp_path / "onnx"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def exported(pairs, tmp_path_factory) -> tuple[Path, dict]:
    """A discriminator with an int8 file, and the report."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    config = build_config(ExportConfig, model=pairs["classic"], to="onnx", int8=True, output=folder)
    return folder, export(config)


def test_the_folder_has_the_layout_of_transformers_js(exported):
    folder, report = exported
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    onnx_files = {"onnx/model.onnx", "onnx/model_quantized.onnx"}
    assert files == {"README.md", "config.json", *report.tokenizer, *onnx_files}
    assert {"tokenizer.json", "tokenizer_config.json"} <= files
    assert [file.name for file in report.files] == ["onnx/model.onnx", "onnx/model_quantized.onnx"]
    assert report.lengths == [1, 16, 128, 200, 208]
    assert report.files[0].largest_difference < 1e-4 < report.files[1].largest_difference
    assert 0.9 < report.files[1].lowest_cosine < 0.999999 < report.files[0].lowest_cosine
    assert "onnx/model_quantized.onnx" in str(report)


def test_batch_and_length_are_dynamic_and_named(exported):
    graph = onnx.load(exported[0] / "onnx/model.onnx").graph
    dimensions = {each.name: [axis.dim_param for axis in each.type.tensor_type.shape.dim] for each in graph.input}
    assert dimensions == {name: ["batch", "length"] for name in ("input_ids", "attention_mask", "token_type_ids")}
    assert [output.name for output in graph.output] == ["logits"]


def test_sums_before_layer_norms_are_not_fused(exported):
    graph = onnx.load(exported[0] / "onnx/model.onnx").graph
    producers = {name: node.op_type for node in graph.node for name in node.output}
    norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
    assert [producers[node.input[0]] for node in norms] == ["Sum"] * 3  # embeddings, attention, feed-forward


@pytest.mark.parametrize("name", ["model.onnx", "model_quantized.onnx"])
def test_queries_keys_and_values_are_not_copied_out_of_one_product(exported, name):
    graph = onnx.load(exported[0] / "onnx" / name).graph
    assert not {"Slice", "Split"} & {node.op_type for node in graph.node}
    shapes = [list(each.dims) for each in graph.initializer]
    assert [WIDE.width, 3 * WIDE.width] not in shapes
    assert sum(node.op_type == "DynamicQuantizeLinear" for node in graph.node) in (
        0,
        4,
    )  # one for all three; one product is fp32


@pytest.mark.parametrize("name", ["model.onnx", "model_quantized.onnx"])
def test_files_name_no_path_of_the_computer_that_wrote_them(exported, name):
    stored = (exported[0] / "onnx" / name).read_bytes()
    assert b".py" not in stored


def test_int8_files_keep_the_head_in_fp32(exported):
    graph = onnx.load(exported[0] / "onnx/model_quantized.onnx").graph
    products = [node.op_type for node in graph.node if node.op_type in ("MatMul", "MatMulInteger")]
    assert products.count("MatMulInteger") == 6  # in the layer; the projection stays in fp32
    assert products[-2:] == ["MatMul", "MatMul"]


def test_classifiers_are_quantised(finetuned, tmp_path):
    """Their head is a 2D product, whose weights ONNX Runtime transposes."""
    source = load_export_source(ExportConfig(model=finetuned.output, output=tmp_path))
    model = onnx_export.ExportableModel(source.model, source.encoder, source.outputs).eval()
    onnx_export.write_onnx(model, tmp_path / "fp32.onnx")
    quantize.write_int8(model, tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    inputs = {name: tensor.numpy() for name, tensor in model.sample_inputs(3, 8).items()}
    fp32, int8 = (
        onnxruntime.InferenceSession(tmp_path / f"{name}.onnx").run(None, inputs)[0] for name in ("fp32", "int8")
    )
    assert fp32.shape == int8.shape
    assert np.corrcoef(fp32.ravel(), int8.ravel())[0, 1] > 0.7  # coarse for a width of 24


def product_graph(weight: np.ndarray) -> onnx.ModelProto:
    """x W."""
    nodes = [onnx.helper.make_node("MatMul", ["x", "weight"], ["y"], "product")]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "graph", [values[0]], [values[1]])
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("index", [(slice(None), 3), 3])
def test_outlier_channels_and_tokens_are_scaled(index):
    """x W, with one channel or one token of x a hundred times as large as the others."""
    generator = np.random.default_rng(0)
    x, weight = (generator.normal(size=shape).astype(np.float32) for shape in ((64, 16), (16, 8)))
    x[index] *= 100
    scaling = quantize.choose_scaling(x, [weight])
    assert scaling.by_token if index == 3 else scaling.factors.argmax() == 3
    plain = quantize.Scaling(np.ones(16, np.float32), by_token=False)
    errors = []
    for each in (plain, scaling):
        weights = [quantize.quantise_weight(weight * each.factors[:, None])]
        model = product_graph(weight)
        quantize.quantise_products(model, {"x": quantize.QuantisedProducts(each, weights)})
        y = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
        errors.append(np.square((y - x @ weight)[np.arange(64) != 3]).mean())
    assert errors[1] < errors[0] / 5


@pytest.mark.parametrize("inputs", [15, 16])
def test_pairs_of_products_do_not_saturate_in_16_bits(inputs):
    """255 * 128 < 2**15: two adjacent weights of one sign have a sum of at most 128."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(inputs, 200)).astype(np.float32)
    tokens = generator.normal(size=(50, inputs)).astype(np.float32)
    for rows, steps in (quantize.quantise_weight(weight), quantize.quantise_calibrated(weight, tokens)):
        pairs = np.pad(rows.astype(int), ((0, inputs % 2), (0, 0))).reshape(-1, 2, 200)
        sums = np.maximum(pairs, 0).sum(1), np.maximum(-pairs, 0).sum(1)
        assert 120 < np.max(sums) <= 128
        assert np.abs(rows * steps - weight).max() < 0.1


def test_rounding_errors_of_weights_are_compensated_for_their_inputs():
    """Inputs of four directions in sixteen channels."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(16, 200)).astype(np.float32)
    tokens = (generator.normal(size=(50, 4)) @ generator.normal(size=(4, 16))).astype(np.float32)
    errors = []
    for rows, steps in (quantize.quantise_weight(weight), quantize.quantise_calibrated(weight, tokens)):
        errors.append(np.square(tokens @ (rows * steps - weight)).sum())
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(("fraction", "products"), [(0.0, 7), (1.0, 0)])
def test_a_fraction_of_the_products_stays_in_fp32(pairs, exported, tmp_path, monkeypatch, fraction, products):
    model = load_export_source(ExportConfig(model=pairs["classic"], to="onnx", output=tmp_path)).exportable_model()
    monkeypatch.setattr(quantize, "FP32_FRACTION", fraction)
    quantize.write_int8(model, exported[0] / "onnx/model.onnx", tmp_path / "int8.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]
    operators = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert operators.count("MatMulInteger") == products


def test_int8_is_calibrated_with_the_tokens_around_texts(pairs, tmp_path):
    source = load_export_source(ExportConfig(model=pairs["classic"], to="onnx", output=tmp_path))
    vocabulary = load_tokenizer(source.folder).vocabulary
    ids = quantize.calibration_sample(source.exportable_model())["input_ids"]
    assert ids.shape == (16, 128)
    assert (ids[:, 0] == vocabulary.cls_id).all()
    assert (ids[:, [63, 127]] == vocabulary.sep_id).all()


def test_int8_that_is_too_coarse_is_an_error(exported, monkeypatch):
    monkeypatch.setattr(
        verify, "compare", lambda *arguments: iter([verify.BatchDifference(1, 1.0, 1.0, np.array([0.5]))])
    )
    with pytest.raises(DataError, match=r"only 0\.0% of the tokens"):
        verify.verify_int8(None, exported[0], print)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--int8", "--int8 needs --to onnx"),
        ("--to page --part generator", "--part is generator, but --to page writes the whole model; leave it out"),
        ("--to package --part encoder", "--part is encoder, but --to package writes the whole model; leave it out"),
    ],
)
def test_flags_that_a_format_does_not_have_are_refused(capsys, tmp_path, flags, message):
    assert message in error_message(f"export --model {tmp_path} --output {tmp_path}/out {flags}", capsys)


def test_all_missing_libraries_are_named_at_once(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "LIBRARIES", ("torch", "no_onnx", "no_runtime"))
    with pytest.raises(ConfigError, match="needs no_onnx, no_runtime: pip install no_onnx no_runtime"):
        export(ExportConfig(model=pairs["classic"], to="onnx", output=tmp_path / "onnx"))


def test_models_over_the_limit_of_onnx_files_are_refused(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"2 GiB; use --to huggingface"):
        export(ExportConfig(model=pairs["classic"], to="onnx", output=tmp_path / "onnx"))
    assert list(tmp_path.iterdir()) == []


def test_a_vocab_txt_becomes_a_tokenizer_json(pairs, tmp_path):
    """transformers.js reads nothing else."""
    source, output = tmp_path / "model", tmp_path / "onnx"
    shutil.copytree(pairs["classic"], source, ignore=shutil.ignore_patterns("tokenizer.json", "checksums.json"))
    output.mkdir()
    assert "tokenizer.json" in onnx_export.write_tokenizer(source, output, 32)
    fingerprints = [load_tokenizer(folder).fingerprint for folder in (source, output)]
    assert fingerprints[0] == fingerprints[1]
