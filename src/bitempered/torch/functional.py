"""The public functions: they check, call the differentiable operations, and reduce."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bitempered import core, kernels
from bitempered.checks import check_temperature, check_temperatures
from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.targets import bad_index, value_range
from bitempered.torch.autograd import (
    compute_dtype,
    device_softmax,
    fused_loss,
    log_softmax_and_partition,
    loss_per_example,
    mean_divisor,
    xp,
)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def log_t(x: Tensor, t: float) -> Tensor:
    """The tempered logarithm, (x^(1-t) - 1) / (1 - t); the natural one at t = 1.

    Increasing and concave; bounded below by -1 / (1 - t) for t < 1.

    Args:
        x: any shape; NaN where negative.
        t: the temperature, a finite number >= 0.

    >>> log_t(torch.tensor([0.25, 1.0, 4.0]), 0.5)
    tensor([-1.,  0.,  2.])
    """
    t = check_temperature(t, "t")
    _check_floating(x, "x")
    wide = x.to(compute_dtype(x.dtype))
    if t >= 1:
        return core.log_t(wide, t, xp=xp).to(x.dtype)
    # At x = 0 the chain rule through log is 0 times inf; the power itself has the derivative x^-t.
    zero = wide == 0
    at_zero = (torch.where(zero, wide, 1.0) ** (1 - t) - 1) / (1 - t)
    return torch.where(zero, at_zero, core.log_t(torch.where(zero, 1.0, wide), t, xp=xp)).to(x.dtype)


def exp_t(x: Tensor, t: float) -> Tensor:
    """The tempered exponential, [1 + (1-t) x]_+^(1/(1-t)); the natural one at t = 1.

    The inverse of `log_t`. For t > 1 its tail is heavier than that of exp, and it is infinite from 1 / (t - 1) on; for
    t < 1 it is 0 below -1 / (1 - t), where its derivative is the one from below.

    Args:
        x: any shape.
        t: the temperature, a finite number >= 0.

    >>> exp_t(torch.tensor([-3.0, 0.0, 2.0]), 0.5)
    tensor([0., 1., 4.])
    """
    t = check_temperature(t, "t")
    _check_floating(x, "x")
    return core.exp_t(x.to(compute_dtype(x.dtype)), t, xp=xp).to(x.dtype)


def log_partition(logits: Tensor, t: float, dim: int = -1) -> Tensor:
    """lambda_t(logits), the number that makes exp_t(logits - lambda_t) sum to 1 along `dim`.

    Log-sum-exp at t = 1. Its gradient is the escort distribution, p^t / sum(p^t); exactly at the edge of a support, for
    t = 0, the one from outside. Infinite where it overflows the dtype, which happens for t far above 1.

    Returns:
        The shape of `logits` without `dim`.

    >>> log_partition(torch.zeros(4), 2.0)
    tensor(3.)
    """
    return _softmax(logits, t, dim, "partition")


def tempered_log_softmax(logits: Tensor, t: float, dim: int = -1) -> Tensor:
    """The natural logarithm of `tempered_softmax`, computed without forming it; -inf outside a finite support (t < 1).

    >>> tempered_log_softmax(torch.zeros(4), 1.2).exp()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return _softmax(logits, t, dim, "logarithms")


def tempered_softmax(logits: Tensor, t: float, dim: int = -1) -> Tensor:
    """exp_t(logits - lambda_t(logits)): the probabilities of a model trained with temperature t2 = t.

    Softmax at t = 1; a heavier tail for t > 1; sparse for t < 1 (sparsemax at t = 0). Logits of -inf get probability 0,
    as do those further below the largest than the dtype's largest number. Exactly at the edge of a support the
    derivative is the one from outside, where that differs (t = 0); the losses take the one from inside.

    Args:
        logits: any shape.
        t: the temperature, a finite number >= 0.
        dim: the dimension that sums to 1.

    >>> tempered_softmax(torch.tensor([4.0, 2.0, 0.0]), 0.0)
    tensor([1., 0., 0.])
    """
    return _softmax(logits, t, dim, "probabilities")


def tempered_sigmoid(logits: Tensor, t: float) -> Tensor:
    """The probability of the positive class, tempered_softmax([0, a])[1] for each logit a; the sigmoid at t = 1.

    >>> tempered_sigmoid(torch.zeros(2), 1.5)
    tensor([0.5000, 0.5000])
    """
    _check_floating(logits, "logits")
    pairs = torch.stack((torch.zeros_like(logits), logits), dim=-1)
    return tempered_softmax(pairs, t, dim=-1)[..., 1]


