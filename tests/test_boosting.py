"""bitempered.boosting against the 50-digit oracle, the libraries' own objectives, and through every interface."""

import math
import pickle
import runpy
import sys
from pathlib import Path

import mpmath as mp
import numpy as np
import oracle
import pytest
from cases import INDEX, LOGITS, PAIRS, error, exact_losses
from rescale_cases import RESCALED, rescaled_losses
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.utils.validation import has_fit_parameter

import bitempered.boosting as boosting
import bitempered.numpy as bt
from bitempered.boosting import lightgbm_metric, lightgbm_objective, xgboost_metric, xgboost_objective

xgb = pytest.importorskip("xgboost")
lgb = pytest.importorskip("lightgbm")

EXAMPLES = Path(__file__).parents[1] / "examples"
NEAR_ONE = [(1 - 1e-6, 1 + 1e-6), (1 + 1e-6, 1 + 1e-6), (1 - 1e-6, 1 - 1e-6)]
FACTOR = {xgboost_objective: 2, lightgbm_objective: 6 / 5}  # what each library multiplies p (1 - p) by, for 6 classes
X, Y = load_iris(return_X_y=True)
BINARY = (Y == 1).astype(int)
# Four cells, which every tree takes apart: between splits of iris as good as each other the order of a sum decides.
CELLS = (Y + (np.arange(150) % 5 == 0))[:, None].astype(float)
WEIGHT = np.random.default_rng(0).integers(1, 4, len(Y))
XGB = {"max_depth": 3, "eta": 0.3, "nthread": 1, "tree_method": "exact"}  # no histogram, which weights would move
LGB = {"num_leaves": 7, "learning_rate": 0.3, "num_threads": 1, "verbose": -1}
LGB |= {"min_data_in_leaf": 0, "min_data_in_bin": 1}  # these count rows, whatever their weights
ROUNDS = 8


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_gradient_equals_the_oracle(t1, t2):
    _, exact = exact_losses(LOGITS, np.eye(6)[INDEX], t1, t2)
    for objective in FACTOR:
        gradient, h = objective(t1, t2, 6)(INDEX, LOGITS)
        assert gradient.shape == h.shape == LOGITS.shape
        assert error(gradient, exact) <= 1e-12
    scores = LOGITS[:, 0]
    pairs = np.stack([np.zeros(4), scores], axis=1)
    _, exact = exact_losses(pairs, np.eye(2)[INDEX % 2], t1, t2)
    for objective in FACTOR:
        gradient, h = objective(t1, t2, 2)(INDEX % 2, scores)
        assert gradient.shape == h.shape == scores.shape
        assert error(gradient, exact[1::2]) <= 1e-12


def mean_curvature(a, t1, t2):
    """The second derivative of the loss in each logit, averaged over labels drawn from the model; in 50 digits.

    The gradient is linear in the target: its mean over labels is that for the mean label, the model's probabilities.
    """
    step = mp.mpf(10) ** -15  # the differences are right to its square
    p = oracle.softmax(a, t2)

    def gradient(i, shift):
        moved = [mp.mpf(x) + (shift if j == i else 0) for j, x in enumerate(a)]
        return oracle.loss_and_gradient(moved, p, t1, t2)[1][i]

    return [(gradient(i, step) - gradient(i, -step)) / (2 * step) for i in range(len(a))]


@pytest.mark.parametrize(
    ("t1", "t2"), [(1.0, 1.0), (0.8, 1.2), (0.2, 2.0), (1.3, 1.6), (0.5, 0.8), (0.2, 0.2), *NEAR_ONE]
)
def test_h_is_the_mean_second_derivative(t1, t2):
    a = [0.3, -0.4, 0.1]  # near enough to each other for all to be in the support at t2 = 0.2
    exact = mean_curvature(a, t1, t2)
    for objective, factor in ((xgboost_objective, 2), (lightgbm_objective, 3 / 2)):
        _, h = objective(t1, t2, 3)([0], [a])
        assert error(h / factor, exact) <= 1e-12
    for objective in FACTOR:
        _, h = objective(t1, t2, 2)([0], [0.3])
        assert error(h, mean_curvature([0.0, 0.3], t1, t2)[1:]) <= 1e-12


