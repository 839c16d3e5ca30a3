"""Do rare classes look like noise to a robust loss? Digits, half of the classes cut to a tenth or 30 % of their rows.

    python benchmarks/rare_classes.py              (needs the extras sklearn and experiments)
    python benchmarks/rare_classes.py --render     writes the page again, from the rows

A network trains with cross-entropy, with constant temperatures and with its default schedule, as they are and with rows
weighted so that all classes weigh the same. Test rows have clean labels, and no class is rare among them. Writes
benchmarks/rare_classes.jsonl, one row per fit, and benchmarks/rare_classes.md.
"""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils.class_weight import compute_sample_weight

from bitempered import noise
from bitempered.experiments.audits import classifier
from bitempered.experiments.report import grid, made_by, measure_or_render, spread
from bitempered.experiments.runs import provenance, today

ROWS = Path(__file__).with_suffix(".jsonl")
CLASSES = 10
RARE = (1, 3, 5, 7, 9)
TRAIN = 1000  # rows to train on, about 100 of each class, before the rare ones are cut
KEPT = (10, 30)  # rows of each rare class
NOISE = (0.0, 0.2, 0.4)
SEEDS = range(5)
MODELS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"t1": 1.0, "t2": 1.0},
    "(0.8, 1.2)": {"t1": 0.8, "t2": 1.2},
    "default schedule": {},
}

Row = dict[str, Any]


def cut(y: np.ndarray, kept: int, rng: np.random.Generator) -> np.ndarray:
    """Return the places of the rows that stay: all of the common classes, `kept` of each rare one."""
    rare = [rng.choice(np.flatnonzero(y == c), kept, replace=False) for c in RARE]
    return np.sort(np.concatenate([np.flatnonzero(~np.isin(y, RARE)), *rare]))


def run_one(kept: int, level: float, seed: int) -> list[Row]:
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    train, test = train_test_split(np.arange(len(y)), train_size=TRAIN, stratify=y, random_state=seed)
    rng = np.random.default_rng(seed)
    train = train[cut(y[train], kept, rng)]
    given = noise.symmetric(y[train], level, rng=rng, num_classes=CLASSES)
    rows = []
    for name, temperatures in MODELS.items():
        for balanced in (False, True):
            model = classifier(len(train)).set_params(random_state=seed, **temperatures)
            weights = compute_sample_weight("balanced", given) if balanced else None
            right = model.fit(X[train], given, sample_weight=weights).predict(X[test]) == y[test]
            rare = np.isin(y[test], RARE)
            rows.append(
                {
                    "kept": kept, "noise": level, "seed": seed, "model": name, "balanced": balanced,
                    "rare": float(right[rare].mean()), "common": float(right[~rare].mean()),
                }
            )  # fmt: skip
    return rows


def page(rows: list[Row]) -> str:
    def here(kept: int, level: float, name: str, balanced: bool) -> list[Row]:
        wanted = {"kept": kept, "noise": level, "model": name, "balanced": balanced}
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    lines = []
    for kept, level, name in product(KEPT, NOISE, MODELS):
        groups = [here(kept, level, name, balanced) for balanced in (False, True)]
        columns = [spread([row[part] for row in group], 1) for group in groups for part in ("rare", "common")]
        lines.append([f"{kept}", f"{level:.0%}", name, *columns])
    head = ["rows of a rare class", "noise", "loss", "rare", "common", "rare, weighted", "common, weighted"]
    return f"""# Do rare classes look like noise to a robust loss?

Accuracy on clean test labels of digits in %, separately for rare and for common classes:

{grid(head, lines, ["---:", "---:", "---", *["---:"] * 4])}

Mean ± sample standard deviation over {len(SEEDS)} seeds. The classes {", ".join(map(str, RARE))} are rare: of about
{TRAIN // CLASSES} rows to train on they keep as many as the first column says. Then labels become wrong at random, and
some common ones become rare ones: with 10 rows and any noise, or 30 and 40 %, more labels of a rare class are wrong
than right. The test rows are not cut. Weighted: `sample_weight=compute_sample_weight("balanced", y)`, by the noisy
labels. The network is the one that `audit` uses, with its default schedule.

{made_by(rows[0])}, scikit-learn {rows[0]["sklearn"]}, by `python benchmarks/rare_classes.py`.
"""


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is given
        return [row | made_on for setting in product(KEPT, NOISE, SEEDS) for row in run_one(*setting)]


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
