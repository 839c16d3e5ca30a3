"""scikit-learn classifiers that minimise the bi-tempered logistic loss: a linear one, and a network (with PyTorch)."""

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitempered import core
from bitempered.checks import check_number, check_temperatures
from bitempered.encoding import encode_classes, namespace
from bitempered.numpy import loss_and_grad, tempered_log_softmax, tempered_softmax

try:
    from scipy import sparse
    from scipy.linalg import cholesky, solve_triangular
    from scipy.optimize import minimize
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_array, check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError:
    raise ModuleNotFoundError('bitempered.sklearn needs scikit-learn: pip install "bitempered[sklearn]"') from None

__all__ = ["BiTemperedLogisticRegression", "BiTemperedMLPClassifier"]

Array = NDArray[Any]


class _TemperedClassifier(ClassifierMixin, BaseEstimator):
    """The base of both classifiers. Two classes have one logit: that of classes_[1], against 0."""

    def _examples(self, X: Any, y: Any, sample_weight: Any, dtype: Any) -> tuple[Any, Array, Array]:
        """Return X, class indices and weights, without the examples of weight 0. Sets `classes_`."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=dtype)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least 2 classes, got 1 class: {self.classes_[0]!r}")
        if sample_weight is None:
            return X, labels, np.ones(len(labels))
        weight = check_array(sample_weight, dtype=np.float64, ensure_2d=False, input_name="sample_weight")
        if weight.shape != labels.shape:
            raise ValueError(f"sample_weight must have shape {labels.shape}, one per example, got {weight.shape}")
        _check_weights(weight, "sample_weight")
        kept = weight > 0
        return (X, labels, weight) if kept.all() else (X[kept], labels[kept], weight[kept])

    def _logits(self, X: Any) -> Array:
        raise NotImplementedError

    def decision_function(self, X: Any) -> Array:
        """The logits: (n, K), or (n) for two classes, where a positive one means classes_[1]."""
        logits = self._logits(X)
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def predict(self, X: Any) -> Array:
        """The class of the largest logit, which has the largest probability."""
        best = _all_logits(self._logits(X)).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Array:
        """The probabilities (n, K) of `classes_`: the tempered softmax of the logits at t2."""
        return tempered_softmax(_all_logits(self._logits(X)), self.t2)

    def predict_log_proba(self, X: Any) -> Array:
        """The natural logarithm of `predict_proba`; -inf outside a finite support (t2 < 1)."""
        return tempered_log_softmax(_all_logits(self._logits(X)), self.t2)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class BiTemperedLogisticRegression(_TemperedClassifier):
    """Logistic regression with the bi-tempered loss, which is less sensitive to outliers and wrong labels.

    It minimises

        C * sum_i w_i bi_tempered_logistic_loss(x_i @ coef_.T + intercept_, y_i, t1, t2)  +  norm(coef_)^2 / 2,

    which at t1 = t2 = 1 is the objective of `sklearn.linear_model.LogisticRegression`. For t1 = t2 >= 1 it is convex.
    For other pairs the temperatures move in steps from (1, 1), each starting at the solution of the last. The result is
    a local minimum, the same in every run. If outliers are many and far, that minimum may follow them.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        C: the weight of the loss against the penalty, > 0. The gradient of the loss shrinks like K^-(t2 - t1) in the
            number K of classes: far from (1, 1) you may need a larger C.
        fit_intercept: whether there is an intercept, which is not penalised.
        class_weight: {class: weight}, or "balanced" for weights inverse to the classes' shares. They multiply
            `sample_weight`.
        max_iter: the most iterations of L-BFGS, over all temperatures.
        tol: L-BFGS has converged when no entry of the gradient, in its internal units, exceeds `tol`, or when rounding
            stops it below 1e-6. If it stops earlier, a ConvergenceWarning says at which temperatures, and the
            coefficients are those found there. Many classes of unequal sizes are hard with heavy tails: 20 of them
            took about 150 iterations at (0.5, 2), and more than 1,000 at (0.5, 4).
        warm_start: whether to start from the last fit's solution, directly at (t1, t2).

    Attributes:
        classes_, coef_, intercept_, n_features_in_, feature_names_in_, n_iter_: as in LogisticRegression. `coef_` is
            (K, features), or (1, features) for two classes: the first has logit 0.

    X may be a dense or a sparse matrix; the computation is in float64.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BiTemperedLogisticRegression(t1=0.8, t2=1.2).fit(X, y)
    >>> model.predict_proba(X[[0, 70]]).round(2)
    array([[0.95, 0.05, 0.  ],
           [0.02, 0.44, 0.54]])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """

    coef_: Array
    intercept_: Array

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
    ) -> None:
        self.t1 = t1
        self.t2 = t2
        self.C = C
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> "BiTemperedLogisticRegression":
        """Fit to the examples X (n, features) of classes y (n), with weights (n) if given."""
        t1, t2 = check_temperatures(self.t1, self.t2)
        _check_positive(self.C, "C")
        _check_count(self.max_iter, "max_iter")
        check_number(self.tol, "tol", 0)
        if not isinstance(self.fit_intercept, (bool, np.bool_)):
            raise TypeError(f"fit_intercept must be True or False, got {self.fit_intercept!r}")
        before = dict(vars(self))
        warm = self.warm_start and hasattr(self, "coef_")
        try:
            X, labels, weight = self._examples(X, y, sample_weight, np.float64)
            _check_size(X)
            if warm:
                self._check_warm_start(before)
            if self.class_weight is not None:
                weight = weight * self._class_weights(labels, weight)[labels]
                _check_weights(weight, "sample_weight times class_weight")
        except Exception:
            # If fitting fails, a model that was fitted before still predicts as it did.
            self.__dict__ = before
            raise
        features, classes = X.shape[1], len(self.classes_)
        # The mean loss, as in LogisticRegression: the meaning of `tol` does not depend on the number of examples.
        largest = weight.max()
        weight = weight / largest  # first, since the sum of large weights overflows
        penalty = np.full((features, 1), 1 / (self.C * weight.sum()) / largest)
        weight = weight / weight.sum()
        if self.fit_intercept:
            column = np.ones((X.shape[0], 1))
            X = sparse.hstack((X, column), format="csr") if sparse.issparse(X) else np.hstack((X, column))
            penalty = np.append(penalty, [[0.0]], axis=0)
        theta = np.zeros((X.shape[1], 1 if classes == 2 else classes))
        if warm:
            theta = np.vstack((self.coef_.T, self.intercept_))[: len(theta)]
        convex = t1 == t2 >= 1
        # Each step renews the preconditioner: hence two steps, not one.
        steps = [1.0] if warm else [0.0, 1.0] if convex else [0.0, 0.25, 0.5, 0.75, 1.0]
        n_iter = 0
        for step in steps:
            start = t1 if convex else 1.0
            temperatures = (1 - step) * start + step * t1, (1 - step) * start + step * t2
            objective = _Objective(X, labels, weight, penalty, theta, *temperatures)
            result = minimize(
                objective,
                np.zeros(theta.size),
                jac=True,
                method="L-BFGS-B",
                options={
                    "maxiter": max(1, self.max_iter - n_iter),
                    "maxls": 50,
                    "ftol": np.finfo(float).eps,  # as far as rounding allows
                    # The solution of a step before the last is only a starting point.
                    "gtol": self.tol if step == 1 else max(self.tol, 1e-2),
                },
            )
            theta = objective.parameters(result.x)
            n_iter += result.nit
            if n_iter >= self.max_iter:
                break
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
                stacklevel=2,
            )
        self.coef_ = theta[:features].T.copy()
        self.intercept_ = theta[features] if self.fit_intercept else np.zeros(theta.shape[1])
        self.n_iter_ = np.array([n_iter])
        return self

    def _class_weights(self, labels: Array, weight: Array) -> Array:
        empty = self.classes_[np.bincount(labels, minlength=len(self.classes_)) == 0].tolist()
        if isinstance(self.class_weight, str) and empty:
            raise ValueError(f"class_weight={self.class_weight!r} needs weight in every class, got none in {empty}")
        y = self.classes_[labels]
        by_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=weight)
        _check_weights(by_class, "class_weight")
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


def _until_settled(step: Callable[[Array], Array], m: Array, count: int) -> Array:
    """`encoding.iterate` until a step changes m by less than 1e-9: the next would change it by the square of that."""
    for _ in range(count):
        before, m = m, step(m)
        if np.max(abs(m - before)) < 1e-9:
            break
    return m


xp = namespace(np, iterate=_until_settled)


class _Objective:
    """The penalised mean loss at `theta + P z` and its gradient, as functions of z.

    Classes come first here, (K, n): sums over them are then sums of long rows, which NumPy is fastest at.
    """

    def __init__(
        self, X: Any, labels: Array, weight: Array, penalty: Array, theta: Array, t1: float, t2: float
    ) -> None:
        self.X, self.weight, self.penalty, self.theta, self.t1, self.t2 = X, weight, penalty, theta, t1, t2
        self.classes = max(theta.shape[1], 2)
        logits = np.empty((self.classes, len(labels)))
        self.y, _, _ = encode_classes(logits, labels, None, 0.0, 0, indices=True, xp=xp)
        self.is_label = self.y > 0
        self.last: core.State | None = None
        # The size of a gradient at equal probabilities relative to cross-entropy's (and above 0), so that `tol` means
        # the same at any temperatures.
        self.scale = math.exp(-min((t2 - t1) * math.log(self.classes), 300))
        self.P = self._preconditioner()

    def parameters(self, z: Array) -> Array:
        return self.theta + self._centred(self._apply(self.P, z))

    def __call__(self, z: Array) -> tuple[float, Array]:
        theta = self.parameters(z)
        with np.errstate(all="ignore"):
            losses, gradient = self._losses(self._logits(theta))
        gradient = gradient[-theta.shape[1] :] * self.weight
        value = self.weight @ losses + 0.5 * np.sum(self.penalty * theta**2)
        by_theta = self._centred(self.X.T @ gradient.T + self.penalty * theta)
        return value / self.scale, self._apply(self.P.swapaxes(1, 2), by_theta).ravel() / self.scale

    def _centred(self, theta: Array) -> Array:
        # A component shared by all classes changes no probability, and is 0 at the minimum: spare L-BFGS finding that.
        return theta if theta.shape[1] == 1 else theta - theta.mean(axis=1, keepdims=True)

    def _apply(self, P: Array, z: Array) -> Array:
        """P (G, features, features) times z (features, K): the K columns are in G groups, each with its own P."""
        features, columns = self.theta.shape
        if len(P) == 0:
            return z.reshape(features, columns)
        groups = z.reshape(features, len(P), -1).swapaxes(0, 1)
        return (P @ groups).swapaxes(0, 1).reshape(features, columns)

    def _logits(self, theta: Array) -> Array:
        a = np.zeros(self.y.shape)
        a[-theta.shape[1] :] = theta.T @ self.X.T
        return a

    def _losses(self, a: Array) -> tuple[Array, Array]:
        """The loss of each example and its gradient in the logits, solved from the last call's solution."""
        u, m = core.solve(a, self.t2, last=self.last, axis=0, xp=xp)
        self.last = core.state(u, m, self.t2, axis=0, xp=xp)
        losses = core.label_loss(self.is_label, self.last.log_p, self.t1, axis=0, xp=xp)[0]
        return losses, core.gradient(self.y, self.last, self.t1, self.t2, axis=0, xp=xp)

    def _preconditioner(self) -> Array:
        """Return P such that the Hessian in z is near the identity: this takes several times fewer iterations.

        P P^T is the inverse of X^T diag(h) X + penalty, with h the Gauss-Newton curvature of each example's loss at
        `theta`. Each class has its own, (K, features, features), unless so many matrices would cost more than they
        save: then all share a mean, (1, features, features). Above 2,000 features there is none, (0, 0, 0).
        """
        features, columns = self.theta.shape
        if features > 2000:
            return np.empty((0, 0, 0))
        # Below t = 1 the curvature vanishes outside the support, which moves: use that of t = 1 instead.
        t1, t2 = max(self.t1, 1.0), max(self.t2, 1.0)

        def curvature(a: Array) -> Array:
            with np.errstate(all="ignore"):
                u, m = core.solve(a, t2, axis=0, xp=xp)
                each = core.curvature(core.state(u, m, t2, axis=0, xp=xp), t1, t2, axis=0, xp=xp)[-columns:]
            return each if columns * features**2 <= 250_000 else np.mean(each, axis=0, keepdims=True)

        at_theta, at_equal = curvature(self._logits(self.theta)), curvature(np.zeros((self.classes, 1)))
        return np.stack([self._inverse_root(h) for h in np.maximum(at_theta, 1e-3 * at_equal)])

    def _inverse_root(self, h: Array) -> Array:
        hessian = self.X.T @ (sparse.diags_array(self.weight * h) @ self.X)
        hessian = hessian.toarray() if sparse.issparse(hessian) else hessian
        diagonal = hessian.diagonal() + self.penalty[:, 0]
        # A ridge for repeated features, and for those that are always 0.
        np.fill_diagonal(hessian, np.where(diagonal > 0, diagonal * (1 + 1e-8), 1.0))
        return solve_triangular(cholesky(hessian), np.eye(len(hessian)))


