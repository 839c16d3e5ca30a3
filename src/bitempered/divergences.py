"""The tempered convex functions, their divergences and their duals, on arrays of NumPy, torch or JAX.

Every function takes floating-point arrays whose last axis holds the classes, sums over that axis, and returns an array
of the same kind and dtype without it. Half precision is computed in float32. Entries are >= 0; a negative entry or a
NaN gives NaN; so may entries that overflow when they are squared. Infinite results are inf, without a warning.

docs/math.md derives the formulas and tabulates the named special cases.
"""

import math
import sys
from typing import Any

import numpy as np

from bitempered import core
from bitempered.checks import check_number
from bitempered.encoding import with_exact_slopes

__all__ = [
    "alternate_convex_function",
    "beta_divergence",
    "bregman_divergence",
    "convex_function",
    "dual",
    "tsallis_divergence",
    "tsallis_entropy",
]

Array = Any  # of NumPy, torch or JAX


def convex_function(y: Array, t: float) -> Array:
    """The strictly convex function F_t with gradient log_t y; F_t and its gradient are 0 at y = 1.

        F_t(y) = sum_i  y_i log_t y_i + (1 - y_i^(2-t)) / (2 - t),      sum_i  y_i - 1 - log y_i  at t = 2

    It is computed as the divergence from 1, F_t(y) = Delta_{F_t}(y, 1). A zero entry adds 1 / (2 - t) for t < 2 and
    makes F_t infinite for t >= 2.

    Args:
        y: (..., C), any positive numbers.
        t: the temperature, a finite number >= 0.

    >>> convex_function(np.array([[1.0, 1.0], [4.0, 1.0]]), 0.5)
    array([0.        , 3.33333333])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """
    t = check_number(t, "t", 0)
    xp = _namespace(y=y)
    return _bregman(y, xp.ones_like(y), t, xp)


def alternate_convex_function(y: Array, t: float) -> Array:
    """The paper's other family, whose divergences are those of `convex_function` with the temperature shifted by 1.

        -1/t sum_i (log_t y_i - y_i + 1),      sum_i  y_i log y_i - y_i + 1  at t = 0

    The functions agree as well: this is F_{t+1} itself, and is computed as such.

    Args:
        y: (..., C), any positive numbers.
        t: the temperature, a finite number >= -1.

    >>> y = np.array([0.25, 0.75])
    >>> bool(alternate_convex_function(y, 0.5) == convex_function(y, 1.5))
    True
    """
    return convex_function(y, check_number(t, "t", -1) + 1)


def bregman_divergence(y: Array, y_hat: Array, t: float) -> Array:
    """The Bregman divergence of `convex_function`, F_t(y) - F_t(y_hat) - (y - y_hat) . log_t y_hat.

        sum_i  y_i (log_t y_i - log_t y_hat_i) - (y_i^(2-t) - y_hat_i^(2-t)) / (2 - t)

    0 exactly where y = y_hat, never negative, and continuous in t through 1 (Kullback-Leibler) and 2 (Itakura-Saito).
    At 0 it takes its limits: if y_i = 0, class i adds y_hat_i^(2-t) / (2 - t) for t < 2; if y_hat_i = 0, it adds
    y_i^(2-t) / ((1-t) (2-t)) for t < 1; for larger t both are infinite. A class that is 0 in both adds 0.

    Args:
        y, y_hat: (..., C), any positive numbers, distributions or not; they broadcast.
        t: the temperature, a finite number >= 0.

    >>> bregman_divergence(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 0.0)
    array(0.25)
    """
    return _bregman(y, y_hat, check_number(t, "t", 0), _namespace(y=y, y_hat=y_hat))


