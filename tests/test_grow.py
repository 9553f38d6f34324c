"""Widening: the same outputs from a wider model, whose copies of a feature then learn different things.

Stacking: a deeper model whose layers are copies of those of a trained one."""

from dataclasses import replace

import pytest
import torch

from electra.errors import ConfigError
from electra.model.config import ElectraConfig, EncoderConfig, to_modern
from electra.model.electra import Electra
from electra.model.grow import load_widened_weights, stack_layers, widen_inputs

SIZE = {"layers": 2, "vocab_size": 50, "positions": 16, "dropout": 0.0, "attention_dropout": 0.0}
WIDE = EncoderConfig(width=48, heads=6, feedforward=144, embedding_width=8, init_std=0.2, **SIZE)
GENERATOR = EncoderConfig(width=8, heads=1, feedforward=16, embedding_width=8, init_std=0.2, **SIZE)


def randomize(model: Electra) -> Electra:
    """Draw all weights at random: biases are zero at first, and those of norms are one."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model.eval()


def build_pair(
    width: int = WIDE.width, is_modern: bool = False, sharing: str = "embeddings", layers: int = 2, **settings
) -> Electra:
    encoders = [to_modern(encoder) if is_modern else encoder for encoder in (GENERATOR, WIDE)]
    generator, discriminator = (replace(encoder, dropout=0.0, attention_dropout=0.0) for encoder in encoders)
    discriminator = replace(discriminator, layers=layers)
    config = ElectraConfig(generator=generator, discriminator=discriminator, sharing=sharing, **settings)
    return randomize(Electra(config if width == WIDE.width else config.reduced_to(width=width, scale_init=False)))


def outputs(model: Electra, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    discriminator = model.discriminator
    heads = {name: discriminator.predict_tokens(name, discriminator.encoder(ids)).logits for name in HEADS}
    return {"generator": model.generator(ids).logits, "discriminator": discriminator(ids)} | heads


HEADS = ("corrective_lm", "bag_of_words")


@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled"])
@pytest.mark.parametrize("is_modern", [False, True], ids=["classic", "modern"])
@pytest.mark.parametrize("width", [24, 16])
def test_a_widened_model_has_the_same_outputs(width, is_modern, sharing):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (3, 12))
    narrow, wide = (build_pair(each, is_modern, sharing, auxiliary_heads=HEADS) for each in (width, WIDE.width))
    load_widened_weights(wide, narrow.state_dict(), seed=0)
    expected, result = outputs(narrow, ids), outputs(wide, ids)
    for name, logits in expected.items():
        torch.testing.assert_close(result[name], logits, atol=1e-4, rtol=1e-4)
        assert logits.std(0).mean() > 0.01  # they depend on the tokens


@pytest.mark.parametrize("is_modern", [False, True], ids=["classic", "modern"])
@pytest.mark.parametrize("head", ["mlm", "copy_mlm"])
def test_a_widened_masked_language_model_has_the_same_outputs(head, is_modern):
    ids = torch.randint(0, 50, (3, 12))
    narrow, wide = (build_pair(width, is_modern, head=head) for width in (16, 48))
    load_widened_weights(wide, narrow.state_dict(), seed=0)
    theirs, ours = (model.discriminator.log_probabilities(model.discriminator(ids), ids) for model in (narrow, wide))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_copies_of_a_feature_get_different_gradients():
    narrow, wide = build_pair(24), build_pair(48)
    load_widened_weights(wide, narrow.state_dict(), seed=0)
    wide.discriminator(torch.randint(0, 50, (3, 12))).square().sum().backward()
    layer = wide.discriminator.encoder.layers[0]
    for module in (layer.attention.output, layer.feedforward.up, layer.feedforward_norm):
        first, second = module.weight.grad.chunk(2)
        assert (first - second).norm() > 0.1 * first.norm()


def test_the_noise_depends_on_the_seed_only():
    narrow = build_pair(24)
    first, same, other = (build_pair(48) for _ in range(3))
    for model, seed in ((first, 1), (same, 1), (other, 2)):
        load_widened_weights(model, narrow.state_dict(), seed)
    weights = [model.discriminator.encoder.layers[1].feedforward.down.weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_parameters_that_the_narrow_model_lacks_keep_their_values():
    narrow, wide = build_pair(24), build_pair(48, auxiliary_heads=("corrective_lm",))
    before = wide.discriminator.auxiliary_heads["corrective_lm"].dense.weight.clone()
    load_widened_weights(wide, narrow.state_dict(), seed=0)
    assert torch.equal(wide.discriminator.auxiliary_heads["corrective_lm"].dense.weight, before)


def test_widened_inputs_add_up_to_the_weight_and_differ():
    weight = torch.randn(4, 5)
    copies = widen_inputs(weight, 3, torch.Generator().manual_seed(0)).unflatten(1, (3, 5))
    torch.testing.assert_close(copies.sum(1), weight)
    assert (copies[:, 0] - copies[:, 1]).abs().mean() > 0.1


def stack(deep: Electra, shallow: Electra) -> None:
    load_widened_weights(deep, stack_layers(shallow.state_dict(), shallow.config, deep.config), seed=0)


@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layer_i_of_a_stacked_discriminator_is_layer_i_mod_n(layers, sharing):
    shallow, deep = (build_pair(sharing=sharing, layers=number, auxiliary_heads=HEADS) for number in (layers, 6))
    stack(deep, shallow)
    sources = shallow.discriminator.encoder.layers
    for index, layer in enumerate(deep.discriminator.encoder.layers):
        source = dict(sources[index % layers].named_parameters())
        assert all(torch.equal(parameter, source[name]) for name, parameter in layer.named_parameters())
    expected = shallow.state_dict()  # of all others, those of the generator with its two layers among them
    others = [name for name in deep.state_dict() if not name.startswith("discriminator.encoder.layers.")]
    assert all(torch.equal(deep.state_dict()[name], expected[name]) for name in others)
    assert len(others) == len(expected) - len(sources.state_dict())


def test_a_stacked_encoder_applies_the_trained_layers_again():
    pairs = [build_pair(layers=number) for number in (4, 2)]
    stack(*pairs)
    deep, shallow = (pair.discriminator.encoder for pair in pairs)
    ids = torch.randint(0, 50, (3, 12))
    once = shallow(ids)
    twice = shallow.run_layers(once, shallow.attention_biases(ids, None, None, None), positions=None)
    torch.testing.assert_close(deep(ids), twice)
    assert (twice - once).abs().mean() > 0.1


def test_copies_of_the_first_modern_layer_keep_their_new_attention_norm():
    """The first layer has none: it reads the normalised embeddings."""
    shallow, deep = (build_pair(is_modern=True, layers=number) for number in (2, 4))
    expected = [layer.attention_norm.state_dict() for layer in shallow.discriminator.encoder.layers]
    new = deep.discriminator.encoder.layers[2].attention_norm.weight.clone()
    stack(deep, shallow)
    first, second, third, fourth = deep.discriminator.encoder.layers
    assert not list(first.attention_norm.parameters())
    assert torch.equal(third.attention_norm.weight, new)
    assert all(torch.equal(layer.attention_norm.weight, expected[1]["weight"]) for layer in (second, fourth))
    for name, parameter in third.named_parameters():
        assert name == "attention_norm.weight" or torch.equal(parameter, dict(first.named_parameters())[name])


@pytest.mark.parametrize("is_modern", [False, True], ids=["classic", "modern"])
def test_a_stacked_and_widened_model_has_the_outputs_of_the_stacked_one(is_modern):
    shallow = build_pair(24, is_modern, auxiliary_heads=HEADS)
    configs = [build_pair(width, is_modern, layers=4, auxiliary_heads=HEADS).config for width in (24, 48)]
    narrow, wide = (Electra(config).eval() for config in configs)
    stack(narrow, shallow)
    stack(wide, shallow)
    ids = torch.randint(0, 50, (3, 12))
    expected, result = outputs(narrow, ids), outputs(wide, ids)
    for name, logits in expected.items():
        torch.testing.assert_close(result[name], logits, atol=1e-4, rtol=1e-4)


def test_a_lone_masked_language_model_is_stacked():
    configs = [
        ElectraConfig(generator=replace(WIDE, layers=layers), discriminator=None, sharing="none") for layers in (2, 4)
    ]
    shallow, deep = (randomize(Electra(config)) for config in configs)
    stack(deep, shallow)
    for index, layer in enumerate(deep.generator.encoder.layers):
        source = shallow.generator.encoder.layers[index % 2].state_dict()
        assert all(torch.equal(parameter, source[name]) for name, parameter in layer.state_dict().items())


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_layers_are_stacked_if_their_copies_have_the_same_attention(every):
    encoder = replace(to_modern(WIDE), layers=12, global_attention_every=every)
    for layers in range(15):
        divides = 0 < layers < 12 and 12 % layers == 0
        if divides and all(
            encoder.has_global_attention(layer) == encoder.has_global_attention(layer % layers) for layer in range(12)
        ):
            assert encoder.with_fewer_layers(layers) == replace(encoder, layers=layers)
        else:
            with pytest.raises(ConfigError, match=f"12 layers.* can be stacked from .*, not from {layers}"):
                encoder.with_fewer_layers(layers)
