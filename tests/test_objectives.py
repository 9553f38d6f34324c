"""The objectives: facts of the paper."""

from dataclasses import replace

import pytest
import torch
from conftest import MODERN
from scipy import stats
from torch.nn import functional

from electra.data.loader import Batch
from electra.errors import ConfigError
from electra.model.electra import CopyMaskedLanguageModel
from electra.objectives.losses import Loss, total
from electra.objectives.masking import Masked, mask
from electra.objectives.objectives import (
    BLOCK,
    OBJECTIVES,
    Corrupted,
    Settings,
    adversarial,
    all_tokens_mlm,
    baseline_loss,
    corrupt,
    electra_15,
    fill,
    frozen_generator_detection,
    masked_language_modeling,
    mean_over,
    mlm_loss,
    policy_loss,
    replace_mlm,
    replaced_token_detection,
    rtd_losses,
    sample,
)


@pytest.fixture
def settings(vocabulary) -> Settings:
    return Settings(vocabulary=vocabulary, mask_fraction=0.3)


def masked_at(positions: list[int], originals: list[int], weights: list[float]) -> Masked:
    return Masked(torch.empty(0), torch.tensor([positions]), torch.tensor([originals]), torch.tensor([weights]))


def test_the_settings_reach_the_losses(make_pair, make_batch, settings):
    def loss(**changes) -> float:
        return total(replaced_token_detection(electra, batch, replace(settings, **changes))).item()

    electra, batch = make_pair().eval(), make_batch()
    parts = replaced_token_detection(electra, batch, settings)
    generator, discriminator = (parts[name].mean().item() for name in ("generator", "discriminator"))
    assert loss() == pytest.approx(generator + 50 * discriminator)
    assert loss(discriminator_weight=2) == pytest.approx(generator + 2 * discriminator)
    assert loss(seed=1) != loss()
    assert loss(temperature=0.1) != loss()


def test_a_right_guess_counts_as_the_settings_say(make_pair, make_batch, settings):
    electra, batch = make_pair().eval(), make_batch()
    with torch.no_grad():
        electra.generator.head.bias[7] = 100  # it always says 7
    batch = replace(batch, input_ids=batch.input_ids.clone().fill_(7))
    verdicts = functional.softplus(electra.discriminator(batch.input_ids))  # the loss of an original
    original = replaced_token_detection(electra, batch, settings)["discriminator"]
    torch.testing.assert_close(original.sum, verdicts.sum())
    replaced = replaced_token_detection(electra, batch, replace(settings, correct_sample_label="replaced"))[
        "discriminator"
    ]
    assert (replaced.sum - original.sum).abs() > 1e-4


def test_segments_reach_generator_and_discriminator(make_pair, make_batch, settings):
    electra, batch = make_pair().eval(), make_batch()
    segment_ids = (torch.arange(16) >= 8).long().expand(4, -1)
    with torch.no_grad():
        electra.generator.encoder.embeddings.segment.weight[1] += 1
    one, other = (
        replaced_token_detection(electra, each, settings) for each in (batch, replace(batch, segment_ids=segment_ids))
    )
    assert one["generator"].sum != other["generator"].sum
    assert one["discriminator"].sum != other["discriminator"].sum


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_masks_by_the_settings_seed_and_the_batchs_step(make_pair, make_batch, settings, objective):
    def loss(seed: int, step: int) -> float:
        return total(OBJECTIVES[objective].losses(electra, make_batch(step=step), replace(settings, seed=seed))).item()

    electra = make_pair(objective=objective).eval()
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


def test_blocks_and_tokens_within_them_are_sampled_by_seed_and_step():
    def drawn(seed: int, step: int) -> torch.Tensor:
        batch = Batch(torch.empty(100, 8), torch.tensor(step), torch.arange(100))
        return sample(torch.zeros(100, 1, 3 * BLOCK), Masked(*[torch.empty(0)] * 4), batch, Settings(seed=seed))

    first = drawn(0, 0)
    assert torch.equal(drawn(0, 0), first)
    for other in (drawn(1, 0), drawn(0, 1)):
        assert not torch.equal(other // BLOCK, first // BLOCK)
        assert not torch.equal(other % BLOCK, first % BLOCK)


def test_right_guess_counts_as_original():
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 3], [6, 8], [1, 1]), sampled=torch.tensor([[9, 8]]))
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, False]]


