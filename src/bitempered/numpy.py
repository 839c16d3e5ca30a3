"""The bi-tempered logistic loss on NumPy arrays: unreduced, values checked, gradient and loss from one solve.

float16 and float32 compute in float32, float64 in float64; the result has the dtype of the input. Bad values raise.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitempered import core
from bitempered.checks import (
    check_binary,
    check_binary_probabilities,
    check_class_loss,
    check_floating,
    check_indices,
    check_logits,
    check_probabilities,
    check_temperature,
    check_temperatures,
    is_integer,
    negative_weight,
    sum_tolerance,
)
from bitempered.encoding import encode_binary, encode_classes, factors, namespace, shifted, weigh_elements, widen

__all__ = [
    "bi_tempered_binary_logistic_loss",
    "bi_tempered_logistic_loss",
    "exp_t",
    "log_partition",
    "log_t",
    "loss_and_grad",
    "tempered_log_softmax",
    "tempered_sigmoid",
    "tempered_softmax",
]

Array = NDArray[Any]

xp = namespace(np)


def log_t(x: ArrayLike, t: float) -> Array:
    """The tempered logarithm, (x^(1-t) - 1) / (1 - t); the natural one at t = 1.

    Args:
        x: any shape; NaN where negative.
        t: the temperature, a finite number >= 0.

    >>> log_t([0.25, 1.0, 4.0], 0.5)
    array([-1.,  0.,  2.])
    """
    return _elementwise(core.log_t, x, t)


def exp_t(x: ArrayLike, t: float) -> Array:
    """The tempered exponential, [1 + (1-t) x]_+^(1/(1-t)); the natural one at t = 1. The inverse of `log_t`.

    Args:
        x: any shape.
        t: the temperature, a finite number >= 0.

    >>> exp_t([-3.0, 0.0, 2.0], 0.5)
    array([0., 1., 4.])
    """
    return _elementwise(core.exp_t, x, t)


def log_partition(logits: ArrayLike, t: float, axis: int = -1) -> Array:
    """lambda_t(logits), the number that makes exp_t(logits - lambda_t) sum to 1; log-sum-exp at t = 1.

    Args:
        logits: any shape with a class axis. -inf masks a class.
        t: the temperature, a finite number >= 0.
        axis: the class axis.

    Returns:
        The shape of `logits` without `axis`; inf where it overflows the dtype, which happens for t far above 1.

    >>> log_partition([[0.0, 0.0, 0.0, 0.0]], 2.0)
    array([3.])
    """
    logits = np.asarray(logits)
    _, lam = log_softmax_and_partition(logits, t, axis)
    return _cast(np.squeeze(lam, axis), logits)


def tempered_log_softmax(logits: ArrayLike, t: float, axis: int = -1) -> Array:
    """The natural logarithm of `tempered_softmax`, computed without forming it; -inf outside a finite support (t < 1).

    >>> np.exp(tempered_log_softmax([0.0, 0.0, 0.0, 0.0], 1.2))
    array([0.25, 0.25, 0.25, 0.25])
    """
    logits = np.asarray(logits)
    return _cast(log_softmax_and_partition(logits, t, axis)[0], logits)


def tempered_softmax(logits: ArrayLike, t: float, axis: int = -1) -> Array:
    """exp_t(logits - lambda_t(logits)): the probabilities of a model trained with temperature t2 = t.

    Args:
        logits: any shape with a class axis. -inf masks a class.
        t: the temperature, a finite number >= 0. Softmax at 1, a heavier tail above, sparse below.
        axis: the class axis, which sums to 1.

    >>> tempered_softmax([4.0, 2.0, 0.0], 0.0)
    array([1., 0., 0.])
    """
    logits = np.asarray(logits)
    return _cast(np.exp(log_softmax_and_partition(logits, t, axis)[0]), logits)


def tempered_sigmoid(logits: ArrayLike, t: float) -> Array:
    """The probability of the positive class, tempered_softmax([0, a])[1] for each logit a; the sigmoid at t = 1.

    >>> tempered_sigmoid([-2.0, 0.0, 2.0], 0.0)
    array([0. , 0.5, 1. ])
    """
    logits = np.asarray(logits)
    check_floating(logits, "logits")
    return tempered_softmax(np.stack((np.zeros_like(logits), logits), axis=-1), t)[..., 1]


def bi_tempered_logistic_loss(
    logits: ArrayLike,
    target: ArrayLike,
    t1: float,
    t2: float,
    *,
    weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    axis: int = -1,
    rescale: bool = False,
) -> Array:
    """The robust bi-tempered logistic loss of each example.

        bregman_divergence(y, tempered_softmax(logits, t2), t1)      see bitempered.divergences for the formula

    It is 0 exactly where the two agree. At t1 = t2 = 1 it is the cross-entropy minus the entropy of the target.

    Args:
        logits: any shape with a class axis of length C, in float16, float32 or float64. -inf masks a class.
        target: class indices of any integer dtype, shaped like `logits` without the class axis; or class probabilities
            in a floating dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        weight: (C), not negative, one weight per class: with W = sum(w y), the loss is W times that of w y / W. For
            class indices without smoothing only the weights of the targets matter.
        label_smoothing: e in [0, 1] turns y into (1 - e) y + e / C.
        axis: the class axis.
        rescale: whether to multiply the logits by C^(t2-1) and the loss by C^(1-t1). At equal logits the gradient is
            then that of cross-entropy, so that its learning rates suit every pair of temperatures. The probabilities
            are `tempered_softmax(C**(t2 - 1) * logits, t2)`.

    Returns:
        The shape of `logits` without the class axis, in the dtype of `logits`.

    >>> bi_tempered_logistic_loss([[4.0, 0.0, 0.0], [0.0, 9.0, 0.0]], [0, 2], t1=0.8, t2=1.2).round(4)
    array([0.0509, 3.2077])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """
    return _loss(logits, target, t1, t2, weight=weight, smoothing=label_smoothing, axis=axis, rescale=rescale)[0]


def loss_and_grad(
    logits: ArrayLike,
    target: ArrayLike,
    t1: float,
    t2: float,
    *,
    weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    axis: int = -1,
    rescale: bool = False,
) -> tuple[Array, Array]:
    """`bi_tempered_logistic_loss` and its gradient in the logits from one solve, for hand-written optimisers.

    The gradient has the shape of `logits`; each of its rows is the gradient of that row's loss. For a mean over N
    examples divide both by N.

    >>> losses, gradient = loss_and_grad([[2.0, 0.0]], [1], t1=1.0, t2=1.0)
    >>> losses.round(4), gradient.round(4)
    (array([2.1269]), array([[ 0.8808, -0.8808]]))
    """
    return _loss(
        logits, target, t1, t2, weight=weight, smoothing=label_smoothing, axis=axis, rescale=rescale, with_gradient=True
    )


def bi_tempered_binary_logistic_loss(
    logits: ArrayLike,
    target: ArrayLike,
    t1: float,
    t2: float,
    *,
    weight: ArrayLike | None = None,
    pos_weight: ArrayLike | None = None,
    rescale: bool = False,
) -> Array:
    """`bi_tempered_logistic_loss` of each logit a against 0: logits (0, a) and probabilities (1 - y, y).

    Args:
        logits: any shape, in float16, float32 or float64.
        target: probabilities of the positive class in [0, 1], of any real dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the sigmoid, t2 >= t1. Above 1 its tail is heavy.
        weight: multiplies each loss; not negative; broadcasts to the shape of `logits`.
        pos_weight: the class weights (1, pos_weight); not negative; broadcasts to the shape of `logits`.
        rescale: as in `bi_tempered_logistic_loss`, with C = 2.

    Returns:
        The shape and dtype of `logits`.

    >>> bi_tempered_binary_logistic_loss([-8.0, 8.0], [0.0, 0.0], t1=0.5, t2=2.0).round(4)
    array([0.0304, 1.2555])
    """
    t1, t2 = check_temperatures(t1, t2)
    logits, target = np.asarray(logits), np.asarray(target)
    weight, pos_weight = _optional(weight), _optional(pos_weight)
    check_binary(logits, target, weight, pos_weight)
    check_binary_probabilities(target, "target")
    _check_weight(weight, "weight")
    _check_weight(pos_weight, "pos_weight")
    with _quiet():
        a, y, w = encode_binary(widen(logits), target, pos_weight, xp=xp)
        weighted = core.weigh(y, w, is_label=False, axis=-1, xp=xp)
        losses, _ = _weighted_loss(a, weighted, t1, t2, axis=-1, rescale=rescale, with_gradient=False)
        if weight is not None:
            losses = weigh_elements(losses, weight, xp=xp)
        return losses.astype(logits.dtype)


def log_softmax_and_partition(logits: Array, t: float, axis: int) -> tuple[Array, Array]:
    """Log-probabilities, and lambda_t with the class axis kept at length 1, in the dtype of the computation."""
    t = check_temperature(t, "t")
    axis = check_logits(logits, axis)
    with _quiet():
        a = widen(logits)
        u, m = core.solve(a, t, axis=axis, xp=xp)
        return core.log_probs(u, m, t, xp=xp), core.log_partition(a, m, t, axis=axis, xp=xp)


def _elementwise(function: Any, x: ArrayLike, t: float) -> Array:
    t = check_temperature(t, "t")
    x = np.asarray(x)
    check_floating(x, "x")
    with _quiet():
        return np.asarray(function(widen(x), t, xp=xp)).astype(x.dtype)


def _loss(
    logits: ArrayLike,
    target: ArrayLike,
    t1: float,
    t2: float,
    *,
    weight: ArrayLike | None,
    smoothing: float,
    axis: int,
    rescale: bool,
    with_gradient: bool = False,
) -> tuple[Array, Array]:
    t1, t2 = check_temperatures(t1, t2)
    logits, target, weight = np.asarray(logits), np.asarray(target), _optional(weight)
    axis = check_class_loss(logits, target, weight, label_smoothing=smoothing, axis=axis)
    indices = is_integer(target)
    if indices:
        check_indices(target, logits.shape[axis], "target")
    else:
        check_probabilities(widen(target), axis, sum_tolerance(target.dtype.itemsize), "target")
    _check_weight(weight, "weight")
    with _quiet():
        a = widen(logits)
        y, w, is_label = encode_classes(a, target, weight, label_smoothing=smoothing, axis=axis, indices=indices, xp=xp)
        weighted = core.weigh(y, w, is_label=is_label, axis=axis, xp=xp)
        losses, gradient = _weighted_loss(a, weighted, t1, t2, axis=axis, rescale=rescale, with_gradient=with_gradient)
        return losses.astype(logits.dtype), gradient.astype(logits.dtype)


def _weighted_loss(
    a: Array, target: core.Target, t1: float, t2: float, *, axis: int, rescale: bool, with_gradient: bool
) -> tuple[Array, Array]:
    """Return the loss of each example and its gradient in the logits, which is empty unless `with_gradient`."""
    inner, outer = factors(rescale, a.shape[axis], t1, t2)
    a = shifted(a, axis=axis, xp=xp) if rescale else a
    if not with_gradient:
        u, m = core.solve(inner * a, t2, axis=axis, xp=xp)
        losses = core.weighted_loss(target, core.log_probs(u, m, t2, xp=xp), t1, axis=axis, xp=xp)
        return outer * np.squeeze(losses, axis), np.empty(0)
    at = core.solved(inner * a, t2, axis=axis, xp=xp)
    losses = core.weighted_loss(target, at.log_p, t1, axis=axis, xp=xp)
    gradient = core.weighted_gradient(target, at, t1, t2, axis=axis, xp=xp)
    return outer * np.squeeze(losses, axis), (inner * outer) * gradient


def _quiet() -> np.errstate:
    # inf and NaN are valid results here (masked classes, overflow, bad logits), and exp may underflow: do not warn.
    return np.errstate(all="ignore")


def _cast(result: Array, like: Array) -> Array:
    with _quiet():
        return result.astype(like.dtype)


def _optional(x: ArrayLike | None) -> Array | None:
    return None if x is None else np.asarray(x)


def _check_weight(weight: Array | None, name: str) -> None:
    if weight is not None and np.any(weight < 0):
        raise negative_weight(weight, name)
