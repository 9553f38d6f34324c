"""A model beside its baselines."""

import pytest

from electra.serving.comparison import BaselineComparison, describe_comparisons


@pytest.mark.parametrize(
    ("model", "higher_is_better", "is_better"), [(0.9, True, True), (0.7, True, False), (0.4, False, True)]
)
def test_a_model_is_compared_with_the_best_baseline(model, higher_is_better, is_better):
    comparison = BaselineComparison("AUC", 2, {"guessing": 0.5, "bigram counts": 0.8}, model, higher_is_better)
    assert comparison.is_better() == is_better
    verdict = describe_comparisons([comparison], has_before=False)[-1]
    assert verdict.startswith("Better than all" if is_better else "Not better than all baselines: AUC")


def test_a_table_has_a_column_for_each_baseline_and_for_the_model_before_and_after():
    auc = BaselineComparison("AUC", 3, {"guessing": 0.5, "bigram counts": 0.85}, 0.9, True, before=0.875)
    loss = BaselineComparison("loss", 2, {"guessing": 9.01, "token frequencies": 6.0}, 4.5, False)
    lines = [line.split("  ") for line in describe_comparisons([auc, loss], has_before=True)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines[:3]]
    assert cells == [
        ["guessing", "token frequencies", "bigram counts", "before", "model"],
        ["AUC", "0.500", "–", "0.850", "0.875", "0.900"],
        ["loss", "9.01", "6.00", "–", "–", "4.50"],
    ]
