"""Optimizers and learning-rate schedules."""

import pytest
import torch
from torch import nn

from electra.errors import ConfigError
from electra.training.config import OptimizerConfig
from electra.training.muon import Muon, orthogonalize
from electra.training.optimizer import SCHEDULES, build_adam_without_bias_correction, build_optimizers


def test_released_adam_has_no_bias_correction():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_adam_without_bias_correction(
        [{"params": [weight], "weight_decay": 0.01}], OptimizerConfig(learning_rate=0.1)
    )
    expected, m, v = weight.detach().clone(), torch.zeros(2), torch.zeros(2)
    for gradient in (torch.tensor([0.5, -1.0]), torch.tensor([0.25, 3.0]), torch.tensor([-1.0, 0.0])):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected = expected - 0.1 * (m / (v.sqrt() + 1e-6) + 0.01 * expected)
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


def test_the_first_update_of_released_adam_is_three_times_adamws():
    updates = {}
    for name in ("adam", "adamw"):
        model = nn.Linear(1, 1)
        before = model.weight.detach().clone()
        [optimizer] = build_optimizers(model, OptimizerConfig(name=name, learning_rate=1e-3, weight_decay=0))
        model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
        optimizer.step()
        updates[name] = (before - model.weight).abs().item()
    assert updates["adam"] / updates["adamw"] == pytest.approx(0.1 / 0.001**0.5, rel=0.01)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_vectors_have_no_weight_decay(make_pair, name):
    electra = make_pair("embeddings")
    optimizers = build_optimizers(electra, OptimizerConfig(name=name, weight_decay=0.5))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    optimized = [parameter for group in groups for parameter in group["params"]]
    assert len(optimized) == len({id(parameter) for parameter in optimized}) == len(list(electra.parameters()))
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {decays[id(p)] for p in electra.parameters() if p.dim() == 1} == {0}
    assert {decays[id(p)] for p in electra.parameters() if p.dim() == 2} == {0.5}


def test_embeddings_and_heads_may_have_their_own_weight_decay(make_pair):
    electra = make_pair("embeddings")
    optimizers = build_optimizers(electra, OptimizerConfig(name="muon", weight_decay=0.5, embedding_weight_decay=0.25))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    by_name = {name: decays[id(parameter)] for name, parameter in electra.named_parameters() if parameter.dim() == 2}
    assert {decay for name, decay in by_name.items() if ".layers." in name} == {0.5}
    assert {decay for name, decay in by_name.items() if ".layers." not in name} == {0.25}


def test_an_unknown_optimizer_is_an_error():
    with pytest.raises(KeyError, match="sgd"):
        build_optimizers(nn.Linear(1, 1), OptimizerConfig(name="sgd"))


def test_parameters_are_grouped_by_their_learning_rate_scale():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    [optimizer] = build_optimizers(model, OptimizerConfig(), lr_scale=lambda name: 0.5 if name[0] == "0" else 1.0)
    scales = [(group["lr_scale"], group["weight_decay"]) for group in optimizer.param_groups]
    assert scales == [(0.5, 0.01), (1.0, 0.01), (0.5, 0.0), (1.0, 0.0)]


def test_muon_optimizes_the_weight_matrices_of_layers_only(make_pair):
    electra = make_pair("embeddings")
    muon, _ = build_optimizers(electra, OptimizerConfig(name="muon"))
    optimized = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    names = {name for name, parameter in electra.named_parameters() if id(parameter) in optimized}
    assert all(".layers." in name and name.endswith(".weight") for name in names)
    assert len(names) == 2 * 2 * 4  # two encoders, two layers, four matrices each


@pytest.mark.parametrize("shape", [(24, 24), (72, 24), (24, 40)])
def test_muon_agrees_with_torch(shape):
    """Batched in fp32, against one matrix after the other in bf16: equal except for rounding."""
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


