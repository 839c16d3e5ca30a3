"""The recipe behind `bitempered reproduce defaults`: the default temperatures, nothing set by hand, trained to the end.

Both losses, and generalized cross-entropy beside them, train at the rate that people already use, SGD's 0.05 and Adam's
0.001. Cross-entropy also trains at other rates; the one with the best last epoch on noisy validation labels is shown.
"""

from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments import cells, report
from bitempered.experiments.cells import FIXED, Cell, Comparison, curves_of
from bitempered.experiments.datasets import DATASETS
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.recipes.shared import ADAM_RATE, LEVELS, DataUse, best, data_dir_of, part_progress
from bitempered.experiments.report import MOMENTS, Pages
from bitempered.experiments.runs import Progress, Row
from bitempered.experiments.train import Training

__all__ = ["plan", "render"]

RATES = {"sgd": 0.05, "adam": ADAM_RATE}  # those that both losses train at
SLOWER = {"sgd": (0.01, 0.003, 0.001), "adam": (3e-4, 1e-4, 3e-5)}  # for cross-entropy alone
NAMES = {"sgd": "SGD", "adam": "Adam"}
LOGISTIC, GCE = Loss("logistic"), Loss("gce", (0.7,))
HEAD = ["training", "noise", "logistic", str(GCE), "default schedule", "difference", "logistic, best rate"]


DATA = (
    DataUse("digits", Training("mlp", "adam", epochs=150, batch_size=125)),
    DataUse("mnist", Training("mlp", "adam", epochs=30, batch_size=128), rows=10_000),
)


def comparison(data: DataUse, optimizer: str, seeds: int) -> Comparison:
    training = replace(data.training, optimizer=optimizer)
    rate, ours = RATES[optimizer], default_recipe(DATASETS[data.name].num_classes, training.epochs)
    compared = [
        cell
        for level in LEVELS
        for cell in (
            Cell(ours, level, rate), Cell(GCE, level, rate),
            *(Cell(LOGISTIC, level, other) for other in (rate, *SLOWER[optimizer])),
        )
    ]  # fmt: skip
    return Comparison(data.name, training, tuple(compared), tuple(range(seeds)), rows=data.rows)


def plan(what: str, options: Options) -> Plan:
    seeds = options.seeds or (1 if options.quick else 5)
    used = [data.quick(rows=128) for data in DATA[:1]] if options.quick else DATA
    parts = [comparison(data, optimizer, seeds) for data in used for optimizer in RATES]

    def make(folder: Path, progress: Progress) -> Table:
        rows: list[Row] = []
        for place, part in enumerate(parts):
            tell = part_progress(progress, place, len(parts), f"{part.dataset}, {part.training.optimizer}")
            data_dir = data_dir_of(part.dataset, options)
            rows += cells.run(part, folder, tell, name=what, device=options.device, data_dir=data_dir)
        report.write(folder, render(folder / f"{what}.jsonl"))
        return report.rich_table(title(rows), HEAD, lines(split(rows), deviations=False))

    files = f"{what}.md, {what}.csv, {what}.png, curves.jsonl, {what}.jsonl (delete it to train again)"
    return Plan(what, make, files)


def render(path: Path) -> Pages:
    """Render the table and the figure again from a file of rows."""
    fixed = [name for name in FIXED if name not in ("dataset", "optimizer", "epochs", "batch_size", "rows")]
    # Not by its numbers: the default schedule is what it was when it was last trained.
    varying = ("dataset", "optimizer", "noise", "loss", "learning_rate", "seed")
    rows = report.newest(read_rows(path), varying, fixed)
    parts = split(rows)
    return {
        f"{path.stem}.csv": report.table_csv(rows),
        f"{path.stem}.md": markdown(path.stem, parts).encode(),
        f"{path.stem}.png": report.png(figure(parts, path.parent)),
    }


