"""The recipe behind `bitempered reproduce other-noise`: label noise that is not symmetric, with nothing set by hand.

Networks train with three losses at Adam's usual rate: cross-entropy, generalized cross-entropy and the bi-tempered loss
with its default recipe. On the small data sets scikit-learn's classifiers and ours learn from the same noisy labels.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
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

from bitempered.experiments import cells
from bitempered.experiments.cells import FIXED, VARYING, Cell, Comparison, corrupt, curves_of
from bitempered.experiments.data import Dataset, fingerprint
from bitempered.experiments.datasets import DATASETS, default_training
from bitempered.experiments.files import append_rows, read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.report import (
    Pages,
    grid,
    maker,
    newest,
    png,
    rich_table,
    seeds_in_words,
    spread,
    table_csv,
    write,
)
from bitempered.experiments.runs import Progress, Row, find, identity, one_thread, provenance, today
from bitempered.experiments.train import Training
from bitempered.sklearn import BiTemperedLogisticRegression, BiTemperedMLPClassifier

__all__ = ["plan", "render"]

MODELS = ("pair-flip", "class-dependent", "weak-model")
LEVELS = (0.2, 0.4)
BINARY_LEVELS = (0.1, 0.2, 0.3)  # 40 % of two classes are nearly all that can be wrong
RATE = 1e-3
NAMES = {"logistic": "logistic", "gce": "gce (0.7)", "bi-tempered": "default recipe"}
MOMENTS = ("test_last", "test_chosen")
HEAD = ["data", "noise", *NAMES.values(), "difference"]
ESTIMATORS: dict[str, Callable[..., Any]] = {
    "LogisticRegression": lambda epochs, seed: LogisticRegression(max_iter=10_000),
    "BiTemperedLogisticRegression": lambda epochs, seed: BiTemperedLogisticRegression(),
    "MLPClassifier": lambda epochs, seed: MLPClassifier(batch_size=32, max_iter=epochs, random_state=seed),
    "BiTemperedMLPClassifier": lambda epochs, seed: BiTemperedMLPClassifier(
        batch_size=32, max_iter=epochs, random_state=seed
    ),
}


@dataclass(frozen=True)
class Data:
    """A data set, how many of its rows to use, and how to train on them."""

    name: str
    training: Training
    rows: int | None = None
    estimators: bool = True

    def comparison(self, noise_model: str, seeds: int) -> Comparison:
        classes = DATASETS[self.name].num_classes
        losses = (Loss("logistic"), Loss("gce", (0.7,)), default_recipe(classes, self.training.epochs))
        levels = BINARY_LEVELS if classes == 2 else LEVELS
        found = tuple(Cell(loss, level, RATE) for level, loss in product(levels, losses))
        return Comparison(self.name, self.training, found, tuple(range(seeds)), noise_model, rows=self.rows)


DATA = (
    *(Data(name, default_training(name)) for name in ("digits", "breast-cancer", "wine")),
    # On MNIST the estimators would take longer than everything else.
    Data("mnist", Training("mlp", "adam", epochs=30, batch_size=128), rows=10_000, estimators=False),
)
QUICK = tuple(replace(data, training=replace(data.training, epochs=2), rows=64) for data in DATA[:2])


def plan(what: str, options: Options) -> Plan:
    seeds = options.seeds or (1 if options.quick else 5)
    parts = [(data, data.comparison(model, seeds)) for data in (QUICK if options.quick else DATA) for model in MODELS]

    def make(folder: Path, progress: Progress) -> Table:
        for place, (data, part) in enumerate(parts):

            def tell(done: int, of: int, text: str, place: int = place, part: Comparison = part) -> None:
                progress(
                    100 * place + 100 * done // of, 100 * len(parts), f"{part.dataset}, {part.noise_model}, {text}"
                )

            read = cells.read_data(part, options.data_dir if DATASETS[data.name].source else None)
            cells.run(part, folder, tell, name=what, data=read)
            if data.estimators:
                fit_estimators(part, read, folder, tell)
        write(folder, render(folder / f"{what}.jsonl"))
        rows = chosen_rows(folder / f"{what}.jsonl")
        return rich_table(title(rows), HEAD, lines(rows, deviations=False))

    files = (
        f"{what}.md, {what}.csv, {what}.png, curves.jsonl, {what}.jsonl and estimators.jsonl (delete to train again)"
    )
    return Plan(f"{what}{'-quick' if options.quick else ''}", make, files)


@one_thread()
def fit_estimators(part: Comparison, data: Dataset, folder: Path, progress: Progress) -> None:
    """Fit each estimator to the labels of each noise level and seed, unless estimators.jsonl has its row."""
    path, rows, epochs = folder / "estimators.jsonl", slice(part.rows), part.training.epochs
    kept, where_made = read_rows(path), {**provenance(), "sklearn": sklearn.__version__}
    for seed in part.seeds:
        split, made = data.split(seed), []
        for level in dict.fromkeys(cell.noise for cell in part.cells):
            train, validation = (labels[rows] for labels in corrupt(part, split, level, seed))
            for name, estimator in ESTIMATORS.items():
                setting = {
                    "dataset": part.dataset, "noise_model": part.noise_model, "noise": level, "estimator": name,
                    "seed": seed, "rows": part.rows, "epochs": epochs,
                }  # fmt: skip
                run = identity(setting, f"{data.digest}-{fingerprint(train, validation)}")
                if find(kept, run) is not None:
                    continue
                started = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)  # these epochs are what was asked for
                    model = estimator(epochs, seed).fit(split.train[0][rows], train)
                seconds = round(time.perf_counter() - started, 3)
                test = float(np.mean(model.predict(split.test[0]) == split.test[1]))
                made.append({**run, **where_made, "test": test, "seconds": seconds, "date": today()})
        append_rows(path, made)
        progress(1, 1, f"seed {seed}: estimators")


def chosen_rows(path: Path) -> list[Row]:
    """Return the newest row of each run in a file of networks, in the order of the table."""
    fixed = [name for name in FIXED if name not in ("dataset", "noise_model", "epochs", "batch_size", "rows")]
    return in_order(newest(read_rows(path), ("dataset", "noise_model", *VARYING), fixed))


def in_order(rows: list[Row]) -> list[Row]:
    names = [data.name for data in DATA]
    return sorted(rows, key=lambda row: (names.index(row["dataset"]), MODELS.index(row["noise_model"]), row["noise"]))


def render(path: Path) -> Pages:
    """Render the tables and the figure again from a file of rows and estimators.jsonl beside it."""
    rows, fitted = chosen_rows(path), read_rows(path.with_name("estimators.jsonl"))
    varying = ("dataset", "noise_model", "noise", "estimator", "seed")
    fitted = in_order(newest(fitted, varying, ())) if fitted else []
    return {
        f"{path.stem}.csv": table_csv(rows),
        f"{path.stem}.md": markdown(path.stem, rows, fitted).encode(),
        f"{path.stem}.png": png(figure(rows, path.parent)),
    }


def grouped(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of these names, in the order of the rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


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

    def short(text: str) -> str:
        return text if deviations else text.partition(" ±")[0]

    made = []
    for (dataset, model, level), here in grouped(rows, "dataset", "noise_model", "noise").items():
        by_loss = {loss: [row for row in here if row["loss"] == loss] for loss in NAMES}
        found = {loss: [accuracies(by_loss[loss], at) for at in MOMENTS] for loss in NAMES}
        gains = [gain(a, b) for a, b in zip(found["logistic"], found["bi-tempered"], strict=True)]
        made.append(
            [
                dataset, f"{model} {level:.0%}",
                *(" / ".join(short(spread(values, 1)) for values in found[loss]) for loss in NAMES),
                " / ".join(map(short, gains)),
            ]
        )  # fmt: skip
    return made


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
        "Other label noise, with nothing set by hand: accuracy on clean test labels, %, "
        f"last / chosen epoch, mean over {seeds_in_words(rows)}"
    )


def markdown(name: str, rows: list[Row], fitted: list[Row]) -> str:
    trained = "; ".join(
        f"{dataset}: {here[0]['epochs']} epochs in batches of {here[0]['batch_size']}"
        + (f", {here[0]['rows']:,} training rows" if here[0]["rows"] else "")
        for (dataset,), here in grouped(rows, "dataset").items()
    )
    return f"""# {title(rows)}

