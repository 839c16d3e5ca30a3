"""The options of a loss: one tuple, for core and every kernel."""

from typing import Any, NamedTuple

from bitempered import core


class LossOptions(NamedTuple):
    t1: Any  # a number; or a tensor with one value per example; or None if it is passed on its own
    t2: Any
    axis: Any  # of the classes, an integer; None for a binary loss
    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    rescale: bool = False

    def scales(self, classes: int) -> tuple[Any, Any]:
        """What multiplies the logits, and the loss."""
        return core.scales(classes, self.t1, self.t2) if self.rescale else (1.0, 1.0)
