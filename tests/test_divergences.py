"""bitempered.divergences against 50-digit transcriptions of its documented formulas, in every framework."""

import math
import re
import subprocess
import sys
from pathlib import Path

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch

from bitempered.divergences import (
    alternate_convex_function,
    beta_divergence,
    bregman_divergence,
    convex_function,
    dual,
    tsallis_divergence,
    tsallis_entropy,
)

try:
    import jax
except ImportError:  # no release that we support runs on Python 3.10
    jax = None

STEPS = [10.0**-k for k in (3, 5, 7, 9, 12)]
NEAR = [centre + sign * step for centre in (1, 2) for step in STEPS for sign in (-1, 1)]
# The named special cases, both sides of every change of regime (1 and 2), and a temperature far above.
TEMPERATURES = [0.0, 0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 1.9, 2.0, 2.1, 3.0, 4.0, 10.0, *NEAR]

# The project's bar. Rounding takes up to 1e-13 of it: x^(2-t) = exp((2-t) log x) loses abs((2-t) log x) eps.
TOLERANCE = 1e-12

RNG = np.random.default_rng(3)
DISTRIBUTIONS = RNG.dirichlet(np.ones(5), size=8)
OTHERS = RNG.dirichlet(np.ones(5), size=8)
# Positive vectors of any mass, over six orders of magnitude; the last pair nearly agrees.
POSITIVE = np.exp(RNG.uniform(-7, 7, size=(8, 5)))
POSITIVE_OTHERS = np.exp(RNG.uniform(-7, 7, size=(8, 5)))
POSITIVE_OTHERS[-1] = POSITIVE[-1] * (1 + 1e-6 * RNG.normal(size=5))
PAIRS = [(DISTRIBUTIONS, OTHERS), (POSITIVE, POSITIVE_OTHERS)]


# The oracle: one function per documented formula, one class at a time.


def exact_convex_function(y, t):
    if t == 2:
        return y - 1 - mp.log(y)
    return y * oracle.log_t(y, t) + (1 - y ** (2 - t)) / (2 - t)


def exact_alternate(y, t):
    if t == 0:
        return y * mp.log(y) - y + 1
    return -(oracle.log_t(y, t) - y + 1) / t


def exact_bregman(y, p, t):
    if t == 2:
        return y / p - mp.log(y / p) - 1
    return y * (oracle.log_t(y, t) - oracle.log_t(p, t)) - (y ** (2 - t) - p ** (2 - t)) / (2 - t)


def exact_beta(y, p, beta):
    if beta in (0, 1):
        return exact_bregman(y, p, 2 - beta)
    return (y**beta + (beta - 1) * p**beta - beta * y * p ** (beta - 1)) / (beta * (beta - 1))


def exact_entropy(y, t):
    return y * oracle.log_t(1 / y, t)


def exact_tsallis(y, p, t):
    return -y * oracle.log_t(p / y, t)


def exact_dual(a, t):
    """The supremum itself, at the distribution where the oracle's bisection puts it."""
    p = oracle.softmax(a, t)
    at_zero = 1 / (2 - mp.mpf(t)) if t < 2 else mp.inf
    return mp.fsum(
        pi * ai - (exact_convex_function(pi, mp.mpf(t)) if pi > 0 else at_zero) for pi, ai in zip(p, a, strict=True)
    )


def moved(per_class, entries, t):
    """How far a rounding of the logarithm of each entry moves the value: numbers that nearly agree magnify it."""
    step, value = mp.mpf(10) ** -25, per_class(*entries, t)
    ahead = [per_class(*(x * (1 + step * (j == i)) for j, x in enumerate(entries)), t) for i in range(len(entries))]
    return mp.fsum(
        abs(there - value) / step * abs(mp.log(x)) * 2.0**-52 for there, x in zip(ahead, entries, strict=True)
    )


def worst(got, per_class, arrays, t):
    """The largest error over the rows, relative to the magnitude of what is summed (at least 1), but for rounding."""
    result, t = 0.0, mp.mpf(t)
    for row, value in enumerate(got.tolist()):
        entries = [[mp.mpf(x) for x in entry] for entry in zip(*(a[row].tolist() for a in arrays), strict=True)]
        terms = [per_class(*entry, t) for entry in entries]
        scale = max(1, mp.fsum(map(abs, terms)))
        error = abs(mp.mpf(value) - mp.fsum(terms)) - mp.fsum(moved(per_class, entry, t) for entry in entries)
        result = max(result, float(error / scale))
    return result


