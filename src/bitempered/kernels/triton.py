"""The loss and the tempered softmax on a GPU: Triton kernels that restate `bitempered.core` in float32.

A program owns a few rows and solves for their m. With d = e^(-s m), x_i = 1 + s u_i d and q_i = 1 / x_i, a change of m
moves every probability by a power of a linear function,

    p_i(m + delta) = p_i(m) (1 + s z q_i)^(-1/s),      z = phi_s(delta),

so that one pass over a row, summing r_i q_i^k for k = 0..3, gives its mass as a function of delta: enough for a step of
third order, and where the step is small for every sum of the loss and of its gradient at m + delta. A chunk from
the middle of a long row gives the start. Mostly, then, a row is read twice: for the sums, and to write its gradient.

The label and, but for the first pass over a long row, the largest class stay out of the sums and are dealt with as
scalars. So 1 - p is a sum of other probabilities, never a difference, and a small gradient keeps its digits.

Tiles are (rows, columns / vector, vector): one thread loads the numbers of the last axis together, and adds them up
before it adds to its sums. tests/test_triton.py runs all this in Triton's interpreter.
"""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.targets import target_weights

LOG2E = tl.constexpr(math.log2(math.e))
LOG2E_LOST = tl.constexpr(1.3349e-8)  # relative to LOG2E, when it becomes float32
LN2 = tl.constexpr(math.log(2))
LIMIT = tl.constexpr(24)  # on the passes over a row, whatever its logits


@triton.jit
def _wide(x):
    return x[:, None, None]


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), 0) > 0


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _exp(x):
    return tl.math.exp2(x * LOG2E)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST is one instruction of NVIDIA's, off by 2^-22 near 1, where tl.log2 takes twenty."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _log1p_near(z):
    """1 - log(1 + z) / z for |z| < 0.4, from artanh(z / (2 + z)), which does not round 1 + z.

    What is near 1 is taken off v instead of multiplied with it, so that the division, which on a GPU is not exact, and
    everything else that rounds here hardly touches the digits of v.
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
def _phi(v, s, S_IS_ZERO: tl.constexpr):
    x = s * v
    return v if S_IS_ZERO else tl.where(tl.abs(x) < 0.25, v * _expm1_near(x), (_exp(x) - 1.0) / s)


@triton.jit
def _psi(v, s, S_IS_ZERO: tl.constexpr, FAST: tl.constexpr):
    z = s * v
    return v if S_IS_ZERO else tl.where(tl.abs(z) < 0.4, v - v * _log1p_near(z), _log2(1.0 + z, FAST) * LN2 / s)


@triton.jit
def _decay(m, s, KIND: tl.constexpr):
    """d = e^(-s m), of which there is the root above t = 2, where it may underflow though u d is large."""
    x = -0.5 * s * m if KIND > 1 else -s * m
    near = x * _expm1_near(x) + 1.0  # exact to the last bit, where a GPU's exp2 is not: u may be large
    # A masked class, u = inf, stays at inf where e^(-s m) underflows.
    decay = tl.where(tl.abs(x) < 0.25, near, _exp(x))
    return tl.maximum(decay, 1e-37, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _decayed(u, d, KIND: tl.constexpr):
    return (u * d) * d if KIND > 1 else u * d


@triton.jit
def _log_ratio(u, d, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """log r to full precision, -inf where r is 0; and which classes are outside the support (its edge is inside)."""
    if KIND == 0:
        return -u, u != u
    v = _decayed(u, d, KIND)
    x = s * v
    outside = (x < -1.0) | (u == float("inf")) if KIND < 0 else u != u
    zero = (x <= -1.0) | (u == float("inf"))
    log_r = -_psi(tl.where(zero, 0.0, v), s, False, FAST)
    if KIND > 1:
        log_r = tl.where(x == float("inf"), _log2_huge(u, d, s, FAST) * (-LN2 / s), log_r)
    return tl.where(zero, float("-inf"), log_r), outside


@triton.jit
def _log2_huge(u, d, s, FAST: tl.constexpr):
    """log2(s u d) where the product overflows."""
    return _log2(u * d, FAST) + _log2(s * d, FAST)


@triton.jit
def _log2_ratio(u, d, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr):
    """log2 r as fast as its use in sums allows, and x; outside the support both are those of its edge."""
    if KIND == 0:
        return u * -LOG2E, u
    z = (u * d) * (s * d) if KIND > 1 else u * (s * d)
    x = 1.0 + z
    if KIND < 0:
        x = tl.where(x < 1e-37, 1e-37, x)
    log2_x = _log2(x, FAST)
    if KIND > 1:
        log2_x = tl.where(z == float("inf"), _log2_huge(u, d, s, FAST), log2_x)
    log2_r = log2_x * (-1.0 / s)
    if NEAR:  # 1 + z loses what 1 / s blows up
        # So far down that r is 1e-30, every rounding of log r shows: this has one, beside that of LOG2E and of d.
        v = u * (d * LOG2E)
        lost = tl.fma(u, d * LOG2E, -v)
        log2_r = tl.where(tl.abs(z) < 0.4, (v * (_log1p_near(z) - LOG2E_LOST) - lost) - v, log2_r)
    return log2_r, x


@triton.jit
def _grown(log_r, extra, NEAR: tl.constexpr):
    """(1 + extra) log_r, where next to t = 1 the digits of `extra`, which float32's 1 + extra has lost, count."""
    if NEAR:
        return tl.where(log_r == float("-inf"), log_r, log_r + extra * log_r)
    return (1.0 + extra) * log_r


@triton.jit
def _root(u, d, s, KIND: tl.constexpr, Q: tl.constexpr, FAST: tl.constexpr):
    """x^(-1/Q) of x = 1 + s u d."""
    if KIND > 1:  # of 2^-32 x, which does not overflow
        x = 2.0**-32 + (u * d) * (s * d * 2.0**-32)
        root = tl.math.rsqrt(x) if Q == 2 else tl.math.exp2(_log2(x, FAST) * (-1.0 / Q))
        return root * 2.0 ** (-32.0 / Q)
    x = 1.0 + u * (s * d)
    if Q == 1:
        return _inverse(x, FAST)
    return tl.math.rsqrt(x) if Q == 2 else tl.math.exp2(_log2(x, FAST) * (-1.0 / Q))


@triton.jit
def _power(h, N: tl.constexpr):
    y = 1.0
    for bit in tl.static_range(6):
        if (N >> bit) & 1:
            y = h * y
        h = h * h
    return y


