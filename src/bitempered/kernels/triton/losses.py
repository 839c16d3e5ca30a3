"""The loss and its gradient: choosing a kernel and its arguments."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitempered.checks import sum_tolerance
from bitempered.kernels.layout import as_blocks
from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton.label_loss import divisor_kernel, label_gradient_kernel, loss_kernel
from bitempered.kernels.triton.launch import (
    ASSERTING_OPTIONS,
    COMPILER_OPTIONS,
    DIRECT,
    FAST_MATH,
    launch_kernel,
    on_device_of,
    temperature_arguments,
    temperature_constants,
)
from bitempered.kernels.triton.soft_loss import soft_gradient_kernel, soft_loss_kernel
from bitempered.kernels.triton.tiles import count_tiles, tile_for

_COUNTED_BY_EACH = 4096  # up to this many targets, counting them in every program is faster than one more launch
_COUNTED_BY_ONE = 65536  # beyond this many targets, counting them in one program is slower than by many and a sum
_COUNT = 4096  # targets that such a program reads at once
_REGISTERS = 64  # per thread in the pass over long rows: spills cost less than more warps gain
_plans = Memo()


class _Plan(NamedTuple):
    """What the launches of a call repeat from an earlier one like it."""

    launch: Any
    pattern: Tensor  # of the losses: shape, dtype and device
    strides: tuple[int, ...]
    into_strides: tuple[int, ...]
    target_strides: tuple[int, ...]  # none for `loss_kernel`
    values: tuple[Any, ...]  # the arguments of the kernel from `state_ptr` on
    count: Any  # launches `divisor_kernel` and has its last arguments; None if the divisor is not counted apart
    counters: tuple[int, ...]  # the shape of what that leaves, for torch to add up
    targets: tuple[int, ...]  # the sizes that `divisor_kernel` takes


def loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype, into: Tensor | None
) -> Tensor:
    """The loss in `dtype`; its gradient goes `into` an `empty_gradient`.

    Calls `_compute`, or the plan of an earlier call like this one: for small batches launching takes most of the time.
    """
    x, labels = logits.data_ptr(), target.data_ptr()
    made = x if into is None else into.data_ptr()
    key: Any = None
    numbers = not (isinstance(options.t1, Tensor) or isinstance(options.t2, Tensor))
    if DIRECT and numbers and weight is None and (x | made | labels) % 16 == 0:
        device = logits.get_device()
        if device == torch.cuda.current_device():
            key = (
                options, dtype, device, logits.dtype, logits.shape, logits.stride(), target.dtype, target.stride(),
                into is None,
            )  # fmt: skip
        plan = _plans.get(key)  # there is none for None
        if plan is not None:
            launch, pattern, strides, into_strides, target_strides, values, count, counters, targets = plan
            losses = torch.empty_like(pattern)
            total = None
            # Addresses: Triton would ask every tensor for its own, which takes time.
            if count is not None:
                launch_count, constants = count
                divisor = torch.empty(counters, dtype=torch.float32, device=logits.device)
                launch_count(labels, None, divisor.data_ptr(), *targets, *constants)
                divisor = divisor.sum() if counters else divisor
                total = divisor.data_ptr()
            launch(
                x, *strides, made, *into_strides, labels, *target_strides, None, None, 0, losses.data_ptr(), total,
                *values,
            )  # fmt: skip
            return _finish(losses, options.reduction != "none", dtype)
    return _compute(logits, target, weight, options, dtype=dtype, gradient=into, key=key)


def gradient(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of sum(g * loss) in the logits, contiguous."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _compute(logits, target, weight, options, gradient=result, g=g)
    return result


def new_state(logits: Tensor, axis: int) -> Tensor:
    """An empty tensor for what `gradient_from` needs of each row."""
    rows = math.prod(logits.shape[:axis]) * math.prod(logits.shape[axis + 1 :])
    return logits.new_empty((8, rows), dtype=torch.float32)


def loss_and_state(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The loss, and for `gradient_from` a few numbers per row."""
    state = new_state(logits, options.axis)
    return _compute(logits, target, weight, options, dtype=dtype, state=state), state