def test_h_is_positive_and_finite_everywhere():
    rng = np.random.default_rng(0)
    scale = np.array([0.0, 0.1, 1.0, 10.0, 100.0, 1e4])
    a = (scale[:, None, None] * rng.normal(size=(6, 50, 6))).reshape(-1, 6)
    labels = rng.integers(6, size=len(a))
    extremes = [(0.0, 0.0), (0.0, 0.1), (0.5, 0.5), (0.5, 0.9), (0.0, 1.0), (0.2, 4.0), (1.9, 1.9), (1.0, 100.0)]
    for t1, t2 in [*PAIRS, *NEAR_ONE, *extremes]:
        for objective in FACTOR:
            for gradient, h in (objective(t1, t2, 6)(labels, a), objective(t1, t2, 2)(labels % 2, a[:, 0])):
                assert np.isfinite(gradient).all()
                assert np.isfinite(h).all()
                assert (h >= 1e-16).all()
                assert (abs(gradient) <= 2).all()


def test_h_at_one_and_at_the_first_round():
    logits = LOGITS[:3]
    p, p1 = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 1 / (1 + np.exp(-logits[:, 0]))
    for objective, factor in FACTOR.items():
        np.testing.assert_allclose(objective(1.0, 1.0, 6)(INDEX[:3], logits)[1], factor * p * (1 - p), rtol=1e-11)
        np.testing.assert_allclose(objective(1.0, 1.0, 2)([0, 1, 1], logits[:, 0])[1], p1 * (1 - p1), rtol=1e-11)
        for t1, t2 in PAIRS:
            first = factor * 5 / 36 * 6 ** (1 + t1 - 2 * t2)
            np.testing.assert_allclose(objective(t1, t2, 6)([0], np.zeros((1, 6)))[1], first, rtol=1e-12)


@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (0.8, 1.2), (0.5, 1.5), (0.2, 1.2), (0.2, 4.0)])
def test_a_full_step_lowers_the_loss_of_a_leaf(t1, t2):
    """Twenty examples, two fifths of them with a random label, and the one step that a leaf would add to all scores."""
    rng = np.random.default_rng(0)
    lowered = []
    for _ in range(100):
        sure = rng.integers(10, size=20)
        labels = np.where(rng.random(20) < 0.4, rng.integers(10, size=20), sure)
        a = rng.normal(size=(20, 10)) + 3 * np.eye(10)[sure]
        gradient, h = xgboost_objective(t1, t2, 10)(labels, a)
        before, after = (
            bt.bi_tempered_logistic_loss(scores, labels, t1, t2).sum() for scores in (a, a - gradient.sum(0) / h.sum(0))
        )
        lowered.append(after < before)
    assert all(lowered)


# The libraries: each interface trains on x and y and returns its raw scores and the last value of the metric.


def xgb_native(x, y, *t, weight=None):
    data, log = xgb.DMatrix(x, y, weight=weight), {}
    booster = xgb.train(
        XGB | ({"num_class": 3} if t[2] == 3 else {"base_score": 0}),
        data,
        ROUNDS,
        obj=xgboost_objective(*t),
        custom_metric=xgboost_metric(*t),
        evals=[(data, "train")],
        evals_result=log,
        verbose_eval=False,
    )
    return booster.predict(data, output_margin=True), log["train"]["bi_tempered_loss"][-1]


def xgb_sklearn(x, y, *t, weight=None):
    model = xgb.XGBClassifier(
        objective=xgboost_objective(*t), eval_metric=xgboost_metric(*t), n_estimators=ROUNDS, **XGB
    )
    model = pickle.loads(pickle.dumps(clone(model)))
    model.fit(x, y, sample_weight=weight, eval_set=[(x, y)], sample_weight_eval_set=[weight], verbose=False)
    log = model.evals_result()["validation_0"]
    return pickle.loads(pickle.dumps(model)).predict(x, output_margin=True), log["bi_tempered_loss"][-1]


