"""Datasets, split into training, validation and test rows."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bitempered import noise
from bitempered.experiments.sources import SOURCES, DataError, fetch, read_cifar, read_idx, read_table

__all__ = [
    "Dataset",
    "Part",
    "Ring",
    "Split",
    "check_dataset",
    "digits",
    "fingerprint",
    "is_table",
    "load",
    "load_human_labels",
    "read",
    "read_images",
    "ring",
]

Part = tuple[np.ndarray, np.ndarray]  # features (n, d) float32 or images (n, c, h, w) uint8, labels (n,) int64
TABLES = (".csv", ".parquet")
VALIDATION_ROWS = 5_000  # of the 60,000 or 50,000 training images, as many as half a test set


@dataclass(frozen=True)
class Split:
    """One dataset in three disjoint parts."""

    train: Part
    validation: Part
    test: Part
    num_classes: int
    rows: tuple[np.ndarray, np.ndarray] | None = None  # of training and validation, in the order of their dataset


@dataclass(frozen=True)
class Dataset:
    """What was read: rows to train and to validate, and test rows, which are the same for every seed.

    Nothing that is tuned on one seed's validation rows has then seen another seed's test rows.
    """

    name: str
    rest: Part
    test: Part
    num_classes: int
    validation_rows: int
    standardise: bool = False  # every column, by the training rows

    @cached_property
    def digest(self) -> str:
        """A hash of all that was read."""
        return fingerprint(*self.rest, *self.test)

    def split(self, seed: int) -> Split:
        """Set validation rows aside, stratified by class, as `seed` draws them."""
        features, labels = self.rest
        (rows, _), (aside, _) = divide(self.name, np.arange(len(labels)), labels, self.validation_rows, seed)
        train, validation, test = (features[rows], labels[rows]), (features[aside], labels[aside]), self.test
        if self.standardise:
            centre, spread = train[0].mean(axis=0), train[0].std(axis=0)
            spread[spread == 0] = 1
            train, validation, test = (((x - centre) / spread, y) for x, y in (train, validation, test))
        return Split(train, validation, test, self.num_classes, (rows, aside))


def fingerprint(*arrays: np.ndarray) -> str:
    """Return a hash of arrays: their dtypes, shapes and values.

    >>> fingerprint(np.zeros(2)) == fingerprint(np.zeros(2)), fingerprint(np.zeros(2)) == fingerprint(np.zeros((2, 1)))
    (True, False)
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def check_dataset(name: str) -> None:
    """Raise a ValueError that lists the datasets if `name` is not one of them nor a table's file."""
    if name != "digits" and name not in SOURCES and not is_table(name):
        known = ["digits", *SOURCES, "a path that ends in .csv or .parquet"]
        raise ValueError(f"unknown dataset {name!r}; there is: {', '.join(known)}")


def is_table(name: str) -> bool:
    return Path(name).suffix in TABLES


def load(name: str, seed: int, data_dir: Path | None = None, label_column: str = "label") -> Split:
    """Read a dataset and split it."""
    return read(name, data_dir, label_column).split(seed)


def read(name: str, data_dir: Path | None = None, label_column: str = "label") -> Dataset:
    """Read a dataset by name, or a table by its path.

    "digits": what scikit-learn carries (no download).

    "mnist", "fashion-mnist", "cifar100": files of `data_dir`, else downloaded once. They have test images of their own;
    5,000 of the others validate. Images stay uint8, a quarter of what float32 takes: they are scaled where they are
    used.

    A CSV or Parquet file: a fifth each to test and validate, columns standardised.
    """
    check_dataset(name)
    if name in SOURCES:
        rest, test = read_images(name, data_dir)
        return Dataset(name, rest, test, 100 if name == "cifar100" else 10, VALIDATION_ROWS)
    if name == "digits":
        return digits()
    features, labels, classes = read_table(Path(name), label_column)
    if len(classes) < 2:
        raise DataError(f"{name}: column {label_column!r} must hold at least two classes, got {len(classes)}")
    fifth = -(-len(labels) // 5)
    rest, test = divide(name, features, labels, fifth, 2019)
    return Dataset(name, rest, test, len(classes), fifth, standardise=True)


def digits(test_seed: int = 2019) -> Dataset:
    """Return scikit-learn's 1,797 grey 8 x 8 digits: 797 rows to test, 500 each to train and to validate."""
    pixels, labels = load_digits(return_X_y=True)
    # Pixels are counts from 0 to 16.
    rest, test = divide("digits", (pixels / 16).astype(np.float32), labels.astype(np.int64), 797, test_seed)
    return Dataset("digits", rest, test, 10, 500)


def read_images(name: str, data_dir: Path | None) -> tuple[Part, Part]:
    """Return all training and all test images in their published order, with their labels."""
    paths = fetch(name, data_dir)
    if name == "cifar100":
        train, test = (read_cifar(paths[0], part) for part in ("train", "test"))
        return train, test
    parts = []
    for images_file, labels_file in (paths[:2], paths[2:]):
        images, labels = read_idx(images_file), read_idx(labels_file)
        if images.shape != (*labels.shape, 28, 28) or not labels.size or labels.max() > 9:
            raise DataError(
                f"{images_file} and {labels_file} must hold n images of 28 x 28 and n labels from 0 to 9, "
                f"got shapes {images.shape} and {labels.shape}; get them again"
            )
        parts.append((images[:, None], labels.astype(np.int64)))
    return parts[0], parts[1]


def load_human_labels(labels: np.ndarray, path: Path) -> np.ndarray:
    """Return the labels that people gave, from CIFAR-100N's .npz file, for all training labels in published order."""
    try:
        return noise.from_file(labels, path)
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from error


def divide(name: str, features: np.ndarray, labels: np.ndarray, rows: int, seed: int) -> tuple[Part, Part]:
    """Set `rows` rows aside, stratified by class."""
    try:
        rest_x, aside_x, rest_y, aside_y = train_test_split(
            features, labels, test_size=rows, stratify=labels, random_state=seed
        )
    except ValueError as error:
        raise DataError(
            f"{name}: of {len(labels)} rows {rows} cannot be set aside with their share of each class: {error}"
        ) from error
    return (rest_x, rest_y), (aside_x, aside_y)


@dataclass(frozen=True)
class Ring:
    """Points of the plane, (n, 2) float32; labels, (n,) int64; distances from the boundary, (n,), positive inside."""

    points: np.ndarray
    labels: np.ndarray
    margin: np.ndarray


def ring(n: int, seed: int, *, gap: float = 0.0) -> Ring:
    """Draw the paper's illustration: a disc of radius 1, class 1, in a ring of radii 1 to 1.5, class 0.

    Half of the points are of either class, uniform over it; no point is nearer to the boundary than
    `gap` / 2.

    >>> drawn = ring(4, seed=0)
    >>> drawn.labels.tolist(), ((drawn.margin > 0) == (drawn.labels == 1)).all()
    ([0, 1, 0, 1], np.True_)

    Reference: Amid, Warmuth, Anil, Koren, section 1.2 and figure 2 (the paper states no formula).
    """
    if not 0 <= gap < 1:
        raise ValueError(f"gap must be in [0, 1), got {gap}")
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    inner, outer = np.where(labels == 1, 0, 1 + gap / 2), np.where(labels == 1, 1 - gap / 2, 1.5)
    radius = np.sqrt(rng.uniform(inner**2, outer**2))
    angle = rng.uniform(0, 2 * np.pi, n)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return Ring(points.astype(np.float32), labels.astype(np.int64), 1 - radius)
