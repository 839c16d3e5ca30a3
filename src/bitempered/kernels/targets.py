"""What a mean divides by, and the errors for bad class indices and probabilities."""

import math

import torch
from torch import Tensor

from bitempered import checks


def mean_divisor(
    target: Tensor, weight: Tensor | None, *, axis: int, ignore_index: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The summed weights of class indices that are not ignored, or the number of examples of class probabilities.

    If it is 0, no example counts: the mean is NaN, as 0 / 0 is, and its gradient is 0.
    """
    if target.is_floating_point():
        examples = math.prod((*target.shape[:axis], *target.shape[axis + 1 :]))  # of a shard without classes, too
        return torch.full((), examples, dtype=dtype, device=target.device)
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    # With an axis more, since vmap cannot index by a single number.
    of_targets = weight.to(dtype)[torch.where(kept, target, 0).unsqueeze(-1)].squeeze(-1)
    return torch.where(kept, of_targets, 0.0).sum()


def bad_index(target: Tensor, classes: int, ignore_index: int) -> IndexError:
    """The error to raise for a target with an index that is neither a class nor ignore_index."""
    kept = target[target != ignore_index]
    return checks.bad_index(kept, classes, "target", or_ignored=f" or ignore_index ({ignore_index})")


def probability_sums(target: Tensor, axis: int) -> Tensor:
    return target.to(torch.float64 if target.dtype == torch.float64 else torch.float32).sum(axis)


def bad_probabilities(target: Tensor, axis: int) -> ValueError:
    """The error to raise for a target whose class probabilities are negative or do not sum to 1."""
    tolerance = checks.sum_tolerance(target.element_size())
    return checks.bad_probabilities(target, probability_sums(target, axis), tolerance, "target")
