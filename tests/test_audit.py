"""bitempered.audit: against its documentation in plain loops, and the Bayes posterior of Gaussian classes."""

import tracemalloc

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, RepeatedStratifiedKFold, ShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bitempered import audit as module
from bitempered import noise
from bitempered.audit import Audit, audit, label_issues
from bitempered.sklearn import BiTemperedLogisticRegression


def by_hand(labels, probs, score):
    """Scores, suggestions and confusion as `label_issues` documents them, one number at a time."""
    probs = np.asarray(probs, np.float64)
    p = [[float(np.mean(probs[:, i, k])) for k in range(probs.shape[2])] for i in range(probs.shape[1])]
    n, classes = len(p), len(p[0])
    suggested = []
    for row, y in zip(p, labels, strict=True):
        other = max(row[k] for k in range(classes) if k != y)
        suggested.append(y if row[y] >= other else row.index(max(row)))
    confusion = np.zeros((classes, classes))
    members = {k: [p[i][k] for i in range(n) if labels[i] == k] for k in range(classes)}
    threshold = {k: sum(own) / len(own) - 1e-9 for k, own in members.items() if own}
    for row, y in zip(p, labels, strict=True):
        sure = {k: row[k] for k in threshold if row[k] >= threshold[k]}
        if sure:
            best = max(sure.values())
            confusion[y if sure.get(y) == best else min(k for k in sure if sure[k] == best), y] += 1
    for j, own in members.items():
        if own:
            confusion[:, j] *= len(own) / confusion[:, j].sum() / n
    rate = (n * (1 - np.trace(confusion)) + 1) / (n + 2)
    scores = []
    for row, y in zip(p, labels, strict=True):
        q = row
        if score == "posterior":
            q = []
            for k in range(classes):
                of_class = sum(confusion[k])
                even = 1 - rate if k == y else rate / (classes - 1)
                q.append(row[k] * ((confusion[k, y] / of_class + even) / 2 if of_class else even))
            q = [value / sum(q) for value in q]
        margin = (1 - q[y] + max(q[k] for k in range(classes) if k != y)) / 2
        tie = rate / (1 - rate) / (classes - 1)
        scores.append(
            {
                "confidence": 1 - q[y],
                "margin": margin,
                "posterior": margin / (margin + tie * (1 - margin)),
            }[score]
        )
    return scores, suggested, confusion


def random_case(seed, epochs=1, n=60, classes=5, dtype=np.float64):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(classes, 0.3), (epochs, n)).astype(dtype)
    return rng.integers(0, classes, n), probs


# Two classes: no third to fall back on; a class that no row has; several epochs; half precision, with its tolerance.
@pytest.mark.parametrize("score", module.SCORES)
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ({"classes": 2}, 1e-12),
        ({"classes": 5}, 1e-12),
        ({"classes": 40}, 1e-12),
        ({"epochs": 4}, 1e-12),
        ({"epochs": 3, "dtype": np.float32}, 1e-6),
        ({"dtype": np.float16}, 1e-6),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_against_plain_loops(seed, case, tolerance, score):
    labels, probs = random_case(seed, **case)
    found = label_issues(labels, probs if len(probs) > 1 else probs[0], score=score)
    scores, suggested, confusion = by_hand(labels.tolist(), probs, score)
    # The likelihoods of "posterior" are in single precision.
    np.testing.assert_allclose(found.scores, scores, atol=max(tolerance, 1e-6) if score == "posterior" else tolerance)
    assert found.suggested.tolist() == suggested
    np.testing.assert_allclose(found.confusion, confusion, atol=tolerance)
    assert found.noise_rate == pytest.approx(1 - np.trace(confusion), abs=tolerance)
    assert (np.diff(found.scores[found.order]) <= 0).all()
    assert sorted(found.order) == list(range(len(labels)))


