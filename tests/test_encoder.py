"""The encoder by itself; its agreement with transformers is in test_huggingface.py."""

from dataclasses import replace

import pytest
import torch
from conftest import MODERN, WIDE
from torch import nn

from electra.errors import ConfigError
from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer, Encoder
from electra.model.heads import RTDHead

TEXT = torch.tensor([[2, 11, 12, 3]])


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(WIDE).eval()


@pytest.fixture
def modern() -> Encoder:
    torch.manual_seed(0)
    return Encoder(replace(MODERN, init_std=0.2)).eval()


@pytest.fixture(params=[WIDE, MODERN], ids=["classic", "modern"])
def either(request) -> Encoder:
    torch.manual_seed(0)
    return Encoder(replace(request.param, init_std=0.2)).eval()


def test_padding_changes_nothing_for_the_tokens_before_it(either):
    text = torch.tensor([[2, 11, 12, 3]])
    padded = torch.tensor([[2, 11, 12, 3, 0, 0]])
    hidden = either(padded, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))
    torch.testing.assert_close(hidden[:, :4], either(text))


def test_packed_documents_do_not_see_each_other(either):
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    one = either(torch.tensor([[2, 11, 12, 2, 13, 14]]), document_ids=documents)
    other = either(torch.tensor([[2, 11, 12, 2, 15, 16]]), document_ids=documents)
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3:], other[:, 3:])


def test_the_first_packed_document_is_as_if_alone(either):
    packed = either(torch.tensor([[2, 11, 12, 2, 13, 14]]), document_ids=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    torch.testing.assert_close(packed[:, :3], either(torch.tensor([[2, 11, 12]])))


def test_states_without_gradients_are_those_with_them(either):
    ids = torch.randint(5, 50, (2, 10))
    with_gradients = either(ids).detach()
    with torch.no_grad():  # the classic feed-forward's GELU is then made in place
        assert torch.equal(either(ids), with_gradients)


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_sees_what_comes_before_gelu(encoder, is_global):
    widen, kept = encoder.layers[0].feedforward.up, []

    def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], found: torch.Tensor) -> None:
        if module is widen:
            kept.append((given[0], found))

    register = torch.nn.modules.module.register_module_forward_hook if is_global else widen.register_forward_hook
    with register(keep), torch.no_grad():
        encoder(TEXT)
        [(given, found)] = kept
        assert torch.equal(found, torch.nn.functional.linear(given, widen.weight, widen.bias))


def test_states_at_some_positions_are_those_of_all(either):
    text, documents = torch.randint(5, 60, (3, 9)), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]]).expand(3, -1)
    at, grown = torch.tensor([[8, 1, 1], [0, 4, 7], [3, 2, 6]]), torch.randn(3, 3, either.config.width)  # one twice

    def outcome(hidden: torch.Tensor) -> list[torch.Tensor]:
        either.zero_grad()
        (hidden * grown).sum().backward()
        return [hidden.detach(), *(parameter.grad.clone() for parameter in either.parameters())]

    every = either(text, document_ids=documents)
    places = at[:, :, None].expand(-1, -1, either.config.width)
    torch.testing.assert_close(
        outcome(either(text, document_ids=documents, positions=at)), outcome(every.gather(1, places))
    )


def test_the_last_layer_finishes_only_what_is_wanted(either):
    shapes = []
    for layer in either.layers:
        layer.feedforward.register_forward_hook(lambda module, given, found: shapes.append(tuple(found.shape[:2])))
    either(torch.randint(5, 60, (3, 9)), positions=torch.tensor([[8, 1]]).expand(3, -1))
    assert shapes == [(3, 9)] * (len(either.layers) - 1) + [(3, 2)]


def test_segments_are_told_apart_and_a_is_the_default(encoder):
    text = torch.tensor([[2, 11, 12, 3]])
    torch.testing.assert_close(encoder(text), encoder(text, segment_ids=torch.zeros_like(text)))
    assert not torch.allclose(encoder(text), encoder(text, segment_ids=torch.tensor([[0, 0, 1, 1]])))


def test_the_padding_row_of_the_token_table_gets_no_gradient_from_the_input(either):
    either(torch.tensor([[2, 11, 0, 0]])).sum().backward()
    gradient = either.embeddings.token.weight.grad
    assert gradient[0].abs().sum() == 0
    assert gradient[11].abs().sum() > 0


def test_modern_encoders_tell_positions_apart_and_read_segments_alike(modern):
    one, other = modern(torch.tensor([[2, 11, 12, 3]])), modern(torch.tensor([[2, 12, 11, 3]]))
    assert not torch.allclose(one[:, 0], other[:, 0])
    assert torch.equal(one, modern(torch.tensor([[2, 11, 12, 3]]), segment_ids=torch.tensor([[0, 0, 1, 1]])))