def lgb_native(x, y, *t, weight=None):
    data, log = lgb.Dataset(x, y, weight=weight), {}
    booster = lgb.train(
        LGB | {"objective": lightgbm_objective(*t)} | ({"num_class": 3} if t[2] == 3 else {}),
        data,
        ROUNDS,
        valid_sets=[data],
        feval=lightgbm_metric(*t),
        callbacks=[lgb.record_evaluation(log)],
    )
    return booster.predict(x), log["training"]["bi_tempered_loss"][-1]


def lgb_sklearn(x, y, *t, weight=None):
    model = lgb.LGBMClassifier(objective=lightgbm_objective(*t), n_estimators=ROUNDS, **LGB)
    model = pickle.loads(pickle.dumps(clone(model)))
    model.fit(
        x, y, sample_weight=weight, eval_set=[(x, y)], eval_sample_weight=[weight], eval_metric=lightgbm_metric(*t)
    )
    (log,) = model.evals_result_.values()
    return pickle.loads(pickle.dumps(model)).predict(x, raw_score=True), log["bi_tempered_loss"][-1]


INTERFACES = {
    "xgb native": xgb_native,
    "xgb sklearn": xgb_sklearn,
    "lgb native": lgb_native,
    "lgb sklearn": lgb_sklearn,
}
CLASSES = pytest.mark.parametrize(("y", "classes"), [(Y, 3), (BINARY, 2)], ids=["multiclass", "binary"])


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")  # LightGBM 4.7; before it, the only way
@pytest.mark.parametrize("interface", INTERFACES)
@CLASSES
def test_interfaces(interface, y, classes):
    """Each learns, reports the mean loss, agrees with the native one, and takes weights as it takes duplicates."""
    fit, t = INTERFACES[interface], (0.8, 1.2, classes)
    scores, reported = fit(X, y, *t, weight=WEIGHT)
    logits = scores.astype(float) if classes == 3 else np.stack([np.zeros(len(y)), scores], axis=1)
    assert np.mean(logits.argmax(1) == y) > 0.95
    mean = np.average(bt.bi_tempered_logistic_loss(logits, y, *t[:2]), weights=WEIGHT)
    assert reported == pytest.approx(mean, abs=2e-6)  # XGBoost hands on six digits
    native, _ = INTERFACES[interface[:3] + " native"](X, y, *t, weight=WEIGHT)
    np.testing.assert_allclose(scores, native, atol=1e-6)  # XGBoost's scores are float32
    scores, _ = fit(CELLS, y, *t, weight=WEIGHT)
    assert abs(scores - fit(CELLS, y, *t)[0]).max() > 1e-2
    repeated, _ = fit(np.repeat(CELLS, WEIGHT, axis=0), np.repeat(y, WEIGHT), *t)
    np.testing.assert_allclose(repeated, np.repeat(scores, WEIGHT, axis=0), atol=1e-5)  # float32 sums in other orders


@CLASSES
def test_what_the_wrappers_predict(y, classes):
    """XGBoost's classes are right and its probabilities are the ordinary softmax; LightGBM has raw scores for both."""
    t = (0.5, 1.5, classes)
    model = xgb.XGBClassifier(objective=xgboost_objective(*t), n_estimators=ROUNDS, **XGB).fit(X, y)
    scores = model.predict(X, output_margin=True)
    logits = scores if classes == 3 else np.stack([np.zeros(len(y)), scores], axis=1)
    np.testing.assert_array_equal(model.predict(X), logits.argmax(1))
    np.testing.assert_allclose(model.predict_proba(X), bt.tempered_softmax(logits, 1.0), atol=1e-6)
    model = lgb.LGBMClassifier(objective=lightgbm_objective(*t), n_estimators=ROUNDS, **LGB).fit(X, y)
    for predict in (model.predict, model.predict_proba):
        with pytest.warns(UserWarning, match="Returning raw scores instead"):
            np.testing.assert_array_equal(predict(X), model.predict(X, raw_score=True))


