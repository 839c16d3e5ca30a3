"""Losses and softmaxes on a CPU, by the C kernels of `library`: any float dtype, layout and kind of target."""

import math
import struct
from typing import Any

import torch
from torch import Tensor

from bitempered.checks import sum_tolerance
from bitempered.kernels.layout import as_blocks, empty_gradient, merge_dimensions
from bitempered.kernels.library import Unavailable, compiler, is_shipped, library, parallel
from bitempered.kernels.options import LossOptions
from bitempered.kernels.targets import bad_index, bad_probabilities

__all__ = [
    "DIMENSIONS",
    "DTYPES",
    "Unavailable",
    "binary_loss",
    "compiler",
    "gradient",
    "is_shipped",
    "library",
    "loss",
    "scale_",
    "sigmoid",
    "softmax",
    "softmax_backward",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_RESULTS = {"probabilities": 0, "logarithms": 1, "partition": 2}
_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_BAD_TARGET, _OUT_OF_MEMORY = 1, 2  # what a function returns where it has no result
DIMENSIONS = 8  # of a binary loss, after those that lie in memory as one are merged
# The structures that the C functions take (see library.c), packed. A tensor that is not there is zeros.
_VIEW, _OPERAND = "P4q", f"Pq{DIMENSIONS}q"
_LOSS_CALL = struct.Struct(f"{3 * _VIEW} 3P 6q 6d 2P q")
_BINARY_CALL = struct.Struct(f"{7 * _OPERAND} 2q {DIMENSIONS}q q 4d 2P q")
_SOFTMAX_CALL = struct.Struct(f"{4 * _VIEW} 2P 4q 2d P q")
_NO_VIEW, _NO_OPERAND = (0,) * 5, (0,) * (2 + DIMENSIONS)
_SCALARS = {dtype: torch.empty((), dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


def loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    into: Tensor | None,
    g: Tensor | None = None,
) -> Tensor:
    """The loss in `dtype`. Raises for a bad target.

    The gradient of sum(g * loss), or of the loss, goes `into` a tensor, if given, that `as_blocks` does not copy.
    """
    t1, t2, axis, label_smoothing, ignore_index, reduction, _ = options
    if not -(2**63) <= ignore_index < 2**63:
        raise RuntimeError(f"ignore_index must fit into 64 bits, as class indices do, got {ignore_index}")
    wide = _wide(logits)
    shape = logits.shape
    classes = shape[axis]
    _, outer, inner, _ = blocks = as_blocks(logits, axis)
    labels = None if target.is_floating_point() else target.contiguous()
    y = as_blocks(target, axis) if labels is None else None
    made = None if into is None else as_blocks(into, axis)
    weight = None if weight is None else weight.to(wide).to(torch.float64).contiguous()
    g = None if g is None else g.to(wide).contiguous()
    per_row = reduction == "none"
    if not per_row:
        out = torch.empty_like(_SCALARS[wide])  # quicker than `new_empty`
    elif labels is not None:
        out = torch.empty_like(labels, dtype=wide, memory_format=torch.contiguous_format)
    else:
        out = logits.new_empty(shape[:axis] + shape[axis + 1 :], dtype=wide)
    call = _LOSS_CALL.pack(
        *_view(blocks), *_view(y), *_view(made), _address(labels), _address(weight), _address(g), per_row,
        outer * inner, inner, classes, ignore_index, _REDUCTIONS[reduction], t1, t2, label_smoothing,
        sum_tolerance(target.element_size()), *options.scales(classes),
        out.data_ptr(), parallel() or 0, torch.get_num_threads(),
    )  # fmt: skip
    status = _run("bitempered_loss", call, classes)
    if status == _BAD_TARGET:
        raise bad_probabilities(target, axis) if labels is None else bad_index(target, classes, ignore_index)
    return out if dtype == wide else out.to(dtype)  # `to` takes time even where it does nothing


def gradient(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of sum(g * loss) in the logits."""
    made = empty_gradient(logits, options.axis)
    loss(logits, target, weight, options, _wide(logits), made, g)
    return made


def scale_(gradient: Tensor, g: Tensor, axis: int | None) -> Tensor:
    """Multiply the gradient in place by g: a scalar, or one number per row or, of a binary loss, per element.

    What is 0, as in ignored rows, stays 0 even if g is not finite.
    """
    total = g.sum().item() if g.dim() else g.item()  # not finite if one of them is not; quicker than testing each
    if total == 1 and not g.dim():
        return gradient
    nothing = None if math.isfinite(total) else gradient == 0
    gradient *= g.unsqueeze(axis) if g.dim() and axis is not None else g
    return gradient if nothing is None else gradient.masked_fill_(nothing, 0)


def binary_loss(
    logits: Tensor,
    target: Tensor,
    pos_weight: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    *,
    gradient: Tensor | None = None,
    g: Tensor | None = None,
) -> Tensor:
    """The binary loss in the dtype of the computation; the gradient of sum(g * loss) goes into `gradient`, if given."""
    per_element = options.reduction == "none"
    wide = _wide(logits)
    out = torch.empty_like(logits, dtype=wide) if per_element else torch.empty_like(_SCALARS[wide])
    g = None if g is None else g.to(wide)
    _binary(
        (logits, target, pos_weight, weight, g, out if per_element else None, gradient),
        *(_REDUCTIONS[options.reduction], options.t1, options.t2, *options.scales(2)),
        0 if per_element else out.data_ptr(),
    )
    return out


def sigmoid(logits: Tensor, t: float, dtype: torch.dtype, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """The tempered sigmoid in `dtype`, and its derivative in the dtype of the logits."""
    out = torch.empty_like(logits, dtype=dtype)
    slope = torch.empty_like(logits) if with_slope else None
    _binary((logits, None, None, None, None, out, slope), _REDUCTIONS["none"], 1.0, t, 1.0, 1.0, 0)
    return out, slope


def softmax(logits: Tensor, t: float, axis: int, what: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The "probabilities", their "logarithms" or the "partition" lambda_t in `dtype`, and what backward needs."""
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    state = logits.new_empty(rows, dtype=torch.float64)
    if what == "partition":
        values = torch.empty_like(state)
        _softmax(logits, axis, t, what, state, partition=values)
        return values.to(dtype), state
    out = empty_gradient(logits, axis, dtype)
    _softmax(logits, axis, t, what, state, out=out)
    return out, state


def softmax_backward(g: Tensor, logits: Tensor, state: Tensor, t: float, axis: int, what: str) -> Tensor:
    """The gradient of sum(g * softmax(logits)) in the logits."""
    made = empty_gradient(logits, axis)
    of_classes = g.unsqueeze(axis).expand(logits.shape) if what == "partition" else g
    _softmax(logits, axis, t, what, state, g=_readable(of_classes), gradient=made)
    return made


def _softmax(
    logits: Tensor,
    axis: int,
    t: float,
    what: str,
    state: Tensor,
    *,
    out: Tensor | None = None,
    partition: Tensor | None = None,
    g: Tensor | None = None,
    gradient: Tensor | None = None,
) -> None:
    _, outer, inner, _ = blocks = as_blocks(logits, axis)
    others = [None if x is None else as_blocks(x, axis) for x in (out, g, gradient)]
    out_view, g_view, gradient_view = map(_view, others)
    call = _SOFTMAX_CALL.pack(
        *_view(blocks), *out_view, *g_view, *gradient_view, state.data_ptr(), _address(partition),
        outer * inner, inner, logits.shape[axis], _RESULTS[what], t, 1.0, parallel() or 0, torch.get_num_threads(),
    )  # fmt: skip
    _run("bitempered_softmax", call, logits.shape[axis])


def _binary(tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """Call the C function on tensors that broadcast to the first of them."""
    shape = tensors[0].shape  # type: ignore[union-attr]
    given = [_readable(x) for x in tensors if x is not None]
    n = given[0].numel()
    if all(x.shape == shape and x.is_contiguous() for x in given):
        sizes, strides = [n], [[1]] * len(given)
    else:
        sizes, strides = merge_dimensions(shape, [x.expand(shape).stride() for x in given])
    if len(sizes) > DIMENSIONS:
        raise RuntimeError(f"the C kernel takes at most {DIMENSIONS} dimensions of different strides, got {len(sizes)}")
    unused = (0,) * (DIMENSIONS - len(sizes))
    made = iter(zip(given, strides, strict=True))
    operands: list[int] = []
    for tensor in tensors:
        if tensor is None:
            operands += _NO_OPERAND
        else:
            x, stride = next(made)
            operands += x.data_ptr(), DTYPES[x.dtype], *stride, *unused
    call = _BINARY_CALL.pack(
        *operands, n, len(sizes), *sizes, *unused, *options, parallel() or 0, torch.get_num_threads()
    )
    _run("bitempered_binary", call, 2)


def _readable(x: Tensor) -> Tensor:
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    # The C code does not see that a tensor is to be read with the other sign, as the imaginary part of a conjugate is.
    return x.resolve_neg() if x.is_neg() else x


def _wide(logits: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _run(name: str, call: bytes, classes: int) -> int:
    made = library()
    if isinstance(made, Unavailable):
        raise made
    status = getattr(made, name)(call)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"no memory for a row of {classes} classes in each of {torch.get_num_threads()} threads")
    return status


def _view(blocks: Any) -> tuple[int, ...]:
    if blocks is None:
        return _NO_VIEW
    x, _, _, (outer, inner, classes) = blocks
    return x.data_ptr(), DTYPES[x.dtype], outer, classes, inner


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
