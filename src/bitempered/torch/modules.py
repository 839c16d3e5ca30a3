"""The losses as modules, which only store the arguments of the functions, and temperatures that can be learnt."""

import math

import torch
from torch import Tensor, nn

from bitempered.checks import check_number
from bitempered.torch.autograd import Temperature, compute_dtype
from bitempered.torch.checks import (
    check_class_weight,
    check_options,
    check_reduction,
    check_stored_options,
    check_weight,
)
from bitempered.torch.functional import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    binary_probabilities,
    probabilities,
)


class BiTemperedLogisticLoss(nn.Module):
    """`bi_tempered_logistic_loss` with its options stored; replaces `torch.nn.CrossEntropyLoss`.

    t1 and t2, numbers or tensors, may be assigned at any time. They are checked when the loss is called.

    >>> BiTemperedLogisticLoss(t1=0.8, t2=1.2)
    BiTemperedLogisticLoss(t1=0.8, t2=1.2)
    """

    weight: Tensor | None

    def __init__(
        self,
        t1: Temperature = 0.8,
        t2: Temperature = 1.2,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        rescale: bool = False,
    ) -> None:
        super().__init__()
        self.t1, self.t2, self.rescale = check_stored_options(t1, t2, rescale)
        check_options(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        check_class_weight(weight, "weight")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return bi_tempered_logistic_loss(
            logits,
            target,
            self.t1,
            self.t2,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            rescale=self.rescale,
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """The class probabilities, along the dimension that the loss takes for the classes."""
        return probabilities(logits, self.t2, axis=min(1, logits.dim() - 1), rescale=self.rescale)

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}" + ", rescale=True" * self.rescale


class BiTemperedBinaryLogisticLoss(nn.Module):
    """`bi_tempered_binary_logistic_loss` with its options stored; replaces `torch.nn.BCEWithLogitsLoss`.

    >>> BiTemperedBinaryLogisticLoss(t1=0.5, t2=2.0)
    BiTemperedBinaryLogisticLoss(t1=0.5, t2=2.0)
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(
        self,
        t1: Temperature = 0.8,
        t2: Temperature = 1.2,
        weight: Tensor | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        rescale: bool = False,
    ) -> None:
        super().__init__()
        self.t1, self.t2, self.rescale = check_stored_options(t1, t2, rescale)
        check_reduction(reduction)
        check_weight(weight, "weight")
        check_weight(pos_weight, "pos_weight")
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return bi_tempered_binary_logistic_loss(
            logits,
            target,
            self.t1,
            self.t2,
            weight=self.weight,
            pos_weight=self.pos_weight,
            reduction=self.reduction,
            rescale=self.rescale,
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of the positive class for each logit."""
        return binary_probabilities(logits, self.t2, rescale=self.rescale)

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}" + ", rescale=True" * self.rescale


class LearnableTemperatures(nn.Module):
    """Two learnable temperatures within bounds: calling the module returns the tensors (t1, t2).

    Do not learn them on the training loss. Losses at different t1 are different yardsticks: the loss grows with t1 for
    any prediction, so that descent on it would lower t1 whether the model is good or not. Learn them on a small clean
    validation set: take one training step with them, and descend on a fixed loss of the model after that step, whose
    gradient reaches the temperatures through the step (examples/learn_temperatures.py).

    Each is a smooth function of a parameter without bounds, and lies strictly between its bounds. The slope vanishes
    only algebraically towards them, so a temperature can come back from a bound. In float32 it cannot once its
    parameter is beyond 10,000.

    Args:
        t1: the first value of t1, within its bounds. One closer to a bound than a thousandth of the way to the other
            starts a thousandth away from it, since on the bound the slope would be 0.
        t2: the first value of t2, likewise.
        t1_bounds: the bounds of t1, within [0, 2].
        t2_bounds: the bounds of t2; the lower one is not below the upper bound of t1, so that t1 < t2.

    >>> LearnableTemperatures()
    LearnableTemperatures(t1_bounds=(0, 1), t2_bounds=(1, 4))
    >>> [round(t.item(), 4) for t in LearnableTemperatures(t1=0.5, t2=4.0)()]
    [0.5, 3.997]
    """

    def __init__(
        self,
        t1: float = 0.8,
        t2: float = 1.2,
        t1_bounds: tuple[float, float] = (0, 1),
        t2_bounds: tuple[float, float] = (1, 4),
    ) -> None:
        super().__init__()
        for name, t, (low, high) in (("t1", t1, t1_bounds), ("t2", t2, t2_bounds)):
            check_number(low, f"the lower bound of {name}", 0)
            check_number(high, f"the upper bound of {name}", 0)
            if high - low < 1e-3:
                raise ValueError(f"{name}_bounds must be (low, high), at least 0.001 apart, got ({low}, {high})")
            if not low <= check_number(t, name) <= high:
                raise ValueError(f"{name} must be within its bounds, {low} and {high}, got {t}")
        if t1_bounds[1] > 2:
            raise ValueError(f"t1_bounds must be within [0, 2], got {t1_bounds}")
        if t1_bounds[1] > t2_bounds[0]:
            raise ValueError(
                f"t1_bounds must not reach above t2_bounds, since t1 <= t2, got {t1_bounds} and {t2_bounds}"
            )
        self.t1_bounds, self.t2_bounds = t1_bounds, t2_bounds
        self.raw_t1 = nn.Parameter(torch.tensor(_raw(t1, *t1_bounds)))
        self.raw_t2 = nn.Parameter(torch.tensor(_raw(t2, *t2_bounds)))

    def forward(self) -> tuple[Tensor, Tensor]:
        return _between(self.raw_t1, *self.t1_bounds), _between(self.raw_t2, *self.t2_bounds)

    def extra_repr(self) -> str:
        return f"t1_bounds={self.t1_bounds}, t2_bounds={self.t2_bounds}"


def _between(raw: Tensor, low: float, high: float) -> Tensor:
    """The middle of the bounds plus the `_reach` times raw / sqrt(1 + raw^2)."""
    raw = raw.to(compute_dtype(raw.dtype))
    return (low + high) / 2 + _reach(low, high) * (raw / torch.hypot(raw, torch.ones_like(raw)))


def _raw(t: float, low: float, high: float) -> float:
    """The inverse of `_between`, except next to the bounds."""
    x = min(max((t - (low + high) / 2) / _reach(low, high), -0.998), 0.998)
    return x / math.sqrt(1 - x * x)


def _reach(low: float, high: float) -> float:
    """Half the distance of the bounds, less more than rounding takes, in float32: a loss may convert to that."""
    return (high - low) / 2 - 4 * torch.finfo(torch.float32).eps * high
