"""What test_keras.py asks of a Keras backend. A process has one backend: as a script this is JSON in, JSON out."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
from keras import ops

ALONE = set(sys.modules)

import bitempered.keras as bt

IMPORTED = {name.split(".")[0] for name in set(sys.modules) - ALONE}

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import keras_digits

BACKEND = keras.backend.backend()


def everything(inputs):
    logits, index, soft = np.array(inputs["logits"]), np.array(inputs["index"]), np.array(inputs["soft"])
    direction = np.array(inputs["direction"])
    return {
        "imported": sorted(IMPORTED),
        "numbers": [
            numbers(logits, index, soft, t1, t2, direction if [t1, t2] in inputs["curved"] else None)
            for t1, t2 in inputs["pairs"]
        ],
        "compiled": compiled(logits.astype(np.float32), index, soft),
        "manners": manners(logits, index),
        "half": half_precision(logits, index),
        "schedule": schedule(logits, index),
        "by_batch": [by_batch(logits, index, synchronised) for synchronised in (False, True)],
        "refusal": refusal(logits, soft),
        "padded": padded(),
        "empty": empty(),
        "one_hot": one_hot(),
        "example": keras_digits.train(bt.BiTemperedLogisticLoss(t1=0.2, t2=1.2), epochs=3),
    }


def numbers(logits, index, soft, t1, t2, direction):
    """[losses, gradient of their sum, gradient of that along `direction`] of each kind of target."""
    options = {"reduction": None, "dtype": "float64"}
    plain = bt.BiTemperedLogisticLoss(t1, t2, **options)
    smooth = bt.BiTemperedLogisticLoss(t1, t2, label_smoothing=0.125, **options)
    binary = bt.BiTemperedBinaryLogisticLoss(t1, t2, label_smoothing=0.125, **options)
    single = bt.BiTemperedLogisticLoss(t1, t2, reduction=None)
    rescaled = bt.BiTemperedLogisticLoss(t1, t2, rescale=True, **options)
    variable = bt.BiTemperedLogisticLoss(0.3, 1.9, **options)
    assert float(variable.temperatures.t2.value) == 1.9  # from here on the temperatures are variables
    variable.t1, variable.t2 = t1, t2
    masked = np.where(np.arange(6) == 2, -np.inf, logits)  # a class that is nobody's target
    return {
        "index": derivatives(lambda a: plain(index, a), logits, direction),
        "variable": derivatives(lambda a: variable(index, a), logits, direction),
        "rescaled": derivatives(lambda a: rescaled(index, a), logits),
        "soft": derivatives(lambda a: plain(soft, a), logits),
        "masked": derivatives(lambda a: plain(index, a), masked),
        "smooth": derivatives(lambda a: smooth(index, a), logits),
        "binary": derivatives(lambda a: binary(soft[:, :1], a), logits[:, :1]),
        "float32": derivatives(lambda a: single(index, a), logits.astype(np.float32)),
    }


def derivatives(f, a, direction=None):
    second = None
    if BACKEND == "tensorflow":
        import tensorflow as tf

        a = tf.constant(a)
        with tf.GradientTape() as outer:
            outer.watch(a)
            with tf.GradientTape() as inner:
                inner.watch(a)
                losses = f(a)
            gradient = inner.gradient(losses, a)
            along = gradient * (0 if direction is None else direction)
        if direction is not None:
            second = outer.gradient(along, a)
    elif BACKEND == "jax":
        import jax

        losses, pullback = jax.vjp(f, a)
        (gradient,) = pullback(np.ones_like(losses))
        if direction is not None:
            second = jax.grad(lambda a: (jax.grad(lambda a: f(a).sum())(a) * direction).sum())(a)
    else:
        import torch

        a = torch.tensor(a, requires_grad=True)
        losses = f(a)
        (gradient,) = torch.autograd.grad(losses.sum(), a, create_graph=direction is not None)
        if direction is not None:
            (second,) = torch.autograd.grad((gradient * torch.tensor(direction)).sum(), a)
    return [listed(losses), listed(gradient), None if second is None else listed(second)]


def compiled(logits, index, soft):
    """Losses, and those of bad targets in the last row, from one program of XLA.

    On PyTorch from what torch.compile traced, run as it is: its code generator takes minutes.
    """
    loss = bt.BiTemperedLogisticLoss(0.8, 1.2, reduction=None)
    binary = bt.BiTemperedBinaryLogisticLoss(0.8, 1.2, reduction=None)

    bad_index, bad_soft = index - [0, 0, 0, 2], soft - [[0], [0], [0], [0.5]]

    def losses(a, index, bad_index, bad_soft):
        return loss(index, a), loss(bad_index, a), loss(bad_soft, a), binary(bad_soft, a)

    if BACKEND == "tensorflow":
        import tensorflow as tf

        losses = tf.function(losses, jit_compile=True)
    elif BACKEND == "jax":
        import jax

        losses = jax.jit(losses)
    else:
        import torch

        losses, logits = torch.compile(losses, backend="eager"), torch.tensor(logits)
        index, bad_index, bad_soft = map(torch.tensor, (index, bad_index, bad_soft))
    return [listed(x) for x in losses(logits, index, bad_index, bad_soft)]


def manners(logits, index):
    loss = bt.BiTemperedLogisticLoss(0.8, 1.2, label_smoothing=0.125, name="robust", dtype="float64")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    model.compile("sgd", loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded, bare = keras.saving.load_model(path), keras.saving.load_model(path, compile=False)
    return {
        "config": [type(loaded.loss).__name__, loaded.loss.get_config()],
        "compiled": [loaded.compiled, bare.compiled],
        "loaded": listed(loaded.loss(index, logits)),
        "weighted": listed(loss(index, logits, sample_weight=np.arange(4.0))),
        # It masks the row of zeros, whose label is padding.
        "masked": listed(loss(index - [9, 0, 0, 0], keras.layers.Masking(dtype="float64")(logits))),
    }


def half_precision(logits, index):
    loss = bt.BiTemperedLogisticLoss(0.8, 1.2)
    results = {}
    for dtype in ("float16", "bfloat16"):
        a = ops.cast(ops.convert_to_tensor(logits), dtype)
        value = loss(index, a)
        results[dtype] = [listed(a), listed(value), keras.backend.standardize_dtype(value.dtype)]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
        # Without XLA where that is another way of compiling: the example below has it.
        model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=BACKEND == "jax")
        results["mixed"] = model.fit(np.eye(6), np.arange(6), epochs=3, verbose=0).history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    return results


def schedule(logits, index):
    """What Keras logs of epochs at given temperatures, without and with the metric; the warnings without; the steps."""
    pairs, results = [(1.0, 1.0), (0.8, 1.5), (0.5, 4.0)], []
    for with_metric in (True, False):
        loss = bt.BiTemperedLogisticLoss(1.0, 1.0, rescale=True)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Activation("linear"), Counted()])
        # Without XLA where that is another way of compiling: it takes seconds.
        metrics = [loss.temperatures] if with_metric else []
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=metrics, jit_compile=BACKEND == "jax")

        class Set(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None, loss=loss):
                with tempfile.TemporaryDirectory() as folder:  # which makes no variables of the temperatures
                    self.model.save(Path(folder) / "model.keras")
                loss.t1, loss.t2 = pairs[epoch]

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(logits, index, epochs=3, verbose=0, callbacks=[Set()]).history
        warned = [str(w.message) for w in caught if "keeps the old" in str(w.message)]
        results.append([history, warned, loss.get_config(), model.layers[-1].traces])
    return results


def by_batch(logits, index, synchronised):
    """The t2 of each batch where a callback sets 1.0, 1.1, ... within two epochs, and the warnings."""
    loss = bt.BiTemperedLogisticLoss(1.0, 1.0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    model.compile("sgd", loss, metrics=[loss.temperatures], jit_compile=BACKEND == "jax")
    used = []

    class Set(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if synchronised and BACKEND == "jax":
                self.model.jax_state_sync()
            loss.t2 = 1 + len(used) / 10

        def on_train_batch_end(self, batch, logs=None):
            used.append(float(logs["t2"]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(logits, index, batch_size=2, epochs=2, verbose=0, callbacks=[Set()])
    return used, [str(w.message) for w in caught if "does not take this t2" in str(w.message)]


def padded():
    """What a model learns whose padded steps are masked, with a label or with none where the padding is."""
    rows, losses = np.array([[1, 2, 0], [3, 0, 0]]), []
    for padding in (0, -1):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(9, 5, mask_zero=True), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile("sgd", bt.BiTemperedLogisticLoss(0.8, 1.2), jit_compile=BACKEND == "jax")
        labels = np.where(rows > 0, 1, padding)
        losses.append(model.fit(rows, labels, epochs=2, verbose=0).history["loss"])
    return losses


def empty():
    classes = bt.BiTemperedLogisticLoss(0.8, 1.2, reduction=None)(np.ones(0, int), np.ones((0, 3), "float32"))
    binary = bt.BiTemperedBinaryLogisticLoss(0.8, 1.2, reduction=None)(*np.ones((2, 0, 3), "float32"))
    return [listed(classes), listed(binary)]


def one_hot():
    """What a model learns from class indices, and from the same classes as probabilities."""
    losses = []
    for target in (np.arange(4), np.eye(4)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", bt.BiTemperedLogisticLoss(0.8, 1.2), jit_compile=BACKEND == "jax")
        losses.append(model.fit(np.eye(4), target, epochs=2, verbose=0).history["loss"])
    return losses


@keras.saving.register_keras_serializable()
class Counted(keras.layers.Layer):
    """The identity, with a weight for the optimiser; it counts how often it is traced."""

    traces = 0

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.traces += 1
        return self.scale * x


def refusal(logits, soft):
    loss = bt.BiTemperedLogisticLoss(0.8, 1.2, reduction=None, dtype="float64")
    try:
        return derivatives(lambda y: loss(y, logits), soft)
    except NotImplementedError as error:
        return str(error)


def listed(x):
    return ops.convert_to_numpy(ops.cast(x, "float64")).tolist()


if __name__ == "__main__":
    json.dump(everything(json.load(sys.stdin)), sys.stdout)
