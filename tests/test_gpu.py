"""Kernels and training on a GPU; skipped without one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from layers import random_layer, reference_layer
from safetensors.torch import load_file
from synthetic import write_choices, write_questions, write_rows, write_tags
from torch import Tensor
from torch.nn import functional

from electra.config import build_config
from electra.data.loader import Batch, compute_cu_seqlens
from electra.errors import TrainingError
from electra.finetuning.command import finetune
from electra.finetuning.config import FinetuneConfig, TaskConfig, TuningConfig
from electra.finetuning.job import FinetuningTask, Job
from electra.finetuning.kinds import define_task
from electra.kernels import dispatch, reference
from electra.kernels.dispatch import AttentionBias
from electra.kernels.side_stream import GeneratorStream
from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer, Encoder, make_attention_bias
from electra.model.heads import RTDHead
from electra.objectives.config import MaskingConfig
from electra.objectives.losses import total_loss
from electra.objectives.masking import mask
from electra.objectives.objectives import ObjectiveContext, replaced_token_detection
from electra.pretraining.command import pretrain
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import find_model_folder
from electra.training.config import Budget, HardwareConfig, TrainerConfig
from electra.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMPILED = pytest.mark.filterwarnings(  # torch.compile recommends TF32 and reads .grad of non-leaf tensors
    "ignore:TensorFloat32 tensor cores", "ignore:The .grad attribute of a Tensor"
)


def on_gpu(batch: Batch) -> Batch:
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    return replace(batch, **{name: value.cuda() for name, value in tensors.items()})


@pytest.fixture(autouse=True)
def reset_kernels():
    yield
    dispatch.set_kernel_mode("auto")


def assert_as_exact_as(ours: list[Tensor], rounded: list[Tensor], exact: list[Tensor], slack: float = 0.0) -> None:
    """Ours are about as close to fp32 (`exact`) as plain operations in bf16 (`rounded`) are."""
    for mine, plain, truth in zip(ours, rounded, exact, strict=True):
        # 1.53 was seen for the gradient of a bias of 64 numbers: the reference has its norms in fp32 and rounds less
        assert (mine - truth).norm() < 1.75 * (plain - truth).norm() + slack * truth.norm()


@pytest.mark.parametrize("backend", ["varlen", "varlen with cu_seqlens", "short"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_attention_backends_equal_masked_attention(monkeypatch, is_padded, backend, style):
    torch.manual_seed(0)
    local = {"global_attention_every": 2, "local_attention": 32} if style == "modern" else {}
    config = EncoderConfig(style=style, layers=3, vocab_size=500, dropout=0, attention_dropout=0, **local)
    encoder = Encoder(config).cuda()
    input_ids = torch.randint(5, 500, (6, 120), device="cuda")
    document_ids = (torch.rand(6, 120, device="cuda") < 0.03).cumsum(1)
    lengths = torch.tensor([[120], [90], [1], [64], [120], [17]], device="cuda")
    attention_mask = torch.arange(120, device="cuda") < lengths if is_padded else None
    is_token = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask
    grad_out = torch.randn(6, 120, 256, device="cuda")

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        cu_seqlens = compute_cu_seqlens(document_ids, 100) if "cu_seqlens" in backend else None
        monkeypatch.setattr(dispatch, "select_attention_backend", lambda *_: backend.split()[0])
        encoder.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            hidden = encoder(input_ids, attention_mask, None, document_ids, cu_seqlens).float()
        (hidden * grad_out)[is_token].sum().backward()
        qkv = encoder.layers[0].attention.qkv
        return [hidden.detach()[is_token], *(parameter.grad.clone() for parameter in qkv.parameters())]

    exact, masked = run(torch.float32, "sdpa"), run(torch.bfloat16, "sdpa")
    ours = run(torch.bfloat16, backend)
    assert_as_exact_as(ours, masked, exact)
    for mine, plain, truth in zip(ours, masked, exact, strict=True):
        assert (mine - plain).norm() < 2 * (plain - truth).norm()


def test_kernels_are_used_in_half_precision_unless_switched_off():
    encoder = Encoder(EncoderConfig(layers=1, vocab_size=50)).cuda()
    assert encoder.eval().attention_backend(128) == encoder.attention_backend(512) == "sdpa"
    with torch.autocast("cuda", torch.bfloat16):
        assert (encoder.eval().attention_backend(128), encoder.attention_backend(512)) == ("short", "varlen")
        assert (encoder.train().attention_backend(128), encoder.attention_backend(512)) == ("short", "varlen")
        with dispatch.without_kernels("short_attention"):
            assert encoder.attention_backend(128) == "varlen"
        dispatch.set_kernel_mode("off")
        assert encoder.attention_backend(128) == encoder.attention_backend(512) == "sdpa"


@pytest.mark.parametrize("without", dispatch.KERNELS)
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_gradients_are_the_same_without_any_single_kernel(style, without):
    torch.manual_seed(0)
    config = EncoderConfig(style=style, layers=2, vocab_size=500, dropout=0, attention_dropout=0)
    model, head = Encoder(config).cuda(), RTDHead(config).cuda()
    input_ids, grad_out = torch.randint(5, 500, (9, 110), device="cuda"), torch.randn(9, 110, device="cuda")
    document_ids = (torch.rand(9, 110, device="cuda") < 0.03).cumsum(1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = head(model(input_ids, document_ids=document_ids)).float()
        (logits * grad_out).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with dispatch.without_kernels(without):
        results = gradients()
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm() + 1e-4


def test_dropout_of_short_attention_keeps_the_mean_and_depends_on_the_seed():
    from electra.kernels.attention import short_attention

    torch.manual_seed(0)
    qkv = torch.randn(64, 100, 3, 2, 32, device="cuda")
    seed = torch.tensor(7, device="cuda", dtype=torch.int32)

    def attend(qkv: Tensor, seed: Tensor = seed) -> Tensor:
        return short_attention(qkv, None, None, seed, -1, 0.3)

    ones = torch.cat([qkv[:, :, :2], torch.ones_like(qkv[:, :, 2:])], dim=2)
    assert attend(ones).mean().item() == pytest.approx(1, abs=0.01)
    assert attend(ones).std().item() > 0.05
    assert torch.equal(attend(qkv), attend(qkv))
    assert not torch.equal(attend(qkv), attend(qkv, seed + 1))


def test_geglu_equals_the_reference():
    from electra.kernels.gelu import geglu

    torch.manual_seed(0)
    x, grad_out = 2 * torch.randn(37, 11, 400, device="cuda"), torch.randn(37, 11, 200, device="cuda")
    results = []
    for function in (geglu, reference.geglu):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        out.backward(grad_out)
        results.append((out.detach(), leaf.grad))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_bias_gelu_equals_the_reference():
    from electra.kernels.gelu import bias_gelu

    torch.manual_seed(0)
    x, grad_out = (2 * torch.randn(37, 11, 200, device="cuda") for _ in range(2))
    bias = torch.randn(200, device="cuda")
    results = []
    for is_ours in (True, False):
        leaves = x.bfloat16().requires_grad_(), bias.bfloat16().requires_grad_()
        out = bias_gelu(*leaves) if is_ours else functional.gelu(leaves[0].float() + leaves[1].float())
        out.backward(grad_out.bfloat16() if is_ours else grad_out.bfloat16().float())
        results.append((out.float(), leaves[0].grad.float(), leaves[1].grad.float()))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).norm() < 0.005 * exact.norm()


@pytest.mark.parametrize("backend", ["short", "varlen"])
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize(("width", "length"), [(64, 110), (192, 128), (768, 110)])  # cuDNN takes rows of 128
def test_fused_classic_layer_is_as_exact_as_the_reference(width, length, backend, has_documents):
    layer, hidden, grad_out, document_ids = random_layer(width, length=length, device="cuda")
    document_ids = document_ids if has_documents else None
    bias = make_attention_bias(None, document_ids, backend=backend)
    assert_layer_as_exact_as_reference(layer, hidden, grad_out, bias, document_ids)


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
@pytest.mark.parametrize(
    ("length", "heads", "num_positions"), [(110, 1, None), (40, 2, None), (13, 2, None), (40, 2, 7)]
)
def test_fused_classic_layer_has_the_dropout_noise_of_the_reference(rates, length, heads, num_positions):
    layer, hidden, grad_out, document_ids = random_layer(64, *rates, length=length, heads=heads, device="cuda")
    bias, positions = make_attention_bias(None, document_ids, backend="short"), None
    if num_positions is not None:
        positions = torch.randint(0, length, (len(hidden), num_positions), device="cuda")
    assert_layer_as_exact_as_reference(layer, hidden, grad_out, bias, document_ids, positions)


def assert_layer_as_exact_as_reference(
    layer: ClassicLayer, hidden: Tensor, grad_out: Tensor, bias: AttentionBias, document_ids: Tensor | None,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """The fused layer's output and gradients in bf16 are about as exact as those of the reference in bf16."""
    from electra.kernels.fused_layers import dropout_seeds

    torch.manual_seed(1)
    seeds = dropout_seeds(hidden, max(layer.dropout.p, layer.attention.dropout))

    def run(dtype: torch.dtype, is_fused: bool) -> list[Tensor]:
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        layer.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            if is_fused:
                out = layer.forward_fused(leaf, bias, positions)
            else:
                out = reference_layer(layer, leaf, document_ids, seeds, positions)
        (out * grad_out[:, : out.shape[1]]).sum().backward()
        return [each.float().clone() for each in (out.detach(), leaf.grad, *(p.grad for p in layer.parameters()))]

    exact, rounded = run(torch.float32, is_fused=False), run(torch.bfloat16, is_fused=False)
    assert_as_exact_as(run(torch.bfloat16, is_fused=True), rounded, exact, slack=1e-4)


