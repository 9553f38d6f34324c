"""The pair: what each sharing scheme shares, by the gradients that flow, and that it stays shared."""

from copy import deepcopy
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from conftest import MODERN, NARROW, WIDE

from electra.errors import ConfigError
from electra.model.config import ElectraConfig
from electra.model.electra import SHARING, Electra
from electra.model.storage import load_model, save_model

TABLES = {"token.weight", "position.weight", "segment.weight"}
NORM = {"norm.weight", "norm.bias"}


def gradients(electra: Electra, part: str) -> set[str]:
    """The parameters that a loss on the outputs of `part` moves, under their first names."""
    electra.zero_grad()
    output = getattr(electra, part)(torch.tensor([[2, 11, 12, 3]]))
    output.square().sum().backward()
    return {name for name, p in electra.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def under(names: set[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_sharing_nothing_each_loss_moves_its_own_part(make_pair):
    electra = make_pair("none")
    assert {name.split(".")[0] for name in gradients(electra, "discriminator")} == {"discriminator"}
    assert {name.split(".")[0] for name in gradients(electra, "generator")} == {"generator"}


def test_sharing_embeddings_both_losses_move_the_three_tables_and_their_norm(make_pair):
    electra = make_pair("embeddings")
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == {f"encoder.embeddings.{name}" for name in TABLES | NORM}
    assert under(gradients(electra, "generator"), "generator.encoder.embeddings.") == TABLES | NORM


def test_sharing_all_there_is_one_encoder_under_two_heads(make_pair):
    electra = make_pair("all")
    encoder = {f"generator.encoder.{name}" for name, _ in electra.generator.encoder.named_parameters()}
    by_discriminator, by_generator = gradients(electra, "discriminator"), gradients(electra, "generator")
    assert {n for n in by_discriminator if ".encoder." in n} == encoder == {n for n in by_generator if ".encoder." in n}
    assert by_discriminator - encoder == {
        f"discriminator.head.{name}" for name, _ in electra.discriminator.head.named_parameters()
    }


def test_disentangled_the_discriminators_loss_gives_the_generator_no_gradient(make_pair):
    electra = make_pair("disentangled")
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == set()
    assert under(by_discriminator, "discriminator.encoder.embeddings.") == TABLES | NORM
    assert under(gradients(electra, "generator"), "discriminator.") == set()


def test_disentangled_tables_start_as_the_generators_and_follow_it(make_pair):
    electra, text = make_pair("disentangled"), torch.tensor([[2, 11, 12, 3]])
    ours, base = electra.discriminator.encoder.embeddings, electra.generator.encoder.embeddings
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))
    with torch.no_grad():
        base.token.weight[11] += 1.0
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))
    with torch.no_grad():
        ours.token.weight[12] += 1.0
    assert not torch.allclose(ours(text, text * 0), base(text, text * 0))


def test_a_modern_pair_shares_only_the_narrow_token_table(make_pair):
    electra = make_pair("embeddings", size=MODERN)
    assert under(gradients(electra, "discriminator"), "generator.") == {"encoder.embeddings.token.weight"}
    assert under(gradients(electra, "generator"), "discriminator.") == set()
    assert electra.generator.encoder.project.weight is not electra.discriminator.encoder.project.weight


def test_a_modern_disentangled_discriminator_leaves_the_generator_alone(make_pair):
    electra, text = make_pair("disentangled", size=MODERN), torch.tensor([[2, 11, 12, 3]])
    by_discriminator = gradients(electra, "discriminator")
    assert under(by_discriminator, "generator.") == set()
    assert under(by_discriminator, "discriminator.encoder.embeddings.") == {"token.weight"}
    ours, base = electra.discriminator.encoder.embeddings, electra.generator.encoder.embeddings
    torch.testing.assert_close(ours(text, text * 0), base(text, text * 0))


def test_a_modern_generators_output_table_is_its_input_table_through_its_projection(make_pair):
    generator = make_pair("none", size=MODERN).generator
    hidden = torch.randn(1, 2, 8)
    head, encoder = generator.head, generator.encoder
    table = encoder.embeddings.token.weight @ encoder.project.weight.T  # [V, D]
    expected = head.norm(torch.nn.functional.gelu(head.dense(hidden))) @ table.T + head.bias
    torch.testing.assert_close(head(hidden, encoder.embeddings.token.weight, encoder.tied_projection()), expected)