def test_batched_muon_equals_muon_of_each_matrix_alone():
    """Also if some matrices have no gradient in some steps."""
    torch.manual_seed(0)
    start, gradients = torch.randn(3, 6, 4), torch.randn(4, 3, 6, 4)
    batched, single = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    groups = [batched, *([parameter] for parameter in single)]
    optimizers = [Muon([{"params": parameters}], lr=0.1, momentum=0.9) for parameters in groups]
    for with_gradient, step in zip([(0, 1), (0,), (0, 2), (0, 1, 2)], gradients, strict=True):
        for index in range(3):
            for matrix in (batched[index], single[index]):
                matrix.grad = step[index].clone() if index in with_gradient else None
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(batched, single)


@pytest.mark.parametrize("make_rate", [float, torch.tensor])  # tensors in CUDA graphs
def test_muon_in_groups_equals_one_optimizer_per_group(make_rate):
    """Layers have learning rates of their own in fine-tuning; their matrices still form one batch."""
    torch.manual_seed(0)
    start, gradients, rates = torch.randn(3, 6, 4), torch.randn(2, 3, 6, 4), (0.1, 0.2, 0.3)
    together, alone = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    groups = [
        [{"params": [matrix], "lr": make_rate(lr), "weight_decay": 0.1} for matrix, lr in zip(part, rates, strict=True)]
        for part in (together, alone)
    ]
    optimizers = [Muon(part, lr=1.0, momentum=0.9) for part in (groups[0], *([group] for group in groups[1]))]
    for step in gradients:
        for matrix, other, gradient in zip(together, alone, step, strict=True):
            matrix.grad, other.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, alone)
    assert len(optimizers[0].momentum_buffers) == 1


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_found_inf_skips_a_step_and_grad_scale_divides_gradients(make_pair, name):
    """As used in a CUDA graph, where the CPU does not read whether a step is finite."""
    plain, scaled = make_pair(), make_pair()
    config = OptimizerConfig(name=name, learning_rate=0.01)
    plain_optimizers, scaled_optimizers = (build_optimizers(electra, config) for electra in (plain, scaled))
    for number, is_finite in enumerate([True, False, True]):
        for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
            ours.grad = torch.linspace(-1, 1 + number, ours.numel()).view_as(ours)
            theirs.grad = 4 * ours.grad if is_finite else torch.full_like(ours, float("nan"))
        for optimizer in scaled_optimizers:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(not is_finite)), torch.tensor(4.0)
            optimizer.step()
        for optimizer in plain_optimizers if is_finite else []:
            optimizer.step()
    for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)


def test_orthogonalized_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(4, 30, 20)))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("name", "factors"),
    [  # at 0, half of the warm-up, its end, 0.5, 0.9 and 1
        ("linear", [0, 0.5, 1, 0.625, 0.125, 0]),
        ("released", [0, 0.45, 0.8, 0.5, 0.1, 0]),
        ("cosine", [0, 0.5, 1, 0.691, 0.038, 0]),
        ("wsd", [0, 0.5, 1, 1, 0.5, 0]),
        ("decay", [1, 0.9, 0.8, 0.5, 0.1, 0]),
    ],
)
def test_learning_rate_schedules(name, factors):
    config = OptimizerConfig(schedule=name, decay_fraction=0.2)
    assert [SCHEDULES[name](progress, 0.2, config) for progress in (0, 0.1, 0.2, 0.5, 0.9, 1)] == pytest.approx(
        factors, abs=1e-3
    )
    assert 0 <= SCHEDULES[name](0.5, 0.0, config) <= 1  # without warm-up


def test_wsd_with_a_decay_fraction_of_zero_stays_constant():
    assert SCHEDULES["wsd"](1.0, 0.1, OptimizerConfig(decay_fraction=0)) == 1


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0), ("decay_fraction", 2), ("max_grad_norm", -1)])
def test_wrong_settings_are_errors(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be"):
        OptimizerConfig(**{name: value})
