"""Measures on held-out text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, precision_score, recall_score, roc_auc_score

from electra.objectives.evaluation import SEED, Verdicts, auc, frozen_fills, held_out_loss, measure
from electra.objectives.losses import total
from electra.objectives.objectives import OBJECTIVES, Corrupted, Settings

VERDICTS = st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=60)


@given(VERDICTS)
def test_measures_of_verdicts_equal_scikit_learns(rows):
    logits = torch.tensor([float(logit) / 2 for logit, _ in rows])[None]
    truth = torch.tensor([is_replaced for _, is_replaced in rows])[None]
    verdicts = Verdicts()
    verdicts.add(logits, Corrupted(torch.empty(0), truth), None)
    found, y, said = verdicts.measures("x"), truth[0].numpy(), (logits[0] > 0).numpy()
    assert found["x_loss"] == pytest.approx(log_loss(y, logits[0].double().sigmoid().numpy(), labels=[False, True]))
    assert found["x_accuracy"] == pytest.approx((y == said).mean())
    assert found["x_precision"] == pytest.approx(precision_score(y, said, zero_division=0))
    assert found["x_recall"] == pytest.approx(recall_score(y, said, zero_division=0))
    if 0 < y.sum() < len(y):
        assert found["x_auc"] == pytest.approx(roc_auc_score(y, logits[0].numpy()))


def test_auc_of_one_kind_only_says_nothing():
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) == 0.5


def test_padding_is_not_measured():
    verdicts = Verdicts()
    truth = torch.tensor([[True, False, True]])
    verdicts.add(torch.tensor([[3.0, -3.0, -9.0]]), Corrupted(torch.empty(0), truth), torch.tensor([[1, 1, 0]]))
    assert verdicts.measures("x")["x_accuracy"] == 1.0


def test_frozen_replacements_are_the_same_for_every_generator_and_follow_the_unigram(make_batch, vocabulary):
    unigram = torch.zeros(60)
    unigram[[10, 20]] = torch.tensor([0.25, 0.75])
    batch = make_batch(rows=400)
    settings = Settings(vocabulary=vocabulary, seed=1)
    corrupted = frozen_fills(batch, settings, unigram).corrupted
    replaced = corrupted.input_ids[corrupted.is_replaced]
    assert set(replaced.unique().tolist()) == {10, 20}
    assert (replaced == 20).float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert torch.equal(corrupted.input_ids, frozen_fills(batch, settings, unigram).corrupted.input_ids)


def test_a_pair_is_measured_whole_and_a_lone_part_as_far_as_it_goes(make_pair, make_batch, vocabulary):
    unigram = torch.full((60,), 1 / 60)
    electra, batches = make_pair("none").eval(), [make_batch()]
    whole = measure(electra, batches, unigram, vocabulary)
    assert {"mlm_loss", "mlm_accuracy", "sample_accuracy", "generator_entropy", "rtd_auc", "unigram_rtd_auc"} <= set(
        whole
    )
    assert whole["generator_entropy"] == pytest.approx(torch.tensor(60.0).log().item(), abs=0.2)
    electra.discriminator = None
    assert set(measure(electra, batches, unigram, vocabulary)) == {
        *("mlm_loss", "mlm_accuracy", "sample_accuracy", "generator_entropy")
    }


def test_measures_do_not_change_from_one_time_to_the_next(make_pair, make_batch, vocabulary):
    electra = make_pair().eval()
    first, second = (measure(electra, [make_batch()], torch.full((60,), 1 / 60), vocabulary) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "is_drawn"),
    [
        (name, is_drawn)
        for name in OBJECTIVES
        for is_drawn in (False, True)
        if not (is_drawn and OBJECTIVES[name].needs_generator)
    ],
)
def test_the_held_out_loss_is_the_objectives_own_by_the_runs_settings(
    make_pair, make_batch, vocabulary, name, is_drawn
):
    electra, batch = make_pair("none", objective=name).eval(), make_batch(lengths=[16, 16, 9, 12])
    own = {"mask_fraction": 0.3, "discriminator_weight": 7.0, "frequencies": torch.eye(60)[10] if is_drawn else None}
    settings = Settings(vocabulary=vocabulary, **own)
    trained = OBJECTIVES["rtd" if name == "adversarial" else name]  # of a policy, its MLM loss is taken
    expected = total(trained.losses(electra, batch, replace(settings, seed=SEED))).item()
    for seed in (1, 2):
        found = held_out_loss(name, electra, [batch], replace(settings, seed=seed))
        assert found == pytest.approx(expected, rel=1e-6)


def test_every_held_out_token_counts_alike_whatever_its_batch(make_pair, make_batch, vocabulary):
    electra, batch = make_pair().eval(), make_batch(lengths=[16, 16, 7, 7])
    settings = Settings(vocabulary=vocabulary)
    cut, whole = (held_out_loss("rtd", electra, batches, settings) for batches in (batch.micro_batches(2), [batch]))
    assert cut == pytest.approx(whole, rel=1e-5)
