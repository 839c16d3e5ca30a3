"""The recipe behind `bitempered tune`: temperatures, schedule, rate, decay and smoothing searched together.

A trial trains one network for each seed of the search. Its score is the accuracy on validation labels, which are as
noisy as the training labels unless a few clean ones are given. As in `compare`, the last epoch and the best one count
alike. Test labels are not looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from bitempered import schedules, tune
from bitempered.experiments import cells
from bitempered.experiments.cells import Cell, Comparison
from bitempered.experiments.data import Dataset
from bitempered.experiments.datasets import is_table
from bitempered.experiments.losses import Loss, LossSettings
from bitempered.experiments.networks import NETWORKS
from bitempered.experiments.optimizers import OPTIMIZERS
from bitempered.experiments.recipes import compare
from bitempered.experiments.recipes.plans import SEARCH_SEED
from bitempered.experiments.runs import Progress, Row, identity, one_thread
from bitempered.experiments.sources import DataError
from bitempered.experiments.train import train
from bitempered.extras import install

__all__ = ["LOSSES", "TuneRequest", "request", "run"]

LOSSES = ("bi-tempered", "logistic")
TRIALS = 50
DECAYS = (tune.SPACE["decay"][0], 1e-3)  # to begin with, each with the optimiser's rates
PRUNE_FROM = 1 / 3  # of a run: before, accuracy says little


@dataclass(frozen=True)
class TuneRequest:
    """What to search; the comparison's only cell has the noise level, its loss and rate are open."""

    comparison: Comparison
    loss: str
    trials: int
    clean_file: str | None = None  # a table with clean labels to validate on; it takes the place of test rows
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}; choose from: {', '.join(LOSSES)}")
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")

    @property
    def noise(self) -> float:
        return self.comparison.cells[0].noise

    def setting(self) -> Row:
        """Return what the score of a trial depends on, except its settings."""
        open_ = ("learning_rate", "numbers", "schedule", "rescale", "smoothing", "weight_decay", "seed")
        row = self.comparison.setting(self.comparison.cells[0], 0) | {"loss": self.loss, "clean_file": self.clean_file}
        return {name: value for name, value in row.items() if name not in open_} | {
            "seeds": list(self.comparison.seeds)
        }

    @property
    def study(self) -> str:
        """The name of the study in its storage."""
        clean = f"-{self.comparison.clean_rows or 'file'}-clean" if self.validates_on_clean_labels else ""
        return f"{Path(self.comparison.dataset).stem}-{self.noise:g}-{self.loss}{clean}"

    @property
    def validates_on_clean_labels(self) -> bool:
        return self.comparison.clean_rows is not None or self.clean_file is not None


def request(
    dataset: str = "digits",
    loss: str = "bi-tempered",
    *,
    noise: float | None = None,
    trials: int = TRIALS,
    seeds: int = 1,
    epochs: int | None = None,
    noise_model: str = "symmetric",
    label_column: str | None = None,
    network: str | None = None,
    clean: str | None = None,
    data_dir: Path | None = None,
) -> TuneRequest:
    """Return what to search; a ValueError says what is wrong with it.

    Without `noise`, a table's labels are left as they are, and other data get 40 % of wrong labels. `clean` is a number
    of rows, or for a table the path of another with clean labels.
    """
    if noise is None and noise_model != "human" and not is_table(dataset):
        noise = 0.4
    levels = None if noise is None else (noise,)
    asked = compare.request(
        dataset, (compare.Contender(Loss("logistic")),), levels=levels, seeds=seeds, epochs=epochs,
        noise_model=noise_model, label_column=label_column, network=network, data_dir=data_dir,
    )  # fmt: skip
    clean_rows = clean_file = None
    if clean is not None and is_table(dataset):
        if not is_table(clean):
            raise ValueError(f"--clean must be a table with clean labels, a path in .csv or .parquet; got {clean!r}")
        clean_file = clean
    elif clean is not None:
        if not clean.isdecimal():
            raise ValueError(f"--clean must be a number of rows of {dataset}, got {clean!r}")
        clean_rows = int(clean)
    seeds_ = tuple(range(SEARCH_SEED, SEARCH_SEED + seeds))
    comparison = replace(
        asked.comparison, cells=asked.comparison.cells[:1], seeds=seeds_, clean_rows=clean_rows, test_file=clean_file
    )
    return TuneRequest(comparison, loss, trials, clean_file, data_dir)


