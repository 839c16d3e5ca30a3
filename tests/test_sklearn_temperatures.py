"""Estimators at temperatures far from 1 or on a schedule, and what they say where a fit has not learnt."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification, make_moons
from sklearn.exceptions import ConvergenceWarning

import bitempered.numpy as bt
from bitempered.schedules import anneal, default
from bitempered.sklearn import BiTemperedLogisticRegression, BiTemperedMLPClassifier, network

SMALL = BiTemperedMLPClassifier(hidden_layer_sizes=16, learning_rate_init=0.05, max_iter=20, random_state=0)


def problem(classes):
    X, y = make_classification(300, 8, n_informative=5, n_classes=classes, flip_y=0.2, random_state=0)
    return X, np.array(["b", "a", "d", "c"])[y]


def blobs(classes, seed=0):
    """Training and test examples of overlapping classes, few of each."""
    rng = np.random.default_rng(seed)
    centers = 1.6 * rng.normal(size=(classes, 10))
    y = np.arange(max(400, 40 * classes)) % classes
    X = centers[y] + 1.5 * rng.normal(size=(2, len(y), 10))
    return X[0], X[1], y


@pytest.mark.parametrize(("classes", "t2"), [(2, 4.0), (3, 3.0), (10, 2.0), (10, 3.0), (10, 4.0), (30, 1.5)])
def test_the_default_C_suits_every_temperature(classes, t2):
    X, test, y = blobs(classes)
    logistic = BiTemperedLogisticRegression(1.0, 1.0).fit(X, y).score(test, y)
    # Heavier tails give up some accuracy on blobs, where cross-entropy is the right loss: at most 0.04 here.
    assert BiTemperedLogisticRegression(0.5, t2).fit(X, y).score(test, y) > logistic - 0.06
    assert logistic > 0.65


def test_the_paper_s_loss_collapses_and_a_warning_has_the_names_of_the_classes():
    X, test, y = blobs(10)
    names = np.array([f"kind {c}" for c in "jihgfedcba"])
    model = BiTemperedLogisticRegression(0.5, 4.0, rescale=False)
    said = (
        r"the fit at temperatures \(0.5, 4\) has not learnt all classes: .*kind [a-j].*Try a larger C, .* rescale=True"
    )
    with pytest.warns(ConvergenceWarning, match=said):
        model.fit(X, names[y])
    assert model.score(test, names[y]) < 0.3
    assert model.set_params(C=1e4).fit(X, names[y]).score(test, names[y]) > 0.7  # no warning: they are errors here
    network = BiTemperedMLPClassifier(0.5, 4.0, learning_rate_init=1e-5, max_iter=20, tol=10.0, random_state=0)
    with pytest.warns(ConvergenceWarning, match="has not learnt all classes: .*kind [a-j].* Try more epochs"):
        network.fit(X, names[y])


def test_a_fit_that_ends_on_the_way_has_the_temperatures_of_its_coefficients():
    X, test, y = blobs(10)
    model = BiTemperedLogisticRegression(0.5, 4.0, max_iter=5)
    with pytest.warns(ConvergenceWarning, match=r"at temperatures \(.*\) on the way to \(0.5, 4\)"):
        model.fit(X, y)
    assert 1 <= model.t2_ < 4
    assert model.scale_ == pytest.approx(10 ** (model.t2_ - 1))
    wanted = bt.tempered_softmax(model.scale_ * model.decision_function(test), model.t2_)
    np.testing.assert_allclose(model.predict_proba(test), wanted, rtol=1e-12)


def test_a_class_of_little_weight_may_be_given_up():
    X, y = problem(2)
    rare = np.where(y == "a", 0.01, 1.0)
    model = BiTemperedLogisticRegression(C=0.01).fit(X, y, sample_weight=rare)  # warnings are errors
    assert (model.predict(X) == "b").all()
    with pytest.warns(ConvergenceWarning, match="every row is predicted as class b"):
        model.fit(X, y, sample_weight=np.where(y == "a", 0.4, 1.0) / 1e3)


def test_network_with_a_schedule():
    X, y = make_moons(200, noise=0.1, random_state=0)
    schedule = anneal((1, 1), (0.5, 2), begin=5, finish=40)
    model = clone(SMALL).set_params(max_iter=300, schedule=schedule, rescale=True).fit(X, y)
    assert (model.t1_, model.t2_, model.scale_) == (0.5, 2.0, 2.0)
    assert 40 + model.n_iter_no_change <= model.n_iter_ < 300  # only then may it stop
    logits = model.decision_function(X)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], bt.tempered_sigmoid(2 * logits, 2.0), rtol=1e-12)
    for copy in (clone(model).fit(X, y), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(copy.predict_proba(X), model.predict_proba(X))
        assert copy.schedule == schedule


@pytest.mark.filterwarnings("ignore:training stopped at max_iter")
def test_network_without_temperatures_follows_the_default_schedule(monkeypatch):
    monkeypatch.setattr(network, "LOGISTIC_STEPS", 0)
    X, y = problem(4)
    bare = clone(SMALL).fit(X, y)
    by_hand = clone(SMALL).set_params(schedule=default(4, SMALL.max_iter).legs[0]).fit(X, y)
    np.testing.assert_array_equal(bare.predict_proba(X), by_hand.predict_proba(X))
    assert (bare.t1_, bare.t2_) == default(4, 20).legs[0](19) != (1.0, 1.0)


def test_network_compares_only_losses_of_the_same_temperatures():
    """At (0, 1) losses are smaller than at (1, 1): after the jump they are worse than the best, and yet improving."""
    X, y = make_moons(200, noise=0.1, random_state=0)
    jump = anneal((0, 1), (1, 1), begin=20, finish=20)
    model = clone(SMALL).set_params(schedule=jump, learning_rate_init=0.002, max_iter=40, tol=0.0)
    with pytest.warns(ConvergenceWarning, match="stopped at max_iter = 40 epochs"):
        model.fit(X, y)
    assert min(model.loss_curve_[20:]) > min(model.loss_curve_[:20])


def test_network_of_early_stopping_keeps_the_temperatures_of_its_weights():
    X, y = make_moons(300, noise=0.3, random_state=0)
    pairs = [(1 - epoch / 100, 1 + epoch / 100) for epoch in range(30)]
    model = clone(SMALL).set_params(schedule=pairs.__getitem__, max_iter=30, early_stopping=True, rescale=True)
    with pytest.warns(ConvergenceWarning, match="stopped at max_iter = 30 epochs"):
        model.fit(X, y)
    best = int(np.argmax(model.validation_scores_))
    assert 0 < best < 29
    assert (model.t1_, model.t2_) == pairs[best]


def test_network_learns_small_data_before_its_default_schedule_moves():
    """One step an epoch: five per cent of the epochs are ten steps, in which nothing is learnt."""
    X, _, y = blobs(10)
    model = BiTemperedMLPClassifier(random_state=0, batch_size=len(y), max_iter=250)
    plain = clone(model).set_params(t1=1.0, t2=1.0)
    with pytest.warns(ConvergenceWarning, match="stopped at max_iter"):
        ours, logistic = model.fit(X, y).score(X, y), plain.fit(X, y).score(X, y)
    assert ours > logistic - 0.03
    assert model.t1_ < 1


@pytest.mark.filterwarnings("ignore:the fit at temperatures:sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("rows", "max_iter", "last"), [(200, 200, "(1, 1)"), (600, 60, "(1, 1)"), (600, 80, "(0.5")])
def test_network_says_if_its_default_schedule_does_not_end(rows, max_iter, last):
    X, y = problem(4)
    X, y = np.tile(X, (10, 1))[:rows], np.tile(y, 10)[:rows]
    model = BiTemperedMLPClassifier(random_state=0, max_iter=max_iter, hidden_layer_sizes=16)
    with pytest.warns(ConvergenceWarning, match="training stopped") as found:
        model.fit(X, y)
    [said] = (str(warning.message) for warning in found if "stopped" in str(warning.message))
    assert said.startswith(
        f"training stopped at max_iter = {max_iter} epochs before it converged, at temperatures {last}"
    )
    assert " of the default schedule, which ends at (0, 2): raise max_iter" in said
    assert model.n_iter_ == max_iter


def test_a_rare_class_given_up_is_said_without_weights_too():
    rng = np.random.default_rng(0)
    y = np.r_[np.zeros(900, int), np.ones(100, int)]
    X = rng.normal(size=(1000, 3))
    with pytest.warns(ConvergenceWarning, match="every row is predicted as class 0"):
        BiTemperedLogisticRegression(0.5, 4.0).fit(X, y)
