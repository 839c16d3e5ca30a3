"""Differentiable losses and softmaxes computed by a kernel.

First derivatives come from the kernel; second derivatives and batches of cotangents come from core.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from bitempered import core
from bitempered.encoding import weigh_elements
from bitempered.kernels import cpu, hooks
from bitempered.kernels.options import LossOptions
from bitempered.torch.autograd import Temperature, gradient_per_example, log_softmax_and_partition, xp
from bitempered.torch.reductions import safe_divisor


class _KernelLoss(torch.autograd.Function):
    """(logits, target, class weights, options, dtype, kernel) -> the reduced loss.

    Forward also computes the gradient. The first backward scales that tensor in place and returns it; later ones
    recompute it. In float16 every backward computes it: divided by a mean's count, it would vanish before a loss scale
    could multiply it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: LossOptions,
        dtype: torch.dtype,
        kernel: Any,
    ) -> Tensor:
        ctx.options, ctx.kernel = options, kernel
        ctx.save_for_backward(logits, target, weight)
        if logits.dtype == torch.float16:
            return kernel.loss(logits, target, weight, options, dtype)
        loss, ctx.gradient = kernel.loss_and_gradient(logits, target, weight, options, dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        options, kernel = ctx.options, ctx.kernel
        if torch.is_grad_enabled() or not _has_memory(g):
            logits, target, weight = ctx.saved_tensors
            rows = g.unsqueeze(options.axis) if options.reduction == "none" else g
            grad = (rows * _gradient_by_core(logits, target, weight, options)).to(logits.dtype)
            return grad, None, None, None, None, None
        gradient = vars(ctx).pop("gradient", None)
        if gradient is None:
            return kernel.gradient(g, *ctx.saved_tensors, options), None, None, None, None, None
        return kernel.scale_(gradient, g, options.axis), None, None, None, None, None


# Function.apply first handles torch.func transforms, which takes much of a small loss's time. No kernel runs under a
# transform, so skip that.
_apply_kernel_loss = hooks.single_level_apply(_KernelLoss)


@functools.cache
def triton_kernels() -> Any:
    from bitempered.kernels import triton

    return triton


def _has_memory(x: Tensor) -> bool:
    try:
        return x.data_ptr() is not None
    except RuntimeError:  # a batch of cotangents, of vmap or is_grads_batched
        return False


def _gradient_by_core(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of a _KernelLoss, by operations that can be differentiated and mapped."""
    a = logits if options.inner == 1 else options.inner * xp.widen(logits)
    by_a = gradient_per_example(a, target, weight, options) * (options.inner * options.outer)
    if options.reduction != "mean" or options.axis is None:
        return by_a
    divisor, empty = safe_divisor(target, weight, options, by_a.dtype)
    return torch.where(empty, 0.0, by_a / divisor)


class _KernelBinaryLoss(torch.autograd.Function):
    """(logits, target, pos_weight, weight, options, dtype) -> the reduced binary loss, as _KernelLoss."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        pos_weight: Tensor | None,
        weight: Tensor | None,
        options: LossOptions,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(logits, target, pos_weight, weight)
        if logits.dtype != torch.float16:
            ctx.gradient = torch.empty_like(logits)
        made = vars(ctx).get("gradient")
        return cpu.binary_loss(logits, target, pos_weight, weight, options, gradient=made).to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, target, pos_weight, weight = ctx.saved_tensors
        none = [None] * 5
        if torch.is_grad_enabled() or not _has_memory(g):
            expanded = None if pos_weight is None else pos_weight.expand_as(logits)
            by_a = _gradient_by_core(logits, target, expanded, ctx.options)[..., 1]
            by_a = by_a if weight is None else weigh_elements(by_a, weight, xp=xp)
            by_a = by_a / max(logits.numel(), 1) if ctx.options.reduction == "mean" else by_a
            return (g * by_a).to(logits.dtype), *none
        gradient = vars(ctx).pop("gradient", None)
        if gradient is None:
            gradient = torch.empty_like(logits)
            cpu.binary_loss(logits, target, pos_weight, weight, ctx.options, gradient=gradient, g=g)
        elif g.dim() or g.item() != 1:
            gradient *= g
        return gradient, *none


class _KernelSigmoid(torch.autograd.Function):
    """(logits, t, dtype) -> the tempered sigmoid. Forward also computes its derivative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, t: float, dtype: torch.dtype) -> Tensor:
        out, slope = cpu.sigmoid(logits, t, dtype, with_slope=True)
        ctx.t = t
        ctx.save_for_backward(logits, slope)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            log_p, _ = log_softmax_and_partition(torch.stack((torch.zeros_like(logits), logits), -1), ctx.t, -1)
            e = core.escort(log_p, ctx.t, axis=-1, xp=xp)
            slope = core.power(log_p[..., 1], ctx.t, outside=True, xp=xp) * e[..., 0]
        return (g * slope).to(logits.dtype), None, None


class _KernelSoftmax(torch.autograd.Function):
    """(logits, t, axis, what, dtype, kernel) -> the result of the kernel's `softmax`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, t: float, axis: int, what: str, dtype: torch.dtype, kernel: Any) -> Tensor:
        out, state = kernel.softmax(logits, t, axis, what, dtype)
        ctx.options, ctx.kernel = (t, axis, what), kernel
        ctx.save_for_backward(logits, state)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, state = ctx.saved_tensors
        t, axis, what = ctx.options
        if not torch.is_grad_enabled() and _has_memory(g):
            return ctx.kernel.softmax_backward(g, logits, state, t, axis, what), None, None, None, None, None
        log_p, _ = log_softmax_and_partition(logits, t, axis)
        g_lambda = g.unsqueeze(axis) if what == "partition" else None
        g_log_p = None if what == "partition" else g * log_p.exp() if what == "probabilities" else g
        grad = core.softmax_pullback(log_p, t, g_log_p=g_log_p, g_lambda=g_lambda, axis=axis, xp=xp)
        return grad.to(logits.dtype), None, None, None, None, None


def loss_by_kernel(
    kernel: str, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype
) -> Tensor:
    """The reduced loss. The kernel checks the target's values: "cpu" raises, "triton" asserts on the device."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() and kernel == "cpu":
        import bitempered.kernels.operators

        return torch.ops.bitempered.cpu_loss.default(logits, target, weight, *options, dtype, needs_gradient)[0]
    if torch.compiler.is_compiling():
        import bitempered.kernels.triton  # noqa: F401 (registers the operator)

        return torch.ops.bitempered.loss.default(logits, target, weight, *options[:6], dtype)
    module = cpu if kernel == "cpu" else triton_kernels()
    if needs_gradient:
        return _apply_kernel_loss(logits, target, weight, options, dtype, module)
    return module.loss(logits, target, weight, options, dtype)


def binary_loss_by_kernel(
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """The reduced binary loss by the CPU kernel, of a valid target."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        import bitempered.kernels.operators  # noqa: F401 (registers the operator)

        tensors = logits, target, pos_weight, weight
        return torch.ops.bitempered.cpu_binary_loss.default(*tensors, *options, dtype, needs_gradient)[0]
    if needs_gradient:
        return _KernelBinaryLoss.apply(logits, target, pos_weight, weight, options, dtype)
    return cpu.binary_loss(logits, target, pos_weight, weight, options).to(dtype)


def sigmoid_by_kernel(logits: Tensor, t: float, dtype: torch.dtype) -> Tensor:
    """The tempered sigmoid by the CPU kernel."""
    if logits.requires_grad and torch.is_grad_enabled():
        return _KernelSigmoid.apply(logits, t, dtype)
    return cpu.sigmoid(logits, t, dtype, with_slope=False)[0]


def softmax_by_kernel(kernel: str, logits: Tensor, t: Temperature, axis: int, what: str, dtype: torch.dtype) -> Tensor:
    """The "probabilities", their "logarithms" or the "partition" from a kernel."""
    return _KernelSoftmax.apply(logits, t, axis, what, dtype, cpu if kernel == "cpu" else triton_kernels())
