"""The options of a loss: one tuple, for core and every kernel."""

from typing import Any, NamedTuple


class LossOptions(NamedTuple):
    t1: Any  # a number; or a tensor with one value per example, for core; or None if it is passed on its own
    t2: Any
    axis: Any  # of the classes, an integer; None for a binary loss
    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    inner: Any = 1.0  # with `rescale`, what multiplies the logits, and the loss: for "cpu" only
    outer: Any = 1.0