{grid(HEAD, lines(rows, deviations=True), ["---", "---", *["---:"] * 4])}

After ± stands the sample standard deviation. The difference is that of the default recipe and the logistic loss, seed
by seed. The chosen epoch is the best on validation labels, which are as noisy as the training labels.

Noise: pair-flip moves a fraction of all labels to the next class. In class-dependent noise some classes are mistaken
for others, and the level is the fraction of *their* labels (in digits and MNIST 7 for 1, 2 for 7, 5 for 6, 6 for 5 and
3 for 8: half of the labels; in breast-cancer malignant for benign; in wine two of three classes). In weak-model noise
the wrong labels are the mistakes of a linear model that learnt from 1 % of the training rows, at least three of each
class, the surest first: a fraction of all labels.

A perceptron with two hidden layers of {rows[0]["width"]} units, Adam at {RATE:g} for every loss. {trained}.

{made_by_commits(rows)}.

![]({name}.png)
{estimators_markdown(fitted) if fitted else ""}"""


def made_by_commits(rows: list[Row]) -> str:
    """Say which commits made the rows, on what and until when."""
    commits = sorted({row["commit"] for row in rows})
    made = maker(rows[0], f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
    return f"{made}, {max(row['date'] for row in rows)}"


def estimators_markdown(rows: list[Row]) -> str:
    return f"""
