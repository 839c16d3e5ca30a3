"""The paper's statements, executable. Each test is named after its statement.

A statement is a function that returns its worst violation over seeded random points: at most a rounding error where
it holds. The test says that it holds. Its companion, the next test or the lines marked "caught", hands the same
function something that breaks the statement (a wrong sign, another temperature, the Tsallis loss), and says that it
shows.
"""

from functools import partial

import entmax
import numpy as np
import pytest
import torch

from bitempered.divergences import bregman_divergence, convex_function, dual, tsallis_entropy
from bitempered.torch import bi_tempered_logistic_loss, exp_t, log_partition, log_t, tempered_softmax
from bitempered.torch.baselines import tsallis_logistic_loss

# What remains of exact identities and inequalities between numbers of order 1 to 10 in float64.
ROUNDING = 1e-12

below_one = pytest.mark.parametrize("t", [0.0, 0.3, 0.7, 0.95])
temperatures = pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.3, 2.0, 3.0])


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distributions(count, classes, seed=0, scale=2.0):
    return torch.softmax(random(count, classes, seed=seed, scale=scale), dim=-1)


def positive(count, classes, seed=0):
    return random(count, classes, seed=seed).exp()


def power_norm(x, q):
    """The L_q norm, which the paper writes with q = 2 - t and its dual (2 - t) / (1 - t)."""
    return (x.abs() ** q).sum(-1) ** (1 / q)


def ball(count, classes, q, radius, seed):
    """Points of the positive part of an L_q ball; half of them on its surface."""
    x = positive(count, classes, seed)
    reach = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    reach[::2] = 1.0
    return radius * reach * x / power_norm(x, q)[:, None]


# The Bregman divergence is never negative, and 0 if and only if y = y_hat


def violation_of_non_negativity(divergence):
    """Over positive vectors, far apart and close to each other."""
    y, move = positive(500, 4), random(500, 4, seed=1)
    return max(0.0, *(-divergence(y, y * torch.exp(size * move)).min().item() for size in (1.0, 0.1, 1e-8)))


def violation_of_zero_iff_equal(divergence, y, y_hat):
    """How far the divergence of equal points is from 0, or that of different points from being positive.

    A divergence grows with the square of the distance; a millionth of that is far below any curvature here.
    """
    apart = 1e-6 * (y - y_hat).square().sum(-1) - divergence(y, y_hat)
    return max(divergence(y, y).abs().max().item(), apart.max().item())


@temperatures
def test_bregman_divergence_is_not_negative(t):
    assert violation_of_non_negativity(partial(bregman_divergence, t=t)) == 0


def gradient_of_another_temperature(y, y_hat, t):
    difference = convex_function(y, t) - convex_function(y_hat, t)
    return difference - ((y - y_hat) * log_t(y_hat, t + 0.2)).sum(-1)


@temperatures
def test_non_negativity_catches_the_gradient_of_another_temperature(t):
    assert violation_of_non_negativity(partial(gradient_of_another_temperature, t=t)) > 1e-2


@temperatures
def test_bregman_divergence_is_zero_iff_equal(t):
    divergence = partial(bregman_divergence, t=t)
    assert violation_of_zero_iff_equal(divergence, distributions(500, 4), distributions(500, 4, 1)) <= 0


@temperatures
def test_zero_iff_equal_catches_a_sum_that_ignores_a_class(t):
    def blind_to_the_first_class(y, y_hat):
        return bregman_divergence(y[:, 1:], y_hat[:, 1:], t)

    y = distributions(500, 4)
    y_hat = torch.cat([distributions(500, 4, 1)[:, :1], y[:, 1:]], dim=1)
    assert violation_of_zero_iff_equal(blind_to_the_first_class, y, y_hat) > 1e-8


# Lemma 1: F_t is B^-t strongly convex in the L_(2-t) ball of radius B, for 0 <= t <= 1


