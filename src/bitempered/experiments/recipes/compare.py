"""The recipe behind `bitempered compare`: losses side by side at several noise levels, as a table and a figure."""

from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.cells import Cell, Comparison
from bitempered.experiments.datasets import default_training
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.report import Pages, grid, made_by, newest, png, rich_table, spread, table_csv
from bitempered.experiments.runs import Row
from bitempered.experiments.train import Training

__all__ = ["comparison", "figure", "markdown", "pages", "render", "table"]

DEFAULT_RATES = {"adam": 3e-4, "adadelta": 1.0, "sgd": 0.1}
# Column of a row, name in the reports, line style in the figure.
MOMENTS = (("test_last", "last epoch", "-"), ("test_chosen", "chosen epoch", "--"))
VARYING = ("noise", "loss", "numbers", "learning_rate", "seed")  # among the runs of one comparison
FIXED = ("dataset", "noise_model", "label_column", "rows", *(field.name for field in fields(Training)))


def comparison(
    dataset: str = "digits",
    losses: tuple[Loss, ...] = (Loss("logistic"), Loss("bi-tempered", (0.2, 1.2))),
    levels: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    seeds: int = 5,
    epochs: int | None = None,
    rates: tuple[float, ...] | None = None,
    noise_model: str = "symmetric",
    label_column: str = "label",
    network: str | None = None,
) -> Comparison:
    """The recipe of `bitempered compare`: all losses at all levels, one learning rate for each loss.

    The defaults are for digits. Their rates and temperatures were searched on noisy validation labels, with seeds that
    the results do not use: benchmarks/search_compare.py has the grid, and its rows are beside it. Each loss has
    the rate that is best at the chosen epoch. Of the temperature pairs within the search's noise (a few tenths) of the
    best at that epoch, we took the best at the last one. So the bi-tempered loss had nine times the logistic one's
    search. Rates were not chosen at the last epoch, where the smallest wins for either loss: it stops before it
    memorises.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    training = default_training(dataset)
    if network is not None:
        training = replace(training, network=network)
    if epochs is not None:
        training = replace(training, epochs=epochs, steps=None)
    if rates is None:
        rates = (DEFAULT_RATES[training.optimizer],) * len(losses)
    if len(set(losses)) < len(losses):
        raise ValueError(f"each loss can be named once, got {', '.join(map(str, losses))}")
    if len(rates) not in (1, len(losses)):
        raise ValueError(f"there must be one learning rate for each of the {len(losses)} losses, got {len(rates)}")
    if len(rates) < len(losses):
        rates *= len(losses)
    # Sorted, without repeats: the order of the given levels does not matter.
    cells = tuple(
        Cell(loss, level, rate)
        for level in sorted({float(level) for level in levels})
        for loss, rate in zip(losses, rates, strict=True)
    )
    return Comparison(dataset, training, cells, tuple(range(seeds)), noise_model, label_column)


def pages(recipe: Comparison, rows: list[Row]) -> Pages:
    """Return all files rendered from the rows."""
    return {
        "compare.csv": table_csv(rows),
        "compare.md": markdown(recipe, rows).encode(),
        "compare.png": png(figure(recipe, rows)),
    }


def render(path: Path) -> Pages:
    """Render the pages of a file of rows again."""
    rows = newest(read_rows(path), VARYING, FIXED)
    return pages(recipe_of(rows), rows)


def recipe_of(rows: list[Row]) -> Comparison:
    """Return the comparison that rows belong to."""
    first = rows[0]
    cells = {Cell(Loss(row["loss"], tuple(row["numbers"])), row["noise"], row["learning_rate"]): None for row in rows}
    return Comparison(
        first["dataset"], training_of(first), tuple(sorted(cells, key=lambda cell: cell.noise)),
        tuple(sorted({row["seed"] for row in rows})), first["noise_model"], first.get("label_column", "label"),
        first["rows"],
    )  # fmt: skip


def training_of(row: Row) -> Training:
    values = {field.name: row.get(field.name, inf) for field in fields(Training)}  # JSON has no infinity
    return Training(**values | {"stairs": tuple(row["stairs"])})


def losses(recipe: Comparison) -> list[Loss]:
    return list(dict.fromkeys(cell.loss for cell in recipe.cells))


def levels(recipe: Comparison) -> list[float]:
    return list(dict.fromkeys(cell.noise for cell in recipe.cells))


def values(rows: list[Row], level: float, loss: Loss, column: str) -> list[float]:
    """Return the accuracies of one cell, seed by seed."""
    wanted = (level, loss.name, list(loss.numbers))
    return [row[column] for row in rows if (row["noise"], row["loss"], row["numbers"]) == wanted]


def header(recipe: Comparison) -> str:
    deviation = " ± sample standard deviation" if len(recipe.seeds) > 1 else ""
    return f"Clean-test accuracy on {recipe.dataset}, %: mean{deviation}, n = {seeds(recipe)}"


def seeds(recipe: Comparison) -> str:
    return f"{len(recipe.seeds)} seed{'s' if len(recipe.seeds) > 1 else ''}"


def footer(recipe: Comparison, rows: list[Row]) -> str:
    kind = "" if recipe.noise_model == "symmetric" else f"{recipe.noise_model} noise; "
    total = len(levels(recipe)) * len(losses(recipe)) * len(recipe.seeds)
    part = f" Not finished: {len(rows)} of {total} runs." if len(rows) < total else ""
    return (
        f"{kind}{recipe.training.epochs} epochs. "
        f"Chosen epoch: best accuracy on validation labels as noisy as the training labels.{part}"
    )


def cells(recipe: Comparison, rows: list[Row]) -> list[list[str]]:
    """Return the table's lines: the noise level, then each loss at each moment."""
    return [
        [
            f"{100 * level:g}%",
            *(spread(values(rows, level, loss, column), 1) for column, _, _ in MOMENTS for loss in losses(recipe)),
        ]
        for level in levels(recipe)
    ]


