"""bitempered.jax with temperatures that are arrays: derivatives, schedules, one per example; and with `rescale`."""

import math

import mpmath as mp
import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
from cases import INDEX, LOGITS, SOFT, TOLERANCE, WEIGHT, error, slope
from rescale_cases import RESCALED, rescaled_losses

import bitempered.jax as bt
import bitempered.numpy as bt_numpy


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


ROWS = LOGITS[:3] / 4  # no class on the edge of a support
SMOOTH = 0.875 * np.eye(6)[INDEX[:3]] + 0.125 / 6
# Both sides of 1, one across it, both next to it, a heavy tail.
PAIRS = [(0.0, 0.0), (0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (1 - 1e-5, 1 + 1e-7)]
TEMPERATURES = [0.5, 1 - 1e-5, 1.0, 1 + 1e-7, 1.2, 2.0, 4.0]


def loss(a, y, t1, t2, w):
    return oracle.loss_and_gradient(a, y, t1, t2, w)[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_derivatives_in_both_temperatures_equal_the_oracle(dtype):
    rows, weight = ROWS.astype(dtype), WEIGHT.astype(dtype)

    def losses(t1, t2):
        hard = bt.bi_tempered_logistic_loss(rows, INDEX[:3], t1, t2)
        soft = bt.bi_tempered_logistic_loss(rows, INDEX[:3], t1, t2, label_smoothing=0.125, weight=weight)
        return jnp.concatenate([hard, soft])

    backward = jax.jit(jax.jacrev(losses, argnums=(0, 1)))
    cases = [(a, q, None) for a, q in zip(rows.tolist(), np.eye(6)[INDEX[:3]].tolist(), strict=True)]
    cases += [(a, q, WEIGHT.tolist()) for a, q in zip(rows.tolist(), SMOOTH.tolist(), strict=True)]
    for pair in PAIRS:
        t1, t2 = (float(dtype(t)) for t in pair)
        pairs = [lambda t, t2=t2: (t, t2), lambda t, t1=t1: (t1, t)]
        for got, at, t in zip(backward(dtype(t1), dtype(t2)), pairs, (t1, t2), strict=True):
            want = [slope(lambda t, a=a, q=q, w=w, at=at: loss(a, q, *at(t), w), t) for a, q, w in cases]
            assert got.dtype == dtype
            assert error(got, want) <= 4 * TOLERANCE[dtype], pair  # a sum of several terms of the loss's size


def test_derivatives_of_the_other_functions_equal_the_oracle():
    x, z = np.array([1e-5, 0.3, 1.0, 50.0]), np.array([-1.5, -0.3, 0.0, 0.2])

    def everything(t):
        return bt.tempered_log_softmax(ROWS, t), bt.log_partition(ROWS, t), bt.log_t(x, t), bt.exp_t(z, t)

    slopes = jax.jit(jax.jacfwd(everything))
    for t in TEMPERATURES:
        # All classes are in the support: outside, the logarithm has no derivative.
        log_p = [lambda t, a=a, i=i: mp.log(oracle.softmax(a, t)[i]) for a in ROWS.tolist() for i in range(6)]
        partition = [lambda t, a=a: oracle.normalizer(a, t) for a in ROWS.tolist()]
        log_x = [lambda t, v=v: oracle.log_t(v, t) for v in x.tolist()]
        exp_z = [lambda t, v=v: oracle.exp_t(v, t) for v in z.tolist()]
        for got, exact in zip(slopes(t), (log_p, partition, log_x, exp_z), strict=True):
            assert error(got, [slope(f, t) for f in exact]) <= 1e-11, t  # factors of 1 / (t - 1) for what is exact


def test_limits_of_derivatives():
    outside = np.array([[5.0, 0.0, 4.9]])

    def everything(t):
        ends = bt.log_t(np.array([0.0, np.inf]), jnp.stack([t, t + 1]))  # -1 / (1 - t) and 1 / (t + 1 - 1)
        return ends, bt.exp_t(np.float64(-3.0), t), bt.tempered_softmax(outside, t)

    ends, exp_z, probabilities = jax.jit(jax.jacfwd(everything))(0.5)
    assert ends.tolist() == [-4, -4]
    assert exp_z == 0  # so is the value
    assert probabilities[0, 1] == 0
    np.testing.assert_allclose(probabilities.sum(), 0, atol=1e-15)


def differences(f, t, step=1e-5):
    return np.stack([(f(t + step * e) - f(t - step * e)) / (2 * step) for e in np.eye(len(t))], -1)


@pytest.mark.slow  # to compile
def test_second_derivatives_in_temperatures_and_logits_equal_finite_differences():
    """Of everything at once: two temperatures, then twelve logits."""

    def total(v):
        a = v[2:].reshape(2, 6)
        hard = bt.bi_tempered_logistic_loss(a, INDEX[:2], v[0], v[1], rescale=True)
        return hard.sum() + bt.bi_tempered_logistic_loss(a, SOFT[:2], v[0], v[1]).sum()

    both, hessian = jax.jit(jax.value_and_grad(total)), jax.jit(jax.hessian(total))
    logits = np.random.default_rng(3).normal(size=12) / 3
    for pair in [(0.5, 0.8), (1 - 3e-5, 1 + 3e-5), (0.8, 1.2), (0.5, 4.0)]:
        v, scale = np.append(pair, logits), 6 ** (pair[1] - pair[0])
        gradient = differences(lambda v: both(v)[0], v)
        np.testing.assert_allclose(both(v)[1], gradient, rtol=1e-6, atol=1e-7 * scale)
        exact = hessian(v)
        np.testing.assert_allclose(exact, differences(lambda v: both(v)[1], v), rtol=1e-5, atol=1e-6 * scale**2)
        np.testing.assert_allclose(exact, exact.T, rtol=1e-8, atol=1e-9 * scale**2)


def test_one_temperature_per_example_equals_a_loop():
    t1, t2 = np.array([0.5, 1.0, 0.8]), np.array([0.8, 1.0, 1.7])

    def f(a, index, t1, t2):
        return bt.bi_tempered_logistic_loss(a, index, t1, t2, rescale=True)

    def of_all(t1, t2):
        losses, pullback = jax.vjp(lambda t1, t2: f(ROWS, INDEX[:3], t1, t2), t1, t2)
        _, along = jax.jvp(lambda t1, t2: f(ROWS, INDEX[:3], t1, t2), (t1, t2), (jnp.ones(3), jnp.ones(3)))
        return losses, pullback(jnp.ones(3)), along

    each = jax.jit(jax.value_and_grad(f, argnums=(2, 3)))
    alone = [each(ROWS[i], INDEX[i], t1[i], t2[i]) for i in range(3)]
    together, gradients, along = jax.jit(of_all)(t1, t2)
    for values, slopes in (jax.vmap(each)(ROWS, INDEX[:3], t1, t2), (together, gradients)):
        for i, (value, wanted) in enumerate(alone):
            np.testing.assert_allclose(values[i], value, rtol=1e-13)
            for got, want in zip(slopes, wanted, strict=True):
                np.testing.assert_allclose(got[i], want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(along, gradients[0] + gradients[1], rtol=1e-12)


def test_one_temperature_per_row_of_a_binary_loss_equals_a_loop():
    t1, t2 = np.array([[0.5], [1.0], [0.8]]), np.array([[0.8], [1.0], [1.7]])
    got = bt.bi_tempered_binary_logistic_loss(ROWS, SOFT[:3], t1, t2, rescale=True)
    for i in range(3):
        want = bt_numpy.bi_tempered_binary_logistic_loss(ROWS[i], SOFT[i], t1[i, 0], t2[i, 0], rescale=True)
        np.testing.assert_allclose(got[i], want, rtol=1e-12)


def test_a_schedule_compiles_once_with_arrays_and_once_per_pair_with_static_numbers():
    traces = []

    def step(a, t1, t2):
        traces.append(None)
        return bt.bi_tempered_logistic_loss(a, INDEX, t1, t2).mean()

    traced = jax.jit(jax.value_and_grad(step))
    for i in range(1000):
        value, _ = traced(LOGITS, 1 - i / 1250, 1 + i / 1000)
    assert len(traces) == 1
    want = bt_numpy.bi_tempered_logistic_loss(LOGITS, INDEX, 1 - 999 / 1250, 1 + 999 / 1000)
    np.testing.assert_allclose(value, want.mean(), rtol=1e-13)
    traces.clear()
    static = jax.jit(step, static_argnums=(1, 2))
    for t in (0.9, 0.8, 0.9):
        static(LOGITS, t, 1.2)
    assert len(traces) == 2
    # Without a jit of the caller's, too, an array compiles once.
    before = bt._loss._cache_size()
    for t in (0.3, 0.4, 0.5):
        bt.bi_tempered_logistic_loss(LOGITS[:2, :5], INDEX[:2] % 5, jnp.array(t), jnp.array(1.3))
    assert bt._loss._cache_size() == before + 1


@pytest.mark.parametrize(
    ("t1", "t2", "message"),
    [
        (jnp.array(1.0), 0.5, "t1 must not exceed t2, got t1 = 1.0 and t2 = 0.5"),
        (np.array([0.5, 0.9, 0.5, 0.5]), np.full(4, 0.8), "t1 must not exceed t2, got t1 = 0.9 and t2 = 0.8"),
        (jnp.array(2.0), jnp.array(3.0), r"t1 must be in \[0, 2\), got 2.0"),
        (np.array([0.5, -0.1, 0.5, 0.5]), 1.0, "t1 must be a finite number >= 0, got -0.1"),
        (0.5, jnp.array(math.inf), "t2 must be a finite number >= 0, got inf"),
        (0.5, jnp.array([1.0, math.nan, 1.0, 1.0]), "t2 must be a finite number >= 0, got nan"),
        (0.5, jnp.array(50.0), "more than 1e30 for 6 classes and t2 = 50"),
        (0.5, 50.0, "more than 1e30 for 6 classes and t2 = 50"),
    ],
)
def test_what_is_known_is_checked(t1, t2, message):
    with pytest.raises(ValueError, match=message):
        bt.bi_tempered_logistic_loss(LOGITS, INDEX, t1, t2, rescale=True)


# rescale


def test_rescaled_loss_and_gradient_equal_the_oracle():
    smooth = 0.875 * np.eye(6)[INDEX] + 0.125 / 6

    def both(a, t1, t2):
        return bt.bi_tempered_logistic_loss(a, INDEX, t1, t2, label_smoothing=0.125, weight=WEIGHT, rescale=True)

    def value_and_gradient(a, t1, t2):
        losses, pullback = jax.vjp(lambda a: both(a, t1, t2), a)
        return losses, pullback(jnp.ones_like(losses))[0]

    traced = jax.jit(value_and_gradient)
    for pair in RESCALED:
        t1, t2 = pair
        exact = rescaled_losses(LOGITS, smooth, t1, t2, WEIGHT.tolist())
        ways = [traced(LOGITS, t1, t2)]
        if pair == (0.8, 1.2):
            ways.append(jax.jit(lambda a, t1=t1, t2=t2: value_and_gradient(a, t1, t2))(LOGITS))
        for losses, gradient in ways:
            assert error(losses, exact[0]) <= 1e-12
            assert error(gradient, exact[1]) <= 1e-12 * max(1, 2 * (t2 - t1))  # see test_numpy
    a, y = LOGITS[:, 1], SOFT[:, 1]
    pairs = np.stack((0 * a, a), 1), np.stack((1 - y, y), 1)
    got = bt.bi_tempered_binary_logistic_loss(a, y, 0.5, 2.0, rescale=True)
    assert error(got, rescaled_losses(*pairs, 0.5, 2.0)[0]) <= 1e-12


def test_a_masked_class_counts_and_has_no_derivative():
    masked, kept = np.array([1.0, -np.inf, 0.0]), np.array([True, False, True])

    def f(t2, a):
        by_where = bt.bi_tempered_logistic_loss(jnp.array([1.0, 7.0, 0.0]), 0, 0.5, t2, rescale=True, where=kept)
        return bt.bi_tempered_logistic_loss(a, 0, 0.5, t2, rescale=True), by_where

    def want(t2):
        return bt_numpy.bi_tempered_logistic_loss(masked, 0, 0.5, t2, rescale=True)

    (loss, by_where), pullback = jax.jit(lambda *x: jax.vjp(f, *x))(2.0, masked)
    np.testing.assert_allclose([loss, by_where], want(2.0), rtol=1e-14)
    by_t2, by_a = pullback((np.float64(1), np.float64(0)))
    np.testing.assert_allclose(by_t2, (want(2 + 1e-5) - want(2 - 1e-5)) / 2e-5, rtol=1e-8)
    np.testing.assert_array_equal(pullback((np.float64(0), np.float64(1)))[0], by_t2)
    assert by_a[1] == 0
    assert np.isfinite(by_a).all()


def test_half_precision_is_rescaled_in_float32():
    logits = jnp.array([[300.0, 0.0, -300.0, 10.0]], "float16")  # times 4^3 they overflow float16
    for t1, t2 in ((0.5, 4.0), (jnp.float32(0.5), jnp.float32(4.0))):
        got = bt.bi_tempered_logistic_loss(logits, np.array([3]), t1, t2, rescale=True)
        want = bt.bi_tempered_logistic_loss(logits.astype("float32"), np.array([3]), t1, t2, rescale=True)
        assert got.dtype == "float16"
        np.testing.assert_array_equal(got, want.astype("float16"))