def split(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each data set and optimiser, SGD first."""
    rows = sorted(rows, key=lambda row: (row["dataset"], row["optimizer"] == "adam"))
    return [list(part) for _, part in groupby(rows, key=lambda row: (row["dataset"], row["optimizer"]))]


def contenders(rows: list[Row], level: float) -> dict[str, list[Row]]:
    """Return the rows at a noise level of each contender, the logistic loss last again at its best rate."""
    here = [row for row in rows if row["noise"] == level]
    ours, gce = ([row for row in here if row["loss"] == name] for name in ("bi-tempered", "gce"))
    logistic = {
        rate: [row for row in here if row["loss"] == "logistic" and row["learning_rate"] == rate]
        for rate in rates(here)
    }
    return {
        "logistic": logistic[ours[0]["learning_rate"]], str(GCE): gce, "default schedule": ours,
        "logistic, best rate": logistic[best(logistic, "validation_last")],
    }  # fmt: skip


def rates(rows: list[Row]) -> list[float]:
    """Return the rates of the logistic loss, the highest first."""
    return sorted({row["learning_rate"] for row in rows if row["loss"] == "logistic"}, reverse=True)


def levels(rows: list[Row]) -> list[float]:
    return sorted({row["noise"] for row in rows})


def name_of(rows: list[Row]) -> str:
    """Name a data set, its optimiser and the rate that both losses train at."""
    ours = next(row for row in rows if row["loss"] == "bi-tempered")
    return f"{ours['dataset']}, {NAMES[ours['optimizer']]} {ours['learning_rate']:g}"


def lines(parts: list[list[Row]], deviations: bool) -> list[list[str]]:
    """Return the lines under `HEAD`, with or without standard deviations."""
    accuracies = partial(report.last_and_chosen, deviations=deviations)
    table_lines = []
    for rows in parts:
        for level in levels(rows):
            logistic, gce, ours, best = contenders(rows, level).values()
            gains = [mean(row[at] for row in ours) - mean(row[at] for row in logistic) for at in MOMENTS]
            table_lines.append(
                [
                    name_of(rows), f"{level:.0%}", *map(accuracies, (logistic, gce, ours)),
                    " / ".join(f"{100 * gain:+.1f}" for gain in gains),
                    f"{best[0]['learning_rate']:g}: {accuracies(best)}",
                ]
            )  # fmt: skip
    return table_lines


def title(rows: list[Row]) -> str:
    return (
        report.titled("The default schedule, with nothing set by hand", rows)
        + f": accuracy on clean test labels, %, last / chosen epoch, mean over {report.seeds_in_words(rows)}"
    )


def markdown(name: str, parts: list[list[Row]]) -> str:
    first = parts[0][0]
    makers: dict[str, list[Row]] = {}
    for row in (row for rows in parts for row in rows):
        makers.setdefault(f"{row['dataset']}, {row['loss']}", []).append(row)
    made = "\n".join(f"{name}: {report.made_by_commits(rows)}." for name, rows in makers.items())
    return f"""# {title(parts[0])}

{report.grid(HEAD, lines(parts, deviations=True), ["---", *["---:"] * 6])}

± is the sample standard deviation. The chosen epoch is the best on validation labels, which are as noisy as
the training labels. The difference is that of the default schedule and the logistic loss. The default schedule moves
the temperatures from (1, 1) {schedule(parts[0])}, at the rate of the
logistic loss. It was chosen among some forty schedules on digits and MNIST, split in other ways, by
their accuracy on clean labels: first how it moves up to 40% of the run, then what follows (the rows of most are in the
repository, in results/defaults/search). The last column is the logistic loss at another rate, the one of
{len(rates(parts[0]))} whose last epoch is best on the noisy validation labels.

SGD has momentum {first["momentum"]:g}. A perceptron with two hidden layers of {first["width"]} units.
{report.training_in_words(parts[::2])}.

{made}

![]({name}.png)
"""


def schedule(rows: list[Row]) -> str:
    """Say where the default schedule ends, during which part of the run it moves, and what it passes through."""
    ours = next(row for row in rows if row["loss"] == "bi-tempered")
    (t1, t2), epochs, (begin, *between, finish) = ours["numbers"], ours["epochs"], ours["schedule"]
    places = [
        f", through ({t1:g}, {t2:g}) at {epoch / epochs:.0%}"
        for epoch, t1, t2 in zip(between[::3], between[1::3], between[2::3], strict=True)
    ]
    return f"to ({t1:g}, {t2:g}) between {begin / epochs:.0%} and {finish / epochs:.0%} of the run{''.join(places)}"


def figure(parts: list[list[Row]], folder: Path) -> Figure:
    """Draw accuracy by epoch at the highest noise level, a panel for each data set and optimiser."""
    names = ("logistic", str(GCE), "default schedule", "logistic, best rate")
    losses = [("logistic", False), ("gce", False), ("bi-tempered", True), ("logistic", False)]
    look = dict(zip(names, report.looks(losses), strict=True))
    canvas = Figure(figsize=(9.5, 3.4 * -(-len(parts) // 2)), dpi=150, layout="constrained")
    panels = canvas.subplots(-(-len(parts) // 2), 2, squeeze=False).flat
    for axes, rows in zip(panels, parts, strict=True):
        for name, group in contenders(rows, levels(rows)[-1]).items():
            label = f"{name}, {group[0]['learning_rate']:g}" if "best" in name else name
            report.draw_curves(axes, [curve["test"] for curve in curves_of(folder, group)], look[name], label)
        axes.set_title(name_of(rows), fontsize="medium")
        axes.set_xlabel("epoch")
        axes.set_ylabel("accuracy on clean test labels (%)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    canvas.suptitle(f"{levels(parts[0])[-1]:.0%} wrong labels: mean and ±1 standard deviation", fontsize="medium")
    return canvas