def test_right_guess_counts_as_replaced_when_asked():
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 3], [6, 8], [1, 1]), torch.tensor([[9, 8]]), correct_sample_label="replaced")
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("correct_sample_label", ["original", "replaced"])
def test_an_unused_slot_corrupts_nothing(correct_sample_label):
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 0], [6, 5], [1, 0]), torch.tensor([[9, 9]]), correct_sample_label)
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, False]]


def test_mlm_loss_is_the_mean_over_used_slots():
    guesses = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    loss = mlm_loss(guesses, masked_at([1, 2, 3], [4, 5, 6], [1, 1, 0]))
    expected = -(guesses.log_softmax(2)[0, 0, 4] + guesses.log_softmax(2)[0, 1, 5]) / 2
    assert loss.count == 2
    torch.testing.assert_close(loss.mean(), expected)


def test_rtd_loss_is_the_mean_over_all_tokens_that_are_not_padding():
    verdicts = torch.tensor([[2.0, -1.0, 0.5, 9.0]])
    is_replaced = torch.tensor([[True, False, False, True]])
    losses = rtd_losses(verdicts, Corrupted(torch.empty(0), is_replaced))
    loss = mean_over(losses, torch.tensor([[1, 1, 1, 0]]), 50)
    probability = verdicts.sigmoid()[0]
    expected = -(probability[0].log() + (1 - probability[1]).log() + (1 - probability[2]).log()) / 3
    assert loss.count == 3
    torch.testing.assert_close(loss.mean(), expected)


def test_the_whole_is_the_generators_mean_plus_fifty_times_the_discriminators():
    generator = Loss(torch.tensor(6.0), torch.tensor(3.0))
    discriminator = Loss(torch.tensor(1.0), torch.tensor(10.0), Settings().discriminator_weight)
    losses = {"generator": generator, "discriminator": discriminator}
    assert total(losses).item() == pytest.approx(2 + 50 * 0.1)


def test_nothing_to_predict_is_no_loss():
    assert total({"generator": Loss(torch.tensor(0.0), torch.tensor(0.0))}).item() == 0


def test_the_discriminators_loss_never_reaches_the_generator(make_pair, make_batch, settings):
    electra = make_pair("none")
    replaced_token_detection(electra, make_batch(), settings)["discriminator"].mean().backward()
    assert all(parameter.grad is None for parameter in electra.generator.parameters())
    assert all(parameter.grad is not None for parameter in electra.discriminator.parameters())


def test_the_generators_loss_never_reaches_the_discriminator(make_pair, make_batch, settings):
    electra = make_pair("none")
    replaced_token_detection(electra, make_batch(), settings)["generator"].mean().backward()
    assert all(parameter.grad is None for parameter in electra.discriminator.parameters())


