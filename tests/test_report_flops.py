"""`electra flops`: totals of parts, objectives and training, and the counts of the paper."""

import json

import pytest

from electra.cli import main
from electra.config import build
from electra.errors import ConfigError
from electra.model.flops import total_flops
from electra.objectives.objectives import OBJECTIVES
from electra.report.config import FlopsConfig
from electra.report.flops import FlopCount, count_flops


def count(**settings) -> FlopCount:
    return count_flops(build(FlopsConfig, **settings))


def forward_flops(result: FlopCount) -> dict[str, int]:
    return {part: total_flops(items) for part, items in result.parts.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_flops_follow_from_the_parts_of_an_objective(objective):
    rtd, result = count(), count(objective=objective)
    forward, step = forward_flops(rtd), result.training_flops_per_row
    if objective == "mlm":
        assert step == 3 * forward_flops(result)["generator"]
        assert 0 < rtd.parameters - result.parameters < 1_000_000  # the discriminator's size, not the generator's
    elif objective == "frozen-rtd":
        assert step == forward["generator"] + 3 * forward["discriminator"]
        assert result.parameters == 18_169_083  # nothing is shared with a frozen generator
    elif objective in ("replace-mlm", "all-tokens-mlm"):
        assert step > rtd.training_flops_per_row
    else:
        assert step == 3 * sum(forward.values())


def test_total_flops_are_three_forward_passes_of_every_row():
    result = count(size="base")
    forward = sum(forward_flops(result).values())
    assert result.training_flops_per_row == 3 * forward
    assert result.total_flops == 3 * forward * 256 * 766_000


def test_shared_parameters_are_counted_once():
    tables = (30522 + 512 + 2) * 128 + 2 * 128
    assert count(sharing="none").parameters - count(sharing="embeddings").parameters == tables


@pytest.mark.parametrize(("size", "fraction"), [("large", 0.25), ("base", 0.15)])
def test_the_mask_fraction_is_that_of_the_size(size, fraction):
    assert count(size=size) == count(size=size, mask_fraction=fraction)


@pytest.mark.parametrize(
    ("size", "steps", "total"),
    [("small", None, 1.2937e18), ("base", None, 6.4245e19), ("large", None, 7.1176e20), ("large", 1_750_000, 3.114e21)],
)
def test_training_as_published_equals_the_published_numbers(size, steps, total):
    settings = {} if steps is None else {"steps": steps}
    assert count(size=size, as_published=True, **settings).total_flops == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(("size", "total"), [("small", 3.7e9), ("base", 2.9e10)])
def test_inference_as_published_equals_the_papers_table(size, total):
    result = count(size=size, as_published=True, inference=True)
    assert result.total_flops == pytest.approx(total, rel=0.05)
    assert list(result.parts) == ["discriminator"]


def test_the_paper_also_counts_lookups_and_elementwise_operations_but_half_of_the_backward_pass():
    ours, published = count(), count(as_published=True)
    for part, items in published.parts.items():
        for item, published_item in zip(ours.parts[part], items, strict=True):
            assert (published_item.name, published_item.parameters) == (item.name, item.parameters)
            assert published_item.flops >= item.flops
    lookup = published.parts["discriminator"][0]
    assert lookup.flops == 128 * (2 * 128 * (30522 + 128 + 2) + 6 * 128)
    assert published.training_flops_per_row == 2 * sum(forward_flops(published).values())


def test_inference_counts_the_discriminator_alone(capsys):
    main(["flops", "--inference"])
    output = capsys.readouterr().out
    assert output.endswith("forward pass over 128 tokens: 2.6425e+09 FLOPs\n")
    assert "13,549,057" in output
    assert "training" not in output
    assert "generator" not in output
    main(["flops", "--inference", "--json"])
    assert json.loads(capsys.readouterr().out)["training_flops_per_row"] is None


def test_local_attention_is_counted_as_global_with_a_note():
    everywhere, local = (count(style="modern", global_attention_every=every) for every in (1, 3))
    assert everywhere.total_flops == local.total_flops
    assert everywhere.note is None
    assert str(local).splitlines()[-1].startswith("8 of 12 layers have local attention over 128 tokens")


def test_wrong_settings_are_errors():
    with pytest.raises(ConfigError, match="600 tokens"):
        count(length=600)
    with pytest.raises(ConfigError, match="the paper, which has no modern style"):
        count(style="modern", as_published=True)
    with pytest.raises(ConfigError, match="--inference needs --objective rtd, not mlm"):
        count(objective="mlm", inference=True)
