"""The options of a loss over classes: one tuple, in one order, for every kernel."""

from typing import NamedTuple

from torch import Tensor


class LossOptions(NamedTuple):
    t1: float | Tensor  # a tensor has one value per example, and goes to core
    t2: float | Tensor
    axis: int  # of the classes
    label_smoothing: float
    ignore_index: int
    reduction: str