def gradient_from(
    state: Tensor, g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
) -> Tensor:
    """The gradient of sum(g * loss) in the logits, contiguous, without solving again."""
    made = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        _gradient_from(state, g, logits, target, weight, options, made, 0)
    return made


def chunk_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    *,
    divisor: Tensor | None = None,
    g: Tensor | None = None,
    with_gradient: bool,
    state: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """The loss of a chunk of rows of class indices, in float32. A mean divides by `divisor`.

    The gradient, multiplied by g, overwrites the logits. `class_gradients_` needs the state, (8, rows). Logits in
    blocks have the shape (blocks, rows, classes of a block), a multiple of 8, and `classes` is the number of all.
    """
    into = logits if with_gradient else None
    return _compute(
        logits, target, weight, options, dtype=torch.float32, gradient=into, g=g, divisor=divisor, state=state,
        classes=classes,
    )  # fmt: skip


def class_gradients_(logits: Tensor, target: Tensor, state: Tensor, options: LossOptions, *, first: int) -> None:
    """Overwrite recomputed logits, of the classes from `first` on, with the gradient."""
    _gradient_from(state, None, logits, target, None, options, logits, first)


def _gradient_from(
    state: Tensor,
    g: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    gradient: Tensor,
    first: int,
) -> None:
    x, outer, inner, strides = as_blocks(logits, options.axis)
    into, _, _, into_strides = as_blocks(gradient, options.axis)
    indices = not target.is_floating_point()
    y, y_strides = (target.contiguous(), (0, 0, 0)) if indices else as_blocks(target, options.axis)[::3]
    others = [(into, into_strides)] if indices else [(into, into_strides), (y, y_strides)]
    tile = dict(tile_for(x.shape[1], inner, (x, strides), *others))
    tile.pop("SINGLE")
    g_stride = 0 if g is None or options.reduction != "none" else 1
    g = g if g is None or g.dim() == 0 else g.contiguous()
    temperatures = temperature_arguments(options, x.shape[1], x.device)
    tensors = (x, *strides, into, *into_strides)
    with on_device_of(x):
        if indices and not options.label_smoothing:
            constants = temperature_constants(options.t1, options.t2, "KIND", "NEAR", "FAST", "Q", "R", "E")
            kernel: Any = label_gradient_kernel
            constants |= {"SCALED": g is not None}
            arguments = (
                *tensors, y, g, g_stride, state, state.stride(0), inner, first, x.shape[1],
                *temperatures,
            )  # fmt: skip
        else:
            kernel = soft_gradient_kernel
            constants = temperature_constants(options.t1, options.t2, "KIND", "FAST", "T1_ZERO", "SAME")
            constants |= {"INDICES": indices, "WEIGHTED": weight is not None}
            weight = None if weight is None else weight.contiguous()
            arguments = (
                *tensors, y, *y_strides, weight, g, g_stride, state, state.stride(0),
                inner, x.shape[1], options.label_smoothing, *temperatures,
            )  # fmt: skip
        launch_kernel(kernel, outer * count_tiles(inner, tile), arguments, constants | tile | COMPILER_OPTIONS)


