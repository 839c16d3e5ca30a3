"""Losses and softmaxes on a CPU, by the C kernels of `library`: any float dtype, layout and kind of target."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from bitempered.checks import sum_tolerance
from bitempered.kernels.layout import as_blocks, empty_gradient, merge_dimensions
from bitempered.kernels.library import Unavailable, compiler, is_shipped, library, parallel
from bitempered.kernels.options import LossOptions
from bitempered.kernels.targets import bad_index, bad_probabilities

__all__ = [
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


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("dtype", "outer", "classes", "inner")),
    )


DIMENSIONS = 8  # of a binary loss, after those that lie in memory as one are merged


class _Operand(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("strides", ctypes.c_int64 * DIMENSIONS))


class _BinaryCall(ctypes.Structure):
    _fields_ = (
        *((name, _Operand) for name in ("logits", "target", "pos_weight", "weight", "g", "out", "gradient")),
        *((name, ctypes.c_int64) for name in ("n", "dimensions")),
        ("sizes", ctypes.c_int64 * DIMENSIONS),
        ("reduction", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("t1", "t2", "stretch", "outer")),
        *((name, ctypes.c_void_p) for name in ("reduced", "parallel")),
        ("threads", ctypes.c_int64),
    )


class _SoftmaxCall(ctypes.Structure):
    _fields_ = (
        *((name, _View) for name in ("logits", "out", "g", "gradient")),
        *((name, ctypes.c_void_p) for name in ("m", "partition")),
        *((name, ctypes.c_int64) for name in ("n", "inner", "classes", "what")),
        *((name, ctypes.c_double) for name in ("t", "stretch")),
        ("parallel", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class _LossCall(ctypes.Structure):
    _fields_ = (
        *((name, _View) for name in ("logits", "target", "gradient")),
        *((name, ctypes.c_void_p) for name in ("labels", "weight", "g")),
        *((name, ctypes.c_int64) for name in ("g_stride", "n", "inner", "classes", "ignore_index", "reduction")),
        *((name, ctypes.c_double) for name in ("t1", "t2", "label_smoothing", "tolerance", "stretch", "outer")),
        *((name, ctypes.c_void_p) for name in ("losses", "reduced", "parallel")),
        ("threads", ctypes.c_int64),
    )


def loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype, into: Tensor | None
) -> Tensor:
    """The loss in `dtype`, its gradient `into` a tensor that `as_blocks` does not copy. Raises for a bad target."""
    return _loss(logits, target, weight, options, into).to(dtype)


def gradient(g: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of sum(g * loss) in the logits."""
    made = empty_gradient(logits, options.axis)
    _loss(logits, target, weight, options, made, g)
    return made


def scale_(gradient: Tensor, g: Tensor, axis: int | None) -> Tensor:
    """Multiply the gradient in place by g: a scalar, or one number per row or, of a binary loss, per element."""
    if g.dim() or g.item() != 1:
        gradient *= g.unsqueeze(axis) if g.dim() and axis is not None else g
    return gradient