CASES = {
    "convex_function": (convex_function, exact_convex_function, 1),
    "alternate_convex_function": (alternate_convex_function, exact_alternate, 1),
    "bregman_divergence": (bregman_divergence, exact_bregman, 2),
    "beta_divergence": (lambda y, p, t: beta_divergence(y, p, 2 - t), lambda y, p, t: exact_beta(y, p, 2 - t), 2),
    "tsallis_entropy": (tsallis_entropy, exact_entropy, 1),
    "tsallis_divergence": (tsallis_divergence, exact_tsallis, 2),
}


@pytest.mark.parametrize("t", TEMPERATURES)
@pytest.mark.parametrize("name", CASES)
def test_equals_its_formula_in_50_digits(name, t):
    function, exact, count = CASES[name]
    for pair in PAIRS:
        assert worst(function(*pair[:count], t), exact, pair[:count], t) <= TOLERANCE


@pytest.mark.parametrize("t", TEMPERATURES)
def test_dual_equals_the_supremum_in_50_digits(t):
    a = np.array([[0.5, -1.0, 2.0, 0.0], [30.0, -4.0, 29.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    for row, value in zip(a, dual(a, t).tolist(), strict=True):
        exact = exact_dual(row.tolist(), t)
        assert abs(value - exact) <= TOLERANCE * max(1, abs(exact))


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_dual_is_the_maximum_over_the_simplex(t):
    """By brute force: no distribution on a fine grid does better, and the best of them comes close."""
    a = np.array([0.4, -0.3, 0.1])
    first, second = np.meshgrid(np.arange(401), np.arange(401))
    grid = np.stack([first, second, 400 - first - second], axis=-1)[first + second <= 400] / 400
    best = (grid @ a - convex_function(grid, t)).max()
    # A grid of step h = 1/400 comes within h of the maximum in each class, where F_t curves by y^-t: y = 0 for t = 0
    # (a boundary with no curvature), y > 0.05 for the others.
    assert -1e-15 <= dual(a, t) - best <= 3 / 2 * 400**-2 * 0.05**-t


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5, 1.9])
def test_zeros_in_y_take_the_limit(t):
    y, p = np.array([0.0, 0.4, 0.6]), np.array([0.3, 0.3, 0.4])
    tiny = mp.mpf(10) ** -10000
    limit = exact_bregman(tiny, mp.mpf(0.3), mp.mpf(t)) + mp.fsum(
        exact_bregman(mp.mpf(yi), mp.mpf(pi), mp.mpf(t)) for yi, pi in zip(y.tolist()[1:], p.tolist()[1:], strict=True)
    )
    assert abs(bregman_divergence(y, p, t) - limit) <= TOLERANCE
    assert abs(convex_function(np.array([0.0]), t) - exact_convex_function(tiny, mp.mpf(t))) <= TOLERANCE
    if t > 0:
        assert tsallis_divergence(y, p, t) == tsallis_divergence(y[1:], p[1:], t)
        assert tsallis_entropy(y, t) == tsallis_entropy(y[1:], t)


@pytest.mark.parametrize("t", [2.0, 2.5, 3.0])
def test_zeros_in_y_are_infinite_from_two_on(t):
    assert convex_function(np.array([0.0, 1.0]), t) == math.inf
    assert bregman_divergence(np.array([0.0, 1.0]), np.array([0.5, 0.5]), t) == math.inf


@pytest.mark.parametrize("t", [0.0, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0])
def test_zeros_in_y_hat_take_the_limit(t):
    y, p = np.array([0.3, 0.7]), np.array([0.0, 1.0])
    if t >= 1:
        assert bregman_divergence(y, p, t) == tsallis_divergence(y, p, t) == math.inf
        return
    tiny = mp.mpf(10) ** -10000
    for function, exact in ((bregman_divergence, exact_bregman), (tsallis_divergence, exact_tsallis)):
        limit = exact(mp.mpf(0.3), tiny, mp.mpf(t)) + exact(mp.mpf(0.7), mp.mpf(1), mp.mpf(t))
        assert abs(function(y, p, t) - limit) <= TOLERANCE


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_a_class_that_is_absent_from_both_counts_nothing(t):
    y, p = np.array([0.3, 0.0, 0.7]), np.array([0.6, 0.0, 0.4])
    kept = [0, 2]
    assert bregman_divergence(y, p, t) == pytest.approx(bregman_divergence(y[kept], p[kept], t), rel=1e-15)
    assert tsallis_divergence(y, p, t) == pytest.approx(tsallis_divergence(y[kept], p[kept], t), rel=1e-15)


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5, 2.0, 5.0])
@pytest.mark.parametrize("ratio", [1e-200, 1e-30, 1e30, 1e200])
def test_far_apart_is_right_or_infinite_never_nan(t, ratio):
    for y in (1e-50, 1.0, 1e50):
        value = float(bregman_divergence(np.array([y]), np.array([y * ratio]), t))
        exact = exact_bregman(mp.mpf(y), mp.mpf(y * ratio), mp.mpf(t))
        if exact < mp.mpf(2) ** 1023:
            # exp((2-t) log x) loses abs((2-t) log x) eps, and abs(log x) is up to 576 here.
            assert abs(value - exact) <= 1e-12 * max(1, abs(exact))
        else:
            assert value == math.inf


