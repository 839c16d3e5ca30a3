"""The bi-tempered logistic loss for Keras 3, on its TensorFlow, JAX and PyTorch backends: losses for `model.compile`.

The mathematics is `bitempered.core` on `keras.ops`, the same code for every backend. First and second reverse-mode
derivatives in the logits are closed forms of one solve; those in `y_true` raise. Keras itself casts both arguments to
the `dtype` of the loss (here float32 for half precision), masks, weights and reduces. `y_true` may hold anything where
Keras masks an example, such as a padding of -1. To load a model that was saved with one of these losses, import this
module first.

Shapes, options and temperatures are always checked; values only in eager mode on the CPU. In a compiled step invalid
values give NaN: class indices out of range, negative probabilities. Probabilities need not sum to 1 there: y counts as
sum(y) times y / sum(y).

The temperatures are attributes, `loss.t1` and `loss.t2`, which a callback may set between epochs. Keras compiles their
values into a step. To change them without recompiling, add `loss.temperatures` to the metrics: the temperatures become
variables, which Keras also logs. A loaded model must be compiled again with the metric of its own loss. To set them
within an epoch on JAX, where Keras keeps variables elsewhere meanwhile, call `self.model.jax_state_sync()` first.

    loss = BiTemperedLogisticLoss(t1=1.0, t2=1.0, rescale=True)
    model.compile("adam", loss, metrics=["accuracy", loss.temperatures])

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            loss.t1, loss.t2 = schedule(epoch)
"""

import math
import warnings
from collections.abc import Callable
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import numpy as np

from bitempered import core
from bitempered.checks import (
    check_binary_probabilities,
    check_indices,
    check_label_smoothing,
    check_logits,
    check_probabilities,
    check_rescale,
    check_rescale_option,
    check_temperature,
    check_temperatures,
    sum_tolerance,
)
from bitempered.encoding import compute_dtype, encode_binary, encode_classes, namespace, nan_if_negative, rescaled
from bitempered.extras import install

try:
    import keras
    from keras import ops
except ImportError as error:
    missing = (error.name or "keras").split(".")[0]
    if missing in ("tensorflow", "jax", "torch"):
        raise ModuleNotFoundError(
            f"Keras needs its backend: pip install {missing}, or set KERAS_BACKEND to tensorflow, jax or torch"
        ) from error
    raise ModuleNotFoundError(f"bitempered.keras needs Keras 3: {install('keras')}") from None

__all__ = ["BiTemperedBinaryLogisticLoss", "BiTemperedLogisticLoss", "Temperatures"]

Tensor = Any  # of the backend

xp = namespace(
    ops,
    # On PyTorch Keras refuses the maximum of an empty batch, and puts an `initial` one on the default device.
    max=lambda x, axis: (ops.sum if 0 in x.shape else ops.max)(ops.stop_gradient(x), axis=axis, keepdims=True),
    eps=lambda x: float(np.finfo(keras.backend.standardize_dtype(x.dtype)).eps),
    cast=lambda x, like: ops.cast(x, like.dtype),
    class_indices=lambda classes, target: ops.arange(classes, dtype=target.dtype),
)


@keras.saving.register_keras_serializable(package="bitempered")
class Temperatures(keras.metrics.Metric):
    """The temperatures of a loss as variables of a model, and in its logs; see the top of this module."""

    def __init__(self, t1: float, t2: float, name: str = "temperatures", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.t1, self.t2 = (self.add_variable((), "zeros", dtype=self.dtype, name=name) for name in ("t1", "t2"))
        self.t1.assign(t1)  # an initializer would round to float32 on TensorFlow
        self.t2.assign(t2)

    def update_state(self, *_: Any, **__: Any) -> None:
        """Do nothing: the temperatures are set, not measured."""

    def reset_state(self) -> None:
        """Do nothing: Keras resets metrics at every epoch."""

    def result(self) -> dict[str, Tensor]:
        return {"t1": self.t1 + 0.0, "t2": self.t2 + 0.0}  # values, not variables

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "t1": float(self.t1.value), "t2": float(self.t2.value)}


