"""Four kinds of classifier on digits with 40 % wrong labels, each with the logistic loss and the bi-tempered one.

    python benchmarks/estimators.py            (needs the extras sklearn, boosting and experiments)
    python benchmarks/estimators.py --render   writes the table again, from the rows

Training and validation labels are noisy, test labels clean. For each family and each loss the search tries TRIALS
settings, judged by noisy validation labels of seeds that are no part of the results: the same draws of everything but
the temperatures for both losses. The best one is then fitted for each of SEEDS. Goes on from
benchmarks/estimators.jsonl, which gets one row per fit (search rows without test accuracies, so that nothing can be
chosen on them), and writes the table benchmarks/estimators.md.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightgbm as lgb
import numpy as np
import sklearn
import torch
import xgboost as xgb
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from bitempered import noise
from bitempered.boosting import lightgbm_objective, xgboost_objective
from bitempered.experiments.data import Dataset, Part, Split, divide, fingerprint
from bitempered.experiments.files import read_rows, write_rows
from bitempered.experiments.report import measure_or_render, newest
from bitempered.experiments.runs import find, identity, provenance, today
from bitempered.sklearn import BiTemperedLogisticRegression, BiTemperedMLPClassifier

ROWS = Path(__file__).with_suffix(".jsonl")
NOISE = 0.4
CLASSES = 10
TEST_SPLIT = 2026  # the seed of the test rows
SEEDS = range(10)
SEARCH_SEEDS = (100, 101, 102)
TRIALS = 36
PAIRS = [(t1, t2) for t1 in (0.2, 0.5, 0.8) for t2 in (0.8, 1.2)]
LOSSES = ("logistic", "bi-tempered")
PACKAGES = {package.__name__: package.__version__ for package in (lgb, sklearn, xgb)}

Setting = dict[str, Any]
Row = dict[str, Any]
Predict = Callable[[np.ndarray], np.ndarray]  # features to class indices


def split_digits(seed: int) -> Split:
    """797 test rows, the same for every seed, 500 each to validate and to train, as in `bitempered compare`.

    But other test rows than there: with those the temperatures above and the ranges below were thought of.
    """
    pixels, labels = load_digits(return_X_y=True)
    rest, test = divide("digits", (pixels / 16).astype(np.float32), labels.astype(np.int64), 797, TEST_SPLIT)
    return Dataset("digits", rest, test, CLASSES, validation_rows=500).split(seed)


def linear(s: Setting, x: np.ndarray, y: np.ndarray) -> Predict:
    if s["loss"] == "logistic":
        return LogisticRegression(C=s["C"], max_iter=10_000).fit(x, y).predict
    model = BiTemperedLogisticRegression(s["t1"], s["t2"], C=s["C"], rescale=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # some C are too small to learn with: their score says so
        return model.fit(x, y).predict


def mlp(s: Setting, x: np.ndarray, y: np.ndarray) -> Predict:
    names = ("alpha", "learning_rate_init", "max_iter")
    options = {name: s[name] for name in names} | {"batch_size": 125, "hidden_layer_sizes": 256, "rescale": False}
    model = BiTemperedMLPClassifier(
        s["t1"], s["t2"], **options, tol=0.0, n_iter_no_change=s["max_iter"], random_state=s["seed"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # max_iter epochs is what was asked for
        return model.fit(x, y).predict


def xgboost(s: Setting, x: np.ndarray, y: np.ndarray) -> Predict:
    names = ("max_depth", "eta", "subsample", "colsample_bynode", "lambda", "min_child_weight")
    params = {name: s[name] for name in names} | {"num_class": CLASSES, "nthread": 1, "seed": s["seed"]}
    if s["loss"] == "logistic":
        booster = xgb.train(params | {"objective": "multi:softprob"}, xgb.DMatrix(x, y), s["rounds"])
    else:
        booster = xgb.train(params, xgb.DMatrix(x, y), s["rounds"], obj=xgboost_objective(s["t1"], s["t2"], CLASSES))
    return lambda x: booster.predict(xgb.DMatrix(x), output_margin=True).argmax(axis=1)


def lightgbm(s: Setting, x: np.ndarray, y: np.ndarray) -> Predict:
    names = ("num_leaves", "learning_rate", "bagging_fraction", "feature_fraction_bynode", "lambda_l2")
    params = {name: s[name] for name in (*names, "min_sum_hessian_in_leaf")}
    params |= {"num_class": CLASSES, "num_threads": 1, "seed": s["seed"], "bagging_freq": 1, "verbose": -1}
    objective = "multiclass" if s["loss"] == "logistic" else lightgbm_objective(s["t1"], s["t2"], CLASSES)
    booster = lgb.train(params | {"objective": objective}, lgb.Dataset(x, y), s["rounds"])
    return lambda x: booster.predict(x, raw_score=True).argmax(axis=1)


def draw(family: str, loss: str, trial: int) -> Setting:
    """The settings of a trial. Both losses draw the same, except for the temperatures and what scales with them."""
    rng = np.random.default_rng([trial, *family.encode()])

    def between(low: float, high: float) -> float:
        return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.2g}")

    def among(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    t1, t2 = (1.0, 1.0) if loss == "logistic" else PAIRS[trial % len(PAIRS)]
    setting = {"family": family, "loss": loss, "t1": t1, "t2": t2}
    # First gradients and second derivatives over those of the logistic loss: regularisation is relative to them. This
    # does what rescale=True would, so that the estimators have rescale=False.
    slope, curvature = CLASSES ** (t1 - t2), CLASSES ** (1 + t1 - 2 * t2)
    if family == "linear":
        return setting | {"C": 10 ** (5 * trial / (TRIALS - 1) - 3) / slope}  # alone, so on a grid
    if family == "mlp":
        return setting | {
            "max_iter": among(25, 50, 100),
            "learning_rate_init": between(1e-4, 1e-2),
            "alpha": between(1e-3, 10) * slope,
        }
    if family == "xgboost":
        return setting | {
            "rounds": among(25, 50, 100),
            "max_depth": among(2, 3, 4, 6),
            "eta": between(0.03, 0.3),
            "subsample": among(0.5, 0.75, 1.0),
            "colsample_bynode": among(0.1, 0.3, 1.0),
            "lambda": curvature * between(0.1, 100),
            "min_child_weight": curvature * between(0.3, 10),
        }
    return setting | {
        "rounds": among(25, 50, 100),
        "num_leaves": among(4, 8, 16, 31),
        "learning_rate": between(0.03, 0.3),
        "bagging_fraction": among(0.5, 0.75, 1.0),
        "feature_fraction_bynode": among(0.1, 0.3, 1.0),
        "lambda_l2": curvature * between(0.1, 100),
        "min_sum_hessian_in_leaf": curvature * between(0.3, 10),
    }


FAMILIES = {"linear": linear, "mlp": mlp, "xgboost": xgboost, "lightgbm": lightgbm}


def read(seed: int) -> tuple[Part, Part, Part]:
    """Return the rows to train and to validate on, with noisy labels, and the test rows."""
    split, rng = split_digits(seed), np.random.default_rng(seed)
    train, validation = (
        (x, noise.symmetric(y, NOISE, rng=rng, num_classes=CLASSES)) for x, y in (split.train, split.validation)
    )
    return train, validation, split.test


def run_one(setting: Setting, parts: tuple[Part, Part, Part]) -> Row:
    """Fit one model; a row of the search has no test accuracy."""
    (x, y), (validation_x, validation_y), (test_x, test_y) = parts
    started = time.perf_counter()
    predict = FAMILIES[setting["family"]](setting, x, y)
    row = {"seconds": round(time.perf_counter() - started, 3)}
    row["validation"] = float(np.mean(predict(validation_x) == validation_y))
    if setting["part"] == "result":
        row["test"] = float(np.mean(predict(test_x) == test_y))
    return row


def choose(searched: list[Row]) -> dict[tuple[str, str], Setting]:
    """Return the settings of each family and loss that are best on noisy validation labels; the first if tied."""
    chosen = {}
    for family in FAMILIES:
        for loss in LOSSES:
            names = list(draw(family, loss, 0))
            scores: dict[tuple[Any, ...], list[float]] = {}
            for row in searched:
                if (row["family"], row["loss"]) == (family, loss):
                    scores.setdefault(tuple(row[name] for name in names), []).append(row["validation"])
            best = max(scores, key=lambda values: mean(scores[values]))
            chosen[family, loss] = dict(zip(names, best, strict=True))
    return chosen


def page(rows: list[Row]) -> str:
    """Return the table, from the last row of each fit."""
    names = dict.fromkeys(name for family in FAMILIES for name in draw(family, "logistic", 0))
    last = newest(rows, ("part", "seed", *names), ())
    chosen = choose([row for row in last if row["part"] == "search"])
    tested = [row for row in last if row["part"] == "result"]
    results = {key: [row for row in tested if find([row], setting)] for key, setting in chosen.items()}
    return report(chosen, results, sum(row["seconds"] for row in last))


def report(chosen: dict[tuple[str, str], Setting], results: dict[tuple[str, str], list[Row]], seconds: float) -> str:
    lines = [["", *LOSSES, "difference", "temperatures"], ["---", *["---:"] * 4]]
    for family in FAMILIES:
        logistic, tempered = ([100 * row["test"] for row in results[family, loss]] for loss in LOSSES)
        difference = [b - a for a, b in zip(logistic, tempered, strict=True)]
        lines.append(
            [
                family,
                *(f"{mean(values):.1f} ± {stdev(values):.1f}" for values in (logistic, tempered)),
                f"{mean(difference):+.1f} ± {stdev(difference):.1f}",
                "({t1:g}, {t2:g})".format(**chosen[family, "bi-tempered"]),
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    settings = "\n".join(
        f"- {family}, {loss}: " + ", ".join(f"{k} {v:.3g}" for k, v in setting.items() if k not in ("family", "loss"))
        for (family, loss), setting in chosen.items()
    )
    rows = [row for rows in results.values() for row in rows]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    packages = ", ".join(f"{name} {rows[0][name]}" for name in ("bitempered", "torch", *PACKAGES))
    return f"""# Clean-test accuracy on digits with {NOISE:.0%} wrong labels, %

