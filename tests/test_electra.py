"""Weight sharing in the pair: which loss trains which parameters, and that shared parameters stay shared."""

from copy import deepcopy

import pytest
import torch
from conftest import MODERN, WIDE

from electra.errors import ConfigError
from electra.model.config import ElectraConfig
from electra.model.electra import SHARING, Electra, meta_device
from electra.model.storage import load_model, save_model

TABLES = {"token.weight", "position.weight", "segment.weight"}
NORM = {"norm.weight", "norm.bias"}


def gradients(electra: Electra, part: str) -> set[str]:
    """The parameters that a loss on the outputs of `part` trains, under their first names."""
    electra.zero_grad()
    output = getattr(electra, part)(torch.tensor([[2, 11, 12, 3]]))
    logits = output.logits if part == "generator" else output
    logits.square().sum().backward()
    return {name for name, p in electra.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def under(names: set[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_sharing_none_each_loss_trains_one_model(make_pair):
    electra = make_pair("none")
    assert {name.split(".")[0] for name in gradients(electra, "discriminator")} == {"discriminator"}
    assert {name.split(".")[0] for name in gradients(electra, "generator")} == {"generator"}


def test_sharing_embeddings_both_losses_train_the_tables_and_their_norm(make_pair):
    electra = make_pair("embeddings")
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == {f"encoder.embeddings.{name}" for name in TABLES | NORM}
    assert under(gradients(electra, "generator"), "generator.encoder.embeddings.") == TABLES | NORM


def test_sharing_all_is_one_encoder_with_two_heads(make_pair):
    electra = make_pair("all")
    encoder = {f"generator.encoder.{name}" for name, _ in electra.generator.encoder.named_parameters()}
    by_discriminator, by_generator = gradients(electra, "discriminator"), gradients(electra, "generator")
    assert {n for n in by_discriminator if ".encoder." in n} == encoder == {n for n in by_generator if ".encoder." in n}
    assert by_discriminator - encoder == {
        f"discriminator.head.{name}" for name, _ in electra.discriminator.head.named_parameters()
    }


def test_sharing_disentangled_discriminator_loss_does_not_train_the_generator(make_pair):
    electra = make_pair("disentangled")
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == set()
    assert under(by_discriminator, "discriminator.encoder.embeddings.") == TABLES | NORM
    assert under(gradients(electra, "generator"), "discriminator.") == set()


def test_disentangled_embeddings_are_the_sum_of_generator_embeddings_and_delta(make_pair):
    electra, text = make_pair("disentangled"), torch.tensor([[2, 11, 12, 3]])
    ours, base = electra.discriminator.encoder.embeddings, electra.generator.encoder.embeddings
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))
    with torch.no_grad():
        base.token.weight[11] += 1.0
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))
    with torch.no_grad():
        ours.token.weight[12] += 1.0
    assert not torch.allclose(ours(text, text * 0), base(text, text * 0))


def test_modern_pair_shares_only_the_token_table(make_pair):
    electra = make_pair("embeddings", size=MODERN)
    assert under(gradients(electra, "discriminator"), "generator.") == {"encoder.embeddings.token.weight"}
    assert under(gradients(electra, "generator"), "discriminator.") == set()
    assert electra.generator.encoder.project.weight is not electra.discriminator.encoder.project.weight


def test_modern_disentangled_discriminator_loss_does_not_train_the_generator(make_pair):
    electra, text = make_pair("disentangled", size=MODERN), torch.tensor([[2, 11, 12, 3]])
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == set()
    assert under(by_discriminator, "discriminator.encoder.embeddings.") == {"token.weight"}
    ours, base = electra.discriminator.encoder.embeddings, electra.generator.encoder.embeddings
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))


