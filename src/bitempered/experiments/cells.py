"""Losses side by side under label noise: the runs behind `bitempered compare` and the paper's table 1."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from bitempered import noise
from bitempered.experiments.checkpoints import Checkpoint
from bitempered.experiments.data import Dataset, HumanLabels, Split, fingerprint, weak_labels
from bitempered.experiments.datasets import DATASETS, LABEL_COLUMN, check_dataset, check_name, is_table, read
from bitempered.experiments.files import BadRows, read_rows, value
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import NETWORKS
from bitempered.experiments.runs import Job, Progress, Row, Tell, identity, make, one_thread, plain
from bitempered.experiments.sources import DataError
from bitempered.experiments.train import METRICS, Member, Training, train

__all__ = [
    "FIXED",
    "NOT_FINITE",
    "VARYING",
    "Cell",
    "Comparison",
    "Stages",
    "comparison_of",
    "confused_classes",
    "corrupt",
    "curves_of",
    "prepare",
    "read_data",
    "run",
]

NOT_FINITE = "the training loss is not finite"
NOISE = ("symmetric", "symmetric-all", "pair-flip", "class-dependent", "weak-model", "human")
# Keys of what a run gives, and of what made it.
RESULTS_OF_A_RUN = (
    *(f"{part}_{moment}" for part in ("validation", "test") for moment in ("last", "chosen")),
    "chosen_epoch",
    "fleet",
    "fleet_seconds",
)
PROVENANCE = ("commit", "device", "torch", "date")
# Keys that vary within a comparison, and keys that are fixed.
VARYING = ("noise", "loss", "numbers", "schedule", "rescale", "smoothing", "learning_rate", "seed")
FIXED = (
    "dataset",
    "noise_model",
    "label_column",
    "test_file",
    "rows",
    "clean_rows",
    *(f.name for f in fields(Training)),
)


@dataclass(frozen=True)
class Cell:
    """One entry of a table: a loss at a noise level, with its learning rate."""

    loss: Loss
    noise: float
    rate: float

    @classmethod
    def of(cls, row: Row) -> "Cell":
        """Return the cell of a row."""
        return cls(Loss.of(row), row["noise"], row["learning_rate"])


@dataclass(frozen=True)
class Comparison:
    """Train every cell with the same network, optimiser and number of epochs, for several seeds.

    The noise corrupts training and validation labels alike, as it would in practice; the test labels stay as they are
    in the data, or in `test_file`, a second table. For one seed all cells share rows, initial weights and batches, and
    those of one noise level share the wrong labels.
    """

    dataset: str
    training: Training
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    noise_model: str = "symmetric"
    label_column: str = LABEL_COLUMN
    rows: int | None = None  # use only this many of each part, the first ones
    test_file: str | None = None
    clean_rows: int | None = None  # validate on this many rows with clean labels, instead of all with noisy ones

    def __post_init__(self) -> None:
        check_dataset(self.dataset)
        if self.test_file is not None and not is_table(self.dataset):
            raise ValueError(f"{self.dataset} has test rows of its own; --test is for a .csv or .parquet file")
        if self.test_file is not None and not is_table(self.test_file):
            raise ValueError(f"--test must be a path that ends in .csv or .parquet, got {self.test_file!r}")
        if self.test_file is not None:
            check_name(self.test_file)
        levels = [cell.noise for cell in self.cells]
        if not levels or not all(0 <= level <= 1 for level in levels):
            raise ValueError(f"noise levels must be in [0, 1], got {list(dict.fromkeys(levels))}")
        rates = [cell.rate for cell in self.cells]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"learning rates must be positive and finite, got {list(dict.fromkeys(rates))}")
        if self.clean_rows is not None and self.clean_rows < 1:
            raise ValueError(f"the number of rows with clean labels must be at least 1, got {self.clean_rows}")
        if not self.seeds:
            raise ValueError("there must be at least one seed")
        if self.noise_model not in NOISE:
            raise ValueError(f"unknown noise model {self.noise_model!r}; choose from: {', '.join(NOISE)}")
        if self.noise_model == "human" and self.human_labels is None:
            labelled = [name for name, entry in DATASETS.items() if entry.human_labels]
            raise ValueError(f"{self.dataset} has no human labels; choose from: {', '.join(labelled)}")

    @property
    def human_labels(self) -> HumanLabels | None:
        return DATASETS[self.dataset].human_labels if self.dataset in DATASETS else None

    def setting(self, cell: Cell, seed: int) -> Row:
        """Return what a run depends on, by the keys of its row."""
        return {
            "dataset": self.dataset, "noise_model": self.noise_model, "noise": cell.noise, **cell.loss.row(),
            "learning_rate": cell.rate, "seed": seed, "rows": self.rows, "clean_rows": self.clean_rows,
            **({"label_column": self.label_column, "test_file": self.test_file} if is_table(self.dataset) else {}),
            **plain(self.training),
        }  # fmt: skip

    def epochs(self, data: Dataset) -> int:
        """Return the number of epochs of each run."""
        return self.training.length(len(range(data.training_rows)[: self.rows]))

    def work(self, data: Dataset) -> int:
        """Return the number of epochs of all runs together."""
        return len(self.seeds) * self.epochs(data) * len(self.cells)


def comparison_of(rows: list[Row]) -> Comparison:
    """Return the comparison that rows belong to."""
    first = rows[0]
    cells = dict.fromkeys(Cell.of(row) for row in rows)
    values = {field.name: value(first, field.name) for field in fields(Training)}
    return Comparison(
        first["dataset"],
        Training(**values | {"stairs": tuple(first["stairs"])}),
        tuple(sorted(cells, key=lambda cell: cell.noise)),
        tuple(sorted({row["seed"] for row in rows})),
        noise_model=first["noise_model"],
        label_column=first.get("label_column", LABEL_COLUMN),
        rows=first["rows"],
        test_file=first.get("test_file"),
        clean_rows=first.get("clean_rows"),
    )


def curves_of(folder: Path, rows: list[Row]) -> list[Row]:
    """Return the metrics by epoch of these rows, in their order; curves.jsonl may also hold those of others."""

    def key(row: Row) -> str:
        return str([value(row, name) for name in (*VARYING, *FIXED, "data")])

    path = folder / "curves.jsonl"
    kept = {key(curve): curve for curve in read_rows(path)}
    found = [kept[key(row)] for row in rows if key(row) in kept]
    for curve in found:
        values = curve.get("test")
        if not isinstance(values, list) or not all(is_number(value) for value in values):
            raise BadRows(f"{path} is damaged: a row has no accuracies by epoch ('test'); move the file away")
        if len(values) != (expected := len(found[0]["test"])):
            raise BadRows(f"{path} is damaged: rows have {expected} and {len(values)} epochs; move the file away")
    return found


def check_results(path: Path, rows: list[Row]) -> None:
    """Raise a BadRows if a row lacks the results of its run: somebody has edited the file."""
    for row in rows:
        missing = [name for name in RESULTS_OF_A_RUN if not is_number(row.get(name))]
        missing += [name for name in PROVENANCE if not isinstance(row.get(name), str)]
        if missing:
            where = f"{row['loss']} at noise {row['noise']:g}, seed {row['seed']}"
            raise BadRows(
                f"{path} is damaged: the row of {where} lacks {', '.join(missing)}; delete the row to train it again"
            )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_data(comparison: Comparison, data_dir: Path | None) -> Dataset:
    """Read the data of a comparison; raise a DataError if its network does not take rows like these."""
    data = read(comparison.dataset, data_dir, comparison.label_column, comparison.test_file)
    takes, shape = NETWORKS[comparison.training.network].image, data.rest[0].shape[1:]
    if takes is not None and takes != shape:
        fitting = [name for name, other in NETWORKS.items() if other.image in (None, shape)]
        raise DataError(
            f"{comparison.training.network} takes images of shape {takes}, and the rows of {comparison.dataset} have "
            f"shape {shape}; choose from: {', '.join(fitting)}"
        )
    return data


@dataclass
class Stages:
    """Runs comparisons of the same data one after the other, as one piece of work."""

    data: Dataset
    work: int  # of all comparisons
    progress: Progress
    device: str
    data_dir: Path | None
    done: int = 0

    def run(self, comparison: Comparison, folder: Path, name: str, what: str = "") -> list[Row]:
        """Run a comparison, see `run`; `what` is its purpose, shown before its progress."""
        before, self.done = self.done, self.done + comparison.work(self.data)

        def tell(done: int, of: int, text: str) -> None:
            self.progress(before + done * len(comparison.cells), self.work, f"{what}{text}")

        return run(comparison, folder, tell, name=name, device=self.device, data_dir=self.data_dir, data=self.data)


def run(
    comparison: Comparison,
    folder: Path,
    progress: Progress,
    *,
    name: str = "compare",
    device: str = "cpu",
    data_dir: Path | None = None,
    data: Dataset | None = None,
) -> list[Row]:
    """Make the runs that `folder` lacks and return the rows of all, seed by seed in the order of the cells.

    All cells of a seed train together. `runs.make` describes the folder; its rows are in `name`.jsonl. `data` is what
    `read_data` returns, if it has been read.
    """
    data = data or read_data(comparison, data_dir)
    epochs = comparison.epochs(data)

    def job(seed: int) -> Job:
        split, members, runs = prepare(comparison, data, seed, data_dir)

        def train_cells(places: list[int], checkpoints: list[Checkpoint], tell: Tell) -> tuple[list[Row], list[Row]]:
            return run_seed(comparison, split, [members[i] for i in places], seed, tell, device, checkpoints[0])

        return Job(f"seed{seed}", runs, train_cells, epochs)

    # Layers this small gain nothing from a second thread (and lose much if cores are shared).
    with one_thread(device == "cpu" and NETWORKS[comparison.training.network].flat):
        rows = make([partial(job, seed) for seed in comparison.seeds], folder, name, progress, device=device)
    check_results(folder / f"{name}.jsonl", rows)
    return rows


def prepare(
    comparison: Comparison, data: Dataset, seed: int, data_dir: Path | None
) -> tuple[Split, list[Member], list[Row]]:
    """Return the split of one seed, and for each cell the member of the fleet and its identity."""
    split, rows = data.split(seed), slice(comparison.rows)
    levels = dict.fromkeys(cell.noise for cell in comparison.cells)
    noisy = {level: corrupt(comparison, split, level, seed, data_dir) for level in levels}
    train_part, validation_part, test = ((x[rows], y[rows]) for x, y in (split.train, split.validation, split.test))
    if comparison.clean_rows is not None:
        if comparison.clean_rows > len(validation_part[1]):
            raise DataError(
                f"{data.name} has {len(validation_part[1])} validation rows, not {comparison.clean_rows} clean ones"
            )
        validation_part = (validation_part[0][: comparison.clean_rows], validation_part[1][: comparison.clean_rows])
    members, runs = [], []
    for cell in comparison.cells:
        train, validation = (labels[rows] for labels in noisy[cell.noise])
        if comparison.clean_rows is not None:
            validation = validation_part[1]
        members.append(Member(cell.loss, cell.rate, train, validation))
        # The hash of the data set, then that of this run's labels.
        seen = f"{data.digest}-{fingerprint(train, validation)}"
        runs.append(identity(comparison.setting(cell, seed), seen))
    return Split(train_part, validation_part, test, split.num_classes, names=split.names), members, runs


def run_seed(
    comparison: Comparison,
    split: Split,
    members: list[Member],
    seed: int,
    tell: Tell,
    device: str,
    checkpoint: Checkpoint,
) -> tuple[list[Row], list[Row]]:
    """Train the members together; return their results and their curves."""

    def on_epoch(epoch: int, metrics: Row) -> None:
        mean = sum(metrics["validation"]) / len(members)
        tell(epoch, f"seed {seed}: epoch {epoch}, mean validation accuracy {mean:.1%} ({len(members)} side by side)")

    metrics = train(
        comparison.training, members, split, seed=seed, device=device, on_epoch=on_epoch, checkpoint=checkpoint
    )
    last, results, curves = metrics[-1], [], []
    for place in range(len(members)):
        # The first epoch with the highest accuracy on noisy validation labels; test rows are not used.
        chosen = max(metrics, key=lambda row: row["validation"][place])
        results.append(
            {
                "train_last": last["noisy"][place], "validation_last": last["validation"][place],
                "test_last": last["test"][place], "chosen_epoch": chosen["epoch"],
                "validation_chosen": chosen["validation"][place], "test_chosen": chosen["test"][place],
                "problem": problem(last, place),
                "fleet": len(members), "fleet_seconds": last["seconds"],
            }
        )  # fmt: skip
        curves.append({name: [row[name][place] for row in metrics] for name in METRICS})
    return results, curves


def problem(last: Row, place: int) -> str | None:
    """Say what is wrong with a run after its last epoch; None if nothing is."""
    found: str | None = NOT_FINITE if last["training_loss"][place] is None else last["problem"][place]
    return found


def corrupt(
    comparison: Comparison, split: Split, level: float, seed: int, data_dir: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels for training and validation, with noise of a level."""
    rng, classes, labels = np.random.default_rng(seed), split.num_classes, (split.train[1], split.validation[1])
    if comparison.noise_model == "human":
        assert comparison.human_labels is not None
        return read_human_labels(comparison.human_labels, split, data_dir)
    if comparison.noise_model == "weak-model":
        return weak_labels(split, level, rng)
    if comparison.noise_model == "class-dependent":
        mapping = confused_classes(comparison.dataset, classes)
        noisy = [noise.asymmetric(part, level, rng=rng, mapping=mapping) for part in labels]
    elif comparison.noise_model == "pair-flip":
        noisy = [noise.pair_flip(part, level, rng=rng, num_classes=classes) for part in labels]
    else:
        including_self = comparison.noise_model == "symmetric-all"
        noisy = [
            noise.symmetric(part, level, rng=rng, num_classes=classes, including_self=including_self) for part in labels
        ]
    return noisy[0], noisy[1]


def confused_classes(dataset: str, classes: int) -> Mapping[int, int]:
    """Return which classes are mistaken for which others in class-dependent noise, the same for every seed.

    If the data set does not say: half of the classes, rounded up, the first of a random order, each mistaken for the
    next.

    >>> confused_classes("digits", 10), confused_classes("table.csv", 2)
    ({7: 1, 2: 7, 5: 6, 6: 5, 3: 8}, {0: 1})
    """
    known = DATASETS[dataset].mistaken if dataset in DATASETS else None
    if known is not None:
        return known
    order = np.random.default_rng(0).permutation(classes).tolist()
    return dict(pairwise(order[: 1 - (-classes // 2)]))


def read_human_labels(source: HumanLabels, split: Split, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that people gave to the training and validation rows of a split."""
    assert split.rows is not None
    clean = np.empty(sum(map(len, split.rows)), dtype=np.int64)
    for rows, (_, labels) in zip(split.rows, (split.train, split.validation), strict=True):
        clean[rows] = labels
    noisy = source.read(clean, data_dir)
    train, validation = (noisy[rows] for rows in split.rows)
    return train, validation