def _loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    gradient: Tensor | None,
    g: Tensor | None = None,
) -> Tensor:
    """The loss in the dtype of the computation; the gradient of sum(g * loss) goes into `gradient`, if given."""
    axis, ignore_index, reduction = options.axis, options.ignore_index, options.reduction
    if not -(2**63) <= ignore_index < 2**63:
        raise RuntimeError(f"ignore_index must fit into 64 bits, as class indices do, got {ignore_index}")
    wide = _wide(logits)
    classes = logits.shape[axis]
    _, outer, inner, _ = blocks = as_blocks(logits, axis)
    indices = not target.is_floating_point()
    labels = target.contiguous() if indices else None
    y = None if indices else as_blocks(target, axis)
    into = None if gradient is None else as_blocks(gradient, axis)
    weight = None if weight is None else weight.to(wide).to(torch.float64).contiguous()
    g = None if g is None else g.to(wide).contiguous()
    per_row = reduction == "none"
    shape = logits.shape[:axis] + logits.shape[axis + 1 :] if per_row else ()
    out = torch.empty(shape, dtype=wide if per_row else torch.float64)
    call = _LossCall(
        _view(blocks), _view(y), _view(into),
        *map(_address, (labels, weight, g)), int(per_row), outer * inner, inner, classes, ignore_index,
        _REDUCTIONS[reduction], options.t1, options.t2, options.label_smoothing, sum_tolerance(target.element_size()),
        *options.scales(classes), out.data_ptr() if per_row else None, out.data_ptr(), parallel(),
        torch.get_num_threads(),
    )  # fmt: skip
    status = _run("bitempered_loss", call, classes)
    if status == _BAD_TARGET:
        raise bad_index(target, classes, ignore_index) if indices else bad_probabilities(target, axis)
    return out if per_row else out.to(wide)


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
    out = torch.empty_like(logits, dtype=wide) if per_element else None
    reduced = torch.empty((), dtype=torch.float64)
    g = None if g is None else g.to(wide)
    _binary(
        (logits, target, pos_weight, weight, g, out, gradient),
        *(_REDUCTIONS[options.reduction], options.t1, options.t2, *options.scales(2)),
        None if per_element else reduced.data_ptr(),
    )
    return reduced.to(wide) if out is None else out


def sigmoid(logits: Tensor, t: float, dtype: torch.dtype, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """The tempered sigmoid in `dtype`, and its derivative in the dtype of the logits."""
    out = torch.empty_like(logits, dtype=dtype)
    slope = torch.empty_like(logits) if with_slope else None
    _binary((logits, None, None, None, None, out, slope), _REDUCTIONS["none"], 1.0, t, 1.0, 1.0, None)
    return out, slope


def softmax(logits: Tensor, t: float, axis: int, what: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The "probabilities", their "logarithms" or the "partition" lambda_t in `dtype`, and what backward needs."""
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    state = torch.empty(rows, dtype=torch.float64)
    if what == "partition":
        values = torch.empty(rows, dtype=torch.float64)
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
    call = _SoftmaxCall(
        _view(blocks), *map(_view, others), state.data_ptr(), _address(partition),
        outer * inner, inner, logits.shape[axis], _RESULTS[what], t, 1.0, parallel(), torch.get_num_threads(),
    )  # fmt: skip
    _run("bitempered_softmax", call, logits.shape[axis])


def _binary(tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """Call the C function on tensors that broadcast to the first of them."""
    shape = tensors[0].shape  # type: ignore[union-attr]
    given = [_readable(x).expand(shape) for x in tensors if x is not None]
    sizes, strides = merge_dimensions(shape, [x.stride() for x in given])
    if len(sizes) > DIMENSIONS:
        raise RuntimeError(f"the C kernel takes at most {DIMENSIONS} dimensions of different strides, got {len(sizes)}")
    made = iter(
        _Operand(x.data_ptr(), DTYPES[x.dtype], (ctypes.c_int64 * DIMENSIONS)(*stride))
        for x, stride in zip(given, strides, strict=True)
    )
    operands = [_Operand() if x is None else next(made) for x in tensors]
    lengths = (ctypes.c_int64 * DIMENSIONS)(*sizes)
    n = given[0].numel()
    call = _BinaryCall(*operands, n, len(sizes), lengths, *options, parallel(), torch.get_num_threads())
    _run("bitempered_binary", call, 2)


def _readable(x: Tensor) -> Tensor:
    # The C code does not see that a tensor is to be read with the other sign, as the imaginary part of a conjugate is.
    return (x if x.dtype in DTYPES else x.to(torch.float32)).resolve_neg()


def _wide(logits: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _run(name: str, call: ctypes.Structure, classes: int) -> int:
    made = library()
    if isinstance(made, Unavailable):
        raise made
    status = getattr(made, name)(ctypes.byref(call))
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"no memory for a row of {classes} classes in each of {torch.get_num_threads()} threads")
    return status


def _view(blocks: Any) -> _View:
    if blocks is None:
        return _View()
    x, _, _, (outer, inner, classes) = blocks
    return _View(x.data_ptr(), DTYPES[x.dtype], outer, classes, inner)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
