"""The mathematics of the bi-tempered logistic loss, on one page.

Symbols follow the paper (Amid, Warmuth, Anil, Koren: Robust Bi-Tempered Logistic Loss Based on
Bregman Divergences, NeurIPS 2019). For the temperature t of the softmax write

    s = t - 1        u_i = max(a) - a_i        m = -log(largest probability)

Then  y_hat_i = exp_t(a_i - lambda_t(a))  reads

    log y_hat_i = -m + log r_i,      log r_i = -psi_s(u_i e^(-s m)),      lambda_t(a) = max(a) + phi_s(m)

Staying with log-probabilities, log1p and expm1 keeps every t exact, those next to 1 included: lambda_t - a is
never formed, and no power of 0 or of the number of classes is taken.

Every function works on the arrays of any framework. `xp` is a small namespace with exp, expm1, log, log1p, where,
ones_like, and sum and max with `axis`, keeping the reduced axis. Dtypes, label encoding, reduction over examples and
validation belong to the adapters.
"""

import math
from typing import Any

Array = Any  # of the framework that `xp` belongs to
Temperature = Any  # a Python number, or an array that broadcasts against the logits

# log1p(x) / x and expm1(x) / x as power series: for abs(x) < 1e-3 what is left out is below 1e-18.
_LOG1P_SERIES = (1.0, -1 / 2, 1 / 3, -1 / 4, 1 / 5, -1 / 6)
_EXPM1_SERIES = (1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)


def psi(v: Array, s: Temperature, *, xp: Any) -> Array:
    """log1p(s v) / s, and v at s = 0: the inverse of `phi`, smooth in v and s."""
    return _quotient(xp.log1p, _LOG1P_SERIES, v, s, xp)


def phi(v: Array, s: Temperature, *, xp: Any) -> Array:
    """expm1(s v) / s, and v at s = 0: the inverse of `psi`, smooth in v and s."""
    return _quotient(xp.expm1, _EXPM1_SERIES, v, s, xp)


def _quotient(f: Any, series: tuple[float, ...], v: Array, s: Temperature, xp: Any) -> Array:
    if isinstance(s, (float, int)):
        return v if s == 0 else f(s * v) / s
    # An array s may hold zeros and may be differentiated: the series carries both through s = 0.
    x = s * xp.where((s == 0) & (abs(v) == math.inf), 0.0, v)
    small = abs(x) < 1e-3
    near, power = 0.0, xp.where(small, x, 0.0)
    for coefficient in reversed(series):
        near = near * power + coefficient
    return xp.where(small, near * v, f(xp.where(small, 1.0, x)) / xp.where(small, 1.0, s))


def log_t(x: Array, t: Temperature, *, xp: Any) -> Array:
    """The tempered logarithm (x^(1-t) - 1) / (1 - t), and log x at t = 1."""
    return phi(xp.log(x), 1 - t, xp=xp)


def exp_t(x: Array, t: Temperature, *, xp: Any) -> Array:
    """The tempered exponential [1 + (1-t) x]_+^(1/(1-t)), and exp x at t = 1: the inverse of `log_t`.

    Where the bracket is empty it is 0 for t < 1 and infinite for t > 1.
    """
    outside = (1 - t) * x <= -1
    inside = psi(xp.where(outside, 0.0, x), 1 - t, xp=xp)
    return xp.exp(xp.where(outside, (t - 1) * math.inf, inside))


def gaps(a: Array, *, axis: int, xp: Any) -> Array:
    """u_i = max(a) - a_i, infinite for a masked class (a logit of -inf)."""
    return xp.max(a, axis=axis) - a


