"""Where the rows of a tensor lie in memory, for kernels that read any layout in place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def as_blocks(x: Tensor, axis: int) -> tuple[Tensor, int, int, tuple[int, int, int]]:
    """Return x (or a copy) as blocks of rows: it, the numbers of blocks and of rows in each, and the three strides."""
    if axis == 1 and x.dim() == 2:
        row, of_class = x.stride()
        return x, 1, x.shape[0], (0, row, of_class)
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        x = x.reshape(before, x.shape[axis])
        return x, 1, before, (0, x.stride(0), x.stride(1))
    x = x.reshape(before, x.shape[axis], after)
    return x, before, after, (x.stride(0), x.stride(2), x.stride(1))


def empty_gradient(x: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor like x, as for its gradient, with the layout of x unless `as_blocks` would copy that."""
    made = torch.empty_like(x, dtype=dtype)
    shared = x.dim() == 2 or made.is_contiguous() or as_blocks(made, axis)[0].data_ptr() == made.data_ptr()
    return made if shared else torch.empty(x.shape, dtype=made.dtype, device=x.device)


def repeats_one_number(x: Tensor) -> bool:
    """Whether all elements of x are one place in memory, as `expand` makes them of a scalar."""
    return all(size == 1 or stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def merge_dimensions(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the sizes and strides of tensors of one shape, in as few dimensions as hold their elements.

    The order is that of the first tensor in memory.

    >>> merge_dimensions((2, 3, 4), [(12, 4, 1), (0, 0, 1)])
    ([6, 4], [[4, 1], [0, 1]])
    >>> merge_dimensions((2, 3), [(1, 2), (1, 2)])
    ([6], [[1], [1]])
    """
    order = sorted((i for i, size in enumerate(shape) if size != 1), key=lambda i: -strides[0][i])
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for i in order:
        if sizes and all(m[-1] == x[i] * shape[i] for m, x in zip(merged, strides, strict=True)):
            sizes[-1] *= shape[i]
            for m, x in zip(merged, strides, strict=True):
                m[-1] = x[i]
        else:
            sizes.append(shape[i])
            for m, x in zip(merged, strides, strict=True):
                m.append(x[i])
    return sizes or [1], [m or [0] for m in merged]
