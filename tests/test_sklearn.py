"""bitempered.sklearn: its optimum against the 50-digit oracle and Newton's method, and scikit-learn's own checks."""

import math
import pickle
import subprocess
import sys
import warnings
from itertools import pairwise

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cases import PAIRS, error, exact_losses
from rescale_cases import rescaled_losses
from scipy import sparse
from scipy.special import log_softmax, softmax
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, load_iris, make_classification, make_moons
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import compute_class_weight
from sklearn.utils.estimator_checks import parametrize_with_checks

import bitempered.numpy as bt
import bitempered.torch as bt_torch
from bitempered.sklearn import BiTemperedLogisticRegression, BiTemperedMLPClassifier, linear, network
from bitempered.sklearn.linear import _Objective

RNG = np.random.default_rng(0)
SMALL = BiTemperedMLPClassifier(hidden_layer_sizes=16, learning_rate_init=0.05, max_iter=20, random_state=0)

# Batches of other examples, and sums in float32 of more or fewer terms, end in other weights.
EXPECTED = {
    ("BiTemperedMLPClassifier", f"check_sample_weight_equivalence_on_{kind}_data") for kind in ("dense", "sparse")
}


# The network is given fewer epochs than it needs, the linear model all that it does.
EPOCHS_RUN_OUT = pytest.mark.filterwarnings(
    "ignore:training stopped at max_iter|the fit at temperatures:sklearn.exceptions.ConvergenceWarning"
)


@EPOCHS_RUN_OUT
@parametrize_with_checks([BiTemperedLogisticRegression(), BiTemperedLogisticRegression(1.0, 1.0), SMALL])
def test_scikit_learns_checks(estimator, check):
    if (type(estimator).__name__, getattr(check, "func", check).__name__) in EXPECTED:
        with pytest.raises(AssertionError, match="not equivalent to fitting with removed or repeated"):
            check(estimator)
    else:
        check(estimator)


def problem(classes):
    X, y = make_classification(300, 8, n_informative=5, n_classes=classes, flip_y=0.2, random_state=0)
    return X * np.logspace(-1, 1, 8) + 1, np.array(["b", "a", "d", "c"])[y]  # features of unlike scales, named classes


WEIGHTED = {
    "plain": ({}, None),
    "sample_weight": ({}, RNG.integers(4, size=300) / 2),
    "dict": ({"class_weight": {"a": 3.0, "b": 0.5}}, None),
    "balanced": ({"class_weight": "balanced"}, RNG.integers(4, size=300) / 2),
    "no intercept": ({"fit_intercept": False, "C": 0.1}, None),
}


def logistic_optimum(X, y, weight, *, C=1.0, fit_intercept=True):
    """Coefficients and intercepts of ridge logistic regression by Newton's method: no solver's stopping point."""
    A = np.hstack((X, np.ones((len(X), int(fit_intercept)))))
    penalty = np.append(np.full(X.shape[1], 1 / C), np.zeros(int(fit_intercept)))
    target = (y[:, None] == np.unique(y)).astype(float)
    first = int(target.shape[1] == 2)  # of two classes the first has the logit 0
    theta = np.zeros((A.shape[1], target.shape[1]))
    for _ in range(50):
        p = softmax(A @ theta, axis=1)
        gradient = A.T @ (weight[:, None] * (p - target)) + penalty[:, None] * theta
        curvature = weight[:, None, None] * (p[:, :, None] * np.eye(p.shape[1]) - p[:, :, None] * p[:, None, :])
        free = theta[:, first:]
        hessian = np.einsum("ni,nkl,nj->ikjl", A, curvature[:, first:, first:], A, optimize=True)
        hessian = hessian.reshape(free.size, free.size) + np.diag(np.repeat(penalty, free.shape[1]))
        # Least squares: one number added to all intercepts changes nothing.
        step = np.linalg.lstsq(hessian, gradient[:, first:].ravel(), rcond=1e-12)[0].reshape(free.shape)
        free -= step
        if abs(step).max() <= 1e-12:
            return free[: X.shape[1]].T, free[X.shape[1] :].sum(axis=0)
    raise AssertionError(f"Newton's method still moves by {abs(step).max()}")


