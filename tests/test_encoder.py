"""The encoder by itself; test_huggingface.py compares it with transformers."""

from dataclasses import replace

import pytest
import torch
from conftest import MODERN, WIDE
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError
from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer, Encoder
from electra.model.heads import RTDHead

TEXT = torch.tensor([[2, 11, 12, 3]])


@pytest.fixture
def classic() -> Encoder:
    torch.manual_seed(0)
    return Encoder(WIDE).eval()


@pytest.fixture
def modern() -> Encoder:
    torch.manual_seed(0)
    return Encoder(replace(MODERN, init_std=0.2)).eval()


@pytest.fixture(params=[WIDE, MODERN], ids=["classic", "modern"])
def encoder(request) -> Encoder:
    torch.manual_seed(0)
    return Encoder(replace(request.param, init_std=0.2)).eval()


def test_padding_does_not_change_the_tokens_before_it(encoder):
    padded = torch.tensor([[2, 11, 12, 3, 0, 0]])
    hidden = encoder(padded, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))
    torch.testing.assert_close(hidden[:, :4], encoder(TEXT))


def test_packed_documents_do_not_attend_to_each_other(encoder):
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    one = encoder(torch.tensor([[2, 11, 12, 2, 13, 14]]), document_ids=document_ids)
    other = encoder(torch.tensor([[2, 11, 12, 2, 15, 16]]), document_ids=document_ids)
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3:], other[:, 3:])
    torch.testing.assert_close(one[:, :3], encoder(torch.tensor([[2, 11, 12]])))


def test_hidden_states_are_the_same_with_and_without_autograd(encoder):
    input_ids = torch.randint(5, 50, (2, 10))
    expected = encoder(input_ids).detach()
    with torch.no_grad():  # the classic feed-forward computes GELU in place then
        assert torch.equal(encoder(input_ids), expected)


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_get_the_linear_output_before_gelu(classic, is_global):
    up, calls = classic.layers[0].feedforward.up, []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if module is up:
            calls.append((inputs[0], output))

    register = nn.modules.module.register_module_forward_hook if is_global else up.register_forward_hook
    with register(record), torch.no_grad():
        classic(TEXT)
        [(hidden, output)] = calls
        assert torch.equal(output, functional.linear(hidden, up.weight, up.bias))


def test_states_at_positions_equal_those_of_all_tokens(encoder):
    text, document_ids = torch.randint(5, 60, (3, 9)), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]]).expand(3, -1)
    positions = torch.tensor([[8, 1, 1], [0, 4, 7], [3, 2, 6]])  # one of them twice
    grad_out = torch.randn(3, 3, encoder.config.width)

    def states_and_gradients(hidden: Tensor) -> list[Tensor]:
        encoder.zero_grad()
        (hidden * grad_out).sum().backward()
        return [hidden.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    index = positions[:, :, None].expand(-1, -1, encoder.config.width)
    some = encoder(text, document_ids=document_ids, positions=positions)
    every = encoder(text, document_ids=document_ids).gather(1, index)
    torch.testing.assert_close(states_and_gradients(some), states_and_gradients(every))


def test_last_layer_computes_only_the_requested_positions(encoder):
    shapes = []
    for layer in encoder.layers:
        layer.feedforward.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[:2])))
    encoder(torch.randint(5, 60, (3, 9)), positions=torch.tensor([[8, 1]]).expand(3, -1))
    assert shapes == [(3, 9)] * (len(encoder.layers) - 1) + [(3, 2)]


def test_segments_differ_and_segment_a_is_the_default(classic):
    torch.testing.assert_close(classic(TEXT), classic(TEXT, segment_ids=torch.zeros_like(TEXT)))
    assert not torch.allclose(classic(TEXT), classic(TEXT, segment_ids=torch.tensor([[0, 0, 1, 1]])))


def test_padding_embedding_gets_no_gradient(encoder):
    encoder(torch.tensor([[2, 11, 0, 0]])).sum().backward()
    gradient = encoder.embeddings.token.weight.grad
    assert gradient[0].abs().sum() == 0
    assert gradient[11].abs().sum() > 0


def test_modern_encoders_distinguish_positions_but_not_segments(modern):
    hidden = modern(TEXT)
    assert not torch.allclose(hidden[:, 0], modern(torch.tensor([[2, 12, 11, 3]]))[:, 0])
    assert torch.equal(hidden, modern(TEXT, segment_ids=torch.tensor([[0, 0, 1, 1]])))


