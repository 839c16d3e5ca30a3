"""Label noise: corrupt known labels in a known way, to measure how a loss copes with it.

Each model takes labels and a rate and returns new labels. The number of labels it touches is exact, not random:
two draws differ in which labels are wrong, not in how many. Each model says what its rate is a fraction of.
"""

import io
import operator
import zipfile
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path

import numpy as np

__all__ = ["asymmetric", "from_file", "large_margin", "pair_flip", "small_margin", "symmetric"]


def symmetric(
    labels: np.ndarray, rate: float, *, rng: np.random.Generator, num_classes: int, including_self: bool = False
) -> np.ndarray:
    """Give a fraction `rate` of the labels another class, chosen uniformly among the others.

    Exactly `round(rate * n)` labels change. With `including_self` the new class is drawn from all classes, as in part
    of the literature: exactly `round(rate * n)` labels are redrawn, each keeping its class with probability
    1 / num_classes.

    Shapes: `labels` is `(n,)`, integers in `[0, num_classes)`; the result is a new array of its
    shape and dtype.

    >>> noisy = symmetric(np.zeros(4, dtype=int), 0.5, rng=np.random.default_rng(0), num_classes=2)
    >>> sorted(noisy.tolist())
    [0, 0, 1, 1]
    """
    labels = check(labels, rate, num_classes)
    chosen = draw(len(labels), rate, rng)
    return move(labels, chosen, rng.integers(0 if including_self else 1, num_classes, size=len(chosen)), num_classes)


def asymmetric(labels: np.ndarray, rate: float, *, rng: np.random.Generator, mapping: Mapping[int, int]) -> np.ndarray:
    """Replace classes by those that people mistake them for, such as `{9: 1, 2: 0, 4: 7, 3: 5, 5: 3}`.

    The rate is a fraction of the m labels whose class `mapping` sends to another one: exactly
    `round(rate * m)` of them change.

    Shapes: as `symmetric`.

    >>> asymmetric(np.array([0, 1, 2, 2]), 1.0, rng=np.random.default_rng(0), mapping={2: 0}).tolist()
    [0, 1, 0, 0]
    """
    labels = check(labels, rate)
    for source, target in mapping.items():
        if not (fits(source, labels.dtype) and fits(target, labels.dtype)):
            raise ValueError(
                f"mapping must send classes to classes, integers >= 0 that {labels.dtype} can hold; "
                f"got {source!r}: {target!r}"
            )
    moved = {source: target for source, target in mapping.items() if source != target}
    mapped = np.flatnonzero(np.isin(labels, list(moved)))
    noisy = labels.copy()
    for i in mapped[draw(len(mapped), rate, rng)]:
        noisy[i] = moved[int(labels[i])]
    return noisy


def pair_flip(labels: np.ndarray, rate: float, *, rng: np.random.Generator, num_classes: int) -> np.ndarray:
    """Move a fraction `rate` of the labels to the next class, from the last to class 0.

    Exactly `round(rate * n)` labels change.

    Shapes: as `symmetric`.

    >>> pair_flip(np.array([0, 1, 2]), 1.0, rng=np.random.default_rng(0), num_classes=3).tolist()
    [1, 2, 0]
    """
    labels = check(labels, rate, num_classes)
    chosen = draw(len(labels), rate, rng)
    return move(labels, chosen, np.ones(len(chosen), dtype=np.int64), num_classes)


