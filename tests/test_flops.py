"""Parameters and FLOPs are those that torch counts, and as published those of the paper."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import MODERN, NARROW, WIDE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from electra.cli import main
from electra.config import build_config
from electra.errors import ConfigError
from electra.kernels import dispatch
from electra.model.config import ElectraConfig, ModelConfig
from electra.model.electra import Electra
from electra.model.flops import TRAINING_FACTOR, component_costs, total_flops, total_parameters, training_flops_per_row
from electra.objectives.config import ObjectiveConfig
from electra.objectives.masking import max_masked
from electra.objectives.objectives import OBJECTIVES, ObjectiveContext
from electra.reporting.config import FlopsConfig
from electra.reporting.flops import FlopCount, count_flops

PAIRS = {
    "classic": ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none"),
    "modern": ElectraConfig(generator=replace(MODERN, width=8, heads=1), discriminator=MODERN, sharing="none"),
    "modern without projection": ElectraConfig(
        generator=replace(MODERN, embedding_width=24), discriminator=None, sharing="none"
    ),
}


@pytest.fixture(autouse=True)
def plain_mlm_head(monkeypatch):
    """The chunked MLM head pads the vocabulary, and torch does not count all of its products."""
    monkeypatch.setattr(dispatch, "can_use_cpu_mlm_head", lambda hidden: False)


def count(**settings) -> FlopCount:
    return count_flops(build_config(FlopsConfig, **settings))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_flops_of_a_training_step_equal_torchs_count(pair):
    rows, length, masked = 3, 16, 5
    with torch.device("meta"):
        electra = Electra(pair)
        input_ids = torch.zeros(rows, length, dtype=torch.long)
        positions = torch.zeros(rows, masked, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        output = electra.generator(input_ids, positions=positions).logits.sum()
        if electra.discriminator is not None:
            output = output + electra.discriminator(input_ids).sum()
        output.backward()
    forward = sum(map(total_flops, component_costs(pair, length, masked).values()))
    assert TRAINING_FACTOR * rows * forward == counter.get_total_flops()


@pytest.mark.parametrize("objective", ["rtd", "electra-15", "replace-mlm", "frozen-rtd"])
def test_flops_of_an_objective_equal_torchs_count(make_pair, make_batch, vocabulary, objective):
    electra, batch, context = (
        make_pair("none", objective=objective),
        make_batch(),
        ObjectiveContext(vocabulary=vocabulary),
    )
    kind, masked = OBJECTIVES[objective], max_masked(16, context.masking)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others are not counted on a CPU
        losses = kind.losses(electra, batch, context)
        sum(loss.sum for loss in losses.values()).backward()
    assert (
        len(batch.input_ids) * training_flops_per_row(electra.config, 16, masked, kind.is_generator_frozen)
        == counter.get_total_flops()
    )


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
def test_flops_and_parameters_of_auxiliary_heads_equal_torchs_count(make_pair, make_batch, vocabulary, size):
    electra = make_pair("none", size=size, auxiliary_heads=("corrective_lm", "bag_of_words"))
    config = ObjectiveConfig(corrective_lm_weight=1.0, bag_of_words_weight=1.0)
    context, batch = ObjectiveContext(vocabulary=vocabulary, objective=config), make_batch()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        sum(loss.sum for loss in OBJECTIVES["rtd"].losses(electra, batch, context).values()).backward()
    masked = max_masked(16, context.masking)
    assert counter.get_total_flops() == 4 * training_flops_per_row(electra.config, 16, masked)
    parameters = sum(parameter.numel() for parameter in electra.discriminator.parameters())
    assert parameters == total_parameters(component_costs(electra.config, 16, masked)["discriminator"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_flops_of_each_objective(objective):
    rtd, result = count(), count(objective=objective)
    generator, discriminator = (total_flops(rtd.parts[part]) for part in ("generator", "discriminator"))
    if objective == "mlm":  # one encoder of the discriminator's size
        assert result.parts.keys() == {"generator"}
        assert result.training_flops_per_row == 3 * total_flops(result.parts["generator"])
        assert 0 < rtd.parameters - result.parameters < 1_000_000
    elif objective == "frozen-rtd":  # no backward pass of the generator, no shared weights
        assert result.training_flops_per_row == generator + 3 * discriminator
        assert result.parameters == 18_169_083
    elif objective in ("replace-mlm", "all-tokens-mlm"):
        assert result.training_flops_per_row > rtd.training_flops_per_row
    else:
        assert result.training_flops_per_row == 3 * (generator + discriminator)


@pytest.mark.parametrize("style", ["classic", "modern"])
@pytest.mark.parametrize("size", ["tiny", "small", "medium", "base", "large"])
def test_parameters_of_all_items_are_those_of_the_model(size, style):
    pair = ModelConfig(size=size, style=style, sharing="none").electra_config()
    with torch.device("meta"):
        electra = Electra(pair)
    for part, items in component_costs(pair, 128, 19).items():
        assert total_parameters(items) == sum(parameter.numel() for parameter in getattr(electra, part).parameters())


@pytest.mark.parametrize(("head", "predicted"), [("mlm", 5), ("copy_mlm", 16)])
def test_mlm_head_predicts_masked_tokens_and_with_a_copy_gate_all_tokens(head, predicted):
    pair = ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none", head=head)
    with torch.device("meta"):
        model = Electra(pair).discriminator
    items = component_costs(pair, length=16, num_masked=5)["discriminator"]
    assert total_parameters(items) == sum(parameter.numel() for parameter in model.parameters())
    assert [item.flops for item in items if item.name == "vocabulary logits"] == [2 * 16 * 60 * predicted]


def test_shared_parameters_count_once():
    embeddings = (30522 + 512 + 2) * 128 + 2 * 128
    assert count(sharing="none").parameters - count(sharing="embeddings").parameters == embeddings


def test_large_masks_a_quarter_and_the_others_15_percent():
    for size, fraction in (("large", 0.25), ("base", 0.15)):
        assert count(size=size) == count(size=size, mask_fraction=fraction)


def test_row_longer_than_the_positions_is_an_error():
    with pytest.raises(ConfigError, match="a row of 600 tokens is longer than the model's 512 positions"):
        count(length=600)


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({"size": "small"}, 1.2937e18),
        ({"size": "base"}, 6.4245e19),
        ({"size": "large"}, 7.1176e20),
        ({"size": "large", "steps": 1_750_000}, 3.114e21),
    ],
)
def test_published_count_of_training_is_the_authors(settings, total):
    assert count(as_published=True, **settings).total_flops == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(("size", "total"), [("small", 3.7e9), ("base", 2.9e10)])
def test_published_count_of_inference_is_the_papers(size, total):
    inference = count(size=size, as_published=True, inference=True)
    assert inference.total_flops == pytest.approx(total, rel=0.05)
    assert list(inference.parts) == ["discriminator"]


def test_published_count_adds_lookups_and_elementwise_operations():
    ours, published = count(), count(as_published=True)
    for part, items in published.parts.items():
        for our_item, item in zip(ours.parts[part], items, strict=True):
            assert (item.name, item.parameters) == (our_item.name, our_item.parameters)
            assert item.flops >= our_item.flops
    lookup = published.parts["discriminator"][0]
    assert lookup.flops == 128 * (2 * 128 * (30522 + 128 + 2) + 6 * 128)
    assert published.training_flops_per_row == 2 * sum(map(total_flops, published.parts.values()))


def test_training_costs_three_forward_passes_of_every_row(capsys):
    main(["flops", "--json", "--size", "base"])
    result = json.loads(capsys.readouterr().out)
    forward = sum(item["flops"] for items in result["parts"].values() for item in items)
    assert result["training_flops_per_row"] == 3 * forward
    assert result["total_flops"] == 3 * forward * 256 * 766_000


def test_inference_counts_the_discriminator_only():
    text = str(count(inference=True))
    assert text.endswith("forward pass over 128 tokens: 2.6425e+09 FLOPs")
    assert "13,549,057" in text
    assert "training" not in text
    assert "generator" not in text


def test_local_attention_is_counted_like_global_attention_with_a_note():
    all_global, local = (count(style="modern", global_attention_every=every) for every in (1, 3))
    assert all_global.total_flops == local.total_flops
    assert all_global.note is None
    assert str(local).splitlines()[-1].startswith("8 of 12 layers have local attention over 128 tokens")


def test_published_count_has_no_modern_style():
    with pytest.raises(ConfigError, match="the paper, which has no modern style"):
        count(style="modern", as_published=True)
