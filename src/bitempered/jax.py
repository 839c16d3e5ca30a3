"""The bi-tempered logistic loss for JAX: unreduced losses in the style of optax.

Everything works under jit, vmap, grad, jvp and their compositions, of any order, and on sharded arrays. A loss solves
once, and its derivatives are closed forms of the result: nothing is differentiated through the solver.

A temperature may be a Python number or an array: a scalar, or one temperature per example (broadcasting against the
losses). Numbers are fixed when the function is traced, and each new pair compiles a new program. Arrays are traced like
any other, and so are the numbers that you pass to your own `jax.jit` function unless you make them static: a schedule
compiles once. Arrays have derivatives, smooth through 1, and cost more Newton steps, enough for any temperature.

Half precision computes in float32; the result has the dtype of the logits. As usual in JAX, values are not checked,
except temperatures that are numbers, or arrays on the CPU outside of any transformation. Invalid values give NaN: class
indices out of range, negative probabilities and weights, traced temperatures outside their range. Class probabilities
need not sum to 1: y counts as sum(y) times y / sum(y).
"""

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from bitempered import core, pushforward
from bitempered.checks import (
    broadcasts,
    check_binary,
    check_class_loss,
    check_floating,
    check_logits,
    check_rescale,
    check_temperature,
    check_temperatures,
    is_integer,
)
from bitempered.encoding import (
    encode_binary,
    encode_classes,
    namespace,
    nan_if_negative,
    rescaled,
    weigh_elements,
    widen,
)
from bitempered.extras import install

try:
    import jax
    import jax.numpy as jnp
    from jax import Array
    from jax.custom_derivatives import SymbolicZero
    from jax.typing import ArrayLike
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"bitempered.jax needs JAX: {install('jax')}") from None

__all__ = [
    "bi_tempered_binary_logistic_loss",
    "bi_tempered_logistic_loss",
    "exp_t",
    "log_partition",
    "log_t",
    "tempered_log_softmax",
    "tempered_sigmoid",
    "tempered_softmax",
]

xp = namespace(
    jnp,
    max=lambda x, axis: jnp.max(jax.lax.stop_gradient(x), axis=axis, keepdims=True),
    # XLA's loop compiles a step once; Python's would unroll it.
    iterate=lambda step, x, count: jax.lax.fori_loop(0, count, lambda _, x: step(x), x),
)


def log_t(x: ArrayLike, t: ArrayLike) -> Array:
    """The tempered logarithm, (x^(1-t) - 1) / (1 - t); the natural one at t = 1.

    Args:
        x: any shape; NaN where negative.
        t: the temperature, >= 0; an array broadcasts against `x`.

    >>> log_t(jnp.array([0.25, 1.0, 4.0]), 0.5)
    Array([-1.,  0.,  2.], dtype=float32)
    """
    x = jnp.asarray(x)
    check_floating(x, "x")
    wide = widen(x)
    return _log_t(wide, _temperature(t, "t", wide)).astype(x.dtype)


def exp_t(x: ArrayLike, t: ArrayLike) -> Array:
    """The tempered exponential, [1 + (1-t) x]_+^(1/(1-t)); the natural one at t = 1. The inverse of `log_t`.

    Args:
        x: any shape.
        t: the temperature, >= 0; an array broadcasts against `x`.

    >>> exp_t(jnp.array([-3.0, 0.0, 2.0]), 0.5)
    Array([0., 1., 4.], dtype=float32)
    """
    x = jnp.asarray(x)
    check_floating(x, "x")
    wide = widen(x)
    return _exp_t(wide, _temperature(t, "t", wide)).astype(x.dtype)


