"""Parameters and operations are what torch counts."""

from dataclasses import replace

import pytest
import torch
from conftest import MODERN, NARROW, WIDE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from electra.model.config import ElectraConfig, ModelConfig
from electra.model.electra import Electra
from electra.model.flops import TRAINING_FACTOR, itemize, total_flops, total_parameters, training_flops
from electra.objectives.masking import slots
from electra.objectives.objectives import OBJECTIVES, Settings

PAIRS = {
    "classic": ElectraConfig(generator=NARROW, discriminator=WIDE, sharing="none"),
    "modern": ElectraConfig(generator=replace(MODERN, width=8, heads=1), discriminator=MODERN, sharing="none"),
    "wide tables": ElectraConfig(generator=replace(MODERN, embedding_width=24), discriminator=None, sharing="none"),
}


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
