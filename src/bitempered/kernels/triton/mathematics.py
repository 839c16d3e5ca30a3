"""The mathematics of `bitempered.core`, one number at a time, as functions that kernels call.

With s = t2 - 1, u = max(a) - a_i, d = e^(-s m), x = 1 + s u d and q = 1 / x, the number r = x^(-1/s) is a
probability relative to the largest.

KIND is 0 at t2 = 1, -1 below, 1 above, and 2 above t2 = 2; it is 3 if every row has temperatures of its own, of any
kind. NEAR means that s is near 0, where 1 + s u d loses digits that count. FAST means NVIDIA's approximate
instructions. With `rescale` d is larger by a factor, the one of the logits, so that u d is right for unscaled logits.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LOG2E_LOST = tl.constexpr(1.3349e-8)  # relative to LOG2E, when it becomes float32
LN2 = tl.constexpr(math.log(2))


@triton.jit
def exp(x):
    return tl.math.exp2(x * LOG2E)


@triton.jit
def log2(x, FAST: tl.constexpr):
    """log2; FAST is one NVIDIA instruction, off by 2^-22 near 1, where tl.log2 takes twenty."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _log1p_near(z):
    """1 - log(1 + z) / z for |z| < 0.4, from artanh(z / (2 + z)), which does not round 1 + z.

    The caller subtracts v times this from v instead of multiplying v by a number near 1. So the rounding here, and the
    division, which is not exact on a GPU, hardly touch the digits of v.
    """
    inverse = 1.0 / (2.0 + z)
    y = z * inverse
    w = y * y
    return y - inverse * w * (2.0 / 3.0 + w * (2.0 / 5.0 + w * (2.0 / 7.0 + w * (2.0 / 9.0))))


@triton.jit
def _expm1_near(x):
    """(e^x - 1) / x for |x| < 0.25."""
    return 1.0 + x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720)))))


@triton.jit
def phi(v, s, ZERO: tl.constexpr):
    """expm1(s v) / s. ZERO is 1 where s is 0, 2 where it may be while v is infinite, else 0."""
    if ZERO == 1:
        return v
    x = s * v
    y = tl.where(tl.abs(x) < 0.25, v * _expm1_near(x), (exp(x) - 1.0) / s)
    return tl.where(s == 0.0, v, y) if ZERO == 2 else y


@triton.jit
def psi(v, s, ZERO: tl.constexpr, FAST: tl.constexpr):
    """log1p(s v) / s, and for ZERO v."""
    z = s * v
    return v if ZERO else tl.where(tl.abs(z) < 0.4, v - v * _log1p_near(z), log2(1.0 + z, FAST) * LN2 / s)


