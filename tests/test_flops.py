"""Parameters and operations are what torch counts."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import MODERN, NARROW, WIDE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from electra.cli import main
from electra.config import build
from electra.errors import ConfigError
from electra.model.config import ElectraConfig, ModelConfig
from electra.model.electra import Electra
from electra.model.flops import TRAINING_FACTOR, itemize, total_flops, total_parameters, training_flops
from electra.objectives.masking import slots
from electra.objectives.objectives import OBJECTIVES, Settings
from electra.report.config import FlopsConfig
from electra.report.flops import count_flops

PAIRS = {
    "classic": ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none"),
    "modern": ElectraConfig(generator=replace(MODERN, width=8, heads=1), discriminator=MODERN, sharing="none"),
    "wide tables": ElectraConfig(generator=replace(MODERN, embedding_width=24), discriminator=None, sharing="none"),
}


def counted(capsys, *flags: str) -> dict:
    main(["flops", "--json", *flags])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_operations_of_a_training_step_equal_torchs_count(pair):
    rows, length, masked = 3, 16, 5
    with torch.device("meta"):
        electra = Electra(pair)
        text = torch.zeros(rows, length, dtype=torch.long)
        at = torch.zeros(rows, masked, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        verdicts = electra.discriminator(text).sum() if electra.discriminator else 0
        (electra.generator(text, at=at).sum() + verdicts).backward()
    counted = sum(map(total_flops, itemize(pair, length, masked).values()))
    assert TRAINING_FACTOR * rows * counted == counter.get_total_flops()


@pytest.mark.parametrize("objective", ["rtd", "electra-15", "replace-mlm", "frozen-rtd"])
def test_operations_of_an_objective_equal_torchs_count(make_pair, make_batch, vocabulary, objective):
    electra, batch, settings = make_pair("none", objective=objective), make_batch(), Settings(vocabulary=vocabulary)
    kind, masked = OBJECTIVES[objective], slots(16, settings)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others are not counted on a CPU
        losses = kind.losses(electra, batch, settings)
        sum(loss.sum for loss in losses.values()).backward()
    assert (
        len(batch.input_ids) * training_flops(electra.config, 16, masked, kind.is_frozen) == counter.get_total_flops()
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_costs_what_its_parts_do(capsys, objective):
    rtd, found = counted(capsys), counted(capsys, "--objective", objective)
    generator, discriminator = (sum(item["flops"] for item in rtd["parts"][name]) for name in rtd["parts"])
    step = found["training_flops_per_row"]
    if objective == "mlm":
        assert found["parts"].keys() == {"generator"}
        assert step == 3 * sum(item["flops"] for item in found["parts"]["generator"])
        assert (
            0 < rtd["parameters"] - found["parameters"] < 1_000_000
        )  # of the discriminator's size, not the generator's
    elif objective == "frozen-rtd":
        assert step == generator + 3 * discriminator
        assert found["parameters"] == 18_169_083  # nothing is shared with what stands still
    elif objective in ("replace-mlm", "all-tokens-mlm"):
        assert step > rtd["training_flops_per_row"]
    else:
        assert step == 3 * (generator + discriminator)


@pytest.mark.parametrize("style", ["classic", "modern"])
@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_parameters_add_up_to_the_models(size, style):
    pair = ModelConfig(size=size, style=style, sharing="none").electra_config()
    with torch.device("meta"):
        electra = Electra(pair)
    for name, items in itemize(pair, 128, 19).items():
        assert total_parameters(items) == sum(parameter.numel() for parameter in getattr(electra, name).parameters())


@pytest.mark.parametrize(("head", "predicted"), [("mlm", 5), ("copy_mlm", 16)])
def test_a_corrector_predicts_masked_tokens_or_with_a_copy_gate_all(head, predicted):
    pair = ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none", head=head)
    with torch.device("meta"):
        corrector = Electra(pair).discriminator
    items = itemize(pair, length=16, masked=5)["discriminator"]
    assert total_parameters(items) == sum(parameter.numel() for parameter in corrector.parameters())
    assert [item.flops for item in items if item.name == "vocabulary logits"] == [2 * 16 * 60 * predicted]


def test_what_is_shared_counts_once_in_the_pair():
    tables = (30522 + 512 + 2) * 128 + 2 * 128
    costs = {sharing: count_flops(build(FlopsConfig, sharing=sharing)).parameters for sharing in ("none", "embeddings")}
    assert costs["none"] - costs["embeddings"] == tables


def test_large_masks_a_quarter_and_the_others_15_percent(capsys):
    for size, fraction in (("large", "0.25"), ("base", "0.15")):
        assert counted(capsys, "--size", size) == counted(capsys, "--size", size, "--mask-fraction", fraction)


def test_a_row_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match="a row of 600 tokens is longer than the model's 512 positions"):
        count_flops(build(FlopsConfig, length=600))


PUBLISHED = [
    ("small", None, 1.2937e18),
    ("base", None, 6.4245e19),
    ("large", None, 7.1176e20),
    ("large", 1.75e6, 3.114e21),
]


@pytest.mark.parametrize(("size", "steps", "total"), PUBLISHED)
def test_training_counted_as_published_costs_what_the_authors_published(capsys, size, steps, total):
    flags = ["--steps", str(int(steps))] if steps else []
    assert counted(capsys, "--size", size, "--as-published", *flags)["total_flops"] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(("size", "total"), [("small", 3.7e9), ("base", 2.9e10)])
def test_reading_128_tokens_counted_as_published_costs_what_the_paper_says(capsys, size, total):
    costs = counted(capsys, "--size", size, "--as-published", "--inference")
    assert costs["total_flops"] == pytest.approx(total, rel=0.05)
    assert list(costs["parts"]) == ["discriminator"]


def test_the_paper_counts_lookups_and_single_numbers_and_half_of_the_backward_pass():
    honest, published = (count_flops(build(FlopsConfig, as_published=way)) for way in (False, True))
    for part, items in published.parts.items():
        for ours, theirs in zip(honest.parts[part], items, strict=True):
            assert (theirs.name, theirs.parameters) == (ours.name, ours.parameters)
            assert theirs.flops >= ours.flops
    lookup = published.parts["discriminator"][0]
    assert lookup.flops == 128 * (2 * 128 * (30522 + 128 + 2) + 6 * 128)
    forward = sum(map(total_flops, published.parts.values()))
    assert published.training_flops_per_row == 2 * forward


def test_honest_totals_are_three_forward_passes_of_every_row(capsys):
    costs = counted(capsys, "--size", "base")
    forward = sum(item["flops"] for items in costs["parts"].values() for item in items)
    assert costs["total_flops"] == 3 * forward * 256 * 766_000
    assert costs["training_flops_per_row"] == 3 * forward


def test_what_is_used_is_the_discriminator_alone(capsys):
    main(["flops", "--inference"])
    shown = capsys.readouterr().out
    assert shown.endswith("forward pass over 128 tokens: 2.6425e+09 FLOPs\n")
    assert "13,549,057" in shown
    assert "training" not in shown
    assert "generator" not in shown


def test_layers_that_see_a_window_are_counted_whole_and_that_is_said():
    whole, windows = (count_flops(build(FlopsConfig, style="modern", global_attention_every=every)) for every in (1, 3))
    assert whole.total_flops == windows.total_flops
    assert whole.note is None
    assert str(windows).splitlines()[-1].startswith("8 of 12 layers have local attention over 128 tokens")


def test_the_paper_has_no_count_for_the_modern_style():
    with pytest.raises(ConfigError, match="the paper, which has no modern style"):
        build(FlopsConfig, style="modern", as_published=True)
