"""Sizes are the paper's, to the parameter."""

import pytest
import torch

from electra.errors import ConfigError
from electra.model.config import ModelConfig
from electra.model.electra import Electra


@pytest.mark.parametrize(("size", "parameters"), [("small", 13_549_057), ("base", 109_483_009), ("large", 335_142_913)])
def test_discriminators_have_the_parameters_of_transformers(size, parameters):
    with torch.device("meta"):
        electra = Electra(ModelConfig(size=size).electra_config())
    assert sum(parameter.numel() for parameter in electra.discriminator.parameters()) == parameters


@pytest.mark.parametrize(("size", "width", "heads"), [("small", 64, 1), ("base", 256, 4), ("large", 256, 4)])
def test_generators_are_as_deep_and_a_fraction_as_wide(size, width, heads):
    pair = ModelConfig(size=size).electra_config()
    assert (pair.generator.width, pair.generator.heads, pair.generator.feedforward) == (width, heads, 4 * width)
    assert pair.generator.layers == pair.discriminator.layers
    assert pair.generator.embedding_width == pair.discriminator.embedding_width


def test_the_generator_keeps_its_share_of_another_width():
    pair = ModelConfig(size="base", width=384, heads=6, feedforward=1536).electra_config()
    assert (pair.generator.width, pair.generator.heads, pair.generator.feedforward) == (128, 2, 512)


@pytest.mark.parametrize(("width", "heads"), [(200, 2), (192, 3), (127, 1), (32, 1), (500, 5)])
def test_a_generators_heads_divide_its_width_and_are_at_least_64_wide(width, heads):
    assert ModelConfig(generator_width=width).electra_config().generator.heads == heads


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"generator_width": 0}, "generator: width is 0; it must be at least 1"),
        ({"generator_layers": 0}, "generator: layers is 0; it must be at least 1"),
        ({"heads": 3}, "discriminator: width 256 is not divisible by 3 heads"),
    ],
)
def test_a_mistake_names_the_part_it_is_about(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig(**settings).electra_config()


def test_departures_change_what_they_name_and_nothing_else():
    pair = ModelConfig(size="small", layers=3, dropout=0.0, generator_layers=2, generator_width=128).electra_config()
    assert (pair.discriminator.layers, pair.generator.layers, pair.generator.heads) == (3, 2, 2)
    assert pair.discriminator.width == 256
    assert pair.discriminator.attention_dropout == pair.generator.dropout == 0


def test_sharing_all_makes_the_generator_as_large_as_the_discriminator():
    pair = ModelConfig(size="small", sharing="all").electra_config()
    assert pair.generator == pair.discriminator


def test_a_smaller_generator_cannot_share_all():
    with pytest.raises(ConfigError, match="they have 64 and 256"):
        ModelConfig(size="small", sharing="all", generator_width=64).electra_config()


def test_an_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="unknown size 'huge'; choose from tiny, small, base, large"):
        ModelConfig(size="huge").electra_config()


def test_weights_start_as_released_or_by_width():
    released, scaled = (
        ModelConfig(size="small").electra_config(),
        ModelConfig(size="small", scale_init_by_width=True).electra_config(),
    )
    assert (released.generator.init_std, released.discriminator.init_std) == (0.02, 0.02)
    assert (scaled.generator.init_std, scaled.discriminator.init_std) == (0.0693, 0.0346)
    assert ModelConfig(size="base", scale_init_by_width=True).electra_config().discriminator.init_std == 0.02


def parameters(settings: ModelConfig, part: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in getattr(Electra(settings.electra_config()), part).parameters())


@pytest.mark.parametrize(("size", "feedforward"), [("tiny", 352), ("small", 704), ("base", 2048), ("large", 2752)])
def test_modern_sizes_have_about_the_parameters_of_classic_ones(size, feedforward):
    classic, modern = ModelConfig(size=size), ModelConfig(size=size, style="modern")
    assert modern.electra_config().discriminator.feedforward == feedforward
    for part in ("discriminator", "generator"):
        assert parameters(modern, part) == pytest.approx(parameters(classic, part), rel=0.03)


def test_modern_pairs_differ_from_classic_ones_in_style_feed_forward_norm_and_dropout():
    classic, modern = (
        ModelConfig(size="base").electra_config(),
        ModelConfig(size="base", style="modern").electra_config(),
    )
    for ours, theirs in ((classic.generator, modern.generator), (classic.discriminator, modern.discriminator)):
        differing = {name for name, value in vars(ours).items() if value != getattr(theirs, name)}
        assert differing == {"style", "feedforward", "norm_epsilon", "dropout", "attention_dropout"}


def test_local_attention_is_an_option_of_the_modern_style():
    pair = ModelConfig(style="modern", global_attention_every=3, local_attention=64).electra_config()
    assert [pair.generator.is_global(layer) for layer in range(4)] == [True, False, False, True]
    assert pair.discriminator.local_attention == 64
    with pytest.raises(ConfigError, match="discriminator: global_attention_every is 3, but the classic style"):
        ModelConfig(global_attention_every=3).electra_config()
