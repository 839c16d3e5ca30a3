"""Cutting tensors into tiles: one program of a kernel owns a few rows and walks over their columns, the classes.

Tiles are (rows, columns / vector, vector): one thread loads the numbers of the last axis together, and adds them up
before it adds to its sums.
"""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bitempered.kernels.triton.mathematics import exp


@triton.jit
def wide(x):
    return x[:, None, None]


@triton.jit
def any_row(x):
    return tl.max(x.to(tl.int32), 0) > 0


@triton.jit
def row_sum(x):
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def spread(x, KIND: tl.constexpr):
    """A number of each row for a tile, if every row has its own (KIND 3); otherwise it is one for all rows."""
    return wide(x) if KIND == 3 else x


@triton.jit
def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add_5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _add_8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


# Triton's interpreter would add a row's numbers one after the other, which loses digits; a GPU adds them as a tree.
_TOGETHER = tl.constexpr(isinstance(row_sum, triton.JITFunction))


@triton.jit
def sums(x0, x1, x2, x3, x4, x5, x6, x7, TERMS: tl.constexpr):
    """The sums over the last axis of the first TERMS of these, which cross the warps together; others repeat one."""
    axis: tl.constexpr = len(x0.shape) - 1
    if TERMS == 1:
        x0 = tl.sum(x0, axis)
        return x0, x0, x0, x0, x0, x0, x0, x0
    elif not _TOGETHER:
        x0, x1, x2, x3 = tl.sum(x0, axis), tl.sum(x1, axis), tl.sum(x2, axis), tl.sum(x3, axis)
        return x0, x1, x2, x3, tl.sum(x4, axis), tl.sum(x5, axis), tl.sum(x6, axis), tl.sum(x7, axis)
    elif TERMS == 2:
        x0, x1 = tl.reduce((x0, x1), axis, _add_2)
        return x0, x1, x1, x1, x1, x1, x1, x1
    elif TERMS == 4:
        x0, x1, x2, x3 = tl.reduce((x0, x1, x2, x3), axis, _add_4)
        return x0, x1, x2, x3, x3, x3, x3, x3
    elif TERMS == 5:
        x0, x1, x2, x3, x4 = tl.reduce((x0, x1, x2, x3, x4), axis, _add_5)
        return x0, x1, x2, x3, x4, x4, x4, x4
    else:
        return tl.reduce((x0, x1, x2, x3, x4, x5, x6, x7), axis, _add_8)


