"""The recipe behind `bitempered compare`: losses side by side, each at the best of the same learning rates.

For each loss and noise level a search trains every rate with two seeds of its own and takes the best on validation
labels, which are as noisy as the training labels. Test labels are not looked at. Then the cells train with the seeds of
the results. So every loss has the same number of trials.

The last epoch and the best one count alike. At the best epoch alone rates hardly differ: chance would choose between
rates with which a net memorises all wrong labels by the last epoch, and rates with which it memorises few.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from bitempered import schedules
from bitempered.experiments import cells
from bitempered.experiments.cells import FIXED, VARYING, Cell, Comparison, comparison_of, curves_of
from bitempered.experiments.compare_report import pages
from bitempered.experiments.datasets import DATASETS, LABEL_COLUMN, check_dataset, default_training, is_table
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import NETWORKS
from bitempered.experiments.optimizers import OPTIMIZERS
from bitempered.experiments.recipes.plans import SEARCH_SEED, check_seeds
from bitempered.experiments.recipes.shared import best
from bitempered.experiments.report import Pages, newest
from bitempered.experiments.runs import Progress, Row

__all__ = ["Contender", "default_recipe", "render", "request", "run"]

SEARCH_SEEDS = (SEARCH_SEED, SEARCH_SEED + 1)


@dataclass(frozen=True)
class Contender:
    """A loss as the command line names it."""

    loss: Loss | None  # None: the bi-tempered loss with the default schedule, which depends on the data
    rate: float | None = None  # None: searched

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """Parse a loss, or `bi-tempered` for the default schedule, and its rate after an @.

        >>> Contender.parse("gce:0.7@0.01").rate
        0.01
        """
        name, at, rate = text.strip().partition("@")
        try:
            number = float(rate) if at else None
        except ValueError:
            raise ValueError(f"cannot use the loss {text!r}: after @ comes a learning rate, such as 0.01") from None
        return cls(None if name == "bi-tempered" else Loss.parse(name), number)


DEFAULT = tuple(map(Contender.parse, ("logistic", "gce:0.7", "bi-tempered", "bi-tempered:0.8:1.2")))


@dataclass(frozen=True)
class CompareRequest:
    """A comparison before the data are read: its default schedule and its rates are still open."""

    comparison: Comparison
    contenders: tuple[Contender, ...]
    levels: tuple[float, ...]
    rates: tuple[float, ...]  # to search for every loss without a rate of its own
    data_dir: Path | None

    def entries(self, classes: int, epochs: int) -> list[tuple[Loss, tuple[float, ...]]]:
        """Return the losses with their rates to choose from, without repeats."""
        default = default_recipe(classes, epochs)
        entries = (
            (contender.loss or default, self.rates if contender.rate is None else (contender.rate,))
            for contender in self.contenders
        )
        return list(dict.fromkeys(entries))


def request(
    dataset: str = "digits",
    losses: tuple[Contender, ...] = DEFAULT,
    *,
    levels: tuple[float, ...] | None = None,
    seeds: int = 5,
    epochs: int | None = None,
    rates: tuple[float, ...] | None = None,
    noise_model: str = "symmetric",
    label_column: str | None = None,
    network: str | None = None,
    test_file: str | None = None,
    data_dir: Path | None = None,
    weight_decay: float | None = None,
) -> CompareRequest:
    """Return what to compare; a ValueError says what is wrong with it.

    Without levels, a table's labels are left as they are, and other data get 0 and 40 % of wrong labels. A single rate
    is used without a search.
    """
    check_seeds(seeds)
    check_dataset(dataset)
    if label_column is not None and not is_table(dataset):
        raise ValueError(f"--label-column is for a table of your own; {dataset} has labels, so leave it out")
    if data_dir is not None and (is_table(dataset) or DATASETS[dataset].source is None):
        raise ValueError(f"--data-dir is for data sets that are downloaded; {dataset} is not, so leave it out")
    if len(set(losses)) < len(losses):
        raise ValueError("each loss can be named once, or once for each learning rate (as in mae@0.01,mae@0.1)")
    training = default_training(dataset)
    if network is not None:
        flat = network in NETWORKS and NETWORKS[network].flat
        training = replace(training, network=network, augment=training.augment and not flat)  # which is for images
    if epochs is not None:
        training = replace(training, epochs=epochs, steps=None)
    if weight_decay is not None:
        training = replace(training, weight_decay=weight_decay)
    if noise_model == "human" and levels is not None:
        raise ValueError("human labels have their own noise: leave --noise out")
    if levels is None:
        human = DATASETS[dataset].human_labels if noise_model == "human" and dataset in DATASETS else None
        levels = (0.0,) if is_table(dataset) else (human.wrong,) if human else (0.0, 0.4)
    levels = tuple(sorted({float(level) for level in levels}))  # their order does not matter
    rates = tuple(sorted(set(OPTIMIZERS[training.optimizer].rates if rates is None else rates)))
    # All cells that a search may choose, so that every value is checked before the data are read.
    own = tuple(contender.rate for contender in losses if contender.rate is not None)
    possible = tuple(Cell(Loss("logistic"), level, rate) for level, rate in product(levels, rates + own))
    comparison = Comparison(
        dataset, training, possible, tuple(range(seeds)), noise_model, label_column or LABEL_COLUMN, test_file=test_file
    )
    return CompareRequest(comparison, losses, levels, rates, data_dir)


def default_recipe(classes: int, epochs: float) -> Loss:
    """Return the bi-tempered loss with the temperatures of `schedules.default`."""
    first, last = schedules.default(classes, epochs).legs
    begin, knee, finish = (round(epoch, 6) for epoch in (first.begin, first.finish, last.finish))
    return Loss("bi-tempered", last.end, (begin, knee, *first.end, finish))


def run(
    request: CompareRequest, folder: Path, progress: Progress, *, device: str = "cpu"
) -> tuple[Comparison, list[Row], list[Row]]:
    """Search and train what `folder` lacks; return the comparison, its rows, and the rows of the search.

    The search's rows are in the subfolder search. It goes level by level: one fleet for each level and seed.
    """
    open_comparison, levels = request.comparison, request.levels
    data = cells.read_data(open_comparison, request.data_dir)
    epochs = open_comparison.epochs(data)
    entries = request.entries(data.num_classes, epochs)
    trials = [(loss, rate) for loss, rates in entries if len(rates) > 1 for rate in rates]
    searches = [
        replace(open_comparison, cells=tuple(Cell(loss, level, rate) for loss, rate in trials), seeds=SEARCH_SEEDS)
        for level in (levels if trials else ())
    ]
    work = epochs * len(levels) * (len(SEARCH_SEEDS) * len(trials) + len(open_comparison.seeds) * len(entries))
    stages = cells.Stages(data, work, progress, device, request.data_dir)
    tried: list[Row] = []
    for search in searches:
        what = f"rates at {search.cells[0].noise:.0%} noise, " if len(levels) > 1 else "rates, "
        tried += stages.run(search, folder / "search", "search", what)
    chosen = dict.fromkeys(
        Cell(loss, level, best_rate(tried, loss, level, rates)) for level in levels for loss, rates in entries
    )
    comparison = replace(open_comparison, cells=tuple(chosen))
    return comparison, stages.run(comparison, folder, "compare"), tried


def best_rate(tried: list[Row], loss: Loss, level: float, rates: tuple[float, ...]) -> float:
    """Return the rate with the highest accuracy on noisy validation labels; the lowest if tied."""
    if len(rates) == 1:
        return rates[0]
    groups = {rate: [row for row in tried if Cell.of(row) == Cell(loss, level, rate)] for rate in rates}
    return best(groups, "validation_last", "validation_chosen")


def render(path: Path) -> Pages:
    """Render the pages of a file of rows again, with the search beside it."""
    rows = newest(read_rows(path), VARYING, FIXED)
    tried = read_rows(path.parent / "search" / "search.jsonl")
    shared = [name for name in FIXED if name in rows[0]]
    tried = newest([row for row in tried if all(row.get(name) == rows[0][name] for name in shared)], VARYING, FIXED)
    return pages(comparison_of(rows), rows, tried, curves_of(path.parent, rows))
