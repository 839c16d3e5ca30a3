"""What the two classifiers share: checking examples, predicting, and saying that a fit has not learnt."""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from bitempered.checks import value_range
from bitempered.diagnosis import learning_problem
from bitempered.encoding import factors
from bitempered.numpy import tempered_log_softmax, tempered_softmax

Array = NDArray[Any]


class TemperedClassifier(ClassifierMixin, BaseEstimator):
    """The base of both classifiers. Two classes have one logit: that of classes_[1], against 0."""

    rescale: bool

    def _examples(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        dtype: Any,
        *,
        classes: ArrayLike | None = None,
        known: Array | None = None,
    ) -> tuple[Any, Array, Array]:
        """Return X, class indices and weights, without the examples of weight 0. Sets `classes_`.

        The classes are those of y, unless y is a batch: then `classes` if given, and those `known` from earlier ones.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=dtype, reset=known is None)
        check_classification_targets(y)
        wanted = known if classes is None else all_classes(classes)
        if wanted is not None and known is not None and not np.array_equal(wanted, known):
            raise ValueError(f"classes must be those of the first call, {known.tolist()}, got {wanted.tolist()}")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if wanted is not None:
            if not np.isin(self.classes_, wanted).all():
                more = np.setdiff1d(self.classes_, wanted).tolist()
                raise ValueError(f"y must hold only the classes {wanted.tolist()}, got {more} as well")
            self.classes_, labels = wanted, np.searchsorted(wanted, self.classes_)[labels]
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least 2 classes, got 1 class: {self.classes_.tolist()[0]!r}")
        if sample_weight is None:
            return X, labels, np.ones(len(labels))
        weight = check_array(sample_weight, dtype=np.float64, ensure_2d=False, input_name="sample_weight")
        if weight.shape != labels.shape:
            raise ValueError(f"sample_weight must have shape {labels.shape}, one per example, got {weight.shape}")
        check_weights(weight, "sample_weight")
        kept = weight > 0
        return (X, labels, weight) if kept.all() else (X[kept], labels[kept], weight[kept])

    @contextmanager
    def _restored_if_it_fails(self) -> Iterator[dict[str, Any]]:
        """Yield the attributes. If fitting fails, a model that was fitted before still predicts as it did."""
        before = dict(vars(self))
        try:
            yield before
        except BaseException:
            self.__dict__ = before
            raise

    @property
    def _rescale(self) -> bool:
        """The parameter `rescale`. A grid made from a NumPy array has booleans of NumPy's."""
        return bool(self.rescale) if isinstance(self.rescale, np.bool_) else self.rescale

    def _fitted_at(self, t1: float, t2: float) -> None:
        """Store the temperatures of the fit and the factor of its logits: the parameters may change later."""
        self.t1_, self.t2_ = t1, t2
        self.scale_, _ = factors(self._rescale, len(self.classes_), t1, t2)

    def _warn_unless_learnt(self, logits: Array, labels: Array, weight: Array, advice: str) -> None:
        """Warn of a `learning_problem` with the training examples; not at (1, 1), as in scikit-learn."""
        if (self.t1_, self.t2_) == (1, 1):
            return
        best = all_logits(logits).argmax(axis=1)
        given = None if np.ptp(weight) == 0 else weight
        problem = learning_problem(labels, best, len(self.classes_), names=self.classes_, weight=given)
        if problem is not None:
            warnings.warn(
                f"the fit at temperatures ({self.t1_:g}, {self.t2_:g}) has not learnt all classes: {problem}."
                f" Try {advice}",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _logits(self, X: Any) -> Array:
        raise NotImplementedError

    def decision_function(self, X: Any) -> Array:
        """The logits: (n, K), or (n) for two classes, where a positive one means classes_[1]."""
        logits = self._logits(X)
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def predict(self, X: Any) -> Array:
        """The class of the largest logit, which has the largest probability."""
        best = all_logits(self._logits(X)).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Array:
        """The probabilities (n, K) of `classes_`: the tempered softmax of `scale_` times the logits, at `t2_`."""
        logits = all_logits(self._logits(X))
        return tempered_softmax(self.scale_ * logits, self.t2_)

    def predict_log_proba(self, X: Any) -> Array:
        """The natural logarithm of `predict_proba`; -inf outside a finite support (t2 < 1)."""
        logits = all_logits(self._logits(X))
        return tempered_log_softmax(self.scale_ * logits, self.t2_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def all_logits(logits: Array) -> Array:
    return np.hstack((np.zeros_like(logits), logits)) if logits.shape[1] == 1 else logits


def all_classes(given: Any) -> Array:
    """Return the classes that `partial_fit` was given, sorted."""
    labels = given if isinstance(given, np.ndarray) else list(given) if isinstance(given, Iterable) else None
    if labels is None or np.ndim(labels) != 1 or any(label is None or label != label for label in labels):
        raise ValueError(f"classes must be a list of labels, none of them missing, got {given!r}")
    return np.unique(labels)


def check_weights(weight: Array, name: str) -> None:
    if not (weight.min() >= 0 and 0 < weight.max() < math.inf):
        raise ValueError(f"{name} must hold finite numbers >= 0, not all of them zero, got {value_range(weight)}")


def check_positive(value: Any, name: str) -> None:
    try:
        positive = isinstance(value, Real) and float(value) > 0
    except OverflowError:  # an integer beyond float64
        positive = False
    if not positive:
        raise ValueError(f"{name} must be a number > 0, got {value!r:.80}")


def check_count(value: Any, name: str) -> None:
    if not (isinstance(value, Integral) and int(value) >= 1):
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
