"""The data of the playground: points of the plane, with their true labels and the noisy ones to learn from."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from bitempered import noise
from bitempered.playground.settings import EDGE, Settings

__all__ = ["GRID", "make", "square"]

POINTS, TEST_POINTS = 1000, 1000
GRID = 56  # cells per side of a picture
# Labels made wrong "near" or "far from" the boundary are drawn from this many times as many candidates.
POOL = {"small-margin": 3.0, "large-margin": 1.75}
DISC, RING = 0.5, 0.62  # the disc's radius and the ring's inner one; its outer one is 1


@dataclass(frozen=True)
class Problem:
    """Points (n, 2) in float32, their true and their given labels, points to test on, and the truth by cell."""

    points: np.ndarray
    clean: np.ndarray
    given: np.ndarray
    test_points: np.ndarray
    test_labels: np.ndarray
    classes: int
    truth: np.ndarray | None  # (classes, GRID * GRID), how near each class is; None for own points


def make(settings: Settings) -> Problem:
    """Draw the points and corrupt their labels. The same settings give the same problem.

    >>> drawn = make(Settings(noise="random", level=0.25))
    >>> drawn.points.shape, int((drawn.clean != drawn.given).sum())
    ((1000, 2), 250)
    """
    rng = np.random.default_rng(settings.seed)
    if settings.data == "own":
        points = np.array([point[:2] for point in settings.points], dtype=np.float32)
        clean = np.array([point[2] for point in settings.points])
        test_points, test_labels, truth = points, clean, None
        classes = max(2, int(clean.max()) + 1)
    else:
        points, clean = draw(settings.data, POINTS, rng)
        test_points, test_labels = draw(settings.data, TEST_POINTS, rng)
        truth = nearness(settings.data)
        classes = len(skeleton(settings.data))
    given = corrupt(settings, points, clean, classes, rng)
    return Problem(points, clean, given, test_points, test_labels, classes, truth)


def draw(data: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw n points of a data set, as many of each class, and their labels."""
    if data == "ring":
        labels = np.arange(n) % 2
        inner, outer = np.where(labels == 1, 0, RING), np.where(labels == 1, DISC, 1)
        radius = np.sqrt(rng.uniform(inner**2, outer**2))
        angle = rng.uniform(0, 2 * np.pi, n)
        points = radius[:, None] * along(angle)
    else:
        spread = {"moons": 0.05, "spirals": 0.03, "three": 0.17}[data]
        curves = skeleton(data)
        labels = np.arange(n) % len(curves)
        points = curves[labels, rng.integers(curves.shape[1], size=n)] + rng.normal(0, spread, (n, 2))
    return np.clip(points, -EDGE, EDGE).astype(np.float32), labels


@cache
def skeleton(data: str) -> np.ndarray:
    """The curves that the classes lie around, (classes, points, 2): what is nearest to a place has its true class."""
    s = np.linspace(0, 1, 200)
    if data == "ring":
        middle = (DISC + RING) / 2
        return np.stack([radius * along(2 * np.pi * s) for radius in (1.5 * middle, 0.5 * middle)])
    if data == "moons":
        upper = along(np.pi * s)
        return (np.stack([upper, [1, 0.5] - upper]) - [0.5, 0.25]) / 1.6
    if data == "spirals":
        radius = np.sqrt(0.01 + 0.99 * s)  # evenly filled
        one = radius[:, None] * along(1.87 * np.pi * radius)
        return np.stack([one, -one])
    return 0.55 * along(np.pi / 2 + 2 * np.pi / 3 * np.arange(3))[:, None]


def along(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def square() -> np.ndarray:
    """The centres of the cells of a picture, (GRID * GRID, 2), row by row from above."""
    side = EDGE * ((np.arange(GRID) + 0.5) * 2 / GRID - 1)
    x, y = np.meshgrid(side, side[::-1])
    return np.stack([x.ravel(), y.ravel()], axis=1).astype(np.float32)


@cache
def nearness(data: str) -> np.ndarray:
    """How near each class is to each cell, from 0 to 1: the true boundary is where two classes are equally near."""
    cells = square()
    parts = np.exp([-8 * nearest(cells, curve) for curve in skeleton(data)])
    return parts / parts.sum(axis=0)


def nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The distance of each point from the nearest of the others."""
    return np.sqrt(((points[:, None] - others[None]) ** 2).sum(axis=2).min(axis=1))


def corrupt(
    settings: Settings, points: np.ndarray, clean: np.ndarray, classes: int, rng: np.random.Generator
) -> np.ndarray:
    if settings.noise == "none":
        return clean
    if settings.noise == "random":
        return noise.symmetric(clean, settings.level, rng=rng, num_classes=classes)
    model = noise.small_margin if settings.noise == "small-margin" else noise.large_margin
    margin = np.empty(len(points))  # from the nearest point of another class
    for label in np.unique(clean):
        margin[clean == label] = nearest(points[clean == label], points[clean != label])
    pool = min(1.0, POOL[settings.noise] * settings.level)
    return model(clean, settings.level, rng=rng, margin=margin, num_classes=classes, pool=pool)