def _compute(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    *,
    dtype: torch.dtype | None = None,
    gradient: Tensor | None = None,
    g: Tensor | None = None,
    divisor: Tensor | None = None,
    state: Tensor | None = None,
    classes: int | None = None,
    key: Any = None,
) -> Tensor:
    t1, t2, axis, reduction = options.t1, options.t2, options.axis, options.reduction
    label_smoothing, ignore_index = options.label_smoothing, options.ignore_index
    device, block = logits.device, 0 if classes is None else logits.shape[2]
    classes = classes or logits.shape[axis]
    indices = not target.is_floating_point()
    n = target.numel() if indices else target.numel() // classes
    reduce, mean = reduction != "none", reduction == "mean"
    shape = () if reduce else (n,) if block else logits.shape[:axis] + logits.shape[axis + 1 :]
    if n == 0:
        return torch.full(shape, math.nan if mean else 0.0, dtype=dtype, device=device)
    x, outer, inner, strides = as_blocks(logits[0] if block else logits, axis)
    into, into_strides = (x, strides) if gradient is None or block else as_blocks(gradient, axis)[::3]
    y, y_strides = (target, (0, 0, 0)) if indices else as_blocks(target, axis)[::3]
    geometry = tile_for(classes, inner, (x, strides), (into, into_strides), *([] if indices else [(y, y_strides)]))
    if block:  # then the gradient overwrites the logits
        strides = into_strides = (0, strides[1], logits.stride(0))
    programs = outer * count_tiles(inner, geometry)
    losses_dtype = torch.float32 if reduce or dtype is None else dtype
    losses = torch.empty(shape if programs == 1 or not reduce else programs, dtype=losses_dtype, device=device)
    weight = None if weight is None else weight.contiguous()
    labels = target.contiguous() if indices else target
    counted = divisor is not None or n > _COUNTED_BY_EACH or not indices or label_smoothing > 0
    count, targets = None, (n, classes, ignore_index)
    counters: tuple[int, ...] = () if n <= _COUNTED_BY_ONE else (min(256, -(-n // _COUNT)),)
    if mean and indices and counted and divisor is None:
        divisor = torch.empty(counters, dtype=torch.float32, device=device)
        constants = {"WEIGHTED": weight is not None, "COUNT": _COUNT, "num_warps": 8, **COMPILER_OPTIONS}
        with on_device_of(x):
            count = launch_kernel(divisor_kernel, divisor.numel(), (labels, weight, divisor, *targets), constants)
        divisor = divisor.sum() if counters else divisor
    common = {
        **geometry, **ASSERTING_OPTIONS,
        "WEIGHTED": weight is not None, "MEAN": mean, "REDUCE": reduce, "WITH_LOSS": dtype is not None,
        "WITH_GRAD": gradient is not None, "WITH_STATE": state is not None, "SCALED": g is not None,
    }  # fmt: skip
    temperatures = temperature_arguments(options, classes, device)
    state_stride = 0 if state is None else state.stride(0)
    g_stride = 0 if g is None or reduce else 1
    g = g if g is None or reduce else g.contiguous()
    values: tuple[Any, ...] = (state, state_stride, n, inner, classes, ignore_index)
    if indices and not label_smoothing:
        kernel: Any = loss_kernel
        names = ("KIND", "NEAR", "FAST", "SHIFT", "Q", "R", "E", "SAME")
        common |= temperature_constants(t1, t2, *names) | {"COUNTED": counted, "BLOCK": block}
        if FAST_MATH and not geometry["SINGLE"] and common["KIND"] != 3:
            common["maxnreg"] = _REGISTERS
    else:
        kernel = soft_loss_kernel
        values += (label_smoothing, sum_tolerance(target.element_size()))
        common |= temperature_constants(t1, t2, "KIND", "NEAR", "FAST", "T1_ZERO", "SAME") | {"INDICES": indices}
        if geometry["SINGLE"] and geometry["COLUMNS"] > 512:  # a thread holds more numbers of each class here
            common["num_warps"] = min(16, 2 * geometry["num_warps"])
    y, target_strides = labels if indices else y, () if kernel is loss_kernel else y_strides
    values += temperatures
    arguments = x, *strides, into, *into_strides, y, *target_strides, weight, g, g_stride, losses, divisor, *values
    with on_device_of(x):
        shortcut = launch_kernel(kernel, programs, arguments, common)
    in_place = x.data_ptr() == logits.data_ptr() and y.data_ptr() == target.data_ptr()  # no copy, but perhaps a view
    if key is not None and shortcut is not None and in_place:
        launch, rest = shortcut
        pattern = losses.new_empty(()).expand(losses.shape)
        pattern.untyped_storage().resize_(0)  # keeps shape, dtype and device, but no memory in a graph's pool
        values += tuple(rest)
        plan = _Plan(launch, pattern, strides, into_strides, target_strides, values, count, counters, targets)
        _plans.keep(key, plan)
    return _finish(losses, reduce, dtype)


def _finish(losses: Tensor, reduce: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:  # only the gradient is wanted
        return losses
    if reduce and losses.dim():
        losses = losses.sum()
    return losses if dtype == losses.dtype else losses.to(dtype)
