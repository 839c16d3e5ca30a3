"""The kernel for the loss of targets that are not one class: class probabilities, or smoothed class indices."""

import triton
import triton.language as tl

from bitempered.kernels.triton.mathematics import LN2, decay_factor, exp, log2, log_ratio, phi
from bitempered.kernels.triton.solver import normalize
from bitempered.kernels.triton.tiles import load, program_rows, row_sum, store, store_losses, tile_columns, wide


@triton.jit
def _weighted(
    base, class_stride, weight_ptr, c, label, label_smoothing, n_classes, row_in,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The target's probabilities of classes c, the same smoothed and weighted, and if WEIGHTED the log2 of those, which
    may underflow. All are 0 beyond the last class."""
    real = (c < n_classes)[None, :, :]
    if INDICES:
        y = tl.where(c[None, :, :] == wide(label), 1.0, 0.0)
    else:
        at = base[:, None, None] + (c.to(tl.int64) * class_stride)[None, :, :]
        y = tl.load(at, mask=real & wide(row_in), other=0.0).to(tl.float32)
    z = tl.where(real, (1.0 - label_smoothing) * y + label_smoothing / n_classes, 0.0)
    log2_z = z
    if WEIGHTED:
        w = tl.load(weight_ptr + c, mask=c < n_classes, other=0.0).to(tl.float32)[None, :, :]
        log2_z = log2(z, FAST) + log2(w, FAST)
        z *= w
    return y, z, log2_z


@triton.jit
def _soft_terms(
    u, m, y, log2_share, t1, t2, s,
    KIND: tl.constexpr, FAST: tl.constexpr, T1_IS_ONE: tl.constexpr, SAME: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The terms of the divergence, v of core's gradient, and r^t2. If WEIGHTED, log2_share is log2 y, also where y has
    underflowed, as in core's log_share."""
    log_r, outside = log_ratio(u, decay_factor(m, s, KIND), s, KIND, FAST)
    log_p = log_r - m
    positive = log2_share > float("-inf") if WEIGHTED else y > 0.0
    log2_y = log2(tl.where(y > 0.0, y, 1.0), FAST)
    if WEIGHTED:
        log2_y = tl.where(positive, tl.where(y < 1e-30, log2_share, log2_y), 0.0)
    log_y = log2_y * LN2
    gap = log_y - log_p
    above, below = tl.where(gap < 0.0, 0.0, gap), tl.where(gap < 0.0, gap, 0.0)
    p_power = exp((2.0 - t1) * log_p)
    smaller, size = tl.minimum(1.0, 2.0 - t1), tl.abs(1.0 - t1)
    y_power = tl.maximum(exp((2.0 - t1) * log_y), 1e-37)  # times infinity it is not NaN
    present = y_power * (phi(above, t1 - 1.0, T1_IS_ONE) - phi(above, t1 - 2.0, False))
    present += p_power * (exp(smaller * below) * phi(below, size, T1_IS_ONE) - phi(below, 2.0 - t1, False))
    v = exp(log_p) - y
    if not SAME:
        v *= exp((s + (1.0 - t1)) * log_p)
    e = exp(t2 * log_r)
    if KIND < 0:
        e = tl.where(t2 == 0.0, 1.0, e)
        v, e = tl.where(outside, 0.0, v), tl.where(outside, 0.0, e)
    return tl.where(positive, present, p_power / (2.0 - t1)), v, e


@triton.jit
def soft_loss_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, target_outer, target_inner, target_class, weight_ptr, g_ptr, g_stride, losses_ptr, divisor_ptr,
    n_inner, n_classes, ignore_index, label_smoothing, tolerance, t1, t2, s,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, T1_IS_ONE: tl.constexpr, SAME: tl.constexpr,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, REDUCE: tl.constexpr,
    WITH_LOSS: tl.constexpr, WITH_GRAD: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`loss_kernel` for targets that are not one class: class probabilities, or class indices with label smoothing."""
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = logits_ptr + outer * outer_stride + inner * inner_stride
    target_base = target_ptr + outer * target_outer + inner * target_inner
    columns = tile_columns(COLUMNS, VECTOR)
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
        total += row_sum(z)
        plain += row_sum(y)
        least = tl.minimum(least, tl.min(tl.min(y, 2), 1))
        if WEIGHTED:
            tl.device_assert((y < 0.0) | ((z < 0.0) == 0), "weight must not be negative")
    if not INDICES:
        fine = (least >= 0.0) & (tl.abs(plain - 1.0) <= tolerance)
        tl.device_assert(fine | (row_in == 0), "target must hold probabilities in [0, 1] that sum to 1")
    empty = (total == 0.0) | ignored
    top, m, tile = normalize(
        base, class_stride, n_classes, row_in, active & (empty == 0), t2, s,
        KIND, NEAR, FAST, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    inverse = 1.0 / tl.where(empty, 1.0, total)
    log2_total = wide(log2(tl.where(empty, 1.0, total), FAST))
    divisor = tl.load(divisor_ptr).to(tl.float32) if MEAN else 1.0

    loss, pull, mass = nothing, nothing, nothing
    for at in tl.range(0, n_classes, COLUMNS):
        c = at + columns
        a = tile if SINGLE else load(base, class_stride, c, n_classes, row_in).to(tl.float32)
        _, z, log2_z = _weighted(
            target_base, target_class, weight_ptr, c, label, label_smoothing, n_classes, row_in, INDICES, WEIGHTED, FAST
        )
        terms, v, e = _soft_terms(
            wide(top) - a, wide(m), z * wide(inverse), log2_z - log2_total, t1, t2, s,
            KIND, FAST, T1_IS_ONE, SAME, WEIGHTED,
        )  # fmt: skip
        loss += row_sum(terms)
        pull += row_sum(v)
        mass += row_sum(e)
    if WITH_LOSS:
        loss = tl.where(empty, 0.0, total * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(ignored | known, loss, float("nan"))
        store_losses(losses_ptr, row, row_in, loss, divisor, REDUCE, MEAN)
    if WITH_GRAD:
        factor = tl.where(divisor == 0.0, 0.0, total / divisor) if MEAN else total
        if SCALED:
            factor *= tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
        zero = empty | (factor == 0.0)
        grad_base = grad_ptr + outer * grad_outer + inner * grad_inner
        for at in tl.range(0, n_classes, COLUMNS):
            c = at + columns
            a = tile if SINGLE else load(base, class_stride, c, n_classes, row_in).to(tl.float32)
            _, z, log2_z = _weighted(
                target_base, target_class, weight_ptr, c, label, label_smoothing, n_classes, row_in, INDICES, WEIGHTED,
                FAST,
            )  # fmt: skip
            _, v, e = _soft_terms(
                wide(top) - a, wide(m), z * wide(inverse), log2_z - log2_total, t1, t2, s,
                KIND, FAST, T1_IS_ONE, SAME, WEIGHTED,
            )  # fmt: skip
            grad = tl.where(wide(zero), 0.0, wide(factor) * (v - e * wide(pull / mass)))
            store(grad_base, grad_class, c, n_classes, row_in, grad)
