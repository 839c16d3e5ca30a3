"""The options of a loss over classes: one tuple, in one order, for every kernel."""

from typing import NamedTuple


class LossOptions(NamedTuple):
    t1: float
    t2: float
    axis: int  # of the classes
    label_smoothing: float
    ignore_index: int
    reduction: str
