"""Our kernels on a CPU: in Triton's interpreter they make what plain operations make, and the same gradients.

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py

Rounding, streams and speed show on a GPU only (test_gpu.py); whether a kernel is right shows here, in fp32.
"""

from collections.abc import Callable

import pytest
import torch
from layers import by_steps, factors, made_layer
from torch import Tensor, nn

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.kernels import dispatch as kernels
from electra.model.attention import attention_bias_of
from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Electra
from electra.model.encoder import Encoder
from electra.objectives.losses import total
from electra.objectives.objectives import OBJECTIVES, Settings, goes_in_one_pass

pytestmark = [
    pytest.mark.skipif(
        not (kernels.IS_INTERPRETED and kernels.HAS_TRITON), reason="needs Triton and TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:divide by zero"),  # the interpreter's numpy says it of log(0), which is meant
]


@pytest.fixture
def both_ways(monkeypatch):
    """Do something by kernels and by plain operations: what comes of it, and the gradients of a module's parameters."""

    def outcomes(model: nn.Module, act: Callable[[], tuple[Tensor, ...]]) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for is_interpreted in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(kernels, "IS_INTERPRETED", is_interpreted)
                model.zero_grad()
                made = act()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            found.append([*(each.detach() for each in made), *gradients])
        return found[0], found[1]

    return outcomes