# Classifiers in scikit-learn's manner on the same noisy labels: accuracy on clean test labels, %

{grid(["data", "noise", *ESTIMATORS], estimator_lines(rows), ["---", "---", *["---:"] * 4])}

Parameters are the defaults, except that both networks take batches of 32 and at most as many epochs as those above.
BiTemperedMLPClassifier then follows the default schedule; BiTemperedLogisticRegression has t1 = 0.8, t2 = 1.2.

{made_by_commits(rows)}, and scikit-learn {rows[0]["sklearn"]}.
"""


def figure(rows: list[Row], folder: Path) -> Figure:
    """Draw accuracy by epoch at each highest noise level: a line of panels for each data set."""
    colours = {"logistic": "tab:orange", "gce": "tab:green", "bi-tempered": "tab:blue"}
    panels = grouped(rows, "dataset", "noise_model")
    datasets = list(dict.fromkeys(dataset for dataset, _ in panels))
    canvas = Figure(figsize=(11, 3.1 * len(datasets) + 0.5), dpi=110, layout="constrained")
    grid_of_axes = canvas.subplots(len(datasets), len(MODELS), squeeze=False)
    for (dataset, model), here in panels.items():
        axes, level = grid_of_axes[datasets.index(dataset), MODELS.index(model)], max(row["noise"] for row in here)
        for loss, colour in colours.items():
            found = [row for row in here if (row["loss"], row["noise"]) == (loss, level)]
            accuracy = 100 * np.array([curve["test"] for curve in curves_of(folder, found)])
            epochs, centre = range(1, 1 + accuracy.shape[1]), accuracy.mean(0)
            axes.plot(epochs, centre, color=colour, label=NAMES[loss])
            if len(accuracy) > 1:
                deviation = accuracy.std(0, ddof=1)
                axes.fill_between(epochs, centre - deviation, centre + deviation, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(f"{dataset}, {model} {level:.0%}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.set_xlabel("epoch")
    for first in grid_of_axes[:, 0]:
        first.set_ylabel("accuracy on clean test labels (%)", fontsize="small")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(colours), frameon=False)
    canvas.suptitle("The highest noise levels: mean, and in bands ±1 standard deviation", fontsize="medium")
    return canvas
