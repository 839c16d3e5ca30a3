"""The losses as torch operators, which torch.compile treats as opaque.

One call solves for the loss and leaves what backward needs. That is the gradient; backward multiplies it by the
incoming one, and torch.compile fuses that with the rest. In float16 backward computes the gradient, as in eager mode.
With many classes on a GPU it is a few numbers per row, from which a second operator writes the final gradient. That
saves a pass over the gradient, which costs more there than calling an operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitempered.kernels.implementations import implementation
from bitempered.kernels.options import LossOptions

# Not torch.library.custom_op, whose checks take time in every call; torch.library.opcheck makes them in the tests.
_library = torch.library.Library("bitempered", "FRAGMENT")
_MANY_CLASSES = 8192
_TYPES = {
    "t1": "float?", "t2": "float?", "axis": "int?", "label_smoothing": "float", "ignore_index": "int",
    "reduction": "str", "rescale": "bool",
}  # fmt: skip
# What follows the tensors of an operator: temperatures that are tensors, and the options in their order.
_OPTIONS = ", ".join(
    ("Tensor? of_t1, Tensor? of_t2", *(f"{_TYPES[name]} {name}" for name in LossOptions._fields), "str kernel")
)


def _options(values: Sequence[Any]) -> tuple[LossOptions, Any]:
    """The options, with temperatures that are tensors in place of None, and the module of the kernel."""
    of_t1, of_t2, t1, t2, *others, kernel = values
    made = LossOptions(t1 if of_t1 is None else of_t1, t2 if of_t2 is None else of_t2, *others)
    return made, implementation(kernel)


def _loss(logits: Tensor, target: Tensor, weight: Tensor | None, *values: Any) -> tuple[Tensor, Tensor]:
    """The loss, and what backward needs or an empty tensor."""
    *of_options, dtype, with_gradient = values
    options, kernel = _options(of_options)
    if with_gradient and _has_state(logits, options, of_options[-1]):
        return kernel.loss_and_state(logits, target, weight, options, dtype)
    made = _empty(logits, with_gradient)
    return kernel.loss(logits, target, weight, options, dtype, made if with_gradient else None), made


def _loss_gradient(
    g: Tensor, state: Tensor | None, logits: Tensor, target: Tensor, weight: Tensor | None, *values: Any
) -> Tensor:
    options, kernel = _options(values)
    if state is not None:
        return kernel.gradient_from(state, g, logits, target, weight, options)
    return kernel.gradient(g, logits, target, weight, options).contiguous()


def _binary_loss(
    logits: Tensor, target: Tensor, pos_weight: Tensor | None, weight: Tensor | None, *values: Any
) -> tuple[Tensor, Tensor]:
    *of_options, dtype, with_gradient = values
    options, kernel = _options(of_options)
    made = _empty(logits, with_gradient)
    into = made if with_gradient else None
    value = kernel.binary_loss(logits, target, pos_weight, weight, options, gradient=into)
    return value.to(dtype).contiguous(), made


def _binary_loss_gradient(g: Tensor, _: None, logits: Tensor, *others: Any) -> Tensor:
    """The gradient of sum(g * loss): a binary loss leaves no state."""
    target, pos_weight, weight, *values = others
    options, kernel = _options(values)
    made = _empty(logits, True)
    kernel.binary_loss(logits, target, pos_weight, weight, options, gradient=made, g=g)
    return made


def _empty(logits: Tensor, wanted: bool) -> Tensor:
    """A contiguous tensor for the gradient; without elements if it is not wanted."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format) if wanted else logits.new_empty(0)


def _register(name: str, function: Callable[..., Any], gradient: Callable[..., Any], *arguments: str) -> None:
    """Define a loss and its gradient as operators, with the shapes of both and the derivative of the loss."""
    tensors = len(arguments) + 2  # with the temperatures
    shared = ", ".join((*arguments, _OPTIONS))
    _library.define(f"{name}({shared}, ScalarType dtype, bool with_gradient) -> (Tensor, Tensor)")
    _library.define(f"{name}_gradient(Tensor g, Tensor? state, {shared}) -> Tensor")
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(f"{name}_gradient", gradient, "CompositeExplicitAutograd")
    gradient_operator = getattr(torch.ops.bitempered, f"{name}_gradient").default

    def fake(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *values, kernel, dtype, with_gradient = others[tensors - 1 :]
        options = LossOptions(*values)
        shape = logits.shape
        if options.axis is not None:
            shape = shape[: options.axis] + shape[options.axis + 1 :]
        value = logits.new_empty(shape if options.reduction == "none" else (), dtype=dtype)
        if with_gradient and _has_state(logits, options, kernel):
            return value, implementation(kernel).new_state(logits, options.axis)
        return value, _empty(logits, with_gradient)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *values, ctx.kernel = inputs[tensors:-2]
        ctx.options = LossOptions(*values)
        ctx.has_state = _has_state(inputs[0], ctx.options, ctx.kernel)
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

    def fake_gradient(g: Tensor, state: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
        return _empty(logits, True)

    torch.library.register_fake(f"bitempered::{name}", fake, lib=_library)
    torch.library.register_fake(f"bitempered::{name}_gradient", fake_gradient, lib=_library)
    torch.library.register_autograd(f"bitempered::{name}", backward, setup_context=save, lib=_library)


def _has_state(logits: Tensor, options: LossOptions, kernel: str) -> bool:
    """Whether backward writes the gradient from a state."""
    return kernel == "triton" and options.axis is not None and logits.shape[options.axis] >= _MANY_CLASSES


_register("loss", _loss, _loss_gradient, "Tensor logits", "Tensor target", "Tensor? weight")
_register(
    "binary_loss", _binary_loss, _binary_loss_gradient,
    "Tensor logits", "Tensor target", "Tensor? pos_weight", "Tensor? weight",
)  # fmt: skip
