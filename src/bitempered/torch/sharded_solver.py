"""The normaliser of logits whose classes are spread over processes, with few messages.

`core.normalizer` takes up to a dozen steps, and each would be a message. Between processes a message costs its latency:
four numbers take as long as one. So a round asks for the mass Z at four values of m at once. It keeps the four known
points around the root and concludes from them:

- Z^(-s) is a concave (t > 1) or convex (t < 1) function of lambda. So the chord between the neighbours of the root ends
  above the root, and the lines through the two points on either side end below it.
- log Z falls with m at most (t > 1) or at least (t < 1) as fast as -m.
- The polynomial through all four points estimates the root itself.

The next four points lie between those bounds, closer together towards the lower one. The last estimate is the answer.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitempered import core
from bitempered.torch.autograd import xp

LogMasses = Callable[[list[Tensor]], list[Tensor]]  # log Z at several values of m, over all processes
# Where a message asks: as fractions of [0, log K] in the first one, of the bounds in later ones. The first two leave
# room for three other numbers.
_FIRST = (0.0, 0.03, 0.2)
_SECOND = (0.03, 0.3)
_LATER = (0.01, 0.05, 0.2, 0.5)
LEAST_T = 0.5  # below it Newton's steps are as few


def rounds(t: float, eps: float) -> int:
    """The number of rounds after the first for a t >= LEAST_T that reach rounding error, in a dtype of precision `eps`.

    They are enough for the hardest logits that a search finds, for up to 2^18 classes (tests/test_sharded_solver.py).
    At t = 0.5 with 2^18 classes a longer search finds float32 logits that are left with a mass error above 1e-5.
    """
    if t == 1:
        return 0
    if eps < 1e-10:
        return 9 if t < 1 else 7
    return 4 if 1 < t <= 1.5 else 5


def bracketed_normalizer(log_masses: LogMasses, zero: Tensor, t: float, *, classes: int, count: int) -> Tensor:
    """The m where log Z is 0, by one round from m = `zero` and `count` more (see `rounds`)."""
    if t == 1:
        return log_masses([zero])[0]  # log Z(m) is log Z(0) - m
    log_k = math.log(classes)
    # Two points below the root and two above it, from left to right. A missing one has the value NaN.
    points = [torch.full_like(zero, math.nan)] * 4
    values = [torch.full_like(zero, z) for z in (math.inf, math.inf, -math.inf, -math.inf)]
    new = [zero + f * log_k for f in _FIRST]
    of_new = log_masses(new)
    low, high = (zero, of_new[0]) if t < 1 else (of_new[0], zero + log_k)
    for done in range(count + 1):
        if done:
            new = [low + f * (high - low) for f in (_SECOND if done == 1 else _LATER)]
            of_new = log_masses(new)
        points, values = _around_the_root(points, values, new, of_new)
        low, high, root = _conclude(points, values, low, high, t)
    return root


def _around_the_root(
    points: list[Tensor], values: list[Tensor], new: list[Tensor], of_new: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The last two points with log Z >= 0 and the first two others, from the old ones and the new between them."""
    x = torch.stack([*points[:2], *new, *points[2:]])
    z = torch.stack([*values[:2], *of_new, *values[2:]])
    first = (z >= 0).sum(0, keepdim=True).clamp_(2, len(x) - 2) - 2
    index = first + torch.arange(4, device=x.device).reshape(4, *(1,) * (x.dim() - 1))
    return list(x.gather(0, index)), list(z.gather(0, index))


def _conclude(
    points: list[Tensor], values: list[Tensor], low: Tensor, high: Tensor, t: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Closer bounds of the root, and an estimate between them."""
    s = t - 1
    low, high = torch.fmax(low, points[1]), torch.fmin(high, points[2])
    origin = low
    x = [core.phi(m - origin, s, xp=xp) for m in points]  # lambda, shifted and scaled
    y = [core.phi(-z, s, xp=xp) for z in values]  # (Z^(-s) - 1) / s

    def crossing(i: int, j: int) -> Tensor:
        """Where the polynomial through these points crosses y = 0, if that lies between the bounds so far."""
        m = origin + core.psi(_interpolate(y[i:j], x[i:j]), s, xp=xp)
        return torch.where((m >= low) & (m <= high), m, math.nan)

    from_left, from_right = points[1] + values[1], points[2] + values[2]
    if t < 1:
        low_bounds, high_bounds = [crossing(0, 2), crossing(2, 4), from_right], [crossing(1, 3), from_left]
    else:
        low_bounds, high_bounds = [crossing(0, 2), crossing(2, 4), from_left], [crossing(1, 3), from_right]
    estimates = [crossing(1, 4), crossing(0, 3), crossing(0, 4)]
    for bound in high_bounds:
        high = torch.fmin(high, bound)
    for bound in low_bounds:
        low = torch.fmax(low, bound)
    low = torch.fmin(low, high)  # rounding may exchange them next to the root
    root = (low + high) / 2
    for estimate in estimates:
        root = torch.where((estimate >= low) & (estimate <= high), estimate, root)
    return low, high, root


def _interpolate(y: Sequence[Tensor], x: Sequence[Tensor]) -> Tensor:
    """The value at y = 0 of the polynomial x(y) through these points."""
    total = torch.zeros_like(x[0])
    for i, term in enumerate(x):
        for j, other in enumerate(y):
            if j != i:
                term = term * (-other / (y[i] - other))
        total = total + term
    return total
