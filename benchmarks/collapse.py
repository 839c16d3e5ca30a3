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

from bitempered.experiments.data import fingerprint
from bitempered.experiments.files import read_rows, write_atomically, write_rows
from bitempered.experiments.report import grid, maker, newest
from bitempered.experiments.runs import find, identity, provenance, today
from bitempered.sklearn import BiTemperedLogisticRegression

ROWS = Path(__file__).with_suffix(".jsonl")
# Centres are uniform in a box of this half-width: the more classes, the larger, so that all are about as hard.
BOX = {2: 1.3, 3: 1.3, 10: 1.5, 30: 1.5, 100: 1.7}
T1 = (0.5, 0.8, 1.0)
T2 = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
# What a stronger penalty does: classes, half-width (the second time so small that half of the answers are wrong),
# weights of the loss, and pairs of temperatures.
STRONGER = [
    (30, 1.5, (1.0, 0.1, 0.01), ((0.8, 1.2), (0.8, 1.5), (0.5, 4.0))),
    (100, 1.1, (1.0, 0.01, 0.003, 0.0003), ((0.8, 1.2), (0.8, 2.0))),
]
FEATURES = 20
TRAIN, TEST = 50, 200  # rows of each class

Row = dict[str, Any]
Arrays = list[np.ndarray]


def blobs(classes: int, half_width: float) -> Arrays:
    """Training features, test features, training labels, test labels."""
    box = (-half_width, half_width)
    X, y = make_blobs((TRAIN + TEST) * classes, FEATURES, centers=classes, center_box=box, random_state=0)
    return train_test_split(X, y, train_size=TRAIN * classes, stratify=y, random_state=0)


def setting(classes: int, half_width: float, pair: tuple[float, float] | None, C: float = 1.0) -> Row:
    t1, t2 = pair or (None, None)
    name = "BiTemperedLogisticRegression" if pair else "LogisticRegression"
    return {"classes": classes, "model": name, "t1": t1, "t2": t2, "half_width": half_width, "C": C}


def settings() -> list[Row]:
    pairs = [None, *((t1, t2) for t1 in T1 for t2 in T2)]
    grid_of_pairs = [setting(classes, half_width, pair) for classes, half_width in BOX.items() for pair in pairs]
    return grid_of_pairs + [
        setting(classes, half_width, pair, C)
        for classes, half_width, weights, pairs in STRONGER
        for pair in (None, *pairs)
        for C in weights
    ]


