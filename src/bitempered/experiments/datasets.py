"""The registered data sets, by name, and tables by path. To add one, write a reader and add an entry to `DATASETS`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from bitempered.experiments.data import Dataset, HumanLabels, Part, divide
from bitempered.experiments.sources import (
    CIFAR100,
    FASHION_MNIST,
    MNIST,
    DataError,
    Source,
    fetch,
    read_cifar,
    read_idx,
    read_table,
)
from bitempered.experiments.train import Training

__all__ = [
    "CIFAR100N",
    "DATASETS",
    "LABEL_COLUMN",
    "DatasetEntry",
    "check_dataset",
    "check_name",
    "default_training",
    "is_table",
    "read",
    "read_parts",
]

Parts = tuple[Part, Part]  # rows to train and validate on, and test rows


@dataclass(frozen=True)
class DatasetEntry:
    """A data set: its source, its contents, and its default training."""

    source: Source | None  # None: no files are needed
    read: Callable[[list[Path]], Parts]  # takes the source's files in their order
    num_classes: int
    training: Training
    validation_rows: int = 5_000  # half as many as the images of a test set
    human_labels: HumanLabels | None = None
    standardise: bool = False  # every column, by the training rows
    mistaken: Mapping[int, int] | None = None  # what some classes are often mistaken for, if that is known
    published: Callable[[], Part] | None = None  # all rows in their published order; needed without a source

    def __post_init__(self) -> None:
        if self.source is None and self.published is None:
            raise ValueError("a data set without a source needs `published`: an audit numbers its rows in that order")


def read_digits(paths: list[Path]) -> Parts:
    """Return scikit-learn's 1,797 grey 8 x 8 digits: 797 rows to test, the rest to train and validate."""
    pixels, labels = load_digits(return_X_y=True)
    # Pixels are counts from 0 to 16.
    return divide("digits", (pixels / 16).astype(np.float32), labels.astype(np.int64), 797, 2019)


def digit_images() -> Part:
    """Return the same digits as images of bytes."""
    pixels, labels = load_digits(return_X_y=True)
    return (pixels.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8), labels.astype(np.int64)


def read_breast_cancer(paths: list[Path]) -> Parts:
    """Return scikit-learn's 569 tumours with 30 measurements, malignant or benign: 169 rows to test."""
    features, labels = load_breast_cancer(return_X_y=True)
    return divide("breast-cancer", features, labels.astype(np.int64), 169, 2019)


def read_wine(paths: list[Path]) -> Parts:
    """Return scikit-learn's 178 wines of three growers with 13 measurements: 60 rows to test."""
    features, labels = load_wine(return_X_y=True)
    return divide("wine", features, labels.astype(np.int64), 60, 2019)


def read_mnist(paths: list[Path]) -> Parts:
    """Return MNIST's images, or those of a data set in the same format, in their published order."""
    parts = []
    for images_file, labels_file in (paths[:2], paths[2:]):
        images, labels = read_idx(images_file), read_idx(labels_file)
        if images.shape != (*labels.shape, 28, 28) or not labels.size or labels.max() > 9:
            raise DataError(
                f"{images_file} and {labels_file} must hold n images of 28 x 28 and n labels from 0 to 9, "
                f"got shapes {images.shape} and {labels.shape}; download them again"
            )
        parts.append((images[:, None], labels.astype(np.int64)))
    return parts[0], parts[1]


def read_cifar100(paths: list[Path]) -> Parts:
    """Return CIFAR-100's images in their published order."""
    return read_cifar(paths[0], "train"), read_cifar(paths[0], "test")


DIGITS = {7: 1, 2: 7, 5: 6, 6: 5, 3: 8}  # as Patrini et al. (2017) and most papers since
CIFAR100N = HumanLabels("cifar100n.npz", "cifar-100n", 100, wrong=0.402)
DATASETS = {
    "digits": DatasetEntry(
        None, read_digits, 10, Training("mlp", "adam", epochs=150, batch_size=125), validation_rows=500,
        mistaken=DIGITS, published=digit_images,
    ),
    "mnist": DatasetEntry(
        MNIST, read_mnist, 10, Training("mnist_cnn", "adadelta", epochs=500), mistaken=DIGITS
    ),
    "fashion-mnist": DatasetEntry(FASHION_MNIST, read_mnist, 10, Training("mnist_cnn", "adadelta", epochs=500)),
    "cifar100": DatasetEntry(
        CIFAR100, read_cifar100, 100,
        Training(
            "resnet56", "sgd", epochs=200, steps=50_000, stairs=(0.5, 0.75), warmup=1_000, weight_decay=5e-4, clip=1.0,
            augment=True,
        ),
        human_labels=CIFAR100N,
    ),
    "breast-cancer": DatasetEntry(
        None, read_breast_cancer, 2, Training("mlp", "adam", epochs=100, batch_size=32), validation_rows=100,
        standardise=True, published=partial(load_breast_cancer, return_X_y=True),
    ),
    "wine": DatasetEntry(
        None, read_wine, 3, Training("mlp", "adam", epochs=200, batch_size=32), validation_rows=40, standardise=True,
        published=partial(load_wine, return_X_y=True),
    ),
}  # fmt: skip
TABLES = (".csv", ".parquet")
LABEL_COLUMN = "label"  # of a table, unless another is named
TABLE_TRAINING = Training("mlp", "adam", epochs=100)


def check_dataset(name: str) -> None:
    """Raise a ValueError that lists the data sets if `name` is neither one of them nor a table's file."""
    if name not in DATASETS and not is_table(name):
        known = [*DATASETS, "a path that ends in .csv or .parquet"]
        raise ValueError(f"unknown dataset {name!r}; choose from: {', '.join(known)}")
    check_name(name)


def check_name(name: str) -> None:
    """Raise a ValueError if the name of a file cannot be written to rows and pages, which are in UTF-8."""
    if not name.isprintable() and any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"the name {name!r} is not UTF-8; rename the file")


def is_table(name: str) -> bool:
    return Path(name).suffix in TABLES


def default_training(name: str) -> Training:
    return DATASETS[name].training if name in DATASETS else TABLE_TRAINING


def read(
    name: str, data_dir: Path | None = None, label_column: str = LABEL_COLUMN, test_file: str | None = None
) -> Dataset:
    """Read a data set by name, or a table by its path.

    Files are read from `data_dir`, or else downloaded once. Images stay uint8, a quarter of the size of float32, and
    are scaled where they are used. A CSV or Parquet file gives a fifth of its rows each to test and validation; its
    columns are standardised. With a `test_file`, a table with the same columns, all test rows come from there.
    """
    check_dataset(name)
    if name in DATASETS:
        entry = DATASETS[name]
        parts = read_parts(name, data_dir)
        return Dataset(name, *parts, entry.num_classes, entry.validation_rows, entry.standardise)
    table = read_table(Path(name), label_column)
    if (classes := len(table.classes)) < 2:
        raise DataError(f"{name}: column {label_column!r} must hold at least two classes, got {classes}")
    fifth = -(-len(table.labels) // 5)
    rest = table.features, table.labels
    if test_file is None:
        rest, test = divide(name, *rest, fifth, 2019)
    else:
        aside = read_table(Path(test_file), label_column, like=table)
        test = aside.features, aside.labels
    return Dataset(name, rest, test, classes, fifth, standardise=True, names=tuple(table.classes))


def read_parts(name: str, data_dir: Path | None) -> Parts:
    """Return all training and all test rows of a registered data set."""
    entry = DATASETS[name]
    return entry.read(fetch(name, entry.source, data_dir) if entry.source else [])
