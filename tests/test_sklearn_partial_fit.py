"""The linear estimator in batches: the first is `fit`, each later one minimises what the docstring says."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone

import bitempered.numpy as bt
from bitempered.sklearn import BiTemperedLogisticRegression

K, FEATURES = 3, 4
CLASSES = ["a", "b", "c"]
TEMPERATURES = [(0.8, 1.2), (1.0, 1.0), (0.5, 2.0), (0.4, 0.9)]


def draw(n, seed, features=FEATURES, classes=K):
    """Independent features, and labels of a linear model with noise."""
    truth = np.random.default_rng(7).normal(size=(features, classes))
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, features))
    return X, np.array(CLASSES)[(2 * X @ truth + rng.gumbel(size=(n, classes))).argmax(1)]


def logits(X, coef, intercept):
    a = X @ coef.T + intercept
    return np.hstack((np.zeros_like(a), a)) if a.shape[1] == 1 else a


def objective(X, y, model, coef, intercept):
    """C times the summed loss, by the public function."""
    index = np.searchsorted(model.classes_, y)
    return (
        model.C
        * bt.bi_tempered_logistic_loss(
            logits(X, coef, intercept), index, model.t1, model.t2, rescale=model.rescale
        ).sum()
    )


def curvature(X, model):
    """C sum_n x_n^2 h_n by differences: h is the mean second derivative over labels drawn from the probabilities."""
    a, step = logits(X, model.coef_, model.intercept_), 1e-4
    p = model.predict_proba(X)
    h = np.zeros_like(a)
    for k in range(a.shape[1]):
        for label in range(a.shape[1]):
            slopes = []
            for sign in (1, -1):
                moved = a.copy()
                moved[:, k] += sign * step
                _, gradient = bt.loss_and_grad(moved, np.full(len(a), label), model.t1, model.t2, rescale=model.rescale)
                slopes.append(gradient[:, k])
            h[:, k] += p[:, label] * (slopes[0] - slopes[1]) / (2 * step)
    h = h[:, -len(model.coef_) :]
    return model.C * (np.hstack((X, np.ones((len(X), 1)))) ** 2).T @ h


def parameters(model):
    return np.vstack((model.coef_.T, model.intercept_))


@pytest.mark.parametrize("t", TEMPERATURES)
def test_the_first_batch_is_fit(t):
    X, y = draw(60, 0)
    weight = np.random.default_rng(1).random(60)
    batch = BiTemperedLogisticRegression(*t).partial_fit(X, y, classes=CLASSES, sample_weight=weight)
    whole = BiTemperedLogisticRegression(*t).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(parameters(batch), parameters(whole))
    np.testing.assert_array_equal(batch.predict(X), whole.predict(X))


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("t", [t for t in TEMPERATURES if t[1] >= 1])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_later_batch_minimises_the_documented_objective(classes, t, rescale):
    names = CLASSES[:classes]
    first, second = (draw(80, seed, classes=classes) for seed in (0, 1))
    model = BiTemperedLogisticRegression(*t, C=0.3, rescale=rescale, tol=1e-8, max_iter=5000)
    model.partial_fit(*first, classes=names)
    before = parameters(model)
    precision = np.vstack((np.ones((FEATURES, 1)), [[0.0]])) + curvature(first[0], model)
    model.partial_fit(*second)
    found, step = parameters(model), 1e-4

    def value(theta):
        return objective(*second, model, theta[:-1].T, theta[-1]) + (precision * (theta - before) ** 2).sum() / 2

    assert abs(found - before).max() > 1e-2
    for place in np.ndindex(found.shape):
        up, down = found.copy(), found.copy()
        up[place] += step
        down[place] -= step
        # The slope is 0 but for `tol` and differences: both values are about 30, with 16 digits, over 2e-4.
        assert abs(value(up) - value(down)) / (2 * step) < 2e-5
        assert value(up) + value(down) > 2 * value(found)


def test_many_batches_come_near_the_fit_of_all():
    """With independent features the excess loss is a small part of the first batch's."""
    X, y = draw(6000, 0)
    settings = {"t1": 0.8, "t2": 1.2, "tol": 1e-6}
    stream, first = BiTemperedLogisticRegression(**settings), BiTemperedLogisticRegression(**settings)
    for start in range(0, len(X), 200):
        rows = slice(start, start + 200)
        stream.partial_fit(X[rows], y[rows], classes=CLASSES)
    first.fit(X[:200], y[:200])
    whole = BiTemperedLogisticRegression(**settings).fit(X, y)
    least = objective(X, y, whole, whole.coef_, whole.intercept_)
    excess = [objective(X, y, m, m.coef_, m.intercept_) - least for m in (stream, first)]
    assert 0 < excess[0] < 0.05 * excess[1], excess