def fit(wanted: Row, data: Arrays) -> Row:
    X, test_X, y, test_y = data
    if wanted["model"] == "LogisticRegression":
        model = LogisticRegression(C=wanted["C"], max_iter=10_000)
    else:
        model = BiTemperedLogisticRegression(wanted["t1"], wanted["t2"], C=wanted["C"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y)
    predicted = model.predict(test_X)
    return {
        "accuracy": float(np.mean(predicted == test_y)),
        "train_accuracy": model.score(X, y),
        "never_predicted": wanted["classes"] - len(np.unique(predicted)),
        "n_iter": int(model.n_iter_[0]),
        "warnings": [str(warning.message) for warning in caught if warning.category is ConvergenceWarning],
    }


def page(rows: list[Row]) -> str:
    rows = newest(rows, ("classes", "model", "t1", "t2", "half_width", "C"), ())
    first = [row for row in rows if row["C"] == 1 and row["half_width"] == BOX[row["classes"]]]
    ours = [row for row in first if row["t1"] is not None]
    base = {row["classes"]: row for row in first if row["t1"] is None}
    lines = [
        [f"{classes}", f"{t1:g}"]
        + [format_row(find(rows, setting(classes, BOX[classes], (t1, t2)))) for t2 in T2]
        + [f"{100 * base[classes]['accuracy']:.1f}"]
        for classes in base
        for t1 in T1
    ]
    table = grid(["classes", "t1", *(f"t2 = {t2:g}" for t2 in T2), "LogisticRegression"], lines)
    weights = list(dict.fromkeys(C for _, _, some, _ in STRONGER for C in some))
    stronger = grid(
        ["classes", "half-width", "", *(f"C = {C:g}" for C in weights)],
        [
            [f"{classes}", f"{half_width:g}", "({:g}, {:g})".format(*pair) if pair else "LogisticRegression"]
            + [both(find(rows, setting(classes, half_width, pair, C))) for C in weights]
            for classes, half_width, _, pairs in STRONGER
            for pair in (None, *pairs)
        ],
    )
    warned = [row for row in ours if row["warnings"]]
    lost = [row for row in ours if row["never_predicted"]]
    silent = [row for row in lost if not row["warnings"]]
    furthest = []
    for classes, logistic in base.items():
        row = min((row for row in ours if row["classes"] == classes), key=lambda row: row["accuracy"])
        furthest.append(
            f"- {classes} classes: {100 * row['accuracy']:.1f} at ({row['t1']:g}, {row['t2']:g}), against"
            f" {100 * logistic['accuracy']:.1f}; on training rows {100 * row['train_accuracy']:.1f}, against"
            f" {100 * logistic['train_accuracy']:.1f}; {row['n_iter']} iterations"
        )
    least = "\n".join(furthest)
    commits = "commit " + ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"""# Does the linear estimator collapse? Test accuracy at its default C, %

{table}

\\* a ConvergenceWarning: the iterations ran out, or not all classes were learnt.

Of {len(ours)} fits, {len(lost)} never predict one of the classes ({len(silent)} without a warning), and
{len(warned)} warned. The least accurate beside LogisticRegression:

{least}

Where the bi-tempered fits are behind, they overfit: they are better on the training rows. `rescale` makes C mean the
same where all probabilities are equal. Away from there the loss is steeper, and the same C penalises less. So search C,
and towards smaller values, but not too far: with 100 close classes the smallest ones below give classes up, with a
warning, where LogisticRegression does not. Test accuracy (training accuracy) by C, also for blobs so close that
LogisticRegression gets half of them wrong, where a heavy tail costs most:

{stronger}

Gaussian blobs of standard deviation 1 in {FEATURES} dimensions, {TRAIN} rows of each class to train and {TEST} to test,
no label noise, one draw for each number of classes, their centres uniform in a cube of a half-width of
{", ".join(f"{half_width:g} ({classes})" for classes, half_width in BOX.items())}.
Both estimators have an intercept, and C = 1 in the first table; ours has its default `rescale=True`.

{maker(rows[0], commits)}, scikit-learn {rows[0]["sklearn"]}, {rows[-1]["date"]}, by
`python benchmarks/collapse.py`.
"""


def format_row(row: Row | None) -> str:
    if row is None:
        return "–"
    lost = f" ({row['never_predicted']} lost)" if row["never_predicted"] else ""
    return f"{100 * row['accuracy']:.1f}{lost}{' *' if row['warnings'] else ''}"


def both(row: Row | None) -> str:
    if row is None:
        return "–"
    lost = f", {row['never_predicted']} lost" if row["never_predicted"] else ""
    return f"{100 * row['accuracy']:.1f} ({100 * row['train_accuracy']:.1f}){lost}{' *' if row['warnings'] else ''}"


def read() -> list[Row]:
    # The first rows were made when there was no choice of these.
    return [{"half_width": BOX[row["classes"]], "C": 1.0} | row for row in read_rows(ROWS)]


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    rows = read()
    for wanted in settings():
        data = blobs(wanted["classes"], wanted["half_width"])
        run = identity(wanted, fingerprint(*data))
        if find(rows, run) is None:
            rows.append(run | fit(wanted, data) | made_on)
            write_rows(ROWS, rows)
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", action="store_true", help="write the page from the rows, without fitting")
    rows = read() if parser.parse_args().render else measure()
    write_atomically(ROWS.with_suffix(".md"), page(rows).encode())


if __name__ == "__main__":
    main()