def violation_of_strong_convexity(t, constant, radius):
    u, v = ball(2000, 3, 2 - t, radius, 0), ball(2000, 3, 2 - t, radius, 1)
    # Where the lemma is tight: a small radial step at the surface.
    u, v = torch.cat([u, u[::2]]), torch.cat([v, 0.999 * u[::2]])
    linear = convex_function(u, t) + (log_t(u, t) * (v - u)).sum(-1)
    distance = power_norm(v - u, 2 - t).square()
    return ((linear + constant / 2 * distance - convex_function(v, t)) / distance).max().item()


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("t", [0.0, 0.3, 0.7, 1.0])
def test_lemma_1_strong_convexity(t, radius):
    # The least squared distance is 2.5e-7, by which the rounding of numbers of order 1 to 10 is divided.
    assert violation_of_strong_convexity(t, radius**-t, radius) <= 1e-8


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("t", [0.0, 0.3, 0.7, 1.0])
def test_lemma_1_catches_a_constant_that_is_too_large(t, radius):
    assert violation_of_strong_convexity(t, 1.01 * radius**-t, radius) > 1e-3 * radius**-t


# Corollary 1: both sides, and boundedness for t < 1


def violation_of_corollary_1(t, radius, lower=1.0, upper=1.0):
    y, y_hat = ball(2000, 3, 2 - t, radius, 0), ball(2000, 3, 2 - t, radius, 1)
    y, y_hat = torch.cat([y, y[::2]]), torch.cat([y_hat, 0.999 * y[::2]])
    divergence = bregman_divergence(y, y_hat, t)
    below = lower * power_norm(y - y_hat, 2 - t).square() / (2 * radius**t)
    powers = power_norm(y ** (1 - t) - y_hat ** (1 - t), (2 - t) / (1 - t))
    above = upper * radius**t / (2 * (1 - t) ** 2) * powers.square()
    return max(((below - divergence) / divergence).max().item(), ((divergence - above) / divergence).max().item())


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
@below_one
def test_corollary_1_both_sides(t, radius):
    # The least divergence is about 1e-7, to which the rounding of both sides is relative.
    assert violation_of_corollary_1(t, radius) <= 1e-8


@pytest.mark.parametrize(("side", "factor"), [("lower", 1.01), ("upper", 0.99)])
@below_one
def test_corollary_1_catches_either_constant_being_off(t, side, factor):
    assert violation_of_corollary_1(t, 1.0, **{side: factor}) > 1e-3


def violation_of_boundedness(t, bound):
    """Over pairs of distributions from the middle of the simplex to beyond rounding from its corners."""
    y, y_hat = (torch.cat([distributions(500, 3, seed, scale) for scale in (1, 10, 1000)]) for seed in (0, 1))
    return max(0.0, (bregman_divergence(y, y_hat, t) - bound).max().item())


@below_one
def test_divergence_is_bounded_on_the_simplex_for_t_below_one(t):
    assert violation_of_boundedness(t, 2 / (1 - t) ** 2) == 0  # the paper's bound, with B = 1
    assert violation_of_boundedness(t, 1 / (1 - t)) <= ROUNDING / (1 - t)  # the tight one: between two corners


@below_one
def test_boundedness_catches_t_equal_to_one_and_a_bound_below_the_tight_one(t):
    assert violation_of_boundedness(1.0, 2 / (1 - t) ** 2) > 1
    assert violation_of_boundedness(t, 0.99 / (1 - t)) > 1e-3


# The matching loss (t1 = t2) is convex in the activations on its domain, and fails outside


def violation_of_convexity(function, a, b):
    """How far the function at a midpoint exceeds the mean of its values at the ends."""
    return (function((a + b) / 2) - (function(a) + function(b)) / 2).max().item()


def loss_of(y, t1, t2):
    return lambda a: bi_tempered_logistic_loss(a, y.expand_as(a).contiguous(), t1, t2, reduction="none")


TARGETS = {"hard": torch.tensor([1.0, 0.0, 0.0]), "soft": torch.tensor([0.5, 0.3, 0.2])}
targets = pytest.mark.parametrize("y", [y.double() for y in TARGETS.values()], ids=list(TARGETS))


@targets
@pytest.mark.parametrize("t", [1.0, 1.2, 1.7])
def test_matching_loss_is_convex_for_t_from_one_on(t, y):
    a, b = random(1000, 3, scale=5), random(1000, 3, seed=1, scale=5)
    assert violation_of_convexity(loss_of(y, t, t), a, b) <= ROUNDING


