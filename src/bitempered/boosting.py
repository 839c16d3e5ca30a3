"""The bi-tempered logistic loss as objective and evaluation metric of XGBoost (>= 2.1) and LightGBM (>= 4).

Importing this needs only NumPy. The returned callables can be pickled, and work with both the native interface and the
scikit-learn wrapper of their library. With a custom objective the libraries return raw scores, or probabilities by
their own softmax: ask for the scores and apply `bitempered.numpy.tempered_softmax(scores, t2)`, or for two classes
`tempered_sigmoid`, as examples/xgboost_digits.py and examples/lightgbm_digits.py do. With `rescale` multiply the scores
by num_class^(t2-1) first.

`LGBMClassifier` and `XGBClassifier` here are subclasses of the libraries' own that do this for our objectives:

    from bitempered.boosting import LGBMClassifier, lightgbm_objective

    model = LGBMClassifier(objective=lightgbm_objective(0.8, 1.2, num_class=10)).fit(x, y)

`predict` returns classes and `predict_proba` the tempered softmax, so that `score` and GridSearchCV work. Without an
`eval_metric` the evaluation sets are measured by our loss alone, and so is early stopping. To search temperatures, give
GridSearchCV a list of objectives. With another objective they are the libraries' own classes. XGBoost's `save_model`
does not keep a custom objective: give it to the classifier that calls `load_model`, or use pickle.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitempered import core
from bitempered.checks import check_indices, check_rescale, check_temperatures, value_range
from bitempered.encoding import encode_classes, factors
from bitempered.numpy import bi_tempered_logistic_loss, tempered_softmax, xp

__all__ = [  # the two classes are made when they are asked for, see __getattr__
    "LGBMClassifier",  # noqa: F822
    "XGBClassifier",  # noqa: F822
    "lightgbm_metric",
    "lightgbm_objective",
    "xgboost_metric",
    "xgboost_objective",
]

Array = NDArray[np.float64]


def xgboost_objective(
    t1: float, t2: float, num_class: int, *, rescale: bool = False
) -> Callable[..., tuple[Array, Array]]:
    """The loss as an objective of XGBoost: `xgb.train(..., obj=)` or `XGBClassifier(objective=)`.

    The gradient is that of `bitempered.numpy.loss_and_grad`. Trees divide it by the second derivative in each score,
    which for this loss may be negative: for t1 < 1 the loss is bounded, so it cannot be convex. We replace it by h, its
    mean over labels drawn from the model's own y_hat. That is the diagonal of the Gauss-Newton matrix (the formula is
    in `bitempered.core.curvature`): never negative, the same for right and wrong labels, and y_hat_i (1 - y_hat_i) at
    t1 = t2 = 1. For more than two classes h is doubled, as in XGBoost, because the trees of all classes step at once.
    It is at least 1e-16. So (1, 1) grows the same trees as `multi:softprob`, or `binary:logistic`, from the same
    starting scores.

    XGBoost compares `lambda` and `min_child_weight` with sums of h. In the first round h is K^(1 + t1 - 2 t2) times
    that of the logistic loss: scale the two likewise, or use `rescale`, with which that factor is 1.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        num_class: the number K of classes, labelled 0 to K - 1. For 2 each example has one score a, and the softmax is
            that of (0, a): give XGBoost no num_class, and give `xgb.train` base_score=0, since its default of 0.5
            would be a score. For more classes, give XGBoost the same num_class.
        rescale: as in `bitempered.numpy.bi_tempered_logistic_loss`: gradient and h are those of the rescaled loss.
            Without `lambda` and `min_child_weight` the trees are the same, and the scores K^(t2-1) times smaller.

    Returns:
        A callable that takes (scores, DMatrix) or (labels, scores, sample_weight=None). The scores are (n, K), or (n)
        for two classes. It returns gradient and h in the shape of the scores, both multiplied by the weights.

    >>> gradient, h = xgboost_objective(1.0, 1.0, 3)(np.array([0]), np.zeros((1, 3)))
    >>> gradient.round(4), h.round(4)
    (array([[-0.6667,  0.3333,  0.3333]]), array([[0.4444, 0.4444, 0.4444]]))
    """
    return _Objective(t1, t2, num_class, rescale=rescale, doubled=True)


def lightgbm_objective(
    t1: float, t2: float, num_class: int, *, rescale: bool = False
) -> Callable[..., tuple[Array, Array]]:
    """The loss as an objective of LightGBM: `lgb.train({"objective": ...})` or `LGBMClassifier(objective=)`.

    As `xgboost_objective`, except that for more than two classes h is multiplied by K / (K - 1), as in LightGBM: (1, 1)
    grows the trees of `multiclass`, or `binary`, with boost_from_average=False. LightGBM starts a custom objective
    at scores of 0, or at `init_score`. The parameters to scale are `lambda_l2` and `min_sum_hessian_in_leaf`.

    Returns:
        A callable that takes (scores, Dataset) or (labels, scores, weight=None); otherwise as for XGBoost.

    >>> _, h = lightgbm_objective(1.0, 1.0, 3)(np.array([0]), np.zeros((1, 3)))
    >>> h.round(4)
    array([[0.3333, 0.3333, 0.3333]])
    """
    return _Objective(t1, t2, num_class, rescale=rescale, doubled=False)


def xgboost_metric(t1: float, t2: float, num_class: int, *, rescale: bool = False) -> Callable[..., Any]:
    """The mean loss as a metric of XGBoost: `xgb.train(..., custom_metric=)` or `XGBClassifier(eval_metric=)`.

    Use it with `xgboost_objective`: under a built-in objective XGBoost passes probabilities instead of scores.

    Returns:
        A callable that takes (scores, DMatrix) and returns a name and the (weighted) mean, for the native interface; or
        takes (labels, scores, sample_weight=None) and returns only the mean, for scikit-learn's.

    >>> round(xgboost_metric(1.0, 1.0, 3)(np.array([0]), np.zeros((1, 3))), 4)
    1.0986
    """
    return _XGBoostMetric(t1, t2, num_class, rescale=rescale)


def lightgbm_metric(
    t1: float, t2: float, num_class: int, *, rescale: bool = False
) -> Callable[..., tuple[str, float, bool]]:
    """The mean loss as a metric of LightGBM: `lgb.train(..., feval=)` or `LGBMClassifier().fit(eval_metric=)`.

    Use it with `lightgbm_objective`: under a built-in objective LightGBM passes probabilities instead of scores.
    Give LGBMClassifier `metric="None"` as well. Without it LightGBM adds its own log-loss, which mistakes our scores
    for probabilities, and early stopping uses that number too.

    Returns:
        A callable that takes (scores, Dataset) or (labels, scores, weight=None) and returns a name, the (weighted)
        mean, and False: lower is better.
    """
    return _LightGBMMetric(t1, t2, num_class, rescale=rescale)


NAME = "bi_tempered_loss"  # of the metric, in the libraries' logs
METRIC_PARAMETERS = {"metric", "metrics", "metric_types"}  # LightGBM's
FLOOR = 1e-16  # of h over the largest gradient; XGBoost's own, for binary:logistic: no leaf overflows float32


@dataclass(frozen=True)
class _Loss:
    """The base of objectives and metrics: not closures, since scikit-learn clones and pickles estimators."""

    t1: float
    t2: float
    num_class: int
    rescale: bool

    def __post_init__(self) -> None:
        for name, t in zip(("t1", "t2"), check_temperatures(self.t1, self.t2), strict=True):
            object.__setattr__(self, name, t)  # a Python float, whatever number was given
        if not (isinstance(self.num_class, Integral) and self.num_class >= 2):
            raise ValueError(f"num_class must be an integer >= 2, got {self.num_class!r}")
        check_rescale(self.rescale, int(self.num_class), self.t2)

    def _examples(self, first: Any, second: Any, weight: ArrayLike | None) -> tuple[Array, NDArray[np.int64], Array]:
        """Logits (n, K) in float64, class indices (n) and weights (n), from the arguments of either interface."""
        if hasattr(second, "get_label"):  # native: scores and a DMatrix or Dataset
            labels, scores, weight = second.get_label(), first, second.get_weight()
        else:
            labels, scores = first, second
        if labels is None or np.size(labels) == 0:
            raise ValueError("there are no labels: pass label= to the DMatrix or Dataset")
        labels, a = np.asarray(labels), np.asarray(scores, dtype=np.float64)
        n, classes = len(labels), self.num_class
        shape, told = ((n,), "no num_class") if classes == 2 else ((n, classes), "the same num_class")
        if a.shape != shape:
            raise ValueError(
                f"num_class = {classes} needs scores of shape {shape} for {n} labels, got {a.shape}:"
                f" give {told} to the library"
            )
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"labels must be class indices, numbers from 0 to {classes - 1}, got dtype {labels.dtype}")
        if labels.ndim != 1:
            raise ValueError(f"labels must have shape (n,), got {labels.shape}")
        check_indices(labels, classes, "labels")
        if classes == 2:
            a = np.stack((np.zeros(n), a), axis=1)
        w = np.ones(n) if weight is None or np.size(weight) == 0 else np.asarray(weight, dtype=np.float64)
        if w.shape != (n,):
            raise ValueError(f"there must be one weight for each of the {n} labels, got shape {w.shape}")
        if not ((w >= 0) & (w < np.inf)).all():  # h would take their sign
            raise ValueError(f"weights must be finite numbers >= 0, got {value_range(w)}")
        return a, labels.astype(np.int64), w

    def _mean(self, first: Any, second: Any, weight: ArrayLike | None) -> float:
        a, labels, w = self._examples(first, second, weight)
        if not w.any():
            raise ValueError(f"the weights of all {len(w)} examples are 0, so their loss has no mean")
        losses = bi_tempered_logistic_loss(a, labels, self.t1, self.t2, rescale=self.rescale)
        return float(np.average(losses, weights=w))


@dataclass(frozen=True)
class _Objective(_Loss):
    doubled: bool  # for more than two classes XGBoost doubles h; LightGBM multiplies it by K / (K - 1)

    def __call__(self, first: Any, second: Any, sample_weight: ArrayLike | None = None) -> tuple[Array, Array]:
        a, labels, w = self._examples(first, second, sample_weight)
        classes = int(self.num_class)
        inner, outer = factors(self.rescale, classes, self.t1, self.t2)
        gradient, h = _gradient_and_curvature(inner * a, labels, self.t1, self.t2)
        factor = 1.0 if classes == 2 else 2.0 if self.doubled else classes / (classes - 1)
        w = inner * outer * w[:, None]
        gradient, h = w * gradient, w * np.maximum(inner * factor * h, FLOOR)
        return (gradient, h) if classes > 2 else (gradient[:, 1], h[:, 1])

    def metric(self, kind: type[_Loss]) -> _Loss:
        """The metric of the same loss."""
        return kind(self.t1, self.t2, self.num_class, self.rescale)

    def probabilities(self, scores: ArrayLike) -> Array:
        """The probabilities (n, K) of scores (n, K), or (n) for two classes."""
        a = np.asarray(scores, dtype=np.float64)
        if self.num_class == 2:
            a = np.stack((np.zeros(len(a)), a), axis=1)
        inner, _ = factors(self.rescale, int(self.num_class), self.t1, self.t2)
        return np.asarray(tempered_softmax(inner * a, self.t2))


@dataclass(frozen=True)
class _XGBoostMetric(_Loss):
    __name__ = NAME  # the scikit-learn wrapper reads it

    def __call__(self, first: Any, second: Any, sample_weight: ArrayLike | None = None) -> float | tuple[str, float]:
        mean = self._mean(first, second, sample_weight)
        return (NAME, mean) if hasattr(second, "get_label") else mean


@dataclass(frozen=True)
class _LightGBMMetric(_Loss):
    def __call__(self, first: Any, second: Any, weight: ArrayLike | None = None) -> tuple[str, float, bool]:
        return NAME, self._mean(first, second, weight), False


def _gradient_and_curvature(a: Array, labels: NDArray[np.int64], t1: float, t2: float) -> tuple[Array, Array]:
    """The gradient of each row's loss in its logits, and `core.curvature`, from one solve."""
    y, _, _ = encode_classes(a, labels, axis=1, indices=True, xp=xp)
    with np.errstate(all="ignore"):  # exp underflows, and the log of a class outside the support is -inf
        at = core.solved(a, t2, axis=1, xp=xp)
        return core.gradient(y, at, t1, t2, axis=1, xp=xp), core.curvature(at, t1, t2, axis=1, xp=xp)