def run(
    request: TuneRequest, storage: str | Path, progress: Progress, *, device: str = "cpu", data: Dataset | None = None
) -> tuple[LossSettings, tune.Tuned]:
    """Make the trials that the study lacks; return the best recipe and the study."""
    try:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError as missing:
        raise DataError(f"{missing}; this command needs more packages: {install('tune')}") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = data or cells.read_data(request.comparison, request.data_dir)
    training, epochs = request.comparison.training, request.comparison.epochs(data)
    # Both losses begin with the same rates and decays: the bi-tempered loss with the first leg of its default.
    optimizer = OPTIMIZERS[training.optimizer]
    starts = product(DECAYS, optimizer.first)
    first: list[dict[str, Any]] = [{"rate": rate, "decay": decay, "smoothing": 0.0} for decay, rate in starts]
    if request.loss == "bi-tempered":
        leg = schedules.default(data.num_classes, 1).legs[0]
        (t1, t2), schedule = leg.end, (leg.begin, leg.finish)
        logistic = first[0] | {"t1": 1.0, "t2": 1.0, "schedule": None}
        first = [start | {"t1": t1, "t2": t2, "schedule": schedule} for start in first]
        first.insert(1, logistic)
    if "://" not in str(storage):
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
    try:
        # Layers this small gain nothing from a second thread, see `cells.run`.
        with one_thread(device == "cpu" and NETWORKS[training.network].flat):
            found = tune.tune(
                objective(request, data, epochs, device), trials=request.trials, storage=storage, name=request.study,
                space={"rate": optimizer.searched}, first=first, progress=progress,
                about=identity(request.setting(), data.digest),
            )  # fmt: skip
    except tune.OtherStudy as error:
        raise DataError(str(error)) from error
    except ModuleNotFoundError as missing:
        if "://" not in str(storage):
            raise
        raise DataError(f"{missing}: install what the storage {storage} needs") from None
    except SQLAlchemyError as error:
        raise DataError(f"cannot use the storage {storage}: {str(error).splitlines()[0]}") from error
    return LossSettings.of(found.best, epochs), found


def objective(request: TuneRequest, data: Dataset, epochs: int, device: str) -> Callable[..., float]:
    """Return the function to maximise, with the settings of the loss as its arguments."""
    comparison = request.comparison

    def score(recipe: LossSettings, report: Callable[[int, float], None]) -> float:
        training = replace(comparison.training, weight_decay=recipe.decay)
        trial = replace(comparison, training=training, cells=(Cell(recipe.loss, request.noise, recipe.rate),))
        scores: list[float] = []
        for place, seed in enumerate(comparison.seeds):
            split, members, _ = cells.prepare(trial, data, seed, request.data_dir)
            if request.clean_file is not None:  # it has been read in the place of test rows
                split, members = replace(split, validation=split.test), [replace(members[0], validation=split.test[1])]
            images, labels = split.validation
            split = replace(split, test=(images[:1], labels[:1]))  # nobody looks at test rows
            accuracies: list[float] = []

            def on_epoch(epoch: int, metrics: Row, accuracies: list[float] = accuracies, place: int = place) -> None:
                accuracies.append(metrics["validation"][0])
                if epoch >= PRUNE_FROM * epochs:
                    report(place * epochs + epoch, mean([*scores, value(accuracies)]))

            train(training, members, split, seed=seed, device=device, on_epoch=on_epoch)
            scores.append(value(accuracies))
        return mean(scores)

    def bi_tempered(
        t1: float, t2: float, schedule: Any, rate: float, decay: float, smoothing: float, report: Any
    ) -> float:
        settings = {"t1": t1, "t2": t2, "schedule": schedule, "rate": rate, "decay": decay, "smoothing": smoothing}
        return score(LossSettings.of(settings, epochs), report)

    def logistic(rate: float, decay: float, smoothing: float, report: Any) -> float:
        return score(LossSettings.of({"rate": rate, "decay": decay, "smoothing": smoothing}, epochs), report)

    return bi_tempered if request.loss == "bi-tempered" else logistic


def value(accuracies: list[float]) -> float:
    """Return the mean of the last and the best epoch."""
    return (accuracies[-1] + max(accuracies)) / 2