def bi_tempered_logistic_loss(
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
    r"""The robust bi-tempered logistic loss, with the arguments and the manners of `torch.nn.functional.cross_entropy`.

    With y_hat = `tempered_softmax(logits, t2)`, the loss of one example is the Bregman divergence

    .. math:: \sum_i y_i (\log_{t_1} y_i - \log_{t_1} \hat y_i) - \frac{1}{2-t_1} (y_i^{2-t_1} - \hat y_i^{2-t_1}).

    It is 0 exactly at y = y_hat. At t1 = t2 = 1 it is the cross-entropy, less the entropy of the target.

    Args:
        logits: (C), (N, C) or (N, C, d1, ...), in float16, bfloat16, float32 or float64. -inf masks a class.
        target: class indices of any integer dtype, shaped like `logits` without C; or class probabilities in a
            floating dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        weight: (C), not negative, one weight per class: with W = sum(w y), the loss is W times that of w y / W. Of
            class indices without smoothing only the weights of the targets are looked at, as in `cross_entropy`.
        ignore_index: a class index that counts for nothing. Not with class probabilities.
        reduction: "none", "sum" or "mean", which divides as `cross_entropy` does: by the summed weights of the targets
            for class indices, by the number of examples for class probabilities.
        label_smoothing: e in [0, 1] makes y into (1 - e) y + e / C.

    Returns:
        A scalar, or for "none" the shape of `logits` without C. The dtype is that of `logits`, float32 under autocast.

    Class indices, probabilities and the sign of weights are checked by value on CPU, and by a device-side assert on
    CUDA (there of the weights in use alone); not under vmap, compile, export and graph capture.

    >>> logits = torch.tensor([[4.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    >>> bi_tempered_logistic_loss(logits, torch.tensor([0, 2]), t1=0.8, t2=1.2, reduction="none")
    tensor([0.0509, 3.2077])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """
    return class_loss(logits, target, t1, t2, weight, ignore_index, reduction, label_smoothing)


def class_loss(
    logits: Tensor,
    target: Tensor,
    t1: float,
    t2: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`bi_tempered_logistic_loss`, in `dtype` if one is given."""
    target, options = _options(logits, target, t1, t2, weight, ignore_index, reduction, label_smoothing)
    dtype = dtype or result_dtype(logits)
    kernel = kernels.choose(logits, target, options.axis)
    if kernel == "triton":  # it asserts values on the device
        return fused_loss(kernel, logits, target, weight, options, dtype)
    check_not_negative(weight, "weight")
    if kernel == "cpu":  # it checks class indices itself
        return fused_loss(kernel, logits, target, weight, options, dtype)
    t1, t2, axis, label_smoothing, ignore_index, reduction = options
    _check_target_values(target, logits.shape[axis], axis, ignore_index)
    losses = loss_per_example(logits, target, weight, t1, t2, axis, label_smoothing, ignore_index)
    return reduce_classes(losses, target, weight, ignore_index, reduction).to(dtype)


_checked = Memo()


def _options(
    logits: Tensor,
    target: Tensor,
    t1: float,
    t2: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Tensor, LossOptions]:
    """Raises where arguments do not fit, but for the target's values; the target (indices as int64) and the options.

    Arguments like those of an earlier call fit as they did: a training loop asks the same thousands of times.
    """
    key: Any = None
    if not torch.compiler.is_compiling():
        try:
            of_weight = None if weight is None else (weight.shape, weight.dtype, weight.device, weight.requires_grad)
            key = (
                logits.shape, logits.dtype, logits.device, target.shape, target.dtype, target.device, of_weight,
                t1, t2, ignore_index, reduction, label_smoothing,
                type(t1), type(t2), type(ignore_index), type(label_smoothing),  # 1.0 equals 1, and may not be allowed
            )  # fmt: skip
            found = _checked.get(key)
            if found is not None:
                return _as_target(target), found
        except (AttributeError, TypeError):  # no tensors, or nothing to look up by: the checks below say what is wrong
            key = None
    t1, t2 = check_temperatures(t1, t2)
    target, axis = _check_arguments(logits, target, weight, ignore_index, reduction, label_smoothing)
    options = LossOptions(t1, t2, axis, float(label_smoothing), ignore_index, reduction)
    if key is not None:
        _checked.keep(key, options)
    return target, options


def _as_target(target: Tensor) -> Tensor:
    return target if target.dtype == torch.int64 or target.is_floating_point() else target.long()


def bi_tempered_binary_logistic_loss(
    logits: Tensor,
    target: Tensor,
    t1: float,
    t2: float,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`bi_tempered_logistic_loss` of each logit against 0, in the manners of `binary_cross_entropy_with_logits`.

    A logit a with target y is the two-class problem with logits (0, a) and probabilities (1 - y, y).

    Args:
        logits: any shape, in float16, bfloat16, float32 or float64.
        target: probabilities of the positive class in [0, 1], of any dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the sigmoid, t2 >= t1. Above 1 its tail is heavy.
        weight: multiplies each loss; not negative; broadcasts to the shape of `logits`.
        pos_weight: the class weights (1, pos_weight); not negative; broadcasts to the shape of `logits`.
        reduction: "none", "sum" or "mean" over all elements.

    Returns:
        A scalar, or for "none" the shape of `logits`. The dtype is that of `logits`, float32 under autocast.

    >>> bi_tempered_binary_logistic_loss(torch.tensor([-8.0, 8.0]), torch.zeros(2), t1=0.5, t2=2.0, reduction="none")
    tensor([0.0304, 1.2555])
    """
    t1, t2 = check_temperatures(t1, t2)
    check_reduction(reduction)
    _check_floating(logits, "logits")
    _check_tensor(target, "target")
    if target.shape != logits.shape:
        raise ValueError(f"target must have the shape of logits, {tuple(logits.shape)}, got {tuple(target.shape)}")
    if target.is_complex():
        raise RuntimeError(f"target must be real, got {target.dtype}")
    for name, value in (("weight", weight), ("pos_weight", pos_weight)):
        _check_weight(value, name, logits.device)
        if value is not None and not _broadcasts(value, logits):
            raise RuntimeError(
                f"{name} must broadcast to the shape of logits, {tuple(logits.shape)}, got {tuple(value.shape)}"
            )
        check_not_negative(value, name)
    _check_values(
        target,
        lambda: (target >= 0) & (target <= 1),
        lambda: ValueError(f"target must be probabilities in [0, 1], got {value_range(target)}"),
    )
    kernels.choose(logits, target, None)  # raises where a kernel is forced: none computes this loss
    if pos_weight is not None:
        pos_weight = pos_weight.expand_as(logits)
    losses = loss_per_example(logits, target, pos_weight, t1, t2, None)
    if weight is not None:
        losses = torch.where(weight == 0, 0.0, losses * weight)  # 0 times an infinite loss is 0
    return _reduce(losses, reduction).to(result_dtype(logits))


def check_classes(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Tensor, int]:
    """Raises where the arguments of a loss over classes do not fit; the target (indices as int64) and the axis."""
    target, axis = _check_arguments(logits, target, weight, ignore_index, reduction, label_smoothing)
    _check_target_values(target, logits.shape[axis], axis, ignore_index)
    check_not_negative(weight, "weight")
    return target, axis


def _check_arguments(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Tensor, int]:
    """`check_classes`, but for values: those of the target, and whether a weight is negative."""
    check_options(ignore_index, reduction, label_smoothing)
    _check_floating(logits, "logits")
    axis = min(1, logits.dim() - 1)
    _check_class_axis(logits, axis)
    target = _check_target(logits, target, axis, ignore_index)
    _check_weight(weight, "weight", logits.device)
    if weight is not None and weight.shape != logits.shape[axis : axis + 1]:
        raise RuntimeError(
            f"weight must have one entry for each of the {logits.shape[axis]} classes, got shape {tuple(weight.shape)}"
        )
    return target, axis


def reduce_classes(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The reduction of `cross_entropy`: a mean over class indices divides by the summed weights of the targets."""
    if reduction == "mean" and not target.is_floating_point():
        divisor, empty = mean_divisor(target, weight, ignore_index, losses.dtype)
        return torch.where(empty, math.nan, losses.sum() / divisor)
    return _reduce(losses, reduction)


def _softmax(logits: Tensor, t: float, dim: int, what: str) -> Tensor:
    """The "probabilities", their "logarithms", or the "partition" that normalises them."""
    t = check_temperature(t, "t")
    _check_floating(logits, "logits")
    if logits.dim() and not -logits.dim() <= dim < logits.dim():
        raise IndexError(f"dim must be in [{-logits.dim()}, {logits.dim() - 1}] for this shape, got {dim}")
    _check_class_axis(logits, dim)
    axis = dim % logits.dim()
    if kernels.choose(logits, None, axis) == "triton":
        return device_softmax(logits, t, axis, what, result_dtype(logits))
    log_p, partition = log_softmax_and_partition(logits, t, axis)
    if what == "partition":
        return partition.squeeze(axis).to(result_dtype(logits))
    return (log_p.exp() if what == "probabilities" else log_p).to(result_dtype(logits))


def result_dtype(logits: Tensor) -> torch.dtype:
    if logits.dtype == torch.float32:  # under autocast as well
        return logits.dtype
    kind = "cuda" if logits.is_cuda else logits.device.type  # the name of a device takes as long as all the rest
    if kind != "meta" and torch.is_autocast_enabled(kind):  # torch knows no autocast for meta tensors, and says so
        return compute_dtype(logits.dtype)
    return logits.dtype


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'reduction must be "none", "mean" or "sum", got {reduction!r}')


def check_options(ignore_index: int, reduction: str, label_smoothing: float) -> None:
    check_reduction(reduction)
    if not isinstance(label_smoothing, Real) or not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0 and 1, got {label_smoothing!r}")
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")


def check_class_weight(weight: Tensor | None, name: str) -> None:
    """What can be said of class weights before there are logits."""
    check_weight(weight, name)
    if weight is not None and weight.dim() != 1:
        raise RuntimeError(f"{name} must have one dimension, with an entry for each class, got {tuple(weight.shape)}")


def check_weight(weight: Tensor | None, name: str) -> None:
    _check_weight(weight, name, None)
    check_not_negative(weight, name)


def check_not_negative(weight: Tensor | None, name: str) -> None:
    """A ValueError for a negative weight; NaN and infinity are for the loss to deal with, as in torch."""
    if weight is None or weight.numel() == 0:
        return
    # The first question costs least, but a NaN among the weights hides the smallest.
    if weight.is_cpu and _holds(weight, lambda: weight.min() >= 0):
        return
    if not _holds(weight, lambda: ~(weight < 0).any()):
        raise ValueError(f"{name} must not be negative, got {weight[weight < 0].min().item():g}")


def _check_tensor(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _check_floating(x: Tensor, name: str) -> None:
    _check_tensor(x, name)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise RuntimeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def _check_class_axis(logits: Tensor, axis: int) -> None:
    if logits.dim() == 0 or logits.shape[axis] == 0:
        raise ValueError(f"logits must have a class dimension of at least one class, got shape {tuple(logits.shape)}")


def _check_weight(weight: Tensor | None, name: str, device: torch.device | None) -> None:
    if weight is None:
        return
    _check_floating(weight, name)
    if weight.requires_grad:
        raise RuntimeError(f"{name} cannot require a gradient: the loss is not differentiated in it; detach it")
    if device is not None and weight.device != device:
        raise RuntimeError(f"{name} is on {weight.device} and logits on {device}: they must be on one device")


def _check_target(logits: Tensor, target: Tensor, axis: int, ignore_index: int) -> Tensor:
    """The target, class indices as int64; raises where it does not fit `logits`, whatever its values."""
    _check_tensor(target, "target")
    if target.device != logits.device:
        raise RuntimeError(f"target is on {target.device} and logits on {logits.device}: they must be on one device")
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    indices = target.dtype in _INTEGERS
    if not indices and not target.is_floating_point():
        raise RuntimeError(f"target must hold class indices (integers) or probabilities (floats), got {target.dtype}")
    if target.shape != (rows if indices else logits.shape):
        expected = (
            f"target must be class indices (integers) of shape {tuple(rows)} or class probabilities (floats) of shape"
            f" {tuple(logits.shape)}, got {target.dtype} of shape {tuple(target.shape)}"
        )
        # The shape of the other kind means that only the dtype is wrong; as in torch that is a RuntimeError.
        raise (RuntimeError if target.shape in (rows, logits.shape) else ValueError)(expected)
    if not indices and ignore_index >= 0:
        raise RuntimeError(f"ignore_index is for class indices, got {ignore_index} with class probabilities")
    return _as_target(target)


def _check_target_values(target: Tensor, classes: int, axis: int, ignore_index: int) -> None:
    if not target.is_floating_point():
        _check_values(
            target,
            lambda: ((target >= 0) & (target < classes)) | (target == ignore_index),
            lambda: bad_index(target, classes, ignore_index),
        )
        return
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 1e-2
    _check_values(
        target,
        lambda: (target >= 0).all(axis) & ((target.to(compute_dtype(target.dtype)).sum(axis) - 1).abs() <= tolerance),
        lambda: ValueError(
            f"target must hold probabilities in [0, 1] that sum to 1 within {tolerance} over the classes,"
            f" got {value_range(target)} and sums {value_range(target.to(compute_dtype(target.dtype)).sum(axis))}"
        ),
    )


def _check_values(x: Tensor, valid: Callable[[], Tensor], error: Callable[[], Exception]) -> None:
    """Raises `error` on CPU, asserts on the device on CUDA, does nothing where values cannot be looked at."""
    if not _holds(x, lambda: valid().all()):
        raise error()


def _holds(x: Tensor, claim: Callable[[], Tensor]) -> bool:
    """Whether a claim about the values of x is true. On CUDA it is asserted there, and taken for true here."""
    if torch.compiler.is_compiling():
        return True
    if x.device.type not in ("cpu", "cuda"):
        return True
    true = claim()
    try:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        if not x.is_cuda or not hasattr(torch, "_assert_async"):
            return bool(true)  # on CUDA this waits for the device
        torch._assert_async(true)
    except RuntimeError:  # vmap and tracing refuse to look at a value
        pass
    return True


def _broadcasts(x: Tensor, to: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(x.shape, to.shape) == to.shape
    except RuntimeError:
        return False