@pytest.mark.parametrize(("checkpointing", "has_documents"), [(False, True), (True, True), (False, False)])
def test_fused_modern_layers_are_as_exact_as_eager_ones(monkeypatch, checkpointing, has_documents):
    torch.manual_seed(0)
    options = {"global_attention_every": 2, "local_attention": 32, "dropout": 0, "attention_dropout": 0}
    encoder = Encoder(EncoderConfig(style="modern", layers=3, vocab_size=500, **options)).cuda()
    encoder.activation_checkpointing = checkpointing
    input_ids, grad_out = torch.randint(5, 500, (9, 110), device="cuda"), torch.randn(9, 110, 256, device="cuda")
    document_ids = (torch.rand(9, 110, device="cuda") < 0.03).cumsum(1) if has_documents else None

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        monkeypatch.setattr(dispatch, "select_attention_backend", lambda *_: backend)
        encoder.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            hidden = encoder(input_ids, document_ids=document_ids).float()
        (hidden * grad_out).sum().backward()
        return [hidden.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    exact, rounded = run(torch.float32, "sdpa"), run(torch.bfloat16, "sdpa")
    assert_as_exact_as(run(torch.bfloat16, "short"), rounded, exact, slack=1e-4)


@pytest.mark.parametrize("backend", ["short", "varlen"])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_states_at_positions_equal_those_of_all_tokens(monkeypatch, style, backend):
    torch.manual_seed(0)
    options = {"vocab_size": 500, "dropout": 0, "attention_dropout": 0}
    encoder = Encoder(EncoderConfig(style=style, layers=2, **options)).cuda()
    input_ids, positions = torch.randint(5, 500, (9, 110), device="cuda"), torch.randint(0, 110, (9, 20), device="cuda")
    grad_out = torch.randn(9, 20, 256, device="cuda")
    monkeypatch.setattr(dispatch, "select_attention_backend", lambda *_: backend)

    def run(**arguments: Tensor) -> list[Tensor]:
        encoder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = encoder(input_ids, **arguments).float()
        states = hidden if arguments else reference.gather_positions(hidden, positions)
        (states * grad_out).sum().backward()
        return [states.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    for some, every in zip(run(positions=positions), run(), strict=True):
        assert (some - every).norm() < 0.02 * every.norm() + 1e-6


@pytest.mark.parametrize(("has_documents", "length"), [(True, 110), (False, 110), (False, 128)])
def test_dropout_of_long_attention_has_its_own_gradient(has_documents, length):
    layer, hidden, grad_out, document_ids = random_layer(64, 0.0, 0.2, length=length, device="cuda")
    bias = make_attention_bias(None, document_ids if has_documents else None, backend="varlen")

    def run(states: Tensor, seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            return layer.forward_fused(states.bfloat16(), bias).float()

    assert torch.equal(run(hidden), run(hidden))
    assert (run(hidden) - run(hidden, seed=2)).norm() > 0.02 * run(hidden).norm()
    leaf = hidden.clone().requires_grad_()
    (run(leaf) * grad_out).sum().backward()
    directions = torch.randn(32, *hidden.shape, device="cuda")
    with torch.no_grad():
        differences = [((run(hidden + 0.05 * d) - run(hidden - 0.05 * d)) * grad_out).sum() / 0.1 for d in directions]
    slopes = (leaf.grad * directions).flatten(1).sum(1)
    assert (slopes - torch.stack(differences)).norm() < 0.3 * slopes.norm()


@pytest.mark.parametrize("length", [192, 200])
def test_long_attention_is_as_exact_as_plain_attention(length):
    from electra.kernels.attention import long_attention_backward, long_attention_forward

    torch.manual_seed(0)
    qkv, grad_out = torch.randn(5, length, 3, 2, 64, device="cuda"), torch.randn(5, length, 2, 64, device="cuda")

    def run_plain(dtype: torch.dtype) -> list[Tensor]:
        leaf = qkv.to(dtype, copy=True).requires_grad_()
        out = reference.short_attention(leaf, None, None, None, -1, 0.0)
        out.backward(grad_out.to(dtype))
        return [out.detach().float(), leaf.grad.float()]

    half = qkv.bfloat16()
    stored = long_attention_forward(half, None, 0.0)
    grad_qkv, partials = long_attention_backward(half, None, *stored, grad_out.bfloat16(), 0.0)
    torch.testing.assert_close(partials.sum(0), grad_qkv.float().flatten(2).sum((0, 1)), rtol=1e-3, atol=1e-2)
    ours = [stored[0].float(), grad_qkv.float()]
    assert_as_exact_as(ours, run_plain(torch.bfloat16), run_plain(torch.float32))


class DelayedProduct(torch.autograd.Function):
    """weight · factor, with a backward pass that reads the factor late."""

    @staticmethod
    def forward(ctx, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return weight * factor

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        return grad * ctx.saved_tensors[0], None


class Allocation(torch.autograd.Function):
    """The identity, whose backward pass takes over freed memory of the current stream."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        for _ in range(8):
            torch.full_like(grad, 7.0)
        return grad


def test_memory_that_the_generator_stream_still_reads_is_not_reused():
    stream = GeneratorStream()
    main_weight, side_weight = (torch.ones(1 << 20, device="cuda", requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        first = Allocation.apply(main_weight)  # its backward pass is queued after the other one
        factor = torch.full((1 << 20,), 3.0, device="cuda")
        stream.enter()
        second = DelayedProduct.apply(side_weight, factor)
        stream.join(factor)
        return first.sum() + second.sum()

    loss().backward()
    assert side_weight.grad.unique().tolist() == [3.0]


def test_mlm_loss_and_sample_equal_the_reference():
    torch.manual_seed(0)
    B, M, E, V = 64, 5, 64, 1000
    labels = torch.randint(0, V, (B, M), device="cuda")
    inputs = [torch.randn(B, M, E, device="cuda").bfloat16(), 0.4 * torch.randn(V, E, device="cuda")]
    inputs.append(torch.randn(V, device="cuda"))
    keys = [torch.randint(2**31, (B, 2), device="cuda") for _ in range(2)]
    results = []
    for function in (dispatch.mlm_loss_and_sample, reference.mlm_loss_and_sample):
        leaves = [each.clone().requires_grad_() for each in inputs]
        losses, samples = function(*leaves, labels, *keys)
        losses.sum().backward()
        results.append((losses, samples, [leaf.grad for leaf in leaves]))
    (losses, samples, grads), (expected_losses, expected_samples, expected_grads) = results
    torch.testing.assert_close(losses.sum(), expected_losses.sum(), rtol=1e-5, atol=1e-3)
    for ours, expected in zip(grads, expected_grads, strict=True):
        assert (ours - expected).norm() < 0.01 * expected.norm()
    assert (samples == expected_samples).float().mean() > 0.99  # the noise differs in its last digits


def test_masks_are_the_same_on_gpu_and_cpu(make_batch, vocabulary):
    batch = make_batch(rows=64, lengths=[16, 9, 4, 2] * 16)
    batch = replace(batch, is_continuation=batch.input_ids % 3 == 0)
    for config in (
        MaskingConfig(mask_token_probability=0.8, random_token_probability=0.1),
        MaskingConfig(mask_fraction=0.4, whole_word_masking=True),
    ):
        on_cpu, on_cuda = mask(batch, config, vocabulary, 7), mask(on_gpu(batch), config, vocabulary, 7)
        assert torch.equal(on_cpu.input_ids, on_cuda.input_ids.cpu())
        assert torch.equal(
            on_cpu.positions[on_cpu.weights > 0].sort()[0], on_cuda.positions.cpu()[on_cpu.weights > 0].sort()[0]
        )


@COMPILED
def test_compiled_loss_equals_the_eager_one(make_pair, make_batch, vocabulary):
    electra, batch, context = make_pair().cuda(), on_gpu(make_batch()), ObjectiveContext(vocabulary=vocabulary)
    eager = total_loss(replaced_token_detection(electra, batch, context))
    compiled = torch.compile(replaced_token_detection, fullgraph=True)
    torch.testing.assert_close(total_loss(compiled(electra, batch, context)), eager, rtol=1e-4, atol=1e-4)


def difference(one, other) -> float:
    """The largest difference of two runs' weights."""
    ours, theirs = (load_file(find_model_folder(config.output) / "model.safetensors") for config in (one, other))
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


AUXILIARY = {"corrective_lm_weight": 1.0, "bag_of_words_weight": 1.0}
RTD_LOSSES = ["generator", "discriminator"]


@COMPILED
@pytest.mark.parametrize(
    ("style", "precision", "settings", "names"),
    [
        *((style, "bf16", {}, RTD_LOSSES) for style in ("classic", "modern")),
        *((style, "fp16", {}, RTD_LOSSES) for style in ("classic", "modern")),
        *(
            (style, "bf16", AUXILIARY, [*RTD_LOSSES, "corrective_lm", "bag_of_words"])
            for style in ("classic", "modern")
        ),
        ("classic", "bf16", {"objective": "all-tokens-mlm"}, ["generator", "all_tokens_mlm"]),
    ],
)
def test_compiled_half_precision_training_follows_eager_fp32_training(
    run_config, style, precision, settings, names, monkeypatch
):
    monkeypatch.setattr(
        "electra.training.optimizer.INITIAL_LOSS_SCALE", 16.0
    )  # a step that overflows in fp16 would be skipped
    positions = {} if style == "classic" else {"sinusoidal_positions": False}
    same = {
        "device": "cuda",
        "style": style,
        "steps": 30,
        "log_every": 1,
        "width": 64,
        "generator_width": 64,
        **(positions | settings),
    }
    plain = run_config("plain", compile="off", precision="fp32", **same)
    fast = run_config("fast", precision=precision, **same)
    losses = []
    for run in (plain, fast):
        pretrain(run)
        lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
        losses.append(torch.tensor([[line[name] for name in names] for line in lines if line["kind"] == "train"]))
    assert losses[0].shape == (30, len(names))
    torch.testing.assert_close(losses[1].mean(0), losses[0].mean(0), rtol=0.01, atol=0)


@COMPILED
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_compiled_and_captured_steps_equal_eager_ones(run_config, optimizer):
    same = {"device": "cuda", "precision": "fp32", "steps": 12, "optimizer": optimizer, "micro_batches": 2}
    plain, fast = run_config("plain", compile="off", **same), run_config("fast", **same)
    for run in (plain, fast):
        pretrain(run)
    assert difference(plain, fast) < 1e-3  # Muon works in bf16


@COMPILED
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_batch_that_does_not_fit_into_gpu_memory_is_divided(run_config, capsys, compile):
    size = {"layers": 12, "width": 256, "heads": 4, "feedforward": 1024, "generator_width": 64, "batch_size": 1024}
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 1.5 * 2**30  # of about 3 GB that a step needs
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        result = pretrain(run_config(device="cuda", steps=5, compile=compile, kernels="off", **size))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.step == 5
    assert "does not fit into the device's memory: divided into" in capsys.readouterr().err


@COMPILED
@pytest.mark.parametrize("dropout", [{"dropout": 0.1}, {"dropout": 0.1, "generator_dropout": 0.0}])
def test_resumed_run_differs_no_more_than_two_uninterrupted_ones(run_config, dropout):
    runs = [run_config(name, device="cuda", steps=60, **dropout) for name in ("first", "second", "third", "resumed")]
    for run in runs:
        pretrain(run)
    for folder in checkpoint_folders(runs[3].output)[-2:]:
        shutil.rmtree(folder)
    assert pretrain(replace(runs[3], resume=True)).step == 60
    uninterrupted = max(difference(runs[0], runs[1]), difference(runs[0], runs[2]), difference(runs[1], runs[2]))
    print(f"uninterrupted runs differ by {uninterrupted:.2e}, the resumed one by {difference(runs[0], runs[3]):.2e}")
    assert min(difference(run, runs[3]) for run in runs[:3]) <= max(uninterrupted, 1e-7)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("classification", {"dropout": 0.0}),
        ("classification", {"dropout": 0.1}),
        ("choice", {"dropout": 0.0}),
        ("tags", {"dropout": 0.0}),
        ("tags", {"dropout": 0.0, "crf": True}),
        ("question-answering", {"dropout": 0.0}),
        ("question-answering", {"dropout": 0.0, "head": "joint"}),
    ],
)
def test_finetuning_with_cuda_graphs_equals_eager_finetuning(encoder_folder, tmp_path, kind, settings):
    train = tmp_path / "rows.jsonl"
    if kind == "tags":
        train = tmp_path / "rows.conll"
        write_tags(train, 200, seed=0, max_sentences=3)
    elif kind == "choice":
        write_choices(train, 200, seed=0)
    elif kind == "question-answering":
        write_questions(train, 200, seed=0, has_unanswerable=True, sentences=3)
    else:
        write_rows(train, kind, 200, seed=0)
    settings |= {"kind": kind, "precision": "fp32", "batch_size": 16, "epochs": 4, "length": 32, "workers": 1}
    weights = []
    for name, compile in (("graphs", "auto"), ("eager", "off")):
        output = tmp_path / name
        config = build_config(
            FinetuneConfig, model=encoder_folder, train=train, output=output, device="cuda", compile=compile, **settings
        )
        finetune(config)
        weights.append(load_file(output / "seed-1" / "model" / "model.safetensors"))
    assert max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]) < 1e-4


