"""The losses as modules: they only store the arguments of the functions."""

from torch import Tensor, nn

from bitempered.torch.autograd import Temperature
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
        check_options(ignore_index, reduction, label_smoothing)
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
        return probabilities(logits, self.t2, min(1, logits.dim() - 1), self.rescale)

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
        return binary_probabilities(logits, self.t2, self.rescale)

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}" + ", rescale=True" * self.rescale
