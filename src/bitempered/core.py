"""The mathematics of the bi-tempered logistic loss, on one page.

Symbols follow the paper (Amid, Warmuth, Anil, Koren: Robust Bi-Tempered Logistic Loss Based on
Bregman Divergences, NeurIPS 2019). For the temperature t of the softmax write

    s = t - 1        u_i = max(a) - a_i        m = -log(largest probability)

Then  y_hat_i = exp_t(a_i - lambda_t(a))  reads

    log y_hat_i = -m + log r_i,      log r_i = -psi_s(u_i e^(-s m)),      lambda_t(a) = max(a) + phi_s(m)

Log-probabilities, log1p and expm1 keep the results exact for every t, even next to 1: the softmax and the loss never
form lambda_t - a, a power of 0, or K^s for K classes.

Every function works on the arrays of any framework. `xp` is a small namespace (`encoding.namespace` makes one) with
exp, expm1, log, log1p, where, ones_like and zeros_like, and

    sum(x, axis), max(x, axis)      keep the axis; derivatives treat max as a constant shift
    iterate(step, x, count)         applies step `count` times: step(step(... x))
    eps(x)                          the precision of the dtype of x

Dtypes, label encoding, reduction over examples and validation belong to the adapters.
"""

import math
from typing import Any, NamedTuple

Array = Any  # of the framework that `xp` belongs to
Temperature = Any  # a Python number, or an array that broadcasts against the logits


class State(NamedTuple):
    """The tempered softmax of some logits, and the terms of its derivatives."""

    u: Array
    m: Array
    log_p: Array  # log y_hat
    outside: Array
    escort: Array


class Target(NamedTuple):
    """Class probabilities y, class weights w, their sum W = sum(w y), and the distribution q = w y / W."""

    y: Array
    w: Array | None  # None: every weight is 1
    q: Array
    total: Array  # W
    is_label: bool  # whether q is one-hot


# Power series of log1p(x) / x and expm1(x) / x: for abs(x) < 1e-3 the omitted terms are below 1e-18.
_LOG1P_SERIES = (1.0, -1 / 2, 1 / 3, -1 / 4, 1 / 5, -1 / 6)
_EXPM1_SERIES = (1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)
# Power series of (e^x - 1 - x) / x^2: for abs(x) < 1/2 the omitted terms are below 1e-17.
_BEND_SERIES = tuple(1 / math.factorial(n + 2) for n in range(14))


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
    near = _polynomial(series, xp.where(small, x, 0.0))
    return xp.where(small, near * v, f(xp.where(small, 1.0, x)) / xp.where(small, 1.0, s))


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    value: Array = 0.0
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


def bend(v: Array, s: Temperature, exponent: Temperature, *, xp: Any) -> Array:
    """e^(exponent v) (e^(s v) - 1 - s v) / s^2, and e^(exponent v) v^2 / 2 at s = 0: smooth in all three.

    The derivatives in temperatures consist of it. Its large terms share one exponential, so that none overflows alone.
    """
    x = s * v
    small = abs(x) < 0.5
    near = xp.exp(exponent * v) * v * v * _polynomial(_BEND_SERIES, xp.where(small, x, 0.0))
    far = xp.exp((exponent + s) * v) - xp.exp(exponent * v) * (1 + x)
    apart = (s or 1.0) if isinstance(s, (float, int)) else xp.where(small, 1.0, s)
    return xp.where(small, near, far / apart / apart)


def phi_slope(v: Array, s: Temperature, *, xp: Any) -> Array:
    """The derivative of `phi` in s; at v = inf its limit, 1 / s^2 for s < 0."""
    infinite = v == math.inf
    limit = xp.where(infinite & (s < 0), xp.ones_like(v) / _negative(s, xp) ** 2, math.inf)
    return xp.where(infinite, limit, bend(xp.where(infinite, 0.0, v), -s, s, xp=xp))


def _phi_or_limit(v: Array, s: Temperature, xp: Any) -> Array:
    """`phi`, whose derivative in s is `phi_slope` at v = inf too."""
    infinite = v == math.inf
    limit = xp.where(infinite & (s < 0), xp.ones_like(v) / -_negative(s, xp), math.inf)
    return xp.where(infinite, limit, phi(xp.where(infinite, 0.0, v), s, xp=xp))


