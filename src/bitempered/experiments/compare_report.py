"""What `bitempered compare` shows of its rows: a table, notes on how to read it, and a figure."""

import textwrap
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bitempered.experiments.cells import NOT_FINITE, Cell, Comparison
from bitempered.experiments.datasets import DATASETS, is_table
from bitempered.experiments.losses import Loss
from bitempered.experiments.report import (
    MARKS,
    MOMENTS,
    Pages,
    draw_curves,
    grid,
    looks,
    loss_names,
    made_by,
    noise_in_words,
    png,
    spread,
    table_csv,
)
from bitempered.experiments.runs import Row

__all__ = ["figure", "lines", "markdown", "notes", "pages", "table"]

NAME_WIDTH = 50  # characters of a line in the figure's legend
MARK: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 2, "linewidth": 1}  # of a chosen epoch


def pages(comparison: Comparison, rows: list[Row], tried: list[Row], curves: list[Row]) -> Pages:
    """Return all files rendered from the rows, from those of the search, and from the metrics by epoch."""
    # A resumed comparison has its rows in another order.
    ordered = sorted(rows, key=lambda row: (row["seed"], comparison.cells.index(Cell.of(row))))
    return {
        "compare.csv": table_csv(ordered),
        "compare.md": markdown(comparison, rows, tried).encode(),
        "compare.png": png(figure(comparison, rows, curves)),
    }


def losses(comparison: Comparison) -> list[Loss]:
    return list(dict.fromkeys(cell.loss for cell in comparison.cells))


def loss_name(comparison: Comparison, loss: Loss) -> str:
    return loss_names(losses(comparison))[loss]


def levels(comparison: Comparison) -> list[float]:
    return list(dict.fromkeys(cell.noise for cell in comparison.cells))


def level_name(comparison: Comparison, level: float) -> str:
    """Name a noise level. The labels of a table may be wrong before any noise is added."""
    if is_table(comparison.dataset):
        return f"+{100 * level:g}%" if level else "as given"
    return f"{100 * level:g}%"


def places(comparison: Comparison) -> list[tuple[float, Loss, Cell | None]]:
    """Return the table's lines in their order; a loss that a level lacks has a line without a cell."""
    listed: list[tuple[float, Loss, Cell | None]] = []
    for level in levels(comparison):
        for loss in losses(comparison):
            here = [cell for cell in comparison.cells if (cell.noise, cell.loss) == (level, loss)]
            listed += [(level, loss, cell) for cell in here] or [(level, loss, None)]
    return listed


def rows_of(rows: list[Row], cell: Cell | None) -> list[Row]:
    """Return the rows of one cell, seed by seed."""
    return [row for row in rows if Cell.of(row) == cell]


def header(comparison: Comparison) -> str:
    as_given = levels(comparison) == [0.0]  # noise is added to the other rows alone
    clean = (
        "clean test labels" if labels_are_clean(comparison)
        else "test labels as noisy as the rest" if as_given else "test labels as given"
    )  # fmt: skip
    level = f", {level_name(comparison, levels(comparison)[0])} label noise" if len(levels(comparison)) == 1 else ""
    if is_table(comparison.dataset) and as_given:
        level = ", labels as given"
    deviation = " ± sample standard deviation" if len(comparison.seeds) > 1 else ""
    name = Path(comparison.dataset).name
    return f"{name}{level}: accuracy on {clean}, %, mean{deviation}, n = {seeds(comparison)}"


def seeds(comparison: Comparison) -> str:
    return f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"


def labels_are_clean(comparison: Comparison) -> bool:
    return comparison.test_file is not None or not is_table(comparison.dataset)


def head(comparison: Comparison) -> list[str]:
    return [*(["label noise"] if len(levels(comparison)) > 1 else []), "loss", "rate", *MOMENTS.values()]


def lines(comparison: Comparison, rows: list[Row]) -> list[list[str]]:
    """Return the lines under `head`; a run with a problem marks its line with an exclamation mark."""
    table_lines = []
    for level, loss, cell in places(comparison):
        runs = rows_of(rows, cell)
        mark = " !" if any(row.get("problem") for row in runs) else ""
        rate = f"{cell.rate:g}" if cell else "–"
        accuracies = [spread([row[column] for row in runs], 1) for column in MOMENTS]
        table_lines.append([level_name(comparison, level), f"{loss_name(comparison, loss)}{mark}", rate, *accuracies])
    return table_lines if len(levels(comparison)) > 1 else [line[1:] for line in table_lines]


