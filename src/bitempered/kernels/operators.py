"""The losses on a CPU as torch operators, which torch.compile treats as opaque.

One call computes the loss and its gradient, so that backward only multiplies, which torch.compile fuses with the rest.
In float16 backward computes the gradient, as in eager mode.
"""

from typing import Any

import torch
from torch import Tensor

from bitempered.kernels import cpu
from bitempered.kernels.options import LossOptions

_OPTIONS = (
    "float t1, float t2, int? axis, float label_smoothing, int ignore_index, str reduction, float inner, float outer"
)
_COUNT = len(LossOptions._fields)


@torch.library.custom_op(
    "bitempered::cpu_loss",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, {_OPTIONS}, ScalarType dtype, bool with_gradient)"
    " -> (Tensor, Tensor)",
)
def loss(logits: Tensor, target: Tensor, weight: Tensor | None, *values: Any) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient or an empty tensor."""
    options, (dtype, with_gradient) = LossOptions(*values[:_COUNT]), values[_COUNT:]
    made = _empty(logits, with_gradient)
    return cpu.loss_into(logits, target, weight, options, dtype, made if with_gradient else None), made


@torch.library.custom_op(
    "bitempered::cpu_loss_gradient",
    mutates_args=(),
    schema=f"(Tensor g, Tensor logits, Tensor target, Tensor? weight, {_OPTIONS}) -> Tensor",
)
def loss_gradient(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *values: Any) -> Tensor:
    return cpu.gradient(g, logits, target, weight, LossOptions(*values)).contiguous()


@torch.library.custom_op(
    "bitempered::cpu_binary_loss",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? pos_weight, Tensor? weight, {_OPTIONS}, ScalarType dtype,"
    " bool with_gradient) -> (Tensor, Tensor)",
)
def binary_loss(
    logits: Tensor, target: Tensor, pos_weight: Tensor | None, weight: Tensor | None, *values: Any
) -> tuple[Tensor, Tensor]:
    options, (dtype, with_gradient) = LossOptions(*values[:_COUNT]), values[_COUNT:]
    made = _empty(logits, with_gradient)
    into = made if with_gradient else None
    value = cpu.binary_loss(logits, target, pos_weight, weight, options, gradient=into)
    return value.to(dtype).contiguous(), made


@torch.library.custom_op(
    "bitempered::cpu_binary_loss_gradient",
    mutates_args=(),
    schema=f"(Tensor g, Tensor logits, Tensor target, Tensor? pos_weight, Tensor? weight, {_OPTIONS}) -> Tensor",
)
def binary_loss_gradient(
    g: Tensor, logits: Tensor, target: Tensor, pos_weight: Tensor | None, weight: Tensor | None, *values: Any
) -> Tensor:
    made = _empty(logits, True)
    cpu.binary_loss(logits, target, pos_weight, weight, LossOptions(*values), gradient=made, g=g)
    return made


def _empty(logits: Tensor, wanted: bool) -> Tensor:
    """A contiguous tensor for the gradient; without elements if it is not wanted."""
    return logits.new_empty(logits.shape if wanted else (0,))


def _register(operator: Any, gradient_operator: Any, tensors: int) -> None:
    """Register shapes and derivative of a loss with so many tensors before its options."""

    def fake(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *values, dtype, with_gradient = others[tensors - 1 :]
        options = LossOptions(*values)
        shape = logits.shape
        if options.axis is not None:
            shape = shape[: options.axis] + shape[options.axis + 1 :]
        value = logits.new_empty(shape if options.reduction == "none" else (), dtype=dtype)
        return value, _empty(logits, with_gradient)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = LossOptions(*inputs[tensors:-2])
        ctx.recomputes = inputs[0].dtype == torch.float16
        ctx.save_for_backward(*(inputs[:tensors] if ctx.recomputes else output[1:]))
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
        none = [None] * (tensors + len(ctx.options) + 1)
        if ctx.recomputes:
            return gradient_operator(g, *ctx.saved_tensors, *ctx.options), *none
        (gradient,) = ctx.saved_tensors
        if ctx.options.axis is not None and ctx.options.reduction == "none":
            g = g.unsqueeze(ctx.options.axis)
        return (g * gradient).to(gradient.dtype), *none

    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=save)
    gradient_operator.register_fake(lambda g, logits, *_: _empty(logits, True))


_register(loss, loss_gradient, 3)
_register(binary_loss, binary_loss_gradient, 4)