class _Loss(keras.losses.Loss):
    """The options that both losses share."""

    axis = -1

    def __init__(
        self,
        t1: float,
        t2: float,
        from_logits: bool = True,
        label_smoothing: float = 0.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
        rescale: bool = False,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self._numbers = dict(zip(("t1", "t2"), check_temperatures(t1, t2), strict=True))
        self._metric: Temperatures | None = None
        self._traced = False  # whether a compiled step may have the numbers as constants
        check_rescale_option(rescale)
        self.rescale = rescale
        check_label_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing
        if from_logits is not True:
            raise ValueError(
                f"from_logits must be True, got {from_logits!r}: probabilities are not supported, since the loss has a"
                " softmax of its own; leave out the activation of the last layer"
            )

    def __dir__(self) -> list[str]:
        """Leave out `temperatures`: Keras reads every attribute to save a model, which would make variables."""
        return [name for name in super().__dir__() if name != "temperatures"]

    t1 = property(lambda self: self._numbers["t1"], lambda self, value: self._set("t1", value))
    t2 = property(lambda self: self._numbers["t2"], lambda self, value: self._set("t2", value))

    def _set(self, name: str, value: float) -> None:
        before, self._numbers[name] = self._numbers[name], check_temperature(value, name)  # the two together when used
        if self._metric is not None:
            variable = getattr(self._metric, name)
            if not _is_elsewhere(variable):
                variable.assign(value)
            elif before != value:
                warnings.warn(
                    f"Keras does not take this {name}, since on JAX it keeps variables elsewhere within an epoch: call"
                    " self.model.jax_state_sync() first, or set temperatures between epochs",
                    stacklevel=3,
                )
        elif self._traced and before != value:
            warnings.warn(
                f"a step that Keras has compiled keeps the old {name}: to change temperatures while a model trains,"
                " give model.compile the metric `loss.temperatures`",
                stacklevel=3,
            )

    @property
    def temperatures(self) -> Temperatures:
        """The metric that makes the temperatures variables; see the top of this module."""
        if self._metric is None:
            self._metric = Temperatures(self.t1, self.t2, dtype=self.dtype)
        return self._metric

    def _pair(self, classes: int, like: Tensor) -> tuple[Any, Any]:
        """Validate the temperatures; return numbers, or tensors, which are NaN if a compiled step gets bad ones."""
        pair = check_temperatures(**self._numbers)
        check_rescale(self.rescale, classes, self.t2)
        if self._metric is None:
            if keras.backend.backend() != "torch":  # PyTorch reads the numbers in each step, or recompiles
                self._traced = self._traced or _values(like) is None
            return pair
        t1, t2 = (ops.convert_to_tensor(variable.value, dtype=self.dtype) for variable in self._metric.variables)
        valid = (t1 >= 0) & (t1 < 2) & (t1 <= t2) & (t2 < math.inf)
        return xp.where(valid, t1, math.nan), xp.where(valid, t2, math.nan)

    @property
    def dtype(self) -> str:
        """float32 even for half precision: Keras casts class indices to this, and half precision would round them."""
        return compute_dtype(super().dtype)

    def __call__(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        mask = _mask(y_pred)  # where False, Keras multiplies the loss by 0: it must not be NaN
        if mask is not None and len(mask.shape) == len(y_pred.shape) - 1:
            y_true = ops.convert_to_tensor(y_true, dtype=self.dtype)
            filler = 0.0  # class 0, or a probability
            if len(y_true.shape) == len(y_pred.shape):
                mask = ops.expand_dims(mask, self.axis)
                if y_true.shape[self.axis] == y_pred.shape[self.axis]:
                    filler = 1 / (y_pred.shape[self.axis] or 1)  # probabilities that sum to 1; None in a graph
            y_true = xp.where(mask, y_true, filler)
        return super().__call__(y_true, y_pred, sample_weight)

    def get_config(self) -> dict[str, Any]:
        options = {"from_logits": True, "label_smoothing": self.label_smoothing, "rescale": self.rescale}
        return {**super().get_config(), **self._numbers, **options, "dtype": self.dtype}


@keras.saving.register_keras_serializable(package="bitempered")
class BiTemperedLogisticLoss(_Loss):
    """The robust bi-tempered logistic loss; replaces both categorical cross-entropies of Keras.

        bregman_divergence(y, tempered_softmax(logits, t2), t1)      see bitempered.divergences for the formula

    It is 0 exactly where the two agree. At t1 = t2 = 1 it is the cross-entropy minus the entropy of the target.
    Predict with `bitempered.numpy.tempered_softmax(model.predict(x), t2)`, not with softmax.

    Args:
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        from_logits: must be True: probabilities are not supported. `y_pred` are logits, the outputs of a last layer
            without activation. -inf masks a class.
        label_smoothing: e in [0, 1] turns y into (1 - e) y + e / C.
        axis: the class axis of `y_pred`, of length C.
        reduction, name, dtype: as in `keras.losses.Loss`.
        rescale: whether to multiply the logits by C^(t2-1) and the loss by C^(1-t1). At equal logits the gradient is
            then that of cross-entropy, so that its learning rates suit every pair of temperatures. The probabilities
            are `tempered_softmax(C**(t2 - 1) * logits, t2)`.

    `y_true` shaped like `y_pred` holds class probabilities; without the class axis, or with one of length 1, class
    indices.

    >>> loss = BiTemperedLogisticLoss(t1=0.8, t2=1.2, reduction=None)
    >>> [round(float(x), 4) for x in loss(y_true=[0, 2], y_pred=[[4.0, 0.0, 0.0], [0.0, 9.0, 0.0]])]
    [0.0509, 3.2077]

    Reference: Amid, Warmuth, Anil, Koren. Robust Bi-Tempered Logistic Loss Based on Bregman Divergences. NeurIPS 2019.
    """

    def __init__(
        self,
        t1: float,
        t2: float,
        from_logits: bool = True,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
        rescale: bool = False,
    ) -> None:
        super().__init__(
            t1, t2, from_logits=from_logits, label_smoothing=label_smoothing, reduction=reduction, name=name,
            dtype=dtype, rescale=rescale,
        )  # fmt: skip
        if not isinstance(axis, Integral):
            raise TypeError(f"axis must be an int, got {type(axis).__name__}")
        self.axis = int(axis)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "axis": self.axis}

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)  # Keras passes lists on as lists
        axis, indices = _check_classes(tuple(y_true.shape), tuple(y_pred.shape), self.axis)
        classes, values = y_pred.shape[axis], _values(y_true)
        if indices:
            if values is not None:
                check_indices(values, classes, "y_true")
            y_true = ops.squeeze(y_true, axis) if len(y_true.shape) == len(y_pred.shape) else y_true
        else:
            if values is not None:
                # Keras has already cast the target, which may have been in half precision.
                check_probabilities(values, axis, sum_tolerance(itemsize=2), "y_true")
            y_true = _constant(y_true)
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing, "axis": axis, "checked": False}
        y, _, is_label = encode_classes(y_pred, y_true, indices=indices, **options, xp=xp)
        t1, t2 = self._pair(classes, y_pred)
        return _losses(y_pred, y, t1, t2, axis=axis, is_label=is_label, rescale=self.rescale)


