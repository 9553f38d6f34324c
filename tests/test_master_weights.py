"""Half-precision weights and fp32 master weights."""

import pytest
import torch
from conftest import MODERN, WIDE
from torch import nn

from electra.finetuning.models import TaskModel
from electra.kernels.master_weights import ALIGNMENT, MasterWeights
from electra.model.config import ElectraConfig
from electra.model.electra import SHARING, Electra
from electra.model.encoder import Encoder
from electra.model.storage import read_tensors, write_tensors
from electra.objectives.losses import total_loss
from electra.objectives.objectives import ObjectiveContext, replaced_token_detection


@pytest.fixture
def electra():
    torch.manual_seed(0)
    return Electra(ElectraConfig(generator=WIDE, discriminator=WIDE))


def test_in_fp32_there_is_no_copy():
    model = nn.Linear(2, 2)
    assert MasterWeights(model, torch.float32).forward_model is model


@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
@pytest.mark.parametrize("sharing", SHARING)
def test_loss_and_gradients_are_those_of_autocast(make_pair, make_batch, vocabulary, sharing, size):
    electra, batch, context = make_pair(sharing, size=size), make_batch(), ObjectiveContext(vocabulary=vocabulary)
    with torch.autocast("cpu", torch.bfloat16):
        loss = total_loss(replaced_token_detection(electra, batch, context))
    loss.backward()
    expected = {name: parameter.grad for name, parameter in electra.named_parameters()}
    electra.zero_grad()
    weights = MasterWeights(electra, torch.bfloat16)
    with weights.autocast():
        copied = total_loss(replaced_token_detection(weights.forward_model, batch, context))
    weights.backward(copied)
    assert copied.item() == loss.item()
    for name, parameter in electra.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0.01, atol=1e-4)


def test_the_norm_of_a_task_head_stays_in_fp32_and_no_layer_is_stored_twice():
    model = TaskModel(Encoder(MODERN), num_labels=2)
    weights = MasterWeights(model, torch.bfloat16)
    assert weights.forward_model.head.norm.weight is model.head.norm.weight
    assert {weights.forward_model.head.dense.weight.dtype, weights.forward_model.head.weight.dtype} == {torch.bfloat16}
    linears = [
        p for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters(recurse=False)
    ]
    assert weights.master.numel() == sum(-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in linears)


def test_gradients_accumulate_over_micro_batches_and_are_reset_between_steps():
    model = nn.Linear(2, 1)
    weights = MasterWeights(model, torch.bfloat16)
    for _ in range(2):  # steps
        for number in (1.0, 2.0):  # micro-batches
            weights.update_half_precision_weights()
            weights.backward(weights.forward_model(torch.full((1, 2), number, dtype=torch.bfloat16)).sum())
        assert model.weight.grad.tolist() == [[3, 3]]
        assert model.bias.grad.tolist() == [2]
        model.zero_grad()


def test_half_precision_weights_are_copies_of_the_master_weights():
    model = nn.Linear(3, 5)
    weights = MasterWeights(model, torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(0.3)
    weights.update_half_precision_weights()
    assert torch.equal(weights.forward_model.weight, model.weight.bfloat16())


def test_embeddings_and_norms_are_not_copied_and_shared_modules_stay_shared(electra):
    copy = MasterWeights(electra, torch.bfloat16).forward_model
    assert copy.generator.encoder.embeddings is copy.discriminator.encoder.embeddings
    assert copy.generator.encoder.embeddings.token.weight is electra.generator.encoder.embeddings.token.weight
    assert copy.discriminator.encoder.layers[0].attention_norm.weight.dtype == torch.float32
    assert copy.discriminator.encoder.layers[0].attention.qkv.weight.dtype == torch.bfloat16


def test_parameters_of_the_flat_buffer_are_saved_one_by_one(electra, tmp_path):
    before = {name: parameter.clone() for name, parameter in electra.named_parameters()}
    MasterWeights(electra, torch.bfloat16)
    write_tensors(tmp_path / "weights", dict(electra.named_parameters()))
    after = read_tensors(tmp_path / "weights")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_gradients_of_a_failed_backward_pass_are_discarded():
    """They are in the half-precision copy until the backward pass has ended."""
    weights = MasterWeights(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.bfloat16)
    with weights.autocast():
        weights.forward_model(torch.ones(1, 2)).sum().backward()
    assert any(parameter.grad is not None for parameter in weights.forward_model.parameters())
    weights.discard_gradients()
    for model in (weights.original, weights.forward_model):
        assert all(parameter.grad is None for parameter in model.parameters())
