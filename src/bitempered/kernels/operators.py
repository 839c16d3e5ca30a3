"""The losses as torch operators, which torch.compile treats as opaque.

One call solves for the loss and leaves what backward needs. For a loss over classes on a GPU that is a few numbers per
row, from which one operator writes the gradient that arrives times its own: no other pass over it is left. Otherwise it
is the gradient itself, which backward multiplies by the one that arrives, and torch.compile fuses that with the rest.
On a CPU in float16 backward computes the gradient, as in eager mode.
"""

from typing import Any

import torch
from torch import Tensor

from bitempered.kernels.implementations import implementation
from bitempered.kernels.options import LossOptions

_OPTIONS = (
    "float? t1, float? t2, int? axis, float label_smoothing, int ignore_index, str reduction, bool rescale, str kernel"
)
_COUNT = len(LossOptions._fields)


def _options(t1: Tensor | None, t2: Tensor | None, values: tuple[Any, ...]) -> LossOptions:
    """The options, with temperatures that are tensors in place of None."""
    made = LossOptions(*values)
    return made._replace(t1=made.t1 if t1 is None else t1, t2=made.t2 if t2 is None else t2)


@torch.library.custom_op(
    "bitempered::loss",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor? weight, Tensor? of_t1, Tensor? of_t2,"
    f" {_OPTIONS}, ScalarType dtype, bool with_gradient) -> (Tensor, Tensor)",
)
def loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, of_t1: Tensor | None, of_t2: Tensor | None, *values: Any
) -> tuple[Tensor, Tensor]:
    """The loss, and what backward needs or an empty tensor."""
    *numbers, name, dtype, with_gradient = values
    options, kernel = _options(of_t1, of_t2, tuple(numbers)), implementation(name)
    if with_gradient and name == "triton":
        return kernel.loss_and_state(logits, target, weight, options, dtype)
    made = _empty(logits, with_gradient)
    if name == "triton":
        return kernel.loss(logits, target, weight, options, dtype), made
    return kernel.loss_into(logits, target, weight, options, dtype, made if with_gradient else None), made


@torch.library.custom_op(
    "bitempered::loss_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor? state, Tensor logits, Tensor target, Tensor? weight, Tensor? of_t1, Tensor? of_t2,"
    f" {_OPTIONS}) -> Tensor",
)
def loss_gradient(
    g: Tensor,
    state: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    of_t1: Tensor | None,
    of_t2: Tensor | None,
    *values: Any,
) -> Tensor:
    *numbers, name = values
    options, kernel = _options(of_t1, of_t2, tuple(numbers)), implementation(name)
    if state is not None:
        return kernel.gradient_from(state, g, logits, target, weight, options)
    return kernel.gradient(g, logits, target, weight, options).contiguous()


@torch.library.custom_op(
    "bitempered::binary_loss",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor? pos_weight, Tensor? weight, Tensor? of_t1, Tensor? of_t2,"
    f" {_OPTIONS}, ScalarType dtype, bool with_gradient) -> (Tensor, Tensor)",
)
def binary_loss(
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    of_t1: Tensor | None,
    of_t2: Tensor | None,
    *values: Any,
) -> tuple[Tensor, Tensor]:
    *numbers, name, dtype, with_gradient = values
    made = _empty(logits, with_gradient)
    options, into = _options(of_t1, of_t2, tuple(numbers)), made if with_gradient else None
    value = implementation(name).binary_loss(logits, target, pos_weight, weight, options, gradient=into)
    return value.to(dtype).contiguous(), made


@torch.library.custom_op(
    "bitempered::binary_loss_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor? state, Tensor logits, Tensor target, Tensor? pos_weight, Tensor? weight, Tensor? of_t1,"
    f" Tensor? of_t2, {_OPTIONS}) -> Tensor",
)
def binary_loss_gradient(
    g: Tensor,
    state: Tensor | None,
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    of_t1: Tensor | None,
    of_t2: Tensor | None,
    *values: Any,
) -> Tensor:
    *numbers, name = values
    made, options = _empty(logits, True), _options(of_t1, of_t2, tuple(numbers))
    implementation(name).binary_loss(logits, target, pos_weight, weight, options, gradient=made, g=g)
    return made


def _empty(logits: Tensor, wanted: bool) -> Tensor:
    """A contiguous tensor for the gradient; without elements if it is not wanted."""
    return logits.new_empty(logits.shape if wanted else (0,))


def _register(operator: Any, gradient_operator: Any, tensors: int) -> None:
    """Register shapes and derivative of a loss with so many tensors before its options."""

    def fake(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *values, kernel, dtype, with_gradient = others[tensors - 1 :]
        options = LossOptions(*values)
        shape = logits.shape
        if options.axis is not None:
            shape = shape[: options.axis] + shape[options.axis + 1 :]
        value = logits.new_empty(shape if options.reduction == "none" else (), dtype=dtype)
        if with_gradient and _has_state(options, kernel):
            return value, implementation(kernel).new_state(logits, options.axis)
        return value, _empty(logits, with_gradient)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *values, ctx.kernel = inputs[tensors:-2]
        ctx.options = LossOptions(*values)
        ctx.has_state = _has_state(ctx.options, ctx.kernel)
        ctx.multiplies = not ctx.has_state and inputs[0].dtype != torch.float16
        ctx.save_for_backward(*(() if ctx.multiplies else inputs[:tensors]), output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "inside torch.compile the loss has first derivatives only (create_graph=True asks for more):"
                " call it outside"
            )
        none = [None] * (tensors + len(ctx.options) + 2)
        *given, kept = ctx.saved_tensors
        if not ctx.multiplies:
            state = kept if ctx.has_state else None
            return gradient_operator(g, state, *given, *ctx.options, ctx.kernel), *none
        if ctx.options.axis is not None and ctx.options.reduction == "none":
            g = g.unsqueeze(ctx.options.axis)
        return (g * kept).to(kept.dtype), *none

    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=save)
    gradient_operator.register_fake(lambda g, state, logits, *_: _empty(logits, True))


def _has_state(options: LossOptions, kernel: str) -> bool:
    """Whether backward writes the gradient from a state."""
    return kernel == "triton" and options.axis is not None


_register(loss, loss_gradient, 5)
_register(binary_loss, binary_loss_gradient, 6)
