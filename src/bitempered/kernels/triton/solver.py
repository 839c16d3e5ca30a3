"""The normaliser m of each row, in few passes over it.

With d = e^(-s m), x_i = 1 + s u_i d and q_i = 1 / x_i, a change of m moves every probability by a power of a linear
function,

    p_i(m + delta) = p_i(m) (1 + s z q_i)^(-1/s),      z = phi_s(delta),

so one pass over a row, summing r_i q_i^k for k = 0..3, gives its mass as a function of delta. That is enough for a step
of third order and, where the step is small, for every sum of the loss and its gradient at m + delta. A chunk from the
middle of a long row gives the start. So most rows are read twice: for the sums, and to write the gradient. A row of few
classes belongs to one thread, in tiles of one column: it is read once for its maximum, and then from the cache.

The label is kept out of the sums and computed on its own, and so is the largest class, except in the first pass over a
long row. So 1 - p is a sum of other probabilities, never a difference, and a small gradient keeps its digits.
"""

import triton
import triton.language as tl

from bitempered.kernels.triton.mathematics import (
    LN2,
    decay_factor,
    decayed,
    exp,
    log2,
    named_sums,
    phi,
    psi,
    reciprocal,
    summands,
)
from bitempered.kernels.triton.tiles import any_row, lane_of, load, row_sum, spread, sums, tile_columns, wide

LIMIT = tl.constexpr(24)  # on the passes over a row, whatever its logits