@pytest.mark.parametrize("options", WEIGHTED)
@pytest.mark.parametrize("classes", [2, 4])
def test_at_one_it_is_logistic_regression(classes, options):
    X, y = problem(classes)
    options, weight = WEIGHTED[options]
    names, labels = np.unique(y, return_inverse=True)
    by_class = compute_class_weight(options.get("class_weight"), classes=names, y=y, sample_weight=weight)
    penalised = {name: options[name] for name in ("C", "fit_intercept") if name in options}
    coef, intercept = logistic_optimum(X, y, by_class[labels] * (1 if weight is None else weight), **penalised)
    # It is the problem that scikit-learn solves, as near as that comes.
    theirs = LogisticRegression(solver="newton-cholesky", **options).fit(X, y, weight)
    np.testing.assert_allclose(theirs.coef_, coef, atol=1e-2)
    np.testing.assert_allclose(theirs.intercept_, intercept, atol=1e-2)
    for container in (np.asarray, sparse.csr_array):
        got = BiTemperedLogisticRegression(1.0, 1.0, tol=1e-8, **options).fit(container(X), y, weight)
        assert got.classes_.tolist() == theirs.classes_.tolist()
        assert got.coef_.shape == theirs.coef_.shape
        assert got.n_iter_.shape == theirs.n_iter_.shape
        # Rounding may end L-BFGS at a gradient of 1e-6, which is up to 8e-6 from the optimum.
        np.testing.assert_allclose(got.coef_, coef, atol=2e-5)
        np.testing.assert_allclose(got.intercept_, intercept, atol=2e-5)
        logits = X @ got.coef_.T + got.intercept_
        np.testing.assert_allclose(got.decision_function(container(X)).reshape(logits.shape), logits, atol=1e-12)
        logits = np.hstack((0 * logits, logits)) if classes == 2 else logits
        np.testing.assert_allclose(got.predict_log_proba(container(X)), log_softmax(logits, axis=1), atol=1e-12)
    # 1e-6 off in the temperatures moves the optimum by 5e-6, and the way there is another.
    near = BiTemperedLogisticRegression(1 - 1e-6, 1 + 1e-6, tol=1e-8, **options).fit(X, y, weight)
    np.testing.assert_allclose(near.coef_, coef, atol=3e-5)


def test_more_features_than_are_preconditioned():
    X, y = sparse.random_array((60, 2100), density=0.05, rng=np.random.default_rng(0)), np.arange(60) % 3
    # The penalty keeps the coefficients in the span of the examples, which has 60 dimensions.
    basis, scaled = np.linalg.qr(X.toarray().T)
    coef, intercept = logistic_optimum(scaled.T, y, np.ones(60))
    got = BiTemperedLogisticRegression(1.0, 1.0, tol=1e-8).fit(X, y)
    np.testing.assert_allclose(got.coef_, coef @ basis.T, atol=2e-5)
    np.testing.assert_allclose(got.intercept_, intercept, atol=1e-4)  # 5e-5 at a gradient of 1e-6


def test_features_that_repeat_others_or_are_zero():
    X, y = problem(4)
    twice = np.hstack((X, X, np.zeros((300, 1))))
    for C in (1.0, np.inf):  # without a penalty there are many minima, and all predict the same
        once = BiTemperedLogisticRegression(C=2 * C, tol=1e-8).fit(X, y)
        got = BiTemperedLogisticRegression(C=C, tol=1e-8).fit(twice, y)
        # Both are within a gradient of 1e-6, where rounding may end them, in units in which the Hessian is about 1.
        np.testing.assert_allclose(got.predict_proba(twice), once.predict_proba(X), atol=1e-6)


EXAMPLES = np.hstack((RNG.normal(size=(12, 2)), np.ones((12, 1))))
WEIGHTS = RNG.uniform(0.5, 2, size=12)
LABELS = {2: np.arange(12) % 2, 3: RNG.permutation(12) % 3}
PENALTY = np.array([[0.1], [0.1], [0.0]])