def test_confusion_adds_up():
    labels, probs = random_case(0, n=500)
    confusion = label_issues(labels, probs).confusion
    np.testing.assert_allclose(confusion.sum(axis=0), np.bincount(labels, minlength=5) / 500, atol=1e-12)


@pytest.mark.parametrize("epochs", [1, 3])
def test_pieces_change_nothing(epochs, monkeypatch):
    labels, probs = random_case(1, epochs, n=101)
    whole = label_issues(labels, probs)
    monkeypatch.setattr(module, "CHUNK", 7 * 5)
    pieces = label_issues(labels, probs)
    for name in ("scores", "suggested", "order", "confusion"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_model_that_knows_nothing_finds_nothing(dtype):
    labels, probs = np.arange(70) % 7, np.full((70, 7), 1 / 7, dtype)
    found = label_issues(labels, probs)
    assert found.noise_rate == pytest.approx(0, abs=1e-12)
    assert not found.wrong.any()
    assert np.ptp(found.scores) < 1e-6
    np.testing.assert_allclose(label_issues(labels, probs, score="margin").scores, 0.5)


def test_the_label_wins_ties_below_an_unsure_class():
    probs = np.array([[0.3, 0.3, 0.4], [0.3, 0.3, 0.4], [0.05, 0.0, 0.95]])  # 0.4 is not confident for the last class
    found = label_issues([0, 1, 2], probs)
    np.testing.assert_allclose(found.confusion, np.eye(3) / 3)
    assert found.suggested.tolist() == [2, 2, 2]


def gaussian_classes(apart=3, classes=6, n=6000, seed=0):
    """Classes and the posterior of Gaussian classes on a circle, so many standard deviations from their neighbours."""
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * np.arange(classes) / classes
    centres = apart * np.stack((np.cos(angle), np.sin(angle)), axis=1)
    truth = rng.integers(0, classes, n)
    points = centres[truth] + rng.normal(size=(n, 2))
    weight = np.exp(-((points[:, None] - centres) ** 2).sum(axis=2) / 2)
    return truth, weight / weight.sum(axis=1, keepdims=True)


def moved(classes, rate, to):
    """The matrix of P(label | class) with `rate` spread evenly over the classes that are `to` steps ahead."""
    matrix = np.eye(classes) * (1 - rate)
    for step in to:
        matrix += np.roll(np.eye(classes), step, axis=1) * rate / len(to)
    return matrix


@pytest.mark.parametrize("apart", [3, 4, 6])  # the posterior errs on 13 %, 4 % and 0.2 % of the points
@pytest.mark.parametrize("rate", [0.1, 0.4])
@pytest.mark.parametrize("to", [range(1, 6), (1,)], ids=["symmetric", "pair-flip"])
@pytest.mark.parametrize("model", ["of the classes", "of the labels"])
def test_known_noise_is_estimated(apart, rate, to, model):
    """By the posterior of the true classes, as of a robust model, and of the labels, as of a calibrated one."""
    truth, posterior = gaussian_classes(apart)
    errs = np.mean(posterior.argmax(axis=1) != truth)
    matrix = moved(6, rate, to)
    rng = np.random.default_rng(1)
    labels = np.array([rng.choice(6, p=matrix[c]) for c in truth])
    found = label_issues(labels, posterior if model == "of the classes" else posterior @ matrix)
    joint = np.zeros((6, 6))
    np.add.at(joint, (truth, labels), 1 / len(labels))
    # As documented, up to half of what the model errs on; and 2 of 1,000 rows by chance.
    assert -0.002 < found.noise_rate - np.mean(truth != labels) < errs / 2 + 0.002
    assert abs(found.confusion - joint).sum() / 2 < 0.55 * errs + 0.002


def test_the_posterior_ranks_as_well_as_bayes():
    """Confidence orders symmetric noise as the probability that a label is wrong does, and the others nearly so."""
    truth, posterior = gaussian_classes()
    labels = noise.symmetric(truth, 0.4, rng=np.random.default_rng(1), num_classes=6)
    wrong, own = labels != truth, posterior[np.arange(len(truth)), labels]
    # P(label wrong | point, label): the label is one of 5 others with probability 0.4, and right with 0.6.
    best = roc_auc_score(wrong, 0.08 * (1 - own) / (0.08 * (1 - own) + 0.6 * own))
    for score in module.SCORES:
        found = label_issues(labels, posterior, score=score)
        found_auroc = roc_auc_score(wrong, found.scores)
        assert found_auroc == pytest.approx(best, abs=1e-9 if score == "confidence" else 0.02)
        cleaned = np.mean(found.cleaned == truth)
        assert cleaned > 0.85 > 0.6 == np.mean(labels == truth)


def test_known_mistakes_are_looked_for():
    """Half of class 0 is labelled 1, and the model is unsure of the label between 1 and 0 or 1 and 2."""
    truth, posterior = gaussian_classes(apart=2, n=4000)
    labels = np.where((truth == 0) & (np.arange(4000) % 2 == 0), 1, truth)
    wrong, auroc = labels != truth, {}
    for score in module.SCORES:
        found = label_issues(labels, posterior, score=score)
        auroc[score] = roc_auc_score(wrong, found.scores)
    # By Bayes' rule: a label 1 is wrong if the class is 0; other labels are right.
    mistaken = np.where(labels == 1, 0.5 * posterior[:, 0], 0)
    best = roc_auc_score(wrong, mistaken / (mistaken + posterior[:, 1]))
    assert auroc["margin"] + 0.02 < auroc["posterior"] <= best
    assert auroc["confidence"] + 0.02 < auroc["posterior"]


def test_all_epochs_remember_what_the_last_has_memorised():
    truth, posterior = gaussian_classes(n=600)
    labels = noise.symmetric(truth, 0.4, rng=np.random.default_rng(1), num_classes=6)
    memorised = np.eye(6)[labels]
    epochs = np.stack([(1 - w) * posterior + w * memorised for w in np.linspace(0, 1, 5)])
    assert label_issues(labels, epochs[-1]).noise_rate == 0
    assert roc_auc_score(labels != truth, label_issues(labels, epochs).scores) > 0.95


def test_memory_is_that_of_the_input():
    labels, probs = random_case(0, n=40_000, classes=500, dtype=np.float32)
    tracemalloc.start()
    found = label_issues(labels, probs[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.order) == 40_000
    assert peak < 0.3 * probs.nbytes


def test_the_input_is_not_changed():
    labels, probs = random_case(0)
    before = labels.copy(), probs.copy()
    probs.flags.writeable = labels.flags.writeable = False
    label_issues(labels, probs[0])
    label_issues(labels, probs)
    np.testing.assert_array_equal(labels, before[0])
    np.testing.assert_array_equal(probs, before[1])


GOOD = np.full((3, 2), 0.5)


@pytest.mark.parametrize(
    ("labels", "probs", "message"),
    [
        ([0, 1], GOOD, "a row for each of the 2 labels"),
        ([[0], [1], [1]], GOOD, "one-dimensional array of class numbers"),
        (["a", "b", "a"], GOOD, r"dtype <U1; number other labels with np.unique"),
        ([0.0, 1.0, 1.0], GOOD, "dtype float64"),
        ([0, 1, 2], GOOD, r"labels must be in \[0, 2\), since pred_probs has 2 columns, got labels from 0 to 2"),
        ([0, 1, -1], GOOD, "got labels from -1 to 1"),
        ([0, 1, 1], GOOD[0], r"shape \(n, K\) or \(epochs, n, K\), got shape \(2,\)"),
        ([0, 1, 1], np.ones((3, 2), int), "dtype int64"),
        ([0, 0, 0], np.ones((3, 1)), "at least 2 classes"),
        (np.zeros(0, int), np.ones((0, 2)), "at least 2 classes"),
        ([0, 1, 1], np.array([[0.5, 0.5], [0.5, np.nan], [1, 0]]), r"\(0.5, nan\) with sum nan in row 1"),
        ([0, 1, 1], np.array([[np.inf, -np.inf], [1, 0], [1, 0]]), r"\(inf, -inf\) with sum nan in row 0"),
        ([0, 1, 1], np.array([[0.5, 0.5], [0.5, 0.5], [2.5, -1.5]]), r"\(2.5, -1.5\) with sum 1 in row 2"),
        ([0, 1, 1], np.array([[0.5, 0.5], [3.0, 1.0], [1, 0]]), r"sum 4 in row 1; for logits, apply the model's"),
        ([0, 1, 1], np.stack([GOOD, GOOD * 2]), "sum 2 in row 0"),
    ],
)
def test_bad_input(labels, probs, message):
    with pytest.raises(ValueError, match=message):
        label_issues(labels, probs)


def test_bad_score():
    with pytest.raises(ValueError, match="score must be one of posterior, margin, confidence, got 'entropy'"):
        label_issues([0, 1, 1], GOOD, score="entropy")


def of_confusion(confusion, n=1000):
    """An audit with nothing but a confusion."""
    confusion = np.asarray(confusion, float)
    names = np.array([f"c{i}" for i in range(len(confusion))])
    rows = np.zeros(n)
    return Audit(rows, rows, rows, np.arange(n), confusion, 1 - np.trace(confusion), names)


def test_systematic_confusion_is_named():
    confusion = np.eye(5) / 5
    confusion[1] = [0, 0.12, 0.08, 0, 0]
    [(true, label, share)] = of_confusion(confusion).systematic
    assert (true, label) == ("c1", "c2")
    assert share == pytest.approx(0.4)
    said = " ".join(of_confusion(confusion).notes())
    assert "40% of class c1 are labelled c2" in said
    assert "checked by hand" in said


@pytest.mark.parametrize(
    ("confusion", "n"),
    [
        (moved(6, 0.4, range(1, 6)) / 6, 1000),  # spread over all others
        (moved(2, 0.4, (1,)) / 2, 1000),  # two classes: nothing to compare
        (moved(6, 0.08, (1,)) / 6, 100_000),  # rare
        (moved(6, 0.2, (1,)) / 6, 200),  # too few rows: 7 of each pair
    ],
)
def test_other_noise_is_not_called_systematic(confusion, n):
    assert of_confusion(confusion, n).systematic == []
    assert len(of_confusion(confusion, n).notes()) == 1


def test_chance_is_not_called_systematic():
    """Symmetric noise in classes of 100 rows: among 90 pairs some are three times as frequent as the mean."""
    truth, alarms = np.repeat(np.arange(10), 100), 0
    for seed in range(50):
        labels = noise.symmetric(truth, 0.4, rng=np.random.default_rng(seed), num_classes=10)
        confusion = np.zeros((10, 10))
        np.add.at(confusion, (truth, labels), 1e-3)
        alarms += bool(of_confusion(confusion).systematic)
    assert alarms <= 2


@pytest.mark.parametrize(("rate", "said"), [(0.45, False), (0.6, True)])
def test_a_model_that_contradicts_most_labels_is_doubted(rate, said):
    found = of_confusion(moved(6, rate, range(1, 6)) / 6)
    assert ("too weak to judge" in " ".join(found.notes())) == said


def test_wrong_and_cleaned_by_hand():
    scores, order = np.array([0.1, 0.9, 0.8, 0.7]), np.array([1, 2, 3, 0])
    labels, suggested = np.array(["a", "a", "b", "b"]), np.array(["a", "b", "b", "a"])
    found = Audit(labels, scores, suggested, order, np.eye(2) / 2, 0.5, np.array(["a", "b"]))
    # Half of four rows, and the second of them keeps its label.
    assert found.wrong.tolist() == [False, True, False, False]
    assert found.cleaned.tolist() == ["a", "b", "b", "b"]
    assert found.table(2).splitlines() == [
        "row  label  suggested  score",
        "  1      a          b  0.900",
        "  2      b          b  0.800",
    ]
    assert repr(found) == "Audit(4 labels, 2 classes, noise_rate=0.500)"
    assert "1 count" in str(found)


def noisy_iris(seed=0):
    X, y = load_iris(return_X_y=True)
    return X, y, noise.symmetric(y, 0.2, rng=np.random.default_rng(seed), num_classes=3)


@pytest.mark.parametrize("kind", ["numbers", "strings", "objects", "negative"])
def test_labels_of_any_type(kind):
    X, _, labels = noisy_iris()
    names = {"numbers": [0, 1, 2], "strings": ["a", "b", "c"], "objects": ["a", "b", "c"], "negative": [-7, 3, 5]}[kind]
    given = np.array(names, object if kind == "objects" else None)[labels]
    model = make_pipeline(StandardScaler(), BiTemperedLogisticRegression())
    found, plain = audit(model, X, given), audit(model, X, labels)
    np.testing.assert_array_equal(found.order, plain.order)
    assert found.suggested.tolist() == [names[i] for i in plain.suggested]
    assert found.cleaned.tolist() == [names[i] for i in plain.cleaned]
    assert found.classes.tolist() == names
    assert found.labels.tolist() == given.tolist()


def test_wrong_labels_of_iris_are_found():
    X, truth, labels = noisy_iris()
    model = BiTemperedLogisticRegression()
    found = audit(model, X, labels)
    assert roc_auc_score(labels != truth, found.scores) > 0.95
    assert not hasattr(model, "coef_")  # a clone was fitted
    assert np.mean(found.cleaned == truth) > 0.9
    # What the audit gives goes into a fit.
    for again in (clone(model).fit(X, labels, sample_weight=~found.wrong), clone(model).fit(X, found.cleaned)):
        assert again.score(X, truth) > 0.9


def test_probabilities_are_out_of_fold_and_averaged():
    X, _, labels = noisy_iris()
    model = LogisticRegression(max_iter=1000)
    cv = RepeatedStratifiedKFold(n_splits=3, n_repeats=2, random_state=0)
    expected = np.zeros((150, 3))
    for train, test in cv.split(X, labels):
        expected[test] += clone(model).fit(X[train], labels[train]).predict_proba(X[test]) / 2
    for score in module.SCORES:
        found = audit(model, X, labels, cv, score=score)
        np.testing.assert_allclose(found.scores, label_issues(labels, expected, score=score).scores, atol=1e-12)


def test_a_class_that_a_fold_has_not_seen():
    X, y = load_iris(return_X_y=True)  # sorted by class: each of three folds is a class
    found = audit(LogisticRegression(max_iter=1000), X, y, KFold(3))
    assert (found.suggested != y).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"estimator": RidgeClassifier()}, TypeError, "must have predict_proba, got RidgeClassifier"),
        ({"y": np.zeros(150)}, ValueError, "at least 2 classes"),
        ({"y": np.linspace(0, 1, 150)}, ValueError, "continuous"),
        ({"cv": 51}, ValueError, "cv must be from 2 to .* 50 of .*, got 51"),
        ({"cv": 1}, ValueError, "cv must be from 2"),
        ({"cv": ShuffleSplit(2, random_state=0)}, ValueError, "must cover all rows"),
        ({"X": np.zeros((3, 2))}, ValueError, "inconsistent numbers of samples"),
        ({"score": "entropy"}, ValueError, "score must be one of"),
    ],
)
def test_bad_arguments_of_audit(arguments, error, message):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(error, match=message):
        audit(**{"estimator": LogisticRegression(max_iter=1000), "X": X, "y": y} | arguments)
