"""Which labels are wrong: rank them by the predictions of a model that has not seen them.

    report = audit(BiTemperedMLPClassifier(), X, y)
    print(report)                                                 # the worst labels, and which classes are confused
    model.fit(X, y, sample_weight=~report.wrong)                  # train again without them,
    model.fit(X, report.cleaned)                                  # or with the suggested labels

`label_issues` does the same for probabilities that you have, from any framework; it needs NumPy alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitempered.checks import sum_tolerance
from bitempered.extras import install

__all__ = ["Audit", "audit", "label_issues"]

Array = NDArray[Any]

SCORES = ("posterior", "margin", "confidence")
CHUNK = 2**20  # probabilities in memory at a time: 4 MiB of float32
# A pair of classes is confused systematically if it has at least this share of its class, ...
RATE = 0.1
# ... this many labels, this many times the share of the errors that each class would have by chance, and this many
# standard deviations more: in a class of few rows chance alone makes three times the mean.
LABELS, TIMES, SIGMAS = 10, 3, 5


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What `label_issues` and `audit` found out about n labels of K classes.

    Attributes:
        labels: (n,) the labels as they were given.
        scores: (n,) from 0 to 1. 1: surely wrong.
        suggested: (n,) the class that the model takes to be right, which may be the label.
        order: (n,) the rows, worst first: `scores[order]` falls.
        confusion: (K, K) the estimated share of all rows that are of class i and labelled j: `confusion[i, j]`. It
            sums to 1, and its column sums are the shares of the labels.
        noise_rate: the estimated share of wrong labels, the sum of `confusion` off its diagonal.
        classes: (K,) the labels of the rows and columns of `confusion`.
    """

    labels: Array
    scores: Array
    suggested: Array
    order: Array
    confusion: Array
    noise_rate: float
    classes: Array

    @property
    def wrong(self) -> Array:
        """(n,) whether a label counts as wrong: its score is among the `noise_rate` highest, and another is suggested.

        `~wrong` is a `sample_weight` to train again with.
        """
        worst = np.zeros(len(self.labels), bool)
        worst[self.order[: round(self.noise_rate * len(self.labels))]] = True
        return worst & (self.suggested != self.labels)

    @property
    def cleaned(self) -> Array:
        """(n,) the labels, with the suggested ones in place of those that count as wrong.

        If few labels are wrong, the model may be wrong more often than the labels are: look at the worst before you
        use it.
        """
        return np.where(self.wrong, self.suggested, self.labels)

    @property
    def systematic(self) -> list[tuple[Any, Any, float]]:
        """The pairs of classes that labels confuse far more often than by chance: (class, label, share of the class).

        A pair counts if at least 10 % of the class and at least 10 rows have this label, and if it has more than
        3 / (K + 1) of the wrong labels of its class: about 3 times what it would have if they were spread over all
        others, and 5 standard deviations more than that. With two classes there is nothing to compare, and no pair
        counts. The most frequent comes first.
        """
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        of_class = self.confusion.sum(axis=1, keepdims=True)
        errors = wrong.sum(axis=1, keepdims=True)
        found = (wrong >= RATE * of_class) & (wrong * len(self.labels) > LABELS - 0.5)
        found &= wrong > TIMES / (len(self.classes) + 1) * errors * (1 + 1e-9)
        evenly = errors * len(self.labels) / (len(self.classes) - 1)
        found &= wrong * len(self.labels) > evenly + SIGMAS * np.sqrt(evenly)
        pairs = sorted(np.argwhere(found).tolist(), key=lambda pair: -wrong[pair[0], pair[1]])
        return [(self.classes[i], self.classes[j], float(wrong[i, j] / of_class[i, 0])) for i, j in pairs]

    def notes(self) -> list[str]:
        """Say in words how many labels seem wrong and whether classes are confused, and what follows from it."""
        n, wrong = len(self.labels), int(self.wrong.sum())
        count = "None counts as wrong here."
        if wrong:
            count = (
                f"{wrong:,} {'counts' if wrong == 1 else 'count'} as wrong here: the highest scores, where another "
                "label is suggested. The model errs too, so some of these may be right."
            )
        notes = [f"About {self.noise_rate:.1%} of the {n:,} labels seem to be wrong. {count}"]
        if self.noise_rate > 0.5:
            notes.append(
                "That is more than half. It is more likely that the model is too weak to judge these labels: trust the "
                "order more than the numbers, and do not use the suggested labels unseen."
            )
        if pairs := self.systematic:
            named = "; ".join(f"{share:.0%} of class {_shown(a)} are labelled {_shown(b)}" for a, b, share in pairs[:5])
            rest = f"; and {len(pairs) - 5} more pairs" if len(pairs) > 5 else ""
            notes.append(
                f"Classes are confused systematically: about {named}{rest}. Either these classes look alike, or "
                "whoever labelled them makes the same mistake again and again. A model can learn such mistakes, and "
                "validation labels that share them may then prefer it to a robust model: choose between models on "
                "labels that were checked by hand."
            )
        return notes

    def table(self, rows: int = 20, *, first: int = 0) -> str:
        """The worst labels as lines of text. `first` is the number of the first row."""
        worst = self.order[:rows]
        head = ("row", "label", "suggested", "score")
        lines = [
            (str(first + i), _shown(self.labels[i]), _shown(self.suggested[i]), f"{self.scores[i]:.3f}")
            for i in map(int, worst)
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in (head, *lines)
        )

    def __str__(self) -> str:
        return "\n".join([*self.notes(), "", self.table(10)])

    def __repr__(self) -> str:
        return f"Audit({len(self.labels)} labels, {len(self.classes)} classes, noise_rate={self.noise_rate:.3f})"


