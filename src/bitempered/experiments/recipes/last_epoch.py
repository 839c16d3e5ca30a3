"""The recipe behind `bitempered reproduce last-epoch`: the paper's MNIST, trained to the end without early stopping.

Each contender gets as many settings as the others. A search with its own seed tries them at three noise levels and
takes the best last epoch on noisy validation labels; the other levels take the nearest one's settings. The chosen
settings then train for all 500 epochs of the paper.
"""

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.cells import FIXED, VARYING, Cell, Comparison, Stages, curves_of, read_data
from bitempered.experiments.datasets import DATASETS
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.plans import SEARCH_SEED, Options, Plan
from bitempered.experiments.recipes.shared import best, nearest
from bitempered.experiments.recipes.table1 import LEVELS, PANELS, TABLE1, paper_line
from bitempered.experiments.report import (
    MOMENTS,
    Pages,
    draw_curves,
    grid,
    looks,
    made_by,
    newest,
    png,
    rich_table,
    seeds_in_words,
    spread,
    table_csv,
    titled,
    write,
)
from bitempered.experiments.runs import Progress, Row

__all__ = ["plan", "render"]

Settings = dict[str, tuple[tuple[Loss, float], ...]]  # losses with their learning rates, by contender

END = (0.5, 4.0)  # the paper's temperatures
CONTENDERS: Settings = {
    "logistic": tuple((Loss("logistic"), rate) for rate in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
    "bi-tempered (0.5, 4)": tuple((Loss("bi-tempered", END), rate) for rate in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
    "annealed to (0.5, 4)": tuple(
        (Loss("bi-tempered", END, epochs), rate) for epochs in ((2, 8), (5, 15)) for rate in (0.1, 0.3, 1.0)
    ),
}
SEARCHED_AT = (0.0, 0.2, 0.4)
TAKES = {level: nearest(level, SEARCHED_AT) for level in LEVELS}  # the searched level whose settings a level takes
SHOWN = (0.2, 0.4)  # in the figure
SHOWN_POINTS = 20  # below the best accuracy of a panel: the first epochs would hide the last ones
LOOKS = dict(zip(CONTENDERS, looks([("logistic", False), ("bi-tempered", False), ("bi-tempered", True)]), strict=True))
TRAINING = DATASETS["mnist"].training
SEARCH = replace(TRAINING, epochs=240)


def plan(what: str, options: Options) -> Plan:
    """With --quick: few images and epochs, two levels, which shows no effect."""
    seeds, rows = tuple(range(options.seeds or 1)), 512 if options.quick else None
    training, short = (replace(x, epochs=3 if options.quick else x.epochs) for x in (TRAINING, SEARCH))
    levels = (0.0, 0.4) if options.quick else LEVELS

    def compare(cells: list[Cell], seeds: tuple[int, ...], search: bool) -> Comparison:
        return Comparison("mnist", short if search else training, tuple(cells), seeds, rows=rows)

    def make(folder: Path, progress: Progress) -> Table:
        searches = {
            level: compare([Cell(loss, level, rate) for loss, rate in settings()], (SEARCH_SEED,), True)
            for level in dict.fromkeys(TAKES[level] for level in levels)
        }
        some = next(iter(searches.values()))
        data = read_data(some, options.data_dir)
        work = sum(part.work(data) for part in searches.values())
        work += len(levels) * len(CONTENDERS) * len(seeds) * training.epochs
        stages = Stages(data, work, progress, options.device, options.data_dir)
        tried = [
            row
            for level, part in searches.items()
            for row in stages.run(part, folder / "search", "search", f"search, noise {level:.0%}: ")
        ]
        cells = [cell for chosen_cells in chosen(tried, levels).values() for cell in chosen_cells]
        rows = stages.run(compare(list(dict.fromkeys(cells)), seeds, False), folder, what)
        write(folder, render(folder / f"{what}.jsonl"))
        return rich_table(title(rows), head(levels), lines(groups(rows, tried)))

    files = f"{what}.md, {what}.csv, {what}.png, curves.jsonl, {what}.jsonl (delete it to train again)"
    return Plan(what, make, files)


def settings() -> list[tuple[Loss, float]]:
    return [setting for candidates in CONTENDERS.values() for setting in candidates]


def chosen(tried: list[Row], levels: tuple[float, ...]) -> dict[str, list[Cell]]:
    """Return the cells of each contender, one for each level, by the last epoch's accuracy on noisy labels."""
    by_contender = {}
    for name, candidates in CONTENDERS.items():
        chosen_at = {}
        for at in dict.fromkeys(TAKES[level] for level in levels):
            cells = {Cell(loss, at, rate) for loss, rate in candidates}
            chosen_at[at] = best({Cell.of(row): [row] for row in tried if Cell.of(row) in cells}, "validation_last")
        by_contender[name] = [replace(chosen_at[TAKES[level]], noise=level) for level in levels]
    return by_contender


def render(path: Path) -> Pages:
    """Render the table and the figure again from a file of rows and the search beside it."""
    rows = newest(read_rows(path), VARYING, FIXED)
    tried = newest(read_rows(path.parent / "search" / "search.jsonl"), VARYING, FIXED)
    by_contender = groups(rows, tried)
    return {
        f"{path.stem}.csv": table_csv(rows),
        f"{path.stem}.md": markdown(path.stem, by_contender, tried).encode(),
        f"{path.stem}.png": png(figure(by_contender, path.parent)),
    }


def groups(rows: list[Row], tried: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each contender."""
    cells = chosen(tried, tuple(sorted({row["noise"] for row in rows})))
    return {name: [row for row in rows if Cell.of(row) in chosen_cells] for name, chosen_cells in cells.items()}


def head(levels: tuple[float, ...]) -> list[str]:
    return ["label noise", *(f"{level:.0%}" for level in levels)]


def lines(by_contender: dict[str, list[Row]]) -> list[list[str]]:
    """Return a line for each contender and moment, then the paper's."""
    levels = sorted({row["noise"] for rows in by_contender.values() for row in rows})
    table_lines = [
        [f"{name}, {moment}", *(spread([row[at] for row in rows if row["noise"] == level], 2) for level in levels)]
        for name, rows in by_contender.items()
        for at, moment in MOMENTS.items()
    ]
    recipe = TABLE1["mnist"]
    return table_lines + [paper_line(recipe, name, levels) for name in recipe.paper]


def title(rows: list[Row]) -> str:
    return f"{titled('MNIST trained to the end', rows)}: accuracy on clean test labels, %, {seeds_in_words(rows)}"


def markdown(name: str, by_contender: dict[str, list[Row]], tried: list[Row]) -> str:
    rows = [row for group in by_contender.values() for row in group]
    first, levels = rows[0], tuple(sorted({row["noise"] for row in rows}))
    table = grid(head(levels), lines(by_contender), ["---", *["---:"] * len(levels)])
    taken = grid(
        head(levels),
        [
            [contender, *(setting(next(row for row in group if row["noise"] == level)) for level in levels)]
            for contender, group in by_contender.items()
        ],
        ["---", *["---:"] * len(levels)],
    )
    count, searched = len(CONTENDERS["logistic"]), ", ".join(f"{at:.0%}" for at in sorted({r["noise"] for r in tried}))
    quick = f"\nA quick look that shows no effect: only {first['rows']} images of each part.\n" if first["rows"] else ""
    return f"""# {title(rows)}
{quick}
{table}

The paper says that its numbers are those of the epoch that noisy validation labels choose; its authors have said that
MNIST's are those of the last epoch (issue 3 of their repository). The chosen epoch is the best on validation
labels, which are as noisy as the training labels. {first["network"]}, {first["optimizer"]}, batches of
{first["batch_size"]}, {first["epochs"]} epochs, symmetric noise over the other classes. "Annealed" moves the
temperatures from (1, 1) during the epochs below.

Of each contender {count} settings were tried for {tried[0]["epochs"]} epochs at {searched} noise, with a seed of their
own. The best last epoch on noisy validation labels chose these learning rates (other levels take the nearest
one's, of two the higher):

{taken}

The last epoch of all settings that were tried, worst to best on clean test labels, which is what a rate can cost that
is not searched:

{ranges(tried)}
{other_schedules(tried)}
{made_by(first)}.

![]({name}.png)
"""


def setting(row: Row) -> str:
    epochs = f", epochs {row['schedule'][0]:g} to {row['schedule'][1]:g}" if row["schedule"] else ""
    return f"{row['learning_rate']:g}{epochs}"


def ranges(tried: list[Row]) -> str:
    """Return a table of each contender's worst and best last epoch over its settings, at the searched levels."""
    levels = sorted({row["noise"] for row in tried})
    lines = []
    for name, candidates in CONTENDERS.items():
        groups = ([row for row in tried if row["noise"] == level and of(row) in candidates] for level in levels)
        accuracies = [[100 * row["test_last"] for row in group] for group in groups]
        lines.append([name, *(f"{min(group):.2f} to {max(group):.2f}" for group in accuracies)])
    return grid(head(tuple(levels)), lines, ["---", *["---:"] * len(levels)])


def other_schedules(tried: list[Row]) -> str:
    """Say where the schedules of earlier contenders ended, and what they reached; nothing if there are none."""
    extra = [row for row in tried if of(row) not in settings()]
    if not extra:
        return ""
    ends = " and ".join(dict.fromkeys("({:g}, {:g})".format(*row["numbers"]) for row in extra))
    accuracies = [100 * row["test_last"] for row in extra]
    return f"""
Schedules that end at {ends} were tried as well, {len(extra)} settings at {extra[0]["noise"]:.0%} noise: their
last epochs are {min(accuracies):.2f} to {max(accuracies):.2f}.
"""


def of(row: Row) -> tuple[Loss, float]:
    return Loss.of(row), row["learning_rate"]


def figure(by_contender: dict[str, list[Row]], folder: Path) -> Figure:
    """Draw accuracy by epoch, as the paper's figure 3: true and noisy training labels, test labels."""
    levels = [level for level in SHOWN if any(row["noise"] == level for rows in by_contender.values() for row in rows)]
    canvas = Figure(figsize=(11, 3.3 * len(levels)), dpi=130, layout="constrained")
    panels = canvas.subplots(len(levels), len(PANELS), sharex=True, squeeze=False)
    for axes_row, level in zip(panels, levels, strict=True):
        for axes, (column, label) in zip(axes_row, PANELS, strict=True):
            for name, rows in by_contender.items():
                curves = curves_of(folder, [row for row in rows if row["noise"] == level])
                draw_curves(axes, [curve[column] for curve in curves], LOOKS[name], name)
            top = max(line.get_ydata().max() for line in axes.lines)
            axes.set_ylim(top - SHOWN_POINTS, top + 1)
            axes.set_title(label, fontsize="medium")
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel(f"{level:.0%} noise: accuracy (%)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return canvas
