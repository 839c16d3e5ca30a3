"""rescale of logits that are infinite, NaN or huge: every adapter gives what bitempered.torch gives."""

import math
import os

import numpy as np
import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"
jax = pytest.importorskip("jax")
keras = pytest.importorskip("keras", minversion="3.5")

import bitempered.jax as bt_jax
import bitempered.keras as bt_keras
import bitempered.numpy as bt_numpy
from bitempered import kernels
from bitempered.torch import bi_tempered_logistic_loss

# Keras asks NumPy for copies in a way that PyTorch's tensors do not know yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

INF, NAN, HUGE = math.inf, math.nan, 3e38  # times 4^(t2-1), HUGE overflows float32 for t2 > 1
ROWS = np.array(
    [
        [-INF, 0, 1, 2], [2, -INF, 1, -INF], [INF, 0, 1, 2], [NAN, 0, 1, 2], [-INF, -INF, -INF, -INF],
        [-HUGE, 0, 1, 2], [HUGE, 0, 1, 2], [1e30, 0, -1e30, 2], [1, 0, 2, -1],
    ],
    np.float32,
)  # fmt: skip
TARGET = np.array([2, 1, 2, 2, 0, 1, 2, 2, 1])  # the second is a masked class
WEIGHT = np.array([1.0, 2.0, 3.0, 0.5], np.float32)
PAIRS = [
    (0.5, 0.8),
    (0.8, 1.2),
    (1.3, 1.6),
    (0.5, 4.0),
]  # a finite support, mild tails, an unbounded loss, a heavy tail


def by_torch(t1, t2, kernel="core", weight=WEIGHT, target=TARGET):
    leaf = torch.tensor(ROWS, requires_grad=True)
    options = {"weight": torch.tensor(weight), "reduction": "none", "rescale": True}
    with kernels.use(kernel):
        losses = bi_tempered_logistic_loss(leaf, torch.tensor(target), t1, t2, **options)
    temperatures = [t for t in (t1, t2) if isinstance(t, torch.Tensor)]
    by_a, *by_t = torch.autograd.grad(losses, (leaf, *temperatures), torch.ones_like(losses))
    return [x.detach().numpy() for x in (losses, by_a, *by_t)]


def by_tensors(t1, t2, **options):
    return by_torch(*(torch.full((len(ROWS),), t, requires_grad=True) for t in (t1, t2)), **options)


def by_jax(t1, t2, weight=WEIGHT):
    def losses(a, t1, t2):
        return bt_jax.bi_tempered_logistic_loss(a, TARGET, t1, t2, weight=weight, rescale=True)

    values, pullback = jax.vjp(losses, ROWS, *(np.full(len(ROWS), t, np.float32) for t in (t1, t2)))
    return [np.asarray(x) for x in (values, *pullback(np.ones_like(values)))]


def by_jax_numbers(t1, t2):
    def losses(a):
        return bt_jax.bi_tempered_logistic_loss(a, TARGET, t1, t2, weight=WEIGHT, rescale=True)

    values, pullback = jax.vjp(losses, ROWS)
    return [np.asarray(x) for x in (values, *pullback(np.ones_like(values)))]


def by_keras(t1, t2, variables):
    loss, leaf = bt_keras.BiTemperedLogisticLoss(t1, t2, reduction=None, rescale=True), torch.tensor(ROWS)
    if variables:
        assert loss.temperatures is not None  # from here on the temperatures are variables
    losses = loss(TARGET, leaf.requires_grad_(), sample_weight=WEIGHT[TARGET])
    (by_a,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
    return [losses.detach().numpy(), by_a.numpy()]


def assert_same(got, want):
    """Within some roundings of float32; the derivatives in temperatures cancel more. NaN equals NaN."""
    for x, y, atol in zip(got, want, (1e-6, 1e-6, 1e-4, 1e-4), strict=False):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=atol)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_all_adapters_agree(t1, t2):
    want = by_torch(t1, t2)
    finite = np.isfinite(want[0])
    assert finite[[0, 5, 8]].all()  # masked classes, and one that overflow masks
    assert np.isnan(want[0][[2, 3, 4]]).all()
    assert want[0][1] == INF or t1 < 1
    # The C kernel has the gaps of HUGE in float64 where they overflow.
    others, huge = np.arange(len(ROWS)) != 6, np.array([6])
    by_kernel = by_torch(t1, t2, kernel="cpu")
    assert_same([x[others] for x in by_kernel], [x[others] for x in want])
    leaf = torch.tensor(ROWS[huge], dtype=torch.float64, requires_grad=True)
    with kernels.use("core"):
        loss = bi_tempered_logistic_loss(leaf, torch.tensor(TARGET[huge]), t1, t2, reduction="none", rescale=True)
    wide = [WEIGHT[TARGET[huge]] * x.detach().numpy() for x in (loss, *torch.autograd.grad(loss, leaf))]
    assert_same([x[huge] for x in by_kernel], wide)
    assert_same(by_tensors(t1, t2), want)
    assert_same(bt_numpy.loss_and_grad(ROWS, TARGET, t1, t2, weight=WEIGHT, rescale=True), want)
    assert_same(by_jax_numbers(t1, t2), want)
    assert_same(by_jax(t1, t2), by_tensors(t1, t2))
    for variables in (False, True):
        assert_same(by_keras(t1, t2, variables), want)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_examples_that_do_not_count_have_no_derivative(t1, t2):
    """Not even in t2, in which the derivative of a rescaled logit is infinite or NaN if the logit is."""
    nothing = np.zeros_like(WEIGHT)
    ignored = np.full_like(TARGET, -100)
    for results in (by_tensors(t1, t2, weight=nothing), by_tensors(t1, t2, target=ignored), by_jax(t1, t2, nothing)):
        assert len(results) == 4
        for x in results:
            np.testing.assert_array_equal(x, 0)