@keras.saving.register_keras_serializable(package="bitempered")
class BiTemperedBinaryLogisticLoss(_Loss):
    """`BiTemperedLogisticLoss` of each logit a against 0; replaces `keras.losses.BinaryCrossentropy`.

    A logit a with target y is the two-class problem with logits (0, a) and probabilities (1 - y, y). As in Keras, the
    loss of an example is the mean over its last axis.

    Args:
        t1, t2: as in `BiTemperedLogisticLoss`.
        from_logits: must be True: probabilities are not supported. `y_pred` are logits, the outputs of a last layer
            without activation.
        label_smoothing: e in [0, 1] turns y into (1 - e) y + e / 2.
        reduction, name, dtype: as in `keras.losses.Loss`.
        rescale: as in `BiTemperedLogisticLoss`, with C = 2.

    `y_true` holds probabilities of the positive class, shaped like `y_pred`; a last axis of length 1 may be omitted.

    >>> loss = BiTemperedBinaryLogisticLoss(t1=0.5, t2=2.0, reduction=None)
    >>> [round(float(x), 4) for x in loss(y_true=[[0.0], [0.0]], y_pred=[[-8.0], [8.0]])]
    [0.0304, 1.2555]
    """

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        logits, target = tuple(y_pred.shape), tuple(y_true.shape)
        if logits[-1:] == (1,) and len(target) == len(logits) - 1:
            y_true, target = ops.expand_dims(y_true, -1), (*target, 1)
        if not logits or not _agree(logits, target):
            raise ValueError(f"y_true must have the shape of y_pred, at least one axis: {logits}, got {target}")
        values = _values(y_true)
        if values is not None:
            check_binary_probabilities(values, "y_true")
        a, y, _ = encode_binary(y_pred, _constant(y_true), label_smoothing=self.label_smoothing, xp=xp)
        t1, t2 = self._pair(2, y_pred)
        losses = _losses(a, y, t1, t2, axis=len(logits), is_label=False, rescale=self.rescale)
        return ops.sum(losses, axis=-1) / ops.sum(ops.ones_like(losses), axis=-1)  # ops.mean is float32 on JAX


