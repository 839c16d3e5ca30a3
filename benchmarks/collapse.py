"""Fit BiTemperedLogisticRegression at its default C with temperatures far from 1 and many classes: does it learn?

    python benchmarks/collapse.py              (needs the extras sklearn and experiments)
    python benchmarks/collapse.py --render     writes the page again, from the rows

Gaussian blobs without label noise, which LogisticRegression gets 80 to 95 % right. A collapsed fit predicts one class,
or never predicts some of them; a silent one does so without a ConvergenceWarning. Goes on from
benchmarks/collapse.jsonl, which gets one row per fit, and writes the page benchmarks/collapse.md.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.datasets import make_blobs
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from bitempered.experiments.files import read_rows, write_atomically, write_rows
from bitempered.experiments.report import grid, made_by
from bitempered.experiments.runs import find, provenance, today
from bitempered.sklearn import BiTemperedLogisticRegression

ROWS = Path(__file__).with_suffix(".jsonl")
# Centres are uniform in a box of this half-width: the more classes, the larger, so that all are about as hard.
BOX = {2: 1.3, 3: 1.3, 10: 1.5, 30: 1.5, 100: 1.7}
T1 = (0.5, 0.8, 1.0)
T2 = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
FEATURES = 20
TRAIN, TEST = 50, 200  # rows of each class

Row = dict[str, Any]
Arrays = list[np.ndarray]


def blobs(classes: int) -> Arrays:
    """Training features, test features, training labels, test labels."""
    box = (-BOX[classes], BOX[classes])
    X, y = make_blobs((TRAIN + TEST) * classes, FEATURES, centers=classes, center_box=box, random_state=0)
    return train_test_split(X, y, train_size=TRAIN * classes, stratify=y, random_state=0)


def settings(classes: int) -> list[Row]:
    pairs = [(t1, t2) for t1 in T1 for t2 in T2]
    base = {"classes": classes, "model": "LogisticRegression", "t1": None, "t2": None}
    ours = {"classes": classes, "model": "BiTemperedLogisticRegression"}
    return [base, *(ours | {"t1": t1, "t2": t2} for t1, t2 in pairs)]


def fit(setting: Row, data: Arrays) -> Row:
    X, test_X, y, test_y = data
    if setting["model"] == "LogisticRegression":
        model = LogisticRegression(max_iter=10_000)
    else:
        model = BiTemperedLogisticRegression(setting["t1"], setting["t2"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y)
    predicted = model.predict(test_X)
    return setting | {
        "accuracy": float(np.mean(predicted == test_y)),
        "train_accuracy": model.score(X, y),
        "never_predicted": setting["classes"] - len(np.unique(predicted)),
        "n_iter": int(model.n_iter_[0]),
        "warnings": [str(warning.message) for warning in caught if warning.category is ConvergenceWarning],
    }


def page(rows: list[Row]) -> str:
    ours = [row for row in rows if row["t1"] is not None]
    base = {row["classes"]: row for row in rows if row["t1"] is None}
    by_pair = {(row["classes"], row["t1"], row["t2"]): row for row in ours}
    lines = []
    for classes in base:
        for t1 in T1:
            cells = [show(by_pair[classes, t1, t2]) for t2 in T2]
            lines.append([f"{classes}", f"{t1:g}", *cells, f"{100 * base[classes]['accuracy']:.1f}"])
    table = grid(["classes", "t1", *(f"t2 = {t2:g}" for t2 in T2), "LogisticRegression"], lines)
    warned = [row for row in ours if row["warnings"]]
    lost = [row for row in ours if row["never_predicted"]]
    silent = [row for row in lost if not row["warnings"]]
    behind = sorted(ours, key=lambda row: row["accuracy"] - base[row["classes"]]["accuracy"])
    worst = "\n".join(
        f"- {row['classes']} classes at ({row['t1']:g}, {row['t2']:g}): {100 * row['accuracy']:.1f} against"
        f" {100 * base[row['classes']]['accuracy']:.1f}, {row['n_iter']} iterations"
        f"{', with a warning' if row['warnings'] else ''}"
        for row in behind[:5]
    )
    return f"""# Does the linear estimator collapse? Test accuracy at its default C, %

{table}

\\* a ConvergenceWarning: the iterations ran out, or not all classes were learnt.

Of {len(ours)} fits, {len(lost)} never predict one of the classes, {len(silent)} of them without a warning;
{len(warned)} warn. Furthest behind LogisticRegression:

{worst}

Gaussian blobs of standard deviation 1 in {FEATURES} dimensions, {TRAIN} rows of each class to train and {TEST} to test,
no label noise, one draw for each number of classes. Both estimators have C = 1 and an intercept; ours has its default
`rescale=True`.

{made_by(rows[-1])}, scikit-learn {rows[-1]["sklearn"]}, by `python benchmarks/collapse.py`.
"""


def show(row: Row) -> str:
    lost = f" ({row['never_predicted']} lost)" if row["never_predicted"] else ""
    return f"{100 * row['accuracy']:.1f}{lost}{' *' if row['warnings'] else ''}"


def measure(rows: list[Row]) -> list[Row]:
    torch.set_num_threads(1)
    origin = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    made = []
    for classes in BOX:
        data = blobs(classes)
        for setting in settings(classes):
            row = find(rows, setting)
            if row is None:
                row = fit(setting, data) | origin
                rows.append(row)
                write_rows(ROWS, rows)
                print(row, flush=True)
            made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", action="store_true", help="write the page from the rows, without fitting")
    rows = read_rows(ROWS)
    if not parser.parse_args().render:
        rows = measure(rows)
    write_atomically(ROWS.with_suffix(".md"), page(rows).encode())


if __name__ == "__main__":
    main()