def log_ratios(u: Array, m: Array, t: Temperature, *, xp: Any) -> Array:
    """log r_i = -psi_s(u_i e^(-s m)), and -inf for masked classes and outside a finite support (t < 1).

    For t > 2, e^(-s m) may underflow and s u_i overflow where their product does neither, or only the product
    overflows: then log1p is the logarithm.
    """
    s = t - 1
    masked = u == math.inf
    gap = xp.where(masked, 0.0, u)
    if isinstance(s, (float, int)) and s <= 1:  # m is at most log K: e^(-s m) is at least 1 / K
        v = gap * xp.exp(-s * m)
        outside = masked | (s * v <= -1)
        return xp.where(outside, -math.inf, -psi(xp.where(outside, 0.0, v), s, xp=xp))
    half = xp.exp(-s / 2 * m)
    v = gap * half * half
    outside, huge = masked | (s * v <= -1), s * v == math.inf
    log_r = -psi(xp.where(outside | huge, 0.0, v), s, xp=xp)
    scaled = xp.where(huge, gap * 2.0**-64 * half * (s * half), 1.0)  # s v, but finite
    log_r = xp.where(huge, -(xp.log(scaled) + 64 * math.log(2)) / xp.where(huge, s + 0 * m, 1.0), log_r)
    return xp.where(outside, -math.inf, log_r)


def normalizer(u: Array, t: Temperature, *, steps: int, axis: int, xp: Any) -> Array:
    """m such that the probabilities e^(-m) r_i sum to 1, by `steps` Newton steps (see `newton_steps`)."""
    m = start(u, t, axis=axis, xp=xp)
    for _ in range(steps):
        m = newton_step(m, u, t, axis=axis, xp=xp)
    return m


