"""Facts about the objectives of the paper."""

from dataclasses import replace

import pytest
import torch
from conftest import MODERN, WIDE
from scipy import stats
from torch import Tensor
from torch.nn import functional

from electra.data.loader import Batch
from electra.errors import ConfigError
from electra.model.electra import CopyMaskedLanguageModel, Electra
from electra.model.heads import TokenPredictions
from electra.objectives.config import MaskingConfig, ObjectiveConfig
from electra.objectives.losses import Loss, sum_token_losses, total_loss
from electra.objectives.masking import Masked
from electra.objectives.objectives import (
    OBJECTIVES,
    Corrupted,
    ObjectiveContext,
    adversarial,
    all_tokens_mlm,
    baseline_loss,
    corrupt,
    electra_15,
    frozen_generator_rtd,
    masked_language_modeling,
    mlm_loss,
    policy_loss,
    predict_masked,
    replace_mlm,
    replaced_token_detection,
    rtd_losses,
    sample,
)


@pytest.fixture
def context(vocabulary) -> ObjectiveContext:
    return ObjectiveContext(vocabulary=vocabulary, masking=MaskingConfig(mask_fraction=0.3))


def with_objective(context: ObjectiveContext, **settings) -> ObjectiveContext:
    return replace(context, objective=ObjectiveConfig(**settings))


def masked_at(positions: list[int], labels: list[int], weights: list[float]) -> Masked:
    return Masked(torch.empty(0), torch.tensor([positions]), torch.tensor([labels]), torch.tensor([weights]))


def predictions_with(logits: Tensor) -> TokenPredictions:
    vocab_size = logits.shape[2]
    return TokenPredictions(logits, logits, torch.eye(vocab_size, dtype=logits.dtype), torch.zeros(vocab_size))


def sample_rows(logits: Tensor, context: ObjectiveContext) -> Tensor:
    """Samples [B, M] from logits [B, M, V] whose labels are all 0."""
    rows, slots = logits.shape[:2]
    batch = Batch(torch.empty(rows, 8), torch.tensor(0), torch.arange(rows))
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(rows, slots).long(), torch.ones(rows, slots))
    return sample(predictions_with(logits), masked, batch, context)


def corrupted_text(electra: Electra, batch: Batch, context: ObjectiveContext) -> Tensor:
    masked = context.mask(batch)
    sampled = sample(predict_masked(electra, masked, batch, context), masked, batch, context)
    return corrupt(batch.input_ids, masked, sampled).input_ids


def test_weight_seed_and_temperature_change_the_loss(make_pair, make_batch, context):
    def loss(context: ObjectiveContext) -> float:
        return total_loss(replaced_token_detection(electra, batch, context)).item()

    electra, batch = make_pair().eval(), make_batch()
    losses = replaced_token_detection(electra, batch, context)
    generator, discriminator = (losses[name].mean().item() for name in ("generator", "discriminator"))
    assert loss(context) == pytest.approx(generator + 50 * discriminator)
    assert loss(with_objective(context, discriminator_weight=2)) == pytest.approx(generator + 2 * discriminator)
    assert loss(replace(context, seed=1)) != loss(context)
    assert loss(with_objective(context, temperature=0.1)) != loss(context)


def test_the_label_of_a_correct_sample_changes_the_loss(make_pair, make_batch, context):
    electra, batch = make_pair().eval(), make_batch()
    with torch.no_grad():
        electra.generator.head.bias[7] = 100  # always predicted
    batch = replace(batch, input_ids=batch.input_ids.clone().fill_(7))
    original = replaced_token_detection(electra, batch, context)["discriminator"]
    torch.testing.assert_close(original.sum, functional.softplus(electra.discriminator(batch.input_ids)).sum())
    context = with_objective(context, correct_sample_label="replaced")
    replaced = replaced_token_detection(electra, batch, context)["discriminator"]
    assert (replaced.sum - original.sum).abs() > 1e-4


