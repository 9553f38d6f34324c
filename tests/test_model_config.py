"""Sizes of the paper, overrides of single settings, and checks of encoder and pair configurations."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import MODERN, NARROW, WIDE

from electra.errors import ConfigError
from electra.model.config import ElectraConfig, ModelConfig
from electra.model.electra import SHARING, Electra
from electra.runfolder import convert_stored


def count_parameters(model: ModelConfig, part: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in getattr(Electra(model.electra_config()), part).parameters())


@pytest.mark.parametrize(("size", "parameters"), [("small", 13_549_057), ("base", 109_483_009), ("large", 335_142_913)])
def test_discriminators_have_the_parameters_of_transformers(size, parameters):
    assert count_parameters(ModelConfig(size=size), "discriminator") == parameters


@pytest.mark.parametrize(("size", "width", "heads"), [("small", 64, 1), ("base", 256, 4), ("large", 256, 4)])
def test_generators_have_all_layers_and_a_fraction_of_the_width(size, width, heads):
    pair = ModelConfig(size=size).electra_config()
    assert (pair.generator.width, pair.generator.heads, pair.generator.feedforward) == (width, heads, 4 * width)
    assert pair.generator.layers == pair.discriminator.layers
    assert pair.generator.embedding_width == pair.discriminator.embedding_width


def test_generator_width_follows_the_discriminator_width():
    pair = ModelConfig(size="base", width=384, heads=6, feedforward=1536).electra_config()
    assert (pair.generator.width, pair.generator.heads, pair.generator.feedforward) == (128, 2, 512)


@pytest.mark.parametrize(("width", "heads"), [(200, 2), (192, 3), (127, 1), (32, 1), (500, 5)])
def test_generator_heads_divide_the_width_and_are_at_least_64_wide(width, heads):
    assert ModelConfig(generator_width=width).electra_config().generator.heads == heads


def test_overrides_change_nothing_else():
    pair = ModelConfig(size="small", layers=3, dropout=0.0, generator_layers=2, generator_width=128).electra_config()
    assert (pair.discriminator.layers, pair.generator.layers, pair.generator.heads) == (3, 2, 2)
    assert pair.discriminator.width == 256
    assert pair.discriminator.attention_dropout == pair.generator.dropout == 0


def test_sharing_all_makes_the_generator_as_large_as_the_discriminator():
    pair = ModelConfig(size="small", sharing="all").electra_config()
    assert pair.generator == pair.discriminator


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, "size is 'huge'"),
        ({"generator_width": 0}, "generator_width is 0; it must be at least 1"),
        ({"generator_layers": 0}, "generator_layers is 0; it must be at least 1"),
        ({"layers": 100_000}, "layers is 100000; it must be at most 1000"),
        ({"positions": 10**30}, "it must be at least 1 and at most 2147483647"),
        ({"heads": 3}, "width is 256, not a multiple of 3 heads; try 255"),
        ({"sharing": "all", "generator_width": 64}, "the generator has 64 and the discriminator 256"),
        ({"sharing": "all", "generator_dropout": 0.0}, "the same dropout in both models"),
        ({"global_attention_every": 3}, "global_attention_every is 3, but only --style modern has it"),
    ],
)
def test_settings_that_do_not_make_a_model_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings).electra_config()


def test_the_generator_may_have_another_dropout():
    pair = ModelConfig(dropout=0.1, generator_dropout=0.0).electra_config()
    assert (pair.generator.dropout, pair.generator.attention_dropout) == (0.0, 0.0)
    assert (pair.discriminator.dropout, pair.discriminator.attention_dropout) == (0.1, 0.1)


def test_init_std_is_constant_or_scaled_by_width():
    constant = ModelConfig(size="small").electra_config()
    scaled = ModelConfig(size="small", scale_init_by_width=True).electra_config()
    assert (constant.generator.init_std, constant.discriminator.init_std) == (0.02, 0.02)
    assert (scaled.generator.init_std, scaled.discriminator.init_std) == (0.0693, 0.0346)
    assert ModelConfig(size="base", scale_init_by_width=True).electra_config().discriminator.init_std == 0.02


@pytest.mark.parametrize(("size", "feedforward"), [("tiny", 352), ("small", 704), ("base", 2048), ("large", 2752)])
def test_modern_sizes_have_about_the_parameters_of_classic_ones(size, feedforward):
    classic, modern = ModelConfig(size=size), ModelConfig(size=size, style="modern")
    assert modern.electra_config().discriminator.feedforward == feedforward
    for part in ("discriminator", "generator"):
        assert count_parameters(modern, part) == pytest.approx(count_parameters(classic, part), rel=0.03)


def test_modern_pairs_differ_in_style_feedforward_norm_and_dropout_only():
    classic, modern = (ModelConfig(size="base", style=style).electra_config() for style in ("classic", "modern"))
    for ours, theirs in ((classic.generator, modern.generator), (classic.discriminator, modern.discriminator)):
        differing = {name for name, value in vars(ours).items() if value != getattr(theirs, name)}
        assert differing == {"style", "feedforward", "norm_epsilon", "dropout", "attention_dropout"}


def test_local_attention_of_the_modern_style():
    pair = ModelConfig(style="modern", global_attention_every=3, local_attention=64).electra_config()
    assert [pair.generator.has_global_attention(layer) for layer in range(4)] == [True, False, False, True]
    assert pair.discriminator.local_attention == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharing": "all"}, "the same width in both models, but the generator has 8 and the discriminator 24"),
        ({"sharing": "some"}, "sharing is 'some'; choose from none, embeddings, all, disentangled"),
        ({"head": "some"}, "head is 'some'; choose from rtd, mlm, copy_mlm"),
        ({"discriminator": None}, "sharing is embeddings, which needs a generator and a discriminator"),
        ({"generator": replace(NARROW, embedding_width=8)}, "the same embedding_width in both models"),
        ({"generator": replace(NARROW, style="modern")}, "the same style in both models"),
        ({"generator": replace(NARROW, positions=20)}, "the same positions in both models, but the generator has 20"),
    ],
)
def test_pairs_that_cannot_share_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        ElectraConfig(**({"generator": NARROW, "discriminator": WIDE} | settings))


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("sharing", SHARING)
def test_stored_configs_are_read_as_they_were(make_pair, sharing, size):
    config = make_pair(sharing, size=size).config
    assert convert_stored(asdict(config), ElectraConfig, Path("config.json")) == config