def exact(logits, labels, t1, t2, rescale):
    """The losses of the rows of logits, one column for two classes, and their gradients in those columns."""
    rows = np.hstack((0 * logits, logits)) if logits.shape[1] == 1 else logits
    values = (rescaled_losses if rescale else exact_losses)(rows, np.eye(rows.shape[1])[labels], t1, t2)
    return values[0], np.array(values[1], dtype=float).reshape(rows.shape)[:, -logits.shape[1] :]


@pytest.mark.parametrize(
    ("t1", "t2", "rescale"), [*((*pair, False) for pair in PAIRS), (0.5, 0.8, True), (0.5, 4.0, True)]
)
@pytest.mark.parametrize("classes", LABELS)
def test_objective_equals_the_oracle_and_its_gradient_finite_differences(classes, t1, t2, rescale):
    labels, rng = LABELS[classes], np.random.default_rng(0)
    theta = rng.normal(size=(3, 1 if classes == 2 else 3))
    options = {"theta": theta, "penalty": PENALTY, "rescale": rescale}
    objective = _Objective(EXAMPLES, labels, WEIGHTS, t1, t2, **options)
    # From far to near, so that the tangent of one is the start of the next: each value is as exact as the first.
    for size in (0.0, 2.0, 1.0, 1e-3, 0.0):
        z = size * rng.normal(size=theta.size)
        value, gradient = objective(z)
        fresh = _Objective(EXAMPLES, labels, WEIGHTS, t1, t2, **options)(z)
        np.testing.assert_allclose(value, fresh[0], rtol=1e-13)
        np.testing.assert_allclose(gradient, fresh[1], rtol=1e-11, atol=1e-13)
    losses, _ = exact(EXAMPLES @ theta, labels, t1, t2, rescale)
    total = mp.fsum(w * x for w, x in zip(WEIGHTS.tolist(), losses, strict=True))
    total += float(np.sum(PENALTY * theta**2)) / 2
    assert error(value * objective.scale, [total]) <= 1e-12
    # Central differences at h = 1e-5: rounding over h is 1e-11, and h^2 is 1e-10, times a third derivative.
    numerical = [(objective(1e-5 * e)[0] - objective(-1e-5 * e)[0]) / 2e-5 for e in np.eye(theta.size)]
    np.testing.assert_allclose(gradient, numerical, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.5, 2.0), (1.3, 1.6), (1.5, 1.5), (0.7, 0.7)])
@pytest.mark.parametrize("classes", LABELS)
def test_optimum_is_stationary_by_the_oracle(classes, t1, t2, rescale):
    X, y = EXAMPLES[:, :2], LABELS[classes]
    model = BiTemperedLogisticRegression(t1, t2, C=2.0, tol=1e-9, rescale=rescale).fit(X, y, sample_weight=WEIGHTS)
    _, by_logits = exact(model.decision_function(X).reshape(12, -1), y, t1, t2, rescale)
    # Rounding ends L-BFGS at 1e-6 at the latest, in units in which the Hessian is about 1.
    weighted = 2.0 * WEIGHTS[:, None] * by_logits
    np.testing.assert_allclose(weighted.T @ X + model.coef_, 0, atol=1e-6)
    np.testing.assert_allclose(weighted.sum(axis=0), 0, atol=1e-6)
    assert abs(model.coef_).max() > 0.05  # not stationary for want of anything to fit


def test_probabilities_are_the_tempered_softmax():
    X, y = load_iris(return_X_y=True)
    for t2, rescale in ((0.5, False), (1.2, False), (0.5, True), (1.2, True)):
        model = BiTemperedLogisticRegression(0.5, t2, rescale=rescale).fit(X, y)
        logits = X[::30] @ model.coef_.T + model.intercept_
        factor = mp.mpf(3) ** (mp.mpf(t2) - 1) if rescale else 1
        probabilities = [p for a in logits.tolist() for p in oracle.softmax([factor * mp.mpf(x) for x in a], t2)]
        p = model.set_params(rescale=False, t2=7.0).predict_proba(X[::30])  # of the fit, not of the parameters
        assert error(p, probabilities) <= 1e-12
        np.testing.assert_array_equal(np.isneginf(model.predict_log_proba(X[::30])), p == 0)
        np.testing.assert_array_equal(model.predict(X), model.classes_[model.predict_proba(X).argmax(axis=1)])
        assert (p == 0).any() == (t2 < 1)