def newton_step(m: Array, u: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """One step of `normalizer`, from Z = e^(-m) sum r and R = sum r / sum r^t.

    Up to t = 2 this is Newton's method for Z^(-s) = 1 in lambda, written in m: m <- m + psi_s(phi_s(log Z) R),
    rearranged so that Z^s cannot overflow. Z^(-s) is a power mean (t > 1) or a norm (t < 1) of functions linear in
    lambda, so that m climbs monotonically from any lower bound. At t = 1 one step is log-sum-exp.

    Above t = 2, where that may take dozens of steps if logits are huge, it is Newton's method for Z = 1 in w = e^(-m),
    with dZ/dw = sum r^t: Z is a sum of functions (w^(-s) + s u_i)^(-1/s), concave in w, so that m descends
    monotonically from any upper bound.
    """
    s = t - 1
    fixed = isinstance(t, (float, int))
    # This is the inner loop: `log_ratios` without its care for derivatives, and for what is small where t > 2.
    if fixed and 1 <= t <= 2:
        log_r = psi(u * -xp.exp(-s * m), -s, xp=xp)
    elif fixed and t > 2:
        half = -s / 2 * m
        scaled = xp.where(u == math.inf, u, u * xp.exp(half))
        x = scaled * (s * xp.exp(half))
        log_x = xp.log(xp.where(x < math.inf, 1 + x, scaled)) + xp.where(x < math.inf, 0.0, half + math.log(s))
        log_r = log_x / -s
    else:
        log_r = log_ratios(u, m, t, xp=xp)
    if fixed and t >= 1:
        r_to_t = xp.exp(t * log_r)
    else:
        zero = log_r == -math.inf  # which t = 0, or one that underflows, would make NaN
        r_to_t = xp.where(zero, 0.0, xp.exp(t * xp.where(zero, 0.0, log_r)))
    total, total_to_t = xp.sum(xp.exp(log_r), axis=axis), xp.sum(r_to_t, axis=axis)
    log_z = xp.log(total) - m
    if not fixed or t <= 2:
        climbing = m + log_z + psi((total / total_to_t - 1) * phi(log_z, -s, xp=xp), s, xp=xp)
    if not fixed or t > 2:
        descending = m - xp.log1p(-xp.expm1(log_z) * xp.exp(m) / total_to_t)
    if not fixed:
        return xp.where(t > 2, descending, climbing)
    return descending if t > 2 else climbing


def start(u: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """The bound on m that `newton_step` goes on from: below, or m <= log K for t > 2.

    The one below is Jensen's inequality on sum r: m >= log K - psi_{-s}(mean(u) K^(-s)) where that is defined, and
    m >= 0.
    """
    s = t - 1
    masked = u == math.inf
    count = xp.sum(xp.where(masked, 0.0, xp.ones_like(u)), axis=axis)
    fixed, log_k = isinstance(t, (float, int)), xp.log(count)
    if fixed and t > 2:
        return log_k
    mean = xp.sum(xp.where(masked, 0.0, u), axis=axis) / count
    v = mean * xp.exp(-s * log_k)
    defined = s * v < 1
    bound = log_k - psi(xp.where(defined, v, 0.0), -s, xp=xp)
    bound = xp.where(defined & (bound > 0), bound, 0.0)
    return bound if fixed else xp.where(t > 2, log_k, bound)


def newton_steps(t: float, classes: int, eps: float) -> int:
    """How many steps of `normalizer` reach rounding error, whatever the logits, in a dtype of precision `eps`.

    Fitted above what an adversarial search over logits can force, for up to 2^18 classes (tests/test_solver.py).
    """
    if t == 1:
        return 1
    log_k = math.log(max(classes, 2))
    if t > 2:
        bound = 5 + 0.65 * log_k
    else:
        x = abs(t - 1) * log_k
        bound = min(10, 3 + 2 * math.log2(1 + x)) if t > 1 else min(14, 3 + 3 * x)
    return int(bound) + (2 if eps < 1e-10 else 0)


def log_probs(u: Array, m: Array, t: Temperature, *, xp: Any) -> Array:
    """log y_hat_i = log r_i - m."""
    return log_ratios(u, m, t, xp=xp) - m


def support(u: Array, m: Array, t: Temperature, *, xp: Any) -> Array:
    """Which classes are inside the support, its edge included: there y_hat is 0, but not all derivatives are."""
    if isinstance(t, (float, int)) and t >= 1:
        return True
    return ((t - 1) * xp.where(u == math.inf, 0.0, u) * xp.exp((1 - t) * m) >= -1) & ((u != math.inf) | (t >= 1))


def escort(log_p: Array, t: Temperature, *, inside: Array = False, axis: int, xp: Any) -> Array:
    """The escort distribution y_hat_i^t / sum_j y_hat_j^t, which is the gradient of lambda_t.

    Where y_hat is 0 so is its power, but that 0^0 = 1 for the classes `inside` (see `support`).
    """
    zero = log_p == -math.inf
    log_r = xp.where(zero, 0.0, log_p) - xp.max(log_p, axis=axis)
    weights = xp.where(zero, (t == 0) & inside, xp.exp(t * log_r))
    return weights / xp.sum(weights, axis=axis)


def log_share(q: Array, y: Array, w: Array, total: Array, *, xp: Any) -> Array:
    """log q of a weighted target q = w y / W, to the digits of q, and right where q underflows.

    For t1 near 2 the loss of a class with q = 1e-60 is far from that of one with q = 0.
    """
    there, tiny = (y > 0) & (w > 0), q < 1e-30
    log_z = xp.log(xp.where(there, y, 1.0)) + xp.log(xp.where(there, w, 1.0))
    log_q = xp.where(tiny, log_z - xp.log(xp.where(total > 0, total, 1.0)), xp.log(xp.where(tiny, 1.0, q)))
    return xp.where(there, log_q, -math.inf)


def loss(y: Array, log_p: Array, t1: Temperature, *, log_y: Array | None = None, axis: int, xp: Any) -> Array:
    """The Bregman divergence Delta_{F_t1}(y, y_hat) from the target y to y_hat = exp(log_p).

    `log_y` is for a y that may have underflowed (see `log_share`).

    Per class  y (log_t1 y - log_t1 y_hat) - (y^(2-t1) - y_hat^(2-t1)) / (2 - t1), which with d = log(y / y_hat) is

        y^(2-t1) (phi_{t1-1}(d) - phi_{t1-2}(d))  =  y_hat^(2-t1) (e^d phi_{1-t1}(d) - phi_{2-t1}(d)):

    exact near d = 0, the first free of overflow for d >= 0, the second for d <= 0.
    """
    positive = y > 0 if log_y is None else log_y > -math.inf
    log_y = xp.log(xp.where(positive, y, 1.0)) if log_y is None else xp.where(positive, log_y, 0.0)
    d = log_y - log_p
    above, below = xp.where(d < 0, 0.0, d), xp.where(d < 0, d, 0.0)
    y_power, p_power = xp.exp((2 - t1) * log_y), xp.exp((2 - t1) * log_p)
    y_power = xp.where(y_power < 1e-37, 1e-37, y_power)  # what is not 0 makes the loss of a masked class infinite
    smaller = (3 - t1 - abs(1 - t1)) / 2  # min(1, 2 - t1): e^d phi_{1-t1}(d) = e^(smaller d) phi_{abs(1-t1)}(d)
    present = y_power * (phi(above, t1 - 1, xp=xp) - phi(above, t1 - 2, xp=xp)) + p_power * (
        xp.exp(smaller * below) * phi(below, abs(1 - t1), xp=xp) - phi(below, 2 - t1, xp=xp)
    )
    return _not_negative(xp.sum(xp.where(positive, present, p_power / (2 - t1)), axis=axis), xp)


def label_loss(is_label: Array, log_p: Array, t1: Temperature, *, axis: int, xp: Any) -> Array:
    """`loss` of a one-hot target: -log_t1 y_hat_c - (1 - sum_i y_hat_i^(2-t1)) / (2 - t1), c where `is_label`."""
    d = -xp.sum(xp.where(is_label, log_p, 0.0), axis=axis)
    others = xp.sum(xp.where(is_label, 0.0, xp.exp((2 - t1) * log_p)), axis=axis) / (2 - t1)
    return _not_negative(phi(d, t1 - 1, xp=xp) - phi(d, t1 - 2, xp=xp) + others, xp)


def _not_negative(divergence: Array, xp: Any) -> Array:
    return xp.where(divergence < 0, 0.0, divergence)  # only rounding takes it below 0


def gradient(
    y: Array, log_p: Array, t1: Temperature, t2: Temperature, *, e: Array, inside: Array, axis: int, xp: Any
) -> Array:
    """dL/da_i = v_i - e_i sum_j v_j, with v_j = (y_hat_j - y_j) y_hat_j^(t2-t1) and the escort distribution e.

    Where y_hat is 0 so is v, but that 0^0 = 1 for the classes `inside` (see `support`), as in cross-entropy.
    """
    zero = log_p == -math.inf
    power = xp.exp((t2 - t1) * xp.where(zero, 0.0, log_p))
    v = xp.where(zero, -y * ((t1 == t2) & inside), (xp.exp(log_p) - y) * power)
    return v - e * xp.sum(v, axis=axis)


def target_gradient(y: Array, log_p: Array, t1: Temperature, *, xp: Any) -> Array:
    """The gradient of the divergence in its first argument, log_t1 y - log_t1 y_hat."""
    difference = log_t(y, t1, xp=xp) - phi(log_p, 1 - t1, xp=xp)
    return xp.where((y == 0) & (log_p == -math.inf), 0.0, difference)


def pullback(g: Array, log_p: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """The gradient in the logits of sum_i g_i log y_hat_i: d log y_hat_i = y_hat_i^(t-1) (da_i - sum_j e_j da_j)."""
    outside = log_p == -math.inf
    v = xp.where(outside, 0.0, g) * xp.exp((t - 1) * xp.where(outside, 0.0, log_p))
    return v - escort(log_p, t, axis=axis, xp=xp) * xp.sum(v, axis=axis)
