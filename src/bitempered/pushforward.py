"""Forward mode: how the loss and the tempered softmax change along a direction. Made of the derivatives in `core`."""

from typing import Any

from bitempered import core
from bitempered.core import Array, State, Target, Temperature


def of_loss(
    target: Target, at: State, t1: Temperature, t2: Temperature, *, da: Array, dz: Array, dt1: Array, dt2: Array,
    axis: int, xp: Any,
) -> Array:  # fmt: skip
    """The change of `weighted_loss` with the logits, with z = w y, and with t1 and t2. None means no change."""
    change = xp.zeros_like(at.m)
    if da is not None:
        change = change + xp.sum(core.weighted_gradient(target, at, t1, t2, axis=axis, xp=xp) * da, axis=axis)
    if dz is not None:
        change = change + xp.sum(core.target_gradient(target, at.log_p, t1, axis=axis, xp=xp) * dz, axis=axis)
    if dt1 is not None or dt2 is not None:
        for slope, dt in zip(core.temperature_gradients(target, at, t1, t2, axis=axis, xp=xp), (dt1, dt2), strict=True):
            change = change if dt is None else change + slope * dt
    return change


def of_normalizer(at: State, t: Temperature, *, da: Array, dt: Array, axis: int, xp: Any) -> Array:
    """The change of m with the logits, for a constant max(a), and with t. None means no change."""
    change = xp.zeros_like(at.m)
    if da is not None:
        change = change + xp.sum(core.normalizer_gradient(at, t, xp=xp) * da, axis=axis)
    return change if dt is None else change + core.normalizer_slope(at, t, axis=axis, xp=xp) * dt


def of_softmax(
    log_p: Array, t: Temperature, *, da: Array, dt: Array, outside: Array = True, axis: int, xp: Any
) -> tuple[Array, Array]:
    """The changes of log y_hat and of lambda_t with the logits and with t. None means no change.

    dlambda_t = sum_j e_j da_j,      d log y_hat_i = y_hat_i^(t-1) (da_i - dlambda_t)      for the logits
    """
    d_log_p, d_lambda = xp.zeros_like(log_p), xp.zeros_like(xp.max(log_p, axis=axis))
    if da is not None:
        d_lambda = d_lambda + xp.sum(core.escort(log_p, t, outside=outside, axis=axis, xp=xp) * da, axis=axis)
        d_log_p = d_log_p + core.power(log_p, t - 1, outside=outside, xp=xp) * (da - d_lambda)
    if dt is not None:
        d_lambda = d_lambda + core.log_partition_slope(log_p, t, axis=axis, xp=xp) * dt
        d_log_p = d_log_p + core.log_probs_slope(log_p, t, axis=axis, xp=xp) * dt
    return d_log_p, d_lambda