def small_margin(
    labels: np.ndarray,
    rate: float,
    *,
    rng: np.random.Generator,
    margin: np.ndarray,
    num_classes: int,
    pool: float | None = None,
) -> np.ndarray:
    """Give another class to labels of examples near the noise-free boundary.

    Exactly `round(rate * n)` labels change, drawn from the `round(pool * n)` examples with the smallest
    `|margin|`. By default the pool is as small as possible, so the nearest examples are all wrong.

    Shapes: as `symmetric`; `margin` is `(n,)`, the examples' distances from the boundary, of either sign.

    >>> margin = np.array([-0.1, 2.0, -3.0, 0.2])
    >>> small_margin(np.zeros(4, int), 0.5, rng=np.random.default_rng(0), margin=margin, num_classes=2).tolist()
    [1, 0, 0, 1]

    Reference: Amid, Warmuth, Anil, Koren, section 1.2 and figure 2.
    """
    return by_margin(labels, rate, rng=rng, key=distance(margin), num_classes=num_classes, pool=pool)


def large_margin(
    labels: np.ndarray,
    rate: float,
    *,
    rng: np.random.Generator,
    margin: np.ndarray,
    num_classes: int,
    pool: float | None = None,
) -> np.ndarray:
    """Give another class to labels of examples far from the noise-free boundary.

    As `small_margin`, with the largest `|margin|` in place of the smallest.

    >>> margin = np.array([-0.1, 2.0, -3.0, 0.2])
    >>> large_margin(np.zeros(4, int), 0.5, rng=np.random.default_rng(0), margin=margin, num_classes=2).tolist()
    [0, 1, 1, 0]
    """
    return by_margin(labels, rate, rng=rng, key=-distance(margin), num_classes=num_classes, pool=pool)


def from_file(labels: np.ndarray, path: str | Path, *, num_classes: int | None = None) -> np.ndarray:
    """Replace clean labels by those that people gave, from an .npz file such as CIFAR-100N's.

    The file holds two arrays, `noisy_label` and `clean_label`, and determines the rate. Its clean labels must equal
    `labels`, so a file in another order is rejected. Nothing in the file is executed.

    Shapes: `labels` is `(n,)`, integers; the result is a new array of its shape and dtype. Both hold classes below
    `num_classes`, which without it is one more than the largest clean label.

    Reference: Wei et al., Learning with Noisy Labels Revisited: A Study Using Real-World Human Annotations, 2022.
    """
    labels = check(labels, 0.0, num_classes)
    with Path(path).open("rb") as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                noisy, clean = (read_array(archive, name, labels.size) for name in ("noisy_label", "clean_label"))
        except KeyError as error:
            raise ValueError(f"{path} must hold the arrays noisy_label and clean_label: {error.args[0]}") from None
        except Exception:
            # A damaged archive can raise nearly anything, and an array of objects is a pickle.
            raise ValueError(f"{path} is not an .npz file of plain arrays, or is damaged") from None
    if noisy.shape != labels.shape or not np.issubdtype(noisy.dtype, np.integer):
        raise ValueError(
            f"{path}: noisy_label must be integers of shape {labels.shape} as the labels, "
            f"got {noisy.dtype} of shape {noisy.shape}"
        )
    if not np.array_equal(clean, labels):
        raise ValueError(f"{path}: clean_label differs from the labels given; are the examples in the same order?")
    last = labels.max(initial=0) if num_classes is None else num_classes - 1
    if labels.size and not (noisy.min() >= 0 and noisy.max() <= last):
        raise ValueError(f"{path}: noisy_label must hold classes from 0 to {last}, got {noisy.min()} to {noisy.max()}")
    return noisy.astype(labels.dtype)


def read_array(archive: zipfile.ZipFile, name: str, labels: int) -> np.ndarray:
    """Read an array of an .npz file, without pickles, if it is small enough for that many labels."""
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > 8 * labels + 2**16:  # zipfile reads no more than this size, whatever is packed there
        raise ValueError("far more than the labels")
    return np.lib.format.read_array(io.BytesIO(archive.read(info)), allow_pickle=False)