def __getattr__(name: str) -> Any:
    """Make a classifier when it is asked for, and keep it: its base class needs the library."""
    if name not in _CLASSIFIERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        made = _CLASSIFIERS[name]()
    except ModuleNotFoundError as missing:
        library = str(missing.name).replace("sklearn", "scikit-learn")
        raise ModuleNotFoundError(
            f"bitempered.boosting.{name} needs {library}: pip install {library}", name=missing.name
        ) from None
    made.__qualname__ = name  # pickle finds it by this name
    globals()[name] = made
    return made


def _lightgbm_classifier() -> Any:
    import lightgbm

    base: Any = lightgbm.LGBMClassifier

    class LGBMClassifier(base):
        __doc__ = base.__doc__

        @wraps(base.fit)  # scikit-learn reads the signature
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(base.fit).bind(self, *args, **kwargs)
            if isinstance(self.objective, _Objective) and given.arguments.get("eval_metric") is None:
                given.arguments["eval_metric"] = self.objective.metric(_LightGBMMetric)
            return super().fit(*given.args[1:], **given.kwargs)

        def _process_params(self, stage: str) -> dict[str, Any]:
            # Unless a parameter names a metric, LightGBM adds its own log-loss, which mistakes our scores for
            # probabilities. There is no public way to leave it out except such a parameter.
            params = super()._process_params(stage)
            if isinstance(self.objective, _Objective) and not self.get_params().keys() & METRIC_PARAMETERS:
                params["metric"] = "None"
            return params

        def _tempered(self, given: inspect.BoundArguments) -> bool:
            """Whether a prediction is asked for that LightGBM cannot give for our objective."""
            others = ("raw_score", "pred_leaf", "pred_contrib")
            return isinstance(self.objective_, _Objective) and not any(given.arguments.get(name) for name in others)

        @wraps(base.predict)
        def predict(self, *args: Any, **kwargs: Any) -> Any:
            if not self._tempered(inspect.signature(base.predict).bind(self, *args, **kwargs)):
                return super().predict(*args, **kwargs)
            return self.classes_[self.predict_proba(*args, **kwargs).argmax(axis=1)]

        @wraps(base.predict_proba)
        def predict_proba(self, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(base.predict_proba).bind(self, *args, **kwargs)
            if not self._tempered(given):
                return super().predict_proba(*args, **kwargs)
            given.arguments["raw_score"] = True
            return self.objective_.probabilities(super().predict_proba(*given.args[1:], **given.kwargs))

    return LGBMClassifier


def _xgboost_classifier() -> Any:
    import xgboost

    base: Any = xgboost.XGBClassifier

    class XGBClassifier(base):
        __doc__ = base.__doc__
        eval_metric: Any
        objective: Any

        def get_xgb_params(self) -> dict[str, Any]:
            # XGBoost would add the log-loss of its own softmax.
            ours = isinstance(self.objective, _Objective) and (self.eval_metric is None or callable(self.eval_metric))
            return super().get_xgb_params() | ({"disable_default_eval_metric": True} if ours else {})

        @wraps(base.fit)
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            given = self.eval_metric
            try:
                if isinstance(self.objective, _Objective) and given is None:
                    self.eval_metric = self.objective.metric(_XGBoostMetric)
                return super().fit(*args, **kwargs)
            finally:
                self.eval_metric = given

        @wraps(base.load_model)
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            given = self.objective
            super().load_model(*args, **kwargs)  # for a custom objective the file names one of XGBoost's
            if isinstance(given, _Objective):
                self.objective = given

        @wraps(base.predict)
        def predict(self, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self.objective, _Objective) or kwargs.get("output_margin"):
                return super().predict(*args, **kwargs)
            # For a file of the native interface XGBoost would take scores for probabilities, or classes for scores.
            scores = super().predict(*args, **{**kwargs, "output_margin": True})
            return scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(int)

        @wraps(base.predict_proba)
        def predict_proba(self, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self.objective, _Objective):
                return super().predict_proba(*args, **kwargs)
            given = inspect.signature(base.predict_proba).bind(self, *args, **kwargs).arguments
            options = {name: value for name, value in given.items() if name not in ("self", "X")}
            return self.objective.probabilities(self.predict(given["X"], output_margin=True, **options))

    return XGBClassifier


_CLASSIFIERS = {"LGBMClassifier": _lightgbm_classifier, "XGBClassifier": _xgboost_classifier}