def in_domain(t):
    """Pairs of activations with a_i - lambda_t(a) >= -1 / (1 - t) for all i: every class is in the support."""
    a, b = random(1000, 3, scale=0.5), random(1000, 3, seed=1, scale=0.5)
    inside = (tempered_softmax(a, t) > 0).all(-1) & (tempered_softmax(b, t) > 0).all(-1)
    assert inside.sum() > 100
    return a[inside], b[inside]


@targets
@below_one
def test_matching_loss_is_convex_on_its_domain_for_t_below_one(t, y):
    assert violation_of_convexity(loss_of(y, t, t), *in_domain(t)) <= ROUNDING


@below_one
def test_matching_loss_is_not_convex_outside_its_domain(t):
    """It is bounded by 1 / (1 - t) there, and no bounded function is convex but a constant.

    The paper's proposition names {a' + R 1 | a' >= -1 / (1 - t)} as the domain, which is all of R^k.
    """
    a, b = random(1000, 3, scale=5 / (1 - t)), random(1000, 3, seed=1, scale=5 / (1 - t))
    assert violation_of_convexity(loss_of(TARGETS["hard"].double(), t, t), a, b) > 0.05


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 1.0), (0.8, 1.2), (0.2, 4.0)])
def test_convexity_catches_two_different_temperatures(t1, t2):
    a, b = random(1000, 3, scale=5), random(1000, 3, seed=1, scale=5)
    assert violation_of_convexity(loss_of(TARGETS["hard"].double(), t1, t2), a, b) > 0.01


# lambda_t(a + b 1) = lambda_t(a) + b, and lambda_t is convex


def violation_of_translation(function):
    a, b = random(200, 4, scale=3), random(200, 1, seed=1, scale=3)
    return (function(a + b) - function(a) - b[:, 0]).abs().max().item()


@temperatures
def test_normalisation_moves_with_a_translation(t):
    assert violation_of_translation(lambda a: log_partition(a, t)) <= ROUNDING


@pytest.mark.parametrize("t", [0.5, 0.9])
def test_translation_catches_the_naive_partition_function(t):
    """log_t sum exp_t(a), which is lambda_t at t = 1 only."""

    def naive(temperature):
        return lambda a: log_t(exp_t(a, temperature).sum(-1), temperature)

    assert violation_of_translation(naive(1.0)) <= ROUNDING
    assert violation_of_translation(naive(t)) > 0.1


@temperatures
def test_normalisation_is_convex(t):
    a, b = random(1000, 4, scale=5), random(1000, 4, seed=1, scale=5)
    assert violation_of_convexity(lambda a: log_partition(a, t), a, b) <= ROUNDING
    assert violation_of_convexity(lambda a: -log_partition(a, t), a, b) > 0.1  # caught: the wrong sign


# Derivatives of lambda_t: the escort distribution, and the paper's second derivative


def differences(function, a, step):
    """Central differences of a function of (n, k) in each of the k coordinates, along a new last axis."""
    moves = step * torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.stack([(function(a + move) - function(a - move)) / (2 * step) for move in moves], dim=-1)


def escort(a, t, escort_t):
    power = tempered_softmax(a, t) ** escort_t
    return power / power.sum(-1, keepdim=True)


def violation_of_first_derivative(t, escort_t):
    a = random(50, 4)
    return (differences(lambda a: log_partition(a, t), a, 1e-5) - escort(a, t, escort_t)).abs().max().item()


# Central differences of step h err by h^2 f''' / 6 + eps f / h: 1e-9 at h = 1e-5 with f and f''' up to 10.
DIFFERENCES = 1e-8


@pytest.mark.parametrize("t", [0.7, 1.0, 1.3, 2.0, 3.0])
def test_derivative_of_the_normalisation_is_the_escort_distribution(t):
    assert violation_of_first_derivative(t, t) <= DIFFERENCES
    assert violation_of_first_derivative(t, t + 0.1) > 1e-3  # caught: another temperature
    if t != 1:
        assert violation_of_first_derivative(t, 1.0) > 1e-2  # caught: the probabilities themselves


def violation_of_second_derivative(t, factor):
    a = random(50, 4)
    p, e, eye = tempered_softmax(a, t), escort(a, t, t), torch.eye(4, dtype=torch.float64)
    centred = eye - e[:, :, None]  # [n, i, j'] = delta_ij' - d lambda / d a_i
    weights = factor * p ** (2 * t - 1) / (p**t).sum(-1, keepdim=True)
    formula = torch.einsum("nj,nij,nkj->nik", weights, centred, centred)
    return (differences(lambda a: escort(a, t, t), a, 1e-5) - formula).abs().max().item()


