"""Datasets, split into training, validation and test rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

__all__ = ["DATASETS", "Part", "Split", "check_dataset", "load"]

Part = tuple[np.ndarray, np.ndarray]  # features (n, d) float32, labels (n,) int64


@dataclass(frozen=True)
class Split:
    """One dataset in three disjoint parts."""

    train: Part
    validation: Part
    test: Part
    num_classes: int


def _digits() -> tuple[Part, int]:
    """Return the 1,797 grey 8 x 8 digits that scikit-learn carries (no download)."""
    pixels, labels = load_digits(return_X_y=True)
    # Pixels are counts from 0 to 16.
    return ((pixels / 16).astype(np.float32), labels.astype(np.int64)), 10


DATASETS: dict[str, Callable[[], tuple[Part, int]]] = {"digits": _digits}


def check_dataset(name: str) -> None:
    """Raise a ValueError that lists the datasets if `name` is not one of them."""
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}; there is: {', '.join(sorted(DATASETS))}")


def load(name: str, seed: int) -> Split:
    """Split a dataset, stratified by class: 797 test rows, 500 each to validate and to train.

    The test rows are the same for every seed, so that nothing tuned on one seed's validation rows
    has seen another seed's test rows; `seed` divides the remaining ones.
    """
    check_dataset(name)
    (features, labels), num_classes = DATASETS[name]()
    rest_x, test_x, rest_y, test_y = train_test_split(
        features, labels, test_size=797, stratify=labels, random_state=2019
    )
    train_x, validation_x, train_y, validation_y = train_test_split(
        rest_x, rest_y, test_size=500, stratify=rest_y, random_state=seed
    )
    return Split((train_x, train_y), (validation_x, validation_y), (test_x, test_y), num_classes)
