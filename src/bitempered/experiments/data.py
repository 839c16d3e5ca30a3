"""A data set in memory: its training, validation and test rows, their hash, and labels that people or a model gave."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from bitempered import noise
from bitempered.experiments.sources import DataError

__all__ = ["Dataset", "HumanLabels", "Part", "Split", "divide", "fingerprint", "weak_labels"]

Part = tuple[np.ndarray, np.ndarray]  # features (n, d) float32 or images (n, c, h, w) uint8, labels (n,) int64
WEAK_ROWS = 0.01  # the fraction of each class that a weak model learns from
FEWEST_WEAK_ROWS = 3  # of each class


@dataclass(frozen=True)
class Split:
    """One dataset in three disjoint parts."""

    train: Part
    validation: Part
    test: Part
    num_classes: int
    rows: tuple[np.ndarray, np.ndarray] | None = None  # of training and validation, in the order of their dataset
    names: tuple[str, ...] | None = None  # of the classes; None: their numbers


@dataclass(frozen=True)
class Dataset:
    """The rows to train and validate on, and the test rows, which are the same for every seed.

    So nothing tuned on one seed's validation rows has seen another seed's test rows.
    """

    name: str
    rest: Part
    test: Part
    num_classes: int
    validation_rows: int
    standardise: bool = False  # every column, by the training rows
    names: tuple[str, ...] | None = None  # of the classes; None: their numbers

    @cached_property
    def digest(self) -> str:
        """A hash of everything that was read."""
        return fingerprint(*self.rest, *self.test)

    def split(self, seed: int) -> Split:
        """Set validation rows aside, drawn by `seed` and stratified by class."""
        features, labels = self.rest
        (rows, _), (aside, _) = divide(self.name, np.arange(len(labels)), labels, self.validation_rows, seed)
        train, validation, test = (features[rows], labels[rows]), (features[aside], labels[aside]), self.test
        if self.standardise:
            centre, spread = centre_and_spread(train[0])
            train, validation, test = (
                (standardised(self.name, x, centre, spread), y) for x, y in (train, validation, test)
            )
        return Split(train, validation, test, self.num_classes, (rows, aside), self.names)

    @property
    def training_rows(self) -> int:
        return len(self.rest[1]) - self.validation_rows


def centre_and_spread(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of every column (1 for a constant column), at any magnitude."""
    centre = x.mean(axis=0)
    largest = abs(x - centre).max(axis=0)
    largest[largest == 0] = 1
    spread = ((x - centre) / largest).std(axis=0)  # scaled, since a square may overflow or vanish
    spread[spread == 0] = 1
    return centre, spread * largest


def standardised(name: str, x: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Standardise in float64, then return float32: a time in seconds since 1970 has no digits to spare."""
    with np.errstate(over="ignore"):
        scaled = ((x - centre) / spread).astype(np.float32)
    for row, column in np.argwhere(~np.isfinite(scaled))[:1]:
        raise DataError(
            f"{name}: the value {x[row, column]:g} of feature {column + 1} is too far from its mean over the training "
            "rows; remove the row"
        )
    return scaled


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


@dataclass(frozen=True)
class HumanLabels:
    """The labels that people gave to the training rows of a data set, in a file that is not downloaded."""

    file: str  # in the data folder, or in its subfolder
    subfolder: str
    num_classes: int
    wrong: float  # fraction that is wrong

    def path(self, data_dir: Path | None) -> Path:
        if data_dir is None:
            raise DataError(f"human labels are read from {self.file} in a folder that you name with --data-dir")
        paths = [data_dir / self.file, data_dir / self.subfolder / self.file]
        return next((path for path in paths if path.exists()), paths[0])

    def read(self, labels: np.ndarray, data_dir: Path | None) -> np.ndarray:
        """Human labels of all training rows in published order; `labels` are the true ones."""
        try:
            return noise.from_file(labels, self.path(data_dir), num_classes=self.num_classes)
        except (OSError, ValueError) as error:
            raise DataError(str(error)) from error


def weak_labels(split: Split, rate: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return labels for training and validation, a fraction `rate` of each part wrong by the mistakes of a weak model.

    See `noise.mistakes`. The model is fitted to training rows that `rng` draws.
    """
    model = weak_model(split.train, rng)
    train, validation = (
        noise.mistakes(y, rate, scores=scores(model, x, split.num_classes)) for x, y in (split.train, split.validation)
    )
    return train, validation


def weak_model(train: Part, rng: np.random.Generator) -> LogisticRegression:
    """Fit a linear model to 1 % of the rows of each class, at least three, with their right labels."""
    x, y = train
    rows = [
        rng.permutation(here)[: max(round(WEAK_ROWS * len(here)), FEWEST_WEAK_ROWS)]
        for here in (np.flatnonzero(y == label) for label in np.unique(y))
    ]
    chosen = np.concatenate(rows)
    return LogisticRegression(max_iter=10_000).fit(flat(x[chosen]), y[chosen])


def scores(model: LogisticRegression, x: np.ndarray, classes: int) -> np.ndarray:
    """Return the model's logits; a class that it has not seen is below all others."""
    found = model.decision_function(flat(x))
    if found.ndim == 1:  # of two classes only the second has a logit
        found = np.stack([np.zeros_like(found), found], axis=1)
    logits = np.full((len(x), classes), found.min(initial=0.0) - 1)
    logits[:, model.classes_] = found
    return logits


def flat(x: np.ndarray) -> np.ndarray:
    """Return rows of float64; bytes, which are pixels, from 0 to 1."""
    return x.reshape(len(x), -1) / np.float64(255 if x.dtype == np.uint8 else 1)


def divide(name: str, features: np.ndarray, labels: np.ndarray, rows: int, seed: int) -> tuple[Part, Part]:
    """Set `rows` rows aside, stratified by class."""
    try:
        rest_x, aside_x, rest_y, aside_y = train_test_split(
            features, labels, test_size=rows, stratify=labels, random_state=seed
        )
    except ValueError as error:
        raise DataError(
            f"{name}: cannot set {rows} of {len(labels)} rows aside with their share of each class: {error}; "
            "leave out rare classes or add rows"
        ) from error
    return (rest_x, rest_y), (aside_x, aside_y)
