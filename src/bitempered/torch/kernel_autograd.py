"""Differentiable losses and softmaxes computed by a kernel.

First derivatives come from the kernel; second derivatives and batches of cotangents come from core.
"""

from typing import Any

import torch
from torch import Tensor

from bitempered import core
from bitempered.encoding import shifted, weigh_elements
from bitempered.kernels import hooks
from bitempered.kernels.implementations import implementation
from bitempered.kernels.layout import empty_gradient
from bitempered.kernels.options import LossOptions
from bitempered.torch.autograd import (
    Temperature,
    along,
    gradient_per_example,
    log_softmax_and_partition,
    with_tensors,
    without_tensors,
    xp,
)
from bitempered.torch.reductions import safe_divisor


class _KernelLoss(torch.autograd.Function):
    """(logits, target, class weights, (options, dtype, kernel)) -> the reduced loss.

    If temperatures are not numbers, t1 and t2 follow as tensors without a gradient, or None. Forward also computes the
    gradient. The first backward scales that tensor in place and returns it; later ones recompute it. In float16 every
    backward computes it: divided by a mean's count, it would vanish before a loss scale could multiply it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, constants: tuple[Any, ...], *temperatures: Any
    ) -> Tensor:
        ctx.constants = options, dtype, kernel = constants
        ctx.save_for_backward(logits, target, weight, *temperatures)
        if temperatures:
            options = with_tensors(options, *temperatures)
        if logits.dtype == torch.float16:
            return kernel.loss(logits, target, weight, options, dtype, None)
        ctx.gradient = empty_gradient(logits, options.axis)
        return kernel.loss(logits, target, weight, options, dtype, ctx.gradient)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        options, _, kernel = ctx.constants
        axis, none = options.axis, (None,) * (len(ctx.needs_input_grad) - 1)
        by_core = torch.is_grad_enabled() or not _has_memory(g)
        gradient = None if by_core else vars(ctx).pop("gradient", None)
        if gradient is not None:
            return kernel.scale_(gradient, _own_sign(g), axis), *none
        logits, target, weight, *temperatures = ctx.saved_tensors
        options = with_tensors(options, *temperatures)
        if not by_core:
            return kernel.gradient(_own_sign(g), logits, target, weight, options), *none
        rows = g.unsqueeze(axis) if options.reduction == "none" else g
        return (rows * _gradient_by_core(logits, target, weight, options)).to(logits.dtype), *none


def _has_memory(x: Tensor) -> bool:
    try:
        return x.data_ptr() is not None
    except RuntimeError:  # a batch of cotangents, of vmap or is_grads_batched
        return False


def _own_sign(x: Tensor) -> Tensor:
    """A tensor whose memory holds its values: the imaginary part of a conjugate is stored with the other sign."""
    return x.resolve_neg() if x.is_neg() else x


def _gradient_by_core(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of a _KernelLoss, by operations that can be differentiated and mapped."""
    axis = -1 if options.axis is None else options.axis
    inner, outer = options.scales(2 if options.axis is None else logits.shape[axis])
    a = logits
    if options.rescale and options.axis is None:
        a = inner * xp.widen(logits)
    elif options.rescale:
        a = along(inner, axis) * shifted(xp.widen(logits), axis=axis, xp=xp)
    by_a = gradient_per_example(a, target, weight, options) * along(inner * outer, axis)
    if options.reduction != "mean" or options.axis is None:
        return by_a
    divisor, empty = safe_divisor(target, weight, options, by_a.dtype)
    return torch.where(empty, 0.0, by_a / divisor)


class _KernelBinaryLoss(torch.autograd.Function):
    """(logits, target, pos_weight, weight, t1, t2, (options, dtype, kernel)) -> the binary loss, as _KernelLoss."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        logits, target, pos_weight, weight, t1, t2, (numbers, dtype, kernel) = arguments
        ctx.options, ctx.kernel = numbers, kernel
        ctx.save_for_backward(logits, target, pos_weight, weight, t1, t2)
        if logits.dtype != torch.float16:
            ctx.gradient = torch.empty_like(logits)
        made, options = vars(ctx).get("gradient"), with_tensors(numbers, t1=t1, t2=t2)
        return kernel.binary_loss(logits, target, pos_weight, weight, options, gradient=made).to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        kernel, none = ctx.kernel, (None,) * 6
        by_core = torch.is_grad_enabled() or not _has_memory(g)
        gradient = None if by_core else vars(ctx).pop("gradient", None)
        if gradient is not None:
            return kernel.scale_(gradient, _own_sign(g), None), *none
        logits, target, pos_weight, weight, t1, t2 = ctx.saved_tensors
        options = with_tensors(ctx.options, t1=t1, t2=t2)
        if not by_core:
            gradient = torch.empty_like(logits)
            kernel.binary_loss(logits, target, pos_weight, weight, options, gradient=gradient, g=_own_sign(g))
            return gradient, *none
        expanded = None if pos_weight is None else pos_weight.expand_as(logits)
        by_a = _gradient_by_core(logits, target, expanded, options)[..., 1]
        by_a = by_a if weight is None else weigh_elements(by_a, weight, xp=xp)
        by_a = by_a / max(logits.numel(), 1) if options.reduction == "mean" else by_a
        return (g * by_a).to(logits.dtype), *none


# Function.apply first handles torch.func transforms, which takes much of a small loss's time. No kernel runs under a
# transform, so skip that.
_apply_kernel_loss = hooks.single_level_apply(_KernelLoss)
_apply_kernel_binary_loss = hooks.single_level_apply(_KernelBinaryLoss)


class _KernelSigmoid(torch.autograd.Function):
    """(logits, t, dtype, kernel) -> the tempered sigmoid. Forward also computes its derivative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, t: Temperature, dtype: torch.dtype, kernel: Any) -> Tensor:
        out, slope = kernel.sigmoid(logits, t, dtype, with_slope=True)
        tensor, ctx.t = (t, None) if isinstance(t, Tensor) else (None, t)
        ctx.save_for_backward(logits, slope, tensor)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, slope, t = ctx.saved_tensors
        if torch.is_grad_enabled():
            t = ctx.t if t is None else t
            log_p, _ = log_softmax_and_partition(torch.stack((torch.zeros_like(logits), logits), -1), t, -1)
            e = core.escort(log_p, along(t, -1), axis=-1, xp=xp)
            slope = core.power(log_p[..., 1], t, outside=True, xp=xp) * e[..., 0]
        return (g * slope).to(logits.dtype), None, None, None


