"""The recipe behind `bitempered reproduce other-noise`: label noise that is not symmetric, with nothing set by hand.

Networks train with three losses at Adam's usual rate: cross-entropy, generalized cross-entropy and the bi-tempered loss
with its default schedule. On the small data sets scikit-learn's classifiers and ours learn from the same noisy labels.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import sklearn
from matplotlib.figure import Figure
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from bitempered import schedules
from bitempered.experiments import cells, report
from bitempered.experiments.cells import FIXED, Cell, Comparison, corrupt, curves_of
from bitempered.experiments.data import Dataset, Part, fingerprint
from bitempered.experiments.datasets import DATASETS, default_training
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import LOSSES, Loss
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.recipes.shared import ADAM_RATE, DataUse, data_dir_of, part_progress
from bitempered.experiments.report import MOMENTS, Pages, grid, newest, spread
from bitempered.experiments.runs import Progress, Row, identity, measure_once, one_thread
from bitempered.experiments.train import Training
from bitempered.sklearn import BiTemperedLogisticRegression, BiTemperedMLPClassifier
from bitempered.sklearn.network import LOGISTIC_STEPS

__all__ = ["plan", "render"]

MODELS = ("pair-flip", "class-dependent", "weak-model")
LEVELS = (0.2, 0.4)
BINARY_LEVELS = (0.1, 0.2, 0.3)  # 40 % of two classes are nearly all that can be wrong
NAMES = {"logistic": "logistic", "gce": "gce (0.7)", "bi-tempered": "default schedule"}
HEAD = ["data", "noise", *NAMES.values(), "difference"]
ESTIMATORS: dict[str, Callable[..., Any]] = {
    "LogisticRegression": lambda epochs, seed: LogisticRegression(max_iter=10_000),
    "BiTemperedLogisticRegression": lambda epochs, seed: BiTemperedLogisticRegression(),
    "MLPClassifier": lambda epochs, seed: MLPClassifier(batch_size=32, max_iter=epochs, random_state=seed),
    "BiTemperedMLPClassifier": lambda epochs, seed: BiTemperedMLPClassifier(
        batch_size=32, max_iter=epochs, random_state=seed
    ),
}


DATA = (
    *(DataUse(name, default_training(name)) for name in ("digits", "breast-cancer", "wine")),
    DataUse("mnist", Training("mlp", "adam", epochs=30, batch_size=128), rows=10_000),
)
NO_ESTIMATORS = {"mnist"}  # where they would take longer than everything else


def comparison(data: DataUse, noise_model: str, seeds: int) -> Comparison:
    classes = DATASETS[data.name].num_classes
    losses = (Loss("logistic"), Loss("gce", (0.7,)), default_recipe(classes, data.training.epochs))
    levels = BINARY_LEVELS if classes == 2 else LEVELS
    compared = tuple(Cell(loss, level, ADAM_RATE) for level, loss in product(levels, losses))
    return Comparison(data.name, data.training, compared, tuple(range(seeds)), noise_model, rows=data.rows)


def plan(what: str, options: Options) -> Plan:
    seeds = options.seeds or (1 if options.quick else 5)
    used = [data.quick(rows=64) for data in DATA[:2]] if options.quick else DATA
    parts = [comparison(data, model, seeds) for data in used for model in MODELS]

    def make(folder: Path, progress: Progress) -> Table:
        for place, part in enumerate(parts):
            tell = part_progress(progress, place, len(parts), f"{part.dataset}, {part.noise_model}")
            read = cells.read_data(part, data_dir_of(part.dataset, options))
            cells.run(part, folder, tell, name=what, data=read)
            if part.dataset not in NO_ESTIMATORS:
                fit_estimators(part, read, folder, tell)
        report.write(folder, render(folder / f"{what}.jsonl"))
        rows = chosen_rows(folder / f"{what}.jsonl")
        return report.rich_table(title(rows), HEAD, lines(rows, deviations=False))

    files = (
        f"{what}.md, {what}.csv, {what}.png, curves.jsonl, {what}.jsonl and estimators.jsonl (delete to train again)"
    )
    return Plan(what, make, files)


@one_thread()
def fit_estimators(part: Comparison, data: Dataset, folder: Path, progress: Progress) -> None:
    """Fit each estimator to the labels of each noise level and seed, unless estimators.jsonl has its row."""
    rows, epochs = slice(part.rows), part.training.epochs
    for seed in part.seeds:
        progress(1, 1, f"seed {seed}: estimators")
        split = data.split(seed)
        for level in dict.fromkeys(cell.noise for cell in part.cells):
            labels, validation = (labels[rows] for labels in corrupt(part, split, level, seed))
            for name in ESTIMATORS:
                setting = {
                    "dataset": part.dataset, "noise_model": part.noise_model, "noise": level, "estimator": name,
                    "seed": seed, "rows": part.rows, "epochs": epochs,
                }  # fmt: skip
                if name == BiTemperedMLPClassifier.__name__:  # whose defaults are ours to change
                    leg = schedules.default(data.num_classes, epochs).legs[0]
                    setting["schedule"] = [*leg.end, leg.begin, leg.finish, LOGISTIC_STEPS]
                measure_once(
                    folder, "estimators", identity(setting, f"{data.digest}-{fingerprint(labels, validation)}"),
                    partial(fit, name, epochs, seed, (split.train[0][rows], labels), split.test), device="cpu",
                    on_wait=partial(progress, 1, 1, "waiting for another process, which is fitting estimators"),
                )  # fmt: skip


def fit(name: str, epochs: int, seed: int, train: Part, test: Part) -> Row:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # these epochs are what was asked for
        model = ESTIMATORS[name](epochs, seed).fit(*train)
    seconds = round(time.perf_counter() - started, 3)
    return {
        "test": float(np.mean(model.predict(test[0]) == test[1])), "seconds": seconds, "sklearn": sklearn.__version__,
    }  # fmt: skip


def chosen_rows(path: Path) -> list[Row]:
    """Return the newest row of each run in a file of networks, in the order of the table."""
    fixed = [name for name in FIXED if name not in ("dataset", "noise_model", "epochs", "batch_size", "rows")]
    # Not by its numbers: the default schedule is what it was when it was last trained.
    varying = ("dataset", "noise_model", "noise", "loss", "learning_rate", "seed")
    return in_order(newest(read_rows(path), varying, fixed))


def in_order(rows: list[Row]) -> list[Row]:
    names = [data.name for data in DATA]
    return sorted(rows, key=lambda row: (names.index(row["dataset"]), MODELS.index(row["noise_model"]), row["noise"]))


def render(path: Path) -> Pages:
    """Render the tables and the figure again from a file of rows and estimators.jsonl beside it."""
    rows, fitted = chosen_rows(path), read_rows(path.with_name("estimators.jsonl"))
    varying = ("dataset", "noise_model", "noise", "estimator", "seed")
    fitted = in_order(newest(fitted, varying, ())) if fitted else []
    return {
        f"{path.stem}.csv": report.table_csv(rows),
        f"{path.stem}.md": markdown(path.stem, rows, fitted).encode(),
        f"{path.stem}.png": report.png(figure(rows, path.parent)),
    }


def grouped(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of these names, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def accuracies(rows: list[Row], name: str) -> list[float]:
    """Return a value of rows, seed by seed."""
    return [row[name] for row in sorted(rows, key=lambda row: row["seed"])]


def gain(first: list[float], second: list[float]) -> str:
    """Return the mean difference in points and its standard deviation over seeds.

    >>> gain([0.5, 0.6], [0.6, 0.9]), gain([0.5], [0.4])
    ('+20.0 ± 14.1', '-10.0')
    """
    points = [100 * (b - a) for a, b in zip(first, second, strict=True)]
    return f"{mean(points):+.1f}" + (f" ± {stdev(points):.1f}" if len(points) > 1 else "")


def lines(rows: list[Row], deviations: bool) -> list[list[str]]:
    """Return the lines under `HEAD`, with or without standard deviations."""
    table_lines = []
    for (dataset, model, level), here in grouped(rows, "dataset", "noise_model", "noise").items():
        by_loss = {loss: [row for row in here if row["loss"] == loss] for loss in NAMES}
        gains = [gain(*(accuracies(by_loss[loss], at) for loss in ("logistic", "bi-tempered"))) for at in MOMENTS]
        table_lines.append(
            [
                dataset, f"{model} {level:.0%}",
                *(report.last_and_chosen(group, deviations=deviations) for group in by_loss.values()),
                " / ".join(text if deviations else text.partition(" ±")[0] for text in gains),
            ]
        )  # fmt: skip
    return table_lines


def estimator_lines(rows: list[Row]) -> list[list[str]]:
    """Return a line for each noise level: the accuracy of each estimator."""
    return [
        [
            dataset, f"{model} {level:.0%}",
            *(spread([row["test"] for row in here if row["estimator"] == name], 1) for name in ESTIMATORS),
        ]
        for (dataset, model, level), here in grouped(rows, "dataset", "noise_model", "noise").items()
    ]  # fmt: skip


def title(rows: list[Row]) -> str:
    return (
        report.titled("Other label noise, with nothing set by hand", rows)
        + f": accuracy on clean test labels, %, last / chosen epoch, mean over {report.seeds_in_words(rows)}"
    )


def markdown(name: str, rows: list[Row], fitted: list[Row]) -> str:
    network = f"A perceptron with two hidden layers of {rows[0]['width']} units"
    first, trained = rows[0], report.training_in_words(grouped(rows, "dataset").values())
    return f"""# {title(rows)}