def test_the_joint_loss_is_what_the_four_steps_by_hand_give(make_pair, make_batch, settings):
    electra, batch = make_pair().eval(), make_batch(lengths=[16, 12, 7, 3])
    losses = replaced_token_detection(electra, batch, settings)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    logits = electra.generator(masked.input_ids, batch.attention_mask)  # [B, L, V]
    sampled = sample(logits.gather(1, masked.positions[:, :, None].expand(-1, -1, 60)), masked, batch, settings)
    corrupted = batch.input_ids.clone()
    nll, is_used = [], masked.weights > 0
    for row, slot in is_used.nonzero().tolist():
        position = masked.positions[row, slot]
        corrupted[row, position] = sampled[row, slot]
        nll.append(functional.cross_entropy(logits[row, position], batch.input_ids[row, position]))
    verdicts = electra.discriminator(corrupted, batch.attention_mask)[batch.attention_mask]
    truth = (corrupted != batch.input_ids)[batch.attention_mask].float()
    torch.testing.assert_close(losses["generator"].mean(), torch.stack(nll).mean())
    torch.testing.assert_close(
        losses["discriminator"].mean(), functional.binary_cross_entropy_with_logits(verdicts, truth)
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_pieces_of_a_batch_have_the_gradients_of_the_whole(make_pair, make_batch, settings, objective):
    batch = make_batch(rows=6, lengths=[16, 3, 9, 16, 5, 12])

    def gradients(cuts: list[slice]) -> list[torch.Tensor]:
        electra = make_pair(objective=objective)
        pieces = [
            Batch(batch.input_ids[rows], batch.step, batch.row_ids[rows], batch.attention_mask[rows]) for rows in cuts
        ]
        losses = [OBJECTIVES[objective].losses(electra, piece, settings) for piece in pieces]
        counts = OBJECTIVES[objective].counts(batch, settings)
        for piece in losses:
            total(piece, counts).backward()
        return [parameter.grad for parameter in electra.parameters() if parameter.grad is not None]

    whole, split = gradients([slice(0, 6)]), gradients([slice(0, 1), slice(1, 6)])
    assert len(whole) == len(split) > 0
    torch.testing.assert_close(whole, split)


def logits_for_sampling(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([2.3, 1.1, 0.0, 0.7, 0.4, -0.5]).to(dtype).expand(rows, 3, 6)


def draw(rows: int, settings: Settings, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    batch = Batch(torch.empty(rows, 8), torch.tensor(0), torch.arange(rows))
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(rows, 3, dtype=torch.long), torch.ones(rows, 3))
    return sample(logits_for_sampling(rows, dtype), masked, batch, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(dtype, temperature):
    settings = Settings(temperature=temperature)
    counts = draw(20_000, settings, dtype).flatten().bincount(minlength=6)
    softmax = (logits_for_sampling(1, dtype)[0, 0].double() / temperature).softmax(0)
    assert stats.chisquare(counts, softmax * counts.sum()).pvalue > 0.001
    other = (logits_for_sampling(1, dtype)[0, 0].double() / temperature * 1.05).softmax(0)
    assert stats.chisquare(counts, other * counts.sum()).pvalue < 1e-6  # the test tells 5 % apart


def test_disallow_correct_never_samples_the_original_and_keeps_the_odds_of_the_rest():
    counts = draw(20_000, Settings(disallow_correct=True)).flatten().bincount(minlength=6)
    assert counts[0] == 0
    softmax = logits_for_sampling(1, torch.float32)[0, 0, 1:].double().softmax(0)
    assert stats.chisquare(counts[1:], softmax * counts.sum()).pvalue > 0.001


def test_samples_follow_the_softmax_over_a_vocabulary_of_several_blocks():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    rows = torch.arange(40_000)
    batch = Batch(torch.empty(len(rows), 8), torch.tensor(0), rows)
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(len(rows), 1).long(), torch.ones(len(rows), 1))
    counts = sample(logits.expand(len(rows), 1, -1), masked, batch, Settings()).flatten().bincount(minlength=300)
    assert len(counts) == 300
    assert stats.chisquare(counts, logits.double().softmax(0) * counts.sum()).pvalue > 0.001


def test_samples_at_different_slots_are_independent():
    sampled = draw(20_000, Settings())
    table = torch.zeros(6, 6).index_put((sampled[:, 0], sampled[:, 1]), torch.ones(20_000), accumulate=True)
    assert stats.chi2_contingency(table[:4, :4] + 1).pvalue > 0.001


def test_samples_do_not_change_when_the_batch_is_split():
    whole = draw(10, Settings())
    batch = Batch(torch.empty(3, 8), torch.tensor(0), torch.arange(7, 10))
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(3, 3, dtype=torch.long), torch.ones(3, 3))
    assert torch.equal(sample(logits_for_sampling(3, torch.float32), masked, batch, Settings()), whole[7:])


def test_documents_in_a_row_do_not_change_each_others_losses(make_pair, make_batch, settings):
    electra, batch = make_pair().eval(), make_batch(rows=1)
    documents = (torch.arange(16)[None] >= 8).long()
    masked = mask(batch, settings.vocabulary, settings, 0)
    packed = electra.discriminator(masked.input_ids, None, None, documents)
    alone = electra.discriminator(masked.input_ids[:, :8])
    torch.testing.assert_close(packed[:, :8], alone)
    losses = replaced_token_detection(electra, replace(batch, document_ids=documents), settings)
    assert losses["discriminator"].mean() != replaced_token_detection(electra, batch, settings)["discriminator"].mean()


def test_mlm_trains_a_generator_that_is_alone(make_pair, make_batch, settings):
    electra = make_pair("none")
    electra.discriminator = None
    losses = masked_language_modeling(electra, make_batch(), settings)
    assert list(losses) == ["generator"]
    assert losses["generator"].mean().item() == pytest.approx(torch.tensor(60.0).log().item(), abs=0.3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_is_one_graph_for_the_compiler(make_pair, make_batch, settings, objective):
    electra = make_pair(objective=objective)

    def loss(input_ids, step, rows, attention_mask):
        batch = Batch(input_ids, step, rows, attention_mask, is_continuation=input_ids % 3 == 0)
        return total(OBJECTIVES[objective].losses(electra, batch, settings))

    settings = replace(settings, mask_count="paper", whole_word_masking=True)
    batch = make_batch(lengths=[16, 12, 7, 3])
    inputs = (batch.input_ids, batch.step, batch.row_ids, batch.attention_mask)
    traced = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(*inputs), loss(*inputs))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_learns_a_batch_by_heart(make_pair, make_batch, settings, objective):
    electra, batch = make_pair(objective=objective), make_batch()
    optimizer = torch.optim.AdamW(electra.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = total(OBJECTIVES[objective].losses(electra, batch, settings))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) < losses[0] / 2  # who learns against another may lose again


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_vocabulary_of_another_size_than_the_models_is_refused(make_pair, make_batch, objective):
    with pytest.raises(ConfigError, match="a vocabulary of 30,522 entries but the model one of 60; give Settings"):
        OBJECTIVES[objective].losses(make_pair(objective=objective), make_batch(), Settings())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mask_id": 60}, "mask_id 60 is not in the vocabulary of 60 entries"),
        ({"pad_id": -1}, "pad_id -1 is not in the vocabulary of 60 entries"),
        ({"is_continuation": (True, False)}, "is_continuation tells of 2 ids, not of 60"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(vocabulary, wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(vocabulary, **wrong)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"discriminator_weight": -1}, "discriminator_weight is -1"),
        ({"entropy_bonus": -1}, "entropy_bonus is -1"),
    ],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Settings(**wrong)


