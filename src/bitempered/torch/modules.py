"""The losses as modules: they only store the arguments of the functions."""

from torch import Tensor, nn

from bitempered.checks import check_temperatures
from bitempered.torch.checks import check_class_weight, check_options, check_reduction, check_weight
from bitempered.torch.functional import bi_tempered_binary_logistic_loss, bi_tempered_logistic_loss


class BiTemperedLogisticLoss(nn.Module):
    """`bi_tempered_logistic_loss` with its options stored; replaces `torch.nn.CrossEntropyLoss`.

    >>> BiTemperedLogisticLoss(t1=0.8, t2=1.2)
    BiTemperedLogisticLoss(t1=0.8, t2=1.2)
    """

    weight: Tensor | None

    def __init__(
        self,
        t1: float,
        t2: float,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.t1, self.t2 = check_temperatures(t1, t2)
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
        )

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}"


class BiTemperedBinaryLogisticLoss(nn.Module):
    """`bi_tempered_binary_logistic_loss` with its options stored; replaces `torch.nn.BCEWithLogitsLoss`.

    >>> BiTemperedBinaryLogisticLoss(t1=0.5, t2=2.0)
    BiTemperedBinaryLogisticLoss(t1=0.5, t2=2.0)
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(
        self,
        t1: float,
        t2: float,
        weight: Tensor | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.t1, self.t2 = check_temperatures(t1, t2)
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
        )

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}"
