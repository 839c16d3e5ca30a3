"""Multiply a gradient in place by the one that backward receives."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitempered.kernels.layout import as_blocks
from bitempered.kernels.triton.launch import COMPILER_OPTIONS, launch_kernel, on_device_of
from bitempered.kernels.triton.tiles import any_row, count_tiles, load, row_starts, store, tile_for, wide

_BLOCK = 4096
_SMALL_GRADIENT = 2**23  # numbers: below, an operation of torch is faster than a launch that may have nothing to do


@triton.jit
def _scale_kernel(
    grad_ptr, outer_stride, inner_stride, class_stride, g_ptr, g_stride, n_outer, n_inner, n_classes,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of the gradient by g, in place. A tile where every g is 1 is not even read."""
    tiles = tl.cdiv(n_inner, ROWS)
    for tile in tl.range(tl.program_id(0), tiles * n_outer, tl.num_programs(0)):
        outer = (tile // tiles).to(tl.int64)
        inner = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row_in = inner < n_inner
        g = tl.load(g_ptr + (outer * n_inner + inner) * g_stride, mask=row_in, other=1.0).to(tl.float32)
        if any_row(g != 1.0):
            base = row_starts(grad_ptr, outer, outer_stride, inner, inner_stride, VECTOR)
            for at in tl.range(0, n_classes, COLUMNS):
                at = tl.multiple_of(at, 16)
                x = load(base, class_stride, at, n_classes, row_in, COLUMNS, VECTOR)
                store(base, class_stride, at, n_classes, row_in, wide(g) * x.to(tl.float32), COLUMNS, VECTOR)


@triton.jit
def _scale_all_kernel(grad_ptr, g_ptr, n, BLOCK: tl.constexpr):
    """Multiply numbers in place by one, unless that is 1."""
    g = tl.load(g_ptr).to(tl.float32)
    if g != 1.0:
        for at in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = tl.load(grad_ptr + i, mask=i < n, other=0.0)
            tl.store(grad_ptr + i, (g * x.to(tl.float32)).to(grad_ptr.dtype.element_ty), mask=i < n)


def scale_(gradient: Tensor, g: Tensor, axis: int | None) -> Tensor:
    """Multiply a dense gradient in place by g: a scalar, one number per row or, of a binary loss, one per element.

    A large gradient is not touched where g is 1.
    """
    if gradient.numel() < _SMALL_GRADIENT or (g.dim() and axis is None):
        return gradient.mul_(g.unsqueeze(axis) if g.dim() and axis is not None else g)
    if axis is None or not g.dim():
        programs = min(-(-gradient.numel() // _BLOCK), 8 * _processors(gradient.device))
        with on_device_of(gradient):
            constants = {"BLOCK": _BLOCK, "num_warps": 8} | COMPILER_OPTIONS
            launch_kernel(_scale_all_kernel, programs, (gradient, g, gradient.numel()), constants)
        return gradient
    x, outer, inner, strides = as_blocks(gradient, axis)
    if x.numel():
        tile = dict(tile_for(x.shape[1], inner, (x, strides)))
        tile.pop("SINGLE")
        programs = min(outer * count_tiles(inner, tile), 8 * _processors(x.device))
        with on_device_of(x):
            arguments = x, *strides, g.contiguous(), 1, outer, inner, x.shape[1]
            launch_kernel(_scale_kernel, programs, arguments, tile | COMPILER_OPTIONS)
    return gradient


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