{grid(HEAD, lines(rows, deviations=True), ["---", "---", *["---:"] * 4])}

± is the sample standard deviation. The difference is that of the default schedule and the logistic loss, seed
by seed. The chosen epoch is the best on validation labels, which are as noisy as the training labels.

Noise: pair-flip moves a fraction of all labels to the next class. In class-dependent noise some classes are mistaken
for others, and the level is the fraction of *their* labels (in digits and MNIST 7 for 1, 2 for 7, 5 for 6, 6 for 5 and
3 for 8: half of the labels; in breast-cancer malignant for benign; in wine two of three classes). In weak-model noise
the wrong labels are the mistakes of a linear model that learnt from 1 % of the training rows, at least three of each
class, the surest first: a fraction of all labels.

{network}, Adam at {first["learning_rate"]:g} for every loss. {trained}.

{report.made_by_commits(rows)}.

![]({name}.png)
{estimators_markdown(fitted) if fitted else ""}"""


def estimators_markdown(rows: list[Row]) -> str:
    return f"""
# Classifiers in scikit-learn's manner on the same noisy labels: accuracy on clean test labels, %

{grid(["data", "noise", *ESTIMATORS], estimator_lines(rows), ["---", "---", *["---:"] * 4])}

Parameters are the defaults, except that both networks take batches of 32 and at most as many epochs as those above.
BiTemperedMLPClassifier then follows the first leg of the default schedule; BiTemperedLogisticRegression has t1 = 0.8,
t2 = 1.2.