@CLASSES
def test_temperatures_of_one_give_the_trees_of_the_built_in_objectives(y, classes):
    multiclass = {"num_class": 3} if classes == 3 else {}
    data = xgb.DMatrix(CELLS, y, weight=WEIGHT)
    # base_score: where a custom objective starts, which for three classes is a constant of all.
    params = XGB | multiclass | {"objective": "multi:softprob" if multiclass else "binary:logistic", "base_score": 0.5}
    want = xgb.train(params, data, ROUNDS).predict(data, output_margin=True)
    got, _ = xgb_native(CELLS, y, 1.0, 1.0, classes, weight=WEIGHT)
    np.testing.assert_allclose(got, want, atol=1e-5)  # gradients are float32, and steps add up over rounds
    params = LGB | multiclass | {"objective": "multiclass" if multiclass else "binary", "boost_from_average": False}
    want = lgb.train(params, lgb.Dataset(CELLS, y, weight=WEIGHT), ROUNDS).predict(CELLS, raw_score=True)
    got, _ = lgb_native(CELLS, y, 1.0, 1.0, classes, weight=WEIGHT)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_gradient_equals_the_oracle_in_training(library):
    """In the float32 that the libraries take, at the scores that they hand over."""
    objective = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library](0.5, 1.5, 3)
    seen = []

    def recording(scores, data):
        gradient, h = objective(scores, data)
        seen.append((scores.copy(), gradient.astype(np.float32)))
        return gradient, h

    if library == "xgboost":
        xgb.train(XGB | {"num_class": 3}, xgb.DMatrix(X, Y), ROUNDS, obj=recording)
    else:
        lgb.train(LGB | {"num_class": 3, "objective": recording}, lgb.Dataset(X, Y), ROUNDS)
    scores, gradient = seen[-1]
    some = slice(None, None, 30)
    _, exact = exact_losses(scores[some], np.eye(3)[Y[some]], 0.5, 1.5)
    assert error(gradient[some], exact) <= 3e-6


def test_weights_multiply_gradient_and_h():
    a = LOGITS.copy()
    a[3] *= 100  # where h is at its floor
    for objective in FACTOR:
        gradient, h = objective(0.8, 1.2, 6)(INDEX, a)
        assert h.min() == 1e-16
        weighted = objective(0.8, 1.2, 6)(INDEX, a, np.array([0.0, 0.5, 1.0, 3.0]))
        for got, once in zip(weighted, (gradient, h), strict=True):
            np.testing.assert_array_equal(got, np.array([[0.0], [0.5], [1.0], [3.0]]) * once)


def test_the_metric_is_the_mean_loss():
    weight = np.array([1.0, 0.5, 2.0, 0.25])
    exact = exact_losses(LOGITS, np.eye(6)[INDEX], 0.8, 1.2)[0]
    mean = mp.fsum(exact) / 4
    weighted = mp.fsum(w * v for w, v in zip(weight, exact, strict=True)) / 3.75
    metric = xgboost_metric(0.8, 1.2, 6)
    assert error(metric(INDEX, LOGITS), [mean]) <= 1e-12
    assert error(metric(INDEX, LOGITS, sample_weight=weight), [weighted]) <= 1e-12
    name, value = metric(LOGITS, xgb.DMatrix(np.zeros((4, 1)), INDEX, weight=weight))
    assert name == metric.__name__ == "bi_tempered_loss"
    assert error(value, [weighted]) <= 1e-12
    metric = lightgbm_metric(0.8, 1.2, 6)
    data = lgb.Dataset(np.zeros((4, 1)), INDEX, weight=weight, params={"verbose": -1}).construct()
    for name, value, more_is_better in (metric(INDEX, LOGITS, weight), metric(LOGITS, data)):
        assert (name, more_is_better) == ("bi_tempered_loss", False)
        assert error(value, [weighted]) <= 1e-12
    assert error(metric(INDEX, LOGITS)[1], [mean]) <= 1e-12
    binary = exact_losses(np.array([[0.0, 1.5]]), np.array([[1.0, 0.0]]), 0.8, 1.2)[0]
    assert error(xgboost_metric(0.8, 1.2, 2)([0], [1.5]), binary) <= 1e-12