@pytest.mark.parametrize("t", [0.7, 1.0, 1.3, 2.0, 3.0])
def test_second_derivative_of_the_normalisation(t):
    assert violation_of_second_derivative(t, t) <= DIFFERENCES
    assert violation_of_second_derivative(t, -t) > 1e-2  # caught: a wrong sign
    if t != 1:
        assert violation_of_second_derivative(t, 1.0) > 1e-2  # caught: the factor t forgotten


# The gradient of the loss


def violation_of_gradient(t1, t2, power, sign=-1):
    a, y = random(50, 4), distributions(50, 4, seed=1)
    p = tempered_softmax(a, t2)
    v = (p - y) * p**power
    formula = v + sign * escort(a, t2, t2) * v.sum(-1, keepdim=True)
    by_differences = differences(lambda a: bi_tempered_logistic_loss(a, y, t1, t2, reduction="none"), a, 1e-5)
    leaf = a.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(bi_tempered_logistic_loss(leaf, y, t1, t2, reduction="sum"), leaf)
    return max((by_differences - formula).abs().max().item(), (by_autograd - formula).abs().max().item())


@pytest.mark.parametrize(("t1", "t2"), [(0.7, 0.9), (0.5, 1.0), (0.8, 1.2), (0.2, 4.0), (1.2, 1.5)])
def test_gradient_of_the_loss(t1, t2):
    assert violation_of_gradient(t1, t2, t2 - t1) <= DIFFERENCES
    assert violation_of_gradient(t1, t2, t1 - t2) > 1e-2  # caught: the temperatures exchanged
    assert violation_of_gradient(t1, t2, t2 - t1, sign=+1) > 1e-4  # caught: a wrong sign (a small gradient at t2 = 4)


# Duality: Delta_F(y, y_hat) is the divergence of the dual with its arguments exchanged


def violation_of_duality(t, dual_t, exchanged=True):
    y, y_hat = distributions(500, 4), distributions(500, 4, seed=1)
    # Activations of y are log_t y up to a constant per row, which a dual on the simplex does not see.
    a, a_hat = log_t(y, t) + random(500, 1), log_t(y_hat, t) + random(500, 1, seed=1)
    if not exchanged:
        y, a, a_hat = y_hat, a_hat, a
    of_the_dual = dual(a_hat, dual_t) - dual(a, dual_t) - ((a_hat - a) * y).sum(-1)
    original = bregman_divergence(distributions(500, 4), y_hat, t)
    return ((of_the_dual - original).abs() / (1 + original)).max().item()


@temperatures
def test_duality_of_divergences(t):
    # At t = 3 the activations reach 1e5, and their rounding 1e-11 of the divergences.
    assert violation_of_duality(t, t) <= 1e-10
    assert violation_of_duality(t, t + 0.2) > 1e-2  # caught: the dual of another temperature
    if t > 0:  # the squared Euclidean distance is symmetric
        assert violation_of_duality(t, t, exchanged=False) > 1e-2  # caught: the arguments as they were


def violation_of_conjugacy(t, dual_t):
    """F(y) + F*(a) - y . a is 0 for a = log_t y + b, and never negative (Fenchel and Young)."""
    y, a = distributions(500, 4), random(500, 4, seed=1, scale=3)
    here = convex_function(y, t) + dual(log_t(y, t) + 1.5, dual_t) - (y * (log_t(y, t) + 1.5)).sum(-1)
    anywhere = convex_function(y, t) + dual(a, dual_t) - (y * a).sum(-1)
    return max(here.abs().max().item(), -anywhere.min().item())


@temperatures
def test_dual_is_the_convex_conjugate_on_the_simplex(t):
    assert violation_of_conjugacy(t, t) <= 1e-9  # activations up to 1e5 at t = 3
    assert violation_of_conjugacy(t, t + 0.1) > 1e-2


# The temperature shift, and the Tsallis entropy