def _losses(a: Tensor, y: Tensor, t1: Any, t2: Any, *, axis: int, is_label: bool, rescale: bool) -> Tensor:
    """The loss of each example; NaN where a y is negative or NaN."""
    if rescale:
        a, outer = rescaled(a, t1, t2, classes=a.shape[axis], axis=axis, xp=xp)
        return outer * _losses(a, y, t1, t2, axis=axis, is_label=is_label, rescale=False)
    y = nan_if_negative(y, None, xp=xp)
    u, m = core.solve(ops.stop_gradient(a), t2, axis=axis, xp=xp)
    target = core.weigh(y, None, is_label=is_label, axis=axis, xp=xp)
    losses = core.weighted_loss(target, core.log_probs(u, m, t2, xp=xp), t1, axis=axis, xp=xp)

    def gradient(upstream: Tensor, _: Tensor, a: Tensor, m: Tensor, y: Tensor) -> Tensor:
        target = core.weigh(y, None, is_label=is_label, axis=axis, xp=xp)
        at = core.state(core.gaps(a, axis=axis, xp=xp), _tied(m, a, t2, axis), t2, axis=axis, xp=xp)
        return upstream * core.weighted_gradient(target, at, t1, t2, axis=axis, xp=xp)

    return ops.squeeze(_with_gradient(gradient, losses, a, m, y), axis)


# Derivatives


def _with_gradient(gradient: Callable[..., Tensor], value: Tensor, x: Tensor, *constants: Tensor) -> Tensor:
    """Return `value`, a constant to the backend, as a function of x.

    Its gradient is `gradient(upstream, value, x, *constants)`, which the backend can differentiate in x.
    """

    @ops.custom_gradient
    def function(*args: Tensor) -> Any:
        def rule(*passed: Tensor, upstream: Tensor = None) -> Any:
            # Keras passes `upstream` alone, and on PyTorch the arguments, tied to the graph of a second derivative.
            by_x = gradient(*passed, *args) if upstream is None else gradient(upstream, *passed)
            return ops.zeros_like(value), by_x, *map(ops.zeros_like, constants)

        return args[0], rule

    return function(ops.stop_gradient(value), x, *constants)


def _tied(m: Tensor, a: Tensor, t: Any, axis: int) -> Tensor:
    """Return the solution m as a function of the logits a, with the gradient `core.normalizer_gradient`.

    The rule ties its own m too, for a second derivative without a second solve.
    """

    def gradient(upstream: Tensor, m: Tensor, a: Tensor) -> Tensor:
        at = core.state(core.gaps(a, axis=axis, xp=xp), _tied(m, a, t, axis), t, axis=axis, xp=xp)
        return upstream * core.normalizer_gradient(at, t, xp=xp)

    return _with_gradient(gradient, m, a)


def _constant(y_true: Tensor) -> Tensor:
    def refuse(*_: Tensor) -> Tensor:
        raise NotImplementedError(
            "the losses of bitempered.keras have no gradient in y_true: pass keras.ops.stop_gradient(y_true)"
        )

    return _with_gradient(refuse, y_true, y_true)


# Checks


def _check_classes(target: tuple[Any, ...], logits: tuple[Any, ...], axis: int) -> tuple[int, bool]:
    """Validate shapes; return the class axis, counted from the front, and whether the target holds class indices."""
    axis = check_logits(SimpleNamespace(shape=logits, ndim=len(logits), dtype=np.dtype(np.float32)), axis)
    before, classes, after = logits[:axis], logits[axis], logits[axis + 1 :]
    if classes is None:
        raise ValueError(f"y_pred must have a known number of classes, got shape {logits} with axis {axis}")
    known = len(target) == len(logits) and target[axis] is not None
    if known and _agree(target, logits):
        return axis, False
    if _agree(target, before + after) or (known and _agree(target, (*before, 1, *after))):
        return axis, True
    raise ValueError(
        f"y_true must be class indices of shape {before + after} or class probabilities of shape {logits},"
        f" got shape {target}"
    )


def _agree(shape: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two shapes can be the same: a length may be None in a TensorFlow graph."""
    return len(shape) == len(other) and all(m == n or None in (m, n) for m, n in zip(shape, other, strict=True))


def _mask(y_pred: Tensor) -> Tensor | None:
    try:  # JAX's traced arrays take no attributes, and Keras keeps their masks elsewhere
        from keras.src.backend.common.masking import get_keras_mask
    except ImportError:
        return getattr(y_pred, "_keras_mask", None)
    return get_keras_mask(y_pred)


def _is_elsewhere(variable: Any) -> bool:
    """Whether Keras has emptied a variable, as it does on JAX within an epoch, at whose end it will overwrite it."""
    try:
        return variable.value is None
    except TypeError:  # it then looks for an initializer, and there is none any more
        return True


def _values(x: Tensor) -> Any:
    """Return x as a NumPy array, or None if the backend refuses: x is traced, or on a CUDA device."""
    if keras.backend.backend() == "torch":
        import torch

        if torch.compiler.is_compiling():
            return None
    try:
        return np.asarray(ops.stop_gradient(x))
    except (NotImplementedError, RuntimeError, TypeError):
        return None