def test_generator_and_discriminator_use_segment_ids(make_pair, make_batch, context):
    electra, batch = make_pair().eval(), make_batch()
    segment_ids = (torch.arange(16) >= 8).long().expand(4, -1)
    with torch.no_grad():
        electra.generator.encoder.embeddings.segment.weight[1] += 1
    batches = (batch, replace(batch, segment_ids=segment_ids))
    without, with_segments = (replaced_token_detection(electra, each, context) for each in batches)
    assert without["generator"].sum != with_segments["generator"].sum
    assert without["discriminator"].sum != with_segments["discriminator"].sum


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masks_of_every_objective_depend_on_seed_and_step(make_pair, make_batch, context, objective):
    def loss(seed: int, step: int) -> float:
        return total_loss(
            OBJECTIVES[objective].losses(electra, make_batch(step=step), replace(context, seed=seed))
        ).item()

    electra = make_pair(objective=objective).eval()
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


@pytest.mark.parametrize(("label", "is_replaced"), [("original", False), ("replaced", True)])
def test_a_correct_sample_is_labelled_as_configured(label, is_replaced):
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 3], [6, 8], [1, 1]), torch.tensor([[9, 8]]), label)
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, is_replaced]]


@pytest.mark.parametrize("label", ["original", "replaced"])
def test_an_unused_mask_slot_replaces_nothing(label):
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 0], [6, 5], [1, 0]), torch.tensor([[9, 9]]), label)
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, False]]


def test_mlm_loss_is_the_mean_over_used_mask_slots():
    logits = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    loss = mlm_loss(predictions_with(logits), masked_at([1, 2, 3], [4, 5, 6], [1, 1, 0]))
    expected = -(logits.log_softmax(2)[0, 0, 4] + logits.log_softmax(2)[0, 1, 5]) / 2
    assert loss.count == 2
    torch.testing.assert_close(loss.mean(), expected)


def test_rtd_loss_is_the_mean_over_all_tokens_except_padding():
    logits = torch.tensor([[2.0, -1.0, 0.5, 9.0]])
    is_replaced = torch.tensor([[True, False, False, True]])
    losses = rtd_losses(logits, Corrupted(torch.empty(0), is_replaced))
    loss = sum_token_losses(losses, torch.tensor([[1, 1, 1, 0]]), 50)
    probability = logits.sigmoid()[0]
    expected = -(probability[0].log() + (1 - probability[1]).log() + (1 - probability[2]).log()) / 3
    assert loss.count == 3
    torch.testing.assert_close(loss.mean(), expected)


def test_the_total_is_the_generators_mean_plus_fifty_times_the_discriminators():
    generator = Loss(torch.tensor(6.0), torch.tensor(3.0))
    discriminator = Loss(torch.tensor(1.0), torch.tensor(10.0), ObjectiveConfig().discriminator_weight)
    assert total_loss({"generator": generator, "discriminator": discriminator}).item() == pytest.approx(2 + 50 * 0.1)


def test_a_loss_without_predictions_is_zero():
    assert total_loss({"generator": Loss(torch.tensor(0.0), torch.tensor(0.0))}).item() == 0


def test_neither_loss_has_a_gradient_for_the_other_model(make_pair, make_batch, context):
    electra = make_pair("none")
    losses = replaced_token_detection(electra, make_batch(), context)
    losses["discriminator"].mean().backward()
    assert all(parameter.grad is None for parameter in electra.generator.parameters())
    assert all(parameter.grad is not None for parameter in electra.discriminator.parameters())
    electra.zero_grad()
    losses["generator"].mean().backward()
    assert all(parameter.grad is None for parameter in electra.discriminator.parameters())
    assert all(parameter.grad is not None for parameter in electra.generator.parameters())


