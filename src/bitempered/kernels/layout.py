"""Where the rows of a tensor lie in memory, for kernels that read any layout in place."""

import math

import torch
from torch import Tensor


def as_blocks(x: Tensor, axis: int) -> tuple[Tensor, int, int, tuple[int, int, int]]:
    """Return x (or a copy) as blocks of rows: it, the numbers of blocks and of rows in each, and the three strides."""
    if axis == 1 and x.dim() == 2:
        return x, 1, x.shape[0], (0, x.stride(0), x.stride(1))
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        x = x.reshape(before, x.shape[axis])
        return x, 1, before, (0, x.stride(0), x.stride(1))
    x = x.reshape(before, x.shape[axis], after)
    return x, before, after, (x.stride(0), x.stride(2), x.stride(1))


def empty_gradient(x: Tensor, axis: int) -> Tensor:
    """Return an empty tensor for the gradient of x, with the layout of x unless `as_blocks` would copy that."""
    made = torch.empty_like(x)
    shared = x.dim() == 2 or as_blocks(made, axis)[0].data_ptr() == made.data_ptr()
    return made if shared else torch.empty(x.shape, dtype=x.dtype, device=x.device)