@triton.jit
def lane_of(x, LANE: tl.constexpr, VECTOR: tl.constexpr):
    """Pick one of every VECTOR numbers on the last axis: a different one for each LANE, in no particular order."""
    if VECTOR == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], VECTOR // 2, 2)))
        return lane_of(odd if LANE % 2 else even, LANE // 2, VECTOR // 2)


@triton.jit
def tile_columns(COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    return tl.arange(0, COLUMNS // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def program_rows(n_inner, ROWS: tl.constexpr):
    """The rows of this program: their block, their places in it, whether they exist, and their numbers."""
    tiles = tl.cdiv(n_inner, ROWS)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    inner = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return outer, inner, inner < n_inner, outer * n_inner + inner


@triton.jit
def row_temperatures(t1, t2, s, stretch, scale, t1_ptr, t1_stride, t2_ptr, t2_stride, row, row_in, KIND: tl.constexpr):
    """The temperatures, t2 - 1, and the factors of the logits and the loss, as arguments or, for KIND 3, per row.

    Then `stretch` is log K with `rescale` and 0 without.
    """
    if KIND == 3:
        t1 = tl.load(t1_ptr + row * t1_stride, mask=row_in, other=1.0)
        t2 = tl.load(t2_ptr + row * t2_stride, mask=row_in, other=1.0)
        s = t2 - 1.0
        scale = exp((1.0 - t1) * stretch)
        stretch = exp(s * stretch)
    return t1, t2, s, stretch, scale


@triton.jit
def row_starts(pointer, outer, outer_stride, inner, inner_stride, VECTOR: tl.constexpr):
    """Where rows start: at multiples of VECTOR, which Triton does not see if their strides are multiples of 8 only."""
    offset = outer * outer_stride + inner * inner_stride
    return pointer + (tl.multiple_of(offset, VECTOR) if VECTOR > 1 else offset)


@triton.jit
def class_places(c, class_stride, BLOCK: tl.constexpr):
    """The offsets of classes in their rows. With BLOCK, so many are neighbours, and the stride is that of blocks."""
    if BLOCK > 0:
        return (c // BLOCK).to(tl.int64) * class_stride + c % BLOCK
    return c.to(tl.int64) * class_stride


@triton.jit
def tile_places(
    at, class_stride, n_classes, row_in, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr = 0
):
    """The offsets of the classes from `at` on in their rows, and which of them exist.

    All or none of a vector exist, by a mask that is constant along it, so that a thread moves it at once. A vector lies
    in one block.
    """
    first = at + tl.arange(0, COLUMNS // VECTOR) * VECTOR
    kept = row_in[:, None, None] & (first < n_classes)[None, :, None]
    if BLOCK > 0:
        places = class_places(first, class_stride, BLOCK)[:, None] + tl.arange(0, VECTOR)[None, :]
    else:
        places = class_places(first[:, None] + tl.arange(0, VECTOR)[None, :], class_stride, BLOCK)
    return places[None, :, :], kept


@triton.jit
def load(
    base, class_stride, at, n_classes, row_in, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    AGAIN: tl.constexpr = False, BLOCK: tl.constexpr = 0,
):  # fmt: skip
    """The logits of the classes from `at` on, and -inf beyond the last class. AGAIN keeps them in the cache.

    They stay in the dtype of the tensor: a loop loads them one turn ahead, and in that dtype they take less room.
    """
    places, kept = tile_places(at, class_stride, n_classes, row_in, COLUMNS, VECTOR, BLOCK)
    if AGAIN:
        return tl.load(base[:, None, None] + places, mask=kept, other=float("-inf"), eviction_policy="evict_last")
    return tl.load(base[:, None, None] + places, mask=kept, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def store(
    base, class_stride, at, n_classes, row_in, x, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr = 0
):
    places, kept = tile_places(at, class_stride, n_classes, row_in, COLUMNS, VECTOR, BLOCK)
    x = x.to(base.dtype.element_ty)
    tl.store(base[:, None, None] + places, x, mask=kept, eviction_policy="evict_first")


@triton.jit
def store_state(state_ptr, stride, row, row_in, x0, x1, x2, x3, x4, x5, x6, x7):
    """Store the eight numbers per row from which a gradient is made later."""
    at = state_ptr + row
    tl.store(at, x0, mask=row_in)
    tl.store(at + stride, x1, mask=row_in)
    tl.store(at + 2 * stride, x2, mask=row_in)
    tl.store(at + 3 * stride, x3, mask=row_in)
    tl.store(at + 4 * stride, x4, mask=row_in)
    tl.store(at + 5 * stride, x5, mask=row_in)
    tl.store(at + 6 * stride, x6, mask=row_in)
    tl.store(at + 7 * stride, x7, mask=row_in)


@triton.jit
def store_losses(losses_ptr, row, row_in, loss, divisor, REDUCE: tl.constexpr, MEAN: tl.constexpr):
    """Store the loss of each row, or with REDUCE one number for the program. The mean of nothing is NaN."""
    if REDUCE:
        total = tl.sum(tl.where(row_in, loss, 0.0), 0) / divisor
        tl.store(losses_ptr + tl.program_id(0), tl.where(divisor == 0.0, float("nan"), total) if MEAN else total)
    else:
        tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty), mask=row_in)


_FEW = 32  # classes; of more, the rows of a warp's threads are too far apart, unless classes are not neighbours
_MANY_ROWS = 2**14


@functools.lru_cache(4096)
def choose_tile(classes: int, inner: int, itemsize: int, contiguous: bool, vector: int) -> dict[str, Any]:
    """Return the tile of a program and its warps: the fastest of those tried on an H200, valid on any GPU.

    `contiguous` means that the classes of a row are neighbours in memory; `vector` is how many are loaded at once. Rows
    of up to 8,192 classes stay in registers. Where there are many rows of few classes, a thread has a row to itself, in
    tiles of one column.
    """
    columns = max(16, triton.next_power_of_2(classes))
    if classes <= (_FEW if contiguous else 2 * _FEW) and inner >= _MANY_ROWS:
        return {"ROWS": 64, "COLUMNS": 1, "VECTOR": 1, "SINGLE": False, "num_warps": 2}
    if not contiguous:  # then neighbouring rows are loaded together
        rows, columns, warps = min(32, triton.next_power_of_2(inner)), min(columns, 32), 4
    elif columns > 8192:
        # A row is read twice. If it has more than 64 kB, more of it is still in the L2 cache the second time when fewer
        # rows are under way. Half precision, where memory does not bind, gains nothing from that.
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


def tile_for(classes: int, inner: int, *tensors: tuple[Tensor, tuple[int, int, int]]) -> dict[str, Any]:
    x, strides = tensors[0]
    vector = 16 // x.element_size()
    aligned = classes % vector == 0
    for y, (outer, row, one) in tensors:
        aligned = aligned and one == 1 and outer % vector == row % vector == y.data_ptr() % 16 == 0
    return choose_tile(classes, inner, x.element_size(), strides[2] == 1, vector if aligned else 1)


def count_tiles(rows: int, geometry: dict[str, Any]) -> int:
    return -(-rows // int(geometry["ROWS"]))