class _KernelSoftmax(torch.autograd.Function):
    """(logits, t, axis, what, dtype, kernel) -> the result of the kernel's `softmax`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, t: Temperature, axis: int, what: str, dtype: torch.dtype, kernel: Any
    ) -> Tensor:
        out, state = kernel.softmax(logits, t, axis, what, dtype)
        tensor, ctx.t = (t, None) if isinstance(t, Tensor) else (None, t)
        ctx.options, ctx.kernel = (axis, what), kernel
        ctx.save_for_backward(logits, state, tensor)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, state, t = ctx.saved_tensors
        t = ctx.t if t is None else t
        axis, what = ctx.options
        if not torch.is_grad_enabled() and _has_memory(g):
            return ctx.kernel.softmax_backward(_own_sign(g), logits, state, t, axis, what), None, None, None, None, None
        log_p, _ = log_softmax_and_partition(logits, t, axis)
        g_lambda = g.unsqueeze(axis) if what == "partition" else None
        g_log_p = None if what == "partition" else g * log_p.exp() if what == "probabilities" else g
        grad = core.softmax_pullback(log_p, along(t, axis), g_log_p=g_log_p, g_lambda=g_lambda, axis=axis, xp=xp)
        return grad.to(logits.dtype), None, None, None, None, None


def loss_by_kernel(
    kernel: str, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> Tensor:
    """The reduced loss. The kernel checks the target's values: "cpu" raises, "triton" asserts on the device."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    numbers, temperatures = without_tensors(options)
    if torch.compiler.is_compiling():
        import bitempered.kernels.operators  # noqa: F401 (registers the operator)

        tensors = logits, target, weight, *temperatures
        return torch.ops.bitempered.loss.default(*tensors, *numbers, kernel, dtype, needs_gradient)[0]
    module = implementation(kernel)
    weight = None if weight is None else _own_sign(weight)
    if needs_gradient:
        constants = numbers, dtype, module
        return _apply_kernel_loss(logits, target, weight, constants, *(() if numbers is options else temperatures))
    return module.loss(logits, target, weight, options, dtype, None)


def binary_loss_by_kernel(
    kernel: str,
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """The reduced binary loss of a valid target."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    numbers, temperatures = without_tensors(options)
    if torch.compiler.is_compiling():
        import bitempered.kernels.operators  # noqa: F401 (registers the operator)

        tensors = logits, target, pos_weight, weight, *temperatures
        return torch.ops.bitempered.binary_loss.default(*tensors, *numbers, kernel, dtype, needs_gradient)[0]
    module = implementation(kernel)
    pos_weight, weight = (None if x is None else _own_sign(x) for x in (pos_weight, weight))
    if needs_gradient:
        return _apply_kernel_binary_loss(logits, target, pos_weight, weight, *temperatures, (numbers, dtype, module))
    return module.binary_loss(logits, target, pos_weight, weight, options).to(dtype)


def sigmoid_by_kernel(kernel: str, logits: Tensor, t: Temperature, dtype: torch.dtype) -> Tensor:
    """The tempered sigmoid."""
    module = implementation(kernel)
    if logits.requires_grad and torch.is_grad_enabled():
        return _KernelSigmoid.apply(logits, t, dtype, module)
    return module.sigmoid(logits, t, dtype, with_slope=False)[0]


def softmax_by_kernel(kernel: str, logits: Tensor, t: Temperature, axis: int, what: str, dtype: torch.dtype) -> Tensor:
    """The "probabilities", their "logarithms" or the "partition" from a kernel."""
    return _KernelSoftmax.apply(logits, t, axis, what, dtype, implementation(kernel))
