"""Optimizers and schedules."""

import pytest
import torch
from torch import nn

from electra.errors import ConfigError
from electra.training.config import OptimizerConfig
from electra.training.muon import Muon, orthogonalize
from electra.training.optimizer import SCHEDULES, build_optimizers, released_adam


def test_released_adam_makes_the_updates_of_the_formula():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = released_adam([{"params": [weight], "weight_decay": 0.01}], OptimizerConfig(learning_rate=0.1))
    expected, m, v = weight.detach().clone(), torch.zeros(2), torch.zeros(2)
    for gradient in (torch.tensor([0.5, -1.0]), torch.tensor([0.25, 3.0]), torch.tensor([-1.0, 0.0])):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected = expected - 0.1 * (m / (v.sqrt() + 1e-6) + 0.01 * expected)
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


def test_released_adam_starts_three_times_as_fast_as_adamw():
    moved = {}
    for name in ("adam", "adamw"):
        model = nn.Linear(1, 1)
        before = model.weight.detach().clone()
        [optimizer] = build_optimizers(model, OptimizerConfig(name=name, learning_rate=1e-3, weight_decay=0))
        model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
        optimizer.step()
        moved[name] = (before - model.weight).abs().item()
    assert moved["adam"] / moved["adamw"] == pytest.approx(0.1 / 0.001**0.5, rel=0.01)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_every_parameter_is_moved_by_one_optimizer_and_vectors_do_not_decay(make_pair, name):
    electra = make_pair("embeddings")
    optimizers = build_optimizers(electra, OptimizerConfig(name=name, weight_decay=0.5))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    moved = [parameter for group in groups for parameter in group["params"]]
    assert len(moved) == len({id(parameter) for parameter in moved}) == len(list(electra.parameters()))
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {decays[id(p)] for p in electra.parameters() if p.dim() == 1} == {0}
    assert {decays[id(p)] for p in electra.parameters() if p.dim() == 2} == {0.5}


def test_muon_takes_the_layers_matrices_and_leaves_tables_and_heads(make_pair):
    electra = make_pair("embeddings")
    muon, _ = build_optimizers(electra, OptimizerConfig(name="muon"))
    taken = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    names = {name for name, parameter in electra.named_parameters() if id(parameter) in taken}
    assert all(".layers." in name and name.endswith(".weight") for name in names)
    assert len(names) == 2 * 2 * 4  # two encoders, two layers, four matrices each


@pytest.mark.parametrize("shape", [(24, 24), (72, 24), (24, 40)])
def test_muon_makes_the_updates_of_torchs(shape):
    """Several matrices at once in fp32, against one after the other in bf16: the same but for rounding."""
    torch.manual_seed(0)
    start = [torch.randn(shape) for _ in range(3)]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = (
        Muon([{"params": ours, "weight_decay": 0.1}], lr=0.02, momentum=0.95),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(shape)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert (mine - other).norm() < 0.02 * (other - before).norm()


def test_momenta_that_muon_keeps_together_are_each_matrixs_own():
    """Whoever has a gradient: matrices moved together end as those moved alone."""
    torch.manual_seed(0)
    start, gradients = torch.randn(3, 6, 4), torch.randn(4, 3, 6, 4)
    together, alone = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = [Muon([{"params": some}], lr=0.1, momentum=0.9) for some in (together, *([one] for one in alone))]
    for moved, step in zip([(0, 1), (0,), (0, 2), (0, 1, 2)], gradients, strict=True):
        for number in range(3):
            for matrix in (together[number], alone[number]):
                matrix.grad = step[number].clone() if number in moved else None
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_the_device_may_scale_gradients_and_leave_a_step_out(make_pair, name):
    """As recorded steps have it: gradients divided by a scale, and no step where one is not finite."""
    plain, scaled = make_pair(), make_pair()
    both = [build_optimizers(electra, OptimizerConfig(name=name, learning_rate=0.01)) for electra in (plain, scaled)]
    for number, is_wanted in enumerate([True, False, True]):
        for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
            ours.grad = torch.linspace(-1, 1 + number, ours.numel()).view_as(ours)
            theirs.grad = 4 * ours.grad if is_wanted else torch.full_like(ours, float("nan"))
        for optimizer in both[1]:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(not is_wanted)), torch.tensor(4.0)
        for optimizer in (*both[0], *both[1]) if is_wanted else both[1]:
            optimizer.step()
    for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)


def test_muon_moves_along_orthogonal_matrices():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(4, 30, 20)))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("name", "rates"),
    [  # at 0, half the warm-up, its end, the middle, 0.9, and the end of the budget
        ("linear", [0, 0.5, 1, 0.625, 0.125, 0]),
        ("released", [0, 0.45, 0.8, 0.5, 0.1, 0]),
        ("cosine", [0, 0.5, 1, 0.691, 0.038, 0]),
        ("wsd", [0, 0.5, 1, 1, 0.5, 0]),
        ("decay", [1, 0.9, 0.8, 0.5, 0.1, 0]),
    ],
)
def test_schedules_pass_through_their_points(name, rates):
    config = OptimizerConfig(schedule=name, decay_fraction=0.2)
    actual = [SCHEDULES[name](progress, 0.2, config) for progress in (0, 0.1, 0.2, 0.5, 0.9, 1)]
    assert actual == pytest.approx(rates, abs=1e-3)


def test_a_trunk_never_decays():
    assert SCHEDULES["wsd"](1.0, 0.1, OptimizerConfig(decay_fraction=0)) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_take_no_warm_up(name):
    assert 0 <= SCHEDULES[name](0.5, 0.0, OptimizerConfig()) <= 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"learning_rate": 0}, "learning_rate is 0"),
        ({"decay_fraction": 2}, "decay_fraction is 2"),
        ({"max_grad_norm": -1}, "max_grad_norm is -1"),
    ],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        OptimizerConfig(**wrong)