def shared_tensors(electra: Electra) -> set[int]:
    """The objects that are parameters of both parts."""
    ours = {id(parameter) for parameter in electra.generator.parameters()}
    return ours & {id(parameter) for parameter in electra.discriminator.parameters()}


@pytest.mark.parametrize(
    ("sharing", "count"), [("none", 0), ("embeddings", 5), ("all", 5 + 2 + 2 * 12), ("disentangled", 5)]
)
def test_what_is_shared_is_one_object_wherever_the_pair_goes(make_pair, tmp_path, sharing, count):
    electra = make_pair(sharing)
    assert len(shared_tensors(electra)) == count
    assert len(shared_tensors(electra.to(torch.float64))) == count
    assert len(shared_tensors(deepcopy(electra))) == count
    save_model(electra, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert len(shared_tensors(loaded)) == count
    assert len(shared_tensors(loaded.to(torch.float32))) == count


def test_a_shared_table_trains_as_one(make_pair):
    electra = make_pair("embeddings")
    optimizer = torch.optim.SGD(electra.parameters(), lr=1.0)
    before = electra.discriminator.encoder.embeddings.token.weight.detach().clone()
    gradients(electra, "generator")
    optimizer.step()
    after = electra.discriminator.encoder.embeddings.token.weight
    assert (after != before).any(1)[11]
    torch.testing.assert_close(after, before - electra.generator.encoder.embeddings.token.weight.grad)


def update(electra: Electra, call) -> dict[str, torch.Tensor]:
    """A step of training through `call`, and the parameters after it."""
    text = torch.tensor([[2, 11, 12, 3]])
    (call(electra.generator)(text).square().sum() + call(electra.discriminator)(text).square().sum()).backward()
    torch.optim.SGD(electra.parameters(), lr=0.1).step()
    return dict(electra.named_parameters())


@pytest.mark.parametrize("sharing", SHARING)
def test_a_compiled_step_trains_what_is_shared_as_one(make_pair, sharing):
    compiled = make_pair(sharing)
    count = len(shared_tensors(compiled))
    updated = update(compiled, lambda part: torch.compile(part, backend="eager"))
    torch.testing.assert_close(updated, update(make_pair(sharing), lambda part: part))
    assert len(shared_tensors(compiled)) == count


def test_the_generators_output_table_is_its_input_table(make_pair):
    generator, text = make_pair("none").generator.eval(), torch.tensor([[2, 11, 12, 3]])
    before = generator(text)
    with torch.no_grad():
        generator.encoder.embeddings.token.weight[40] *= 3  # a token that is not in the text
    after = generator(text)
    assert (after != before).any(0).any(0).nonzero().flatten().tolist() == [40]


def test_logits_at_some_positions_equal_those_among_all(make_pair):
    generator, text = make_pair().generator.eval(), torch.tensor([[2, 11, 12, 13, 3]])
    some = generator(text, at=torch.tensor([[3, 1]]))
    torch.testing.assert_close(some, generator(text)[:, [3, 1]])


def test_every_scheme_survives_json(make_pair):
    for sharing, size in product(SHARING, (WIDE, MODERN)):
        config = make_pair(sharing, size=size).config
        assert ElectraConfig.from_dict(asdict(config)) == config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sharing": "all"}, "sharing=all needs .* the same width, but they have 8 and 24"),
        ({"sharing": "some"}, "unknown sharing 'some'; choose from none, embeddings, all, disentangled"),
        ({"discriminator": None}, "sharing=embeddings needs both"),
        ({"generator": replace(NARROW, embedding_width=8)}, "same embedding_width, but they have 8"),
        ({"generator": replace(NARROW, style="modern")}, "same style, but they have modern and classic"),
        ({"generator": replace(NARROW, dropout=0.2)}, "same dropout, but they have 0.2 and"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ElectraConfig(**({"generator": NARROW, "discriminator": WIDE} | settings))


def test_a_missing_part_is_named():
    lone = Electra(ElectraConfig(generator=WIDE, discriminator=None, sharing="none"))
    with pytest.raises(ConfigError, match="no discriminator"):
        lone.pair()
