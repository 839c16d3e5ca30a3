"""core.py where no adapter's tests reach: array temperatures, smooth through s = 0, and the factors of rescale."""

import mpmath as mp
import numpy as np
import pytest
import torch

from bitempered import core
from bitempered.numpy import loss_and_grad, tempered_softmax
from bitempered.torch.autograd import xp


@pytest.mark.parametrize(("function", "exact"), [(core.psi, mp.log1p), (core.phi, mp.expm1)])
def test_array_temperatures_equal_the_oracle_through_zero(function, exact):
    s = torch.tensor([-0.9, -1e-2, -1e-4, -1e-8, -1e-16, 0.0, 1e-16, 1e-8, 1e-4, 1e-2, 3.0], dtype=torch.float64)
    for v in (0.0, 1e-3, 0.7, 1.05):
        got = function(torch.tensor(v, dtype=torch.float64), s, xp=xp)
        want = [exact(mp.mpf(x) * mp.mpf(v)) / mp.mpf(x) if x else mp.mpf(v) for x in s.tolist()]
        np.testing.assert_allclose(got.numpy(), [float(w) for w in want], rtol=4e-15)
        one_by_one = torch.stack([function(torch.tensor(v, dtype=torch.float64), x, xp=xp) for x in s.tolist()])
        torch.testing.assert_close(got, one_by_one, rtol=4e-15, atol=0)


@pytest.mark.parametrize(("function", "slope"), [(core.psi, -0.5), (core.phi, 0.5)])
def test_the_derivative_in_s_is_continuous_through_zero(function, slope):
    v = 0.7
    for at in (-1e-6, 0.0, 1e-6):
        s = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        (derivative,) = torch.autograd.grad(function(torch.tensor(v, dtype=torch.float64), s, xp=xp), s)
        assert derivative.item() == pytest.approx(slope * v * v, abs=1e-6)  # d/ds = -+ v^2 / 2 + O(s)


def test_array_temperatures_with_masked_classes():
    u = torch.tensor([[0.0, 0.7, torch.inf]], dtype=torch.float64)
    for t in (0.5, 1.0, 1.2):
        scalar = core.normalizer(u, t, steps=10, axis=1, xp=xp)
        array = core.normalizer(u, torch.tensor([[t]], dtype=torch.float64), steps=10, axis=1, xp=xp)
        torch.testing.assert_close(array, scalar, rtol=1e-14, atol=0)  # the same operations but for the series


def test_array_temperatures_give_each_row_its_own_loss():
    generator = torch.Generator().manual_seed(0)
    a = 4 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    y = torch.softmax(torch.randn(5, 7, generator=generator, dtype=torch.float64), 1)
    t1 = torch.tensor([0.0, 0.5, 1.0, 0.9, 1.3], dtype=torch.float64)[:, None]
    t2 = torch.tensor([0.5, 1.0, 1.0, 1.2, 4.0], dtype=torch.float64)[:, None]

    def loss_and_gradient(a, y, t1, t2):
        u = core.gaps(a, axis=1, xp=xp)
        m = core.normalizer(u, t2, steps=12, axis=1, xp=xp)
        at = core.state(u, m, t2, axis=1, xp=xp)
        return core.loss(y, at.log_p, t1, axis=1, xp=xp), core.gradient(y, at, t1, t2, axis=1, xp=xp)

    together = loss_and_gradient(a, y, t1, t2)
    for row in range(5):
        alone = loss_and_gradient(a[row : row + 1], y[row : row + 1], t1[row].item(), t2[row].item())
        torch.testing.assert_close(together[0][row : row + 1], alone[0], rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(together[1][row : row + 1], alone[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("t", [0.5, 1.0, 1.2, 2.0, 4.0])
def test_a_solve_starts_from_nearby_logits(t):
    generator = torch.Generator().manual_seed(0)
    a = 4 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
    exact = core.solve(a, t, axis=1, xp=xp)[1]
    for distance in (0.0, 1e-3, 0.1, 100.0):  # the last has a tangent far below the start without it
        nearby = a + distance * torch.randn(50, 7, generator=generator, dtype=torch.float64)
        last = core.state(*core.solve(nearby, t, axis=1, xp=xp), t, axis=1, xp=xp)
        u, m = core.solve(a, t, last=last, axis=1, xp=xp)
        torch.testing.assert_close(m, exact, rtol=1e-13, atol=1e-14)
        one_step = core.normalizer(u, t, steps=1, last=last, axis=1, xp=xp)
        if t <= 2 and distance <= 1e-3:  # Newton's method squares what is left
            torch.testing.assert_close(one_step, exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (0.5, 4.0), (0.2, 0.7), (1.3, 1.6)])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_rescaled_the_loss_starts_as_cross_entropy(t1, t2, classes):
    inner, outer = core.scales(classes, t1, t2)
    _, gradient = loss_and_grad(np.zeros((1, classes)), np.array([1]), t1, t2)
    uniform, first, label = np.full(classes, 1 / classes), np.arange(classes) == 0, np.arange(classes) == 1
    np.testing.assert_allclose(outer * inner * gradient[0], uniform - label, rtol=1e-12, atol=1e-15)
    step = 1e-5 * inner * first
    slope = (tempered_softmax(step, t2) - tempered_softmax(-step, t2)) / 2e-5
    np.testing.assert_allclose(slope, uniform * (first - uniform), atol=1e-6)
