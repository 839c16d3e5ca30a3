"""The reductions of losses per example: "none", "sum" and "mean"."""

import math

import torch
from torch import Tensor

from bitempered.kernels.options import LossOptions
from bitempered.kernels.targets import mean_divisor


def reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def reduce_classes(losses: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The reduction of `cross_entropy`: a mean over class indices divides by the summed weights of the targets."""
    if options.reduction == "mean" and not target.is_floating_point():
        return divide(losses.sum(), *safe_divisor(target, weight, options, losses.dtype))
    return reduce(losses, options.reduction)


def safe_divisor(
    target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the `mean_divisor`, with 0 replaced by 1, and whether it was 0."""
    total = mean_divisor(target, weight, axis=options.axis, ignore_index=options.ignore_index, dtype=dtype)
    empty = total == 0
    return torch.where(empty, 1, total), empty


def divide(total: Tensor, divisor: Tensor, empty: Tensor) -> Tensor:
    """The mean of losses of that total, by their `safe_divisor`."""
    return torch.where(empty, math.nan, total / divisor)