def table(recipe: Comparison, rows: list[Row]) -> Table:
    """Return the results as a table for the terminal."""
    head = ["label\nnoise", *(f"{loss}\n{moment}" for _, moment, _ in MOMENTS for loss in losses(recipe))]
    return rich_table(header(recipe), head, cells(recipe, rows), footer(recipe, rows))


def markdown(recipe: Comparison, rows: list[Row]) -> str:
    """Return the results as a Markdown page."""
    head = ["label noise", *(f"{loss}, {moment}" for _, moment, _ in MOMENTS for loss in losses(recipe))]
    training = recipe.training
    rates = ", ".join(f"{rate:g} ({loss})" for loss, rate in dict.fromkeys((c.loss, c.rate) for c in recipe.cells))
    seconds = sum({row["seed"]: row["fleet_seconds"] for row in rows}.values())
    made = (
        f"{made_by(rows[0])}, in {seconds:.0f} s of training. "
        f"{training.network}, {training.optimizer}, batches of {training.batch_size}, learning rate {rates}."
    )
    table = grid(head, cells(recipe, rows))
    return f"# {header(recipe)}\n\n{table}\n\n{footer(recipe, rows)}\n\n{made}\n\n![](compare.png)\n"


def figure(recipe: Comparison, rows: list[Row]) -> Figure:
    """Draw accuracy against label noise."""
    # The figure object itself, not pyplot: it needs no display and keeps no global state.
    canvas = Figure(figsize=(7, 4.2 + 0.2 * len(losses(recipe))), dpi=150, layout="constrained")
    axes = canvas.subplots()
    shares = [100 * level for level in levels(recipe)]
    for place, loss in enumerate(losses(recipe)):
        # Orange for the first, blue for the second, then matplotlib's own order.
        colour = ("tab:orange", "tab:blue", "tab:green", "tab:red", "tab:purple", "tab:brown")[place % 6]
        for column, moment, style in MOMENTS:
            found = [[100 * value for value in values(rows, level, loss, column)] for level in levels(recipe)]
            centre = [mean(cell) if cell else nan for cell in found]
            axes.plot(shares, centre, style, marker="o", markersize=4, color=colour, label=f"{loss}, {moment}")
            if len(recipe.seeds) > 1:
                deviation = [stdev(cell) if len(cell) > 1 else 0 for cell in found]
                low, high = ([m + sign * d for m, d in zip(centre, deviation, strict=True)] for sign in (-1, 1))
                axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    band = ", bands ±1 standard deviation" if len(recipe.seeds) > 1 else ""
    axes.set_title(f"{recipe.dataset}, mean over {seeds(recipe)}{band}", fontsize="medium")
    axes.set_xlabel("wrong labels in training and validation (%)")
    axes.set_ylabel("accuracy on clean test labels (%)")
    axes.set_xticks(shares)
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside lower center", ncols=2, frameon=False)
    return canvas
