"""The recipe behind `bitempered reproduce table1` and `figure3`: the paper's networks on MNIST and CIFAR-100.

First a search tries the same number of settings for each loss and noise level: the logistic loss gets as many learning
rates as the bi-tempered one gets pairs of temperatures times learning rates. It uses a shortened schedule and its own
seed, and chooses by the best epoch's accuracy on noisy validation labels, never by test labels. Then the chosen
settings train to the end, all cells of a seed as one fleet. Some noise levels can have more seeds, and cells that the
search did not choose can be trained as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.cells import FIXED, VARYING, Cell, Comparison, Stages, comparison_of, curves_of, read_data
from bitempered.experiments.datasets import DATASETS
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.plans import SEARCH_SEED, Options, Plan
from bitempered.experiments.recipes.shared import best, nearest
from bitempered.experiments.report import (
    MOMENTS,
    Pages,
    grid,
    made_by,
    newest,
    png,
    rich_table,
    seeds_by_level,
    spread,
    table_csv,
    titled,
    write,
)
from bitempered.experiments.runs import Progress, Row
from bitempered.experiments.train import Training

__all__ = [
    "LEVELS",
    "PANELS",
    "TABLE1",
    "draw_figure3",
    "markdown",
    "paper_line",
    "plan",
    "render",
    "reproduce",
    "table",
]

Settings = tuple[tuple[Loss, float], ...]  # losses with their learning rates
LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
SPREAD = "mean ± sample standard deviation of {} seeds"
PANELS = (("clean", "training set, true labels"), ("noisy", "training set, noisy labels"), ("test", "test set"))


@dataclass(frozen=True)
class Table1:
    """The settings to search and train for one data set, and the paper's results."""

    dataset: str
    training: Training
    search: Training
    searched: dict[str, Settings]  # by the name of the loss
    paper: dict[str, tuple[float, ...]]  # accuracies in per cent by LEVELS
    temperatures: str  # of the paper
    levels: tuple[float, ...] = LEVELS
    searched_at: tuple[float, ...] = LEVELS  # other levels take the settings of the nearest (if tied, the higher)
    seeds: tuple[int, ...] = (0, 1, 2)  # of every cell
    more_seeds: dict[float, tuple[int, ...]] = field(default_factory=dict)  # additional ones, by noise level
    extra_cells: tuple[Cell, ...] = ()  # trained whatever the search chooses, with their own lines
    rows: int | None = None  # use only this many images of each part, the first ones
    quick_rows: int = 512  # `rows` of the quick version


def settings(losses: tuple[Loss, ...], rates: tuple[float, ...]) -> Settings:
    return tuple((loss, rate) for loss in losses for rate in rates)


def tempered(*pairs: tuple[float, float]) -> tuple[Loss, ...]:
    return tuple(Loss("bi-tempered", pair) for pair in pairs)


LOGISTIC = (Loss("logistic"),)
MNIST, CIFAR100 = (DATASETS[name].training for name in ("mnist", "cifar100"))
TABLE1 = {
    "mnist": Table1(
        "mnist",
        MNIST,
        replace(MNIST, epochs=30),
        {
            "logistic": settings(LOGISTIC, (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0, 10.0)),
            "bi-tempered": settings(tempered((0.5, 4.0), (0.5, 2.0), (0.5, 1.3)), (0.3, 1.0, 3.0, 10.0)),
        },
        {
            "logistic": (99.40, 98.96, 98.70, 98.50, 97.64, 96.13),
            "bi-tempered": (99.24, 99.13, 99.02, 98.62, 98.56, 97.69),
        },
        "(0.5, 4)",
        quick_rows=2_560,
    ),
    "cifar100": Table1(
        "cifar100",
        CIFAR100,
        replace(CIFAR100, epochs=40, steps=None),
        {
            "logistic": settings(LOGISTIC, (0.02, 0.035, 0.05, 0.07, 0.1, 0.2)),
            "bi-tempered": settings(tempered((0.8, 1.2), (0.9, 1.1)), (0.05, 0.1, 0.2)),
        },
        {
            "logistic": (74.03, 69.94, 66.39, 63.00, 53.17, 52.96),
            "bi-tempered": (75.30, 73.30, 70.69, 67.45, 62.55, 57.80),
        },
        "(0.8, 1.2)",
        searched_at=(0.0, 0.2, 0.4),
        seeds=(0,),
        more_seeds={0.4: (1, 2)},
    ),
}  # fmt: skip
# As wide as Hardt and Ma's net, which the paper says it used: 16 times the work, so fewer cells.
TABLE1["cifar100-wide"] = replace(
    TABLE1["cifar100"],
    training=replace(CIFAR100, network="resnet56-wide"),
    search=replace(CIFAR100, network="resnet56-wide", epochs=15, steps=None),
    searched={
        "logistic": settings(LOGISTIC, (0.1, 0.2, 0.4, 0.8)),
        "bi-tempered": settings(tempered((0.8, 1.2)), (0.4, 0.8)) + settings(tempered((0.9, 1.1)), (0.2, 0.4)),
    },
    levels=(0.0, 0.4),
    searched_at=(0.4,),
    more_seeds={},
    quick_rows=128,
    extra_cells=(Cell(Loss("bi-tempered", (0.8, 1.2)), 0.4, 0.4),),  # the paper's temperatures, their better rate
)