def test_a_fitted_model_goes_on():
    first, second = draw(60, 0), draw(60, 1)
    after_fit = BiTemperedLogisticRegression().fit(*first).partial_fit(*second)
    in_batches = BiTemperedLogisticRegression().partial_fit(*first, classes=CLASSES).partial_fit(*second)
    np.testing.assert_array_equal(parameters(after_fit), parameters(in_batches))
    again = in_batches.fit(*first)  # which starts over
    np.testing.assert_array_equal(parameters(again), parameters(BiTemperedLogisticRegression().fit(*first)))


@pytest.mark.parametrize("features", [FEATURES, 2100])  # above 2,000 the preconditioner is a diagonal
def test_sparse_batches(features):
    X, y = draw(120, 0, features)
    X[np.random.default_rng(0).random(X.shape) < 0.7] = 0
    models = []
    for given in (X, sparse.csr_array(X)):
        models.append(BiTemperedLogisticRegression(C=0.1, tol=1e-7))
        for rows in (slice(60), slice(60, None)):
            models[-1].partial_fit(given[rows], y[rows], classes=CLASSES)
    np.testing.assert_allclose(*(parameters(m) for m in models), atol=1e-5)  # both stop at `tol`


def test_a_batch_of_one_class():
    X, y = draw(90, 0)
    order = np.argsort(y)
    model = BiTemperedLogisticRegression()
    for rows in (np.arange(60), order[:20], order[-20:]):
        model.partial_fit(X[rows], y[rows], classes=CLASSES)
    assert model.score(X, y) > 0.6


def test_bad_batches_leave_the_model_alone():
    X, y = draw(60, 0)
    model = BiTemperedLogisticRegression()
    with pytest.raises(ValueError, match="classes, all of them, must be given at the first call"):
        model.partial_fit(X, y)
    with pytest.raises(ValueError, match=r"y must hold only the classes \['a', 'b'\], got \['c'\]"):
        model.partial_fit(X, y, classes=["a", "b"])
    for classes in ([CLASSES], 3, [0.0, 1.0, np.nan], ["a", None], ["a", np.nan]):
        with pytest.raises(ValueError, match="classes must be a list of labels, none of them missing"):
            model.partial_fit(X, y, classes=classes)
    assert not hasattr(model, "classes_")
    assert clone(model).partial_fit(X, y, classes=set(CLASSES)).classes_.tolist() == CLASSES
    model.partial_fit(X, y, classes=CLASSES)
    kept = parameters(model)
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        model.partial_fit(X, y, classes=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="hold only the classes"):
        model.partial_fit(X, np.where(y == "a", "z", y))
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(X[:, :2], y)
    with pytest.raises(ValueError, match="give a dictionary of weights"):
        BiTemperedLogisticRegression(class_weight="balanced").partial_fit(X, y, classes=CLASSES)
    with pytest.raises(ValueError, match="fit_intercept must be that of the fit that this one continues, got False"):
        model.set_params(fit_intercept=False).partial_fit(X, y)
    np.testing.assert_array_equal(parameters(model), kept)
    assert list(model.classes_) == CLASSES
