"""The loss as torch operators, which torch.compile treats as opaque."""

from typing import Any

import torch
from torch import Tensor

from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton.losses import gradient, loss


@torch.library.custom_op(
    "bitempered::loss",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor? weight, float t1, float t2, int axis, float label_smoothing,"
    " int ignore_index, str reduction, ScalarType dtype) -> Tensor",
)
def loss_operator(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    *values, dtype = options
    return loss(logits, target, weight, LossOptions(*values), dtype)


@torch.library.custom_op(
    "bitempered::loss_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor logits, Tensor target, Tensor? weight, float t1, float t2, int axis,"
    " float label_smoothing, int ignore_index, str reduction) -> Tensor",
)
def gradient_operator(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    return gradient(g, logits, target, weight, LossOptions(*options))


@loss_operator.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    *values, dtype = options
    made = LossOptions(*values)
    rows = logits.shape[: made.axis] + logits.shape[made.axis + 1 :]
    return logits.new_empty(rows if made.reduction == "none" else (), dtype=dtype)


@gradient_operator.register_fake
def _(g: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, weight, *values, _ = inputs
    ctx.save_for_backward(logits, target, weight)
    ctx.options = values


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    none = [None] * (3 + len(ctx.options))  # for the target, the weight, the options and the dtype
    return gradient_operator(g, *ctx.saved_tensors, *ctx.options), *none


loss_operator.register_autograd(_backward, setup_context=_save)
