"""The cases of test_fuzz.py, and their losses and gradients in 50 digits.

A batch shares its temperatures, weights and smoothing. Its numbers are float32, so that one exact answer serves both
dtypes; two chunks have float64 numbers. A chunk of batches shares its shape, which saves JAX from compiling.
"""

import functools
import math
from dataclasses import dataclass

import mpmath as mp
import numpy as np
from cases import TOLERANCE

mp.mp.dps = 50

BAR = {np.dtype(dtype).name: bar for dtype, bar in TOLERANCE.items()}


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