def beta_divergence(y: Array, y_hat: Array, beta: float) -> Array:
    """The beta-divergence, which is `bregman_divergence` at t = 2 - beta.

        1 / (beta (beta - 1)) sum_i  y_i^beta + (beta - 1) y_hat_i^beta - beta y_i y_hat_i^(beta-1)

    In this convention beta = 2 is Euclidean, 1 is Kullback-Leibler and 0 is Itakura-Saito; others count from one less.

    Args:
        y, y_hat: (..., C), any positive numbers; they broadcast.
        beta: any finite number.

    >>> beta_divergence(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 2.0)
    array(0.25)

    Reference: Cichocki, Amari. Families of Alpha- Beta- and Gamma-Divergences. Entropy 12, 2010.
    """
    return _bregman(y, y_hat, 2 - check_number(beta, "beta"), _namespace(y=y, y_hat=y_hat))


def tsallis_entropy(y: Array, t: float) -> Array:
    """The Tsallis entropy; Shannon's at t = 1.

        sum_i  y_i log_t(1 / y_i)  =  (sum_i y_i^t - 1) / (1 - t)   for distributions

    A zero entry adds 0, even at t = 0, where the entropy of a distribution is the size of its support minus 1.
    Its negative has the Bregman divergence t Delta_{F_{2-t}}.

    Args:
        y: (..., C).
        t: the temperature, a finite number >= 0.

    >>> tsallis_entropy(np.array([0.5, 0.5, 0.0]), 2.0)
    array(0.5)

    Reference: Tsallis. Possible Generalization of Boltzmann-Gibbs Statistics. J. Stat. Phys. 52, 1988.
    """
    t = check_number(t, "t", 0)
    xp = _namespace(y=y)
    given, y = y, xp.widen(y)
    with np.errstate(all="ignore"):
        log_y = xp.log(xp.where(y > 0, y, 1.0))
        entropy = xp.sum(y * core.phi(-log_y, 1 - t, xp=xp), axis=-1)
        return xp.cast(xp.where(_valid(y, xp), entropy, math.nan)[..., 0], given)


def tsallis_divergence(y: Array, y_hat: Array, t: float) -> Array:
    """The Tsallis divergence, Kullback-Leibler at t = 1. It is not the Bregman divergence of `tsallis_entropy`.

        -sum_i  y_i log_t(y_hat_i / y_i)  =  sum_i  y_i^t (log_t y_i - log_t y_hat_i)

    If y_i = 0, class i adds 0; if only y_hat_i = 0, it adds y_i / (1 - t) for t < 1 and is infinite for t >= 1.

    Args:
        y, y_hat: (..., C), distributions; they broadcast.
        t: the temperature, a finite number >= 0.

    >>> tsallis_divergence(np.array([1.0, 0.0]), np.array([0.25, 0.75]), 0.5)
    array(1.)
    """
    t = check_number(t, "t", 0)
    xp = _namespace(y=y, y_hat=y_hat)
    given, y, y_hat = y, xp.widen(y), xp.widen(y_hat)
    with np.errstate(all="ignore"):
        present = y > 0
        log_y, log_p = xp.log(xp.where(present, y, 1.0)), _log(xp.where(present, y_hat, 1.0), xp)
        divergence = xp.sum(-y * core.phi(log_p - log_y, 1 - t, xp=xp), axis=-1)
        return xp.cast(xp.where(_valid(y, xp) & _valid(y_hat, xp), divergence, math.nan)[..., 0], given)


def dual(a: Array, t: float) -> Array:
    """The convex conjugate of `convex_function` restricted to the distributions; its gradient is the tempered softmax.

        sup_y (y . a - F_t(y))  =  lambda_t(a) + sum_i (y_hat_i^(2-t) - 1) / (2 - t),      log y_hat_i summed at t = 2

    with y_hat = exp_t(a - lambda_t(a)). At t = 1 it is log-sum-exp minus (C - 1).

    Args:
        a: (..., C), the activations (logits).
        t: the temperature, a finite number >= 0.

    >>> dual(np.zeros(4), 1.0) + 3 - np.log(4)
    np.float64(0.0)
    """
    t = check_number(t, "t", 0)
    xp = _namespace(a=a)
    with np.errstate(all="ignore"):
        log_p, log_partition = xp.log_softmax(a, t)
        return xp.cast((log_partition + xp.sum(core.phi(log_p, 2 - t, xp=xp), axis=-1))[..., 0], a)