def test_outliers_move_logistic_regression_but_not_this():
    """2% of the examples lie far off on the wrong side of the line that separates the rest."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(4400, 2))
        y = X.sum(axis=1) + rng.normal(scale=0.1, size=4400) > 0
        clean, truth = X[400:], y[400:]
        X[:8], y[:8] = rng.normal(loc=(8, 0), scale=0.5, size=(8, 2)), False
        for C in (1.0, 10.0):
            logistic = LogisticRegression(C=C).fit(X[:400], y[:400]).score(clean, truth)
            robust = BiTemperedLogisticRegression(0.5, 2.0, C=C).fit(X[:400], y[:400]).score(clean, truth)
            assert logistic < 0.9
            assert robust > 0.96


def test_the_same_in_every_run_and_from_a_warm_start():
    X, y = problem(4)
    model = BiTemperedLogisticRegression(0.5, 2.0, tol=1e-6, warm_start=True).fit(X, y)
    first, iterations = model.coef_.copy(), model.n_iter_[0]
    np.testing.assert_array_equal(clone(model).fit(X, y).coef_, first)
    assert model.fit(X, y).n_iter_[0] < iterations / 10
    np.testing.assert_allclose(model.coef_, first, atol=1e-4)  # it may move on, by tol in its own units
    # At a convex pair every start has the same end.
    cold = BiTemperedLogisticRegression(1.3, 1.3, tol=1e-9).fit(X, y)
    warm = model.set_params(t1=1.3, t2=1.3, tol=1e-9).fit(X, y)
    np.testing.assert_allclose(warm.coef_, cold.coef_, atol=3e-5)  # each up to 8e-6 from the optimum, as above


def test_a_fit_that_fails_leaves_the_last_one():
    X, y = problem(4)
    model = BiTemperedLogisticRegression(warm_start=True).fit(X, y)
    before = model.predict_proba(X)
    weights = np.ones(300)
    cases = [
        ((X[:, :3], y), r"shape \(4, 3\) for these examples, got \(4, 8\) from the last fit"),
        ((X, np.where(y == "a", "b", y)), r"shape \(3, 8\) for these examples, got \(4, 8\)"),
        (
            (X, np.where(y == "a", "e", y)),
            r"classes of the last fit, \['a', 'b', 'c', 'd'\], got \['b', 'c', 'd', 'e'\]",
        ),
        ((X[:, :3], y, -weights), "sample_weight must hold finite numbers >= 0"),
    ]
    for examples, message in cases:
        with pytest.raises(ValueError, match=message):
            model.fit(*examples)
        np.testing.assert_array_equal(model.predict_proba(X), before)
        assert model.classes_.tolist() == ["a", "b", "c", "d"]
    model.set_params(warm_start=False, class_weight="balanced")
    with pytest.raises(ValueError, match=r"class_weight='balanced' needs weight in every class, got none in \['e'\]"):
        model.fit(X[:, :3], np.where(y == "a", "e", y), y != "a")
    np.testing.assert_array_equal(model.predict_proba(X), before)


@pytest.mark.parametrize(
    "model", [BiTemperedLogisticRegression(), BiTemperedMLPClassifier(hidden_layer_sizes=8, max_iter=3, random_state=0)]
)
def test_a_fit_that_is_stopped_in_the_middle_leaves_the_last_one(model, monkeypatch):
    X, y = problem(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        before = model.fit(X, y).predict_proba(X)
    other = np.where(y == "a", "e", "f")
    model.set_params(t1=0.0, t2=3.0, max_iter=2)
    with pytest.raises(ConvergenceWarning):  # warnings are errors here
        model.fit(X, other)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    with pytest.raises(ValueError, match="sample_weight must hold finite numbers >= 0"):
        model.fit(X, other, -np.ones(len(y)))
    for name in ("minimize", "all_logits"):
        for module in (linear, network):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, other)
    monkeypatch.undo()
    np.testing.assert_array_equal(model.predict_proba(X), before)
    assert model.classes_.tolist() == ["a", "b", "c", "d"]


def stopped(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:the fit at temperatures:sklearn.exceptions.ConvergenceWarning")
def test_warns_when_iterations_run_out():
    X, y = problem(4)
    for temperatures in ((1.0, 1.0), (0.5, 2.0)):
        for max_iter in (1, 3, 6):
            model = BiTemperedLogisticRegression(*temperatures, max_iter=max_iter, tol=1e-9)
            with pytest.warns(ConvergenceWarning, match=f"stopped after {max_iter} iterations before it converged"):
                assert model.fit(X, y).n_iter_ == [max_iter]
    with pytest.warns(ConvergenceWarning, match="stopped at max_iter = 2 epochs before it converged"):
        assert clone(SMALL).set_params(max_iter=2).fit(X, y).n_iter_ == 2


@pytest.mark.filterwarnings("ignore:the fit at temperatures:sklearn.exceptions.ConvergenceWarning")  # X is noise
def test_many_classes_of_unlike_sizes():
    """At a mild and at a heavy pair few iterations do; heavier still, a warning names the temperatures reached."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 21)
    X = rng.normal(size=(300, 5))
    y = np.append(np.arange(20), rng.choice(20, size=280, p=share / share.sum()))
    for t1, t2, most in ((0.8, 1.2, 60), (0.5, 2.0, 400)):  # about twice what they take
        assert BiTemperedLogisticRegression(t1, t2).fit(X, y).n_iter_[0] < most
    model = BiTemperedLogisticRegression(0.5, 4.0, max_iter=20)
    with pytest.warns(
        ConvergenceWarning, match=r"after 20 .* at temperatures \([\d.]+, [\d.]+\) on the way to \(0.5, 4\)"
    ):
        model.fit(X, y)


