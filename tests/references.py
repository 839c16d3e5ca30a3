"""The paper's own ways to the normaliser lambda_t, to compare the solver with."""

from bitempered import core


def fixed_point(a, t, *, iterations, axis, xp):
    """Algorithm 1 (appendix A), for t > 1: shrink the centred activations by Z^(1-t) until they settle.

    Implementations customarily stop after 5 iterations, converged or not.
    """
    mu = xp.max(a, axis=axis)
    centred = a - mu
    shrunk = centred
    for _ in range(iterations):
        z = xp.sum(core.exp_t(shrunk, t, xp=xp), axis=axis)
        shrunk = centred * z ** (1 - t)
    z = xp.sum(core.exp_t(shrunk, t, xp=xp), axis=axis)
    return mu - core.log_t(1 / z, t, xp=xp)


def binary_search(a, t, *, iterations, axis, xp):
    """Bisection between max(a), where the mass is at least 1, and max(a) - log_t(1/K), where it is at most 1."""
    low = xp.max(a, axis=axis)
    high = low - core.log_t(1 / xp.sum(xp.ones_like(a), axis=axis), t, xp=xp)
    for _ in range(iterations):
        middle = (low + high) / 2
        heavy = xp.sum(core.exp_t(a - middle, t, xp=xp), axis=axis) > 1
        low, high = xp.where(heavy, middle, low), xp.where(heavy, high, middle)
    return (low + high) / 2
