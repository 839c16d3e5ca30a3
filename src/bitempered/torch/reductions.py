"""The reductions of losses per example: "none", "sum" and "mean"."""

import math

import torch
from torch import Tensor

from bitempered.kernels.targets import target_weights


def reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def reduce_classes(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The reduction of `cross_entropy`: a mean over class indices divides by the summed weights of the targets."""
    if reduction == "mean" and not target.is_floating_point():
        divisor, empty = mean_divisor(target, weight, ignore_index, losses.dtype)
        return torch.where(empty, math.nan, losses.sum() / divisor)
    return reduce(losses, reduction)


def mean_divisor(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the divisor of a mean over class indices, with 0 replaced by 1, and whether it was 0.

    If it was, no example counts: the mean is NaN, as 0 / 0 is, and its gradient is 0.
    """
    total = target_weights(target, weight, ignore_index, dtype).sum()
    empty = total == 0
    return torch.where(empty, 1, total), empty