def test_stops_at_tol_or_says_so():
    """Not where the loss changes little, which far from (1, 1) is long before the gradient is small."""
    X, y = load_digits(return_X_y=True)
    X, y = X[:600], y[:600]
    model = BiTemperedLogisticRegression(0.2, 4.0, C=1000.0).fit(X, y)
    theta = np.vstack((model.coef_.T, model.intercept_))
    penalty = np.append(np.full((64, 1), 1 / 600_000), [[0.0]], axis=0)
    examples = np.hstack((X, np.ones((600, 1)))), y, np.full(600, 1 / 600)
    objective = _Objective(*examples, 0.2, 4.0, theta=theta, penalty=penalty, rescale=True)
    # Twice, for these are the units of the end of the last step, and L-BFGS has those of its start.
    assert abs(objective(np.zeros(theta.size))[1]).max() <= 2 * model.tol


@pytest.mark.parametrize("estimator", [BiTemperedLogisticRegression(), SMALL])
@EPOCHS_RUN_OUT
def test_in_a_pipeline_a_search_and_a_calibration(estimator):
    X, y = problem(2)
    name = type(estimator).__name__.lower()
    grid = {f"{name}__t1": [0.5, 1.0], f"{name}__t2": [1.0, 2.0]}
    grid |= {f"{name}__C": [0.1, 1.0]} if isinstance(estimator, BiTemperedLogisticRegression) else {}
    search = GridSearchCV(make_pipeline(StandardScaler(), estimator), grid, cv=2, scoring="neg_log_loss").fit(X, y)
    assert set(grid) == set(search.best_params_)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_.score(X, y) > 0.7
    calibrated = CalibratedClassifierCV(estimator, cv=2).fit(X, y, sample_weight=np.ones(300))
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(axis=1), 1)
    assert calibrated.score(X, y) > 0.7