def _bregman(y: Array, y_hat: Array, t: float, xp: Any) -> Array:
    given, y, y_hat = y, xp.widen(y), xp.widen(y_hat)
    with np.errstate(all="ignore"):
        valid = _valid(y, xp) & _valid(y_hat, xp)
        both_zero = (y == 0) & (y_hat == 0)
        y, y_hat = xp.where(both_zero, 1.0, y), xp.where(both_zero, 1.0, y_hat)
        divergence = core.loss(y, _log(y_hat, xp), t, axis=-1, xp=xp) if t < 2 else _from_two(y, y_hat, t, xp)
        return xp.cast(xp.where(valid, divergence, math.nan)[..., 0], given)


def _from_two(y: Array, y_hat: Array, t: float, xp: Any) -> Array:
    """`core.loss` with its two forms exchanged: for t >= 2, y^(2-t) grows as y shrinks."""
    positive = (y > 0) & (y_hat > 0)
    log_p = xp.log(xp.where(positive, y_hat, 1.0))
    _, log_y, above, below = core.log_quotient(xp.where(positive, y, 1.0), log_p, xp=xp)
    rises = xp.exp(above) * core.phi(above, 1 - t, xp=xp) - core.phi(above, 2 - t, xp=xp)
    falls = core.phi(below, t - 1, xp=xp) - core.phi(below, t - 2, xp=xp)
    per_class = _power_times((2 - t) * log_p, rises, xp) + _power_times((2 - t) * log_y, falls, xp)
    return core.not_negative(xp.sum(xp.where(positive, per_class, math.inf), axis=-1), xp=xp)


def _power_times(exponent: Array, x: Array, xp: Any) -> Array:
    """e^exponent x, which is 0 where x is, even if the power overflows."""
    overflows = (x == 0) & (xp.exp(exponent) == math.inf)
    return xp.exp(xp.where(overflows, 0.0, exponent)) * x


def _log(x: Array, xp: Any) -> Array:
    """log x with a finite derivative at 0, where it is -inf."""
    return xp.where(x > 0, xp.log(xp.where(x > 0, x, 1.0)), -math.inf)


def _valid(x: Array, xp: Any) -> Array:
    """Whether no entry is negative or NaN: the other functions would take such an entry for a zero."""
    return xp.sum(xp.where(x >= 0, 0.0, 1.0), axis=-1) == 0


def _namespace(**arrays: Array) -> Any:
    """Return the `xp` of these arrays' framework, for `core`, with a `log_softmax(a, t)` along the last axis.

    Frameworks that are not imported need not be tried: the arrays cannot be theirs.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    adapter: Any
    if all(isinstance(x, np.ndarray) for x in arrays.values()):
        from bitempered import numpy as adapter
    elif torch is not None and all(isinstance(x, torch.Tensor) for x in arrays.values()):
        from bitempered.torch import autograd as adapter
    elif jax is not None and all(isinstance(x, jax.Array) for x in arrays.values()):
        from bitempered import jax as adapter
    else:
        kinds = " and ".join(f"{type(x).__module__}.{type(x).__name__}" for x in arrays.values())
        wanted = "an array of NumPy, torch or JAX" if len(arrays) == 1 else "arrays of one of NumPy, torch and JAX"
        raise TypeError(f"{' and '.join(arrays)} must be {wanted}, got {kinds}")
    for name, x in arrays.items():
        if "float" not in str(x.dtype):
            raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}; convert it")
    xp = with_exact_slopes(adapter.xp)
    xp.log_softmax = lambda a, t: adapter.log_softmax_and_partition(a, t, a.ndim - 1)
    return xp
