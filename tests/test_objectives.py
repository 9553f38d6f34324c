"""The objectives: facts of the paper."""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch.nn import functional

from electra.errors import ConfigError
from electra.objective.losses import Loss, total
from electra.objective.masking import Masked, mask
from electra.objective.objectives import (
    BLOCK,
    OBJECTIVES,
    Corrupted,
    Settings,
    corrupt,
    masked_language_modeling,
    mean_over,
    mlm_loss,
    replaced_token_detection,
    rtd_losses,
    sample,
)
from electra.text.batches import Batch


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
    replaced = replaced_token_detection(electra, batch, replace(settings, right_guess="replaced"))["discriminator"]
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
    result = corrupt(text, masked_at([1, 3], [6, 8], [1, 1]), torch.tensor([[9, 8]]), right_guess="replaced")
    assert result.input_ids.tolist() == [[5, 9, 7, 8]]
    assert result.is_replaced.tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("right_guess", ["original", "replaced"])
def test_an_unused_slot_corrupts_nothing(right_guess):
    text = torch.tensor([[5, 6, 7, 8]])
    result = corrupt(text, masked_at([1, 0], [6, 5], [1, 0]), torch.tensor([[9, 9]]), right_guess)
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
            Batch(batch.input_ids[rows], batch.step, batch.rows[rows], batch.attention_mask[rows]) for rows in cuts
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
    losses = replaced_token_detection(electra, replace(batch, documents=documents), settings)
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
        batch = Batch(input_ids, step, rows, attention_mask, continues_word=input_ids % 3 == 0)
        return total(OBJECTIVES[objective].losses(electra, batch, settings))

    settings = replace(settings, mask_count="paper", whole_words=True)
    batch = make_batch(lengths=[16, 12, 7, 3])
    inputs = (batch.input_ids, batch.step, batch.rows, batch.attention_mask)
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
        ({"continues_word": (True, False)}, "continues_word tells of 2 ids, not of 60"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(vocabulary, wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(vocabulary, **wrong)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"temperature": 0}, "temperature is 0"), ({"discriminator_weight": -1}, "discriminator_weight is -1")],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Settings(**wrong)
