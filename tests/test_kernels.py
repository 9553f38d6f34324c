"""Triton kernels on a CPU, in Triton's interpreter: equal to `electra.kernels.reference`, with the same gradients.

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py

Rounding, streams and speed are tested on a GPU (test_gpu.py); whether a kernel computes the right thing, here in fp32.
"""

from collections.abc import Callable

import pytest
import torch
from layers import random_layer, reference_layer
from torch import Tensor, nn

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.kernels import dispatch, mlm_head_cpu, reference
from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Electra
from electra.model.encoder import Encoder, make_attention_bias, make_rope
from electra.objectives.config import ObjectiveConfig
from electra.objectives.losses import total_loss
from electra.objectives.objectives import OBJECTIVES, ObjectiveContext
from electra.pretraining.command import pretrain

interpreted = pytest.mark.skipif(
    not (dispatch.IS_INTERPRETED and dispatch.HAS_TRITON), reason="needs Triton and TRITON_INTERPRET=1"
)
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # numpy, in the interpreter, on the intended log(0)


@pytest.fixture
def one_program(monkeypatch):
    """Let one program of a summing kernel loop over several blocks, as happens on a GPU with many rows."""
    from electra.kernels import common

    monkeypatch.setattr(common, "NUM_PROGRAMS", 0)


@pytest.fixture
def kernels_off():
    """A function that switches the kernels off until the end of the test."""
    yield lambda: dispatch.set_kernel_mode("off")
    dispatch.set_kernel_mode("auto")


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Equal except for the order of sums."""
    for one, other in zip(ours, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-5 * other.float().norm() + 1e-7


def assert_same_gradients(ours: Callable[..., Tensor], expected: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Two functions have the same value and the same gradients of their inputs."""
    results = []
    for function in (ours, expected):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = function(*leaves)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert_close(*results)