def test_electra_15_ignores_what_was_not_masked(make_pair, make_batch, settings):
    electra, batch = make_pair("none").eval(), make_batch()
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    seen = []
    electra.discriminator.register_forward_hook(lambda module, inputs, verdicts: seen.append(verdicts))
    loss = electra_15(electra, batch, settings)["discriminator"]
    seen[0].retain_grad()
    loss.mean().backward()
    is_asked = torch.zeros(4, 16).scatter(1, masked.positions, masked.weights).bool()
    assert loss.count == is_asked.sum() == masked.weights.sum()
    assert torch.equal(seen[0].grad != 0, is_asked)


@pytest.mark.parametrize("objective", ["replace-mlm", "all-tokens-mlm"])
def test_a_corrector_reads_no_mask(make_pair, make_batch, settings, objective):
    electra, batch = make_pair(objective=objective), make_batch()
    with torch.no_grad():
        electra.generator.head.bias[settings.vocabulary.mask_id] = -100  # it never says [MASK]
    read = []
    electra.discriminator.encoder.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    OBJECTIVES[objective].losses(electra, batch, settings)
    assert (read[0] != batch.input_ids).any()
    assert not (read[0] == settings.vocabulary.mask_id).any()


def test_replace_mlm_predicts_the_originals_behind_the_fills(make_pair, make_batch, settings):
    electra, batch = make_pair(objective="replace-mlm").eval(), make_batch(lengths=[16, 12, 7, 3])
    loss = replace_mlm(electra, batch, settings)["replace_mlm"]
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    filled = fill(electra, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, filled.sampled).input_ids
    logs = electra.discriminator(corrupted, batch.attention_mask).log_softmax(2)  # [B, L, V]
    is_used = torch.zeros(4, 16).scatter(1, masked.positions, masked.weights).bool()
    expected = -logs.gather(2, batch.input_ids[:, :, None]).squeeze(2)[is_used].mean()
    torch.testing.assert_close(loss.mean(), expected)


def copying_corrector(make_pair, gate: float) -> CopyMaskedLanguageModel:
    corrector = make_pair(objective="all-tokens-mlm").discriminator
    with torch.no_grad():
        corrector.gate.dense.bias.fill_(gate)
    return corrector


@pytest.mark.parametrize("gate", [-3.0, 0.0, 3.0])
def test_the_copy_gates_distribution_sums_to_one(make_pair, make_batch, gate):
    corrector, text = copying_corrector(make_pair, gate), make_batch().input_ids
    logs = corrector.log_probabilities(corrector.read(text), text)  # [B, L, V]
    torch.testing.assert_close(logs.exp().sum(2), torch.ones(4, 16))


def test_at_gate_one_the_token_is_copied_and_at_gate_zero_the_softmax_speaks(make_pair, make_batch):
    text = make_batch().input_ids
    open_gate, closed = (copying_corrector(make_pair, gate) for gate in (100.0, -100.0))
    copied = open_gate.log_probabilities(open_gate.read(text), text).exp()
    torch.testing.assert_close(copied, functional.one_hot(text, 60).float())
    torch.testing.assert_close(
        closed.log_probabilities(closed.read(text), text), closed(text).log_softmax(2), rtol=1e-4, atol=1e-4
    )


