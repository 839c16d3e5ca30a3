"""Kernels for the loss of class indices without label smoothing."""

import triton
import triton.language as tl

from bitempered.kernels.triton.mathematics import (
    decay_factor,
    exp,
    gradient_terms,
    grown,
    log_ratio,
    nearby_terms,
    phi,
)
from bitempered.kernels.triton.solver import moved, solve
from bitempered.kernels.triton.tiles import (
    any_row,
    class_places,
    load,
    program_rows,
    row_starts,
    row_sum,
    row_temperatures,
    spread,
    store,
    store_losses,
    store_state,
    tile_columns,
    wide,
)


@triton.jit
def _count(
    target_ptr, weight_ptr, n_rows, n_classes, ignore_index, first, step, WEIGHTED: tl.constexpr, COUNT: tl.constexpr
):
    """The sum of the weights of all targets, read COUNT at a time, from `first` on in steps of `step`."""
    total = tl.zeros((COUNT,), tl.float32)
    for at in tl.range(first, n_rows, step):
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
def divisor_kernel(
    target_ptr, weight_ptr, divisor_ptr, n_rows, n_classes, ignore_index, WEIGHTED: tl.constexpr, COUNT: tl.constexpr
):
    """The sum of the weights of all targets, a part of it in each program."""
    i = tl.program_id(0)
    step = tl.num_programs(0) * COUNT
    total = _count(target_ptr, weight_ptr, n_rows, n_classes, ignore_index, i * COUNT, step, WEIGHTED, COUNT)
    tl.store(divisor_ptr + i, total)