def _negative(s: Temperature, xp: Any) -> Temperature:
    """s where it is negative, and -1 elsewhere: a safe divisor."""
    return (s if s < 0 else -1.0) if isinstance(s, (float, int)) else xp.where(s < 0, s, -1.0)


def log_t(x: Array, t: Temperature, *, xp: Any) -> Array:
    """The tempered logarithm (x^(1-t) - 1) / (1 - t), and log x at t = 1."""
    if not isinstance(t, (float, int)) or t >= 1:
        return phi(xp.log(x), 1 - t, xp=xp)
    # At 0 and inf the chain rule through log is 0 times inf. The power itself has the derivative x^-t.
    end = (x == 0) | (x == math.inf)
    at_end = (xp.where(end, x, 1.0) ** (1 - t) - 1) / (1 - t)
    return xp.where(end, at_end, phi(xp.log(xp.where(end, 1.0, x)), 1 - t, xp=xp))


def exp_t(x: Array, t: Temperature, *, xp: Any) -> Array:
    """The tempered exponential [1 + (1-t) x]_+^(1/(1-t)), and exp x at t = 1: the inverse of `log_t`.

    Where the bracket is not positive, the value is 0 for t < 1 and infinite for t > 1.
    """
    outside = (1 - t) * x <= -1
    far = (t - 1) * math.inf * xp.where(outside & (x > 0), x, 1.0)  # x makes the derivative infinite too, for t > 1
    return xp.exp(xp.where(outside, far, psi(xp.where(outside, 0.0, x), 1 - t, xp=xp)))


def scales(classes: int, t1: Temperature, t2: Temperature) -> tuple[Temperature, Temperature]:
    """The factors of `rescale`, K^(t2-1) on the logits and K^(1-t1) on the loss.

    At equal logits, K^(1-t1) L(K^(t2-1) a) has the gradient of cross-entropy, and its probabilities change with the
    logits as those of softmax do: learning starts as it would with cross-entropy at the same rate.
    """
    return classes ** (t2 - 1), classes ** (1 - t1)


def gaps(a: Array, *, axis: int, xp: Any) -> Array:
    """u_i = max(a) - a_i, infinite for a masked class (a logit of -inf)."""
    return xp.max(a, axis=axis) - a