BAD = {
    "t1": ({"t1": 2.0, "t2": 3.0}, ValueError, r"t1 must be in \[0, 2\), got 2.0"),
    "t1 above t2": ({"t1": 1.2, "t2": 0.8}, ValueError, "t1 must not exceed t2, got t1 = 1.2 and t2 = 0.8"),
    "t2": ({"t2": math.nan}, ValueError, "t2 must be a finite number >= 0, got nan"),
    "text": ({"t2": "1.2"}, TypeError, "t2 must be a number, got str"),
    "one class": ({"num_class": 1}, ValueError, "num_class must be an integer >= 2, got 1"),
    "half a class": ({"num_class": 2.5}, ValueError, "num_class must be an integer >= 2, got 2.5"),
    "classes in words": ({"num_class": "3"}, ValueError, "num_class must be an integer >= 2, got '3'"),
    "names": ({"labels": ["a", "b", "c", "d"]}, ValueError, "indices, numbers from 0 to 5, got dtype <U1"),
    "objects": ({"labels": np.array(["a", 1, 2, 3], object)}, ValueError, "from 0 to 5, got dtype object"),
    "column": ({"labels": INDEX[:, None]}, ValueError, r"labels must have shape \(n,\), got \(4, 1\)"),
    "label": ({"labels": [0, 3, 5, 6]}, IndexError, "class indices from 0 to 5, got values from 0 to 6"),
    "negative label": ({"labels": [0, 3, 5, -1]}, IndexError, "class indices from 0 to 5, got values from -1 to 5"),
    "soft label": ({"labels": [0, 3, 5, 0.5]}, IndexError, "class indices from 0 to 5, got values from 0 to 5"),
    "nan label": ({"labels": [0, 3, 5, math.nan]}, IndexError, "class indices from 0 to 5, got values from nan"),
    "no num_class": (
        {"scores": LOGITS[:, 0]},
        ValueError,
        r"num_class = 6 needs scores of shape \(4, 6\) for 4 labels, got \(4,\): give the same num_class to",
    ),
    "transposed": ({"scores": LOGITS.T}, ValueError, r"shape \(4, 6\) for 4 labels, got \(6, 4\)"),
    "binary": ({"num_class": 2, "scores": LOGITS[:, :2]}, ValueError, r"shape \(4,\) .* give no num_class to"),
    "weights": ({"weight": np.ones(3)}, ValueError, r"one weight for each of the 4 labels, got shape \(3,\)"),
    "negative weight": ({"weight": [1, 1, 1, -0.5]}, ValueError, "finite numbers >= 0, got values from -0.5 to 1"),
    "nan weight": ({"weight": [1, 1, 1, math.nan]}, ValueError, "finite numbers >= 0, got values from nan to nan"),
    "infinite weight": ({"weight": [1, 1, 1, math.inf]}, ValueError, "numbers >= 0, got values from 1 to inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    options, exception, message = BAD[case]
    asked = {"t1": 0.8, "t2": 1.2, "num_class": 6, "labels": INDEX, "scores": LOGITS, "weight": None} | options
    t1, t2, num_class, labels, scores, weight = asked.values()
    for make in (xgboost_objective, lightgbm_objective, xgboost_metric, lightgbm_metric):
        with pytest.raises(exception, match=message):
            make(t1, t2, num_class)(labels, scores, weight)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_the_examples(library, monkeypatch):
    path = str(EXAMPLES / f"{library}_digits.py")
    native, by_classifier, accuracy = runpy.run_path(path)["main"]()
    assert accuracy > 0.8
    np.testing.assert_allclose(native.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(native, by_classifier, atol=1e-4)  # the same trees, in float32
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match=f"pip install {library}$"):
        runpy.run_path(path)


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")  # LightGBM 4.0 has no other
def test_early_stopping_sees_our_metric_alone():
    """With metric="None", as the docstring says; LightGBM's own log-loss would take raw scores for probabilities."""
    t = (0.8, 1.2, 3)
    told = {}
    model = lgb.LGBMClassifier(objective=lightgbm_objective(*t), metric="None", n_estimators=60, **LGB)
    model.fit(
        X[::2], Y[::2], eval_set=[(X[1::2], Y[1::2])], eval_metric=lightgbm_metric(*t),
        callbacks=[lgb.early_stopping(3, verbose=False), lgb.record_evaluation(told)],
    )  # fmt: skip
    (history,) = told.values()
    assert list(history) == ["bi_tempered_loss"]
    losses = history["bi_tempered_loss"]
    assert model.best_iteration_ == 1 + int(np.argmin(losses)) < 60
    scores = model.predict(X[1::2], raw_score=True, num_iteration=model.best_iteration_)
    want = bt.bi_tempered_logistic_loss(scores, Y[1::2], *t[:2]).mean()
    assert min(losses) == pytest.approx(want, rel=1e-12)


def test_no_labels_and_no_weight():
    for callable_ in (xgboost_objective(0.8, 1.2, 3), xgboost_metric(0.8, 1.2, 3)):
        with pytest.raises(ValueError, match="no labels"):
            callable_(np.zeros((len(X), 3)), xgb.DMatrix(X))
    for metric in (xgboost_metric(0.8, 1.2, 3), lightgbm_metric(0.8, 1.2, 3)):
        with pytest.raises(ValueError, match="weights of all 2 examples are 0"):
            metric([0, 1], np.zeros((2, 3)), [0.0, 0.0])


@pytest.mark.parametrize(("t1", "t2"), RESCALED)
def test_rescaled_gradient_h_and_metric_equal_the_oracle(t1, t2):
    logits = np.array([[0.3, -0.4, 0.1], [0.05, 0.0, -0.02]])
    labels, eye = np.array([2, 0]), np.eye(3)
    losses, gradients = rescaled_losses(logits, eye[labels], t1, t2)
    inner, outer = mp.mpf(3) ** (mp.mpf(t2) - 1), mp.mpf(3) ** (1 - mp.mpf(t1))
    curvature = [inner**2 * outer * h for a in logits.tolist() for h in mean_curvature([inner * x for x in a], t1, t2)]
    for objective, factor in ((xgboost_objective, 2), (lightgbm_objective, 3 / 2)):
        gradient, h = objective(t1, t2, 3, rescale=True)(labels, logits)
        assert error(gradient, gradients) <= 1e-12
        assert error(h / factor, curvature) <= 1e-11  # the product of three powers
    mean = sum(losses) / 2
    assert error([xgboost_metric(t1, t2, 3, rescale=True)(labels, logits)], [mean]) <= 1e-12
    assert error([lightgbm_metric(t1, t2, 3, rescale=True)(labels, logits)[1]], [mean]) <= 1e-12
    pairs = np.stack((np.zeros(2), logits[:, 0]), axis=1)
    losses, gradients = rescaled_losses(pairs, np.eye(2)[[0, 1]], t1, t2)
    for objective in FACTOR:
        assert error(objective(t1, t2, 2, rescale=True)([0, 1], logits[:, 0])[0], gradients[1::2]) <= 1e-12
    assert error([xgboost_metric(t1, t2, 2, rescale=True)([0, 1], logits[:, 0])], [sum(losses) / 2]) <= 1e-12


@pytest.mark.parametrize(("t1", "t2"), RESCALED)
def test_rescaled_first_round_is_that_of_the_logistic_loss(t1, t2):
    for objective in FACTOR:
        for classes, scores in ((2, np.zeros(2)), (10, np.zeros((2, 10)))):
            want = objective(1.0, 1.0, classes)([0, 1], scores)
            for got, same in zip(objective(t1, t2, classes, rescale=True)([0, 1], scores), want, strict=True):
                np.testing.assert_allclose(got, same, rtol=1e-11)


def test_rescaled_h_is_positive_and_finite_in_float32():
    """No leaf overflows: a gradient over its h, both as XGBoost stores them."""
    a = np.array([0.0, 0.1, 1.0, 10.0, 100.0, 1e4])[:, None] * np.random.default_rng(0).normal(size=(6, 6))
    for t1, t2 in [*RESCALED, (0.0, 10.0), (1.0, 38.0)]:
        for objective in FACTOR:
            gradient, h = objective(t1, t2, 6, rescale=True)(np.arange(6), a)
            assert (h > 0).all()
            assert np.isfinite(gradient / np.float32(h)).all()


def test_rescaled_options_are_checked_when_made():
    for make in (xgboost_objective, lightgbm_objective, xgboost_metric, lightgbm_metric):
        assert pickle.loads(pickle.dumps(make(0.8, 1.2, 3, rescale=True))) == make(0.8, 1.2, 3, rescale=True)
        with pytest.raises(TypeError, match="rescale must be True or False, got 'yes'"):
            make(0.8, 1.2, 3, rescale="yes")
        with pytest.raises(ValueError, match="more than 1e30 for 10 classes and t2 = 40"):
            make(0.8, 40.0, 10, rescale=True)


# Our classifiers: the libraries' own, that know our objectives.


def classifier(library, t1, t2, classes, **options):
    if library == "xgboost":
        objective = xgboost_objective(t1, t2, classes, rescale=options.pop("rescale", False))
        return boosting.XGBClassifier(objective=objective, n_estimators=ROUNDS, **XGB | options)
    objective = lightgbm_objective(t1, t2, classes, rescale=options.pop("rescale", False))
    return boosting.LGBMClassifier(objective=objective, n_estimators=ROUNDS, **LGB | options)


def raw_scores(library, model, x):
    return model.predict(x, **({"output_margin": True} if library == "xgboost" else {"raw_score": True}))


LIBRARIES = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


@LIBRARIES
@CLASSES
@pytest.mark.parametrize("rescale", [False, True])
def test_classifiers_predict_classes_and_tempered_probabilities(library, y, classes, rescale):
    model = classifier(library, 0.5, 1.5, classes, rescale=rescale)
    model = pickle.loads(pickle.dumps(clone(model).fit(X, y, sample_weight=WEIGHT)))
    scores = raw_scores(library, model, X).astype(float) * (classes**0.5 if rescale else 1)
    want = bt.tempered_softmax(scores, 1.5) if classes == 3 else bt.tempered_sigmoid(scores, 1.5)
    got = model.predict_proba(X)
    np.testing.assert_allclose(got if classes == 3 else got[:, 1], want, atol=1e-12)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), got.argmax(axis=1))
    assert model.score(X, y) > 0.95
    assert has_fit_parameter(model, "sample_weight")