def alternate_divergence(y, y_hat, t):
    """Of the alternate function, from the paper's definition and its gradient (1 - y^-t) / t."""

    def function(y):
        return -(log_t(y, t) - y + 1).sum(-1) / t

    return function(y) - function(y_hat) - ((y - y_hat) * (1 - y_hat**-t) / t).sum(-1)


def violation_of_temperature_shift(t, shift):
    y, y_hat = positive(500, 4), positive(500, 4, 1)
    middle = (log_t(y_hat, t) - log_t(y, t) + (y - y_hat) * y_hat**-t).sum(-1) / t
    shifted = bregman_divergence(y, y_hat, t + shift)
    return max(
        ((alternate_divergence(y, y_hat, t) - shifted) / (1 + shifted)).abs().max().item(),
        ((middle - shifted) / (1 + shifted)).abs().max().item(),
    )


@pytest.mark.parametrize("t", [0.1, 0.5, 1.0, 2.0, 3.0])
def test_temperature_shift_of_the_alternate_divergence(t):
    assert violation_of_temperature_shift(t, 1) <= 1e-11  # the definition divides a difference by t
    assert violation_of_temperature_shift(t, 0) > 0.1  # caught: no shift
    assert violation_of_temperature_shift(t, 0.9) > 1e-3


def violation_of_entropy_relation(t, factor):
    """-H_t - factor * F_(2-t), F_(2-t) being the alternate function at 1 - t, is affine on the distributions.

    A function of distributions is affine if it is so at the middle of any two.
    """

    def difference(y):
        return -tsallis_entropy(y, t) - factor * convex_function(y, 2 - t)

    y, y_hat = distributions(500, 4), distributions(500, 4, 1)
    return (difference((y + y_hat) / 2) - (difference(y) + difference(y_hat)) / 2).abs().max().item()


@pytest.mark.parametrize("t", [0.2, 0.7, 1.0, 1.5, 2.0])
def test_negative_tsallis_entropy_is_t_times_the_shifted_convex_function(t):
    assert violation_of_entropy_relation(t, t) <= ROUNDING
    assert violation_of_entropy_relation(t, 1 - t) > 1e-2  # caught: the paper's factor


# Properness: the expected loss of a label is minimised at its true distribution


def simplex(steps):
    i, j = np.meshgrid(np.arange(1, steps), np.arange(1, steps))
    grid = np.stack([i, j, steps - i - j], axis=-1)[i + j < steps]
    return torch.from_numpy(grid / steps)


def label_losses(loss, a):
    """(n, 3): the loss of each label at each row of activations."""
    return torch.stack([loss(a, torch.full(a.shape[:1], c), reduction="none") for c in range(3)], dim=-1)


def violation_of_properness(loss, t2):
    """How far the minimiser over a grid of predictions is from the true distribution, itself a point of the grid."""
    grid = simplex(20)
    losses = label_losses(loss, log_t(grid, t2))  # activations log_t p have the tempered softmax p
    best = (grid @ losses.T).argmin(-1)  # [truth, prediction]
    return (grid[best] - grid).abs().max().item()


non_convex_pairs = pytest.mark.parametrize(("t1", "t2"), [(0.5, 1.0), (0.8, 1.2), (0.2, 4.0)])


@non_convex_pairs
def test_bi_tempered_loss_is_proper(t1, t2):
    assert violation_of_properness(partial(bi_tempered_logistic_loss, t1=t1, t2=t2), t2) == 0


@non_convex_pairs
def test_tsallis_loss_is_not_proper(t1, t2):
    assert violation_of_properness(partial(tsallis_logistic_loss, t1=t1, t2=t2), t2) >= 0.1


# Bayes-risk consistency: at the minimiser of the risk, a label of least loss is a most probable one


def violation_of_consistency(loss, activations):
    """The most that a label of least loss, at the minimiser of the risk, lacks in probability to the likeliest one."""
    truth = simplex(20)
    losses = label_losses(loss, activations)
    at_minimiser = losses[(truth @ losses.T).argmin(-1)]
    least = at_minimiser <= at_minimiser.amin(-1, keepdim=True) + ROUNDING
    return (truth.amax(-1, keepdim=True) - truth)[least].max().item()


def hinge(a, target, reduction):
    """Crammer and Singer's, for which consistency is known to fail where no label has half of the probability."""
    true = a.gather(1, target[:, None])
    others = a.scatter(1, target[:, None], -torch.inf).amax(1, keepdim=True)
    return (1 + others - true).clamp(min=0)[:, 0]


