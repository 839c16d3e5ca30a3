"""Logits up to the largest number of the dtype, at every temperature: exact probabilities, losses and gradients."""

import functools
import math

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from adversary import weighted

import bitempered.numpy as bt_numpy
from bitempered import core, kernels
from bitempered.numpy import xp
from bitempered.torch import bi_tempered_logistic_loss, tempered_log_softmax, tempered_softmax

TEMPERATURES = [0.0, 0.5, 1.0, 1.0001, 1.5, 2.0, 2.5, 4.0, 20.0, 100.0]
TOLERANCE = {np.float64: 1e-14, np.float32: 5e-7}  # a few roundings
# Where s u e^(-s m) neither overflows nor has an e^(-s m) that underflows; where each happens; the largest there is.
LARGE = {np.float32: (1e30, 1e35, 1e37, 3e38), np.float64: (1e30, 1e38, 1e300, 1.7e308)}
CASES = [(dtype, large) for dtype, all_large in LARGE.items() for large in all_large]


def rows(dtype, large):
    """One class far above two, and every order of magnitude."""
    ladder = [0.0, -1e-3, -1.0, -math.sqrt(large), -large]
    return [np.array([large, 0, 0], dtype), np.array(ladder, dtype)]


@functools.cache
def exact(logits, t, t1=None):
    """Probabilities, or the loss of the last class and its gradient, with enough digits for 1 + 1e308."""
    with mp.workdps(340):
        if t == 1:  # without bisection, where exp(-1e308) takes its time
            powers = [mp.exp(mp.mpf(x) - max(logits)) for x in logits]
            return [p / mp.fsum(powers) for p in powers]
        if t1 is None:
            return [+p for p in oracle.softmax(logits, t)]
        return oracle.loss_and_gradient(logits, [0] * (len(logits) - 1) + [1], t1, t)


def assert_close(got, want, tolerance):
    for x, y in zip(np.ravel(got).tolist(), want, strict=True):
        assert abs(x - y) <= tolerance * max(1, abs(y)), (x, float(y))


@pytest.mark.parametrize(("dtype", "large"), CASES)
@pytest.mark.parametrize("t", TEMPERATURES)
def test_probabilities(dtype, large, t):
    for logits in rows(dtype, large):
        want = exact(tuple(logits.tolist()), t)
        logs = [mp.log(p) if p > 0 else -mp.inf for p in want]
        in_torch = torch.from_numpy(logits)
        for got in (bt_numpy.tempered_softmax(logits, t), tempered_softmax(in_torch, t).numpy()):
            assert_close(got, want, TOLERANCE[dtype])
            assert abs(float(np.sum(got, dtype=np.float64)) - 1) <= TOLERANCE[dtype]
        for got in (bt_numpy.tempered_log_softmax(logits, t), tempered_log_softmax(in_torch, t).numpy()):
            outside = [x == -mp.inf for x in logs]
            assert np.isneginf(got).tolist() == outside
            assert_close(got[~np.array(outside)], [x for x in logs if x > -mp.inf], TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 3e38), (np.float64, 1.7e308)])
@pytest.mark.parametrize(("t1", "t2"), [(0.0, 0.5), (0.5, 1.5), (0.8, 4.0), (0.8, 20.0), (0.5, 100.0)])
def test_loss_and_gradient(dtype, large, t1, t2):
    for logits in rows(dtype, large):
        target = len(logits) - 1
        want, want_gradient = exact(tuple(logits.tolist()), t2, t1)
        loss, gradient = bt_numpy.loss_and_grad(logits, target, t1, t2)
        leaf = torch.from_numpy(logits).requires_grad_()
        with kernels.use("core"):
            by_torch = bi_tempered_logistic_loss(leaf, torch.tensor(target), t1, t2)
        for got in (loss, by_torch.item()):
            assert_close(got, [want], TOLERANCE[dtype])
        for got in (gradient, torch.autograd.grad(by_torch, leaf)[0].numpy()):
            assert_close(got, want_gradient, TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "large"), CASES)
def test_temperatures_in_an_array(dtype, large):
    t = np.array(TEMPERATURES, dtype)[:, None]
    for logits in rows(dtype, large):
        u = core.gaps(np.tile(logits, (len(t), 1)), axis=1, xp=xp)
        with np.errstate(all="ignore"):
            together = np.exp(core.log_probs(u, core.normalizer(u, t, steps=20, axis=1, xp=xp), t, xp=xp))
        for p, alone in zip(together, t[:, 0].tolist(), strict=True):
            np.testing.assert_allclose(p, bt_numpy.tempered_softmax(logits, alone), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("t", TEMPERATURES)
def test_jax(t):
    jnp = pytest.importorskip("jax.numpy")
    bt_jax = pytest.importorskip("bitempered.jax")
    for large in LARGE[np.float32]:
        for logits in rows(np.float32, large):
            want = exact(tuple(logits.tolist()), t)
            for temperature in (t, jnp.float32(t)) if t != 1.0001 else (t,):  # in float32 that is another number
                assert_close(bt_jax.tempered_softmax(logits, temperature), want, TOLERANCE[np.float32])


@pytest.mark.parametrize("t", [2.5, 20.0, 100.0])
def test_second_derivatives_are_finite(t):
    logits = torch.tensor([3e38, 0.0, 0.0])
    hessian = torch.func.hessian(lambda a: bi_tempered_logistic_loss(a, torch.tensor(1), 0.8, t))(logits)
    assert hessian.isfinite().all()


@pytest.mark.parametrize(("eps", "bar", "most"), [(2.0**-23, 1e-6, 1e38), (2.0**-52, 1e-11, 1e306)], ids=["32", "64"])
@pytest.mark.parametrize("classes", [3, 10, 1000, 2**18])
@pytest.mark.parametrize("t", [0.5, 1.2, 2.0, 2.1, 4.0, 10.0, 50.0, 100.0])
def test_the_number_of_steps_suffices_for_gaps_of_all_sizes(t, classes, eps, bar, most):
    """2,000 rows of up to six levels, each any number of classes, and two levels next to where climbing is slowest."""
    rng = np.random.default_rng(0)
    gaps = 10 ** rng.uniform(-6, math.log10(most), (2000, 6))
    share = np.exp(rng.uniform(-12, 0, gaps.shape))
    share[::4, 1:] = 0
    total = classes ** rng.uniform(0, 1, (2000, 1))
    counts = np.pad(np.round(share / share.sum(1, keepdims=True) * total), ((0, 0), (1, 0)), constant_values=1)
    if t > 1:  # s u = K^s, or nearly
        near = (t - 1) * np.log(total[::4, 0]) * rng.uniform(0.9, 1.1, 500)
        gaps[::4, 0] = np.exp(np.minimum(near, math.log(most))) / (t - 1)
    u, xp = np.pad(gaps, ((0, 0), (1, 0))), weighted(counts)
    with np.errstate(all="ignore"):
        m = core.normalizer(u, t, steps=core.newton_steps(t, classes, eps), axis=1, xp=xp)
        mass = xp.sum(np.exp(core.log_probs(u, m, t, xp=xp)), axis=1)
    assert abs(mass - 1).max() <= bar + classes * 2.0**-52