def test_likelihoods_in_chunks_equal_those_of_the_whole_distribution(make_pair, make_batch, monkeypatch):
    corrector, batch = copying_corrector(make_pair, 1.0), make_batch()
    hidden = corrector.read(batch.input_ids)
    read = batch.input_ids.roll(1, dims=1)
    expected = corrector.log_probabilities(hidden, read).gather(2, batch.input_ids[:, :, None]).squeeze(2)
    for chunk in (7, 4096):
        monkeypatch.setattr("electra.model.electra.CHUNK_SIZE", chunk)
        torch.testing.assert_close(corrector.log_likelihood(hidden, read, batch.input_ids), expected)


def test_all_tokens_mlm_is_the_mean_over_all_tokens_that_are_not_padding(make_pair, make_batch, settings):
    electra, batch = make_pair(objective="all-tokens-mlm").eval(), make_batch(lengths=[16, 12, 7, 3])
    loss = all_tokens_mlm(electra, batch, settings)["all_tokens_mlm"]
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    corrupted = corrupt(batch.input_ids, masked, fill(electra, masked, batch, settings).sampled).input_ids
    hidden = electra.discriminator.read(corrupted, batch.attention_mask)
    logs = electra.discriminator.log_probabilities(hidden, corrupted).gather(2, batch.input_ids[:, :, None]).squeeze(2)
    assert loss.count == 16 + 12 + 7 + 3
    torch.testing.assert_close(loss.mean(), -logs[batch.attention_mask].mean())


@pytest.mark.parametrize("sharing", ["none", "disentangled"])
def test_a_corrector_speaks_with_the_table_it_reads_with(make_pair, sharing):
    corrector, text = make_pair(sharing, objective="replace-mlm").discriminator.eval(), torch.tensor([[2, 11, 12, 3]])
    before = corrector(text)
    with torch.no_grad():
        embeddings = corrector.encoder.embeddings
        table = (embeddings.base or embeddings).token.weight
        table[40] += 3  # a token that is not in the text
    assert (corrector(text) != before).any(0).any(0).nonzero().flatten().tolist() == [40]


REWARDS = torch.tensor([0.3, 2.0, 0.1, 1.2, 0.7])