@non_convex_pairs
def test_bi_tempered_loss_is_bayes_risk_consistent(t1, t2):
    activations = log_t(simplex(20), t2)
    assert violation_of_consistency(partial(bi_tempered_logistic_loss, t1=t1, t2=t2), activations) <= ROUNDING


def test_consistency_catches_the_multiclass_hinge_loss_and_a_wrong_sign():
    steps = torch.arange(-8, 9, dtype=torch.float64) / 4
    activations = torch.cartesian_prod(steps, steps, steps)
    assert violation_of_consistency(hinge, activations) > 0.04

    def negated(a, target, reduction):
        return -bi_tempered_logistic_loss(a, target, 0.8, 1.2, reduction=reduction)

    assert violation_of_consistency(negated, log_t(simplex(20), 1.2)) > 0.1


# alpha-entmax is the tempered softmax of t = 2 - alpha; the losses differ for targets outside the support

# entmax's own algorithms where it has exact ones; bisection to the last bit of float64 otherwise.
ENTMAX = {
    1.2: partial(entmax.entmax_bisect, alpha=1.2, n_iter=100),
    1.5: entmax.entmax15,
    2.0: entmax.sparsemax,
}


def violation_of_entmax(alpha, t):
    a = torch.cat([random(200, 7, seed=i, scale=scale) for i, scale in enumerate((0.1, 1.0, 5.0))])
    return (tempered_softmax(a, t) - ENTMAX[alpha](a)).abs().max().item()


@pytest.mark.parametrize("alpha", ENTMAX)
def test_tempered_softmax_is_entmax_of_alpha_two_minus_t(alpha):
    assert violation_of_entmax(alpha, 2 - alpha) <= 1e-10  # the project's bar
    assert violation_of_entmax(alpha, 2 - alpha + 0.1) > 1e-2  # caught: another temperature


@pytest.mark.parametrize("alpha", ENTMAX)
def test_fenchel_young_loss_is_the_matching_loss_inside_the_support_and_more_outside(alpha):
    t = 2 - alpha
    a, target = random(500, 5, scale=2), torch.arange(500) % 5
    y = torch.eye(5, dtype=torch.float64)[target]
    if alpha == 2:
        theirs = entmax.sparsemax_loss(a, target)
    elif alpha == 1.5:
        theirs = entmax.entmax15_loss(a, target)
    else:
        theirs = entmax.entmax_bisect_loss(a, target, alpha, n_iter=100)
    fenchel_young = convex_function(y, t) + dual(a, t) - (y * a).sum(-1)
    ours = bi_tempered_logistic_loss(a, target, t, t, reduction="none")
    inside = tempered_softmax(a, t).gather(1, target[:, None])[:, 0] > 0
    assert inside.sum() > 50
    assert (~inside).sum() > 50
    assert (fenchel_young - theirs).abs().max() <= 1e-9  # theirs normalises by a sum in the last step
    assert (ours - theirs)[inside].abs().max() <= 1e-9
    # The difference is how far the target's activation lies below the edge of the support, lambda - 1 / (1 - t).
    edge = log_partition(a, t) - 1 / (1 - t)
    below = edge - a.gather(1, target[:, None])[:, 0]
    assert (theirs - ours - below)[~inside].abs().max() <= 1e-9
    assert below[~inside].min() > 0
    other = convex_function(y, t + 0.05) + dual(a, t + 0.05) - (y * a).sum(-1)
    assert (other - theirs).abs().max() > 1e-2  # caught: another temperature


def gradient_of(loss, a, target):
    leaf = a.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, target).sum(), leaf)[0]


def test_outside_the_support_only_the_fenchel_young_loss_has_a_gradient():
    a, target = torch.tensor([[5.0, 0.0, 4.9]], dtype=torch.float64), torch.tensor([1])
    assert gradient_of(partial(bi_tempered_logistic_loss, t1=0.0, t2=0.0, reduction="none"), a, target)[0, 1] == 0
    p = tempered_softmax(a, 0.0)
    expected = p - torch.eye(3, dtype=torch.float64)[target]
    assert (gradient_of(entmax.sparsemax_loss, a, target) - expected).abs().max() <= ROUNDING
