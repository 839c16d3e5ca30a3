"""The tempered softmax, its logarithm and lambda_t: kernels and their launchers."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitempered.kernels.layout import as_blocks, empty_gradient
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton.launch import (
    COMPILER_OPTIONS,
    launch_kernel,
    on_device_of,
    temperature_arguments,
    temperature_constants,
)
from bitempered.kernels.triton.mathematics import decay_factor, exp, log_ratio, phi
from bitempered.kernels.triton.solver import normalize
from bitempered.kernels.triton.tiles import (
    count_tiles,
    load,
    program_rows,
    row_starts,
    row_sum,
    row_temperatures,
    spread,
    store,
    tile_for,
    tile_places,
    wide,
)

_KINDS = {"probabilities": 0, "logarithms": 1, "partition": 2}


@triton.jit
def _softmax_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, out_ptr, out_outer, out_inner, out_class,
    lambda_ptr, state_ptr, n_inner, n_classes, n_rows, t1, t, s, stretch, scale, t1_ptr, t1_stride, t_ptr, t_stride,
    KIND: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, WHAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Probabilities (WHAT 0), their logarithms (1) or lambda_t (2); and for backward the point of reference and m."""
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    t1, t, s, stretch, scale = row_temperatures(
        t1, t, s, stretch, scale, t1_ptr, t1_stride, t_ptr, t_stride, row, row_in, KIND
    )
    top, _, m, tile = normalize(
        base, class_stride, n_classes, row_in, row_in, t, s, stretch, KIND, NEAR, FAST, ROWS, COLUMNS, VECTOR, SINGLE
    )
    tl.store(state_ptr + row, top, mask=row_in)
    tl.store(state_ptr + n_rows + row, m, mask=row_in)
    if WHAT == 2:
        tl.store(lambda_ptr + row, (top + phi(m, s, KIND == 0)).to(lambda_ptr.dtype.element_ty), mask=row_in)
    else:
        d, s_wide = wide(decay_factor(m, s, stretch, KIND)), spread(s, KIND)
        out_base = row_starts(out_ptr, outer, out_outer, inner, out_inner, VECTOR)
        for at in tl.range(0, n_classes, COLUMNS):
            at = tl.multiple_of(at, 16)
            a = tile if SINGLE else load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR).to(tl.float32)
            log_r, _outside = log_ratio(wide(top) - a, d, s_wide, KIND, FAST)
            log_p = log_r - wide(m)
            out = log_p if WHAT == 1 else exp(log_p)
            store(out_base, out_class, at, n_classes, row_in, out, COLUMNS, VECTOR)