def exact_policy_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Of the expected reward over a vocabulary of five, by enumeration."""
    logits = logits.clone().requires_grad_()
    (logits.softmax(0) * REWARDS).sum().backward()
    return logits.grad


def test_the_policy_gradient_over_all_samples_is_the_exact_one_whatever_the_baseline():
    logits = torch.tensor([0.5, -1.0, 0.2, 1.3, 0.0])
    for baseline in (0.0, 0.9):
        own = logits.clone().requires_grad_()
        for token, probability in enumerate(logits.softmax(0)):
            masked = masked_at([0], [0], [1.0])
            sampled, advantage = torch.tensor([[token]]), (REWARDS[token] - baseline).view(1, 1)
            loss = policy_loss(own[None, None], sampled, advantage, masked, Settings())
            (probability * loss.mean()).backward()
        torch.testing.assert_close(-own.grad, exact_policy_gradient(logits))


def test_the_policy_gradient_of_drawn_samples_agrees_with_the_exact_one():
    rows = 40_000
    logits = torch.tensor([0.5, -1.0, 0.2, 1.3, 0.0], requires_grad=True)
    batch = Batch(torch.empty(rows, 8), torch.tensor(0), torch.arange(rows))
    masked = Masked(torch.empty(0), torch.empty(0), torch.zeros(rows, 1).long(), torch.ones(rows, 1))
    guesses = logits.expand(rows, 1, -1)
    sampled = sample(guesses, masked, batch, Settings())
    policy_loss(guesses, sampled, REWARDS[sampled] - 0.9, masked, Settings()).mean().backward()
    torch.testing.assert_close(-logits.grad, exact_policy_gradient(logits.detach()), rtol=0, atol=0.01)


def test_the_entropy_bonus_pays_for_entropy():
    logits = torch.tensor([[[2.0, 0.0, 0.0, 0.0, -1.0]]], requires_grad=True)
    sampled, masked = torch.tensor([[0]]), masked_at([0], [0], [1.0])
    policy_loss(logits, sampled, torch.zeros(1, 1), masked, Settings(entropy_bonus=0.5)).mean().backward()
    after = (logits - 0.1 * logits.grad).softmax(2)
    assert stats.entropy(after.detach().flatten()) > stats.entropy(logits.detach().softmax(2).flatten())


def test_the_generator_is_paid_the_discriminators_loss_at_the_fill_beyond_what_was_foretold(
    make_pair, make_batch, settings
):
    electra, batch = make_pair("none", objective="adversarial").eval(), make_batch()
    with torch.no_grad():
        electra.discriminator.head.classifier.weight.zero_()
        electra.discriminator.head.classifier.bias.fill_(-2.0)  # sure that all is original
        electra.baseline.dense.weight.zero_()
        electra.baseline.dense.bias.fill_(-1.0)
    losses = adversarial(electra, batch, settings)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    guesses = electra.generator(masked.input_ids, at=masked.positions)
    sampled = sample(guesses, masked, batch, settings)
    is_fooled = (sampled != masked.originals).float()
    rewards = is_fooled * functional.softplus(torch.tensor(2.0)) + (1 - is_fooled) * functional.softplus(
        torch.tensor(-2.0)
    )
    chosen = guesses.log_softmax(2).gather(2, sampled[:, :, None]).squeeze(2)
    expected = -((rewards - functional.softplus(torch.tensor(1.0))) * chosen * masked.weights).sum()
    torch.testing.assert_close(losses["generator"].sum, expected)


def test_a_baseline_learns_minus_the_log_of_how_often_the_discriminator_is_right():
    foretold = torch.zeros(1, 1, requires_grad=True)
    rewards = -torch.tensor([0.9, 0.5]).log()
    for _ in range(500):
        loss = sum(baseline_loss(foretold, reward.view(1, 1), masked_at([0], [0], [1.0])).mean() for reward in rewards)
        (gradient,) = torch.autograd.grad(loss, foretold)
        foretold = (foretold - gradient).detach().requires_grad_()
    assert foretold.sigmoid().item() == pytest.approx(0.7, abs=1e-3)


def test_adversarial_losses_each_reach_their_own_part(make_pair, make_batch, settings):
    moved = {}
    for name in ("generator", "baseline", "discriminator"):
        electra = make_pair("none", objective="adversarial")
        adversarial(electra, make_batch(), settings)[name].mean().backward()
        moved[name] = {path.split(".")[0] for path, weight in electra.named_parameters() if weight.grad is not None}
    assert moved == {name: {name} for name in moved}


def test_a_frozen_generator_gets_no_gradient(make_pair, make_batch, settings):
    electra = make_pair("none", objective="frozen-rtd")
    losses = frozen_generator_detection(electra, make_batch(), settings)
    total(losses).backward()
    assert list(losses) == ["discriminator"]
    assert all(weight.grad is None for weight in electra.generator.parameters())
    assert all(weight.grad is not None for weight in electra.discriminator.parameters())


@pytest.mark.parametrize("objective", ["rtd", "electra-15", "replace-mlm", "all-tokens-mlm"])
def test_fills_may_be_drawn_by_frequency_without_a_generator(make_pair, make_batch, settings, objective):
    electra, batch = make_pair("none", objective=objective), make_batch(rows=200)
    electra.generator = None
    frequencies = torch.zeros(60)
    frequencies[[10, 20]] = torch.tensor([0.25, 0.75])
    read = []
    electra.discriminator.encoder.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    losses = OBJECTIVES[objective].losses(electra, batch, replace(settings, frequencies=frequencies))
    replaced = read[0][read[0] != batch.input_ids]
    assert len(losses) == 1
    assert set(replaced.tolist()) == {10, 20}
    assert (replaced == 20).float().mean().item() == pytest.approx(0.75, abs=0.06)


@pytest.mark.parametrize("sharing", ["none", "disentangled"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_modern_pair_learns_by_every_objective(make_pair, make_batch, settings, objective, sharing):
    electra, batch = make_pair(sharing, size=MODERN, objective=objective), make_batch()
    optimizer, seen = torch.optim.AdamW(electra.parameters(), lr=1e-2), []
    for _ in range(10):
        losses = OBJECTIVES[objective].losses(electra, batch, settings)
        seen.append(losses[list(losses)[-1]].mean().item())  # the loss of who reads last
        optimizer.zero_grad()
        total(losses).backward()
        optimizer.step()
    assert seen[-1] < 0.9 * seen[0]