def log_partition(logits: ArrayLike, t: ArrayLike, axis: int = -1, where: ArrayLike | None = None) -> Array:
    """lambda_t(logits), the number that makes exp_t(logits - lambda_t) sum to 1; log-sum-exp at t = 1.

    Args:
        logits: any shape with a class axis. -inf masks a class.
        t: the temperature, >= 0; an array broadcasts against the result.
        axis: the class axis.
        where: the classes to include, as many axes as `logits`; the others are masked.

    Returns:
        The shape of `logits` without `axis`; inf where it overflows the dtype, which happens for t far above 1.

    >>> log_partition(jnp.zeros((1, 4)), 2.0)
    Array([3.], dtype=float32)
    """
    logits = jnp.asarray(logits)
    return jnp.squeeze(log_softmax_and_partition(logits, t, axis, where)[1], axis).astype(logits.dtype)


def tempered_log_softmax(logits: ArrayLike, t: ArrayLike, axis: int = -1, where: ArrayLike | None = None) -> Array:
    """The natural logarithm of `tempered_softmax`, computed without forming it; -inf outside a finite support (t < 1).

    >>> jnp.exp(tempered_log_softmax(jnp.zeros(4), 1.2))
    Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    logits = jnp.asarray(logits)
    return log_softmax_and_partition(logits, t, axis, where)[0].astype(logits.dtype)


def tempered_softmax(logits: ArrayLike, t: ArrayLike, axis: int = -1, where: ArrayLike | None = None) -> Array:
    """exp_t(logits - lambda_t(logits)): the probabilities of a model trained with temperature t2 = t.

    Args:
        logits: any shape with a class axis. -inf masks a class.
        t: the temperature, >= 0; an array broadcasts against `logits` without its class axis. Softmax at 1, a heavier
            tail above, sparse below.
        axis: the class axis, which sums to 1.
        where: the classes to include, as many axes as `logits`; the others get probability 0.

    >>> tempered_softmax(jnp.array([4.0, 2.0, 0.0]), 0.0)
    Array([1., 0., 0.], dtype=float32)
    """
    logits = jnp.asarray(logits)
    return jnp.exp(log_softmax_and_partition(logits, t, axis, where)[0]).astype(logits.dtype)


def tempered_sigmoid(logits: ArrayLike, t: ArrayLike) -> Array:
    """The probability of the positive class, tempered_softmax([0, a])[1] for each logit a; the sigmoid at t = 1.

    >>> tempered_sigmoid(jnp.array([-2.0, 0.0, 2.0]), 0.0)
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    logits = jnp.asarray(logits)
    check_floating(logits, "logits")
    return tempered_softmax(jnp.stack((jnp.zeros_like(logits), logits), axis=-1), t)[..., 1]


