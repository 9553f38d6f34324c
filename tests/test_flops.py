"""Parameters and operations are what torch counts."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import NARROW, WIDE
from torch.utils.flop_counter import FlopCounterMode

from electra.cli import main
from electra.errors import ConfigError
from electra.model.electra import Electra, ElectraConfig
from electra.model.flops import TRAINING, flops, items_of, parameters
from electra.model.sizes import ModelConfig
from electra.report.costs import FlopsConfig, count_costs

PAIR = ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none")


def test_operations_of_a_training_step_equal_torchs_count():
    rows, length, masked = 3, 16, 5
    with torch.device("meta"):
        electra = Electra(PAIR)
        text = torch.zeros(rows, length, dtype=torch.long)
        at = torch.zeros(rows, masked, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        (electra.generator(text, at=at).sum() + electra.discriminator(text).sum()).backward()
    counted = sum(map(flops, items_of(PAIR, length, masked).values()))
    assert TRAINING * rows * counted == counter.get_total_flops()


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_parameters_add_up_to_the_models(size):
    pair = ModelConfig(size=size, sharing="none").electra()
    with torch.device("meta"):
        electra = Electra(pair)
    for name, items in items_of(pair, 128, 19).items():
        assert parameters(items) == sum(parameter.numel() for parameter in getattr(electra, name).parameters())


@pytest.mark.parametrize(("head", "predicted"), [("correction", 5), ("copying", 16)])
def test_a_corrector_predicts_masked_tokens_or_with_a_copy_gate_all(head, predicted):
    pair = replace(PAIR, head=head)
    with torch.device("meta"):
        corrector = Electra(pair).discriminator
    items = items_of(pair, length=16, masked=5)["corrector"]
    assert parameters(items) == sum(parameter.numel() for parameter in corrector.parameters())
    assert [item.flops for item in items if item.name == "vocabulary logits"] == [2 * 16 * 60 * predicted]


def test_what_is_shared_counts_once_in_the_pair():
    tables = (30522 + 512 + 2) * 128 + 2 * 128
    costs = {sharing: count_costs(FlopsConfig(sharing=sharing)).parameters for sharing in ("none", "embeddings")}
    assert costs["none"] - costs["embeddings"] == tables


def test_large_masks_a_quarter_and_the_others_15_percent(capsys):
    def training_flops(*flags: str) -> int:
        main(["flops", "--json", *flags])
        return json.loads(capsys.readouterr().out)["training_flops_per_row"]

    assert training_flops("--size", "large") == training_flops("--size", "large", "--mask-fraction", "0.25")
    assert training_flops("--size", "base") == training_flops("--size", "base", "--mask-fraction", "0.15")


def test_a_row_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match="a row of 600 tokens is longer than the model's 512 positions"):
        count_costs(FlopsConfig(length=600))
