"""Datasets, split into training, validation and test rows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bitempered import noise
from bitempered.experiments.sources import SOURCES, DataError, fetch, read_cifar, read_idx, read_table

__all__ = [
    "DATASETS",
    "Part",
    "Ring",
    "Split",
    "check_dataset",
    "load",
    "load_human_labels",
    "load_images",
    "load_table",
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
    rows: tuple[np.ndarray, np.ndarray] | None = None  # of training and validation in the published order, if kept


def _digits() -> tuple[Part, int]:
    """Return the 1,797 grey 8 x 8 digits that scikit-learn carries (no download)."""
    pixels, labels = load_digits(return_X_y=True)
    # Pixels are counts from 0 to 16.
    return ((pixels / 16).astype(np.float32), labels.astype(np.int64)), 10


DATASETS: dict[str, Callable[[], tuple[Part, int]]] = {"digits": _digits}


def check_dataset(name: str) -> None:
    """Raise a ValueError that lists the datasets if `name` is not one of them nor a table's file."""
    if name not in DATASETS and name not in SOURCES and Path(name).suffix not in TABLES:
        known = [*DATASETS, *SOURCES, "a path that ends in .csv or .parquet"]
        raise ValueError(f"unknown dataset {name!r}; there is: {', '.join(known)}")


def load(name: str, seed: int, data_dir: Path | None = None, label_column: str = "label") -> Split:
    """Split a dataset by name, or a table by its path: see `load_images` and `load_table`.

    Digits are stratified by class: 797 test rows, 500 each to validate and to train. The test rows are
    the same for every seed, so that nothing tuned on one seed's validation rows has seen another seed's
    test rows; `seed` divides the remaining ones.
    """
    check_dataset(name)
    if name in SOURCES:
        return load_images(name, seed, data_dir)
    if name not in DATASETS:
        return load_table(Path(name), label_column, seed)
    (features, labels), num_classes = DATASETS[name]()
    rest, test = divide(features, labels, 797, 2019)
    train, validation = divide(*rest, 500, seed)
    return Split(train, validation, test, num_classes)


def load_images(name: str, seed: int, data_dir: Path | None = None) -> Split:
    """Return "mnist", "fashion-mnist" or "cifar100": their own test images, the others divided by `seed`.

    Validation takes 5,000 images, stratified by class. Images stay uint8, a quarter of what float32 takes:
    they are scaled where they are used. Files are those of `data_dir`, else downloaded once.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown dataset {name!r}; there is: {', '.join(SOURCES)}")
    rest, test = read_images(name, data_dir)
    images, labels = rest
    (rows, _), (aside, _) = divide(np.arange(len(labels)), labels, VALIDATION_ROWS, seed)
    train, validation = ((images[part], labels[part]) for part in (rows, aside))
    return Split(train, validation, test, 100 if name == "cifar100" else 10, (rows, aside))


def read_images(name: str, data_dir: Path | None) -> tuple[Part, Part]:
    """Return all training and all test images in their published order, with their labels."""
    paths = fetch(name, data_dir)
    if name == "cifar100":
        train, test = (read_cifar(paths[0], part) for part in ("train", "test"))
        return train, test
    parts = []
    for images_file, labels_file in (paths[:2], paths[2:]):
        images, labels = read_idx(images_file), read_idx(labels_file)
        if images.ndim != 3 or labels.shape != images.shape[:1] or (labels.size and labels.max() > 9):
            raise DataError(
                f"{images_file} and {labels_file} must hold n images and n labels from 0 to 9, "
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


def load_table(path: Path, label_column: str, seed: int) -> Split:
    """Split a CSV or Parquet file, stratified by class: a fifth each to test and validate, the rest to train.

    As with digits the test rows are the same for every seed. Columns are standardised by the training rows.
    """
    features, labels, names = read_table(path, label_column)
    if len(names) < 2:
        raise DataError(f"{path}: column {label_column!r} must hold at least two classes, got {len(names)}")
    fifth = -(-len(labels) // 5)
    try:
        rest, test = divide(features, labels, fifth, 2019)
        train, validation = divide(*rest, fifth, seed)
    except ValueError as error:
        raise DataError(
            f"{path}: {len(labels)} rows of {len(names)} classes cannot be split three ways, stratified: {error}"
        ) from error
    centre, spread = train[0].mean(axis=0), train[0].std(axis=0)
    spread[spread == 0] = 1
    scaled = [((x - centre) / spread, y) for x, y in (train, validation, test)]
    return Split(scaled[0], scaled[1], scaled[2], len(names))


def divide(features: np.ndarray, labels: np.ndarray, rows: int, seed: int) -> tuple[Part, Part]:
    """Set `rows` rows aside, stratified by class."""
    rest_x, aside_x, rest_y, aside_y = train_test_split(
        features, labels, test_size=rows, stratify=labels, random_state=seed
    )
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