@triton.jit
def _softmax_backward_kernel(
    logits_ptr, outer_stride, inner_stride, class_stride, grad_ptr, grad_outer, grad_inner, grad_class,
    g_ptr, g_outer, g_inner, g_class, state_ptr, n_inner, n_classes, n_rows,
    t1, t, s, stretch, scale, t1_ptr, t1_stride, t_ptr, t_stride,
    KIND: tl.constexpr, FAST: tl.constexpr, WHAT: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """d log p_i = p_i^s (da_i - sum_j e_j da_j) and d lambda = sum_j e_j da_j, with the escort distribution e."""
    outer, inner, row_in, row = program_rows(n_inner, ROWS)
    base = row_starts(logits_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
    g_base = row_starts(g_ptr, outer, g_outer, inner, g_inner, VECTOR if ALIGNED else 1)
    grad_base = row_starts(grad_ptr, outer, grad_outer, inner, grad_inner, VECTOR)
    t1, t, s, stretch, scale = row_temperatures(
        t1, t, s, stretch, scale, t1_ptr, t1_stride, t_ptr, t_stride, row, row_in, KIND
    )
    t, s_wide = spread(t, KIND), spread(s, KIND)
    top, m = tl.load(state_ptr + row, mask=row_in, other=0.0), tl.load(state_ptr + n_rows + row, mask=row_in, other=0.0)
    d, top, m = wide(decay_factor(m, s, stretch, KIND)), wide(top), wide(m)
    pull, mass = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for at in tl.range(0, n_classes, COLUMNS):
        at = tl.multiple_of(at, 16)
        v, e = _softmax_terms(
            base, class_stride, g_base, g_class, at, n_classes, row_in, top, m, d, t, s_wide, KIND, FAST, WHAT,
            COLUMNS, VECTOR,
        )  # fmt: skip
        pull += row_sum(v)
        mass += row_sum(e)
    share = -tl.load(g_base, mask=row_in, other=0.0).to(tl.float32) if WHAT == 2 else pull
    for at in tl.range(0, n_classes, COLUMNS):
        at = tl.multiple_of(at, 16)
        v, e = _softmax_terms(
            base, class_stride, g_base, g_class, at, n_classes, row_in, top, m, d, t, s_wide, KIND, FAST, WHAT,
            COLUMNS, VECTOR,
        )  # fmt: skip
        store(grad_base, grad_class, at, n_classes, row_in, v - e * wide(share / mass), COLUMNS, VECTOR)


@triton.jit
def _softmax_terms(
    base, class_stride, g_base, g_class, at, n_classes, row_in, top, m, d, t, s, KIND: tl.constexpr,
    FAST: tl.constexpr, WHAT: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """g_i d out_i / d log p_i p_i^s, and r^t; 0 where p is 0."""
    a = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR).to(tl.float32)
    log_r, _ = log_ratio(top - a, d, s, KIND, FAST)
    gone = log_r == float("-inf")
    e = tl.where(gone, 0.0, exp(t * log_r))
    if WHAT == 2:
        return e * 0.0, e
    places, kept = tile_places(at, g_class, n_classes, row_in, COLUMNS, VECTOR)
    g = tl.load(g_base[:, None, None] + places, mask=kept, other=0.0).to(tl.float32)
    power = exp((t if WHAT == 0 else s) * (log_r - m))
    return tl.where(gone, 0.0, g * power), e


def softmax(logits: Tensor, t: Any, axis: int, what: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The "probabilities", their "logarithms" or the "partition" lambda_t in `dtype`, and what backward needs."""
    x, outer, inner, strides = as_blocks(logits, axis)
    shape = logits.shape[:axis] + logits.shape[axis + 1 :] if what == "partition" else logits.shape
    out = torch.empty(shape, dtype=dtype, device=logits.device)
    state = torch.empty((2, outer * inner), dtype=torch.float32, device=logits.device)
    if x.numel():
        into, into_strides = (x, strides) if what == "partition" else as_blocks(out, axis)[::3]
        geometry = tile_for(x.shape[1], inner, (x, strides), (into, into_strides))
        temperatures = temperature_arguments(LossOptions(t, t, axis), x.shape[1], x.device)
        with on_device_of(x):
            arguments = x, *strides, into, *into_strides, out, state, inner, x.shape[1], outer * inner, *temperatures
            constants = temperature_constants(t, t, "KIND", "NEAR", "FAST") | {"WHAT": _KINDS[what]}
            programs = outer * count_tiles(inner, geometry)
            launch_kernel(_softmax_kernel, programs, arguments, constants | geometry | COMPILER_OPTIONS)
    return out, state


def softmax_backward(g: Tensor, logits: Tensor, state: Tensor, t: Any, axis: int, what: str) -> Tensor:
    """The gradient of sum(g * softmax(logits)) in the logits."""
    x, outer, inner, strides = as_blocks(logits, axis)
    made = empty_gradient(logits, axis)
    if x.numel():
        into, _, _, into_strides = as_blocks(made, axis)
        if what == "partition":
            g, g_strides = g.contiguous(), (inner, 1, 0)
        else:
            g, g_strides = as_blocks(g, axis)[::3]
        tile = dict(tile_for(x.shape[1], inner, (x, strides), (into, into_strides)))
        tile.pop("SINGLE")
        aligned = tile_for(x.shape[1], inner, (x, strides), (g, g_strides))["VECTOR"] >= tile["VECTOR"]
        temperatures = temperature_arguments(LossOptions(t, t, axis), x.shape[1], x.device)
        with on_device_of(x):
            arguments = (
                x, *strides, into, *into_strides, g, *g_strides, state, inner, x.shape[1], outer * inner,
                *temperatures,
            )  # fmt: skip
            constants = temperature_constants(t, t, "KIND", "FAST") | {"WHAT": _KINDS[what], "ALIGNED": aligned}
            programs = outer * count_tiles(inner, tile)
            launch_kernel(_softmax_backward_kernel, programs, arguments, constants | tile | COMPILER_OPTIONS)
    return made