class BiTemperedMLPClassifier(_TemperedClassifier):
    """A network of fully connected layers and ReLUs, trained by Adam on the bi-tempered loss. Fitting needs PyTorch.

    Each step minimises the mean of `bi_tempered_logistic_loss` over a batch, plus `alpha` / 2 times the squared weights
    over the number of its examples, as in `sklearn.neural_network.MLPClassifier`, whose parameter names it uses.
    Fitting runs in float32 on the CPU; predicting in float64, with NumPy alone.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        hidden_layer_sizes: the width of each hidden layer.
        alpha: the strength of the penalty, >= 0.
        batch_size: the most examples in a step. An epoch has as few steps as possible, with sizes that differ by at
            most 1.
        learning_rate_init: the step size of Adam, > 0.
        max_iter: the most epochs.
        tol, n_iter_no_change: training stops after `n_iter_no_change` epochs in a row in which the mean loss, or with
            `early_stopping` the accuracy on the examples set aside, did not improve by more than `tol`.
        early_stopping: whether to set aside a fraction `validation_fraction` of each class, and keep the weights that
            were best on it.
        random_state: seeds the weights, the order of the examples and the choice of those set aside.

    Attributes:
        classes_, coefs_, intercepts_, n_iter_, n_features_in_, feature_names_in_, validation_scores_: as in
            MLPClassifier.
        loss_curve_: the mean loss of each epoch, without the penalty.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BiTemperedMLPClassifier(t1=0.8, t2=1.2, learning_rate_init=0.01, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.95
    True

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """

    def __init__(
        self,
        t1: float = 0.8,
        t2: float = 1.2,
        *,
        hidden_layer_sizes: Any = (100,),
        alpha: float = 1e-4,
        batch_size: int = 200,
        learning_rate_init: float = 1e-3,
        max_iter: int = 200,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.t1 = t1
        self.t2 = t2
        self.hidden_layer_sizes = hidden_layer_sizes
        self.alpha = alpha
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> "BiTemperedMLPClassifier":
        """Fit to the examples X (n, features) of classes y (n), with weights (n) if given."""
        try:
            import torch
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                'BiTemperedMLPClassifier needs PyTorch: pip install "bitempered[torch]"'
            ) from None
        t1, t2 = check_temperatures(self.t1, self.t2)
        hidden = np.atleast_1d(np.array(self.hidden_layer_sizes, dtype=object)).tolist()
        for name, count in [
            *(("hidden_layer_sizes", width) for width in hidden),
            ("batch_size", self.batch_size),
            ("max_iter", self.max_iter),
            ("n_iter_no_change", self.n_iter_no_change),
        ]:
            _check_count(count, name)
        _check_positive(self.learning_rate_init, "learning_rate_init")
        check_number(self.alpha, "alpha", 0)
        check_number(self.tol, "tol", 0)
        X, labels, weight = self._examples(X, y, sample_weight, np.float32)
        rng = check_random_state(self.random_state)
        chosen = np.arange(len(labels))
        if self.early_stopping:
            chosen, held = train_test_split(
                chosen, test_size=self.validation_fraction, stratify=labels, random_state=rng
            )
        self.validation_scores_: list[float] | None = [] if self.early_stopping else None
        weight = weight / weight[chosen].max()  # first, since the sum of large weights overflows
        weight = (weight / weight[chosen].mean()).astype(np.float32)

        classes = len(self.classes_)
        widths = [X.shape[1], *hidden, 1 if classes == 2 else classes]
        # The tensors share the memory of these arrays: training them trains `coefs_` and `intercepts_`.
        self.coefs_, self.intercepts_ = [], []
        for before, after in pairwise(widths):
            limit = math.sqrt(6 / (before + after))  # Glorot and Bengio's
            self.coefs_.append(rng.uniform(-limit, limit, (before, after)).astype(np.float32))
            self.intercepts_.append(np.zeros(after, np.float32))
        weights = [torch.from_numpy(w).requires_grad_() for w in self.coefs_]
        biases = [torch.from_numpy(b).requires_grad_() for b in self.intercepts_]
        size = min(self.batch_size, len(chosen))
        optimizer = torch.optim.Adam([{"params": weights}, {"params": biases}], lr=self.learning_rate_init)

        self.loss_curve_: list[float] = []
        best, best_weights, waited = -math.inf, None, 0
        while len(self.loss_curve_) < self.max_iter and waited < self.n_iter_no_change:
            total = 0.0
            for rows in np.array_split(rng.permutation(chosen), math.ceil(len(chosen) / size)):
                h = torch.from_numpy(_dense(X[rows]))
                for w, b in zip(weights, biases, strict=True):
                    h = h @ w + b if w is weights[-1] else torch.relu(h @ w + b)
                # Twice as fast as bitempered.torch on small batches: nothing is recorded for a backward pass.
                losses, gradient = loss_and_grad(_all_logits(h.detach().numpy()), labels[rows], t1, t2)
                optimizer.zero_grad()
                optimizer.param_groups[0]["weight_decay"] = self.alpha / len(rows)
                h.backward(torch.from_numpy(gradient[:, -h.shape[1] :] * weight[rows, None] / len(rows)))
                optimizer.step()
                total += float(weight[rows] @ losses)
            self.loss_curve_.append(total / len(chosen))
            if not math.isfinite(total):
                raise ValueError("the loss is not finite any more: scale the features, or lower learning_rate_init")
            score = -self.loss_curve_[-1]
            if self.validation_scores_ is not None:
                score = float(np.mean(_all_logits(self._forward(X[held])).argmax(axis=1) == labels[held]))
                self.validation_scores_.append(score)
            waited = 0 if score > best + self.tol else waited + 1
            if score > best:
                best = score
                if self.early_stopping:
                    best_weights = [[a.copy() for a in arrays] for arrays in (self.coefs_, self.intercepts_)]
        if best_weights is not None:
            self.coefs_, self.intercepts_ = best_weights
        if waited < self.n_iter_no_change:
            warnings.warn(
                f"training stopped at max_iter = {self.max_iter} epochs before it converged",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.n_iter_ = len(self.loss_curve_)
        return self

    def _logits(self, X: Any) -> Array:
        check_is_fitted(self)
        return self._forward(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _forward(self, X: Any) -> Array:
        for w, b in zip(self.coefs_[:-1], self.intercepts_[:-1], strict=True):
            X = np.maximum(X @ w + b, 0)
        return X @ self.coefs_[-1] + self.intercepts_[-1]


def _all_logits(logits: Array) -> Array:
    return np.hstack((np.zeros_like(logits), logits)) if logits.shape[1] == 1 else logits


def _dense(X: Any) -> Array:
    return X.toarray() if sparse.issparse(X) else X


def _check_size(X: Any) -> None:
    largest = abs(X).max()
    if largest > 1e150:
        raise ValueError(f"X holds a feature of size {largest:g}, too large: its square overflows; scale the features")


def _check_weights(weight: Array, name: str) -> None:
    if not (weight.min() >= 0 and 0 < weight.max() < math.inf):
        raise ValueError(
            f"{name} must hold finite numbers >= 0, not all of them zero,"
            f" got values from {weight.min():g} to {weight.max():g}"
        )


def _check_positive(value: Any, name: str) -> None:
    if not (isinstance(value, Real) and float(value) > 0):
        raise ValueError(f"{name} must be a number > 0, got {value!r}")


def _check_count(value: Any, name: str) -> None:
    if not (isinstance(value, Integral) and int(value) >= 1):
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