def check(labels: np.ndarray, rate: float, num_classes: int | None = None) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be a one-dimensional array of integers, got shape {labels.shape} and dtype {labels.dtype}"
        )
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    if num_classes is None:
        return labels
    if not isinstance(num_classes, Integral):
        raise TypeError(f"num_classes must be a whole number, got {num_classes!r}")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if not fits(num_classes - 1, labels.dtype):
        raise ValueError(f"{labels.dtype} cannot hold {num_classes} classes; convert the labels, for instance to int64")
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"labels must be in [0, {num_classes}) for num_classes={num_classes}, "
            f"got labels from {labels.min()} to {labels.max()}"
        )
    return labels


def fits(label: int, dtype: np.dtype) -> bool:
    try:
        return 0 <= operator.index(label) <= np.iinfo(dtype).max
    except TypeError:
        return False


def check_generator(rng: np.random.Generator) -> None:
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a generator such as numpy.random.default_rng(0), got {type(rng).__name__}")


def draw(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    check_generator(rng)
    return rng.choice(count, size=round(rate * count), replace=False)


def move(labels: np.ndarray, chosen: np.ndarray, step: np.ndarray, num_classes: int) -> np.ndarray:
    """Move the chosen labels `step` classes on; steps 1 .. num_classes - 1 reach each other class once."""
    noisy = labels.copy()
    # In int64: the sum may not fit a narrow dtype such as uint8, though the classes do.
    noisy[chosen] = (labels[chosen].astype(np.int64) + step) % num_classes
    return noisy


def mistakes(labels: np.ndarray, rate: float, *, scores: np.ndarray) -> np.ndarray:
    """Give labels the classes that a model mistakes their examples for: noise that depends on the examples.

    Exactly `round(rate * n)` labels change: those whose own class scores furthest below the best other one. They get
    that other class. So at the rate of the model's own errors the labels are its predictions; at a lower rate only its
    surest errors count, and at a higher one also what it nearly got wrong. Of equal examples the first change.

    Shapes: as `symmetric`; `scores` is `(n, num_classes)`, finite, such as a model's logits.

    >>> scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.4, 0.1, 0.5]])
    >>> mistakes(np.array([0, 0, 0]), 2 / 3, scores=scores).tolist()
    [0, 1, 2]
    """
    scores = np.array(scores, dtype=np.float64)
    if scores.ndim != 2 or len(scores) != len(labels) or not np.isfinite(scores).all():
        raise ValueError(
            f"scores must be a row of finite numbers for each of the {len(labels)} labels, "
            f"got shape {scores.shape} with {(~np.isfinite(scores)).sum()} that are not finite"
        )
    labels = check(labels, rate, scores.shape[1])
    rows = np.arange(len(labels))
    own = scores[rows, labels]
    scores[rows, labels] = -np.inf
    chosen = np.argsort(own - scores.max(axis=1), kind="stable")[: round(rate * len(labels))]
    noisy = labels.copy()
    noisy[chosen] = scores[chosen].argmax(axis=1)
    return noisy


def distance(margin: np.ndarray) -> np.ndarray:
    """The size of margins, in floats: integers of a narrow dtype would wrap around."""
    return np.abs(np.asarray(margin, np.float64))


def by_margin(
    labels: np.ndarray, rate: float, *, rng: np.random.Generator, key: np.ndarray, num_classes: int, pool: float | None
) -> np.ndarray:
    """`small_margin` with the pool of the smallest `key`."""
    labels = check(labels, rate, num_classes)
    check_generator(rng)
    if key.shape != labels.shape or np.isnan(key).any():
        raise ValueError(
            f"margin must be one number for each of the {len(labels)} labels, "
            f"got shape {key.shape} with {np.isnan(key).sum()} NaN"
        )
    if pool is None:
        pool = rate
    if not rate <= pool <= 1:
        raise ValueError(f"pool must be in [rate, 1] = [{rate}, 1], got {pool}")
    nearest = np.argsort(key, kind="stable")[: round(pool * len(labels))]
    chosen = rng.choice(nearest, size=round(rate * len(labels)), replace=False)
    return move(labels, chosen, rng.integers(1, num_classes, size=len(chosen)), num_classes)
