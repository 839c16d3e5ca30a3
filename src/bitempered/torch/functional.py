"""The public functions, which validate, call the differentiable operations, and reduce."""

from typing import Any

import torch
from torch import Tensor

from bitempered import core, kernels
from bitempered.checks import check_temperature
from bitempered.encoding import rescaled, shifted, weigh_elements, with_exact_slopes
from bitempered.kernels.options import LossOptions
from bitempered.torch.autograd import (
    Temperature,
    along,
    compute_dtype,
    log_softmax_and_partition,
    loss_per_example,
    xp,
)
from bitempered.torch.checks import (
    check_all_classes,
    check_binary_values,
    check_class_axis,
    check_floating,
    check_not_negative,
    check_rescale,
    check_target_values,
    checked_binary_options,
    checked_class_options,
    number_if_known,
    temperature_per_example,
)
from bitempered.torch.kernel_autograd import (
    binary_loss_by_kernel,
    loss_by_kernel,
    sigmoid_by_kernel,
    softmax_by_kernel,
)
from bitempered.torch.reductions import reduce, reduce_classes
from bitempered.torch.sharded import (
    Agreement,
    Shards,
    agree,
    agreement,
    class_shards,
    raise_under_transforms,
    sharded_loss_per_example,
)

_PLAIN = (Tensor, torch.nn.Parameter)
_exact_slopes = with_exact_slopes(xp)


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
    check_floating(x, "x")
    return core.log_t(xp.widen(x), t, xp=_exact_slopes).to(x.dtype)


def exp_t(x: Tensor, t: float) -> Tensor:
    """The tempered exponential, [1 + (1-t) x]_+^(1/(1-t)); the natural one at t = 1.

    The inverse of `log_t`. For t > 1 its tail is heavier than that of exp, and it is infinite from 1 / (t - 1) on. For
    t < 1 it is 0 up to -1 / (1 - t), where its derivative is the left one.

    Args:
        x: any shape.
        t: the temperature, a finite number >= 0.

    >>> exp_t(torch.tensor([-3.0, 0.0, 2.0]), 0.5)
    tensor([0., 1., 4.])
    """
    t = check_temperature(t, "t")
    check_floating(x, "x")
    return core.exp_t(xp.widen(x), t, xp=xp).to(x.dtype)


def log_partition(logits: Tensor, t: Temperature, dim: int = -1) -> Tensor:
    """lambda_t(logits), the number that makes exp_t(logits - lambda_t) sum to 1 along `dim`.

    Log-sum-exp at t = 1. Its gradient is the escort distribution, p^t / sum(p^t); exactly at the edge of a support, for
    t = 0, it is the one from outside. Infinite where it overflows the dtype, which happens for t far above 1.

    Returns:
        The shape of `logits` without `dim`.

    >>> log_partition(torch.zeros(4), 2.0)
    tensor(3.)
    """
    return _softmax(logits, t, dim, "partition")