def label_issues(labels: ArrayLike, pred_probs: ArrayLike, *, score: str = "posterior") -> Audit:
    """Rank labels by how surely they are wrong, given probabilities p from a model that was not trained on them.

    With the probabilities of several epochs, p is their mean. At the last epoch a model may have memorised wrong
    labels; before, it contradicted them. So for a model that was trained on these labels, give all epochs.

    The score of a label y is

        "posterior"     m / (m + e (1 - m)),  m = (1 - q_y + max_{k != y} q_k) / 2,  q_k proportional to p_k T_ky
        "margin"        (1 - p_y + max_{k != y} p_k) / 2
        "confidence"     1 - p_y

    All are 1 if another class is certain. The last two rank as cleanlab's normalised margin and self-confidence do.
    The posterior knows which mistakes are common: T_ky is the probability that class k gets the label y, so by Bayes'
    rule q is the distribution of the class given the row and its label. T is the mean of the estimated confusion,
    C_ky / sum_j C_kj, and of a rate r = (n noise_rate + 1) / (n + 2) of wrong labels, spread evenly over all others; or
    the latter alone for a class that no row seems to belong to.
    With e = r / (1 - r) / (K - 1), the posterior is 1/2 where the label ties with one other class, as the margin is, if
    mistakes are spread evenly; confidence then ranks as well as any score can, if p is exact. For every score, the
    suggested class has the largest p; the label wins ties.

    The confusion C is estimated by counting (Northcutt, Jiang, Chuang, 2021). A row belongs to class k with confidence
    if p_k is at least the mean of p_k over the rows labelled k. Each row counts for the likeliest of those classes, if
    there is one, and the counts of each label are then scaled to its number of rows. Where classes overlap, the noise
    rate is too large, even for the best of models by about half of its own error rate.

    Args:
        labels: (n,) class numbers from 0 to K - 1.
        pred_probs: (n, K), or (epochs, n, K), of any floating-point dtype. It is read in pieces and never copied, so it
            may be a memory map.
        score: "posterior", "margin" or "confidence".

    >>> p = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.8, 0.2]])
    >>> found = label_issues([0, 1, 1, 1], p, score="margin")
    >>> found.order.tolist(), found.suggested.tolist(), found.scores.round(2).tolist()
    ([3, 2, 1, 0], [0, 1, 1, 0], [0.1, 0.2, 0.3, 0.8])

    Reference: Northcutt, Jiang, Chuang. Confident Learning: Estimating Uncertainty in Dataset Labels. JAIR 2021.
    Pleiss, Zhang, Elenberg, Weinberger. Identifying Mislabeled Data using the Area Under the Margin Ranking. NeurIPS
    2020, on margins over epochs.
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    probs = np.asarray(pred_probs)
    given = _check(labels, probs)
    probs = probs[None] if probs.ndim == 2 else probs
    n, classes = probs.shape[1:]

    own, other, suggested = np.empty(n), np.empty(n), np.empty(n, np.int64)
    for rows in _chunks(n, classes):
        own[rows], other[rows], suggested[rows] = _best(_mean(probs, rows), given[rows])
    confusion = _confusion(probs, given, own, np.maximum(own, other), suggested)
    noise_rate = float(min(1.0, max(0.0, 1 - np.trace(confusion))))

    if score == "posterior":
        rate = (n * noise_rate + 1) / (n + 2)  # never 0: then no label could be wrong
        likelihood = _likelihood(confusion, rate)
        for rows in _chunks(n, classes):
            part = _mean(probs, rows)
            part *= likelihood[given[rows]]
            part /= part.sum(axis=1, keepdims=True)
            own[rows], other[rows], _ = _best(part, given[rows])
    scores = 1 - own if score == "confidence" else (1 - own + other) / 2
    np.clip(scores, 0, 1, out=scores)
    if score == "posterior":
        scores /= scores + rate / (1 - rate) / (classes - 1) * (1 - scores)
    order = np.argsort(-scores, kind="stable")
    return Audit(given, scores, suggested, order, confusion, noise_rate, np.arange(classes))


def audit(estimator: Any, X: Any, y: Any, cv: Any = 5, *, score: str = "posterior") -> Audit:
    """Fit a scikit-learn classifier out of fold, and rank the labels y by its probabilities, as `label_issues` does.

    Labels may be of any type that scikit-learn takes; `suggested` and `classes` are of the same.

    Args:
        estimator: a classifier with `predict_proba`; it is cloned, not changed.
        X, y: the examples and their labels.
        cv: a number of stratified folds, drawn with a fixed seed, or a splitter of scikit-learn or its splits, which
            must cover all rows. With a splitter that repeats, probabilities are averaged: `RepeatedStratifiedKFold`
            takes more time, and ranks better.
        score: as in `label_issues`.
    """
    classes, given, probs = out_of_fold(estimator, X, y, cv)
    found = label_issues(given, probs, score=score)
    return replace(found, labels=classes[given], suggested=classes[found.suggested], classes=classes)


def out_of_fold(
    estimator: Any, X: Any, y: Any, cv: Any, progress: Callable[[int, int], object] = lambda done, total: None
) -> tuple[Array, Array, Array]:
    """Return the classes, the labels as their numbers, and probabilities (n, K) by fits that have not seen the row."""
    try:
        from sklearn.base import clone
        from sklearn.model_selection import StratifiedKFold, check_cv
        from sklearn.utils import _safe_indexing, column_or_1d, indexable
        from sklearn.utils.multiclass import check_classification_targets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"audit needs scikit-learn: {install('sklearn')}") from None

    if not hasattr(estimator, "predict_proba"):
        raise TypeError(f"estimator must have predict_proba, got {estimator!r}")
    X, y = indexable(X, column_or_1d(y))
    check_classification_targets(y)
    classes, given = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y must hold at least 2 classes, got {len(classes)}: {classes.tolist()}")
    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        rarest_count = np.bincount(given).min()
        if not 2 <= cv <= rarest_count:
            rare = classes[np.bincount(given).argmin()]
            raise ValueError(
                f"cv must be from 2 to the number of rows of the rarest class, {rarest_count} of {rare!r}, got {cv}; "
                "use fewer folds or leave out rare classes"
            )
        cv = StratifiedKFold(int(cv), shuffle=True, random_state=0)
    folds = list(check_cv(cv, y, classifier=True).split(X, y))
    probs, times = np.zeros((len(y), len(classes))), np.zeros(len(y), np.int64)
    for done, (train, test) in enumerate(folds, start=1):
        model = clone(estimator).fit(_safe_indexing(X, train), y[train])
        columns = np.searchsorted(classes, model.classes_)  # a class may be missing from the other folds
        probs[np.ix_(test, columns)] += model.predict_proba(_safe_indexing(X, test))
        times[test] += 1
        progress(done, len(folds))
    if not times.all():
        raise ValueError(
            f"the splits of cv must cover all rows, but {np.count_nonzero(times == 0)} are in no test fold"
        )
    probs /= times[:, None]
    return classes, given, probs


def _check(labels: ArrayLike, probs: Array) -> Array:
    """Check both arrays, values included, and return the labels as int64."""
    given = np.asarray(labels)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"labels must be a one-dimensional array of class numbers, got shape {given.shape} and dtype "
            f"{given.dtype}; number other labels with np.unique(labels, return_inverse=True)"
        )
    if probs.ndim not in (2, 3) or not np.issubdtype(probs.dtype, np.floating):
        raise ValueError(
            "pred_probs must be floating-point numbers of shape (n, K) or (epochs, n, K), "
            f"got shape {probs.shape} and dtype {probs.dtype}"
        )
    n, classes = probs.shape[-2:]
    if len(given) != n or not probs.size or classes < 2:
        raise ValueError(
            f"pred_probs must have a row for each of the {len(given)} labels and at least 2 classes, got shape "
            f"{probs.shape}"
        )
    if given.min() < 0 or given.max() >= classes:
        raise ValueError(
            f"labels must be in [0, {classes}), since pred_probs has {classes} columns, "
            f"got labels from {given.min()} to {given.max()}"
        )
    tolerance = sum_tolerance(probs.dtype.itemsize)
    for epoch in probs if probs.ndim == 3 else probs[None]:
        for rows in _chunks(n, classes):
            part = epoch[rows]
            with np.errstate(invalid="ignore"):  # the sum of both infinities
                total = part.sum(axis=1, dtype=np.promote_types(part.dtype, np.float32))
            # NaN fails every comparison.
            good = (abs(total - 1) <= tolerance) & (part.min(axis=1) >= -tolerance)
            for row in np.flatnonzero(~good)[:1]:
                raise ValueError(
                    f"each row of pred_probs must hold probabilities that sum to 1, got {_shorten(part[row])} with sum "
                    f"{total[row]:g} in row {rows.start + row}; for logits, apply the model's softmax first"
                )
    return given.astype(np.int64)


def _shown(label: Any) -> str:
    """Return a label in one short line, in which nothing moves the cursor."""
    text = "".join(c if c.isprintable() else " " for c in str(label))
    return text if len(text) <= 40 else text[:39] + "…"


def _shorten(values: Array) -> str:
    text = ", ".join(f"{value:g}" for value in values[:4])
    return f"({text}{', ...' if len(values) > 4 else ''})"


def _chunks(n: int, classes: int) -> Iterator[slice]:
    size = max(1, CHUNK // classes)
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def _mean(probs: Array, rows: Any) -> Array:
    """Return a new array: the mean over the epochs of some rows, in at least single precision."""
    total = probs[0, rows].astype(np.promote_types(probs.dtype, np.float32))
    for epoch in probs[1:]:
        total += epoch[rows]
    total /= len(probs)
    return total


def _best(part: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return the label's probability, the largest of another class, and the likeliest class. Destroys `part`."""
    row = np.arange(len(labels))
    own = part[row, labels]
    part[row, labels] = -np.inf
    likeliest = part.argmax(axis=1)
    other = part[row, likeliest]
    return own, other, np.where(own >= other, labels, likeliest)