@LIBRARIES
def test_classifiers_in_a_grid_search(library):
    """Temperatures and parameters together, by a score that needs probabilities."""
    make = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library]
    grid = {"objective": [make(t1, 1.2, 3) for t1 in (0.5, 1.0)], "n_estimators": [1, ROUNDS]}
    found = GridSearchCV(
        classifier(library, 0.8, 1.2, 3), grid, cv=3, scoring=["accuracy", "neg_log_loss"], refit="accuracy"
    )
    found.fit(X, Y)
    assert found.best_score_ > 0.9
    assert np.isfinite(found.cv_results_["mean_test_neg_log_loss"]).all()
    assert found.best_estimator_.predict_proba(X).shape == (150, 3)


@CLASSES
def test_a_loaded_model_keeps_the_objective_that_it_was_given(y, classes, tmp_path):
    """The file of XGBoost names an objective of its own, with another softmax."""
    model = classifier("xgboost", 0.8, 1.4, classes).fit(X, y)
    model.save_model(tmp_path / "model.json")
    loaded = classifier("xgboost", 0.8, 1.4, classes)
    loaded.load_model(tmp_path / "model.json")
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


@CLASSES
def test_a_file_of_the_native_interface_gives_classes(y, classes, tmp_path):
    """XGBoost's own classifier would cut its raw scores at 0.5, or its class numbers."""
    objective = xgboost_objective(0.8, 1.4, classes)
    options = {"base_score": 0, "eta": 0.05} | ({"num_class": classes} if classes > 2 else {})
    xgb.train(options, xgb.DMatrix(X, y), 3, obj=objective).save_model(tmp_path / "model.json")
    model = boosting.XGBClassifier(objective=objective)
    model.load_model(tmp_path / "model.json")
    np.testing.assert_array_equal(model.predict(X), model.predict_proba(X).argmax(axis=1))
    assert set(model.predict(X)) == set(range(classes))
    assert model.score(X, y) > 0.9


