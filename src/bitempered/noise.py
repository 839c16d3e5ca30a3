"""Label noise: corrupt known labels in a known way, to measure what a loss makes of them."""

import numpy as np

__all__ = ["symmetric"]


def symmetric(labels: np.ndarray, rate: float, *, rng: np.random.Generator, num_classes: int) -> np.ndarray:
    """Give a fraction `rate` of the labels another class, chosen uniformly among the others.

    Exactly `round(rate * len(labels))` labels change, so that two draws differ in which labels
    are wrong but not in how many.

    Shapes: `labels` is `(n,)`, integers in `[0, num_classes)`; the result is a new array of its
    shape and dtype.

    >>> noisy = symmetric(np.zeros(4, dtype=int), 0.5, rng=np.random.default_rng(0), num_classes=2)
    >>> sorted(noisy.tolist())
    [0, 0, 1, 1]
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be a one-dimensional array of integers, got shape {labels.shape} and dtype {labels.dtype}"
        )
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"labels must be in [0, {num_classes}) for num_classes={num_classes}, "
            f"got labels from {labels.min()} to {labels.max()}"
        )
    flipped = rng.choice(len(labels), size=round(rate * len(labels)), replace=False)
    # A step of 1 .. num_classes - 1 round the classes reaches each other class equally often.
    step = rng.integers(1, num_classes, size=len(flipped))
    noisy = labels.copy()
    # In int64, since the sum may not fit a narrow dtype such as uint8.
    noisy[flipped] = (labels[flipped].astype(np.int64) + step) % num_classes
    return noisy