@triton.jit
def loss_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, weight_ptr, g_ptr, g_stride, losses_ptr, divisor_ptr, state_ptr, state_stride,
    n_rows, n_inner, n_classes, ignore_index, t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr, SAME: tl.constexpr,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, REDUCE: tl.constexpr, WITH_LOSS: tl.constexpr, WITH_GRAD: tl.constexpr,
    SCALED: tl.constexpr, COUNTED: tl.constexpr, WITH_STATE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The loss of class indices, per row or summed over the rows of a program, and its gradient.

    Both are weighted and, for a MEAN, divided by the divisor. A SCALED gradient is also multiplied by g. The gradient
    may overwrite the logits. The state of a row is for `label_gradient_kernel`. With BLOCK, rows lie in blocks of so
    many classes (see `class_places`).
    """
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    t1, t2, s, stretch, scale = row_temperatures(
        t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride, row, row_in, KIND
    )
    label = tl.load(target_ptr + row, mask=row_in, other=0).to(tl.int64)
    ignored = label == ignore_index
    known = (label >= 0) & (label < n_classes)
    tl.device_assert(ignored | known | (row_in == 0), "target must hold class indices or ignore_index")
    active = row_in & known & (ignored == 0)
    label_at = class_places(label, class_stride, BLOCK)
    label_logit = tl.load(base + label_at, mask=active, other=float("-inf")).to(tl.float32)
    factor = tl.where(ignored, 0.0, 1.0)
    if WEIGHTED:
        factor = tl.load(weight_ptr + label, mask=active, other=0.0).to(tl.float32)
        tl.device_assert((factor < 0.0) == 0, "weight must not be negative")
    label = tl.where(active, label, -1).to(tl.int32)
    top, peak, m, delta, peeled, ties, S0, S1, S2, S3, T0, T1, T2, T3, tile = solve(
        base, class_stride, n_classes, row_in, active & (factor != 0.0), label, label_logit, t1, t2, s, stretch,
        KIND, NEAR, FAST, SHIFT, Q, R, E, ROWS, COLUMNS, VECTOR, SINGLE, BLOCK,
    )  # fmt: skip
    z = phi(delta, s, KIND == 0)
    m += delta
    d = decay_factor(m, s, stretch, KIND)
    log_r, outside = log_ratio(top - label_logit, d, s, KIND, False)  # of the label, so not fast but exact
    log_p = log_r - m
    divisor = 1.0
    if MEAN:
        if COUNTED:
            divisor = tl.load(divisor_ptr).to(tl.float32)
        else:
            divisor = _count(target_ptr, weight_ptr, n_rows, n_classes, ignore_index, 0, 256, WEIGHTED, 256)

    if WITH_LOSS:
        others = exp((t1 - 2.0) * m) * (moved(T0, T1, T2, 2.0 - t1, z, delta, s, KIND, FAST) + ties)
        linear: tl.constexpr = SAME and KIND > 0  # then -log_t1 p is linear in the logits
        if linear:
            first = stretch * (top - label_logit) + phi(m, s, False)
        else:
            first = phi(-log_p, t1 - 1.0, 1 if SHIFT == 0 else 2 if KIND == 3 else 0)
        loss = first - phi(-log_p, t1 - 2.0, False) + others / (2.0 - t1)
        loss = tl.where(factor == 0.0, 0.0, factor * scale * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(ignored | known, loss, float("nan"))
        store_losses(losses_ptr, row, row_in, loss, divisor, REDUCE, MEAN)

    if WITH_GRAD or WITH_STATE:
        factor *= scale * stretch
        if MEAN:
            factor = tl.where(divisor == 0.0, 0.0, factor / divisor)  # the gradient of a mean of nothing is 0
        if SCALED:
            factor *= tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
        zero = ignored | (factor == 0.0)
        power = exp((t1 - 1.0 - t2) * m)
        rest_t2 = moved(S1, S2, S3, t2, z, delta, s, KIND, FAST)
        rest_both = moved(T1, T2, T3, 1.0 + t2 - t1, z, delta, s, KIND, FAST)
        not_label = exp(-m) * (moved(S0, S1, S2, 1.0, z, delta, s, KIND, FAST) + ties)  # 1 - p of the label
        label_t2 = exp(grown(log_r, s, NEAR))
        if KIND < 0 or KIND == 3:
            label_t2 = tl.where(outside, 0.0, tl.where(t2 == 0.0, 1.0, label_t2))
        if SAME:
            pull = tl.where(outside, 0.0, not_label)
        else:
            gap = s + (1.0 - t1)  # t2 - t1
            pull = exp(gap * log_p) * not_label
            if KIND == 3:
                pull = tl.where(gap == 0.0, tl.where(outside, 0.0, not_label), pull)
        push = power * (rest_both + ties)
        share = factor / (rest_t2 + ties + label_t2)
        of_label = tl.where(zero, 0.0, -share * (pull * (rest_t2 + ties) + label_t2 * push))
        of_top = tl.where(zero, 0.0, share * (power * (rest_t2 + label_t2 - rest_both) + pull))
        c1, c2 = factor * power, share * (pull - push)
        columns = tile_columns(COLUMNS, VECTOR)
        # Two classes that are almost equal may share the mass of a wrong row. Then their gradients are what is left of
        # terms as large as c1. So sum r^t2 (1 - r^(1-t1)) rather than subtract sums, in the few rows that need it. Of
        # many classes two are hardly ever so close.
        FEW: tl.constexpr = COLUMNS == 1 or (SINGLE and COLUMNS <= 32)
        CLOSE: tl.constexpr = (FEW and (KIND >= 0 and KIND < 3)) and (SHIFT == -1 or SHIFT == 1)
        close = zero
        if CLOSE:
            close = (rest_t2 > 0.3) & (tl.abs(of_top) < 0.05 * tl.abs(c1)) & (zero == 0)
            if any_row(close):
                off = rest_t2 * 0.0
                for at in tl.range(0, n_classes, COLUMNS):
                    a = tile
                    if not SINGLE:
                        a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR, True).to(tl.float32)
                    escort, lost = nearby_terms(wide(top) - a, wide(d), t1, s, KIND)
                    own = ((at + columns)[None, :, :] == wide(label)) | (a == wide(top))
                    off += row_sum(tl.where(own, 0.0, escort * lost))
                of_top = tl.where(close, share * (power * (off + label_t2) + pull), of_top)

    if WITH_GRAD:
        label_grad, top_grad = wide(of_label), wide(of_top)
        t1_wide, t2_wide, s_wide = spread(t1, KIND), spread(t2, KIND), spread(s, KIND)
        grad_base = row_starts(grad_ptr, outer, grad_outer, inner, grad_inner, VECTOR)
        # Backwards, since the end of a long row was read last and is still in the cache.
        last = tl.multiple_of((n_classes - 1) // COLUMNS * COLUMNS, 16)
        begin = 0
        if not (SINGLE or COLUMNS == 1):
            begin = tl.where(peeled | any_row(zero), 0, last + COLUMNS)
            coming = load(base, class_stride, last, n_classes, row_in, COLUMNS, VECTOR, BLOCK=BLOCK)
            for back in tl.range(0, begin, COLUMNS):
                a = coming.to(tl.float32)
                ahead = tl.multiple_of(tl.maximum(last - back - COLUMNS, 0), 16)
                coming = load(base, class_stride, ahead, n_classes, row_in, COLUMNS, VECTOR, BLOCK=BLOCK)
                grad = gradient_terms(
                    wide(top) - a, wide(d), wide(c1), wide(c2), t1_wide, t2_wide, s_wide, KIND, NEAR, FAST, Q, R, E
                )
                at = tl.multiple_of(last - back, 16)
                store(grad_base, grad_class, at, n_classes, row_in, grad, COLUMNS, VECTOR, BLOCK)
            if begin > 0:
                tl.debug_barrier()
                at = class_places(label, grad_class, BLOCK)
                tl.store(grad_base + at, of_label.to(grad_ptr.dtype.element_ty), mask=active)
    if WITH_STATE:
        at_top = tl.full((ROWS, COLUMNS // VECTOR), -1, tl.int32)
        if peeled:
            for at in tl.range(0, n_classes, COLUMNS):
                at = tl.multiple_of(at, 16)
                a = tile
                if not SINGLE:
                    a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR, BLOCK=BLOCK).to(tl.float32)
                at_top = tl.maximum(at_top, tl.max(tl.where(a == wide(top), (at + columns)[None, :, :], -1), 2))
        kind = tl.where(zero, -2, tl.where(peeled, tl.max(at_top, 1), -1))
        bits = (kind + 2).to(tl.float32, bitcast=True)  # not negative, whose bits are a NaN's
        store_state(state_ptr, state_stride, row, row_in, bits, top, peak, d, c1, c2, of_label, of_top)
        if WITH_GRAD:
            tl.debug_barrier()  # the gradient may overwrite the logits
    if WITH_GRAD:
        for back in tl.range(begin, last + COLUMNS, COLUMNS):  # what the loop above did not do
            at = tl.multiple_of(last - back, 16)
            c = (at + columns)[None, :, :]
            a = tile
            if not SINGLE:
                a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR, BLOCK=BLOCK).to(tl.float32)
            grad = gradient_terms(
                wide(top) - a, wide(d), wide(c1), wide(c2), t1_wide, t2_wide, s_wide, KIND, NEAR, FAST, Q, R, E
            )
            if CLOSE:  # noqa: SIM102 (a constant, unlike the rest)
                if any_row(close):
                    escort, lost = nearby_terms(wide(top) - a, wide(d), t1, s, KIND)
                    closer = escort * (wide(of_top) - wide(c1) * lost)
                    grad = tl.where(wide(close) & (lost < 0.25), closer, grad)
            if peeled:
                grad = tl.where(a == wide(top), top_grad, grad)
            grad = tl.where(wide(zero), 0.0, grad)
            if COLUMNS == 1 or any_row((label >= at) & (label < at + COLUMNS)):
                grad = tl.where(c == wide(label), label_grad, grad)
            store(grad_base, grad_class, at, n_classes, row_in, grad, COLUMNS, VECTOR, BLOCK)


@triton.jit
def label_gradient_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    target_ptr, g_ptr, g_stride, state_ptr, state_stride, n_inner, first, n_classes,
    t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The gradient of `loss_kernel`, times g, from its state and the logits, those of the classes from `first` on.

    It may overwrite the logits. If they are not the same but computed again, a logit may be rounded to its neighbour.
    For most classes that is just one more rounding of the gradient. But for a class with most of the mass, terms
    cancel, and above the largest logit a power may be undefined. So the state holds the index of the largest class and
    the largest logit, and the label is found by its index.
    """
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    grad_base = row_starts(grad_ptr, outer, grad_outer, inner, grad_inner, VECTOR)
    t1, t2, s, stretch, scale = row_temperatures(
        t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride, row, row_in, KIND
    )
    t1, t2, s = spread(t1, KIND), spread(t2, KIND), spread(s, KIND)
    g = tl.full((ROWS,), 1.0, tl.float32)
    if SCALED:
        g = tl.load(g_ptr + row * g_stride, mask=row_in, other=0.0).to(tl.float32)
    state = state_ptr + row
    kind = tl.load(state, mask=row_in, other=0.0).to(tl.int32, bitcast=True) - 2
    top = wide(tl.load(state + state_stride, mask=row_in, other=0.0))
    peak = wide(tl.load(state + 2 * state_stride, mask=row_in, other=0.0))
    d = wide(tl.load(state + 3 * state_stride, mask=row_in, other=1.0))
    c1 = wide(g * tl.load(state + 4 * state_stride, mask=row_in, other=0.0))
    c2 = wide(g * tl.load(state + 5 * state_stride, mask=row_in, other=0.0))
    label_grad = wide(g * tl.load(state + 6 * state_stride, mask=row_in, other=0.0))
    top_grad = wide(g * tl.load(state + 7 * state_stride, mask=row_in, other=0.0))
    label = wide(tl.load(target_ptr + row, mask=row_in, other=-1))
    peeled, zero, at_top = wide(kind >= 0), wide((kind == -2) | (g == 0.0)), wide(kind)
    columns = tile_columns(COLUMNS, VECTOR)
    for at in tl.range(0, n_classes, COLUMNS):
        at = tl.multiple_of(at, 16)
        number = (first + at + columns)[None, :, :]
        a = tl.minimum(load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR).to(tl.float32), peak)
        grad = gradient_terms(top - a, d, c1, c2, t1, t2, s, KIND, NEAR, FAST, Q, R, E)
        grad = tl.where(peeled & ((number == at_top) | (a == top)), top_grad, grad)
        grad = tl.where(zero, 0.0, tl.where(number == label, label_grad, grad))
        store(grad_base, grad_class, at, n_classes, row_in, grad, COLUMNS, VECTOR)
