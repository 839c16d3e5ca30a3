"""Measure BiTemperedLogisticRegression beside LogisticRegression, in one run on one machine.

    python benchmarks/logistic_regression.py
    python benchmarks/logistic_regression.py --render     writes the page again, from the rows

Fits 10,000 examples of 100 features in 10 classes to a tolerance of 1e-8, the contenders taking turns. Writes
benchmarks/logistic_regression.jsonl (one row per contender, with versions) and the table
benchmarks/logistic_regression.md.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_info

from bitempered.experiments.report import measure_or_render
from bitempered.experiments.runs import commit
from bitempered.sklearn import BiTemperedLogisticRegression

ROWS = Path(__file__).with_suffix(".jsonl")
ROUNDS = 11
TOL = 1e-8
VERSIONS = ("numpy", "scipy", "scikit-learn")
BASE = "LogisticRegression, lbfgs"
CONTENDERS = {
    BASE: LogisticRegression(tol=TOL, max_iter=10_000),
    "LogisticRegression, newton-cholesky": LogisticRegression(tol=TOL, max_iter=10_000, solver="newton-cholesky"),
    "BiTemperedLogisticRegression, (1, 1)": BiTemperedLogisticRegression(1.0, 1.0, tol=TOL),
    "BiTemperedLogisticRegression, (0.8, 1.2)": BiTemperedLogisticRegression(0.8, 1.2, tol=TOL),
}

Row = dict[str, Any]


def measure() -> list[Row]:
    X, y = make_classification(10_000, 100, n_informative=30, n_redundant=20, n_classes=10, flip_y=0.05, random_state=0)
    taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(ROUNDS + 1):
        for name, model in CONTENDERS.items():
            start = time.perf_counter()
            model.fit(X, y)
            if repeat:  # the first round warms up
                taken[name].append(time.perf_counter() - start)
    made_on = {
        "commit": commit(),
        "date": date.today().isoformat(),
        "device": f"cpu {platform.machine()}, {os.cpu_count()} cores,"
        f" {max(pool['num_threads'] for pool in threadpool_info())} threads",
        **{name: importlib.metadata.version(name) for name in VERSIONS},
    }
    rows: list[Row] = []
    for name, model in CONTENDERS.items():
        seconds = taken[name]
        rows.append(
            {
                "contender": name,
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "times_lbfgs": statistics.median(seconds) / statistics.median(taken[BASE]),
                "rounds": ROUNDS,
                "n_iter": int(model.n_iter_[0]),
                "coef_difference": float(abs(model.coef_ - CONTENDERS[BASE].coef_).max()),
                **made_on,
            }
        )
        print(json.dumps(rows[-1]))
    return rows


def page(rows: list[Row]) -> str:
    table = [
        "| | seconds: median (least to most) | over lbfgs | iterations | coefficients differ from it by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        table.append(
            f"| {row['contender']} | {row['median_s']:.2f} ({row['min_s']:.2f} to {row['max_s']:.2f})"
            f" | {row['times_lbfgs']:.2f} | {row['n_iter']} | {row['coef_difference']:.1g} |"
        )
    first = rows[0]
    made = ", ".join(f"{name} {first[name]}" for name in ("commit", *VERSIONS))
    table += ["", f"{first['rounds']} rounds in turns, {made}, {first['device']}, {first['date']}.", ""]
    return "\n".join(table)


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
