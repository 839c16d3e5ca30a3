"""What several recipes share: values, choices by validation labels, and progress over parts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TypeVar

from bitempered.experiments.datasets import DATASETS
from bitempered.experiments.recipes.plans import Options
from bitempered.experiments.runs import Progress, Row
from bitempered.experiments.train import Training

__all__ = [
    "ADAM_RATE",
    "LEVELS",
    "DataUse",
    "best",
    "data_dir_of",
    "nearest",
    "part_progress",
]

LEVELS = (0.0, 0.2, 0.4)  # of symmetric noise, in our own comparisons
ADAM_RATE = 1e-3  # the one that Adam's authors recommend, which people use

Key = TypeVar("Key")


@dataclass(frozen=True)
class DataUse:
    """A data set, how to train on it, and how many of its rows to use."""

    name: str
    training: Training
    rows: int | None = None

    def quick(self, rows: int) -> "DataUse":
        """Return the same with a few rows and two epochs, which shows no effect."""
        return replace(self, training=replace(self.training, epochs=2), rows=rows)


def data_dir_of(dataset: str, options: Options) -> Path | None:
    """Return the folder that was given for a data set; those that need no files have none."""
    return options.data_dir if DATASETS[dataset].source is not None else None


def best(groups: Mapping[Key, list[Row]], *columns: str) -> Key:
    """Return the key whose rows have the highest mean of these columns together; the first if tied.

    >>> best({"a": [{"x": 1}, {"x": 3}], "b": [{"x": 2}]}, "x")
    'a'
    """
    return max(groups, key=lambda key: mean(sum(row[column] for column in columns) for row in groups[key]))


def nearest(level: float, searched: Iterable[float]) -> float:
    """Return the nearest level that was searched; the higher one if tied.

    >>> [nearest(level, (0.0, 0.2, 0.4)) for level in (0.0, 0.1, 0.3, 0.5)]
    [0.0, 0.2, 0.4, 0.4]
    """
    return min(searched, key=lambda at: (round(abs(at - level), 9), -at))


def part_progress(progress: Progress, place: int, parts: int, what: str) -> Progress:
    """Return the progress of one of several equal parts; `what` stands before its text."""
    return lambda done, of, text: progress(100 * place + 100 * done // of, 100 * parts, f"{what}, {text}")
