"""What a comparison found: a table for the terminal, the same in Markdown, and a figure."""

import io
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.compare import LOSSES, Comparison

__all__ = ["figure", "markdown", "table"]

Rows = list[dict[str, Any]]
# Column of a row, name in the reports, line style in the figure.
MOMENTS = (("test_last", "last epoch", "-"), ("test_chosen", "chosen epoch", "--"))


def summarise(rows: Rows, level: float, loss: str, column: str) -> tuple[float, float | None]:
    """Return mean and sample standard deviation over the seeds, in per cent; none of one seed."""
    values = [100 * row[column] for row in rows if (row["noise"], row["loss"]) == (level, loss)]
    return mean(values), stdev(values) if len(values) > 1 else None


def header(recipe: Comparison) -> str:
    spread = " ± sample standard deviation" if recipe.seeds > 1 else ""
    return f"Clean-test accuracy on {recipe.dataset}, %: mean{spread}, n = {seeds(recipe)}"


def seeds(recipe: Comparison) -> str:
    return f"{recipe.seeds} seed{'s' if recipe.seeds > 1 else ''}"


def footer(recipe: Comparison) -> str:
    return (
        f"bi-tempered: t1 = {recipe.t1:g}, t2 = {recipe.t2:g}; {recipe.epochs} epochs. "
        "Chosen epoch: best accuracy on validation labels as noisy as the training labels."
    )


def cells(recipe: Comparison, rows: Rows) -> list[list[str]]:
    """Return the table's lines: the noise level, then each loss at each moment."""
    lines = []
    for level in recipe.noise:
        line = [f"{100 * level:g}%"]
        for column, _, _ in MOMENTS:
            for loss in LOSSES:
                centre, spread = summarise(rows, level, loss, column)
                line.append(f"{centre:.1f}" + ("" if spread is None else f" ± {spread:.1f}"))
        lines.append(line)
    return lines


def table(recipe: Comparison, rows: Rows) -> Table:
    """Return the results as a rich table."""
    result = Table(title=header(recipe), caption=footer(recipe), caption_justify="left")
    result.add_column("label\nnoise", justify="right")
    for _, moment, _ in MOMENTS:
        for loss in LOSSES:
            result.add_column(f"{loss}\n{moment}", justify="right")
    for line in cells(recipe, rows):
        result.add_row(*line)
    return result


def markdown(recipe: Comparison, rows: Rows) -> str:
    """Return the results as a Markdown page."""
    names = ["label noise", *(f"{loss}, {moment}" for _, moment, _ in MOMENTS for loss in LOSSES)]
    lines = [names, ["---:"] * len(names), *cells(recipe, rows)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    origin = rows[0]
    made = (
        f"Made by bitempered {origin['bitempered']} (commit {origin['commit']}) with torch "
        f"{origin['torch']} on {origin['device']}, in {sum(row['seconds'] for row in rows):.0f} s "
        f"of training. Adam, batches of {recipe.batch_size}, learning rate "
        f"{recipe.logistic_rate:g} (logistic) and {recipe.bi_tempered_rate:g} (bi-tempered)."
    )
    return f"# {header(recipe)}\n\n{grid}\n\n{footer(recipe)}\n\n{made}\n\n![](compare.png)\n"


def figure(recipe: Comparison, rows: Rows) -> bytes:
    """Return accuracy against label noise as a PNG."""
    # The figure object itself, not pyplot: it needs no display and keeps no global state.
    canvas = Figure(figsize=(7, 4.6), dpi=150, layout="constrained")
    axes = canvas.subplots()
    levels = [100 * level for level in recipe.noise]
    names = {"logistic": "logistic", "bi-tempered": f"bi-tempered ({recipe.t1:g}, {recipe.t2:g})"}
    for loss, colour in zip(LOSSES, ("tab:orange", "tab:blue"), strict=True):
        for column, moment, style in MOMENTS:
            summary = [summarise(rows, level, loss, column) for level in recipe.noise]
            centre = [value for value, _ in summary]
            axes.plot(
                levels, centre, style, marker="o", markersize=4, color=colour,
                label=f"{names[loss]}, {moment}",
            )  # fmt: skip
            if recipe.seeds > 1:
                low = [value - (spread or 0) for value, spread in summary]
                high = [value + (spread or 0) for value, spread in summary]
                axes.fill_between(levels, low, high, color=colour, alpha=0.15, linewidth=0)
    band = ", bands ±1 standard deviation" if recipe.seeds > 1 else ""
    axes.set_title(f"{recipe.dataset}, mean over {seeds(recipe)}{band}", fontsize="medium")
    axes.set_xlabel("wrong labels in training and validation (%)")
    axes.set_ylabel("accuracy on clean test labels (%)")
    axes.set_xticks(levels)
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside lower center", ncols=2, frameon=False)
    png = io.BytesIO()
    canvas.savefig(png, format="png")
    return png.getvalue()