def test_modern_output_table_is_the_projected_input_table(make_pair):
    generator = make_pair("none", size=MODERN).generator
    hidden = torch.randn(1, 2, 8)
    head, encoder = generator.head, generator.encoder
    table = encoder.embeddings.token.weight @ encoder.project.weight.T  # [V, D]
    expected = head.norm(torch.nn.functional.gelu(head.dense(hidden))) @ table.T + head.bias
    torch.testing.assert_close(generator.predict(hidden).logits, expected)


def shared_tensors(electra: Electra) -> set[int]:
    """The ids of parameters that both models have."""
    ours = {id(parameter) for parameter in electra.generator.parameters()}
    return ours & {id(parameter) for parameter in electra.discriminator.parameters()}


@pytest.mark.parametrize(
    ("sharing", "count"), [("none", 0), ("embeddings", 5), ("all", 5 + 2 + 2 * 12), ("disentangled", 5)]
)
def test_parameters_stay_shared_when_moved_copied_and_loaded(make_pair, tmp_path, sharing, count):
    electra = make_pair(sharing)
    assert len(shared_tensors(electra)) == count
    assert len(shared_tensors(electra.to(torch.float64))) == count
    assert len(shared_tensors(deepcopy(electra))) == count
    save_model(electra, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert len(shared_tensors(loaded)) == count
    assert len(shared_tensors(loaded.to(torch.float32))) == count


def test_shared_table_is_updated_once(make_pair):
    electra = make_pair("embeddings")
    optimizer = torch.optim.SGD(electra.parameters(), lr=1.0)
    before = electra.discriminator.encoder.embeddings.token.weight.detach().clone()
    gradients(electra, "generator")
    optimizer.step()
    after = electra.discriminator.encoder.embeddings.token.weight
    assert (after != before).any(1)[11]
    torch.testing.assert_close(after, before - electra.generator.encoder.embeddings.token.weight.grad)


def update(electra: Electra, wrap) -> dict[str, torch.Tensor]:
    """The parameters after one SGD step, with models wrapped by `wrap`."""
    text = torch.tensor([[2, 11, 12, 3]])
    (wrap(electra.generator)(text).logits.square().sum() + wrap(electra.discriminator)(text).square().sum()).backward()
    torch.optim.SGD(electra.parameters(), lr=0.1).step()
    return dict(electra.named_parameters())


@pytest.mark.parametrize("sharing", SHARING)
def test_compiled_step_updates_shared_parameters_once(make_pair, sharing):
    compiled = make_pair(sharing)
    count = len(shared_tensors(compiled))
    updated = update(compiled, lambda model: torch.compile(model, backend="eager"))
    torch.testing.assert_close(updated, update(make_pair(sharing), lambda model: model))
    assert len(shared_tensors(compiled)) == count


def test_output_table_is_the_input_table(make_pair):
    generator, text = make_pair("none").generator.eval(), torch.tensor([[2, 11, 12, 3]])
    before = generator(text).logits
    with torch.no_grad():
        generator.encoder.embeddings.token.weight[40] *= 3  # a token that is not in the text
    after = generator(text).logits
    assert (after != before).any(0).any(0).nonzero().flatten().tolist() == [40]


def test_logits_at_positions_equal_those_of_all_tokens(make_pair):
    generator, text = make_pair().generator.eval(), torch.tensor([[2, 11, 12, 13, 3]])
    some = generator(text, positions=torch.tensor([[3, 1]])).logits
    torch.testing.assert_close(some, generator(text).logits[:, [3, 1]])


def test_missing_discriminator_is_an_error():
    generator = Electra(ElectraConfig(generator=WIDE, discriminator=None, sharing="none"))
    with pytest.raises(ConfigError, match="no discriminator"):
        generator.require_discriminator()


def test_modules_on_the_meta_device_are_not_initialised():
    weights = torch.ones(3)
    with meta_device():
        torch.nn.init.normal_(weights)
        layer = torch.nn.Linear(3, 3)
    assert weights.tolist() == [1, 1, 1]
    assert layer.weight.is_meta