def assert_same_with_kernels_off(
    kernels_off: Callable[[], None], model: nn.Module, run: Callable[[], tuple[Tensor, ...]]
) -> None:
    """`run` returns the same with and without kernels, and leaves the same gradients in the model."""
    results = []
    for switch in (lambda: None, kernels_off):
        switch()
        model.zero_grad()
        outputs = [each.detach() for each in run()]
        results.append(outputs + [each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert_close(*results)


def small_encoder(style: str, **options: int) -> Encoder:
    """An encoder with random norms and biases."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 64, "heads": 2, "feedforward": 96, "embedding_width": 32, "vocab_size": 60}
    encoder = Encoder(EncoderConfig(style=style, dropout=0.0, attention_dropout=0.0, **sizes, **options))
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.3)
    return encoder


def weighted_sum(states: Tensor) -> Tensor:
    return (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum()


def test_kernels_can_be_switched_off_alone_or_together(kernels_off):
    hidden = torch.empty(2, 8, 64)
    with dispatch.without_kernels("geglu"):
        assert [kernel for kernel in dispatch.KERNELS if not dispatch.is_kernel_enabled(kernel)] == ["geglu"]
    assert all(dispatch.is_kernel_enabled(kernel) for kernel in dispatch.KERNELS)
    kernels_off()
    assert not any(dispatch.can_use_kernel(kernel, hidden) for kernel in dispatch.KERNELS)
    with pytest.raises(ConfigError, match="unknown kernels gelu; choose from short_attention"):
        dispatch.without_kernels("gelu").__enter__()


def test_kernels_flag_switches_them_off(run_config, kernels_off):
    pretrain(run_config(kernels="off", steps=1))
    assert dispatch.kernel_mode == "off"


@interpreted
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("bias", ["documents", "padding", "none"])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_encoder_equals_the_eager_one(kernels_off, style, bias, has_positions):
    local = {"global_attention_every": 2, "local_attention": 8} if style == "modern" else {}
    encoder = small_encoder(style, **local)
    input_ids, document_ids = torch.randint(5, 60, (3, 21)), (torch.rand(3, 21) < 0.1).cumsum(1)
    attention_mask = torch.arange(21) < torch.tensor([[21], [9], [17]]) if bias == "padding" else None
    positions = torch.randint(0, 9, (3, 5)) if has_positions else None
    assert encoder.attention_backend(21) == "short"

    def run() -> tuple[Tensor]:
        documents = document_ids if bias == "documents" else None
        states = encoder(input_ids, attention_mask, document_ids=documents, positions=positions)
        if attention_mask is not None and positions is None:
            states = states[attention_mask]
        weighted_sum(states).backward()
        return (states,)

    assert_same_with_kernels_off(kernels_off, encoder, run)


@interpreted
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_fused_layers_equal_the_eager_ones_with_activation_checkpointing(kernels_off, style):
    encoder = small_encoder(style)
    encoder.activation_checkpointing = True
    input_ids = torch.randint(5, 60, (2, 19))

    def run() -> tuple[Tensor]:
        states = encoder(input_ids)
        weighted_sum(states).backward()
        return (states,)

    assert_same_with_kernels_off(kernels_off, encoder, run)


@interpreted
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
def test_fused_classic_layer_has_the_dropout_noise_of_the_reference(rates, has_positions):
    from electra.kernels.fused_layers import dropout_seeds

    layer, hidden, grad_out, document_ids = random_layer(64, *rates, rows=2, length=19, heads=2)
    positions = torch.randint(0, 19, (2, 7)) if has_positions else None
    bias = make_attention_bias(None, document_ids, backend="short")
    torch.manual_seed(1)
    seeds, results = dropout_seeds(hidden, max(rates)), []
    for is_fused in (True, False):
        leaf = hidden.clone().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(1)
        if is_fused:
            out = layer.forward_fused(leaf, bias, positions)
        else:
            out = reference_layer(layer, leaf, document_ids, seeds, positions)
        (out * grad_out[:, : out.shape[1]]).sum().backward()
        results.append([out.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert_close(*results)


@interpreted
@pytest.mark.parametrize("has_rope", [False, True])
@pytest.mark.parametrize(("window", "dropout"), [(-1, 0.0), (3, 0.2)])
def test_short_attention_equals_the_reference(has_rope, window, dropout):
    from electra.kernels.attention import short_attention

    torch.manual_seed(0)
    qkv, document_ids = torch.randn(2, 19, 3, 2, 32), (torch.rand(2, 19) < 0.1).cumsum(1).int()
    rope = make_rope(19, 32, 1e4, torch.device("cpu")).squeeze(2) if has_rope else None
    seed = torch.tensor(5, dtype=torch.int32) if dropout else None
    options = document_ids, rope, seed, window, dropout
    assert_same_gradients(
        lambda qkv: short_attention(qkv, *options), lambda qkv: reference.short_attention(qkv, *options), qkv
    )


@interpreted
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("width", [40, 256, 768, 1024, 1100])  # one chunk, partly filled or full; several chunks
def test_dropout_add_layernorm_equals_the_reference(one_program, width, dropout):
    from electra.kernels.layernorm import dropout_add_layernorm_backward, dropout_add_layernorm_forward

    torch.manual_seed(0)
    x, residual, grad_out = (torch.randn(9, width) for _ in range(3))
    bias, norm_weight, norm_bias = (torch.randn(width) for _ in range(3))
    inputs = [each.requires_grad_() for each in (residual, x, norm_weight, norm_bias, bias)]
    seed = torch.tensor(5, dtype=torch.int32) if dropout else None
    expected = reference.dropout_add_layernorm(x, bias, residual, norm_weight, norm_bias, 1e-5, seed, dropout)
    expected.backward(grad_out)
    with torch.no_grad():
        out = dropout_add_layernorm_forward(x, bias, residual, norm_weight, norm_bias, 1e-5, seed, dropout)
        *grads, partials = dropout_add_layernorm_backward(x, bias, residual, norm_weight, grad_out, 1e-5, seed, dropout)
    assert_close([out, *grads, *partials.sum(0)], [expected.detach(), *(each.grad for each in inputs)])


@interpreted
@pytest.mark.parametrize("width", [40, 600])
def test_add_layernorm_equals_the_reference(one_program, width):
    from electra.kernels.layernorm import add_layernorm_backward, add_layernorm_forward

    torch.manual_seed(0)
    residual, x, grad_out, grad_total = (torch.randn(9, width) for _ in range(4))
    inputs = [each.requires_grad_() for each in (residual, x, torch.randn(width))]
    expected = reference.add_layernorm(*inputs, 1e-5)
    torch.autograd.backward(expected, [grad_total, grad_out])
    with torch.no_grad():
        total, out = add_layernorm_forward(*inputs, 1e-5)
        *grads, partials = add_layernorm_backward(total, inputs[2], grad_out, grad_total, 1e-5)
    assert_close(
        [total, out, *grads, partials.sum(0)], [*(each.detach() for each in expected), *(each.grad for each in inputs)]
    )


@interpreted
def test_gelu_kernels_equal_the_reference(one_program):
    from electra.kernels import gelu

    torch.manual_seed(0)
    assert_same_gradients(gelu.bias_gelu, reference.bias_gelu, 2 * torch.randn(5, 7, 150), torch.randn(150))
    assert_same_gradients(gelu.geglu, reference.geglu, 2 * torch.randn(5, 7, 300))


@interpreted
def test_mlm_loss_and_sample_equal_the_reference(one_program):
    torch.manual_seed(0)
    labels, keys = torch.randint(0, 300, (2, 3)), [torch.randint(2**31, (2, 2)) for _ in range(2)]
    inputs = torch.randn(2, 3, 16), torch.randn(300, 16), torch.randn(300)
    ours, expected = dispatch.mlm_loss_and_sample, reference.mlm_loss_and_sample
    assert torch.equal(ours(*inputs, labels, *keys)[1], expected(*inputs, labels, *keys)[1])
    assert_same_gradients(
        lambda *each: ours(*each, labels, *keys)[0], lambda *each: expected(*each, labels, *keys)[0], *inputs
    )


@pytest.mark.parametrize("vocab_size", [256, 300])
def test_chunked_mlm_head_on_a_cpu_equals_the_reference(vocab_size, monkeypatch):
    monkeypatch.setattr(mlm_head_cpu, "CHUNK_NUMBERS", 2 * 384)  # chunks of two or three of the six positions
    torch.manual_seed(0)
    labels, keys = torch.randint(0, vocab_size, (2, 3)), [torch.randint(2**31, (2, 2)) for _ in range(2)]
    inputs = torch.randn(2, 3, 16), torch.randn(vocab_size, 16), torch.randn(vocab_size)
    ours, expected = mlm_head_cpu.mlm_loss_and_sample, reference.mlm_loss_and_sample
    assert torch.equal(ours(*inputs, labels, *keys)[1], expected(*inputs, labels, *keys)[1])
    assert_same_gradients(
        lambda *each: ours(*each, labels, *keys)[0], lambda *each: expected(*each, labels, *keys)[0], *inputs
    )


@interpreted
def test_qkv_bias_gradient_equals_the_reference(one_program):
    from electra.kernels.common import qkv_bias_grad

    grad_qkv = torch.randn(70, 3 * 200)
    assert_close([qkv_bias_grad(grad_qkv, torch.float32)], [reference.qkv_bias_grad(grad_qkv)])


@interpreted
def test_qkv_gradients_are_packed_and_summed(one_program):
    from electra.kernels.attention import pack_qkv_grads

    grads = [torch.randn(2, 20, 2, 32) for _ in range(3)]
    packed, partials = pack_qkv_grads(torch.empty(2, 20, 3, 2, 32), *grads)
    assert torch.equal(packed, torch.stack(grads, dim=2))
    torch.testing.assert_close(partials.sum(0), packed.flatten(2).sum((0, 1)), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_objectives_have_the_same_losses_and_gradients(kernels_off, one_program, style, objective):
    vocabulary, needs = Vocabulary(size=300), OBJECTIVES[objective]
    sizes = {"layers": 1, "heads": 1, "width": 32, "feedforward": 48, "embedding_width": 16, "positions": 32}
    size = EncoderConfig(style=style, vocab_size=vocabulary.size, dropout=0.0, attention_dropout=0.0, **sizes)
    torch.manual_seed(0)
    discriminator = {"discriminator": size, "sharing": "embeddings"}
    pair = discriminator if needs.head else {"discriminator": None, "sharing": "none"}
    objective_config = ObjectiveConfig(name=objective, corrective_lm_weight=1.0, bag_of_words_weight=1.0)
    heads = {"head": needs.head or "rtd", "has_baseline": needs.has_baseline}
    auxiliary_heads = objective_config.auxiliary_heads() if needs.head == "rtd" else ()
    electra = Electra(ElectraConfig(generator=size, **pair, **heads, auxiliary_heads=auxiliary_heads))
    input_ids = torch.randint(110, vocabulary.size, (3, 20))
    document_ids = (torch.rand(3, 20) < 0.1).cumsum(1).int()
    batch = Batch(input_ids, torch.tensor(3), torch.arange(3), document_ids=document_ids)
    assert electra.require_generator().encoder.attention_backend(20) == "short"

    def run() -> tuple[Tensor, ...]:
        losses = needs.losses(electra, batch, ObjectiveContext(vocabulary=vocabulary, objective=objective_config))
        total_loss(losses).backward()
        return tuple(loss.sum / loss.count for loss in losses.values())

    assert_same_with_kernels_off(kernels_off, electra, run)


@interpreted
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_compiled_encoder_equals_the_eager_one(kernels_off, style):
    encoder = small_encoder(style)
    compiled = torch.compile(encoder, backend="aot_eager", dynamic=False)
    input_ids, positions = torch.randint(5, 60, (2, 12)), torch.randint(0, 12, (2, 3))

    def run() -> tuple[Tensor]:
        torch._dynamo.reset()
        states = (compiled if dispatch.kernel_mode == "auto" else encoder)(input_ids, positions=positions)
        weighted_sum(states).backward()
        return (states,)

    assert_same_with_kernels_off(kernels_off, encoder, run)