def tempered_log_softmax(logits: Tensor, t: Temperature, dim: int = -1) -> Tensor:
    """The natural logarithm of `tempered_softmax`, computed without forming it; -inf outside a finite support (t < 1).

    >>> tempered_log_softmax(torch.zeros(4), 1.2).exp()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return _softmax(logits, t, dim, "logarithms")


def tempered_softmax(logits: Tensor, t: Temperature, dim: int = -1) -> Tensor:
    """exp_t(logits - lambda_t(logits)): the probabilities of a model trained with temperature t2 = t.

    Softmax at t = 1; a heavier tail for t > 1; sparse for t < 1 (sparsemax at t = 0). Logits of -inf get probability 0,
    and those whose distance from the largest overflows the dtype may. Exactly at the edge of a support the derivative
    for t = 0 is the one from outside; the losses take the one from inside.

    Args:
        logits: any shape.
        t: the temperature, a finite number >= 0, or a tensor of such numbers that broadcasts to the shape of `logits`
            without `dim`. A tensor may have a gradient.
        dim: the dimension that sums to 1.

    >>> tempered_softmax(torch.tensor([4.0, 2.0, 0.0]), 0.0)
    tensor([1., 0., 0.])
    """
    return _softmax(logits, t, dim, "probabilities")


def tempered_sigmoid(logits: Tensor, t: Temperature) -> Tensor:
    """The probability of the positive class, tempered_softmax([0, a])[1] for each logit a; the sigmoid at t = 1.

    >>> tempered_sigmoid(torch.zeros(2), 1.5)
    tensor([0.5000, 0.5000])
    """
    check_floating(logits, "logits")
    t = number_if_known(temperature_per_example(t, logits, logits.shape))
    kernel = kernels.choose(logits, None, temperatures=(t,), binary=True)
    if kernel != "core":
        return sigmoid_by_kernel(kernel, logits, t, result_dtype(logits))
    pairs = torch.stack((torch.zeros_like(logits), logits), dim=-1)
    return tempered_softmax(pairs, t, dim=-1)[..., 1]


def bi_tempered_logistic_loss(
    logits: Tensor,
    target: Tensor,
    t1: Temperature,
    t2: Temperature,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    rescale: bool = False,
    group: Any = None,
) -> Tensor:
    r"""The robust bi-tempered logistic loss, with the interface of `torch.nn.functional.cross_entropy`.

    With y_hat = `tempered_softmax(logits, t2)`, the loss of one example is the Bregman divergence

    .. math:: \sum_i y_i (\log_{t_1} y_i - \log_{t_1} \hat y_i) - \frac{1}{2-t_1} (y_i^{2-t_1} - \hat y_i^{2-t_1}).

    It is 0 exactly at y = y_hat. At t1 = t2 = 1 it is the cross-entropy minus the entropy of the target.

    Args:
        logits: (C), (N, C) or (N, C, d1, ...), in float16, bfloat16, float32 or float64. -inf masks a class.
        target: class indices of any integer dtype, shaped like `logits` without C; or class probabilities in a
            floating dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        weight: (C), not negative, one weight per class: with W = sum(w y), the loss is W times that of w y / W. For
            class indices without smoothing only the weights of the targets matter, as in `cross_entropy`.
        ignore_index: a class index whose examples are ignored. Not with class probabilities.
        reduction: "none", "sum" or "mean", which divides as `cross_entropy` does: by the summed weights of the targets
            for class indices, by the number of examples for class probabilities.
        label_smoothing: e in [0, 1] turns y into (1 - e) y + e / C.
        rescale: use C^(1-t1) times the loss of C^(t2-1) logits, which starts to learn as cross-entropy does at the same
            learning rate, whatever the temperatures. Probabilities are then tempered_softmax(C^(t2-1) logits, t2).
        group: a torch.distributed.ProcessGroup over which the classes of the logits are split, in the order of the
            ranks. Shards may differ in size, and one may be empty. Class indices count over all classes. They, `weight`
            (which is whole) and the options are equal on every process; class probabilities are sharded as the logits
            are. Every process returns the same loss and gets the gradient of its own shard. A DTensor that is sharded
            on its class dimension needs no group. docs/scale.md says what this costs.

    Each temperature may be a tensor, with or without a gradient, that broadcasts to the shape of the unreduced loss.

    Returns:
        A scalar, or for "none" the shape of `logits` without C. The dtype is that of `logits`, float32 under autocast.

    Class indices, probabilities, tensor temperatures and the signs of weights are checked on CPU, and by a device-side
    assert on CUDA (which sees only the weights in use); not under vmap, compile, export and graph capture. Invalid
    temperatures give NaN under vmap, compile and export.

    >>> logits = torch.tensor([[4.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    >>> bi_tempered_logistic_loss(logits, torch.tensor([0, 2]), t1=0.8, t2=1.2, reduction="none")
    tensor([0.0509, 3.2077])

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """
    if group is not None or (type(logits) not in _PLAIN and not torch.compiler.is_compiling()):
        parts = class_shards(logits, target, weight, group)
        if parts is not None:
            loss = _loss_over_processes(
                *parts.tensors, parts.group, rescale=rescale, t1=t1, t2=t2, ignore_index=ignore_index,
                reduction=reduction, label_smoothing=label_smoothing,
            )  # fmt: skip
            return parts.wrap(loss)
    target, options = checked_class_options(
        logits, target, weight, t1=t1, t2=t2, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, rescale=rescale,
    )  # fmt: skip
    return class_loss(logits, target, weight, options, result_dtype(logits))


def class_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> Tensor:
    """`bi_tempered_logistic_loss` of validated arguments, whose values are checked here."""
    options, temperatures = _with_known_numbers(options)
    kernel = kernels.choose(logits, target, temperatures=temperatures)
    if weight is not None and kernel != "triton":  # the Triton kernels assert values on the device
        check_not_negative(weight, "weight")
    if kernel != "core":  # "cpu" checks class indices itself
        return loss_by_kernel(kernel, logits, target, weight, options, dtype)
    t1, t2, axis = options.t1, options.t2, options.axis
    check_target_values(target, logits.shape[axis], options)
    outer: Temperature = 1.0
    if options.rescale:
        logits, outer = _rescaled(logits, classes=logits.shape[axis], t1=t1, t2=t2, axis=axis)
    losses = loss_per_example(logits, target, weight, options)
    losses = losses * outer if options.rescale else losses
    return reduce_classes(losses, target, weight, options).to(dtype)


def _with_known_numbers(options: LossOptions) -> tuple[LossOptions, tuple[Temperature, ...]]:
    """Return the options with numbers for the temperatures that are known, and both temperatures, or () for numbers."""
    if type(options.t1) is float and type(options.t2) is float:  # quicker than checking for tensors
        return options, ()
    options = options._replace(t1=number_if_known(options.t1), t2=number_if_known(options.t2))
    return options, (options.t1, options.t2)


def _loss_over_processes(
    logits: Tensor, target: Tensor, weight: Tensor | None, group: Any, *, rescale: bool, **of_call: Any
) -> Tensor:
    raise_under_transforms(logits, target)

    def prepare() -> tuple[Agreement, tuple[Tensor, LossOptions]]:
        checked, options = checked_class_options(logits, target, weight, rescale=rescale, shard=True, **of_call)
        classes = logits.shape[options.axis]
        return agreement(logits, checked, weight, options, classes=classes, extra=rescale), (checked, options)

    shards, (target, options) = agree(group, prepare)
    check_all_classes(shards.total, target, weight, options, rescale=rescale)
    return sharded_class_loss(logits, target, weight, options, shards, result_dtype(logits))


def sharded_class_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    shards: Shards,
    dtype: torch.dtype,
) -> Tensor:
    """`class_loss` of a shard of the logits, on which the processes agree."""
    outer: Temperature = 1.0
    if options.rescale:
        t2 = options.t2.detach() if isinstance(options.t2, Tensor) else options.t2
        logits, outer = _rescaled(logits, classes=shards.total, t1=options.t1, t2=t2, axis=options.axis)
    losses = sharded_loss_per_example(logits, target, weight, options, shards, rescaled=options.rescale)
    losses = losses * outer if options.rescale else losses
    return reduce_classes(losses, target, weight, options).to(dtype)


def _rescaled(
    logits: Tensor, *, classes: int, t1: Temperature = 1.0, t2: Temperature, axis: int | None
) -> tuple[Tensor, Temperature]:
    """`rescaled` logits, in the dtype to compute in, and the factor of each example's loss.

    They are not shifted if other processes have more classes.
    """
    a = xp.widen(logits)
    shift_axis = None if axis is None or logits.shape[axis] < classes else axis
    if isinstance(t2, Tensor) or torch.compiler.is_compiling():
        along_classes = t2 if axis is None else along(t2, axis)
        return rescaled(a, t1, along_classes, classes=classes, axis=shift_axis, xp=xp)
    inner, outer = core.scales(classes, t1, t2)
    return (a if shift_axis is None else shifted(a, axis=shift_axis, xp=xp)) * inner, outer


def probabilities(logits: Tensor, t2: Temperature, *, axis: int, rescale: bool) -> Tensor:
    """The probabilities of a model trained with temperature t2: `tempered_softmax` of its logits, rescaled or not."""
    check_floating(logits, "logits")
    check_class_axis(logits, axis)
    if not rescale:
        return tempered_softmax(logits, t2, axis)
    axis %= logits.dim()
    t2 = temperature_per_example(t2, logits, logits.shape[:axis] + logits.shape[axis + 1 :])
    check_rescale(rescale, logits.shape[axis], t2)
    scaled, _ = _rescaled(logits, classes=logits.shape[axis], t2=t2, axis=axis)
    return tempered_softmax(scaled, t2, axis).to(result_dtype(logits))


def binary_probabilities(logits: Tensor, t2: Temperature, *, rescale: bool) -> Tensor:
    """`probabilities` of the positive class, for logits against 0."""
    check_floating(logits, "logits")
    if not rescale:
        return tempered_sigmoid(logits, t2)
    t2 = temperature_per_example(t2, logits, logits.shape)
    check_rescale(rescale, 2, t2)
    scaled, _ = _rescaled(logits, classes=2, t2=t2, axis=None)
    return tempered_sigmoid(scaled, t2).to(result_dtype(logits))


def bi_tempered_binary_logistic_loss(
    logits: Tensor,
    target: Tensor,
    t1: Temperature,
    t2: Temperature,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
    rescale: bool = False,
) -> Tensor:
    """`bi_tempered_logistic_loss` of each logit against 0, in the style of `binary_cross_entropy_with_logits`.

    A logit a with target y is the two-class problem with logits (0, a) and probabilities (1 - y, y).

    Args:
        logits: any shape, in float16, bfloat16, float32 or float64.
        target: probabilities of the positive class in [0, 1], of any dtype, shaped like `logits`.
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the sigmoid, t2 >= t1. Above 1 its tail is heavy.
        weight: multiplies each loss; not negative; broadcasts to the shape of `logits`.
        pos_weight: the class weights (1, pos_weight); not negative; broadcasts to the shape of `logits`.
        reduction: "none", "sum" or "mean" over all elements.
        rescale: as in `bi_tempered_logistic_loss`, with two classes.

    Each temperature may be a tensor, with or without a gradient, that broadcasts to the shape of `logits`.

    Returns:
        A scalar, or for "none" the shape of `logits`. The dtype is that of `logits`, float32 under autocast.

    >>> bi_tempered_binary_logistic_loss(torch.tensor([-8.0, 8.0]), torch.zeros(2), t1=0.5, t2=2.0, reduction="none")
    tensor([0.0304, 1.2555])
    """
    options = checked_binary_options(
        logits, target, weight, pos_weight, t1=t1, t2=t2, reduction=reduction, rescale=rescale
    )
    options, temperatures = _with_known_numbers(options)
    kernel = kernels.choose(logits, target, temperatures=temperatures, binary=True)
    if kernel != "triton":  # the Triton kernel asserts values on the device
        check_binary_values(target, weight, pos_weight)
    if kernel != "core":
        return binary_loss_by_kernel(kernel, logits, target, pos_weight, weight, options, result_dtype(logits))
    if pos_weight is not None:
        pos_weight = pos_weight.expand_as(logits)
    outer: Temperature = 1.0
    a = logits
    if rescale:
        a, outer = _rescaled(logits, classes=2, t1=options.t1, t2=options.t2, axis=None)
    losses = loss_per_example(a, target, pos_weight, options)
    losses = losses * outer if rescale else losses
    if weight is not None:
        losses = weigh_elements(losses, weight, xp=xp)
    return reduce(losses, reduction).to(result_dtype(logits))


def _softmax(logits: Tensor, t: Temperature, dim: int, what: str) -> Tensor:
    """The "probabilities", their "logarithms", or the "partition" that normalises them."""
    check_floating(logits, "logits")
    if logits.dim() and not -logits.dim() <= dim < logits.dim():
        raise IndexError(f"dim must be in [{-logits.dim()}, {logits.dim() - 1}] for this shape, got {dim}")
    check_class_axis(logits, dim)
    axis = dim % logits.dim()
    t = number_if_known(temperature_per_example(t, logits, logits.shape[:axis] + logits.shape[axis + 1 :]))
    kernel = kernels.choose(logits, None, temperatures=(t,))
    if kernel != "core":
        return softmax_by_kernel(kernel, logits, t, axis, what, result_dtype(logits))
    log_p, partition = log_softmax_and_partition(logits, t, axis)
    if what == "partition":
        return partition.squeeze(axis).to(result_dtype(logits))
    return (log_p.exp() if what == "probabilities" else log_p).to(result_dtype(logits))


def result_dtype(logits: Tensor) -> torch.dtype:
    if logits.dtype == torch.float32:  # under autocast as well
        return logits.dtype
    kind = "cuda" if logits.is_cuda else logits.device.type  # reading device.type is slow
    if kind != "meta" and torch.is_autocast_enabled(kind):  # torch raises for meta tensors: they have no autocast
        return compute_dtype(logits.dtype)
    return logits.dtype
