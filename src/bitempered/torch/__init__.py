"""The bi-tempered logistic loss for PyTorch: functions in the style of `torch.nn.functional`, and modules."""

from bitempered.extras import install as _install

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"bitempered.torch needs PyTorch: {_install('torch')}") from None

from bitempered.torch import baselines
from bitempered.torch.functional import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    exp_t,
    log_partition,
    log_t,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)
from bitempered.torch.linear import LinearBiTemperedLogisticLoss, linear_bi_tempered_logistic_loss
from bitempered.torch.modules import BiTemperedBinaryLogisticLoss, BiTemperedLogisticLoss, LearnableTemperatures

__all__ = [
    "BiTemperedBinaryLogisticLoss",
    "BiTemperedLogisticLoss",
    "LearnableTemperatures",
    "LinearBiTemperedLogisticLoss",
    "baselines",
    "bi_tempered_binary_logistic_loss",
    "bi_tempered_logistic_loss",
    "exp_t",
    "linear_bi_tempered_logistic_loss",
    "log_partition",
    "log_t",
    "tempered_log_softmax",
    "tempered_sigmoid",
    "tempered_softmax",
]