def table(comparison: Comparison, rows: list[Row]) -> Table:
    """Return the results as a table for the terminal."""
    terminal_table = Table(
        title=header(comparison), title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False,
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    names = [name.replace("label ", "") for name in head(comparison)]
    for name in names:
        terminal_table.add_column(
            name, justify="left" if name in ("noise", "loss") else "right", no_wrap=name != "loss"
        )
    previous = None
    for place, line in zip(places(comparison), lines(comparison, rows), strict=True):
        if previous not in (None, place[0]):
            terminal_table.add_section()
        shown = ["" if place[0] == previous else line[0], *line[1:]] if names[0] == "noise" else line
        terminal_table.add_row(*shown)
        previous = place[0]
    return terminal_table


def notes(comparison: Comparison, rows: list[Row], tried: list[Row]) -> list[str]:
    """Return what a reader must know, a line each: what went wrong, labels, epochs, rates, and the default schedule."""
    return [
        *problem_notes(comparison, rows),
        label_note(comparison),
        *model_notes(comparison),
        f"{comparison.training.epochs} epochs. Chosen epoch: the best on validation labels, which are as noisy as the "
        "training labels.",
        *rate_notes(comparison, tried),
        *schedule_notes(comparison),
        *unfinished_notes(comparison, rows),
    ]


def label_note(comparison: Comparison) -> str:
    """Say which labels are wrong, and which are clean."""
    if not is_table(comparison.dataset):
        if comparison.noise_model == "human":
            return "The labels to train and validate on are those that people gave; the test labels are clean."
        noise = f"The noise ({comparison.noise_model}) is in the labels to train and validate on"
        return f"{noise}; the test labels are clean."
    noise = "Labels are used as given; no noise is added."
    if any(levels(comparison)):
        noise = f"Noise ({comparison.noise_model}) is added to the labels to train and validate on."
    if comparison.test_file is not None:
        test = Path(comparison.test_file).name
        return f"{noise} The test labels are those of {test}, taken to be clean."
    return (
        f"{noise} The test rows are a fifth of the same table, with its labels. If some of those are wrong, accuracy "
        "is bounded: with 40% wrong, even a perfect model scores about 60%. --test FILE names a table with clean "
        "labels."
    )


def model_notes(comparison: Comparison) -> list[str]:
    """Say which labels are wrong, and what the noise level is a fraction of, if the model's name does not."""
    if not any(levels(comparison)):
        return []
    if comparison.noise_model == "weak-model":
        return [
            "weak-model: the wrong labels are mistakes of a linear model that learnt from 1% of the training rows, the "
            "surest first."
        ]
    if comparison.noise_model != "class-dependent":
        return []
    known = DATASETS[comparison.dataset].mistaken if comparison.dataset in DATASETS else None
    which = "half of the classes, each for one other"
    if known:
        which = ", ".join(f"{label} for {other}" for label, other in known.items())
    return [f"class-dependent: some classes are mistaken ({which}); the noise is the fraction of their labels."]


def rate_notes(comparison: Comparison, tried: list[Row]) -> list[str]:
    """Say which rates were tried, and name the losses whose best rate is the first or last of them."""
    rates: dict[Loss, list[float]] = {
        loss: sorted({row["learning_rate"] for row in tried if Cell.of(row).loss == loss})
        for loss in losses(comparison)
    }
    searched = [grid for grid in rates.values() if grid]
    if not searched:
        return ["Rates: as given, not searched."]
    rates_each, seeds_each = len(searched[0]), len({row["seed"] for row in tried})
    grids = list(dict.fromkeys(", ".join(f"{rate:g}" for rate in grid) for grid in searched))
    fixed = [cell for cell in comparison.cells if cell.rate not in rates[cell.loss]]
    each = f"each loss{' and noise level' if len(levels(comparison)) > 1 else ''}"
    notes_on_rates = [
        f"Rates: for {each} the best of {' or '.join(grids)} on noisy validation labels, at the last and the best "
        f"epoch together. Equal budgets: {rates_each} rates x {seeds_each} seeds of their own = "
        f"{rates_each * seeds_each} trials for each{' without a given rate' if fixed else ''}."
    ]
    at_edge = [
        loss_name(comparison, cell.loss)
        + (f" at {level_name(comparison, cell.noise)}" if len(levels(comparison)) > 1 else "")
        for cell in comparison.cells
        if len(rates[cell.loss]) > 1 and cell.rate in (rates[cell.loss][0], rates[cell.loss][-1])
    ]
    if at_edge:
        notes_on_rates.append(
            f"The best rate is the first or last that was tried for: {'; '.join(at_edge)}. --rates tries others."
        )
    return notes_on_rates


def schedule_notes(comparison: Comparison) -> list[str]:
    return [
        f"{name}: the temperatures move from (1, 1), cross-entropy, to these between epochs {loss.schedule[0]:g} and "
        f"{loss.schedule[-1]:g}{loss.passes}."
        for loss, name in loss_names(losses(comparison)).items()
        if loss.schedule
    ]


def problem_notes(comparison: Comparison, rows: list[Row]) -> list[str]:
    """Name the runs that did not learn or gave up a class, and say what to try."""
    problems: list[str] = []
    advice: dict[str, None] = {}
    for level, loss, cell in places(comparison):
        here = rows_of(rows, cell)
        bad = [row for row in here if row.get("problem")]
        if not bad:
            continue
        where = f" at {level_name(comparison, level)}" if len(levels(comparison)) > 1 else ""
        runs = f"{len(bad)} of {len(here)} runs"
        problems.append(f"! {loss_name(comparison, loss)}{where}, {runs}: {bad[0]['problem']} (validation rows).")
        if bad[0]["problem"] == NOT_FINITE:
            advice["smaller learning rates (--rates)"] = None
        else:
            advice |= dict.fromkeys(("larger learning rates (--rates)", "more --epochs"))
            if loss.name != "logistic" and not loss.schedule:
                advice["bi-tempered without numbers, which starts as cross-entropy"] = None
    return [*problems, f"! To try: {'; '.join(advice)}."] if problems else []


def unfinished_notes(comparison: Comparison, rows: list[Row]) -> list[str]:
    total = len(places(comparison)) * len(comparison.seeds)
    return [f"Not finished: {len(rows)} of {total} runs."] if len(rows) < total else []


def markdown(comparison: Comparison, rows: list[Row], tried: list[Row]) -> str:
    """Return the results as a Markdown page."""
    training, names = comparison.training, head(comparison)
    seconds = sum(dict.fromkeys((row["seed"], row["fleet"], row["fleet_seconds"]) for row in rows + tried), ())
    footer = (
        f"{made_by(rows[0])}, in {sum(seconds[2::3]):.0f} s of training. "
        f"{training.network}, {training.optimizer}, batches of {training.batch_size}."
    )
    align = ["---" if name == "loss" else "---:" for name in names]
    text = "\n\n".join(notes(comparison, rows, tried))
    table = grid(names, lines(comparison, rows), align)
    return f"# {header(comparison)}\n\n{table}\n\n{text}\n\n{footer}\n\n![](compare.png)\n"


def figure(comparison: Comparison, rows: list[Row], curves: list[Row]) -> Figure:
    """Draw accuracy by epoch at the lowest and at the highest noise level, and a mark at each chosen epoch."""
    shown = list(dict.fromkeys([min(levels(comparison)), max(levels(comparison))]))
    series = list(dict.fromkeys((cell.loss, cell.rate) for cell in comparison.cells))
    series_looks = looks([(loss.name, bool(loss.schedule)) for loss, _ in series])
    several = [loss for loss in losses(comparison) if sum(loss == other for other, _ in series) > 1]
    # The figure object itself, not pyplot: it needs no display and keeps no global state.
    names = [
        textwrap.fill(loss_name(comparison, loss) + (f", rate {rate:g}" if loss in several else ""), NAME_WIDTH)
        for loss, rate in series
    ]
    in_legend = len(series) + sum(name.count("\n") for name in names)  # lines
    width, height = 4.5 * len(shown) + 0.5, 3.6 + 0.22 * -(-in_legend // len(shown))
    canvas = Figure(figsize=(width, height), dpi=150, layout="constrained")
    panels = canvas.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, level in zip(panels, shown, strict=True):
        for (loss, rate), look, name in zip(series, series_looks, names, strict=True):
            cell = Cell(loss, level, rate)
            draw_curves(axes, [curve["test"] for curve in rows_of(curves, cell)], look, name)
            chosen = rows_of(rows, cell)
            if chosen:
                when, value = (mean(row[column] for row in chosen) for column in ("chosen_epoch", "test_chosen"))
                axes.plot([when], [100 * value], MARKS[look[1]], **MARK, color=look[0])
        for style in dict.fromkeys(style for _, style in series_looks):
            axes.plot([], [], MARKS[style] + style, **MARK, color="grey", label="chosen epoch, mean")
        axes.set_title(
            f"labels {level_name(comparison, level)}"
            if is_table(comparison.dataset)
            else noise_in_words(level, comparison.noise_model)
        )
        axes.set_xlabel("epoch")
        if comparison.training.epochs == 1:
            axes.set_xticks([1])
        axes.grid(alpha=0.3)
    later = [
        100 * min(curve["test"][len(curve["test"]) // 5 :])
        for curve in curves
        if len(curve["test"]) > 1 and curve["noise"] in shown
    ]
    if later:  # the first climb would leave little room for the rest
        panels[0].set_ylim(bottom=max(0, 10 * (min(later) // 10) - 10))
    kind = "clean test labels" if labels_are_clean(comparison) else "test labels"
    panels[0].set_ylabel(f"accuracy on {kind} (%)")
    band = ", bands ±1 standard deviation" if len(comparison.seeds) > 1 else ""
    canvas.suptitle(f"{Path(comparison.dataset).name}, mean over {seeds(comparison)}{band}", fontsize="medium")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), frameon=False)
    return canvas