def log_ratios(u: Array, m: Array, t: Temperature, *, xp: Any) -> Array:
    """log r_i = -psi_s(u_i e^(-s m)), and -inf for masked classes and outside a finite support (t < 1).

    For t > 2, e^(-s m) may underflow and s u_i overflow although their product does neither. If only the product
    overflows, log1p equals the logarithm.
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


def solve(a: Array, t: Temperature, *, last: State | None = None, axis: int, xp: Any) -> tuple[Array, Array]:
    """Return the gaps u of the logits a, and their `normalizer` m."""
    u = gaps(a, axis=axis, xp=xp)
    classes, eps = u.shape[axis], xp.eps(u)
    if isinstance(t, (float, int)):
        steps = newton_steps(t, classes, eps)
    else:  # an array may hold any t, and the ends of the range need the most steps
        steps = max(newton_steps(0, classes, eps), newton_steps(math.inf, classes, eps))
    return u, normalizer(u, t, steps=steps, last=last, axis=axis, xp=xp)


def normalizer(u: Array, t: Temperature, *, steps: int, last: State | None = None, axis: int, xp: Any) -> Array:
    """m such that the probabilities e^(-m) r_i sum to 1, by `steps` Newton steps (see `newton_steps`).

    For a number t <= 2, `last`, the state at nearby logits, gives a better start: lambda_t is convex, so its tangent
    there is a lower bound, phi_s(m) >= phi_s(m') + sum_i e'_i (u'_i - u_i).
    """
    first = start(u, t, axis=axis, xp=xp)

    def step(m: Array) -> Array:
        return newton_step(m, u, t, axis=axis, xp=xp)

    if last is None or t > 2:
        return xp.iterate(step, first, steps)
    tangent = phi(last.m, t - 1, xp=xp) + xp.sum(last.escort * (last.u - u), axis=axis)
    bound = psi(tangent, t - 1, xp=xp)
    better = (bound > first) & (bound <= math.log(u.shape[axis]))

    def climb(m: Array) -> Array:
        m = step(m)  # overshoots if rounding has put the tangent above the root
        return xp.where(m > first, m, first)

    return xp.iterate(climb, xp.where(better, bound, first), steps)


def newton_step(m: Array, u: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """One step of `normalizer`, from Z = e^(-m) sum r and R = sum r / sum r^t.

    Up to t = 2 this is Newton's method for Z^(-s) = 1 in lambda, written in m: m <- m + psi_s(phi_s(log Z) R),
    rearranged so that Z^s cannot overflow. Z^(-s) is a power mean (t > 1) or a norm (t < 1) of functions linear in
    lambda, so that m climbs monotonically from any lower bound. At t = 1 one step is log-sum-exp.

    Above t = 2 that may take dozens of steps for huge logits. There it is Newton's method for Z = 1 in w = e^(-m),
    with dZ/dw = sum r^t: Z is a sum of functions (w^(-s) + s u_i)^(-1/s), concave in w, so that m descends
    monotonically from any upper bound.
    """
    s = t - 1
    fixed = isinstance(t, (float, int))
    # The inner loop: `log_ratios` without its precautions for derivatives, and for small values where t > 2.
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
        zero = log_r == -math.inf  # t * -inf is NaN if t is 0 or underflows
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
    """The bound on m from which `newton_step` starts: a lower bound, or for t > 2 the upper bound log K.

    The lower bound is the larger of 0 and, where it is defined, log K - psi_{-s}(mean(u) K^(-s)), which follows from
    Jensen's inequality on sum r.
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
    """The number of `normalizer` steps that reach rounding error for any logits, in a dtype of precision `eps`.

    The formula exceeds what an adversarial search over logits can force, for up to 2^18 classes (tests/test_solver.py).
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


def log_partition(a: Array, m: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """lambda_t(a) = max(a) + phi_s(m)."""
    return xp.max(a, axis=axis) + phi(m, t - 1, xp=xp)


def solved(a: Array, t: Temperature, *, last: State | None = None, axis: int, xp: Any) -> State:
    """The `State` of the logits a."""
    u, m = solve(a, t, last=last, axis=axis, xp=xp)
    return state(u, m, t, axis=axis, xp=xp)


def state(u: Array, m: Array, t: Temperature, *, log_p: Array | None = None, axis: int, xp: Any) -> State:
    """The `State` at the solution (u, m) of `solve`. Pass `log_p` if it has derivatives of its own."""
    log_p = log_probs(u, m, t, xp=xp) if log_p is None else log_p
    beyond = outside(u, m, t, xp=xp)
    return State(u, m, log_p, beyond, escort(log_p, t, outside=beyond, axis=axis, xp=xp))


def outside(u: Array, m: Array, t: Temperature, *, xp: Any) -> Array:
    """Whether a class lies outside the support. On its edge y_hat is 0 too, but some derivatives are not."""
    if isinstance(t, (float, int)) and t >= 1:
        return False
    masked = u == math.inf
    return ((t - 1) * xp.where(masked, 0.0, u) * xp.exp((1 - t) * m) < -1) | (masked & (t < 1))


def power(log_p: Array, exponent: Temperature, *, outside: Array, xp: Any) -> Array:
    """y_hat_i^exponent, where 0^0 is 1 on the edge of the support and 0 `outside`."""
    zero = log_p == -math.inf
    result = xp.exp(exponent * xp.where(zero, 0.0, log_p))
    if not isinstance(exponent, (float, int)) or exponent == 0:
        zero = zero & ((exponent != 0) | outside)
    return xp.where(zero, 0.0, result)


def escort(log_p: Array, t: Temperature, *, outside: Array = True, axis: int, xp: Any) -> Array:
    """The escort distribution e_i = y_hat_i^t / sum_j y_hat_j^t, which is the gradient of lambda_t."""
    weights = power(log_p - xp.max(log_p, axis=axis), t, outside=outside, xp=xp)
    return weights / xp.sum(weights, axis=axis)


def normalizer_gradient(at: State, t: Temperature, *, xp: Any) -> Array:
    """dm/da_i = e^((1-t) m) e_i, for a constant max(a)."""
    return xp.exp((1 - t) * at.m) * at.escort


def loss(y: Array, log_p: Array, t1: Temperature, *, log_y: Array | None = None, axis: int, xp: Any) -> Array:
    """The Bregman divergence Delta_{F_t1}(y, y_hat) from the target y to y_hat = exp(log_p).

    Pass `log_y` for a y that may have underflowed (see `log_share`).

    Per class  y (log_t1 y - log_t1 y_hat) - (y^(2-t1) - y_hat^(2-t1)) / (2 - t1), which with d = log(y / y_hat) is

        y^(2-t1) (phi_{t1-1}(d) - phi_{t1-2}(d))  =  y_hat^(2-t1) (e^d phi_{1-t1}(d) - phi_{2-t1}(d)).

    Both are exact near d = 0. The first cannot overflow for d >= 0, the second for d <= 0.
    """
    positive, log_y, above, below = log_quotient(y, log_p, log_y=log_y, xp=xp)
    p_power = xp.exp((2 - t1) * log_p)
    up = phi(above, t1 - 1, xp=xp) - phi(above, t1 - 2, xp=xp)
    present = _target_power(log_y, t1, xp) * up + p_power * _second_form(below, t1, xp)
    return not_negative(xp.sum(xp.where(positive, present, p_power / (2 - t1)), axis=axis), xp=xp)


def log_quotient(y: Array, log_p: Array, *, log_y: Array | None = None, xp: Any) -> tuple[Array, Array, Array, Array]:
    """Whether y > 0; log y, which is 0 elsewhere; and d = log(y / y_hat), 0 elsewhere, cut into d >= 0 and d <= 0."""
    positive = y > 0 if log_y is None else log_y > -math.inf
    log_y = xp.log(xp.where(positive, y, 1.0)) if log_y is None else xp.where(positive, log_y, 0.0)
    d = xp.where(positive, log_y - log_p, 0.0)  # finite elsewhere, for derivatives
    falls = d < 0
    return positive, log_y, xp.where(falls, 0.0, d), xp.where(falls, d, 0.0)


def _target_power(log_y: Array, t1: Temperature, xp: Any) -> Array:
    """y^(2-t1), but not 0, so that the loss of a masked class is infinite."""
    power = xp.exp((2 - t1) * log_y)
    return xp.where(power < 1e-37, 1e-37, power)


def _second_form(d: Array, t1: Temperature, xp: Any) -> Array:
    """e^d phi_{1-t1}(d) - phi_{2-t1}(d) for d <= 0, with e^d phi_{1-t1}(d) = e^(smaller d) phi_{abs(1-t1)}(d)."""
    smaller = (3 - t1 - abs(1 - t1)) / 2  # min(1, 2 - t1)
    return xp.exp(smaller * d) * phi(d, abs(1 - t1), xp=xp) - phi(d, 2 - t1, xp=xp)


def label_loss(is_label: Array, log_p: Array, t1: Temperature, *, axis: int, xp: Any) -> Array:
    """`loss` of a one-hot target: -log_t1 y_hat_c - (1 - sum_i y_hat_i^(2-t1)) / (2 - t1), c where `is_label`."""
    d = -xp.sum(xp.where(is_label, log_p, 0.0), axis=axis)
    others = xp.sum(xp.where(is_label, 0.0, xp.exp((2 - t1) * log_p)), axis=axis) / (2 - t1)
    return not_negative(phi(d, t1 - 1, xp=xp) - phi(d, t1 - 2, xp=xp) + others, xp=xp)


def not_negative(divergence: Array, *, xp: Any) -> Array:
    return xp.where(divergence < 0, 0.0, divergence)  # only rounding takes it below 0


def gradient(y: Array, at: State, t1: Temperature, t2: Temperature, *, axis: int, xp: Any) -> Array:
    """dL/da_i = v_i - e_i sum_j v_j, with v_j = (y_hat_j - y_j) y_hat_j^(t2-t1) and the escort distribution e."""
    v, e = (xp.exp(at.log_p) - y) * power(at.log_p, t2 - t1, outside=at.outside, xp=xp), at.escort
    # The two terms nearly cancel for the largest classes, of equal logits or a single one, if these have most of e.
    # Since e sums to 1, v may be replaced by v + c e: there by one that is 0 for the largest v of these classes.
    top, total = xp.max(e, axis=axis), xp.sum(v, axis=axis)
    v_top = xp.max(v + 1e30 * (e - top), axis=axis)  # the sum is v for these classes and below -1 for all others
    v = v - e / top * xp.where(abs(v_top - top * total) < abs(v_top) / 2, v_top, 0.0)
    return v - e * xp.sum(v, axis=axis)


def curvature(at: State, t1: Temperature, t2: Temperature, *, axis: int, xp: Any) -> Array:
    """The diagonal of the Gauss-Newton matrix: the mean of d^2 L / da_i^2 over labels drawn from y_hat.

    h_i = d_i (1 - e_i)^2 + e_i^2 sum_{j != i} d_j,      d = y_hat^(2 t2 - t1),      e the escort distribution
    """
    d, e = power(at.log_p, 2 * t2 - t1, outside=at.outside, xp=xp), at.escort
    return d * (1 - e) ** 2 + e**2 * (xp.sum(d, axis=axis) - d)


def log_probs_slope(log_p: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """The derivative of l_i = log y_hat_i in t at fixed logits, 0 where y_hat_i is 0.

    From log_t y_hat_i = a_i - lambda_t and sum_i dy_hat_i = 0, with s = t - 1 and b_i = (y_hat_i^s - 1 - s l_i) / s^2,

        dl_i/dt = b_i - y_hat_i^s dlambda_t/dt,      dlambda_t/dt = sum_j y_hat_j b_j / sum_j y_hat_j^t
    """
    ratios = power(log_p - xp.max(log_p, axis=axis), t - 1, outside=True, xp=xp)
    return _bend_of_probs(log_p, t - 1, 0, xp) - ratios * _shift(log_p, t, axis, xp)


def log_partition_slope(log_p: Array, t: Temperature, *, axis: int, xp: Any) -> Array:
    """dlambda_t/dt at fixed logits (see `log_probs_slope`); infinite where it overflows."""
    return xp.exp((1 - t) * xp.max(log_p, axis=axis)) * _shift(log_p, t, axis, xp)


def normalizer_slope(at: State, t: Temperature, *, axis: int, xp: Any) -> Array:
    """dm/dt = -d log max(y_hat) / dt at fixed logits (see `log_probs_slope`)."""
    constant = xp.exp((1 - t) * (at.m + xp.max(at.log_p, axis=axis)))  # 1, for derivatives, in which max is constant
    return constant * _shift(at.log_p, t, axis, xp) - bend(-at.m, t - 1, 0, xp=xp)


def _shift(log_p: Array, t: Temperature, axis: int, xp: Any) -> Array:
    """max(y_hat)^(t-1) dlambda_t/dt, which cannot overflow."""
    top = xp.max(log_p, axis=axis)
    mean = xp.sum(_bend_of_probs(log_p, t - 1, 1, xp), axis=axis)
    return mean * xp.exp(-top) / xp.sum(power(log_p - top, t, outside=True, xp=xp), axis=axis)


def _bend_of_probs(log_p: Array, s: Temperature, exponent: Temperature, xp: Any) -> Array:
    """y_hat_i^exponent b_i, with the b_i of `log_probs_slope`, and 0 where y_hat_i is 0."""
    zero = log_p == -math.inf
    return xp.where(zero, 0.0, bend(xp.where(zero, 0.0, log_p), s, exponent, xp=xp))


def weigh(y: Array, w: Array | None, *, is_label: bool, axis: int, xp: Any) -> Target:
    """The `Target` of class probabilities y with class weights w. A label is its own q, even if W is infinite."""
    z = y if w is None else y * w
    total = xp.sum(z, axis=axis)
    q = y if is_label else z / xp.where(total == 0, 1.0, total)
    return Target(y, w, q, total, is_label)


def log_share(target: Target, *, xp: Any) -> Array | None:
    """log q, as exact as q, and correct even where q underflows; None without weights.

    For t1 near 2 the loss of a class with q = 1e-60 is far from that of one with q = 0.
    """
    y, w, q, total, _ = target
    if w is None:
        return None
    there, tiny = (y > 0) & (w > 0), q < 1e-30
    log_z = xp.log(xp.where(there, y, 1.0)) + xp.log(xp.where(there, w, 1.0))
    log_q = xp.where(tiny, log_z - xp.log(xp.where(total > 0, total, 1.0)), xp.log(xp.where(tiny, 1.0, q)))
    return xp.where(there, log_q, -math.inf)


def weighted_loss(target: Target, log_p: Array, t1: Temperature, *, axis: int, xp: Any) -> Array:
    """W Delta_{F_t1}(q, y_hat), and 0 where W = 0."""
    return xp.where(target.total == 0, 0.0, target.total * _divergence(target, log_p, t1, axis, xp))


def _divergence(target: Target, log_p: Array, t1: Temperature, axis: int, xp: Any) -> Array:
    if target.is_label:
        return label_loss(target.q > 0, log_p, t1, axis=axis, xp=xp)
    return loss(target.q, log_p, t1, log_y=log_share(target, xp=xp), axis=axis, xp=xp)


def weighted_gradient(target: Target, at: State, t1: Temperature, t2: Temperature, *, axis: int, xp: Any) -> Array:
    """The gradient of `weighted_loss` in the logits."""
    by_a = gradient(target.q, at, t1, t2, axis=axis, xp=xp)
    return xp.where(target.total == 0, 0.0, target.total * by_a)


def temperature_gradients(
    target: Target, at: State, t1: Temperature, t2: Temperature, *, axis: int, xp: Any
) -> tuple[Array, Array]:
    """The derivatives of `weighted_loss` in t1 and in t2 at fixed logits, where `at` is their state at t2.

    The one in t1 is that of the divergence at a fixed y_hat, and never negative. The one in t2 is, in the notation of
    `log_probs_slope`,      W sum_i (y_hat_i - q_i) y_hat_i^(1-t1) dl_i/dt2
    """
    if target.is_label:
        by_t1 = _label_slope(target.q > 0, at.log_p, t1, axis, xp)
    else:
        by_t1 = _slope(target.q, at.log_p, t1, log_share(target, xp=xp), axis, xp)
    by_t2 = _softmax_slope(target.q, at, t1, t2, axis, xp)
    none = target.total == 0
    return xp.where(none, 0.0, target.total * by_t1), xp.where(none, 0.0, target.total * by_t2)


def _label_slope(is_label: Array, log_p: Array, t1: Temperature, axis: int, xp: Any) -> Array:
    """The derivative of `label_loss` in t1."""
    d = -xp.sum(xp.where(is_label, log_p, 0.0), axis=axis)
    others = xp.sum(xp.where(is_label, 0.0, _absent_slope(log_p, t1, xp)), axis=axis)
    return phi_slope(d, t1 - 1, xp=xp) - phi_slope(d, t1 - 2, xp=xp) + others


def _absent_slope(log_p: Array, t1: Temperature, xp: Any) -> Array:
    """The derivative of y_hat^(2-t1) / (2 - t1) in t1."""
    zero = log_p == -math.inf
    finite = xp.where(zero, 0.0, log_p)
    return xp.where(zero, 0.0, xp.exp((2 - t1) * finite) * (1 / (2 - t1) - finite) / (2 - t1))


def _slope(y: Array, log_p: Array, t1: Temperature, log_y: Array | None, axis: int, xp: Any) -> Array:
    """The derivative of `loss` in t1: of each of its two forms where that is a sum of terms that are not negative."""
    positive, log_y, above, below = log_quotient(y, log_p, log_y=log_y, xp=xp)
    log_p_below = xp.where(below < 0, log_p, 0.0)
    up = _phi_or_limit(above, t1 - 1, xp) - _phi_or_limit(above, t1 - 2, xp)
    up = phi_slope(above, t1 - 1, xp=xp) - phi_slope(above, t1 - 2, xp=xp) - xp.where(log_y < 0, log_y * up, 0.0)
    down = bend(below, t1 - 2, 2 - t1, xp=xp) - bend(below, t1 - 1, 2 - t1, xp=xp)
    down = down - log_p_below * _second_form(below, t1, xp)
    present = _target_power(log_y, t1, xp) * up + xp.exp((2 - t1) * log_p_below) * down
    # For its derivative in y where y = 0: that of log_t1 y - log_t1 y_hat in t1.
    zero, masked = xp.where(positive, 0.0, y), log_p == -math.inf
    of_p = phi_slope(xp.where(masked, 0.0, -log_p), t1 - 1, xp=xp)
    by_zero = _finite(of_p - phi_slope(xp.zeros_like(log_p) + math.inf, t1 - 1, xp=xp), xp)
    absent = _absent_slope(log_p, t1, xp) + zero * xp.where(masked, 0.0, by_zero)
    return xp.sum(xp.where(positive, present, absent), axis=axis)


def _softmax_slope(q: Array, at: State, t1: Temperature, t2: Temperature, axis: int, xp: Any) -> Array:
    """The derivative of the divergence in t2."""
    log_p, s, top = at.log_p, t2 - 1, xp.max(at.log_p, axis=axis)
    excess = xp.exp(log_p) - q
    ratios = power(log_p - top, t2 - t1, outside=at.outside, xp=xp)
    # Where q = 0, y_hat y_hat^(1-t1) is one power, which does not overflow.
    absent = xp.where(q > 0, 0.0, xp.ones_like(log_p))
    bends = _bend_of_probs(log_p, s, 1 - t1 + absent, xp) * xp.where(q > 0, excess, 1.0)
    # The limit on the edge of a support.
    edge = xp.where((log_p == -math.inf) & (s < 0), excess * ratios / _negative(s, xp) ** 2, 0.0)
    moved = xp.exp((1 - t1) * top) * _shift(log_p, t2, axis, xp) * xp.sum(excess * ratios, axis=axis)
    return xp.sum(bends + edge, axis=axis) - moved


def _finite(x: Array, xp: Any) -> Array:
    """Return x with a large number in place of -inf: 0 times it is 0, not NaN."""
    return xp.where(x == -math.inf, -1e30, x)


def target_gradient(target: Target, log_p: Array, t1: Temperature, *, axis: int, xp: Any) -> Array:
    """The gradient of `weighted_loss` in z = w y, which determines both W = sum z and q = z / W.

    Delta(q, y_hat) + g_i - sum_j q_j g_j,      g = log_t1 q - log_t1 y_hat, the gradient of Delta in q
    """
    q, log_q = target.q, log_share(target, xp=xp)
    absent = q == 0 if log_q is None else log_q == -math.inf
    log_q = xp.log(xp.where(absent, 1.0, q)) if log_q is None else xp.where(absent, 0.0, log_q)
    masked = absent & (log_p == -math.inf)
    # log_t1 of 0 is -inf for t1 >= 1, and its slope, 0^-t1, is infinite for t1 > 0.
    at_zero = _finite(-_phi_or_limit(xp.zeros_like(q) + math.inf, t1 - 1, xp), xp)
    at_zero = at_zero + ((t1 == 0) + 1e30 * (t1 > 0)) * xp.where(absent, q, 0.0)
    of_q = xp.where(absent, at_zero, phi(log_q, 1 - t1, xp=xp))
    by_q = xp.where(masked, 0.0, of_q - phi(xp.where(masked, 0.0, log_p), 1 - t1, xp=xp))
    mean = xp.sum(xp.where(absent, 0.0, q * by_q), axis=axis)
    by_z = _divergence(target, log_p, t1, axis, xp) + by_q - mean
    return xp.where(target.total == 0, 0.0, by_z)


def softmax_pullback(log_p: Array, t: Temperature, *, g_log_p: Array, g_lambda: Array, axis: int, xp: Any) -> Array:
    """The gradient in the logits of sum_i g_i log y_hat_i + g_lambda lambda_t, which has at least one of its terms."""
    e = escort(log_p, t, axis=axis, xp=xp)
    if g_log_p is None:
        return e * g_lambda
    outside = log_p == -math.inf
    v = xp.where(outside, 0.0, g_log_p) * xp.exp((t - 1) * xp.where(outside, 0.0, log_p))
    total = xp.sum(v, axis=axis)
    return v - e * (total if g_lambda is None else total - g_lambda)
