"""A network of fully connected layers, trained by Adam on the bi-tempered loss."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bitempered import schedules
from bitempered.checks import check_number, check_rescale, check_temperatures
from bitempered.extras import install
from bitempered.numpy import loss_and_grad
from bitempered.schedules import Anneal
from bitempered.sklearn.base import Array, TemperedClassifier, all_logits, check_count, check_positive

# The default schedule stays at (1, 1) for at least this many: small data sets have few steps per epoch.
LOGISTIC_STEPS = 200
_ADVICE = (
    "more epochs (max_iter), rescale=True, another learning_rate_init, temperatures nearer to 1, or scaled features"
)


class BiTemperedMLPClassifier(TemperedClassifier):
    """A network of fully connected layers and ReLUs, trained by Adam on the bi-tempered loss. Fitting needs PyTorch.

    Each step minimises the mean of `bi_tempered_logistic_loss` over a batch, plus `alpha` / 2 times the squared weights
    over the number of its examples, as in `sklearn.neural_network.MLPClassifier`, whose parameter names it uses.
    Fitting runs in float32 on the CPU; predicting in float64, with NumPy alone.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy. Give both for constant temperatures, or
            neither: then they follow the schedule.
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
        schedule: temperatures that change: a function from the epoch (0, 1, ...) to (t1, t2), such as
            `bitempered.schedules.anneal` returns. Without it, and without t1 and t2, it is the first leg of
            `bitempered.schedules.default` over `max_iter` epochs: cross-entropy at first, for at least 200 steps,
            robust later. Training does not stop before the temperatures have settled.
        rescale: as in `bitempered.numpy.bi_tempered_logistic_loss`. True lets one `learning_rate_init` and `alpha` suit
            all constant temperatures; far from (1, 1) it is needed.

    Attributes:
        classes_, coefs_, intercepts_, n_iter_, n_features_in_, feature_names_in_, validation_scores_: as in
            MLPClassifier.
        loss_curve_: the mean loss of each epoch at that epoch's temperatures, without the penalty.
        t1_, t2_, scale_: the temperatures of the last epoch (with `early_stopping`, those of the epoch whose weights
            were kept), and K^(t2_-1) with `rescale`, otherwise 1. `predict_proba` is
            `tempered_softmax(scale_ * logits, t2_)`.

    If the fit is no better than one constant answer, or gives up a class (`bitempered.diagnosis.learning_problem`), a
    ConvergenceWarning says so, except at (1, 1).

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BiTemperedMLPClassifier(learning_rate_init=0.01, batch_size=30, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.95, model.t1_, model.t2_
    (True, 0.0, 2.0)
    >>> model = BiTemperedMLPClassifier(t1=0.8, t2=1.2, learning_rate_init=0.01, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.95
    True

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """

    def __init__(
        self,
        t1: float | None = None,
        t2: float | None = None,
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
        schedule: Any = None,
        rescale: bool = False,
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
        self.schedule = schedule
        self.rescale = rescale

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> "BiTemperedMLPClassifier":
        """Fit to the examples X (n, features) of classes y (n), with weights (n) if given."""
        try:
            import torch
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"BiTemperedMLPClassifier needs PyTorch: {install('torch')}") from None
        hidden = np.atleast_1d(np.array(self.hidden_layer_sizes, dtype=object)).tolist()
        for name, count in [
            *(("hidden_layer_sizes", width) for width in hidden),
            ("batch_size", self.batch_size),
            ("max_iter", self.max_iter),
            ("n_iter_no_change", self.n_iter_no_change),
        ]:
            check_count(count, name)
        check_positive(self.learning_rate_init, "learning_rate_init")
        check_number(self.alpha, "alpha", 0)
        check_number(self.tol, "tol", 0)
        with self._restored_if_it_fails():
            X, labels, weight = self._examples(X, y, sample_weight, np.float32)
            leg = self._default(steps=math.ceil(len(labels) / self.batch_size))
            pairs = self._temperatures(self.schedule if leg is None else leg)
            settled = max((epoch for epoch in range(1, len(pairs)) if pairs[epoch] != pairs[epoch - 1]), default=0)
            unfinished = leg is not None and pairs[-1] != leg.end
            if unfinished:
                settled = len(pairs)
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
            best, best_weights, kept, waited = -math.inf, None, pairs[0], 0
            for epoch, (t1, t2) in enumerate(pairs):
                if waited >= self.n_iter_no_change:
                    break
                total = 0.0
                for rows in np.array_split(rng.permutation(chosen), math.ceil(len(chosen) / size)):
                    h = torch.from_numpy(X[rows].toarray() if sparse.issparse(X) else X[rows])
                    for w, b in zip(weights, biases, strict=True):
                        h = h @ w + b if w is weights[-1] else torch.relu(h @ w + b)
                    # Faster than bitempered.torch on small batches: nothing is recorded for a backward pass.
                    logits = all_logits(h.detach().numpy())
                    losses, gradient = loss_and_grad(logits, labels[rows], t1, t2, rescale=self._rescale)
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
                    score = float(np.mean(all_logits(self._forward(X[held])).argmax(axis=1) == labels[held]))
                    self.validation_scores_.append(score)
                elif pairs[epoch] != kept:
                    best = -math.inf  # losses at other temperatures are other losses
                waited = 0 if epoch < settled or score > best + self.tol else waited + 1
                if score > best or not self.early_stopping:
                    best, kept = max(score, best), (t1, t2)
                    if self.early_stopping:
                        best_weights = [[a.copy() for a in arrays] for arrays in (self.coefs_, self.intercepts_)]
            if best_weights is not None:
                self.coefs_, self.intercepts_ = best_weights
            self._fitted_at(*kept)
            if waited < self.n_iter_no_change:
                message = f"training stopped at max_iter = {self.max_iter} epochs before it converged"
                if leg is not None and unfinished:
                    last, end = (f"({t1:g}, {t2:g})" for t1, t2 in (pairs[-1], leg.end))
                    message += (
                        f", at temperatures {last} of the default schedule, which ends at {end}: raise max_iter, lower"
                        " batch_size, or give t1 and t2"
                    )
                warnings.warn(message, ConvergenceWarning, stacklevel=2)
            self.n_iter_ = len(self.loss_curve_)
            self._warn_unless_learnt(self._forward(X), labels, weight, _ADVICE)
        return self

    def _default(self, *, steps: int) -> Anneal | None:
        """The schedule of a fit with this many steps per epoch that is given neither temperatures nor a schedule."""
        if not (self.t1 is None and self.t2 is None and self.schedule is None):
            return None
        leg = schedules.default(len(self.classes_), self.max_iter).legs[0]  # so that training can stop
        later = max(0.0, LOGISTIC_STEPS / steps - leg.begin)
        return replace(leg, begin=leg.begin + later, finish=leg.finish + later)

    def _temperatures(self, schedule: Any) -> list[tuple[float, float]]:
        """The temperatures of each epoch up to `max_iter`."""
        if self.t1 is not None or self.t2 is not None:
            if self.t1 is None or self.t2 is None:
                raise ValueError(f"give both t1 and t2, or neither for a schedule, got t1={self.t1} and t2={self.t2}")
            if schedule is not None:
                raise ValueError("give either t1 and t2 or a schedule, not both")
            pairs = [check_temperatures(self.t1, self.t2)] * self.max_iter
        else:
            if not callable(schedule):
                raise TypeError(f"schedule must be a function from an epoch to (t1, t2), or None, got {schedule!r}")
            pairs = [self._pair(schedule, epoch) for epoch in range(self.max_iter)]
        check_rescale(self._rescale, len(self.classes_), max(t2 for _, t2 in pairs))
        return pairs

    @staticmethod
    def _pair(schedule: Any, epoch: int) -> tuple[float, float]:
        pair = schedule(epoch)
        try:
            t1, t2 = pair
        except (TypeError, ValueError):
            raise TypeError(
                f"schedule must return a pair of temperatures (t1, t2), got {pair!r} for epoch {epoch}"
            ) from None
        return check_temperatures(t1, t2)

    def _logits(self, X: Any) -> Array:
        check_is_fitted(self)
        return self._forward(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    def _forward(self, X: Any) -> Array:
        for w, b in zip(self.coefs_[:-1], self.intercepts_[:-1], strict=True):
            X = np.maximum(X @ w + b, 0)
        return X @ self.coefs_[-1] + self.intercepts_[-1]
