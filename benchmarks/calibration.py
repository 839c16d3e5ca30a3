"""Can you believe the probabilities of a classifier that was trained on noisy labels, and what helps if not?

    python benchmarks/calibration.py              (needs the extras sklearn and experiments)
    python benchmarks/calibration.py --render     writes the page again, from the rows

Such a classifier learns the probabilities of the noisy label. Measures accuracy, mean confidence and expected
calibration error on clean test labels of digits: as they come, calibrated on 100 clean rows by scikit-learn, and with
a known noise rate undone. Writes benchmarks/calibration.jsonl (one row per fit and remedy) and the page
benchmarks/calibration.md.
"""

import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import train_test_split

from bitempered import noise
from bitempered.experiments.report import grid, made_by, measure_or_render, spread
from bitempered.experiments.runs import provenance, today
from bitempered.sklearn import BiTemperedMLPClassifier

ROWS = Path(__file__).with_suffix(".jsonl")
CLASSES = 10
TRAIN, CLEAN = 1000, 100  # rows to train on, with noise, and rows to calibrate on, without; the rest are test rows
NOISE = (0.0, 0.2, 0.4)
SEEDS = range(5)
BINS = 15
MODELS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"t1": 1.0, "t2": 1.0},
    "default schedule": {},
    "(0.8, 1.2)": {"t1": 0.8, "t2": 1.2, "rescale": False},
}
REMEDIES = ("nothing", "sigmoid", "temperature", "noise undone")  # temperature needs scikit-learn 1.8

Row = dict[str, Any]


def calibration_error(p: np.ndarray, y: np.ndarray, bins: int = BINS) -> float:
    """The expected calibration error: the mean of abs(accuracy - mean confidence) over bins, weighted by their rows.

    The bins of the confidence, which is the largest probability, have equal widths and contain their upper ends.
    """
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    place = np.clip(np.ceil(confidence * bins) - 1, 0, bins - 1).astype(int)
    gaps = np.bincount(place, right - confidence, minlength=bins)  # times the rows of the bin
    return float(np.abs(gaps).sum() / len(y))


def undo_noise(p: np.ndarray, rate: float) -> np.ndarray:
    """The probabilities of the true label, if those of a label with symmetric noise are `p`.

    A true label c is kept with probability 1 - rate, and becomes each other class with rate / (K - 1).
    """
    other = rate / (p.shape[1] - 1)
    q = np.maximum((p - other) / (1 - rate - other), 0)
    return q / q.sum(axis=1, keepdims=True)


def run_one(name: str, rate: float, seed: int) -> list[Row]:
    X, y = load_digits(return_X_y=True)
    X = X / 16
    train, rest = train_test_split(np.arange(len(y)), train_size=TRAIN, stratify=y, random_state=seed)
    clean, test = train_test_split(rest, train_size=CLEAN, stratify=y[rest], random_state=seed)
    rng = np.random.default_rng(seed)
    noisy_train, noisy_test = (noise.symmetric(y[i], rate, rng=rng, num_classes=CLASSES) for i in (train, test))
    model = BiTemperedMLPClassifier(**MODELS[name], random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # max_iter epochs is what was asked for
        model.fit(X[train], noisy_train)
    p = model.predict_proba(X[test])
    by_remedy = {"nothing": p, "noise undone": undo_noise(p, rate)}
    for method in ("sigmoid", "temperature"):
        calibrated = CalibratedClassifierCV(FrozenEstimator(model), method=method).fit(X[clean], y[clean])
        by_remedy[method] = calibrated.predict_proba(X[test])
    return [
        {
            "noise": rate,
            "seed": seed,
            "model": name,
            "remedy": remedy,
            "accuracy": float(np.mean(by_remedy[remedy].argmax(axis=1) == y[test])),
            "confidence": float(by_remedy[remedy].max(axis=1).mean()),
            "calibration_error": calibration_error(by_remedy[remedy], y[test]),
            "calibration_error_noisy": calibration_error(by_remedy[remedy], noisy_test),
        }
        for remedy in REMEDIES
    ]


def page(rows: list[Row]) -> str:
    def values(column: str, rate: float, name: str, remedy: str) -> list[float]:
        wanted = (rate, name, remedy)
        return [row[column] for row in rows if (row["noise"], row["model"], row["remedy"]) == wanted]

    def between(column: str, remedy: str, rates: tuple[float, ...] = NOISE) -> str:
        means = [100 * mean(values(column, rate, name, remedy)) for rate in rates for name in MODELS]
        return f"{min(means):.0f} to {max(means):.0f} %"

    cells = [(rate, name) for rate in NOISE for name in MODELS]
    error, noisy_error = "calibration_error", "calibration_error_noisy"
    errors = grid(
        ["noise", "loss", "accuracy", "confidence", *(f"error: {remedy}" for remedy in REMEDIES)],
        [
            [f"{rate:.0%}", name]
            + [spread(values(column, rate, name, "nothing"), 1) for column in ("accuracy", "confidence")]
            + [spread(values(error, rate, name, remedy), 1) for remedy in REMEDIES]
            for rate, name in cells
        ],
    )
    others = grid(
        ["noise", "loss", "error on noisy test labels", *(f"accuracy: {remedy}" for remedy in REMEDIES)],
        [
            [f"{rate:.0%}", name, spread(values(noisy_error, rate, name, "nothing"), 1)]
            + [spread(values("accuracy", rate, name, remedy), 1) for remedy in REMEDIES]
            for rate, name in cells
        ],
    )
    noisy = NOISE[1:]
    return f"""# Are probabilities right after training on noisy labels?

Accuracy, mean confidence (the largest probability) and expected calibration error ({BINS} bins), all on clean test
labels, in %:

{errors}

**What to do.** Set {CLEAN} clean rows aside and use
`CalibratedClassifierCV(FrozenEstimator(model), method="temperature").fit(X_clean, y_clean)`: the error is then
{between(error, "temperature")} at every noise rate and loss, against {between(error, "nothing", noisy)} on noisy labels
without it, and no prediction changes. `method="sigmoid"` on the same rows leaves
{between(error, "sigmoid", noisy)}. If you have no clean rows but know the rate of symmetric noise, undo it:
{between(error, "noise undone", noisy)}. If you have neither, use the predicted class and not its probability.

The probabilities are nearer to those of the noisy label: against test labels with the same noise the error is
{between(noisy_error, "nothing", noisy)}, as the first column of the next table says. The default schedule ends with a
heavy tail, so that its probabilities are too low even without noise. Calibrated probabilities are the ordinary softmax
of the logits over one fitted temperature, not the tempered softmax.

{others}

Mean ± sample standard deviation over {len({row["seed"] for row in rows})} seeds, each with its own split of digits:
{TRAIN} noisy rows to train on, {CLEAN} clean ones to calibrate on, the others to test.
`BiTemperedMLPClassifier` with its default settings and `rescale=False`; its default schedule is the first leg of that
for networks.
Noise undone: q = max((p - r/(K-1)) / (1 - r K/(K-1)), 0) for the rate r and K classes, divided by its sum.

{made_by(rows[0])}, scikit-learn {rows[0]["sklearn"]}, by `python benchmarks/calibration.py`.
"""


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    rows = []
    for rate in NOISE:
        for name in MODELS:
            for seed in SEEDS:
                rows += [row | made_on for row in run_one(name, rate, seed)]
                print(rows[-len(REMEDIES)], flush=True)
    return rows


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
