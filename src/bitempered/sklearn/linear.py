"""Logistic regression with the bi-tempered loss, by L-BFGS."""

import math
import warnings
from collections.abc import Callable
from functools import cached_property
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import compute_class_weight
from sklearn.utils.validation import check_is_fitted, validate_data

from bitempered import core
from bitempered.checks import check_number, check_temperatures
from bitempered.encoding import encode_classes, factors, namespace
from bitempered.sklearn.base import Array, TemperedClassifier, check_count, check_positive, check_weights

RENEW = 30  # iterations with one preconditioner: half as many in all as with one for the whole last step
_ADVICE = "a larger C, temperatures nearer to 1, rescale=True, or scaled features"


class BiTemperedLogisticRegression(TemperedClassifier):
    """Logistic regression with the bi-tempered loss, which is less sensitive to outliers and wrong labels.

    It minimises

        C * sum_i w_i bi_tempered_logistic_loss(x_i @ coef_.T + intercept_, y_i, t1, t2, rescale)  +  norm(coef_)^2 / 2,

    which at t1 = t2 = 1 is the objective of `sklearn.linear_model.LogisticRegression`. For t1 = t2 >= 1 it is convex.
    For other pairs the temperatures move in steps from (1, 1), each starting at the solution of the last. The result is
    a local minimum, the same in every run. If outliers are many and far, that minimum may follow them.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        C: the weight of the loss against the penalty, > 0.
        fit_intercept: whether there is an intercept, which is not penalised.
        class_weight: {class: weight}, or "balanced" for weights inverse to the classes' shares. They multiply
            `sample_weight`.
        max_iter: the most iterations of L-BFGS, over all temperatures.
        tol: L-BFGS has converged when no entry of the gradient, in its internal units, exceeds `tol`, or when rounding
            stops it below 1e-6. If it stops earlier, a ConvergenceWarning says at which temperatures, and the
            coefficients are those found there. Many classes of unequal sizes with heavy tails take the
            most iterations.
        warm_start: whether to start from the last fit's solution, directly at (t1, t2).
        rescale: as in `bitempered.numpy.bi_tempered_logistic_loss`. With True, C means nearly the same at every pair.
            With False, the paper's loss, its gradient shrinks like K^-(t2-t1) in the number K of classes, and far from
            (1, 1) the default C leaves nothing but the penalty: you need a larger one.

    Attributes:
        classes_, coef_, intercept_, n_features_in_, feature_names_in_, n_iter_: as in LogisticRegression. `coef_` is
            (K, features), or (1, features) for two classes: the first has logit 0.
        t1_, t2_, scale_: the temperatures of the coefficients, which differ from t1 and t2 only if `max_iter` ended
            the fit on the way, and K^(t2_-1) with `rescale`, otherwise 1. `predict_proba` is
            `tempered_softmax(scale_ * logits, t2_)`.

    If the fit is no better than one constant answer, or gives up a class (`bitempered.diagnosis.learning_problem`), a
    ConvergenceWarning says so, except at (1, 1).

    X may be a dense or a sparse matrix; the computation is in float64.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BiTemperedLogisticRegression(t1=0.8, t2=1.2).fit(X, y)
    >>> model.predict_proba(X[[0, 70]]).round(2)
    array([[0.96, 0.04, 0.  ],
           [0.01, 0.43, 0.55]])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """

    coef_: Array
    intercept_: Array
    _precision: Array

    def __init__(
        self,
        t1: float = 0.8,
        t2: float = 1.2,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 1000,
        tol: float = 1e-4,
        warm_start: bool = False,
        rescale: bool = True,
    ) -> None:
        self.t1 = t1
        self.t2 = t2
        self.C = C
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.rescale = rescale

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> "BiTemperedLogisticRegression":
        """Fit to the examples X (n, features) of classes y (n), with weights (n) if given."""
        t1, t2 = self._check_settings()
        warm = self.warm_start and hasattr(self, "coef_")
        with self._restored_if_it_fails() as before:
            X, labels, weight = self._examples(X, y, sample_weight, np.float64)
            self._fitted_at(t1, t2)
            _check_size(X)
            if warm:
                self._check_warm_start(before)
            weight = self._weighted_by_class(labels, weight)
            X, theta, precision = self._beginning(X)
            if warm:
                theta = np.vstack((self.coef_.T, self.intercept_))[: len(theta)]
            theta = self._descend(X, labels, weight, theta, precision, None, [] if warm else self._steps())
            self._warn_unless_learnt(X @ theta, labels, weight, _ADVICE)
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> "BiTemperedLogisticRegression":
        """Fit to a batch of examples in addition to all batches before it, which are not needed again.

        The first batch is fitted as `fit` does. For a later one the penalty is on the distance from the coefficients so
        far: precision * (coef_ - coef_so_far)^2 / 2, where the precision is 1 plus C times the diagonal of the
        Gauss-Newton matrix of the earlier batches' losses. So the more examples a feature was in, the less its
        coefficients move. One pass comes near `fit` of all examples; large batches come nearer, as the diagonal ignores
        how features are correlated. There is no learning rate. A second pass counts the examples twice.

        `classes`, all of them, must be given at the first call, unless it continues a model of `fit`. `n_iter_` is that
        of the last call, and `warm_start` has no effect here.
        """
        t1, t2 = self._check_settings()
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs the classes' shares in all batches, which partial_fit does"
                " not know: give a dictionary of weights"
            )
        first = not hasattr(self, "classes_")
        with self._restored_if_it_fails():
            if first and classes is None:
                raise ValueError("classes, all of them, must be given at the first call of partial_fit")
            known = None if first else self.classes_
            X, labels, weight = self._examples(X, y, sample_weight, np.float64, classes=classes, known=known)
            self._fitted_at(t1, t2)
            _check_size(X)
            weight = self._weighted_by_class(labels, weight)
            X, theta, precision = self._beginning(X)
            centre = None
            if not first:
                if len(self._precision) != len(theta):
                    raise ValueError(
                        f"fit_intercept must be that of the fit that this one continues, got {self.fit_intercept}"
                    )
                theta = centre = np.vstack((self.coef_.T, self.intercept_))[: len(theta)]
                precision = self._precision
            self._descend(X, labels, weight, theta, precision, centre, self._steps() if first else [])
        return self

    def _check_settings(self) -> tuple[float, float]:
        check_positive(self.C, "C")
        check_count(self.max_iter, "max_iter")
        check_number(self.tol, "tol", 0)
        if not isinstance(self.fit_intercept, (bool, np.bool_)):
            raise TypeError(f"fit_intercept must be True or False, got {self.fit_intercept!r}")
        return check_temperatures(self.t1, self.t2)

    def _steps(self) -> list[float]:
        """Fractions of the way from (1, 1) to the temperatures at which a fit stops, before the whole way."""
        # Each step renews the preconditioner: hence two steps, not one, and the last again until it converges.
        return [0.0] if self.t1 == self.t2 >= 1 else [0.0, 0.25, 0.5, 0.75]

    def _beginning(self, X: Any) -> tuple[Any, Array, Array]:
        """X with a column of ones for the intercept, coefficients of 0, and the factors of their squares."""
        precision = np.full((X.shape[1], 1), 1 / float(self.C))
        if self.fit_intercept:
            column = np.ones((X.shape[0], 1))
            X = sparse.hstack((X, column), format="csr") if sparse.issparse(X) else np.hstack((X, column))
            precision = np.append(precision, [[0.0]], axis=0)
        return X, np.zeros((X.shape[1], 1 if len(self.classes_) == 2 else len(self.classes_))), precision

    def _descend(
        self,
        X: Any,
        labels: Array,
        weight: Array,
        theta: Array,
        precision: Array,
        centre: Array | None,
        steps: list[float],
    ) -> Array:
        """Minimise sum_i w_i loss_i + sum(precision * (theta - centre)^2) / 2 from `theta`; set and return theta.

        `steps` are fractions of the way from (1, 1) to the temperatures, before the whole way.
        """
        t1, t2 = self.t1_, self.t2_
        # The mean loss, as in LogisticRegression: the meaning of `tol` does not depend on the number of examples.
        of_examples, largest = weight, weight.max()
        weight = weight / largest  # first, since the sum of large weights overflows
        with np.errstate(over="ignore"):
            penalty = precision / weight.sum() / largest
        if not np.isfinite(penalty).all():
            raise ValueError(f"the penalty overflows at C = {self.C:g} and weights up to {largest:g}: give larger ones")
        weight = weight / weight.sum()
        n_iter, start = 0, t1 if t1 == t2 >= 1 else 1.0
        for step in chain(steps, repeat(1.0)):
            temperatures = (1 - step) * start + step * t1, (1 - step) * start + step * t2
            objective = _Objective(
                X, labels, weight, *temperatures, theta=theta, penalty=penalty, centre=centre, rescale=self._rescale
            )
            left = max(1, self.max_iter - n_iter)
            result = minimize(
                objective,
                np.zeros(theta.size),
                jac=True,
                method="L-BFGS-B",
                options={
                    "maxiter": min(RENEW, left) if step == 1 else left,
                    "maxls": 50,
                    "ftol": np.finfo(float).eps,  # as far as rounding allows
                    # The solution of a step before the last is only a starting point.
                    "gtol": self.tol if step == 1 else max(self.tol, 1e-2),
                },
            )
            theta = objective.parameters(result.x)
            n_iter += result.nit
            if n_iter >= self.max_iter or (step == 1 and result.status != 1):
                break
        self._fitted_at(*temperatures)
        slope = abs(result.jac).max()
        # Values are exact to about 1e-16, and near the minimum change with the square of the gradient: below 1e-6 a
        # line search may find no better value, which counts as converged.
        if step < 1 or not slope <= (self.tol if result.status == 1 else max(self.tol, 1e-6)):
            reached = "({:g}, {:g})".format(*temperatures)
            if temperatures != (t1, t2):
                reached += f" on the way to ({t1:g}, {t2:g})"
            warnings.warn(
                f"L-BFGS stopped after {n_iter} iterations before it converged, at temperatures {reached}, with a"
                f" gradient of {slope:.1e} for tol = {self.tol:g} ({result.message}): raise max_iter or tol, scale the"
                " features, or choose temperatures nearer to 1",
                ConvergenceWarning,
                stacklevel=3,
            )
        features = self.n_features_in_
        self.coef_ = theta[:features].T.copy()
        self.intercept_ = theta[features] if self.fit_intercept else np.zeros(theta.shape[1])
        self.n_iter_ = np.array([n_iter])
        whole = _Objective(X, labels, of_examples, *temperatures, theta=theta, penalty=precision, rescale=self._rescale)
        with np.errstate(over="ignore"):
            self._precision = np.minimum(precision + whole.diagonal(), 1e150)  # whose products are finite
        return theta

    def _weighted_by_class(self, labels: Array, weight: Array) -> Array:
        if self.class_weight is None:
            return weight
        weight = weight * self._class_weights(labels, weight)[labels]
        check_weights(weight, "sample_weight times class_weight")
        return weight

    def _class_weights(self, labels: Array, weight: Array) -> Array:
        empty = self.classes_[np.bincount(labels, minlength=len(self.classes_)) == 0].tolist()
        if isinstance(self.class_weight, str) and empty:
            raise ValueError(f"class_weight={self.class_weight!r} needs weight in every class, got none in {empty}")
        y = self.classes_[labels]
        by_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=weight)
        check_weights(by_class, "class_weight")
        return by_class

    def _check_warm_start(self, last: dict[str, Any]) -> None:
        shape = (1 if len(self.classes_) == 2 else len(self.classes_), self.n_features_in_)
        if last["coef_"].shape != shape:
            raise ValueError(
                f"warm_start needs coefficients of shape {shape} for these examples,"
                f" got {last['coef_'].shape} from the last fit; set warm_start=False"
            )
        if not np.array_equal(last["classes_"], self.classes_):
            raise ValueError(
                f"warm_start needs the classes of the last fit, {last['classes_'].tolist()},"
                f" got {self.classes_.tolist()}; set warm_start=False"
            )

    def _logits(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return X @ self.coef_.T + self.intercept_


def _check_size(X: Any) -> None:
    largest = abs(X).max()
    if largest > 1e150:
        raise ValueError(f"X holds a feature of size {largest:g}, too large: its square overflows; scale the features")


def _until_settled(step: Callable[[Array], Array], m: Array, count: int) -> Array:
    """`encoding.iterate` until a step changes m by less than 1e-9: the next would change it by the square of that."""
    for _ in range(count):
        before, m = m, step(m)
        if np.max(abs(m - before)) < 1e-9:
            break
    return m


xp = namespace(np, iterate=_until_settled)


class _Objective:
    """The mean loss at `theta + P z`, with a penalty for leaving `centre`, and its gradient, as functions of z.

    Classes come first here, (K, n): sums over them are then sums of long rows, which NumPy is fastest at.
    """

    def __init__(
        self,
        X: Any,
        labels: Array,
        weight: Array,
        t1: float,
        t2: float,
        *,
        theta: Array,
        penalty: Array,
        centre: Array | None = None,
        rescale: bool,
    ) -> None:
        self.X, self.weight, self.penalty, self.theta, self.t1, self.t2 = X, weight, penalty, theta, t1, t2
        self.centre = np.zeros_like(theta) if centre is None else centre
        self.classes = max(theta.shape[1], 2)
        self.inner, self.outer = factors(rescale, self.classes, t1, t2)
        logits = np.empty((self.classes, len(labels)))
        self.y, _, _ = encode_classes(logits, labels, axis=0, indices=True, xp=xp)
        self.is_label = self.y > 0
        self.last: core.State | None = None
        # The size of a gradient at equal probabilities relative to cross-entropy's (and above 0), so that `tol` means
        # the same at any temperatures.
        self.scale = 1.0 if rescale else math.exp(-min((t2 - t1) * math.log(self.classes), 300))

    def parameters(self, z: Array) -> Array:
        return self.theta + self._centred(self._apply(z))

    def __call__(self, z: Array) -> tuple[float, Array]:
        theta = self.parameters(z)
        with np.errstate(all="ignore"):
            losses, gradient = self._losses(self._logits(theta))
        gradient = gradient[-theta.shape[1] :] * self.weight
        moved = theta - self.centre
        value = self.weight @ losses + 0.5 * np.sum(self.penalty * moved**2)
        by_theta = self._centred(self.X.T @ gradient.T + self.penalty * moved)
        return value / self.scale, self._apply(by_theta, transposed=True).ravel() / self.scale

    def _centred(self, theta: Array) -> Array:
        # A component shared by all classes changes no probability. If all have the same penalty it is 0 at the minimum:
        # spare L-BFGS finding that.
        return theta if self.penalty.shape[1] == theta.shape[1] else theta - theta.mean(axis=1, keepdims=True)

    def _apply(self, z: Array, *, transposed: bool = False) -> Array:
        """P (G, features, features) times z (features, K): the K columns are in G groups, each with its own P."""
        features, columns = self.theta.shape
        if self.P.ndim == 2:  # the diagonals of K matrices
            return self.P * z.reshape(features, columns)
        P = self.P.swapaxes(1, 2) if transposed else self.P
        groups = z.reshape(features, len(P), -1).swapaxes(0, 1)
        return (P @ groups).swapaxes(0, 1).reshape(features, columns)

    def _logits(self, theta: Array) -> Array:
        a = np.zeros(self.y.shape)
        a[-theta.shape[1] :] = (self.inner * theta.T) @ self.X.T
        return a

    def _losses(self, a: Array) -> tuple[Array, Array]:
        """The loss of each example and its gradient in the unscaled logits, solved from the last call's solution."""
        self.last = core.solved(a, self.t2, last=self.last, axis=0, xp=xp)
        losses = core.label_loss(self.is_label, self.last.log_p, self.t1, axis=0, xp=xp)[0]
        gradient = core.gradient(self.y, self.last, self.t1, self.t2, axis=0, xp=xp)
        return self.outer * losses, self.inner * self.outer * gradient

    @cached_property
    def P(self) -> Array:
        """A preconditioner, such that the Hessian in z is near the identity: this takes several times fewer iterations.

        P P^T is the inverse of X^T diag(h) X + penalty, with h the Gauss-Newton curvature of each example's loss at
        `theta`. Each class has its own, (K, features, features), unless so many matrices would cost more than they
        save: then all share a mean, (1, features, features). Above 2,000 features only the diagonals, (features, K).
        """
        features, columns = self.theta.shape
        # Below t = 1 the curvature vanishes outside the support, which moves: use that of t = 1 instead.
        h = self._curvature(max(self.t1, 1.0), max(self.t2, 1.0))
        if features > 2000:
            diagonal = self._diagonal(h) + self.penalty
            return 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
        h = h if columns * features**2 <= 250_000 else np.mean(h, axis=0, keepdims=True)
        return np.stack([self._inverse_root(each) for each in h])

    def diagonal(self) -> Array:
        """The diagonals of X^T diag(weight * h) X, (features, K), with h the curvature at `theta`."""
        t1, t2 = (self.t1, self.t2) if self.t2 >= 1 else (max(self.t1, 1.0), 1.0)
        return self._diagonal(self._curvature(t1, t2))

    def _curvature(self, t1: float, t2: float) -> Array:
        def curvature(a: Array) -> Array:
            with np.errstate(all="ignore"):
                each = core.curvature(core.solved(a, t2, axis=0, xp=xp), t1, t2, axis=0, xp=xp)
            return self.inner**2 * self.outer * each[-self.theta.shape[1] :]

        at_theta, at_equal = curvature(self._logits(self.theta)), curvature(np.zeros((self.classes, 1)))
        return np.maximum(at_theta, 1e-3 * at_equal)

    def _diagonal(self, h: Array) -> Array:
        X = self.X
        squares = sparse.csr_array((X.data**2, X.indices, X.indptr), X.shape) if sparse.issparse(X) else X**2
        return squares.T @ (self.weight * h).T

    def _inverse_root(self, h: Array) -> Array:
        hessian = self.X.T @ (sparse.diags_array(self.weight * h) @ self.X)
        hessian = hessian.toarray() if sparse.issparse(hessian) else hessian
        diagonal = hessian.diagonal() + self.penalty.mean(axis=1)
        # A ridge for repeated features, and for those that are always 0.
        np.fill_diagonal(hessian, np.where(diagonal > 0, diagonal * (1 + 1e-8), 1.0))
        return solve_triangular(cholesky(hessian), np.eye(len(hessian)))
