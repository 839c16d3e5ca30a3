"""Whether noisy validation labels choose the robust model: digits, with noise that is spread evenly and systematic.

    python benchmarks/choosing.py
    python benchmarks/choosing.py --render

It needs the extra experiments. Networks with several losses train on 1,000 digits with wrong labels. The best is chosen
on 300 other rows that are as noisy, or on 100 clean ones, and tested on clean labels. `bitempered.audit` looks at the
noisy training labels and says whether it finds confused classes. Writes benchmarks/choosing.jsonl and choosing.md.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

from bitempered import noise
from bitempered.audit import audit
from bitempered.experiments.audits import classifier
from bitempered.experiments.cells import confused_classes
from bitempered.experiments.report import grid, made_by, measure_or_render, spread
from bitempered.experiments.runs import provenance, today

ROWS = Path(__file__).with_suffix(".jsonl")
TRAIN, NOISY, CLEAN = 1000, 300, 100  # rows to train on and to choose on; the rest are test rows
SEEDS = range(5)
RATE = 0.4
NOISE: dict[str, Callable[..., np.ndarray]] = {
    "symmetric": lambda y, rng: noise.symmetric(y, RATE, rng=rng, num_classes=10),
    "pair-flip": lambda y, rng: noise.pair_flip(y, RATE, rng=rng, num_classes=10),
    "class-dependent": lambda y, rng: noise.asymmetric(y, RATE, rng=rng, mapping=confused_classes("digits", 10)),
}
MODELS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"t1": 1.0, "t2": 1.0},
    "(0.8, 1.2)": {"t1": 0.8, "t2": 1.2},
    "(0.5, 1.5)": {"t1": 0.5, "t2": 1.5},
    "default schedule": {},
}

Row = dict[str, Any]


def run_one(noise_model: str, seed: int) -> list[Row]:
    X, y = load_digits(return_X_y=True)
    order, rng = np.random.default_rng(seed).permutation(len(y)), np.random.default_rng(seed)
    X, y = (X[order] / 16).astype(np.float32), y[order]
    given = NOISE[noise_model](y[: TRAIN + NOISY], rng)
    train, noisy, clean, test = np.split(np.arange(len(y)), np.cumsum([TRAIN, NOISY, CLEAN]))
    rows = []
    for name, options in MODELS.items():
        model = classifier(TRAIN).set_params(random_state=seed, **options).fit(X[train], given[train])
        row = {"model": name, "noisy": model.score(X[noisy], given[noisy]), "clean": model.score(X[clean], y[clean])}
        rows.append(row | {"test": model.score(X[test], y[test])})
    pairs = len(audit(classifier(TRAIN).set_params(random_state=seed), X[train], given[train]).systematic)
    return [{"noise_model": noise_model, "seed": seed, **row, "pairs": pairs} for row in rows]


def chosen(rows: list[Row], by: str) -> list[float]:
    """The test accuracy of the model that is best on these labels, for each seed; the first if tied."""
    return [max((row for row in rows if row["seed"] == seed), key=lambda row: row[by])["test"] for seed in SEEDS]


def page(rows: list[Row]) -> str:
    accuracies, choices = [], []
    for noise_model in NOISE:
        here = [row for row in rows if row["noise_model"] == noise_model]
        for name in MODELS:
            cell = [row for row in here if row["model"] == name]
            found = [spread([row[column] for row in cell], 1) for column in ("noisy", "clean", "test")]
            accuracies.append([noise_model, name, *found])
        said = sum(row["pairs"] > 0 for row in here if row["model"] == "cross-entropy")
        picked = [chosen(here, by) for by in ("noisy", "clean", "test")]
        gain = f"{100 * (mean(picked[1]) - mean(picked[0])):+.1f}"
        choices.append([noise_model, f"{said} of {len(SEEDS)}", *(spread(values, 1) for values in picked), gain])
    columns = ["noise", "loss", f"on {NOISY} noisy rows", f"on {CLEAN} clean rows", "test"]
    head = ["noise", "`audit` finds confused classes", "chosen on noisy rows", f"on {CLEAN} clean rows", "best", "gain"]
    return f"""# Which validation labels choose the better model?

Digits, {RATE:.0%} noise (class-dependent: of half of the classes), {len(SEEDS)} seeds; accuracy on clean test labels of
the network that is chosen, %. The gain is that of choosing on clean rows.

{grid(head, choices, ["---", *["---:"] * 5])}

What there is to choose from, accuracy in %:

{grid(columns, accuracies, ["---", "---", *["---:"] * 3])}

The default schedule is that of `BiTemperedMLPClassifier`, the first leg of that for networks.

{made_by(rows[0])}.
"""


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is given
        return [row | made_on for noise_model in NOISE for seed in SEEDS for row in run_one(noise_model, seed)]


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
