"""Estimators for scikit-learn: its own checks, and what its other checks do with numbers, done with texts."""

import pickle
import random

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks
from synthetic import ANIMALS, sentence

import electra
from electra.sklearn import ElectraClassifier, ElectraVectorizer

GENERATOR = random.Random(0)
TEXTS = [sentence(GENERATOR) for _ in range(96)]
LABELS = np.array([ANIMALS.index(text.split()[2]) for text in TEXTS])
QUICK = {"epochs": 6, "batch_size": 16, "learning_rate": 1e-2, "length": 16, "layer_decay": 1.0, "dropout": 0.0}
QUICK["random_state"] = 1
CHECKS = (  # those of scikit-learn that are not about arrays of numbers
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_mixin_order",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
)


@pytest.fixture
def make_classifier(encoder_folder):
    return lambda **settings: ElectraClassifier(encoder_folder, device="cpu", **QUICK | settings)


@pytest.fixture
def vectorizer(encoder_folder):
    return ElectraVectorizer(encoder_folder, device="cpu")


@pytest.fixture(scope="module")
def fitted(encoder_folder):
    return ElectraClassifier(encoder_folder, device="cpu", **QUICK).fit(TEXTS, LABELS)


@pytest.mark.parametrize("estimator", [ElectraClassifier(), ElectraVectorizer()])
def test_estimators_pass_the_checks_of_scikit_learn(estimator):
    with pytest.warns(SkipTestWarning, match="requires input"):  # by their tags, they take texts and no numbers
        estimator_checks.check_estimator(estimator)
    for name in CHECKS:
        getattr(estimator_checks, name)(type(estimator).__name__, clone(estimator))


def test_the_classifier_learns_and_its_probabilities_add_up_to_one(fitted):
    assert fitted.score(TEXTS, LABELS) > 0.95
    probabilities = fitted.predict_proba(TEXTS)
    assert probabilities.shape == (96, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (fitted.classes_[probabilities.argmax(1)] == fitted.predict(TEXTS)).all()


@pytest.mark.parametrize("names", [list(ANIMALS), [-1.0, 0.0, 7.0], [False, True, True]])
def test_predictions_are_classes_of_y(make_classifier, names):
    y = np.array(names)[LABELS]
    predicted = make_classifier(epochs=1).fit(np.array(TEXTS), y).predict(pd.Series(TEXTS))
    assert predicted.dtype == y.dtype
    assert set(predicted) <= set(y)


def test_fitting_again_and_a_pickle_give_the_same_probabilities(fitted, make_classifier):
    expected = fitted.predict_proba(TEXTS)
    again = make_classifier().fit(TEXTS, LABELS)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(TEXTS), expected)
    assert (make_classifier(random_state=2).fit(TEXTS, LABELS).predict_proba(TEXTS) != expected).any()


def test_samples_do_not_depend_on_those_beside_them(fitted, vectorizer):
    order = np.random.default_rng(0).permutation(len(TEXTS))
    shuffled = [TEXTS[index] for index in order]
    for function in (fitted.predict_proba, vectorizer.fit(TEXTS).transform):
        expected = function(TEXTS)
        np.testing.assert_allclose(function(shuffled), expected[order], atol=1e-5)
        np.testing.assert_allclose(np.concatenate([function([text]) for text in TEXTS[:5]]), expected[:5], atol=1e-5)


def test_fitting_and_predicting_change_no_parameters(fitted, make_classifier):
    assert fitted.get_params() == make_classifier().get_params()
    before = dict(vars(fitted))
    fitted.predict(TEXTS[:2])
    assert vars(fitted) == before


@pytest.mark.parametrize("class_weight", ["balanced", {0: 5.0, 1: 0.0, 2: 0.0}])
def test_class_weights_change_what_is_learnt(make_classifier, class_weight):
    predicted = make_classifier(class_weight=class_weight).fit(TEXTS, LABELS).predict(TEXTS)
    assert (predicted == LABELS).mean() > 0.95 if class_weight == "balanced" else set(predicted) == {0}


def test_the_vectorizer_embeds(vectorizer, encoder_folder):
    vectors = vectorizer.fit_transform(TEXTS)
    expected = electra.load(encoder_folder, device="cpu").embed(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert vectorizer.get_feature_names_out()[0] == "electravectorizer0"
    assert vectorizer.set_output(transform="pandas").transform(TEXTS[:2]).shape == (2, 24)
    assert (pickle.loads(pickle.dumps(vectorizer)).transform(TEXTS[:2]).to_numpy() == vectors[:2]).all()


def test_estimators_work_in_pipelines_and_grid_searches(vectorizer, make_classifier):
    pipeline = make_pipeline(vectorizer, LogisticRegression(C=100, max_iter=1000))
    grid = {"electravectorizer__pooling": ["cls", "mean"], "electravectorizer__layers": [(-1,), (-1, -2)]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(TEXTS, LABELS)
    assert search.best_score_ > 0.9
    search = GridSearchCV(make_classifier(), {"epochs": [1, 6]}, cv=2, error_score="raise").fit(TEXTS, LABELS)
    assert search.best_params_ == {"epochs": 6}


def test_scores_are_cross_validated_with_string_labels(make_classifier):
    y = np.array(ANIMALS)[LABELS]
    assert cross_val_score(make_classifier(), TEXTS, y, cv=2, error_score="raise").mean() > 0.9


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ("one text", [0], "X must be a list or a column of texts"),
        (np.array([["a"], ["b"]]), [0, 1], "X must be a list or a column of texts"),
        (3, [0], "X must be a list or a column of texts"),
        ([["a"], ["b"]], [0, 1], r"X\[0\] is a list; each sample must be a text"),
        ([], [], "minimum of 1 text"),
        (["a", 1.5], [0, 1], r"X\[1\] is a float; each sample must be a text"),
        (["a", "\ud800"], [0, 1], r"X\[1\] has the lone surrogate '.ud800'"),
        (["a", "b"], None, "requires y to be passed"),
        (["a", "b"], [0], "2 texts and y 1 classes"),
        (["a", "b"], [0, 0], "only one class"),
        (["a", "b"], [0.5, 1.25], "Unknown label type"),
    ],
)
def test_wrong_input_is_a_value_error(make_classifier, X, y, message):
    with pytest.raises(ValueError, match=message):
        make_classifier().fit(X, y)


def test_lone_surrogates_are_refused_by_all_methods(fitted, vectorizer):
    for method in (fitted.predict_proba, fitted.predict, vectorizer.fit, vectorizer.fit(["a"]).transform):
        with pytest.raises(ValueError, match="lone surrogate"):
            method(["a \ud800 b"])


def test_estimators_that_are_not_fitted_say_so(make_classifier, vectorizer):
    for function in (make_classifier().predict, vectorizer.transform):
        with pytest.raises(NotFittedError):
            function(TEXTS)


def test_a_weight_of_no_class_is_an_error(make_classifier):
    with pytest.raises(ValueError, match="class_weight has 'cow'"):
        make_classifier(class_weight={"cow": 1.0}).fit(TEXTS, LABELS)