def test_only_the_distance_of_two_tokens_counts(modern):
    text = torch.tensor([[2, 11, 12, 13]])
    later = torch.tensor([[5, 6, 2, 11, 12, 13]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    torch.testing.assert_close(modern(later, document_ids=documents)[:, 2:], modern(text), atol=1e-5, rtol=0)


def test_local_layers_see_half_the_window_to_either_side():
    torch.manual_seed(0)
    encoder = Encoder(replace(MODERN, layers=2, global_attention_every=2, local_attention=4, init_std=0.2)).eval()
    nn.init.zeros_(encoder.layers[0].attention.output.weight)  # the global layer passes nothing on
    before, after = encoder(torch.tensor([[2, 11, 12, 13, 14, 15]])), encoder(torch.tensor([[2, 11, 12, 13, 14, 16]]))
    is_changed = (before - after).abs().amax(2)[0] > 1e-6
    assert is_changed.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize("has_documents", [False, True])
def test_padding_far_from_all_tokens_gives_numbers_and_no_gradient(modern, has_documents):
    attention_mask = torch.arange(12)[None] < 3
    documents = torch.zeros(1, 12, dtype=torch.long) if has_documents else None
    hidden = modern(torch.arange(5, 17)[None], attention_mask, document_ids=documents)
    assert hidden.isfinite().all()
    hidden[:, :3].sum().backward()
    gradient = modern.embeddings.token.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [5, 6, 7]


def test_what_modern_layers_add_starts_smaller_with_depth():
    torch.manual_seed(0)
    shallow, deep = (Encoder(replace(MODERN, width=96, layers=layers)).layers[0] for layers in (1, 4))
    for name in ("attention.output", "feedforward.down"):
        ratio = shallow.get_submodule(name).weight.std() / deep.get_submodule(name).weight.std()
        assert ratio.item() == pytest.approx(2, rel=0.1)


def test_modern_encoders_have_no_biases():
    names = [name for name, _ in Encoder(MODERN).named_parameters()]
    assert [name for name in names if name.endswith("bias")] == []
    assert "layers.0.attention_norm.weight" not in names
    assert "layers.1.attention_norm.weight" in names


def test_weights_start_as_released():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(layers=1, vocab_size=5000))
    table = encoder.embeddings.token.weight
    assert table.abs().max() <= 0.04  # truncated at two standard deviations
    assert table.std().item() == pytest.approx(0.0176, abs=0.0005)  # 0.02 less its tails
    glorot = (6 / (128 + 256)) ** 0.5
    assert 0.9 * glorot < encoder.project.weight.abs().max() <= glorot
    assert encoder.layers[0].attention.qkv.bias.abs().sum() == 0


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_each_kind_of_dropout_works_in_training_and_only_there(kind, size):
    torch.manual_seed(0)
    encoder = Encoder(replace(size, **({"dropout": 0.0, "attention_dropout": 0.0} | {kind: 0.5})))
    assert not torch.equal(encoder(TEXT), encoder(TEXT))
    encoder.eval()
    assert torch.equal(encoder(TEXT), encoder(TEXT))


@pytest.mark.parametrize(
    ("place", "silent"),
    [
        ("embeddings", ["attention.output", "feedforward.down"]),
        ("attention", ["feedforward.down"]),
        ("feedforward", ["attention.output"]),
    ],
)
def test_hidden_states_are_dropped_after_embeddings_attention_and_feed_forward(place, silent):
    torch.manual_seed(0)
    encoder = Encoder(replace(WIDE, layers=1, attention_dropout=0.0, dropout=0.5))
    for name in silent:  # nothing comes from there, so nothing is dropped there
        nn.init.zeros_(encoder.layers[0].get_submodule(name).weight)
    encoder.embeddings.dropout.p = 0.5 if place == "embeddings" else 0.0
    assert not torch.equal(encoder(TEXT), encoder(TEXT))


def test_a_verdict_starts_as_released():
    torch.manual_seed(0)
    verdict = RTDHead(EncoderConfig()).classifier.weight
    glorot = (6 / (256 + 1)) ** 0.5
    assert 0.9 * glorot < verdict.abs().max() <= glorot


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 100, "heads": 3}, "width is 100, not a multiple of 3 heads; try 99"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"norm_epsilon": -1}, "norm_epsilon is -1; it must be between 0 and 1"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and less than 1"),
        ({"pad_id": 60}, "pad_id is 60; the vocabulary has 60 entries"),
        ({"style": "baroque"}, "style is 'baroque'; choose from classic, modern"),
        (
            {"global_attention_every": 3},
            "global_attention_every is 3, but only --style modern has it",
        ),
        ({"local_theta": 5.0}, "local_theta is 5.0, but only --style modern"),
        ({"style": "modern", "heads": 8}, "8 heads of width 3, but rotary positions need an even"),
        ({"style": "modern", "global_theta": 1}, "global_theta is 1; it must be greater than 1"),
        ({"style": "modern", "global_attention_every": 0}, "global_attention_every is 0; it must be at least 1"),
    ],
)
def test_a_size_that_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(WIDE, **settings)


def test_a_row_longer_than_the_positions_is_refused(either):
    with pytest.raises(ConfigError, match="a row of 33 tokens is longer than the model's 32 positions"):
        either(torch.ones(1, 33, dtype=torch.long))


def test_a_classic_layer_has_its_parameters_in_the_order_that_its_operation_takes_them():
    """`gpu/classic_layer.py` gets them as a list."""
    names = [name for name, _ in ClassicLayer(EncoderConfig()).named_parameters()]
    modules = "attention.qkv attention.output attention_norm feedforward.up feedforward.down feedforward_norm"
    assert names == [f"{module}.{kind}" for module in modules.split() for kind in ("weight", "bias")]