@pytest.fixture
def few_programs(monkeypatch):
    """One, so that it takes several tiles in turn, as on a GPU."""
    from electra.kernels import reductions as column_sums

    monkeypatch.setattr(column_sums, "PROGRAMS", 0)


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    """Equal but for the order of sums."""
    for one, other in zip(ours, plain, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-5 * other.float().norm() + 1e-7


def small_encoder(style: str, **own: int) -> Encoder:
    """An encoder whose parameters all matter."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 64, "heads": 2, "feedforward": 96, "embedding_width": 32, "vocab_size": 60}
    encoder = Encoder(EncoderConfig(style=style, dropout=0.0, attention_dropout=0.0, **sizes, **own))
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.3)
    return encoder


@pytest.mark.parametrize("wanted", ["all", "some"])
@pytest.mark.parametrize("hidden_part", ["documents", "padding", "nothing"])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_an_encoder_makes_the_same_states(both_ways, style, hidden_part, wanted):
    encoder = small_encoder(style, **({"global_attention_every": 2, "local_attention": 8} if style == "modern" else {}))
    ids, documents = torch.randint(5, 60, (3, 21)), (torch.rand(3, 21) < 0.1).cumsum(1)
    is_token = torch.arange(21) < torch.tensor([[21], [9], [17]]) if hidden_part == "padding" else None
    at = torch.randint(0, 9, (3, 5)) if wanted == "some" else None
    assert encoder.kernel(21) == "short rows"

    def act() -> tuple[Tensor]:
        states = encoder(ids, is_token, None, documents if hidden_part == "documents" else None, positions=at)
        if is_token is not None and at is None:
            states = states[is_token]
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        return (states,)

    assert_equal(*both_ways(encoder, act))


@pytest.mark.parametrize("wanted", ["all", "some"])
@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
def test_a_layer_drops_what_its_noise_says(rates, wanted):
    from electra.kernels.fused_layers import seeds_for

    layer, hidden, grown, documents = made_layer(64, *rates, rows=2, length=19, heads=2)
    at = torch.randint(0, 19, (2, 7)) if wanted == "some" else None
    reach = attention_bias_of(None, documents, kernel="short rows")
    torch.manual_seed(1)
    seeds, found = seeds_for(hidden, max(rates)), []
    for is_at_once in (True, False):
        given = hidden.clone().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(1)
        states = layer.at_once(given, reach, at) if is_at_once else by_steps(layer, given, documents, seeds, at)
        (states * grown[:, : states.shape[1]]).sum().backward()
        found.append([states.detach(), given.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert_equal(*found)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("width", [40, 256, 768, 1024, 1100])  # in one chunk, not full and full, and in several
def test_a_norm_has_the_gradients_of_plain_operations(few_programs, width, dropout):
    from electra.kernels.layernorm import gradients_of_norm_of_sum, norm_of_sum

    torch.manual_seed(0)
    product, residual, grown = (torch.randn(150, width) for _ in range(3))
    bias, weight, offset = (torch.randn(width) for _ in range(3))
    given = [each.requires_grad_() for each in (residual, product, weight, offset, bias)]
    seed = torch.tensor(5, dtype=torch.int32) if dropout else None
    added = (product + bias) * factors(5, torch.arange(product.numel()).view_as(product), dropout)
    plain = nn.functional.layer_norm(added + residual, (width,), weight, offset, 1e-5)
    plain.backward(grown)
    with torch.no_grad():
        hidden = norm_of_sum(product, bias, residual, weight, offset, 1e-5, seed, dropout)
        *found, parts = gradients_of_norm_of_sum(product, bias, residual, weight, grown, 1e-5, seed, dropout)
    assert_equal([hidden, *found, *parts.sum(0)], [plain.detach(), *(each.grad for each in given)])


def test_a_bias_of_queries_keys_and_values_gets_its_gradient(few_programs):
    from electra.kernels.reductions import sums_but_of_keys

    of_qkv = torch.randn(70, 3, 200)
    found = sums_but_of_keys(of_qkv.flatten(1), torch.float32).view(3, 200)
    assert_equal([found[0], found[1], found[2]], [of_qkv[:, 0].sum(0), torch.zeros(200), of_qkv[:, 2].sum(0)])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_a_step_has_the_same_losses_and_gradients(both_ways, few_programs, style, objective):
    vocabulary, needs = Vocabulary(size=300), OBJECTIVES[objective]
    sizes = {"layers": 1, "heads": 1, "width": 32, "feedforward": 48, "embedding_width": 16, "positions": 32}
    size = EncoderConfig(style=style, vocab_size=vocabulary.size, dropout=0.0, attention_dropout=0.0, **sizes)
    torch.manual_seed(0)
    kinds = {"head": needs.head or "rtd", "has_baseline": needs.has_baseline}
    parts = (
        {"discriminator": size, "sharing": "embeddings"} if needs.head else {"discriminator": None, "sharing": "none"}
    )
    electra = Electra(ElectraConfig(generator=size, **parts, **kinds))
    ids = torch.randint(110, vocabulary.size, (3, 20))
    batch = Batch(ids, torch.tensor(3), torch.arange(3), document_ids=(torch.rand(3, 20) < 0.1).cumsum(1).int())

    settings = Settings(vocabulary=vocabulary)
    assert electra.require_generator().encoder.kernel(20) == "short rows"
    assert goes_in_one_pass(torch.empty(0), settings)

    def act() -> tuple[Tensor, ...]:
        losses = needs.losses(electra, batch, settings)
        total(losses).backward()
        return tuple(loss.sum / loss.count for loss in losses.values())

    assert_equal(*both_ways(electra, act))


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_a_compiled_encoder_has_the_same_shapes_and_gradients(both_ways, style):
    encoder = small_encoder(style)
    compiled = torch.compile(encoder, backend="aot_eager", dynamic=False)
    assert encoder.kernel(12) == "short rows"
    ids, at = torch.randint(5, 60, (2, 12)), torch.randint(0, 12, (2, 3))

    def act() -> tuple[Tensor]:
        torch._dynamo.reset()
        states = (compiled if kernels.IS_INTERPRETED else encoder)(ids, positions=at)
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        return (states,)

    assert_equal(*both_ways(encoder, act))


def test_gradients_are_put_side_by_side_and_summed(few_programs):
    from electra.kernels import library_attention as long_rows

    parts = [torch.randn(2, 40, 2, 32) for _ in range(3)]
    together, sums = long_rows.side_by_side(torch.empty(2, 40, 3, 2, 32), *parts)
    assert torch.equal(together, torch.stack(parts, dim=2))
    torch.testing.assert_close(sums.sum(0), together.flatten(2).sum((0, 1)), rtol=1e-5, atol=1e-5)
