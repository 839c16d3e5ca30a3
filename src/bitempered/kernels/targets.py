"""The weights of class indices, and the error for a bad index."""

import torch
from torch import Tensor


def target_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each target, 0 where it is ignored. A mean over class indices divides by their sum."""
    kept = target != ignore_index
    return kept if weight is None else torch.where(kept, weight.to(dtype)[torch.where(kept, target, 0)], 0.0)


def bad_index(target: Tensor, classes: int, ignore_index: int) -> IndexError:
    """The error to raise for a target with an index that is neither a class nor ignore_index."""
    return IndexError(
        f"target must hold class indices from 0 to {classes - 1} or ignore_index ({ignore_index}),"
        f" got {value_range(target[target != ignore_index])}"
    )


def value_range(x: Tensor) -> str:
    return f"values from {x.min().item():g} to {x.max().item():g}"