{report.made_by_commits(rows)}, and scikit-learn {rows[0]["sklearn"]}.
"""


def figure(rows: list[Row], folder: Path) -> Figure:
    """Draw accuracy by epoch at each highest noise level: a line of panels for each data set."""
    panels = grouped(rows, "dataset", "noise_model")
    datasets = list(dict.fromkeys(dataset for dataset, _ in panels))
    canvas = Figure(figsize=(11, 3.1 * len(datasets) + 0.5), dpi=110, layout="constrained")
    grid_of_axes = canvas.subplots(len(datasets), len(MODELS), squeeze=False)
    for (dataset, model), here in panels.items():
        axes, level = grid_of_axes[datasets.index(dataset), MODELS.index(model)], max(row["noise"] for row in here)
        for loss, name in NAMES.items():
            shown = [row for row in here if (row["loss"], row["noise"]) == (loss, level)]
            curves = [curve["test"] for curve in curves_of(folder, shown)]
            report.draw_curves(axes, curves, (LOSSES[loss].colour, "-"), name)
        axes.set_title(f"{dataset}, {model} {level:.0%}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.set_xlabel("epoch")
    for first in grid_of_axes[:, 0]:
        first.set_ylabel("accuracy on clean test labels (%)", fontsize="small")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(NAMES), frameon=False)
    canvas.suptitle("The highest noise levels: mean, and in bands ±1 standard deviation", fontsize="medium")
    return canvas
