"""The normaliser: its mass error, its cap on the number of steps, and what the paper's algorithms reach beside it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bitempered import core, references
from bitempered.torch import tempered_softmax
from bitempered.torch.autograd import xp as torch_xp

CLASSES = [2, 10, 1000, 50257]  # smallest, MNIST, ImageNet, a vocabulary
TEMPERATURES = [0, 0.5, 0.8, 1 - 1e-6, 1, 1 + 1e-6, 1.05, 1.2, 1.5, 2, 4, 10]


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 5e-6)], ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_mass(dtype, bar, classes):
    generator = torch.Generator().manual_seed(classes)
    normal = torch.randn(8, classes, generator=generator, dtype=dtype)
    worst = 0.0
    for scale in (0, 0.1, 1, 5, 30, 300):  # 0: constant logits, a zero-initialised head
        for t in TEMPERATURES:
            mass = tempered_softmax(scale * normal, t).double().sum(-1)
            worst = max(worst, (mass - 1).abs().max().item())
    assert worst <= bar


def weighted(counts):
    """NumPy as core's namespace, where class j stands for counts[j] equal classes: 2^18 classes cost a dozen."""
    return SimpleNamespace(
        exp=np.exp,
        expm1=np.expm1,
        log=np.log,
        log1p=np.log1p,
        ones_like=np.ones_like,
        where=np.where,
        max=lambda x, axis: np.max(x, axis=axis, keepdims=True),
        sum=lambda x, axis: np.sum(counts * x, axis=axis, keepdims=True),
    )


def mass_errors(genes, t, classes, steps):
    """The mass error after `steps` steps, for each row of genes: log gaps, log multiplicities, log class count."""
    levels = genes.shape[1] // 2
    u = np.exp(np.clip(genes[:, :levels], math.log(1e-6), math.log(2e4)))  # gaps of logits up to 1e4
    share = np.exp(genes[:, levels : 2 * levels])
    total = np.exp(np.clip(genes[:, 2 * levels :], 0, math.log(classes - 1)))
    counts = np.round(share / share.sum(1, keepdims=True) * total)
    u, counts = np.pad(u, ((0, 0), (1, 0))), np.pad(counts, ((0, 0), (1, 0)), constant_values=1)
    xp = weighted(counts)
    m = core.normalizer(u, t, steps=steps, axis=1, xp=xp)
    return np.abs(xp.sum(np.exp(core.log_probs(u, m, t, xp=xp)), axis=1) - 1)[:, 0]


def adversary(t, classes, steps, *, population=800, generations=40, levels=12):
    """The largest mass error that an evolutionary search over the logits can force after `steps` steps."""
    rng = np.random.default_rng(0)
    genes = np.concatenate(
        [
            rng.uniform(-13, 10, (population, levels)),
            rng.uniform(-12, 0, (population, levels)),
            rng.uniform(0, math.log(classes), (population, 1)),
        ],
        axis=1,
    )
    # Ladders, where each step of Newton clears one rung, are hard for t < 1: half the population starts there.
    ladder = np.arange(levels)
    for row in genes[::2]:
        shrink = rng.uniform(0.2, 0.9)
        row[:levels] = rng.uniform(-3, 9) + ladder * math.log(shrink) * rng.uniform(1, 2)
        row[levels : 2 * levels] = -ladder * math.log(1 - shrink)
        row[2 * levels] = math.log(classes) * rng.uniform(0.6, 1)
    errors = mass_errors(genes, t, classes, steps)
    for _ in range(generations):
        best = np.argsort(-errors)[: population // 8]
        children = np.repeat(genes[best], 7, axis=0)
        change = rng.normal(size=children.shape) * rng.choice([0.03, 0.2, 1.0], (len(children), 1))
        children += change * (rng.random(children.shape) < 0.3)
        genes = np.concatenate([genes[best], children])
        errors = np.concatenate([errors[best], mass_errors(children, t, classes, steps)])
    return errors.max()


# The search runs in float64 for both precisions, to see convergence apart from rounding (which test_mass bounds).
FLOAT64, FLOAT32 = 2.0**-52, 2.0**-23
BAR = {FLOAT64: 1e-11, FLOAT32: 1e-6}
ADVERSARIAL_T = [0, 0.1, 0.3, 0.5, 0.8, 0.99, 1 + 1e-6, 1.01, 1.05, 1.2, 1.5, 2, 4, 10, 100]


@pytest.mark.parametrize("eps", [FLOAT64, FLOAT32], ids=["float64", "float32"])
@pytest.mark.parametrize("classes", [3, 10, 1000, 2**18])
@pytest.mark.parametrize("t", ADVERSARIAL_T)
def test_no_adversary_beats_the_number_of_steps(t, classes, eps):
    # At the edge of a finite support each of K equal classes adds a rounding error of 2^-52 to the mass.
    assert adversary(t, classes, core.newton_steps(t, classes, eps)) <= BAR[eps] + classes * 2.0**-52


@pytest.mark.parametrize(("t", "classes"), [(0.3, 10), (1.2, 2**18), (2, 2**18), (4, 10)])
def test_the_adversary_beats_three_steps_fewer(t, classes):
    assert adversary(t, classes, core.newton_steps(t, classes, FLOAT32) - 3) > BAR[FLOAT32]


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