@triton.jit
def _summands(
    u, d, t1, t2, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What `_named` takes the sums of. A root h = x^(-1/Q) with r = h^R and r^(2-t1) = h^E saves transcendentals."""
    if Q > 0:
        h = _root(u, d, s, KIND, Q, FAST)
        q, r, re = _power(h, Q), _power(h, R), _power(h, E)
    else:
        log2_r, x = _log2_ratio(u, d, s, KIND, NEAR, FAST)
        r = tl.math.exp2(log2_r)
        # A product, so that what rounds r is the same in both; above t1 = 1 r may be 0 where its power is not.
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
        q = _inverse(x, FAST)
    q2 = q * q
    q3 = q2 * q
    if SHIFT == 1:
        return r, r * q, r * q2, r * q3, r * (q2 * q2), r, r, r
    return r, r * q, r * q2, r * q3, re, re * q, re * q2, re * q3


@triton.jit
def _named(b0, b1, b2, b3, b4, b5, b6, b7, KIND: tl.constexpr, SHIFT: tl.constexpr):
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
def _columns(COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    return tl.arange(0, COLUMNS // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _load(base, class_stride, c, n_classes, row_in, AGAIN: tl.constexpr = False):
    """The logits of classes c, -inf beyond the last class; kept in the cache where they are to be loaded AGAIN.

    As they are stored, since a loop loads what its next turn needs, and so has room for it.
    """
    kept = row_in[:, None, None] & (c < n_classes)[None, :, :]
    at = base[:, None, None] + (c.to(tl.int64) * class_stride)[None, :, :]
    if AGAIN:
        return tl.load(at, mask=kept, other=float("-inf"), eviction_policy="evict_last")
    return tl.load(at, mask=kept, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def _store(base, class_stride, c, n_classes, row_in, x):
    kept = row_in[:, None, None] & (c < n_classes)[None, :, :]
    at = base[:, None, None] + (c.to(tl.int64) * class_stride)[None, :, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=kept, eviction_policy="evict_first")


@triton.jit
def _rows(n_inner, ROWS: tl.constexpr):
    """The rows of this program: in which block of rows, where inside it, whether they exist, and their numbers."""
    tiles = tl.cdiv(n_inner, ROWS)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    inner = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return outer, inner, inner < n_inner, outer * n_inner + inner


@triton.jit
def _step(m, s0, s1, s2, s3, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """The change of m that brings the mass to 1, and the variance of q.

    As core's, Newton on the power -s of the mass; above t = 1 with the next two terms of its series in z, which has
    -(1+s)/2 times the variance of q and (1+s)/6 ((1+2s) its third cumulant + 3 s its mean times its variance) in
    front of z^2 and z^3.
    """
    log_z = _log2(s0, FAST) * LN2 - m
    if KIND == 0:
        return log_z, m
    ratio, variance = s0 * _inverse(s1, FAST), m
    if KIND > 0:
        inverse = _inverse(s0, FAST)
        mean = s1 * inverse
        square = mean * mean
        variance = tl.maximum(s2 * inverse - square, 0.0)
        cumulant = s3 * inverse - mean * (3.0 * variance + square)
        newton = tl.minimum(_phi(log_z, s, False), 1e12) * ratio
        second = -0.5 * (1.0 + s) * variance * newton * ratio
        third = (1.0 + s) / 6.0 * ((1.0 + 2.0 * s) * cumulant + 3.0 * s * mean * variance) * newton * newton * ratio
        small = (tl.abs(second) < 0.25) & (tl.abs(third) < 0.25)
        ratio /= 1.0 + tl.where(small, second + third - second * second, tl.minimum(tl.maximum(second, -0.5), 1.0))
    change = (ratio - 1.0) * _phi(log_z, -s, False)
    if KIND > 0:
        change = tl.maximum(change, -0.9 / s)  # from above the root, where the step would leave the domain
    return log_z + _psi(change, s, False, FAST), variance


@triton.jit
def _moved(w0, w1, w2, b, z, delta, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """A sum of b-th powers of r at m + delta, from that sum at m and those with one and two factors q more."""
    if KIND <= 0:  # at t = 1 r does not depend on m, and below the last step is rounding
        return w0
    inverse = _inverse(tl.maximum(w0, 1e-30), FAST)
    mean = w1 * inverse
    spread = z * _inverse(1.0 + s * z * mean, FAST)
    variance = w2 * inverse - mean * mean
    power = _exp(b * (delta - _psi(z * mean, s, False, FAST)))
    return w0 * power * (1.0 + 0.5 * b * (b + s) * spread * spread * variance)


@triton.jit
def _lane(x, LANE: tl.constexpr, VECTOR: tl.constexpr):
    """Of every VECTOR numbers on the last axis the one with the number LANE (in an order of its own)."""
    if VECTOR == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], VECTOR // 2, 2)))
        return _lane(odd if LANE % 2 else even, LANE // 2, VECTOR // 2)


@triton.jit
def _solve(
    base, class_stride, n_classes, row_in, active, label, label_logit, t1, t2, s,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """For each row: a point of reference near its maximum, m in terms of it, the last step of m; whether the classes at
    the point of reference are left out of the sums, and how many they are; the sums before that step over all classes
    but those and the label; and the logits themselves where the row is SINGLE, one tile."""
    TERMS: tl.constexpr = (2 - (SHIFT == 0)) * (1 if KIND == 0 else 2 if KIND < 0 else 4) if SHIFT < 1 else 5
    columns = _columns(COLUMNS, VECTOR)
    first = tl.multiple_of((n_classes // COLUMNS // 2) * COLUMNS, 16)
    tile = _load(base, class_stride, first + columns, n_classes, row_in, True).to(tl.float32)
    top = tl.maximum(tl.max(tl.max(tile, 2), 1), label_logit)
    u = _wide(top) - tile
    masked = u == float("inf")
    count, mean = _sum(tl.where(masked, 0.0, 1.0)), _sum(tl.where(masked, 0.0, u))
    mean /= count
    scale = 1.0 if SINGLE else n_classes / COLUMNS
    log_count = _log2(count * scale, FAST) * LN2
    v = mean * _exp(-s * log_count)
    defined = s * v < 1.0
    bound = log_count - _psi(tl.where(defined, v, 0.0), -s, KIND == 0, FAST)
    m = tl.where(defined & (bound > 0.0), bound, 0.0)

    ties, delta, b0, b1, b2, b3, b4, b5, b6, b7 = m * 0.0, m, m, m, m, m, m, m, m, m
    # What `_moved` leaves out, relative to the sum: this times the third power of z and the third cumulant of q.
    b = tl.maximum(tl.maximum(t2, 2.0 - t1), 1.0 + t2 - t1)
    remainder = b * (b + s) * (b + 2.0 * s)
    passes = 0
    settled = active & (active == 0)
    todo = _any(active)
    while todo:
        d = _decay(m, s, KIND)
        if SINGLE:
            others, at_top = columns[None, :, :] != _wide(label), tile == _wide(top)
            ties = _sum(tl.where(others & at_top, 1.0, 0.0))
            u = _wide(top) - tl.where(others & (at_top == 0), tile, float("-inf"))
            b0, b1, b2, b3, b4, b5, b6, b7 = _summands(u, _wide(d), t1, t2, s, KIND, NEAR, FAST, SHIFT, Q, R, E)
            b0, b1, b2, b3 = _sum(b0), _sum(b1), _sum(b2), _sum(b3)
            b4, b5, b6, b7 = _sum(b4), _sum(b5), _sum(b6), _sum(b7)
        else:
            sampling, peel = passes == 0, passes > 1
            zero = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
            a0, a1, a2, a3, a4, a5, a6, a7, tied = zero, zero, zero, zero, zero, zero, zero, zero, zero
            highest = zero + float("-inf")
            start, stop = tl.where(sampling, first, 0), tl.where(sampling, first + COLUMNS, n_classes)
            coming = _load(base, class_stride, tl.multiple_of(start, 16) + columns, n_classes, row_in, True)
            for at in tl.range(start, stop, COLUMNS):
                at = tl.multiple_of(at, 16)
                a = coming.to(tl.float32)
                coming = _load(base, class_stride, at + COLUMNS + columns, tl.minimum(stop, n_classes), row_in, True)
                highest = tl.maximum(highest, tl.max(a, 2))
                if _any((label >= at) & (label < at + COLUMNS)):
                    a = tl.where((at + columns)[None, :, :] == _wide(label), float("-inf"), a)
                if peel:
                    at_top = a == _wide(top)
                    tied += tl.sum(tl.where(at_top, 1.0, 0.0), 2)
                    a = tl.where(at_top, float("-inf"), a)
                x0, x1, x2, x3, x4, x5, x6, x7 = zero, zero, zero, zero, zero, zero, zero, zero
                for lane in tl.static_range(VECTOR):  # one after the other, each by multiplying and adding at once
                    y0, y1, y2, y3, y4, y5, y6, y7 = _summands(
                        top[:, None] - _lane(a, lane, VECTOR), d[:, None], t1, t2, s, KIND, NEAR, FAST, SHIFT, Q, R, E
                    )
                    x0, x1, x2, x3 = x0 + y0, x1 + y1, x2 + y2, x3 + y3
                    x4, x5, x6, x7 = x4 + y4, x5 + y5, x6 + y6, x7 + y7
                a0, a1, a2, a3 = a0 + x0, a1 + x1, a2 + x2, a3 + x3
                a4, a5, a6, a7 = a4 + x4, a5 + x5, a6 + x6, a7 + x7
            b0 = tl.sum(a0, 1)
            if TERMS > 1:
                b1 = tl.sum(a1, 1)
            if TERMS > 2:
                b2, b3 = tl.sum(a2, 1), tl.sum(a3, 1)
            if TERMS > 4:
                b4 = tl.sum(a4, 1)
            if TERMS > 5:
                b5, b6, b7 = tl.sum(a5, 1), tl.sum(a6, 1), tl.sum(a7, 1)
            if peel:
                ties = tl.sum(tied, 1)
            if sampling:
                b0, b1, b2, b3 = b0 * scale, b1 * scale, b2 * scale, b3 * scale
        y0, y1, y2, y3, y4, y5, y6, y7 = _summands(top - label_logit, d, t1, t2, s, KIND, NEAR, FAST, SHIFT, Q, R, E)
        S0, S1, S2, S3, T0, T1, T2, T3 = _named(
            b0 + y0 + ties, b1 + y1 + ties, b2 + y2 + ties, b3 + y3 + ties,
            b4 + y4 + ties, b5 + y5 + ties, b6 + y6 + ties, b7 + y7 + ties, KIND, SHIFT,
        )  # fmt: skip
        delta, variance = _step(m, S0, S1, S2, S3, s, KIND, FAST)
        if KIND > 0:
            z = tl.abs(_phi(delta, s, False))
            error = remainder * z * z * z * variance
            # Where q hardly varies a step of any size is exact, but for the rounding of q, which it is multiplied by,
            # and downwards by as much as e^(-s delta).
            error = tl.where((tl.abs(delta) > 1.0) | (s * delta < -1.0), 1.0, error)
        elif KIND < 0:
            error = tl.abs(delta)
        else:
            error = delta * 0.0
        done = error <= 3e-6
        if SINGLE:
            if KIND < 0:  # twice, so that the sums are taken next to the root
                settled, done = done, done & settled
            done |= (S0 != S0) | (passes == LIMIT)
            better = tl.maximum(m + delta, 0.0)
            todo = _any(active & (done == 0))
            m = tl.where(todo, better, m)
        elif sampling:
            m = tl.where(m + delta > 0.0, m + delta, 0.0)
        else:
            # In terms of the maximum, which is above the point of reference by `excess`, m is smaller.
            peak = tl.maximum(tl.maximum(tl.max(highest, 1), label_logit), top)
            excess = peak - top
            valid = (_decayed(excess, d, KIND) <= 8.0) & (tl.abs(s) * _decayed(excess, d, KIND) <= 0.5)
            better = tl.where(valid, m + delta, m)
            shift = _decayed(excess, _decay(better, s, KIND), KIND)
            below = s * shift < 0.9
            better += _psi(-tl.where(below, shift, 0.0), s, KIND == 0, FAST)
            better = tl.where(below & (better > 0.0), better, 0.0)
            # A class with most of the mass asks for a pass without it, unless it is the label. Below t2 = 1 that asks
            # as well, for sums taken nearer to the root.
            whole = peel | (better > 0.1)
            if KIND >= 0:
                whole |= label_logit >= peak
            done = (done & valid & whole) | ((S0 != S0) & peel) | (passes == LIMIT)
            todo = _any(active & (done == 0))
            top, m = tl.where(todo, peak, top), tl.where(todo, better, m)
        passes += 1
    S0, S1, S2, S3, T0, T1, T2, T3 = _named(b0, b1, b2, b3, b4, b5, b6, b7, KIND, SHIFT)
    m += top - top  # an infinite maximum has no answer
    return top, m, delta, (passes > 2) | SINGLE, ties, S0, S1, S2, S3, T0, T1, T2, T3, tile


@triton.jit
def _normalize(
    base, class_stride, n_classes, row_in, active, t, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`_solve` without a label: the point of reference, m, and the logits of a SINGLE row."""
    nowhere, nothing = tl.full((ROWS,), -1, tl.int32), tl.full((ROWS,), float("-inf"), tl.float32)
    top, m, delta, _, _, _, _, _, _, _, _, _, _, tile = _solve(
        base, class_stride, n_classes, row_in, active, nowhere, nothing, 1.0, t, s,
        KIND, NEAR, FAST, 0, 0, 0, 0, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    return top, m + delta, tile


@triton.jit
def _gradients(
    u, d, c1, c2, t1, t2, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """c1 r^(1+t2-t1) + c2 r^t2."""
    if Q > 0:
        h = _root(u, d, s, KIND, Q, FAST)
        if E >= R:
            return _power(h, R + Q) * (c1 * _power(h, E - R) + c2)
        return _power(h, E + Q) * (c1 + c2 * _power(h, R - E))
    log2_r, _ = _log2_ratio(u, d, s, KIND, NEAR, FAST)
    power = tl.math.exp2(_grown(log2_r, s, NEAR))
    # Where the power is 0, r^(1-t1) is 0, infinite or, at t1 = 1, NaN.
    grad = power * tl.where(power == 0.0, c2, c1 * tl.math.exp2((1.0 - t1) * log2_r) + c2)
    if KIND < 0:
        grad = tl.where(u * (s * d) < -1.0, 0.0, grad)
    return grad


@triton.jit
def _count(target_ptr, weight_ptr, n_rows, n_classes, ignore_index, WEIGHTED: tl.constexpr, COUNT: tl.constexpr):
    """The weights of all targets, summed; COUNT of them are looked at together."""
    total = tl.zeros((COUNT,), tl.float32)
    for at in tl.range(0, n_rows, COUNT):
        row = at + tl.arange(0, COUNT)
        label = tl.load(target_ptr + row, mask=row < n_rows, other=ignore_index)
        kept = label != ignore_index
        if WEIGHTED:
            known = kept & (label >= 0) & (label < n_classes)
            total += tl.load(weight_ptr + label, mask=known, other=0.0).to(tl.float32)
        else:
            total += tl.where(kept, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _divisor(
    target_ptr, weight_ptr, divisor_ptr, n_rows, n_classes, ignore_index, WEIGHTED: tl.constexpr, COUNT: tl.constexpr
):
    tl.store(divisor_ptr, _count(target_ptr, weight_ptr, n_rows, n_classes, ignore_index, WEIGHTED, COUNT))


@triton.jit
def _loss(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, weight_ptr, g_ptr, g_stride, losses_ptr, divisor_ptr, state_ptr, state_stride,
    n_rows, n_inner, n_classes, ignore_index,
    t1, t2, s, KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr, SAME: tl.constexpr,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, REDUCE: tl.constexpr, WITH_LOSS: tl.constexpr, WITH_GRAD: tl.constexpr,
    SCALED: tl.constexpr, COUNTED: tl.constexpr, WITH_STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The loss of class indices, per row or summed over the rows of a program, and its gradient: both weighted and, for
    a MEAN, divided by the divisor; the gradient also, where it is SCALED, multiplied by g. The gradient may take the
    place of the logits; the state of a row is what `_class_gradients` needs."""
    outer, inner, row_in, row = _rows(n_inner, ROWS)
    base = logits_ptr + outer * outer_stride + inner * inner_stride
    label = tl.load(target_ptr + row, mask=row_in, other=0).to(tl.int64)
    ignored = label == ignore_index
    known = (label >= 0) & (label < n_classes)
    tl.device_assert(ignored | known | (row_in == 0), "target must hold class indices or ignore_index")
    active = row_in & known & (ignored == 0)
    label_logit = tl.load(base + label * class_stride, mask=active, other=float("-inf")).to(tl.float32)
    factor = tl.where(ignored, 0.0, 1.0)
    if WEIGHTED:
        factor = tl.load(weight_ptr + label, mask=active, other=0.0).to(tl.float32)
        tl.device_assert((factor < 0.0) == 0, "weight must not be negative")
    label = tl.where(active, label, -1).to(tl.int32)
    top, m, delta, peeled, ties, S0, S1, S2, S3, T0, T1, T2, T3, tile = _solve(
        base, class_stride, n_classes, row_in, active & (factor != 0.0), label, label_logit, t1, t2, s,
        KIND, NEAR, FAST, SHIFT, Q, R, E, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    z = _phi(delta, s, KIND == 0)
    m += delta
    d = _decay(m, s, KIND)
    log_r, outside = _log_ratio(top - label_logit, d, s, KIND, False)  # of the label, so not fast but exact
    log_p = log_r - m
    divisor = 1.0
    if MEAN:
        if COUNTED:
            divisor = tl.load(divisor_ptr).to(tl.float32)
        else:
            divisor = _count(target_ptr, weight_ptr, n_rows, n_classes, ignore_index, WEIGHTED, 256)

    if WITH_LOSS:
        others = _exp((t1 - 2.0) * m) * (_moved(T0, T1, T2, 2.0 - t1, z, delta, s, KIND, FAST) + ties)
        linear: tl.constexpr = SAME and KIND > 0  # then -log_t1 p is linear in the logits
        first = top - label_logit + _phi(m, s, False) if linear else _phi(-log_p, t1 - 1.0, SHIFT == 0)
        loss = first - _phi(-log_p, t1 - 2.0, False) + others / (2.0 - t1)
        loss = tl.where(factor == 0.0, 0.0, factor * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(ignored | known, loss, float("nan"))
        if REDUCE:
            mean = tl.sum(tl.where(row_in, loss, 0.0), 0) / divisor
            tl.store(losses_ptr + tl.program_id(0), tl.where(divisor == 0.0, float("nan"), mean) if MEAN else mean)
        else:
            tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty), mask=row_in)

    if WITH_GRAD:
        if MEAN:
            factor = tl.where(divisor == 0.0, 0.0, factor / divisor)  # the gradient of a mean of nothing is 0
        if SCALED:
            factor *= tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
        zero = ignored | (factor == 0.0)
        power = _exp((t1 - 1.0 - t2) * m)
        rest_t2 = _moved(S1, S2, S3, t2, z, delta, s, KIND, FAST)
        rest_both = _moved(T1, T2, T3, 1.0 + t2 - t1, z, delta, s, KIND, FAST)
        not_label = _exp(-m) * (_moved(S0, S1, S2, 1.0, z, delta, s, KIND, FAST) + ties)  # 1 - p of the label
        label_t2 = _exp(_grown(log_r, s, NEAR))
        if KIND < 0:
            label_t2 = tl.where(outside, 0.0, tl.where(t2 == 0.0, 1.0, label_t2))
        pull = tl.where(outside, 0.0, not_label) if SAME else _exp((s + (1.0 - t1)) * log_p) * not_label
        push = power * (rest_both + ties)
        share = factor / (rest_t2 + ties + label_t2)
        of_label = tl.where(zero, 0.0, -share * (pull * (rest_t2 + ties) + label_t2 * push))
        of_top = tl.where(zero, 0.0, share * (power * (rest_t2 + label_t2 - rest_both) + pull))
        label_grad, top_grad = _wide(of_label), _wide(of_top)
        c1, c2 = factor * power, share * (pull - push)
        columns = _columns(COLUMNS, VECTOR)
        grad_base = grad_ptr + outer * grad_outer + inner * grad_inner
        # Backwards, since of a long row what was read last is still in the cache.
        last = tl.multiple_of((n_classes - 1) // COLUMNS * COLUMNS, 16)
        begin = 0
        if not (SINGLE or WITH_STATE):
            begin = tl.where(peeled | _any(zero), 0, last + COLUMNS)
            coming = _load(base, class_stride, last + columns, n_classes, row_in)
            for back in tl.range(0, begin, COLUMNS):
                a = coming.to(tl.float32)
                ahead = tl.multiple_of(tl.maximum(last - back - COLUMNS, 0), 16)
                coming = _load(base, class_stride, ahead + columns, n_classes, row_in)
                c = tl.multiple_of(last - back, 16) + columns
                grad = _gradients(_wide(top) - a, _wide(d), _wide(c1), _wide(c2), t1, t2, s, KIND, NEAR, FAST, Q, R, E)
                _store(grad_base, grad_class, c, n_classes, row_in, grad)
            if begin > 0:
                tl.debug_barrier()
                at = label.to(tl.int64) * grad_class
                tl.store(grad_base + at, of_label.to(grad_ptr.dtype.element_ty), mask=active)
        peak = tl.full((ROWS, COLUMNS // VECTOR), float("-inf"), tl.float32)
        at_top = tl.full((ROWS, COLUMNS // VECTOR), -1, tl.int32)
        for back in tl.range(begin, last + COLUMNS, COLUMNS):  # what the loop above did not do
            at = tl.multiple_of(last - back, 16)
            c = at + columns
            a = tile if SINGLE else _load(base, class_stride, c, n_classes, row_in).to(tl.float32)
            grad = _gradients(_wide(top) - a, _wide(d), _wide(c1), _wide(c2), t1, t2, s, KIND, NEAR, FAST, Q, R, E)
            if WITH_STATE:
                peak = tl.maximum(peak, tl.max(a, 2))
                at_top = tl.maximum(at_top, tl.max(tl.where(a == _wide(top), c[None, :, :], -1), 2))
            if peeled:
                grad = tl.where(a == _wide(top), top_grad, grad)
            grad = tl.where(_wide(zero), 0.0, grad)
            if _any((label >= at) & (label < at + COLUMNS)):
                grad = tl.where(c[None, :, :] == _wide(label), label_grad, grad)
            _store(grad_base, grad_class, c, n_classes, row_in, grad)
        if WITH_STATE:
            kind = tl.where(zero, -2, tl.where(peeled, tl.max(at_top, 1), -1))
            state = state_ptr + row
            tl.store(state, kind.to(tl.float32, bitcast=True), mask=row_in)
            tl.store(state + state_stride, top, mask=row_in)
            tl.store(state + 2 * state_stride, tl.max(peak, 1), mask=row_in)
            tl.store(state + 3 * state_stride, d, mask=row_in)
            tl.store(state + 4 * state_stride, c1, mask=row_in)
            tl.store(state + 5 * state_stride, c2, mask=row_in)
            tl.store(state + 6 * state_stride, of_label, mask=row_in)
            tl.store(state + 7 * state_stride, of_top, mask=row_in)


@triton.jit
def _class_gradients(
    logits_ptr, row_stride, target_ptr, state_ptr, state_stride, n_rows, first, n_classes, t1, t2, s,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The gradient that `_loss` wrote, of the classes from `first` on, in the place of logits computed once more.

    Another matrix product may round a logit to its neighbour. That moves the gradient of its class by as much as
    rounding does, but for a class with most of the mass, where terms cancel, and above the largest logit, where a power
    may have no value. So the label and the largest class are known by their numbers, and the largest logit is kept.
    """
    _, _, row_in, row = _rows(n_rows, ROWS)
    base = logits_ptr + row * row_stride
    state = state_ptr + row
    kind = tl.load(state, mask=row_in, other=0.0).to(tl.int32, bitcast=True)
    top = _wide(tl.load(state + state_stride, mask=row_in, other=0.0))
    peak = _wide(tl.load(state + 2 * state_stride, mask=row_in, other=0.0))
    d = _wide(tl.load(state + 3 * state_stride, mask=row_in, other=1.0))
    c1 = _wide(tl.load(state + 4 * state_stride, mask=row_in, other=0.0))
    c2 = _wide(tl.load(state + 5 * state_stride, mask=row_in, other=0.0))
    label_grad = _wide(tl.load(state + 6 * state_stride, mask=row_in, other=0.0))
    top_grad = _wide(tl.load(state + 7 * state_stride, mask=row_in, other=0.0))
    label = _wide(tl.load(target_ptr + row, mask=row_in, other=-1))
    peeled, zero, at_top = _wide(kind >= 0), _wide(kind == -2), _wide(kind)
    columns = _columns(COLUMNS, VECTOR)
    for at in tl.range(0, n_classes, COLUMNS):
        c = tl.multiple_of(at, 16) + columns
        number = (first + c)[None, :, :]
        a = tl.minimum(_load(base, 1, c, n_classes, row_in).to(tl.float32), peak)
        grad = _gradients(top - a, d, c1, c2, t1, t2, s, KIND, NEAR, FAST, Q, R, E)
        grad = tl.where(peeled & ((number == at_top) | (a == top)), top_grad, grad)
        grad = tl.where(zero, 0.0, tl.where(number == label, label_grad, grad))
        _store(base, 1, c, n_classes, row_in, grad)


@triton.jit
def _weighted(
    base, class_stride, weight_ptr, c, label, label_smoothing, n_classes, row_in,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The target's probabilities of classes c, and those smoothed and weighted; 0 beyond the last class. Where they are
    WEIGHTED also their log2, since they may underflow."""
    real = (c < n_classes)[None, :, :]
    if INDICES:
        y = tl.where(c[None, :, :] == _wide(label), 1.0, 0.0)
    else:
        at = base[:, None, None] + (c.to(tl.int64) * class_stride)[None, :, :]
        y = tl.load(at, mask=real & _wide(row_in), other=0.0).to(tl.float32)
    z = tl.where(real, (1.0 - label_smoothing) * y + label_smoothing / n_classes, 0.0)
    log2_z = z
    if WEIGHTED:
        w = tl.load(weight_ptr + c, mask=c < n_classes, other=0.0).to(tl.float32)[None, :, :]
        log2_z = _log2(z, FAST) + _log2(w, FAST)
        z *= w
    return y, z, log2_z


@triton.jit
def _soft_terms(
    u, m, y, log2_share, t1, t2, s,
    KIND: tl.constexpr, FAST: tl.constexpr, T1_IS_ONE: tl.constexpr, SAME: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The divergence's terms, v of core's gradient, and r^t2. log2_share is log2 y where y may have underflowed, as
    in core's log_share, if it is WEIGHTED."""
    log_r, outside = _log_ratio(u, _decay(m, s, KIND), s, KIND, FAST)
    log_p = log_r - m
    positive = log2_share > float("-inf") if WEIGHTED else y > 0.0
    log2_y = _log2(tl.where(y > 0.0, y, 1.0), FAST)
    if WEIGHTED:
        log2_y = tl.where(positive, tl.where(y < 1e-30, log2_share, log2_y), 0.0)
    log_y = log2_y * LN2
    gap = log_y - log_p
    above, below = tl.where(gap < 0.0, 0.0, gap), tl.where(gap < 0.0, gap, 0.0)
    p_power = _exp((2.0 - t1) * log_p)
    smaller, size = tl.minimum(1.0, 2.0 - t1), tl.abs(1.0 - t1)
    y_power = tl.maximum(_exp((2.0 - t1) * log_y), 1e-37)  # times infinity it is not NaN
    present = y_power * (_phi(above, t1 - 1.0, T1_IS_ONE) - _phi(above, t1 - 2.0, False))
    present += p_power * (_exp(smaller * below) * _phi(below, size, T1_IS_ONE) - _phi(below, 2.0 - t1, False))
    v = _exp(log_p) - y
    if not SAME:
        v *= _exp((s + (1.0 - t1)) * log_p)
    e = _exp(t2 * log_r)
    if KIND < 0:
        e = tl.where(t2 == 0.0, 1.0, e)
        v, e = tl.where(outside, 0.0, v), tl.where(outside, 0.0, e)
    return tl.where(positive, present, p_power / (2.0 - t1)), v, e


@triton.jit
def _soft_loss(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, target_outer, target_inner, target_class, weight_ptr, g_ptr, g_stride, losses_ptr, divisor_ptr,
    n_inner, n_classes, ignore_index, label_smoothing, tolerance, t1, t2, s,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, T1_IS_ONE: tl.constexpr, SAME: tl.constexpr,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, REDUCE: tl.constexpr,
    WITH_LOSS: tl.constexpr, WITH_GRAD: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`_loss` for targets that are not one class: class probabilities, or class indices with label smoothing."""
    outer, inner, row_in, row = _rows(n_inner, ROWS)
    base = logits_ptr + outer * outer_stride + inner * inner_stride
    target_base = target_ptr + outer * target_outer + inner * target_inner
    columns = _columns(COLUMNS, VECTOR)
    nothing = tl.zeros((ROWS,), tl.float32)
    label = tl.full((ROWS,), -1, tl.int64)
    ignored, known = row_in == 0, row_in
    if INDICES:
        label = tl.load(target_ptr + row, mask=row_in, other=0).to(tl.int64)
        ignored, known = label == ignore_index, (label >= 0) & (label < n_classes)
        tl.device_assert(ignored | known | (row_in == 0), "target must hold class indices or ignore_index")
    active = row_in & known & (ignored == 0)
    label = tl.where(active, label, -1).to(tl.int32)

    total, plain, least = nothing, nothing, nothing
    for at in tl.range(0, n_classes, COLUMNS):
        c = at + columns
        y, z, _ = _weighted(
            target_base, target_class, weight_ptr, c, label, label_smoothing, n_classes, row_in, INDICES, WEIGHTED, FAST
        )
        total += _sum(z)
        plain += _sum(y)
        least = tl.minimum(least, tl.min(tl.min(y, 2), 1))
        if WEIGHTED:
            tl.device_assert((y < 0.0) | ((z < 0.0) == 0), "weight must not be negative")
    if not INDICES:
        fine = (least >= 0.0) & (tl.abs(plain - 1.0) <= tolerance)
        tl.device_assert(fine | (row_in == 0), "target must hold probabilities in [0, 1] that sum to 1")
    empty = (total == 0.0) | ignored
    top, m, tile = _normalize(
        base, class_stride, n_classes, row_in, active & (empty == 0), t2, s,
        KIND, NEAR, FAST, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    inverse = 1.0 / tl.where(empty, 1.0, total)
    log2_total = _wide(_log2(tl.where(empty, 1.0, total), FAST))
    divisor = tl.load(divisor_ptr).to(tl.float32) if MEAN else 1.0

    loss, pull, mass = nothing, nothing, nothing
    for at in tl.range(0, n_classes, COLUMNS):
        c = at + columns
        a = tile if SINGLE else _load(base, class_stride, c, n_classes, row_in).to(tl.float32)
        _, z, log2_z = _weighted(
            target_base, target_class, weight_ptr, c, label, label_smoothing, n_classes, row_in, INDICES, WEIGHTED, FAST
        )
        terms, v, e = _soft_terms(
            _wide(top) - a, _wide(m), z * _wide(inverse), log2_z - log2_total, t1, t2, s,
            KIND, FAST, T1_IS_ONE, SAME, WEIGHTED,
        )  # fmt: skip
        loss += _sum(terms)
        pull += _sum(v)
        mass += _sum(e)
    if WITH_LOSS:
        loss = tl.where(empty, 0.0, total * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(ignored | known, loss, float("nan"))
        if REDUCE:
            mean = tl.sum(tl.where(row_in, loss, 0.0), 0) / divisor
            tl.store(losses_ptr + tl.program_id(0), tl.where(divisor == 0.0, float("nan"), mean) if MEAN else mean)
        else:
            tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty), mask=row_in)
    if WITH_GRAD:
        factor = tl.where(divisor == 0.0, 0.0, total / divisor) if MEAN else total
        if SCALED:
            factor *= tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
        zero = empty | (factor == 0.0)
        grad_base = grad_ptr + outer * grad_outer + inner * grad_inner
        for at in tl.range(0, n_classes, COLUMNS):
            c = at + columns
            a = tile if SINGLE else _load(base, class_stride, c, n_classes, row_in).to(tl.float32)
            _, z, log2_z = _weighted(
                target_base, target_class, weight_ptr, c, label, label_smoothing, n_classes, row_in, INDICES, WEIGHTED,
                FAST,
            )  # fmt: skip
            _, v, e = _soft_terms(
                _wide(top) - a, _wide(m), z * _wide(inverse), log2_z - log2_total, t1, t2, s,
                KIND, FAST, T1_IS_ONE, SAME, WEIGHTED,
            )  # fmt: skip
            grad = tl.where(_wide(zero), 0.0, _wide(factor) * (v - e * _wide(pull / mass)))
            _store(grad_base, grad_class, c, n_classes, row_in, grad)


@triton.jit
def _scale(
    grad_ptr, outer_stride, inner_stride, class_stride, g_ptr, g_stride, n_outer, n_inner, n_classes,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of the gradient by g, in place; where g is 1 it is not even read."""
    tiles = tl.cdiv(n_inner, ROWS)
    columns = _columns(COLUMNS, VECTOR)
    for tile in tl.range(tl.program_id(0), tiles * n_outer, tl.num_programs(0)):
        outer = (tile // tiles).to(tl.int64)
        inner = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row_in = inner < n_inner
        g = tl.load(g_ptr + (outer * n_inner + inner) * g_stride, mask=row_in, other=1.0).to(tl.float32)
        if _any(g != 1.0):
            base = grad_ptr + outer * outer_stride + inner * inner_stride
            for at in tl.range(0, n_classes, COLUMNS):
                c = tl.multiple_of(at, 16) + columns
                x = _load(base, class_stride, c, n_classes, row_in)
                _store(base, class_stride, c, n_classes, row_in, _wide(g) * x.to(tl.float32))


@triton.jit
def _softmax(
    logits_ptr, outer_stride, inner_stride, class_stride, out_ptr, out_outer, out_inner, out_class,
    lambda_ptr, state_ptr, n_inner, n_classes, n_rows, t, s,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, WHAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Probabilities (WHAT 0), their logarithms (1) or lambda_t (2); and for backward the point of reference and m."""
    outer, inner, row_in, row = _rows(n_inner, ROWS)
    base = logits_ptr + outer * outer_stride + inner * inner_stride
    top, m, tile = _normalize(
        base, class_stride, n_classes, row_in, row_in, t, s, KIND, NEAR, FAST, ROWS, COLUMNS, VECTOR, SINGLE
    )
    tl.store(state_ptr + row, top, mask=row_in)
    tl.store(state_ptr + n_rows + row, m, mask=row_in)
    if WHAT == 2:
        tl.store(lambda_ptr + row, (top + _phi(m, s, KIND == 0)).to(lambda_ptr.dtype.element_ty), mask=row_in)
    else:
        columns = _columns(COLUMNS, VECTOR)
        out_base = out_ptr + outer * out_outer + inner * out_inner
        for at in tl.range(0, n_classes, COLUMNS):
            c = tl.multiple_of(at, 16) + columns
            a = tile if SINGLE else _load(base, class_stride, c, n_classes, row_in).to(tl.float32)
            log_r, _ = _log_ratio(_wide(top) - a, _wide(_decay(m, s, KIND)), s, KIND, FAST)
            log_p = log_r - _wide(m)
            _store(out_base, out_class, c, n_classes, row_in, log_p if WHAT == 1 else _exp(log_p))


@triton.jit
def _softmax_backward(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    g_ptr, g_outer, g_inner, g_class, state_ptr, n_inner, n_classes, n_rows, t, s,
    KIND: tl.constexpr, FAST: tl.constexpr, WHAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """d log p_i = p_i^s (da_i - sum_j e_j da_j) and d lambda = sum_j e_j da_j, with the escort distribution e."""
    outer, inner, row_in, row = _rows(n_inner, ROWS)
    base = logits_ptr + outer * outer_stride + inner * inner_stride
    g_base = g_ptr + outer * g_outer + inner * g_inner
    grad_base = grad_ptr + outer * grad_outer + inner * grad_inner
    top, m = tl.load(state_ptr + row, mask=row_in, other=0.0), tl.load(state_ptr + n_rows + row, mask=row_in, other=0.0)
    columns = _columns(COLUMNS, VECTOR)
    pull, mass = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for at in tl.range(0, n_classes, COLUMNS):
        c = tl.multiple_of(at, 16) + columns
        v, e = _softmax_terms(base, class_stride, g_base, g_class, c, n_classes, row_in, top, m, t, s, KIND, FAST, WHAT)
        pull += _sum(v)
        mass += _sum(e)
    share = -tl.load(g_base, mask=row_in, other=0.0).to(tl.float32) if WHAT == 2 else pull
    for at in tl.range(0, n_classes, COLUMNS):
        c = tl.multiple_of(at, 16) + columns
        v, e = _softmax_terms(base, class_stride, g_base, g_class, c, n_classes, row_in, top, m, t, s, KIND, FAST, WHAT)
        _store(grad_base, grad_class, c, n_classes, row_in, v - e * _wide(share / mass))


@triton.jit
def _softmax_terms(
    base, class_stride, g_base, g_class, c, n_classes, row_in, top, m, t, s,
    KIND: tl.constexpr, FAST: tl.constexpr, WHAT: tl.constexpr,
):  # fmt: skip
    """g_i d out_i / d log p_i p_i^s, and r^t; 0 where p is 0."""
    a = _load(base, class_stride, c, n_classes, row_in).to(tl.float32)
    log_r, _ = _log_ratio(_wide(top) - a, _wide(_decay(m, s, KIND)), s, KIND, FAST)
    gone = log_r == float("-inf")
    e = tl.where(gone, 0.0, _exp(t * log_r))
    if WHAT == 2:
        return e * 0.0, e
    kept = row_in[:, None, None] & (c < n_classes)[None, :, :]
    g = tl.load(g_base[:, None, None] + (c.to(tl.int64) * g_class)[None, :, :], mask=kept, other=0.0).to(tl.float32)
    power = _exp((t if WHAT == 0 else s) * (log_r - _wide(m)))
    return tl.where(gone, 0.0, g * power), e


_COMPILED = isinstance(_loss, triton.JITFunction)  # and not interpreted
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True} if _COMPILED else {}
_CHECKED = {**_OPTIONS, "debug": True, "sanitize_overflow": False} if _COMPILED else {}  # debug: device_assert stays
_FAST = _COMPILED and torch.version.hip is None
# Triton looks at every argument of every call, and passes constants on to the launcher from 3.3 on.
_DIRECT = _FAST and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
_SMALL = 2**23  # numbers: one operation of torch is then faster than the launch of a kernel that may do nothing
_FEW = 4096  # targets: counting them in every program is then faster than one more launch
_MANY = 65536  # targets: one program that counts them takes longer than two launches of torch
_REGISTERS = 64  # of a thread in the pass over long rows: what it spills costs less than more warps gain
_NEAR = 0.09  # of s: nearer to 0, 1 + s v would lose digits that the exponent 1 / s needs


@functools.lru_cache(4096)
def _temperatures(t1: float, t2: float) -> dict[str, Any]:
    """What the kernels know of the temperatures when they are compiled (see `_summands` and `_named`)."""
    s = t2 - 1
    kind = (s > 0) - (s < 0) + (s > 1)
    shift = 0 if t1 == 1 else -2 if t1 > 1 else 1 if kind > 0 and math.isclose(1 - t1, s, rel_tol=1e-9) else -1
    for q in range(1, 13) if s >= _NEAR else ():
        r, e = q / s, q * (2 - t1) / s
        if max(r, e) + q < 64 and all(math.isclose(n, round(n), rel_tol=1e-9) for n in (r, e)):
            return {"KIND": kind, "NEAR": False, "SHIFT": shift, "Q": q, "R": round(r), "E": round(e), "FAST": _FAST}
    return {"KIND": kind, "NEAR": abs(s) < _NEAR, "SHIFT": shift, "Q": 0, "R": 0, "E": 0, "FAST": _FAST}


@functools.lru_cache(4096)
def _tile(classes: int, inner: int, itemsize: int, contiguous: bool, vector: int) -> dict[str, Any]:
    """The tile of a program, and its warps; `contiguous` are the classes of a row, and aligned to load `vector` of them
    at once. Rows of up to 8,192 classes stay in registers. The fastest of those tried on an H200, legal anywhere."""
    columns = max(16, triton.next_power_of_2(classes))
    if not contiguous:  # then neighbouring rows are loaded together
        rows, columns, warps = min(32, triton.next_power_of_2(inner)), min(columns, 32), 4
    elif columns > 8192:
        # A row is read twice, and of more than 64 kB more is still in the L2 cache if fewer rows are under way at once.
        # In half precision, where memory does not bind, that gains nothing.
        rows, warps = 1, 8 if itemsize == 4 and classes > 2**14 else 4
        columns = 2 * warps * 32 * 16 // itemsize
    elif inner * columns <= 4096:  # one program, which then adds up the losses as well
        rows = triton.next_power_of_2(inner)
        warps = min(16, max(1, rows * columns // 128))
    elif columns > 512:
        rows, warps = 1, min(8, columns // 512)
    else:
        rows = 512 // columns
        while rows > 1 and rows * columns > 128 and inner < 512 * rows:
            rows //= 2  # a small batch is bound by how long one program takes
        warps = max(1, rows * columns // 128)
    single = classes <= columns
    return {"ROWS": rows, "COLUMNS": columns, "VECTOR": vector, "SINGLE": single, "num_warps": warps}


def _cube(x: Tensor, axis: int) -> tuple[Tensor, int, int, tuple[int, int, int]]:
    """x (or a copy) as blocks of rows: how many of how many, and the strides from block to block, row, class."""
    if axis == 1 and x.dim() == 2:
        return x, 1, x.shape[0], (0, x.stride(0), x.stride(1))
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        x = x.reshape(before, x.shape[axis])
        return x, 1, before, (0, x.stride(0), x.stride(1))
    x = x.reshape(before, x.shape[axis], after)
    return x, before, after, (x.stride(0), x.stride(2), x.stride(1))


def _like(x: Tensor, axis: int) -> Tensor:
    """An empty tensor for the gradient of x, laid out as x is, unless `_cube` would have to copy that."""
    made = torch.empty_like(x)
    shared = x.dim() == 2 or _cube(made, axis)[0].data_ptr() == made.data_ptr()
    return made if shared else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _geometry(classes: int, inner: int, *tensors: tuple[Tensor, tuple[int, int, int]]) -> dict[str, Any]:
    x, strides = tensors[0]
    vector = 16 // x.element_size()
    aligned = classes % vector == 0
    for y, (outer, row, one) in tensors:
        aligned = aligned and one == 1 and outer % vector == row % vector == y.data_ptr() % 16 == 0
    return _tile(classes, inner, x.element_size(), strides[2] == 1, vector if aligned else 1)


def _tiles(rows: int, geometry: dict[str, Any]) -> int:
    return -(-rows // int(geometry["ROWS"]))


_launched = Memo()


def _launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """kernel[(programs,)](*arguments, **constants), by a shorter way where the like of it has been launched before.

    Triton binds and inspects every argument of every call, which takes longer than a small kernel runs. Returns what
    launches the same kernel on other arguments like these, and its last arguments, where that way is open.
    """
    if not _DIRECT:
        kernel[(programs,)](*arguments, **constants)
        return None
    # What a compiled kernel may depend on: of a pointer its dtype and alignment, of an integer its value, no float.
    kinds = [
        (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else None if isinstance(x, float) else (x,)
        for x in arguments
    ]
    key = (kernel, programs, torch.cuda.current_device(), *kinds, *constants.values())
    found = _launched.get(key)
    if found is not None:
        launch, rest = found
        launch(*arguments, *rest)
        return found
    launch = kernel[(programs,)](*arguments, **constants)[programs, 1, 1]
    rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    return _launched.keep(key, (launch, rest))


def _on(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def loss(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """The loss in `dtype`."""
    return _planned(logits, target, weight, options, dtype, None)


def loss_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    made = _like(logits, options.axis)
    return _planned(logits, target, weight, options, dtype, made), made


_plans = Memo()


def _planned(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    gradient: Tensor | None,
) -> Tensor:
    """`_run` where the like of it has run before, since of small batches the launch is what takes the time."""
    x, labels = logits.data_ptr(), target.data_ptr()
    into = x if gradient is None else gradient.data_ptr()
    key: Any = None
    if _DIRECT and weight is None and (x | into | labels) % 16 == 0:
        device = logits.get_device()
        if device == torch.cuda.current_device():
            key = (
                options, dtype, device, logits.dtype, logits.shape, logits.stride(), target.dtype, target.stride(),
                gradient is None,
            )  # fmt: skip
        plan = _plans.get(key)  # of None there is none
        if plan is not None:
            launch, pattern, strides, into_strides, rest, count = plan
            losses = torch.empty_like(pattern)
            total = None
            if count is not None:
                divisor = torch.empty((), dtype=torch.float32, device=logits.device)
                total = divisor.data_ptr()
                count[0](labels, None, total, rest[2], *rest[4:6], *count[1])
            # Addresses, since Triton would ask every tensor for its own.
            launch(x, *strides, into, *into_strides, labels, None, None, 0, losses.data_ptr(), total, *rest)
            return _finish(losses, options.reduction != "none", dtype)
    return _run(logits, target, weight, options, dtype, gradient, None, key=key)


def gradient(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of sum(g * loss) in the logits, contiguous."""
    made = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _run(logits, target, weight, options, None, made, g)
    return made


def chunk_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    divisor: Tensor | None,
    g: Tensor | None,
    with_gradient: bool,
    state: Tensor | None,
) -> Tensor:
    """The loss of some rows of class indices, a mean being over `divisor`; in float32.

    The gradient, multiplied by g, takes the place of the logits; `class_gradients_` needs the state, (8, rows).
    """
    into = logits if with_gradient else None
    return _run(logits, target, weight, options, torch.float32, into, g, divisor, state)


def class_gradients_(logits: Tensor, target: Tensor, state: Tensor, first: int, t1: float, t2: float) -> None:
    """Put the gradient in the place of logits computed once more, those of the classes from `first` on."""
    rows, classes = logits.shape
    temperature = _temperatures(t1, t2)
    tile = dict(_geometry(classes, rows, (logits, (0, logits.stride(0), logits.stride(1)))))
    tile.pop("SINGLE")
    constants = {name: temperature[name] for name in ("KIND", "NEAR", "FAST", "Q", "R", "E")}
    with _on(logits):
        arguments = (
            logits, logits.stride(0), target, state, state.stride(0), rows, first, classes, t1, t2, t2 - 1,
        )  # fmt: skip
        _launch(_class_gradients, _tiles(rows, tile), arguments, constants | tile | _OPTIONS)


def _run(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype | None,
    gradient: Tensor | None,
    g: Tensor | None,
    divisor: Tensor | None = None,
    state: Tensor | None = None,
    key: Any = None,
) -> Tensor:
    t1, t2, axis, label_smoothing, ignore_index, reduction = options
    device, classes = logits.device, logits.shape[axis]
    indices = not target.is_floating_point()
    n = target.numel() if indices else target.numel() // classes
    reduce, mean = reduction != "none", reduction == "mean"
    shape = () if reduce else logits.shape[:axis] + logits.shape[axis + 1 :]
    if n == 0:
        return torch.full(shape, math.nan if mean else 0.0, dtype=dtype, device=device)
    x, outer, inner, strides = _cube(logits, axis)
    into, _, _, into_strides = (x, outer, inner, strides) if gradient is None else _cube(gradient, axis)
    geometry = _geometry(classes, inner, (x, strides), (into, into_strides))
    programs = outer * _tiles(inner, geometry)
    kept = torch.float32 if reduce or dtype is None else dtype
    losses = torch.empty(shape if programs == 1 or not reduce else programs, dtype=kept, device=device)
    weight = None if weight is None else weight.contiguous()
    labels = target.contiguous() if indices else target
    counted = divisor is not None or n > _FEW or not indices or label_smoothing > 0
    count = None
    if mean and counted and divisor is None:
        if not indices:
            divisor = torch.full((), n, dtype=torch.float32, device=device)
        elif n > _MANY:
            divisor, key = target_weights(target, weight, ignore_index, torch.float32).sum(), None
        else:
            divisor = torch.empty((), dtype=torch.float32, device=device)
            constants = {"WEIGHTED": weight is not None, "COUNT": 4096, "num_warps": 8, **_OPTIONS}
            with _on(x):
                targets = labels, weight, divisor, n, classes, ignore_index
                count = _launch(_divisor, 1, targets, constants)
    common = {
        **_temperatures(t1, t2), **geometry, **_CHECKED, "SAME": t1 == t2, "WEIGHTED": weight is not None, "MEAN": mean,
        "REDUCE": reduce, "WITH_LOSS": dtype is not None, "WITH_GRAD": gradient is not None, "SCALED": g is not None,
    }  # fmt: skip
    g_stride = 0 if g is None or reduce else 1
    g = g if g is None or reduce else g.contiguous()
    arguments: tuple[Any, ...]
    with _on(x):
        if indices and not label_smoothing:
            arguments = (
                x, *strides, into, *into_strides, labels, weight, g, g_stride, losses, divisor,
                state, 0 if state is None else state.stride(0), n, inner, classes, ignore_index, t1, t2, t2 - 1,
            )  # fmt: skip
            common |= {"COUNTED": counted, "WITH_STATE": state is not None}
            if _FAST and not geometry["SINGLE"]:
                common["maxnreg"] = _REGISTERS
            found = _launch(_loss, programs, arguments, common)
            if key is not None and found is not None and x is logits and labels is target:
                launch, rest = found
                pattern = losses.new_empty(()).expand(losses.shape)
                pattern.untyped_storage().resize_(0)  # a shape, dtype and device, but no memory of a graph's pool
                _plans.keep(key, (launch, pattern, strides, into_strides, (*arguments[14:], *rest), count))
        else:
            y, y_strides = (labels, (0, 0, 0)) if indices else _cube(target, axis)[::3]
            for name in ("SHIFT", "Q", "R", "E"):
                del common[name]
            arguments = (
                x, *strides, into, *into_strides, y, *y_strides, weight, g, g_stride, losses, divisor,
                inner, classes, ignore_index, label_smoothing, 1e-3 if target.element_size() > 2 else 1e-2,
                t1, t2, t2 - 1,
            )  # fmt: skip
            _launch(_soft_loss, programs, arguments, common | {"T1_IS_ONE": t1 == 1, "INDICES": indices})
    return _finish(losses, reduce, dtype)


def _finish(losses: Tensor, reduce: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:  # nobody asked for it
        return losses
    if reduce and losses.dim():
        losses = losses.sum()
    return losses if dtype == losses.dtype else losses.to(dtype)


def scale_(gradient: Tensor, g: Tensor, axis: int) -> Tensor:
    """Multiply the gradient in place by g, a scalar or one number per row: for nothing where that is 1."""
    if gradient.numel() < _SMALL:
        return gradient.mul_(g.unsqueeze(axis) if g.dim() else g)
    x, outer, inner, strides = _cube(gradient, axis)
    if x.numel():
        tile = dict(_geometry(x.shape[1], inner, (x, strides)))
        tile.pop("SINGLE")
        programs = min(outer * _tiles(inner, tile), 8 * _processors(x.device))
        with _on(x):
            arguments = x, *strides, g.contiguous(), 1 if g.dim() else 0, outer, inner, x.shape[1]
            _launch(_scale, programs, arguments, tile | _OPTIONS)
    return gradient


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def softmax(logits: Tensor, t: float, axis: int, what: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The "probabilities", their "logarithms" or the "partition" lambda_t in `dtype`, and what backward needs."""
    x, outer, inner, strides = _cube(logits, axis)
    shape = logits.shape[:axis] + logits.shape[axis + 1 :] if what == "partition" else logits.shape
    out = torch.empty(shape, dtype=dtype, device=logits.device)
    state = torch.empty((2, outer * inner), dtype=torch.float32, device=logits.device)
    if x.numel():
        into, into_strides = (out, (0, 0, 0)) if what == "partition" else _cube(out, axis)[::3]
        geometry = _geometry(x.shape[1], inner, (x, strides))
        temperature = _temperatures(1.0, t)
        with _on(x):
            arguments = x, *strides, into, *into_strides, out, state, inner, x.shape[1], outer * inner, t, t - 1
            constants = {name: temperature[name] for name in ("KIND", "NEAR", "FAST")} | {"WHAT": _WHAT[what]}
            _launch(_softmax, outer * _tiles(inner, geometry), arguments, constants | geometry | _OPTIONS)
    return out, state


def softmax_backward(g: Tensor, logits: Tensor, state: Tensor, t: float, axis: int, what: str) -> Tensor:
    """The gradient of sum(g * softmax(logits)) in the logits."""
    x, outer, inner, strides = _cube(logits, axis)
    made = _like(logits, axis)
    if x.numel():
        into, _, _, into_strides = _cube(made, axis)
        if what == "partition":
            g, g_strides = g.contiguous(), (inner, 1, 0)
        else:
            g, g_strides = _cube(g, axis)[::3]
        tile = dict(_geometry(x.shape[1], inner, (x, strides), (into, into_strides)))
        tile.pop("SINGLE")
        temperature = _temperatures(1.0, t)
        with _on(x):
            arguments = (
                x, *strides, into, *into_strides, g, *g_strides, state, inner, x.shape[1], outer * inner, t, t - 1,
            )  # fmt: skip
            constants = {"KIND": temperature["KIND"], "FAST": _FAST, "WHAT": _WHAT[what]}
            _launch(_softmax_backward, outer * _tiles(inner, tile), arguments, constants | tile | _OPTIONS)
    return made


_WHAT = {"probabilities": 0, "logarithms": 1, "partition": 2}


@torch.library.custom_op(
    "bitempered::loss",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor? weight, float t1, float t2, int axis, float label_smoothing,"
    " int ignore_index, str reduction, ScalarType dtype) -> Tensor",
)
def loss_operator(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    """`loss` as torch.compile calls it, without looking inside."""
    *values, dtype = options
    return loss(logits, target, weight, LossOptions(*values), dtype)


@torch.library.custom_op(
    "bitempered::loss_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor logits, Tensor target, Tensor? weight, float t1, float t2, int axis,"
    " float label_smoothing, int ignore_index, str reduction) -> Tensor",
)
def gradient_operator(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    return gradient(g, logits, target, weight, LossOptions(*options))


@loss_operator.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    *values, dtype = options
    _, _, axis, _, _, reduction = LossOptions(*values)
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    return logits.new_empty(rows if reduction == "none" else (), dtype=dtype)


@gradient_operator.register_fake
def _(g: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, weight, *values, _ = inputs
    ctx.save_for_backward(logits, target, weight)
    ctx.options = LossOptions(*values)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    none = [None] * (3 + len(ctx.options))  # for the target, the weight, the options and the dtype
    return gradient_operator(g, *ctx.saved_tensors, *ctx.options), *none


loss_operator.register_autograd(_backward, setup_context=_save)