def test_the_joint_loss_equals_a_computation_token_by_token(make_pair, make_batch, context):
    electra, batch = make_pair().eval(), make_batch(lengths=[16, 12, 7, 3])
    losses = replaced_token_detection(electra, batch, context)
    masked = context.mask(batch)
    logits = electra.generator(masked.input_ids, batch.attention_mask).logits  # [B, L, V]
    at_masked = logits.gather(1, masked.positions[:, :, None].expand(-1, -1, 60))
    sampled = sample(predictions_with(at_masked), masked, batch, context)
    corrupted = batch.input_ids.clone()
    mlm_losses = []
    for row, slot in (masked.weights > 0).nonzero().tolist():
        position = masked.positions[row, slot]
        corrupted[row, position] = sampled[row, slot]
        mlm_losses.append(functional.cross_entropy(logits[row, position], batch.input_ids[row, position]))
    rtd_logits = electra.discriminator(corrupted, batch.attention_mask)[batch.attention_mask]
    labels = (corrupted != batch.input_ids)[batch.attention_mask].float()
    expected = functional.binary_cross_entropy_with_logits(rtd_logits, labels)
    torch.testing.assert_close(losses["generator"].mean(), torch.stack(mlm_losses).mean())
    torch.testing.assert_close(losses["discriminator"].mean(), expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_have_the_gradients_of_the_whole_batch(make_pair, make_batch, context, objective):
    batch = make_batch(rows=6, lengths=[16, 3, 9, 16, 5, 12])

    def gradients(parts: list[slice]) -> list[Tensor]:
        electra = make_pair(objective=objective)
        counts = OBJECTIVES[objective].count_predictions(batch, context)
        for rows in parts:
            part = Batch(batch.input_ids[rows], batch.step, batch.row_ids[rows], batch.attention_mask[rows])
            total_loss(OBJECTIVES[objective].losses(electra, part, context), counts).backward()
        return [parameter.grad for parameter in electra.parameters() if parameter.grad is not None]

    whole, split = gradients([slice(0, 6)]), gradients([slice(0, 1), slice(1, 6)])
    assert len(whole) == len(split) > 0
    torch.testing.assert_close(whole, split)


LOGITS = torch.tensor([2.3, 1.1, 0.0, 0.7, 0.4, -0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax_at_a_temperature(context, dtype, temperature):
    logits = LOGITS.to(dtype)
    sampled = sample_rows(logits.expand(20_000, 3, 6), with_objective(context, temperature=temperature))
    counts = sampled.flatten().bincount(minlength=6)
    probabilities = (logits.double() / temperature).softmax(0)
    assert stats.chisquare(counts, probabilities * counts.sum()).pvalue > 0.001


def test_disallow_correct_never_samples_the_original_and_keeps_the_odds_of_the_rest(context):
    sampled = sample_rows(LOGITS.expand(20_000, 3, 6), with_objective(context, disallow_correct=True))
    counts = sampled.flatten().bincount(minlength=6)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], LOGITS[1:].double().softmax(0) * counts.sum()).pvalue > 0.001


def test_documents_in_a_row_do_not_influence_each_other(make_pair, make_batch, context):
    electra, batch = make_pair().eval(), make_batch(rows=1)
    document_ids = (torch.arange(16)[None] >= 8).long()
    masked = context.mask(batch)
    packed = electra.discriminator(masked.input_ids, document_ids=document_ids)
    alone = electra.discriminator(masked.input_ids[:, :8])
    torch.testing.assert_close(packed[:, :8], alone)
    batches = (batch, replace(batch, document_ids=document_ids))
    one, two = (replaced_token_detection(electra, each, context)["discriminator"].mean() for each in batches)
    assert one != two


def test_mlm_trains_a_generator_alone(make_pair, make_batch, context):
    electra = make_pair("none")
    electra.discriminator = None
    losses = masked_language_modeling(electra, make_batch(), context)
    assert list(losses) == ["generator"]
    assert losses["generator"].mean().item() == pytest.approx(torch.tensor(60.0).log().item(), abs=0.3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_compiles_to_one_graph(make_pair, make_batch, context, objective):
    electra = make_pair(objective=objective, size=replace(WIDE, layers=1))

    def loss(input_ids, step, row_ids, attention_mask):
        batch = Batch(input_ids, step, row_ids, attention_mask, is_continuation=input_ids % 3 == 0)
        return total_loss(OBJECTIVES[objective].losses(electra, batch, context))

    context = replace(context, masking=replace(context.masking, mask_count="paper", whole_word_masking=True))
    batch = make_batch(lengths=[16, 12, 7, 3])
    inputs = (batch.input_ids, batch.step, batch.row_ids, batch.attention_mask)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), loss(*inputs))