{table}

Mean ± sample standard deviation over {len(SEEDS)} seeds; the difference is taken seed by seed. Training and validation
labels are equally noisy (symmetric noise), test labels are clean. For each loss of each family {TRIALS} settings were
tried on {len(SEARCH_SEEDS)} other seeds, and the one with the best mean accuracy on noisy validation labels was taken:

{settings}

Made by benchmarks/estimators.py (commit {commits}) with {packages} on {rows[0]["device"]},
one thread, in {seconds / 60:.0f} minutes of fitting.
"""


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows = read_rows(ROWS)
    made_on = provenance() | PACKAGES | {"date": today()}

    def fit(setting: Setting) -> Row:
        parts = read(setting["seed"])
        run = identity(setting, fingerprint(*(array for part in parts for array in part)))
        row = find(rows, run)
        if row is None:
            row = run | run_one(setting, parts) | made_on
            rows.append(row)
            write_rows(ROWS, rows)
            print(row, flush=True)
        return row

    searched = [
        fit({"part": "search", "test_split": TEST_SPLIT, **draw(family, loss, trial), "seed": seed})
        for family in FAMILIES
        for loss in LOSSES
        for trial in range(TRIALS)
        for seed in SEARCH_SEEDS
    ]
    for setting in choose(searched).values():
        for seed in SEEDS:
            fit({"part": "result", "test_split": TEST_SPLIT, **setting, "seed": seed})
    return rows


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
