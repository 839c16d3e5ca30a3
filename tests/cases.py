"""What the tests of numbers share: inputs, temperatures, and the distance to the 50-digit oracle."""

import math

import mpmath as mp
import numpy as np
import oracle

# The bar of the project, relative to max(1, abs(value)).
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}

NEAR_ONE = [1 + sign * d for d in (1e-3, 1e-5, 1e-7) for sign in (-1, 1)]
TEMPERATURES = [0.0, 0.5, 0.8, 1.0, 1.2, 2.0, 4.0, *NEAR_ONE]
# Both sides of 1, one across it, both next to it, a heavy tail.
PAIRS = [(0.0, 0.0), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (1.3, 1.6), (0.5, 4.0)]
PAIRS += [(t, t) for t in NEAR_ONE] + [(0.8, 1 - 1e-5), (0.8, 1 + 1e-5)]

_RNG = np.random.default_rng(0)
LOGITS = np.stack([scale * _RNG.normal(size=6) for scale in (0.0, 0.3, 5.0, 60.0)])  # a new head, usual, sure, absurd
INDEX = np.array([0, 3, 5, 1])
SOFT = _RNG.dirichlet(np.ones(6), size=4)
SOFT[0, :3] = 0
SOFT[0] /= SOFT[0].sum()
WEIGHT = np.array([1.0, 0.5, 2.0, 0.25, 4.0, 1.0])


def error(value, exact):
    """The largest abs(value - exact) / max(1, abs(exact)); infinite where a value is not finite."""
    value = value.detach() if hasattr(value, "detach") else value
    pairs = list(zip(np.ravel(value).tolist(), exact, strict=True))
    if not all(math.isfinite(got) for got, _ in pairs):
        return math.inf
    return float(max(abs(mp.mpf(got) - want) / max(1, abs(want)) for got, want in pairs))


def exact_losses(logits, y, t1, t2, weight=None):
    """The losses of the rows, and the entries of their gradients in one list."""
    rows = [oracle.loss_and_gradient(a, q, t1, t2, weight) for a, q in zip(logits.tolist(), y.tolist(), strict=True)]
    return [value for value, _ in rows], [g for _, gradient in rows for g in gradient]


def slope(function, t):
    """The derivative of a function of the oracle at t: a difference quotient with an error below 1e-20.

    The oracle's 30 digits leave 18 of it.
    """
    step = mp.mpf(10) ** -12
    return (function(mp.mpf(t) + step) - function(mp.mpf(t) - step)) / (2 * step)


def value_and_gradient(function, logits, *arguments, **options):
    """The values of a torch function of the logits, and the gradient of their sum."""
    leaf = logits.clone().requires_grad_()
    value = function(leaf, *arguments, **options)
    value.sum().backward()
    return value.detach(), leaf.grad