class FakeStream:
    """A side stream that records its calls; as with the real one, a compiled graph ends at each."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @torch.compiler.disable
    def enter(self) -> None:
        self.calls.append("enter")

    @torch.compiler.disable
    def join(self, *tensors: Tensor | None) -> None:
        self.calls.append("join")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # hidden by torch.compile itself, but not from pytest
@pytest.mark.parametrize(
    ("objective", "is_compiled"),
    [("rtd", True), *((name, False) for name in OBJECTIVES if OBJECTIVES[name].has_independent_backward)],
)
def test_the_generator_runs_on_a_side_stream_until_its_sample_is_taken(
    make_pair, make_batch, context, objective, is_compiled
):
    electra, batch, stream = make_pair("none", objective=objective), make_batch(), FakeStream()
    losses = OBJECTIVES[objective].losses
    expected = losses(electra, batch, context)
    electra.discriminator.encoder.register_forward_pre_hook(
        lambda *_: stream.calls.append("discriminator"), prepend=True
    )
    electra.generator.side_stream = stream
    on_stream = (torch.compile(losses, backend="eager") if is_compiled else losses)(electra, batch, context)
    assert stream.calls == ["enter", "join", "discriminator"]
    torch.testing.assert_close([loss.sum for loss in on_stream.values()], [loss.sum for loss in expected.values()])
    with torch.no_grad():
        losses(electra, batch, context)
    assert stream.calls[3:] == ["discriminator"]  # evaluation stays on the main stream


@pytest.mark.parametrize("sharing", ["none", "disentangled"])
@pytest.mark.parametrize("style", ["classic", "modern"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_overfits_a_batch(make_pair, make_batch, context, objective, style, sharing):
    size = {"size": MODERN} if style == "modern" else {}
    electra, batch = make_pair(sharing, objective=objective, **size), make_batch()
    optimizer, means = torch.optim.AdamW(electra.parameters(), lr=1e-2), []
    for _ in range(20):
        losses = OBJECTIVES[objective].losses(electra, batch, context)
        means.append(losses[list(losses)[-1]].mean().item())  # the discriminator's, or the only model's
        optimizer.zero_grad()
        total_loss(losses).backward()
        optimizer.step()
    assert min(means) < 0.9 * means[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"discriminator_weight": -1}, "discriminator_weight is -1"),
        ({"entropy_bonus": -1}, "entropy_bonus is -1"),
    ],
)
def test_settings_out_of_bounds_are_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        ObjectiveConfig(**settings)


def test_electra_15_has_no_loss_at_positions_that_are_not_masked(make_pair, make_batch, context):
    electra, batch = make_pair("none").eval(), make_batch()
    masked = context.mask(batch)
    logits = []
    electra.discriminator.head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    loss = electra_15(electra, batch, context)["discriminator"]
    logits[0].retain_grad()
    loss.mean().backward()
    is_masked = torch.zeros(4, 16).scatter(1, masked.positions, masked.weights).bool()
    assert loss.count == is_masked.sum() == masked.weights.sum()
    assert torch.equal(logits[0].grad != 0, is_masked)


@pytest.mark.parametrize("objective", ["replace-mlm", "all-tokens-mlm"])
def test_replace_mlm_has_no_mask_token_in_its_input(make_pair, make_batch, context, objective):
    electra, batch = make_pair(objective=objective), make_batch()
    with torch.no_grad():
        electra.generator.head.bias[context.vocabulary.mask_id] = -100  # never sampled
    inputs = []
    electra.discriminator.encoder.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    OBJECTIVES[objective].losses(electra, batch, context)
    assert (inputs[0] != batch.input_ids).any()
    assert not (inputs[0] == context.vocabulary.mask_id).any()


def test_replace_mlm_predicts_the_original_tokens(make_pair, make_batch, context):
    electra, batch = make_pair(objective="replace-mlm").eval(), make_batch(lengths=[16, 12, 7, 3])
    loss = replace_mlm(electra, batch, context)["replace_mlm"]
    masked, corrupted = context.mask(batch), corrupted_text(electra, batch, context)
    log_probs = electra.discriminator(corrupted, batch.attention_mask).logits.log_softmax(2)  # [B, L, V]
    is_masked = torch.zeros(4, 16).scatter(1, masked.positions, masked.weights).bool()
    expected = -log_probs.gather(2, batch.input_ids[:, :, None]).squeeze(2)[is_masked].mean()
    torch.testing.assert_close(loss.mean(), expected)


def copy_mlm(make_pair, gate: float) -> CopyMaskedLanguageModel:
    model = make_pair(objective="all-tokens-mlm").discriminator
    with torch.no_grad():
        model.gate.dense.bias.fill_(gate)
    return model


@pytest.mark.parametrize("gate", [-3.0, 0.0, 3.0])
def test_the_probabilities_with_a_copy_gate_sum_to_one(make_pair, make_batch, gate):
    model, text = copy_mlm(make_pair, gate), make_batch().input_ids
    log_probs = model.log_probabilities(model(text), text)  # [B, L, V]
    torch.testing.assert_close(log_probs.exp().sum(2), torch.ones(4, 16))


def test_an_open_copy_gate_copies_and_a_closed_one_leaves_the_softmax(make_pair, make_batch):
    text = make_batch().input_ids
    open_gate, closed = (copy_mlm(make_pair, gate) for gate in (100.0, -100.0))
    copied = open_gate.log_probabilities(open_gate(text), text).exp()
    torch.testing.assert_close(copied, functional.one_hot(text, 60).float())
    predictions = closed(text)
    expected = predictions.logits.log_softmax(2)
    torch.testing.assert_close(closed.log_probabilities(predictions, text), expected, rtol=1e-4, atol=1e-4)


def test_log_likelihoods_in_chunks_equal_the_whole_distributions(make_pair, make_batch, monkeypatch):
    model, batch = copy_mlm(make_pair, 1.0), make_batch()
    predictions, other = model(batch.input_ids), batch.input_ids.roll(1, dims=1)
    expected = model.log_probabilities(predictions, other).gather(2, batch.input_ids[:, :, None]).squeeze(2)
    for chunk_size in (7, 4096):
        monkeypatch.setattr("electra.model.electra.CHUNK_SIZE", chunk_size)
        torch.testing.assert_close(model.log_likelihood(predictions.hidden, other, batch.input_ids), expected)


def test_all_tokens_mlm_is_the_mean_over_all_tokens_except_padding(make_pair, make_batch, context):
    electra, batch = make_pair(objective="all-tokens-mlm").eval(), make_batch(lengths=[16, 12, 7, 3])
    loss = all_tokens_mlm(electra, batch, context)["all_tokens_mlm"]
    corrupted = corrupted_text(electra, batch, context)
    predictions = electra.discriminator(corrupted, batch.attention_mask)
    log_probs = electra.discriminator.log_probabilities(predictions, corrupted)
    expected = -log_probs.gather(2, batch.input_ids[:, :, None]).squeeze(2)[batch.attention_mask].mean()
    assert loss.count == 16 + 12 + 7 + 3
    torch.testing.assert_close(loss.mean(), expected)


@pytest.mark.parametrize("sharing", ["none", "disentangled"])
def test_input_and_output_embeddings_of_replace_mlm_are_tied(make_pair, sharing):
    model, text = make_pair(sharing, objective="replace-mlm").discriminator.eval(), torch.tensor([[2, 11, 12, 3]])
    before = model(text).logits
    with torch.no_grad():
        embeddings = model.encoder.embeddings
        table = (embeddings.base or embeddings).token.weight
        table[40] += 3  # a token that is not in the text
    assert (model(text).logits != before).any(0).any(0).nonzero().flatten().tolist() == [40]


REWARDS = torch.tensor([0.3, 2.0, 0.1, 1.2, 0.7])
POLICY = torch.tensor([0.5, -1.0, 0.2, 1.3, 0.0])


def exact_policy_gradient() -> Tensor:
    """The gradient of the expected reward, by enumeration of the vocabulary of five."""
    logits = POLICY.clone().requires_grad_()
    (logits.softmax(0) * REWARDS).sum().backward()
    return logits.grad


@pytest.mark.parametrize("baseline", [0.0, 0.9])
def test_the_expected_policy_gradient_is_exact_whatever_the_baseline(baseline):
    logits = POLICY.clone().requires_grad_()
    for token, probability in enumerate(POLICY.softmax(0)):
        sampled, advantage = torch.tensor([[token]]), (REWARDS[token] - baseline).view(1, 1)
        loss = policy_loss(logits[None, None], sampled, advantage, masked_at([0], [0], [1.0]), entropy_bonus=0)
        (probability * loss.mean()).backward()
    torch.testing.assert_close(-logits.grad, exact_policy_gradient())


def test_the_policy_gradient_of_samples_approaches_the_exact_one(context):
    rows = 40_000
    logits = POLICY.clone().requires_grad_()
    policy = logits.expand(rows, 1, -1)
    sampled = sample_rows(policy, context)
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(rows, 1).long(), torch.ones(rows, 1))
    policy_loss(policy, sampled, REWARDS[sampled] - 0.9, masked, entropy_bonus=0).mean().backward()
    torch.testing.assert_close(-logits.grad, exact_policy_gradient(), rtol=0, atol=0.01)


def test_the_entropy_bonus_increases_entropy():
    logits = torch.tensor([[[2.0, 0.0, 0.0, 0.0, -1.0]]], requires_grad=True)
    sampled, masked = torch.tensor([[0]]), masked_at([0], [0], [1.0])
    policy_loss(logits, sampled, torch.zeros(1, 1), masked, entropy_bonus=0.5).mean().backward()
    after = (logits - 0.1 * logits.grad).softmax(2)
    assert stats.entropy(after.detach().flatten()) > stats.entropy(logits.detach().softmax(2).flatten())


def test_the_advantage_is_the_discriminators_loss_at_the_sample_minus_the_baseline(make_pair, make_batch, context):
    electra, batch = make_pair("none", objective="adversarial").eval(), make_batch()
    with torch.no_grad():
        electra.discriminator.head.classifier.weight.zero_()
        electra.discriminator.head.classifier.bias.fill_(-2.0)  # predicts "original" everywhere
        electra.baseline.dense.weight.zero_()
        electra.baseline.dense.bias.fill_(-1.0)
    losses = adversarial(electra, batch, context)
    masked = context.mask(batch)
    predictions = predict_masked(electra, masked, batch, context)
    sampled = sample(predictions, masked, batch, context)
    missed, detected = functional.softplus(torch.tensor([2.0, -2.0]))
    rewards = torch.where(sampled != masked.labels, missed, detected)
    log_probs = predictions.logits.log_softmax(2).gather(2, sampled[:, :, None]).squeeze(2)
    expected = -((rewards - functional.softplus(torch.tensor(1.0))) * log_probs * masked.weights).sum()
    torch.testing.assert_close(losses["generator"].sum, expected)


def test_the_baseline_learns_the_discriminators_mean_probability_of_the_label():
    baseline = torch.zeros(1, 1, requires_grad=True)
    rewards = -torch.tensor([0.9, 0.5]).log()
    for _ in range(500):
        loss = sum(baseline_loss(baseline, reward.view(1, 1), masked_at([0], [0], [1.0])).mean() for reward in rewards)
        (gradient,) = torch.autograd.grad(loss, baseline)
        baseline = (baseline - gradient).detach().requires_grad_()
    assert baseline.sigmoid().item() == pytest.approx(0.7, abs=1e-3)


def test_each_adversarial_loss_trains_only_its_own_part(make_pair, make_batch, context):
    trained = {}
    for name in ("generator", "baseline", "discriminator"):
        electra = make_pair("none", objective="adversarial")
        adversarial(electra, make_batch(), context)[name].mean().backward()
        trained[name] = {path.split(".")[0] for path, weight in electra.named_parameters() if weight.grad is not None}
    assert trained == {name: {name} for name in trained}


def test_a_frozen_generator_has_no_gradient(make_pair, make_batch, context):
    electra = make_pair("none", objective="frozen-rtd")
    losses = frozen_generator_rtd(electra, make_batch(), context)
    total_loss(losses).backward()
    assert list(losses) == ["discriminator"]
    assert all(weight.grad is None for weight in electra.generator.parameters())
    assert all(weight.grad is not None for weight in electra.discriminator.parameters())


@pytest.mark.parametrize("objective", ["rtd", "electra-15", "replace-mlm", "all-tokens-mlm"])
def test_replacements_without_a_generator_follow_the_frequencies(make_pair, make_batch, context, objective):
    electra, batch = make_pair("none", objective=objective), make_batch(rows=200)
    electra.generator = None
    frequencies = torch.zeros(60)
    frequencies[[10, 20]] = torch.tensor([0.25, 0.75])
    inputs = []
    electra.discriminator.encoder.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    losses = OBJECTIVES[objective].losses(electra, batch, replace(context, frequencies=frequencies))
    replaced = inputs[0][inputs[0] != batch.input_ids]
    assert len(losses) == 1
    assert set(replaced.tolist()) == {10, 20}
    assert (replaced == 20).float().mean().item() == pytest.approx(0.75, abs=0.06)


AUXILIARY = ("corrective_lm", "bag_of_words")
WITH_AUXILIARY = {"corrective_lm_weight": 2.0, "bag_of_words_weight": 0.5}


@pytest.mark.parametrize("objective", ["rtd", "electra-15", "adversarial", "frozen-rtd"])
@pytest.mark.parametrize("size", [WIDE, MODERN], ids=["classic", "modern"])
def test_auxiliary_losses_train_their_heads_and_the_encoder(make_pair, make_batch, context, objective, size):
    electra = make_pair("none", size=size, objective=objective, auxiliary_heads=AUXILIARY)
    losses = OBJECTIVES[objective].losses(electra, make_batch(), with_objective(context, **WITH_AUXILIARY))
    assert [losses[name].weight for name in AUXILIARY] == [2.0, 0.5]
    (losses["corrective_lm"].mean() + losses["bag_of_words"].mean()).backward()
    discriminator = electra.discriminator
    assert all(weight.grad is not None for weight in discriminator.auxiliary_heads.parameters())
    assert discriminator.encoder.layers[0].feedforward.down.weight.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in discriminator.head.parameters())


def test_corrective_lm_predicts_the_original_tokens_from_corrupted_text(make_pair, make_batch, context):
    electra = make_pair(auxiliary_heads=AUXILIARY).eval()
    batch, context = make_batch(lengths=[16, 12, 7, 3]), with_objective(context, **WITH_AUXILIARY)
    masked = context.mask(batch)
    hidden = electra.discriminator.encoder(corrupted_text(electra, batch, context), **batch.encoder_inputs())
    logits = electra.discriminator.predict_tokens("corrective_lm", hidden).logits  # [B, L, V]
    losses = functional.cross_entropy(logits.flatten(0, 1), batch.input_ids.flatten(), reduction="none")
    expected = (losses.view_as(batch.input_ids).gather(1, masked.positions) * masked.weights).sum()
    actual = replaced_token_detection(electra, batch, context)["corrective_lm"]
    torch.testing.assert_close(actual.sum, expected)
    assert actual.count == masked.weights.sum()


def test_bag_of_words_predicts_the_masked_tokens_of_the_first_document_from_cls(make_pair, make_batch, context):
    electra, context = make_pair(auxiliary_heads=AUXILIARY).eval(), with_objective(context, **WITH_AUXILIARY)
    document_ids = (torch.arange(16) >= 9).int().expand(4, 16)  # two documents: 9 and 7 tokens
    batch = replace(make_batch(), document_ids=document_ids)
    masked = context.mask(batch)
    hidden = electra.discriminator.encoder(corrupted_text(electra, batch, context), **batch.encoder_inputs())
    log_probs = electra.discriminator.predict_tokens("bag_of_words", hidden[:, 0]).logits.log_softmax(1)  # [B, V]
    expected = [
        -log_probs[row, label]
        for row in range(4)
        for position, label, weight in zip(
            *(x[row] for x in (masked.positions, masked.labels, masked.weights)), strict=True
        )
        if weight and position < 9
    ]
    actual = replaced_token_detection(electra, batch, context)["bag_of_words"]
    torch.testing.assert_close(actual.sum, sum(expected))
    assert actual.count == len(expected) < masked.weights.sum()


def test_predictions_of_auxiliary_losses_are_counted_before_they_are_computed(make_pair, make_batch, context):
    context, batch = with_objective(context, **WITH_AUXILIARY), make_batch(lengths=[16, 12, 7, 3])
    batch = replace(batch, document_ids=(torch.arange(16) >= 9).int().expand(4, 16))
    losses = replaced_token_detection(make_pair(auxiliary_heads=AUXILIARY), batch, context)
    counts = OBJECTIVES["rtd"].count_predictions(batch, context)
    assert {name: loss.count.item() for name, loss in losses.items()} == {
        name: count.item() for name, count in counts.items()
    }


def test_without_a_weight_there_are_no_auxiliary_losses(make_pair, make_batch, context):
    assert list(replaced_token_detection(make_pair(), make_batch(), context)) == ["generator", "discriminator"]
    assert ObjectiveConfig(bag_of_words_weight=1.0).auxiliary_heads() == ("bag_of_words",)
    with pytest.raises(ConfigError, match="at least 0"):
        ObjectiveConfig(corrective_lm_weight=-1.0)