def test_captured_step_with_nonfinite_loss_changes_no_weights(encoder_folder, tmp_path):
    train = write_rows(tmp_path / "rows.jsonl", "classification", 64, seed=0)
    job = Job(
        model=encoder_folder,
        task=define_task(TaskConfig(train=train)),
        tuning=TuningConfig(batch_size=8, length=32),
        hardware=HardwareConfig(device="cuda"),
        seed=1,
        folder=tmp_path / "seed-1",
    )
    finetuning = FinetuningTask(job)
    optimizer, settings = job.tuning.optimizer_config(finetuning.encoder_config), TrainerConfig(max_nonfinite_steps=2)
    trainer = Trainer(
        finetuning, optimizer, settings, Budget(steps=100), tmp_path / "run", cuda_graphs=True, quiet=True
    )
    trainer.run_step = trainer.build_step()
    for _ in range(4):
        trainer.step()
    with torch.no_grad():
        finetuning.model.head.bias.fill_(float("nan"))
    before = finetuning.model.encoder.layers[0].attention.qkv.weight.clone()
    trainer.step()
    assert torch.equal(finetuning.model.encoder.layers[0].attention.qkv.weight, before)
    assert trainer.averages.count_nonfinite_steps() == 1
    trainer.check_nonfinite_steps()
    trainer.step()
    with pytest.raises(TrainingError, match="2 consecutive steps"):
        trainer.check_nonfinite_steps()
