"""The binary loss and the tempered sigmoid of every element of some tensors, broadcast against each other.

A logit a is the two-class problem with logits (0, a): the probabilities are e^(-m) and e^(-m) r.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitempered.kernels.layout import merge_dimensions
from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton.launch import (
    ASSERTING_OPTIONS,
    DIRECT,
    launch_kernel,
    on_device_of,
    temperature_arguments,
    temperature_constants,
)
from bitempered.kernels.triton.mathematics import (
    LN2,
    decay_factor,
    decayed,
    divergence,
    escort_power,
    exp,
    log2,
    log_ratio,
    phi,
    psi,
)

DIMENSIONS = 3  # that a kernel takes, after those that lie in memory as one are merged
_BLOCK = 512
_ways = Memo()
_plans = Memo()  # for what a call repeats from an earlier one like it: see binary_loss
_READABLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)


@triton.jit
def _solve(u, t, s, stretch, KIND: tl.constexpr, FAST: tl.constexpr):
    """log r and m, for gaps that are finite.

    For t >= 1 by Halley's method for l = -log r, which solves l = psi_s(u e^(-s m)) with m = log(1 + e^(-l)). The slope
    is between 1/2 and 1. From m = log 2 on, two steps leave at most 1.4e-9 of l, for every gap and every t up to 100
    (Newton's need three). Below 1 by Newton's method for m, as core does.
    """
    log_r = -u
    if KIND > 0:
        log_r, _ = log_ratio(u, decay_factor(u * 0.0 + LN2, s, stretch, KIND), s, KIND, FAST)
        for step in tl.static_range(2):
            r = exp(log_r)
            d = decay_factor(psi(r, 1.0, False, FAST), s, stretch, KIND)
            there, _ = log_ratio(u, d, s, KIND, FAST and step == 0)  # the last one exactly
            x = tl.minimum(s * decayed(u, d, KIND), 1e37)
            whole, rest = (1.0 + r) * (1.0 + x), 1.0 / (1.0 + r + x)
            newton = (log_r - there) * (whole * rest)
            bend = (r * x / whole) * ((s * r - (1.0 + x)) * rest)
            log_r -= newton / (1.0 - 0.5 * bend * newton)
    m = psi(exp(log_r), 1.0, False, FAST)
    if KIND < 0 or KIND == 3:
        at, below = u * 0.0, log_r
        for _step in tl.static_range(7):
            r_to_t, below = escort_power(u, decay_factor(at, s, stretch, KIND), t, s, KIND, FAST)
            r = exp(below)
            log_z = psi(r, 1.0, False, FAST) - at
            change = (r - r_to_t) / (1.0 + r_to_t) * phi(log_z, -s, False)
            at = tl.maximum(at + log_z + psi(change, s, False, FAST), 0.0)
        below, _ = log_ratio(u, decay_factor(at, s, stretch, KIND), s, KIND, False)
        if KIND == 3:
            m, log_r = tl.where(s < 0.0, at, m), tl.where(s < 0.0, below, log_r)
        else:
            m, log_r = at, below
    return log_r, m


@triton.jit
def _offset(i, size_1, size_2, stride_0, stride_1, stride_2, DIMENSIONS: tl.constexpr):
    """Where the elements i are. The last of the dimensions has stride_0, for the others divide."""
    if DIMENSIONS == 1:
        return i * stride_0
    elif DIMENSIONS == 2:
        return (i % size_1) * stride_0 + (i // size_1) * stride_1
    else:
        rest = i // size_1
        return (i % size_1) * stride_0 + (rest % size_2) * stride_1 + (rest // size_2) * stride_2


@triton.jit
def binary_kernel(
    logits_ptr, target_ptr, pos_weight_ptr, weight_ptr, g_ptr, out_ptr, grad_ptr, t1_ptr, t2_ptr, sums_ptr,
    logits_0, logits_1, logits_2, target_0, target_1, target_2, pos_weight_0, pos_weight_1, pos_weight_2,
    weight_0, weight_1, weight_2, g_0, g_1, g_2, out_0, out_1, out_2, grad_0, grad_1, grad_2,
    t1_0, t1_1, t1_2, t2_0, t2_1, t2_2, size_1, size_2, n, t1, t2, s, stretch, scale, divisor,
    KIND: tl.constexpr, FAST: tl.constexpr, SAME: tl.constexpr, T1_ZERO: tl.constexpr,
    LOSS: tl.constexpr, POS_WEIGHTED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    WITH_OUT: tl.constexpr, WITH_GRAD: tl.constexpr, REDUCE: tl.constexpr, DIMENSIONS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The LOSS, per element or with REDUCE one sum for the program, or the sigmoid; and the derivative of it.

    The loss is divided by the divisor where it is reduced, its derivative always.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    at = _offset(i, size_1, size_2, logits_0, logits_1, logits_2, DIMENSIONS)
    a = tl.load(logits_ptr + at, mask=there, other=0.0).to(tl.float32)
    if KIND == 3:
        at = _offset(i, size_1, size_2, t1_0, t1_1, t1_2, DIMENSIONS)
        t1 = tl.load(t1_ptr + at, mask=there, other=1.0)
        at = _offset(i, size_1, size_2, t2_0, t2_1, t2_2, DIMENSIONS)
        t2 = tl.load(t2_ptr + at, mask=there, other=1.0)
        s = t2 - 1.0
        scale = exp((1.0 - t1) * stretch)
        stretch = exp(s * stretch)
    u = tl.abs(a)
    masked, positive = u == float("inf"), a >= 0.0
    log_r, m = _solve(tl.where(masked, 0.0, u), t2, s, stretch, KIND, FAST)
    m = tl.where(masked, 0.0, m)
    log_r = tl.where(masked, float("-inf"), log_r)
    e = exp(tl.where(log_r == float("-inf"), log_r, log_r + s * log_r))  # r^t2
    outside = masked & (masked == 0)
    if KIND < 0 or KIND == 3:
        _, outside = log_ratio(u, decay_factor(m, s, stretch, KIND), s, KIND, FAST)
        e = tl.where(outside, 0.0, tl.where(t2 == 0.0, 1.0, e))
    log_small = log_r - m
    p, small = exp(-m), exp(log_small)
    bad = (a < float("inf")) == 0

    if LOSS:
        at = _offset(i, size_1, size_2, target_0, target_1, target_2, DIMENSIONS)
        y = tl.load(target_ptr + at, mask=there, other=0).to(tl.float32)
        tl.device_assert((y >= 0.0) & (y <= 1.0), "target must hold probabilities in [0, 1]")
        w, weight = tl.full((BLOCK,), 1.0, tl.float32), tl.full((BLOCK,), 1.0, tl.float32)
        if POS_WEIGHTED:
            at = _offset(i, size_1, size_2, pos_weight_0, pos_weight_1, pos_weight_2, DIMENSIONS)
            w = tl.load(pos_weight_ptr + at, mask=there, other=1.0).to(tl.float32)
            tl.device_assert((w < 0.0) == 0, "pos_weight must not be negative")
        if WEIGHTED:
            at = _offset(i, size_1, size_2, weight_0, weight_1, weight_2, DIMENSIONS)
            weight = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
            tl.device_assert((weight < 0.0) == 0, "weight must not be negative")
        # 0 times infinity is 0.
        z = tl.where(y == 0.0, 0.0, w * y)
        total = (1.0 - y) + z
        inverse = 1.0 / total
        hard = (y == 0.0) | (y == 1.0)
        q_positive = tl.where(hard, y, z * inverse)
        q_negative = tl.where(hard, 1.0 - y, (1.0 - y) * inverse)
        if tl.max((hard == 0).to(tl.int32), 0) > 0:
            log2_total = log2(total, FAST)
            # A share may underflow.
            log2_positive = log2(y, FAST) + log2(w, FAST) - log2_total
            log2_positive = tl.where(q_positive < 1e-30, log2_positive, log2(q_positive, FAST))
            log2_negative = log2(1.0 - y, FAST) - log2_total
            log2_negative = tl.where(q_negative < 1e-30, log2_negative, log2(q_negative, FAST))
            log2_top = tl.where(positive, log2_positive, log2_negative)
            log2_small = tl.where(positive, log2_negative, log2_positive)
            top_there, small_there = log2_top > float("-inf"), log2_small > float("-inf")
            log_top, log_q = tl.where(top_there, log2_top * LN2, 0.0), tl.where(small_there, log2_small * LN2, 0.0)
            loss = divergence(top_there, log_top, -m, t1, T1_ZERO)
            loss += divergence(small_there, log_q, log_small, t1, T1_ZERO)
        else:
            of_top = (y == 1.0) == positive
            own, other = tl.where(of_top, m, -log_small), tl.where(of_top, log_small, -m)
            loss = phi(own, t1 - 1.0, T1_ZERO) - phi(own, t1 - 2.0, False) + exp((2.0 - t1) * other) / (2.0 - t1)
        none = (total == 0.0) | (weight == 0.0)
        loss = tl.where(bad, float("nan"), total * weight * scale * tl.where(loss < 0.0, 0.0, loss))
        loss = tl.where(none, 0.0, loss)
        if REDUCE:
            tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(there, loss, 0.0), 0) / divisor)
        if WITH_OUT:
            at = _offset(i, size_1, size_2, out_0, out_1, out_2, DIMENSIONS)
            tl.store(out_ptr + at, loss.to(out_ptr.dtype.element_ty), mask=there)
        if WITH_GRAD:
            # y_hat - q of the positive class, as the difference of the smaller numbers
            p_positive, p_negative = tl.where(positive, p, small), tl.where(positive, small, p)
            off = tl.where(q_positive > 0.5, q_negative - p_negative, p_positive - q_positive)
            if SAME:
                powers = tl.where(outside, e, e + 1.0)
            else:
                apart = s + (1.0 - t1)  # t2 - t1
                power = exp(apart * log_small)
                if KIND == 3:
                    power = tl.where(apart == 0.0, tl.where(outside, 0.0, 1.0), power)
                powers = exp(-apart * m) * e + power
            factor = total * weight * (scale * stretch) / divisor
            if SCALED:
                at = _offset(i, size_1, size_2, g_0, g_1, g_2, DIMENSIONS)
                factor *= tl.load(g_ptr + at, mask=there, other=0.0).to(tl.float32)
            grad = tl.where(bad, float("nan"), factor * (off * (powers / (1.0 + e))))
            at = _offset(i, size_1, size_2, grad_0, grad_1, grad_2, DIMENSIONS)
            tl.store(grad_ptr + at, tl.where(none, 0.0, grad).to(grad_ptr.dtype.element_ty), mask=there)
    else:
        at = _offset(i, size_1, size_2, out_0, out_1, out_2, DIMENSIONS)
        probability = tl.where(bad, float("nan"), tl.where(positive, p, small))
        tl.store(out_ptr + at, probability.to(out_ptr.dtype.element_ty), mask=there)
        if WITH_GRAD:
            # Of the larger p^t (1 - e), and of the smaller (p r)^t: the same number, from e = r^t and 1 / (1 + r^t).
            slope = tl.where(bad, float("nan"), exp(-t2 * m) * e / (1.0 + e))
            at = _offset(i, size_1, size_2, grad_0, grad_1, grad_2, DIMENSIONS)
            tl.store(grad_ptr + at, slope.to(grad_ptr.dtype.element_ty), mask=there)


def binary_loss(
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    *,
    gradient: Tensor | None = None,
    g: Tensor | None = None,
) -> Tensor:
    """The binary loss in float32; the gradient of sum(g * loss) goes into `gradient`, if given.

    A call like an earlier one, without weights, launches what that one did: for small batches the rest takes longer.
    """
    key = None if pos_weight is not None or weight is not None or g is not None else _key(logits, target, options)
    x, y, into = logits.data_ptr(), target.data_ptr(), 0 if gradient is None else gradient.data_ptr()
    if key is not None and (x | y | into) % 16 == 0:
        key = (*key, None if gradient is None else gradient.stride())
        found = _plans.get(key)
        if found is not None:
            launch, pattern, reduce, values = found
            losses = torch.empty_like(pattern)
            each, total = (None, losses.data_ptr()) if reduce else (losses.data_ptr(), None)
            launch(x, y, None, None, None, each, into or None, None, None, total, *values)
            return losses.sum() if reduce else losses
    else:
        key = None
    reduce, mean = options.reduction != "none", options.reduction == "mean"
    n = logits.numel()
    if n == 0:
        shape = () if reduce else logits.shape
        return torch.full(shape, torch.nan if mean else 0.0, dtype=torch.float32, device=logits.device)
    programs = -(-n // _BLOCK)
    sums = torch.empty(programs, dtype=torch.float32, device=logits.device) if reduce else None
    out = None if reduce else torch.empty_like(logits, dtype=torch.float32)
    target = target if target.dtype in _READABLE else target.to(torch.float32)
    given = (logits, target, pos_weight, weight, g, out, gradient)
    launched = _run(given, options, sums, n if mean else 1, programs)
    losses = sums if out is None else out  # type: ignore[assignment]
    if key is not None and launched is not None:
        (launch, rest), values = launched
        # Shape, strides, dtype and device, but no memory.
        pattern = torch.empty_strided(losses.shape, losses.stride(), dtype=losses.dtype, device=losses.device)
        pattern.untyped_storage().resize_(0)
        _plans.keep(key, (launch, pattern, reduce, (*values, *rest)))
    return losses.sum() if reduce else losses


def _key(logits: Tensor, target: Tensor, options: LossOptions) -> Any:
    """What the launch of a loss without weights depends on, but for the gradient; None if it is not remembered."""
    if not DIRECT or isinstance(options.t1, Tensor) or isinstance(options.t2, Tensor) or target.dtype not in _READABLE:
        return None
    device = logits.get_device()
    if device != torch.cuda.current_device():
        return None
    return options, device, logits.dtype, logits.shape, logits.stride(), target.dtype, target.stride()


def sigmoid(logits: Tensor, t: Any, dtype: torch.dtype, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """The tempered sigmoid in `dtype`, and its derivative in the dtype of the logits."""
    out = torch.empty_like(logits, dtype=dtype)
    slope = torch.empty_like(logits) if with_slope else None
    if logits.numel():
        given = (logits, None, None, None, None, out, slope)
        _run(given, LossOptions(t, t, None), None, 1, -(-logits.numel() // _BLOCK))
    return out, slope


def _run(
    tensors: tuple[Tensor | None, ...], options: LossOptions, sums: Tensor | None, divisor: int, programs: int
) -> Any:
    """Launch the kernel. Returns the shortcut of `launch_kernel` and the arguments behind the tensors, or None."""
    logits, target, pos_weight, weight, g, out, gradient = tensors
    assert logits is not None
    *numbers, t1, _, t2, _ = temperature_arguments(options, 2, logits.device)
    given = (*tensors, t1, t2)
    key = tuple(None if x is None else (x.shape, x.stride()) for x in given)
    way = _ways.get(key) or _ways.keep(key, _find_way(given))
    if way.dimensions > DIMENSIONS:  # then all take the way of the logits
        own = [x if x is None else torch.empty_like(logits, dtype=x.dtype).copy_(x.expand(logits.shape)) for x in given]
        options = options._replace(t1=own[7], t2=own[8]) if own[7] is not None else options
        _run((*own[:7],), options, sums, divisor, programs)
        for mine, x in ((own[5], out), (own[6], gradient)):
            if x is not None and mine is not None:
                x.copy_(mine)
        return None
    constants = {
        **temperature_constants(options.t1, options.t2, "KIND", "FAST", "SAME", "T1_ZERO"),
        "LOSS": target is not None, "POS_WEIGHTED": pos_weight is not None, "WEIGHTED": weight is not None,
        "SCALED": g is not None, "WITH_OUT": out is not None, "WITH_GRAD": gradient is not None,
        "REDUCE": sums is not None,
        "DIMENSIONS": way.dimensions, "WIDE": way.wide, "BLOCK": _BLOCK, "num_warps": 4,
    }  # fmt: skip
    with on_device_of(logits):
        values = (*way.strides, *way.sizes, logits.numel(), *numbers, float(divisor))
        shortcut = launch_kernel(binary_kernel, programs, (*given, sums, *values), constants | ASSERTING_OPTIONS)
    return None if shortcut is None else (shortcut, values)


class _Way(NamedTuple):
    """A way through the memory of tensors that broadcast to the first of them."""

    dimensions: int
    strides: tuple[int, ...]  # DIMENSIONS for each tensor, from the last dimension to the first
    sizes: tuple[int, int]  # of the last two dimensions
    wide: bool  # whether offsets need 64 bits


def _find_way(given: tuple[Tensor | None, ...]) -> _Way:
    there = [x for x in given if x is not None]
    shape = there[0].shape
    sizes, merged = merge_dimensions(shape, [x.expand(shape).stride() for x in there])
    ends = [sum((size - 1) * step for size, step in zip(sizes, x, strict=True)) for x in merged]
    wide = max(*ends, there[0].numel()) >= 2**31 - _BLOCK
    found = iter(merged)
    strides: list[int] = []
    for x in given:
        steps = [0] * len(sizes) if x is None else next(found)
        strides += (*steps[::-1], *[0] * DIMENSIONS)[:DIMENSIONS]
    last, before = (*sizes[::-1], 1, 1)[:2]
    return _Way(len(sizes), tuple(strides), (last, before), wide)