def test_lightgbm_names_its_classes():
    names = np.array(["setosa", "versicolor", "virginica"])[Y]
    model = classifier("lightgbm", 0.8, 1.2, 3).fit(X, names)
    assert model.score(X, names) > 0.95
    assert list(model.classes_) == ["setosa", "versicolor", "virginica"]


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")  # LightGBM 4.0 has no other
@LIBRARIES
@CLASSES
def test_classifiers_stop_early_by_our_metric_alone(library, y, classes):
    t, held = (0.8, 1.2, classes), {"eval_set": [(X[1::2], y[1::2])]}
    if library == "xgboost":
        model = classifier(library, *t, early_stopping_rounds=3).set_params(n_estimators=200)
        model.fit(X[::2], y[::2], verbose=False, **held)
        (history,), best, scores = (
            model.evals_result().values(),
            model.best_iteration,
            raw_scores(library, model, X[1::2]),
        )
        assert model.eval_metric is None  # as it was given
    else:
        model = classifier(library, *t).set_params(n_estimators=200)
        model.fit(X[::2], y[::2], callbacks=[lgb.early_stopping(3, verbose=False)], **held)
        (history,), best, scores = (
            model.evals_result_.values(),
            model.best_iteration_ - 1,
            raw_scores(library, model, X[1::2]),
        )
    assert list(history) == ["bi_tempered_loss"]
    losses = history["bi_tempered_loss"]
    assert best == int(np.argmin(losses)) < 199
    logits = scores.astype(float) if classes == 3 else np.stack([np.zeros(len(scores)), scores], axis=1)
    want = bt.bi_tempered_logistic_loss(logits, y[1::2], *t[:2]).mean()
    assert losses[best] == pytest.approx(want, abs=2e-6)  # XGBoost hands on six digits


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")
def test_classifiers_keep_metrics_that_are_asked_for():
    model = classifier("lightgbm", 0.8, 1.2, 3, metric="multi_error").fit(X, Y, eval_set=[(X, Y)])
    assert set(*model.evals_result_.values()) == {"multi_error", "bi_tempered_loss"}
    model = classifier("lightgbm", 0.8, 1.2, 3).fit(X, Y, eval_set=[(X, Y)], eval_metric="multi_error")
    assert set(*model.evals_result_.values()) == {"multi_error"}
    model = classifier("xgboost", 0.8, 1.2, 3, eval_metric="merror").fit(X, Y, eval_set=[(X, Y)], verbose=False)
    assert set(*model.evals_result().values()) == {"merror"}


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [(xgb.XGBClassifier, boosting.XGBClassifier, XGB), (lgb.LGBMClassifier, boosting.LGBMClassifier, LGB)],
)
@CLASSES
def test_classifiers_with_another_objective_are_the_libraries_own(theirs, ours, options, y, classes):
    model, same = (make(n_estimators=ROUNDS, **options).fit(X, y) for make in (ours, theirs))
    np.testing.assert_array_equal(model.predict_proba(X), same.predict_proba(X))
    np.testing.assert_array_equal(model.predict(X), same.predict(X))
    assert model.get_params() == same.get_params()


@pytest.mark.parametrize(("name", "library"), [("XGBClassifier", "xgboost"), ("LGBMClassifier", "lightgbm")])
def test_classifiers_say_what_is_missing(name, library, monkeypatch):
    monkeypatch.delitem(vars(boosting), name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{name} needs {library}: pip install {library}$"):
        getattr(boosting, name)
    with pytest.raises(AttributeError, match="has no attribute 'CatBoostClassifier'"):
        boosting.CatBoostClassifier  # noqa: B018
