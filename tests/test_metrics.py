"""Metrics: checked by hand on a few numbers, and equal to those of scikit-learn and scipy on random ones."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from electra.finetuning.features import Outputs
from electra.finetuning.kinds import KINDS
from electra.finetuning.metrics import (
    METRICS,
    Mistake,
    accuracy,
    class_scores,
    confusion_matrix,
    exact_match,
    f1,
    format_mistakes,
    macro_f1,
    matthews,
    median,
    most_frequent_label,
    pearson,
    spearman,
    standard_deviation,
)
from electra.finetuning.tasks import Examples, Task


def test_one_true_positive_one_false_positive_and_one_false_negative():
    predicted, labels = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
    assert (accuracy(predicted, labels), f1(predicted, labels), matthews(predicted, labels)) == (0.5, 0.5, 0.0)


def test_multi_label_metrics_count_cells_or_whole_rows():
    predicted, labels = np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]])
    assert METRICS["micro_f1"](predicted, labels) == 0.8
    assert exact_match(predicted, labels) == 0.5


def test_the_best_prediction_without_a_text_is_the_most_frequent_class_or_the_mean():
    assert most_frequent_label(np.array([0, 2, 2])) == 2
    assert most_frequent_label(np.array([[0, 1], [1, 1]], np.float32)).tolist() == [0, 1]
    assert most_frequent_label(np.array([1.0, 2.0])) == 1.5


def test_errors_of_scores():
    predicted, labels = np.array([1.0, 5.0]), np.array([2.0, 2.0])
    assert METRICS["mae"](predicted, labels) == 2
    assert METRICS["rmse"](predicted, labels) == pytest.approx(5**0.5)


def test_the_confusion_matrix_has_labels_in_rows_and_predictions_in_columns():
    counts = confusion_matrix(np.array([1, 1, 2]), np.array([0, 1, 2]), 3)
    assert counts.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.5, math.nan, 0.75], 0.5), ([math.nan, 0.5, 0.75], 0.5), ([0.25, 0.75], 0.5), ([math.nan, 1.0], math.nan)],
)
def test_nan_ranks_below_all_numbers_in_a_median(values, expected):
    assert median(values) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(standard_deviation(values)) == any(map(math.isnan, values))


def test_spearman_depends_on_ranks_only():
    scores = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(scores, scores**5) == pytest.approx(1)
    assert pearson(scores, scores**5) < 0.95
    ties = spearman(np.array([7, 7, 8, 9]), scores)  # ranks 1.5 1.5 3 4
    assert ties == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("predicted", [[3.0], [2.0, 2.0, 2.0], [0.1, 0.1, 0.1], [1.0, math.nan, 2.0]])
def test_an_undefined_correlation_is_nan(name, predicted):
    labels = np.arange(len(predicted), dtype=np.float32)
    assert math.isnan(METRICS[name](np.array(predicted, np.float32), labels))
    assert math.isnan(METRICS[name](labels, np.array(predicted, np.float32)))


def expected(metric, *arguments, **options):
    """The other library's value, without its warnings on undefined cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return metric(*arguments, **options)


def pairs(elements, min_length: int = 1):
    """Two arrays of equal length, long enough for ties and short enough to be constant at times."""
    lengths = st.integers(min_length, 12)
    return lengths.flatmap(lambda n: st.tuples(*[st.lists(elements, min_size=n, max_size=n).map(np.array)] * 2))


@settings(max_examples=40)
@given(pairs(st.integers(0, 1)))
def test_binary_f1_agrees_with_scikit_learn(pair):
    predicted, labels = pair
    assert f1(predicted, labels) == pytest.approx(
        expected(sklearn.metrics.f1_score, labels, predicted, zero_division=0)
    )


@settings(max_examples=40)
@given(pairs(st.integers(0, 3)))
def test_multi_class_metrics_agree_with_scikit_learn(pair):
    predicted, labels = pair
    macro = expected(sklearn.metrics.f1_score, labels, predicted, average="macro", zero_division=0)
    assert accuracy(predicted, labels) == pytest.approx(sklearn.metrics.accuracy_score(labels, predicted))
    assert macro_f1(predicted, labels) == pytest.approx(macro)
    assert matthews(predicted, labels) == pytest.approx(expected(sklearn.metrics.matthews_corrcoef, labels, predicted))


@settings(max_examples=40)
@given(st.tuples(*[arrays.arrays(np.int64, (5, 3), elements=st.integers(0, 1))] * 2))
def test_multi_label_metrics_agree_with_scikit_learn(pair):
    predicted, labels = pair
    micro = expected(sklearn.metrics.f1_score, labels, predicted, average="micro", zero_division=0)
    assert METRICS["micro_f1"](predicted, labels) == pytest.approx(micro)
    scores = class_scores(predicted, labels, ["a", "b", "c"])
    theirs = sklearn.metrics.precision_recall_fscore_support(labels, predicted, zero_division=0)
    assert [tuple(each.values()) for each in scores.values()] == [
        pytest.approx(each) for each in zip(*theirs, strict=True)
    ]
    assert exact_match(predicted, labels) == pytest.approx(sklearn.metrics.accuracy_score(labels, predicted))


SCORES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, width=16))


@given(st.one_of(pairs(SCORES, min_length=2), pairs(SCORES | st.just(math.nan), min_length=2)))
def test_correlations_agree_with_scipy(pair):
    for ours, theirs in ((pearson, scipy.stats.pearsonr), (spearman, scipy.stats.spearmanr)):
        assert ours(*pair) == pytest.approx(expected(theirs, *pair).statistic, abs=1e-9, nan_ok=True)


def test_the_page_of_mistakes_starts_with_the_most_confident():
    mistakes = [Mistake(0.2, "b", "a", "x | y\nz"), Mistake(0.9, "a", "b", "w" * 600)] * 30
    title, _, _, _, first, *_, last = format_mistakes(mistakes, "cola").splitlines()
    assert title == "# The 50 most confident of 60 mistakes on the dev rows of cola"
    assert first == f"| 0.900 | a | b | {'w' * 500} |"
    assert last == "| 0.200 | b | a | x \\| y z |"


def test_rows_of_another_class_are_mistakes_with_its_probability():
    fields = {"text": "text", "label": "label", "metrics": ("accuracy",), "splits": {}}
    task = Task(name="x", kind="classification", labels=("no", "yes"), **fields)
    examples = Examples(texts=["one", "two", "three"], texts_b=["1", "2", "3"])
    logits = np.log(np.array([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]], np.float32))
    kind, labels = KINDS["classification"], np.array([0, 1, 0])
    outputs = Outputs(logits, examples=examples)
    [mistake] = kind.mistakes(task, outputs, kind.predict(outputs, task), labels)
    assert mistake == Mistake(pytest.approx(0.75), "no", "yes", "two / 2")