def test_pickles_and_predicts_without_torch(tmp_path):
    """Where PyTorch cannot be imported, both predict what they did here, and only the network cannot be fitted."""
    X, y = make_moons(60, noise=0.1, random_state=0)
    models = BiTemperedLogisticRegression().fit(X, y), clone(SMALL).set_params(t1=0.8, t2=1.2, tol=0.1).fit(X, y)
    (tmp_path / "models").write_bytes(pickle.dumps((models, X, [model.predict_proba(X) for model in models])))
    code = """
import pickle, sys

class NoTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
models, X, want = pickle.load(open(sys.argv[1], "rb"))
for model, p in zip(models, want):
    assert (model.predict_proba(X) == p).all()
    try:
        model.fit(X, X[:, 0] > 0)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "models"], capture_output=True, text=True, check=True)
    assert done.stdout == 'BiTemperedMLPClassifier needs PyTorch: pip install "torch>=2.6"\n'


# The network


CONSTANT = [(0.5, 1.5)] * 3
CHANGING = [(1.0, 1.0), (0.8, 1.2), (0.5, 2.0)]


@pytest.mark.parametrize(
    ("classes", "batch_size", "batches", "pairs", "rescale"),
    [
        (2, 100, 3, CONSTANT, True),
        (4, 100, 3, CONSTANT, False),
        (4, 70, 5, CHANGING, True),
        (4, 400, 1, CHANGING, False),
        (2, 100, 3, CHANGING, True),
    ],
)
@EPOCHS_RUN_OUT
def test_network_is_trained_as_torch_would(classes, batch_size, batches, pairs, rescale):
    """Adam on bitempered.torch's loss and an explicit penalty, from the same weights and in the same order."""
    X, y = problem(classes)
    X, y, weight = StandardScaler().fit_transform(X).astype(np.float32)[1:], y[1:], np.linspace(0.5, 2, 299)
    options = {"hidden_layer_sizes": (5, 4), "alpha": 3.0, "max_iter": 3, "random_state": 0}
    options |= {"t1": 0.5, "t2": 1.5} if pairs is CONSTANT else {"schedule": pairs.__getitem__}
    model = BiTemperedMLPClassifier(batch_size=batch_size, rescale=rescale, **options)
    model.fit(X, y, weight)

    rng = np.random.RandomState(0)
    layers = []
    for before, after in [(8, 5), (5, 4), (4, 1 if classes == 2 else 4)]:
        limit = math.sqrt(6 / (before + after))
        layers.append(torch.nn.Linear(before, after))
        layers[-1].weight.data = torch.tensor(rng.uniform(-limit, limit, (before, after)).T, dtype=torch.float32)
        layers[-1].bias.data.zero_()
    net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    inputs, target = torch.from_numpy(X), torch.from_numpy(np.unique(y, return_inverse=True)[1])
    w = torch.from_numpy(weight / weight.mean()).float()
    for t1, t2 in pairs:
        inner, outer = (classes ** (t2 - 1), classes ** (1 - t1)) if rescale else (1, 1)
        order = rng.permutation(299)
        ends = [0, *np.cumsum([299 // batches + (i < 299 % batches) for i in range(batches)])]
        for first, end in pairwise(ends):
            rows = order[first:end]
            out = inner * net(inputs[rows])
            if classes == 2:
                loss = bt_torch.bi_tempered_binary_logistic_loss(
                    out[:, 0], target[rows].float(), t1, t2, reduction="none"
                )
            else:
                loss = bt_torch.bi_tempered_logistic_loss(out, target[rows], t1, t2, reduction="none")
            penalty = 3.0 / 2 * sum(layer.weight.square().sum() for layer in layers) / len(rows)
            optimizer.zero_grad()
            (outer * (w[rows] * loss).mean() + penalty).backward()
            optimizer.step()
    for layer, coef, intercept in zip(layers, model.coefs_, model.intercepts_, strict=True):
        # float32 gradients near 0 have rounding in their sign, which is what the first steps of Adam follow.
        np.testing.assert_allclose(coef, layer.weight.detach().T, atol=1e-4)
        np.testing.assert_allclose(intercept, layer.bias.detach(), atol=1e-4)
    logits = inner * net(inputs).detach().double().numpy()
    logits = np.hstack((0 * logits, logits)) if classes == 2 else logits
    assert (model.t1_, model.t2_) == (t1, t2)
    np.testing.assert_allclose(model.predict_proba(X), bt.tempered_softmax(logits, t2), atol=1e-3)


def test_network_learns_what_is_not_linear_and_leaves_torch_alone():
    X, y = make_moons(400, noise=0.1, random_state=0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    model = clone(SMALL).set_params(max_iter=300).fit(X, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert model.score(X, y) > 0.97 > BiTemperedLogisticRegression().fit(X, y).score(X, y)
    assert model.n_iter_ == len(model.loss_curve_) < 300
    assert model.loss_curve_[-1] < model.loss_curve_[0] / 3
    again = clone(model).fit(sparse.csr_array(X), y)
    np.testing.assert_allclose(again.predict_proba(sparse.csr_array(X)), model.predict_proba(X), rtol=1e-12)


def test_network_keeps_the_best_of_early_stopping():
    X, y = make_moons(300, noise=0.3, random_state=0)
    model = clone(SMALL).set_params(t1=0.8, t2=1.2, early_stopping=True, validation_fraction=0.2)
    model.set_params(max_iter=300, random_state=3)
    scores = model.fit(X, y).validation_scores_
    assert len(scores) == model.n_iter_ == np.argmax(scores) + 1 + model.n_iter_no_change
    best = clone(model).set_params(max_iter=int(np.argmax(scores)) + 1)
    with pytest.warns(ConvergenceWarning):
        best.fit(X, y)
    for kept, then in zip(model.coefs_, best.coefs_, strict=True):
        np.testing.assert_array_equal(kept, then)


@EPOCHS_RUN_OUT
def test_weights():
    X, y = problem(4)
    weight = np.where(np.arange(300) < 100, 0.0, 2.0)
    for estimator in (BiTemperedLogisticRegression(tol=1e-8), clone(SMALL).set_params(tol=0.1)):
        C = {"C": 2.0} if isinstance(estimator, BiTemperedLogisticRegression) else {}
        got = clone(estimator).fit(X, y, weight).predict_proba(X)
        want = clone(estimator).set_params(**C).fit(X[100:], y[100:]).predict_proba(X)
        np.testing.assert_allclose(got, want, atol=1e-5)


X, Y = np.arange(8.0).reshape(4, 2), [0, 1, 0, 1]
BOTH = {
    "t1": ({"t1": 1.2, "t2": 0.8}, {}, ValueError, "t1 must not exceed t2, got t1 = 1.2 and t2 = 0.8"),
    "t2": ({"t1": 0.8, "t2": "1"}, {}, TypeError, "t2 must be a number, got str"),
    "rescale": ({"rescale": "no"}, {}, TypeError, "rescale must be True or False, got 'no'"),
    "large t2": ({"t1": 1, "t2": 110, "rescale": True}, {}, ValueError, "more than 1e30 for 2 classes and t2 = 110"),
    "max_iter": ({"max_iter": 0}, {}, ValueError, "max_iter must be an integer >= 1, got 0"),
    "tol": ({"tol": -1.0}, {}, ValueError, "tol must be a finite number >= 0, got -1.0"),
    "one class": ({}, {"y": [1, 1, 1, 1]}, ValueError, "y must hold at least 2 classes, got 1 class: 1"),
    "real y": ({}, {"y": [0.1, 0.2, 0.3, 0.4]}, ValueError, "continuous"),
    "weights": ({}, {"sample_weight": [1.0]}, ValueError, r"sample_weight must have shape \(4,\), .* got \(1,\)"),
    "negative": ({}, {"sample_weight": [1, 1, 1, -1]}, ValueError, "must hold finite numbers >= 0, .* from -1 to 1"),
    "zero": ({}, {"sample_weight": [0, 0, 0, 0]}, ValueError, "not all of them zero, got values from 0 to 0"),
}
LINEAR = {
    "C": ({"C": 0}, {}, ValueError, "C must be a number > 0, got 0"),
    "tiny C": ({"C": 1e-320}, {}, ValueError, "penalty overflows at C = 9.99989e-321 and weights up to 1:"),
    "tiny weights": (
        {},
        {"sample_weight": np.full(4, 1e-320)},
        ValueError,
        "C = 1 and weights up to 9.99989e-321",
    ),
    "class_weight": ({"class_weight": {7: 1.0}}, {}, ValueError, "not in class_weight|Class label 7 not present"),
    "no weight": ({"class_weight": {0: 0, 1: 0}}, {}, ValueError, "class_weight must hold .* not all of them zero"),
    "balanced": ({"class_weight": "balanced"}, {"sample_weight": [1, 0, 1, 0]}, ValueError, r"got none in \[1\]"),
    "huge": ({}, {"X": 1e160 * X}, ValueError, "a feature of size 7e.160, too large: .* scale the features"),
    "fit_intercept": ({"fit_intercept": "no"}, {}, TypeError, "fit_intercept must be True or False, got 'no'"),
}
NETWORK = {
    "huge rate": ({"learning_rate_init": 10**400}, {}, ValueError, "learning_rate_init must be a number > 0, got 1000"),
    "hidden": ({"hidden_layer_sizes": (3, 0)}, {}, ValueError, "hidden_layer_sizes must be an integer >= 1, got 0"),
    "batch_size": ({"batch_size": 1.5}, {}, ValueError, "batch_size must be an integer >= 1, got 1.5"),
    "n_iter_no_change": ({"n_iter_no_change": 0}, {}, ValueError, "n_iter_no_change must be an integer >= 1"),
    "rate": ({"learning_rate_init": 0}, {}, ValueError, "learning_rate_init must be a number > 0, got 0"),
    "alpha": ({"alpha": -1}, {}, ValueError, "alpha must be a finite number >= 0, got -1"),
    "t1 alone": ({"t1": 0.8}, {}, ValueError, "give both t1 and t2, or neither .* got t1=0.8 and t2=None"),
    "t2 alone": ({"t2": 1.2}, {}, ValueError, "give both t1 and t2, or neither .* got t1=None and t2=1.2"),
    "both": (
        {"t1": 0.8, "t2": 1.2, "schedule": lambda epoch: (1, 1)},
        {},
        ValueError,
        "either t1 and t2 or a schedule",
    ),
    "schedule": ({"schedule": "linear"}, {}, TypeError, "schedule must be a function .* or None, got 'linear'"),
    "no pair": (
        {"schedule": lambda epoch: 3},
        {},
        TypeError,
        r"return a pair of temperatures \(t1, t2\), got 3 for epoch 0",
    ),
    "bad pair": ({"schedule": lambda epoch: (1, 1 - epoch)}, {}, ValueError, "t1 must not exceed t2"),
    "diverged": ({"learning_rate_init": 1e20}, {}, ValueError, "not finite any more: scale the features, or lower"),
}
CASES = [(BiTemperedLogisticRegression, case) for case in (BOTH | LINEAR).values()]
CASES += [(BiTemperedMLPClassifier, case) for case in (BOTH | NETWORK).values()]


@pytest.mark.parametrize(("estimator", "case"), CASES, ids=[f"{e.__name__} {c[3][:20]}" for e, c in CASES])
def test_bad_input(estimator, case):
    options, data, exception, message = case
    with pytest.raises(exception, match=message):
        estimator(**options).fit(**{"X": X, "y": Y} | data)


@pytest.mark.filterwarnings("ignore:training stopped at max_iter")
@pytest.mark.parametrize("estimator", [BiTemperedLogisticRegression(0.8, 1.4), clone(SMALL).set_params(t1=0.8, t2=1.4)])
def test_rescale_may_come_from_a_numpy_array(estimator):
    X, y = problem(3)
    given, plain = (clone(estimator).set_params(rescale=value).fit(X, y) for value in (np.bool_(True), True))
    np.testing.assert_array_equal(given.predict_proba(X), plain.predict_proba(X))
    assert given.scale_ == plain.scale_ > 1


def test_not_fitted():
    for estimator in (BiTemperedLogisticRegression(), BiTemperedMLPClassifier()):
        with pytest.raises(NotFittedError):
            estimator.predict(X)


@pytest.mark.parametrize("size", [1e-300, 1e307])
def test_only_the_ratios_of_huge_or_tiny_weights_matter(size):
    """Their sum overflows, and with next to no penalty (or all of it) that must not end in another model."""
    X, y = load_iris(return_X_y=True)
    weight = np.random.default_rng(0).uniform(0.1, 1, len(y))
    C = 1.0 / size if size < 1 else 1e-300  # the penalty that weights of about 1 have at C = 1, or nearly none
    mine = BiTemperedLogisticRegression(0.8, 1.2, C=C).fit(X, y, weight * size)
    same = BiTemperedLogisticRegression(0.8, 1.2, C=C * size).fit(X, y, weight)
    np.testing.assert_allclose(mine.coef_, same.coef_, rtol=1e-6, atol=1e-6)
    assert mine.score(X, y) > 0.9
