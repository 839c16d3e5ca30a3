"""Every implementation against 50 digits, on more than 20,000 rows each that look for trouble: `pytest -m slow`.

A batch shares its temperatures, weights and smoothing. Its numbers are float32, so that one exact answer serves both
dtypes; two chunks have float64 numbers. A chunk of batches shares its shape, which saves JAX from compiling.

Who takes what: core, NumPy and JAX everything; the Triton kernels (in the interpreter, 0.2 s a batch) all but binary
losses; C class indices; Keras, which has no class weights, what has none, and single labels with their weights as those
of examples. The chunks of labels are for these last two.

The bar is the project's, 1e-12 in float64 and 3e-6 in float32 relative to max(1, value), for the divergence Delta of
the normalised target and for its gradient. The loss is W Delta, and so W times as much: for weights of 1e-30 that is
far stricter than max(1, loss), and for those of 1e30 a Delta of 1e-12 cannot be asked to have digits. Only gradients at
an edge of a finite support get more, what `at_the_edge` finds that rounding can do to the exact gradient there.
"""

import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import mpmath as mp
import numpy as np
import oracle
import pytest

pytestmark = [
    # The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    # Keras asks NumPy for copies in a way that PyTorch's tensors do not know yet.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BAR = {"float32": 3e-6, "float64": 1e-12}


@dataclass(frozen=True)
class Chunk:
    classes: int  # 0: binary
    rows: int = 40
    batches: int = 32
    deep: bool = False  # (N, C, d), where an implementation takes that
    arrays: bool = False  # with JAX also as arrays of temperatures
    labels: bool = False  # class indices, with weights only where there is no smoothing
    dtype: str = "float32"


CHUNKS = [
    *(Chunk(k) for k in (2, 3, 4, 6, 7, 8, 9, 11, 12)),
    *(Chunk(k, arrays=True) for k in (2, 5, 10)),
    *(Chunk(k, deep=True) for k in (3, 5, 10, 12)),
    *(Chunk(0), Chunk(0, arrays=True)),
    *(Chunk(60, rows=16), Chunk(1000, rows=4, batches=12)),  # both ways of the C kernel and of the Triton kernels
    *(Chunk(k, labels=True) for k in (2, 3, 4, 6, 8, 12)),
    *(Chunk(k, dtype="float64") for k in (4, 9)),
]


@dataclass(frozen=True)
class Batch:
    name: str
    chunk: Chunk
    t1: float
    t2: float
    logits: np.ndarray  # (rows, classes), or (rows,) where binary
    target: np.ndarray  # (rows,) class indices, (rows, classes) probabilities, or where binary (rows,) probabilities
    weight: np.ndarray | None  # (classes,), or where binary pos_weight, (rows,)
    smoothing: float
    reduction: str = "none"


# Cases


def near(rng, x):
    return x + rng.choice([-1, 1]) * 10 ** rng.uniform(-9, -3)


def temperatures(rng):
    t1 = rng.choice(
        [
            rng.uniform(0, 2 - 1e-6),
            rng.uniform(0, 1),
            rng.choice([0.0, 0.5, 0.8, 1.0]),
            near(rng, 1.0),
            near(rng, 1.0),
            2 - 10 ** rng.uniform(-6, -1),
        ]
    )
    t2 = rng.choice(
        [
            t1,
            t1 + 10 ** rng.uniform(-9, -3),
            max(t1, 1.0),
            max(t1, near(rng, 1.0)),
            rng.uniform(t1, max(t1, 1)),  # finite support
            rng.uniform(t1, max(t1, 1)),
            rng.uniform(t1, 2),
            rng.uniform(t1, 4),
            min(t1 + 10 ** rng.uniform(-1, 2), 100),
            100.0,
        ]
    )
    if rng.random() < 0.6:  # so that arrays of float32 hold them
        t1, t2 = np.float32(t1), np.float32(t2)
    return float(t1), float(t2)


def make_logits(rng, rows, classes, dtype):
    """Of scale 1e-3 to 1e4, in one row of ten each: with ties, all equal, far from 0, small integers, masked."""
    scale = 10 ** rng.uniform(-3, 4, (rows, 1))
    a, integers = scale * rng.normal(size=(rows, classes)), rng.integers(-2, 3, (rows, classes))
    kind = rng.integers(10, size=(rows, 1))
    a = np.select([kind == 0, kind == 1, kind == 2, kind == 3], [scale * integers, scale, a + 1000, integers], a)
    hidden = (kind == 4) & (rng.random((rows, classes)) < 0.3)
    hidden[:, rng.integers(classes)] = False
    return np.where(hidden, -np.inf, a).astype(dtype)


def make_weights(rng, size, dtype):
    decades, zeros = rng.choice([30, 30, 30, 1]), rng.choice([0, 0, 0.3])
    return np.where(rng.random(size) < zeros, 0, 10 ** rng.uniform(-decades, decades, size)).astype(dtype)


def make_batch(name, chunk, rng):
    t1, t2 = temperatures(rng)
    rows, classes, dtype = chunk.rows, chunk.classes, chunk.dtype
    reduction = str(rng.choice(["none", "mean", "sum"], p=[0.9, 0.05, 0.05]))
    if not classes:
        logits = make_logits(rng, rows, 2, dtype)[:, 1]
        target = rng.choice([0.0, 1.0, 0.5, 1e-6, -1.0], size=rows)
        target = np.where(target < 0, rng.random(rows), target).astype(dtype)
        weight = make_weights(rng, rows, dtype) if rng.random() < 0.6 else None
        return Batch(name, chunk, t1, t2, logits, target, weight, 0.0, reduction)
    logits = make_logits(rng, rows, classes, dtype)
    smoothing = float(rng.choice([0.0, 0.0, 0.1, 1.0, 10 ** rng.uniform(-9, 0), 10 ** rng.uniform(-9, 0)]))
    target = rng.integers(classes, size=rows)
    pick = rng.integers(4, size=rows)
    target = np.where(pick == 0, logits.argmax(1), np.where(pick == 1, logits.argmin(1), target))
    weight = make_weights(rng, classes, dtype) if rng.random() < 0.5 else None
    if chunk.labels:
        weight = None if weight is None or smoothing else np.where(weight == 0, 1, weight).astype(dtype)
    elif rng.random() < 0.3:
        target = make_probabilities(rng, target, logits, t2)
        smoothing = smoothing if rng.random() < 0.5 else 0.0
    if target.ndim == 1 and weight is not None and not weight[target].any():
        reduction = "none"  # the mean would be 0 / 0
    return Batch(name, chunk, t1, t2, logits, target, weight, smoothing, reduction)


def make_probabilities(rng, labels, logits, t2):
    rows, classes = logits.shape
    kind = rng.integers(4, size=(rows, 1))
    hard = np.eye(classes)[labels]
    flat = rng.dirichlet(np.ones(classes), rows)
    sparse = rng.dirichlet(np.full(classes, 0.05), rows)
    m = first_guess(logits.astype(float), t2)
    with np.errstate(all="ignore"):
        agreed = np.exp(-m) * ratios(logits.astype(float), m, t2)  # y = y_hat: a loss of nearly 0
    y = np.select([kind == 0, kind == 1, kind == 2], [hard, flat, sparse], agreed)
    y = np.where(y < 1e-30, 0.0, y).astype(logits.dtype)  # XLA takes float32's subnormal numbers for 0
    return np.where(abs(y.sum(1, keepdims=True) - 1) < 5e-4, y, hard).astype(logits.dtype)


@functools.lru_cache(2)
def batches(number):
    chunk = CHUNKS[number]
    return [make_batch(f"{number}-{i}", chunk, np.random.default_rng([15, number, i])) for i in range(chunk.batches)]


# The exact answer


@dataclass(frozen=True)
class Exact:
    losses: np.ndarray  # (rows,)
    gradient: np.ndarray  # (rows, classes), or (rows, 1) where binary
    scale: np.ndarray  # (rows,): W max(1, Delta)
    gradient_scale: np.ndarray
    edge: dict  # (rows,) for each dtype: what roundings at an edge of the support do to the gradient


def first_guess(a, t):
    """-log of the largest probability, by bisection in float64: where the Newton steps in 50 digits start."""
    low, high = np.zeros((len(a), 1)), np.full((len(a), 1), math.log(a.shape[1]) + 1e-9)
    with np.errstate(all="ignore"):
        for _ in range(60):
            middle = (low + high) / 2
            mass = np.exp(-middle) * ratios(a, middle, t).sum(1, keepdims=True)
            low, high = np.where(mass > 1, middle, low), np.where(mass > 1, high, middle)
    return (low + high) / 2


def ratios(a, m, t):
    u, s = a.max(1, keepdims=True) - a, t - 1
    if s == 0:
        return np.exp(-u)
    x = s * u * np.exp(-s * m)
    return np.where((x <= -1) | (u == np.inf), 0.0, np.exp(-np.log1p(np.maximum(x, -1)) / s))


def exact_softmax(a, t, m):
    """Of each class log y_hat and y_hat^(t-1), or None where y_hat is 0: outside the support, or masked."""
    top, s = mp.mpf(max(a)), mp.mpf(t) - 1
    u = [top - mp.mpf(x) if x > -math.inf else None for x in a]
    if s == 0:
        partition = mp.log(mp.fsum(mp.exp(-x) for x in u if x is not None))
        return [None if x is None else (-x - partition, mp.mpf(1)) for x in u]
    c = mp.exp(mp.mpf(m) * s)  # y_hat_i^-s = c + s u_i
    for _ in range(8):
        base = [None if x is None or c + s * x <= 0 else c + s * x for x in u]
        logs = [None if b is None else -mp.log(b) / s for b in base]
        p = [(mp.exp(x), b) for x, b in zip(logs, base, strict=True) if x is not None]
        miss = mp.fsum(x for x, _ in p) - 1
        if abs(miss) < mp.mpf("1e-35"):
            return [None if x is None else (x, 1 / b) for x, b in zip(logs, base, strict=True)]
        c += miss * s / mp.fsum(x / b for x, b in p)
    raise ArithmeticError(f"no solution for t = {t}, logits {a}")


def exact_row(a, z, t1, t2, m):
    """W, Delta(z / W, y_hat) and its gradient, by the paper's formulas."""
    W = mp.fsum(z)
    if W == 0:
        return W, mp.mpf(0), [mp.mpf(0)] * len(a)
    e1, total, v, escort = 1 - mp.mpf(t1), mp.mpf(0), [], []
    for zi, ai, known in zip(z, a, exact_softmax(a, t2, m), strict=True):
        q = zi / W
        if known is None:
            # The limit of a logit towards -inf, which only cross-entropy and its like (t1 = t2 >= 1) feel.
            v.append(-q if ai == -math.inf and t1 == t2 >= 1 else mp.mpf(0))
            escort.append(mp.mpf(0))
            p = p_e1 = log_p = mp.mpf(0)
        else:
            log_p, p_s = known
            p, p_e1 = mp.exp(log_p), mp.exp(e1 * log_p)
            v.append((p - q) * p_e1 * p_s)
            escort.append(p * p_s)
        if q > 0:
            if known is None and t1 >= 1:
                total = mp.inf
            elif e1 == 0:
                total += q * (mp.log(q) - log_p)
            else:
                q_e1 = mp.exp(e1 * mp.log(q))
                total += q * (q_e1 - p_e1) / e1 - q * q_e1 / (1 + e1)
        if e1 == 0:
            total += p - q
        else:
            total += p * p_e1 / (1 + e1)
    mean = mp.fsum(v) / mp.fsum(escort)
    return W, total, [x - e * mean for x, e in zip(v, escort, strict=True)]


def at_the_edge(a, y, t1, t2, m, eps):
    """How far rounding can move the gradient of Delta where the support is finite, at most.

    There y_hat = e^-m x^(1/(1-t2)) with x = 1 - (1-t2) u e^((1-t2) m), and the gradient has powers of x that jump, or
    fall steeply, at x = 0. A float has u e^... to a few roundings; 16 of them are allowed for.
    """
    s, u = t2 - 1, a.max(1, keepdims=True) - a
    with np.errstate(all="ignore"):
        x = [np.where(u == np.inf, -1.0, 1 + s * u * np.exp(-s * m) * (1 + i * 16 * eps)) for i in (-1, 0, 1)]
        log_p = [np.where(xi > 0, np.log(np.maximum(xi, 1e-300)) / -s - m, -np.inf) for xi in x]
        v = [np.where(xi > 0, (np.exp(w) - y) * np.exp((t2 - t1) * w), 0.0) for xi, w in zip(x, log_p, strict=True)]
        e = [np.where(xi > 0, np.exp(t2 * w), 0.0) for xi, w in zip(x, log_p, strict=True)]
    dv, de = (np.maximum(abs(w[0] - w[1]), abs(w[2] - w[1])) for w in (v, e))
    whole = np.minimum(e[0], e[2]).sum(1, keepdims=True)
    mean = abs(v[1]).sum(1, keepdims=True) / whole
    return (dv + mean * de + e[1] / whole * (dv + mean * de).sum(1, keepdims=True)).max(1)


@functools.lru_cache(2)
def exact(number):
    return [exact_batch(batch) for batch in batches(number)]


def problem(batch):
    """The logits and the weighted targets z = w y of each row, as lists; the latter in 50 digits."""
    weight = None if batch.weight is None else [mp.mpf(w) for w in batch.weight.tolist()]
    if not batch.chunk.classes:
        z = [[1 - mp.mpf(y), mp.mpf(y) * (weight[i] if weight else 1)] for i, y in enumerate(batch.target.tolist())]
        return [[0.0, a] for a in batch.logits.tolist()], z
    classes, e = batch.chunk.classes, mp.mpf(batch.smoothing)
    y = np.eye(classes)[batch.target] if batch.target.ndim == 1 else batch.target
    weight = weight or [1] * classes
    return batch.logits.tolist(), [
        [((1 - e) * yi + e / classes) * w for yi, w in zip(row, weight, strict=True)] for row in y.tolist()
    ]


def exact_batch(batch):
    logits, z = problem(batch)
    m = first_guess(np.array(logits), batch.t2)
    rows = [exact_row(a, zi, batch.t1, batch.t2, start) for a, zi, start in zip(logits, z, m[:, 0], strict=True)]
    W = np.array([float(w) for w, _, _ in rows])
    delta, slope = np.array([float(x) for _, x, _ in rows]), np.array([[float(x) for x in g] for _, _, g in rows])
    losses = np.array([float(w * x) if w else 0.0 for w, x, _ in rows])
    gradient = np.array([[float(w * x) for x in g] for w, _, g in rows])
    edge = dict.fromkeys(BAR, np.zeros(len(W)))
    if batch.t2 < 1:
        q = np.array([[float(x / w) if w else 0.0 for x in zi] for zi, (w, _, _) in zip(z, rows, strict=True)])
        edge = {name: W * at_the_edge(np.array(logits), q, batch.t1, batch.t2, m, np.finfo(name).eps) for name in BAR}
    if not batch.chunk.classes:
        gradient, slope = gradient[:, 1:], slope[:, 1:]
    W = W + np.finfo("float32").tiny / BAR["float32"]  # a W that small is subnormal, and 0 to XLA
    scale = W * np.where(np.isfinite(delta), np.maximum(delta, 1), 1)
    return Exact(losses, gradient, scale, W * np.maximum(abs(slope).max(1), 1), edge)


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
    from bitempered.kernels import triton

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(kernels, "choose", return_value="triton"))
        if tile is not None:
            patches.enter_context(mock.patch.object(triton, "_tile", return_value=tile))
        return by_torch(batch, dtype)


