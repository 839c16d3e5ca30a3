"""Every implementation against 50 digits, on more than 20,000 rows each that look for trouble: `pytest -m slow`.

core and NumPy take everything, JAX all but the chunks of labels, and with arrays as temperatures a few chunks. The
Triton kernels, in the interpreter, take what JAX takes except binary losses, and the rows of 60 and 1,000 classes a
second time in several tiles. C takes class indices. Keras has no class weights: it takes what has none, and single
labels with their weights as those of examples. The chunks of labels bring these two to 20,000.

The bar is the project's, 1e-12 in float64 and 3e-6 in float32 relative to max(1, value), for the divergence Delta of
the normalised target and for its gradient. The loss is W Delta, and its bar W times that of Delta: for W = 1e-30 far
stricter than one relative to max(1, loss), and looser only where W > 1 and Delta < 1, since a small Delta has few right
digits, and a weight brings none. Only gradients at an edge of a finite support are allowed more: what `at_the_edge`
finds that rounding can do to the exact gradient there.
"""

import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import oracle
import pytest
from fuzz_cases import BAR, CHUNKS, Batch, Chunk, Exact, batches, exact, exact_batch, problem

pytestmark = [
    # The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    # Keras asks NumPy for copies in a way that PyTorch's tensors do not know yet.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

# The implementations: (batch, dtype) -> losses, reduced or not, and the gradient of their sum


def deep(x):
    """(rows, ...) as (rows / 4, ..., 4)."""
    return np.ascontiguousarray(np.moveaxis(x.reshape(-1, 4, *x.shape[1:]), 1, -1))


def shallow(x):
    return np.moveaxis(x, -1, 1).reshape(-1, *x.shape[1:-1]) if x.ndim else x


def prepared(batch, dtype):
    """Logits, target and weights in the dtype and layout of the call, and the class axis."""
    logits, target, weight = batch.logits.astype(dtype), batch.target, batch.weight
    target = target if target.dtype.kind == "i" else target.astype(dtype)
    weight = None if weight is None else weight.astype(dtype)
    if batch.chunk.deep:
        return deep(logits), deep(target), weight, 1
    return logits, target, weight, -1


def by_torch(batch, dtype):
    import torch

    from bitempered.torch import bi_tempered_binary_logistic_loss, bi_tempered_logistic_loss

    logits, target, weight, _ = prepared(batch, dtype)
    leaf, target = torch.tensor(logits, requires_grad=True), torch.tensor(target)
    weight = None if weight is None else torch.tensor(weight)
    options = {"reduction": batch.reduction}
    if batch.chunk.classes:
        options |= {"weight": weight, "label_smoothing": batch.smoothing}
        loss = bi_tempered_logistic_loss(leaf, target, batch.t1, batch.t2, **options)
    else:
        loss = bi_tempered_binary_logistic_loss(leaf, target, batch.t1, batch.t2, pos_weight=weight, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    return loss.detach().numpy(), gradient.numpy()


def by_core(batch, dtype):
    from bitempered import kernels

    with kernels.use("core"):
        return by_torch(batch, dtype)


def by_c(batch, dtype):
    from bitempered import kernels

    with kernels.use("cpu"):
        return by_torch(batch, dtype)


def by_triton(batch, dtype, tile=None):
    from bitempered import kernels
    from bitempered.kernels.triton import tiles

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(kernels, "choose", return_value="triton"))
        if tile is not None:
            chunks = mock.patch.object(tiles, "choose_tile", lambda *given: {**tile, "VECTOR": given[-1]})
            patches.enter_context(chunks)
        return by_torch(batch, dtype)


def by_triton_in_chunks(batch, dtype):
    """Rows as if they were long: in several tiles."""
    tile = {"ROWS": batch.chunk.rows, "COLUMNS": 32 if batch.chunk.classes < 100 else 256}
    return by_triton(batch, dtype, {**tile, "SINGLE": False, "num_warps": 4})


def by_numpy(batch, dtype):
    import bitempered.numpy as bt

    logits, target, weight, axis = prepared(batch, dtype)
    if not batch.chunk.classes:
        return bt.bi_tempered_binary_logistic_loss(logits, target, batch.t1, batch.t2, pos_weight=weight), None
    options = {"weight": weight, "label_smoothing": batch.smoothing, "axis": axis}
    return bt.loss_and_grad(logits, target, batch.t1, batch.t2, **options)


def by_jax(batch, dtype, arrays=False):
    """Numbers as temperatures without jit, which would compile for each pair; arrays with it."""
    import jax
    import jax.numpy as jnp

    import bitempered.jax as bt

    logits, target, weight, axis = prepared(batch, dtype)
    with jax.enable_x64(True), nullcontext() if arrays else jax.disable_jit():
        t1, t2 = (jnp.full(batch.chunk.rows, t, dtype) if arrays else t for t in (batch.t1, batch.t2))

        def losses(a):
            if not batch.chunk.classes:
                return bt.bi_tempered_binary_logistic_loss(a, target, t1, t2, pos_weight=weight)
            options = {"weight": weight, "label_smoothing": batch.smoothing, "axis": axis}
            return bt.bi_tempered_logistic_loss(a, target, t1, t2, **options)

        values, pullback = jax.vjp(losses, logits)
        return np.asarray(values), np.asarray(pullback(jnp.ones_like(values))[0])


def by_keras(batch, dtype):
    import bitempered.keras as bt

    logits, target, weight, axis = prepared(batch, dtype)
    options = {"t1": batch.t1, "t2": batch.t2, "reduction": None, "dtype": dtype}
    if not batch.chunk.classes:
        loss = bt.BiTemperedBinaryLogisticLoss(**options)
        losses, gradient = keras_derivative(lambda a: loss(target[:, None], a), logits[:, None])
        return losses, gradient[:, 0]
    loss = bt.BiTemperedLogisticLoss(label_smoothing=batch.smoothing, axis=axis, **options)
    weight = None if weight is None else weight[target]
    return keras_derivative(lambda a: loss(target, a, sample_weight=weight), logits)


def keras_derivative(f, a):
    import keras

    if keras.backend.backend() == "torch":
        import torch

        a = torch.tensor(a, requires_grad=True)
        losses = f(a)
        return losses.detach().numpy(), torch.autograd.grad(losses, a, torch.ones_like(losses))[0].numpy()
    if keras.backend.backend() == "jax":
        import jax

        losses, pullback = jax.vjp(f, a)
        return np.asarray(losses), np.asarray(pullback(np.ones_like(losses))[0])
    import tensorflow as tf

    a = tf.constant(a)
    with tf.GradientTape() as tape:
        tape.watch(a)
        losses = f(a)
    return losses.numpy(), tape.gradient(losses, a).numpy()


IMPLEMENTATIONS = {
    "core": by_core,
    "C": by_c,
    "Triton": by_triton,
    "Triton in chunks": by_triton_in_chunks,
    "NumPy": by_numpy,
    "JAX": by_jax,
    "JAX arrays": functools.partial(by_jax, arrays=True),
    "Keras": by_keras,
}
REDUCING = ("core", "C", "Triton", "Triton in chunks")
RUNS = [(name, dtype) for name in IMPLEMENTATIONS for dtype in BAR if dtype == "float32" or name not in REDUCING[1:]]


def takes_chunk(name, dtype, chunk):
    if dtype == "float32" != chunk.dtype:
        return False
    if name in ("Triton", "JAX"):  # the chunks of labels are for those that take nothing else
        return not chunk.labels and (name == "JAX" or chunk.classes > 0)
    return {"C": chunk.classes > 0, "Triton in chunks": chunk.classes >= 60, "JAX arrays": chunk.arrays}.get(name, True)


def takes(name, dtype, batch):
    indices = batch.target.dtype.kind == "i"
    if name == "C":
        return indices
    if name == "JAX arrays":  # they must hold the temperatures
        return all(float(np.dtype(dtype).type(t)) == t for t in (batch.t1, batch.t2))
    if name == "Keras":  # to which 0 times an infinite loss is NaN
        return batch.weight is None or (indices and not batch.smoothing and batch.weight.all())
    return True


def run(name, dtype, batch):
    if name == "C":
        batch = replace(batch, chunk=replace(batch.chunk, deep=False))
    losses, gradient = IMPLEMENTATIONS[name](batch, dtype)
    if batch.chunk.deep:
        losses, gradient = shallow(losses), shallow(gradient)
    return losses, gradient


# Comparison


def reduced(batch, want):
    """The exact loss and gradient as torch reduces them."""
    if batch.reduction == "none":
        return want
    factor = 1.0
    if batch.reduction == "mean":
        divisor = float(len(batch.target))
        if batch.chunk.classes and batch.target.ndim == 1 and batch.weight is not None:
            divisor = math.fsum(batch.weight[batch.target].astype(float))
        factor = 1 / divisor
    return Exact(
        np.array(math.fsum(want.losses) * factor),
        want.gradient * factor,
        np.array(math.fsum(want.scale) * factor),
        want.gradient_scale * factor,
        {name: x * factor for name, x in want.edge.items()},
    )


def errors(got, want, bar, dtype):
    """abs(got - want) / bar. Infinity is right where the truth overflows the dtype; NaN is an infinite error."""
    got = got.astype(float)
    with np.errstate(all="ignore"):
        error = abs(got - want) / (bar + np.finfo(dtype).tiny)
        right = (abs(want) > np.finfo(dtype).max) & (got == np.sign(want) * np.inf)
    return np.where(right, 0.0, np.where(np.isfinite(error), error, np.inf))


def excess(name, dtype, batch, want, result):
    """By how many times its bar each row is off, in loss or gradient."""
    want = reduced(batch, want) if name in REDUCING else want
    losses, gradient = result
    worst = errors(losses, want.losses, BAR[dtype] * want.scale, dtype)
    if gradient is None:
        return worst
    bar = BAR[dtype] * want.gradient_scale
    bar += np.where(want.edge[dtype] > bar, want.edge[dtype], 0)
    wrong = errors(gradient.reshape(len(bar), -1), want.gradient, bar[:, None], dtype)
    return np.maximum(worst, wrong.max(1))


def complaint(name, dtype, batch, want, result):
    """What to try again, of the worst row, or "" if all are within the bar."""
    off = excess(name, dtype, batch, want, result)
    if off.max() <= 1:
        return ""
    want = reduced(batch, want) if name in REDUCING else want
    i = int(off.argmax())
    loss, exact_loss = (np.broadcast_to(x, off.shape)[i] for x in (result[0], want.losses))
    gradient = None if result[1] is None else result[1][i].tolist()
    weight = None if batch.weight is None else batch.weight if batch.chunk.classes else batch.weight[i]
    return (
        f"batch {batch.name} row {i}, {off[i]:.3g} times the bar ({(off > 1).sum()} rows are off):"
        f" t1 = {batch.t1!r}, t2 = {batch.t2!r}, logits = {batch.logits[i].tolist()},"
        f" target = {batch.target[i].tolist()}, weight = {None if weight is None else weight.tolist()},"
        f" label_smoothing = {batch.smoothing!r}, reduction = {batch.reduction!r}\n"
        f" got {loss} and {gradient}, wanted {exact_loss} and {want.gradient[i].tolist()}"
    )


def require(name):
    """Skip where there is nothing to run."""
    if name == "C":
        from bitempered.kernels import cpu

        if shutil.which(cpu.compiler()[0]) is None:
            pytest.skip("there is no C compiler here")
    modules = {"Triton": "triton", "Triton in chunks": "triton", "JAX": "jax", "JAX arrays": "jax", "Keras": "keras"}
    if name in modules:
        pytest.importorskip(modules[name])


# What was found: each row failed once, in the implementations named.
WITNESSES = {
    # With a share w y / W that float32 cannot hold: 6.7e33 instead of 3.0e31 (core, NumPy, JAX, Triton).
    "small share": ([[12.4, 12.4, 12.4]], [0], 1.99998, 3.8, [1e-10, 4e29, 2e-30], 1.0),
    # The same of a masked class: finite instead of infinite (core, NumPy, JAX, Triton).
    "masked small share": ([[-math.inf, -5.0, -4.0]], [2], 1.0, 1.2, [2e-30, 9e29, 0.2], 0.1),
    # In chunks, of which the one that is looked at first is full and the other masked: NaN (Triton).
    "masked chunk": ([[-math.inf] * 32 + [0.0] * 32], [40], 1.0, 30.0, None, 0.0),
    # Next to t1 = 1 with smoothing: 0.8165 instead of 0.65186 (C).
    "smoothing next to 1": ([[0.3, -0.2, 0.1]], [0], 1 - 1e-8, 1.2, None, 0.1),
    # Next to t1 = 2 with smoothing: 3.3689 instead of 3.3724 (C).
    "smoothing next to 2": ([[0.3, -0.2, 0.1]], [0], 1.99999, 2.0, None, 0.1),
    # A small weight with smoothing: 0 instead of 1.1781 (C).
    "small weight": ([[0.3, -0.2, 0.1]], [1], 1.0, 1.0, [1.0, 1.0, 1e-15], 0.1),
}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
@pytest.mark.parametrize("witness", WITNESSES)
def test_witness(witness, name, dtype):
    require(name)
    logits, target, t1, t2, weight, smoothing = WITNESSES[witness]
    logits, target = np.array(logits, "float32"), np.array(target)
    weight = None if weight is None else np.array(weight, "float32")
    batch = Batch(witness, Chunk(logits.shape[1], rows=len(logits)), t1, t2, logits, target, weight, smoothing)
    if takes(name, dtype, batch):
        want = exact_batch(batch)
        assert not (said := complaint(name, dtype, batch, want, run(name, dtype, batch))), said


PARTS = [
    pytest.param(number, name, dtype, id=f"{number}-{name}-{dtype}")
    for number, chunk in enumerate(CHUNKS)
    for name, dtype in RUNS
    if takes_chunk(name, dtype, chunk)
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name", "dtype"), PARTS)
def test_fuzz(number, name, dtype):
    require(name)
    pairs = zip(batches(number), exact(number), strict=True)
    complaints = [complaint(name, dtype, b, want, run(name, dtype, b)) for b, want in pairs if takes(name, dtype, b)]
    assert complaints
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_other_backends_of_keras(backend, tmp_path):
    """A process has one backend, and the tests' is PyTorch: this file as a script is the others, on some chunks."""
    pytest.importorskip("keras")
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {"KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    complaints = []
    for number in KERAS_CHUNKS:
        results = np.load(tmp_path / f"{number}.npz")
        for batch, want in zip(batches(number), exact(number), strict=True):
            if takes("Keras", "float32", batch):
                for dtype in BAR:
                    losses, gradient = (results[f"{batch.name} {dtype} {what}"] for what in ("losses", "gradient"))
                    complaints.append(complaint("Keras", dtype, batch, want, (losses, gradient)))
    assert len(complaints) > 100
    assert not any(complaints), "\n".join(filter(None, complaints))


KERAS_CHUNKS = (13, 17, 22)  # three dimensions, binary, labels


def save_keras(folder):
    for number in KERAS_CHUNKS:
        results = {}
        for batch in batches(number):
            if takes("Keras", "float32", batch):
                for dtype in BAR:
                    losses, gradient = run("Keras", dtype, batch)
                    results |= {f"{batch.name} {dtype} losses": losses, f"{batch.name} {dtype} gradient": gradient}
        np.savez(os.path.join(folder, f"{number}.npz"), **results)


@pytest.mark.slow
def test_there_are_enough_cases_and_few_at_an_edge():
    rows = dict.fromkeys(RUNS, 0)
    for number, chunk in enumerate(CHUNKS):
        for name, dtype in RUNS:
            if takes_chunk(name, dtype, chunk):
                rows[name, dtype] += chunk.rows * sum(bool(takes(name, dtype, batch)) for batch in batches(number))
    for name, dtype in RUNS:
        assert rows[name, dtype] >= {"Triton in chunks": 500, "JAX arrays": 2000}.get(name, 20000), (name, dtype, rows)
    wider = [want.edge["float32"] > BAR["float32"] * want.gradient_scale for want in exact(0)]  # than the project's bar
    assert np.concatenate(wider).mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 6, 17])
def test_the_other_oracle_agrees(number):
    """oracle.py solves otherwise, and gives no gradient to masked classes."""
    compared = 0
    for batch, want in zip(batches(number), exact(number), strict=True):
        logits, z = problem(batch)
        for i in range(0, len(logits), 16):
            if -math.inf in logits[i]:
                continue
            loss, gradient = oracle.loss_and_gradient(logits[i], z[i], batch.t1, batch.t2)
            assert abs(loss - want.losses[i]) <= 1e-15 * want.scale[i]
            gradient = gradient if batch.chunk.classes else gradient[1:]
            assert max(abs(g - x) for g, x in zip(gradient, want.gradient[i], strict=True)) <= 1e-15 * want.scale[i]
            compared += 1
    assert compared > 50


if __name__ == "__main__":
    save_keras(sys.argv[1])
