"""Metrics: by hand on a few numbers, and equal to scikit-learn's and scipy's on any."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from electra.finetuning.metrics import (
    METRICS,
    accuracy,
    exact_match,
    f1,
    macro_f1,
    matthews,
    micro_f1,
    pearson,
    spearman,
)


def test_one_of_two_duplicates_is_found_and_one_is_false():
    predicted, truth = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
    assert (accuracy(predicted, truth), f1(predicted, truth), matthews(predicted, truth)) == (0.5, 0.5, 0.0)


def test_several_labels_count_cell_by_cell_or_row_by_row():
    predicted, truth = np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]])
    assert micro_f1(predicted, truth) == 0.8
    assert exact_match(predicted, truth) == 0.5


def test_spearman_sees_order_only():
    scores = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(scores, scores**5) == pytest.approx(1)
    assert pearson(scores, scores**5) < 0.95
    ties = spearman(np.array([7, 7, 8, 9]), scores)  # ranks 1.5 1.5 3 4
    assert ties == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("predicted", [[3.0], [2.0, 2.0, 2.0], [0.1, 0.1, 0.1], [1.0, math.nan, 2.0]])
def test_a_correlation_that_is_not_defined_is_nan(name, predicted):
    truth = np.arange(len(predicted), dtype=np.float32)
    assert math.isnan(METRICS[name](np.array(predicted, np.float32), truth))
    assert math.isnan(METRICS[name](truth, np.array(predicted, np.float32)))


def peer(metric, *given, **settings) -> float:
    """What the other library says, without its warnings on undefined cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return metric(*given, **settings)


def pairs(elements, least: int = 1):
    """Two arrays of one length, long enough for ties and short enough for constants."""
    lengths = st.integers(least, 12)
    return lengths.flatmap(lambda n: st.tuples(*[st.lists(elements, min_size=n, max_size=n).map(np.array)] * 2))


@given(pairs(st.integers(0, 1)))
def test_two_classes_agree_with_scikit_learn(pair):
    predicted, truth = pair
    assert f1(predicted, truth) == pytest.approx(peer(sklearn.metrics.f1_score, truth, predicted, zero_division=0))


@given(pairs(st.integers(0, 3)))
def test_more_classes_agree_with_scikit_learn(pair):
    predicted, truth = pair
    macro = peer(sklearn.metrics.f1_score, truth, predicted, average="macro", zero_division=0)
    assert accuracy(predicted, truth) == pytest.approx(sklearn.metrics.accuracy_score(truth, predicted))
    assert macro_f1(predicted, truth) == pytest.approx(macro)
    assert matthews(predicted, truth) == pytest.approx(peer(sklearn.metrics.matthews_corrcoef, truth, predicted))


@given(st.tuples(*[arrays.arrays(np.int64, (5, 3), elements=st.integers(0, 1))] * 2))
def test_several_labels_agree_with_scikit_learn(pair):
    predicted, truth = pair
    micro = peer(sklearn.metrics.f1_score, truth, predicted, average="micro", zero_division=0)
    assert micro_f1(predicted, truth) == pytest.approx(micro)
    assert exact_match(predicted, truth) == pytest.approx(sklearn.metrics.accuracy_score(truth, predicted))


SCORES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, width=16))


@given(st.one_of(pairs(SCORES, least=2), pairs(SCORES | st.just(math.nan), least=2)))
def test_correlations_agree_with_scipy(pair):
    for ours, theirs in ((pearson, scipy.stats.pearsonr), (spearman, scipy.stats.spearmanr)):
        assert ours(*pair) == pytest.approx(peer(theirs, *pair).statistic, abs=1e-9, nan_ok=True)
