"""Kernels for the loss of targets that are not one class: class probabilities, or smoothed class indices."""

import triton
import triton.language as tl

from bitempered.kernels.triton.mathematics import LN2, decay_factor, divergence, escort_power, exp, log2, log_ratio
from bitempered.kernels.triton.solver import normalize
from bitempered.kernels.triton.tiles import (
    load,
    program_rows,
    row_starts,
    row_sum,
    row_temperatures,
    spread,
    store,
    store_losses,
    store_state,
    sums,
    tile_columns,
    tile_places,
    wide,
)


@triton.jit
def _weighted(
    base, class_stride, weight_ptr, at, label, label_smoothing, n_classes, row_in,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The target's probabilities of the classes from `at` on, the same smoothed and weighted, and if WEIGHTED the log2
    of those, which may underflow. All are 0 beyond the last class."""
    c = at + tile_columns(COLUMNS, VECTOR)
    real = (c < n_classes)[None, :, :]
    if INDICES:
        y = tl.where(c[None, :, :] == wide(label), 1.0, 0.0)
    else:
        places, kept = tile_places(at, class_stride, n_classes, row_in, COLUMNS, VECTOR)
        y = tl.load(base[:, None, None] + places, mask=kept, other=0.0).to(tl.float32)
    z = tl.where(real, (1.0 - label_smoothing) * y + label_smoothing / n_classes, 0.0)
    log2_z = z
    if WEIGHTED:
        w = tl.load(weight_ptr + c, mask=c < n_classes, other=0.0).to(tl.float32)[None, :, :]
        log2_z = log2(z, FAST) + log2(w, FAST)
        z *= w
    return y, z, log2_z


@triton.jit
def _soft_terms(
    u, m, d, y, log2_share, t1, t2, s, KIND: tl.constexpr, FAST: tl.constexpr, T1_ZERO: tl.constexpr,
    SAME: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The terms of the divergence, v of core's gradient, and r^t2. If WEIGHTED, log2_share is log2 y, also where y has
    underflowed, as in core's log_share."""
    log_r, outside = log_ratio(u, d, s, KIND, FAST)
    log_p = log_r - m
    positive = log2_share > float("-inf") if WEIGHTED else y > 0.0
    log2_y = log2(tl.where(y > 0.0, y, 1.0), FAST)
    if WEIGHTED:
        log2_y = tl.where(positive, tl.where(y < 1e-30, log2_share, log2_y), 0.0)
    terms = divergence(positive, log2_y * LN2, log_p, t1, T1_ZERO)
    v = exp(log_p) - y
    if not SAME:
        apart = s + (1.0 - t1)  # t2 - t1
        power = exp(apart * log_p)
        v *= tl.where(apart == 0.0, 1.0, power) if KIND == 3 else power
    e = exp(t2 * log_r)
    if KIND < 0 or KIND == 3:
        e = tl.where(t2 == 0.0, 1.0, e)
        v, e = tl.where(outside, 0.0, v), tl.where(outside, 0.0, e)
    return terms, v, e


@triton.jit
def _apart(terms, v, e, highest):
    """The sums over a tile of the terms, of v and e without the highest class, of its v, and the number of those; and
    the least and greatest v of those."""
    least, greatest = tl.where(highest, v, float("inf")), tl.where(highest, v, float("-inf"))
    least, greatest = tl.min(tl.min(least, 2), 1), tl.max(tl.max(greatest, 2), 1)
    top, rest = tl.where(highest, v, 0.0), tl.where(highest, 0.0, v)
    e, ties = tl.where(highest, 0.0, e), tl.where(highest, 1.0, 0.0)
    terms, rest, e = tl.sum(terms, 2), tl.sum(rest, 2), tl.sum(e, 2)
    terms, rest, e, top, ties, _, _, _ = sums(terms, rest, e, tl.sum(top, 2), tl.sum(ties, 2), e, e, e, 5)
    return terms, rest, e, top, ties, least, greatest


@triton.jit
def _gradient(v, e, highest, share, rest_pull, rest_mass):
    """v - e sum(v) / sum(e). For a class with most of sum(e) that is a difference of almost equal numbers, which
    `rescale` would magnify. So of the highest class it is v (the rest of sum(e)) - e (the rest of sum(v)), over sum(e),
    and so it is for each of several that are equal, v included.
    """
    return tl.where(highest, v * rest_mass - e * rest_pull, v - e * share)


@triton.jit
def soft_loss_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, target_outer, target_inner, target_class, weight_ptr, g_ptr, g_stride, losses_ptr, divisor_ptr,
    state_ptr, state_stride, n_rows, n_inner, n_classes, ignore_index, label_smoothing, tolerance,
    t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, T1_ZERO: tl.constexpr, SAME: tl.constexpr,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, REDUCE: tl.constexpr,
    WITH_LOSS: tl.constexpr, WITH_GRAD: tl.constexpr, WITH_STATE: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """`loss_kernel` for targets that are not one class: class probabilities, or class indices with label smoothing.

    The state of a row is for `soft_gradient_kernel`.
    """
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    target_base = row_starts(target_ptr, outer, target_outer, inner, target_inner, 1 if INDICES else VECTOR)
    t1, t2, s, stretch, scale = row_temperatures(
        t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride, row, row_in, KIND
    )
    t1_wide, t2_wide, s_wide = spread(t1, KIND), spread(t2, KIND), spread(s, KIND)
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
    if SINGLE:  # then the numbers of the only tile stay in registers
        y, z, log2_z = _weighted(
            target_base, target_class, weight_ptr, 0, label, label_smoothing, n_classes, row_in,
            INDICES, WEIGHTED, FAST, COLUMNS, VECTOR,
        )  # fmt: skip
        total, plain, least = row_sum(z), row_sum(y), tl.min(tl.min(y, 2), 1)
        if WEIGHTED:
            tl.device_assert((y < 0.0) | ((z < 0.0) == 0), "weight must not be negative")
    else:
        for at in tl.range(0, n_classes, COLUMNS):
            y_tile, z_tile, _ = _weighted(
                target_base, target_class, weight_ptr, tl.multiple_of(at, 16), label, label_smoothing, n_classes,
                row_in, INDICES, WEIGHTED, FAST, COLUMNS, VECTOR,
            )  # fmt: skip
            total += row_sum(z_tile)
            plain += row_sum(y_tile)
            least = tl.minimum(least, tl.min(tl.min(y_tile, 2), 1))
            if WEIGHTED:
                tl.device_assert((y_tile < 0.0) | ((z_tile < 0.0) == 0), "weight must not be negative")
    if not INDICES:
        fine = (least >= 0.0) & (tl.abs(plain - 1.0) <= tolerance)
        tl.device_assert(fine | (row_in == 0), "target must hold probabilities in [0, 1] that sum to 1")
    empty = (total == 0.0) | ignored
    top, peak, m, tile = normalize(
        base, class_stride, n_classes, row_in, active & (empty == 0), t2, s, stretch,
        KIND, NEAR, FAST, ROWS, COLUMNS, VECTOR, SINGLE,
    )  # fmt: skip
    d = wide(decay_factor(m, s, stretch, KIND))
    inverse = wide(1.0 / tl.where(empty, 1.0, total))
    log2_total = wide(log2(tl.where(empty, 1.0, total), FAST))
    divisor = 1.0
    if MEAN:
        divisor = tl.load(divisor_ptr).to(tl.float32) if INDICES else n_rows * 1.0

    loss, pull, mass, of_top, ties = nothing, nothing, nothing, nothing, nothing
    least_top, most_top = nothing + float("inf"), nothing - float("inf")
    if SINGLE:
        terms, v, e = _soft_terms(
            wide(top) - tile, wide(m), d, z * inverse, log2_z - log2_total, t1_wide, t2_wide, s_wide,
            KIND, FAST, T1_ZERO, SAME, WEIGHTED,
        )  # fmt: skip
        loss, pull, mass, of_top, ties, least_top, most_top = _apart(terms, v, e, tile == wide(peak))
    else:
        for at in tl.range(0, n_classes, COLUMNS):
            at = tl.multiple_of(at, 16)
            a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR).to(tl.float32)
            _, z_tile, log2_tile = _weighted(
                target_base, target_class, weight_ptr, at, label, label_smoothing, n_classes, row_in,
                INDICES, WEIGHTED, FAST, COLUMNS, VECTOR,
            )  # fmt: skip
            terms_tile, v_tile, e_tile = _soft_terms(
                wide(top) - a, wide(m), d, z_tile * inverse, log2_tile - log2_total, t1_wide, t2_wide, s_wide,
                KIND, FAST, T1_ZERO, SAME, WEIGHTED,
            )  # fmt: skip
            x0, x1, x2, x3, x4, lower, upper = _apart(terms_tile, v_tile, e_tile, a == wide(peak))
            loss, pull, mass, of_top, ties = loss + x0, pull + x1, mass + x2, of_top + x3, ties + x4
            least_top, most_top = tl.minimum(least_top, lower), tl.maximum(most_top, upper)
    if WITH_LOSS:
        loss = tl.where(empty, 0.0, total * scale * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(ignored | known, loss, float("nan"))
        store_losses(losses_ptr, row, row_in, loss, divisor, REDUCE, MEAN)
    factor = total * (scale * stretch)
    if MEAN:
        factor = tl.where(divisor == 0.0, 0.0, factor / divisor)
    factor = tl.where(empty, 0.0, factor)
    e_top, _ = escort_power(top - peak, decay_factor(m, s, stretch, KIND), t2, s, KIND, FAST)
    whole = mass + ties * e_top
    share, pull, mass = (pull + of_top) / whole, pull / whole, mass / whole
    peak = tl.where(least_top == most_top, peak, float("inf"))  # where v differs, as at a label, nothing cancels
    if WITH_STATE:
        store_state(state_ptr, state_stride, row, row_in, top, m, total, factor, share, pull, mass, peak)
    if WITH_GRAD:
        if SCALED:
            factor *= tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
        grad_base = row_starts(grad_ptr, outer, grad_outer, inner, grad_inner, VECTOR)
        if SINGLE:
            grad = wide(factor) * _gradient(v, e, tile == wide(peak), wide(share), wide(pull), wide(mass))
            grad = tl.where(wide(factor == 0.0), 0.0, grad)
            store(grad_base, grad_class, 0, n_classes, row_in, grad, COLUMNS, VECTOR)
        else:
            _store_gradient(
                base, class_stride, grad_base, grad_class, target_base, target_class, weight_ptr, label,
                label_smoothing, n_classes, row_in, top, peak, m, d, total, factor, share, pull, mass,
                t1_wide, t2_wide, s_wide,
                KIND, FAST, T1_ZERO, SAME, INDICES, WEIGHTED, COLUMNS, VECTOR,
            )  # fmt: skip


@triton.jit
def _store_gradient(
    base, class_stride, grad_base, grad_class, target_base, target_class, weight_ptr, label, label_smoothing,
    n_classes, row_in, top, peak, m, d, total, factor, share, pull, mass, t1, t2, s,
    KIND: tl.constexpr, FAST: tl.constexpr, T1_ZERO: tl.constexpr, SAME: tl.constexpr,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    counts = wide(factor != 0.0)
    inverse = wide(1.0 / tl.where(factor == 0.0, 1.0, total))
    for at in tl.range(0, n_classes, COLUMNS):
        at = tl.multiple_of(at, 16)
        a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR).to(tl.float32)
        _, z, log2_z = _weighted(
            target_base, target_class, weight_ptr, at, label, label_smoothing, n_classes, row_in,
            INDICES, WEIGHTED, FAST, COLUMNS, VECTOR,
        )  # fmt: skip
        _, v, e = _soft_terms(
            wide(top) - a, wide(m), d, z * inverse, log2_z, t1, t2, s, KIND, FAST, T1_ZERO, SAME, WEIGHTED
        )
        grad = _gradient(v, e, a == wide(peak), wide(share), wide(pull), wide(mass))
        grad = tl.where(counts, wide(factor) * grad, 0.0)
        store(grad_base, grad_class, at, n_classes, row_in, grad, COLUMNS, VECTOR)


@triton.jit
def soft_gradient_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, target_outer, target_inner, target_class, weight_ptr, g_ptr, g_stride, state_ptr, state_stride,
    n_inner, n_classes, label_smoothing, t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride,
    KIND: tl.constexpr, FAST: tl.constexpr, T1_ZERO: tl.constexpr, SAME: tl.constexpr,
    INDICES: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The gradient of `soft_loss_kernel`, times g, from its state."""
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    grad_base = row_starts(grad_ptr, outer, grad_outer, inner, grad_inner, VECTOR)
    target_base = row_starts(target_ptr, outer, target_outer, inner, target_inner, 1 if INDICES else VECTOR)
    t1, t2, s, stretch, scale = row_temperatures(
        t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride, row, row_in, KIND
    )
    label = tl.full((ROWS,), -1, tl.int32)
    if INDICES:
        label = tl.load(target_ptr + row, mask=row_in, other=-1).to(tl.int32)
    state = state_ptr + row
    top, m = tl.load(state, mask=row_in, other=0.0), tl.load(state + state_stride, mask=row_in, other=0.0)
    total = tl.load(state + 2 * state_stride, mask=row_in, other=0.0)
    g = tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
    factor = g * tl.load(state + 3 * state_stride, mask=row_in, other=0.0)
    share = tl.load(state + 4 * state_stride, mask=row_in, other=0.0)
    pull = tl.load(state + 5 * state_stride, mask=row_in, other=0.0)
    mass = tl.load(state + 6 * state_stride, mask=row_in, other=0.0)
    peak = tl.load(state + 7 * state_stride, mask=row_in, other=0.0)
    _store_gradient(
        base, class_stride, grad_base, grad_class, target_base, target_class, weight_ptr, label,
        label_smoothing, n_classes, row_in, top, peak, m, wide(decay_factor(m, s, stretch, KIND)),
        total, factor, share, pull, mass, spread(t1, KIND), spread(t2, KIND), spread(s, KIND),
        KIND, FAST, T1_ZERO, SAME, INDICES, WEIGHTED, COLUMNS, VECTOR,
    )  # fmt: skip
