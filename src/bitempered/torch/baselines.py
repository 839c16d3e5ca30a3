"""Other robust losses, to compare with the bi-tempered loss.

They share the interface of `bi_tempered_logistic_loss`, except for their temperatures and factors. Each is defined for
a class label c, as l_c(logits). For class probabilities y (such as a smoothed label) and class weights w it is
sum_c w_c y_c l_c: the weighted loss of a label drawn from y, as in cross_entropy.

Autograd differentiates them, in log-probabilities, so neither large logits nor masked classes give NaN.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitempered import core
from bitempered.checks import check_number, check_temperature, check_temperatures
from bitempered.torch.autograd import encode, log_softmax_and_partition, xp
from bitempered.torch.checks import check_not_negative, check_target_values, checked_class_options
from bitempered.torch.functional import result_dtype
from bitempered.torch.reductions import reduce_classes

__all__ = [
    "generalized_cross_entropy",
    "mean_absolute_error",
    "symmetric_cross_entropy",
    "t_logistic_loss",
    "tsallis_logistic_loss",
]


def tsallis_logistic_loss(
    logits: Tensor,
    target: Tensor,
    t1: float,
    t2: float,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The two-temperature loss of the Tsallis divergence, -log_t1 p_c with p = `tempered_softmax(logits, t2)`.

    Bounded for t1 < 1, like the bi-tempered loss, but not proper: its expectation is not minimised at the true
    distribution. The other losses of this module build on its special cases.

    >>> tsallis_logistic_loss(torch.zeros(4), torch.tensor(0), t1=0.5, t2=2.0)
    tensor(1.)

    Reference: Amid, Warmuth, Srinivasan. Two-temperature Logistic Regression Based on the Tsallis Divergence.
    AISTATS 2019.
    """
    t1, t2 = check_temperatures(t1, t2)
    loss = _negative_log_t(t1, t2)
    return _expected_loss(
        logits, target, weight, loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def t_logistic_loss(
    logits: Tensor,
    target: Tensor,
    t: float,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The t-logistic loss, -log p_c with p = `tempered_softmax(logits, t)`, t >= 1: heavy-tailed, not bounded.

    >>> t_logistic_loss(torch.zeros(4), torch.tensor(0), t=1.5).exp()
    tensor(4.)

    Reference: Ding, Vishwanathan. t-Logistic Regression. NeurIPS 2010.
    """
    t = check_temperature(t, "t")
    if t < 1:
        raise ValueError(f"t must be at least 1, below which the loss is infinite outside a finite support; got {t}")
    loss = _negative_log_t(1.0, t)
    return _expected_loss(
        logits, target, weight, loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def generalized_cross_entropy(
    logits: Tensor,
    target: Tensor,
    q: float,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Generalized cross-entropy, (1 - p_c^q) / q with p = softmax(logits), 0 <= q <= 1: -log_{1-q} p_c.

    Cross-entropy at q = 0 (the limit), half of `mean_absolute_error` at q = 1. The reference uses q = 0.7.

    >>> generalized_cross_entropy(torch.zeros(4), torch.tensor(0), q=0.5)
    tensor(1.)

    Reference: Zhang, Sabuncu. Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels.
    NeurIPS 2018.
    """
    loss = _negative_log_t(1 - check_number(q, "q", 0, 1))
    return _expected_loss(
        logits, target, weight, loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def mean_absolute_error(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The absolute error summed over the classes, |e_c - p|_1 = 2 (1 - p_c), with p = softmax(logits).

    The scaling is the reference's: no division by the number of classes.

    >>> mean_absolute_error(torch.zeros(4), torch.tensor(0))
    tensor(1.5000)

    Reference: Ghosh, Kumar, Sastry. Robust Loss Functions under Label Noise for Deep Neural Networks. AAAI 2017.
    """

    def loss(logits: Tensor, axis: int) -> Tensor:
        return 2 * _negative_log_t(0.0)(logits, axis)

    return _expected_loss(
        logits, target, weight, loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def symmetric_cross_entropy(
    logits: Tensor,
    target: Tensor,
    alpha: float,
    beta: float,
    log_zero: float = -4.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """alpha times cross-entropy plus beta times its reverse, -alpha log p_c - beta A (1 - p_c), p = softmax(logits).

    A is `log_zero`, which replaces log 0 in the reverse cross-entropy -sum_k p_k log e_k of the one-hot e; it is then
    -A (1 - p_c). The reference uses alpha = 0.1 and beta = 1 on CIFAR-10, 6 and 0.1 on CIFAR-100.

    >>> symmetric_cross_entropy(torch.zeros(4), torch.tensor(0), alpha=0.0, beta=1.0)
    tensor(3.)

    Reference: Wang, Ma, Chen, Luo, Yi, Bailey. Symmetric Cross Entropy for Robust Learning with Noisy Labels.
    ICCV 2019.
    """
    alpha, beta = check_number(alpha, "alpha", 0), check_number(beta, "beta", 0)
    log_zero = check_number(log_zero, "log_zero", most=0)

    def loss(logits: Tensor, axis: int) -> Tensor:
        log_p, _ = log_softmax_and_partition(logits, 1.0, axis)
        reverse = beta * log_zero * core.phi(log_p, 1.0, xp=xp)
        return reverse - alpha * log_p if alpha else reverse  # 0 times the infinite -log p of a masked class is NaN

    return _expected_loss(
        logits, target, weight, loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def _negative_log_t(t1: float, t2: float = 1.0) -> Callable[[Tensor, int], Tensor]:
    """-log_t1 p_c for every class c, p = `tempered_softmax` at t2, as a function of the logits and their class axis."""

    def loss(logits: Tensor, axis: int) -> Tensor:
        log_p, _ = log_softmax_and_partition(logits, t2, axis)
        return -core.phi(log_p, 1 - t1, xp=xp)

    return loss


def _expected_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, loss: Callable[[Tensor, int], Tensor], **options: Any
) -> Tensor:
    """sum_c w_c y_c loss(logits)_c, validated and reduced as in our loss, whose temperatures have no effect here."""
    target, checked = checked_class_options(logits, target, weight, t1=1.0, t2=1.0, **options, rescale=False)
    axis = checked.axis
    check_target_values(target, logits.shape[axis], checked)
    check_not_negative(weight, "weight")
    _, encoded, _ = encode(logits, target, weight, checked)
    share = encoded.total * encoded.q
    losses = torch.where(share == 0, 0.0, share * loss(logits, axis)).sum(axis)
    return reduce_classes(losses, target, weight, checked).to(result_dtype(logits))
