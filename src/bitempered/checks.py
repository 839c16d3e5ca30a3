"""Validation that the adapters share: numbers, and the shapes and dtypes of arrays."""

import math
from numbers import Integral, Real
from typing import Any

FLOATS = ("float16", "bfloat16", "float32", "float64")

Array = Any  # of any framework whose arrays have `shape`, `ndim` and a `dtype` with a NumPy name
Shape = tuple[int, ...]


def check_number(value: float, name: str, least: float | None = None, most: float | None = None) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond float64
        number = math.inf
    # Not math.isfinite, which torch.compile cannot trace.
    finite = -math.inf < number < math.inf
    if finite and (least is None or number >= least) and (most is None or number <= most):
        return number
    if least is not None and most is not None:
        raise ValueError(f"{name} must be in [{least}, {most}], got {value}")
    bound = f" >= {least}" if least is not None else f" <= {most}" if most is not None else ""
    raise ValueError(f"{name} must be a finite number{bound}, got {value}")


def check_temperature(t: float, name: str) -> float:
    return check_number(t, name, 0)


def check_temperatures(t1: float, t2: float) -> tuple[float, float]:
    t1, t2 = check_temperature(t1, "t1"), check_temperature(t2, "t2")
    if t1 >= 2:
        raise ValueError(f"t1 must be in [0, 2), got {t1}")
    if t1 > t2:
        raise ValueError(f"t1 must not exceed t2, got t1 = {t1} and t2 = {t2}")
    return t1, t2


def check_rescale_option(rescale: bool) -> None:
    if not isinstance(rescale, bool):
        raise TypeError(f"rescale must be True or False, got {rescale!r}")


def check_rescale(rescale: bool, classes: int, t2: float) -> None:
    """Validate the option `rescale` for Python numbers: its largest factor must fit into float32 with room to spare."""
    check_rescale_option(rescale)
    if rescale and (t2 - 1) * math.log10(max(classes, 1)) > 30:
        raise rescale_overflow(classes, t2)


def rescale_overflow(classes: int, t2: float) -> ValueError:
    return ValueError(
        f"rescale multiplies the logits by K^(t2 - 1), more than 1e30 for {classes} classes and t2 = {t2:g}:"
        " choose a smaller t2"
    )


def check_label_smoothing(label_smoothing: float, error: type[Exception] = ValueError) -> None:
    if not isinstance(label_smoothing, Real) or not 0.0 <= label_smoothing <= 1.0:
        raise error(f"label_smoothing must be between 0 and 1, got {label_smoothing!r}")


def check_floating(x: Array, name: str) -> None:
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, got {x.dtype.name}; convert it")


def check_logits(logits: Array, axis: int) -> int:
    """Validate logits; return the class axis, counted from the front."""
    check_floating(logits, "logits")
    if not isinstance(axis, Integral):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    if logits.ndim and not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"axis must be in [{-logits.ndim}, {logits.ndim - 1}] for this shape, got {axis}")
    if logits.ndim == 0 or logits.shape[axis] == 0:
        raise ValueError(f"logits must have a class axis of at least one class, got shape {logits.shape}")
    return axis % logits.ndim


def check_class_loss(logits: Array, target: Array, weight: Array | None, *, label_smoothing: float, axis: int) -> int:
    """Validate everything except values; return the class axis, counted from the front."""
    check_label_smoothing(label_smoothing)
    axis = check_logits(logits, axis)
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    indices = is_integer(target)
    if not (indices or target.dtype.name in FLOATS) or target.shape != (rows if indices else logits.shape):
        raise ValueError(expected_target(rows, logits.shape, target.dtype.name, target.shape))
    if weight is not None:
        check_floating(weight, "weight")
        if weight.shape != (logits.shape[axis],):
            raise ValueError(expected_weight("weight", logits.shape[axis], weight.shape))
    return axis


def check_binary(logits: Array, target: Array, weight: Array | None, pos_weight: Array | None) -> None:
    check_floating(logits, "logits")
    if target.shape != logits.shape:
        raise ValueError(expected_shape("target must have", logits.shape, target.shape))
    if not (is_integer(target) or target.dtype.name in (*FLOATS, "bool")):
        raise TypeError(f"target must hold real numbers or booleans, got {target.dtype.name}")
    for name, value in (("weight", weight), ("pos_weight", pos_weight)):
        if value is None:
            continue
        check_floating(value, name)
        if not broadcasts(value.shape, logits.shape):
            raise ValueError(expected_shape(f"{name} must broadcast to", logits.shape, value.shape))


# Messages, for adapters that raise different exceptions


def expected_target(rows: Shape, logits: Shape, dtype: Any, shape: Shape) -> str:
    return (
        f"target must be class indices (integers) of shape {tuple(rows)} or class probabilities (floats) of shape"
        f" {tuple(logits)}, got {dtype} of shape {tuple(shape)}"
    )


def expected_weight(name: str, classes: int, shape: Shape) -> str:
    return f"{name} must have one entry for each of the {classes} classes, got shape {tuple(shape)}"


def expected_shape(what: str, logits: Shape, shape: Shape) -> str:
    return f"{what} the shape of logits, {tuple(logits)}, got {tuple(shape)}"


def check_indices(values: Array, classes: int, name: str) -> None:
    if not ((values >= 0) & (values < classes) & (values % 1 == 0)).all():
        raise bad_index(values, classes, name)


def check_probabilities(values: Array, axis: int, tolerance: float, name: str) -> None:
    sums = values.sum(axis)
    if not ((values >= 0).all() and (abs(sums - 1) <= tolerance).all()):
        raise bad_probabilities(values, sums, tolerance, name)


def check_binary_probabilities(values: Array, name: str) -> None:
    if not ((values >= 0) & (values <= 1)).all():
        raise bad_binary_probabilities(values, name)


def sum_tolerance(itemsize: int) -> float:
    """How far from 1 class probabilities may sum, in a dtype of so many bytes."""
    return 1e-3 if itemsize > 2 else 1e-2


def bad_index(values: Array, classes: int, name: str, *, or_ignored: str = "") -> IndexError:
    return IndexError(f"{name} must hold class indices from 0 to {classes - 1}{or_ignored}, got {value_range(values)}")


def bad_probabilities(values: Array, sums: Array, tolerance: float, name: str) -> ValueError:
    return ValueError(
        f"{name} must hold probabilities in [0, 1] that sum to 1 within {tolerance} over the classes,"
        f" got {value_range(values)}, with sums from {sums.min():g} to {sums.max():g}"
    )


def bad_binary_probabilities(values: Array, name: str) -> ValueError:
    return ValueError(f"{name} must hold probabilities in [0, 1], got {value_range(values)}")


def negative_weight(weight: Array, name: str) -> ValueError:
    return ValueError(f"{name} must not be negative, got {weight[weight < 0].min():g}")


def value_range(x: Array) -> str:
    return f"values from {x.min():g} to {x.max():g}"


def is_integer(x: Array) -> bool:
    return x.dtype.kind in "iu"


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    trailing = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape, trailing, strict=True))