def choose(dataset: str, network: str | None) -> tuple[str, Table1]:
    """Return the recipe of a data set, by default with its first network, and the recipe's name."""
    recipes = {name: recipe for name, recipe in TABLE1.items() if recipe.dataset == dataset}
    if not recipes:
        known = dict.fromkeys(recipe.dataset for recipe in TABLE1.values())
        raise ValueError(f"table 1 has no dataset {dataset!r}; choose from: {', '.join(known)}")
    for name, recipe in recipes.items():
        if network in (None, recipe.training.network):
            return name, recipe
    known = dict.fromkeys(recipe.training.network for recipe in recipes.values())
    raise ValueError(f"table 1 has no network {network!r} for {dataset}; choose from: {', '.join(known)}")


def quick(recipe: Table1) -> Table1:
    """Return a recipe for minutes on a laptop: few images, epochs and levels, no search. It shows no effect."""
    training = replace(recipe.training, epochs=2, steps=None, stairs=(), warmup=0)
    middle: dict[str, Settings] = {name: (tried[len(tried) // 2],) for name, tried in recipe.searched.items()}
    return replace(
        recipe, training=training, search=replace(training, epochs=1), searched=middle, levels=(0.0, 0.4), seeds=(0,),
        more_seeds={}, extra_cells=(), rows=recipe.quick_rows,
    )  # fmt: skip


def plan(what: str, options: Options) -> Plan:
    name, recipe = choose(options.dataset or "mnist", options.network)
    if options.quick:
        recipe = quick(recipe)
    if options.seeds is not None:
        recipe = replace(recipe, seeds=tuple(range(options.seeds)), more_seeds={})

    def make(folder: Path, progress: Progress) -> Table:
        rows, _ = reproduce(recipe, folder, progress, device=options.device, data_dir=options.data_dir)
        return table(recipe, rows)

    files = "table1.md, table1.csv, figure3.png, curves.jsonl, table1.jsonl (delete it to train again)"
    return Plan(f"table1-{name}", make, files)


def reproduce(
    recipe: Table1, folder: Path, progress: Progress, *, device: str, data_dir: Path | None
) -> tuple[list[Row], list[Row]]:
    """Search, train, and write table1.md, table1.csv and figure3.png; return the rows and the curves."""
    stages = prepare(recipe, progress, device, data_dir)
    chosen = search(recipe, folder / "search", stages)
    rows = [row for part in final(recipe, chosen) for row in stages.run(part, folder, "table1")]
    curves = curves_of(folder, rows)
    write(folder, pages(recipe, rows, curves))
    return rows, curves


def prepare(recipe: Table1, progress: Progress, device: str, data_dir: Path | None) -> Stages:
    """Read the data, and count the work of the search and of what follows it."""
    some = comparison(recipe, recipe.training, candidates(recipe, recipe.levels[0]), recipe.seeds)
    data = read_data(some, data_dir)
    runs = 0
    for level in recipe.levels:
        cells = len(recipe.searched) + sum(cell.noise == level for cell in recipe.extra_cells)
        runs += cells * (len(recipe.seeds) + len(recipe.more_seeds.get(level, ())))
    work = some.epochs(data) * runs + sum(part.work(data) for part in searches(recipe).values())
    return Stages(data, work, progress, device, data_dir)


def comparison(recipe: Table1, training: Training, cells: Iterable[Cell], seeds: tuple[int, ...]) -> Comparison:
    return Comparison(recipe.dataset, training, tuple(cells), seeds, rows=recipe.rows)


def candidates(recipe: Table1, level: float) -> list[Cell]:
    return [Cell(loss, level, rate) for tried in recipe.searched.values() for loss, rate in tried]


def searches(recipe: Table1) -> dict[float, Comparison]:
    """Return what the search trains at each of its noise levels; nothing if every loss has one setting."""
    if all(len(tried) == 1 for tried in recipe.searched.values()):
        return {}
    seeds = (SEARCH_SEED,)
    return {at: comparison(recipe, recipe.search, candidates(recipe, at), seeds) for at in searched(recipe)}


def search(recipe: Table1, folder: Path, stages: Stages) -> tuple[Cell, ...]:
    """Train every setting on the shortened schedule and return the best of each loss for each level."""
    chosen = {at: candidates(recipe, at) for at in searched(recipe)}
    for at, part in searches(recipe).items():
        chosen[at] = winners(recipe, stages.run(part, folder, "search", f"search, noise {at:.0%}: "))
    return cells_of(recipe, chosen)


def final(recipe: Table1, chosen: tuple[Cell, ...]) -> list[Comparison]:
    """Return what is trained to the end: the chosen and the extra cells, and some levels with more seeds."""
    cells = tuple(dict.fromkeys(chosen + recipe.extra_cells))
    return [
        comparison(recipe, recipe.training, cells, recipe.seeds),
        *(
            comparison(recipe, recipe.training, (cell for cell in cells if cell.noise == level), seeds)
            for level, seeds in recipe.more_seeds.items()
        ),
    ]


def pages(recipe: Table1, rows: list[Row], curves: list[Row]) -> Pages:
    """Return all files rendered from the rows."""
    return {
        "table1.csv": table_csv(rows),
        "table1.md": markdown(recipe, rows).encode(),
        "figure3.png": png(draw_figure3(recipe, curves)),
    }


def render(path: Path) -> Pages:
    """Render the pages of a file of rows again, for the settings that the search beside it chose."""
    folder, rows = path.parent, newest(read_rows(path), VARYING, FIXED)
    recipe = table_of(rows[0])
    if tried := read_rows(folder / "search" / "search.jsonl"):
        tried = newest(tried, VARYING, FIXED)
        at = {level: winners(recipe, [row for row in tried if row["noise"] == level]) for level in searched(recipe)}
        cells = cells_of(recipe, at)
        rows = [row for row in rows if Cell.of(row) in cells or Cell.of(row) in recipe.extra_cells]
    return pages(recipe, rows, curves_of(folder, rows))


def table_of(row: Row) -> Table1:
    """Return the recipe of a row, with the row's own training."""
    (recipe,) = (
        recipe
        for recipe in TABLE1.values()
        if (recipe.dataset, recipe.training.network) == (row["dataset"], row["network"])
    )
    return replace(
        recipe if row["rows"] is None else quick(recipe), training=comparison_of([row]).training, rows=row["rows"]
    )


def settings_from(recipe: Table1) -> dict[float, float]:
    """Map each level to the searched level whose settings it takes."""
    return {level: nearest(level, recipe.searched_at) for level in recipe.levels}


def searched(recipe: Table1) -> list[float]:
    return list(dict.fromkeys(settings_from(recipe).values()))


def winners(recipe: Table1, rows: list[Row]) -> list[Cell]:
    """Return the best cell of each loss on noisy validation labels."""
    return [
        best({Cell.of(row): [row] for row in rows if row["loss"] == name}, "validation_chosen")
        for name in recipe.searched
    ]


def cells_of(recipe: Table1, chosen: dict[float, list[Cell]]) -> tuple[Cell, ...]:
    """Return the cells of all levels, from those chosen at the searched levels."""
    return tuple(replace(cell, noise=level) for level, at in settings_from(recipe).items() for cell in chosen[at])


def extra(recipe: Table1, rows: list[Row]) -> tuple[Cell, ...]:
    """Return the extra cells that the search did not choose."""
    chosen = {(cell.noise, cell.loss.name) for row in rows if (cell := Cell.of(row)) not in recipe.extra_cells}
    return tuple(cell for cell in recipe.extra_cells if (cell.noise, cell.loss.name) in chosen)


def lines(recipe: Table1, rows: list[Row]) -> list[list[str]]:
    """Return a line per loss and epoch (chosen, last), with the paper's after each loss; extra cells come last."""
    extras = extra(recipe, rows)
    groups: dict[str, list[Row]] = {name: [] for name in recipe.searched}
    for row in rows:
        cell = Cell.of(row)
        groups.setdefault(str(cell.loss) if cell in extras else cell.loss.name, []).append(row)
    table_lines = []
    for name, group in groups.items():
        for column, moment in reversed(MOMENTS.items()):
            entries = (spread([row[column] for row in group if row["noise"] == level], 2) for level in recipe.levels)
            table_lines.append([f"{name}, {moment}", *entries])
        if name in recipe.paper:
            table_lines.append(paper_line(recipe, name, recipe.levels))
    return table_lines


def paper_line(recipe: Table1, name: str, levels: Iterable[float]) -> list[str]:
    """Return the paper's accuracies of a loss at these levels."""
    temperatures = f" {recipe.temperatures}" if name == "bi-tempered" else ""
    paper = dict(zip(LEVELS, recipe.paper[name], strict=True))
    return [f"{name}{temperatures}, paper", *(f"{paper[level]:.2f}" for level in levels)]


def names(recipe: Table1) -> list[str]:
    return [f"{recipe.dataset}, label noise", *(f"{level:.0%}" for level in recipe.levels)]


def table(recipe: Table1, rows: list[Row]) -> Table:
    """The table for a terminal."""
    title = titled(f"Accuracy on clean test labels, %, {seeds_by_level(rows, SPREAD)}", rows)
    return rich_table(title, names(recipe), lines(recipe, rows))


def markdown(recipe: Table1, rows: list[Row]) -> str:
    """The table as a page that says how it was made."""
    first, training, extras = rows[0], recipe.training, extra(recipe, rows)
    length = f"{training.steps:,} steps" if training.steps else f"{training.epochs} epochs"
    chosen = "\n".join(
        f"| {row['noise']:.0%} | {Cell.of(row).loss} | {row['learning_rate']:g} |"
        for row in rows
        if row["seed"] == first["seed"] and Cell.of(row) not in extras
    )
    fleets = dict.fromkeys((row["fleet"], row["seed"], row["fleet_seconds"]) for row in rows)
    times = {size: ", ".join(f"{seconds:.0f}" for n, _, seconds in fleets if n == size) for size, _, _ in fleets}
    cells = len(recipe.levels) * len(recipe.searched) + len(extras)
    took = (f"{'all ' if n == cells else ''}{n} cells of a seed in {seconds} s" for n, seconds in times.items())
    counts = " and ".join(f"{len(tried)} settings ({name})" for name, tried in recipe.searched.items())
    where = "Of each loss and level"
    if set(recipe.levels) - set(recipe.searched_at):
        levels = ", ".join(f"{at:.0%}" for at in recipe.searched_at)
        where = (
            f"Of each loss at {levels} noise (other levels use the nearest searched level's; the higher one if tied)"
        )
    searched = f"""{where} {counts} were
searched for {recipe.search.epochs} epochs on noisy validation labels, with a seed of their own:"""
    if all(len(tried) == 1 for tried in recipe.searched.values()):
        searched = "No setting was searched:"
    quick_note = ""
    if recipe.rows is not None:
        quick_note = (
            f"\nA quick look that shows no effect: only the first {recipe.rows:,} images of each part were used.\n"
        )
    trained = "".join(
        f"\nTrained as well: {cell.loss} at {cell.noise:.0%} noise, learning rate {cell.rate:g}.\n" for cell in extras
    )
    made = made_by(first, "\n")
    return f"""# {titled(f"Table 1, {recipe.dataset}, {training.network}", rows)}

Accuracy on clean test labels, %, {seeds_by_level(rows, SPREAD)}. The chosen epoch is the
first of the best on validation labels as noisy as the training labels.
{quick_note}
{grid(names(recipe), lines(recipe, rows))}

{training.network}, {training.optimizer}, batches of {training.batch_size}, {length}; symmetric noise over the other
classes. {searched}

| label noise | loss | learning rate |
| ---: | --- | ---: |
{chosen}
{trained}
{made}: {"; ".join(took)}.
"""


def draw_figure3(recipe: Table1, curves: list[Row]) -> Figure:
    """Draw accuracy by epoch on clean and noisy training labels and on the test set; bands are the range of seeds."""
    figure = Figure(figsize=(11, 6.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(PANELS), sharex=True, sharey="col")
    extras = extra(recipe, curves)
    shown = [row for row in curves if Cell.of(row) not in extras]
    losses, colours = list(recipe.searched), [f"C{i}" for i in range(len(recipe.levels))]
    for axes_row, loss in zip(panels, losses, strict=True):
        for axes, (column, title) in zip(axes_row, PANELS, strict=True):
            for level, colour in zip(recipe.levels, colours, strict=True):
                by_seed = [row[column] for row in shown if (row["loss"], row["noise"]) == (loss, level)]
                values = [[100 * value for value in epoch] for epoch in zip(*by_seed, strict=True)]
                epochs = range(1, len(values) + 1)
                axes.plot(epochs, [mean(v) for v in values], color=colour, linewidth=1, label=f"{level:.0%}")
                axes.fill_between(
                    epochs, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.25, linewidth=0
                )
            axes.grid(alpha=0.3)
            if loss == losses[0]:
                axes.set_title(title, fontsize="medium")
            else:
                axes.set_xlabel("epoch")
        axes_row[0].set_ylabel(f"{loss}: accuracy (%)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, title="label noise", loc="outside right center", frameon=False)
    seeds = seeds_by_level(curves, "mean of {} seeds, bands from the lowest to the highest")
    title = f"{recipe.dataset}, {recipe.training.network}: {seeds}"
    short = "" if recipe.rows is None else "A quick trial, which shows no effect: "
    figure.suptitle(short + title, fontsize="medium")
    return figure