def _confusion(probs: Array, labels: Array, own: Array, largest: Array, suggested: Array) -> Array:
    """Estimate the joint distribution of class and label, as `label_issues` describes."""
    n, classes = probs.shape[1:]
    count = np.bincount(labels, minlength=classes)
    with np.errstate(invalid="ignore", divide="ignore"):
        threshold = np.bincount(labels, own, minlength=classes) / count
    threshold[count == 0] = np.inf  # nobody gave this label
    # If all rows of a label have one probability, rounding must not lift their mean above it.
    threshold *= 1 - 8 * np.finfo(np.promote_types(probs.dtype, np.float32)).eps

    belongs = np.where(largest >= threshold[suggested], suggested, -1)
    # Where the likeliest class is not confident, another one may be.
    unsure = np.flatnonzero(belongs < 0)
    for piece in _chunks(len(unsure), classes):
        rows = unsure[piece]
        part = _mean(probs, rows)
        part[part < threshold] = -1
        mine = part[np.arange(len(rows)), labels[rows]]
        likeliest = part.argmax(axis=1)
        highest = part.max(axis=1)
        belongs[rows] = np.where(highest < 0, -1, np.where(mine >= highest, labels[rows], likeliest))

    counted = belongs >= 0
    # At least one row of each label is counted, the one whose probability of its label is largest.
    share = count / np.maximum(1, np.bincount(labels[counted], minlength=classes)) / n
    cells = belongs[counted] * classes + labels[counted]
    return np.bincount(cells, share[labels[counted]], minlength=classes**2).reshape(classes, classes)


def _likelihood(confusion: Array, rate: float) -> Array:
    """Return P(label y | class k) at [y, k] up to a factor, given the rate of errors, as `label_issues` describes."""
    classes = len(confusion)
    evenly = rate / (classes - 1)
    of_class = confusion.sum(axis=1)
    empty = of_class == 0
    of_class[empty] = 1
    likelihood = np.array(confusion.T, np.float32, order="C")
    likelihood /= of_class
    likelihood += evenly
    likelihood[np.diag_indices(classes)] += 1 - rate - evenly
    likelihood[:, empty] *= 2  # the other classes have two summands
    return likelihood