@triton.jit
def decay_factor(m, s, stretch, KIND: tl.constexpr):
    """d = stretch e^(-s m); above t = 2 its root, since d may underflow where u d is large."""
    x = -0.5 * s * m if KIND > 1 else -s * m
    near = x * _expm1_near(x) + 1.0  # exact to the last bit, where a GPU's exp2 is not: u may be large
    # A masked class, u = inf, stays at inf where e^(-s m) underflows.
    decay = tl.where(tl.abs(x) < 0.25, near, exp(x)) * (tl.sqrt(stretch) if KIND > 1 else stretch)
    return tl.maximum(decay, 1e-37, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decayed(u, d, KIND: tl.constexpr):
    return (u * d) * d if KIND > 1 else u * d


@triton.jit
def log_ratio(u, d, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """log r to full precision, -inf where r is 0; and whether the class is outside the support (its edge is inside)."""
    if KIND == 0:
        return -u, u != u
    v = decayed(u, d, KIND)
    x = s * v
    outside = (x < -1.0) | (u == float("inf")) if KIND < 0 or KIND == 3 else u != u
    if KIND == 3:
        outside &= s < 0.0
    zero = (x <= -1.0) | (u == float("inf"))
    log_r = -psi(tl.where(zero, 0.0, v), s, False, FAST)
    if KIND > 1:
        log_r = tl.where(x == float("inf"), _log2_huge(u, d, s, FAST) * (-LN2 / s), log_r)
    return tl.where(zero, float("-inf"), log_r), outside


@triton.jit
def _log2_huge(u, d, s, FAST: tl.constexpr):
    """log2(s u d) where the product overflows."""
    return log2(u * d, FAST) + log2(s * d, FAST)


@triton.jit
def _log2_ratio(u, d, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr):
    """log2 r, precise enough for sums, and x. Outside the support both take their values at its edge."""
    if KIND == 0:
        return u * -LOG2E, u
    z = (u * d) * (s * d) if KIND > 1 else u * (s * d)
    x = 1.0 + z
    if KIND < 0:
        x = tl.where(x < 1e-37, 1e-37, x)
    log2_x = log2(x, FAST)
    if KIND > 1:
        log2_x = tl.where(z == float("inf"), _log2_huge(u, d, s, FAST), log2_x)
    log2_r = log2_x * (-1.0 / s)
    if NEAR:  # 1 + z loses digits that 1 / s magnifies
        # Where r is 1e-30, every rounding of log r shows. This has one, apart from those of LOG2E and d.
        v = u * (d * LOG2E)
        lost = tl.fma(u, d * LOG2E, -v)
        log2_r = tl.where(tl.abs(z) < 0.4, (v * (_log1p_near(z) - LOG2E_LOST) - lost) - v, log2_r)
    return log2_r, x


@triton.jit
def grown(log_r, extra, NEAR: tl.constexpr):
    """(1 + extra) log_r. Near t = 1 the digits of `extra` matter, and 1 + extra would lose them in float32."""
    if NEAR:
        return tl.where(log_r == float("-inf"), log_r, log_r + extra * log_r)
    return (1.0 + extra) * log_r


@triton.jit
def _root(u, d, s, KIND: tl.constexpr, Q: tl.constexpr, FAST: tl.constexpr):
    """x^(-1/Q) of x = 1 + s u d."""
    if KIND > 1:  # of 2^-32 x, which does not overflow
        x = 2.0**-32 + (u * d) * (s * d * 2.0**-32)
        root = tl.math.rsqrt(x) if Q == 2 else tl.math.exp2(log2(x, FAST) * (-1.0 / Q))
        return root * 2.0 ** (-32.0 / Q)
    x = 1.0 + u * (s * d)
    if Q == 1:
        return reciprocal(x, FAST)
    return tl.math.rsqrt(x) if Q == 2 else tl.math.exp2(log2(x, FAST) * (-1.0 / Q))


@triton.jit
def _power(h, N: tl.constexpr):
    y = 1.0
    for bit in tl.static_range(6):
        if (N >> bit) & 1:
            y = h * y
        h = h * h
    return y


@triton.jit
def escort_power(u, d, t2, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """r^t2, which at t2 = 0 is 1 on the edge of the support, and log r."""
    log_r, outside = log_ratio(u, d, s, KIND, FAST)
    power = exp(tl.where(log_r == float("-inf"), log_r, log_r + s * log_r))
    if KIND < 0 or KIND == 3:
        power = tl.where(outside, 0.0, tl.where(t2 == 0.0, 1.0, power))
    return power, log_r


@triton.jit
def summands(
    u, d, t1, t2, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The terms of `named_sums`. A root h = x^(-1/Q) with r = h^R and r^(2-t1) = h^E saves transcendentals."""
    if KIND == 3:
        rt, log_r = escort_power(u, d, t2, s, KIND, FAST)
        # Below t2 = 1 q is not needed, and its square may overflow.
        q = tl.where((log_r == float("-inf")) | (s < 0.0), 0.0, reciprocal(1.0 + (u * d) * (s * d), FAST))
        re, both = exp((2.0 - t1) * log_r), exp((s + (2.0 - t1)) * log_r)
        return exp(log_r), rt, rt * q, rt * q * q, re, both, both * q, both * q * q
    if Q > 0:
        h = _root(u, d, s, KIND, Q, FAST)
        q, r, re = _power(h, Q), _power(h, R), _power(h, E)
    else:
        log2_r, x = _log2_ratio(u, d, s, KIND, NEAR, FAST)
        r = tl.math.exp2(log2_r)
        # A product, so that r is rounded in the same way in both. Above t1 = 1 r may be 0 where its power is not.
        extra = tl.math.exp2((1.0 - t1) * log2_r)
        re = r if SHIFT == 0 else tl.math.exp2((2.0 - t1) * log2_r) if SHIFT == -2 else r * extra
        if KIND == 0:
            return r, re, r, r, r, r, r, r
        if KIND < 0:
            rt = tl.math.exp2(t2 * log2_r)
            both = rt * extra
            out = u * (s * d) < -1.0
            r, rt = tl.where(out, 0.0, r), tl.where(out, 0.0, rt)
            return r, rt, tl.where(out, 0.0, re), tl.where(out, 0.0, both), r, r, r, r
        q = reciprocal(x, FAST)
    q2 = q * q
    q3 = q2 * q
    if SHIFT == 1:
        return r, r * q, r * q2, r * q3, r * (q2 * q2), r, r, r
    return r, r * q, r * q2, r * q3, re, re * q, re * q2, re * q3


@triton.jit
def named_sums(b0, b1, b2, b3, b4, b5, b6, b7, KIND: tl.constexpr, SHIFT: tl.constexpr):
    """The sums S_k of r q^k and T_k of r^(2-t1) q^k, k = 0..3; below t2 = 1 only k = 0, 1 mean anything.

    SHIFT is n where r^(1-t1) = q^n, n = 0 or 1: then T_k = S_(k+n). Otherwise -1, above t1 = 1 -2.
    """
    if KIND == 0:
        if SHIFT == 0:
            return b0, b0, b0, b0, b0, b0, b0, b0
        return b0, b0, b0, b0, b1, b1, b1, b1
    if KIND < 0:
        if SHIFT == 0:
            return b0, b1, b1, b1, b0, b1, b1, b1
        return b0, b1, b1, b1, b2, b3, b3, b3
    if SHIFT == 0:
        return b0, b1, b2, b3, b0, b1, b2, b3
    if SHIFT == 1:
        return b0, b1, b2, b3, b1, b2, b3, b4
    return b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def gradient_terms(
    u, d, c1, c2, t1, t2, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """c1 r^(1+t2-t1) + c2 r^t2."""
    if KIND == 3:
        rt, log_r = escort_power(u, d, t2, s, KIND, FAST)
        return c1 * exp((s + (2.0 - t1)) * log_r) + c2 * rt
    if Q > 0:
        h = _root(u, d, s, KIND, Q, FAST)
        if E >= R:
            return _power(h, R + Q) * (c1 * _power(h, E - R) + c2)
        return _power(h, E + Q) * (c1 + c2 * _power(h, R - E))
    log2_r, _ = _log2_ratio(u, d, s, KIND, NEAR, FAST)
    power = tl.math.exp2(grown(log2_r, s, NEAR))
    # Where the power is 0, r^(1-t1) is 0, infinite or, at t1 = 1, NaN.
    grad = power * tl.where(power == 0.0, c2, c1 * tl.math.exp2((1.0 - t1) * log2_r) + c2)
    if KIND < 0:
        grad = tl.where(u * (s * d) < -1.0, 0.0, grad)
    return grad


@triton.jit
def nearby_terms(u, d, t1, s, KIND: tl.constexpr):
    """r^t2, and 1 - r^(1-t1), which keeps its digits where r is near 1; for t1 < 1."""
    log_r, _ = log_ratio(u, d, s, KIND, False)
    x = (1.0 - t1) * log_r
    return exp((1.0 + s) * log_r), tl.where(tl.abs(x) < 0.25, -x * _expm1_near(x), 1.0 - exp(x))


@triton.jit
def divergence(positive, log_y, log_p, t1, T1_ZERO: tl.constexpr):
    """One class's part of `core.loss`; log y is 0 where y is not positive."""
    gap = log_y - log_p
    above, below = tl.where(gap < 0.0, 0.0, gap), tl.where(gap < 0.0, gap, 0.0)
    p_power = exp((2.0 - t1) * log_p)
    smaller, size = tl.minimum(1.0, 2.0 - t1), tl.abs(1.0 - t1)
    y_power = tl.maximum(exp((2.0 - t1) * log_y), 1e-37)  # times infinity it is not NaN
    present = y_power * (phi(above, t1 - 1.0, T1_ZERO) - phi(above, t1 - 2.0, False))
    present += p_power * (exp(smaller * below) * phi(below, size, T1_ZERO) - phi(below, 2.0 - t1, False))
    return tl.where(positive, present, p_power / (2.0 - t1))
