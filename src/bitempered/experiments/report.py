"""What a comparison found: a table for the terminal, the same in Markdown, and a figure."""

from statistics import mean, stdev

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.compare import Comparison, Row
from bitempered.experiments.losses import Loss

__all__ = ["figure", "markdown", "table"]

# Column of a row, name in the reports, line style in the figure.
MOMENTS = (("test_last", "last epoch", "-"), ("test_chosen", "chosen epoch", "--"))


def losses(recipe: Comparison) -> list[Loss]:
    return list(dict.fromkeys(cell.loss for cell in recipe.cells))


def levels(recipe: Comparison) -> list[float]:
    return list(dict.fromkeys(cell.noise for cell in recipe.cells))


def summarise(rows: list[Row], level: float, loss: Loss, column: str) -> tuple[float, float | None]:
    """Return mean and sample standard deviation over the seeds, in per cent; none of one seed."""
    wanted = (level, loss.name, list(loss.numbers))
    values = [100 * row[column] for row in rows if (row["noise"], row["loss"], row["numbers"]) == wanted]
    return mean(values), stdev(values) if len(values) > 1 else None


def header(recipe: Comparison) -> str:
    spread = " ± sample standard deviation" if len(recipe.seeds) > 1 else ""
    return f"Clean-test accuracy on {recipe.dataset}, %: mean{spread}, n = {seeds(recipe)}"


def seeds(recipe: Comparison) -> str:
    return f"{len(recipe.seeds)} seed{'s' if len(recipe.seeds) > 1 else ''}"


def footer(recipe: Comparison) -> str:
    kind = "" if recipe.noise_model == "symmetric" else f"{recipe.noise_model} noise; "
    return (
        f"{kind}{recipe.training.epochs} epochs. "
        "Chosen epoch: best accuracy on validation labels as noisy as the training labels."
    )


def cells(recipe: Comparison, rows: list[Row]) -> list[list[str]]:
    """Return the table's lines: the noise level, then each loss at each moment."""
    lines = []
    for level in levels(recipe):
        line = [f"{100 * level:g}%"]
        for column, _, _ in MOMENTS:
            for loss in losses(recipe):
                centre, spread = summarise(rows, level, loss, column)
                line.append(f"{centre:.1f}" + ("" if spread is None else f" ± {spread:.1f}"))
        lines.append(line)
    return lines


def table(recipe: Comparison, rows: list[Row]) -> Table:
    """Return the results as a rich table."""
    result = Table(title=header(recipe), caption=footer(recipe), caption_justify="left")
    result.add_column("label\nnoise", justify="right")
    for _, moment, _ in MOMENTS:
        for loss in losses(recipe):
            result.add_column(f"{loss}\n{moment}", justify="right")
    for line in cells(recipe, rows):
        result.add_row(*line)
    return result


def markdown(recipe: Comparison, rows: list[Row]) -> str:
    """Return the results as a Markdown page."""
    names = ["label noise", *(f"{loss}, {moment}" for _, moment, _ in MOMENTS for loss in losses(recipe))]
    lines = [names, ["---:"] * len(names), *cells(recipe, rows)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    origin, training = rows[0], recipe.training
    rates = ", ".join(f"{rate:g} ({loss})" for loss, rate in dict.fromkeys((c.loss, c.rate) for c in recipe.cells))
    seconds = sum({row["seed"]: row["fleet_seconds"] for row in rows}.values())
    made = (
        f"Made by bitempered {origin['bitempered']} (commit {origin['commit']}) with torch "
        f"{origin['torch']} on {origin['device']}, {origin['date']}, in {seconds:.0f} s of training. "
        f"{training.network}, {training.optimizer}, batches of {training.batch_size}, learning rate {rates}."
    )
    return f"# {header(recipe)}\n\n{grid}\n\n{footer(recipe)}\n\n{made}\n\n![](compare.png)\n"


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
            summary = [summarise(rows, level, loss, column) for level in levels(recipe)]
            centre = [value for value, _ in summary]
            axes.plot(shares, centre, style, marker="o", markersize=4, color=colour, label=f"{loss}, {moment}")
            if len(recipe.seeds) > 1:
                low = [value - (spread or 0) for value, spread in summary]
                high = [value + (spread or 0) for value, spread in summary]
                axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    band = ", bands ±1 standard deviation" if len(recipe.seeds) > 1 else ""
    axes.set_title(f"{recipe.dataset}, mean over {seeds(recipe)}{band}", fontsize="medium")
    axes.set_xlabel("wrong labels in training and validation (%)")
    axes.set_ylabel("accuracy on clean test labels (%)")
    axes.set_xticks(shares)
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside lower center", ncols=2, frameon=False)
    return canvas