@pytest.mark.parametrize("make", [np.array, lambda x: torch.tensor(x, dtype=torch.float64)], ids=["numpy", "torch"])
def test_powers_that_overflow_beside_a_factor_of_0(make):
    y = make([1e-200, 1.0])
    assert float(bregman_divergence(y, y, 5.0)) == 0
    assert float(beta_divergence(y, y, -3.0)) == 0
    for ratio in (0.1, 10.0):
        assert float(bregman_divergence(y, make([1e-200 * ratio, 1.0]), 5.0)) == math.inf


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1 + 1e-9, 1.5, 2.0, 2 - 1e-9, 3.0])
def test_frameworks_agree(t):
    y, p, a = DISTRIBUTIONS, OTHERS, np.log(POSITIVE)
    calls = {
        "convex_function": lambda y, p, a: convex_function(y, t),
        "alternate_convex_function": lambda y, p, a: alternate_convex_function(y, t),
        "bregman_divergence": lambda y, p, a: bregman_divergence(y, p, t),
        "beta_divergence": lambda y, p, a: beta_divergence(y, p, 2 - t),
        "tsallis_entropy": lambda y, p, a: tsallis_entropy(y, t),
        "tsallis_divergence": lambda y, p, a: tsallis_divergence(y, p, t),
        "dual": lambda y, p, a: dual(a, t),
    }
    for name, call in calls.items():
        here = call(y, p, a)
        there = call(*(torch.from_numpy(x) for x in (y, p, a)))
        assert isinstance(here, np.ndarray)
        assert isinstance(there, torch.Tensor)
        # Two libraries' exp and log may differ by an ulp.
        np.testing.assert_allclose(there.numpy(), here, rtol=1e-13, atol=1e-14, err_msg=name)
        if jax is not None:
            with jax.enable_x64(True):
                elsewhere = call(*(jax.numpy.asarray(x) for x in (y, p, a)))
            assert isinstance(elsewhere, jax.Array)
            np.testing.assert_allclose(np.asarray(elsewhere), here, rtol=1e-13, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_stays(dtype):
    y = DISTRIBUTIONS.astype(dtype)
    assert bregman_divergence(y, y[::-1], 0.5).dtype == dual(y, 1.5).dtype == dtype
    assert tsallis_entropy(torch.from_numpy(y), 0.5).dtype == torch.from_numpy(y).dtype


@pytest.mark.parametrize("t", [0.3, 1.0, 1.7, 2.0, 3.0])
@pytest.mark.parametrize("kind", ["numpy float16", "torch float16", "torch bfloat16"])
def test_half_precision_is_computed_in_float32(kind, t):
    dtype = getattr(torch, kind.split()[1])
    eps = torch.finfo(dtype).eps
    y, p = (torch.from_numpy(x).to(dtype) for x in (DISTRIBUTIONS, OTHERS))
    half = [x.numpy() for x in (y, p)] if kind.startswith("numpy") else [y, p]
    functions = [bregman_divergence, tsallis_divergence, *(one(f) for f in (convex_function, tsallis_entropy, dual))]
    for function in functions:
        got = function(*half, t)
        assert got.dtype == half[0].dtype
        want = function(y.double().numpy(), p.double().numpy(), t)
        got = torch.as_tensor(got).double().numpy()
        np.testing.assert_allclose(got, want, rtol=eps, atol=1e-4 * eps)


def one(function):
    """The same function of two arrays, which looks at the first only."""
    return lambda y, p, t: function(y, t)


def gradients(function, *arrays):
    """By torch's and, where it is installed, by JAX's automatic differentiation, in every argument."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    by_torch = [g.numpy() for g in torch.autograd.grad(function(*leaves).sum(), leaves)]
    if jax is None:
        return [by_torch]
    with jax.enable_x64(True):
        everything = jax.grad(lambda *x: function(*x).sum(), argnums=tuple(range(len(arrays))))
        by_jax = [np.asarray(g) for g in everything(*(jax.numpy.asarray(x) for x in arrays))]
    return [by_torch, by_jax]


def exactly(per_entry, *arrays):
    return np.vectorize(lambda *x: float(per_entry(*map(mp.mpf, x))))(*arrays)


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1 + 1e-9, 1.5, 2.0, 2 - 1e-9, 3.0])
def test_automatic_derivatives_are_the_documented_ones(t):
    y, p = DISTRIBUTIONS, OTHERS
    by_y = exactly(lambda y, p: oracle.log_t(y, t) - oracle.log_t(p, t), y, p)
    by_p = exactly(lambda y, p: (p - y) * p ** -mp.mpf(t), y, p)
    for got in gradients(lambda y, p: bregman_divergence(y, p, t), y, p):
        # The product rule cancels two terms of the size of p^(1-t).
        np.testing.assert_allclose(got[0], by_y, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(got[1], by_p, rtol=1e-11, atol=1e-11)
    log_t = exactly(lambda y: oracle.log_t(y, t), y)
    for (got,) in gradients(lambda y: convex_function(y, t), y):
        np.testing.assert_allclose(got, log_t, rtol=1e-11, atol=1e-12)
    a = np.log(POSITIVE[:2])
    softmax = np.array([[float(x) for x in oracle.softmax(row.tolist(), t)] for row in a])
    for (got,) in gradients(lambda a: dual(a, t), a):
        np.testing.assert_allclose(got, softmax, atol=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5])
def test_a_one_hot_target_has_a_finite_gradient(t):
    y, p = np.eye(5)[:1], DISTRIBUTIONS[:1]
    expected = exactly(lambda y, p: (p - y) * p ** -mp.mpf(t), y, p)
    for _, by_p in gradients(lambda y, p: bregman_divergence(y, p, t), y, p):
        np.testing.assert_allclose(by_p, expected, rtol=1e-11)


@pytest.mark.parametrize("t", [0.0, 0.5, 0.9, 1.5])
def test_derivatives_keep_their_digits_at_small_probabilities(t):
    y, p = np.array([0.5, 0.5]), np.array([1e-9, 1e-4])
    by_p = exactly(lambda y, p: (p - y) * p ** -mp.mpf(t), y, p)
    for _, got in gradients(lambda y, p: bregman_divergence(y, p, t), y, p):
        np.testing.assert_allclose(got, by_p, rtol=1e-12)
    log_t = exactly(lambda p: oracle.log_t(p, t), p)
    for (got,) in gradients(lambda p: convex_function(p, t), p):
        np.testing.assert_allclose(got, log_t, rtol=1e-12)


# The documented table


def documented_table():
    """The rows of docs/math.md on special cases: temperature, name, F_t and its divergence as Python expressions."""
    page = (Path(__file__).parents[1] / "docs" / "math.md").read_text(encoding="utf-8")
    return re.findall(r"^\| ([\d/]+) \| ([^|]*) \| `([^`|]+)` \| `([^`|]+)` \|$", page, flags=re.MULTILINE)


def evaluate(expression, **values):
    return eval(expression, {"__builtins__": {}, "log": mp.log, "sqrt": mp.sqrt}, values)


@pytest.mark.parametrize(("t", "name", "function", "divergence"), documented_table())
def test_documented_special_case(t, name, function, divergence):
    t = float(eval(t))
    ys, ps = [0.2, 1.0, 3.7], [0.9, 0.4, 2.5]
    for y, p in zip(map(mp.mpf, ys), map(mp.mpf, ps), strict=True):
        # Both sides carry 50 digits, and rounding takes two or three.
        assert abs(evaluate(function, y=y) - exact_convex_function(y, mp.mpf(t))) < 1e-40
        assert abs(evaluate(divergence, y=y, p=p) - exact_bregman(y, p, mp.mpf(t))) < 1e-40
    expected = mp.fsum(evaluate(divergence, y=mp.mpf(y), p=mp.mpf(p)) for y, p in zip(ys, ps, strict=True))
    assert abs(bregman_divergence(np.array(ys), np.array(ps), t) - expected) <= TOLERANCE


def test_the_table_has_the_papers_rows():
    assert [t for t, *_ in documented_table()] == ["0", "1/2", "1", "3/2", "2", "3"]


@pytest.mark.parametrize(
    ("t", "printed"),
    [(0.5, "(4*y**(4/3) - 6*y + 2) / 3"), (1.5, "-4*y**(3/2) + 2*y + 2"), (3, "(-1/y + y - 2) / 2")],
)
def test_the_papers_printed_entries_are_caught(t, printed):
    """Not even up to an affine function: their second derivative is not y^-t."""
    documented = {eval(row[0]): row[2] for row in documented_table()}[t]
    y = mp.mpf(2)
    assert abs(mp.diff(lambda y: evaluate(documented, y=y), y, 2) - y ** -mp.mpf(t)) < 1e-12
    assert abs(mp.diff(lambda y: evaluate(printed, y=y), y, 2) - y ** -mp.mpf(t)) > 0.1


# Importing, and bad input


def test_importing_imports_numpy_only():
    code = (
        "import sys, bitempered.divergences\n"
        "third_party = {'torch', 'jax', 'scipy', 'sklearn', 'matplotlib', 'mpmath', 'triton'} & set(sys.modules)\n"
        "assert not third_party, third_party\n"
        "import numpy\n"
        "assert bitempered.divergences.dual(numpy.zeros(2), 1.5) < 0\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_negative_entries_and_nan_give_nan():
    good = np.array([0.5, 0.5])
    for bad in (np.array([-0.1, 1.1]), np.array([math.nan, 1.0])):
        for t in (0.5, 1.0, 2.0):
            values = [bregman_divergence(bad, good, t), bregman_divergence(good, bad, t), convex_function(bad, t)]
            values += [tsallis_divergence(bad, good, t), tsallis_divergence(good, bad, t), tsallis_entropy(bad, t)]
            assert np.isnan(values).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda y: convex_function(y, -0.1), ValueError, "t must be a finite number >= 0, got -0.1"),
        (lambda y: convex_function(y, math.nan), ValueError, "t must be a finite number >= 0, got nan"),
        (lambda y: alternate_convex_function(y, -1.5), ValueError, "t must be a finite number >= -1, got -1.5"),
        (lambda y: beta_divergence(y, y, math.inf), ValueError, "beta must be a finite number, got inf"),
        (lambda y: dual(y, "1"), TypeError, "t must be a number, got str"),
        (
            lambda y: dual([0.0, 1.0], 1.0),
            TypeError,
            "a must be an array of NumPy, torch or JAX, got builtins.list",
        ),
        (
            lambda y: bregman_divergence(y, torch.from_numpy(y), 1.0),
            TypeError,
            "y and y_hat must be arrays of one of NumPy, torch and JAX, got numpy.ndarray and torch.Tensor",
        ),
        (
            lambda y: tsallis_entropy(np.array([1, 0]), 1.0),
            TypeError,
            "y must have a floating-point dtype, got int64; convert it",
        ),
        (
            lambda y: dual(torch.tensor([1, 0]), 1.0),
            TypeError,
            "a must have a floating-point dtype, got torch.int64; convert it",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(np.array([0.5, 0.5]))