def by_triton_in_chunks(batch, dtype):
    """Rows as if they were long: in several tiles."""
    tile = {"ROWS": batch.chunk.rows, "COLUMNS": 32 if batch.chunk.classes < 100 else 256}
    return by_triton(batch, dtype, {**tile, "VECTOR": 4, "SINGLE": False, "num_warps": 4})


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
    i, losses = int(off.argmax()), np.broadcast_to(result[0], off.shape)
    gradient = None if result[1] is None else result[1][i].tolist()
    weight = None if batch.weight is None else batch.weight if batch.chunk.classes else batch.weight[i]
    return (
        f"batch {batch.name} row {i}, {off[i]:.3g} times the bar ({(off > 1).sum()} rows are off):"
        f" t1 = {batch.t1!r}, t2 = {batch.t2!r}, logits = {batch.logits[i].tolist()},"
        f" target = {batch.target[i].tolist()}, weight = {None if weight is None else weight.tolist()},"
        f" label_smoothing = {batch.smoothing!r}, reduction = {batch.reduction!r}\n"
        f" got {losses[i]} and {gradient}, wanted {want.losses[i]} and {want.gradient[i].tolist()}"
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
    # With a share w y / W that float32 cannot hold: 165 times too large near t1 = 2 (core, NumPy, JAX, Triton).
    "small share": ([[12.4, 12.4, 12.4]], [0], 1.99998, 3.8, [1e-10, 4e29, 2e-30], 1.0),
    # The same of a masked class: finite instead of infinite (core, NumPy, JAX, Triton).
    "masked small share": ([[-math.inf, -5.0, -4.0]], [2], 1.0, 1.2, [2e-30, 9e29, 0.2], 0.1),
    # In chunks, of which the one that is looked at first is full and the other masked: NaN (Triton).
    "masked chunk": ([[-math.inf] * 32 + [0.0] * 32], [40], 1.0, 30.0, None, 0.0),
    # Next to t1 = 1 with smoothing: 0.8165 instead of 0.65186 (C).
    "smoothing next to 1": ([[0.3, -0.2, 0.1]], [0], 1 - 1e-8, 1.2, None, 0.1),
    # Towards t1 = 2: 4.5 % off (C).
    "smoothing next to 2": ([[0.3, -0.2, 0.1]], [0], 1.99999, 2.0, None, 0.1),
    # A small weight with smoothing: 0 instead of 1.1211 (C).
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
    # Of the gradients whose bar is wider than the project's: those of float32, in one chunk.
    wider = [want.edge["float32"] > BAR["float32"] * want.gradient_scale for want in exact(0)]
    assert np.concatenate(wider).mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 6, 17])
def test_the_other_oracle_agrees(number):
    """oracle.py, which bisects, and gives no gradient to masked classes."""
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
