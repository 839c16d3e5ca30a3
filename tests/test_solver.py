"""The normaliser: its mass error, its cap on the number of steps, and what the paper's algorithms reach beside it."""

from functools import partial

import numpy as np
import pytest
import references
import torch
from adversary import ADVERSARIAL_T, BAR, CLASS_COUNTS, FLOAT32, FLOAT64, mass_error, search, witnesses

from bitempered import core
from bitempered.torch import tempered_softmax
from bitempered.torch.autograd import xp as torch_xp

CLASSES = [2, 10, 1000, 50257]  # smallest, MNIST, ImageNet, a vocabulary
TEMPERATURES = [0, 0.5, 0.8, 1 - 1e-6, 1, 1 + 1e-6, 1.05, 1.2, 1.5, 2, 4, 10]


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 5e-6)], ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_mass(dtype, bar, classes):
    generator = torch.Generator().manual_seed(classes)
    normal = torch.randn(8 if classes <= 1000 else 2, classes, generator=generator, dtype=dtype)
    worst = 0.0
    for scale in (0, 0.1, 1, 5, 30, 300):  # 0: constant logits, a zero-initialised head
        for t in TEMPERATURES:
            mass = tempered_softmax(scale * normal, t).double().sum(-1)
            worst = max(worst, (mass - 1).abs().max().item())
    assert worst <= bar


def allowed(classes, eps):
    # At the edge of a finite support each of K equal classes adds the rounding of an exp and of a product.
    return BAR[eps] + 2 * classes * 2.0**-52


@pytest.mark.parametrize("eps", [FLOAT64, FLOAT32], ids=["float64", "float32"])
def test_the_hardest_known_logits_need_no_more_steps(eps):
    for w in witnesses():
        after = partial(mass_error, np.array([w["gaps"]]), np.array([w["counts"]]), w["t"])
        assert sum(w["counts"]) <= w["classes"]
        assert after(w["steps"]) > BAR[FLOAT32], w
        assert after(core.newton_steps(w["t"], w["classes"], eps)) <= allowed(w["classes"], eps), w


@pytest.mark.parametrize(("t", "classes"), [(0.3, 10), (1.2, 2**18), (2, 2**18), (4, 10)])
def test_three_steps_fewer_are_too_few(t, classes):
    (hardest,) = (w["steps"] for w in witnesses() if (w["t"], w["classes"]) == (t, classes))
    assert hardest >= core.newton_steps(t, classes, FLOAT32) - 3, "more steps than the hardest known logits need"


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASS_COUNTS)
@pytest.mark.parametrize("t", ADVERSARIAL_T)
def test_no_search_beats_the_number_of_steps(t, classes):
    dtypes = [FLOAT32, FLOAT64]
    found = search(t, classes, *(allowed(classes, eps) for eps in dtypes))
    for eps, (steps, _) in zip(dtypes, found, strict=True):
        assert steps < core.newton_steps(t, classes, eps)


def test_one_step_is_log_sum_exp_at_one():
    logits = 30 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = core.gaps(logits, axis=1, xp=torch_xp)
    m = core.normalizer(u, 1.0, steps=1, axis=1, xp=torch_xp)
    torch.testing.assert_close((logits.amax(1) + m[:, 0]), logits.logsumexp(1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("t", [0.0, 0.5, 0.8, 1.05, 1.2, 2.0, 4.0])
def test_the_binary_search_agrees(t):
    logits = 5 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = references.binary_search(logits, t, iterations=100, axis=1, xp=torch_xp)
    mass = core.exp_t(logits - found, t, xp=torch_xp) - tempered_softmax(logits, t)
    assert mass.abs().max() < 1e-11  # lambda - a cancels: 100 times the rounding of a number near 50


def test_the_fixed_point_agrees_when_it_converges_and_five_iterations_do_not_suffice():
    logits = 5 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def mass_error(iterations):
        found = references.fixed_point(logits, 1.2, iterations=iterations, axis=1, xp=torch_xp)
        return (core.exp_t(logits - found, 1.2, xp=torch_xp).sum(1) - 1).abs().max().item()

    assert mass_error(200) < 1e-12
    assert mass_error(5) > 1e-3