def bi_tempered_logistic_loss(
    logits: ArrayLike,
    target: ArrayLike,
    t1: ArrayLike,
    t2: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    axis: int = -1,
    where: ArrayLike | None = None,
    rescale: bool = False,
) -> Array:
    """The robust bi-tempered logistic loss of each example, in the style of `optax.losses.softmax_cross_entropy`.

        bregman_divergence(y, tempered_softmax(logits, t2), t1)      see bitempered.divergences for the formula

    It is 0 exactly where the two agree. At t1 = t2 = 1 it is the cross-entropy minus the entropy of the target.

    Args:
        logits: any shape with a class axis of length C, in float16, bfloat16, float32 or float64. -inf masks a class.
        target: class indices of any integer dtype, shaped like `logits` without the class axis; or class probabilities
            in a floating dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2; an array broadcasts against the losses. Below 1 the loss is
            bounded.
        t2: temperature of the softmax, t2 >= t1; an array broadcasts against the losses. Above 1 its tail is heavy.
        weight: (C), not negative, one weight per class: with W = sum(w y), the loss is W times that of w y / W. For
            class indices without smoothing only the weights of the targets matter.
        label_smoothing: e in [0, 1] turns y into (1 - e) y + e / C, where C counts the classes that `where` includes.
        axis: the class axis.
        where: booleans, as in optax: with as many axes as `logits` they say which classes to include, and the others
            are masked as by a logit of -inf; without the class axis they say which examples to include. An excluded
            example, or one without included classes, has loss 0.
        rescale: whether to multiply the logits by C^(t2-1) and the loss by C^(1-t1), where C counts all classes. At
            equal logits the gradient is then that of cross-entropy, so that its learning rates suit every pair of
            temperatures. The probabilities are `tempered_softmax(C**(t2 - 1) * logits, t2)`.

    Returns:
        The shape of `logits` without the class axis, in the dtype of `logits`.

    >>> logits = jnp.array([[4.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    >>> bi_tempered_logistic_loss(logits, jnp.array([0, 2]), t1=0.8, t2=1.2).round(4)
    Array([0.0509, 3.2077], dtype=float32)

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """
    logits, target = jnp.asarray(logits), _as_target(target)
    weight = None if weight is None else jnp.asarray(weight)
    axis = check_class_loss(logits, target, weight, label_smoothing=label_smoothing, axis=axis)
    a = widen(logits)
    kept = _kept(where, logits, axis)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "axis": axis, "kept": kept, "checked": False}
    y, w, is_label = encode_classes(a, target, weight, indices=is_integer(target), **options, xp=xp)
    if kept is not None:
        any_kept = jnp.any(kept, axis=axis, keepdims=True)
        # If a row keeps no class, its logits become 0 (and its weight 0): no NaN can reach a derivative.
        a = jnp.where(kept, a, jnp.where(any_kept, -math.inf, 0.0))
        y = jnp.where(any_kept, y, 0.0)
    first, second = _temperatures(t1, t2, a, axis=axis, rescale=rescale)
    losses = _loss(a, y, w, first, second, axis=axis, is_label=is_label, rescale=rescale)
    return jnp.squeeze(losses, axis).astype(logits.dtype)


def bi_tempered_binary_logistic_loss(
    logits: ArrayLike,
    target: ArrayLike,
    t1: ArrayLike,
    t2: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    pos_weight: ArrayLike | None = None,
    rescale: bool = False,
) -> Array:
    """`bi_tempered_logistic_loss` of each logit a against 0: logits (0, a) and probabilities (1 - y, y).

    Args:
        logits: any shape, in float16, bfloat16, float32 or float64.
        target: probabilities of the positive class in [0, 1], of any real dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2; an array broadcasts against `logits`.
        t2: temperature of the sigmoid, t2 >= t1; an array broadcasts against `logits`.
        weight: multiplies each loss; broadcasts to the shape of `logits`.
        pos_weight: the class weights (1, pos_weight); broadcasts to the shape of `logits`.
        rescale: as in `bi_tempered_logistic_loss`, with C = 2.

    Returns:
        The shape and dtype of `logits`.

    >>> bi_tempered_binary_logistic_loss(jnp.array([-8.0, 8.0]), jnp.zeros(2), t1=0.5, t2=2.0).round(4)
    Array([0.0304, 1.2555], dtype=float32)
    """
    logits, target = jnp.asarray(logits), _as_target(target)
    weight = None if weight is None else jnp.asarray(weight)
    pos_weight = None if pos_weight is None else jnp.asarray(pos_weight)
    check_binary(logits, target, weight, pos_weight)
    a, y, w = encode_binary(widen(logits), target, pos_weight, xp=xp)
    first, second = _temperatures(t1, t2, a, axis=logits.ndim, rescale=rescale)
    losses = _loss(a, y, w, first, second, axis=logits.ndim, is_label=False, rescale=rescale)[..., 0]
    if weight is not None:
        weight = jnp.where(weight < 0, math.nan, weight.astype(losses.dtype))
        losses = weigh_elements(losses, weight, xp=xp)
    return losses.astype(logits.dtype)