def test_rotary_positions_are_relative(modern):
    text, shifted = torch.tensor([[2, 11, 12, 13]]), torch.tensor([[5, 6, 2, 11, 12, 13]])
    hidden = modern(shifted, document_ids=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    torch.testing.assert_close(hidden[:, 2:], modern(text), atol=1e-5, rtol=0)


def test_local_layers_attend_to_half_the_window_on_either_side():
    torch.manual_seed(0)
    encoder = Encoder(replace(MODERN, layers=2, global_attention_every=2, local_attention=4, init_std=0.2)).eval()
    nn.init.zeros_(encoder.layers[0].attention.output.weight)  # switches the global layer's attention off
    before, after = encoder(torch.tensor([[2, 11, 12, 13, 14, 15]])), encoder(torch.tensor([[2, 11, 12, 13, 14, 16]]))
    is_changed = (before - after).abs().amax(2)[0] > 1e-6
    assert is_changed.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize("has_documents", [False, True])
def test_padding_outside_every_window_is_finite_and_has_no_gradient(modern, has_documents):
    attention_mask = torch.arange(12)[None] < 3
    document_ids = torch.zeros(1, 12, dtype=torch.long) if has_documents else None
    hidden = modern(torch.arange(5, 17)[None], attention_mask, document_ids=document_ids)
    assert hidden.isfinite().all()
    hidden[:, :3].sum().backward()
    gradient = modern.embeddings.token.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [5, 6, 7]


def test_modern_residual_projections_are_initialised_smaller_with_depth():
    torch.manual_seed(0)
    shallow, deep = (Encoder(replace(MODERN, width=96, layers=layers)).layers[0] for layers in (1, 4))
    for name in ("attention.output", "feedforward.down"):
        ratio = shallow.get_submodule(name).weight.std() / deep.get_submodule(name).weight.std()
        assert ratio.item() == pytest.approx(2, rel=0.1)


def test_modern_encoders_have_no_biases_and_no_norm_before_the_first_attention():
    names = [name for name, _ in Encoder(MODERN).named_parameters()]
    assert [name for name in names if name.endswith("bias")] == []
    assert "layers.0.attention_norm.weight" not in names
    assert "layers.1.attention_norm.weight" in names


def test_initialisation_is_that_of_the_released_models():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(layers=1, vocab_size=5000))
    table = encoder.embeddings.token.weight
    assert table.abs().max() <= 0.04  # truncated at two standard deviations
    assert table.std().item() == pytest.approx(0.0176, abs=0.0005)  # 0.02 without its tails
    assert encoder.layers[0].attention.qkv.bias.abs().sum() == 0
    projection, classifier = encoder.project.weight, RTDHead(EncoderConfig()).classifier.weight
    for weight, fan_in, fan_out in ((projection, 128, 256), (classifier, 256, 1)):
        glorot = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.9 * glorot < weight.abs().max() <= glorot


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_each_dropout_is_active_in_training_only(kind, size):
    torch.manual_seed(0)
    encoder = Encoder(replace(size, **({"dropout": 0.0, "attention_dropout": 0.0} | {kind: 0.5})))
    assert not torch.equal(encoder(TEXT), encoder(TEXT))
    encoder.eval()
    assert torch.equal(encoder(TEXT), encoder(TEXT))


@pytest.mark.parametrize(
    ("location", "zeroed"),
    [
        ("embeddings", ["attention.output", "feedforward.down"]),
        ("attention", ["feedforward.down"]),
        ("feedforward", ["attention.output"]),
    ],
)
def test_dropout_follows_embeddings_attention_and_feedforward(location, zeroed):
    torch.manual_seed(0)
    encoder = Encoder(replace(WIDE, layers=1, attention_dropout=0.0, dropout=0.5))
    for name in zeroed:  # dropout of zeros changes nothing
        nn.init.zeros_(encoder.layers[0].get_submodule(name).weight)
    encoder.embedding_dropout.p = 0.5 if location == "embeddings" else 0.0
    assert not torch.equal(encoder(TEXT), encoder(TEXT))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 100, "heads": 3}, "width is 100, not a multiple of 3 heads; try 99"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"norm_epsilon": -1}, "norm_epsilon is -1; it must be above 0"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"pad_id": 60}, "pad_id is 60; it must be at least 0 and below 60"),
        ({"style": "baroque"}, "style is 'baroque'; choose from classic, modern"),
        ({"local_theta": 5.0}, "local_theta is 5.0, but only --style modern"),
        ({"style": "modern", "heads": 8}, "8 heads of width 3, but rotary positions need an even"),
        ({"style": "modern", "global_theta": 1}, "global_theta is 1; it must be above 1"),
        ({"style": "modern", "global_attention_every": 0}, "global_attention_every is 0; it must be at least 1"),
    ],
)
def test_impossible_configs_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        replace(WIDE, **settings)


def test_rows_longer_than_the_position_table_are_an_error(encoder):
    with pytest.raises(ConfigError, match="33 tokens"):
        encoder(torch.ones(1, 33, dtype=torch.long))


def test_classic_layer_has_its_parameters_in_the_order_of_the_fused_layer():
    names = [name for name, _ in ClassicLayer(EncoderConfig()).named_parameters()]
    modules = "attention.qkv attention.output attention_norm feedforward.up feedforward.down feedforward_norm"
    assert names == [f"{module}.{kind}" for module in modules.split() for kind in ("weight", "bias")]
