"""Shared by the adapters: the namespace `xp` for `core`, the dtype to compute in, encoding targets, rescaling."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bitempered import core
from bitempered.checks import check_rescale

Array = Any  # of the framework that `xp` belongs to


def namespace(module: Any, **own: Any) -> Any:
    """Return the `xp` of a framework: a module with NumPy's names, and its `own` functions where those differ."""
    names = ["exp", "expm1", "log", "log1p", "ones_like", "where"]
    names += ["broadcast_to", "expand_dims", "reshape", "stack", "zeros_like"]
    defaults = {
        "max": lambda x, axis: module.max(x, axis=axis, keepdims=True),
        "sum": lambda x, axis: module.sum(x, axis=axis, keepdims=True),
        "iterate": iterate,
        "eps": lambda x: float(module.finfo(x.dtype).eps),
        "cast": lambda x, like: x.astype(like.dtype),
        "widen": widen,
        "class_indices": lambda classes, target: module.arange(classes),
    }
    functions = {name: getattr(module, name) for name in names if name not in own}
    return SimpleNamespace(**defaults | functions | own)


def with_exact_slopes(xp: Any) -> Any:
    """Return `xp` for functions that a framework differentiates itself.

    It takes the derivative of expm1 from its value, as expm1(x) + 1, which has lost its digits where x is far below 0.
    """

    def expm1(x: Array) -> Array:
        low = x < -0.5
        return xp.where(low, xp.exp(xp.where(low, x, -1.0)) - 1, xp.expm1(xp.where(low, 0.0, x)))

    return SimpleNamespace(**vars(xp) | {"expm1": expm1})


def iterate(step: Callable[[Array], Array], x: Array, count: int) -> Array:
    for _ in range(count):
        x = step(x)
    return x


def compute_dtype(name: str) -> str:
    """The name of the dtype to compute in: half precision computes in float32."""
    return "float64" if name == "float64" else "float32"


def widen(x: Array) -> Array:
    """Convert half precision to the dtype to compute in; leave other floats as they are."""
    return x if x.dtype.itemsize > 2 else x.astype(compute_dtype(x.dtype.name))


def factors(rescale: bool, classes: int, t1: float, t2: float) -> tuple[float, float]:
    """What to multiply the logits by, and the loss: with `rescale` the two `core.scales`, otherwise 1 and 1.

    A gradient in the logits is multiplied by both, a second derivative once more by the first.
    """
    check_rescale(rescale, classes, t2)
    return core.scales(classes, t1, t2) if rescale else (1.0, 1.0)


def shifted(a: Array, *, axis: int, xp: Any) -> Array:
    """Logits of which the largest is 0: a factor would round, or overflow, what they have in common."""
    return a - xp.max(a, axis=axis)


def rescaled(a: Array, t1: Any, t2: Any, *, classes: int, axis: int | None, xp: Any) -> tuple[Array, Any]:
    """The logits times the first of `core.scales`, and the second. A logit that is not finite stays as it is.

    With an `axis` of classes they are `shifted` first.

    A logit that stays has no derivative in t2: where its class is masked or its example ignored, 0 times inf or NaN
    would be NaN. The choice also keeps a compiler from fusing the product into max(a) - a, which could then be
    negative.
    """
    inner, outer = core.scales(classes, t1, t2)
    a = a if axis is None else shifted(a, axis=axis, xp=xp)
    finite = abs(a) < math.inf
    return xp.where(finite, inner * xp.where(finite, a, 0.0), a), outer


def encode_classes(
    a: Array,
    target: Array,
    weight: Array | None = None,
    *,
    label_smoothing: float = 0.0,
    axis: int,
    indices: bool,
    checked: bool = True,
    kept: Array | None = None,
    all_classes: int | None = None,
    xp: Any,
) -> tuple[Array, Array | None, bool]:
    """Return class probabilities y and class weights w that broadcast against the logits a, and whether y is one-hot.

    The target holds class `indices`, without the class axis, or probabilities. Unless it is `checked`, y is NaN for an
    index that is not a class. Smoothing covers the classes `kept`, or `all_classes` if a has a part of them.
    """
    classes, along_axis = a.shape[axis], (-1,) + (1,) * (len(a.shape) - axis - 1)
    is_label = indices and not label_smoothing
    if indices:
        target = xp.reshape(xp.class_indices(classes, target), along_axis) == xp.expand_dims(target, axis)
    y = xp.cast(target, a)
    if indices and not checked:
        y = xp.where(xp.sum(y, axis=axis) == 0, math.nan, y)
    if label_smoothing:
        count = all_classes or classes if kept is None else xp.sum(xp.cast(kept, a), axis=axis)
        uniform = label_smoothing / count
        y = (1 - label_smoothing) * y + (uniform if kept is None else xp.where(kept, uniform, 0.0))
    if weight is None:
        return y, None, is_label
    w = xp.reshape(xp.cast(weight, a), along_axis)
    if is_label:
        w = xp.where(y > 0, w, 1.0)  # other weights do not matter, even infinite ones
    return y, w, is_label


def encode_binary(
    a: Array, target: Array, pos_weight: Array | None = None, *, label_smoothing: float = 0.0, xp: Any
) -> tuple[Array, Array, Array | None]:
    """Return logits (0, a), probabilities (1 - y, y) and weights (1, pos_weight), on a new last axis."""
    y = xp.cast(target, a)
    if label_smoothing:
        y = (1 - label_smoothing) * y + label_smoothing / 2
    a, pair = xp.stack((xp.zeros_like(a), a), -1), xp.stack((1 - y, y), -1)
    if pos_weight is None:
        return a, pair, None
    w = xp.broadcast_to(xp.cast(pos_weight, a), y.shape)
    return a, pair, xp.stack((xp.ones_like(w), w), -1)


def nan_if_negative(y: Array, w: Array | None, *, xp: Any) -> Array:
    """The probabilities y, and NaN where one or its weight is negative: for values that cannot be checked."""
    return xp.where((y if w is None else y * w) >= 0, y, math.nan)


def weigh_elements(losses: Array, weight: Array, *, xp: Any) -> Array:
    """The losses times their weights, where 0 times an infinite loss is 0."""
    return xp.where(weight == 0, 0.0, losses * weight)