def log_softmax_and_partition(
    logits: Array, t: ArrayLike, axis: int, where: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Log-probabilities, and lambda_t with the class axis kept at length 1, in the dtype of the computation."""
    axis = check_logits(logits, axis)
    a = widen(logits)
    if where is not None and jnp.ndim(where) != logits.ndim:
        raise ValueError(f"where must have as many axes as logits, {logits.ndim}, got shape {jnp.shape(where)}")
    kept = _kept(where, logits, axis)
    if kept is not None:
        a = jnp.where(kept, a, -math.inf)
    return _log_softmax(a, _per_row(_temperature(t, "t", a), "t", a, axis), axis)


# Temperatures


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Fixed:
    """A Python number that stays one under jit and `jax.custom_jvp`, so that core takes its shortcuts for numbers."""

    value: float


def _value(t: Any) -> Any:
    return t.value if isinstance(t, _Fixed) else t


def _as_target(target: ArrayLike) -> Array:
    """Return the target as JAX's array. Without x64 JAX wraps large integers around, perhaps to classes.

    Under `jax.jit` and `jax.vmap` they wrap where we cannot see it.
    """
    if isinstance(target, np.ndarray | np.generic) and target.dtype.kind in "iu":
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(target.dtype))
        target = target.clip(limits.min, limits.max)
    return jnp.asarray(target)


def _temperature(t: ArrayLike, name: str, like: Array) -> Any:
    if isinstance(t, Real):
        return _Fixed(check_temperature(t, name))
    dtype = getattr(t, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name} must be a number or an array, got {type(t).__name__}")
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {dtype}")
    known = _concrete(t, 0.0)
    for value in (known.min(initial=0.0), known.max(initial=0.0)):
        check_temperature(float(value), name)
    array = jnp.asarray(t, like.dtype)
    return _where_valid((array >= 0) & (array < math.inf), array)


def _temperatures(t1: ArrayLike, t2: ArrayLike, a: Array, *, axis: int, rescale: bool) -> tuple[Any, Any]:
    """Validate what is known before tracing; return the two as `_Fixed`, or as arrays that broadcast against `a`."""
    if isinstance(t1, Real) and isinstance(t2, Real):
        first, second = check_temperatures(t1, t2)
        check_rescale(rescale, a.shape[axis], second)
        return _Fixed(first), _Fixed(second)
    first, second = (_per_row(_temperature(t, name, a), name, a, axis) for t, name in ((t1, "t1"), (t2, "t2")))
    known = np.stack(np.broadcast_arrays(_concrete(t1, 0.0), _concrete(t2, 2.0)), -1).reshape(-1, 2)
    for pair in known[(known[:, 0] >= 2) | (known[:, 0] > known[:, 1])][:1]:
        check_temperatures(float(pair[0]), float(pair[1]))
    check_rescale(rescale, a.shape[axis], float(_concrete(t2, 0.0).max(initial=0.0)))
    valid = (_value(first) < 2) & (_value(first) <= _value(second))
    return _where_valid(valid, first), _where_valid(valid, second)


def _concrete(t: Any, otherwise: float) -> Any:
    """Return t as a NumPy array if that costs nothing, `otherwise` if it is traced or on an accelerator."""
    if isinstance(t, jax.core.Tracer):
        return np.asarray(otherwise)
    far = isinstance(t, Array) and any(device.platform != "cpu" for device in t.devices())
    return np.asarray(otherwise if far else t)


def _where_valid(valid: Array, t: Any) -> Any:
    return t if isinstance(t, _Fixed) else jnp.where(valid, t, math.nan)


def _per_row(t: Any, name: str, a: Array, axis: int) -> Any:
    """Reshape an array of temperatures, one for all or one per example, to broadcast against `a`."""
    if isinstance(t, _Fixed) or t.ndim == 0:
        return t
    rows = a.shape[:axis] + a.shape[axis + 1 :]
    if not broadcasts(t.shape, rows):
        raise ValueError(f"{name} must broadcast to the examples, {rows}, got shape {t.shape}")
    return jnp.expand_dims(jnp.broadcast_to(t, rows), axis)


# Derivatives: each rule calls its own function for the value, so that it can itself be differentiated.


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _solution(a: Array, t: Any, axis: int) -> tuple[Array, Array]:
    """m = psi_s(lambda_t(a) - max(a)), differentiated with max(a) constant, and lambda_t(a); axes are kept."""
    t = _value(t)
    _, m = core.solve(a, t, axis=axis, xp=xp)
    return m, core.log_partition(a, m, t, axis=axis, xp=xp)


@partial(_solution.defjvp, symbolic_zeros=True)
def _solution_jvp(axis: int, primals: Any, tangents: Any) -> Any:
    a, t = primals
    da, dt = tangents
    m, partition = _solution(a, t, axis)
    at, t = _state(a, m, t, axis), _value(t)
    da, dt = _change(da), _change(dt)
    dm = pushforward.of_normalizer(at, t, da=da, dt=dt, axis=axis, xp=xp)
    _, d_partition = pushforward.of_softmax(at.log_p, t, da=da, dt=dt, outside=at.outside, axis=axis, xp=xp)
    return (m, partition), (dm, d_partition)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _log_probs(a: Array, m: Array, t: Any, axis: int) -> Array:
    """`core.log_probs`; m is that of `_solution(a, t)`."""
    return core.log_probs(core.gaps(a, axis=axis, xp=xp), m, _value(t), xp=xp)


@partial(_log_probs.defjvp, symbolic_zeros=True)
def _log_probs_jvp(axis: int, primals: Any, tangents: Any) -> Any:
    a, m, t = primals
    da, _, dt = map(_change, tangents)  # m is a function of a and t: its share is in theirs
    at, t = _state(a, m, t, axis), _value(t)
    d_log_p, _ = pushforward.of_softmax(at.log_p, t, da=da, dt=dt, outside=at.outside, axis=axis, xp=xp)
    return at.log_p, d_log_p


def _state(a: Array, m: Array, t: Any, axis: int) -> core.State:
    """`core.state` with the derivatives of `_log_probs`; m is that of `_solution(a, t)`."""
    u, log_p = core.gaps(a, axis=axis, xp=xp), _log_probs(a, m, t, axis)
    return core.state(u, m, _value(t), log_p=log_p, axis=axis, xp=xp)


def _change(tangent: Any) -> Any:
    """A tangent as `core` takes it: None for an argument that does not change."""
    return None if isinstance(tangent, (SymbolicZero, _Fixed)) else tangent


@partial(jax.custom_jvp, nondiff_argnums=(6, 7))
def _weighted_loss(a: Array, m: Array, y: Array, w: Array | None, t1: Any, t2: Any, axis: int, is_label: bool) -> Array:
    """`core.weighted_loss`, the class axis kept at length 1; m is that of `_solution(a, t2)`."""
    log_p = _log_probs(a, m, t2, axis)
    target = core.weigh(y, w, is_label=is_label, axis=axis, xp=xp)
    return core.weighted_loss(target, log_p, _value(t1), axis=axis, xp=xp)


@partial(_weighted_loss.defjvp, symbolic_zeros=True)
def _weighted_loss_jvp(axis: int, is_label: bool, primals: Any, tangents: Any) -> Any:
    a, m, y, w, t1, t2 = primals
    da, _, dy, dw, dt1, dt2 = map(_change, tangents)  # m is a function of a and t2: its share is in theirs
    losses = _weighted_loss(a, m, y, w, t1, t2, axis, is_label)
    at, t1, t2 = _state(a, m, t2, axis), _value(t1), _value(t2)
    target = core.weigh(y, w, is_label=is_label, axis=axis, xp=xp)
    dz = None if dy is None else dy if w is None else w * dy
    if dw is not None:
        dz = y * dw if dz is None else dz + y * dw
    return losses, pushforward.of_loss(target, at, t1, t2, da=da, dz=dz, dt1=dt1, dt2=dt2, axis=axis, xp=xp)


def _elementwise(function: Any, by_x: Any, by_t: Any) -> Any:
    """A function of core of (x, t), with its derivatives as functions of x, of its value y and of t."""

    @jax.custom_jvp
    def value(x: Array, t: Any) -> Array:
        return function(x, _value(t), xp=xp)

    @partial(value.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        x, t = primals
        dx, dt = map(_change, tangents)
        y, t = value(x, t), _value(t)
        dy = jnp.zeros_like(y)
        if dx is not None:
            dy += by_x(x, y, t) * dx
        if dt is not None:
            dy += by_t(x, y, t) * dt
        return y, dy

    return value


def _log_t_slope(x: Array, t: Any) -> Array:
    """The derivative of `core.log_t` in t. Its limits at x = 0 and at inf are both those of `core.phi_slope` at inf."""
    above = x > 1
    gap = jnp.where(above, 1.0, -1.0) * jnp.log(x)
    return -core.phi_slope(gap, jnp.where(above, 1 - t, t - 1), xp=xp)


def _exp_t_slope(y: Array, t: Any) -> Array:
    """The derivative of `core.exp_t` in t where its value is y: y (e^((t-1) l) - 1 - (t-1) l) / (t-1)^2, l = log y."""
    return jnp.where(y == 0, 0.0, core.bend(jnp.log(jnp.where(y == 0, 1.0, y)), t - 1, 1, xp=xp))


def _exp_t_power(y: Array, t: Any) -> Array:
    """The derivative y^t of `core.exp_t` in x where its value is y."""
    return jnp.where(y == 0, 0.0, jnp.exp(t * jnp.log(jnp.where(y == 0, 1.0, y))))


_log_t = _elementwise(
    core.log_t,
    lambda x, y, t: jnp.power(x, -t),  # the chain rule gives 0 times inf at x = 0
    lambda x, y, t: _log_t_slope(x, t),
)
_exp_t = _elementwise(core.exp_t, lambda x, y, t: _exp_t_power(y, t), lambda x, y, t: _exp_t_slope(y, t))


# Each of these two is one program even if the caller does not use jit: dozens of operations would cost far more.


@partial(jax.jit, static_argnums=2)
def _log_softmax(a: Array, t: Any, axis: int) -> tuple[Array, Array]:
    m, partition = _solution(a, t, axis)
    log_p = _log_probs(a, m, t, axis)
    # -inf - m is -inf, but would still have the derivative of -m.
    return jnp.where(log_p == -math.inf, -math.inf, log_p), partition


@partial(jax.jit, static_argnames=("axis", "is_label", "rescale"))
def _loss(a: Array, y: Array, w: Array | None, t1: Any, t2: Any, *, axis: int, is_label: bool, rescale: bool) -> Array:
    y = nan_if_negative(y, w, xp=xp)
    outer: Any = 1.0
    if rescale:
        a, outer = rescaled(a, _value(t1), _value(t2), classes=a.shape[axis], axis=axis, xp=xp)
    m, _ = _solution(a, t2, axis)
    return outer * _weighted_loss(a, m, y, w, t1, t2, axis, is_label)


def _kept(where: ArrayLike | None, logits: Array, axis: int) -> Array | None:
    if where is None:
        return None
    kept = jnp.asarray(where)
    if kept.dtype != jnp.bool_:
        raise TypeError(f"where must hold booleans, got {kept.dtype.name}")
    examples = logits.shape[:axis] + logits.shape[axis + 1 :]
    shape = logits.shape if kept.ndim == logits.ndim else examples
    if not broadcasts(kept.shape, shape):
        raise ValueError(
            f"where must broadcast against logits, with as many axes: {logits.shape}, or against the examples:"
            f" {examples}, got shape {kept.shape}"
        )
    kept = jnp.broadcast_to(kept, shape)
    return kept if shape == logits.shape else jnp.broadcast_to(jnp.expand_dims(kept, axis), logits.shape)