@triton.jit
def _step(m, s0, s1, s2, s3, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """The change of m that brings the mass to 1, and the variance of q.

    Newton on the power -s of the mass, as in core. Above t = 1 the next two terms of its series in z are added. Their
    coefficients are -(1+s)/2 times the variance of q for z^2, and (1+s)/6 ((1+2s) k + 3 s times its mean times its
    variance) for z^3, with k the third cumulant of q.
    """
    log_z = log2(s0, FAST) * LN2 - m
    if KIND == 0:
        return log_z, m
    ratio, variance = s0 * reciprocal(s1, FAST), m
    if KIND > 0:
        inverse = reciprocal(s0, FAST)
        mean = s1 * inverse
        square = mean * mean
        variance = tl.maximum(s2 * inverse - square, 0.0)
        cumulant = s3 * inverse - mean * (3.0 * variance + square)
        newton = tl.minimum(phi(log_z, s, False), 1e12) * ratio
        second = -0.5 * (1.0 + s) * variance * newton * ratio
        third = (1.0 + s) / 6.0 * ((1.0 + 2.0 * s) * cumulant + 3.0 * s * mean * variance) * newton * newton * ratio
        small = (tl.abs(second) < 0.25) & (tl.abs(third) < 0.25)
        over = 1.0 + tl.where(small, second + third - second * second, tl.minimum(tl.maximum(second, -0.5), 1.0))
        ratio /= tl.where(s > 0.0, over, 1.0) if KIND == 3 else over
    change = (ratio - 1.0) * phi(log_z, -s, False)
    if KIND > 0:
        least = tl.maximum(change, -0.9 / s)  # from above the root, where the step would leave the domain
        change = tl.where(s > 0.0, least, change) if KIND == 3 else least
    return log_z + psi(change, s, False, FAST), variance


@triton.jit
def moved(w0, w1, w2, b, z, delta, s, KIND: tl.constexpr, FAST: tl.constexpr):
    """A sum of b-th powers of r at m + delta, from that sum at m and those with one and two more factors q."""
    if KIND <= 0:  # at t = 1 r does not depend on m, and below the last step is rounding
        return w0
    inverse = reciprocal(tl.maximum(w0, 1e-30), FAST)
    mean = w1 * inverse
    step = z * reciprocal(1.0 + s * z * mean, FAST)
    variance = w2 * inverse - mean * mean
    power = exp(b * (delta - psi(z * mean, s, False, FAST)))
    there = w0 * power * (1.0 + 0.5 * b * (b + s) * step * step * variance)
    return tl.where(s > 0.0, there, w0) if KIND == 3 else there


@triton.jit
def solve(
    base, class_stride, n_classes, row_in, active, label, label_logit, t1, t2, s, stretch,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr = 0,
):  # fmt: skip
    """Solve each row. Returns, per row:

    - `top`, a point of reference near its maximum, which is `peak`; m relative to `top`, and the last step of m;
    - whether the classes at `top` are left out of the sums, and their number;
    - the sums before that step, over all classes except those and the label;
    - the logits themselves if the row is SINGLE, that is, one tile.
    """
    TERMS: tl.constexpr = (2 - (SHIFT == 0)) * (1 if KIND == 0 else 2 if KIND < 0 else 4) if SHIFT < 1 else 5
    columns = tile_columns(COLUMNS, VECTOR)
    FEW: tl.constexpr = COLUMNS == 1
    scale = 1.0
    if FEW:
        top, count, total = label_logit, label_logit * 0.0, label_logit * 0.0
        for at in tl.range(0, n_classes):
            a = row_sum(load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR, True, BLOCK).to(tl.float32))
            masked = a == float("-inf")
            top = tl.maximum(top, a)
            count, total = tl.where(masked, count, count + 1.0), tl.where(masked, total, total + a)
        tile, mean = wide(top), top - total / count
    else:
        first = tl.multiple_of((n_classes // COLUMNS // 2) * COLUMNS, 16)
        tile = load(base, class_stride, first, n_classes, row_in, COLUMNS, VECTOR, True, BLOCK).to(tl.float32)
        top = tl.maximum(tl.max(tl.max(tile, 2), 1), label_logit)
        u = wide(top) - tile
        masked = u == float("inf")
        count, mean = tl.sum(tl.where(masked, 0.0, 1.0), 2), tl.sum(tl.where(masked, 0.0, u), 2)
        count, mean, _, _, _, _, _, _ = sums(count, mean, mean, mean, mean, mean, mean, mean, 2)
        mean /= count
        if not SINGLE:
            scale = n_classes / COLUMNS
    log_count = log2(count * scale, FAST) * LN2
    v = mean * stretch * exp(-s * log_count)
    defined = (s * v < 1.0) & (v >= 0.0)
    bound = log_count - psi(tl.where(defined, v, 0.0), -s, KIND == 0, FAST)
    m = tl.where(defined & (bound > 0.0), bound, 0.0)

    t1_wide, t2_wide, s_wide = spread(t1, KIND), spread(t2, KIND), spread(s, KIND)
    peak, ties, delta, b0, b1, b2, b3, b4, b5, b6, b7 = top, m * 0.0, m, m, m, m, m, m, m, m, m
    # The relative error of `moved` is this times the third power of z and the third cumulant of q.
    b = tl.maximum(tl.maximum(t2, 2.0 - t1), 1.0 + t2 - t1)
    remainder = b * (b + s) * (b + 2.0 * s)
    if SINGLE:
        others, at_top = columns[None, :, :] != wide(label), tile == wide(top)
        ties = row_sum(tl.where(others & at_top, 1.0, 0.0))
        u = wide(top) - tl.where(others & (at_top == 0), tile, float("-inf"))
    passes = 2 if FEW else 0  # `top` is the maximum already
    settled = active & (active == 0)
    todo = any_row(active)
    while todo:
        d = decay_factor(m, s, stretch, KIND)
        if SINGLE:
            a0, a1, a2, a3, a4, a5, a6, a7 = summands(
                u, wide(d), t1_wide, t2_wide, s_wide, KIND, NEAR, FAST, SHIFT, Q, R, E
            )
            a0, a1, a2, a3 = tl.sum(a0, 2), tl.sum(a1, 2), tl.sum(a2, 2), tl.sum(a3, 2)
            a4, a5, a6, a7 = tl.sum(a4, 2), tl.sum(a5, 2), tl.sum(a6, 2), tl.sum(a7, 2)
            b0, b1, b2, b3, b4, b5, b6, b7 = sums(a0, a1, a2, a3, a4, a5, a6, a7, TERMS)
        else:
            sampling, peel = passes == 0, passes > 1
            zero = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
            a0, a1, a2, a3, a4, a5, a6, a7, tied = zero, zero, zero, zero, zero, zero, zero, zero, zero
            highest = zero + float("-inf")
            start, stop = 0, n_classes
            if not FEW:
                start, stop = tl.where(sampling, first, 0), tl.where(sampling, first + COLUMNS, n_classes)
                start = tl.multiple_of(start, 16)
            coming = load(base, class_stride, start, n_classes, row_in, COLUMNS, VECTOR, True, BLOCK)
            for at in tl.range(start, stop, COLUMNS):
                at = at if FEW else tl.multiple_of(at, 16)
                a = coming.to(tl.float32)
                end = tl.minimum(stop, n_classes)
                coming = load(base, class_stride, at + COLUMNS, end, row_in, COLUMNS, VECTOR, True, BLOCK)
                highest = tl.maximum(highest, tl.max(a, 2))
                if FEW:
                    a = tl.where(wide(label) == at, float("-inf"), a)
                elif any_row((label >= at) & (label < at + COLUMNS)):
                    a = tl.where((at + columns)[None, :, :] == wide(label), float("-inf"), a)
                if peel:
                    at_top = a == wide(top)
                    tied += tl.sum(tl.where(at_top, 1.0, 0.0), 2)
                    a = tl.where(at_top, float("-inf"), a)
                x0, x1, x2, x3, x4, x5, x6, x7 = zero, zero, zero, zero, zero, zero, zero, zero
                for lane in tl.static_range(VECTOR):  # one after the other, each by multiplying and adding at once
                    y0, y1, y2, y3, y4, y5, y6, y7 = summands(
                        top[:, None] - lane_of(a, lane, VECTOR), d[:, None], t1[:, None] if KIND == 3 else t1,
                        t2[:, None] if KIND == 3 else t2, s[:, None] if KIND == 3 else s,
                        KIND, NEAR, FAST, SHIFT, Q, R, E,
                    )  # fmt: skip
                    x0, x1, x2, x3 = x0 + y0, x1 + y1, x2 + y2, x3 + y3
                    x4, x5, x6, x7 = x4 + y4, x5 + y5, x6 + y6, x7 + y7
                a0, a1, a2, a3 = a0 + x0, a1 + x1, a2 + x2, a3 + x3
                a4, a5, a6, a7 = a4 + x4, a5 + x5, a6 + x6, a7 + x7
            b0, b1, b2, b3, b4, b5, b6, b7 = sums(a0, a1, a2, a3, a4, a5, a6, a7, TERMS)
            if peel:
                ties = tl.sum(tied, 1)
            if sampling:
                b0, b1, b2, b3 = b0 * scale, b1 * scale, b2 * scale, b3 * scale
        y0, y1, y2, y3, y4, y5, y6, y7 = summands(top - label_logit, d, t1, t2, s, KIND, NEAR, FAST, SHIFT, Q, R, E)
        S0, S1, S2, S3, T0, T1, T2, T3 = named_sums(
            b0 + y0 + ties, b1 + y1 + ties, b2 + y2 + ties, b3 + y3 + ties,
            b4 + y4 + ties, b5 + y5 + ties, b6 + y6 + ties, b7 + y7 + ties, KIND, SHIFT,
        )  # fmt: skip
        delta, variance = _step(m, S0, S1, S2, S3, s, KIND, FAST)
        if KIND > 0:
            z = tl.abs(phi(delta, s, False))
            error = remainder * z * z * z * variance
            # Where q hardly varies a step of any size is exact, except for the rounding of q. The step multiplies that,
            # downwards by as much as e^(-s delta).
            error = tl.where((tl.abs(delta) > 1.0) | (s * delta < -1.0), 1.0, error)
            if KIND == 3:
                error = tl.where(s > 0.0, error, tl.where(s < 0.0, tl.abs(delta), 0.0))
        elif KIND < 0:
            error = tl.abs(delta)
        else:
            error = delta * 0.0
        done = error <= 3e-6
        if SINGLE or FEW:
            if KIND < 0:  # twice, so that the sums are taken next to the root
                settled, done = done, done & settled
            elif KIND == 3:
                settled, done = done, done & (settled | (s >= 0.0))
        if SINGLE:
            done |= (S0 != S0) | (passes == LIMIT)
            better = tl.maximum(m + delta, 0.0)
            todo = any_row(active & (done == 0))
            m = tl.where(todo, better, m)
        elif sampling:
            m = tl.where(m + delta > 0.0, m + delta, 0.0)
        else:
            # The maximum is above the point of reference by `excess`. Relative to it m is smaller.
            peak = tl.maximum(tl.maximum(tl.max(highest, 1), label_logit), top)
            excess = peak - top
            valid = (decayed(excess, d, KIND) <= 8.0) & (tl.abs(s) * decayed(excess, d, KIND) <= 0.5)
            better = tl.where(valid, m + delta, m)
            shift = decayed(excess, decay_factor(better, s, stretch, KIND), KIND)
            below = s * shift < 0.9
            better += psi(-tl.where(below, shift, 0.0), s, KIND == 0, FAST)
            better = tl.where(below & (better > 0.0), better, 0.0)
            # If a class has most of the mass, another pass leaves it out, unless it is the label. Below t2 = 1 a label
            # with most of the mass gets that pass too, for sums taken nearer to the root.
            whole = (better > 0.1) | peel
            if KIND == 3:
                whole |= (label_logit >= peak) & (s >= 0.0)
            elif KIND >= 0:
                whole |= label_logit >= peak
            done = (done & valid & whole) | ((S0 != S0) & peel) | (passes == LIMIT)
            todo = any_row(active & (done == 0))
            top, m = tl.where(todo, peak, top), tl.where(todo, better, m)
        passes += 1
    S0, S1, S2, S3, T0, T1, T2, T3 = named_sums(b0, b1, b2, b3, b4, b5, b6, b7, KIND, SHIFT)
    m += top - top  # an infinite maximum has no answer
    return top, peak, m, delta, (passes > 2) | SINGLE, ties, S0, S1, S2, S3, T0, T1, T2, T3, tile


@triton.jit
def normalize(
    base, class_stride, n_classes, row_in, active, t, s, stretch,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`solve` without a label: the point of reference, the maximum, m, and the logits of a SINGLE row."""
    nowhere, nothing = tl.full((ROWS,), -1, tl.int32), tl.full((ROWS,), float("-inf"), tl.float32)
    # Only the sums of r q^k count: t1 = 1 has no others.
    top, peak, m, delta, _, _, _, _, _, _, _, _, _, _, tile = solve(
        base, class_stride, n_classes, row_in, active, nowhere, nothing, t * 0.0 + 1.0 if KIND == 3 else 1.0, t, s,
        stretch, KIND, NEAR, FAST, 0, 0, 0, 0, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    return top, peak, m + delta, tile
